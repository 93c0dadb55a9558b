"""Live state by its paths: its tensors, the objects that load their own state, its plain values, and parameters' names.

``{"model": net, "lrs": [0.1, 0.2], "ema": [tensor, 3]}`` has four entries: ``model``, a module; ``lrs``, a plain value,
because there is nothing in it to be filled; ``ema.0``, a tensor; and ``ema.1``. What a module or an optimizer holds is
asked of it by those who need it.
"""

from __future__ import annotations

import enum
import operator
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from statexchange import values
from statexchange.errors import InvalidArgumentError, UnsupportedError, type_text
from statexchange.sharding.options import LoadOptions
from statexchange.sharding.paths import Key, Path, joined
from statexchange.state.megatron import sharded_kind
from statexchange.state.tree import children, parts, path_to, step_form, step_of
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
    "ParameterName",
    "check_no_state_in",
    "contains_state",
    "flatten",
    "is_leaf",
    "kind_of",
    "parameter_names",
    "places",
    "types_in_objects",
]

Kind = Literal["tensor", "module", "optimizer", "object", "sharded", "value"]
_PLAIN_TYPES = (type(None), bool, int, float, str, dict, list, tuple)


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

    @classmethod
    def of(cls, state: Leaf) -> LiveState:
        """Flatten a state, which may be plain values alone, as one that is saved; else as `flatten`."""
        live = cls()
        _add(live, state, (), "")
        return live

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
    return LiveState.of(state)


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
        text = f"the state at {text[:80]}... is nested deeper than {values.MAX_DEPTH}, or contains itself"
        raise InvalidArgumentError(text)
    live.containers[keys] = value
    for key, item in items.items():
        _add(live, item, (*keys, key), joined(text, key))


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
    if type(value) in _PLAIN_TYPES:
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
    others = [part for part in parts(value) if type(part) not in _PLAIN_TYPES]
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


def parameter_names(live: LiveState) -> dict[int, ParameterName]:
    """Return the names of all parameters in a state by `id`; of several in the state, the first. Not collective.

    Tensors that lie in the state itself are among them if it has an optimizer. The weight of a layer under "nets", the
    second of a list, is ``nets[1].weight`` in the state, ``("nets[1]", "weight")`` in its module, and has the text
    ``nets.1.weight``.
    """
    names: dict[int, ParameterName] = {}
    placed = places(live)
    for path, entry in placed:
        if entry.kind != "module":
            continue
        # The items first: a forward without a backward leaves parameters whole. A hook of `fully_shard` on state_dict()
        # puts back the sharded ones, which are those that optimizers know.
        items = module_items(entry.value, keep_vars=True)
        parameters = {*map(id, entry.value.parameters())}
        begin, text_begin = joined(path, ""), joined(entry.text, "")
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
    if "optimizer" in [entry.kind for entry in live.entries]:
        for path, entry in placed:
            if path and is_torch(entry.value):
                names.setdefault(id(entry.value), ParameterName(path, (path,), (("", path),), (entry.text,)))
    return names


def places(live: LiveState) -> list[tuple[str, LiveEntry]]:
    """Return the entries with their paths as `tree.nodes` writes them, and in its order.

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
        placed.append((order, path, entry))
    placed.sort(key=operator.itemgetter(0))
    return [(path, entry) for _, path, entry in placed]
