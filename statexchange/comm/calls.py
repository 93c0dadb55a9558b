"""Calls and callers: ranks compare the descriptions of their calls, and match those of their threads.

If several threads of a rank call, their calls may interleave differently on each rank. So a call carries the number of
its caller: threads are counted in the order of their first calls. The number is part of the fingerprint that ranks
compare at the entry of every collective. Calls of different callers are never matched, even if they are alike
otherwise: then all ranks raise MismatchError.

Two threads that make their first calls at the same time may be counted in different orders on two ranks, and be taken
for each other. So at the first call of a thread the ranks compare the names of their callers (`is_swapped`).

All threads of autograd's engine are one caller. A reducer lets its hooks call as the thread that called `backward`
(`called_by`), since a bucket may be sent during backward on some ranks, and in `finalize` on others.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType
from typing import Any

from statexchange import values

__all__ = [
    "AUTOGRAD",
    "Call",
    "Callers",
    "absence_text",
    "call_site",
    "encoded",
    "is_swapped",
    "is_unclear",
    "note_joined",
    "process_token",
    "public_call",
    "public_call_name",
    "site_detail",
    "step_text",
    "text_hash",
]

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TESTING = os.path.join(_PACKAGE, "testing") + os.sep  # its frames count as the user's


@dataclass(slots=True)
class _PublicCall:
    """A public call whose steps communicate.

    Attributes:
        name: the name of the call.
        site: where it was made, if this thread's stack does not show it.
        is_joined: whether all ranks have completed one of its steps.
    """

    name: str
    site: str | None
    is_joined: bool = False


_public: ContextVar[_PublicCall | None] = ContextVar("statexchange_public_call", default=None)


@contextlib.contextmanager
def public_call(name: str, site: str | None = None) -> Iterator[None]:
    """Name the steps inside a block, or a decorated function, after the public call that the user made. Not collective.

    So errors of ranks that are in different calls name the public calls. Of nested blocks the outermost one counts.

    Args:
        name: the public call.
        site: the file and line of the call, if the block runs in another thread.

    Yields:
        Nothing.

    Example:
        >>> from statexchange.comm.calls import public_call, step_text
        >>> with public_call("save_checkpoint"):
        ...     step_text("the plan")
        'save_checkpoint (the plan)'
    """
    if _public.get() is not None:
        yield
        return
    token = _public.set(_PublicCall(name, site))
    try:
        yield
    finally:
        _public.reset(token)


def public_call_name() -> str | None:
    """Return the name of the public call that is under way, None outside of one. Not collective."""
    public = _public.get()
    return None if public is None else public.name


def note_joined() -> None:
    """Note that all ranks have completed a step of the public call that is under way. Not collective."""
    public = _public.get()
    if public is not None:
        public.is_joined = True


def absence_text(missing: Sequence[int], operation: str, timeout_s: float) -> str:
    """Return the message for ranks that have not reached `operation`; `missing` is () if they are not known.

    Until all ranks have completed a step of the public call, the message says that these have not made the call.
    """
    public = _public.get()
    if public is None or public.is_joined:
        subject = f"ranks {list(missing)} did not reach" if missing else "not all ranks reached"
        return f"{subject} {operation} in {timeout_s:g} s"
    subject = "not all ranks have"
    if missing:
        *others, last = map(str, missing)
        subject = f"ranks {', '.join(others)} and {last} have not" if others else f"rank {last} has not"
    where = "" if operation.startswith(public.name) else f" ({operation})"
    return f"{subject} called {public.name} in {timeout_s:g} s{where}; it must be called on all ranks"


def step_text(step: str) -> str:
    """Return the description of a step, after the name of its public call. Not collective."""
    public = _public.get()
    return step if public is None else f"{public.name} ({step})"


class Call:
    """The description of a call, and the number of its caller; ranks compare both.

    `caller` is the number of its thread. `public` names the public call of which this is a step;
    None if the user made this one.
    """

    __slots__ = ("caller", "failure", "public", "site", "text", "thread")

    def __init__(self, step: str, failure: dict[str, Any] | None = None) -> None:
        public = _public.get()
        self.public = None if public is None else public.name
        self.text = step_text(step)
        self.failure = failure
        self.site: str | None = None
        self.caller = 0
        self.thread: str | None = None  # the caller's thread, while the ranks compare their threads

    @classmethod
    def of_all(cls, text: str) -> Call:
        """Return a call whose text has no public call: ranks make it together from different ones."""
        call = cls(text)
        call.text = text
        return call

    @property
    def fingerprint(self) -> int:
        """A hash of description and caller, of 64 bits."""
        return _fingerprint_of(self.text, self.caller)


@functools.lru_cache(maxsize=4096)
def text_hash(text: str) -> bytes:
    """Return a hash of `text`, of 8 bytes."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


@functools.lru_cache(maxsize=4096)
def _fingerprint_of(text: str, caller: int) -> int:
    compared = f"{text} by caller {caller}" if caller else text
    return int.from_bytes(text_hash(compared), "little")


_detail: ContextVar[Callable[[], str] | None] = ContextVar("statexchange_site_detail", default=None)


@contextlib.contextmanager
def site_detail(detail: Callable[[], str]) -> Iterator[None]:
    """A block in which `call_site` adds the text of `detail`, which is called only for errors. Not collective."""
    token = _detail.set(detail)
    try:
        yield
    finally:
        _detail.reset(token)


def call_site() -> str:
    """Return file and line of the user's call, and the text of the enclosing `site_detail` block. Not collective.

    That is the innermost frame outside this package and torch. If no frame is the user's, as in a thread of autograd's
    engine, it is the name of the thread. In a thread of this package it is the site of the `public_call` block.
    """
    public = _public.get()
    if public is not None and public.site is not None:
        return public.site
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 (the documented way to it)
    while frame is not None and _is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    thread = threading.current_thread().name
    site = f"thread {thread!r}" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
    detail = _detail.get()
    return site if detail is None else f"{site} ({detail()})"


@functools.lru_cache(maxsize=4096)
def _is_internal(file: str) -> bool:
    if file == contextlib.__file__ or (file.startswith(_PACKAGE) and not file.startswith(_TESTING)):
        return True
    torch = sys.modules.get("torch")  # its frames lie between the user's backward() and our hooks
    return torch is not None and file.startswith(os.path.dirname(str(torch.__file__)) + os.sep)


def encoded(obj: object) -> bytes:
    """Encode a JSON value as bytes."""
    return values.encode(obj).encode()


AUTOGRAD = -1  # the number of all threads of autograd's engine


class Callers:
    """The callers of one session. `local.number` is the number of the current thread, once it has one."""

    def __init__(self, world_size: int) -> None:
        self._has_peers = world_size > 1
        self._counting = threading.Lock()
        self.restart()

    def restart(self) -> None:
        """Restart the count of callers: the thread that made the session need not be number 0. Not collective."""
        self.local = threading.local()  # not by thread id: ids are used again, by other threads on each rank
        self._count = 0
        self._threads: dict[int, threading.Thread] = {}  # by their number, those that have not ended
        # Numbers that ranks have not compared yet, from the start 0: autograd's threads may use it uncounted.
        self.newcomers: set[int] = {0} if self._has_peers else set()

    def disown(self) -> None:
        """Replace the lock in a forked child, as a thread of the parent may have held it."""
        self._counting = threading.Lock()

    def number(self) -> int:
        """Return the number by which the calls of this thread are matched.

        It is the number of threads that called before this one. All threads of autograd's engine, which run hooks, are
        one caller. While at most one other thread has called, they share its number, 0: the last callback of a backward
        may run in the thread that called `backward`, so which thread runs a hook differs from rank to rank.
        """
        try:
            number: int = self.local.number
        except AttributeError:
            number = self.new_number()
        return number

    def new_number(self) -> int:
        """Return the number of a thread that has none yet."""
        if _is_autograd_thread():
            return AUTOGRAD if self._count > 1 else 0
        with self._counting:
            number = self.local.number = self._count
            self._count += 1
            if self._has_peers:
                if number > 0:
                    self.newcomers.add(number)
                self._threads = {n: thread for n, thread in self._threads.items() if thread.is_alive()}
                self._threads[number] = threading.current_thread()
        return number

    @contextlib.contextmanager
    def called_by(self, number: int) -> Iterator[None]:
        """Count calls of autograd's threads inside the block as those of `number`; other threads keep theirs."""
        if not _is_autograd_thread():
            yield
            return
        outer = getattr(self.local, "number", None)
        self.local.number = number
        try:
            yield
        finally:
            if outer is None:
                del self.local.number
            else:
                self.local.number = outer

    @property
    def has_several(self) -> bool:
        """Whether a second thread has called."""
        return self._count > 1

    def confirm(self, number: int) -> None:
        """Note that `number` is the same thread on all ranks."""
        self.newcomers.discard(number)

    def name_of(self, number: int) -> str | None:
        """Return the name of a caller's thread, if it runs."""
        thread = self._threads.get(number)
        return None if thread is None else thread.name

    def account(self) -> list[Any]:
        """Return this rank's part of the comparison: process, callers' names by number, and all threads' names."""
        callers = {number: thread.name for number, thread in self._threads.items()}
        return [process_token(), callers, [thread.name for thread in threading.enumerate()]]


def is_swapped(number: int, accounts: Sequence[Any]) -> bool:
    """Whether `number` is known to be different threads on two ranks. `accounts` are all ranks' `Callers.account`.

    Python names a thread by a counter and its target. So the name of one caller may differ between ranks that have
    other threads besides. But if a name belongs to callers of different numbers on two ranks, these were counted in
    different orders.
    """
    for process, callers, _ in accounts:
        own = callers.get(number)
        if own is None:
            continue
        names_of_others: set[str] = set()
        for others in _callers_elsewhere(process, accounts):
            names_of_others |= {name for other_number, name in others.items() if other_number != number}
        if own in names_of_others or list(callers.values()).count(own) > 1:
            return True
    return False


def is_unclear(number: int, accounts: Sequence[Any]) -> bool:
    """Whether the thread that is `number` on one rank may exist on another, where it has not called yet."""
    for process, callers, threads in accounts:
        own = callers.get(number)
        if own is None:
            continue
        rivals = {others.get(number) for others in _callers_elsewhere(process, accounts)} - {own, None}
        if threads.count(own) > 1 or not rivals.isdisjoint(threads):
            return True
    return False


def _callers_elsewhere(process: str, accounts: Sequence[Any]) -> list[dict[int, str]]:
    return [others for other_process, others, _ in accounts if other_process != process]


def process_token() -> str:
    """Return a token of this process: ranks that are threads of one process share their thread names."""
    return _token_of(os.getpid())


@functools.cache
def _token_of(pid: int) -> str:  # noqa: ARG001 (a forked child has another)
    return secrets.token_hex(8)


def _is_autograd_thread() -> bool:
    """Whether this is a thread of autograd's engine, and not one of Python's in which `backward` was called."""
    torch = sys.modules.get("torch")
    if torch is None or torch._C._current_graph_task_id() == -1:  # noqa: SLF001 (torch has no other way)
        return False
    return isinstance(threading.current_thread(), threading._DummyThread)  # noqa: SLF001 (nor has threading)
