"""Find the tensors of a large DCP directory that are cut evenly over its files, and where their parts lie.

The metadata of ten million boxes comes as columns (formats/pickle_runs.py). A tensor is cut evenly if its boxes are
the cells of one grid, as torch's chunks have it, and if each cell is stored once, in a file of its own: columns prove
both. Of such a tensor a `ShardingSpec` is kept. All other tensors get an object for each box, as the general reader has
them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from statexchange.errors import CorruptError, TruncatedError, UnsafeError, UnsupportedError
from statexchange.formats.pickle_runs import RUN, Columns, padded
from statexchange.formats.pickles import OpaqueObject, PickleValue
from statexchange.formats.source import SourceTensor, is_flat_parameter
from statexchange.formats.torch_archive import dtype_of
from statexchange.sharding.sharding_spec import DimSplit, Placement, ShardingSpec
from statexchange.sharding.shards import MAX_SIZE, Box, c_strides, shape_from_json, sizes_from_json
from statexchange.tensors import ITEMSIZE

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self

    Ints: TypeAlias = NDArray[Any]

__all__ = ["DcpParts", "Part", "take_even_tensors"]


class Part(NamedTuple):
    """One part of a tensor: what the metadata says of it, and where its entry lies in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    begin: int
    length: int


class _Grid(NamedTuple):
    """A tensor that is cut evenly: dtype, shape, the largest box, and how many boxes there are along each dim."""

    dtype: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, dtype: str, shape: tuple[int, ...], offsets: Ints, sizes: Ints) -> _Grid | None:
        """Return the grid whose cells are these boxes, each once; None if there is none."""
        if not len(offsets) or offsets.shape[1] != len(shape) or 0 in shape:
            return None
        # torch.chunk makes all parts of a dim as large as the first but the last, which may be smaller: the largest box
        # is the cell.
        chunk = tuple(sizes.max(0).tolist())
        counts = tuple(-(-size // part) for size, part in zip(shape, chunk, strict=True))
        # A `ShardingSpec` has counts alone, which must lead back to these boxes. Of 6 rows, boxes of 4 and 2 are 2
        # parts, too, but torch.chunk would cut 3 and 3.
        if chunk != tuple(-(-size // count) for size, count in zip(shape, counts, strict=True)):
            return None
        grid = cls(dtype, shape, chunk, counts)
        is_right = (sizes == np.minimum(chunk, np.array(shape) - offsets)).all() and not (offsets % chunk).any()
        if not is_right or len(offsets) != math.prod(counts) or math.prod(chunk) * ITEMSIZE[dtype] > MAX_SIZE:
            return None
        # There are as many boxes as cells, so each cell is there if none is there twice.
        cells = (offsets // chunk) @ np.array(c_strides(counts), np.int64)
        return grid if np.bincount(cells).max() == 1 else None

    def box_of(self, cell: int) -> Box:
        """Return the box of a cell."""
        offsets = []
        # Cells are numbered in C order: the last dim changes fastest.
        for count, part in zip(reversed(self.counts), reversed(self.chunk), strict=True):
            cell, at = divmod(cell, count)
            offsets.append(at * part)
        offsets.reverse()
        sizes = map(min, self.chunk, (size - at for size, at in zip(self.shape, offsets, strict=True)))
        return Box(tuple(offsets), tuple(sizes))

    def placement(self) -> Placement:
        """Return the placement on a mesh with an axis for each dim that is cut."""
        mesh, splits = [], []
        for dim, count in enumerate(self.counts):
            if count > 1:
                mesh.append(count)
                splits.append(DimSplit(dim))
        return Placement(tuple(mesh), tuple(splits))


def _numbers_of(names: Sequence[str | None]) -> dict[str, int]:
    return {name: number for number, name in enumerate(names) if name is not None}


class _EvenTensor(NamedTuple):
    """A tensor that is cut evenly: its name in the metadata, its grid, and the number of the file of each cell."""

    name: str
    grid: _Grid
    files: Ints


class DcpParts:
    """The parts of the tensors that are cut evenly, as `EvenParts`, once `number_files` has numbered the files.

    `files` has the names of the files that have parts, with the numbers that they have in the columns.
    """

    specs: Mapping[str, ShardingSpec]
    version: list[str | int]

    def __init__(self, tensors: Sequence[_EvenTensor], places: Sequence[Ints], files: Sequence[str]) -> None:
        self.tensors = tensors
        # Sorted by file, so that a file's entries are one slice. Most often they are: each rank's follow one another.
        if (np.diff(places[1]) < 0).any():
            order = np.argsort(places[1], kind="stable")
            places = [column[order] for column in places]
        self._numbers, of_files, self._cells, self._begins, self._lengths = places
        self._bounds = np.searchsorted(of_files, np.arange(len(files) + 1)).tolist()
        self.files = {file: at for at, file in enumerate(files) if self._bounds[at] < self._bounds[at + 1]}
        self._columns_of: list[int] = []  # the number in the columns, by that of the file in the source
        self._names: list[str | None] = [tensor.name for tensor in tensors]
        self._number_of = _numbers_of(self._names)

    def tensors_in(self, file: str) -> list[str]:
        """Return the names, in the metadata, of the tensors of which a file has a part."""
        return [self.tensors[number].name for number in self._numbers[self._slice(self.files[file])].tolist()]

    def check_places(self, file: str, listed: Sequence[tuple[str, int, int]], size: int) -> None:
        """Raise CorruptError if entries of a file of this size overlap or end outside of it.

        Those that have no row are given by name, begin and length.
        """
        at = self._slice(self.files[file])
        places = np.array([place for _, *place in listed], np.int64).reshape(len(listed), 2)
        begins = np.concatenate([self._begins[at], places[:, 0]])
        ends = begins + np.concatenate([self._lengths[at], places[:, 1]])
        order = np.argsort(begins, kind="stable")
        # Sorted by their begins, some neighbours overlap if any two entries do.
        overlapping = order[1:][ends[order][:-1] > begins[order][1:]]
        outside = np.flatnonzero(ends > size)
        if not len(overlapping) and not len(outside):
            return
        names = self.tensors_in(file) + [name for name, *_ in listed]
        if len(overlapping):
            text = "according to .metadata it overlaps another entry of the file: the save is damaged, save again"
            raise CorruptError(text, name=names[overlapping[0]])
        end = int(ends[outside[0]])
        raise TruncatedError("file is truncated", name=names[outside[0]], expected=end, found=size)

    def number_files(
        self, files: Sequence[str], read: Callable[[int, Part], SourceTensor], version: list[str | int]
    ) -> list[tuple[str, str, tuple[int, ...], str]]:
        """Number the files as these names are; return name, dtype, shape and file of the tensors with parts elsewhere.

        Those cannot be read. `read` opens a part, by the number of its file.
        """
        self._read, self.version = read, version
        # Files without such parts share an empty slice behind all others.
        self._columns_of = [self.files.get(file, len(self._bounds) - 1) for file in files]
        self._bounds.append(self._bounds[-1])  # of files without parts
        numbers = np.full(len(self._bounds) - 1, -1, np.int64)
        numbers[self._columns_of] = np.arange(len(files))
        lost: dict[int, str] = {}
        for file, column in self.files.items():
            if numbers[column] < 0:
                for number in self._numbers[self._slice(column)].tolist():
                    lost.setdefault(number, file)
        unreadable = []
        # One file of a tensor is enough to lose it: a spec says that every cell is there.
        for number, file in lost.items():
            name, grid, _ = self.tensors[number]
            del self._number_of[name]
            self._names[number] = None
            unreadable.append((name, grid.dtype, grid.shape, file))
        self.specs = self._specs(numbers)
        return unreadable

    def _specs(self, numbers: Ints) -> dict[str, ShardingSpec]:
        specs = {}
        meshes: dict[bytes, tuple[int, ...]] = {}  # most tensors lie on the same files
        for tensor in self.tensors:
            name, grid, files = tensor
            if name in self._number_of:
                # One tuple for all of these: of each tensor it has as many numbers as there are ranks.
                key = files.tobytes()
                if key not in meshes:
                    meshes[key] = tuple(numbers[files].tolist())
                specs[name] = ShardingSpec(name, grid.dtype, grid.shape, grid.placement(), meshes[key])
        return specs

    def _slice(self, column: int) -> slice:
        return slice(self._bounds[column], self._bounds[column + 1])

    def names_in(self, file: int) -> list[str]:
        """Return the names of the tensors of which a file has a part."""
        names = []
        for number in self._numbers[self._slice(self._columns_of[file])].tolist():
            name = self._names[number]
            if name is not None:  # else it is left out, or lost
                names.append(name)
        return names

    def read(self, file: int, name: str) -> SourceTensor:
        """Return the part that a file has of a tensor; raise KeyError if it has none."""
        at = self._slice(self._columns_of[file])
        # One at most: each cell of a tensor lies in a file of its own.
        rows = np.flatnonzero(self._numbers[at] == self._number_of[name])
        if not len(rows):
            raise KeyError(name)
        row = at.start + int(rows[0])
        old_name, grid, _ = self.tensors[self._numbers[row]]
        place = int(self._begins[row]), int(self._lengths[row])
        tensor = self._read(file, Part(old_name, grid.dtype, grid.shape, grid.box_of(int(self._cells[row])), *place))
        if name == old_name:
            return tensor
        return replace(tensor, shard=replace(tensor.shard, name=name))

    def renamed(self, new_name: Callable[[str], str | None]) -> Self:
        """Return the parts with other names, and without those whose new name is None."""
        # The columns are shared: they are not changed any more, and have millions of rows.
        parts = copy.copy(self)
        # None stays for a tensor that is left out: the columns have the numbers of all.
        names = list(self._names)
        for number, name in enumerate(self._names):
            if name is not None:
                names[number] = new_name(name)
        vars(parts).update(_names=names, _number_of=_numbers_of(names))
        specs: dict[str, ShardingSpec] = {}
        for name, spec in self.specs.items():
            new = new_name(name)
            if new in specs:
                raise UnsafeError(f"{new!r} and another tensor would get one name", name=name)
            if new is not None:
                specs[new] = replace(spec, name=new)
        parts.specs = specs
        return parts


def take_even_tensors(metadata: dict[str, PickleValue], is_file_name: Callable[[str], object]) -> DcpParts | None:
    """Take the tensors that are cut evenly out of the state of a Metadata; None if there is none.

    Of all others each run is replaced by an object for each record.
    """
    described, stored = metadata["state_dict_metadata"], metadata["storage_data"] or {}
    chunks = {}
    for name, record in described.items():
        if type(name) is str and type(record) is OpaqueObject and record.name == "TensorStorageMetadata":
            # Several names of a pickle may have one record: what is taken here, the others still need.
            described[name] = replace(record, state=copy.copy(record.state))
            of_tensor = _Chunks.taken_from(described[name].state, is_refused=is_flat_parameter(name))
            if of_tensor is not None:
                chunks[name] = of_tensor
    entries = _Entries(stored)
    # A name that is no file of a DCP is for the general reader, which refuses it.
    parts = None
    if all(map(is_file_name, entries.files)):
        parts = entries.take(chunks)
    if parts is not None:
        for tensor in parts.tensors:
            del described[tensor.name], chunks[tensor.name]
    for name, of_tensor in chunks.items():
        described[name].state["chunks"] = of_tensor.listed()
    metadata["storage_data"] = entries.listed()
    return parts


def _is_run(value: object) -> bool:
    return type(value) is OpaqueObject and value.name == RUN


class _Chunks(NamedTuple):
    """The boxes of a tensor: those of a grid, and those without elements, which begin at one place."""

    grid: _Grid
    empty: Sequence[Box]

    @classmethod
    def taken_from(cls, state: dict[str, PickleValue], *, is_refused: bool) -> _Chunks | None:
        """Take the boxes out of the state of a TensorStorageMetadata, if they are in a run.

        If no grid has them, or the tensor `is_refused`, they become objects there: then None is returned.
        """
        chunks = state["chunks"]
        listed: list[OpaqueObject] = []
        runs: list[Columns] = []
        for chunk in chunks:
            if _is_run(chunk):
                runs.append(chunk.args[0])
            else:
                listed.append(chunk)
        if not runs:
            return None
        try:
            shape, dtype = shape_from_json(state["size"]), dtype_of(state["properties"].state[0])
            columns = []
            for key in ("offsets", "sizes"):
                of_listed = np.array([sizes_from_json(chunk.state[key]) for chunk in listed], np.int64)
                parts = [of_listed.reshape(len(listed), len(shape)), *(run.sizes[key] for run in runs)]
                if any((run.dims[key] != len(shape)).any() for run in runs):
                    raise ValueError("boxes of several numbers of dims")
                columns.append(np.concatenate(parts))
            offsets, sizes = columns
            # A rank beyond the last rows has an empty part, which torch describes, too. Its place says nothing, so it
            # is no cell.
            is_empty = (sizes == 0).any(1)
            grid = _Grid.of(dtype, shape, offsets[~is_empty], sizes[~is_empty])
            empty = []
            for box_offsets, shape_of_box in zip(offsets[is_empty].tolist(), sizes[is_empty].tolist(), strict=True):
                empty.append(Box(tuple(box_offsets), tuple(shape_of_box)))
            if is_refused or len({box.offsets for box in empty}) > 1:
                grid = None
        except (AttributeError, LookupError, TypeError, ValueError, UnsupportedError):
            grid = None  # the general reader says what is wrong
        if grid is None:
            for run in runs:
                listed += _listed_boxes(run)
            state["chunks"] = listed
            return None
        state["chunks"] = []
        return cls(grid, empty)

    def listed(self) -> list[OpaqueObject]:
        """Return the boxes as objects."""
        # The columns of the boxes are gone: a grid has them all, each once.
        boxes = [*map(self.grid.box_of, range(math.prod(self.grid.counts))), *self.empty]
        return [_chunk(*box) for box in boxes]


def _chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> OpaqueObject:
    return OpaqueObject("ChunkStorageMetadata", (), {"offsets": offsets, "sizes": sizes})


def _listed_boxes(run: Columns) -> Iterator[OpaqueObject]:
    """Yield the boxes of a run as objects."""
    columns = (run.sizes["offsets"], run.dims["offsets"], run.sizes["sizes"], run.dims["sizes"])
    for offsets, num_offsets, sizes, num_sizes in zip(*(column.tolist() for column in columns), strict=True):
        yield _chunk(tuple(offsets[:num_offsets]), tuple(sizes[:num_sizes]))


class _Entries:
    """The stored entries: columns of those that are in runs, after those of others that are parts of tensors.

    `files` has the names of files, by their numbers in the columns.
    """

    def __init__(self, stored: dict[PickleValue, PickleValue]) -> None:
        """Take all entries out of the storage data."""
        runs: list[Columns] = []
        self._objects = {}
        for key, value in stored.items():
            if _is_run(key):
                runs.append(key.args[0])
            else:
                self._objects[key] = value
        stored.clear()
        texts: Mapping[str, Mapping[bytes, int]] = runs[0].texts if runs else {"fqn": {}, "file": {}}
        self._names = [name.decode() for name in texts["fqn"]]
        self.files = [file.decode() for file in texts["file"]]
        self._keys: list[PickleValue] = []  # of the objects that have rows, which are the first ones
        offsets, numbers = self._rows_of_objects()
        num_dims = max([*(run.sizes["offsets"].shape[1] for run in runs), *map(len, offsets), 0])
        # All rows have as many columns as the tensor with the most dims; `dims` says how many count.
        dims = np.array([*map(len, offsets)], np.int8)
        self._dims = np.concatenate([dims, *(run.dims.pop("offsets") for run in runs)])
        filled = [of_tensor + (0,) * (num_dims - len(of_tensor)) for of_tensor in offsets]
        of_objects = np.array(filled, np.int64).reshape(len(offsets), num_dims)
        of_runs = [padded(run.sizes.pop("offsets"), num_dims) for run in runs]
        self._offsets = np.concatenate([of_objects, *of_runs])
        # Popped from the runs one by one, so that no column is in memory twice for long.
        columns: list[Ints] = []
        for name, dtype in (("fqn", np.int32), ("file", np.int32), ("begin", np.int64), ("length", np.int64)):
            of_runs = [run.numbers.pop(name) for run in runs]
            columns.append(np.concatenate([np.array([row[len(columns)] for row in numbers], dtype), *of_runs]))
        self._of_names, self._of_files, self._begins, self._lengths = columns
        # Of each row, whether the general reader gets it. `take` leaves out those of even tensors.
        self._is_listed = np.ones(len(self._begins), bool)

    def _rows_of_objects(self) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Return the offsets of objects that are parts, and the numbers of name and file, begin and length."""
        # The machine reads the first record of the pickle, and those behind a text that it does not expect, as objects:
        # without them no tensor would be complete.
        names = {name: number for number, name in enumerate(self._names)}
        files = {file: number for number, file in enumerate(self.files)}
        all_offsets, numbers = [], []
        for key, value in self._objects.items():
            # Whatever is no entry stays for the general reader, which says what is wrong with it.
            if {type(key), type(value)} != {OpaqueObject}:
                continue
            if (key.name, value.name) != ("MetadataIndex", "_StorageInfo"):
                continue
            try:
                offsets, place = sizes_from_json(key.state["offset"]), (value.state["offset"], value.state["length"])
                name, file = key.state["fqn"], value.state["relative_path"]
                if value.state.get("transform_descriptors") or {type(name), type(file)} != {str}:
                    continue
                row = (names.setdefault(name, len(names)), files.setdefault(file, len(files)), *sizes_from_json(place))
            except (AttributeError, LookupError, TypeError, ValueError):
                continue  # the general reader says what is wrong
            self._keys.append(key)
            all_offsets.append(offsets)
            numbers.append(row)
        self._names, self.files = list(names), list(files)
        return all_offsets, numbers

    def take(self, chunks: Mapping[str, _Chunks]) -> DcpParts | None:
        """Take the entries of the tensors that are cut evenly; None if there is none.

        Each cell of such a tensor is stored once, in a file of its own. All their other entries have no element.
        """
        # Files of safetensors have 0 as the place of each entry, and their own headers say where tensors lie.
        if not any(name in chunks for name in self._names) or np.count_nonzero(self._begins == 0) > len(self.files):
            return None
        tables = _Tables(chunks, self._names, self._offsets.shape[1])
        cells = np.empty(len(self._begins), np.int64)
        # By blocks, as each step makes columns of its own: of all rows at once they would not fit into memory.
        for first in range(0, len(cells), _BLOCK):
            at = slice(first, first + _BLOCK)
            cells[at] = tables.cells_of(self._of_names[at], self._offsets[at], self._dims[at], self._lengths[at])
        cells[self._begins < 0] = _UNKNOWN
        is_part = cells >= 0
        parts, files = cells[is_part], self._of_files[is_part]
        # Where an entry is stored twice, the last one stands here: `are_stored_once` then refuses the tensor by its
        # count.
        files_of_cells = np.zeros(tables.num_cells, np.int32)
        files_of_cells[parts] = files
        is_even = tables.are_stored_once(parts, files_of_cells)
        # One entry that is no cell is enough: the general reader then says what is wrong with it.
        is_even[self._of_names[cells == _UNKNOWN]] = False
        # All entries of a name are taken, or all are left to the general reader.
        self._is_listed = ~is_even[self._of_names]
        # From the number of a name to that of an even tensor.
        numbers = np.cumsum(is_even, dtype=np.int32) - 1
        is_part &= ~self._is_listed
        of_names = self._of_names[is_part]
        places = [
            numbers[of_names],
            self._of_files[is_part],
            (cells[is_part] - tables.bases[of_names]).astype(np.int32),
        ]
        places += [self._begins[is_part], self._lengths[is_part]]
        tensors = []
        for number in np.flatnonzero(is_even).tolist():
            tensors.append(_EvenTensor(self._names[number], *tables.even(number, files_of_cells)))
        return DcpParts(tensors, places, self.files) if tensors else None

    def listed(self) -> dict[OpaqueObject, OpaqueObject]:
        """Return the entries of all other tensors as objects."""
        for row in np.flatnonzero(~self._is_listed[: len(self._keys)]).tolist():
            del self._objects[self._keys[row]]
        rows = np.flatnonzero(self._is_listed[len(self._keys) :]) + len(self._keys)
        for row in rows.tolist():
            offsets = tuple(self._offsets[row, : self._dims[row]].tolist())
            index = {"fqn": self._names[self._of_names[row]], "offset": offsets, "index": None}
            place = {"relative_path": self.files[self._of_files[row]]}
            place |= {"offset": int(self._begins[row]), "length": int(self._lengths[row])}
            self._objects[OpaqueObject("MetadataIndex", (), index)] = OpaqueObject("_StorageInfo", (), place)
        return self._objects


_BLOCK = 1 << 18  # rows: columns of more leave the cache
_EMPTY, _UNKNOWN = -1, -2  # in place of a cell: an entry without elements; one that is no cell


class _Tables:
    """The grids of tensors as columns, by the numbers of their names; the cells of all are numbered in a row."""

    def __init__(self, chunks: Mapping[str, _Chunks], names: Sequence[str], num_dims: int) -> None:
        self._grids: list[_Grid | None] = [None] * len(names)
        num_names = len(names)
        self._shapes, self._chunks = np.ones((2, num_names, num_dims), np.int64)
        self._strides, self._empty = np.zeros((num_names, num_dims), np.int64), np.full((num_names, num_dims), -1)
        # -1 is no number of dims and no offset: a row of a name without a grid, or without empty boxes, equals none.
        self._dims, self._itemsizes = np.full((2, num_names), -1)
        self._sizes = np.zeros(num_names, np.int64)
        for number, name in enumerate(names):
            if name not in chunks:
                continue
            grid = self._grids[number] = chunks[name].grid
            self._sizes[number] = math.prod(grid.counts)
            num = len(grid.shape)
            self._shapes[number, :num], self._chunks[number, :num] = grid.shape, grid.chunk
            self._strides[number, :num] = c_strides(grid.counts)
            self._dims[number], self._itemsizes[number] = num, ITEMSIZE[grid.dtype]
            for offsets, _ in chunks[name].empty[:1]:
                self._empty[number] = (*offsets, *[0] * (num_dims - num))
        self.bases = np.cumsum(self._sizes) - self._sizes
        self.num_cells = int(self._sizes.sum())

    def cells_of(self, names: Ints, offsets: Ints, dims: Ints, lengths: Ints) -> Ints:
        """Return the cell of each entry, _EMPTY or _UNKNOWN; an entry has at least the bytes of its cell."""
        chunks, shapes = self._chunks[names], self._shapes[names]
        at = offsets // chunks
        sizes = np.minimum(chunks, shapes - offsets)
        # Rows of unknown names and places give any numbers here, perhaps overflown ones: only where each test holds is
        # the cell used.
        is_right = dims == self._dims[names]
        is_cell = is_right & (at * chunks == offsets).all(1) & (sizes > 0).all(1)
        # A tensor's archive has its elements and more. A shorter entry is an empty part at the offsets of a cell, or
        # damage.
        is_cell &= lengths >= sizes.prod(1) * self._itemsizes[names]
        cells = self.bases[names] + (at * self._strides[names]).sum(1)
        is_empty = is_right & (offsets == self._empty[names]).all(1)
        return np.where(is_cell, cells, np.where(is_empty, _EMPTY, _UNKNOWN))

    def are_stored_once(self, cells: Ints, files: Ints) -> NDArray[np.bool_]:
        """Return for each name whether it is cut evenly, and each of its cells is stored once, in a file of its own.

        Given are the cells that are stored, and the file of each cell.
        """
        counts = np.bincount(cells, minlength=self.num_cells)
        is_even = self._sizes > 0
        for number in np.flatnonzero(is_even).tolist():
            # A loop over tensors, not over cells: there are thousands of these, and millions of those.
            at = slice(self.bases[number], self.bases[number] + self._sizes[number])
            is_even[number] = (counts[at] == 1).all() and np.bincount(files[at]).max() == 1
        return is_even

    def even(self, number: int, files: Ints) -> tuple[_Grid, Ints]:
        """Return the grid of a tensor, and the file of each cell."""
        grid = self._grids[number]
        assert grid is not None
        return grid, files[self.bases[number] : self.bases[number] + self._sizes[number]]
