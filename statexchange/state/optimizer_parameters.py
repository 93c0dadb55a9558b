"""Which parameter of a source's optimizer is which of a live one: by FQN, by ``param_names``, or by number.

What a source has is read from what its param groups list::

    params: ["model.0.weight"]      names in the whole state, as in a save of ours
    params: ["0.weight"]            FQNs in a module, as get_optimizer_state_dict returns them
    params: [0, 1]                  numbers, as an optimizer's own state_dict() has them
    "state.0.weight.exp_avg"        torch's flattened form: FQNs, and no groups
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from statexchange.errors import CorruptError, InvalidArgumentError, excerpt, type_text
from statexchange.sharding.paths import is_index, joined, module_prefix
from statexchange.state.entries import Entries, Entry, SavedTensor
from statexchange.state.tree import ParameterName
from statexchange.state.types import Leaf, Optimizer
from statexchange.state.units import bare_name, hyperparameters, names_of_groups, parameters_of

__all__ = ["LiveParameters", "OtherKey", "SavedGroup", "SavedOptimizer", "join_numbered", "read_optimizer"]

_GROUPS, _STATE = "param_groups", "state"


# The source's side


class SavedGroup(NamedTuple):
    """A param group in a source.

    Attributes:
        labels: its parameters, by name or number.
        settings: its hyperparameters.
    """

    labels: list[str]
    settings: Mapping[str, Leaf]


@dataclass(frozen=True, slots=True)
class OtherKey:
    """A key of state that is not a parameter's."""

    key: Leaf


@dataclass(slots=True)
class SavedOptimizer:
    """An optimizer's state in a source.

    Attributes:
        rank: the rank that saved it.
        entries: the entries of that rank.
        path: its path in the state.
        groups: the param groups; in torch's flattened form, which has none, one for each parameter.
        labels: the names or numbers of all parameters, in the order of the groups.
        sizes: the numbers of parameters of the groups that have some.
        names: the ``param_names`` of parameters that have numbers.
        state: the entries of each parameter's state by label, and of other state by its key.
        more: the entries of what its `state_dict` has besides, by key.
        has_groups: whether the source knows which parameters one group has.
        by_number: whether the labels are numbers.
        has_integers: whether some of them are integers, and not texts, which may be names, too.
    """

    rank: int
    entries: Entries
    path: str
    groups: list[SavedGroup] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    state: dict[str | OtherKey, list[Entry]] = field(default_factory=dict)
    more: dict[str, list[Entry]] = field(default_factory=dict)
    has_groups: bool = True
    by_number: bool = False
    has_integers: bool = False


def read_optimizer(
    entries: Entries,
    rank: int,
    path: str,
    by_key: Mapping[Leaf, list[Entry]] | None,
    live: LiveParameters,
    *,
    has_tree: bool,
) -> SavedOptimizer | None:
    """Return the optimizer at a path of a source; None if it is something else.

    Args:
        entries: those of one rank.
        rank: the rank.
        path: the path.
        by_key: its entries there, by their first key; None if keys are not known.
        live: the live parameters, which show what the source's keys were.
        has_tree: whether the source is a save of ours, in which numbers are texts. In a file of torch texts are names.

    Raises:
        CorruptError: a param group lists no parameters.
    """
    saved = SavedOptimizer(rank, entries, path)
    flat: dict[str, list[Entry]] = {}
    for key, of_key in (by_key or {}).items():
        if not isinstance(key, str):
            return None
        if key.startswith((f"{_STATE}.", f"{_GROUPS}.")):
            flat[key] = of_key
        elif key not in (_STATE, _GROUPS):
            saved.more[key] = of_key
    if not by_key:
        return None
    # The nested form has the keys "state" and "param_groups", and neither has a dot.
    if flat:
        _read_flattened(saved, flat, live)
    elif _GROUPS in by_key:
        _read_state(saved, _read_groups(saved, live))
    elif _STATE in by_key:
        saved.has_groups = False
        _read_state(saved, set())
    else:
        return None
    for group in saved.groups:
        if group.labels:
            saved.labels += group.labels
            saved.sizes.append(len(group.labels))
    if saved.labels and (saved.has_integers or has_tree):
        saved.by_number = all(map(is_index, saved.labels))
    return saved


def _read_groups(saved: SavedOptimizer, live: LiveParameters) -> set[Leaf]:
    """Read the param groups; return the parameters that they list."""
    path, entries = joined(saved.path, _GROUPS), saved.entries
    # As many as the source has: none of them is empty, so that the length is known.
    present: list[Leaf] = list(map(hyperparameters, live.optimizer.param_groups))
    num_groups = len(entries.by_key(path) or present)
    present += [{}] * (num_groups - len(present))
    groups = entries.value(path, present[:num_groups])
    if not isinstance(groups, list):
        raise CorruptError(_no_list("groups", groups), name=path)
    keys: set[Leaf] = set()
    for number, group in enumerate(groups):
        where = f"{path}.{number}"
        listed: Leaf = group.get("params") if isinstance(group, Mapping) else None
        _check_list(listed, f"{where}.params", "parameters", (int, str))
        if group.get("param_names") is not None:
            _check_list(group["param_names"], f"{where}.param_names", "names", (str,))
            saved.names += group["param_names"]
        labels = []
        for key in listed:
            labels.append(str(key))
            saved.has_integers |= isinstance(key, int)
        keys.update(listed)
        saved.groups.append(SavedGroup(labels, hyperparameters(group)))
    return keys


def _check_list(value: Leaf, path: str, kind: str, types: tuple[type, ...]) -> None:
    """Raise CorruptError unless a value is a list, or tuple, of items of these types."""
    if not isinstance(value, list | tuple):
        raise CorruptError(_no_list(kind, value), name=path)
    for item in value:
        if not isinstance(item, types):
            raise CorruptError(_no_list(kind, value), name=path)


def _no_list(kind: str, value: Leaf) -> str:
    what = "a tensor" if isinstance(value, SavedTensor) else type_text(value)
    return (
        f"the optimizer lists no {kind} here, but has {what}: save what the optimizer's state_dict() returns, or leave "
        "the optimizer out by exclude"
    )


def _read_state(saved: SavedOptimizer, keys: set[Leaf]) -> None:
    """Read the state of the parameters that groups list, and other state, whose key may look like a parameter's."""
    for key, of_key in (saved.entries.by_key(joined(saved.path, _STATE)) or {}).items():
        if not keys or key in keys or saved.entries.keys_are_texts:
            saved.state[str(key)] = of_key
        else:
            saved.state[OtherKey(key)] = of_key


def _read_flattened(saved: SavedOptimizer, flat: Mapping[str, list[Entry]], live: LiveParameters) -> None:
    """Read torch's flattened form: one key ``state.<name>.exp_avg`` or ``param_groups.<name>.lr`` for each value."""
    saved.has_groups = False
    settings: dict[str, dict[str, Leaf]] = {}
    for key, of_key in flat.items():
        kind, _, rest = key.partition(".")
        # Names and keys of state may have dots: only the live names show where one ends.
        label = _owner(rest, live)
        inner = rest[len(label) + 1 :]
        of_label = settings.setdefault(label, {})
        if kind == _GROUPS:
            of_label[inner] = saved.entries.built(of_key, None, joined(saved.path, key))
        else:
            # As if the name of the parameter was a key: what is inside it is built from the keys after that.
            state = saved.state.setdefault(label, [])
            for entry in of_key:
                state.append(entry._replace(keys=(inner,)))
    for label, of_label in settings.items():
        saved.groups.append(SavedGroup([label], of_label))


def _owner(text: str, live: LiveParameters) -> str:
    """Return the parameter's name that begins a text, the longest of several; without one, all but the last part."""
    label = text.rpartition(".")[0]
    while label and label not in live.in_state and label not in live.in_modules:
        label = label.rpartition(".")[0]
    return label or text.rpartition(".")[0]


def join_numbered(optimizers: Sequence[SavedOptimizer], path: str) -> list[str]:
    """Return the names of numbered parameters; several ranks must have the same parameters for the same numbers.

    Raises:
        InvalidArgumentError: they have others.
    """
    names: list[str] = []
    first: SavedOptimizer | None = None
    for saved in optimizers:
        if not saved.by_number:
            continue
        first = first or saved
        names = names or saved.names
        differs = (saved.labels, saved.sizes) != (first.labels, first.sizes)
        # A rank whose groups have no names says nothing against those of others.
        if differs or saved.names not in ([], names):
            raise InvalidArgumentError(
                "ranks saved this optimizer's parameters by number, and those of one number or the groups differ: load "
                "on as many ranks as have saved, or leave the optimizer out by exclude",
                name=path,
            )
    return names


# The live side


class LiveParameters:
    """The parameters of a live optimizer, by what a source may call them.

    Attributes:
        optimizer: the optimizer.
        by_label: the parameters by their names in the state, or all by number if one is not in the state.
        by_group: the same for each group.
        are_named: whether they have names.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, ParameterName], path: str) -> None:
        self.optimizer = optimizer
        self._path = path
        parameters = parameters_of(optimizer)
        self._names = [names.get(id(parameter)) for parameter in parameters]
        labels: list[str] = []
        for name in self._names:
            if name is not None:
                labels.append(name.in_state)
        # A parameter without a name, or two with one: then none goes by name.
        self.are_named = bool(labels) and len({*labels}) == len(parameters)
        if not self.are_named:
            labels = list(map(str, range(len(parameters))))
        self.by_label: dict[str, Leaf] = dict(zip(labels, parameters, strict=True))
        self.by_group: list[dict[str, Leaf]] = []
        items = iter(self.by_label.items())
        for group in optimizer.param_groups:
            self.by_group.append(dict(itertools.islice(items, len(group["params"]))))

    @property
    def in_state(self) -> dict[str, str | None]:
        """The label of each name in the state, of tied parameters all; None for a name that two have."""
        return self._labels_by_name[0]

    @property
    def in_modules(self) -> dict[str, str | None]:
        """The label of each name in a module; None for a name that two parameters have."""
        return self._labels_by_name[1]

    @functools.cached_property
    def _labels_by_name(self) -> tuple[dict[str, str | None], dict[str, str | None]]:
        in_state: dict[str, str | None] = {}
        in_modules: dict[str, str | None] = {}
        for label, name in zip(self.by_label, self._names, strict=True):
            if name is None or not self.are_named:
                continue
            texts = [*name.texts]
            for path, inner in name.in_modules:
                texts.append(f"{path}.{inner}" if path else inner)
                if in_modules.setdefault(inner, label) != label:
                    in_modules[inner] = None
            for text in texts:
                if in_state.setdefault(text, label) != label:
                    in_state[text] = None
        return in_state, in_modules

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
        twice: list[str] = []
        for label, text in zip(saved.labels, names, strict=True):
            name = text.removeprefix(prefix)
            live = labels_by_name.get(name)
            if live is not None:
                labels[label] = live
            elif name in labels_by_name:
                # Its value is None: two parameters have this name.
                twice.append(name)
        if twice:
            raise InvalidArgumentError(
                f"the source has this optimizer's parameters by name, and two of the state's are called {min(twice)!r} "
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
            by_name = self._by_names(names, saved.names or names)
            if by_name is not None:
                return dict(zip(labels, by_name, strict=True))
        # Where no names help, the order counts, as in torch's own load_state_dict: groups of equal sizes are trusted.
        live_sizes = list(filter(None, map(len, self.by_group)))
        if saved.sizes != live_sizes:
            text = (
                f"the source has this optimizer's parameters by number, in param groups of {saved.sizes}, and the "
                f"state's groups have {live_sizes}: make the groups of the job that saved it, or leave the optimizer "
                "and its schedulers out"
            )
            raise InvalidArgumentError(text, name=self._path)
        return dict(zip(labels, self.by_label, strict=True))

    def _by_names(self, names: Sequence[str], shown: Sequence[str]) -> list[str] | None:
        """Return the live label of each name; None if the live parameters have no names, or others altogether.

        `shown` are the source's own names, for the error.

        Raises:
            InvalidArgumentError: the names are those of other parameters, or of two.
        """
        in_state = list(filter(None, map(self.in_state.get, names)))
        if len(in_state) == len(names) and len({*in_state}) == len(self.by_label):
            return in_state
        # Parts that wrappers put into names do not count.
        bare = list(map(bare_name, names))
        # The names that the user gave the groups come before those of modules.
        of_groups = names_of_groups(self.optimizer)
        lists = self._lists_of_names() if of_groups is None else [of_groups]
        matches: list[list[str]] = []
        are_others = of_groups is None
        for live_names in lists:
            labels = dict(zip(map(bare_name, live_names), self.by_label, strict=True))
            are_others = are_others and labels.keys().isdisjoint(bare)
            # Names that occur twice are those of no parameter.
            if len(labels) == len(live_names) == len(bare) and {*bare} == labels.keys():
                match = [labels[name] for name in bare]
                if match not in matches:
                    matches.append(match)
        if len(matches) == 1:
            return matches[0]
        if are_others:
            return None
        raise InvalidArgumentError(_other_names_text(lists[0], shown, len(matches)), name=self._path)

    def _lists_of_names(self) -> list[list[str]]:
        """Return what the parameters are called in each module that has all, in their own modules, and in the state."""
        in_modules: dict[str, list[str]] = {}
        in_first: list[str] = []
        in_state: list[str] = []
        for name in self._names:
            if name is None:
                return []
            for path, inner in name.in_modules:
                in_modules.setdefault(path, []).append(inner)
            in_first.append(name.in_modules[0][1])
            in_state.append(name.in_state)
        lists = []
        for _, texts in sorted(in_modules.items()):
            if len(texts) == len(in_state):
                lists.append(texts)
        return [*lists, in_first, in_state]


def _other_names_text(live_names: Collection[str], names: Collection[str], num_matches: int) -> str:
    """Return the error's text for names in a source that are not those of the live parameters."""
    in_state, in_source = (f"{excerpt(sorted(texts), 80)} ({len(texts)})" for texts in (live_names, names))
    text = f"the state names the parameters of this optimizer {in_state}, and the source {in_source}"
    if num_matches > 1:
        text = f"the source names the parameters {in_source}, and two modules of the state have these names for others"
    return f"{text}: give it the parameters and the names of the job that saved it, or leave it out by exclude"
