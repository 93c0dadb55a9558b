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
    *("base_lrs", "min_lrs", "max_lrs", "_min_lrs", "_max_lrs", "base_momentums", "max_momentums", "lr_lambdas"),
}


@dataclass(slots=True)
class Schedulers:
    """The schedulers of a load, and the param groups of their optimizers.

    Attributes:
        moved: for each optimizer that is loaded, by `id`, whether its groups have other numbers than in the source;
            None if the source does not have the numbers.
        have_new: the optimizers, by `id`, with a group of which the source has no parameter.
        groups: the new groups by `id`.
    """

    moved: dict[int, bool | None] = field(default_factory=dict)
    have_new: set[int] = field(default_factory=set)
    groups: dict[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    _found: list[tuple[Any, Any, Any, str]] = field(default_factory=list)

    def add(self, live: Any, own: Any, new: Any, path: str) -> None:
        """Add an object, if it has an optimizer, with its present and its new state."""
        if is_optimizer(getattr(live, "optimizer", None)):
            self._found.append((live.optimizer, own, new, path))

    def check(self) -> None:
        """Raise InvalidArgumentError for a scheduler whose values would be those of other groups."""
        for optimizer, own, new, path in self._found:
            present = {step.path: step.value for step in _lists_in(own)}
            for step in _lists_in(new):
                if self._fits(optimizer, step, present.get(step.path)):
                    continue
                raise InvalidArgumentError(
                    "the source has this by the number of a param group, and the groups of the state are others, or in "
                    "another order: make the groups of the job that saved them, or leave the scheduler out by exclude",
                    name=f"{path}.{step.path}".removeprefix("."),
                )

    def _fits(self, optimizer: Any, step: WalkStep, present: Any) -> bool:
        """Whether a list has the values of the live groups in their order."""
        key = id(optimizer)
        groups = self.groups.get(key, optimizer.param_groups)
        is_as_long = len(step.value) == len(groups)
        num_present = len(present) if isinstance(present, list | tuple) else None  # fewer, if groups were added since
        if isinstance(present, list | tuple) and is_as_long and _are_equal([*present], [*step.value]):
            return True
        if key in self.have_new:
            return False
        if self.moved.get(key) is None:  # not known: nor is it if the optimizer stays as it is
            return not _repeats_others(step, groups) and (
                key in self.moved or is_as_long or len(step.value) == num_present
            )
        return not self.moved[key] or (is_as_long and _are_equal([*step.value], [step.value[0]] * len(groups)))


def _repeats_others(step: WalkStep, groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a list has the learning rates of these groups in another order."""
    own = [group.get("initial_lr") for group in groups]
    if step.keys[-1] != "base_lrs" or not all(isinstance(value, int | float) for value in (*own, *step.value)):
        return False
    return [*step.value] != own and sorted(step.value) == sorted(own)  # type: ignore[type-var]


def _lists_in(state: Any) -> Iterator[WalkStep]:
    for step in walk(state):
        if step.keys and step.keys[-1] in _LISTS and isinstance(step.value, list | tuple):
            yield step


def _are_equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two lists are equal; not if they hold tensors, which are not read yet."""
    return not any(map(is_tensor, (*one, *other))) and one == other
