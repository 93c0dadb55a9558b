"""What publishers have beside a target on a file system under hidden names, and the checks before a build begins.

The top of directory_build.py explains the names and the protocol.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from statexchange.errors import (
    CorruptError,
    InvalidArgumentError,
    NotFoundError,
    StateExchangeError,
    StorageError,
    TargetExistsError,
    UnsafeError,
)
from statexchange.processes import Owner
from statexchange.storage import files
from statexchange.storage.files import Mount, mount_of
from statexchange.storage.location import MAX_MANIFEST_BYTES, parse_json
from statexchange.storage.publish.build import ReplaceCheck, UnfinishedBuild, busy_error, owner_state, target_exists
from statexchange.storage.store import Budget, open_local

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "Identity",
    "Leftover",
    "check_directory",
    "check_mount",
    "check_target",
    "conflict",
    "find_leftovers",
    "identity_at",
    "interrupted",
    "refuse_others",
    "remove_entry",
    "split_target",
    "unfinished_builds",
]

_STAT_BLOCK_BYTES = 512  # the unit of st_blocks on every file system
Identity = tuple[int, int, int]  # device, inode, mtime


@dataclass(slots=True)
class Leftover:
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
        """The hidden names of its directories."""
        return [*self.partials.values(), *(name for name in (self.replaced, self.discarded) if name)]

    @property
    def state(self) -> Literal["dead", "alive", "unknown"]:
        """Whether the owner runs, as far as can be proved."""
        return owner_state(self.owner, self.nonce)


def find_leftovers(name: str, dir_fd: int, parent: str) -> list[Leftover]:
    """Return what publishers have left under hidden names beside the target `name`, by nonce."""
    pattern = re.compile(
        re.escape(files.hidden_prefix(name))
        + r"\.(?:(?P<plan>[0-9a-f]{32})\.(?P<of>[0-9a-f]{16})\.partial"
        + r"|(?P<nonce>[0-9a-f]{16})\.(?P<kind>owner|replaced|discarded))"
    )
    leftovers: dict[str, Leftover] = {}
    for entry in files.list_names(dir_fd, parent):
        match = pattern.fullmatch(entry)
        if match is None:
            continue
        nonce = match["nonce"] or match["of"]
        leftover = leftovers.setdefault(nonce, Leftover(nonce))
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
    parent, name = split_target(path)
    found = []
    try:
        with files.directory(parent) as dir_fd:
            for leftover in find_leftovers(name, dir_fd, parent):
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


def split_target(path: str) -> tuple[str, str]:
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
    parent, name = split_target(path)
    dir_fd, nearest = files.open_nearest(parent)
    try:
        check_mount(mount_of(nearest), nearest)
        needed_bytes = nbytes
        if nearest == parent:
            leftovers = find_leftovers(name, dir_fd, parent)
            refuse_others(leftovers, path)
            has_target = files.stat_of(name, dir_fd, path) is not None
            if check is None and (has_target or any(interrupted(leftovers))):
                raise target_exists(path)
            files.check_writable(dir_fd, parent)  # here, so that errors come in a build's order
            if has_target or not any(interrupted(leftovers)):
                opened_target = check_target(path, dir_fd, check)
                if opened_target is not None:
                    os.close(opened_target[0])
            for leftover in leftovers:
                if resume or leftover.state == "dead":
                    needed_bytes -= _bytes_on_disk(leftover, dir_fd, parent)
        files.check_writable(dir_fd, nearest)
        files.check_room(dir_fd, needed_bytes, path)
    finally:
        os.close(dir_fd)


def check_mount(mount: Mount, path: str) -> None:
    """Raise StorageError if no files can be made in a directory of this mount."""
    if mount.has_no_files:
        text = f"cannot make files here: {mount.kind} is an interface of the kernel"
        raise StorageError(text, errno=errno.ENOENT, path=path)


def _bytes_on_disk(leftover: Leftover, dir_fd: int, parent: str) -> int:
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


def conflict(path: str, action: str) -> TargetExistsError:
    """Return the error for a target that another publisher has changed; `action` completes "another publisher ..."."""
    return TargetExistsError(f"refused: another publisher {action}; the present target was not changed", path=path)


def refuse_others(leftovers: Iterable[Leftover], path: str) -> None:
    """Raise TargetExistsError if a live process is publishing to this target."""
    for leftover in leftovers:
        if leftover.state == "alive":
            raise busy_error(leftover.owner, path)


def interrupted(leftovers: Iterable[Leftover]) -> Iterator[tuple[Leftover, str]]:
    """Yield each leftover whose replacement may have been interrupted between its two renames, with its new directory.

    If the target is absent too, it was interrupted.
    """
    for leftover in leftovers:
        if leftover.replaced and leftover.owner is not None:
            for partial in leftover.partials.values():
                yield leftover, partial


def check_target(path: str, dir_fd: int, check: ReplaceCheck | None) -> tuple[int, Identity] | None:
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
            if identity_at(name, dir_fd, path) == identity:
                raise
        finally:
            store.close()
        if identity_at(name, dir_fd, path) != identity:
            raise conflict(path, "replaced the target meanwhile")
    except BaseException:
        os.close(fd)
        raise
    return fd, identity


def _identity(attributes: os.stat_result) -> Identity:
    """Return (device, inode, mtime); inode numbers alone are reused."""
    return attributes.st_dev, attributes.st_ino, attributes.st_mtime_ns


def identity_at(name: str, dir_fd: int, path: str) -> Identity | None:
    """Return the identity of a file or directory; None if the name does not exist."""
    attributes = files.stat_of(name, dir_fd, path)
    return None if attributes is None else _identity(attributes)


def remove_entry(name: str, path: str, dir_fd: int) -> None:
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
            remove_entry(entry, os.path.join(path, entry), below)
    files.remove_directory(name, dir_fd, path)
