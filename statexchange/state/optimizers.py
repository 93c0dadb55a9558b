"""A live optimizer: its parameters, its state by their numbers or names, and how a new state is put into it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from statexchange import values
from statexchange.errors import InvalidArgumentError, UnsupportedError, type_text
from statexchange.state.modules import is_module
from statexchange.state.types import Leaf, Optimizer
from statexchange.tensors import is_dtensor, is_torch

__all__ = [
    "OptimizerState",
    "check_optimizer",
    "class_name",
    "hyperparameters",
    "install_optimizer",
    "is_optimizer",
    "labelled_parameters",
    "named_parameters",
    "names_of_groups",
    "optimizer_tree",
    "parameters_of",
    "state_of_optimizer",
]

# What torch's `load_state_dict` replaces in an optimizer, and what of a param group is not the source's to say.
_REPLACED: tuple[str, ...] = ("param_groups", "state")
_KEPT: tuple[str, ...] = ("params", "param_names")

OptimizerState = dict[str, Any]
"""``param_groups``: without parameters. ``state``: by a parameter's number. ``shared``: state under other keys.
``more``: what the optimizer's own `state_dict` has besides."""


def is_optimizer(value: object) -> bool:
    """Whether `value` is an optimizer, or looks like one. Not collective."""
    # The keys of a mapping may be attributes, and a class has those of its instances.
    if isinstance(value, type | Mapping):
        return False
    return hasattr(value, "param_groups") and hasattr(value, "state") and not is_module(value)


def check_optimizer(optimizer: Optimizer, path: str) -> None:
    """Raise UnsupportedError, naming `path`, for an optimizer whose state is another one on each rank."""
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        raise UnsupportedError(
            "each rank's ZeroRedundancyOptimizer has a state of its own: shard with fully_shard", name=path
        )
    for parameter in parameters_of(optimizer):
        # With `use_orig_params`, too, a parameter is this rank's piece, of any size.
        if getattr(parameter, "_fsdp_flattened", False):
            raise UnsupportedError(
                "FSDP1 flattened this optimizer's parameters, and each rank has a piece of its state: shard with "
                "fully_shard, or save what FullyShardedDataParallel.optim_state_dict() returns",
                name=path,
            )


def class_name(optimizer: Optimizer) -> str:
    """Return the qualified name of the class of an optimizer without its wrappers. Not collective.

    A wrapper, such as accelerate's or DistributedOptimizer, is known by having the same state as the optimizer inside.
    """
    kind = type(optimizer)
    for layer in _layers(optimizer):
        if layer.state is optimizer.state:
            kind = type(layer)
    return f"{kind.__module__}.{kind.__qualname__}"


def _layers(optimizer: Optimizer) -> list[Optimizer]:
    """Return an optimizer and all that it wraps, the outermost first."""
    layers, seen = [optimizer], {id(optimizer)}
    for layer in layers:  # which grows in the loop
        for inner in getattr(layer, "__dict__", {}).values():
            # An optimizer may refer to its wrapper.
            if id(inner) not in seen and hasattr(inner, "param_groups") and is_optimizer(inner):
                seen.add(id(inner))
                layers.append(inner)
    return layers


def parameters_of(optimizer: Optimizer) -> list[Leaf]:
    """Return the parameters of all groups, in the order in which torch numbers them. Not collective."""
    parameters: list[Leaf] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


def labelled_parameters(optimizer: Optimizer) -> dict[str, Leaf]:
    """Return the parameters of all groups by ``param_names``, else by keys as ``param_groups[0]['params'][1]``.

    Not collective.
    """
    return dict(zip(_labels(optimizer), parameters_of(optimizer), strict=True))


def _labels(optimizer: Optimizer) -> list[str]:
    labels: list[str] = []
    for number, group in enumerate(optimizer.param_groups):
        count, names = len(group["params"]), group.get("param_names")
        if not names:
            names = [f"param_groups[{number}]['params'][{index}]" for index in range(count)]
        if len(names) != count:
            text = f"param group {number} has {count} parameters, and {len(names)} param_names"
            raise InvalidArgumentError(text, name=f"param_groups[{number}]")
        labels += names
    return labels


def names_of_groups(optimizer: Optimizer) -> list[str] | None:
    """Return the ``param_names`` of all groups, in the order of the parameters; None if there are none.

    Not collective. Two may be equal.
    """
    for group in optimizer.param_groups:
        if group.get("param_names"):
            return _labels(optimizer)
    return None


def named_parameters(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Leaf]:
    """Return parameters by name, or all by number if one is not in `names`, which are by `id`. Not collective."""
    parameters = parameters_of(optimizer)
    by_name: dict[str, Leaf] = {}
    for parameter in parameters:
        name = names.get(id(parameter))
        if name:
            by_name[name] = parameter
    if len(by_name) == len(parameters):
        return by_name
    return dict(zip(map(str, range(len(parameters))), parameters, strict=True))


def hyperparameters(group: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """Return a param group without its parameters and their names. Not collective."""
    settings = dict(group)
    for name in _KEPT:
        settings.pop(name, None)
    return settings


def state_of_optimizer(optimizer: Optimizer, path: str) -> OptimizerState:
    """Return an optimizer's state. Not collective.

    Raises:
        InvalidArgumentError: there is state of a tensor that is in no group; the error names `path`.
        UnsupportedError: the optimizer's state is another one on each rank, or its `state_dict` has another form than
            torch's; the error names `path`.
    """
    check_optimizer(optimizer, path)
    saved = None
    if _does_more(optimizer, "state_dict"):
        saved = optimizer.state_dict()  # first, as a hook may change the state
    parameters = parameters_of(optimizer)
    numbers: dict[Leaf, int] = dict(zip(parameters, range(len(parameters)), strict=True))
    state: dict[int, Leaf] = {}
    shared: dict[Leaf, Leaf] = {}
    for key, entries in optimizer.state.items():
        if not is_torch(key):
            shared[key] = entries
        elif key in numbers:
            state[numbers[key]] = entries
        else:
            raise InvalidArgumentError("there is state of a tensor that is in no param group", name=path)
    groups = list(map(hyperparameters, optimizer.param_groups))
    more = {}
    if saved is not None:
        more = _more_entries(optimizer, saved, {**shared, **state}, groups, path)
    return {"param_groups": groups, "state": state, "shared": shared, "more": more}


def _does_more(optimizer: Optimizer, method: str) -> bool:
    """Whether an optimizer's `state_dict` or `load_state_dict` does more than torch's, by an override or hooks."""
    torch_optim = sys.modules.get("torch.optim")
    of_type = getattr(type(optimizer), method, None)
    if of_type is None or torch_optim is None:
        return False
    for when in ("pre", "post"):
        if getattr(optimizer, f"_optimizer_{method}_{when}_hooks", None):
            return True
    return of_type is not getattr(torch_optim.Optimizer, method) or method in vars(optimizer)


def _more_entries(
    optimizer: Optimizer, saved: Leaf, state: Mapping[Leaf, Leaf], groups: list[dict[str, Leaf]], path: str
) -> dict[str, Leaf]:
    """Return the entries of an optimizer's state dict beside ``state`` and ``param_groups``, which must be as given."""
    if isinstance(saved, Mapping) and {"state", "param_groups"} <= saved.keys():
        more = dict(saved)
        saved_groups = list(map(hyperparameters, more.pop("param_groups")))
        unpacked = {key: _unpacked(entries, state.get(key)) for key, entries in more.pop("state").items()}
        if _are_alike(unpacked, state) and _are_alike(saved_groups, groups):
            return more
    raise UnsupportedError(
        f"the state_dict of {type_text(optimizer)} is not its param_groups and state, as that of torch's optimizers: "
        "give the optimizer that it wraps, or what its state_dict() returns",
        name=path,
    )


def _unpacked(entries: Leaf, live: Leaf) -> Leaf:
    """Return a parameter's state with the items of mappings that the live state does not have in their places.

    In such a mapping bitsandbytes hides 8-bit moments from FSDP. Its `load_state_dict` takes them out again.
    """
    if not isinstance(entries, Mapping) or not isinstance(live, Mapping):
        return entries
    # Only what is packed has a mapping where the live state has none.
    unpacked: dict[Leaf, Leaf] = {}
    for key, value in entries.items():
        if isinstance(value, Mapping) and key not in live:
            unpacked.update(value)
        else:
            unpacked[key] = value
    return unpacked


def _are_alike(value: Leaf, other: Leaf) -> bool:
    """Whether two nested values have the same objects, equal tensors or equal plain values."""
    if value is other:
        return True
    if is_torch(value) and is_torch(other):
        return _are_alike_tensors(value, other)
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return value.keys() == other.keys() and all(_are_alike(item, other[key]) for key, item in value.items())
    if isinstance(value, list | tuple) and type(value) is type(other):
        return len(value) == len(other) and all(map(_are_alike, value, other))
    return values.is_same(value, other)


def _are_alike_tensors(tensor: Leaf, other: Leaf) -> bool:
    if tensor.shape != other.shape or tensor.dtype != other.dtype or is_dtensor(tensor) != is_dtensor(other):
        return False
    if is_dtensor(tensor):
        tensor, other = tensor.to_local(), other.to_local()
    return tensor.data_ptr() == other.data_ptr() or bool((tensor == other).all())


def optimizer_tree(optimizer: Optimizer, names: Mapping[int, str], path: str) -> dict[str, Leaf]:
    """Return an optimizer's state dict with names in place of the parameters' numbers; `names` has them by `id`.

    If one has none there, all keep their numbers, and groups their ``param_names``, if they have any.
    """
    numbered = state_of_optimizer(optimizer, path)
    labels = list(named_parameters(optimizer, names))
    are_in_state = names.keys() >= {*map(id, parameters_of(optimizer))}
    begin = 0
    groups = []
    for group, settings in zip(optimizer.param_groups, numbered["param_groups"], strict=True):
        new = dict(settings)
        if group.get("param_names") and not are_in_state:
            new["param_names"] = [*group["param_names"]]
        new["params"] = labels[begin : begin + len(group["params"])]
        groups.append(new)
        begin += len(group["params"])
    state = {labels[number]: entries for number, entries in numbered["state"].items()}
    clashing = numbered["shared"].keys() & set(labels)
    if clashing:
        text = (
            f"its state has the key {min(clashing)!r}, which is the name of a parameter in what is saved: rename the "
            "key"
        )
        raise UnsupportedError(text, name=path)
    return {"state": {**state, **numbered["shared"]}, "param_groups": groups, **numbered["more"]}


def install_optimizer(
    optimizer: Optimizer,
    groups: Sequence[Mapping[str, Leaf] | None],
    state: Mapping[Leaf, Leaf],
    dropped: Iterable[Leaf],
    more: Mapping[str, Leaf],
) -> None:
    """Install hyperparameters and state in an optimizer. Not collective.

    Groups and each parameter's state stay the same dicts: LR schedulers and others may refer to them.

    Args:
        optimizer: the optimizer.
        groups: the hyperparameters of each group; None leaves a group as it is.
        state: the state by key.
        dropped: keys whose state is removed.
        more: the other entries of the optimizer's state dict.
    """
    _install(optimizer, groups, state, dropped)
    # torch's load_state_dict calls __setstate__, in which an optimizer may derive values from its state.
    set_state = getattr(type(optimizer), "__setstate__", None)
    derives = not getattr(set_state, "__module__", "torch.optim").startswith("torch.optim")
    if more or derives or _does_more(optimizer, "load_state_dict"):
        _load(optimizer, more)


def _load(optimizer: Optimizer, more: Mapping[str, Leaf]) -> None:
    """Let an optimizer load its present state, and further entries, by its own `load_state_dict`. Not collective."""
    # torch's load_state_dict casts the state, and replaces the dicts, to which others may refer, also in a wrapped
    # optimizer. So the old dicts are put back, and get what the loader has made of their entries.
    before: list[tuple[dict[str, Leaf], dict[str, Leaf]]] = []
    for layer in _layers(optimizer):
        attributes = vars(layer)
        old = {name: attributes[name] for name in _REPLACED if name in attributes}
        before.append((attributes, old))
    optimizer.load_state_dict({**optimizer.state_dict(), **more})
    groups, state = optimizer.param_groups, optimizer.state
    for attributes, old in before:
        attributes.update(old)
    new_groups = []
    for new_group, group in zip(groups, optimizer.param_groups, strict=True):
        new_groups.append(hyperparameters(_without_casts(new_group, group)))
    new_state = {key: _without_casts(entries, optimizer.state.get(key)) for key, entries in state.items()}
    _install(optimizer, new_groups, new_state, {*optimizer.state} - {*new_state})


def _without_casts(new: Leaf, old: Leaf) -> Leaf:
    """Return what a loader has made of `old`, with the old tensors where it has only copied or cast them."""
    if is_torch(new) and is_torch(old):
        # A loader may put the moments of a BF16 parameter into BF16, which would lose what was read.
        cast = old.detach().to(device=new.device, dtype=new.dtype)
        if _are_alike(new.detach(), cast):
            return old
        return new
    if isinstance(new, dict) and isinstance(old, Mapping):
        return {key: _without_casts(value, old.get(key)) for key, value in new.items()}
    if isinstance(new, list) and isinstance(old, list) and len(new) == len(old):
        return list(map(_without_casts, new, old))
    return new


def _install(
    optimizer: Optimizer,
    groups: Sequence[Mapping[str, Leaf] | None],
    state: Mapping[Leaf, Leaf],
    dropped: Iterable[Leaf],
) -> None:
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        if settings is not None:
            # The parameters and their names stay: those of the source may be another job's.
            kept = {name: group[name] for name in _KEPT if name in group}
            group.clear()
            group.update(kept)
            group.update(settings)
    for key in dropped:
        optimizer.state.pop(key, None)
    for key, entries in state.items():
        live = optimizer.state.get(key)
        if isinstance(live, dict) and isinstance(entries, dict):
            # `entries` may be `live` itself, which a loader has changed.
            new = dict(entries)
            live.clear()
            live.update(new)
        else:
            optimizer.state[key] = entries
