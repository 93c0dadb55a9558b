"""Match the plain values of a live state with those of a source, and put them into the live containers."""

from __future__ import annotations

import functools
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from statexchange import values
from statexchange.errors import UnsupportedError, type_text
from statexchange.sharding.paths import joined
from statexchange.state.containers import children, is_dataclass, is_mutable, other_with, refill, with_children
from statexchange.state.entries import ABSENT
from statexchange.state.flatten import LiveEntry, LiveState
from statexchange.state.load_plan import Filler, Place, named
from statexchange.state.name_filter import NameFilter
from statexchange.state.saved_values import has_no_leaves
from statexchange.state.tree import walk

__all__ = ["ValueMatcher"]


class ValueMatcher:
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
