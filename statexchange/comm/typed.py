"""Collectives of typed records; every rank checks what it reads."""

from __future__ import annotations

from collections.abc import Callable
from types import UnionType
from typing import TypeVar

from statexchange.comm.communicator import Communicator
from statexchange.messages import decode, encode, encoded

__all__ = ["agree", "from_all", "from_root"]

T = TypeVar("T")


def from_all(
    comm: Communicator, value: T, kind: type[T] | UnionType, what: str, check: Callable[[T], object] | None = None
) -> list[T]:
    """Return the values of all ranks in rank order; `kind`, `what` and `check` are as for `decode`. Collective."""
    if comm.world_size == 1:
        return [value]
    values = []
    # A rank decodes its own value, too: what cannot be read is an error on all ranks, and none goes on alone.
    for rank, data in enumerate(comm.all_gather_bytes(encoded(value, kind), operation=what)):
        values.append(decode(data, kind, what, rank, check))
    return values


def from_root(comm: Communicator, value: T, kind: type[T] | UnionType, what: str, root: int = 0) -> T:
    """Return the value of `root` on all ranks; those of the others are ignored. Collective."""
    if comm.world_size == 1:
        return value
    data = b""
    if comm.rank == root:
        data = encoded(value, kind)
    # Every backend has all_gather_bytes, which also finds ranks that are in another call.
    return decode(comm.all_gather_bytes(data, operation=what)[root], kind, what, root)


def agree(comm: Communicator, failure: Exception | None, phase: str, value: T | None, kind: type[T]) -> list[T]:
    """Wait for all ranks as `Communicator.agree` does, and return the values of all in rank order. Collective.

    `value` may be None on a rank that has a failure.
    """
    if comm.world_size == 1:
        comm.agree(failure, phase=phase)
        assert value is not None
        return [value]
    note: object = None
    if value is not None:
        note = encode(value, kind)
    values = []
    for rank, raw in enumerate(comm.agree(failure, phase=phase, note=note)):
        values.append(decode(raw, kind, f"its note on {phase}", rank))
    return values
