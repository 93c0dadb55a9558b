"""All entries of a source by their texts: those of each rank, and what ranks saved differently."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from statexchange.errors import InvalidArgumentError, type_text
from statexchange.sharding.paths import Key, ListItem, TupleItem, joined, paths_above
from statexchange.state.containers import children, is_dataclass, with_children
from statexchange.state.entry import Entry
from statexchange.state.saved_values import SavedTensor, are_equal, has_no_leaves, is_empty_mapping
from statexchange.state.tree import contains

__all__ = ["ABSENT", "Conflicts", "Entries", "RankEntries", "flatten_tree"]

ABSENT: Any = object()  # where a source has nothing


Conflicts: TypeAlias = dict[str, tuple[int, int]]
"""Two ranks that saved different values, by the text of the path."""


@dataclass(slots=True)
class RankEntries:
    """The entries that one rank has saved; a source without ranks has one such record.

    Attributes:
        rank: the rank, or 0.
        entries: its entries.
        templates: namedtuples and dataclasses whose items are entries, by their paths.
        containers: the kind of each container whose items are entries, by its path: for a list and its like with the
            number of items, for a mapping of plain values in a list its keys. Those of two ranks that differ in it
            are not joined.
    """

    rank: int
    entries: list[Entry] = field(default_factory=list)
    templates: dict[str, Any] = field(default_factory=dict)
    containers: dict[str, object] = field(default_factory=dict)


def flatten_tree(tree: Any, found: RankEntries, base: Entry | None = None) -> None:
    """Add the entries of a decoded tree, in which a SavedTensor stands for each tensor, below those of `base`.

    Mappings are entered, and lists that have a tensor or a mapping in them. Any other list is one plain value.
    """
    begin = ((), "") if base is None else (base.keys, base.text)
    waiting: list[tuple[Any, tuple[Key, ...], str, bool]] = [(tree, *begin, False)]
    while waiting:
        value, keys, text, in_list = waiting.pop()
        inside = _entered(value)
        if inside is None:
            name = value.name if isinstance(value, SavedTensor) else text
            found.entries.append(Entry(text, keys, value, name if base is None else base.name))
            continue
        if isinstance(value, Mapping):
            found.containers[text] = frozenset(value) if in_list and not contains(value, _is_tensor) else "mapping"
        else:
            found.containers[text] = (type(value).__qualname__, len(inside))
            in_list = True
            if type(value) not in (list, tuple):
                found.templates[text] = value
        waiting += reversed([(item, (*keys, key), joined(text, key), in_list) for key, item in inside.items()])


def _is_tensor(value: Any) -> bool:
    return isinstance(value, SavedTensor)


def _is_entered_for(value: Any) -> bool:
    return isinstance(value, SavedTensor) or (isinstance(value, Mapping) and not is_dataclass(value))


def _entered(value: Any) -> dict[Any, Any] | None:
    """Return the items of a container that is entered, by their keys in a path; None for a leaf."""
    if isinstance(value, Mapping) and not is_dataclass(value):
        return dict(value) or None
    if children(value) is None or not contains(value, _is_entered_for):
        return None
    items = children(value) or {}
    if type(value) is list:
        return {ListItem(index): item for index, item in items.items()}
    return {TupleItem(index): item for index, item in items.items()} if type(value) is tuple else items


class Entries:
    """All entries of a source, by their texts.

    Ranks may have saved different ones. `ranks` come in the order of their claim, the first one's entry counts, and
    `conflicts` are the texts of plain values that differ. With `is_own` the first rank is this one, which takes nothing
    from others where it has a value itself. With `keys_are_texts` a key that is a text may have been a number.
    """

    def __init__(self, ranks: Sequence[RankEntries], *, is_own: bool = False, keys_are_texts: bool = False) -> None:
        self.ranks = ranks
        self.is_own = is_own
        self.keys_are_texts = keys_are_texts
        self.conflicts: Conflicts = {}
        self.templates: dict[str, Any] = {}
        self._by_text: dict[str, Entry] = {}  # in the order of the source
        self._alike: dict[str, list[Entry]] = {}  # those of a text that two paths have
        self._holders: dict[str, int] = {}  # the rank of each entry
        self._containers: dict[str, tuple[int, object]] = {}  # with the rank that has it
        for of_rank in ranks:
            others = self._others(of_rank)
            of_this_rank = {path: value for path, value in of_rank.templates.items() if path not in others}
            self.templates = of_this_rank | self.templates
            self._add(of_rank, others)
        self._texts = sorted(self._by_text)
        self._positions = dict(zip(self._by_text, range(len(self._by_text)), strict=True))

    def _others(self, of_rank: RankEntries) -> set[str]:
        """Return the paths of those containers of a rank that are something else on a rank before it.

        What is in them does not count. An empty mapping is no value, but one that has its items on other ranks.
        """
        others = set()
        for path, kind in of_rank.containers.items():
            rank, first = self._containers.setdefault(path, (of_rank.rank, kind))
            entry = self._by_text.get(path)
            if entry is not None and is_empty_mapping(entry.leaf) and kind == "mapping":
                del self._by_text[path]
            elif entry is not None or first != kind:
                self.conflicts.setdefault(path, (self._holders.get(path, rank), of_rank.rank))
                others.add(path)
        return others

    def _add(self, of_rank: RankEntries, others: set[str]) -> None:
        """Add the entries of a rank that no rank before it has, but those below the paths `others`."""
        present = {*self._by_text}
        for entry in of_rank.entries:
            text = entry.text
            if others and not others.isdisjoint(("", *paths_above(text))):
                continue
            rank, kind = self._containers.get(text, (of_rank.rank, None))
            if rank != of_rank.rank:
                if not (is_empty_mapping(entry.leaf) and kind == "mapping"):
                    self.conflicts.setdefault(text, (rank, of_rank.rank))
            elif text not in self._by_text:
                self._by_text[text] = entry
            elif text not in present:  # two paths of this rank
                self._alike.setdefault(text, [self._by_text[text]]).append(entry)
            elif not are_equal(entry.leaf, self._by_text[text].leaf):
                self.conflicts.setdefault(text, (self._holders[text], of_rank.rank))
        for text in self._by_text.keys() - present:
            self._holders[text] = of_rank.rank

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._by_text.values())

    @functools.cached_property
    def first(self) -> Entries:
        """The entries of the first rank."""
        return self if len(self.ranks) == 1 else Entries(self.ranks[:1], keys_are_texts=self.keys_are_texts)

    @functools.cached_property
    def of_each_rank(self) -> list[tuple[int, Entries]]:
        """The entries of each rank, with the rank."""
        others = [Entries([of_rank], keys_are_texts=self.keys_are_texts) for of_rank in self.ranks[1:]]
        return [(entries.ranks[0].rank, entries) for entries in (self.first, *others)]

    def at(self, text: str, keys: tuple[Key, ...] | None = None) -> Entry | None:
        """Return the entry at a path, for which the live state has these keys.

        Raises:
            InvalidArgumentError: there are several, and which one is meant is not known.
        """
        if text not in self._alike:
            return self._by_text.get(text)
        same = [entry for entry in self._alike[text] if entry.keys == keys] or self._alike[text]
        if not all(are_equal(entry.leaf, same[0].leaf) for entry in same):
            problem = "two entries of the source have this name when keys are joined with dots: leave it out by exclude"
            raise InvalidArgumentError(problem, name=text)
        return same[0]

    def has_below(self, path: str) -> bool:
        """Whether there is an entry at a path or below it."""
        begin, end = self._range(path)
        return begin < end or path in self._by_text

    def below(self, path: str) -> list[Entry]:
        """Return the entries at a path and below it, in the order of the source."""
        begin, end = self._range(path)
        texts = sorted(self._texts[begin:end], key=self._positions.__getitem__)
        if path and path in self._by_text:
            texts.insert(0, path)
        if not self._alike:
            return [self._by_text[text] for text in texts]
        return [entry for text in texts for entry in self._alike.get(text, [self._by_text[text]])]

    def _range(self, path: str) -> tuple[int, int]:
        """Return where the texts below a path begin and end among all, which are sorted."""
        if not path:
            return 0, len(self._texts)
        # "/" is the character after ".".
        return bisect.bisect_left(self._texts, f"{path}."), bisect.bisect_left(self._texts, f"{path}/")

    def value(
        self, path: str, live: Any, is_here: Callable[[Entry], bool] | None = None, *, is_whole: bool = True
    ) -> Any:
        """Return what the source has at a path, as one value with a SavedTensor for each tensor; ABSENT for nothing.

        It is that of the first rank that has something there. Keys that the source does not know are those of `live`,
        the value in the state. `is_here` returns whether an entry is meant for this place. If the value `is_whole`, a
        mapping that `live` has and the source does not may have been empty, which is an error.

        Raises:
            InvalidArgumentError: the keys or containers of the source are not known, and `live` does not show them.
        """
        entries = self.first if self.is_own and self.first.has_below(path) else self
        below = entries.below(path)
        if is_here is not None:
            below = list(filter(is_here, below))
        return entries.built(below, live, path, is_whole=is_whole) if below else ABSENT

    def built(self, entries: Sequence[Entry], live: Any, path: str, *, is_whole: bool = True) -> Any:
        """Return the value that entries at and below a path make, as `value` does."""
        if len(entries) == 1 and entries[0].text == path:
            return entries[0].leaf
        begin = len(path) + 1 if path else 0
        if not self.keys_are_texts and path not in self.templates:  # most are leaves of one mapping, under texts
            last_keys = [entry.keys[-1] for entry in entries if entry.keys and entry.text[begin:] == entry.keys[-1]]
            if len(last_keys) == len(entries):
                return {entry.keys[-1]: entry.leaf for entry in entries}
        return _ValueBuilder(self.templates, self.keys_are_texts, is_whole).value(entries, live, path)

    def by_key(self, path: str) -> dict[Any, list[Entry]] | None:
        """Return the entries below a path by their first key there; None if the source does not know the keys."""
        grouped: dict[Any, list[Entry]] = {}
        for entry in self.below(path):
            keys = entry.keys_below(path)
            if keys is None:
                return None
            if keys:
                grouped.setdefault(keys[0], []).append(entry)
        return grouped


class _ValueBuilder(NamedTuple):
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
            if inside or not all(are_equal(leaf, other) for other in others):
                text = (
                    "the source has several values here when keys are joined with dots: save with keys without dots, "
                    "or leave it out by exclude"
                )
                raise InvalidArgumentError(text, name=path)
            return leaf
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
