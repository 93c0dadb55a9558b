"""Read values of one tensor in bounded memory: a slice, statistics and a histogram.

Statistics are computed block by block in float64, over each element once, in one pass. The bins of the histogram have
widths that are powers of two and edges that are multiples of the width. If a value lies outside, neighbouring bins are
joined, which is exact, until all values fit: the result does not depend on the order of the blocks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from statexchange.errors import CorruptError, InvalidArgumentError
from statexchange.report.tensor_facts import element_box, group_box
from statexchange.sharding.shards import Box, intersect
from statexchange.storage import regions
from statexchange.tensors import ITEMSIZE, PACKED, array_over, numpy_dtype

if TYPE_CHECKING:
    from statexchange.report.tensor_facts import TensorFacts

__all__ = ["Bin", "ValueStatistics", "read_slice", "read_statistics"]

_BINS = 20  # the most bins of a histogram; if values differ, it has more than half as many
_CHUNK = 1 << 18  # elements whose statistics are computed at once: their copies in float64 fit the processor's cache
_MANTISSA, _LEAST_EXPONENT = 53, -1074  # bits of a float64; exponent of its least positive number
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


def read_slice(facts: TensorFacts, box: Box) -> Any:
    """Return the values in a block, given in elements, as an array of Python's numbers; None where no file has one.

    Not collective.

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
    return shown


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
    for region in facts.regions:
        stored_box = group_box(facts.dtype, region.box)
        digest = regions.BoxDigest(region.stored, stored_box, facts.dtype)
        for window, data in regions.blocks(region.stored, stored_box.shape, facts.dtype, ahead):
            if digest:
                digest.update(regions.to_global(window, stored_box), data)
            sums.add(_values_over(data, facts.dtype, window.shape))
            done += len(data)
            if on_progress is not None:
                on_progress(done, total)
        problems += digest.problems(facts.name, region.holders[0])
        region.stored.file.check_unchanged()
    return sums.result(total, problems)


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
        self._is_integer = is_integer
        self._num_elements = self._num_zeros = self._num_nan = self._num_inf = 0
        self._min: Any = math.inf
        self._max: Any = -math.inf
        self._mean = self._deviation = 0.0
        # The numbers of finite values by bin: bin n begins at n * 2**_exponent.
        self._bins: Counter[int] = Counter()
        self._exponent = 0 if is_integer else _LEAST_EXPONENT

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
        self._min = min(self._min, exact.min().item())
        self._max = max(self._max, exact.max().item())
        self._add_moments(wide)
        self._widen_bins()
        numbers = _bins_of(wide, self._exponent)
        first = numbers.min().item()
        for number, count in enumerate(np.bincount(numbers - first).tolist(), first):
            self._bins[number] += count

    def _add_moments(self, values: Any) -> None:
        """Add to the mean and the standard deviation. No square is computed of a number that may be huge or tiny."""
        exponent = math.frexp(float(np.abs(values).max()))[1]
        scaled = np.ldexp(values, -exponent)
        mean, deviation = (float(np.ldexp(moment, exponent)) for moment in (scaled.mean(), scaled.std()))
        share = len(values) / (self._bins.total() + len(values))
        half = mean / 2 - self._mean / 2  # of the distance of the means, which may be too large for a float64
        self._mean += half * share
        self._mean += half * share
        spread = 2 * math.sqrt(share * (1 - share)) * half
        self._deviation = math.hypot(self._deviation * math.sqrt(1 - share), deviation * math.sqrt(share), spread)

    def _widen_bins(self) -> None:
        """Join neighbouring bins until those from the least to the greatest value are at most _BINS."""
        edges = np.array([self._min, self._max], np.float64)
        exponent = max(self._exponent, math.frexp(float(np.abs(edges).max()))[1] - _MANTISSA)
        while np.ptp(_bins_of(edges, exponent)) >= _BINS:
            exponent += 1
        joined: Counter[int] = Counter()
        for number, count in self._bins.items():
            joined[number >> exponent - self._exponent] += count
        self._bins, self._exponent = joined, exponent

    def _histogram(self) -> Iterator[Bin]:
        """Yield the bins; one alone if all values are equal."""
        if self._min == self._max:
            yield Bin(self._min, self._max, self._bins.total())
            return
        for number in range(min(self._bins), max(self._bins) + 1):
            if self._is_integer:
                low, high = number << self._exponent, (number + 1 << self._exponent) - 1
                yield Bin(low, high, self._bins[number])
            else:
                with np.errstate(over="ignore"):
                    low, high = np.ldexp([float(number), number + 1.0], self._exponent).tolist()
                yield Bin(low, high, self._bins[number])

    def result(self, nbytes: int, problems: Sequence[CorruptError]) -> ValueStatistics:
        """Return the statistics."""
        counts = self._num_elements, self._num_zeros, self._num_nan, self._num_inf
        if not self._bins:
            return ValueStatistics(*counts, None, None, None, None, (), nbytes, tuple(problems))
        # Rounding may lead out of the range of the values.
        low, high = float(self._min), float(self._max)
        mean, deviation = min(max(self._mean, low), high), min(self._deviation, max(abs(low), abs(high)))
        figures = self._min, self._max, mean, deviation
        return ValueStatistics(*counts, *figures, tuple(self._histogram()), nbytes, tuple(problems))


def _bins_of(values: Any, exponent: int) -> Any:
    """Return the numbers of the bins, 2**exponent wide, that have these values."""
    scaled = np.floor(np.ldexp(values, -exponent))
    scaled[(scaled == 0) & (values < 0)] = -1  # where scaling has underflowed
    return scaled.astype(np.int64)
