"""Compute the boxes of a rank of a device mesh from torch's DTensor placements, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, product
from typing import TYPE_CHECKING

from statexchange.sharding.shards import Box

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DimSplit", "local_boxes"]

_MAX_PIECES = 1 << 16

Run = tuple[int, int]  # (begin, end) in a dim


@dataclass(frozen=True, slots=True)
class DimSplit:
    """One mesh axis splits `dim` into as many parts as it has ranks.

    Each part is one run, as with Shard. With a `split_factor`, as with _StridedShard, the dim is first cut into
    `split_factor` pieces, and a part has one run of every piece.
    """

    dim: int
    split_factor: int = 1


def local_boxes(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], splits: Sequence[DimSplit | None]
) -> list[tuple[Box, tuple[int, ...]]]:
    """Return the boxes of the rank at `coordinate`, each with its offsets in the local tensor.

    `splits` has one entry per mesh axis, None for Replicate, and is applied from the first axis on. Sizes follow
    `torch.chunk`: all parts are as large as the first, the last ones smaller or empty. A local tensor without elements
    has no boxes.

    Raises:
        ValueError: the arguments do not describe a placement.
    """
    if not len(mesh_shape) == len(coordinate) == len(splits):
        raise ValueError(f"{len(splits)} placements for a mesh of {len(mesh_shape)} axes")
    runs: list[list[Run]] = [[(0, size)] for size in shape]
    for parts, index, split in zip(mesh_shape, coordinate, splits, strict=True):
        if not 0 <= index < parts:
            raise ValueError(f"coordinate {tuple(coordinate)} lies outside a mesh of shape {tuple(mesh_shape)}")
        if split is not None:
            if not -len(shape) <= split.dim < len(shape) or split.split_factor < 1:
                raise ValueError(f"{split} does not fit shape {tuple(shape)}")
            runs[split.dim] = _joined(_part(runs[split.dim], parts, index, split.split_factor))
            if len(runs[split.dim]) > _MAX_PIECES:
                raise ValueError(f"a rank would hold {len(runs[split.dim])} pieces of one dim")
    if not all(_length(dim_runs) for dim_runs in runs):
        return []
    if math.prod(map(len, runs)) > _MAX_PIECES:
        raise ValueError(f"a rank would hold {math.prod(map(len, runs))} boxes of one tensor")
    runs_and_begins = [list(zip(dim_runs, _begins(dim_runs), strict=True)) for dim_runs in runs]
    boxes = []
    for chosen in product(*runs_and_begins):  # one run of each dim
        offsets = tuple(begin for (begin, _), _ in chosen)
        sizes = tuple(end - begin for (begin, end), _ in chosen)
        boxes.append((Box(offsets, sizes), tuple(local_begin for _, local_begin in chosen)))
    return boxes


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
    if split_factor > 1 and step and -(-size // step) > _MAX_PIECES:
        raise ValueError(f"a dim would be cut into {-(-size // step)} pieces")
    positions = []
    for begin in range(0, size, step or 1):
        length = min(step, size - begin)
        part_size = -(-length // parts)
        positions.append((begin + min(index * part_size, length), begin + min((index + 1) * part_size, length)))
    return _between(runs, positions)


def _between(runs: Sequence[Run], positions: Sequence[Run]) -> list[Run]:
    """Return the parts of `runs` at ascending positions, which number the elements of all runs in order.

    Each run is visited once.
    """
    parts: list[Run] = []
    number = position = 0  # the run, and the position at which it begins
    for first, last in positions:
        low = first
        while low < last:
            begin, end = runs[number]
            next_position = position + end - begin
            if next_position <= low:
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
    return merged or [(0, 0)]
