"""A training job's nested state as one tree of JSON values and named tensors; `match` loads it again.

In the tree a module is a mapping of its tensors by name, without the names that wrappers add. An optimizer's state is
keyed by the names of its parameters, if they or their modules are in the state too; so it can be loaded on any number
of ranks. Megatron-Core's ShardedTensors are named by their keys, wherever in the state they lie. So
``{"model": net, "step": 3}`` becomes ``{"model": {"0.weight": <leaf model.0.weight>}, "step": 3}``.

`Selection` leaves out of the tree what `include` and `exclude` of a save do not select. Patterns are of names in the
state, or of what contains them. What is loaded as a whole is selected as a whole, if one of its names is included and
none is excluded::

    {"model": net, "lrs": [1, 2], "step": 3}, exclude=["model.base.*", "lrs.0"]
    left out: model.base.weight, model.base.bias, lrs

The save records the paths that were left out, and not the patterns, which a load could only ask of names that it has
itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from statexchange import values
from statexchange.errors import InvalidArgumentError, UnsupportedError, type_text
from statexchange.sharding.options import LoadOptions, unmatched
from statexchange.sharding.paths import joined
from statexchange.sharding.rules import Layout, with_dots
from statexchange.state.describe import Description, State, describe
from statexchange.state.megatron import MegatronTensor, add_sharded
from statexchange.state.tree import (
    PLAIN_TYPES,
    LiveEntry,
    children,
    contains_state,
    flatten,
    has_indices,
    is_dataclass,
    kind_of,
    other_with,
    parameter_names,
    parts,
    sharded_kind,
    too_deep_error,
    walk,
    with_children,
)
from statexchange.state.types import Leaf, Optimizer
from statexchange.state.units import (
    check_module,
    class_name,
    hyperparameters,
    is_per_rank,
    module_items,
    named_parameters,
    optimizer_tree,
    parameters_of,
    state_of_object,
)
from statexchange.tensors import TensorLike, collector_paused, is_dtensor, is_sharded, is_tensor, is_tensor_type

_UNITS = ("object", "module", "optimizer")  # kinds of entries that have a state of their own
_LEFT_OUT: Leaf = object()


def _encode(tree: Leaf) -> tuple[str, dict[str, TensorLike]]:
    """Return a tree of `_plain` as JSON text, and the tensors to which that refers by their dotted paths.

    Raises:
        UnsupportedError: a value has no JSON text; the error names the path.
        InvalidArgumentError: two tensors have one name.
    """
    tensors: dict[str, TensorLike] = {}

    def keep(value: Leaf, path: str) -> str | None:
        if not is_tensor_type(type(value)):
            return None
        name = value.name if isinstance(value, MegatronTensor) else path.removeprefix(".")
        tensors[name] = value
        return name

    return values.encode(tree, keep), tensors


def _common_text(tree: Leaf, of_rank: Sequence[LiveEntry]) -> str:
    """Return the text of a tree with a mark in the place of each object whose state belongs to a rank."""
    paths = {entry.path for entry in of_rank}

    def mark(value: Leaf, path: str) -> str | None:
        if path.removeprefix(".") in paths or is_tensor_type(type(value)):
            return path
        return None

    return values.encode(tree, mark)


def owners_of(
    entries: Sequence[LiveEntry],
    of_rank: Sequence[LiveEntry],
    names: Mapping[int, str],
    has_rule: Callable[[str], bool],
) -> dict[str, object]:
    """Return, as a JSON value, what of a state belongs to a rank and which optimizers it has. Not collective.

    ``per_rank`` has the paths of objects that say that their state belongs to a rank, and of plain tensors beside
    sharded parameters, which belong to a rank's part even where they are equal. ``optimizers`` has the class of each
    optimizer by its path. Empty entries are left out.

    Args:
        entries: the places of the state.
        of_rank: those of objects that say that their state belongs to a rank.
        names: the names of parameters by `id`.
        has_rule: `has_rule(name)` returns whether a layout has a rule for a tensor.
    """
    per_rank: list[str] = []
    for entry in of_rank:
        per_rank.append(entry.text)
    optimizers: dict[str, str] = {}
    for entry in entries:
        if entry.kind == "optimizer":
            optimizers[entry.text] = class_name(entry.value)
            per_rank += _parts_of_rank(entry.value, names, entry.text, has_rule)
    owners: dict[str, object] = {}
    if per_rank:
        owners["per_rank"] = per_rank
    if optimizers:
        owners["optimizers"] = optimizers
    return owners


def _parts_of_rank(
    optimizer: Optimizer, names: Mapping[int, str], path: str, has_rule: Callable[[str], bool]
) -> list[str]:
    """Return the names of plain tensors that belong to this rank's part of a sharded parameter.

    A scalar, or a tensor of the parameter's shape, belongs to the whole parameter; so does what a layout places.
    """
    of_rank = []
    for label, parameter in named_parameters(optimizer, names).items():
        # Of a whole parameter each rank has all of the state.
        if not is_sharded(parameter) and not has_rule(label):
            continue
        whole = ((), tuple(parameter.shape))
        for step in walk(optimizer.state.get(parameter), path=f"{path}.state.{label}".removeprefix(".")):
            tensor, place = step.value, with_dots(step.path)
            is_plain = is_tensor_type(type(tensor)) and not is_dtensor(tensor)
            if is_plain and tuple(tensor.shape) not in whole and not has_rule(place):
                of_rank.append(place)
    return of_rank


def _note_on_stale_optimizers(entries: Sequence[LiveEntry], names: Mapping[int, str]) -> tuple[str, ...]:
    """Return a note on optimizers that were made before something replaced the parameters of their module.

    Of each such parameter a module has another one of its shape that no optimizer has. This leaves out an optimizer of
    parameters that lie elsewhere; `names` are those of the state's parameters by `id`. Not collective.
    """
    optimized: dict[int, TensorLike] = {}
    stale: list[str] = []
    for entry in entries:
        if entry.kind == "optimizer":
            parameters = parameters_of(entry.value)
            keys = [*map(id, parameters)]
            optimized.update(zip(keys, parameters, strict=True))
            if not names.keys() >= {*keys}:
                stale.append(entry.path)
    if not stale:
        return ()
    # By shape, as nothing else of the parameters that were replaced is left.
    shapes = Counter(tuple(parameter.shape) for key, parameter in optimized.items() if key not in names)
    modules = []
    for entry in entries:
        if entry.kind == "module":
            free: Counter[tuple[int, ...]] = Counter()
            for parameter in entry.value.parameters():
                if parameter.requires_grad and id(parameter) not in optimized:
                    free[tuple(parameter.shape)] += 1
            if shapes == free:
                modules.append(entry.path)
    if not modules:
        return ()
    text = (
        f"{' or '.join(map(repr, modules))} is not trained by {', '.join(map(repr, stale))}, which got other "
        "parameters of the same shapes: make an optimizer after fully_shard and to_empty, which replace those of a "
        "module"
    )
    return (text,)


@dataclass(frozen=True, slots=True)
class SavedState:
    """A rank's state as it is written: the tensors, described, all other values as JSON text, and what is whose.

    `common` is the text of the values without the objects whose state belongs to a rank, to tell whether ranks differ.
    `selection` is what of it is saved, and `notes` are for the report. `frozen` has the names of the parameters that
    lie in files of their own, with the top-level key of the state, "" if the state is a module.
    """

    config: str
    common: str
    owners: Mapping[str, object]
    described: Description
    rules: Layout
    selection: Selection
    frozen: Mapping[str, str]
    notes: tuple[str, ...]


def describe_save(
    state: State,
    layout: Mapping[str, object] | None,
    options: LoadOptions,
    rank: int,
    *,
    separates_frozen: bool = False,
) -> SavedState:
    """Describe what is selected of the state of this rank. Not collective.

    With `separates_frozen` also the names of parameters that do not train, which lie in files of their own.

    Raises:
        UnsupportedError: patterns are given with a layout, or for objects of Megatron-Core.
    """
    with collector_paused():
        # First, as this refuses keys that have no text, and paths that a load could not tell apart.
        entries = flatten(state).entries
        selects = bool(options.include or options.exclude)
        if selects and (layout is not None or any(entry.kind == "sharded" for entry in entries)):
            what = "Megatron-Core's sharded state dicts" if layout is None else "a layout"
            raise UnsupportedError(f"include and exclude of a save are not for {what}: leave one of them out")
        of_rank: list[LiveEntry] = []
        for entry in entries:
            if entry.kind == "module":
                check_module(entry.value)
            # Of a module or an optimizer, too, a job may say so.
            if entry.kind in _UNITS and is_per_rank(entry.value):
                of_rank.append(entry)
        names: dict[int, str] = {}
        for key, name in parameter_names(entries).items():
            names[key] = name.in_state
        selection = Selection(_plain(state, "", _Context(names)), entries, options)
        config, tensors = _encode(selection.tree)
        rules = _parse_layout(layout, tensors)
        described = describe(tensors, rules, rank)
        ruled: set[str] = set()
        for tensor_name, local in described.tensors.items():
            if local.part is not None:
                ruled.add(tensor_name)
        owners = owners_of(entries, of_rank, names, ruled.__contains__)
        if selection.left_out:
            owners["left_out"] = selection.left_out
        frozen = _frozen_names(entries) if separates_frozen else {}
        common = _common_text(selection.tree, of_rank) if of_rank else config
        notes = _note_on_stale_optimizers(entries, names)
        return SavedState(config, common, owners, described, rules, selection, frozen, notes)


class Selection:
    """The part of a state that is saved.

    `entries` are the places of the state of which `tree` was made.

    Attributes:
        tree: the tree, in which a list has an empty mapping for an item that is left out.
        left_out: the paths of what is left out; "" if that is all.
        unmatched: the patterns of `include` that match no name.
        unused: the patterns of `exclude` that match no name, without those that begin with a path that is left out.

    Raises:
        UnsupportedError: only a part of a namedtuple or dataclass that holds tensors or objects is selected, or one of
            two keys that have one text.
    """

    def __init__(self, tree: Leaf, entries: Sequence[LiveEntry], options: LoadOptions) -> None:
        self.tree = tree
        self.left_out: list[str] = []
        self.unmatched: list[str] = []
        self.unused: list[str] = []
        if not options.include and not options.exclude:
            return
        self._names: set[str] = set()  # that were asked for
        self._kept: set[str] = set()
        self._units = {entry.text: entry.kind for entry in entries if entry.kind in _UNITS}
        self._options = options
        selected = self._select(tree, "")
        self.tree = {} if selected is _LEFT_OUT else selected
        alike = self._kept.intersection(self.left_out)
        if alike:
            text = "two keys of the state look alike here, and include and exclude select one of them: make both text"
            raise UnsupportedError(text, name=min(alike))
        self.unmatched = unmatched(options.include, self._names)
        # The names inside an optimizer that is left out are not collected: a pattern for one of them may be right.
        whole = tuple(joined(path, "") for path in self.left_out if path)
        self.unused = [name for name in unmatched(options.exclude, self._names) if not name.startswith(whole)]

    def _select(self, value: Leaf, path: str) -> Leaf:
        """Return what is selected of the value at a path."""
        kind = self._units.get(path)
        if kind == "optimizer":
            return self._optimizer(value, path)
        items = children(value)
        if not items or kind == "object":
            return self._whole(value, path)
        if not isinstance(value, Mapping) and not self._holds_state(value, path):
            # Lists and records of plain values are loaded as a whole.
            return self._whole(value, path)
        new: dict[Leaf, Leaf] = {}
        for key, item in items.items():
            inner = joined(path, key)
            # Extra state of a module may be a mapping, and goes to one call of its.
            selected = self._whole(item, inner) if kind == "module" else self._select(item, inner)
            if selected is not _LEFT_OUT:
                new[key] = selected
        if not new:
            self.left_out.append(path)
            return _LEFT_OUT
        if isinstance(value, Mapping):
            return new
        if has_indices(value):
            # The others keep their indices.
            return type(value)(new.get(key, {}) for key in items)
        if any(new.get(key) is not item for key, item in items.items()):
            text = f"include and exclude select a part of {type_text(value)} here: select all of it, or nothing"
            raise UnsupportedError(text, name=path)
        return value

    def _holds_state(self, value: Leaf, path: str) -> bool:
        begin = joined(path, "")
        return any(map(is_tensor, parts(value))) or any(unit.startswith(begin) for unit in self._units)

    def _whole(self, value: Leaf, path: str) -> Leaf:
        """Return a value if it is selected as a whole."""
        names = [step.path for step in walk(value, path=path)]
        self._names.update(names)
        if self._options.wants_object(names):
            self._kept.add(path)
            return value
        self.left_out.append(path)
        return _LEFT_OUT

    def _optimizer(self, tree: Mapping[str, Leaf], path: str) -> Leaf:
        """Return an optimizer's state dict with its param groups, and the state of the parameters that are selected."""
        groups = joined(path, "param_groups")
        self._names.update([path, groups])
        if path and not self._options.may_want(path):
            self.left_out.append(path)
            return _LEFT_OUT
        # The groups are needed to know the parameters. Their values are left where they are for what is not selected.
        labels: list[Leaf] = []
        for group in tree["param_groups"]:
            labels += group["params"]
            for label in group["params"]:
                where = joined(groups, label)
                names = [where, *(joined(where, key) for key in hyperparameters(group))]
                self._names.update(names)
                if not self._options.wants_object(names):
                    # With a slash: a parameter may be called by a number, and "param_groups.0" is a group.
                    self.left_out.append(f"{groups}/{label}")
        new: dict[str, Leaf] = {"state": {}, "param_groups": tree["param_groups"]}
        for label in dict.fromkeys([*labels, *tree["state"]]):
            selected = self._whole(tree["state"].get(label, {}), joined(path, f"state.{label}"))
            # One that has made no step has no state. It is noted all the same, as a load would take it for that.
            if selected is not _LEFT_OUT and label in tree["state"]:
                new["state"][label] = selected
        for key, item in tree.items():
            if key not in new:
                selected = self._whole(item, joined(path, key))
                if selected is not _LEFT_OUT:
                    new[key] = selected
        return new


def _frozen_names(entries: Sequence[LiveEntry]) -> dict[str, str]:
    """Return the names of the modules' parameters that need no gradient, with the top-level keys of the state."""
    frozen: dict[str, str] = {}
    for entry in entries:
        if entry.kind == "module" and not all(parameter.requires_grad for parameter in entry.value.parameters()):
            parameters = {*map(id, entry.value.parameters())}
            for name, item in module_items(entry.value, keep_vars=True).items():
                if id(item) in parameters and not item.requires_grad:
                    frozen[joined(entry.text, name)] = entry.text.partition(".")[0]
    return frozen


def _parse_layout(layout: Mapping[str, object] | None, tensors: Mapping[str, TensorLike]) -> Layout:
    """Parse the layout; an optimizer's tensor follows its parameter's rule if both have the same shape."""
    if layout is None:
        return Layout({})
    rules = Layout.parse(layout)
    for rule in rules.rules.values():
        if rule.renames or rule.reduce is not None:
            what = "renames tensors" if rule.renames else "reduces copies"
            raise InvalidArgumentError(
                f"layout rule for {rule.pattern!r} {what}, and save_checkpoint saves tensors as they are: leave it "
                "out, or use export_checkpoint"
            )
    like = {}
    for name, tensor in tensors.items():
        for parameter in _names_in_optimizer_state(name):
            # A scalar of the optimizer, such as a step, belongs to the whole parameter.
            if parameter in tensors and tuple(tensors[parameter].shape) == tuple(tensor.shape):
                like[name] = parameter
    return replace(rules, like=like)


def _names_in_optimizer_state(name: str) -> list[str]:
    """Return the parameter names that an optimizer tensor's name may contain: ``optimizer.state.NAME.exp_avg``."""
    # Several, as the path of the optimizer and the parameter's own name may have ".state." in them.
    base = "." + name.rpartition(".")[0]
    names = []
    at = base.find(".state.")
    while at >= 0:
        names.append(base[at + len(".state.") :])
        at = base.find(".state.", at + 1)
    return names


@dataclass(frozen=True, slots=True)
class _Context:
    """The names of parameters by `id`, and the ShardedTensors found so far by key."""

    names: Mapping[int, str]
    sharded: dict[str, MegatronTensor] = field(default_factory=dict)


def _plain(value: Leaf, path: str, context: _Context, depth: int = 0, owner: Leaf = None) -> Leaf:
    """Return `value` with the states of objects, as mappings, in place of the objects.

    `owner` is the object whose state `value` is a part of. A load gives that to the owner's `load_state_dict`, which
    would find a mapping where the state has another object.
    """
    if depth > values.MAX_DEPTH:
        raise too_deep_error(path)
    kind, name = kind_of(value), path.removeprefix(".")
    if kind == "tensor":
        return value
    # Also in the state of another object: Megatron-Core's own state dicts are made of them.
    if kind == "sharded":
        return _plain_sharded(value, path, context, depth + 1, owner)
    if kind == "value":
        return _plain_container(value, path, context, depth + 1, owner)
    if owner is not None:
        raise UnsupportedError(
            f"the state of {type_text(owner)} holds {type_text(value)}, which a load would replace by a mapping: let "
            "its state_dict return that object's state_dict(), and its load_state_dict load it",
            name=name,
        )
    if kind == "module":
        state = module_items(value)
    elif kind == "optimizer":
        state = optimizer_tree(value, context.names, name)
    else:
        state = state_of_object(value, name, "leave it out of the state")
        # A load could not tell a list of an object's state from one of the job.
        if not isinstance(state, Mapping):
            text = f"state_dict() of {type_text(value)} returned {type_text(state)}: only a mapping can be loaded again"
            raise UnsupportedError(text, name=name)
    return _plain(state, path, context, depth + 1, value)


def _plain_container(value: Leaf, path: str, context: _Context, depth: int, owner: Leaf) -> Leaf:
    """Return a container of what its items become; the value itself if it is none, or has nothing to become another."""
    items = children(value)
    if items is None:
        return value
    name = path.removeprefix(".")
    is_of_fields = type(value) is not dict and is_dataclass(value)
    if is_of_fields and isinstance(value, Mapping):
        text = f"{type_text(value)} here is both a mapping and a dataclass, whose entries may differ: give a dict of it"
        raise UnsupportedError(text, name=name)
    # As a whole it comes back in its type. With tensors in it it is entered, and loaded field by field.
    if is_of_fields and not contains_state(value):
        return value
    new = {}
    for key, item in items.items():
        # Nearly all items of modules, moments and groups are tensors and names, which stay as they are.
        if is_tensor_type(type(item)) or type(item) in values.SCALAR_TYPES:
            new[key] = item
        # What Megatron-Core itself does not save. Left out of a list, it would change the indices of others.
        elif type(item) in PLAIN_TYPES or not (isinstance(value, Mapping) and _is_local(item)):
            new[key] = _plain(item, f"{path}.{key}", context, depth, owner)
    if isinstance(value, list):
        return list(new.values())
    if owner is not None and is_of_fields:  # the owner loads it as what it was
        return other_with(value, new)
    # Other containers become mappings: `with_children` would change a mutable one, which belongs to the live state.
    if not isinstance(value, tuple):
        return new
    try:
        return with_children(value, new)
    except UnsupportedError as error:
        text = f"{error.message}: give a list, or leave it out of the state"
        raise UnsupportedError(text, name=name) from error.__cause__


def _is_local(value: Leaf) -> bool:
    """Whether this is Megatron-Core's LocalNonpersistentObject, and not a module or object of that name."""
    return sharded_kind(value) == "local" and kind_of(value) == "sharded"


def _plain_sharded(value: Leaf, path: str, context: _Context, depth: int, owner: Leaf) -> Leaf:
    """Return what an object of Megatron-Core holds: one tensor for all parts of a key, or an object's data."""
    kind = sharded_kind(value)
    if kind == "factory":
        return _plain(value.build(), path, context, depth, owner)
    if kind == "object":
        return _plain(value.data, path, context, depth, owner)
    if kind == "local":
        return None
    return add_sharded(context.sharded, value)
