"""Read a Universal Checkpoint of DeepSpeed: a directory for each parameter, and the model's files beside them.

``zero/PARAMETER/`` has ``fp32.pt`` and a file for each of the optimizer's states, whatever number of ranks saved them.
Buffers and frozen parameters are in the model's files, as they were before the conversion.
"""

from __future__ import annotations

from collections.abc import Mapping

from statexchange.errors import IncompleteError, UnsupportedError
from statexchange.formats.deepspeed_files import (
    MASTER_KEY,
    UNIVERSAL,
    DeepSpeedFile,
    Step,
    count_of,
    source_name,
)
from statexchange.formats.deepspeed_module import ModelStates, check_has_model_weights
from statexchange.formats.source import Weights, open_listed
from statexchange.formats.torch_archive import is_tensor
from statexchange.storage.store import Store

__all__ = ["add_tensors", "is_universal"]

_SUFFIX = ".pt"
_WEIGHTS_FILE, _STEP_FILE = MASTER_KEY + _SUFFIX, "step" + _SUFFIX
_MISSING = "the file of a parameter is missing: the conversion did not finish"


def is_universal(store: Store) -> bool:
    """Whether a directory has the parameters of a Universal Checkpoint."""
    if "optimizer_state.pt" in store.files:
        return True
    return any(_WEIGHTS_FILE in store.below(name).files for name in store.directories[:1])


def add_tensors(step: Step, first: DeepSpeedFile, weights: Weights | None) -> None:
    """Add the model and the optimizer's states; `first` and the other files of the model describe them.

    Raises:
        IncompleteError, CorruptError: a file of the model is missing or broken. Those of parameters are problems.
        UnsupportedError: the weights that are wanted cannot be read from here.
    """
    takes_master = weights != "model"
    stages = sorted({stage for _, stage in step.names["model"]})
    if not takes_master:
        check_has_model_weights(step)
        if len(stages) > 1:
            raise UnsupportedError("there are only fp32 master weights here: leave out weights (--weights)")
    num_ranks = count_of(first.root.get("dp_world_size", 1)) if step.per_rank else 1
    shapes: dict[str, tuple[int, ...]] = {}
    shared: dict[str, str] = {}
    zero = step.store.below(UNIVERSAL)
    in_zero = set(zero.directories)
    all_states = [ModelStates(step, stage, num_ranks) for stage in stages]
    for states in all_states:
        shapes |= states.shapes
        shared |= states.shared
        in_zero -= states.buffers | states.shared.keys() | states.frozen.keys()
    _add_parameters(step, {name: zero.below(name) for name in sorted(in_zero)}, shapes, takes_master=takes_master)
    if takes_master:
        for states in all_states:
            states.add_frozen()
    if len(all_states) == 1:
        states = all_states[0]
        states.add_module(in_zero | states.names if takes_master else set())
    step.add_aliases(shared)


def _add_parameters(
    step: Step, stores: Mapping[str, Store], shapes: Mapping[str, tuple[int, ...]], *, takes_master: bool
) -> None:
    """Add the fp32 weights and the optimizer's states of all parameters."""
    present: dict[str, frozenset[str]] = {}
    for name in {**stores, **shapes}:
        of_name = stores[name].non_directories if name in stores else []
        states = {file for file in of_name if file.endswith(_SUFFIX)} - {_STEP_FILE}
        present[name] = frozenset(states | {_WEIGHTS_FILE})
    for name, files in present.items():
        # Parameters of different optimizers may have different states, but none has a part of another's: complete is
        # the largest set of files of any parameter that contains these.
        expected = max((fuller for fuller in present.values() if files <= fuller), key=len)
        shape = shapes.get(name)
        for file_name in sorted(expected):
            key = file_name.removesuffix(_SUFFIX)
            if key == MASTER_KEY and not takes_master:
                continue
            with step.collecting({source_name(name, key): shape}):
                if name not in stores or file_name not in stores[name].non_directories:
                    path = step.store.path_of(f"{UNIVERSAL}/{name}/{file_name}")
                    raise IncompleteError(_MISSING, name=name, path=path)
                file = DeepSpeedFile(open_listed(stores[name], file_name, _MISSING, name=name), 0)
                step.files[file.path] = file
                with file.parsing():
                    value = file.root if is_tensor(file.root) else file.entry("param")
                    file.add_whole(source_name(name, key), value, shape)
