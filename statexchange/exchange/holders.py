"""Find the files of a save that hold what a rank reads of a tensor, by the index of the save.

Tensors that lie in the same files by the same layouts have the same holders: these are looked at once, however many
tensors and ranks there are. Where the parts of one placement are all there, each once, they cover a tensor by
construction, and only the parts are looked at that a box overlaps.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from statexchange.errors import CorruptError
from statexchange.formats.save_files import ListedFiles, ListedTensor, Place
from statexchange.formats.source import ShardFile
from statexchange.sharding.sharding_spec import Placement, ShardingSpec, coordinate_of, covers_exactly, parts_within
from statexchange.sharding.shards import Box, c_strides
from statexchange.storage.save_index import IndexedTensor
from statexchange.storage.store import ByteRange

# So many are looked at in the time of one step of a budget (storage/store.py).
_PLACES_PER_STEP, _PIECES_PER_STEP = 4, 8


class _Holders:
    """The places of the parts of tensors that lie alike.

    Attributes:
        places: those of this rank's own files first, then by the ranks that wrote the files.
    """

    def __init__(self, files: ListedFiles, places: Sequence[Place]) -> None:
        self.places = places
        self._index = files.save_index
        self._layout = files.save_index.layouts[places[0].layout]  # of all parts, if each is there once
        self._is_exact: dict[tuple[int, ...], bool] = {}
        self._cut_dims: dict[tuple[int, ...], frozenset[int]] = {}
        self._place_of = self._places_by_coordinate()

    def _places_by_coordinate(self) -> dict[tuple[int, ...], Place]:
        """Return the places by their coordinates on the axes of the mesh that split a dim.

        There are none unless the files have each part of one placement, and none twice.
        """
        placement = self._layout.placement
        if placement is None or len({place.layout for place in self.places}) > 1:
            return {}
        # Copies have equal coordinates on the split axes. A save has one of them, unless ranks had different bytes.
        mesh_shape, axes = placement.mesh_shape, self._layout.split_axes
        if math.prod(mesh_shape[axis] for axis in axes) != len(self.places):
            return {}
        place_of: dict[tuple[int, ...], Place] = {}
        for place in self.places:
            coordinate = coordinate_of(place.mesh_rank, mesh_shape)
            place_of[tuple(coordinate[axis] for axis in axes)] = place
        return place_of if len(place_of) == len(self.places) else {}

    @property
    def _placement(self) -> Placement:
        placement = self._layout.placement
        assert placement is not None
        return placement

    def is_exact(self, shape: tuple[int, ...]) -> bool:
        """Whether each element of a tensor of `shape` lies in one of these places, and in no second one."""
        if not self._place_of:
            return False
        # torch.chunk cuts a dim without a rest. Only pieces that are dealt out in turn might leave one.
        if self._layout.is_plain:
            return True
        if shape not in self._is_exact:
            # A few characters may stand for thousands of pieces on each of many ranks.
            self._index.budget.spend(self._layout.num_pieces * len(self.places) // _PIECES_PER_STEP)
            try:
                self._is_exact[shape] = covers_exactly(shape, self._placement)
            except ValueError as error:
                raise CorruptError(f"broken index of a save: {error}") from None
        return self._is_exact[shape]

    def cut_dims(self, shape: tuple[int, ...]) -> frozenset[int]:
        """Return the dims in which a part with elements is smaller than a tensor of `shape`."""
        if shape in self._cut_dims:
            return self._cut_dims[shape]
        cut: set[int] = set()
        places = self.places
        if self._place_of:
            # The first part is the largest: where it is whole in a dim, all others have no element.
            places = [self._place_of[min(self._place_of)]]
        self._index.budget.spend(len(places) // _PLACES_PER_STEP)
        for place in places:
            for box in self._index.boxes_at(place.layout, place.mesh_rank, shape):
                cut.update(dim for dim, size in enumerate(shape) if box.shape[dim] != size)
        return self._cut_dims.setdefault(shape, frozenset(cut))

    def overlapping(self, shape: tuple[int, ...], box: Box) -> list[tuple[Box, Place]]:
        """Return the parts of a tensor of `shape` that have elements of a box, with their places, which are exact."""
        # A rank that loads what it saved itself needs no other file.
        first = self.places[0]
        if box in self._index.boxes_at(first.layout, first.mesh_rank, shape):
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


class SpecParts(NamedTuple):
    """The parts of one tensor that is cut evenly over very many files of a source: each element is in one of them."""

    spec: ShardingSpec
    files: Sequence[ShardFile]

    @property
    def cut_dims(self) -> frozenset[int]:
        """The dims in which a part is smaller than the tensor: each axis of the mesh cuts one."""
        return frozenset(split.dim for split in self.spec.placement.splits if split is not None)

    def boxes(self, needed: Sequence[Box]) -> dict[Box, ByteRange]:
        """Return where the parts lie that have elements of the boxes `needed`; opens these."""
        spec = self.spec
        strides = c_strides(spec.placement.mesh_shape)
        boxes: dict[Box, ByteRange] = {}
        for box in needed:
            for part, coordinate in parts_within(spec.global_shape, spec.placement, box):
                file = self.files[spec.ranks[sum(map(operator.mul, coordinate, strides))]]
                (boxes[part],) = file.tensors[spec.name].byte_ranges
        return boxes


def parts_by_name(files: ListedFiles, own_rank: int | None) -> dict[str, list[TensorParts]]:
    """Return the tensors of a save by name; several of one name if ranks had other dtypes or shapes.

    Not collective. The files of `own_rank` come first.
    """
    index = files.save_index
    places_of: list[list[Place]] = [[] for _ in index.groups]
    for number, groups in enumerate(index.files):
        for group, mesh_rank in groups:
            places_of[group].append(Place(number, index.groups[group][0], mesh_rank))
    # By groups first, which are few.
    lies_in: list[list[int]] = [[] for _ in index.tensors]
    for group, (_, tensors) in enumerate(index.groups):
        for number in tensors:
            lies_in[number].append(group)
    holders: dict[tuple[int, ...], _Holders] = {}
    by_name: dict[str, list[TensorParts]] = {}
    for tensor, of_tensor in zip(index.tensors, lies_in, strict=True):
        key = tuple(of_tensor)
        if key not in holders:
            places = [place for group in key for place in places_of[group]]
            # A few characters may stand for many files.
            index.budget.spend(1 + len(places) // _PLACES_PER_STEP)
            if not places:
                raise CorruptError("broken index of a save: no file has this tensor", name=tensor.name)
            places.sort(
                key=lambda place: (files.rank_of(place.file) != own_rank, files.rank_of(place.file), place.file)
            )
            holders[key] = _Holders(files, places)
        by_name.setdefault(tensor.name, []).append(TensorParts(tensor, holders[key], files))
    return by_name
