"""Peers that fail: backends and communicators name them at once, and those that do not call at the deadline."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import require_mpi
from starting import KINDS, LAUNCHED_AS, launched_backend, start, wait
from sweeps import slow

import statexchange as sx
from statexchange.comm import bootstrap
from statexchange.comm.backends import gloo
from statexchange.comm.backends.backend import Backend
from statexchange.comm.backends.reduction import Finish
from statexchange.comm.failure.control_page import _ARRIVED
from statexchange.comm.failure.monitor import FailureMonitor
from statexchange.comm.wait import Wait
from statexchange.testing import run_ranks

# Over a backend alone


def peer_dies(kind: str, path: str, verb: str) -> str:
    b = launched_backend(kind, path)
    b.all_gather_bytes(b"", wait())
    if b.rank == 1:
        time.sleep(0.2)
        os._exit(3)
    with pytest.raises(sx.errors.PeerError) as caught:
        if verb == "recv":
            b.recv(torch.empty(10, dtype=torch.uint8), 1, 2, wait())
        elif verb == "exchange":
            b.all_gather_bytes(b"", wait())
        else:
            b.all_reduce(torch.ones(4_000_000), "sum", Finish(), wait())
    assert caught.value.phase == "a test"
    assert gloo._ended_groups
    b.close()
    deadline = time.monotonic() + 10
    while gloo._ended_groups:
        assert time.monotonic() < deadline
        time.sleep(0.05)
        gloo._free_ended_groups()
    return "abandoned"


@pytest.mark.parametrize(("kind", "verb"), [("gloo", "all_reduce"), ("bare gloo", "recv"), ("gloo", "exchange")])
def test_a_peer_that_dies_is_an_error_at_once(kind: str, verb: str, tmp_path: Any) -> None:
    args = (kind, str(tmp_path / "store"), verb)
    outcomes = run_ranks(peer_dies, 3, backend=KINDS[kind], args=args, allow_failure=True)
    assert outcomes.values == {0: "abandoned", 2: "abandoned"}, outcomes


@contextlib.contextmanager
def stalls(seconds: float) -> Iterator[pytest.ExceptionInfo[sx.errors.StallError]]:
    began = time.monotonic()
    with pytest.raises(sx.errors.StallError) as caught:
        yield caught
    assert time.monotonic() - began >= seconds  # not before the deadline


def wait_for_files(path: str, word: str) -> None:
    """Return when ranks 0 and 1 have each made their file of this name."""
    while not all(Path(f"{path}.{word}-{rank}").exists() for rank in range(2)):
        time.sleep(0.02)


def waits_for_rank_2(b: Backend, kind: str, path: str) -> None:
    with stalls(0.3) as caught:
        b.new_group([0, 2] if b.rank == 0 else [2, 1], 0.3)
    assert caught.value.missing == (2,)
    Path(f"{path}.begins-{b.rank}").touch()
    wait_for_files(path, "begins")  # so that on a busy machine neither misses the other within the deadline
    with stalls(1.0) as caught:
        if kind == "gloo":
            b.recv(torch.empty(10, dtype=torch.uint8), 2, 0, wait(1.0))
        else:
            b.all_reduce(torch.ones(10), "sum", Finish(), wait(1.0))
    assert caught.value.missing == ((2,) if kind == "store" else ())


def peer_does_not_call(kind: str, path: str) -> None:
    b = launched_backend(kind, path)
    if b.rank < 2:
        waits_for_rank_2(b, kind, path)
        Path(f"{path}.ended-{b.rank}").touch()
    wait_for_files(path, "ended")  # no rank exits while another waits
    b.close()


@pytest.mark.parametrize("kind", [slow(kind) if kind == "mpi" else kind for kind in KINDS])
def test_a_peer_that_does_not_call_is_named_at_the_deadline(kind: str, tmp_path: Any) -> None:
    run_ranks(peer_does_not_call, 3, backend=KINDS[kind], args=(kind, str(tmp_path / "store")), timeout_s=120)


class _FailedMonitor(FailureMonitor):
    """A failure monitor to which a failure of rank 7 was reported."""

    def check(self, operation: str) -> None:
        raise sx.errors.PeerError(7, "its own work", "no more fuel")

    def departure_of(self, rank: int, operation: str) -> None: ...

    def missing_ranks(self) -> tuple[int, ...]:
        return ()

    def progress_count(self) -> int:
        return 0


def waits_beside_a_failure() -> None:
    b = launched_backend("gloo", "")
    if b.rank == 1:
        time.sleep(0.5)
        return
    with pytest.raises(sx.errors.PeerError) as caught:
        b.all_gather_bytes(b"", Wait(10, "a test", _FailedMonitor()))
    assert (caught.value.rank, caught.value.phase) == (7, "its own work")
    assert gloo._ended_groups


def test_a_failure_in_the_monitor_ends_a_wait() -> None:
    run_ranks(waits_beside_a_failure, 2, backend="gloo")


EXITS_DURING_A_RECEIVE = """
import threading, time
import torch, torch.distributed as dist
from statexchange.comm.wait import Wait
from statexchange.comm.backends.gloo import _waiting_threads
from statexchange.comm.backends.store import StoreBootstrap

def serve(rank):
    backends.append(StoreBootstrap(store, rank, range(2)).transport(10.0))
    backends[-1].recv(torch.empty(4, dtype=torch.uint8), 1 - rank, 0, Wait(60, "a receive"))

threading.excepthook = lambda args: None
store, backends = dist.HashStore(), []
for rank in range(2):
    threading.Thread(target=serve, args=(rank,), daemon=True).start()
while len(_waiting_threads) < 2:  # threads that are inside Gloo, or about to be
    time.sleep(0.01)
time.sleep(0.1)
"""


def test_a_process_exits_cleanly_during_a_receive() -> None:
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-c", EXITS_DURING_A_RECEIVE], env=environ, capture_output=True, text=True, timeout=150
    )
    assert (done.returncode, done.stderr) == (0, "")


# Over a communicator


def waits_for_a_message_of_a_failed_rank(backend: str, directory: str) -> list[Any]:
    """Rank 0 receives from rank 2, and rank 1 sends to it asynchronously, when it fails in a phase of its own."""
    comm = start(backend, directory)
    comm.barrier()
    with pytest.raises(sx.errors.PeerError) as caught:
        if comm.rank == 0:
            comm.recv(torch.zeros(3), 2)
        elif comm.rank == 1:
            comm.send(torch.zeros(70_001), 2, async_op=True).wait()
        else:
            time.sleep(0.3)
            with comm.phase("cooking"):
                raise KeyError("salt")
    # A message may have been sent in part, so no later call may run.
    with pytest.raises(sx.errors.PeerError, match="salt"):
        comm.barrier()
    error = caught.value
    return [error.rank, error.phase, error.cause, error.host == comm.hosts[2]]


@pytest.mark.parametrize("backend", [slow(backend) if backend == "mpi" else backend for backend in LAUNCHED_AS])
def test_a_failure_reaches_ranks_that_wait_for_a_message(backend: str, tmp_path: Path) -> None:
    if backend == "mpi":
        require_mpi()
    errors = run_ranks(
        waits_for_a_message_of_a_failed_rank, 3, backend=LAUNCHED_AS[backend], args=(backend, str(tmp_path))
    )
    assert errors == [[2, "cooking", "KeyError: 'salt'", True]] * 3


def fails_with_work_in_flight(backend: str, directory: str) -> None:
    """Rank 0 gives an error to `agree` while its asynchronous work waits for rank 1, which waits for a message."""
    comm = start(backend, directory)
    comm.barrier()
    work = comm.all_reduce(torch.ones(4), async_op=True) if comm.rank == 0 else None
    with pytest.raises(sx.errors.PeerError, match="boom") as caught:
        if comm.rank == 0:
            time.sleep(0.3)
            comm.agree(ValueError("boom"))
        else:
            comm.recv(torch.zeros(3), 0)
    assert caught.value.rank == 0
    assert work is None or work.is_completed()
    with pytest.raises(sx.errors.PeerError, match="boom"):
        comm.barrier()


@pytest.mark.parametrize("backend", ["threads", "shm", "gloo", slow("mpi")])
def test_a_failure_reaches_ranks_with_work_in_flight(backend: str, tmp_path: Path) -> None:
    if backend == "mpi":
        require_mpi()
    run_ranks(fails_with_work_in_flight, 2, backend=LAUNCHED_AS[backend], args=(backend, str(tmp_path)))


def agrees_twice() -> None:
    """Raise an error of an earlier agreement again in a later block: it is a failure like any other."""
    comm = sx.get_communicator()
    with pytest.raises(sx.errors.PeerError) as caught, comm.phase("first"):
        if comm.rank == 1:
            raise ValueError("old")
    comm.barrier()
    with pytest.raises(sx.errors.PeerError, match="old"), comm.phase("second"):
        if comm.rank == 0:
            raise caught.value
    comm.barrier()


def test_an_old_error_can_be_raised_in_a_later_agreement() -> None:
    run_ranks(agrees_twice, 2)


def test_an_interrupt_leaves_a_world_of_one_usable() -> None:
    comm = sx.init("single")
    try:
        with pytest.raises(KeyboardInterrupt), comm.phase("working"):
            raise KeyboardInterrupt
        comm.barrier()
        assert comm.all_reduce(torch.ones(1)) == 1
    finally:
        sx.shutdown()


def dies_with_new_memory() -> list[Any]:
    """Rank 1 dies once it has offered memory to which rank 0 has not attached."""
    comm = sx.init("shm", timeout_s=20)
    comm.barrier()
    page = comm._session.page
    assert page is not None
    sync, syncs = page.sync, itertools.count(1)

    def syncs_and_dies(wait: Any) -> None:
        is_offer = next(syncs) == 2  # the first is the entry to the call
        if is_offer and comm.rank == 1:
            page._words[page._own_row + _ARRIVED] = page._count + 1
            os.kill(os.getpid(), signal.SIGKILL)
        sync(wait)
        if is_offer:
            time.sleep(0.5)

    page.sync = syncs_and_dies  # type: ignore[method-assign]
    try:
        comm.empty((10_000,), torch.uint8)
    except sx.StateExchangeError as error:
        return [type(error).__name__, error.rank, str(error)]
    return ["passed"]


def test_a_rank_whose_memory_is_gone_is_named() -> None:
    outcomes = run_ranks(dies_with_new_memory, 2, backend="gloo", timeout_s=60, allow_failure=True)
    assert outcomes.exit_codes[1] == -signal.SIGKILL
    name, rank, text = outcomes.values[0]
    assert (name, rank) == ("PeerError", 1), outcomes
    assert "died" in text


def calls_late_and_moves_data_late(where: str) -> float:
    """Rank 1 comes late, and its data then take long: each is shorter than the limit, but not both together."""
    if where == "several hosts":
        bootstrap.open_control_page = lambda *_: None
    comm = sx.init("gloo", timeout_s=1.5)
    comm.barrier()
    if comm.rank == 1:
        all_reduce = gloo.GlooBackend.all_reduce

        def slow_all_reduce(*arguments: Any) -> None:
            time.sleep(1.0)
            all_reduce(*arguments)

        gloo.GlooBackend.all_reduce = slow_all_reduce  # type: ignore[method-assign]
        time.sleep(1.0)
    return float(comm.all_reduce(torch.ones(100_000))[0])


@pytest.mark.parametrize("where", ["one host", "several hosts"])
def test_a_late_rank_leaves_its_data_the_whole_limit(where: str) -> None:
    assert run_ranks(calls_late_and_moves_data_late, 2, backend="gloo", args=(where,), timeout_s=60) == [2.0, 2.0]


def is_stopped_inside_a_call(where: str) -> list[Any]:
    """Rank 1 has called, and is stopped before it sends its data."""
    if where == "several hosts":
        bootstrap.open_control_page = lambda *_: None
    comm = sx.init("gloo", timeout_s=3)
    pids = comm.all_gather_object(os.getpid())
    if comm.rank == 1:
        gloo.GlooBackend.all_reduce = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[method-assign]
    with pytest.raises(sx.StateExchangeError) as caught:
        comm.all_reduce(torch.ones(100_000))
        comm.barrier()
    if comm.rank == 1:
        return []
    os.kill(pids[1], signal.SIGCONT)
    return [type(caught.value).__name__, getattr(caught.value, "missing", None), str(caught.value)]


@pytest.mark.parametrize("where", ["one host", "several hosts"])
def test_a_rank_that_is_stopped_inside_a_call_is_not_said_to_be_absent(where: str) -> None:
    name, missing, text = run_ranks(is_stopped_inside_a_call, 2, backend="gloo", args=(where,), timeout_s=60)[0]
    assert (name, missing) == ("StallError", (1,)), text
    assert "reach" not in text
    assert "ranks [1] do not respond" in text
