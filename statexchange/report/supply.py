"""Find out which rank supplied which bytes of a checkpoint, and divide the area of a tensor among the ranks."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from statexchange.formats import sealed_files
from statexchange.formats.box_digests import PlacedBoxes
from statexchange.formats.registry import open_source
from statexchange.formats.source import KINDS_WITH_RANKS, Source, SourceKind
from statexchange.sharding.shards import Box, full_box
from statexchange.tensors import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

__all__ = [
    "MAX_CELLS",
    "MAX_RANKS",
    "Cell",
    "Supplied",
    "Supply",
    "cells_of",
    "nbytes_by_rank",
    "shares",
    "supply_of",
]

MAX_CELLS, MAX_RANKS = 8000, 16


@dataclass(frozen=True, slots=True)
class Supplied:
    """A tensor with (box, rank) of each box. If the format has no ranks, the number of the file stands for the rank."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[Box, int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return full_box(self.shape).numel * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class Supply:
    """The bytes of a checkpoint that each rank supplied.

    Attributes:
        path: its path, for messages.
        supplier: "rank", or "file" if its format has no ranks; then the numbers of files stand for ranks.
        files: the names of the files by number, if its format has no ranks; empty for files that were merged.
        tensors: its tensors, largest first.
        unknown: names of further tensors, which are missing and whose sizes are not known.
    """

    path: str
    supplier: Literal["rank", "file"]
    files: Mapping[int, str]
    tensors: tuple[Supplied, ...]
    unknown: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, supplied or not."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def label(self, rank: int) -> str:
        """Return what to call a rank: ``rank 3``, or ``3: model-00004-of-00008.safetensors`` for a file."""
        return f"{rank}: {self.files[rank]}" if rank in self.files else f"{self.supplier} {rank}"

    def select(self, names: Collection[str]) -> Supply:
        """Return the supply of only the tensors that `names` has."""
        tensors = tuple(tensor for tensor in self.tensors if tensor.name in names)
        return replace(self, tensors=tensors, unknown=tuple(name for name in self.unknown if name in names))


def supply_of(source: Source | str | os.PathLike[str]) -> Supply:
    """Return which rank supplied which bytes.

    Not collective. Reads headers only. The rank comes from the manifest of an export or a merge, which has the numbers
    of the merged files if these had no ranks. Otherwise it is the first rank that has the box, or the number of the
    first file that has it.

    Args:
        source: a path or URL of any format that `open_checkpoint` reads, or a source opened without `strict`.

    Raises:
        NotFoundError: there is no checkpoint at the path.
        UnsupportedError: the format is one that is not read.
    """
    if not isinstance(source, Source):
        with open_source(source, strict=False) as opened:
            return supply_of(opened)
    unknown = []
    manifest = source.manifest
    if manifest is not None and sealed_files.KEY in manifest:  # a seal is added later, when the ranks are not known
        manifest = None
    if manifest is not None:
        tensors = list(_published_tensors(source, manifest))
        merged = manifest.get("source")
        has_ranks = merged in KINDS_WITH_RANKS or merged not in get_args(SourceKind)
    else:
        tensors = list(_stored_tensors(source))
        has_ranks = source.has_ranks
        known = {tensor.name for tensor in tensors}
        missing = {tensor.name: tensor for tensor in source.unreadable if tensor.name not in known}
        for name, tensor in missing.items():
            if tensor.shape is None or tensor.dtype not in ITEMSIZE:
                unknown.append(name)
            else:
                tensors.append(Supplied(name, tensor.dtype, tensor.shape, ()))
    files = {}
    if manifest is None and not has_ranks:
        # Several files may have one `rank`, as those of the parts of a directory such as verl's.
        files = {number: source.path_below(shard_file) for number, shard_file in enumerate(source.files)}
    return Supply(
        source.path,
        "rank" if has_ranks else "file",
        files,
        tuple(sorted(tensors, key=lambda tensor: (-tensor.nbytes, tensor.name))),
        tuple(unknown),
    )


def _published_tensors(source: Source, manifest: Mapping[str, Any]) -> Iterator[Supplied]:
    """Yield the tensors of a manifest, with the ranks in it."""
    placed: dict[str, PlacedBoxes] = {}
    for _, tensor in source.shards():
        for stored in tensor.byte_ranges[:1]:  # an empty tensor has none
            if isinstance(stored.parts, PlacedBoxes):
                placed[tensor.shard.name] = stored.parts
    for name, record in manifest["tensors"].items():
        boxes: tuple[tuple[Box, int], ...] = ()
        if name in placed:
            pieces = placed[name].pieces
            boxes = tuple(zip(pieces.boxes, pieces.writers.tolist(), strict=True))
        elif "boxes" in record:
            boxes = tuple((Box.from_json([offsets, shape]), rank) for offsets, shape, _, rank in record["boxes"])
        yield Supplied(name, record["dtype"], tuple(record["shape"]), boxes)


def _stored_tensors(source: Source) -> Iterator[Supplied]:
    """Yield the tensors of a source, with the first rank (or file) that has each box."""
    first_ranks: dict[tuple[str, str, tuple[int, ...]], dict[Box, int]] = {}
    for number, shard_file in enumerate(source.files):
        for tensor in shard_file.tensors.values():
            shard = tensor.shard
            ranks = first_ranks.setdefault((shard.name, shard.dtype, shard.global_shape), {})
            for box in shard.boxes:
                ranks.setdefault(box, shard_file.rank if source.has_ranks else number)
    for (name, dtype, shape), ranks in first_ranks.items():
        yield Supplied(name, dtype, shape, tuple(ranks.items()))


def nbytes_by_rank(tensors: Sequence[Supplied]) -> Counter[int]:
    """Return the bytes that each rank supplied of all tensors."""
    total: Counter[int] = Counter()
    for tensor in tensors:
        for box, rank in tensor.boxes:
            total[rank] += box.numel * ITEMSIZE[tensor.dtype]
    return total


@dataclass(frozen=True, slots=True)
class Cell:
    """A part of the unit square, and the rank that supplied it."""

    x: float
    y: float
    width: float
    height: float
    rank: int


def cells_of(tensor: Supplied) -> list[Cell]:
    """Divide the unit square among a tensor's boxes, by their sizes; dim 0 runs down.

    A plane shows two dims: the boxes of a tensor that is cut along more, or into too many, are summed by rank.
    """
    boxes = [(box, rank) for box, rank in tensor.boxes if box.numel]
    dims = [dim for dim, size in enumerate(tensor.shape) if any(box.shape[dim] != size for box, _ in boxes)]
    if len(dims) > 2 or len(boxes) > MAX_CELLS:
        return shares(nbytes_by_rank([tensor]), tensor.nbytes)
    cells = []
    for box, rank in boxes:
        x, y, width, height = 0.0, 0.0, 1.0, 1.0
        for dim in dims:
            begin, extent = box.offsets[dim] / tensor.shape[dim], box.shape[dim] / tensor.shape[dim]
            # The last dim runs across, and so does the second of two.
            if dim == len(tensor.shape) - 1 or dim != dims[0]:
                x, width = begin, extent
            else:
                y, height = begin, extent
        cells.append(Cell(x, y, width, height, rank))
    return cells


def shares(by_rank: Mapping[int, int], nbytes: int) -> list[Cell]:
    """Return a bar in which each rank has one cell, as wide as its share of the bytes."""
    x = 0.0
    cells = []
    total = max(1, nbytes, sum(by_rank.values()))
    for rank, rank_nbytes in sorted(by_rank.items()):
        cells.append(Cell(x, 0, rank_nbytes / total, 1, rank))
        x += cells[-1].width
    return cells
