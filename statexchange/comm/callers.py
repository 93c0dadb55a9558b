"""Callers: the threads of a rank that call its communicator, counted so that ranks can match their calls.

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
import os
import secrets
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["AUTOGRAD", "Callers", "is_swapped", "is_unclear", "process_token"]

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
        self._newcomers: set[int] = {0} if self._has_peers else set()

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
                    self._newcomers.add(number)
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

    def is_new(self, number: int) -> bool:
        """Whether `number` has not been compared with the other ranks' callers yet."""
        return bool(self._newcomers) and number in self._newcomers

    def confirm(self, number: int) -> None:
        """Note that `number` is the same thread on all ranks."""
        self._newcomers.discard(number)

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
