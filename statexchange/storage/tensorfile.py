"""The tensor file: a safetensors file, with a rank's sharding, digests and config in its metadata.

Layout: the header's length (8 bytes, little-endian), a JSON header, then the tensors' bytes in C order without gaps.
The reader is stricter than safetensors: no duplicate keys, no unknown fields, no control characters in names.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import struct
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any

from statexchange.errors import CorruptError, InvalidArgumentError, TruncatedError, UnsafeError, excerpt
from statexchange.processes import collector_paused
from statexchange.sharding.shards import Box, Shard, shape_from_json, sizes_from_json
from statexchange.storage.atomic import write_new
from statexchange.storage.files import WINDOW_BYTES, digest
from statexchange.storage.json_text import parse_json, unseal
from statexchange.tensors import ITEMSIZE, PACKED, element_shape, group_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from statexchange.storage.budget import Budget
    from statexchange.storage.store import Store, StoredFile
__all__ = [
    "SCHEMA",
    "TORCH_SHARDING_KEY",
    "DigestedTensors",
    "Entry",
    "Header",
    "RankFile",
    "ShardData",
    "encode_header",
    "read_header",
    "read_header_bytes",
    "storage_form",
    "write_tensor_file",
    "wrong_kind_of",
    "wrong_kind_of_bytes",
]

MAX_HEADER_BYTES = 100_000_000
_MAX_NAME_BYTES = 512
_TEXT_BYTES = 64
_METADATA_KEY = "__metadata__"
WORKSPACE_KEY = "statexchange"
# torch's HuggingFaceStorageWriter keeps a shard's offsets under this key, and its version beside it.
TORCH_SHARDING_KEY, _TORCH_VERSION_KEY, _TORCH_VERSION = "DCP_SHARDING_INFO", "DCP_VERSION", "1.0"
_PER_FILE_KEYS = (WORKSPACE_KEY, TORCH_SHARDING_KEY, _TORCH_VERSION_KEY)
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}
_DTYPE = re.compile(r"[A-Z][A-Z0-9_]{0,31}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in a file, at bytes `begin` to `end` of the file.

    The shape of a packed dtype is in groups (tensors.py), or in elements if `is_supported` is False.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    is_supported: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a tensor file.

    Attributes:
        entries: tensors by name, in the order of their bytes.
        metadata: the text metadata.
        nbytes: the size that the file must have.
        unknown: tensors of unsupported dtypes, which are not among `entries`.
    """

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    nbytes: int
    unknown: Mapping[str, Entry] = field(default_factory=dict)

    @property
    def common_metadata(self) -> dict[str, str]:
        """The metadata without the keys that describe this one file's shards or its place in a workspace."""
        return {key: value for key, value in self.metadata.items() if key not in _PER_FILE_KEYS}

    def workspace_metadata(self, path: str, budget: Budget) -> dict[str, Any] | None:
        """Return the metadata that `write_tensor_file` wrote; None for any other safetensors file."""
        text = self.metadata.get(WORKSPACE_KEY)
        if text is None:
            return None
        metadata = parse_json(text, path, budget)
        if not isinstance(metadata, dict):
            raise CorruptError("metadata is not a JSON object", path=path)
        return metadata


@dataclass(frozen=True, slots=True)
class ShardData:
    """A rank's shard of one tensor, with its bytes.

    `data` is the boxes one after another, each in C order, or a function that takes a box's index and returns the box's
    bytes part by part; each part is valid until the next one is requested.
    """

    shard: Shard
    data: memoryview | Callable[[int], Iterable[memoryview]]

    def box_parts(self, index: int) -> Iterable[memoryview]:
        """Return the bytes of a box, part by part."""
        if not isinstance(self.data, memoryview):
            return self.data(index)
        sizes = [box.numel * ITEMSIZE[self.shard.dtype] for box in self.shard.boxes[: index + 1]]
        begin, end = sum(sizes[:-1]), sum(sizes)
        return (self.data[at : min(at + WINDOW_BYTES, end)] for at in range(begin, end, WINDOW_BYTES))


def storage_form(dtype: str, shape: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and shape as a file stores them, the shape in elements.

    C128, which safetensors lacks, becomes pairs of F64.
    """
    return ("F64", (*shape, 2)) if dtype == "C128" else (dtype, element_shape(dtype, shape))


def _check_name(name: str) -> None:
    """Raise UnsafeError unless a name is text of 1 to 512 bytes without control characters, and not "__metadata__"."""
    problem = _name_problem(name)
    if problem is not None:
        text = f"a tensor cannot be written under the name {excerpt(name, 60)}: {problem}; rename the tensor"
        raise UnsafeError(text)


def _name_problem(name: str) -> str | None:
    """Return why a file may not have a tensor of this name; None if it may."""
    try:
        nbytes = len(name.encode())
    except UnicodeEncodeError:
        return "it is not Unicode text"
    if not nbytes:
        return "it is empty"
    if nbytes > _MAX_NAME_BYTES:
        return f"it has {nbytes} bytes, and {_MAX_NAME_BYTES} are allowed"
    if name == _METADATA_KEY:
        return "safetensors reserves it for a file's metadata"
    return "it holds control characters" if _CONTROL.search(name) else None


def encode_header(tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """Return the length and header of a file, byte-identical to those of `safetensors.save_file`.

    `tensors` are (name, dtype, shape) in the order of their bytes.
    """
    entries: dict[str, Any] = {_METADATA_KEY: dict(metadata)}
    begin = 0
    for name, dtype, shape in tensors:
        _check_name(name)
        if name in entries:
            raise InvalidArgumentError("two tensors of one file use this name", name=name)
        end = begin + math.prod(shape) * ITEMSIZE[dtype]
        stored_dtype, stored_shape = storage_form(dtype, shape)
        entries[name] = {"dtype": stored_dtype, "shape": stored_shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise UnsafeError(f"the header would have {len(text)} bytes, and safetensors readers accept {MAX_HEADER_BYTES}")
    return struct.pack("<Q", len(text)) + text


def read_header(file: StoredFile, *, whole: bool = True) -> Header:
    """Return the header of a file; raise CorruptError if it breaks the format or the stricter rules of this module.

    With `whole=False` the file may be truncated after its header. A tensor whose dtype is not
    supported is no error: it is listed in `Header.unknown`.
    """
    size, path = file.size, file.path
    text = read_header_bytes(file)
    del text[:8]
    length = len(text)
    if text[:1] != b"{":
        raise CorruptError("not a safetensors file: its header is not a JSON object", path=path)
    raw = parse_json(text, path, file.budget)
    assert isinstance(raw, dict)  # the text begins with a brace
    metadata = raw.pop(_METADATA_KEY, {})
    if not isinstance(metadata, dict) or any(not isinstance(value, str) for value in metadata.values()):
        raise CorruptError("header metadata must map text to text", path=path)
    entries = sorted(
        (_entry(name, fields, 8 + length, path) for name, fields in raw.items()),
        key=lambda entry: (entry.begin, entry.end),
    )
    _check_contiguous(entries, 8 + length, size if whole else None, path)
    supported = {entry.name: entry for entry in entries if entry.is_supported}
    unknown = {entry.name: entry for entry in entries if entry.name not in supported}
    return Header(supported, metadata, size, unknown)


def read_header_bytes(file: StoredFile) -> bytearray:
    """Return the length and header of a file, as `encode_header` does; CorruptError if the file is shorter."""
    if file.size < 8:
        text = wrong_kind_of(file) or "file is too short to be a tensor file"
        raise CorruptError(text, path=file.path, found=f"{file.size} bytes")
    head = bytearray(8)
    file.read_into(memoryview(head), 0)
    (length,) = struct.unpack("<Q", head)
    if length > MAX_HEADER_BYTES or 8 + length > file.size:
        text = wrong_kind_of(file) or "header is truncated, or this is not a safetensors file"
        raise CorruptError(text, path=file.path)
    data = bytearray(8 + length)
    file.read_into(memoryview(data), 0)
    return data


def wrong_kind_of(file: StoredFile) -> str | None:
    """Return a message that says what a file is, if it is empty or of a kind that holds no tensors; else None."""
    start = bytearray(min(_TEXT_BYTES, file.size))
    file.read_into(memoryview(start), 0)
    return wrong_kind_of_bytes(bytes(start))


def wrong_kind_of_bytes(start: bytes) -> str | None:
    """Return what `wrong_kind_of` returns, from the first bytes of a file."""
    if not start:
        return "the file is empty"
    if start.startswith(b"PK\3\4"):
        return "this is a zip archive: if torch.save wrote it, call it .pt or .bin"
    if start.startswith(b"\x1f\x8b"):
        return "this file is compressed by gzip: unpack it first"
    text = start.lstrip().lower()
    if text.startswith(b"version https://git-lfs.github.com/spec/"):
        return "this is a pointer of Git LFS, not the file itself: fetch it with git lfs pull"
    if text.startswith((b"<!doctype html", b"<html", b"<?xml")):
        return "this is a web page, not the file: the download got an error page, download it again"
    if text.startswith(b"{") and start.isascii() and b"\0" not in start:  # a header's length has zeros
        return "this is JSON text, not the file: if it is an error message of a download, download the file again"
    return None


def _entry(name: str, fields: Any, data_start: int, path: str) -> Entry:
    problem = _name_problem(name)
    if problem is not None:
        raise CorruptError(f"a tensor is called {excerpt(name, 60)}: {problem}", path=path)
    if not isinstance(fields, dict) or fields.keys() != _ENTRY_KEYS:
        raise CorruptError("header entry has missing or unknown fields", path=path, name=name)
    dtype = fields["dtype"]
    if not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype) or dtype == "C128":
        raise CorruptError(f"unknown dtype {excerpt(dtype, 60)}", path=path, name=name)
    try:
        shape, (begin, end) = shape_from_json(fields["shape"]), sizes_from_json(fields["data_offsets"])
    except ValueError:
        raise CorruptError("header entry has a bad shape or bad offsets", path=path, name=name) from None
    if not _fits(end - begin, dtype, math.prod(shape)):
        expected: int | str = "elements of a whole number of bits"
        if dtype in ITEMSIZE:
            expected = math.prod(shape) * ITEMSIZE[dtype] // PACKED.get(dtype, 1)
        raise CorruptError(
            "byte count does not fit the shape", path=path, name=name, expected=expected, found=end - begin
        )
    groups = group_shape(dtype, shape) if dtype in ITEMSIZE else None
    return Entry(name, dtype, groups or shape, data_start + begin, data_start + end, groups is not None)


def _fits(nbytes: int, dtype: str, numel: int) -> bool:
    """Whether a tensor may have this many bytes: for an unknown dtype, a whole number of bits per element."""
    if dtype in PACKED:
        return nbytes * PACKED[dtype] == numel * ITEMSIZE[dtype]
    if dtype in ITEMSIZE or not numel:
        return nbytes == numel * ITEMSIZE.get(dtype, 0)
    return nbytes >= 0 and 8 * nbytes % numel == 0


def _check_contiguous(entries: Sequence[Entry], start: int, size: int | None, path: str) -> None:
    """Raise CorruptError unless the tensors follow one another from `start` to `size`; None: to any size."""
    at = start
    for entry in entries:
        if entry.begin != at:
            raise CorruptError(
                "tensors overlap or leave a gap", path=path, name=entry.name, expected=at, found=entry.begin
            )
        at = entry.end
    if size is not None and size < at:
        raise TruncatedError("file is truncated", path=path, expected=at, found=size)
    if size is not None and size > at:
        raise CorruptError("file has bytes after the last tensor", path=path, expected=at, found=size)


def _header_metadata(shards: Sequence[Shard], no_digest: str, metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the text metadata of a file: the workspace's, "format", and torch's sharding keys.

    `no_digest` stands in the place of each digest.
    """
    tensors = {}
    torch_sharding = {}
    for shard in shards:
        tensors[shard.name] = {
            "dtype": shard.dtype,
            "global_shape": list(shard.global_shape),
            "boxes": [box.to_json() for box in shard.boxes],
            "digests": [no_digest] * len(shard.boxes),
        }
        if len(shard.boxes) == 1:
            torch_sharding[shard.name] = {"saved_offsets": _saved_offsets(shard)}
    return {
        WORKSPACE_KEY: json.dumps({**metadata, "tensors": tensors}, separators=(",", ":")),
        "format": "pt",
        TORCH_SHARDING_KEY: json.dumps(torch_sharding, separators=(",", ":")),
        _TORCH_VERSION_KEY: _TORCH_VERSION,
    }


def _saved_offsets(shard: Shard) -> list[int]:
    """Return a shard's offsets with as many dims as the tensor has in the file."""
    return [*shard.boxes[0].offsets, *((0,) if shard.dtype == "C128" else ())]


def write_tensor_file(
    dir_fd: int,
    name: str,
    path: str,
    shards: Sequence[ShardData],
    metadata: Mapping[str, Any],
    *,
    durable: bool,
    mode: int = 0o600,
) -> tuple[int, dict[str, list[str]]]:
    """Write one rank's tensors and metadata as a new file; return its size in bytes, and its tensors' digests by name.

    The digests are computed while the tensors are written, so the header, which has them, is written last.
    """
    ordered = _in_file_order(shards)
    header = _RankHeader(ordered, metadata)
    digests: list[str] = []
    nbytes = header.nbytes + sum(data.shard.nbytes for data in ordered)
    write_new(
        dir_fd,
        name,
        _digested(ordered, digests),
        nbytes=nbytes,
        path=path,
        durable=durable,
        mode=mode,
        begin=header.nbytes,
        header=lambda: header.with_digests(digests),
    )
    return nbytes, _by_name(ordered, digests)


@dataclass(frozen=True, slots=True)
class DigestedTensors:
    """One rank's tensors as the file that `write_tensor_file` writes, for a store that takes bytes in order.

    The header comes first and has the digests, so the tensors are read twice.

    Attributes:
        header: the first bytes of the file.
        nbytes: the size of the file.
    """

    header: bytes
    nbytes: int
    _shards: tuple[ShardData, ...]
    _digests: tuple[str, ...]

    @classmethod
    def of(cls, shards: Sequence[ShardData], metadata: Mapping[str, Any]) -> DigestedTensors:
        """Read the tensors once, for their digests."""
        ordered = _in_file_order(shards)
        digests: list[str] = []
        for _ in _digested(ordered, digests):
            pass
        header = _RankHeader(ordered, metadata).with_digests(digests)
        nbytes = len(header) + sum(data.shard.nbytes for data in ordered)
        return cls(header, nbytes, tuple(ordered), tuple(digests))

    @property
    def digests(self) -> dict[str, list[str]]:
        """The digests of each tensor's boxes."""
        return _by_name(self._shards, self._digests)

    def parts(self) -> Iterator[memoryview]:
        """Yield the bytes after the header; each part is valid until the next one is requested.

        Raises:
            CorruptError: a tensor was changed since its digest was made.
        """
        digests: list[str] = []
        # Each part is digested after its use, so that a change before or during the use is found.
        yield from _digested(self._shards, digests, after_use=True)
        names = (data.shard.name for data in self._shards for _ in data.shard.boxes)
        for name, expected, found in zip(names, self._digests, digests, strict=True):
            if found != expected:
                text = "changed while it was saved: do not write into the state during a save, or use background=True"
                raise CorruptError(text, name=name)


def _in_file_order(shards: Sequence[ShardData]) -> list[ShardData]:
    dtypes = list(ITEMSIZE)
    return sorted(shards, key=lambda data: (-dtypes.index(data.shard.dtype), data.shard.name))


def _by_name(shards: Sequence[ShardData], digests: Sequence[str]) -> dict[str, list[str]]:
    """Return the digests of each tensor's boxes, from those of all boxes in file order."""
    following = iter(digests)
    return {data.shard.name: list(islice(following, len(data.shard.boxes))) for data in shards}


class _RankHeader:
    """The header of a rank's file, encoded before the digests are known: they all have the same length."""

    def __init__(self, shards: Sequence[ShardData], metadata: Mapping[str, Any]) -> None:
        no_digest = secrets.token_hex(16)  # as long as a digest; random, so that no name and no value contains it
        described = [data.shard for data in shards]
        with collector_paused():
            entries = [(shard.name, shard.dtype, shard.local_shape) for shard in described]
            header = encode_header(entries, _header_metadata(described, no_digest, metadata))
        self.nbytes = len(header)
        self._between_digests = header.split(no_digest.encode())

    def with_digests(self, digests: Sequence[str]) -> bytes:
        """Return the header with the digests of all boxes."""
        parts = [b""] * (2 * len(digests) + 1)
        parts[::2] = self._between_digests
        parts[1::2] = map(str.encode, digests)
        return b"".join(parts)


def _digested(shards: Sequence[ShardData], digests: list[str], *, after_use: bool = False) -> Iterator[memoryview]:
    """Yield the bytes of all tensors, and append each box's digest to `digests` after its last part.

    Each part is digested before it is yielded, while it is in the processor's cache, or with `after_use` afterwards.
    """
    import xxhash

    for data in shards:
        for index in range(len(data.shard.boxes)):
            hasher = xxhash.xxh3_128()
            for part in data.box_parts(index):
                if after_use:
                    yield part
                    hasher.update(part)
                else:
                    hasher.update(part)
                    yield part
            digests.append(hasher.hexdigest())


SCHEMA = 1  # of the metadata


class RankFile:
    """One rank's open file: metadata, shards and digests, and bytes on demand. A context manager.

    Args:
        file: the file.
        expected: entries that its metadata must have, among them its "rank".
        size: the size in bytes that it must have, if it is known.

    Attributes:
        path: the file's path.
        metadata: what the writer stored about the file, as a JSON object.
        config: the config as JSON text for `values.decode`.
        shards: the rank's shards by tensor name.
        digests: for each shard, the digests of its boxes.
        store: what `close` closes; None if the file is closed with something else, such as a `WorkspaceView`.
    """

    store: Store | None = None

    def __init__(self, file: StoredFile, expected: Mapping[str, str | int], size: int | None = None) -> None:
        self.file = file
        self.path = path = file.path
        rank = int(expected["rank"])
        if size is not None and file.size < size:
            raise TruncatedError("file is truncated", path=path, rank=rank, expected=size, found=file.size)
        if size is not None and file.size > size:
            raise CorruptError("size differs from its receipt", path=path, rank=rank, expected=size, found=file.size)
        self.header: Header = read_header(file)
        metadata = self.header.workspace_metadata(path, file.budget)
        if metadata is None:
            raise CorruptError("not a rank's file of statexchange", path=path)
        if metadata.get("schema") != SCHEMA:
            raise CorruptError(
                "its metadata is of another version", path=path, expected=SCHEMA, found=metadata.get("schema")
            )
        _check_digest(metadata, path, rank)
        self.metadata = metadata
        self.config = metadata.get("config", "null")
        if not isinstance(self.config, str):
            raise CorruptError("its config is not text", path=path, rank=rank)
        self.shards, self.digests = _shards(self.header, metadata, path)
        for key, value in expected.items():
            if metadata.get(key) != value:
                raise CorruptError(
                    f"its metadata names another {key}",
                    path=path,
                    rank=rank,
                    expected=value,
                    found=metadata.get(key),
                )

    def byte_ranges(self, name: str) -> list[tuple[int, int]]:
        """Return (first byte in the file, number of bytes) of each box of a tensor."""
        shard = self.shards[name]
        sizes = [box.numel * ITEMSIZE[shard.dtype] for box in shard.boxes]
        return list(zip(accumulate(sizes, initial=self.header.entries[name].begin), sizes, strict=False))

    def read(self, name: str) -> bytearray:
        """Return a tensor's bytes in a new buffer; raise CorruptError if a digest differs."""
        entry = self.header.entries[name]
        data = bytearray(entry.nbytes)
        view = memoryview(data)
        self.file.read_into(view, entry.begin)
        for expected, (begin, nbytes) in zip(self.digests[name], self.byte_ranges(name), strict=True):
            found = digest(view[begin - entry.begin :][:nbytes])
            if found != expected:
                self.file.check_unchanged()  # a file that was changed while it was read is not corrupt
                raise CorruptError(
                    "bytes differ from their digest",
                    path=self.path,
                    name=name,
                    rank=self.metadata["rank"],
                    expected=expected,
                    found=found,
                )
        return data

    def close(self) -> None:
        """Close `store`."""
        if self.store is not None:
            self.store.close()

    def __enter__(self) -> RankFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _check_digest(metadata: dict[str, Any], path: str, rank: int) -> None:
    """Raise CorruptError if metadata differs from its own digest, which files of older versions do not have.

    It covers the config and all else but the tensors, which are compared with the header and have digests.
    """
    if "digest" not in metadata:
        return
    try:
        unseal({key: value for key, value in metadata.items() if key != "tensors"})
    except ValueError:
        raise CorruptError("its metadata differs from its own digest", path=path, rank=rank) from None


def _shards(header: Header, metadata: dict[str, Any], path: str) -> tuple[dict[str, Shard], dict[str, tuple[str, ...]]]:
    """Return the shards of a file's tensors, and the digests of their boxes, by tensor name."""
    tensors = metadata.get("tensors")
    if header.unknown:
        entry = next(iter(header.unknown.values()))
        raise CorruptError(f"unknown dtype {entry.dtype}", path=path, name=entry.name)
    if not isinstance(tensors, dict) or tensors.keys() != header.entries.keys():
        raise CorruptError("metadata and header list different tensors", path=path)
    shards, digests = {}, {}
    for name, raw in tensors.items():
        try:
            boxes = tuple(Box.from_json(box) for box in raw["boxes"])
            shard = Shard(name, raw["dtype"], sizes_from_json(raw["global_shape"]), boxes)
            box_digests = tuple(str(text) for text in raw["digests"])
            entry = header.entries[name]
            stored = storage_form(entry.dtype, entry.shape)
            fits = storage_form(shard.dtype, shard.local_shape) == stored
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptError(f"broken metadata: {error}", path=path, name=name) from None
        if not fits or len(box_digests) != len(boxes):
            raise CorruptError("metadata does not fit the header", path=path, name=name)
        shards[name], digests[name] = shard, box_digests
    return shards, digests
