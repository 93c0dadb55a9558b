"""Compare the names of a state and of a source; where they differ, say what to do about it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence

from statexchange.comm.communicator import Communicator
from statexchange.comm.typed import from_all
from statexchange.errors import InvalidArgumentError, NotFoundError, StateExchangeError, UnsupportedError
from statexchange.exchange.load_source import LoadSource
from statexchange.exchange.saved_names import advice_on_missing
from statexchange.formats.sections import SECTIONS
from statexchange.sharding.paths import WRAPPERS, paths_above
from statexchange.sharding.rename_hint import suggest_rename
from statexchange.state.entries import SavedTensor
from statexchange.state.load_plan import LoadPlan
from statexchange.state.tree import walk
from statexchange.state.types import Leaf
from statexchange.state.units import is_extra_state, is_module, live_items
from statexchange.tensors import is_tensor

__all__ = ["compare_names", "settle_names"]

_log = logging.getLogger(__name__)


def settle_names(plan: LoadPlan, loaded: LoadSource) -> None:
    """Settle which names are missing or unexpected where the source itself says more of them. Not collective.

    Raises:
        UnsupportedError: what is missing is in the source, in a form that cannot be read.
    """
    source, names = loaded.converted.source, loaded.matching.names
    unreadable: dict[str, UnsupportedError] = {}
    others = []
    for stored, error in source.unsupported.items():
        name = names.name(stored)
        unreadable[name] = error
        if names.options.wants(name) and name not in plan.missing:
            others.append(name)
    for name in plan.missing:
        _check_readable(loaded.converted.lacking.get(name, name), unreadable)
    # Where nothing fits, an entry that cannot be read, as a whole module, may be what was meant.
    if others and plan.missing and not plan.targets:
        raise unreadable[others[0]]
    if not loaded.matching.has_tree:
        plan.unexpected += others
    if loaded.converted.adapter is not None:  # the base model has its weights already
        plan.missing = [name for name in plan.missing if name in loaded.converted.adapter]
    # An export leaves extra state out.
    if source.kind == "huggingface" and not any(map(is_extra_state, loaded.tensors.names)):
        plan.tolerated.update(filter(is_extra_state, plan.missing))


def _check_readable(name: str, unreadable: Mapping[str, UnsupportedError]) -> None:
    for refused, error in unreadable.items():
        if name == refused or name in paths_above(refused):
            raise error


def compare_names(comm: Communicator, state: Leaf, plan: LoadPlan, loaded: LoadSource) -> None:
    """Raise, on all ranks, if names of the state or of the source have no counterpart. Collective.

    A name is unexpected only if it is so on every rank. Without ``strict`` names are listed by the plan alone, unless a
    rank would load nothing. Plain values of a torch checkpoint that no rank has are no error, nor is extra state that a
    source of tensors alone cannot have.

    Raises:
        NotFoundError: the source lacks names of the state.
        InvalidArgumentError: the state lacks names of the source, or `include` and `exclude` leave nothing to load.
    """
    options, path = loaded.matching.names.options, loaded.matching.path
    everywhere, is_empty = {*plan.unexpected}, plan.is_empty
    if comm.world_size > 1:
        here = (plan.unexpected, is_empty)
        for unexpected, is_empty_there in from_all(comm, here, tuple[list[str], bool], "unexpected names"):
            everywhere.intersection_update(unexpected)
            is_empty &= is_empty_there
    with comm.phase("comparing the names"):
        plan.unexpected = [name for name in plan.unexpected if name in everywhere]
        differs = not plan.tolerated.issuperset([*plan.missing, *plan.unexpected])
        if differs and (options.strict or _loads_nothing(plan)):
            raise _names_error(state, plan, loaded)
        # Without `strict` the load goes on, maybe with a part of the model alone: root says why.
        if comm.rank == 0 and plan.missing and plan.unexpected:
            advice = advice_on_missing(state)
            if advice:
                _log.warning("%s: %d names are missing in the source; %s", path, len(plan.missing), advice)
        if is_empty and (options.include or options.exclude):
            patterns = []
            for option, names in (("include", options.include), ("exclude", options.exclude)):
                if names:
                    patterns.append(f"{option}={list(names)}")
            text = f"{' and '.join(patterns)} selects no tensor and no value that both the source and the state have"
            raise InvalidArgumentError(text, path=path)


_SHOWN = 5


def _loads_nothing(plan: LoadPlan) -> bool:
    """Whether the source lacks all tensors of the state, or all that a state without tensors has."""
    if not plan.missing or plan.targets:
        return False
    return plan.is_empty or not plan.stateful.isdisjoint(plan.missing)


def _names_error(state: Leaf, plan: LoadPlan, loaded: LoadSource) -> StateExchangeError:
    """Return an error that lists all missing and unexpected names, as torch does."""
    missing = [name for name in plan.missing if name not in plan.tolerated]
    what, general = "the names differ", "strict=False loads what both have"
    # With something in common, strict=False would do; with nothing, it would hide the mistake.
    if not plan.targets and not plan.num_values:
        what, general = "the source has no name of the state", ""
    elif _loads_nothing(plan):  # an error without `strict`, too
        what, general = "the source has no tensor of the state", ""
    parts = [what]
    for names, problem in ((missing, "missing in the source"), (plan.unexpected, "not in the state")):
        if names:
            listed = names[:_SHOWN]
            if len(names) > _SHOWN:
                listed.append("...")
            parts.append(f"{len(names)} {problem}: {', '.join(listed)}")
    parts += _lacking_parts(plan, loaded)
    parts += [_hint(state, plan, loaded), general]
    text = "; ".join(filter(None, parts))
    if missing:
        return NotFoundError(text, path=loaded.matching.path)
    return InvalidArgumentError(text, path=loaded.matching.path)


def _lacking_parts(plan: LoadPlan, loaded: LoadSource) -> Iterator[str]:
    """Yield the first reasons why tensors are missing of which the source has some parts."""
    num_reasons = 0
    for name, part in loaded.converted.lacking.items():
        if num_reasons < _SHOWN and not {name, *paths_above(name)}.isdisjoint(plan.missing):
            num_reasons += 1
            stored = loaded.tensors.by_name.get(part)
            problem = "is not"
            if stored is not None:
                problem = f"has shape {stored.saved.shape}"
            yield f"{name} is missing: {part} {problem} in the source"


def _hint(state: Leaf, plan: LoadPlan, loaded: LoadSource) -> str:
    """Return advice if the source has names for an optimizer's parameters, or the missing ones with another prefix."""
    if plan.nameless:
        return (
            f"the source has the parameters of {min(plan.nameless)!r} by their names in the state that was saved: "
            "give the state what has these parameters, too, under the same name; exclude leaves it as it is"
        )
    missing = _missing_tensors(state, plan)
    tensors = set()
    for entry in loaded.matching.entries:
        if isinstance(entry.leaf, SavedTensor):
            tensors.add(entry.text)
    free = tensors - plan.loaded
    # The most certain advice first: a guessed rename fits by chance more easily than a whole prefix.
    advice = ""
    if not plan.targets:
        advice = _below_a_prefix(missing, tensors)
    advice = advice or _without_a_prefix(state, plan, missing, free)
    if not advice and plan.missing and plan.unexpected:
        advice = advice_on_missing(state)
    if advice:
        return advice
    rename = suggest_rename(free, missing)
    if not rename:
        return ""
    return f"rename=[{rename[:2]!r}] gives {rename[2]} tensors of the source names of the state"


def _missing_tensors(state: Leaf, plan: LoadPlan) -> list[str]:
    """Return the names of the tensors that are missing; what is missing whole has several."""
    missing = []
    for name in plan.missing:
        # Parameters of optimizers have the names of their tensors in the state, which are missing themselves.
        if name in plan.parameters:
            continue
        inside: list[str] = []
        if isinstance(state, Mapping) and name in state:
            inside = _names_in(state[name])
        for inner in inside:
            missing.append(f"{name}.{inner}")
        if not inside:
            missing.append(name)
    return missing


def _below_a_prefix(missing: Sequence[str], tensors: Collection[str]) -> str:
    """Return advice if the source has all that is missing under one key, first of all under "model"."""
    prefixes = set()
    # The first missing name decides which keys come into question: a model has thousands, and jobs have many keys.
    for name in tensors:
        prefix, dot, rest = name.partition(".")
        if dot and missing and rest == missing[0] and prefix not in WRAPPERS:
            prefixes.add(prefix)
    # Several keys may have the same names, as "model" and "ema": the model is meant.
    for prefix in sorted(prefixes, key=lambda prefix: (prefix != "model", prefix not in SECTIONS, prefix)):
        if all(f"{prefix}.{name}" in tensors for name in missing):
            return f'the source has them under "{prefix}": give {{"{prefix}": state}}'
    return ""


def _without_a_prefix(state: Leaf, plan: LoadPlan, missing: Sequence[str], free: set[str]) -> str:
    """Return advice if the source has what is missing under a key of the state without that key."""
    inside: dict[str, set[str]] = {}
    for name in missing:
        prefix, dot, rest = name.partition(".")
        if dot:
            inside.setdefault(prefix, set()).add(rest)
    for prefix, names in inside.items():
        if names <= free:
            advice = f'rename=[("^", "{prefix}.")] gives them this name'
            if isinstance(state, Mapping) and prefix in state:
                advice = f'give state["{prefix}"]'
            elif plan.targets:
                continue  # a rename of all names would move those that fit
            return f'the source has them without "{prefix}": {advice}'
    return ""


def _names_in(value: Leaf) -> list[str]:
    """Return the names of the tensors in a module, or in a mapping."""
    if is_module(value):
        return [*live_items(value)[0]]
    if isinstance(value, Mapping):
        return [step.path for step in walk(value) if is_tensor(step.value)]
    return []
