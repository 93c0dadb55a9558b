"""How live state becomes a saved tree: which tensors are to be read where, and what else is to be done afterwards.

Live objects stay the same objects: tensors are filled in place, containers keep their type. Only a tuple or a frozen
dataclass is replaced, in what holds it, by a new one of its type.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from statexchange import values
from statexchange.errors import InvalidArgumentError
from statexchange.state.leaves import contains_state, is_leaf, is_stateful
from statexchange.state.megatron import Kind, MegatronTensor, holds_sharded, sharded_kind, leaves
from statexchange.state.modules import is_module, live_items, load_extra_state
from statexchange.state.state_dict import modules_of, parameter_names
from statexchange.state.optimizers import (
    hyperparameters,
    is_optimizer,
    named_parameters,
    optimizer_tree,
    parameters_of,
    set_optimizer,
)
from statexchange.state.tree import alike, children, contains, flatten, is_mutable, rebuild, with_children
from statexchange.tensors import is_tensor

__all__ = ["LoadPlan", "SavedTensor", "merge_trees", "plan_load", "tree_from_names"]


class SavedTensor:
    """In a decoded tree, the place of a tensor of this name."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


def merge_trees(trees: Sequence[Any]) -> Any:
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
class LoadPlan:
    """What is to be done so that a live state becomes the saved one.

    `targets` are (name, live tensor, path) of tensors to be read; `callbacks` what is to be done afterwards, in order.
    `missing` are paths of the live state that were not saved, `unexpected` those that the live state has no place for.
    """

    targets: list[tuple[str, Any, str]] = field(default_factory=list)
    callbacks: list[Callable[[], None]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


Make = Callable[[str, Any, Any], Any]


def plan_load(state: Any, saved: Any, make: Make) -> LoadPlan:
    """How `state` becomes the decoded tree `saved`. Nothing is changed yet. Not collective.

    `make(name, own, like)` gives memory for a tensor in whose place the live state has `own`, if anything; new memory
    lies as `like` does. What cannot be changed in place is an InvalidArgumentError that names its path.
    """
    names = {key: name for key, (name, _) in parameter_names(modules_of(state)).items()}
    found = _Restorer(make, names, _Keys.of(state, saved))
    if found.visit(state, saved, "") is not state:
        raise InvalidArgumentError(
            f"the state is a {type(state).__name__}, which cannot be changed in place: give a mapping that holds it"
        )
    return found.plan


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
        keys = frozenset(leaf.key for _, leaf in leaves(state) if sharded_kind(leaf) == "tensor")
        return cls(keys, frozenset(leaf.name for _, leaf in flatten(saved) if isinstance(leaf, SavedTensor)))


class _Restorer:
    """Walks a live state and a saved tree together."""

    def __init__(self, make: Make, names: Mapping[int, str], keys: _Keys) -> None:
        self.plan = LoadPlan()
        self._make = make
        self._names = names
        self._keys = keys

    def visit(self, live: Any, saved: Any, path: str) -> Any:
        """One place of both; returns what is to stand there: `live` itself where that can be changed in place."""
        kind = sharded_kind(live)
        if kind is not None:
            self._sharded(live, kind, saved, path)
        elif is_tensor(live):
            self._expect(isinstance(saved, SavedTensor), "a tensor", saved, path)
            self.plan.targets.append((saved.name, live, path.removeprefix(".")))
        elif is_module(live):
            self._module(live, saved, path)
        elif is_optimizer(live):
            self._optimizer(live, saved, path)
        elif is_stateful(live):
            self._expect(isinstance(saved, Mapping), f"the state of a {type(live).__name__}", saved, path)
            made = self._made(saved)
            self.plan.callbacks.append(lambda: live.load_state_dict(alike(live.state_dict(), made)))
        elif children(live) is not None and contains_state(live):
            return self._container(live, saved, path)
        else:
            return self._value(live, self._made(saved))
        return live

    def _value(self, live: Any, made: Any) -> Any:
        """What stands in the place of a value without state."""
        if isinstance(live, MutableMapping) and isinstance(made, Mapping):
            self.plan.callbacks.append(functools.partial(_refill, live, made))
            return live
        made = alike(live, made)
        return live if type(made) is type(live) and not contains(made, is_tensor) and made == live else made

    def _sharded(self, live: Any, kind: Kind, saved: Any, path: str) -> None:
        """What is Megatron-Core's: tensors by key, a factory's put together again, an object's data."""
        if kind == "tensor" and live.key in self._keys.saved:
            self.plan.targets.append((live.key, MegatronTensor(live), live.key))
        elif kind == "tensor":
            self.plan.missing.append(live.key)
        elif kind == "factory":
            built = live.build()
            parts = [(inner, part) for inner, part in leaves(built) if sharded_kind(part) == "tensor"]
            for inner, part in parts:
                self.visit(part, None, f"{path}.{inner}")
            if all(part.key in self._keys.saved for _, part in parts):
                self.plan.callbacks.append(functools.partial(_merge_built, live, built))
        elif kind == "object":
            self.plan.callbacks.append(functools.partial(setattr, live, "data", self._made(saved)))

    def _container(self, live: Any, saved: Any, path: str) -> Any:
        """A container that holds state: its children are visited, and those that others are to replace are replaced."""
        by_index = isinstance(live, list | tuple) and not hasattr(live, "_fields")
        decoded = children(saved)
        if by_index and holds_sharded(live):
            decoded = decoded or {}
        elif by_index:
            fits = isinstance(saved, list | tuple) and len(saved) == len(live)
            self._expect(fits, f"{len(live)} items", saved, path)
        else:
            self._expect(decoded is not None and not isinstance(saved, list), "a mapping", saved, path)
        assert decoded is not None  # else it would have been refused
        changed = {}
        items = children(live) or {}
        for key, value in items.items():
            inner = f"{path}[{key}]" if by_index else f"{path}.{key}"
            is_object = sharded_kind(value) == "object"
            if not is_object and holds_sharded(value):
                self.visit(value, decoded.get(key, {}), inner)
            elif key in decoded:
                new = self.visit(value, decoded[key], inner)
                if new is not value:
                    changed[key] = new
            elif not is_object or value.data is not None:  # an object of nothing lacks nothing
                self.plan.missing.append(inner.removeprefix("."))
        left = {key: value for key, value in decoded.items() if key not in items}
        self._unexpected(path, [key for key, value in left.items() if not self._goes_by_key(value)])
        if changed and is_mutable(live):
            self.plan.callbacks.append(functools.partial(with_children, live, changed))
            return live
        return with_children(live, changed) if changed else live

    def _goes_by_key(self, decoded: Any) -> bool:
        """Whether a saved entry of no place is nothing, or tensors that go by keys; those of no place are noted."""
        if not self._keys.live:
            return False
        found = [leaf for _, leaf in flatten(decoded) if leaf is not None]
        if not all(isinstance(leaf, SavedTensor) for leaf in found):
            return False
        known = {*self._keys.live, *self.plan.unexpected}
        self.plan.unexpected += dict.fromkeys(leaf.name for leaf in found if leaf.name not in known)
        return True

    def _unexpected(self, path: str, names: Iterable[Any]) -> None:
        self.plan.unexpected += [f"{path}.{name}".removeprefix(".") for name in names]

    def _module(self, module: Any, saved: Any, path: str) -> None:
        self._expect(isinstance(saved, Mapping), "the tensors of a module", saved, path)
        live, rest = live_items(module)
        there = {id(tensor) for name, tensor in live.items() if name in saved}
        for name, tensor in live.items():
            if name in saved:
                self.visit(tensor, saved[name], f"{path}.{name}")
            elif id(tensor) not in there:  # a tied tensor is there under any of its names
                self.plan.missing.append(f"{path}.{name}".removeprefix("."))
        extra = {name: self._made(saved[name]) for name in rest if name in saved}
        self.plan.missing += [f"{path}.{name}".removeprefix(".") for name in rest if name not in saved]
        for name, made in extra.items():
            if is_tensor(rest[name]) and (tuple(rest[name].shape), rest[name].dtype) != (tuple(made.shape), made.dtype):
                raise InvalidArgumentError(
                    "shape or dtype differs from the source's",
                    name=f"{path}.{name}".removeprefix("."),
                    expected=(tuple(made.shape), made.dtype),
                    found=(tuple(rest[name].shape), rest[name].dtype),
                )
        if extra:
            given = {name: alike(rest[name], made) for name, made in extra.items()}
            self.plan.callbacks.append(functools.partial(load_extra_state, module, given))
        self._unexpected(path, [name for name in saved if name not in live and name not in rest])

    def _optimizer(self, optimizer: Any, saved: Any, path: str) -> None:
        known = isinstance(saved, Mapping) and {"state", "param_groups"} <= saved.keys()
        self._expect(known, "an optimizer", saved, path)
        parameters = named_parameters(optimizer, self._names)
        groups: dict[str, Any] = {}
        for group in saved["param_groups"]:
            for name in group["params"]:
                groups.setdefault(str(name), group)
        states: dict[Any, Any] = {}
        for name, decoded in saved["state"].items():
            parameter = parameters.get(str(name))
            if parameter is not None:
                held = optimizer.state.get(parameter, {})
                states[parameter] = {k: self._entry(v, held.get(k), parameter) for k, v in decoded.items()}
            elif str(name) not in groups:  # what the optimizer keeps for itself
                states[name] = self._made(decoded)
        self.plan.missing += [f"{path}.{name}".removeprefix(".") for name in parameters if name not in groups]
        others = [key for key in saved if key not in ("state", "param_groups")]
        self._unexpected(path, [*(name for name in groups if name not in parameters), *others])
        gone = [parameter for name, parameter in parameters.items() if name in groups and name not in saved["state"]]
        made = [self._group(group, groups, parameters) for group in optimizer.param_groups]
        self.plan.callbacks.append(functools.partial(set_optimizer, optimizer, made, states, gone))

    def _group(
        self, live: Mapping[str, Any], groups: Mapping[str, Any], parameters: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """What a param group is to say: as the saved group of its first parameter that was saved; None as it does."""
        names = {id(parameter): name for name, parameter in parameters.items()}
        ours = [names[id(parameter)] for parameter in live["params"]]
        decoded = next((groups[name] for name in ours if name in groups), None)
        if decoded is None:
            return None
        own = hyperparameters(live)
        return {**own, **{key: alike(own.get(key), self._made(v)) for key, v in hyperparameters(decoded).items()}}

    def _entry(self, decoded: Any, own: Any, parameter: Any) -> Any:
        if not isinstance(decoded, SavedTensor):
            return alike(own, self._made(decoded))
        live = self._make(decoded.name, own, parameter)
        self.plan.targets.append((decoded.name, live, decoded.name))
        return live

    def _made(self, saved: Any) -> Any:
        """A subtree with new tensors, which are to be read."""
        made = {}
        for path, leaf in flatten(saved):
            if isinstance(leaf, SavedTensor):
                made[path] = self._make(leaf.name, None, None)
                self.plan.targets.append((leaf.name, made[path], leaf.name))
        return rebuild(saved, made)

    def _expect(self, holds: bool, wanted: str, saved: Any, path: str) -> None:
        if not holds:
            found = "a tensor" if isinstance(saved, SavedTensor) else f"a {type(saved).__name__}"
            found = f"{len(saved)} items" if isinstance(saved, list | tuple) else found
            what = f"state{path} was saved as something else"
            raise InvalidArgumentError(what, name=path.removeprefix("."), expected=wanted, found=found)


def _refill(own: MutableMapping[Any, Any], made: Mapping[Any, Any]) -> None:
    """Give a mapping the entries of `made`, and no others."""
    items = {key: alike(own.get(key), item) for key, item in made.items()}
    own.clear()
    for key, item in items.items():
        own[key] = item


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
    return built.data if sharded_kind(built) == "tensor" else built


def tree_from_names(
    state: Any,
    has: Callable[[str], bool],
    listed: Iterable[str] = (),
    texts: Mapping[str, str] | None = None,
    keeps: Callable[[str, Any], bool] = lambda *_: True,
) -> Any:
    """As if `state` had been saved with the tensors whose names `has` knows and no other. Not collective.

    `listed` are the names of all tensors, among which an optimizer's are looked for; `texts` are plain values by name,
    as JSON text of `values`; `keeps(path, value)` says which entries of mappings are looked at. All go by their paths
    in the state, joined by dots: in mappings, modules, and lists of modules, whose tensors have one space of names. So
    does an optimizer's state as torch.distributed.checkpoint names it, below ``state`` and ``param_groups`` and the
    name that a parameter has in its module; a hyperparameter that is not among the texts stays as it is.
    """
    known = parameter_names(modules_of(state))
    return _Names(has, keeps, tuple(listed), texts or {}, known).tree(state, "")


@dataclass(frozen=True, slots=True)
class _Names:
    """Names of tensors and texts of values in a source, and each parameter's names in the state and in its module."""

    has: Callable[[str], bool]
    keeps: Callable[[str, Any], bool]
    listed: tuple[str, ...]
    texts: Mapping[str, str]
    parameters: Mapping[int, tuple[str, str]]

    def tree(self, state: Any, prefix: str) -> Any:
        """The tree of what lies at `prefix`, which ends with a dot unless it is empty."""
        if is_module(state):
            live, rest = live_items(state)
            tensors = [*live, *(name for name, value in rest.items() if is_tensor(value))]
            return {name: SavedTensor(prefix + name) for name in tensors if self.has(prefix + name)}
        if is_tensor(state):
            return SavedTensor(prefix.removesuffix("."))
        if sharded_kind(state) in ("factory", "tensor"):
            return [SavedTensor(part.key) for _, part in leaves(state) if self.has(part.key)]
        if is_optimizer(state):
            return self._optimizer(state, prefix)
        if isinstance(state, list | tuple) and all(is_module(part) for part in state):
            return [self.tree(part, prefix) for part in state]
        if isinstance(state, Mapping) and all(isinstance(key, str) for key in state):
            there = {k: v for k, v in state.items() if self.keeps(prefix + k, v)}
            there = {k: v for k, v in there.items() if not is_tensor(v) or self.has(prefix + k)}
            there = {k: v for k, v in there.items() if sharded_kind(v) not in ("object", "local")}
            return {key: self._entry(value, prefix + key) for key, value in there.items()}
        what = f"is a {type(state).__name__}, but this source holds tensors only"
        if not prefix:
            raise InvalidArgumentError(f"the state {what}: give modules, optimizers or mappings of tensors")
        raise InvalidArgumentError(
            f"state at {prefix.removesuffix('.')!r} {what}: leave it out of the state, or load only what the source "
            "has, as include='model.*' does"
        )

    def _entry(self, value: Any, name: str) -> Any:
        """What a mapping has under a key: a plain value if the source has one of this name."""
        if name in self.texts and not is_leaf(value):
            return values.decode(self.texts[name])
        return self.tree(value, f"{name}.")

    def _optimizer(self, optimizer: Any, prefix: str) -> Any:
        """An optimizer's tree with the parameters that the source knows."""
        names = [self.parameters.get(id(parameter)) for parameter in parameters_of(optimizer)]
        known = {in_module: in_state for in_state, in_module in filter(None, names)}
        beginnings = {f"{prefix}state.{name}.": name for name in known}
        state: dict[str, dict[str, Any]] = {}
        for name in self.listed:
            beginning, dot, key = name.rpartition(".")
            if beginning + dot in beginnings:
                state.setdefault(known[beginnings[beginning + dot]], {})[key] = SavedTensor(name)
        groups = self._groups(prefix, known)
        of_live = optimizer_tree(optimizer, {key: name for key, (name, _) in self.parameters.items()}, prefix[:-1])
        for group in of_live["param_groups"]:
            groups.update({name: group for name in group["params"] if name in state and name not in groups})
        return {"state": state, "param_groups": [{**group, "params": [name]} for name, group in groups.items()]}

    def _groups(self, prefix: str, known: Mapping[str, str]) -> dict[str, Any]:
        """The hyperparameters of each parameter in the source, by its name in the state.

        torch's checkpoint has them by number of a group, which lists its ``params``, or flattened by parameter.
        """
        decoded: dict[str, dict[str, Any]] = {}
        beginning = f"{prefix}param_groups."
        for name, text in self.texts.items():
            if name.startswith(beginning):
                owner, _, key = name.removeprefix(beginning).rpartition(".")
                decoded.setdefault(owner, {})[key] = values.decode(text)
        found = {}
        for owner, group in decoded.items():
            for name in group.get("params", [owner]):
                if name in known:
                    found[known[name]] = group
        return found
