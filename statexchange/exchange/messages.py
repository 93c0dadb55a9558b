"""Records that ranks send each other: JSON values, read with a check that names the rank that sent a broken one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from statexchange.comm.communicator import Communicator
from statexchange.sharding import records

__all__ = ["from_all", "from_root"]

T = TypeVar("T")


def from_all(comm: Communicator, value: object, read: Callable[[Any], T], what: str) -> list[T]:
    """Send this rank's record to all ranks; return those of all, in rank order. Collective.

    Args:
        comm: the communicator.
        value: the record as a JSON value.
        read: returns the record, given such a value; raises ValueError for anything else.
        what: names the record in errors.
    """
    sent = comm.all_gather_bytes(_encoded(value), operation=what)
    return [records.decoded(data, read, what, rank) for rank, data in enumerate(sent)]


def from_root(comm: Communicator, value: object, read: Callable[[Any], T], what: str, root: int = 0) -> T:
    """Return root's record, on every rank; `value` is ignored elsewhere. Collective. The arguments are as above."""
    sent = comm.all_gather_bytes(_encoded(value) if comm.rank == root else b"", operation=what)
    return records.decoded(sent[root], read, what, root)


def _encoded(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
