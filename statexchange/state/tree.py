"""Containers: what they hold, walks over nestings of them, changes of one, and others of the same type.

They are mappings, lists, tuples, namedtuples and dataclasses, also of a user's classes, which may refuse a change.

`walk` is for use on one rank: keys keep their order and may be of any type, and paths read as names. Trees that ranks
compare are walked by `steps`: keys are sorted by their text, and each path is unique.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import NamedTuple, TypeAlias

from statexchange import values
from statexchange.errors import InvalidArgumentError, UnsupportedError, excerpt, type_text
from statexchange.sharding.paths import Key, Path
from statexchange.state.types import Leaf

__all__ = [
    "PLAIN_TYPES",
    "WalkStep",
    "check_change",
    "children",
    "contains",
    "has_indices",
    "is_dataclass",
    "is_mutable",
    "other_with",
    "parts",
    "path_to",
    "refill",
    "step_form",
    "step_of",
    "steps",
    "too_deep_error",
    "walk",
    "with_children",
    "with_types_of",
]

Container: TypeAlias = Leaf
"""A mapping, list, tuple, namedtuple or dataclass."""

Items: TypeAlias = Mapping[Leaf, Leaf]

# Of a class that is exactly one of these no value has to be asked what it is.
PLAIN_TYPES = (type(None), bool, int, float, str, dict, list, tuple)
_PLAIN_CONTAINERS = (dict, list, tuple, set, deque, OrderedDict, defaultdict)


def is_dataclass(value: Leaf) -> bool:
    """Whether `value` is an instance of a dataclass. Not collective."""
    return dataclasses.is_dataclass(type(value))


def children(value: Leaf) -> dict[Leaf, Leaf] | None:
    """Return a container's children by key, field or index, in its own order; None for a leaf. Not collective."""
    # A dataclass first: it may be a mapping or a list, too, and its fields are what a save has of it.
    if dataclasses.is_dataclass(type(value)):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return None


def has_indices(value: Leaf) -> bool:
    """Whether `value` is a list or tuple, and no namedtuple. Not collective."""
    return isinstance(value, list | tuple) and not hasattr(value, "_fields")


def is_mutable(container: Container) -> bool:
    """Whether `with_children` changes the container itself. Not collective."""
    if is_dataclass(container):
        return not type(container).__dataclass_params__.frozen
    return isinstance(container, list | MutableMapping)


def check_change(container: Container, change: Callable[[Container], object]) -> None:
    """Raise UnsupportedError if a copy of a mutable container refuses a change. Not collective."""
    # Plain ones take anything, and a copy of a large one takes long.
    if type(container) in (dict, list) or not is_mutable(container):
        return
    try:
        change(copy_apart(container))
    except UnsupportedError:
        raise
    except Exception as error:
        text = f"{type_text(container)} refuses the new values here, and raised {excerpt(error, 200)}"
        raise UnsupportedError(text) from error


def copy_apart(container: Container) -> Leaf:
    """Return a copy that holds the same items, and that can be changed without a change of `container`.

    Not collective. Python's default copy shares the attributes, and so the items of a class that has them in one, or an
    index of them; here the plain containers in attributes are copied. A class that says how it is copied does so
    itself.

    Raises:
        UnsupportedError: the items of a mapping are in an attribute that is no container.
    """
    in_place = isinstance(container, dict | list)
    if hasattr(type(container), "__copy__") or (in_place and not getattr(container, "__dict__", None)):
        return copy.copy(container)
    attributes = [getattr(container, name) for name in _attributes_of(container)]
    in_place |= is_dataclass(container)
    # The items of any other mapping are in an attribute. Where that is no plain container, they would be shared.
    if not in_place:
        for value in attributes:
            if not (type(value) in _PLAIN_CONTAINERS or values.has_text(value) or callable(value)):
                raise UnsupportedError(f"{type_text(container)} has no __copy__, and what it holds is not known")
    shared = _leaves_of(attributes)
    if in_place:
        shared += _items_of(container)
    # What `deepcopy` finds in its memo it takes as copied: the items stay the same objects, tensors among them.
    return copy.deepcopy(container, dict(zip(map(id, shared), shared, strict=True)))


def _leaves_of(items: list[Leaf]) -> list[Leaf]:
    """Return what plain containers hold, at any depth, but not the containers: those are copied."""
    leaves: list[Leaf] = []
    waiting, seen = list(items), set()
    while waiting:
        item = waiting.pop()
        if type(item) not in _PLAIN_CONTAINERS:
            leaves.append(item)
        elif id(item) not in seen:
            seen.add(id(item))
            waiting += _items_of(item)
    return leaves


def _attributes_of(container: Container) -> list[str]:
    """Return the names of an object's attributes, also of those in slots."""
    names = [*getattr(container, "__dict__", {})]
    # Each class lists its own slots, without those of its bases.
    for kind in type(container).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        if isinstance(slots, str):
            slots = [slots]
        names += slots
    return [name for name in names if name not in ("__dict__", "__weakref__") and hasattr(container, name)]


def _items_of(container: Container) -> list[Leaf]:
    if isinstance(container, Mapping):
        return [*container.keys(), *container.values()]
    if is_dataclass(container):
        return [*(children(container) or {}).values()]
    return list(container)


def with_children(container: Container, changed: Items) -> Leaf:
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
    items = list(container)
    for index, child in changed.items():
        items[index] = child
    if type(container) is tuple:
        return tuple(items)
    return _built_like(container, items)


def other_with(container: Container, changed: Items) -> Leaf:
    """Return another container with the children in `changed`; `container` stays as it is. Not collective.

    Raises:
        UnsupportedError: the type refuses a child, or one of which no other can be made.
    """
    if is_mutable(container):
        container = copy_apart(container)
    return with_children(container, changed)


def with_types_of(live: Leaf, decoded: Leaf) -> Leaf:
    """Return `decoded` with the types of the containers in `live`.

    Not collective. `live` is not changed. Mappings that were decoded from JSON are plain dicts: for a live
    ``OrderedDict(a=1)`` a decoded ``{"a": 2}`` becomes ``OrderedDict(a=2)``.

    Raises:
        UnsupportedError: a container in `live` has a type of which no other one can be made.
    """
    if decoded is live:
        return live
    if isinstance(live, Mapping) and isinstance(decoded, Mapping):
        entries = {key: with_types_of(live.get(key), item) for key, item in decoded.items()}
        # A plain dict needs no copy of the live one, which the first step of a job would make for each parameter.
        if type(live) is dict:
            return entries
        return _built_like(live, entries)
    if isinstance(live, list | tuple) and type(decoded) in (list, tuple):  # others, as torch.Size, have their type
        live_items = dict(enumerate(live))
        items = [with_types_of(live_items.get(index), item) for index, item in enumerate(decoded)]
        if hasattr(live, "_fields") and len(items) != len(live):
            return decoded
        if hasattr(live, "_fields"):
            return type(live)(*items)
        if type(live) in (list, tuple):
            return type(live)(items)
        return _built_like(live, items)
    if type(decoded) is type(live) and dataclasses.is_dataclass(type(live)):
        fields, live_fields = children(decoded) or {}, children(live) or {}
        new = {name: with_types_of(live_fields.get(name), item) for name, item in fields.items()}
        return other_with(live, new)  # than `live`, for its attributes that are no fields
    return decoded


def _built_like(live: Container, items: dict[Leaf, Leaf] | list[Leaf]) -> Container:
    """Return a container of the type of `live` with these items.

    A mutable one is a copy of `live` that is refilled, so that it keeps what else it has, as a defaultdict's factory.
    """
    try:
        if isinstance(live, list | MutableMapping):
            new = copy_apart(live)
            refill(new, items)
        else:
            new = type(live)(items)
        fits = [*map(id, new)] == [*map(id, items)]
        if isinstance(items, dict):
            # Not the keys' ids, and not the items: some classes convert the mappings in them.
            fits = new.keys() == items.keys()
    except UnsupportedError:
        raise
    except Exception as error:
        text = f"{type_text(live)} cannot be made with other items, and raised {excerpt(error, 200)}"
        raise UnsupportedError(text) from error
    if not fits:
        raise UnsupportedError(f"{type_text(live)} does not have the items that it is made with")
    return new


def refill(container: Container, items: Items | list[Leaf]) -> None:
    """Replace the items of a list or mapping. Not collective. Keys that stay are not removed in between."""
    if isinstance(container, list):
        container[:] = items
        return
    assert isinstance(items, Mapping)
    if [*container] != [*items]:
        container.clear()
    for key, item in items.items():
        container[key] = item


def _dataclass_with(instance: Container, changed: Mapping[str, Leaf]) -> Container:
    set_field: Callable[[Container, str, Leaf], object] = setattr
    if not is_mutable(instance):
        # A frozen one refuses `setattr`, and `dataclasses.replace` would call its __init__.
        instance, set_field = copy.copy(instance), object.__setattr__
    try:
        for name, child in changed.items():
            set_field(instance, name, child)
    except Exception as error:
        text = f"{type_text(instance)} refuses a new value of its field {name!r}, and raised {excerpt(error, 200)}"
        raise UnsupportedError(text) from error
    return instance


# Steps of the paths that ranks compare


def path_to(path: str, step: str) -> str:
    """Return the path of a child to which a step leads from the container at `path`."""
    if not path:
        return step.removeprefix(".")
    return path + step


def step_form(container: Container) -> str:
    """Return the format of the step that leads to a child: its index in brackets, or its key after a dot."""
    return "[{}]" if has_indices(container) else ".{}"


def steps(value: Container, path: str) -> list[tuple[str, Key, Leaf]]:
    """Return a container's children as (step of the path, key, child), those of a mapping sorted by step.

    Not collective. Paths are written as in Python, and no two places share one: ``{"b": 1, "my a": 2}`` has the steps
    ``['my a']`` and ``.b``. A leaf has none.

    Raises:
        UnsupportedError: a key has no JSON text (see `values`), or two look alike; it names the path.
    """
    placed: list[tuple[str, Key, Leaf]] = []
    form = step_form(value)
    is_mapping = isinstance(value, Mapping)
    for key, child in (children(value) or {}).items():
        # Python refuses to write some keys, as very large numbers, which `step_of` then names.
        step = step_of(key, path) if is_mapping else form.format(key)
        placed.append((step, key, child))
    if not is_mapping:
        return placed
    # By text, as keys of several types have no order, and ranks may have inserted them in different ones.
    placed.sort(key=operator.itemgetter(0))
    for (step, _, _), (following, _, _) in itertools.pairwise(placed):
        if step == following:
            raise UnsupportedError(f"two keys of the mapping at {path or 'the top'} look alike: {step}")
    return placed


def step_of(key: Key, path: str) -> str:
    """Return what leads from a mapping at `path` to an item: ``.weight``, ``['my weight']``, ``[3]``.

    Raises:
        UnsupportedError: the key has no text.
    """
    if type(key) is str:
        return f".{key}" if key.isidentifier() else f"[{key!r}]"
    if not values.has_text(key):
        raise UnsupportedError(
            f"a mapping at {path or 'the top'} has {type_text(key)} as a key: use text, numbers or enums"
        )
    return f"[{key!r}]"


# Walks on one rank


class WalkStep(NamedTuple):
    """A place in a tree: its dotted path, the keys that lead there, and its value."""

    path: str
    keys: Path
    value: Leaf


def walk(
    tree: Leaf, enters: Callable[[str, Leaf], bool] | None = None, path: str = "", keys: Path = ()
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
    yield WalkStep(path, keys, tree)
    if enters is not None and not enters(path, tree):
        return
    items = children(tree)
    if items is None:
        return
    # Each level is a frame of Python, too, of which there are fewer than a value that contains itself would need.
    if len(keys) > values.MAX_DEPTH:
        raise too_deep_error(path)
    form = step_form(tree)
    for key, child in items.items():
        inner = path + form.format(key)
        if not keys and not path:
            inner = inner.removeprefix(".")
        yield from walk(child, enters, inner, (*keys, key))


def too_deep_error(path: str) -> InvalidArgumentError:
    """Return the error for a state that is nested too deep at a path, as one that contains itself."""
    return InvalidArgumentError(
        f"the state at {path[:80]}... is nested deeper than {values.MAX_DEPTH}, or contains itself"
    )


def parts(tree: Leaf) -> list[Leaf]:
    """Return `tree` and all values in it; what is in it twice, or contains itself, is entered once. Not collective."""
    reached = [tree]
    entered: set[int] = set()
    # The list grows in the loop, which needs no frame for each level.
    for part in reached:
        if part is None or isinstance(part, str | int | float) or id(part) in entered:
            continue
        # The list keeps the object, so that no other one gets its id.
        entered.add(id(part))
        # Nearly all are plain ones, of whose items no mapping has to be made.
        if type(part) in (list, tuple):
            reached += part
        elif type(part) is dict:
            reached += part.values()
        else:
            reached += (children(part) or {}).values()
    return reached


def contains(tree: Leaf, *types: type) -> bool:
    """Whether `tree`, or a value in it, is of one of these types. Not collective."""
    for part in parts(tree):
        if isinstance(part, types):
            break
    else:
        return False
    return True
