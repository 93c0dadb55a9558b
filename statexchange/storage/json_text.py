"""Strict JSON: the text of headers, indexes and manifests, in which a key that occurs twice is an error."""

from __future__ import annotations

import json

from statexchange.errors import CorruptError

__all__ = ["MAX_MANIFEST_BYTES", "parse_json"]

MAX_MANIFEST_BYTES = 1 << 30  # limit of manifests, indexes and records


def parse_json(data: bytes | bytearray | memoryview | str, path: str) -> object:
    """Return parsed JSON; broken text or a key that occurs twice is a CorruptError."""
    try:
        text = data if isinstance(data, str) else bytes(data).decode()  # given bytes, json would accept UTF-16 too
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"broken JSON: {error}", path=path) from None


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found
