"""The coordinator of failure detection between hosts: rank 0. detector.py describes the protocol.

It keeps for each rank the number of its call and its progress, and sends the status of the group to all members. Any
program that reaches the port may connect. A connection counts as a member's only after it has sent the nonce that rank
0 has given to its ranks, and a malformed message ends the connection.
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any

from statexchange.comm.failure.connection import ConnectionEndedError, JsonConnection
from statexchange.comm.failure.detector import FailureDetector
from statexchange.comm.topology import Topology


class Coordinator(FailureDetector):
    """Rank 0: receives from all members, and sends to all."""

    def __init__(self, topology: Topology, pids: Sequence[int], listener: socket.socket, nonce: str) -> None:
        """`pids`: the process id of every rank."""
        super().__init__(topology)
        self._pids = pids
        self._nonce = nonce
        self._connections: dict[int, JsonConnection] = {}
        self._received_at = [time.monotonic()] * self._world_size
        self._progress_of = [0] * self._world_size
        self._listener = listener
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def _handle_input(self, connection: JsonConnection | None) -> None:
        if connection is None:
            self._accept()
            return
        try:
            for message in connection.receive():
                if connection.rank < 0:
                    self._introduce(connection, message)
                else:
                    self._take_message(connection.rank, message)
        except (ConnectionEndedError, ValueError, TypeError, LookupError):  # any program may have connected
            self._lose(connection)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            self._selector.register(connection, selectors.EVENT_READ, JsonConnection(connection))

    def _take_message(self, rank: int, message: Any) -> None:
        """Take a message of any rank, this one among them."""
        kind, *rest = message
        self._received_at[rank] = time.monotonic()
        if kind == "at":
            self._view.op_numbers[rank], self._progress_of[rank] = int(rest[0]), int(rest[1])
            return  # goes to the others with the next periodic status; what follows goes at once
        if kind == "failure":
            self._failure = self._failure or rest[0]
        elif kind == "collective_requested":
            self._view.requested_op = max(self._view.requested_op, int(rest[0]))
        else:  # "goodbye"
            self._view.departed[rank] = (rest[0], rest[1])
        for connection in self._connections.values():
            connection.send(self._status())

    def _post(self, message: list[object]) -> None:
        self._take_message(0, message)

    # Connections

    def _introduce(self, connection: JsonConnection, message: Any) -> None:
        """Take the first message of a connection: the nonce, and the rank whose connection this is from now on."""
        nonce, rank = message
        # Not by `!=`, whose time would tell how many of its characters are right.
        if not hmac.compare_digest(str(nonce), self._nonce) or not 0 < rank < self._world_size:
            raise ConnectionEndedError
        connection.rank = rank
        self._connections[rank] = connection
        self._seen_dead_at.pop(rank, None)
        self._received_at[rank] = time.monotonic()
        connection.send(self._status())

    def _lose(self, connection: JsonConnection) -> None:
        self._selector.unregister(connection.connection)
        connection.close()
        # Else the member has connected again, and this is its earlier connection.
        if self._connections.get(connection.rank) is connection:
            del self._connections[connection.rank]
            if connection.rank not in self._view.departed:
                self._seen_dead_at.setdefault(connection.rank, time.monotonic())

    # What is sent to all

    def _send_status(self) -> None:
        self._post(["at", self._op_number, self._progress])
        view = self._view
        view.progress_count = sum(self._progress_of)
        view.updated = now = time.monotonic()
        silent = []
        for rank, received_at in enumerate(self._received_at):
            if now - received_at > self._silent_s and rank not in view.departed:
                silent.append(rank)
        view.silent = silent  # assigned whole: other threads read it
        for connection in self._connections.values():
            connection.flush()
            if not connection.has_unsent:  # else it reads nothing, as it is stopped: do not keep ever more for it
                connection.send(self._status())

    def _cause_of_death(self, rank: int) -> str:
        return f"its process {self._pids[rank]} died"

    def _status(self) -> dict[str, object]:
        return {**vars(self._view), "failure": self._failure}
