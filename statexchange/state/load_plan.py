"""The plan of a load: the tensors that it reads, and the calls that make of them, and of plain values, the new state.

Planning changes nothing: an error leaves the live state as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from statexchange.errors import InvalidArgumentError, UnsupportedError, type_text
from statexchange.sharding.paths import joined
from statexchange.state.allocation import Place, tensor_to_fill
from statexchange.state.entries import Conflicts, Entry, SavedTensor, refuse_opaque
from statexchange.state.flatten import is_leaf
from statexchange.state.matching import Matching
from statexchange.state.tree import check_change, children, with_children, with_types_of
from statexchange.units import format_number

__all__ = ["Filler", "LoadPlan", "LoadTarget", "expect", "name_of", "named"]


class LoadTarget(NamedTuple):
    """A live tensor that is to be filled.

    Attributes:
        name: the source's name of the tensor that it is filled with; None if a layout's rule names the parts.
        live: the live tensor.
        path: its path in the state, for messages and layouts.
        parameter_name: the parameter whose optimizer state it is, or "".
    """

    name: str | None
    live: Any
    path: str
    parameter_name: str = ""


@dataclass(slots=True)
class LoadPlan:
    """The steps that turn a live state into the saved one.

    Attributes:
        targets: the tensors to be read.
        callbacks: to be called, in order, once the tensors are read.
        missing: paths of the live state that the source lacks.
        stateful: those among them that are of tensors or of objects with a state.
        unexpected: paths of the source that the live state lacks.
        tolerated: those of `missing` and `unexpected` that are no error with ``strict``.
        loaded: the paths of all that is loaded, in the source by the names of the state.
        conflicts: parameters of optimizers for which ranks saved different hyperparameters, or other state, by path.
        num_values: the number of plain values that are loaded.
        parameters: those of `missing` that are parameters of optimizers.
        nameless: the paths of optimizers whose parameters have names in the source, and only numbers in the live state.
    """

    targets: list[LoadTarget] = field(default_factory=list)
    callbacks: list[Callable[[], object]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    stateful: set[str] = field(default_factory=set)
    unexpected: list[str] = field(default_factory=list)
    tolerated: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    conflicts: Conflicts = field(default_factory=dict)
    num_values: int = 0
    parameters: set[str] = field(default_factory=set)
    nameless: set[str] = field(default_factory=set)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is loaded."""
        return not (self.targets or self.callbacks or self.num_values)

    def add_loaded(self, entries: Iterable[Entry]) -> None:
        """Add entries of the source that are loaded."""
        self.loaded.update([entry.text for entry in entries])

    def add_missing(self, paths: Sequence[str], *, stateful: bool = True) -> None:
        """Add paths of the live state that the source lacks."""
        self.missing += paths
        if stateful:
            self.stateful.update(paths)


class Filler:
    """Puts tensors in place of each SavedTensor of a saved value, and lets the plan read them."""

    def __init__(self, plan: LoadPlan, matching: Matching) -> None:
        self.plan = plan
        self.matching = matching

    def fill(self, saved: Any, path: str, place: Place = Place()) -> Any:  # noqa: B008 (immutable)
        """Return a saved value with tensors, in containers of the types of the live value, `place.own`."""
        if isinstance(saved, SavedTensor):
            return self._tensor(saved, path, place)
        if isinstance(saved, bool | int | float | str | None):
            return saved
        with named(path):
            return with_types_of(place.own, self._with_tensors(saved, path, place))

    def _tensor(self, saved: SavedTensor, path: str, place: Place) -> Any:
        live = tensor_to_fill(self.matching, saved, place, path)
        self.plan.targets.append(LoadTarget(saved.name, live, path, place.parameter_name))
        return live

    def _with_tensors(self, saved: Any, path: str, place: Place) -> Any:
        if isinstance(saved, SavedTensor):
            return self._tensor(saved, path, place)
        items = children(saved)
        if items is None:
            refuse_opaque(saved, path)
            return saved
        live_items = {} if is_leaf(place.own) else children(place.own) or {}
        new = {}
        for key, item in items.items():
            if type(key) is not str:
                refuse_opaque(key, path)
            inner = place._replace(own=live_items.get(key))
            new[key] = self._with_tensors(item, joined(path, key), inner)
        if isinstance(saved, list):
            return list(new.values())
        return new if type(saved) is dict else with_children(saved, new)

    def change(self, container: Any, change: Callable[[Any], object], path: str) -> None:
        """Plan the change of a mutable container; raise UnsupportedError if a copy of it refuses the change."""
        with named(path):
            check_change(container, change)
        self.plan.callbacks.append(lambda: change(container))


def name_of(stored: Sequence[Entry]) -> str | None:
    """Return the source's name of the one tensor that fills a live one; None if a layout splits that."""
    return stored[0].leaf.name if len(stored) == 1 else None


@contextlib.contextmanager
def named(path: str) -> Iterator[None]:
    """Let an error about a container name its path, and say what to do."""
    try:
        yield
    except UnsupportedError as error:
        if error.name is not None:
            raise
        text = f"{error.message}: give a dict, list or tuple, or leave it out by exclude"
        raise UnsupportedError(text, name=path) from error.__cause__


def expect(holds: bool, wanted: str, saved: Any, path: str) -> None:
    """Raise InvalidArgumentError unless what the source has at `path` is what the live state needs."""
    if holds:
        return
    found = type_text(saved)
    if isinstance(saved, SavedTensor):
        found = "a tensor"
    elif isinstance(saved, list | tuple):
        found = format_number(len(saved), "item")
    text = "this was saved as something else: build it as it was saved, or leave it out by exclude"
    raise InvalidArgumentError(text, name=path, expected=wanted, found=found)
