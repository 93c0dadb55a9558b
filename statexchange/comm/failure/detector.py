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
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from statexchange.comm import forks
from statexchange.comm.failure.connection import JsonConnection
from statexchange.comm.failure.monitor import GroupMonitor
from statexchange.comm.failure.outcome import CLOSING, FAILED, HERE, PASSED, SEEN, UNKNOWN, next_phase
from statexchange.comm.topology import Place
from statexchange.errors import (
    OutcomeUnknownError,
    PeerError,
    StallError,
    StateExchangeError,
    from_record,
    to_record,
)
from statexchange.processes import process_is_alive

__all__ = ["Board", "View"]

_PERIOD_S = 0.25  # between two words of a rank, in worlds of up to _CROWD ranks; in larger ones longer
_CROWD = 128
_SILENT_PERIODS = 6
_GRACE_S = 0.4  # for a farewell, or a second connection, to be seen before a process is said to have died
_TELL_S = 1.0
_JOIN_S = 2.0
_DECISION_NAP_S = 1e-3


@dataclass
class View:
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


class Board(GroupMonitor):
    """One rank's side of the board: the monitor of communicators that span hosts. Made by `open_board`."""

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
        self._view = View([0] * self._world_size)
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

    def set_current_op(self, doing: str) -> None:
        """This rank has come to its next collective, which all ranks count. Not collective; costs nothing."""
        self._passed = self._sequence  # also of a call in which all ranks have met with an error
        self._sequence += 1
        self._doing = doing

    def complete_op(self) -> None:
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
        missing = (known.missing if isinstance(known, StallError) else ()) or self.missing_ranks()
        what = known.message if known is not None else f"{self._doing} was given up"
        who = f"ranks {list(missing)}" if missing else "some ranks"
        raise OutcomeUnknownError(
            f"{what}; whether other ranks have completed it is not known, as {who} do not answer",
            missing=missing,
            rank=missing[0] if missing else None,
        ) from error

    def check(self, doing: str) -> None:
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

    def missing_ranks(self) -> tuple[int, ...]:
        """The ranks that are in an earlier collective than this one, or silent; () if unknown. Not collective."""
        view = self._view
        if time.monotonic() - view.heard > self._silent_s:
            return self._suspects()
        behind = {rank for rank, sequence in enumerate(view.sequence) if sequence < self._sequence}
        return tuple(sorted((behind | set(view.silent)) - {self._place.rank}))

    def report_failure(self, error: StateExchangeError) -> None:
        """Post what this communicator has failed of; the first post counts. Not collective; blocks a second at most."""
        number, record = self._sequence, to_record(error, self._place.rank, self._doing)

        def note() -> None:
            self._post(record)
            self._close_call(number, record)

        self._have_said(note)

    def request_collective(self) -> None:
        """Have ranks that wait for single ones come to this rank's next collective. Not collective."""
        sequence = self._sequence + 1
        self._have_said(lambda: self._call_to(sequence))

    def collective_requested(self) -> bool:
        """Whether a rank has called all to a collective to which this one has not come. Not collective."""
        return self._view.called > self._sequence

    def report_progress(self) -> None:
        """Say, with what is said anyway, that bytes move. Not collective; costs nothing."""
        self._moves += 1

    def progress_count(self) -> int:
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

    def _hear(self, line: JsonConnection | None) -> None:
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
