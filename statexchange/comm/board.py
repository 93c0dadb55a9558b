"""The failure board of ranks on several hosts: who has failed and who has not come, known without asking anybody.

Rank 0 keeps the board, and every other rank holds one connection to it. A thread on each rank says four times a second
in which of its collectives it is, and hears the same of all. A failure that a rank tells goes to all at once. A
connection that ends without a farewell means that a process has ended, which the kernel reports the moment it happens,
even when it was killed; ranks of one host also look at each other's processes. A host that is cut off ends nothing:
it falls silent, and whoever waits for its ranks when the deadline comes finds them missing.

A rank that gives up waiting in its n-th call must not simply raise, as another one may just be completing that call:

1. It asks rank 0 to close call n.
2. Rank 0 notes that the call is closed, and sends that to all ranks.
3. Each rank replies whether it has passed the call, that is whether all that it waited for has come. A rank that has
   died or left without having passed counts as one that has not.
4. Rank 0 decides by the rule of `outcome`, and sends the decision. If a rank has passed, the others wait a little
   longer for what is on its way to them; if none has, all raise. If one does not reply, because it is stopped or its
   host is cut off, the decision is UNKNOWN, and a wait that ran out is an OutcomeUnknownError.

The order that this rests on: a rank writes that it has passed before it reads whether the call is closed, and its
thread here writes that the call is closed before it reads whether the rank has passed. So a rank that replies no finds
the call closed before it goes on, and waits for the decision. A call that nobody gives up sends no message for this.
"""

from __future__ import annotations

import atexit
import contextlib
import hmac
import json
import logging
import os
import queue
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from statexchange.comm import forks
from statexchange.comm.backend import Backend, Wait
from statexchange.comm.network import own_addresses
from statexchange.comm.outcome import CLOSING, FAILED, HERE, PASSED, SEEN, UNKNOWN, next_phase
from statexchange.errors import (
    OutcomeUnknownError,
    PeerError,
    StallError,
    StateExchangeError,
    from_record,
    to_record,
)
from statexchange.processes import process_is_alive, process_start

if TYPE_CHECKING:
    from statexchange.comm.session import Place

__all__ = ["Board", "open_board"]

_PERIOD_S = 0.25  # between two words of a rank, in worlds of up to _CROWD ranks; in larger ones longer
_CROWD = 128
_SILENT_PERIODS = 6
_GRACE_S = 0.4  # for a farewell, or a second connection, to be seen before a process is said to have died
_CONNECT_S = 1.0
_CALL_S = 0.5
_PART_S = 0.5
_ENOUGH_REFUSALS = 2
_TELL_S = 1.0
_JOIN_S = 2.0
_DECISION_NAP_S = 1e-3
_LINE_BYTES = 1 << 20

_log = logging.getLogger(__name__)


class _EndedError(Exception):
    """The other end of a line is gone, or talks nonsense."""


class _Line:
    """A connection that carries one JSON value per line, and never blocks."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.rank = -1  # until it has said who it is
        self._in = bytearray()
        self._out = bytearray()

    @property
    def busy(self) -> bool:
        """Whether something said before has not left yet."""
        return bool(self._out)

    def say(self, message: Any) -> None:
        """Send `message`, now or by later calls of `flush`."""
        self._out += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what can be sent; a lost connection shows when it is read."""
        with contextlib.suppress(OSError):
            while self._out:
                del self._out[: self.connection.send(self._out)]

    def hear(self) -> Iterator[Any]:
        """The messages that have come; _EndedError when no more will."""
        ended = False
        try:
            while data := self.connection.recv(1 << 16):
                self._in += data
            ended = True
        except BlockingIOError:
            pass
        except OSError:
            ended = True
        *lines, self._in = self._in.split(b"\n")
        try:
            yield from [json.loads(line) for line in lines]
        except ValueError:
            ended = True
        if ended or len(self._in) > _LINE_BYTES:
            raise _EndedError

    def hang_up(self, deadline: float) -> None:
        """Wait until what was said has arrived: closing with words unread would take our last ones back."""
        with contextlib.suppress(OSError):
            self._within(deadline)
            self.connection.sendall(self._out)
            self.connection.shutdown(socket.SHUT_WR)
            while self.connection.recv(1 << 16):
                self._within(deadline)

    def _within(self, deadline: float) -> None:
        self.connection.settimeout(max(0.001, deadline - time.monotonic()))

    def close(self) -> None:
        """End the connection."""
        self.connection.close()


@dataclass
class _View:
    """What rank 0 knows of all ranks."""

    sequence: list[int]
    silent: list[int] = field(default_factory=list)
    left: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Ranks that took leave: after which of their collectives, and how."""
    called: int = 0
    """The latest collective to which a rank has called all."""
    moves: int = 0
    """How often ranks have said that they move bytes."""
    heard: float = field(default_factory=time.monotonic)


@dataclass
class _PendingDecision:
    """State of a closed call that awaits rank 0's decision."""

    record: dict[str, Any]
    deadline: float
    answered: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class _Offer:
    """Where the board is, and how the ranks of this world know it from others."""

    addresses: list[str]
    port: int
    nonce: str


class Board:
    """One rank's side of the board: the `Look` of communicators that span hosts. Made by `open_board`."""

    def __init__(self, place: Place, processes: Sequence[tuple[int, int]]) -> None:
        """`processes`: the id and start time of every rank's process."""
        self._place = place
        self._processes = processes
        self._mates = [rank for rank in place.mates if rank != place.rank and process_is_alive(*processes[rank])]
        self._sequence = 0
        self._doing = "its own code"
        self._moves = 0
        self._passed = 0  # the last call of which this rank has all that it needs
        self._closed: dict[int, int] = {}  # calls that a rank has given up; CLOSING, or the decision
        self._failure: dict[str, Any] | None = None
        self._view = _View([0] * self._world_size)
        self._gone: dict[int, float] = {}  # when a process was first seen to have ended
        self._period_s = _PERIOD_S * max(1.0, self._world_size / _CROWD)
        self._silent_s = _SILENT_PERIODS * self._period_s
        self._notes: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = queue.SimpleQueue()
        self._farewell: str | None = None
        self._selector = selectors.DefaultSelector()
        self._bell, self._string = socket.socketpair()
        self._bell.setblocking(False)
        self._string.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._is_inherited = False
        self._thread = threading.Thread(target=self._run, name=f"statexchange board {place.rank}", daemon=True)

    @property
    def _world_size(self) -> int:
        return len(self._place.nodes)

    def start(self) -> None:
        """Begin to take part."""
        forks.cut_off_in_children(self)
        atexit.register(self.close, "its process ended")
        self._thread.start()

    def entered(self, doing: str) -> None:
        """This rank has come to its next collective, which all ranks count. Not collective; costs nothing."""
        self._passed = self._sequence  # also of a call in which all ranks have met with an error
        self._sequence += 1
        self._doing = doing

    def passed(self) -> None:
        """This rank has all that it needs of its call; raises if the ranks have given it up. Not collective.

        Blocks only if the call is closed, and then for the decision.
        """
        number = self._sequence
        self._passed = number
        if next_phase(SEEN, HERE, CLOSING if number in self._closed else HERE, False) != PASSED:
            self._await_decision(number, None)

    def give_up(self, error: StateExchangeError) -> None:
        """Close this rank's call: return if another rank has passed; else raise `error`, or OutcomeUnknownError.

        Not collective. Blocks until rank 0 has decided. If rank 0 itself is what has failed, `error` says so.
        """
        number = self._sequence
        if isinstance(error, PeerError) and error.rank == 0:
            raise error
        record = to_record(error, self._place.rank, self._doing)
        self._have_said(lambda: self._close_call(number, record))
        self._await_decision(number, error)

    def _await_decision(self, number: int, error: StateExchangeError | None) -> None:
        deadline = time.monotonic() + 3 * self._silent_s
        phase = CLOSING
        while phase == CLOSING:
            decision = self._closed.get(number, CLOSING)
            is_known = decision in (PASSED, FAILED)
            gives_up = decision == UNKNOWN or time.monotonic() > deadline
            phase = next_phase(CLOSING, HERE, decision if is_known else HERE, gives_up)
            if phase == CLOSING:
                time.sleep(_DECISION_NAP_S)
        if phase == PASSED:
            return
        known = error or (from_record(self._failure) if self._failure is not None else None)
        if known is not None and (phase == FAILED or not isinstance(known, StallError)):
            raise known
        missing = (known.missing if isinstance(known, StallError) else ()) or self.missing()
        what = known.message if known is not None else f"{self._doing} was given up"
        who = f"ranks {list(missing)}" if missing else "some ranks"
        raise OutcomeUnknownError(
            f"{what}; whether other ranks have completed it is not known, as {who} do not answer",
            missing=missing,
            rank=missing[0] if missing else None,
        ) from error

    def failed(self, doing: str) -> None:
        """Raise the failure that is known; PeerError if a rank took leave that this one, which waits for `doing`,
        needs. Not collective."""
        failure = self._failure
        if failure is not None:
            # A death has no phase of its own: what matters is what waits for the dead.
            raise from_record(failure if failure.get("phase") != "" else {**failure, "phase": doing})
        for rank, (sequence, cause) in tuple(self._view.left.items()):
            if sequence < self._sequence and rank != self._place.rank:
                raise self._peer_error(rank, doing, cause)

    def departure_of(self, rank: int, doing: str) -> StateExchangeError | None:
        """Why `rank` will not come to `doing`, if it has taken leave. Not collective."""
        left = self._view.left.get(rank)
        return None if left is None else self._peer_error(rank, doing, left[1])

    def missing(self) -> tuple[int, ...]:
        """The ranks that are in an earlier collective than this one, or silent; () if unknown. Not collective."""
        view = self._view
        if time.monotonic() - view.heard > self._silent_s:
            return self._suspects()
        behind = {rank for rank, sequence in enumerate(view.sequence) if sequence < self._sequence}
        return tuple(sorted((behind | set(view.silent)) - {self._place.rank}))

    def tell(self, error: StateExchangeError) -> None:
        """Post what this communicator has failed of; the first post counts. Not collective; blocks a second at most."""
        number, record = self._sequence, to_record(error, self._place.rank, self._doing)

        def note() -> None:
            self._post(record)
            self._close_call(number, record)

        self._have_said(note)

    def call_all(self) -> None:
        """Have ranks that wait for single ones come to this rank's next collective. Not collective; as `tell`."""
        sequence = self._sequence + 1
        self._have_said(lambda: self._call_to(sequence))

    def is_called(self) -> bool:
        """Whether a rank has called all to a collective to which this one has not come. Not collective."""
        return self._view.called > self._sequence

    def progress(self) -> None:
        """Say, with what is said anyway, that bytes move. Not collective; costs nothing."""
        self._moves += 1

    def moves(self) -> int:
        """How often the ranks have said so, as far as this one knows. Not collective."""
        return self._view.moves

    def _have_said(self, note: Callable[[], None]) -> None:
        if self._thread.is_alive():
            posted = threading.Event()
            self._notes.put((note, posted))
            self._ring()
            posted.wait(_TELL_S)

    def close(self, farewell: str = "it closed its communicator") -> None:
        """Take leave: ranks that wait for this one in a later collective raise PeerError. Not collective."""
        if self._is_inherited or self._farewell is not None:
            return
        atexit.unregister(self.close)
        self._farewell = farewell
        self._ring()
        self._thread.join(_JOIN_S)

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # full: it rings already
            self._string.send(b"!")

    def _peer_error(self, rank: int, phase: str, cause: str) -> PeerError:
        return PeerError(rank, phase, cause, self._place.hosts[rank])

    # The thread

    def _run(self) -> None:
        try:
            due = 0.0
            while self._farewell is None:
                self._attend(max(0.0, min(due - time.monotonic(), self._until_verdict())))
                if time.monotonic() >= due:
                    due = time.monotonic() + self._period_s
                    self._look_at_mates()
                    self._speak()
                self._judge()
            self._deliver()
            self._say_farewell()
        finally:
            self.drop()

    def _attend(self, wait_s: float) -> None:
        """Handle what comes within `wait_s`."""
        for key, _ in self._selector.select(wait_s):
            if key.fileobj is self._bell:
                with contextlib.suppress(BlockingIOError):
                    self._bell.recv(1 << 12)
            else:
                self._hear(key.data)
        self._deliver()

    def _deliver(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                note, posted = self._notes.get_nowait()
                note()
                posted.set()

    def _look_at_mates(self) -> None:
        now = time.monotonic()
        for rank in self._mates:
            with contextlib.suppress(OSError):  # who cannot look, for want of file descriptors, says nothing
                if not process_is_alive(*self._processes[rank]):
                    self._gone.setdefault(rank, now)

    def _until_verdict(self) -> float:
        return max(0.0, min(self._gone.values()) + _GRACE_S - time.monotonic()) if self._gone else self._period_s

    def _judge(self) -> None:
        """Post those as dead whose process ended, and who have not taken leave after all."""
        now = time.monotonic()
        for rank, since in list(self._gone.items()):
            if rank in self._view.left:
                del self._gone[rank]
            elif now - since >= _GRACE_S:
                self._post_death(rank)
                del self._gone[rank]
                self._mates = [mate for mate in self._mates if mate != rank]

    def _post_death(self, rank: int) -> None:
        self._post(to_record(self._peer_error(rank, "", self._cause_of(rank)), rank, ""))

    def disown(self) -> None:
        """Drop the copy of the parent's connections: while they are open, nobody sees that the parent has ended."""
        self._is_inherited = True
        self.drop()

    def drop(self) -> None:
        """Close this process's end of everything, saying nothing. Not collective."""
        forks.forget(self)
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()
        self._string.close()

    # What the keeper and the visitors do differently

    def _hear(self, line: _Line | None) -> None:
        raise NotImplementedError

    def _speak(self) -> None:
        raise NotImplementedError

    def _post(self, record: dict[str, Any]) -> None:
        raise NotImplementedError

    def _call_to(self, sequence: int) -> None:
        raise NotImplementedError

    def _close_call(self, number: int, record: dict[str, Any]) -> None:
        raise NotImplementedError

    def _cause_of(self, rank: int) -> str:
        return f"its process {self._processes[rank][0]} died"

    def _suspects(self) -> tuple[int, ...]:
        raise NotImplementedError

    def _say_farewell(self) -> None:
        raise NotImplementedError


class _Keeper(Board):
    """Rank 0, which hears everybody and tells everybody."""

    def __init__(self, place: Place, processes: Sequence[tuple[int, int]], listener: socket.socket, nonce: str) -> None:
        super().__init__(place, processes)
        self._nonce = nonce
        self._lines: dict[int, _Line] = {}
        self._heard = [time.monotonic()] * self._world_size
        self._moves_of = [0] * self._world_size
        self._passed_of = [0] * self._world_size
        self._dead: set[int] = set()
        self._rounds: dict[int, _PendingDecision] = {}
        self._listener = listener
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def _hear(self, line: _Line | None) -> None:
        if line is None:
            self._welcome()
            return
        try:
            for message in line.hear():
                self._take(line, message)
        except (_EndedError, ValueError, TypeError, LookupError):  # a stranger may say anything
            self._lose(line)

    def _welcome(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            self._selector.register(connection, selectors.EVENT_READ, _Line(connection))

    def _take(self, line: _Line, message: Any) -> None:
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

    def _introduce(self, line: _Line, message: Any) -> None:
        nonce, rank = message
        if not hmac.compare_digest(str(nonce), self._nonce) or not 0 < rank < self._world_size:
            raise _EndedError
        line.rank = rank
        self._lines[rank] = line
        self._gone.pop(rank, None)
        self._heard[rank] = time.monotonic()
        line.say(self._news())

    def _lose(self, line: _Line) -> None:
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


class _Visitor(Board):
    """Any other rank."""

    def __init__(
        self, place: Place, processes: Sequence[tuple[int, int]], line: _Line, address: str, offer: _Offer
    ) -> None:
        super().__init__(place, processes)
        self._address = address
        self._offer = offer
        self._line: _Line | None = line
        self._selector.register(line.connection, selectors.EVENT_READ, line)
        self._refusals = 0
        self._host_answers: bool | None = None  # while the keeper is silent
        self._called = 0.0

    def _hear(self, line: _Line | None) -> None:
        assert line is not None
        try:
            for news in line.hear():
                self._learn(news)
        except _EndedError:
            self._selector.unregister(line.connection)
            line.close()
            self._line = None
            self._refusals += 1
            self._call()

    def _learn(self, news: dict[str, Any]) -> None:
        left = {rank: (sequence, cause) for rank, sequence, cause in news["left"]}
        self._view = _View(news["sequence"], news["silent"], left, news["called"], news["moves"])
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
        self._line = _Line(connection)
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


def open_board(carrier: Backend, place: Place, timeout_s: float) -> Board | None:
    """The failure board of `carrier`'s ranks; None, on all of them, if some cannot reach it. Collective."""
    wait = Wait(timeout_s, "the meeting of all ranks")
    listener, offered = _serve(carrier.world_size) if carrier.rank == 0 else (None, None)
    try:
        ours = json.dumps([os.getpid(), process_start(os.getpid()) or 0, offered]).encode()
        answers = [json.loads(answer) for answer in carrier.exchange(ours, wait)]
    except BaseException:
        if listener is not None:
            listener.close()
        raise
    offer = _Offer(**answers[0][2]) if answers[0][2] is not None else None
    board = _take_part(place, [(pid, start) for pid, start, _ in answers], listener, offer)
    return _agree(board, carrier, wait, offer)


def _agree(board: Board | None, carrier: Backend, wait: Wait, offer: _Offer | None) -> Board | None:
    """`board`, if everybody has one."""
    try:
        answers = carrier.exchange(b"1" if board is not None else b"0", wait)
    except BaseException:
        if board is not None:
            board.close()
        raise
    without = [rank for rank, answer in enumerate(answers) if answer != b"1"]
    if not without:
        return board
    if board is not None:
        board.close()
    if carrier.rank == 0:
        where = f"{', '.join(offer.addresses)}, port {offer.port}" if offer is not None else "any address"
        _log.warning(
            "ranks %s cannot reach rank 0 at %s: only the transport and deadlines will tell of ranks that die",
            without,
            where,
        )
    return None


def _serve(world_size: int) -> tuple[socket.socket | None, dict[str, Any] | None]:
    """A socket at which to be called, and what the others need to know of it."""
    try:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        listener = socket.create_server(("", 0), family=family, backlog=world_size + 64, dualstack_ipv6=both)
    except OSError:
        return None, None  # said to the others as "no": all do without
    # Names last, as resolving them may take long.
    addresses = list(dict.fromkeys([*own_addresses(), "127.0.0.1", socket.gethostname()]))
    offer = {"addresses": addresses, "port": listener.getsockname()[1], "nonce": secrets.token_hex(16)}
    return listener, offer


def _take_part(
    place: Place, processes: list[tuple[int, int]], listener: socket.socket | None, offer: _Offer | None
) -> Board | None:
    """This rank's side, started; None if it cannot be."""
    if offer is None:
        return None
    board: Board | None
    board = (
        _Keeper(place, processes, listener, offer.nonce) if listener is not None else _visit(place, processes, offer)
    )
    if board is not None:
        board.start()
    return board


def _visit(place: Place, processes: list[tuple[int, int]], offer: _Offer) -> _Visitor | None:
    """A connection to the keeper, by the first address at which somebody knows the nonce."""
    for address in offer.addresses:
        try:
            line = _Line(socket.create_connection((address, offer.port), _CONNECT_S))
        except OSError:
            continue
        line.say([offer.nonce, place.rank])
        if _is_answered(line):
            return _Visitor(place, processes, line, address, offer)
        line.close()
    return None


def _is_answered(line: _Line) -> bool:
    deadline = time.monotonic() + _CONNECT_S
    with contextlib.suppress(_EndedError), selectors.DefaultSelector() as selector:
        selector.register(line.connection, selectors.EVENT_READ)
        while (left_s := deadline - time.monotonic()) > 0:
            selector.select(left_s)
            if any(True for _ in line.hear()):
                return True
    return False
