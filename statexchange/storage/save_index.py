"""The index of a save: which boxes of each tensor lie in which file, so that a load opens only the files that it reads.

The manifest of a save of several ranks has it as JSON text. Tensors that lie alike are a group, and files that hold a
group share one entry: a file's own entry has the number of the group, and the file's rank in the mesh. So the text
grows with layouts, and not with ranks times tensors. Of a (4, 2) tensor in rows on two ranks, and a step that rank 1
has written for both::

    {"tensors": [["w", "F32", [4, 2]], ["step", "F32", []]],
     "layouts": [[[2], [[0, 1]]], [[], []]],            a mesh dim of 2 ranks, Shard(0), with a split_factor of 1; whole
     "groups": [[0, [0]], [1, [1]]],                    "w" lies by layout 0, "step" by layout 1
     "files": [[[0, 0]], [[0, 1], [1, 0]]],             group 0 at ranks 0 and 1 of its mesh, group 1 in the second file
     "states": [{"aliases": {}}], "ranks": [0, 0], "values": ["5b0c...", "5b0c..."]}

Boxes that follow from no mesh are listed: ``{"boxes": [[[0, 0], [1, 2]]]}``. The files are in the order of the
manifest, those of frozen parameters last. A state has what the metadata of a rank's file have beside its tensors. Ranks
with equal `values`, a digest, have equal plain values but for those that belong to a rank.

The header of a file stays the record of what lies in it. The index says only which file to open: what it says of a file
that is opened is compared with the header.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from statexchange.errors import CorruptError, StateExchangeError, excerpt
from statexchange.sharding.sharding_spec import DimSplit, Placement, coordinate_of, local_boxes
from statexchange.sharding.shards import Box, Shard, shape_from_json
from statexchange.storage.location import check_parsed_size, parse_json
from statexchange.storage.store import Budget
from statexchange.storage.tensorfile import IndexedState
from statexchange.tensors import ITEMSIZE

_MAX_TEXT = 32 << 20  # of an index: whoever lists saves reads it, too
# Of a mesh: a few digits of a text would otherwise ask for any number of boxes.
_MAX_RANKS, _MAX_AXES, _MAX_SPLIT = 1 << 20, 16, 1 << 16
_BOXES_PER_STEP = 4


class IndexedTensor(NamedTuple):
    """A tensor of a save: its name, dtype and global shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SavedLayout:
    """The place of a part in its tensor: by a placement and a rank of its mesh, or, without a placement, as boxes."""

    placement: Placement | None
    boxes: tuple[Box, ...] = ()

    def boxes_at(self, shape: tuple[int, ...], mesh_rank: int) -> tuple[Box, ...]:
        """Return the boxes with elements that rank `mesh_rank` of the mesh, in C order, has of a tensor of `shape`."""
        if self.placement is None:
            return tuple(box for box in self.boxes if box.numel)
        mesh_shape = self.placement.mesh_shape
        placed = local_boxes(shape, mesh_shape, coordinate_of(mesh_rank, mesh_shape), self.placement.splits)
        return tuple(box for box, _ in placed)

    @property
    def split_axes(self) -> list[int]:
        """The axes of the mesh that split a dim."""
        if self.placement is None:
            return []
        return [axis for axis, split in enumerate(self.placement.splits) if split is not None]

    @property
    def is_plain(self) -> bool:
        """Whether there is a placement that splits each dim at most once, into one run for each rank."""
        if self.placement is None:
            return False
        dims = [split.dim for split in self.placement.splits if split is not None]
        return self.num_pieces == 1 and len(set(dims)) == len(dims)

    @property
    def num_pieces(self) -> int:
        """A limit of the pieces of a dim that are dealt out to each rank, however few boxes they join to."""
        if self.placement is None:
            return len(self.boxes)
        pieces = 1
        for split in self.placement.splits:
            if split is not None:
                pieces *= split.split_factor
        return pieces

    def to_json(self) -> object:
        """Return the layout as a JSON value."""
        if self.placement is None:
            return {"boxes": self.boxes}
        splits: list[object] = []
        for split in self.placement.splits:
            splits.append(None if split is None else [split.dim, split.split_factor])
        return [self.placement.mesh_shape, splits]

    @classmethod
    def from_json(cls, raw: object) -> SavedLayout:
        """Return the layout that `to_json` has returned; raise ValueError for anything else."""
        if isinstance(raw, dict):
            return cls(None, tuple(map(Box.from_json, _listed(raw["boxes"]))))
        mesh_shape, listed = _listed(raw, 2)
        mesh = tuple(_numbers(mesh_shape, _MAX_RANKS + 1))
        if len(mesh) > _MAX_AXES or math.prod(mesh) > _MAX_RANKS or 0 in mesh:
            raise ValueError("a mesh has too many ranks, or none")
        splits: list[DimSplit | None] = []
        for split in _listed(listed, len(mesh)):
            if split is None:
                splits.append(None)
            else:
                dim, factor = _numbers(_listed(split, 2), _MAX_SPLIT + 1)
                splits.append(DimSplit(dim, factor))
        return cls(Placement(mesh, tuple(splits)))


@functools.lru_cache(4096)  # a model has many tensors of few shapes
def layout_of(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> tuple[SavedLayout, int]:
    """Return the layout of these boxes of a tensor of `shape`, and their rank in its mesh.

    One box that is a part of a dim cut into equal parts, in one dim or in several, lies on a mesh of these parts: so
    what several ranks hold alike, each elsewhere, has one layout. The rows 2 and 3 of an (8, 4) tensor are those of
    rank 1 of a mesh of 4.
    """
    if len(boxes) == 1 and boxes[0].numel:
        mesh_shape, splits, mesh_rank = [], [], 0
        for dim, (begin, size, whole) in enumerate(zip(*boxes[0], shape, strict=True)):
            if size != whole:
                # As if it were one of equal parts; if it is none, the comparison below says so.
                num_parts = -(-whole // size)
                mesh_shape.append(num_parts)
                splits.append(DimSplit(dim))
                mesh_rank = mesh_rank * num_parts + begin // size
        layout = SavedLayout(Placement(tuple(mesh_shape), tuple(splits)))
        if math.prod(mesh_shape) <= _MAX_RANKS and layout.boxes_at(shape, mesh_rank) == boxes:
            return layout, mesh_rank
    return SavedLayout(None, boxes), 0


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that lie by one layout in the files of some ranks."""

    layout: SavedLayout
    tensors: Sequence[IndexedTensor]


class GroupInFile(NamedTuple):
    """A group that a file holds, by its number, and the file's rank in the mesh of its layout."""

    group: int
    mesh_rank: int


@dataclass(frozen=True, slots=True)
class SaveIndex:
    """The index of a save, as a reader has it.

    Attributes:
        tensors: its tensors. Two have one name if ranks have saved it with different dtypes or shapes.
        layouts: the layouts of their parts.
        groups: the number of a layout, and those of the tensors that lie by it.
        files: what each file of the manifest holds.
        states: what ranks have beside tensors, each distinct one once.
        ranks: the number of each rank's state.
        values: the digest of each rank's plain values.
        budget: of the manifest that had it.
    """

    tensors: Sequence[IndexedTensor]
    layouts: Sequence[SavedLayout]
    groups: Sequence[tuple[int, Sequence[int]]]
    files: Sequence[Sequence[GroupInFile]]
    states: Sequence[IndexedState]
    ranks: Sequence[int]
    values: Sequence[str]
    budget: Budget
    _boxes: dict[tuple[int, int, tuple[int, ...]], tuple[Box, ...]] = field(default_factory=dict)

    def boxes_at(self, layout: int, mesh_rank: int, shape: tuple[int, ...]) -> tuple[Box, ...]:
        """Return the boxes with elements that a file has of a tensor of `shape`.

        Raises:
            CorruptError: the layout does not fit the shape, or says more than its text can mean.
        """
        key = layout, mesh_rank, shape
        if key not in self._boxes:
            placed = self.layouts[layout]
            # A few characters may stand for thousands of boxes, which are counted before they are made and after.
            self.budget.spend(1 + placed.num_pieces // _BOXES_PER_STEP)
            try:
                boxes = placed.boxes_at(shape, mesh_rank)
                Shard("", "U8", shape, boxes)  # refuses what lies outside
            except ValueError as error:
                raise CorruptError(f"broken index of a save: {error}") from None
            self.budget.spend(len(boxes) // _BOXES_PER_STEP)
            self._boxes[key] = boxes
        return self._boxes[key]

    def parts_in(self, file: int) -> Iterator[tuple[IndexedTensor, int, int]]:
        """Yield the tensors of a file, each with the layout of its part and the rank in the layout's mesh."""
        for number, mesh_rank in self.files[file]:
            layout, tensors = self.groups[number]
            for tensor in tensors:
                yield self.tensors[tensor], layout, mesh_rank

    def check(self, file: int, shards: Mapping[str, Shard], metadata: Mapping[str, object], path: str) -> None:
        """Raise CorruptError unless a file has the shards that the index says, and its metadata the rank's state."""
        # Files of frozen parameters come after those of the ranks, and have no state.
        if file < len(self.ranks):
            try:
                in_file = IndexedState.from_json(dict(metadata))
            except ValueError as error:
                raise CorruptError(f"broken metadata: {error}", path=path) from None
            if in_file != self.states[self.ranks[file]]:
                text = "its aliases, optimizers, or paths per rank or left out, differ from the index in save.json"
                raise CorruptError(text, path=path)
        unlisted = {*shards}
        for tensor, layout, mesh_rank in self.parts_in(file):
            name = tensor.name
            if name not in unlisted:  # it is not in the file, or the index has it twice
                text = "the index in save.json has this tensor here, the file has not"
                raise CorruptError(text, name=name, path=path)
            unlisted.remove(name)
            shard, boxes = shards[name], self.boxes_at(layout, mesh_rank, tensor.shape)
            in_shard = tuple(box for box in shard.boxes if box.numel)
            if (shard.dtype, shard.global_shape, in_shard) != (tensor.dtype, tensor.shape, boxes):
                raise CorruptError(
                    "its dtype, shape or boxes differ from the index in save.json",
                    name=name,
                    path=path,
                    expected=_shown(tensor.dtype, tensor.shape, boxes),
                    found=_shown(shard.dtype, shard.global_shape, in_shard),
                )
        if unlisted:
            text = "the index in save.json lacks this tensor of the file"
            raise CorruptError(text, name=min(unlisted), path=path)

    @classmethod
    def parse(cls, text: str, num_files: int, num_ranks: int, path: str, budget: Budget) -> SaveIndex:
        """Return the index that `index_text` encoded, of so many files and ranks; else raise CorruptError."""
        raw = parse_json(text, path, budget)
        try:
            if not isinstance(raw, dict):
                raise ValueError("it is no object")
            tensors = []
            for fields in _listed(raw["tensors"]):
                name, dtype, shape = _listed(fields, 3)
                if not isinstance(name, str) or not isinstance(dtype, str) or dtype not in ITEMSIZE:
                    raise ValueError(f"not a name and dtype: {excerpt(fields)}")
                tensors.append(IndexedTensor(name, dtype, shape_from_json(shape)))
            layouts = list(map(SavedLayout.from_json, _listed(raw["layouts"])))
            groups = []
            for fields in _listed(raw["groups"]):
                layout, listed = _listed(fields, 2)
                groups.append((_numbers([layout], len(layouts))[0], _numbers(listed, len(tensors))))
            files = []
            for of_file in _listed(raw["files"], num_files):
                files.append([_group_from_json(fields, layouts, groups) for fields in _listed(of_file)])
            states = list(map(IndexedState.from_json, _listed(raw["states"])))
            ranks = _numbers(_listed(raw["ranks"], num_ranks), len(states))
            values = list(map(str, _listed(raw["values"], num_ranks)))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, StateExchangeError):
                raise
            raise CorruptError(f"broken index of a save: {error}", path=path) from None
        return cls(tensors, layouts, groups, files, states, ranks, values, budget)


def index_text(
    files: Sequence[Sequence[tuple[Group, int]]],
    states: Sequence[IndexedState],
    ranks: Sequence[int],
    values: Sequence[str],
) -> str:
    """Return the text of an index, given the groups of each file with its rank in their meshes."""
    tensors: dict[IndexedTensor, int] = {}
    layouts: dict[SavedLayout, int] = {}
    groups: dict[tuple[int, tuple[int, ...]], int] = {}
    number_of: dict[int, int] = {}  # by identity, as ranks that have sent equal groups share one object
    listed: list[list[GroupInFile]] = []
    for of_file in files:
        listed.append([])
        for group, mesh_rank in of_file:
            # Numbers are given in the order in which things are met, so that equal saves have equal texts.
            if id(group) not in number_of:
                layout = layouts.setdefault(group.layout, len(layouts))
                numbers = tuple(tensors.setdefault(tensor, len(tensors)) for tensor in group.tensors)
                number_of[id(group)] = groups.setdefault((layout, numbers), len(groups))
            listed[-1].append(GroupInFile(number_of[id(group)], mesh_rank))
    record = {
        "tensors": list(tensors),
        "layouts": [layout.to_json() for layout in layouts],
        "groups": list(groups),
        "files": listed,
        "states": [state.to_json() for state in states],
        "ranks": ranks,
        "values": values,
    }
    return json.dumps(record, ensure_ascii=False, separators=(",", ":"))


def is_readable(text: str, num_files: int, num_ranks: int) -> bool:
    """Whether an index is small enough for readers, which parse it twice: within the manifest, and then by itself."""
    if len(text) > _MAX_TEXT:
        return False
    # By a budget such as theirs, so that a save never has an index that its own load refuses.
    budget = Budget("", len(text))
    try:
        check_parsed_size(json.dumps(text), "", budget)
        SaveIndex.parse(text, num_files, num_ranks, "", budget)
    except CorruptError:
        return False
    return True


def _group_from_json(
    raw: object, layouts: Sequence[SavedLayout], groups: Sequence[tuple[int, Sequence[int]]]
) -> GroupInFile:
    number, mesh_rank = _listed(raw, 2)
    (group,) = _numbers([number], len(groups))
    placement = layouts[groups[group][0]].placement
    return GroupInFile(group, *_numbers([mesh_rank], 1 if placement is None else placement.num_ranks))


def _shown(dtype: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> str:
    return f"{dtype} {list(shape)} {', '.join(map(str, boxes[:3]))}"


def _listed(raw: object, length: int | None = None) -> list[object]:
    """Return a list, of so many items if a length is given; raise ValueError for anything else."""
    if type(raw) is not list:
        raise ValueError(f"not a list: {excerpt(raw)}")
    if length not in (None, len(raw)):
        raise ValueError(f"not a list of {length}: {excerpt(raw)}")
    return raw


def _numbers(raw: object, end: int) -> list[int]:
    """Return a list of numbers from 0 to before `end`."""
    # A bool is an int, too.
    if type(raw) is not list or {*map(type, raw)} - {int} or (raw and not 0 <= min(raw) <= max(raw) < end):
        raise ValueError(f"not numbers from 0 to {end - 1}: {excerpt(raw)}")
    return raw
