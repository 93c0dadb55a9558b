"""Live state by its paths: its tensors, the objects that load their own state, its plain values, and parameters' names.

``{"model": net, "lrs": [0.1, 0.2], "ema": [tensor, 3]}`` has four entries: ``model``, a module; ``lrs``, a plain value,
because there is nothing in it to be filled; ``ema.0``, a tensor; and ``ema.1``. What a module or an optimizer holds is
asked of it by those who need it.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from statexchange import values
from statexchange.errors import InvalidArgumentError, UnsupportedError, type_text
from statexchange.sharding.options import LoadOptions
from statexchange.sharding.paths import Key, Path, joined
from statexchange.state.megatron import sharded_kind
from statexchange.state.tree import (
    PLAIN_TYPES,
    check_change,
    children,
    has_indices,
    is_dataclass,
    is_mutable,
    parts,
    path_to,
    step_form,
    step_of,
    steps,
    too_deep_error,
    with_children,
)
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
from statexchange.tensors import is_tensor, is_torch

__all__ = [
    "LiveEntry",
    "LiveState",
    "Node",
    "ParameterName",
    "check_no_state_in",
    "contains_state",
    "empty_key_error",
    "flatten",
    "is_leaf",
    "kind_of",
    "nodes",
    "parameter_names",
    "places",
    "replaced",
    "types_in_objects",
]

Kind = Literal["tensor", "module", "optimizer", "object", "sharded", "value"]


class LiveEntry(NamedTuple):
    """An entry of a live state at one path: a tensor, an object that loads its own state, or a plain value.

    Attributes:
        text: the path as text.
        keys: the path.
        value: the value.
        kind: how it is loaded. A container without tensors and objects is one "value".
    """

    text: str
    keys: Path
    value: Leaf
    kind: Kind


@dataclass(slots=True)
class LiveState:
    """A flattened state.

    Attributes:
        entries: what it has, in its own order.
        containers: the containers that were entered, by their paths.
    """

    entries: list[LiveEntry] = field(default_factory=list)
    containers: dict[Path, Leaf] = field(default_factory=dict)

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
    """Flatten a live state that is to be filled. Not collective.

    Raises:
        InvalidArgumentError: it is no state, contains itself, or is nested deeper than 100.
    """
    if not isinstance(state, Mapping) and not contains_state(state):
        raise InvalidArgumentError(f"the state is {type_text(state)}: give modules, optimizers or mappings")
    live = LiveState()
    _add(live, state, (), "")
    return live


def _add(live: LiveState, value: Leaf, keys: Path, text: str) -> None:
    """Add what lies at a path, or all that is inside it."""
    kind = kind_of(value)
    items = None
    if kind == "value":
        items = children(value)
    # A whole state of plain values is entered, so that each of its entries is loaded or missing by itself.
    is_root = not keys and isinstance(value, Mapping)
    if not items or not (is_root or contains_state(value)):
        live.entries.append(LiveEntry(text, keys, value, kind))
        return
    if len(keys) > values.MAX_DEPTH:
        raise too_deep_error(text)
    live.containers[keys] = value
    for key, item in items.items():
        inner = joined(text, key)
        if not inner:
            raise empty_key_error()
        _add(live, item, (*keys, key), inner)


def empty_key_error() -> InvalidArgumentError:
    """Return the error for an empty text as a key of the whole state: the path of its entry would be the whole's."""
    return InvalidArgumentError("the state has an empty text as a key, which leads to the whole: give it a name")


def types_in_objects(live: LiveState, options: LoadOptions, objects: ObjectStates) -> dict[str, type]:
    """Return the dataclass, namedtuple and Enum types in the states of objects that are loaded, by qualified name."""
    types: dict[str, type] = {}
    for entry in live.entries:
        if not (options.wants(entry.text) or options.may_want(entry.text)):
            continue
        if entry.kind == "module":
            types |= values.types_of(live_items(entry.value)[1])
        elif entry.kind == "optimizer":
            optimizer = entry.value
            shared = {key: value for key, value in optimizer.state.items() if not is_torch(key)}
            more = state_of_optimizer(optimizer, entry.text)["more"]
            types |= values.types_of([optimizer.param_groups, list(optimizer.state.values()), shared, more])
        elif entry.kind == "object":
            types |= values.types_of(objects.of(entry.value, entry.text))
    return types


# What a value is


def kind_of(value: Leaf) -> Kind:
    """Return how a value of a live state is loaded; containers are plain values, whatever is inside."""
    if type(value) in PLAIN_TYPES:
        return "value"
    if is_tensor(value):
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
        all_in_state: all its names in the whole state.
        in_modules: each module of the state that has it, by its path, with its name there. For one that lies in the
            state itself, in no module, its path is its name.
        texts: its names in the whole state with dots between all keys, as sources without a tree have them.
    """

    in_state: str
    all_in_state: tuple[str, ...]
    in_modules: tuple[tuple[str, str], ...]
    texts: tuple[str, ...]


def parameter_names(placed: Sequence[Node]) -> dict[int, ParameterName]:
    """Return the names of all parameters in a state by `id`; of several in the state, the first. Not collective.

    `placed` are the places of the state, as `places` or `nodes` returns them.

    Tensors that lie in the state itself are among them if it has an optimizer. The weight of a layer under "nets", the
    second of a list, is ``nets[1].weight`` in the state, ``("nets[1]", "weight")`` in its module, and has the text
    ``nets.1.weight``.
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
            new = ParameterName(begin + name, (begin + name,), ((path, name),), (text_begin + name,))
            first = names.setdefault(id(item), new)
            # A parameter that is tied inside a module has the first of its names there.
            if path not in dict(first.in_modules):
                names[id(item)] = ParameterName(first.in_state, *map(operator.add, first[1:], new[1:]))
    # Without one they would be no parameters, and a mapping of tensors may be large.
    if "optimizer" in [node.kind for node in placed]:
        for path, text, value, *_ in placed:
            if path and is_torch(value):
                names.setdefault(id(value), ParameterName(path, (path,), (("", path),), (text,)))
    return names


def places(live: LiveState) -> list[Node]:
    """Return the entries with their paths as `nodes` writes them, and in its order.

    That order is the same for mappings that were filled in another one, as on another rank.
    """
    placed = []
    for entry in live.entries:
        path = ""
        order: list[tuple[str, Key | int]] = []
        for depth, key in enumerate(entry.keys):
            container = live.containers[entry.keys[:depth]]
            # At one depth below one path all keys are of one container: either steps are compared, or positions.
            if isinstance(container, Mapping):
                step = step_of(key, path)
                order.append((step, 0))
            else:
                step = step_form(container).format(key)
                # A list may have very many items, in which a search would take long.
                position = key
                if not isinstance(key, int):
                    position = [*(children(container) or {})].index(key)
                order.append(("", position))
            path = path_to(path, step)
        placed.append((order, Node(path, entry.text, entry.value, entry.kind)))
    placed.sort(key=operator.itemgetter(0))
    return [node for _, node in placed]
