"""The control page: shared memory through which ranks of one host synchronise, exchange messages and notice failure.

Layout. Each rank has a row of words and three message slots, which it alone writes and all ranks read.
Behind them lies memory for the mailboxes of all pairs of ranks (mailbox.py). A slot holds the length of a message in 8
bytes, little endian, and then the message, or a piece of a longer one. The words of a row:

    _PID, _START      id and start time of the rank's process, by which the others see whether it runs
    _ARRIVED          the number of the last barrier at which it has arrived
    _LEFT             0, or how it has left: _GONE_QUIETLY, or _GONE_WITH_ERROR, with the error in its third slot
    _PROGRESS         how often it has reported that bytes move
    _REQUESTED        the number of a barrier at which it requests all ranks, as it has a failure to report there
    _GIVEN_UP         the number of the barrier that it has given up, if any
    _FINGERPRINT, _LOCATION   of its current call, two of each, by the parity of the barrier's number

A barrier (`sync`): a rank writes its arrival, then waits until it has read those of all. `enter` and `all_gather_bytes`
are barriers before which a rank writes its fingerprint, its location or its message, and after which it reads those of
the others. A rank arrives at a barrier only after it has read what belongs to the barrier before. So a rank that has
passed barrier n + 1 may overwrite what it wrote for barrier n: two copies suffice, chosen by the parity of the number.
A message that is longer than a slot goes in pieces, with a barrier for each; all ranks see the lengths with the first.

Memory order. Words are aligned and stored whole, and x86-64 keeps stores in order: so a rank that reads an arrival can
also read all that was written before it. On other processors the page is not used.

Failure. A rank gives up a barrier at its deadline, at an interrupt, or when a rank that has not arrived has died or
left. It sees a death by process id and start time, which it checks every 50 ms while it waits. It takes its arrival
back, and leaves with the error. So the barrier fails on all ranks that have not passed it: they find this rank missing,
and raise its error. A rank that reads the last arrival at that very moment passes, with right results, since an arrival
means that the rank's part is written; it raises at its next barrier, where this rank is missing. A rank that leaves
with an error writes the error before _LEFT, so that a rank that reads _LEFT can read the error.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from statexchange.comm import forks
from statexchange.comm.failure.monitor import FailureMonitor
from statexchange.comm.wait import Pace, Wait
from statexchange.errors import (
    NotInitializedError,
    PeerError,
    StateExchangeError,
    StorageError,
    from_record,
    to_record,
)
from statexchange.processes import process_is_alive, process_is_stopped, process_start, usable_cores
from statexchange.shared_memory import Arena, Attached, attach

_LENGTH_BYTES = 8
_ROW_WORDS = 16
_PID, _START, _ARRIVED, _LEFT, _PROGRESS, _REQUESTED = range(6)
_FINGERPRINT, _LOCATION = 6, 8  # two of each, by the arrival's parity
_GIVEN_UP = 10
_SLOT_BYTES = 1 << 16
_PIECE_BYTES = _SLOT_BYTES - _LENGTH_BYTES
_MAILBOX_BYTES = 1024
_GONE_QUIETLY, _GONE_WITH_ERROR = 1, 2
# One yield may take milliseconds on a busy core, and failures are checked for later.
_PACE = Pace(100, 1000, 0.05)


def _write_slot(slot: memoryview, length: int, piece: bytes) -> None:
    """Write a piece of a message, and the length of the whole one."""
    slot[:_LENGTH_BYTES] = length.to_bytes(_LENGTH_BYTES, "little")
    slot[_LENGTH_BYTES : _LENGTH_BYTES + len(piece)] = piece


def _length_in(slot: memoryview) -> int:
    return int.from_bytes(slot[:_LENGTH_BYTES], "little")


class DifferentCallsError(Exception):
    """Raised on all ranks of a barrier at which they have different fingerprints."""


class ControlPage(FailureMonitor):
    """One rank's side of the page. Collective calls must be made by all ranks in the same order.

    As a monitor it leaves `set_current_op` and `close` empty: the page holds arrivals and leaving already.
    """

    def __init__(self, memory: memoryview, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._words = memory[: world_size * _ROW_WORDS * 8].cast("Q")
        self._slots = memory[world_size * _ROW_WORDS * 8 :]
        self._count = 0
        # Where the rows begin in `_words`
        self._own_row = rank * _ROW_WORDS
        self._rows = range(0, world_size * _ROW_WORDS, _ROW_WORDS)
        self._rows_of_others = [row for row in self._rows if row != self._own_row]
        # Spinning on a core that the missing rank needs would only delay that rank.
        self._pace = _PACE if world_size <= usable_cores() else _PACE._replace(spins=0)
        self._set(_START, process_start(os.getpid()) or 0)
        self._set(_PID, os.getpid())
        forks.cut_off_in_children(self)

    def disown(self) -> None:
        """Replace the shared page by a private one, so that this forked child cannot write to its parent's."""
        nbytes = self._words.nbytes
        private = memoryview(bytearray(nbytes + len(self._slots)))
        self._words, self._slots = private[:nbytes].cast("Q"), private[nbytes:]
        # Then `enter` raises here, and `leave` has nothing to do.
        self._set(_LEFT, _GONE_QUIETLY)

    @staticmethod
    def nbytes(world_size: int) -> int:
        """Size of a page for `world_size` ranks."""
        return world_size * (_ROW_WORDS * 8 + 3 * _SLOT_BYTES + world_size * _MAILBOX_BYTES)

    def mailbox_memory(self, src: int, dst: int) -> memoryview:
        """Return the memory, zeros at first, for what `src` sends to `dst`."""
        begin = 3 * self.world_size * _SLOT_BYTES + (src * self.world_size + dst) * _MAILBOX_BYTES
        return self._slots[begin : begin + _MAILBOX_BYTES]

    def has_left(self, rank: int) -> bool:
        """Whether `rank` has announced leaving."""
        return bool(self._get(rank, _LEFT))

    def _set(self, word: int, value: int) -> None:
        self._words[self.rank * _ROW_WORDS + word] = value

    def _get(self, rank: int, word: int) -> int:
        return self._words[rank * _ROW_WORDS + word]

    def all_gather_bytes(self, payload: bytes, root: int | None, fingerprint: int, wait: Wait) -> list[bytes]:
        """Return every rank's payload, in rank order, on `root` and [] elsewhere; on all ranks if root is None.

        Collective.

        Blocks until all ranks have arrived. Raises PeerError, within about a second, if a rank has left or died, and
        StallError, with all missing ranks, if no rank has made progress for the wait's time. If the fingerprints
        differ, all ranks raise DifferentCallsError, and none reads a message.
        """
        self._post(payload, 0)
        self.enter(fingerprint, None, wait)
        slots = self._slots_of_all()
        lengths = list(map(_length_in, slots))
        messages = [bytearray() for _ in slots]
        # All ranks take part in the barriers of the longest message, also those whose own one has ended.
        for begin in range(0, max(lengths), _PIECE_BYTES):
            if begin:
                self._post(payload, begin)
                self.sync(wait)
                slots = self._slots_of_all()  # the other ones: the barrier's number has changed
            if root in (None, self.rank):
                # Of a message that has ended the slot still has an earlier piece.
                for rank, length in enumerate(lengths):
                    messages[rank] += slots[rank][_LENGTH_BYTES:][: max(length - begin, 0)]
        return list(map(bytes, messages)) if root in (None, self.rank) else []

    def enter(self, fingerprint: int, location: int | None, wait: Wait) -> Sequence[int]:
        """Return every rank's `location`; raise DifferentCallsError, on all, unless fingerprints are equal.

        Collective. A call that needs no locations gives None on all ranks, and gets ().
        """
        parity = (self._count + 1) & 1
        words = self._words
        if words[self._own_row + _LEFT]:
            raise closed_error(self.rank)
        words[self._own_row + _FINGERPRINT + parity] = fingerprint
        if location is not None:
            words[self._own_row + _LOCATION + parity] = location
        self.sync(wait)
        for row in self._rows_of_others:
            if words[row + _FINGERPRINT + parity] != fingerprint:
                raise DifferentCallsError
        if location is None:
            return ()
        return [words[row + _LOCATION + parity] for row in self._rows]

    def _slot(self, rank: int, which: int) -> memoryview:
        begin = (rank * 3 + which) * _SLOT_BYTES
        return self._slots[begin : begin + _SLOT_BYTES]

    def _slots_of_all(self) -> list[memoryview]:
        """Return the slot of every rank that belongs to the barrier that this one has passed."""
        return [self._slot(rank, self._count & 1) for rank in range(self.world_size)]

    def _post(self, message: bytes, begin: int) -> None:
        """Write the piece of a message that begins there, for the next barrier."""
        _write_slot(self._slot(self.rank, (self._count + 1) & 1), len(message), message[begin : begin + _PIECE_BYTES])

    def attach(self, address: dict[str, Any], rank: int, wait: Wait) -> Attached:
        """Map memory of `rank`; raise why that rank has left, or PeerError, if it is gone. Not collective."""
        try:
            return attach(address)
        except StorageError as error:
            if error.errno not in (errno.ENOENT, errno.ESRCH):
                raise
            # A process that is killed loses its memory a moment before it counts as dead.
            gone = PeerError(rank, wait.operation, "its shared memory is gone: its process died")
            raise self.departure_of(rank, wait.operation) or gone from error

    def sync(self, wait: Wait) -> None:
        """Return when all ranks are here: a barrier without a comparison, for the inside of a collective."""
        count = self._count = self._count + 1
        # Without `_get` and `_set`: a call with a small tensor is hardly more than this.
        words = self._words
        words[self._own_row + _ARRIVED] = count
        try:
            for row in self._rows_of_others:
                if words[row + _ARRIVED] < count:
                    wait.until(self._are_all_here, self._pace, self)
                    break
        except BaseException:
            self._set(_GIVEN_UP, count)  # first, so that the others do not name this rank as one that did not come
            words[self._own_row + _ARRIVED] = count - 1  # taken back, see the top of this file
            raise

    def _are_all_here(self) -> bool:
        """Whether all ranks have arrived at this rank's barrier."""
        words = self._words
        return all(words[row + _ARRIVED] >= self._count for row in self._rows_of_others)

    def check(self, operation: str) -> None:
        """Raise PeerError if a rank has died, or the error with which one has left. This rank awaits `operation`.

        A rank that has closed its communicator is no failure unless it is missing at this rank's barrier.
        """
        for rank in range(self.world_size):
            reason = self.departure_of(rank, operation)
            is_missing = self._get(rank, _ARRIVED) < self._count  # read last: it may have arrived and left meanwhile
            if reason is not None and (is_missing or self._get(rank, _LEFT) != _GONE_QUIETLY):
                raise reason

    def departure_of(self, rank: int, operation: str) -> StateExchangeError | None:
        """Return why `rank` will not reach `operation`: it has left with an error, closed or died; None if it may."""
        alive = self.can_see(rank)
        left = self._get(rank, _LEFT)  # read last: a rank may write its error and die between the two readings
        if left == _GONE_WITH_ERROR:
            slot = self._slot(rank, 2)
            return from_record(json.loads(bytes(slot[_LENGTH_BYTES:][: _length_in(slot)])))
        if left == _GONE_QUIETLY:
            return PeerError(rank, operation, "it closed its communicator, or its script ended")
        return None if alive else PeerError(rank, operation, f"its process {self._get(rank, _PID)} died")

    def missing_ranks(self) -> tuple[int, ...]:
        """Return the ranks that have not arrived at this rank's barrier, else those whose process is stopped."""
        behind = []
        for rank in range(self.world_size):
            # A rank that has given up has taken its arrival back, but it was here.
            if max(self._get(rank, _ARRIVED), self._get(rank, _GIVEN_UP)) < self._count:
                behind.append(rank)
        return tuple(behind) or self.silent_ranks()

    def silent_ranks(self) -> tuple[int, ...]:
        """Return the ranks whose process is stopped."""
        return tuple(r for r in range(self.world_size) if process_is_stopped(self._get(r, _PID)))

    def can_see(self, rank: int) -> bool:
        """Whether the process of `rank` runs; False, too, in a PID namespace where this process cannot see it."""
        return process_is_alive(self._get(rank, _PID), self._get(rank, _START))

    def report_progress(self) -> None:
        """Report that bytes move, which puts off all deadlines."""
        self._set(_PROGRESS, self._get(self.rank, _PROGRESS) + 1)

    def progress_count(self) -> int:
        """Return how often the ranks have reported progress."""
        return sum(self._get(r, _PROGRESS) for r in range(self.world_size))

    def request_collective(self) -> None:
        """Request all ranks at this rank's next barrier; ranks in `progress`, `send` or `recv` raise AbandonedError."""
        self._set(_REQUESTED, self._count + 1)

    def collective_requested(self) -> bool:
        """Whether a rank has requested all ranks at a barrier that this one has not reached yet."""
        return any(self._get(r, _REQUESTED) > self._count for r in range(self.world_size))

    def leave(self, error: BaseException | None = None) -> None:
        """Announce that this rank will not arrive any more, and why. Not collective."""
        if self._get(self.rank, _LEFT):
            return
        if error is not None:
            record = json.dumps(to_record(error, self.rank, "its own code")).encode()
            if len(record) > _PIECE_BYTES:
                # An error of the user's code may have any length. In ASCII, 1000 characters are few bytes as JSON.
                short = PeerError(self.rank, "its own code", ascii(error)[:1000])
                record = json.dumps(to_record(short, self.rank, "its own code")).encode()
            _write_slot(self._slot(self.rank, 2), len(record), record)
            self._set(_LEFT, _GONE_WITH_ERROR)  # after the record, see the top of this file
        else:
            self._set(_LEFT, _GONE_QUIETLY)

    def report_failure(self, error: StateExchangeError) -> None:
        """Announce that this rank will not arrive any more, and why. Not collective."""
        self.leave(error)


def closed_error(rank: int, since: str = "") -> NotInitializedError:
    """Return the error for a call of a closed communicator; `since`, if known, is the reason, as text."""
    return NotInitializedError(
        f"this communicator is closed{since}: make a new one, as shutdown() and init() do", rank=rank
    )


def open_control_page(
    rank: int, world_size: int, all_gather_bytes: Callable[[bytes], list[bytes]]
) -> ControlPage | None:
    """Open a control page among ranks that can so far only exchange bytes.

    Collective. None, on all ranks, if they cannot share memory or see each other's processes. That is tried, not
    derived from host names, as containers may separate /proc. `all_gather_bytes` returns every rank's bytes.
    """
    arena: Arena | None = None
    page: ControlPage | None = None
    offer = None
    if rank == 0:
        with contextlib.suppress(StateExchangeError):  # the others get null: all fall back together
            arena = Arena.create(ControlPage.nbytes(world_size))
            offer = arena.address
    address = json.loads(all_gather_bytes(json.dumps(offer).encode())[0])
    if address is not None:
        with contextlib.suppress(StateExchangeError):
            page = ControlPage(attach(address).view, rank, world_size)  # its row has the process id from now on
    problem = b""
    if page is None:
        problem = b"no page"
    # Also a barrier: the arena stays open until the last rank has attached, and lives on in their mappings.
    have_all_attached = not any(all_gather_bytes(problem))
    if arena is not None:
        arena.close()
    if page is None or not have_all_attached:
        return None
    # All rows have their process ids now: each rank wrote its own before the gathering above.
    if not all(map(page.can_see, range(world_size))):  # as across PID namespaces
        problem = b"a hidden process"
    return None if any(all_gather_bytes(problem)) else page
