"""The sections of a checkpoint: which of its tensors are the model's, and which are the optimizer's or anything else's.

A training job saves its whole state, often as one mapping, ``{"model": ..., "optimizer": ..., "step": 7}``, of which
most readers want the model alone. Some formats know their sections and list them in `Source.sections`. Otherwise they
follow from the first keys of the names, such as ``optimizer`` in ``optimizer.state.0.exp_avg``:

* A checkpoint has sections only if it is certain to be a job's state: it has an optimizer's state, or plain values
  under keys such as ``step``. A model may well have a module called ``scaler``, and none of its tensors may get lost.
* A key with ``param_groups`` below it, and nothing else but ``state``, is an optimizer's, whatever it is called.
* Keys that libraries use for states other than the model's then name these sections.
* If all names begin with one key above such keys, the keys below it count: torch's Stateful example has ``app``.
* A key such as ``model`` or ``state_dict`` names the model, and is removed from the names when the section is selected,
  if all tensors that are in no other section have it.
* Otherwise the tensors that are in no other section are the model, and keep their names: some jobs save the model
  without a key beside ``{"optimizer": ...}``, and the names of a model may begin with "model." themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import get_args

from statexchange.errors import InvalidArgumentError, StateExchangeError, excerpt
from statexchange.formats.source import Section, SectionName, Source
from statexchange.storage.location import parse_stored

__all__ = [
    "ALL",
    "MODEL_OF_PARTS",
    "SECTIONS",
    "check_section",
    "no_section",
    "problems_of",
    "section_of",
    "sections_from",
    "sections_of",
    "select_section",
]

SECTIONS: tuple[SectionName, ...] = get_args(SectionName)
ALL = "all"
MODEL_OF_PARTS = "model of parts"  # the model of a framework's directory (directories.py), all of anything else

_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
_KEYS: dict[str, SectionName] = {
    **dict.fromkeys(("ema", "ema_model", "model_ema", "ema_state_dict"), "ema"),
    **dict.fromkeys(
        (
            *("opt", "optim", "optimizer", "optimizers", "optim_state", "optimizer_state", "optimizer_states"),
            *("optim_state_dict", "optimizer_state_dict"),
        ),
        "optimizer",
    ),
    **dict.fromkeys(
        (
            *("scheduler", "schedulers", "lr_scheduler", "lr_schedulers", "lr_scheduler_state_dict"),
            *("scheduler_state_dict", "opt_param_scheduler"),
        ),
        "scheduler",
    ),
    **dict.fromkeys(("rng", "rng_state", "rng_states", "random", "random_state", "random_states"), "rng"),
    **dict.fromkeys(
        (
            *("args", "callbacks", "config", "dataloader", "epoch", "extra_state", "global_step", "grad_scaler"),
            *("hparams", "hyper_parameters", "iteration", "loops", "pytorch-lightning_version", "scaler", "step"),
            *("train_state", "trainer_state", "version"),
        ),
        "other",
    ),
}
_NUMBER = re.compile(r"_?[0-9]+$")  # of one among several optimizers
# An entry of an optimizer's own state dict. In a save, a key that is a number stands in brackets: state[0].exp_avg.
_OPTIMIZER_STATE = re.compile(r"state(\.[0-9]+|\[[0-9]+\])\.[^.]+$|param_groups\b")
# A key is an optimizer's if all names below it match _OF_STATE, and at least one of them _OF_OPTIMIZER.
_OF_OPTIMIZER = re.compile(r"[^.]+\.param_groups([.\[]|$)")
_OF_STATE = re.compile(r"[^.]+\.(param_groups|state)([.\[]|$)")
_HAS_STATE = re.compile(r"(^|\.)(state|param_groups)[.\[]")
_NESTED = ("save", "dcp", "torch", "workspace")  # formats whose tensors may be a whole job's state


def sections_of(source: Source) -> tuple[Section, ...]:
    """Return the sections of a source, in the order of `SECTIONS`; none if it is not known what its tensors are."""
    if source.sections:
        return source.sections
    if source.kind not in _NESTED:
        return ()
    tensors = {tensor.shard.name for _, tensor in source.shards()}
    tensors.update(unreadable.name for unreadable in source.unreadable)
    return _by_keys(tensors, set(source.others) | _values_of_save(source, tensors))


def _values_of_save(source: Source, tensors: set[str]) -> set[str]:
    """Return the names of plain values in a save by which its sections are known.

    These are the first keys under which there are plain values alone, and the param_groups of optimizers.
    """
    if source.kind != "save" or not source.configs:
        return set()
    state = parse_stored(next(iter(source.configs.values())), source.path, source.budget)
    if not isinstance(state, dict):
        return set()
    keys = {_first_key(name).partition("[")[0] for name in tensors}
    names = {key for key in state if _first_key(key) not in keys}
    for key, value in state.items():
        names.update(f"{key}.{path}" for path in _param_groups(value))
        for inner, below in value.items() if isinstance(value, dict) else ():
            names.update(f"{key}.{inner}.{path}" for path in _param_groups(below))
    return names


def _param_groups(value: object) -> tuple[str, ...]:
    return ("param_groups",) if isinstance(value, dict) and "param_groups" in value else ()


def _by_keys(tensors: set[str], others: set[str]) -> tuple[Section, ...]:
    """Return the sections that the first keys of the names show, below a key that all names have, such as "app"."""
    root = _root(tensors | others)
    tensors, others = _below(root, tensors), _below(root, others)
    optimizers = _optimizers(tensors | others)
    by_section: dict[SectionName, set[str]] = {}
    models: dict[str, set[str]] = {}  # by the key that names a model
    unkeyed = set()
    for name in tensors | others:
        key = _first_key(name)
        section = "optimizer" if key in optimizers else _KEYS.get(_NUMBER.sub("", key))
        if section is not None:
            by_section.setdefault(section, set()).add(name)
        elif _OPTIMIZER_STATE.match(name):
            by_section.setdefault("optimizer", set()).add(name)
        elif key in _MODEL_KEYS and name != key:
            models.setdefault(key, set()).add(name)
        else:
            unkeyed.add(name)
    if not _is_job_state(by_section, others):
        return ()
    if len(models) == 1 and unkeyed.isdisjoint(tensors):
        by_section["model"] = set().union(*models.values())
        by_section["other"] = by_section.get("other", set()) | unkeyed
    else:
        by_section["model"] = unkeyed.union(*models.values())
    sections = []
    for section in SECTIONS:
        names = by_section.get(section)
        if names:
            prefix = "" if section == "model" and unkeyed & names else _common_key(names)
            sections.append(Section(section, root + prefix, frozenset(root + name for name in names)))
    return tuple(sections)


def _root(names: set[str]) -> str:
    """Return the key with its dot that all names have above the keys of a job's state; "" if there is none.

    torch's example of a Stateful application wraps its whole state in one, and so do jobs that follow it.
    """
    key = _common_key(names)
    is_section = key[:-1] in _MODEL_KEYS or _NUMBER.sub("", key[:-1]) in _KEYS
    if not key or is_section or not _optimizers(_below(key, names)):
        return ""
    return key


def _below(root: str, names: set[str]) -> set[str]:
    return {name.removeprefix(root) for name in names} if root else names


def _optimizers(names: set[str]) -> set[str]:
    """Return the first keys under which there is an optimizer's state dict, whatever the keys are called."""
    others = {_first_key(name) for name in names if not _OF_STATE.match(name)}
    return {_first_key(name) for name in names if _OF_OPTIMIZER.match(name)} - others


def _common_key(names: set[str]) -> str:
    """Return the first key of all names with its dot; "" if they have several, or one name is the key itself."""
    keys = {_first_key(name) for name in names}
    return "" if len(keys) > 1 or keys <= names else f"{keys.pop()}."


def _is_job_state(found: Mapping[SectionName, set[str]], others: set[str]) -> bool:
    """Whether a checkpoint has the state of an optimizer, or plain values under keys of a job's state."""
    if any(map(_HAS_STATE.search, found.get("optimizer", ()))):
        return True
    return any(not names.isdisjoint(others) for names in found.values())


def _first_key(name: str) -> str:
    return name.partition(".")[0]


def check_section(section: object) -> None:
    """Raise InvalidArgumentError unless this is the name of a section, "all", or None."""
    if section not in (None, ALL, MODEL_OF_PARTS, *SECTIONS):
        names = ", ".join(map(repr, SECTIONS))
        raise InvalidArgumentError(f"section must be {names} or 'all', not {excerpt(section)}")


def select_section(source: Source, section: str | None) -> Source:
    """Return the source with the tensors of one section alone, without the section's prefix.

    A problem stays if it may affect the section.

    Args:
        source: the source, opened without `strict`.
        section: the name of the section; "all" and MODEL_OF_PARTS for the source as it is; None for the model if the
            source has sections, else for the source as it is.

    Raises:
        InvalidArgumentError: the source does not have the section.
    """
    if section in (ALL, MODEL_OF_PARTS):
        return source
    sections = sections_of(source)
    if not sections and section is None:
        return source
    by_name = {known.name: known for known in sections}
    wanted = by_name.get(section or "model")  # type: ignore[call-overload]
    if wanted is None:
        raise no_section(source, section or "model")
    left_out = [known for known in sections if known != wanted]
    if section is None and not left_out and not wanted.prefix:
        return source
    notes = (*source.notes, _note(wanted, left_out))
    return replace(section_of(source, wanted), sections=(), selected=wanted.name, notes=notes)


def _note(section: Section, left_out: list[Section]) -> str:
    text = f"only the section {section.name!r} is read"
    if left_out:
        text += f", not {', '.join(repr(known.name) for known in left_out)}"
    if section.prefix:
        text += f"; its prefix {section.prefix!r} is removed"
    return f'{text} (all: section="all", --section all)'


def no_section(source: Source, section: str) -> InvalidArgumentError:
    """Return the error for a section that a source does not have."""
    sections = ", ".join(repr(known.name) for known in sections_of(source))
    text = f"there is no section {section!r}, only {sections}: choose with section (--section)"
    if not sections:
        text = f"there is no section {section!r}: the names do not show sections here (--section all takes everything)"
    elif section == "model" and source.parts and source.notes:  # the one file of another part
        text = source.notes[0]
        if any(shard_file.tensors for shard_file in source.files):
            text += f"; to read this file alone, choose {sections} with section (--section)"
    return InvalidArgumentError(text, path=source.path)


def section_of(source: Source, section: Section) -> Source:
    """Return the source with the tensors and other entries of a section alone, without its prefix."""
    selected = source.renamed({name: name.removeprefix(section.prefix) for name in section.names}.get)
    files = tuple(shard_file for shard_file in selected.files if shard_file.tensors)
    problems = problems_of(source, section.names.__contains__)
    return replace(selected, files=files or selected.files[:1], problems=problems)


def sections_from(
    names: Iterable[str],
    section_of_name: Callable[[str], SectionName],
    prefixes: Mapping[SectionName, str] = MappingProxyType({}),
) -> tuple[Section, ...]:
    """Return the sections of names, each with the prefix of its section, in the order of `SECTIONS`."""
    found: dict[SectionName, set[str]] = {}
    for name in names:
        found.setdefault(section_of_name(name), set()).add(name)
    in_order = [section for section in SECTIONS if section in found]
    return tuple(Section(section, prefixes.get(section, ""), frozenset(found[section])) for section in in_order)


def problems_of(source: Source, wants: Callable[[str], bool]) -> tuple[StateExchangeError, ...]:
    """Return the problems of a source that may affect the tensors whose names `wants` accepts."""
    paths = {tensor.path for tensor in source.unreadable}
    affected = {tensor.path for tensor in source.unreadable if wants(tensor.name)}
    problems = []
    for problem in source.problems:
        # A problem of a file affects the tensors in it, unless it is so broken that their names are not known.
        is_affected = problem.name is None or wants(problem.name)
        if problem.path in paths:
            is_affected = problem.path in affected
        if is_affected:
            problems.append(problem)
    return tuple(problems)
