"""init: the choice of the backend: shared memory, sockets, torch's groups."""

import ctypes
import gc
import os
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from initialising import init_as, init_by_hand, log_messages, rank_and_size, rendezvous_of
from ports import free_port
from shared_names import no_names_left
from starting import start
from sweeps import slow
from warm_python import warm_python

import statexchange as sx
from statexchange.comm.backends.gloo import GlooBackend
from statexchange.testing import run_ranks

# Shared memory alone


def sockets() -> set[str]:
    inodes = {str(Path(f"/proc/self/fd/{fd}").resolve()) for fd in os.listdir("/proc/self/fd")}
    return {inode for inode in inodes if "socket:" in inode}


def reduces_without_sockets(url: str) -> int:
    comm = init_by_hand(url, "shm")
    before = sockets()  # the pipe of the launcher, and the store's socket, which only new groups use
    assert before
    sockets_made: list[str] = []
    sys.addaudithook(lambda event, _args: sockets_made.append(event) if event.startswith("socket.") else None)
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
    assert sockets_made == []
    return 1


def test_no_socket_is_used_during_collectives_in_shared_memory(tmp_path: Path) -> None:
    assert run_ranks(reduces_without_sockets, 2, backend="processes", args=(f"file://{tmp_path}",)) == [1, 1]


def drop_ptrace(libc: Any) -> None:
    """Give up CAP_SYS_PTRACE, by which root may open the memory of any process."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0
    data[0] &= ~(1 << 19)
    data[1] &= ~(1 << 19)
    assert libc.capset(header, data) == 0


def reduces_hidden(kind: str, url: str) -> list[Any]:
    """Reduce on ranks that cannot see each other's memory."""
    logged = log_messages()
    libc = ctypes.CDLL(None, use_errno=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if kind != "own /proc":
        assert libc.prctl(4, 0, 0, 0, 0) == 0  # PR_SET_DUMPABLE: other processes may not read /proc/<pid>/fd,
        drop_ptrace(libc)  # which root may only with this capability
    else:
        assert libc.unshare(0x00020000) == 0  # CLONE_NEWNS
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    if kind == "own /proc":
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/proc"], check=True)
    comm = init_by_hand(url)
    t = comm.all_reduce(torch.ones(3_000_000))
    assert float(t[-1]) == 2
    return [
        comm.backend,
        len(logged),
        float(comm.all_reduce(comm.empty((1000,), torch.uint8).fill_(1))[0]),
        len(logged),
    ]


@pytest.mark.usefixtures("mounts")
@pytest.mark.parametrize("kind", ["own /proc", "not dumpable"])
def test_ranks_that_cannot_see_each_other_all_fall_back_with_one_warning(kind: str, tmp_path: Path) -> None:
    with no_names_left():
        found = run_ranks(reduces_hidden, 2, backend="processes", args=(kind, f"file://{tmp_path}/meeting"))
    assert found == [["gloo", 1, 2.0, 1], ["gloo", 0, 2.0, 0]]


def reduces_on_arm(url: str) -> list[Any]:
    """Reduce on ranks whose processor is said to be another."""
    logged = log_messages()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    platform.machine = lambda: "aarch64"  # type: ignore[assignment]
    comm = init_by_hand(url)
    return [comm.backend, float(comm.all_reduce(torch.ones(3))[0]), logged]


def test_ranks_on_a_processor_that_may_reorder_stores_use_sockets(tmp_path: Path) -> None:
    first, second = run_ranks(reduces_on_arm, 2, backend="processes", args=(f"file://{tmp_path}/meeting",))
    assert (first[:2], second) == (["gloo", 2.0], ["gloo", 2.0, []])
    (warning,) = first[2]
    assert "aarch64 may reorder stores" in warning


IN_A_PID_NAMESPACE = """
import ctypes, os, subprocess, sys
import torch
import statexchange as sx
clone_newns, clone_newpid = 0x00020000, 0x20000000
assert ctypes.CDLL(None).unshare(clone_newns | clone_newpid) == 0
child = os.fork()
if child:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
subprocess.run("mount --make-rprivate / && mount -t proc proc /proc", shell=True, check=True)
assert os.getpid() == int(os.readlink("/proc/self")) == 1
comm = sx.init(rendezvous=sys.argv[1], rank=int(sys.argv[2]), world_size=2, timeout_s=30)
print(comm.backend, comm.all_reduce(torch.ones(100_000))[-1].item(), flush=True)
sx.shutdown()
"""


@pytest.mark.usefixtures("mounts")
def test_ranks_of_different_pid_namespaces_fall_back(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(IN_A_PID_NAMESPACE)
    apart = [warm_python(), str(tmp_path / "script.py")]
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*apart, f"file://{tmp_path}/meeting", str(rank)], stdout=subprocess.PIPE, text=True, env=environ
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert outputs == ["gloo 2.0\n", "gloo 2.0\n"]
    assert [rank.returncode for rank in ranks] == [0, 0]


def waits_for_rank_1(kind: str, place: str, timeouts_s: list[float]) -> list[Any]:
    if kind == "mpi":
        from mpi4py import MPI

        rank = MPI.COMM_WORLD.Get_rank()
    else:
        rank = rank_and_size()[0]
    if rank == 1:
        return []
    with pytest.raises(sx.errors.StallError) as caught:
        init_as(kind, place, timeouts_s[rank])
    return [str(caught.value), list(caught.value.missing)]


@pytest.mark.parametrize("timeouts_s", [[2.0, 0.0, 4.0], slow([4.0, 0.0, 2.0])], ids=["rank 0 first", "rank 2 first"])
@pytest.mark.parametrize("kind", ["env", "agent", "tcp", slow("file"), slow("mpi")])
def test_every_kind_of_init_names_the_absent_rank(kind: str, timeouts_s: list[float], tmp_path: Path) -> None:
    launched = "mpi" if kind == "mpi" else "processes"
    with rendezvous_of(kind, tmp_path) as place:
        found = run_ranks(waits_for_rank_1, 3, backend=launched, args=(kind, place, timeouts_s), timeout_s=120)
    for message, missing in (found[0], found[2]):
        assert missing == [1]
        assert message.startswith("ranks [1] did not ")


def dies_in_init(backend: str, directory: str, where: str) -> list[Any]:
    if rank_and_size()[0] == 1:

        def die(*_: Any, **__: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(dist.distributed_c10d if where == "_new_process_group_helper" else dist, where, die)
    with pytest.raises(sx.errors.PeerError) as caught:
        start(backend, directory) if backend == "hierarchical" else init_by_hand(f"file://{directory}", backend, 300.0)
    return [caught.value.rank, caught.value.cause, caught.value.host]


@pytest.mark.parametrize(
    ("backend", "where"),
    [
        ("gloo", "init_process_group"),
        slow("gloo", "_new_process_group_helper"),
        ("hierarchical", "ProcessGroupGloo"),
    ],
)
def test_a_rank_that_dies_inside_torchs_own_start_is_named(backend: str, where: str, tmp_path: Path) -> None:
    """The error comes long before the deadline of 300 s, while torch still waits for the rank."""
    args = (backend, str(tmp_path / "meeting"), where)
    outcomes = run_ranks(dies_in_init, 3, backend="processes", args=args, timeout_s=120, allow_failure=True)
    for survivor in (outcomes[0], outcomes[2]):
        assert survivor.state == "ok", outcomes
        assert survivor.exit_code == 0
        rank, cause, host = survivor.value
        assert (rank, host) == (1, platform.node())
        assert re.fullmatch(r"its process \d+ died", cause)


def uses_one_port_twice(port: int) -> list[Any]:
    found = []
    for _ in range(2):
        comm = init_as("env", str(port), 20.0)
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        found.append([comm.backend, float(total), float(comm.all_reduce(torch.ones(1)))])
        dist.destroy_process_group()
        sx.shutdown()
    return found


def test_torch_may_use_the_same_master_port() -> None:
    found = run_ranks(uses_one_port_twice, 2, backend="processes", args=(free_port(),), timeout_s=120)
    assert found == [[["shm", 2.0, 2.0]] * 2] * 2


def adopts_after_a_group_of_its_own(directory: str) -> list[Any]:
    """Rank 0 has had a default group by itself before, as a process that goes on when others are restarted."""
    rank, size = rank_and_size()
    if rank == 0:
        dist.init_process_group("gloo", init_method=f"file://{directory}/alone", rank=0, world_size=1)
        sx.init()
        sx.shutdown()
        dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{directory}/all", rank=rank, world_size=size)
    sums = []
    for backend in ("auto", "shm"):
        sums.append(sx.init(backend, timeout_s=20).all_reduce(1))
        sx.shutdown()
    dist.destroy_process_group()
    return sums


def test_the_running_group_is_adopted_whatever_groups_a_rank_had_before(tmp_path: Path) -> None:
    found = run_ranks(adopts_after_a_group_of_its_own, 2, backend="processes", args=(str(tmp_path),), timeout_s=120)
    assert found == [[2, 2]] * 2


def closes_hierarchical_groups(directory: str) -> int:
    comm = start("hierarchical", directory)
    groups = [thing for thing in gc.get_objects() if type(thing) is GlooBackend]
    comm.all_reduce(torch.ones(1))
    comm.barrier()
    comm.close()
    assert all(group._group is None for group in groups)
    return len(groups)


def test_closing_a_hierarchical_communicator_leaves_none_of_its_groups_to_the_garbage_collector(tmp_path: Path) -> None:
    """It would free them at any time, which blocks the rank."""
    found = run_ranks(closes_hierarchical_groups, 3, backend="processes", args=(str(tmp_path),), timeout_s=120)
    assert found == [2, 2, 1]  # that of all ranks, and on the leader of each of the two hosts that of the leaders
