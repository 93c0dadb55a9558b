"""A call that one rank has given up fails on all ranks: in that call, or in the next one where it had completed."""

from __future__ import annotations

import random
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sweeps import slow

import statexchange as sx
from statexchange.comm.backends.store import over_group
from statexchange.comm.bootstrap import form_communicator
from statexchange.comm.communicator import Communicator
from statexchange.comm.failure.start import start_failure_detector
from statexchange.comm.session import Session
from statexchange.comm.topology import Topology
from statexchange.testing import run_ranks

RANKS = 3
PATIENCE_S = 0.5


def make_communicator(where: str, timeout_s: float = 20.0) -> Communicator:
    """Return a communicator of ranks on one host, or of ranks over Gloo with a failure detector between them."""
    if where == "one host":
        return sx.init(timeout_s=timeout_s)
    assert dist.group.WORLD is not None
    bootstrap = over_group(dist.group.WORLD, 10.0)
    topology = Topology(bootstrap.rank, tuple(range(RANKS)), ("anna", "bert", "carl"))
    detector = start_failure_detector(bootstrap, topology, timeout_s)
    assert detector is not None
    transport = bootstrap.transport(timeout_s)
    session = Session(transport, transport, None, detector, topology, timeout_s)
    return Communicator(session, "several hosts", form_communicator)


def outcome_of(comm: Communicator, verb: str, patience_s: float | None) -> list[Any]:
    try:
        if verb == "barrier":
            comm.barrier(patience_s)
        elif verb == "agree":
            comm.agree(timeout_s=patience_s)
        else:
            comm.all_reduce(torch.ones(4))
    except sx.StateExchangeError as error:
        return [type(error).__name__, str(error), sorted(getattr(error, "missing", ()))]
    return ["passed"]


def calls_late(where: str, verb: str) -> list[Any]:
    """Rank 2 calls after the others have given up, of which they notify it."""
    comm = make_communicator(where, PATIENCE_S if verb == "all_reduce" else 20.0)
    comm.barrier()
    if comm.rank == 2:
        for rank in (0, 1):
            dist.recv(torch.zeros(1), rank)
    end = outcome_of(comm, verb, PATIENCE_S)
    if comm.rank != 2:
        dist.send(torch.zeros(1), 2)
    later = outcome_of(comm, "barrier", None)
    dist.barrier()
    return [end, later]


@pytest.mark.parametrize("verb", ["barrier", "agree", "all_reduce"])
@pytest.mark.parametrize("where", ["one host", "several hosts"])
def test_a_late_rank_raises_the_error_of_the_others(where: str, verb: str) -> None:
    for end, later in run_ranks(calls_late, RANKS, backend="gloo", args=(where, verb), timeout_s=120):
        assert end[0] == "StallError", end
        assert "ranks [2] did not reach" in end[1], end
        assert end[2] == [2]
        assert later == end


def races(where: str, trials: int, seed: int) -> list[list[str]]:
    """Repeatedly: the last rank calls about when the deadline of the others runs out; then all call again."""
    own = random.Random(seed)
    ends = []
    for _ in range(trials):
        comm = make_communicator(where)
        comm.barrier()
        began = time.monotonic()
        late = own.randrange(RANKS)
        if comm.rank == late:
            time.sleep(max(0.0, 0.05 + own.uniform(-0.002, 0.06) - (time.monotonic() - began)))
        else:
            own.random()
        ends.append([outcome_of(comm, "barrier", 0.05)[0], outcome_of(comm, "barrier", None)[0]])
        dist.barrier()
        comm.close()
        if where == "one host":
            sx.shutdown()
    return ends


@pytest.mark.parametrize(
    ("where", "trials"), [("one host", 8), ("several hosts", 8), slow("one host", 150), slow("several hosts", 150)]
)
def test_a_failure_reaches_all_ranks_by_their_next_call(where: str, trials: int) -> None:
    outcomes = run_ranks(races, RANKS, backend="gloo", args=(where, trials, 7), timeout_s=200)
    for ends in zip(*outcomes, strict=True):
        firsts, seconds = zip(*ends, strict=True)
        assert set(firsts) <= {"passed", "StallError"}, outcomes
        assert set(seconds) == ({"passed"} if set(firsts) == {"passed"} else {"StallError"}), outcomes


def interrupted(where: str) -> list[Any]:
    """Rank 0 is interrupted in its wait; rank 2 calls later."""
    comm = make_communicator(where)
    comm.barrier()
    if comm.rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            comm.barrier()
        except KeyboardInterrupt:
            end = ["KeyboardInterrupt"]
    else:
        time.sleep(0.8 if comm.rank == 2 else 0)
        end = outcome_of(comm, "barrier", None)
    dist.barrier()
    return end


def is_late_after_the_entry() -> list[Any]:
    """Rank 2 has entered with the others, but moves its data only after they have given up."""
    comm = sx.init("gloo", timeout_s=2.0)
    comm.barrier()
    backend = comm._session.backend
    moves = backend.all_reduce

    def late(*arguments: Any) -> None:
        for rank in (0, 1):
            dist.recv(torch.zeros(1), rank)
        moves(*arguments)

    if comm.rank == 2:
        backend.all_reduce = late  # type: ignore[method-assign]
    end = outcome_of(comm, "all_reduce", None)
    if comm.rank != 2:
        dist.send(torch.zeros(1), 2)
    later = outcome_of(comm, "barrier", None)
    dist.barrier()
    return [end, later]


@pytest.mark.slow
def test_over_gloo_a_rank_that_is_late_after_the_entry_raises() -> None:
    for end, later in run_ranks(is_late_after_the_entry, RANKS, backend="gloo", timeout_s=120):
        assert end[0] in ("StallError", "PeerError"), end
        assert later[0] == end[0]


@pytest.mark.parametrize("where", ["one host", "several hosts"])
def test_an_interrupted_rank_is_named_by_all_others(where: str) -> None:
    first, *others = run_ranks(interrupted, RANKS, backend="gloo", args=(where,), timeout_s=120)
    assert first == ["KeyboardInterrupt"]
    for end in others:
        assert end[0] == "PeerError", end
        assert "KeyboardInterrupt" in end[1], end
