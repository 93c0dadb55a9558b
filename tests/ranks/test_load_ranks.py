"""Loading where ranks differ: in values, paths, selections; or where there are no tensors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import statexchange as sx
from statexchange.testing import run_ranks


def saves_parts_of_its_own(folder: str) -> None:
    rank = sx.get_rank()
    sx.save_checkpoint({"buffer": torch.arange(3.0 + rank), "step": 7}, folder)
    state = {"buffer": torch.zeros(3 + rank), "step": 0}
    sx.load_checkpoint(state, folder)
    assert state["buffer"].tolist() == list(range(3 + rank))


def test_tensors_with_another_shape_on_each_rank_are_loaded(tmp_path: Path) -> None:
    run_ranks(saves_parts_of_its_own, 2, args=(str(tmp_path / "saved"),))


def test_state_without_tensors_comes_back(tmp_path: Path) -> None:
    sx.save_checkpoint({"step": 7, "x": [1, 2]}, tmp_path / "saved")
    state = {"step": 0, "x": [0]}
    sx.load_checkpoint(state, tmp_path / "saved")
    assert state == {"step": 7, "x": [1, 2]}


def test_the_names_of_a_state_of_values_are_compared(tmp_path: Path) -> None:
    sx.save_checkpoint({"step": 7, "model": nn.Linear(1, 1)}, tmp_path / "saved")
    live = {"step": 0, "own": 5}
    with pytest.raises(FileNotFoundError, match=r"missing.*: own;.*: model;.*strict=False"):
        sx.load_checkpoint(live, tmp_path / "saved")
    assert live == {"step": 0, "own": 5}
    report = sx.load_checkpoint(live, tmp_path / "saved", strict=False)
    assert (live, report.missing, report.unexpected) == ({"step": 7, "own": 5}, ("own",), ("model",))
    with pytest.raises(FileNotFoundError, match="no name") as caught:
        sx.load_checkpoint({"own": 5}, tmp_path / "saved", strict=False)
    assert ": own;" in caught.value.message


def test_strict_is_not_advised_where_it_changes_nothing(tmp_path: Path) -> None:
    sx.save_checkpoint({"step": 7}, tmp_path / "saved")
    for strict in (True, False):
        with pytest.raises(FileNotFoundError, match=r"missing.*\bw\b") as caught:
            sx.load_checkpoint({"w": torch.zeros(2), "step": 0}, tmp_path / "saved", strict=strict)
        assert "strict" not in caught.value.message


@pytest.mark.parametrize(
    "options",
    [{"include": ["*.a", "step"]}, {"exclude": ["cfg.b", "*.deep.b", "x", "model.*"]}],
    ids=["include", "exclude"],
)
@pytest.mark.parametrize("with_model", [True, False])
def test_plain_values_that_are_not_selected_stay(options: dict[str, Any], with_model: bool, tmp_path: Path) -> None:
    saved = {"step": 7, "cfg": {"a": 1, "b": 2, "deep": {"a": 3, "b": 4}}, "x": 5}
    model = {"model": nn.Linear(1, 1)} if with_model else {}
    sx.save_checkpoint({**saved, **model}, tmp_path / "saved")
    live: dict[str, Any] = {"step": 0, "cfg": {"a": 0, "b": "own", "deep": {"a": 0, "b": "own"}}, "x": "own", **model}
    inner = live["cfg"]
    sx.load_checkpoint(live, tmp_path / "saved", **options)
    assert live == {"step": 7, "cfg": {"a": 1, "b": "own", "deep": {"a": 3, "b": "own"}}, "x": "own", **model}
    assert live["cfg"] is inner
    sx.load_checkpoint(live, tmp_path / "saved")
    assert live == {**saved, **model}


def selects_by_patterns(folder: str) -> None:
    live = {f"w{sx.get_rank()}": torch.zeros(2)}
    for strict in (True, False):
        with pytest.raises(sx.errors.InvalidArgumentError, match=r"include=\['other'\]"):
            sx.load_checkpoint(live, folder, include="other", strict=strict)
    with pytest.raises(sx.errors.InvalidArgumentError, match=r"exclude=\['\*'\]"):
        sx.load_checkpoint(live, folder, exclude="*")
    report = sx.load_checkpoint(live, folder, include="w1")  # one rank has it
    assert report.num_tensors == sx.get_rank()


@pytest.mark.parametrize("verb", ["save", "export"])
def test_patterns_that_select_nothing_on_any_rank_are_an_error(verb: str, tmp_path: Path) -> None:
    state = {"w0": torch.ones(2), "w1": torch.ones(2)}
    (sx.save_checkpoint if verb == "save" else sx.export_checkpoint)(state, tmp_path / "out")
    run_ranks(selects_by_patterns, 2, args=(str(tmp_path / "out"),))


def saves_at_two_places(folder: str) -> None:
    rank = sx.get_rank()
    with pytest.raises(sx.errors.NotFoundError, match="shared directory") as caught:
        sx.save_checkpoint({"w": torch.ones(3)}, f"{folder}/in{rank}/saved")
    assert caught.value.rank == 1
    with pytest.raises(sx.errors.InvalidArgumentError, match="rank 1: pass the same") as caught:
        sx.save_checkpoint({"w": torch.ones(3)}, f"{folder}/{rank}")
    assert caught.value.rank == 1
    with pytest.raises(sx.errors.InvalidArgumentError, match="or a URL"):
        sx.save_checkpoint({"w": torch.ones(3)}, 3 if rank else f"{folder}/saved")  # type: ignore[arg-type]
    for wrong in ("3", [1]):
        with pytest.raises(sx.errors.InvalidArgumentError, match="number of seconds"):
            sx.save_checkpoint({"w": torch.ones(3)}, f"{folder}/saved", stall_timeout_s=wrong)  # type: ignore[call-overload]
    left = sorted(path.name for path in Path(folder).rglob("*"))
    assert left == ["in0", "in1"]  # rank 1's was there, and rank 0's was made for what was refused: both are empty
    sx.get_communicator().barrier()
    sx.save_checkpoint({"w": torch.ones(3)}, f"{folder}/saved")
    with pytest.raises(sx.errors.InvalidArgumentError, match="number of seconds"):
        sx.load_checkpoint({"w": torch.ones(3)}, f"{folder}/saved", stall_timeout_s="3")  # type: ignore[arg-type]


def test_ranks_that_save_to_different_paths_get_an_error(tmp_path: Path) -> None:
    (tmp_path / "in1").mkdir()
    run_ranks(saves_at_two_places, 2, args=(str(tmp_path),))


def saves_at_a_relative_path(folder: str) -> None:
    """Each rank works in a directory of its own, so one relative path is two places."""
    rank = sx.get_rank()
    os.chdir(f"{folder}/{rank}")
    state = {"w": torch.ones(3)}
    for write in (
        lambda: sx.save_checkpoint(state, "saved"),
        lambda: sx.Checkpoints("saves").save(state, step=1),
    ):
        with pytest.raises(sx.StateExchangeError, match="pass the same") as caught:
            write()
        text = str(caught.value)
        assert "does not see what rank 0" in text
        assert f"{folder}/1/save" in text
        sx.get_communicator().barrier()


def test_a_relative_path_of_ranks_in_different_directories_is_an_error_that_names_both(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / str(number)).mkdir()
    run_ranks(saves_at_a_relative_path, 2, backend="gloo", args=(str(tmp_path),))
    assert {path.name for path in tmp_path.rglob("*")} <= {"0", "1", "saves"}  # the last is empty: no step was saved


class Copying(nn.Module):
    """A module that saves a copy of a tensor that is no parameter or buffer of its own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((2,), float(size)))
        self.size = size

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "copy"] = torch.zeros(self.size)


def test_a_copy_of_another_shape_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    sx.save_checkpoint({"model": Copying(3)}, tmp_path / "saved")
    live = Copying(4)
    with pytest.raises(sx.errors.InvalidArgumentError, match="shape or dtype") as caught:
        sx.load_checkpoint({"model": live}, tmp_path / "saved")
    assert caught.value.name == "model.copy"
    assert live.w.tolist() == [4.0, 4.0]
