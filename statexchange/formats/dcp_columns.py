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
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from statexchange.errors import CorruptError, TruncatedError, UnsafeError, UnsupportedError
from statexchange.formats.pickle_runs import RUN, Columns, joined
from statexchange.formats.pickles import OpaqueObject, PickleValue
from statexchange.formats.source import ShardFile, SourceTensor, is_flat_parameter
from statexchange.formats.torch_archive import DcpEntry, dtype_of
from statexchange.sharding.sharding_spec import DimSplit, Placement, ShardingSpec
from statexchange.sharding.shards import MAX_SIZE, Box, c_strides, shape_from_json, sizes_from_json
from statexchange.tensors import ITEMSIZE

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self

    Ints: TypeAlias = NDArray[Any]


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


class _EvenTensor(NamedTuple):
    """A tensor that is cut evenly: its name in the metadata, its grid, and the number of the file of each cell."""

    name: str
    grid: _Grid
    files: Ints


class DcpParts:
    """The parts of the tensors that are cut evenly, as `EvenParts`, once `number_files` has numbered the files.

    `files` has the rows of each file that has parts, by its name.
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
        bounds = np.searchsorted(of_files, np.arange(len(files) + 1)).tolist()
        self.files: dict[str, slice] = {}
        for file, (begin, end) in zip(files, pairwise(bounds), strict=True):
            if begin < end:
                self.files[file] = slice(begin, end)
        self._file_names = files
        # The names of `tensors` in the source by their numbers, and the numbers by the names.
        self._names: dict[int, str] = {}
        self._number_of: dict[str, int] = {}

    def tensors_in(self, file: str) -> list[str]:
        """Return the names, in the metadata, of the tensors of which a file has a part."""
        return [self.tensors[number].name for number in self._numbers[self.files[file]].tolist()]

    def check_places(self, file: str, listed: Sequence[tuple[str, int, int]], size: int) -> None:
        """Raise CorruptError if entries of a file of this size overlap or end outside of it.

        Those that have no row are given by name, begin and length.
        """
        at = self.files[file]
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
        self, files: Sequence[str], read: Callable[[ShardFile, DcpEntry], SourceTensor], version: list[str | int]
    ) -> list[tuple[str, str, tuple[int, ...], str]]:
        """Number the files as these names are; return name, dtype, shape and file of the tensors with parts elsewhere.

        Those cannot be read. `read` opens a part.
        """
        self._read, self.version = read, version
        numbers = {file: number for number, file in enumerate(files)}
        # One file of a tensor is enough to lose it: a spec says that every cell is there.
        lost: dict[str, str] = {}
        for file in self.files:
            if file not in numbers:
                for name in self.tensors_in(file):
                    lost.setdefault(name, file)
        numbers_of_columns = np.array([numbers.get(file, -1) for file in self._file_names])
        specs: dict[str, ShardingSpec] = {}
        unreadable = []
        meshes: dict[bytes, tuple[int, ...]] = {}  # most tensors lie on the same files
        for number, (name, grid, of_cells) in enumerate(self.tensors):
            if name in lost:
                unreadable.append((name, grid.dtype, grid.shape, lost[name]))
                continue
            # One tuple for all of these: of each tensor it has as many numbers as there are ranks.
            key = of_cells.tobytes()
            if key not in meshes:
                meshes[key] = tuple(numbers_of_columns[of_cells].tolist())
            specs[name] = ShardingSpec(name, grid.dtype, grid.shape, grid.placement(), meshes[key])
            self._names[number] = name
            self._number_of[name] = number
        self.specs = specs
        return unreadable

    def names_in(self, file: ShardFile) -> list[str]:
        """Return the names of the tensors of which a file has a part."""
        if file.name not in self.files:
            return []
        names = map(self._names.get, self._numbers[self.files[file.name]].tolist())
        return [name for name in names if name is not None]  # else the tensor is left out, or lost

    def read(self, file: ShardFile, name: str) -> SourceTensor:
        """Return the part that a file has of a tensor; raise KeyError if it has none."""
        at = self.files[file.name]
        # One at most: each cell of a tensor lies in a file of its own.
        rows = np.flatnonzero(self._numbers[at] == self._number_of[name])
        if not len(rows):
            raise KeyError(name)
        row = at.start + int(rows[0])
        old_name, grid, _ = self.tensors[self._numbers[row]]
        place = int(self._begins[row]), int(self._lengths[row])
        box = grid.box_of(int(self._cells[row]))
        tensor = self._read(file, DcpEntry(old_name, grid.dtype, grid.shape, box, *place))
        if name == old_name:
            return tensor
        return replace(tensor, shard=replace(tensor.shard, name=name))

    def renamed(self, new_name: Callable[[str], str | None]) -> Self:
        """Return the parts with other names, and without those whose new name is None."""
        specs: dict[str, ShardingSpec] = {}
        numbers: dict[str, int] = {}
        for name, spec in self.specs.items():
            new = new_name(name)
            if new in specs:
                raise UnsafeError(f"{new!r} and another tensor would get one name", name=name)
            if new is not None:
                specs[new] = replace(spec, name=new)
                numbers[new] = self._number_of[name]
        # The columns are shared: they are not changed any more, and have millions of rows.
        parts = copy.copy(self)
        names = {number: name for name, number in numbers.items()}
        vars(parts).update(specs=specs, _names=names, _number_of=numbers)
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


def _columns(numbers: Mapping[str, Sequence[int]], sizes: Mapping[str, Sequence[tuple[int, ...]]]) -> Columns:
    """Return records that were read as objects in columns, as those of a run are."""
    columns = Columns({}, {}, {}, {})
    for name, values in numbers.items():
        columns.numbers[name] = np.array(values, np.int64)
    for name, of_records in sizes.items():
        num_dims = max(map(len, of_records), default=0)
        filled = [of_record + (0,) * (num_dims - len(of_record)) for of_record in of_records]
        columns.sizes[name] = np.array(filled, np.int64).reshape(len(filled), num_dims)
        columns.dims[name] = np.array([*map(len, of_records)], np.int8)
    return columns


class _Chunks(NamedTuple):
    """The boxes of a tensor: those of a grid, and those without elements, which begin at one place."""

    grid: _Grid
    empty: Sequence[Box]

    @classmethod
    def taken_from(cls, state: dict[str, PickleValue], *, is_refused: bool) -> _Chunks | None:
        """Take the boxes out of the state of a TensorStorageMetadata, if they are in a run.

        If no grid has them, or the tensor `is_refused`, they become objects there: then None is returned.
        """
        listed: list[OpaqueObject] = []
        runs: list[Columns] = []
        for chunk in state["chunks"]:
            if _is_run(chunk):
                runs.append(chunk.args[0])
            else:
                listed.append(chunk)
        if not runs:
            return None
        chunks = None
        with suppress(AttributeError, LookupError, TypeError, ValueError, UnsupportedError):
            # Else the general reader says what is wrong.
            of_listed = {key: [sizes_from_json(chunk.state[key]) for chunk in listed] for key in ("offsets", "sizes")}
            # Copies, which `joined` empties: other names may have the same boxes.
            copies = [run._replace(sizes=dict(run.sizes), dims=dict(run.dims)) for run in runs]
            runs = [joined([_columns({}, of_listed), *copies])]
            listed = []
            if not is_refused:
                shape, dtype = shape_from_json(state["size"]), dtype_of(state["properties"].state[0])
                chunks = cls._of(dtype, shape, runs[0])
        state["chunks"] = []
        if chunks is None:
            state["chunks"] = listed
            for run in runs:
                listed += _listed_boxes(run)
        return chunks

    @classmethod
    def _of(cls, dtype: str, shape: tuple[int, ...], boxes: Columns) -> _Chunks | None:
        """Return the boxes of a tensor; None if no grid has them."""
        if any((dims != len(shape)).any() for dims in boxes.dims.values()):
            return None
        offsets, sizes = boxes.sizes["offsets"], boxes.sizes["sizes"]
        # A rank beyond the last rows has an empty part, which torch describes, too. Its place says nothing, so it is no
        # cell.
        is_empty = (sizes == 0).any(1)
        grid = _Grid.of(dtype, shape, offsets[~is_empty], sizes[~is_empty])
        empty = []
        for box_offsets, shape_of_box in zip(offsets[is_empty].tolist(), sizes[is_empty].tolist(), strict=True):
            empty.append(Box(tuple(box_offsets), tuple(shape_of_box)))
        if grid is None or len({box.offsets for box in empty}) > 1:
            return None
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


_LISTED, _EMPTY = -2, -1  # in place of a cell: an entry for the general reader; one without elements


class _Entries:
    """The stored entries: a row of columns for each part of a tensor, the first ones of parts that are objects.

    `names` and `files` have the names of tensors and of files, by their numbers in the columns.
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
        self.names = [name.decode() for name in texts["fqn"]]
        self.files = [file.decode() for file in texts["file"]]
        self._keys: list[PickleValue] = []  # of the objects that have rows
        columns = joined([self._rows_of_objects(), *runs])
        self._offsets, self._dims = columns.sizes["offsets"], columns.dims["offsets"]
        # Of names and files there are fewer than of rows: half the memory holds their numbers.
        self._of_names, self._of_files = (columns.numbers[name].astype(np.int32) for name in ("fqn", "file"))
        self._begins, self._lengths = columns.numbers["begin"], columns.numbers["length"]
        self._cells = np.full(len(self._begins), _LISTED, np.int32)  # of each row, in the grid of its tensor

    def _rows_of_objects(self) -> Columns:
        """Return the columns of the objects that are parts."""
        # The machine reads the first record of the pickle, and those behind a text that it does not expect, as objects:
        # without them no tensor would be complete.
        names = {name: number for number, name in enumerate(self.names)}
        files = {file: number for number, file in enumerate(self.files)}
        rows, all_offsets = [], []
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
            rows.append(row)
            all_offsets.append(offsets)
            self._keys.append(key)
        self.names, self.files = list(names), list(files)
        columns = np.array(rows, np.int64).reshape(len(rows), 4).T
        return _columns(dict(zip(("fqn", "file", "begin", "length"), columns, strict=True)), {"offsets": all_offsets})

    def take(self, chunks: Mapping[str, _Chunks]) -> DcpParts | None:
        """Take the entries of the tensors that are cut evenly; None if there is none.

        Each cell of such a tensor is stored once, in a file of its own. All their other entries have no element.
        """
        # Files of safetensors have 0 as the place of each entry, and their own headers say where tensors lie.
        if not any(name in chunks for name in self.names) or np.count_nonzero(self._begins == 0) > len(self.files):
            return None
        # The rows of each name are a slice of this. numpy sorts numbers of 16 bits in a tenth of the time.
        narrow = np.uint16 if len(self.names) < 1 << 16 else np.int32
        order = np.argsort(self._of_names.astype(narrow), kind="stable")
        bounds = np.searchsorted(self._of_names, np.arange(len(self.names) + 1), sorter=order).tolist()
        tensors: list[_EvenTensor] = []
        numbers = np.zeros(len(self.names), np.int32)  # of the even tensors, by the numbers of the names
        for number, name in enumerate(self.names):
            rows = order[bounds[number] : bounds[number + 1]]
            files = self._take_even(chunks[name], rows) if name in chunks else None
            if files is not None:
                numbers[number] = len(tensors)
                tensors.append(_EvenTensor(name, chunks[name].grid, files))
        is_part = self._cells >= 0
        places = [numbers[self._of_names[is_part]]]
        places += [column[is_part] for column in (self._of_files, self._cells, self._begins, self._lengths)]
        return DcpParts(tensors, places, self.files) if tensors else None

    def _take_even(self, chunks: _Chunks, rows: Ints) -> Ints | None:
        """Take the rows of a tensor, and return the file of each cell; None if it is not cut evenly."""
        grid = chunks.grid
        num_dims, num_cells = len(grid.shape), math.prod(grid.counts)
        # One row that is no cell is enough: the general reader then says what is wrong with it.
        if (self._dims[rows] != num_dims).any() or (self._begins[rows] < 0).any():
            return None
        offsets, chunk = self._offsets[rows][:, :num_dims], np.array(grid.chunk, np.int64)
        at = offsets // chunk
        sizes = np.minimum(chunk, np.array(grid.shape, np.int64) - offsets)
        is_cell = (at * chunk == offsets).all(1) & (sizes > 0).all(1)
        # A tensor's archive has its elements and more. A shorter entry is an empty part at the offsets of a cell, or
        # damage.
        is_cell &= self._lengths[rows] >= sizes.prod(1) * ITEMSIZE[grid.dtype]
        is_empty = np.zeros(len(rows), np.bool_)
        for box in chunks.empty[:1]:
            is_empty = (offsets == np.array(box.offsets, np.int64)).all(1)
        if not (is_cell | is_empty).all():
            return None
        cells = (at @ np.array(c_strides(grid.counts), np.int64))[is_cell]
        files = self._of_files[rows[is_cell]]
        # There are as many as the grid has, so each is there if none is there twice.
        if len(cells) != num_cells or np.bincount(cells).max() > 1 or np.bincount(files).max() > 1:
            return None
        self._cells[rows] = _EMPTY
        self._cells[rows[is_cell]] = cells
        of_cells: Ints = files[np.argsort(cells)]
        return of_cells

    def listed(self) -> dict[OpaqueObject, OpaqueObject]:
        """Return the entries of all other tensors as objects."""
        num_keys, is_listed = len(self._keys), self._cells == _LISTED
        for row in np.flatnonzero(~is_listed[:num_keys]).tolist():
            del self._objects[self._keys[row]]
        for row in (np.flatnonzero(is_listed[num_keys:]) + num_keys).tolist():
            offsets = tuple(self._offsets[row, : self._dims[row]].tolist())
            index = {"fqn": self.names[self._of_names[row]], "offset": offsets, "index": None}
            place = {"relative_path": self.files[self._of_files[row]]}
            place |= {"offset": int(self._begins[row]), "length": int(self._lengths[row])}
            self._objects[OpaqueObject("MetadataIndex", (), index)] = OpaqueObject("_StorageInfo", (), place)
        return self._objects
