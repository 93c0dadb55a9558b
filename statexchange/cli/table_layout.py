"""Lay out a table as aligned lines, and fit it to a narrow terminal."""

from __future__ import annotations

from collections.abc import Sequence

from statexchange.units import shortened

_GAP = "  "
_LEAST = 32  # characters that stay of a text, before columns are left out


def aligned(cells: Sequence[Sequence[str]], right: Sequence[str]) -> list[str]:
    """Return the lines of a table whose first row is the header; columns named in `right` are right-aligned."""
    columns = []
    for column in zip(*cells, strict=True):
        align = str.rjust if column[0] in right else str.ljust
        width = _width(column)
        columns.append([align(cell, width) for cell in column])
    # The last column needs no spaces after it, which a terminal would wrap.
    return [_GAP.join(row).rstrip() for row in zip(*columns, strict=True)]


def narrowed(cells: Sequence[Sequence[str]], width: int, drop: Sequence[str]) -> Sequence[Sequence[str]]:
    """Return the cells of a table, whose first row is the header, so that its lines have at most `width` characters.

    The columns in `drop` are left out, one by one, until the others would fit with 32 characters of each text. Then the
    widest texts lose their middle, down to these 32. A table that cannot fit is made as narrow as it can be. The last
    column, which may be a sentence, is never shortened: 32 characters are kept free for it, and the terminal wraps the
    rest. The middle of a verdict is what a reader needs: "REFUSED ... path)" says nothing.
    """
    columns = list(zip(*cells, strict=True))
    for name in drop:
        if _line_width([min(_width(column), _LEAST) for column in columns]) <= width:
            break
        columns = [column for column in columns if column[0] != name]
    widths = list(map(_width, columns))
    last = widths.pop()
    widths.append(min(last, _LEAST))
    # A character at a time, so that texts of like widths end with the same one.
    while _line_width(widths) > width and max(widths) > _LEAST:
        widths[widths.index(max(widths))] -= 1
    widths[-1] = last
    fitted = []
    for column, room in zip(columns, widths, strict=True):
        fitted.append([shortened(cell, room) for cell in column])
    return list(map(list, zip(*fitted, strict=True)))


def _line_width(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _width(column: Sequence[str]) -> int:
    return max(map(len, column))
