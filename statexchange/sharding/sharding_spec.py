"""Sharding specs: a tensor's sharding over a mesh as one record, from which the boxes of all ranks are computed.

100,000 tensors on 1,024 ranks have 10^8 boxes, but only 100,000 specs. A spec has the mesh's shape, and the dim that
each axis splits, as torch's DTensor placements say; torch is not needed.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from operator import attrgetter
from typing import NamedTuple

from statexchange.messages import Shared
from statexchange.sharding.shards import Box, Shard, boxes_of_runs
from statexchange.tensors import ITEMSIZE

# Of one rank, in one dim or as boxes of one tensor. A placement in a file is a few bytes, whatever it asks for.
_MAX_PIECES = 1 << 16

Run = tuple[int, int]  # (begin, end) in a dim
_begin_of = attrgetter("begin")


class DimSplit(NamedTuple):
    """One mesh axis splits `dim` into as many parts as it has ranks.

    Each part is one run, as with Shard. With a `split_factor`, as with _StridedShard, the dim is first cut into
    `split_factor` pieces, and a part has one run of every piece. Of 8 indices on 2 ranks the first has ``[0:4]``, or
    with a `split_factor` of 2 ``[0:2]`` and ``[4:6]``.
    """

    dim: int
    split_factor: int = 1


def local_boxes(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], splits: Sequence[DimSplit | None]
) -> list[tuple[Box, tuple[int, ...]]]:
    """Return the boxes of the rank at `coordinate`, each with its offsets in the local tensor.

    `splits` has one entry per mesh axis, None for Replicate, and is applied from the first axis on. Sizes follow
    `torch.chunk`: all parts are as large as the first, the last ones smaller or empty. A local tensor without elements
    has no boxes. Of an (8, 2) tensor, whose rows a mesh of 4 splits, the rank at (1,) has ``[2:4, 0:2]`` at (0, 0).

    Raises:
        ValueError: the arguments do not describe a placement.
    """
    if not len(mesh_shape) == len(coordinate) == len(splits):
        raise ValueError(f"{len(splits)} placements for a mesh of {len(mesh_shape)} axes")
    runs: list[list[Run]] = [[(0, size)] for size in shape]
    # An axis divides what the axes before it have left, as a DTensor's placements do: a later one that splits the same
    # dim divides the runs of one rank, not the dim.
    for parts, index, split in zip(mesh_shape, coordinate, splits, strict=True):
        if not 0 <= index < parts:
            raise ValueError(f"coordinate {tuple(coordinate)} lies outside a mesh of shape {tuple(mesh_shape)}")
        if split is not None:
            if not -len(shape) <= split.dim < len(shape) or split.split_factor < 1:
                raise ValueError(f"{split} does not fit shape {tuple(shape)}")
            runs[split.dim] = _joined(_part(runs[split.dim], parts, index, split.split_factor))
            if len(runs[split.dim]) > _MAX_PIECES:
                raise ValueError(f"a rank would hold {len(runs[split.dim])} pieces of one dim")
    if not all(map(_length, runs)):
        return []
    if math.prod(map(len, runs)) > _MAX_PIECES:
        raise ValueError(f"a rank would hold {math.prod(map(len, runs))} boxes of one tensor")
    sized = []
    for dim_runs in runs:
        sized.append([(begin, end - begin) for begin, end in dim_runs])
    # Both products are in C order, so that boxes and offsets go in pairs.
    return list(zip(boxes_of_runs(sized), product(*map(_begins, runs)), strict=True))


def _length(runs: Sequence[Run]) -> int:
    """Return the number of elements in all runs."""
    return sum(end - begin for begin, end in runs)


def _begins(runs: Sequence[Run]) -> list[int]:
    """Return the begin of each run in the local tensor, which concatenates them."""
    return list(accumulate((end - begin for begin, end in runs[:-1]), initial=0))


def _part(runs: list[Run], parts: int, index: int, split_factor: int) -> list[Run]:
    """Divide the elements of `runs` into `parts` parts, and return the runs of part `index`."""
    size = _length(runs)
    step = -(-size // split_factor)
    # Before the loop, which makes something for each piece. `local_boxes` counts again when neighbours are joined.
    if split_factor > 1 and step and -(-size // step) > _MAX_PIECES:
        raise ValueError(f"a dim would be cut into {-(-size // step)} pieces")
    positions = []
    for begin in range(0, size, step or 1):
        length = min(step, size - begin)
        # Rounded up, as torch.chunk does it, so that the last parts are smaller or empty.
        part_size = -(-length // parts)
        positions.append((begin + min(index * part_size, length), begin + min((index + 1) * part_size, length)))
    return _between(runs, positions)


def _between(runs: Sequence[Run], positions: Sequence[Run]) -> list[Run]:
    """Return the parts of `runs` at ascending positions, which number the elements of all runs in order.

    In the runs (0, 4) and (10, 14) the positions (2, 6) are (2, 4) and (10, 12). Each run is visited once.
    """
    parts: list[Run] = []
    number = position = 0  # the run, and the position at which it begins
    for first, last in positions:
        low = first
        while low < last:
            begin, end = runs[number]
            next_position = position + end - begin
            if next_position <= low:  # the run ends before
                number, position = number + 1, next_position
                continue
            high = min(last, next_position)
            parts.append((begin + low - position, begin + high - position))
            low = high
    return parts


def _joined(runs: Sequence[Run]) -> list[Run]:
    """Merge runs that adjoin; return one empty run if there is none."""
    merged: list[Run] = []
    for begin, end in runs:
        if merged and merged[-1][1] == begin:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    # Never without a run: a dim without elements is one empty run, which further axes can divide.
    return merged or [(0, 0)]


class Placement(NamedTuple):
    """The shape of a mesh, whose ranks are numbered in C order, and what each axis splits (None: it replicates).

    HSDP of 2 replicas over 4 ranks each: ``Placement((2, 4), (None, DimSplit(0)))``.
    """

    mesh_shape: tuple[int, ...]
    splits: tuple[DimSplit | None, ...]

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the mesh."""
        return math.prod(self.mesh_shape)


def coordinate_of(rank: int, mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the coordinate of a rank in a mesh whose ranks are numbered in C order."""
    coordinate = []
    for size in reversed(mesh_shape):
        rank, index = divmod(rank, size)
        coordinate.append(index)
    return tuple(reversed(coordinate))


@dataclass(frozen=True, slots=True)
class ShardingSpec:
    """The sharding of one tensor over the ranks of a mesh, in C order; `ranks` is () for the ranks 0, 1, ..."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    placement: Shared[Placement]
    ranks: Shared[tuple[int, ...]] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.global_shape) * ITEMSIZE[self.dtype]

    def shard_of(self, rank: int) -> Shard:
        """Return one rank's shard, with explicit boxes."""
        mesh_shape = self.placement.mesh_shape
        coordinate = coordinate_of(self.ranks.index(rank) if self.ranks else rank, mesh_shape)
        boxes = local_boxes(self.global_shape, mesh_shape, coordinate, self.placement.splits)
        return Shard(self.name, self.dtype, self.global_shape, tuple(box for box, _ in boxes))


@dataclass(frozen=True, slots=True)
class DimRun:
    """A run of one dim, and the ranks that have it.

    Attributes:
        begin: first index of the run.
        size: its length.
        coordinates: (axis, coordinate) of the ranks that have it, for each axis that splits the dim.
        number: index of the run among those ranks' runs of this dim.
        count: number of those ranks' runs of this dim.
    """

    begin: int
    size: int
    coordinates: tuple[tuple[int, int], ...]
    number: int
    count: int

    @property
    def end(self) -> int:
        """The index after its last one."""
        return self.begin + self.size


@lru_cache(maxsize=4096)
def _runs(size: int, mesh_shape: tuple[int, ...], splits: tuple[DimSplit | None, ...]) -> tuple[DimRun, ...]:
    """Return all runs of a dim in order. `splits` has an entry for each axis that splits this dim, None for others."""
    axes, shape, dim_splits = [], [], []
    for axis, split in enumerate(splits):
        if split is not None:
            axes.append(axis)
            shape.append(mesh_shape[axis])
            dim_splits.append(DimSplit(0, split.split_factor))
    runs = []
    if dim_splits == [DimSplit(0)]:  # by arithmetic, as one axis may have thousands of ranks
        # As torch.chunk has them: of 10 indices on 4 ranks each has 3, and the last one 1.
        chunk = -(-size // shape[0]) or 1
        for at, begin in enumerate(range(0, size, chunk)):
            runs.append(DimRun(begin, min(chunk, size - begin), ((axes[0], at),), 0, 1))
        return tuple(runs)
    # A dim that no axis splits has one run, of the one empty coordinate.
    for index in product(*map(range, shape)):
        # Of the dim alone: what other axes do to other dims does not change its runs.
        boxes = local_boxes((size,), shape, index, dim_splits)
        coordinates = tuple(zip(axes, index, strict=True))
        for number, (box, _) in enumerate(boxes):
            runs.append(DimRun(box.offsets[0], box.shape[0], coordinates, number, len(boxes)))
    return tuple(sorted(runs, key=_begin_of))


def runs_by_dim(shape: tuple[int, ...], placement: Placement) -> list[tuple[DimRun, ...]]:
    """Return the runs of each dim, in order."""
    runs = []
    # With the splits of this dim alone, so that dims of one size share their runs whatever splits the other dims.
    for dim, size in enumerate(shape):
        splits: list[DimSplit | None] = list(placement.splits)
        for axis, split in enumerate(placement.splits):
            if split is not None and split.dim % len(shape) != dim:
                splits[axis] = None
        runs.append(_runs(size, placement.mesh_shape, tuple(splits)))
    return runs


def covers_exactly(shape: tuple[int, ...], placement: Placement) -> bool:
    """Whether the boxes of all ranks, without replicas, cover a tensor of `shape` exactly once.

    Each mesh axis splits at most one dim, so the boxes are exactly the products of one run per dim. They cover
    the tensor exactly if and only if the runs of each dim cover that dim exactly.
    """
    return all(map(_covers_dim, runs_by_dim(shape, placement), shape))


def parts_within(shape: tuple[int, ...], placement: Placement, box: Box) -> list[tuple[Box, tuple[int, ...]]]:
    """Return the boxes of all ranks, without replicas, that have elements of `box`, each with where its rank lies.

    That is the rank's coordinates on the axes of the mesh that split a dim. Of an (8, 2) tensor in rows on 4 ranks the
    rows 3 and 4 lie in the boxes of the coordinates (1,) and (2,). The boxes must cover the tensor exactly.
    """
    if 0 in box.shape:
        return []
    overlapping = []
    for runs, begin, size in zip(runs_by_dim(shape, placement), *box, strict=True):
        # The runs follow one another, and there may be thousands.
        first = bisect_right(runs, begin, key=_begin_of) - 1
        overlapping.append(runs[max(first, 0) : bisect_left(runs, begin + size, key=_begin_of)])
    parts = []
    for chosen in product(*overlapping):
        coordinates: dict[int, int] = {}
        offsets, sizes = [], []
        for run in chosen:
            coordinates.update(run.coordinates)
            offsets.append(run.begin)
            sizes.append(run.size)
        # In the order of the mesh's axes, whatever dims these split.
        at = tuple(map(coordinates.__getitem__, sorted(coordinates)))
        parts.append((Box(tuple(offsets), tuple(sizes)), at))
    return parts


def _covers_dim(runs: Sequence[DimRun], size: int) -> bool:
    """Whether sorted runs follow one another from 0 to `size`."""
    at = 0
    for run in runs:
        if run.begin != at:
            return False
        at += run.size
    return at == size
