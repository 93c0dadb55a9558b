"""What casts of live state make infinite: counted over all ranks, each box once, and the same notes on every rank."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import statexchange as sx
from statexchange.testing import run_ranks


def notes_with(report: Any, word: str) -> list[str]:
    return [note for note in report.notes if word in note]


def state(dtype: torch.dtype, fill: float | None = None) -> dict[str, Any]:
    """Return a sharded tensor with 5 large values, a replicated one with 2, and one without."""
    mesh = init_device_mesh("cpu", (sx.get_world_size(),))
    rows = torch.ones(8, 6)
    rows[0, 0] = rows[7, 5] = rows[3, 3] = 70000.0
    rows[4, :2] = -1e9
    both = torch.tensor([1e5, 1.0, -1e5])
    fits = torch.full((4, 4), 65504.0)
    whole = {"rows": (rows, [Shard(0)]), "columns": (rows.T, [Shard(1)]), "both": (both, [Replicate()])}
    tensors = {name: distribute_tensor(value, mesh, where) for name, (value, where) in whole.items()}
    plain = {"plain": both.clone(), "fits": fits}
    found = {name: tensor.to(dtype) for name, tensor in {**tensors, **plain}.items()}
    return found if fill is None else {name: torch.full_like(tensor, fill) for name, tensor in found.items()}


def casts(folder: str) -> list[tuple[str, ...]]:
    exported = sx.export_checkpoint(state(torch.float32), f"{folder}/out", dtype="float16")
    same = sx.export_checkpoint(state(torch.float32), f"{folder}/wide", dtype="bfloat16")
    assert not notes_with(same, "infinite")
    target = state(torch.float16, 0.0)
    by_source = {}
    sx.save_checkpoint(state(torch.float32), f"{folder}/saved")
    sx.export_checkpoint(state(torch.float32), f"{folder}/same")
    for source in ("saved", "same"):
        loaded = sx.load_checkpoint(target, f"{folder}/{source}", dtype="state")
        by_source[source] = loaded.notes
        assert torch.equal(target["plain"], torch.tensor([1e5, 1.0, -1e5]).half())
    assert sx.load_checkpoint(state(torch.float64, 0.0), f"{folder}/same", dtype="state").notes == ()
    assert sx.load_checkpoint(state(torch.float32, 0.0), f"{folder}/same").notes == ()
    return [exported.notes, *by_source.values()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_export_and_a_load_count_what_became_infinite_on_any_rank(ranks: int, tmp_path: Path) -> None:
    by_rank = run_ranks(casts, ranks, backend="gloo", args=(str(tmp_path),), timeout_s=120)
    assert all(found == by_rank[0] for found in by_rank)
    for notes in by_rank[0]:
        (note,) = [note for note in notes if "infinite" in note]
        assert "14 " in note
        for name, count in {"rows": 5, "columns": 5, "both": 2, "plain": 2}.items():
            assert f"{name} ({count})" in note
        assert "fits" not in note


def test_arrays_and_strided_tensors_are_counted_and_root_logs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    big = torch.full((1200, 1000), 1.0)  # more than a window
    big[-1] = 1e9
    tensors = {"strided": big.T, "array": big.numpy().astype("float64")}
    with caplog.at_level(logging.WARNING):
        report = sx.export_checkpoint(tensors, tmp_path / "out", dtype="float16")
        sx.export_checkpoint(tensors, tmp_path / "same")
        target = {"strided": torch.zeros(1000, 1200).T.half().T, "array": big.half().numpy()}
        loaded = sx.load_checkpoint(target, tmp_path / "same", dtype="state")
    for notes in (report.notes, loaded.notes):
        (note,) = [note for note in notes if "infinite" in note]
        assert "strided (1,000)" in note
        assert "array (1,000)" in note
        assert any(note in record.getMessage() for record in caplog.records)
