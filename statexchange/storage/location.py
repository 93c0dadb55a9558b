"""A location: a local path or an fsspec URL, with every operation that differs between the two, and opening it to read.

`location` decides by the text of a path, once. A `LocalLocation` is built and removed by directory_build.py, under
hidden names beside it. A `RemoteLocation` is built and removed by object_build.py, under its final name and with a
claim. build.py defines the interface of both builds, and what they guarantee. `read_with_retry`
opens a path once more where it is replaced while it is read.

Modules for writers, and those that need fsspec, are imported at the first call that needs them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    NotFoundError,
    ReplacedError,
    StateExchangeError,
    StorageError,
    TargetExistsError,
    UnsafeError,
    excerpt,
    without_secrets,
)
from statexchange.storage import files
from statexchange.storage.atomic import remove_abandoned, write_new
from statexchange.storage.json_text import parse_json
from statexchange.storage.local import LocalStore, local_path, open_local
from statexchange.storage.store import Store, resolve_path

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from typing_extensions import Self

    from statexchange.storage.build import Build, BuildMember, OwnCheck, ReplaceCheck, UnfinishedBuild
    from statexchange.storage.object_removal import ClaimWatch

__all__ = [
    "Attempts",
    "Location",
    "OpenedPath",
    "location",
    "open_path",
    "read_option_file",
    "read_with_retry",
    "target_path",
]

_log = logging.getLogger(__name__)


def location(path: str) -> Location:
    """Return the location of a path that `store.resolve_path` has returned."""
    is_local = "://" not in path or path.startswith(("shm://", "file://"))
    return LocalLocation(path) if is_local else RemoteLocation(path)


def target_path(path: str | os.PathLike[str], *, local: bool = False) -> str:
    """Return the absolute path of a target directory, or its URL without a trailing slash; refuse a URL if `local`."""
    name = resolve_path(path, "a target")
    at = location(name)
    if at.is_remote and not local:
        return at.directory
    if "://" in name:
        raise InvalidArgumentError(f"a checkpoint goes to a directory, not to {name!r}")
    return os.path.abspath(name)


class Location(ABC):
    """A file or directory, which need not exist. Not collective.

    Attributes:
        path: the path or URL.
        is_remote: whether it is at a URL.
    """

    is_remote: ClassVar[bool]

    def __init__(self, path: str) -> None:
        self.path = path

    # Names

    @property
    @abstractmethod
    def shown(self) -> str:
        """The path, or the URL without secrets, for messages."""

    @property
    @abstractmethod
    def local(self) -> str | None:
        """The absolute path that the operating system knows; None at a URL."""

    @property
    @abstractmethod
    def directory(self) -> str:
        """The absolute path of a directory, or its URL without trailing slashes.

        Raises:
            InvalidArgumentError: it cannot be that of a directory.
        """

    @property
    @abstractmethod
    def canonical(self) -> str:
        """A text that is equal for all names of this directory, and that has no secrets."""

    @property
    @abstractmethod
    def parent(self) -> str:
        """The path or URL of the directory that contains this one."""

    def child(self, name: str) -> Location:
        """Return the location of a name in this directory."""
        return location(f"{self.path.rstrip('/')}/{name}")

    # Reading

    @abstractmethod
    def open(self) -> tuple[Store, str | None]:
        """Open and pin the directory. If it is a file, open its directory, and return the name of the file, too.

        Raises:
            NotFoundError: there is nothing here.
            StorageError: it cannot be read.
        """

    @abstractmethod
    def check_can_be_made(self, absence: NotFoundError) -> None:
        """Raise NotFoundError if nothing is here and the first build in this directory could not make it.

        The path is then wrong, or a disk is not mounted.

        Args:
            absence: the error that says that nothing is here.
        """

    # Writing

    @abstractmethod
    def create(self, name: str, data: bytes) -> None:
        """Write a small file into this directory, which must exist; TargetExistsError if the name exists, too."""

    @abstractmethod
    def open_build(
        self,
        plan_digest: str,
        names: Sequence[str],
        *,
        check: ReplaceCheck | None,
        reuse: bool = False,
        resume: bool = False,
        is_own: OwnCheck | None = None,
    ) -> Build:
        """Open a build of this directory. Root only.

        Args:
            plan_digest: 32 hex digits; with `reuse`, equal digests must mean equal bytes of all output files.
            names: names of all files; `commit` writes the last one.
            check: called with the existing directory before that is replaced; None if none may be replaced.
            reuse: keep the output files that a killed publisher of the same plan had finished.
            resume: treat every other publisher to this target as dead; without it a publisher's death must be proved.
            is_own: in an object store, whether an object that neither a manifest nor a claim lists may be removed.

        Raises:
            TargetExistsError: the target exists and `check` is None, or another process is publishing to it.
            UnsafeError: the target is not a directory that statexchange published.
            UnsupportedError: the store cannot be written.
            StorageError: the operating system or the store refused a read or write.
            InvalidArgumentError: the path has no name, or one that is too long.
        """

    @abstractmethod
    def check_build(self, manifest: str, *, check: ReplaceCheck | None, nbytes: int, resume: bool) -> None:
        """Raise what `open_build` would raise, without changing anything.

        `manifest` is the name of the file that `commit` writes; `nbytes` is the size of all files together.
        """

    @abstractmethod
    def join_build(self, key: str, manifest: str) -> BuildMember:
        """Join a build that another process has opened here.

        Args:
            key: what `Build.share` has returned there.
            manifest: the name of the file that `commit` writes.

        Raises:
            NotFoundError: this process does not see the build.
        """

    # Removing

    @abstractmethod
    def remove(self, manifest: str, check: ReplaceCheck, *, waits: bool = True) -> None:
        """Remove the published directory that is here.

        No reader opens a part of it. A reader that has opened it before may fail; its error says that it was removed.

        Args:
            manifest: the name of the file that commits it.
            check: as for `open_build`.
            waits: at a URL: if a process of another host has begun to remove it, watch that process's claim for 60 s,
                to see whether it still runs.

        Raises:
            NotFoundError: there is no such directory.
            UnsafeError: it has files that were not published.
            TargetExistsError: another process is publishing or removing it.
        """

    @abstractmethod
    def unfinished(self, manifest: str) -> list[UnfinishedBuild]:
        """Return the builds and removals of this directory that are under way, or were killed.

        Raises:
            StorageError: the directory cannot be read.
        """

    @abstractmethod
    def unfinished_names(self, without: Collection[str]) -> list[str]:
        """Return the names in this directory at which there may be an unfinished build. [] if it does not exist.

        Names in `without` are known to be whole. They are left out at a URL, where an unfinished build has its final
        name; a local directory may be whole while another build of it is unfinished.
        """

    @abstractmethod
    def remove_abandoned(self) -> None:
        """Remove the temporary files in this directory that killed processes have left; there are none at a URL."""

    @abstractmethod
    def clear(
        self, manifest: str, is_own: OwnCheck, *, watch: ClaimWatch | None = None, waits: bool = False
    ) -> str | None:
        """Remove the remains of builds and removals of this directory whose processes have provably ended.

        Args:
            manifest: the name of the file that commits it.
            is_own: as for `open_build`.
            watch: this process's record of claims; a claim that has not changed for 60 s counts as a dead process's.
            waits: watch the claim of another host's process for 60 s.

        Returns:
            At a URL the nonce of the claim that was removed; None if there was none, and for a local directory.
        """

    @abstractmethod
    def claim_watch(self) -> ClaimWatch | None:
        """Return a new record of the claims that this process sees; None where builds have no claims."""


class LocalLocation(Location):
    """An absolute path, ``file:///path`` or ``shm://name``."""

    is_remote = False

    @property
    def shown(self) -> str:
        """The path."""
        return self.path

    @property
    def local(self) -> str:
        """The absolute path."""
        return local_path(self.path)

    @property
    def directory(self) -> str:
        """The absolute path."""
        return local_path(self.path)

    @property
    def canonical(self) -> str:
        """The path without symbolic links."""
        return os.path.realpath(self.path)

    @property
    def parent(self) -> str:
        """The path of the directory that contains this one."""
        return os.path.dirname(self.path)

    def open(self) -> tuple[Store, str | None]:
        """Open and pin the directory, or the directory of the file."""
        return open_local(self.path)

    def check_can_be_made(self, absence: NotFoundError) -> None:
        """Raise NotFoundError if the path, or what it would be made in, is a file or a link that leads nowhere."""
        path = self.path
        while not os.path.lexists(path) and path != os.path.dirname(path):
            path = os.path.dirname(path)
        if os.path.isdir(path):
            return
        if os.path.islink(path):
            text = "a directory of saves is expected, and this link leads to none: make its target, or mount the disk"
            raise NotFoundError(text, path=path)
        if os.path.lexists(path):
            raise NotFoundError("a directory of saves is expected, and this is a file", path=path)

    def create(self, name: str, data: bytes) -> None:
        """Write a small file durably."""
        with files.directory(self.path) as dir_fd:
            write_new(dir_fd, name, data, path=os.path.join(self.path, name), mode=0o666)

    def open_build(
        self,
        plan_digest: str,
        names: Sequence[str],
        *,
        check: ReplaceCheck | None,
        reuse: bool = False,
        resume: bool = False,
        is_own: OwnCheck | None = None,
    ) -> Build:
        """Open a build under a hidden name beside the directory."""
        from statexchange.storage.directory_build import DirectoryBuild

        return DirectoryBuild(self.path, plan_digest, check=check, reuse=reuse, resume=resume)

    def check_build(self, manifest: str, *, check: ReplaceCheck | None, nbytes: int, resume: bool) -> None:
        """Raise what `open_build` would raise, and StorageError if the disk has too little space."""
        from statexchange.storage.directory_build import check_directory

        check_directory(self.path, check, nbytes, resume=resume)

    def join_build(self, key: str, manifest: str) -> BuildMember:
        """Join the build whose hidden name follows from `key`."""
        from statexchange.storage.directory_build import DirectoryMember

        return DirectoryMember(self.path, key)

    def remove(self, manifest: str, check: ReplaceCheck, *, waits: bool = True) -> None:
        """Remove the directory, after it has got a hidden name."""
        from statexchange.storage.directory_build import DirectoryRemoval

        DirectoryRemoval(self.path, check=check).run()

    def unfinished(self, manifest: str) -> list[UnfinishedBuild]:
        """Return what is beside the directory under hidden names."""
        from statexchange.storage.directory_build import unfinished_builds

        return unfinished_builds(self.path)

    def unfinished_names(self, without: Collection[str]) -> list[str]:
        """Return the names beside which there are hidden ones."""
        try:
            entries = os.listdir(self.path)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError.of(error, "list directory", path=self.path) from error
        return sorted({name for name in map(files.hidden_target, entries) if name is not None})

    def remove_abandoned(self) -> None:
        """Remove the temporary files of processes that have ended, if there is a directory."""
        with contextlib.suppress(NotFoundError), files.directory(self.path) as dir_fd:
            remove_abandoned(dir_fd)

    def clear(
        self, manifest: str, is_own: OwnCheck, *, watch: ClaimWatch | None = None, waits: bool = False
    ) -> str | None:
        """Remove what is under hidden names, unless its process may still run; log a warning about what is not ours."""
        from statexchange.storage.directory_build import DirectoryRemoval

        builds = self.unfinished(manifest)
        if builds and all(build.owner is not None and build.state != "dead" for build in builds):
            return None  # nothing here can be removed
        try:
            DirectoryRemoval(self.path, check=lambda _: []).abandon()
        except TargetExistsError:  # a process that runs is publishing here
            pass
        except UnsafeError as error:  # another user's, or not a directory: other directories can still be cleared
            _log.warning("the remains of a killed save or removal are not removed: %s", error)
        return None

    def claim_watch(self) -> ClaimWatch | None:
        """Return None: a lock shows whether a process still runs."""
        return None


class RemoteLocation(Location):
    """An fsspec URL."""

    is_remote = True

    @property
    def shown(self) -> str:
        """The URL without secrets."""
        return without_secrets(self.path)

    @property
    def local(self) -> None:
        """None."""
        return None

    @property
    def directory(self) -> str:
        """The URL without trailing slashes; InvalidArgumentError if it has nothing but a scheme."""
        if not self.path.partition("://")[2].strip("/"):
            scheme = self.path.partition(":")[0]
            text = f"{excerpt(self.path)} names no bucket or directory: give the whole URL, such as {scheme}://bucket"
            raise InvalidArgumentError(text)
        return self.path.rstrip("/")

    @property
    def canonical(self) -> str:
        """The URL without secrets."""
        return self.shown

    @property
    def parent(self) -> str:
        """The URL up to its last slash."""
        return self.path.rpartition("/")[0]

    def open(self) -> tuple[Store, str | None]:
        """Open and pin the directory, or the directory of the object."""
        from statexchange.storage.fsspec_store import open_url

        return open_url(self.path)

    def check_can_be_made(self, absence: NotFoundError) -> None:
        """Raise `absence` if it says that there is no such bucket."""
        from statexchange.storage.fsspec_store import is_missing_bucket

        if is_missing_bucket(absence):
            raise absence

    def create(self, name: str, data: bytes) -> None:
        """Put a small object."""
        from statexchange.storage.objects import Objects

        Objects(self.path).create(name, data)

    def open_build(
        self,
        plan_digest: str,
        names: Sequence[str],
        *,
        check: ReplaceCheck | None,
        reuse: bool = False,
        resume: bool = False,
        is_own: OwnCheck | None = None,
    ) -> Build:
        """Claim the directory and open a build in it."""
        from statexchange.storage.object_build import ObjectBuild

        return ObjectBuild(self.path, plan_digest, names, check=check, resume=resume, is_own=is_own)

    def check_build(self, manifest: str, *, check: ReplaceCheck | None, nbytes: int, resume: bool) -> None:
        """Raise what `open_build` would raise."""
        from statexchange.storage.object_build import check_url

        check_url(self.path, manifest, check)

    def join_build(self, key: str, manifest: str) -> BuildMember:
        """Join the build whose claim has the nonce `key`."""
        from statexchange.storage.object_build import ObjectMember

        return ObjectMember(self.path, key, manifest)

    def remove(self, manifest: str, check: ReplaceCheck, *, waits: bool = True) -> None:
        """Claim the directory and remove its objects, the manifest first."""
        from statexchange.storage.object_removal import remove_objects

        remove_objects(self.path, manifest, check, waits=waits)

    def unfinished(self, manifest: str) -> list[UnfinishedBuild]:
        """Return the build whose claim is here, unless there is a manifest, too."""
        from statexchange.storage.object_removal import unfinished_objects

        build = unfinished_objects(self.path, manifest)
        return [] if build is None else [build]

    def unfinished_names(self, without: Collection[str]) -> list[str]:
        """Return the names of all directories but those in `without`."""
        try:
            store, file = self.open()
        except NotFoundError:
            return []
        try:
            return [] if file is not None else [name for name in store.directories if name not in without]
        finally:
            store.close()

    def remove_abandoned(self) -> None:
        """Do nothing."""

    def clear(
        self, manifest: str, is_own: OwnCheck, *, watch: ClaimWatch | None = None, waits: bool = False
    ) -> str | None:
        """Remove the objects of a claim whose process has ended, and return the claim's nonce."""
        from statexchange.storage.object_removal import clear_objects

        return clear_objects(self.path, manifest, is_own, watch=watch, waits=waits)

    def claim_watch(self) -> ClaimWatch | None:
        """Return a new record of claims."""
        from statexchange.storage.object_removal import ClaimWatch

        return ClaimWatch()


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
        return isinstance(self.store, LocalStore) and self.store.is_shared

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


class Attempts:
    """Attempts to read a path that other processes may replace meanwhile.

    An error counts only if the path still leads to the directory in which it arose: otherwise another process has
    replaced the directory meanwhile. On shared storage a file must also be missing or broken for a whole second,
    because an NFS client may go on showing a directory that another host has removed. `read_with_retry` shows the use.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._count = 0
        self._last_error: StateExchangeError | None = None
        self._stale_until: float | None = None

    def open(self) -> OpenedPath:
        """Open the path; the caller closes it, or passes it to `goes_on`.

        Raises:
            NotFoundError: there is nothing at the path.
            ReplacedError: the path was replaced in each of 40 attempts.
        """
        while self._count < _ATTEMPTS:
            if self._count:
                time.sleep(min(0.001 * 2**self._count, 0.05))
            self._count += 1
            try:
                return open_path(self._path)
            except NotFoundError as error:
                if self._last_error is None:
                    raise
                # Between two publications, or removed for good: the next attempts decide.
                self._last_error = error
        if isinstance(self._last_error, NotFoundError):
            raise self._last_error
        text = "replaced again and again while it was read: try again later"
        raise ReplacedError(text, path=self._path) from self._last_error

    def goes_on(self, opened: OpenedPath, error: BaseException) -> bool:
        """Close an opened path whose reading has raised `error`; return whether to open the path again."""
        with opened:
            if isinstance(error, StateExchangeError) and self._is_replaced(opened, error):
                self._last_error = error
                return True
        return False

    def _is_replaced(self, opened: OpenedPath, error: StateExchangeError) -> bool:
        if isinstance(error, ReplacedError) or not opened.is_current():
            return True
        if not opened.is_shared or not isinstance(error, NotFoundError | IncompleteError | CorruptError):
            return False
        if self._stale_until is None:
            self._stale_until = time.monotonic() + _STALE_S
        return time.monotonic() < self._stale_until


def read_with_retry(path: str, read: Callable[[OpenedPath], T]) -> T:
    """Open a path, call `read` with it and return the result; retry while the path is being replaced (`Attempts`).

    After success the path stays open, and the caller closes it; after an error it is closed.
    """
    attempts = Attempts(path)
    while True:
        opened = attempts.open()
        try:
            return read(opened)
        except BaseException as error:
            if not attempts.goes_on(opened, error):
                raise
