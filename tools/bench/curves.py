"""The pictures of the benches as SVG: curves over sizes or steps, and bars of parts of a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

__all__ = ["bars_svg", "curves_svg", "size_text"]

_WIDTH, _HEIGHT = 790, 420
_LEFT, _TOP, _RIGHT, _BOTTOM = 70, 40, 230, 50
_COLOURS = ("#1b6ca8", "#7fb3d5", "#c0392b", "#e59866", "#6c7a89", "#27ae60", "#8e44ad", "#2c3e50")


def curves_svg(
    title: str, unit: str, curves: Mapping[str, Sequence[tuple[int, float]]], *, linear: bool = False
) -> str:
    """Draw `curves`: for each label, (size in bytes, value in `unit`) in order of size.

    Both axes are logarithmic. With `linear` both are linear, steps stand in place of sizes, and each curve is thinner
    than the one below it, so that curves that coincide are all visible.
    """
    points = [point for curve in curves.values() for point in curve]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    if linear:
        x_ticks: Sequence[float] = _ticks(min(xs), max(xs))
        y_ticks: Sequence[float] = _ticks(min(ys), max(ys))
    else:
        x_ticks = sorted(set(xs))
        y_ticks = [10.0**p for p in range(math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys))) + 1)]

    def along(value: float, ticks: Sequence[float]) -> float:
        low, high, here = (v if linear else math.log(v) for v in (ticks[0], ticks[-1], value))
        return (here - low) / (high - low)

    def at(x: float, y: float) -> str:
        across = _LEFT + along(x, x_ticks) * (_WIDTH - _LEFT - _RIGHT)
        down = _HEIGHT - _BOTTOM - along(y, y_ticks) * (_HEIGHT - _TOP - _BOTTOM)
        return f"{across:.1f},{down:.1f}"

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif"',
        ' font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">{escape(title)}</text>',
    ]
    for tick in y_ticks:
        left, right = at(x_ticks[0], tick).split(","), at(x_ticks[-1], tick).split(",")
        lines.append(f'<path d="M{left[0]},{left[1]}H{right[0]}" stroke="#ddd"/>')
        lines.append(f'<text x="{_LEFT - 8}" y="{left[1]}" text-anchor="end">{tick:g} {escape(unit)}</text>')
    for tick in x_ticks:
        across, text = at(tick, y_ticks[0]).split(",")[0], f"{tick:g}" if linear else size_text(int(tick))
        lines.append(f'<text x="{across}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{text}</text>')
    for number, (label, curve) in enumerate(curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(at(x, y) for x, y in curve)
        width = max(7.0 - number, 1.0) if linear else 2
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
        down = _TOP + 18 * number
        lines.append(f'<rect x="{_WIDTH - _RIGHT + 15}" y="{down}" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{_WIDTH - _RIGHT + 33}" y="{down + 10}">{escape(label)}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _ticks(low: float, high: float) -> list[float]:
    """Return evenly spaced round numbers that begin at most at `low` and end at least at `high`."""
    unit = 10.0 ** math.floor(math.log10((high - low) / 2))
    return [unit * n for n in range(math.floor(low / unit), math.ceil(high / unit) + 1)]


def size_text(nbytes: int) -> str:
    """Format a power of two with its largest unit."""
    for unit, exponent in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << exponent:
            return f"{nbytes >> exponent} {unit}"
    return f"{nbytes} B"


def bars_svg(title: str, parts: Sequence[str], bars: Mapping[str, Sequence[float]]) -> str:
    """Draw `bars`: for each label the seconds of each of `parts`, side by side on one scale."""
    longest = max(sum(max(part, 0) for part in bar) for bar in bars.values())
    height = _TOP + 24 * len(bars) + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif"',
        ' font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="22" font-size="14">{escape(title)}</text>',
    ]
    for number, (label, bar) in enumerate(bars.items()):
        across, down = 260.0, _TOP + 24 * number
        lines.append(f'<text x="250" y="{down + 13}" text-anchor="end">{escape(label)}</text>')
        for part, seconds in enumerate(bar):
            width = max(seconds, 0) / longest * (_WIDTH - 380)
            lines.append(
                f'<rect x="{across:.1f}" y="{down}" width="{width:.1f}" height="17" fill="{_COLOURS[part * 2]}"/>'
            )
            across += width
        lines.append(f'<text x="{across + 6:.1f}" y="{down + 13}">{sum(bar) * 1e3:.1f} ms</text>')
    for part, name in enumerate(parts):
        lines.append(
            f'<rect x="{260 + 130 * part}" y="{height - 28}" width="12" height="12" fill="{_COLOURS[part * 2]}"/>'
        )
        lines.append(f'<text x="{278 + 130 * part}" y="{height - 18}">{escape(name)}</text>')
    return "\n".join([*lines, "</svg>", ""])
