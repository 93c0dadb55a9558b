"""Record the storage events of this process, or act at one, such as a kill, and return how a call in a child ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from statexchange.errors import StateExchangeError

EVENT = "statexchange.storage"
armed: list[tuple[int, Callable[[], None]]] = []  # the number of an event and what to call then, until it is called
_count = 0  # of the events since `act_at`
_only: str | None = None  # the step whose events count; None: all
_recorded: list[tuple[str, str]] | None = None  # the events since `recording` began


def _hook(event: str, arguments: Any) -> None:
    global _count
    if event != EVENT:
        return
    if _recorded is not None:
        _recorded.append((arguments[0], arguments[1]))
    if armed and _only in (None, arguments[0]):
        _count += 1
        if _count == armed[0][0]:
            armed.pop()[1]()


def act_at(number: int, act: Callable[[], None], only: str | None = None) -> None:
    """Call `act` once, at the `number`-th storage event of this process from now on; with `only`, of this step."""
    global _count, _only
    _count, _only = 0, only
    _add_hook()
    armed[:] = [(number, act)]


@contextlib.contextmanager
def recording() -> Iterator[list[tuple[str, str]]]:
    """Yield a list that gets the storage events of this process, each with its path, until the block ends."""
    global _recorded
    _add_hook()
    _recorded = []
    try:
        yield _recorded
    finally:
        _recorded = None


def _add_hook() -> None:
    if not hasattr(sys, "_publishing_hook"):  # a hook stays until the process ends
        sys._publishing_hook = True  # type: ignore[attr-defined]
        sys.addaudithook(_hook)


def in_child(work: Callable[[], object], *, new_namespace: bool = False) -> str:
    """Run `work` in a forked process.

    Returns "ok", "killed", the name of the error, or "untouched" if `act_at` did not act.
    """
    receive, send = os.pipe()
    pid = os.fork()
    if pid:
        os.close(send)
        with open(receive) as pipe:
            outcome = pipe.read()
        _, status = os.waitpid(pid, 0)
        return "killed" if os.WIFSIGNALED(status) else outcome
    outcome = "broken"
    try:
        os.close(receive)
        armed.clear()
        outcome = in_new_namespace(work) if new_namespace else outcome_of(work)
        os.write(send, outcome.encode())
    finally:
        os._exit(0)


def outcome_of(work: Callable[[], object]) -> str:
    try:
        work()
    except StateExchangeError as error:
        return type(error).__name__
    except BaseException as error:  # noqa: BLE001 (the parent fails with what is returned)
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return "untouched" if armed else "ok"


CLONE_NEWPID = 0x20000000


def in_new_namespace(work: Callable[[], object]) -> str:
    """Run `work` in a new PID namespace, as on another host: neither process can see whether the other runs."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWPID):
        return "no namespace"
    return in_child(work)
