"""Live state as a tree: what its containers hold, what its leaves are, walks over it, and changes of containers.

Containers are mappings, lists, tuples, namedtuples and dataclasses, also of a user's classes, which may refuse a
change. ``{"model": net, "lrs": [0.1, 0.2], "ema": [tensor, 3]}`` has four entries for `flatten`: ``model``, a module;
``lrs``, a plain value, because there is nothing in it to be filled; ``ema.0``, a tensor; and ``ema.1``. What a module
or an optimizer holds is asked of it by those who need it.

`walk` and `flatten` are for use on one rank: keys keep their order and may be of any type, and paths read as names.
Trees that ranks compare are walked by `steps`: keys are sorted by their text, and each path is unique.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from statexchange import values
from statexchange.errors import InvalidArgumentError, UnsupportedError, excerpt, type_text
from statexchange.sharding.options import LoadOptions
from statexchange.sharding.paths import Key, Path, joined, paths_above, text_of
from statexchange.state.types import Leaf
from statexchange.state.units import (
    ObjectStates,
    is_module,
    is_optimizer,
    is_per_rank,
    is_stateful,
    live_items,
    module_items,
    state_of_optimizer,
)
from statexchange.tensors import is_tensor_type, is_torch

Container: TypeAlias = Leaf
"""A mapping, list, tuple, namedtuple or dataclass."""

Items: TypeAlias = Mapping[Leaf, Leaf]

# Of a class that is exactly one of these no value has to be asked what it is.
PLAIN_TYPES = (*values.SCALAR_TYPES, dict, list, tuple)

# The attributes of Megatron-Core's classes.
_OBJECT = ("key", "data", "global_shape", "global_offset", "replica_id")
_TENSOR = (*_OBJECT, "local_shape", "dtype", "prepend_axis_num")
_FACTORY = ("key", "data", "build_fn", "merge_fn", "replica_id")


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
    """Return a copy that holds the same items, and that can be changed without a change of `container`. Not collective.

    Python's default copy shares the attributes, and so the items of a class that has them in one, or an index of them;
    here the attributes are copied, too.
    """
    has_attributes = not isinstance(container, dict | list) or bool(getattr(container, "__dict__", None))
    if hasattr(type(container), "__copy__") or not has_attributes:
        return copy.copy(container)
    # What `deepcopy` finds in its memo it takes as copied: the items stay the same objects, tensors among them.
    items = _items_of(container)
    return copy.deepcopy(container, dict(zip(map(id, items), items, strict=True)))


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


# Live state by its paths

Kind = Literal["tensor", "module", "optimizer", "object", "sharded", "value"]


class LiveEntry(NamedTuple):
    """An entry of a live state at one path: a tensor, an object that loads its own state, or a plain value.

    Attributes:
        text: the path as text.
        keys: the path.
        value: the value.
        kind: how it is loaded. A container without tensors and objects is one "value".
        path: the path as in Python, see `Node`.
    """

    text: str
    keys: Path
    value: Leaf
    kind: Kind
    path: str


@dataclass(slots=True)
class LiveState:
    """A flattened state.

    Attributes:
        entries: what it has; the entries of a mapping in the order of their keys' texts, as on every rank.
        containers: the containers that were entered, by their paths.
        texts: the texts of the paths of both.
    """

    entries: list[LiveEntry] = field(default_factory=list)
    containers: dict[Path, Leaf] = field(default_factory=dict)
    texts: set[str] = field(default_factory=set)

    @property
    def units(self) -> set[str]:
        """The paths of optimizers and other objects."""
        paths = set()
        for entry in self.entries:
            if entry.kind in ("optimizer", "object"):
                paths.add(entry.text)
        return paths

    @property
    def per_rank(self) -> set[str]:
        """The paths of the objects whose state belongs to a rank."""
        return {entry.text for entry in self.entries if entry.kind == "object" and is_per_rank(entry.value)}


def flatten(state: Leaf) -> LiveState:
    """Flatten a live state that is to be saved or filled. Not collective.

    Raises:
        InvalidArgumentError: it is no state, contains itself, is nested too deep, or two of its paths look alike.
    """
    if not isinstance(state, Mapping) and not contains_state(state):
        raise InvalidArgumentError(f"the state is {type_text(state)}: give modules, optimizers or mappings")
    live = LiveState()
    _add(live, state, (), "", "")
    _check_texts(live)
    return live


def _check_texts(live: LiveState) -> None:
    """Raise InvalidArgumentError if two entries have one text, or one of them lies by its text in another or in a list.

    As of ``{1: 5, "1": 6}``, ``{1: optimizer, "1": [module]}`` and ``{"a": [module], "a.b": 2}``: most sources know
    texts alone.
    """
    kinds: dict[str, Kind] = {}
    has_dots = False
    for entry in live.entries:
        if entry.text in kinds:
            raise _alike_error(entry.text)
        kinds[entry.text] = entry.kind
        has_dots = has_dots or entry.text.count(".") >= len(entry.keys)
    has_texts_alone = True
    for container in live.containers.values():
        if isinstance(container, Mapping):
            for key in container:
                has_texts_alone = has_texts_alone and type(key) is str
    # With keys of text alone in mappings, and without a dot in one, a text belongs to one path.
    if has_texts_alone and not has_dots:
        return
    lists: dict[str, Path] = {}
    for keys, container in live.containers.items():
        if not isinstance(container, Mapping):
            lists[text_of(keys)] = keys
    for entry in live.entries:
        *above, _ = paths_above(entry.text)
        for text in above:
            # A tensor has nothing inside.
            is_in_entry = kinds.get(text, "tensor") not in ("tensor", "sharded")
            list_keys = lists.get(text, ())
            if is_in_entry or entry.keys[: len(list_keys)] != list_keys:
                raise _alike_error(text)


def _alike_error(text: str) -> InvalidArgumentError:
    what = "two keys of the state look alike here, joined with dots: rename one of them"
    return InvalidArgumentError(what, name=text)


def _add(live: LiveState, value: Leaf, keys: Path, text: str, path: str) -> None:
    """Add what lies at a path, or all that is inside it."""
    live.texts.add(text)
    kind = kind_of(value)
    # A whole state of plain values is entered, so that each of its entries is loaded or missing by itself.
    is_root = not keys and isinstance(value, Mapping)
    if kind != "value" or not children(value) or not (is_root or contains_state(value)):
        live.entries.append(LiveEntry(text, keys, value, kind, path))
        return
    if len(keys) > values.MAX_DEPTH:
        raise too_deep_error(text)
    live.containers[keys] = value
    for step, key, item in steps(value, path):
        inner = joined(text, key)
        if not inner:
            # The path of its entry would be the whole's.
            raise InvalidArgumentError("the state has an empty text as a key, which leads to the whole: give it a name")
        _add(live, item, (*keys, key), inner, path_to(path, step))


def types_in_objects(live: LiveState, options: LoadOptions, objects: ObjectStates) -> dict[str, type]:
    """Return the dataclass, namedtuple and Enum types in the states of objects that are loaded, by qualified name."""
    types: dict[str, type] = {}
    for entry in live.entries:
        if not (options.wants(entry.text) or options.may_want(entry.text)):
            continue
        if entry.kind == "module":
            types |= values.types_of(live_items(entry.value)[1])
        elif entry.kind == "optimizer":
            types |= values.types_of(state_of_optimizer(entry.value, entry.text))
        elif entry.kind == "object":
            types |= values.types_of(objects.of(entry.value, entry.text))
    return types


# What a value is


def kind_of(value: Leaf) -> Kind:
    """Return how a value of a live state is loaded; containers are plain values, whatever is inside."""
    if type(value) in PLAIN_TYPES:
        return "value"
    if is_tensor_type(type(value)):
        return "tensor"
    if is_module(value):
        return "module"
    if is_optimizer(value):
        return "optimizer"
    if is_stateful(value):
        return "object"
    # Last, as few jobs have one, and it takes the most attributes to tell.
    if sharded_kind(value) is not None:
        return "sharded"
    return "value"


def sharded_kind(value: Leaf) -> Literal["tensor", "factory", "object", "local"] | None:
    """Return which of Megatron-Core's classes `value` belongs to; None for any other value.

    "tensor" is a ShardedTensor; "factory" a ShardedTensorFactory, which builds ShardedTensors of a parameter; "object"
    a ShardedObject, such as extra state; "local" a LocalNonpersistentObject, which is in no checkpoint.
    """
    kind = type(value)
    if kind.__name__ == "LocalNonpersistentObject":
        return "local"
    # A user's mapping may have its keys as attributes, and raise KeyError for one that it lacks.
    if kind in PLAIN_TYPES or isinstance(value, Mapping):
        return None
    # One attribute first, which no value of most states has.
    if not hasattr(value, "replica_id") or is_tensor_type(kind):
        return None
    if _has(value, _TENSOR):
        return "tensor"
    if _has(value, _OBJECT):
        return "object"
    if _has(value, _FACTORY):
        return "factory"
    return None


def _has(value: Leaf, names: tuple[str, ...]) -> bool:
    return all(hasattr(value, name) for name in names)


def is_leaf(value: Leaf) -> bool:
    """Whether a walk over a state stops at `value`, whatever it contains. Not collective."""
    return kind_of(value) != "value" or isinstance(value, enum.Enum)


def contains_state(value: Leaf) -> bool:
    """Whether `value` is, or contains, a tensor or an object with a state, to be filled in place. Not collective."""
    others = [part for part in parts(value) if type(part) not in PLAIN_TYPES]
    return any(kind_of(part) != "value" for part in others)


def check_no_state_in(value: Leaf, path: str) -> None:
    """Raise UnsupportedError if `value` is a set or deque that holds a tensor or an object with a state.

    Not collective. Walks do not enter sets and deques, so what lies in them would be left out.
    """
    if not isinstance(value, set | frozenset | deque):
        return
    for item in value:
        if not isinstance(item, int | float | str) and contains_state(item):
            text = f"{type_text(value)} here holds tensors, which cannot be filled in it: give a list"
            raise UnsupportedError(text, name=path)


# Trees that ranks compare


class Node(NamedTuple):
    """A place in a tree whose paths all ranks share.

    Attributes:
        path: the path as in Python: ``model.layers[0]['my weight']``, "" for the whole tree. No two places share one.
        text: the path with dots between all keys, as `LiveEntry.text`.
        value: the value.
        kind: how the value is loaded.
        container: the kind of a container, equal for alike ones; "" for a leaf.
    """

    path: str
    text: str
    value: Leaf
    kind: Kind
    container: str = ""


def nodes(tree: Leaf) -> list[Node]:
    """Return all places of `tree`, a container before its children. Not collective.

    The entries of a mapping come in the order of their keys' texts, in whatever order they were inserted. So the places
    of ``{"b": [1], "a": 2}`` are the mapping, ``a``, ``b`` and ``b[0]``.

    Raises:
        InvalidArgumentError: the tree contains itself, or is nested deeper than 100; it names the path.
        UnsupportedError: a key has no JSON text (see `values`), or two look alike; it names the path.
    """
    placed: list[Node] = []
    _add_nodes(placed, tree, "", "", {})
    return placed


def _add_nodes(placed: list[Node], value: Leaf, path: str, text: str, above: dict[int, str]) -> None:
    # A module, or a tensor of a user's class, may be a mapping or a dataclass as well: its kind comes first.
    kind = kind_of(value)
    container = ""
    if kind == "value" and not isinstance(value, enum.Enum):
        container = _container(value)
    placed.append(Node(path, text, value, kind, container))
    if not container:
        return
    if id(value) in above:
        raise InvalidArgumentError(f"a tree contains itself: {path} is {above[id(value)] or 'the whole tree'} again")
    if len(above) == values.MAX_DEPTH:
        raise InvalidArgumentError(f"a tree is nested deeper than {values.MAX_DEPTH}, at {path[:80]}...")
    # Only what lies above: one list at two places is no cycle.
    above[id(value)] = path
    for step, key, child in steps(value, path):
        _add_nodes(placed, child, path_to(path, step), joined(text, key), above)
    del above[id(value)]


def _container(value: Leaf) -> str:
    """Return the kind of a container as text, equal for alike containers; "" for a leaf."""
    if isinstance(value, Mapping) and not is_dataclass(value):
        return "dict"
    # A user's list counts as a list: ranks may differ in their own classes, but not in what they hold.
    if has_indices(value):
        kind = "list" if isinstance(value, list) else "tuple"
        return f"{kind} of {len(value)}"
    name = type(value).__qualname__
    if isinstance(value, tuple):
        return f"namedtuple {name}"
    return f"dataclass {name}" if is_dataclass(value) else ""


def replaced(value: Leaf, leaves: Mapping[str, Leaf], callbacks: list[Callable[[], object]], path: str = "") -> Leaf:
    """Return what replaces a tree to give it new leaves, and plan the changes of containers in it. Not collective.

    Mutable mappings, lists and dataclasses are changed in place, by callbacks that are added. Tuples, namedtuples and
    frozen dataclasses that hold something new are replaced by new ones of their type. All else stays the same object.

    Args:
        value: the tree.
        leaves: new leaves, by the paths of `nodes`.
        callbacks: a list to which the changes are added.
        path: the path of `value`.

    Raises:
        UnsupportedError: a container refuses a new value; the error names its path.
    """
    if is_leaf(value) or children(value) is None:
        return leaves.get(path, value)
    changed: dict[Leaf, Leaf] = {}
    for step, key, child in steps(value, path):
        new = replaced(child, leaves, callbacks, path_to(path, step))
        # By identity: an equal value of another object may be filled in place later.
        if new is not child:
            changed[key] = new
    if not changed:
        return value
    change = functools.partial(with_children, changed=changed)
    try:
        if not is_mutable(value):
            return change(value)
        # Tried on a copy: a class that refuses its values is an error before anything has changed.
        check_change(value, change)
    except UnsupportedError as error:
        raise error.located(name=path or "(the whole)") from error.__cause__
    callbacks.append(functools.partial(change, value))
    return value


# Names of parameters


class ParameterName(NamedTuple):
    """The names of a parameter.

    Attributes:
        in_state: its name in the whole state, which begins with the path of its module; the first of several.
        in_modules: its names in the modules of the state; one that lies in the state itself has its path as its name.
        texts: its names in the whole state, as in our saves, and with dots between all keys, as in other sources.
    """

    in_state: str
    in_modules: tuple[str, ...]
    texts: tuple[str, ...]


def parameter_names(placed: Sequence[LiveEntry] | Sequence[Node]) -> dict[int, ParameterName]:
    """Return the names of all parameters in a state by `id`; of several in the state, the first. Not collective.

    `placed` are the places of the state, as `flatten` or `nodes` returns them.

    Tensors that lie in the state itself are among them if it has an optimizer. The weight of a layer under "nets", the
    second of a list, is ``nets[1].weight`` in the state, ``weight`` in its module, and ``nets.1.weight`` elsewhere.
    """
    names: dict[int, ParameterName] = {}
    for node in placed:
        path = node.path
        if node.kind != "module":
            continue
        # The items first: a forward without a backward leaves parameters whole. A hook of `fully_shard` on state_dict()
        # puts back the sharded ones, which are those that optimizers know.
        items = module_items(node.value, keep_vars=True)
        parameters = {*map(id, node.value.parameters())}
        begin, text_begin = joined(path, ""), joined(node.text, "")
        for name, item in items.items():
            # Buffers, and copies that some modules make of their parameters, are no optimizer's.
            if id(item) not in parameters:
                continue
            new = ParameterName(begin + name, (name,), (begin + name, text_begin + name))
            first = names.setdefault(id(item), new)
            if first is not new:
                names[id(item)] = ParameterName(first.in_state, *map(operator.add, first[1:], new[1:]))
    # Without one they would be no parameters, and a mapping of tensors may be large.
    if "optimizer" in [node.kind for node in placed]:
        for node in placed:
            if node.path and is_torch(node.value):
                names.setdefault(id(node.value), ParameterName(node.path, (node.path,), (node.path, node.text)))
    return names
