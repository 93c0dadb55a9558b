"""Names in /dev/shm, which other tests and programs use at the same time."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator

_LIMIT_S = 30.0  # for other processes to remove their names; the processes of this test have ended


def arena_names() -> set[str]:
    """Return the names of this package's arenas."""
    return {name for name in os.listdir("/dev/shm") if re.match("statexchange-[0-9a-f]{32}", name)}


@contextlib.contextmanager
def no_names_left() -> Iterator[None]:
    """Raise AssertionError if the block leaves names of arenas in /dev/shm.

    An arena of another process has a name only until its ranks have attached it; one that was left keeps it.
    """
    before = arena_names()
    yield
    left = arena_names() - before
    deadline = time.monotonic() + _LIMIT_S
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left &= arena_names()
    assert not left
