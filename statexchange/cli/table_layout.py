"""Lay out a table as aligned lines; on a narrow terminal, leave out columns and shorten texts until the lines fit."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from statexchange.units import shortened

__all__ = ["Narrowing", "aligned", "narrowed"]

_GAP = "  "
_EMPTY = "-"  # the text of a cell without a value


@dataclass(frozen=True)
class Narrowing:
    """The steps by which a table is made narrower.

    Attributes:
        drop: columns that may be left out, the least important first.
        shorten: columns whose texts may be shortened, with the least width of each; the first are shortened first.
        cut: columns of `shorten` whose texts (lists) lose their end; those of others (paths) lose their middle.
        wrap: columns of `shorten` whose texts (sentences) go on in further lines.
    """

    drop: Sequence[str] = ()
    shorten: Mapping[str, int] = field(default_factory=dict)
    cut: Sequence[str] = ()
    wrap: Sequence[str] = ()


def aligned(cells: Sequence[Sequence[str]], right: Sequence[str]) -> list[str]:
    """Return the lines of a table whose first row is the header; columns named in `right` are right-aligned."""
    aligns = [">" if name in right else "<" for name in cells[0]]
    columns = list(zip(_widths(cells), aligns, strict=True))
    lines = []
    for row in cells:
        texts = [f"{cell:{align}{width}}" for cell, (width, align) in zip(row, columns, strict=True)]
        lines.append(_GAP.join(texts).rstrip())
    return lines


def narrowed(cells: Sequence[Sequence[str]], width: int, narrowing: Narrowing) -> list[list[str]]:
    """Return the cells of a table, whose first row is the header, so that its lines have at most `width` characters.

    Columns, first those without a value in any row, are left out until the table fits with its texts at their least
    width. Texts are then shortened no more than needed. A table that cannot fit is made as narrow as it can be. A text
    that goes on in further lines has a row for each, whose other cells are empty.
    """
    columns = [list(column) for column in zip(*cells, strict=True)]
    is_empty = {column[0]: all(cell == _EMPTY for cell in column[1:]) for column in columns}
    for name in sorted(narrowing.drop, key=lambda name: not is_empty.get(name, False)):
        if _least_width(columns, narrowing) <= width:
            break
        columns = [column for column in columns if column[0] != name]
    excess = _line_width([_width(column) for column in columns]) - width
    wrapped: dict[str, int] = {}  # width by column
    for name, least in narrowing.shorten.items():
        for column in columns:
            if column[0] == name and excess > 0:
                room = max(_width(column) - excess, min(least, _width(column)))
                excess -= _width(column) - room
                if name in narrowing.wrap:
                    wrapped[name] = room
                    continue
                fit = _cut if name in narrowing.cut else shortened
                column[:] = [fit(cell, room) for cell in column]
    rows: list[list[str]] = []
    for row in zip(*columns, strict=True):
        lines = [_lines(cell, wrapped.get(column[0])) for cell, column in zip(row, columns, strict=True)]
        rows += [list(line) for line in itertools.zip_longest(*lines, fillvalue="")]
    return rows


def _lines(text: str, width: int | None) -> list[str]:
    """Return the lines of a text, of which each but the first is indented; one line if `width` is None."""
    if width is None or len(text) <= width:
        return [text]
    return textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3].rstrip()}..."


def _least_width(columns: Sequence[Sequence[str]], narrowing: Narrowing) -> int:
    """Return the width of a table whose texts are as short as they may be."""
    return _line_width([min(_width(column), narrowing.shorten.get(column[0], _width(column))) for column in columns])


def _line_width(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _widths(cells: Sequence[Sequence[str]]) -> list[int]:
    return [_width(column) for column in zip(*cells, strict=True)]


def _width(column: Sequence[str]) -> int:
    return max(map(len, column))
