"""Whose state it is: what a load refuses on another number of ranks than saved it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from statexchange.errors import ReplicaError
from statexchange.exchange.load_source import LoadSource
from statexchange.exchange.source_entries import differing_text
from statexchange.sharding.paths import paths_above
from statexchange.sharding.rules import with_dots
from statexchange.state.flatten import LiveState
from statexchange.state.install import LoadPlan
from statexchange.units import format_number

__all__ = ["check_whose_state"]

_MOST_NAMES = 3  # that a message lists


def check_whose_state(plan: LoadPlan, loaded: LoadSource, live: LiveState) -> None:
    """Raise ReplicaError if another number of ranks has saved what belongs to a rank, or different values."""
    matching, takes_root = loaded.matching, loaded.matching.names.options.replicas == "root"
    places = _places(plan.loaded)
    # A source that does not record its ranks is of one: it fits one rank, as that of a save by one does.
    if matching.saved_by is not None or matching.loaded_by != 1:
        per_rank = live.per_rank
        per_rank.update(map(matching.names.place, loaded.converted.source.per_rank))
        names = places & per_rank
        if takes_root:  # root's objects do, but no other rank's part of a parameter fits
            names.intersection_update(map(with_dots, loaded.tensors.names))
        if names:
            raise _other_ranks(min(names), loaded)
    if takes_root:
        return
    # Only what is loaded counts: `exclude` is the remedy that the error names.
    conflicts = matching.entries.conflicts | plan.conflicts
    differing = [name for name in conflicts if name in places]
    if differing:
        rank, other = conflicts[differing[0]]
        text = differing_text(_shown(differing), _excluding(differing), rank, other)
        raise ReplicaError(text, rank=other, path=loaded.matching.path)


def _other_ranks(name: str, loaded: LoadSource) -> ReplicaError:
    """Return the error for what belongs to a rank.

    It is refused even if it is equal on all ranks: ranks with one random state draw the same numbers, and a position in
    one rank's part of the data repeats or skips samples in another.
    """
    leave = ""
    if name:
        leave = f": pass exclude={name!r} to leave it as it is on each rank"
    return ReplicaError(
        f"{name or 'the state'!r} belongs to a rank, and fits the same number of ranks only: "
        f"{format_number(loaded.matching.saved_by or 1, 'rank')} saved it, and the world size is "
        f"{loaded.matching.loaded_by} now{leave}",
        name=name or None,
        path=loaded.matching.path,
    )


def _shown(names: Sequence[str]) -> str:
    if not names[0]:
        return "different states"
    others = ""
    if len(names) == 2:
        others = " and 1 other entry"
    elif len(names) > 2:
        others = f" and {len(names) - 1} other entries"
    return f"different values of {names[0]!r}{others}"


def _places(loaded: Collection[str]) -> set[str]:
    """Return the paths of all that is loaded, and of what contains it."""
    places: set[str] = set()
    for text in loaded:
        places.update(paths_above(text))
    if places:
        places.add("")
    return places


def _excluding(names: Sequence[str]) -> str | list[str]:
    """Return what to pass as `exclude`: a few names, or patterns for the entries of the state that hold many."""
    # One level at a time, from the leaves: the pattern should leave out no more than it must.
    while len(names) > _MOST_NAMES:
        outer = set()
        for name in names:
            path = name.removesuffix(".*")
            outer.add(f"{path.rpartition('.')[0] or path}.*")
        if len(outer) == len(names):
            break
        names = sorted(outer)
    if len(names) == 1:
        return names[0]
    return list(names)
