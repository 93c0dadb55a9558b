"""What a source has at each path, whatever its format: its entries, and the values that these make.

A source is a list of entries for each rank that saved one. An entry has a text, by which it is paired with the live
state, as many of its last keys as the source knows, and a leaf::

    source                                       text                keys                       leaf
    save_checkpoint({"m": net, "n": {1: 2}})     n.1                 ("n", 1)                   2
                                                 m.0.weight          ("m", "0.weight")          SavedTensor
    dcp.save({"l": [{"a": 1}]})                  l.0.a               ("l", ListItem(0), "a")    1
    a safetensors file                           m.0.weight          ()                         SavedTensor

`flatten_tree` makes the entries of a value, `Entries` joins those of all ranks, and `Entries.value` makes a value of
them again: ``value("n", live)`` is ``{1: 2}``, and ``value("l", live)`` is ``[{"a": 1}]``.

`read_optimizer` reads the entries of an optimizer. What its param groups list says how the source calls parameters::

    params: ["model.0.weight"]      names in the whole state, as in a save of ours
    params: ["0.weight"]            FQNs in a module, as get_optimizer_state_dict returns them
    params: [0, 1]                  numbers, as an optimizer's own state_dict() has them
    "state.0.weight.exp_avg"        torch's flattened form: FQNs, and no groups
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from statexchange import values
from statexchange.errors import CorruptError, InvalidArgumentError, StateExchangeError, UnsupportedError, type_text
from statexchange.sharding.paths import Key, ListItem, TupleItem, is_index, joined, paths_above
from statexchange.state.tree import children, contains, with_children
from statexchange.state.types import Leaf
from statexchange.state.units import hyperparameters
from statexchange.values import UnknownValue

ABSENT: Leaf = object()  # where a source has nothing


Conflicts: TypeAlias = dict[str, tuple[int, int]]
"""Two ranks that saved different values, by the text of the path."""


# The leaves of a source


class SavedTensor:
    """A tensor of a source, as a leaf of what was saved; it stands for the values, which are read later.

    Attributes:
        name: its name in the source.
        dtype: its dtype.
        shape: its global shape.
        cut_dims: the dims in which a saved part is smaller than the whole.
        problem: why dtype and shape are not known: files of the source disagree on them.
    """

    # No dataclass: values that are dataclasses are containers, whose fields are entries of their own.
    __slots__ = ("cut_dims", "dtype", "name", "problem", "shape")

    def __init__(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        cut_dims: frozenset[int] = frozenset(),
        problem: StateExchangeError | None = None,
    ) -> None:
        self.name = name
        self.dtype = dtype
        self.shape = shape
        self.cut_dims = cut_dims
        self.problem = problem

    def __repr__(self) -> str:
        return f"the tensor {self.name!r}"


class OpaqueValue:
    """Something in a source that is neither a tensor nor a plain value, with its description."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


def is_empty_mapping(value: object) -> bool:
    """Whether a value is a mapping without entries."""
    return isinstance(value, Mapping) and not value


def has_no_leaves(value: Leaf) -> bool:
    """Whether a value is an empty mapping, or holds nothing else."""
    if isinstance(value, Mapping):
        return all(map(has_no_leaves, value.values()))
    return isinstance(value, list) and len(value) > 0 and all(map(has_no_leaves, value))


def are_equal(first: Leaf, second: Leaf) -> bool:
    """Whether two saved values are the same, whatever the order of keys, or SavedTensors of one name."""
    if type(first) is not type(second):
        return False
    if isinstance(first, SavedTensor):
        return bool(first.name == second.name)
    if isinstance(first, UnknownValue | OpaqueValue):
        return bool(first.text == second.text)
    # By items, as the text of a mapping shows the order of its keys, in which ranks may differ.
    items, others = children(first), children(second)
    if items is None or others is None:
        return values.is_same(first, second)
    if items.keys() != others.keys():
        return False
    return all(are_equal(item, others[key]) for key, item in items.items())


def refuse_opaque(value: Leaf, path: str) -> None:
    """Raise UnsupportedError for a value that the live state cannot have, or one with such a value in it."""
    # Most are, and each hyperparameter of each parameter comes here.
    if isinstance(value, str | int | float):
        return
    for part in values.parts_of(value):
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


# Entries


class Entry(NamedTuple):
    """An entry of a source at one path.

    Attributes:
        text: the path as text, by the names of the state.
        keys: the last keys of the path, as many as the source knows.
        leaf: a SavedTensor, an OpaqueValue, or a plain value without a mapping that has entries.
        name: what the source itself calls it.
        is_alias: whether it is another name of a tensor that the source has under its own.
    """

    text: str
    keys: tuple[Key, ...]
    leaf: Leaf
    name: str
    is_alias: bool = False


@dataclass(slots=True)
class RankEntries:
    """The entries that one rank has saved; a source without ranks has one such record.

    Attributes:
        rank: the rank, or 0.
        entries: its entries.
        templates: namedtuples and dataclasses whose items are entries, by their paths.
        containers: the keys and the kind of each container whose items are entries, by its path. A list and its like
            has the number of items in its kind, a mapping of plain values in a list its keys.
    """

    rank: int
    entries: list[Entry] = field(default_factory=list)
    templates: dict[str, Leaf] = field(default_factory=dict)
    containers: dict[str, tuple[tuple[Key, ...], object]] = field(default_factory=dict)


def flatten_tree(tree: Leaf, rank_entries: RankEntries, base: Entry | None = None) -> None:
    """Add the entries of a decoded tree, in which a SavedTensor stands for each tensor, below those of `base`.

    Mappings are entered, and lists that have a tensor or a mapping in them. Any other list is one plain value, so that
    ``{"a": {"b": [1, 2]}, "l": [{"c": 3}]}`` makes ``a.b``, with the leaf ``[1, 2]``, and ``l.0.c``.
    """
    at = base or Entry("", (), tree, "")
    # A stack and no recursion: a job's state has a leaf for each tensor, and a call of Python costs more than the rest.
    waiting: list[tuple[Leaf, tuple[Key, ...], str, bool]] = [(tree, at.keys, at.text, False)]
    while waiting:
        value, keys, text, in_list = waiting.pop()
        items: dict[Leaf, Leaf] = {}
        if type(value) is dict:
            items = value
        elif value is not None and not isinstance(value, SavedTensor | str | int | float):
            items = _entered(value)
        if not items:
            name = text
            if base is not None:
                name = base.name
            elif isinstance(value, SavedTensor):
                name = value.name
            rank_entries.entries.append(Entry(text, keys, value, name))
            continue
        kind: object = "mapping"
        if not isinstance(value, Mapping):
            kind, in_list = (type(value).__qualname__, len(items)), True
            if type(value) not in (list, tuple):
                rank_entries.templates[text] = value
        elif in_list and not contains(value, SavedTensor):
            # Ranks may each have some entries of a mapping. An item of a list is one thing, of one rank.
            kind = frozenset(value)
        rank_entries.containers[text] = (keys, kind)
        below = f"{text}." if text else ""
        # The last one first, as the stack returns the first one first.
        for key, item in reversed(items.items()):
            waiting.append((item, (*keys, key), f"{below}{key}", in_list))


def _entered(value: Leaf) -> dict[Leaf, Leaf]:
    """Return the items of a container that is entered, by their keys in a path; nothing for a leaf."""
    if not contains(value, SavedTensor, Mapping):
        return {}
    items = children(value) or {}
    # A key 0 of a mapping has the text of the index 0: the type of the key tells them apart.
    if type(value) is list:
        return dict(zip(map(ListItem, items), value, strict=True))
    if type(value) is tuple:
        return dict(zip(map(TupleItem, items), value, strict=True))
    return items


class Entries:
    """All entries of a source, by their texts.

    Ranks may have saved different ones. `ranks` come in the order of their claim, and the first one's entry counts::

        rank 0 saved {"a": {"x": 1}, "n": 2}            a.x 1, n 2, a.y 4
        rank 1 saved {"a": {"x": 1, "y": 4}, "n": 3}    conflicts {"n": (0, 1)}

    Attributes:
        ranks: the entries of each rank.
        is_own: whether the first rank is this one, which takes nothing from others where it has a value itself.
        keys_are_texts: whether a key that is a text may have been a number, as in a DCP, which has no empty mappings.
        conflicts: plain values that differ, and containers and keys of another kind; whether that matters is decided
            when it is known what of them is loaded.
        templates: namedtuples and dataclasses whose items are entries, by their paths.
    """

    def __init__(self, ranks: Sequence[RankEntries], *, is_own: bool = False, keys_are_texts: bool = False) -> None:
        self.ranks = ranks
        self.is_own = is_own
        self.keys_are_texts = keys_are_texts
        self.conflicts: Conflicts = {}
        self.templates: dict[str, Leaf] = {}
        self._by_text: dict[str, Entry] = {}  # in the order of the source
        self._alike: dict[str, list[Entry]] = {}  # those of a text that two paths have
        self._holders: dict[str, int] = {}  # the rank of each entry
        self._containers: dict[str, tuple[int, tuple[Key, ...], object]] = {}  # with the rank that has it
        for of_rank in ranks:
            self._add(of_rank, self._add_containers(of_rank))
        self._texts = sorted(self._by_text)
        self._positions = dict(zip(self._by_text, range(len(self._by_text)), strict=True))

    def _add_containers(self, of_rank: RankEntries) -> set[str]:
        """Add the containers of a rank; return the paths of those that are something else on a rank before it.

        What is in them does not count. An empty mapping is no value, but one that has its items on other ranks.
        """
        others = set()
        for path, (keys, kind) in of_rank.containers.items():
            rank, first_keys, first_kind = self._containers.setdefault(path, (of_rank.rank, keys, kind))
            entry = self._by_text.get(path)
            if entry is None and rank == of_rank.rank:
                continue
            if entry is not None and is_empty_mapping(entry.leaf) and kind == "mapping":
                del self._by_text[path]
            elif entry is not None or first_kind != kind or not _are_same_keys(first_keys, keys):
                self.conflicts.setdefault(path, (self._holders.get(path, rank), of_rank.rank))
                others.add(path)
        for path, template in of_rank.templates.items():
            if path not in others:
                self.templates.setdefault(path, template)
        return others

    def _add(self, of_rank: RankEntries, others: set[str]) -> None:
        """Add the entries of a rank that no rank before it has, but those below the paths `others`."""
        present = {*self._by_text}
        for entry in of_rank.entries:
            text = entry.text
            # What two ranks have in different containers cannot be joined: the first rank's counts.
            if others and not others.isdisjoint(("", *paths_above(text))):
                continue
            rank, _, kind = self._containers.get(text, (of_rank.rank, (), None))
            if rank != of_rank.rank:  # which has a container here
                if not (is_empty_mapping(entry.leaf) and kind == "mapping"):
                    self.conflicts.setdefault(text, (rank, of_rank.rank))
            elif text not in self._by_text:
                self._by_text[text] = entry
            elif text not in present:  # two paths of this rank
                self._alike.setdefault(text, [self._by_text[text]]).append(entry)
            elif not _are_one(self._by_text[text], entry):
                self.conflicts.setdefault(text, (self._holders[text], of_rank.rank))
        for text in self._by_text.keys() - present:
            self._holders[text] = of_rank.rank

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._by_text.values())

    @functools.cached_property
    def first(self) -> Entries:
        """The entries of the first rank."""
        if len(self.ranks) == 1:
            return self
        return Entries(self.ranks[:1], keys_are_texts=self.keys_are_texts)

    @functools.cached_property
    def of_each_rank(self) -> list[tuple[int, Entries]]:
        """The entries of each rank, with the rank."""
        of_each = [(self.ranks[0].rank, self.first)]
        for of_rank in self.ranks[1:]:
            of_each.append((of_rank.rank, Entries([of_rank], keys_are_texts=self.keys_are_texts)))
        return of_each

    def at(self, text: str) -> Entry | None:
        """Return the entry at a path; raise InvalidArgumentError if there are several."""
        if text not in self._alike:
            return self._by_text.get(text)
        return _only(self._alike[text], text)

    def tensor(self, text: str) -> Entry | None:
        """Return the entry at a path as `at` does, if it is a tensor."""
        entry = self.at(text)
        if entry is not None and isinstance(entry.leaf, SavedTensor):
            return entry
        return None

    def has_below(self, path: str) -> bool:
        """Whether there is an entry at a path or below it."""
        if not path or path in self._by_text:
            return bool(self._by_text)
        return bisect.bisect_left(self._texts, f"{path}.") < bisect.bisect_left(self._texts, f"{path}/")

    def below(self, path: str) -> list[Entry]:
        """Return the entries at a path and below it, in the order of the source.

        Of ``n.1``, ``n.2.a`` and ``nn`` those below "n" are the first two.
        """
        texts = [*self._by_text]
        if path:
            # "/" is the character after ".": what is sorted between the two is below the path.
            begin, end = bisect.bisect_left(self._texts, f"{path}."), bisect.bisect_left(self._texts, f"{path}/")
            texts = sorted(self._texts[begin:end], key=self._positions.__getitem__)
            if path in self._by_text:
                texts.insert(0, path)
        if not self._alike:
            return list(map(self._by_text.__getitem__, texts))
        below: list[Entry] = []
        for text in texts:
            below += self._alike.get(text) or [self._by_text[text]]
        return below

    def value(self, path: str, live: Leaf, *, is_whole: bool = True) -> Leaf:
        """Return what the source has at a path, as one value with a SavedTensor for each tensor; ABSENT for nothing.

        It is that of the first rank that has something there. Keys that the source does not know are those of `live`,
        the value in the state. If the value `is_whole`, a mapping that `live` has and the source does not may have been
        empty, which is an error.

        Raises:
            InvalidArgumentError: the keys or containers of the source are not known, and `live` does not show them.
        """
        entries = self
        if self.is_own and self.first.has_below(path):
            # A rank that gets its own value again takes no items of others into it.
            entries = self.first
        below = entries.below(path)
        if not below:
            return ABSENT
        return entries.built(below, live, path, is_whole=is_whole)

    def built(self, entries: Sequence[Entry], live: Leaf, path: str, *, is_whole: bool = True) -> Leaf:
        """Return the value that entries at and below a path make, as `value` does."""
        if len(entries) == 1 and entries[0].text == path:
            return entries[0].leaf
        if not self.keys_are_texts and path not in self.templates:
            # Most are leaves of one mapping, under texts: a parameter's state, of which there are very many.
            begin = len(path) + bool(path)
            mapping: dict[Leaf, Leaf] = {}
            for entry in entries:
                if not entry.keys or entry.keys[-1] != entry.text[begin:]:
                    break
                mapping[entry.keys[-1]] = entry.leaf
            else:
                return mapping
        return _ValueBuilder(self.templates, self.keys_are_texts, is_whole).value(entries, live, path)

    def by_key(self, path: str) -> dict[Leaf, list[Entry]] | None:
        """Return the entries below a path by their first key there; None if the source does not know the keys.

        Those of an optimizer's state are by "state" and "param_groups".
        """
        below = self.below(path)
        grouped: dict[Leaf, list[Entry]] = {}
        for entry, key in zip(below, first_keys(below, path), strict=True):
            if path and entry.text == path:
                continue
            if key is ABSENT:
                return None
            grouped.setdefault(key, []).append(entry)
        return grouped


def first_keys(entries: Iterable[Entry], path: str) -> list[Key]:
    """Return the key that leads from the container at `path` to each of the entries below it.

    ABSENT stands for one that the source does not know.
    """
    begin = len(path) + bool(path)  # after the dot
    keys: list[Key] = []
    for entry in entries:
        keys.append(ABSENT)
        # Where the text of a key begins, from the last one on; one that begins before `begin` is across the path's end.
        at = len(entry.text) + 1
        for key in reversed(entry.keys):
            at -= len(str(key)) + 1
            if at == begin:
                keys[-1] = key
            if at <= begin:
                break
    return keys


def _are_one(first: Entry, second: Entry) -> bool:
    """Whether two ranks saved the same at one text, under the same keys.

    A tensor's keys do not count: it is one tensor by its name, which fills the live tensor, whatever its key.
    """
    if isinstance(first.leaf, SavedTensor):
        return are_equal(first.leaf, second.leaf)
    return _are_same_keys(first.keys, second.keys) and are_equal(first.leaf, second.leaf)


def _are_same_keys(first: tuple[Key, ...], second: tuple[Key, ...]) -> bool:
    # 1 and True are equal, and so are a member of an IntEnum and its number.
    return first == second and [*map(type, first)] == [*map(type, second)]


def _only(entries: Sequence[Entry], path: str) -> Entry:
    """Return one of several entries that are at a path, if all are equal.

    Raises:
        InvalidArgumentError: they are different values.
    """
    # Entries below the path come, too, where a leaf and the items of a mapping have one text: that is never one value.
    first = entries[0]
    for entry in entries:
        if entry.text != path or not (entry is first or are_equal(entry.leaf, first.leaf)):
            text = (
                "the source has several values here when keys are joined with dots: save with keys without dots, or "
                "leave it out by exclude"
            )
            raise InvalidArgumentError(text, name=path)
    return first


# Values


class _ValueBuilder(NamedTuple):
    """Builds values, container by container, by what a source knows of the keys and containers of its entries.

    A group of entries becomes one container: ``l.0`` 5 and ``l.1.a`` 6 are grouped by the keys 0 and 1; the second
    group becomes ``{"a": 6}``, and both the list ``[5, {"a": 6}]``. Where the source knows no keys, as of ``l.0`` in a
    safetensors file, the live value shows them.

    Attributes:
        templates: namedtuples and dataclasses whose items are entries, by their paths.
        keys_are_texts: whether a key that is a text may have been a number, as in a DCP, which has no empty mappings.
        is_whole: whether a mapping that the live value has, and such a source not, is an error: it may have been empty.
    """

    templates: Mapping[str, Leaf]
    keys_are_texts: bool
    is_whole: bool

    def value(self, entries: Sequence[Entry], live: Leaf, path: str) -> Leaf:
        """Return the value that the entries at and below a path make, with a SavedTensor for each tensor.

        Keys and containers that the source does not know are those of `live`, the value in the state.

        Raises:
            InvalidArgumentError: `live` does not show them either, or the entries contradict each other.
        """
        for entry in entries:
            if entry.text == path:
                return _only(entries, path).leaf
        live_items = children(live) or {}
        # By index also those of a namedtuple: torch's files have them so.
        if isinstance(live, tuple):
            live_items = dict(zip(map(TupleItem, range(len(live))), live, strict=True))
        items = {}
        for key, of_key in self._by_key(entries, live_items, live, path).items():
            inner = joined(path, key)
            if len(of_key) == 1 and of_key[0].text == inner:
                items[key] = of_key[0].leaf
            else:
                items[key] = self.value(of_key, live_items.get(key), inner)
        if self.keys_are_texts:
            items |= self._empty(live_items, items, live, path)
        return self._container(items, live, path)

    def _by_key(
        self, entries: Sequence[Entry], live_items: Mapping[Leaf, Leaf], live: Leaf, path: str
    ) -> dict[Leaf, list[Entry]]:
        """Group entries by their first key below `path`."""
        grouped: dict[Leaf, list[Entry]] = {}
        by_text: dict[str, list[Key]] = {}
        for live_key in live_items:
            by_text.setdefault(str(live_key), []).append(live_key)
        begin = len(path) + bool(path)
        for entry, first_key in zip(entries, first_keys(entries, path), strict=True):
            key = first_key
            if key is ABSENT:  # a name alone, or one that was renamed
                key = _key_of_name(entry.text[begin:], by_text)
            elif self.keys_are_texts:
                key = self._live_key(key, by_text, live)
            grouped.setdefault(key, []).append(entry)
        return grouped

    def _live_key(self, key: Key, by_text: Mapping[str, Sequence[Key]], live: Leaf) -> Key:
        """Return the live state's key for one of the source, which may have been a number; else the source's own."""
        if isinstance(key, int):
            return key
        # A DCP writes the number 1 and the text "1" as the same key. The live state may show which one it was.
        alike = by_text.get(str(key), ())
        if len(alike) == 1 and not isinstance(live, list | tuple):
            return alike[0]
        if alike or not _is_certain(str(key)):
            return _UnknownKey(str(key))
        return key

    def _empty(
        self, live_items: Mapping[Leaf, Leaf], items: Mapping[Leaf, Leaf], live: Leaf, path: str
    ) -> dict[Leaf, Leaf]:
        """Return the items of a live container that the source may have had without an entry: empty mappings."""
        empty: dict[Leaf, Leaf] = {}
        for key, item in live_items.items():
            if key in items:
                continue
            # A flattened state has no entry for an empty mapping, so that an empty live one is what was saved.
            if has_no_leaves(item) and isinstance(live, list):
                empty[ListItem(key)] = item
            elif has_no_leaves(item):
                empty[key] = item
            elif self.is_whole and contains(item, Mapping):
                text = (
                    "the source has nothing here, as torch leaves out empty mappings: empty that of the state, or "
                    "leave it out by exclude"
                )
                raise InvalidArgumentError(text, name=f"{path}.{key}")
        return empty

    def _container(self, items: dict[Leaf, Leaf], live: Leaf, path: str) -> Leaf:
        """Return a container of these items: of the type that the source knows, or else of the live one's kind."""
        are_indices, is_tuple = True, isinstance(live, tuple)
        for key in items:
            if isinstance(key, _UnknownKey):
                has = type_text(live)
                if live is None:
                    has = "None"
                text = (
                    f"the source has an entry {key.text!r} here, and what kind of key that is is not known; the state "
                    f"has {has} to put it into: make it as it was saved, or leave it out by exclude"
                )
                raise InvalidArgumentError(text, name=path)
            are_indices &= isinstance(key, ListItem | TupleItem)
            is_tuple |= isinstance(key, TupleItem)
        if path in self.templates:
            return with_children(self.templates[path], items)
        if not are_indices:
            return items
        if self.keys_are_texts:
            self._check_length(items, live, path)
        if sorted(items) != [*range(len(items))]:
            text = "the source lacks an item of this list: make it as it was saved, or leave it out by exclude"
            raise InvalidArgumentError(text, name=path)
        # Entries come in the order of the source, in which a DCP has the index 10 before the index 2.
        ordered = [items[index] for index in range(len(items))]
        if is_tuple:
            return tuple(ordered)
        return ordered

    def _check_length(self, items: Mapping[Leaf, Leaf], live: Leaf, path: str) -> None:
        """Raise InvalidArgumentError for a list of which a DCP may have left out the last items: empty mappings."""
        others: Sequence[Leaf] = ()
        if isinstance(live, list | tuple):
            if len(live) == len(items):
                return
            others = live[len(items) :]
        if any(isinstance(item, Mapping) for item in (*items.values(), *others)):
            text = (
                f"the source has {len(items)} items here, and empty ones at its end would have no entry: make the list "
                "as long as it was saved, or leave it out by exclude"
            )
            raise InvalidArgumentError(text, name=path)


@dataclass(frozen=True)
class _UnknownKey:
    """A key of which the text is known alone."""

    text: str

    def __str__(self) -> str:
        return self.text


def _key_of_name(rest: str, by_text: Mapping[str, Sequence[Key]]) -> Key:
    """Return the live key that begins the rest of a name, the longest of several; else the rest, if that is a key."""
    text = rest
    while text not in by_text and "." in text:
        text = text.rpartition(".")[0]
    if len(by_text.get(text, ())) == 1:
        return by_text[text][0]
    if _is_certain(rest):
        return rest
    return _UnknownKey(rest)


def _is_certain(text: str) -> bool:
    """Whether a key in a name was a text, and no number, None or True, or several keys with dots between them."""
    return text.isidentifier() and text not in ("True", "False", "None", "inf", "nan")


# An optimizer in a source


_GROUPS, _STATE = "param_groups", "state"


class SavedGroup(NamedTuple):
    """A param group in a source.

    Attributes:
        labels: its parameters, by name or number.
        settings: its hyperparameters.
    """

    labels: list[str]
    settings: Mapping[str, Leaf]


@dataclass(slots=True)
class SavedOptimizer:
    """An optimizer's state in a source.

    Attributes:
        rank: the rank that saved it.
        entries: the entries of that rank.
        path: its path in the state.
        groups: the param groups; in torch's flattened form, which has none, one for each parameter.
        labels: the names or numbers of all parameters, in the order of the groups.
        names: the ``param_names`` of parameters that have numbers.
        state: the entries of each parameter's state, by label.
        other_state: the entries of state that is not a parameter's, by key.
        more: the entries of what its `state_dict` has besides, by key.
        has_groups: whether the source knows which parameters one group has.
        by_number: whether the labels are numbers.
        has_integers: whether some of them are integers, and not texts, which may be names, too.
    """

    rank: int
    entries: Entries
    path: str
    groups: list[SavedGroup] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    state: dict[str, list[Entry]] = field(default_factory=dict)
    other_state: dict[Leaf, list[Entry]] = field(default_factory=dict)
    more: dict[str, list[Entry]] = field(default_factory=dict)
    has_groups: bool = True
    by_number: bool = False
    has_integers: bool = False

    @property
    def labels_by_group(self) -> list[list[str]]:
        """The same for each group that has some."""
        return [group.labels for group in self.groups if group.labels]


def read_optimizer(
    entries: Entries,
    rank: int,
    path: str,
    by_key: Mapping[Leaf, list[Entry]] | None,
    groups: Sequence[Mapping[str, Leaf]],
    is_name: Callable[[str], bool],
    *,
    has_tree: bool,
) -> SavedOptimizer | None:
    """Return the optimizer at a path of a source; None if it is something else.

    Args:
        entries: those of one rank.
        rank: the rank.
        path: the path.
        by_key: its entries there, by their first key; None if keys are not known.
        groups: the live param groups, which show what the source's keys were.
        is_name: whether a text is the name of a live parameter.
        has_tree: whether the source is a save of ours, in which numbers are texts. In a file of torch texts are names.

    Raises:
        CorruptError: a param group lists no parameters.
    """
    saved = SavedOptimizer(rank, entries, path)
    flat: dict[str, list[Entry]] = {}
    for key, of_key in (by_key or {}).items():
        if not isinstance(key, str):
            return None
        if key.startswith((f"{_STATE}.", f"{_GROUPS}.")):
            flat[key] = of_key
        elif key not in (_STATE, _GROUPS):
            saved.more[key] = of_key
    if not by_key:
        return None
    # The nested form has the keys "state" and "param_groups", and neither has a dot.
    if flat:
        _read_flattened(saved, flat, is_name)
    elif _GROUPS in by_key:
        _read_state(saved, _read_groups(saved, groups))
    elif _STATE in by_key:
        saved.has_groups = False
        _read_state(saved, set())
    else:
        return None
    for group in saved.groups:
        saved.labels += group.labels
    if saved.labels and (saved.has_integers or has_tree):
        saved.by_number = all(map(is_index, saved.labels))
    return saved


def _read_groups(saved: SavedOptimizer, live_groups: Sequence[Mapping[str, Leaf]]) -> set[Leaf]:
    """Read the param groups; return the parameters that they list."""
    path, entries = joined(saved.path, _GROUPS), saved.entries
    # As many as the source has: none of them is empty, so that the length is known.
    present: list[Leaf] = list(map(hyperparameters, live_groups))
    num_groups = len(entries.by_key(path) or present)
    present += [{}] * (num_groups - len(present))
    groups = entries.value(path, present[:num_groups])
    _check_list(groups, path, "groups", (object,))
    keys: set[Leaf] = set()
    for number, group in enumerate(groups):
        where = f"{path}.{number}"
        listed: Leaf = group.get("params") if isinstance(group, Mapping) else None
        _check_list(listed, f"{where}.params", "parameters", (int, str))
        if group.get("param_names") is not None:
            _check_list(group["param_names"], f"{where}.param_names", "names", (str,))
            saved.names += group["param_names"]
        labels = []
        for key in listed:
            labels.append(str(key))
            saved.has_integers |= isinstance(key, int)
        # If keys are texts, nothing else tells other state from a parameter's.
        keys.update(labels if entries.keys_are_texts else listed)
        saved.groups.append(SavedGroup(labels, hyperparameters(group)))
    return keys


def _check_list(value: Leaf, path: str, kind: str, types: tuple[type, ...]) -> None:
    """Raise CorruptError unless a value is a list, or tuple, of items of these types."""
    is_list = isinstance(value, list | tuple)
    if is_list:
        for item in value:
            is_list = is_list and isinstance(item, types)
    if is_list:
        return
    what = "a tensor" if isinstance(value, SavedTensor) else type_text(value)
    raise CorruptError(
        f"the optimizer lists no {kind} here, but has {what}: save what the optimizer's state_dict() returns, or leave "
        "the optimizer out by exclude",
        name=path,
    )


def _read_state(saved: SavedOptimizer, keys: set[Leaf]) -> None:
    """Read the state of the parameters that groups list, and other state, whose key may look like a parameter's."""
    for key, of_key in (saved.entries.by_key(joined(saved.path, _STATE)) or {}).items():
        if key in keys:
            saved.state[str(key)] = of_key
        else:
            saved.other_state[key] = of_key


def _read_flattened(saved: SavedOptimizer, flat: Mapping[str, list[Entry]], is_name: Callable[[str], bool]) -> None:
    """Read torch's flattened form: one key ``state.<name>.exp_avg`` or ``param_groups.<name>.lr`` for each value."""
    saved.has_groups = False
    settings: dict[str, dict[str, Leaf]] = {}
    for key, of_key in flat.items():
        kind, _, rest = key.partition(".")
        # Names and keys of state may have dots: only the live names show where one ends.
        label = _owner(rest, is_name)
        inner = rest[len(label) + 1 :]
        of_label = settings.setdefault(label, {})
        if kind == _GROUPS:
            of_label[inner] = saved.entries.built(of_key, None, joined(saved.path, key))
        else:
            # As if the name of the parameter was a key: what is inside it is built from the keys after that.
            state = saved.state.setdefault(label, [])
            for entry in of_key:
                state.append(entry._replace(keys=(inner,)))
    for label, of_label in settings.items():
        saved.groups.append(SavedGroup([label], of_label))


def _owner(text: str, is_name: Callable[[str], bool]) -> str:
    """Return the parameter's name that begins a text, the longest of several; without one, all but the last part."""
    label = text.rpartition(".")[0]
    while label and not is_name(label):
        label = label.rpartition(".")[0]
    return label or text.rpartition(".")[0]


def join_numbered(optimizers: Sequence[SavedOptimizer], path: str) -> list[str]:
    """Return the names of numbered parameters; several ranks must have the same parameters for the same numbers.

    Raises:
        InvalidArgumentError: they have others.
    """
    names: list[str] = []
    first: SavedOptimizer | None = None
    for saved in optimizers:
        if not saved.by_number:
            continue
        first = first or saved
        names = names or saved.names
        # A rank whose groups have no names says nothing against those of others.
        if saved.labels_by_group != first.labels_by_group or saved.names not in ([], names):
            raise InvalidArgumentError(
                "ranks saved this optimizer's parameters by number, and those of one number or the groups differ: load "
                "on as many ranks as have saved, or leave the optimizer out by exclude",
                name=path,
            )
    return names
