"""Match the optimizers and schedulers of a live state with those of a source, parameter by parameter.

Each parameter gets the state that the source has for it, and each live group the hyperparameters that its parameters
have in the source, in whatever groups they were::

    source                                        live groups          what is loaded
    groups ["a", "b"] lr 0.1, ["c"] lr 0.2        ["c"], ["a", "b"]    lr 0.2 and 0.1, the state of each parameter
    groups ["a"] lr 0.1, ["b"] lr 0.2             ["a", "b"]           refused: one group cannot have both

A source without names, as an optimizer's own `state_dict()`, has numbers. They go by order, as in torch, where the
groups have the same sizes on both sides, and are refused where they have not: a permutation among parameters of one
shape does not show. Groups without parameters go by their order, too.

A scheduler has values by the number of a group, so that it is loaded only if each parameter lies in the group of the
same number on both sides.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from statexchange.errors import (
    CorruptError,
    InvalidArgumentError,
    StateExchangeError,
    excerpt,
    type_text,
)
from statexchange.sharding.paths import joined, module_prefix
from statexchange.state.entries import (
    ABSENT,
    Entry,
    SavedGroup,
    SavedOptimizer,
    SavedTensor,
    are_equal,
    first_keys,
    join_numbered,
    read_optimizer,
    refuse_opaque,
)
from statexchange.state.load_plan import PLAIN, LoadPlan, Place, named, other_kind_error
from statexchange.state.tree import LiveEntry, LiveState, ParameterName, parameter_names, with_types_of
from statexchange.state.types import Leaf, Optimizer
from statexchange.state.units import (
    bare_name,
    class_name,
    hyperparameters,
    install_optimizer,
    is_optimizer,
    load_object,
    named_parameters,
    names_of_groups,
    state_of_optimizer,
)
from statexchange.tensors import is_tensor, is_torch

# What schedulers add to param groups: it says nothing of the optimizer's class.
_OF_SCHEDULERS = {"initial_lr", "swa_lr", "min_lr", "max_lr", "base_momentum", "max_momentum"}


# The live parameters by what a source may call them


class _LiveParameters:
    """The parameters of a live optimizer, by what a source may call them.

    Attributes:
        optimizer: the optimizer.
        by_label: the parameters by their names in the state, or all by number if one is not in the state.
        by_group: the same for each group.
        in_state: the label of each name in the state, of tied parameters all; None for a name that two have.
        in_modules: the label of each name in a module; None for a name that two parameters have.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, ParameterName], path: str) -> None:
        self.optimizer = optimizer
        self._path = path
        in_state: dict[int, str] = {}
        for key, live_name in names.items():
            in_state[key] = live_name.in_state
        # A parameter without a name, or two with one: then none goes by name.
        self.by_label = named_parameters(optimizer, in_state)
        self.by_group: list[dict[str, Leaf]] = []
        items = iter(self.by_label.items())
        for group in optimizer.param_groups:
            self.by_group.append(dict(itertools.islice(items, len(group["params"]))))
        self.in_state: dict[str, str | None] = {}
        self.in_modules: dict[str, str | None] = {}
        for label, parameter in self.by_label.items():
            name = names.get(id(parameter))
            if name is None or name.in_state != label:
                continue
            for inner in name.in_modules:
                if self.in_modules.setdefault(inner, label) != label:
                    self.in_modules[inner] = None
            for text in name.texts:
                if self.in_state.setdefault(text, label) != label:
                    self.in_state[text] = None

    def is_name(self, text: str) -> bool:
        """Whether a text is the name of a parameter, in the state or in a module."""
        return text in self.in_state or text in self.in_modules

    def labels_of(self, saved: SavedOptimizer, names: Sequence[str], *, has_tree: bool) -> dict[str, str]:
        """Return the live label of each of the source's; of those that the live optimizer has.

        Args:
            saved: the optimizer in the source.
            names: the state's names of the source's parameters; of numbered ones their ``param_names``, if any.
            has_tree: whether the source has the names in the whole state, as our own saves, or those in a module.

        Raises:
            InvalidArgumentError: which parameter is meant is not known.
        """
        if saved.by_number:
            if not saved.has_integers:
                self._check_not_names(saved.labels)
            return self._by_number(saved, names)
        labels_by_name = self.in_state
        if not has_tree and labels_by_name.keys().isdisjoint(names):
            labels_by_name = self.in_modules
        prefix = ""
        if labels_by_name.keys().isdisjoint(names):
            prefix = module_prefix(names)  # DistributedDataParallel's
        labels: dict[str, str] = {}
        for label, text in zip(saved.labels, names, strict=True):
            name = text.removeprefix(prefix)
            live = labels_by_name.get(name)
            if live is not None:
                labels[label] = live
            elif name in labels_by_name:
                # Its value is None: two parameters have this name.
                raise InvalidArgumentError(
                    f"the source has this optimizer's parameters by name, and two of the state's are called {name!r} "
                    "in their modules: save the optimizer's own state_dict(), or leave the optimizer out by exclude",
                    name=self._path,
                )
        return labels

    def _check_not_names(self, numbers: Sequence[str]) -> None:
        """Raise InvalidArgumentError if numbers of the source, as texts, may be names, as those of a ParameterList."""
        for names in (self.in_modules, self.in_state):
            if {*names} == {*numbers} and [*names] != [*numbers]:
                raise InvalidArgumentError(
                    f"whether the source has {excerpt([*numbers], 80)} as numbers or as names of the parameters is not "
                    "known: save the optimizer itself, with its model, or give it the parameters in this order",
                    name=self._path,
                )

    def _by_number(self, saved: SavedOptimizer, names: Sequence[str]) -> dict[str, str]:
        """Return the live label of each number: by the source's names of parameters, or else by order."""
        labels = saved.labels
        if names:
            if len(names) != len(labels):
                text = f"the param groups of the source have {len(labels)} parameters, and {len(names)} param_names"
                raise CorruptError(f"{text}: leave the optimizer out by exclude", name=self._path)
            by_name = self._by_names(names)
            if by_name is not None:
                return dict(zip(labels, by_name, strict=True))
        # Where no names help, the order counts, as in torch's own load_state_dict: groups of equal sizes are trusted.
        live_sizes = list(filter(None, map(len, self.by_group)))
        sizes = list(map(len, saved.labels_by_group))
        if sizes != live_sizes:
            text = (
                f"the source has this optimizer's parameters by number, in param groups of {sizes}, and the "
                f"state's groups have {live_sizes}: make the groups of the job that saved it, or leave the optimizer "
                "and its schedulers out"
            )
            raise InvalidArgumentError(text, name=self._path)
        return dict(zip(labels, self.by_label, strict=True))

    def _by_names(self, names: Sequence[str]) -> list[str] | None:
        """Return the live label of each name; None if the live parameters have no names, or others altogether.

        Raises:
            InvalidArgumentError: the names are those of other parameters, or of two.
        """
        # The names that the user gave the groups come before those of modules.
        of_groups = names_of_groups(self.optimizer)
        other_names: dict[str, str | None] = self.in_modules
        if of_groups is not None:
            other_names = {}
            for name, label in zip(map(bare_name, of_groups), self.by_label, strict=True):
                # Names that occur twice are those of no parameter.
                other_names[name] = None if name in other_names else label
        knows_some = of_groups is not None
        for labels_by_name in (self.in_state, other_names):
            # Parts that wrappers put into names do not count.
            labels = [labels_by_name.get(name) or labels_by_name.get(bare_name(name)) for name in names]
            matched = list(filter(None, labels))
            if len({*matched}) == len(names) == len(self.by_label):
                return matched
            knows_some = knows_some or not labels_by_name.keys().isdisjoint(map(bare_name, names))
        if not knows_some:
            return None
        raise InvalidArgumentError(
            f"the state names the parameters of this optimizer {excerpt(sorted(other_names), 80)}, and the source "
            f"{excerpt(sorted(names), 80)}, or two modules of the state have the source's names for others: give it "
            "the parameters and the names of the job that saved it, or leave it out by exclude",
            name=self._path,
        )


# Matching


class _SavedParameter(NamedTuple):
    """One live parameter in a source.

    Attributes:
        group_number: the number of its group on the first rank that has it.
        group: this group.
        saved: the optimizer on the first rank that has state of it, or else on the first rank that has it.
        label: its label there.
        entries: those of its state; none if the source has no state of it.
    """

    group_number: int
    group: SavedGroup
    saved: SavedOptimizer
    label: str
    entries: Sequence[Entry]

    def state_keys(self) -> set[Leaf]:
        """Return the first keys of its state."""
        begin = joined(self.saved.path, f"state.{self.label}")
        return {*first_keys(self.entries, begin)} - {ABSENT}


class OptimizerMatcher:
    """Plans the optimizers of a state, and then looks whether its schedulers fit them."""

    def __init__(self, live: LiveState, plan: LoadPlan) -> None:
        self._live = live
        self._plan = plan
        self._matching = plan.matching
        self._entries = plan.matching.entries
        self._names: Mapping[int, ParameterName] | None = None
        self._texts: dict[str, str] | None = None  # of the source's tensors, by their names
        self._plans: list[_OptimizerPlan] = []  # of the optimizers that are loaded
        self._schedulers: list[LiveEntry] = []
        # By id of the list of groups, which an optimizer and its wrappers share; None if the source does not say.
        self._same_groups: dict[int, bool | None] = {}

    def match(self, entry: LiveEntry) -> None:
        """Plan one optimizer."""
        optimizer, path, options = entry.value, entry.text, self._matching.names.options
        is_wanted = not path or options.may_want(path)
        below = self._entries.below(path)
        by_key = None
        if below:
            by_key = self._entries.by_key(path)
        # Names alone are no optimizer's: they do not say where a parameter's name ends.
        if by_key is None:
            if is_wanted:
                self._plan.add_missing(path or "the optimizer")
            return
        # Also what is not loaded: the state has a place for it.
        for saved in below:
            self._plan.matched.add(saved.text)
        if not is_wanted:
            self._same_groups[id(optimizer.param_groups)] = self._same_groups_unloaded(optimizer, path, by_key)
            return
        plan = self._matched(optimizer, path, by_key)
        _check_class(optimizer, self._matching.classes.get(path, ()), plan.saved, path)
        self._same_groups[id(optimizer.param_groups)] = plan.has_same_groups()
        plan.add()
        self._plans.append(plan)

    def _same_groups_unloaded(self, optimizer: Optimizer, path: str, by_key: Mapping[Leaf, list[Entry]]) -> bool | None:
        """Whether the groups of an optimizer that stays as it is are the source's: schedulers depend on that."""
        try:
            return self._matched(optimizer, path, by_key).has_same_groups()
        except InvalidArgumentError:  # its parameters or groups are others
            return False
        except StateExchangeError:  # it cannot be read: then nothing is known of its groups
            return None

    def _matched(self, optimizer: Optimizer, path: str, by_key: Mapping[Leaf, list[Entry]]) -> _OptimizerPlan:
        """Find what the source has for each parameter of an optimizer; the first rank that has it counts."""
        if self._names is None:
            self._names = parameter_names(self._live.entries)
        live = _LiveParameters(optimizer, self._names, path)
        has_tree = self._matching.has_tree
        plan = _OptimizerPlan(optimizer, path, live, self._plan)
        for rank, entries in self._entries.of_each_rank:
            if not entries.has_below(path):
                continue
            of_rank: Mapping[Leaf, list[Entry]] | None = by_key
            if entries is not self._entries:
                of_rank = entries.by_key(path)
            groups = optimizer.param_groups
            saved = read_optimizer(entries, rank, path, of_rank, groups, live.is_name, has_tree=has_tree)
            if saved is None:
                # Another rank's value of another kind does not count, but tensors of it are not dropped unsaid.
                apart = self._entries.is_own or path in self._entries.conflicts or entries.at(path) is not None
                if not (plan.saved and apart):
                    value = None
                    if of_rank:
                        value = entries.value(path, {})
                    raise other_kind_error("an optimizer", value, path)
            # Numbers are those of a rank's own parameters: this rank's, if it has some.
            elif not (plan.saved and saved.by_number and self._entries.is_own):
                plan.saved.append(saved)
        param_names = join_numbered(plan.saved, path)
        for saved in plan.saved:
            # Numbers have no names but those of the groups, which any rank may have saved.
            texts = param_names if saved.by_number else saved.labels
            names = self._names_in_state(texts, path, live)
            labels = live.labels_of(saved, names, has_tree=has_tree)
            for number, group in enumerate(saved.groups):
                for label in group.labels:
                    if label not in labels:
                        plan.unexpected.setdefault(label)
                        continue
                    parameter = _SavedParameter(number, group, saved, label, saved.state.get(label, ()))
                    first = plan.parameters.setdefault(labels[label], parameter)
                    if first is not parameter and not self._entries.is_own:
                        self._add_of_other_rank(plan, first, parameter, labels[label])
        return plan

    def _add_of_other_rank(
        self, plan: _OptimizerPlan, first: _SavedParameter, parameter: _SavedParameter, label: str
    ) -> None:
        """Add what a further rank has for a live parameter, and note where it and the first rank differ.

        A rank without state of it, as one that updates other parameters, says nothing of its state.
        """
        if self._matching.names.options.replicas != "root":
            ranks, conflicts = (first.saved.rank, parameter.saved.rank), self._plan.conflicts
            if not are_equal(dict(first.group.settings), dict(parameter.group.settings)):
                conflicts.setdefault(joined(plan.path, "param_groups"), ranks)
            if first.entries and parameter.entries and first.state_keys() != parameter.state_keys():
                conflicts.setdefault(joined(plan.path, f"state.{label}"), ranks)
        if not first.entries:
            plan.parameters[label] = parameter._replace(group_number=first.group_number, group=first.group)

    def _names_in_state(self, labels: Sequence[str], path: str, live: _LiveParameters) -> Sequence[str]:
        """Return the state's names of parameters that the source calls by these."""
        if not self._matching.has_tree:
            of_tensors = self._names_of_tensors(labels)
            if not live.in_state.keys().isdisjoint(of_tensors):  # else those of a wrapped model
                return of_tensors
        names = self._matching.names
        if not names.changes_names:
            return labels
        begin, end = joined(path, "state."), ".step"
        new_names = []
        for label in labels:
            new = names.name(label)
            if new == label:
                # Some patterns are for whole names: a name in a module is renamed as a part of the name of its state.
                whole = names.name(f"{begin}{label}{end}")
                if whole.startswith(begin) and whole.endswith(end):
                    new = whole[len(begin) : -len(end)]
            new_names.append(new)
        return new_names

    def _names_of_tensors(self, labels: Sequence[str]) -> list[str]:
        """Return the state's names of the tensors that the source calls so after one prefix, that of their module.

        [] if it has not all of them, or more than one module has.
        """
        if self._texts is None:
            self._texts = {}
            for entry in self._entries:
                if isinstance(entry.leaf, SavedTensor):
                    self._texts[entry.name] = entry.text
        names: list[str] = []
        for name in self._texts:
            if labels and f".{name}".endswith(f".{labels[0]}"):
                begin = name.removesuffix(labels[0])
                of_module = [self._texts.get(begin + label, "") for label in labels]
                if "" not in of_module:
                    # Two modules have these names, and the source does not say which one the optimizer has.
                    if names:
                        return []
                    names = of_module
        return names

    def add_scheduler(self, entry: LiveEntry) -> None:
        """Note an object that is loaded, if it has an optimizer."""
        if is_optimizer(getattr(entry.value, "optimizer", None)):
            self._schedulers.append(entry)

    def check(self) -> None:
        """Raise InvalidArgumentError for state of another parameter, or of a scheduler with other param groups.

        Called after all is matched: a model may come after its optimizer in the state, and a scheduler before it.
        """
        if self._matching.names.options.layout is None:  # else plain live tensors may be parts of whole ones
            loaded = {id(target.live) for target in self._plan.targets}
            for plan in self._plans:
                plan.check_shapes(loaded)
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


def _fits(shape: tuple[int, ...], live: Leaf, parameter: Leaf, parameters: Collection[Leaf]) -> bool:
    """Whether a tensor may be state of its parameter, as far as shapes show that.

    It fits if it is a scalar, or has the parameter's shape, one that torch broadcasts to it, that of all parameters as
    one vector (LBFGS), or the shape that it has now. Any other shape is refused if it is another parameter's, or has as
    many dims as the parameter.
    """
    expected = tuple(parameter.shape)
    if shape in ((), expected) or (is_tensor(live) and shape == tuple(live.shape)):
        return True
    shapes = [tuple(other.shape) for other in parameters]
    if shape == (sum(map(math.prod, shapes)),):
        return True
    if len(shape) != len(expected):
        return shape not in shapes
    return all(size in (1, whole) for size, whole in zip(shape, expected, strict=True))


def _check_class(
    optimizer: Optimizer, classes: Collection[str], optimizers: Iterable[SavedOptimizer], path: str
) -> None:
    """Raise InvalidArgumentError if the state of another class of optimizers was saved at `path`.

    An equal qualified name is enough. Else the name without the module must be equal, as a script is the module
    ``__main__`` when it is run and another when it is imported, and the hyperparameters of one side must contain those
    of the other. Of a source without classes only the hyperparameters are compared.

    Args:
        optimizer: the live optimizer.
        classes: the qualified names that ranks have recorded; none if the source does not record them.
        optimizers: the optimizer as each rank saved it.
        path: the path of the optimizer in the state.
    """
    live = class_name(optimizer)
    if live in classes:
        return
    saved_names: set[str] = set()
    for saved in optimizers:
        for group in saved.groups:
            saved_names.update(group.settings)
    live_names: set[str] = set()
    for live_group in optimizer.param_groups:
        live_names.update(hyperparameters(live_group))
    saved_names -= _OF_SCHEDULERS
    live_names -= _OF_SCHEDULERS
    last_parts = {name.rpartition(".")[2] for name in classes}
    has_name = not classes or live.rpartition(".")[2] in last_parts
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


class _OptimizerPlan:
    """A live optimizer with what the source has for it.

    Attributes:
        path: its path.
        saved: the optimizer as each rank saved it, in the order of their claim.
        parameters: what the source has for each live parameter, by label.
        unexpected: the source's names of parameters that the live optimizer lacks.
    """

    def __init__(self, optimizer: Optimizer, path: str, live: _LiveParameters, plan: LoadPlan) -> None:
        self.path = path
        self.saved: list[SavedOptimizer] = []
        self.parameters: dict[str, _SavedParameter] = {}
        self.unexpected: dict[str, None] = {}
        self._tensors: list[tuple[SavedTensor, Leaf, str, str]] = []  # of parameters' states, as `check_shapes` says
        self._optimizer = optimizer
        self._live = live
        self._plan = plan
        self._options = plan.matching.names.options
        self._selects = plan.matching.names.selects
        self._begin = joined(path, "")
        self._states: dict[Leaf, Leaf] = {}  # the new states, by key
        self._dropped: list[Leaf] = []  # keys whose state the source does not have, although it has the parameter
        self._filled: dict[int, Leaf] = {}  # live hyperparameters by id

    def has_same_groups(self) -> bool | None:
        """Whether each parameter lies in the group of the same number on both sides.

        None if the source has the same parameters and no groups.
        """
        for saved in self.saved:
            if not saved.has_groups:
                if self.unexpected or len(self.parameters) < len(self._live.by_label):
                    return False
                return None
            if len(saved.groups) != len(self._live.by_group):
                return False
        for number, of_group in enumerate(self._live.by_group):
            for label in of_group:
                parameter = self.parameters.get(label)
                if parameter is None or parameter.group_number != number:
                    return False
        return True

    def add(self) -> None:
        """Add the optimizer to the plan of the load."""
        plan, live = self._plan, self._live
        groups: list[dict[str, Leaf] | None] = []
        empty = [group.settings for group in self.saved[0].groups if not group.labels]
        rest = iter(empty)
        for index, group in enumerate(self._optimizer.param_groups):
            of_group, path = live.by_group[index], f"{self._begin}param_groups.{index}"
            # A group without parameters has no names to go by: the order is all that is known.
            settings = self._settings(of_group, path) if of_group else next(rest, None)
            new = None
            if settings is not None and (of_group or self._wants("param_groups")):
                new = self._group(group, settings, path)
            groups.append(new)
            self._add_states(of_group, new or group)
        self._add_other_state()
        for label in filter(self._wants_parameter, self.unexpected):
            plan.unexpected.append(f"{self._begin}state.{label}")
        name, num_empty = f"{self._begin}param_groups (without parameters)", live.by_group.count({})
        if num_empty > len(empty) and self.saved[0].has_groups:
            plan.add_missing(name, stateful=False)
        elif num_empty < len(empty):
            plan.unexpected.append(name)
        more = self._more()
        # An optimizer of which nothing is loaded is not called: a loader may derive values from its state.
        if self._states or self._dropped or more or groups.count(None) < len(groups):
            install = functools.partial(install_optimizer, self._optimizer, groups, self._states, self._dropped)
            plan.callbacks.append(functools.partial(load_object, self._optimizer, install, more, self.path))

    def check_shapes(self, loaded: Collection[int]) -> None:
        """Raise InvalidArgumentError for a tensor that does not fit the parameter whose state it is.

        `loaded` has the ids of the tensors that are loaded. A parameter that is loaded by its name, too, has the
        source's shape, and its state may have any.
        """
        parameters = self._live.by_label
        for saved, live, label, path in self._tensors:
            parameter = parameters[label]
            if id(parameter) in loaded and not self.parameters[label].saved.by_number:
                continue
            if not _fits(saved.shape, live, parameter, parameters.values()):
                raise InvalidArgumentError(
                    f"this does not fit its parameter {label!r}: give the optimizer the parameters in the "
                    "order of the job that saved it, build the model as it was saved, or leave this out by exclude",
                    name=path,
                    expected=tuple(parameter.shape),
                    found=saved.shape,
                )

    # What is loaded

    def _wants(self, below: str) -> bool:
        return self._options.wants(self._begin + below)

    def _wants_parameter(self, label: str) -> bool:
        return self._wants(f"state.{label}") or self._wants(f"param_groups.{label}")

    def _wants_all(self, below: str, keys: Iterable[Leaf]) -> bool:
        """Whether what has these keys is loaded: if anything in it is included, and nothing excluded."""
        if not self._selects:
            return True
        names = [self._begin + below]
        for key in keys:
            names.append(f"{self._begin}{below}.{key}")
        return self._options.wants_object(names)

    def _wants_state(self, saved: _SavedParameter, label: str, live: Leaf) -> bool:
        """Whether the state of a parameter is loaded."""
        keys = saved.state_keys()
        if isinstance(live, Mapping):
            keys.update(live)
        return self._wants_all(f"state.{label}", keys)

    def _left_out(self, saved: _SavedParameter, kind: str) -> bool:
        """Whether a save was asked to leave out a parameter's state, "state.", or hyperparameters, "param_groups/"."""
        return self._plan.matching.leaves_out(joined(saved.saved.path, f"{kind}{saved.label}"))

    # Hyperparameters

    def _settings(self, of_group: Iterable[str], path: str) -> Mapping[str, Leaf] | None:
        """Return the hyperparameters that the source has for a live group; None if that stays as it is.

        Raises:
            InvalidArgumentError: they differ between the parameters of the group.
        """
        first: tuple[str, SavedGroup] | None = None
        for label in of_group:
            saved = self.parameters.get(label)
            if saved is None or not saved.group.settings:
                continue
            if self._plan.matching.left_out and self._left_out(saved, "param_groups/"):
                continue
            if self._selects and not self._wants_all(f"param_groups.{label}", saved.group.settings):
                continue
            if first is None:
                first = label, saved.group
            elif saved.group is not first[1] and not are_equal(dict(first[1].settings), dict(saved.group.settings)):
                raise _differing(path, first, (label, saved.group))
        if first is None:
            return None
        return first[1].settings

    def _group(self, live: Mapping[str, Leaf], settings: Mapping[str, Leaf], path: str) -> dict[str, Leaf]:
        """Return the new hyperparameters of a group."""
        self._plan.loaded.add(f"{self._begin}param_groups")  # where ranks may differ
        new = hyperparameters(live)
        for key, value in settings.items():
            if type(key) is not str:
                refuse_opaque(key, path)
            if isinstance(value, PLAIN):
                new[key] = value
                continue
            present = new.get(key)
            is_first = id(present) not in self._filled  # torch gives groups one tensor as the default lr
            self._filled[id(present)] = present
            new[key] = self._plan.fill(value, f"{path}.{key}", Place(present, is_filled=is_first))
        return new

    # State

    def _add_states(self, of_group: Mapping[str, Leaf], settings: Mapping[str, Leaf]) -> None:
        """Add the new states of the parameters of a group, which has these settings."""
        plan = self._plan
        # torch keeps the count of steps on the CPU unless the optimizer is fused or capturable.
        on_host = not (settings.get("fused") or settings.get("capturable"))
        for label, parameter in of_group.items():
            saved, live = self.parameters.get(label), self._optimizer.state.get(parameter)
            if saved is None:
                if self._wants_parameter(label):
                    plan.add_missing(f"{self._begin}state.{label}")
            elif not self._selects or self._wants_state(saved, label, live):
                if saved.entries:
                    place = Place(live, parameter=parameter, parameter_name=label)
                    self._states[parameter] = self._state_of(saved, place, on_host=on_host)
                elif not self._left_out(saved, "state."):
                    # The source has the parameter, which had made no step.
                    self._dropped.append(parameter)

    def _state_of(self, saved: _SavedParameter, place: Place, *, on_host: bool) -> Leaf:
        """Return the new state of a parameter."""
        label, live = place.parameter_name, place.live
        path = f"{self._begin}state.{label}"
        present: Mapping[Leaf, Leaf] = {}
        if isinstance(live, Mapping):
            present = live
        value = saved.saved.entries.built(
            saved.entries, {} if live is None else live, f"{self._begin}state.{saved.label}"
        )
        for entry in saved.entries:
            self._plan.loaded.add(entry.text)
        if not isinstance(value, Mapping):
            return self._plan.fill(value, path, place)
        new: dict[Leaf, Leaf] = {}
        for key, item in value.items():
            if type(key) is not str:
                refuse_opaque(key, path)
            where, live_item, is_step = f"{path}.{key}", present.get(key), key == "step"
            if isinstance(item, PLAIN):
                new[key] = item
                continue
            if isinstance(item, SavedTensor):
                self._tensors.append((item, live_item, label, where))
            at = Place(live_item, True, place.parameter, label, is_step, is_step and on_host)
            new[key] = self._plan.fill(item, where, at)
        if live is None or type(live) is dict:
            return new
        with named(path):
            return with_types_of(live, new)

    def _add_other_state(self) -> None:
        """Plan the state that is not of a parameter."""
        saved = self.saved[0]
        has_types = saved.labels and not saved.entries.keys_are_texts
        live: dict[Leaf, Leaf] = {}
        for live_key in self._optimizer.state:
            if not is_torch(live_key):
                live[str(live_key)] = live_key
        for saved_key, entries in saved.other_state.items():
            path = f"{self._begin}state.{saved_key}"
            if not self._wants(f"state.{saved_key}"):
                continue
            if not has_types and saved_key not in live:
                text = (
                    "whether the key of this state was a text or something else is not known: give the state of the "
                    "optimizer this key, or leave the optimizer out"
                )
                raise InvalidArgumentError(text, name=path)
            key: Leaf = live.get(saved_key, saved_key)
            refuse_opaque(key, path)
            self._states[key] = self._built(entries, Place(self._optimizer.state.get(key)), path)
        is_whole = not self._selects and not self._plan.matching.left_out
        if is_whole and self.parameters.keys() >= self._live.by_label.keys():
            for key in live.values():
                if key not in self._states:
                    self._dropped.append(key)

    def _more(self) -> dict[str, Leaf]:
        """Return the saved entries of a state dict beside ``state`` and ``param_groups``; others join the plan."""
        saved, plan = self.saved[0].more, self._plan
        live = state_of_optimizer(self._optimizer, self.path)["more"]
        more = {}
        for key in filter(self._wants, live):
            path = self._begin + key
            if key in saved:
                more[key] = self._built(saved[key], Place(live[key], is_filled=False), path)
            else:
                plan.add_missing(path, stateful=False)
        for key in filter(self._wants, saved):
            if key not in live:
                plan.unexpected.append(self._begin + key)
        return more

    def _built(self, entries: Sequence[Entry], place: Place, path: str) -> Leaf:
        """Return the value that entries of the first rank make at a path."""
        value = self.saved[0].entries.built(entries, place.live, path)
        for entry in entries:
            self._plan.loaded.add(entry.text)
        return self._plan.fill(value, path, place)


def _differing(path: str, first: tuple[str, SavedGroup], second: tuple[str, SavedGroup]) -> StateExchangeError:
    """Return the error for a live group whose parameters have different hyperparameters in the source."""
    settings, second_settings = first[1].settings, second[1].settings
    for key in (*settings, *second_settings):
        value, second_value = settings.get(key), second_settings.get(key)
        if not are_equal(value, second_value):
            break
    text = (
        f"this param group of the state joins {first[0]!r} and {second[0]!r}, which were saved with different values "
        f"of {key!r}, or with a tensor each: make the param groups of the job that saved them, or save a number"
    )
    return InvalidArgumentError(text, name=path, expected=value, found=second_value)
