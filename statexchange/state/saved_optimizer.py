"""An optimizer as a source has it: param groups that list names or numbers of parameters, or torch's flattened form."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from statexchange.errors import CorruptError, InvalidArgumentError, type_text
from statexchange.sharding.paths import is_index, joined
from statexchange.state.entries import Entries, Entry, SavedTensor
from statexchange.state.optimizers import hyperparameters

__all__ = ["OtherKey", "SavedGroup", "SavedOptimizer", "join_numbered", "read_optimizer"]

_GROUPS, _STATE = "param_groups", "state"


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
        rank: the rank that saved it.
        entries: the entries of that rank.
        path: its path in the state.
        groups: the param groups; in torch's flattened form, which has none, one for each parameter.
        state: the entries of each parameter's state by label, and of other state by its key.
        more: the entries of what its `state_dict` has besides, by key.
        has_groups: whether the source knows which parameters one group has.
        by_number: whether the parameters have numbers.
    """

    rank: int
    entries: Entries
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


def read_optimizer(
    entries: Entries, rank: int, path: str, optimizer: Any, names: Collection[str]
) -> SavedOptimizer | None:
    """Return the optimizer at a path of a source; None if it is something else.

    Args:
        entries: those of one rank.
        rank: the rank.
        path: the path.
        optimizer: the live one, whose hyperparameters show what the source's keys were.
        names: what parameters may be called in torch's flattened form.

    Raises:
        CorruptError: a param group lists no parameters.
    """
    by_key = entries.by_key(path)
    if not by_key or not all(isinstance(key, str) for key in by_key):
        return None
    found = SavedOptimizer(rank, entries, path)
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
    # As many as the source has: none of them is empty, so that the length is known.
    num_groups = len(entries.by_key(path) or live)
    groups = entries.value(path, [*live, *({} for _ in range(num_groups))][:num_groups])
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
            "ranks saved this optimizer's parameters by number, and those of one number or the groups differ: load on "
            "as many ranks as have saved, or leave the optimizer out by exclude",
            name=path,
        )
    return names[0] if names else []
