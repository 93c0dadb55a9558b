"""The load of one optimizer: hyperparameters for each group, and state for each parameter that the source has.

Each parameter gets the state that the source has for it, and each live group the hyperparameters that its parameters
have in the source, in whatever groups they were. Only groups without parameters go by their order.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from statexchange.errors import InvalidArgumentError, StateExchangeError, UnsupportedError
from statexchange.sharding.paths import joined
from statexchange.state.allocation import Place
from statexchange.state.entries import SavedTensor, are_equal, refuse_opaque
from statexchange.state.flatten import load_object
from statexchange.state.live_parameters import LiveParameters
from statexchange.state.load_plan import Filler, named
from statexchange.state.name_filter import NameFilter
from statexchange.state.optimizers import hyperparameters, install_optimizer, state_of_optimizer
from statexchange.state.saved_optimizer import OtherKey, SavedGroup, SavedOptimizer
from statexchange.state.tree import with_types_of
from statexchange.tensors import is_torch

__all__ = ["OptimizerPlan", "ParameterTensor", "SavedParameter"]


@dataclass(slots=True)
class SavedParameter:
    """One live parameter in a source: the optimizer there, its label there, and the number of its group."""

    saved: SavedOptimizer
    label: str
    group_number: int

    @property
    def group(self) -> SavedGroup:
        """Its group."""
        return self.saved.groups[self.group_number]

    @property
    def has_state(self) -> bool:
        """Whether the source has state of it."""
        return self.label in self.saved.state

    def keys(self) -> set[Any]:
        """Return the first keys of its state."""
        begin = joined(self.saved.path, f"state.{self.label}")
        inside = (entry.keys_below(begin) for entry in self.saved.state.get(self.label, ()))
        return {keys[0] for keys in inside if keys}


class ParameterTensor(NamedTuple):
    """A tensor of a parameter's state that is loaded.

    Attributes:
        by_number: whether the source knows the parameter by its number.
        saved: the source's tensor.
        live: what the state has now in this place, or None.
        label: the parameter's label.
        parameters: all parameters of the optimizer, by label.
        path: the path of the tensor in the state.
    """

    by_number: bool
    saved: SavedTensor
    live: Any
    label: str
    parameters: Mapping[str, Any]
    path: str


@dataclass(slots=True)
class OptimizerPlan:
    """A live optimizer with what the source has for it.

    Attributes:
        optimizer: the live optimizer.
        path: its path.
        live: its parameters.
        filler: makes the tensors that are read, and has the plan.
        names: the filter of the load.
        saved: the optimizer as each rank saved it, in the order of their claim.
        parameters: what the source has for each live parameter, by label: the first rank's that has it.
        with_state: the same, of the first rank that has state of it.
        unexpected: the source's names of parameters that the live optimizer lacks.
        tensors: those of parameters' states that are loaded.
    """

    optimizer: Any
    path: str
    live: LiveParameters
    filler: Filler
    names: NameFilter
    saved: list[SavedOptimizer] = field(default_factory=list)
    parameters: dict[str, SavedParameter] = field(default_factory=dict)
    with_state: dict[str, SavedParameter] = field(default_factory=dict)
    unexpected: dict[str, None] = field(default_factory=dict)
    tensors: list[ParameterTensor] = field(default_factory=list)
    _hyperparameters: dict[int, Any] = field(default_factory=dict)  # live ones by id

    def has_same_groups(self) -> bool | None:
        """Whether each parameter lies in the group of the same number on both sides.

        None if the source has the same parameters and no groups.
        """
        if not all(saved.has_groups for saved in self.saved):
            return False if self.unexpected or len(self.parameters) < len(self.live.by_label) else None
        groups = self.optimizer.param_groups
        for number, of_group in enumerate(self.live.by_group()):
            for label in of_group:
                parameter = self.parameters.get(label)
                if parameter is None or parameter.group_number != number:
                    return False
        return all(len(saved.groups) == len(groups) for saved in self.saved)

    def add(self) -> None:
        """Add the optimizer to the plan of the load."""
        path, plan = self.path, self.filler.plan
        groups: list[dict[str, Any] | None] = []
        states: dict[Any, Any] = {}
        empty = [group for group in self.saved[0].groups if not group.labels]
        num_empty = 0
        by_group = zip(self.optimizer.param_groups, self.live.by_group(), strict=True)
        for index, (group, of_group) in enumerate(by_group):
            where = joined(path, f"param_groups.{index}")
            settings = self._settings(of_group, where)
            if not of_group:
                is_wanted = num_empty < len(empty) and self._wants("param_groups")
                settings = empty[num_empty].settings if is_wanted else None
                num_empty += 1
            groups.append(None if settings is None else self._group(group, settings, where))
            new = groups[-1] or group
            # torch keeps the count of steps on the CPU unless the optimizer is fused or capturable.
            on_host = not (new.get("fused") or new.get("capturable"))
            for label, parameter in of_group.items():
                saved = self.with_state.get(label)
                if saved is not None and self._wants_state(saved, label, parameter):
                    states[parameter] = self._state_of(saved, label, parameter, on_host=on_host)
        dropped = self._dropped(states)
        self._add_other_state(states)
        self._compare_names(num_empty, len(empty))
        more = self._more()
        if states or dropped or more or any(group is not None for group in groups):
            install = functools.partial(install_optimizer, self.optimizer, groups, states, dropped)
            plan.callbacks.append(functools.partial(load_object, self.optimizer, install, more, path))

    # What is loaded

    def _wants(self, below: str) -> bool:
        return not self.names.selects or self.names.options.wants(joined(self.path, below))

    def _wants_parameter(self, label: str) -> bool:
        return self._wants(f"state.{label}") or self._wants(f"param_groups.{label}")

    def _wants_state(self, saved: SavedParameter, label: str, parameter: Any) -> bool:
        """Whether the state of a parameter is loaded: if anything in it is included, and nothing excluded."""
        if not self.names.selects:
            return True
        live = self.optimizer.state.get(parameter)
        keys = saved.keys().union(live if isinstance(live, Mapping) else ())
        begin = joined(self.path, f"state.{label}")
        return self.names.options.wants_object([begin, *(f"{begin}.{key}" for key in keys)])

    def _wants_settings(self, saved: SavedParameter, label: str) -> bool:
        """Whether the hyperparameters of a parameter are loaded: if one is included, and none excluded."""
        if not self.names.selects:
            return True
        begin = joined(self.path, f"param_groups.{label}")
        return self.names.options.wants_object([begin, *(f"{begin}.{key}" for key in saved.group.settings)])

    def _compare_names(self, num_empty: int, num_saved_empty: int) -> None:
        """Add the parameters, and the groups without parameters, that one side lacks."""
        plan, live = self.filler.plan, self.live.by_label
        if live and not self.live.are_named and not self.parameters and self.unexpected:
            plan.nameless.add(self.path)
        missing = [label for label in live if label not in self.parameters and self._wants_parameter(label)]
        missing = [joined(self.path, f"state.{label}") for label in missing]
        plan.add_missing(missing)
        plan.parameters.update(missing)
        unexpected = filter(self._wants_parameter, self.unexpected)
        plan.unexpected += [joined(self.path, f"state.{label}") for label in unexpected]
        name = joined(self.path, "param_groups (without parameters)")
        if num_empty > num_saved_empty and self.saved[0].has_groups:
            plan.add_missing([name], stateful=False)
        elif num_empty < num_saved_empty:
            plan.unexpected.append(name)

    # Hyperparameters

    def _settings(self, of_group: Mapping[str, Any], path: str) -> Mapping[str, Any] | None:
        """Return the hyperparameters that the source has for a live group; None if that stays as it is.

        Raises:
            InvalidArgumentError: they differ between the parameters of the group.
        """
        first: tuple[str, SavedGroup] | None = None
        for label in of_group:
            saved = self.parameters.get(label)
            if saved is None or not saved.group.settings or not self._wants_settings(saved, label):
                continue
            group = saved.group
            if first is None:
                first = label, group
            elif group is not first[1] and not are_equal(dict(first[1].settings), dict(group.settings)):
                raise _differing(path, first, (label, group))
        return None if first is None else first[1].settings

    def _group(self, live: Mapping[str, Any], settings: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Return the new hyperparameters of a group."""
        self.filler.plan.loaded.add(joined(self.path, "param_groups"))  # where ranks may differ
        new = hyperparameters(live)
        for key, value in settings.items():
            if type(key) is not str:
                refuse_opaque(key, path)
            present = new.get(key)
            is_first = id(present) not in self._hyperparameters  # torch gives groups one tensor as the default lr
            self._hyperparameters[id(present)] = present
            new[key] = self.filler.fill(value, f"{path}.{key}", Place(present, is_filled=is_first))
        return new

    # State

    def _state_of(self, saved: SavedParameter, label: str, parameter: Any, *, on_host: bool) -> Any:
        """Return the new state of a parameter."""
        path = joined(self.path, f"state.{label}")
        live = self.optimizer.state.get(parameter)
        entries = saved.saved.state[saved.label]
        old_path = joined(self.path, f"state.{saved.label}")
        value = saved.saved.entries.built(entries, {} if live is None else live, old_path)
        self.filler.plan.add_loaded(entries)
        place = Place(live, parameter=parameter, parameter_name=label)
        if not isinstance(value, Mapping):
            return self.filler.fill(value, path, place)
        present = live if isinstance(live, Mapping) else {}
        new: dict[Any, Any] = {}
        for key, entry in value.items():
            if type(key) is not str:
                refuse_opaque(key, path)
            where, live_entry, is_step = f"{path}.{key}", present.get(key), key == "step"
            if isinstance(entry, SavedTensor):
                by_number, parameters = saved.saved.by_number, self.live.by_label
                self.tensors.append(ParameterTensor(by_number, entry, live_entry, label, parameters, where))
            at = Place(live_entry, True, parameter, label, is_step, is_step and on_host)
            new[key] = self.filler.fill(entry, where, at)
        if live is None or type(live) is dict:
            return new
        with named(path):
            return with_types_of(live, new)

    def _dropped(self, states: Mapping[Any, Any]) -> list[Any]:
        """Return the keys whose state the source does not have, although it has the parameter."""
        dropped = []
        for label, parameter in self.live.by_label.items():
            saved = self.parameters.get(label)
            if saved is not None and label not in self.with_state and self._wants_state(saved, label, parameter):
                dropped.append(parameter)
        if self.parameters.keys() >= self.live.by_label.keys() and not self.names.selects:
            dropped += [key for key in self.optimizer.state if not is_torch(key) and key not in states]
        return dropped

    def _add_other_state(self, states: dict[Any, Any]) -> None:
        """Plan the state that is not of a parameter."""
        first = self.saved[0]
        labels = {*first.labels}
        live = {str(key): key for key in self.optimizer.state if not is_torch(key)}
        for label, entries in first.state.items():
            key = label.key if isinstance(label, OtherKey) else label
            path = joined(self.path, f"state.{key}")
            if label in labels or not self._wants(f"state.{key}"):
                continue
            if not isinstance(label, OtherKey) and label not in live:
                text = (
                    "whether the key of this state was a text or something else is not known: give the state of the "
                    "optimizer this key, or leave the optimizer out"
                )
                raise InvalidArgumentError(text, name=path)
            key = live.get(key, key)
            refuse_opaque(key, path)
            value = first.entries.built(entries, self.optimizer.state.get(key), path)
            self.filler.plan.add_loaded(entries)
            states[key] = self.filler.fill(value, path, Place(self.optimizer.state.get(key)))

    def _more(self) -> dict[str, Any]:
        """Return the saved entries of a state dict beside ``state`` and ``param_groups``; others join the plan."""
        saved, plan = self.saved[0], self.filler.plan
        live = state_of_optimizer(self.optimizer, self.path)["more"]
        lacking = [key for key in live if key not in saved.more]
        others = [key for key in saved.more if key not in live]
        plan.add_missing([joined(self.path, key) for key in filter(self._wants, lacking)], stateful=False)
        plan.unexpected += [joined(self.path, key) for key in filter(self._wants, others)]
        more = {}
        for key, value in live.items():
            if key in saved.more and self._wants(key):
                path = joined(self.path, key)
                built = saved.entries.built(saved.more[key], value, path)
                plan.add_loaded(saved.more[key])
                more[key] = self.filler.fill(built, path, Place(value, is_filled=False))
        return more


def _differing(path: str, one: tuple[str, SavedGroup], other: tuple[str, SavedGroup]) -> StateExchangeError:
    """Return the error for a live group whose parameters have different hyperparameters in the source."""
    first, second = one[1].settings, other[1].settings
    key = next(key for key in {**first, **second} if not are_equal(first.get(key), second.get(key)))
    if isinstance(first.get(key), SavedTensor) and isinstance(second.get(key), SavedTensor):
        text = (
            f"the source has {key!r} as a tensor for each parameter, and whether those of one group are equal is not "
            "known: save what the optimizer's state_dict() returns, or a number instead"
        )
        return UnsupportedError(text, name=path)
    text = (
        f"this param group of the state joins {one[0]!r} and {other[0]!r}, which were saved with different values of "
        f"{key!r}: make the param groups of the job that saved them"
    )
    return InvalidArgumentError(text, name=path, expected=first.get(key), found=second.get(key))
