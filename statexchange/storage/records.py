"""Small files of a directory, or small objects below a URL, which several hosts write and read: runs, leases, marks.

Readers open the directory anew for each look: then a client of NFS asks the server for its attributes, and an object
store is consistent anyway. Writers replace the whole file.
"""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod

from statexchange.errors import NotFoundError
from statexchange.storage import files
from statexchange.storage.atomic import invalidate_listings, remove_abandoned, write_new
from statexchange.storage.location import is_remote, open_path

_MOST_BYTES = 4096
_MODE, _DIRECTORY_MODE = 0o666, 0o777  # less the umask: these are published
_CLOCK = "clock"  # an object that is put to learn the server's time


def names_in(path: str) -> list[str]:
    """Return the names in a directory as the server has them now; [] for anything else."""
    try:
        with open_path(path) as opened:
            return [] if opened.file is not None else list(opened.store.listing)
    except NotFoundError as error:
        # In an object store a directory without objects does not exist, but its bucket must.
        if is_remote(path):
            from statexchange.storage.fsspec_store import is_missing_bucket

            if is_missing_bucket(error):
                raise
        return []


class Records(ABC):
    """The small files of one directory."""

    def __init__(self, path: str) -> None:
        self.path = path

    # A store has no directories, and no object that is half written.

    def make(self) -> None:  # noqa: B027
        """Make the directory and its parents."""

    def clear(self) -> None:  # noqa: B027
        """Remove what killed writers have left under temporary names."""

    def end(self) -> None:  # noqa: B027
        """Remove the directory, which has no file; it may be absent."""

    @abstractmethod
    def write(self, name: str, data: bytes = b"") -> None:
        """Write a file, whether the name exists or not; raise NotFoundError if the directory does not."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, which may be absent."""

    def read(self, name: str) -> bytes:
        """Return the content of a file; raise NotFoundError if there is none, ReplacedError while it is replaced."""
        with open_path(self.path) as opened:
            return opened.store.read_small(name, _MOST_BYTES)

    @abstractmethod
    def modified(self, name: str) -> float | None:
        """Return when a file was written; None if it is gone, or if the store does not say."""

    def age(self, name: str, now: float) -> float:
        """Return how many seconds ago a file was written; 0 if it is gone, or if the store does not say."""
        modified = self.modified(name)
        return 0.0 if modified is None else now - modified

    @abstractmethod
    def now(self) -> float:
        """Return the present time by the clock by which files here are dated; without permission to write, this host's.

        The directory is written to.
        """


def records_at(path: str) -> Records:
    """Return the small files of a local directory or of the objects below a URL; nothing is looked at."""
    return _ObjectRecords(path) if is_remote(path) else _FileRecords(path)


class _FileRecords(Records):
    def make(self) -> None:
        files.make_path(self.path, _DIRECTORY_MODE)

    def write(self, name: str, data: bytes = b"") -> None:
        with files.directory(self.path) as dir_fd:
            write_new(dir_fd, name, data, path=f"{self.path}/{name}", mode=_MODE, overwrite=True)
            # Readers of other hosts learn of a run, a lease or a mark from the listing alone.
            invalidate_listings(dir_fd, path=self.path)

    def remove(self, name: str) -> None:
        with contextlib.suppress(NotFoundError), files.directory(self.path) as dir_fd:
            files.remove_file(name, f"{self.path}/{name}", dir_fd)

    def modified(self, name: str) -> float | None:
        # Not opened: the lease of a reader whose umask lets no other user read it ends as any other.
        with contextlib.suppress(NotFoundError), files.directory(self.path) as dir_fd:
            attributes = files.stat_of(name, dir_fd, f"{self.path}/{name}")
            if attributes is not None:
                return attributes.st_mtime
        return None

    def now(self) -> float:
        # Without a time of its own, utime lets the server of a network file system take its clock's.
        try:
            os.utime(self.path)
            return os.stat(self.path).st_mtime
        except OSError:
            return time.time()

    def clear(self) -> None:
        with contextlib.suppress(NotFoundError), files.directory(self.path) as dir_fd:
            remove_abandoned(dir_fd)

    def end(self) -> None:
        parent, name = os.path.split(self.path)
        with contextlib.suppress(NotFoundError), files.directory(parent) as dir_fd:
            files.remove_directory(name, dir_fd, self.path)


class _ObjectRecords(Records):
    def __init__(self, path: str) -> None:
        from statexchange.storage.publish.objects import Objects  # imports fsspec

        super().__init__(path)
        self._objects = Objects(path)

    def write(self, name: str, data: bytes = b"") -> None:
        self._objects.put(name, data, overwrite=True)

    def remove(self, name: str) -> None:
        # With its version, so that an object that was replaced meanwhile stays, where the store can compare them.
        version = self._objects.version(name)
        if version is not None:
            self._objects.remove(name, version)

    def modified(self, name: str) -> float | None:
        with contextlib.suppress(NotFoundError), open_path(self.path) as opened:
            return opened.store.open(name).modified
        return None

    def now(self) -> float:
        try:
            self.write(_CLOCK)
        except OSError:
            return time.time()
        return self.modified(_CLOCK) or time.time()
