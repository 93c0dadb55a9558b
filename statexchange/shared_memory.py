"""Arenas: memory that processes of one host share. It has no lasting name and is recycled.

An arena is a memfd, sealed against resizing, that other processes open through ``/proc/<pid>/fd``. Where that does
not work (other pid namespaces, a restricted /proc), it is a file in /dev/shm under an unguessable name, which is
unlinked as soon as all have attached. Either way nothing outlives the processes that use it. Arenas are recycled
because fresh pages are several times slower than pages that are mapped already.

States of a "file" arena: created, with a name -> attached by all -> unlinked, without one. A process that is killed in
the first state leaves the name and with it the memory. So the name is

    statexchange-<128 random bits>.<boot id>.<pid namespace>.<pid>.<start time>

where all but the random bits identify the process that created it. `sweep` removes the files of this user whose process
has provably ended: it ran in this boot and this pid namespace, and no process of its pid and start time runs. Removing
a name takes no memory from a process that has attached. Files of other names, of other users, or of processes that this
one cannot see are left alone.

Failure: too little room is a StorageError when the arena is created, never a SIGBUS when it is written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import stat
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from statexchange.cgroups import memory_left
from statexchange.errors import StorageError
from statexchange.processes import Owner

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Arena", "ArenaPool", "Attached", "Kind", "attach", "sweep"]

Kind = Literal["memfd", "file"]

_PAGE = mmap.PAGESIZE
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)
_PREFIX = "statexchange-"
_IDENT_DIGITS = 32
_SHM_DIRECTORY = "/dev/shm"  # noqa: S108 (O_EXCL, 0600, 128 random bits, unlinked at once)


def _map(fd: int, nbytes: int) -> mmap.mmap:
    return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | _POPULATE)


@dataclass(slots=True)
class Arena:
    """Shared memory that this process owns. Other processes attach by `address`, a JSON value."""

    nbytes: int
    address: dict[str, Any]
    view: memoryview
    _fd: int = field(repr=False)

    @classmethod
    def create(cls, nbytes: int, kind: Kind = "memfd") -> Arena:
        """Create an arena of at least `nbytes` (> 0) zeros.

        Raises:
            StorageError: there is too little memory, or shared memory cannot be created.
        """
        nbytes = -(-nbytes // _PAGE) * _PAGE
        ident = secrets.token_hex(16)
        fd, path = _open_memfd() if kind == "memfd" else _open_file(ident)
        inode = os.fstat(fd).st_ino
        address = {"id": ident, "pid": os.getpid(), "fd": fd, "inode": inode, "nbytes": nbytes, "path": path}
        arena = cls(nbytes, address, memoryview(b""), fd)
        try:
            _check_room(nbytes)
            os.posix_fallocate(fd, 0, nbytes)  # allocates all pages now: a write cannot SIGBUS
            if kind == "memfd":
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            arena.view = memoryview(_map(fd, nbytes))
        except BaseException as error:
            arena.close()
            if not isinstance(error, OSError):
                raise
            hint = "" if path is None else " (in a container: --shm-size)"
            raise StorageError.of(error, f"reserve {nbytes} bytes of shared memory{hint}", path=path) from error
        return arena

    @property
    def ident(self) -> str:
        """128 random bits that identify this arena."""
        return str(self.address["id"])

    def unlink(self) -> None:
        """Remove the name of a "file" arena, once all have attached; a memfd has none."""
        if self.address["path"] is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address["path"])

    def close(self) -> None:
        """Release the memory. Processes that have attached keep it as long as they have it mapped."""
        self.unlink()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        self.view = memoryview(b"")


def _check_room(nbytes: int) -> None:
    """Raise OSError if there is too little memory: allocating more would start the OOM killer instead of failing."""
    room, where = memory_left()
    if nbytes > room:
        raise OSError(errno.ENOMEM, f"{os.strerror(errno.ENOMEM)}, {room} bytes are left {where}")


def _open_memfd() -> tuple[int, None]:
    try:
        return os.memfd_create("statexchange", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), None
    except OSError as error:
        raise StorageError.of(error, "create a memfd") from error


def _open_file(ident: str) -> tuple[int, str]:
    path = f"{_SHM_DIRECTORY}/{_PREFIX}{ident}.{Owner.current().to_name()}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600), path
    except OSError as error:
        raise StorageError.of(error, "create shared memory", path=path) from error


def sweep() -> None:
    """Remove the files that killed processes of this user left in /dev/shm. Not collective."""
    with contextlib.suppress(OSError):  # no /dev/shm, or none that can be listed
        for name in os.listdir(_SHM_DIRECTORY):
            owner = _owner_of(name)
            if owner is not None and owner.is_dead:
                _remove_own(f"{_SHM_DIRECTORY}/{name}")


def _owner_of(name: str) -> Owner | None:
    """Return the process that created the arena of this name; None if it is no arena's name."""
    ident, _, owner = name.removeprefix(_PREFIX).partition(".")
    if not name.startswith(_PREFIX) or len(ident) != _IDENT_DIGITS:
        return None
    return Owner.from_name(owner)


def _remove_own(path: str) -> None:
    with contextlib.suppress(OSError):  # another rank removed it first, or this process may not
        found = os.lstat(path)
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
            os.unlink(path)


class Attached:
    """Another process's arena, mapped here."""

    def __init__(self, map_: mmap.mmap) -> None:
        self._map = map_
        self._lent: weakref.ref[Any] | None = None

    @property
    def view(self) -> memoryview:
        """The memory, for access that keeps no reference."""
        return memoryview(self._map)

    def lend(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the memory as a numpy uint8 array; while a view of it lives, the arena is `referenced`."""
        import numpy as np

        base = self._lent() if self._lent is not None else None
        if base is None:
            base = np.frombuffer(self._map, dtype=np.uint8)
            self._lent = weakref.ref(base)
        return base

    @property
    def referenced(self) -> bool:
        """Whether an array that was lent, or a view of it, is still alive."""
        return self._lent is not None and self._lent() is not None


def attach(address: dict[str, Any]) -> Attached:
    """Map the arena at `address`.

    Raises:
        StorageError: its process has ended or cannot be seen, or the path leads to other memory.
    """
    path = address["path"] or f"/proc/{int(address['pid'])}/fd/{int(address['fd'])}"
    try:
        # A memfd is opened through a link in /proc, which O_NOFOLLOW would refuse. If the process has closed it, or has
        # another pid in our namespace, the link may lead anywhere: to a FIFO, which O_NONBLOCK does not wait for, or to
        # another file, which the checks below refuse.
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_NOFOLLOW if address["path"] else 0))
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or (found.st_size, found.st_ino) != (
                address["nbytes"],
                address["inode"],
            ):
                raise StorageError("the memory at this path is not the arena of this address", path=path)
            return Attached(_map(fd, address["nbytes"]))
        finally:
            os.close(fd)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError.of(error, "attach shared memory", path=path) from error


class ArenaPool:
    """Arenas to be used again. Not for use by several threads at once."""

    def __init__(self, kind: Kind = "memfd") -> None:
        self.kind: Kind = kind
        self._free: list[Arena] = []

    def acquire(self, nbytes: int) -> Arena:
        """Return an arena of at least `nbytes`; it may have the contents of an earlier use."""
        fitting = [arena for arena in self._free if arena.nbytes >= nbytes]
        if fitting:
            best = min(fitting, key=lambda arena: arena.nbytes)
            self._free.remove(best)
            return best
        self.close()  # all free arenas are too small, and hold memory that may be needed for the new one
        return Arena.create(max(nbytes, _PAGE), self.kind)

    def idents(self) -> list[str]:
        """Return the identities of the free arenas."""
        return [arena.ident for arena in self._free]

    def release(self, arena: Arena) -> None:
        """Take back an arena that no process uses; a "file" arena is closed: without a name it cannot be shared."""
        if self.kind == "file":
            arena.close()
        else:
            self._free.append(arena)

    def close(self) -> None:
        """Release the free arenas."""
        while self._free:
            self._free.pop().close()
