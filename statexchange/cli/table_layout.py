"""Lay out a table as aligned lines, and fit it to a narrow terminal."""

from __future__ import annotations

from collections.abc import Sequence

from statexchange.units import shortened

__all__ = ["aligned", "narrowed"]

_GAP = "  "
_LEAST = 32  # characters that stay of a text, before columns are left out


def aligned(cells: Sequence[Sequence[str]], right: Sequence[str]) -> list[str]:
    """Return the lines of a table whose first row is the header; columns named in `right` are right-aligned."""
    widths = _widths(cells)
    lines = []
    for row in cells:
        texts = []
        for name, cell, width in zip(cells[0], row, widths, strict=True):
            texts.append(cell.rjust(width) if name in right else cell.ljust(width))
        lines.append(_GAP.join(texts).rstrip())
    return lines


def narrowed(cells: Sequence[Sequence[str]], width: int, drop: Sequence[str]) -> Sequence[Sequence[str]]:
    """Return the cells of a table, whose first row is the header, so that its lines have at most `width` characters.

    The columns in `drop` are left out, one by one, until the others would fit with 32 characters of each text. Then the
    widest texts lose their middle, down to these 32. A table that cannot fit is made as narrow as it can be. The last
    column, which may be a sentence, is never shortened: 32 characters are kept free for it, and the terminal wraps the
    rest. The middle of a verdict is what a reader needs: "REFUSED ... path)" says nothing.
    """
    for name in drop:
        least = [min(column, _LEAST) for column in _widths(cells)]
        if _line_width(least) <= width:
            break
        kept = [index for index, column in enumerate(cells[0]) if column != name]
        cells = [[row[index] for index in kept] for row in cells]
    natural = _widths(cells)
    widths = [*natural[:-1], min(natural[-1], _LEAST)]
    while _line_width(widths) > width and max(widths) > _LEAST:
        widths[widths.index(max(widths))] -= 1
    widths[-1] = natural[-1]
    return [[shortened(cell, room) for cell, room in zip(row, widths, strict=True)] for row in cells]


def _line_width(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _widths(cells: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*cells, strict=True)]
