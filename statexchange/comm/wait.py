"""Waits for peers: how long, for what, and what is asked meanwhile."""

from __future__ import annotations

import ctypes
import functools
import os
import time
from collections.abc import Callable, Sequence

from statexchange.comm.failure.monitor import FailureMonitor, outer_monitor
from statexchange.errors import (
    OutcomeUnknownError,
    StallError,
    StateExchangeError,
)

__all__ = ["Wait", "yield_core"]

_SPINS = 100
_LAST_NAP_S = 2e-3
_YIELDING_S = 2e-4
_LOOKS = 16  # naps are 1/16 of the time waited, by which a wait may last too long
_LOOK_PERIOD_S = 0.05
_ON_ITS_WAY_S = 5.0  # time for data that was sent already to arrive


# Through ctypes, since os.sched_yield keeps the interpreter locked, in which another thread may want to go on.
yield_core: Callable[[], object] = (
    ctypes.CDLL(None).sched_yield if os.name == "posix" else functools.partial(time.sleep, 0)
)


class Wait:
    """A wait for peers: `doing` names what for, `timeout_s` how long, `monitor` tells whether it is still worth it. Its
    deadline is put off while ranks say that they move bytes.

    `enter` is the meeting of all ranks before a collective, in which they compare what they are about to do. A backend
    may call it at the moment that suits it; otherwise it has been called before. `location` is a number that this rank
    wants the others to know; those of all ranks come back.
    """

    __slots__ = ("_completed", "_deadline", "_enter", "_looked", "_moves", "doing", "monitor", "timeout_s")

    def __init__(
        self,
        timeout_s: float,
        doing: str,
        monitor: FailureMonitor | None = None,
        enter: Callable[[int, Wait], Sequence[int]] | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self.doing = doing
        self.monitor = outer_monitor() if monitor is None else monitor
        self._enter = enter
        self._deadline = time.monotonic() + timeout_s
        self._looked = 0.0
        self._moves = -1
        self._completed = False  # on another rank, so that what this one waits for is on its way

    def enter(self, location: int = 0) -> Sequence[int]:
        """Meet the other ranks; an error if they are about to do something else."""
        return () if self._enter is None else self._enter(location, self)

    def poll(self) -> None:
        """To be called between two looks at what is waited for: PeerError or, past the deadline, StallError."""
        now = time.monotonic()
        if now - self._looked >= _LOOK_PERIOD_S:
            self._looked = now
            if self.monitor is not None and not self._completed:
                try:
                    self.monitor.check(self.doing)
                except StateExchangeError as error:
                    self._give_up(error)
            moves = self.monitor.progress_count() if self.monitor is not None else self._moves
            if moves != self._moves:
                self._moves, self._deadline = moves, now + self.timeout_s
        if now > self._deadline:
            missing = self.monitor.missing_ranks() if self.monitor is not None else ()
            who = f"ranks {list(missing)}" if missing else "not all ranks"
            verb = "did not reach" if missing else "reached"
            message = f"{who} {verb} {self.doing} in {self.timeout_s:g} s"
            if self._completed:
                message = f"another rank has completed {self.doing}, but not all that it sent has arrived"
                raise OutcomeUnknownError(message)
            self._give_up(StallError(message, missing=missing, rank=missing[0] if missing else None))

    def _give_up(self, error: StateExchangeError) -> None:
        """Raise `error`, unless another rank has completed the call: then wait for what is on its way."""
        if self.monitor is None or self._completed:
            raise error
        self.monitor.give_up(error)
        self._completed = True
        self._deadline = time.monotonic() + _ON_ITS_WAY_S

    def until(self, done: Callable[[], object]) -> None:
        """Return once `done()` is true: look often at first, then yield, then nap in proportion to the time waited.

        Yields come first, as a core that sleeps may take a tenth of a millisecond to wake up; few of them, since
        another thread or rank may want to compute on this core.
        """
        for _ in range(_SPINS):
            if done():
                return
        began = now = time.monotonic()
        while now - began < _YIELDING_S:
            if done():
                return
            yield_core()
            now = time.monotonic()
        while not done():
            self.poll()
            time.sleep(min((time.monotonic() - began) / _LOOKS, _LAST_NAP_S))
