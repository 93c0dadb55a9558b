"""Compare two checkpoints of any formats, tensor by tensor: names, shapes, dtypes, then values.

Where both know a digest of the same box, the digests decide. Other tensors are read window by window. A first pass
compares bytes and ends at the first difference; only tensors that differ are read again, from the start, for the
numbers.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from statexchange.errors import InvalidArgumentError, without_secrets
from statexchange.formats.registry import open_source
from statexchange.formats.tensor_reader import MEMORY_BYTES, TensorReader
from statexchange.sharding.options import ExportOptions, Rename
from statexchange.sharding.plan import TensorPlan, plan_merge
from statexchange.sharding.shards import Box
from statexchange.tensors import PACKED, array_over, element_shape
from statexchange.units import format_bytes

if TYPE_CHECKING:
    from statexchange.formats.source import SectionName, Source

__all__ = ["DiffReport", "TensorDiff", "ValueDiff", "diff_checkpoints"]

Status = Literal["equal", "values", "dtype", "shape", "only in a", "only in b"]


@dataclass(frozen=True, slots=True)
class ValueDiff:
    """How the values of two tensors of one shape differ. Differences are those of b from a, in float64.

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


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """The comparison of one tensor.

    Attributes:
        name: its name, in a after `rename`.
        status: "equal"; or what differs: "values", the "dtype" alone, the "shape"; or "only in" one of the two.
        dtype_a: its dtype in a; None if it is not there, like the next three.
        dtype_b: its dtype in b.
        shape_a: its shape in a.
        shape_b: its shape in b.
        by: "digests" or "bytes", by which values were compared; None if they were not.
        values: the differences, if values differ.
    """

    name: str
    status: Status
    dtype_a: str | None
    dtype_b: str | None
    shape_a: tuple[int, ...] | None
    shape_b: tuple[int, ...] | None
    by: Literal["digests", "bytes"] | None = None
    values: ValueDiff | None = None


@dataclass(frozen=True, slots=True)
class DiffReport:
    """The comparison of two checkpoints.

    Attributes:
        a: the first path, as it was given.
        b: the second path.
        tensors: the comparison of each tensor, by name.
        nbytes: bytes that were read.
        notes: what a reader of the comparison should know, such as the section that was taken.
    """

    a: str
    b: str
    tensors: tuple[TensorDiff, ...]
    nbytes: int
    notes: tuple[str, ...] = ()

    @property
    def differing(self) -> tuple[TensorDiff, ...]:
        """The tensors that are not equal."""
        return tuple(tensor for tensor in self.tensors if tensor.status != "equal")

    @property
    def equal(self) -> bool:
        """Whether both have the same tensors with equal values."""
        return not self.differing

    def __str__(self) -> str:
        same = len(self.tensors) - len(self.differing)
        return f"{same:,} of {len(self.tensors):,} tensors are equal, {format_bytes(self.nbytes)} read"


def diff_checkpoints(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    section: SectionName | Literal["all"] | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    rename: Rename = (),
    tolerance: float | None = None,
    threads: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> DiffReport:
    """Compare two checkpoints of any formats and shardings.

    Not collective. Memory is bounded, whatever the size of the tensors.

    Args:
        a: a path or URL of any format that `open_checkpoint` reads.
        b: another.
        section: what to compare of a job's state, as for `merge_checkpoint`: by default the model, where it is known.
        include: shell patterns of names to compare; by default all. They are matched after `rename`.
        exclude: shell patterns of names to leave out.
        rename: a function of a name, or (regex, replacement) pairs, for the names in a.
        tolerance: values are equal if they differ by at most this, whatever their dtypes, and NaN equals NaN. By
            default bits and dtypes must be equal.
        threads: number of tensors read at once; by default one per core.
        on_progress: called with (bytes done, bytes in total).

    Returns:
        The report.

    Raises:
        NotFoundError: there is no checkpoint at a path.
        IncompleteError: something is missing in one of them.
        CorruptError: a file is broken; verify tells more.
        ReplacedError: one was changed meanwhile.
        InvalidArgumentError: an option is wrong.

    Example:
        >>> import numpy
        >>> from safetensors.numpy import save_file
        >>> save_file({"w": numpy.ones(4), "b": numpy.zeros(2)}, "a.safetensors")
        >>> save_file({"w": numpy.array([1.0, 1, 1.5, 1]), "b": numpy.zeros(2)}, "b.safetensors")
        >>> report = diff_checkpoints("a.safetensors", "b.safetensors")
        >>> for tensor in report.differing:
        ...     tensor.name, tensor.status, tensor.values.max_abs, tensor.values.first
        ('w', 'values', 0.5, (2,))
    """
    if tolerance is not None and not tolerance >= 0:
        raise InvalidArgumentError(f"tolerance must be a number from 0 on, not {tolerance!r}")
    selected = ExportOptions(include=include, exclude=exclude)
    with open_source(a, section=section) as source_a, open_source(b, section=section) as source_b:
        sides = (
            _Side(source_a, _tensors_of(source_a, ExportOptions(rename=rename), selected)),
            _Side(source_b, _tensors_of(source_b, ExportOptions(), selected)),
        )
        comparison = _Comparison(*sides, selected, tolerance, on_progress)
        tensors = comparison.run(threads)
        for source in (source_a, source_b):
            source.check_unchanged()
        notes = [f"a: {note}" for note in source_a.notes] + [f"b: {note}" for note in source_b.notes]
    shown_a, shown_b = without_secrets(os.fspath(a)), without_secrets(os.fspath(b))
    return DiffReport(shown_a, shown_b, tensors, comparison.done, tuple(notes))


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two: its tensors by the names under which they are compared."""

    source: Source
    tensors: Mapping[str, TensorPlan]

    def digests(self, name: str) -> dict[Box, str | None]:
        """Return the known digest of each box of a tensor."""
        plan = self.tensors[name]
        return {
            piece.box: self.source.files[piece.holder].tensors[plan.source].byte_ranges[piece.box_index].digest
            for piece in plan.pieces
        }


def _tensors_of(source: Source, options: ExportOptions, selected: ExportOptions) -> dict[str, TensorPlan]:
    for name, error in source.unsupported.items():
        if selected.wants(options.renamed(name)):
            raise error
    plan = plan_merge(source.rank_shards(), options)
    return {tensor.name: tensor for file in plan.files for tensor in file.tensors}


class _Comparison:
    """Compares the tensors of two sides."""

    def __init__(
        self,
        a: _Side,
        b: _Side,
        selected: ExportOptions,
        tolerance: float | None,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self._a, self._b = a, b
        self._names = [name for name in sorted(a.tensors.keys() | b.tensors.keys()) if selected.wants(name)]
        self._tolerance = tolerance
        self._on_progress = on_progress
        self._total = sum(side.tensors[name].nbytes for side in (a, b) for name in self._names if name in side.tensors)
        self._settled = 0  # bytes of tensors that need not be read
        self._lock = threading.Lock()
        self._memory = threading.local()
        self.done = 0

    def run(self, threads: int | None) -> tuple[TensorDiff, ...]:
        """Compare all tensors."""
        with ThreadPoolExecutor(threads or os.cpu_count() or 1) as pool:
            futures = [pool.submit(self._compare, name) for name in self._names]
            try:
                return tuple(future.result() for future in futures)
            except BaseException:
                for future in futures:
                    future.cancel()
                raise

    def _compare(self, name: str) -> TensorDiff:
        a, b = self._a.tensors.get(name), self._b.tensors.get(name)
        if a is None or b is None:
            status: Status = "only in a" if b is None else "only in b"
            return self._settle(name, status, a, b)
        if a.shape != b.shape:
            return self._settle(name, "shape", a, b)
        if a.dtype == b.dtype:
            digests = self._a.digests(name)
            if None not in digests.values() and digests == self._b.digests(name):
                return self._settle(name, "equal", a, b, "digests")
            if self._same_bytes(a, b):
                return _result(name, "equal", a, b, "bytes")
        values = self._values(a, b)
        if values is None:
            return _result(name, "values", a, b, "bytes")
        if self._tolerance is not None:
            return _result(name, "values" if values.num_differing else "equal", a, b, "bytes", values)
        if a.dtype != b.dtype and not values.num_differing:
            return _result(name, "dtype", a, b, "bytes")
        return _result(name, "values", a, b, "bytes", values)

    def _settle(
        self,
        name: str,
        status: Status,
        a: TensorPlan | None,
        b: TensorPlan | None,
        by: Literal["digests"] | None = None,
    ) -> TensorDiff:
        """Return the result of a tensor that is not read."""
        with self._lock:
            self._settled += sum(plan.nbytes for plan in (a, b) if plan is not None)
        return _result(name, status, a, b, by)

    def _pairs(self, a: TensorPlan, b: TensorPlan) -> Iterator[tuple[Box, memoryview, memoryview]]:
        """Yield the windows of two tensors of one shape with the bytes of both; check digests at the end."""
        if not hasattr(self._memory, "a"):
            self._memory.a, self._memory.b = (memoryview(bytearray(MEMORY_BYTES)) for _ in "ab")
        readers = TensorReader(self._a.source, a), TensorReader(self._b.source, b)
        itemsize = max(reader.itemsize for reader in readers)
        both = zip(
            readers[0].windows(self._memory.a, itemsize), readers[1].windows(self._memory.b, itemsize), strict=True
        )
        for (window, data_a), (_, data_b) in both:
            with self._lock:
                self.done += len(data_a) + len(data_b)
                if self._on_progress is not None:
                    self._on_progress(min(self.done + self._settled, self._total), self._total)
            yield window, data_a, data_b
        for reader in readers:
            reader.digests()

    def _same_bytes(self, a: TensorPlan, b: TensorPlan) -> bool:
        import numpy as np

        return all(np.array_equal(_words(data_a), _words(data_b)) for _, data_a, data_b in self._pairs(a, b))

    def _values(self, a: TensorPlan, b: TensorPlan) -> ValueDiff | None:
        """Return the differences in values; None for packed dtypes, whose values are not computed."""
        if {a.dtype, b.dtype} & PACKED.keys():
            return None
        sums = _Sums(a.shape, self._tolerance)
        for window, data_a, data_b in self._pairs(a, b):
            sums.add(window, array_over(data_a, a.dtype, window.shape), array_over(data_b, b.dtype, window.shape))
        return sums.result()


def _result(
    name: str,
    status: Status,
    a: TensorPlan | None,
    b: TensorPlan | None,
    by: Literal["digests", "bytes"] | None,
    values: ValueDiff | None = None,
) -> TensorDiff:
    dtype_a, shape_a = (None, None) if a is None else (a.dtype, element_shape(a.dtype, a.shape))
    dtype_b, shape_b = (None, None) if b is None else (b.dtype, element_shape(b.dtype, b.shape))
    return TensorDiff(name, status, dtype_a, dtype_b, shape_a, shape_b, by, values)


def _words(data: memoryview) -> Any:
    """Return bytes as an array of the largest words that divide them: comparing these is fastest."""
    import numpy as np

    size = next(size for size in (8, 4, 2, 1) if len(data) % size == 0)
    return np.frombuffer(data, f"u{size}")


@dataclass(slots=True)
class _Sums:
    """The sums over all windows from which the differences follow."""

    shape: tuple[int, ...]
    tolerance: float | None
    num_differing: int = 0
    max_abs: float = 0.0
    squares: list[float] = field(default_factory=lambda: [0.0] * 4)  # of the differences, of a, of b; products a * b
    first: tuple[int, ...] | None = None
    nans: list[int] = field(default_factory=lambda: [0, 0])
    has_number: bool = False

    def add(self, window: Box, a: Any, b: Any) -> None:
        """Add the values of one window; NaN and infinite values count in the numbers of elements only."""
        import numpy as np

        with np.errstate(all="ignore"):
            wide_a, wide_b = (_wide(values) for values in (a, b))
            nan_a, nan_b = np.isnan(wide_a), np.isnan(wide_b)
            delta = wide_b - wide_a
            size = np.abs(delta)
            if self.tolerance is not None:
                is_equal = (size <= self.tolerance) | (wide_a == wide_b) | (nan_a & nan_b)
            elif a.dtype == b.dtype:
                is_equal = _equal_bits(a, b)
            else:
                is_equal = (wide_a == wide_b) | (nan_a & nan_b)
            differing = np.flatnonzero(~is_equal.reshape(-1))
            if self.first is None and len(differing):
                inside = np.unravel_index(differing[0], window.shape)
                self.first = tuple(int(at) + begin for at, begin in zip(inside, window.offsets, strict=True))
            self.num_differing += len(differing)
            self.nans[0] += int(nan_a.sum())
            self.nans[1] += int(nan_b.sum())
            known = size[~np.isnan(size)]
            if known.size:
                self.has_number = True
                self.max_abs = max(self.max_abs, float(known.max()))
            finite = np.isfinite(delta)
            delta, wide_a, wide_b = (values[finite] for values in (delta, wide_a, wide_b))
            pairs = (delta, delta), (wide_a, wide_a), (wide_b, wide_b), (wide_a, wide_b)
            for index, (left, right) in enumerate(pairs):
                self.squares[index] += float(np.vdot(left, right).real)

    def result(self) -> ValueDiff:
        """Return the differences."""
        delta, a, b, product = self.squares
        relative = math.sqrt(delta / a) if a else (math.inf if delta else 0.0)
        cosine = product / math.sqrt(a) / math.sqrt(b) if a and b else math.nan
        largest = self.max_abs if self.has_number or not self.num_differing else math.nan
        return ValueDiff(self.num_differing, largest, relative, cosine, self.first, *self.nans)


def _wide(values: Any) -> Any:
    """Return values in float64, or complex128."""
    import numpy as np

    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)


def _equal_bits(a: Any, b: Any) -> Any:
    """Return for each element whether its bits are equal: by value 0.0 equals -0.0, and NaN equals nothing."""
    import numpy as np

    itemsize = a.dtype.itemsize
    if itemsize <= 8:
        return a.view(f"u{itemsize}") == b.view(f"u{itemsize}")
    pairs = (values.reshape(-1).view(np.uint64).reshape(-1, 2) for values in (a, b))
    return np.equal(*pairs).all(axis=1).reshape(a.shape)
