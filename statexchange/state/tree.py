"""Trees: any nesting of mappings, lists, tuples, namedtuples and dataclasses.

There are two walks. `nodes` is for trees that ranks compare: keys are sorted by their text, and each path is unique.
`walk` is for use on one rank: keys keep their order and may be of any type, and paths read as names.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from statexchange import values
from statexchange.errors import InvalidArgumentError, UnsupportedError, type_text
from statexchange.sharding.paths import joined
from statexchange.state.containers import check_change, children, has_indices, is_dataclass, is_mutable, with_children

__all__ = [
    "Node",
    "WalkStep",
    "check_rebuild",
    "contains",
    "flatten",
    "nodes",
    "rebuild",
    "walk",
]

IsLeaf = Callable[[Any], bool]


class Node(NamedTuple):
    """A place in a tree: its path, its value, the kind of container (None for a leaf), and its keys joined by dots."""

    path: str
    value: Any
    container: str | None
    text: str


def nodes(tree: Any, is_leaf: IsLeaf | None = None) -> Iterator[Node]:
    """Yield all places of `tree`, a container before its children. Not collective.

    A path is written as in Python: ``model.layers[0]['my weight']``, "" for the whole tree. No two places share one.
    The entries of a mapping come in the order of their keys' texts, in whatever order they were inserted.

    Args:
        tree: the tree.
        is_leaf: `is_leaf(value)` returns whether a container counts as a leaf; by default none does.

    Raises:
        InvalidArgumentError: the tree contains itself, or is nested deeper than 100; it names the path.
        UnsupportedError: a key has no JSON text (see `values`), or two look alike; it names the path.
    """
    return _nodes(tree, "", "", is_leaf, {})


def flatten(tree: Any, is_leaf: IsLeaf | None = None) -> list[tuple[str, Any]]:
    """Return the (path, leaf) pairs of `tree` in the order of `nodes`. Not collective."""
    return [(node.path, node.value) for node in nodes(tree, is_leaf) if node.container is None]


class WalkStep(NamedTuple):
    """A place in a tree: its dotted path, the keys that lead there, its value, and whether the walk stops there."""

    path: str
    keys: tuple[Any, ...]
    value: Any
    is_leaf: bool


def walk(
    tree: Any, enters: Callable[[str, Any], bool] | None = None, path: str = "", keys: tuple[Any, ...] = ()
) -> Iterator[WalkStep]:
    """Yield all places of `tree` in its own order, a container before its children. Not collective.

    Paths read as names: ``model.layers[0].my weight``.

    Args:
        tree: the tree.
        enters: `enters(path, value)` returns whether a container's children are visited; by default all are.
        path: the path of `tree` itself.
        keys: the keys that lead to `tree`.

    Raises:
        InvalidArgumentError: the tree contains itself, or is nested deeper than 100.
    """
    inside = children(tree) if enters is None or enters(path, tree) else None
    yield WalkStep(path, keys, tree, inside is None)
    if inside is None:
        return
    if len(keys) > values.MAX_DEPTH:
        raise InvalidArgumentError(
            f"the state at {path[:80]}... is nested deeper than {values.MAX_DEPTH}, or contains itself"
        )
    by_index = has_indices(tree)
    for key, child in inside.items():
        step = f"[{key}]" if by_index else f".{key}"
        yield from walk(child, enters, path + step if path or keys else step.removeprefix("."), (*keys, key))


def contains(tree: Any, fits: Callable[[Any], bool]) -> bool:
    """Whether `fits` is true of `tree` or of a value in it. Not collective."""
    return any(fits(step.value) for step in walk(tree))


def rebuild(tree: Any, leaves: Mapping[str, Any], is_leaf: IsLeaf | None = None) -> Any:
    """Return `tree` with the leaves at the paths in `leaves` replaced. Not collective.

    Mutable mappings, lists and dataclasses are changed in place. Tuples, namedtuples and frozen dataclasses that hold
    something new are replaced by new ones of their type. All else stays the same object.

    Raises:
        InvalidArgumentError: a path in `leaves` is no leaf of `tree`; nothing has changed.
    """
    unknown = leaves.keys() - {path for path, _ in flatten(tree, is_leaf)}
    if unknown:
        raise InvalidArgumentError(f"the tree has no leaf {min(unknown)!r}")
    return _rebuilt(tree, "", leaves, is_leaf)


def _nodes(value: Any, path: str, text: str, is_leaf: IsLeaf | None, above: dict[int, str]) -> Iterator[Node]:
    container = None if is_leaf is not None and is_leaf(value) else _container(value)
    yield Node(path, value, container, text)
    if container is None:
        return
    if id(value) in above:
        raise InvalidArgumentError(f"a tree contains itself: {path} is {above[id(value)] or 'the whole tree'} again")
    if len(above) == values.MAX_DEPTH:
        raise InvalidArgumentError(f"a tree is nested deeper than {values.MAX_DEPTH}, at {path[:80]}...")
    above[id(value)] = path
    for step, key, child in _steps(value, path):
        inner = path + step if path else step.removeprefix(".")
        yield from _nodes(child, inner, joined(text, key), is_leaf, above)
    del above[id(value)]


def _container(value: Any) -> str | None:
    """Return the kind of a container as text, equal for alike containers; None for a leaf."""
    if children(value) is None:
        return None
    if isinstance(value, Mapping) and not is_dataclass(value):
        return "dict"
    if has_indices(value):
        return f"{'list' if isinstance(value, list) else 'tuple'} of {len(value)}"
    return f"{'namedtuple' if isinstance(value, tuple) else 'dataclass'} {type(value).__qualname__}"


def _steps(value: Any, path: str) -> list[tuple[str, Any, Any]]:
    """Return a container's children as (step of the path, key, child)."""
    found = children(value) or {}
    if isinstance(value, Mapping):
        return _entries(found, path)
    by_index = has_indices(value)
    return [(f"[{key}]" if by_index else f".{key}", key, child) for key, child in found.items()]


def _entries(mapping: Mapping[Any, Any], path: str) -> list[tuple[str, Any, Any]]:
    entries = sorted(((_step(key, path), key, child) for key, child in mapping.items()), key=lambda entry: entry[0])
    for (step, _, _), (following, _, _) in itertools.pairwise(entries):
        if step == following:
            raise UnsupportedError(f"two keys of the mapping at {path or 'the top'} look alike: {step}")
    return entries


def _step(key: Any, path: str) -> str:
    if type(key) is str:
        return f".{key}" if key.isidentifier() else f"[{key!r}]"
    if not values.has_text(key):
        raise UnsupportedError(
            f"a mapping at {path or 'the top'} has {type_text(key)} as a key: use text, numbers or enums"
        )
    return f"[{key!r}]"


def check_rebuild(tree: Any, leaves: Mapping[str, Any], is_leaf: IsLeaf | None = None) -> None:
    """Raise what `rebuild` would raise, but change nothing. Not collective.

    Raises:
        UnsupportedError: a container refuses a new value; the error names its path.
    """
    _rebuilt(tree, "", leaves, is_leaf, on_copies=True)


def _rebuilt(
    value: Any, path: str, leaves: Mapping[str, Any], is_leaf: IsLeaf | None, *, on_copies: bool = False
) -> Any:
    if (is_leaf is not None and is_leaf(value)) or _container(value) is None:
        return leaves.get(path, value)
    changed = {}
    for step, key, child in _steps(value, path):
        new = _rebuilt(child, path + step if path else step.removeprefix("."), leaves, is_leaf, on_copies=on_copies)
        if new is not child:
            changed[key] = new
    if not changed:
        return value
    try:
        if on_copies and is_mutable(value):
            check_change(value, lambda container: with_children(container, changed))
            return value
        return with_children(value, changed)
    except UnsupportedError as error:
        raise error.located(name=path or "(the whole)") from error.__cause__
