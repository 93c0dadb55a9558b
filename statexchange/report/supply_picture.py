"""Draw which rank supplied which bytes of a checkpoint, or of some of its tensors, as SVG."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statexchange.errors import NotFoundError
from statexchange.report.supply import (
    MAX_CELLS,
    MAX_RANKS,
    Cell,
    Supplied,
    Supply,
    cells_of,
    nbytes_by_rank,
    shares,
)
from statexchange.report.svg import BORDER, MARGIN, NOT_THERE, WIDTH, Drawing, palette, text_colour, title_of
from statexchange.tensors import element_shape
from statexchange.units import format_bytes, format_number, format_shape, shortened

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["supply_picture"]

_LEFT, _FRAME = MARGIN + 300, 360  # of the frames in which tensors are drawn
_MAX_ROWS, _MIN_LINED = 20, 4  # tensors with a row of their own; size of cells with lines between them
_COLUMNS, _COLUMNS_OF_FILES, _MAX_LABEL = 4, 2, 40


def supply_picture(supply: Supply) -> str:
    """Return an SVG of which rank supplied which bytes: a row per tensor, its boxes to scale, coloured by rank.

    Not collective. The largest tensors have rows; the others are summed in one. Regions that no rank supplied are
    hatched.

    Raises:
        NotFoundError: there is no tensor whose size is known.

    Example:
        >>> import numpy
        >>> from safetensors.numpy import save_file
        >>> from statexchange.report.supply import supply_of
        >>> save_file({"w": numpy.zeros((2, 3), "float32")}, "model.safetensors")
        >>> supply_picture(supply_of("model.safetensors"))[:4]
        '<svg'
    """
    if not supply.tensors:
        raise NotFoundError("there is no tensor to draw", path=supply.path)
    tensors = format_number(len(supply.tensors), "tensor")
    unknown = f"; {len(supply.unknown):,} more are missing, size unknown" if supply.unknown else ""
    subtitle = (
        f"{format_bytes(supply.nbytes)} in {tensors}{unknown}. "
        "All rows are equally wide; the parts of each are to scale."
    )
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
        rows = _largest_rows(tensors)
        for tensor, cells in rows:
            self._row(tensor, cells)
        self._sum_row(tensors[len(rows) :])
        supplied = []
        for rank in sorted(self._total)[:MAX_RANKS]:
            supplied.append(shortened(f"{self._supply.label(rank)}: {self._total[rank]} bytes", 100))
        totals = f"{len(tensors)} tensors, {self._supply.nbytes} bytes."
        return self._drawing.document(f"{totals} {', '.join(supplied)}.")

    def _legend(self) -> None:
        """Write a swatch for each of the first ranks, one for all others, and one for what is missing."""
        ranks = sorted(self._total)
        entries = []
        for rank in ranks[:MAX_RANKS]:
            entries.append((self._colours[rank], self._entry(self._supply.label(rank), self._total[rank])))
        if len(ranks) > MAX_RANKS:
            nbytes = sum(self._total[rank] for rank in ranks[MAX_RANKS:])
            entries.append((self._colours[ranks[-1]], self._entry(f"{len(ranks) - MAX_RANKS:,} more", nbytes)))
        missing = self._supply.nbytes - self._total.total()
        if missing > 0:
            entries.append((NOT_THERE, self._entry("not supplied", missing)))
        self._drawing.legend(entries, _COLUMNS_OF_FILES if self._supply.files else _COLUMNS)

    def _entry(self, label: str, nbytes: int) -> str:
        share = nbytes / max(1, self._supply.nbytes)
        return f"{shortened(label, _MAX_LABEL)} · {format_bytes(nbytes)} · {share:.1%}"

    def _row(self, tensor: Supplied, cells: Sequence[Cell]) -> None:
        drawing = self._drawing
        bands = len({round(cell.y, 9) for cell in cells})
        height = min(max(22, 12 * bands), 48) if len(tensor.shape) > 1 else 12
        middle = drawing.y + max(height, 22) / 2
        self._frame(cells, middle - height / 2, height, tensor.name)
        drawing.text(MARGIN, middle + 4, shortened(tensor.name, 43), "n")
        shape = format_shape(element_shape(tensor.dtype, tensor.shape))
        description = shortened(f"{tensor.dtype} {shape}", 20)
        drawing.text(_LEFT + _FRAME + 14, middle + 4, description, "n g")
        drawing.text(WIDTH - MARGIN, middle + 4, format_bytes(tensor.nbytes), "e")
        drawing.y += max(height, 22) + 6

    def _frame(self, cells: Sequence[Cell], top: float, height: float, tooltip: str) -> None:
        """Draw the cells of a tensor in its row; parts without a cell are hatched."""
        drawing = self._drawing
        is_whole = sum(cell.width * cell.height for cell in cells) > 1 - 1e-9
        sides = (min(cell.width * _FRAME, cell.height * height) for cell in cells)
        drawing.begin_group('class="c l"' if min(sides, default=0) >= _MIN_LINED else 'class="c"', tooltip)
        drawing.rectangle(_LEFT, top, _FRAME, height, f'fill="{"none" if is_whole else NOT_THERE}"')
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

    def _sum_row(self, tensors: Sequence[Supplied]) -> None:
        """Draw one row for all tensors that have no row of their own."""
        if not tensors:
            return
        drawing = self._drawing
        nbytes = sum(tensor.nbytes for tensor in tensors)
        drawing.text(MARGIN, drawing.y + 15, f"and {len(tensors):,} more, summed by {self._supply.supplier}", "g")
        self._frame(shares(nbytes_by_rank(tensors), nbytes), drawing.y + 5, 12, "the rest")
        drawing.text(WIDTH - MARGIN, drawing.y + 15, format_bytes(nbytes), "e")
        drawing.y += 28


def _largest_rows(tensors: Sequence[Supplied]) -> list[tuple[Supplied, list[Cell]]]:
    """Return as many of the largest tensors as the picture has space for, with their cells."""
    rows: list[tuple[Supplied, list[Cell]]] = []
    cells_left = MAX_CELLS
    for tensor in tensors[:_MAX_ROWS]:
        cells = cells_of(tensor)
        cells_left -= len(cells)
        if cells_left < 0 and rows:
            break
        rows.append((tensor, cells))
    return rows
