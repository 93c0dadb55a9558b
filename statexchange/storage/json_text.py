"""The JSON of files: parse it strictly and in bounded memory, seal records with their digest, decode stored values.

Stricter than Python's json: UTF-8 only, no NaN or Infinity, no duplicate keys, no deep nesting. Text that would take
far more memory once parsed than real headers do is refused before it is parsed.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from statexchange import values
from statexchange.errors import CorruptError, StateExchangeError, excerpt
from statexchange.storage.files import check_size, digest
from statexchange.values import MAX_DEPTH

if TYPE_CHECKING:
    from collections.abc import Mapping

    from statexchange.storage.store import Budget, StoredFile

__all__ = [
    "MAX_MANIFEST_BYTES",
    "check_parsed_size",
    "decode_stored",
    "parse_json",
    "parse_stored",
    "plain_stored",
    "read_json",
    "seal",
    "unseal",
]

MAX_MANIFEST_BYTES = 256 << 20  # limit of manifests, indexes and records: some four million boxes
_WINDOW_BYTES = 8 << 20
# Memory of each parsed container, key and value. json keeps equal keys once, so a repeated key costs less.
_CONTAINER_BYTES, _KEY_BYTES, _VALUE_BYTES, _REPEATED_KEY_BYTES = 64, 200, 12, 90
_REPEATED_KEYS = ("dtype", "shape", "data_offsets", "file", "source", "boxes", "digests", "global_shape")
_MAX_PARSED_BYTES = 1 << 30  # of one text, whatever its budget


def read_json(file: StoredFile, limit: int = MAX_MANIFEST_BYTES) -> object:
    """Return the JSON object in a file.

    Raises CorruptError for anything else, and for a file of more than `limit` bytes. The file is read in windows and
    refused at the first window that cannot be JSON, so that a large sparse file costs one window.
    """
    check_size(file.size, limit, file.path)
    data = bytearray()  # grows with each window: allocating the full size would touch all of its memory
    while len(data) < file.size or not data:
        window = bytearray(min(_WINDOW_BYTES, file.size - len(data)))
        file.read_into(memoryview(window), len(data))
        if not data and not window[:64].lstrip().startswith(b"{"):
            raise CorruptError("broken JSON: it is not an object", path=file.path)
        if 0 in window:
            problem = f"broken JSON: byte {len(data) + window.index(0)} is zero, as if it had not been written"
            raise CorruptError(problem, path=file.path)
        data += window
    return parse_json(data, file.path, file.budget)


def parse_json(
    data: bytes | bytearray | memoryview | str, path: str, budget: Budget, *, max_depth: int = MAX_DEPTH
) -> object:
    """Return parsed JSON, which code may walk by recursion.

    Args:
        data: the text.
        path: the file's path for messages.
        budget: the budget of the source.
        max_depth: the most containers that may lie in one another.

    Raises:
        CorruptError: the text is broken, has duplicate keys, is nested too deeply, or would take more memory once
            parsed than the budget has: 16 times its size, and 32 MiB for all texts of a source together.
    """
    try:
        text = data if isinstance(data, str) else str(data, "utf-8")  # json.loads would also accept UTF-16 bytes
    except ValueError as error:
        raise CorruptError(f"broken JSON: {error}", path=path) from None
    check_parsed_size(text, path, budget)
    try:
        parsed = _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"broken JSON: {error}", path=path) from None
    return _with_objects(parsed, path, max_depth)


def check_parsed_size(text: str, path: str, budget: Budget) -> None:
    """Spend the memory that JSON takes once parsed, estimated from its brackets, commas and colons.

    Raises CorruptError if the budget does not have it.
    """
    nbytes = _CONTAINER_BYTES * (text.count("[") + text.count("{")) + _VALUE_BYTES * text.count(",")
    nbytes += _KEY_BYTES * text.count(":")
    for key in _REPEATED_KEYS:
        nbytes -= (_KEY_BYTES - _REPEATED_KEY_BYTES) * text.count(f'"{key}"')
    if nbytes > _MAX_PARSED_BYTES:
        raise CorruptError(f"refused: it would take {nbytes} bytes of memory once parsed", path=path)
    budget.spend_memory(nbytes, text, path)


def _with_objects(parsed: object, path: str, max_depth: int) -> object:
    """Return parsed JSON with dicts in the place of `_DECODER`'s tuples of (key, value) pairs, refused if too deep.

    Example: ``(("a", 1), ("b", [()]))`` becomes ``{"a": 1, "b": [{}]}``; ``(("a", 1), ("a", 2))`` is refused.
    """
    root = [parsed]
    level: list[dict[object, object] | list[object]] = [root]
    # Level by level, not by recursion: the text may be nested as deeply as the decoder allows.
    for _ in range(max_depth + 1):
        below: list[dict[object, object] | list[object]] = []
        for container in level:
            entries = container.items() if type(container) is dict else enumerate(container)
            for key, value in entries:
                if type(value) is tuple:
                    unique = dict(value)
                    if len(unique) != len(value):
                        raise CorruptError("broken JSON: a key occurs twice", path=path)
                    container[key] = unique  # type: ignore[call-overload]
                    below.append(unique)
                elif type(value) is list:
                    below.append(value)
        if not below:
            return root[0]
        level = below
    raise CorruptError(f"refused: it is nested more than {max_depth} levels deep", path=path)


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


# Objects come as tuples of pairs: in a dict, a key that occurs twice would be lost.
_DECODER = json.JSONDecoder(object_pairs_hook=tuple, parse_constant=_refuse_constant)


def seal(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record with its digest under the key ``digest``."""
    return {**record, "digest": _digest_of(record)}


def unseal(sealed: object) -> dict[str, Any]:
    """Return the record in what `seal` has returned; raise ValueError or KeyError for anything else."""
    if not isinstance(sealed, dict):
        raise ValueError("it is not an object")
    record = dict(sealed)
    if record.pop("digest") != _digest_of(record):
        raise ValueError("it differs from its own digest")
    return record


def _digest_of(record: Mapping[str, Any]) -> str:
    return digest(json.dumps(record, sort_keys=True, separators=(",", ":")).encode())


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
    leaves: Mapping[str, object] | None = None,
    unknown: list[values.UnknownValue] | None = None,
) -> Any:
    """Return `values.decode` of text from a file; raise CorruptError for text that `values.encode` cannot write."""
    parsed = parse_stored(text, path, budget)
    try:
        return values.decode_parsed(parsed, types=types, leaves=leaves, unknown=unknown)
    except StateExchangeError:
        raise
    except ValueError as error:
        raise _broken_config(error, path) from None


def plain_stored(text: str, path: str, budget: Budget) -> Any:
    """Return `values.to_plain` of text from a file; raise CorruptError for text that `values.encode` cannot write."""
    parsed = parse_stored(text, path, budget)
    try:
        return values.to_plain(parsed)
    except ValueError as error:
        raise _broken_config(error, path) from None


def _broken_config(error: ValueError, path: str) -> CorruptError:
    return CorruptError(f"broken config: {excerpt(str(error), 200)}", path=path)
