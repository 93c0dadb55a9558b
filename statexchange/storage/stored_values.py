"""Decode values (values.py) that were read from a file."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from statexchange import values
from statexchange.errors import CorruptError, StateExchangeError, excerpt
from statexchange.storage.json_text import parse_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from statexchange.storage.budget import Budget

__all__ = ["decode_stored", "parse_stored", "plain_stored"]

_JSON_PER_LEVEL = 3  # nested JSON containers for one container of a value, at most: an object, a list and its pairs


def parse_stored(text: str | bytes, path: str, budget: Budget) -> object:
    """Return the JSON in text from a file that `values.encode` wrote; raise CorruptError for text that is broken."""
    return parse_json(text, path, budget, max_depth=_JSON_PER_LEVEL * (values.MAX_DEPTH + 1))


def decode_stored(
    text: str,
    path: str,
    budget: Budget,
    *,
    types: Mapping[str, type] | None = None,
    leaf: Callable[[str], Any] | None = None,
    unknown: Callable[[str, str, str], Any] | None = None,
) -> Any:
    """Return `values.decode` of text from a file; raise CorruptError for text that `values.encode` cannot write."""
    with _broken_config(path):
        parse = functools.partial(parse_stored, path=path, budget=budget)
        return values.decode(text, types=types, leaf=leaf, unknown=unknown, parse=parse)


def plain_stored(text: str, path: str, budget: Budget) -> Any:
    """Return `values.to_plain` of text from a file; raise CorruptError for text that `values.encode` cannot write."""
    with _broken_config(path):
        return values.to_plain(text, parse=lambda data: parse_stored(data, path, budget))


@contextlib.contextmanager
def _broken_config(path: str) -> Iterator[None]:
    """Turn a ValueError of the block into CorruptError."""
    try:
        yield
    except StateExchangeError:
        raise
    except ValueError as error:
        raise CorruptError(f"broken config: {excerpt(str(error), 200)}", path=path) from None
