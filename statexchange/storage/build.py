"""A build: one checkpoint directory under construction, which appears under its name as a whole or not at all.

open_build.py begins one at a local path (directory_build.py) or at an fsspec URL (object_build.py); the two have
protocols of their own, explained at the top of their files.

Guarantees of every build:

1. The name appears only when all files are complete and durable.
2. Exactly one of several concurrent publishers succeeds, the others get TargetExistsError.
3. Only the directory checked at the start is replaced.
4. Only files that a record proves to be ours are removed.
5. The next publisher to the same name cleans up after a killed one.
"""

from __future__ import annotations

import errno
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from statexchange.errors import StorageError, TargetExistsError
from statexchange.processes import Owner
from statexchange.storage.files import Buffer
from statexchange.storage.store import Store

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "ActiveBuilds",
    "Build",
    "OutputFile",
    "ReplaceCheck",
    "active_builds",
    "busy_error",
    "removed_error",
    "target_exists",
]

ReplaceCheck: TypeAlias = Callable[[Store], Sequence[str]]
"""Given the directory at the target, return its file names in removal order; raise UnsafeError or CorruptError if it
must not be replaced."""


class ActiveBuilds:
    """The nonces of all builds of this process that have not ended. Safe for several threads.

    A forked child inherits none of them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active: set[tuple[int, str]] = set()  # pid and nonce

    def add(self, nonce: str) -> None:
        """Add a build that begins."""
        with self._lock:
            self._active.add((os.getpid(), nonce))

    def discard(self, nonce: str) -> None:
        """Remove a build that has ended."""
        with self._lock:
            self._active.discard((os.getpid(), nonce))

    def is_active(self, nonce: str) -> bool:
        """Whether a build of this process has this nonce."""
        with self._lock:
            return (os.getpid(), nonce) in self._active


active_builds = ActiveBuilds()


def busy_error(owner: Owner | None, path: str) -> TargetExistsError:
    """Return the error for a target to which `owner` is publishing; None if that process is unknown."""
    who = "another process" if owner is None else str(owner)
    return TargetExistsError(f"{who} is publishing to this target: wait for it, or choose another path", path=path)


def target_exists(path: str) -> TargetExistsError:
    """Return the error for a target that exists and may not be replaced."""
    return TargetExistsError("the target exists; overwrite=True (--overwrite) replaces it", path=path)


def removed_error(path: str) -> StorageError:
    """Return the error for a file of a build that is gone although the build has not removed it."""
    text = "another process removed this file during publishing: check for cleanup jobs, then publish again"
    return StorageError(text, errno=errno.ENOENT, path=path)


class OutputFile(ABC):
    """A large file of a build. Its first bytes, `header`, are written after all others, where the store allows it.

    Attributes: `path` (of a local file where it lies now), `header`, `is_reserved` (its room is reserved).
    """

    path: str
    header: bytes
    is_reserved: bool = False

    @abstractmethod
    def write(self, data: Buffer, at: int) -> None:
        """Write `data` at byte `at`; into an object store in order, from the end of `header` on."""

    @abstractmethod
    def finish(self, *, writes_header: bool = True) -> None:
        """Make the file complete and durable; `header` is written unless another process has written it in place."""

    @abstractmethod
    def close(self) -> None:
        """Release descriptors and uploads; a file that is not finished is not wanted any more."""


class Build(ABC):
    """One directory under construction. Ends in `commit` or `abandon`, which is the default of a with block.

    Attributes: `path` (of the target), `building_path` (where its files lie now), `finished` (metadata by name of the
    output files that an interrupted publisher of the same plan had finished). Root only.
    """

    path: str
    building_path: str
    finished: dict[str, Any]

    @abstractmethod
    def create(self, name: str, nbytes: int, header: bytes) -> OutputFile:
        """Make an output file of `nbytes` bytes, of which `header` are the first. Safe for several threads."""

    @abstractmethod
    def put(self, name: str, data: Buffer) -> None:
        """Write a small file, whose name must be free."""

    @abstractmethod
    def record(self, name: str, metadata: Any) -> None:
        """Record that an output file is finished, with metadata (JSON), for whoever resumes after a kill."""

    @abstractmethod
    def make_probe(self) -> str:
        """Return a path that exists where this directory is seen, and nowhere else, until `commit`."""

    @abstractmethod
    def commit(self, name: str, data: Buffer) -> None:
        """Write the last file and give the directory its name: it is there whole and durable when this returns.

        Raises TargetExistsError if another publisher was first.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Remove what was built, unless it was committed. Does nothing the second time."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.abandon()
