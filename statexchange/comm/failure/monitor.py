"""What a rank asks and reports about failure: the two interfaces, and monitors that look through others.

`FailureMonitor` is all that a wait needs: who has failed, who is missing, whether bytes move. `GroupMonitor` is what a
session has besides: one rank's way of telling the others what it does and of what it has failed. Two classes implement
it: the control page for the ranks of one host, the failure detector for ranks of several hosts.

A monitor has to answer at once, since waits ask it twenty times a second.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

from statexchange.errors import PeerError, StateExchangeError

__all__ = [
    "AbandonedError",
    "FailureMonitor",
    "GroupMonitor",
    "OuterMonitor",
    "PeerMonitor",
    "forming_group",
    "is_monitored",
    "monitored",
    "named_failure",
    "outer_monitor",
]

_NAMING_S, _NAP_S = 2.0, 0.02
_ARRIVAL_S = 2.0


class AbandonedError(Exception):
    """Raised inside a trip when another rank has failed: come to the agreement, which says who and why."""


class FailureMonitor(ABC):
    """What a wait asks about the ranks that it waits for."""

    @abstractmethod
    def check(self, operation: str) -> None:
        """Raise PeerError if a rank is known to have failed; `operation` is what this rank waits for."""

    @abstractmethod
    def departure_of(self, rank: int, operation: str) -> StateExchangeError | None:
        """Return why `rank` will not reach `operation`; None if it may. What it sent before may yet arrive."""

    @abstractmethod
    def missing_ranks(self) -> tuple[int, ...]:
        """Return the ranks that are known not to have come this far; () if nothing is known."""

    @abstractmethod
    def progress_count(self) -> int:
        """Return a number that grows while any rank reports progress."""

    def give_up(self, error: StateExchangeError) -> None:
        """Raise `error`, which ends the wait of this rank, unless another rank has completed the call: see `outcome`.

        By default nothing is known of other ranks' ends of the call, and `error` is raised.
        """
        raise error


class GroupMonitor(FailureMonitor):
    """One rank's side of what the ranks of a group know about each other."""

    @abstractmethod
    def report_progress(self) -> None:
        """Report that bytes move: whoever waits for this rank may go on waiting."""

    @abstractmethod
    def request_collective(self) -> None:
        """Have ranks that wait for single ones come to the next collective, in which all learn of a failure."""

    @abstractmethod
    def collective_requested(self) -> bool:
        """Whether a rank has requested a collective that this one has not reached yet."""

    # Monitors that see these without being told leave them as they are.

    def set_current_op(self, operation: str) -> None:
        """Note that this rank begins its next call."""

    def complete_op(self) -> None:
        """Note that this rank has all that it needs of its call; raise if the ranks have given it up meanwhile."""

    def report_failure(self, error: StateExchangeError) -> None:
        """Let the others know that this communicator has failed."""

    def close(self) -> None:
        """Report that this rank leaves."""


class OuterMonitor(FailureMonitor):
    """The failures that another monitor knows, for waits that are no calls of that one's ranks."""

    def __init__(self, outer: FailureMonitor | None) -> None:
        self._outer = outer

    def check(self, operation: str) -> None:
        """Raise what the other monitor knows."""
        if self._outer is not None:
            self._outer.check(operation)

    def departure_of(self, rank: int, operation: str) -> StateExchangeError | None:
        """Return what the other monitor knows."""
        return None if self._outer is None else self._outer.departure_of(rank, operation)

    def missing_ranks(self) -> tuple[int, ...]:
        """Return (): the other monitor counts other calls."""
        return ()

    def progress_count(self) -> int:
        """Return the count of the other monitor."""
        return 0 if self._outer is None else self._outer.progress_count()


class PeerMonitor(OuterMonitor):
    """For the wait for one peer: AbandonedError, too, once a rank requests a collective to report its failure.

    A peer that has closed its communicator sends nothing more; what it sent before has a moment to arrive.
    """

    def __init__(self, group: GroupMonitor | None, peer: int) -> None:
        super().__init__(group)
        self._group = group
        self._peer = peer
        self._left: float | None = None  # when the peer was first seen to have left

    def check(self, operation: str) -> None:
        """Raise what the group knows, AbandonedError, or why the peer has left."""
        super().check(operation)
        if self._group is not None and self._group.collective_requested():
            raise AbandonedError
        reason = self.departure_of(self._peer, operation)
        if reason is None:
            return
        now = time.monotonic()
        self._left = now if self._left is None else self._left
        if now - self._left > _ARRIVAL_S:
            raise reason

    def missing_ranks(self) -> tuple[int, ...]:
        """Return the peer."""
        return (self._peer,)


# While a group is formed, its ranks cannot see each other yet, but those of the group that they come from can.

_outer: ContextVar[FailureMonitor | None] = ContextVar("statexchange_outer_monitor", default=None)


@contextlib.contextmanager
def monitored(monitor: FailureMonitor | None) -> Iterator[None]:
    """A block in which waits without a monitor of their own end when `monitor` knows of a failure. Not collective."""
    token = _outer.set(None if monitor is None else OuterMonitor(monitor))
    try:
        yield
    finally:
        _outer.reset(token)


def outer_monitor() -> FailureMonitor | None:
    """Return the monitor of the `monitored` block that this is in, if any. Not collective."""
    return _outer.get()


def is_monitored() -> bool:
    """Whether this is inside a `monitored` block that has a monitor. Not collective."""
    return _outer.get() is not None


@contextlib.contextmanager
def forming_group(monitor: FailureMonitor | None, hosts: Sequence[str]) -> Iterator[None]:
    """A block that forms a group of ranks that `monitor` watches, on `hosts`: it ends when one of them fails.

    Inside another such block, of the group from which the ranks come, that one's monitor and its ranks count.
    """
    if is_monitored():
        yield
        return
    try:
        with monitored(monitor):
            yield
    except PeerError as error:
        named = named_failure(error, monitor, hosts)
        if named is error:
            raise
        raise named from error


def named_failure(error: PeerError, monitor: FailureMonitor | None, hosts: Sequence[str]) -> StateExchangeError:
    """Return the failure with its rank, which `monitor` may learn later than the transport, and its host."""
    known: StateExchangeError = error
    deadline = time.monotonic() + _NAMING_S
    while error.rank < 0 and monitor is not None and known is error and time.monotonic() < deadline:
        try:
            monitor.check(error.phase)
            time.sleep(_NAP_S)
        except StateExchangeError as named:
            known = named
    if isinstance(known, PeerError) and known.rank >= 0 and known.host is None:
        return PeerError(known.rank, known.phase, known.cause, hosts[known.rank])
    return known
