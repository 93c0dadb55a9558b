"""A member of failure detection between hosts: any rank but 0. detector.py describes the protocol.

A member connects again when its connection is lost. When the coordinator is silent, it tries to make a second
connection, only to find out whether the host answers. What an attempt shows:

* A lost connection and then a refused attempt, or any two of these without a status in between: nothing listens there
  any more. The member reports rank 0 as dead, 0.4 s later.
* A timeout: the host does not answer. A wait that reaches its deadline names all ranks of that host as missing.
* Success: the host answers. A wait that reaches its deadline names rank 0 alone, if it is still silent.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from typing import Any, NamedTuple

from statexchange.comm.failure.connection import ConnectionEndedError, JsonConnection
from statexchange.comm.failure.detector import FailureDetector, GroupView
from statexchange.comm.topology import Topology

_CONNECT_S = 1.0
_RECONNECT_S = 0.5
_REFUSALS_OF_DEAD = 2


class CoordinatorAddress(NamedTuple):
    """The addresses and the port of the coordinator, and the nonce that only ranks of this group have."""

    addresses: list[str]
    port: int
    nonce: str


class Member(FailureDetector):
    """Any rank but 0."""

    def __init__(
        self,
        topology: Topology,
        connection: JsonConnection,
        address: str,
        coordinator: CoordinatorAddress,
    ) -> None:
        """`address` is the one of `coordinator` at which `connection` was made."""
        super().__init__(topology)
        self._address = address
        self._coordinator = coordinator
        self._connection: JsonConnection | None = connection
        self._selector.register(connection.connection, selectors.EVENT_READ, connection)
        self._refusals = 0  # lost connections and refused attempts since the last status
        self._host_answers: bool | None = None  # by the last attempt since the last status, if there was one
        self._attempted_at = 0.0  # the last attempt to connect
        self._is_failure_known = False  # to the coordinator, by its last status

    def _handle_input(self, connection: JsonConnection | None) -> None:
        assert connection is not None
        try:
            for status in connection.receive():
                self._take_status(status)
        except (ConnectionEndedError, ValueError, TypeError, LookupError):  # any program may listen on that port now
            self._selector.unregister(connection.connection)
            connection.close()
            self._connection = None
            self._refusals += 1
            self._reconnect()

    def _take_status(self, status: dict[str, Any]) -> None:
        view = dict(status)
        failure = view.pop("failure")
        # JSON has only texts as keys.
        view["departed"] = {int(rank): departure for rank, departure in dict(status["departed"]).items()}
        view["updated"] = time.monotonic()  # by the clock of this host
        self._view = GroupView(**view)
        # The coordinator lives: what was refused, silent or lost before no longer counts.
        self._refusals = 0
        self._host_answers = None
        self._seen_dead_at.pop(0, None)
        self._is_failure_known = failure is not None
        if self._failure is None:
            self._failure = failure

    def _post(self, message: list[object]) -> None:
        if self._connection is not None:
            self._connection.send(message)

    def _send_status(self) -> None:
        if self._connection is not None:
            self._connection.flush()
            if not self._connection.has_unsent:
                self._connection.send(["at", self._op_number, self._progress])
        # Once the host has answered, a further attempt would show nothing new.
        is_silent = self._is_uninformed() and not self._host_answers
        if (self._connection is None or is_silent) and time.monotonic() - self._attempted_at > _RECONNECT_S:
            self._reconnect()

    def _reconnect(self) -> None:
        """Try to connect to the coordinator, which has closed the connection or is silent; see the top of this file."""
        if 0 in self._view.departed or self._is_failure_known:
            return  # the coordinator has ended, or may end any moment: that is no news
        if self._failure is not None and self._refusals >= _REFUSALS_OF_DEAD:
            return  # nobody listens to it there
        # This blocks the thread for half a second at most: without the coordinator it has nothing else to do.
        try:
            connection = socket.create_connection((self._address, self._coordinator.port), _RECONNECT_S)
        except ConnectionError:
            self._refusals += 1
        except OSError:
            self._host_answers = False
        else:
            self._host_answers = True
            self._use_connection(connection)
        self._attempted_at = time.monotonic()
        if self._refusals >= _REFUSALS_OF_DEAD:
            self._seen_dead_at.setdefault(0, time.monotonic())

    def _use_connection(self, connection: socket.socket) -> None:
        """Use `connection` if there is no other; else the attempt has only shown that the host answers."""
        if self._connection is not None:
            connection.close()
            return
        self._connection = JsonConnection(connection)
        self._connection.send([self._coordinator.nonce, self._topology.rank])
        # It may have been lost with the connection before: then this rank would be taken for dead.
        if self._failure is not None:
            self._connection.send(["failure", self._failure])
        self._selector.register(connection, selectors.EVENT_READ, self._connection)

    def _cause_of_death(self, rank: int) -> str:  # noqa: ARG002 (rank 0, the only one that a member watches)
        return "its process or host is gone: the coordinator does not answer"

    def _suspects(self) -> tuple[int, ...]:
        nodes = self._topology.nodes
        # The host answers, or is this one: so only the process of rank 0 can be silent.
        if self._host_answers or nodes[0] == nodes[self._topology.rank]:
            return (0,)
        return tuple(rank for rank, node in enumerate(nodes) if node == nodes[0])


def connect_member(topology: Topology, coordinator: CoordinatorAddress) -> Member | None:
    """Connect to the first of the coordinator's addresses that answers to the nonce; return None if none does."""
    for address in coordinator.addresses:
        try:
            connection = JsonConnection(socket.create_connection((address, coordinator.port), _CONNECT_S))
        except OSError:
            continue
        connection.send([coordinator.nonce, topology.rank])
        if _is_answered(connection):
            return Member(topology, connection, address, coordinator)
        connection.close()
    return None


def _is_answered(connection: JsonConnection) -> bool:
    """Whether a status arrives, which the coordinator sends once it has checked the nonce."""
    deadline = time.monotonic() + _CONNECT_S
    with contextlib.suppress(ConnectionEndedError), selectors.DefaultSelector() as selector:
        selector.register(connection.connection, selectors.EVENT_READ)
        while (left_s := deadline - time.monotonic()) > 0:
            selector.select(left_s)
            for _ in connection.receive():
                return True
    return False
