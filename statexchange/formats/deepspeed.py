"""Read the checkpoints of DeepSpeed: ZeRO-0 to 3, pipelines and Universal Checkpoints.

``save_checkpoint`` writes a directory for each step, and `latest` beside them names the newest:

* ``mp_rank_00_model_states.pt``: the weights in the dtype of the training, buffers, and what else the job saves. In
  ZeRO-3 each rank has one (``zero_pp_rank_R_mp_rank_00_model_states.pt``), in which the weights are empty.
* ``zero_pp_rank_R_mp_rank_00_optim_states.pt``: rank R's part of the fp32 master weights and of the optimizer's states,
  flattened (zero.py has the geometry). With bf16 the names begin with ``bf16_``.
* Pipeline stage S has the number S after ``mp_rank_``, and each layer a file ``layer_NN-model_states.pt``.
* Experts have files ``layer_L_expert_E_mp_rank_00_model_states.pt``.
* A Universal Checkpoint has ``zero/PARAMETER/fp32.pt`` and the optimizer's states beside it.

The names of the source begin with ``model.`` and ``optimizer.state.``; both are sections. The model is made of the
master weights, or of those that the training computes with (`weights`). Buffers and frozen parameters have no master
weights: they are the model's own in both cases.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    StateExchangeError,
    UnsupportedError,
    excerpt,
)
from statexchange.formats.deepspeed_files import (
    UNIVERSAL,
    DeepSpeedFile,
    FileNames,
    FlatBuffer,
    number_of,
    parse_shapes,
)
from statexchange.formats.sections import sections_from
from statexchange.formats.source import Section, SectionName, Source, UnreadableTensor, Weights, open_listed
from statexchange.formats.torch_archive import is_tensor, unwrap_tensor, view_of
from statexchange.formats.zero import FlatRun, Shapes, runs_of_parameters, runs_of_partitions
from statexchange.storage.location import OpenedPath
from statexchange.storage.store import Store

__all__ = ["check_is_no_part", "matches", "read"]


_LATEST = ("latest", "latest_universal")
_MAX_TAG_BYTES = 255
_TAG = re.compile(r"[^/\\\0\n]{1,200}")
_SCRIPT = "zero_to_fp32.py"
_MODEL, _STATE = "model.", "optimizer.state."
_OF_LAYER = re.compile(r"([0-9]{1,9})\.")  # with which the name of a pipeline layer's parameter begins
_RESERVED = (_MODEL, "optimizer.")
_PREFIXES: dict[SectionName, str] = {"model": _MODEL, "optimizer": "optimizer.", "scheduler": "lr_scheduler."}
_NO_MODEL = Section("model", _MODEL, frozenset())
# Entries of the model's file that are the model, or that describe it.
_OF_MODEL = {
    "module", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params", "buffer_names"
}  # fmt: skip
# Entries of the optimizer's file that are read as tensors, or that describe these.
_OF_STATE = {
    "single_partition_of_fp32_groups", "fp32_flat_groups", "base_optimizer_state", "optimizer_state_dict",
    "group_paddings", "param_alignment_paddings", "partition_count", "param_slice_mappings"
}  # fmt: skip
_MISSING = "the file of a parameter is missing: the conversion did not finish"
_CONVERTER = "python -m deepspeed.checkpoint.ds_to_universal --input_folder STEP --output_folder OUT"
_UNIVERSAL_ADVICE = f"convert it with {_CONVERTER}, and give OUT"


def matches(opened: OpenedPath) -> bool:
    """Whether a path is the directory of a step, or a directory with such directories and `latest`."""
    if opened.file is not None:
        return False
    store = opened.store
    if _is_step(store):
        return True
    if not any(name in store.files for name in _LATEST):
        return False
    tag = _latest(store)
    if tag in store.directories and _is_step(store.below(tag)):
        return True
    is_known = tag is not None and (_SCRIPT in store.files or tag.startswith("global_step"))
    return is_known or bool(_steps(store))


def check_is_no_part(opened: OpenedPath) -> None:
    """Raise InvalidArgumentError for a directory inside a Universal Checkpoint.

    Its `optimizer_state.pt` has flat buffers of some ranks, and the files of a parameter do not have its name: read
    alone, either would be taken for a model.
    """
    if opened.file is not None:
        return
    store = opened.store
    step, _, name = store.path.rstrip("/").rpartition("/")
    if {"fp32.pt", "exp_avg.pt"} <= set(store.files):
        step, what = step.rpartition("/")[0], "parameter"
    elif name == UNIVERSAL and _is_universal(store):
        what = "part"
    else:
        return
    text = f"this is one {what} of a Universal Checkpoint of DeepSpeed: give the directory of its step, {step}"
    raise InvalidArgumentError(text, path=opened.path)


def _steps(store: Store) -> list[str]:
    """Return the names of the directories of steps."""
    return [name for name in store.directories if _is_step(store.below(name))]


def _is_step(store: Store) -> bool:
    names = FileNames.of(store)
    return names.any or (names.is_universal and _is_universal(store.below(UNIVERSAL)))


def _is_universal(store: Store) -> bool:
    return "optimizer_state.pt" in store.files or any(
        "fp32.pt" in store.below(name).files for name in store.directories[:1]
    )


def _latest(store: Store) -> str | None:
    """Return the name in the file `latest`; None if there is no such file, or something else in it."""
    for name in _LATEST:
        if name in store.files:
            file = store.open(name)
            if 0 < file.size <= _MAX_TAG_BYTES:
                tag = file.read_all().decode(errors="replace").strip()
                if _TAG.fullmatch(tag) and tag not in (".", ".."):
                    return tag
    return None


def _step_store(opened: OpenedPath) -> Store:
    """Return the directory of the step to read.

    Raises:
        CorruptError: `latest` does not have the name of a directory.
        IncompleteError: `latest` names a directory that is not there, or that has no files of DeepSpeed.
    """
    store = opened.store
    if _is_step(store):
        return store
    tag = _latest(store)
    if tag not in store.directories:
        steps = _steps(store)
        advice = f"give one of the others: {', '.join(steps[-8:])}" if steps else "no other is here"
        name = next(name for name in _LATEST if name in store.files)
        if tag is None:
            raise CorruptError(f"not the name of a step's directory; {advice}", path=store.path_of(name))
        text = f"{name} names the directory {excerpt(tag)}, which is not here; {advice}"
        raise IncompleteError(text, path=store.path_of(name))
    return store.below(tag)


def read(opened: OpenedPath, *, weights: Weights | None = None) -> Source:
    """Return the source at a path.

    Args:
        opened: the path.
        weights: "master" for the fp32 weights, "model" for those with which the training computes; None for the master
            weights if they can be read.

    Raises:
        IncompleteError: a rank's file is missing, or `latest` names a directory that is not there.
        CorruptError: a file is broken, or sizes contradict each other.
        UnsupportedError: the weights that are wanted cannot be read from here.
    """
    store = _step_store(opened)
    names = FileNames.of(store)
    reader = _UniversalReader(store, names, weights) if names.is_universal else _Reader(store, names, weights)
    reader.run()
    return reader.source(opened)


class _Reader:
    """Reads the files of a step."""

    def __init__(self, store: Store, names: FileNames, weights: Weights | None) -> None:
        self.problems: list[StateExchangeError] = []
        self._store = store
        self._names = names
        self._weights = weights
        self._files: dict[str, DeepSpeedFile] = {}
        self._unreadable: list[UnreadableTensor] = []
        self._notes: list[str] = []
        self._num_ranks = 1  # of one pipeline stage
        self._world_size: int | None = None

    def run(self) -> None:
        """Open all files, and add what they hold."""
        name = self._names.model.get(0, {}).get(0) or self._names.expected_model(0, 0)
        first = self._opened(name, 0, "the file that describes the model is missing")
        if first is None:
            return
        try:
            self._read_all(first)
        except StateExchangeError as error:
            self.problems.append(error)
            # Whatever is wrong there, neither the model nor the optimizer's states are whole.
            path = error.path or self._store.path
            self._unreadable += [UnreadableTensor(f"{prefix}*", None, None, path) for prefix in (_MODEL, _STATE)]

    def _read_all(self, first: DeepSpeedFile) -> None:
        """Read the tensors, then the other entries of `first`."""
        with first.parsing():
            first.entry("module")
            self._read_tensors(first)
            rest = {key: value for key, value in first.root.items() if key not in _OF_MODEL}
            optimizer = rest.pop("optimizer", None)
            if type(optimizer) is dict:
                first.add_entries("optimizer.", optimizer)
            for key in [key for key in rest if f"{key}.".startswith(_RESERVED)]:
                rest[f"client.{key}"] = rest.pop(key)
            first.add_entries("", rest)

    def _read_tensors(self, first: DeepSpeedFile) -> None:
        """Read the model and the optimizer's states; `first` describes them."""
        num_stages = self._num_stages(first)
        expert_counts = _expert_counts(first)
        has_experts = bool(self._names.experts) or any(count > 1 for count in expert_counts)
        is_zero = first.root.get("param_shapes") is not None
        if is_zero:
            self._num_ranks = _positive(first.root.get("dp_world_size", 1))
            self._world_size = self._num_ranks * num_stages
        takes_master = self._takes_master(first, is_zero=is_zero, has_experts=has_experts)
        stages = []
        for mp_rank in range(num_stages):
            stage = self._stage(mp_rank, takes_master=takes_master)
            if stage is None:
                break
            stages.append(stage)
            if is_zero and not has_experts:
                self._add_flat(stage, mp_rank)
            if takes_master:
                stage.add_frozen()
            stage.add_module()
        names = {name for stage in stages for name in stage.names}
        if self._names.layers:
            self._check_layers(names)
        self._add_layers(names if takes_master else set())
        if has_experts:
            self._add_experts(expert_counts)

    def _opened(self, name: str, rank: int, missing: str) -> DeepSpeedFile | None:
        """Return a file; if it is missing or broken, add the problem and return None."""
        if name in self._files:
            return self._files[name]
        try:
            file = DeepSpeedFile(open_listed(self._store, name, missing, rank=rank), rank)
        except StateExchangeError as error:
            self.problems.append(error)
            return None
        self._files[name] = file
        return file

    def _num_stages(self, first: DeepSpeedFile) -> int:
        """Return the number of pipeline stages; raise UnsupportedError for tensor parallelism."""
        count = _positive(first.root.get("mp_world_size", 1))
        sizes = first.root.get("checkpoint_parallel_dimensions")
        if type(sizes) is dict:
            tensor_parallel = _positive(sizes.get("tp_degree", 1))
        elif self._names.layers:
            tensor_parallel = max(max(of_layer) + 1 for of_layer in self._names.layers.values())
        else:
            tensor_parallel = count
        num_found = len({*self._names.model, *self._names.optimizer})
        if tensor_parallel > 1 or (num_found > 1 and not self._names.layers):
            text = f"files of {max(count, num_found)} tensor-parallel ranks do not say how they divide the tensors"
            raise UnsupportedError(f"{text}: {_UNIVERSAL_ADVICE}")
        return count if self._names.layers else 1

    def _takes_master(self, first: DeepSpeedFile, *, is_zero: bool, has_experts: bool) -> bool:
        """Whether the model is made of the fp32 weights; if it is not, and the caller did not choose, add a note."""
        if self._weights == "model":
            self._check_has_model_weights()
            return False
        reason = None
        if has_experts:
            reason = "the parts of experts are not described"
        elif not is_zero and _has_16_bits(first.named(first.root["module"] or {})):
            reason = "DeepSpeed saves them without names if it does not divide them (ZeRO-0)"
        if reason is None:
            return is_zero
        if self._weights == "master":
            text = f'the fp32 master weights cannot be read here: {reason}. Take weights="model" (--weights model)'
            raise UnsupportedError(text)
        self._notes.append(f"these are the weights of the training, not the fp32 master weights: {reason}")
        return False

    def _check_has_model_weights(self) -> None:
        """Raise UnsupportedError for ZeRO-3, which saves no weights but the fp32 ones."""
        if self._names.per_rank:
            text = (
                "ZeRO-3 saves only fp32 master weights. Cast to the dtype of the training they give its "
                'weights bit by bit: weights="master", dtype="bfloat16" (--weights master --dtype bfloat16)'
            )
            raise UnsupportedError(text)

    def _stage(self, mp_rank: int, *, takes_master: bool) -> _Stage | None:
        """Open the model's files of a pipeline stage; None if there are none."""
        names, rank_count = self._names, self._num_ranks if self._names.per_rank else 1
        found = self._of_ranks(
            names.model.get(mp_rank, {}),
            rank_count,
            mp_rank,
            names.expected_model,
            "the file with the model's states is missing",
        )
        if len(found) < rank_count and found:
            self._list_missing(found[min(found)], of_model=True)
        if 0 not in found:
            return None
        return _Stage(found, self._num_ranks, is_divided=names.per_rank, takes_master=takes_master)

    def _of_ranks(
        self,
        present: Mapping[int, str],
        num_ranks: int,
        mp_rank: int,
        expected_name: Callable[[int, int], str],
        missing: str,
    ) -> dict[int, DeepSpeedFile]:
        """Return the files of a stage's ranks. The first that is missing, and those that are broken, are problems."""
        first_rank = mp_rank * self._num_ranks
        found = {}
        for rank in sorted(present):
            if rank >= num_ranks:
                text = f"it is of rank {rank}, but {num_ranks} ranks saved the model: files of two saves are mixed"
                path = self._store.path_of(present[rank])
                self.problems.append(CorruptError(text, rank=first_rank + rank, path=path))
                break
            file = self._opened(present[rank], first_rank + rank, missing)
            if file is not None:
                found[rank] = file
        absent = next((rank for rank in range(num_ranks) if rank not in present), None)
        if absent is not None:
            self._opened(expected_name(mp_rank, absent), first_rank + absent, missing)
        return found

    def _list_missing(self, first: DeepSpeedFile, *, of_model: bool) -> None:
        """List as unreadable the tensors that depend on the file of the last problem."""
        path = self.problems[-1].path or self._store.path
        self._unreadable.append(UnreadableTensor(f"{_STATE}*", None, None, path))
        if of_model:
            shapes = {name: shape for group in _groups_of(first) for name, shape in group.items()}
            for name, shape in shapes.items() or (("*", ()),):
                self._unreadable.append(UnreadableTensor(_MODEL + name, None, shape, path))

    def _add_flat(self, stage: _Stage, mp_rank: int) -> None:
        """Add what the flat buffers of all ranks hold, or the problem if something is missing or contradictory."""
        names, num_problems = self._names, len(self.problems)
        present = names.optimizer.get(mp_rank, {})
        missing = "the file with this rank's part of the fp32 weights and of the optimizer's states is missing"
        if not present:
            missing = "there are no files with the fp32 weights and the optimizer's states"
            if not names.per_rank:
                missing += '; weights="model" (--weights model) does not need them'
        files = self._of_ranks(present, self._num_ranks, mp_rank, names.expected_optimizer, missing)
        if len(self.problems) == num_problems:
            try:
                stage.add_flat([files[rank] for rank in range(self._num_ranks)])
            except StateExchangeError as error:
                self.problems.append(error)
        if len(self.problems) > num_problems:
            self._list_missing(stage.first, of_model=stage.takes_master)

    def _check_layers(self, names: Iterable[str]) -> None:
        """Add a problem if a layer that has parameters of these names has no file."""
        numbers = {int(match[1]) for match in map(_OF_LAYER.match, names) if match is not None}
        absent = min(numbers - self._names.layers.keys(), default=None)
        if absent is not None:
            self._opened(f"layer_{absent:02d}-model_states.pt", 0, "the file of a pipeline layer is missing")

    def _add_layers(self, known: set[str]) -> None:
        """Add the files of pipeline layers, without the tensors of `known` names.

        A layer that is tied to another is ``tied_modules.KEY`` in `known`, and has its own number as a file.
        """
        tied = {name.split(".", 2)[2] for name in known if name.startswith("tied_modules.") and name.count(".") > 1}
        for number, names in self._names.layers.items():
            file = self._opened(names[min(names)], 0, "the file of a layer is missing")
            if file is not None:
                with file.parsing():
                    entries = file.named(file.root).items()
                    kept = {key: value for key, value in entries if f"{number}.{key}" not in known and key not in tied}
                    file.add_entries(f"{_MODEL}{number}.", kept)

    def _add_experts(self, counts: Sequence[int]) -> None:
        """Add the files of experts; `counts` are the numbers of experts of each layer with experts."""
        experts = self._names.experts
        of_layers: dict[int, set[int]] = {}
        for layer, expert in experts:
            of_layers.setdefault(layer, set()).add(expert)
        for layer, count in enumerate(counts):
            present = of_layers.get(layer, set())
            absent = next((expert for expert in range(count) if expert not in present), None)
            if absent is not None and (present or count > 1):
                path = self._store.path_of(f"layer_{layer}_expert_{absent}_mp_rank_00_model_states.pt")
                self.problems.append(IncompleteError(f"the file of expert {absent} is missing", path=path))
        for names in experts.values():
            file = self._opened(names[min(names)], 0, "the file of an expert is missing")
            if file is not None:
                with file.parsing():
                    file.add_entries(_MODEL, file.named(file.root))

    def source(self, opened: OpenedPath) -> Source:
        """Return the source of all that was read."""
        files = list(self._files.values())
        others: dict[str, str] = {}
        unreadable = list(self._unreadable)
        for file in files:
            others |= file.others
            unreadable += file.unsupported
        source = Source(
            "deepspeed",
            opened,
            tuple(file.shard_file for file in files),
            world_size=self._world_size,
            others=others,
            problems=tuple(self.problems),
            unreadable=tuple(unreadable),
            notes=tuple(self._notes),
        )
        return replace(source, sections=_sections(source.names))


class _Stage:
    """The model's files of one pipeline stage; without a pipeline, of the whole model.

    Attributes:
        files: the files by rank: one, or in ZeRO-3 one of each rank.
        first: the file of rank 0, which describes the model.
        takes_master: whether the model is made of the fp32 weights.
        groups: the shapes of the parameters of each group of the optimizer.
        frozen: the shapes of the parameters that are not trained.
        shared: other names of parameters, with the names under which they are saved.
    """

    def __init__(
        self, files: Mapping[int, DeepSpeedFile], num_ranks: int, *, is_divided: bool, takes_master: bool
    ) -> None:
        self.files = files
        self._is_divided = is_divided  # whether ZeRO-3 divides the parameters: the module has empty ones
        self.first = files[0]
        self.takes_master = takes_master
        self._num_ranks = num_ranks
        with self.first.parsing():
            root = self.first.root
            self.groups = _groups_of(self.first)
            self.frozen = parse_shapes(root.get("frozen_param_shapes") or {}, self.first.budget)
            shared = self.first.named(root.get("shared_params") or {})
            self.shared = {alias: name for alias, name in shared.items() if type(name) is str}
            self._buffers = _buffer_names(self.first)
        self.shapes = {name: shape for group in self.groups for name, shape in group.items()}

    @property
    def names(self) -> set[str]:
        """The names of all parameters."""
        return self.shapes.keys() | self.frozen.keys()

    def add_flat(self, files: Sequence[DeepSpeedFile]) -> None:
        """Add the fp32 weights, if they are wanted, and the optimizer's states, which are in these files of the ranks.

        Raises:
            CorruptError: counts or sizes contradict each other.
        """
        parts = [_FlatFile(file) for file in files]
        first = parts[0]
        for part in parts:
            part.check(first, len(parts), self.groups)
        sizes = [[buffer.numel for buffer in part.weights] for part in parts]
        with first.file.parsing():
            if first.zero_stage == 3:
                runs = runs_of_parameters(self.shapes, sizes)
            else:
                runs = runs_of_partitions(self.groups, first.paddings(), sizes)
        for part, of_rank in zip(parts, runs, strict=True):
            with part.file.parsing():
                part.check_addresses(of_rank)
                self._add_runs(part, of_rank)
        with first.file.parsing():
            first.add_rest()

    def _add_runs(self, part: _FlatFile, runs: Sequence[FlatRun]) -> None:
        weights = dict(enumerate(part.weights))
        for name, group in itertools.groupby(runs, key=lambda run: run.name):
            of_name, shape = list(group), self.shapes[name]
            if self.takes_master:
                part.file.add_runs(_MODEL + name, shape, of_name, weights)
            for key in part.states[of_name[0].group]:
                buffers = {run.group: part.states[run.group][key] for run in of_name if key in part.states[run.group]}
                if all(run.group in buffers for run in of_name):
                    part.file.add_runs(f"{_STATE}{name}.{key}", shape, of_name, buffers)
        if self.takes_master:
            self._add_aliases(part.file, self.shapes)

    def _add_aliases(self, file: DeepSpeedFile, names: Iterable[str]) -> None:
        """Add the other names of parameters of which the file has a part."""
        for alias, name in self.shared.items():
            if name in names:
                file.add_alias(_MODEL + alias, _MODEL + name)

    def add_frozen(self) -> None:
        """Add the parameters that are not trained, where they are saved apart: whole in ZeRO-2, in parts in ZeRO-3."""
        for rank, file in self.files.items() if self.frozen else ():
            with file.parsing():
                fragments = file.entry("frozen_param_fragments")
                for name, shape in self.frozen.items():
                    if self._is_divided:
                        self._add_part(file, rank, name, fragments[name])
                    else:
                        file.add_whole(_MODEL + name, fragments[name], shape)
                self._add_aliases(file, self.frozen)

    def _add_part(self, file: DeepSpeedFile, rank: int, name: str, fragment: Any) -> None:
        """Add a rank's part of a parameter that ZeRO-3 divides."""
        shape, buffer = self.frozen[name], file.buffer(fragment)
        numel = math.prod(shape)
        size = -(-numel // self._num_ranks)
        if buffer.numel != size:
            text = "this rank's part of the parameter has another size"
            raise CorruptError(text, name=name, expected=size, found=buffer.numel)
        begin, end = min(rank * size, numel), min((rank + 1) * size, numel)
        if begin < end or not numel:
            file.add_runs(_MODEL + name, shape, [FlatRun(name, begin, end, 0, 0)], {0: buffer})

    def add_module(self, elsewhere: Iterable[str] = ()) -> None:
        """Add what the model's file holds itself: all of the model, or what has no fp32 weights in other files."""
        with self.first.parsing():
            # None in a pipeline, whose layers have their own files
            module = self.first.named(self.first.root["module"] or {})
            skipped = set(elsewhere)
            if self.takes_master:
                skipped |= self.names
                skipped |= {alias for alias, name in self.shared.items() if name in skipped}
            kept = {name: value for name, value in module.items() if name not in skipped}
            for name, value in kept.items():
                if not self._is_divided or name in self._buffers or not is_tensor(value):
                    continue
                if self.first.view(value).shape == (0,):
                    raise IncompleteError("the values of this parameter are in no file", name=name)
            self.first.add_entries(_MODEL, kept)


class _FlatFile:
    """The flat buffers of one rank's optimizer file.

    Attributes:
        file: the file.
        zero_stage: 1, 2 or 3.
        weights: the fp32 weights, by group.
        states: the optimizer's states by group and key, those that are as long as the weights.
    """

    def __init__(self, file: DeepSpeedFile) -> None:
        self.file = file
        with file.parsing():
            self._state = file.named(file.entry("optimizer_state_dict"))
            # DeepSpeed's BF16_Optimizer (stage 1 with fp32 gradients) does not record its stage.
            self.zero_stage = number_of(self._state.get("zero_stage", 1))
            key = "fp32_flat_groups" if self.zero_stage == 3 else "single_partition_of_fp32_groups"
            self.weights = [file.buffer(value) for value in file.listed(self._state[key])]
            counts = self._state["partition_count"]
            self._counts = [number_of(count) for count in (file.listed(counts) if type(counts) is list else [counts])]
            if self._state.get("ds_zero_partition_groups"):
                raise UnsupportedError(
                    f"parameters are divided among groups of ranks of their own: {_UNIVERSAL_ADVICE}"
                )
            self._base = self._state["optimizer_state_dict" if self.zero_stage == 3 else "base_optimizer_state"]
            self._by_group = [self._tensors_of(group) for group in range(len(self.weights))]
            self.states = [self._flat_of(group) for group in range(len(self.weights))]

    def _tensors_of(self, group: int) -> dict[str, Any]:
        """Return the tensors among the optimizer's states of a group."""
        states = self._base[group] if type(self._base) is list else self._base["state"].get(group, {})
        return {key: value for key, value in self.file.named(states).items() if is_tensor(value)}

    def _flat_of(self, group: int) -> dict[str, FlatBuffer]:
        """Return the states that are as long as the weights, or longer by the padding of the group."""
        paddings = self._state.get("group_paddings")
        padding = number_of(paddings[group]) if type(paddings) is list else 0
        numel = self.weights[group].numel
        found = {}
        for key, value in self._by_group[group].items():
            if numel and self.file.view(value).shape in ((numel,), (numel + padding,)):
                found[key] = self.file.buffer(value)
        return found

    def check(self, first: _FlatFile, num_ranks: int, groups: Sequence[Shapes]) -> None:
        """Raise CorruptError unless this file and rank 0's are of one save by `num_ranks` ranks of these groups."""
        with self.file.parsing():
            num_groups = len(groups) if self.zero_stage != 3 else len(first.weights)
            for what, expected, found in (
                ("ZeRO stage", first.zero_stage, self.zero_stage),
                ("number of partitions", num_ranks, max(self._counts, default=0)),
                ("number of partitions", num_ranks, min(self._counts, default=0)),
                ("number of groups", num_groups, len(self.weights)),
            ):
                if expected != found:
                    text = f"its {what} is not that of the other files: files of two saves are mixed"
                    raise CorruptError(text, expected=expected, found=found)

    def paddings(self) -> list[list[int]] | None:
        """Return the padding after each parameter of each group; None if the file does not have it."""
        paddings = self._state.get("param_alignment_paddings")
        if paddings is None:
            return None
        listed = self.file.listed
        numbers = [[number_of(value) for value in listed(of_group)] for of_group in listed(paddings)]
        if any(value < 0 for of_group in numbers for value in of_group):
            raise ValueError("a negative padding")
        return numbers

    def check_addresses(self, runs: Iterable[FlatRun]) -> None:
        """Raise CorruptError if the file's own table gives a parameter another position than `runs`, made of shapes."""
        mappings = self._state.get("param_slice_mappings")
        if type(mappings) is not list:
            return
        for run in runs:
            of_group = mappings[run.group]
            address = getattr(of_group.get(run.name), "state", None) if type(of_group) is dict else None
            if type(address) is dict:
                expected = run.at, run.end - run.begin
                found = address.get("start"), address.get("numel")
                if expected != found:
                    text = (
                        "the shapes of the parameters contradict its param_slice_mappings (start, number of elements)"
                    )
                    raise CorruptError(text, name=run.name, expected=str(expected), found=excerpt(found))

    def add_rest(self) -> None:
        """Add the entries that are neither weights nor states of parameters."""
        for group, of_group in enumerate(self._by_group):
            rest = {key: value for key, value in of_group.items() if key not in self.states[group]}
            self.file.add_entries(f"optimizer.groups.{group}.", rest)
        if type(self._base) is dict:
            self.file.add_entries("optimizer.", {"param_groups": self._base.get("param_groups")})
        self.file.add_entries("optimizer.", {key: value for key, value in self._state.items() if key not in _OF_STATE})


class _UniversalReader(_Reader):
    """Reads a Universal Checkpoint: a directory for each parameter, and the model's files."""

    def _read_tensors(self, first: DeepSpeedFile) -> None:
        takes_master = self._weights != "model"
        num_stages = len(self._names.model)
        if not takes_master:
            self._check_has_model_weights()
            if num_stages > 1:
                raise UnsupportedError("there are only fp32 master weights here: leave out weights (--weights)")
        if self._names.per_rank:
            self._num_ranks = _positive(first.root.get("dp_world_size", 1))
        stage = self._stage(0, takes_master=takes_master)
        if stage is None:
            return
        shapes, shared = dict(stage.shapes), dict(stage.shared)
        for mp_rank in range(1, num_stages if not self._names.per_rank else 1):
            other = self._stage(mp_rank, takes_master=takes_master)
            if other is not None:
                shapes |= other.shapes
                shared |= other.shared
        buffers = _buffer_names(first)
        zero = self._store.below(UNIVERSAL)
        in_zero = set(zero.directories) - buffers - shared.keys() - stage.frozen.keys()
        for name in sorted(in_zero):
            self._add_parameter(zero.below(name), name, shapes.get(name), shared, takes_master=takes_master)
        self._check_states({name: zero.below(name) for name in sorted(in_zero)})
        absent = next((name for name in shapes if name not in in_zero), None)
        if absent is not None:
            path = zero.path_of(f"{absent}/fp32.pt")
            self._not_read(_MODEL + absent, shapes[absent], IncompleteError(_MISSING, name=absent, path=path))
            self._unreadable.append(UnreadableTensor(f"{_STATE}{absent}.*", None, None, path))
        if takes_master:
            stage.add_frozen()
        if num_stages == 1:
            stage.add_module(in_zero if takes_master else ())

    def _add_parameter(
        self,
        store: Store,
        name: str,
        shape: tuple[int, ...] | None,
        shared: Mapping[str, str],
        *,
        takes_master: bool,
    ) -> None:
        """Add the fp32 weights and the optimizer's states of one parameter."""
        for file_name in dict.fromkeys(("fp32.pt", *store.non_directories)):
            key = file_name.removesuffix(".pt")
            wanted = takes_master if key == "fp32" else key != file_name and key != "step"
            if not wanted:
                continue
            source_name = _MODEL + name if key == "fp32" else f"{_STATE}{name}.{key}"
            try:
                file = DeepSpeedFile(open_listed(store, file_name, _MISSING, name=name), 0)
                self._files[f"{UNIVERSAL}/{name}/{file_name}"] = file
                with file.parsing():
                    value = file.root if is_tensor(file.root) else file.entry("param")
                    file.add_whole(source_name, value, shape)
                    for alias, target in shared.items() if key == "fp32" else ():
                        if target == name:
                            file.add_alias(_MODEL + alias, source_name)
            except StateExchangeError as error:
                self._not_read(source_name, shape, error)

    def _check_states(self, stores: Mapping[str, Store]) -> None:
        """Add a problem for each parameter that has only a part of the optimizer's states that others have.

        Parameters of different optimizers may have different states, but none has a part of another's.
        """
        files_of: dict[str, frozenset[str]] = {}
        for name, store in stores.items():
            files_of[name] = frozenset(file_name for file_name in store.non_directories if file_name.endswith(".pt"))
        for name, files in files_of.items():
            fuller = next((others for others in dict.fromkeys(files_of.values()) if files | {"fp32.pt"} < others), None)
            if fuller is not None:
                file_name = min(fuller - files)
                error = IncompleteError(_MISSING, name=name, path=stores[name].path_of(file_name))
                self._not_read(f"{_STATE}{name}.{file_name.removesuffix('.pt')}", None, error)

    def _not_read(self, name: str, shape: tuple[int, ...] | None, error: StateExchangeError) -> None:
        self.problems.append(error)
        self._unreadable.append(UnreadableTensor(name, None, shape, error.path or self._store.path))


def _sections(names: Iterable[str]) -> tuple[Section, ...]:
    """Return the sections of a checkpoint's names: a model in any case, of which all may be missing."""
    sections = sections_from(names, _section_of, _PREFIXES)
    return sections if any(section.name == "model" for section in sections) else (_NO_MODEL, *sections)


def _section_of(name: str) -> SectionName:
    return next((section for section, prefix in _PREFIXES.items() if name.startswith(prefix)), "other")


def _groups_of(file: DeepSpeedFile) -> list[Shapes]:
    """Return the shapes of the parameters of each group."""
    return [parse_shapes(group, file.budget) for group in file.listed(file.root.get("param_shapes") or ())]


def _buffer_names(file: DeepSpeedFile) -> set[str]:
    """Return the names of the model's buffers."""
    names = file.root.get("buffer_names") or ()
    return {name for name in (names if type(names) is set else file.listed(names)) if type(name) is str}


def _positive(value: Any) -> int:
    """Return a number of ranks; raise ValueError for anything else."""
    number = number_of(value)
    if number < 1:
        raise ValueError(f"{number} in the place of a number of ranks")
    return number


def _expert_counts(file: DeepSpeedFile) -> list[int]:
    """Return the number of experts of each layer with experts."""
    counts = file.root.get("num_experts")
    return [number_of(count) for count in file.listed(counts)] if type(counts) is list else []


def _has_16_bits(module: Mapping[str, Any]) -> bool:
    """Whether there are tensors of 16 bits in a module's state."""
    tensors = (unwrap_tensor(value) for value in module.values() if is_tensor(value))
    return any(
        view_of(tensor).dtype in ("BF16", "F16") for tensor in tensors if tensor.name.startswith("_rebuild_tensor")
    )
