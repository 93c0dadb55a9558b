"""Make small changes to a text in JSON, which may be no longer valid."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

import xxhash

MAX_STRUCTURED_BYTES = 256 << 10  # larger files are changed as bytes
MAX_DIRECTORY_DEPTH = 4
NUMBERS = (0, 1, 2, 3, 4, 7, 8, 63, 64, 65, 127, 128, 255, 256, 65535, 65536, 1 << 31, (1 << 32) - 1, 1 << 47)
LARGE = (1 << 48, (1 << 48) + 1, (1 << 53) + 1, 1 << 61, (1 << 63) - 1, 1 << 63, 1 << 64, 1 << 80, 10**400)
TEXTS = (
    "",
    "a",
    "w",
    "model",
    "model.safetensors",
    "../x",
    "/etc/passwd",
    "a/b",
    ".",
    "..",
    "a\0b",
    "a\nb",
    "\x1b[31mred",
    "\ud800",
    "é",
    "e\u0301",
    "__metadata__",
    "statexchange.json",
    "manifest.json",
    "save.json",
    ".metadata",
    "__0_0.distcp",
    "0" * 32,
    "n" * 513,
    "n" * 100_000,
    "model." * 200,
    "none",
    "NaN",
    "-1",
    "s3://joe:word@bucket/x?signature",
    "F32",
    "F64",
    "BF16",
    "I64",
    "U8",
    "C64",
    "C128",
    "F4",
    "F8_E4M3",
    "BOOL",
    "Q9",
    "F6_E2M3",
    "[]",
    "{}",
    "null",
    "x" * 70_000,
)
KEYS = (
    "dtype",
    "shape",
    "data_offsets",
    "__metadata__",
    "file",
    "files",
    "source",
    "boxes",
    "tensors",
    "aliases",
    "schema",
    "weight_map",
    "metadata",
    "statexchange",
    "DCP_SHARDING_INFO",
    "saved_offsets",
    "global_shape",
    "digests",
    "digest",
    "config",
    "pending",
    "world_size",
    "rank",
    "round",
    "run",
    "generation",
    "extra",
    "save",
    "job",
    "created",
    "step",
    "metrics",
    "$",
    "type",
    "value",
    "name",
    "grid",
    "mesh",
    "rules",
    "dim",
    "axis",
    "split",
    "blocks",
    "reduce",
    "renumber",
    "interleaved",
    "maxlen",
    "node_type",
    "data_type",
    "consolidated_metadata",
    "tree_metadata",
    "key_metadata",
    "value_metadata",
    "value_type",
    "write_shape",
)
TAGS = (
    "float",
    "tuple",
    "set",
    "frozenset",
    "deque",
    "complex",
    "number",
    "bytes",
    "path",
    "datetime",
    "date",
    "time",
    "timedelta",
    "size",
    "device",
    "dict",
    "dtype",
    "leaf",
    "enum",
    "namedtuple",
    "dataclass",
    "unknown",
)


# JSON


class Pairs(list):  # type: ignore[type-arg]
    """A JSON object as a list of [key, value] lists, so that keys may be equal."""


@dataclass
class Raw:
    """Text that is written as it is in place of a value."""

    text: str


RAW = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-0",
    "-0.0",
    "1E5",
    "0.5",
    "9" * 5000,
    "[" * 100_000 + "]" * 100_000,
    '{"a":' * 3000 + "0" + "}" * 3000,
    '[{"$":"tuple","value":' * 900 + "0" + "}]" * 900,
    "",
    "nul",
    "01",
    '"\\ud800"',
    "\0",
)


def mutated_json(text: str, chance: random.Random) -> tuple[str, str]:
    """Change one value, key or entry of JSON; in a value that is itself JSON as text, change that."""
    root = json.loads(text, object_pairs_hook=lambda pairs: Pairs([list(pair) for pair in pairs]))
    holder = [root]
    slots = _slots(holder)
    container, at = chance.choice(slots)
    place = container[at]
    value = place[1] if isinstance(container, Pairs) else place
    is_json = isinstance(value, str) and value[:1] in ("{", "[") and len(value) > 2
    if is_json and chance.random() < 0.9:
        inner, what = mutated_json(value, chance)
        _put(container, at, inner)
        return _dumped(holder[0]), f"inside text: {what}"
    act = chance.choice(
        (_replace, _replace, _replace, _tweak, _tweak, _delete, _double, _swap, _rename, _insert, _wrap)
    )
    what = act(container, at, slots, chance)
    return _dumped(holder[0]), f"{act.__name__[1:]} {what}"


def _slots(holder: list[Any]) -> list[tuple[Any, int]]:
    """Return the place of every value: a list or Pairs, and the index in it."""
    found: list[tuple[Any, int]] = []
    waiting: list[Any] = [holder]
    while waiting:
        container = waiting.pop()
        for at, item in enumerate(container):
            found.append((container, at))
            value = item[1] if isinstance(container, Pairs) else item
            if isinstance(value, list):
                waiting.append(value)
    return found


def _get(container: Any, at: int) -> Any:
    return container[at][1] if isinstance(container, Pairs) else container[at]


def _put(container: Any, at: int, value: Any) -> None:
    if isinstance(container, Pairs):
        container[at][1] = value
    else:
        container[at] = value


def _any_value(chance: random.Random) -> Any:
    kind = chance.randrange(9)
    if kind < 2:
        return chance.choice((*NUMBERS, *LARGE)) * chance.choice((1, 1, 1, -1))
    if kind < 4:
        return chance.choice(TEXTS)
    if kind == 4:
        return Raw(chance.choice(RAW))
    if kind == 5:
        return chance.choice((None, True, False, 0.5))
    if kind == 6:
        return [chance.choice(NUMBERS) for _ in range(chance.choice((0, 1, 2, 3, 65, 2000)))]
    if kind == 7:
        return Pairs([["$", chance.choice(TAGS)], ["type", chance.choice(TEXTS)], ["value", chance.choice(TEXTS)]])
    return Pairs([[chance.choice(KEYS), chance.choice(NUMBERS)] for _ in range(chance.randrange(3))])


def _replace(container: Any, at: int, slots: list[Any], chance: random.Random) -> str:
    value = _any_value(chance)
    _put(container, at, value)
    return f"with {value!r:.60}"


def _tweak(container: Any, at: int, slots: list[Any], chance: random.Random) -> str:
    """Replace a value by one near it, or by one from another place."""
    value = _get(container, at)
    if type(value) is int:
        value = chance.choice(
            (value + 1, value - 1, -value, value * 2, value // 2, value + (1 << 32), float(value), str(value))
        )
    elif isinstance(value, str) and chance.random() < 0.5:
        value = chance.choice(
            (value + "x", value[:-1], value.upper(), value * 2, f"{value}/..", f"\0{value}", f"module.{value}")
        )
    else:
        value = _get(*chance.choice(slots))
        if isinstance(value, list):
            value = Raw(_dumped(value))  # a copy, which cannot hold itself
    _put(container, at, value)
    return f"to {value!r:.60}"


def _delete(container: Any, at: int, slots: list[Any], chance: random.Random) -> str:
    if len(slots) == 1 or container is slots[0][0]:  # the root cannot be deleted
        return "nothing"
    return f"{container.pop(at)!r:.60}"


def _double(container: Any, at: int, slots: list[Any], chance: random.Random) -> str:
    text = _dumped(_get(container, at))
    if isinstance(container, Pairs):  # the same key, or one that is near
        key = container[at][0]
        container.insert(chance.randrange(len(container) + 1), [chance.choice((key, f"{key}2")), Raw(text)])
        return f"key {key!r:.60}"
    container.insert(at, Raw(text))
    return f"item {text:.60}"


def _swap(container: Any, at: int, slots: list[Any], chance: random.Random) -> str:
    other, there = chance.choice(slots)
    one, two = Raw(_dumped(_get(container, at))), Raw(_dumped(_get(other, there)))
    _put(container, at, two)
    _put(other, there, one)
    return f"{one.text:.30} and {two.text:.30}"


def _rename(container: Any, at: int, slots: list[Any], chance: random.Random) -> str:
    if not isinstance(container, Pairs):
        return _replace(container, at, slots, chance)
    container[at][0] = chance.choice((*TEXTS, *KEYS, f"{container[at][0]}.x"))
    return f"to {container[at][0]!r:.60}"


def _insert(container: Any, at: int, slots: list[Any], chance: random.Random) -> str:
    value = _any_value(chance)
    inside = _get(container, at)
    target = inside if isinstance(inside, list) else container
    key = chance.choice((*TEXTS, *KEYS))
    target.insert(chance.randrange(len(target) + 1), [key, value] if isinstance(target, Pairs) else value)
    return f"{key!r:.40} {value!r:.60}"


def _wrap(container: Any, at: int, slots: list[Any], chance: random.Random) -> str:
    depth = chance.choice((1, 2, 101, 500, 2000, 50_000))
    opening, closing = chance.choice((("[", "]"), ('{"a":', "}"), ('{"$":"tuple","value":[', "]}")))
    _put(container, at, Raw(opening * depth + _dumped(_get(container, at)) + closing * depth))
    return f"in {depth} of {opening}"


_ACTS = (_replace, _replace, _replace, _tweak, _tweak, _delete, _double, _swap, _rename, _insert, _wrap)


def _dumped(value: Any) -> str:
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{json.dumps(key)}:{_dumped(item)}" for key, item in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_dumped, value)) + "]"
    return _number(value) if type(value) is int else json.dumps(value)


def _number(value: int) -> str:
    return hex(value)[2:] if abs(value) > 10**4000 else str(value)


def json_file(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    text, what = mutated_json(data.decode(), chance)
    if ('"generation"' in text or '"metrics"' in text) and chance.random() < 0.7:
        text = with_own_digest(text)
    return text.encode("utf-8", "surrogatepass"), what


def with_own_digest(text: str) -> str:
    """The manifest of a round or a save with the digest that it has to have."""
    try:
        raw = json.loads(text)
        del raw["digest"]
        record = json.dumps(raw, sort_keys=True, separators=(",", ":"))
    except (KeyError, RecursionError, TypeError, ValueError):
        return text
    return json.dumps({**raw, "digest": xxhash.xxh3_128_hexdigest(record.encode())})
