"""The parts that all SVG pictures share: the document, its texts and rectangles, its colours in light and dark."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from statexchange.units import printable, shortened

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH, MARGIN = 900, 20
BORDER = 'stroke="#888" stroke-width=".5"'
NOT_THERE = "url(#not-there)"  # the fill of what is missing: hatching
# Okabe and Ito's colours, distinct for every kind of colour vision; for more of them one colour, dark to light.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#7f7f7f")
_DARKEST, _LIGHTEST = "#00224e", 0.9
_MAX_TOOLTIP = 200
_FONTS = {
    "n": "11px ui-monospace,'DejaVu Sans Mono',monospace",
    "": "12px ui-sans-serif,system-ui,'DejaVu Sans',sans-serif",
}
# The classes: t title, g grey, n name in monospace, r rank's number, e ends and m is centred at x; of shapes, b
# background, c crisp edges, l thin lines between cells, o outline. A viewer's dark mode changes texts and background.
_STYLE = (
    f"text{{font:{_FONTS['']};fill:#222}}.n{{font:{_FONTS['n']}}}.g{{fill:#666}}.t{{font-size:16px;font-weight:600}}"
    ".r{font-size:10px;text-anchor:middle}.e{text-anchor:end}.m{text-anchor:middle}.b1{font-weight:600}"
    ".b{fill:#fff}.c{shape-rendering:crispEdges}.l{stroke:#fff;stroke-width:1}.o{fill:none;stroke:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.g{fill:#9da7b1}.b{fill:#0d1117}.l,.o{stroke:#0d1117}}"
)
_HATCHING = (
    '<pattern id="not-there" width="6" height="6" patternUnits="userSpaceOnUse">'
    '<rect width="6" height="6" fill="#fff"/><path d="M0 6L6 0" stroke="#b00"/></pattern>'
)


class Drawing:
    """The elements of one SVG picture, 900 units wide, and the y at which the next of them belongs."""

    def __init__(self, title: str, subtitle: str) -> None:
        """Begin with a heading of two lines."""
        self._title = title
        self._legend: list[str] = []
        self._parts: list[str] = []
        self.y = MARGIN
        self.text(MARGIN, self.y + 14, title, "t")
        self.text(MARGIN, self.y + 34, subtitle, "g")
        self.y += 48

    def document(self, totals: str) -> str:
        """Return the whole document; a screen reader reads `totals`, which is a sentence, and the legend."""
        height, legend = self.y + MARGIN // 2, "; ".join(self._legend)
        opening = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"',
            f' height="{height}" role="img" aria-labelledby="title desc">',
            f'<title id="title">{_escaped(self._title)}</title>',
            f'<desc id="desc">{_escaped(f"{totals} {legend}.")}</desc>',
            f"<style>{_STYLE}</style>",
            f"<defs>{_HATCHING}</defs>",
            f'<rect width="{WIDTH}" height="{height}" class="b"/>',
        ]
        return "\n".join([*opening, *self._parts, "</svg>", ""])

    def text(self, x: float, y: float, text: str, style: str = "", *, colour: str = "") -> None:
        """Add a line of text; `style` is the classes of the style sheet, `colour` replaces theirs."""
        # The rule of the style sheet for `text` would win over an attribute `fill`.
        fill = f' style="fill:{colour}"' if colour else ""
        # So many digits are finer than a pixel, and keep a picture of 8,000 cells small.
        self._parts.append(f'<text x="{x:.5g}" y="{y:.5g}" class="{style}"{fill}>{_escaped(text)}</text>')

    def rectangle(self, x: float, y: float, width: float, height: float, style: str, *, tooltip: str = "") -> None:
        """Add a rectangle; `style` is its attributes, `tooltip` the text at the mouse pointer."""
        end = f"><title>{_tooltip(tooltip)}</title></rect>" if tooltip else "/>"
        self._parts.append(f'<rect x="{x:.6g}" y="{y:.6g}" width="{width:.5g}" height="{height:.5g}" {style}{end}')

    def begin_group(self, attributes: str, tooltip: str = "") -> None:
        """Begin a group of elements with common attributes, and perhaps one tooltip."""
        title = f"<title>{_tooltip(tooltip)}</title>" if tooltip else ""
        self._parts.append(f"<g {attributes}>{title}")

    def end_group(self) -> None:
        """End the group."""
        self._parts.append("</g>")

    def legend(self, entries: Sequence[tuple[str, str]], columns: int) -> None:
        """Add a line of `columns` entries, (colour, text) each, and as many further lines as they take."""
        step = (WIDTH - 2 * MARGIN + 4) // columns
        for number, (colour, text) in enumerate(entries):
            x, y = MARGIN + number % columns * step, self.y + number // columns * 20
            self.rectangle(x, y, 12, 12, f'fill="{colour}" {BORDER}')
            self.text(x + 18, y + 10, text)
            self._legend.append(text)
        self.y += -(-len(entries) // columns) * 20 + 12


def _escaped(text: str) -> str:
    """Escape a text for XML; also control characters, which XML lacks, and invisible ones, which mislead readers."""
    return escape(printable(text))


def _tooltip(text: str) -> str:
    return "\n".join(_escaped(shortened(line, _MAX_TOOLTIP)) for line in text.split("\n"))


def text_width(text: str, size: float) -> float:
    """Return an upper bound of the width of a text in the monospaced font of class "n"."""
    # A character of DejaVu Sans Mono is 0.602 em wide, and those of other such fonts are narrower.
    return 0.61 * size * len(text)


def title_of(path: str) -> str:
    """Return a checkpoint's name for a title: only the last component of its path, because pictures are shared."""
    return path.rstrip("/").rpartition("/")[2] or path


def palette(count: int) -> list[str]:
    """Return `count` distinct colours."""
    if count <= len(_COLOURS):
        return list(_COLOURS[:count])
    return [lightened(_DARKEST, _LIGHTEST * number / (count - 1)) for number in range(count)]


def lightened(colour: str, share: float) -> str:
    """Return a colour mixed with a share of white: ``#0072b2`` and 0.5 give ``#80b8d8``."""
    mixed = "#"
    for value in bytes.fromhex(colour[1:]):
        mixed += f"{round(value + (255 - value) * share):02x}"
    return mixed


def text_colour(colour: str) -> str:
    """Return black or white, whichever has more contrast with `colour`."""
    red, green, blue = bytes.fromhex(colour[1:])
    # The weights of ITU-R BT.601: green looks brighter than red, and red than blue.
    return "#000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#fff"
