"""Read a remote file ahead: reads of small parts that follow one another become few requests.

A request to an object store takes tens of milliseconds, in which megabytes could be transferred. As in the kernel's
readahead, a read that goes on where another ended fetches more than it asks for, each time twice as much as before;
any other read fetches only what it asks for. So reads in order are few requests, and reads in random order cost no
more than without.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["ReadAhead"]

_NUM_WINDOWS = 8  # that a file has: several threads may read it, each in another place
_GAP_BYTES = 64 << 10  # from the end of one read to one that goes on there
_LEAST_BYTES = 64 << 10
_NOTHING = memoryview(b"")


class _Window(NamedTuple):
    """Bytes of a file from `begin` on."""

    begin: int
    data: memoryview

    @property
    def end(self) -> int:
        return self.begin + len(self.data)


class ReadAhead:
    """Reads a file of `size` bytes by `fetch(begin, end)`, and keeps at most `memory_bytes` of it. Thread-safe."""

    def __init__(self, fetch: Callable[[int, int], bytes], size: int, memory_bytes: int) -> None:
        self._fetch = fetch
        self._size = size
        self._window_bytes = memory_bytes // _NUM_WINDOWS
        self._lock = threading.Lock()
        self._windows: list[_Window] = []  # the one that was used last comes last

    def __reduce__(self) -> tuple[Any, ...]:
        return ReadAhead, (self._fetch, self._size, self._window_bytes * _NUM_WINDOWS)  # without what is kept

    def read(self, begin: int, end: int) -> list[memoryview]:
        """Return the bytes from `begin` to `end`, which is not beyond the file, in one or two pieces."""
        last = self._window_for(begin)
        known, ahead = _NOTHING, 0
        if last is not None:
            known = last.data[begin - last.begin : end - last.begin]
            ahead = min(self._window_bytes, max(_LEAST_BYTES, 2 * len(last.data)))
        first = begin + len(known)
        if first == end:
            return [known]
        data = memoryview(self._fetch(first, max(end, min(first + ahead, self._size))))
        is_kept = len(data) <= self._window_bytes
        self._use(_Window(first, data) if is_kept else _Window(end, _NOTHING), instead_of=last)
        return [known, data[: end - first]]

    def _window_for(self, begin: int) -> _Window | None:
        """Return the window that has byte `begin`, or ends shortly before it."""
        for window in reversed(self._windows):
            if window.begin <= begin <= window.end + _GAP_BYTES:
                self._use(window, instead_of=window)
                return window
        return None

    def _use(self, window: _Window, *, instead_of: _Window | None) -> None:
        with self._lock:
            others = [other for other in self._windows if other is not instead_of]
            self._windows = [*others[1 - _NUM_WINDOWS :], window]
