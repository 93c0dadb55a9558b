"""Read the checkpoints of DeepSpeed: ZeRO-0 to 3, pipelines, experts and Universal Checkpoints.

``save_checkpoint`` writes a directory for each step, and `latest` beside them names the newest:

* ``mp_rank_00_model_states.pt``: the weights in the dtype of the training, buffers, and what else the job saves. In
  ZeRO-3 each rank has one (``zero_pp_rank_R_mp_rank_00_model_states.pt``), in which the weights are empty.
* ``zero_pp_rank_R_mp_rank_00_optim_states.pt``: rank R's part of the fp32 master weights and of the optimizer's states,
  flattened (deepspeed_zero.py). With bf16 the names begin with ``bf16_``.
* Pipeline stage S has the number S after ``mp_rank_``, and each layer a file ``layer_NN-model_states.pt``
  (deepspeed_module.py).
* Experts have files ``layer_L_expert_E_mp_rank_00_model_states.pt``.
* A Universal Checkpoint has ``zero/PARAMETER/fp32.pt`` and the optimizer's states beside it (deepspeed_universal.py).

The names of the source begin with ``model.`` and ``optimizer.state.``; both are sections. The model is made of the
master weights where they can be read, which rounded to the dtype of the training are its weights bit by bit. Buffers
and frozen parameters have no master weights: they are the model's own.
"""

from __future__ import annotations

import re
from dataclasses import replace

from statexchange.formats.deepspeed_files import MODEL, STATE, UNIVERSAL, DeepSpeedFile, Step
from statexchange.formats.deepspeed_module import add_tensors
from statexchange.formats.deepspeed_universal import has_parameters
from statexchange.formats.newest_step import named_step, newest_step
from statexchange.formats.sections import sections_from
from statexchange.formats.source import SectionName, Source
from statexchange.storage.location import OpenedPath
from statexchange.storage.store import Store

_LATEST = ("latest", "latest_universal")
_TAG = re.compile(r"(?!\.{1,2}$)[^/\\\0\n]{1,200}")
_PREFIXES: dict[SectionName, str] = {"model": MODEL, "optimizer": "optimizer.", "scheduler": "lr_scheduler."}
# Entries of the model's file that are the model, or that describe it.
_OF_MODEL = {
    "module", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params", "buffer_names"
}  # fmt: skip


def matches(opened: OpenedPath) -> bool:
    """Whether a path is the directory of a step, or a directory with such directories and `latest`."""
    store = opened.store
    if opened.file is not None:
        return False
    if _is_step(store):
        return True
    latest = next(filter(store.files.__contains__, _LATEST), None)
    if latest is None:
        return False
    # Other programs have a file called latest, too. A job may give its steps any name: global_step is the default.
    return (named_step(store, latest, _directory_of) or "").startswith("global_step") or bool(_steps(store))


def _steps(store: Store) -> list[str]:
    """Return the names of the directories of steps."""
    return [name for name in store.directories if _is_step(store.below(name))]


def _is_step(store: Store) -> bool:
    names = Step(store).names
    if names["optimizer"] or names["model"] or names["layer"]:
        return True
    # The conversion to a Universal Checkpoint copies the model's files last.
    return UNIVERSAL in store.directories and has_parameters(store.below(UNIVERSAL))


def _directory_of(text: str) -> str | None:
    """Return the directory that `latest` names, as `newest_step` asks for it."""
    return text if _TAG.fullmatch(text) else None


def read(opened: OpenedPath) -> Source:
    """Return the source at a path.

    Raises:
        IncompleteError: `latest` names a directory that is not there.
        CorruptError: `latest` does not have the name of a directory, or files of two saves are mixed.
    """
    store = opened.store
    if not _is_step(store):
        latest = next(filter(store.files.__contains__, _LATEST))
        store = store.below(newest_step(store, latest, _directory_of, lambda: _steps(opened.store)))
    step = Step(store)
    # Whatever is wrong in the files of the model, neither it nor the optimizer's states are whole: all are unreadable.
    with step.collecting({f"{MODEL}*": None, f"{STATE}*": None}):
        first = step.open(step.name_of("model", 0, 0), 0, "the file that describes the model is missing")
        with first.parsing():
            _add_entries(first)
            add_tensors(step, first)
    descriptions: dict[str, str] = {}
    texts: dict[str, str] = {}
    several: set[str] = set()
    unreadable = list(step.unreadable)
    for file in step.files.values():
        descriptions |= file.others
        unreadable += file.unsupported
        for name, text in file.texts.items():
            if texts.setdefault(name, text) != text:
                several.add(name)
    # Each stage of a pipeline has param groups of its own under one name: none of their values is the job's.
    for name in several:
        descriptions[name] = "different values in several files"
        del texts[name]
    source = Source(
        "deepspeed",
        opened,
        tuple(file.shard_file for file in step.files.values()),
        world_size=step.world_size,
        others=descriptions,
        texts=texts,
        problems=tuple(step.problems),
        unreadable=tuple(unreadable),
        notes=tuple(step.notes),
    )
    return replace(source, sections=sections_from(source.names, _section_of, _PREFIXES))


def _add_entries(first: DeepSpeedFile) -> None:
    """Add what the job saved beside the tensors of the model, and what describes these."""
    first.entry("module")
    rest = {key: value for key, value in first.root.items() if key not in _OF_MODEL}
    optimizer = rest.pop("optimizer", None)
    if type(optimizer) is dict:
        first.add_entries("optimizer.", optimizer)
    # A job may save keys such as "model" of its own, which are not the sections of that name.
    for key in [key for key in rest if f"{key}.".startswith((MODEL, "optimizer."))]:
        rest[f"client.{key}"] = rest.pop(key)
    first.add_entries("", rest)


def _section_of(name: str) -> SectionName:
    for section, prefix in _PREFIXES.items():
        if name.startswith(prefix):
            return section
    return "other"
