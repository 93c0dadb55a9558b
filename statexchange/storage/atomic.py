"""Create files and rename directories so that a name appears only when its content is complete.

A name appears only when its bytes are whole and durable. A file is built under a temporary name in its directory,
synced, linked to its name and then loses the temporary one: `link` refuses a name that is taken, on NFS too, where a
rename would replace it. A directory is renamed, which refuses a name that is taken unless an empty directory has it.

Replacing a directory where two names can be exchanged is one step. Elsewhere (NFS) it is two: the old one is moved
aside to ``.<name>.<nonce>.replaced``, then the new one, ``.<name>.<plan>.<nonce>.partial``, gets the name. Between the
two the name is absent. Since the old one is moved aside only when the new one is whole, whoever finds the name absent
and the old one aside reads the new one under its hidden name (`local.replacement_of`), and a publisher completes the
second step.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable

from statexchange.errors import StorageError, TargetExistsError
from statexchange.processes import Owner
from statexchange.storage.files import (
    UNSUPPORTED,
    Buffer,
    audit,
    check_room,
    close_file,
    create_file,
    libc,
    pwrite_all,
    reserve,
    stat_of,
    sync_directory,
    sync_file,
)
from statexchange.storage.mounts import mount_of

__all__ = [
    "exchange_names",
    "identity_of",
    "is_abandoned",
    "is_temporary",
    "invalidate_lookups",
    "new_nonce",
    "rename_new",
    "invalidate_listings",
    "write_new",
]

_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{16}(?:\.(.+))?")
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_CLOCK_TICK_S = 0.03  # more than a tick of any server's clock (4 or 10 ms)
# File systems without hard links answer one of these.
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK)


def new_nonce() -> str:
    """Return 64 random bits as 16 hex digits."""
    return secrets.token_hex(8)


def is_temporary(name: str) -> bool:
    """Whether a name is that of a temporary file."""
    return _TEMPORARY.fullmatch(name) is not None


def is_abandoned(name: str) -> bool:
    """Whether a name is that of a temporary file whose writer has provably ended."""
    match = _TEMPORARY.fullmatch(name)
    owner = Owner.from_name(match[1]) if match is not None and match[1] else None
    return owner is not None and owner.is_dead


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
    header: Callable[[], Buffer] | None = None,
) -> None:
    """Write a new file `name` in a directory: the name appears only when all `nbytes` are there and durable.

    `header` returns the first `begin` bytes when all parts are written. `path` is the full name for messages. A name
    that exists is a TargetExistsError; a failed write leaves nothing.
    """
    temporary = f".tmp-{new_nonce()}.{Owner.current().to_name()}"
    fd = create_file(temporary, dir_fd, path, mode)
    try:
        try:
            _fill(fd, parts, begin, nbytes, path)
            if header is not None:
                pwrite_all(fd, header(), 0, path)
            if durable:
                sync_file(fd, path)
        except BaseException:
            with contextlib.suppress(OSError):  # the first failure counts
                os.close(fd)
            raise
        close_file(fd, path)
        _link(temporary, name, dir_fd, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first failure counts
            os.unlink(temporary, dir_fd=dir_fd)
        raise
    try:
        if durable:
            sync_directory(dir_fd, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=dir_fd)
        raise


def _fill(fd: int, parts: Iterable[Buffer], begin: int, nbytes: int, path: str) -> None:
    if mount_of(path).is_memory:  # to reserve room there would be to write it
        check_room(fd, nbytes, path)
    else:
        reserve(fd, nbytes, path)
    offset = begin
    for part in parts:
        pwrite_all(fd, part, offset, path)
        offset += memoryview(part).nbytes
    assert offset == nbytes, (offset, nbytes)


def _link(temporary: str, name: str, dir_fd: int, path: str) -> None:
    """Give a whole file its name, which must be free (TargetExistsError), and take the temporary one away."""
    audit("link", path)
    try:
        os.link(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)
    except OSError as error:
        if error.errno in _NO_LINKS:
            rename_new(temporary, name, dir_fd=dir_fd, path=path)
            return
        # A link that was retransmitted to an NFS server may report failure although it was made.
        ours = identity_of(temporary, dir_fd, path)
        if ours is None or identity_of(name, dir_fd, path) != ours:
            if error.errno == errno.EEXIST:
                raise TargetExistsError("a file of this name exists", path=path) from None
            raise StorageError.of(error, "link into place", path=path) from error
    audit("unlink", path)
    with contextlib.suppress(OSError):  # the file is whole under its name; syncing the directory reports a broken disk
        os.unlink(temporary, dir_fd=dir_fd)


def identity_of(name: str, dir_fd: int, path: str) -> tuple[int, int] | None:
    """Return what tells a file or directory from all others of its host; None if there is none of this name."""
    found = stat_of(name, dir_fd, path)
    return None if found is None else (found.st_dev, found.st_ino)


def rename_new(source: str, target: str, *, dir_fd: int, path: str) -> None:
    """Rename to a name that must not exist (TargetExistsError) in one directory, atomically where the system can.

    For a directory plain rename is exclusive as well: a target that is not empty is refused. `path` is the full name of
    the target for messages.
    """
    audit("rename", path)
    ours = identity_of(source, dir_fd, path)
    code = _renameat2(source, target, _RENAME_NOREPLACE, dir_fd)
    if code in UNSUPPORTED:
        code = errno.EEXIST if identity_of(target, dir_fd, path) else _rename(source, target, dir_fd)
    # A rename that was retransmitted to an NFS server may report failure although it was done.
    if code and ours is not None and identity_of(target, dir_fd, path) == ours:
        return
    if code in (errno.EEXIST, errno.ENOTEMPTY):
        raise TargetExistsError("this name exists already", path=path)
    if code:
        raise StorageError(f"cannot rename into place: {os.strerror(code)}", errno=code, path=path)


def _rename(source: str, target: str, dir_fd: int) -> int:
    try:
        os.rename(source, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _renameat2(source: str, target: str, flags: int, dir_fd: int) -> int:
    """Return the system call's errno, or 0."""
    call = libc("renameat2")
    if call is None:
        return errno.ENOSYS
    failed = call(dir_fd, os.fsencode(source), dir_fd, os.fsencode(target), ctypes.c_uint(flags))
    return ctypes.get_errno() if failed else 0


def exchange_names(one: str, other: str, *, dir_fd: int, path: str) -> bool:
    """Exchange two names of one directory atomically; False where the file system cannot."""
    audit("exchange", path)
    code = _renameat2(one, other, _RENAME_EXCHANGE, dir_fd)
    if code and code not in UNSUPPORTED:
        raise StorageError(f"cannot exchange with {one}: {os.strerror(code)}", errno=code, path=path)
    return not code


def invalidate_lookups(dir_fd: int, path: str) -> None:
    """Make this host look names up anew in a directory that it has just changed (NFS).

    A client renames on the server by name, but in its cache it moves the entry that it knew: if another host had given
    the name to another directory meanwhile, the new name shows the wrong one until the client sees that the parent has
    changed again. So its modification time is set. Where that is not allowed nothing is done.
    """
    if mount_of(path).is_network:
        audit("touch", path)
        with contextlib.suppress(OSError):
            os.utime(dir_fd)


def invalidate_listings(*dir_fds: int, path: str) -> None:
    """Change directories once more after a change that others wait for, where their listings may be cached (NFS).

    A client of NFS 3 keeps a listing while the directory's modification time is the same, and two changes within one
    tick of the server's clock have the same time: whoever listed between the two would not see the second. So the
    modification time is set to the server's present time, at least one tick later. Unlike a name that is made and
    removed, that leaves nothing behind if this process is killed. `path` says on which file system the directories lie.
    """
    if not mount_of(path).is_network:
        return
    time.sleep(_CLOCK_TICK_S)
    for dir_fd in dir_fds:
        audit("touch", path)
        try:
            os.utime(dir_fd)
        except OSError as error:
            raise StorageError.of(error, "set the modification time of the directory", path=path) from error
