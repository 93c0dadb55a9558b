"""What decides which entries of a source fill a live state: the filter of names, and the layout of a load.

A source's name goes through `rename`, loses what wrappers put into it, and is then paired with the live path of the
same text. `include` and `exclude` are asked for names of the state::

    model._orig_mod.w  --rename ("^model", "net")-->  net._orig_mod.w  --wrappers-->  net.w  --exclude="net.*"-->  left
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from statexchange.errors import UnsafeError
from statexchange.sharding.options import LoadOptions, renamed
from statexchange.sharding.paths import (
    ListItem,
    TupleItem,
    have_wrappers,
    joined,
    paths_above,
    text_of,
    without_wrappers,
)
from statexchange.sharding.rules import Layout, with_dots
from statexchange.state.entries import Entries, Entry, SavedTensor, are_equal
from statexchange.state.flatten import ObjectStates
from statexchange.state.modules import is_module
from statexchange.state.tree import walk
from statexchange.state.types import Leaf, Path

__all__ = ["Matching", "NameFilter", "strips_wrappers"]


class NameFilter:
    """Gives the entries of a source the names of the state.

    `units` are the paths of the live optimizers and other objects, which move whole. With `strips_wrappers` names lose
    what torch.compile and others put into them.
    """

    def __init__(self, options: LoadOptions, units: Collection[str], *, strips_wrappers: bool = False) -> None:
        self.options = options
        self._units = units
        self._strips_wrappers = strips_wrappers
        self._places: dict[str, str] = {}
        self.renames = bool(options.rename) or strips_wrappers
        self.selects = bool(options.include or options.exclude)

    def without_renames(self) -> NameFilter:
        """Return the filter for a source whose names are the state's already."""
        return NameFilter(replace(self.options, rename=()), self._units)

    def name(self, name: str) -> str:
        """Return the state's name of an entry of the source."""
        new = name
        if self.options.rename:
            new = renamed(name, self.options.rename)
        if self._strips_wrappers:
            # After the renames, whose patterns are for the names that the source has.
            return without_wrappers(new)
        return new

    def wants_any(self, value: Leaf, path: str) -> bool:
        """Whether anything in a value at a path is selected."""
        return not self.selects or any(self.options.wants(step.path) for step in walk(value, path=path))

    def wants_whole(self, *parts: tuple[Leaf, str]) -> bool:
        """Whether what has these values at these paths is loaded: if one path is included, and none is excluded."""
        if not self.selects:
            return True
        paths = []
        for value, path in parts:
            for step in walk(value, path=path):
                paths.append(step.path)
        return self.options.wants_object(paths)

    def place(self, path: str) -> str:
        """Return the new path of a container, also if a pattern for what is inside it moves it: ``^opt\\.``."""
        if path not in self._places:
            new = self.name(path)
            # A function expects whole names.
            if new == path and not callable(self.options.rename):
                inside = self.name(f"{path}.")
                if inside.endswith("."):
                    new = inside[:-1]
            self._places[path] = new
        return self._places[path]

    def entries(self, entries: Sequence[Entry], path: str) -> list[Entry]:
        """Return the entries of one rank by the names of the state; `path` is that of the source.

        Raises:
            UnsafeError: two entries have one name then.
        """
        if not self.renames:
            return [*entries]
        new_entries = list(map(self._entry, entries))
        first: dict[str, Entry] = {}
        moved: list[tuple[Entry, Entry]] = []
        for new, old in zip(new_entries, entries, strict=True):
            other = first.setdefault(new.text, old)
            # Tied tensors may get one name: they have the same values.
            if other.text != old.text and not _are_one_tensor(other, old):
                text = f"rename gives one name to both {other.text!r} and {old.text!r}: change rename"
                raise UnsafeError(text, name=new.text, path=path)
            if new.text != old.text:
                moved.append((new, old))
        _check_places(new_entries, moved, path)
        return new_entries

    def _entry(self, entry: Entry) -> Entry:
        text = self._text(entry.text, entry.keys)
        if text == entry.text:
            return entry
        return entry._replace(text=text, keys=_kept_keys(entry.keys, text))

    def _text(self, text: str, keys: Path) -> str:
        # An optimizer, or another object, is loaded by itself: all of it goes where its own path goes.
        for unit in paths_above(text):
            new = self.place(unit)
            if new in self._units:
                return new + text[len(unit) :]
        # What is inside a list moves with the list.
        for index, key in enumerate(keys):
            if isinstance(key, ListItem | TupleItem):
                inside = text_of(keys[index:])
                head = text[: -len(inside) - 1]
                if self._strips_wrappers:
                    inside = without_wrappers(inside)
                if not head:
                    return inside
                return joined(self.place(head), inside)
        return self.name(text)


def _check_places(entries: Sequence[Entry], moved: Sequence[tuple[Entry, Entry]], path: str) -> None:
    """Raise UnsafeError if an entry was moved to the place of a mapping of others, or into another entry.

    `moved` are those with a new name, each with the entry that it was.
    """
    if not moved:
        return
    above: set[str] = set()
    for entry in entries:
        above.update(list(paths_above(entry.text))[:-1])
    above_moved: dict[str, Entry] = {}
    for new, old in moved:
        for place in list(paths_above(new.text))[:-1]:
            above_moved[place] = old
    clashes: list[tuple[Entry, Entry]] = []
    for new, old in moved:
        if new.text in above:
            clashes.append((new, old))
    for entry in entries:
        if entry.text in above_moved:
            clashes.append((entry, above_moved[entry.text]))
    for entry, old in clashes:
        # An empty mapping takes what others put into it.
        if entry.leaf != {}:
            text = f"rename moves {old.text!r} to the place of another entry of the source, or into it: change rename"
            raise UnsafeError(text, name=entry.text, path=path)


def _are_one_tensor(entry: Entry, other: Entry) -> bool:
    """Whether two entries are names of one tensor."""
    return isinstance(entry.leaf, SavedTensor) and are_equal(entry.leaf, other.leaf)


def _kept_keys(keys: Path, text: str) -> Path:
    """Return the last keys with which a new text still ends: what moves with its mapping keeps its keys."""
    end, count = len(text), 0
    for key in reversed(keys):
        part = str(key)
        begin = end - len(part)
        if begin < 0 or text[begin:end] != part or (begin > 0 and text[begin - 1] != "."):
            break
        count, end = count + 1, begin - 1
    return keys[len(keys) - count :]


def strips_wrappers(names: Collection[str], state: Leaf) -> bool:
    """Whether names of a source have parts that wrappers have put into them, and those of the state do not.

    Names of live modules have none; a mapping of the state may, as the state dict of a compiled model.
    """
    if not have_wrappers(names):
        return False
    # A model may have a tensor under both names: then these parts are no wrapper's.
    if {*map(without_wrappers, names)} <= {*names}:
        return False
    for step in walk(state, lambda _, value: isinstance(value, Mapping) and not is_module(value)):
        # Each key is the last one of a step.
        key = str(step.keys[-1]) if step.keys else ""
        if key != without_wrappers(key):
            return False
    return True


@dataclass(slots=True)
class Matching:
    """The entries of a source, and what decides which of them fill a live state.

    Attributes:
        names: the filter of the load, with its options.
        entries: the entries of the source.
        objects: the present states of objects.
        has_tree: whether the source is a save of ours, with the names of parameters in the whole state.
        classes: the classes of optimizers that the source records, by path.
        path: that of the source, for errors.
        saved_by: the number of ranks that have saved; None if the source does not record it.
        loaded_by: the number of ranks that load.
        layout: the rules for live tensors that are parts of whole ones; one without rules if the load has none.
        renumbered: the source's names of tensors that the layout renumbers over all ranks.
        knows_owners: whether the source records which tensors belong to a rank: one that several ranks have saved, or
            as many as load.
    """

    names: NameFilter
    entries: Entries
    objects: ObjectStates
    has_tree: bool
    classes: Mapping[str, frozenset[str]]
    path: str
    saved_by: int | None
    loaded_by: int
    layout: Layout = field(init=False)
    renumbered: Mapping[str, str] = field(default_factory=dict)
    knows_owners: bool = field(init=False)

    def __post_init__(self) -> None:
        # A copy: it notes which patterns have matched, and a load may run twice.
        options = self.names.options
        self.layout = Layout({})
        if options.layout is not None:
            self.layout = options.layout.unmatched()
        self.knows_owners = self.saved_by == self.loaded_by or self.saved_by not in (None, 1)

    def stored(self, text: str, keys: Path) -> list[Entry] | None:
        """Return the entries that fill a live tensor, several if a layout splits it; None if the source lacks one."""
        names = [text]
        if self.layout.rules:
            names = self._names_by_layout(text)
        entries = []
        for name in names:
            # A part has a name of the layout's making, of which the live keys say nothing.
            entry = self.entries.at(name, keys if name == text else None)
            if entry is None or not isinstance(entry.leaf, SavedTensor):
                return None
            entries.append(entry)
        return entries

    def _names_by_layout(self, name: str) -> list[str]:
        # Experts and layers have numbers of their own on each rank; those in the source follow from all ranks.
        rule = self.layout.rule_for(name)
        if rule is None:
            return [self.renumbered.get(name, name)]
        return [self.renumbered.get(part, part) for part in rule.names(name)]

    def name_of_part(self, name: str) -> str:
        """Return the source's name of a tensor that a layout's rule has made of a live one."""
        name = self.renumbered.get(name, name)
        entry = self.entries.at(name)
        if entry is None or not isinstance(entry.leaf, SavedTensor):
            return name
        return entry.leaf.name

    def parameter(self, name: str) -> SavedTensor | None:
        """Return the source's tensor of the parameter that has this name in the state; None if it has none."""
        if not name:
            return None
        # A layout's patterns may write the items of lists as "a[0]"; paths have dots.
        entry = self.entries.at(with_dots(name))
        if entry is not None and isinstance(entry.leaf, SavedTensor):
            return entry.leaf
        return None

    def is_like_parameter(self, saved: SavedTensor, parameter_name: str) -> bool:
        """Whether a tensor of an optimizer's state has its parameter's shape in the source, and a layout shards that.

        Then the live tensor is this rank's part of it, as the parameter is.
        """
        if not parameter_name or self.layout.rule_for(parameter_name) is None:
            return False
        parameter = self.parameter(parameter_name)
        return parameter is not None and parameter.shape == saved.shape
