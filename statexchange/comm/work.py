"""Work under way: what `async_op=True` gives, and the thread that does it in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from statexchange.comm.backend import AbandonedError
from statexchange.errors import StallError
from statexchange.settings import check_timeout

__all__ = ["Work", "WorkQueue"]


class Work:
    """A collective that goes on while the caller computes. Its tensors must not be touched until `wait` returns."""

    def __init__(self, doing: str, broken_off: Callable[[], NoReturn] | None = None) -> None:
        """`broken_off` finds out, where the work is waited for, why it was abandoned, and raises that."""
        self.doing = doing
        self._broken_off = broken_off
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
            raise self._error.with_traceback(None)
        return self._result

    @property
    def is_lost(self) -> bool:
        """Whether it has failed, and nobody has been told."""
        return self._ended.is_set() and self._error is not None and not self._told

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
    """A thread that does work in the order in which it was submitted; it starts with the first."""

    def __init__(self, name: str) -> None:
        self._name = name
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
        work = Work(doing, broken_off)
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

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job[0].run(job[1])
            del job
