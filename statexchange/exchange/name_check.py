"""Compare the names of a state and of a source; where they differ, say what to do about it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from statexchange.comm.communicator import Communicator
from statexchange.comm.typed import from_all
from statexchange.errors import InvalidArgumentError, NotFoundError, StateExchangeError, UnsupportedError
from statexchange.exchange.load_source import LoadSource
from statexchange.exchange.saved_names import advice_on_missing
from statexchange.sharding.paths import paths_above
from statexchange.state.load_plan import LoadPlan
from statexchange.state.types import Leaf
from statexchange.state.units import is_extra_state

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

_RENAME = (
    'rename=[("pattern", "replacement")] maps the source\'s names to the state\'s; where all of them differ by one '
    'prefix, give {"prefix": state} or state["prefix"]'
)


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
    parts += [_advice(state, plan), general]
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


def _advice(state: Leaf, plan: LoadPlan) -> str:
    """Return what to do about names that differ."""
    if plan.nameless:
        return (
            f"the source has the parameters of {min(plan.nameless)!r} by their names in the state that was saved: "
            "give the state what has these parameters, too, under the same name; exclude leaves it as it is"
        )
    if not plan.missing or not plan.unexpected:
        return ""
    # No rename gives a model of transformers the parts of its fused tensors.
    return advice_on_missing(state) or _RENAME
