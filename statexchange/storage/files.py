"""System calls on local files and directories, by descriptors, with the checks that NFS and full disks require.

Mounts say on which file systems that is so; a mount option that makes reads stale is warned of. Directories are opened
through their parent: opening the parent makes an NFS client revalidate its cache. Otherwise a name that was absent once
would stay absent until the directory's cached attributes expire (30 s by default).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from statexchange.cgroups import unescape_mountinfo
from statexchange.errors import (
    CorruptError,
    InvalidArgumentError,
    NotFoundError,
    ReplacedError,
    StorageError,
    TargetExistsError,
    TruncatedError,
    UnsafeError,
    remedy,
)

WINDOW_BYTES = 2 << 20  # fits the processor's cache while it is read, digested and written
REPORTED_BYTES = 1 << 20  # after which progress is reported: a report takes as long as the writing of a small tensor
PART_BYTES = 4 << 10  # that a part counts for, besides its own: a small one takes as long as a copy of so much
Buffer: TypeAlias = bytes | bytearray | memoryview
Identity: TypeAlias = tuple[int, int, int, int]  # device, inode, and, as inode numbers are reused, size and mtime

_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Of system calls on a file system that does not have them.
UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)
# ESTALE: the directory was removed on the NFS server, and all names in it with it.
_GONE = (errno.ENOENT, errno.ESTALE)
# Bytes that a target's name may have: hidden names, which directory_build.py lists, are longer, and may have 255.
_MAX_NAME = 255 - len(f".{'0' * 32}.{'0' * 16}.partial") - 1
_ENDING = r"(?:\.(?P<plan>[0-9a-f]{32}))?\.(?P<nonce>[0-9a-f]{16})\.(?P<kind>owner|partial|replaced|discarded)"
_HIDDEN = re.compile(r"\.(.+?)" + _ENDING)
# Not all of ".nfs": hidden names of a target "nfs" begin so, too.
_NFS_REMOVED = re.compile(r"\.nfs[0-9a-f.]+")
_MAX_CHUNK = 1 << 30  # Linux moves at most 2 GiB in one call
# From this size on a write goes to the disk at once. The pages of smaller ones could be written there twice.
_WRITEBACK_BYTES = 1 << 20
_START_WRITEBACK = 2  # SYNC_FILE_RANGE_WRITE
_ADVICE_BYTES = 512 << 10  # of one advice the kernel heeds so much on nearly all disks and NFS mounts


def audit(call: str, path: str) -> None:
    """Raise the audit event "statexchange.storage" before a system call. Tests inject failures at these events."""
    sys.audit("statexchange.storage", call, path)


def hidden_entries(name: str, entries: Iterable[str]) -> dict[str, re.Match[str]]:
    """Return which of the entries of a directory are hidden names of the target `name`, with their parts.

    The parts are "plan", "nonce" and "kind"; directory_build.py lists them.
    """
    # By the whole name: ".a.b.<nonce>.owner" is a hidden name of "a.b", and not one of "a".
    pattern = re.compile(re.escape(f".{name}") + _ENDING)
    hidden = {}
    for entry in entries:
        match = pattern.fullmatch(entry)
        if match is not None:
            hidden[entry] = match
    return hidden


def hidden_target(hidden: str) -> str | None:
    """Return the name of the target that is part of a publisher's hidden name; None for any other name.

    That of ``.step-000000700.0123456789abcdef.owner`` is "step-000000700".
    """
    match = _HIDDEN.fullmatch(hidden)
    return match[1] if match is not None else None


# Directories


def split_target(path: str) -> tuple[str, str]:
    """Return the parent and the name of a target."""
    parent, name = os.path.split(path)
    if not name:
        raise InvalidArgumentError("not a path for a checkpoint: it has no name", path=path)
    nbytes = len(os.fsencode(name))
    if nbytes > _MAX_NAME:
        text = f"the target's name is too long: it has {nbytes} bytes, and may have {_MAX_NAME}"
        raise InvalidArgumentError(text, path=path)
    return parent, name


def open_directory(path: str, dir_fd: int | None = None, shown: str | None = None) -> int:
    """Return a descriptor of an existing directory.

    An absolute path is opened through its parent, so that an NFS client revalidates the name (close-to-open).

    Args:
        path: the path, or a name in `dir_fd`.
        dir_fd: descriptor of the parent; then a symbolic link is refused.
        shown: full path for messages.

    Raises:
        NotFoundError: there is no such directory.
        UnsafeError: `dir_fd` is given and the name is a link or a file.
        StorageError: it cannot be opened.
    """
    shown = shown or path
    audit("open directory", shown)
    try:
        if dir_fd is not None:
            return os.open(path, _DIRECTORY_FLAGS | os.O_NOFOLLOW, dir_fd=dir_fd)
        return _open_through_parent(path)
    except OSError as error:
        if error.errno in _GONE:
            raise NotFoundError("no such directory", path=shown) from None
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            # In an opened directory another process has put something else there. By its path it was never one.
            error_type = UnsafeError if dir_fd is not None else NotFoundError
            raise error_type("not a directory", path=shown) from None
        raise StorageError.of(error, "open directory", path=shown) from error


def _open_through_parent(path: str) -> int:
    """Open a directory through its parent; if the parent is absent too, through the grandparent, and so on."""
    parent, name = os.path.split(path.rstrip(os.sep))
    # The root has no parent, and only the kernel can resolve what comes after a link.
    if name in ("", ".", ".."):
        return os.open(path, _DIRECTORY_FLAGS)
    parent_fd = open_parent(parent)
    try:
        return os.open(name, _DIRECTORY_FLAGS, dir_fd=parent_fd)
    finally:
        os.close(parent_fd)


def open_parent(parent: str) -> int:
    """Return a descriptor of a directory in which names will be looked up."""
    parent = parent or "."
    try:
        return os.open(parent, _DIRECTORY_FLAGS)
    except FileNotFoundError:
        # As a client of NFS may have it in its cache that this one is absent, too.
        return _open_through_parent(parent)
    except PermissionError:  # search permission without read permission is enough for O_PATH
        return os.open(parent, _DIRECTORY_FLAGS | getattr(os, "O_PATH", 0))


@contextlib.contextmanager
def directory(path: str, dir_fd: int | None = None, shown: str | None = None) -> Iterator[int]:
    """Yield the descriptor that `open_directory` returns; close it after the with block."""
    fd = open_directory(path, dir_fd, shown)
    try:
        yield fd
    finally:
        os.close(fd)


def list_names(dir_fd: int, path: str) -> list[str]:
    """Return the names in an open directory, sorted."""
    audit("list", path)
    try:
        return sorted(os.listdir(dir_fd))
    except OSError as error:
        raise StorageError.of(error, "list directory", path=path) from error


def stat_of(name: str, dir_fd: int, path: str, *, follow: bool = False) -> os.stat_result | None:
    """Return the attributes of `name` in an open directory; None if it does not exist."""
    try:
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=follow)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError.of(error, "look up", path=path) from error


def stat_identity(attributes: os.stat_result) -> Identity:
    """Return the identity of a file or directory, which another one of its name does not have."""
    return attributes.st_dev, attributes.st_ino, attributes.st_size, attributes.st_mtime_ns


def make_directory(name: str, dir_fd: int, path: str, mode: int = 0o700) -> bool:
    """Make the directory `name` in another one durably; return whether it was new."""
    audit("mkdir", path)
    try:
        os.mkdir(name, mode, dir_fd=dir_fd)
    except FileExistsError:  # whoever has made it makes it durable
        return False
    except OSError as error:
        raise StorageError.of(error, "make directory", path=path) from error
    sync_directory(dir_fd, path)
    return True


def make_path(path: str, mode: int = 0o700) -> None:
    """Make the directory at an absolute path and its missing parents."""
    try:
        os.close(open_directory(path))
    except NotFoundError:
        parent, name = os.path.split(path)
        if not name:
            raise
        make_path(parent, mode)
        with directory(parent) as parent_fd:
            make_directory(name, parent_fd, path, mode)


def open_nearest(path: str) -> tuple[int, str]:
    """Return a descriptor and the path of a directory, or, if it is missing, of its nearest existing parent.

    Raises:
        NotFoundError: the path is that of a file, or leads through one.
        StorageError: it cannot be opened, or a name is too long.
    """
    while True:
        try:
            return open_directory(path), path
        except NotFoundError:
            parent = os.path.dirname(path)
            if os.path.lexists(path) or parent == path:
                raise
            path = parent


def check_writable(dir_fd: int, path: str) -> None:
    """Raise StorageError if this process has no permission to make files in an open directory."""
    effective_ids = os.access in os.supports_effective_ids
    if not os.access(".", os.W_OK | os.X_OK, dir_fd=dir_fd, effective_ids=effective_ids):
        is_read_only = os.fstatvfs(dir_fd).f_flag & os.ST_RDONLY
        code = errno.EROFS if is_read_only else errno.EACCES
        raise StorageError(f"cannot write in this directory: {os.strerror(code)}", errno=code, path=path)


def remove_directory(name: str, dir_fd: int, path: str) -> bool:
    """Remove an empty directory; return False if it is not empty (on NFS, an open file counts) or does not exist."""
    audit("rmdir", path)
    try:
        os.rmdir(name, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY, *_GONE):
            return False
        raise StorageError.of(error, "remove directory", path=path) from error
    return True


def sync_directory(dir_fd: int, path: str) -> None:
    """Make the names in a directory durable; do nothing on a file system that cannot."""
    audit("sync directory", path)
    try:
        os.fsync(dir_fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise StorageError.of(error, "sync the directory of", path=path) from error


def check_private(dir_fd: int, path: str) -> None:
    """Raise UnsafeError for a directory in which another user could change files.

    The directory must belong to this user or to root. An NFS server may map users (root_squash, all_squash); then it
    is enough that a new file of this process gets the same owner as the directory.
    """
    attributes = fstat_of(dir_fd, path)
    if attributes.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnsafeError("refused: others may write in this directory", path=path)
    if os.geteuid() in (0, attributes.st_uid) or attributes.st_uid == 0:
        return
    if _owner_of_new(dir_fd, path) != attributes.st_uid:
        raise UnsafeError("refused: this directory belongs to another user", path=path)


@contextlib.contextmanager
def private_directory(path: str) -> Iterator[int]:
    """Open a directory; UnsafeError if another user could change files in it, as `check_private` says."""
    with directory(path) as dir_fd:
        check_private(dir_fd, path)
        yield dir_fd


def _owner_of_new(dir_fd: int, path: str) -> int | None:
    """Return the uid that a new file of this process gets in a directory; None if it may not make one."""
    name = f".probe-{os.urandom(8).hex()}"
    try:
        fd = create_file(name, dir_fd, path)
    except StorageError:
        return None
    try:
        remove_file(name, path, dir_fd)  # before fstat, so that a kill leaves nothing
        return fstat_of(fd, path).st_uid
    finally:
        os.close(fd)


# Files


def open_file(path: str, dir_fd: int, shown: str | None = None, *, follow: bool = False) -> int:
    """Return a read-only descriptor of a regular file.

    Raises UnsafeError for anything else, and for a symbolic link unless `follow` is True. `shown` is the full path for
    messages.
    """
    shown = shown or path
    audit("open", shown)
    # Without O_NONBLOCK the open of a FIFO would wait for a writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    if not follow:
        flags |= os.O_NOFOLLOW
    try:
        fd = os.open(path, flags, dir_fd=dir_fd)
    except FileNotFoundError:
        raise NotFoundError("no such file", path=shown) from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise UnsafeError("refused: not a regular file", path=shown) from None
        raise read_error(error, "open", shown) from error
    try:
        mode = fstat_of(fd, shown).st_mode
    except StorageError:
        os.close(fd)
        raise
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise UnsafeError("refused: not a regular file", path=shown)
    return fd


def fstat_of(fd: int, path: str) -> os.stat_result:
    """Return the attributes of an open file or directory."""
    try:
        return os.fstat(fd)
    except OSError as error:
        raise read_error(error, "read the attributes", path) from error


def read_error(error: OSError, doing: str, path: str) -> StorageError:
    """Return the error for a failed read; ESTALE on NFS becomes ReplacedError, as the file is gone."""
    if error.errno == errno.ESTALE:
        text = f"cannot {doing}: replaced or removed on the server meanwhile; open it again"
        return ReplacedError(text, errno=error.errno, path=path)
    return StorageError.of(error, doing, path=path)


def create_file(name: str, dir_fd: int, path: str, mode: int = 0o666) -> int:
    """Create an empty file and return a descriptor for reading and writing; TargetExistsError if the name exists."""
    audit("create", path)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(name, flags, mode, dir_fd=dir_fd)
    except FileExistsError:
        raise TargetExistsError("this name exists already", path=path) from None
    except OSError as error:
        raise StorageError.of(error, "create", path=path) from error


def open_for_writing(path: str, link: str = "", identity: Sequence[int] = ()) -> int:
    """Return a descriptor for reading and writing in place a file that exists.

    With `link` it is that of a file without a name, which another process has opened: `link` leads through /proc to its
    descriptor, `identity` is the device and inode, and `path` is for messages.

    Raises:
        ReplacedError: the other process has closed the file.
        StorageError: it cannot be opened.
    """
    audit("open", path)
    flags = os.O_RDWR | os.O_CLOEXEC
    if not link:  # what /proc has of a descriptor is a link
        flags |= os.O_NOFOLLOW
    try:
        fd = os.open(link or path, flags)
    except OSError as error:
        raise StorageError.of(error, "open for writing", path=path) from error
    # The number of a descriptor that was closed is soon that of another file, which must not be written.
    if link and (os.fstat(fd).st_dev, os.fstat(fd).st_ino) != tuple(identity):
        os.close(fd)
        raise ReplacedError("the rank that has made this temporary file has left the call", path=path)
    return fd


def pread_into(fd: int, buffer: memoryview, offset: int, path: str) -> None:
    """Fill `buffer` from `offset`; raise CorruptError if the file ends before."""
    done = 0
    try:
        while done < len(buffer):
            count = os.preadv(fd, [buffer[done : done + _MAX_CHUNK]], offset + done)
            if not count:
                raise TruncatedError("file is truncated", path=path, expected=offset + len(buffer), found=offset + done)
            done += count
    except OSError as error:
        raise read_error(error, "read", path) from error


def begin_reading(fd: int, begin: int, nbytes: int) -> None:
    """Begin to read bytes of a file into the page cache, and do not wait; do nothing where the system cannot."""
    if not hasattr(os, "posix_fadvise"):
        return
    # Of bytes that are in the cache already the kernel finds that out at 150 GB/s.
    for at in range(begin, begin + nbytes, _ADVICE_BYTES):
        with contextlib.suppress(OSError):  # the read that follows reports what is wrong
            os.posix_fadvise(fd, at, min(_ADVICE_BYTES, begin + nbytes - at), os.POSIX_FADV_WILLNEED)


def pwrite_all(fd: int, buffer: Buffer, offset: int, path: str) -> None:
    """Write all of `buffer` at `offset`, and let the disk begin with a large one at once."""
    view = memoryview(buffer)
    if not view.nbytes:  # an empty array's view cannot be cast
        return
    view = view.cast("B")
    done = 0
    try:
        while done < len(view):
            # It may be less, without an error: before a full disk, or a limit of the file's size.
            count = os.pwrite(fd, view[done : done + _MAX_CHUNK], offset + done)
            if not count:
                raise OSError(errno.EIO, "the system wrote 0 bytes")
            done += count
    except OSError as error:
        raise StorageError.of(error, f"write {len(view) - done} bytes", path=path) from error
    if done >= _WRITEBACK_BYTES:
        _begin_writeback(fd, offset, done)


def _begin_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Begin to write bytes of a file to the disk, and do not wait.

    Otherwise they all lie in memory until the file is synced, while the disk idles. What fails is found by that sync.
    """
    call = libc("sync_file_range")
    if call is not None:
        import ctypes

        # By their types: ctypes passes a Python int as 32 bits.
        call(fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), _START_WRITEBACK)


def sync_file(fd: int, path: str) -> None:
    """Make a file's bytes durable.

    After a failure the file must be written again: the kernel drops the failed pages, and a second fsync succeeds.
    """
    audit("sync", path)
    try:
        os.fsync(fd)
    except OSError as error:
        raise StorageError.of(error, f"sync {os.fstat(fd).st_size} bytes", path=path) from error


def close_file(fd: int, path: str) -> None:
    """Close a written file and report errors: a full quota or a lost server may appear only here."""
    try:
        os.close(fd)
    except OSError as error:
        raise StorageError.of(error, "close", path=path) from error


@contextlib.contextmanager
def closing(fd: int, path: str) -> Iterator[None]:
    """Close a file at the end of a block that writes it.

    Raises:
        StorageError: the system reports an error at the close. After an error in the block, that one is raised alone.
    """
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # the first failure counts
            os.close(fd)
        raise
    close_file(fd, path)


def remove_file(name: str, path: str, dir_fd: int) -> None:
    """Remove a file; do nothing if it does not exist."""
    audit("unlink", path)
    try:
        os.unlink(name, dir_fd=dir_fd)
    except OSError as error:
        if error.errno not in _GONE:
            raise StorageError.of(error, "remove", path=path) from error


def remove_entry(name: str, path: str, dir_fd: int) -> None:
    """Remove a file, or a directory with all that is in it; links are not followed."""
    if _NFS_REMOVED.fullmatch(name):  # a removed file that is still open: NFS removes it when closed
        return
    try:
        # No look at what it is: on NFS that fails for a file that another host removes at the same time.
        remove_file(name, path, dir_fd)
        return
    except StorageError as error:
        # Of a directory Linux says EISDIR, and POSIX EPERM.
        if error.errno not in (errno.EISDIR, errno.EPERM):
            raise
    with directory(name, dir_fd, path) as below:
        for entry in list_names(below, path):
            remove_entry(entry, os.path.join(path, entry), below)
    remove_directory(name, dir_fd, path)


def check_size(size: int, limit: int, path: str) -> None:
    """Raise CorruptError for a file of more than `limit` bytes."""
    if size > limit:
        raise CorruptError(f"file has {size} bytes, more than the limit of {limit} for this kind of file", path=path)


def digest(*parts: Buffer) -> str:
    """Return the xxh3-128 digest of bytes, a box's in C order or those of a text, as 32 hex digits."""
    import xxhash  # late: commands that only read headers do not need it

    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(part)
    return str(hasher.hexdigest())


# Disk space


def reserve(fd: int, nbytes: int, path: str, begin: int = 0) -> bool:
    """Reserve `nbytes` of a file from `begin` on, so that a full disk is an error now. False if unsupported."""
    code = 0
    if nbytes:  # else EINVAL
        code = _fallocate(fd, begin, nbytes)
    if code and code not in UNSUPPORTED:
        raise StorageError(f"cannot reserve {nbytes} bytes: {os.strerror(code)}{remedy(code)}", errno=code, path=path)
    return not code


def make_room(fd: int, nbytes: int, path: str) -> bool:
    """Reserve a new file's `nbytes`; return whether they are reserved.

    On tmpfs, which would write zeros, only check that they are free.
    """
    if mount_of(path).is_memory:
        check_room(fd, nbytes, path)
        return False
    return reserve(fd, nbytes, path)


def check_room(fd: int, nbytes: int, path: str) -> None:
    """Raise StorageError if the file system of an open file has fewer than `nbytes` free; reserve nothing."""
    file_system = os.fstatvfs(fd)
    free = file_system.f_bavail * file_system.f_frsize
    if file_system.f_blocks and free < nbytes:  # a tmpfs without a limit reports no blocks
        reason = f"{os.strerror(errno.ENOSPC)}, {free} are free{remedy(errno.ENOSPC)}"
        raise StorageError(f"cannot reserve {nbytes} bytes: {reason}", errno=errno.ENOSPC, path=path)


def _fallocate(fd: int, begin: int, nbytes: int) -> int:
    """Return the errno of fallocate(2), or 0. Where it is unsupported, `os.posix_fallocate` would write every block."""
    import ctypes

    call = libc("fallocate")
    if call is None:
        return errno.ENOSYS
    while call(fd, 0, ctypes.c_int64(begin), ctypes.c_int64(nbytes)):
        code = ctypes.get_errno()
        if code != errno.EINTR:
            return code
    return 0


@functools.cache
def libc(name: str) -> Callable[..., int] | None:
    """Return a function of Linux's C library that Python has no wrapper for; None elsewhere."""
    import ctypes  # late: commands that only read do not need it

    return getattr(ctypes.CDLL(None, use_errno=True), name, None) if sys.platform.startswith("linux") else None


_log = logging.getLogger(__name__)
_MEMORY = frozenset({"tmpfs", "ramfs"})
_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "9p", "afs", "virtiofs"})
_NETWORK |= {"fuse.sshfs", "fuse.juicefs", "fuse.glusterfs", "fuse.ceph"}
_KERNEL = frozenset({"proc", "sysfs", "cgroup", "cgroup2", "securityfs", "debugfs", "tracefs", "devpts"})


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/self/mountinfo: mount point, file system type, and the options of mount and superblock."""

    point: str
    kind: str
    options: frozenset[str]

    @property
    def is_memory(self) -> bool:
        """Whether files are stored in memory, where fsync has no effect."""
        return self.kind in _MEMORY

    @property
    def is_network(self) -> bool:
        """Whether other hosts may change files here, and this host may see them late because of its caches."""
        return self.kind in _NETWORK

    def check_takes_files(self, path: str) -> None:
        """Raise StorageError if this is a kernel interface such as /proc, in which no files can be made."""
        if self.kind in _KERNEL:
            text = f"cannot make files here: {self.kind} is an interface of the kernel"
            raise StorageError(text, errno=errno.ENOENT, path=path)


def _mounts() -> tuple[Mount, ...]:
    """Return all mounts in the order in which they were made; () without /proc/self/mountinfo."""
    try:
        with open("/proc/self/mountinfo", "rb", buffering=0) as lines:
            return _parsed(lines.read())
    except OSError:
        return ()


@functools.lru_cache(maxsize=1)  # a scan asks once per directory, and mounts seldom change
def _parsed(text: bytes) -> tuple[Mount, ...]:
    mounts = []
    # "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue"
    for line in os.fsdecode(text).split("\n"):
        row = line.split()
        if not row:  # after the last line
            continue
        separator = row.index("-")  # follows the optional fields
        options = frozenset([*row[5].split(","), *row[separator + 3].split(",")])
        mounts.append(Mount(unescape_mountinfo(row[4]), row[separator + 1], options))
    return tuple(mounts)


def mount_of(path: str) -> Mount:
    """Return the mount of `path`, or of its nearest existing parent. Not collective."""
    real = os.path.realpath(path)
    best = Mount("/", "", frozenset())
    for mount in _mounts():
        # A later mount on the same point hides the earlier ones.
        is_inside = real == mount.point or real.startswith(mount.point.rstrip("/") + "/")
        if is_inside and len(mount.point) >= len(best.point):
            best = mount
    return best


_looked_at: set[int] = set()  # device numbers of file systems: a scan opens very many directories of one


def warn_of_options(path: str) -> None:
    """Warn once per file system about an NFS option of `path` that makes reads stale.

    Not collective. Does nothing if there is no such path.
    """
    try:
        device = os.stat(path).st_dev
    except OSError:
        return
    if device in _looked_at:
        return
    _looked_at.add(device)
    mount = mount_of(path)
    if mount.kind in ("nfs", "nfs4") and "nocto" in mount.options:
        _log.warning(
            "%s: mounted with nocto: this host may read stale names and bytes of files that another host has written, "
            "until its attribute cache expires; mount without nocto",
            mount.point,
        )
