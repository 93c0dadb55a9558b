"""Asynchronous work: the result of `async_op=True`, and the thread that does the work in the order of the calls.

After a MismatchError the ranks are in different calls. Work queued behind it would wait for calls that other ranks
never make, or be matched with a different call of equal arguments. So work that was submitted before the error was
raised to the user is skipped, and raises the same error. The order of calls in the program decides, not the moment at
which the thread reaches the work: so all ranks skip the same.

The order of steps that this rests on: the queue's thread sets `_mismatch` before the failing work ends, so before the
user can see the error. `note_raised`, called when the user sees it, gives the error to all work submitted by then, and
clears `_mismatch` last. The thread reads `_mismatch` first and the work's own mark second, so it finds one of them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, NoReturn, TypeVar, cast

from statexchange.comm.failure.monitor import AbandonedError
from statexchange.errors import MismatchError, StallError
from statexchange.settings import check_timeout

T = TypeVar("T")


class Work(Generic[T]):
    """A collective that runs while the caller computes. Its tensors must not be touched until `wait` returns.

    If `wait` raises MismatchError, later work of the communicator that was begun before then is skipped, and raises the
    same error.

    Example:
        >>> comm = sx.init("single")
        >>> work = comm.all_reduce(torch.ones(2), async_op=True)
        >>> work.wait()
        tensor([1., 1.])
        >>> work.is_completed()
        True
    """

    def __init__(
        self, operation: str, broken_off: Callable[[], NoReturn] | None = None, queue: WorkQueue | None = None
    ) -> None:
        """Make work that has not begun.

        Args:
            operation: a description of the work, for errors.
            broken_off: called by `wait` to raise the cause of an AbandonedError.
            queue: where the work was submitted; it is informed of the error that `wait` raises.
        """
        self.operation = operation
        self.skipped_for: BaseException | None = None
        """The MismatchError that the user has seen since this work was submitted, if any."""
        self._broken_off = broken_off
        self._queue = queue
        self._ended = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None
        self._is_reported = False

    def is_completed(self) -> bool:
        """Return whether `wait` would return, or raise, at once. Not collective.

        Returns:
            True once the work is done or has failed.

        Example:
            >>> comm = sx.init("single")
            >>> work = comm.all_reduce(torch.ones(2), async_op=True)
            >>> comm.wait_all()
            >>> work.is_completed()
            True
        """
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> T:
        """Return the result, which a call without `async_op` would have returned.

        Not collective. Blocks until the work is done.

        Args:
            timeout_s: how long to wait, in seconds; 0 does not wait. None waits without a limit.

        Returns:
            The result of the collective.

        Raises:
            StallError: the work is not done in time; it continues.
            StateExchangeError: the error with which the work failed.

        Example:
            >>> comm = sx.init("single")
            >>> comm.all_gather(torch.ones(1), async_op=True).wait(timeout_s=60)
            [tensor([1.])]
        """
        if timeout_s is not None:
            # A longer wait than this would raise OverflowError.
            timeout_s = min(check_timeout(timeout_s, zero=True), threading.TIMEOUT_MAX)
        if not self._ended.wait(timeout_s):
            raise StallError(f"{self.operation} is not done after {timeout_s:g} s")
        self._is_reported = True
        # An AbandonedError has no cause of its own: the callback raises that of the rank that has failed.
        if isinstance(self._error, AbandonedError) and self._broken_off is not None:
            self._broken_off()
        if self._error is not None:
            if self._queue is not None:
                self._queue.note_raised(self._error)
            # Else its traceback would grow with each `wait`.
            raise self._error.with_traceback(None)
        return cast("T", self._result)

    @property
    def is_lost(self) -> bool:
        """Whether it has failed, and no `wait` has raised its error."""
        return self._ended.is_set() and self._error not in (None, self.skipped_for) and not self._is_reported

    def disown(self, error: BaseException) -> None:
        """End unfinished work, in a forked child, where its thread does not exist. Not collective.

        Args:
            error: what `wait` raises.
        """
        if not self.is_completed():
            self._error = error
            self._ended = threading.Event()  # a thread of the parent may have held the lock of the old one
            self._ended.set()

    def run(self, body: Callable[[], T]) -> None:
        """Do the work in this thread. Not collective.

        Args:
            body: computes the result; what it raises is raised by `wait`.
        """
        try:
            self._result = body()
        except BaseException as error:  # noqa: BLE001 (it is raised where the work is waited for)
            self._error = error
        # Last: a thread that sees the end reads the result or the error without a lock.
        self._ended.set()


class WorkQueue:
    """A thread that does work in the order in which it was submitted; it starts with the first.

    With `skips` a MismatchError makes the queue skip the work behind it.
    """

    def __init__(self, name: str, *, skips: bool = False) -> None:
        self._name = name
        self._skips = skips
        self._mismatch: MismatchError | None = None  # of its work, until it is raised to the user
        self._jobs: queue.SimpleQueue[tuple[Work[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._works: list[Work[Any]] = []

    def submit(
        self, operation: str, body: Callable[[], T], broken_off: Callable[[], NoReturn] | None = None
    ) -> Work[T]:
        """Queue `body` behind all that was submitted before."""
        if self._thread is None:
            # A daemon: work that waits for other ranks must not keep the process from exiting.
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        work: Work[T] = Work(operation, broken_off, self)
        # What is under way, for `drain`, and what has failed and nobody has seen, for `raise_lost`.
        kept = [earlier for earlier in self._works if not earlier.is_completed() or earlier.is_lost]
        self._works = [*kept, work]
        self._jobs.put((work, body))
        return work

    def drain(self) -> None:
        """Return when all that was submitted is done. Errors are raised by the `wait` of the work, not here."""
        # In the queue's own thread this would wait for itself.
        if threading.current_thread() is not self._thread:
            for work in self._works:
                work._ended.wait()  # noqa: SLF001 (our own Work)

    def raise_lost(self) -> None:
        """Raise the first error of work for which `wait` was not called."""
        for work in self._works:
            if work.is_lost:
                work.wait()

    def close(self, wait_s: float) -> None:
        """End the thread when it has done what was submitted; wait for that at most `wait_s`."""
        if self._thread is not None:
            self._jobs.put(None)
            if self._thread is not threading.current_thread():  # which cannot wait for its own end
                self._thread.join(wait_s)

    def disown(self, error: BaseException) -> None:
        """In a forked child: end all unfinished work with `error`."""
        for work in self._works:
            work.disown(error)
        self._thread = None

    def note_raised(self, error: BaseException) -> None:
        """Note that the user has seen `error`: if it is the queue's mismatch, work submitted until now raises it."""
        if error is self._mismatch:
            for work in self._works:
                work.skipped_for = error  # has no effect on work that has ended
            self._mismatch = None

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._do(*job)
            del job  # else this would keep its tensors alive until the next job comes

    def _do(self, work: Work[T], body: Callable[[], T]) -> None:
        def attempt() -> T:
            earlier = self._mismatch or work.skipped_for  # in this order, see the top of this file
            if earlier is not None:
                raise earlier
            try:
                return body()
            except MismatchError as error:
                if self._skips:
                    self._mismatch = error
                raise

        work.run(attempt)
