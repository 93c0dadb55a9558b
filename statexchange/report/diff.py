"""Compare two checkpoints of any formats, tensor by tensor: names, shapes, dtypes, then values.

Where both know a digest of the same box, the digests decide. Small tensors that lie one after another in a file of each
side are read and compared together. Other tensors are read window by window. A first pass compares bytes and ends at
the first difference; only tensors that differ are read again, from the start, for the numbers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

from statexchange.errors import InvalidArgumentError, without_secrets
from statexchange.formats.converted import configs_beside, convert_source, read_conversion
from statexchange.formats.registry import open_source
from statexchange.formats.replicas import TAKE_LOWEST, check_tensor_copies, check_tied
from statexchange.formats.tensor_reader import MEMORY_BYTES, TensorReader
from statexchange.report.value_statistics import ValueDiff, ValueSums
from statexchange.sharding.options import CallOptions, ExportOptions, Rename, renamed
from statexchange.sharding.paths import without_wrappers
from statexchange.sharding.plan import TensorPlan, plan_tensors
from statexchange.sharding.shards import Box, Piece
from statexchange.storage.store import ByteRange
from statexchange.tensors import PACKED, array_over, element_shape, same_bytes
from statexchange.units import format_bytes

if TYPE_CHECKING:
    from statexchange.formats.source import Source

_PART_BYTES = 2 * MEMORY_BYTES  # of both sides: what one thread compares in a row,
_PART_NAMES = 256  # or so many small tensors

By = Literal["digests", "bytes"]
Status = Literal["equal", "values", "dtype", "shape", "only in a", "only in b"]


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
    by: By | None = None
    values: ValueDiff | None = None

    @classmethod
    def of_values(
        cls,
        name: str,
        dtypes: tuple[str, str],
        shape: tuple[int, ...],
        values: ValueDiff | None,
        tolerance: float | None,
    ) -> TensorDiff:
        """Return the result for two tensors of one shape whose bytes or dtypes differ, from their `values`."""
        status: Status = "values"
        if values is not None and not values.num_differing:
            if tolerance is not None:
                status = "equal"
            elif dtypes[0] != dtypes[1]:
                status, values = "dtype", None
        return cls(name, status, *dtypes, shape, shape, "bytes", values)


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


def diff_paths(
    a: str | os.PathLike[str], b: str | os.PathLike[str], options: ExportOptions, call: CallOptions
) -> DiffReport:
    """Compare two checkpoints as `diff_checkpoints` does, the first converted if `convert` is given. Not collective.

    Raises:
        StateExchangeError: as `diff_checkpoints`.
    """
    conversion, numbers = read_conversion(options)
    # Which stored names are compared is not known before a conversion gives them theirs: all problems count then.
    wants_a = None
    if conversion is None:
        wants_a = _wants(options, options.rename)
    with (
        open_source(a, section=call.section, wants=wants_a) as source_a,
        open_source(b, section=call.section, wants=_wants(options, ())) as source_b,
    ):
        source_a.read_ahead()
        source_b.read_ahead()
        if conversion is not None:  # the same files, which source_a closes
            configs = [*configs_beside(source_a), *configs_beside(source_b)]
            source_a = convert_source(source_a.unwrapped(), conversion, numbers, configs).source  # noqa: PLW2901
        source_a, source_b = source_a.unwrapped(), source_b.unwrapped()  # noqa: PLW2901
        names_a = source_a.tensor_names
        # The patterns match the names of both after those of a are renamed.
        renaming = ExportOptions(rename=options.rename)
        side_a, side_b = _side(source_a, renaming, options), _side(source_b, ExportOptions(), options)
        comparison = _Comparison(_untied(side_a, side_b), _untied(side_b, side_a), options, call)
        tensors = comparison.run()
        notes = [*comparison.notes, *options.notes_on_rename(names_a)]
        # Once all bytes are read: a file that changed between would have been compared half old, half new.
        for label, source in (("a", source_a), ("b", source_b)):
            source.check_unchanged()
            for note in source.notes:
                notes.append(f"{label}: {note}")
    shown_a, shown_b = without_secrets(os.fspath(a)), without_secrets(os.fspath(b))
    return DiffReport(shown_a, shown_b, tensors, comparison.done, tuple(notes))


def _wants(selected: ExportOptions, rename: Rename) -> Callable[[str], bool] | None:
    """Return a function that returns whether problems of a stored name count; None if all problems count.

    Patterns match names without the parts of wrappers. Which parts these are is known only when all names are: until
    then a problem counts if the name with or without such parts is compared.
    """
    if not selected.include and not selected.exclude:
        return None

    def wants(name: str) -> bool:
        bare = without_wrappers(name)
        return any(selected.wants(renamed(text, rename)) for text in {name, bare, bare.removeprefix("module.")})

    return wants


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two: its tensors, and the aliases of tied ones, by the names under which they are compared."""

    source: Source
    tensors: Mapping[str, TensorPlan]
    aliases: Mapping[str, str]

    def digests(self, name: str) -> dict[Box, str | None]:
        """Return the known digest of each box of a tensor."""
        plan = self.tensors[name]
        digests: dict[Box, str | None] = {}
        for piece in plan.pieces:
            stored = self._stored(plan, piece)
            if len(stored.parts):
                digests.update(stored.parts)
            else:
                digests[piece.box] = stored.digest
        return digests

    def run(self, names: Sequence[str]) -> ByteRange | None:
        """Return the bytes of tensors that follow one another in a file and have no digests; None if they do not."""
        ranges: list[ByteRange] = []
        for name in names:
            plan = self.tensors[name]
            if len(plan.pieces) != 1 or plan.pieces[0].replicas:
                return None
            stored = self._stored(plan, plan.pieces[0])
            # Digests may decide without a read. Elements in another order, as of a conversion, have strides as well.
            if stored.is_proven or stored.strides is not None:
                return None
            if ranges and (stored.file is not ranges[-1].file or stored.begin != ranges[-1].begin + ranges[-1].nbytes):
                return None
            ranges.append(stored)
        return ByteRange(ranges[0].file, ranges[0].begin, sum(stored.nbytes for stored in ranges))

    def _stored(self, plan: TensorPlan, piece: Piece) -> ByteRange:
        return self.source.files[piece.holder].tensors[plan.source].byte_ranges[piece.box_index]


def _side(source: Source, options: ExportOptions, selected: ExportOptions) -> _Side:
    for name, error in source.unsupported.items():
        if selected.wants(options.renamed(name)):
            raise error
    tensors, aliases = plan_tensors(source.rank_shards(), options)
    for shard_file in source.files:
        for alias, name in shard_file.aliases.items():
            if selected.wants(options.renamed(alias)):
                check_tied(shard_file, alias, name)
    # Of a merged checkpoint the manifest has the aliases, and its files none.
    if source.manifest is not None:
        for alias, name in source.manifest.get("aliases", {}).items():
            aliases.setdefault(options.renamed(alias), options.renamed(name))
    return _Side(source, {tensor.name: tensor for tensor in tensors}, aliases)


def _untied(side: _Side, against: _Side) -> _Side:
    """Return a side with its tied names that the other side stores as a tensor or ties to another name."""
    # One side may have tied weights, and the other have saved both, or read them into two tensors and trained them.
    tensors = dict(side.tensors)
    for alias, name in side.aliases.items():
        if name in tensors and (alias in against.tensors or against.aliases.get(alias, name) != name):
            tensors.setdefault(alias, tensors[name])
    return replace(side, tensors=tensors)


class _Memory(threading.local):
    """Memory of each thread for the bytes of both sides, made at its first use: the main thread compares nothing."""

    @cached_property
    def sides(self) -> tuple[memoryview, memoryview]:
        return memoryview(bytearray(MEMORY_BYTES)), memoryview(bytearray(MEMORY_BYTES))


class _Comparison:
    """Compares the tensors of two sides."""

    def __init__(self, a: _Side, b: _Side, selected: ExportOptions, call: CallOptions) -> None:
        self._a, self._b = a, b
        names = list(dict.fromkeys((*a.tensors, *b.tensors)))
        self._sizes: dict[str, int] = {}  # of the tensors that are compared: bytes on both sides
        # In the order of a's files, then what b alone has: `_parts` relies on it.
        for name in filter(selected.wants, names):
            self._sizes[name] = sum(side.tensors[name].nbytes for side in (a, b) if name in side.tensors)
        if not names:
            text = "there is nothing to compare: neither has a tensor"
            raise InvalidArgumentError(text, path=f"{a.source.path} and {b.source.path}")
        selected.check_include(names)
        self.notes = selected.notes_on_exclude(names)
        self._call = call
        self._lock = threading.Lock()
        self._memory = _Memory()
        self.done = 0

    def run(self) -> tuple[TensorDiff, ...]:
        """Compare all tensors."""
        tensors: list[TensorDiff] = []
        total, compared = sum(self._sizes.values()), 0
        with ThreadPoolExecutor(self._call.threads or os.cpu_count() or 1) as pool:
            # After an error `map` cancels what has not begun.
            for part in pool.map(self._compare_all, self._parts()):
                tensors += part
                compared += sum(self._sizes[tensor.name] for tensor in part)
                if self._call.on_progress is not None:
                    self._call.on_progress(compared, total)
        return tuple(sorted(tensors, key=attrgetter("name")))

    def _parts(self) -> Iterator[list[str]]:
        """Yield the names in parts: to submit a task takes as long as to compare a few small tensors.

        They are in the order of a's files, so that small tensors which follow one another are in one part.
        """
        names: list[str] = []
        nbytes = 0
        for name, size in self._sizes.items():
            names.append(name)
            nbytes += size
            if nbytes >= _PART_BYTES or len(names) == _PART_NAMES:
                yield names
                names, nbytes = [], 0
        if names:
            yield names

    def _compare_all(self, names: Sequence[str]) -> list[TensorDiff]:
        if not self._are_equal_runs(names):
            return list(map(self._compare, names))
        return [self._result(name, "equal", "bytes") for name in names]

    def _are_equal_runs(self, names: Sequence[str]) -> bool:
        """Whether tensors lie one after another in a file of each side, and have the same dtypes, shapes and bytes.

        To compare small tensors one by one takes ten times as long.
        """
        for name in names:
            a, b = self._a.tensors.get(name), self._b.tensors.get(name)
            if a is None or b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
                return False
        run_a, run_b = self._a.run(names), self._b.run(names)
        if run_a is None or run_b is None or run_a.nbytes > MEMORY_BYTES:
            return False
        memory_a, memory_b = self._memory.sides
        data_a, data_b = memory_a[: run_a.nbytes], memory_b[: run_a.nbytes]
        run_a.file.read_into(data_a, run_a.begin)
        run_b.file.read_into(data_b, run_b.begin)
        self._count(2 * run_a.nbytes)
        return same_bytes(data_a, data_b)

    def _compare(self, name: str) -> TensorDiff:
        a, b = self._a.tensors.get(name), self._b.tensors.get(name)
        if b is None:
            return self._result(name, "only in a")
        if a is None:
            return self._result(name, "only in b")
        # Only one of several copies is compared with the other side.
        check_tensor_copies(self._a.source, a, TAKE_LOWEST)
        check_tensor_copies(self._b.source, b, TAKE_LOWEST)
        if a.shape != b.shape:
            return self._result(name, "shape")
        if a.dtype == b.dtype:
            digests = self._a.digests(name)
            # Both sides must have them of the same boxes: digests of other boxes cannot be compared.
            if None not in digests.values() and digests == self._b.digests(name):
                return self._result(name, "equal", "digests")
            if all(same_bytes(data_a, data_b) for _, data_a, data_b in self._pairs(a, b)):
                return self._result(name, "equal", "bytes")
        values = None  # those of packed dtypes are not computed
        if not {a.dtype, b.dtype} & PACKED.keys():
            sums = ValueSums()
            for window, data_a, data_b in self._pairs(a, b):
                parts = array_over(data_a, a.dtype, window.shape), array_over(data_b, b.dtype, window.shape)
                sums.add(window, *parts, self._call.tolerance)
            values = sums.result()
        shape = element_shape(a.dtype, a.shape)
        return TensorDiff.of_values(name, (a.dtype, b.dtype), shape, values, self._call.tolerance)

    def _result(self, name: str, status: Status, by: By | None = None) -> TensorDiff:
        """Return the result of two tensors whose values are equal, or were not compared."""
        a, b = self._a.tensors.get(name), self._b.tensors.get(name)
        dtype_a, shape_a = (None, None) if a is None else (a.dtype, element_shape(a.dtype, a.shape))
        dtype_b, shape_b = (None, None) if b is None else (b.dtype, element_shape(b.dtype, b.shape))
        return TensorDiff(name, status, dtype_a, dtype_b, shape_a, shape_b, by)

    def _pairs(self, a: TensorPlan, b: TensorPlan) -> Iterator[tuple[Box, memoryview, memoryview]]:
        """Yield the windows of two tensors of one shape with the bytes of both; check digests at the end."""
        memory_a, memory_b = self._memory.sides
        reader_a = TensorReader(self._a.source, a, always_digest=False)
        reader_b = TensorReader(self._b.source, b, always_digest=False)
        itemsize = max(reader_a.itemsize, reader_b.itemsize)
        windows_a = reader_a.windows(memory_a, itemsize)
        windows_b = reader_b.windows(memory_b, itemsize)
        # Both are cut into windows for the larger item, so that they have the same ones.
        for (window, data_a), (_, data_b) in zip(windows_a, windows_b, strict=True):
            self._count(len(data_a) + len(data_b))
            yield window, data_a, data_b
        reader_a.check()
        reader_b.check()

    def _count(self, nbytes: int) -> None:
        """Count bytes that were read."""
        with self._lock:
            self.done += nbytes
