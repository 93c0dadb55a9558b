"""The treemap of parameters: areas in proportion, colours by module, readable labels, a bounded size."""

from collections.abc import Iterator
from math import prod
from random import Random
from xml.etree import ElementTree as ET

import pytest
from drawn import SVG, texts

from statexchange.errors import NotFoundError
from statexchange.report.svg import lightened, palette
from statexchange.report.tensor_facts import TensorRow
from statexchange.report.treemap import _INK, _LIGHTENED, _OTHERS, treemap

WHOLE = 860 * 520
Rectangle = tuple[float, float, float, float]


def row(name: str, *shape: int, dtype: str = "BF16") -> TensorRow:
    return TensorRow(name, dtype, shape, prod(shape) * 2, (0,), 1, "model.safetensors")


def llama(layers: int) -> list[TensorRow]:
    rows = [row("model.embed_tokens.weight", 1000, 64), row("lm_head.weight", 1000, 64), row("model.norm.weight", 64)]
    for layer in range(layers):
        for name, shape in (("self_attn.q_proj", (64, 64)), ("self_attn.k_proj", (16, 64)), ("mlp.up_proj", (200, 64))):
            rows.append(row(f"model.layers.{layer}.{name}.weight", *shape))
    return rows


def draw(rows: list[TensorRow]) -> ET.Element:
    return ET.fromstring(treemap(rows, path="tiny", kind="huggingface"))


def areas(root: ET.Element) -> Iterator[tuple[list[str], Rectangle, str]]:
    """Yield the tooltip's lines, the rectangle and the colour of each filled area."""
    (group,) = root.iter(f"{SVG}g")
    for rect in group:
        x, y, width, height = (float(rect.get(key, "")) for key in ("x", "y", "width", "height"))
        yield rect.findtext(f"{SVG}title", "").split("\n"), (x, y, width, height), rect.get("fill", "")


def overlap(a: Rectangle, b: Rectangle) -> bool:
    slack = 0.01  # the numbers in the file are rounded
    return all(a[i] + slack < b[i] + b[i + 2] and b[i] + slack < a[i] + a[i + 2] for i in (0, 1))


def test_areas_are_in_proportion_to_parameters_and_fill_the_picture() -> None:
    rows = llama(6)
    total = sum(row.num_parameters for row in rows)
    sizes = {row.name: row.num_parameters for row in rows}
    rectangles = []
    for (name, _), rectangle, _ in areas(draw(rows)):
        rectangles.append(rectangle)
        assert rectangle[2] * rectangle[3] == pytest.approx(WHOLE * sizes.pop(name) / total, rel=0.01)
    assert not sizes, "every tensor has an area"
    assert sum(width * height for _, _, width, height in rectangles) == pytest.approx(WHOLE, rel=1e-3)
    assert not any(overlap(a, b) for number, a in enumerate(rectangles) for b in rectangles[:number])


def test_random_sizes_are_all_drawn_or_summed() -> None:
    random = Random(7)
    for count in (1, 2, 3, 50, 700):
        names = [".".join(random.choice("abc") for _ in range(random.randint(1, 6))) + str(n) for n in range(count)]
        rows = [row(name, random.choice((1, 10, 1000, 100_000))) for name in names]
        total = sum(row.num_parameters for row in rows)
        drawn = {name: row.num_parameters for name, row in zip(names, rows, strict=True)}
        shown = 0
        for lines, rectangle, _ in areas(draw(rows)):
            size = int(lines[-1].split(" parameters")[0].rpartition(" ")[2].replace(",", ""))
            assert drawn.get(lines[0], size) == size
            assert rectangle[2] * rectangle[3] == pytest.approx(WHOLE * size / total, rel=0.01, abs=0.5)
            shown += size
        assert shown == total


def test_each_top_module_has_its_own_colour() -> None:
    root = draw(llama(4))
    colours: dict[str, set[str]] = {}
    for (name, _), _, colour in areas(root):
        colours.setdefault(name.partition(".")[0], set()).add(colour)
    assert colours.keys() == {"model", "lm_head"}
    assert [len(found) for found in colours.values()] == [1, 1]
    assert colours["model"] != colours["lm_head"]
    assert [text for text in texts(root) if " · " in text][1:] == [
        "model · 136 k · 68.0%",
        "lm_head.weight · 64.0 k · 32.0%",
    ]


def test_a_module_with_nearly_everything_is_replaced_by_its_own() -> None:
    root = draw(llama(40))
    assert [text for text in texts(root) if " · " in text][1:] == [
        "model.layers · 717 k · 84.8%",
        "lm_head.weight · 64.0 k · 7.6%",
        "model.embe...kens.weight · 64.0 k · 7.6%",
        "model.norm.weight · 64 · < 0.1%",
    ]


def test_the_title_and_the_text_for_screen_readers_have_the_totals() -> None:
    root = draw(llama(1))
    assert root.findtext(f"{SVG}title") == "Parameters of tiny"
    assert "huggingface · 145,984 parameters in 6 tensors · 292 kB" in texts(root)
    assert root.findtext(f"{SVG}desc", "").startswith("6 tensors, 145984 parameters. ")


def test_labels_lie_in_their_areas_and_do_not_overlap() -> None:
    for rows in (llama(1), llama(5), llama(32)):
        root = draw(rows)
        boxes = []
        for text in root.iter(f"{SVG}text"):
            classes = text.get("class", "").split()
            if text.get("style") != f"fill:{_INK}":
                continue
            width = 0.605 * 11 * len(text.text or "")
            x, y = float(text.get("x", "")), float(text.get("y", ""))
            boxes.append((x - width / 2 if "m" in classes else x, y - 9, width, 11))
        assert len(boxes) >= 6
        assert not any(overlap(a, b) for number, a in enumerate(boxes) for b in boxes[:number])
        assert all(x >= 20 and x + width <= 880 for x, _, width, _ in boxes)


def test_the_ink_is_readable_on_every_colour() -> None:
    for colour in (*palette(7), _OTHERS):
        assert contrast(lightened(colour, _LIGHTENED), _INK) >= 4.5


def contrast(a: str, b: str) -> float:
    """Return the contrast ratio of WCAG 2."""

    def luminance(colour: str) -> float:
        channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(
    "names",
    [
        [f"t{number}" for number in range(20_000)],
        [f"model.layers.{number // 200}.mlp.experts.{number % 200}.weight" for number in range(20_000)],
        [f"{number}.{'long' * 100}" for number in range(5000)],
    ],
    ids=["flat", "experts", "long names"],
)
def test_the_size_of_a_treemap_is_bounded(names: list[str]) -> None:
    svg = treemap([row(name, 10) for name in names], path="large", kind="save")
    assert len(svg) < 3_000_000
    root = ET.fromstring(svg)
    assert f"{len(names):,} tensors" in " ".join(texts(root))
    assert sum(1 for _ in areas(root)) <= WHOLE / 60 * 1.5
    assert sum(w * h for _, (_, _, w, h), _ in areas(root)) == pytest.approx(WHOLE, rel=0.01)


def test_hostile_names_are_escaped_in_a_treemap() -> None:
    names = ["</title><script>alert(1)</script>\u202e&", '"\x00\x1b[31m', "a." * 5000 + "w", "", ".", "..", "a", "a.b"]
    names += ["9" * 5000, "x." + "\u00b2" * 20, "\ud800", "\u91cd\u307f" * 40]
    svg = treemap([row(name, 10 + n, 10) for n, name in enumerate(names)], path="</title>\u202e", kind="save")
    svg.encode()
    root = ET.fromstring(svg)
    assert "<script" not in svg
    assert not any(character in svg for character in "\u202e\x00\x1b\ud800")
    found = [lines[0] for lines, _, _ in areas(root)]
    assert "</title><script>alert(1)</script>?&" in found
    assert "(no name)" in found
    assert len(found) == len(names)
    assert max(map(len, found)) <= 200


def test_tensors_without_elements_or_size_are_counted_and_not_drawn() -> None:
    rows = [row("w", 4, 4), row("empty", 0, 4), TensorRow("unknown", "?", None, None, (), 0, "x")]
    root = draw(rows)
    assert [lines[0] for lines, _, _ in areas(root)] == ["w"]
    assert "huggingface · 16 parameters in 1 tensor · 32 B · 2 without elements or of unknown size" in texts(root)
    with pytest.raises(NotFoundError, match="no tensor"):
        draw(rows[1:])
