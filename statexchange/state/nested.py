"""Nested state, as a training job keeps it: modules, optimizers, tensors and numbers as one tree, and back.

In the tree a module is its tensors by their names without wrappers, and an optimizer's state goes by the names of its
parameters, where the state holds their module: so both mean the same on any number of ranks. So do Megatron-Core's
ShardedTensors, which go by their keys, wherever in the state they lie.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from statexchange import values
from statexchange.errors import InvalidArgumentError
from statexchange.state.megatron import Kind, MegatronTensor, holds_sharded, kind_of, leaves
from statexchange.state.modules import is_module, live_items, load_extra_state, module_items
from statexchange.state.tree import flatten, rebuild
from statexchange.tensors import is_tensor

__all__ = ["Restoration", "Saved", "merged", "names_tree", "restoration", "tree_of"]


def tree_of(state: Any) -> tuple[str, dict[str, Any]]:
    """The JSON text of `state`, and its tensors by their dotted paths, to which the text refers. Not collective."""
    tensors: dict[str, Any] = {}

    def keep(value: object, path: str) -> str | None:
        if not is_tensor(value):
            return None
        name = value.name if isinstance(value, MegatronTensor) else path.removeprefix(".")
        tensors[name] = value
        return name

    return values.encode(_plain(state, _Known(_parameter_names(state))), keep), tensors


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known while a state becomes a tree: names of parameters by identity, ShardedTensors so far by key."""

    names: Mapping[int, str]
    sharded: dict[str, MegatronTensor] = field(default_factory=dict)


def _is_optimizer(value: Any) -> bool:
    return hasattr(value, "param_groups") and hasattr(value, "state_dict")


def _parameter_names(state: Any) -> dict[int, str]:
    """The first name of every parameter of every module in `state`, by its identity."""
    names: dict[int, str] = {}
    for path, module in _modules(state, ""):
        parameters = {id(parameter): parameter for parameter in module.parameters()}
        for name, value in module_items(module, keep_vars=True).items():
            if id(value) in parameters:
                names.setdefault(id(value), f"{path}.{name}".removeprefix("."))
    return names


def _modules(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if is_module(value):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _modules(item, f"{path}.{key}")
    elif type(value) in (list, tuple):
        for number, item in enumerate(value):
            yield from _modules(item, f"{path}[{number}]")


def _plain(value: Any, known: _Known) -> Any:
    """`value` with mappings in place of what has a state."""
    kind = kind_of(value)
    if kind is not None:
        return _plain_sharded(value, kind, known)
    if is_module(value):
        return _plain(module_items(value), known)
    if _is_optimizer(value):
        return _optimizer_tree(value, known)
    if hasattr(value, "state_dict") and not isinstance(value, Mapping):
        return _plain(value.state_dict(), known)
    if isinstance(value, Mapping):
        return {key: _plain(item, known) for key, item in value.items() if kind_of(item) != "local"}
    if type(value) in (list, tuple):
        return type(value)(_plain(item, known) for item in value)
    return value


def _plain_sharded(value: Any, kind: Kind, known: _Known) -> Any:
    """Of what is Megatron-Core's: one tensor for all parts of one key, an object's data."""
    if kind == "factory":
        return _plain(value.build(), known)
    if kind == "tensor":
        if value.key in known.sharded:
            known.sharded[value.key].add(value)
        else:
            known.sharded[value.key] = MegatronTensor(value)
        return known.sharded[value.key]
    return _plain(value.data, known) if kind == "object" else None


def _optimizer_tree(optimizer: Any, known: _Known) -> dict[str, Any]:
    """An optimizer's state dict, with the names of its parameters instead of their numbers."""
    state = optimizer.state_dict()
    named = dict(enumerate(_named_parameters(optimizer, known.names)))
    groups = [{**group, "params": [named[number] for number in group["params"]]} for group in state["param_groups"]]
    held = {named.get(key, key): entries for key, entries in state["state"].items()}
    return {**state, "state": held, "param_groups": groups}


def _parameters(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _named_parameters(optimizer: Any, names: Mapping[int, str]) -> dict[str, Any]:
    """An optimizer's parameters by name; by number, all of them, if the state lacks the module of one."""
    parameters = _parameters(optimizer)
    found = {names.get(id(parameter), ""): parameter for parameter in parameters}
    if len(found) == len(parameters) and "" not in found:
        return found
    return {str(number): parameter for number, parameter in enumerate(parameters)}


# Back


class Saved:
    """In a decoded tree, the place of a tensor of this name."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


def merged(trees: Sequence[Any]) -> Any:
    """One tree of what several ranks saved: all that any has, and where they differ, what the first has."""
    first, *others = trees
    for other in others:
        first = _merge(first, other)
    return first


def _merge(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        both = {key: _merge(one[key], other[key]) for key in one if key in other}
        return {**other, **one, **both}
    if _are_groups(one) and _are_groups(other):
        return [*one, *other]  # of a parameter the first group counts
    return one


def _are_groups(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) and "params" in v for v in value)


@dataclass(slots=True)
class Restoration:
    """What is to be done so that a live state becomes the saved one.

    `targets` are (name, live tensor, path) of tensors to be read; `deeds` what is to be done afterwards. `missing` are
    paths of the live state that were not saved, `unexpected` those that the live state has no place for.
    """

    targets: list[tuple[str, Any, str]] = field(default_factory=list)
    deeds: list[Callable[[], None]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


def restoration(state: Any, saved: Any, make: Callable[[str, Any, Any], Any]) -> Restoration:
    """How `state` becomes the decoded tree `saved`. Nothing is changed yet. Not collective.

    `make(name, own, like)` gives memory for a tensor in whose place the live state has `own`, if anything; new memory
    lies as `like` does.
    """
    found = _Restorer(make, _parameter_names(state), _Keys.of(state, saved))
    found.visit(state, saved, "")
    return found.restoration


@dataclass(frozen=True, slots=True)
class _Keys:
    """Tensors that are matched wherever they lie: `live` keys of ShardedTensors and, if any, all `saved` names."""

    live: frozenset[str]
    saved: frozenset[str]

    @classmethod
    def of(cls, state: Any, saved: Any) -> _Keys:
        """What a live state and a saved tree have."""
        if not holds_sharded(state):
            return cls(frozenset(), frozenset())
        keys = frozenset(leaf.key for _, leaf in leaves(state) if kind_of(leaf) == "tensor")
        return cls(keys, frozenset(leaf.name for _, leaf in flatten(saved) if isinstance(leaf, Saved)))


class _Restorer:
    """Walks a live state and a saved tree together."""

    def __init__(self, make: Callable[[str, Any, Any], Any], names: Mapping[int, str], keys: _Keys) -> None:
        self.restoration = Restoration()
        self._make = make
        self._names = names
        self._keys = keys

    def visit(self, live: Any, saved: Any, path: str) -> None:
        """One place of both."""
        kind = kind_of(live)
        if kind is not None:
            self._sharded(live, kind, saved, path)
        elif is_tensor(live):
            self._expect(isinstance(saved, Saved), "a tensor", saved, path)
            self.restoration.targets.append((saved.name, live, path.removeprefix(".")))
        elif is_module(live):
            self._module(live, saved, path)
        elif _is_optimizer(live):
            self._optimizer(live, saved, path)
        elif hasattr(live, "load_state_dict") and not isinstance(live, Mapping):
            self._expect(isinstance(saved, Mapping), f"the state of a {type(live).__name__}", saved, path)
            self.restoration.deeds.append(functools.partial(live.load_state_dict, self._made(saved)))
        elif isinstance(live, Mapping):
            self._expect(isinstance(saved, Mapping), "a mapping", saved, path)
            self._entries(live, saved, path)
        elif isinstance(live, list | tuple) and holds_sharded(live):
            self._entries(live, dict(enumerate(saved if isinstance(saved, list | tuple) else ())), path)
        elif isinstance(live, list | tuple):
            same = isinstance(saved, list | tuple) and len(saved) == len(live)
            self._expect(same, f"{len(live)} items", saved, path)
            self._entries(live, dict(enumerate(saved)), path)
        else:
            raise InvalidArgumentError(f"state{path} is a {type(live).__name__}, which cannot be changed in place")

    def _sharded(self, live: Any, kind: Kind, saved: Any, path: str) -> None:
        """What is Megatron-Core's: tensors by key, a factory's put together again, an object's data."""
        if kind == "tensor" and live.key in self._keys.saved:
            self.restoration.targets.append((live.key, MegatronTensor(live), live.key))
        elif kind == "tensor":
            self.restoration.missing.append(live.key)
        elif kind == "factory":
            built = live.build()
            parts = list(leaves(built))
            for inner, part in parts:
                self.visit(part, None, f"{path}.{inner}")
            if all(part.key in self._keys.saved for _, part in parts):
                self.restoration.deeds.append(functools.partial(_merge_built, live, built))
        elif kind == "object":
            self.restoration.deeds.append(functools.partial(setattr, live, "data", self._made(saved)))

    def _entries(self, live: Any, saved: Mapping[Any, Any], path: str) -> None:
        """The entries of a mapping or sequence: those that hold state are visited, the others replaced."""
        items = dict(live.items() if isinstance(live, Mapping) else enumerate(live))
        for key, value in items.items():
            inner = f"{path}.{key}" if isinstance(live, Mapping) else f"{path}[{key}]"
            is_object = kind_of(value) == "object"
            if not is_object and holds_sharded(value):
                self.visit(value, saved.get(key, {}), inner)
            elif key not in saved:
                if not is_object or value.data is not None:  # an object of nothing lacks nothing
                    self.restoration.missing.append(inner.removeprefix("."))
            elif _holds_state(value):
                self.visit(value, saved[key], inner)
            elif isinstance(live, MutableMapping | list):
                self.restoration.deeds.append(functools.partial(operator.setitem, live, key, self._made(saved[key])))
            elif value != saved[key]:
                kind = type(live).__name__
                raise InvalidArgumentError(f"state{inner} was saved with another value, and a {kind} cannot be changed")
        left = {key: told for key, told in saved.items() if key not in items}
        self._unexpected(path, [key for key, told in left.items() if not self._goes_by_key(told)])

    def _goes_by_key(self, told: Any) -> bool:
        """Whether a saved entry of no place is nothing, or tensors that go by keys; those of no place are noted."""
        if not self._keys.live:
            return False
        found = [leaf for _, leaf in flatten(told) if leaf is not None]
        if not all(isinstance(leaf, Saved) for leaf in found):
            return False
        known = {*self._keys.live, *self.restoration.unexpected}
        self.restoration.unexpected += dict.fromkeys(leaf.name for leaf in found if leaf.name not in known)
        return True

    def _unexpected(self, path: str, names: Iterable[Any]) -> None:
        self.restoration.unexpected += [f"{path}.{name}".removeprefix(".") for name in names]

    def _module(self, module: Any, saved: Any, path: str) -> None:
        self._expect(isinstance(saved, Mapping), "the tensors of a module", saved, path)
        live, rest = live_items(module)
        there = {id(tensor) for name, tensor in live.items() if name in saved}
        for name, tensor in live.items():
            if name in saved:
                self.visit(tensor, saved[name], f"{path}.{name}")
            elif id(tensor) not in there:  # a tied tensor is there under any of its names
                self.restoration.missing.append(f"{path}.{name}".removeprefix("."))
        extra = {name: self._made(saved[name]) for name in rest if name in saved}
        self.restoration.missing += [f"{path}.{name}".removeprefix(".") for name in rest if name not in saved]
        for name, made in extra.items():
            if is_tensor(rest[name]) and (tuple(rest[name].shape), rest[name].dtype) != (tuple(made.shape), made.dtype):
                raise InvalidArgumentError(
                    "shape or dtype differs from the source's",
                    name=f"{path}.{name}".removeprefix("."),
                    expected=(tuple(made.shape), made.dtype),
                    found=(tuple(rest[name].shape), rest[name].dtype),
                )
        if extra:
            self.restoration.deeds.append(functools.partial(load_extra_state, module, extra))
        self._unexpected(path, [name for name in saved if name not in live and name not in rest])

    def _optimizer(self, optimizer: Any, saved: Any, path: str) -> None:
        known = isinstance(saved, Mapping) and {"state", "param_groups"} <= saved.keys()
        self._expect(known, "an optimizer", saved, path)
        parameters = _named_parameters(optimizer, self._names)
        groups: dict[str, Any] = {}
        for group in saved["param_groups"]:
            for name in group["params"]:
                groups.setdefault(str(name), group)
        states: dict[Any, Any] = {}
        for name, told in saved["state"].items():
            parameter = parameters.get(str(name))
            if parameter is not None:
                held = optimizer.state.get(parameter, {})
                states[parameter] = {k: self._entry(v, held.get(k), parameter) for k, v in told.items()}
            elif str(name) not in groups:  # what the optimizer keeps for itself
                states[name] = self._made(told)
        self.restoration.missing += [f"{path}.{name}".removeprefix(".") for name in parameters if name not in groups]
        others = [key for key in saved if key not in ("state", "param_groups")]
        self._unexpected(path, [*(name for name in groups if name not in parameters), *others])
        gone = [parameter for name, parameter in parameters.items() if name in groups and name not in saved["state"]]
        made = [self._group(group, groups, parameters) for group in optimizer.param_groups]
        self.restoration.deeds.append(functools.partial(_set_optimizer, optimizer, made, states, gone))

    def _group(
        self, live: Mapping[str, Any], groups: Mapping[str, Any], parameters: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What a param group is to say: as the saved group of its first parameter that was saved."""
        names = {id(parameter): name for name, parameter in parameters.items()}
        ours = [names[id(parameter)] for parameter in live["params"]]
        told: Any = next((groups[name] for name in ours if name in groups), {})
        return {key: self._made(value) for key, value in told.items() if key not in ("params", "param_names")}

    def _entry(self, told: Any, own: Any, parameter: Any) -> Any:
        if not isinstance(told, Saved):
            return self._made(told)
        live = self._make(told.name, own, parameter)
        self.restoration.targets.append((told.name, live, told.name))
        return live

    def _made(self, saved: Any) -> Any:
        """A subtree with new tensors, which are to be read."""
        made = {}
        for path, leaf in flatten(saved):
            if isinstance(leaf, Saved):
                made[path] = self._make(leaf.name, None, None)
                self.restoration.targets.append((leaf.name, made[path], leaf.name))
        return rebuild(saved, made)

    def _expect(self, holds: bool, wanted: str, saved: Any, path: str) -> None:
        if not holds:
            found = "a tensor" if isinstance(saved, Saved) else f"a {type(saved).__name__}"
            found = f"{len(saved)} items" if isinstance(saved, list | tuple) else found
            what = f"state{path} was saved as something else"
            raise InvalidArgumentError(what, name=path.removeprefix("."), expected=wanted, found=found)


def _merge_built(factory: Any, built: Any) -> None:
    """Put what a factory had built, and what now is filled, into its parameter."""
    import torch

    with torch.no_grad():
        factory.data.copy_(factory.merge_fn(_data_of(built)))


def _data_of(built: Any) -> Any:
    """A tree with ShardedTensors' data in their place."""
    if isinstance(built, Mapping):
        return {key: _data_of(item) for key, item in built.items()}
    if type(built) in (list, tuple):
        return type(built)(map(_data_of, built))
    return built.data if kind_of(built) == "tensor" else built


def _holds_state(value: Any) -> bool:
    """Whether `value` is, or contains, something that is changed in place."""
    if is_tensor(value) or hasattr(value, "state_dict") or kind_of(value) is not None:
        return True
    if isinstance(value, Mapping):
        return any(_holds_state(item) for item in value.values())
    if dataclasses.is_dataclass(value) and any(_holds_state(getattr(value, f.name)) for f in dataclasses.fields(value)):
        raise InvalidArgumentError(f"a {type(value).__name__} with tensors cannot be filled in place: give a mapping")
    return isinstance(value, list | tuple) and any(_holds_state(item) for item in value)


def _set_optimizer(
    optimizer: Any, groups: Sequence[Mapping[str, Any]], states: Mapping[Any, Any], gone: Sequence[Any]
) -> None:
    for parameter in gone:
        optimizer.state.pop(parameter, None)
    for group, told in zip(optimizer.param_groups, groups, strict=True):
        group.update(told)
    optimizer.state.update(states)


def names_tree(state: Any, names: Callable[[str], bool], prefix: str = "") -> Any:
    """As if `state` had been saved with the tensors that `names` says are there, and nothing else. Not collective."""
    if is_module(state):
        live, rest = live_items(state)
        tensors = [*live, *(name for name, value in rest.items() if is_tensor(value))]
        return {name: Saved(prefix + name) for name in tensors if names(prefix + name)}
    if is_tensor(state):
        return Saved(prefix.removesuffix("."))
    if kind_of(state) == "factory" or kind_of(state) == "tensor":
        return [Saved(part.key) for _, part in leaves(state) if names(part.key)]
    if isinstance(state, list | tuple) and all(is_module(part) for part in state):
        return [names_tree(part, names, prefix) for part in state]
    if isinstance(state, Mapping) and all(isinstance(key, str) for key in state):
        there = {k: v for k, v in state.items() if not is_tensor(v) or names(prefix + k)}
        there = {k: v for k, v in there.items() if kind_of(v) not in ("object", "local")}
        return {key: names_tree(value, names, f"{prefix}{key}.") for key, value in there.items()}
    at = f"state at {prefix.removesuffix('.')!r}" if prefix else "state"
    raise InvalidArgumentError(
        f"{at} is a {type(state).__name__}, but this source holds tensors only: give modules or mappings of tensors"
    )
