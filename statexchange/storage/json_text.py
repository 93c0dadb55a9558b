"""Parse the JSON of headers, indexes and manifests: strictly, and in bounded memory.

Stricter than Python's json: UTF-8 only, no NaN or Infinity, no duplicate keys, no deep nesting. Text that would take
far more memory once parsed than real headers do is refused before it is parsed.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from statexchange.errors import CorruptError
from statexchange.storage.files import check_size
from statexchange.values import MAX_DEPTH

if TYPE_CHECKING:
    from statexchange.storage.budget import Budget
    from statexchange.storage.store import StoredFile

__all__ = ["MAX_MANIFEST_BYTES", "check_parsed_size", "parse_json", "read_json"]

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
    if _is_deeper(text, parsed, max_depth):
        raise CorruptError(f"refused: it is nested more than {max_depth} levels deep", path=path)
    return parsed


def check_parsed_size(text: str, path: str, budget: Budget) -> None:
    """Spend the memory that JSON takes once parsed, estimated from its brackets, commas and colons.

    Raises CorruptError if the budget does not have it.
    """
    nbytes = _CONTAINER_BYTES * (text.count("[") + text.count("{")) + _VALUE_BYTES * text.count(",")
    repeated = sum(text.count(f'"{key}"') for key in _REPEATED_KEYS)
    nbytes += _KEY_BYTES * text.count(":") - (_KEY_BYTES - _REPEATED_KEY_BYTES) * repeated
    if nbytes > _MAX_PARSED_BYTES:
        raise CorruptError(f"refused: it would take {nbytes} bytes of memory once parsed", path=path)
    budget.of(path, 0).spend_memory(nbytes, text)


def _is_deeper(text: str, parsed: Any, limit: int) -> bool:
    """Whether more than `limit` containers lie in one another in parsed JSON, of which `text` is the text."""
    # Removing pairs of brackets takes a small part of the time of a walk. Brackets in strings, of which most texts have
    # none, can only make the nesting look deeper.
    brackets = text.encode("utf-8", "surrogatepass").translate(_ONE_KIND, _NO_BRACKETS)
    for _ in range(limit):
        brackets = brackets.replace(b"[]", b"")
        if not brackets:
            return False
    level = [parsed]
    for _ in range(limit):
        below = []
        for container in level:
            values = container.values() if isinstance(container, dict) else container
            below += [value for value in values if isinstance(value, dict | list)]
        if not below:
            return False
        level = below
    return True


_ONE_KIND, _NO_BRACKETS = bytes.maketrans(b"{}", b"[]"), bytes(set(range(256)) - set(b"[]{}"))


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        raise ValueError("a key occurs twice")
    return parsed


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)
