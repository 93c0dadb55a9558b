"""Read a directory of torch.distributed.checkpoint (DCP), which FSDP and accelerate write too.

It has a ``.metadata`` pickle and files ``__R_N.distcp``. Each entry of a .distcp file is a complete torch.save archive.
Names are the flattened keys of the saved state.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from statexchange import values
from statexchange.errors import (
    CorruptError,
    IncompleteError,
    StateExchangeError,
    UnsafeError,
    UnsupportedError,
    excerpt,
    type_text,
)
from statexchange.formats.pickles import MAX_PICKLE_BYTES, GlobalRef, OpaqueObject, read_pickle
from statexchange.formats.source import ShardFile, Source, SourceTensor, UnreadableTensor, open_listed, parsing
from statexchange.formats.torch_archive import (
    Archive,
    TensorView,
    describe,
    dtype_of,
    holds_tensor,
    is_plain,
    refusal_of,
    unwrap_tensor,
    view_of,
)
from statexchange.sharding.paths import ListItem, Path
from statexchange.sharding.shards import Box, Shard, shape_from_json, sizes_from_json
from statexchange.storage.location import OpenedPath
from statexchange.storage.store import Budget, ByteRange, StoredFile
from statexchange.storage.tensorfile import read_header

__all__ = ["METADATA", "matches", "read"]

METADATA = ".metadata"
_FILE_NAME = re.compile(r"__([0-9]{1,9})_([0-9]{1,9})\.distcp")
_ZIP = b"PK\3\4"
_LEAST_SAFETENSORS = 10  # bytes: the length of the header, and an empty header
_STEPS_PER_BOX = 64  # a box takes about 500 bytes of memory, and 130 bytes of the pickle
_STEPS_PER_TENSOR = 16
_MAX_ITEMS = 1 << 63  # of a list
_MAX_ENTRY_PICKLE_BYTES = 1 << 20  # a tensor's pickle has about 200 bytes


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of the metadata, with its boxes by their offsets."""

    dtype: str
    shape: tuple[int, ...]
    chunks: dict[tuple[int, ...], Box]


@dataclass(frozen=True, slots=True)
class _StoredEntry:
    """One entry of a .distcp file; `offsets` is None if it is not a tensor."""

    name: str
    offsets: tuple[int, ...] | None
    begin: int
    length: int


def matches(opened: OpenedPath) -> bool:
    """Whether a path is a DCP directory, perhaps without its metadata."""
    if opened.file is not None:
        return False
    return METADATA in opened.store.listing or any(map(_FILE_NAME.fullmatch, opened.store.files))


def read(opened: OpenedPath) -> Source:
    """Return the source at a path; each .distcp file has the rank in its name.

    Broken metadata raises.
    """
    store = opened.store
    metadata = store.path_of(METADATA)
    if METADATA not in store.listing:
        text = (
            f"{METADATA} is missing, which torch writes last: the save did not finish, or hidden files were not copied"
        )
        return Source("dcp", opened, (), problems=(IncompleteError(text, path=metadata),))
    with parsing(f"{METADATA} is not what this version of statexchange knows", path=metadata):
        data = store.read_small(METADATA, MAX_PICKLE_BYTES)
        budget = store.budget.of(metadata, len(data))
        root = read_pickle(data, metadata, budget)
        tensors, by_file, unsupported = _parsed(root, budget, metadata)
        paths = _paths(root.state, budget)
    problems = _unstored(tensors, by_file, metadata)
    shard_files: list[ShardFile] = []
    others: dict[str, str] = {}
    texts: dict[str, str] = {}
    unreadable = list(unsupported)
    views: dict[bytes, TensorView] = {}
    for file in sorted(by_file, key=_order):
        reader = _DcpFileReader(store.path_of(file), _order(file)[0], tensors, views, budget)
        try:
            names = sorted({entry.name for entry in by_file[file]})
            missing = f"a file of this checkpoint is missing, with parts of {len(names)} tensors"
            opened_file = open_listed(store, file, missing, rank=_order(file)[0], name=names[0])
            shard_files.append(reader.read(opened_file, by_file[file]))
            others |= reader.others
            texts |= reader.texts
            unreadable += reader.unsupported
        except StateExchangeError as error:
            problems.append(error)
            for name in dict.fromkeys(entry.name for entry in by_file[file]):
                if name in tensors:
                    tensor = tensors[name]
                    unreadable.append(UnreadableTensor(name, tensor.dtype, tensor.shape, store.path_of(file)))
    return Source(
        "dcp",
        opened,
        tuple(shard_files),
        others=others,
        texts=texts,
        problems=tuple(problems),
        unreadable=tuple(unreadable),
        paths=paths,
    )


def _order(file: str) -> tuple[int, int]:
    """Return the two numbers in a file's name; the first is the rank that wrote it."""
    match = _FILE_NAME.fullmatch(file)
    assert match is not None  # `_file_name` accepts only such names
    return int(match[1]), int(match[2])


def _parsed(
    metadata: Any, budget: Budget, path: str
) -> tuple[dict[str, _Tensor], dict[str, list[_StoredEntry]], list[UnreadableTensor]]:
    """Return the tensors by name, the entries of each file, and the tensors of unsupported dtypes."""
    _expect(metadata, "Metadata", "MCoreMetadata")
    tensors = {}
    others = set()
    unsupported: dict[str, UnreadableTensor] = {}
    for name, record in metadata.state["state_dict_metadata"].items():
        if type(name) is not str:
            raise ValueError(f"{type_text(name)} as a name")
        if record.name == "BytesStorageMetadata":
            others.add(name)
        else:
            try:
                tensors[name] = _tensor(name, record, budget)
            except UnsupportedError as error:
                unsupported[name] = _unsupported(name, record, error, path)
    by_file: dict[str, list[_StoredEntry]] = {}
    for index, storage_info in (metadata.state["storage_data"] or {}).items():
        _expect(index, "MetadataIndex")
        _expect(storage_info, "_StorageInfo")
        name, offsets = index.state["fqn"], index.state.get("offset")
        if type(name) is str and name in unsupported:
            continue
        if type(name) is not str or (name not in tensors and name not in others):
            text = f"{METADATA} stores this entry but does not describe it: the save is damaged, save again"
            raise CorruptError(text, name=name if type(name) is str else None)
        stored = _stored(name, offsets if name in tensors else None, storage_info.state)
        if name in tensors and stored.offsets not in tensors[name].chunks:
            raise CorruptError(f"part at {stored.offsets} is stored but not described in {METADATA}", name=name)
        by_file.setdefault(_file_name(storage_info.state, name), []).append(stored)
    return tensors, by_file, list(unsupported.values())


def _paths(metadata: dict[str, Any], budget: Budget) -> dict[str, Path]:
    """Return the path of each name for which the planner recorded one; it keeps anything it likes in this place."""
    recorded = metadata.get("planner_data")
    paths: dict[str, Path] = {}
    if type(recorded) is not dict:
        return paths
    for name in metadata["state_dict_metadata"]:
        keys = recorded.get(name)
        # Many names may have one path, so first look for one that is too long for its name.
        if type(keys) is not tuple or len(keys) > len(name) + 1:
            continue
        budget.spend(len(keys))
        path = tuple(ListItem(key) if type(key) is int and 0 <= key < _MAX_ITEMS else key for key in keys)
        if all(type(key) in (str, ListItem) for key in path) and _is_joined(path, name):
            paths[name] = path
    return paths


def _is_joined(path: Path, name: str) -> bool:
    """Whether the keys of a path, joined by dots, are this name."""
    texts = [str(key) for key in path]
    return sum(map(len, texts)) + len(texts) - 1 == len(name) and ".".join(texts) == name


def _unsupported(name: str, record: OpaqueObject, error: UnsupportedError, path: str) -> UnreadableTensor:
    symbol = record.state["properties"].state[0]
    dtype = symbol.name if type(symbol) is GlobalRef else None
    return UnreadableTensor(
        name, dtype, shape_from_json(record.state["size"]), path, error.located(name=name, path=path)
    )


def _expect(value: Any, *class_names: str) -> None:
    """Raise ValueError unless a value of a pickle is an object of one of these classes."""
    if type(value) is not OpaqueObject or value.name not in class_names:
        raise ValueError(f"{describe(value)} in the place of {class_names[0]}")


def _tensor(name: str, record: OpaqueObject, budget: Budget) -> _Tensor:
    _expect(record, "TensorStorageMetadata")
    budget.spend(_STEPS_PER_TENSOR + _STEPS_PER_BOX * len(record.state["chunks"]))
    shape = shape_from_json(record.state["size"])
    chunks: dict[tuple[int, ...], Box] = {}
    for chunk in record.state["chunks"]:
        box = Box.from_json([chunk.state["offsets"], chunk.state["sizes"]])
        # An empty part may begin where another part does.
        if chunks.setdefault(box.offsets, box) != box and box.numel:
            if chunks[box.offsets].numel:
                raise CorruptError(f"two parts begin at {box.offsets}", name=name)
            chunks[box.offsets] = box
    return _Tensor(dtype_of(record.state["properties"].state[0]), shape, chunks)


def _stored(name: str, offsets: Any, storage_info: dict[str, Any]) -> _StoredEntry:
    if storage_info.get("transform_descriptors"):
        shown = excerpt(storage_info["transform_descriptors"])
        raise UnsupportedError(
            f"its bytes are transformed by {shown}: load it with torch, and save it without extensions",
            name=name,
        )
    begin, length = sizes_from_json((storage_info["offset"], storage_info["length"]))
    return _StoredEntry(name, None if offsets is None else sizes_from_json(offsets), begin, length)


def _file_name(storage_info: dict[str, Any], name: str) -> str:
    file = storage_info["relative_path"]
    if type(file) is not str or not _FILE_NAME.fullmatch(file):
        raise CorruptError(f"{METADATA} names the file {excerpt(file)}, which is not a DCP file name", name=name)
    return file


def _unstored(
    tensors: dict[str, _Tensor], by_file: dict[str, list[_StoredEntry]], path: str
) -> list[StateExchangeError]:
    """Return an error for each part that the metadata describes but that no file has."""
    stored = {(entry.name, entry.offsets) for entries in by_file.values() for entry in entries}
    problems: list[StateExchangeError] = []
    for name, tensor in tensors.items():
        for offsets, box in tensor.chunks.items():
            if box.numel and (name, offsets) not in stored:
                text = f"region {box} is described in {METADATA} but stored in no file: the save did not finish"
                problems.append(IncompleteError(text, name=name, path=path))
    return problems


def _is_zip(file: StoredFile) -> bool:
    """Whether a file begins with a zip, or is too short for anything else."""
    return _ZIP.startswith(file.first_bytes(len(_ZIP))) or file.size < _LEAST_SAFETENSORS


class _DcpFileReader:
    """Reads the entries of one .distcp file. `views` caches the parsed pickles of entries, many of which are equal."""

    def __init__(
        self, path: str, rank: int, tensors: dict[str, _Tensor], views: dict[bytes, TensorView], budget: Budget
    ) -> None:
        self._path = path
        self._budget = budget
        self._rank = rank
        self._tensors = tensors
        self._views = views
        self.others: dict[str, str] = {}
        self.texts: dict[str, str] = {}
        self.unsupported: list[UnreadableTensor] = []

    def _parsing(self, name: str) -> AbstractContextManager[None]:
        return parsing("not what torch writes for a tensor", rank=self._rank, name=name, path=self._path)

    def read(self, file: StoredFile, entries: list[_StoredEntry]) -> ShardFile:
        """Return the file with all its tensors; entries must not overlap."""
        if not _is_zip(file):
            return self._read_safetensors(file, entries)
        end = 0
        for entry in sorted(entries, key=lambda entry: entry.begin):
            if entry.begin < end:
                problem = (
                    f"according to {METADATA} it overlaps another entry of the file: the save is damaged, save again"
                )
                raise CorruptError(problem, name=entry.name, rank=self._rank, path=self._path)
            end = entry.begin + entry.length
        parts: dict[str, list[tuple[Box, ByteRange]]] = {}
        for entry in entries:
            with self._parsing(entry.name):
                self._entry(file, entry, parts)
        return ShardFile(self._rank, file, {name: self._source_tensor(name, boxes) for name, boxes in parts.items()})

    def _read_safetensors(self, file: StoredFile, entries: list[_StoredEntry]) -> ShardFile:
        """Return the tensors of a file that torch wrote with SerializationFormat.SAFETENSORS.

        The metadata's offsets are all 0 for such a file: its header has the byte ranges.
        """
        header = read_header(file)
        parts: dict[str, list[tuple[Box, ByteRange]]] = {}
        for entry in entries:
            with self._parsing(entry.name):
                if entry.offsets is None:
                    raise UnsupportedError("an entry of a safetensors file that is not a tensor: save it as torch.save")
                if entry.name in parts or entry.name not in header.entries:
                    raise CorruptError(f"the file does not have each part of this tensor that {METADATA} describes")
                found = header.entries[entry.name]
                box = self._box(entry.name, entry.offsets, found.dtype, found.shape)
                parts[entry.name] = [(box, ByteRange(file, found.begin, found.nbytes))]
        return ShardFile(self._rank, file, {name: self._source_tensor(name, boxes) for name, boxes in parts.items()})

    def _entry(self, file: StoredFile, entry: _StoredEntry, parts: dict[str, list[tuple[Box, ByteRange]]]) -> None:
        archive = Archive(file, entry.begin, entry.length)
        if entry.offsets is None:
            self._other(entry.name, archive)
            return
        view = self._view(archive.pickle(_MAX_ENTRY_PICKLE_BYTES))
        box = self._box(entry.name, entry.offsets, view.dtype, view.shape)
        parts.setdefault(entry.name, []).append((box, archive.byte_range(view)))

    def _box(self, name: str, offsets: tuple[int, ...], dtype: str, shape: tuple[int, ...]) -> Box:
        """Return the box of a part; raise CorruptError unless it is stored with this dtype and shape."""
        tensor = self._tensors[name]
        box = tensor.chunks[offsets]
        for field, expected, found in (("dtype", tensor.dtype, dtype), ("shape", box.shape, shape)):
            if expected != found:
                raise CorruptError(f"{field} in {METADATA} differs from the file", expected=expected, found=found)
        return box

    def _view(self, data: bytes) -> TensorView:
        """Return the tensor that an entry's pickle describes."""
        if data not in self._views:
            budget = self._budget.of(self._path, len(data))
            self._views[data] = view_of(unwrap_tensor(read_pickle(data, self._path, budget)))
        return self._views[data]

    def _other(self, name: str, archive: Archive) -> None:
        """Describe an entry that is not a tensor, and keep it if it is a plain value.

        Tensors in lists and dicts, such as the states of random generators, belong to the entry's description. Tensors
        in an object of an unknown class make the entry unsupported. A refused pickle is described by its error.
        """
        data = archive.pickle()
        budget = self._budget.of(self._path, len(data))
        try:
            value = read_pickle(data, self._path, budget, unknown_classes=True)
        except UnsafeError as error:
            self.others[name] = error.message
            return
        description = describe(value)
        if is_plain(value, len(data), budget):
            self.others[name], self.texts[name] = description, values.encode(value)
        elif not holds_tensor(value, budget, set()):
            self.others[name] = description
        elif type(value) is not OpaqueObject:
            self.others[name] = f"{description}, with tensors in it"
        else:
            refusal = UnsupportedError(refusal_of(value), rank=self._rank, name=name, path=self._path)
            self.unsupported.append(UnreadableTensor(name, None, None, self._path, refusal))

    def _source_tensor(self, name: str, parts: list[tuple[Box, ByteRange]]) -> SourceTensor:
        """Return a tensor with all its boxes in this file."""
        tensor = self._tensors[name]
        with self._parsing(name):
            shard = Shard(name, tensor.dtype, tensor.shape, tuple(box for box, _ in parts))
        return SourceTensor(shard, tuple(byte_range for _, byte_range in parts))
