"""Recognise foreign files by their first bytes."""

from __future__ import annotations

import struct

__all__ = ["GGUF_MAGIC", "NPY_MAGIC", "is_gguf", "is_map_of_text", "is_npy", "is_npz"]

GGUF_MAGIC, NPY_MAGIC = b"GGUF", b"\x93NUMPY"
_ZIP_LOCAL = struct.Struct("<4s5H3L2H")


def is_gguf(start: bytes) -> bool:
    """Whether a file begins as GGUF."""
    return start.startswith(GGUF_MAGIC)


def is_npy(start: bytes) -> bool:
    """Whether a file begins as an array of numpy."""
    return start.startswith(NPY_MAGIC)


def is_npz(start: bytes) -> bool:
    """Whether a file begins as a zip whose first member is called ``*.npy``."""
    if not start.startswith(b"PK\3\4") or len(start) < _ZIP_LOCAL.size:
        return False
    length = _ZIP_LOCAL.unpack_from(start)[9]
    return start[_ZIP_LOCAL.size : _ZIP_LOCAL.size + length].endswith(b".npy")


def is_map_of_text(start: bytes) -> bool:
    """Whether a file begins as a map whose first key is printable text, and is neither a pickle nor other text."""
    if len(start) < 2 or not (0x81 <= start[0] <= 0x8F or start[0] in (0xDE, 0xDF)):
        return False
    at = {0xDE: 3, 0xDF: 5}.get(start[0], 1)
    first = start[at : at + 1]
    if not first or not (0xA1 <= first[0] <= 0xBF or first[0] == 0xD9):
        return False
    begin = at + (2 if first[0] == 0xD9 else 1)
    length = start[at + 1] if first[0] == 0xD9 and len(start) > at + 1 else first[0] & 0x1F
    key = start[begin : begin + length]
    return bool(key) and key.isascii() and key.decode().isprintable()
