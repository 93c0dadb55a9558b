"""TCP key-value stores that rank 0 serves and all ranks join.

One object owns the server. Each user of the store (a Gloo group, a communicator, user code) has a client of its own. So
closing the server frees its port, even while clients exist.

Keys and who writes them:

    server           rank 0, before it joins: a nonce of this server; all other keys lie below this nonce, as torch may
                     serve a store of its own at the same port of this process
    world_size       each rank; the first one's is kept, and a rank that has another one fails the rendezvous
    joined/<rank>    each rank, once: its process. Another process with that rank fails the rendezvous, unless the first
                     one has ended
    decision         what is written first counts: "complete", by rank 0, when all have joined; or the error that all
                     raise, by rank 0 or by a rank that contradicts another one

If rank 0 dies, all clients lose their connections, which raises LostServerError. While it is stopped, or its host is
cut off, each request of torch's clients blocks, and cannot be interrupted: so they are made in another thread, for
which the caller waits with a deadline.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import platform
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from statexchange.comm.backends.torch_groups import as_timedelta, begun, first_line
from statexchange.errors import (
    InvalidArgumentError,
    NotInitializedError,
    StallError,
    StateExchangeError,
    from_record,
    to_record,
)
from statexchange.processes import Owner

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed exports it, but not for type checkers

_stores: Any = dist  # torch.distributed exports the store classes, but hides them from type checkers
_POLL_S = 0.02
_ATTEMPT_S = 3.0  # for one attempt to connect
_HANDSHAKE_S = 10.0  # for torch's client to be served
_NOTICE_S = 1.0  # for the other ranks to read an error
_ANSWER_S = 3.0  # for rank 0 to decide after a deadline, and to answer
_COMPLETE = "complete"
_PHASE = "the rendezvous"


class LostServerError(Exception):
    """The connection to the server has ended."""


class Server:
    """The TCP store that this process serves, at `port`, until `close`."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        """Serve on all interfaces, at `port`, or for 0 at one that the system picks; `host` is a name of this host.

        Raises NotInitializedError if it cannot.

        torch.distributed may serve its store at the same port later: scripts set one MASTER_PORT for both.
        """
        # Torch need not wait for the other ranks: rank 0 does, and names those that are missing (`Joining`).
        options = {"is_master": True, "wait_for_workers": False, "multi_tenant": True}
        try:
            self._store: Store | None = _stores.TCPStore(host, port, timeout=as_timedelta(timeout_s), **options)
        except RuntimeError as error:
            raise NotInitializedError(f"cannot listen at tcp://{host}:{port}: {first_line(error)}") from error
        self.port = int(self._store.port)
        self.nonce = secrets.token_hex(16)
        self._store.set("server", self.nonce)

    @property
    def store(self) -> Any:
        """A torch Store that keeps the server alive."""
        return _stores.PrefixStore(self.nonce, self._store)

    def close(self) -> None:
        """Free the port; clients lose their connections. May be called again."""
        # Torch ends the server with its last reference, and what `store` returns is one.
        self._store = None


class Place(NamedTuple):
    """The place of a server: its addresses, the likeliest first, its port, and, if known, its nonce and host."""

    addresses: Sequence[str]
    port: int
    nonce: str | None = None
    host: str = ""


def connect(place: Place, timeout_s: float, deadline: float = float("inf")) -> tuple[Store, str]:
    """Return a client of the store at `place`, and the nonce of its server; OSError if it does not answer.

    `timeout_s` is the limit of the client's later requests. No attempt begins after `deadline`, a time of the monotonic
    clock.
    """
    refusal: OSError = OSError(errno.EADDRNOTAVAIL, f"{place.host} has no network address")
    for address in place.addresses:
        left_s = max(deadline - time.monotonic(), _POLL_S)
        try:
            # A plain connection is tried first, as torch's client goes on trying, and writes many lines to the log.
            socket.create_connection((address, place.port), min(left_s, _ATTEMPT_S)).close()
            # In another thread, which a program that takes connections and answers nothing would hold up.
            connecting = begun("a connection to the store", functools.partial(_client, address, place, timeout_s))
            return connecting.wait(min(left_s, _HANDSHAKE_S))
        except StallError:
            refusal = OSError(errno.ETIMEDOUT, "it does not answer")
        except OSError as error:
            refusal = error
        if time.monotonic() > deadline:
            break
    raise refusal


def _client(address: str, place: Place, timeout_s: float) -> tuple[Store, str]:
    options = {"is_master": False, "wait_for_workers": False, "timeout": as_timedelta(_HANDSHAKE_S)}
    try:
        store = _stores.TCPStore(address, place.port, **options)
    except RuntimeError as error:
        raise OSError(first_line(error)) from error
    store.set_timeout(as_timedelta(timeout_s))
    nonce = None
    with _lost_server():
        # `get` waits for a key, which the store of another program does not have.
        if store.check(["server"]):
            nonce = store.get("server").decode()
    if nonce is None or place.nonce not in (None, nonce):
        raise OSError(errno.ECONNREFUSED, "another program answers there")
    return _stores.PrefixStore(nonce, store), nonce


@dataclass(frozen=True, slots=True)
class Joining:
    """One rank's part in the joining of a store by all ranks, from now on. `where` is the store's place, for errors."""

    rank: int
    world_size: int
    timeout_s: float
    where: str
    began: float = field(default_factory=time.monotonic)

    @property
    def deadline(self) -> float:
        """The time at which this rank gives up, of the monotonic clock."""
        return self.began + self.timeout_s

    def join(self, store: Store) -> None:
        """Join `store`, and return when all ranks have, which rank 0 decides. Collective.

        What rank 0 raises is raised on all ranks that have joined, and so is what a rank finds that has another
        world_size, or the number of a rank that has joined already.
        """
        with _lost_server():
            if self.rank != 0:
                self._follow(store)
                return
            try:
                self._introduce(store)
                self._wait_for_all(store)
                self._decide(store)
            except BaseException as error:
                # An interrupt, too. If the rendezvous is decided already, this changes nothing.
                with contextlib.suppress(RuntimeError):  # if the server itself has failed
                    store.compare_set("decision", "", json.dumps(to_record(error, 0, _PHASE)))
                    time.sleep(_NOTICE_S)  # the others read it
                raise

    def _follow(self, store: Store) -> None:
        def join() -> None:
            self._introduce(store)
            self.wait_until_complete(store)

        joined = begun(_PHASE, join)
        try:
            joined.wait(max(self.deadline - time.monotonic(), 0.0) + _ANSWER_S)
        except StallError:
            if joined.is_completed():  # what `join` has raised
                raise
            raise self._unanswered_error() from None

    def _introduce(self, store: Store) -> None:
        """Write the keys of this rank; fail the rendezvous if they contradict those of another one."""
        # With "" as the expected value `compare_set` writes only a new key, and it returns what is there afterwards.
        world_size = int(store.compare_set("world_size", "", str(self.world_size)))
        error: StateExchangeError
        if world_size != self.world_size:
            text = f"rank {self.rank} has another world_size at {self.where}"
            error = InvalidArgumentError(text, expected=world_size, found=self.world_size, rank=self.rank)
        elif not self._takes_its_place(store):
            text = f"another process has joined as rank {self.rank} at {self.where}: does another job use it?"
            error = NotInitializedError(text, rank=self.rank)
        else:
            return
        store.compare_set("decision", "", json.dumps(to_record(error, self.rank, _PHASE)))
        raise error

    def _takes_its_place(self, store: Store) -> bool:
        """Join as this rank; return False if another process has, which may still run."""
        key, mine = _joined(self.rank), json.dumps(Owner.current().to_json())
        present = store.compare_set(key, "", mine).decode()
        if present == mine:  # of now, or of an earlier attempt that this process gave up
            return True
        was_restarted = Owner.from_json(json.loads(present)).is_dead
        return was_restarted and store.compare_set(key, present, mine).decode() == mine

    def _decide(self, store: Store) -> None:
        """Decide that the rendezvous is complete, if nothing is decided yet; raise the error if that was decided."""
        decided = store.compare_set("decision", "", _COMPLETE).decode()
        if decided != _COMPLETE:
            raise from_record(json.loads(decided))

    def _wait_for_all(self, store: Store) -> None:
        while missing := self._missing(store):
            # Before rank 0 decides, the only decision is the error of a rank that contradicts another one.
            if store.check(["decision"]):
                self._decide(store)
            if time.monotonic() > self.deadline:
                raise self.absent_error(missing)
            time.sleep(_POLL_S)

    def _missing(self, store: Store) -> list[int]:
        """Return the ranks that have not joined."""
        if store.check(list(map(_joined, range(self.world_size)))):  # all at once, as there may be thousands
            return []
        return [rank for rank in range(self.world_size) if not store.check([_joined(rank)])]

    def wait_until_complete(self, store: Store) -> None:
        """Wait until rank 0 has seen that all ranks have joined, or raise its error. For all ranks but 0.

        If all have joined at the deadline, wait a second more: rank 0 may have reached its own deadline just now, and
        then publishes that error.
        """
        while not store.check(["decision"]):
            if time.monotonic() > self.deadline:
                missing = self._missing(store)
                if missing:
                    raise self.absent_error(missing)
                if time.monotonic() > self.deadline + _NOTICE_S:
                    raise self._unanswered_error()
            time.sleep(_POLL_S)
        self._decide(store)

    def absent_error(self, ranks: Sequence[int], reason: object = "") -> StallError:
        """Return the error for ranks that did not join."""
        text = f"ranks {list(ranks)} did not join at {self.where} in {self.timeout_s:g} s"
        if reason:
            text += f": {reason}"
        return StallError(f"{text}; init must be called on all ranks", missing=tuple(ranks), rank=ranks[0])

    def _unanswered_error(self) -> StallError:
        """Return the error for a rank 0 that does not decide."""
        text = f"rank 0 does not answer at {self.where}: its process is stopped, or its host is cut off"
        return StallError(text, missing=(0,), rank=0)


def unreachable_text(rank: int, place: Place, reason: object) -> str:
    """Return the message for a rank that cannot connect to the store of rank 0."""
    where = f"{place.host} at {', '.join(place.addresses)}, port {place.port}"
    return (
        f"rank {rank} on {platform.node()} cannot reach rank 0 on {where}: {reason}. Use "
        'rendezvous="tcp://host:port" with an address of rank 0 that this host can reach'
    )


@contextlib.contextmanager
def _lost_server() -> Iterator[None]:
    try:
        yield
    except StateExchangeError:
        raise
    except RuntimeError as error:
        raise LostServerError(first_line(error)) from error


def _joined(rank: int) -> str:
    return f"joined/{rank}"
