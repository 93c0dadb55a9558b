"""Trees: any nesting of mappings, lists, tuples, namedtuples and dataclasses.

There are two walks. `nodes` is for trees that ranks compare: keys are sorted by their text, and each path is unique.
`walk` is for use on one rank: keys keep their order and may be of any type, and paths read as names.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

from statexchange import values
from statexchange.errors import InvalidArgumentError, UnsupportedError, excerpt, type_text

__all__ = [
    "Node",
    "WalkStep",
    "check_change",
    "check_rebuild",
    "children",
    "contains",
    "flatten",
    "is_mutable",
    "nodes",
    "rebuild",
    "refill",
    "walk",
    "with_children",
    "with_types_of",
]

IsLeaf = Callable[[Any], bool]
_PLAIN_CONTAINERS = (dict, list, tuple, set, deque, OrderedDict, defaultdict)


class Node(NamedTuple):
    """A place in a tree: its path, its value, and the kind of container as text (None for a leaf)."""

    path: str
    value: Any
    container: str | None


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
    return _nodes(tree, "", is_leaf, {})


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
    by_index = _has_indices(tree)
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
    """Return the kind of a container as text, equal for alike containers; None for a leaf."""
    if children(value) is None:
        return None
    if isinstance(value, Mapping) and not _is_dataclass(value):
        return "dict"
    if _has_indices(value):
        return f"{'list' if isinstance(value, list) else 'tuple'} of {len(value)}"
    return f"{'namedtuple' if isinstance(value, tuple) else 'dataclass'} {type(value).__qualname__}"


def children(value: Any) -> dict[Any, Any] | None:
    """Return a container's children by key, field or index, in its own order; None for a leaf. Not collective."""
    if _is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    return dict(enumerate(value)) if isinstance(value, list | tuple) else None


def _has_indices(value: Any) -> bool:
    return isinstance(value, list | tuple) and not hasattr(value, "_fields")


def _steps(value: Any, path: str) -> list[tuple[str, Any, Any]]:
    """Return a container's children as (step of the path, key, child)."""
    found = children(value) or {}
    if isinstance(value, Mapping):
        return _entries(found, path)
    by_index = _has_indices(value)
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


def check_change(container: Any, change: Callable[[Any], object]) -> None:
    """Raise UnsupportedError if a copy of a mutable container refuses a change. Not collective."""
    if type(container) in (dict, list) or not is_mutable(container):
        return
    try:
        change(copy_apart(container))
    except UnsupportedError:
        raise
    except Exception as error:
        text = f"{type_text(container)} refuses the new values here, and raised {excerpt(error, 200)}"
        raise UnsupportedError(text) from error


def copy_apart(container: Any) -> Any:
    """Return a copy that holds the same items, and that can be changed without a change of `container`.

    Not collective. Python's default copy shares the attributes, and so the items of a class that has them in one, or an
    index of them; here the plain containers in attributes are copied. A class that says how it is copied does so
    itself.

    Raises:
        UnsupportedError: the items of a mapping are in an attribute that is no container.
    """
    kind = type(container)
    if hasattr(kind, "__copy__") or (isinstance(container, dict | list) and not getattr(container, "__dict__", None)):
        return copy.copy(container)
    attributes = [getattr(container, name) for name in _attributes_of(container)]
    in_place = isinstance(container, dict | list) or _is_dataclass(container)
    for value in attributes if not in_place else ():
        if not (type(value) in _PLAIN_CONTAINERS or values.has_text(value) or callable(value)):
            raise UnsupportedError(f"{type_text(container)} has no __copy__, and what it holds is not known")
    shared = _leaves_of(attributes) + (_items_of(container) if in_place else [])
    return copy.deepcopy(container, {id(item): item for item in shared})


def _leaves_of(items: list[Any]) -> list[Any]:
    """Return what plain containers hold, at any depth, but not the containers: those are copied."""
    found: list[Any] = []
    waiting, seen = list(items), set()
    while waiting:
        item = waiting.pop()
        if type(item) not in _PLAIN_CONTAINERS:
            found.append(item)
        elif id(item) not in seen:
            seen.add(id(item))
            waiting += _items_of(item)
    return found


def _attributes_of(container: Any) -> list[str]:
    """Return the names of an object's attributes, also of those in slots."""
    slots = [name for kind in type(container).__mro__ for name in _names_of_slots(kind)]
    found = [*getattr(container, "__dict__", {}), *slots]
    return [name for name in found if name not in ("__dict__", "__weakref__") and hasattr(container, name)]


def _names_of_slots(kind: type) -> list[str]:
    slots = kind.__dict__.get("__slots__", ())
    return [slots] if isinstance(slots, str) else list(slots)


def _items_of(container: Any) -> list[Any]:
    if isinstance(container, Mapping):
        return [*container.keys(), *container.values()]
    return [*(children(container) or {}).values()] if _is_dataclass(container) else list(container)


def with_children(container: Any, changed: Mapping[Any, Any]) -> Any:
    """Return `container` with the children in `changed`: itself if it is mutable, else a new one. Not collective.

    Raises:
        UnsupportedError: the type of an immutable container does not build one from its items.
    """
    if _is_dataclass(container):
        return _dataclass_with(container, changed)
    if isinstance(container, list | MutableMapping):
        for key, child in changed.items():
            container[key] = child
        return container
    if isinstance(container, Mapping):
        return _built_like(container, {**container, **changed})
    if hasattr(container, "_fields"):
        return container._replace(**changed)
    return _built_like(container, [changed.get(index, child) for index, child in enumerate(container)])


def with_types_of(own: Any, decoded: Any) -> Any:
    """Return `decoded` with the types of the containers in `own`: mappings that were decoded from JSON are plain dicts.

    Not collective. `own` is not changed.

    Raises:
        UnsupportedError: a container in `own` has a type of which no other one can be made.
    """
    if decoded is own:
        return own
    if isinstance(own, Mapping) and isinstance(decoded, Mapping):
        entries = {key: with_types_of(own.get(key), item) for key, item in decoded.items()}
        return entries if type(own) is dict else _built_like(own, entries)
    if isinstance(own, list | tuple) and type(decoded) in (list, tuple):  # others, as torch.Size, have their type
        items = []
        for i, item in enumerate(decoded):
            items.append(with_types_of(own[i] if i < len(own) else None, item))
        if hasattr(own, "_fields"):
            return type(own)(*items) if len(items) == len(own) else decoded
        return tuple(items) if type(own) is tuple else items if type(own) is list else _built_like(own, items)
    if _is_dataclass(own) and type(decoded) is type(own):
        own_fields, fields = children(own) or {}, children(decoded) or {}
        new = {name: with_types_of(own_fields.get(name), fields[name]) for name in fields}
        return _dataclass_with(copy_apart(own), new)  # of `own`, for its attributes that are no fields
    return decoded


def _built_like(own: Any, items: dict[Any, Any] | list[Any]) -> Any:
    """Return a container of the type of `own` with these items.

    A mutable one is a copy of `own` that is refilled, so that it keeps what else it has, as a defaultdict's factory.
    """
    try:
        if isinstance(own, list | MutableMapping):
            new = copy_apart(own)
            refill(new, items)
        else:
            new = type(own)(items)
        if isinstance(items, dict):
            fits = new.keys() == items.keys()  # some classes convert the mappings in their items
        else:
            fits = len(new) == len(items) and all(one is other for one, other in zip(new, items, strict=True))
    except UnsupportedError:
        raise
    except Exception as error:
        text = f"{type_text(own)} cannot be made with other items, and raised {excerpt(error, 200)}"
        raise UnsupportedError(text) from error
    if not fits:
        raise UnsupportedError(f"{type_text(own)} does not have the items that it is made with")
    return new


def refill(container: Any, items: Mapping[Any, Any] | list[Any]) -> None:
    """Replace the items of a list or mapping. Not collective. Keys that stay are not removed in between."""
    if isinstance(container, list):
        container[:] = items
        return
    assert isinstance(items, Mapping)
    if [*container] != [*items]:
        container.clear()
    for key, item in items.items():
        container[key] = item


def is_mutable(container: Any) -> bool:
    """Whether `with_children` changes the container itself. Not collective."""
    if _is_dataclass(container):
        return not type(container).__dataclass_params__.frozen
    return isinstance(container, list | MutableMapping)


def _dataclass_with(instance: Any, changed: Mapping[str, Any]) -> Any:
    frozen = type(instance).__dataclass_params__.frozen
    target = copy.copy(instance) if frozen else instance
    try:
        for name, child in changed.items():
            object.__setattr__(target, name, child) if frozen else setattr(target, name, child)
    except Exception as error:
        text = f"{type_text(instance)} refuses a new value of its field {name!r}, and raised {excerpt(error, 200)}"
        raise UnsupportedError(text) from error
    return target
