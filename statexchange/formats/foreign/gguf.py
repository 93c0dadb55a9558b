"""Show GGUF files, in which llama.cpp keeps models: their metadata and tensors, with quantised dtypes by name.

Layout: magic, version, number of tensors, number of metadata entries; the metadata; a record of each tensor; then the
tensors' bytes. Shapes are stored with the fastest dim first, and shown as torch shows them.
"""

from __future__ import annotations

import math
import struct
from typing import Any

from statexchange.errors import CorruptError, UnsupportedError, excerpt
from statexchange.formats.foreign.contents import Contents, Cursor, described_tensor
from statexchange.formats.foreign.starts import GGUF_MAGIC
from statexchange.formats.source import UnreadableTensor
from statexchange.storage.store import StoredFile
from statexchange.storage.tensorfile import wrong_kind_of

__all__ = ["read"]

_VERSIONS = (2, 3)
_MAX_DIMS = 8  # llama.cpp writes at most 4
_MAX_SHOWN_BYTES = 1 << 12  # of a text value; longer ones, such as chat templates, are described by their length
_STRING, _ARRAY = 8, 9
_VALUES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_VALUE_NAMES = {
    0: "uint8", 1: "int8", 2: "uint16", 3: "int16", 4: "uint32", 5: "int32", 6: "float32", 7: "bool", 8: "text",
    9: "array", 10: "uint64", 11: "int64", 12: "float64",
}  # fmt: skip
# Name, elements and bytes of a block, by the number of the dtype.
_DTYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip


def read(file: StoredFile) -> Contents:
    """Return the contents of a file; raise CorruptError for a broken or truncated one."""
    cursor = Cursor(file)
    if cursor.take(len(GGUF_MAGIC)) != GGUF_MAGIC:
        text = wrong_kind_of(file) or "not a GGUF file: it does not begin with GGUF"
        raise CorruptError(text, path=file.path)
    (version,) = cursor.unpack("<I")
    if version not in _VERSIONS:
        problem = "version 1, or big-endian" if version == 1 or not version & 0xFFFF else f"version {version}"
        raise UnsupportedError(f"GGUF of {problem}: statexchange shows versions 2 and 3, little-endian", path=file.path)
    num_tensors, num_values = cursor.unpack("<QQ")
    others: dict[str, str] = {}
    alignment = 32
    for _ in range(_checked_count(num_values, 13, cursor)):
        cursor.budget.add_entries()
        key = _text(cursor)
        value = _value(cursor)
        if key in others:
            raise CorruptError(f"two metadata entries {excerpt(key)}", path=file.path)
        others[key] = value if isinstance(value, str) else excerpt(value, 80)
        if key == "general.alignment":
            alignment = value
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise CorruptError(f"general.alignment is {excerpt(alignment, 60)}, not a power of 2", path=file.path)
    tensors: dict[str, UnreadableTensor] = {}
    end = 0
    for _ in range(_checked_count(num_tensors, 24, cursor)):
        cursor.budget.add_entries()
        tensor, offset = _tensor(cursor)
        if tensor.name in tensors:
            raise CorruptError("two tensors have this name", name=tensor.name, path=file.path)
        if offset % alignment:
            raise CorruptError(f"offset {offset} is not aligned to {alignment}", name=tensor.name, path=file.path)
        tensors[tensor.name] = tensor
        end = max(end, offset + (tensor.nbytes or 0))
    data_begin = -(-cursor.at // alignment) * alignment
    if tensors and data_begin + end > file.size:
        expected = f"at least {data_begin + end} bytes"
        raise CorruptError("file is truncated", path=file.path, expected=expected, found=f"{file.size} bytes")
    return Contents(tuple(tensors.values()), others)


def _checked_count(count: int, least_bytes: int, cursor: Cursor) -> int:
    """Return a count of entries that take at least so many bytes each; raise CorruptError if the file is shorter."""
    if count * least_bytes > cursor.size - cursor.at:
        text = f"truncated or broken: the header claims {count} entries at byte {cursor.at} of {cursor.size}"
        raise CorruptError(text, path=cursor.path)
    return count


def _text(cursor: Cursor) -> str:
    (nbytes,) = cursor.unpack("<Q")
    return cursor.text(nbytes)


def _value(cursor: Cursor) -> Any:
    """Return a metadata value; of an array and of a long text a description."""
    (kind,) = cursor.unpack("<I")
    if kind == _STRING:
        (nbytes,) = cursor.unpack("<Q")
        if nbytes <= _MAX_SHOWN_BYTES:
            return excerpt(cursor.text(nbytes), 80)
        cursor.skip(nbytes)
        return f"text of {nbytes:,} bytes"
    if kind == _ARRAY:
        item_kind, count = cursor.unpack("<IQ")
        _skip_items(item_kind, count, cursor)
        return f"{count:,} of {_VALUE_NAMES[item_kind]}"
    if kind not in _VALUES:
        raise CorruptError(f"a metadata value of unknown type {kind}", path=cursor.path)
    return cursor.unpack(f"<{_VALUES[kind]}")[0]


def _skip_items(kind: int, count: int, cursor: Cursor) -> None:
    """Skip the items of an array: numbers, or texts such as a vocabulary's."""
    if kind in _VALUES:
        cursor.skip(count * struct.calcsize(f"<{_VALUES[kind]}"))
    elif kind == _STRING:
        cursor.budget.add_entries(_checked_count(count, 8, cursor))
        for _ in range(count):
            cursor.skip(cursor.unpack("<Q")[0])
    else:
        raise CorruptError(f"an array of items of type {kind}, which is not supported", path=cursor.path)


def _tensor(cursor: Cursor) -> tuple[UnreadableTensor, int]:
    """Return the next tensor's record, and the offset of its bytes."""
    name = _text(cursor)
    (num_dims,) = cursor.unpack("<I")
    if num_dims > _MAX_DIMS:
        raise CorruptError(f"it has {num_dims} dims", name=name, path=cursor.path)
    shape = list(reversed(cursor.unpack(f"<{num_dims}Q")))
    kind, offset = cursor.unpack("<IQ")
    dtype, block_numel, block_nbytes = _DTYPES.get(kind, (f"type {kind}", 1, 0))
    if shape and shape[-1] % block_numel:
        problem = f"its rows of {shape[-1]} elements are no whole blocks of {dtype}"
        raise CorruptError(problem, name=name, path=cursor.path)
    nbytes = math.prod(shape) // block_numel * block_nbytes
    return described_tensor(name, dtype, shape, cursor.path, nbytes if kind in _DTYPES else None), offset
