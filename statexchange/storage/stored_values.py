"""Decode values (values.py) that were read from a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statexchange import values
from statexchange.errors import CorruptError, StateExchangeError, excerpt
from statexchange.storage.json_text import parse_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["decode_stored", "plain_stored"]


def decode_stored(
    text: str, path: str, *, types: Mapping[str, type] | None = None, leaf: Callable[[str], Any] | None = None
) -> Any:
    """Return `values.decode` of text from a file; raise CorruptError for text that `values.encode` cannot write."""
    return _checked(
        lambda: values.decode(text, types=types, leaf=leaf, parse=lambda data: parse_json(data, path)), path
    )


def plain_stored(text: str, path: str) -> Any:
    """Return `values.to_plain` of text from a file; raise CorruptError for text that `values.encode` cannot write."""
    return _checked(lambda: values.to_plain(text, parse=lambda data: parse_json(data, path)), path)


def _checked(decode: Callable[[], Any], path: str) -> Any:
    try:
        return decode()
    except StateExchangeError:
        raise
    except ValueError as error:
        raise CorruptError(f"broken config: {excerpt(str(error), 200)}", path=path) from None
