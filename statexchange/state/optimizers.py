"""An optimizer's state by the numbers or names of its parameters, and back."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from statexchange import values
from statexchange.errors import InvalidArgumentError, UnsupportedError, type_text
from statexchange.state.modules import is_module
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

OptimizerState = dict[str, Any]
"""``param_groups``: without parameters. ``state``: by a parameter's number. ``shared``: state under other keys.
``more``: what the optimizer's own `state_dict` has besides."""


def is_optimizer(value: Any) -> bool:
    """Whether `value` is an optimizer, or looks like one. Not collective."""
    if isinstance(value, type | Mapping) or is_module(value):
        return False
    return hasattr(value, "param_groups") and hasattr(value, "state")


def check_optimizer(optimizer: Any, path: str) -> None:
    """Raise UnsupportedError, naming `path`, for an optimizer whose state is another one on each rank."""
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        raise UnsupportedError(
            "each rank's ZeroRedundancyOptimizer has a state of its own: shard with fully_shard", name=path
        )
    # With `use_orig_params`, too, a parameter is this rank's piece, of any size.
    if any(getattr(parameter, "_fsdp_flattened", False) for parameter in parameters_of(optimizer)):
        raise UnsupportedError(
            "FSDP1 flattened this optimizer's parameters, and each rank has a piece of its state: shard with "
            "fully_shard, or save what FullyShardedDataParallel.optim_state_dict() returns",
            name=path,
        )


def class_name(optimizer: Any) -> str:
    """Return the qualified name of the class of an optimizer without its wrappers. Not collective.

    A wrapper, such as accelerate's or DistributedOptimizer, is known by having the same state as the optimizer inside.
    """
    kind = [type(layer) for layer in _layers(optimizer) if layer.state is optimizer.state][-1]
    return f"{kind.__module__}.{kind.__qualname__}"


def _layers(optimizer: Any) -> list[Any]:
    """Return an optimizer and all that it wraps, the outermost first."""
    layers = [optimizer]
    for layer in layers:  # which grows in the loop; an optimizer may refer to its wrapper
        for inner in getattr(layer, "__dict__", {}).values():
            if is_optimizer(inner) and all(inner is not outer for outer in layers):
                layers.append(inner)
    return layers


def parameters_of(optimizer: Any) -> list[Any]:
    """Return the parameters of all groups, in the order in which torch numbers them. Not collective."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def labelled_parameters(optimizer: Any) -> dict[str, Any]:
    """Return the parameters of all groups by ``param_names``, else by keys as ``param_groups[0]['params'][1]``.

    Not collective.
    """
    return dict(zip(_labels(optimizer), parameters_of(optimizer), strict=True))


def _labels(optimizer: Any) -> list[str]:
    found: list[str] = []
    for i, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"param_groups[{i}]['params'][{j}]" for j in range(len(group["params"]))]
        if len(names) != len(group["params"]):
            text = f"param group {i} has {len(group['params'])} parameters, and {len(names)} param_names"
            raise InvalidArgumentError(text, name=f"param_groups[{i}]")
        found += names
    return found


def names_of_groups(optimizer: Any) -> list[str] | None:
    """Return the ``param_names`` of all groups, in the order of the parameters; None if there are none.

    Not collective. Two may be equal.
    """
    return _labels(optimizer) if any(group.get("param_names") for group in optimizer.param_groups) else None


def named_parameters(optimizer: Any, names: Mapping[int, str]) -> dict[str, Any]:
    """Return parameters by name, or all by number if one is not in `names`, which are by `id`. Not collective."""
    parameters = parameters_of(optimizer)
    found = {names.get(id(parameter), ""): parameter for parameter in parameters}
    if len(found) == len(parameters) and "" not in found:
        return found
    return {str(number): parameter for number, parameter in enumerate(parameters)}


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a param group without its parameters and their names. Not collective."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def state_of_optimizer(optimizer: Any, path: str) -> OptimizerState:
    """Return an optimizer's state. Not collective.

    Raises:
        InvalidArgumentError: there is state of a tensor that is in no group; the error names `path`.
        UnsupportedError: the optimizer's state is another one on each rank, or its `state_dict` has another form than
            torch's; the error names `path`.
    """
    check_optimizer(optimizer, path)
    own = optimizer.state_dict() if _has_own(optimizer, "state_dict") else None  # first, as a hook may change the state
    numbers: dict[Any, int] = {parameter: number for number, parameter in enumerate(parameters_of(optimizer))}
    state: dict[int, Any] = {}
    shared: dict[Any, Any] = {}
    for key, entries in optimizer.state.items():
        if not is_torch(key):
            shared[key] = entries
        elif key in numbers:
            state[numbers[key]] = entries
        else:
            raise InvalidArgumentError("there is state of a tensor that is in no param group", name=path)
    groups = [hyperparameters(group) for group in optimizer.param_groups]
    more = {} if own is None else _more_entries(optimizer, own, {**shared, **state}, groups, path)
    return {"param_groups": groups, "state": state, "shared": shared, "more": more}


def _has_own(optimizer: Any, method: str) -> bool:
    """Whether an optimizer's `state_dict` or `load_state_dict` does more than torch's, by an override or hooks."""
    torch_optim = sys.modules.get("torch.optim")
    of_type = getattr(type(optimizer), method, None)
    if of_type is None or torch_optim is None:
        return False
    hooks = (getattr(optimizer, f"_optimizer_{method}_{when}_hooks", None) for when in ("pre", "post"))
    return of_type is not getattr(torch_optim.Optimizer, method) or method in vars(optimizer) or any(hooks)


def _more_entries(
    optimizer: Any, found: Any, state: Mapping[Any, Any], groups: Sequence[Mapping[str, Any]], path: str
) -> dict[str, Any]:
    """Return the entries of an optimizer's state dict beside ``state`` and ``param_groups``, which must be as given."""
    if isinstance(found, Mapping) and {"state", "param_groups"} <= found.keys():
        theirs = [hyperparameters(group) for group in found["param_groups"]]
        unpacked = {key: _unpacked(entries, state.get(key)) for key, entries in found["state"].items()}
        if _are_alike(unpacked, state) and _are_alike(theirs, list(groups)):
            return {key: value for key, value in found.items() if key not in ("state", "param_groups")}
    raise UnsupportedError(
        f"the state_dict of {type_text(optimizer)} is not its param_groups and state, as that of torch's optimizers: "
        "give the optimizer that it wraps, or what its state_dict() returns",
        name=path,
    )


def _unpacked(entries: Any, live: Any) -> Any:
    """Return a parameter's state with the items of mappings that the live state does not have in their places.

    In such a mapping bitsandbytes hides 8-bit moments from FSDP. Its `load_state_dict` takes them out again.
    """
    if not isinstance(entries, Mapping) or not isinstance(live, Mapping):
        return entries
    unpacked: dict[Any, Any] = {}
    for key, value in entries.items():
        is_packed = isinstance(value, Mapping) and key not in live
        unpacked.update(value if is_packed else {key: value})
    return unpacked


def _are_alike(one: Any, other: Any) -> bool:
    """Whether two nested values have the same objects, equal tensors or equal plain values."""
    if one is other:
        return True
    if is_torch(one) and is_torch(other):
        if one.shape != other.shape or one.dtype != other.dtype or is_dtensor(one) != is_dtensor(other):
            return False
        one, other = (tensor.to_local() if is_dtensor(tensor) else tensor for tensor in (one, other))
        return one.data_ptr() == other.data_ptr() or bool((one == other).all())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_are_alike(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(_are_alike, one, other))
    return values.is_same(one, other)


def optimizer_tree(optimizer: Any, names: Mapping[int, str], path: str) -> dict[str, Any]:
    """Return an optimizer's state dict with names in place of the parameters' numbers; `names` has them by `id`.

    If one has none there, all keep their numbers, and groups their ``param_names``, if they have any.
    """
    numbered = state_of_optimizer(optimizer, path)
    named = list(named_parameters(optimizer, names))
    are_in_state = all(id(parameter) in names for parameter in parameters_of(optimizer))
    begin = 0
    groups = []
    for group, settings in zip(optimizer.param_groups, numbered["param_groups"], strict=True):
        own = {"param_names": [*group["param_names"]]} if group.get("param_names") and not are_in_state else {}
        groups.append({**settings, **own, "params": named[begin : begin + len(group["params"])]})
        begin += len(group["params"])
    state = {named[number]: entries for number, entries in numbered["state"].items()}
    taken = numbered["shared"].keys() & set(named)
    if taken:
        text = (
            f"its state has the key {min(taken)!r}, which is the name of a parameter in what is saved: rename the key"
        )
        raise UnsupportedError(text, name=path)
    return {"state": {**state, **numbered["shared"]}, "param_groups": groups, **numbered["more"]}


def install_optimizer(
    optimizer: Any,
    groups: Sequence[Mapping[str, Any] | None],
    state: Mapping[Any, Any],
    dropped: Iterable[Any],
    more: Mapping[str, Any],
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
    if more or derives or _has_own(optimizer, "load_state_dict"):
        _load(optimizer, more)


def _load(optimizer: Any, more: Mapping[str, Any]) -> None:
    """Let an optimizer load its present state, and further entries, by its own `load_state_dict`. Not collective."""
    # torch's load_state_dict casts the state, and replaces the dicts, to which others may refer, also in a wrapped
    # optimizer. So the old dicts are put back, and get what the loader has made of their entries.
    layers = _layers(optimizer)
    before = [
        {name: vars(layer)[name] for name in ("param_groups", "state") if name in vars(layer)} for layer in layers
    ]
    optimizer.load_state_dict({**optimizer.state_dict(), **more})
    groups, state = optimizer.param_groups, optimizer.state
    for layer, attributes in zip(layers, before, strict=True):
        vars(layer).update(attributes)
    new_groups = [_without_casts(new, old) for new, old in zip(groups, optimizer.param_groups, strict=True)]
    new_state = {key: _without_casts(entries, optimizer.state.get(key)) for key, entries in state.items()}
    dropped = [key for key in optimizer.state if key not in new_state]
    _install(optimizer, [hyperparameters(group) for group in new_groups], new_state, dropped)


def _without_casts(new: Any, old: Any) -> Any:
    """Return what a loader has made of `old`, with the old tensors where it has only copied or cast them."""
    if is_torch(new) and is_torch(old):
        cast = old.detach().to(device=new.device, dtype=new.dtype)
        return old if _are_alike(new.detach(), cast) else new
    if isinstance(new, dict) and isinstance(old, Mapping):
        return {key: _without_casts(value, old.get(key)) for key, value in new.items()}
    if isinstance(new, list) and isinstance(old, list) and len(new) == len(old):
        return list(map(_without_casts, new, old))
    return new


def _install(
    optimizer: Any, groups: Sequence[Mapping[str, Any] | None], state: Mapping[Any, Any], dropped: Iterable[Any]
) -> None:
    for group, new in zip(optimizer.param_groups, groups, strict=True):
        if new is not None:
            kept = {name: group[name] for name in ("params", "param_names") if name in group}
            group.clear()
            group.update({**kept, **new})
    for key in dropped:
        optimizer.state.pop(key, None)
    for key, new in state.items():
        own = optimizer.state.get(key)
        if isinstance(own, dict) and isinstance(new, dict):
            entries = dict(new)  # `own` may be `new`
            own.clear()
            own.update(entries)
        else:
            optimizer.state[key] = new
