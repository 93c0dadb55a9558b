"""Build a directory on a file system: under a hidden name beside the target, then renamed to the target's name.

**Names.** All are in the target's parent directory. Each publisher draws a `nonce` of 64 random bits and writes only
names with its nonce.

* ``.<name>.<nonce>.owner``: the owner record, a symbolic link whose target is JSON text: the process and host of the
  nonce. It is durable before anything else of that nonce is made and is removed last, so that every hidden directory
  has one.
* ``.<name>.<plan>.<nonce>.partial``: the directory under construction. `plan` is the digest of the merge plan.
* ``.<name>.<nonce>.replaced``: the old directory, between the two renames of a replacement (see atomic.py).
* ``.<name>.<nonce>.discarded``: a directory whose files are being removed. It is renamed before the first removal, so
  that a process that still builds in it can never publish a part of it.

There is no lock: the owner record of a live process of this host makes a second publisher fail at once, and the final
rename decides between two that start at the same time or on two hosts.

**Steps of a publisher**: look for other publishers; write the owner record; complete an interrupted replacement; check
the target; remove the leftovers of dead publishers or take over a directory of the same plan; make the partial
directory; write its files; commit.

* A publisher looks for others before it writes its own record. So two publishers that start at the same time never
  refuse each other; the final rename decides between them.
* The publisher that finds at its commit that the target is not the directory with which it began fails. If the target
  was absent, the rename is exclusive. Two publishers that have both looked may still replace one after the other. Then
  the later one follows the earlier one, as if it had begun after it. It checks what it has taken from the name, and
  puts back only what no publisher made.

**The parent directory.** A publisher makes it, and its own parents, if they are missing. They stay if it fails.

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
import stat
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from statexchange.errors import (
    NotFoundError,
    StateExchangeError,
    StorageError,
    TargetExistsError,
    UnsafeError,
)
from statexchange.processes import Owner
from statexchange.storage import files
from statexchange.storage.atomic import (
    NO_LINKS,
    exchange_names,
    invalidate_listings,
    invalidate_lookups,
    link_same,
    new_nonce,
    remove_abandoned,
    rename_entry,
    write_new,
)
from statexchange.storage.files import mount_of, warn_of_options
from statexchange.storage.location import MAX_MANIFEST_BYTES, open_path, parse_json
from statexchange.storage.publish.build import (
    Build,
    Member,
    OutputFile,
    ReplaceCheck,
    WrittenFile,
    busy_error,
    open_builds,
    owner_state,
    removed_error,
    target_exists,
)
from statexchange.storage.rank_writer import write_tensor_file
from statexchange.storage.store import Store, open_local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from statexchange.storage.tensorfile import ShardData

_log = logging.getLogger(__name__)
_TAKEN_OVER = "treated this one as dead (--resume) and took over its directory"
# How long open files of other processes may keep a directory on NFS from being removed: the client that removes an open
# file renames it to ".nfs..." until it is closed.
_EMPTYING_S = 3.0


@dataclass(slots=True)
class Leftover:
    """All files and directories beside the target with one nonce.

    Attributes:
        nonce: the nonce.
        owner: the process; None if the record is absent or broken.
        record: the attributes of the record; None if it is absent.
        directories: the hidden name of each directory by its ending.
        plan: the plan digest in the name of the partial directory.
    """

    nonce: str
    owner: Owner | None = None
    record: os.stat_result | None = None
    directories: dict[str, str] = field(default_factory=dict)
    plan: str = ""

    @property
    def state(self) -> Literal["dead", "alive", "unknown"]:
        """Whether the owner runs, as far as can be proved."""
        return owner_state(self.owner, self.nonce)

    @property
    def is_interrupted(self) -> bool:
        """Whether it may have ended between the two renames of a replacement. If the target is absent, too, it has."""
        return self.owner is not None and {"partial", "replaced"} <= self.directories.keys()


def find_leftovers(name: str, dir_fd: int, parent: str) -> list[Leftover]:
    """Return what publishers have left under hidden names beside the target `name`, by nonce."""
    leftovers: dict[str, Leftover] = {}
    for entry, match in files.hidden_entries(name, files.list_names(dir_fd, parent)).items():
        leftover = leftovers.setdefault(match["nonce"], Leftover(match["nonce"]))
        if match["kind"] == "owner":
            leftover.record = files.stat_of(entry, dir_fd, parent)
            leftover.owner = _read_record(entry, parent)
        else:
            leftover.directories[match["kind"]] = entry
            leftover.plan = match["plan"] or leftover.plan
    return list(leftovers.values())


def _read_record(name: str, parent: str) -> Owner | None:
    """Return the process that an owner record names; None if the record is broken or gone."""
    try:
        with open_path(parent) as opened:
            data = opened.store.link_target(name) or opened.store.read_small(name)
            return Owner.from_json(parse_json(data, opened.store.path_of(name), opened.store.budget))
    except (StateExchangeError, ValueError):
        return None


def conflict(path: str, action: str) -> TargetExistsError:
    """Return the error for a target that another publisher has changed; `action` completes "another publisher ..."."""
    return TargetExistsError(f"refused: another publisher {action}; the present target was not changed", path=path)


def refuse_others(leftovers: Iterable[Leftover], path: str) -> None:
    """Raise TargetExistsError if a live process is publishing to this target."""
    for leftover in leftovers:
        if leftover.state == "alive":
            raise busy_error(leftover.owner, path)


def check_target(path: str, dir_fd: int, check: ReplaceCheck | None) -> files.Identity | None:
    """Check the target, and return its identity; None if it is absent.

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
    # Opened, so that a client of NFS asks the server.
    with files.directory(name, dir_fd, path) as fd:
        identity = files.stat_identity(files.fstat_of(fd, path))
        store, _ = open_local(parent)
        try:
            check(store.below(name))
        except StateExchangeError:
            # What a directory lacks that was replaced and is being removed is no fault of the target.
            if identity_at(name, dir_fd, path) == identity:
                raise
        finally:
            store.close()
        if identity_at(name, dir_fd, path) != identity:
            raise conflict(path, "replaced the target meanwhile")
    return identity


def identity_at(name: str, dir_fd: int, path: str) -> files.Identity | None:
    """Return the identity of a file or directory; None if the name does not exist."""
    attributes = files.stat_of(name, dir_fd, path)
    return None if attributes is None else files.stat_identity(attributes)


class DirectoryFile(OutputFile):
    """A file of a `DirectoryBuild`, which several processes may write. It is opened by the first write."""

    def __init__(self, path: str, header: bytes, *, is_reserved: bool) -> None:
        self.path = path
        self.header = header
        self.is_reserved = is_reserved
        self._fd = -1
        self._opening = threading.Lock()

    def _opened(self) -> int:
        with self._opening:  # the first writes of several threads may come at once
            if self._fd < 0:
                self._fd = files.open_for_writing(self.path)
            return self._fd

    def write(self, data: files.Buffer, at: int) -> None:
        """Write `data` at byte `at`."""
        files.pwrite_all(self._opened(), data, at, self.path)

    def finish(self, *, writes_header: bool = True) -> None:
        """Write the header last, and make the file durable."""
        if writes_header:
            files.audit("write", self.path)
            files.pwrite_all(self._opened(), self.header, 0, self.path)
        files.sync_file(self._opened(), self.path)
        fd, self._fd = self._fd, -1
        files.close_file(fd, self.path)

    def close(self) -> None:
        """Release the descriptor of an unfinished file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # the file will be removed
                os.close(fd)


class DirectoryMember(Member):
    """Puts files into a `DirectoryBuild`; `key` is the name of its directory, beside the target `path`."""

    def __init__(self, path: str, key: str) -> None:
        self._folder = os.path.join(os.path.dirname(path), os.path.basename(key))

    def write_tensors(
        self, name: str, shards: Sequence[ShardData], metadata: Mapping[str, Any], progress: Callable[[], object]
    ) -> WrittenFile:
        """Write a rank's tensors and metadata as a file."""
        path = os.path.join(self._folder, name)
        with files.directory(self._folder) as dir_fd:
            content = write_tensor_file(dir_fd, name, path, shards, metadata, mode=0o666, progress=progress)
            # Before the publisher on another host looks for the file
            invalidate_listings(dir_fd, path=self._folder)
        return WrittenFile("", self._folder, content)

    def link(self, name: str, source: str, identity: Sequence[str | int], progress: Callable[[], object]) -> str | None:  # noqa: ARG002 (a link has no parts)
        """Make a hard link."""
        with files.directory(self._folder) as dir_fd:
            if not link_same(source, identity, name, dir_fd, os.path.join(self._folder, name)):
                return None
            # By the host that made the link: a sync of another one need not cover it.
            files.sync_directory(dir_fd, self._folder)
            invalidate_listings(dir_fd, path=self._folder)
        return ""


class DirectoryBuild(Build):
    """A directory under construction on a file system. The top of this file explains the protocol."""

    def __init__(self, path: str, plan_digest: str, *, check: ReplaceCheck | None, reuse: bool, resume: bool) -> None:
        self._parent, self._name = files.split_target(path)
        self._stem = f".{self._name}"
        files.make_path(self._parent, 0o777)
        mount = mount_of(self._parent)
        mount.check_takes_files(self._parent)
        self._parent_fd = files.open_directory(self._parent)
        self.path = path
        self.finished = {}
        self._nonce = new_nonce()
        self._partial = f"{self._stem}.{plan_digest}.{self._nonce}.partial"
        self._replaced = f"{self._stem}.{self._nonce}.replaced"
        self._discarded = f"{self._stem}.{self._nonce}.discarded"
        self._record = f"{self._stem}.{self._nonce}.owner"
        self.building_path = os.path.join(self._parent, self._partial)
        self._check = check
        self._pid = os.getpid()
        self._outputs: list[DirectoryFile] = []
        self._dir_fd = -1
        self._own_identity: files.Identity | None = None  # of the partial directory, of which size and mtime change
        self._old_identity: files.Identity | None = None  # of the target when it was checked last
        self._is_published = self._has_ended = False
        open_builds.add((self._pid, self._nonce))
        warn_of_options(self._parent)
        self._emptying_s = _EMPTYING_S if mount.is_network else 0.0
        try:
            self._begin(plan_digest if reuse else None, resume=resume)
        except BaseException:
            self.abandon()
            raise

    def _identity(self, name: str) -> files.Identity | None:
        """Return the identity of an entry beside the target; None if the name does not exist."""
        return identity_at(name, self._parent_fd, os.path.join(self._parent, name))

    # Beginning

    def _begin(self, reused_plan: str | None, *, resume: bool) -> None:
        # Look for others before writing the record: two publishers that start together both pass, and the final rename
        # decides between them.
        leftovers = find_leftovers(self._name, self._parent_fd, self._parent)
        refuse_others(leftovers, self.path)
        # Before the record: a call that is refused most often, because the target exists, writes nothing.
        if self._check is None and self._identity(self._name) is not None:
            raise target_exists(self.path)
        # Durable before anything else of this nonce.
        record = self._write_record()
        of_this_user = [leftover for leftover in leftovers if self._is_of_this_user(leftover, record)]
        # Before the target is checked, as it may get its name here; and before leftovers are removed, since until then
        # they have the only copies.
        self._complete_replacements(leftovers, of_this_user)
        self._old_identity = check_target(self.path, self._parent_fd, self._check)
        self._clear_leftovers(of_this_user, reused_plan, resume=resume)
        self._make_partial()

    def _make_partial(self) -> None:
        """Make and open the directory under construction, unless a dead publisher's has been taken over."""
        is_taken_over = self._own_identity is not None
        if not is_taken_over:
            files.make_directory(self._partial, self._parent_fd, self.building_path, 0o777)
        self._dir_fd = files.open_directory(self._partial, self._parent_fd, self.building_path)
        self._own_identity = self._identity(self._partial)
        if is_taken_over:
            self._keep_finished()

    def _write_record(self) -> os.stat_result:
        """Make the owner record durably and return its attributes.

        It is a symbolic link, because a link is created with its content. File systems without symbolic links (FAT,
        some network and user-space ones) get a file.
        """
        path = os.path.join(self._parent, self._record)
        text = json.dumps(Owner.current().to_json())
        files.audit("symlink", path)
        try:
            os.symlink(text, self._record, dir_fd=self._parent_fd)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise StorageError.of(error, "write in the target's directory", path=self.path) from error
            remove_abandoned(self._parent_fd)  # temporary files of publishers that were killed here
            write_new(self._parent_fd, self._record, text.encode(), path=path)
        files.sync_directory(self._parent_fd, path)
        attributes = files.stat_of(self._record, self._parent_fd, path)
        if attributes is None:
            raise removed_error(path)
        return attributes

    def _is_of_this_user(self, leftover: Leftover, record: os.stat_result) -> bool:
        """Whether the record and the directories of its nonce have the uid of this process's own record."""
        if leftover.record is None or leftover.record.st_uid != record.st_uid:
            return False
        for name in leftover.directories.values():
            attributes = files.stat_of(name, self._parent_fd, self.path)
            if attributes is not None and (not stat.S_ISDIR(attributes.st_mode) or attributes.st_uid != record.st_uid):
                return False
        return True

    def _complete_replacements(self, leftovers: Iterable[Leftover], of_this_user: Sequence[Leftover]) -> None:
        """Rename a complete directory to the target's name if its publisher died between the two renames."""
        if self._identity(self._name) is not None:
            return
        for leftover in leftovers:
            if not leftover.is_interrupted:
                continue
            partial = leftover.directories["partial"]
            # Not ignored, as other leftovers of other users are: this one's target would be lost.
            if leftover not in of_this_user:
                raise UnsafeError(
                    f"refused: another user's replacement of the target was interrupted ({leftover.owner})",
                    path=os.path.join(self._parent, partial),
                )
            if self._check is None:
                raise target_exists(self.path)
            try:
                if not self._rename(partial, self._name):
                    continue
            except TargetExistsError:
                return  # another publisher has completed it
            files.sync_directory(self._parent_fd, self.path)
            del leftover.directories["partial"]
            return

    def _rename(self, source: str, target: str) -> bool:
        """Rename a directory beside the target; return False if it is not there: another process has renamed it."""
        try:
            rename_entry(source, target, dir_fd=self._parent_fd, path=os.path.join(self._parent, target))
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            return False
        return True

    def _clear_leftovers(self, leftovers: Iterable[Leftover], reused_plan: str | None, *, resume: bool) -> None:
        """Remove the leftovers of dead publishers, or take over a directory of the plan `reused_plan`.

        Those of publishers of which nothing is known stay, with a warning, unless the user says `resume`.
        """
        for leftover in leftovers:
            if leftover.owner is None:
                continue  # nothing proves whose it is
            if leftover.state == "dead" or resume:
                if leftover.plan == reused_plan and self._own_identity is None:
                    self._take_over(leftover)
                self._remove_leftover(leftover)
                continue
            hidden = [*leftover.directories.values(), f"{self._stem}.{leftover.nonce}.owner"]
            _log.warning(
                "%s: %s is publishing here, or was interrupted and left %s: if it has ended, resume=True (--resume) "
                "of a merge removes or reuses these files",
                self.path,
                leftover.owner,
                ", ".join(hidden),
            )

    def _take_over(self, leftover: Leftover) -> None:
        """Rename a dead publisher's directory under construction to this nonce, unless another publisher did so."""
        partial = leftover.directories.pop("partial", None)
        if partial is not None and self._rename(partial, self._partial):
            self._own_identity = self._identity(self._partial)

    def _remove_leftover(self, leftover: Leftover) -> None:
        """Remove a dead publisher's directories, then its record. A failure is logged: the next build tries again."""
        if "replaced" in leftover.directories and self._identity(self._name) is None:
            return  # the only copy of the old checkpoint
        try:
            # Under the dead publisher's nonce, so that its record says whose they are if this process is killed here.
            for name in leftover.directories.values():
                self._discard(name, f"{self._stem}.{leftover.nonce}.discarded")
            self._remove_record(leftover.nonce)
        except StateExchangeError as error:
            _log.warning("cannot remove what an interrupted publisher left: %s", error)

    def _remove_record(self, nonce: str) -> None:
        name = f"{self._stem}.{nonce}.owner"
        files.remove_file(name, os.path.join(self._parent, name), self._parent_fd)

    def _discard(self, name: str, discarded: str) -> None:
        """Rename a directory to `discarded`, then remove it with all that is in it."""
        # One of the name may be left of an earlier removal, which a rename would not replace.
        self._remove_tree(discarded)
        if name != discarded and self._rename(name, discarded):
            self._remove_tree(discarded)

    def _remove_tree(self, name: str) -> None:
        """Remove a directory beside the target, which may be absent, with all that is in it."""
        path = os.path.join(self._parent, name)
        deadline = time.monotonic() + self._emptying_s
        while True:
            files.remove_entry(name, path, self._parent_fd)
            if self._identity(name) is None:
                return
            if time.monotonic() > deadline:
                raise StorageError("cannot remove directory: it is not empty", errno=errno.ENOTEMPTY, path=path)
            time.sleep(0.05)

    def _keep_finished(self) -> None:
        """In a directory that was taken over, keep finished files with their receipts and remove everything else."""
        with open_path(self.building_path) as opened:
            names = opened.store.listing
            for name in opened.store.files:
                if _receipt(name) in names:
                    metadata = _finished_metadata(name, opened.store)
                    if metadata is not None:
                        self.finished[name] = metadata
        for name in names.keys() - {*self.finished, *map(_receipt, self.finished)}:
            files.remove_entry(name, os.path.join(self.building_path, name), self._dir_fd)

    # Building

    def create(self, name: str, nbytes: int, header: bytes) -> DirectoryFile:
        """Create a file and reserve its disk space; on tmpfs, which would write zeros, only check the free space."""
        path = os.path.join(self.building_path, name)
        fd = files.create_file(name, self._dir_fd, path)
        with files.closing(fd, path):
            is_reserved = files.make_room(fd, nbytes, path)
            # Where nothing was reserved too: a file must have its size before a part of it can be mapped.
            try:
                os.ftruncate(fd, nbytes)
            except OSError as error:
                raise StorageError.of(error, f"extend the file to {nbytes} bytes", path=path) from error
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
        _, _, size, mtime_ns = files.stat_identity(attributes)
        self.put(_receipt(name), json.dumps([size, mtime_ns, metadata], separators=(",", ":")).encode())
        self.finished[name] = metadata

    def share(self) -> str:
        """Return the name of the directory under construction."""
        return self._partial

    def expect(self, names: Sequence[str]) -> None:
        """Do nothing: whatever is in the directory under construction goes with it."""

    def add_all(self, versions: Mapping[str, str]) -> None:
        """Check that this host sees the files."""
        for name in versions:
            path = os.path.join(self.building_path, name)
            if files.stat_of(name, self._dir_fd, path) is None:
                raise NotFoundError("this host does not see the file", path=path)

    # Ending

    def commit(self, name: str, data: files.Buffer) -> None:
        """Write the last file, then rename the directory to the target's name or exchange it with the old one."""
        self.put(name, data)
        for hidden in map(_receipt, self.finished):
            files.remove_file(hidden, os.path.join(self.building_path, hidden), self._dir_fd)
        # All names are durable before the rename: a power cut may keep the rename and lose what came before.
        files.sync_directory(self._dir_fd, self.building_path)
        if self._old_identity is not None and self._is_replaceable():
            if not self._exchange():
                self._move_aside()
                self._rename_exclusively()
        else:
            self._rename_exclusively()
        # The new name is durable before the old directory is removed, and before success is reported.
        files.sync_directory(self._parent_fd, self.path)
        self._is_published = True
        self._end()

    def _is_replaceable(self) -> bool:
        """Check the target again: False if it is absent; an error if it is not the directory checked at the start."""
        identity = self._identity(self._name)
        if identity is None:
            return False  # removed, or another publisher is between two renames: the next rename decides
        if identity != self._old_identity:
            raise conflict(self.path, "replaced or changed the target meanwhile")
        return check_target(self.path, self._parent_fd, self._check) is not None

    def _rename_exclusively(self) -> None:
        try:
            rename_entry(self._partial, self._name, dir_fd=self._parent_fd, path=self.path)
        except TargetExistsError:
            raise conflict(self.path, "was first") from None
        except StorageError as error:
            if error.errno != errno.ENOENT or self._identity(self._partial) is not None:
                raise
            # If the old one is still set aside, another publisher has completed this replacement.
            if self._identity(self._replaced) is None:
                raise conflict(self.path, _TAKEN_OVER) from error

    def _exchange(self) -> bool:
        """Exchange the new directory with the old one; return False if the file system cannot."""
        try:
            if not exchange_names(self._partial, self._name, dir_fd=self._parent_fd, path=self.path):
                return False
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            is_taken_over = self._identity(self._partial) is None
            raise conflict(self.path, _TAKEN_OVER if is_taken_over else "removed the target meanwhile") from error
        try:
            self._check_replaced(self._partial)
        except BaseException:  # another one's directory was displaced: it gets the name back
            exchange_names(self._partial, self._name, dir_fd=self._parent_fd, path=self.path)
            raise
        return True

    def _move_aside(self) -> None:
        if not self._rename(self._name, self._replaced):
            return  # removed, or moved aside by another publisher: the next rename decides
        # Otherwise this host's NFS client may show its cached directory under the new name, not the renamed one.
        invalidate_lookups(self._parent_fd, self._parent)
        self._check_replaced(self._replaced)

    def _check_replaced(self, name: str) -> None:
        """Check the directory that this build has taken from the target, which now has the name `name`.

        Another publisher may have replaced the target after the last look. Its checkpoint was published, and this one
        follows it: nothing is undone, so it does not matter if a third one has followed already. What no publisher
        made must not be replaced.
        """
        if self._identity(name) != self._old_identity:
            self._old_identity = check_target(os.path.join(self._parent, name), self._parent_fd, self._check)

    def abandon(self) -> None:
        """Remove an uncommitted build."""
        if self._has_ended or os.getpid() != self._pid:  # a forked child must not remove its parent's files
            return
        for output in self._outputs:
            output.close()
        self._end()

    def _end(self) -> None:
        """Remove all names of this nonce."""
        try:
            self._clear_own()
            if self._is_published:  # other hosts must see neither the old names nor those just removed
                invalidate_listings(self._parent_fd, path=self._parent)
        except StateExchangeError as error:  # the checkpoint is published all the same
            _log.warning("hosts that have just listed the directory may see %s late: %s", self.path, error)
        finally:
            self._has_ended = True
            open_builds.discard((self._pid, self._nonce))
            os.close(self._parent_fd)

    def _clear_own(self) -> None:
        """Remove all names of this nonce, the record last."""
        try:
            if self._dir_fd >= 0:
                os.close(self._dir_fd)
            # Where nothing can be written nothing was made, and even the removal of an absent name would be an error.
            if not self._is_published and self._identity(self._replaced) is not None:
                # The replacement ended between its two renames: the old directory gets its name again. If that fails,
                # the record stays, and the next publisher completes the replacement. Another publisher may have given
                # the name to its directory, which only the server knows: a client of NFS 3 may still see no target
                # after its own rename. If it is no publisher's, this raises, and the old directory stays where it is.
                try:
                    self._rename(self._replaced, self._name)
                except TargetExistsError:
                    check_target(self.path, self._parent_fd, self._check)
            self._discard_own()
            if self._identity(self._record) is not None:
                self._remove_record(self._nonce)
        except StateExchangeError as error:
            _log.warning("hidden names beside %s stay until the next publication: %s", self.path, error)

    def _discard_own(self) -> None:
        """Remove the directories of this nonce. One that this build neither made nor checked stays."""
        for name in (self._partial, self._replaced, self._discarded):
            identity = self._identity(name)
            if identity is None:
                continue
            # After an exchange the old directory has the name of the new one.
            is_made_here = self._own_identity is None or identity[:2] == self._own_identity[:2]
            if is_made_here or identity == self._old_identity or name == self._discarded:
                self._discard(name, self._discarded)


def _finished_metadata(name: str, store: Store) -> Any:
    """Return the metadata of a finished output file; None unless its receipt is complete and fits the file."""
    try:
        receipt: Any = parse_json(store.read_small(_receipt(name), MAX_MANIFEST_BYTES), store.path, store.budget)
        size, mtime_ns, metadata = receipt
        *_, file_size, file_mtime_ns = store.open(name).local_identity
    except (StateExchangeError, TypeError, ValueError):
        return None
    return metadata if (size, mtime_ns) == (file_size, file_mtime_ns) else None


def _receipt(name: str) -> str:
    """Return the name of the receipt beside a finished output file."""
    return f".{files.digest(name.encode())}.finished"  # as short for the longest name
