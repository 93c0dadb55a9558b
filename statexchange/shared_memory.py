"""Arenas: memory that processes of one host share, without a name.

An arena is a memfd, sealed against resizing, that other processes open through ``/proc/<pid>/fd``. Nothing of it
outlives the processes that use it, however they end.

Failure: too little room is a StorageError when the arena is created, never a SIGBUS when it is written.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import stat
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from statexchange.cgroups import memory_left
from statexchange.errors import StorageError

if TYPE_CHECKING:
    import numpy as np

_PAGE = mmap.PAGESIZE
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)


def _map(fd: int, nbytes: int) -> mmap.mmap:
    # MAP_POPULATE: else the first copy would stop at a page fault every 4 KiB.
    return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | _POPULATE)


@dataclass(slots=True)
class Arena:
    """Shared memory that this process owns. Other processes attach by `address`, a JSON value."""

    nbytes: int
    address: dict[str, Any]
    view: memoryview
    _fd: int = field(repr=False)

    @classmethod
    def create(cls, nbytes: int) -> Arena:
        """Create an arena of at least `nbytes` (> 0) zeros.

        Raises:
            StorageError: there is too little memory, or shared memory cannot be created.
        """
        nbytes = -(-nbytes // _PAGE) * _PAGE
        try:
            fd = os.memfd_create("statexchange", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise StorageError.of(error, "create a memfd") from error
        inode = os.fstat(fd).st_ino
        address = {"id": secrets.token_hex(16), "pid": os.getpid(), "fd": fd, "inode": inode, "nbytes": nbytes}
        arena = cls(nbytes, address, memoryview(b""), fd)
        try:
            _check_room(nbytes)
            os.posix_fallocate(fd, 0, nbytes)  # allocates all pages now: a write cannot SIGBUS
            # Each process may resize what it has opened; the others would then get a SIGBUS.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            arena.view = memoryview(_map(fd, nbytes))
        except BaseException as error:
            arena.close()
            if not isinstance(error, OSError):
                raise
            raise StorageError.of(error, f"reserve {nbytes} bytes of shared memory") from error
        return arena

    @property
    def ident(self) -> str:
        """128 random bits that identify this arena."""
        return str(self.address["id"])

    def close(self) -> None:
        """Release the memory. Processes that have attached keep it as long as they have it mapped."""
        # Forgotten first: closed a second time, the number might be that of another file.
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        self.view = memoryview(b"")


def _check_room(nbytes: int) -> None:
    """Raise OSError if there is too little memory: allocating more would start the OOM killer instead of failing."""
    room, where = memory_left()
    if nbytes > room:
        raise OSError(errno.ENOMEM, f"{os.strerror(errno.ENOMEM)}, {room} bytes are left {where}")


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
            # Every view keeps the array alive that it was first made of; a mapping does not tell who refers to it.
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
    path = f"/proc/{int(address['pid'])}/fd/{int(address['fd'])}"
    try:
        # If the process has closed the memfd, or has another pid in our namespace, this link may lead anywhere: to a
        # FIFO, which O_NONBLOCK does not wait for, or to another file, which the checks below refuse.
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            is_arena = (status.st_size, status.st_ino) == (address["nbytes"], address["inode"])
            if not is_arena or not stat.S_ISREG(status.st_mode):
                raise StorageError("the memory at this path is not the arena of this address", path=path)
            return Attached(_map(fd, address["nbytes"]))
        finally:
            os.close(fd)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError.of(error, "attach shared memory", path=path) from error
