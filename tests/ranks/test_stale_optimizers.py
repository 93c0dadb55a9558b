"""A save warns of an optimizer that was made before what replaced the parameters of its model."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import statexchange as sx
from statexchange.testing import run_ranks


def model_of() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


def sharded_late(*, whole: bool = True, order: int = 1) -> dict[str, Any]:
    """A model that was sharded after its optimizer was made: all of it, or one layer; parameters in either order."""
    model = model_of()
    optimizer = torch.optim.AdamW(list(model.parameters())[::order])
    fully_shard(model[0])
    if whole:
        fully_shard(model)
    return {"model": model, "optimizer": optimizer}


def sharded_late_with_two() -> dict[str, Any]:
    model = model_of()
    first, second = (torch.optim.SGD(layer.parameters()) for layer in model)
    fully_shard(model)
    return {"model": model, "optimizers": [first, second]}


def sharded_in_time() -> dict[str, Any]:
    model = model_of()
    fully_shard(model)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters())}


SHARDED = {
    "whole": sharded_late,
    "layer": lambda: sharded_late(whole=False),
    "reversed": lambda: sharded_late(order=-1),
    "ema": lambda: {**sharded_late(), "ema": model_of()},
    "two": sharded_late_with_two,
    "in_time": sharded_in_time,
}


def saves_all(folder: str) -> dict[str, tuple[str, ...]]:
    return {name: sx.save_checkpoint(make(), f"{folder}/{name}").notes for name, make in SHARDED.items()}


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, ...]]:
    """The notes of saves by two ranks."""
    return run_ranks(saves_all, 2, backend="gloo", args=(str(tmp_path_factory.mktemp("saves")),))[0]


@pytest.mark.parametrize("name", ["whole", "layer", "reversed", "ema"])
def test_an_optimizer_made_before_fully_shard_is_named(name: str, notes: dict[str, tuple[str, ...]]) -> None:
    (note,) = notes[name]
    assert "'optimizer'" in note
    assert "'model'" in note
    assert "fully_shard" in note


def test_several_are_named_in_one_note(notes: dict[str, tuple[str, ...]]) -> None:
    (note,) = notes["two"]
    assert "'optimizers[0]', 'optimizers[1]'" in note


def test_an_optimizer_made_after_fully_shard_has_no_note(notes: dict[str, tuple[str, ...]]) -> None:
    assert notes["in_time"] == ()


def test_an_optimizer_made_before_to_empty_is_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.device("meta"):
        model = model_of()
    optimizer = torch.optim.SGD(model.parameters())
    model.to_empty(device="cpu")
    with caplog.at_level(logging.WARNING):
        report = sx.save_checkpoint({"model": model, "optimizer": optimizer}, tmp_path / "saved")
    assert "'optimizer'" in report.notes[0]
    assert caplog.text.count(report.notes[0]) == 1


def alone() -> Any:
    return {"optimizer": torch.optim.SGD(model_of().parameters())}


def of_another_model() -> Any:
    return {"generator": model_of(), "optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())}


def with_one_more_parameter() -> Any:
    """As the temperature of SAC, which lies in no module."""
    model, alpha = nn.Linear(2, 1), nn.Parameter(torch.zeros(1))
    optimizers = [torch.optim.SGD(model.parameters()), torch.optim.SGD([alpha])]
    return {"model": model, "optimizers": optimizers, "frozen": nn.Linear(1, 1).requires_grad_(False)}


def averaged() -> Any:
    model = model_of()
    return {"model": model, "ema": copy.deepcopy(model), "optimizer": torch.optim.SGD(model.parameters())}


@pytest.mark.parametrize("make", [alone, of_another_model, with_one_more_parameter, averaged])
def test_other_optimizers_are_saved_without_a_note(make: Callable[[], Any], tmp_path: Path) -> None:
    assert sx.save_checkpoint(make(), tmp_path / "saved").notes == ()
