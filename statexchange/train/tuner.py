"""The tuner: tries a few bucket sizes while training goes on, and keeps the best."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["BucketTuner", "Trial"]

_LEAST, _MOST = 10, 31  # powers of two


@dataclass(frozen=True, slots=True)
class Trial:
    """What steps took with one setting: the median of the slowest rank, in seconds."""

    bucket_bytes: int
    buckets: int
    step_s: float


class BucketTuner:
    """Proposes bucket sizes: `present`, then powers of two around it, and the fastest when all are tried."""

    def __init__(self, present: int) -> None:
        power = round(math.log2(present))
        powers = (power + by for by in (-1, 1, -2, 2))
        around = [2**p for p in powers if _LEAST <= p <= _MOST and 2**p != present]
        self._took: dict[int, float] = {}
        self._open = [present, *around]

    def propose(self, bucket_bytes: int, step_s: float) -> int:
        """What to use next, after a step took `step_s` with buckets of `bucket_bytes`; no more once all are tried."""
        if self._open:
            self._took[bucket_bytes] = step_s
            self._open = [size for size in self._open if size not in self._took]
        return self._open[0] if self._open else min(self._took, key=self._took.__getitem__)
