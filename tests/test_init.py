"""How ranks find each other and choose what they move data with: init, rendezvous, devices, starts and stops."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import statexchange as sx
from statexchange.comm import world
from statexchange.comm.control_page import pid_namespace
from statexchange.testing import run_ranks


def me() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def by_hand(url: str, backend: str = "auto", timeout_s: float = 20.0) -> sx.Communicator:
    rank, size = me()
    return sx.init(backend, rendezvous=url, rank=rank, world_size=size, timeout_s=timeout_s)


def facts(comm: sx.Communicator) -> list[Any]:
    total = comm.all_reduce(torch.full((5,), float(comm.rank + 1)))
    return [comm.backend, comm.rank, comm.world_size, comm.local_rank, comm.num_nodes, float(total[0])]


# Rendezvous


def meets(url: str, backend: str) -> list[Any]:
    comm = by_hand(url, backend)
    found = facts(comm)
    sx.shutdown()
    return found


@pytest.mark.parametrize(("backend", "name"), [("auto", "shm"), ("shm", "shm"), ("gloo", "gloo")])
def test_ranks_started_by_hand_meet_in_a_directory(backend: str, name: str, tmp_path: Path) -> None:
    found = run_ranks(meets, 3, backend="processes", args=(f"file://{tmp_path}/new/meeting", backend))
    assert found == [[name, rank, 3, rank, 1, 6.0] for rank in range(3)]
    assert [p for p in (tmp_path / "new/meeting").iterdir() if not p.name.startswith("store-")] == []


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_ranks_started_by_hand_meet_at_an_address() -> None:
    found = run_ranks(meets, 2, backend="processes", args=(f"tcp://127.0.0.1:{free_port()}", "auto"))
    assert found == [["shm", rank, 2, rank, 1, 3.0] for rank in range(2)]


def test_what_a_crashed_run_has_left_is_not_taken_for_fresh(tmp_path: Path) -> None:
    for rank in range(2):
        for host, pid in (("another host", 1), (world.host_identity(), 2**22 - 1)):
            nonce = f"{rank}{pid:x}".ljust(32, "0")
            stale = {"host": host, "namespace": pid_namespace(), "pid": pid, "start": 1, "count": 7, "world_size": 2}
            (tmp_path / f"hello-{rank}-{nonce}.json").write_text(json.dumps(stale))
    (tmp_path / "answer-00000000000000000000000000000000.json").write_text(json.dumps(["0" * 32, "1" * 32]))
    found = run_ranks(meets, 2, backend="processes", args=(f"file://{tmp_path}", "shm"))
    assert [row[0] for row in found] == ["shm", "shm"]


def dies_while_meeting(directory: str, kill: bool) -> list[Any]:
    if kill and me()[0] == 1:
        import threading

        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        return [by_hand(f"file://{directory}").rank, time.sleep(5)]
    if kill and me()[0] == 2:
        time.sleep(3)
        return []
    if kill:
        with pytest.raises(sx.StallError, match=r"ranks \[1, 2\] did not come to .* in 1.5 s"):
            by_hand(f"file://{directory}", timeout_s=1.5)
        return []
    return facts(by_hand(f"file://{directory}"))


def test_a_run_after_a_crash_in_the_meeting_works(tmp_path: Path) -> None:
    outcomes = run_ranks(dies_while_meeting, 3, backend="processes", args=(str(tmp_path), True), allow_failure=True)
    assert outcomes[0].state == "ok", outcomes
    assert len(run_ranks(dies_while_meeting, 3, backend="processes", args=(str(tmp_path), False))) == 3


def same_rank(directory: str) -> str:
    with pytest.raises(sx.StateExchangeError) as caught:
        sx.init(rendezvous=f"file://{directory}", rank=0 if me()[0] == 0 else 1, world_size=3, timeout_s=2)
    return str(caught.value)


def test_two_processes_of_one_rank_are_found_out(tmp_path: Path) -> None:
    said = run_ranks(same_rank, 3, backend="processes", args=(str(tmp_path),))
    assert "two processes call themselves rank 1" in said[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rendezvous": "s3://bucket", "rank": 0, "world_size": 2}, "must be file:///directory or tcp://host:port"),
        ({"rendezvous": "file://relative", "rank": 0, "world_size": 2}, "must be file:///directory"),
        ({"rendezvous": "tcp://host", "rank": 0, "world_size": 2}, "must be file:///directory or tcp://host:port"),
        ({"rendezvous": "file:///tmp/x"}, "needs rank and world_size"),
        ({"rendezvous": "file:///tmp/x", "rank": 2, "world_size": 2}, "0 <= rank < world_size"),
        ({"rank": 0, "world_size": 2}, "come with a rendezvous"),
        ({"backend": "mpi", "rendezvous": "file:///tmp/x"}, "mpi backend takes no rendezvous"),
        ({"check": "shapes"}, "check must be 'auto' or 'off'"),
    ],
)
def test_arguments_that_cannot_be_right(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sx.init(**arguments)
    assert not sx.is_initialized()


def test_nobody_listens_at_the_address() -> None:
    began = time.monotonic()
    with pytest.raises(sx.NotInitializedError, match=r"cannot reach rank 0 at tcp://127.0.0.1"):
        sx.init(rendezvous=f"tcp://127.0.0.1:{free_port()}", rank=1, world_size=2, timeout_s=1)
    assert time.monotonic() - began < 20


# Before, twice, and after


def twice() -> list[Any]:
    import logging

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("statexchange").addHandler(handler)
    before = [sx.get_rank(), sx.get_world_size(), sx.get_backend(), sx.is_initialized()]
    first = sx.init(devices=False, timeout_s=7)
    assert sx.init() is first
    assert sx.init(timeout_s=7, devices=False) is first
    assert said == []
    assert sx.init("single", timeout_s=8) is first
    sx.shutdown()
    assert (sx.get_rank(), sx.get_world_size(), sx.is_initialized()) == (0, 1, False)
    return [before, said]


def test_init_is_idempotent_and_a_different_one_warns() -> None:
    for before, said in run_ranks(twice, 2, backend="mpi"):
        assert before == [0, 1, "single", False]
        (line,) = said
        assert "backend='single', timeout_s=8 is not used" in line


STARTS = """
import os, sys
import torch
import statexchange as sx
for i in range(20):
    comm = sx.init(sys.argv[1])
    t = torch.ones(100_000)
    comm.all_reduce(t, async_op=i % 2 == 0)
    comm.wait_all()
    assert float(t[-1]) == comm.world_size, t
    if comm.world_size > 1:
        comm.empty((1000,), torch.float32)
        assert comm.split(0, -comm.rank).rank == comm.world_size - 1 - comm.rank
    sx.shutdown()
if sys.argv[1] == "gloo":
    torch.distributed.destroy_process_group()
print("done", flush=True)
"""


def start_stop(backend: str, launcher: list[str], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(STARTS)
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [*launcher, str(script), backend]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environ)


def beside(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


@pytest.mark.parametrize(
    ("backend", "launcher", "ranks"),
    [
        ("single", [sys.executable], 1),
        ("mpi", [beside("mpiexec"), "-n", "2", sys.executable], 2),
        ("auto", [beside("mpiexec"), "-n", "2", sys.executable], 2),
        ("gloo", [beside("mpiexec"), "-n", "2", sys.executable], 2),
        ("shm", [beside("torchrun"), "--nproc-per-node", "2"], 2),
    ],
)
def test_twenty_starts_and_stops_leave_nothing(backend: str, launcher: list[str], ranks: int, tmp_path: Path) -> None:
    done = start_stop(backend, launcher, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == ranks
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("statexchange-")]


# Launchers


@pytest.mark.parametrize("missing", [True, False])
def test_slurm_needs_to_be_told_where_to_meet(missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1"}.items():
        monkeypatch.setenv(name, value)
    if not missing:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(free_port()))
    expected = "set MASTER_ADDR and MASTER_PORT" if missing else "cannot reach rank 0 at tcp://127.0.0.1"
    with pytest.raises(sx.NotInitializedError, match=expected):
        sx.init(timeout_s=1)


def under_slurm(port: int) -> list[Any]:
    rank, size = me()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    os.environ.update(SLURM_PROCID=str(rank), SLURM_STEP_NUM_TASKS=str(size), SLURM_LOCALID=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return facts(sx.init())


def test_ranks_of_slurm_meet_at_the_master() -> None:
    assert [row[0] for row in run_ranks(under_slurm, 2, backend="processes", args=(free_port(),))] == ["shm", "shm"]


def test_an_mpiexec_of_another_mpi_is_found_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As when Open MPI's mpiexec starts a Python whose mpi4py found MPICH: each rank would be a world of one."""
    script = "import statexchange as sx; sx.init('mpi')"
    environ = {**os.environ, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environ)
    assert done.returncode != 0
    assert "OMPI_COMM_WORLD_SIZE" in done.stderr
    assert "NotInitializedError" in done.stderr


# Devices


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_without_a_gpu_says_what_to_install() -> None:
    with pytest.raises((sx.MissingExtraError, sx.UnsupportedError), match="CUDA build of torch"):
        sx.init("nccl")
    assert not sx.is_initialized()


def chooses(devices: Any) -> Any:
    try:
        return str(sx.init("auto", devices=devices).device)
    except ValueError as error:
        return str(error)


def test_each_rank_gets_its_device_or_all_an_error() -> None:
    assert run_ranks(chooses, 2, backend="mpi", args=(["cpu", "cpu"],)) == ["cpu", "cpu"]
    assert run_ranks(chooses, 2, backend="mpi", args=(False,)) == ["cpu", "cpu"]
    for said in run_ranks(chooses, 2, backend="mpi", args=(["cpu"],)):
        assert "devices=['cpu'] has no device for local_rank 1" in said
    for said in run_ranks(chooses, 2, backend="mpi", args=(["cpu", "toaster"],)):
        assert "'toaster' is no device" in said


# Shared memory alone


def sockets() -> set[str]:
    inodes = {str(Path(f"/proc/self/fd/{fd}").resolve()) for fd in os.listdir("/proc/self/fd")}
    return {inode for inode in inodes if "socket:" in inode}


def without_sockets(url: str) -> int:
    before = sockets()
    assert before  # the launcher's pipe is one: they are seen
    comm = by_hand(url, "shm")
    made: list[str] = []
    sys.addaudithook(lambda event, _args: made.append(event) if event.startswith("socket.") else None)
    for elements in (10, 100_000, 1_000_000):
        t = torch.ones(elements)
        comm.all_reduce(t)
        comm.all_gather(t)
        comm.reduce_scatter(t.repeat(comm.world_size))
        comm.all_reduce(comm.empty((elements,), torch.float32).fill_(1))
        comm.all_to_all([t] * comm.world_size)
        work = comm.send(t, (comm.rank + 1) % 2, async_op=True)
        comm.recv(t.clone(), (comm.rank + 1) % 2)
        work.wait()
        assert sockets() <= before
    assert made == []
    return 1


def test_no_socket_is_used_during_collectives_in_shared_memory(tmp_path: Path) -> None:
    assert run_ranks(without_sockets, 2, backend="processes", args=(f"file://{tmp_path}",)) == [1, 1]


def drop_ptrace(libc: Any) -> None:
    import ctypes

    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0
    data[0] &= ~(1 << 19)
    data[1] &= ~(1 << 19)
    assert libc.capset(header, data) == 0


def hides(kind: str, url: str) -> list[Any]:
    """Ranks that cannot, or can hardly, see each other's memory."""
    import ctypes
    import logging

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("statexchange").addHandler(handler)
    libc = ctypes.CDLL(None, use_errno=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if kind != "own /proc":
        assert libc.prctl(4, 0, 0, 0, 0) == 0  # PR_SET_DUMPABLE: others may not look into /proc/<pid>/fd,
        drop_ptrace(libc)  # which root only may because of this
    else:
        assert libc.unshare(0x00020000) == 0  # CLONE_NEWNS
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    if kind == "own /proc":
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/proc"], check=True)
    comm = by_hand(url)
    t = comm.all_reduce(torch.ones(3_000_000))
    assert float(t[-1]) == 2
    room = 40 << 20 if kind == "small /dev/shm" else 1000
    return [comm.backend, len(said), float(comm.all_reduce(comm.empty((room,), torch.uint8).fill_(1))[0]), len(said)]


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces and other users need root")
@pytest.mark.parametrize("kind", ["own /proc", "not dumpable"])
def test_ranks_that_hide_from_each_other_fall_back_together_with_one_warning(kind: str, tmp_path: Path) -> None:
    found = run_ranks(hides, 2, backend="processes", args=(kind, f"file://{tmp_path}/meeting"))
    name = "shm" if kind == "not dumpable" else "gloo"
    assert found == [[name, int(name == "gloo"), 2.0, int(name == "gloo")], [name, 0, 2.0, 0]]
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("statexchange-")]


SMALL = """
import sys
from statexchange.testing import run_ranks
sys.path.insert(0, sys.argv[1])
import test_init
if __name__ == "__main__":
    print(run_ranks(test_init.hides, 2, backend="processes", args=("not dumpable", sys.argv[2]), timeout_s=60))
    print(run_ranks(test_init.hides, 2, backend="processes", args=("small /dev/shm", sys.argv[2]), timeout_s=60))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces and other users need root")
def test_a_small_dev_shm_is_no_harm(tmp_path: Path) -> None:
    """64 MB of /dev/shm, which only ranks that may not open each other's memory use: two times 40 MiB do not fit."""
    script = tmp_path / "script.py"
    script.write_text(SMALL)
    mounted = "mount --make-rprivate / && mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "
    run = f"{mounted} {sys.executable} {script} {Path(__file__).parent} file://{tmp_path}/meeting"
    done = subprocess.run(["unshare", "-m", "sh", "-c", run], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "[['shm', 0, 2.0, 0], ['shm', 0, 2.0, 0]]",
        "[['shm', 0, 2.0, 1], ['shm', 0, 2.0, 0]]",
    ]


APART = """
import sys
import torch
import statexchange as sx
comm = sx.init(rendezvous=sys.argv[1], rank=int(sys.argv[2]), world_size=2, timeout_s=30)
print(comm.backend, comm.all_reduce(torch.ones(100_000))[-1].item(), flush=True)
sx.shutdown()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")
def test_ranks_of_different_pid_namespaces_meet_and_fall_back(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(APART)
    apart = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, str(tmp_path / "script.py")]
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*apart, f"file://{tmp_path}/meeting", str(rank)], stdout=subprocess.PIPE, text=True, env=environ
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert said == ["gloo 2.0\n", "gloo 2.0\n"]
    assert [rank.returncode for rank in ranks] == [0, 0]
