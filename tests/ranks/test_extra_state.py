"""Extra state of modules: saved and given to `set_extra_state`, left out of an export and named there."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stateful import WithExtra
from torch import nn

import statexchange as sx
from statexchange import errors
from statexchange.testing import run_ranks


def noted(report: sx.ExportReport, name: str) -> int:
    return sum(note.count(name) for note in report.notes)


@pytest.mark.parametrize(
    "extra",
    [torch.arange(5, dtype=torch.uint8), {"scale": 1.0}, io.BytesIO(b"scales")],
    ids=["tensor", "mapping", "io"],
)
@pytest.mark.parametrize("as_mapping", [False, True])
def test_an_export_leaves_extra_state_out_and_names_it(
    extra: Any, as_mapping: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(WithExtra(extra), nn.Linear(2, 2))
    with caplog.at_level(logging.WARNING):
        report = sx.export_checkpoint(model.state_dict() if as_mapping else model, tmp_path / "out")
    assert set(load_file(tmp_path / "out/model.safetensors")) == {n for n, _ in model.named_parameters()}
    assert noted(report, "0._extra_state") == 1
    assert caplog.text.count("0._extra_state") == 1
    assert not sx.export_checkpoint(model, tmp_path / "part", exclude="*._extra_state").notes


def test_ranks_may_have_different_extra_state_in_an_export(tmp_path: Path) -> None:
    """Of a stage of a pipeline, too, it is named."""

    def export() -> tuple[str, ...]:
        rank = sx.get_rank()
        state = {"w": torch.ones(2), "a._extra_state": torch.arange(rank), f"{rank}._extra_state": torch.ones(1)}
        return sx.export_checkpoint(state, tmp_path / "out").notes

    for notes in run_ranks(export, 2):
        for name in ("a._extra_state", "0._extra_state", "1._extra_state"):
            assert sum(note.count(name) for note in notes) == 1
    assert list(load_file(tmp_path / "out/model.safetensors")) == ["w"]


def test_a_weight_whose_name_ends_alike_is_exported(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_parameter("my_extra_state", nn.Parameter(torch.ones(2)))
    sx.export_checkpoint(model, tmp_path / "out")
    assert list(load_file(tmp_path / "out/model.safetensors")) == ["my_extra_state"]


def test_a_bytesio_is_saved_and_given_to_its_module(tmp_path: Path) -> None:
    saved, live = WithExtra(io.BytesIO(b"scales")), WithExtra(io.BytesIO())
    saved.extra.seek(2)
    sx.save_checkpoint({"model": saved}, tmp_path / "saved")
    sx.load_checkpoint({"model": live}, tmp_path / "saved")
    assert (live.extra.getvalue(), live.extra.tell()) == (b"scales", 2)
    assert live.extra is not saved.extra


def test_extra_state_that_is_no_value_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(errors.UnsupportedError, match="_extra_state"):
        sx.save_checkpoint({"model": WithExtra(io.StringIO())}, tmp_path / "saved")


def test_an_export_loads_back_and_the_report_names_the_extra_state_that_it_lacks(tmp_path: Path) -> None:
    saved, live = (nn.Sequential(WithExtra({"scale": scale})) for scale in (1.0, 2.0))
    sx.export_checkpoint(saved, tmp_path / "out")
    report = sx.load_checkpoint(live, tmp_path / "out")
    assert report.missing == ("0._extra_state",)
    assert live[0].extra == {"scale": 2.0}
    assert torch.equal(live[0].weight, saved[0].weight)
    with pytest.raises(errors.NotFoundError, match="missing") as caught:
        sx.load_checkpoint(nn.Sequential(*live, nn.Linear(2, 2)), tmp_path / "out")
    assert "_extra_state" not in str(caught.value)


@pytest.mark.parametrize("source", ["save", "torch", "safetensors"])
def test_extra_state_that_a_source_could_have_is_missing(source: str, tmp_path: Path) -> None:
    """A safetensors file of others may have the extra state of some modules, as tensors."""
    extra = torch.ones(1, dtype=torch.uint8)
    saved, live = nn.Sequential(WithExtra(extra), nn.Linear(2, 2)), nn.Sequential(WithExtra(extra), WithExtra(extra))
    if source == "save":
        sx.save_checkpoint(saved, tmp_path / "saved")
    elif source == "torch":
        torch.save(saved.state_dict(), tmp_path / "saved")
    else:
        save_file(saved.state_dict(), tmp_path / "saved")
    with pytest.raises(errors.NotFoundError, match=r"1\._extra_state"):
        sx.load_checkpoint(live, tmp_path / "saved")


def test_extra_state_in_a_safetensors_file_of_others_goes_to_its_module(tmp_path: Path) -> None:
    saved, live = (WithExtra(torch.arange(length, dtype=torch.uint8)) for length in (5, 0))
    save_file(saved.state_dict(), tmp_path / "model.safetensors")
    assert sx.load_checkpoint(live, tmp_path / "model.safetensors").missing == ()
    assert live.extra.tolist() == [0, 1, 2, 3, 4]
