"""Layouts and files that do not fit are refused; a layout is suggested where shapes allow few."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import CommandLine
from layout_files import refuse, write_ranks
from random_layouts import State
from safetensors.torch import load_file, save_file

import statexchange as sx
from statexchange.checkpoint.merge import merge_checkpoint
from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    ReplicaError,
    UnsupportedError,
)
from statexchange.sharding.rules import Layout

TWO_RANKS = [{"w": torch.zeros(2, 4)}, {"w": torch.ones(2, 4)}]
WRONG: list[tuple[Any, str]] = [
    ({"w": {"dim": 0, "axes": "tp"}}, "unknown key 'axes'"),
    ({"mesh": {"tp": 2}, "rule": {}}, "unknown key 'rule'"),
    ({"w": "columns"}, "'w' must be"),
    ({"w": {"dim": "0"}}, "'w': a rule"),
    ({"w": {"dim": 0, "blocks": [0, 1]}}, "with a dim"),
    ({"w": {"dim": 0, "blocks": []}}, "with a dim"),
    ({"w": {"dim": 0, "split": {"w": {"a": 1}}, "blocks": [1]}}, "with a dim"),
    ({"w": {"reduce": "sum"}}, "'w' must be"),
    ({"w": [{"dim": 0}, {"dim": 0}]}, "two ways"),
    ({"w": ["colwise", {"dim": 0}]}, "two ways"),
    ({"w": {"dim": 0}, "v.*": {"dim": 0}}, r"pattern 'v\.\*'"),
    ({"model.w": "colwise"}, r"pattern 'model\.w'"),
    ({"w": "colwise", "v": {"dim": 0}}, "pattern 'v'"),
    ({"w": {"dim": 0}, "lm_head": "colwise"}, "pattern 'lm_head'"),
    ({"w": {"dim": 0, "axis": "tp"}}, "axis 'tp'"),
    ({"mesh": {"tp": 2, "pp": 1}, "rules": {"w": {"dim": 0}}}, 'needs an "axis"'),
    ({"mesh": {"tp": 1}, "rules": {"w": {"dim": 0}}}, r"mesh \(tp 1\)"),
    ({"mesh": [2], "rules": {}}, "mesh must be"),
    (["w"], "layout must map"),
    ({"mesh": {"tp": 2}, "rules": [["w"]]}, '"rules" must map'),
    ({"mesh": {"tp": 2}, "rules": {"w": {"dim": 0, "axis": [["tp"]]}}}, r"axis \['tp'\]"),
    ({"w": {"reduce": ["max"]}}, "reduce"),
    ({"w": {"dim": 2}}, r"dim 2, .*\(2, 4\).*rank0"),
    ({"w": {"dim": 0, "blocks": [2, 1]}}, r"blocks \[2, 1\].*rank 0"),
    ({"w": {"dim": 0, "split": {"qkv": {"q": 1, "k": 1}}}}, "part 'qkv'"),
    ({"w": {"renumber": "experts"}}, "no number"),
    ({"w": {"global_shape": [4, 4], "boxes": [[[[0, 0], [2, 4]]]]}}, "for 1 ranks"),
    ({"w": {"global_shape": [4, 4], "offsets": [3, 0], "shape": [2, 4]}}, "outside"),
    ({"w": {"global_shape": [4, 4], "offsets": [2, 0], "shape": [1, 4]}}, "differ in shape"),
]


@pytest.mark.parametrize(("layout", "match"), WRONG)
def test_a_layout_that_does_not_fit_the_files_is_refused(tmp_path: Path, layout: Any, match: str) -> None:
    refuse(InvalidArgumentError, match, tmp_path, layout, *TWO_RANKS)


def test_a_mesh_shows_which_rank_is_missing(tmp_path: Path) -> None:
    layout = {"mesh": {"tp": 3}, "rules": {"w": {"dim": 0, "axis": "tp"}}}
    error = refuse(IncompleteError, r"mesh \(tp 3\).* 2: copy", tmp_path, layout, *TWO_RANKS)
    assert (error.rank, error.path) == (2, str(tmp_path / "in"))


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["rank-00000-of-00002.safetensors"], "one of 2 files, by its name"),
        (["model-00002-of-00002.bin"], "one of 2 files, by its name"),
        (["model_world_size_2_rank_0.pt"], "one of 2 files, by its name"),
        (["rank_1.pt"], "that of rank 1, by its name"),
        (["rank_0.pt", "rank_1.pt"], r"those of others lie beside it \(rank_1.pt\)"),
        (["rank-0.safetensors", "rank-1.safetensors"], r"those of others lie beside it \(rank-1.safetensors\)"),
    ],
)
def test_the_file_of_one_rank_alone_is_not_merged_by_a_layout(
    tmp_path: Path, call: CommandLine, names: list[str], text: str
) -> None:
    for name in names:
        (save_file if name.endswith(".safetensors") else torch.save)(TWO_RANKS[0], tmp_path / name)
    file = tmp_path / names[0]
    with pytest.raises(IncompleteError, match=rf"{text}.* {tmp_path}"):
        merge_checkpoint(file, tmp_path / "out", layout={"w": {"dim": 0}})
    for arguments in (["info", file], ["merge", file, tmp_path / "plain"]):
        code, out, err = call(*arguments)
        assert code == 0
        assert f"give the directory, {tmp_path}" in out + err


def test_the_file_of_the_only_rank_is_merged_by_a_layout(tmp_path: Path) -> None:
    for number, name in enumerate(("rank-0.safetensors", "rank-00000-of-00001.safetensors", "tensors.safetensors")):
        file = tmp_path / f"alone{number}" / name
        file.parent.mkdir()
        save_file(TWO_RANKS[0], file)
        merge_checkpoint(file, tmp_path / "out", layout={"w": {"dim": 0}}, overwrite=True)


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ([(3, 2), (3, 2)], r'\{"w": \{"dim": 0\}\}.*\{"w": \{"dim": 1\}\} .*\[3, 2\]'),
        ([(3,), (3,)], r'\(--layout FILE\.json\): \{"w": \{"dim": 0\}\}; '),
        ([(3, 2), (3, 1)], r'layout: \{"w": \{"dim": 1\}\}'),
        ([(2, 3, 2), (2, 4, 2)], r'layout: \{"w": \{"dim": 1\}\}'),
    ],
)
def test_a_layout_is_suggested_where_shapes_allow_few(tmp_path: Path, shapes: list[tuple[int, ...]], text: str) -> None:
    states = [{"w": torch.full(shape, float(rank))} for rank, shape in enumerate(shapes)]
    with pytest.raises((ReplicaError, CorruptError), match=text):
        merge_ranks(tmp_path, states)


@pytest.mark.parametrize("shapes", [[(3, 2), (2, 3)], [(3,), (3, 1)], [(), ()]])
def test_no_layout_is_suggested_where_none_fits(tmp_path: Path, shapes: list[tuple[int, ...]]) -> None:
    states = [{"w": torch.full(shape, float(rank))} for rank, shape in enumerate(shapes)]
    with pytest.raises((ReplicaError, CorruptError)) as caught:
        merge_ranks(tmp_path, states)
    assert "give a layout" not in str(caught.value)


def merge_ranks(path: Path, states: list[State]) -> None:
    for rank, state in enumerate(states):
        torch.save(state, path / f"rank{rank}.pt")
    merge_checkpoint(path, path / "out")


def test_sizes_that_do_not_fit_name_tensor_ranks_and_file(tmp_path: Path) -> None:
    states = [{"w": torch.zeros(2, 4)}, {"w": torch.zeros(2, 3)}]
    match = r'\(2, 4\) .*\(2, 3\): .*\{"w": \{"dim": 1\}\}'
    error = refuse(InvalidArgumentError, match, tmp_path, {"w": {"dim": 0}}, *states)
    assert (error.name, error.rank, error.path) == ("w", 1, str(tmp_path / "in" / "rank1.safetensors"))


def test_copies_along_an_axis_must_have_one_size(tmp_path: Path) -> None:
    states = [{"w": torch.zeros(n)} for n in (2, 2, 3, 2)]
    layout = {"mesh": {"dp": 2, "tp": 2}, "rules": {"w": {"dim": 0, "axis": "tp"}}}
    error = refuse(InvalidArgumentError, r' 0 .* 2 .*"axis" must', tmp_path, layout, *states)
    assert (error.name, error.rank) == ("w", 2)


def test_a_part_that_no_rank_holds_is_incomplete(tmp_path: Path) -> None:
    states = [{"w": torch.zeros(2)}, {"w": torch.ones(2)}, {"v": torch.zeros(1)}]
    layout = {"mesh": {"tp": 3}, "rules": {"w": {"dim": 0}}}
    error = refuse(IncompleteError, r"index \[2\] along \['tp'\]", tmp_path, layout, *states)
    assert error.name == "w"


def test_errors_without_a_layout_print_a_rule(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    error = refuse(ReplicaError, r'--layout FILE\.json\): \{"w": \{"dim": 0\}\}', tmp_path / "a", {}, *TWO_RANKS)
    assert (error.name, error.rank) == ("w", 1)
    (tmp_path / "b").mkdir()
    states = [{"w": torch.zeros(2)}, {"w": torch.zeros(3)}]
    refuse(CorruptError, r'global_shape; .*\{"w": \{"dim": 0\}\}', tmp_path / "b", {}, *states)


def test_two_tensors_cannot_become_one(tmp_path: Path) -> None:
    states = [{"qkv": torch.zeros(2), "q": torch.zeros(1)}]
    layout = {"qkv": {"dim": 0, "split": {"qkv": {"q": 1, "k": 1}}}}
    refuse(InvalidArgumentError, "two tensors", tmp_path, layout, *states)


def test_complex_numbers_have_no_maximum(tmp_path: Path) -> None:
    states = [{"w": torch.zeros(2, dtype=torch.complex64)}] * 2
    refuse(UnsupportedError, "complex numbers", tmp_path, {"w": {"reduce": "max"}}, *states)


@pytest.mark.parametrize(
    "names",
    [
        [f"rank{number}" for number in range(4)],
        [f"rank{number}" for number in range(1, 5)],
        [f"{number}_of_a_job" for number in range(1, 5)],
        ["a_0", "a_1", "b_0", "b_1"],
        ["a_rank0", "a_rank1", "b_rank0", "b_rank1"],
    ],
    ids=lambda names: names[0],
)
def test_ranks_may_be_counted_from_1_and_in_two_series(names: list[str], tmp_path: Path) -> None:
    w = torch.randn(8, 3)
    (tmp_path / "in").mkdir()
    for name, rows in zip(names, w.chunk(4), strict=True):
        save_file({"w": rows.contiguous()}, tmp_path / "in" / f"{name}.safetensors")
    merge_checkpoint(tmp_path / "in", tmp_path / "out", layout={"w": {"dim": 0}})
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], w)


def test_a_manifest_whose_boxes_leave_a_gap_or_overlap_is_refused(tmp_path: Path) -> None:
    """They would be proven by nobody else: a flipped byte in the gap belongs to no digest."""
    w = torch.randn(8, 3)
    write_ranks(tmp_path / "in", *({"w": part.contiguous()} for part in w.chunk(4)))
    merge_checkpoint(tmp_path / "in", tmp_path / "out", layout={"w": {"dim": 0}})
    manifest = tmp_path / "out" / "statexchange.json"
    record = json.loads(manifest.read_text())
    boxes = record["tensors"]["w"]["boxes"]
    overlapping = [*boxes[:3], [[4, 0], [4, 3], *boxes[3][2:]]]
    for changed, error in ((boxes[:-1], IncompleteError), (overlapping, CorruptError)):
        record["tensors"]["w"]["boxes"] = changed
        manifest.write_text(json.dumps(record))
        with pytest.raises(error):
            merge_checkpoint(tmp_path / "out", tmp_path / "again")
        with pytest.raises(error):
            sx.load_checkpoint({"w": torch.zeros(8, 3)}, tmp_path / "out")
        with pytest.raises(error):
            sx.open_checkpoint(tmp_path / "out")["w"].read()


def test_a_rule_that_cuts_one_dim_twice_is_refused_however_it_names_the_dim() -> None:
    steps = [{"dim": 0, "axis": "tp"}, {"dim": -2, "axis": "pp"}]
    rule = Layout.parse({"mesh": {"pp": 2, "tp": 2}, "rules": {"w": steps}}).rule_for("w")
    assert rule is not None
    with pytest.raises(InvalidArgumentError, match="sharded twice"):
        rule.parts("w", (2, 3), 0)


def test_explicit_boxes_may_be_joined_along_a_dim_that_is_counted_from_the_end() -> None:
    boxes = [[[[0, 0], [2, 2]]], [[[0, 2], [2, 2]]]]
    rules = [Layout.parse({"w": {"global_shape": [2, 4], "boxes": boxes, "dim": dim}}).rule_for("w") for dim in (1, -1)]
    assert [rule.parts("w", (2, 2), 1) for rule in rules if rule is not None] == [rules[0].parts("w", (2, 2), 1)] * 2
    for dim in (2, -3):
        rule = Layout.parse({"w": {"global_shape": [2, 4], "boxes": boxes, "dim": dim}}).rule_for("w")
        assert rule is not None
        with pytest.raises(InvalidArgumentError, match=f"dim {dim}, but"):
            rule.parts("w", (2, 2), 0)
