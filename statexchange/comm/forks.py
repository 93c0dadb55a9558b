"""Forks: cut a child off from its parent's communicators, control pages and failure detectors.

A fork copies every object, and with it descriptors of the parent's sockets and mappings of its shared memory. A child
that used them would take part as if it were its parent. So whatever connects a process with other ranks is registered
here when it is made, and `disown` is called on it in each child, before any other code runs there: it cuts the object
off, and no call has to compare process ids.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from typing import Protocol


class Owned(Protocol):
    """An object that belongs to the process that made it."""

    def disown(self) -> None:
        """Cut this object off from the other ranks: it is the copy of a forked child. Must not block."""


_owned: weakref.WeakSet[Owned] = weakref.WeakSet()


def cut_off_in_children(thing: Owned) -> None:
    """Have `thing.disown` called in every child that this process forks while it exists. Not collective."""
    _register()
    _owned.add(thing)


def forget(thing: Owned) -> None:
    """Undo `cut_off_in_children`. Not collective."""
    _owned.discard(thing)


@functools.cache  # a handler of `os` cannot be removed, so there is one for all objects, made with the first
def _register() -> None:
    os.register_at_fork(after_in_child=_disown_all)


def _disown_all() -> None:
    with contextlib.ExitStack() as all_of_them:  # call all of them, even if one raises
        for thing in list(_owned):  # a copy: `disown` may call `forget`
            all_of_them.callback(thing.disown)
