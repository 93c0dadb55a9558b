"""The facts in the headers of a foreign file or directory, and a cursor that reads such headers in windows."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from statexchange.errors import CorruptError, excerpt
from statexchange.formats.source import UnreadableTensor
from statexchange.sharding.shards import shape_from_json
from statexchange.storage.store import StoredFile
from statexchange.tensors import DTYPE_NAMES, ITEMSIZE

__all__ = ["MAX_TEXT_BYTES", "Contents", "Cursor", "described_tensor", "dtype_of_numpy"]

MAX_TEXT_BYTES = 1 << 16  # of a name or a key
_WINDOW_BYTES = 1 << 16
# Codes of numpy's dtypes, as in "<f4". Those that hold more than a name are left out.
_CODES = {
    "b1": "BOOL", "u1": "U8", "i1": "I8", "u2": "U16", "i2": "I16", "u4": "U32", "i4": "I32", "u8": "U64", "i8": "I64",
    "f2": "F16", "f4": "F32", "f8": "F64", "c8": "C64", "c16": "C128",
}  # fmt: skip
_CODE = re.compile(r"[<>|=]?([biufcSUV])([0-9]{1,9})")  # of numpy: kind and bytes, or characters of 4 bytes


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of one foreign file or directory.

    Attributes:
        tensors: its tensors, none of which can be read.
        others: descriptions, by name, of entries that are not tensors.
        notes: what was not read.
    """

    tensors: tuple[UnreadableTensor, ...]
    others: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Cursor:
    """A position in a file, from which numbers and text are read in order; data between them is skipped unread.

    Each byte that is taken adds to `budget`.
    """

    def __init__(self, file: StoredFile, begin: int = 0) -> None:
        self.path = file.path
        self.budget = file.budget.of(file.path, 0)
        self.at = begin
        self._file = file
        self._window = b""
        self._window_begin = 0

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._file.size

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes, at most MAX_TEXT_BYTES; raise CorruptError if the file ends before."""
        if nbytes > MAX_TEXT_BYTES:
            raise CorruptError(f"a name or a key of {nbytes} bytes at byte {self.at}", path=self.path)
        begin = self.at
        self.skip(nbytes)
        self.budget.add(nbytes)
        if not self._window_begin <= begin <= self.at <= self._window_begin + len(self._window):
            window = bytearray(min(_WINDOW_BYTES, self.size - begin))
            self._file.read_into(memoryview(window), begin)
            self._window, self._window_begin = bytes(window), begin
        return self._window[begin - self._window_begin : self.at - self._window_begin]

    def skip(self, nbytes: int) -> None:
        """Move on; raise CorruptError if the file ends before."""
        if self.at + nbytes > self.size:
            expected, found = f"at least {self.at + nbytes} bytes", f"{self.size} bytes"
            raise CorruptError("file is truncated", path=self.path, expected=expected, found=found)
        self.at += nbytes

    def unpack(self, layout: str) -> tuple[Any, ...]:
        """Return numbers by a format of `struct`."""
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def text(self, nbytes: int) -> str:
        """Return the next bytes as text; raise CorruptError unless they are UTF-8."""
        data = self.take(nbytes)
        try:
            return data.decode()
        except UnicodeDecodeError:
            problem = f"text at byte {self.at - nbytes} is not UTF-8: {excerpt(data, 40)}"
            raise CorruptError(problem, path=self.path) from None


def described_tensor(name: str, dtype: str, shape: Any, path: str, nbytes: int | None = None) -> UnreadableTensor:
    """Return a tensor that is shown and cannot be read.

    Args:
        name: its name.
        dtype: numpy's or torch's name of its dtype, or numpy's code; any other name stays.
        shape: a list of sizes.
        path: its file.
        nbytes: its bytes; None to compute them where the dtype is known.

    Raises:
        CorruptError: the shape is not one.
    """
    try:
        sizes = shape_from_json(shape)
    except ValueError as error:
        raise CorruptError(str(error), name=excerpt(name, MAX_TEXT_BYTES)[1:-1], path=path) from None
    known = DTYPE_NAMES.get(dtype, dtype)
    code = _CODE.fullmatch(dtype)
    if nbytes is None and known in ITEMSIZE:
        nbytes = math.prod(sizes) * ITEMSIZE[known]
    elif nbytes is None and code is not None:
        nbytes = math.prod(sizes) * int(code[2]) * (4 if code[1] == "U" else 1)
    return UnreadableTensor(name, known, sizes, path, nbytes=nbytes)


def dtype_of_numpy(code: str) -> str:
    """Return the name of a little-endian dtype for numpy's code, as F32 for "<f4"; any other code as it is."""
    plain = code[1:] if code[:1] in ("<", "|", "=") else code
    return _CODES.get(plain, code)
