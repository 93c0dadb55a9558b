"""Facts that must be equal on all ranks: compared by digests, and shown at the first place where two ranks differ."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from statexchange.comm.communicator import Communicator, from_root
from statexchange.errors import MismatchError

_MOST_SHOWN = 4


class Entry(NamedTuple):
    """A path or name on a rank, and a text for all that is compared there."""

    path: str
    text: str


def compare(comm: Communicator, options: str, entries: Iterable[Entry] = ()) -> bytes:
    """Return the digest of `options`, such as ``init_sync=True``, and `entries`. Collective.

    Raises:
        MismatchError: they are not equal on all ranks. It names the lowest rank that differs from rank 0, and shows
            both sides at the first path where it does.
    """
    # Last, so that a difference in parameters, which explains more, is shown first.
    entries = [*entries, Entry("(options)", options)]
    digest = hashlib.blake2b("\n".join(map("\t".join, entries)).encode(), digest_size=16).digest()
    digests = comm.all_gather_bytes(digest, operation="comparing what ranks have")
    different = [rank for rank, theirs in enumerate(digests) if theirs != digests[0]]
    # Nearly always none: only then are whole descriptions sent.
    if different:
        first_entries = from_root(comm, entries, list[Entry], "what it holds")
        failure = None
        if comm.rank in different:
            failure = _difference(entries, first_entries, comm.rank, different)
        comm.agree(failure, phase="comparing what ranks hold")
    return digest


def _difference(
    entries: Sequence[Entry], first_entries: Sequence[Entry], rank: int, different: Sequence[int]
) -> MismatchError:
    """Return the error that shows rank 0's entry and this rank's at the first path where they differ."""
    nothing = Entry("(nothing)", "nothing")
    live = expected = nothing
    for live, expected in itertools.zip_longest(entries, first_entries, fillvalue=nothing):
        if live != expected:
            break
    path = expected.path
    if live.path != path:  # one side lacks the path that the other has here
        if path == nothing.path or any(entry.path == path for entry in entries):
            expected, path = nothing, live.path
        else:
            live = nothing
    return MismatchError(
        f"not all ranks hold what rank 0 holds (different on: {shortened(different)})",
        rank=rank,
        name=path or "(the whole)",
        expected=f"{expected.text} (rank 0)",
        found=f"{live.text} (rank {rank})",
    )


def shortened(items: Sequence[object]) -> str:
    """Return a text of the first four `items` and the number of the others. Not collective."""
    shown = ", ".join(map(str, items[:_MOST_SHOWN]))
    if len(items) > _MOST_SHOWN:
        shown += f" and {len(items) - _MOST_SHOWN} more"
    return shown
