"""Read the model's states of DeepSpeed: of a module, of the stages of a pipeline, and of experts.

The file of the model's states has the module in the dtype of the training, buffers among it, and describes the fp32
weights that other files have. In ZeRO-3 each rank has such a file, in which the weights are empty. In a pipeline each
stage has one without a module, and the layers have files of their own, as experts do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from statexchange.errors import IncompleteError, UnsupportedError
from statexchange.formats.deepspeed_files import (
    MODEL,
    STATE,
    DeepSpeedFile,
    Step,
    count_of,
    number_of,
)
from statexchange.formats.deepspeed_universal import add_parameters
from statexchange.formats.deepspeed_zero import CONVERTER, add_flat

_OF_LAYER = re.compile(r"([0-9]{1,9})\.")  # with which the name of a pipeline layer's parameter begins
_TIED = "tied_modules."


class _ModelStates:
    """The files of the model's states of one pipeline stage; without a pipeline, of the whole model.

    Attributes:
        stage: the stage.
        shapes: the shapes of the parameters that are trained, in the order of the optimizer's groups.
        frozen: the shapes of the parameters that are not trained.
        shared: other names of parameters, with the names under which they are saved.
        buffers: the names of the model's buffers.
    """

    def __init__(self, step: Step, stage: int, num_ranks: int) -> None:
        """Open the files of a stage, of which ZeRO-3 has one for each of `num_ranks` ranks."""
        self.stage = stage
        self._is_divided = step.per_rank
        count = num_ranks if step.per_rank else 1
        self._files = step.files_of_stage("model", stage, count, "the file with the model's states is missing")
        file = self._files[0]
        with file.parsing():
            root = file.root
            self.shapes: dict[str, tuple[int, ...]] = {}
            # One mapping for each of the optimizer's groups, in the order in which its parameters are flattened.
            for of_group in file.listed(root.get("param_shapes") or ()):
                self.shapes |= file.shapes(of_group)
            self.frozen = file.shapes(root.get("frozen_param_shapes") or {})
            shared = file.named(root.get("shared_params") or {})
            self.shared = {alias: name for alias, name in shared.items() if type(name) is str}
            buffers = root.get("buffer_names") or ()
            if type(buffers) is not set:
                buffers = file.listed(buffers)
            self.buffers = {name for name in buffers if type(name) is str}

    @property
    def names(self) -> set[str]:
        """The names of all parameters that have elements in other files, or among the frozen ones."""
        # One without elements is in no flat buffer: the module has it.
        return {name for name, shape in self.shapes.items() if 0 not in shape} | self.frozen.keys()

    def add_frozen(self) -> None:
        """Add the parameters that are not trained, where they are saved apart: whole in ZeRO-2, in parts in ZeRO-3."""
        if not self.frozen:
            return
        for rank, file in enumerate(self._files):
            with file.parsing():
                fragments = file.entry("frozen_param_fragments")
                for name, shape in self.frozen.items():
                    file.add_part(MODEL + name, fragments[name], shape, rank, len(self._files))

    def add_module(self, elsewhere: set[str]) -> None:
        """Add what the model's file holds itself: the module without the parameters that are `elsewhere`."""
        file = self._files[0]
        with file.parsing():
            module = file.named(file.root["module"] or {})  # None in a pipeline, whose layers have their own files
            elsewhere = elsewhere | {alias for alias, name in self.shared.items() if name in elsewhere}
            entries = {name: value for name, value in module.items() if name not in elsewhere}
            for name, value in entries.items():
                if not self._is_divided or name in self.buffers:
                    continue
                # ZeRO-3 leaves an empty tensor in place of a parameter. A buffer may be empty.
                flat = file.flat(value)
                if flat is not None and flat.shard.global_shape == (0,):
                    raise IncompleteError("the values of this parameter are in no file", name=name)
            file.add_entries(MODEL, entries)


def add_tensors(step: Step, first: DeepSpeedFile) -> None:
    """Add the model and the optimizer's states; `first` describes them.

    Raises:
        IncompleteError, CorruptError: a file of the model is missing or broken. Those of the optimizer, and of
            parameters of a Universal Checkpoint, are problems.
        UnsupportedError: the files do not say how tensors are divided.
    """
    is_universal = step.universal is not None
    # Of each layer with experts their number; old versions have one number.
    counts = first.root.get("num_experts")
    expert_counts = list(map(number_of, first.listed(counts))) if type(counts) is list else []
    has_experts = not is_universal and (bool(step.names["expert"]) or max(expert_counts, default=1) > 1)
    is_zero = is_universal or first.root.get("param_shapes") is not None
    takes_master = is_zero and not has_experts
    # Without ZeRO each rank has all, and one of them saves it.
    num_ranks = count_of(first.root.get("dp_world_size", 1)) if is_zero else 1
    if is_universal:
        stages = sorted({stage for _, stage in step.names["model"]})
    else:
        stages = list(range(_num_stages(step, first)))
        step.world_size = num_ranks * len(stages) if is_zero else None
    all_states = [_ModelStates(step, stage, num_ranks) for stage in stages]
    names = set().union(*(states.names for states in all_states))
    elsewhere = names if takes_master else set()  # what is read from other files than the module's
    if is_universal:
        elsewhere = elsewhere | _add_universal(step, all_states)
    for states in all_states:
        if takes_master:
            if not is_universal:
                _add_flat(step, states, num_ranks)
            states.add_frozen()
        # A Universal Checkpoint does not say how several files divide the module.
        if not is_universal or len(all_states) == 1:
            states.add_module(elsewhere)
    # The file that has the parameter may be any rank's.
    for file in step.files.values():
        for states in all_states:
            for alias, name in states.shared.items():
                file.add_alias(MODEL + alias, MODEL + name)
    if not is_universal and step.names["layer"]:
        _add_layers(step, names, takes_master=takes_master)
    if has_experts:
        _add_experts(step, expert_counts)
    if not takes_master:
        reason = "without ZeRO, DeepSpeed does not name them"
        if has_experts:
            reason = "the parts of experts are not described"
        step.notes.append(f"these are the weights of the training, not the fp32 master weights: {reason}")


def _add_universal(step: Step, all_states: Sequence[_ModelStates]) -> set[str]:
    """Add the parameters with a directory of their own in a Universal Checkpoint, and return their names."""
    assert step.universal is not None
    names = set(step.universal.directories)
    shapes: dict[str, tuple[int, ...]] = {}
    for states in all_states:
        # Those without fp32 weights are in the model's files, as they were before the conversion.
        names -= states.buffers | states.shared.keys() | states.frozen.keys()
        shapes |= states.shapes
    add_parameters(step, step.universal, names, shapes)
    return names


def _num_stages(step: Step, first: DeepSpeedFile) -> int:
    """Return the number of pipeline stages; raise UnsupportedError for tensor parallelism."""
    count = count_of(first.root.get("mp_world_size", 1))
    if step.names["layer"]:  # of a pipeline, whose stages are counted there
        num_stages, tensor_parallel = count, 1 + max(rank for _, rank in step.names["layer"])
        degrees = first.root.get("checkpoint_parallel_dimensions")
        if type(degrees) is dict:
            tensor_parallel = max(tensor_parallel, count_of(degrees.get("tp_degree", 1)))
    else:
        stages = {stage for _, stage in (*step.names["model"], *step.names["optimizer"])}
        num_stages, tensor_parallel = 1, max(count, len(stages))
    if tensor_parallel > 1:
        text = f"files of {tensor_parallel} tensor-parallel ranks do not say how they divide the tensors"
        raise UnsupportedError(f"{text}: {CONVERTER}, and give OUT")
    return num_stages


def _add_flat(step: Step, states: _ModelStates, num_ranks: int) -> None:
    """Add what the flat buffers of all ranks hold, or the problem if something is missing or contradictory."""
    affected: dict[str, tuple[int, ...] | None] = {f"{STATE}*": None}
    affected |= {MODEL + name: shape for name, shape in states.shapes.items()}
    if not states.shapes:
        affected[f"{MODEL}*"] = None
    missing = "the file with this rank's part of the fp32 weights and of the optimizer's states is missing"
    if not (step.per_rank or step.names["layer"]):
        missing += "; mp_rank_00_model_states.pt alone has the weights of the training: give that file"
    with step.collecting(affected):
        add_flat(step.files_of_stage("optimizer", states.stage, num_ranks, missing), states.shapes)


def _add_layers(step: Step, names: set[str], *, takes_master: bool) -> None:
    """Add the files of pipeline layers, without the parameters of these names if they have master weights.

    A layer that is tied to another is ``tied_modules.KEY`` in `names`, and has its own number as a file.
    """
    keys: dict[int, set[str]] = {layer: set() for layer, _ in step.names["layer"]}  # of the parameters by layer
    tied = set()
    for name in names:
        match = _OF_LAYER.match(name)
        if match is not None:
            keys.setdefault(int(match[1]), set()).add(name[match.end() :])
        elif name.startswith(_TIED) and name.count(".") > 1:
            tied.add(name.split(".", 2)[2])
    # A layer of `names` that has no file is missing.
    for layer in sorted(keys):
        name = step.names["layer"].get((layer, 0), f"layer_{layer:02d}-model_states.pt")
        elsewhere = tied | keys[layer] if takes_master else set()
        _add_file(step, name, f"{MODEL}{layer}.", elsewhere, "the file of a pipeline layer is missing")


def _add_experts(step: Step, counts: Sequence[int]) -> None:
    """Add the files of experts; `counts` are the numbers of experts of each layer with experts."""
    names = dict(step.names["expert"])
    for layer, count in enumerate(counts):
        # Of a broken file `count` may be any number: the first missing expert ends it.
        absent = next((expert for expert in range(count) if (layer, expert, 0) not in names), None)
        if absent is not None:
            names[layer, absent, 0] = f"layer_{layer}_expert_{absent}_mp_rank_00_model_states.pt"
    for (_, expert, _), name in names.items():
        _add_file(step, name, MODEL, set(), f"the file of expert {expert} is missing")


def _add_file(step: Step, name: str, prefix: str, elsewhere: set[str], missing: str) -> None:
    """Add a file of a part of the model, without the parameters that are `elsewhere`, or a problem of all tensors."""
    with step.collecting({f"{prefix}*": None}):
        file = step.open(name, 0, missing)
        with file.parsing():
            entries = file.named(file.root)
            file.add_entries(prefix, {key: value for key, value in entries.items() if key not in elsewhere})
