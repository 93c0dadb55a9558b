"""Install: let modules, optimizers and other objects take what a load, or `synchronize`, has for them.

Nothing here runs before all ranks have everything that they read or receive. An object that refuses its state by then
leaves what came before it changed, and the error says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from statexchange.errors import InvalidArgumentError, StateExchangeError, excerpt, type_text
from statexchange.sharding.paths import without_wrappers
from statexchange.state.types import Leaf, Module, Optimizer
from statexchange.state.units import KEPT, are_alike, does_more, hyperparameters, layers, layers_of_optimizer
from statexchange.tensors import is_torch

__all__ = ["install_optimizer", "load_items", "load_object"]

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
