"""Checks of errors: calls that no rank can make, that one rank cannot make, and that differ between ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from conformance.checking import (
    PROMPTLY_S,
    UNTOUCHED,
    Act,
    check,
    expect_all,
    expect_it_still_works,
    expect_same,
    expect_sites,
    least_ranks,
    pattern,
    raised,
    summed,
)
from statexchange.comm.communicator import Communicator
from statexchange.errors import InvalidArgumentError, MismatchError, UnsupportedError


@check
def impossible_arguments_are_refused_on_every_rank(comm: Communicator) -> None:
    """A dtype without a right result raises UnsupportedError (a TypeError), a wrong value InvalidArgumentError."""
    n, four = comm.world_size, torch.ones(4)
    expanded, wrong = torch.zeros(1).expand(4), torch.zeros(5)
    invalid: dict[str, Callable[[], Any]] = {
        "an unknown op": lambda: comm.all_reduce(four, "median"),
        "an expanded target": lambda: comm.all_reduce(expanded),
        "an expanded out": lambda: comm.all_reduce(four, out=expanded),
        "an out of another shape": lambda: comm.all_reduce(four, out=wrong),
        "an out of another dtype": lambda: comm.broadcast(four, out=wrong[:4].double()),
        "an absent root": lambda: comm.broadcast(four, root=n),
        "a negative root": lambda: comm.reduce(four, root=-1),
        "too many tensors": lambda: comm.all_to_all([four] * (n + 1)),
        "too few tensors": lambda: comm.scatter([four] * (n - 1)),
        "a 0-d reduce_scatter": lambda: comm.reduce_scatter(torch.tensor(1.0)),
    }
    unsupported: dict[str, Callable[[], Any]] = {
        "integers scaled by a half": lambda: comm.all_reduce(torch.ones(4, dtype=torch.int64), scale=0.5),
        "a list": lambda: comm.all_gather([1.0, 2.0]),
        "a sparse tensor": lambda: comm.all_reduce(torch.eye(3).to_sparse()),
        "an array of objects": lambda: comm.broadcast(np.array([None, 1])),
    }
    for what, act in invalid.items():
        raised(InvalidArgumentError, what, act)
    for what, act in unsupported.items():
        raised(UnsupportedError, what, act)
    expect_all(four, 1.0, "a tensor of refused calls")
    expect_all(wrong, 0.0, "an out of refused calls")
    expect_it_still_works(comm)


ACCEPTED: dict[str, Act] = {
    "all_reduce": lambda c: c.all_reduce(torch.ones(4)),
    "all_reduce_multiple": lambda c: c.all_reduce_multiple([torch.ones(4)]),
    "all_gather": lambda c: c.all_gather(torch.ones(4)),
    "all_to_all": lambda c: c.all_to_all([torch.ones(4)] * c.world_size),
    "broadcast": lambda c: c.broadcast(torch.ones(4)),
    "empty": lambda c: c.empty((3,), torch.float32),
    "gather_object": lambda c: c.gather_object(1),
}
REFUSED: dict[str, tuple[type[BaseException], str, Callable[[Any], Any]]] = {
    "integers": (UnsupportedError, "all_reduce", lambda c: c.all_reduce(torch.ones(4, dtype=torch.int32), "avg")),
    "read-only": (InvalidArgumentError, "all_reduce", lambda c: c.all_reduce(read_only())),
    "expanded": (InvalidArgumentError, "all_reduce", lambda c: c.all_reduce(torch.ones(1).expand(4))),
    "shape of out": (InvalidArgumentError, "all_reduce", lambda c: c.all_reduce(torch.ones(4), out=torch.ones(3))),
    "list of ops": (InvalidArgumentError, "all_reduce", lambda c: c.all_reduce(torch.ones(4), ["sum"])),
    "scale in words": (InvalidArgumentError, "all_reduce", lambda c: c.all_reduce(torch.ones(4), scale="half")),
    "absent root": (InvalidArgumentError, "broadcast", lambda c: c.broadcast(torch.ones(4), root=99)),
    "root in words": (InvalidArgumentError, "broadcast", lambda c: c.broadcast(torch.ones(4), root="me")),
    "no tensor": (UnsupportedError, "all_gather", lambda c: c.all_gather(None)),
    "empty list": (InvalidArgumentError, "all_to_all", lambda c: c.all_to_all([])),
    "no list": (InvalidArgumentError, "all_to_all", lambda c: c.all_to_all(None)),
    "none of several": (UnsupportedError, "all_reduce_multiple", lambda c: c.all_reduce_multiple([None])),
    "number": (InvalidArgumentError, "all_reduce_multiple", lambda c: c.all_reduce_multiple(7)),
    "dtype in words": (InvalidArgumentError, "empty", lambda c: c.empty((3,), "float32")),
    "negative root": (InvalidArgumentError, "gather_object", lambda c: c.gather_object(1, root=-1)),
}
"""What is wrong on one rank: the error, the operation, and that rank's call."""


def read_only() -> np.ndarray[Any, Any]:
    array = np.ones(4)
    array.flags.writeable = False
    return array


@least_ranks(2)
def a_refusal_on_one_rank_is_an_error_on_all(comm: Communicator) -> None:
    """If one rank's arguments are refused, all ranks raise that within a second, also if they do so asynchronously.

    The communicator works afterwards.
    """
    for name, (kind, verb, bad) in REFUSED.items():
        what = f"{verb} with wrong arguments ({name}) on one rank"
        for chosen in (0, comm.world_size - 1):
            began = time.monotonic()
            raised(kind, what, bad if comm.rank == chosen else ACCEPTED[verb], comm)
            took = time.monotonic() - began
            assert took < PROMPTLY_S, f"{what} was reported after {took:.1f} s"
            if verb not in ("empty", "gather_object"):  # these take no async_op
                later = bad if comm.rank == chosen else partial(asynchronously, ACCEPTED[verb])
                raised(kind, f"{what}, asynchronously on the others", later, comm)
    expect_it_still_works(comm)


def asynchronously(act: Act, comm: Communicator) -> Any:
    """Run `act` with `async_op=True` added to its call, and wait for the result."""
    return act(AsyncOperations(comm)).wait()  # type: ignore[arg-type]


class AsyncOperations:
    """A communicator that adds `async_op=True` to every call."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.world_size = comm.world_size

    def __getattr__(self, verb: str) -> Any:
        return partial(getattr(self._comm, verb), async_op=True)


# Ranks in different calls


def ones(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(n, dtype=dtype)


DIFFERENT: dict[str, tuple[Act, Act]] = {
    "shape": (lambda c: c.all_reduce(ones(5)), lambda c: c.all_reduce(ones(6))),
    "number of dimensions": (lambda c: c.all_reduce(ones(6)), lambda c: c.all_reduce(ones(6).view(2, 3))),
    "small or large": (lambda c: c.all_reduce(ones(5)), lambda c: c.all_reduce(ones(100_000))),
    "large shape": (lambda c: c.all_reduce(ones(300_000)), lambda c: c.all_reduce(ones(300_001))),
    "dtype": (lambda c: c.all_reduce(ones(5)), lambda c: c.all_reduce(ones(5, torch.int32))),
    "dtype of one size": (
        lambda c: c.all_reduce(ones(5, torch.half)),
        lambda c: c.all_reduce(ones(5, torch.bfloat16)),
    ),
    "op": (lambda c: c.all_reduce(ones(5)), lambda c: c.all_reduce(ones(5), "max")),
    "sum or avg": (lambda c: c.all_reduce(ones(5)), lambda c: c.all_reduce(ones(5), "avg")),
    "scale": (lambda c: c.all_reduce(ones(5)), lambda c: c.all_reduce(ones(5), scale=2.0)),
    "scale by a billionth": (
        lambda c: c.all_reduce(ones(5), scale=1 / 3),
        lambda c: c.all_reduce(ones(5), scale=1 / 3 + 1e-9),
    ),
    "root of broadcast": (lambda c: c.broadcast(ones(5)), lambda c: c.broadcast(ones(5), root=1)),
    "root of a large broadcast": (lambda c: c.broadcast(ones(9**6)), lambda c: c.broadcast(ones(9**6), root=1)),
    "root of reduce": (lambda c: c.reduce(ones(5)), lambda c: c.reduce(ones(5), root=1)),
    "root of gather": (lambda c: c.gather(ones(5)), lambda c: c.gather(ones(5), root=1)),
    "root of scatter": (
        lambda c: c.scatter([ones(5)] * c.world_size),
        lambda c: c.scatter([ones(5)] * c.world_size, root=1),
    ),
    "root of objects": (lambda c: c.gather_object(1), lambda c: c.gather_object(1, root=1)),
    "shape of broadcast": (lambda c: c.broadcast(ones(5)), lambda c: c.broadcast(ones(6))),
    "shape of all_gather": (lambda c: c.all_gather(ones(5)), lambda c: c.all_gather(ones(6))),
    "dtype of gather": (lambda c: c.gather(ones(6)), lambda c: c.gather(ones(6).double())),
    "shape of reduce_scatter": (lambda c: c.reduce_scatter(ones(12)), lambda c: c.reduce_scatter(ones(24))),
    "verb": (lambda c: c.all_reduce(ones(5)), lambda c: c.reduce(ones(5))),
    "all_gather or gather": (lambda c: c.all_gather(ones(5)), lambda c: c.gather(ones(5))),
    "all_to_all or scatter": (
        lambda c: c.all_to_all([ones(5)] * c.world_size),
        lambda c: c.scatter([ones(5)] * c.world_size),
    ),
    "broadcast or all_reduce": (lambda c: c.broadcast(ones(70_000)), lambda c: c.all_reduce(ones(70_000))),
    "one more call on some ranks": (lambda c: c.barrier(), lambda c: c.all_reduce(ones(5))),
    "one more large call on some ranks": (lambda c: c.barrier(), lambda c: c.all_reduce(ones(9**6))),
    "objects or tensors": (lambda c: c.all_gather_object(1), lambda c: c.all_gather(ones(5))),
    "all_gather_object or broadcast_object": (lambda c: c.all_gather_object(1), lambda c: c.broadcast_object(1)),
    "barriers": (lambda c: c.barrier(tag="lunch"), lambda c: c.barrier(tag="tea")),
    "number of tensors": (
        lambda c: c.all_reduce_multiple([ones(5)]),
        lambda c: c.all_reduce_multiple([ones(5), ones(5)]),
    ),
    "shapes of several": (
        lambda c: c.all_reduce_multiple([ones(5), ones(3)]),
        lambda c: c.all_reduce_multiple([ones(3), ones(5)]),
    ),
    "contiguous or not": (
        lambda c: c.all_reduce_multiple([ones(5), ones(5)]),
        lambda c: c.all_reduce_multiple([ones(5), ones(5)], contiguous=False),
    ),
    "several or none": (lambda c: c.all_reduce_multiple([]), lambda c: c.all_reduce_multiple([ones(5)])),
    "empty": (lambda c: c.empty((5,), torch.float32), lambda c: c.empty((6,), torch.float32)),
    "dtype of empty": (lambda c: c.empty((4,), torch.int32), lambda c: c.empty((4,), torch.float32)),
    "asynchronous": (
        lambda c: c.all_reduce(ones(5), async_op=True).wait(),
        lambda c: c.broadcast(ones(5), async_op=True).wait(),
    ),
    "one asynchronous": (
        lambda c: c.all_reduce(ones(70_000), async_op=True).wait(),
        lambda c: c.all_gather(ones(5)),
    ),
}


@least_ranks(2)
def ranks_in_different_calls_all_raise_promptly(comm: Communicator) -> None:
    """If one rank differs in shape, dtype, op, root, scale, operation or number of calls, all raise MismatchError.

    They raise within a second; the message names both call sites, and the communicator works afterwards.
    """
    for what, (usual, odd) in DIFFERENT.items():
        for chosen in (0, comm.world_size - 1):
            differ(comm, what, usual, odd, chosen)
    expect_it_still_works(comm)


def differ(comm: Communicator, what: str, usual: Act, odd: Act, chosen: int) -> None:
    act = odd if comm.rank == chosen else usual
    comm.barrier()
    began = time.monotonic()
    error = raised(MismatchError, f"ranks that differ in {what}", act, comm)
    took = time.monotonic() - began
    assert took < PROMPTLY_S, f"that ranks differ in {what} was reported after {took:.1f} s"
    expect_sites(error, usual, odd)
    ours = pattern(comm.rank, 9)
    expect_same(comm.all_reduce(ours), summed(comm, 9), f"a sum after ranks differed in {what}")


@least_ranks(2)
def different_calls_after_equal_ones_are_detected(comm: Communicator) -> None:
    """Calls that matched before are compared again: one rank repeats them in another order, and all raise."""
    first: Act = lambda c: c.all_reduce(ones(5))  # noqa: E731 (the message names its line)
    second: Act = lambda c: c.broadcast(ones(5))  # noqa: E731
    for _ in range(3):
        first(comm)
        second(comm)
    differ(comm, "order", first, second, comm.world_size - 1)
    differ(comm, "order", second, first, comm.world_size - 1)
    expect_it_still_works(comm)


@least_ranks(2)
def a_mismatch_changes_no_buffers(comm: Communicator) -> None:
    """If ranks are in different calls, neither tensors nor `out` change."""
    for n in (5, 70_000):
        ours, out = pattern(comm.rank, n), torch.full((n,), float(UNTOUCHED))
        op = "max" if comm.rank == 0 else "sum"
        root = 1 if comm.rank == 0 else 0
        raised(MismatchError, "different ops", comm.all_reduce, ours, op)
        raised(MismatchError, "different ops", comm.all_reduce, ours, op, out=out)
        raised(MismatchError, "different roots", comm.broadcast, ours, root=root, out=out)
        raised(MismatchError, "different ops", comm.reduce, ours, op, out=out)
        expect_same(ours, pattern(comm.rank, n), "a tensor after a mismatch")
        expect_all(out, UNTOUCHED, "an out after a mismatch")
