"""TCP key-value stores that rank 0 serves and all ranks join.

One object owns the server. Each user of the store (a Gloo group, a communicator, user code) has a client of its own. So
closing the server frees its port, even while clients exist.

Keys and who writes them:

    server           rank 0, before it joins: a nonce of this server; all other keys lie below this nonce, as torch may
                     serve a store of its own at the same port of this process
    joined/<rank>    each rank, once: a nonce of its process. A second process with that rank reads another nonce there,
                     and raises
    complete         rank 0, when all have joined
    failed           rank 0, instead of `complete`: the error that it raises; the other ranks raise it, too
    failure_reads    a counter of the ranks that have read `failed`; rank 0 serves a second longer for them

Only `get` and `wait` of torch's clients block, and they are called only for keys that exist already; everything else is
polled with a deadline. If rank 0 dies, all clients lose their connections, which raises LostServerError.
"""

from __future__ import annotations

import contextlib
import json
import platform
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist

from statexchange.comm.backends.torch_groups import as_timedelta, first_line
from statexchange.errors import (
    NotInitializedError,
    StallError,
    StateExchangeError,
    from_record,
    to_record,
)

__all__ = [
    "PHASE",
    "Joining",
    "LostServerError",
    "Server",
    "SharedStore",
    "connect",
    "namespaced",
    "server_nonce",
    "unreachable_text",
]

_stores: Any = dist  # torch.distributed exports the store classes, but hides them from type checkers
_POLL_S = 0.02
_ATTEMPT_S = 5.0  # for one attempt to connect
_NOTICE_S = 1.0  # for the other ranks to read an error
PHASE = "the rendezvous"


class LostServerError(Exception):
    """The connection to the server has ended."""


class Server:
    """The TCP store that this process serves, at `port`, until `close`."""

    def __init__(self, store: Any) -> None:
        self._store: Any = store
        self.port = int(store.port)
        self.nonce = secrets.token_hex(16)
        store.set("server", self.nonce)

    @classmethod
    def at(cls, host: str, port: int, timeout_s: float) -> Server:
        """Serve on all interfaces, at `port`; `host` must be a name of this host. NotInitializedError if it cannot.

        torch.distributed may serve its store at the same port later: scripts set one MASTER_PORT for both.
        """
        options = {"is_master": True, "wait_for_workers": False, "multi_tenant": True}
        try:
            return cls(_stores.TCPStore(host, port, timeout=as_timedelta(timeout_s), **options))
        except RuntimeError as error:
            raise NotInitializedError(f"cannot listen at tcp://{host}:{port}: {first_line(error)}") from error

    @classmethod
    def on(cls, address: str, timeout_s: float) -> Server:
        """Serve on the interface that has `address`, at a port that the system picks. OSError if it cannot."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)
        port = listener.getsockname()[1]
        try:
            socket.create_connection((address, port), _ATTEMPT_S).close()  # the interface may be down
        except OSError:
            listener.close()
            raise
        options = {"is_master": True, "wait_for_workers": False, "timeout": as_timedelta(timeout_s)}
        try:
            # The store owns the descriptor and closes it.
            return cls(_stores.TCPStore(address, port, master_listen_fd=listener.detach(), **options))
        except RuntimeError as error:
            raise OSError(first_line(error)) from error

    @property
    def address(self) -> str:
        """The address that the server listens at."""
        return str(self._store.host)

    @property
    def store(self) -> Any:
        """A torch Store that keeps the server alive."""
        return namespaced(self._store, self.nonce)

    def close(self) -> None:
        """Free the port; clients lose their connections. May be called again."""
        self._store = None


class SharedStore(NamedTuple):
    """A torch Store that all ranks share. If rank 0 serves it, it ends when `server` is closed."""

    store: Any
    rank: int
    world_size: int
    server: Server | None = None

    @property
    def lasting(self) -> Any:
        """The store for users that keep it, as torch.distributed does: on rank 0 it keeps the server alive."""
        return self.store if self.server is None else self.server.store


def connect(address: str, port: int, timeout_s: float, attempt_s: float) -> Any:
    """Return a client of the store at `address` and `port`; OSError if nothing answers within `attempt_s`.

    A plain connection is tried first: torch's own attempts cannot be interrupted, and write many lines to the log.
    """
    deadline = time.monotonic() + attempt_s
    while True:
        remaining = max(deadline - time.monotonic(), 0.01)
        try:
            socket.create_connection((address, port), min(remaining, _ATTEMPT_S)).close()
            break
        except OSError:
            if time.monotonic() + _POLL_S > deadline:
                raise
        time.sleep(_POLL_S)
    limit = as_timedelta(timeout_s)
    try:
        return _stores.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit)
    except RuntimeError as error:
        raise OSError(first_line(error)) from error


def server_nonce(store: Any) -> str | None:
    """Return the nonce of the server that this client is connected to; None if the server has not set one yet."""
    with _lost_server():
        return store.get("server").decode() if store.check(["server"]) else None


def namespaced(store: Any, nonce: str) -> Any:
    """Return `store` with all keys prefixed by its server's nonce. Not collective."""
    return _stores.PrefixStore(nonce, store)


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

    def join(
        self, store: Any, nonce: str, poll: Callable[[], None] = lambda: None, finish: Callable[[], None] = lambda: None
    ) -> None:
        """Join `store`, and return when all ranks have, which rank 0 decides. Collective.

        Rank 0 calls `poll` between two looks at who has joined, and `finish` before the others return. What `poll`
        raises is raised on all ranks that have joined. Raises NotInitializedError if another process has joined as this
        rank.
        """
        with _lost_server():
            if store.compare_set(_joined(self.rank), "", nonce).decode() != nonce:
                text = f"rank {self.rank} has already joined the rendezvous at {self.where}: does another job use it?"
                raise NotInitializedError(text, rank=self.rank)
            if self.rank != 0:
                self.wait_until_complete(store)
                return
            try:
                self._wait_for_all(store, poll)
            except BaseException as error:
                with contextlib.suppress(RuntimeError):  # if the server itself has failed
                    store.set("failed", json.dumps(to_record(error, 0, PHASE)))
                    self._wait_until_read(store)
                raise
            finish()
            store.set("complete", "1")

    def _wait_for_all(self, store: Any, poll: Callable[[], None]) -> None:
        while missing := self._missing(store):
            poll()
            if time.monotonic() > self.deadline:
                raise self.absent_error(missing)
            time.sleep(_POLL_S)

    def _missing(self, store: Any) -> list[int]:
        """Return the ranks that have not joined."""
        if store.check([_joined(rank) for rank in range(self.world_size)]):  # all at once, as there may be thousands
            return []
        return [rank for rank in range(self.world_size) if not store.check([_joined(rank)])]

    def _wait_until_read(self, store: Any) -> None:
        deadline = time.monotonic() + _NOTICE_S
        others = self.world_size - len({0, *self._missing(store)})
        while int(store.add("failure_reads", 0)) < others and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def wait_until_complete(self, store: Any) -> None:
        """Wait until rank 0 has seen that all ranks have joined, or raise its error. For all ranks but 0.

        If all have joined at the deadline, wait a second more: rank 0 may have reached its own deadline just now, and
        then publishes that error.
        """
        while not store.check(["complete"]):
            if store.check(["failed"]):
                record = json.loads(store.get("failed"))
                store.add("failure_reads", 1)
                raise from_record(record)
            if time.monotonic() > self.deadline:
                if missing := self._missing(store):
                    raise self.absent_error(missing)
                if time.monotonic() > self.deadline + _NOTICE_S:
                    raise self.unanswered_error()
            time.sleep(_POLL_S)

    def absent_error(self, ranks: Sequence[int], reason: object = "") -> StallError:
        """Return the error for ranks that did not join."""
        text = f"ranks {list(ranks)} did not join at {self.where} in {self.timeout_s:g} s"
        text += f": {reason}" if reason else ""
        return StallError(f"{text}; init must be called on all ranks", missing=tuple(ranks), rank=ranks[0])

    def left_error(self, ranks: Sequence[int]) -> StallError:
        """Return the error for ranks that joined, but left early."""
        text = f"ranks {list(ranks)} joined at {self.where}, but left before all had joined, which took over"
        return StallError(f"{text} {self.timeout_s:g} s", missing=tuple(ranks))

    def unanswered_error(self) -> StallError:
        """Return the error for a rendezvous that all ranks joined, but rank 0 did not complete."""
        text = f"all ranks joined at {self.where}, but rank 0 did not answer in {self.timeout_s:g} s"
        return StallError(text, missing=(0,))


def unreachable_text(rank: int, root_host: str, address: str, port: int, reason: object) -> str:
    """Return the message for a rank that cannot connect to the store of rank 0."""
    return (
        f"rank {rank} on {platform.node()} cannot reach rank 0 on {root_host} at {address}, port {port}: {reason}. Set "
        "GLOO_SOCKET_IFNAME on all ranks to a network interface that connects the hosts (`ip addr` lists them), or use "
        'rendezvous="tcp://host:port" with an address of rank 0'
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
