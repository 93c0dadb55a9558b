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
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, NamedTuple

from statexchange.errors import NotFoundError
from statexchange.report.summary import model_of, model_rows
from statexchange.report.svg import MARGIN, WIDTH, Drawing, lightened, palette, text_width, title_of
from statexchange.report.tensor_facts import Branch, TensorRow, known_bytes, module_branches, tensor_rows
from statexchange.units import format_bytes, format_count, format_number, format_shape, shortened

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from statexchange.formats.source import Source

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
_INK = "#111111"


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


def parameters_picture(source: Source) -> str:
    """Return an SVG in which each tensor of the model has an area in proportion to its number of parameters.

    Not collective. Reads headers only. All tensors are drawn if it is not known which are the model's, or none is.

    Raises:
        NotFoundError: no tensor is known to have an element.
    """
    rows = tensor_rows(source)
    drawn = model_rows(source, rows) or rows
    facts = [source.kind, model_of(source)]
    if len(drawn) < len(rows):
        facts.append("section model")
    kind = ", ".join(filter(None, facts))
    return treemap(drawn, path=source.path, kind=kind)


def treemap(rows: Sequence[TensorRow], *, path: str, kind: str) -> str:
    """Return an SVG in which each tensor has an area in proportion to its number of parameters.

    Not collective.

    Args:
        rows: the tensors, as `tensor_rows` returns them.
        path: the checkpoint's path, whose last component is in the title.
        kind: its format.

    Raises:
        NotFoundError: no tensor is known to have an element.

    Example:
        >>> row = TensorRow("up.weight", "F32", (4, 3), 48, (0,), 1, "model.safetensors")
        >>> "up.weight" in treemap([row], path="tiny", kind="huggingface")
        True
    """
    top = module_branches((row for row in rows if row.num_parameters), _MAX_COMPONENTS)[0]
    root = _Node("", top.num_parameters, top.num_tensors, _parts(top))
    if not root.num_tensors:
        raise NotFoundError("there is no tensor to draw", path=path)
    facts = [
        kind,
        f"{root.numel:,} parameters in {format_number(root.num_tensors, 'tensor')}",
        format_bytes(known_bytes(rows)),
    ]
    if root.num_tensors < len(rows):
        facts.append(f"{len(rows) - root.num_tensors:,} without elements or of unknown size")
    drawing = Drawing(f"Parameters of {shortened(title_of(path), 60)}", " · ".join(facts))
    tops = _tops(root)
    coloured = [node for node in tops if node.numel >= _VISIBLE * root.numel]
    # Of too many tops the smaller ones share the last colour, and one entry of the legend.
    if len(tops) > _MAX_COLOURS:
        coloured = coloured[: _MAX_COLOURS - 1]
    for node, colour in zip(coloured, palette(_MAX_COLOURS), strict=False):
        node.colour = colour
    listed, rest = list(coloured), tops[len(coloured) :]
    if coloured and rest:
        label = rest[0].name if len(rest) == 1 else f"{len(rest):,} others"
        listed.append(_Node(label, sum(node.numel for node in rest)))
    entries = []
    for node in listed:
        share = "< 0.1%"  # 0.04 % would be shown as 0.0%
        if node.numel >= _VISIBLE * root.numel:
            share = f"{node.numel / root.numel:.1%}"
        text = f"{shortened(node.name or _NO_NAME, 24)} · {format_count(node.numel)} · {share}"
        entries.append((lightened(node.colour, _LIGHTENED), text))
    if entries:
        drawing.legend(entries, 3)
    layout = _Layout(root, tops, _Area(MARGIN, drawing.y, WIDTH - 2 * MARGIN, _HEIGHT))
    layout.draw(drawing)
    drawing.y += _HEIGHT + MARGIN // 2
    return drawing.document(f"{root.num_tensors} tensors, {root.numel} parameters.")


# --- Modules ---


def _parts(branch: Branch) -> list[_Node]:
    """Return the tensors and modules of a branch, largest first; a part of a module that has no other stands for it."""
    parts = [_Node(row.name, row.num_parameters, 1, row=row) for row in branch.tensors]
    for module in branch.below.values():
        children = _parts(module)
        if len(children) > 1:
            children = [_Node(module.path, module.num_parameters, module.num_tensors, children)]
        parts += children
    return sorted(parts, key=_order)


def _order(node: _Node) -> tuple[int, str]:
    """Return a key that sorts the largest first, and equal ones by name, with ``layers.2`` before ``layers.10``."""
    return -node.numel, _NUMBER.sub(lambda number: number[0].zfill(9), node.name)


def _tops(root: _Node) -> list[_Node]:
    """Return the modules and tensors that have a colour each, largest first.

    Of a Llama, "model" and "lm_head" become "model.layers", "lm_head", "model.embed_tokens" and "model.norm".
    """
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


# --- Areas ---


class _Layout:
    """The areas of a picture: those that are filled, and the outlines of modules around them.

    An area is filled for a tensor, and for a module whose parts are too small.
    """

    def __init__(self, root: _Node, tops: Sequence[_Node], area: _Area) -> None:
        self._cells: list[tuple[_Node, _Area, _Node]] = []  # with the top in which each lies
        self._outlines: list[tuple[int, _Area]] = []  # with the level, 1 for a top
        self._numel = root.numel
        self._scale = area.width * area.height / root.numel
        # The tops are placed as parts of one node, from whatever depth of the names they come.
        whole = _Node("", root.numel, root.num_tensors, list(tops), is_rest=True)
        self._place(whole, area, 0, whole)

    def _place(self, node: _Node, area: _Area, level: int, top: _Node) -> None:
        """Divide the area of a node among its parts."""
        shown = self._shown(node.name, node.children)
        if not shown:
            self._cells.append((node, area, top))
            return
        if level:
            self._outlines.append((level, area))
        for part, of_part in zip(shown, _divided([part.numel for part in shown], area), strict=True):
            self._place(part, of_part, level + 1, top if level else part)

    def draw(self, drawing: Drawing) -> None:
        """Draw the areas, then the outlines, the widest last, then the labels."""
        drawing.begin_group('class="c l"')
        for node, area, top in self._cells:
            fill = f'fill="{lightened(top.colour, _LIGHTENED)}"'
            drawing.rectangle(*area, fill, tooltip=_tooltip(node, self._numel))
        drawing.end_group()
        # The widest last: the border of a top covers those of its parts.
        for level, area in sorted(self._outlines, reverse=True):
            width = {1: 3, 2: 1.8}.get(level, 1.2)
            drawing.rectangle(*area, f'class="o" stroke-width="{width}"')
        for node, area, top in self._cells:
            _label(drawing, node, area, "" if node is top else top.name)

    def _shown(self, name: str, parts: Sequence[_Node]) -> list[_Node]:
        """Return the parts with an area of their own, largest first, the small ones as one; none if all are small."""
        shown = list(takewhile(lambda part: part.numel * self._scale >= _MIN_AREA, parts))
        if not shown:
            return []
        # A single small part keeps its name.
        small = parts[len(shown) :]
        if len(small) <= 1:
            return list(parts)
        rest = _Node(name, is_rest=True)
        for part in small:
            rest.numel += part.numel
            rest.num_tensors += part.num_tensors
        return sorted([*shown, rest], key=_order)


def _divided(weights: Sequence[int], area: _Area) -> Iterator[_Area]:
    """Divide an area in proportion to weights, which are in falling order.

    Of an area 4 wide and 3 high, weights 2, 1 and 1 get the left half, and the upper and lower half of the right one.
    """
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


# --- Texts ---


def _tooltip(node: _Node, numel: int) -> str:
    size = f"{node.numel:,} parameters, {node.numel / numel:.2%}"
    if node.row is not None and node.row.shape is not None:
        return f"{node.name or _NO_NAME}\n{node.row.dtype} {format_shape(node.row.shape)}, {size}"
    kind = "small tensors" if node.is_rest else "tensors"
    text = f"{node.num_tensors:,} {kind}, {size}"
    if node.name:
        return f"{node.name}\n{text}"
    return text


def _label(drawing: Drawing, node: _Node, area: _Area, module: str) -> None:
    """Write the name and number of parameters of a node into the middle of its area, without the module's name."""
    if node.is_rest:
        kind = "others" if node.name else "tensors"
        names = [f"{node.num_tensors:,} {kind}"]
    else:
        name = _relative(node.name, module)
        short = name.removesuffix(".weight")
        names = [name or _NO_NAME, short, short.rpartition(".")[2]]
    lines = [_fitting(names, area.width - _PAD)]
    count = format_count(node.numel)
    if area.height >= 2 * _LINE + 2 * _PAD and text_width(count, _FONT) <= area.width - 2 * _PAD:
        lines.append(count)
    if not lines[0] or area.height < _LINE + _PAD:
        return
    top = area.y + (area.height - len(lines) * _LINE) / 2
    for number, line in enumerate(lines):
        drawing.text(area.x + area.width / 2, top + _FONT + number * _LINE, line, "n m", colour=_INK)


def _fitting(texts: Sequence[str], width: float) -> str:
    """Return the first text that is not too wide, or the last one shortened; "" if that says nothing."""
    columns = int(width / text_width(".", _FONT))  # of a monospaced font
    for text in texts:
        if text_width(text, _FONT) <= width:
            return shortened(text, columns)
    if columns < _MIN_LABEL:
        return ""
    return shortened(texts[-1], columns)
