"""Paths of a state: the keys that lead to a place in it, and their text, joined by dots as in torch's FQNs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

__all__ = ["Key", "ListItem", "Path", "TupleItem", "is_index", "joined", "paths_above", "text_of"]

Key = object
Path = tuple[Key, ...]
_MAX_DIGITS = 19  # of an index; Python refuses to convert texts of more than 4,300


class ListItem(int):
    """The index of an item of a list, as a key of a path. It equals the integer: compare the types, too."""

    __slots__ = ()


class TupleItem(int):
    """The index of an item of a tuple, as a key of a path. It equals the integer: compare the types, too."""

    __slots__ = ()


def text_of(keys: Iterable[Key]) -> str:
    """Return the text of a path."""
    return ".".join(map(str, keys))


def joined(path: str, key: Key) -> str:
    """Return the text of the path of an entry of the container at `path`, which is "" for the whole state."""
    return f"{path}.{key}" if path else str(key)


def is_index(text: str) -> bool:
    """Whether a part of a text is a number as Python writes it, and short enough to be an index."""
    return len(text) < _MAX_DIGITS and text.isdecimal() and str(int(text)) == text


def paths_above(text: str) -> Iterator[str]:
    """Yield the text of each path above one, the shortest first, and last the path itself."""
    end = text.find(".")
    while end >= 0:
        yield text[:end]
        end = text.find(".", end + 1)
    yield text
