"""The path of an entry of a source: the keys under which it was saved, whose texts joined by dots are its name.

A path tells a key with a dot in it from two keys, the type of a key, and the items of a list from keys that are
numbers. A name that has no path is a name alone: nothing about it is guessed.
"""

from __future__ import annotations

from collections.abc import Iterable

from statexchange.sharding.paths import Path

__all__ = ["agreed_paths", "moved_path"]


def agreed_paths(paths: Iterable[tuple[str, Path | None]]) -> dict[str, Path]:
    """Return the path of each name that is always given with this one, and never with None."""
    agreed: dict[str, Path | None] = {}
    for name, path in paths:
        first = agreed.setdefault(name, path)
        if first is not path and not _is_same(first, path):
            agreed[name] = None
    return {name: path for name, path in agreed.items() if path is not None}


def _is_same(first: Path | None, other: Path | None) -> bool:
    if first is None or other is None:
        return False
    return first == other and list(map(type, first)) == list(map(type, other))


def moved_path(path: Path, old: str, new: str) -> Path | None:
    """Return the path of an entry that is renamed from `old` to `new`; None if it does not follow from the names.

    It follows if the name loses first keys, or gets new ones, which are the parts between the dots in front.
    """
    if new == old:
        return path
    if new.endswith(f".{old}"):
        return (*new[: -len(old) - 1].split("."), *path)
    if not old.endswith(f".{new}"):
        return None
    left = len(old) - len(new)  # characters of the keys that go, each with its dot
    for number, key in enumerate(path, 1):
        left -= len(str(key)) + 1
        if left <= 0:
            return path[number:] if left == 0 else None
    return None
