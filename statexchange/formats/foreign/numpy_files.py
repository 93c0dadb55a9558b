"""Show numpy's files: an array (.npy), or a zip of arrays (.npz), compressed or not."""

from __future__ import annotations

import re
import struct
import zipfile
import zlib
from typing import IO, cast

from statexchange.errors import CorruptError, StateExchangeError, UnsupportedError, excerpt
from statexchange.formats.foreign.contents import Contents, described_tensor, dtype_of_numpy
from statexchange.formats.foreign.starts import NPY_MAGIC
from statexchange.formats.source import UnreadableTensor
from statexchange.storage.budget import Budget
from statexchange.storage.store import StoredFile

__all__ = ["read"]

_LEAST_HEADER_BYTES, _MAX_HEADER_BYTES = 12, 1 << 16  # of one array
_MAX_READ_BYTES = 64 << 20  # at once: the zip's directory, some half a million arrays
_STEPS_PER_MEMBER = 512  # opening it and decompressing 4 KiB; a real one takes 250 bytes of the file
_USUAL_HEADER_BYTES = 128
_DESCR = re.compile(r"""['"]descr['"]\s*:\s*(?:['"]([^'"]{1,64})['"]|([\[(]))""")
_SHAPE = re.compile(r"""['"]shape['"]\s*:\s*\(([0-9,\sL]*)\)""")
_ORDER = re.compile(r"""['"]fortran_order['"]\s*:\s*(True|False)""")
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def read(file: StoredFile) -> Contents:
    """Return the arrays of a file of either kind; raise CorruptError for a broken or truncated one."""
    start = bytearray(min(4, file.size))
    file.read_into(memoryview(start), 0)
    is_array = file.path.endswith(".npy") or NPY_MAGIC.startswith(start)
    return _read_npy(file) if is_array else _read_npz(file)


def _read_npy(file: StoredFile) -> Contents:
    """Return the array of a file; raise CorruptError for a broken or truncated one."""
    start = bytearray(min(_MAX_HEADER_BYTES + 16, file.size))
    file.read_into(memoryview(start), 0)
    tensor, header_nbytes = _array("array", bytes(start), file.path)
    _check_fits(tensor, file.size - header_nbytes)
    return Contents((tensor,))


def _read_npz(file: StoredFile) -> Contents:
    """Return the arrays of a file; raise CorruptError for a broken or truncated one."""
    tensors: list[UnreadableTensor] = []
    others: dict[str, str] = {}
    budget = file.budget.of(file.path, 0)
    names: set[str] = set()
    try:
        with zipfile.ZipFile(cast("IO[bytes]", _ZipBytes(file, budget))) as archive:
            for member in archive.infolist():
                budget.add_entries()
                budget.spend(_STEPS_PER_MEMBER)
                name = member.filename.removesuffix(".npy")
                if name in names:
                    raise CorruptError("two members have this name", name=name, path=file.path)
                names.add(name)
                if name == member.filename:
                    others[name] = f"{member.file_size:,} bytes"
                elif member.compress_type not in _METHODS or member.flag_bits & 1:
                    others[name] = f"{member.file_size:,} bytes, encrypted or compressed by another method than numpy's"
                else:
                    with archive.open(member) as stream:
                        start = _start_of(stream, budget)
                    tensor, header_nbytes = _array(name, start, file.path)
                    _check_fits(tensor, member.file_size - header_nbytes)
                    tensors.append(tensor)
    except StateExchangeError:
        raise
    except (ArithmeticError, EOFError, RuntimeError, ValueError, struct.error, zipfile.BadZipFile, zlib.error) as error:
        raise CorruptError(f"not a whole zip of numpy's arrays: {excerpt(str(error), 200)}", path=file.path) from None
    return Contents(tuple(tensors), others)


def _start_of(stream: IO[bytes], budget: Budget) -> bytes:
    """Return the header of an array in a zip. A large one is spent: several members may share its bytes."""
    start = stream.read(_USUAL_HEADER_BYTES)
    _, end = _header_range(start) if start.startswith(NPY_MAGIC) and len(start) >= _LEAST_HEADER_BYTES else (0, 0)
    if len(start) < end <= _MAX_HEADER_BYTES + _LEAST_HEADER_BYTES:
        budget.spend(0, end)
        start += stream.read(end - len(start))
    return start


def _header_range(start: bytes) -> tuple[int, int]:
    """Return the first byte of the text of an array's header, and the byte after it."""
    layout, begin = ("<H", 10) if start[6:7] == b"\1" else ("<I", 12)
    (length,) = struct.unpack_from(layout, start, 8)
    return begin, begin + length


def _check_fits(tensor: UnreadableTensor, nbytes: int) -> None:
    """Raise CorruptError unless a tensor has this many bytes after its header."""
    if tensor.nbytes is not None and tensor.nbytes != nbytes:
        problem = "file is truncated, or its bytes do not fit its shape"
        raise CorruptError(problem, name=tensor.name, path=tensor.path, expected=tensor.nbytes, found=nbytes)


def _array(name: str, start: bytes, path: str) -> tuple[UnreadableTensor, int]:
    """Return the array that a header describes, and the header's bytes."""
    if not start.startswith(NPY_MAGIC):
        raise CorruptError("not an array of numpy: it does not begin with \\x93NUMPY", name=name, path=path)
    if len(start) < _LEAST_HEADER_BYTES:
        raise CorruptError("truncated in the array's header", name=name, path=path)
    begin, end = _header_range(start)
    if end - begin > _MAX_HEADER_BYTES:
        raise UnsupportedError(f"a header of {end - begin} bytes is not shown", name=name, path=path)
    header = start[begin:end].decode("utf-8", "replace")
    descr, shape, order = _DESCR.search(header), _SHAPE.search(header), _ORDER.search(header)
    if len(start) < end or descr is None or shape is None or order is None:
        raise CorruptError(f"a broken header of numpy: {excerpt(header, 120)}", name=name, path=path)
    sizes = [part.strip().removesuffix("L") for part in shape[1].split(",") if part.strip()]
    if not all(len(size) <= 20 and size.isdecimal() for size in sizes):
        raise CorruptError(f"a broken shape: {excerpt(shape[1], 120)}", name=name, path=path)
    dtype = "structured" if descr[2] else dtype_of_numpy(descr[1])
    return described_tensor(name, dtype, [int(size) for size in sizes], path), end


class _ZipBytes:
    """A stored file as zipfile reads it; a read of very many bytes is refused."""

    def __init__(self, file: StoredFile, budget: Budget) -> None:
        self._file = file
        self._budget = budget
        self._at = 0
        self._left_to_add = file.size

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._file.size)[whence]
        if self._at < 0:
            raise OSError("negative position") if whence == 2 else ValueError("negative position")
        return self._at

    def read(self, nbytes: int = -1) -> bytes:
        left = max(0, self._file.size - self._at)
        nbytes = left if nbytes < 0 else min(nbytes, left)
        if nbytes > _MAX_READ_BYTES:
            raise UnsupportedError(f"refused: a zip directory of {nbytes} bytes", path=self._file.path)
        if not nbytes:  # past the end, too
            return b""
        data = bytearray(nbytes)
        self._file.read_into(memoryview(data), self._at)
        added = min(nbytes, self._left_to_add)  # members may share bytes, which add once
        self._left_to_add -= added
        self._budget.add(added)
        self._at += nbytes
        return bytes(data)
