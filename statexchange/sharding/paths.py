"""Paths of a state: the keys that lead to a place in it, and their text, joined by dots as in torch's FQNs.

Wrappers of modules put parts of their own into these texts, and the rules here remove them. torch.compile, FSDP1 and
activation checkpointing put theirs anywhere; no attribute of a model is called so. DistributedDataParallel and
AveragedModel put ``module.`` in front of all names. A user's own attribute may have that name, too, so it is removed
only where all names begin with it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from statexchange.errors import excerpt
from statexchange.sharding.options import renamed

__all__ = [
    "WRAPPERS",
    "Key",
    "ListItem",
    "Path",
    "TupleItem",
    "have_wrappers",
    "is_index",
    "joined",
    "module_prefix",
    "note_on_wrappers",
    "paths_above",
    "text_of",
    "without_wrappers",
    "wrapper_rules",
]

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


WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_PARTS = rf"(?<![^.])(?:{'|'.join(sorted(WRAPPERS))})\."
_ANY_PART = re.compile("|".join(sorted(WRAPPERS)))
_MODULE = "module."


def have_wrappers(names: Iterable[str]) -> bool:
    """Whether a wrapper has put a part into one of these names; true of a few others, too."""
    return _ANY_PART.search("\n".join(names)) is not None


def without_wrappers(name: str) -> str:
    """Return a name without the parts that wrappers put anywhere into it."""
    if _ANY_PART.search(name) is None:  # nearly all
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def module_prefix(names: Collection[str]) -> str:
    """Return the ``module.`` that DistributedDataParallel puts in front of all names; "" if one lacks it."""
    return _MODULE if names and all(name.startswith(_MODULE) for name in names) else ""


def wrapper_rules(names: Collection[str]) -> list[tuple[str, str]]:
    """Return (regex, replacement) pairs that remove the parts of wrappers from all names of a model; [] without any.

    Example:
        >>> wrapper_rules(["module.a._orig_mod.w", "module.b.w"])
        [('(?<![^.])(?:_checkpoint_wrapped_module|_fsdp_wrapped_module|_orig_mod)\\\\.', ''), ('^module\\\\.', '')]
    """
    clean = [without_wrappers(name) for name in names]
    rules = [(_PARTS, "")] if any(map(str.__ne__, clean, names)) else []
    # A prefix of the first and the last name in sorted order is a prefix of all. A model can be wrapped several times.
    first, last = min(clean, default=""), max(clean, default="")
    shortest = min(map(len, clean), default=0)
    end = 0
    while end + len(_MODULE) < shortest and first.startswith(_MODULE, end) and last.startswith(_MODULE, end):
        end += len(_MODULE)
    return [*rules, (f"^{re.escape(first[:end])}", "")] if end else rules


def note_on_wrappers(names: Collection[str], rules: Sequence[tuple[str, str]]) -> str:
    """Return a note on the parts that `rules` remove from the names, with one of these as an example."""
    changed = sorted(name for name in names if renamed(name, rules) != name)
    example = f"{excerpt(changed[0])} is {excerpt(renamed(changed[0], rules))}"
    return f"parts that wrappers put into names were removed from {len(changed):,} of {len(names):,}: {example}"
