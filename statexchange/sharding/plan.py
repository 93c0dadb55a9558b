"""Plan a merge: prove that each element is supplied exactly once, and assign holders and output files.

A *holder* is anything that has bytes: a live rank or a rank's file. It is numbered by its position in the `rank_shards`
that are given to `plan_merge`. A plan is a pure function of these and of `ExportOptions`: the same input gives the same
plan and the same digest everywhere.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    OverlapError,
    StateExchangeError,
    UnsafeError,
    UnsupportedError,
)
from statexchange.processes import collector_paused
from statexchange.sharding.options import ExportOptions
from statexchange.sharding.sharding_spec import Placement, ShardingSpec, SpecBox, SpecBoxes, covers_exactly
from statexchange.sharding.shards import Box, Shard, full_box, intersect, region_text
from statexchange.tensors import ITEMSIZE

__all__ = [
    "FilePlan",
    "Piece",
    "Plan",
    "RankShards",
    "TensorPlan",
    "plan_merge",
    "prove_cover",
]

_MAX_CUT_DIMS = 12
_MANY_BOXES = 1000
_FEW_RANKS = 16  # the largest mesh for which the pieces of equal specs are cached
_MAX_CORNERS = 1 << 22  # corners that are counted at once; a box that is cut along n dims has 2**n
_MAX_LOOKS = 64  # visits of each box per dim while boxes are divided into slabs, on average


@dataclass(frozen=True, slots=True)
class RankShards:
    """The shards of one holder.

    Attributes:
        rank: the rank in error messages.
        shards: its shards. A `ShardingSpec`, given by any one holder, covers all holders.
        aliases: names of tied tensors, with the names under which they are kept.
    """

    rank: int
    shards: Sequence[Shard | ShardingSpec]
    aliases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of an output tensor, supplied by box `box_index` of the shard of `holder`.

    `replicas` are (holder, box_index) of the other copies of the box.
    """

    box: Box
    holder: int
    box_index: int
    replicas: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class TensorPlan:
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
    pieces: Sequence[Piece]
    reduce: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One output file, with its tensors in the order of their bytes."""

    name: str
    tensors: tuple[TensorPlan, ...]

    @property
    def data_nbytes(self) -> int:
        """Bytes of the data section."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a merge or export will write.

    Attributes:
        files: the output files.
        aliases: output names of tied tensors that are not written, with the names under which they are.
        digest: 32 hex digits that identify the plan.
    """

    files: tuple[FilePlan, ...]
    aliases: Mapping[str, str]
    digest: str

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(file.data_nbytes for file in self.files)

    @property
    def num_tensors(self) -> int:
        """Number of output tensors."""
        return sum(len(file.tensors) for file in self.files)


def plan_merge(
    rank_shards: Sequence[RankShards],
    options: ExportOptions | None = None,
    *,
    basis: str = "",
    reductions: Mapping[str, str] | None = None,
) -> Plan:
    """Plan the merge of all holders' shards. Not collective.

    The pieces of a tensor with a `ShardingSpec` are computed on access, so the plan does not grow with the ranks.

    Args:
        rank_shards: the shards of each holder.
        options: selection, names, dtypes and files.
        basis: everything else that the output bytes depend on, for the digest.
        reductions: "max" or "min" by the source name of each tensor whose copies are reduced.

    Returns:
        The plan.

    Raises:
        IncompleteError: a region has no holder.
        OverlapError: different boxes overlap.
        CorruptError: holders disagree on dtype or global shape.
        UnsafeError: `rename` gives one name to two tensors.
    """
    with collector_paused():
        return _plan(rank_shards, options or ExportOptions(), basis, reductions or {})


def _plan(rank_shards: Sequence[RankShards], options: ExportOptions, basis: str, reductions: Mapping[str, str]) -> Plan:
    chosen = _select(_by_name(rank_shards), options)
    aliases = _aliases(rank_shards, chosen)
    for alias in aliases:
        chosen.pop(alias, None)
    renamed = _renamed(chosen, options)
    load = [0] * len(rank_shards)
    tensors = []
    for number, (new, old) in enumerate(renamed.items()):
        held, reduce = chosen[old], reductions.get(old)
        if reduce is not None:
            _check_reducible(reduce, held, rank_shards)
        if isinstance(held, ShardingSpec):
            tensor = _plan_spec(new, held, options, number)
        else:
            tensor = _plan_tensor(new, held, rank_shards, options, load)
        tensors.append(tensor if reduce is None else replace(tensor, reduce=reduce))
    files = _assign_files(tensors, options)
    written = {options.renamed(alias): options.renamed(kept) for alias, kept in aliases.items()}
    return Plan(files, written, _digest(files, written, basis))


def _check_reducible(
    reduce: str, held: Sequence[tuple[int, Shard]] | ShardingSpec, rank_shards: Sequence[RankShards]
) -> None:
    """Raise unless all copies have one dtype whose values are ordered."""
    shards = [(0, held)] if isinstance(held, ShardingSpec) else held
    first: Shard | ShardingSpec = shards[0][1]
    if first.dtype.startswith("C"):
        raise UnsupportedError(f"complex numbers have no {reduce}", name=first.name)
    for holder, shard in shards:
        if shard.dtype != first.dtype:
            raise CorruptError(
                "copies to be reduced differ in dtype",
                name=first.name,
                rank=rank_shards[holder].rank,
                expected=first.dtype,
                found=shard.dtype,
            )


class _SpecPieces(Sequence[Piece]):
    """The pieces of a tensor with a spec. `turn` selects the replica that writes, which balances the ranks' writes."""

    def __init__(self, boxes: SpecBoxes, turn: int) -> None:
        self._boxes = boxes
        self._turn = turn

    def __len__(self) -> int:
        return len(self._boxes)

    def __iter__(self) -> Iterator[Piece]:
        return map(self._piece, self._boxes)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        found = self._boxes[index]
        return list(map(self._piece, found)) if isinstance(index, slice) else self._piece(found)

    def _piece(self, found: SpecBox) -> Piece:
        chosen = found.owners[self._turn % len(found.owners)]
        return Piece(found.box, *chosen, tuple(owner for owner in found.owners if owner != chosen))


@functools.lru_cache(1024)  # a model has many tensors of few shapes and placements
def _cached_pieces(shape: tuple[int, ...], placement: Placement, turn: int) -> tuple[Piece, ...]:
    return tuple(_SpecPieces(SpecBoxes(shape, placement), turn))


def _plan_spec(new: str, held: ShardingSpec, options: ExportOptions, number: int) -> TensorPlan:
    if not covers_exactly(held.global_shape, held.placement):
        raise IncompleteError(f"{held.placement} does not cover shape {held.global_shape}", name=held.name)
    turn = 0 if options.replicas == "root" else number
    num_ranks = math.prod(held.placement.mesh_shape)
    pieces: Sequence[Piece]
    if num_ranks <= _FEW_RANKS:
        pieces = _cached_pieces(held.global_shape, held.placement, turn % num_ranks)
    else:
        pieces = _SpecPieces(SpecBoxes(held.global_shape, held.placement), turn)
    return TensorPlan(new, held.name, options.output_dtype(held.dtype), held.global_shape, 0, pieces)


def _by_name(rank_shards: Sequence[RankShards]) -> dict[str, list[tuple[int, Shard]] | ShardingSpec]:
    found: dict[str, list[tuple[int, Shard]] | ShardingSpec] = {}
    for holder, one in enumerate(rank_shards):
        for shard in one.shards:
            held = found.setdefault(shard.name, shard if isinstance(shard, ShardingSpec) else [])
            if isinstance(held, list) and isinstance(shard, Shard):
                held.append((holder, shard))
            elif held is not shard:
                raise CorruptError("conflicting sharding specs for one tensor", name=shard.name, rank=one.rank)
    return found


def _select(
    by_name: Mapping[str, list[tuple[int, Shard]] | ShardingSpec], options: ExportOptions
) -> dict[str, list[tuple[int, Shard]] | ShardingSpec]:
    for pattern in options.include:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in by_name):
            raise InvalidArgumentError(f"include pattern {pattern!r} matches no tensor")
    chosen = {name: held for name, held in by_name.items() if options.wants(name)}
    if by_name and not chosen:
        raise InvalidArgumentError(f"exclude patterns {list(options.exclude)} leave no tensor")
    return chosen


def _aliases(
    rank_shards: Sequence[RankShards], by_name: Mapping[str, list[tuple[int, Shard]] | ShardingSpec]
) -> dict[str, str]:
    """Return tied names that need not be written, with the names under which they are.

    A name is dropped only if every holder with elements of it has the same alias for it, and the other name is written
    with an equal shard.
    """
    # The names under which holders keep each tensor; its own name means that it is not tied.
    kept_as: dict[str, set[str]] = {}
    for one in rank_shards:
        # Empty shards are equal, whatever they are tied to, so they prove nothing.
        parts = {s.name: (s.dtype, s.global_shape, s.boxes) for s in one.shards if isinstance(s, Shard) and s.nbytes}
        for name, part in parts.items():
            kept = one.aliases.get(name, name)
            kept_as.setdefault(name, set()).add(kept if parts.get(kept) == part else name)
        for name, kept in one.aliases.items():
            spec, other = by_name.get(name), by_name.get(kept)
            if isinstance(spec, ShardingSpec):
                same = isinstance(other, ShardingSpec) and replace(other, name=name) == spec
                kept_as.setdefault(name, set()).add(kept if same else name)
    for name, held in by_name.items():
        if isinstance(held, ShardingSpec):
            names = kept_as.setdefault(name, set())
            if not names or _is_untied_somewhere(held, rank_shards):
                names.add(name)
    only = {name: next(iter(names)) for name, names in kept_as.items() if len(names) == 1}
    aliases = {}
    for alias, kept in only.items():
        if alias != kept and alias in by_name and kept in by_name and only.get(kept) == kept:
            aliases[alias] = kept
    return aliases


def _is_untied_somewhere(spec: ShardingSpec, rank_shards: Sequence[RankShards]) -> bool:
    """Whether a holder with elements of the tensor has no alias for it."""
    untied = [holder for holder, one in enumerate(rank_shards) if spec.name not in one.aliases]
    return any(spec.shard_of(holder).nbytes for holder in untied)


def _renamed(names: Iterable[str], options: ExportOptions) -> dict[str, str]:
    renamed: dict[str, str] = {}
    for old in names:
        new = options.renamed(old)
        if new in renamed:
            raise UnsafeError(f"rename gives one name to both {renamed[new]!r} and {old!r}", name=new)
        renamed[new] = old
    return renamed


def _plan_tensor(
    new: str,
    held: Sequence[tuple[int, Shard]],
    rank_shards: Sequence[RankShards],
    options: ExportOptions,
    load: list[int],
) -> TensorPlan:
    first = held[0][1]
    dtype = options.output_dtype(first.dtype)
    for holder, shard in held[1:]:
        for what, ours, theirs in (
            ("dtype", dtype, options.output_dtype(shard.dtype)),
            ("global_shape", first.global_shape, shard.global_shape),
        ):
            if ours != theirs:
                hint = ""
                if what == "global_shape" and all(s.boxes == (full_box(s.global_shape),) for s in (first, shard)):
                    hint = f'; if each holds a part, give a layout: {{"{first.name}": {{"dim": 0}}}}'
                raise CorruptError(
                    f"ranks {rank_shards[held[0][0]].rank} and {rank_shards[holder].rank} disagree on the {what}{hint}",
                    name=first.name,
                    rank=rank_shards[holder].rank,
                    expected=ours,
                    found=theirs,
                )
    owners: dict[Box, list[tuple[int, int]]] = {}
    for holder, shard in held:
        for index, box in enumerate(shard.boxes):
            if box.numel:
                owners.setdefault(box, []).append((holder, index))
    at = _first_flaw(first.name, first.global_shape, owners)
    if at is not None:
        ranks = {box: [rank_shards[holder].rank for holder, _ in copies] for box, copies in owners.items()}
        raise _flaw_error(first.name, first.global_shape, ranks, at)
    pieces = tuple(_piece(box, copies, options, load, ITEMSIZE[dtype]) for box, copies in _in_order(owners))
    return TensorPlan(new, first.name, dtype, first.global_shape, 0, pieces)


def _in_order(owners: Mapping[Box, list[tuple[int, int]]]) -> list[tuple[Box, list[tuple[int, int]]]]:
    """Return boxes in the order of their first elements, so that a merge reads and writes forward."""
    return sorted(owners.items(), key=lambda item: item[0].offsets)


def _piece(box: Box, copies: list[tuple[int, int]], options: ExportOptions, load: list[int], itemsize: int) -> Piece:
    """Return a box's piece: the least loaded holder of a replica writes it; with replicas="root", the first one."""
    if len(copies) == 1:
        load[copies[0][0]] += box.numel * itemsize
        return Piece(box, *copies[0])
    chosen = copies[0] if options.replicas == "root" else min(copies, key=lambda h: load[h[0]])
    load[chosen[0]] += box.numel * itemsize
    return Piece(box, *chosen, tuple(h for h in copies if h != chosen))


def prove_cover(name: str, shape: tuple[int, ...], boxes: Mapping[Box, Sequence[int]]) -> None:
    """Raise unless the non-empty `boxes` (mapped to their ranks) cover a tensor of `shape` exactly once."""
    at = _first_flaw(name, shape, boxes)
    if at is not None:
        raise _flaw_error(name, shape, boxes, at)


def _first_flaw(name: str, shape: tuple[int, ...], boxes: Iterable[Box]) -> tuple[int, ...] | None:
    """Return the first element that is not covered exactly once; None if there is none."""
    found = list(boxes)
    whole = full_box(shape)
    if found == [whole]:
        return None
    cut = [d for d, size in enumerate(shape) if any(box.shape[d] != size for box in found)]
    if len(cut) > _MAX_CUT_DIMS:
        raise UnsupportedError(f"cut along {len(cut)} dims; {_MAX_CUT_DIMS} are supported", name=name)
    if not whole.numel:
        return None
    try:
        return _CoverProof(len(found)).first_flaw(whole, found, cut)
    except UnsupportedError as error:
        raise error.located(name=name) from None


def _flaw_error(
    name: str, shape: tuple[int, ...], boxes: Mapping[Box, Sequence[int]], at: tuple[int, ...]
) -> StateExchangeError:
    claims = [box for box in boxes if all(o <= a < e for o, a, e in zip(box.offsets, at, box.ends, strict=True))]
    if not claims:
        held = sorted({rank for ranks in boxes.values() for rank in ranks})
        region = _free_region(at, shape, boxes)
        problem = f"no rank holds region {region} of shape {shape}; ranks {held} hold the rest"
        return IncompleteError(problem, name=name)
    one, other = claims[:2]
    ends = tuple(map(min, one.ends, other.ends))
    return OverlapError(
        f"region {region_text(at, ends)} is claimed twice: as {one} by rank {boxes[one][0]} "
        f"and as {other} by rank {boxes[other][0]}",
        name=name,
        rank=boxes[other][0],
    )


class _CoverProof:
    """Searches for the first flaw of a cover by `count` boxes, with work and memory bounded by their number."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._looks_left = _MAX_LOOKS * count * _MAX_CUT_DIMS
        self._corners_left = 4 * _MAX_CORNERS + _MAX_LOOKS * count

    def first_flaw(self, region: Box, boxes: Sequence[Box], dims: Sequence[int]) -> tuple[int, ...] | None:
        """Return the first element of `region` that is not covered exactly once by the boxes, all of which lie in it.

        The order is lexicographic. If the boxes have too many corners, the region is divided along one dim into slabs
        that no box crosses, and each slab is searched by itself.
        """
        cut = [d for d in dims if any(box.shape[d] != region.shape[d] for box in boxes)]
        if len(boxes) << len(cut) <= _MAX_CORNERS:
            self._corners_left -= len(boxes) << len(cut)
            if self._corners_left < 0:
                raise self._too_many(cut)
            return _flaw_by_corners(region, boxes, cut)
        for dim in cut:
            self._looks_left -= len(boxes)
            if self._looks_left < 0:
                break
            slabs = _slabs(region, boxes, dim)
            if len(slabs) > 1:
                flaws = (self.first_flaw(slab, inside, cut) for slab, inside in slabs)
                return min((flaw for flaw in flaws if flaw is not None), default=None)
        raise self._too_many(cut)

    def _too_many(self, cut: Sequence[int]) -> UnsupportedError:
        text = f"cannot prove that {self._count} boxes cut along {len(cut)} dims at once cover the tensor"
        return UnsupportedError(f"{text}: shard it along fewer dims")


def _slabs(region: Box, boxes: Sequence[Box], dim: int) -> list[tuple[Box, list[Box]]]:
    """Divide a region along `dim` into slabs that no box crosses; return each slab with its boxes (none for a gap)."""
    found: list[tuple[int, list[Box]]] = []  # the begin of each slab, which is the end of the one before, and its boxes
    reached = region.offsets[dim]
    for box in sorted(boxes, key=lambda box: box.offsets[dim]):
        begin = box.offsets[dim]
        if begin > reached:
            found.append((reached, []))
        if begin >= reached:
            found.append((begin, []))
        found[-1][1].append(box)
        reached = max(reached, begin + box.shape[dim])
    if reached < region.ends[dim]:
        found.append((reached, []))

    def slab(begin: int, end: int) -> Box:
        offsets, shape = list(region.offsets), list(region.shape)
        offsets[dim], shape[dim] = begin, end - begin
        return Box(tuple(offsets), tuple(shape))

    ends = [*(begin for begin, _ in found[1:]), region.ends[dim]]
    return [(slab(begin, end), inside) for (begin, inside), end in zip(found, ends, strict=True)]


def _flaw_by_corners(region: Box, boxes: Sequence[Box], cut: Sequence[int]) -> tuple[int, ...] | None:
    """Return the first element, in lexicographic order, that is not covered exactly once; None if there is none.

    Only dims in `cut` matter; all boxes span the others. The proof uses prefix sums. Let c(x) be the number of boxes
    that contain x, minus one inside the region. Put a weight on each corner of each box: +1 for an even number of ends
    among its coordinates, -1 for an odd number; and the negated weights on the corners of the region. Then c(x) is the
    sum of the weights at all corners at or before x in every dim. So c is zero everywhere if and only if all weights
    cancel; else the first corner with a remaining weight has no other before it, and is the first flaw.
    """
    if not boxes:
        return region.offsets
    if cut and len(boxes) >= _MANY_BOXES:
        return _flaw_of_many(region, boxes, cut)
    return _flaw_of_few(region, boxes, cut)


def _flaw_of_few(region: Box, boxes: Sequence[Box], cut: Sequence[int]) -> tuple[int, ...] | None:
    """`_flaw_by_corners` with a dictionary of the remaining weights."""
    signs = [(-1) ** sum(bits) for bits in product((0, 1), repeat=len(cut))]
    corners = product(*((region.offsets[dim], region.ends[dim]) for dim in cut))
    left = {corner: -sign for corner, sign in zip(corners, signs, strict=True)}
    for box in boxes:
        corners = product(*((box.offsets[dim], box.offsets[dim] + box.shape[dim]) for dim in cut))
        for corner, sign in zip(corners, signs, strict=True):
            count = left.pop(corner, 0) + sign
            if count:
                left[corner] = count
    if not left:
        return None
    first = dict(zip(cut, min(left), strict=True))
    return tuple(first.get(dim, low) for dim, low in enumerate(region.offsets))


def _flaw_of_many(region: Box, boxes: Sequence[Box], cut: Sequence[int]) -> tuple[int, ...] | None:
    """`_flaw_by_corners` by sorting numbered corners in numpy, which is faster for many boxes."""
    import numpy as np

    lows = np.array([[box.offsets[dim] for dim in cut] for box in [*boxes, region]], dtype=np.int64)
    highs = np.array([[box.shape[dim] for dim in cut] for box in [*boxes, region]], dtype=np.int64)
    highs += lows
    signs = np.ones(len(lows), np.int8)
    signs[-1] = -1  # the region itself, with negated weights
    edges = [np.unique(np.concatenate([lows[:, d], highs[:, d]])) for d in range(len(cut))]
    places = [[np.searchsorted(edges[d], side[:, d]) for side in (lows, highs)] for d in range(len(cut))]
    counts = tuple(map(len, edges))
    if math.prod(counts) >= 1 << 62:  # corners cannot be numbered
        return _flaw_of_few(region, boxes, cut)
    corners = list(product((0, 1), repeat=len(cut)))
    keys = np.concatenate(
        [np.ravel_multi_index([places[d][b] for d, b in enumerate(bits)], counts) for bits in corners]
    )
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    values = np.concatenate([-signs if sum(bits) % 2 else signs for bits in corners])[order]
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    left = np.flatnonzero(np.add.reduceat(values, starts, dtype=np.int64))
    if not left.size:
        return None
    at = np.unravel_index(keys[starts[left[0]]], counts)
    first = {dim: int(edges[d][at[d]]) for d, dim in enumerate(cut)}
    return tuple(first.get(dim, low) for dim, low in enumerate(region.offsets))


def _free_region(at: tuple[int, ...], shape: tuple[int, ...], boxes: Iterable[Box]) -> Box:
    """Return a block that begins at `at` and that no box overlaps, extended in the last dim first."""
    ends = [low + 1 for low in at]
    for dim in reversed(range(len(shape))):
        ends[dim] = shape[dim]
        region = Box(at, tuple(e - a for a, e in zip(at, ends, strict=True)))
        ends[dim] = min((b.offsets[dim] for b in boxes if intersect(b, region) is not None), default=shape[dim])
    return Box(at, tuple(e - a for a, e in zip(at, ends, strict=True)))


def _assign_files(tensors: list[TensorPlan], options: ExportOptions) -> tuple[FilePlan, ...]:
    """Assign tensors to files greedily in their order; within a file sort by alignment, then name, as safetensors."""
    groups: list[list[TensorPlan]] = []
    current: list[TensorPlan] = []
    size = 0
    for tensor in tensors:
        if tensor.nbytes > options.max_shard_bytes:
            groups.append([tensor])
            continue
        if size + tensor.nbytes > options.max_shard_bytes:
            groups.append(current)
            current, size = [], 0
        current.append(tensor)
        size += tensor.nbytes
    if current or not groups:
        groups.append(current)
    return tuple(_file_plan(i, len(groups), group, options) for i, group in enumerate(groups))


def _file_plan(index: int, count: int, tensors: list[TensorPlan], options: ExportOptions) -> FilePlan:
    order = list(ITEMSIZE)
    placed = []
    begin = 0
    for t in sorted(tensors, key=lambda t: (-order.index(t.dtype), t.name)):
        placed.append(replace(t, begin=begin))
        begin += t.nbytes
    suffix = "" if count == 1 else f"-{index + 1:05d}-of-{count:05d}"
    return FilePlan(options.filename_pattern.replace("{suffix}", suffix), tuple(placed))


def _digest(files: tuple[FilePlan, ...], aliases: Mapping[str, str], basis: str) -> str:
    described = [[f.name, [[t.name, t.source, t.dtype, t.shape, t.begin] for t in f.tensors]] for f in files]
    text = json.dumps([described, sorted(aliases.items()), *([basis] if basis else [])], separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
