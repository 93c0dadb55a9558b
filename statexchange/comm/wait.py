"""Waits for peers, with a deadline and a failure monitor.

No wait of this package blocks in a native call, except in a helper thread (gloo.py, torch_groups.py), and for 1 ms
where Gloo's connections are closed. A wait tests its condition, and between two tests it checks its monitor. It raises
PeerError when the monitor reports a failure, and StallError at its deadline. The deadline is put off while any rank
reports progress, and begins anew with each condition (`until`): it bounds the time without progress, not the whole time
of a call. So a rank that comes late takes no time from the data that follow. After a minute without progress the log
names the ranks that are missing, so that nobody has to wait for the deadline to learn of them.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from statexchange.comm.calls import absence_text
from statexchange.comm.failure.monitor import FailureMonitor, outer_monitor
from statexchange.errors import StallError

_LONGEST_NAP_S = 2e-3
_NAPS_PER_WAIT = 16  # a nap is 1/16 of the time waited so far, so a wait ends at most 1/16 too late
_MONITOR_PERIOD_S = 0.05
_LATE_AFTER_S = 60.0  # without progress, before missing ranks are logged; at most half of the timeout

_log = logging.getLogger(__name__)

# Through ctypes, since os.sched_yield holds the GIL, for which another thread may wait.
yield_core: Callable[[], object] = (
    ctypes.CDLL(None).sched_yield if os.name == "posix" else functools.partial(time.sleep, 0)
)


class Pace(NamedTuple):
    """How often a wait polls without a pause, and how often and how long it yields its core, before it naps."""

    spins: int
    yields: int
    yielding_s: float


# Yields are few, as the threads inside a transport may need this core.
_PACE = Pace(100, 1000, 2e-4)


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
        "_enter",
        "_has_looked_for_late_ranks",
        "_progress",
        "_progress_at",
        "monitor",
        "operation",
        "timeout_s",
    )

    def __init__(
        self,
        timeout_s: float,
        operation: str,
        monitor: FailureMonitor | None = None,
        enter: Callable[[int | None, Wait], Sequence[int]] | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self.operation = operation
        self.monitor = outer_monitor() if monitor is None else monitor
        self._enter = enter
        self._checked_at = 0.0
        self._progress = -1
        self._progress_at = time.monotonic()
        self._has_looked_for_late_ranks = False

    def enter(self, location: int | None = None) -> Sequence[int]:
        """Enter a collective: wait for all ranks, and compare their calls.

        A backend whose `enters_itself` is true calls this itself, once per collective; for the others the session has
        called it before. Raises DifferentCallsError, on all ranks, if their calls differ.

        Args:
            location: a number for the other ranks, such as the location of a tensor in shared memory; on all ranks or
                on none.

        Returns:
            The locations of all ranks, in rank order; () where there are none, or ranks are not compared.
        """
        return () if self._enter is None else self._enter(location, self)

    def _poll(self, monitors: Sequence[FailureMonitor]) -> None:
        """Raise PeerError if a rank has failed, StallError past the deadline."""
        now = time.monotonic()
        # At the deadline, too, as another rank may have given up a moment before, and its error is the one to raise.
        if now - self._checked_at >= _MONITOR_PERIOD_S or now - self._progress_at > self.timeout_s:
            self._checked_at = now
            progress = 0
            for monitor in monitors:
                monitor.check(self.operation)
                progress += monitor.progress_count()
            if progress != self._progress:
                self._progress = progress
                self._restart_at(now)
            idle_s = now - self._progress_at
            if idle_s > min(_LATE_AFTER_S, self.timeout_s / 2) and not self._has_looked_for_late_ranks:
                self._has_looked_for_late_ranks = True
                self._log_late_ranks(idle_s)
        if now - self._progress_at > self.timeout_s:
            raise self.stall_error(monitors[0].missing_ranks(), monitors[0].silent_ranks())

    def _log_late_ranks(self, idle_s: float) -> None:
        """Log which ranks are missing, if that is known; on the lowest rank that waits for them."""
        # Not the monitor that is asked first: that of a host has numbers of its own for the ranks.
        late = self.monitor.late_ranks()
        if late:
            text = absence_text(late, self.operation, round(idle_s, 1), self.monitor.silent_ranks())
            _log.warning("waiting for late ranks (StallError after %g s without progress): %s", self.timeout_s, text)

    def _restart_at(self, now: float) -> None:
        """Put off the deadline, as of now."""
        self._progress_at = now
        self._has_looked_for_late_ranks = False

    def stall_error(self, missing: Sequence[int], silent: Sequence[int] = ()) -> StallError:
        """Return the error for ranks that have not come in time; the arguments are those of `absence_text`."""
        text = absence_text(missing, self.operation, self.timeout_s, silent)
        return StallError(text, missing=tuple(missing), rank=next(iter(missing), None))

    def until(self, done: Callable[[], object], pace: Pace = _PACE, watched: FailureMonitor | None = None) -> None:
        """Return once `done()` is true: poll without a pause first, then yield, then nap ever longer.

        Yields precede naps, as a core that sleeps may take a tenth of a millisecond to wake up.

        Args:
            done: the condition.
            pace: how long to poll and to yield.
            watched: another monitor, which is asked first.
        """
        for _ in range(pace.spins):
            if done():
                return
        began = time.monotonic()
        self._restart_at(began)
        for _ in range(pace.yields):
            if done():
                return
            if time.monotonic() - began > pace.yielding_s:
                break
            yield_core()
        # `watched` first, as it watches the very ranks that `done` waits for: it names those that are missing.
        monitors = list(dict.fromkeys([watched or self.monitor, self.monitor]))
        while not done():
            self._poll(monitors)
            time.sleep(min((time.monotonic() - began) / _NAPS_PER_WAIT, _LONGEST_NAP_S))
