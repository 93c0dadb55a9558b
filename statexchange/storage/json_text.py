"""Strict JSON: the text of headers, indexes and manifests, in which a key that occurs twice is an error."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from statexchange.errors import CorruptError, StateExchangeError, excerpt
from statexchange.storage.files import check_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from statexchange.storage.store import StoredFile

__all__ = ["MAX_MANIFEST_BYTES", "decode_stored", "is_readable", "parse_json", "read_json"]

MAX_MANIFEST_BYTES = 256 << 20  # limit of manifests, indexes and records: some four million boxes
_WINDOW_BYTES = 8 << 20
# What Python makes of each list or object, key and value. A key that occurs again costs less: it is kept once.
_CONTAINER_BYTES, _KEY_BYTES, _VALUE_BYTES, _REPEATED_KEY_BYTES = 64, 200, 12, 90
_REPEATED_KEYS = ("dtype", "shape", "data_offsets", "file", "source", "boxes", "digests", "global_shape")
_FREE_BYTES, _MAX_GROWTH, _MAX_PARSED_BYTES = 32 << 20, 12, 1 << 30


def read_json(file: StoredFile, limit: int = MAX_MANIFEST_BYTES) -> object:
    """Return the JSON object in a file; anything else, or a file of more than `limit` bytes, is a CorruptError.

    It is read window by window and refused at the first one that cannot be JSON, as in a sparse file.
    """
    check_size(file.size, limit, file.path)
    data = bytearray()  # it grows with what is read: making it of its full size would touch all of its memory
    while len(data) < file.size or not data:
        window = bytearray(min(_WINDOW_BYTES, file.size - len(data)))
        file.read_into(memoryview(window), len(data))
        if not data and not window[:64].lstrip().startswith(b"{"):
            raise CorruptError("broken JSON: it is no object", path=file.path)
        if 0 in window:
            problem = f"broken JSON: byte {len(data) + window.index(0)} is zero, as if it had not been written"
            raise CorruptError(problem, path=file.path)
        data += window
    return parse_json(data, file.path)


def parse_json(data: bytes | bytearray | memoryview | str, path: str) -> object:
    """Return parsed JSON; broken text or a key that occurs twice is a CorruptError.

    So is text that would take more than 12 times its size, or 1 GiB, once parsed: no header or manifest is so dense.
    """
    try:
        text = data if isinstance(data, str) else str(data, "utf-8")  # given bytes, json would accept UTF-16 too
        if is_readable(text):
            return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"broken JSON: {error}", path=path) from None
    problem = f"refused: parsed, these {len(text)} characters of JSON would take more memory than any real ones"
    raise CorruptError(problem, path=path)


def decode_stored(
    text: str, path: str, *, types: Mapping[str, type] | None = None, leaf: Callable[[str], Any] | None = None
) -> Any:
    """Return `values.decode` of text from a file; text that `values.encode` cannot have written is a CorruptError."""
    from statexchange import values  # not at the start of a command that looks at headers only

    try:
        return values.decode(text, types=types, leaf=leaf, parse=lambda data: parse_json(data, path))
    except StateExchangeError:
        raise
    except ValueError as error:
        raise CorruptError(f"broken config: {excerpt(str(error), 200)}", path=path) from None


def is_readable(text: str) -> bool:
    """Return whether `parse_json` accepts the density of a text. Its memory is estimated, from above, by counting."""
    limit = min(_FREE_BYTES + _MAX_GROWTH * len(text), _MAX_PARSED_BYTES)
    if len(text) * _KEY_BYTES <= limit:
        return True
    nbytes = _CONTAINER_BYTES * (text.count("[") + text.count("{")) + _VALUE_BYTES * text.count(",")
    if nbytes > limit:
        return False
    repeated = sum(text.count(f'"{key}"') for key in _REPEATED_KEYS)
    return nbytes + _KEY_BYTES * text.count(":") - (_KEY_BYTES - _REPEATED_KEY_BYTES) * repeated <= limit


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found
