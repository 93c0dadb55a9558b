"""A module: its tensors by their names without wrappers, its extra state, and what its loaders do besides copying."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping

from statexchange import values
from statexchange.errors import InvalidArgumentError, UnsupportedError, type_text
from statexchange.sharding.paths import have_wrappers, without_wrappers
from statexchange.state.types import Leaf, Module

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

# The attribute of each wrapper that has the module inside.
_WRAPPERS = {"DistributedDataParallel": "module", "AveragedModel": "module", "OptimizedModule": "_orig_mod"}


def is_module(value: object) -> bool:
    """Whether `value` is a torch module, or of a class that behaves like one.

    The class is asked, as a mapping whose keys are attributes may have, or seem to have, any attribute.
    """
    kind = type(value)
    # Not `isinstance`, for which torch would have to be imported.
    return hasattr(kind, "state_dict") and hasattr(kind, "modules")


def module_items(module: Leaf, *, keep_vars: bool = False) -> dict[str, Leaf]:
    """Return a module's state dict, by names without what wrappers add to them.

    The count of an AveragedModel is included: with a count of 0 its next update would replace the average by the model.

    Args:
        module: the module.
        keep_vars: return the parameters themselves, not detached tensors.

    Raises:
        InvalidArgumentError: two names are equal without the wrappers.
    """
    around = layers(module)
    items = _items(around[-1], keep_vars=keep_vars)
    for layer in around:
        if type(layer).__name__ == "AveragedModel":
            if "n_averaged" in items:
                raise _two_of("n_averaged")
            items["n_averaged"] = layer.n_averaged
    return items


def check_module(module: Module) -> None:
    """Raise UnsupportedError for FSDP1, whose state dicts are copies that cannot be filled in place."""
    for part in module.modules():
        if type(part).__name__ == "FullyShardedDataParallel":
            raise UnsupportedError(
                "FSDP1 gives copies of its parameters, which cannot be filled in place: shard with fully_shard, or "
                "save and load the module before FSDP1 wraps it (export_checkpoint writes it as it is)"
            )


def live_items(module: Module) -> tuple[dict[str, Leaf], dict[str, Leaf]]:
    """Return `module_items` in two: the parameters and buffers themselves, to be filled in place, and the rest.

    The rest is extra state and the copies that some modules make of their tensors; `load_items` loads it.
    """
    check_module(module)
    # The state dict has only persistent buffers, but a quantized module puts copies of its tensors into it.
    items = module_items(module, keep_vars=True)
    tensors = {*map(id, module.parameters()), *map(id, module.buffers())}
    live: dict[str, Leaf] = {}
    rest: dict[str, Leaf] = {}
    for name, value in items.items():
        if id(value) in tensors:
            live[name] = value
        else:
            rest[name] = value
    return live, rest


def model_items(module: Module, *, keep_vars: bool = False) -> dict[str, Leaf]:
    """Return `module_items` without the count of an AveragedModel."""
    return _items(layers(module)[-1], keep_vars=keep_vars)


def _items(model: Module, *, keep_vars: bool) -> dict[str, Leaf]:
    state = model.state_dict(keep_vars=keep_vars)
    if not have_wrappers(state):  # nearly all
        return dict(state)
    items: dict[str, Leaf] = {}
    for name, value in state.items():
        bare = without_wrappers(name)
        if bare in items:
            raise _two_of(bare)
        items[bare] = value
    return items


def _two_of(name: str) -> InvalidArgumentError:
    return InvalidArgumentError("two tensors have this name once wrappers are removed", name=name)


def is_extra_state(name: str) -> bool:
    """Whether an entry of a state dict is extra state: what a module's `get_extra_state` returned, of any type."""
    return name.rpartition(".")[2] == "_extra_state"


def is_plain_entry(name: str, value: object) -> bool:
    """Whether a non-tensor entry of a state dict is extra state or a plain value, and so hides no tensor."""
    return is_extra_state(name) or values.has_text(value)


def has_loader(module: Module, path: str) -> bool:
    """Whether a module, or one inside it, does more at a load than copy tensors, by hooks or an own loader.

    Raises:
        UnsupportedError: a wrapper has hooks, and only the model inside is loaded; the error names `path`.
    """
    *wrappers, model = layers(module)
    # A wrapper's hooks expect its own names, and `load_items` gives the model those of the model.
    for wrapper in wrappers:
        if _has_own_loader(wrapper):
            text = f"{type_text(wrapper)} has hooks of its load_state_dict: register them on the module that it wraps"
            raise UnsupportedError(text, name=path)
    return not _is_torchs(model.load_state_dict) or any(map(_has_own_loader, model.modules()))


def _has_own_loader(part: Module) -> bool:
    """Whether a module itself, without those inside it, has load hooks or overrides `_load_from_state_dict`."""
    for when in ("pre", "post"):
        for hook in getattr(part, f"_load_state_dict_{when}_hooks", {}).values():
            if not _is_torchs(hook):
                return True
    return not _is_torchs(getattr(part, "_load_from_state_dict", None))


def _is_torchs(function: object) -> bool:
    """Whether a loader or hook is one of torch's, which only upgrades old names or gathers what is sharded."""
    return (getattr(function, "__module__", None) or "").startswith(("torch.nn.", "torch.distributed."))


def resizable_buffers(module: Module) -> dict[int, tuple[Module, str]]:
    """Return by `id` the buffers whose modules have loaders of their own, each with its module and its name there."""
    buffers: dict[int, tuple[Module, str]] = {}
    for part in layers(module)[-1].modules():
        if _has_own_loader(part):
            for name, buffer in part.named_buffers(recurse=False):
                buffers[id(buffer)] = part, name
    return buffers


def resizes(part: Module, name: str, tensor: Leaf) -> bool:
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


def load_items(module: Module, items: Mapping[str, Leaf], filled: Collection[str] = ()) -> None:
    """Let a module load `items` and its present tensors `filled`, all by names without wrappers."""
    model = layers(module)[-1]
    state = model.state_dict()
    for name in [*state]:
        # The loader of the model expects the names that its own state dict has.
        bare = without_wrappers(name)
        if bare in items:
            state[name] = items[bare]
        elif bare not in filled:
            # A loader would take a present value for one of the source.
            del state[name]
    model.load_state_dict(state, strict=False)


def layers(module: Module) -> list[Module]:
    """Return the wrappers around a model, the outermost first, and the model."""
    around = [module]
    inner: Leaf = module
    while type(inner).__name__ in _WRAPPERS:
        inner = getattr(inner, _WRAPPERS[type(inner).__name__])
        around.append(inner)
    return around


def bare_name(name: str) -> str:
    """Return a parameter's name without what wrappers add, DistributedDataParallel's "module." among it."""
    return without_wrappers(name).removeprefix("module.")
