"""The store: a directory, local or at an fsspec URL, from which files are opened once and read as they were opened.

Every reader opens what it reads through an `OpenedPath` (opened_path.py). Opening it lists its directory once, pins the directory
and pins each file: a local file by its descriptor and its identity (device, inode, size, modification time), an object
by its ETag or what else its store says of a version. Data is read from the pinned file, never by opening a path again
with offsets of an earlier look. So a directory that is replaced by a rename is read as it was; what cannot be read as
it was is a `ReplacedError`, and whoever holds the place opens it again.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Literal
from urllib.parse import unquote

from statexchange.errors import InvalidArgumentError, excerpt, without_secrets
from statexchange.storage.files import bytes_of, check_size

__all__ = ["EntryKind", "Store", "StoredFile", "absolute_path", "is_url", "resolve_path", "strip_file_scheme"]

EntryKind = Literal["file", "directory", "other"]


def is_url(path: str) -> bool:
    """Whether `path` names something in an object store."""
    return "://" in path and not path.startswith(("shm://", "file://"))


def strip_file_scheme(path: str) -> str:
    """Return `path` itself; of ``file:///a/path`` the path that it means."""
    return unquote(path.removeprefix("file://")) if path.startswith("file:///") else path


def absolute_path(path: str) -> str:
    """Return an absolute path; ``..`` after a symbolic link means the parent of the link's target, so it stays."""
    if ".." not in path.split(os.sep):
        return os.path.abspath(path)
    return os.path.join(os.getcwd(), path).rstrip(os.sep)


def resolve_path(path: object, what: str) -> str:
    """Return the absolute path, the URL or the ``shm://name`` that a caller's path means.

    Every public call takes its paths here: ``~`` is the home directory, ``file:///a/path`` a local path, and messages
    show the absolute path whatever was given. Anything else is an InvalidArgumentError that begins with `what`.
    """
    given = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(given, str) or not given:
        raise InvalidArgumentError(f"{what} is a path or a URL, not {excerpt(path)}")
    name = strip_file_scheme(given)
    if "\0" in name:
        shown = excerpt(without_secrets(given))
        raise InvalidArgumentError(f"{what} is a path or a URL without null characters, not {shown}")
    return name if "://" in name else absolute_path(os.path.expanduser(name))


class StoredFile(ABC):
    """A file that was opened for reading and is pinned: all reads see the same bytes, or raise.

    Attributes: `path` (for messages), `size` in bytes, `is_remote` (each read is a request over a network).
    Not collective. Safe for several threads.
    """

    path: str
    size: int
    is_remote: bool = False

    @abstractmethod
    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from byte `offset`. A file that ends before that is a CorruptError, one that was replaced
        meanwhile a ReplacedError."""

    @abstractmethod
    def check_unchanged(self) -> None:
        """Raise ReplacedError if the file's bytes may have changed since it was opened."""

    @property
    @abstractmethod
    def version(self) -> list[str | int]:
        """Return a JSON value that changes whenever the file's bytes do: path, size, and ETag or time."""

    @property
    @abstractmethod
    def local_identity(self) -> list[str | int]:
        """Return a JSON value that is equal on all ranks of one host that opened the same file."""

    @property
    @abstractmethod
    def shared_identity(self) -> list[str | int] | None:
        """Return a JSON value that is equal on all hosts that opened the same file; None if hosts may hold copies."""

    def read_all(self, limit: int = 64 << 20) -> bytes:
        """Return all bytes; a file of more than `limit` bytes is a CorruptError."""
        check_size(self.size, limit, self.path)
        return bytes_of(self.size, lambda buffer: self.read_into(buffer, 0))


class Store(ABC):
    """One directory, pinned, and listed once. `path` is its absolute path or URL. Not collective."""

    path: str

    @cached_property
    def listing(self) -> Mapping[str, EntryKind]:
        """The kind of each name that lies in the directory, sorted by name. The directory is read once."""
        found = self._list()
        return {name: found[name] for name in sorted(found)}

    @property
    def files(self) -> list[str]:
        """Names of files, in order."""
        return [name for name, kind in self.listing.items() if kind == "file"]

    @property
    def directories(self) -> list[str]:
        """Names of directories, in order; of symbolic links to directories none."""
        return [name for name, kind in self.listing.items() if kind == "directory"]

    def path_of(self, name: str) -> str:
        """Return the path or URL of `name`."""
        return f"{self.path.rstrip('/')}/{name}"

    @abstractmethod
    def _list(self) -> dict[str, EntryKind]:
        """Read the directory."""

    @abstractmethod
    def open(self, name: str) -> StoredFile:
        """Open and pin a file. Raises NotFoundError; UnsafeError for what is no regular file; StorageError."""

    @abstractmethod
    def below(self, name: str, *, private: bool = False) -> Store:
        """Open the directory `name` in this one; its descriptor is closed with this store's.

        With `private` no symbolic link in it is followed, and one in which other users may write is an UnsafeError.
        """

    @abstractmethod
    def is_current(self) -> bool:
        """Whether the path still leads to this directory."""

    @abstractmethod
    def close(self) -> None:
        """Close all descriptors of this store, of stores opened below it, and of its files.

        A local store raises InvalidArgumentError for any later call that needs one of them.
        """

    def read_small(self, name: str, limit: int = 64 << 20) -> bytes:
        """Return all bytes of a file; one of more than `limit` bytes is a CorruptError."""
        return self.open(name).read_all(limit)
