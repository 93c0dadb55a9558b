"""Facts that must be equal on all ranks: compared by digests, and shown at the first place where two ranks differ."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from statexchange.comm.communicator import Communicator, from_root
from statexchange.errors import MismatchError

__all__ = ["Entry", "compare", "raise_difference", "shortened"]

_MOST_SHOWN = 4


class Entry(NamedTuple):
    """A path or name on a rank, and a text for all that is compared there."""

    path: str
    text: str


def compare(comm: Communicator, options: str, entries: Iterable[Entry] = ()) -> bytes:
    """Return the digest of `options`, such as ``init_sync=True``, and `entries`. Collective.

    Raises:
        MismatchError: they are not equal on all ranks.
    """
    entries = [*entries, Entry("(options)", options)]
    digest = hashlib.blake2b("\n".join(map("\t".join, entries)).encode(), digest_size=16).digest()
    digests = comm.all_gather_bytes(digest, operation="comparing what ranks have")
    different = [rank for rank, theirs in enumerate(digests) if theirs != digests[0]]
    if different:
        raise_difference(comm, entries, different, 0)
    return digest


def raise_difference(comm: Communicator, entries: Sequence[Entry], different: Sequence[int], root: int) -> None:
    """Raise a MismatchError on all ranks: the entries of the ranks `different` are not those of root. Collective.

    It names the lowest of these ranks, and shows both sides at the first path where that differs.
    """
    root_entries = from_root(comm, entries, list[Entry], "what it holds", root)
    failure = None
    if comm.rank in different:
        failure = _difference(entries, root_entries, comm.rank, root, different)
    comm.agree(failure, phase="comparing what ranks hold")


def _difference(
    entries: Sequence[Entry], root_entries: Sequence[Entry], rank: int, root: int, different: Sequence[int]
) -> MismatchError:
    """Return the error that shows root's entry and this rank's at the first path where they differ."""
    nothing = Entry("(nothing)", "nothing")
    live = expected = nothing
    for live, expected in itertools.zip_longest(entries, root_entries, fillvalue=nothing):
        if live != expected:
            break
    path = expected.path
    if live.path != path:  # one side lacks the path that the other has here
        if path == nothing.path or any(entry.path == path for entry in entries):
            expected, path = nothing, live.path
        else:
            live = nothing
    return MismatchError(
        f"not all ranks hold what root, rank {root}, holds (different on: {shortened(different)})",
        rank=rank,
        name=path or "(the whole)",
        expected=f"{expected.text} (rank {root})",
        found=f"{live.text} (rank {rank})",
    )


def shortened(items: Sequence[object]) -> str:
    """Return a text of the first four `items` and the number of the others. Not collective."""
    shown = ", ".join(map(str, items[:_MOST_SHOWN]))
    return shown if len(items) <= _MOST_SHOWN else f"{shown} and {len(items) - _MOST_SHOWN} more"
