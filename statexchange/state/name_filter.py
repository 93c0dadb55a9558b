"""The one filter of a load: what `rename` and wrappers make of a source's names, and which of them are loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from statexchange.errors import UnsafeError
from statexchange.sharding.options import LoadOptions, renamed
from statexchange.sharding.paths import Key, ListItem, TupleItem, joined, paths_above, text_of, without_wrappers
from statexchange.state.entries import Entry, SavedTensor, are_equal
from statexchange.state.modules import is_module
from statexchange.state.tree import walk

__all__ = ["NameFilter", "strips_wrappers"]


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

    def without_renames(self) -> NameFilter:
        """Return the filter for a source whose names are the state's already."""
        return NameFilter(replace(self.options, rename=()), self._units)

    @property
    def renames(self) -> bool:
        """Whether a name may change."""
        return bool(self.options.rename) or self._strips_wrappers

    @property
    def selects(self) -> bool:
        """Whether a name may be left out."""
        return bool(self.options.include or self.options.exclude)

    def name(self, name: str) -> str:
        """Return the state's name of an entry of the source."""
        new = renamed(name, self.options.rename) if self.options.rename else name
        return without_wrappers(new) if self._strips_wrappers else new

    def place(self, path: str) -> str:
        """Return the new path of a container, also if a pattern for what is inside it moves it: ``^opt\\.``."""
        if path not in self._places:
            new = self.name(path)
            if new == path and not callable(self.options.rename):  # a function expects whole names
                inside = self.name(f"{path}.")
                new = inside[:-1] if inside.endswith(".") else new
            self._places[path] = new
        return self._places[path]

    def entries(self, entries: Sequence[Entry], path: str) -> list[Entry]:
        """Return the entries of one rank by the names of the state; `path` is that of the source.

        Raises:
            UnsafeError: two entries have one name then.
        """
        if not self.renames:
            return [*entries]
        new = list(map(self._entry, entries))
        first: dict[str, Entry] = {}
        for entry, old in zip(new, entries, strict=True):
            other = first.setdefault(entry.text, old)
            if other.text != old.text and not _are_one_tensor(other, old):
                text = f"rename gives one name to both {other.text!r} and {old.text!r}: change rename"
                raise UnsafeError(text, name=entry.text, path=path)
        _check_places(new, entries, path)
        return new

    def _entry(self, entry: Entry) -> Entry:
        text = self._text(entry.text, entry.keys)
        if text == entry.text:
            return entry
        return entry._replace(text=text, keys=_kept_keys(entry.keys, text))

    def _text(self, text: str, keys: tuple[Key, ...]) -> str:
        for unit in paths_above(text):
            new = self.place(unit)
            if new in self._units:
                return new + text[len(unit) :]
        # What is inside a list moves with the list.
        items = [index for index, key in enumerate(keys) if isinstance(key, ListItem | TupleItem)]
        if items:
            inside = text_of(keys[items[0] :])
            head = text[: -len(inside) - 1]
            inside = without_wrappers(inside) if self._strips_wrappers else inside
            return joined(self.place(head), inside) if head else inside
        return self.name(text)


def _check_places(new: Sequence[Entry], entries: Sequence[Entry], path: str) -> None:
    """Raise UnsafeError if an entry was moved to the place of a mapping of others, or into another entry."""
    moved = [(entry, old) for entry, old in zip(new, entries, strict=True) if entry.text != old.text]
    above = {one for entry in new for one in paths_above(entry.text) if one != entry.text}
    above_moved = {one: old for entry, old in moved for one in paths_above(entry.text) if one != entry.text}
    clashes = [(entry, old) for entry, old in moved if entry.text in above and entry.leaf != {}]
    clashes += [(entry, above_moved[entry.text]) for entry in new if entry.text in above_moved and entry.leaf != {}]
    for entry, old in clashes:
        text = f"rename moves {old.text!r} to the place of another entry of the source, or into it: change rename"
        raise UnsafeError(text, name=entry.text, path=path)


def _are_one_tensor(one: Entry, other: Entry) -> bool:
    """Whether two entries are names of one tensor."""
    return isinstance(one.leaf, SavedTensor) and are_equal(one.leaf, other.leaf)


def _kept_keys(keys: tuple[Key, ...], text: str) -> tuple[Key, ...]:
    """Return the last keys with which a new text still ends: what moves with its mapping keeps its keys."""
    end, count = len(text), 0
    for key in reversed(keys):
        part = str(key)
        begin = end - len(part)
        if begin < 0 or text[begin:end] != part or (begin > 0 and text[begin - 1] != "."):
            break
        count, end = count + 1, begin - 1
    return keys[len(keys) - count :] if count else ()


def strips_wrappers(names: Collection[str], state: Any) -> bool:
    """Whether names of a source have parts that wrappers have put into them, and those of the state do not.

    Names of live modules have none; a mapping of the state may, as the state dict of a compiled model.
    """
    if all(name == without_wrappers(name) or without_wrappers(name) in names for name in names):
        return False
    steps = walk(state, lambda _, value: isinstance(value, Mapping) and not is_module(value))
    keys = (str(step.keys[-1]) for step in steps if step.keys)
    return all(key == without_wrappers(key) for key in keys)
