"""A load notes trained parameters that are one tensor in the source, and several in the state, as after `to_empty`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import statexchange as sx


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.tie()

    def tie(self) -> None:
        self.head.weight = self.embed.weight


def emptied() -> Tied:
    with torch.device("meta"):
        model = Tied()
    return model.to_empty(device="cpu")


def write(kind: str, model: nn.Module, path: Path) -> Path:
    if kind == "export":
        sx.export_checkpoint(model, path)
    elif kind == "save":
        sx.save_checkpoint(model, path)
    else:
        path = path.with_suffix(".pt")
        torch.save(model.state_dict(), path)
    return path


@pytest.mark.parametrize("kind", ["export", "save", "torch"])
def test_a_tie_that_to_empty_lost_is_noted(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved, live = Tied(), emptied()
    assert live.head.weight is not live.embed.weight
    path = write(kind, saved, tmp_path / "saved")
    with caplog.at_level(logging.WARNING):
        (note,) = sx.load_checkpoint(live, path).notes
    assert "embed.weight" in note
    assert "head.weight" in note
    assert caplog.text.count(note) == 1
    assert torch.equal(live.head.weight, saved.head.weight)
    live.tie()
    assert sx.load_checkpoint(live, path).notes == ()


def test_parameters_that_do_not_train_may_be_several(tmp_path: Path) -> None:
    path = write("save", Tied(), tmp_path / "saved")
    assert sx.load_checkpoint(emptied().requires_grad_(False), path).notes == ()


def test_parameters_that_were_two_are_not_noted(tmp_path: Path) -> None:
    saved: Any = Tied()
    saved.head.weight = nn.Parameter(saved.embed.weight.detach().clone())
    assert sx.load_checkpoint(emptied(), write("export", saved, tmp_path / "saved")).notes == ()
