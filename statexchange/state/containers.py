"""Containers: what they hold, changes of one, and others of the same type.

Those are mappings, lists, tuples, namedtuples and dataclasses, also of a user's classes, which may refuse a change.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from statexchange import values
from statexchange.errors import UnsupportedError, excerpt, type_text

__all__ = [
    "check_change",
    "children",
    "has_indices",
    "is_dataclass",
    "is_mutable",
    "other_with",
    "refill",
    "with_children",
    "with_types_of",
]

_PLAIN_CONTAINERS = (dict, list, tuple, set, deque, OrderedDict, defaultdict)


def is_dataclass(value: Any) -> bool:
    """Whether `value` is an instance of a dataclass. Not collective."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def children(value: Any) -> dict[Any, Any] | None:
    """Return a container's children by key, field or index, in its own order; None for a leaf. Not collective."""
    if is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    return dict(enumerate(value)) if isinstance(value, list | tuple) else None


def has_indices(value: Any) -> bool:
    """Whether `value` is a list or tuple, and no namedtuple. Not collective."""
    return isinstance(value, list | tuple) and not hasattr(value, "_fields")


def is_mutable(container: Any) -> bool:
    """Whether `with_children` changes the container itself. Not collective."""
    if is_dataclass(container):
        return not type(container).__dataclass_params__.frozen
    return isinstance(container, list | MutableMapping)


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
    in_place = isinstance(container, dict | list) or is_dataclass(container)
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
    return [*(children(container) or {}).values()] if is_dataclass(container) else list(container)


def with_children(container: Any, changed: Mapping[Any, Any]) -> Any:
    """Return `container` with the children in `changed`: itself if it is mutable, else a new one. Not collective.

    Raises:
        UnsupportedError: the type of an immutable container does not build one from its items.
    """
    if is_dataclass(container):
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


def other_with(container: Any, changed: Mapping[Any, Any]) -> Any:
    """Return another container with the children in `changed`; `container` stays as it is. Not collective.

    Raises:
        UnsupportedError: the type refuses a child, or one of which no other can be made.
    """
    return with_children(copy_apart(container) if is_mutable(container) else container, changed)


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
    if is_dataclass(own) and type(decoded) is type(own):
        own_fields, fields = children(own) or {}, children(decoded) or {}
        new = {name: with_types_of(own_fields.get(name), fields[name]) for name in fields}
        return other_with(own, new)  # than `own`, for its attributes that are no fields
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
