"""Rules, files and tensors that do not fit a conversion are refused with the reason."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import CommandLine
from converted import LLAMA3, fused, merged, rule, same, titan
from safetensors.numpy import load_file, save_file
from stored import flip_bit

import statexchange as sx
from statexchange.checkpoint.merge import merge_checkpoint
from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    StateExchangeError,
    UnsafeError,
    UnsupportedError,
)


@pytest.mark.parametrize(
    ("tensors", "rule", "error", "message"),
    [
        ({"0.a": (2, 2)}, fused(), IncompleteError, "'{n}.b'"),
        ({"0.a": (2, 2), "0.b": (2, 3)}, fused(), InvalidArgumentError, "do not fuse"),
        ({"0.a": (2, 2), "0.b": (3, 2)}, fused(groups=2), InvalidArgumentError, "in 2 groups"),
        ({"0.a": (2, 2), "0.b": (4, 2)}, fused(sizes=[1, 1]), InvalidArgumentError, "ratios"),
        ({"0.a": (2,), "1.a": (2,)}, {"from": "{n}.a", "to": "c"}, UnsafeError, "to two tensors"),
        ({"0.a": (2,), "2.a": (2,)}, {"from": "{n}.a", "to": "c", "stack": ["n"]}, IncompleteError, "some are missing"),
        (
            {"0.a": (2,), "1.a": (3,)},
            {"from": "{n}.a", "to": "c", "stack": ["n"]},
            InvalidArgumentError,
            "shapes differ",
        ),
        ({"x.a": (2,)}, {"from": "{n}.a", "to": "c", "stack": ["n"]}, InvalidArgumentError, "is no number"),
        ({"a": ()}, {"from": "a", "to": "{n}", "unstack": ["n"]}, InvalidArgumentError, "leading dims"),
        (
            {"a": (2,)},
            {"from": "a", "to": "b", "values": [{"split": {"dim": 1, "sizes": [1]}}]},
            InvalidArgumentError,
            "no dim 1",
        ),
        (
            {"a": (3,)},
            {"from": "a", "to": ["b", "c"], "values": [{"split": {"sizes": [1, 1]}}]},
            InvalidArgumentError,
            "equal parts",
        ),
        (
            {"a": (3,)},
            {"from": "a", "to": "b", "values": [{"split": {"sizes": [1, 2]}}]},
            InvalidArgumentError,
            "make 2 tensors",
        ),
        ({"a": (3,)}, {"from": "a", "to": "b", "values": [{"unpad": {"to": 4}}]}, InvalidArgumentError, "unpad to 4"),
        (
            {"a": (3, 2)},
            {"from": "a", "to": "b", "values": [{"transpose": {"order": [0]}}]},
            InvalidArgumentError,
            "does not fit",
        ),
    ],
)
def test_tensors_that_do_not_fit_a_rule_are_named(
    tmp_path: Path,
    tensors: dict[str, tuple[int, ...]],
    rule: dict[str, Any],
    error: type[StateExchangeError],
    message: str,
) -> None:
    save_file({name: np.zeros(shape, "f4") for name, shape in tensors.items()}, tmp_path / "s.safetensors")
    with pytest.raises(error, match=message):
        merge_checkpoint(tmp_path / "s.safetensors", tmp_path / "out", convert={"rules": [rule]})
    assert not (tmp_path / "out").exists()


def test_tensors_of_different_dtypes_do_not_become_one(tmp_path: Path) -> None:
    save_file({"0.a": np.zeros(2, "f4"), "0.b": np.zeros(2, "f8")}, tmp_path / "s.safetensors")
    with pytest.raises(UnsupportedError, match="different dtypes"):
        merge_checkpoint(tmp_path / "s.safetensors", tmp_path / "out", convert={"rules": [fused()]})


@pytest.mark.parametrize(
    ("conversion", "message"),
    [
        ([], "is not a conversion"),
        ({"rules": {}}, "rules are a list"),
        ({"rule": []}, "is not a conversion"),
        ({"rules": [{"from": "a"}]}, "a rule has 'from' and 'to'"),
        ({"rules": [{"from": [], "to": "b"}]}, "empty 'from'"),
        ({"rules": [{"from": "a{", "to": "b"}]}, "not a name pattern"),
        ({"rules": [{"from": "{n}.{n}", "to": "b"}]}, "occurs twice"),
        ({"rules": [{"from": "a", "to": "{n}"}]}, "placeholders of 'to'"),
        ({"rules": [{"from": "a", "to": ["b", "c"]}]}, "needs values"),
        ({"rules": [], "numbers": {"n": {"key": "x"}}}, "a number is like"),
        ({"rules": [], "numbers": {"n": {"value": "import os"}}}, "neither a number nor an expression"),
        (rule({"rotate": {}}), "is no operation; there are permute"),
        (rule({"permute": {"shape": [2], "order": [1]}}), "not an order"),
        (rule({"permute": {"shape": [2], "order": [0, 1]}}), "1 sizes and an order of 2"),
        (rule({"permute": {"order": [0]}}), "needs 'shape'"),
        (rule({"transpose": {"order": [0], "dims": 2}}), "no option 'dims'"),
        (rule({"split": {"sizes": [0]}}), "neither a number"),
        (rule({"pad": {"to": 2.5}}), "neither a number"),
        (rule({"split": {"sizes": [1]}}, stack=["n"]), "stack or unstack"),
    ],
)
def test_a_file_that_is_no_conversion_is_refused_with_the_reason(
    tmp_path: Path, call: CommandLine, conversion: Any, message: str
) -> None:
    save_file({"a": np.zeros(2, "f4")}, tmp_path / "s.safetensors")
    (tmp_path / "own.json").write_text(json.dumps(conversion))
    code, _, err = call("merge", tmp_path / "s.safetensors", tmp_path / "out", "--convert", tmp_path / "own.json")
    assert code == 2
    assert message in err


def test_a_rule_without_an_inverse_is_refused_in_the_other_direction(tmp_path: Path) -> None:
    save_file({"0.ab": np.zeros(4, "f4")}, tmp_path / "s.safetensors")
    (tmp_path / "own.json").write_text(json.dumps({"rules": [fused()]}))
    with pytest.raises(InvalidArgumentError, match="without 'sizes'"):
        merge_checkpoint(tmp_path / "s.safetensors", tmp_path / "out", convert=f"inverse:{tmp_path / 'own.json'}")


@pytest.mark.parametrize("name", ["a.w", "b"])
def test_bytes_that_differ_from_their_digest_are_found_in_tensors_that_are_cut(tmp_path: Path, name: str) -> None:
    sx.export_checkpoint({"a.w": np.arange(8, dtype="f4"), "b": np.arange(8, dtype="f4")}, tmp_path / "s")
    rules = [
        {"from": "{n}.w", "to": ["{n}.x", "{n}.y"], "values": [{"split": {"sizes": [1, 1]}}]},
        {"from": "b", "to": "c"},
    ]
    found = merged(tmp_path / "s", tmp_path / "whole", convert={"rules": rules})
    assert same(
        found, {"a.x": np.arange(4, dtype="f4"), "a.y": np.arange(4, 8, dtype="f4"), "c": np.arange(8, dtype="f4")}
    )
    file = tmp_path / "s" / "model.safetensors"
    flip_bit(file, file.stat().st_size - (40 if name == "a.w" else 4))
    with pytest.raises(CorruptError, match="digest") as caught:
        merge_checkpoint(tmp_path / "s", tmp_path / "out", convert={"rules": rules})
    assert caught.value.name in (name, "c")
    assert not (tmp_path / "out").exists()


def test_wrappers_prefixes_are_removed_before_and_empty_tensors_stay(tmp_path: Path) -> None:
    arrays = {"module.a": np.zeros((0, 3), "f4"), "module.b": np.zeros((2, 3), "f4"), "module.s": np.ones((), "f4")}
    save_file(arrays, tmp_path / "s.safetensors")
    rules = [{"from": "a", "to": "A", "values": [{"transpose": {"order": [1, 0]}}]}, {"from": "{x}", "to": "{x}.w"}]
    report = merge_checkpoint(tmp_path / "s.safetensors", tmp_path / "out", convert={"rules": rules})
    expected = {"A": np.zeros((3, 0), "f4"), "b.w": arrays["module.b"], "s.w": arrays["module.s"]}
    assert same(load_file(tmp_path / "out" / "model.safetensors"), expected)
    assert any("module." in note for note in report.notes)


def test_a_tied_tensor_that_differs_is_refused(tmp_path: Path) -> None:
    rows = np.ones((2, 2), "f4")
    save_file({"tok_embeddings.weight": rows, "lm_head.weight": rows + 1}, tmp_path / "s.safetensors")
    config = {"config.json": json.dumps({"tie_word_embeddings": True})}
    with pytest.raises(StateExchangeError, match="listed as tied"):
        merge_checkpoint(tmp_path / "s.safetensors", tmp_path / "out", convert=LLAMA3, files_from=config)


def test_a_layouts_reductions_go_with_their_tensor(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    for rank in range(2):
        save_file({"w.scale": np.full(1, rank, "f4")}, tmp_path / "ranks" / f"rank-{rank}.safetensors")
    convert = {"rules": [{"from": "{n}.scale", "to": "{n}.weight_scale"}]}
    found = merged(tmp_path / "ranks", tmp_path / "out", layout={"*.scale": {"reduce": "max"}}, convert=convert)
    assert same(found, {"w.weight_scale": np.ones(1, "f4")})


def test_a_dry_run_shows_the_converted_tensors(tmp_path: Path, call: CommandLine) -> None:
    options = ["--convert", LLAMA3, "--convert-with", "n_heads=4", "--dry-run"]
    code, out, _ = call("merge", titan("fused"), tmp_path / "hf", *options)
    assert code == 0
    assert "model.layers.1.self_attn.q_proj.weight" in out
    assert call("merge", titan("fused"), tmp_path / "hf", "--convert-with", "heads")[0] == 2


@pytest.mark.parametrize("convert_with", [None, {"vocab_size": 0}])
def test_a_dim_is_not_cut_off_at_0(tmp_path: Path, convert_with: dict[str, int] | None) -> None:
    save_file({"w": np.arange(4.0)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"vocab_size": 0}')
    rules = {
        "numbers": {"vocab_size": {"config": "vocab_size"}},
        "rules": [{"from": "w", "to": "a", "values": [{"unpad": {"to": "vocab_size"}}]}],
    }
    with pytest.raises(InvalidArgumentError, match="vocab_size is 0"):
        merge_checkpoint(tmp_path, tmp_path / "out", convert=rules, convert_with=convert_with)
