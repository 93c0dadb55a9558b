"""System calls on files, with the checks that NFS, full disks and power cuts made necessary.

A name appears only when its bytes are whole and durable: `write_new` builds a hidden temporary file in the same
directory, syncs it, renames it and syncs the directory. Names are never used twice.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterable, Iterator

from statexchange.errors import CorruptError, NotFoundError, StorageError, TargetExistsError, UnsafeError

__all__ = [
    "Buffer",
    "create_file",
    "directory",
    "exchange_paths",
    "filesystem_is_memory",
    "list_directory",
    "make_directory",
    "new_nonce",
    "open_directory",
    "open_file",
    "parse_json",
    "pread_into",
    "pwrite_all",
    "read_small",
    "rename_new",
    "reserve",
    "sync_directory",
    "sync_file",
    "write_new",
]

Buffer = bytes | bytearray | memoryview

_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_CLOEXEC = getattr(os, "O_CLOEXEC", 0)
_BINARY = getattr(os, "O_BINARY", 0)
_DIRECTORY = getattr(os, "O_DIRECTORY", 0)
# A rename that was retransmitted to an NFS server may report failure although it was done.
_AMBIGUOUS = (errno.ENOENT, errno.EEXIST, getattr(errno, "ESTALE", -1), errno.ETIMEDOUT)
_MAX_CHUNK = 1 << 30  # Linux moves at most 2 GiB in one call


def new_nonce() -> str:
    """64 random bits as 16 hex digits."""
    return secrets.token_hex(8)


def open_directory(path: str, dir_fd: int | None = None) -> int:
    """A descriptor of an existing directory; opening it makes NFS look the directory up anew.

    Below another directory (`dir_fd`) a symbolic link is refused.
    """
    flags = os.O_RDONLY | _DIRECTORY | _CLOEXEC | (_NOFOLLOW if dir_fd is not None else 0)
    try:
        return os.open(path, flags, dir_fd=dir_fd)
    except FileNotFoundError:
        raise NotFoundError("no such directory", path=path) from None
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise NotFoundError("not a directory", path=path) from None
        raise StorageError.of(error, "open directory", path=path) from error


def make_directory(name: str, dir_fd: int | None = None, mode: int = 0o700) -> None:
    """Make a directory unless it exists, and make its name durable."""
    try:
        os.mkdir(name, mode, dir_fd=dir_fd)
    except FileExistsError:
        return
    except OSError as error:
        raise StorageError.of(error, "make directory", path=name) from error
    if dir_fd is not None:
        sync_directory(dir_fd)


def sync_directory(dir_fd: int) -> None:
    """Make the names in a directory durable, where the system can."""
    try:
        os.fsync(dir_fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise StorageError.of(error, "sync directory") from error


def sync_file(fd: int, path: str) -> None:
    """Make a file's bytes durable. After a failure the file must be written anew: a second sync would say OK."""
    try:
        os.fsync(fd)
    except OSError as error:
        raise StorageError.of(error, "sync", path=path) from error


def list_directory(path: str) -> list[str]:
    """Names in a directory, opened first so that NFS shows the newest."""
    fd = open_directory(path)
    try:
        return sorted(os.listdir(fd))
    except OSError as error:
        raise StorageError.of(error, "list directory", path=path) from error
    finally:
        os.close(fd)


def open_file(path: str, dir_fd: int | None = None) -> int:
    """A read-only descriptor of a regular file: no symbolic link, no FIFO that would block."""
    flags = os.O_RDONLY | _NOFOLLOW | getattr(os, "O_NONBLOCK", 0) | _CLOEXEC | _BINARY
    if dir_fd is None:
        flags &= ~_NOFOLLOW  # a path that the user typed may well be a link
    try:
        fd = os.open(path, flags, dir_fd=dir_fd)
    except FileNotFoundError:
        raise NotFoundError("no such file", path=path) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UnsafeError("refused: a symbolic link stands where a file of ours should be", path=path) from None
        raise StorageError.of(error, "open", path=path) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UnsafeError("refused: not a regular file", path=path)
    return fd


def pread_into(fd: int, buffer: memoryview, offset: int, path: str) -> None:
    """Fill `buffer` from `offset`; a file that ends before that is a CorruptError."""
    done = 0
    try:
        while done < len(buffer):
            count = os.preadv(fd, [buffer[done : done + _MAX_CHUNK]], offset + done)
            if not count:
                raise CorruptError(
                    "file is truncated", path=path, expected=f"{offset + len(buffer)} bytes", found=offset + done
                )
            done += count
    except OSError as error:
        raise StorageError.of(error, "read", path=path) from error


def pwrite_all(fd: int, buffer: Buffer, offset: int, path: str) -> None:
    """Write all of `buffer` at `offset`. A short count is not an error to the system, so it is checked here."""
    view = memoryview(buffer).cast("B")
    done = 0
    try:
        while done < len(view):
            done += os.pwrite(fd, view[done : done + _MAX_CHUNK], offset + done)
    except OSError as error:
        raise StorageError.of(error, "write", path=path) from error


def reserve(fd: int, nbytes: int, path: str) -> bool:
    """Reserve room, so that a full disk is noticed now. False where the file system cannot."""
    if not nbytes or not hasattr(os, "posix_fallocate"):
        return not nbytes
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            return False
        raise StorageError.of(error, f"reserve {nbytes} bytes", path=path) from error
    return True


def read_small(path: str, limit: int = 64 << 20, dir_fd: int | None = None) -> bytes:
    """All bytes of a file that may not be larger than `limit` (CorruptError)."""
    fd = open_file(path, dir_fd)
    try:
        size = os.fstat(fd).st_size
        if size > limit:
            raise CorruptError(f"file of {size} bytes is too large for what it should hold", path=path)
        data = bytearray(size)
        pread_into(fd, memoryview(data), 0, path)
    finally:
        os.close(fd)
    return bytes(data)


def parse_json(data: Buffer | str, path: str) -> object:
    """Parsed JSON; broken text or a key that occurs twice is a CorruptError."""
    try:
        return json.loads(data if isinstance(data, str) else bytes(data), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"broken JSON: {error}", path=path) from None


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def write_new(
    dir_fd: int,
    name: str,
    parts: Iterable[Buffer],
    *,
    nbytes: int,
    path: str,
    durable: bool = True,
    mode: int = 0o600,
) -> None:
    """Write a new file `name` in a directory: the name appears only when all `nbytes` are there and durable.

    `path` is the full name for messages. A name that exists is a TargetExistsError; a failed write leaves nothing.
    """
    temporary = f".tmp-{new_nonce()}"
    fd = _create(temporary, dir_fd, mode, path)
    try:
        try:
            reserve(fd, nbytes, path)
            offset = 0
            for part in parts:
                pwrite_all(fd, part, offset, path)
                offset += memoryview(part).nbytes
            assert offset == nbytes, (offset, nbytes)
            if durable:
                sync_file(fd, path)
        finally:
            os.close(fd)
        _rename_checked(dir_fd, temporary, name, nbytes, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=dir_fd)
        raise
    if durable:
        sync_directory(dir_fd)


def _create(name: str, dir_fd: int, mode: int, path: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _NOFOLLOW | _CLOEXEC | _BINARY
    try:
        return os.open(name, flags, mode, dir_fd=dir_fd)
    except FileExistsError:
        raise TargetExistsError("a file of this name exists", path=path) from None
    except OSError as error:
        raise StorageError.of(error, "create", path=path) from error


def create_file(dir_fd: int, name: str, path: str, mode: int = 0o666) -> int:
    """A new, empty file for writing in place, under its own name; an existing one is a TargetExistsError."""
    return _create(name, dir_fd, mode, path)


def _rename_checked(dir_fd: int, temporary: str, name: str, nbytes: int, path: str) -> None:
    try:
        os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        pass
    else:
        raise TargetExistsError("a file of this name exists", path=path)
    ours = os.stat(temporary, dir_fd=dir_fd, follow_symlinks=False)
    try:
        os.rename(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except OSError as error:
        if error.errno not in _AMBIGUOUS or not _arrived(dir_fd, name, ours.st_ino, nbytes):
            raise StorageError.of(error, "rename into place", path=path) from error


def _arrived(dir_fd: int, name: str, inode: int, nbytes: int) -> bool:
    try:
        found = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return found.st_ino == inode and found.st_size == nbytes


_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2


def _renameat2() -> Callable[[str, str, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return None
    at_cwd = -100

    def call(source: str, target: str, flags: int) -> int:
        result = function(at_cwd, os.fsencode(source), at_cwd, os.fsencode(target), ctypes.c_uint(flags))
        return ctypes.get_errno() if result else 0

    return call


def rename_new(source: str, target: str) -> None:
    """Rename to a name that must not exist (TargetExistsError), atomically where the system can."""
    call = _renameat2()
    code = call(source, target, _RENAME_NOREPLACE) if call else errno.ENOSYS
    if code == errno.EEXIST or (code in (errno.EINVAL, errno.ENOSYS) and os.path.lexists(target)):
        raise TargetExistsError("the target exists", path=target)
    if code in (errno.EINVAL, errno.ENOSYS):
        os.rename(source, target)
    elif code:
        raise StorageError(f"cannot rename into place: {os.strerror(code)}", errno=code, path=target)


def exchange_paths(one: str, other: str) -> bool:
    """Swap two names atomically; False where the file system cannot."""
    call = _renameat2()
    code = call(one, other, _RENAME_EXCHANGE) if call else errno.ENOSYS
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    if code:
        raise StorageError(f"cannot exchange with {one}: {os.strerror(code)}", errno=code, path=other)
    return True


def filesystem_is_memory(path: str) -> bool:
    """Whether `path` lies on tmpfs, where syncing is meaningless."""
    try:
        real = os.path.realpath(path)
        with open("/proc/self/mounts", encoding="utf-8", errors="replace") as mounts:
            rows = [line.split() for line in mounts]
    except OSError:
        return False
    below = [(row[1], row[2]) for row in rows if real == row[1] or real.startswith(row[1].rstrip("/") + "/")]
    return bool(below) and max(below, key=lambda row: len(row[0]))[1] in ("tmpfs", "ramfs")


@contextlib.contextmanager
def directory(path: str, dir_fd: int | None = None) -> Iterator[int]:
    """`open_directory`, closed at the end of the block."""
    fd = open_directory(path, dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)
