"""Checks of asynchronous work: order, completion, messages beside it."""

from __future__ import annotations

import time
from typing import Any

import torch

from conformance.checking import check, expect_all, expect_same, least_ranks, pattern, raised, summed
from statexchange.comm.communicator import Communicator
from statexchange.comm.work import Work
from statexchange.errors import StallError


@check
def asynchronous_calls_keep_their_order(comm: Communicator) -> None:
    """Every operation takes `async_op`; `wait` returns what the call would have; operations keep their order."""
    n, last = comm.world_size, comm.world_size - 1
    ours = pattern(comm.rank, (n, 5))
    into = torch.zeros(n, 5)
    total = summed(comm, (n, 5))
    works: dict[str, Work[Any]] = {
        "all_reduce": comm.all_reduce(ours, out=into, async_op=True),
        "broadcast": comm.broadcast(into, root=last, async_op=True),  # of the sum
        "reduce": comm.reduce(ours.clone(), root=last, async_op=True),
        "all_gather": comm.all_gather(ours, async_op=True),
        "gather": comm.gather(ours, root=last, async_op=True),
        "scatter": comm.scatter(list(ours) if comm.rank == last else None, root=last, async_op=True),
        "reduce_scatter": comm.reduce_scatter(ours, async_op=True),
        "all_to_all": comm.all_to_all(list(ours), async_op=True),
    }
    comm.wait_all()
    assert all(isinstance(work, Work) and work.is_completed() for work in works.values()), "wait_all left work undone"
    found = {verb: work.wait() for verb, work in works.items()}
    assert works["all_gather"].wait() is found["all_gather"], "a second wait must give the same"
    expect_same(found["broadcast"], total, "a broadcast of what was summed before")
    expect_same(found["reduce"], total if comm.rank == last else ours, "reduce")
    expect_same(torch.stack(found["all_gather"])[last], pattern(last, (n, 5)), "all_gather")
    assert len(found["gather"]) == (n if comm.rank == last else 0), "gather"
    expect_same(found["scatter"], pattern(last, (n, 5))[comm.rank], "scatter")
    expect_same(found["reduce_scatter"], total[comm.rank : comm.rank + 1], "reduce_scatter")
    expect_same(found["all_to_all"][last], pattern(last, (n, 5))[comm.rank], "all_to_all")


@least_ranks(2)
def work_completes_when_all_ranks_have_called(comm: Communicator) -> None:
    """Until all ranks have called, `is_completed` is false and `wait` with a timeout raises StallError."""
    began = time.monotonic()
    comm.barrier()
    if comm.rank == 0:
        work = comm.all_reduce(torch.ones(3), async_op=True)
        done = work.is_completed()
        if time.monotonic() - began < 0.2:  # the others are surely still asleep
            assert not done, "work cannot be completed before all ranks have called"
            raised(StallError, "waiting for 20 ms", work.wait, 0.02)
        expect_all(work.wait(), comm.world_size, "the sum")
        assert work.is_completed(), "work is completed after wait"
    else:
        time.sleep(0.3)
        comm.all_reduce(torch.ones(3))


@least_ranks(2)
def send_and_recv_do_not_wait_for_collectives(comm: Communicator) -> None:
    """Sends and receives do not wait for collectives under way: the last rank calls one only after it has received."""
    last, n = comm.world_size - 1, 70_001
    if comm.rank == last:
        expect_same(comm.recv(torch.zeros(n), 0), pattern(0, n), "a message sent during a collective")
        work = comm.all_reduce(pattern(comm.rank, n), async_op=True)
        comm.send(pattern(comm.rank, n), 0)
    else:
        work = comm.all_reduce(pattern(comm.rank, n), async_op=True)
        if comm.rank == 0:
            comm.send(pattern(0, n), last)
            expect_same(comm.recv(torch.zeros(n), last), pattern(last, n), "a message received during a collective")
    expect_same(work.wait(), summed(comm, n), "the collective")


@check
def a_blocking_call_does_not_overtake_earlier_work(comm: Communicator) -> None:
    """A blocking call returns only after the asynchronous work that was begun before it is completed."""
    n = comm.world_size
    for follow in ("all_reduce", "barrier", "object", "agree"):
        tensor = torch.full((100_001,), 1.0)
        work = comm.all_reduce(tensor, async_op=True)
        if follow == "all_reduce":
            expect_all(comm.all_reduce(tensor), n * n, "a sum of sums")
        elif follow == "barrier":
            comm.barrier()
        elif follow == "object":
            assert comm.all_gather_object(comm.rank) == list(range(n)), "objects after work"
        else:
            comm.agree()
        assert work.is_completed(), f"{follow} overtook the work"
    comm.wait_all()
    comm.wait_all()  # with nothing to wait for


# Objects and agreement
