"""The interface of a build: one checkpoint directory under construction, which appears whole or not at all.

`open_build` of this package opens it at a local path (directory_build.py) or at an fsspec URL (object_build.py).

A build goes through the states *open* (files are created, written and recorded), then *committed* or *abandoned*. It
guarantees:

1. The target's name appears only when all files are complete and durable.
2. Of several concurrent publishers exactly one succeeds; the others get TargetExistsError. In an object store, one of
   another host that overwrites may wait until the first has ended, and then replace what that has published.
3. Only a directory that the publisher has checked is replaced.
4. A file is removed only if a record proves that a statexchange publisher made it.
5. The next publisher to the same name cleans up after one that was killed.
"""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from statexchange.errors import StorageError, TargetExistsError
from statexchange.processes import Owner
from statexchange.storage.files import Buffer
from statexchange.storage.rank_writer import DigestedTensors
from statexchange.storage.store import Store

if TYPE_CHECKING:
    from typing_extensions import Self

    from statexchange.storage.tensorfile import ShardData

ReplaceCheck: TypeAlias = Callable[[Store], Sequence[str]]
"""Given the directory at the target, return its file names in removal order; raise UnsafeError or CorruptError if it
must not be replaced."""


OwnCheck: TypeAlias = Callable[[Store, str], bool]
"""Given a directory of an object store without a manifest, return whether the object of this name was put by a killed
publisher of the same kind."""


@dataclass(frozen=True, slots=True)
class UnfinishedBuild:
    """The files at a target of one publisher or removal that has not ended, or was killed.

    Attributes:
        nonce: the random number in its hidden names or its claim.
        paths: its hidden directories, none if it has only an owner record; at a URL the target.
        is_removal: whether it removes a directory; else it publishes one.
        owner: the process; None if its record is absent or incomplete.
        state: whether the process runs, as far as can be proved.
        nbytes: bytes of its files.
    """

    nonce: str
    paths: tuple[str, ...]
    is_removal: bool
    owner: Owner | None
    state: Literal["dead", "alive", "unknown"]
    nbytes: int


NO_PLAN = "0" * 32
"""The plan digest of a build that takes over nothing of an interrupted one."""

open_builds: set[tuple[int, str]] = set()
"""Pid and nonce of each open build of this process; with the pid, because a forked child has none of its parent's."""


def owner_state(owner: Owner | None, nonce: str) -> Literal["dead", "alive", "unknown"]:
    """Return whether the publisher with this nonce runs, as far as can be proved; `owner` is None without a record."""
    if owner is None:
        return "unknown"
    if owner == Owner.current():
        # This process runs, but its build may have been given up without removing all that it had made.
        return "alive" if (os.getpid(), nonce) in open_builds else "dead"
    if owner.is_dead:
        return "dead"
    # Of a process of another host, boot or container nothing can be proved from here.
    return "alive" if owner.is_alive else "unknown"


def busy_error(owner: Owner | None, path: str) -> TargetExistsError:
    """Return the error for a target to which `owner` is publishing; `owner` is None if the process is unknown."""
    publisher = "another process" if owner is None else str(owner)
    return TargetExistsError(
        f"{publisher} is publishing to this target: wait for it, or choose another path", path=path
    )


def target_exists(path: str) -> TargetExistsError:
    """Return the error for a target that exists while overwriting is not allowed."""
    return TargetExistsError("the target exists; overwrite=True (--overwrite) replaces it", path=path)


def removed_error(path: str) -> StorageError:
    """Return the error for a file of a build that another process has removed."""
    text = "another process removed this file during publishing: check for cleanup jobs, then publish again"
    return StorageError(text, errno=errno.ENOENT, path=path)


class OutputFile(ABC):
    """A large file of a build.

    A local file gets its header last, so that an unfinished file is never mistaken for a finished one. An object is
    written front to back.

    Attributes:
        path: the path of the file during the build.
        header: the first bytes of the file.
        is_reserved: whether disk space for all its bytes is reserved.
        is_sequential: whether it must be written by one thread, in order, starting after `header`.
    """

    path: str
    header: bytes
    is_reserved: bool = False
    is_sequential: bool = False

    @abstractmethod
    def write(self, data: Buffer, at: int) -> None:
        """Write `data` at byte `at`. Thread-safe, unless the file is sequential."""

    @abstractmethod
    def finish(self, *, writes_header: bool = True) -> None:
        """Write the header, unless another process has written it in place, and make the file durable."""

    @abstractmethod
    def close(self) -> None:
        """Release descriptors and uploads; an unfinished upload is cancelled."""


class Build(ABC):
    """One checkpoint directory under construction. Root only.

    Call `commit` or `abandon` at the end; leaving a with block abandons an uncommitted build.

    Attributes:
        path: the target.
        building_path: the directory of the files until `commit`.
        finished: metadata by name of the output files that an interrupted publisher of the same plan had finished.
    """

    path: str
    building_path: str
    finished: dict[str, Any]

    @abstractmethod
    def create(self, name: str, nbytes: int, header: bytes) -> OutputFile:
        """Create an output file of `nbytes` bytes that begins with `header`. Thread-safe."""

    @abstractmethod
    def put(self, name: str, data: Buffer) -> None:
        """Write a small file durably; its name must not exist."""

    @abstractmethod
    def record(self, name: str, metadata: object) -> None:
        """Record that an output file is finished, with JSON metadata, for a publisher that resumes this build."""

    @abstractmethod
    def share(self) -> str:
        """Return the key with which other processes join this build (`join_build`) to put files into it."""

    @abstractmethod
    def expect(self, names: Sequence[str]) -> None:
        """Record more names under which other processes may put files, so that none stays if this publisher dies."""

    @abstractmethod
    def add_all(self, versions: Mapping[str, str]) -> None:
        """Take over complete files that members have written; `versions` has the version of each `WrittenFile` by name.

        Raises:
            NotFoundError: this process does not see one of them; `path` is the file's.
        """

    @abstractmethod
    def commit(self, name: str, data: Buffer) -> None:
        """Write the last file and give the directory its name; both are durable on return.

        Raises:
            TargetExistsError: another publisher was first.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Remove all files of an uncommitted build; a failure is logged. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.abandon()


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that a member has written.

    Attributes:
        version: what its store calls this version of it; "" in a directory.
        folder: where this process sees the files of the build, for messages.
        content: its tensors with their digests.
    """

    version: str
    folder: str
    content: DigestedTensors


class Member(ABC):
    """Puts files into a build that another process has opened. Each is complete and durable on return.

    Raises:
        TargetExistsError: another publisher has taken over, or the build was abandoned.
    """

    @abstractmethod
    def write_tensors(
        self, name: str, shards: Sequence[ShardData], metadata: Mapping[str, Any], progress: Callable[[], object]
    ) -> WrittenFile:
        """Write a rank's tensors and metadata as a file; `progress` is called about once in a megabyte."""

    @abstractmethod
    def link(self, name: str, source: str, identity: Sequence[str | int], progress: Callable[[], object]) -> str | None:
        """Put a file of an earlier checkpoint there: by a hard link, or at a URL by a copy that the store makes itself.

        Args:
            name: the name in the build.
            source: the path or URL of the file.
            identity: its `StoredFile.local_identity` when it was written or checked.
            progress: called for each part of a copy.

        Returns:
            The version of the new object, "" in a directory; None if another file is at `source`, or none, or if no
            such link or copy can be made.
        """
