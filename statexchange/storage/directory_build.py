"""Build a directory on a file system: under a hidden name beside the target, then renamed to the target's name.

**Names.** All are in the target's parent directory. Each publisher draws a `nonce` of 64 random bits and writes only
names with its nonce. Long target names are cut (`files.hidden_prefix`).

* ``.<name>.<nonce>.owner``: the owner record, a symbolic link whose target is JSON text: the process and host of the
  nonce. It is durable before anything else of that nonce is made and is removed last, so that every hidden directory
  has one.
* ``.<name>.<plan>.<nonce>.partial``: the directory under construction. `plan` is the digest of the merge plan.
* ``.<name>.<nonce>.replaced``: the old directory, between the two renames of a replacement (see atomic.py).
* ``.<name>.<nonce>.discarded``: a directory whose files are being removed. It is renamed before the first removal, so
  that a process that still builds in it can never publish a part of it.
* ``.<name>.lock``: a file lock, only on file systems of this host. With the owner records of this host's live processes
  it makes the second of two publishers fail at once. Correctness does not depend on it: over NFS a lock may have no
  effect, or be granted after half a minute.

**Steps of a publisher**: look for other publishers; write the owner record; complete an interrupted replacement; check
the target; remove the leftovers of dead publishers or take over a directory of the same plan; make the partial
directory; write its files; commit.

* A publisher looks for others before it writes its own record. So two publishers that start at the same time never
  refuse each other; the final rename decides between them.
* Replacing is a compare-and-swap. Only the directory that was checked when the build began is replaced. After the
  exchange (or after the old directory was set aside) the publisher compares the directory that it took from the
  name; if that is another one, it puts it back and fails. If the target was absent, the rename is exclusive.

**The parent directory.** A publisher makes it, and its own parents, if they are missing. If it fails, it removes those
that it has made and that are empty. Another publisher may have opened such a directory and made nothing there yet: it
finds that its record cannot be made in it, makes the directory again, and begins anew.

**After a failure.** `abandon` removes everything under the nonce. After a kill, the next publisher to this target finds
the record:

* Its owner has provably ended: the leftovers are removed. A partial directory of the same plan is taken over instead,
  by renaming it to the new nonce, which exactly one of several publishers can do.
* The replacement was interrupted between its two renames: the new directory, which is complete, gets the name.
* Its owner is a process of another host or boot: the leftovers stay, unless the user passes resume=True.
* The record, or a directory of its nonce, has another uid than a file that this process makes there: both are ignored.
  (Compared with a new file rather than with this process's uid, because an NFS server may map uids.)
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import stat
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from filelock import FileLock, Timeout

from statexchange.errors import (
    CorruptError,
    InvalidArgumentError,
    NotFoundError,
    StateExchangeError,
    StorageError,
    TargetExistsError,
    UnsafeError,
    remedy,
)
from statexchange.processes import Owner
from statexchange.storage import files
from statexchange.storage.atomic import (
    exchange_names,
    identity_of,
    invalidate_listings,
    invalidate_lookups,
    new_nonce,
    rename_new,
    write_new,
)
from statexchange.storage.build import (
    Build,
    BuildMember,
    OutputFile,
    ReplaceCheck,
    UnfinishedBuild,
    WrittenFile,
    active_builds,
    busy_error,
    removed_error,
    target_exists,
)
from statexchange.storage.files import Mount, mount_of, warn_of_options
from statexchange.storage.location import MAX_MANIFEST_BYTES, parse_json
from statexchange.storage.store import Budget, open_local
from statexchange.storage.tensorfile import write_tensor_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from statexchange.storage.tensorfile import ShardData

__all__ = [
    "DirectoryBuild",
    "DirectoryMember",
    "DirectoryRemoval",
    "check_directory",
    "open_for_writing",
    "unfinished_builds",
]

_log = logging.getLogger(__name__)
_BROKEN_RECORD_S = 60.0  # a record still incomplete after that was left by a process that died while writing it
_STAT_BLOCK_BYTES = 512  # the unit of st_blocks on every file system
_ATTEMPTS = 20  # to begin in a directory that other publishers make and remove meanwhile
_EMPTYING_S = 3.0  # how long open files of other processes may keep a directory on NFS from being removed
_OPEN_EXISTING = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_Identity = tuple[int, int, int]  # device, inode, mtime


@dataclass(slots=True)
class _Leftover:
    """All files and directories beside the target with one nonce."""

    nonce: str
    owner: Owner | None = None
    """None if the record is absent or incomplete."""
    record: os.stat_result | None = None
    partials: dict[str, str] = field(default_factory=dict)
    """Hidden name by plan digest."""
    replaced: str | None = None
    discarded: str | None = None

    @property
    def directories(self) -> list[str]:
        return [*self.partials.values(), *(name for name in (self.replaced, self.discarded) if name)]

    @property
    def state(self) -> Literal["dead", "alive", "unknown"]:
        """Whether the owner runs, as far as can be proved."""
        if self.owner is None:
            return "unknown"
        if self.owner == Owner.current():
            return "alive" if active_builds.is_active(self.nonce) else "dead"
        if self.owner.is_dead:
            return "dead"
        return "alive" if self.owner.is_alive else "unknown"


def _leftovers(name: str, dir_fd: int, parent: str) -> list[_Leftover]:
    """Return what publishers have left under hidden names beside the target `name`, by nonce."""
    pattern = re.compile(
        re.escape(files.hidden_prefix(name))
        + r"\.(?:(?P<plan>[0-9a-f]{32})\.(?P<of>[0-9a-f]{16})\.partial"
        + r"|(?P<nonce>[0-9a-f]{16})\.(?P<kind>owner|replaced|discarded))"
    )
    leftovers: dict[str, _Leftover] = {}
    for entry in files.list_names(dir_fd, parent):
        match = pattern.fullmatch(entry)
        if match is None:
            continue
        nonce = match["nonce"] or match["of"]
        leftover = leftovers.setdefault(nonce, _Leftover(nonce))
        if match["plan"]:
            leftover.partials[match["plan"]] = entry
        elif match["kind"] == "replaced":
            leftover.replaced = entry
        elif match["kind"] == "discarded":
            leftover.discarded = entry
        else:
            leftover.record, leftover.owner = _read_record(entry, dir_fd, os.path.join(parent, entry))
    return list(leftovers.values())


def _read_record(name: str, dir_fd: int, path: str) -> tuple[os.stat_result | None, Owner | None]:
    attributes = files.stat_of(name, dir_fd, path)
    try:
        if attributes is not None and stat.S_ISLNK(attributes.st_mode):
            data = os.readlink(name, dir_fd=dir_fd).encode()
        else:
            data = files.read_small(name, dir_fd, path, MAX_MANIFEST_BYTES)
        return attributes, Owner.from_json(parse_json(data, path, Budget(path)))
    except (NotFoundError, UnsafeError, CorruptError, StorageError, OSError, ValueError):
        return attributes, None


def unfinished_builds(path: str) -> list[UnfinishedBuild]:
    """Return what publishers and removals have under hidden names beside the target `path`.

    Not collective. [] if the parent directory does not exist.
    """
    parent, name = _parts(path)
    found = []
    try:
        with files.directory(parent) as dir_fd:
            for leftover in _leftovers(name, dir_fd, parent):
                nbytes = sum(_file_bytes(hidden, dir_fd, parent) for hidden in leftover.directories)
                paths = tuple(os.path.join(parent, hidden) for hidden in leftover.directories)
                is_removal = bool(paths) and not leftover.partials
                found.append(UnfinishedBuild(leftover.nonce, paths, is_removal, leftover.owner, leftover.state, nbytes))
    except NotFoundError:
        return []
    return found


def _file_bytes(name: str, dir_fd: int, parent: str) -> int:
    """Return the bytes of the files in a hidden directory; what cannot be read counts 0."""
    path = os.path.join(parent, name)
    total = 0
    with contextlib.suppress(StateExchangeError), files.directory(name, dir_fd, path) as hidden_fd:
        for entry in files.list_names(hidden_fd, path):
            found = files.stat_of(entry, hidden_fd, path)
            total += 0 if found is None else found.st_size
    return total


def _parts(path: str) -> tuple[str, str]:
    """Return the parent and the name of a target."""
    parent, name = os.path.split(path)
    if not name:
        raise InvalidArgumentError("not a path for a checkpoint: it has no name", path=path)
    nbytes = len(os.fsencode(name))
    if nbytes > files.NAME_MAX:
        raise InvalidArgumentError(
            f"the target's name is too long: it has {nbytes} bytes, and a file system takes at most {files.NAME_MAX}",
            path=path,
        )
    return parent, name


def check_directory(path: str, check: ReplaceCheck | None, nbytes: int, *, resume: bool) -> None:
    """Raise what a build of `nbytes` bytes at `path` would raise for the target, without changing anything.

    Disk space of dead publishers' files counts as free: a build removes or reuses them.
    """
    parent, name = _parts(path)
    dir_fd, nearest = files.open_nearest(parent)
    try:
        _check_mount(mount_of(nearest), nearest)
        needed_bytes = nbytes
        if nearest == parent:
            leftovers = _leftovers(name, dir_fd, parent)
            _refuse_others(leftovers, path)
            has_target = files.stat_of(name, dir_fd, path) is not None
            if check is None and (has_target or any(_interrupted(leftovers))):
                raise target_exists(path)
            files.check_writable(dir_fd, parent)  # here, so that errors come in a build's order
            if has_target or not any(_interrupted(leftovers)):
                opened_target = _check_target(path, dir_fd, check)
                if opened_target is not None:
                    os.close(opened_target[0])
            for leftover in leftovers:
                if resume or leftover.state == "dead":
                    needed_bytes -= _bytes_on_disk(leftover, dir_fd, parent)
        files.check_writable(dir_fd, nearest)
        files.check_room(dir_fd, needed_bytes, path)
    finally:
        os.close(dir_fd)


def _check_mount(mount: Mount, path: str) -> None:
    if mount.has_no_files:
        text = f"cannot make files here: {mount.kind} is an interface of the kernel"
        raise StorageError(text, errno=errno.ENOENT, path=path)


def _bytes_on_disk(leftover: _Leftover, dir_fd: int, parent: str) -> int:
    """Return the bytes on disk of a publisher's unfinished directories; what cannot be read counts 0."""
    if leftover.owner is None or leftover.replaced:  # a build would not remove it, or would give it the target's name
        return 0
    nbytes = 0
    for name in leftover.partials.values():
        path = os.path.join(parent, name)
        with contextlib.suppress(StateExchangeError), files.directory(name, dir_fd, path) as partial_fd:
            for entry in files.list_names(partial_fd, path):
                attributes = files.stat_of(entry, partial_fd, path)
                if attributes is not None:
                    nbytes += getattr(attributes, "st_blocks", 0) * _STAT_BLOCK_BYTES
    return nbytes


def _conflict(path: str, action: str) -> TargetExistsError:
    """Return the error for a target that another publisher has changed; `action` completes "another publisher ..."."""
    return TargetExistsError(f"refused: another publisher {action}; the present target was not changed", path=path)


def _refuse_others(leftovers: Iterable[_Leftover], path: str) -> None:
    """Raise TargetExistsError if a live process is publishing to this target."""
    for leftover in leftovers:
        if leftover.state == "alive":
            raise busy_error(leftover.owner, path)


def _interrupted(leftovers: Iterable[_Leftover]) -> Iterator[tuple[_Leftover, str]]:
    """Yield each leftover whose replacement may have been interrupted between its two renames, with its new directory.

    If the target is absent too, it was interrupted.
    """
    for leftover in leftovers:
        if leftover.replaced and leftover.owner is not None:
            for partial in leftover.partials.values():
                yield leftover, partial


def _check_target(path: str, dir_fd: int, check: ReplaceCheck | None) -> tuple[int, _Identity] | None:
    """Check the target and open it.

    Returns:
        None if the target is absent, else (fd, identity). The caller closes fd; while it is open, the inode number is
        not reused.

    Raises:
        TargetExistsError: `check` is None, or the target was replaced during the check.
        UnsafeError: the target is not a directory.
        StateExchangeError: what `check` raises.
    """
    parent, name = os.path.split(path)
    attributes = files.stat_of(name, dir_fd, path)
    if attributes is None:
        return None
    if check is None:
        raise target_exists(path)
    if not stat.S_ISDIR(attributes.st_mode):
        raise UnsafeError("refused to overwrite: the target is not a directory", path=path)
    fd = files.open_directory(name, dir_fd, path)
    try:
        identity = _identity(files.fstat_of(fd, path))
        store, _ = open_local(parent)
        try:
            check(store.below(name))
        except StateExchangeError:  # does not count if the directory was being replaced and removed during the check
            if _identity_at(name, dir_fd, path) == identity:
                raise
        finally:
            store.close()
        if _identity_at(name, dir_fd, path) != identity:
            raise _conflict(path, "replaced the target meanwhile")
    except BaseException:
        os.close(fd)
        raise
    return fd, identity


def _identity(attributes: os.stat_result) -> _Identity:
    """Return (device, inode, mtime); inode numbers alone are reused."""
    return attributes.st_dev, attributes.st_ino, attributes.st_mtime_ns


def _identity_at(name: str, dir_fd: int, path: str) -> _Identity | None:
    attributes = files.stat_of(name, dir_fd, path)
    return None if attributes is None else _identity(attributes)


class DirectoryFile(OutputFile):
    """A file of a `DirectoryBuild`, which several processes may write. It is opened by the first write."""

    def __init__(self, path: str, header: bytes, *, is_reserved: bool) -> None:
        self.path = path
        self.header = header
        self.is_reserved = is_reserved
        self._fd = -1

    def _opened(self) -> int:
        if self._fd < 0:
            self._fd = open_for_writing(self.path)
        return self._fd

    def write(self, data: files.Buffer, at: int) -> None:
        files.pwrite_all(self._opened(), data, at, self.path)

    def finish(self, *, writes_header: bool = True) -> None:
        if writes_header:
            files.audit("write", self.path)
            files.pwrite_all(self._opened(), self.header, 0, self.path)
        files.sync_file(self._opened(), self.path)
        fd, self._fd = self._fd, -1
        files.close_file(fd, self.path)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # the file will be removed
                os.close(fd)


def open_for_writing(path: str) -> int:
    """Return a descriptor for writing in place to a file that root has created. Not collective."""
    files.audit("open", path)
    try:
        return os.open(path, _OPEN_EXISTING)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise StorageError(
                "too many open files: raise the limit (ulimit -n), or make fewer files (max_shard_size)",
                errno=error.errno,
                path=path,
            ) from error
        raise StorageError.of(error, "open for writing", path=path) from error


class DirectoryMember(BuildMember):
    """Writes files into the directory under construction that has the name `key`, beside the target `path`."""

    def __init__(self, path: str, key: str) -> None:
        self.folder = os.path.join(os.path.dirname(path), os.path.basename(key))

    def write_tensors(
        self, name: str, shards: Sequence[ShardData], metadata: Mapping[str, Any], progress: Callable[[], object]
    ) -> WrittenFile:
        """Write the file while its digests are made; its header comes last."""
        path = os.path.join(self.folder, name)
        durable = not mount_of(self.folder).is_memory
        with files.directory(self.folder) as dir_fd:
            content = write_tensor_file(
                dir_fd, name, path, shards, metadata, durable=durable, mode=0o666, progress=progress
            )
            invalidate_listings(dir_fd, path=self.folder)  # before the publisher on another host looks for the file
        return WrittenFile("", content)


class DirectoryBuild(Build):
    """A directory under construction on a file system. The top of this file explains the protocol."""

    def __init__(self, path: str, plan_digest: str, *, check: ReplaceCheck | None, reuse: bool, resume: bool) -> None:
        self.path = path
        self._parent, self._name = _parts(path)
        self._stem = files.hidden_prefix(self._name)
        self._nonce = new_nonce()
        self._partial = f"{self._stem}.{plan_digest}.{self._nonce}.partial"
        self._replaced, self._discarded, self._record = (
            f"{self._stem}.{self._nonce}.{kind}" for kind in ("replaced", "discarded", "owner")
        )
        self.building_path = os.path.join(self._parent, self._partial)
        self.finished = {}
        self._check = check
        self._pid = os.getpid()
        self._outputs: list[DirectoryFile] = []
        self._probes: list[str] = []
        self._unreserved = 0  # bytes of created files whose disk space is not reserved
        for attempts_left in reversed(range(_ATTEMPTS)):
            self._lock: FileLock | None = None
            self._dir_fd = self._old_fd = -1
            self._own_identity: tuple[int, int] | None = None
            self._old_identity: _Identity | None = None
            self._is_published = self._has_ended = False
            try:
                self._open_parent()
            except (NotFoundError, StorageError):
                if os.path.lexists(self._parent) or not attempts_left:
                    raise
                continue
            active_builds.add(self._nonce)
            try:
                self._begin(plan_digest, reuse=reuse, resume=resume)
            except BaseException as error:
                was_removed = isinstance(error, StateExchangeError) and self._has_lost_parent()
                self.abandon()
                if not was_removed or not attempts_left:
                    raise
            else:
                return

    # Beginning

    def _open_parent(self) -> None:
        """Open the parent directory; make it if it is missing."""
        self._made = files.make_path(self._parent, 0o777)
        try:
            warn_of_options(self._parent)
            self._mount = mount_of(self._parent)
            _check_mount(self._mount, self._parent)
            self._parent_fd = files.open_directory(self._parent)
        except BaseException:
            files.remove_made(self._made)
            raise

    def _has_lost_parent(self) -> bool:
        """Whether the parent's path does not lead to the open directory any more."""
        try:
            with files.directory(self._parent) as fd:
                return not os.path.samestat(os.fstat(fd), os.fstat(self._parent_fd))
        except (NotFoundError, OSError):  # on NFS a removed directory is stale
            return True

    def _begin(self, plan_digest: str, *, reuse: bool, resume: bool) -> None:
        self._acquire_lock()
        # Look for others before writing the record: two publishers that start together both pass, and the final rename
        # decides between them.
        leftovers = _leftovers(self._name, self._parent_fd, self._parent)
        _refuse_others(leftovers, self.path)
        if self._check is None and files.stat_of(self._name, self._parent_fd, self.path) is not None:
            raise target_exists(self.path)
        record = self._write_record()  # durable before anything else of this nonce
        of_this_user = [leftover for leftover in leftovers if self._is_of_this_user(leftover, record)]
        self._complete_replacements(leftovers, of_this_user)  # before the target is checked: it may get its name here
        opened_target = _check_target(self.path, self._parent_fd, self._check)
        if opened_target is not None:
            self._old_fd, self._old_identity = opened_target
        self._clear_leftovers(of_this_user, record, plan_digest if reuse else None, resume=resume)
        self._make_partial()

    def _make_partial(self) -> None:
        """Make and open the directory under construction, unless a dead publisher's has been taken over."""
        if self._own_identity is None:
            files.make_directory(self._partial, self._parent_fd, self.building_path, 0o777)
        self._dir_fd = files.open_directory(self._partial, self._parent_fd, self.building_path)
        self._own_identity = identity_of(self._partial, self._parent_fd, self.building_path)
        self._keep_finished()

    def _acquire_lock(self) -> None:
        """Take the file lock on a file system of this host; go on without it if there are no locks."""
        if self._mount.is_network:
            return
        lock = FileLock(os.path.join(self._parent, f"{self._stem}.lock"), thread_local=False)
        files.audit("lock", lock.lock_file)
        try:
            lock.acquire(timeout=0)
        except Timeout:  # filelock also times out if it cannot make the file
            if files.stat_of(os.path.basename(lock.lock_file), self._parent_fd, self.path) is not None:
                _refuse_others(_leftovers(self._name, self._parent_fd, self._parent), self.path)  # names the process
                raise busy_error(None, self.path) from None
            return
        except (OSError, NotImplementedError):  # if no file can be made here, writing the owner record reports it
            with contextlib.suppress(OSError):
                os.unlink(lock.lock_file)
            return
        self._lock = lock

    def _write_record(self) -> os.stat_result:
        """Make the owner record durably and return its attributes.

        It is a symbolic link, because a link is created with its content. A killed writer could leave a file empty, and
        nothing would prove its owner. File systems without symbolic links (FAT, some network and user-space ones) get a
        file.
        """
        path = os.path.join(self._parent, self._record)
        text = json.dumps(Owner.current().to_json())
        files.audit("symlink", path)
        try:
            os.symlink(text, self._record, dir_fd=self._parent_fd)
        except (OSError, NotImplementedError):
            self._write_record_file(text.encode(), path)
        files.sync_directory(self._parent_fd, path)
        attributes = files.stat_of(self._record, self._parent_fd, path)
        if attributes is None:
            text = (
                "another process removed the owner record during publishing: check for cleanup jobs, then publish again"
            )
            raise StorageError(text, errno=errno.ENOENT, path=path)
        return attributes

    def _write_record_file(self, data: bytes, path: str) -> None:
        try:
            fd = files.create_file(self._record, self._parent_fd, path)
        except StorageError as error:
            reason = os.strerror(error.errno) if error.errno is not None else error.message
            advice = remedy(error.errno) or "; choose a directory that you may write"
            text = f"cannot write in the target's directory: {reason}{advice}"
            raise StorageError(text, errno=error.errno, path=self.path) from error
        try:
            files.audit("write", path)
            files.pwrite_all(fd, data, 0, path)
            files.sync_file(fd, path)
        except BaseException:
            with contextlib.suppress(OSError):  # report the first failure
                os.close(fd)
            raise
        files.close_file(fd, path)

    def _is_of_this_user(self, leftover: _Leftover, record: os.stat_result) -> bool:
        """Whether the record and the directories of its nonce have the uid of this process's own record."""
        if leftover.record is None or leftover.record.st_uid != record.st_uid:
            return False
        for name in leftover.directories:
            attributes = files.stat_of(name, self._parent_fd, self.path)
            if attributes is not None and (not stat.S_ISDIR(attributes.st_mode) or attributes.st_uid != record.st_uid):
                return False
        return True

    def _complete_replacements(self, leftovers: Iterable[_Leftover], of_this_user: Sequence[_Leftover]) -> None:
        """Rename a complete directory to the target's name if its publisher died between the two renames."""
        if files.stat_of(self._name, self._parent_fd, self.path) is not None:
            return
        for leftover, partial in _interrupted(leftovers):
            if leftover not in of_this_user:
                raise UnsafeError(
                    f"refused: another user's replacement of the target was interrupted ({leftover.owner})",
                    path=os.path.join(self._parent, partial),
                )
            if self._check is None:
                raise target_exists(self.path)
            try:
                rename_new(partial, self._name, dir_fd=self._parent_fd, path=self.path)
            except TargetExistsError:
                return  # another publisher has completed it
            except StorageError as error:
                if error.errno != errno.ENOENT:
                    raise
                continue
            files.sync_directory(self._parent_fd, self.path)
            leftover.partials = {plan: name for plan, name in leftover.partials.items() if name != partial}
            return

    def _clear_leftovers(
        self, leftovers: Iterable[_Leftover], record: os.stat_result, plan_digest: str | None, *, resume: bool
    ) -> None:
        """Remove the leftovers of dead publishers, or take over a directory of this plan."""
        unknown = []
        for leftover in leftovers:
            if leftover.owner is None:
                age_s = (record.st_mtime_ns - leftover.record.st_mtime_ns) / 1e9 if leftover.record else 0.0
                # Both times come from the file system: the clocks of two hosts are never compared.
                if age_s > _BROKEN_RECORD_S and not leftover.directories:
                    self._remove_record_of(leftover)
                continue
            if leftover.state != "dead" and not resume:
                unknown.append(leftover)
                continue
            if self._own_identity is None and plan_digest in leftover.partials:
                assert plan_digest is not None
                self._take_over(leftover.partials.pop(plan_digest))
            self._remove_leftover(leftover)
        for leftover in unknown:
            hidden = [*leftover.directories, f"{self._stem}.{leftover.nonce}.owner"]
            _log.warning(
                "%s: %s is publishing here, or was interrupted and left %s: if it has ended, resume=True (--resume) "
                "of a merge removes or reuses these files",
                self.path,
                leftover.owner,
                ", ".join(hidden),
            )

    def _take_over(self, partial: str) -> None:
        """Rename a dead publisher's directory to this nonce, unless another publisher did so first."""
        try:
            rename_new(partial, self._partial, dir_fd=self._parent_fd, path=self.building_path)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            return
        self._own_identity = identity_of(self._partial, self._parent_fd, self.building_path)

    def _remove_leftover(self, leftover: _Leftover) -> None:
        """Remove a dead publisher's directories, then its record. A failure is logged: the next build tries again."""
        if leftover.replaced and files.stat_of(self._name, self._parent_fd, self.path) is None:
            return  # the only copy of the old checkpoint
        try:
            for name in leftover.directories:
                self._discard(name, f"{self._stem}.{leftover.nonce}.discarded")
            self._remove_record_of(leftover)  # last: it proves the owner of the directories
        except StateExchangeError as error:
            _log.warning("cannot remove what an interrupted publisher left: %s", error)

    def _remove_record_of(self, leftover: _Leftover) -> None:
        name = f"{self._stem}.{leftover.nonce}.owner"
        files.remove_file(name, os.path.join(self._parent, name), self._parent_fd)

    def _discard(self, name: str, discarded: str) -> None:
        """Rename a directory to `discarded`, then remove it with all that is in it."""
        path = os.path.join(self._parent, discarded)
        if name != discarded:
            if files.stat_of(name, self._parent_fd, path) is None:
                return
            self._discard(discarded, discarded)
            try:
                rename_new(name, discarded, dir_fd=self._parent_fd, path=path)
            except StorageError as error:
                if error.errno != errno.ENOENT:
                    raise
                return  # another process removes it
        deadline = time.monotonic() + (_EMPTYING_S if self._mount.is_network else 0.0)
        while files.stat_of(discarded, self._parent_fd, path) is not None:
            with files.directory(discarded, self._parent_fd, path) as dir_fd:
                for entry in files.list_names(dir_fd, path):
                    _remove_entry(entry, os.path.join(path, entry), dir_fd)
            if files.remove_directory(discarded, self._parent_fd, path):
                return
            if time.monotonic() > deadline:
                if files.stat_of(discarded, self._parent_fd, path) is None:
                    return
                raise StorageError("cannot remove directory: it is not empty", errno=errno.ENOTEMPTY, path=path)
            time.sleep(0.05)

    def _keep_finished(self) -> None:
        """In a directory that was taken over, keep finished files with their receipts and remove everything else."""
        names = files.list_names(self._dir_fd, self.building_path)
        for name in names:
            if _receipt(name) in names:
                metadata = self._finished_metadata(name)
                if metadata is not None:
                    self.finished[name] = metadata
        finished_names = {*self.finished, *map(_receipt, self.finished)}
        for name in set(names) - finished_names:
            _remove_entry(name, os.path.join(self.building_path, name), self._dir_fd)

    def _finished_metadata(self, name: str) -> Any:
        """Return the metadata of a finished output file; None unless its receipt is complete and fits the file."""
        path = os.path.join(self.building_path, name)
        try:
            data = files.read_small(_receipt(name), self._dir_fd, path, MAX_MANIFEST_BYTES)
            raw: Any = parse_json(data, path, Budget(path))
            size, mtime_ns, metadata = raw
            attributes = files.stat_of(name, self._dir_fd, path)
        except (CorruptError, UnsafeError, NotFoundError, TypeError, ValueError):
            return None
        if attributes is None or not stat.S_ISREG(attributes.st_mode):
            return None
        return metadata if _size_and_time(attributes) == [size, mtime_ns] else None

    # Building

    def create(self, name: str, nbytes: int, header: bytes) -> DirectoryFile:
        """Create a file and reserve its disk space; on tmpfs, which would write zeros, only check the free space."""
        path = os.path.join(self.building_path, name)
        fd = files.create_file(name, self._dir_fd, path)
        try:
            is_reserved = False
            if self._mount.is_memory:
                self._unreserved += nbytes
                files.check_room(fd, self._unreserved, path)
            else:
                is_reserved = files.reserve(fd, nbytes, path)
            try:
                os.ftruncate(fd, nbytes)
            except OSError as error:
                raise StorageError.of(error, f"extend the file to {nbytes} bytes", path=path) from error
        except BaseException:
            with contextlib.suppress(OSError):  # report the first failure
                os.close(fd)
            raise
        files.close_file(fd, path)
        output = DirectoryFile(path, header, is_reserved=is_reserved)
        self._outputs.append(output)
        return output

    def put(self, name: str, data: files.Buffer) -> None:
        """Write a small file durably, and the directories in its name."""
        *folders, last = name.split("/")
        dir_fd, path = self._dir_fd, self.building_path
        with contextlib.ExitStack() as stack:
            for folder in folders:
                path = os.path.join(path, folder)
                files.make_directory(folder, dir_fd, path, 0o777)
                dir_fd = stack.enter_context(files.directory(folder, dir_fd, path))
            path = os.path.join(path, last)
            write_new(dir_fd, last, data, path=path, mode=0o666)

    def record(self, name: str, metadata: object) -> None:
        """Write the receipt of a finished output file beside it: size, modification time and metadata."""
        path = os.path.join(self.building_path, name)
        attributes = files.stat_of(name, self._dir_fd, path)
        if attributes is None:
            raise removed_error(path)
        self.put(_receipt(name), json.dumps([*_size_and_time(attributes), metadata], separators=(",", ":")).encode())
        self.finished[name] = metadata

    def share(self) -> str:
        """Return the name of the directory under construction."""
        return self._partial

    def add_all(self, files: Mapping[str, str]) -> None:
        """Check that this host sees the files."""
        for name in files:
            self._check_seen(name)

    def _check_seen(self, name: str) -> None:
        path = os.path.join(self.building_path, name)
        if files.stat_of(name, self._dir_fd, path) is None:
            raise NotFoundError("this host does not see the file", path=path)

    def make_probe(self) -> str:
        """Make an empty file with a random name."""
        name = f".probe-{new_nonce()}"
        self._probes.append(name)
        self.put(name, b"")
        return os.path.join(self.building_path, name)

    # Ending

    def commit(self, name: str, data: files.Buffer) -> None:
        """Write the last file, then rename the directory to the target's name or exchange it with the old one."""
        self.put(name, data)
        for hidden in [*map(_receipt, self.finished), *self._probes]:
            files.remove_file(hidden, os.path.join(self.building_path, hidden), self._dir_fd)
        files.sync_directory(self._dir_fd, self.building_path)  # all names are durable before the rename
        if self._old_identity is not None and self._is_replaceable():
            if not self._exchange():
                self._move_aside()
                self._move_in()
        else:
            self._rename_exclusively()
        files.sync_directory(self._parent_fd, self.path)  # the new name is durable before success is reported
        self._is_published = True
        self._end()

    def _is_replaceable(self) -> bool:
        """Check the target again: False if it is absent; an error if it is not the directory checked at the start."""
        identity = _identity_at(self._name, self._parent_fd, self.path)
        if identity is None:
            return False  # removed, or another publisher is between two renames: the next rename decides
        if identity != self._old_identity:
            raise _conflict(self.path, "replaced or changed the target meanwhile")
        opened_target = _check_target(self.path, self._parent_fd, self._check)
        if opened_target is None:
            return False
        os.close(opened_target[0])
        return True

    def _rename_exclusively(self) -> None:
        try:
            rename_new(self._partial, self._name, dir_fd=self._parent_fd, path=self.path)
        except TargetExistsError:
            raise _conflict(self.path, "was first") from None
        except StorageError as error:
            raise self._rename_error(error) from error

    def _rename_error(self, error: StorageError) -> StateExchangeError:
        """Return the error for a failed rename: with `resume`, another publisher may have taken over the directory."""
        if error.errno == errno.ENOENT and identity_of(self._partial, self._parent_fd, self.path) is None:
            return _conflict(self.path, "treated this one as dead (--resume) and took over its directory")
        return error

    def _exchange(self) -> bool:
        """Exchange the new directory with the old one; return False if the file system cannot."""
        try:
            if not exchange_names(self._partial, self._name, dir_fd=self._parent_fd, path=self.path):
                return False
        except StorageError as error:
            if error.errno == errno.ENOENT:
                if identity_of(self._partial, self._parent_fd, self.path) is None:
                    raise self._rename_error(error) from error
                raise _conflict(self.path, "removed the target meanwhile") from error
            raise
        # The target may have been replaced between the check and the exchange: compare what was exchanged.
        if _identity_at(self._partial, self._parent_fd, self.path) != self._old_identity:
            self._undo_exchange()
            raise _conflict(self.path, "replaced the target meanwhile")
        return True

    def _undo_exchange(self) -> None:
        files.audit("undo exchange", self.path)
        exchange_names(self._partial, self._name, dir_fd=self._parent_fd, path=self.path)
        if identity_of(self._partial, self._parent_fd, self.path) != self._own_identity:
            # A third publisher replaced this build's directory meanwhile: its checkpoint must stay published.
            exchange_names(self._partial, self._name, dir_fd=self._parent_fd, path=self.path)

    def _move_aside(self) -> None:
        try:
            rename_new(self._name, self._replaced, dir_fd=self._parent_fd, path=self.path)
        except StorageError as error:
            if error.errno == errno.ENOENT:
                return  # removed, or moved aside by another publisher: the next rename decides
            raise
        # Otherwise this host's NFS client may show its cached directory under the new name, not the renamed one.
        invalidate_lookups(self._parent_fd, self._parent)
        if _identity_at(self._replaced, self._parent_fd, self.path) != self._old_identity:
            self._put_back()
            raise _conflict(self.path, "replaced the target meanwhile")

    def _move_in(self) -> None:
        try:
            rename_new(self._partial, self._name, dir_fd=self._parent_fd, path=self.path)
        except TargetExistsError:
            raise _conflict(self.path, "was first") from None
        except StorageError as error:
            # If the new directory is gone and the old one set aside, another publisher has completed the replacement.
            if error.errno != errno.ENOENT or identity_of(self._partial, self._parent_fd, self.path) is not None:
                raise
            if identity_of(self._replaced, self._parent_fd, self.path) is None:
                raise self._rename_error(error) from error

    def _put_back(self) -> None:
        """Rename the directory that was moved aside back to the target, unless another publisher has taken the name."""
        try:
            rename_new(self._replaced, self._name, dir_fd=self._parent_fd, path=self.path)
        except TargetExistsError:
            if _identity_at(self._replaced, self._parent_fd, self.path) != self._old_identity:
                # It is another publisher's checkpoint. A name without this nonce keeps it from being removed.
                kept_name = f"{self._stem}.{new_nonce()}.kept"
                kept_path = os.path.join(self._parent, kept_name)
                rename_new(self._replaced, kept_name, dir_fd=self._parent_fd, path=kept_path)
                _log.warning(
                    "%s: two other publishers published here meanwhile; the directory of the first is now at %s",
                    self.path,
                    kept_path,
                )

    def abandon(self) -> None:
        """Remove an uncommitted build. A failure is logged: the next publisher to this target tries again."""
        if self._has_ended or os.getpid() != self._pid:  # a forked child must not remove its parent's files
            return
        try:
            for output in self._outputs:
                output.close()
            self._undo()
        except StateExchangeError as error:
            _log.warning("files of the abandoned build of %s stay until the next publication: %s", self.path, error)
        finally:
            self._end()

    def _undo(self) -> None:
        """Restore the target if an interrupt came between the steps of a replacement."""
        if self._is_published:
            return
        if identity_of(self._replaced, self._parent_fd, self.path) is not None:
            self._put_back()
        identity = _identity_at(self._partial, self._parent_fd, self.path)
        if identity is None or self._own_identity is None:
            return
        if identity[:2] != self._own_identity and identity != self._old_identity:
            self._undo_exchange()

    def _end(self) -> None:
        """Remove all names of this nonce, the record last, and release the lock."""
        try:
            self._clear_own()
            if self._is_published:  # other hosts must see neither the old names nor those just removed
                self._invalidate_listings()
        finally:
            self._has_ended = True
            active_builds.discard(self._nonce)
            if self._lock is not None:
                with contextlib.suppress(OSError):  # an empty lock file does no harm
                    # Before the release: after it the file may be another publisher's lock.
                    os.unlink(self._lock.lock_file)
                self._lock.release()
            if self._made and not self._is_published and not self._has_lost_parent():
                files.remove_made(self._made)
            os.close(self._parent_fd)

    def _clear_own(self) -> None:
        try:
            for fd in (self._dir_fd, self._old_fd):
                if fd >= 0:
                    os.close(fd)
            self._dir_fd = self._old_fd = -1
            is_clear = self._discard_own()
            if is_clear and files.stat_of(self._record, self._parent_fd, self.path) is not None:
                files.remove_file(self._record, os.path.join(self._parent, self._record), self._parent_fd)
        except StateExchangeError as error:
            _log.warning("cannot remove an obsolete directory; the next publication tries again: %s", error)

    def _invalidate_listings(self) -> None:
        try:
            invalidate_listings(self._parent_fd, path=self._parent)
        except StateExchangeError as error:  # the checkpoint is published all the same
            _log.warning("hosts that have just listed the directory may see %s late: %s", self.path, error)

    def _discard_own(self) -> bool:
        """Remove the directories of this nonce; return False if one of them is another publisher's."""
        all_removed = True
        for name in (self._partial, self._replaced, self._discarded):
            identity = _identity_at(name, self._parent_fd, self.path)
            if identity is None:
                continue
            target = identity_of(self._name, self._parent_fd, self.path)
            is_known = (
                self._own_identity is None or identity[:2] == self._own_identity or identity == self._old_identity
            )
            # After publishing, an absent target means that the next publisher is between its two renames.
            is_only_copy = name == self._replaced and target is None and not self._is_published
            if (is_known or name == self._discarded) and not is_only_copy:
                self._discard(name, self._discarded)
            else:
                all_removed = False
        return all_removed


class DirectoryRemoval(DirectoryBuild):
    """The removal of a published directory, and of everything that dead publishers have left beside it.

    It takes the place of a publisher: it has an owner record, excludes other publishers, and removes only the directory
    that it has checked. The directory is renamed to its ``.discarded`` name first, so that no reader opens a part of
    it. After a kill the next removal or publisher finds that name and goes on.
    """

    def __init__(self, path: str, *, check: ReplaceCheck) -> None:
        super().__init__(path, "0" * 32, check=check, reuse=False, resume=False)

    def _make_partial(self) -> None:
        """Make nothing: this only removes."""

    def run(self) -> None:
        """Remove the directory.

        Raises:
            NotFoundError: it does not exist, or was removed meanwhile.
            TargetExistsError: another publisher replaced it meanwhile.
        """
        try:
            if self._old_identity is None or not self._is_replaceable():
                raise NotFoundError("there is nothing to remove", path=self.path)
            rename_new(self._name, self._discarded, dir_fd=self._parent_fd, path=self.path)
            invalidate_lookups(self._parent_fd, self._parent)
            if _identity_at(self._discarded, self._parent_fd, self.path) != self._old_identity:
                rename_new(self._discarded, self._name, dir_fd=self._parent_fd, path=self.path)
                raise _conflict(self.path, "replaced the target meanwhile")
            files.sync_directory(self._parent_fd, self.path)  # the name is gone durably before the first file is
            self._is_published = True
            self._end()
        except BaseException:
            self.abandon()
            raise


def _remove_entry(name: str, path: str, dir_fd: int) -> None:
    """Remove a file, or a directory with all that is in it; links are not followed."""
    if name.startswith(".nfs"):  # a removed file that is still open: NFS removes it when closed
        return
    try:
        # No look at what it is: on NFS that fails for a file that another host removes at the same time.
        files.remove_file(name, path, dir_fd)
        return
    except StorageError as error:
        if error.errno not in (errno.EISDIR, errno.EPERM):
            raise
    with files.directory(name, dir_fd, path) as below:
        for entry in files.list_names(below, path):
            _remove_entry(entry, os.path.join(path, entry), below)
    files.remove_directory(name, dir_fd, path)


def _receipt(name: str) -> str:
    """Return the name of the receipt beside a finished output file."""
    return f"{files.hidden_prefix(name)}.finished"


def _size_and_time(attributes: os.stat_result) -> list[int]:
    """Return [size, mtime_ns], to detect a finished file that was changed."""
    return [attributes.st_size, attributes.st_mtime_ns]
