"""Draw which rank supplied which bytes of a checkpoint, as SVG and as text; and a curve as text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from html import escape
from itertools import islice, pairwise, repeat
from typing import TYPE_CHECKING, Any

from statexchange.errors import NotFoundError
from statexchange.formats.registry import open_source
from statexchange.formats.source import Source
from statexchange.sharding.shards import Box, full_box
from statexchange.tensors import ITEMSIZE
from statexchange.units import format_bytes

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence

__all__ = [
    "Supplied",
    "curve",
    "shape_text",
    "supplied_tensors",
    "supply_bars",
    "supply_picture",
]

_MAX_ROWS, _MAX_CELLS, _MAX_RANKS = 20, 8000, 16
_NOT_SUPPLIED = "not supplied"  # the label of bytes that are in no file
_MAX_STEPS = 1 << 18  # to divide one tensor; each box costs a step per interval of a dim that it reaches
# Okabe and Ito's colours, distinct for every kind of colour vision; for more ranks cividis, dark to light.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#7f7f7f")
_RAMP = ((0, 34, 78), (53, 69, 108), (102, 105, 112), (148, 142, 119), (200, 184, 102), (254, 232, 56))


@dataclass(frozen=True, slots=True)
class Supplied:
    """A tensor with (box, rank) of each box. If the rank is not known, it is the number of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[Box, int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return full_box(self.shape).numel * ITEMSIZE[self.dtype]

    def nbytes_by_rank(self) -> Counter[int]:
        """Return the bytes that each rank supplied."""
        nbytes: Counter[int] = Counter()
        for box, rank in self.boxes:
            nbytes[rank] += box.numel * ITEMSIZE[self.dtype]
        return nbytes


def supplied_tensors(source: Source | str | os.PathLike[str]) -> list[Supplied]:
    """Return the tensors with the ranks that supplied their boxes, largest tensor first.

    Not collective. Reads headers only. The rank comes from the manifest of a published directory; in a workspace it is
    the first rank that has the box; otherwise it is the number of the file.
    """
    opened = _open(source)
    if opened.refusal is not None:
        raise opened.refusal
    tensors = _stored_tensors(opened) if opened.manifest is None else _published_tensors(opened.manifest)
    return sorted(tensors, key=lambda tensor: (-tensor.nbytes, tensor.name))


def _open(source: Source | str | os.PathLike[str]) -> Source:
    return source if isinstance(source, Source) else open_source(source, strict=False)


def _published_tensors(manifest: Mapping[str, Any]) -> Iterator[Supplied]:
    """Yield the tensors of a manifest, with the ranks in it."""
    for name, record in manifest["tensors"].items():
        boxes = tuple((Box.from_json([offsets, shape]), rank) for offsets, shape, _, rank in record["boxes"])
        yield Supplied(name, record["dtype"], tuple(record["shape"]), boxes)


def _stored_tensors(source: Source) -> Iterator[Supplied]:
    """Yield the tensors of a source, with the first rank (or file) that has each box."""
    first_ranks: dict[tuple[str, str, tuple[int, ...]], dict[Box, int]] = {}
    for shard_file, tensor in source.shards():
        shard = tensor.shard
        ranks = first_ranks.setdefault((shard.name, shard.dtype, shard.global_shape), {})
        for box in shard.boxes:
            ranks.setdefault(box, shard_file.rank)
    for (name, dtype, shape), ranks in first_ranks.items():
        yield Supplied(name, dtype, shape, tuple(ranks.items()))


def _total(tensors: Sequence[Supplied]) -> Counter[int]:
    """Return the bytes that each rank supplied of all tensors."""
    total: Counter[int] = Counter()
    for tensor in tensors:
        total.update(tensor.nbytes_by_rank())
    return total


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape as ``[256,64]``; ``[]`` for a tensor without dims."""
    return f"[{','.join(map(str, shape))}]"


def _shortened(text: str, width: int) -> str:
    """Return `text` with its middle left out if it is too wide; the ends of a tensor's name are the most specific."""
    shown = "".join(char if char.isprintable() else "?" for char in text)
    if len(shown) <= width:
        return shown
    head = (width - 3) // 2
    return f"{shown[:head]}...{shown[len(shown) - (width - 3 - head) :]}"


@dataclass(frozen=True, slots=True)
class _Cell:
    """A part of the unit square, and the rank that supplied it."""

    x: float
    y: float
    width: float
    height: float
    rank: int


def _cells(tensor: Supplied) -> list[_Cell]:
    """Divide the unit square among a tensor's boxes, by their sizes; dim 0 runs down.

    If there are too many cells, they are summed by rank.
    """
    ndim = len(tensor.shape)
    boxes = [(box, rank) for box, rank in tensor.boxes if box.numel]
    cut_dims = [dim for dim in range(ndim) if any(box.shape[dim] != tensor.shape[dim] for box, _ in boxes)]
    dims = [(dim, dim == ndim - 1 or position % 2 == 1) for position, dim in enumerate(cut_dims)]
    if len(boxes) * (len(cut_dims) + 1) <= _MAX_STEPS:
        division = _Division(tensor.shape).cells(boxes, dims, _Cell(0, 0, 1, 1, 0))
        cells = list(islice(division, _MAX_CELLS + 1))
        if len(cells) <= _MAX_CELLS:
            return cells
    return _shares(tensor.nbytes_by_rank(), tensor.nbytes)


def _shares(by_rank: Mapping[int, int], nbytes: int) -> list[_Cell]:
    """Return a bar in which each rank has one cell, as wide as its share of the bytes."""
    x = 0.0
    cells = []
    total = max(1, nbytes, sum(by_rank.values()))
    for rank, rank_nbytes in sorted(by_rank.items()):
        cells.append(_Cell(x, 0, rank_nbytes / total, 1, rank))
        x += cells[-1].width
    return cells


class _Division:
    """Divides a square at each edge of a box, in a limited number of steps."""

    def __init__(self, shape: Sequence[int]) -> None:
        self._shape = shape
        self._steps_left = _MAX_STEPS

    def cells(self, boxes: list[tuple[Box, int]], dims: list[tuple[int, bool]], area: _Cell) -> Iterator[_Cell]:
        """Divide `area` dim by dim until one box is left, and yield its cells; regions without a box stay free.

        `dims` are (dim, whether it runs across instead of down). When the steps run out, yield more cells than are
        drawn, so that the caller sums them by rank.
        """
        if not boxes:
            return
        shape = self._shape
        if not dims or (len(boxes) == 1 and all(boxes[0][0].shape[dim] == shape[dim] for dim, _ in dims)):
            yield _Cell(area.x, area.y, area.width, area.height, boxes[0][1])
            return
        (dim, across), *rest = dims
        begins = [box.offsets[dim] for box, _ in boxes]
        ends = [box.ends[dim] for box, _ in boxes]
        edges = sorted({0, shape[dim], *begins, *ends})
        number_of = {edge: number for number, edge in enumerate(edges)}
        inside: list[list[tuple[Box, int]]] = [[] for _ in edges[1:]]
        for box, rank in boxes:
            reached = range(number_of[box.offsets[dim]], number_of[box.ends[dim]])
            self._steps_left -= len(reached)
            if self._steps_left < 0:
                yield from repeat(area, _MAX_CELLS + 1)
                return
            for number in reached:
                inside[number].append((box, rank))
        for (low, high), part in zip(pairwise(edges), inside, strict=True):
            yield from self.cells(part, rest, _slice(area, low / shape[dim], high / shape[dim], across))


def _slice(area: _Cell, low: float, high: float, across: bool) -> _Cell:
    """Return the part of `area` from `low` to `high`, fractions of its width (`across`) or height."""
    if across:
        return _Cell(area.x + low * area.width, area.y, (high - low) * area.width, area.height, area.rank)
    return _Cell(area.x, area.y + low * area.height, area.width, (high - low) * area.height, area.rank)


# --- SVG ---

_WIDTH, _MARGIN, _LABEL, _FRAME = 900, 20, 300, 360
_STYLE = (
    "text{font:12px ui-sans-serif,system-ui,'DejaVu Sans',sans-serif;fill:#222}"
    ".n{font-family:ui-monospace,'DejaVu Sans Mono',monospace;font-size:11px}"
    ".g{fill:#666}.t{font-size:16px;font-weight:600}.c{shape-rendering:crispEdges}"
    ".r{font-size:10px;text-anchor:middle}.e{text-anchor:end}"
)
_BORDER = 'stroke="#888" stroke-width=".5"'
_HATCHING = (
    '<pattern id="not-supplied" width="6" height="6" patternUnits="userSpaceOnUse">'
    '<rect width="6" height="6" fill="#fff"/><path d="M0 6L6 0" stroke="#b00"/></pattern>'
)


def supply_picture(source: Source | str | os.PathLike[str]) -> str:
    """Return an SVG of which rank supplied which bytes: a row per tensor, its boxes to scale, coloured by rank.

    Not collective. Reads headers only. The largest tensors have rows; the others are summed in one. Regions that no
    rank supplied are hatched.

    Raises:
        NotFoundError: there is no checkpoint, or no tensor in it.
    """
    opened = _open(source)
    tensors = supplied_tensors(opened)
    if not tensors:
        raise NotFoundError("there is no tensor to draw", path=opened.path)
    return _Svg(tensors, _supplier_kind(opened)).text()


def _supplier_kind(source: Source) -> str:
    """Return what supplied the bytes, for labels: "file" for plain safetensors files, else "rank"."""
    return "file" if source.kind == "huggingface" and source.manifest is None else "rank"


class _Svg:
    """One SVG picture, from top to bottom."""

    def __init__(self, tensors: Sequence[Supplied], supplier: str) -> None:
        self._supplier = supplier
        self._tensors = tensors
        self._total = _total(tensors)
        self._nbytes = sum(tensor.nbytes for tensor in tensors)
        self._colours = dict(zip(sorted(self._total), _palette(len(self._total)), strict=True))
        self._parts: list[str] = []
        self._y = _MARGIN

    def text(self) -> str:
        """Return the whole document."""
        self._heading()
        self._legend()
        rows = _largest_rows(self._tensors)
        for tensor, cells in rows:
            self._row(tensor, cells)
        self._sum_row(self._tensors[len(rows) :])
        height = self._y + _MARGIN // 2
        return "\n".join([*self._opening(height), *self._parts, "</svg>", ""])

    def _opening(self, height: int) -> list[str]:
        shares = ", ".join(f"{self._supplier} {rank}: {nbytes} bytes" for rank, nbytes in self._top_ranks())
        return [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}"',
            f' height="{height}" role="img" aria-labelledby="title desc">',
            f'<title id="title">{self._title()}</title>',
            f'<desc id="desc">{len(self._tensors)} tensors, {self._nbytes} bytes. {shares}.</desc>',
            f"<style>{_STYLE}</style>",
            f"<defs>{_HATCHING}</defs>",
            f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        ]

    def _title(self) -> str:
        return f"Which {self._supplier} supplied which bytes"

    def _top_ranks(self) -> list[tuple[int, int]]:
        return sorted(self._total.items())[:_MAX_RANKS]

    def _add_text(self, x: float, y: float, text: str, style: str = "") -> None:
        self._parts.append(f'<text x="{x:g}" y="{y:g}" class="{style}">{escape(text)}</text>')

    def _heading(self) -> None:
        self._add_text(_MARGIN, self._y + 14, self._title(), "t")
        text = (
            f"{format_bytes(self._nbytes)} in {len(self._tensors):,} tensors. "
            "All rows are equally wide; the parts of each are to scale."
        )
        self._add_text(_MARGIN, self._y + 34, text, "g")
        self._y += 48

    def _legend(self) -> None:
        entries = [(self._colours[rank], f"{self._supplier} {rank}", nbytes) for rank, nbytes in self._top_ranks()]
        others = sorted(self._total.items())[_MAX_RANKS:]
        if others:
            last = others[-1][0]
            text = f"{len(others)} more, to {self._supplier} {last}"
            entries.append((self._colours[last], text, sum(nbytes for _, nbytes in others)))
        missing = self._nbytes - self._total.total()
        if missing > 0:
            entries.append(("url(#not-supplied)", _NOT_SUPPLIED, missing))
        for number, (colour, label, nbytes) in enumerate(entries):
            x, y = _MARGIN + number % 4 * 216, self._y + number // 4 * 20
            self._rectangle(x, y, 12, 12, f'fill="{colour}" {_BORDER}')
            share = nbytes / max(1, self._nbytes)
            self._add_text(x + 18, y + 10, f"{label} · {format_bytes(nbytes)} · {share:.1%}")
        self._y += (len(entries) + 3) // 4 * 20 + 12

    def _rectangle(self, x: float, y: float, width: float, height: float, style: str) -> None:
        self._parts.append(f'<rect x="{x:.6g}" y="{y:.6g}" width="{width:.5g}" height="{height:.5g}" {style}/>')

    def _row(self, tensor: Supplied, cells: Sequence[_Cell]) -> None:
        bands = len({round(cell.y, 9) for cell in cells})
        height = min(max(22, 12 * bands), 48) if len(tensor.shape) > 1 else 12
        middle = self._y + max(height, 22) / 2
        self._frame(cells, middle - height / 2, height, tensor.name)
        self._add_text(_MARGIN, middle + 4, _shortened(tensor.name, 43), "n")
        description = _shortened(f"{tensor.dtype} {shape_text(tensor.shape)}", 22)
        self._add_text(_MARGIN + _LABEL + _FRAME + 14, middle + 4, description, "n g")
        self._add_text(_WIDTH - _MARGIN, middle + 4, format_bytes(tensor.nbytes), "e")
        self._y += max(height, 22) + 6

    def _frame(self, cells: Sequence[_Cell], top: float, height: float, name: str) -> None:
        """Draw the cells of a row; parts without a cell are hatched."""
        left = _MARGIN + _LABEL
        is_whole = sum(cell.width * cell.height for cell in cells) > 1 - 1e-9
        line = ' stroke="#fff" stroke-width=".7"' if len(cells) <= 64 else ""
        self._parts.append(f'<g class="c"{line}><title>{escape(_shortened(name, 200))}</title>')
        self._rectangle(left, top, _FRAME, height, 'fill="#fff"' if is_whole else 'fill="url(#not-supplied)"')
        for cell in cells:
            x, y = left + cell.x * _FRAME, top + cell.y * height
            fill = f'fill="{self._colours[cell.rank]}"'
            self._rectangle(x, y, cell.width * _FRAME, cell.height * height, fill)
        self._parts.append("</g>")
        self._rectangle(left, top, _FRAME, height, f'fill="none" {_BORDER}')
        self._write_ranks(cells, top, height)

    def _write_ranks(self, cells: Sequence[_Cell], top: float, height: float) -> None:
        """Write each rank's number into its largest cell with space for it, for readers who cannot tell colours."""
        largest: dict[int, _Cell] = {}
        for cell in sorted(cells, key=lambda cell: cell.width * cell.height):
            if cell.height * height >= 9.5 and cell.width * _FRAME >= 8 * len(str(cell.rank)):
                largest[cell.rank] = cell
        for rank, cell in sorted(largest.items()):
            x = _MARGIN + _LABEL + (cell.x + cell.width / 2) * _FRAME
            y = top + (cell.y + cell.height / 2) * height + 3.5
            colour = _text_colour(self._colours[rank])
            self._parts.append(f'<text x="{x:.5g}" y="{y:.5g}" class="r" style="fill:{colour}">{rank}</text>')

    def _sum_row(self, tensors: Sequence[Supplied]) -> None:
        """Draw one row for all tensors that have no row of their own."""
        if not tensors:
            return
        nbytes = sum(tensor.nbytes for tensor in tensors)
        self._add_text(_MARGIN, self._y + 15, f"and {len(tensors):,} more, summed by {self._supplier}", "g")
        self._frame(_shares(_total(tensors), nbytes), self._y + 5, 12, "the rest")
        self._add_text(_WIDTH - _MARGIN, self._y + 15, format_bytes(nbytes), "e")
        self._y += 28


def _largest_rows(tensors: Sequence[Supplied]) -> list[tuple[Supplied, list[_Cell]]]:
    """Return as many of the largest tensors as the picture has space for, with their cells."""
    rows: list[tuple[Supplied, list[_Cell]]] = []
    cells_left = _MAX_CELLS
    for tensor in tensors[:_MAX_ROWS]:
        cells = _cells(tensor)
        cells_left -= len(cells)
        if cells_left < 0 and rows:
            break
        rows.append((tensor, cells))
    return rows


def _palette(count: int) -> list[str]:
    if count <= len(_COLOURS):
        return list(_COLOURS[:count])
    return [_ramp_colour(number / (count - 1)) for number in range(count)]


def _ramp_colour(position: float) -> str:
    """Return the colour at a position from 0 to 1 of the ramp, interpolated between its colours."""
    index = position * (len(_RAMP) - 1)
    low = min(int(index), len(_RAMP) - 2)
    fraction = index - low
    channels = []
    for begin, end in zip(_RAMP[low], _RAMP[low + 1], strict=True):
        channels.append(round(begin + (end - begin) * fraction))
    return "#" + "".join(f"{value:02x}" for value in channels)


def _text_colour(colour: str) -> str:
    """Return black or white, whichever has more contrast with `colour`."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#fff"


# --- Text ---

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LEVELS = " ▁▂▃▄▅▆▇█"
_MAPS, _MAP_ROWS = 3, 6


def supply_bars(source: Source | str | os.PathLike[str], *, width: int = 100, ascii_only: bool = False) -> list[str]:
    """Return lines of text that show which rank supplied which bytes: a bar per rank, maps of the largest tensors.

    Not collective. Reads headers only. In a map each character is the rank, in base 36, that supplied that part of the
    tensor, or ``.`` for none; dim 0 runs down. `width` is the length of the longest line, 60 to 100.
    """
    opened = _open(source)
    tensors = supplied_tensors(opened)
    lines = _rank_bars(tensors, _supplier_kind(opened), min(width, 100), ascii_only)
    mapped = [tensor for tensor in tensors if len(tensor.shape) > 1 and tensor.nbytes][:_MAPS]
    if mapped:
        lines += ["", *_maps(mapped, (min(width, 100) - 2 * (_MAPS - 1)) // _MAPS)]
    return lines


def _rank_bars(tensors: Sequence[Supplied], supplier: str, width: int, ascii_only: bool) -> list[str]:
    total = sorted(_total(tensors).items())
    nbytes = sum(tensor.nbytes for tensor in tensors)
    rows = [(f"{supplier} {rank}", rank_nbytes) for rank, rank_nbytes in total[:_MAX_RANKS]]
    if len(total) > _MAX_RANKS:
        rows.append((f"{len(total) - _MAX_RANKS} more", sum(rank_nbytes for _, rank_nbytes in total[_MAX_RANKS:])))
    missing = nbytes - sum(rank_nbytes for _, rank_nbytes in total)
    if missing > 0:
        rows.append((_NOT_SUPPLIED, missing))
    label_width = max((len(text) for text, _ in rows), default=0)
    bar_width = max(10, min(width - label_width - 24, 48))
    longest = max((row_nbytes for _, row_nbytes in rows), default=1) or 1
    lines = []
    for text, row_nbytes in rows:
        bar = _bar(row_nbytes / longest, bar_width, ascii_only)
        share = row_nbytes / max(1, nbytes)
        lines.append(f"{text:<{label_width}}  {bar}  {format_bytes(row_nbytes):>8}  {share:>6.1%}")
    return lines


def _bar(share: float, width: int, ascii_only: bool) -> str:
    if ascii_only:
        return ("#" * round(share * width)).ljust(width)
    whole, eighths = divmod(round(share * width * 8), 8)
    return ("█" * whole + _EIGHTHS[eighths].strip()).ljust(width)


def _maps(tensors: Sequence[Supplied], width: int) -> list[str]:
    """Return maps side by side, each below its tensor's name and shape."""
    blocks = []
    for tensor in tensors:
        description = _shortened(f"{tensor.dtype} {shape_text(tensor.shape)}", width)
        blocks.append([_shortened(tensor.name, width), description, *_map(tensor, width, _MAP_ROWS)])
    return ["  ".join(f"{line:<{width}}" for line in lines).rstrip() for lines in zip(*blocks, strict=True)]


def _map(tensor: Supplied, width: int, height: int) -> list[str]:
    """Return a grid of characters; each is the rank that supplied the point in its middle."""
    grid = [["."] * width for _ in range(height)]
    for cell in _cells(tensor):
        digit = _DIGITS[cell.rank] if cell.rank < len(_DIGITS) else "#"
        for row in _middles(cell.y, cell.height, height):
            for column in _middles(cell.x, cell.width, width):
                grid[row][column] = digit
    return ["".join(row) for row in grid]


def _middles(begin: float, extent: float, count: int) -> range:
    """Return which of `count` equal cells of the unit line have their middles in `extent` from `begin` on."""
    first, last = (max(0, -int(-(edge * count - 0.5) // 1)) for edge in (begin, begin + extent))
    return range(first, min(last, count))


def curve(
    values: Sequence[float],
    *,
    width: int = 60,
    height: int = 6,
    limits: tuple[float, float] | None = None,
    indent: int = 0,
    ascii_only: bool = False,
) -> list[str]:
    """Return a curve of `values` as lines of text, labelled with the highest and the lowest value.

    With more values than columns, each column shows a mean. `limits` are the values at the bottom and the top, by
    default the lowest and the highest; `indent` is the number of empty columns before the curve.
    """
    columns = [_mean(part) for part in _parts(values, min(width, len(values)))]
    low, high = (min(columns), max(columns)) if limits is None else limits
    levels = 1 if ascii_only else 8
    heights = [1 + round((value - low) / ((high - low) or 1) * (height * levels - 1)) for value in columns]
    rows = []
    for row in reversed(range(height)):
        row_levels = [min(max(column_height - row * levels, 0), levels) for column_height in heights]
        label = ""
        if row == height - 1:
            label = f"{high:.2f}"
        elif row == 0:
            label = f"{low:.2f}"
        characters = " #" if ascii_only else _LEVELS
        rows.append(f"{label:>6} |" + " " * indent + "".join(characters[level] for level in row_levels))
    return [row.rstrip() for row in rows]


def _parts(values: Sequence[float], count: int) -> Iterator[Sequence[float]]:
    """Divide a sequence into parts of nearly equal length."""
    for number in range(count):
        yield values[number * len(values) // count : (number + 1) * len(values) // count]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
