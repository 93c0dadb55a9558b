"""A directory in which rank 0 announces the key-value store that it serves, and the other ranks find it.

The directory may lie on NFS of any version, with or without locks, and the ranks may run on several hosts. It is made
if it is missing, and stays. Files in it; `nonce` is 128 random bits:

    server-<nonce>.json    by rank 0: its process and network, and the addresses and port of the server that has `nonce`
    settled-<nonce>        by rank 0, a moment later; empty

The other ranks look for the first file, connect, and join the store (rendezvous.py). Then rank 0 removes its files.

Invariants, and why:

* A name is written by one process, once, and never replaced: after a replacement an NFS 4.1 client would go on showing
  the earlier content. A file that is not yet complete is not valid JSON; its reader reads it again.
* Every scan opens the directory with O_DIRECTORY and lists it: a lookup of one name, or of the directory by its whole
  path, may be answered from the client's cache for 30 s. An absent directory is made below the deepest parent that can
  be opened, by any rank, since only an attempt to make it asks the server whether it is there by now.
* On NFS 3 two changes within one tick of the server's clock look like one to a client: if it lists the directory
  between them, it does not see the second. So the directory changes once more, by `settled`, at least 30 ms later.
* A file of a crashed run does no harm. A process of this host is looked up by pid and start time, and its files are
  removed if it has ended. At the addresses of another one nothing answers with that nonce.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from statexchange import messages
from statexchange.comm import network
from statexchange.comm.tcp_store import Place, Server
from statexchange.errors import NotInitializedError, StateExchangeError, StorageError
from statexchange.processes import Owner, network_identity

_SETTLE_S = 0.04  # four ticks of the slowest server clock seen, 100 Hz
_SERVER = re.compile(r"server-[0-9a-f]{32}\.json")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_ANY_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a pipe must not block


@dataclass(frozen=True, slots=True)
class _Announcement:
    """The contents of a server's file."""

    owner: Owner
    network: str | None
    addresses: list[str]
    port: int
    nonce: str

    @property
    def place(self) -> Place:
        """The place at which this process can reach the server: by loopback in the same network namespace."""
        is_local = self.network is not None and self.network == network_identity()
        return Place(["localhost"] if is_local else self.addresses, self.port, self.nonce, self.owner.host)


@contextlib.contextmanager
def announced(path: Path, server: Server) -> Iterator[None]:
    """Announce `server` during a block; raise NotInitializedError if another rank 0 of this host does so.

    Removes what processes of this host have left that have ended.
    """
    record = _Announcement(Owner.current(), network_identity(), network.addresses(), server.port, server.nonce)
    try:
        _put(path, f"server-{server.nonce}.json", messages.encoded(record, _Announcement))
        time.sleep(_SETTLE_S)
        _put(path, f"settled-{server.nonce}")
        # After its own announcement: of two ranks 0 that begin at once, at least one sees the other.
        with _opened(path) as directory:
            for announcement in _announcements(directory):
                owner = announcement.owner
                if owner.is_dead:
                    _remove_files(directory, announcement.nonce)
                elif owner.is_visible and announcement.nonce != server.nonce:
                    text = f"another rank 0, process {owner.pid}, serves a rendezvous in {path}"
                    raise NotInitializedError(text, rank=0)
        yield
    finally:
        # A file that stays does no harm, see the top of this file: this must not hide how the rendezvous ended.
        with contextlib.suppress(StorageError), _opened(path) as directory:
            _remove_files(directory, server.nonce)


def places_in(path: Path) -> list[Place]:
    """Return where servers are announced whose processes have not provably ended, the newest first."""
    with _opened(path) as directory:
        return [announcement.place for announcement in _announcements(directory) if not announcement.owner.is_dead]


def _announcements(directory: int) -> list[_Announcement]:
    """Return what is announced, the newest first by the clock of the file server."""
    by_age: list[tuple[float, str]] = []
    for name in filter(_SERVER.fullmatch, os.listdir(directory)):
        with contextlib.suppress(FileNotFoundError):  # its rank has removed it since the listing
            by_age.append((os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime, name))
    announcements = [_read(directory, name) for _, name in sorted(by_age, reverse=True)]
    return [announcement for announcement in announcements if announcement is not None]


def _read(directory: int, name: str) -> _Announcement | None:
    """Return the record in a file; None if the file is gone, not complete, or holds anything else."""
    try:
        with open(os.open(name, _ANY_FILE, dir_fd=directory), "rb") as file:
            return messages.decode(file.read(), _Announcement, name, -1)
    except (OSError, ValueError):  # a MismatchError is a ValueError
        return None


def _put(path: Path, name: str, content: bytes = b"") -> None:
    """Write a new file."""
    # Not under another name first: a reader takes a file that is not complete for none, and reads it again.
    with _opened(path) as directory, open(os.open(name, _NEW_FILE, 0o600, dir_fd=directory), "wb") as file:
        file.write(content)


def _remove_files(directory: int, nonce: str) -> None:
    """Remove all files that a process has written."""
    for name in os.listdir(directory):
        if nonce in name:
            with contextlib.suppress(OSError):  # another rank does the same; or it is not ours to remove
                os.unlink(name, dir_fd=directory)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Yield a new descriptor of the directory, which is made if it is missing. OSError becomes StorageError."""
    try:
        directory = _open_directory(path)
        try:
            yield directory
        finally:
            os.close(directory)
    except StateExchangeError:
        raise
    except OSError as error:
        raise StorageError.of(error, "exchange addresses with the other ranks", path=path) from error


def _open_directory(path: Path) -> int:
    """Return a descriptor of `path`, which is made if it is missing.

    It is then opened below its opened parent, so that an NFS client asks the server again about names that it has
    cached as absent.
    """
    with contextlib.suppress(FileNotFoundError):
        return os.open(path, _DIRECTORY)
    parent = _open_directory(path.parent)
    try:
        with contextlib.suppress(FileExistsError):  # another rank has made it meanwhile
            os.mkdir(path.name, 0o700, dir_fd=parent)
        return os.open(path.name, _DIRECTORY, dir_fd=parent)
    finally:
        os.close(parent)
