"""Rank 0 of the failure board, which hears everybody and tells everybody."""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from statexchange.comm.failure.connection import EndedError, JsonConnection
from statexchange.comm.failure.detector import Board
from statexchange.comm.failure.outcome import CLOSING, FAILED, HERE, PASSED, next_phase
from statexchange.comm.topology import Place

__all__ = ["Coordinator"]

_PART_S = 0.5


@dataclass
class _PendingDecision:
    """State of a closed call that awaits rank 0's decision."""

    record: dict[str, Any]
    deadline: float
    answered: set[int] = field(default_factory=set)


class Coordinator(Board):
    """Rank 0, which hears everybody and tells everybody."""

    def __init__(self, place: Place, processes: Sequence[tuple[int, int]], listener: socket.socket, nonce: str) -> None:
        super().__init__(place, processes)
        self._nonce = nonce
        self._lines: dict[int, JsonConnection] = {}
        self._heard = [time.monotonic()] * self._world_size
        self._moves_of = [0] * self._world_size
        self._passed_of = [0] * self._world_size
        self._dead: set[int] = set()
        self._rounds: dict[int, _PendingDecision] = {}
        self._listener = listener
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def _hear(self, line: JsonConnection | None) -> None:
        if line is None:
            self._welcome()
            return
        try:
            for message in line.hear():
                self._take(line, message)
        except (EndedError, ValueError, TypeError, LookupError):  # a stranger may say anything
            self._lose(line)

    def _welcome(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            self._selector.register(connection, selectors.EVENT_READ, JsonConnection(connection))

    def _take(self, line: JsonConnection, message: Any) -> None:
        if line.rank < 0:
            self._introduce(line, message)
            return
        kind, *rest = message
        self._heard[line.rank] = time.monotonic()
        if kind == "at":
            self._view.sequence[line.rank], self._moves_of[line.rank] = int(rest[0]), int(rest[1])
            self._passed_of[line.rank] = int(rest[2])
        elif kind == "failure":
            self._post(rest[0])
        elif kind == "called":
            self._call_to(int(rest[0]))
        elif kind == "closing":
            self._close_call(int(rest[0]), rest[1])
        elif kind == "answer":
            self._take_answer(line.rank, int(rest[0]), int(rest[1]))
        else:
            self._view.left[line.rank] = (rest[0], rest[1])
            self._passed_of[line.rank] = int(rest[2])
            self._tell_all()

    def _close_call(self, number: int, record: dict[str, Any]) -> None:
        if number in self._closed:
            return
        self._closed[number] = CLOSING
        self._rounds[number] = _PendingDecision(record, time.monotonic() + self._silent_s)
        self._passed_of[0] = self._passed  # after the call is noted as closed
        self._rounds[number].answered.add(0)
        self._tell_all()
        self._decide()

    def _take_answer(self, rank: int, number: int, passed: int) -> None:
        self._passed_of[rank] = max(self._passed_of[rank], passed)
        if number in self._rounds:
            self._rounds[number].answered.add(rank)
            self._decide()

    def _judge(self) -> None:
        super()._judge()
        self._decide()

    def _decide(self) -> None:
        """Decide closed calls of which enough is known."""
        for number, round_ in list(self._rounds.items()):
            phases = [self._phase_of(rank, number, round_) for rank in range(self._world_size)]
            late = time.monotonic() > round_.deadline
            phase = next_phase(CLOSING, min(phases), max(phases), late)
            if phase != CLOSING:
                del self._rounds[number]
                if phase == FAILED and self._failure is None:
                    self._failure = round_.record
                self._closed[number] = phase  # last: whoever sees FAILED in another thread looks for the failure
                self._tell_all()

    def _phase_of(self, rank: int, number: int, round_: _PendingDecision) -> int:
        if self._passed_of[rank] >= number:
            return PASSED
        has_ended = rank in self._dead or rank in self._view.left
        return CLOSING if has_ended or rank in round_.answered else HERE

    def _post_death(self, rank: int) -> None:
        self._dead.add(rank)
        super()._post_death(rank)

    def _introduce(self, line: JsonConnection, message: Any) -> None:
        nonce, rank = message
        if not hmac.compare_digest(str(nonce), self._nonce) or not 0 < rank < self._world_size:
            raise EndedError
        line.rank = rank
        self._lines[rank] = line
        self._gone.pop(rank, None)
        self._heard[rank] = time.monotonic()
        line.say(self._news())

    def _lose(self, line: JsonConnection) -> None:
        self._selector.unregister(line.connection)
        line.close()
        if self._lines.get(line.rank) is line:
            del self._lines[line.rank]
            if line.rank not in self._view.left:
                self._gone.setdefault(line.rank, time.monotonic())

    def _speak(self) -> None:
        now = time.monotonic()
        view = self._view
        view.sequence[0], self._moves_of[0] = self._sequence, self._moves
        view.moves = sum(self._moves_of)
        view.heard = self._heard[0] = now
        view.silent = [r for r, heard in enumerate(self._heard) if now - heard > self._silent_s and r not in view.left]
        for line in self._lines.values():
            line.flush()
            if not line.busy:
                line.say(self._news())

    def _news(self) -> dict[str, Any]:
        view = self._view
        left = [[rank, sequence, cause] for rank, (sequence, cause) in view.left.items()]
        return {
            "sequence": view.sequence,
            "silent": view.silent,
            "left": left,
            "called": view.called,
            "moves": view.moves,
            "failure": self._failure,
            "closed": list(self._closed.items()),
        }

    def _tell_all(self) -> None:
        news = self._news()
        for line in self._lines.values():
            line.say(news)

    def _post(self, record: dict[str, Any]) -> None:
        if self._failure is None:
            self._failure = record
            self._tell_all()

    def _call_to(self, sequence: int) -> None:
        self._view.called = max(self._view.called, sequence)
        self._tell_all()

    def _suspects(self) -> tuple[int, ...]:
        return ()  # only our own thread has been silent

    def _say_farewell(self) -> None:
        self._view.left[0] = (self._sequence, self._farewell or "")
        self._tell_all()
        deadline = time.monotonic() + _PART_S
        for line in self._lines.values():
            line.hang_up(deadline)
