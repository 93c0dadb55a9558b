"""Open a path or URL for reading, and reopen it if it is replaced during the read."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from statexchange.errors import (
    CorruptError,
    IncompleteError,
    NotFoundError,
    ReplacedError,
    StateExchangeError,
    without_secrets,
)
from statexchange.storage import local
from statexchange.storage.store import Store, is_url

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["OpenedPath", "open_path", "read_with_retry"]

T = TypeVar("T")
_ATTEMPTS = 40  # of opening a place that others replace meanwhile
_DOUBT_S = 1.0  # how long a client of NFS 3 may show a directory under its old name while its files are removed


@dataclass(frozen=True, slots=True)
class OpenedPath:
    """What a path leads to: a directory (`file` is None), or the file of this name in it."""

    path: str
    store: Store
    file: str | None

    @property
    def names(self) -> list[str]:
        """Names of the files to read: those of the directory, or the one."""
        return self.store.files if self.file is None else [self.file]

    @property
    def is_shared(self) -> bool:
        """Whether it is a directory that other hosts may change."""
        return isinstance(self.store, local.LocalStore) and self.store.is_shared

    def is_current(self) -> bool:
        """Whether the path still leads to what was opened."""
        return self.store.is_current()

    def close(self) -> None:
        """Release all descriptors."""
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def open_path(path: str) -> OpenedPath:
    """Open what lies at `path`: a local path, ``file:///path``, ``shm://name`` or an fsspec URL. Not collective.

    Raises NotFoundError if nothing lies there, StorageError. While a checkpoint is being replaced on a file system
    that cannot exchange two names, its path leads nowhere for a moment: then the new one is opened where it waits.
    """
    if is_url(path):
        from statexchange.storage import fsspec_store  # and with it fsspec, only for a URL

        return OpenedPath(without_secrets(path), *fsspec_store.open_url(path))
    return OpenedPath(path, *local.open_local(path))


def read_with_retry(path: str, read: Callable[[OpenedPath], T]) -> T:
    """Open path, call read(opened) and return its result; retry while the path is being replaced.

    The place stays open after success (the caller closes it) and is closed after an error. Raises NotFoundError;
    ReplacedError after 40 attempts; what `read` raises while the path still leads to the same directory.

    Between two looks another host may have removed what the first one found, and on NFS a directory that is gone is
    still seen for a while: only what is missing or broken in a directory that the path still leads to is an error, on
    shared storage if that stays so for a second.
    """
    last: StateExchangeError | None = None
    doubt_ends: float | None = None
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(min(0.001 * 2**attempt, 0.05))
        try:
            opened = open_path(path)
        except NotFoundError as error:
            if last is None:
                raise
            last = error  # between two publications, or gone for good: the next attempts show which
            continue
        try:
            return read(opened)
        except StateExchangeError as error:
            again = isinstance(error, ReplacedError) or not opened.is_current()
            if not again and opened.is_shared and isinstance(error, (NotFoundError, IncompleteError, CorruptError)):
                if doubt_ends is None:
                    doubt_ends = time.monotonic() + _DOUBT_S
                again = time.monotonic() < doubt_ends
            opened.close()
            if not again:
                raise
            last = error
        except BaseException:
            opened.close()
            raise
    assert last is not None
    if isinstance(last, NotFoundError):
        raise last
    raise ReplacedError("replaced again and again while it was read: read it again", path=path) from last
