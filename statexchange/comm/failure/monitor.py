"""The interface to failure detection, and monitors that forward to others.

From a `FailureMonitor` a wait reads which ranks have failed, which are missing, and whether bytes move; a session tells
it which call this rank is in, its progress, and its failure. Two classes detect: the control page (control_page.py)
among ranks of one host, the failure detector (detector.py) among ranks of several hosts.

What a wait reads must not block: it is read twenty times a second.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

from statexchange.errors import PeerError, StateExchangeError

_NAMING_S, _NAP_S = 2.0, 0.02  # for the monitor to learn which rank has failed
_ARRIVAL_S = 2.0  # for what a peer sent before it left to arrive


class AbandonedError(Exception):
    """Another rank has failed, and has requested all ranks at its next collective: join that, which raises the error.

    Raised by `Communicator.progress` and by waits for a single rank.
    """


class FailureMonitor:
    """One rank's side of the failure detection of its group. This one is for a group without any: it reports nothing.

    Attributes:
        rank: this rank's number in the group; -1 where `missing_ranks` does not list the ranks of the group.
    """

    rank = -1

    # What a wait reads

    def check(self, operation: str) -> None:
        """Raise PeerError if a rank is known to have failed; `operation` is what this rank waits for."""

    def departure_of(self, rank: int, operation: str) -> StateExchangeError | None:  # noqa: ARG002 (detectors do)
        """Return why `rank` will not reach `operation`; None if it may. What it sent before it left may yet arrive."""
        return None

    def missing_ranks(self) -> tuple[int, ...]:
        """Return the ranks that are known not to have reached this rank's call; () if none is known."""
        return ()

    def silent_ranks(self) -> tuple[int, ...]:
        """Return the ranks whose processes are stopped or whose hosts are cut off, as far as known.

        They may have reached this rank's call.
        """
        return ()

    def late_ranks(self) -> tuple[int, ...]:
        """Return the missing ranks on the lowest rank that waits for them, which reports them; () on the others."""
        missing = self.missing_ranks()
        is_first = self.rank >= 0 and set(range(self.rank)) <= set(missing)  # all lower ranks are missing
        return missing if is_first else ()

    def progress_count(self) -> int:
        """Return a number that grows while any rank reports progress."""
        return 0

    def collective_requested(self) -> bool:
        """Whether a rank has requested a collective that this one has not reached yet."""
        return False

    # What a session writes

    def set_current_op(self, operation: str) -> None:
        """Note that this rank begins its next call."""

    def report_progress(self) -> None:
        """Report that bytes move: ranks that wait for this one put off their deadlines."""

    def request_collective(self) -> None:
        """Request all ranks at this rank's next collective, which reports a failure; see AbandonedError."""

    def report_failure(self, error: StateExchangeError) -> None:
        """Report to the other ranks that this communicator has failed."""

    def close(self) -> None:
        """Report that this rank leaves."""


UNWATCHED = FailureMonitor()  # of a world of one, and where the ranks cannot reach each other


class OuterMonitor(FailureMonitor):
    """Forwards the failures of another monitor, for waits that are not calls of that monitor's group.

    It names no rank as missing: the numbers of the other group's calls do not apply to these waits.
    """

    def __init__(self, outer: FailureMonitor) -> None:
        self._outer = outer

    def check(self, operation: str) -> None:
        """Raise the failure that the other monitor reports."""
        self._outer.check(operation)

    def departure_of(self, rank: int, operation: str) -> StateExchangeError | None:
        """Return what the other monitor returns."""
        return self._outer.departure_of(rank, operation)

    def progress_count(self) -> int:
        """Return the count of the other monitor."""
        return self._outer.progress_count()


class PeerMonitor(OuterMonitor):
    """The monitor of a wait for one peer, which also ends with AbandonedError once a rank requests a collective.

    When the peer has closed its communicator, the wait goes on for 2 s, as what it sent before may yet arrive.
    """

    def __init__(self, group: FailureMonitor, peer: int) -> None:
        super().__init__(group)
        self._peer = peer
        self._left: float | None = None  # when the peer was first seen to have left

    def check(self, operation: str) -> None:
        """Raise the group's failure, AbandonedError, or the error for a peer that has left."""
        super().check(operation)
        if self._outer.collective_requested():
            raise AbandonedError
        reason = self.departure_of(self._peer, operation)
        if reason is None:
            return
        now = time.monotonic()
        if self._left is None:
            self._left = now
        if now - self._left > _ARRIVAL_S:
            raise reason

    def missing_ranks(self) -> tuple[int, ...]:
        """Return the peer."""
        return (self._peer,)

    def silent_ranks(self) -> tuple[int, ...]:
        """Return what the group's monitor returns, which has the same numbers for the ranks."""
        return self._outer.silent_ranks()


# A group that is being formed has no monitor yet. Until it has, the one of its parent group watches its ranks.

_outer: ContextVar[FailureMonitor] = ContextVar("statexchange_outer_monitor", default=UNWATCHED)


def outer_monitor() -> FailureMonitor:
    """Return the monitor of the `forming_group` block that this is in, UNWATCHED outside of one. Not collective."""
    return _outer.get()


@contextlib.contextmanager
def forming_group(monitor: FailureMonitor, hosts: Sequence[str]) -> Iterator[None]:
    """A block that forms a group of ranks watched by `monitor`; it raises, with rank and host, when one of them fails.

    `hosts` are the names of the ranks' hosts. Inside another such block, which forms the parent of this group, the
    monitor of that block is used, and errors have its ranks.
    """
    if _outer.get() is not UNWATCHED:  # and that block gives errors their rank and host
        yield
        return
    outer = monitor
    if monitor is not UNWATCHED:  # which is compared by identity, above and where a failure gets its name
        outer = OuterMonitor(monitor)
    token = _outer.set(outer)
    try:
        with naming_failures(monitor, hosts):
            yield
    finally:
        _outer.reset(token)


@contextlib.contextmanager
def naming_failures(monitor: FailureMonitor, hosts: Sequence[str], peer: int | None = None) -> Iterator[None]:
    """A block whose PeerError becomes the error that `named_failure` returns."""
    try:
        yield
    except PeerError as error:
        named = named_failure(error, monitor, hosts, peer)
        if named is error:
            raise
        raise named from error


def named_failure(
    error: PeerError, monitor: FailureMonitor, hosts: Sequence[str], peer: int | None = None
) -> StateExchangeError:
    """Return `error` with rank and host. If the transport did not name the rank, wait 2 s for `monitor` to do so.

    `peer` is the rank to which or from which a message went. If it has closed its communicator, that is a failure for
    this message alone, which `check` does not report.
    """
    named: StateExchangeError = error
    deadline = time.monotonic() + _NAMING_S
    # The transport may have seen a death before the monitor, which waits for a goodbye first.
    while error.rank < 0 and monitor is not UNWATCHED and named is error and time.monotonic() < deadline:
        # Before `check`: a peer that has reported an error may close right after, and the error is the reason.
        departure = None if peer is None else monitor.departure_of(peer, error.phase)
        try:
            monitor.check(error.phase)
            if departure is not None:
                raise departure
            time.sleep(_NAP_S)
        except StateExchangeError as reported:
            named = reported
    if isinstance(named, PeerError) and named.rank >= 0 and named.host is None:
        return PeerError(named.rank, named.phase, named.cause, hosts[named.rank])
    return named
