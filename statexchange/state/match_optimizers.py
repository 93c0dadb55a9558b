"""Match the optimizers and schedulers of a live state with those of a source, parameter by parameter."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from statexchange.errors import InvalidArgumentError, StateExchangeError, UnsupportedError
from statexchange.sharding.paths import joined
from statexchange.state.entries import Entries, SavedTensor, are_equal, refuse_opaque
from statexchange.state.flatten import LiveEntry
from statexchange.state.leaves import load_object
from statexchange.state.load_plan import Filler, Place, expect
from statexchange.state.optimizer_class import check_class
from statexchange.state.optimizers import (
    hyperparameters,
    install_optimizer,
    is_optimizer,
    state_of_optimizer,
)
from statexchange.state.saved_optimizer import (
    LiveParameters,
    OtherKey,
    SavedGroup,
    SavedOptimizer,
    join_numbered,
    read_optimizer,
)
from statexchange.state.state_dict import ParameterName, parameter_names
from statexchange.tensors import is_tensor, is_torch

if TYPE_CHECKING:
    from statexchange.state.match import Matching

__all__ = ["OptimizerMatcher"]


@dataclass(slots=True)
class _SavedParameter:
    """What a source has for one live parameter: its group, its state, and the entries that they come from."""

    rank: int
    entries: Entries
    saved: SavedOptimizer
    label: str
    number: int

    @property
    def group(self) -> SavedGroup:
        """Its group."""
        return self.saved.groups[self.number]


class _ParameterTensor(NamedTuple):
    """A tensor of a parameter's state that is loaded.

    Attributes:
        found: what the source has for the parameter.
        name: the source's name of the tensor.
        live: what the state has now in this place, or None.
        label: the parameter's label.
        parameters: all parameters of the optimizer, by label.
        path: the path of the tensor in the state.
    """

    found: _SavedParameter
    name: str
    live: Any
    label: str
    parameters: Mapping[str, Any]
    path: str


@dataclass(slots=True)
class _Match:
    """A live optimizer with what the source has for it.

    Attributes:
        path: its path.
        live: its parameters.
        saved: the optimizer that each rank saved, in the order of their claim.
        parameters: what the source has for each live parameter, by label.
        unexpected: the source's names of parameters that the live optimizer lacks.
    """

    path: str
    live: LiveParameters
    saved: list[tuple[int, Entries, SavedOptimizer]] = field(default_factory=list)
    parameters: dict[str, _SavedParameter] = field(default_factory=dict)
    unexpected: dict[str, None] = field(default_factory=dict)


class OptimizerMatcher:
    """Plans optimizers: each parameter gets its state, and its group its hyperparameters."""

    def __init__(self, state: Any, entries: Entries, matching: Matching, filler: Filler, taken: set[str]) -> None:
        self._state = state
        self._entries = entries
        self._matching = matching
        self._options = matching.names.options
        self._filler = filler
        self._plan = filler.plan
        self._taken = taken
        self._names: Mapping[int, ParameterName] | None = None
        self._hyperparameters: dict[int, Any] = {}  # live ones by id
        self._tensors: list[_ParameterTensor] = []
        self._schedulers: list[LiveEntry] = []
        self._same_groups: dict[int, bool | None] = {}  # by id of the optimizer; None if the source does not say

    def match(self, entry: LiveEntry) -> None:
        """Plan one optimizer."""
        optimizer, path = entry.value, entry.text
        below = self._entries.below(path)
        if not below:
            if not path or self._options.wants(path) or self._options.may_want(path):
                self._plan.add_missing([path or "the optimizer"])
            return
        self._taken.update(one.text for one in below)
        if path and self._matching.names.selects and not self._options.may_want(path):
            self._compare_unloaded(optimizer, path)
            return
        match = self._matched(optimizer, path)
        check_class(
            optimizer,
            self._matching.classes.get(path, ()),
            [group.settings for _, _, saved in match.saved for group in saved.groups],
            path,
        )
        self._compare_groups(optimizer, match)
        self._load(optimizer, match)

    def _compare_unloaded(self, optimizer: Any, path: str) -> None:
        """Find whether the groups of an optimizer that stays as it is are the source's: schedulers depend on that."""
        try:
            self._compare_groups(optimizer, self._matched(optimizer, path))
        except StateExchangeError:  # what does not fit is not loaded: then nothing is known of its groups
            self._same_groups[id(optimizer)] = None

    def _matched(self, optimizer: Any, path: str) -> _Match:
        """Find what the source has for each parameter of an optimizer; the first rank that has it counts."""
        if self._names is None:
            self._names = parameter_names(self._state)
        live = LiveParameters(optimizer, self._names, path)
        match = _Match(path, live)
        flat_names = {*live.in_modules(), *live.in_state()}
        for rank, entries in self._entries.of_each_rank():
            if entries.has_below(path):
                saved = read_optimizer(entries, path, optimizer, flat_names)
                if saved is None:
                    expect(False, "an optimizer", entries.value(path, {}) if entries.by_key(path) else None, path)
                assert saved is not None
                # Numbers are those of a rank's own parameters: this rank's, if it has some.
                if not (match.saved and saved.by_number and self._entries.is_own):
                    match.saved.append((rank, entries, saved))
        saved_names = join_numbered([saved for _, _, saved in match.saved], path)
        for rank, entries, saved in match.saved:
            labels = live.labels_of(saved, saved_names, self._new_names(path, saved), in_state=self._matching.has_tree)
            group_of = saved.group_of()
            for label in saved.labels:
                if label not in labels:
                    match.unexpected.setdefault(label)
                    continue
                found = _SavedParameter(rank, entries, saved, label, group_of[label])
                first = match.parameters.setdefault(labels[label], found)
                if first is not found:
                    self._compare(first, found, labels[label], path)
        return match

    def _new_names(self, path: str, saved: SavedOptimizer) -> Callable[[Sequence[str]], list[str]]:
        """Return the function that gives the names of parameters in the source those in the state."""
        names = self._matching.names

        def new_names(labels: Sequence[str]) -> list[str]:
            if not self._matching.has_tree:
                found = self._names_of_tensors(labels)
                if found is not None:
                    return found
            return list(map(new_name, labels))

        def new_name(label: str) -> str:
            new = names.name(label)
            if new != label or not names.renames:
                return new
            # Some patterns are for whole names: a name in a module is renamed as a part of the name of its state.
            begin = joined(path, "state.")
            whole = names.name(f"{begin}{label}.step")
            is_inside = whole.startswith(begin) and whole.endswith(".step")
            return whole[len(begin) : -len(".step")] if is_inside else label

        return new_names

    def _compare(self, first: _SavedParameter, other: _SavedParameter, label: str, path: str) -> None:
        """Note a parameter for which two ranks saved different hyperparameters, or states of different keys."""
        if self._entries.is_own or self._options.replicas == "root":
            return
        ranks = (first.rank, other.rank)
        if not are_equal(dict(first.group.settings), dict(other.group.settings)):
            self._plan.conflicts.setdefault(joined(path, "param_groups"), ranks)
        keys = [
            {one.keys_below(joined(path, f"state.{it.label}")) for one in it.saved.state.get(it.label, ())}
            for it in (first, other)
        ]
        if keys[0] != keys[1]:
            self._plan.conflicts.setdefault(joined(path, f"state.{label}"), ranks)

    def _compare_groups(self, optimizer: Any, match: _Match) -> None:
        """Find whether each parameter lies in the group of the same number in the state and in the source."""
        if not all(saved.has_groups for _, _, saved in match.saved):
            self._same_groups[id(optimizer)] = None
            return
        is_same = True
        labels = iter(match.live.by_label)
        for number, group in enumerate(optimizer.param_groups):
            for label in (next(labels) for _ in group["params"]):
                found = match.parameters.get(label)
                is_same &= found is not None and found.number == number
                is_same &= found is not None and len(found.saved.groups) == len(optimizer.param_groups)
        self._same_groups[id(optimizer)] = is_same

    def _load(self, optimizer: Any, match: _Match) -> None:
        path, plan = match.path, self._plan
        groups: list[dict[str, Any] | None] = []
        states: dict[Any, Any] = {}
        labels = iter(match.live.by_label)
        empty = [group for group in match.saved[0][2].groups if not group.labels]
        num_empty = 0
        for index, group in enumerate(optimizer.param_groups):
            of_group = {next(labels): parameter for parameter in group["params"]}
            settings = self._settings(of_group, match, empty[num_empty : num_empty + 1], index)
            num_empty += not of_group
            groups.append(
                None if settings is None else self._group(group, settings, joined(path, f"param_groups.{index}"))
            )
            new = groups[-1] or group
            on_host = not (new.get("fused") or new.get("capturable"))
            for label, parameter in of_group.items():
                found = match.parameters.get(label)
                is_saved = found is not None and found.label in found.saved.state
                if is_saved and self._wants_state(found, label, parameter, optimizer):
                    states[parameter] = self._state_of(found, label, match.live.by_label, optimizer, on_host=on_host)
        dropped = self._dropped(optimizer, match, states)
        self._shared(optimizer, match, states)
        if match.live.parameters and not match.live.are_named and not match.parameters and match.unexpected:
            plan.nameless.add(path)
        missing = [
            joined(path, f"state.{label}")
            for label in match.live.by_label
            if label not in match.parameters and self._wants(path, label)
        ]
        plan.add_missing(missing)
        plan.parameters.update(missing)
        plan.unexpected += [joined(path, f"state.{label}") for label in match.unexpected if self._wants(path, label)]
        if match.saved[0][2].has_groups and num_empty != len(empty):
            name = joined(path, "param_groups (without parameters)")
            if num_empty > len(empty):
                plan.add_missing([name], stateful=False)
            else:
                plan.unexpected.append(name)
        more = self._more(optimizer, match)
        install = functools.partial(install_optimizer, optimizer, groups, states, dropped)
        plan.callbacks.append(functools.partial(load_object, optimizer, install, more, path))

    def _wants(self, path: str, label: str) -> bool:
        return self._options.wants(joined(path, f"state.{label}")) or self._options.wants(
            joined(path, f"param_groups.{label}")
        )

    def _wants_state(self, found: _SavedParameter, label: str, parameter: Any, optimizer: Any) -> bool:
        """Whether the state of a parameter is loaded: if anything in it is included, and nothing excluded."""
        if not self._matching.names.selects:
            return True
        saved = found.saved
        begin, old = joined(saved.path, f"state.{label}"), joined(saved.path, f"state.{found.label}")
        live = optimizer.state.get(parameter)
        keys = {*live} if isinstance(live, Mapping) else set()
        for entry in saved.state.get(found.label, ()):
            inside = entry.keys_below(old)
            keys.update(inside[:1] if inside else ())
        return self._options.wants_object([begin, *(f"{begin}.{key}" for key in keys)])

    def _settings(
        self, of_group: Mapping[str, Any], match: _Match, empty: Sequence[SavedGroup], index: int
    ) -> Mapping[str, Any] | None:
        """Return the hyperparameters that the source has for a live group; None if that stays as it is.

        Raises:
            InvalidArgumentError: they differ between the parameters of the group.
        """
        path = match.path
        if not of_group:
            return empty[0].settings if empty and self._options.wants(joined(path, "param_groups")) else None
        found: tuple[str, SavedGroup] | None = None
        for label in of_group:
            saved = match.parameters.get(label)
            if (
                saved is None
                or not saved.group.settings
                or not self._options.wants(joined(path, f"param_groups.{label}"))
            ):
                continue
            if found is None:
                found = label, saved.group
            elif saved.group is not found[1] and not are_equal(dict(found[1].settings), dict(saved.group.settings)):
                raise _differing(joined(path, f"param_groups.{index}"), found, (label, saved.group))
        return None if found is None else found[1].settings

    def _group(self, live: Mapping[str, Any], settings: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Return the new hyperparameters of a group."""
        found = hyperparameters(live)
        for key, value in settings.items():
            refuse_opaque(key, path)
            own = found.get(key)
            is_first = id(own) not in self._hyperparameters  # torch gives groups one tensor as the default lr
            self._hyperparameters[id(own)] = own
            found[key] = self._filler.fill(value, joined(path, key), Place(own, is_filled=is_first))
        return found

    def _state_of(
        self, found: _SavedParameter, label: str, parameters: Mapping[str, Any], optimizer: Any, *, on_host: bool
    ) -> Any:
        """Return a parameter's state; torch keeps ``step`` on the CPU unless it is fused or capturable."""
        path, parameter = found.saved.path, parameters[label]
        where = joined(path, f"state.{label}")
        live = optimizer.state.get(parameter)
        of_label = found.saved.state[found.label]
        saved = found.entries.built(of_label, {} if live is None else live, joined(path, f"state.{found.label}"))
        self._plan.add_loaded(of_label)
        place = Place(live, parameter=parameter, parameter_name=label)
        if not isinstance(saved, Mapping):
            return self._filler.fill(saved, where, place)
        own = live if isinstance(live, Mapping) else {}
        new: dict[Any, Any] = {}
        for key, entry in saved.items():
            refuse_opaque(key, where)
            if isinstance(entry, SavedTensor):
                state = _ParameterTensor(found, entry.name, own.get(key), label, parameters, joined(where, key))
                self._tensors.append(state)
            is_step = key == "step"
            at = Place(own.get(key), True, parameter, label, is_step, is_step and on_host)
            new[key] = self._filler.fill(entry, joined(where, key), at)
        return self._filler.fill(new, where, Place(live)) if live is not None else new

    def _names_of_tensors(self, labels: Sequence[str]) -> list[str] | None:
        """Return the state's names of the tensors that the source calls so after one prefix, that of their module.

        None if it has not all of them, or more than one module has.
        """
        new = {entry.name: entry.text for entry in self._entries if isinstance(entry.leaf, SavedTensor)}
        ends = [name.removesuffix(labels[0]) for name in new if f".{name}".endswith(f".{labels[0]}")] if labels else []
        ways = [begin for begin in ends if all(begin + label in new for label in labels)]
        return [new[ways[0] + label] for label in labels] if len(ways) == 1 else None

    def check_shapes(self) -> None:
        """Raise InvalidArgumentError for a tensor of a parameter's state that is another parameter's.

        It fits if it is a scalar, has the parameter's shape or one that torch broadcasts to it, or the shape that it has
        now. Of any other shape it is refused if that is another parameter's, or has as many dims as the parameter. A
        parameter that is loaded by its name itself, and so has the source's shape, may have state of any.
        """
        loaded = {id(target.live) for target in self._plan.targets}
        for state in self._tensors if self._matching.shape_of is not None else ():
            parameter = state.parameters[state.label]
            if id(parameter) in loaded and not state.found.saved.by_number:
                continue
            shape, expected = self._matching.shape_of(state.name), tuple(parameter.shape)
            if shape in ((), expected) or (is_tensor(state.live) and tuple(state.live.shape) == shape):
                continue
            if len(shape) == len(expected):
                fits = all(size in (1, other) for size, other in zip(shape, expected, strict=True))
            else:
                fits = all(tuple(one.shape) != shape for one in state.parameters.values())
            if not fits:
                text = (
                    f"this does not fit its parameter {state.label!r}: give the optimizer the parameters in the order of "
                    "the job that saved it, build the model as it was saved, or leave this out by exclude"
                )
                raise InvalidArgumentError(text, name=state.path, expected=expected, found=shape)

    def _shared(self, optimizer: Any, match: _Match, states: dict[Any, Any]) -> None:
        """Plan the state that is not of a parameter."""
        _, entries, saved = match.saved[0]
        labels = {*saved.labels}
        live = {str(key): key for key in optimizer.state if not is_torch(key)}
        for label, of_label in saved.state.items():
            key = label.key if isinstance(label, OtherKey) else label
            path = joined(match.path, f"state.{key}")
            if label in labels or not self._options.wants(path):
                continue
            if not isinstance(label, OtherKey):
                if label not in live:
                    text = (
                        "whether the key of this state was a text or something else is not known: give the state of the "
                        "optimizer this key, or leave the optimizer out"
                    )
                    raise InvalidArgumentError(text, name=path)
                key = live[label]
            refuse_opaque(key, path)
            value = entries.built(of_label, optimizer.state.get(key), path)
            self._plan.add_loaded(of_label)
            states[key] = self._filler.fill(value, path, Place(optimizer.state.get(key)))

    def _dropped(self, optimizer: Any, match: _Match, states: Mapping[Any, Any]) -> list[Any]:
        """Return the keys whose state the source does not have, although it has the parameter."""
        dropped = []
        for label, parameter in match.live.by_label.items():
            found = match.parameters.get(label)
            is_saved = found is None or found.label in found.saved.state
            if not is_saved and parameter not in states and self._wants_state(found, label, parameter, optimizer):
                dropped.append(parameter)
        if match.parameters.keys() >= match.live.by_label.keys() and not self._matching.names.selects:
            dropped += [key for key in optimizer.state if not is_torch(key) and key not in states]
        return dropped

    def _more(self, optimizer: Any, match: _Match) -> dict[str, Any]:
        """Return the saved entries of a state dict beside ``state`` and ``param_groups``; others join the plan."""
        path, (_, entries, saved) = match.path, match.saved[0]
        live = state_of_optimizer(optimizer, path)["more"]
        wants = self._options.wants
        self._plan.add_missing(
            [joined(path, key) for key in live if key not in saved.more and wants(joined(path, key))], stateful=False
        )
        self._plan.unexpected += [
            joined(path, key) for key in saved.more if key not in live and wants(joined(path, key))
        ]
        found = {}
        for key, value in live.items():
            where = joined(path, key)
            if key in saved.more and wants(where):
                built = entries.built(saved.more[key], value, where)
                found[key] = self._filler.fill(built, where, Place(value, is_filled=False))
        return found

    # Schedulers

    def add_scheduler(self, entry: LiveEntry, new: Any) -> None:
        """Note an object that is loaded, if it has an optimizer."""
        if is_optimizer(getattr(entry.value, "optimizer", None)):
            self._schedulers.append(entry)

    def check_schedulers(self) -> None:
        """Raise InvalidArgumentError for a scheduler whose values would be those of other param groups.

        It has lists of values by the number of a group, and optimizers are loaded by parameter.
        """
        for entry in self._schedulers:
            optimizer = entry.value.optimizer
            same = self._same_groups.get(id(optimizer), True)
            if same or (same is None and len(optimizer.param_groups) == 1):
                continue
            raise InvalidArgumentError(
                "the source has values here by the number of a param group, and the groups of the state are others, or in "
                "another order: make the groups of the job that saved them, or leave the scheduler out by exclude",
                name=entry.text,
            )


def _differing(path: str, one: tuple[str, SavedGroup], other: tuple[str, SavedGroup]) -> StateExchangeError:
    """Return the error for a live group whose parameters have different hyperparameters in the source."""
    new, old = one[1].settings, other[1].settings
    key = next(key for key in {**new, **old} if not are_equal(new.get(key), old.get(key)))
    if isinstance(new.get(key), SavedTensor) and isinstance(old.get(key), SavedTensor):
        text = (
            f"the source has {key!r} as a tensor for each parameter, and whether those of one group are equal is not "
            "known: save what the optimizer's state_dict() returns, or a number instead"
        )
        return UnsupportedError(text, name=path)
    text = (
        f"this param group of the state joins {one[0]!r} and {other[0]!r}, which were saved with different values of "
        f"{key!r}: make the param groups of the job that saved them"
    )
    return InvalidArgumentError(text, name=path, expected=new.get(key), found=old.get(key))
