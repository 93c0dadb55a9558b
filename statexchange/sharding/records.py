"""Typed fields of the records that ranks send each other: each is checked where it is read.

What is wrong is a ValueError, which `decoded` makes a MismatchError naming the rank that sent the record. Such a record
comes from another version of this package, not from a user's file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from statexchange.errors import MismatchError, StateExchangeError, excerpt

__all__ = [
    "count",
    "decoded",
    "encoded",
    "fields",
    "flag",
    "items",
    "mapping",
    "number",
    "optional",
    "pair",
    "parsed",
    "text",
    "texts",
]

T = TypeVar("T")


def encoded(record: Any) -> bytes:
    """The `to_json` of a record as bytes."""
    return json.dumps(record.to_json(), separators=(",", ":")).encode()


def decoded(data: bytes, read: Callable[[Any], T], what: str, rank: int) -> T:
    """The record that `encoded` wrote on `rank`, by its `from_json`; MismatchError for anything else."""
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _mismatch(error, what, rank) from error
    return parsed(raw, read, what, rank)


def parsed(raw: Any, read: Callable[[Any], T], what: str, rank: int) -> T:
    """The record that `rank` has sent as the JSON value `raw`, by its `from_json`; MismatchError for anything else."""
    try:
        return read(raw)
    except StateExchangeError:
        raise
    except (ValueError, RecursionError) as error:
        raise _mismatch(error, what, rank) from error


def _mismatch(error: Exception, what: str, rank: int) -> MismatchError:
    return MismatchError(
        f"cannot read {what} that rank {rank} sent ({error}): run the same version of statexchange on all ranks",
        rank=rank,
    )


def fields(raw: Any, *names: str) -> list[Any]:
    """The values of an object that has these fields and no others."""
    if type(raw) is dict and len(raw) == len(names):
        try:
            return [raw[name] for name in names]
        except KeyError:
            pass
    raise ValueError(f"not an object of {', '.join(names)}: {excerpt(raw)}")


def count(raw: Any, below: int | None = None) -> int:
    """A whole number from 0 on, less than `below` if that is given."""
    if type(raw) is not int or raw < 0 or (below is not None and raw >= below):
        limit = "" if below is None else f" below {below}"
        raise ValueError(f"not a number{limit}: {excerpt(raw)}")
    return raw


def text(raw: Any) -> str:
    """A text."""
    if type(raw) is not str:
        raise ValueError(f"not a text: {excerpt(raw)}")
    return raw


def flag(raw: Any) -> bool:
    """True or False."""
    if type(raw) is not bool:
        raise ValueError(f"neither true nor false: {excerpt(raw)}")
    return raw


def optional(raw: Any, read: Callable[[Any], T]) -> T | None:
    """None, or what `read` makes of it."""
    return None if raw is None else read(raw)


def items(raw: Any, read: Callable[[Any], T], length: int | None = None) -> tuple[T, ...]:
    """A list, of `length` items if that is given, each as `read` makes it."""
    if not isinstance(raw, list | tuple) or (length is not None and len(raw) != length):
        wanted = "" if length is None else f" of {length}"
        raise ValueError(f"not a list{wanted}: {excerpt(raw)}")
    return tuple(map(read, raw))


def number(raw: Any) -> float:
    """A floating number."""
    if type(raw) is not float:
        raise ValueError(f"not a floating number: {excerpt(raw)}")
    return raw


def mapping(raw: Any, read: Callable[[Any], T]) -> dict[str, T]:
    """An object, each value as `read` makes it."""
    if type(raw) is not dict or not all(type(key) is str for key in raw):
        raise ValueError(f"not an object: {excerpt(raw)}")
    return {key: read(value) for key, value in raw.items()}


def texts(raw: Any) -> dict[str, str]:
    """An object of texts."""
    if type(raw) is not dict or not all(type(part) is str for pair in raw.items() for part in pair):
        raise ValueError(f"not an object of texts: {excerpt(raw)}")
    return raw


def pair(raw: Any, below: Sequence[int | None] = (None, None)) -> tuple[int, int]:
    """Two whole numbers from 0 on, each less than its limit."""
    if not isinstance(raw, list | tuple) or len(raw) != 2:
        raise ValueError(f"not a pair: {excerpt(raw)}")
    return count(raw[0], below[0]), count(raw[1], below[1])
