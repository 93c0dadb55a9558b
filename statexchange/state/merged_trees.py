"""Saved trees with placeholders for tensors, and the trees that ranks saved as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from statexchange import values
from statexchange.state.containers import children
from statexchange.state.optimizers import is_group, is_state_of_optimizer
from statexchange.state.tree import contains

__all__ = [
    "Conflicts",
    "MergedTrees",
    "SavedTensor",
    "UnknownValue",
    "are_equal",
    "merge_trees",
    "with_other_entries",
]


class SavedTensor:
    """A placeholder in a decoded tree for the saved tensor of this name."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class UnknownValue:
    """A placeholder in a decoded tree for a value that no type of the live state can hold, with its JSON text.

    `problem` is why its type cannot have the value; "" if nothing in the live state has the type.
    """

    __slots__ = ("problem", "text", "type_name")

    def __init__(self, type_name: str, text: str, problem: str) -> None:
        self.type_name = type_name
        self.text = text
        self.problem = problem

    def __repr__(self) -> str:
        return f"<{self.type_name}>"


_NOWHERE = object()
Conflicts: TypeAlias = dict[tuple[Any, ...], tuple[int, int]]
"""Two ranks that saved different values, by the keys that lead there."""


class MergedTrees(NamedTuple):
    """The trees that ranks saved, as one: what any rank has, and the first rank's value where two differ.

    Attributes:
        tree: the tree.
        conflicts: places with different values.
        unions: lists of param groups that differed and were joined. That is right for an optimizer, which looks up the
            group of each parameter, if all ranks have the same one for it; and it is wrong for a plain value.
    """

    tree: Any
    conflicts: Conflicts
    unions: Conflicts


def merge_trees(trees: Mapping[int, Any]) -> MergedTrees:
    """Merge the trees that ranks saved, by rank."""
    (_, merged), *others = trees.items()
    conflicts: Conflicts = {}
    unions: Conflicts = {}
    for rank, other in others:
        differing: list[tuple[Any, ...]] = []
        united: list[tuple[Any, ...]] = []
        merged = _merge(merged, other, (), differing, united)
        for found, places in ((conflicts, differing), (unions, united)):
            for keys in places:
                found.setdefault(keys, (_first_with(keys, trees), rank))
    return MergedTrees(merged, conflicts, unions)


def _first_with(keys: tuple[Any, ...], trees: Mapping[int, Any]) -> int:
    """Return the first rank whose tree has a place."""
    for rank, tree in trees.items():
        place = tree
        for key in keys:
            if isinstance(place, dict):
                place = place.get(key, _NOWHERE)
            else:
                place = place[key] if isinstance(place, list | tuple) and key in range(len(place)) else _NOWHERE
        if place is not _NOWHERE:
            return rank
    raise KeyError(keys)


def _merge(
    one: Any,
    other: Any,
    keys: tuple[Any, ...],
    differing: list[tuple[Any, ...]],
    united: list[tuple[Any, ...]],
    *,
    in_list: bool = False,
) -> Any:
    if isinstance(one, dict) and isinstance(other, dict) and not (in_list and _are_values_of_others(one, other)):
        if is_state_of_optimizer(one) and is_state_of_optimizer(other):
            differing += [(*keys, "state", name) for name in _differing_states(one["state"], other["state"])]
        both = {
            key: _merge(one[key], other[key], (*keys, key), differing, united, in_list=in_list)
            for key in one
            if key in other
        }
        return {**one, **other, **both}
    if are_equal(one, other):
        return one
    if _lists_groups(one) and _lists_groups(other):
        united.append(keys)
        return [*one, *other]  # loading uses the first group that lists a parameter
    if _holds_state(one) and type(one) is type(other) and len(one) == len(other):
        items = [_merge(item, other[i], (*keys, i), differing, united, in_list=True) for i, item in enumerate(one)]
        return type(one)(items)
    differing.append(keys)
    return one


def _are_values_of_others(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Whether two mappings of plain values in a list have other keys: joined, they would be no rank's."""
    return one.keys() != other.keys() and not any(
        contains(tree, lambda item: isinstance(item, SavedTensor)) for tree in (one, other)
    )


def _holds_state(value: Any) -> bool:
    """Whether a value is a list whose items ranks may have saved apart; one of plain values is one value."""
    is_list = type(value) in (list, tuple)
    return is_list and contains(value, lambda item: isinstance(item, dict | SavedTensor))


def _differing_states(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> list[Any]:
    """Return the parameters of which two ranks saved states with different keys: no rank had all of them."""
    both = [(name, one[name], other[name]) for name in one if name in other]
    return [name for name, a, b in both if isinstance(a, dict) and isinstance(b, dict) and a.keys() != b.keys()]


def with_other_entries(tree: Any, merged: Any) -> Any:
    """Return the tree of one rank, with the entries of mappings that only other ranks have."""
    if _holds_state(tree) and type(tree) is type(merged) and len(tree) == len(merged):
        return type(tree)(map(with_other_entries, tree, merged))
    if not isinstance(tree, dict) or not isinstance(merged, dict):
        return tree
    if is_state_of_optimizer(tree) and is_state_of_optimizer(merged):  # the state of a parameter is one rank's
        return {**merged, **tree, "state": {**merged["state"], **tree["state"]}}
    return {**merged, **{key: with_other_entries(item, merged[key]) for key, item in tree.items()}}


def are_equal(one: Any, other: Any) -> bool:
    """Whether two saved values are the same, whatever the order of keys, or SavedTensors of one name."""
    if type(one) is not type(other):
        return False
    if isinstance(one, bool | int | float | str):
        return values.is_same(one, other)
    if isinstance(one, SavedTensor):
        return bool(one.name == other.name)
    if isinstance(one, UnknownValue):
        return bool(one.text == other.text)
    items, others = children(one), children(other)
    if items is None or others is None:
        return values.is_same(one, other)
    return items.keys() == others.keys() and all(are_equal(item, others[key]) for key, item in items.items())


def _lists_groups(value: Any) -> bool:
    """Whether `value` is a list of an optimizer's param groups."""
    return isinstance(value, list) and len(value) > 0 and all(map(is_group, value))
