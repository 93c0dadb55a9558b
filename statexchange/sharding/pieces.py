"""The pieces of an output tensor: its boxes, and which ranks or files write or hold each of them.

Pieces are listed, or they follow from a placement on a mesh (`SpecPieces`). A `SpecPieces` is sent as its placement, so
that a plan does not grow with the ranks. A rank computes its own pieces only. Root, and ranks that receive boxes from
other hosts, compute the ranks of all pieces as arrays.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, product
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from statexchange.messages import Shared
from statexchange.sharding.sharding_spec import DimRun, Placement, ShardingSpec, coordinate_of, runs_by_dim
from statexchange.sharding.shards import Box, Piece, c_strides

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_FEW_PIECES = 16  # the most of one tensor whose boxes are cached


class _Grid(NamedTuple):
    """The pieces of all tensors of one shape and placement, numbered in C order of the runs of each dim.

    Attributes:
        runs: the runs of each dim, in order.
        runs_at: for each dim the numbers of a rank's runs, by its coordinates on the axes that split the dim.
        first_ranks: for each piece the lowest rank of the mesh that has it.
        numels: for each piece its number of elements.
        copy_offsets: what to add to a piece's first rank to get each rank that has it.

    Of an (8, 4) tensor on a mesh of (2, 3), whose first axis splits the rows, `runs` are [0:4] and [4:8] of the rows
    and [0:4] of the columns, `first_ranks` 0 and 3, `numels` 16 and 16, and `copy_offsets` 0, 1 and 2.
    """

    runs: list[tuple[DimRun, ...]]
    runs_at: list[dict[tuple[tuple[int, int], ...], list[int]]]
    first_ranks: NDArray[np.int64]
    numels: NDArray[np.int64]
    copy_offsets: NDArray[np.int64]


@lru_cache(maxsize=256)  # a model has many tensors of few shapes and placements
def _grid(shape: tuple[int, ...], placement: Placement) -> _Grid:
    import numpy as np

    mesh_shape = placement.mesh_shape
    strides = c_strides(mesh_shape)
    all_runs = runs_by_dim(shape, placement)
    # Arrays: pieces may be thousands of each tensor. A dim multiplies the pieces of the dims before it by its runs, and
    # an outer sum flattened in C order numbers them as `_numbered` does.
    first_ranks, numels = np.zeros(1, np.int64), np.ones(1, np.int64)
    split_axes: set[int] = set()
    runs_at = []
    for runs in all_runs:
        firsts, sizes = [], []
        of_coordinates: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for number, run in enumerate(runs):
            first = 0
            for axis, index in run.coordinates:
                first += strides[axis] * index
                split_axes.add(axis)
            firsts.append(first)
            sizes.append(run.size)
            of_coordinates.setdefault(run.coordinates, []).append(number)
        runs_at.append(of_coordinates)
        first_ranks = np.add.outer(first_ranks, np.array(firsts, np.int64)).ravel()
        numels = np.multiply.outer(numels, np.array(sizes, np.int64)).ravel()
    # Ranks that differ only along axes that split nothing have the same boxes.
    offsets = np.zeros(1, np.int64)
    for axis, size in enumerate(mesh_shape):
        if axis not in split_axes:
            offsets = np.add.outer(offsets, np.arange(size) * strides[axis]).ravel()
    return _Grid(all_runs, runs_at, first_ranks, numels, offsets)


class RankPiece(NamedTuple):
    """A piece of which a rank has a copy: its number among the pieces of the tensor, and the rank's box of it.

    `is_written`: this rank's copy is the one that is written.
    """

    number: int
    box: Box
    box_index: int
    is_written: bool


@dataclass(frozen=True)
class SpecPieces(Sequence[Piece]):
    """The pieces of a tensor in the order of their first elements, each computed when it is accessed.

    Attributes:
        shape: the global shape.
        placement: how it lies on its mesh.
        turn: which copy of each piece is written. It balances the ranks' writes over the tensors.
        ranks: the ranks of the mesh in C order; () for the ranks 0, 1, ...
    """

    shape: tuple[int, ...]
    placement: Shared[Placement]
    turn: int
    ranks: Shared[tuple[int, ...]] = ()

    @property
    def _grid(self) -> _Grid:
        return _grid(self.shape, self.placement)

    @property
    def num_copies(self) -> int:
        """The number of ranks that have each piece."""
        return len(self._grid.copy_offsets)

    @property
    def copy(self) -> int:
        """The number of the copy that is written; copies are in the order of their ranks in the mesh."""
        return self.turn % self.num_copies

    @property
    def writers(self) -> NDArray[np.int64]:
        """The rank that writes each piece."""
        grid = self._grid
        return self._ranks_at(grid.first_ranks + grid.copy_offsets[self.copy])

    @property
    def holders(self) -> NDArray[np.int64]:
        """The ranks that have each piece: one row for each piece, with the rank that writes it in the first column."""
        return self._ranks_at(_holders(self.shape, self.placement, self.copy))

    def _ranks_at(self, mesh_ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        return _array_of(self.ranks)[mesh_ranks] if self.ranks else mesh_ranks

    @property
    def boxes(self) -> Iterable[Box]:
        """The boxes of the pieces."""
        # Kept where they are few, as many tensors ask for the same ones.
        if len(self) <= _FEW_PIECES:
            return _few_boxes(self.shape, self.placement)
        return map(_box_of, product(*self._grid.runs))

    def box_at(self, number: int) -> Box:
        """Return the box of one piece."""
        return _box_of(_runs_at(self._grid, number))

    @property
    def numels(self) -> NDArray[np.int64]:
        """The number of elements of each piece."""
        return self._grid.numels

    def check(self, shape: tuple[int, ...], world_size: int) -> None:
        """Raise ValueError if these cannot be the pieces of a tensor of `shape` on so many ranks."""
        num_ranks = self.placement.num_ranks
        num_splits, num_axes = len(self.placement.splits), len(self.placement.mesh_shape)
        if self.shape != shape:
            raise ValueError(f"pieces of shape {self.shape} in a tensor of shape {shape}")
        if num_splits != num_axes:
            raise ValueError(f"{num_splits} placements for a mesh of {num_axes} axes")
        ranks = self.ranks or range(num_ranks)
        if len(ranks) != num_ranks or max(ranks, default=0) >= world_size:
            raise ValueError(f"{num_ranks} ranks of a mesh are not among {world_size}")

    def of_rank(self, rank: int) -> tuple[RankPiece, ...]:
        """Return the pieces of which a rank has a copy, in their order."""
        mesh_rank = _positions_of(self.ranks).get(rank, -1) if self.ranks else rank
        if not 0 <= mesh_rank < self.placement.num_ranks:
            return ()
        return _pieces_of_rank(self.shape, self.placement, self.copy, mesh_rank)

    def within(self, region: Box) -> Iterator[tuple[int, Box]]:
        """Yield the pieces that lie in a region of the tensor, with their numbers."""
        grid = self._grid
        inside = []
        for runs, begin, size in zip(grid.runs, *region, strict=True):
            # The runs of a dim follow one another, and there may be thousands.
            first = bisect_left(runs, begin, key=attrgetter("begin"))
            last = bisect_right(runs, begin + size, key=attrgetter("end"))
            inside.append(range(first, last))
        for number, chosen in _numbered(grid, inside):
            yield number, _box_of(chosen)

    def __len__(self) -> int:
        return len(self._grid.first_ranks)

    def __iter__(self) -> Iterator[Piece]:
        return map(self._piece, product(*self._grid.runs))

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # overloads would say int or slice twice
        if isinstance(index, slice):
            return list(islice(self, *index.indices(len(self))))
        return self._piece(_runs_at(self._grid, range(len(self))[index]))

    def _piece(self, chosen: tuple[DimRun, ...]) -> Piece:
        """Return the piece whose box is the product of one run of each dim."""
        strides = c_strides(self.placement.mesh_shape)
        first = 0
        for run in chosen:
            for axis, index in run.coordinates:
                first += strides[axis] * index
        # It is the same box of each rank: ranks that have a piece have the same runs of each dim.
        index_in_rank = _index_in_rank(chosen)
        holders = self._ranks_at(first + self._grid.copy_offsets).tolist()
        writer = holders.pop(self.copy)
        replicas = tuple((holder, index_in_rank) for holder in holders)
        return Piece(_box_of(chosen), writer, index_in_rank, replicas)


@lru_cache(maxsize=256)
def _holders(shape: tuple[int, ...], placement: Placement, copy: int) -> NDArray[np.int64]:
    import numpy as np

    grid = _grid(shape, placement)
    # The rank that writes comes first, and the others stay in their order, as in `SpecPieces._piece`.
    written = grid.copy_offsets[copy : copy + 1]
    offsets = np.concatenate((written, np.delete(grid.copy_offsets, copy)))
    return np.add.outer(grid.first_ranks, offsets)


def spec_pieces(spec: ShardingSpec, turn: int) -> SpecPieces:
    """Return the pieces of a tensor: one object for all tensors of one shape and placement with the same copy to write.

    `turn` counts the tensors, which take turns in the copy that is written.
    """
    num_copies = len(_grid(spec.global_shape, spec.placement).copy_offsets)
    return _spec_pieces(spec.global_shape, spec.placement, turn % num_copies, spec.ranks)


_spec_pieces = lru_cache(maxsize=1024)(SpecPieces)


@lru_cache(maxsize=64)  # meshes
def _array_of(ranks: tuple[int, ...]) -> NDArray[np.int64]:
    import numpy as np

    return np.array(ranks, np.int64)


@lru_cache(maxsize=64)  # meshes
def _positions_of(ranks: tuple[int, ...]) -> dict[int, int]:
    return {rank: position for position, rank in enumerate(ranks)}


def _runs_at(grid: _Grid, number: int) -> tuple[DimRun, ...]:
    """Return the runs whose product is a piece: of 2 runs of the rows and 3 of the columns, piece 4 is (1, 1)."""
    chosen = []
    for runs in reversed(grid.runs):
        number, at = divmod(number, len(runs))
        chosen.append(runs[at])
    return tuple(reversed(chosen))


def _numbered(grid: _Grid, places: Iterable[Sequence[int]]) -> Iterator[tuple[int, list[DimRun]]]:
    """Yield the pieces of some runs of each dim, as their number and runs; the inverse of `_runs_at`."""
    for at in product(*places):
        number = 0
        chosen = []
        for place, runs in zip(at, grid.runs, strict=True):
            number = number * len(runs) + place
            chosen.append(runs[place])
        yield number, chosen


def _box_of(chosen: Sequence[DimRun]) -> Box:
    offsets, sizes = [], []
    for run in chosen:
        offsets.append(run.begin)
        sizes.append(run.size)
    return Box(tuple(offsets), tuple(sizes))


@lru_cache(maxsize=1024)
def _few_boxes(shape: tuple[int, ...], placement: Placement) -> tuple[Box, ...]:
    return tuple(map(_box_of, product(*_grid(shape, placement).runs)))


def _index_in_rank(chosen: Sequence[DimRun]) -> int:
    """Return the index of a piece among the boxes of a rank that has it."""
    index = 0
    for run in chosen:
        index = index * run.count + run.number
    return index


@lru_cache(maxsize=4096)  # one rank asks for its own pieces of tensors of few shapes; threads are several ranks
def _pieces_of_rank(shape: tuple[int, ...], placement: Placement, copy: int, rank: int) -> tuple[RankPiece, ...]:
    grid = _grid(shape, placement)
    coordinate = coordinate_of(rank, placement.mesh_shape)
    run_numbers: list[list[int]] = []
    for runs, runs_at in zip(grid.runs, grid.runs_at, strict=True):
        if not runs:  # the tensor has no elements
            return ()
        # All runs of one dim are along the same axes.
        at = tuple((axis, coordinate[axis]) for axis, _ in runs[0].coordinates)
        # A rank beyond the last chunk has none.
        run_numbers.append(runs_at.get(at, []))
    pieces = []
    for number, chosen in _numbered(grid, run_numbers):
        is_written = int(grid.first_ranks[number] + grid.copy_offsets[copy]) == rank
        pieces.append(RankPiece(number, _box_of(chosen), _index_in_rank(chosen), is_written))
    return tuple(pieces)


Pieces: TypeAlias = tuple[Piece, ...] | SpecPieces
"""The pieces of one tensor."""


def boxes_of(pieces: Pieces) -> Iterable[Box]:
    """Return the boxes of the pieces of a tensor."""
    return pieces.boxes if isinstance(pieces, SpecPieces) else map(attrgetter("box"), pieces)


def has_copies(pieces: Pieces) -> bool:
    """Whether several ranks have one piece of a tensor."""
    if isinstance(pieces, SpecPieces):
        return pieces.num_copies > 1
    for piece in pieces:  # noqa: SIM110 (most have one piece, for which a generator would take longer)
        if piece.replicas:
            return True
    return False


def pieces_of_rank(pieces: Pieces, rank: int) -> Sequence[RankPiece]:
    """Return the pieces of a tensor of which a rank has a copy. One of which it has two copies is there twice.

    Of a tensor of two rows, one on each of two ranks, rank 1 has
    ``RankPiece(number=1, box=Box((1, 0), (1, 4)), box_index=0, is_written=True)``.
    """
    if isinstance(pieces, SpecPieces):
        return pieces.of_rank(rank)
    of_rank = []
    for number, piece in enumerate(pieces):
        if piece.holder == rank:
            of_rank.append(RankPiece(number, piece.box, piece.box_index, True))
        for holder, box_index in piece.replicas:
            if holder == rank:
                of_rank.append(RankPiece(number, piece.box, box_index, False))
    return of_rank


_Numbers: TypeAlias = "Sequence[int] | NDArray[np.int64]"


def holders_of(pieces: Pieces, *, with_copies: bool) -> tuple[_Numbers, _Numbers]:
    """Return the ranks that have each piece of a tensor, and how many there are of each piece.

    The rank that writes a piece comes first, then, `with_copies`, those with its other copies: as `pieces_of_rank` has
    them in turn.
    """
    import numpy as np

    if isinstance(pieces, SpecPieces):
        of_each = pieces.holders if with_copies else pieces.writers[:, np.newaxis]
        return of_each.ravel(), np.full(len(of_each), of_each.shape[1])
    ranks: list[int] = []
    counts: list[int] = []
    for piece in pieces:
        ranks.append(piece.holder)
        counts.append(1)
        if with_copies and piece.replicas:
            ranks += [holder for holder, _ in piece.replicas]
            counts[-1] += len(piece.replicas)
    return ranks, counts


def pieces_written_by(pieces: Pieces, are_writers: NDArray[np.bool_]) -> Iterator[tuple[int, Box, int]]:
    """Yield the number, the box and the rank of each piece that one of some ranks writes; those have True."""
    if isinstance(pieces, SpecPieces):
        writers = pieces.writers
        for number in are_writers[writers].nonzero()[0].tolist():
            yield number, pieces.box_at(number), int(writers[number])
        return
    for number, piece in enumerate(pieces):
        if are_writers[piece.holder]:
            yield number, piece.box, piece.holder


def nbytes_by_holder(tensors: Iterable[tuple[Pieces, int]], num_holders: int) -> NDArray[np.int64]:
    """Return the bytes that each holder writes of tensors, given by their pieces and the size of an element."""
    import numpy as np

    nbytes = np.zeros(num_holders, np.int64)
    listed = [0] * num_holders  # a list, as adding to one element of an array takes longer
    # The experts of all layers have one `SpecPieces` (`spec_pieces`), whose arrays are then added once. It is the key
    # by its identity, as hashing it takes longer.
    itemsizes: dict[int, int] = {}
    distinct: dict[int, SpecPieces] = {}
    for pieces, itemsize in tensors:
        if isinstance(pieces, SpecPieces):
            distinct[id(pieces)] = pieces
            itemsizes[id(pieces)] = itemsizes.get(id(pieces), 0) + itemsize
            continue
        for piece in pieces:
            listed[piece.holder] += math.prod(piece.box.shape) * itemsize
    for key, of_spec in distinct.items():
        # Not `nbytes[writers] += ...`, as a rank may write several pieces of one tensor.
        np.add.at(nbytes, of_spec.writers, of_spec.numels * itemsizes[key])
    return nbytes + listed
