"""An optimizer as a source has it, by names or numbers of its parameters, and which live parameters these are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from statexchange.errors import CorruptError, InvalidArgumentError, excerpt, type_text
from statexchange.sharding.paths import is_index, joined
from statexchange.sharding.wrappers import without_wrappers
from statexchange.state.entries import Entries, Entry, SavedTensor
from statexchange.state.optimizers import hyperparameters, names_of_groups, parameters_of
from statexchange.state.state_dict import ParameterName

__all__ = ["LiveParameters", "OtherKey", "SavedGroup", "SavedOptimizer", "join_numbered", "read_optimizer"]

_GROUPS, _STATE = "param_groups", "state"
_OF_DDP = "module."


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """A param group in a source.

    Attributes:
        labels: its parameters, by name or number.
        settings: its hyperparameters.
        names: the names of parameters that have numbers.
        keys: the parameters as the group lists them, where it does: texts or numbers.
    """

    labels: tuple[str, ...]
    settings: Mapping[str, Any]
    names: tuple[str, ...] = ()
    keys: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class OtherKey:
    """A key of state that is not a parameter's."""

    key: Any


@dataclass(slots=True)
class SavedOptimizer:
    """An optimizer's state in a source.

    Attributes:
        path: its path in the state.
        groups: the param groups; in torch's flattened form, which has none, one for each parameter.
        state: the entries of each parameter's state by label, and of other state by its key.
        more: the entries of what its `state_dict` has besides, by key.
        has_groups: whether the source knows which parameters one group has.
        by_number: whether the parameters have numbers.
    """

    path: str
    groups: list[SavedGroup] = field(default_factory=list)
    state: dict[Any, list[Entry]] = field(default_factory=dict)
    more: dict[Any, list[Entry]] = field(default_factory=dict)
    has_groups: bool = True
    by_number: bool = False

    @property
    def labels(self) -> list[str]:
        """The names or numbers of all parameters, in the order of the groups."""
        return [label for group in self.groups for label in group.labels]

    def group_of(self) -> dict[str, int]:
        """Return the number of each parameter's group, by label."""
        return {label: number for number, group in enumerate(self.groups) for label in group.labels}


def read_optimizer(entries: Entries, path: str, optimizer: Any, names: Collection[str]) -> SavedOptimizer | None:
    """Return the optimizer at a path of a source; None if it is something else.

    Args:
        entries: those of one rank.
        path: the path.
        optimizer: the live one, whose hyperparameters show what the source's keys were.
        names: what parameters may be called in torch's flattened form.

    Raises:
        CorruptError: a param group lists no parameters.
    """
    by_key = entries.by_key(path)
    if not by_key or not all(isinstance(key, str) for key in by_key):
        return None
    found = SavedOptimizer(path)
    flat = {key: of_key for key, of_key in by_key.items() if key.startswith((f"{_STATE}.", f"{_GROUPS}."))}
    if flat:
        _read_flattened(found, flat, entries, names)
    elif _GROUPS in by_key:
        _read_groups(found, entries, optimizer)
    elif _STATE not in by_key:
        return None
    else:
        found.has_groups = False
    if not flat:
        _read_state(found, entries)
    found.more = {key: of_key for key, of_key in by_key.items() if key not in (_STATE, _GROUPS) and key not in flat}
    return found


def _read_groups(found: SavedOptimizer, entries: Entries, optimizer: Any) -> None:
    """Read the param groups, each of which lists its parameters."""
    path = joined(found.path, _GROUPS)
    live = [hyperparameters(group) for group in optimizer.param_groups]
    groups = entries.value(path, live)
    if not isinstance(groups, list):
        raise CorruptError(_no_list("groups", groups), name=path)
    for number, group in enumerate(groups):
        where = f"{path}.{number}"
        listed = group.get("params") if isinstance(group, Mapping) else None
        labels = _listed(listed, f"{where}.params", "parameters", (int, str))
        names: Sequence[Any] = ()
        if group.get("param_names") is not None:
            names = _listed(group["param_names"], f"{where}.param_names", "names", (str,))
        found.groups.append(SavedGroup(tuple(map(str, labels)), hyperparameters(group), tuple(names), tuple(labels)))
    found.by_number = bool(found.labels) and all(map(is_index, found.labels))


def _read_state(found: SavedOptimizer, entries: Entries) -> None:
    """Read the state of each parameter, and other state, which may have a key that looks like a parameter's."""
    keys = {key for group in found.groups for key in group.keys}
    for key, of_key in (entries.by_key(joined(found.path, _STATE)) or {}).items():
        is_parameters = not keys or key in keys or entries.keys_are_texts
        found.state[str(key) if is_parameters else OtherKey(key)] = of_key


def _listed(value: Any, path: str, kind: str, types: tuple[type, ...]) -> Sequence[Any]:
    if not isinstance(value, list | tuple) or not all(isinstance(one, types) for one in value):
        raise CorruptError(_no_list(kind, value), name=path)
    return value


def _no_list(kind: str, value: Any) -> str:
    what = "a tensor" if isinstance(value, SavedTensor) else type_text(value)
    return (
        f"the optimizer lists no {kind} here, but has {what}: save what the optimizer's state_dict() returns, or leave "
        "the optimizer out by exclude"
    )


def _read_flattened(
    found: SavedOptimizer, flat: Mapping[str, list[Entry]], entries: Entries, names: Collection[str]
) -> None:
    """Read torch's flattened form: one key ``state.<name>.exp_avg`` or ``param_groups.<name>.lr`` for each value."""
    found.has_groups = False
    settings: dict[str, dict[str, Any]] = {}
    for key, of_key in flat.items():
        kind, _, rest = key.partition(".")
        label = _owner(rest, names)
        if kind == _STATE:
            # As if the name of the parameter was a key: what is inside it is built from the keys after that.
            found.state.setdefault(label, []).extend(_below_label(of_key, rest[len(label) + 1 :]))
            settings.setdefault(label, {})
        else:
            value = entries.built(of_key, None, joined(found.path, key))
            settings.setdefault(label, {})[rest[len(label) + 1 :]] = value
    found.groups = [SavedGroup((label,), of_label) for label, of_label in settings.items()]


def _below_label(entries: Sequence[Entry], key: str) -> Iterator[Entry]:
    for entry in entries:
        yield entry._replace(keys=(key,))


def _owner(text: str, names: Collection[str]) -> str:
    """Return the parameter's name that begins a text, the longest of several; without one, all but the last part."""
    label = text.rpartition(".")[0]
    while label and label not in names:
        label = label.rpartition(".")[0]
    return label or text.rpartition(".")[0]


def join_numbered(optimizers: Sequence[SavedOptimizer], path: str) -> list[str]:
    """Return the names of numbered parameters; several ranks must have the same parameters for the same numbers.

    Raises:
        InvalidArgumentError: they have others.
    """
    numbered = [saved for saved in optimizers if saved.by_number]
    groups = [[group.labels for group in saved.groups if group.labels] for saved in numbered]
    lists = [[name for group in saved.groups for name in group.names] for saved in numbered]
    names = [of_rank for of_rank in lists if of_rank]
    if any(one != groups[0] for one in groups) or any(one != names[0] for one in names):
        raise InvalidArgumentError(
            "ranks saved this optimizer's parameters by number, and those of one number or the groups differ: load on as "
            "many ranks as have saved, or leave the optimizer out by exclude",
            name=path,
        )
    return names[0] if names else []


class LiveParameters:
    """The parameters of a live optimizer, by what a source may call them.

    Attributes:
        by_label: the parameters by their names in the state, or all by number if one is not in the state.
        are_named: whether they have names.
    """

    def __init__(self, optimizer: Any, known: Mapping[int, ParameterName], path: str) -> None:
        self._optimizer = optimizer
        self._path = path
        self.parameters = parameters_of(optimizer)
        self._known = [known.get(id(parameter)) for parameter in self.parameters]
        names = [None if one is None else one.in_state for one in self._known]
        self.are_named = bool(names) and None not in names and len({*names}) == len(names)
        labels = names if self.are_named else list(map(str, range(len(names))))
        self.by_label: dict[str, Any] = {str(label): one for label, one in zip(labels, self.parameters, strict=True)}

    def in_state(self) -> dict[str, str]:
        """Return the label of each name in the state, of tied parameters all."""
        found: dict[str, str] = {}
        for label, known in zip(self.by_label, self._known, strict=True):
            if known is not None and self.are_named:
                found |= dict.fromkeys(known.all_in_state, label)
        return found

    def in_modules(self) -> dict[str, str | None]:
        """Return the label of each name in a module; None for a name that two parameters have."""
        found: dict[str, str | None] = {}
        for label, known in zip(self.by_label, self._known, strict=True):
            for _, name in known.in_modules if known is not None and self.are_named else ():
                found[name] = label if found.get(name, label) == label else None
        return found

    def labels_of(
        self,
        saved: SavedOptimizer,
        param_names: Sequence[str],
        new_names: Callable[[Sequence[str]], list[str]],
        *,
        in_state: bool,
    ) -> dict[str, str]:
        """Return the live label of each of the source's; of those that the live optimizer has.

        Args:
            saved: the optimizer in the source.
            param_names: the names that the source has for numbered parameters, if any.
            new_names: returns the state's names of parameters in the source.
            in_state: whether the source has the names in the whole state, as our own saves, or those in a module.

        Raises:
            InvalidArgumentError: which parameter is meant is not known.
        """
        labels = saved.labels
        if saved.by_number and not self._are_names(labels):
            return self._by_number(saved, param_names, new_names)
        names = new_names(labels)
        known: Mapping[str, str | None] = self.in_state()
        if not in_state and known.keys().isdisjoint(names):
            known = self.in_modules()
        if names and all(name.startswith(_OF_DDP) for name in names) and known.keys().isdisjoint(names):
            names = [name.removeprefix(_OF_DDP) for name in names]
        twice = sorted(name for name in names if name in known and known[name] is None)
        if twice:
            raise InvalidArgumentError(
                f"the source has this optimizer's parameters by name, and two of the state's are called {twice[0]!r} in "
                "their modules: save the optimizer's own state_dict(), or leave the optimizer out by exclude",
                name=self._path,
            )
        found = {label: known.get(name) for label, name in zip(labels, names, strict=True)}
        return {label: live for label, live in found.items() if live is not None}

    def _are_names(self, numbers: Sequence[str]) -> bool:
        """Whether numbers of the source are the names of the live parameters, as those of a ParameterList.

        Raises:
            InvalidArgumentError: they may be both, and would be others' then.
        """
        for names in (self.in_modules(), self.in_state()):
            if names and {*names} == {*numbers} and [*names] != [*numbers]:
                raise InvalidArgumentError(
                    f"whether the source has {excerpt([*numbers], 80)} as numbers or as names of the parameters is not "
                    "known: save the optimizer itself, with its model, or give it the parameters in this order",
                    name=self._path,
                )
        return False

    def _by_number(
        self, saved: SavedOptimizer, names: Sequence[str], new_names: Callable[[Sequence[str]], list[str]]
    ) -> dict[str, str]:
        """Return the live label of each number: by the source's names of parameters, or else by order."""
        labels = saved.labels
        if names and len(names) != len(labels):
            text = f"the param groups of the source have {len(labels)} parameters, and {len(names)} param_names"
            raise CorruptError(f"{text}: leave the optimizer out by exclude", name=self._path)
        by_name = self._by_names(names, new_names(names)) if names else None
        if by_name is not None:
            return dict(zip(labels, by_name, strict=True))
        sizes = [len(group.labels) for group in saved.groups if group.labels]
        live_sizes = [len(group["params"]) for group in self._optimizer.param_groups if group["params"]]
        if sizes != live_sizes:
            text = (
                f"the source has this optimizer's parameters by number, in param groups of {sizes}, and the state's "
                f"groups have {live_sizes}: make the groups of the job that saved it, or leave the optimizer and its "
                "schedulers out"
            )
            raise InvalidArgumentError(text, name=self._path)
        return dict(zip(labels, self.by_label, strict=True))

    def _by_names(self, names: Sequence[str], new_names: Sequence[str]) -> list[str] | None:
        """Return the live label of each name; None if the live parameters have no names, or others altogether.

        Raises:
            InvalidArgumentError: the names are those of other parameters, or of two.
        """
        in_state = self.in_state()
        if len({*new_names}) == len(self.by_label) and all(name in in_state for name in new_names):
            return [in_state[name] for name in new_names]
        of_groups = names_of_groups(self._optimizer)
        lists = self._lists_of_names() if of_groups is None else [of_groups]
        found: list[list[str]] = []
        for live_names in lists:
            labels = _matched(new_names, live_names, [*self.by_label])
            if labels is not None and labels not in found:
                found.append(labels)
        if len(found) == 1:
            return found[0]
        bare = {*map(_bare, new_names)}
        if not found and of_groups is None and all(bare.isdisjoint(map(_bare, one)) for one in lists):
            return None
        texts = [f"{excerpt(sorted(one), 80)} ({len(one)})" for one in ([*lists, []][0], names)]
        text = f"the state names the parameters of this optimizer {texts[0]}, and the source {texts[1]}"
        if len(found) > 1:
            text = (
                f"the source names the parameters {texts[1]}, and two modules of the state have these names for others"
            )
        text += ": give it the parameters and the names of the job that saved it, or leave it out by exclude"
        raise InvalidArgumentError(text, name=self._path)

    def _lists_of_names(self) -> list[list[str]]:
        """Return what the parameters are called in each module that has all, in their own modules, and in the state."""
        known = [one for one in self._known if one is not None]
        if not known or len(known) < len(self._known):
            return []
        modules = set.intersection(*({path for path, _ in one.in_modules} for one in known))
        of_modules = [[dict(one.in_modules)[path] for one in known] for path in sorted(modules)]
        return [*of_modules, [one.in_modules[0][1] for one in known], [one.in_state for one in known]]


def _bare(name: str) -> str:
    return without_wrappers(name).removeprefix(_OF_DDP)


def _matched(names: Sequence[str], live_names: Sequence[str], labels: Sequence[str]) -> list[str] | None:
    """Return the label of each name, if the names are those of all live parameters, in any order.

    Parts that wrappers put into names do not count. Names that occur twice are those of no parameter.
    """
    theirs, ours = ([_bare(name) for name in one] for one in (names, live_names))
    by_name = dict(zip(ours, labels, strict=True))
    if len(by_name) < len(ours) or {*theirs} != by_name.keys() or len(theirs) != len(ours):
        return None
    return [by_name[name] for name in theirs]
