"""Tensors that a merge names in its notes: what a cast makes infinite, leaves or narrows, and what is missing."""

import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import CommandLine
from safetensors.torch import load_file, save_file
from warm_python import warm_python

import statexchange as sx
from statexchange.checkpoint.merge import MergeReport, merge_checkpoint
from statexchange.errors import IncompleteError
from statexchange.report.scan import scan
from statexchange.report.summary import summarize
from statexchange.report.verify import verify
from statexchange.tensors import converted, count_overflows, numpy_dtype

FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


def merged(tensors: dict[str, torch.Tensor], path: Path, **options: object) -> MergeReport:
    save_file(tensors, path / "model.safetensors")
    return merge_checkpoint(path / "model.safetensors", path / "out", **options)


def notes_with(report: object, word: str) -> list[str]:
    return [note for note in report.notes if word in note]


# Values that become infinite


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_finite_values_out_of_range_are_counted_as_torch_makes_them_infinite(source: str, target: str) -> None:
    edges = [65504.0, 65519.9, 65520.0, 65536.0, 3.38e38, 3.3961e38, 3.4028e38, 3.40283e38, 1e300]
    special = [float("inf"), float("-inf"), float("nan"), 0.0, 1.0]
    values = torch.tensor([*edges, *[-edge for edge in edges], *special], dtype=torch.float64).to(FLOATS[source])
    expected = int((values.to(FLOATS[target]).isinf() & values.isfinite()).sum())
    array = values.view(torch.uint8).numpy().view(numpy_dtype(source))
    if source != target:
        assert converted(array, target)[1] == expected
        assert count_overflows(array.tobytes(), source, target) == expected
        assert count_overflows(np.ones(3, numpy_dtype(source)).tobytes(), source, target) == 0


def test_a_merge_counts_what_a_cast_makes_infinite(tmp_path: Path) -> None:
    big = torch.ones(1200, 1000)  # more than a window
    big[0, :3] = 1e6
    big[-1, -1] = -1e6
    tensors = {"big": big, "fits": torch.full((3,), 65504.0), "inf": torch.tensor([float("inf")])}
    report = merged(tensors, tmp_path, dtype="float16")
    (note,) = notes_with(report, "infinite")
    assert re.search(r"\b4\b", note)
    assert "big (4)" in note
    assert "fits" not in note
    assert "inf (" not in note
    assert int(load_file(tmp_path / "out/model.safetensors")["big"].isinf().sum()) == 4
    assert not notes_with(merge_checkpoint(tmp_path / "model.safetensors", tmp_path / "wide", dtype="bf16"), "infinite")


KILLED = """
import os, signal, sys
from statexchange.checkpoint.merge import merge_checkpoint
kill = lambda done, _: done > 2000 and os.kill(os.getpid(), signal.SIGKILL)
merge_checkpoint(sys.argv[1], sys.argv[2], dtype="float16", max_shard_size=2000, threads=1, on_progress=kill)
"""


def test_a_resumed_merge_counts_what_the_killed_one_has_cast(tmp_path: Path) -> None:
    source, out = tmp_path / "model.safetensors", tmp_path / "out"
    save_file({name: torch.full((1000,), 1e6) for name in ("a", "b")}, source)
    killed = subprocess.run([warm_python("commands"), "-c", KILLED, str(source), str(out)], check=False)
    assert killed.returncode == -signal.SIGKILL
    report = merge_checkpoint(source, out, dtype="float16", max_shard_size=2000)
    assert len(report.reused) == 1
    (note,) = notes_with(report, "infinite")
    assert "a (1,000), b (1,000)" in note


# Tensors that keep their dtypes


def quantised() -> dict[str, torch.Tensor]:
    return {
        "l.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
        "l.weight_scale_inv": torch.ones(1, 1),
        "p.qweight": torch.ones(4, 4, dtype=torch.int32),
        "p.scales": torch.ones(4),
        "e.gate_up_proj_blocks": torch.ones(4, 4, dtype=torch.uint8),
        "n.weight": torch.ones(4, dtype=torch.bfloat16),
        "position_ids": torch.arange(4),
    }


def test_quantised_weights_and_their_scales_that_a_cast_leaves_are_named(tmp_path: Path) -> None:
    report = merged(quantised(), tmp_path, dtype="bfloat16")
    (note,) = notes_with(report, "quantised")
    assert note.startswith("5 ")
    for name in ("l.weight (F8_E4M3)", "l.weight_scale_inv (F32)", "p.qweight (I32)", "p.scales (F32)", "blocks (U8)"):
        assert name in note
    assert "n.weight" not in note
    assert "position_ids" not in note


def test_without_a_cast_of_them_quantised_weights_are_not_named(tmp_path: Path) -> None:
    assert not notes_with(merged(quantised(), tmp_path, dtype={"n.*": "float32"}), "quantised")
    assert not notes_with(merge_checkpoint(tmp_path / "model.safetensors", tmp_path / "same"), "quantised")


def test_scales_of_weights_in_int8_are_kept(tmp_path: Path) -> None:
    tensors = {"l.weight": torch.ones(4, 4, dtype=torch.int8), "l.weight_scale": torch.full((4, 1), 1 / 3)}
    merged(tensors, tmp_path, dtype="bfloat16")
    assert load_file(tmp_path / "out/model.safetensors")["l.weight_scale"].dtype == torch.float32


# Tensors that should stay wide


def mixed() -> dict[str, torch.Tensor]:
    tensors = {f"model.layers.{n}.mlp.gate.e_score_correction_bias": torch.linspace(7, 8, 64) for n in range(12)}
    tensors |= {f"model.layers.{n}.mlp.weight": torch.ones(64, 64, dtype=torch.bfloat16) for n in range(12)}
    return tensors | {"model.norm.weight": torch.full((64,), 1 / 3)}


def test_the_pattern_that_keeps_a_wide_tensor_is_shown_and_works(tmp_path: Path, call: CommandLine) -> None:
    report = merged(mixed(), tmp_path, dtype="bfloat16")
    (note,) = notes_with(report, "narrows")
    (name, dtype) = re.search(r'dtype=\{"(.*?)": "(.*?)", ', note).groups()
    (argument,) = re.findall(r'--dtype "(.*?)"', note)
    merge_checkpoint(tmp_path / "model.safetensors", tmp_path / "call", dtype={name: dtype, "*": "bfloat16"})
    options = ["--dtype", argument, "--dtype", "bfloat16"]
    assert call("merge", str(tmp_path / "model.safetensors"), str(tmp_path / "line"), *options)[0] == 0
    for way in ("call", "line"):
        written = load_file(tmp_path / way / "model.safetensors")[name]
        assert written.dtype == mixed()[name].dtype
        assert torch.equal(written, mixed()[name])


def test_a_model_in_one_dtype_is_cast_without_a_note_but_for_names_that_families_keep_wide(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.ones(8, 8), "a.norm.weight": torch.ones(8)}
    assert not notes_with(merged(tensors, tmp_path, dtype="bfloat16"), "narrows")
    (tmp_path / "named").mkdir()
    tensors["mlp.gate.e_score_correction_bias"] = torch.ones(8)
    (note,) = notes_with(merged(tensors, tmp_path / "named", dtype="bfloat16"), "narrows")
    assert "e_score_correction_bias (F32)" in note


def test_notes_of_an_export_are_those_of_a_merge(tmp_path: Path) -> None:
    tensors = mixed() | quantised()
    report = merged(tensors, tmp_path, dtype="float16")
    exported = sx.export_checkpoint(tensors, tmp_path / "exported", dtype="float16")
    words = ("quantised", "narrows")
    for word in words:
        assert notes_with(exported, word) == notes_with(report, word) != []


# Weights of shape [0]


def write_safetensors(state: dict[str, torch.Tensor], path: Path) -> None:
    save_file(state, path / "model.safetensors")


def write_bin(state: dict[str, torch.Tensor], path: Path) -> None:
    torch.save(state, path / "pytorch_model.bin")


def write_pt(state: dict[str, torch.Tensor], path: Path) -> None:
    torch.save({"model": state, "step": 3}, path / "state.pt")


WRITERS = [write_safetensors, write_bin, write_pt]


@pytest.mark.parametrize("write", WRITERS)
def test_weights_that_zero_3_left_empty_are_findings_and_are_named(write: Any, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    state = {"embed.weight": torch.empty(0), "norm.weight": torch.ones(4), "norm.bias": torch.empty(0)}
    write(state, source)
    path = source / "state.pt" if write is write_pt else source
    (finding,) = verify(path).findings
    assert isinstance(finding, IncompleteError)
    assert "embed.weight" in finding.message
    assert "norm.bias" in finding.message
    assert "norm.weight" not in finding.message
    (row,) = scan(tmp_path)
    assert row.status == "broken"
    assert "INCOMPLETE" in row.verdict
    assert summarize(path).problems
    (note,) = notes_with(merge_checkpoint(path, tmp_path / "out"), "[0]")
    assert "embed.weight" in note
    without = merge_checkpoint(path, tmp_path / "rest", exclude=["*embed*", "*bias"])
    assert not notes_with(without, "[0]")


def test_empty_tensors_that_may_be_meant_are_no_findings(tmp_path: Path) -> None:
    state = {"head.weight": torch.empty(0, 4), "head.bias": torch.empty(0), "cache": torch.empty(0)}
    report = merged(state, tmp_path)
    assert not notes_with(report, "[0]")
    assert not verify(tmp_path / "out").findings


def test_an_export_names_empty_weights(tmp_path: Path) -> None:
    report = sx.export_checkpoint({"l.weight": torch.empty(0)}, tmp_path / "out")
    assert notes_with(report, "l.weight")


# Quantised weights without their scales


LEFT_OUT = {
    "a.weight": (torch.ones(4, 4).to(torch.float8_e4m3fn), True),
    "a.weight_scale_inv": (torch.ones(1, 1), False),
    "g.qweight": (torch.ones(4, 4, dtype=torch.int32), True),
    "g.qzeros": (torch.ones(4, dtype=torch.int32), False),
    "g.scales": (torch.ones(4), False),
    "b.weight": (torch.ones(8, 1, dtype=torch.uint8), True),
    "b.weight.absmax": (torch.ones(1), False),
    "b.weight.quant_state.bitsandbytes__nf4": (torch.ones(9, dtype=torch.uint8), False),
    "i.weight": (torch.ones(4, 4, dtype=torch.int8), True),
    "i.SCB": (torch.ones(4), False),
    "m.up_proj_blocks": (torch.ones(4, dtype=torch.uint8), True),
    "m.up_proj_scales": (torch.ones(4, dtype=torch.uint8), False),
    "n.weight": (torch.ones(4), True),
}


def test_quantised_weights_without_their_scales_are_named(tmp_path: Path) -> None:
    tensors = {name: tensor for name, (tensor, _) in LEFT_OUT.items()} | {"n.scale": torch.ones(1)}
    report = merged(tensors, tmp_path, include=["*weight", "*_blocks"])
    (note,) = notes_with(report, "left out")
    for name, (_, is_kept) in LEFT_OUT.items():
        assert (f"{name} (" in note) != is_kept
    assert "n.scale" not in note
    for options in ({"exclude": "n.*"}, {"include": "n.weight"}, {}):
        report = merge_checkpoint(tmp_path / "model.safetensors", tmp_path / "out", overwrite=True, **options)
        assert not notes_with(report, "left out")
    exported = sx.export_checkpoint(tensors, tmp_path / "live", exclude="*absmax")
    assert notes_with(exported, "b.weight.absmax")
