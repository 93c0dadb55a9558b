"""The files of a DeepSpeed checkpoint: their names, and one file's content as tensors, flat buffers and other entries.

All are files of torch.save. Nothing in them is executed, and deepspeed is not imported: its own classes, such as the
loss scaler, stay opaque.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from statexchange.errors import CorruptError, excerpt, type_text
from statexchange.formats.part_names import OPTIMIZER_FILE
from statexchange.formats.pickles import OpaqueObject
from statexchange.formats.source import SourceTensor, parsing
from statexchange.formats.torch_archive import (
    TensorView,
    describe,
    is_tensor,
    unwrap_tensor,
    view_of,
)
from statexchange.formats.torch_file import TorchFile
from statexchange.formats.zero import FlatRun, Shapes
from statexchange.sharding.shards import Box, Shard, boxes_of_run, shape_from_json
from statexchange.storage.store import Budget, ByteRange, Store
from statexchange.tensors import ITEMSIZE

__all__ = ["UNIVERSAL", "DeepSpeedFile", "FileNames", "FlatBuffer", "number_of", "parse_shapes"]

_NUMBER = "([0-9]{1,9})"
_MODEL = re.compile(rf"(?:zero_pp_rank_{_NUMBER}_)?mp_rank_{_NUMBER}_model_states\.pt")
_LAYER = re.compile(rf"layer_{_NUMBER}-(?:model_{_NUMBER}-)?model_states\.pt")
_EXPERT = re.compile(rf"(?:layer_{_NUMBER}_)?expert_{_NUMBER}_mp_rank_{_NUMBER}_model_states\.pt")
_STEPS_PER_PART = 32  # of a tensor, a shape or a run: it takes about 500 bytes of memory, and 100 bytes of a pickle
_STEPS_PER_NAME = 8
UNIVERSAL = "zero"  # the directory with a directory for each parameter


@dataclass(frozen=True)
class FileNames:
    """The files of one step's directory.

    Attributes:
        optimizer: names of the optimizer's files by model-parallel rank, then by rank.
        model: names of the model's files, in the same way; ZeRO-3 has one of each rank, others have one of rank 0.
        per_rank: whether the names of the model's files have ranks, as in ZeRO-3.
        layers: names of the files of pipeline layers, by layer and by tensor-parallel rank.
        experts: names of the files of experts, by (layer, expert) and model-parallel rank.
        is_universal: whether there is the directory of a Universal Checkpoint.
    """

    optimizer: Mapping[int, Mapping[int, str]]
    model: Mapping[int, Mapping[int, str]]
    per_rank: bool
    layers: Mapping[int, Mapping[int, str]]
    experts: Mapping[tuple[int, int], Mapping[int, str]]
    is_universal: bool

    @classmethod
    def of(cls, store: Store) -> FileNames:
        """Return the files of a directory.

        Raises:
            CorruptError: files of two saves are mixed: there are two files of one rank.
        """
        optimizer: dict[int, dict[int, str]] = {}
        model: dict[int, dict[int, str]] = {}
        layers: dict[int, dict[int, str]] = {}
        experts: dict[tuple[int, int], dict[int, str]] = {}
        kinds = set()
        for name in store.non_directories:
            if match := OPTIMIZER_FILE.fullmatch(name):
                _add(optimizer.setdefault(int(match[3]), {}), int(match[2]), name, store)
            elif match := _MODEL.fullmatch(name):
                kinds.add(match[1] is not None)
                _add(model.setdefault(int(match[2]), {}), int(match[1] or 0), name, store)
            elif match := _LAYER.fullmatch(name):
                _add(layers.setdefault(int(match[1]), {}), int(match[2] or 0), name, store)
            elif match := _EXPERT.fullmatch(name):
                _add(experts.setdefault((int(match[1] or 0), int(match[2])), {}), int(match[3]), name, store)
        if len(kinds) > 1:
            raise CorruptError(
                "files of two saves are mixed here: model states with and without ranks", path=store.path
            )
        is_universal = UNIVERSAL in store.directories
        return cls(optimizer, model, True in kinds, layers, experts, is_universal)

    @property
    def any(self) -> bool:
        """Whether there are files of DeepSpeed."""
        return bool(self.optimizer or self.model or self.layers)

    def expected_model(self, mp_rank: int, rank: int) -> str:
        """Return the name of a rank's file of the model."""
        prefix = f"zero_pp_rank_{rank}_" if self.per_rank else ""
        return f"{prefix}mp_rank_{mp_rank:02d}_model_states.pt"

    def expected_optimizer(self, mp_rank: int, rank: int) -> str:
        """Return the name of a rank's file of the optimizer."""
        names = [name for of_stage in self.optimizer.values() for name in of_stage.values()]
        kind = names[0].partition("zero_pp_rank_")[0] if names else ""
        return f"{kind}zero_pp_rank_{rank}_mp_rank_{mp_rank:02d}_optim_states.pt"


def _add(names: dict[int, str], number: int, name: str, store: Store) -> None:
    if names.setdefault(number, name) != name:
        text = f"files of two saves are mixed here: this one, and {names[number]} of the same rank"
        raise CorruptError(text, rank=number, path=store.path_of(name))


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """A tensor of one dim: a rank's flattened parts of parameters."""

    dtype: str
    numel: int
    stored: ByteRange

    def range(self, at: int, numel: int) -> ByteRange:
        """Return the byte range of `numel` elements from element `at` on."""
        itemsize = ITEMSIZE[self.dtype]
        return ByteRange(self.stored.file, self.stored.begin + at * itemsize, numel * itemsize)


class DeepSpeedFile(TorchFile):
    """One file, with the tensors and other entries that are taken from it."""

    def listed(self, value: Any) -> Sequence[Any]:
        """Return a list or tuple, whose items are about to be parsed; raise ValueError for anything else."""
        if type(value) not in (list, tuple):
            raise ValueError(f"{describe(value)} in the place of a list")
        self.budget.spend(_STEPS_PER_PART * len(value))
        return value  # type: ignore[no-any-return]

    def named(self, value: Any) -> dict[str, Any]:
        """Return a dict with the entries whose keys are text; raise ValueError for anything but a dict."""
        if type(value) is not dict:
            raise ValueError(f"{type_text(value)} in the place of a dict")
        self.budget.spend(_STEPS_PER_NAME * len(value))
        return {key: entry for key, entry in value.items() if type(key) is str}

    def parsing(self) -> AbstractContextManager[None]:
        """Turn errors from unexpected content into CorruptError, and add rank and file to all errors."""
        return parsing("not what DeepSpeed writes", rank=self.rank, path=self.path)

    def entry(self, name: str) -> Any:
        """Return an entry of the root; raise CorruptError if there is none."""
        if type(self.root) is not dict or name not in self.root:
            advice = "if another program wrote it, give this file alone"
            raise CorruptError(f"not what DeepSpeed writes here: it has no entry {name!r}; {advice}", path=self.path)
        return self.root[name]

    def view(self, value: Any) -> TensorView:
        """Return the strided tensor that a value stands for."""
        if not is_tensor(value):
            raise ValueError(f"{describe(value)} in the place of a tensor")
        return view_of(unwrap_tensor(value))

    def buffer(self, value: Any) -> FlatBuffer:
        """Return a tensor of one dim as a flat buffer."""
        view = self.view(value)
        stored = self._archive.byte_range(view)
        if len(view.shape) != 1 or stored.strides is not None:
            raise ValueError(f"a tensor of shape {view.shape} in the place of a flat one")
        return FlatBuffer(view.dtype, view.shape[0], stored)

    def add_whole(self, name: str, value: Any, shape: tuple[int, ...] | None = None) -> None:
        """Add a whole tensor. `shape` is that of a flattened one."""
        if not is_tensor(value):
            raise ValueError(f"{describe(value)} in the place of a tensor")
        self._check_new(name)
        self.add_tensor(name, value, shape)

    def add_runs(
        self, name: str, shape: tuple[int, ...], runs: Sequence[FlatRun], buffers: Mapping[int, FlatBuffer]
    ) -> None:
        """Add a tensor that consists of these runs; `buffers` has the buffer of each run's `group`."""
        self.budget.spend(_STEPS_PER_PART * len(runs))
        boxes: list[Box] = []
        ranges: list[ByteRange] = []
        dtypes = {buffers[run.group].dtype for run in runs}
        if len(dtypes) != 1:
            raise CorruptError(f"its parts have the dtypes {', '.join(sorted(dtypes))}", name=name)
        for run in runs:
            at = run.at
            for box in boxes_of_run(shape, run.begin, run.end):
                boxes.append(box)
                ranges.append(buffers[run.group].range(at, box.numel))
                at += box.numel
        self._check_new(name)
        self.tensors[name] = SourceTensor(Shard(name, dtypes.pop(), shape, tuple(boxes)), tuple(ranges))

    def add_alias(self, alias: str, name: str) -> None:
        """Add another name for a tensor of this file, if it has it."""
        tensor = self.tensors.get(name)
        if tensor is not None:
            self.tensors[alias] = replace(tensor, shard=replace(tensor.shard, name=alias))
            self.aliases[alias] = name


def parse_shapes(value: Any, budget: Budget) -> Shapes:
    """Return shapes by name; raise ValueError for anything else."""
    if type(value) is not dict:
        raise ValueError(f"{describe(value)} in the place of shapes by name")
    budget.spend(_STEPS_PER_PART * len(value))
    shapes = {}
    for name, shape in value.items():
        if type(name) is not str:
            raise ValueError(f"{excerpt(name)} as a name")
        shapes[name] = shape_from_json(shape)
    return shapes


def number_of(value: Any) -> int:
    """Return an integer, or the integer of an enum's member; raise ValueError for anything else."""
    if type(value) is OpaqueObject and len(value.args) == 1:
        value = value.args[0]
    if type(value) is not int:
        raise ValueError(f"{describe(value)} in the place of a number")
    return value
