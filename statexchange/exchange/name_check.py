"""Compare the names of a state and of a source."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from statexchange.comm.communicator import Communicator
from statexchange.comm.typed import from_all
from statexchange.errors import InvalidArgumentError, UnsupportedError
from statexchange.exchange.load_report import LoadRequest
from statexchange.exchange.load_source import LoadSource
from statexchange.exchange.name_advice import loads_nothing, names_error
from statexchange.exchange.saved_names import advice_on_missing
from statexchange.sharding.paths import paths_above
from statexchange.state.install import LoadPlan
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


def compare_names(comm: Communicator, request: LoadRequest, plan: LoadPlan, loaded: LoadSource) -> None:
    """Raise, on all ranks, if names of the state or of the source have no counterpart. Collective.

    A name is unexpected only if it is so on every rank. Without ``strict`` names are listed by the plan alone, unless a
    rank would load nothing. Plain values of a torch checkpoint that no rank has are no error, nor is extra state that a
    source of tensors alone cannot have.

    Raises:
        NotFoundError: the source lacks names of the state.
        InvalidArgumentError: the state lacks names of the source, or `include` and `exclude` leave nothing to load.
    """
    options, path = request.options, loaded.matching.path
    everywhere, is_empty = {*plan.unexpected}, plan.is_empty
    if comm.world_size > 1:
        here = (plan.unexpected, is_empty)
        for unexpected, is_empty_there in from_all(comm, here, tuple[list[str], bool], "unexpected names"):
            everywhere.intersection_update(unexpected)
            is_empty &= is_empty_there
    with comm.phase("comparing the names"):
        plan.unexpected = [name for name in plan.unexpected if name in everywhere]
        differs = not plan.tolerated.issuperset([*plan.missing, *plan.unexpected])
        if differs and (options.strict or loads_nothing(plan)):
            raise names_error(request.state, plan, loaded)
        # Without `strict` the load goes on, maybe with a part of the model alone: root says why.
        if comm.rank == 0 and plan.missing and plan.unexpected:
            advice = advice_on_missing(request.state)
            if advice:
                _log.warning("%s: %d names are missing in the source; %s", path, len(plan.missing), advice)
        if is_empty and (options.include or options.exclude):
            patterns = []
            for option, names in (("include", options.include), ("exclude", options.exclude)):
                if names:
                    patterns.append(f"{option}={list(names)}")
            text = f"{' and '.join(patterns)} selects no tensor and no value that both the source and the state have"
            raise InvalidArgumentError(text, path=path)
