"""Arenas: memory that processes of one host share, without lasting names, recycled as fresh pages are slow.

An arena is a sealed memfd that others open through ``/proc/<pid>/fd``; where that does not work, a file in /dev/shm
under an unguessable name, unlinked as soon as everybody has attached.

A process that is killed before that leaves the name of a file, and with it the memory. So the name is

    statexchange-<128 random bits>.<boot id>.<pid namespace>.<pid>.<start time>

where all but the random bits say which process made it. `sweep` removes the files of this user whose process has
provably ended: it ran in this boot and in this pid namespace, and runs no more. What others may still use, whoever made
it, is unlinked memory that stays as long as they have it mapped. Files of other names, of another user, or of a process
that this one cannot see are left alone.
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
from typing import Any, Literal

from statexchange.cgroups import memory_headroom
from statexchange.errors import StorageError
from statexchange.processes import Owner

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
    """Memory that this process owns. `address` is a JSON value by which others attach."""

    nbytes: int
    address: dict[str, Any]
    view: memoryview
    _fd: int = field(repr=False)

    @classmethod
    def create(cls, nbytes: int, kind: Kind = "memfd") -> Arena:
        """At least `nbytes` (> 0) of zeros. Too little room is a StorageError, never a SIGBUS."""
        nbytes = -(-nbytes // _PAGE) * _PAGE
        ident = secrets.token_hex(16)
        fd, path = _open_memfd() if kind == "memfd" else _open_file(ident)
        inode = os.fstat(fd).st_ino
        address = {"id": ident, "pid": os.getpid(), "fd": fd, "inode": inode, "nbytes": nbytes, "path": path}
        arena = cls(nbytes, address, memoryview(b""), fd)
        try:
            _check_room(nbytes)
            os.posix_fallocate(fd, 0, nbytes)
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
        """128 random bits that name this arena among all."""
        return str(self.address["id"])

    def unlink(self) -> None:
        """Remove the name of a "file" arena once everybody has attached; nothing to do for a memfd."""
        if self.address["path"] is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address["path"])

    def close(self) -> None:
        """Give the memory up. Those who have attached keep it as long as they look at it."""
        self.unlink()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        self.view = memoryview(b"")


def _check_room(nbytes: int) -> None:
    """A memfd has no limit but the machine's and the cgroups': more would not fail, it would bring the OOM killer."""
    where = "on this host"
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            kibibytes = {line.split()[0]: int(line.split()[1]) for line in lines}
        room = 1024 * (kibibytes["MemAvailable:"] + kibibytes["SwapFree:"])
    except OSError:  # a sandbox without /proc
        room = os.sysconf("SC_PHYS_PAGES") * _PAGE
    limited = memory_headroom()
    if limited is not None and limited.nbytes < room:
        room, where = limited.nbytes, f"in the cgroup {limited.cgroup}"
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
    """Remove the files that killed processes of this user have left in /dev/shm. Not collective."""
    with contextlib.suppress(OSError):  # no /dev/shm, or none that can be listed
        for name in os.listdir(_SHM_DIRECTORY):
            owner = _owner_of(name)
            if owner is not None and owner.is_dead:
                _remove_own(f"{_SHM_DIRECTORY}/{name}")


def _owner_of(name: str) -> Owner | None:
    """Return the process that made the arena of this name; None if it is not the name of one."""
    ident, _, owner = name.removeprefix(_PREFIX).partition(".")
    if not name.startswith(_PREFIX) or len(ident) != _IDENT_DIGITS:
        return None
    return Owner.from_name(owner)


def _remove_own(path: str) -> None:
    with contextlib.suppress(OSError):  # another rank was quicker, or it is not ours to remove
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
        """The memory, for a short look that keeps no reference."""
        return memoryview(self._map)

    def lend(self) -> Any:
        """The memory as a numpy uint8 array; views of it are counted as references until they are gone."""
        import numpy as np

        base = self._lent() if self._lent is not None else None
        if base is None:
            base = np.frombuffer(self._map, dtype=np.uint8)
            self._lent = weakref.ref(base)
        return base

    @property
    def referenced(self) -> bool:
        """Whether anything still looks at what was lent."""
        return self._lent is not None and self._lent() is not None


def attach(address: dict[str, Any]) -> Attached:
    """Map the arena at `address`. One of a process that is gone, or hidden from us, is a StorageError."""
    path = address["path"] or f"/proc/{int(address['pid'])}/fd/{int(address['fd'])}"
    try:
        # A memfd opens through a link of /proc, which O_NOFOLLOW would refuse.
        # If that process has closed it, or is another one in our eyes, anything may lie there.
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_NOFOLLOW if address["path"] else 0))
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or (found.st_size, found.st_ino) != (
                address["nbytes"],
                address["inode"],
            ):
                raise StorageError("other shared memory lies there than was announced", path=path)
            return Attached(_map(fd, address["nbytes"]))
        finally:
            os.close(fd)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError.of(error, "attach shared memory", path=path) from error


class ArenaPool:
    """Arenas that are used again. Not for use by several threads at once."""

    def __init__(self, kind: Kind = "memfd") -> None:
        self.kind: Kind = kind
        self._free: list[Arena] = []

    def acquire(self, nbytes: int) -> Arena:
        """An arena of at least `nbytes`; its contents are left over from earlier use."""
        fitting = [arena for arena in self._free if arena.nbytes >= nbytes]
        if fitting:
            best = min(fitting, key=lambda arena: arena.nbytes)
            self._free.remove(best)
            return best
        self.close()  # what is free is too small: it would only hold memory that is needed now
        return Arena.create(max(nbytes, _PAGE), self.kind)

    def idents(self) -> list[str]:
        """Identities of the arenas that wait to be used again."""
        return [arena.ident for arena in self._free]

    def release(self, arena: Arena) -> None:
        """Take back an arena that nobody looks at any more; one whose name is gone cannot be shared again."""
        if self.kind == "file":
            arena.close()
        else:
            self._free.append(arena)

    def close(self) -> None:
        """Give up what is free."""
        while self._free:
            self._free.pop().close()
