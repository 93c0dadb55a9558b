"""The byte range that holds one box of a tensor in a stored file."""

from __future__ import annotations

from dataclasses import dataclass

from statexchange.sharding.shards import Box
from statexchange.storage.store import StoredFile

__all__ = ["ByteRange"]


@dataclass(frozen=True, slots=True)
class ByteRange:
    """The position of one box's bytes in a file, and their known digests.

    The first element starts at byte `begin` of `file`. Without `strides` all `nbytes` of the box follow in C order;
    else index i lies ``sum(i * strides)`` elements further. `digest` is that of the box's bytes in C order, where it is
    known; `parts` are blocks of the box (in the tensor's coordinates) whose digests are known.
    """

    file: StoredFile
    begin: int
    nbytes: int
    digest: str | None = None
    strides: tuple[int, ...] | None = None
    parts: tuple[tuple[Box, str], ...] = ()

    @property
    def path(self) -> str:
        """The file's path, for messages."""
        return self.file.path

    @property
    def is_proven(self) -> bool:
        """Whether digests cover all bytes of the box."""
        return self.digest is not None or bool(self.parts)
