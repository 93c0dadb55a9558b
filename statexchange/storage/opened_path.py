"""Open a path or URL for reading, and reopen it if it is replaced during the read."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    NotFoundError,
    ReplacedError,
    StateExchangeError,
)
from statexchange.storage import local
from statexchange.storage.json_text import parse_json
from statexchange.storage.location import location
from statexchange.storage.store import Store, resolve_path

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["OpenedPath", "open_path", "read_option_file", "read_with_retry"]

T = TypeVar("T")
_ATTEMPTS = 40  # to open a path that other processes keep replacing
_STALE_S = 1.0  # how long an NFS 3 client may show a removed directory under its old name


@dataclass(frozen=True, slots=True)
class OpenedPath:
    """An opened path: a directory (`file` is None), or the file of that name in it."""

    path: str
    store: Store
    file: str | None

    @property
    def names(self) -> list[str]:
        """Names of the files to read: all files of the directory, or the one file."""
        return self.store.files if self.file is None else [self.file]

    @property
    def is_shared(self) -> bool:
        """Whether other hosts may change the directory."""
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


def read_option_file(path: str | os.PathLike[str], what: str) -> object:
    """Return the parsed JSON file that an option names; `what` is what it is called in errors. Not collective.

    Raises:
        InvalidArgumentError: the path is a directory, or the file is no JSON.
        NotFoundError: there is nothing at the path.
        StorageError: the path cannot be read.
    """
    with open_path(resolve_path(path, f"{what} file")) as opened:
        if opened.file is None:
            raise InvalidArgumentError(f"{what} is a JSON file, and this is a directory", path=opened.path)
        try:
            return parse_json(opened.store.read_small(opened.file), opened.path, opened.store.budget)
        except CorruptError as error:
            text = f"{what} is a JSON file, and this is none: {error.message}"
            raise InvalidArgumentError(text, path=opened.path) from None


def open_path(path: str) -> OpenedPath:
    """Open a local path, ``file:///path``, ``shm://name`` or an fsspec URL. Not collective.

    A file system that cannot exchange two names replaces a checkpoint in two renames (atomic.py). Between them the path
    is absent; then the new checkpoint is opened under its hidden name.

    Raises:
        NotFoundError: there is nothing at the path.
        StorageError: the path cannot be read.
    """
    at = location(path)
    return OpenedPath(at.shown, *at.open())


def read_with_retry(path: str, read: Callable[[OpenedPath], T]) -> T:
    """Open a path, call `read` with it and return the result; retry while the path is being replaced.

    An error of `read` counts only if the path still leads to the directory in which it arose: otherwise another
    process has replaced the directory meanwhile. On shared storage a file must also be missing or broken for a
    whole second, because an NFS client may go on showing a directory that another host has removed.

    Args:
        path: the path or URL.
        read: called with the opened path. After success the path stays open and the caller closes it; after an error
            it is closed.

    Raises:
        NotFoundError: there is nothing at the path.
        ReplacedError: the path was replaced in each of 40 attempts.
        StateExchangeError: what `read` raised.
    """
    last_error: StateExchangeError | None = None
    stale_until: float | None = None
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(min(0.001 * 2**attempt, 0.05))
        try:
            opened = open_path(path)
        except NotFoundError as error:
            if last_error is None:
                raise
            last_error = error  # between two publications, or removed for good: the next attempts decide
            continue
        try:
            return read(opened)
        except StateExchangeError as error:
            retry = isinstance(error, ReplacedError) or not opened.is_current()
            if not retry and opened.is_shared and isinstance(error, (NotFoundError, IncompleteError, CorruptError)):
                if stale_until is None:
                    stale_until = time.monotonic() + _STALE_S
                retry = time.monotonic() < stale_until
            opened.close()
            if not retry:
                raise
            last_error = error
        except BaseException:
            opened.close()
            raise
    assert last_error is not None
    if isinstance(last_error, NotFoundError):
        raise last_error
    raise ReplacedError("replaced again and again while it was read: try again later", path=path) from last_error
