"""Match a live state with the entries of a source: each live path takes the entries of the same path.

::

    live path            source                    what is planned
    model (a module)     model.0.weight            the parameter is filled
    step (7)             step: 9                   the mapping that has the 7 gets the 9
    extra (a dict)       -                         "extra" is missing
    -                    old.x                     "old" is unexpected
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence

from statexchange import values
from statexchange.errors import InvalidArgumentError, NotFoundError, UnsupportedError, type_text
from statexchange.sharding.paths import Path, joined, module_prefix, text_of
from statexchange.state.entries import (
    ABSENT,
    Entry,
    OpaqueValue,
    SavedTensor,
    has_no_leaves,
    is_empty_mapping,
    refuse_opaque,
)
from statexchange.state.load_plan import (
    LoadPlan,
    LoadTarget,
    Matching,
    Place,
    name_of,
    named,
    other_kind_error,
    tensor_to_fill,
)
from statexchange.state.match_optimizers import OptimizerMatcher
from statexchange.state.megatron import MegatronTensor, leaves
from statexchange.state.tree import (
    LiveEntry,
    LiveState,
    children,
    has_indices,
    is_dataclass,
    is_leaf,
    is_mutable,
    refill,
    sharded_kind,
    with_children,
)
from statexchange.state.types import Leaf, Module
from statexchange.state.units import (
    has_loader,
    is_extra_state,
    is_module,
    live_items,
    load_items,
    load_object,
    resizable_buffers,
    resizes,
)
from statexchange.tensors import is_tensor
from statexchange.units import format_number


def match(state: Leaf, live: LiveState, matching: Matching) -> LoadPlan:
    """Plan how a live state becomes that of the source. Not collective; nothing is changed yet.

    Raises:
        InvalidArgumentError: something cannot be changed in place, or was saved as another kind; names the path.
        UnsupportedError: a value has a type that the live state does not have; names the path.
    """
    matcher = _Matcher(live, matching)
    for entry in live.entries:
        matcher.match(entry)
    matcher.check_containers()
    matcher.optimizers.check()
    matcher.check_lists()
    matcher.add_unexpected()
    # Last, as it looks at all values that are new.
    if matcher.values.installed(state) is not state:
        text = f"the state is {type_text(state)}, which cannot be changed in place: give a mapping that holds it"
        raise InvalidArgumentError(text)
    return matcher.plan


class _Matcher:
    """Matches the live entries one after the other, and writes the plan."""

    def __init__(self, live: LiveState, matching: Matching) -> None:
        self.plan = LoadPlan(matching)
        self._live = live
        self._entries = matching.entries
        self._matching = matching
        self._names = matching.names
        self._options = matching.names.options
        self._megatron = _MegatronMatcher(self.plan)
        self.values = _ValueMatcher(live, self.plan)
        self.modules = _ModuleMatcher(live, self.plan)
        self.optimizers = OptimizerMatcher(live, self.plan)

    def match(self, entry: LiveEntry) -> None:
        """Match one live entry."""
        if self._matching.left_out and self._matching.leaves_out(entry.text):
            self._skip(self._entries.below(entry.text))
            return
        if entry.kind == "tensor":
            self._tensor(entry)
        elif entry.kind == "module":
            if not self.modules.match(entry):
                self._add_missing(entry)
        elif entry.kind == "optimizer":
            self.optimizers.match(entry)
        elif entry.kind == "object":
            self._object(entry)
        elif entry.kind == "sharded":
            self._megatron.match(entry.value, entry.text)
        else:
            self._value(entry)

    def _tensor(self, entry: LiveEntry) -> None:
        if not self._options.wants(entry.text):
            return
        stored = self._matching.stored(entry.text)
        if stored is None:
            saved = self._entries.at(entry.text)
            if saved is not None or self._entries.has_below(entry.text):
                raise other_kind_error("a tensor", {} if saved is None else saved.leaf, entry.text)
            self._add_missing(entry)
            return
        self.plan.add_loaded(stored)
        self.plan.targets.append(LoadTarget(name_of(stored), entry.value, entry.text))

    def _object(self, entry: LiveEntry) -> None:
        """Plan an object that has `load_state_dict`, which is loaded or left whole."""
        path, live = entry.text, entry.value
        if not self._entries.has_below(path):
            if self._may_want(entry):
                present = self._matching.objects.of(live, path)
                # A DCP leaves out what is empty, as the state of a GradScaler that is not enabled.
                is_left_out = self._entries.keys_are_texts and has_no_leaves(present)
                if self._names.wants_whole((present, path)) and not is_left_out:
                    self._add_missing(entry)
            return
        below = self._entries.below(path)
        if path and not self._options.may_want(path):
            self._skip(below)
            return
        present = self._matching.objects.of(live, path)
        saved = self._entries.value(path, present)
        if not self._names.wants_whole((saved, path), (present, path)):
            self._skip(below)
            return
        if not isinstance(saved, Mapping):
            raise other_kind_error(f"the state of {type_text(live)}", saved, path)
        if not path and present and saved.keys().isdisjoint(present):  # of something else
            text = (
                f"the source has nothing for the state, {type_text(live)}: give a state with the source's names, or a "
                "mapping that has it under its name in the source"
            )
            raise NotFoundError(text)
        self._take(below)
        new = self.plan.fill(saved, path, Place(present, is_filled=False))
        self.optimizers.add_scheduler(entry)
        self.plan.callbacks.append(functools.partial(load_object, live, live.load_state_dict, new, path))

    def _value(self, entry: LiveEntry) -> None:
        """Plan a plain value, or a container of such values."""
        path, live = entry.text, entry.value
        if not path:  # the whole state, into which a load with patterns may put nothing
            self.plan.num_values += 1
        below = self._entries.below(path)
        if not self._may_want(entry) or self._selects_nothing_in(entry, below):
            self._skip(below)
            return
        saved = self._entries.value(path, live, is_whole=False)
        if saved is ABSENT:
            may_be_empty = self._entries.keys_are_texts or not path
            if self._names.wants_any(live, path) and not (may_be_empty and has_no_leaves(live)):
                self._add_missing(entry)
        elif self.values.add(entry, saved):
            self._take(below)
        else:
            self._skip(below)

    # What is selected

    def _selects_nothing_in(self, entry: LiveEntry, below: Sequence[Entry]) -> bool:
        """Whether the source has something for a plain value, and neither that nor the live value is selected."""
        if not self._names.selects or not below or any(map(self._wants_entry, below)):
            return False
        return not self._names.wants_any(entry.value, entry.text)

    def _wants_entry(self, entry: Entry) -> bool:
        if isinstance(entry.leaf, SavedTensor):
            return self._options.wants(entry.text)
        return self._names.wants_whole((entry.leaf, entry.text))

    def _may_want(self, entry: LiveEntry) -> bool:
        """Whether a live entry, or anything inside it, is to be loaded."""
        if not self._names.selects or not entry.text:
            return True
        has_inside = children(entry.value) is not None or is_leaf(entry.value)
        if has_inside:
            return self._options.may_want(entry.text)
        return self._options.wants(entry.text)

    # What the source has for a live path

    def _take(self, entries: Iterable[Entry]) -> None:
        """Note that entries are loaded; of an object or value some may not be selected."""
        for entry in entries:
            self.plan.matched.add(entry.text)
            if self._options.wants(entry.text):
                self.plan.loaded.add(entry.text)

    def _skip(self, entries: Iterable[Entry]) -> None:
        """Note that entries have a place in the state, and are not loaded."""
        for entry in entries:
            self.plan.matched.add(entry.text)

    # What one side lacks

    def _add_missing(self, entry: LiveEntry) -> None:
        """Add the highest path above a live entry below which the source has nothing."""
        path = _highest(entry, self._entries.has_below)
        if path not in self.plan.missing:
            self.plan.add_missing(path, stateful=entry.kind != "value")
        elif entry.kind != "value":
            self.plan.stateful.add(path)

    def check_containers(self) -> None:
        """Raise for a live container of which the source has something else under its name."""
        for keys, container in self._live.containers.items():
            path = text_of(keys)
            # The whole source has no entry of its own.
            entry = self._entries.at(path) if path else None
            if entry is None or path in self.plan.matched or not self._wants_entry(entry):
                continue
            refuse_opaque(entry.leaf, path)
            if not is_empty_mapping(entry.leaf):
                raise other_kind_error("a list" if has_indices(container) else "a mapping", entry.leaf, path)

    def check_lists(self) -> None:
        """Raise InvalidArgumentError for a list that holds state and has another length than the source's."""
        if self._megatron.keys:
            return
        # The keys of a mapping say what they are; an index does not: with another length it may be another item's.
        for keys, live in self._live.containers.items():
            path = text_of(keys)
            if not has_indices(live) or path in self.modules.shared:
                continue
            begin = len(path) + 1 if path else 0
            indices: set[str] = set()
            for entry in self._entries.below(path):
                if entry.text != path and self._options.wants(entry.text):
                    indices.add(entry.text[begin:].partition(".")[0])
            live_indices = list(map(str, range(len(live))))
            problem = ""
            for index in live_indices:
                if not problem and joined(path, index) in self.plan.missing:
                    problem = f"lacks {joined(path, index)!r}"
            surplus = indices.difference(live_indices)
            if surplus:
                problem = f"has {joined(path, min(surplus))!r} besides"
            if indices and problem:
                raise InvalidArgumentError(
                    f"the state has {format_number(len(live), 'item')} here, and the source {problem}: make the list "
                    "as it was saved, or leave it out by exclude",
                    name=path,
                )

    def add_unexpected(self) -> None:
        """Add what the source has, and the live state has no place for, by the highest such path."""
        not_plain: set[str] = set()
        unexpected: dict[str, None] = {}
        for entry in self._entries:
            if entry.text in self.plan.matched or entry.is_alias or self._matching.leaves_out(entry.text):
                continue
            if not self._wants_entry(entry):
                continue
            is_tensor = isinstance(entry.leaf, SavedTensor)
            # Those of Megatron-Core are matched by key, and not by path.
            if self._megatron.keys and (is_tensor or entry.leaf is None):
                if is_tensor and entry.name not in self._megatron.keys:
                    unexpected.setdefault(entry.name)
                continue
            path = entry.text
            if text_of(entry.keys) == entry.text:  # else some of its keys are not known
                path = _highest(entry, self._live.texts.__contains__)
            unexpected.setdefault(path)
            if is_tensor or self._matching.has_tree:
                not_plain.add(path)
        for path in unexpected:
            if path not in self.plan.unexpected:
                self.plan.unexpected.append(path)
        self.plan.tolerated.update(unexpected.keys() - not_plain)


def _highest(entry: LiveEntry | Entry, has: Callable[[str], bool]) -> str:
    """Return the highest path above an entry that the other side does not have, or else that of the entry."""
    for count in range(1, len(entry.keys)):
        above = text_of(entry.keys[:count])
        if not has(above):
            return above
    return entry.text


class _ValueMatcher:
    """Selects what is loaded of plain values, and plans how it gets into the live state.

    Entries of mappings are loaded or left by themselves; all else is loaded or left whole.
    """

    def __init__(self, live: LiveState, plan: LoadPlan) -> None:
        self._live = live
        self._plan = plan
        self._names = plan.matching.names
        self._has_tree = plan.matching.has_tree
        self._new_values: dict[Path, Leaf] = {}

    def add(self, entry: LiveEntry, saved: Leaf) -> bool:
        """Plan a value that the source has; return whether anything of it is loaded."""
        path, live = entry.text, entry.value
        selected = saved
        if self._names.selects or not self._has_tree or self._plan.matching.left_out:
            selected = self._selected(saved, live, path)
        if selected is ABSENT:
            return False
        self._plan.num_values += 1
        self._new_values[entry.keys] = self._replacement(live, self._filled(selected, live, path), path)
        return True

    def _filled(self, saved: Leaf, live: Leaf, path: str) -> Leaf:
        """Return a plain value in containers of the live types; a live mapping itself is refilled with the entries."""
        if not isinstance(live, MutableMapping) or not isinstance(saved, Mapping) or is_dataclass(saved):
            return self._plan.fill(saved, path, Place(live))
        filled = {}
        for key, item in saved.items():
            filled[key] = self._plan.fill(item, joined(path, key), Place(live.get(key)))
        return filled

    def _selected(self, saved: Leaf, live: Leaf, path: str) -> Leaf:
        """Return what is loaded of a plain value, with the live values of what is not; ABSENT for nothing."""
        # What is selected of an empty mapping is the mapping itself.
        if isinstance(saved, Mapping) and saved and (isinstance(live, Mapping) or live is ABSENT):
            return self._selected_entries(saved, {} if live is ABSENT else live, path)
        inside = [(saved, path)]
        if live is not ABSENT:
            # Where a pattern leaves out a part that only the live value has, replacing it would lose that part.
            inside.append((live, path))
        return saved if self._names.wants_whole(*inside) else ABSENT

    def _selected_entries(self, saved: Mapping[Leaf, Leaf], live: Mapping[Leaf, Leaf], path: str) -> Leaf:
        selected: dict[Leaf, Leaf] = {}
        loads = False
        # A mapping of texts is filled entry by entry from others' files; without patterns a save replaces it.
        is_filled = bool(self._names.options.include)
        if not self._has_tree and not is_filled:
            is_filled = all(isinstance(key, str) for key in live)
        for key, item in live.items():
            inner = joined(path, key)
            if key in saved:
                selected[key] = item
                new = self._selected(saved[key], item, inner)
                if new is not ABSENT:
                    selected[key], loads = new, True
            elif self._plan.matching.leaves_out(inner) or not self._names.wants_whole((item, inner)):
                selected[key] = item
            elif is_filled and not has_no_leaves(item):
                self._plan.add_missing(inner, stateful=False)
                selected[key] = item
        for key, item in saved.items():
            if key in live:
                continue
            new = self._selected(item, ABSENT, joined(path, key))
            if new is not ABSENT:
                selected[key], loads = new, True
        return selected if loads else ABSENT

    def _replacement(self, live: Leaf, new: Leaf, path: str) -> Leaf:
        """Return what replaces a plain value: `live` itself if it is equal, or if a callback refills it."""
        if isinstance(live, MutableMapping) and isinstance(new, Mapping):
            if not values.is_same(dict(live), dict(new)):
                self._plan.change(live, functools.partial(refill, items=dict(new)), path)
            return live
        # Equal bits, not equal values: -0.0 is another number than 0.0.
        if values.is_same(live, new):
            return live
        if type(new) is type(live) and is_mutable(live) and not isinstance(live, list):  # a dataclass
            self._plan.change(live, functools.partial(with_children, changed=children(new) or {}), path)
            return live
        # What has no text was not saved as a value: it may be anything, as a function.
        if children(live) is None and not values.has_text(live):
            text = f"the state has {type_text(live)} here, which a load would replace by {type_text(new)}: leave it out"
            raise UnsupportedError(f"{text} by exclude", name=path)
        return new

    def installed(self, live: Leaf, keys: Path = (), path: str = "") -> Leaf:
        """Plan the changes of the containers that hold new values; return what replaces the live one at a path."""
        if keys not in self._live.containers:
            return self._new_values.get(keys, live)
        changed = {}
        for key, item in (children(live) or {}).items():
            new = self.installed(item, (*keys, key), joined(path, key))
            if new is not item:
                changed[key] = new
        if not changed:
            return live
        if is_mutable(live):
            self._plan.change(live, functools.partial(with_children, changed=changed), path)
            return live
        with named(path):
            return with_children(live, changed)


class _ModuleMatcher:
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
                balance += self._matching.stored(f"{begin}{name}") is not None
                balance -= self._matching.stored(f"{begin}{index}.{name}") is not None
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
        saved = None
        if path:
            saved = self._entries.at(path)
        if saved is not None:
            if not is_empty_mapping(saved.leaf):
                raise other_kind_error("the tensors of a module", saved.leaf, path)
            self._plan.matched.add(path)
        wanted = self._wanted(names, prefix, path)
        has_own_loader = has_loader(module, path)
        buffers = {}
        # With a layout a live tensor may be a part of the saved one, and so of another shape.
        if has_own_loader and self._matching.names.options.layout is None:
            buffers = resizable_buffers(module)
        wanted_live = {name: tensor for name, tensor in live.items() if name in wanted}
        new_items, loaded = self._match_tensors(wanted_live, prefix, buffers)
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
        self, live: Mapping[str, Leaf], prefix: str, buffers: Mapping[int, tuple[Module, str]]
    ) -> tuple[dict[str, Leaf], set[int]]:
        """Plan tensors that are filled in place; return new ones of another size, by name, and the `id` of the others.

        Only `buffers`, by `id`, whose modules have loaders of their own, may change their size.
        """
        new_items: dict[str, Leaf] = {}
        loaded: set[int] = set()
        lacking: dict[str, Leaf] = {}
        for name, tensor in live.items():
            where = prefix + name
            stored = self._matching.stored(where)
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
            saved = self._entries.at(where)
            if saved is not None:
                raise other_kind_error("a tensor", saved.leaf, where)
            if id(tensor) not in loaded:
                self._plan.add_missing(where)
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
            self._plan.add_missing(where, stateful=False)
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


class _MegatronMatcher:
    """Plans the objects of Megatron-Core of a state that has some: tensors by their keys, wherever they lie.

    Attributes:
        keys: the keys of the tensors that were matched.
    """

    def __init__(self, plan: LoadPlan) -> None:
        self._entries = plan.matching.entries
        self._options = plan.matching.names.options
        self._plan = plan
        self.keys: set[str] = set()

    @functools.cached_property
    def _saved(self) -> dict[str, str]:
        """The source's names of its tensors, by the names of the state and by themselves."""
        # Both: a rename may have given a tensor another name, and keys are the source's own.
        saved: dict[str, str] = {}
        for entry in self._entries:
            if isinstance(entry.leaf, SavedTensor):
                saved.setdefault(entry.text, entry.leaf.name)
                saved.setdefault(entry.leaf.name, entry.leaf.name)
        return saved

    def match(self, live: Leaf, path: str) -> None:
        """Plan an object: a tensor, what a factory builds of its parameter, or an object with data."""
        plan, kind = self._plan, sharded_kind(live)
        if kind == "tensor":
            self.keys.add(live.key)
            if not self._options.wants(live.key):
                return
            if live.key in self._saved:
                plan.targets.append(LoadTarget(self._saved[live.key], MegatronTensor(live), live.key))
            else:
                plan.add_missing(live.key)
        elif kind == "factory":
            # Built once: what is filled must be what is merged.
            built = live.build()
            is_whole = True
            for inner, part in leaves(built):
                if sharded_kind(part) == "tensor":
                    self.match(part, joined(path, inner))
                    is_whole = is_whole and part.key in self._saved
            # Without a part there is nothing to merge; the error names it.
            if is_whole:
                plan.callbacks.append(functools.partial(_merge_built, live, built))
        elif kind == "object":
            saved = self._entries.value(path, live.data)
            if saved is not ABSENT:
                for entry in self._entries.below(path):
                    plan.matched.add(entry.text)
                plan.callbacks.append(functools.partial(setattr, live, "data", self._plan.fill(saved, path)))
            elif live.data is not None:  # an object without data needs no saved one
                plan.add_missing(path)


def _merge_built(factory: Leaf, built: Leaf) -> None:
    """Merge the tensors that a factory built, now filled, into its parameter."""
    import torch

    with torch.no_grad():
        factory.data.copy_(factory.merge_fn(_with_data(built)))


def _with_data(built: Leaf) -> Leaf:
    """Return a tree with the data of ShardedTensors in their place."""
    if isinstance(built, Mapping):
        return {key: _with_data(item) for key, item in built.items()}
    if type(built) in (list, tuple):
        return type(built)(map(_with_data, built))
    return built.data if sharded_kind(built) == "tensor" else built
