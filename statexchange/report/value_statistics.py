"""Numbers about the values of tensors, in bounded memory: of one, and of the differences of two.

`ValueSums` adds up how two tensors differ. `read_statistics` reads one tensor, and `read_slice` a block of one.
Statistics are computed block by block in float64, over each element once, in one pass. The bins of the histogram have
widths that are powers of two and edges that are multiples of the width. If a value lies outside, neighbouring bins are
joined, which is exact, until all values fit: the result does not depend on the order of the blocks.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from statexchange.errors import CorruptError, InvalidArgumentError
from statexchange.report.tensor_facts import element_box, group_box
from statexchange.sharding.shards import Box, index_at, intersect
from statexchange.storage import regions
from statexchange.tensors import ITEMSIZE, PACKED, array_over, element_shape

if TYPE_CHECKING:
    from statexchange.report.tensor_facts import TensorFacts
    from statexchange.tensors import Array, ByteMemory

_BINS = 20  # the most bins of a histogram; if values differ, it has more than half as many
_CHUNK = 1 << 18  # elements whose statistics are computed at once: their copies in float64 fit the processor's cache
_MANTISSA, _LEAST_EXPONENT = 53, -1074  # bits of a float64; exponent of its least positive number
_MAX_SLICE = 100_000  # elements
_MAX_EXACT = 1 << 53  # float64 has each whole number up to this
_TILE = 1 << 17  # elements at once: fewer make threads wait for Python's lock more often
_SMALL_TILE = 1 << 13  # where all is copied to float64: new memory of more than 128 kB would come from the system
_DOT = 1 << 10  # elements of a dot product: few enough for float32 to be precise
_MIN_SQUARES = 1e-24  # of a tile in float32: the squares that float32 rounds to 0 are less than 1e-8 of a larger sum
_ROUNDING = 2.0**-22  # relative, more than that of a difference in float32


# --- One tensor ---


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


def read_slice(facts: TensorFacts, box: Box) -> Array:
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
    shown = np.full(box.shape, None, object)
    for region in facts.regions:
        seen = intersect(region.box, box)
        if seen is None:
            continue
        part = group_box(facts.dtype, seen)
        data = bytearray(part.numel * ITEMSIZE[facts.dtype])
        stored_box = group_box(facts.dtype, region.box)
        regions.read_part(region.stored, stored_box, part, facts.dtype, memoryview(data), part)
        region.stored.file.check_unchanged()
        values = _values_over(data, facts.dtype, part.shape)
        # Python has no number for the dtypes of ml_dtypes, and each of them is a float64.
        if values.dtype.kind not in "iubc":
            with np.errstate(invalid="ignore"):  # of NaN that signal
                values = values.astype(np.float64)
        # A part of a packed dtype begins with a whole group, which may have elements before those that are shown.
        within = regions.slices_within(seen, element_box(facts.dtype, part))
        shown[regions.slices_within(seen, box)] = values[within].astype(object)
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
    sums = _Sums(is_integer=facts.dtype[0] in "IU" or facts.dtype == "BOOL")
    problems: list[CorruptError] = []
    total, done = sum(region.stored.nbytes for region in facts.regions), 0
    ahead = regions.READ_AHEAD_BYTES
    if facts.dtype in PACKED:
        ahead //= 16  # values take up to 16 times the bytes
    for region in facts.regions:
        stored_box = group_box(facts.dtype, region.box)
        digest = regions.BoxDigest(region.stored, stored_box, facts.dtype)
        for window, data in regions.blocks(region.stored, stored_box.shape, facts.dtype, ahead):
            digest.update(regions.to_global(window, stored_box), data)
            sums.add(_values_over(data, facts.dtype, window.shape))
            done += len(data)
            if on_progress is not None:
                on_progress(done, total)
        problems += digest.problems(facts.name, region.holders[0])
        region.stored.file.check_unchanged()
    return sums.result(total, problems)


def _values_over(data: ByteMemory, dtype: str, shape: tuple[int, ...]) -> Array:
    """Return an array of values over bytes; those of a packed dtype are decoded, and its shape is in groups.

    The first element of a group lies in its lowest bits, as in torch's float4_e2m1fn_x2: the byte 0x72 of F4 has
    the codes 2 and 7, which are 1.0 and 6.0.
    """
    if dtype == "BOOL":
        return np.frombuffer(data, np.uint8).reshape(shape).astype(np.bool_)
    if dtype not in PACKED:
        return array_over(data, dtype, shape)
    import ml_dtypes

    kinds = {"F4": "float4_e2m1fn", "F6_E2M3": "float6_e2m3fn", "F6_E3M2": "float6_e3m2fn"}
    # Each code gets a byte of its own, as ml_dtypes stores it: for F4, bits (..., 4) are padded to 8.
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    bits_of_codes = bits.reshape(-1, 8 * ITEMSIZE[dtype] // PACKED[dtype])
    codes = np.packbits(bits_of_codes, axis=-1, bitorder="little")
    kind: np.dtype[Any] = np.dtype(getattr(ml_dtypes, kinds[dtype]))
    return codes.view(kind).astype(np.float32).reshape(element_shape(dtype, shape))


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

    def add(self, values: Array) -> None:
        """Add the values of a block."""
        flat = values.reshape(-1)
        with np.errstate(all="ignore"):
            for begin in range(0, len(flat), _CHUNK):
                self._add_chunk(flat[begin : begin + _CHUNK])

    def _add_chunk(self, values: Array) -> None:
        self._num_elements += len(values)
        sizes = np.abs(values) if values.dtype.kind == "c" else values
        wide = sizes.astype(np.float64)
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

    def _add_moments(self, values: Array) -> None:
        """Add to the mean and the standard deviation. No square is computed of a number that may be huge or tiny."""
        # To at most 1 in size, by a power of two, which rounds nothing
        exponent = math.frexp(float(np.abs(values).max()))[1]
        scaled = np.ldexp(values, -exponent)
        mean, deviation = float(np.ldexp(scaled.mean(), exponent)), float(np.ldexp(scaled.std(), exponent))
        # With n values before and m new ones: mean += (new - mean) * m / (n + m), and the variance is the mean of both,
        # weighted by n and m, plus n * m / (n + m)**2 * (new - mean)**2.
        share = len(values) / (self._bins.total() + len(values))
        half = mean / 2 - self._mean / 2  # of the distance of the means, which may be too large for a float64
        self._mean += half * share
        self._mean += half * share
        spread = 2 * math.sqrt(share * (1 - share)) * half
        self._deviation = math.hypot(self._deviation * math.sqrt(1 - share), deviation * math.sqrt(share), spread)

    def _widen_bins(self) -> None:
        """Join neighbouring bins until those from the least to the greatest value are at most _BINS."""
        edges = np.array([self._min, self._max], np.float64)
        # Bins can only get wider. Their numbers have at most the bits of a mantissa, so that an int64 has them.
        exponent = max(self._exponent, math.frexp(float(np.abs(edges).max()))[1] - _MANTISSA)
        while np.ptp(_bins_of(edges, exponent)) >= _BINS:
            exponent += 1
        joined: Counter[int] = Counter()
        for number, count in self._bins.items():
            joined[number >> exponent - self._exponent] += count
        self._bins, self._exponent = joined, exponent

    def result(self, nbytes: int, problems: Sequence[CorruptError]) -> ValueStatistics:
        """Return the statistics."""
        counts = self._num_elements, self._num_zeros, self._num_nan, self._num_inf
        if not self._bins:
            return ValueStatistics(*counts, None, None, None, None, (), nbytes, tuple(problems))
        # Rounding may lead out of the range of the values.
        low, high = float(self._min), float(self._max)
        mean, deviation = min(max(self._mean, low), high), min(self._deviation, max(abs(low), abs(high)))
        figures = self._min, self._max, mean, deviation
        histogram = []
        for number in range(min(self._bins), max(self._bins) + 1):
            begin: float
            end: float
            if self._is_integer:
                # The greatest integer that the bin has, as a reader would name it
                begin, end = number << self._exponent, (number + 1 << self._exponent) - 1
            else:
                with np.errstate(over="ignore"):
                    begin, end = np.ldexp([float(number), number + 1.0], self._exponent).tolist()
            histogram.append(Bin(begin, end, self._bins[number]))
        if self._min == self._max:
            # One value is no range.
            histogram = [Bin(self._min, self._max, self._bins.total())]
        return ValueStatistics(*counts, *figures, tuple(histogram), nbytes, tuple(problems))


def _bins_of(values: Array, exponent: int) -> Array:
    """Return the numbers of the bins, 2**exponent wide, that have these values."""
    scaled = np.floor(np.ldexp(values, -exponent))
    # A tiny negative number that was scaled to -0.0 belongs to the bin below 0.
    scaled[(scaled == 0) & (values < 0)] = -1
    return scaled.astype(np.int64)


# --- The differences of two tensors ---


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


@dataclass(slots=True)
class ValueSums:
    """The sums over the parts of two tensors from which their differences follow. Not thread-safe."""

    num_differing: int = 0
    max_abs: float = -1.0  # until there is a difference that is a number
    squares: list[float] = field(default_factory=lambda: [0.0] * 4)  # of the differences, of a, of b; products a * b
    first: tuple[int, ...] | None = None
    nans: list[int] = field(default_factory=lambda: [0, 0])

    def add(self, window: Box, a: Array, b: Array, tolerance: float | None) -> None:
        """Add the values of one window; NaN and infinite values count in the numbers of elements only.

        `tolerance` is that of `diff_checkpoints`.
        """
        a, b = a.reshape(-1), b.reshape(-1)
        with np.errstate(all="ignore"):
            for begin in range(0, len(a), _TILE):
                tile_a, tile_b = a[begin : begin + _TILE], b[begin : begin + _TILE]
                differing = self._add_narrow(tile_a, tile_b, tolerance)
                # float32 does for nearly all tensors, in a third of the time.
                if differing is None:
                    parts = []
                    for at in range(0, len(tile_a), _SMALL_TILE):
                        parts.append(self._add_any(tile_a[at:][:_SMALL_TILE], tile_b[at:][:_SMALL_TILE], tolerance))
                    differing = np.concatenate(parts)
                num_differing = int(np.count_nonzero(differing))
                if self.first is None and num_differing:
                    self.first = index_at(begin + int(differing.argmax()), window)
                self.num_differing += num_differing

    def _add_narrow(self, a: Array, b: Array, tolerance: float | None) -> Array | None:
        """Add the values of a tile, with sums in float32; return for each whether it differs.

        Return None, with nothing added, if float32 lacks some values, or their squares leave its range. `_add_any`,
        which takes about three times the time, has the same results but for the squares, of which these have 6 digits.
        """
        if not (_fits(a.dtype) and _fits(b.dtype)):
            return None
        wide_a, wide_b = a.astype(np.float32, copy=False), b.astype(np.float32, copy=False)
        delta = wide_b - wide_a
        differing: Array = delta != 0
        if a.dtype == b.dtype:
            differing = _differing_bits(a, b)
        largest = max(float(delta.max()), -float(delta.min()))
        squares = _dot(delta, delta), _dot(wide_a, wide_a), _dot(wide_b, wide_b), _dot(wide_a, wide_b)
        # NaN, infinite values, and squares beyond float32
        if not math.isfinite(sum(squares)):
            return None
        # Of values that float32 has, such as 1e-30, the squares may be 0 in it. Those of no difference are.
        if min(squares[1:3]) < _MIN_SQUARES or (largest and squares[0] < _MIN_SQUARES):
            return None
        # A difference that is near the tolerance, or beyond it, is counted in float64.
        if tolerance is not None:
            if largest >= tolerance * (1 - _ROUNDING):
                return None
            differing = np.zeros(len(a), np.bool_)
        # The exact largest difference is one of the few that may be it, if it may be larger than those before.
        if largest * (1 + _ROUNDING) > max(self.max_abs, 0.0):
            at = np.flatnonzero(np.abs(delta) >= largest * (1 - _ROUNDING))
            largest = float(np.abs(b[at].astype(np.float64) - a[at].astype(np.float64)).max())
        self._add_squares(*squares)
        self.max_abs = max(self.max_abs, largest)
        return differing

    def _add_any(self, a: Array, b: Array, tolerance: float | None) -> Array:
        """Add any values; return for each whether it differs."""
        is_complex = "c" in (a.dtype.kind, b.dtype.kind)
        wide = np.complex128 if is_complex else np.float64
        wide_a, wide_b = a.astype(wide), b.astype(wide)
        nan_a, nan_b = np.isnan(wide_a), np.isnan(wide_b)
        delta = wide_b - wide_a
        size = np.abs(delta)
        names = a.dtype.name, b.dtype.name
        if ("int64" in names or "uint64" in names) and not is_complex:
            # float64 rounds large integers, and Python's are exact. Fractions do not count: a float that has one is far
            # below _MAX_EXACT.
            rounded = np.isfinite(size) & (np.maximum(np.abs(wide_a), np.abs(wide_b)) >= _MAX_EXACT)
            pairs = zip(a[rounded].tolist(), b[rounded].tolist(), strict=True)
            size[rounded] = [abs(int(first) - int(second)) for first, second in pairs]
        if tolerance is None and a.dtype == b.dtype:
            differing: Array = _differing_bits(a, b)
        else:
            # The difference of two equal infinities is NaN, which is not greater either. Two NaN are equal.
            differing = ((size > (tolerance or 0.0)) & ~nan_b) | (nan_a != nan_b)
        self.nans[0] += int(nan_a.sum())
        self.nans[1] += int(nan_b.sum())
        self.max_abs = max(self.max_abs, float(np.fmax.reduce(size, initial=-1.0)))  # without NaN
        finite = np.isfinite(delta)
        if not finite.all():
            delta, wide_a, wide_b = delta[finite], wide_a[finite], wide_b[finite]
        squares = []
        for left, right in ((delta, delta), (wide_a, wide_a), (wide_b, wide_b), (wide_a, wide_b)):
            squares.append(float(np.vdot(left, right).real))
        self._add_squares(*squares)
        return differing

    def _add_squares(self, *squares: float) -> None:
        self.squares = list(map(operator.add, self.squares, squares))

    def merge(self, later: ValueSums) -> None:
        """Add the sums over parts that come later in C order, or on another rank."""
        self.num_differing += later.num_differing
        self.max_abs = max(self.max_abs, later.max_abs)
        self._add_squares(*later.squares)
        # Of a tensor without dims it is (), which is false.
        self.first = min((first for first in (self.first, later.first) if first is not None), default=None)
        self.nans = list(map(operator.add, self.nans, later.nans))

    def result(self) -> ValueDiff:
        """Return the differences."""
        delta, a, b, product = self.squares
        relative, cosine = 0.0, math.nan
        if a:
            relative = math.sqrt(delta / a)
        elif delta:
            relative = math.inf
        if a and b:
            if delta < min(a, b):  # then this is precise where the cosine is near 1
                product = (a + b - delta) / 2
            cosine = max(-1.0, min(product / math.sqrt(a) / math.sqrt(b), 1.0))
        largest = self.max_abs
        if largest < 0:  # no difference was a number: there was no element, or each had a NaN or two infinities
            largest = math.nan if self.num_differing else 0.0
        return ValueDiff(self.num_differing, largest, relative, cosine, self.first, *self.nans)


def _fits(dtype: np.dtype[Any]) -> bool:
    """Whether float32 represents each value of a dtype exactly, and of integers also the difference of any two."""
    if dtype.kind in "iu":
        return dtype.itemsize < 4
    return dtype.itemsize <= 4 and dtype.kind != "c"


def _dot(left: Array, right: Array) -> float:
    """Return the dot product of two arrays of one dtype, as the sum in float64 over short parts.

    OpenBLAS would divide long ones among threads of its own, which the other threads of a comparison then wait for.
    """
    whole = len(left) - len(left) % _DOT
    parts = np.matmul(left[:whole].reshape(-1, 1, _DOT), right[:whole].reshape(-1, _DOT, 1))
    return float(parts.sum(dtype=np.float64)) + float(np.dot(left[whole:], right[whole:]))


def _differing_bits(a: Array, b: Array) -> Any:
    """Return for each element whether its bits differ: by value 0.0 equals -0.0, and NaN equals nothing."""
    itemsize = a.dtype.itemsize
    # numpy has no integer of 16 bytes, for complex128; opaque bytes compare more slowly.
    bits = f"u{itemsize}" if itemsize <= 8 else f"V{itemsize}"
    return a.view(bits) != b.view(bits)
