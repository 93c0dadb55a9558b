"""The options and functions by which a live state and a source are matched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from statexchange.state.entry import Entry
from statexchange.state.load_plan import Allocate, ObjectStates
from statexchange.state.name_filter import NameFilter

__all__ = ["Matching"]


@dataclass(frozen=True, slots=True)
class Matching:
    """The options and functions that decide a match, besides the live state and the entries.

    Attributes:
        names: the filter of the load.
        stored: returns the source's entries for a live tensor, several if a layout splits it; None if it lacks one.
        allocate: returns the tensor to fill for a place (`Filler`).
        shape_of: returns the global shape of a tensor of the source; None if plain live tensors may be parts.
        objects: the present states of objects.
        has_tree: whether the source is a save of ours, with the names of parameters in the whole state.
        classes: the classes of optimizers that the source records, by path.
    """

    names: NameFilter
    stored: Callable[[str, tuple[Any, ...]], Sequence[Entry] | None]
    allocate: Allocate
    shape_of: Callable[[str], tuple[int, ...]] | None
    objects: ObjectStates
    has_tree: bool
    classes: Mapping[str, frozenset[str]]
