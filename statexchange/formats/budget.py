"""Bound the work of reading a pickle by its size in bytes.

A pickle can refer to one object many times, so a small file can stand for a huge structure. Work that is done once for
each reference (copying, visiting, hashing) is counted against a `Budget`; work that is done once for each byte is not.
"""

from __future__ import annotations

from statexchange.errors import CorruptError

__all__ = ["Budget"]

_STEPS_PER_BYTE, _LEAST_STEPS = 8, 1 << 16  # a real file needs less than 2 steps a byte
_CHARACTERS_PER_STEP = 16


class Budget:
    """The remaining work of reading one pickle of `nbytes` bytes; `path` is for the message."""

    __slots__ = ("_left", "_path")

    def __init__(self, nbytes: int, path: str) -> None:
        self._left = _STEPS_PER_BYTE * nbytes + _LEAST_STEPS
        self._path = path

    def spend(self, steps: int, characters: int = 0) -> None:
        """Count steps, and characters of text that are copied, hashed or compared.

        Raises:
            CorruptError: the budget is used up.
        """
        self._left -= steps + characters // _CHARACTERS_PER_STEP
        if self._left < 0:
            problem = "refused: it refers to the same objects so often that reading it would take too long"
            raise CorruptError(problem, path=self._path)
