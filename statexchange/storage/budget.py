"""Bound the work of reading one source's headers, pickles and manifests by the bytes that are read.

A small file can ask for much: a pickle can refer to one object many times, a list of parts can name the same part again
and again, and dense text takes far more memory once parsed. So work that is done once for each reference, entry or part
is first spent from a `Budget`. Work that is done once for each byte is free.

The work on a file's header or pickle may take a number of steps for each of its bytes. What it takes beyond them comes
from a reserve. An opened store has one reserve, for itself, its subdirectories and all files in them (`Store.budget`,
`StoredFile.budget`): many small files get no more of it than one. A refused file does not use it up.
"""

from __future__ import annotations

from statexchange.errors import CorruptError

__all__ = ["Budget"]

_STEPS_PER_BYTE, _RESERVED_STEPS = 8, 1 << 16  # a real file needs less than 2 steps a byte
_CHARACTERS_PER_STEP = 16
_MEMORY_PER_BYTE, _RESERVED_MEMORY = 16, 32 << 20  # a real header takes up to 14 bytes of memory a byte


class _Reserve:
    """The rest of one source's reserve."""

    __slots__ = ("memory", "steps")

    def __init__(self) -> None:
        self.steps = _RESERVED_STEPS
        self.memory = _RESERVED_MEMORY


class Budget:
    """The work that reading `nbytes` bytes of the file at `path` may take."""

    __slots__ = ("_path", "_reserve", "_steps")

    def __init__(self, path: str, nbytes: int = 0, *, reserve: _Reserve | None = None) -> None:
        self._path = path
        self._steps = _STEPS_PER_BYTE * nbytes
        self._reserve = _Reserve() if reserve is None else reserve

    def of(self, path: str, nbytes: int) -> Budget:
        """Return a budget with the same reserve, for `nbytes` bytes of the file at `path`."""
        return Budget(path, nbytes, reserve=self._reserve)

    def spend(self, steps: int, characters: int = 0) -> None:
        """Count steps, and characters of text that are copied, hashed or compared.

        Raises:
            CorruptError: the budget is used up.
        """
        left = self._steps - steps - characters // _CHARACTERS_PER_STEP
        if left < 0:
            if -left > self._reserve.steps:
                problem = "refused: it refers to the same objects so often that reading it would take too long"
                raise CorruptError(problem, path=self._path)
            self._reserve.steps += left
            left = 0
        self._steps = left

    def spend_memory(self, nbytes: int, text: str, path: str) -> None:
        """Count the memory that JSON of the file at `path` takes once parsed.

        Raises:
            CorruptError: the budget is used up.
        """
        beyond = max(0, nbytes - _MEMORY_PER_BYTE * len(text))
        if beyond > self._reserve.memory:
            problem = f"refused: these {len(text)} characters of JSON would take too much memory once parsed"
            raise CorruptError(problem, path=path)
        self._reserve.memory -= beyond
