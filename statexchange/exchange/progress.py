"""Report a rank's progress while it reads or writes, so that ranks that wait for it extend their deadlines."""

from __future__ import annotations

from statexchange.comm.communicator import Communicator

__all__ = ["Progress"]

_REPORTED_BYTES = 1 << 20
_PART_BYTES = 4 << 10  # that a part counts for, besides its own: a small one takes as long as a copy of so much


class Progress:
    """Reports the progress of one rank as bytes move, about once in a megabyte.

    A report takes as long as the writing of a small tensor.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._nbytes = 0

    def add(self, nbytes: int) -> None:
        """Count a part of `nbytes` that has moved; raise what `Communicator.progress` raises."""
        self._nbytes += nbytes + _PART_BYTES
        if self._nbytes >= _REPORTED_BYTES:
            self._nbytes = 0
            self._comm.progress()
