"""The index of a save: which boxes of each tensor lie in which file, so that a load opens only the files that it reads.

The manifest of a save of several ranks has it as JSON text. It grows with layouts and not with ranks times tensors:
what a file has is a *content*, lists of tensors by their layout, and is written once for all files that have the same
tensors; of a layout on a mesh each file has but its coordinate. Of a (4, 2) tensor in rows on two ranks::

    {"tensors": [["w", "F32", [4, 2]]],
     "layouts": [[[2], [[0, 1]]]],                  one axis of 2 ranks, which splits dim 0 into 1 piece for each
     "contents": [[[0, [0]]]],                      of layout 0 the tensor 0
     "files": [[0, [0]], [0, [1]]],                 both have content 0; at coordinates 0 and 1 of its layout
     "states": [{"config": "5b0c...", "aliases": {}}], "ranks": [0, 0]}

Boxes that follow from no mesh are listed: ``{"boxes": [[[0, 0], [1, 2]]]}``. The files are in the order of the
manifest, those of frozen parameters last. A state has what the metadata of a rank's file have beside its tensors, and a
digest of its plain values, without those that are each rank's own: ranks with equal states have equal values.

The header of a file stays the record of what lies in it. The index says only which file to open: what it says of a file
that is opened is compared with the header.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from statexchange.errors import CorruptError, StateExchangeError, excerpt
from statexchange.sharding.sharding_spec import DimSplit, Placement, coordinate_of, local_boxes
from statexchange.sharding.shards import Box, Shard, shape_from_json
from statexchange.storage.location import parse_json
from statexchange.storage.store import Budget
from statexchange.tensors import ITEMSIZE

__all__ = ["WHOLE", "Content", "FileIndex", "IndexedState", "IndexedTensor", "SaveIndex", "SavedLayout", "layout_of"]

_FACTS = ("aliases", "per_rank", "optimizers", "left_out")  # of a file's metadata
_MAX_RANKS = 1 << 20  # of the mesh of a layout
_BOXES_PER_STEP = 4
_MAX_SPLIT = 1 << 16


class IndexedTensor(NamedTuple):
    """A tensor of a save: its name, dtype and global shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SavedLayout:
    """Where the part of a tensor lies that one file has: by a placement and a coordinate on its mesh, or as boxes."""

    placement: Placement | None
    boxes: tuple[Box, ...] = ()

    def boxes_at(self, shape: tuple[int, ...], coordinate: int) -> tuple[Box, ...]:
        """Return the boxes that have elements, of a tensor of `shape`, of the rank of this number on the mesh."""
        if self.placement is None:
            return tuple(box for box in self.boxes if box.numel)
        mesh_shape = self.placement.mesh_shape
        placed = local_boxes(shape, mesh_shape, coordinate_of(coordinate, mesh_shape), self.placement.splits)
        return tuple(box for box, _ in placed)

    @property
    def split_axes(self) -> list[int]:
        """The axes of the mesh that split a dim."""
        axes = []
        if self.placement is not None:
            axes = [axis for axis, split in enumerate(self.placement.splits) if split is not None]
        return axes

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
            return cls(None, tuple(map(Box.from_json, raw["boxes"])))
        mesh_shape, listed = _of_length(raw, 2)
        mesh = tuple(_numbers(mesh_shape, _MAX_RANKS + 1))
        if math.prod(mesh) > _MAX_RANKS or 0 in mesh:
            raise ValueError("a mesh has too many ranks, or none")
        splits: list[DimSplit | None] = []
        for split in _of_length(listed, len(mesh)):
            if split is None:
                splits.append(None)
            else:
                dim, factor = _numbers(_of_length(split, 2), _MAX_SPLIT + 1)
                splits.append(DimSplit(dim, factor))
        return cls(Placement(mesh, tuple(splits)))


WHOLE = SavedLayout(Placement((), ()))


@functools.lru_cache(4096)  # a model has many tensors of few shapes
def layout_of(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> tuple[SavedLayout, int]:
    """Return the layout of these boxes of a tensor of `shape`, and their coordinate.

    One box that is a part of a dim cut into equal parts, in one dim or in several, has a coordinate on a mesh of these
    parts: so what several ranks hold alike, each elsewhere, has one layout. The rows 2 and 3 of a (8, 4) tensor are at
    coordinate 1 of a mesh of 4.
    """
    if len(boxes) == 1 and boxes[0].numel:
        mesh_shape, splits, coordinate = [], [], 0
        for dim, (begin, size, whole) in enumerate(zip(*boxes[0], shape, strict=True)):
            if size != whole:
                num_parts = -(-whole // size)
                mesh_shape.append(num_parts)
                splits.append(DimSplit(dim))
                coordinate = coordinate * num_parts + begin // size
        layout = SavedLayout(Placement(tuple(mesh_shape), tuple(splits)))
        if math.prod(mesh_shape) <= _MAX_RANKS and layout.boxes_at(shape, coordinate) == boxes:
            return layout, coordinate
    return SavedLayout(None, boxes), 0


@dataclass(frozen=True, slots=True)
class Content:
    """What a file has: tensors, and for each the number of its layout among `layouts`."""

    tensors: Sequence[IndexedTensor]
    layouts: Sequence[SavedLayout]
    numbers: Sequence[int]


class IndexedState(NamedTuple):
    """What a rank has beside tensors: a digest of its plain values, and what its file's metadata say about them."""

    config: str
    aliases: Mapping[str, str]
    per_rank: Sequence[str]
    optimizers: Mapping[str, str]
    left_out: Sequence[str]

    def to_json(self) -> dict[str, object]:
        """Return the state as a JSON value, without what is empty."""
        return {name: value for name, value in self._asdict().items() if value}

    @classmethod
    def from_json(cls, raw: object) -> IndexedState:
        """Return the state that `to_json` has returned; raise ValueError for anything else."""
        if not isinstance(raw, dict) or not isinstance(raw.get("config"), str):
            raise ValueError(f"not a state: {excerpt(raw)}")
        aliases, optimizers = raw.get("aliases", {}), raw.get("optimizers", {})
        per_rank, left_out = raw.get("per_rank", []), raw.get("left_out", [])
        texts = [*per_rank, *left_out, *aliases.values(), *optimizers.values()]
        if {*map(type, texts)} - {str} or {type(per_rank), type(left_out)} != {list}:
            raise ValueError("the aliases, optimizers and paths of a state are not texts")
        return cls(raw["config"], aliases, per_rank, optimizers, left_out)


class FileIndex(NamedTuple):
    """What the index says of one file: the number of its content, and its coordinate on each layout of that."""

    content: int
    coordinates: Sequence[int]


@dataclass(frozen=True, slots=True)
class SaveIndex:
    """The index of a save.

    Attributes:
        save: the id of the save.
        tensors: its tensors. Two have one name if ranks have saved it with different dtypes or shapes.
        layouts: the layouts of their parts.
        contents: for each content pairs of a layout and the tensors that have it, as numbers.
        files: what each file of the manifest has.
        states: what ranks have beside tensors, each distinct one once.
        ranks: the number of each rank's state.
        budget: of the manifest that had it.
    """

    save: str
    tensors: Sequence[IndexedTensor]
    layouts: Sequence[SavedLayout]
    contents: Sequence[Sequence[tuple[int, Sequence[int]]]]
    files: Sequence[FileIndex]
    states: Sequence[IndexedState]
    ranks: Sequence[int]
    budget: Budget
    _boxes: dict[tuple[int, int, tuple[int, ...]], tuple[Box, ...]] = field(default_factory=dict)

    def boxes_at(self, layout: int, coordinate: int, shape: tuple[int, ...]) -> tuple[Box, ...]:
        """Return the boxes with elements that a file has of a tensor of `shape`.

        Raises:
            CorruptError: the layout does not fit the shape, or says more than its text can mean.
        """
        key = layout, coordinate, shape
        if key not in self._boxes:
            try:
                boxes = self.layouts[layout].boxes_at(shape, coordinate)
                Shard("", "U8", shape, boxes)  # refuses what lies outside
            except ValueError as error:
                raise CorruptError(f"broken index of a save: {error}") from None
            # A few characters may stand for thousands of boxes.
            self.budget.spend(1 + len(boxes) // _BOXES_PER_STEP)
            self._boxes[key] = boxes
        return self._boxes[key]

    def parts_in(self, file: int) -> Iterator[tuple[IndexedTensor, int, int]]:
        """Yield the tensors of a file, each with the layout and the coordinate of its part."""
        content, coordinates = self.files[file]
        for (layout, tensors), coordinate in zip(self.contents[content], coordinates, strict=True):
            for number in tensors:
                yield self.tensors[number], layout, coordinate

    def check(self, file: int, shards: Mapping[str, Shard], metadata: Mapping[str, object], path: str) -> None:
        """Raise CorruptError unless the header of a file has the shards that the index says, and the rank's state."""
        if file < len(self.ranks):
            state = self.states[self.ranks[file]]
            facts = {name: metadata[name] for name in _FACTS if name in metadata}
            try:
                in_file = IndexedState.from_json({"config": state.config, **facts})
            except (AttributeError, ValueError) as error:
                raise CorruptError(f"broken metadata: {error}", path=path) from None
            if in_file != state:
                text = (
                    "the index of the save says otherwise than this file of aliases, optimizers or what is a rank's own"
                )
                raise CorruptError(text, path=path)
        listed = 0
        for tensor, layout, coordinate in self.parts_in(file):
            listed += 1
            shard = shards.get(tensor.name)
            boxes = self.boxes_at(layout, coordinate, tensor.shape)
            if shard is None:
                raise CorruptError(
                    "the index of the save has this tensor here, its file has not", name=tensor.name, path=path
                )
            held = tuple(box for box in shard.boxes if box.numel)
            if (shard.dtype, shard.global_shape, held) != (tensor.dtype, tensor.shape, boxes):
                text = "the index of the save says otherwise than the file's header"
                raise CorruptError(
                    text,
                    name=tensor.name,
                    path=path,
                    expected=_shown(tensor.dtype, tensor.shape, boxes),
                    found=_shown(shard.dtype, shard.global_shape, held),
                )
        if listed != len(shards):
            text = "the index of the save lists other tensors than the file has"
            raise CorruptError(text, path=path, expected=listed, found=len(shards))

    @classmethod
    def of(
        cls,
        files: Sequence[tuple[Content, Sequence[int]]],
        states: Sequence[IndexedState],
        ranks: Sequence[int],
    ) -> SaveIndex:
        """Return the index of files, given each one's content, with its coordinate on each of its layouts."""
        tensors: dict[IndexedTensor, int] = {}
        layouts: dict[SavedLayout, int] = {}
        contents: list[list[tuple[int, Sequence[int]]]] = []
        number_of: dict[int, int] = {}  # by identity: files of equal content share one object
        listed = []
        for content, coordinates in files:
            if id(content) not in number_of:
                number_of[id(content)] = len(contents)
                by_layout: list[tuple[int, list[int]]] = []
                for layout in content.layouts:
                    by_layout.append((layouts.setdefault(layout, len(layouts)), []))
                for tensor, layout_number in zip(content.tensors, content.numbers, strict=True):
                    by_layout[layout_number][1].append(tensors.setdefault(tensor, len(tensors)))
                contents.append([*by_layout])
            listed.append(FileIndex(number_of[id(content)], coordinates))
        return cls("", list(tensors), list(layouts), contents, listed, states, ranks, Budget(""))

    def to_text(self) -> str:
        """Return the JSON text for the manifest."""
        record = {
            "tensors": self.tensors,
            "layouts": [layout.to_json() for layout in self.layouts],
            "contents": self.contents,
            "files": self.files,
            "states": [state.to_json() for state in self.states],
            "ranks": self.ranks,
        }
        return json.dumps(record, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str, save: str, num_files: int, num_ranks: int, path: str, budget: Budget) -> SaveIndex:
        """Return the index that `to_text` encoded, of so many files and ranks; raise CorruptError for anything else."""
        raw = parse_json(text, path, budget)
        try:
            if not isinstance(raw, dict):
                raise ValueError("it is no object")
            tensors = []
            for fields in raw["tensors"]:
                name, dtype, shape = _of_length(fields, 3)
                if not isinstance(name, str) or dtype not in ITEMSIZE:
                    raise ValueError(f"not a name and dtype: {excerpt(fields)}")
                tensors.append(IndexedTensor(name, dtype, shape_from_json(shape)))
            layouts = list(map(SavedLayout.from_json, raw["layouts"]))
            contents = [_content_from_json(listed, layouts, tensors) for listed in raw["contents"]]
            files = [_file_from_json(fields, layouts, contents) for fields in _of_length(raw["files"], num_files)]
            states = list(map(IndexedState.from_json, raw["states"]))
            ranks = _numbers(_of_length(raw["ranks"], num_ranks), len(states))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, StateExchangeError):
                raise
            raise CorruptError(f"broken index of a save: {error}", path=path) from None
        return cls(save, tensors, layouts, contents, files, states, ranks, budget)


def _shown(dtype: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> str:
    return f"{dtype} {list(shape)} {', '.join(map(str, boxes[:3]))}"


_Content: TypeAlias = Sequence[tuple[int, Sequence[int]]]


def _content_from_json(raw: object, layouts: Sequence[SavedLayout], tensors: Sequence[IndexedTensor]) -> _Content:
    content = []
    for pair in _of_length(raw):
        layout, listed = _of_length(pair, 2)
        numbers = _numbers(listed, len(tensors))
        content.append((_number(layout, len(layouts)), numbers))
    return content


def _file_from_json(raw: object, layouts: Sequence[SavedLayout], contents: Sequence[_Content]) -> FileIndex:
    number, listed = _of_length(raw, 2)
    content = _number(number, len(contents))
    coordinates = []
    for (layout, _), coordinate in zip(contents[content], _of_length(listed), strict=True):
        placement = layouts[layout].placement
        coordinates.append(_number(coordinate, 1 if placement is None else placement.num_ranks))
    return FileIndex(content, coordinates)


def _number(raw: object, end: int) -> int:
    return _numbers([raw], end)[0]


def _of_length(raw: object, length: int | None = None) -> list[object]:
    if type(raw) is not list or length not in (None, len(raw)):
        raise ValueError(f"not a list of {'any length' if length is None else length}: {excerpt(raw)}")
    return raw


def _numbers(raw: object, end: int) -> list[int]:
    """Return a list of numbers from 0 to before `end`."""
    # A bool is an int, too.
    if type(raw) is not list or {*map(type, raw)} - {int} or (raw and not 0 <= min(raw) <= max(raw) < end):
        raise ValueError(f"not numbers from 0 to {end - 1}: {excerpt(raw)}")
    return raw
