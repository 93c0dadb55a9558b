"""An optimizer's state by the numbers or names of its parameters, and back."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from statexchange import values
from statexchange.errors import InvalidArgumentError, UnsupportedError, type_text
from statexchange.tensors import is_torch

__all__ = [
    "OptimizerState",
    "check_optimizer",
    "hyperparameters",
    "install_optimizer",
    "is_optimizer",
    "labelled_parameters",
    "named_parameters",
    "optimizer_tree",
    "parameters_of",
    "state_of_optimizer",
]

OptimizerState = dict[str, Any]
"""``param_groups``: without parameters. ``state``: by a parameter's number. ``shared``: state under other keys.
``more``: what the optimizer's own `state_dict` has besides."""


def is_optimizer(value: Any) -> bool:
    """Whether `value` is an optimizer, or looks like one. Not collective."""
    return hasattr(value, "param_groups") and hasattr(value, "state") and not isinstance(value, type)


def check_optimizer(optimizer: Any, path: str) -> None:
    """Raise UnsupportedError, naming `path`, for an optimizer that shards its state itself."""
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        raise UnsupportedError(
            "each rank's ZeroRedundancyOptimizer has a state of its own: shard with fully_shard", name=path
        )


def parameters_of(optimizer: Any) -> list[Any]:
    """Return the parameters of all groups, in the order in which torch numbers them. Not collective."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def labelled_parameters(optimizer: Any) -> dict[str, Any]:
    """Return the parameters of all groups by ``param_names``, else by keys as ``param_groups[0]['params'][1]``.

    Not collective.
    """
    named: dict[str, Any] = {}
    for i, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"param_groups[{i}]['params'][{j}]" for j in range(len(group["params"]))]
        named.update(zip(names, group["params"], strict=True))
    return named


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
        UnsupportedError: the optimizer shards its state itself, or its `state_dict` has another form than torch's; the
            error names `path`.
    """
    check_optimizer(optimizer, path)
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
    return {
        "param_groups": [hyperparameters(group) for group in optimizer.param_groups],
        "state": state,
        "shared": shared,
        "more": _more_state(optimizer, state, shared, path),
    }


def _more_state(optimizer: Any, state: Mapping[int, Any], shared: Mapping[Any, Any], path: str) -> dict[str, Any]:
    """Return the entries of an optimizer's state dict beside ``state`` and ``param_groups``, which `state` repeats.

    torch's own `state_dict` has none. That of a class of its own may have some, or a hook may add some.
    """
    own = getattr(type(optimizer), "state_dict", None)
    torch_optim = sys.modules.get("torch.optim")
    has_hooks = getattr(optimizer, "_optimizer_state_dict_post_hooks", None)
    if own is None or (torch_optim is not None and own is torch_optim.Optimizer.state_dict and not has_hooks):
        return {}
    found = optimizer.state_dict()
    if isinstance(found, Mapping) and {"state", "param_groups"} <= found.keys():
        theirs, ours = found["state"], {**shared, **state}
        if _are_alike(theirs, ours):
            return {key: value for key, value in found.items() if key not in ("state", "param_groups")}
    raise UnsupportedError(
        f"the state_dict of {type_text(optimizer)} is not its param_groups and state, as that of torch's optimizers: "
        "give the optimizer that it wraps, or what its state_dict() returns",
        name=path,
    )


def _are_alike(one: Any, other: Any) -> bool:
    """Whether two mappings have the same objects, or equal plain values."""
    if one is other or values.is_same(one, other):
        return True
    if not isinstance(one, Mapping) or not isinstance(other, Mapping) or one.keys() != other.keys():
        return False
    return all(_are_alike(value, other[key]) for key, value in one.items())


def optimizer_tree(optimizer: Any, names: Mapping[int, str], path: str) -> dict[str, Any]:
    """Return an optimizer's state dict with names in place of the parameters' numbers; `names` has them by `id`."""
    numbered = state_of_optimizer(optimizer, path)
    named = list(named_parameters(optimizer, names))
    begin = 0
    groups = []
    for group, settings in zip(optimizer.param_groups, numbered["param_groups"], strict=True):
        groups.append({**settings, "params": named[begin : begin + len(group["params"])]})
        begin += len(group["params"])
    state = {named[number]: entries for number, entries in numbered["state"].items()}
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
    if more:
        optimizer.load_state_dict({**optimizer.state_dict(), **more})
        _install(optimizer, groups, state, dropped)  # torch's load_state_dict casts the state, and makes new dicts


def _install(
    optimizer: Any, groups: Sequence[Mapping[str, Any] | None], state: Mapping[Any, Any], dropped: Iterable[Any]
) -> None:
    for group, new in zip(optimizer.param_groups, groups, strict=True):
        if new is not None:
            kept = {name: group[name] for name in ("params", "param_names") if name in group}
            group.clear()
            group.update(kept, **new)
    for key in dropped:
        optimizer.state.pop(key, None)
    for key, new in state.items():
        own = optimizer.state.get(key)
        if isinstance(own, dict) and isinstance(new, dict):
            own.clear()
            own.update(new)
        else:
            optimizer.state[key] = new
