"""Bound the work of reading a pickle by the number of its bytes.

A pickle can name one object many times, and so stand for far more than it holds: what is copied, visited or hashed each
time that it is named is counted against a `Budget`. What follows from each byte once needs no count.
"""

from __future__ import annotations

from statexchange.errors import CorruptError

__all__ = ["Budget"]

_STEPS_PER_BYTE, _LEAST_STEPS = 8, 1 << 16  # a real file needs less than 2 steps a byte
_CHARACTERS_PER_STEP = 16


class Budget:
    """The steps that are left to the reader of one pickle of `nbytes`; `path` is for the message."""

    __slots__ = ("_left", "_path")

    def __init__(self, nbytes: int, path: str) -> None:
        self._left = _STEPS_PER_BYTE * nbytes + _LEAST_STEPS
        self._path = path

    def spend(self, steps: int, characters: int = 0) -> None:
        """Count steps, and characters of text that are copied, hashed or compared; CorruptError if none are left."""
        self._left -= steps + characters // _CHARACTERS_PER_STEP
        if self._left < 0:
            problem = "it repeats what it holds more often than anything real: reading it would take too long"
            raise CorruptError(problem, path=self._path)
