"""Work under way: what `async_op=True` gives, and the thread that does it in order.

After a MismatchError the ranks are in different calls, and work behind it would wait for calls that the others will
never make, or meet one that only looks like its own. So work that was begun before the error was raised to anybody is
not done, and raises the same error. What counts is the order of calls in the program, not when the thread comes to the
work: all ranks skip the same. A queue that fails is marked so before its work ends, and the mark goes only when all
work begun by then has the error; the thread looks at the mark first.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from statexchange.comm.failure.monitor import AbandonedError
from statexchange.errors import MismatchError, StallError
from statexchange.settings import check_timeout

__all__ = ["Work", "WorkQueue"]


class Work:
    """A collective that goes on while the caller computes. Its tensors must not be touched until `wait` returns.

    If it raises MismatchError, work of the same communicator that was begun before that raises it, too, and is not
    done.
    """

    def __init__(
        self, doing: str, broken_off: Callable[[], NoReturn] | None = None, queue: WorkQueue | None = None
    ) -> None:
        """`broken_off` finds out, where the work is waited for, why it was abandoned, and raises that. `queue` is the
        one in which the work is, and learns which error was raised."""
        self.doing = doing
        self.skipped_for: BaseException | None = None
        """The mismatch of this queue that was raised last after this work had been submitted."""
        self._broken_off = broken_off
        self._queue = queue
        self._ended = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None
        self._told = False

    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, at once. Not collective."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> Any:
        """The result, which a call without `async_op` would have returned; its error is raised here.

        Not collective. Blocks until the work is done; after `timeout_s` seconds, which may be 0, a StallError, and the
        work goes on.
        """
        if timeout_s is not None:
            timeout_s = min(check_timeout(timeout_s, zero=True), threading.TIMEOUT_MAX)
        if not self._ended.wait(timeout_s):
            raise StallError(f"{self.doing} is not done after {timeout_s:g} s")
        self._told = True
        if isinstance(self._error, AbandonedError) and self._broken_off is not None:
            self._broken_off()
        if self._error is not None:
            if self._queue is not None:
                self._queue.note_raised(self._error)
            raise self._error.with_traceback(None)
        return self._result

    @property
    def is_lost(self) -> bool:
        """Whether it has failed, and nobody has been told of its error."""
        return self._ended.is_set() and self._error not in (None, self.skipped_for) and not self._told

    def disown(self, error: BaseException) -> None:
        """In a forked child: end unfinished work with `error`, as its thread does not exist here."""
        if not self.is_completed():
            self._error = error
            self._ended = threading.Event()  # the lock of the old one may be held by a thread that is not here
            self._ended.set()

    def run(self, body: Callable[[], Any]) -> None:
        """Do the work, here and now."""
        try:
            self._result = body()
        except BaseException as error:  # noqa: BLE001 (it is raised where the work is waited for)
            self._error = error
        self._ended.set()


class WorkQueue:
    """A thread that does work in the order in which it was submitted; it starts with the first.

    With `skips` a MismatchError ends the work behind it, too.
    """

    def __init__(self, name: str, *, skips: bool = False) -> None:
        self._name = name
        self._skips = skips
        self._mismatch: MismatchError | None = None  # one that nobody has been told
        self._jobs: queue.SimpleQueue[tuple[Work, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._works: list[Work] = []
        self.has_begun = False
        """Whether anything has ever been submitted."""
        self.turn = threading.Lock()
        """Serialises synchronous calls with this queue's work."""

    def submit(self, doing: str, body: Callable[[], Any], broken_off: Callable[[], NoReturn] | None = None) -> Work:
        """Have `body` run after all that was submitted before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
            self.has_begun = True
        work = Work(doing, broken_off, self)
        self._works = [*(w for w in self._works if not w.is_completed() or w.is_lost), work]
        self._jobs.put((work, body))
        return work

    def drain(self) -> None:
        """Return when all that was submitted is done; its errors are its own."""
        if threading.current_thread() is not self._thread:
            for work in self._works:
                work._ended.wait()  # noqa: SLF001 (our own Work)

    def raise_lost(self) -> None:
        """Raise the first error that nobody has waited for."""
        for work in self._works:
            if work.is_lost:
                work.wait()

    def close(self, wait_s: float) -> None:
        """End the thread after what it is doing, for which at most `wait_s` is waited."""
        if self._thread is not None:
            self._jobs.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join(wait_s)

    def disown(self, error: BaseException) -> None:
        """In a forked child: end all unfinished work with `error`."""
        for work in self._works:
            work.disown(error)
        self._thread = None
        self.turn = threading.Lock()  # a thread that is not here may hold the old one

    def note_raised(self, error: BaseException) -> None:
        """Have work that was submitted until now fail of `error`, if that is the mismatch that nobody was told."""
        if error is self._mismatch:
            for work in self._works:
                work.skipped_for = error  # nothing to work that has ended with a result or with another error
            self._mismatch = None

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._do(*job)
            del job

    def _do(self, work: Work, body: Callable[[], Any]) -> None:
        def attempt() -> Any:
            earlier = self._mismatch or work.skipped_for  # in this order, see above
            if earlier is not None:
                raise earlier
            try:
                return body()
            except MismatchError as error:
                if self._skips:
                    self._mismatch = error
                raise

        work.run(attempt)
