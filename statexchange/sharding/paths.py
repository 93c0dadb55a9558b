"""Paths of a state: the keys that lead to a place in it, and their text, joined by dots as in torch's FQNs.

A path tells a key with a dot in it from two keys, the type of a key, and the items of a list from keys that are
numbers. A source's name that has no path is a name alone: nothing about it is guessed.

Wrappers of modules put parts of their own into these texts, and the rules here remove them. torch.compile, FSDP1 and
activation checkpointing put theirs anywhere; no attribute of a model is called so. DistributedDataParallel and
AveragedModel put ``module.`` in front of all names. A user's own attribute may have that name, too, so it counts as
theirs only where all names begin with it; parameters of optimizers are also found by their names without it.

Adapters of PEFT put parts into names, too: ``base_layer``, and in the live model the name of the adapter, which no file
of PEFT or transformers has. Nothing removes these; a note names them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from statexchange.errors import excerpt
from statexchange.sharding.options import renamed

Key = object
Path = tuple[Key, ...]
_MAX_DIGITS = 19  # of an index, which no list has; Python refuses to convert texts of more than 4,300


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
    """Yield the text of each path above one, the shortest first, and last the path itself: "a", "a.b", "a.b.c"."""
    end = text.find(".")
    while end >= 0:
        yield text[:end]
        end = text.find(".", end + 1)
    yield text


# Paths of a source's entries


def agreed_paths(paths: Iterable[tuple[str, Path | None]]) -> dict[str, Path]:
    """Return the path of each name that is always given with this one, and never with None.

    Ranks that disagree know nothing of it: ``("a.0", ("a", "0"))`` and ``("a.0", ("a", 0))`` leave "a.0" out.
    """
    agreed: dict[str, Path] = {}
    unknown = set()
    for name, path in paths:
        if path is None:
            unknown.add(name)
            continue
        first = agreed.setdefault(name, path)
        # Equal keys may be of two types: 1 is no True, and no index.
        if first is not path and (first != path or list(map(type, first)) != list(map(type, path))):
            unknown.add(name)
    for name in unknown:
        agreed.pop(name, None)
    return agreed


def moved_path(path: Path, old: str, new: str) -> Path | None:
    """Return the path of an entry that is renamed from `old` to `new`; None if it does not follow from the names.

    It follows if the name loses first keys, or gets new ones, which are the parts between the dots in front. From
    "b.c.0" to "x.b.c.0" the path ("b.c", 0) becomes ("x", "b.c", 0).
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
        if left == 0:
            return path[number:]
        if left < 0:  # the new name begins inside a key
            return None
    return None


# What wrappers add


_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_ANY_PART = "|".join(sorted(_WRAPPERS))
_PARTS = rf"(?<![^.])(?:{_ANY_PART})\."
_MODULE = "module."

# Searches a text for the name of a part that wrappers add. A match may lie inside a longer part, so this only rules
# wrappers out. Many names are joined by newlines: one search takes less than one in each.
find_wrapper = re.compile(_ANY_PART).search


def without_wrappers(name: str) -> str:
    """Return a name without the parts that wrappers put anywhere into it."""
    if find_wrapper(name) is None:  # nearly all
        return name
    # Part by part, as a longer part may only contain a wrapper's.
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def module_prefix(names: Collection[str]) -> str:
    """Return the ``module.`` that DistributedDataParallel puts in front of all names; "" if one lacks it."""
    for name in names:
        if not name.startswith(_MODULE):
            return ""
    return _MODULE if names else ""


def wrapper_rules(names: Collection[str]) -> list[tuple[str, str]]:
    """Return (regex, replacement) pairs that remove the parts of wrappers from all names of a model; [] without any.

    Example:
        >>> wrapper_rules(["module.a._orig_mod.w", "module.b.w"])
        [('(?<![^.])(?:_checkpoint_wrapped_module|_fsdp_wrapped_module|_orig_mod)\\\\.', ''), ('^module\\\\.', '')]
    """
    rules = []
    clean = names
    if find_wrapper("\n".join(names)) is not None:
        clean = list(map(without_wrappers, names))
        # A part may only contain the name of one.
        if clean != [*names]:
            rules.append((_PARTS, ""))
    # What the first and the last name in sorted order begin with, all do.
    first, last = min(clean, default=""), max(clean, default="")
    shortest = min(map(len, clean), default=0)
    end = 0
    # Each of several wrappers adds its own, and a name is left after the last.
    while end + len(_MODULE) < shortest and first.startswith(_MODULE, end) and last.startswith(_MODULE, end):
        end += len(_MODULE)
    if end:
        rules.append((f"^{re.escape(first[:end])}", ""))
    return rules


def note_on_wrappers(names: Collection[str], rules: Sequence[tuple[str, str]]) -> str:
    """Return a note on the parts that `rules` remove from the names, with one of these as an example."""
    changed = []
    for name in names:
        new = renamed(name, rules)
        if new != name:
            changed.append((name, new))
    old, new = min(changed)
    example = f"{excerpt(old)} is {excerpt(new)}"
    return f"parts that wrappers put into names were removed from {len(changed):,} of {len(names):,}: {example}"


ADAPTER_PREFIX = "base_model.model."  # all names in an adapter that PEFT saves begin with it
_METHODS = (
    "lora|ia3|hada|lokr|oft|boft|fourierft|hra|miss|trainable_tokens|vera|vblora|adaption|bone|shira|c3a|randlora|road"
)
_ADAPTER_PARAMETER = re.compile(rf"[._]({_METHODS})_")
_NAMED_ADAPTER = re.compile(rf"\.(({_METHODS})_[A-Za-z0-9_]+|modules_to_save)\.(?!weight$|bias$)[^.]+(\.|$)")
_LIVE_MODEL = re.compile(r"\.(base_layer|original_module)\.|^prompt_encoder\.[^.]+\.embedding\.weight$")
# The wrapped weight of a layer shows a whole model. PEFT writes those of embeddings, and biases, into adapters.
_BASE_LAYER = re.compile(r"(?<!embed_tokens)(?<!lm_head)\.base_layer\.(?!bias$)")


def is_adapter(names: Collection[str], *, has_config: bool = False) -> bool:
    """Whether tensors of these names are an adapter of PEFT and not a whole model.

    `has_config` says that an adapter_config.json lies beside them: then PEFT's prefix may be missing.
    """
    if "prompt_embeddings" in names or not names:
        return bool(names)
    if has_config and all(map(_ADAPTER_PARAMETER.search, names)):
        return True
    if any(not name.startswith(ADAPTER_PREFIX) or _BASE_LAYER.search(name) for name in names):
        return False
    return has_config or any(map(_ADAPTER_PARAMETER.search, names))


def note_on_adapters(names: Collection[str]) -> tuple[str, ...]:
    """Return a note if a name is that of a live model with an adapter of PEFT, which no program finds in files."""
    live = next(filter(_NAMED_ADAPTER.search, names), None)
    if live is None and not is_adapter(names):
        live = next(filter(_LIVE_MODEL.search, names), None)
    if live is None:
        return ()
    advice = "its save_pretrained writes what PEFT loads; load_checkpoint fills such a model from here"
    return (f"no program finds names such as {live}: a live model with an adapter of PEFT has these, and {advice}",)
