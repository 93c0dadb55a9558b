"""Tell the entries of one live path from those of another whose text is the same, or begins so.

A text does not show its keys. In ``{"a": {"b": 1}, "a.b": 2}`` the text "a.b" is that of two paths, and in
``{1: x, "1": y}`` "1" is. Where the source knows its keys, they decide; else such a state is refused.
"""

from __future__ import annotations

import bisect
import functools
from collections import Counter
from collections.abc import Callable, Sequence

from statexchange.errors import InvalidArgumentError
from statexchange.sharding.paths import Path, paths_above, text_of
from statexchange.state.entries import Entries
from statexchange.state.entry import Entry
from statexchange.state.flatten import LiveEntry, LiveState

__all__ = ["LivePaths"]


class LivePaths:
    """The paths of a live state; `alike` are the texts that two of them have."""

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
        """Return what tells whether an entry of the source is that of a live path; None if its text shows that."""
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
