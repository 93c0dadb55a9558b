"""Draw which rank supplied which bytes of a checkpoint, or of one of its tensors, as SVG."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from statexchange.errors import NotFoundError
from statexchange.report.supply import (
    MAX_CELLS,
    MAX_RANKS,
    Cell,
    Supplied,
    Supply,
    cells_of,
    cut_dims,
    nbytes_by_rank,
    shares,
)
from statexchange.report.svg import BORDER, MARGIN, NOT_THERE, WIDTH, Drawing, palette, text_colour, title_of
from statexchange.tensors import ITEMSIZE, element_shape
from statexchange.units import format_bytes, format_number, format_shape, shortened

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["supply_picture", "tensor_picture"]

_LABEL, _FRAME = 300, 360
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
    return _Picture(supply, title, subtitle).of_all()


def tensor_picture(supply: Supply, name: str) -> str:
    """Return an SVG of one tensor: its regions to scale, coloured by the rank that supplied them, and a list of them.

    Not collective. Regions that no rank supplied are hatched.

    Raises:
        NotFoundError: there is no tensor of this name whose size is known.
    """
    selected = supply.select({name})
    if not selected.tensors:
        raise NotFoundError("there is no such tensor to draw", name=name, path=supply.path)
    tensor = selected.tensors[0]
    dims = ", ".join(f"dim {dim} runs {'across' if across else 'down'}" for dim, across in cut_dims(tensor))
    regions = format_number(len(tensor.boxes), "region")
    facts = [
        f"{tensor.dtype} {shortened(_shape(tensor), 40)}",
        format_bytes(tensor.nbytes),
        regions,
        *filter(None, [dims]),
    ]
    title = f"Which {supply.supplier} supplied which bytes of {shortened(name, 50)}"
    return _Picture(selected, title, " · ".join(facts)).of_tensor(tensor)


class _Frame(NamedTuple):
    x: float
    y: float
    width: float
    height: float


def _in_row(y: float, height: float) -> _Frame:
    return _Frame(MARGIN + _LABEL, y, _FRAME, height)


class _Picture:
    """A picture, from top to bottom."""

    def __init__(self, supply: Supply, title: str, subtitle: str) -> None:
        self._supply = supply
        self._total = nbytes_by_rank(supply.tensors)
        self._colours = dict(zip(sorted(self._total), palette(len(self._total)), strict=True))
        self._drawing = Drawing(title, subtitle)

    def of_all(self) -> str:
        """Return the document with a row for each of the largest tensors."""
        tensors = self._supply.tensors
        self._legend()
        rows = _largest_rows(tensors)
        for tensor, cells in rows:
            self._row(tensor, cells)
        self._sum_row(tensors[len(rows) :])
        return self._document(f"{len(tensors)} tensors, {self._supply.nbytes} bytes.")

    def of_tensor(self, tensor: Supplied) -> str:
        """Return the document with the regions of one tensor."""
        drawing = self._drawing
        listed = sorted(tensor.boxes, key=lambda region: (region[1], region[0].offsets))
        if len(listed) > _MAX_ROWS:
            self._legend()
        height = 280 if len(tensor.shape) > 1 else 60
        self._frame(cells_of(tensor), _Frame(MARGIN, drawing.y, WIDTH - 2 * MARGIN, height), tensor.name)
        drawing.y += height + 12
        for box, rank in listed[:_MAX_ROWS]:
            drawing.rectangle(MARGIN, drawing.y, 12, 12, f'fill="{self._colours[rank]}" {BORDER}')
            drawing.text(MARGIN + 18, drawing.y + 10, shortened(self._supply.label(rank), _MAX_LABEL))
            drawing.text(MARGIN + _LABEL, drawing.y + 10, shortened(str(box), 60), "n")
            nbytes = box.numel * ITEMSIZE[tensor.dtype]
            drawing.text(WIDTH - MARGIN, drawing.y + 10, format_bytes(nbytes), "e")
            drawing.y += 20
        if len(listed) > _MAX_ROWS:
            drawing.text(MARGIN + 18, drawing.y + 10, f"and {len(listed) - _MAX_ROWS:,} more", "g")
            drawing.y += 20
        elif self._missing():
            drawing.legend(self._missing(), _COLUMNS)
        return self._document(f"{len(listed)} regions, {tensor.nbytes} bytes.")

    def _document(self, totals: str) -> str:
        supplied = [
            f"{self._supply.label(rank)}: {self._total[rank]} bytes" for rank in sorted(self._total)[:MAX_RANKS]
        ]
        listed = ", ".join(shortened(text, 100) for text in supplied)
        return self._drawing.document(f"{totals} {listed}.")

    def _legend(self) -> None:
        """Write a swatch for each of the first ranks, one for all others, and one for what is missing."""
        ranks = sorted(self._total)
        entries = []
        for rank in ranks[:MAX_RANKS]:
            entries.append((self._colours[rank], self._entry(self._supply.label(rank), self._total[rank])))
        if len(ranks) > MAX_RANKS:
            nbytes = sum(self._total[rank] for rank in ranks[MAX_RANKS:])
            entries.append((self._colours[ranks[-1]], self._entry(f"{len(ranks) - MAX_RANKS:,} more", nbytes)))
        self._drawing.legend(entries + self._missing(), _COLUMNS_OF_FILES if self._supply.files else _COLUMNS)

    def _missing(self) -> list[tuple[str, str]]:
        missing = self._supply.nbytes - self._total.total()
        return [(NOT_THERE, self._entry("not supplied", missing))] if missing > 0 else []

    def _entry(self, label: str, nbytes: int) -> str:
        share = nbytes / max(1, self._supply.nbytes)
        return f"{shortened(label, _MAX_LABEL)} · {format_bytes(nbytes)} · {share:.1%}"

    def _row(self, tensor: Supplied, cells: Sequence[Cell]) -> None:
        drawing = self._drawing
        bands = len({round(cell.y, 9) for cell in cells})
        height = min(max(22, 12 * bands), 48) if len(tensor.shape) > 1 else 12
        middle = drawing.y + max(height, 22) / 2
        self._frame(cells, _in_row(middle - height / 2, height), tensor.name)
        drawing.text(MARGIN, middle + 4, shortened(tensor.name, 43), "n")
        description = shortened(f"{tensor.dtype} {_shape(tensor)}", 20)
        drawing.text(MARGIN + _LABEL + _FRAME + 14, middle + 4, description, "n g")
        drawing.text(WIDTH - MARGIN, middle + 4, format_bytes(tensor.nbytes), "e")
        drawing.y += max(height, 22) + 6

    def _frame(self, cells: Sequence[Cell], frame: _Frame, tooltip: str) -> None:
        """Draw the cells of a tensor; parts without a cell are hatched."""
        drawing = self._drawing
        is_whole = sum(cell.width * cell.height for cell in cells) > 1 - 1e-9
        sides = (min(cell.width * frame.width, cell.height * frame.height) for cell in cells)
        drawing.begin_group('class="c l"' if min(sides, default=0) >= _MIN_LINED else 'class="c"', tooltip)
        drawing.rectangle(*frame, f'fill="{"none" if is_whole else NOT_THERE}"')
        for cell in cells:
            x, y = frame.x + cell.x * frame.width, frame.y + cell.y * frame.height
            fill = f'fill="{self._colours[cell.rank]}"'
            drawing.rectangle(x, y, cell.width * frame.width, cell.height * frame.height, fill)
        drawing.end_group()
        drawing.rectangle(*frame, f'fill="none" {BORDER}')
        self._write_ranks(cells, frame)

    def _write_ranks(self, cells: Sequence[Cell], frame: _Frame) -> None:
        """Write each rank's number into its largest cell with space for it, for readers who cannot tell colours."""
        largest: dict[int, Cell] = {}
        for cell in sorted(cells, key=lambda cell: cell.width * cell.height):
            if cell.height * frame.height >= 9.5 and cell.width * frame.width >= 8 * len(str(cell.rank)):
                largest[cell.rank] = cell
        for rank, cell in sorted(largest.items()):
            x = frame.x + (cell.x + cell.width / 2) * frame.width
            y = frame.y + (cell.y + cell.height / 2) * frame.height + 3.5
            self._drawing.text(x, y, str(rank), "r", colour=text_colour(self._colours[rank]))

    def _sum_row(self, tensors: Sequence[Supplied]) -> None:
        """Draw one row for all tensors that have no row of their own."""
        if not tensors:
            return
        drawing = self._drawing
        nbytes = sum(tensor.nbytes for tensor in tensors)
        drawing.text(MARGIN, drawing.y + 15, f"and {len(tensors):,} more, summed by {self._supply.supplier}", "g")
        self._frame(shares(nbytes_by_rank(tensors), nbytes), _in_row(drawing.y + 5, 12), "the rest")
        drawing.text(WIDTH - MARGIN, drawing.y + 15, format_bytes(nbytes), "e")
        drawing.y += 28


def _shape(tensor: Supplied) -> str:
    return format_shape(element_shape(tensor.dtype, tensor.shape))


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
