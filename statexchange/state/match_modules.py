"""Match the modules of a live state with the entries of a source."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from statexchange.errors import InvalidArgumentError
from statexchange.sharding.paths import joined, module_prefix, text_of
from statexchange.state.allocation import Place, tensor_to_fill
from statexchange.state.entries import ABSENT, Entries, OpaqueValue, SavedTensor
from statexchange.state.flatten import LiveEntry, LiveState, load_object
from statexchange.state.load_plan import Filler, LoadTarget, expect, name_of
from statexchange.state.matching import Matching
from statexchange.state.modules import (
    has_loader,
    is_extra_state,
    is_module,
    live_items,
    load_items,
    resizable_buffers,
    resizes,
)
from statexchange.state.tree import has_indices
from statexchange.tensors import is_tensor

__all__ = ["ModulePrefixes", "match_module", "prefixes_of_modules"]


@dataclass(slots=True)
class ModulePrefixes:
    """The prefixes of the names of modules in a source, by their paths, where that is not their path.

    `shared` are the paths of lists of modules that share one namespace.
    """

    by_path: dict[str, str] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)

    def of(self, path: str) -> str:
        """Return what comes before the names of the module at a path."""
        return self.by_path.get(path, f"{path}." if path else "")


def prefixes_of_modules(live: LiveState, entries: Entries, has: Callable[[str], bool]) -> ModulePrefixes:
    """Find what comes before the names of modules.

    The modules of a list share one namespace, as the stages of a pipeline, or have their indices in names. "0.weight"
    may be a name in one module or that of the first one's weight: what the source has more of counts. DistributedData-
    Parallel's "module." is a prefix if all names of the source's module begin with it, and none of the live one's.
    """
    found = ModulePrefixes()
    for keys, container in live.containers.items():
        path = text_of(keys)
        if has_indices(container) and len(container) > 0 and all(map(is_module, container)):
            numbered = [(index, name) for index, module in enumerate(container) for name in live_items(module)[0]]
            begin = f"{path}." if path else ""
            with_index = sum(has(f"{begin}{index}.{name}") for index, name in numbered)
            if with_index <= sum(has(f"{begin}{name}") for _, name in numbered) and numbered:
                found.shared.add(path)
                found.by_path |= {joined(path, index): begin for index in range(len(container))}
    for entry in live.entries:
        if entry.kind == "module" and entry.text not in found.by_path:
            begin = found.of(entry.text)
            below = [one.text[len(begin) :] for one in entries.below(entry.text) if one.text != entry.text]
            added = module_prefix(below)
            # A model's own attribute may be called `module`.
            if added and not any(name.startswith(added) for name in live_items(entry.value)[0]):
                found.by_path[entry.text] = begin + added
    return found


def match_module(
    entry: LiveEntry, prefix: str, entries: Entries, matching: Matching, filler: Filler, taken: set[str]
) -> None:
    """Plan a module: parameters and buffers are filled, and other entries go through its `load_state_dict`.

    If that does more than copy, by hooks or loaders of modules inside, it is called with what was filled, too.
    `prefix` comes before its names in the source. What the source has for it joins `taken`.
    """
    module, path, plan = entry.value, entry.text, filler.plan
    live, rest = live_items(module)
    wanted = _wanted([*live, *rest], prefix, path, matching, taken)
    has_own_loader = has_loader(module, path)
    buffers = resizable_buffers(module) if has_own_loader and matching.names.options.layout is None else {}
    stored = {name: matching.stored(prefix + name, (*entry.keys, name)) for name in live if name in wanted}
    loaded = {id(live[name]) for name, names in stored.items() if names is not None}
    resized: dict[str, Any] = {}
    for name, names in stored.items():
        tensor, where = live[name], prefix + name
        if names is None:
            other = entries.at(where)
            expect(other is None, "a tensor", None if other is None else other.leaf, where)
            if id(tensor) not in loaded:  # a tied tensor is loaded under any of its names
                plan.add_missing([where])
            continue
        taken.update([one.text for one in names])
        plan.add_loaded(names)
        new = _resized(tensor, names[0].leaf, filler, where, *buffers.get(id(tensor), (None, "")))
        if new is None:
            plan.targets.append(LoadTarget(name_of(names), tensor, where))
        else:
            resized[name] = new
    extra = {}
    for name in rest:
        if name in wanted:
            saved = entries.value(prefix + name, rest[name])
            if saved is ABSENT or isinstance(saved, OpaqueValue):
                plan.add_missing([prefix + name], stateful=False)
            else:
                extra[name] = filler.fill(saved, prefix + name, Place(rest[name], is_filled=False))
                taken.update(one.text for one in entries.below(prefix + name))
                plan.add_loaded(entries.below(prefix + name))
                if not is_extra_state(name):
                    _check_like(rest[name], extra[name], prefix + name)
    if extra or (has_own_loader and loaded):
        load = functools.partial(load_items, module, filled=live.keys() if has_own_loader else ())
        plan.callbacks.append(functools.partial(load_object, module, load, extra | resized, path))


def _wanted(names: Collection[str], prefix: str, path: str, matching: Matching, taken: set[str]) -> set[str]:
    """Return the names of a module that are loaded.

    Patterns may have its names in the source, or those after its place in the state.
    """
    options, place = matching.names.options, f"{path}." if path else ""
    if not matching.names.selects:
        return {*names}
    wanted = {name for name in names if options.wants_object([prefix + name, place + name])}
    taken.update(prefix + name for name in names if name not in wanted)
    return wanted


def _resized(live: Any, saved: SavedTensor, filler: Filler, path: str, part: Any, name: str) -> Any:
    """Return a new tensor of the saved shape, if the module `part` takes it for its buffer `name`; else None."""
    if part is None:
        return None
    new = tensor_to_fill(filler.matching, saved, Place(live), path)
    if new is live or new.dtype != live.dtype or not resizes(part, name, new):
        return None
    filler.plan.targets.append(LoadTarget(saved.name, new, path))
    return new


def _check_like(own: Any, saved: Any, path: str) -> None:
    """Raise InvalidArgumentError unless a tensor has the saved shape and dtype. For those that a module copies."""
    if not is_tensor(own) or not is_tensor(saved):
        return
    expected, found = (tuple(saved.shape), saved.dtype), (tuple(own.shape), own.dtype)
    if expected != found:
        text = "the state's shape or dtype differs from the source's"
        raise InvalidArgumentError(text, name=path, expected=expected, found=found)
