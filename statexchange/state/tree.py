"""Trees: any nesting of mappings, lists, tuples, namedtuples and dataclasses, taken apart by path and put together."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

from statexchange import values
from statexchange.errors import InvalidArgumentError, UnsupportedError

__all__ = [
    "Node",
    "Place",
    "alike",
    "children",
    "contains",
    "flatten",
    "is_mutable",
    "nodes",
    "rebuild",
    "walk",
    "with_children",
]

IsLeaf = Callable[[Any], bool]


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A place in a tree: its path, what lies there, and in words what kind of container that is (None for a leaf)."""

    path: str
    value: Any
    container: str | None


def nodes(tree: Any, is_leaf: IsLeaf | None = None) -> Iterator[Node]:
    """All places of `tree`, a container before what lies in it. Not collective.

    A path is written as Python would: ``model.layers[0]['my weight']``, "" for the whole tree. No two places share one,
    and the entries of a mapping come in the order of their keys' texts, however they were inserted. `is_leaf` keeps
    containers whole. A tree that contains itself, or is nested deeper than 100, is an InvalidArgumentError, and a key
    that has no JSON text (see `values`) an UnsupportedError; both name the path.
    """
    return _nodes(tree, "", is_leaf, {})


def flatten(tree: Any, is_leaf: IsLeaf | None = None) -> list[tuple[str, Any]]:
    """The (path, leaf) pairs of `tree` in the order of `nodes`. Not collective."""
    return [(node.path, node.value) for node in nodes(tree, is_leaf) if node.container is None]


class Place(NamedTuple):
    """A place in a tree: its dotted path, the keys that lead there, and what lies there; a leaf is not entered."""

    path: str
    keys: tuple[Any, ...]
    value: Any
    is_leaf: bool


def walk(
    tree: Any, enters: Callable[[str, Any], bool] | None = None, path: str = "", keys: tuple[Any, ...] = ()
) -> Iterator[Place]:
    """All places of `tree` in its own order, a container before what lies in it. Not collective.

    For one rank's own use, where `nodes` is for what ranks compare: keys are not sorted and may be anything, and paths
    are names: ``model.layers[0].my weight``. `enters(path, value)` says which containers are looked into, by default
    all. `path` and `keys` lead to `tree`. What contains itself, or is deeper than 100, is an InvalidArgumentError.
    """
    inside = children(tree) if enters is None or enters(path, tree) else None
    yield Place(path, keys, tree, inside is None)
    if inside is None:
        return
    if len(keys) > values.MAX_DEPTH:
        raise InvalidArgumentError(
            f"the state at {path[:80]}... is nested deeper than {values.MAX_DEPTH}, or contains itself"
        )
    by_index = _goes_by_index(tree)
    for key, child in inside.items():
        step = f"[{key}]" if by_index else f".{key}"
        yield from walk(child, enters, path + step if path or keys else step.removeprefix("."), (*keys, key))


def contains(tree: Any, fits: Callable[[Any], bool]) -> bool:
    """Whether a value that `fits` lies anywhere in `tree`, or is it. Not collective."""
    return any(fits(place.value) for place in walk(tree))


def rebuild(tree: Any, leaves: Mapping[str, Any], is_leaf: IsLeaf | None = None) -> Any:
    """`tree` with other `leaves`, by path; those that are not named stay. Not collective.

    Mutable mappings, lists and dataclasses are changed in place; tuples, namedtuples and frozen dataclasses that hold
    something new are replaced by new ones of their type, and all else stays the same object. A path that is no leaf of
    `tree` is an InvalidArgumentError, and then nothing is changed.
    """
    unknown = leaves.keys() - {path for path, _ in flatten(tree, is_leaf)}
    if unknown:
        raise InvalidArgumentError(f"the tree has no leaf {min(unknown)!r}")
    return _rebuilt(tree, "", leaves, is_leaf)


def _nodes(value: Any, path: str, is_leaf: IsLeaf | None, above: dict[int, str]) -> Iterator[Node]:
    container = None if is_leaf is not None and is_leaf(value) else _container(value)
    yield Node(path, value, container)
    if container is None:
        return
    if id(value) in above:
        raise InvalidArgumentError(f"a tree contains itself: {path} is {above[id(value)] or 'the whole tree'} again")
    if len(above) == values.MAX_DEPTH:
        raise InvalidArgumentError(f"a tree is nested deeper than {values.MAX_DEPTH}, at {path[:80]}...")
    above[id(value)] = path
    for step, _, child in _steps(value, path):
        yield from _nodes(child, path + step if path else step.removeprefix("."), is_leaf, above)
    del above[id(value)]


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _container(value: Any) -> str | None:
    """The kind of container that `value` is, in words that equal containers share; None for a leaf."""
    if _is_dataclass(value):
        return f"dataclass {type(value).__qualname__}"
    if isinstance(value, Mapping):
        return "dict"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return f"namedtuple {type(value).__qualname__}"
    if isinstance(value, list | tuple):
        return f"{'list' if isinstance(value, list) else 'tuple'} of {len(value)}"
    return None


def children(value: Any) -> dict[Any, Any] | None:
    """What lies in a container by key, field or index, in its own order; None for a leaf. Not collective."""
    if _is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    return dict(enumerate(value)) if isinstance(value, list | tuple) else None


def _goes_by_index(value: Any) -> bool:
    return isinstance(value, list | tuple) and not hasattr(value, "_fields")


def _steps(value: Any, path: str) -> list[tuple[str, Any, Any]]:
    """What lies in a container: the step that a path takes there, the key and the child."""
    found = children(value) or {}
    if isinstance(value, Mapping):
        return _entries(found, path)
    by_index = _goes_by_index(value)
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
        raise UnsupportedError(f"a mapping at {path or 'the top'} has a {type(key).__name__} as a key")
    return f"[{key!r}]"


def _rebuilt(value: Any, path: str, leaves: Mapping[str, Any], is_leaf: IsLeaf | None) -> Any:
    if (is_leaf is not None and is_leaf(value)) or _container(value) is None:
        return leaves.get(path, value)
    changed = {}
    for step, key, child in _steps(value, path):
        new = _rebuilt(child, path + step if path else step.removeprefix("."), leaves, is_leaf)
        if new is not child:
            changed[key] = new
    return with_children(value, changed) if changed else value


def with_children(container: Any, changed: Mapping[Any, Any]) -> Any:
    """`container` with other children, by key, field or index: itself where it can be changed. Not collective."""
    if _is_dataclass(container):
        return _dataclass_with(container, changed)
    if isinstance(container, list | MutableMapping):
        for key, child in changed.items():
            container[key] = child
        return container
    kind: Any = type(container)
    if isinstance(container, Mapping):
        return kind({**container, **changed})
    if hasattr(container, "_fields"):
        return container._replace(**changed)
    return kind(changed.get(index, child) for index, child in enumerate(container))


def alike(own: Any, made: Any) -> Any:
    """`made` with the types of the containers that `own` has in the same places: JSON text keeps mappings as dicts.

    Not collective. `own` is not changed.
    """
    if isinstance(own, MutableMapping) and isinstance(made, Mapping):
        new = copy.copy(own)
        new.clear()
        for key, item in made.items():
            new[key] = alike(own.get(key), item)
        return new
    if isinstance(own, list | tuple) and isinstance(made, list | tuple) and not hasattr(made, "_fields"):
        items = [alike(own[number] if number < len(own) else None, item) for number, item in enumerate(made)]
        if hasattr(own, "_fields"):
            return type(own)(*items) if len(items) == len(own) else made
        return items if isinstance(own, list) else tuple(items)
    return made


def is_mutable(container: Any) -> bool:
    """Whether `with_children` changes the container itself. Not collective."""
    if _is_dataclass(container):
        return not type(container).__dataclass_params__.frozen
    return isinstance(container, list | MutableMapping)


def _dataclass_with(instance: Any, changed: Mapping[str, Any]) -> Any:
    frozen = type(instance).__dataclass_params__.frozen
    target = copy.copy(instance) if frozen else instance
    for name, child in changed.items():
        object.__setattr__(target, name, child) if frozen else setattr(target, name, child)
    return target
