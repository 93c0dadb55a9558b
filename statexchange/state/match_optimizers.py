"""Match the optimizers and schedulers of a live state with those of a source, parameter by parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from statexchange.errors import InvalidArgumentError, StateExchangeError, type_text
from statexchange.sharding.paths import joined
from statexchange.state.entries import Entries, SavedTensor, are_equal
from statexchange.state.flatten import LiveEntry, LiveState, ParameterName, parameter_names
from statexchange.state.live_parameters import LiveParameters
from statexchange.state.load_plan import Filler, expect
from statexchange.state.matching import Matching
from statexchange.state.optimizer_plan import OptimizerPlan, ParameterTensor, SavedParameter
from statexchange.state.optimizers import class_name, hyperparameters, is_optimizer
from statexchange.state.saved_optimizer import join_numbered, read_optimizer
from statexchange.tensors import is_tensor

__all__ = ["OptimizerMatcher"]

# What schedulers add to param groups: it says nothing of the optimizer's class.
_OF_SCHEDULERS = {"initial_lr", "swa_lr", "min_lr", "max_lr", "base_momentum", "max_momentum"}


class OptimizerMatcher:
    """Plans the optimizers of a state, and then looks whether its schedulers fit them."""

    def __init__(self, live: LiveState, entries: Entries, matching: Matching, filler: Filler, taken: set[str]) -> None:
        self._live = live
        self._entries = entries
        self._matching = matching
        self._filler = filler
        self._taken = taken
        self._names: Mapping[int, ParameterName] | None = None
        self._texts: dict[str, str] | None = None  # of the source's tensors, by their names
        self._tensors: list[ParameterTensor] = []
        self._schedulers: list[LiveEntry] = []
        # By id of the list of groups, which an optimizer and its wrappers share; None if the source does not say.
        self._same_groups: dict[int, bool | None] = {}

    def match(self, entry: LiveEntry) -> None:
        """Plan one optimizer."""
        optimizer, path, names = entry.value, entry.text, self._matching.names
        below = self._entries.below(path)
        if not below or self._entries.by_key(path) is None:  # names alone are no optimizer's
            if not path or names.options.may_want(path):
                self._filler.plan.add_missing([path or "the optimizer"])
            return
        self._taken.update([one.text for one in below])
        if path and names.selects and not names.options.may_want(path):
            self._compare_unloaded(optimizer, path)
            return
        plan = self._matched(optimizer, path)
        settings = [group.settings for saved in plan.saved for group in saved.groups]
        _check_class(optimizer, self._matching.classes.get(path, ()), settings, path)
        self._same_groups[id(optimizer.param_groups)] = plan.has_same_groups()
        plan.add()
        self._tensors += plan.tensors

    def _compare_unloaded(self, optimizer: Any, path: str) -> None:
        """Find whether the groups of an optimizer that stays as it is are the source's: schedulers depend on that."""
        try:
            self._same_groups[id(optimizer.param_groups)] = self._matched(optimizer, path).has_same_groups()
        except InvalidArgumentError:  # its parameters or groups are others
            self._same_groups[id(optimizer.param_groups)] = False
        except StateExchangeError:  # it cannot be read: then nothing is known of its groups
            self._same_groups[id(optimizer.param_groups)] = None

    def _matched(self, optimizer: Any, path: str) -> OptimizerPlan:
        """Find what the source has for each parameter of an optimizer; the first rank that has it counts."""
        if self._names is None:
            self._names = parameter_names(self._live)
        live = LiveParameters(optimizer, self._names, path)
        plan = OptimizerPlan(optimizer, path, live, self._filler, self._matching.names)
        flat_names = {*live.in_modules, *live.in_state}
        for rank, entries in self._entries.of_each_rank:
            if not entries.has_below(path):
                continue
            saved = read_optimizer(entries, rank, path, optimizer, flat_names)
            if saved is None:
                # Another rank's value of another kind does not count, but tensors of it are not dropped unsaid.
                apart = self._entries.is_own or path in self._entries.conflicts or entries.at(path) is not None
                if not (plan.saved and apart):
                    expect(False, "an optimizer", entries.value(path, {}) if entries.by_key(path) else None, path)
            # Numbers are those of a rank's own parameters: this rank's, if it has some.
            elif not (plan.saved and saved.by_number and self._entries.is_own):
                plan.saved.append(saved)
        param_names = join_numbered(plan.saved, path)
        for saved in plan.saved:
            new_names = self._new_names(path, live.in_state)
            labels = live.labels_of(saved, param_names, new_names, in_state=self._matching.has_tree)
            for number, group in enumerate(saved.groups):
                for label in group.labels:
                    if label in labels:
                        self._add(plan, SavedParameter(saved, label, number), labels[label])
                    else:
                        plan.unexpected.setdefault(label)
        return plan

    def _add(self, plan: OptimizerPlan, parameter: SavedParameter, label: str) -> None:
        """Add what a rank has for a live parameter, and note where it and a rank before it differ.

        A rank without state of it, as one that updates other parameters, says nothing of its state.
        """
        first = plan.parameters.setdefault(label, parameter)
        if first is not parameter and self._entries.is_own:
            return
        with_state = plan.with_state.setdefault(label, parameter) if parameter.has_state else parameter
        if first is parameter or self._matching.names.options.replicas == "root":
            return
        rank, path, conflicts = parameter.saved.rank, first.saved.path, self._filler.plan.conflicts
        if not are_equal(dict(first.group.settings), dict(parameter.group.settings)):
            conflicts.setdefault(joined(path, "param_groups"), (first.saved.rank, rank))
        if with_state.keys() != parameter.keys():
            conflicts.setdefault(joined(path, f"state.{label}"), (with_state.saved.rank, rank))

    def _new_names(self, path: str, in_state: Collection[str]) -> Callable[[Sequence[str]], list[str]]:
        """Return the function that gives the names of parameters in the source those in the state, `in_state`."""
        names = self._matching.names

        def new_name(label: str) -> str:
            new = names.name(label)
            if new != label or not names.renames:
                return new
            # Some patterns are for whole names: a name in a module is renamed as a part of the name of its state.
            begin = joined(path, "state.")
            whole = names.name(f"{begin}{label}.step")
            is_inside = whole.startswith(begin) and whole.endswith(".step")
            return whole[len(begin) : -len(".step")] if is_inside else label

        def new_names(labels: Sequence[str]) -> list[str]:
            of_tensors = None if self._matching.has_tree else self._names_of_tensors(labels)
            if of_tensors is None or not any(name in in_state for name in of_tensors):  # as of a wrapped model
                return list(map(new_name, labels))
            return of_tensors

        return new_names

    def _names_of_tensors(self, labels: Sequence[str]) -> list[str] | None:
        """Return the state's names of the tensors that the source calls so after one prefix, that of their module.

        None if it has not all of them, or more than one module has.
        """
        if self._texts is None:
            self._texts = {entry.name: entry.text for entry in self._entries if isinstance(entry.leaf, SavedTensor)}
        new = self._texts
        ends = [name.removesuffix(labels[0]) for name in new if f".{name}".endswith(f".{labels[0]}")] if labels else []
        prefixes = [begin for begin in ends if all(begin + label in new for label in labels)]
        return [new[prefixes[0] + label] for label in labels] if len(prefixes) == 1 else None

    def check_shapes(self) -> None:
        """Raise InvalidArgumentError for a tensor of a parameter's state that is another parameter's.

        It fits if it is a scalar, or has the parameter's shape, one that torch broadcasts to it, that of all parameters
        as one vector (LBFGS), or the shape that it has now. Any other shape is refused if it is another parameter's, or
        has as many dims as the parameter. Where the parameter is loaded by its name, too, it has the source's shape,
        and its state may have any.
        """
        loaded = {id(target.live) for target in self._filler.plan.targets}
        if self._matching.names.options.layout is not None:  # plain live tensors may be parts of whole ones
            return
        for tensor in self._tensors:
            parameter = tensor.parameters[tensor.label]
            if id(parameter) in loaded and not tensor.by_number:
                continue
            shape, expected = tensor.saved.shape, tuple(parameter.shape)
            present = tuple(tensor.live.shape) if is_tensor(tensor.live) else expected
            if shape in ((), expected, present):
                continue
            if shape == (sum(math.prod(one.shape) for one in tensor.parameters.values()),):
                continue
            if len(shape) == len(expected):
                fits = all(size in (1, other) for size, other in zip(shape, expected, strict=True))
            else:
                fits = all(tuple(one.shape) != shape for one in tensor.parameters.values())
            if not fits:
                text = (
                    f"this does not fit its parameter {tensor.label!r}: give the optimizer the parameters in the order "
                    "of the job that saved it, build the model as it was saved, or leave this out by exclude"
                )
                raise InvalidArgumentError(text, name=tensor.path, expected=expected, found=shape)

    def add_scheduler(self, entry: LiveEntry) -> None:
        """Note an object that is loaded, if it has an optimizer."""
        if is_optimizer(getattr(entry.value, "optimizer", None)):
            self._schedulers.append(entry)

    def check_schedulers(self) -> None:
        """Raise InvalidArgumentError for a scheduler whose values would be those of other param groups.

        It has lists of values by the number of a group, and optimizers are loaded by parameter.
        """
        for entry in self._schedulers:
            groups = entry.value.optimizer.param_groups
            # Of an optimizer that is not in the state nothing is known, and torch's own load_state_dict asks nothing.
            same = self._same_groups.get(id(groups), True)
            if same or (same is None and len(groups) == 1):
                continue
            raise InvalidArgumentError(
                "the source has values here by the number of a param group, and the groups of the state are others, or "
                "in another order: make the groups of the job that saved them, or leave the scheduler out by exclude",
                name=entry.text,
            )


def _check_class(optimizer: Any, classes: Collection[str], groups: Iterable[Mapping[str, Any]], path: str) -> None:
    """Raise InvalidArgumentError if the state of another class of optimizers was saved at `path`.

    An equal qualified name is enough. Else the name without the module must be equal, as a script is the module
    ``__main__`` when it is run and another when it is imported, and the hyperparameters of one side must contain those
    of the other. Of a source without classes only the hyperparameters are compared.

    Args:
        optimizer: the live optimizer.
        classes: the qualified names that ranks have recorded; none if the source does not record them.
        groups: the saved param groups.
        path: the path of the optimizer in the state.
    """
    live = class_name(optimizer)
    if live in classes:
        return
    live_names = _hyperparameter_names(optimizer.param_groups)
    saved_names = _hyperparameter_names(groups)
    has_name = not classes or live.rpartition(".")[2] in {name.rpartition(".")[2] for name in classes}
    if has_name and (live_names <= saved_names or saved_names <= live_names):
        return
    lacking = ", ".join(sorted(saved_names - live_names))
    leave = f", or pass exclude={path!r} to leave it as it is" if path else ""
    raise InvalidArgumentError(
        f"this is the state of another optimizer than {type_text(optimizer)}: make the optimizer that was saved{leave}",
        name=path or None,
        expected=min(classes, default=f"hyperparameters {lacking}"),
        found=live,
    )


def _hyperparameter_names(groups: Iterable[Mapping[str, Any]]) -> set[str]:
    return {name for group in groups for name in hyperparameters(group)} - _OF_SCHEDULERS
