"""An optimizer's saved state, sorted by the live parameters and groups."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from statexchange.errors import InvalidArgumentError, type_text
from statexchange.sharding.rules import with_dots
from statexchange.state.merged_trees import are_equal
from statexchange.state.numbered_parameters import FoundState, NumberedParameters
from statexchange.state.optimizers import class_name, hyperparameters, is_state_of_optimizer
from statexchange.state.source_names import is_index
from statexchange.tensors import is_tensor

__all__ = ["SavedEntries", "are_moved", "check_class", "found_states", "numbered_parameters"]

# What schedulers add to param groups: it says nothing of the optimizer's class.
_OF_SCHEDULERS = {"initial_lr", "swa_lr", "min_lr", "max_lr", "base_momentum", "max_momentum"}


@dataclass(frozen=True, slots=True)
class SavedEntries:
    """An optimizer's saved state by the names of parameters, of all ranks or, where it has them, of one.

    Attributes:
        groups: each parameter's group.
        empty_groups: the groups without parameters that no live group has yet, and `num_empty` the number of all.
        state: each parameter's state.
        shared: state under other keys.
        more: entries beside ``state`` and ``param_groups``.
        differ: whether ranks saved groups of different values for one parameter.
    """

    groups: dict[str, Any]
    empty_groups: list[Any]
    state: dict[str, Any]
    shared: dict[Any, Any]
    more: dict[str, Any]
    differ: bool
    num_empty: int

    @classmethod
    def of(cls, saved: Mapping[str, Any], rank_tree: Any, labels: Mapping[str, str]) -> SavedEntries:
        """Sort the entries of an optimizer's saved tree; those of `rank_tree` come before those of other ranks.

        `labels` are the parameters' names in the live state by their numbers in the trees, if they have some.
        """
        groups: dict[Any, Any] = {}
        state: dict[Any, Any] = {}
        differ = False
        trees = [rank_tree, saved] if is_state_of_optimizer(rank_tree) else [saved]
        for tree in trees:
            new: dict[Any, Any] = {}
            for group in tree["param_groups"]:
                for name in group["params"]:
                    if name not in groups:
                        first = new.setdefault(name, group)
                        differ |= first is not group and not are_equal(hyperparameters(first), hyperparameters(group))
            state |= {name: tree["state"][name] for name in new if name in tree["state"]}
            groups |= new
        one = trees[0]
        empty_groups = [group for group in one["param_groups"] if not group["params"]]
        return cls(
            {labels.get(str(name), str(name)): group for name, group in groups.items()},
            empty_groups,
            {labels.get(str(name), str(name)): entry for name, entry in state.items()},
            {key: entry for key, entry in one["state"].items() if key not in groups},
            {key: entry for key, entry in one.items() if key not in ("state", "param_groups")},
            differ,
            len(empty_groups),
        )


def check_class(optimizer: Any, classes: Collection[str], groups: Iterable[Mapping[str, Any]], path: str) -> None:
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
    leave = f", or pass exclude={with_dots(path)!r} to leave it as it is" if path else ""
    raise InvalidArgumentError(
        f"this is the state of another optimizer than {type_text(optimizer)}: make the optimizer that was saved{leave}",
        name=path or None,
        expected=min(classes, default=f"hyperparameters {lacking}"),
        found=live,
    )


def _hyperparameter_names(groups: Iterable[Mapping[str, Any]]) -> set[str]:
    return {name for group in groups for name in hyperparameters(group)} - _OF_SCHEDULERS


def numbered_parameters(
    tree: Mapping[str, Any], old_names: Mapping[str, str] | None, path: str
) -> NumberedParameters | None:
    """Return the numbers of parameters in a tree of an optimizer, by group, and their names; None without numbers.

    `old_names` is None if the tree has the names or numbers of the live parameters (`Matching`). The groups of several
    ranks may be joined in the tree. Where a number comes again, those of the next rank begin.

    Raises:
        InvalidArgumentError: ranks have other parameters for one number.
    """
    if old_names is None:
        return None
    ranks: list[list[list[str]]] = [[]]
    names: dict[str, str] = {}
    seen: set[str] = set()
    differ = are_texts = False
    for group in tree["param_groups"]:
        numbers = [str(number) for number in group["params"] if is_index(str(number))]
        are_texts |= any(isinstance(number, str) for number in group["params"])
        if not seen.isdisjoint(numbers):
            ranks.append([])
            seen.clear()
        seen.update(numbers)
        if numbers:
            ranks[-1].append(numbers)
        of_group = group.get("param_names")
        if isinstance(of_group, list | tuple) and len(of_group) == len(numbers):
            differ |= any(names.setdefault(one, name) != name for one, name in zip(numbers, of_group, strict=True))
    if differ or any(groups != ranks[0] for groups in ranks):
        raise InvalidArgumentError(
            "ranks saved this optimizer's parameters by number, and those of one number or the groups differ: load on "
            "as many ranks as have saved, or leave the optimizer out by exclude",
            name=path,
        )
    flat = [names[number] for of_group in ranks[0] for number in of_group if number in names]
    return NumberedParameters(ranks[0], flat, old_names, path, are_texts) if ranks[0] else None


def are_moved(
    optimizer: Any, parameters: Mapping[str, Any], tree: Mapping[str, Any], labels: Mapping[str, str]
) -> bool:
    """Whether a live group has another number than the source's groups with its parameters, or their counts differ."""
    if len(tree["param_groups"]) != len(optimizer.param_groups):
        return True
    position = {
        labels.get(str(name), str(name)): index
        for index, group in enumerate(tree["param_groups"])
        for name in group["params"]
    }
    names = {id(parameter): name for name, parameter in parameters.items()}
    return any(
        position.get(names[id(parameter)], index) != index
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    )


def found_states(state: Any, label: str, path: str) -> Iterator[FoundState]:
    """Yield the tensors in the state of a parameter."""
    for key, tensor in state.items() if isinstance(state, Mapping) else ():
        if is_tensor(tensor):
            yield FoundState(key, tuple(tensor.shape), label, f"{path}.{key}")
