"""Read the optimizer's files of DeepSpeed's ZeRO: which elements of which parameter a rank's flat buffers have.

ZeRO flattens the parameters of each optimizer group into one vector.

* ZeRO-1 and 2 divide the vector of each group among the ranks: rank r has the r-th partition. Where a parameter begins
  in the vector follows from the shapes before it, and from paddings after parameters, which DeepSpeed writes since
  0.17. The vector is padded at its end; the fp32 partitions are saved without this padding, the optimizer's states
  with it.
* ZeRO-3 divides each parameter of n elements among the W ranks: each has ceil(n / W) of them, the last ones padding. A
  rank's parts follow one another in its buffers (sub-groups) without gaps, and none lies in two buffers.

So a rank has at most one run of a parameter, and at the same place in the buffer of the weights and in those of the
optimizer's states. Everything is checked against the sizes of the buffers in the files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from statexchange.errors import CorruptError, UnsupportedError, excerpt
from statexchange.formats.deepspeed_files import (
    WEIGHTS,
    DeepSpeedFile,
    FlatBuffer,
    FlatRun,
    Shapes,
    number_of,
    source_name,
)
from statexchange.formats.pickles import OpaqueObject
from statexchange.formats.torch_archive import is_tensor

__all__ = ["CONVERTER", "add_flat", "part_of"]

CONVERTER = "convert it with python -m deepspeed.checkpoint.ds_to_universal --input_folder STEP --output_folder OUT"
# The entries with the weights and with the optimizer's states.
_STAGE_3 = "fp32_flat_groups", "optimizer_state_dict"
_STAGES_1_AND_2 = "single_partition_of_fp32_groups", "base_optimizer_state"
# Entries that are read as tensors, or that describe these.
_OF_TENSORS = {
    *_STAGE_3, *_STAGES_1_AND_2,
    "group_paddings", "param_alignment_paddings", "partition_count", "param_slice_mappings"
}  # fmt: skip


def add_flat(files: Sequence[DeepSpeedFile], groups: Sequence[Shapes], *, takes_master: bool) -> None:
    """Add the fp32 weights, if they are wanted, and the optimizer's states, which are in these files of the ranks.

    Args:
        files: the optimizer's files, by rank.
        groups: the shapes of the parameters of each group.
        takes_master: whether the fp32 weights are wanted.

    Raises:
        CorruptError: counts or sizes contradict each other.
    """
    parts = [_FlatFile(file) for file in files]
    first = parts[0]
    num_groups = len(first.groups) if first.zero_stage == 3 else len(groups)
    for part in parts:
        part.check(first.zero_stage, len(parts), num_groups)
    shapes = {name: shape for group in groups for name, shape in group.items()}
    sizes = [[buffers[WEIGHTS].numel for buffers in part.groups] for part in parts]
    with first.file.parsing():
        if first.zero_stage == 3:
            runs = [_runs_of_rank(shapes, rank, len(sizes), of_rank) for rank, of_rank in enumerate(sizes)]
        else:
            runs = _runs_of_partitions(groups, first.paddings(), sizes)
    for part, of_part in zip(parts, runs, strict=True):
        with part.file.parsing():
            part.check_addresses(of_part)
            for run in of_part:
                for key, buffer in part.groups[run.group].items():
                    if takes_master or key != WEIGHTS:
                        part.file.add_run(source_name(run.name, key), shapes[run.name], run, buffer)
    with first.file.parsing():
        first.add_rest()


class _FlatFile:
    """The flat buffers of one rank's optimizer file.

    Attributes:
        file: the file.
        zero_stage: 1, 2 or 3.
        groups: by group, the fp32 weights and the optimizer's states that are as long as these, by key.
    """

    def __init__(self, file: DeepSpeedFile) -> None:
        self.file = file
        self.groups: list[dict[str, FlatBuffer]] = []
        with file.parsing():
            self._state = state = file.named(file.entry("optimizer_state_dict"))
            if state.get("ds_zero_partition_groups"):
                raise UnsupportedError(f"parameters are divided among groups of ranks of their own: {CONVERTER}")
            # DeepSpeed's BF16_Optimizer (stage 1 with fp32 gradients) does not record its stage.
            self.zero_stage = number_of(state.get("zero_stage", 1))
            weights, states = _STAGE_3 if self.zero_stage == 3 else _STAGES_1_AND_2
            self._base = state[states]
            paddings = state.get("group_paddings")
            for group, value in enumerate(file.listed(state[weights])):
                padding = number_of(paddings[group]) if type(paddings) is list else 0
                self.groups.append(self._buffers(group, file.buffer(value), padding))

    def _states(self, group: int) -> dict[str, object]:
        base = self._base
        return self.file.named(base[group] if type(base) is list else base["state"].get(group, {}))

    def _buffers(self, group: int, weights: FlatBuffer, padding: int) -> dict[str, FlatBuffer]:
        """Return a group's weights, and its states that are as long, or longer by the padding."""
        buffers = {WEIGHTS: weights}
        lengths = (weights.numel,), (weights.numel + padding,)
        for key, value in self._states(group).items():
            if is_tensor(value) and weights.numel and self.file.view(value).shape in lengths:
                buffers[key] = self.file.buffer(value)
        return buffers

    def check(self, zero_stage: int, num_ranks: int, num_groups: int) -> None:
        """Raise CorruptError unless this file is of a save in this stage by `num_ranks` ranks of so many groups."""
        with self.file.parsing():
            counts = self._state["partition_count"]
            numbers = [
                ("ZeRO stage", zero_stage, self.zero_stage),
                ("number of groups", num_groups, len(self.groups)),
            ]
            for count in counts if type(counts) is list else [counts]:
                numbers.append(("number of partitions", num_ranks, number_of(count)))
            for what, expected, number in numbers:
                if number != expected:
                    text = f"its {what} is not that of the other files: files of two saves are mixed"
                    raise CorruptError(text, expected=expected, found=number)

    def paddings(self) -> list[list[int]] | None:
        """Return the padding after each parameter of each group; None if the file does not have it."""
        paddings = self._state.get("param_alignment_paddings")
        if paddings is None:
            return None
        listed = self.file.listed
        numbers = [[number_of(value) for value in listed(of_group)] for of_group in listed(paddings)]
        if any(min(of_group, default=0) < 0 for of_group in numbers):
            raise ValueError("a negative padding")
        return numbers

    def check_addresses(self, runs: Iterable[FlatRun]) -> None:
        """Raise CorruptError if the file's own table gives a parameter another position than `runs`, made of shapes."""
        mappings = self._state.get("param_slice_mappings")
        if type(mappings) is not list:
            return
        for run in runs:
            address = mappings[run.group].get(run.name)
            if type(address) is not OpaqueObject:
                continue
            expected, recorded = (run.at, run.end - run.begin), (address.state["start"], address.state["numel"])
            if recorded != expected:
                text = "the shapes of the parameters contradict its param_slice_mappings (start, number of elements)"
                raise CorruptError(text, name=run.name, expected=str(expected), found=excerpt(recorded))

    def add_rest(self) -> None:
        """Add the entries that are neither weights nor states of parameters."""
        for group, buffers in enumerate(self.groups):
            rest = {key: value for key, value in self._states(group).items() if key not in buffers}
            self.file.add_entries(f"optimizer.groups.{group}.", rest)
        rest = {key: value for key, value in self._state.items() if key not in _OF_TENSORS}
        if type(self._base) is dict:
            rest["param_groups"] = self._base.get("param_groups")
        self.file.add_entries("optimizer.", rest)


def _runs_of_partitions(
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
        group_paddings = [0] * len(shapes) if paddings is None else paddings[group]
        if len(group_paddings) != len(shapes):
            raise CorruptError(f"group {group} has {len(shapes)} parameters, but {len(group_paddings)} paddings")
        partitions = [of_rank[group] for of_rank in sizes]
        partition, total = partitions[0], sum(partitions)
        for rank, size in enumerate(partitions):
            if size > partition or (size < partition and rank < world_size - 1):
                text = f"the fp32 partition of group {group} differs in size from rank 0's"
                raise CorruptError(text, rank=rank, expected=partition, found=size)
        at = end = 0
        for (name, shape), padding in zip(shapes.items(), group_paddings, strict=True):
            begin, end = at, at + math.prod(shape)
            if end > total:
                break
            while begin < end:
                rank, begin_in_rank = divmod(begin, partition)
                stop = min(end, (rank + 1) * partition)
                runs[rank].append(FlatRun(name, begin - at, stop - at, group, begin_in_rank))
                begin = stop
            at = end + padding
        # The vector is padded to a multiple of `alignment`; the last rank's part is saved without some of this padding.
        alignment = 2 * world_size
        if end > total or math.ceil(at / alignment) != math.ceil(total / alignment):
            text = f"the fp32 partitions of group {group} do not have as many elements as its parameters"
            expected = sum(map(math.prod, shapes.values())) + sum(group_paddings)
            raise CorruptError(text, expected=expected, found=total)
    return runs


def part_of(shape: tuple[int, ...], rank: int, num_ranks: int) -> tuple[int, int, int]:
    """Return the first element and the end of a rank's part of a parameter in ZeRO-3, and its length with padding."""
    numel = math.prod(shape)
    size = -(-numel // num_ranks)
    return min(rank * size, numel), min((rank + 1) * size, numel), size


def _runs_of_rank(shapes: Shapes, rank: int, num_ranks: int, sizes: Sequence[int]) -> list[FlatRun]:
    """Return the runs that a rank has in ZeRO-3.

    Args:
        shapes: the shapes of all parameters.
        rank: the rank.
        num_ranks: the number of ranks.
        sizes: the number of elements of each of its buffers.

    Raises:
        CorruptError: the buffers are too small or too large for the parameters.
    """
    parts = {name: part_of(shape, rank, num_ranks) for name, shape in shapes.items()}
    expected = sum(size for _, _, size in parts.values())
    if sum(sizes) != expected:
        text = f"the fp32 partitions do not have as many elements as {len(shapes)} parameters on {num_ranks} ranks"
        raise CorruptError(text, rank=rank, expected=expected, found=sum(sizes))
    runs = []
    group = at = 0  # the buffer that is reached, and the position in it
    for name, (begin, end, size) in parts.items():
        while size and at == sizes[group]:
            group, at = group + 1, 0
        if size and at + size > sizes[group]:
            raise CorruptError("this parameter is in two of the flat buffers", name=name, rank=rank)
        if begin < end:
            runs.append(FlatRun(name, begin, end, group, at))
        at += size
    return runs
