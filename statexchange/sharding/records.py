"""Encode and decode the typed records that ranks send each other; each field is checked when it is read.

The readers of fields raise ValueError, which `decoded` and `parsed` translate to a MismatchError with the rank of the
sender: a wrong record comes from another version of this package, not from a user's file.
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
    """Return `record.to_json()` as bytes."""
    return json.dumps(record.to_json(), separators=(",", ":")).encode()


def decoded(data: bytes, read: Callable[[Any], T], what: str, rank: int) -> T:
    """Decode a record that `rank` encoded; `read` is its `from_json`, and `what` names it in a MismatchError."""
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _mismatch(error, what, rank) from error
    return parsed(raw, read, what, rank)


def parsed(raw: Any, read: Callable[[Any], T], what: str, rank: int) -> T:
    """Read a record that `rank` sent as a JSON value; raise MismatchError if it is broken."""
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
    """Return the values of an object that has exactly these fields."""
    if type(raw) is dict and len(raw) == len(names):
        try:
            return [raw[name] for name in names]
        except KeyError:
            pass
    raise ValueError(f"not an object of {', '.join(names)}: {excerpt(raw)}")


def count(raw: Any, below: int | None = None) -> int:
    """Return a non-negative integer, less than `below` if that is given."""
    if type(raw) is not int or raw < 0 or (below is not None and raw >= below):
        limit = "" if below is None else f" below {below}"
        raise ValueError(f"not a number{limit}: {excerpt(raw)}")
    return raw


def text(raw: Any) -> str:
    """Return a string."""
    if type(raw) is not str:
        raise ValueError(f"not a text: {excerpt(raw)}")
    return raw


def flag(raw: Any) -> bool:
    """Return a bool."""
    if type(raw) is not bool:
        raise ValueError(f"neither true nor false: {excerpt(raw)}")
    return raw


def optional(raw: Any, read: Callable[[Any], T]) -> T | None:
    """Return None, or the value that `read` returns."""
    return None if raw is None else read(raw)


def items(raw: Any, read: Callable[[Any], T], length: int | None = None) -> tuple[T, ...]:
    """Return a list's items, each read by `read`; `length` is their required number."""
    if not isinstance(raw, list | tuple) or (length is not None and len(raw) != length):
        size = "" if length is None else f" of {length}"
        raise ValueError(f"not a list{size}: {excerpt(raw)}")
    return tuple(map(read, raw))


def number(raw: Any) -> float:
    """Return a float."""
    if type(raw) is not float:
        raise ValueError(f"not a floating number: {excerpt(raw)}")
    return raw


def mapping(raw: Any, read: Callable[[Any], T]) -> dict[str, T]:
    """Return an object with each value read by `read`."""
    if type(raw) is not dict or not all(type(key) is str for key in raw):
        raise ValueError(f"not an object: {excerpt(raw)}")
    return {key: read(value) for key, value in raw.items()}


def texts(raw: Any) -> dict[str, str]:
    """Return an object whose values are strings."""
    if type(raw) is not dict or not all(type(part) is str for part in (*raw.keys(), *raw.values())):
        raise ValueError(f"not an object of texts: {excerpt(raw)}")
    return raw


def pair(raw: Any, below: Sequence[int | None] = (None, None)) -> tuple[int, int]:
    """Return two non-negative integers, each less than its limit."""
    if not isinstance(raw, list | tuple) or len(raw) != 2:
        raise ValueError(f"not a pair: {excerpt(raw)}")
    return count(raw[0], below[0]), count(raw[1], below[1])
