"""Read a Universal Checkpoint of DeepSpeed: a directory for each parameter, and the model's files beside them.

``zero/PARAMETER/`` has ``fp32.pt`` and a file for each of the optimizer's states, whatever number of ranks saved them.
Buffers and frozen parameters are in the model's files, as they were before the conversion.
"""

from __future__ import annotations

from collections.abc import Iterable

from statexchange.errors import IncompleteError
from statexchange.formats.deepspeed_files import MASTER_KEY, DeepSpeedFile, Shapes, Step, source_name
from statexchange.formats.frameworks import UNIVERSAL_OPTIMIZER
from statexchange.formats.source import open_listed
from statexchange.formats.torch_archive import is_tensor
from statexchange.storage.store import Store

_SUFFIX = ".pt"
_WEIGHTS_FILE, _STEP_FILE = MASTER_KEY + _SUFFIX, "step" + _SUFFIX
_MISSING = "the file of a parameter is missing: the conversion did not finish"


def has_parameters(store: Store) -> bool:
    """Whether a directory has the parameters of a Universal Checkpoint."""
    if UNIVERSAL_OPTIMIZER in store.files:
        return True
    return any(_WEIGHTS_FILE in store.below(name).files for name in store.directories[:1])


def add_parameters(step: Step, zero: Store, names: Iterable[str], shapes: Shapes) -> None:
    """Add the fp32 weights and the optimizer's states of parameters, each in a directory of its own.

    Args:
        step: the step.
        zero: its directory with the directories of parameters.
        names: the names of the directories.
        shapes: the shapes of parameters that must be there.
    """
    stores = {name: zero.below(name) for name in sorted(names)}
    present: dict[str, frozenset[str]] = {}
    for name in {**stores, **shapes}:
        files = {_WEIGHTS_FILE}
        if name in stores:
            files.update(file for file in stores[name].non_directories if file.endswith(_SUFFIX))
        present[name] = frozenset(files - {_STEP_FILE})
    kinds = set(present.values())  # a handful, of thousands of parameters
    for name, of_name in present.items():
        # Parameters of different optimizers may have different states, but none has a part of another's: complete is
        # the largest set of files of any parameter that contains these.
        expected = max(filter(of_name.issubset, kinds), key=len)
        shape = shapes.get(name)
        for file_name in sorted(expected):
            key = file_name.removesuffix(_SUFFIX)
            with step.collecting({source_name(name, key): shape}):
                if name not in stores or file_name not in stores[name].non_directories:
                    raise IncompleteError(_MISSING, name=name, path=zero.path_of(f"{name}/{file_name}"))
                file = DeepSpeedFile(open_listed(stores[name], file_name, _MISSING, name=name), 0)
                step.files[file.path] = file
                with file.parsing():
                    value = file.root if is_tensor(file.root) else file.entry("param")
                    file.add_part(source_name(name, key), value, shape)
