"""Act at a storage event of this process, such as a kill, and return how a call in a child ends."""

from __future__ import annotations

import ctypes
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from statexchange.errors import StateExchangeError

EVENT = "statexchange.storage"
armed: list[tuple[int, Callable[[], None]]] = []  # the number of an event and what to call then, until it is called
_count = 0  # of the events since `act_at`
_only: str | None = None  # the step whose events count; None: all


def _hook(event: str, arguments: Any) -> None:
    global _count
    if event == EVENT and armed and _only in (None, arguments[0]):
        _count += 1
        if _count == armed[0][0]:
            armed.pop()[1]()


def act_at(number: int, act: Callable[[], None], only: str | None = None) -> None:
    """Call `act` once, at the `number`-th storage event of this process from now on; with `only`, of this step."""
    global _count, _only
    _count, _only = 0, only
    if not hasattr(sys, "_publishing_hook"):
        sys._publishing_hook = True  # type: ignore[attr-defined]
        sys.addaudithook(_hook)
    armed[:] = [(number, act)]


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
