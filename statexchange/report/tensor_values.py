"""Read values of one tensor in bounded memory: a slice, statistics and a histogram.

Statistics are computed block by block in float64, over each element once, in one pass. The bins of the histogram have
widths that are powers of two and edges that are multiples of the width. If a value lies outside, neighbouring bins are
joined, which is exact, until all values fit: the result does not depend on the order of the blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from statexchange.errors import CorruptError, InvalidArgumentError
from statexchange.report.tensor_facts import element_box, group_box
from statexchange.sharding.shards import Box, intersect
from statexchange.storage import regions
from statexchange.tensors import ITEMSIZE, PACKED, array_over, numpy_dtype

if TYPE_CHECKING:
    from statexchange.report.tensor_facts import Region, TensorFacts

__all__ = ["Bin", "TensorValues", "ValueStatistics", "read_slice", "read_statistics"]

_BINS = 20  # the most bins of a histogram; if values differ, it has more than half as many
_CHUNK = 1 << 18  # elements whose statistics are computed at once: their copies in float64 fit the processor's cache
_MANTISSA = 53  # bits of a float64
_UNSCALED = 400  # up to this exponent the squares of values, and their sums, stay in the range of float64
_MAX_SLICE = 100_000  # elements


@dataclass(frozen=True, slots=True)
class Bin:
    """The number of values from `low` (included) to `high`, which is included for integers only."""

    low: float
    high: float
    count: int


@dataclass(frozen=True, slots=True)
class ValueStatistics:
    """Statistics of the values of a tensor.

    Attributes:
        num_elements: number of elements that were read.
        num_zeros: number of zeros.
        num_nan: number of NaN.
        num_inf: number of infinite values.
        min: the least finite value; None if there is none. For a complex dtype this and the next four are those of the
            absolute values.
        max: the greatest.
        mean: their mean.
        std: their standard deviation, as numpy computes it: the divisor is the number of values.
        histogram: the number of finite values by size.
        nbytes: bytes that were read.
        problems: errors for bytes that differ from their digest.
    """

    num_elements: int
    num_zeros: int
    num_nan: int
    num_inf: int
    min: float | int | None
    max: float | int | None
    mean: float | None
    std: float | None
    histogram: tuple[Bin, ...]
    nbytes: int
    problems: tuple[CorruptError, ...]


@dataclass(frozen=True, slots=True)
class TensorValues:
    """The values of a block; `values` are nested lists, with None for elements that no file has."""

    box: Box
    values: Any


def read_slice(facts: TensorFacts, box: Box) -> TensorValues:
    """Return the values in a block, given in elements. Not collective.

    Raises:
        InvalidArgumentError: the block has more than 100,000 elements.
        StorageError: a file cannot be read.
    """
    if box.numel > _MAX_SLICE:
        text = (
            f"this slice has {box.numel:,} elements, and at most {_MAX_SLICE:,} are shown: take a smaller one, or "
            "open_checkpoint(path)[name].read(box) in Python"
        )
        raise InvalidArgumentError(text, name=facts.name)
    target = group_box(facts.dtype, box)
    data = bytearray(target.numel * ITEMSIZE[facts.dtype])
    is_known = np.zeros(box.shape, np.bool_)
    for region in facts.regions:
        stored_box = group_box(facts.dtype, region.box)
        part = intersect(stored_box, target)
        if part is None:
            continue
        regions.read_part(region.stored, stored_box, part, facts.dtype, memoryview(data), target)
        region.stored.file.check_unchanged()
        seen = intersect(element_box(facts.dtype, part), box)
        if seen is not None:
            is_known[regions.slices_within(seen, box)] = True
    whole = element_box(facts.dtype, target)
    values = _values_over(data, facts.dtype, target.shape)[regions.slices_within(box, whole)]
    if values.dtype.kind not in "iubc":
        with np.errstate(invalid="ignore"):  # of NaN that signal
            values = values.astype(np.float64)
    shown = np.empty(box.shape, object)
    shown[...] = values.astype(object)  # a numpy scalar would stay one
    shown[~is_known] = None
    return TensorValues(box, shown.tolist())


def read_statistics(facts: TensorFacts, on_progress: Callable[[int, int], None] | None = None) -> ValueStatistics:
    """Read all regions of a tensor, each once, and return the statistics of its values. Not collective.

    Args:
        facts: the tensor.
        on_progress: called with the bytes done and the bytes in all.

    Raises:
        ReplacedError: a file was changed while it was read.
        StorageError: a file cannot be read.
    """
    sums = _Sums(is_integer=facts.dtype not in PACKED and numpy_dtype(facts.dtype).kind in "iub")
    problems: list[CorruptError] = []
    total, done = sum(region.nbytes for region in facts.regions), 0
    ahead = regions.READ_AHEAD_BYTES // (16 if facts.dtype in PACKED else 1)  # values take up to 16 times the bytes
    for index, region in enumerate(facts.regions):
        stored_box = group_box(facts.dtype, region.box)
        digest = regions.BoxDigest(region.stored, stored_box, facts.dtype)
        earlier = _overlapping(facts, index)
        for window, data in regions.blocks(region.stored, stored_box.shape, facts.dtype, ahead):
            placed = regions.to_global(window, stored_box)
            if digest:
                digest.update(placed, data)
            values = _values_over(data, facts.dtype, window.shape)
            sums.add(_not_in(earlier, element_box(facts.dtype, placed), values))
            done += len(data)
            if on_progress is not None:
                on_progress(done, total)
        problems += digest.problems(facts.name, region.holders[0])
        region.stored.file.check_unchanged()
    return sums.result(total, problems)


def _overlapping(facts: TensorFacts, index: int) -> list[Region]:
    """Return the regions before this one that share elements with it."""
    if not facts.overlaps:
        return []
    box = facts.regions[index].box
    return [region for region in facts.regions[:index] if intersect(region.box, box) is not None]


def _not_in(earlier: Sequence[Region], box: Box, values: Any) -> Any:
    """Return the values of a block that lie in no earlier region."""
    shared = [part for part in (intersect(region.box, box) for region in earlier) if part is not None]
    if not shared:
        return values
    is_new = np.ones(box.shape, np.bool_)
    for part in shared:
        is_new[regions.slices_within(part, box)] = False
    return values[is_new]


def _values_over(data: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """Return an array of values over bytes; those of a packed dtype are decoded, and its shape is in groups.

    The first element of a group lies in its lowest bits, as in torch's float4_e2m1fn_x2.
    """
    if dtype == "BOOL":
        return np.frombuffer(data, np.uint8).reshape(shape) != 0
    if dtype not in PACKED:
        return array_over(data, dtype, shape)
    import ml_dtypes

    count, itemsize = PACKED[dtype], ITEMSIZE[dtype]
    octets = np.frombuffer(data, np.uint8).reshape(-1, itemsize)
    bits = 8 * itemsize // count
    groups = sum(octets[:, index].astype(np.uint32) << (8 * index) for index in range(itemsize))
    codes = np.stack([(groups >> (bits * index)) & ((1 << bits) - 1) for index in range(count)], axis=-1)
    kinds = {"F4": "float4_e2m1fn", "F6_E2M3": "float6_e2m3fn", "F6_E3M2": "float6_e3m2fn"}
    table = np.arange(1 << bits, dtype=np.uint8).view(getattr(ml_dtypes, kinds[dtype])).astype(np.float32)
    return table[codes].reshape(*shape[:-1], shape[-1] * count)


class _Sums:
    """The sums over blocks from which statistics follow. Not thread-safe."""

    def __init__(self, *, is_integer: bool) -> None:
        self._num_elements = self._num_zeros = self._num_nan = self._num_inf = self._num_finite = 0
        self._min: Any = None
        self._max: Any = None
        # The mean, and the sum of squared distances from it, of the values divided by 2**_exponent.
        self._mean = self._squares = 0.0
        self._exponent = 0
        self._histogram = _Histogram(is_integer=is_integer)

    def add(self, values: Any) -> None:
        """Add the values of a block."""
        flat = values.reshape(-1)
        with np.errstate(all="ignore"):
            for begin in range(0, len(flat), _CHUNK):
                self._add_chunk(flat[begin : begin + _CHUNK])

    def _add_chunk(self, values: Any) -> None:
        self._num_elements += len(values)
        wide = np.abs(values).astype(np.float64) if values.dtype.kind == "c" else values.astype(np.float64)
        is_finite = np.isfinite(wide)
        if not is_finite.all():
            num_nan = int(np.isnan(wide).sum())
            self._num_nan += num_nan
            self._num_inf += len(wide) - int(is_finite.sum()) - num_nan
            wide = wide[is_finite]
        if not len(wide):
            return
        self._num_zeros += len(wide) - int(np.count_nonzero(wide))
        exact = values if values.dtype.kind in "iu" else wide  # float64 cannot represent every 64-bit integer
        low, high = exact.min().item(), exact.max().item()
        self._min = low if self._min is None else min(self._min, low)
        self._max = high if self._max is None else max(self._max, high)
        least, greatest = float(wide.min()), float(wide.max())
        self._histogram.add(wide, least, greatest)
        self._scale_for(max(abs(least), abs(greatest)))
        if self._exponent:
            wide = np.ldexp(wide, -self._exponent)
        # Chan, Golub and LeVeque: the mean and squared distances of two sets from those of each.
        mean = float(wide.mean())
        squares = float(np.square(wide - mean).sum())
        count = self._num_finite + len(wide)
        delta = mean - self._mean
        self._squares += squares + delta * delta * self._num_finite * len(wide) / count
        self._mean += delta * len(wide) / count
        self._num_finite = count

    def _scale_for(self, largest: float) -> None:
        """Choose the exponent with which sums of values up to `largest` neither overflow nor vanish."""
        exponent = math.frexp(largest)[1]
        if not largest or exponent == self._exponent:
            return
        if abs(exponent) <= _UNSCALED:
            exponent = 0
        if self._squares or self._mean:
            exponent = max(exponent, self._exponent)  # what underflows is negligible beside the larger values
            self._mean = math.ldexp(self._mean, self._exponent - exponent)
            self._squares = math.ldexp(self._squares, 2 * (self._exponent - exponent))
        self._exponent = exponent

    def _mean_and_deviation(self) -> tuple[float | None, float | None]:
        if not self._num_finite:
            return None, None
        # Rounding may lead out of the range of the values, and even out of that of float64.
        low, high = (math.ldexp(float(edge), -self._exponent) for edge in (self._min, self._max))
        mean = min(max(self._mean, low), high)
        deviation = min(math.sqrt(self._squares / self._num_finite), max(abs(low), abs(high)))
        return math.ldexp(mean, self._exponent), math.ldexp(deviation, self._exponent)

    def result(self, nbytes: int, problems: Sequence[CorruptError]) -> ValueStatistics:
        """Return the statistics."""
        mean, deviation = self._mean_and_deviation()
        return ValueStatistics(
            num_elements=self._num_elements,
            num_zeros=self._num_zeros,
            num_nan=self._num_nan,
            num_inf=self._num_inf,
            min=self._min,
            max=self._max,
            mean=mean,
            std=deviation,
            histogram=self._histogram.bins(self._min, self._max),
            nbytes=nbytes,
            problems=tuple(problems),
        )


class _Histogram:
    """Counts values in bins of width 2**_exponent; the first bin begins at _first * 2**_exponent."""

    def __init__(self, *, is_integer: bool) -> None:
        self._is_integer = is_integer
        self._exponent = 0
        self._first = 0
        self._counts: list[int] = []

    def add(self, values: Any, low: float, high: float) -> None:
        """Add finite values, of which the least is `low` and the greatest `high`."""
        self._make_room(low, high)
        scaled = np.floor(np.ldexp(values, -self._exponent))
        scaled[(scaled == 0) & (values < 0)] = -1  # where scaling has underflowed
        index = scaled.astype(np.int64) - self._first
        for number, count in enumerate(np.bincount(index).tolist()):
            self._counts[number] += count

    def _make_room(self, low: float, high: float) -> None:
        """Widen the bins until those from `low` to `high` and the present ones are at most _BINS."""
        exponent = max(math.frexp(max(abs(low), abs(high)))[1] - _MANTISSA, -1074)
        if self._is_integer:
            exponent = max(exponent, 0)
        exponent = max(exponent, self._exponent) if self._counts else exponent
        while True:
            first, last = _bin_of(low, exponent), _bin_of(high, exponent)
            if self._counts:
                shift = exponent - self._exponent
                first = min(first, self._first >> shift)
                last = max(last, (self._first + len(self._counts) - 1) >> shift)
            if last - first < _BINS:
                break
            exponent += 1
        counts = [0] * (last - first + 1)
        for number, count in enumerate(self._counts):
            counts[((self._first + number) >> (exponent - self._exponent)) - first] += count
        self._exponent, self._first, self._counts = exponent, first, counts

    def bins(self, low: float | None, high: float | None) -> tuple[Bin, ...]:
        """Return the bins; one alone from `low` to `high` if all values are equal."""
        if low is None or high is None:
            return ()
        if low == high:
            return (Bin(low, high, sum(self._counts)),)
        found = []
        for number, count in enumerate(self._counts):
            begin, end = self._first + number, self._first + number + 1
            if self._is_integer:
                found.append(Bin(begin << self._exponent, (end << self._exponent) - 1, count))
            else:
                found.append(Bin(_scaled(begin, self._exponent), _scaled(end, self._exponent), count))
        return tuple(found)


def _bin_of(value: float, exponent: int) -> int:
    """Return the number of the bin that has a value, counted from zero."""
    found = math.floor(math.ldexp(value, -exponent))
    return -1 if not found and value < 0 else found  # where scaling has underflowed


def _scaled(value: int, exponent: int) -> float:
    """Return value * 2**exponent; infinity if float64 has no such number."""
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return math.copysign(math.inf, value)
