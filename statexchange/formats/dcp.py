"""Read a directory of torch.distributed.checkpoint (DCP), which FSDP and accelerate write too.

It has a ``.metadata`` pickle and files ``__R_N.distcp``. Each entry of a .distcp file is a complete torch.save archive.
Names are the flattened keys of the saved state.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

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
from statexchange.formats.pickles import MAX_PICKLE_BYTES, GlobalRef, OpaqueObject, PickleValue, read_pickle
from statexchange.formats.source import (
    EvenFiles,
    ShardFile,
    Source,
    SourceTensor,
    UnreadableTensor,
    open_listed,
    parsing,
)
from statexchange.formats.torch_archive import (
    Archive,
    DcpEntry,
    TensorArchives,
    describe,
    dtype_of,
    holds_tensor,
    is_plain,
    refusal_of,
)
from statexchange.sharding.paths import ListItem, Path
from statexchange.sharding.shards import Box, Shard, shape_from_json, sizes_from_json
from statexchange.storage.location import OpenedPath
from statexchange.storage.store import Budget, ByteRange, Store, StoredFile
from statexchange.storage.tensorfile import Header, read_header
from statexchange.units import format_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statexchange.formats.dcp_columns import DcpParts

METADATA = ".metadata"
_FILE_NAME = re.compile(r"__([0-9]{1,9})_([0-9]{1,9})\.distcp")
_ZIP = b"PK\3\4"
_LEAST_SAFETENSORS = 10  # bytes: the length of the header, and an empty header
_STEPS_PER_BOX = 64  # a box takes about 500 bytes of memory, and 130 bytes of the pickle
_STEPS_PER_TENSOR = 16
_LONG_BYTES = 4 << 20  # of the metadata: some 25,000 boxes, which take as long as importing numpy does
_MAX_ITEMS = 1 << 63  # of a list


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of the metadata, with its boxes by their offsets."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: dict[tuple[int, ...], Box]


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
    # A source with a problem, not an error: `info` and `verify` report it as any other, and strict callers raise it.
    if METADATA not in store.listing:
        text = (
            f"{METADATA} is missing, which torch writes last: the save did not finish, or hidden files were not copied"
        )
        return Source("dcp", opened, (), problems=(IncompleteError(text, path=metadata),))
    reader = _Reader(store)
    with parsing(f"{METADATA} is not what this version of statexchange knows", path=metadata):
        reader.read_metadata()
    # The order of a set of texts differs among processes; that of the files numbers the holders of a plan, which all
    # ranks must number alike.
    for file in sorted(reader.files, key=_order):
        reader.read_file(file)
    return Source(
        "dcp",
        opened,
        reader.files_with_parts(),
        others=reader.others,
        texts=reader.texts,
        problems=reader.problems,
        unreadable=reader.unreadable,
        paths=reader.paths,
    )


class _Reader:
    """Reads the metadata, and then the files with the entries that it lists.

    Attributes:
        entries: the entries of each file.
        paths: the path of each name for which it is recorded.
        shard_files: the files with their tensors.
        others: descriptions, by name, of entries that are not tensors.
        texts: those of `others` that are plain values, as JSON text of `values.encode`.
        problems: errors for what is missing or broken.
        unreadable: the tensors that are affected by these, or are unsupported.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._budget = store.budget
        self._tensors: dict[str, _Tensor] = {}
        self._archives = TensorArchives(self._budget)
        self._even: DcpParts | None = None
        self.entries: dict[str, list[DcpEntry]] = {}
        self.paths: dict[str, Path] = {}
        self.shard_files: list[ShardFile] = []
        self.others: dict[str, str] = {}
        self.texts: dict[str, str] = {}
        self.problems: list[StateExchangeError] = []
        self.unreadable: list[UnreadableTensor] = []

    @property
    def files(self) -> set[str]:
        """The names of the files that have an entry."""
        files = {*self.entries}
        if self._even is not None:
            files.update(self._even.files)
        return files

    def read_metadata(self) -> None:
        """Read which tensors there are, and which file has which part of them."""
        path = self._store.path_of(METADATA)
        root = self._read_root(path)
        not_tensors = set()
        for name, record in root.state["state_dict_metadata"].items():
            if type(name) is not str:
                raise ValueError(f"{type_text(name)} as a name")
            if record.name == "BytesStorageMetadata":
                not_tensors.add(name)
                continue
            try:
                self._tensors[name] = _tensor(name, record, self._budget)
            except UnsupportedError as error:
                # A dtype that is not supported is no damage: all other tensors are read.
                self.unreadable.append(_unsupported(name, record, error, path))
        unsupported = {tensor.name for tensor in self.unreadable}
        for index, storage_info in (root.state["storage_data"] or {}).items():
            _expect(index, "MetadataIndex")
            _expect(storage_info, "_StorageInfo")
            name = index.state["fqn"]
            if type(name) is str and name in unsupported:
                continue
            # torch writes both tables from one plan. An entry without a description would be left out of every copy
            # unseen.
            if type(name) is not str or (name not in self._tensors and name not in not_tensors):
                text = f"{METADATA} stores this entry but does not describe it: the save is damaged, save again"
                raise CorruptError(text, name=name if type(name) is str else None)
            entry = _entry(name, self._tensors.get(name), index.state.get("offset"), storage_info.state)
            self.entries.setdefault(_file_name(storage_info.state, name), []).append(entry)
        self._check_stored(path)

    def _read_root(self, path: str) -> PickleValue:
        """Read the metadata, without the tensors that are cut evenly if it is large."""
        file = self._store.open(METADATA)
        self._budget = self._store.budget.of(path, file.size)
        root: PickleValue = None
        if file.size >= _LONG_BYTES:
            from statexchange.formats import dcp_columns, pickle_runs  # late, as they import numpy

            with suppress(pickle_runs.IrregularPickleError):
                root = pickle_runs.read_long_pickle(file, path, self._budget)
        # None if the pickle is irregular: the general reader then reads it from its start, an object for each record.
        has_runs = root is not None
        if root is None:
            root = read_pickle(file.read_all(MAX_PICKLE_BYTES), path, self._budget)
        _expect(root, "Metadata", "MCoreMetadata")
        self.paths = _paths(root.state, self._budget)  # before tensors are taken out
        if has_runs:
            self._even = dcp_columns.take_even_tensors(root.state, _FILE_NAME.fullmatch)
        return root

    def _check_stored(self, path: str) -> None:
        """Add a problem for each part that the metadata describes but that no file has."""
        stored: set[tuple[str, Box]] = set()
        for entries in self.entries.values():
            stored.update((entry.name, entry.box) for entry in entries)
        for name, tensor in self._tensors.items():
            for box in tensor.chunks.values():
                if box.numel and (name, box) not in stored:
                    text = f"region {box} is described in {METADATA} but stored in no file: the save did not finish"
                    self.problems.append(IncompleteError(text, name=name, path=path))

    def read_file(self, name: str) -> None:
        """Add all that a file has, or the problem if it is missing or broken."""
        entries = self.entries.get(name, [])
        rank, path = _order(name)[0], self._store.path_of(name)
        even = self._even
        if even is not None and name not in even.files:
            even = None
        names = {entry.name for entry in entries}
        if even is not None and name not in self._store.listing:  # only then are they looked up
            names.update(even.tensors_in(name))
        try:
            parts_of = format_number(len(names), "tensor")
            missing = f"a file of this checkpoint is missing, with parts of {parts_of}"
            file = open_listed(self._store, name, missing, rank=rank, name=min(names, default=None))
            header = None
            if even is not None:
                # Parts of evenly cut tensors are opened when they are read. What would make their bytes wrong or absent
                # is seen in the columns now.
                with parsing("not what torch writes", rank=rank, path=path):
                    even.check_places(name, [(at.name, at.begin, at.length) for at in entries], file.size)
            elif _is_zip(file):
                _check_apart(entries, rank, path)
            else:
                header = read_header(file)
            self.shard_files.append(ShardFile(rank, file, self._read_entries(file, header, entries, rank)))
        except StateExchangeError as error:
            self.problems.append(error)
            # A broken file costs the tensors that have a part in it, and no others.
            for of_file in sorted(names & self._tensors.keys()):
                tensor = self._tensors[of_file]
                self.unreadable.append(UnreadableTensor(tensor.name, tensor.dtype, tensor.shape, path))

    def _read_entries(
        self, file: StoredFile, header: Header | None, entries: Sequence[DcpEntry], rank: int
    ) -> dict[str, SourceTensor]:
        """Return the tensors of a file by name, and describe its other entries. `header` is that of safetensors."""
        parts: dict[str, list[tuple[Box, ByteRange]]] = {}
        for entry in entries:
            with parsing("not what torch writes for a tensor", rank=rank, name=entry.name, path=file.path):
                if header is not None:
                    byte_range = _range_in_safetensors(file, header, entry, entry.name not in parts)
                # Its pickle may have any value, and `TensorArchives` reads those of tensors alone.
                elif not entry.dtype:
                    self._add_other(entry.name, Archive(file, entry.begin, entry.length), rank, file.path)
                    continue
                else:
                    byte_range = self._range_in_archive(file, entry)
                parts.setdefault(entry.name, []).append((entry.box, byte_range))
        tensors = {}
        for name, of_tensor in parts.items():
            boxes, byte_ranges = zip(*of_tensor, strict=True)
            tensor = self._tensors[name]
            with parsing("not what torch writes for a tensor", rank=rank, name=name, path=file.path):
                tensors[name] = SourceTensor(Shard(name, tensor.dtype, tensor.shape, boxes), byte_ranges)
        return tensors

    def files_with_parts(self) -> Sequence[ShardFile]:
        """Return the files, also with their parts of tensors that are cut evenly; call it after `read_file` of all.

        Such a tensor with a part in a broken file is unreadable.
        """
        even = self._even
        if even is None:
            return self.shard_files
        # Only now: `read_file` leaves out files that are missing or broken, so before it no file has its number.
        names = [shard_file.name for shard_file in self.shard_files]
        for name, dtype, shape, file in even.number_files(names, self._read_part, self._store.open(METADATA).version):
            self.unreadable.append(UnreadableTensor(name, dtype, shape, self._store.path_of(file)))
        return EvenFiles.of(self.shard_files, even)

    def _read_part(self, shard_file: ShardFile, entry: DcpEntry) -> SourceTensor:
        """Open a part of a tensor that is cut evenly."""
        path = shard_file.path
        with parsing("not what torch writes for a tensor", rank=shard_file.rank, name=entry.name, path=path):
            # Here, not with the metadata: a job of 10,000 ranks has millions of parts, and a rank of a load reads few
            # of them.
            byte_range = self._range_in_archive(shard_file.file, entry)
            return SourceTensor(Shard(entry.name, entry.dtype, entry.shape, (entry.box,)), (byte_range,))

    def _range_in_archive(self, file: StoredFile, entry: DcpEntry) -> ByteRange:
        """Return the byte range of a part in its archive."""
        view, byte_range = self._archives.open(file, entry.begin, entry.length)
        _check_part(entry, view.dtype, view.shape)
        return byte_range

    def _add_other(self, name: str, archive: Archive, rank: int, path: str) -> None:
        """Describe an entry that is not a tensor, and keep it if it is a plain value.

        Tensors in lists and dicts, such as the states of random generators, belong to the entry's description. Tensors
        in an object of an unknown class make the entry unsupported. A refused pickle is described by its error.
        """
        # An entry of another kind is written by torch.save, too, and may have any class of the user's in its state.
        data = archive.pickle()
        budget = self._budget.of(path, len(data))
        try:
            value = read_pickle(data, path, budget, unknown_classes=True)
        except UnsafeError as error:
            self.others[name] = error.message
            return
        self.others[name] = describe(value)
        if is_plain(value, len(data), budget):
            self.texts[name] = values.encode(value)
        elif holds_tensor(value, budget, set()):
            if type(value) is OpaqueObject:
                del self.others[name]
                refusal = UnsupportedError(refusal_of(value), rank=rank, name=name, path=path)
                self.unreadable.append(UnreadableTensor(name, None, None, path, refusal))
            else:
                self.others[name] += ", with tensors in it"


def _range_in_safetensors(file: StoredFile, header: Header, entry: DcpEntry, is_first: bool) -> ByteRange:
    """Return the byte range of a part in a file that torch wrote with SerializationFormat.SAFETENSORS.

    The metadata's offsets are all 0 for such a file: its header has the byte ranges.
    """
    if not entry.dtype:
        raise UnsupportedError("an entry of a safetensors file that is not a tensor: save it as torch.save")
    # The header has one tensor of a name, so a second part of it on this rank has no bytes there.
    if not is_first or entry.name not in header.entries:
        raise CorruptError(f"the file does not have each part of this tensor that {METADATA} describes")
    stored = header.entries[entry.name]
    _check_part(entry, stored.dtype, stored.shape)
    return ByteRange(file, stored.begin, stored.nbytes)


def _check_part(entry: DcpEntry, dtype: str, shape: tuple[int, ...]) -> None:
    """Raise CorruptError unless a part is stored with the dtype and the shape that the metadata says."""
    # The pickle of a part decides where its elements lie; the metadata decides where they go. If they disagree, one of
    # them would put wrong bytes in place.
    for field, expected, stored in (("dtype", entry.dtype, dtype), ("shape", entry.box.shape, shape)):
        if expected != stored:
            raise CorruptError(f"{field} in {METADATA} differs from the file", expected=expected, found=stored)


def _is_zip(file: StoredFile) -> bool:
    """Whether a file begins with a zip, or is too short for anything else."""
    return _ZIP.startswith(file.first_bytes(len(_ZIP))) or file.size < _LEAST_SAFETENSORS


def _check_apart(entries: list[DcpEntry], rank: int, path: str) -> None:
    """Raise CorruptError if entries of a file overlap."""
    end = 0
    # torch appends one entry after another. If each begins where no earlier one reaches, comparing neighbours is
    # enough.
    for entry in sorted(entries, key=attrgetter("begin")):
        if entry.begin < end:
            text = f"according to {METADATA} it overlaps another entry of the file: the save is damaged, save again"
            raise CorruptError(text, name=entry.name, rank=rank, path=path)
        end = entry.begin + entry.length


def _order(file: str) -> tuple[int, int]:
    """Return the two numbers in a file's name; the first is the rank that wrote it."""
    match = _FILE_NAME.fullmatch(file)
    assert match is not None  # `_file_name` accepts only such names
    return int(match[1]), int(match[2])


def _paths(metadata: dict[str, PickleValue], budget: Budget) -> dict[str, Path]:
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
        # torch flattens lists, too, and then the key is the index.
        path = tuple(map(_path_key, keys))
        if all(type(key) in (str, ListItem) for key in path) and _is_joined(path, name):
            paths[name] = path
    return paths


def _path_key(key: object) -> object:
    """Return a key as paths have it."""
    return ListItem(key) if type(key) is int and 0 <= key < _MAX_ITEMS else key


def _is_joined(path: Path, name: str) -> bool:
    """Whether the keys of a path, joined by dots, are this name."""
    texts = list(map(str, path))
    # Lengths first: to join texts that a pickle repeats could take far more memory than the pickle.
    return sum(map(len, texts)) + len(texts) - 1 == len(name) and ".".join(texts) == name


def _unsupported(name: str, record: OpaqueObject, error: UnsupportedError, path: str) -> UnreadableTensor:
    symbol = record.state["properties"].state[0]
    dtype = symbol.name if type(symbol) is GlobalRef else None
    return UnreadableTensor(
        name, dtype, shape_from_json(record.state["size"]), path, error.located(name=name, path=path)
    )


def _expect(value: object, *class_names: str) -> None:
    """Raise ValueError unless a value of a pickle is an object of one of these classes."""
    if type(value) is not OpaqueObject or value.name not in class_names:
        raise ValueError(f"{describe(value)} in the place of {class_names[0]}")


def _tensor(name: str, record: OpaqueObject, budget: Budget) -> _Tensor:
    _expect(record, "TensorStorageMetadata")
    # Names that share one list of boxes cost a few bytes each, and a list of objects here.
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
    return _Tensor(name, dtype_of(record.state["properties"].state[0]), shape, chunks)


def _entry(name: str, tensor: _Tensor | None, offsets: PickleValue, storage_info: dict[str, PickleValue]) -> DcpEntry:
    """Return an entry of a file: the part of a tensor at these offsets, or another value."""
    if storage_info.get("transform_descriptors"):
        shown = excerpt(storage_info["transform_descriptors"])
        raise UnsupportedError(
            f"its bytes are transformed by {shown}: load it with torch, and save it without extensions",
            name=name,
        )
    place = sizes_from_json((storage_info["offset"], storage_info["length"]))
    if tensor is None:
        return DcpEntry(name, "", (), Box((), ()), *place)
    if offsets is not None:
        offsets = sizes_from_json(offsets)
    if offsets not in tensor.chunks:
        raise CorruptError(f"part at {offsets} is stored but not described in {METADATA}", name=name)
    return DcpEntry(name, tensor.dtype, tensor.shape, tensor.chunks[offsets], *place)


def _file_name(storage_info: dict[str, PickleValue], name: str) -> str:
    file = storage_info["relative_path"]
    if type(file) is not str or not _FILE_NAME.fullmatch(file):
        raise CorruptError(f"{METADATA} names the file {excerpt(file)}, which is not a DCP file name", name=name)
    return file
