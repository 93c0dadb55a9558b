"""Match a live state with the entries of a source: each live path takes the entries of the same path."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from statexchange.errors import InvalidArgumentError, NotFoundError, type_text
from statexchange.sharding.paths import joined, text_of
from statexchange.state.containers import (
    children,
    has_indices,
)
from statexchange.state.entries import ABSENT, Entries
from statexchange.state.entry import Entry
from statexchange.state.flatten import LiveEntry, LiveState
from statexchange.state.leaves import is_leaf, load_object
from statexchange.state.live_paths import LivePaths
from statexchange.state.load_plan import (
    Filler,
    LoadPlan,
    LoadTarget,
    Place,
    expect,
    name_of,
)
from statexchange.state.match_modules import match_module, prefixes_of_modules
from statexchange.state.match_optimizers import OptimizerMatcher
from statexchange.state.match_values import ValueMatcher
from statexchange.state.matching import Matching
from statexchange.state.megatron import MegatronTensor, leaves, sharded_kind
from statexchange.state.modules import live_items
from statexchange.state.saved_values import SavedTensor, has_no_leaves, refuse_opaque
from statexchange.state.tree import walk
from statexchange.units import format_number

__all__ = ["match"]


def match(state: Any, live: LiveState, entries: Entries, matching: Matching) -> LoadPlan:
    """Plan how a live state becomes that of the source. Not collective; nothing is changed yet.

    Raises:
        InvalidArgumentError: something cannot be changed in place, or was saved as another kind; names the path.
        UnsupportedError: a value has a type that the live state does not have; names the path.
    """
    matcher = _Matcher(state, live, entries, matching)
    for entry in live.entries:
        matcher.match(entry)
    matcher.check_containers()
    matcher.optimizers.check_shapes()
    matcher.optimizers.check_schedulers()
    matcher.check_lists()
    matcher.add_unexpected()
    if matcher.installed_values() is not state:
        text = f"the state is {type_text(state)}, which cannot be changed in place: give a mapping that holds it"
        raise InvalidArgumentError(text)
    return matcher.plan


class _Matcher:
    """Matches the live entries one after the other, and writes the plan."""

    def __init__(self, state: Any, live: LiveState, entries: Entries, matching: Matching) -> None:
        self.plan = LoadPlan()
        self._state = state
        self._live = live
        self._entries = entries
        self._matching = matching
        self._names = matching.names
        self._options = matching.names.options
        self._filler = Filler(self.plan, matching.allocate)
        self._taken: set[str] = set()  # paths of entries that the live state has a place for
        self._values = ValueMatcher(live, self._filler, matching.names, has_tree=matching.has_tree)
        self._paths = LivePaths(live)
        self._by_key = _ShardedTensors.of(live, entries)
        self._prefixes = prefixes_of_modules(live, entries, lambda name: matching.stored(name, ()) is not None)
        self.optimizers = OptimizerMatcher(state, entries, matching, self._filler, self._taken)

    def match(self, entry: LiveEntry) -> None:
        """Match one live entry."""
        self._paths.check(entry, self._entries)
        if entry.kind == "tensor":
            self._tensor(entry)
        elif entry.kind == "module":
            self._module(entry)
        elif entry.kind == "optimizer":
            self.optimizers.match(entry)
        elif entry.kind == "object":
            self._object(entry)
        elif entry.kind == "sharded":
            self._sharded(entry.value, entry.text)
        else:
            self._value(entry)

    def _module(self, entry: LiveEntry) -> None:
        prefix = self._prefixes.of(entry.text)
        if entry.text and not self._entries.has_below(prefix.removesuffix(".")):
            names = [joined(entry.text, name) for items in live_items(entry.value) for name in items]
            if any(map(self._options.wants, names)):
                self._add_missing(entry)
            return
        other = self._entries.at(entry.text, entry.keys) if entry.text else None
        expect(other is None or _is_empty(other.leaf), "the tensors of a module", other and other.leaf, entry.text)
        if other is not None:
            self._taken.add(entry.text)
        match_module(entry, prefix, self._entries, self._matching, self._filler, self._taken)

    # Tensors

    def _tensor(self, entry: LiveEntry) -> None:
        if not self._options.wants(entry.text):
            return
        stored = self._matching.stored(entry.text, entry.keys)
        if stored is not None and entry.text in self._paths.alike and any(one.keys != entry.keys for one in stored):
            stored = None
        elif stored is None:
            other = self._entries.at(entry.text, entry.keys)
            below = other is None and self._entries.has_below(entry.text)
            expect(other is None and not below, "a tensor", {} if other is None else other.leaf, entry.text)
        if stored is None:
            self._add_missing(entry)
            return
        self._taken.update(one.text for one in stored)
        self.plan.add_loaded(stored)
        self.plan.targets.append(LoadTarget(name_of(stored), entry.value, entry.text))

    def _sharded(self, live: Any, path: str) -> None:
        """Plan an object of Megatron-Core: match tensors by key; merge what a factory builds into its parameter."""
        kind = sharded_kind(live)
        if kind == "tensor" and self._options.wants(live.key):
            if live.key in self._by_key.saved:
                self.plan.targets.append(LoadTarget(self._by_key.saved[live.key], MegatronTensor(live), live.key))
            else:
                self.plan.add_missing([live.key])
        elif kind == "factory":
            built = live.build()
            parts = [(inner, part) for inner, part in leaves(built) if sharded_kind(part) == "tensor"]
            for inner, part in parts:
                self._sharded(part, joined(path, inner))
            if all(part.key in self._by_key.saved for _, part in parts):
                self.plan.callbacks.append(functools.partial(_merge_built, live, built))
        elif kind == "object":
            saved = self._entries.value(path, live.data)
            if saved is ABSENT:
                if live.data is not None:  # an object without data needs no saved one
                    self.plan.add_missing([path])
                return
            self._taken.update(one.text for one in self._entries.below(path))
            self.plan.callbacks.append(functools.partial(setattr, live, "data", self._filler.fill(saved, path)))

    # Objects and values

    def _object(self, entry: LiveEntry) -> None:
        """Plan an object that has `load_state_dict`, which is loaded or left whole."""
        path, live = entry.text, entry.value
        if not self._entries.has_below(path):
            if self._may_want(entry):
                present = self._matching.objects.of(live, path)
                # A DCP leaves out what is empty, as the state of a GradScaler that is not enabled.
                is_left_out = self._entries.keys_are_texts and has_no_leaves(present)
                if self._wants_any(present, path) and not is_left_out:
                    self._add_missing(entry)
            return
        if self._names.selects and path and not self._options.may_want(path):
            self._take_unloaded(entry)
            return
        present = self._matching.objects.of(live, path)
        saved = self._entries.value(path, present, self._paths.is_here(entry))
        if self._names.selects and not self._values.wants_whole([(saved, path), (present, path)]):
            self._take_unloaded(entry)
            return
        expect(isinstance(saved, Mapping), f"the state of {type_text(live)}", saved, path)
        if not path and present and saved.keys().isdisjoint(present):  # of something else
            text = (
                f"the source has nothing for the state, {type_text(live)}: give a state with the source's names, or a "
                "mapping that has it under its name in the source"
            )
            raise NotFoundError(text)
        self._take(entry)
        new = self._filler.fill(saved, path, Place(present, is_filled=False))
        self.optimizers.add_scheduler(entry)
        self.plan.callbacks.append(functools.partial(load_object, live, live.load_state_dict, new, path))

    def _value(self, entry: LiveEntry) -> None:
        """Plan a plain value, or a container of such values."""
        path, live = entry.text, entry.value
        if not path:  # the whole state, into which a load with patterns may put nothing
            self.plan.num_values += 1
        if not self._may_want(entry) or self._selects_nothing_in(entry):
            self._take_unloaded(entry)
            return
        saved = self._entries.value(path, live, self._paths.is_here(entry), is_whole=False)
        if saved is ABSENT:
            may_be_empty = self._entries.keys_are_texts or not path
            if self._wants_any(live, path) and not (may_be_empty and has_no_leaves(live)):
                self._add_missing(entry)
            return
        if self._values.add(entry, saved):
            self._take(entry)
        else:
            self._take_unloaded(entry)

    def _selects_nothing_in(self, entry: LiveEntry) -> bool:
        """Whether the source has something for a plain value, and neither that nor the live value is selected."""
        if not self._names.selects or not (below := self._below(entry)) or any(map(self._wants_entry, below)):
            return False
        return not self._wants_any(entry.value, entry.text)

    def _wants_any(self, value: Any, path: str) -> bool:
        """Whether anything in a value at a path is selected."""
        return not self._names.selects or any(self._options.wants(step.path) for step in walk(value, path=path))

    def _wants_entry(self, entry: Entry) -> bool:
        if not self._names.selects or isinstance(entry.leaf, SavedTensor):
            return self._options.wants(entry.text)
        return self._values.wants_whole([(entry.leaf, entry.text)])

    def _may_want(self, entry: LiveEntry) -> bool:
        """Whether a live entry, or anything inside it, is to be loaded."""
        if not self._names.selects or not entry.text:
            return True
        has_inside = children(entry.value) is not None or (is_leaf(entry.value) and entry.kind != "tensor")
        return self._options.may_want(entry.text) if has_inside else self._options.wants(entry.text)

    def installed_values(self) -> Any:
        """Plan the changes of the containers that hold plain values; return what replaces the whole state."""
        return self._values.installed(self._state)

    # What one side lacks

    def _below(self, entry: LiveEntry) -> list[Entry]:
        """Return the entries that are meant for a live path."""
        is_here = self._paths.is_here(entry)
        return [one for one in self._entries.below(entry.text) if is_here is None or is_here(one)]

    def _take(self, entry: LiveEntry) -> None:
        """Note that all entries of a live path are loaded."""
        below = self._below(entry)
        self._taken.update(one.text for one in below)
        self.plan.add_loaded(one for one in below if not self._names.selects or self._options.wants(one.text))

    def _take_unloaded(self, entry: LiveEntry) -> None:
        self._taken.update(one.text for one in self._below(entry))

    def _add_missing(self, entry: LiveEntry) -> None:
        """Add the highest path above a live entry below which the source has nothing."""
        above = [text_of(entry.keys[:count]) for count in range(1, len(entry.keys))]
        path = next((path for path in above if not self._entries.has_below(path)), entry.text)
        if path not in self.plan.missing:
            self.plan.add_missing([path], stateful=entry.kind != "value")
        elif entry.kind != "value":
            self.plan.stateful.add(path)

    def check_containers(self) -> None:
        """Raise for a live container of which the source has something else under its name."""
        for keys in self._live.containers:
            path = text_of(keys)
            entry = self._entries.at(path, keys) if path else None
            if entry is None or path in self._taken or not self._wants_entry(entry):
                continue
            refuse_opaque(entry.leaf, path)
            what = "a list" if has_indices(self._live.containers[keys]) else "a mapping"
            expect(_is_empty(entry.leaf), what, entry.leaf, path)

    def check_lists(self) -> None:
        """Raise InvalidArgumentError for a list that holds state and has another length than the source's."""
        for keys, live in self._live.containers.items():
            path = text_of(keys)
            if not has_indices(live) or path in self._prefixes.shared or self._by_key.live:
                continue
            is_here = functools.partial(self._paths.is_inside, path=path, keys=keys)
            below = [one for one in self._entries.below(path) if one.text != path and is_here(one)]
            below = list(filter(self._wants_item, below))
            begin = len(path) + 1 if path else 0
            indices = {one.text[begin:].partition(".")[0] for one in below}
            live_indices = [str(index) for index in range(len(live))]
            lacking = [index for index in live_indices if joined(path, index) in self.plan.missing]
            others = sorted(indices.difference(live_indices))
            if indices and (lacking or others):
                more = f"has {joined(path, others[0])!r} besides" if others else f"lacks {joined(path, lacking[0])!r}"
                text = (
                    f"the state has {format_number(len(live), 'item')} here, and the source {more}: make the list as "
                    "it was saved, or leave it out by exclude"
                )
                raise InvalidArgumentError(text, name=path)

    def _wants_item(self, entry: Entry) -> bool:
        return not self._names.selects or self._options.wants(entry.text)

    def add_unexpected(self) -> None:
        """Add what the source has, and the live state has no place for, by the highest such path."""
        places = {text_of(entry.keys[:count]) for entry in self._live.entries for count in range(len(entry.keys) + 1)}
        not_plain: set[str] = set()
        known = set(self._by_key.saved)
        found: dict[str, None] = {}
        for entry in self._entries:
            if entry.text in self._taken or entry.is_alias or not self._wants_entry(entry):
                continue
            if self._by_key.live and (entry.leaf is None or entry.name in known or entry.text in known):
                if entry.leaf is not None and entry.name not in self._by_key.live:
                    found.setdefault(entry.name)
                continue
            path = entry.text
            if text_of(entry.keys) == entry.text:  # else some of its keys are not known
                above = (text_of(entry.keys[:count]) for count in range(1, len(entry.keys)))
                path = next((path for path in above if path not in places), path)
            found.setdefault(path)
            if isinstance(entry.leaf, SavedTensor) or self._matching.has_tree:
                not_plain.add(path)
        self.plan.unexpected += [path for path in found if path not in self.plan.unexpected]
        self.plan.tolerated.update(found.keys() - not_plain)


@dataclass(frozen=True, slots=True)
class _ShardedTensors:
    """ShardedTensors of Megatron-Core, which are matched by key wherever in the state they lie.

    `live` are the keys of the live state; `saved` has the source's names by the names of the state, or nothing if
    `live` is empty.
    """

    live: frozenset[str]
    saved: Mapping[str, str]

    @classmethod
    def of(cls, live: LiveState, entries: Entries) -> _ShardedTensors:
        """Collect the keys of a live state, and the tensors of a source."""
        sharded = [entry.value for entry in live.entries if entry.kind == "sharded"]
        if not sharded:
            return cls(frozenset(), {})
        parts = [leaf for value in sharded for _, leaf in leaves(value) if sharded_kind(leaf) == "tensor"]
        saved: dict[str, str] = {}
        for entry in entries:
            if isinstance(entry.leaf, SavedTensor):
                saved.setdefault(entry.text, entry.leaf.name)
                saved.setdefault(entry.leaf.name, entry.leaf.name)
        return cls(frozenset(part.key for part in parts), saved)


def _is_empty(value: Any) -> bool:
    return isinstance(value, Mapping) and not value


def _merge_built(factory: Any, built: Any) -> None:
    """Merge the tensors that a factory built, now filled, into its parameter."""
    import torch

    with torch.no_grad():
        factory.data.copy_(factory.merge_fn(_with_data(built)))


def _with_data(built: Any) -> Any:
    """Return a tree with the data of ShardedTensors in their place."""
    if isinstance(built, Mapping):
        return {key: _with_data(item) for key, item in built.items()}
    if type(built) in (list, tuple):
        return type(built)(map(_with_data, built))
    return built.data if sharded_kind(built) == "tensor" else built
