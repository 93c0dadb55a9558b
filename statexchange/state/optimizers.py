"""An optimizer's state by the numbers or names of its parameters, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from statexchange.errors import InvalidArgumentError, UnsupportedError
from statexchange.tensors import is_torch

__all__ = [
    "OptimizerState",
    "check_optimizer",
    "hyperparameters",
    "is_optimizer",
    "labelled_parameters",
    "named_parameters",
    "optimizer_tree",
    "parameters_of",
    "set_optimizer",
    "state_of_optimizer",
]

OptimizerState = dict[str, Any]
"""``param_groups``: without parameters. ``state``: by a parameter's number. ``shared``: state under other keys."""


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
    """Return an optimizer's state without calling the hooks of its `state_dict`. Not collective.

    Raises:
        InvalidArgumentError: there is state of a tensor that is in no group; the error names `path`.
        UnsupportedError: the optimizer shards its state itself; the error names `path`.
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
    }


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
    return {"state": {**state, **numbered["shared"]}, "param_groups": groups}


def set_optimizer(
    optimizer: Any, groups: Sequence[Mapping[str, Any] | None], state: Mapping[Any, Any], dropped: Iterable[Any]
) -> None:
    """Install hyperparameters and state in an optimizer. Not collective.

    Groups and each parameter's state stay the same dicts: LR schedulers and others may refer to them.

    Args:
        optimizer: the optimizer.
        groups: the hyperparameters of each group; None leaves a group as it is.
        state: the state by key.
        dropped: keys whose state is removed.
    """
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
