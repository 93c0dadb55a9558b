"""A module's tensors under names without those of its wrappers, and its extra state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from statexchange import values
from statexchange.errors import InvalidArgumentError, UnsupportedError
from statexchange.tensors import is_tensor

__all__ = [
    "check_module",
    "is_extra_state",
    "is_module",
    "is_plain_entry",
    "live_items",
    "load_extra_state",
    "model_items",
    "module_items",
]

# What wrappers put into module names: torch.compile, FSDP1, activation checkpointing.
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def is_module(value: Any) -> bool:
    """Whether `value` is a torch module, or behaves like one."""
    return hasattr(value, "state_dict") and hasattr(value, "modules")


def module_items(module: Any, *, keep_vars: bool = False) -> dict[str, Any]:
    """A module's state dict under the names that it has without wrappers; `keep_vars` gives the parameters themselves.

    With it goes an AveragedModel's count: at 0 its next update would put the model in place of the average. Two names
    that wrappers told apart are an InvalidArgumentError.
    """
    items = model_items(module, keep_vars=keep_vars)
    for layer in _layers(module):
        if type(layer).__name__ == "AveragedModel":
            _add(items, "n_averaged", layer.n_averaged)
    return items


def check_module(module: Any) -> None:
    """Raise UnsupportedError for FSDP1, whose state dicts are copies that cannot be filled in place."""
    if any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules()):
        raise UnsupportedError(
            "FSDP1 gives copies of its parameters, which cannot be filled in place: shard with fully_shard, or save "
            "and load the module before FSDP1 wraps it (export_checkpoint writes it as it is)"
        )


def live_items(module: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """`module_items` in two: parameters and buffers themselves, which can be filled in place, and everything else.

    What else there is, extra state and the copies that some modules make of their tensors, goes by `load_extra_state`.
    """
    check_module(module)
    items = module_items(module, keep_vars=True)
    own = {id(tensor) for tensor in [*module.parameters(), *module.buffers()]}
    live = {name: value for name, value in items.items() if is_tensor(value) and id(value) in own}
    return live, {name: value for name, value in items.items() if name not in live}


def model_items(module: Any, *, keep_vars: bool = False) -> dict[str, Any]:
    """`module_items` without what the wrappers have of their own."""
    clean: dict[str, Any] = {}
    for name, value in _unwrapped(module).state_dict(keep_vars=keep_vars).items():
        _add(clean, _clean(name), value)
    return clean


def _add(items: dict[str, Any], name: str, value: Any) -> None:
    if name in items:
        raise InvalidArgumentError("two tensors have this name once wrappers are removed", name=name)
    items[name] = value


def is_extra_state(name: str) -> bool:
    """Whether an entry of a state dict is what a module's `get_extra_state` returned: anything, but no tensor of it."""
    return name.endswith("_extra_state")


def is_plain_entry(name: str, value: Any) -> bool:
    """Whether an entry of a state dict that is not a tensor certainly holds none of the module's."""
    return is_extra_state(name) or values.has_text(value)


def load_extra_state(module: Any, extra: Mapping[str, Any]) -> None:
    """Give a module the entries of `module_items` that are not its parameters and buffers themselves."""
    module = _unwrapped(module)
    module.load_state_dict({n: extra[_clean(n)] for n in module.state_dict() if _clean(n) in extra}, strict=False)


def _unwrapped(module: Any) -> Any:
    return _layers(module)[-1]


def _layers(module: Any) -> list[Any]:
    """The wrappers around a model, the outermost first, and the model."""
    found = [module]
    while (kind := type(found[-1]).__name__) in ("DistributedDataParallel", "AveragedModel", "OptimizedModule"):
        found.append(found[-1]._orig_mod if kind == "OptimizedModule" else found[-1].module)  # noqa: SLF001
    return found


def _clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
