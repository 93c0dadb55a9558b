"""Create files and rename directories so that a name appears only when its content is complete and durable.

**New file** (`new_file`). The writer:

1. creates ``.tmp-<nonce>.<owner>`` in the target directory,
2. writes it (the header last) and syncs it,
3. links it to its name. `link` fails if the name exists, on NFS too, where a rename would replace the other file,
4. unlinks the temporary name and syncs the directory.

A failure in steps 1 to 3 removes the temporary file; a killed writer leaves it. Its name has the owner, so that others
can remove it once the owner is dead (`is_abandoned`). If the sync in step 4 fails, the name is removed again.
With `overwrite` step 3 is a rename, which replaces a file of this name in one step, and the name always stays.

**New directory** (`rename_entry`). The directory is built under a hidden name and renamed. A rename onto a directory
that is not empty fails, so this is exclusive too.

**Replaced directory.** Where the file system can exchange two names (`exchange_names`), this is one step. Elsewhere, as
on NFS, it takes two: the old directory is renamed to ``.<name>.<nonce>.replaced``, then the new one,
``.<name>.<plan>.<nonce>.partial``, gets the name. Between the two steps the name is absent. The old directory is moved
only when the new one is complete. Therefore a reader that finds the name absent and a ``.replaced`` directory reads the
new one under its hidden name (`store.replacement_of`), and the next publisher completes the second step.

**NFS.** A request that is retransmitted may be answered with an error although the first one succeeded. So after each
failed link or rename the inode under the new name is compared before the failure counts. Clients also cache lookups and
listings; `invalidate_lookups` and `invalidate_listings` explain the remedies.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

from statexchange.errors import StorageError, TargetExistsError
from statexchange.processes import Owner
from statexchange.storage.files import (
    UNSUPPORTED,
    Buffer,
    audit,
    closing,
    create_file,
    libc,
    make_room,
    mount_of,
    pwrite_all,
    remove_file,
    stat_identity,
    stat_of,
    sync_directory,
    sync_file,
)

_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{16}(?:\.(.+))?")
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2  # flags of renameat2(2)
_JOINED_BYTES = 32 << 10  # of smaller parts, which are written together: a copy takes less than a write
_CLOCK_TICK_S = 0.03  # longer than the tick of any server's clock (4 or 10 ms)
# Errors of link(2) and symlink(2) on file systems without such links.
NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK)


def new_nonce() -> str:
    """Return 64 random bits as 16 hex digits."""
    return os.urandom(8).hex()


def is_temporary(name: str) -> bool:
    """Whether `new_file` gives temporary files such a name."""
    return _TEMPORARY.fullmatch(name) is not None


def is_abandoned(name: str) -> bool:
    """Whether this is the name of a temporary file whose writer has provably ended."""
    match = _TEMPORARY.fullmatch(name)
    # Those of earlier versions have no owner, so that nothing proves that they are abandoned.
    if match is None or not match[1]:
        return False
    owner = Owner.from_name(match[1])
    return owner is not None and owner.is_dead


def remove_abandoned(dir_fd: int) -> None:
    """Remove the temporary files in a directory whose writers have provably ended."""
    for name in os.listdir(dir_fd):
        if is_abandoned(name):
            with contextlib.suppress(OSError):  # it does no harm
                os.unlink(name, dir_fd=dir_fd)


def write_new(
    dir_fd: int,
    name: str,
    data: Buffer,
    *,
    path: str,
    mode: int = 0o600,
    overwrite: bool = False,
) -> None:
    """Write `data` as a new file, as `new_file` does with the same arguments."""
    nbytes = memoryview(data).nbytes
    with new_file(dir_fd, name, nbytes, path=path, mode=mode, overwrite=overwrite) as file:
        file.write(data)


@contextlib.contextmanager
def new_file(
    dir_fd: int,
    name: str,
    nbytes: int,
    *,
    path: str,
    mode: int = 0o600,
    overwrite: bool = False,
) -> Iterator[io.BufferedIOBase]:
    """Yield a new file to be written, whose name appears after the block: when all `nbytes` are written and durable.

    Args:
        dir_fd: descriptor of the directory.
        name: the file's name, which must not exist unless `overwrite`.
        nbytes: size of the whole file.
        path: full path for messages.
        mode: permissions of the file.
        overwrite: replace a file of this name, which keeps its content until the new one is complete.

    Raises:
        TargetExistsError: the name exists, and `overwrite` is False.
        StorageError: the write failed; nothing is left of it.
    """
    temporary = f".tmp-{new_nonce()}.{Owner.current().to_name()}"
    fd = create_file(temporary, dir_fd, path, mode)
    try:
        # Closed before the link: the close may report a full quota or a lost server.
        with closing(fd, path):
            # Reserved first: a full disk is then an error before any write.
            make_room(fd, nbytes, path)
            # Closed after an error, too: the buffer may not be written once the descriptor's number is another file's.
            with _Unbuffered(fd, path) as unbuffered:
                file = io.BufferedWriter(unbuffered, _JOINED_BYTES)
                yield file
                file.flush()
            sync_file(fd, path)
        if overwrite:
            rename_entry(temporary, name, dir_fd=dir_fd, path=path, overwrite=True)
        else:
            _link(temporary, name, dir_fd, path)
    except BaseException:
        with contextlib.suppress(OSError):  # report the first failure
            os.unlink(temporary, dir_fd=dir_fd)
        raise
    try:
        sync_directory(dir_fd, path)
    except BaseException:
        # The name may not survive a power cut, so it must not stay. One that replaced another file does, as the old
        # content is gone.
        if not overwrite:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=dir_fd)
        raise


class _Unbuffered(io.FileIO):
    """A file under construction, of which `pwrite_all` writes all, and reports what fails."""

    def __init__(self, fd: int, path: str) -> None:
        super().__init__(fd, "wb", closefd=False)
        self._path = path

    def write(self, data: Any) -> int:
        begin, nbytes = self.tell(), len(data)
        pwrite_all(self.fileno(), data, begin, self._path)
        self.seek(begin + nbytes)
        return nbytes


def _link(temporary: str, name: str, dir_fd: int, path: str) -> None:
    """Link a complete file to its name and unlink the temporary one; raise TargetExistsError if the name exists."""
    audit("link", path)
    try:
        os.link(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)
    except OSError as error:
        if error.errno in NO_LINKS:
            # Exclusive, too, but on a file system that lacks renameat2 as well only as far as the look before it goes.
            rename_entry(temporary, name, dir_fd=dir_fd, path=path)
            return
        # A retransmitted NFS request may report failure although the link was made.
        identity = identity_of(temporary, dir_fd, path)
        if identity is None or identity_of(name, dir_fd, path) != identity:
            if error.errno == errno.EEXIST:
                raise TargetExistsError("a file of this name exists", path=path) from None
            raise StorageError.of(error, "link into place", path=path) from error
    audit("unlink", path)
    with contextlib.suppress(OSError):  # the file has its name; the sync of the directory reports a broken disk
        os.unlink(temporary, dir_fd=dir_fd)


def link_same(source: str, identity: Sequence[object], name: str, dir_fd: int, path: str) -> bool:
    """Give a file a second name in another directory.

    Returns False if no link can be made, or if another file is at `source` by now.

    Args:
        source: the file's path.
        identity: its device, inode, size and modification time.
        name: the new name.
        dir_fd: the directory of the new name.
        path: the new path, for messages.

    Raises:
        TargetExistsError: another file has the name.
        StorageError: the operating system refused the link for another reason.
    """
    code = 0
    try:
        audit("link", path)
        os.link(source, name, dst_dir_fd=dir_fd, follow_symlinks=False)
    except OSError as error:
        code = error.errno or errno.EIO
        # The source was removed, or lies on another file system; or this one makes no links, or no more of this file.
        if code in (*NO_LINKS, errno.EXDEV, errno.ENOENT):
            return False
        # A retransmitted NFS request may report failure although the link was made.
        if code != errno.EEXIST:
            raise StorageError.of(error, "link", path=source) from error
    linked = stat_of(name, dir_fd, path)
    # After the link: before it, another file could get the name of the one that was looked at.
    if linked is not None and stat_identity(linked) == tuple(identity):
        return True
    if code:
        raise TargetExistsError("a file of this name exists", path=path)
    remove_file(name, path, dir_fd)
    return False


def identity_of(name: str, dir_fd: int, path: str) -> tuple[int, int] | None:
    """Return (device, inode) of a file or directory; None if the name does not exist."""
    attributes = stat_of(name, dir_fd, path)
    return None if attributes is None else (attributes.st_dev, attributes.st_ino)


def rename_entry(source: str, target: str, *, dir_fd: int, path: str, overwrite: bool = False) -> None:
    """Rename within one directory to a name that must not exist, unless with `overwrite`.

    Uses renameat2(RENAME_NOREPLACE), else a lookup and a plain rename, which for a directory is exclusive as well: it
    fails if the target is not empty.

    Args:
        source: the present name.
        target: the new name.
        dir_fd: descriptor of the directory.
        path: full path of the target, for messages.
        overwrite: replace a file that has the name.

    Raises:
        TargetExistsError: the new name exists.
        StorageError: the rename failed.
    """
    audit("rename", path)
    identity = identity_of(source, dir_fd, path)  # before: afterwards the source has no name
    if overwrite:
        code = _rename(source, target, dir_fd)
    else:
        code = _renameat2(source, target, _RENAME_NOREPLACE, dir_fd)
        if code in UNSUPPORTED:
            # rename(2) replaces an empty directory, or a file, without an error: so look first.
            exists = identity_of(target, dir_fd, path) is not None
            code = errno.EEXIST if exists else _rename(source, target, dir_fd)
    # A retransmitted NFS request may report failure although the rename was done.
    if code and identity is not None and identity_of(target, dir_fd, path) == identity:
        return
    if code in (errno.EEXIST, errno.ENOTEMPTY):
        raise TargetExistsError("this name exists already", path=path)
    if code:
        raise StorageError(f"cannot rename into place: {os.strerror(code)}", errno=code, path=path)


def _rename(source: str, target: str, dir_fd: int) -> int:
    """Call rename(2) and return its errno, or 0."""
    try:
        os.rename(source, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _renameat2(source: str, target: str, flags: int, dir_fd: int) -> int:
    """Call renameat2(2) and return its errno, or 0; ENOSYS if this system lacks it."""
    import ctypes

    call = libc("renameat2")
    if call is None:
        return errno.ENOSYS
    # The C library sets errno, which ctypes keeps for this thread; the call itself returns -1.
    failed = call(dir_fd, os.fsencode(source), dir_fd, os.fsencode(target), ctypes.c_uint(flags))
    return ctypes.get_errno() if failed else 0


def exchange_names(name: str, other: str, *, dir_fd: int, path: str) -> bool:
    """Exchange two names in one directory atomically; return False if the file system cannot."""
    audit("exchange", path)
    code = _renameat2(name, other, _RENAME_EXCHANGE, dir_fd)
    if code and code not in UNSUPPORTED:
        raise StorageError(f"cannot exchange with {name}: {os.strerror(code)}", errno=code, path=path)
    return not code


def invalidate_lookups(dir_fd: int, path: str) -> None:
    """Make this host's NFS client drop its cached lookups in a directory that it has just changed.

    A client renames by name on the server, but moves its own cached entry. If another host has given the old name to
    another directory meanwhile, the new name shows the wrong directory until the client notices another change of the
    parent. Setting the parent's modification time is such a change. Without permission for that nothing is done.
    """
    if mount_of(path).is_network:
        audit("touch", path)
        with contextlib.suppress(OSError):
            os.utime(dir_fd)


def invalidate_listings(*dir_fds: int, path: str) -> None:
    """Make other hosts' NFS clients drop cached listings of directories that have just been changed.

    An NFS 3 client keeps a listing while the directory's modification time is the same. Two changes within one tick of
    the server's clock have the same time, so a client that listed between the two would not see the second. Therefore
    the modification time is set to the server's present time, at least one tick later. Unlike making and removing a
    file, that leaves nothing behind if this process is killed. `path` is a path on the same file system.
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
