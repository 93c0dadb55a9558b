"""torch.distributed.checkpoint (DCP), which FSDP and accelerate write too: ``.metadata`` and ``__R_N.distcp`` files.

Each entry of a .distcp file is a file of torch.save of its own. Names are the flattened keys of the saved state.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from statexchange.errors import (
    CorruptError,
    IncompleteError,
    NotFoundError,
    StateExchangeError,
    UnsafeError,
    UnsupportedError,
)
from statexchange.layout.shards import Box, Shard, sizes_from_json
from statexchange.sources.base import Extent, Holder, Source, SourceTensor
from statexchange.sources.pickles import MAX_PICKLE_BYTES, Made, read_pickle
from statexchange.sources.torch_archive import Archive, View, described, dtype_of, plain, view_of
from statexchange.storage import files

__all__ = ["METADATA", "read"]

METADATA = ".metadata"
_FILE_NAME = re.compile(r"__([0-9]{1,9})_([0-9]{1,9})\.distcp")
_REFUSALS = (CorruptError, UnsafeError, UnsupportedError)
_MAX_ENTRY_PICKLE_BYTES = 1 << 20  # of a tensor, about 200 bytes


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor by the metadata: its boxes by their offsets."""

    dtype: str
    shape: tuple[int, ...]
    chunks: dict[tuple[int, ...], Box]


@dataclass(frozen=True, slots=True)
class _Stored:
    """One entry of a .distcp file; no `offsets` if it is no tensor."""

    name: str
    offsets: tuple[int, ...] | None
    begin: int
    length: int


def read(path: str, *, strict: bool = True) -> Source:
    """The source at `path`: each .distcp file is a holder, its rank that of its name.

    What is missing or broken in the metadata itself is an error in any case; all else is named by its file.
    """
    metadata = os.path.join(path, METADATA)
    try:
        tensors, by_file = _parsed(read_pickle(files.read_small(metadata, MAX_PICKLE_BYTES), metadata))
    except _REFUSALS as error:
        raise _at(error, metadata, error.name) from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"not what torch writes: {error!r:.200}", path=metadata) from None
    problems = _unstored(tensors, by_file, metadata)
    holders: list[Holder] = []
    others: dict[str, str] = {}
    views: dict[bytes, View] = {}
    for file in sorted(by_file, key=_order):
        reader = _File(os.path.join(path, file), _order(file)[0], tensors, views)
        try:
            holders.append(reader.read(by_file[file]))
            others |= reader.others
        except StateExchangeError as error:
            problems.append(error)
    if problems and strict:
        raise problems[0]
    return Source("dcp", path, tuple(holders), others=others, problems=tuple(problems))


def _at(error: StateExchangeError, path: str, name: str | None, rank: int | None = None) -> StateExchangeError:
    """The same error with where it was found."""
    about = {"expected": error.expected, "found": error.found}
    return type(error)(error.message, name=name, rank=rank, path=path, **about)


def _order(file: str) -> tuple[int, int]:
    match = _FILE_NAME.fullmatch(file)
    assert match is not None  # only such names come this far
    return int(match[1]), int(match[2])


def _parsed(metadata: Any) -> tuple[dict[str, _Tensor], dict[str, list[_Stored]]]:
    """The tensors, and the entries of each file."""
    _expect(metadata, "Metadata")
    tensors = {}
    others = set()
    for name, fact in metadata.state["state_dict_metadata"].items():
        if type(name) is not str:
            raise ValueError(f"a {type(name).__name__} as a name")
        if fact.name == "BytesStorageMetadata":
            others.add(name)
        else:
            tensors[name] = _tensor(name, fact)
    by_file: dict[str, list[_Stored]] = {}
    for index, place in (metadata.state["storage_data"] or {}).items():
        _expect(index, "MetadataIndex")
        _expect(place, "_StorageInfo")
        name, offsets = index.state["fqn"], index.state.get("offset")
        if name not in tensors and name not in others:
            raise CorruptError("is stored, but not described", name=str(name)[:512])
        stored = _stored(name, offsets if name in tensors else None, place.state)
        if name in tensors and stored.offsets not in tensors[name].chunks:
            raise CorruptError(f"a part at {stored.offsets} is stored, but not described", name=name)
        by_file.setdefault(_file_name(place.state, name), []).append(stored)
    return tensors, by_file


def _expect(made: Any, name: str) -> None:
    if type(made) is not Made or made.name != name:
        raise ValueError(f"no {name}")


def _tensor(name: str, fact: Made) -> _Tensor:
    _expect(fact, "TensorStorageMetadata")
    shape = sizes_from_json(fact.state["size"])
    chunks: dict[tuple[int, ...], Box] = {}
    for chunk in fact.state["chunks"]:
        box = Box.from_json([chunk.state["offsets"], chunk.state["sizes"]])
        # Empty parts may begin where a real one does.
        if chunks.setdefault(box.offsets, box) != box and box.numel:
            if chunks[box.offsets].numel:
                raise CorruptError(f"two parts begin at {box.offsets}", name=name)
            chunks[box.offsets] = box
    try:
        return _Tensor(dtype_of(fact.state["properties"].state[0]), shape, chunks)
    except UnsupportedError as error:
        raise UnsupportedError(error.message, name=name) from None


def _stored(name: str, offsets: Any, place: dict[str, Any]) -> _Stored:
    if place.get("transform_descriptors"):
        shown = f"{place['transform_descriptors']!r:.100}"
        raise UnsupportedError(f"its bytes went through {shown}: save it without extensions", name=name)
    begin, length = sizes_from_json((place["offset"], place["length"]))
    return _Stored(name, None if offsets is None else sizes_from_json(offsets), begin, length)


def _file_name(place: dict[str, Any], name: str) -> str:
    file = place["relative_path"]
    if type(file) is not str or not _FILE_NAME.fullmatch(file):
        raise CorruptError(f"is said to lie in {file!r:.100}, which is no name of a DCP file", name=name)
    return file


def _unstored(tensors: dict[str, _Tensor], by_file: dict[str, list[_Stored]], path: str) -> list[StateExchangeError]:
    """Parts that are described, but stored nowhere: a tensor without any would go unnoticed."""
    stored = {(entry.name, entry.offsets) for entries in by_file.values() for entry in entries}
    return [
        IncompleteError(f"region {box} is described, but stored nowhere", name=name, path=path)
        for name, tensor in tensors.items()
        for offsets, box in tensor.chunks.items()
        if box.numel and (name, offsets) not in stored
    ]


class _File:
    """Reads the entries of one .distcp file. `views` remembers what equal pickles of entries mean."""

    def __init__(self, path: str, rank: int, tensors: dict[str, _Tensor], views: dict[bytes, View]) -> None:
        self._path = path
        self._rank = rank
        self._tensors = tensors
        self._views = views
        self.others: dict[str, str] = {}

    def read(self, entries: list[_Stored]) -> Holder:
        """The holder with all tensors of the file."""
        try:
            fd = files.open_for_reading(self._path)
        except NotFoundError:
            names = sorted({entry.name for entry in entries})
            raise IncompleteError(
                f"a file of this checkpoint is missing, with parts of {len(names)} tensors",
                name=names[0],
                rank=self._rank,
                path=self._path,
            ) from None
        try:
            parts: dict[str, list[tuple[Box, Extent]]] = {}
            for entry in entries:
                try:
                    self._entry(fd, entry, parts)
                except _REFUSALS as error:
                    raise _at(error, self._path, entry.name, self._rank) from None
            return Holder(self._rank, self._path, files.size_of(fd), {n: self._joined(n, p) for n, p in parts.items()})
        finally:
            files.close(fd)

    def _entry(self, fd: files.Readable, entry: _Stored, parts: dict[str, list[tuple[Box, Extent]]]) -> None:
        archive = Archive(fd, self._path, entry.begin, entry.length)
        if entry.offsets is None:
            self.others[entry.name] = self._other(archive)
            return
        tensor = self._tensors[entry.name]
        box = tensor.chunks[entry.offsets]
        view = self._view(archive.pickle(_MAX_ENTRY_PICKLE_BYTES))
        for what, expected, found in (("dtype", tensor.dtype, view.dtype), ("shape", box.shape, view.shape)):
            if expected != found:
                raise CorruptError(f"the metadata tells another {what} than the file", expected=expected, found=found)
        parts.setdefault(entry.name, []).append((box, archive.extent(view)))

    def _view(self, data: bytes) -> View:
        if data not in self._views:
            try:
                self._views[data] = view_of(plain(read_pickle(data, self._path)))
            except _REFUSALS:
                raise
            except (AttributeError, IndexError, TypeError, ValueError) as error:
                raise CorruptError(f"not what torch writes for a tensor: {error!r:.200}") from None
        return self._views[data]

    def _other(self, archive: Archive) -> str:
        """What an entry is that is no tensor: objects of any class are named, and not read."""
        try:
            return described(read_pickle(archive.pickle(), self._path))
        except UnsafeError as error:
            return error.message

    def _joined(self, name: str, parts: list[tuple[Box, Extent]]) -> SourceTensor:
        tensor = self._tensors[name]
        try:
            shard = Shard(name, tensor.dtype, tensor.shape, tuple(box for box, _ in parts))
        except ValueError as error:
            raise CorruptError(str(error), name=name, rank=self._rank, path=self._path) from None
        return SourceTensor(shard, tuple(extent for _, extent in parts))
