"""Draw for a terminal: how many bytes of a checkpoint each rank supplied, and a curve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statexchange.report.supply import MAX_RANKS, Supply, nbytes_by_rank
from statexchange.units import format_bytes, shortened

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["curve", "supply_bars"]

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LEVELS = " ▁▂▃▄▅▆▇█"
_MAX_LABEL = 24


def supply_bars(supply: Supply, *, width: int = 100, ascii_only: bool = False) -> list[str]:
    """Return lines of text with a bar for each rank, by the bytes of the checkpoint that it supplied.

    Not collective. `width` is the length of the longest line, 60 to 100.
    """
    width = min(width, 100)
    total = sorted(nbytes_by_rank(supply.tensors).items())
    nbytes = supply.nbytes
    rows = [(shortened(supply.label(rank), _MAX_LABEL), rank_nbytes) for rank, rank_nbytes in total[:MAX_RANKS]]
    if len(total) > MAX_RANKS:
        rows.append((f"{len(total) - MAX_RANKS} more", sum(rank_nbytes for _, rank_nbytes in total[MAX_RANKS:])))
    missing = nbytes - sum(rank_nbytes for _, rank_nbytes in total)
    if missing > 0:
        rows.append(("not supplied", missing))
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
