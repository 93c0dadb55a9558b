"""A module's tensors by their names without wrappers, and its extra state."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

from statexchange import values
from statexchange.errors import InvalidArgumentError, UnsupportedError, type_text
from statexchange.sharding.paths import without_wrappers
from statexchange.tensors import is_tensor

__all__ = [
    "bare_name",
    "check_module",
    "has_loader",
    "is_extra_state",
    "is_module",
    "is_plain_entry",
    "layers",
    "live_items",
    "load_items",
    "model_items",
    "module_items",
    "resizable_buffers",
    "resizes",
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

    The rest is extra state and the copies that some modules make of their tensors; `load_items` loads it.
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
    return name.rpartition(".")[2] == "_extra_state"


def is_plain_entry(name: str, value: Any) -> bool:
    """Whether a non-tensor entry of a state dict is extra state or a plain value, and so hides no tensor."""
    return is_extra_state(name) or values.has_text(value)


def has_loader(module: Any, path: str) -> bool:
    """Whether a module, or one inside it, does more at a load than copy tensors, by hooks or an own loader.

    Raises:
        UnsupportedError: a wrapper has hooks, and only the model inside is loaded; the error names `path`.
    """
    *wrappers, model = layers(module)
    for wrapper in wrappers:
        if _has_own_loader(wrapper):
            text = f"{type_text(wrapper)} has hooks of its load_state_dict: register them on the module that it wraps"
            raise UnsupportedError(text, name=path)
    return not _is_torchs(model.load_state_dict) or any(map(_has_own_loader, model.modules()))


def _has_own_loader(part: Any) -> bool:
    """Whether a module itself, without those inside it, has load hooks or overrides `_load_from_state_dict`."""
    hooks = [getattr(part, f"_load_state_dict_{when}_hooks", {}).values() for when in ("pre", "post")]
    functions = [getattr(part, "_load_from_state_dict", None), *hooks[0], *hooks[1]]
    return not all(map(_is_torchs, functions))


def _is_torchs(function: Any) -> bool:
    """Whether a loader or hook is one of torch's, which only upgrades old names or gathers what is sharded."""
    return (getattr(function, "__module__", None) or "").startswith(("torch.nn.", "torch.distributed."))


def resizable_buffers(module: Any) -> dict[int, tuple[Any, str]]:
    """Return by `id` the buffers whose modules have loaders of their own, each with its module and its name there."""
    return {
        id(buffer): (part, name)
        for part in filter(_has_own_loader, _unwrapped(module).modules())
        for name, buffer in part.named_buffers(recurse=False)
    }


def resizes(part: Any, name: str, tensor: Any) -> bool:
    """Whether a module takes `tensor`, of another shape than its buffer `name`, at a load. Not collective.

    Only running its loader and hooks shows that: they run on a copy, so that live state stays as it is.
    """
    # The parameters and the modules inside are not copied: no loader is called for them.
    shared = {id(item): item for item in [*part.children(), *part.parameters(recurse=False)]}
    problems: list[str] = []
    try:
        trial = copy.deepcopy(part, shared)
        trial._load_from_state_dict(  # noqa: SLF001 (the method that torch calls for each module)
            {name: tensor.clone()}, "", {"version": getattr(part, "_version", None)}, True, [], [], problems
        )
    except Exception:  # noqa: BLE001 (a loader that cannot be tried does not resize)
        return False
    return not problems and tuple(getattr(trial, name).shape) == tuple(tensor.shape)


def load_items(module: Any, items: Mapping[str, Any], filled: Collection[str] = ()) -> None:
    """Let a module load `items` and its present tensors `filled`, all by names without wrappers."""
    model = _unwrapped(module)
    state = model.state_dict()
    for name in [*state]:
        bare = without_wrappers(name)
        if bare in items:
            state[name] = items[bare]
        elif bare not in filled:
            del state[name]
    model.load_state_dict(state, strict=False)


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
