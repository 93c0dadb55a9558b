"""A training job's nested state as one tree of JSON values and named tensors; `load_plan` loads it again.

In the tree a module is a mapping of its tensors by name, without the names that wrappers add. An optimizer's state is
keyed by the names of its parameters, if they or their modules are in the state too; so it can be loaded on any number
of ranks. Megatron-Core's ShardedTensors are named by their keys, wherever in the state they lie.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from statexchange import values
from statexchange.errors import InvalidArgumentError, UnsupportedError, type_text
from statexchange.sharding.rules import with_dots
from statexchange.state.containers import children, is_dataclass, other_with, with_children
from statexchange.state.dtensors import is_sharded
from statexchange.state.leaves import contains_state, is_leaf, is_per_rank, is_stateful, state_of_object
from statexchange.state.megatron import Kind, MegatronTensor, sharded_kind
from statexchange.state.modules import check_module, is_module, module_items
from statexchange.state.optimizers import class_name, is_optimizer, named_parameters, optimizer_tree, parameters_of
from statexchange.state.tree import Node, nodes, walk
from statexchange.tensors import is_dtensor, is_tensor, is_torch

__all__ = ["EncodedState", "ParameterName", "encode_state", "note_on_stale_optimizers", "owners_of", "parameter_names"]


class EncodedState(NamedTuple):
    """A state as JSON text, the tensors to which that refers by their dotted paths, and parameters' names by `id`."""

    text: str
    tensors: dict[str, Any]
    names: Mapping[int, str]


def encode_state(state: Any) -> EncodedState:
    """Encode a state. Not collective.

    Raises:
        UnsupportedError: a value has no JSON text, or a module is FSDP1's; the error names the path.
        InvalidArgumentError: the state contains itself, or two tensors have one name.
    """
    tensors: dict[str, Any] = {}

    def keep(value: object, path: str) -> str | None:
        if not is_tensor(value):
            return None
        name = value.name if isinstance(value, MegatronTensor) else path.removeprefix(".")
        tensors[name] = value
        return name

    for node in nodes(state, is_leaf):
        if is_module(node.value):
            check_module(node.value)
    names = {key: name.in_state for key, name in parameter_names(state).items()}
    return EncodedState(values.encode(_plain(state, "", _Context(names)), keep, leaves_anywhere=False), tensors, names)


def owners_of(state: Any, names: Mapping[int, str], has_rule: Callable[[str], bool]) -> dict[str, Any]:
    """Return, as a JSON value, what of a state belongs to a rank and which optimizers it has. Not collective.

    ``per_rank`` has the paths of objects that say that their state belongs to a rank, and of plain tensors beside
    sharded parameters, which belong to a rank's part even where they are equal. ``optimizers`` has the class of each
    optimizer by its path. Empty entries are left out.

    Args:
        state: the state.
        names: the names of parameters by `id`.
        has_rule: `has_rule(name)` returns whether a layout has a rule for a tensor.
    """
    per_rank: list[str] = []
    optimizers: dict[str, str] = {}
    for path, _, value, _ in walk(state, lambda _, value: not is_leaf(value)):
        if is_per_rank(value):
            per_rank.append(with_dots(path))
        if is_optimizer(value):
            optimizers[with_dots(path)] = class_name(value)
            per_rank += _parts_of_rank(value, names, path, has_rule)
    owners = {"per_rank": per_rank, "optimizers": optimizers}
    return {key: paths for key, paths in owners.items() if paths}


def _parts_of_rank(
    optimizer: Any, names: Mapping[int, str], path: str, has_rule: Callable[[str], bool]
) -> Iterator[str]:
    """Yield the names of plain tensors that belong to this rank's part of a sharded parameter.

    A scalar, or a tensor of the parameter's shape, belongs to the whole parameter; so does what a layout places.
    """
    for label, parameter in named_parameters(optimizer, names).items():
        if not is_sharded(parameter) and not has_rule(label):
            continue
        for place, _, tensor, _ in walk(optimizer.state.get(parameter), path=f"{path}.state.{label}".removeprefix(".")):
            is_part = (
                is_tensor(tensor) and not is_dtensor(tensor) and tuple(tensor.shape) not in ((), tuple(parameter.shape))
            )
            if is_part and not has_rule(with_dots(place)):
                yield with_dots(place)


def note_on_stale_optimizers(state: Any, names: Mapping[int, str]) -> tuple[str, ...]:
    """Return a note on optimizers that were made before something replaced the parameters of their module.

    Of each such parameter a module has another one of its shape that no optimizer has. This leaves out an optimizer of
    parameters that lie elsewhere; `names` are those of the state's parameters by `id`. Not collective.
    """
    items = list(nodes(state, is_leaf))
    optimizers = {path: parameters_of(value) for path, value, _, _ in items if is_optimizer(value)}
    optimized = {id(parameter): parameter for parameters in optimizers.values() for parameter in parameters}
    stale = [path for path, parameters in optimizers.items() if any(id(one) not in names for one in parameters)]
    shapes = Counter(tuple(parameter.shape) for key, parameter in optimized.items() if key not in names)
    modules = []
    for path, module, _, _ in items if stale else ():
        if is_module(module):
            free = [one for one in module.parameters() if one.requires_grad and id(one) not in optimized]
            if shapes == Counter(tuple(parameter.shape) for parameter in free):
                modules.append(path)
    if not modules:
        return ()
    text = (
        f"{' or '.join(map(repr, modules))} is not trained by {', '.join(map(repr, stale))}, which got other "
        "parameters of the same shapes: make an optimizer after fully_shard and to_empty, which replace those of a "
        "module"
    )
    return (text,)


class ParameterName(NamedTuple):
    """The names of a parameter.

    Attributes:
        in_state: its name in the whole state, which begins with the path of its module; the first of several.
        in_modules: each module of the state that has it, by its path, with its name there. For one that lies in the
            state itself, in no module, its path is its name.
        texts: its names in the whole state with dots between all keys, as sources without a tree have them.
    """

    in_state: str
    in_modules: tuple[tuple[str, str], ...]
    texts: tuple[str, ...]

    @property
    def all_in_state(self) -> list[str]:
        """All its names in the whole state."""
        return [_joined(path, name) for path, name in self.in_modules]


def parameter_names(state: Any) -> dict[int, ParameterName]:
    """Return the names of all parameters in a state by `id`; of several in the state, the first. Not collective.

    Tensors that lie in the state itself are among them if it has an optimizer.
    """
    names: dict[int, ParameterName] = {}
    tensors: list[Node] = []
    has_optimizer = False
    for node in nodes(state, is_leaf):
        path, value, text = node.path, node.value, node.text
        if is_torch(value):
            tensors.append(node)
            continue
        has_optimizer |= is_optimizer(value)
        if not is_module(value):
            continue
        # The items first: a forward without a backward leaves parameters whole. A hook of `fully_shard` on state_dict()
        # puts back the sharded ones, which are those that optimizers know.
        items = module_items(value, keep_vars=True)
        parameters = {id(parameter) for parameter in value.parameters()}
        for name, item in items.items():
            if id(item) in parameters:
                new = ParameterName(_joined(path, name), ((path, name),), (_joined(text, name),))
                first = names.setdefault(id(item), new)
                if path not in dict(first.in_modules):  # the first of a tied parameter's names
                    in_modules, texts = (*first.in_modules, (path, name)), (*first.texts, *new.texts)
                    names[id(item)] = first._replace(in_modules=in_modules, texts=texts)
    for path, tensor, _, text in tensors if has_optimizer else ():
        if path:
            names.setdefault(id(tensor), ParameterName(path, (("", path),), (text,)))
    return names


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


@dataclass(frozen=True, slots=True)
class _Context:
    """The names of parameters by `id`, and the ShardedTensors found so far by key."""

    names: Mapping[int, str]
    sharded: dict[str, MegatronTensor] = field(default_factory=dict)


def _plain(value: Any, path: str, context: _Context, depth: int = 0, owner: Any = None) -> Any:
    """Return `value` with the states of objects, as mappings, in place of the objects.

    `owner` is the object whose state `value` is a part of. A load gives that to the owner's `load_state_dict`, which
    would find a mapping where the state has another object.
    """
    if depth > values.MAX_DEPTH:
        raise InvalidArgumentError(
            f"the state at {path[:80]}... is nested deeper than {values.MAX_DEPTH}, or contains itself"
        )

    def inner(child: Any, key: object = "") -> Any:
        return _plain(child, f"{path}.{key}" if key != "" else path, context, depth + 1, owner)

    def state_of(child: Any) -> Any:
        return _plain(child, path, context, depth + 1, value)

    kind = sharded_kind(value)
    if kind is not None:
        return _plain_sharded(value, kind, context, inner)
    if is_tensor(value):
        return value
    if owner is not None and is_leaf(value) and not isinstance(value, enum.Enum):
        raise UnsupportedError(
            f"the state of {type_text(owner)} holds {type_text(value)}, which a load would replace by a mapping: let "
            "its state_dict return that object's state_dict(), and its load_state_dict load it",
            name=path.removeprefix("."),
        )
    if is_module(value):
        return state_of(module_items(value))
    if is_optimizer(value):
        return state_of(optimizer_tree(value, context.names, path.removeprefix(".")))
    if is_stateful(value):
        state = state_of_object(value, path.removeprefix("."), "leave it out of the state")
        if not isinstance(state, Mapping):
            text = f"state_dict() of {type_text(value)} returned {type_text(state)}: only a mapping can be loaded again"
            raise UnsupportedError(text, name=path.removeprefix("."))
        return state_of(state)
    if isinstance(value, Mapping) and is_dataclass(value):
        text = f"{type_text(value)} here is both a mapping and a dataclass, whose entries may differ: give a dict of it"
        raise UnsupportedError(text, name=path.removeprefix("."))
    if isinstance(value, Mapping):
        return {key: inner(item, key) for key, item in value.items() if sharded_kind(item) != "local"}
    found = children(value)
    if found is None:
        return value
    if is_dataclass(value) and not contains_state(value):
        return value
    items = {key: inner(item, key) for key, item in found.items()}
    if isinstance(value, list):
        return list(items.values())
    if owner is not None and is_dataclass(value):  # the owner loads it as what it was
        return other_with(value, items)
    # Other containers become mappings: `with_children` would change a mutable one, which belongs to the live state.
    if not isinstance(value, tuple):
        return items
    try:
        return with_children(value, items)
    except UnsupportedError as error:
        text = f"{error.message}: give a list, or leave it out of the state"
        raise UnsupportedError(text, name=path.removeprefix(".")) from error.__cause__


def _plain_sharded(value: Any, kind: Kind, context: _Context, inner: Callable[[Any], Any]) -> Any:
    """Return what an object of Megatron-Core holds: one tensor for all parts of a key, or an object's data."""
    if kind == "factory":
        return inner(value.build())
    if kind == "tensor":
        if value.key in context.sharded:
            context.sharded[value.key].add(value)
        else:
            context.sharded[value.key] = MegatronTensor(value)
        return context.sharded[value.key]
    return inner(value.data) if kind == "object" else None
