"""Every rank of the failure board but rank 0: one connection, through which it learns all."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from statexchange.comm.failure.connection import EndedError, JsonConnection
from statexchange.comm.failure.detector import Board, View
from statexchange.comm.failure.outcome import CLOSING
from statexchange.comm.topology import Place

__all__ = ["Member", "Offer", "visit"]

_CONNECT_S = 1.0
_CALL_S = 0.5
_PART_S = 0.5
_ENOUGH_REFUSALS = 2


@dataclass(frozen=True)
class Offer:
    """Where the board is, and how the ranks of this world know it from others."""

    addresses: list[str]
    port: int
    nonce: str


class Member(Board):
    """Any other rank."""

    def __init__(
        self, place: Place, processes: Sequence[tuple[int, int]], line: JsonConnection, address: str, offer: Offer
    ) -> None:
        super().__init__(place, processes)
        self._address = address
        self._offer = offer
        self._line: JsonConnection | None = line
        self._selector.register(line.connection, selectors.EVENT_READ, line)
        self._refusals = 0
        self._host_answers: bool | None = None  # while the keeper is silent
        self._called = 0.0

    def _hear(self, line: JsonConnection | None) -> None:
        assert line is not None
        try:
            for news in line.hear():
                self._learn(news)
        except EndedError:
            self._selector.unregister(line.connection)
            line.close()
            self._line = None
            self._refusals += 1
            self._call()

    def _learn(self, news: dict[str, Any]) -> None:
        left = {rank: (sequence, cause) for rank, sequence, cause in news["left"]}
        self._view = View(news["sequence"], news["silent"], left, news["called"], news["moves"])
        self._refusals = 0
        self._host_answers = None
        self._gone.pop(0, None)
        if self._failure is None:
            self._failure = news["failure"]
        for number, decision in news["closed"]:
            self._closed[number] = decision  # before the look at what has passed
            if decision == CLOSING and self._line is not None:
                self._line.say(["answer", number, self._passed])

    def _speak(self) -> None:
        if self._line is not None:
            self._line.flush()
            if not self._line.busy:
                self._line.say(["at", self._sequence, self._moves, self._passed])
        silent = time.monotonic() - self._view.heard > self._silent_s and not self._host_answers
        if (self._line is None or silent) and time.monotonic() - self._called > _CALL_S:
            self._call()

    def _call(self) -> None:
        """The keeper has hung up, or is silent: see whether its process and its host are there."""
        if 0 in self._view.left or self._failure is not None:
            return
        try:
            connection = socket.create_connection((self._address, self._offer.port), _CALL_S)
        except ConnectionError:
            self._refusals += 1
        except OSError:
            self._host_answers = False
        else:
            self._host_answers = True
            self._connected(connection)
        self._called = time.monotonic()
        if self._refusals >= _ENOUGH_REFUSALS:
            self._gone.setdefault(0, time.monotonic())

    def _connected(self, connection: socket.socket) -> None:
        if self._line is not None:
            connection.close()
            return
        self._line = JsonConnection(connection)
        self._line.say([self._offer.nonce, self._place.rank])
        self._selector.register(connection, selectors.EVENT_READ, self._line)

    def _post(self, record: dict[str, Any]) -> None:
        if self._failure is None:
            self._failure = record
        if self._line is not None:
            self._line.say(["failure", record])

    def _call_to(self, sequence: int) -> None:
        if self._line is not None:
            self._line.say(["called", sequence])

    def _close_call(self, number: int, record: dict[str, Any]) -> None:
        if self._line is not None:
            self._line.say(["closing", number, record])

    def _cause_of(self, rank: int) -> str:
        known = rank != 0 or rank in self._mates
        return super()._cause_of(rank) if known else "its process or host is gone: the failure board does not answer"

    def _suspects(self) -> tuple[int, ...]:
        nodes = self._place.nodes
        if self._host_answers or nodes[0] == nodes[self._place.rank]:
            return (0,)
        return tuple(rank for rank, node in enumerate(nodes) if node == nodes[0])

    def _say_farewell(self) -> None:
        if self._line is not None:
            self._line.say(["left", self._sequence, self._farewell, self._passed])
            self._line.hang_up(time.monotonic() + _PART_S)


def visit(place: Place, processes: list[tuple[int, int]], offer: Offer) -> Member | None:
    """A connection to the keeper, by the first address at which somebody knows the nonce."""
    for address in offer.addresses:
        try:
            line = JsonConnection(socket.create_connection((address, offer.port), _CONNECT_S))
        except OSError:
            continue
        line.say([offer.nonce, place.rank])
        if _is_answered(line):
            return Member(place, processes, line, address, offer)
        line.close()
    return None


def _is_answered(line: JsonConnection) -> bool:
    deadline = time.monotonic() + _CONNECT_S
    with contextlib.suppress(EndedError), selectors.DefaultSelector() as selector:
        selector.register(line.connection, selectors.EVENT_READ)
        while (left_s := deadline - time.monotonic()) > 0:
            selector.select(left_s)
            if any(True for _ in line.hear()):
                return True
    return False
