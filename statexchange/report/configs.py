"""Read the configs in a checkpoint, and find where those of several ranks differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from statexchange.storage.location import decode_stored
from statexchange.values import to_plain

if TYPE_CHECKING:
    from statexchange.formats.source import Source
    from statexchange.storage.store import Budget


@dataclass(frozen=True, slots=True)
class ConfigFacts:
    """A config in two facts.

    Attributes:
        num_keys: number of keys, or fields; None if it is no mapping and has no fields.
        type: name of its dataclass, namedtuple or Enum; None for any other value.
    """

    num_keys: int | None
    type: str | None


@dataclass(frozen=True, slots=True)
class RanksValue:
    """The value of a key on some ranks; `is_present` is False for ranks without the key."""

    ranks: tuple[int, ...]
    is_present: bool
    value: Any


@dataclass(frozen=True, slots=True)
class DifferingKey:
    """A key, as ``model.layers[0].size``, with its values, each with the ranks that agree on it."""

    key: str
    values: tuple[RanksValue, ...]


@dataclass(frozen=True, slots=True)
class ConfigComparison:
    """The common part of configs, and the keys in which they differ.

    Attributes:
        common: the values on which all agree, None if there are none. A list of which only some items agree is a dict
            of them, with keys such as ``[0]``.
        differing: the other keys.
    """

    common: Any
    differing: tuple[DifferingKey, ...]


def config_facts(text: str, path: str, budget: Budget) -> ConfigFacts:
    """Return the facts of a config in a file at `path`; raise CorruptError for a broken one."""
    config = decode_stored(text, path, budget, to_plain)
    if not isinstance(config, dict):
        return ConfigFacts(None, None)
    name = config.get("__name__")
    # The name stands among the fields, and is none. A mapping of the user may have any value under this key.
    if isinstance(name, str):
        return ConfigFacts(len(config) - 1, name)
    return ConfigFacts(len(config), None)


def plain_configs(source: Source) -> dict[tuple[int, ...], Any]:
    """Return the distinct configs of a source as values of JSON, by the ranks that have each. Not collective.

    Raises:
        CorruptError: a config is broken.
    """
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(source.configs.items()):
        ranks.setdefault(text, []).append(rank)
    # Thousands of ranks mostly have one text, which is parsed once.
    configs = {}
    for text, of_text in ranks.items():
        configs[tuple(of_text)] = decode_stored(text, source.path, source.budget, to_plain)
    return configs


def plain_entries(source: Source) -> dict[str, Any]:
    """Return the values of those entries of a source that are not tensors and that were read. Not collective."""
    entries = {}
    for name, text in source.texts.items():
        if name in source.others:
            entries[name] = decode_stored(text, source.path, source.budget, to_plain)
    return entries


def compare_configs(configs: Mapping[tuple[int, ...], Any]) -> ConfigComparison:
    """Compare the configs of ranks, given by the ranks that have each. Not collective.

    Example:
        >>> comparison = compare_configs({(0, 1): {"hidden": 8, "offset": 0}, (2,): {"hidden": 8, "offset": 2}})
        >>> comparison.common
        {'hidden': 8}
        >>> [(key.key, [(value.ranks, value.value) for value in key.values]) for key in comparison.differing]
        [('offset', [((0, 1), 0), ((2,), 2)])]
    """
    differing: list[DifferingKey] = []
    common = _compare("", [RanksValue(ranks, True, config) for ranks, config in configs.items()], differing)
    return ConfigComparison(None if common is _NOTHING else common, tuple(differing))


_NOTHING = object()  # the common part of values that agree on nothing


def _compare(key: str, values: Sequence[RanksValue], differing: list[DifferingKey]) -> Any:
    """Return what values have in common; add the keys in which they differ to `differing`."""
    agreeing = list(_grouped(values))
    if len(agreeing) == 1:
        return agreeing[0].value
    # Only containers with items on all ranks are compared item by item; anything else differs as a whole.
    items = [_items(value.value) for value in values if value.is_present]
    if len(items) < len(values) or not all(items):
        differing.append(DifferingKey(key, tuple(agreeing)))
        return _NOTHING
    common = {}
    # In the order of the first rank that has each key.
    for name in dict.fromkeys(chain.from_iterable(items)):
        below = []
        for value, of_value in zip(values, items, strict=True):
            below.append(RanksValue(value.ranks, name in of_value, of_value.get(name)))
        joint = "." if key and not name.startswith("[") else ""
        shared = _compare(f"{key}{joint}{name}", below, differing)
        if shared is not _NOTHING:
            common[name] = shared
    return common or _NOTHING


def _items(value: Any) -> dict[str, Any]:
    """Return the items of a mapping, or of a list that holds further containers, by key; {} for any other value."""
    if isinstance(value, dict):
        return value
    # A list of plain numbers, such as betas, reads best as a whole.
    if isinstance(value, list | tuple) and any(isinstance(item, dict | list | tuple) for item in value):
        return {f"[{index}]": item for index, item in enumerate(value)}
    return {}


def _grouped(values: Sequence[RanksValue]) -> Iterator[RanksValue]:
    """Yield the distinct values, each with all its ranks: 1, 1.0 and True differ, and NaN is equal to itself."""
    groups: dict[tuple[bool, str], tuple[RanksValue, list[int]]] = {}
    for value in values:
        # By repr, as values are not hashable, and == takes 1 for True.
        _, ranks = groups.setdefault((value.is_present, repr(value.value)), (value, []))
        ranks += value.ranks
    for first, ranks in groups.values():
        yield replace(first, ranks=tuple(sorted(ranks)))
