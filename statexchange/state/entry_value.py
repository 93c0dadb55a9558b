"""Build a value from the entries of a source, with the live value to decide what the source does not know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from statexchange.errors import InvalidArgumentError, type_text
from statexchange.sharding.paths import Key, ListItem, TupleItem
from statexchange.state.containers import children, with_children
from statexchange.state.entry import Entry
from statexchange.state.saved_values import are_equal, has_no_leaves
from statexchange.state.tree import contains

__all__ = ["ValueBuilder"]


class ValueBuilder(NamedTuple):
    """Builds values, container by container, by what a source knows of the keys and containers of its entries.

    Attributes:
        templates: namedtuples and dataclasses whose items are entries, by their paths.
        keys_are_texts: whether a key that is a text may have been a number, as in a DCP, which has no empty mappings.
        is_whole: whether a mapping that the live value has, and such a source not, is an error: it may have been empty.
    """

    templates: Mapping[str, Any]
    keys_are_texts: bool
    is_whole: bool

    def value(self, entries: Sequence[Entry], live: Any, path: str) -> Any:
        """Return the value that the entries at and below a path make, with a SavedTensor for each tensor.

        Keys and containers that the source does not know are those of `live`, the value in the state.

        Raises:
            InvalidArgumentError: `live` does not show them either, or the entries contradict each other.
        """
        inside = [entry for entry in entries if entry.text != path]
        if len(inside) < len(entries):
            leaf, *others = [entry.leaf for entry in entries if entry.text == path]
            is_one = all(are_equal(leaf, other) for other in others)
            if not inside and is_one:
                return leaf
            if not is_one or not (isinstance(leaf, Mapping) and not leaf):  # else it is empty on one rank
                text = (
                    "the source has several values here when keys are joined with dots: save with keys without dots, "
                    "or leave it out by exclude"
                )
                raise InvalidArgumentError(text, name=path)
        live_items = children(live) or {}
        if isinstance(live, tuple):  # torch's files have the items of a namedtuple by index
            live_items = {TupleItem(index): item for index, item in enumerate(live)}
        items = {}
        for key, of_key in self._by_key(inside, live_items, live, path).items():
            inner = f"{path}.{key}" if path else str(key)
            is_leaf = len(of_key) == 1 and of_key[0].text == inner
            items[key] = of_key[0].leaf if is_leaf else self.value(of_key, live_items.get(key), inner)
        if self.keys_are_texts:
            items |= self._empty(live_items, items, live, path)
        return self._container(items, live, path)

    def _by_key(
        self, entries: Sequence[Entry], live_items: Mapping[Any, Any], live: Any, path: str
    ) -> dict[Any, list[Entry]]:
        """Group entries by their first key below `path`."""
        grouped: dict[Any, list[Entry]] = {}
        by_text: dict[str, list[Any]] = {}
        for key in live_items:
            by_text.setdefault(str(key), []).append(key)
        for entry in entries:
            keys = entry.keys_below(path)
            if keys is None:  # a name alone, or one that was renamed
                key = _key_of_name(entry.text[len(path) + 1 :] if path else entry.text, by_text)
            else:
                key = self._live_key(keys[0], by_text, live) if self.keys_are_texts else keys[0]
            grouped.setdefault(key, []).append(entry)
        return grouped

    def _live_key(self, key: Key, by_text: Mapping[str, Sequence[Any]], live: Any) -> Any:
        """Return the live state's key for one of the source, which may have been a number; else the source's own."""
        if isinstance(key, int):
            return key
        alike = by_text.get(str(key), ())
        if len(alike) == 1 and not isinstance(live, list | tuple):
            return alike[0]
        if alike or not _is_certain(str(key)):
            return _Unknown(str(key))
        return key

    def _empty(self, live_items: Mapping[Any, Any], items: Mapping[Any, Any], live: Any, path: str) -> dict[Any, Any]:
        """Return the items of a live container that the source may have had without an entry: empty mappings."""
        empty = {}
        for key, item in live_items.items():
            if key in items:
                continue
            if has_no_leaves(item):
                empty[ListItem(key) if isinstance(live, list) else key] = item
            elif self.is_whole and contains(item, lambda part: isinstance(part, Mapping)):
                text = (
                    "the source has nothing here, as torch leaves out empty mappings: empty that of the state, or "
                    "leave it out by exclude"
                )
                raise InvalidArgumentError(text, name=f"{path}.{key}")
        return empty

    def _container(self, items: dict[Any, Any], live: Any, path: str) -> Any:
        """Return a container of these items: of the type that the source knows, or else of the live one's kind."""
        unknown = [key for key in items if isinstance(key, _Unknown)]
        if unknown:
            has = "None" if live is None else type_text(live)
            text = (
                f"the source has an entry {unknown[0].text!r} here, and what kind of key that is is not known; the "
                f"state has {has} to put it into: make it as it was saved, or leave it out by exclude"
            )
            raise InvalidArgumentError(text, name=path)
        if path in self.templates:
            return with_children(self.templates[path], items)
        if not all(isinstance(key, ListItem | TupleItem) for key in items):
            return items
        if self.keys_are_texts:
            self._check_length(items, live, path)
        if sorted(items) != [*range(len(items))]:
            text = "the source lacks an item of this list: make it as it was saved, or leave it out by exclude"
            raise InvalidArgumentError(text, name=path)
        ordered = [items[key] for key in sorted(items)]
        is_tuple = any(isinstance(key, TupleItem) for key in items) or isinstance(live, tuple)
        return tuple(ordered) if is_tuple else ordered

    def _check_length(self, items: Mapping[Any, Any], live: Any, path: str) -> None:
        """Raise InvalidArgumentError for a list of which a DCP may have left out the last items: empty mappings."""
        others = live[len(items) :] if isinstance(live, list | tuple) else ()
        is_as_long = isinstance(live, list | tuple) and len(live) == len(items)
        if not is_as_long and any(isinstance(item, Mapping) for item in (*items.values(), *others)):
            text = (
                f"the source has {len(items)} items here, and empty ones at its end would have no entry: make the list "
                "as long as it was saved, or leave it out by exclude"
            )
            raise InvalidArgumentError(text, name=path)


@dataclass(frozen=True)
class _Unknown:
    """A key of which the text is known alone."""

    text: str

    def __str__(self) -> str:
        return self.text


def _key_of_name(rest: str, by_text: Mapping[str, Sequence[Any]]) -> Any:
    """Return the live key that begins the rest of a name, the longest of several; else the rest, if that is a key."""
    text = rest
    while text not in by_text and "." in text:
        text = text.rpartition(".")[0]
    if len(by_text.get(text, ())) == 1:
        return by_text[text][0]
    return rest if _is_certain(rest) else _Unknown(rest)


def _is_certain(text: str) -> bool:
    """Whether a key in a name was a text, and no number, None or True, or several keys with dots between them."""
    return text.isidentifier() and text not in ("True", "False", "None", "inf", "nan")
