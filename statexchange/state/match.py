"""Match a live state with the entries of a source: each live path takes the entries of the same path."""

from __future__ import annotations

import bisect
import functools
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from statexchange import values
from statexchange.errors import InvalidArgumentError, NotFoundError, UnsupportedError, type_text
from statexchange.sharding.paths import Path, joined, paths_above, text_of
from statexchange.state.allocation import Place
from statexchange.state.entries import (
    ABSENT,
    Entries,
    Entry,
    SavedTensor,
    has_no_leaves,
    is_empty_mapping,
    refuse_opaque,
)
from statexchange.state.flatten import LiveEntry, LiveState, is_leaf, load_object
from statexchange.state.load_plan import Filler, LoadPlan, LoadTarget, expect, name_of, named
from statexchange.state.match_modules import match_module, prefixes_of_modules
from statexchange.state.match_optimizers import OptimizerMatcher
from statexchange.state.matching import Matching
from statexchange.state.megatron import MegatronTensor, leaves, sharded_kind
from statexchange.state.modules import live_items
from statexchange.state.name_filter import NameFilter
from statexchange.state.tree import (
    children,
    has_indices,
    is_dataclass,
    is_mutable,
    other_with,
    refill,
    walk,
    with_children,
)
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
        self._filler = Filler(self.plan, matching)
        self._taken: set[str] = set()  # paths of entries that the live state has a place for
        self._values = _ValueMatcher(live, self._filler, matching.names, has_tree=matching.has_tree)
        self._paths = _LivePaths(live)
        self._by_key = _ShardedTensors.of(live, entries)
        self._prefixes = prefixes_of_modules(live, entries, lambda name: matching.stored(name, ()) is not None)
        self.optimizers = OptimizerMatcher(live, entries, matching, self._filler, self._taken)

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
        expect(
            other is None or is_empty_mapping(other.leaf), "the tensors of a module", other and other.leaf, entry.text
        )
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
            expect(is_empty_mapping(entry.leaf), what, entry.leaf, path)

    def check_lists(self) -> None:
        """Raise InvalidArgumentError for a list that holds state and has another length than the source's."""
        for keys, live in self._live.containers.items():
            path = text_of(keys)
            if not has_indices(live) or path in self._prefixes.shared or self._by_key.live:
                continue
            is_here = functools.partial(self._paths.is_inside, path=path, keys=keys)
            below = [
                one
                for one in self._entries.below(path)
                if one.text != path and is_here(one) and self._options.wants(one.text)
            ]
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


class _ValueMatcher:
    """Selects what is loaded of plain values, and plans how it gets into the live state.

    Entries of mappings, and fields of dataclasses and namedtuples, are loaded or left by themselves; all else is loaded
    or left whole.
    """

    def __init__(self, live: LiveState, filler: Filler, names: NameFilter, *, has_tree: bool) -> None:
        self._live = live
        self._filler = filler
        self._names = names
        self._options = names.options
        self._has_tree = has_tree
        self._new_values: dict[tuple[Any, ...], Any] = {}

    def add(self, entry: LiveEntry, saved: Any) -> bool:
        """Plan a value that the source has; return whether anything of it is loaded."""
        path, live = entry.text, entry.value
        selected = saved
        if self._names.selects or not self._has_tree:
            selected = self._selected(saved, live, path)
        if selected is ABSENT:
            return False
        self._filler.plan.num_values += 1
        self._new_values[entry.keys] = self._replacement(live, self._filled(selected, live, path), path)
        return True

    def _filled(self, saved: Any, live: Any, path: str) -> Any:
        """Return a plain value in containers of the live types; a live mapping itself is refilled with the entries."""
        if isinstance(live, MutableMapping) and isinstance(saved, Mapping) and not is_dataclass(saved):
            return {
                key: self._filler.fill(item, joined(path, key), Place(live.get(key))) for key, item in saved.items()
            }
        return self._filler.fill(saved, path, Place(live))

    def _selected(self, saved: Any, live: Any, path: str) -> Any:
        """Return what is loaded of a plain value, with the live values of what is not; ABSENT for nothing."""
        fields = is_dataclass(saved) or hasattr(saved, "_fields")
        if isinstance(saved, Mapping) and saved and (isinstance(live, Mapping) or live is ABSENT):
            return self._selected_entries(saved, {} if live is ABSENT else live, path)
        if fields and type(saved) is type(live):
            own, new = children(live) or {}, children(saved) or {}
            selected = {key: self._selected(item, own.get(key, ABSENT), joined(path, key)) for key, item in new.items()}
            kept = {key: own[key] for key, item in selected.items() if item is ABSENT and key in own}
            return ABSENT if len(kept) == len(new) else other_with(saved, kept)
        inside = [(saved, path)] if live is ABSENT else [(saved, path), (live, path)]
        return saved if self.wants_whole(inside) else ABSENT

    def _selected_entries(self, saved: Mapping[Any, Any], live: Mapping[Any, Any], path: str) -> Any:
        selected: dict[Any, Any] = {}
        loads = False
        # A mapping of texts is filled entry by entry from others' files; without patterns a save replaces it.
        is_filled = bool(self._options.include) or (not self._has_tree and all(map(_is_text, live)))
        for key, item in live.items():
            inner = joined(path, key)
            if key in saved:
                new = self._selected(saved[key], item, inner)
                loads |= new is not ABSENT
                selected[key] = item if new is ABSENT else new
            elif not self.wants_whole([(item, inner)]):
                selected[key] = item
            elif is_filled and not has_no_leaves(item):
                self._filler.plan.add_missing([inner], stateful=False)
                selected[key] = item
        for key, item in saved.items():
            if key not in live and (new := self._selected(item, ABSENT, joined(path, key))) is not ABSENT:
                selected[key], loads = new, True
        return selected if loads else ABSENT

    def wants_whole(self, parts: Sequence[tuple[Any, str]]) -> bool:
        """Whether what has these values at these paths is loaded: if one path is included, and none is excluded."""
        if not self._names.selects:
            return True
        return self._options.wants_object([step.path for value, path in parts for step in walk(value, path=path)])

    def _replacement(self, live: Any, new: Any, path: str) -> Any:
        """Return what replaces a plain value: `live` itself if it is equal, or if a callback refills it."""
        if isinstance(live, MutableMapping) and isinstance(new, Mapping):
            if not values.is_same(dict(live), dict(new)):
                self._filler.change(live, functools.partial(refill, items=dict(new)), path)
            return live
        if values.is_same(live, new):
            return live
        if type(new) is type(live) and is_mutable(live) and not isinstance(live, list):  # a dataclass
            self._filler.change(live, functools.partial(with_children, changed=children(new) or {}), path)
            return live
        if children(live) is None and not values.has_text(live):
            text = f"the state has {type_text(live)} here, which a load would replace by {type_text(new)}: leave it out"
            raise UnsupportedError(f"{text} by exclude", name=path)
        return new

    def installed(self, live: Any, keys: tuple[Any, ...] = (), path: str = "") -> Any:
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
            self._filler.change(live, functools.partial(with_children, changed=changed), path)
            return live
        with named(path):
            return with_children(live, changed)


def _is_text(key: Any) -> bool:
    return isinstance(key, str)


class _LivePaths:
    """The paths of a live state; `alike` are the texts that two of them have, or that begin two of them.

    A text does not show its keys. In ``{"a": {"b": 1}, "a.b": 2}`` the text "a.b" is that of two paths, and in
    ``{1: x, "1": y}`` "1" is. Where the source knows its keys, they decide; else such a state is refused.
    """

    def __init__(self, live: LiveState) -> None:
        paths = {entry.keys[:count] for entry in live.entries for count in range(1, len(entry.keys) + 1)}
        counts = Counter(map(text_of, paths))
        self.alike = {text for text, count in counts.items() if count > 1}
        self._texts = sorted(entry.text for entry in live.entries)

    def check(self, entry: LiveEntry, entries: Entries) -> None:
        """Raise InvalidArgumentError for a path that looks like another, if it is not known which one is meant."""
        if not self.alike or self.alike.isdisjoint(paths_above(entry.text)):
            return
        below = entries.below(entry.text)
        is_known = all(text_of(one.keys) == one.text for one in below) and not entries.keys_are_texts
        if below and not (is_known and entry.kind in ("tensor", "value", "object")):
            text = f"two keys of the state look alike in {entry.text!r}: make both text"
            raise InvalidArgumentError(text, name=entry.text)

    def is_here(self, entry: LiveEntry) -> Callable[[Entry], bool] | None:
        """Return a function that tells whether an entry is that of a live path; None if its text shows that."""
        # "/" is the character after ".".
        begin, end = (bisect.bisect_left(self._texts, f"{entry.text}{mark}") for mark in "./")
        has_dots = any("." in str(key) for key in entry.keys)
        if begin == end and not has_dots and entry.text not in self.alike:
            return None
        others = self._texts[begin:end]
        return functools.partial(self.is_inside, path=entry.text, keys=entry.keys, others=others)

    def is_inside(self, entry: Entry, *, path: str, keys: Path, others: Sequence[str] = ()) -> bool:
        """Whether an entry is at or below the live path of these keys; `others` are the live texts below its own."""
        below = entry.keys_below(path)
        if below is None:
            is_known = len(text_of(entry.keys)) >= len(entry.text) - len(path)
            return not is_known and not any(entry.text == one or entry.text.startswith(f"{one}.") for one in others)
        above = entry.keys[: len(entry.keys) - len(below)]
        # As many keys as the source knows, from the last on. DCP has numbers as texts, unless that would not do.
        for known, key in zip(reversed(above), reversed(keys), strict=False):
            if known != key if path in self.alike else str(known) != str(key):
                return False
        return True
