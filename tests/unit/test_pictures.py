"""Pictures of which rank or file supplied which bytes: SVG, and bars of text."""

import os
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from drawn import SVG
from stored import write_raw
from workspaces import held, write_round

from statexchange.checkpoint.merge import merge_checkpoint
from statexchange.errors import NotFoundError
from statexchange.formats.registry import open_source
from statexchange.report.supply import Supplied, Supply, cells_of, nbytes_by_rank, supply_of, supply_picture
from statexchange.sharding.shards import Box
from statexchange.storage.tensorfile import ShardData
from statexchange.units import format_bytes, format_shape

Part = tuple[str, Sequence[int], Sequence[int], Sequence[int]]


def write_workspace(root: Path, ranks: Sequence[Sequence[Part]]) -> Path:
    """Write a workspace of U8 tensors; parts are (name, global shape, offsets, shape)."""
    write_round(root, *([zeros(*part) for part in parts] for parts in ranks))
    return root


def zeros(name: str, shape: Sequence[int], offsets: Sequence[int], size: Sequence[int]) -> ShardData:
    box = Box(tuple(offsets), tuple(size))
    return held(name, bytes(box.numel), global_shape=tuple(shape), boxes=(box,))


@pytest.fixture
def quarters(tmp_path: Path) -> Path:
    """Write a matrix in four unequal quarters, a vector in halves, a scalar, and a replicated vector."""
    shape = (10, 8)
    ranks = [
        [("matrix", shape, (0, 0), (3, 6)), ("vector", (4,), (0,), (2,)), ("scalar", (), (), ())],
        [("matrix", shape, (0, 6), (3, 2)), ("vector", (4,), (2,), (2,))],
        [("matrix", shape, (3, 0), (7, 6)), ("same", (3,), (0,), (3,))],
        [("matrix", shape, (3, 6), (7, 2)), ("same", (3,), (0,), (3,))],
    ]
    return write_workspace(tmp_path / "ws", ranks)


def supply_at(path: str | os.PathLike[str]) -> Supply:
    with open_source(path, strict=False) as source:
        return supply_of(source)


def picture(path: str | os.PathLike[str]) -> str:
    return supply_picture(supply_at(path))


def tensors_of(path: str | os.PathLike[str]) -> list[Supplied]:
    return list(supply_at(path).tensors)


def drawn(svg: str) -> dict[str, list[dict[str, str]]]:
    """Return the rectangles of each tensor's group, its frame first."""
    root = ET.fromstring(svg)
    return {g.findtext(f"{SVG}title", ""): [r.attrib for r in g.iter(f"{SVG}rect")] for g in root.iter(f"{SVG}g")}


def legend(svg: str) -> dict[str, str]:
    """Return the texts of the legend by colour."""
    children = list(ET.fromstring(svg))
    pairs = pairwise(children)
    return {a.get("fill", ""): b.text or "" for a, b in pairs if a.tag == f"{SVG}rect" and " · " in (b.text or "")}


def shares(rectangles: list[dict[str, str]]) -> dict[str, float]:
    def area(rectangle: dict[str, str]) -> float:
        return float(rectangle["width"]) * float(rectangle["height"])

    frame, *cells = rectangles
    found: dict[str, float] = {}
    for cell in cells:
        found[cell["fill"]] = found.get(cell["fill"], 0) + area(cell) / area(frame)
    return found


def test_ranks_are_listed_by_what_they_supplied_largest_first(quarters: Path) -> None:
    tensors = tensors_of(quarters)
    assert [(t.name, t.nbytes, dict(nbytes_by_rank([t]))) for t in tensors] == [
        ("matrix", 80, {0: 18, 1: 6, 2: 42, 3: 14}),
        ("vector", 4, {0: 2, 1: 2}),
        ("same", 3, {2: 3}),
        ("scalar", 1, {0: 1}),
    ]


def test_a_published_directory_shows_the_same_ranks(quarters: Path, tmp_path: Path) -> None:
    merge_checkpoint(quarters, tmp_path / "out")
    (matrix, *_), (expected, *_) = tensors_of(tmp_path / "out"), tensors_of(quarters)
    assert isinstance(matrix, Supplied)
    assert nbytes_by_rank([matrix]) == nbytes_by_rank([expected])
    assert "rank 3" in picture(tmp_path / "out")


def test_every_box_is_drawn_to_scale(quarters: Path) -> None:
    svg = picture(quarters)
    colours = {text.split(" · ")[0]: colour for colour, text in legend(svg).items()}
    groups = drawn(svg)
    found = shares(groups["matrix"])
    expected = {"rank 0": 18 / 80, "rank 1": 6 / 80, "rank 2": 42 / 80, "rank 3": 14 / 80}
    assert {rank: pytest.approx(share, rel=1e-3) for rank, share in expected.items()} == {
        rank: found[colours[rank]] for rank in expected
    }
    frame, first, *_ = groups["matrix"]
    assert (first["x"], first["y"]) == (frame["x"], frame["y"])
    assert float(first["width"]) == pytest.approx(float(frame["width"]) * 6 / 8, rel=1e-3)
    assert float(first["height"]) == pytest.approx(float(frame["height"]) * 3 / 10, rel=1e-3)
    assert shares(groups["scalar"]) == {colours["rank 0"]: 1.0}
    assert shares(groups["vector"]) == {colours["rank 0"]: 0.5, colours["rank 1"]: 0.5}


def test_the_legend_counts_the_bytes(quarters: Path) -> None:
    assert list(legend(picture(quarters)).values()) == [
        "rank 0 · 21 B · 23.9%",
        "rank 1 · 8 B · 9.1%",
        "rank 2 · 45 B · 51.1%",
        "rank 3 · 14 B · 15.9%",
    ]


def test_the_picture_has_no_links_and_has_a_text_for_screen_readers(quarters: Path) -> None:
    svg = picture(quarters)
    root = ET.fromstring(svg)
    assert root.get("role") == "img"
    assert root.findtext(f"{SVG}title") == "Which rank supplied which bytes of ws"
    assert "rank 2 · 45 B · " in root.findtext(f"{SVG}desc", "")
    assert svg.count("http") == 1, "the XML namespace is the only address"
    assert {text.text for text in root.iter(f"{SVG}text") if text.get("class") == "r"} >= {"0", "1", "2", "3"}


def test_bytes_that_no_rank_supplied_are_shown(tmp_path: Path) -> None:
    root = write_workspace(tmp_path / "ws", [[("m", (4, 4), (0, 0), (1, 4))], []])
    svg = picture(root)
    frame, *cells = drawn(svg)["m"]
    assert frame["fill"] == "url(#not-there)"
    assert len(cells) == 1
    assert "not supplied · 12 B · 75.0%" in svg


def test_three_dims_that_are_all_cut_keep_their_shares(tmp_path: Path) -> None:
    shape = (2, 3, 4)
    corners = [((a, b, c), (1, 1 + b, 2)) for a in (0, 1) for b in (0, 1) for c in (0, 2)]
    root = write_workspace(tmp_path / "ws", [[("cube", shape, *corner)] for corner in corners])
    found = shares(drawn(picture(root))["cube"])
    assert sum(found.values()) == pytest.approx(1, rel=1e-3)
    assert sorted(found.values()) == [pytest.approx(n / 24, rel=1e-2) for n in (2, 2, 2, 2, 4, 4, 4, 4)]


def test_the_smallest_of_many_tensors_are_summed(tmp_path: Path) -> None:
    ranks = [[(f"t{number:02d}", (2, 2), (rank, 0), (1, 2)) for number in range(50)] for rank in (0, 1)]
    svg = picture(write_workspace(tmp_path / "ws", ranks))
    assert "and 30 more, summed by rank" in svg
    groups = drawn(svg)
    assert len(groups) == 21
    assert list(shares(groups["and 30 more, summed by rank"]).values()) == [0.5, 0.5]
    assert len(svg) < 30_000


def test_many_ranks_have_their_own_colours_and_a_legend_of_the_first(tmp_path: Path) -> None:
    ranks = [[("w", (40, 2), (rank, 0), (1, 2))] for rank in range(40)]
    root = write_workspace(tmp_path / "ws", ranks)
    svg = picture(root)
    assert len({cell["fill"] for cell in drawn(svg)["w"][1:]}) == 40
    assert list(legend(svg).values())[15:] == ["rank 15 · 2 B · 2.5%", "24 more · 48 B · 60.0%"]


def test_names_are_escaped(tmp_path: Path) -> None:
    name = "</title><script>alert(1)</script>\u202e&"
    svg = picture(write_workspace(tmp_path / "ws", [[(name, (4,), (0,), (4,))]]))
    assert "<script" not in svg
    assert "</title><script>alert(1)</script>?&" in drawn(svg)
    assert "\u202e" not in svg


def test_without_ranks_files_are_shown(tmp_path: Path) -> None:
    for number in (1, 2):
        write_raw(tmp_path / f"model-{number}.safetensors", {f"t{number}": ("U8", [3], b"abc")})
    svg = picture(tmp_path)
    assert "Which file supplied which bytes" in svg
    assert list(legend(svg).values()) == [f"{n}: model-{n + 1}.safetensors · 3 B · 50.0%" for n in (0, 1)]


def test_a_picture_of_no_tensor_or_path_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no tensor"):
        picture(write_workspace(tmp_path / "ws", [[]]))
    with pytest.raises(NotFoundError, match="no such path"):
        picture(tmp_path / "nowhere")


def test_bytes_and_shapes_are_formatted_for_people() -> None:
    sizes = [0, 999, 1000, 4_214_400, 99_949, 99_950, 999_499, 999_500, 5 * 10**9, 3 * 10**15]
    assert [format_bytes(size) for size in sizes] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "4.21 MB",
        "99.9 kB",
        "100 kB",
        "999 kB",
        "1.00 MB",
        "5.00 GB",
        "3,000 TB",
    ]
    assert [format_shape(shape) for shape in ((), (3,), (2, 3))] == ["[]", "[3]", "[2,3]"]


def test_a_picture_changes_no_file(quarters: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in quarters.rglob("*")}
    picture(os.fspath(quarters))
    assert {path: path.stat().st_mtime_ns for path in quarters.rglob("*")} == before


def test_boxes_that_make_too_many_cells_are_summed_by_rank(tmp_path: Path) -> None:
    """Each box reaches from the first row to the last but two, so that all of them split each other."""
    boxes = tuple((Box((row, 0), (20_000 - row, 1)), row % 2) for row in range(10_000))
    began = time.process_time()
    source = write_workspace(tmp_path, [[("w", (4, 4), (0, 0), (4, 4))]])
    many = Supplied("many", "U8", (20_000, 1), boxes)
    few = tensors_of(source)
    assert [len(cells_of(tensor)) for tensor in (many, *few)] == [2, 1]
    assert time.process_time() - began < 5


def test_one_tensor_of_many_ranks_has_a_legend_of_the_first(tmp_path: Path) -> None:
    ranks = [[("w", (50, 2), (rank, 0), (1, 2)), ("other", (50, 2), (rank, 0), (1, 2))] for rank in range(40)]
    root = write_workspace(tmp_path / "ws", ranks)
    svg = supply_picture(supply_at(root).select({"w"}))
    assert "24 more · 48 B · 48.0%" in svg
    assert "not supplied · 20 B · 20.0%" in svg
    assert drawn(svg)["w"][0]["fill"] == "url(#not-there)"
    assert list(drawn(svg)) == ["w"]
    with pytest.raises(NotFoundError, match="no tensor to draw"):
        supply_picture(supply_at(root).select({"v"}))
