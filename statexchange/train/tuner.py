"""The tuner: tries bucket sizes, with and without the hierarchy, during training, and keeps the fastest."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

__all__ = ["Setting", "Trial", "Tuner"]

_LEAST_POWER, _MOST_POWER = 10, 31  # of two: buckets of 1 KiB to 2 GiB


@dataclass(frozen=True, slots=True)
class Setting:
    """The approximate size of buckets, and whether ranks of several hosts reduce within each host first."""

    bucket_bytes: int
    hierarchical: bool = False


@dataclass(frozen=True, slots=True)
class Trial:
    """The time of a step with one setting: the median on the slowest rank, in seconds."""

    bucket_bytes: int
    buckets: int
    step_s: float
    hierarchical: bool


class Tuner:
    """Propose settings, one after each measurement, and the fastest when all were tried.

    The order: `present`; with `both`, the same with `hierarchical` negated; then, with the faster of these, powers of
    two around the present size.
    """

    def __init__(self, present: Setting, *, both: bool = False) -> None:
        power = round(math.log2(present.bucket_bytes))
        self._sizes = []
        for near in (power - 1, power + 1, power - 2, power + 2):
            if _LEAST_POWER <= near <= _MOST_POWER and 2**near != present.bucket_bytes:
                self._sizes.append(2**near)
        self._step_s: dict[Setting, float] = {}
        self._untried = [present]
        if both:
            self._untried.append(replace(present, hierarchical=not present.hierarchical))

    def propose(self, used: Setting, step_s: float) -> Setting:
        """Return what to use next, after a step took `step_s` with the setting `used`; at the end the fastest."""
        if self._untried:
            self._step_s[used] = step_s
            self._untried = [setting for setting in self._untried if setting not in self._step_s]
        fastest = min(self._step_s, key=self._step_s.__getitem__)
        if not self._untried:
            self._untried = [replace(fastest, bucket_bytes=size) for size in self._sizes]
            self._sizes = []
        return self._untried[0] if self._untried else fastest
