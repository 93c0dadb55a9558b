"""Find the schedulers of a load whose values are for other param groups than the live ones.

An optimizer gets its hyperparameters by the parameters of a group, and a scheduler has lists of values by the number of
a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from statexchange.errors import InvalidArgumentError
from statexchange.state.optimizers import is_optimizer
from statexchange.state.tree import WalkStep, walk
from statexchange.tensors import is_tensor

__all__ = ["Schedulers"]

# What torch's schedulers have as lists with a value for each param group
_LISTS = {
    *("base_lrs", "_last_lr", "min_lrs", "max_lrs", "_min_lrs", "_max_lrs", "base_momentums", "max_momentums"),
    "lr_lambdas",
}
_OF_GROUPS = {"base_lrs": "initial_lr", "_last_lr": "lr"}  # the hyperparameter of a group that a list repeats


@dataclass(slots=True)
class Schedulers:
    """The schedulers of a load, and the param groups of their optimizers.

    Attributes:
        moved: for each optimizer, by `id`, whether its groups have other numbers than in the source; None if the source
            does not have the numbers.
        groups: its new groups by `id`.
    """

    moved: dict[int, bool | None] = field(default_factory=dict)
    groups: dict[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    _found: list[tuple[Any, Any, str]] = field(default_factory=list)

    def add(self, live: Any, new: Any, path: str) -> None:
        """Add an object, if it has an optimizer, with its new state."""
        if is_optimizer(getattr(live, "optimizer", None)):
            self._found.append((live, new, path))

    def check(self) -> None:
        """Raise InvalidArgumentError for a scheduler whose values would be those of other groups."""
        for live, new, path in self._found:
            key = id(live.optimizer)
            if key not in self.groups:
                continue
            for step in _lists_in(new):
                moved = self.moved[key]
                if moved is None:
                    moved = _repeats_others(step, self.groups[key])
                is_same = len(step.value) == len(self.groups[key]) and _are_same(step.value)
                if moved and not is_same:
                    raise InvalidArgumentError(
                        "the source has this by the number of a param group, and the groups of the state are others, "
                        "or in another order: make the groups of the job that saved them, or leave the scheduler out "
                        "by exclude",
                        name=f"{path}.{step.path}".removeprefix("."),
                    )


def _repeats_others(step: WalkStep, groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a list has the values of these groups in another order."""
    key = _OF_GROUPS.get(step.keys[-1], "")
    own = [group.get(key) for group in groups]
    if not all(isinstance(value, int | float) for value in (*own, *step.value)):
        return False
    return [*step.value] != own and sorted(step.value) == sorted(own)  # type: ignore[type-var]


def _lists_in(state: Any) -> Iterator[WalkStep]:
    for step in walk(state):
        if step.keys and step.keys[-1] in _LISTS and isinstance(step.value, list | tuple):
            yield step


def _are_same(items: Sequence[Any]) -> bool:
    """Whether all items of a list are equal; not if they are tensors, which are not read yet."""
    return all(not is_tensor(item) and item == items[0] for item in items)
