"""The files of a DeepSpeed step: their names, and one file's content as tensors, flat buffers and other entries.

All are files of torch.save. Nothing in them is executed, and deepspeed is not imported: its own classes, such as the
loss scaler, stay opaque.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from statexchange.errors import CorruptError, StateExchangeError, type_text
from statexchange.formats.frameworks import OPTIMIZER_FILE
from statexchange.formats.pickles import OpaqueObject
from statexchange.formats.source import SourceTensor, UnreadableTensor, open_listed, parsing
from statexchange.formats.torch_archive import describe, is_tensor
from statexchange.formats.torch_file import TorchFile
from statexchange.sharding.shards import Shard, boxes_of_run, shape_from_json
from statexchange.storage.store import ByteRange, Store
from statexchange.tensors import ITEMSIZE

MODEL, STATE = "model.", "optimizer.state."
MASTER_KEY = "fp32"  # the key of the master weights, beside those of the optimizer's states
UNIVERSAL = "zero"  # the directory with a directory for each parameter

_NUMBER = "([0-9]{1,9})"
# The groups are rank and stage; the same; layer and tensor-parallel rank; layer, expert and stage. A number that is not
# in a name is 0.
_PATTERNS = {
    "optimizer": OPTIMIZER_FILE,
    "model": re.compile(rf"(?:zero_pp_rank_{_NUMBER}_)?mp_rank_{_NUMBER}_model_states\.pt"),
    "layer": re.compile(rf"layer_{_NUMBER}-(?:model_{_NUMBER}-)?model_states\.pt"),
    "expert": re.compile(rf"(?:layer_{_NUMBER}_)?expert_{_NUMBER}_mp_rank_{_NUMBER}_model_states\.pt"),
}
_STEPS_PER_PART = 32  # of a tensor, a shape or a run: it takes about 500 bytes of memory, and 100 bytes of a pickle
_STEPS_PER_NAME = 8

Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of parameters by name, in the order in which they are flattened."""


class Step:
    """The directory of a step, and what is read of it.

    Attributes:
        store: the directory.
        names: for each kind of file, the names by the numbers in them, as `_PATTERNS` lists these.
        per_rank: whether each rank has a file of the model, as in ZeRO-3.
        files: the files that were opened, by their names.
        problems: errors for everything that is missing or broken.
        unreadable: the tensors that are affected by these.
        notes: what a user should know about how it was read.
        world_size: the number of ranks, if it is known.
    """

    def __init__(self, store: Store) -> None:
        """List the files.

        Raises:
            CorruptError: files of two saves are mixed: two have the same numbers.
        """
        self.store = store
        self.names: dict[str, dict[tuple[int, ...], str]] = {kind: {} for kind in _PATTERNS}
        for name in store.non_directories:
            for kind, pattern in _PATTERNS.items():
                match = pattern.fullmatch(name)
                if match is not None:
                    numbers = tuple(int(digits or 0) for digits in match.groups())
                    first = self.names[kind].setdefault(numbers, name)
                    if first != name:
                        text = f"files of two saves are mixed here: this one, and {first} of the same rank"
                        raise CorruptError(text, rank=numbers[0], path=store.path_of(name))
        of_model = self.names["model"].values()
        self.per_rank = bool(of_model) and all(name.startswith("zero_pp_rank_") for name in of_model)
        self.files: dict[str, DeepSpeedFile] = {}
        self.problems: list[StateExchangeError] = []
        self.unreadable: list[UnreadableTensor] = []
        self.notes: list[str] = []
        self.world_size: int | None = None

    @cached_property
    def universal(self) -> Store | None:
        """The directory with the parameters of a Universal Checkpoint; None if it is none."""
        return self.store.below(UNIVERSAL) if UNIVERSAL in self.store.directories else None

    @contextmanager
    def collecting(self, affected: Mapping[str, tuple[int, ...] | None]) -> Iterator[None]:
        """Turn an error into a problem that affects the tensors of these names, each with its shape if it is known.

        A name that ends in ``*`` stands for all that begin so.
        """
        try:
            yield
        except StateExchangeError as error:
            self.problems.append(error)
            path = error.path or self.store.path
            self.unreadable += [UnreadableTensor(name, None, shape, path) for name, shape in affected.items()]

    def open(self, name: str, rank: int, missing: str) -> DeepSpeedFile:
        """Return a file; raise IncompleteError with the text `missing` if it is not there."""
        if name not in self.files:
            self.files[name] = DeepSpeedFile(open_listed(self.store, name, missing, rank=rank), rank)
        return self.files[name]

    def files_of_stage(self, kind: str, stage: int, num_ranks: int, missing: str) -> list[DeepSpeedFile]:
        """Return the files of all ranks of a pipeline stage, of the model or of the optimizer."""
        for (rank, of_stage), name in self.names[kind].items():
            if of_stage == stage and rank >= num_ranks:
                text = f"it is of rank {rank}, but {num_ranks} ranks saved the model: files of two saves are mixed"
                raise CorruptError(text, rank=stage * num_ranks + rank, path=self.store.path_of(name))
        files = []
        for rank in range(num_ranks):  # of a broken file this may be any number: the first missing file ends it
            files.append(self.open(self.name_of(kind, rank, stage), stage * num_ranks + rank, missing))
        return files

    def name_of(self, kind: str, rank: int, stage: int) -> str:
        """Return the name of a rank's file, which need not be there, of the model or of the optimizer."""
        present = self.names[kind]
        if (rank, stage) in present:
            return present[rank, stage]
        of_rank = f"zero_pp_rank_{rank}_"
        if kind == "model":
            return f"{of_rank if self.per_rank else ''}mp_rank_{stage:02d}_model_states.pt"
        # "bf16_", "fp16_" or nothing, as in the names of the other ranks' files.
        prefix = next(iter(present.values()), "").partition("zero_pp_rank_")[0]
        return f"{prefix}{of_rank}mp_rank_{stage:02d}_optim_states.pt"


def source_name(parameter: str, key: str) -> str:
    """Return the name in a source of a parameter's master weights, or of one of its optimizer's states."""
    return MODEL + parameter if key == MASTER_KEY else f"{STATE}{parameter}.{key}"


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
    group: int = 0
    at: int = 0


class DeepSpeedFile(TorchFile):
    """One file, with the tensors and other entries that are taken from it."""

    @contextmanager
    def parsing(self) -> Iterator[None]:
        """Turn errors from unexpected content into CorruptError, and add rank and file to those of no other file."""
        try:
            with parsing("not what DeepSpeed writes"):
                yield
        except StateExchangeError as error:
            if error.path not in (None, self.path):
                raise
            raise error.located(rank=self.rank, path=self.path) from None

    def entry(self, name: str) -> Any:
        """Return an entry of the root; raise CorruptError if there is none."""
        if type(self.root) is not dict or name not in self.root:
            advice = "if another program wrote it, give this file alone"
            raise CorruptError(f"not what DeepSpeed writes here: it has no entry {name!r}; {advice}", path=self.path)
        return self.root[name]

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

    def shapes(self, value: Any) -> Shapes:
        """Return shapes by name; raise ValueError for anything else."""
        shapes = self.named(value)
        self.budget.spend(_STEPS_PER_PART * len(shapes))
        return {name: shape_from_json(shape) for name, shape in shapes.items()}

    def flat(self, value: Any) -> SourceTensor | None:
        """Return a flat buffer: a tensor of one dim, in one run of bytes; None for anything else."""
        if not is_tensor(value):
            return None
        # A sharded tensor would have boxes of its own, and an expanded one repeat its elements.
        tensor = self._tensor("", value)
        is_run = tensor.shard.is_whole and tensor.byte_ranges[0].strides is None
        is_flat = is_run and len(tensor.shard.global_shape) == 1
        return tensor if is_flat else None

    def add_part(self, name: str, value: Any, shape: tuple[int, ...] | None, rank: int = 0, num_ranks: int = 1) -> None:
        """Add a rank's part of a tensor of this shape, as ZeRO-3 divides it: flattened, if it is not the whole.

        Of one rank it is the whole tensor, of any shape if that is None.
        """
        if num_ranks == 1 or shape is None:
            self._check_new(name)
            self.add_tensor(name, value)
            if shape is None or name not in self.tensors or self.tensors[name].shard.global_shape == shape:
                return
            # A lone rank may have it flattened, too.
            del self.tensors[name]
        flat = self.flat(value)
        begin, end, size = part_of(shape, rank, num_ranks)
        if flat is None or flat.shard.global_shape != (size,):
            text, numel = "this rank's part of the parameter has another size", flat and flat.shard.global_shape[0]
            raise CorruptError(text, name=name, expected=size, found=numel)
        if begin < end or 0 in shape:
            self.add_run(name, shape, FlatRun(name, begin, end), flat)

    def add_run(self, name: str, shape: tuple[int, ...], run: FlatRun, buffer: SourceTensor) -> None:
        """Add the part of a tensor of this shape that is a run in a flat buffer."""
        self.budget.spend(_STEPS_PER_PART)
        self._check_new(name)
        # Each box is one run of the buffer, too, and the next one begins where it ends.
        boxes, dtype, (stored,) = boxes_of_run(shape, run.begin, run.end), buffer.shard.dtype, buffer.byte_ranges
        ranges = []
        begin = stored.begin + run.at * ITEMSIZE[dtype]
        for box in boxes:
            nbytes = box.numel * ITEMSIZE[dtype]
            ranges.append(ByteRange(stored.file, begin, nbytes))
            begin += nbytes
        self.tensors[name] = SourceTensor(Shard(name, dtype, shape, boxes), tuple(ranges))

    def add_alias(self, alias: str, name: str) -> None:
        """Add another name for a tensor of this file, if it has it, and nothing of the other name."""
        tensor = self.tensors.get(name)
        if tensor is not None and alias not in self.tensors:
            self.tensors[alias] = replace(tensor, shard=replace(tensor.shard, name=alias))
            self.aliases[alias] = name


def number_of(value: Any) -> int:
    """Return an integer, or the integer of an enum's member; raise ValueError for anything else."""
    if type(value) is OpaqueObject and len(value.args) == 1:
        value = value.args[0]
    if type(value) is not int:
        raise ValueError(f"{describe(value)} in the place of a number")
    return value


def count_of(value: Any) -> int:
    """Return a number of ranks; raise ValueError for anything else."""
    number = number_of(value)
    if number < 1:
        raise ValueError(f"{number} in the place of a number of ranks")
    return number


def part_of(shape: tuple[int, ...], rank: int, num_ranks: int) -> tuple[int, int, int]:
    """Return the first element and the end of a rank's part of a parameter in ZeRO-3, and its length with padding.

    Example:
        >>> part_of((5,), 1, 2)
        (3, 5, 3)
    """
    numel = math.prod(shape)
    size = -(-numel // num_ranks)
    return min(rank * size, numel), min((rank + 1) * size, numel), size
