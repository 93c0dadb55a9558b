"""Draw the parameters of a checkpoint as a treemap: an area for each tensor, nested by modules, as SVG.

Every area is in proportion to its number of parameters. Cutting an area in two across its longer side, again and again,
keeps the parts close to squares. Borders and labels lie over the areas and take no space from them.

The modules that have a colour are called *tops*: the first components of the names, where one that has nearly all
parameters, such as ``model``, is replaced by its own. Tensors that are too small to be seen are summed in one area for
each module, so that the size of a picture is bounded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from statexchange.errors import NotFoundError
from statexchange.report.summary import TensorRow, known_bytes, model_of, model_rows, tensor_rows
from statexchange.report.svg import MARGIN, WIDTH, Drawing, lightened, palette, text_width, title_of
from statexchange.units import format_bytes, format_count, format_number, format_shape, shortened

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from statexchange.formats.source import Source

__all__ = ["parameters_picture", "treemap"]

_HEIGHT = 520
_MIN_AREA = 60.0  # of a tensor with an area of its own
_MAX_COMPONENTS = 8  # of a name; further dots stay in the last one
_MAX_COLOURS, _MAX_TOPS = 7, 12
_DOMINANT, _VISIBLE = 0.75, 0.0005  # share of a top that is replaced by its parts; least share that has a colour
_LIGHTENED = 0.5  # how much lighter than the colour
_OTHERS = "#8a8a8a"
_FONT, _LINE, _PAD, _MIN_LABEL = 11, 14, 4, 9  # size of labels, height of a line, space around; least columns
_NO_NAME = "(no name)"
_NUMBER = re.compile("([0-9]+)")
_INK, _PAPER = "#111111", 'fill="#ffffff" fill-opacity=".9" rx="2"'


@dataclass(slots=True)
class _Node:
    """A module; a tensor, which has a row; or the small parts of a module, which have no name of their own.

    Attributes:
        name: the whole name; of small parts, that of their module.
        children: what a module has, largest first.
        row: of a tensor.
        is_rest: whether these are the small parts.
        colour: of a top.
    """

    name: str
    numel: int = 0
    num_tensors: int = 0
    children: list[_Node] = field(default_factory=list)
    row: TensorRow | None = None
    is_rest: bool = False
    colour: str = _OTHERS


class _Area(NamedTuple):
    x: float
    y: float
    width: float
    height: float

    def below(self, others: Sequence[_Area], step: float) -> _Area:
        """Return this area, moved down by so many steps that it overlaps none of the others."""
        area = self
        while any(area._overlaps(other) for other in others):
            area = area._replace(y=area.y + step)
        return area

    def _overlaps(self, other: _Area) -> bool:
        return (
            self.x < other.x + other.width
            and other.x < self.x + self.width
            and self.y < other.y + other.height
            and other.y < self.y + self.height
        )


@dataclass(frozen=True, slots=True)
class _Cell:
    """The area of a node. It is filled for a tensor, and for a module whose parts are too small.

    Attributes:
        module: the name of the module whose label is above it, which its own label does not repeat.
        level: 1 for a top.
        colour: what fills it; "" for a module that has cells.
    """

    node: _Node
    area: _Area
    module: str
    level: int
    colour: str = ""

    @property
    def has_caption(self) -> bool:
        """Whether the name of a module is written, as on the two upper levels and for each layer."""
        return self.level <= 2 or self.node.name.rpartition(".")[2].isdecimal()


def parameters_picture(source: Source) -> str:
    """Return an SVG in which each tensor of the model has an area in proportion to its number of parameters.

    Not collective. Reads headers only. All tensors are drawn if it is not known which are the model's, or none is.

    Raises:
        NotFoundError: no tensor is known to have an element.
    """
    rows = tensor_rows(source)
    drawn = model_rows(source, rows) or rows
    section = "section model" if len(drawn) < len(rows) else None
    kind = ", ".join(filter(None, (source.kind, model_of(source), section)))
    try:
        return treemap(drawn, name=title_of(source.path), kind=kind)
    except NotFoundError as error:
        raise error.located(path=source.path) from None


def treemap(rows: Sequence[TensorRow], *, name: str, kind: str) -> str:
    """Return an SVG in which each tensor has an area in proportion to its number of parameters.

    Not collective.

    Args:
        rows: the tensors, as `tensor_rows` returns them.
        name: the checkpoint's name, for the title.
        kind: its format.

    Raises:
        NotFoundError: no tensor is known to have an element.

    Example:
        >>> row = TensorRow("up.weight", "F32", (4, 3), 48, (0,), 1, "model.safetensors")
        >>> "up.weight" in treemap([row], name="tiny", kind="huggingface")
        True
    """
    root = _tree(row for row in rows if row.num_parameters)
    if not root.num_tensors:
        raise NotFoundError("there is no tensor to draw")
    facts = [
        kind,
        f"{root.numel:,} parameters in {format_number(root.num_tensors, 'tensor')}",
        format_bytes(known_bytes(rows)),
    ]
    if root.num_tensors < len(rows):
        facts.append(f"{len(rows) - root.num_tensors:,} without elements or of unknown size")
    drawing = Drawing(f"Parameters of {shortened(name, 60)}", " · ".join(facts))
    tops = _tops(root)
    coloured = [top for top in tops if top.numel >= _VISIBLE * root.numel]
    coloured = coloured if len(tops) <= _MAX_COLOURS else coloured[: _MAX_COLOURS - 1]
    for top, colour in zip(coloured, palette(_MAX_COLOURS), strict=False):
        top.colour = colour
    if coloured:
        drawing.legend(_legend(coloured, tops[len(coloured) :], root.numel), 3)
    layout = _Layout(root, tops, _Area(MARGIN, drawing.y, WIDTH - 2 * MARGIN, _HEIGHT))
    _draw(drawing, layout, root.numel)
    drawing.y += _HEIGHT + MARGIN // 2
    listed = ", ".join(f"{shortened(top.name, 100)}: {top.numel}" for top in coloured)
    return drawing.document(f"{root.num_tensors} tensors, {root.numel} parameters. {listed}.")


# --- Modules ---


def _tree(rows: Iterable[TensorRow]) -> _Node:
    """Return the tree of all modules; a module with one part is left out, its part has the longer name."""
    nested: dict[str, object] = {}
    for row in rows:
        parent = nested
        components = row.name.split(".", _MAX_COMPONENTS - 1)
        for component in components[:-1]:
            parent = parent.setdefault(f"{component}.", {})  # type: ignore[assignment]
        parent.setdefault(components[-1], row)  # the dot keeps the tensor "a" and the module of "a.b" apart
    return _node("", nested)


def _node(name: str, found: object) -> _Node:
    """Return the node of a row, or of a dict of components."""
    if isinstance(found, TensorRow):
        return _Node(name, found.num_parameters, 1, row=found)
    assert isinstance(found, dict)
    children = [_node(f"{name}{component}", part) for component, part in found.items()]
    if len(children) == 1 and name:
        return children[0]
    children.sort(key=_order)
    return _Node(
        name.removesuffix("."), sum(child.numel for child in children), sum(c.num_tensors for c in children), children
    )


def _order(node: _Node) -> tuple[int, str]:
    """Return a key that sorts the largest first, and equal ones by name, with ``layers.2`` before ``layers.10``."""
    return -node.numel, _NUMBER.sub(lambda number: number[0].zfill(9), node.name)


def _tops(root: _Node) -> list[_Node]:
    """Return the modules and tensors that have a colour each, largest first."""
    tops = root.children
    while True:
        largest = tops[0]
        parts = [_relative(child.name, largest.name) for child in largest.children]
        if len(parts) < 2 or largest.numel < _DOMINANT * root.numel or len(tops) + len(parts) > _MAX_TOPS:
            return tops
        if all(part.partition(".")[0].isdecimal() for part in parts):  # layers, which are alike
            return tops
        tops = sorted([*largest.children, *tops[1:]], key=_order)


def _relative(name: str, module: str) -> str:
    """Return a name without the module's that it begins with."""
    return name.removeprefix(f"{module}.") if module else name


def _legend(coloured: Sequence[_Node], others: Sequence[_Node], numel: int) -> list[tuple[str, str]]:
    counts = [(top.colour, top.name, top.numel) for top in coloured]
    if others:
        name = others[0].name if len(others) == 1 else f"{len(others):,} others"
        counts.append((_OTHERS, name, sum(top.numel for top in others)))
    entries = []
    for colour, name, count in counts:
        share = f"{count / numel:.1%}" if count >= _VISIBLE * numel else "< 0.1%"
        text = f"{shortened(name or _NO_NAME, 24)} · {format_count(count)} · {share}"
        entries.append((lightened(colour, _LIGHTENED), text))
    return entries


# --- Areas ---


class _Layout:
    """The cells and groups of a picture."""

    def __init__(self, root: _Node, tops: Sequence[_Node], area: _Area) -> None:
        self.cells: list[_Cell] = []
        self.groups: list[_Cell] = []
        self._scale = area.width * area.height / root.numel
        shown = self._shown("", tops) or [_Node("", root.numel, root.num_tensors, is_rest=True)]
        for top, part in zip(shown, _divided([top.numel for top in shown], area), strict=True):
            self._place(top, part, 1, "", lightened(top.colour, _LIGHTENED))

    def _place(self, node: _Node, area: _Area, level: int, module: str, colour: str) -> None:
        """Divide the area of a node among its parts; `module` is the one whose label is above it."""
        shown = self._shown(node.name, node.children)
        if not shown:
            self.cells.append(_Cell(node, area, module, level, colour))
            return
        group = _Cell(node, area, module, level)
        self.groups.append(group)
        inner = node.name if group.has_caption else module
        for part, of_part in zip(shown, _divided([part.numel for part in shown], area), strict=True):
            self._place(part, of_part, level + 1, inner, colour)

    def _shown(self, name: str, parts: Sequence[_Node]) -> list[_Node]:
        """Return the parts with an area of their own, largest first, the small ones as one; none if all are small."""
        shown = [part for part in parts if part.numel * self._scale >= _MIN_AREA]
        small = [part for part in parts if part.numel * self._scale < _MIN_AREA]
        if not shown or len(small) <= 1:
            return sorted([*shown, *small], key=_order) if shown else []
        count = sum(part.num_tensors for part in small)
        rest = _Node(name, sum(part.numel for part in small), count, is_rest=True)
        return sorted([*shown, rest], key=_order)


def _divided(weights: Sequence[int], area: _Area) -> Iterator[_Area]:
    """Divide an area in proportion to weights, which are in falling order."""
    if len(weights) == 1:
        yield area
        return
    # The cut is where the two parts are most alike.
    sums = list(accumulate(weights))
    count = min(range(1, len(weights)), key=lambda count: abs(2 * sums[count - 1] - sums[-1]))
    share = sums[count - 1] / sums[-1]
    if area.width >= area.height:
        width = share * area.width
        parts = area._replace(width=width), area._replace(x=area.x + width, width=area.width - width)
    else:
        height = share * area.height
        parts = area._replace(height=height), area._replace(y=area.y + height, height=area.height - height)
    yield from _divided(weights[:count], parts[0])
    yield from _divided(weights[count:], parts[1])


# --- Drawing ---


def _draw(drawing: Drawing, layout: _Layout, numel: int) -> None:
    drawing.begin_group('class="c l"')
    for cell in layout.cells:
        drawing.rectangle(*cell.area, f'fill="{cell.colour}"', tooltip=_tooltip(cell.node, numel))
    drawing.end_group()
    for group in sorted(layout.groups, key=lambda group: -group.level):
        width = {1: 3, 2: 1.8}.get(group.level, 1.2)
        drawing.rectangle(*group.area, f'class="o" stroke-width="{width}"')
    captions: list[_Area] = []
    for group in sorted(layout.groups, key=lambda group: group.level):
        if group.has_caption:
            _caption(drawing, group, captions)
    for cell in layout.cells:
        _label(drawing, cell, captions)


def _tooltip(node: _Node, numel: int) -> str:
    size = f"{node.numel:,} parameters, {node.numel / numel:.2%}"
    if node.row is not None and node.row.shape is not None:
        return f"{node.name or _NO_NAME}\n{node.row.dtype} {format_shape(node.row.shape)}, {size}"
    others = f"{node.num_tensors:,} {'small tensors' if node.is_rest else 'tensors'}"
    return f"{node.name}\n{others}, {size}" if node.name else f"{others}, {size}"


def _caption(drawing: Drawing, group: _Cell, captions: list[_Area]) -> None:
    """Write the name of a module into its upper left corner, below the captions that are there."""
    text = _relative(group.node.name, group.module)
    texts = [f"{text} {format_count(group.node.numel)}"] if group.level == 1 else []
    text = _fitting([*texts, text], group.area.width - 2 * _PAD)
    area = _Area(group.area.x + 3, group.area.y + 3, text_width(text, _FONT) + 2 * _PAD, _LINE + 1)
    area = area.below(captions, _LINE + 3)
    if not text or area.y + area.height > group.area.y + group.area.height:
        return
    captions.append(area)
    drawing.rectangle(*area, _PAPER)
    drawing.text(area.x + _PAD, area.y + _FONT, text, "n b1" if group.level == 1 else "n", colour=_INK)


def _label(drawing: Drawing, cell: _Cell, captions: Sequence[_Area]) -> None:
    """Write the name and number of parameters of a cell into its middle, or below the captions that are there."""
    node, (x, y, width, height) = cell.node, cell.area
    if node.is_rest:
        names = [f"{node.num_tensors:,} {'others' if node.name else 'tensors'}"]
    else:
        name = _relative(node.name, cell.module)
        short = name.removesuffix(".weight")
        names = [name or _NO_NAME, short, short.rpartition(".")[2]]
    lines = [_fitting(names, width - _PAD)]
    count = format_count(node.numel)
    if height >= 2 * _LINE + 2 * _PAD and text_width(count, _FONT) <= width - 2 * _PAD:
        lines.append(count)
    if not lines[0] or height < _LINE + _PAD:
        return
    wide = max(text_width(line, _FONT) for line in lines)
    area = _Area(x + (width - wide) / 2, y + (height - len(lines) * _LINE) / 2, wide, len(lines) * _LINE)
    area = area.below(captions, _PAD)
    if area.y + area.height > y + height:
        return
    for number, line in enumerate(lines):
        drawing.text(x + width / 2, area.y + _FONT + number * _LINE, line, "n m", colour=_INK)


def _fitting(texts: Sequence[str], width: float) -> str:
    """Return the first text that is not too wide, or the last one shortened; "" if that says nothing."""
    columns = int(width / text_width(".", _FONT))
    for text in texts:
        if text_width(text, _FONT) <= width:
            return shortened(text, columns)
    return shortened(texts[-1], columns) if columns >= _MIN_LABEL else ""
