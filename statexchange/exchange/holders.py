"""Find the files of a save that hold what a rank reads of a tensor, by the index of the save.

Tensors that lie in the same files by the same layouts have the same holders: these are looked at once, however many
tensors and ranks there are. Where the parts of one placement are all there, each once, they cover a tensor by
construction, and only the parts are looked at that a box overlaps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from statexchange.errors import CorruptError
from statexchange.formats.listed_files import ListedFiles, ListedTensor, Place
from statexchange.sharding.sharding_spec import Placement, coordinate_of, covers_exactly, parts_within
from statexchange.sharding.shards import Box
from statexchange.storage.save_index import IndexedTensor
from statexchange.storage.store import ByteRange

__all__ = ["TensorParts", "parts_by_name"]

_PLACES_PER_STEP, _PIECES_PER_STEP = 4, 8


class _Holders:
    """The places of the parts of tensors that lie alike.

    Attributes:
        places: those of this rank's own files first, then in the order of the files.
    """

    def __init__(self, files: ListedFiles, places: Sequence[Place]) -> None:
        self.places = places
        self._index = files.save_index
        self._is_exact: dict[tuple[int, ...], bool] = {}
        self._cut_dims: dict[tuple[int, ...], frozenset[int]] = {}
        self._place_of = self._places_by_coordinate()

    def _places_by_coordinate(self) -> dict[tuple[int, ...], Place]:
        """Return the places by their coordinates on the axes that split a dim.

        There are none unless the files have each part of one placement, and none twice.
        """
        layout = self._index.layouts[self.places[0].layout]
        if layout.placement is None or len({place.layout for place in self.places}) > 1:
            return {}
        mesh_shape, axes = layout.placement.mesh_shape, layout.split_axes
        if math.prod(mesh_shape[axis] for axis in axes) != len(self.places):
            return {}
        place_of: dict[tuple[int, ...], Place] = {}
        for place in self.places:
            coordinate = coordinate_of(place.coordinate, mesh_shape)
            place_of[tuple(coordinate[axis] for axis in axes)] = place
        return place_of if len(place_of) == len(self.places) else {}

    @property
    def _placement(self) -> Placement:
        """The placement of all parts, if each is there once."""
        placement = self._index.layouts[self.places[0].layout].placement
        assert placement is not None
        return placement

    def is_exact(self, shape: tuple[int, ...]) -> bool:
        """Whether each element of a tensor of `shape` lies in one of these places, and in no second one."""
        if not self._place_of:
            return False
        if shape not in self._is_exact:
            # A few characters may stand for thousands of pieces on each of many ranks.
            first = self.places[0]
            num_pieces = len(self._index.boxes_at(first.layout, first.coordinate, shape))
            self._index.budget.spend(num_pieces * len(self.places) // _PIECES_PER_STEP)
            self._is_exact[shape] = covers_exactly(shape, self._placement)
        return self._is_exact[shape]

    def cut_dims(self, shape: tuple[int, ...]) -> frozenset[int]:
        """Return the dims in which a part with elements is smaller than a tensor of `shape`."""
        if shape in self._cut_dims:
            return self._cut_dims[shape]
        cut: set[int] = set()
        places = self.places
        if self.is_exact(shape):
            # The first part is the largest: where it is whole in a dim, all others have no element.
            places = [min(places, key=lambda place: place.coordinate)]
        for place in places:
            for box in self._index.boxes_at(place.layout, place.coordinate, shape):
                cut.update(dim for dim, size in enumerate(shape) if box.shape[dim] != size)
        return self._cut_dims.setdefault(shape, frozenset(cut))

    def overlapping(self, shape: tuple[int, ...], box: Box) -> list[tuple[Box, Place]]:
        """Return the parts of a tensor of `shape` that have elements of a box, with their places, which are exact."""
        # A rank that loads what it saved itself needs no other file.
        first = self.places[0]
        if box in self._index.boxes_at(first.layout, first.coordinate, shape):
            return [(box, first)]
        parts = parts_within(shape, self._placement, box)
        return [(part, self._place_of[coordinates]) for part, coordinates in parts]


class TensorParts(NamedTuple):
    """The parts of one tensor of a save, by its index."""

    tensor: IndexedTensor
    holders: _Holders
    files: ListedFiles

    def parts(self) -> Iterator[tuple[int, ListedTensor, str]]:
        """Yield each part with its rank and the path of its file; those of this rank come first. Opens no file."""
        for place in self.holders.places:
            file = place.file
            yield self.files.rank_of(file), self.files.part(self.tensor, place), self.files.path_of(file)

    def boxes(self, needed: Sequence[Box]) -> dict[Box, ByteRange]:
        """Return where the parts lie that have elements of the boxes `needed`; opens their files."""
        boxes: dict[Box, ByteRange] = {}
        for box in needed:
            for part, place in self.holders.overlapping(self.tensor.shape, box):
                boxes[part] = self.files.range_of(self.tensor.name, place.file, part)
        return boxes


def parts_by_name(files: ListedFiles, own_rank: int | None) -> dict[str, list[TensorParts]]:
    """Return the tensors of a save by name; several of one name if ranks had other dtypes or shapes.

    Not collective. The files of `own_rank` come first.
    """
    index = files.save_index
    files_of: dict[int, list[int]] = {}
    numbers = range(len(files))
    for number in sorted(numbers, key=lambda number: (files.rank_of(number) != own_rank, number)):
        files_of.setdefault(index.files[number].content, []).append(number)
    # By contents first, which are few: a tensor lies in a content by one layout.
    lies_in: list[list[tuple[int, int]]] = [[] for _ in index.tensors]
    for content, by_layout in enumerate(index.contents):
        for at, (_, numbers_there) in enumerate(by_layout):
            for number in numbers_there:
                lies_in[number].append((content, at))
    holders: dict[tuple[tuple[int, int], ...], _Holders] = {}
    by_name: dict[str, list[TensorParts]] = {}
    for tensor, contents in zip(index.tensors, lies_in, strict=True):
        key = tuple(contents)
        if key not in holders:
            places = []
            for content, at in key:
                layout, _ = index.contents[content][at]
                for number in files_of.get(content, ()):
                    places.append(Place(number, layout, index.files[number].coordinates[at]))
            places.sort(key=lambda place: (files.rank_of(place.file) != own_rank, place.file))
            if not places:
                raise CorruptError("broken index of a save: no file has this tensor", name=tensor.name)
            # A few characters may stand for many files.
            index.budget.spend(1 + len(places) // _PLACES_PER_STEP)
            holders[key] = _Holders(files, places)
        by_name.setdefault(tensor.name, []).append(TensorParts(tensor, holders[key], files))
    return by_name
