"""Match the modules of a live state with the entries of a source: what comes before their names, and each name."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping

from statexchange.errors import InvalidArgumentError
from statexchange.sharding.paths import joined, module_prefix, text_of
from statexchange.state.entries import ABSENT, OpaqueValue, SavedTensor, is_empty_mapping
from statexchange.state.flatten import LiveEntry, LiveState, load_object
from statexchange.state.install import LoadPlan, LoadTarget, Place, name_of, other_kind_error, tensor_to_fill
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
from statexchange.state.types import Leaf, Module, Path
from statexchange.tensors import is_tensor

__all__ = ["ModuleMatcher"]


class ModuleMatcher:
    """Plans the modules of a state.

    Attributes:
        shared: the paths of lists of modules that share one namespace.
    """

    def __init__(self, live: LiveState, plan: LoadPlan) -> None:
        self.shared: set[str] = set()
        self._plan = plan
        self._matching = plan.matching
        self._entries = plan.matching.entries
        self._prefixes: dict[str, str] = {}  # what comes before the names of each module in the source, by its path
        self._find_prefixes(live)

    def _find_prefixes(self, live: LiveState) -> None:
        """Find what comes before the names of modules.

        The modules of a list share one namespace, as the stages of a pipeline, or have their indices in names.
        DistributedDataParallel's "module." is a prefix if all names of the source's module begin with it, and none of
        the live one's.
        """
        # Lists first: a module in one has no prefix of its own.
        for keys, container in live.containers.items():
            if has_indices(container) and len(container) > 0 and all(map(is_module, container)):
                path = text_of(keys)
                begin = joined(path, "")
                if self._share_names(container, begin):
                    self.shared.add(path)
                    for index in range(len(container)):
                        self._prefixes[joined(path, index)] = begin
        for entry in live.entries:
            if entry.kind != "module" or entry.text in self._prefixes:
                continue
            begin = joined(entry.text, "")
            names = []
            for below in self._entries.below(entry.text):
                if below.text != entry.text:
                    names.append(below.text[len(begin) :])
            added = module_prefix(names)
            # A model's own attribute may be called `module`: then its names begin so without a wrapper.
            if added and not any(name.startswith(added) for name in live_items(entry.value)[0]):
                begin += added
            self._prefixes[entry.text] = begin

    def _share_names(self, modules: Iterable[Module], begin: str) -> bool:
        """Whether the source has at least as many names of these modules without their indices as with them.

        "0.weight" may be a name in one module, or that of the first one's weight.
        """
        has_names, balance = False, 0
        for index, module in enumerate(modules):
            for name in live_items(module)[0]:
                has_names = True
                balance += self._matching.stored(f"{begin}{name}", ()) is not None
                balance -= self._matching.stored(f"{begin}{index}.{name}", ()) is not None
        return has_names and balance >= 0

    def match(self, entry: LiveEntry) -> bool:
        """Plan a module; return False if the source has nothing where its names would be, and one is selected.

        Parameters and buffers are filled, and other entries go through its `load_state_dict`. If that does more than
        copy, by hooks or loaders of modules inside, it is called with what was filled, too.
        """
        module, path, prefix = entry.value, entry.text, self._prefixes[entry.text]
        live, rest = live_items(module)
        names = [*live, *rest]
        if path and not self._entries.has_below(prefix.removesuffix(".")):
            options = self._matching.names.options
            return not any(options.wants(joined(path, name)) for name in names)
        # A module without tensors was saved as an empty mapping, or by others as nothing.
        other = None
        if path:
            other = self._entries.at(path, entry.keys)
        if other is not None:
            if not is_empty_mapping(other.leaf):
                raise other_kind_error("the tensors of a module", other.leaf, path)
            self._plan.matched.add(path)
        wanted = self._wanted(names, prefix, path)
        has_own_loader = has_loader(module, path)
        buffers = {}
        # With a layout a live tensor may be a part of the saved one, and so of another shape.
        if has_own_loader and self._matching.names.options.layout is None:
            buffers = resizable_buffers(module)
        wanted_live = {name: tensor for name, tensor in live.items() if name in wanted}
        new_items, loaded = self._match_tensors(wanted_live, prefix, entry.keys, buffers)
        for name, value in rest.items():
            if name in wanted:
                self._match_rest(name, value, prefix, new_items)
        if new_items or (has_own_loader and loaded):
            # torch's own loader would only copy the filled tensors onto themselves.
            filled: Collection[str] = ()
            if has_own_loader:
                filled = live.keys()
            load = functools.partial(load_items, module, filled=filled)
            self._plan.callbacks.append(functools.partial(load_object, module, load, new_items, path))
        return True

    def _wanted(self, names: Collection[str], prefix: str, path: str) -> Collection[str]:
        """Return the names of a module that are loaded.

        Patterns may have its names in the source, or those after its place in the state.
        """
        if not self._matching.names.selects:
            return frozenset(names)
        place = joined(path, "")
        wanted: set[str] = set()
        for name in names:
            if self._matching.names.options.wants_object([prefix + name, place + name]):
                wanted.add(name)
            else:
                # The state has a place for it: it is not unexpected.
                self._plan.matched.add(prefix + name)
        return wanted

    def _match_tensors(
        self, live: Mapping[str, Leaf], prefix: str, keys: Path, buffers: Mapping[int, tuple[Module, str]]
    ) -> tuple[dict[str, Leaf], set[int]]:
        """Plan tensors that are filled in place; return new ones of another size, by name, and the `id` of the others.

        Only `buffers`, by `id`, whose modules have loaders of their own, may change their size.
        """
        new_items: dict[str, Leaf] = {}
        loaded: set[int] = set()
        lacking: dict[str, Leaf] = {}
        for name, tensor in live.items():
            where = prefix + name
            stored = self._matching.stored(where, (*keys, name))
            if stored is None:
                lacking[where] = tensor
                continue
            loaded.add(id(tensor))
            self._plan.add_loaded(stored)
            target = tensor
            if id(tensor) in buffers:
                target = self._resized(tensor, stored[0].leaf, where, *buffers[id(tensor)])
                if target is not tensor:
                    new_items[name] = target
            self._plan.targets.append(LoadTarget(name_of(stored), target, where))
        # Only now it is known which tensors are loaded under another of their names.
        for where, tensor in lacking.items():
            other = self._entries.at(where)
            if other is not None:
                raise other_kind_error("a tensor", other.leaf, where)
            if id(tensor) not in loaded:
                self._plan.add_missing([where])
        return new_items, loaded

    def _resized(self, live: Leaf, saved: SavedTensor, path: str, part: Module, name: str) -> Leaf:
        """Return a new tensor of the saved shape, if the module `part` takes it for its buffer `name`; else `live`."""
        new = tensor_to_fill(self._matching, saved, Place(live), path)
        # Of another dtype it would be another buffer, and trying the loader on it costs a copy.
        if new is not live and new.dtype == live.dtype and resizes(part, name, new):
            return new
        return live

    def _match_rest(self, name: str, live: Leaf, prefix: str, new_items: dict[str, Leaf]) -> None:
        """Plan an entry of a module's state dict that is no parameter or buffer; what is loaded joins `new_items`."""
        where = prefix + name
        saved = self._entries.value(where, live)
        if saved is ABSENT or isinstance(saved, OpaqueValue):
            self._plan.add_missing([where], stateful=False)
            return
        new = self._plan.fill(saved, where, Place(live, is_filled=False))
        self._plan.add_loaded(self._entries.below(where))
        # Extra state may be of any form. What else a module copies, as a quantized weight, it copies into what it has.
        if not is_extra_state(name) and is_tensor(live) and is_tensor(new):
            expected, present = (tuple(new.shape), new.dtype), (tuple(live.shape), live.dtype)
            if expected != present:
                text = "the state's shape or dtype differs from the source's"
                raise InvalidArgumentError(text, name=where, expected=expected, found=present)
        new_items[name] = new
