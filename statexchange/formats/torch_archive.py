"""Read the zip archive that torch.save writes: its pickle, and the byte range of each tensor's storage.

A zip directory may contain any numbers, so each offset and size is checked against the file before it is used.
"""

from __future__ import annotations

import math
import os
import struct
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from statexchange.errors import CorruptError, StateExchangeError, TruncatedError, UnsupportedError, excerpt
from statexchange.formats.pickles import MAX_PICKLE_BYTES, GlobalRef, OpaqueObject, PickleValue, contents, read_pickle
from statexchange.formats.source import strides_of
from statexchange.sharding.shards import Box, sizes_from_json
from statexchange.storage.store import Budget, ByteRange, StoredFile
from statexchange.storage.wrong_kinds import wrong_kind_of
from statexchange.tensors import ITEMSIZE, name_of_dtype
from statexchange.values import SCALAR_TYPES

_ZIP, _LEGACY = b"PK\3\4", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_START_BYTES = len(_LEGACY)
_LOCAL = struct.Struct("<4s5H3L2H")  # the header before a member's bytes
_ENTRY_BYTES, _CHECKSUM_AT, _CHECKSUM_BYTES = 46, 16, 4  # of a member in the directory, without name, extra and comment
_UTF8_NAME = 1 << 11  # a member's flag
_END_BYTES = 22  # of the record at the end of a zip without a comment
_MAX_DIRECTORY_BYTES = 256 << 20
_AHEAD_BYTES = 2048  # read at once at each end: all of a tensor's archive but its data
_MAX_TENSOR_PICKLE_BYTES = 1 << 20  # a tensor's pickle has about 200 bytes
_MAX_KEPT, _MAX_KINDS = 4096, 8  # results of archives alike, of 1 to 2 kB each; kinds of one length
_FREE_VALUES, _FREE_CHARACTERS = 10_000, 1000  # that a plain value may have, in however few bytes it was written
_RESAVE = "if you trust it, load it with torch and save it again with torch.save"

_STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL", "ComplexDoubleStorage": "C128", "ComplexFloatStorage": "C64",
}  # fmt: skip
# Functions with which pickles of torch construct tensors.
_WRAPPING = {"_rebuild_parameter", "_rebuild_parameter_with_state"}
_FROM_TYPE = {"_rebuild_from_type", "_rebuild_from_type_v2"}
_STRIDED = {"_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"}
_MAX_ARGUMENTS = 8
_MAX_WRAPPERS = 16
_MAX_KEY = 255


_Ranges: TypeAlias = tuple[tuple[int, int], ...]
_Fields: TypeAlias = Callable[[bytes], tuple[bytes, ...]]


@dataclass(frozen=True, slots=True)
class TensorView:
    """A strided tensor as the pickle describes it: a part of the storage `key`, which has `storage_nbytes` bytes.

    `begin` is an offset in the storage in bytes; `strides` are in elements.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    begin: int
    key: str
    storage_nbytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's elements."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


class Archive:
    """A zip archive in `length` bytes of an open file, from `begin` on."""

    def __init__(self, file: StoredFile, begin: int = 0, length: int | None = None, ends: bytes | None = None) -> None:
        """Read the directory; `ends` is what `_ends_of` returns, if the caller has read it."""
        path = file.path
        self._length = file.size - begin if length is None else length
        self._file = file
        self._path = path
        self._begin = begin
        self._ends = _ends_of(file, begin, self._length) if ends is None else ends
        self.ranges: set[tuple[int, int]] = set()  # (first byte, end) of what was looked at, without the checksums
        self._entries = self._directory()
        roots = [name for name in self._entries if name.rpartition("/")[2] == "data.pkl" and name.count("/") == 1]
        # torch names the directory in the archive after the file, or "archive": its name is not known, but that of the
        # pickle is.
        if len(roots) != 1:
            raise CorruptError("not a file of torch.save: its zip has no data.pkl", path=path)
        self._root = roots[0].removesuffix("data.pkl")
        byte_order = self._root + "byteorder"  # absent in files of older torch, which are little-endian
        if byte_order in self._entries and self._content(byte_order, 16) != b"little":
            raise UnsupportedError("its numbers are big-endian", path=path)

    def pickle(self, limit: int = MAX_PICKLE_BYTES) -> bytes:
        """Return the bytes of the pickle."""
        return self._content(self._root + "data.pkl", limit)

    def byte_range(self, view: TensorView) -> ByteRange:
        """Return the byte range of a tensor; raise CorruptError if the zip contradicts the pickle."""
        # torch stores each storage as a member of its own, which several tensors may share.
        name = f"{self._root}data/{view.key}"
        if name not in self._entries:
            raise CorruptError(f"the zip has no storage {excerpt(view.key, 60)}", path=self._path)
        begin, nbytes = self._member(name)
        if nbytes != view.storage_nbytes:
            raise CorruptError(
                f"storage {excerpt(view.key, 60)} has another size than in the pickle",
                path=self._path,
                expected=f"{view.storage_nbytes} bytes",
                found=f"{nbytes} bytes",
            )
        return ByteRange(self._file, begin + view.begin, view.nbytes, strides=strides_of(view.shape, view.strides))

    def _read(self, at: int, nbytes: int) -> bytes:
        if not 0 <= at <= at + nbytes <= self._length:
            raise CorruptError("its zip refers to bytes outside of the file", path=self._path)
        self.ranges.add((at, at + nbytes))
        # Most of what is read lies in the two ends that were read at once: on an object store each further read is a
        # request.
        in_ends = _slice_of(at, at + nbytes, self._length)
        if in_ends is not None:
            return self._ends[in_ends]
        data = bytearray(nbytes)
        self._file.read_into(memoryview(data), self._begin + at)
        return bytes(data)

    def _directory(self) -> dict[str, tuple[int, int]]:
        """Return (offset of the local header, bytes) of each member."""
        end = self._read(max(0, self._length - _END_BYTES), min(_END_BYTES, self._length))
        try:
            # zipfile would also take an archive with a comment, or with anything else, behind it.
            if not end.startswith(b"PK\5\6") or not end.endswith(b"\0\0"):
                raise zipfile.BadZipFile("it does not end there")
            directory = zipfile.ZipFile(_Window(self._read, self._length))
        except StateExchangeError:
            raise
        except (zipfile.BadZipFile, NotImplementedError, OverflowError, ValueError, struct.error):
            text = "truncated, or not a file of torch.save: it does not end like a zip archive"
            raise CorruptError(text, path=self._path) from None
        members = directory.infolist()
        self._leave_out_checksums(directory.start_dir, members)
        # It would take one with other bytes in front, too, and add their number to all offsets.
        if min((member.header_offset for member in members), default=0) != 0:
            raise CorruptError("not a file of torch.save: it does not begin like a zip archive", path=self._path)
        entries: dict[str, tuple[int, int]] = {}
        for member in members:
            name = member.filename
            # A tensor is read as a byte range of the file, by several ranks in parts: compressed bytes have no such
            # range.
            if member.compress_type or member.flag_bits & 1:
                raise UnsupportedError(f"member {excerpt(name)} is compressed or encrypted: {_RESAVE}", path=self._path)
            if member.compress_size != member.file_size:
                raise CorruptError(f"member {excerpt(name)} has two sizes", path=self._path)
            # zipfile would take the last of them, other readers may take the first.
            if name in entries:
                raise CorruptError(f"the zip has two members {excerpt(name)}", path=self._path)
            entries[name] = member.header_offset, member.file_size
        return entries

    def _leave_out_checksums(self, begin: int, members: Sequence[zipfile.ZipInfo]) -> None:
        """Note that in the directory, which begins there, the checksum of each member was not looked at."""
        # The ranges are the gaps between checksums: each ends where a checksum begins, and the next begins behind it.
        ends, at = [begin], begin
        for member in members:
            encoding = "utf-8" if member.flag_bits & _UTF8_NAME else "cp437"  # as zipfile has decoded it
            ends += [at + _CHECKSUM_AT, at + _CHECKSUM_AT + _CHECKSUM_BYTES]
            at += _ENTRY_BYTES + len(member.orig_filename.encode(encoding)) + len(member.extra) + len(member.comment)
        self.ranges.remove((begin, at))
        self.ranges.update(zip(ends[::2], [*ends[1::2], at], strict=True))

    def _member(self, name: str) -> tuple[int, int]:
        """Return (first byte in the file, bytes) of a member."""
        begin, nbytes = self._entries[name]
        # Only this header says where the bytes begin: torch pads its extra field so that storages are aligned, and the
        # directory has an extra field of another length.
        signature, *_, name_length, extra_length = _LOCAL.unpack(self._read(begin, _LOCAL.size))
        encoded = name.encode()
        begin += _LOCAL.size
        if signature != _ZIP or self._read(begin, name_length) != encoded:
            raise CorruptError(f"the zip has no member {excerpt(name)} at the offset in its directory", path=self._path)
        begin += name_length + extra_length
        if begin + nbytes > self._length:
            raise CorruptError(f"member {excerpt(name)} ends outside of the file", path=self._path)
        return self._begin + begin, nbytes

    def _content(self, name: str, limit: int) -> bytes:
        begin, nbytes = self._member(name)
        if nbytes > limit:
            raise CorruptError(
                f"member {excerpt(name)} has {nbytes} bytes, more than the limit of {limit}", path=self._path
            )
        return self._read(begin - self._begin, nbytes)


class DcpEntry(NamedTuple):
    """An entry of a file of a DCP: a part of a tensor as the metadata describes it, and where its archive lies.

    `dtype` is "" and `box` without dims if it is no tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    begin: int
    length: int


class TensorArchives:
    """Opens archives of one tensor each, as the files of a DCP directory have them for each part of a tensor.

    Most differ from an earlier one in their numbers alone, so also in checksums and in the id that torch computes of
    these. What an archive is depends on its length and on the bytes that were looked at to parse it. One that has the
    same bytes there is not parsed: this takes 10 us instead of 60, and a large save has a million. Thread-safe.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        # By length, and by the ranges that were looked at: what gets the bytes there, and the results by these bytes.
        self._kinds: dict[int, dict[_Ranges, tuple[_Fields, dict[tuple[bytes, ...], _Parsed]]]] = {}
        self._num_kept = 0

    def open(self, file: StoredFile, begin: int, length: int) -> tuple[TensorView, ByteRange]:
        """Return the tensor of the archive in `length` bytes of a file, from `begin` on, and the range of its bytes.

        Raises:
            ValueError: it has another pickle than that of a tensor.
        """
        # Also of an archive that was parsed before: its bytes decide whether it is like another one.
        ends = _ends_of(file, begin, length)
        kinds = self._kinds.get(length, {})
        # A copy, as other threads add kinds meanwhile.
        for fields, results in [*kinds.values()]:
            parsed = results.get(fields(ends))
            if parsed is not None:
                return parsed.view, ByteRange(file, begin + parsed.begin, parsed.view.nbytes, strides=parsed.strides)
        archive = Archive(file, begin, length, ends)
        data = archive.pickle(_MAX_TENSOR_PICKLE_BYTES)
        # A pickle may take steps by its own bytes; what it needs beyond comes from the reserve of all files.
        view = view_of(unwrap_tensor(read_pickle(data, file.path, self._budget.of(file.path, len(data)))))
        stored = archive.byte_range(view)
        self._keep(archive, ends, _Parsed(view, stored.begin - begin, stored.strides), length)
        return view, stored

    def _keep(self, archive: Archive, ends: bytes, parsed: _Parsed, length: int) -> None:
        """Keep the result of an archive for others alike; of many different ones the earlier are dropped."""
        ranges = tuple(sorted(archive.ranges))
        slices = [_slice_of(*looked_at, length) for looked_at in ranges]
        # What was looked at lies between the ends, as in an archive of many members: then only a parse shows what it
        # is.
        if None in slices:
            return
        fields = itemgetter(slice(0), *slices)  # of one slice it would return no tuple
        if self._num_kept == _MAX_KEPT:
            self._kinds, self._num_kept = {}, 0
        kinds = self._kinds.setdefault(length, {})
        if len(kinds) == _MAX_KINDS and ranges not in kinds:  # each is compared
            kinds.clear()
        _, results = kinds.setdefault(ranges, (fields, {}))
        results[fields(ends)] = parsed
        self._num_kept += 1


class _Parsed(NamedTuple):
    """The tensor of an archive, its first byte in the archive, and its strides as those of a `ByteRange`."""

    view: TensorView
    begin: int
    strides: tuple[int, ...] | None


def _ends_of(file: StoredFile, begin: int, length: int) -> bytes:
    """Return the bytes of both ends of an archive, or of all of it if it is short."""
    if length < 0 or begin + length > file.size:
        raise TruncatedError("file is truncated", path=file.path, expected=begin + length, found=file.size)
    data = memoryview(bytearray(min(length, 2 * _AHEAD_BYTES)))
    if len(data) == length:
        file.read_into(data, begin)
    else:
        file.read_into(data[:_AHEAD_BYTES], begin)
        file.read_into(data[_AHEAD_BYTES:], begin + length - _AHEAD_BYTES)
    return bytes(data)


def _slice_of(begin: int, end: int, length: int) -> slice | None:
    """Return where bytes of an archive lie in its ends; None if some lie between these."""
    hidden = max(0, length - 2 * _AHEAD_BYTES)  # bytes between the ends
    if end <= _AHEAD_BYTES or not hidden:
        return slice(begin, end)
    if begin >= _AHEAD_BYTES + hidden:
        return slice(begin - hidden, end - hidden)
    return None


def is_of_torch(file: StoredFile) -> bool:
    """Whether a file begins as those of torch.save do, also as those of before 1.6."""
    return file.first_bytes(_START_BYTES).startswith((_ZIP, _LEGACY))


def open_archive(file: StoredFile) -> Archive:
    """Return the archive in a file of torch.save; raise UnsupportedError for the format of before 1.6."""
    start, path = file.first_bytes(_START_BYTES), file.path
    if start.startswith(_ZIP):
        return Archive(file)
    # PROTO, the first opcode of a pickle of protocol 2 or later.
    if start.startswith(b"\x80"):
        problem = "this is a pickle, or torch's format of before 1.6, not a zip"
        advice = "torch.save(torch.load(path, weights_only=True), path) converts it"
        raise UnsupportedError(f"{problem}: {advice}", path=path)
    text = wrong_kind_of(file)
    # Its header, which is JSON, follows 8 bytes of length.
    if text is None and start[8:9] == b"{":
        text = "this seems to be a safetensors file: call it .safetensors"
    raise CorruptError(text or "not a file of torch.save", path=path)


class _Window:
    """The bytes of an archive as the file that zipfile reads.

    All of them, as zipfile follows absolute offsets at the end of a large archive.
    """

    def __init__(self, read: Callable[[int, int], bytes], length: int) -> None:
        self._read = read
        self._length = length
        self._at = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to an offset from the begin, from here or from the end."""
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def tell(self) -> int:
        """Return the offset of the next byte."""
        return self._at

    def read(self, nbytes: int = -1) -> bytes:
        """Return the next bytes; fewer at the end."""
        left = self._length - self._at
        nbytes = left if nbytes < 0 else min(nbytes, left)
        if nbytes > _MAX_DIRECTORY_BYTES:
            raise ValueError(f"a directory of {nbytes} bytes")
        data = self._read(self._at, nbytes)
        self._at += len(data)
        return data


def unwrap_tensor(tensor: OpaqueObject) -> OpaqueObject:
    """Return the tensor inside of parameters and of subclasses with attributes of their own.

    Raises:
        ValueError: it has more wrappers than torch makes.
    """
    for _ in range(_MAX_WRAPPERS):
        if tensor.name in _WRAPPING and tensor.args and type(tensor.args[0]) is OpaqueObject:
            tensor = tensor.args[0]
        elif class_of(tensor) in ("Tensor", "Parameter", "Buffer"):
            # `_rebuild_from_type_v2` has (function, class, arguments, attributes): only the attributes are
            # left out.
            function, _, args, _ = tensor.args
            is_call = type(function) is GlobalRef and type(args) is tuple
            tensor = OpaqueObject(function.name, args) if is_call else OpaqueObject("", ())
        else:
            return tensor
    raise ValueError(f"a tensor in more than {_MAX_WRAPPERS} parameters or subclasses")


def class_of(tensor: OpaqueObject) -> str:
    """Return the name of a tensor's class, if the pickle has it; else ""."""
    if tensor.name in _FROM_TYPE and len(tensor.args) == 4 and type(tensor.args[1]) is GlobalRef:
        return tensor.args[1].name
    return ""


def is_tensor(value: object) -> bool:
    """Whether a value of a pickle stands for a tensor of any kind."""
    return type(value) is OpaqueObject and value.name.startswith("_rebuild_") and not value.is_unknown


def holds_tensor(value: PickleValue, budget: Budget, without: set[int]) -> bool:
    """Whether a value of a pickle contains a tensor or a storage.

    `without` has the ids of containers known to contain none, and is extended for further calls: many values may refer
    to one large object.
    """
    seen: set[int] = set()
    for item in contents([value], budget, seen, without):
        if is_tensor(item) or (type(item) is OpaqueObject and item.name == "persistent"):
            return True
    without |= seen
    return False


def is_plain(value: PickleValue, nbytes: int, budget: Budget) -> bool:
    """Whether a value of a pickle of `nbytes` consists of plain values, few enough to encode.

    A pickle can repeat one object without end. One that repeats none has at least a byte for each value and character.
    """
    most, characters = max(nbytes, _FREE_VALUES), 0
    values = [value]
    for item in values:  # which grows
        inner: Sequence[PickleValue] = ()
        if type(item) is dict:
            inner = (*item.keys(), *item.values())
        elif type(item) in (list, tuple):
            inner = item
        elif type(item) not in SCALAR_TYPES:
            return False
        elif type(item) is str and len(item) > _FREE_CHARACTERS:
            characters += len(item)
        if len(values) + len(inner) > most or characters > nbytes:
            return False
        budget.spend(len(inner))
        values += inner
    return True


def refusal_of(value: PickleValue) -> str:
    """Return why an object that contains tensors cannot be read."""
    if type(value) is OpaqueObject and type(value.state) is dict and "_modules" in value.state:
        return (
            f"this is a whole module ({value.class_name}), whose code would have to run: if you trust the file, read "
            "it with torch (torch.load needs weights_only=False), and save the module's state_dict() instead"
        )
    return f"this object contains tensors, but its class is not supported: {describe(value)}"


def describe(value: PickleValue) -> str:
    """Describe a non-tensor value in a few words."""
    if type(value) in (OpaqueObject, GlobalRef) and value.is_unknown:
        return f"opaque {value.class_name}"
    if type(value) is OpaqueObject and value.name == "encode" and value.args and type(value.args[0]) is str:
        return f"{len(value.args[0])} bytes"  # how protocol 2 writes bytes: as Latin-1
    if type(value) is OpaqueObject:
        return f"a {value.class_name}"
    if type(value) is GlobalRef:
        return value.name
    if type(value) is bytes:
        return f"{len(value)} bytes"
    if type(value) in SCALAR_TYPES:
        shown = excerpt(value, 80)
        return shown if value is None else f"{type(value).__name__} {shown}"
    return f"{type(value).__name__} of {len(value)}"


def dtype_of(symbol: object) -> str:
    """Return the safetensors name of a torch dtype; raise UnsupportedError if there is none."""
    name = symbol.name if type(symbol) is GlobalRef else excerpt(symbol, 60)
    found = name_of_dtype(name)
    if found is None:
        raise UnsupportedError(f"dtype {name} is not supported")
    return found


def view_of(tensor: OpaqueObject) -> TensorView:
    """Return dtype, shape, strides and storage of a strided tensor.

    Raises:
        UnsupportedError: it is another kind of tensor.
        ValueError: its arguments contradict each other.
    """
    if tensor.name not in _STRIDED:
        kind = f"a {tensor.name.removeprefix('_rebuild_').partition('_')[0]} tensor"
        if class_of(tensor):
            kind = f"a tensor of the class {excerpt(class_of(tensor), 80)[1:-1]}"
        raise UnsupportedError(f"{kind} is not supported, only strided ones")
    if len(tensor.args) > _MAX_ARGUMENTS:
        raise ValueError(f"a tensor with {len(tensor.args)} arguments")
    # Behind these: requires_grad, backward hooks, perhaps dtype (of v3), and flags such as {"conj": True}.
    storage, offset, shape, strides = tensor.args[:4]
    has_dtype = tensor.name == "_rebuild_tensor_v3"
    flags = tensor.args[7:] if has_dtype else tensor.args[6:]
    if any(flags):
        raise UnsupportedError("its values are stored conjugated or negated (torch.resolve_conj, resolve_neg)")
    kind, key, numel = _storage(storage)
    # Of v3 the storage is untyped, and its numel is in bytes.
    dtype = dtype_of(tensor.args[6]) if has_dtype else _STORAGES.get(kind)
    if dtype is None:
        raise UnsupportedError(f"a {kind} is not supported")
    (offset,) = sizes_from_json((offset,))
    shape, strides = sizes_from_json(shape), sizes_from_json(strides)
    itemsize = ITEMSIZE[dtype]
    storage_nbytes = numel * (1 if kind == "UntypedStorage" else itemsize)
    # Strides may be of any kind, as of a transposed tensor or an expanded one: the last element decides what is read.
    reach = 0  # elements from the first to the last one
    if all(shape):
        reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    if reach and (offset + reach) * itemsize > storage_nbytes:
        raise ValueError("the tensor is larger than its storage")
    return TensorView(dtype, shape, strides, offset * itemsize if reach else 0, key, storage_nbytes)


def _storage(value: PickleValue) -> tuple[str, str, int]:
    """Return the type, key and number of elements of a storage."""
    if type(value) is not OpaqueObject or value.name != "persistent":
        raise ValueError("a tensor without a storage")
    # ("storage", class, key, device, numel): where it lay in memory does not matter here.
    signature, kind, key, _, numel = value.args[0]
    if signature != "storage" or type(kind) is not GlobalRef or type(key) is not str or len(key) > _MAX_KEY:
        raise ValueError("not a storage")
    (numel,) = sizes_from_json((numel,))
    return kind.name, key, numel
