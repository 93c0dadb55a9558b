"""Calls: ranks compare the descriptions of their calls, and errors name the call that the user made."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType

from statexchange import values

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TESTING = os.path.join(_PACKAGE, "testing") + os.sep  # its frames count as the user's


@dataclass(slots=True)
class PublicCall:
    """A public call whose steps communicate.

    Attributes:
        name: the name of the call.
        site: where it was made, if this thread's stack does not show it.
        is_joined: whether all ranks have completed one of its steps.
    """

    name: str
    site: str | None
    is_joined: bool = False


# The public call that is under way; `public_call` of defaults.py sets it.
under_way: ContextVar[PublicCall | None] = ContextVar("statexchange_public_call", default=None)


def note_joined() -> None:
    """Note that all ranks have completed a step of the public call that is under way. Not collective."""
    public = under_way.get()
    if public is not None:
        public.is_joined = True


def absence_text(missing: Sequence[int], operation: str, timeout_s: float, silent: Sequence[int] = ()) -> str:
    """Return the message for ranks for which `operation` waited in vain.

    Until all ranks have completed a step of the public call, the message says that they have not made the call.

    Args:
        missing: these ranks; () if they are not known, or if all have come and their data have not.
        operation: a description of the awaited call.
        timeout_s: how long it waited.
        silent: ranks that are stopped or cut off. Those of them that are missing may have come before they were.
    """
    public = under_way.get()
    # These may have come before they were stopped, so it is not said that they have not.
    stopped = [rank for rank in missing if rank in silent]
    if stopped:
        causes = "their processes are stopped, or their hosts are cut off"
        return f"ranks {stopped} do not respond, after {timeout_s:g} s in {operation}: {causes}"
    if public is None or public.is_joined:
        problem = f"{operation} did not complete"
        if missing:
            problem = f"ranks {list(missing)} did not reach {operation}"
        return f"{problem} in {timeout_s:g} s"
    subject = "not all ranks have"
    if missing:
        *others, last = map(str, missing)
        subject = f"rank {last} has not"
        if others:
            subject = f"ranks {', '.join(others)} and {last} have not"
    where = ""
    # A description by `step_text` begins with the public call, which the sentence names already.
    if not operation.startswith(public.name):
        where = f" ({operation})"
    return f"{subject} called {public.name} in {timeout_s:g} s{where}; it must be called on all ranks"


def step_text(step: str) -> str:
    """Return the description of a step, after the name of its public call. Not collective."""
    public = under_way.get()
    return step if public is None else f"{public.name} ({step})"


class Call:
    """The description of a call, `text`, which ranks compare.

    `public` names the public call of which this is a step; None if the user made this one. `failure` is the record of
    an error that this rank reports by it. `site` is where the user made it, if another thread runs it.
    """

    __slots__ = ("failure", "public", "site", "text")

    def __init__(self, step: str, failure: dict[str, object] | None = None) -> None:
        public = under_way.get()
        self.public = None if public is None else public.name
        self.text = step_text(step)
        self.failure = failure
        self.site: str | None = None

    @classmethod
    def of_all(cls, text: str) -> Call:
        """Return a call whose text has no public call: ranks make it together from different ones."""
        call = cls(text)
        call.text = text
        return call

    @property
    def fingerprint(self) -> int:
        """A hash of the description, of 64 bits."""
        return fingerprint_of(self.text)


@functools.lru_cache(maxsize=4096)  # a training loop makes the same calls in every step
def fingerprint_of(text: str) -> int:
    """Return a hash of `text`, of 64 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


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
    public = under_way.get()
    if public is not None and public.site is not None:
        return public.site
    # Not by traceback or inspect, which read source files: this is called for each asynchronous call.
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 (the documented way to it)
    while frame is not None and _is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    thread = threading.current_thread().name
    site = f"thread {thread!r}"
    if frame is not None:
        site = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    detail = _detail.get()
    if detail is not None:
        site += f" ({detail()})"
    return site


@functools.lru_cache(maxsize=4096)
def _is_internal(file: str) -> bool:
    # A frame of contextlib lies between the user's and ours: `public_call` is a context manager and a decorator.
    if file == contextlib.__file__ or (file.startswith(_PACKAGE) and not file.startswith(_TESTING)):
        return True
    torch = sys.modules.get("torch")  # its frames lie between the user's backward() and our hooks
    return torch is not None and file.startswith(os.path.dirname(str(torch.__file__)) + os.sep)


def encoded(obj: object) -> bytes:
    """Encode a JSON value as bytes."""
    return values.encode(obj).encode()


def is_autograd_thread() -> bool:
    """Whether this is a thread of autograd's engine, and not one of Python's in which `backward` was called."""
    torch = sys.modules.get("torch")
    if torch is None or torch._C._current_graph_task_id() == -1:  # noqa: SLF001 (torch has no other way)
        return False
    # Python makes a _DummyThread for a thread that it has not started, as those of the engine.
    return isinstance(threading.current_thread(), threading._DummyThread)  # noqa: SLF001 (nor has threading)
