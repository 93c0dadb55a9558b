"""Plan who writes which boxes, and prove that each element is supplied exactly once.

A *holder* is anything that has bytes: a live rank or a rank's file. It is numbered by its position in the `rank_shards`
that are given to `plan_merge`. A plan is a pure function of these and of `ExportOptions`: the same input gives the same
plan and the same digest everywhere.

A merge and an export have all holders' boxes in one place: `plan_merge` chooses files, too. A save has a file for each
rank, and no place that knows all boxes. There `plan_writers` chooses among the ranks that have equal copies, which all
compute the same. Each rank sends `cover_sum` of what it writes, and `covers_evenly` finds from all of these whether the
elements of each tensor are written equally often. A reader has the boxes of all files, and calls `prove_cover`.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple, TypeAlias

from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    OverlapError,
    ReplicaError,
    StateExchangeError,
    UnsafeError,
    UnsupportedError,
    did_you_mean,
    excerpt,
)
from statexchange.sharding.options import MODEL_PATTERN, ExportOptions
from statexchange.sharding.pieces import Pieces, nbytes_by_holder, spec_pieces
from statexchange.sharding.rules import layout_advice
from statexchange.sharding.sharding_spec import ShardingSpec, covers_exactly
from statexchange.sharding.shards import Box, LongTuple, Piece, Shard, full_box, intersect, region_text
from statexchange.tensors import ITEMSIZE, PACKED, collector_paused

_MAX_CUT_DIMS = 12  # of one tensor; no sharding cuts so many
_MAX_FILES, _MAX_NAME = 8, 100  # files in a message, and characters of a name
_FEW_BOXES = 16  # the most of one tensor for which the proof of their cover is cached
# Of boxes that cannot be divided: one that is cut along n dims has 2**n, and each takes a step and an entry of a dict.
_MAX_CORNERS = 1 << 22


HolderLabel: TypeAlias = int | str
"""The name of a holder in error messages: its rank, or the name of a file that is no rank's."""

_TensorShards: TypeAlias = list[tuple[int, Shard]] | ShardingSpec
"""The shards of one tensor with their holders, or the spec from which they follow."""


@dataclass(frozen=True, slots=True)
class RankShards:
    """The shards of one holder.

    Attributes:
        rank: the rank, or the number of a file that is no rank's.
        shards: its shards. A `ShardingSpec`, given by any one holder, covers all holders.
        aliases: names of tied tensors, with the names under which they are kept.
        label: the rank or, for a file that is no rank's, its name: for error messages. None for the rank.
    """

    rank: int
    shards: Sequence[Shard | ShardingSpec]
    aliases: Mapping[str, str] = field(default_factory=dict)
    label: HolderLabel | None = None


class TensorPlan(NamedTuple):
    """One output tensor.

    Attributes:
        name: its name in the output.
        source: its name at the holders.
        dtype: its dtype in the output.
        shape: its global shape.
        begin: its offset in the data section of the file.
        pieces: its boxes with their holders, in the order of their first elements.
        reduce: "max" or "min" if copies are reduced; None if they must be equal.
    """

    name: str
    source: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    pieces: Pieces
    reduce: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class FilePlan:
    """One output file, with its tensors in the order of their bytes."""

    name: str
    tensors: tuple[TensorPlan, ...]

    @functools.cached_property
    def data_nbytes(self) -> int:
        """Bytes of the data section."""
        if not self.tensors:
            return 0
        last = self.tensors[-1]
        return last.begin + last.nbytes


@dataclass(frozen=True)
class Plan:
    """Everything that a merge or export will write.

    Attributes:
        files: the output files.
        aliases: output names of tied tensors that are not written, with the names under which their values are.
        digest: 32 hex digits that identify the plan.
    """

    files: tuple[FilePlan, ...]
    aliases: Mapping[str, str]
    digest: str

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(file.data_nbytes for file in self.files)

    def nbytes_of_ranks(self, world_size: int) -> tuple[int, ...]:
        """Return the number of bytes that each rank supplies."""
        tensors = [(tensor.pieces, ITEMSIZE[tensor.dtype]) for tensor in self.tensors.values()]
        return tuple(nbytes_by_holder(tensors, world_size).tolist())

    @property
    def num_tensors(self) -> int:
        """Number of output tensors."""
        return len(self.tensors)

    @functools.cached_property
    def tensors(self) -> Mapping[str, TensorPlan]:
        """The output tensors by name."""
        tensors = {}
        for file in self.files:
            for tensor in file.tensors:
                tensors[tensor.name] = tensor
        return tensors


def plan_merge(
    rank_shards: Sequence[RankShards],
    options: ExportOptions | None = None,
    *,
    basis: str = "",
    reductions: Mapping[str, str] | None = None,
    sorts: bool = False,
) -> Plan:
    """Plan the merge of all holders' shards. Not collective.

    The pieces of a tensor with a `ShardingSpec` are computed on access, so the plan does not grow with the ranks.

    Args:
        rank_shards: the shards of each holder.
        options: selection, names, dtypes and files.
        basis: everything else that the output bytes depend on, for the digest.
        reductions: "max" or "min" by the source name of each tensor whose copies are reduced.
        sorts: plan the tensors in the order of their names, and not in that of the holders.

    Returns:
        The plan.

    Raises:
        IncompleteError: a region has no holder.
        OverlapError: different boxes overlap.
        CorruptError: holders disagree on dtype or global shape.
        UnsafeError: `rename` gives one name to two tensors.
    """
    options = options or ExportOptions()
    with collector_paused():
        tensors, aliases = plan_tensors(rank_shards, options, reductions=reductions, sorts=sorts)
        files = _assign_files(tensors, options)
        return Plan(files, aliases, _digest(files, aliases, basis))


def plan_tensors(
    rank_shards: Sequence[RankShards],
    options: ExportOptions,
    *,
    reductions: Mapping[str, str] | None = None,
    sorts: bool = False,
) -> tuple[list[TensorPlan], dict[str, str]]:
    """Plan the tensors of a merge, and its aliases, without files: each tensor begins at 0. Not collective.

    The arguments and errors are those of `plan_merge`.
    """
    reductions = reductions or {}
    selected = _by_name(rank_shards)
    if options.include or options.exclude:
        options.check_include(selected)
        selected = {name: shards for name, shards in selected.items() if options.wants(name)}
    if sorts:
        selected = dict(sorted(selected.items()))
    # By the names of the source, as patterns of dtype are. Aliases after the selection: a name whose other name is left
    # out has to be written.
    dtypes = _OutputDTypes(selected, options)
    aliases = {}
    for alias, name in _aliases(rank_shards, selected).items():
        if _is_written_alike(selected[alias], selected[name], options, dtypes, reductions):
            aliases[alias] = name
    # With the aliases: `rename` may not give one of their names to another tensor either.
    new_names = _new_names(selected, aliases, options)
    for alias in aliases:
        del selected[alias]
    loads = dict.fromkeys(range(len(rank_shards)), 0)  # bytes that each holder supplies
    tensors = []
    for number, (old, shards) in enumerate(selected.items()):
        new, reduce = new_names[old], reductions.get(old)
        if reduce is not None and _first(shards).dtype.startswith("C"):
            raise UnsupportedError(f"complex numbers have no {reduce}", name=old)
        if isinstance(shards, ShardingSpec):
            tensor = _plan_spec(new, shards, options, dtypes, number)
        else:
            tensor = _plan_tensor(new, shards, rank_shards, options, dtypes, loads, reduce)
        if reduce is not None:
            tensor = tensor._replace(reduce=reduce)
        tensors.append(tensor)
    output_aliases = {}
    for alias, name in aliases.items():
        # `rename` may give tied tensors one name; then there is no other name to record.
        if new_names[alias] != new_names[name]:
            output_aliases[new_names[alias]] = new_names[name]
    return tensors, output_aliases


def _writer_of(holders: Iterable[int], loads: dict[int, int], nbytes: int) -> int:
    """Return the one of these holders that has the fewest bytes until now, and give it these bytes, too."""
    holder = min(holders, key=loads.__getitem__)
    loads[holder] += nbytes
    return holder


@functools.lru_cache(8)
def plan_writers(
    shards: LongTuple[Shard], ranks: tuple[int, ...], tied: LongTuple[tuple[str, str]], frozen: frozenset[str]
) -> dict[str, int]:
    """Return the rank that writes each of the tensors of which all these ranks have equal copies. Not collective.

    Args:
        shards: the tensors, in one order on all ranks.
        ranks: the ranks that have them.
        tied: each other name of a tied tensor with the name that is kept: one rank writes both, so that they stay tied.
        frozen: the names whose writer depends on no other tensor, so that it is the same in the next save.
    """
    aliases = dict(tied)
    # Of those that do not train apart: their writers do not change when something else does, so that files of an
    # earlier save can be linked.
    loads, frozen_loads = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
    writers: dict[str, int] = {}
    # The largest first: so the last ones, which are small, make the ranks equal. The other names of tied tensors come
    # last, as they follow the kept ones.
    for shard in sorted(shards, key=lambda shard: (shard.name in aliases, -shard.nbytes)):
        kept = writers.get(aliases.get(shard.name, ""))
        # AdamW counts the steps of each parameter. Dealt out to all ranks they would make each file a part of every
        # load, and they weigh nothing.
        candidates: Sequence[int] = ranks[:1] if shard.nbytes <= _SCALAR_BYTES else ranks
        if kept is not None:
            candidates = (kept,)
        of_kind = frozen_loads if shard.name in frozen else loads
        writers[shard.name] = _writer_of(candidates, of_kind, shard.nbytes)
    return writers


_SCALAR_BYTES = 16
_INTEGERS = ("I8", "U8", "I32")
# Of packed weights in torchao, GPTQ and AWQ, compressed-tensors, MXFP4, and of integers in bitsandbytes and others.
_PACKED_ENDINGS = ("qdata", "qweight", "weight_packed", "_blocks", "weight")
_OF_BITSANDBYTES = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


class _OutputDTypes:
    """The dtypes in which tensors are written.

    A tensor in float8, or of packed integers, keeps its dtype, so what is needed to read it keeps its own, too: scales
    and zero points, which are tensors of the same module, and what bitsandbytes keeps below the name of the weight.
    """

    def __init__(self, selected: Mapping[str, _TensorShards], options: ExportOptions) -> None:
        self._options = options
        for pattern, _ in options.dtype:
            # "*" is also what one dtype for all tensors becomes, which fits a source without any.
            if pattern != "*" and not any(fnmatch.fnmatchcase(name, pattern) for name in selected):
                text = f"dtype pattern {pattern!r} matches no tensor{did_you_mean(pattern, selected)}"
                raise InvalidArgumentError(text)
        self._quantized = set()  # names of modules
        self._weights_in_bytes = set()
        if options.dtype:
            for name, shards in selected.items():
                first = _first(shards)
                if is_packed_weight(name, first.dtype):
                    self._quantized.add(name.rpartition(".")[0])
                if first.dtype in ("I8", "U8"):
                    self._weights_in_bytes.add(name)

    def of(self, name: str, dtype: str) -> str:
        """Return the dtype in which tensor `name`, which has `dtype` in the source, is written."""
        if not self._options.dtype:
            return dtype
        module, _, last = name.rpartition(".")
        if ("scale" in last or "zero" in last) and module in self._quantized:
            return dtype
        # bitsandbytes: "fc.weight" in 4 bits has "fc.weight.absmax" below it, one in 8 bits "fc.SCB" beside it.
        if module in self._weights_in_bytes and last in _OF_BITSANDBYTES:
            return dtype
        if last == "SCB" and f"{module}.weight" in self._weights_in_bytes:
            return dtype
        return self._options.output_dtype(name, dtype)


def is_packed_weight(name: str, dtype: str) -> bool:
    """Whether a tensor has quantised values, whose bytes only the library that wrote them can read: never cast."""
    is_small = dtype.startswith("F8") or dtype in PACKED
    return is_small or (dtype in _INTEGERS and name.endswith(_PACKED_ENDINGS))


def _plan_spec(name: str, spec: ShardingSpec, options: ExportOptions, dtypes: _OutputDTypes, number: int) -> TensorPlan:
    """Plan output tensor `number`, whose sharding is a spec."""
    if not covers_exactly(spec.global_shape, spec.placement):
        raise IncompleteError(f"{spec.placement} does not cover shape {spec.global_shape}", name=spec.name)
    # Tensors take turns in the copy that is written, so that all ranks write as much. Copies that may differ do not:
    # then the lowest rank's counts.
    turn = number
    if options.replicas == "root":
        turn = 0
    return TensorPlan(name, spec.name, dtypes.of(spec.name, spec.dtype), spec.global_shape, 0, spec_pieces(spec, turn))


def _by_name(rank_shards: Sequence[RankShards]) -> dict[str, _TensorShards]:
    """Return the shards of all holders by tensor name."""
    by_name: dict[str, _TensorShards] = {}
    for holder, holder_shards in enumerate(rank_shards):
        for shard in holder_shards.shards:
            shards = by_name.setdefault(shard.name, shard if isinstance(shard, ShardingSpec) else [])
            if isinstance(shards, list) and isinstance(shard, Shard):
                shards.append((holder, shard))
            elif shards is not shard:
                text = "conflicting sharding specs for one tensor"
                raise CorruptError(text, name=shard.name, rank=holder_shards.rank)
    return by_name


def _aliases(rank_shards: Sequence[RankShards], by_name: Mapping[str, _TensorShards]) -> dict[str, str]:
    """Return tied names that need not be written, with the names under which their values are.

    A name is dropped only if every holder with elements of it has the same alias for it, and the other name is written
    with an equal shard.
    """
    tied: set[str] = set()
    for holder in rank_shards:
        tied.update(holder.aliases, holder.aliases.values())
    # In the order of `by_name`, not in that of a set, which differs between processes: the plan's digest has them.
    kept_as: dict[str, str | None] = {}
    if tied:
        for name in by_name:
            if name in tied:
                kept_as[name] = _kept_as(name, by_name, rank_shards)
    aliases = {}
    for alias, target in kept_as.items():
        # Only under a name that all holders keep: one whose holders do not agree is not written as they have it.
        if target not in (None, alias) and kept_as.get(target) == target:
            aliases[alias] = target
    return aliases


def _kept_as(name: str, by_name: Mapping[str, _TensorShards], rank_shards: Sequence[RankShards]) -> str | None:
    """Return the name under which all holders with elements of a tensor keep it; None if they do not agree."""
    shards = by_name[name]
    names: set[str] = set()
    for number in _holders(shards):
        target = rank_shards[number].aliases.get(name, name)
        others = by_name.get(target, [])
        # The boxes of a rank of a mesh take a while, and once one is known to be untied, another one adds nothing. Of
        # equal specs all ranks have equal shards.
        if target in names and (target == name or _are_equal_specs(shards, others)):
            continue
        shard = _shard_at(shards, number)
        # Empty shards, of a spec, are equal, whatever they are tied to, so they prove nothing.
        if shard is None or not shard.nbytes:
            continue
        other = _shard_at(others, number)
        names.add(target if other is not None and replace(other, name=name) == shard else name)
    if len(names) > 1:
        return None
    return next(iter(names), name)


def _holders(shards: _TensorShards) -> Sequence[int]:
    """Return the holders with elements; of a spec all ranks of its mesh."""
    if isinstance(shards, ShardingSpec):
        return shards.ranks or range(shards.placement.num_ranks)
    return [holder for holder, shard in shards if shard.nbytes]


def _are_equal_specs(shards: _TensorShards, others: _TensorShards) -> bool:
    """Whether two tensors have specs that differ in their names alone."""
    return isinstance(others, ShardingSpec) and replace(others, name=_first(shards).name) == shards


def _shard_at(shards: _TensorShards, number: int) -> Shard | None:
    """Return the shard that one holder has of a tensor."""
    if not isinstance(shards, ShardingSpec):
        return dict(shards).get(number)
    return shards.shard_of(number) if number in _holders(shards) else None


def _is_written_alike(
    shards: _TensorShards,
    others: _TensorShards,
    options: ExportOptions,
    dtypes: _OutputDTypes,
    reductions: Mapping[str, str],
) -> bool:
    """Whether two tied tensors would be written with the same bytes.

    Copies that differ may be reduced or left out. Then other holders, whose copies are not tied, change the bytes.
    """
    first, other = _first(shards), _first(others)
    reduction = reductions.get(first.name)
    if reduction != reductions.get(other.name):
        return False
    if dtypes.of(first.name, first.dtype) != dtypes.of(other.name, other.dtype):
        return False
    may_differ = reduction is not None or options.replicas == "root"
    return not may_differ or set(_holders(shards)) == set(_holders(others))


def _first(shards: _TensorShards) -> Shard | ShardingSpec:
    """Return a tensor's spec or first shard, for what is equal in all."""
    if isinstance(shards, ShardingSpec):
        return shards
    return shards[0][1]


def _new_names(names: Iterable[str], aliases: Mapping[str, str], options: ExportOptions) -> dict[str, str]:
    """Return the output name of each tensor and alias; raise UnsafeError if it is also another tensor's."""
    new_names: dict[str, str] = {}
    first: dict[str, str] = {}  # by output name
    for old in names:
        new = old
        if options.rename:
            new = options.renamed(old)
        other = first.setdefault(new, old)
        # Tied tensors may get one name: they have the same values.
        if aliases.get(other, other) != aliases.get(old, old):
            raise UnsafeError(f"rename gives one name to both {other!r} and {old!r}", name=new)
        new_names[old] = new
    return new_names


def _plan_tensor(
    name: str,
    shards: Sequence[tuple[int, Shard]],
    rank_shards: Sequence[RankShards],
    options: ExportOptions,
    dtypes: _OutputDTypes,
    loads: dict[int, int],
    reduce: str | None,
) -> TensorPlan:
    first_holder, first = shards[0]
    dtype = dtypes.of(first.name, first.dtype)
    for holder, shard in shards[1:]:
        if shard.dtype == first.dtype and shard.global_shape == first.global_shape:
            continue
        expected, actual = first.dtype, shard.dtype
        if reduce is None:  # copies are reduced before they are cast
            expected, actual = dtype, dtypes.of(shard.name, shard.dtype)
        # Dtypes that a cast makes equal are no difference, as each holder's bytes are cast before they are written.
        if expected == actual and shard.global_shape == first.global_shape:
            continue
        text = holders_text(_label_of(rank_shards[first_holder]), _label_of(rank_shards[holder])) + " disagree on the "
        differing: tuple[object, object] = expected, actual
        are_whole = first.is_whole and shard.is_whole
        if expected != actual:
            text += "dtype"
        else:
            text += "global_shape"
            differing = first.global_shape, shard.global_shape
            rules = layout_advice(first.name, [first.global_shape, shard.global_shape])
            # Tensors that are plain on each rank may be parts of one, which only a layout says.
            if rules and are_whole:
                text += f"; if each holds a part, give a layout: {rules}"
        rank = rank_shards[holder].rank
        # Whole tensors may be each rank's own, which a load on as many ranks takes: then nothing is broken.
        kind = ReplicaError if are_whole else CorruptError
        raise kind(text, name=first.name, rank=rank, expected=differing[0], found=differing[1])
    owners: dict[Box, list[tuple[int, int]]] = {}
    for holder, shard in shards:
        for index, box in enumerate(shard.boxes):
            if 0 not in box.shape:
                owners.setdefault(box, []).append((holder, index))
    prove_cover(first.name, first.global_shape, owners, lambda owner: _label_of(rank_shards[owner[0]]))
    pieces = []
    # In the order of their first elements, so that a merge reads and writes forward.
    for box in sorted(owners):
        pieces.append(_piece(box, owners[box], options, loads, math.prod(box.shape) * ITEMSIZE[dtype]))
    return TensorPlan(name, first.name, dtype, first.global_shape, 0, tuple(pieces))


def _piece(
    box: Box, copies: list[tuple[int, int]], options: ExportOptions, loads: dict[int, int], nbytes: int
) -> Piece:
    """Return a box's piece: one of its holders writes it; with replicas="root", the first one."""
    if len(copies) == 1:  # most often
        loads[copies[0][0]] += nbytes
        return Piece(box, *copies[0])
    candidates = copies
    if options.replicas == "root":
        candidates = copies[:1]
    first_copy: dict[int, int] = {}
    for holder, index in candidates:
        first_copy.setdefault(holder, index)  # a holder may have two
    holder = _writer_of(first_copy, loads, nbytes)
    replicas = list(copies)
    replicas.remove((holder, first_copy[holder]))
    return Piece(box, holder, first_copy[holder], tuple(replicas))


def _label_of(rank_shards: RankShards) -> HolderLabel:
    if rank_shards.label is None:
        return rank_shards.rank
    return rank_shards.label


def prove_cover(
    name: str,
    shape: tuple[int, ...],
    boxes: Mapping[Box, Sequence[Any]],
    label: Callable[[Any], HolderLabel] = lambda holder: holder,
) -> None:
    """Raise unless the non-empty `boxes` cover a tensor of `shape` exactly once.

    The boxes are mapped to their holders, and `label` returns what a message calls one.
    """
    search = _search_cached if len(boxes) <= _FEW_BOXES else _search
    try:
        at = search(shape, tuple(boxes))
    except UnsupportedError as error:
        raise error.located(name=name) from None
    if at is not None:
        labels = {box: list(map(label, holders)) for box, holders in boxes.items()}
        raise _flaw_error(name, shape, labels, at)


_PRIME = (1 << 127) - 1  # Mersenne's; the numbers of a save are added modulo this one


def covers_evenly(sums: Iterable[int]) -> bool:
    """Whether the elements of each tensor lie in equally many boxes of all holders, which give their `cover_sum`."""
    return sum(sums) % _PRIME == 0


def cover_sum(shards: Iterable[Shard]) -> int:
    """Return a number for the boxes of one holder, for `covers_evenly`.

    The numbers of all holders add up to 0 if the elements of each tensor lie in equally many boxes: in none, in one, or
    in several. Otherwise they do so with a chance of about n in 2**127, where n is the number of dims.

    `_flaw_by_corners` proves that boxes cover a region exactly if signed weights on the corners of boxes cancel those
    of the region. Here the number of a corner is the product of a random number for each of its coordinates, so that no
    list of corners is needed: the signed sum over the 2**n corners of a box of n dims is the product of n differences.
    The polynomial in these numbers is 0 only if all weights cancel (the lemma of Schwartz and Zippel).
    """
    total = 0
    for shard in shards:
        of_boxes = _sum_of_boxes(shard.global_shape, shard.boxes)
        if of_boxes:
            total += of_boxes * _random(f"{shard.name} {shard.dtype} {shard.global_shape}")
    return total % _PRIME


@functools.lru_cache(1024)  # a model has many tensors of few shapes and placements
def _sum_of_boxes(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> int:
    whole = full_box(shape)
    total = 0
    for box in boxes:
        if box.numel:
            total += _corner_sum(box)
            # Whoever has the first element takes the whole tensor off, so that this happens once.
            if box.offsets == whole.offsets:
                total -= _corner_sum(whole)
    return total % _PRIME


def _corner_sum(box: Box) -> int:
    product_of_dims = 1
    for dim, (begin, end) in enumerate(zip(box.offsets, box.ends, strict=True)):
        product_of_dims *= _random(f"{dim} {begin}") - _random(f"{dim} {end}")
    return product_of_dims % _PRIME


def _random(text: str) -> int:
    """Return a number that is the same on all ranks, which have not exchanged any, and looks random."""
    import hashlib  # late, as it loads OpenSSL

    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def _search(shape: tuple[int, ...], boxes: Sequence[Box]) -> tuple[int, ...] | None:
    """Return the first element that is not covered exactly once; None if there is none."""
    cut_dims = _cut_dims(shape, boxes)
    if len(cut_dims) > _MAX_CUT_DIMS:
        raise UnsupportedError(f"cut along {len(cut_dims)} dims; {_MAX_CUT_DIMS} are supported")
    if 0 in shape or (boxes and not cut_dims):  # boxes are distinct, so this is the whole tensor
        return None
    flaws = []
    num_corners = 0
    # Each part by itself, as nearly all shardings are grids, of which nothing is left to prove by corners.
    for region, inside in _undivided(full_box(shape), boxes, cut_dims):
        dims = _cut_dims(region.shape, inside)
        num_corners += len(inside) << len(dims)
        if num_corners > _MAX_CORNERS:
            text = f"cannot prove that {len(boxes)} boxes cut along {len(dims)} dims at once cover the tensor"
            raise UnsupportedError(f"{text}: shard it along fewer dims")
        flaw = _flaw_by_corners(region, inside, dims)
        if flaw is not None:
            flaws.append(flaw)
    return min(flaws, default=None)


_search_cached = functools.lru_cache(1024)(_search)  # a model has many tensors of few shapes and placements


def _cut_dims(shape: Sequence[int], boxes: Sequence[Box]) -> list[int]:
    """Return the dims of a region that a box in it does not span."""
    cut_dims = []
    for dim, size in enumerate(shape):
        for box in boxes:
            if box.shape[dim] != size:
                cut_dims.append(dim)
                break
    return cut_dims


def _flaw_error(
    name: str, shape: tuple[int, ...], boxes: Mapping[Box, Sequence[HolderLabel]], at: tuple[int, ...]
) -> StateExchangeError:
    """Return the error for an element that no box covers, or several; `boxes` are mapped to their holders."""
    element = Box(at, (1,) * len(at))
    covering = [box for box in boxes if intersect(box, element) is not None]
    if not covering:
        holders: set[HolderLabel] = set()
        holders.update(*boxes.values())
        region = _free_region(at, shape, boxes)
        return IncompleteError(_gap_text(f"region {region} of shape {shape}", holders), name=name)
    first, second = covering[:2]
    ends = tuple(map(min, first.ends, second.ends))
    owner, other = boxes[first][0], boxes[second][0]
    return OverlapError(
        f"region {region_text(at, ends)} is claimed twice: as {first} by {_holder_text(owner)} "
        f"and as {second} by {_holder_text(other)}",
        name=name,
        rank=other if isinstance(other, int) else None,
    )


def _gap_text(region: str, holders: Collection[HolderLabel]) -> str:
    """Return the text of a region that no holder has, with the holders of the others."""
    if not holders:
        return f"nothing holds {region}"
    files = sorted(holder for holder in holders if isinstance(holder, str))
    if not files:
        return f"no rank holds {region}; ranks {sorted(map(int, holders))} hold the rest"
    shown = ", ".join(map(_holder_text, files[:_MAX_FILES]))
    hidden = len(files) - _MAX_FILES
    if hidden > 0:
        shown += f" and {hidden:,} more"
    return f"no file holds {region}; {shown} hold{'s' * (len(files) == 1)} the rest"


def holders_text(first: HolderLabel, second: HolderLabel) -> str:
    """Return what error messages call two holders: ``ranks 0 and 1``, or the names of their files."""
    if isinstance(first, int) and isinstance(second, int):
        return f"ranks {first} and {second}"
    return f"{_holder_text(first)} and {_holder_text(second)}"


def _holder_text(holder: HolderLabel) -> str:
    return f"rank {holder}" if isinstance(holder, int) else excerpt(holder, _MAX_NAME)[1:-1]


def _undivided(region: Box, boxes: Sequence[Box], dims: Sequence[int]) -> Iterator[tuple[Box, Sequence[Box]]]:
    """Divide a region along `dims` into parts that no box crosses; yield each with its boxes (none for a gap).

    Parts that one box fills are right, and are not yielded. Of nearly all shardings nothing is left then. Each dim is
    divided once on the way to a part, so that the work is bounded whatever the boxes are. Of [0:4, 0:2], with the boxes
    [0:2, 0:2] and [2:4, 0:1], it yields [2:4, 1:2] without a box.
    """
    for dim in dims:
        slabs = _slabs(region, boxes, dim)
        if len(slabs) == 1:
            continue
        other_dims = [other for other in dims if other != dim]
        for begin, end, inside in slabs:
            offsets, shape = list(region.offsets), list(region.shape)
            offsets[dim], shape[dim] = begin, end - begin
            slab = Box(tuple(offsets), tuple(shape))
            if len(inside) != 1 or inside[0] != slab:
                yield from _undivided(slab, inside, other_dims)
        return
    if len(boxes) != 1 or boxes[0] != region:
        yield region, boxes


def _slabs(region: Box, boxes: Sequence[Box], dim: int) -> list[tuple[int, int, list[Box]]]:
    """Divide a region along `dim` where no box crosses; return the begin, the end and the boxes of each slab."""
    slabs: list[tuple[int, int, list[Box]]] = []
    inside: list[Box] = []
    first = reached = region.offsets[dim]
    for box in sorted(boxes, key=lambda box: box.offsets[dim]):
        begin = box.offsets[dim]
        # `reached` is the end of all boxes so far: from there on none of them crosses.
        if begin >= reached > first:
            slabs.append((first, reached, inside))
            first, inside = reached, []
        if begin > reached:  # a gap
            slabs.append((reached, begin, []))
            first = reached = begin
        inside.append(box)
        reached = max(reached, begin + box.shape[dim])
    if inside:
        slabs.append((first, reached, inside))
    end = region.offsets[dim] + region.shape[dim]
    if reached < end:
        slabs.append((reached, end, []))
    return slabs


def _flaw_by_corners(region: Box, boxes: Sequence[Box], cut_dims: Sequence[int]) -> tuple[int, ...] | None:
    """Return the first element, in lexicographic order, that is not covered exactly once; None if there is none.

    Only `cut_dims` matter; all boxes span the other dims. The proof uses prefix sums. Let c(x) be the number of boxes
    that contain x, minus one inside the region. Put a weight on each corner of each box: +1 for an even number of ends
    among its coordinates, -1 for an odd number; and the negated weights on the corners of the region. Then c(x) is the
    sum of the weights at all corners at or before x in every dim. So c is zero everywhere if and only if all weights
    cancel; else the first corner with a remaining weight has no other before it, and is the first flaw.
    """
    if not boxes:
        return region.offsets
    signs = [(-1) ** sum(bits) for bits in product((0, 1), repeat=len(cut_dims))]
    weights: dict[tuple[int, ...], int] = {}
    for box, factor in [(region, -1), *((box, 1) for box in boxes)]:
        begins_and_ends = list(zip(box.offsets, box.ends, strict=True))
        corners = product(*map(begins_and_ends.__getitem__, cut_dims))
        for corner, sign in zip(corners, signs, strict=True):
            weight = weights.pop(corner, 0) + factor * sign
            # Those that cancel are left out, so that what is there at the end is a flaw.
            if weight:
                weights[corner] = weight
    if not weights:
        return None
    at = list(region.offsets)
    for dim, index in zip(cut_dims, min(weights), strict=True):
        at[dim] = index
    return tuple(at)


def _free_region(at: tuple[int, ...], shape: tuple[int, ...], boxes: Iterable[Box]) -> Box:
    """Return a block that begins at `at` and overlaps no box, extended along the last dim first."""
    sizes = [1] * len(shape)
    for dim in reversed(range(len(shape))):
        sizes[dim] = shape[dim] - at[dim]
        region = Box(at, tuple(sizes))
        overlapping = [box.offsets[dim] for box in boxes if intersect(box, region) is not None]
        sizes[dim] = min(overlapping, default=shape[dim]) - at[dim]
    return Box(at, tuple(sizes))


def _assign_files(tensors: list[TensorPlan], options: ExportOptions) -> tuple[FilePlan, ...]:
    """Assign tensors to files greedily in their order; within a file sort by alignment, then name, as safetensors.

    The files have the tensors that `huggingface_hub` would put into them: one that is larger than a file has its own,
    and those before and after it share theirs. Of sizes 3, 9, 3 and a limit of 8, files hold 9 and 3 + 3.
    """
    groups: list[list[TensorPlan]] = []
    current: list[TensorPlan] = []
    size = 0
    limit = options.max_shard_bytes
    for tensor in tensors:
        nbytes = tensor.nbytes
        if nbytes > limit:
            groups.append([tensor])
            continue
        if size + nbytes > limit:
            groups.append(current)
            current, size = [], 0
        current.append(tensor)
        size += nbytes
    if current or not groups:
        groups.append(current)
    return tuple(_file_plan(index, len(groups), group, options) for index, group in enumerate(groups))


def _file_plan(index: int, count: int, tensors: list[TensorPlan], options: ExportOptions) -> FilePlan:
    # As safetensors has it: dtypes of large elements first, so that every tensor begins at a multiple of its element.
    place_of = {dtype: -place for place, dtype in enumerate(ITEMSIZE)}
    keys = []
    for number, tensor in enumerate(tensors):
        keys.append((place_of[tensor.dtype], tensor.name, number))
    placed = []
    begin = 0
    for _, _, number in sorted(keys):
        tensor = tensors[number]
        placed.append(tensor._replace(begin=begin))
        begin += tensor.nbytes
    suffix = ""
    if count > 1:
        suffix = f"-{index + 1:05d}-of-{count:05d}"
    pattern = options.filename_pattern or MODEL_PATTERN
    return FilePlan(pattern.replace("{suffix}", suffix), tuple(placed))


def _digest(files: tuple[FilePlan, ...], aliases: Mapping[str, str], basis: str) -> str:
    described = []
    for file in files:
        tensors = [[tensor.name, tensor.source, tensor.dtype, tensor.shape, tensor.begin] for tensor in file.tensors]
        described.append([file.name, tensors])
    parts: list[object] = [described, sorted(aliases.items())]
    # Not always, as a plan has the same digest in every version.
    if basis:
        parts.append(basis)
    text = json.dumps(parts, separators=(",", ":"))
    import hashlib

    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def replica_error(
    name: str, box: Box, holder: HolderLabel, other: HolderLabel, advice: str = "", path: str | None = None
) -> ReplicaError:
    """Return the error for two holders, or one rank's two copies, with different values of a box."""
    holders = f"{holders_text(holder, other)} hold"
    if holder == other:
        holders = f"two copies of rank {holder} have"
    text = f"{holders} different values for region {box}"
    if advice:
        text += f": {advice}"
    rank = other if isinstance(other, int) else None
    return ReplicaError(text, name=name, rank=rank, path=path)
