"""System calls on files, with the checks that NFS, full disks and power cuts made necessary.

A name appears only when its bytes are whole and durable: `write_new` builds a hidden temporary file in the
same directory, syncs it, renames it and syncs the directory. Names are never used twice.
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
from typing import TYPE_CHECKING, TypeAlias

from statexchange.errors import CorruptError, NotFoundError, StorageError, TargetExistsError, UnsafeError
from statexchange.storage import object_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = [
    "TEMPORARY_PREFIX",
    "WINDOW_BYTES",
    "Buffer",
    "OpenFiles",
    "Readable",
    "check_room",
    "close",
    "close_file",
    "create_file",
    "directory",
    "exchange_paths",
    "filesystem_is_memory",
    "is_directory",
    "is_file",
    "list_directory",
    "make_directory",
    "make_path",
    "names_in",
    "new_nonce",
    "open_directory",
    "open_file",
    "open_for_reading",
    "parse_json",
    "pread_into",
    "pwrite_all",
    "read_small",
    "reading",
    "remove_file",
    "rename_new",
    "reserve",
    "size_of",
    "sync_directory",
    "sync_file",
    "version_of",
    "write_new",
]

TEMPORARY_PREFIX = ".tmp-"
WINDOW_BYTES = 2 << 20  # what the processor's cache holds while it is read, hashed and written
Buffer = bytes | bytearray | memoryview
Readable: TypeAlias = int | object_store.ObjectFile
"""An open file descriptor, or an object of a store."""

_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_CLOEXEC = getattr(os, "O_CLOEXEC", 0)
_BINARY = getattr(os, "O_BINARY", 0)
_DIRECTORY = getattr(os, "O_DIRECTORY", 0)
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)
_MAX_CHUNK = 1 << 30  # Linux moves at most 2 GiB in one call


def new_nonce() -> str:
    """64 random bits as 16 hex digits."""
    return secrets.token_hex(8)


def open_directory(path: str, dir_fd: int | None = None, shown: str | None = None) -> int:
    """A descriptor of an existing directory; opening it makes NFS look the directory up anew.

    Below another directory (`dir_fd`) a symbolic link is refused. `shown` is the full path for messages.
    """
    shown = shown or path
    flags = os.O_RDONLY | _DIRECTORY | _CLOEXEC | (_NOFOLLOW if dir_fd is not None else 0)
    try:
        return os.open(path, flags, dir_fd=dir_fd)
    except FileNotFoundError:
        raise NotFoundError("no such directory", path=shown) from None
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            refused = UnsafeError if dir_fd is not None else NotFoundError
            raise refused("not a directory", path=shown) from None
        raise StorageError.of(error, "open directory", path=shown) from error


def make_directory(name: str, dir_fd: int, path: str, mode: int = 0o700) -> None:
    """Make the directory `name` in another one unless it exists, and make its name durable."""
    try:
        os.mkdir(name, mode, dir_fd=dir_fd)
    except FileExistsError:
        return
    except OSError as error:
        raise StorageError.of(error, "make directory", path=path) from error
    sync_directory(dir_fd, path)


def make_path(path: str, mode: int = 0o700) -> None:
    """Make the directory at an absolute path, and the directories above it, where they are missing."""
    if not os.path.isdir(path):
        parent, name = os.path.split(path)
        make_path(parent, mode)
        with directory(parent) as parent_fd:
            make_directory(name, parent_fd, path, mode)


def sync_directory(dir_fd: int, path: str) -> None:
    """Make the names in a directory durable, where the system can."""
    try:
        os.fsync(dir_fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise StorageError.of(error, "sync the directory of", path=path) from error


def sync_file(fd: int, path: str) -> None:
    """Make a file's bytes durable. After a failure write the file anew: a second sync would say OK."""
    try:
        os.fsync(fd)
    except OSError as error:
        raise StorageError.of(error, "sync", path=path) from error


def list_directory(path: str) -> list[str]:
    """Names in a directory, which may be a URL; it is opened first so that NFS shows the newest."""
    if object_store.is_url(path):
        return object_store.names_below(path)
    with directory(path) as fd:
        return names_in(fd, path)


def names_in(dir_fd: int, path: str) -> list[str]:
    """Names in an open directory, sorted."""
    try:
        return sorted(os.listdir(dir_fd))
    except OSError as error:
        raise StorageError.of(error, "list directory", path=path) from error


def is_directory(path: str) -> bool:
    """Whether `path`, which may be a URL, is a directory."""
    return object_store.kind_of(path) == "directory" if object_store.is_url(path) else os.path.isdir(path)


def is_file(path: str) -> bool:
    """Whether `path`, which may be a URL, is a file."""
    return object_store.kind_of(path) == "file" if object_store.is_url(path) else os.path.isfile(path)


def open_for_reading(path: str) -> Readable:
    """A file, or an object if `path` is a URL; `close` it."""
    return object_store.ObjectFile(path) if object_store.is_url(path) else open_file(path)


@contextlib.contextmanager
def reading(path: str) -> Iterator[Readable]:
    """As `open_for_reading`, for a with block."""
    file = open_for_reading(path)
    try:
        yield file
    finally:
        close(file)


def size_of(file: Readable) -> int:
    """Bytes of an open file."""
    return os.fstat(file).st_size if isinstance(file, int) else file.size


def version_of(path: str) -> list[str | int]:
    """What changes when the file at `path`, which may be a URL, does: with its name, its size and time."""
    if object_store.is_url(path):
        return [path, object_store.version_of(path)]
    try:
        found = os.stat(path)
    except OSError as error:
        raise StorageError.of(error, "look up", path=path) from error
    return [os.path.abspath(path), found.st_size, found.st_mtime_ns]


def close(file: Readable) -> None:
    """Close what was opened for reading."""
    if isinstance(file, int):
        os.close(file)


def open_file(path: str, dir_fd: int | None = None, shown: str | None = None) -> int:
    """A read-only descriptor of a regular file: no FIFO that would block; below `dir_fd`, no symbolic link.

    `shown` is the full path for messages.
    """
    shown = shown or path
    flags = os.O_RDONLY | _NOFOLLOW | getattr(os, "O_NONBLOCK", 0) | _CLOEXEC | _BINARY
    if dir_fd is None:
        flags &= ~_NOFOLLOW  # a path that the user typed may well be a link
    try:
        fd = os.open(path, flags, dir_fd=dir_fd)
    except FileNotFoundError:
        raise NotFoundError("no such file", path=shown) from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise UnsafeError("refused: not a regular file", path=shown) from None
        raise StorageError.of(error, "open", path=shown) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UnsafeError("refused: not a regular file", path=shown)
    return fd


class OpenFiles:
    """Files open for reading, each once, not more than `limit` at a time. Not for several threads at once."""

    def __init__(self, limit: int = 32) -> None:
        self._limit = limit
        self._files: dict[str, Readable] = {}

    def file(self, path: str) -> Readable:
        """The file at `path`, good until the next call."""
        file = self._files.pop(path, None)
        if file is None:
            if len(self._files) >= self._limit:
                close(self._files.pop(next(iter(self._files))))
            file = open_for_reading(path)
        self._files[path] = file  # again the last one to be closed
        return file

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        while self._files:
            close(self._files.popitem()[1])


def pread_into(fd: Readable, buffer: memoryview, offset: int, path: str) -> None:
    """Fill `buffer` from `offset`; a file that ends before that is a CorruptError."""
    if not isinstance(fd, int):
        fd.read_into(buffer, offset)
        return
    done = 0
    try:
        while done < len(buffer):
            count = os.preadv(fd, [buffer[done : done + _MAX_CHUNK]], offset + done)
            if not count:
                raise CorruptError(
                    "file is truncated",
                    path=path,
                    expected=f"{offset + len(buffer)} bytes",
                    found=offset + done,
                )
            done += count
    except OSError as error:
        raise StorageError.of(error, "read", path=path) from error


def pwrite_all(fd: int, buffer: Buffer, offset: int, path: str) -> None:
    """Write all of `buffer` at `offset`. A short count is no error to the system, so it is checked here."""
    view = memoryview(buffer)
    view = view.cast("B") if view.nbytes else memoryview(b"")  # an empty array's view cannot be cast
    done = 0
    try:
        while done < len(view):
            count = os.pwrite(fd, view[done : done + _MAX_CHUNK], offset + done)
            if not count:
                raise OSError(errno.EIO, "the system wrote nothing")
            done += count
    except OSError as error:
        raise StorageError.of(error, "write", path=path) from error


def reserve(fd: int, nbytes: int, path: str, begin: int = 0) -> bool:
    """Make sure that a file has `nbytes` of room from `begin` on, to notice a full disk now. False if it cannot be."""
    code = _fallocate(fd, begin, nbytes) if nbytes else 0
    if code and code not in _UNSUPPORTED:
        raise StorageError(f"cannot reserve {nbytes} bytes: {os.strerror(code)}", errno=code, path=path)
    return not code


def check_room(fd: int, nbytes: int, path: str) -> None:
    """StorageError if the file system of an open file has no `nbytes` free now. Nothing is reserved."""
    found = os.fstatvfs(fd)
    free = found.f_bavail * found.f_frsize
    if found.f_blocks and free < nbytes:  # of a tmpfs without a limit nothing is known
        why = f"{os.strerror(errno.ENOSPC)}, {free} are free"
        raise StorageError(f"cannot reserve {nbytes} bytes: {why}", errno=errno.ENOSPC, path=path)


def _fallocate(fd: int, begin: int, nbytes: int) -> int:
    """The system call, which can say no; `os.posix_fallocate` would write a byte into each block instead."""
    call = _libc("fallocate")
    code = errno.EINTR
    while code == errno.EINTR:
        result = call(fd, 0, ctypes.c_int64(begin), ctypes.c_int64(nbytes)) if call else -1
        code = (ctypes.get_errno() if call else errno.ENOSYS) if result else 0
    return code


def _libc(name: str) -> Callable[..., int] | None:
    """A function of Linux's C library that Python lacks."""
    return getattr(ctypes.CDLL(None, use_errno=True), name, None) if sys.platform.startswith("linux") else None


def close_file(fd: int, path: str) -> None:
    """Close a file that was written: a full quota or a lost server may be told only now."""
    try:
        os.close(fd)
    except OSError as error:
        raise StorageError.of(error, "close", path=path) from error


def read_small(path: str, limit: int = 64 << 20, dir_fd: int | None = None, shown: str | None = None) -> bytes:
    """All bytes of a file that may not be larger than `limit` (CorruptError)."""
    shown = shown or path
    fd = open_for_reading(path) if dir_fd is None else open_file(path, dir_fd, shown)
    try:
        size = size_of(fd)
        if size > limit:
            raise CorruptError(f"file of {size} bytes is too large for what it should hold", path=shown)
        data = bytearray(size)
        pread_into(fd, memoryview(data), 0, shown)
    finally:
        close(fd)
    return bytes(data)


def parse_json(data: Buffer | str, path: str) -> object:
    """Parsed JSON; broken text or a key that occurs twice is a CorruptError."""
    try:
        text = data if isinstance(data, str) else bytes(data).decode()  # given bytes, json would take UTF-16 too
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"broken JSON: {error}", path=path) from None


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


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
    begin: int = 0,
    head: Callable[[], Buffer] | None = None,
) -> None:
    """Write a new file `name` in a directory: the name appears only when all `nbytes` are there and durable.

    `head` gives the first `begin` bytes when all parts are written. `path` is the full name for messages. A name that
    exists is a TargetExistsError; a failed write leaves nothing.
    """
    temporary = f"{TEMPORARY_PREFIX}{new_nonce()}"
    fd = _create(temporary, dir_fd, mode, path)
    placed = temporary
    try:
        try:
            _fill(fd, parts, begin, nbytes, path)
            if head is not None:
                pwrite_all(fd, head(), 0, path)
            if durable:
                sync_file(fd, path)
        except BaseException:
            with contextlib.suppress(OSError):  # what failed before matters more
                os.close(fd)
            raise
        close_file(fd, path)
        rename_new(temporary, name, dir_fd=dir_fd, path=path)
        placed = name
        if durable:
            sync_directory(dir_fd, path)
    except BaseException:
        with contextlib.suppress(OSError):  # what failed before matters more
            os.unlink(placed, dir_fd=dir_fd)
        raise


def _fill(fd: int, parts: Iterable[Buffer], begin: int, nbytes: int, path: str) -> None:
    if filesystem_is_memory(path):  # to reserve room there would be to write it
        check_room(fd, nbytes, path)
    else:
        reserve(fd, nbytes, path)
    offset = begin
    for part in parts:
        pwrite_all(fd, part, offset, path)
        offset += memoryview(part).nbytes
    assert offset == nbytes, (offset, nbytes)


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


_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_AT_CWD = -100


def _renameat2(source: str, target: str, flags: int, dir_fd: int | None = None) -> int:
    """The system call's errno, or 0."""
    call = _libc("renameat2")
    if call is None:
        return errno.ENOSYS
    at = _AT_CWD if dir_fd is None else dir_fd
    return ctypes.get_errno() if call(at, os.fsencode(source), at, os.fsencode(target), ctypes.c_uint(flags)) else 0


def rename_new(source: str, target: str, *, dir_fd: int | None = None, path: str | None = None) -> None:
    """Rename to a name that must not exist (TargetExistsError), atomically where the system can.

    `path` is the full name of the target for messages.
    """
    path = path or target
    ours = _identity(source, dir_fd, path)
    code = _renameat2(source, target, _RENAME_NOREPLACE, dir_fd)
    if code in _UNSUPPORTED:
        code = errno.EEXIST if _identity(target, dir_fd, path) else _rename(source, target, dir_fd)
    # A rename that was retransmitted to an NFS server may report failure although it was done.
    if code and ours is not None and _identity(target, dir_fd, path) == ours:
        return
    if code in (errno.EEXIST, errno.ENOTEMPTY):
        raise TargetExistsError("this name exists already", path=path)
    if code:
        raise StorageError(f"cannot rename into place: {os.strerror(code)}", errno=code, path=path)


def _rename(source: str, target: str, dir_fd: int | None) -> int:
    try:
        os.rename(source, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _identity(name: str, dir_fd: int | None, path: str) -> tuple[int, int] | None:
    """What tells a file or directory from all others; None if there is none of this name."""
    try:
        found = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError.of(error, "look up", path=path) from error
    return found.st_dev, found.st_ino


def exchange_paths(one: str, other: str) -> bool:
    """Swap two names atomically; False where the file system cannot."""
    code = _renameat2(one, other, _RENAME_EXCHANGE)
    if code and code not in _UNSUPPORTED:
        raise StorageError(f"cannot exchange with {one}: {os.strerror(code)}", errno=code, path=other)
    return not code


def remove_file(name: str, path: str, dir_fd: int | None = None) -> None:
    """Remove a file; one that is gone already is no error."""
    try:
        os.unlink(name, dir_fd=dir_fd)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError.of(error, "remove", path=path) from error


def filesystem_is_memory(path: str) -> bool:
    """Whether `path` lies on tmpfs, where syncing is meaningless."""
    try:
        real = os.path.realpath(path)
        with open("/proc/self/mounts", encoding="utf-8", errors="replace") as mounts:
            rows = [line.split() for line in mounts]
    except OSError:
        return False
    below = [(row[1], row[2]) for row in rows if real == row[1] or real.startswith(row[1].rstrip("/") + "/")]
    # Of several mounts on one point the last is the one that is seen.
    return bool(below) and max(reversed(below), key=lambda row: len(row[0]))[1] in ("tmpfs", "ramfs")


@contextlib.contextmanager
def directory(path: str, dir_fd: int | None = None, shown: str | None = None) -> Iterator[int]:
    """`open_directory`, closed at the end of the block."""
    fd = open_directory(path, dir_fd, shown)
    try:
        yield fd
    finally:
        os.close(fd)
