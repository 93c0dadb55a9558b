"""The geometry of DeepSpeed's ZeRO: which elements of which parameter a rank's flat buffers have.

ZeRO flattens the parameters of each optimizer group into one vector.

* ZeRO-1 and 2 divide the vector of each group among the ranks: rank r has the r-th partition. Where a parameter begins
  in the vector follows from the shapes before it, and from paddings after parameters, which DeepSpeed writes since
  0.17. The vector is padded at its end; the fp32 partitions are saved without this padding, the optimizer's states
  with it.
* ZeRO-3 divides each parameter of n elements among the W ranks: each has ceil(n / W) of them, the last ones padding. A
  rank's parts follow one another in its buffers (sub-groups) without gaps.

Everything is checked against the sizes of the buffers in the files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from statexchange.errors import CorruptError

__all__ = ["FlatRun", "Shapes", "runs_of_parameters", "runs_of_partitions"]

Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of parameters by name, in the order in which they are flattened."""


@dataclass(frozen=True, slots=True)
class FlatRun:
    """A run of a parameter in a rank's flat buffer.

    Attributes:
        name: the parameter.
        begin: the first element of the flattened parameter.
        end: the element after the last one.
        group: the number of the buffer.
        at: the position of the first element in the buffer.
    """

    name: str
    begin: int
    end: int
    group: int
    at: int


def runs_of_partitions(
    groups: Sequence[Shapes], paddings: Sequence[Sequence[int]] | None, sizes: Sequence[Sequence[int]]
) -> list[list[FlatRun]]:
    """Return the runs that each rank has in ZeRO-1 or 2.

    Args:
        groups: the shapes of each group's parameters.
        paddings: the number of elements of padding after each parameter of each group; None for none.
        sizes: the number of elements of each group's buffer, by rank.

    Raises:
        CorruptError: the buffers are too small or too large for the parameters.
    """
    world_size = len(sizes)
    runs: list[list[FlatRun]] = [[] for _ in range(world_size)]
    for group, shapes in enumerate(groups):
        group_paddings = [0] * len(shapes) if paddings is None else list(paddings[group])
        if len(group_paddings) != len(shapes):
            text = f"group {group} has {len(shapes)} parameters, but {len(group_paddings)} paddings"
            raise CorruptError(text)
        partition = sizes[0][group]
        for rank, of_rank in enumerate(sizes):
            is_right = of_rank[group] == partition or (rank == world_size - 1 and of_rank[group] < partition)
            if not is_right:
                text = f"the fp32 partition of group {group} differs in size from rank 0's"
                raise CorruptError(text, rank=rank, expected=partition, found=of_rank[group])
        total = sum(of_rank[group] for of_rank in sizes)
        at = end = 0
        for (name, shape), padding in zip(shapes.items(), group_paddings, strict=True):
            end = at + math.prod(shape)
            if end > total:
                break
            for rank, begin_in_rank, part in _parts_of_run(at, end, partition):
                runs[rank].append(FlatRun(name, part.start - at, part.stop - at, group, begin_in_rank))
            at = end + padding
        # The vector is padded to a multiple of `alignment`; the last rank's part is saved without some of this padding.
        alignment = 2 * world_size
        if end > total or math.ceil(at / alignment) != math.ceil(total / alignment):
            text = f"the fp32 partitions of group {group} do not have as many elements as its parameters"
            expected = sum(map(math.prod, shapes.values())) + sum(group_paddings)
            raise CorruptError(text, expected=expected, found=total)
    return runs


def _parts_of_run(begin: int, end: int, partition: int) -> Iterator[tuple[int, int, range]]:
    """Yield (rank, position in its partition, elements of the vector) for each part of a run of the vector."""
    while begin < end:
        rank, at = divmod(begin, partition)
        stop = min(end, (rank + 1) * partition)
        yield rank, at, range(begin, stop)
        begin = stop


def runs_of_parameters(shapes: Shapes, sizes: Sequence[Sequence[int]]) -> list[list[FlatRun]]:
    """Return the runs that each rank has in ZeRO-3.

    Args:
        shapes: the shapes of all parameters.
        sizes: the number of elements of each buffer, by rank.

    Raises:
        CorruptError: the buffers are too small or too large for the parameters.
    """
    world_size = len(sizes)
    needed = sum(-(-math.prod(shape) // world_size) for shape in shapes.values())
    for rank, of_rank in enumerate(sizes):
        if list(of_rank) != list(sizes[0]):
            text = "the fp32 partitions differ in size from rank 0's"
            expected, found = (f"{sum(own)} elements in {len(own)} buffers" for own in (sizes[0], of_rank))
            raise CorruptError(text, rank=rank, expected=expected, found=found)
        if sum(of_rank) != needed:
            text = f"the fp32 partitions do not have as many elements as {len(shapes)} parameters on {world_size} ranks"
            raise CorruptError(text, rank=rank, expected=needed, found=sum(of_rank))
    filled = {name: shape for name, shape in shapes.items() if 0 not in shape}
    return [_runs_of_rank(rank, filled, sizes[rank], world_size) for rank in range(world_size)]


def _runs_of_rank(rank: int, shapes: Shapes, sizes: Sequence[int], world_size: int) -> list[FlatRun]:
    runs = []
    group, group_begin = 0, 0  # the buffer that is reached, and the position of its first element
    at = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        part = -(-numel // world_size)
        begin, end = min(rank * part, numel), min((rank + 1) * part, numel)
        where = at
        while begin < end:
            while where >= group_begin + sizes[group]:
                group_begin += sizes[group]
                group += 1
            count = min(end - begin, group_begin + sizes[group] - where)
            runs.append(FlatRun(name, begin, begin + count, group, where - group_begin))
            begin += count
            where += count
        at += part
    return runs
