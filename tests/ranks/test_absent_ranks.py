"""Calls that only some ranks make name the absent ranks and the public call, from the first call on."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ports import free_port
from starting import start
from sweeps import slow

import statexchange as sx
from statexchange.comm import bootstrap
from statexchange.testing import run_ranks

ABSENT = (1, 3)
CALLS: dict[str, Callable[[str], Any]] = {
    "save_checkpoint": lambda path: sx.save_checkpoint({"w": torch.zeros(2)}, path),
    "load_checkpoint": lambda path: sx.load_checkpoint({"w": torch.zeros(2)}, path),
    "export_checkpoint": lambda path: sx.export_checkpoint({"w": torch.zeros(2)}, path),
    "Checkpoints.save": lambda path: sx.Checkpoints(path).save({"w": torch.zeros(2)}, 1),
    "synchronize": lambda _: sx.synchronize({"w": torch.zeros(2)}),
}
LAUNCHED = {
    "adopted": "gloo",
    "gloo": "gloo",
    "file": "processes",
    "tcp": "processes",
    "several hosts": "processes",
    "adopted by MPI": "mpi",
    "mpi": "mpi",
}


def begin(kind: str, folder: str, port: int) -> int:
    """Make the communicator, unless the first call is to adopt a group; return the rank."""
    os.environ["STATEXCHANGE_TIMEOUT_S"] = "1"
    if kind == "adopted":
        return dist.get_rank()
    if kind == "adopted by MPI":
        from mpi4py import MPI

        return int(MPI.COMM_WORLD.Get_rank())
    if kind == "tcp":
        return sx.init(rendezvous=f"tcp://127.0.0.1:{port}").rank
    backend = {"file": "shm", "several hosts": "hierarchical"}.get(kind, kind)
    return start(backend, f"{folder}/meeting").rank


def calls_on_some(kind: str, call: str, folder: str, port: int) -> Any:
    rank = begin(kind, folder, port)
    if rank in ABSENT:
        time.sleep(2.5)
        return None
    with pytest.raises(sx.errors.StallError) as caught:
        if kind == "adopted by MPI":
            from mpi4py import MPI

            sx.save_checkpoint({"w": torch.zeros(2)}, f"{folder}/saved", comm=MPI.COMM_WORLD)
        else:
            CALLS[call](f"{folder}/saved")
    return list(caught.value.missing), caught.value.rank, str(caught.value)


@pytest.mark.parametrize(
    "kind", ["adopted", slow("gloo"), "file", slow("tcp"), "several hosts", "adopted by MPI", "mpi"]
)
def test_a_call_on_some_ranks_names_the_others_and_the_call(kind: str, tmp_path: Path) -> None:
    args = (kind, "save_checkpoint", str(tmp_path), free_port())
    found = run_ranks(calls_on_some, 4, backend=LAUNCHED[kind], args=args, timeout_s=60)
    for missing, rank, text in found[::2]:
        assert (missing, rank) == ([1, 3], 1)
        assert "ranks 1 and 3 have not called save_checkpoint" in text


@pytest.mark.parametrize("call", [call for call in CALLS if call != "save_checkpoint"])
def test_each_public_call_is_named(call: str, tmp_path: Path) -> None:
    found = run_ranks(calls_on_some, 2, backend="gloo", args=("adopted", call, str(tmp_path), 0), timeout_s=60)
    missing, rank, text = found[0]
    assert (missing, rank) == ([1], 1)
    assert f"rank 1 has not called {call}" in text


def ends_before_the_call(folder: str) -> Any:
    """Rank 1 ends by an error of its own; the others have never met it."""
    os.environ["STATEXCHANGE_TIMEOUT_S"] = "1"
    if dist.get_rank() == 1:
        os._exit(1)
    with pytest.raises(sx.errors.StallError) as caught:
        sx.save_checkpoint({"w": torch.zeros(2)}, f"{folder}/saved")
    return caught.value.rank, str(caught.value)


def test_a_rank_that_ended_before_its_first_call_is_named(tmp_path: Path) -> None:
    found = run_ranks(ends_before_the_call, 2, backend="gloo", args=(str(tmp_path),), allow_failure=True)
    rank, text = found[0].value
    assert rank == 1
    assert "rank 1" in text
    assert "save_checkpoint" in text


def has_a_stopped_rank_0(port: int, folder: str) -> str:
    """Rank 0, which serves torch's store, is stopped before its first call."""
    os.environ["STATEXCHANGE_TIMEOUT_S"] = "2"
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    pid = [os.getpid()]
    dist.broadcast_object_list(pid)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        return ""
    time.sleep(0.5)
    with pytest.raises(sx.errors.StallError) as caught:
        sx.save_checkpoint({"w": torch.zeros(2)}, f"{folder}/saved")
    os.kill(pid[0], signal.SIGCONT)
    return str(caught.value)


def test_a_store_that_does_not_answer_is_an_error_at_the_deadline(tmp_path: Path) -> None:
    args = (free_port(), str(tmp_path))
    found = run_ranks(has_a_stopped_rank_0, 2, backend="processes", args=args, timeout_s=60)
    assert found[1].startswith("the store, which rank 0 or torchrun serves, does not answer in the formation of")


def loses_rank_0(port: int, folder: str) -> str:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    dist.barrier()
    if rank == 0:
        os._exit(1)
    with pytest.raises(sx.errors.PeerError) as caught:
        sx.save_checkpoint({"w": torch.zeros(2)}, f"{folder}/saved")
    return str(caught.value)


def test_a_rank_0_that_ended_before_its_first_call_is_named(tmp_path: Path) -> None:
    args = (free_port(), str(tmp_path))
    outcomes = run_ranks(loses_rank_0, 2, backend="processes", args=args, timeout_s=60, allow_failure=True)
    assert "the store, which rank 0 or torchrun serves, has ended" in outcomes[1].value


def raises_before_the_call(kind: str, folder: str) -> Any:
    rank = begin(kind, folder, 0)
    if rank == 1:
        sx.get_communicator().close(ValueError("a bad batch"))  # as at the exit after an uncaught error
        return None
    with pytest.raises(sx.errors.PeerError) as caught:
        sx.save_checkpoint({"w": torch.zeros(2)}, f"{folder}/saved")
    return caught.value.rank, caught.value.cause


@pytest.mark.parametrize("kind", ["file", "several hosts", slow("gloo")])
def test_a_rank_that_raised_before_is_named_with_its_cause(kind: str, tmp_path: Path) -> None:
    found = run_ranks(raises_before_the_call, 4, backend=LAUNCHED[kind], args=(kind, str(tmp_path)), timeout_s=60)
    for rank, cause in [one for one in found if one is not None]:
        assert rank == 1
        assert "a bad batch" in cause


def waits_in_a_later_step(folder: str) -> str:
    """Both ranks have called: rank 1 then reports no progress for longer than the limit."""

    def stuck(done: int, total: int) -> None:
        if sx.get_rank() == 1:
            time.sleep(3)

    sx.init("shm", rendezvous=f"file://{folder}/meeting", timeout_s=1)
    state = {f"w{sx.get_rank()}": torch.zeros(2)}  # so that each rank writes
    with pytest.raises(sx.errors.StallError) as caught:
        sx.export_checkpoint(state, f"{folder}/out", stall_timeout_s=1, on_progress=stuck)
    return str(caught.value)


def test_a_rank_that_is_slow_inside_the_call_is_not_said_to_be_absent(tmp_path: Path) -> None:
    text = run_ranks(waits_in_a_later_step, 2, backend="processes", args=(str(tmp_path),), timeout_s=60)[0]
    assert "did not reach export_checkpoint" in text
    assert "called" not in text


class Lines(logging.Handler):
    """Keeps the messages that are logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def logged_lines() -> list[str]:
    """Return a list to which each message of the package is added from now on."""
    handler = Lines()
    logging.getLogger("statexchange").addHandler(handler)
    return handler.lines


def arrives_late(kind: str, late_rank: int, folder: str) -> list[str]:
    """One rank calls after more than half of the timeout; return what is logged meanwhile."""
    os.environ["STATEXCHANGE_TIMEOUT_S"] = "6"
    if kind != "adopted":  # then the call forms the communicator
        start({"file": "shm", "several hosts": "hierarchical"}.get(kind, kind), f"{folder}/meeting")
    rank = dist.get_rank() if kind == "adopted" else sx.get_rank()
    lines = logged_lines()
    if rank == late_rank:
        time.sleep(4.2)
    sx.save_checkpoint({"w": torch.zeros(2)}, f"{folder}/saved")
    return lines


@pytest.mark.parametrize(
    ("kind", "late_rank"),
    [("file", 3), ("adopted", 3), slow("adopted", 0), slow("gloo", 3), ("several hosts", 3), slow("mpi", 3)],
)
def test_a_late_rank_is_named_while_the_others_wait(kind: str, late_rank: int, tmp_path: Path) -> None:
    args = (kind, late_rank, str(tmp_path))
    lines = run_ranks(arrives_late, 4, backend=LAUNCHED[kind], args=args, timeout_s=60)
    lowest_waiting = lines.pop(1 if late_rank == 0 else 0)
    assert lines == [[], [], []]
    assert len(lowest_waiting) == 1
    assert f"rank {late_rank} has not called save_checkpoint in 3" in lowest_waiting[0]


def waits_for_a_part_of_a_reduction(folder: str) -> list[str]:
    """Without the check that all have made a call, ranks wait inside of its steps, on their hosts and between them."""
    host = "aabb"[int(os.environ["RANK"])]
    bootstrap.host_identity = lambda: host
    comm = sx.init("auto", rendezvous=f"file://{folder}/meeting", timeout_s=3.0, check="off")
    lines = logged_lines()
    if comm.rank == 3:
        time.sleep(2.2)
    comm.all_reduce(torch.ones(8))
    return lines


def test_the_log_never_names_a_rank_by_its_number_on_a_host(tmp_path: Path) -> None:
    lines = run_ranks(waits_for_a_part_of_a_reduction, 4, backend="processes", args=(str(tmp_path),), timeout_s=60)
    for line in itertools.chain.from_iterable(lines):
        assert "[3]" in line or "rank 3" in line
