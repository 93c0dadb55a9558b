"""init: rendezvous, choice of backend and device, repeated starts and stops."""

import contextlib
import ctypes
import gc
import json
import logging
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ports import free_port
from programs import require_mpi
from scripts import ALONE, warm_command, with_mpiexec, with_torchrun
from shared_names import no_names_left
from starting import start
from sweeps import slow
from warm_python import warm_python

import statexchange as sx
from statexchange.comm import defaults, tcp_store
from statexchange.comm.backends.gloo import GlooBackend
from statexchange.comm.rendezvous_directory import _Announcement
from statexchange.errors import to_record
from statexchange.messages import encoded
from statexchange.processes import Owner
from statexchange.testing import run_ranks


def rank_and_size() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def init_by_hand(url: str, backend: str = "auto", timeout_s: float = 20.0) -> sx.comm.Communicator:
    rank, size = rank_and_size()
    return sx.init(backend, rendezvous=url, rank=rank, world_size=size, timeout_s=timeout_s)


def log_messages() -> list[str]:
    """Return a list that has all messages which the package logs in this process from now on."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("statexchange").addHandler(handler)
    return logged


def describe(comm: sx.comm.Communicator) -> list[Any]:
    """Return backend, rank, sizes and hosts of a communicator, and a sum over its ranks."""
    total = comm.all_reduce(torch.full((5,), float(comm.rank + 1)))
    return [comm.backend, comm.rank, comm.world_size, comm.local_rank, comm.num_nodes, float(total[0])]


# Rendezvous


def initialises(url: str, backend: str) -> list[Any]:
    comm = init_by_hand(url, backend)
    found = describe(comm)
    sx.shutdown()
    return found


@pytest.mark.parametrize(("backend", "name"), [("auto", "shm"), ("shm", "shm"), ("gloo", "gloo")])
def test_ranks_started_by_hand_meet_in_a_directory(backend: str, name: str, tmp_path: Path) -> None:
    found = run_ranks(initialises, 3, backend="processes", args=(f"file://{tmp_path}/new/meeting", backend))
    assert found == [[name, rank, 3, rank, 1, 6.0] for rank in range(3)]
    assert list((tmp_path / "new" / "meeting").iterdir()) == []


def test_ranks_started_by_hand_meet_at_an_address() -> None:
    found = run_ranks(initialises, 2, backend="processes", args=(f"tcp://127.0.0.1:{free_port()}", "auto"))
    assert found == [["shm", rank, 2, rank, 1, 3.0] for rank in range(2)]


def put_files_of_a_rank_0(directory: Path, nonce: str, owner: Owner, port: int) -> None:
    """Write the files of a rank 0 that was killed in the rendezvous."""
    record = encoded(_Announcement(owner, "elsewhere", ["127.0.0.1"], port, nonce), _Announcement)
    (directory / f"server-{nonce}.json").write_bytes(record)
    (directory / f"settled-{nonce}").touch()


def test_files_of_a_crashed_run_are_ignored(tmp_path: Path) -> None:
    """Nothing listens at the port of one, another program at that of the other; a third has provably ended."""
    ours = Owner.current()
    elsewhere = replace(ours, boot="another boot", pid=1, start=1)
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    silent, foreign, dead = ("a" * 32, "b" * 32, "c" * 32)
    put_files_of_a_rank_0(tmp_path, silent, elsewhere, free_port())
    put_files_of_a_rank_0(tmp_path, foreign, elsewhere, agent.port)
    put_files_of_a_rank_0(tmp_path, dead, replace(ours, pid=2**22 - 1, start=1), agent.port)
    (tmp_path / f"server-{'d' * 32}.json").write_text('{"owner": "unfinished')
    found = run_ranks(initialises, 2, backend="processes", args=(f"file://{tmp_path}", "shm"))
    assert [row[0] for row in found] == ["shm", "shm"]
    # Files of processes that have provably ended are removed; those of other hosts are not.
    left = {path.name for path in tmp_path.iterdir()}
    of_other_hosts = {name for nonce in (silent, foreign) for name in (f"server-{nonce}.json", f"settled-{nonce}")}
    assert left == of_other_hosts | {f"server-{'d' * 32}.json"}


def times_out(directory: str) -> list[Any]:
    if rank_and_size()[0] in (1, 3):
        return []
    with pytest.raises(sx.errors.StallError) as caught:
        init_by_hand(f"file://{directory}", timeout_s=2 + rank_and_size()[0])
    return [str(caught.value), list(caught.value.missing)]


def test_all_ranks_that_wait_name_all_absent_ranks_and_nothing_is_left(tmp_path: Path) -> None:
    """Rank 0 gives up first; rank 2 does not name it as absent."""
    found = run_ranks(times_out, 4, backend="processes", args=(f"{tmp_path}/new/meeting",))
    for message, missing in (found[0], found[2]):
        assert message.startswith(f"ranks [1, 3] did not join at {tmp_path}/new/meeting in ")
        assert missing == [1, 3]
    assert list((tmp_path / "new" / "meeting").iterdir()) == []


def waits_for_rank_0(kind: str, place: str) -> list[Any]:
    if rank_and_size()[0] == 0:
        return []
    with pytest.raises(sx.errors.StallError) as caught:
        init_as(kind, place, 3.0)
    return [list(caught.value.missing), str(caught.value)]


@pytest.mark.parametrize("kind", ["file", slow("tcp"), "env", slow("agent")])
def test_an_absent_rank_0_is_named_by_the_others(kind: str, tmp_path: Path) -> None:
    with rendezvous_of(kind, tmp_path) as place:
        found = run_ranks(waits_for_rank_0, 3, backend="processes", args=(kind, place))
    assert found[0] == []
    for missing, message in found[1:]:
        assert missing == [0]
        assert message.startswith("ranks [0] did not join at ")
        assert (" in 3 s: " in message) == (kind in ("tcp", "env"))  # with what the last try has met
    assert list(tmp_path.iterdir()) == []


def joins_late(directory: str) -> list[Any]:
    rank, _ = rank_and_size()
    if rank == 1:
        time.sleep(3.5)  # joins after rank 0 has given up
    with pytest.raises(sx.errors.StallError) as caught:
        init_by_hand(f"file://{directory}", timeout_s=[2.0, 2.0, 10.0][rank])
    return [list(caught.value.missing), str(caught.value)]


def test_when_rank_0_gives_up_all_that_have_joined_raise_its_error(tmp_path: Path) -> None:
    found = run_ranks(joins_late, 3, backend="processes", args=(str(tmp_path),))
    for rank, missing in ((0, 1), (1, 0), (2, 1)):  # which is true of rank 1's own two seconds
        assert found[rank][0] == [missing]
        assert found[rank][1].startswith(f"ranks [{missing}] did not join at {tmp_path} in 2 s; init must")
    assert list(tmp_path.iterdir()) == []


def loses_rank_0(port: int) -> str:
    if rank_and_size()[0] == 0:
        server = tcp_store.Server("127.0.0.1", port, 20.0)
        while not server.store.check(["joined/1"]):
            time.sleep(0.01)
        server.close()  # as it does a second after it has given up
        return ""
    with pytest.raises(sx.errors.StallError) as caught:
        init_by_hand(f"tcp://127.0.0.1:{port}", timeout_s=2)
    assert caught.value.missing == (0,)
    return str(caught.value)


def test_a_rank_0_that_left_the_address_is_said_to_have_left() -> None:
    port = free_port()
    found = run_ranks(loses_rank_0, 2, backend="processes", args=(port,))
    expected = f"ranks [0] did not join at tcp://127.0.0.1:{port} in 2 s: rank 0 had joined, but left before all had"
    assert found[1].startswith(expected)


@pytest.mark.parametrize("decision", ["complete", "failed", None])
def test_at_its_deadline_a_rank_waits_a_moment_for_rank_0_to_decide(decision: str | None) -> None:
    server = tcp_store.Server("127.0.0.1", 0, 20.0)
    store, _ = tcp_store.connect(tcp_store.Place(["127.0.0.1"], server.port), 20.0)
    for rank in range(3):
        store.set(f"joined/{rank}", f"process {rank}")
    record = json.dumps(to_record(sx.errors.StallError("rank 1 came too late", missing=(1,)), 0, "the rendezvous"))
    decided = "complete" if decision == "complete" else record
    decides = threading.Timer(0.3, lambda: server.store.set("decision", decided))
    if decision is not None:
        decides.start()

    def waits() -> None:
        tcp_store.Joining(1, 3, 0.1, "there", time.monotonic() - 0.1).wait_until_complete(store)

    if decision == "complete":
        waits()
    else:
        message, missing = {
            "failed": ("rank 1 came too late", (1,)),
            None: ("rank 0 does not answer at there: its process is stopped, or its host is cut off", (0,)),
        }[decision]
        with pytest.raises(sx.errors.StallError) as caught:
            waits()
        assert caught.value.message == message
        assert caught.value.missing == missing
    if decision is not None:
        decides.join()
    server.close()


def joins_repeatedly(directory: str) -> list[str]:
    backends = []
    for _ in range(5):
        backends.append(init_by_hand(f"file://{directory}").backend)
        sx.shutdown()
    return backends


def test_one_directory_serves_several_rendezvous(tmp_path: Path) -> None:
    found = run_ranks(joins_repeatedly, 3, backend="processes", args=(f"{tmp_path}/new",), timeout_s=120)
    assert found == [["shm"] * 5] * 3
    assert list((tmp_path / "new").iterdir()) == []


def keeps_old_communicators(url: str, by_slurm: bool) -> list[float]:
    rank, size = rank_and_size()
    if by_slurm:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
        os.environ.update(SLURM_PROCID=str(rank), SLURM_STEP_NUM_TASKS=str(size), SLURM_LOCALID=str(rank))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=url.rpartition(":")[2])
    held, sums = [], []
    for turn in range(3):
        comm = sx.init(timeout_s=20) if by_slurm else init_by_hand(url, "auto")
        sums.append(float(comm.all_reduce(torch.ones(3))[0]))
        held += [comm, comm.split(0)]
        if rank == 0 and turn == 1:
            time.sleep(1)  # the other ranks join again while rank 0 still serves the old store
        sx.shutdown()
    return sums


@pytest.mark.parametrize("by_slurm", [False, slow(True)])
def test_init_after_shutdown_at_the_same_address_while_old_communicators_exist(by_slurm: bool) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    found = run_ranks(keeps_old_communicators, 2, backend="processes", args=(url, by_slurm), timeout_s=120)
    assert found == [[2.0] * 3] * 2


def fails_then_works(url: str) -> list[Any]:
    rank, _ = rank_and_size()
    if rank == 1:
        time.sleep(2)  # comes when rank 0 has given up once
        return [init_by_hand(url).world_size]
    with pytest.raises(sx.errors.StallError, match=r"tcp://") as caught:
        init_by_hand(url, timeout_s=1)
    assert caught.value.missing == (1,)
    return [init_by_hand(url).world_size]


def test_an_address_can_be_reused_after_a_rank_was_absent() -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    assert run_ranks(fails_then_works, 2, backend="processes", args=(url,), timeout_s=120) == [[2], [2]]


def dies_while_meeting(directory: str, kill: bool) -> list[Any]:
    if kill and rank_and_size()[0] == 1:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        return [init_by_hand(f"file://{directory}").rank, time.sleep(5)]
    if kill and rank_and_size()[0] == 2:
        time.sleep(3)
        return []
    if kill:
        with pytest.raises(sx.errors.StallError, match=r"1\.5 s") as caught:
            init_by_hand(f"file://{directory}", timeout_s=1.5)
        assert caught.value.missing == (2,)  # rank 1 has joined: its death is noticed when the communicator is formed
        return []
    return describe(init_by_hand(f"file://{directory}"))


def test_after_a_crash_in_the_rendezvous_the_next_run_starts(tmp_path: Path) -> None:
    outcomes = run_ranks(dies_while_meeting, 3, backend="processes", args=(str(tmp_path), True), allow_failure=True)
    assert outcomes[0].state == "ok", outcomes
    found = run_ranks(dies_while_meeting, 3, backend="processes", args=(str(tmp_path), False))
    assert found == [["shm", rank, 3, rank, 1, 6.0] for rank in range(3)]


def contradicts(place: str, what: str, directory: str) -> str:
    """Two ranks call themselves rank 1, or rank 2 has another world_size."""
    rank, _ = rank_and_size()
    (Path(directory) / str(rank)).touch()
    while rank == 2 and len(os.listdir(directory)) < 3:
        time.sleep(0.05)
    time.sleep(1.0 if rank == 2 else 0.0)  # else it might fail the rendezvous before the others have found it
    claimed, size = (min(rank, 1), 4) if what == "rank" else (rank, 4 + rank // 2)
    with pytest.raises(sx.StateExchangeError) as caught:
        sx.init(rendezvous=place, rank=claimed, world_size=size, timeout_s=20)
    return str(caught.value)


@pytest.mark.parametrize("what", ["rank", "world_size"])
@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_ranks_that_contradict_each_other_are_named_on_all(kind: str, what: str, tmp_path: Path) -> None:
    expected = {"rank": "another process has joined as rank 1", "world_size": "has another world_size"}[what]
    (tmp_path / "meeting").mkdir()
    (tmp_path / "marks").mkdir()
    with rendezvous_of(kind, tmp_path / "meeting") as place:
        messages = run_ranks(contradicts, 3, backend="processes", args=(place, what, str(tmp_path / "marks")))
    assert all(expected in message for message in messages), messages
    assert list((tmp_path / "meeting").iterdir()) == []


def begins_again(directory: str, how: str) -> int:
    """Rank 1 is killed while it waits, and started again; or gives up, and calls again."""
    rank, size = rank_and_size()
    if rank == 1 and how == "killed":
        program = f"import statexchange as sx; sx.init(rendezvous='file://{directory}', rank=1, world_size={size})"
        waits = subprocess.Popen([sys.executable, "-c", program])
        time.sleep(3)
        waits.kill()
        waits.wait()
    elif rank == 1:
        with pytest.raises(sx.errors.StallError):
            init_by_hand(f"file://{directory}", timeout_s=0.5)
    elif rank == 2:
        time.sleep(4)
    return init_by_hand(f"file://{directory}", timeout_s=30.0).world_size


@pytest.mark.parametrize("how", ["gave up", slow("killed")])
def test_a_rank_may_begin_again_while_the_others_wait(how: str, tmp_path: Path) -> None:
    assert run_ranks(begins_again, 3, backend="processes", args=(str(tmp_path), how), timeout_s=120) == [3] * 3


@contextlib.contextmanager
def silent_server(directory: Path) -> Iterator[None]:
    """Announce a server of another host, at whose port a program accepts and never answers."""
    elsewhere = replace(Owner.current(), boot="another boot", pid=1, start=1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        put_files_of_a_rank_0(directory, "e" * 32, elsewhere, listener.getsockname()[1])
        yield


def names_who_is_late(directory: str) -> str:
    rank, _ = rank_and_size()
    if rank == 1:
        return ""
    with pytest.raises(sx.errors.StallError) as caught:
        init_by_hand(f"file://{directory}", timeout_s=20.0)
    return str(caught.value)


def test_a_program_that_never_answers_delays_no_rank(tmp_path: Path) -> None:
    with silent_server(tmp_path):
        began = time.monotonic()
        first, _, third = run_ranks(names_who_is_late, 3, backend="processes", args=(str(tmp_path),), timeout_s=90)
        assert time.monotonic() - began < 60
        assert "ranks [1] did not join" in first
        assert "ranks [1] did not join" in third
        found = run_ranks(initialises, 2, backend="processes", args=(f"file://{tmp_path}", "shm"))
    assert [row[0] for row in found] == ["shm", "shm"]


def is_stopped(place: str, pid_file: str) -> list[int]:
    """Rank 0 is stopped when rank 1 has joined; rank 2 does not come."""
    rank, _ = rank_and_size()
    if rank == 2:
        return []
    if rank == 0:
        Path(pid_file).write_text(str(os.getpid()))
        threading.Timer(3, lambda: os.kill(os.getpid(), signal.SIGSTOP)).start()
        with pytest.raises(sx.errors.StallError, match="did not join"):
            init_by_hand(place, timeout_s=6)
        return []
    with pytest.raises(sx.errors.StallError, match="rank 0 does not answer") as caught:
        init_by_hand(place, timeout_s=5)
    os.kill(int(Path(pid_file).read_text()), signal.SIGCONT)
    return list(caught.value.missing)


@pytest.mark.parametrize("kind", ["tcp", slow("file")])
def test_a_rank_0_that_is_stopped_is_named(kind: str, tmp_path: Path) -> None:
    (tmp_path / "meeting").mkdir()
    with rendezvous_of(kind, tmp_path / "meeting") as place:
        args = (place, str(tmp_path / "pid"))
        assert run_ranks(is_stopped, 3, backend="processes", args=args, timeout_s=60) == [[], [0], []]


def claims_rank_0(directory: str) -> str:
    rank, _ = rank_and_size()
    if rank == 1:
        while not any(name.startswith("settled-") for name in os.listdir(directory)):
            time.sleep(0.01)
    with pytest.raises(sx.StateExchangeError) as caught:
        sx.init(rendezvous=f"file://{directory}", rank=0, world_size=3, timeout_s=4)
    return str(caught.value)


def test_a_second_rank_0_of_a_directory_is_refused(tmp_path: Path) -> None:
    first, second = run_ranks(claims_rank_0, 2, backend="processes", args=(str(tmp_path),))
    assert first.startswith(f"ranks [1, 2] did not join at {tmp_path} in 4 s")
    assert "another rank 0" in second
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rendezvous": "s3://bucket", "rank": 0, "world_size": 2}, "rendezvous must be"),
        ({"rendezvous": "file:///nu\0ll", "rank": 0, "world_size": 2}, "rendezvous must be"),
        (
            {"rendezvous": "tcp://host:70000", "rank": 0, "world_size": 2},
            "rendezvous must be",
        ),
        ({"rendezvous": "file://relative", "rank": 0, "world_size": 2}, "rendezvous must be"),
        ({"rendezvous": "tcp://host", "rank": 0, "world_size": 2}, "rendezvous must be"),
        ({"rendezvous": "file:///tmp/x"}, "needs rank"),
        ({"rendezvous": "file:///tmp/x", "rank": 2, "world_size": 2}, "0 <= rank < world_size"),
        ({"rank": 0, "world_size": 2}, "come with"),
        ({"backend": "mpi", "rendezvous": "file:///tmp/x"}, "takes no rendezvous"),
        ({"check": "shapes"}, "check must be"),
    ],
    ids=str,
)
def test_impossible_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sx.init(**arguments)
    assert not sx.is_initialized()


def test_an_address_at_which_nobody_listens_is_an_error() -> None:
    with pytest.raises(sx.errors.StallError, match=r"tcp://.*refused") as caught:
        sx.init(rendezvous=f"tcp://127.0.0.1:{free_port()}", rank=1, world_size=2, timeout_s=1)
    assert caught.value.missing == (0,)


# Repeated calls


def initialises_twice() -> list[Any]:
    logged = log_messages()
    before = [sx.get_rank(), sx.get_world_size(), sx.comm.get_backend(), sx.is_initialized()]
    first = sx.init(devices=False, timeout_s=70)
    assert sx.init() is first
    assert sx.init(timeout_s=70, devices=False) is first
    assert logged == []
    assert sx.init("single", timeout_s=80) is first
    sx.shutdown()
    assert (sx.get_rank(), sx.get_world_size(), sx.is_initialized()) == (0, 1, False)
    return [before, logged]


def test_a_second_init_returns_the_communicator_and_warns_of_other_options() -> None:
    for before, logged in run_ranks(initialises_twice, 2, backend="mpi", reuse=True):
        assert before == [0, 1, "single", False]
        (line,) = logged
        assert "its communicator stays: these are not used: InitOptions(backend='single'" in line
        assert "timeout_s=80" in line


STARTS_AND_STOPS = """
import os, sys
import torch
import torch.distributed as dist
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


def run_starts_and_stops(backend: str, launcher: tuple[str, ...], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    command, environ = [sys.executable], dict(os.environ)
    if launcher != ALONE:
        command, environ = warm_command(launcher, STARTS_AND_STOPS)
    if launcher[0] == "mpiexec":
        require_mpi()
    script = tmp_path / "script.py"
    script.write_text(STARTS_AND_STOPS)
    environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, script, backend], capture_output=True, text=True, timeout=100, env=environ)


@pytest.mark.parametrize(
    ("backend", "launcher", "ranks"),
    [
        ("single", ALONE, 1),
        slow("mpi", with_mpiexec(2), 2),
        slow("auto", with_mpiexec(2), 2),
        slow("gloo", with_mpiexec(2), 2),
        slow("shm", with_torchrun(2), 2),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else str(value),  # the launcher's name
)
def test_twenty_starts_and_stops_leave_no_shared_memory(
    backend: str, launcher: tuple[str, ...], ranks: int, tmp_path: Path
) -> None:
    with no_names_left():
        done = run_starts_and_stops(backend, launcher, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == ranks


# Launchers


@pytest.mark.parametrize("missing", [True, False])
def test_slurm_without_an_address_is_an_error(missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1"}.items():
        monkeypatch.setenv(name, value)
    if not missing:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(free_port()))
    expected = "MASTER_ADDR and MASTER_PORT" if missing else "tcp://127.0.0.1"
    with pytest.raises(sx.errors.NotInitializedError if missing else sx.errors.StallError, match=expected):
        sx.init(timeout_s=1)


def under_slurm(port: int) -> list[Any]:
    rank, size = rank_and_size()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    os.environ.update(SLURM_PROCID=str(rank), SLURM_STEP_NUM_TASKS=str(size), SLURM_LOCALID=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return describe(sx.init())


def test_ranks_of_slurm_meet_at_master_addr() -> None:
    assert [row[0] for row in run_ranks(under_slurm, 2, backend="processes", args=(free_port(),))] == ["shm", "shm"]


def test_an_mpiexec_of_another_mpi_is_detected() -> None:
    """Open MPI's mpiexec starts a Python whose mpi4py found MPICH: each rank would be a world of one."""
    script = "import statexchange as sx; sx.init('mpi')"
    environ = {**os.environ, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environ)
    assert done.returncode != 0
    assert "OMPI_COMM_WORLD_SIZE" in done.stderr
    assert "NotInitializedError" in done.stderr


# Devices


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_mpi_without_threads_is_refused() -> None:
    require_mpi()
    program = "import mpi4py; mpi4py.rc.thread_level = 'funneled'; import statexchange as sx; sx.init('mpi')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert "UnsupportedError: MPI was initialised without MPI_THREAD_MULTIPLE" in done.stderr


def test_nccl_without_a_gpu_names_what_is_missing() -> None:
    with pytest.raises((sx.errors.MissingExtraError, sx.errors.UnsupportedError), match="CUDA build"):
        sx.init("nccl")
    assert not sx.is_initialized()


def device_of(devices: Any) -> Any:
    try:
        return str(sx.init("auto", devices=devices).device)
    except ValueError as error:
        return str(error)


def test_each_rank_gets_its_device_or_all_an_error() -> None:
    assert run_ranks(device_of, 2, backend="mpi", args=(["cpu", "cpu"],), reuse=True) == ["cpu", "cpu"]
    assert run_ranks(device_of, 2, backend="mpi", args=(False,), reuse=True) == ["cpu", "cpu"]
    for message in run_ranks(device_of, 2, backend="mpi", args=(["cpu"],), reuse=True):
        assert "devices=['cpu'] has no device for local_rank 1" in message
    for message in run_ranks(device_of, 2, backend="mpi", args=(["cpu", "toaster"],), reuse=True):
        assert "'toaster' is no device" in message


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


# Absent ranks


def init_as(kind: str, place: str, timeout_s: float) -> sx.comm.Communicator:
    """Call sx.init for this kind of rendezvous, at `place`."""
    if kind in ("tcp", "file"):
        return init_by_hand(place, timeout_s=timeout_s)
    if kind == "mpi":
        return sx.init("mpi", timeout_s=timeout_s)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=place, TORCHELASTIC_USE_AGENT_STORE=str(kind == "agent"))
    return sx.init("shm", timeout_s=timeout_s)


@contextlib.contextmanager
def rendezvous_of(kind: str, directory: Path) -> Iterator[str]:
    """Yield the place of the rendezvous for `init_as`; the store of a launcher's agent runs meanwhile."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if kind == "agent" else None
    port = free_port() if agent is None else agent.port
    yield {"tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{directory}"}.get(kind, str(port))
    del agent


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


# Local ranks


def counts_as_open_mpi_does(directory: str) -> list[Any]:
    rank, size = rank_and_size()
    os.environ["LOCAL_RANK"] = str([0, 2, 1][rank])  # Open MPI 5 numbers ranks like this if they share cores
    before = sx.comm.get_local_rank()
    comm = sx.init(rendezvous=f"file://{directory}")
    assert comm.node.world_size == size
    found = [before, sx.comm.get_local_rank(), comm.local_rank, comm.node.rank, comm.leaders is not None]
    comm.barrier()
    pair = comm.split(0 if rank else None)
    return [*found, None if pair is None else pair.local_rank]


def test_the_local_rank_is_one_before_and_after_init(tmp_path: Path) -> None:
    found = run_ranks(counts_as_open_mpi_does, 3, backend="processes", args=(str(tmp_path),))
    assert found == [[0, 0, 0, 0, True, None], [2, 2, 2, 2, False, 0], [1, 1, 1, 1, False, 1]]


def has_impossible_local_ranks(directory: str) -> list[int]:
    os.environ["LOCAL_RANK"] = "0"  # as if each rank were alone on its host
    before = sx.comm.get_local_rank()
    comm = sx.init(rendezvous=f"file://{directory}")
    return [before, sx.comm.get_local_rank(), comm.local_rank]


def test_impossible_local_ranks_still_give_one_consistent_local_rank(tmp_path: Path) -> None:
    found = run_ranks(has_impossible_local_ranks, 2, backend="processes", args=(str(tmp_path),))
    assert found == [[0, 0, 0], [0, 0, 1]]


# Deadlines


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), "5", True])
def test_every_public_call_refuses_an_invalid_deadline(wrong: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    sx.save_checkpoint({"w": torch.ones(2)}, folder)
    comm = sx.get_communicator()
    calls: dict[str, Callable[[], Any]] = {
        "init": lambda: sx.init("single", timeout_s=wrong),
        "from_process_group": lambda: sx.comm.from_process_group(None, timeout_s=wrong),
        "from_mpi": lambda: sx.comm.from_mpi(None, timeout_s=wrong),
        "barrier": lambda: comm.barrier(timeout_s=wrong),
        "agree": lambda: comm.agree(timeout_s=wrong),
        "exchange": lambda: comm.all_gather_bytes(b"", timeout_s=wrong),
        "save": lambda: sx.save_checkpoint({"w": torch.ones(2)}, folder, stall_timeout_s=wrong),
        "load": lambda: sx.load_checkpoint({"w": torch.ones(2)}, folder, stall_timeout_s=wrong),
        "export": lambda: sx.export_checkpoint({"w": torch.ones(2)}, tmp_path / "out", stall_timeout_s=wrong),
        "run_ranks": lambda: run_ranks(rank_and_size, 1, timeout_s=wrong),
    }
    if wrong != 0:
        work = comm.all_reduce(torch.ones(1), async_op=True)
        calls["Work.wait"] = lambda: work.wait(timeout_s=wrong)
        workspace = sx.NFSWorkspace(folder)
        calls["NFSWorkspace"] = lambda: workspace.read_configs_and_weights_from_rank(0, timeout_s=wrong)
    for name, call in calls.items():
        with pytest.raises(sx.errors.InvalidArgumentError, match="timeout_s must be"):
            pytest.fail(f"{name} returned {call()!r}")
    assert not sx.is_initialized()
    assert not (tmp_path / "out").exists()


def gives_wrong_deadlines() -> str:
    comm = sx.get_communicator()
    for wrong in (0, -1, float("nan"), "5"):
        timeout: Any = wrong if comm.rank else None
        with pytest.raises(sx.errors.InvalidArgumentError, match="timeout_s must be") as caught:
            comm.barrier(timeout_s=timeout)
        assert caught.value.rank == 1
        with pytest.raises(sx.errors.InvalidArgumentError, match="timeout_s must be") as caught:
            comm.agree(timeout_s=timeout)
        assert caught.value.rank == 1
        with pytest.raises(sx.errors.InvalidArgumentError, match="timeout_s must be") as caught:
            comm.all_gather_bytes(b"", timeout_s=timeout)
        assert caught.value.rank == 1
    comm.barrier(timeout_s=float("inf"))
    comm.barrier(timeout_s=10**400)
    return "ok"


def test_a_wrong_deadline_of_one_rank_is_refused_on_all_ranks() -> None:
    assert run_ranks(gives_wrong_deadlines, 2) == ["ok", "ok"]


def waits_for_ever(url: str, backend: str) -> list[Any]:
    comm = init_by_hand(url, backend, timeout_s=float("inf"))
    found = describe(comm)
    comm.all_reduce(torch.ones(2), async_op=True).wait(timeout_s=float("inf"))
    sx.shutdown()
    return found[:3]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_an_infinite_deadline_is_accepted(backend: str, tmp_path: Path) -> None:
    found = run_ranks(waits_for_ever, 2, backend="processes", args=(f"file://{tmp_path}/meeting", backend))
    assert found == [[backend, rank, 2] for rank in range(2)]


def counts_by_the_launcher() -> list[int]:
    before = sx.comm.get_local_rank()
    comm = sx.init("mpi")
    found = [before, sx.comm.get_local_rank(), comm.local_rank, comm.node.rank]
    assert sorted(comm.all_gather_object(before)) == [*range(comm.world_size)]
    return found


def test_the_local_rank_is_the_one_that_the_launcher_counts() -> None:
    """tools/test_on_open_mpi.sh runs this, too: Open MPI 5 does not number local ranks in rank order."""
    require_mpi()
    for before, *after in run_ranks(counts_by_the_launcher, 4, backend="mpi", timeout_s=120):
        assert after == [before] * 3


# Without torch

WITHOUT_TORCH = """
import importlib.util
import sys

import numpy as np

import statexchange as sx

assert importlib.util.find_spec("torch") is None
comm = sx.init(sys.argv[1])
n = comm.world_size
assert (comm.backend, n, sx.comm.get_local_rank()) == ("mpi", 3, comm.local_rank), comm
assert comm.all_gather_object({"rank": comm.rank}) == [{"rank": rank} for rank in range(n)]
assert comm.broadcast_object("root's" if comm.rank == 0 else None) == "root's"
long = ["x" * 100_000 * rank for rank in range(n)]
assert comm.gather_object(long[comm.rank]) == (long if comm.rank == 0 else [])
pair = comm.split(comm.rank % 2)
assert pair.all_gather_object(comm.rank) == [rank for rank in range(n) if rank % 2 == comm.rank % 2]
assert comm.node.world_size == n
comm.barrier()
for refused in (lambda: comm.all_reduce(np.ones(3)), lambda: comm.device):
    try:
        refused()
    except sx.errors.MissingExtraError as error:
        assert 'pip install "statexchange[torch]"' in str(error)
    else:
        raise AssertionError("no MissingExtraError")
comm.barrier()
sx.shutdown()
meeting = {"rendezvous": f"file://{sys.argv[2]}", "rank": 0, "world_size": 2}
for wish in ({"backend": "shm"}, {"backend": "gloo", **meeting}):
    try:
        sx.init(**wish)
    except sx.errors.MissingExtraError as error:
        assert 'pip install "statexchange[torch]"' in str(error)
    else:
        raise AssertionError("no MissingExtraError")
assert "torch" not in sys.modules
print("reached the end")
"""


@pytest.mark.parametrize("backend", ["mpi", "auto"])
def test_mpi_works_without_torch(backend: str, tmp_path: Path) -> None:
    """In an environment with everything but torch: the installed packages, linked one by one."""
    require_mpi()
    packages = tmp_path / "packages"
    packages.mkdir()
    for entry in Path(np.__file__).parents[1].iterdir():
        if not entry.name.startswith(("torch", "functorch", "statexchange")) and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)
    (packages / "statexchange").symlink_to(Path(sx.__file__).parent)
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    environment["LD_LIBRARY_PATH"] = f"{sys.prefix}/lib"  # libmpi, which mpi4py searches beside site-packages
    (tmp_path / "script.py").write_text(WITHOUT_TORCH)
    words = ["-n", "3", sys.executable, "-S", str(tmp_path / "script.py"), backend, str(tmp_path / "meeting")]
    done = subprocess.run(
        [Path(sys.executable).parent / "mpiexec", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("reached the end") == 3, done.stdout


def test_threads_may_get_their_worlds_of_one_and_shut_down_at_once() -> None:
    def start_and_stop() -> None:
        for _ in range(100):
            with defaults.use(None):
                assert sx.get_communicator().world_size == 1
                sx.shutdown()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            for ended in [threads.submit(start_and_stop) for _ in range(4)]:
                ended.result()
    finally:
        sys.setswitchinterval(interval)


def test_a_rendezvous_with_half_an_address_is_refused() -> None:
    with pytest.raises(sx.errors.InvalidArgumentError, match="rendezvous must be"):
        sx.init(rendezvous="tcp://[::1", rank=0, world_size=2)
