"""Waits for peers, with a deadline and a failure monitor.

No wait of this package blocks in a native call. A wait tests its condition, and between two tests it checks its
monitor. It raises PeerError when the monitor reports a failure, and StallError at its deadline. The deadline is put off
while any rank reports progress, so it bounds the time without progress, not the whole time.
"""

from __future__ import annotations

import ctypes
import functools
import os
import time
from collections.abc import Callable, Sequence

from statexchange.comm.calls import absence_text
from statexchange.comm.failure.monitor import FailureMonitor, outer_monitor
from statexchange.errors import StallError

__all__ = ["Wait", "yield_core"]

_SPINS = 100
_LONGEST_NAP_S = 2e-3
_YIELDING_S = 2e-4
_NAPS_PER_WAIT = 16  # a nap is 1/16 of the time waited so far, so a wait ends at most 1/16 too late
_MONITOR_PERIOD_S = 0.05

# Through ctypes, since os.sched_yield holds the GIL, for which another thread may wait.
yield_core: Callable[[], object] = (
    ctypes.CDLL(None).sched_yield if os.name == "posix" else functools.partial(time.sleep, 0)
)


class Wait:
    """A wait for peers.

    Args:
        timeout_s: the deadline, in seconds without progress.
        operation: a description of the awaited call, for errors.
        monitor: reports failures; by default the monitor of the enclosing `forming_group` block.
        enter: the function that `enter` calls.
    """

    __slots__ = (
        "_checked_at",
        "_deadline",
        "_enter",
        "_progress",
        "monitor",
        "operation",
        "timeout_s",
    )

    def __init__(
        self,
        timeout_s: float,
        operation: str,
        monitor: FailureMonitor | None = None,
        enter: Callable[[int, Wait], Sequence[int]] | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self.operation = operation
        self.monitor = outer_monitor() if monitor is None else monitor
        self._enter = enter
        self._deadline = time.monotonic() + timeout_s
        self._checked_at = 0.0
        self._progress = -1

    def enter(self, location: int = 0) -> Sequence[int]:
        """Enter a collective: wait for all ranks, and compare their calls.

        A backend whose `enters_itself` is true calls this itself, once per collective; for the others the session has
        called it before. Raises DifferentCallsError, on all ranks, if their calls differ.

        Args:
            location: a number for the other ranks, such as the location of a tensor in shared memory.

        Returns:
            The locations of all ranks, in rank order; () where ranks are not compared.
        """
        return () if self._enter is None else self._enter(location, self)

    def poll(self) -> None:
        """Raise PeerError if a rank has failed, StallError past the deadline. Called between tests of the condition."""
        now = time.monotonic()
        if now - self._checked_at >= _MONITOR_PERIOD_S:
            self._checked_at = now
            self._check_monitor(now)
        if now > self._deadline:
            raise self.stall_error(() if self.monitor is None else self.monitor.missing_ranks())

    def _check_monitor(self, now: float) -> None:
        if self.monitor is None:
            return
        self.monitor.check(self.operation)
        progress = self.monitor.progress_count()
        if progress != self._progress:
            self._progress, self._deadline = progress, now + self.timeout_s

    def stall_error(self, missing: Sequence[int]) -> StallError:
        """Return the error for ranks that have not come in time; `missing` is () if they are not known."""
        text = absence_text(missing, self.operation, self.timeout_s)
        return StallError(text, missing=tuple(missing), rank=missing[0] if missing else None)

    def until(self, done: Callable[[], object]) -> None:
        """Return once `done()` is true: poll without a pause first, then yield, then nap ever longer.

        Yields precede naps, as a core that sleeps may take a tenth of a millisecond to wake up. They are few, since
        another thread or rank may need this core.
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
            time.sleep(min((time.monotonic() - began) / _NAPS_PER_WAIT, _LONGEST_NAP_S))
