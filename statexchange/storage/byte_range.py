"""The byte range that holds one box of a tensor in a stored file."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from statexchange.sharding.shards import Box
from statexchange.storage.store import StoredFile

__all__ = ["ByteRange"]


class ByteRange(NamedTuple):
    """The position of one box's bytes in a file, and their known digests.

    Attributes:
        file: the opened file.
        begin: offset in the file, in bytes, of the box's first element.
        nbytes: size of the box.
        digest: digest of the box's bytes in C order; None if it is not known.
        strides: stored elements from one index to the next in each dim; None if the box is one run in C order.
        parts: blocks of the box, in the tensor's coordinates, with their known digests.
        orders: for each dim in which the box has the stored elements in another order, their indices there, of which
            only the differences count; None for other dims, and () if there is no such dim.
    """

    file: StoredFile
    begin: int
    nbytes: int
    digest: str | None = None
    strides: tuple[int, ...] | None = None
    parts: tuple[tuple[Box, str], ...] = ()
    orders: tuple[array[int] | None, ...] = ()

    @property
    def path(self) -> str:
        """The file's path, for messages."""
        return self.file.path

    @property
    def is_proven(self) -> bool:
        """Whether digests cover all bytes of the box."""
        return self.digest is not None or bool(self.parts)
