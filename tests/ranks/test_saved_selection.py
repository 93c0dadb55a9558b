"""`include` and `exclude` of a save: what they leave out is not written, and a load leaves it as it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import statexchange as sx
from statexchange.testing import run_ranks


class Counter:
    """An object with a state."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count, "twice": 2 * self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def job(value: float) -> dict[str, Any]:
    """Return a state with a frozen base and a head that has made one step."""
    model = torch.nn.ModuleDict({"base": torch.nn.Linear(64, 64), "head": torch.nn.Linear(4, 2)})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    optimizer = torch.optim.AdamW(model["head"].parameters(), lr=value)
    for parameter in model["head"].parameters():
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    values = {"step": int(value), "name": str(value), "list": [value, 2]}
    return {"model": model, "optimizer": optimizer, "counter": Counter(int(value)), "values": values}


def content(state: dict[str, Any]) -> dict[str, Any]:
    """Return the leaves of a state of `job` by name, as text."""
    leaves: dict[str, Any] = {f"model.{name}": tensor for name, tensor in state["model"].state_dict().items()}
    names = [f"model.head.{name}" for name, _ in state["model"]["head"].named_parameters()]
    for name, entries in zip(names, state["optimizer"].state.values(), strict=True):
        leaves |= {f"optimizer.state.{name}.{key}": value for key, value in entries.items()}
    leaves["optimizer.lr"] = state["optimizer"].param_groups[0]["lr"]
    leaves["counter"] = state["counter"].count
    leaves |= {f"values.{key}": value for key, value in state["values"].items()}
    return {name: repr(value) for name, value in leaves.items()}


SELECTIONS: list[dict[str, Any]] = [
    {"exclude": "model.base.*"},
    {"include": ["model.head", "optimizer"]},
    {"include": "*weight*"},
    {"exclude": ["optimizer.state.*bias*", "values.name"]},
    {"exclude": ["optimizer", "counter"]},
    {"exclude": "*twice", "include": ["counter", "values"]},
    {"exclude": ["*exp_avg_sq", "values.list"]},
]


@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
def test_a_save_has_what_a_load_with_these_patterns_takes(selection: dict[str, Any], tmp_path: Path) -> None:
    """A load of the selected save gives what a load of the whole save gives with the same patterns."""
    saved, expected, loaded = job(3.0), job(1.0), job(1.0)
    sx.save_checkpoint(saved, tmp_path / "whole")
    sx.save_checkpoint(saved, tmp_path / "selected", **selection)
    sx.load_checkpoint(expected, tmp_path / "whole", **selection)
    report = sx.load_checkpoint(loaded, tmp_path / "selected")
    assert content(loaded) == content(expected)
    assert (report.missing, report.unexpected) == ((), ())
    assert content(loaded) not in (content(saved), content(job(1.0)))


def test_what_is_left_out_is_not_written(tmp_path: Path) -> None:
    state = job(3.0)
    whole = sx.save_checkpoint(state, tmp_path / "whole")
    selected = sx.save_checkpoint(state, tmp_path / "selected", exclude="model.base.*")
    assert whole.nbytes - selected.nbytes >= 4 * 64 * 65
    with sx.open_checkpoint(tmp_path / "selected") as checkpoint:
        assert not [name for name in checkpoint if "base" in name]


def test_what_the_patterns_do_not_name_is_still_missing(tmp_path: Path) -> None:
    sx.save_checkpoint({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "saved", exclude="b")
    state = {"a": torch.zeros(1), "b": torch.zeros(1), "c": torch.zeros(1)}
    with pytest.raises(sx.errors.NotFoundError, match=r"missing.*: c"):
        sx.load_checkpoint(state, tmp_path / "saved")
    assert state["a"].item() == 0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"include": ["model", "optimzer"]}, "'optimzer'"),
        ({"include": 3}, "include"),
        ({"include": "model", "exclude": "*"}, "nothing"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(options: dict[str, Any], match: str, tmp_path: Path) -> None:
    state = {"model": torch.nn.Linear(1, 1)}
    with pytest.raises((sx.errors.InvalidArgumentError, sx.errors.UnsupportedError), match=match):
        sx.save_checkpoint(state, tmp_path / "saved", **options)
    assert os.listdir(tmp_path) == []


def test_the_items_of_a_list_keep_their_places(tmp_path: Path) -> None:
    state: Any = {"stages": [torch.nn.Linear(1, 1), torch.nn.Linear(2, 2), torch.ones(3), {"deep": torch.ones(4)}]}
    sx.save_checkpoint(state, tmp_path / "saved", exclude=["stages.0", "stages.2"])
    live: Any = {"stages": [torch.nn.Linear(1, 1), torch.nn.Linear(2, 2), torch.zeros(3), {"deep": torch.zeros(4)}]}
    first = live["stages"][0].weight.item()
    sx.load_checkpoint(live, tmp_path / "saved")
    assert live["stages"][0].weight.item() == first
    assert repr(live["stages"][1].weight) == repr(state["stages"][1].weight)
    assert (live["stages"][2].sum().item(), live["stages"][3]["deep"].sum().item()) == (0, 4)


def save_stages(path: str) -> Any:
    """Save two pipeline stages, with a pattern that is for one of them, then with other patterns on each."""
    rank = sx.get_rank()
    state = {f"stage{rank}": torch.full((2,), float(rank)), "frozen": torch.ones(3)}
    sx.save_checkpoint(state, f"{path}-1", include="stage1")
    loaded = {f"stage{rank}": torch.full((2,), 9.0), "frozen": torch.zeros(3)}
    sx.load_checkpoint(loaded, f"{path}-1")
    try:
        sx.save_checkpoint(state, f"{path}-2", include=f"stage{rank}")
    except sx.errors.InvalidArgumentError as error:
        return {name: tensor[0].item() for name, tensor in loaded.items()}, "include" in str(error)
    return None


def test_a_pattern_may_be_for_one_rank_and_is_the_same_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(save_stages, 2, args=(str(tmp_path / "saved"),))
    assert first == ({"stage0": 9.0, "frozen": 0.0}, True)
    assert second == ({"stage1": 1.0, "frozen": 0.0}, True)


def test_saves_of_a_job_have_a_selection(tmp_path: Path) -> None:
    saves = sx.Checkpoints(tmp_path / "saves", exclude="model.base.*")
    state = job(3.0)
    saves.save(state, 10)
    loaded = job(1.0)
    expected = {**content(state), "model.base.weight": content(loaded)["model.base.weight"]}
    expected["model.base.bias"] = content(loaded)["model.base.bias"]
    saves.load(loaded)
    assert content(loaded) == expected


# Found by a reader


class Scaled(torch.nn.Linear):
    """A module whose extra state is a mapping."""

    extra: dict[str, int]

    def get_extra_state(self) -> dict[str, int]:
        return self.extra

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.extra = {"amax": state["amax"], "scale": state["scale"]}


def test_a_rename_of_a_load_does_not_reach_the_patterns_of_its_save(tmp_path: Path) -> None:
    saved, live = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    sx.save_checkpoint({"model": saved, "other": torch.ones(2)}, tmp_path / "saved", include="model")
    sx.load_checkpoint(live, tmp_path / "saved", rename=[(r"^model\.", "")])
    assert torch.equal(live.weight, saved.weight)


@pytest.mark.parametrize(
    ("saved", "live", "exclude", "expected"),
    [
        (
            {"m": {"epoch": 3, "cache": {"a": 1}}},
            {"m": {"epoch": 0, "cache": {}}},
            "m.cache.*",
            {"epoch": 3, "cache": {}},
        ),
        ({"m": [1, 2], "n": 1}, {"m": [0, 0], "n": 0}, "m.1", [0, 0]),
        ({"m": {"a": 1}, "n": 1}, {"m": {"a": 0}, "n": 0}, "m.a", {"a": 0}),
    ],
)
def test_plain_values_that_were_left_out_stay(
    saved: Any, live: Any, exclude: str, expected: Any, tmp_path: Path
) -> None:
    sx.save_checkpoint(saved, tmp_path / "saved", exclude=exclude)
    report = sx.load_checkpoint(live, tmp_path / "saved")
    assert (live["m"], report.missing) == (expected, ())


def test_extra_state_is_saved_as_a_whole(tmp_path: Path) -> None:
    saved, live = {"m": Scaled(2, 2)}, {"m": Scaled(2, 2)}
    saved["m"].extra, live["m"].extra = {"amax": 5, "scale": 6}, {"amax": 0, "scale": 0}
    sx.save_checkpoint(saved, tmp_path / "saved", exclude="*.scale")
    sx.load_checkpoint(live, tmp_path / "saved")
    assert live["m"].extra == {"amax": 0, "scale": 0}
    assert torch.equal(live["m"].weight, saved["m"].weight)


def test_moments_that_were_left_out_stay(tmp_path: Path) -> None:
    """A key that the live state lacks is no reason to take what was left out for a parameter without a step."""
    saved, live = job(3.0), job(1.0)
    for entries in saved["optimizer"].state.values():
        entries["precond"] = {"inv": torch.ones(1)}
    sx.save_checkpoint(saved, tmp_path / "saved", exclude="*.inv")
    before = content(live)
    sx.load_checkpoint(live, tmp_path / "saved")
    moments = {name: value for name, value in content(live).items() if "optimizer.state" in name}
    assert moments == {name: before[name] for name in moments}
    assert len(moments) == 6


def test_patterns_and_a_layout_are_refused_together(tmp_path: Path) -> None:
    with pytest.raises(sx.errors.UnsupportedError, match="layout"):
        sx.save_checkpoint({"w": torch.ones(1)}, tmp_path / "saved", exclude="x", layout={"w": "replicate"})


def test_an_optimizer_alone_is_selected_by_its_own_names(tmp_path: Path) -> None:
    saved, live = job(3.0)["optimizer"], job(1.0)["optimizer"]
    sx.save_checkpoint(saved, tmp_path / "saved", include="param_groups")
    sx.load_checkpoint(live, tmp_path / "saved")
    assert live.param_groups[0]["lr"] == 3.0


def notes_of(path: str) -> list[Any]:
    rank = sx.get_rank()
    state = {"model": torch.nn.Linear(1, 1), f"stage{rank}": torch.ones(2)}
    found = []
    for number, exclude in enumerate((["modle.*", "stage1", "model.weight"], ["model", "model.bias"])):
        found.append(list(sx.save_checkpoint(state, f"{path}/{number}", exclude=exclude).notes))
    return found


def test_a_pattern_that_leaves_out_nothing_on_any_rank_is_noted(tmp_path: Path) -> None:
    """That of one pipeline stage is for that rank; one for what another has left out as a whole is no mistake."""
    found = run_ranks(notes_of, 2, args=(str(tmp_path),))
    assert found == [[["exclude pattern 'modle.*' matches nothing in the state"], []]] * 2
