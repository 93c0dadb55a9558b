"""The files that ranks write: tensor files, and the manifest of a save.

A tensor file is a safetensors file with a rank's sharding, digests and config in its metadata. Layout: the header's
length (8 bytes, little-endian), a JSON header, then the tensors' bytes in C order without gaps. The reader is stricter
than safetensors: no duplicate keys, no unknown fields, no control characters in names.

The directory of a save has a tensor file of each rank, and ``save.json``, which lists them and is written last. A build
(build.py) makes the directory appear under its name as a whole. Every file has in its metadata the random id of the
save that wrote it, so that files of two saves are never read as one. Beside its file a rank may have files of
parameters that do not train, which later saves link: the manifest has the id of the save that wrote each of them.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping, Sequence  # ranks send manifests, so that their hints are read at run time
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    NotFoundError,
    ReplacedError,
    StateExchangeError,
    TruncatedError,
    UnsafeError,
    excerpt,
)
from statexchange.sharding.shards import MAX_SIZE, Box, Shard, full_box, numel_of, sizes_from_json
from statexchange.storage.files import digest
from statexchange.storage.location import parse_json, read_json, seal, unseal
from statexchange.storage.store import ByteRange
from statexchange.storage.wrong_kinds import wrong_kind_of
from statexchange.tensors import (
    ITEMSIZE,
    PACKED,
    TensorLike,
    element_shape,
    group_shape,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy as np
    from numpy.typing import NDArray

    from statexchange.storage.store import Budget, Store, StoredFile

MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors' own reader
_MAX_NAME_BYTES = 512
METADATA_KEY = "__metadata__"
WORKSPACE_KEY = "statexchange"
# torch's HuggingFaceStorageWriter keeps a shard's offsets under this key, and its version beside it.
TORCH_SHARDING_KEY, TORCH_VERSION_KEY = "DCP_SHARDING_INFO", "DCP_VERSION"
_PER_FILE_KEYS = (WORKSPACE_KEY, TORCH_SHARDING_KEY, TORCH_VERSION_KEY)
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}
_CHANGED_IN_FILE = frozenset({"C128", *PACKED})  # dtypes whose shape, or name, is another in a file
_INT = frozenset({int})
_DTYPE = re.compile(r"[A-Z][A-Z0-9_]{0,31}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class Entry(NamedTuple):
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

    `data` has one tensor for each box, of any dtype and shape, whose bytes (`run_bytes`) are the box in C order; or it
    is a function that takes a box's index and returns the box's bytes in C order, part by part, each of which is valid
    until the next one is requested.
    """

    shard: Shard
    data: tuple[TensorLike, ...] | Callable[[int], Iterable[memoryview]]


def _refused_name(names: Mapping[str, object]) -> tuple[str, str] | None:
    """Return the first name that no tensor of a file may have, with the reason; None if there is none."""
    # Nearly always none is refused, which one look at all of them shows: what is printable has neither control
    # characters nor surrogates, and no character has more than 4 bytes.
    is_reserved = "" in names or METADATA_KEY in names
    if not is_reserved and "".join(names).isprintable() and 4 * max(map(len, names), default=0) <= _MAX_NAME_BYTES:
        return None
    for name in names:
        try:
            nbytes = len(name.encode())
        except UnicodeEncodeError:
            return name, "it is not Unicode text"
        if not nbytes:
            return name, "it is empty"
        if nbytes > _MAX_NAME_BYTES:
            return name, f"it has {nbytes} bytes, and {_MAX_NAME_BYTES} are allowed"
        if name == METADATA_KEY:
            return name, "safetensors reserves it for a file's metadata"
        # A terminal would obey them, and they would break the lines of a log.
        if _CONTROL.search(name):
            return name, "it holds control characters"
    return None


def _in_file(dtype: str, shape: Sequence[int]) -> tuple[str, Sequence[int]]:
    """Return the dtype and shape as a file stores them, the shape in elements."""
    # safetensors has no C128: such a number is stored as a pair of F64.
    if dtype == "C128":
        return "F64", (*shape, 2)
    return dtype, element_shape(dtype, shape)


def header_text(tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]) -> str:
    """Return the text of a header: ``{"__metadata__":{},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}``.

    `tensors` are (name, dtype, shape) in the order of their bytes.
    """
    entries: dict[str, object] = {}
    begin = 0
    for name, dtype, shape in tensors:
        if name in entries:
            raise InvalidArgumentError("two tensors of one file use this name", name=name)
        end = begin + math.prod(shape) * ITEMSIZE[dtype]
        stored_dtype, stored_shape = dtype, shape
        if dtype in _CHANGED_IN_FILE:
            stored_dtype, stored_shape = _in_file(dtype, shape)
        entries[name] = {"dtype": stored_dtype, "shape": stored_shape, "data_offsets": [begin, end]}
        begin = end
    refused = _refused_name(entries)
    if refused is not None:
        name, reason = refused
        problem = f"a tensor cannot be written under the name {excerpt(name, 60)}: {reason}; rename the tensor"
        raise UnsafeError(problem)
    return json.dumps({METADATA_KEY: metadata, **entries}, ensure_ascii=False, separators=(",", ":"))


def encode_header(text: str) -> bytes:
    """Return the length and header of a file, byte-identical to those of `safetensors.save_file`."""
    encoded = text.encode()
    # As safetensors does: the bytes of the tensors then begin where elements of 8 bytes may lie in a mapped file.
    encoded += b" " * (-len(encoded) % 8)
    if len(encoded) > MAX_HEADER_BYTES:
        problem = f"the header would have {len(encoded)} bytes, and safetensors readers accept {MAX_HEADER_BYTES}"
        raise UnsafeError(problem)
    return struct.pack("<Q", len(encoded)) + encoded


def read_header(file: StoredFile, *, whole: bool = True) -> Header:
    """Return the header of a file; raise CorruptError if it breaks the format or the stricter rules of this module.

    With `whole=False` the file may be truncated after its header. A tensor whose dtype is not
    supported is no error: it is listed in `Header.unknown`.
    """
    size, path = file.size, file.path
    text = read_header_bytes(file)
    at = len(text)
    del text[:8]
    if text[:1] != b"{":
        raise CorruptError("not a safetensors file: its header is not a JSON object", path=path)
    raw = parse_json(text, path, file.budget)
    assert isinstance(raw, dict)  # the text begins with a brace
    metadata = raw.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or set(map(type, metadata.values())) - {str}:
        raise CorruptError("header metadata must map text to text", path=path)
    refused = _refused_name(raw)
    if refused is not None:
        raise CorruptError(f"a tensor is called {excerpt(refused[0], 60)}: {refused[1]}", path=path)
    entries = _entries(raw, at, path)
    # Keys of a header may come in any order; only the offsets say where tensors lie.
    entries.sort(key=attrgetter("begin", "end"))
    supported: dict[str, Entry] = {}
    unknown: dict[str, Entry] = {}
    for entry in entries:
        if entry.begin != at:
            problem = "tensors overlap or leave a gap"
            raise CorruptError(problem, path=path, name=entry.name, expected=at, found=entry.begin)
        at = entry.end
        of_kind = supported if entry.is_supported else unknown
        of_kind[entry.name] = entry
    if whole and size < at:
        raise TruncatedError("file is truncated", path=path, expected=at, found=size)
    if whole and size > at:
        raise CorruptError("file has bytes after the last tensor", path=path, expected=at, found=size)
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


def _entries(raw: Mapping[str, object], data_start: int, path: str) -> list[Entry]:
    """Return the checked entries of a header: ``{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}``."""
    entries = []
    # One loop and no call for each tensor: this is the larger part of opening a file of many small ones.
    for name, fields in raw.items():
        if not isinstance(fields, dict) or fields.keys() != _ENTRY_KEYS:
            raise CorruptError("header entry has missing or unknown fields", path=path, name=name)
        dtype, sizes = fields["dtype"], fields["shape"]
        if not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype) or dtype == "C128":
            raise CorruptError(f"unknown dtype {excerpt(dtype, 60)}", path=path, name=name)
        try:
            begin, end = fields["data_offsets"]
            # A bool is an int, too, and so its type is compared.
            if type(sizes) is not list or not _INT.issuperset(map(type, (begin, end, *sizes))):
                raise ValueError
            shape = tuple(sizes)
            numel = numel_of(shape)
            if not (0 <= begin <= MAX_SIZE and 0 <= end <= MAX_SIZE):
                raise ValueError
        except (TypeError, ValueError):
            raise CorruptError("header entry has a bad shape or bad offsets", path=path, name=name) from None
        nbytes, itemsize, per_group = end - begin, ITEMSIZE.get(dtype), PACKED.get(dtype, 1)
        expected: int | str = "elements of a whole number of bits"
        if itemsize is not None:
            expected = numel * itemsize // per_group
            fits = nbytes * per_group == numel * itemsize
        elif numel:
            # Of a dtype that is not known, only this can be checked.
            fits = nbytes >= 0 and 8 * nbytes % numel == 0
        else:
            fits = nbytes == 0
        if not fits:
            text = "byte count does not fit the shape"
            raise CorruptError(text, path=path, name=name, expected=expected, found=nbytes)
        groups: tuple[int, ...] | None = None
        if itemsize is not None:
            groups = group_shape(dtype, shape) if dtype in PACKED else shape
        begin, end = data_start + begin, data_start + end
        entries.append(Entry(name, dtype, shape if groups is None else groups, begin, end, groups is not None))
    return entries


SCHEMA = 1  # of a rank's metadata


class IndexedState(NamedTuple):
    """The metadata of a rank's file that are not about its tensors."""

    aliases: Mapping[str, str]
    per_rank: Sequence[str]
    optimizers: Mapping[str, str]
    left_out: Sequence[str]

    def to_json(self) -> dict[str, object]:
        """Return the state as a JSON value, without what is empty."""
        return {name: value for name, value in self._asdict().items() if value}

    @classmethod
    def from_json(cls, raw: object) -> IndexedState:
        """Return the state of such an object, which may have other keys, too; raise ValueError for anything else."""
        if not isinstance(raw, dict):
            raise ValueError(f"not a state: {excerpt(raw)}")
        aliases, optimizers = raw.get("aliases", {}), raw.get("optimizers", {})
        per_rank, left_out = raw.get("per_rank", []), raw.get("left_out", [])
        kinds = [*map(type, (aliases, optimizers, per_rank, left_out))]
        if kinds != [dict, dict, list, list]:
            raise ValueError("the aliases, optimizers and paths of a state are of another kind")
        texts = [*aliases.values(), *optimizers.values(), *per_rank, *left_out]
        if {*map(type, texts)} - {str}:
            raise ValueError("the aliases, optimizers and paths of a state are not texts")
        return cls(aliases, per_rank, optimizers, left_out)


class RankFile:
    """One rank's open file: metadata, shards and digests, and bytes on demand. It is closed with its store.

    Args:
        file: the file.
        expected: entries that its metadata must have, among them its "rank".
        size: the size in bytes that it must have, if it is known.

    Attributes:
        path: the file's path.
        metadata: what the writer stored about the file, as a JSON object.
        config: the config as JSON text for `values.decode`.
        shards: the rank's shards by tensor name.
        byte_ranges: for each shard, where its boxes lie, with their digests.
    """

    def __init__(self, file: StoredFile, expected: Mapping[str, str | int], size: int | None = None) -> None:
        self.file = file
        self.path = path = file.path
        rank = int(expected["rank"])
        if size is not None and file.size < size:
            raise TruncatedError("file is truncated", path=path, rank=rank, expected=size, found=file.size)
        if size is not None and file.size > size:
            raise CorruptError(
                "size differs from the recorded one", path=path, rank=rank, expected=size, found=file.size
            )
        header = read_header(file)
        metadata = header.workspace_metadata(path, file.budget)
        if metadata is None:
            raise CorruptError("not a rank's file of statexchange", path=path)
        schema = metadata.get("schema")
        if schema != SCHEMA:
            raise CorruptError("its metadata is of another version", path=path, expected=SCHEMA, found=schema)
        tensors = metadata.pop("tensors", None)
        # The digest covers all else: the tensors are compared with the header, and have digests. Files of older
        # versions do not have it.
        if "digest" in metadata:
            try:
                unseal(metadata)
            except ValueError:
                raise CorruptError("its metadata differs from its own digest", path=path, rank=rank) from None
        self.metadata = metadata
        self.config = metadata.get("config", "null")
        if not isinstance(self.config, str):
            raise CorruptError("its config is not text", path=path, rank=rank)
        self.shards: dict[str, Shard] = {}
        self.byte_ranges: dict[str, tuple[ByteRange, ...]] = {}
        self._add_shards(header, tensors)
        for key, value in expected.items():
            if metadata.get(key) != value:
                text = f"its metadata names another {key}"
                raise CorruptError(text, path=path, rank=rank, expected=value, found=metadata.get(key))

    def _add_shards(self, header: Header, tensors: object) -> None:
        """Check the metadata's records of tensors against the header, and add their shards and byte ranges."""
        path = self.path
        for entry in header.unknown.values():
            raise CorruptError(f"unknown dtype {entry.dtype}", path=path, name=entry.name)
        if not isinstance(tensors, dict) or tensors.keys() != header.entries.keys():
            raise CorruptError("metadata and header list different tensors", path=path)
        parsed: dict[str, tuple[tuple[int, ...], tuple[Box, ...]]] = {}
        for name, raw in tensors.items():
            entry = header.entries[name]
            try:
                # Many tensors have equal shapes and boxes. Their texts are compared: as numbers, true and 2.0 in a
                # record would equal 1 and 2.
                key = f"{raw['global_shape']!r} {raw['boxes']!r}"
                if key not in parsed and key == f"{[*entry.shape]} {[[[0] * len(entry.shape), [*entry.shape]]]}":
                    # A whole tensor, whose shape was checked in the header.
                    parsed[key] = entry.shape, (full_box(entry.shape),)
                elif key not in parsed:
                    parsed[key] = sizes_from_json(raw["global_shape"]), tuple(map(Box.from_json, raw["boxes"]))
                shape, boxes = parsed[key]
                shard = Shard(name, raw["dtype"], shape, boxes)
                digests = tuple(map(str, raw["digests"]))
            except (KeyError, TypeError, ValueError) as error:
                raise CorruptError(f"broken metadata: {error}", path=path, name=name) from None
            itemsize, begin, byte_ranges = ITEMSIZE[shard.dtype], entry.begin, []
            for box, expected in zip(boxes, digests, strict=False):
                nbytes = math.prod(box.shape) * itemsize
                byte_ranges.append(ByteRange(self.file, begin, nbytes, expected))
                begin += nbytes
            # Of several boxes, only the number of elements must fit: they lie one after another in one dim.
            local_shape = boxes[0].shape if len(boxes) == 1 else shard.local_shape
            stored: tuple[str, Sequence[int]] = shard.dtype, local_shape
            if shard.dtype == "C128":
                stored = _in_file(*stored)
            if (entry.dtype, entry.shape) != stored or len(digests) != len(boxes):
                raise CorruptError("metadata does not fit the header", path=path, name=name)
            self.shards[name], self.byte_ranges[name] = shard, tuple(byte_ranges)

    def read(self, name: str) -> NDArray[np.uint8]:
        """Return a tensor's bytes in a new array; raise CorruptError if a digest differs."""
        import numpy as np

        # Not a bytearray, which would be filled with zeros first: that takes as long as the reading.
        data = np.empty(self.shards[name].nbytes, np.uint8)
        rest = data.data
        for stored in self.byte_ranges[name]:
            box, rest = rest[: stored.nbytes], rest[stored.nbytes :]
            self.file.read_into(box, stored.begin)
            actual = digest(box)
            if actual != stored.digest:
                self.file.check_unchanged()  # a file that was changed while it was read is not corrupt
                text, rank = "bytes differ from their digest", self.metadata["rank"]
                raise CorruptError(text, path=self.path, name=name, rank=rank, expected=stored.digest, found=actual)
        return data


# The directory of a save

MANIFEST = "save.json"
_SAVE = re.compile(r"[0-9a-f]{16}")
_MAX_RANKS = 10**6
_RANK_FILE = re.compile(r"rank-([0-9]{5,9})-of-[0-9]{5,9}(?:\.frozen-[0-9]+)?\.safetensors")
_WITH_FROZEN = 2  # schema of the manifest of a save with files of frozen parameters, which older versions cannot read


def rank_of_file(name: str) -> int | None:
    """Return the rank of a rank's file, or of its file of frozen parameters; None for any other name."""
    match = _RANK_FILE.fullmatch(name)
    return None if match is None else int(match[1])


def rank_file_names(world_size: int) -> list[str]:
    """Return the names of all ranks' files, in rank order."""
    names = []
    for rank in range(world_size):
        names.append(f"rank-{rank:05d}-of-{world_size:05d}.safetensors")
    return names


def frozen_file_name(rank: int, world_size: int, number: int) -> str:
    """Return the name of a rank's file of frozen parameters; a rank counts its own from 0."""
    return f"rank-{rank:05d}-of-{world_size:05d}.frozen-{number}.safetensors"


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A tensor file of a save: its name, size and rank, and the id of the save that wrote it."""

    name: str
    nbytes: int
    rank: int
    save: str


@dataclass(frozen=True, slots=True)
class SaveManifest:
    """The content of ``save.json``.

    Attributes:
        save: 16 random hex digits, which all files that this save wrote have in their metadata.
        job: identity of the job's run that made the save.
        created: time of the save, in seconds since the epoch by the clock of rank 0's host.
        nbytes: size in bytes of each rank's file, in rank order.
        step: the training step; None for a save without one.
        metrics: numbers that the job gave with the save.
        frozen: the files of frozen parameters, which an earlier save may have written.
        index: the text of the index of all files (save_index.py); "" for a save without one.
        superseded: the ids of the saves of later steps that the job left behind when it went back to an earlier one.
    """

    save: str
    job: str
    created: float
    nbytes: tuple[int, ...]
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    frozen: tuple[SavedFile, ...] = ()
    index: str = ""
    superseded: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks, each of which has a file."""
        return len(self.nbytes)

    @property
    def files(self) -> list[str]:
        """Names of the ranks' files, in rank order."""
        return rank_file_names(len(self.nbytes))

    @property
    def all_files(self) -> list[SavedFile]:
        """The files of the ranks, and then those of frozen parameters."""
        files = []
        for rank, name in enumerate(rank_file_names(len(self.nbytes))):
            files.append(SavedFile(name, self.nbytes[rank], rank, self.save))
        return [*files, *self.frozen]

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.all_files)

    def to_bytes(self) -> bytes:
        """Return the text of the file."""
        metrics = {}
        for name, value in self.metrics.items():
            # JSON has no such numbers, and our readers refuse Python's way to write them.
            metrics[name] = value if math.isfinite(value) else str(value)
        record = {
            "schema": SCHEMA,
            "save": self.save,
            "job": self.job,
            "created": self.created,
            "step": self.step,
            "metrics": metrics,
            "files": list(map(list, zip(self.files, self.nbytes, strict=True))),
        }
        if self.frozen:
            record["schema"] = _WITH_FROZEN
            record["frozen"] = [[file.name, file.nbytes, file.rank, file.save] for file in self.frozen]
        if self.index:
            # As text: whoever lists saves need not parse it.
            record["index"] = self.index
        if self.superseded:
            record["superseded"] = list(self.superseded)
        return json.dumps(seal(record), indent=1, ensure_ascii=False).encode()

    @classmethod
    def from_json(cls, parsed: object, path: str) -> SaveManifest:
        """Return the manifest that `to_bytes` encoded, from its parsed JSON; raise CorruptError for anything else."""
        try:
            raw = unseal(parsed)
            if raw["schema"] not in (SCHEMA, _WITH_FROZEN):
                text = "this save was written by a newer version of statexchange: use that version to read it"
                raise CorruptError(text, path=path, expected=_WITH_FROZEN, found=raw["schema"])
            names, sizes, metrics = [], [], {}
            for name, size in raw["files"]:
                names.append(name)
                sizes.append(size)
            for name, value in raw["metrics"].items():
                metrics[name] = _number_from_json(value)
            created = _number_from_json(raw["created"])
            frozen = []
            for fields in raw.get("frozen", ()):
                frozen.append(SavedFile(*fields))
            index, superseded = raw.get("index", ""), tuple(raw.get("superseded", ()))
            of_all = tuple(sizes), raw["step"], metrics, tuple(frozen), index, superseded
            manifest = cls(raw["save"], raw["job"], created, *of_all)
            manifest._check(names)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, StateExchangeError):
                raise
            what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            text = f"broken manifest of a save: {what}. It was changed after the save: restore it, or load another save"
            raise CorruptError(text, path=path) from None
        return manifest

    def _check(self, names: Sequence[str]) -> None:
        if not isinstance(self.save, str) or not _SAVE.fullmatch(self.save) or not isinstance(self.job, str):
            raise ValueError("it does not name its save and job")
        if self.step is not None and (type(self.step) is not int or self.step < 0):
            raise ValueError("its step is not a number")
        if not isinstance(self.index, str):
            raise ValueError("its index is not a text")
        if not all(map(_SAVE.fullmatch, self.superseded)):
            raise ValueError("it does not name the saves that it supersedes")
        # The number of ranks bounds the work of a reader, before anything is made for each.
        are_sizes = 0 < len(self.nbytes) <= _MAX_RANKS and {*map(type, self.nbytes)} == {int}
        if not are_sizes or min(self.nbytes) < 0:
            raise ValueError("it does not list the size of each file")
        if names != self.files:
            raise ValueError("it does not list one file per rank")
        numbers = dict.fromkeys(range(len(names)), 0)
        for file in self.frozen:
            is_sized = type(file.nbytes) is int and type(file.rank) is int and file.nbytes >= 0 and file.rank in numbers
            if not is_sized or not isinstance(file.save, str) or not _SAVE.fullmatch(file.save):
                raise ValueError("it does not list rank, size and save of each file of frozen parameters")
            if file.name != frozen_file_name(file.rank, len(names), numbers[file.rank]):
                raise ValueError("a rank's files of frozen parameters are not numbered from 0")
            numbers[file.rank] += 1


def _number_from_json(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    if value in ("nan", "inf", "-inf"):
        return float(str(value))
    raise ValueError("a metric or time is not a number")


def read_manifest(store: Store) -> SaveManifest:
    """Return the manifest in a directory; raise NotFoundError without one."""
    file = store.open(MANIFEST)
    return SaveManifest.from_json(read_json(file), file.path)


def removable_files(store: Store) -> list[str]:
    """Return the files of a save in the order of their removal: the manifest first, so that it is no save any more.

    An empty directory has none.

    Raises:
        UnsafeError: there is no manifest, or an entry that it does not list.
        CorruptError: the manifest is broken.
    """
    if not store.listing:
        return []
    try:
        files = [file.name for file in read_manifest(store).all_files]
    except NotFoundError:
        raise UnsafeError("refused to replace or remove: this directory is not a save", path=store.path) from None
    unlisted = sorted(store.listing.keys() - {MANIFEST, *files})
    if unlisted:
        text = f"refused to replace or remove: {unlisted[0]!r} is not a file of this save; move it elsewhere first"
        raise UnsafeError(text, path=store.path)
    return [MANIFEST, *files]


def rank_metadata(save: str, rank: int, world_size: int, config: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a rank's file; `config` is JSON text of `values.encode`."""
    identity = {"schema": SCHEMA, "save": save, "rank": rank, "world_size": world_size}
    return seal({**extra, **identity, "config": config})


def is_of_a_save(store: Store, name: str) -> bool:
    """Whether a file is one that a rank wrote for a save; False if it is broken."""
    try:
        file = store.open(name)
        metadata = read_header(file).workspace_metadata(file.path, file.budget)
    except CorruptError:
        return False
    return metadata is not None and "save" in metadata


def is_stray(store: Store, name: str) -> bool:
    """Whether a file in a directory without a manifest is a rank's file of an unfinished save."""
    try:
        return rank_of_file(name) is not None and is_of_a_save(store, name)
    except (NotFoundError, ReplacedError):  # removed meanwhile
        return False


def open_rank_file(store: Store, manifest: SaveManifest, listed: SavedFile) -> RankFile:
    """Open a rank's file of a save; it is closed with the store.

    Raises:
        IncompleteError: the file is missing.
        CorruptError: its header, metadata or size is wrong, or it belongs to another save.
    """
    rank = listed.rank
    expected: dict[str, str | int] = {"save": listed.save, "rank": rank, "world_size": len(manifest.nbytes)}
    try:
        file = store.open(listed.name)
    except NotFoundError as error:
        raise IncompleteError("this rank's file is missing", rank=rank, path=error.path) from None
    return RankFile(file, expected, listed.nbytes)
