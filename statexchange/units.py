"""Format sizes, shapes, durations, names and the results of transfers for people."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence


def format_bytes(nbytes: float) -> str:
    """Format a size in powers of 1000 with three digits: ``4.21 MB``."""
    return _scaled(nbytes, (" B", " kB", " MB", " GB", " TB"))


def format_count(count: float) -> str:
    """Format a number in powers of 1000 with three digits: ``1.24 B`` for 1.24 billion."""
    return _scaled(count, ("", " k", " M", " B", " T"))


def _scaled(value: float, suffixes: Sequence[str]) -> str:
    """Format with the suffix of the largest fitting power of 1000; the first suffix is for numbers below 1000."""
    # Half a digit less than each power of 10: rounding would give the number a fourth digit.
    if value < 999.5:
        return f"{value:.0f}{suffixes[0]}"
    last = suffixes[-1]
    for suffix in suffixes[1:]:
        value /= 1000
        if value < 999.5 or suffix == last:
            break
    if value < 9.995:
        return f"{value:.2f}{suffix}"
    if value < 99.95:
        return f"{value:.1f}{suffix}"
    return f"{value:,.0f}{suffix}"


def format_number(number: int, noun: str) -> str:
    """Format a number of things: ``1 tensor``, ``1,000 tensors``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_seconds(seconds: float) -> str:
    """Format a duration: ``0.42 s``, ``42 s``, ``3 min 05 s``, ``2 h 10 min``, ``3 d 04 h``."""
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    # Before the division: 59.7 s are 1 min 00 s, not 0 min 60 s.
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02} h"


def format_shape(shape: Iterable[int]) -> str:
    """Format a shape: ``[256,64]``; ``[]`` for a tensor without dims."""
    return f"[{','.join(map(str, shape))}]"


def format_time(seconds: float) -> str:
    """Format a time since the epoch as local time: ``2026-05-31T09:07:00``; "?" for a number that is no time."""
    try:
        return datetime.fromtimestamp(seconds).isoformat(timespec="seconds")
    except (OSError, OverflowError, ValueError):
        return "?"


def format_transfer(num_tensors: int, nbytes: int, seconds: float) -> str:
    """Format the result of a transfer: ``21 tensors, 429 kB in 0.12 s``."""
    return f"{format_number(num_tensors, 'tensor')}, {format_bytes(nbytes)} in {format_seconds(seconds)}"


def format_shares(rank_nbytes: Sequence[int]) -> str:
    """Format how ranks share bytes: ``4 ranks, 25 % each`` or ``3 ranks, 10 to 60 %``."""
    total = sum(rank_nbytes)
    ranks = format_number(len(rank_nbytes), "rank")
    if len(rank_nbytes) == 1 or not total:
        return ranks
    low, high = round(100 * min(rank_nbytes) / total), round(100 * max(rank_nbytes) / total)
    return f"{ranks}, {low} % each" if low == high else f"{ranks}, {low} to {high} %"


def format_ranks(ranks: Iterable[int]) -> str:
    """Format ranks with neighbours joined: ``0-3, 7``."""
    runs: list[list[int]] = []
    for number in sorted(set(ranks)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = []
    for low, high in runs:
        texts.append(str(low) if low == high else f"{low}-{high}")
    return ", ".join(texts)


def name_ranks(ranks: Collection[int]) -> str:
    """Return what to call ranks: ``rank 3``, or ``ranks 0-3, 7``."""
    return f"rank{'s' if len(ranks) != 1 else ''} {format_ranks(ranks)}"


def printable(text: str) -> str:
    """Return a text with all control and invisible characters escaped."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def shortened(text: str, width: int) -> str:
    """Return a name of at most `width` characters: its middle is left out, and invisible characters are replaced by ?.

    The ends of a tensor's name are the most specific.
    """
    # One character for another, so that the width holds; `printable` would write \x1b in four.
    shown = "".join(char if char.isprintable() else "?" for char in text)
    if len(shown) <= width:
        return shown
    head = (width - 3) // 2
    return f"{shown[:head]}...{shown[len(shown) - (width - 3 - head) :]}"
