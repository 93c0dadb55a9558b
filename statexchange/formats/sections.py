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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import get_args

from statexchange.errors import InvalidArgumentError, StateExchangeError, excerpt
from statexchange.formats.source import KINDS_OF_JOBS, EvenFiles, Section, SectionName, Source
from statexchange.storage.location import parse_stored

SECTIONS: tuple[SectionName, ...] = get_args(SectionName)
ALL = "all"
MODEL_OF_PARTS = "model of parts"  # the model of a framework's directory (directories.py), all of anything else

# The first keys that name a section, which may end in a number: optimizer_1.
_TABLE: tuple[tuple[SectionName, str], ...] = (
    ("ema", "ema ema_model model_ema ema_state_dict"),
    ("optimizer", "opt optim optimizer optimizers optim_state optimizer_state optimizer_states"),
    ("optimizer", "optim_state_dict optimizer_state_dict param_groups"),
    ("scheduler", "scheduler schedulers lr_scheduler lr_schedulers opt_param_scheduler"),
    ("scheduler", "scheduler_state_dict lr_scheduler_state_dict"),
    ("rng", "rng rng_state rng_states random random_state random_states"),
    ("other", "args callbacks config dataloader epoch extra_state global_step grad_scaler hparams hyper_parameters"),
    ("other", "iteration loops pytorch-lightning_version scaler step train_state trainer_state version"),
)
_KEYS = {key: section for section, keys in _TABLE for key in keys.split()}
_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
_END_OF_KEY, _NUMBER = re.compile(r"[.\[]"), re.compile(r"_?[0-9]+$")
# An optimizer's own state dict, below its key. In a save, a key that is a number stands in brackets: state[0].exp_avg.
_OF_OPTIMIZER = re.compile(r"[^.]+\.(param_groups|state)(?:[.\[]|$)")
_HAS_STATE = re.compile(r"(^|\.)(state|param_groups)[.\[]")


def sections_of(source: Source) -> tuple[Section, ...]:
    """Return the sections of a source, in the order of `SECTIONS`; none if it is not known what its tensors are."""
    if source.sections or source.selected or source.kind not in KINDS_OF_JOBS:
        return source.sections
    tensors = source.tensor_names.union(tensor.name for tensor in source.unreadable)
    values = {*source.others, *_values_of_save(source, tensors)}
    sections = _by_keys(tensors, values)
    if sections:
        return sections
    # torch's example of a Stateful application wraps its whole state in one, {"app": ...}, and so do others.
    keys = {name.partition(".")[0] for name in tensors | values}
    if len(keys) != 1 or not keys.isdisjoint(("", *_MODEL_KEYS, *_KEYS)):
        return ()
    sections = _by_keys(tensors, values, f"{keys.pop()}.")
    # Below an unknown key only an optimizer is certain: a model's own module may be called scheduler or step.
    return sections if any(section.name == "optimizer" for section in sections) else ()


def _values_of_save(source: Source, tensors: set[str]) -> Iterator[str]:
    """Yield the first keys of a save under which there are plain values alone, and the param_groups of optimizers."""
    if source.kind != "save" or not source.configs:
        return
    state = parse_stored(next(iter(source.configs.values())), source.path, source.budget)
    if not isinstance(state, dict):
        return
    keys = {_END_OF_KEY.split(name, 1)[0] for name in tensors}
    for key, value in state.items():
        if _END_OF_KEY.split(key, 1)[0] not in keys:
            yield key
        if isinstance(value, dict) and "param_groups" in value:
            yield f"{key}.param_groups"


def _by_keys(tensors: set[str], values: set[str], root: str = "") -> tuple[Section, ...]:
    """Return the sections that the first keys of the names show; () if it is not certain that this is a job's state.

    All names begin with `root`, which comes before these keys.

    Example:
        >>> for section in _by_keys({"net.w", "optim.state.0.exp_avg"}, {"step"}):
        ...     print(section.name, repr(section.prefix), sorted(section.names))
        model '' ['net.w']
        optimizer 'optim.' ['optim.state.0.exp_avg']
        other '' ['step']
    """
    by_key: dict[str, set[str]] = {}
    for name in tensors | values:
        by_key.setdefault(_END_OF_KEY.split(name[len(root) :], 1)[0], set()).add(name)
    by_section: dict[SectionName, set[str]] = {}
    first_keys: dict[SectionName, str] = {}
    is_job = False
    for key, names in by_key.items():
        section = _section_of_key(key, by_key, root)
        if section is not None:
            has_state = section == "optimizer" and any(map(_HAS_STATE.search, names))
            is_job = is_job or has_state or not names.isdisjoint(values)
        elif key in _MODEL_KEYS or not names.isdisjoint(tensors):
            section = "model"
        else:
            section = "other"
        by_section.setdefault(section, set()).update(names)
        first_keys.setdefault(section, key)
    if not is_job:
        return ()
    sections = []
    for section in filter(by_section.__contains__, SECTIONS):
        names = by_section[section]
        prefix = f"{root}{first_keys[section]}."
        # The names of a model may begin with one key themselves.
        is_model_part = section == "model" and first_keys[section] not in _MODEL_KEYS
        if is_model_part or {name[: len(prefix)] for name in names} != {prefix}:
            prefix = root
        sections.append(Section(section, prefix, frozenset(names)))
    return tuple(sections)


def _section_of_key(key: str, by_key: Mapping[str, set[str]], root: str) -> SectionName | None:
    """Return the section that a key names, or that the names below it show; None for the model or an unknown one."""
    parts = set()  # the keys below this one: None for any that an optimizer's state dict does not have
    for name in by_key[key]:
        match = _OF_OPTIMIZER.match(name, len(root))
        parts.add(match and match[1])
    # Of a state dict that was saved without a key above it, "state" and "param_groups" are first keys themselves.
    is_optimizer = "param_groups" in parts and parts <= {"param_groups", "state"}
    if is_optimizer or (key == "state" and "param_groups" in by_key):
        return "optimizer"
    return _KEYS.get(_NUMBER.sub("", key))


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
        StateExchangeError: it does not have it, and something is missing or broken.
    """
    if section in (ALL, MODEL_OF_PARTS):
        return source
    sections = sections_of(source)
    if not sections and section is None:
        return source
    name = section or "model"
    wanted = next((candidate for candidate in sections if candidate.name == name), None)
    if wanted is None:
        # The section may be in what is missing.
        raise source.problems[0] if source.problems else no_section(source, name)
    rest = [repr(unread.name) for unread in sections if unread != wanted]
    if section is None and not rest and not wanted.prefix:
        return source
    notes = (*source.notes, section_note(name, rest, prefix=wanted.prefix))
    return replace(section_of(source, wanted, sections), sections=(), selected=wanted.name, notes=notes)


def section_note(section: str, unread: Sequence[str], of: str = "", *, prefix: str = "") -> str:
    """Return the note that one section alone is read."""
    text = f"only the section {section!r}{of} is read"
    if unread:
        text += f", not {', '.join(unread)}"
    if prefix:
        text += f"; its prefix {prefix!r} is removed"
    return f'{text} (all: section="all", --section all)'


def no_section(source: Source, section: str) -> InvalidArgumentError:
    """Return the error for a section that a source does not have."""
    names = ", ".join(repr(section_of_source.name) for section_of_source in sections_of(source))
    text = f"there is no section {section!r}, only {names}: choose with section (--section)"
    if not names:
        text = f"there is no section {section!r}: the names do not show sections here (--section all takes everything)"
    # The note of one file of another part says where the model lies.
    return InvalidArgumentError("; ".join((text, *source.notes)), path=source.path)


def section_of(source: Source, section: Section, sections: Sequence[Section] = ()) -> Source:
    """Return the source with the tensors and other entries of a section alone, without its prefix.

    If all `sections` are given, a problem stays if it names a tensor of this one, or one that none of the others has: a
    tensor that could not be read may be of any.
    """

    def affects(name: str) -> bool:
        if name in section.names:
            return True
        for rest in sections:
            if name in rest.names or (rest.prefix and rest != section and name.startswith(rest.prefix)):
                return False
        return bool(sections)

    selected = source.renamed({name: name.removeprefix(section.prefix) for name in section.names}.get)
    files = selected.files
    if not isinstance(files, EvenFiles):  # whose numbers must stay
        files = tuple(shard_file for shard_file in selected.files if shard_file.tensors)
    problems = problems_of(source, affects)
    return replace(selected, files=files or selected.files[:1], problems=problems)


def sections_from(
    names: Iterable[str],
    section_of_name: Callable[[str], SectionName],
    prefixes: Mapping[SectionName, str] = MappingProxyType({}),
) -> tuple[Section, ...]:
    """Return the sections of names, each with the prefix of its section, in the order of `SECTIONS`."""
    by_section: dict[SectionName, set[str]] = {}
    for name in names:
        by_section.setdefault(section_of_name(name), set()).add(name)
    sections = []
    for section in filter(by_section.__contains__, SECTIONS):
        sections.append(Section(section, prefixes.get(section, ""), frozenset(by_section[section])))
    return tuple(sections)


def problems_of(source: Source, wants: Callable[[str], bool]) -> list[StateExchangeError]:
    """Return the problems of a source that may affect the tensors whose names `wants` accepts."""
    paths, affected = set(), set()
    for tensor in source.unreadable:
        # Unsupported tensors lie in files without a problem, or have nothing to do with it.
        if tensor.unsupported is None:
            paths.add(tensor.path)
            if wants(tensor.name):
                affected.add(tensor.path)
    problems = []
    for problem in source.problems:
        # A problem of a file affects the tensors in it, unless it is so broken that their names are not known.
        if problem.path in paths:
            if problem.path in affected:
                problems.append(problem)
        elif problem.name is None or wants(problem.name):
            problems.append(problem)
    return problems
