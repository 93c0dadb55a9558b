"""Plan the loading of a saved tree into live state: tensors to be read, and callbacks that run afterwards.

Tensors, modules, optimizers and other objects stay the same and are filled; so do the containers that hold them, except
for tuples and frozen dataclasses. A mapping of plain values stays the same and is refilled; what is inside it, and any
other plain value that differs, is replaced by a new one of the same type. Planning changes nothing: an error leaves the
live state as it was.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from statexchange import values
from statexchange.errors import InvalidArgumentError, UnsupportedError, type_text
from statexchange.sharding.rules import with_dots
from statexchange.state.containers import (
    check_change,
    children,
    has_indices,
    is_mutable,
    refill,
    with_children,
    with_types_of,
)
from statexchange.state.leaves import contains_state, is_leaf, is_stateful, load_object, state_of_object
from statexchange.state.megatron import Kind, MegatronTensor, holds_sharded, leaves, sharded_kind
from statexchange.state.merged_trees import SavedTensor, UnknownValue, are_equal
from statexchange.state.modules import (
    has_loader,
    is_extra_state,
    is_module,
    live_items,
    load_items,
    resizable_buffers,
    resizes,
)
from statexchange.state.numbered_parameters import FoundState, check_fit
from statexchange.state.optimizers import (
    hyperparameters,
    install_optimizer,
    is_optimizer,
    is_state_of_optimizer,
    named_parameters,
    optimizer_tree,
    state_of_optimizer,
)
from statexchange.state.saved_optimizers import (
    SavedEntries,
    are_moved,
    check_class,
    found_states,
    numbered_parameters,
)
from statexchange.state.schedulers import Schedulers
from statexchange.state.source_names import is_index
from statexchange.state.state_dict import ParameterName, parameter_names
from statexchange.state.tree import flatten, walk
from statexchange.tensors import is_tensor, is_torch
from statexchange.units import format_number

__all__ = [
    "NO_TREE",
    "LoadPlan",
    "LoadTarget",
    "Matching",
    "ObjectStates",
    "Place",
    "live_paths",
    "live_types",
    "plan_load",
]


class Place(NamedTuple):
    """A place of the live state for a saved tensor that may need a new one.

    Attributes:
        own: the live tensor or array there, or None.
        is_filled: whether `own` itself is filled if the saved tensor fits, or else always a new one like it.
        parameter: the parameter whose optimizer state it is, or None.
        parameter_name: the parameter's name in the state, or "".
        is_step: whether it counts the parameter's steps.
        on_host: whether a new tensor lies on the CPU, wherever the parameter is.
    """

    own: Any = None
    is_filled: bool = True
    parameter: Any = None
    parameter_name: str = ""
    is_step: bool = False
    on_host: bool = False


class ObjectStates:
    """The present states of objects. Each object's `state_dict` is called once, before anything changes.

    A data loader may draw random numbers in it.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}  # the objects themselves too, so that no other gets their id

    def of(self, live: Any, path: str) -> Any:
        """Return the present state of the object at `path`; raise InvalidArgumentError if it raises an error."""
        if id(live) not in self._known:
            self._known[id(live)] = live, state_of_object(live, path, "leave it out by exclude")
        return self._known[id(live)][1]


def live_types(state: Any, objects: ObjectStates, paths: Container[str]) -> dict[str, type]:
    """Return the dataclass, namedtuple and Enum types in the states of the objects at `paths`, by qualified name.

    Not collective. The objects are modules, optimizers and others with a state.
    """
    found: dict[str, type] = {}
    for path, _, value, _ in walk(state, lambda _, value: not is_leaf(value)):
        if path not in paths:
            continue
        if is_module(value):
            found |= values.types_of(live_items(value)[1])
        elif is_optimizer(value):
            shared = {key: entry for key, entry in value.state.items() if not is_torch(key)}
            more = state_of_optimizer(value, path)["more"]
            found |= values.types_of([value.param_groups, list(value.state.values()), shared, more])
        elif is_stateful(value):
            found |= values.types_of(objects.of(value, path))
    return found


def live_paths(live: Any, path: str, names: Mapping[int, str], objects: ObjectStates) -> list[str]:
    """Return the paths of all that is in the state of the object or container `live` at `path`. Not collective.

    `names` are the parameters' names by `id`; where one lacks, an optimizer's parameters have numbers.
    """
    tree = live
    if is_optimizer(live):
        tree = optimizer_tree(live, names, path)
    elif is_stateful(live) and not is_module(live):
        tree = objects.of(live, path)
    return [step.path for step in walk(tree, path=path)]


class LoadTarget(NamedTuple):
    """A live tensor that is to be filled with the saved tensor `name`; `path` is its path for messages and layouts."""

    name: str
    live: Any
    path: str


@dataclass(slots=True)
class LoadPlan:
    """The steps that turn a live state into the saved one.

    Attributes:
        targets: the tensors to be read.
        callbacks: to be called, in order, once the tensors are read.
        missing: paths of the live state that were not saved.
        stateful: those paths among them that are of tensors or of objects with a state.
        unexpected: saved paths that the live state does not have.
        num_values: the number of plain values, and of mappings and lists of such values, that were saved.
        plain: the paths of these, and of states that objects load themselves.
        differing: the paths of param groups that ranks saved with different values for one parameter.
        parameters: those of `missing` that are parameters of optimizers.
        nameless: the paths of optimizers whose parameters have names in the source, and only numbers in the live state.
    """

    targets: list[LoadTarget] = field(default_factory=list)
    callbacks: list[Callable[[], object]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    stateful: set[str] = field(default_factory=set)
    unexpected: list[str] = field(default_factory=list)
    num_values: int = 0
    plain: set[str] = field(default_factory=set)
    differing: set[str] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)
    nameless: set[str] = field(default_factory=set)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is loaded."""
        return not (self.targets or self.callbacks or self.num_values)


Allocate = Callable[[str, Place], Any]
NO_TREE = object()  # where a tree has no entry, or there is no tree: in a list, an item that stays as it is
Stays = Callable[[str, Any], bool]


class Matching(NamedTuple):
    """How the parameters and groups of optimizers are matched.

    Attributes:
        old_names: the source's own names of tensors by those of the state, if the tree may have parameters by number;
            None if it has the names or numbers of the live parameters.
        checks_shapes: whether the shapes of states show the order; not if live tensors may be parts of whole ones.
        ungrouped: the paths of optimizers whose param groups the source does not have.
        classes: the classes of optimizers that the source records, by path with dots before indices.
    """

    old_names: Mapping[str, str] | None = None
    checks_shapes: bool = True
    ungrouped: Container[str] = ()
    classes: Mapping[str, Collection[str]] = MappingProxyType({})


def plan_load(
    state: Any,
    saved: Any,
    allocate: Allocate,
    objects: ObjectStates,
    stays: Stays | None = None,
    rank_tree: Any = NO_TREE,
    matching: Matching = Matching(),  # noqa: B008 (immutable)
) -> LoadPlan:
    """Plan how `state` becomes the decoded tree `saved`. Not collective; nothing is changed yet.

    Args:
        state: the live state.
        saved: the tree, with a SavedTensor for each tensor.
        allocate: `allocate(name, place)` returns the tensor to fill: the live one of this place if it fits, else a new
            one.
        objects: the present states of objects.
        stays: `stays(path, value)` returns whether this entry of a live mapping of plain values is kept although
            `saved` does not have it; by default none is.
        rank_tree: the tree of one rank: of this one if as many ranks load as have saved. `saved`, which has what any
            rank has, decides what exists. Plain values and the states of objects and parameters are those of
            `rank_tree`, where it has them.
        matching: how the parameters and groups of optimizers are matched.

    Raises:
        InvalidArgumentError: something cannot be changed in place, or was saved as another kind; names the path.
        UnsupportedError: a value has a type that the live state does not have; names the path.
    """
    planner = _Planner(allocate, parameter_names(state), _ShardedKeys.of(state, saved), objects, stays, matching)
    if planner.visit(state, saved, "", rank_tree) is not state:
        raise InvalidArgumentError(
            f"the state is {type_text(state)}, which cannot be changed in place: give a mapping that holds it"
        )
    planner.check_shapes()
    planner.schedulers.check()
    return planner.plan


@dataclass(frozen=True, slots=True)
class _ShardedKeys:
    """Keys of ShardedTensors, which are matched by key wherever in the tree they lie.

    `live` are those of the live state; `saved` are the names of all saved tensors, or none if `live` is empty.
    """

    live: frozenset[str]
    saved: frozenset[str]

    @classmethod
    def of(cls, state: Any, saved: Any) -> _ShardedKeys:
        """Collect the keys of a live state and a saved tree."""
        if not holds_sharded(state):
            return cls(frozenset(), frozenset())
        keys = frozenset(leaf.key for _, leaf in leaves(state) if sharded_kind(leaf) == "tensor")
        return cls(keys, frozenset(leaf.name for _, leaf in flatten(saved) if isinstance(leaf, SavedTensor)))


class _Planner:
    """Walks a live state and a saved tree together and writes the plan."""

    def __init__(
        self,
        allocate: Allocate,
        parameters: Mapping[int, ParameterName],
        keys: _ShardedKeys,
        objects: ObjectStates,
        stays: Stays | None,
        matching: Matching,
    ) -> None:
        self.plan = LoadPlan()
        self.schedulers = Schedulers()
        self._states_by_name: list[tuple[Any, Mapping[str, Any], list[FoundState]]] = []  # with their optimizers
        self._allocate = allocate
        self._parameters = parameters
        self._matching = matching
        self._keys = keys
        self._objects = objects
        self._hyperparameters: dict[int, Any] = {}  # live ones by id
        self._stays = stays

    def visit(self, live: Any, saved: Any, path: str, rank_tree: Any = NO_TREE) -> Any:
        """Plan one place of all trees; return `live` if it can be changed in place, else its replacement."""
        kind = sharded_kind(live)
        value = saved if rank_tree is NO_TREE else rank_tree
        if kind is not None:
            self._sharded(live, kind, value if kind == "object" else saved, path)
        elif is_tensor(live):
            self._expect(isinstance(saved, SavedTensor), "a tensor", saved, path)
            self.plan.targets.append(LoadTarget(saved.name, live, _name_at(path)))
        elif is_module(live):
            self._module(live, saved, path, rank_tree)
        elif is_optimizer(live):
            self._optimizer(live, saved, path, rank_tree)
        elif is_stateful(live):
            self._expect(isinstance(saved, Mapping), f"the state of {type_text(live)}", saved, path)
            self.plan.plain.add(_name_at(path))
            new = self._filled(value, path, Place(self._objects.of(live, _name_at(path)), is_filled=False))
            self.schedulers.add(live, self._objects.of(live, _name_at(path)), new, path)
            self.plan.callbacks.append(functools.partial(load_object, live, live.load_state_dict, new, _name_at(path)))
        elif _is_nonempty_root(live, path) or (children(live) is not None and contains_state(live)):
            return self._container(live, saved, path, rank_tree)
        else:
            self.plan.num_values += 1
            self.plan.plain.add(_name_at(path))
            return self._value(live, self._filled(value, path), path)
        return live

    def check_shapes(self) -> None:
        """Check the states of parameters that are not loaded themselves. Others are checked when they are."""
        loaded = {id(target.live) for target in self.plan.targets}
        for optimizer, parameters, found in self._states_by_name:
            others = [one for one in found if id(parameters[one.label]) not in loaded]
            check_fit(optimizer, parameters, others, ())

    def _value(self, live: Any, new: Any, path: str) -> Any:
        """Return what replaces a value without state: `live` itself if it is equal, or if a callback refills it."""
        if isinstance(live, MutableMapping) and isinstance(new, Mapping):
            if self._stays is not None:
                new = _with_kept(live, new, path, self._stays)
            entries = {key: _typed(live.get(key), item, f"{path}.{key}") for key, item in new.items()}
            if not values.is_same(dict(live), entries):
                self._change(live, functools.partial(refill, items=entries), path)
            return live
        new = _typed(live, new, path)
        if values.is_same(live, new):
            return live
        if type(new) is type(live) and is_mutable(live) and not isinstance(live, list):  # a dataclass
            self._change(live, functools.partial(with_children, changed=children(new) or {}), path)
            return live
        if children(live) is None and not values.has_text(live):
            text = f"the state has {type_text(live)} here, which a load would replace by {type_text(new)}: leave it out"
            raise UnsupportedError(f"{text} by exclude", name=_name_at(path))
        return new

    def _change(self, container: Any, change: Callable[[Any], object], path: str) -> None:
        """Plan the change of a mutable container; raise UnsupportedError if a copy of it refuses the change."""
        with _named(path):
            check_change(container, change)
        self.plan.callbacks.append(functools.partial(change, container))

    def _sharded(self, live: Any, kind: Kind, saved: Any, path: str) -> None:
        """Plan an object of Megatron-Core: match tensors by key; merge what a factory builds into its parameter."""
        if kind == "tensor" and live.key in self._keys.saved:
            self.plan.targets.append(LoadTarget(live.key, MegatronTensor(live), live.key))
        elif kind == "tensor":
            self._add_missing([live.key])
        elif kind == "factory":
            built = live.build()
            parts = [(inner, part) for inner, part in leaves(built) if sharded_kind(part) == "tensor"]
            for inner, part in parts:
                self.visit(part, None, f"{path}.{inner}")
            if all(part.key in self._keys.saved for _, part in parts):
                self.plan.callbacks.append(functools.partial(_merge_built, live, built))
        elif kind == "object":
            self.plan.callbacks.append(functools.partial(setattr, live, "data", self._filled(saved, path)))

    def _container(self, live: Any, saved: Any, path: str, rank_tree: Any) -> Any:
        """Plan the children of a container that holds state; return it, or a new one if it cannot be changed."""
        by_index = has_indices(live)
        entries = self._entries_for(live, saved, path, by_index=by_index)
        changed = {}
        items, of_rank = children(live) or {}, children(rank_tree) or {}
        if not by_index:
            entries, of_rank = (_with_parts(items, one) for one in (entries, of_rank))
        for key, value in items.items():
            inner = f"{path}[{key}]" if by_index else f"{path}.{key}"
            if entries.get(key) is NO_TREE:
                continue
            is_object = sharded_kind(value) == "object"
            if not is_object and holds_sharded(value):
                self.visit(value, entries.get(key, {}), inner)
            elif key in entries:
                new = self.visit(value, entries[key], inner, of_rank.get(key, NO_TREE))
                if new is not value:
                    changed[key] = new
            elif not is_object or value.data is not None:  # an object without data needs no saved one
                self._add_missing([_name_at(inner)], stateful=contains_state(value))
        known = {*self._keys.live, *self.plan.unexpected} if self._keys.live else set()
        for key, value in entries.items():
            if key in items:
                continue
            by_key = self._names_of_keys(value)
            if by_key is None:
                self._add_unexpected(path, [key])
            else:
                self.plan.unexpected += [name for name in by_key if name not in known]
                known.update(by_key)
        if changed and is_mutable(live):
            self._change(live, functools.partial(with_children, changed=changed), path)
            return live
        with _named(path):
            return with_children(live, changed) if changed else live

    def _entries_for(self, live: Any, saved: Any, path: str, *, by_index: bool) -> dict[Any, Any]:
        """Return the children of the saved tree where the live state has a container."""
        entries = children(saved)
        if by_index and holds_sharded(live):  # its tensors are matched by key, so that lengths may differ
            return entries or {}
        if by_index:
            fits = isinstance(saved, list | tuple) and len(saved) == len(live)
            self._expect(fits, format_number(len(live), "item"), saved, path)
        else:
            self._expect(entries is not None and not isinstance(saved, list), "a mapping", saved, path)
        assert entries is not None  # `_expect` has checked it
        return entries

    def _names_of_keys(self, saved: Any) -> list[str] | None:
        """Return the names in a saved entry without a live one, if all it has are tensors that are matched by key."""
        if not self._keys.live:
            return None
        found = [leaf for _, leaf in flatten(saved) if leaf is not None and leaf is not NO_TREE]
        if not all(isinstance(leaf, SavedTensor) for leaf in found):
            return None
        return [*dict.fromkeys(leaf.name for leaf in found)]

    def _add_missing(self, paths: Sequence[str], *, stateful: bool = True) -> None:
        self.plan.missing += paths
        if stateful:
            self.plan.stateful.update(paths)

    def _add_unexpected(self, path: str, names: Iterable[Any]) -> None:
        self.plan.unexpected += [_name_at(f"{path}.{name}") for name in names]

    def _module(self, module: Any, saved: Any, path: str, rank_tree: Any) -> None:
        """Plan a module: parameters and buffers are filled, and other entries go through its `load_state_dict`.

        If that does more than copy, by hooks or loaders of modules inside, it is called with what was filled, too.
        """
        self._expect(isinstance(saved, Mapping), "the tensors of a module", saved, path)
        live, rest = live_items(module)
        has_own_loader = has_loader(module, _name_at(path))
        buffers = resizable_buffers(module) if has_own_loader and self._matching.checks_shapes else {}
        loaded = {id(tensor) for name, tensor in live.items() if name in saved}
        resized: dict[str, Any] = {}
        for name, tensor in live.items():
            if name in saved:
                new = self._resized(tensor, saved[name], *buffers.get(id(tensor), (None, "")))
                if new is None:
                    self.visit(tensor, saved[name], f"{path}.{name}")
                else:
                    resized[name] = new
            elif id(tensor) not in loaded:  # a tied tensor is loaded under any of its names
                self._add_missing([_name_at(f"{path}.{name}")])
        values_of = {**saved, **rank_tree} if isinstance(rank_tree, Mapping) else saved
        extra = {
            name: self._filled(values_of[name], f"{path}.{name}", Place(rest[name], is_filled=False))
            for name in rest
            if name in saved
        }
        self._add_missing([_name_at(f"{path}.{name}") for name in rest if name not in saved], stateful=False)
        for name, new in extra.items():
            if not is_extra_state(name):
                _check_like(rest[name], new, f"{path}.{name}")
        if extra or (has_own_loader and loaded):
            load = functools.partial(load_items, module, filled=live.keys() if has_own_loader else ())
            self.plan.callbacks.append(functools.partial(load_object, module, load, extra | resized, _name_at(path)))
        self._add_unexpected(path, [name for name in saved if name not in live and name not in rest])

    def _resized(self, live: Any, saved: Any, part: Any, name: str) -> Any:
        """Return a new tensor of the saved shape, if the module `part` takes it for its buffer `name`; else None."""
        if part is None or not isinstance(saved, SavedTensor):
            return None
        new = self._allocate(saved.name, Place(live))
        if new is live or new.dtype != live.dtype or not resizes(part, name, new):
            return None
        self.plan.targets.append(LoadTarget(saved.name, new, saved.name))
        return new

    def _optimizer(self, optimizer: Any, saved: Any, path: str, rank_tree: Any) -> None:
        """Plan an optimizer: each parameter gets its state and its group's hyperparameters, by name."""
        self._expect(is_state_of_optimizer(saved), "an optimizer", saved, path)
        full_name = _name_at(path)
        in_state = {key: name.in_state for key, name in self._parameters.items()}
        parameters = named_parameters(optimizer, in_state)
        tree = rank_tree if is_state_of_optimizer(rank_tree) else saved
        numbered = numbered_parameters(tree, self._matching.old_names, full_name)
        labels = {} if numbered is None else numbered.labels(optimizer, parameters, self._parameters)
        of_numbers = {*labels.values()}
        labels |= self._other_names(parameters, tree)
        is_ungrouped = full_name in self._matching.ungrouped
        self.schedulers.moved[id(optimizer)] = None if is_ungrouped else are_moved(optimizer, parameters, tree, labels)
        entries = SavedEntries.of(saved, rank_tree, labels)
        check_class(optimizer, self._matching.classes.get(with_dots(full_name), ()), tree["param_groups"], full_name)
        names = {id(parameter): name for name, parameter in parameters.items()}
        if parameters and all(map(is_index, parameters)) and not all(map(is_index, entries.groups)):
            self.plan.nameless.add(full_name)
        if any(
            group["params"] and not any(names[id(one)] in entries.groups for one in group["params"])
            for group in optimizer.param_groups
        ):
            self.schedulers.have_new.add(id(optimizer))
        fitting: list[FoundState] = []
        if entries.differ:
            self.plan.differing.add(_name_at(f"{path}.param_groups"))
        groups: list[dict[str, Any] | None] = []
        states: dict[Any, Any] = {}
        for index, group in enumerate(optimizer.param_groups):
            in_group = {names[id(parameter)]: parameter for parameter in group["params"]}
            groups.append(self._group(group, [*in_group], entries, f"{path}.param_groups[{index}]"))
            settings = groups[-1] or group
            on_host = not (settings.get("fused") or settings.get("capturable"))
            for name, parameter in in_group.items():
                if name in entries.state:
                    place = Place(optimizer.state.get(parameter), parameter=parameter, parameter_name=name)
                    states[parameter] = self._parameter_state(entries.state[name], path, place, on_host=on_host)
                    fitting += found_states(states[parameter], name, _name_at(f"{path}.state.{name}"))
        if self._matching.checks_shapes:
            check_fit(optimizer, parameters, [one for one in fitting if one.label in of_numbers], of_numbers)
            self._states_by_name.append(
                (optimizer, parameters, [one for one in fitting if one.label not in of_numbers])
            )
        for key, shared in entries.shared.items():  # state of the optimizer, not of a parameter
            _check_known(key, f"{path}.state")
            states[key] = self._filled(shared, f"{path}.state.{key}", Place(optimizer.state.get(key)))
        self.schedulers.groups[id(optimizer)] = [
            live if new is None else new for live, new in zip(optimizer.param_groups, groups, strict=True)
        ]
        missing = [_name_at(f"{path}.{name}") for name in parameters if name not in entries.groups]
        self._add_missing(missing)
        self.plan.parameters.update(missing)
        self._add_unexpected(path, [name for name in entries.groups if name not in parameters])
        num_empty = sum(not group["params"] for group in optimizer.param_groups)
        empty_groups = "param_groups (without parameters)"
        if num_empty > entries.num_empty:
            self._add_missing([_name_at(f"{path}.{empty_groups}")], stateful=False)
        if entries.empty_groups:
            self._add_unexpected(path, [empty_groups])
        dropped = [param for name, param in parameters.items() if name in entries.groups and param not in states]
        if entries.groups.keys() >= parameters.keys():
            dropped += [key for key in optimizer.state if not is_torch(key) and key not in states]
        more = self._more(optimizer, entries.more, path)
        install = functools.partial(install_optimizer, optimizer, groups, states, dropped)
        self.plan.callbacks.append(functools.partial(load_object, optimizer, install, more, full_name))

    def _other_names(self, parameters: Mapping[str, Any], tree: Mapping[str, Any]) -> dict[str, str]:
        """Return the names of an optimizer's parameters by the other names in the state that the tree has for them."""
        listed = {name for group in tree["param_groups"] for name in group["params"]}
        found: dict[str, str] = {}
        for name, parameter in parameters.items():
            known = self._parameters.get(id(parameter))
            if known is not None and len(known.in_modules) > 1 and name not in listed:
                found.update((other, name) for other in known.all_in_state if other in listed)
        return found

    def _more(self, optimizer: Any, saved: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Return the saved entries of a state dict beside ``state`` and ``param_groups``; others join the plan."""
        own = state_of_optimizer(optimizer, _name_at(path))["more"]
        self._add_missing([_name_at(f"{path}.{key}") for key in own if key not in saved], stateful=False)
        self._add_unexpected(path, [key for key in saved if key not in own])
        return {
            key: self._filled(saved[key], f"{path}.{key}", Place(own[key], is_filled=False))
            for key in own
            if key in saved
        }

    def _group(
        self, live: Mapping[str, Any], in_group: Sequence[str], entries: SavedEntries, path: str
    ) -> dict[str, Any] | None:
        """Return a group's saved hyperparameters, by its parameters that were saved; None if none was."""
        saved = [name for name in in_group if name in entries.groups]
        if not saved and (in_group or not entries.empty_groups):
            return None
        first = entries.groups[saved[0]] if saved else entries.empty_groups.pop(0)
        new = hyperparameters(first)
        for name in saved[1:]:
            group = entries.groups[name]
            other = hyperparameters(group)
            if group is not first and not are_equal(new, other):
                key = next(key for key in {**new, **other} if not are_equal(new.get(key), other.get(key)))
                if isinstance(new.get(key), SavedTensor) and isinstance(other.get(key), SavedTensor):
                    raise UnsupportedError(
                        f"the source has {key!r} as a tensor for each parameter, and whether those of one group are "
                        "equal is not known: save what the optimizer's state_dict() returns, or a number instead",
                        name=_name_at(path),
                    )
                raise InvalidArgumentError(
                    f"this param group of the state joins {saved[0]!r} and {name!r}, which were saved with different "
                    f"values of {key!r}: make the param groups of the job that saved them",
                    name=_name_at(path),
                    expected=new.get(key),
                    found=other.get(key),
                )
        found = hyperparameters(live)
        for key, value in new.items():
            _check_known(key, path)
            own = found.get(key)
            is_first = id(own) not in self._hyperparameters  # torch gives groups one tensor as the default lr
            self._hyperparameters[id(own)] = own
            found[key] = self._filled(value, f"{path}.{key}", Place(own, is_filled=is_first))
        return found

    def _parameter_state(self, saved: Any, path: str, place: Place, *, on_host: bool) -> Any:
        """Return a parameter's state; torch keeps ``step`` on the CPU unless it is fused or capturable."""
        where = f"{path}.state.{place.parameter_name}"
        if not isinstance(saved, Mapping):
            return self._filled(saved, where, place)
        own = place.own if isinstance(place.own, Mapping) else {}
        found = {}
        for key, entry in saved.items():
            _check_known(key, where)
            is_step = key == "step"
            at = Place(own.get(key), True, place.parameter, place.parameter_name, is_step, is_step and on_host)
            found[key] = self._with_tensors(entry, f"{where}.{key}", at)
        return _typed(place.own, found, where)

    def _filled(self, saved: Any, path: str, place: Place = Place()) -> Any:  # noqa: B008 (immutable)
        """Return a saved subtree with a tensor in place of each SavedTensor, and containers of the live types.

        The tensors join the plan.
        """
        return _typed(place.own, self._with_tensors(saved, path, place), path)

    def _with_tensors(self, saved: Any, path: str, place: Place) -> Any:
        if isinstance(saved, SavedTensor):
            live = self._allocate(saved.name, place)
            # The parameter's own name in the live state leads to its layout rule, whatever the source calls it.
            name = _name_at(path) if place.parameter_name else saved.name
            self.plan.targets.append(LoadTarget(saved.name, live, name))
            return live
        items = children(saved)
        if items is None:
            _check_known(saved, path)
            return saved
        own = {} if is_leaf(place.own) else children(place.own) or {}
        for key in items:
            _check_known(key, path)
        new = {
            key: self._with_tensors(item, f"{path}.{key}", place._replace(own=own.get(key)))
            for key, item in items.items()
        }
        if isinstance(saved, list):
            return list(new.values())
        if type(saved) is dict:
            return new
        with _named(path):
            return with_children(saved, new)

    def _expect(self, holds: bool, wanted: str, saved: Any, path: str) -> None:
        if holds:
            return
        found = type_text(saved)
        if isinstance(saved, SavedTensor):
            found = "a tensor"
        elif isinstance(saved, list | tuple):
            found = format_number(len(saved), "item")
        text = f"state{path} was saved as something else: build it as it was saved, or leave it out by exclude"
        raise InvalidArgumentError(text, name=_name_at(path), expected=wanted, found=found)


def _check_known(saved: Any, path: str) -> None:
    """Raise UnsupportedError for a value, or a set or deque with one, of a type that the live state does not have."""
    for part in () if isinstance(saved, str | int | float) else values.parts_of(saved):
        if isinstance(part, UnknownValue):
            reason = "the state has no value of this type to build it by: give it to register_config"
            if part.problem:
                reason = f"it cannot be built here: {part.problem}"
            raise UnsupportedError(f"a {part.type_name} was saved here, and {reason}", name=_name_at(path))


def _name_at(path: str) -> str:
    """Return the name of a place of the state by its path, which begins with a dot."""
    return path.removeprefix(".")


def _check_like(own: Any, saved: Any, path: str) -> None:
    """Raise InvalidArgumentError unless a tensor has the saved shape and dtype. For those that a module copies."""
    if not is_tensor(own) or not is_tensor(saved):
        return
    expected, found = (tuple(saved.shape), saved.dtype), (tuple(own.shape), own.dtype)
    if expected != found:
        raise InvalidArgumentError(
            "the state's shape or dtype differs from the source's",
            name=_name_at(path),
            expected=expected,
            found=found,
        )


def _with_parts(items: Mapping[Any, Any], entries: dict[Any, Any]) -> dict[Any, Any]:
    """Return saved entries with those inside parts of a module, which were saved by dotted names, as mappings.

    The live state may have such a part alone: ``{"model": {"encoder": encoder}}``.
    """
    for key, value in items.items():
        if key in entries or not isinstance(key, str) or not (is_module(value) or isinstance(value, Mapping)):
            continue
        begin = f"{key}."
        inside = [name for name in entries if isinstance(name, str) and name.startswith(begin) and name not in items]
        if inside:
            part = {name[len(begin) :]: entries[name] for name in inside}
            entries = {name: one for name, one in entries.items() if name not in set(inside)} | {key: part}
    return entries


def _is_nonempty_root(live: Any, path: str) -> bool:
    """Whether this is the whole state, and a mapping whose keys are compared with the saved ones."""
    return path == "" and isinstance(live, Mapping) and len(live) > 0


def _with_kept(own: Mapping[Any, Any], new: Mapping[Any, Any], path: str, stays: Stays) -> dict[Any, Any]:
    """Return the entries of `new`, and those of a live mapping that stay, also of mappings inside; in its order."""
    entries = {}
    for key, value in own.items():
        inner = f"{path}.{key}"
        if key not in new:
            if stays(_name_at(inner), value):
                entries[key] = value
        elif isinstance(value, Mapping) and isinstance(new[key], Mapping):
            entries[key] = _with_kept(value, new[key], inner, stays)
        else:
            entries[key] = new[key]
    return {**entries, **{key: item for key, item in new.items() if key not in entries}}


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Let an error about a container name its path, and say what to do."""
    try:
        yield
    except UnsupportedError as error:
        if error.name is not None:
            raise
        text = f"{error.message}: give a dict, list or tuple, or leave it out by exclude"
        raise UnsupportedError(text, name=_name_at(path)) from error.__cause__


def _typed(own: Any, new: Any, path: str) -> Any:
    with _named(path):
        return with_types_of(own, new)


def _merge_built(factory: Any, built: Any) -> None:
    """Merge the tensors that a factory built, now filled, into its parameter."""
    import torch

    with torch.no_grad():
        factory.data.copy_(factory.merge_fn(_with_data(built)))


def _with_data(built: Any) -> Any:
    """Return a tree with the data of ShardedTensors in their place."""
    if isinstance(built, Mapping):
        return {key: _with_data(item) for key, item in built.items()}
    if type(built) in (list, tuple):
        return type(built)(map(_with_data, built))
    return built.data if sharded_kind(built) == "tensor" else built
