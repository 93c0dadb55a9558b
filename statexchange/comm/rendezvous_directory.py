"""A rendezvous in a directory that all ranks see.

The ranks exchange one thing there: the address of the key-value store that rank 0 serves over TCP (tcp_store.py). The
directory may lie on NFS of any version, with or without locks, and the ranks may run on several hosts.

Files in the directory; `nonce` is 128 random bits of one process and one rendezvous:

    hello-<rank>-<nonce>.json   by each rank, first: its process, network, world_size, and how many directories it made
    beat-<nonce>-<count>        by each rank, every quarter of a second while it waits; empty; it then removes the
                                one before
    answer-<nonce>.json         by rank 0, when a hello of a live process of every rank exists: the nonces of all ranks,
                                by rank, and the address and port of the store, or the reason why there is none
    refusal-<nonce>.json        by a rank that cannot connect to that address: the reason

States. A rank *waits* from its hello to the answer that holds its own nonce, then *connects*, removes its files, and
*joins* the store. Rank 0 waits for hellos, serves and answers, waits until all have joined, removes its files and the
directory, and sets the key `complete`. The others return when they see that key.

Invariants, and why:

* A name is written by one process, once, and never replaced: after a replacement an NFS 4.1 client would go on showing
  the earlier content. So a rank shows that it lives by beats, each under a new name.
* A file is written under its final name. A file that is not yet complete is not valid JSON; its reader reads it again.
* Every scan opens the directory with O_DIRECTORY and lists it: a lookup of one name, or of the directory by its whole
  path, may be answered from the client's cache for 30 s. An absent directory is made below the deepest parent that can
  be opened.
* After a hello or an answer the directory changes once more, by a beat, at least 30 ms later. On NFS 3 two changes
  within one tick of the server's clock look like one to a client: if it lists the directory between them, it does not
  see the second.
* A hello counts only if its process runs. A process of this host is looked up by pid and start time. A process of
  another host must show two new beats, since the first may be an old one that the cache has hidden until then. A
  process of a crashed run fulfils neither, and no answer of a crashed run holds a nonce of this one. Clocks of
  different hosts are not compared.

Failure. A rank whose rendezvous fails, for whatever reason, removes its own files, and the directories that this
rendezvous made, once they are empty. The error of a wait that runs out names the ranks that were never seen alive.
Between the answer and `complete`, a refusal, or a rank that does not join, fails rank 0, and all ranks that have joined
raise its error. Files of a killed process are removed by the next rendezvous in that directory that can see that the
process has ended.
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
from typing import Any, TypeVar

from statexchange import messages
from statexchange.comm import network, tcp_store
from statexchange.comm.tcp_store import Joining, LostServerError, Server, SharedStore
from statexchange.errors import (
    InvalidArgumentError,
    NotInitializedError,
    PeerError,
    StateExchangeError,
    StorageError,
)
from statexchange.processes import Owner, network_identity
from statexchange.settings import gloo_interface

__all__ = ["DirectoryRendezvous"]

T = TypeVar("T")
_POLL_S = 0.02
_BEAT_S = 0.25
_SETTLE_S = 0.04  # four ticks of the slowest server clock seen, 100 Hz
_MANY_RANKS = 64  # with more ranks each scans and beats less often, so that the file server's load does not grow
_CONNECT_S = 10.0
_LINGER_S = 5.0  # for the other ranks to read why this one gives up
_NOTICE_S = 1.0  # for the other ranks to detect a conflict that this one has detected
_ENOUGH_BEATS = 2  # new beats that show that a process of another host runs
_SILENT_BEATS = 20  # periods without a new beat, after which it counts as ended
_PUT_ATTEMPTS = 20  # tries to put a file into a directory that others may remove at the same moment
_HELLO = re.compile(r"hello-(\d+)-([0-9a-f]{32})\.json")
_BEAT = re.compile(r"beat-([0-9a-f]{32})-(\d+)")
_ANSWER = re.compile(r"answer-([0-9a-f]{32})\.json")
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


def _read(directory: int, name: str, kind: type[T]) -> T | None:
    """Return the record in a file; None if the file is gone, not complete, or holds anything else."""
    try:
        with open(os.open(name, _ANY_FILE, dir_fd=directory), "rb") as file:
            return messages.decode(file.read(), kind, name, -1)
    except (OSError, ValueError):  # a MismatchError is a ValueError
        return None


@dataclass(frozen=True, slots=True)
class _Hello:
    """The contents of a hello."""

    owner: Owner
    network: str | None
    world_size: int
    num_made: int


@dataclass(frozen=True, slots=True)
class _Answer:
    """The contents of rank 0's answer."""

    nonces: list[str]
    host: str
    address: str
    port: int
    server: str
    refusal: str | None
    num_made: int
    """Directories at the end of the path that this rendezvous has made: the last rank to leave removes them."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The contents of the refusal of a rank that cannot connect."""

    rank: int
    why: str


@dataclass(slots=True)
class _Pulse:
    """The beats of a process of another host: the newest, when it was first seen, and how many new ones were seen."""

    newest: int
    since: float
    count: int = 0


class _ConflictError(Exception):
    """Two ranks contradict each other. Each rank detects this by itself, so their files must stay for a moment."""

    def __init__(self, error: StateExchangeError) -> None:
        super().__init__(error)
        self.error = error


class DirectoryRendezvous:
    """One rank's part in a rendezvous in a directory."""

    def __init__(self, path: Path, rank: int, world_size: int, timeout_s: float) -> None:
        self._path = path
        self._rank = rank
        self._world_size = world_size
        self._joining = Joining(rank, world_size, timeout_s, str(path))
        self._nonce = secrets.token_hex(16)
        slowdown = max(1.0, world_size / _MANY_RANKS)
        self._poll_s = _POLL_S * slowdown
        self._beat_s = _BEAT_S * slowdown
        self._beat_due = 0.0
        self._beats = 0
        self._num_made = 0  # directories at the end of the path that this rendezvous has made
        self._hellos: dict[str, _Hello] = {}
        self._pulses: dict[str, _Pulse] = {}
        self._known: set[str] = set()  # nonces of processes that ran at some scan
        self._seen: dict[int, str] = {}  # ranks that were alive when they were last seen; they may have left since
        self._present: set[int] = set()  # ranks that were there at the last scan

    def store(self) -> SharedStore:
        """Return the store that all ranks have joined. Collective."""
        try:
            try:
                self._publish_hello()
                return self._lead() if self._rank == 0 else self._follow()
            except _ConflictError as conflict:
                self._linger(set(self._hellos) - {self._nonce}, _NOTICE_S)  # so that the other ranks detect it, too
                raise conflict.error from None
            finally:
                self._remove()
        except LostServerError as error:
            raise PeerError(0, tcp_store.PHASE, f"its store ended: {error}") from error
        except OSError as error:
            if isinstance(error, StateExchangeError):
                raise
            raise StorageError.of(error, "exchange addresses with the other ranks", path=self._path) from error

    # Rank 0

    def _lead(self) -> SharedStore:
        nonces = self._wait_for_hellos()
        try:
            server = self._serve(nonces)
        except (OSError, NotInitializedError) as error:
            self._answer(nonces, None, str(error))
            self._linger(set(nonces) - {self._nonce})
            raise NotInitializedError(
                f"rank 0 on {platform.node()} cannot listen for the other ranks: {error}"
            ) from error
        try:
            self._answer(nonces, server, None)
            return self._gather_all(server, nonces)
        except BaseException:
            server.close()  # else a caller that keeps the error would keep the port open
            raise

    def _serve(self, nonces: list[str]) -> Server:
        """Serve the store at the first of this host's addresses where that is possible."""
        refusal = OSError(errno.EADDRNOTAVAIL, "this host has no network address")
        for address in self._addresses(nonces):
            try:
                return Server.on(address, self._joining.timeout_s)
            except OSError as error:
                refusal = OSError(error.errno, f"{error.strerror or error} ({address})")
        raise refusal

    def _addresses(self, nonces: list[str]) -> list[str]:
        """Return the addresses at which other ranks may reach this host, the most likely first.

        If all ranks share one network namespace: loopback. Else the address of GLOO_SOCKET_IFNAME's interface. Else the
        addresses of the host's name, as Gloo uses them, and of all interfaces.
        """
        networks = {self._hellos[nonce].network for nonce in nonces}
        if len(networks) == 1 and None not in networks:
            return ["127.0.0.1", "::1"]
        interface = gloo_interface()
        if interface is not None:
            address = network.address_of_interface(interface)
            if address is None:
                raise NotInitializedError(f"GLOO_SOCKET_IFNAME={interface} names no network interface with an address")
            return [address]
        known = dict.fromkeys([*network.addresses_of_name(platform.node()), *network.own_addresses()])
        return sorted(known, key=network.is_loopback)

    def _answer(self, nonces: list[str], server: Server | None, refusal: str | None) -> None:
        address, port, nonce = ("", 0, "") if server is None else (server.address, server.port, server.nonce)
        answer = _Answer(nonces, platform.node(), address, port, nonce, refusal, self._num_made)
        self._publish(f"answer-{self._nonce}.json", answer)

    def _gather_all(self, server: Server, nonces: list[str]) -> SharedStore:
        """Wait until all ranks have joined, remove the files, and notify them. Return the store."""
        store = self._connect(server.nonce, server.address, server.port)
        refusals = {f"refusal-{nonce}.json" for nonce in nonces}

        def poll() -> None:
            self._beat()
            with self._scanned() as (directory, names):
                for name in refusals & set(names):
                    refusal = _read(directory, name, _Refusal)
                    if refusal is not None:
                        raise NotInitializedError(refusal.why, rank=refusal.rank)

        self._joining.join(store, self._nonce, poll, self._remove)
        return SharedStore(store, 0, self._world_size, server)

    def _connect(self, nonce: str, address: str, port: int) -> Any:
        """Return a client of the server that has `nonce`; OSError if it cannot be reached."""
        remaining = max(self._joining.deadline - time.monotonic(), 2 * _POLL_S)
        store = tcp_store.connect(address, port, self._joining.timeout_s, min(_CONNECT_S, remaining / 2))
        if tcp_store.server_nonce(store) != nonce:
            raise OSError(errno.ECONNREFUSED, "another program answers there")
        return tcp_store.namespaced(store, nonce)

    # The other ranks

    def _follow(self) -> SharedStore:
        answer = self._wait_for_answer()
        self._num_made = max(self._num_made, answer.num_made)
        if answer.refusal is not None:
            raise NotInitializedError(
                f"rank 0 on {answer.host} cannot listen for the other ranks: {answer.refusal}", rank=0
            )
        try:
            store = self._connect(answer.server, answer.address, answer.port)
        except OSError as error:
            why = tcp_store.unreachable_text(
                self._rank, answer.host, answer.address, answer.port, error.strerror or error
            )
            self._publish(f"refusal-{self._nonce}.json", _Refusal(self._rank, why))
            self._linger({answer.nonces[0]})
            raise NotInitializedError(why, rank=self._rank) from error
        self._remove()  # before joining: rank 0 removes the directory when all have joined
        self._joining.join(store, self._nonce)
        return SharedStore(store, self._rank, self._world_size)

    def _wait_for_answer(self) -> _Answer:
        while True:
            beaten = self._beat()
            with self._scanned() as (directory, names):
                if beaten:
                    self._living(directory, names)  # so that an error can name missing ranks; rank 0 scans more often
                for name in names:
                    answer = _read(directory, name, _Answer) if _ANSWER.fullmatch(name) else None
                    if answer is not None and self._is_mine(answer):
                        return answer
            self._pause()

    def _is_mine(self, answer: _Answer) -> bool:
        return len(answer.nonces) == self._world_size and answer.nonces[self._rank] == self._nonce

    # Hellos and liveness

    def _publish_hello(self) -> None:
        with self._opened():
            pass  # makes what is missing of the path, which the hello then reports
        hello = _Hello(Owner.current(), network_identity(), self._world_size, self._num_made)
        self._publish(f"hello-{self._rank}-{self._nonce}.json", hello)

    def _wait_for_hellos(self) -> list[str]:
        """Wait until the process of every rank is known to run; return the nonces by rank."""
        while True:
            self._beat()
            with self._scanned() as (directory, names):
                living = self._living(directory, names)
            if len(living) == self._world_size:
                return [living[rank] for rank in range(self._world_size)]
            self._pause()

    def _pause(self) -> None:
        """Sleep until the next scan; raise StallError past the deadline."""
        if time.monotonic() > self._joining.deadline:
            ranks = range(self._world_size)
            if never_seen := [rank for rank in ranks if rank not in self._seen]:
                raise self._joining.absent_error(never_seen)
            if gone := [rank for rank in ranks if rank not in self._present]:
                raise self._joining.left_error(gone)
            raise self._joining.unanswered_error()
        time.sleep(self._poll_s)

    def _living(self, directory: int, names: list[str]) -> dict[int, str]:
        """Return the nonce of every rank whose process runs. Remove the files of processes that have ended."""
        beats: dict[str, int] = {}
        for name in names:
            if match := _BEAT.fullmatch(name):
                beats[match[1]] = max(int(match[2]), beats.get(match[1], -1))
        living: dict[int, str] = {}
        for name in names:
            match = _HELLO.fullmatch(name)
            hello = self._hello_of(directory, name, match[2]) if match else None
            if match is None or hello is None:
                continue
            rank, nonce = int(match[1]), match[2]
            if self._is_alive(nonce, hello, beats.get(nonce, -1)):
                self._check(rank, nonce, hello, living)
                living[rank] = nonce
                self._known.add(nonce)
            elif self._seen.get(rank) == nonce:
                del self._seen[rank]  # it has been killed, or its host is gone
            elif hello.owner.is_dead and nonce not in self._known:
                _remove_files(directory, names, nonce)  # left by an earlier run
        self._seen.update(living)
        self._present = set(living)
        return living

    def _hello_of(self, directory: int, name: str, nonce: str) -> _Hello | None:
        if nonce not in self._hellos:
            hello = _read(directory, name, _Hello)
            if hello is None:
                return None
            self._hellos[nonce] = hello
        return self._hellos[nonce]

    def _is_alive(self, nonce: str, hello: _Hello, beat: int) -> bool:
        if hello.owner.is_visible:
            return not hello.owner.is_dead
        now = time.monotonic()
        pulse = self._pulses.setdefault(nonce, _Pulse(beat, now))
        if beat > pulse.newest:
            pulse.newest, pulse.since, pulse.count = beat, now, pulse.count + 1
        return pulse.count >= _ENOUGH_BEATS and now - pulse.since < _SILENT_BEATS * self._beat_s

    def _check(self, rank: int, nonce: str, hello: _Hello, living: dict[int, str]) -> None:
        """Raise _ConflictError if a rank's hello contradicts this rank, or another process of that rank."""
        if hello.world_size != self._world_size or rank >= self._world_size:
            text = f"rank {rank} has another world_size"
            raise _ConflictError(InvalidArgumentError(text, expected=self._world_size, found=hello.world_size))
        if living.get(rank, nonce) != nonce:
            text = f"two processes claim rank {rank} in {self._path}"
            raise _ConflictError(PeerError(rank, tcp_store.PHASE, text))
        self._num_made = max(self._num_made, hello.num_made)

    def _linger(self, nonces: set[str], seconds: float = _LINGER_S) -> None:
        """Keep this rank's files until the processes of `nonces` have removed theirs, at most for `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._beat()
            with self._scanned() as (_, names):
                all_names = " ".join(names)
                if not any(nonce in all_names for nonce in nonces):
                    return
            time.sleep(self._poll_s)

    # The directory

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """Yield a new descriptor of the directory, which is made if it is missing."""
        directory, num_made = _open_directory(self._path)
        try:
            self._num_made = max(self._num_made, num_made)
            yield directory
        finally:
            os.close(directory)

    @contextlib.contextmanager
    def _scanned(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the directory, newly opened, and the names in it."""
        with self._opened() as directory:
            yield directory, os.listdir(directory)

    def _put(self, name: str, content: bytes = b"") -> None:
        """Write a new file; retry if another rendezvous removes the directory meanwhile."""
        for attempt in range(_PUT_ATTEMPTS):
            try:
                with (
                    self._opened() as directory,
                    open(os.open(name, _NEW_FILE, 0o600, dir_fd=directory), "wb") as file,
                ):
                    file.write(content)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ESTALE) or attempt == _PUT_ATTEMPTS - 1:
                    raise
            else:
                break

    def _publish(self, name: str, record: _Hello | _Answer | _Refusal) -> None:
        """Write a record to a new file; the next beat then changes the directory again, after a tick of the server."""
        self._put(name, messages.encoded(record, type(record)))
        self._beat_due = time.monotonic() + _SETTLE_S

    def _beat(self) -> bool:
        """Write this rank's next beat if it is due; return whether it was."""
        if time.monotonic() < self._beat_due:
            return False
        self._put(f"beat-{self._nonce}-{self._beats}")
        self._beats += 1
        self._beat_due = time.monotonic() + self._beat_s
        with self._opened() as directory, contextlib.suppress(FileNotFoundError):
            os.unlink(f"beat-{self._nonce}-{self._beats - 2}", dir_fd=directory)
        return True

    def _remove(self) -> None:
        """Remove this rank's files, and the directories that the rendezvous made if they are empty. May be repeated."""
        try:
            directory = os.open(self._path, _DIRECTORY)
        except OSError:
            return  # another rank has removed it with its last file
        try:
            _remove_files(directory, os.listdir(directory), self._nonce)
        finally:
            os.close(directory)
        with contextlib.suppress(OSError):  # others are still in there
            for path in [self._path, *self._path.parents][: self._num_made]:
                os.rmdir(path)


def _remove_files(directory: int, names: list[str], nonce: str) -> None:
    """Remove all files of a process; its hello goes last, as it holds the process to which the others belong."""
    own = [name for name in names if nonce in name]
    for name in sorted(own, key=lambda name: name.startswith("hello-")):
        with contextlib.suppress(OSError):  # another rank does the same; or it is not ours to remove
            os.unlink(name, dir_fd=directory)
