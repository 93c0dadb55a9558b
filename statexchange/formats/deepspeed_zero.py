"""Read the optimizer's files of DeepSpeed's ZeRO: which elements of which parameter a rank's flat buffers have.

ZeRO flattens the parameters of each optimizer group into one vector.

* ZeRO-1 and 2 divide the vector of each group among the ranks: rank r has the r-th partition. Each file has a table,
  ``param_slice_mappings``, with the place of each parameter's part in the rank's partition. Where the part begins in
  the parameter follows from the sizes of the parts of the ranks before. The vector has paddings, and its order need not
  be that of the shapes (``round_robin_gradients``). The fp32 partitions are saved without the padding at the vector's
  end, the optimizer's states with it.
* ZeRO-3 divides each parameter of n elements among the W ranks: each has ceil(n / W) of them, the last ones padding. A
  rank's parts follow one another in its buffers (sub-groups) without gaps, and none lies in two buffers.

So a rank has at most one run of a parameter, and at the same place in the buffer of the weights and in those of the
optimizer's states. Everything is checked against the shapes and the sizes of the buffers in the files.

Of parameters w with 5 elements and b with 2, two ranks have these buffers (--: padding)::

               rank 0         rank 1
    ZeRO-1, 2  w0 w1 w2 w3    w4 b0 b1       the padding at the end is not saved
    ZeRO-3     w0 w1 w2 b0    w3 w4 -- b1
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence

from statexchange.errors import CorruptError, UnsupportedError
from statexchange.formats.deepspeed_files import (
    MASTER_KEY,
    DeepSpeedFile,
    FlatRun,
    Shapes,
    number_of,
    part_of,
    source_name,
)
from statexchange.formats.source import SourceTensor
from statexchange.formats.torch_archive import describe
from statexchange.sharding.shards import sizes_from_json

CONVERTER = "convert it with python -m deepspeed.checkpoint.ds_to_universal --input_folder STEP --output_folder OUT"
# The entries with the weights and with the optimizer's states.
_STAGE_3 = "fp32_flat_groups", "optimizer_state_dict"
_STAGES_1_AND_2 = "single_partition_of_fp32_groups", "base_optimizer_state"
# Entries that are read as tensors, or that describe these.
_OF_TENSORS = {
    *_STAGE_3, *_STAGES_1_AND_2,
    "group_paddings", "param_alignment_paddings", "partition_count", "param_slice_mappings"
}  # fmt: skip


def add_flat(files: Sequence[DeepSpeedFile], shapes: Shapes) -> None:
    """Add the fp32 weights and the optimizer's states, which are in these files of the ranks.

    Args:
        files: the optimizer's files, by rank.
        shapes: the shapes of all parameters.

    Raises:
        CorruptError: counts or sizes contradict each other.
        UnsupportedError: the files do not say where parameters lie.
    """
    parts = list(map(_FlatFile, files))
    first = parts[0]
    for part in parts:
        part.check(first.zero_stage, len(parts))
    if first.zero_stage == 3:
        runs = [part.runs_of_parameters(shapes, rank, len(parts)) for rank, part in enumerate(parts)]
    else:
        runs = _runs_of_partitions(parts, shapes)
    for part, of_part in zip(parts, runs, strict=True):
        with part.file.parsing():
            for run in of_part:
                for key, buffer in part.groups[run.group].items():
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
        self.groups: list[dict[str, SourceTensor]] = []
        with file.parsing():
            self._state = state = file.named(file.entry("optimizer_state_dict"))
            if state.get("ds_zero_partition_groups"):
                raise UnsupportedError(f"parameters are divided among groups of ranks of their own: {CONVERTER}")
            # DeepSpeed's BF16_Optimizer (stage 1 with fp32 gradients) does not record its stage.
            self.zero_stage = number_of(state.get("zero_stage", 1))
            weights, states = _STAGE_3 if self.zero_stage == 3 else _STAGES_1_AND_2
            buffers = file.listed(state[weights])
            self._base = state[states]
            paddings = state.get("group_paddings")
            for group, value in enumerate(buffers):
                padding = number_of(paddings[group]) if type(paddings) is list else 0
                self.groups.append(self._buffers(group, value, padding))

    @property
    def sizes(self) -> list[int]:
        """The number of elements of each group."""
        return [buffers[MASTER_KEY].shard.global_shape[0] for buffers in self.groups]

    def _states(self, group: int) -> dict[str, object]:
        base = self._base
        return self.file.named(base[group] if type(base) is list else base["state"].get(group, {}))

    def _buffers(self, group: int, value: object, padding: int) -> dict[str, SourceTensor]:
        """Return a group's weights, and its states that are as long, or longer by the padding."""
        weights = self.file.flat(value)
        if weights is None:
            raise ValueError(f"{describe(value)} in the place of a flat one")
        buffers = {MASTER_KEY: weights}
        (numel,) = weights.shard.global_shape
        for key, state in self._states(group).items():
            buffer = self.file.flat(state) if numel else None
            if buffer is not None and buffer.shard.global_shape[0] in (numel, numel + padding):
                buffers[key] = buffer
        return buffers

    def check(self, zero_stage: int, num_ranks: int) -> None:
        """Raise CorruptError unless this file is of a save in this stage by `num_ranks` ranks."""
        with self.file.parsing():
            counts = self._state["partition_count"]  # of each group, or of all
            numbers = [("ZeRO stage", zero_stage, self.zero_stage)]
            for count in counts if type(counts) is list else [counts]:
                numbers.append(("number of partitions", num_ranks, number_of(count)))
            for what, expected, number in numbers:
                if number != expected:
                    text = f"its {what} is not that of the other files: files of two saves are mixed"
                    raise CorruptError(text, expected=expected, found=number)

    def places(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield, in ZeRO-1 or 2, each parameter of which this rank has a part: name, group, position and elements."""
        tables = self._state.get("param_slice_mappings")
        if tables is None:
            text = "an old release of DeepSpeed wrote it, without param_slice_mappings: convert it with zero_to_fp32.py"
            raise UnsupportedError(text)
        if len(tables) != len(self.groups):
            raise ValueError(f"{len(self.groups)} flat buffers, and param_slice_mappings of {len(tables)}")
        for group, (table, size) in enumerate(zip(tables, self.sizes, strict=True)):
            places = []
            for name, address in self.file.named(table).items():
                at, numel = sizes_from_json((address.state["start"], address.state["numel"]))
                places.append((at, numel, name))
            end = 0
            for at, numel, name in sorted(places):
                begin, end = end, at + numel
                if at < begin or end > size:
                    text = "in param_slice_mappings this parameter overlaps another, or the end of its flat buffer"
                    raise CorruptError(text, name=name)
                yield name, group, at, numel

    def runs_of_parameters(self, shapes: Shapes, rank: int, num_ranks: int) -> list[FlatRun]:
        """Return the runs that this rank has in ZeRO-3; raise CorruptError if they do not fill its buffers."""
        sizes = self.sizes
        parts = {name: part_of(shape, rank, num_ranks) for name, shape in shapes.items()}
        expected = sum(size for _, _, size in parts.values())
        runs = []
        with self.file.parsing():
            if sum(sizes) != expected:
                text = f"its flat buffers do not have as many elements as {len(shapes)} parameters on {num_ranks} ranks"
                raise CorruptError(text, expected=expected, found=sum(sizes))
            group = at = 0  # the buffer that is reached, and the position in it
            for name, (begin, end, size) in parts.items():
                # A buffer may be empty. There is a next one, since all together are as large as the parts.
                while size and at == sizes[group]:
                    group, at = group + 1, 0
                if size and at + size > sizes[group]:
                    raise CorruptError("this parameter is in two of the flat buffers", name=name)
                if begin < end:
                    runs.append(FlatRun(name, begin, end, group, at))
                at += size
        return runs

    def add_rest(self) -> None:
        """Add the entries that are neither weights nor states of parameters."""
        for group, buffers in enumerate(self.groups):
            rest = {key: value for key, value in self._states(group).items() if key not in buffers}
            self.file.add_entries(f"optimizer.groups.{group}.", rest)
        rest = {key: value for key, value in self._state.items() if key not in _OF_TENSORS}
        if type(self._base) is dict:
            rest["param_groups"] = self._base.get("param_groups")
        self.file.add_entries("optimizer.", rest)


def _runs_of_partitions(parts: Sequence[_FlatFile], shapes: Shapes) -> list[list[FlatRun]]:
    """Return the runs that each rank has in ZeRO-1 or 2; raise CorruptError if they do not cover the parameters.

    No file says whose it is. Of files in the wrong order a parameter that goes on in the next rank's buffer does not
    reach the end of its own, or does not begin with the next; or a buffer is longer than the one before, of which only
    the last ones lack the padding.
    """
    ends = dict.fromkeys(shapes, 0)  # of the parts of the ranks before
    runs = []
    before: list[int] = []
    reaching = set()  # parameters whose part reaches the end of a rank's buffer, and may go on in the next rank's
    for part in parts:
        of_part = []
        with part.file.parsing():
            sizes = part.sizes
            is_in_order = not before or all(map(operator.ge, before, sizes))
            before = sizes
            for name, group, at, numel in part.places():
                begin, ends[name] = ends[name], ends[name] + numel
                if begin and (at or name not in reaching):
                    is_in_order = False
                reaching.discard(name)
                if at + numel == sizes[group]:
                    reaching.add(name)
                of_part.append(FlatRun(name, begin, ends[name], group, at))
            if not is_in_order:
                raise CorruptError(
                    "its flat buffers do not follow those of the rank before: files are swapped or mixed"
                )
        runs.append(of_part)
    for name, shape in shapes.items():
        if ends[name] != math.prod(shape):
            text = "the flat buffers do not have as many elements as this parameter"
            path = parts[0].file.path
            raise CorruptError(text, name=name, path=path, expected=math.prod(shape), found=ends[name])
    return runs
