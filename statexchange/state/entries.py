"""The entries of a source: what it has at each path, whatever its format.

A source of tensors alone has names: their keys are not known. A torch.distributed.checkpoint knows keys as texts, other
files of torch and our own saves know them as they were. So each entry has a text, by which it is paired with the live
state, and as many of its last keys as the source knows.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from statexchange import values
from statexchange.errors import InvalidArgumentError, UnsupportedError, type_text
from statexchange.sharding.paths import Key, ListItem, TupleItem, is_index, joined, paths_above
from statexchange.state.containers import children, is_dataclass, with_children
from statexchange.state.tree import contains

__all__ = [
    "ABSENT",
    "Conflicts",
    "Entries",
    "Entry",
    "OpaqueValue",
    "RankEntries",
    "SavedTensor",
    "UnknownValue",
    "are_equal",
    "flatten_tree",
    "has_no_leaves",
    "refuse_opaque",
]

ABSENT: Any = object()  # where a source has nothing


class SavedTensor:
    """The place of a tensor that the source has under this name of its own."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class OpaqueValue:
    """Something in a source that is neither a tensor nor a plain value, with its description."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


class UnknownValue:
    """A value of a type that nothing in the live state has, with its JSON text.

    `problem` is why its type cannot have the value; "" if nothing in the live state has the type.
    """

    __slots__ = ("problem", "text", "type_name")

    def __init__(self, type_name: str, text: str, problem: str) -> None:
        self.type_name = type_name
        self.text = text
        self.problem = problem

    def __repr__(self) -> str:
        return f"<{self.type_name}>"


class Entry(NamedTuple):
    """What a source has at one path.

    Attributes:
        text: the path as text, by the names of the state.
        keys: the last keys of the path, as many as the source knows.
        leaf: a SavedTensor, an OpaqueValue, or a plain value without a mapping that has entries.
        name: what the source itself calls it.
        is_alias: whether it is another name of a tensor that the source has under its own.
    """

    text: str
    keys: tuple[Key, ...]
    leaf: Any
    name: str
    is_alias: bool = False

    def keys_below(self, path: str) -> tuple[Key, ...] | None:
        """Return the keys that lead from the container at `path` here; None if the source does not know them all."""
        rest = len(self.text) - len(path) - 1 if path else len(self.text)
        count, length = 0, -1
        while length < rest and count < len(self.keys):
            count += 1
            length += len(str(self.keys[-count])) + 1
        if length != rest:
            return None
        return self.keys[len(self.keys) - count :]


Conflicts: TypeAlias = dict[str, tuple[int, int]]
"""Two ranks that saved different values, by the text of the path."""


@dataclass(slots=True)
class RankEntries:
    """What one rank has saved; a source without ranks has one such record.

    Attributes:
        rank: the rank, or 0.
        entries: its entries.
        templates: namedtuples and dataclasses whose items are entries, by their paths.
        sizes: the number of items of lists whose items are entries, and the keys of mappings of plain values in such
            lists: values of two ranks that differ in them are not joined.
    """

    rank: int
    entries: list[Entry] = field(default_factory=list)
    templates: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, object] = field(default_factory=dict)


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
        if isinstance(value, list):
            found.sizes[text] = len(value)
            in_list = True
        elif in_list and isinstance(value, Mapping) and not contains(value, _is_tensor):
            found.sizes[text] = frozenset(value)
        elif not isinstance(value, Mapping) and type(value) is not tuple:
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
        sizes: dict[str, tuple[int, object]] = {}
        for of_rank in ranks:
            # The items of a list of another length, and what is in a mapping of other keys there, do not count.
            others: set[str] = set()
            for path, size in of_rank.sizes.items():
                rank, first = sizes.setdefault(path, (of_rank.rank, size))
                if first != size:
                    self.conflicts.setdefault(path, (rank, of_rank.rank))
                    others.add(path)
            self.templates = of_rank.templates | self.templates
            self._add(of_rank, others)
        self._texts = sorted(self._by_text)
        self._positions = dict(zip(self._by_text, range(len(self._by_text)), strict=True))
        self._first: Entries | None = None

    def _add(self, of_rank: RankEntries, others: set[str]) -> None:
        """Add the entries of a rank that no rank before it has, but those below the paths `others`."""
        present = {*self._by_text}
        for entry in of_rank.entries:
            text = entry.text
            if others and not others.isdisjoint(("", *paths_above(text))):
                continue
            if text not in self._by_text:
                self._by_text[text] = entry
            elif text not in present:  # two paths of this rank
                self._alike.setdefault(text, [self._by_text[text]]).append(entry)
            elif not are_equal(entry.leaf, self._by_text[text].leaf):
                self.conflicts.setdefault(text, (self._holders[text], of_rank.rank))
        for text in self._by_text.keys() - present:
            self._holders[text] = of_rank.rank

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._by_text.values())

    @property
    def first(self) -> Entries:
        """The entries of the first rank."""
        if self._first is None:
            self._first = self if len(self.ranks) == 1 else Entries(self.ranks[:1], keys_are_texts=self.keys_are_texts)
        return self._first

    def of_each_rank(self) -> Iterator[tuple[int, Entries]]:
        """Yield the entries of each rank."""
        yield self.ranks[0].rank, self.first
        for of_rank in self.ranks[1:]:
            yield of_rank.rank, Entries([of_rank], keys_are_texts=self.keys_are_texts)

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
        return _Builder(self, is_whole=is_whole).value(entries, live, path)

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


class _Builder:
    """Builds a value from the entries below a path, with the live value to decide what the source does not know."""

    def __init__(self, entries: Entries, *, is_whole: bool) -> None:
        self._entries = entries
        self._is_whole = is_whole

    def value(self, entries: Sequence[Entry], live: Any, path: str) -> Any:
        """Return the value at `path`, from the entries at and below it."""
        inside = [entry for entry in entries if entry.text != path]
        if len(inside) < len(entries):
            leaf = next(entry.leaf for entry in entries if entry.text == path)
            if not inside:
                return leaf
            if not (isinstance(leaf, Mapping) and not leaf):  # else it is empty on one rank
                text = (
                    "the source has a value here, and others below it, so that a key has a dot: save with keys without "
                    "dots, or leave it out by exclude"
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
        if self._entries.keys_are_texts:
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
            key = self._matched_key(entry, by_text, live, path) if keys is None else keys[0]
            if keys is not None and self._entries.keys_are_texts:
                key = self._live_key(keys[0], by_text, live)
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

    def _matched_key(self, entry: Entry, by_text: Mapping[str, Sequence[Any]], live: Any, path: str) -> Any:
        """Return the key of the live state that begins the rest of a name, the longest of several."""
        rest = entry.text[len(path) + 1 :] if path else entry.text
        text = rest
        while text not in by_text and "." in text:
            text = text.rpartition(".")[0]
        if isinstance(live, list | tuple) and not hasattr(live, "_fields"):
            first = rest.partition(".")[0]
            return ListItem(first) if is_index(first) else _Unknown(rest)
        if len(by_text.get(text, ())) == 1:
            return by_text[text][0]
        return rest if _is_certain(rest) else _Unknown(rest)

    def _empty(self, live_items: Mapping[Any, Any], items: Mapping[Any, Any], live: Any, path: str) -> dict[Any, Any]:
        """Return the items of a live container that the source may have had without an entry: empty mappings."""
        empty = {}
        for key, item in live_items.items():
            if key in items:
                continue
            if has_no_leaves(item):
                empty[ListItem(key) if isinstance(live, list) else key] = item
            elif self._is_whole and contains(item, lambda part: isinstance(part, Mapping)):
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
        if path in self._entries.templates:
            return with_children(self._entries.templates[path], items)
        if not all(isinstance(key, ListItem | TupleItem) for key in items):
            return items
        if sorted(items) != [*range(len(items))]:
            text = "the source lacks an item of this list: make it as it was saved, or leave it out by exclude"
            raise InvalidArgumentError(text, name=path)
        ordered = [items[key] for key in sorted(items)]
        is_tuple = any(isinstance(key, TupleItem) for key in items) or isinstance(live, tuple)
        return tuple(ordered) if is_tuple else ordered


class _Unknown:
    """A key of which the text is known alone."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Unknown) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __str__(self) -> str:
        return self.text


def _is_certain(text: str) -> bool:
    """Whether a key in a name was a text, and no number, None or True, or several keys with dots between them."""
    return text.isidentifier() and text not in ("True", "False", "None", "inf", "nan")


def has_no_leaves(value: Any) -> bool:
    """Whether a value is an empty mapping, or holds nothing else."""
    if isinstance(value, Mapping):
        return all(map(has_no_leaves, value.values()))
    return isinstance(value, list) and len(value) > 0 and all(map(has_no_leaves, value))


def are_equal(one: Any, other: Any) -> bool:
    """Whether two saved values are the same, whatever the order of keys, or SavedTensors of one name."""
    if type(one) is not type(other):
        return False
    if isinstance(one, bool | int | float | str):
        return values.is_same(one, other)
    if isinstance(one, SavedTensor):
        return bool(one.name == other.name)
    if isinstance(one, UnknownValue | OpaqueValue):
        return bool(one.text == other.text)
    items, others = children(one), children(other)
    if items is None or others is None:
        return values.is_same(one, other)
    return items.keys() == others.keys() and all(are_equal(item, others[key]) for key, item in items.items())


def refuse_opaque(value: Any, path: str) -> None:
    """Raise UnsupportedError for a value that the live state cannot have, or one with such a value in it."""
    parts: Iterable[Any] = () if isinstance(value, str | int | float) else values.parts_of(value)
    for part in parts:
        if isinstance(part, OpaqueValue):
            raise UnsupportedError(
                f"the source has something here that is neither a tensor nor a plain value: {part.text}. Load what "
                "holds it with the program that wrote it, and leave it out of the state here",
                name=path,
            )
        if isinstance(part, UnknownValue):
            reason = "the state has no value of this type to build it by: give it to register_config"
            if part.problem:
                reason = f"it cannot be built here: {part.problem}"
            raise UnsupportedError(f"a {part.type_name} was saved here, and {reason}", name=path)
