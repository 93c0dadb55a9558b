"""Units: the parts of a live state that have a state of their own, and how each gives it and takes a new one.

A module has its tensors, by their names without what wrappers add, and extra state. An optimizer has hyperparameters,
and state by its parameters' numbers or names. Any other object, such as an LR scheduler, has `state_dict` and
`load_state_dict`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from statexchange import values
from statexchange.errors import InvalidArgumentError, StateExchangeError, UnsupportedError, excerpt, type_text
from statexchange.sharding.paths import find_wrapper, without_wrappers
from statexchange.state.types import Leaf, Module, Optimizer, Stateful
from statexchange.tensors import is_dtensor, is_torch

# Modules

# The attribute of each wrapper that has the module inside.
_WRAPPER_CLASSES = {"DistributedDataParallel": "module", "AveragedModel": "module", "OptimizedModule": "_orig_mod"}


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
    # By name: a model without FSDP1 should not have to import it.
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


def model_items(module: Module) -> dict[str, Leaf]:
    """Return `module_items` without the count of an AveragedModel."""
    return _items(layers(module)[-1])


def _items(model: Module, *, keep_vars: bool = False) -> dict[str, Leaf]:
    state = model.state_dict(keep_vars=keep_vars)
    if find_wrapper("\n".join(state)) is None:  # nearly always
        return dict(state)
    items: dict[str, Leaf] = {}
    for name, value in state.items():
        bare = without_wrappers(name)
        # A model that keeps itself compiled beside the original has each tensor twice.
        if bare in items:
            raise _two_of(bare)
        items[bare] = value
    return items


def _two_of(name: str) -> InvalidArgumentError:
    return InvalidArgumentError("two tensors have this name once wrappers are removed", name=name)


def is_extra_state(name: str) -> bool:
    """Whether an entry of a state dict is extra state: what a module's `get_extra_state` returned, of any type."""
    return name.rpartition(".")[2] == "_extra_state"


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


def layers(module: Module) -> list[Module]:
    """Return the wrappers around a model, the outermost first, and the model."""
    around = [module]
    inner: Leaf = module
    while type(inner).__name__ in _WRAPPER_CLASSES:
        inner = getattr(inner, _WRAPPER_CLASSES[type(inner).__name__])
        around.append(inner)
    return around


def bare_name(name: str) -> str:
    """Return a parameter's name without what wrappers add, DistributedDataParallel's "module." among it."""
    return without_wrappers(name).removeprefix("module.")


# Optimizers

# What of a param group is not the source's to say.
KEPT: tuple[str, ...] = ("params", "param_names")

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
    for layer in layers_of_optimizer(optimizer):
        if layer.state is optimizer.state:
            kind = type(layer)
    return f"{kind.__module__}.{kind.__qualname__}"


def layers_of_optimizer(optimizer: Optimizer) -> list[Optimizer]:
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
    for name in KEPT:
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
    if does_more(optimizer, "state_dict"):
        saved = optimizer.state_dict()  # first, as a hook may change the state
    parameters = parameters_of(optimizer)
    numbers: dict[Leaf, int] = dict(zip(parameters, range(len(parameters)), strict=True))
    state: dict[int, Leaf] = {}
    shared: dict[Leaf, Leaf] = {}
    for key, entries in optimizer.state.items():
        if key in numbers:
            state[numbers[key]] = entries
        elif is_torch(key):
            raise InvalidArgumentError("there is state of a tensor that is in no param group", name=path)
        else:
            shared[key] = entries
    groups = list(map(hyperparameters, optimizer.param_groups))
    more = {}
    if saved is not None:
        more = _more_entries(optimizer, saved, {**shared, **state}, groups, path)
    return {"param_groups": groups, "state": state, "shared": shared, "more": more}


def does_more(optimizer: Optimizer, method: str) -> bool:
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
        if are_alike(unpacked, state) and are_alike(saved_groups, groups):
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


def are_alike(value: Leaf, other: Leaf) -> bool:
    """Whether two nested values have the same objects, equal tensors or equal plain values."""
    if value is other:
        return True
    if is_torch(value) and is_torch(other):
        return _are_alike_tensors(value, other)
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return value.keys() == other.keys() and all(are_alike(item, other[key]) for key, item in value.items())
    if isinstance(value, list | tuple) and type(value) is type(other):
        return len(value) == len(other) and all(map(are_alike, value, other))
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


# Other objects


def is_stateful(value: object) -> bool:
    """Whether `value` is an object with `state_dict` and `load_state_dict`, such as an LR scheduler. Not collective.

    Of a mapping the class is asked, as its keys may be attributes.
    """
    if isinstance(value, type):
        return False
    holder: object = value
    if isinstance(value, Mapping):
        holder = type(value)
    return callable(getattr(holder, "state_dict", None)) and callable(getattr(holder, "load_state_dict", None))


def is_per_rank(value: object) -> bool:
    """Whether the state of an object belongs to its rank, even if it is equal on all ranks. Not collective.

    Objects with ``per_rank = True`` are such. So are torchdata's loaders: their position is one in the rank's part.
    """
    if not is_stateful(value):
        return False
    # By identity: a Mock, or a class that makes up attributes, does not say so.
    if getattr(value, "per_rank", False) is True:
        return True
    return any(base.__module__.startswith("torchdata.") for base in type(value).__mro__)


def state_of_object(value: Stateful, path: str, advice: str) -> Leaf:
    """Return what `state_dict` of an object returns. Not collective.

    Raises:
        InvalidArgumentError: it raises an error, which becomes one that names `path` and ends with `advice`.
    """
    try:
        return value.state_dict()
    except StateExchangeError:
        raise
    except Exception as error:
        text = f"state_dict() of {type_text(value)} raised {excerpt(error, 200)}: {advice}"
        raise InvalidArgumentError(text, name=path) from error


class ObjectStates:
    """The present states of objects. Each object's `state_dict` is called once, before anything changes.

    A data loader may draw random numbers in it.
    """

    def __init__(self) -> None:
        self._states: dict[int, tuple[Stateful, Leaf]] = {}  # the objects too, so that no other gets their id

    def of(self, live: Stateful, path: str) -> Leaf:
        """Return the present state of the object at `path`; raise InvalidArgumentError if it raises an error."""
        if id(live) not in self._states:
            self._states[id(live)] = live, state_of_object(live, path, "leave it out by exclude")
        return self._states[id(live)][1]


# Installing. Nothing here runs before all ranks have everything that they read or receive. An object that refuses its
# state by then leaves what came before it changed, and the error says so.

# What torch's `load_state_dict` replaces in an optimizer.
_REPLACED: tuple[str, ...] = ("param_groups", "state")


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
    if more or derives or does_more(optimizer, "load_state_dict"):
        _load(optimizer, more)


def _load(optimizer: Optimizer, more: Mapping[str, Leaf]) -> None:
    """Let an optimizer load its present state, and further entries, by its own `load_state_dict`. Not collective."""
    # torch's load_state_dict casts the state, and replaces the dicts, to which others may refer, also in a wrapped
    # optimizer. So the old dicts are put back, and get what the loader has made of their entries.
    before: list[tuple[dict[str, Leaf], dict[str, Leaf]]] = []
    for layer in layers_of_optimizer(optimizer):
        attributes = vars(layer)
        old = {}
        for name in _REPLACED:
            # A wrapper may pass these on from the optimizer inside, and have none of its own.
            if name in attributes:
                old[name] = attributes[name]
        before.append((attributes, old))
    try:
        optimizer.load_state_dict({**optimizer.state_dict(), **more})
        groups, state = optimizer.param_groups, optimizer.state
    finally:  # after an error of the loader, too
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
        if are_alike(new.detach(), cast):
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
            kept = {name: group[name] for name in KEPT if name in group}
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


def load_object(
    value: object,
    load: Callable[[Leaf], object],
    state: Leaf,
    path: str,
    advice: str = ", or leave it out by exclude",
) -> None:
    """Let an object load its state by `load`. Not collective.

    Raises:
        InvalidArgumentError: it raises an error, which becomes one that names `path` and ends with `advice`.
    """
    try:
        load(state)
    except StateExchangeError:
        raise
    except Exception as error:
        raise InvalidArgumentError(
            f"{type_text(value)} does not take the state that it is given here, and raised {excerpt(error, 200)}. What "
            f"comes before it in the state has been changed: make the object as it was saved{advice}",
            name=path,
        ) from error
