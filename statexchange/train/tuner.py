"""The tuner: tries a few bucket sizes, and both ways of several hosts, while training goes on, and keeps the best."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

__all__ = ["Setting", "Trial", "Tuner"]

_LEAST, _MOST = 10, 31  # powers of two


@dataclass(frozen=True, slots=True)
class Setting:
    """The size to which buckets come near, and whether the ranks of each of several hosts work together first."""

    bucket_bytes: int
    hierarchical: bool = False


@dataclass(frozen=True, slots=True)
class Trial:
    """What steps took with one setting: the median of the slowest rank, in seconds."""

    bucket_bytes: int
    buckets: int
    step_s: float
    hierarchical: bool


class Tuner:
    """Proposes settings: `present`; the other way of several hosts, if there are `both`; then, with the faster of
    them, powers of two around the present size; and the fastest when all are tried."""

    def __init__(self, present: Setting, *, both: bool = False) -> None:
        power = round(math.log2(present.bucket_bytes))
        powers = (power + by for by in (-1, 1, -2, 2))
        self._sizes = [2**p for p in powers if _LEAST <= p <= _MOST and 2**p != present.bucket_bytes]
        self._took: dict[Setting, float] = {}
        self._open = [present, *([replace(present, hierarchical=not present.hierarchical)] if both else [])]

    def propose(self, used: Setting, step_s: float) -> Setting:
        """What to use next, after a step took `step_s` with the setting `used`; the fastest once all are tried."""
        if self._open:
            self._took[used] = step_s
            self._open = [setting for setting in self._open if setting not in self._took]
        fastest = min(self._took, key=self._took.__getitem__)
        if not self._open:
            self._open = [replace(fastest, bucket_bytes=size) for size in self._sizes]
            self._sizes = []
        return self._open[0] if self._open else fastest
