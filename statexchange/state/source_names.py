"""Look up the entries of a source without a saved tree, and rebuild containers from their names."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from statexchange import values
from statexchange.errors import InvalidArgumentError, UnsupportedError, type_text
from statexchange.sharding.options import LoadOptions
from statexchange.state.merged_trees import SavedTensor
from statexchange.state.tree import contains

__all__ = [
    "Entries",
    "SourceNames",
    "by_first",
    "by_number",
    "dotted_siblings",
    "has_no_leaves",
    "is_index",
    "is_text",
    "names_above",
]

_NO_ITEM = object()  # where a live list has fewer items than the source
_MAX_DIGITS = 19  # of an index; Python refuses to convert texts of more than 4,300


def _same(name: str) -> str:
    return name


@dataclass(frozen=True, slots=True)
class SourceNames:
    """The names and plain values of a source, by the names of the state.

    Attributes:
        has: whether it has a tensor of a name.
        options: what the load wants.
        tensors: the names of the tensors.
        texts: plain values by name, as JSON text of `values`.
        opaque: descriptions, by name, of the entries that are neither.
        shape_of: returns the global shape of a tensor, by which numbered parameters are checked; None for no check.
        renamed: returns the state's name of one of the source.
        leaves_out_empty: whether it has values, but no entries for empty mappings.
        writes_empty: whether it has entries for all empty containers.
        old_names: the source's own names by those of the state.
    """

    has: Callable[[str], bool]
    options: LoadOptions = field(default_factory=LoadOptions)
    tensors: Collection[str] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    opaque: Mapping[str, str] = field(default_factory=dict)
    shape_of: Callable[[str], tuple[int, ...] | None] = lambda _: None
    renamed: Callable[[str], str] = _same
    leaves_out_empty: bool = False
    writes_empty: bool = False
    old_names: Mapping[str, str] = field(default_factory=dict)


class Entries:
    """The entries of a source, in the order of their names.

    Entries with a common beginning, ``prefix``, are a mapping: from the rest of each name to the whole name.

    Attributes:
        taken: the names of plain values that were read; callers may add others.
    """

    def __init__(self, source: SourceNames) -> None:
        self.taken: set[str] = set()
        self._source = source
        self._names = sorted({*source.tensors, *source.texts, *source.opaque})
        self._decoded: dict[str, Any] = {}
        self._hidden: set[str] = set()

    def below(self, prefix: str) -> dict[str, str]:
        """Return the entries whose names begin with `prefix`."""
        begin = end = bisect.bisect_left(self._names, prefix)
        while end < len(self._names) and self._names[end].startswith(prefix):
            end += 1
        return {name[len(prefix) :]: name for name in self._names[begin:end] if not self._is_hidden(name)}

    @contextmanager
    def hiding(self, names: Iterable[str]) -> Iterator[None]:
        """Leave out the entries of these names, and those inside them.

        If a mapping has "a" and "a.b", the entries of "a.b" are not those of a "b" inside "a".
        """
        outer, self._hidden = self._hidden, self._hidden.union(names)
        try:
            yield
        finally:
            self._hidden = outer

    def _is_hidden(self, name: str) -> bool:
        return bool(self._hidden) and not self._hidden.isdisjoint(names_above(name, ""))

    def has_value(self, name: str) -> bool:
        """Whether the source has something other than a tensor under a name.

        Raises:
            InvalidArgumentError: the source has entries inside this name, too, so that a key has a dot.
        """
        if (name not in self._source.texts and name not in self._source.opaque) or self._is_hidden(name):
            return False
        inside = self.below(f"{name}.")
        if inside:
            text = (
                f"the source has a value here, and {min(inside.values())!r} besides, so that one key has a dot, and "
                "which is not known: save with keys without dots, or leave it out by exclude"
            )
            raise InvalidArgumentError(text, name=name)
        return True

    def value(self, name: str) -> Any:
        """Return the plain value or the tensor of a name.

        Raises:
            UnsupportedError: the source has something else there.
        """
        if name in self._source.texts:
            self.taken.add(name)
            text = self._source.texts[name]
            if text[0] in "[{":
                return values.decode(text)
            if text not in self._decoded:  # flattened groups repeat the same few values for each parameter
                self._decoded[text] = values.decode(text)
            return self._decoded[text]
        if name in self._source.opaque:
            text = self._source.opaque[name]
            raise UnsupportedError(
                f"the source has something here that is neither a tensor nor a plain value: {text}. Load "
                "what holds it with the program that wrote it, and leave it out of the state here",
                name=name,
            )
        return SavedTensor(name)

    def container(self, entries: Mapping[str, str], own: Any, name: str) -> Any:
        """Return the container that was saved as `entries`, by the keys of the live one `own` in the same place.

        The names do not show what it was: "a.0" may be an item of a list or an entry under a number, a text or a key
        with a dot. So the live container decides, and what it cannot decide is refused.
        """
        if isinstance(own, list | tuple):
            items = self._items(entries, own, name)
            if items is not None:
                return items if isinstance(own, list) else tuple(items)
        elif isinstance(own, Mapping):
            keys = {str(key): key for key in own}
            if len(keys) < len(own):
                raise InvalidArgumentError("two keys of the mapping here look alike: make both text", name=name)
            matched = _by_key(entries, keys)
            found_entries = {}
            for text, key in keys.items():
                if text in matched:
                    found_entries[key] = self.item(matched[text], own[key], f"{name}.{text}")
                elif self._may_be_empty(own[key], f"{name}.{text}"):
                    found_entries[key] = own[key]
            taken = {
                rest for text, below in matched.items() for rest in (f"{text}.{one}" if one else text for one in below)
            }
            others = {rest: entry for rest, entry in entries.items() if rest not in taken}
            if all(map(is_text, others)):
                return found_entries | {rest: self.value(entry) for rest, entry in others.items()}
        example = next(iter(entries.values()))
        has = "no item" if own is _NO_ITEM else "None" if own is None else type_text(own)
        if isinstance(own, Mapping | list | tuple):
            has += " without their keys"
        hint = " (an optimizer has its containers once it has taken a step)" if own == {} else ""
        raise InvalidArgumentError(
            f"the source has entries here, as {example!r}, and the state has {has} to put them into: make it as it "
            f"was saved{hint}, or leave it out by exclude",
            name=name,
        )

    def _items(self, entries: Mapping[str, str], own: Sequence[Any], name: str) -> list[Any] | None:
        """Return the items of a list whose live one is `own`; None if the entries are not those of a list."""
        by_index = by_first(entries)
        if not all(map(is_index, by_index)):
            return None
        items: list[Any] = []
        for i in range(1 + max(map(int, by_index))) if len(by_index) > len(own) else range(len(own)):
            live = own[i] if i < len(own) else _NO_ITEM
            if str(i) in by_index:
                items.append(self.item(by_index.pop(str(i)), live, f"{name}.{i}"))
            elif self._may_be_empty(live, f"{name}.{i}"):
                items.append(live)
            else:
                break
        return None if by_index else items

    def _may_be_empty(self, own: Any, name: str) -> bool:
        """Whether the source may have what the state has at `name`, although it has no entry there.

        Raise InvalidArgumentError if the source may have an empty mapping there, and the state has none.
        """
        if has_no_leaves(own):
            return not self._source.writes_empty
        if self._source.leaves_out_empty and contains(own, lambda part: isinstance(part, Mapping)):
            text = (
                "the source has nothing here, as torch leaves out empty mappings: empty that of the state, or leave it "
                "out by exclude"
            )
            raise InvalidArgumentError(text, name=name)
        return False

    def item(self, entries: Mapping[str, str], own: Any, name: str) -> Any:
        """Return an item of a container: a value, if its name ends here, or another container."""
        return self.value(entries[""]) if [*entries] == [""] else self.container(entries, own, name)


def dotted_siblings(names: Iterable[str], start: int) -> dict[str, set[str]]:
    """Return, for a name of a mapping's entry, the other names that seem to be inside it: "a.b" for "a".

    `start` is the number of characters that are the mapping's own name.
    """
    known = {*names}
    found: dict[str, set[str]] = {}
    for name in known:
        end = name.rfind(".", start)
        while end > start:
            if name[:end] in known:
                found.setdefault(name[:end], set()).add(name)
            end = name.rfind(".", start, end)
    return found


def names_above(name: str, prefix: str) -> list[str]:
    """Return a name and all its beginnings, at dots, that are longer than `prefix`, and `prefix`."""
    found = [prefix]
    end = len(prefix)
    while (end := name.find(".", end + 1)) >= 0:
        found.append(name[:end])
    return [*found, name]


def has_no_leaves(value: Any) -> bool:
    """Whether a value is an empty mapping, or holds nothing else."""
    if isinstance(value, Mapping):
        return all(map(has_no_leaves, value.values()))
    return isinstance(value, list) and len(value) > 0 and all(map(has_no_leaves, value))


def is_text(key: str) -> bool:
    """Whether a key in a name was a text, and no number, None or True, or several keys with dots between them."""
    return key.isidentifier() and key not in ("True", "False", "None", "inf", "nan")


def _by_key(entries: Mapping[str, str], keys: Collection[str]) -> dict[str, dict[str, str]]:
    """Group entries by the key that begins their names, the longest of several; the rest of a name may be ""."""
    found: dict[str, dict[str, str]] = {}
    for name, entry in entries.items():
        key = name
        while key not in keys and "." in key:
            key = key.rpartition(".")[0]
        if key in keys:
            found.setdefault(key, {})[name[len(key) + 1 :]] = entry
    return {key: found[key] for key in keys if key in found}


def by_first(entries: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Group entries by the first part of their names; the rest of a name may be ""."""
    found: dict[str, dict[str, str]] = {}
    for name, entry in entries.items():
        first, _, rest = name.partition(".")
        found.setdefault(first, {})[rest] = entry
    return found


def by_number(groups: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Group entries of numbered param groups by the number, in the order of the numbers."""
    found = {number: group for number, group in by_first(groups).items() if is_index(number)}
    return dict(sorted(found.items(), key=lambda item: int(item[0])))


def is_index(text: str) -> bool:
    """Whether a part of a name is an index as Python writes it, and short enough to be one."""
    return len(text) < _MAX_DIGITS and text.isdecimal() and str(int(text)) == text
