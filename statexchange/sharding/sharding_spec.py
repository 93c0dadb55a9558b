"""Sharding specs: a tensor's sharding over a mesh as one record, from which the boxes of all ranks are computed.

100,000 tensors on 1,024 ranks have 10^8 boxes, but only 100,000 specs. A spec has the mesh's shape, and the dim that
each axis splits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, product

from statexchange.messages import Shared
from statexchange.sharding.placements import DimSplit, local_boxes
from statexchange.sharding.shards import Box, Shard

__all__ = ["Placement", "ShardingSpec", "SpecBox", "SpecBoxes", "coordinate_of", "covers_exactly"]


@dataclass(frozen=True, slots=True)
class Placement:
    """The shape of a mesh, whose ranks are numbered in C order, and what each axis splits (None: it replicates)."""

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
    """The sharding of one tensor over the ranks 0, 1, ... of a mesh."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    placement: Shared[Placement]

    def shard_of(self, rank: int) -> Shard:
        """Return one rank's shard, with explicit boxes."""
        mesh_shape = self.placement.mesh_shape
        coordinate = coordinate_of(rank, mesh_shape)
        boxes = local_boxes(self.global_shape, mesh_shape, coordinate, self.placement.splits)
        return Shard(self.name, self.dtype, self.global_shape, tuple(box for box, _ in boxes))


@dataclass(frozen=True, slots=True)
class SpecBox:
    """One box, and (rank, index among the rank's boxes) of each rank that has it."""

    box: Box
    owners: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Run:
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


@lru_cache(maxsize=4096)
def _runs(size: int, mesh_shape: tuple[int, ...], splits: tuple[DimSplit | None, ...]) -> tuple[_Run, ...]:
    """Return all runs of a dim in order. `splits` has an entry for each axis that splits this dim, None for others."""
    axes = [axis for axis, split in enumerate(splits) if split is not None]
    shape = tuple(mesh_shape[axis] for axis in axes)
    dim_splits = tuple(DimSplit(0, split.split_factor) for split in splits if split is not None)
    runs = []
    for index in product(*map(range, shape)):
        boxes = local_boxes((size,), shape, index, dim_splits)
        coordinates = tuple(zip(axes, index, strict=True))
        for number, (box, _) in enumerate(boxes):
            runs.append(_Run(box.offsets[0], box.shape[0], coordinates, number, len(boxes)))
    return tuple(sorted(runs, key=lambda run: run.begin))


def _runs_by_dim(shape: tuple[int, ...], placement: Placement) -> list[tuple[_Run, ...]]:
    """Return the runs of each dim, in order."""
    runs = []
    for dim, size in enumerate(shape):
        splits: list[DimSplit | None] = []
        for split in placement.splits:
            splits_dim = split is not None and split.dim % len(shape) == dim
            splits.append(split if splits_dim else None)
        runs.append(_runs(size, placement.mesh_shape, tuple(splits)))
    return runs


def covers_exactly(shape: tuple[int, ...], placement: Placement) -> bool:
    """Whether the boxes of all ranks, without replicas, cover a tensor of `shape` exactly once.

    Each mesh axis splits at most one dim, so the boxes are exactly the products of one run per dim. They cover
    the tensor exactly if and only if the runs of each dim cover that dim exactly.
    """
    return all(_covers_dim(runs, size) for runs, size in zip(_runs_by_dim(shape, placement), shape, strict=True))


def _covers_dim(runs: Sequence[_Run], size: int) -> bool:
    """Whether sorted runs follow one another from 0 to `size`."""
    at = 0
    for run in runs:
        if run.begin != at:
            return False
        at += run.size
    return at == size


class SpecBoxes(Sequence[SpecBox]):
    """The boxes of a tensor in the order of their first elements, each computed when it is accessed."""

    def __init__(self, shape: tuple[int, ...], placement: Placement) -> None:
        self._mesh_shape = placement.mesh_shape
        self._runs = _runs_by_dim(shape, placement)
        split_axes = set()
        for runs in self._runs:
            if runs:  # all runs of one dim are along the same axes
                split_axes |= {axis for axis, _ in runs[0].coordinates}
        # The coordinates of replicas along the axes that split nothing; 0 stands for the other axes.
        self._replicas = [range(1 if axis in split_axes else size) for axis, size in enumerate(placement.mesh_shape)]

    def __len__(self) -> int:
        return math.prod(map(len, self._runs))

    def __iter__(self) -> Iterator[SpecBox]:
        return (self._box(chosen) for chosen in product(*self._runs))

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            return list(islice(self, *index.indices(len(self))))
        chosen = []
        rest = range(len(self))[index]
        for runs in reversed(self._runs):
            rest, number = divmod(rest, len(runs))
            chosen.append(runs[number])
        return self._box(tuple(reversed(chosen)))

    def _box(self, chosen: tuple[_Run, ...]) -> SpecBox:
        """Return the box that is the product of one run of each dim."""
        box = Box(tuple(run.begin for run in chosen), tuple(run.size for run in chosen))
        index = 0
        for run in chosen:
            index = index * run.count + run.number
        coordinates = {axis: coordinate for run in chosen for axis, coordinate in run.coordinates}
        ranks = []
        for replica in product(*self._replicas):
            rank = 0
            for axis, size in enumerate(self._mesh_shape):
                rank = rank * size + coordinates.get(axis, replica[axis])
            ranks.append(rank)
        return SpecBox(box, tuple((rank, index) for rank in ranks))
