"""The control page: one page of shared memory through which ranks of one host exchange messages and notice failure.

Each rank has a row of words and two message slots. An exchange is a full barrier: a rank writes its message into the
slot of the exchange's parity, then its arrival number; it reads when everybody has arrived. Nobody can arrive at the
next exchange but one before all have read, so two slots suffice. Words are aligned and stored whole, and x86-64 keeps
stores in order; elsewhere the page is not used.

A rank's arrival number and its phase in that meeting are one word, number * 4 + phase, that only this rank writes. What
becomes of a meeting when a rank gives up waiting is the rule of `outcome`: all ranks fail, or all succeed. Whatever
makes a rank give up, its deadline, a rank that has died or an interrupt, it writes CLOSING before it looks again. It
sleeps a millisecond in between, since x86-64 may delay a store past a later load, until its store buffer is empty.
"""

from __future__ import annotations

import json
import os
import time

from statexchange.comm import forks
from statexchange.comm.failure.monitor import GroupMonitor
from statexchange.comm.failure.outcome import ABSENT, CLOSING, FAILED, HERE, PASSED, SEEN, UNKNOWN, next_phase
from statexchange.comm.failure.slots import LENGTH_BYTES, SPILLED, is_spilled, read_slot, write_slot
from statexchange.comm.wait import Wait, yield_core
from statexchange.errors import (
    NotInitializedError,
    OutcomeUnknownError,
    PeerError,
    StallError,
    StateExchangeError,
    from_record,
    to_record,
)
from statexchange.processes import process_is_alive, process_is_stopped, process_start, usable_cores
from statexchange.shared_memory import Arena, Attached, Kind, attach

__all__ = ["ControlPage", "DifferentCallsError", "closed_error"]

_ROW_WORDS = 16
_PID, _START, _ARRIVED, _LEFT, _PROGRESS, _REQUESTED = range(6)
_FINGERPRINT, _LOCATION = 6, 8  # two of each, by the arrival's parity
_SLOT_BYTES = 4096
_BOX_BYTES = 1024
_KEPT_BYTES = 1 << 20  # longer messages are rare, and their memory is given back
_GONE_QUIETLY, _GONE_WITH_ERROR = 1, 2
_LIVENESS_PERIOD_S = 0.05
_PHASE_BITS = 2
_SETTLE_S = 1e-3
_UNKNOWN_S = 5.0  # for a rank that has arrived to run again, after another one has given up
_REASON_S = 1.0  # for a rank that has given up to say why
_SPINS = 100
_YIELDS = 1000
_YIELDING_S = 0.05  # beside other work one yield may take milliseconds, and failures are looked for afterwards


class DifferentCallsError(Exception):
    """Raised on all ranks of a meeting in which not all showed the same fingerprint."""


class ControlPage(GroupMonitor):
    """One rank's side of the page. Collective calls must be made by all ranks in the same order."""

    def __init__(
        self, memory: memoryview, rank: int, world_size: int, kind: Kind = "memfd", *, threads: bool = False
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.kind: Kind = kind
        self._threads = threads
        self._words = memory[: world_size * _ROW_WORDS * 8].cast("Q")
        self._slots = memory[world_size * _ROW_WORDS * 8 :]
        self._count = 0
        self._spill: dict[int, Arena] = {}
        self._attached: dict[int, tuple[str, Attached]] = {}
        self._arrivals = [r * _ROW_WORDS + _ARRIVED for r in range(world_size) if r != rank]
        self._mine = rank * _ROW_WORDS + _ARRIVED
        self._first = SEEN if world_size == 2 else HERE
        # Who waits on a core that a missing rank needs only delays it.
        self._spins = _SPINS if world_size <= usable_cores() and not threads else 0
        self._set(_START, process_start(os.getpid()) or 0)
        self._set(_PID, os.getpid())
        forks.cut_off_in_children(self)

    def disown(self) -> None:
        """Replace the shared page by a private one, so that this forked child cannot write to its parent's."""
        nbytes = self._words.nbytes
        private = memoryview(bytearray(nbytes + len(self._slots)))
        self._words, self._slots = private[:nbytes].cast("Q"), private[nbytes:]
        self._set(_LEFT, _GONE_QUIETLY)
        self._spill.clear()

    @staticmethod
    def nbytes(world_size: int) -> int:
        """Size of a page for `world_size` ranks."""
        return world_size * (_ROW_WORDS * 8 + 3 * _SLOT_BYTES + world_size * _BOX_BYTES)

    def mailbox_memory(self, src: int, dst: int) -> memoryview:
        """Zeros at first, for what `src` sends to `dst`."""
        begin = 3 * self.world_size * _SLOT_BYTES + (src * self.world_size + dst) * _BOX_BYTES
        return self._slots[begin : begin + _BOX_BYTES]

    def has_left(self, rank: int) -> bool:
        """Whether `rank` will not come any more, by its own word."""
        return bool(self._get(rank, _LEFT))

    def _set(self, word: int, value: int) -> None:
        self._words[self.rank * _ROW_WORDS + word] = value

    def _get(self, rank: int, word: int) -> int:
        return int(self._words[rank * _ROW_WORDS + word])

    def all_gather_bytes(self, payload: bytes, root: int | None, fingerprint: int, wait: Wait) -> list[bytes]:
        """Every rank's payload, in rank order, on `root` and [] elsewhere; on all ranks if root is None. Collective.

        Blocks until all ranks have arrived: a rank that has left or died is a PeerError within about a second, one
        that does not arrive while nobody makes progress for the wait's time a StallError naming all missing. If the
        others' `fingerprint` is another, DifferentCallsError on all ranks, and nobody reads anything.
        """
        parity = (self._count + 1) & 1
        self._post(payload, parity)
        self.enter(fingerprint, 0, wait)
        reads = root is None or root == self.rank
        answers = [self._read(r, parity) for r in range(self.world_size)] if reads else []
        if any(is_spilled(self._slot(r, parity)) for r in range(self.world_size)):
            self.sync(wait)  # a long message lives in its writer, who may leave once all have read
            if self.kind == "file" or any(arena.nbytes > _KEPT_BYTES for arena in self._spill.values()):
                self._drop_spills()
            self._attached = {key: kept for key, kept in self._attached.items() if len(kept[1].view) <= _KEPT_BYTES}
        return answers

    def enter(self, fingerprint: int, location: int, wait: Wait) -> list[int]:
        """Every rank's `location`; DifferentCallsError, on all ranks, unless all show one `fingerprint`. Collective."""
        self.raise_if_left()
        parity = (self._count + 1) & 1
        words = self._words
        mine = self.rank * _ROW_WORDS
        words[mine + _FINGERPRINT + parity] = fingerprint
        words[mine + _LOCATION + parity] = location
        self.sync(wait)
        rows = range(0, self.world_size * _ROW_WORDS, _ROW_WORDS)
        for row in rows:
            if words[row + _FINGERPRINT + parity] != fingerprint:
                raise DifferentCallsError
        return [words[row + _LOCATION + parity] for row in rows]

    def _slot(self, rank: int, which: int) -> memoryview:
        begin = (rank * 3 + which) * _SLOT_BYTES
        return self._slots[begin : begin + _SLOT_BYTES]

    def _post(self, payload: bytes, parity: int) -> None:
        flag = 0
        if len(payload) > _SLOT_BYTES - LENGTH_BYTES:
            payload, flag = self._spilled(payload, parity), SPILLED
        write_slot(self._slot(self.rank, parity), payload, flag)

    def _spilled(self, payload: bytes, parity: int) -> bytes:
        """Put a long message into an arena of its own; its address goes into the slot."""
        arena = self._spill.get(parity)
        if arena is None or arena.nbytes < len(payload):
            if arena is not None:
                arena.close()
            arena = self._spill[parity] = Arena.create(len(payload) + min(len(payload), _KEPT_BYTES // 4), self.kind)
        arena.view[: len(payload)] = payload
        return json.dumps({**arena.address, "length": len(payload)}).encode()

    def _read(self, rank: int, parity: int) -> bytes:
        data, flag = read_slot(self._slot(rank, parity))
        if not flag:
            return data
        address = json.loads(data)
        key = rank * 2 + parity
        if key not in self._attached or self._attached[key][0] != address["id"]:
            self._attached[key] = (address["id"], attach(address))
        return bytes(self._attached[key][1].view[: address["length"]])

    def sync(self, wait: Wait) -> None:
        """Return when all ranks are here: a barrier without a check, for the inside of a collective."""
        self._count += 1
        here = self._count << _PHASE_BITS
        words = self._words
        words[self._mine] = here
        phase = self._first
        try:
            while phase != PASSED:
                for arrived in self._arrivals:
                    if words[arrived] != here:
                        self._await(here, wait)
                        break
                else:
                    phase = next_phase(phase, HERE, HERE, False)
                    continue
                break
            words[self._mine] = here + PASSED
        except BaseException:
            if words[self._mine] == here:  # interrupted: the others must not wait for a rank that is leaving
                words[self._mine] = here + CLOSING
            raise

    def _observe(self, own: int, here: int) -> int:
        """The next phase, after a look at the others."""
        lowest, highest = PASSED, ABSENT
        words = self._words
        for arrived in self._arrivals:
            seen = words[arrived] - here
            if seen < lowest:
                lowest = seen
            if seen > highest:
                highest = seen
        return next_phase(own, lowest, highest, False)

    def _await(self, here: int, wait: Wait) -> None:
        """Return when the meeting has succeeded; raise when it has failed."""
        reason: StateExchangeError | None = None
        try:
            phase = self._wait_here(here, wait)
        except StateExchangeError as error:
            phase, reason = CLOSING, error
        if phase == CLOSING:
            phase = self._close_meeting(here)
        if phase == UNKNOWN:
            stuck = tuple(r for r in range(self.world_size) if self._get(r, _ARRIVED) == here)
            raise OutcomeUnknownError(
                f"{wait.operation} is given up, but ranks {list(stuck)}, which have arrived, do not run: whether they "
                "complete it is not known",
                missing=stuck,
                rank=stuck[0] if stuck else None,
            ) from reason
        if phase == FAILED:
            raise reason or self._reason_of_others(here, wait.operation)

    def _wait_here(self, here: int, wait: Wait) -> int:
        """PASSED, or CLOSING if another rank has given up; raises what makes this one give up."""
        phase = self._first
        for _ in range(self._spins):
            phase = self._observe(phase, here)
            if phase in (PASSED, CLOSING):
                return phase
        began = time.monotonic()
        for _ in range(_YIELDS):
            phase = self._observe(phase, here)
            if phase in (PASSED, CLOSING):
                return phase
            if time.monotonic() - began > _YIELDING_S:
                break
            yield_core()
        return self._nap(phase, here, wait)

    def _close_meeting(self, here: int) -> int:
        """FAILED, PASSED or UNKNOWN: what has become of a meeting that this rank, or another one, has given up."""
        words = self._words
        words[self._mine] = here + CLOSING
        deadline = time.monotonic() + _UNKNOWN_S
        phase = CLOSING
        while phase == CLOSING:
            time.sleep(_SETTLE_S)
            seen = [self._phase_of(rank, here) for rank in range(self.world_size) if rank != self.rank]
            phase = next_phase(CLOSING, min(seen), max(seen), time.monotonic() > deadline)
        if phase != UNKNOWN:
            words[self._mine] = here + phase
        return phase

    def _phase_of(self, rank: int, here: int) -> int:
        """The phase of another rank; one that has died without having passed is CLOSING."""
        ended = self._get(rank, _ARRIVED) == here and not self._alive(rank)
        phase = self._get(rank, _ARRIVED) - here  # looked at last: it may have passed before it died
        return CLOSING if ended and phase == HERE else phase

    def _reason_of_others(self, here: int, operation: str) -> StateExchangeError:
        """Why this meeting has failed, as a rank says that has given it up."""
        closing = [r for r in range(self.world_size) if self._get(r, _ARRIVED) - here in (CLOSING, FAILED)]
        deadline = time.monotonic() + _REASON_S
        while time.monotonic() < deadline:
            for rank in closing:
                if rank != self.rank and self._get(rank, _LEFT) == _GONE_WITH_ERROR:
                    return self._departure_error(rank)
            time.sleep(_SETTLE_S)
        others = [rank for rank in closing if rank != self.rank]
        return PeerError(others[0] if others else -1, operation, "it gave up waiting")

    def _nap(self, phase: int, here: int, wait: Wait) -> int:
        started = moved = time.monotonic()
        checked = 0.0
        progress, nap = -1, 2e-5
        while (phase := self._observe(phase, here)) not in (PASSED, CLOSING):
            missing = self._behind(here)
            if not missing:
                continue
            now = time.monotonic()
            if now - checked >= _LIVENESS_PERIOD_S or now - started < 2 * nap:
                checked = now
                self._raise_for_gone(missing, wait.operation)
                if wait.monitor is not None:
                    wait.monitor.check(wait.operation)
                latest = self.progress_count()
                if latest != progress:
                    progress, moved = latest, now
                if now - moved > wait.timeout_s:
                    raise StallError(
                        f"ranks {missing} did not reach {wait.operation} in {wait.timeout_s:g} s",
                        missing=tuple(missing),
                        rank=missing[0],
                    )
            time.sleep(nap)
            nap = min(nap * 1.5, 2e-3)
        return phase

    def _behind(self, here: int) -> list[int]:
        return [r for r in range(self.world_size) if self._get(r, _ARRIVED) < here]

    def check(self, operation: str) -> None:
        """Raise PeerError if a rank has died, or what a rank has left with, while this one waits for `operation`."""
        for rank in range(self.world_size):
            reason = self.departure_of(rank, operation)
            if reason is not None and self._get(rank, _LEFT) != _GONE_QUIETLY:
                raise reason

    def departure_of(self, rank: int, operation: str) -> StateExchangeError | None:
        """Why `rank` will not come to `operation`: the error with which it left, that it closed, or that it died."""
        alive = self._alive(rank)
        left = self._get(rank, _LEFT)  # looked at last: a rank may say why and die between two looks
        if left == _GONE_WITH_ERROR:
            return self._departure_error(rank)
        if left == _GONE_QUIETLY:
            return PeerError(rank, operation, "it closed its communicator")
        return None if alive else PeerError(rank, operation, f"its process {self._get(rank, _PID)} died")

    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks that have not arrived where this one is, and ranks whose process is stopped."""
        stopped = [r for r in range(self.world_size) if process_is_stopped(self._get(r, _PID))]
        return tuple(self._behind(self._count << _PHASE_BITS) or stopped)

    def _raise_for_gone(self, ranks: list[int], operation: str) -> None:
        for rank in ranks:
            reason = self.departure_of(rank, operation)
            if self._get(rank, _ARRIVED) >= self._count << _PHASE_BITS:
                continue  # looked at last: a rank may arrive, read and leave between two looks
            if reason is not None:
                raise reason

    def _departure_error(self, rank: int) -> StateExchangeError:
        return from_record(json.loads(read_slot(self._slot(rank, 2))[0]))

    def _alive(self, rank: int) -> bool:
        return self._threads or self.can_see(rank)

    def can_see(self, rank: int) -> bool:
        """Whether the process of `rank` runs, as far as this one can see."""
        return process_is_alive(self._get(rank, _PID), self._get(rank, _START))

    def raise_if_left(self) -> None:
        """A rank that has left, after a failure or by `leave`, takes part in nothing any more."""
        if self._get(self.rank, _LEFT):
            raise closed_error(self.rank)

    def report_progress(self) -> None:
        """Say that bytes move, so that nobody's stall deadline fires."""
        self._set(_PROGRESS, self._get(self.rank, _PROGRESS) + 1)

    def progress_count(self) -> int:
        """How often the ranks have said so."""
        return sum(self._get(r, _PROGRESS) for r in range(self.world_size))

    def request_collective(self) -> None:
        """Tell ranks that poll `progress`, or wait for single ranks, to come to this rank's next meeting at once."""
        self._set(_REQUESTED, self._count + 1)

    def collective_requested(self) -> bool:
        """Whether a rank waits in a meeting to which it has called all, and this one has not come yet."""
        return any(self._get(r, _REQUESTED) > self._count for r in range(self.world_size))

    def leave(self, error: BaseException | None = None) -> None:
        """Say that this rank will not arrive any more, and why."""
        if self._get(self.rank, _LEFT):
            return
        if error is not None:
            record = json.dumps(to_record(error, self.rank, "its own code")).encode()
            if len(record) > _SLOT_BYTES - LENGTH_BYTES:
                short = PeerError(self.rank, "its own code", ascii(error)[:1000])
                record = json.dumps(to_record(short, self.rank, "its own code")).encode()
            write_slot(self._slot(self.rank, 2), record, 0)
        self._set(_LEFT, _GONE_WITH_ERROR if error is not None else _GONE_QUIETLY)
        self._drop_spills()
        self._attached.clear()

    def _drop_spills(self) -> None:
        for arena in self._spill.values():
            arena.close()
        self._spill.clear()


def closed_error(rank: int, since: str = "") -> NotInitializedError:
    """Return the error for a call of a communicator that this rank has closed, with why if that is known."""
    return NotInitializedError(
        f"this communicator is closed{since}: make a new one, as shutdown() and init() do", rank=rank
    )
