"""A module's tensors by their names without wrappers, and its extra state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from statexchange import values
from statexchange.errors import InvalidArgumentError, UnsupportedError
from statexchange.sharding.wrappers import without_wrappers
from statexchange.tensors import is_tensor

__all__ = [
    "bare_name",
    "check_module",
    "is_extra_state",
    "is_module",
    "is_plain_entry",
    "layers",
    "live_items",
    "load_extra_state",
    "model_items",
    "module_items",
]


def is_module(value: Any) -> bool:
    """Whether `value` is a torch module, or of a class that behaves like one.

    The class is asked, as a mapping whose keys are attributes may have, or seem to have, any attribute.
    """
    return hasattr(type(value), "state_dict") and hasattr(type(value), "modules")


def module_items(module: Any, *, keep_vars: bool = False) -> dict[str, Any]:
    """Return a module's state dict, by names without what wrappers add to them.

    The count of an AveragedModel is included: with a count of 0 its next update would replace the average by the model.

    Args:
        module: the module.
        keep_vars: return the parameters themselves, not detached tensors.

    Raises:
        InvalidArgumentError: two names are equal without the wrappers.
    """
    items = model_items(module, keep_vars=keep_vars)
    for layer in layers(module):
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
    """Return `module_items` in two: the parameters and buffers themselves, to be filled in place, and the rest.

    The rest is extra state and the copies that some modules make of their tensors; `load_extra_state` loads it.
    """
    check_module(module)
    items = module_items(module, keep_vars=True)
    own = {id(tensor) for tensor in [*module.parameters(), *module.buffers()]}
    live = {name: value for name, value in items.items() if is_tensor(value) and id(value) in own}
    return live, {name: value for name, value in items.items() if name not in live}


def model_items(module: Any, *, keep_vars: bool = False) -> dict[str, Any]:
    """Return `module_items` without the count of an AveragedModel."""
    clean: dict[str, Any] = {}
    for name, value in _unwrapped(module).state_dict(keep_vars=keep_vars).items():
        _add(clean, without_wrappers(name), value)
    return clean


def _add(items: dict[str, Any], name: str, value: Any) -> None:
    """Add an entry; raise InvalidArgumentError if there is one of this name."""
    if name in items:
        raise InvalidArgumentError("two tensors have this name once wrappers are removed", name=name)
    items[name] = value


def is_extra_state(name: str) -> bool:
    """Whether an entry of a state dict is extra state: what a module's `get_extra_state` returned, of any type."""
    return name.endswith("_extra_state")


def is_plain_entry(name: str, value: Any) -> bool:
    """Whether a non-tensor entry of a state dict is extra state or a plain value, and so hides no tensor."""
    return is_extra_state(name) or values.has_text(value)


def load_extra_state(module: Any, extra: Mapping[str, Any]) -> None:
    """Load the second mapping that `live_items` returns into a module."""
    module = _unwrapped(module)
    entries = {name: extra[without_wrappers(name)] for name in module.state_dict() if without_wrappers(name) in extra}
    module.load_state_dict(entries, strict=False)


def _unwrapped(module: Any) -> Any:
    return layers(module)[-1]


def layers(module: Any) -> list[Any]:
    """Return the wrappers around a model, the outermost first, and the model."""
    found = [module]
    while (kind := type(found[-1]).__name__) in ("DistributedDataParallel", "AveragedModel", "OptimizedModule"):
        found.append(found[-1]._orig_mod if kind == "OptimizedModule" else found[-1].module)  # noqa: SLF001
    return found


def bare_name(name: str) -> str:
    """Return a parameter's name without what wrappers add, DistributedDataParallel's "module." among it."""
    return without_wrappers(name).removeprefix("module.")
