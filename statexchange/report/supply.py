"""Find out which rank supplied which bytes of a checkpoint, and draw it as SVG."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from statexchange.errors import NotFoundError
from statexchange.formats import sealed_files
from statexchange.formats.box_digests import PlacedBoxes
from statexchange.formats.source import KINDS_WITH_RANKS, SourceKind
from statexchange.report.svg import BORDER, MARGIN, NOT_THERE, WIDTH, Drawing, palette, text_colour, title_of
from statexchange.report.tensor_facts import tensor_rows
from statexchange.sharding.shards import Box, full_box
from statexchange.tensors import ITEMSIZE, element_shape, group_shape
from statexchange.units import format_bytes, format_number, format_shape, shortened

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from statexchange.formats.source import Source

_MAX_CELLS, _MAX_RANKS = 8000, 16
_LEFT, _FRAME = MARGIN + 300, 360  # of the frames in which tensors are drawn
_MAX_ROWS, _MIN_LINED = 20, 4  # tensors with a row of their own; size of cells with lines between them
_COLUMNS, _COLUMNS_OF_FILES, _MAX_LABEL = 4, 2, 40


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
        if rank in self.files:
            return f"{rank}: {self.files[rank]}"
        return f"{self.supplier} {rank}"

    def select(self, names: Collection[str]) -> Supply:
        """Return the supply of only the tensors that `names` has."""
        tensors = tuple(tensor for tensor in self.tensors if tensor.name in names)
        return replace(self, tensors=tensors, unknown=tuple(filter(names.__contains__, self.unknown)))


def supply_of(source: Source) -> Supply:
    """Return which rank supplied which bytes.

    Not collective. Reads headers only. The rank comes from the manifest of an export or a merge, which has the numbers
    of the merged files if these had no ranks. Otherwise it is the first rank that has the box, or the number of the
    first file that has it.

    Args:
        source: a source, opened without `strict`.
    """
    manifest = source.manifest
    files: dict[int, str] = {}
    unknown: list[str] = []
    if manifest is None or sealed_files.KEY in manifest:  # a seal is added later, when the ranks are not known
        has_ranks = source.has_ranks
        tensors = list(_stored_tensors(source))
        for row in tensor_rows(source):
            if row.holders:
                continue
            shape = None
            if row.shape is not None and row.dtype in ITEMSIZE:
                shape = group_shape(row.dtype, row.shape)
            if shape is None:
                unknown.append(row.name)
            else:
                tensors.append(Supplied(row.name, row.dtype, shape, ()))
        if not has_ranks:
            # Several files may have one `rank`, as those of the parts of a directory such as verl's.
            files = {number: source.path_below(shard_file) for number, shard_file in enumerate(source.files)}
    else:
        tensors = list(_published_tensors(source, manifest))
        # "export", or the format that was merged, of which only some have ranks
        merged = manifest.get("source")
        has_ranks = merged in KINDS_WITH_RANKS or merged not in get_args(SourceKind)
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
            # The boxes follow from a placement, and are not listed.
            pieces = placed[name].pieces
            boxes = tuple(zip(pieces.boxes, pieces.writers.tolist(), strict=True))
        elif "boxes" in record:
            boxes = tuple((Box.from_json([offsets, shape]), rank) for offsets, shape, _, rank in record["boxes"])
        yield Supplied(name, record["dtype"], tuple(record["shape"]), boxes)


def _stored_tensors(source: Source) -> Iterator[Supplied]:
    """Yield the tensors of a source, with the first rank (or file) that has each box."""
    # A tensor on which files disagree is drawn once for each dtype and shape.
    first_ranks: dict[tuple[str, str, tuple[int, ...]], dict[Box, int]] = {}
    for number, shard_file in enumerate(source.files):
        supplier = shard_file.rank if source.has_ranks else number
        for tensor in shard_file.tensors.values():
            shard = tensor.shard
            ranks = first_ranks.setdefault((shard.name, shard.dtype, shard.global_shape), {})
            for box in shard.boxes:
                ranks.setdefault(box, supplier)
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
    Of shape (4, 2), box [0:1, 0:2] of rank 3 is ``Cell(x=0.0, y=0.0, width=1.0, height=0.25, rank=3)``.
    """
    boxes = [(box, rank) for box, rank in tensor.boxes if box.numel]
    # The dims along which the tensor is cut
    dims = []
    for dim, size in enumerate(tensor.shape):
        if any(box.shape[dim] != size for box, _ in boxes):
            dims.append(dim)
    if len(dims) > 2 or len(boxes) > _MAX_CELLS:
        return _shares(nbytes_by_rank([tensor]), tensor.nbytes)
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


def _shares(by_rank: Mapping[int, int], nbytes: int) -> list[Cell]:
    """Return a bar in which each rank has one cell, as wide as its share of the bytes."""
    x = 0.0
    cells = []
    # Boxes may overlap, which is a finding of `verify`, or all be empty.
    total = max(1, nbytes, sum(by_rank.values()))
    for rank, rank_nbytes in sorted(by_rank.items()):
        cells.append(Cell(x, 0, rank_nbytes / total, 1, rank))
        x += cells[-1].width
    return cells


# --- Picture ---


def supply_picture(supply: Supply) -> str:
    """Return an SVG of which rank supplied which bytes: a row per tensor, its boxes to scale, coloured by rank.

    Not collective. The largest tensors have rows; the others are summed in one. Regions that no rank supplied are
    hatched.

    Raises:
        NotFoundError: there is no tensor whose size is known.

    Example:
        >>> import numpy
        >>> from safetensors.numpy import save_file
        >>> from statexchange.formats.registry import open_source
        >>> save_file({"w": numpy.zeros((2, 3), "float32")}, "model.safetensors")
        >>> with open_source("model.safetensors", strict=False) as source:
        ...     supply_picture(supply_of(source))[:4]
        '<svg'
    """
    if not supply.tensors:
        raise NotFoundError("there is no tensor to draw", path=supply.path)
    tensors = format_number(len(supply.tensors), "tensor")
    subtitle = f"{format_bytes(supply.nbytes)} in {tensors}"
    if supply.unknown:
        subtitle += f"; {len(supply.unknown):,} more are missing, size unknown"
    subtitle += ". All rows are equally wide; the parts of each are to scale."
    title = f"Which {supply.supplier} supplied which bytes of {shortened(title_of(supply.path), 50)}"
    return _Picture(supply, Drawing(title, subtitle)).document()


class _Picture:
    """A picture, from top to bottom."""

    def __init__(self, supply: Supply, drawing: Drawing) -> None:
        self._supply = supply
        self._total = nbytes_by_rank(supply.tensors)
        self._colours = dict(zip(sorted(self._total), palette(len(self._total)), strict=True))
        self._drawing = drawing

    def document(self) -> str:
        """Return the document with a row for each of the largest tensors."""
        tensors = self._supply.tensors
        self._legend()
        num_rows, num_cells = 0, 0
        for tensor in tensors[:_MAX_ROWS]:
            cells = cells_of(tensor)
            # The bound of the picture's size holds over all rows, but for the first one.
            num_cells += len(cells)
            if num_cells > _MAX_CELLS and num_rows:
                break
            num_rows += 1
            height = 12
            if len(tensor.shape) > 1:
                # A row of a matrix is as high as its bands of dim 0 need. Equal fractions may differ in the last bits.
                bands = len({round(cell.y, 9) for cell in cells})
                height = min(max(22, 12 * bands), 48)
            shape = format_shape(element_shape(tensor.dtype, tensor.shape))
            self._row(tensor.name, cells, tensor.nbytes, height, f"{tensor.dtype} {shape}")
        rest = tensors[num_rows:]
        if rest:
            nbytes = sum(tensor.nbytes for tensor in rest)
            name = f"and {len(rest):,} more, summed by {self._supply.supplier}"
            self._row(name, _shares(nbytes_by_rank(rest), nbytes), nbytes)
        return self._drawing.document(f"{len(tensors)} tensors, {self._supply.nbytes} bytes.")

    def _legend(self) -> None:
        """Write a swatch for each of the first ranks, one for all others, and one for what is missing."""
        ranks = sorted(self._total)
        entries = []
        for rank in ranks[:_MAX_RANKS]:
            entries.append((self._colours[rank], self._entry(self._supply.label(rank), self._total[rank])))
        if len(ranks) > _MAX_RANKS:
            nbytes = sum(self._total[rank] for rank in ranks[_MAX_RANKS:])
            entries.append((self._colours[ranks[-1]], self._entry(f"{len(ranks) - _MAX_RANKS:,} more", nbytes)))
        missing = self._supply.nbytes - self._total.total()
        if missing > 0:
            entries.append((NOT_THERE, self._entry("not supplied", missing)))
        columns = _COLUMNS
        if self._supply.files:  # whose names are long
            columns = _COLUMNS_OF_FILES
        self._drawing.legend(entries, columns)

    def _entry(self, label: str, nbytes: int) -> str:
        share = nbytes / max(1, self._supply.nbytes)
        return f"{shortened(label, _MAX_LABEL)} · {format_bytes(nbytes)} · {share:.1%}"

    def _row(self, name: str, cells: Sequence[Cell], nbytes: int, height: int = 12, description: str = "") -> None:
        """Draw the row of a tensor, or of several."""
        drawing = self._drawing
        middle = drawing.y + max(height, 22) / 2
        self._frame(cells, middle - height / 2, height, name)
        drawing.text(MARGIN, middle + 4, shortened(name, 43), "n")
        if description:
            drawing.text(_LEFT + _FRAME + 14, middle + 4, shortened(description, 20), "n g")
        drawing.text(WIDTH - MARGIN, middle + 4, format_bytes(nbytes), "e")
        drawing.y += max(height, 22) + 6

    def _frame(self, cells: Sequence[Cell], top: float, height: float, tooltip: str) -> None:
        """Draw the cells of a tensor in its row; parts without a cell are hatched."""
        drawing = self._drawing
        covered, least = 0.0, math.inf
        for cell in cells:
            covered += cell.width * cell.height
            least = min(least, cell.width * _FRAME, cell.height * height)
        # White lines between cells that are as narrow as a line would hide them.
        has_lines = cells and least >= _MIN_LINED
        drawing.begin_group('class="c l"' if has_lines else 'class="c"', tooltip)
        # The sum of fractions is rounded.
        fill = "none" if covered > 1 - 1e-9 else NOT_THERE
        drawing.rectangle(_LEFT, top, _FRAME, height, f'fill="{fill}"')
        for cell in cells:
            x, y = _LEFT + cell.x * _FRAME, top + cell.y * height
            drawing.rectangle(x, y, cell.width * _FRAME, cell.height * height, f'fill="{self._colours[cell.rank]}"')
        drawing.end_group()
        drawing.rectangle(_LEFT, top, _FRAME, height, f'fill="none" {BORDER}')
        # Each rank's number lies in its largest cell with space for it, for readers who cannot tell colours.
        largest: dict[int, Cell] = {}
        for cell in sorted(cells, key=lambda cell: cell.width * cell.height):
            if cell.height * height >= 9.5 and cell.width * _FRAME >= 8 * len(str(cell.rank)):
                largest[cell.rank] = cell
        for rank, cell in sorted(largest.items()):
            x = _LEFT + (cell.x + cell.width / 2) * _FRAME
            y = top + (cell.y + cell.height / 2) * height + 3.5
            drawing.text(x, y, str(rank), "r", colour=text_colour(self._colours[rank]))
