"""A directory in which rank 0 announces the key-value store that it serves, and the other ranks find it.

The directory may lie on NFS of any version, with or without locks, and the ranks may run on several hosts. Files in it;
`nonce` is 128 random bits:

    server-<nonce>.json    by rank 0: its process and network, and the addresses and port of the server that has `nonce`
    settled-<nonce>        by rank 0, a moment later; empty
    refusal-<nonce>-<nonce of the server>.json    by a rank that has tried to connect for 10 s: the reason

The other ranks look for the first file, connect, and join the store (rendezvous.py). Then rank 0 removes its files. A
refusal fails rank 0, and with it all ranks that have joined; the rank that refused raises once the server's file is
gone.

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
import errno
import os
import platform
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from statexchange import messages
from statexchange.comm import network
from statexchange.comm.tcp_store import Joining, Place, Server
from statexchange.errors import NotInitializedError, StateExchangeError, StorageError
from statexchange.processes import Owner, network_identity
from statexchange.settings import gloo_interface

__all__ = ["MeetingDirectory"]

T = TypeVar("T")
_POLL_S = 0.02
_SETTLE_S = 0.04  # four ticks of the slowest server clock seen, 100 Hz
_MANY_RANKS = 64  # with more ranks each scans less often, so that the file server's load does not grow
_REACH_S = 10.0  # of attempts to connect to a server, before a rank refuses it
_EMPTY_S = 2.0  # for the other ranks to remove their files from directories that this one has made
_ATTEMPTS = 20  # tries to open a directory, or to put a file there, that others may remove at the same moment
_REMOVED = (errno.ENOENT, errno.ESTALE)  # errors of a directory that is removed; the second one of NFS
_SERVER = re.compile(r"server-[0-9a-f]{32}\.json")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_ANY_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def _open_directory(path: Path) -> tuple[int, int]:
    """Return a descriptor of `path`, and how many directories at the end of the path were made.

    Each directory is opened below its opened parent, so that an NFS client asks the server again about names that it
    has cached as absent.
    """
    try:
        return os.open(path, _DIRECTORY), 0
    except FileNotFoundError:
        if path.parent == path:
            raise
    parent, num_made = _open_directory(path.parent)
    try:
        try:
            os.mkdir(path.name, 0o700, dir_fd=parent)
            num_made += 1
        except FileExistsError:
            # Another rank has made it meanwhile. If this call made the parent, it is a rank of this rendezvous.
            num_made += bool(num_made)
        return os.open(path.name, _DIRECTORY, dir_fd=parent), num_made
    finally:
        os.close(parent)


def _opened_again(path: Path) -> tuple[int, int]:
    """Return what `_open_directory` does; other ranks may remove directories of the path meanwhile."""
    for _ in range(_ATTEMPTS):
        try:
            return _open_directory(path)
        except OSError as error:
            if error.errno not in _REMOVED:
                raise
    return _open_directory(path)


def _names_in(directory: int) -> list[str]:
    """Return the names in an open directory; none if another rank has removed it."""
    try:
        return os.listdir(directory)
    except OSError as error:
        if error.errno in _REMOVED:
            return []
        raise


def _read(directory: int, name: str, kind: type[T]) -> T | None:
    """Return the record in a file; None if the file is gone, not complete, or holds anything else."""
    try:
        with open(os.open(name, _ANY_FILE, dir_fd=directory), "rb") as file:
            return messages.decode(file.read(), kind, name, -1)
    except (OSError, ValueError):  # a MismatchError is a ValueError
        return None


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


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The contents of the refusal of a rank that cannot connect."""

    rank: int
    why: str


class MeetingDirectory:
    """One rank's view of the directory. OSError of the directory becomes StorageError."""

    def __init__(self, path: Path, joining: Joining) -> None:
        self._path = path
        self._joining = joining
        self._nonce = secrets.token_hex(16)
        self._num_made = 0  # directories at the end of the path that this rank has made
        self._announced: dict[str, _Announcement] = {}  # by the file's name
        self._failing_since: dict[str, float] = {}  # by the server's nonce: the first attempt that failed
        self._refused: dict[str, str] = {}  # by the server's nonce: the reason of this rank
        self._settle_at = 0.0  # when the directory is to change once more; inf after that
        self._problem: NotInitializedError | None = None
        self.poll_s = _POLL_S * max(1.0, joining.world_size / _MANY_RANKS)

    # Rank 0

    def announce(self, server: Server) -> None:
        """Announce `server`; raise NotInitializedError if another rank 0 of this host does so.

        Removes what processes of this host have left that have ended.
        """
        self._nonce = server.nonce
        addresses: list[str] = []
        try:
            addresses = _addresses()
        except NotInitializedError as problem:
            self._problem = problem  # raised when all have joined, and so by all
            addresses = network.own_addresses()
        record = _Announcement(Owner.current(), network_identity(), addresses, server.port, server.nonce)
        self._put(f"server-{self._nonce}.json", messages.encoded(record, _Announcement))
        self._settle_at = time.monotonic() + _SETTLE_S
        with self._opened() as directory:
            names = _names_in(directory)
            for other in self._announcements(directory, names):
                if other.owner.is_dead:
                    _remove_files(directory, names, other.nonce)
                elif other.owner.is_visible and other.nonce != server.nonce:
                    text = f"another rank 0, process {other.owner.pid}, serves a rendezvous in {self._path}"
                    raise NotInitializedError(text, rank=0)

    def poll(self) -> None:
        """Let all clients see the announcement; raise what a rank reports that cannot connect."""
        if time.monotonic() > self._settle_at:
            self._put(f"settled-{self._nonce}")
            self._settle_at = float("inf")
        with self._opened() as directory:
            for name in _names_in(directory):
                if name.startswith("refusal-") and self._nonce in name:
                    refusal = _read(directory, name, _Refusal)
                    if refusal is not None:
                        raise NotInitializedError(refusal.why, rank=refusal.rank)

    def finish(self) -> None:
        """End the announcement, as all ranks have joined; raise why this host cannot be reached from others."""
        self.leave()
        if self._problem is not None:
            raise self._problem

    # The other ranks

    def places(self) -> list[Place]:
        """Return where servers are announced whose processes have not provably ended, the newest first.

        Raise NotInitializedError once a server that this rank has refused is not announced any more, and no other is:
        it was that of rank 0, which has given up.
        """
        with self._opened() as directory:
            records = self._announcements(directory, _names_in(directory))
        places = [record.place for record in records if not record.owner.is_dead]
        if not places:
            for why in self._refused.values():
                raise NotInitializedError(why, rank=self._joining.rank)
        return places

    def _announcements(self, directory: int, names: list[str]) -> list[_Announcement]:
        """Return what is announced, the newest first by the clock of the file server."""
        by_age: list[tuple[float, str]] = []
        for name in filter(_SERVER.fullmatch, names):
            with contextlib.suppress(FileNotFoundError):
                by_age.append((os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime, name))
            if name not in self._announced:
                record = _read(directory, name, _Announcement)
                if record is not None:
                    self._announced[name] = record
        return [self._announced[name] for _, name in sorted(by_age, reverse=True) if name in self._announced]

    def note_failure(self, place: Place, why: str) -> None:
        """Note that an attempt to connect has failed; after 10 s of them, refuse the server."""
        assert place.nonce is not None  # that of an announcement
        since = self._failing_since.setdefault(place.nonce, time.monotonic())
        if time.monotonic() - since > _REACH_S and place.nonce not in self._refused:
            self._refused[place.nonce] = why
            refusal = _Refusal(self._joining.rank, why)
            self._put(f"refusal-{self._nonce}-{place.nonce}.json", messages.encoded(refusal, _Refusal))

    # The directory

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """Yield a new descriptor of the directory, which is made if it is missing."""
        try:
            directory, num_made = _opened_again(self._path)
            try:
                self._num_made = max(self._num_made, num_made)
                yield directory
            finally:
                os.close(directory)
        except OSError as error:
            if isinstance(error, StateExchangeError):
                raise
            raise StorageError.of(error, "exchange addresses with the other ranks", path=self._path) from error

    def _put(self, name: str, content: bytes = b"") -> None:
        """Write a new file; retry if another rank removes the directory meanwhile."""
        for attempt in range(_ATTEMPTS):
            try:
                with (
                    self._opened() as directory,
                    open(os.open(name, _NEW_FILE, 0o600, dir_fd=directory), "wb") as file,
                ):
                    file.write(content)
            except StorageError as error:
                if error.errno not in _REMOVED or attempt == _ATTEMPTS - 1:
                    raise
            else:
                break

    def leave(self) -> None:
        """Remove this rank's files, and the directories that it made if they are empty. May be repeated."""
        try:
            directory = os.open(self._path, _DIRECTORY)
        except OSError:
            return  # another rank has removed it
        try:
            _remove_files(directory, _names_in(directory), self._nonce)
        finally:
            os.close(directory)
        deadline = time.monotonic() + _EMPTY_S
        for path in [self._path, *self._path.parents][: self._num_made]:
            while not _is_removed(path) and time.monotonic() < deadline:
                time.sleep(_POLL_S)


def _addresses() -> list[str]:
    """Return the addresses at which other hosts may reach this one, the likeliest first.

    That of GLOO_SOCKET_IFNAME's interface, if it is set. Else the addresses of the host's name, as Gloo uses them, and
    of all interfaces.
    """
    interface = gloo_interface()
    if interface is None:
        known = dict.fromkeys([*network.addresses_of_name(platform.node()), *network.own_addresses()])
        return sorted(known, key=network.is_loopback)
    address = network.address_of_interface(interface)
    if address is None:
        raise NotInitializedError(
            f"rank 0 on {platform.node()} cannot listen for the other ranks: GLOO_SOCKET_IFNAME={interface} names no "
            "network interface with an address"
        )
    return [address]


def _is_removed(path: Path) -> bool:
    """Remove a directory; return whether nothing is left to do. A failed rank 0 removes its files a moment later."""
    try:
        os.rmdir(path)
    except OSError as error:
        return error.errno not in (errno.ENOTEMPTY, errno.EEXIST)
    return True


def _remove_files(directory: int, names: list[str], nonce: str) -> None:
    """Remove all files that a process has written for itself or others for it."""
    for name in names:
        if nonce in name:
            with contextlib.suppress(OSError):  # another rank does the same; or it is not ours to remove
                os.unlink(name, dir_fd=directory)
