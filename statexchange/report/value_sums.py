"""Compute how the values of two tensors differ, from their parts in any order."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from statexchange.sharding.shards import index_at

if TYPE_CHECKING:
    from statexchange.sharding.shards import Box

__all__ = ["ValueDiff", "ValueSums", "same_bytes"]

_MAX_EXACT = 1 << 53  # float64 has each whole number up to this
_TILE = 1 << 19  # elements at once: fewer make threads wait for Python's lock more often
_DOT = 1 << 10  # elements of a dot product: few enough for float32 to be precise
_MIN_SQUARES = 1e-24  # of a tile in float32: the squares that float32 rounds to 0 are less than 1e-8 of a larger sum
_ROUNDING = 2.0**-22  # relative, more than that of a difference in float32


@dataclass(frozen=True, slots=True)
class ValueDiff:
    """The differences in value of two tensors of one shape. Differences are those of b from a, in float64.

    Sums of squares are computed in float32 where its range allows it: the norm and the cosine have 6 digits.

    Attributes:
        num_differing: number of elements that differ; with a tolerance, by more than it.
        max_abs: the largest difference; NaN if every difference is.
        relative_l2: norm of the differences over the norm of a; infinite if a is zero.
        cosine: cosine of the angle between a and b; NaN if one of them is zero.
        first: index of the first element that differs; None if none does.
        num_nan_a: number of NaN in a.
        num_nan_b: number of NaN in b.
    """

    num_differing: int
    max_abs: float
    relative_l2: float
    cosine: float
    first: tuple[int, ...] | None
    num_nan_a: int
    num_nan_b: int


def same_bytes(a: memoryview, b: memoryview) -> bool:
    """Whether two buffers of one size have the same bytes. Not collective."""
    import numpy as np

    size = next(size for size in (8, 4, 2, 1) if len(a) % size == 0)  # the largest words are compared fastest
    return not np.count_nonzero(np.frombuffer(a, f"u{size}") != np.frombuffer(b, f"u{size}"))


@dataclass(slots=True)
class ValueSums:
    """The sums over the parts of two tensors from which their differences follow. Not thread-safe."""

    num_differing: int = 0
    max_abs: float = 0.0
    squares: list[float] = field(default_factory=lambda: [0.0] * 4)  # of the differences, of a, of b; products a * b
    first: tuple[int, ...] | None = None
    nans: list[int] = field(default_factory=lambda: [0, 0])
    has_number: bool = False
    _memory: tuple[Any, Any] | None = field(default=None, init=False, repr=False, compare=False)  # for two tiles

    def add(self, window: Box, a: Any, b: Any, tolerance: float | None) -> None:
        """Add the values of one window; NaN and infinite values count in the numbers of elements only.

        `tolerance` is that of `diff_checkpoints`.
        """
        import numpy as np

        a, b = a.reshape(-1), b.reshape(-1)
        with np.errstate(all="ignore"):
            for begin in range(0, len(a), _TILE):
                tile_a, tile_b = a[begin : begin + _TILE], b[begin : begin + _TILE]
                differing = self._add_in("float32", tile_a, tile_b, tolerance)
                if differing is None:
                    differing = self._add_in("float64", tile_a, tile_b, tolerance)
                if differing is None:
                    differing = self._add_any(tile_a, tile_b, tolerance)
                num_differing = int(np.count_nonzero(differing))
                if self.first is None and num_differing:
                    self.first = index_at(begin + int(differing.argmax()), window)
                self.num_differing += num_differing

    def _add_in(self, dtype: Literal["float32", "float64"], a: Any, b: Any, tolerance: float | None) -> Any:
        """Add the values of a tile, with sums in a dtype; return for each whether it differs.

        Return None, with nothing added, if that dtype lacks some values, or their squares leave its range. float64
        takes about four times the time of float32, and `_add_any` takes more. All have the same results but for the
        squares, which float32 rounds to 6 digits.
        """
        import numpy as np

        if not (_fits(a.dtype, dtype) and _fits(b.dtype, dtype)):
            return None
        if self._memory is None:
            self._memory = np.empty(_TILE), np.empty(_TILE)
        room_a, room_b = (memory.view(dtype)[: len(a)] for memory in self._memory)
        wide_a, wide_b = _converted(a, room_a), _converted(b, room_b)
        differing = _differing_bits(a, b) if a.dtype == b.dtype else None
        square = _dot(wide_a, wide_a)
        if differing is not None and not differing.any():
            squares, largest = (0.0, square, square, square), 0.0
        else:
            of_sides = square, _dot(wide_b, wide_b), _dot(wide_a, wide_b)
            delta = np.subtract(wide_b, wide_a, out=room_b)
            squares = _dot(delta, delta), *of_sides
            largest = max(float(delta.max()), -float(delta.min()))
            if tolerance is not None:
                differing = np.abs(delta) > tolerance
            elif differing is None:
                differing = delta != 0
        if not math.isfinite(sum(squares)):
            return None
        if dtype == "float32":
            if min(squares[1], squares[2], squares[0] if largest else math.inf) < _MIN_SQUARES:
                return None
            if tolerance is not None and largest >= tolerance * (1 - _ROUNDING):
                return None
            if largest * (1 + _ROUNDING) > self.max_abs:
                at = np.flatnonzero(np.abs(delta) >= largest * (1 - _ROUNDING))
                largest = float(np.abs(b[at].astype(np.float64) - a[at].astype(np.float64)).max())
        self._add_squares(*squares)
        self.has_number = True
        self.max_abs = max(self.max_abs, largest)
        return differing

    def _add_any(self, a: Any, b: Any, tolerance: float | None) -> Any:
        """Add any values; return for each whether it differs."""
        import numpy as np

        wide_a, wide_b = (_wide(values) for values in (a, b))
        nan_a, nan_b = np.isnan(wide_a), np.isnan(wide_b)
        delta = wide_b - wide_a
        size = np.abs(delta)
        _make_exact(size, (a, wide_a), (b, wide_b))
        if tolerance is None and a.dtype == b.dtype:
            differing = _differing_bits(a, b)
        else:  # the difference of two equal infinities is NaN
            is_equal = ((wide_a == wide_b) & ~(size > 0)) | (nan_a & nan_b)
            if tolerance is not None:
                is_equal |= size <= tolerance
            differing = ~is_equal
        self.nans[0] += int(nan_a.sum())
        self.nans[1] += int(nan_b.sum())
        known = size[~np.isnan(size)]
        if known.size:
            self.has_number = True
            self.max_abs = max(self.max_abs, float(known.max()))
        finite = np.isfinite(delta)
        delta, wide_a, wide_b = (values[finite] for values in (delta, wide_a, wide_b))
        pairs = (delta, delta), (wide_a, wide_a), (wide_b, wide_b), (wide_a, wide_b)
        self._add_squares(*(float(np.vdot(left, right).real) for left, right in pairs))
        return differing

    def _add_squares(self, *squares: float) -> None:
        self.squares = [before + new for before, new in zip(self.squares, squares, strict=True)]

    def merge(self, other: ValueSums) -> None:
        """Add the sums over parts that come later in C order, or on another rank."""
        self.num_differing += other.num_differing
        self.max_abs = max(self.max_abs, other.max_abs)
        self.squares = [ours + theirs for ours, theirs in zip(self.squares, other.squares, strict=True)]
        self.first = min((first for first in (self.first, other.first) if first is not None), default=None)
        self.nans = [ours + theirs for ours, theirs in zip(self.nans, other.nans, strict=True)]
        self.has_number |= other.has_number

    def result(self) -> ValueDiff:
        """Return the differences."""
        delta, a, b, product = self.squares
        relative = math.inf if delta else 0.0
        cosine = math.nan
        if a:
            relative = math.sqrt(delta / a)
        if a and b:
            if delta < min(a, b):  # then this is precise where the cosine is near 1
                product = (a + b - delta) / 2
            cosine = max(-1.0, min(product / math.sqrt(a) / math.sqrt(b), 1.0))
        largest = self.max_abs if self.has_number or not self.num_differing else math.nan
        return ValueDiff(self.num_differing, largest, relative, cosine, self.first, *self.nans)


def _wide(values: Any) -> Any:
    """Return values in float64, or complex128."""
    import numpy as np

    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)


def _fits(dtype: Any, wide: Literal["float32", "float64"]) -> bool:
    """Whether `wide` represents each value of a dtype exactly, and of integers also the difference of any two."""
    limit = {"float32": 4, "float64": 8}[wide]
    kind, itemsize = str(dtype.kind), int(dtype.itemsize)
    return itemsize < limit if kind in "iu" else itemsize <= limit and kind != "c"


def _converted(values: Any, room: Any) -> Any:
    """Return values in the dtype of `room`: themselves if they have it, else in that memory."""
    import numpy as np

    if values.dtype == room.dtype:
        return values
    np.copyto(room, values, casting="unsafe")
    return room


def _dot(left: Any, right: Any) -> float:
    """Return the dot product of two arrays of one dtype, as the sum in float64 over short parts.

    OpenBLAS would divide long ones among threads of its own, which the other threads of a comparison then wait for.
    """
    import numpy as np

    whole = len(left) - len(left) % _DOT
    parts = np.matmul(left[:whole].reshape(-1, 1, _DOT), right[:whole].reshape(-1, _DOT, 1))
    return float(parts.sum(dtype=np.float64)) + float(np.dot(left[whole:], right[whole:]))


def _make_exact(size: Any, *sides: tuple[Any, Any]) -> None:
    """Replace the sizes of differences that float64 rounds, as it does those of large integers of 64 bits.

    `sides` are the values of a and of b, and the same in float64.
    """
    import numpy as np

    are_wide = [values.dtype.kind in "iu" and values.dtype.itemsize == 8 for values, _ in sides]
    if not any(are_wide) or any(wide.dtype.kind == "c" for _, wide in sides):
        return
    rounded = np.isfinite(size) & (np.maximum(*(np.abs(wide) for _, wide in sides)) >= _MAX_EXACT)
    # Python's integers are exact. Fractions do not count: a float that has one is far below _MAX_EXACT.
    exact = (values if is_wide else wide for is_wide, (values, wide) in zip(are_wide, sides, strict=True))
    pairs = zip(*(side[rounded].tolist() for side in exact), strict=True)
    size[rounded] = [abs(int(first) - int(second)) for first, second in pairs]


def _differing_bits(a: Any, b: Any) -> Any:
    """Return for each element whether its bits differ: by value 0.0 equals -0.0, and NaN equals nothing."""
    import numpy as np

    itemsize = a.dtype.itemsize
    if itemsize <= 8:
        return a.view(f"u{itemsize}") != b.view(f"u{itemsize}")
    pairs = (values.reshape(-1).view(np.uint64).reshape(-1, 2) for values in (a, b))
    return np.not_equal(*pairs).any(axis=1).reshape(a.shape)
