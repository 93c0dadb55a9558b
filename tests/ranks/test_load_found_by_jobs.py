"""What random jobs have shown of loads: names in lists, groups that differ between ranks, odd keys, empty objects."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from random_jobs import step_randomly
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

import statexchange as sx
from statexchange.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def stepped(optimizer: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    step_randomly(optimizer)
    return optimizer


def job(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(2, 2)
    return {"model": model, "optimizer": stepped(torch.optim.Adam(model.parameters(), lr=0.1), seed)}


def moments(state: dict[str, Any] | list[Any]) -> list[torch.Tensor]:
    optimizer = state["optimizer"] if isinstance(state, dict) else state[1]
    return [of_parameter["exp_avg"] for of_parameter in optimizer.state.values()]


def test_hyperparameters_that_ranks_saved_differently_are_refused_on_one_rank(tmp_path: Path) -> None:
    saved = [job(0), job(0)]
    for state, lr in zip(saved, (0.25, 0.5), strict=True):
        state["optimizer"].param_groups[0]["lr"] = lr
    run_ranks(lambda: sx.save_checkpoint(saved[sx.get_rank()], tmp_path / "saved"), 2)
    live = job(1)
    with pytest.raises(sx.errors.ReplicaError, match="param_groups"):
        sx.load_checkpoint(live, tmp_path / "saved")
    assert live["optimizer"].param_groups[0]["lr"] == 0.1
    sx.load_checkpoint(live, tmp_path / "saved", exclude="optimizer.param_groups")
    assert live["optimizer"].param_groups[0]["lr"] == 0.1
    sx.load_checkpoint(live, tmp_path / "saved", replicas="root")
    assert live["optimizer"].param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("flatten", [False, True])
def test_names_of_parameters_are_found_in_a_list(flatten: bool, tmp_path: Path) -> None:
    saved, live = job(0), job(1)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    of_optimizer = get_optimizer_state_dict(saved["model"], saved["optimizer"], options=options)
    dcp.save({"items": [get_model_state_dict(saved["model"]), of_optimizer]}, checkpoint_id=tmp_path, no_dist=True)
    sx.load_checkpoint({"items": [*live.values()]}, tmp_path)
    assert all(map(torch.equal, moments(live), moments(saved)))


def test_param_names_are_those_of_a_wrapped_model(tmp_path: Path) -> None:
    saved, live = job(0), job(1)
    for state in (saved, live):
        state["optimizer"] = stepped(torch.optim.SGD([*state["model"].named_parameters()], momentum=0.9))
    of_model = {f"module.{name}": tensor for name, tensor in saved["model"].state_dict().items()}
    torch.save({"model": of_model, "optimizer": saved["optimizer"].state_dict()}, tmp_path / "x.pt")
    sx.load_checkpoint(live, tmp_path / "x.pt")
    assert torch.equal(live["model"].weight, saved["model"].weight)


def test_integers_are_numbers_also_where_parameters_are_called_so(tmp_path: Path) -> None:
    saved, live = (nn.ParameterList([nn.Parameter(torch.randn(2)) for _ in range(3)]) for _ in range(2))
    optimizers = [stepped(torch.optim.Adam([one[0], one[2], one[1]])) for one in (saved, live)]
    torch.save({"model": saved.state_dict(), "o": optimizers[0].state_dict()}, tmp_path / "x.pt")
    expected = copy.deepcopy(optimizers[1])
    expected.load_state_dict(optimizers[0].state_dict())
    sx.load_checkpoint({"model": live, "o": optimizers[1]}, tmp_path / "x.pt")
    for new, of_torch in zip(optimizers[1].state.values(), expected.state.values(), strict=True):
        assert torch.equal(new["exp_avg"], of_torch["exp_avg"])


def test_vectors_of_all_parameters_fit_the_first(tmp_path: Path) -> None:
    saved, live = ([nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(3))] for _ in range(2))
    optimizers = [stepped(torch.optim.LBFGS(saved, max_iter=2)), torch.optim.LBFGS(live, max_iter=2)]
    torch.save({"o": optimizers[0].state_dict()}, tmp_path / "x.pt")
    sx.load_checkpoint({"o": optimizers[1]}, tmp_path / "x.pt")
    assert torch.equal(optimizers[1].state[live[0]]["d"], optimizers[0].state[saved[0]]["d"])


def test_patterns_that_select_nothing_of_an_optimizer_are_an_error(tmp_path: Path) -> None:
    sx.save_checkpoint(job(0), tmp_path / "saved")
    with pytest.raises(sx.errors.InvalidArgumentError, match="selects no"):
        sx.load_checkpoint(job(1), tmp_path / "saved", include="*head*")


def test_what_is_not_selected_may_have_any_form(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2), "extra": {"a": [{}, {"b": 1}]}}, checkpoint_id=tmp_path, no_dist=True)
    live = {"w": torch.zeros(2), "extra": {"a": 1}}
    sx.load_checkpoint(live, tmp_path, include=["w", "*head*"])
    assert live["w"].tolist() == [1.0, 1.0]
    assert live["extra"] == {"a": 1}


def test_a_number_and_its_text_are_two_keys_of_a_plain_value(tmp_path: Path) -> None:
    saved = {"x": {"0": {}, 0: 0.5}, "w": torch.ones(1)}
    sx.save_checkpoint(saved, tmp_path / "saved")
    live: dict[str, Any] = {"x": {"0": {}, 0: 0.1}, "w": torch.zeros(1)}
    sx.load_checkpoint(live, tmp_path / "saved")
    assert live == saved


def test_an_object_without_state_is_not_missing_in_a_dcp(tmp_path: Path) -> None:
    live = {"w": torch.zeros(1), "scaler": torch.amp.GradScaler("cpu", enabled=False)}
    assert live["scaler"].state_dict() == {}
    dcp.save({"w": torch.ones(1), "scaler": {}}, checkpoint_id=tmp_path, no_dist=True)
    assert sx.load_checkpoint(live, tmp_path).missing == ()


@pytest.mark.parametrize("options", [{"exclude": "optimizer"}, {"include": "scheduler"}])
def test_a_scheduler_of_other_groups_is_refused_without_its_optimizer(options: Any, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)

    def scheduler(groups: list[Any]) -> Any:
        optimizer = torch.optim.SGD(groups, lr=0.1)
        return {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}

    saved = scheduler([{"params": [model.weight]}, {"params": [model.bias]}])
    torch.save({key: value.state_dict() for key, value in saved.items()}, tmp_path / "x.pt")
    live = scheduler([*model.parameters()])
    with pytest.raises(sx.errors.InvalidArgumentError) as caught:
        sx.load_checkpoint(live, tmp_path / "x.pt", **options)
    assert caught.value.name == "scheduler"
    assert len(live["scheduler"].base_lrs) == 1


@pytest.mark.parametrize("key", ["model", "optimizer", "random", "plain"])
def test_what_is_left_out_whole_may_be_missing(key: str, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "x.pt")
    live = {**job(0), "random": sx.integrations.RandomState(), "plain": {"a": 1}}
    report = sx.load_checkpoint({"w": torch.zeros(1), key: live[key]}, tmp_path / "x.pt", exclude=f"{key}.*")
    assert report.missing == ()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_texts_are_names_also_where_they_look_like_numbers(tmp_path: Path) -> None:
    saved, live = (nn.ParameterList([nn.Parameter(torch.randn(2)) for _ in range(3)]) for _ in range(2))
    optimizer = stepped(torch.optim.Adam([saved[0], saved[1], saved[2]]))
    other = torch.optim.Adam([live[2], live[0], live[1]])
    of_optimizer = get_optimizer_state_dict(saved, optimizer)
    dcp.save({"model": get_model_state_dict(saved), "o": of_optimizer}, checkpoint_id=tmp_path, no_dist=True)
    sx.load_checkpoint({"model": live, "o": other}, tmp_path)
    for new, old in zip(live, saved, strict=True):
        assert torch.equal(other.state[new]["exp_avg"], optimizer.state[old]["exp_avg"])


@pytest.mark.parametrize("key", ["model", "random", "plain"])
def test_what_is_not_included_may_be_missing(key: str, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "x.pt")
    live = {**job(0), "random": sx.integrations.RandomState(), "plain": {"a": 1}}
    report = sx.load_checkpoint({"w": torch.zeros(1), key: live[key]}, tmp_path / "x.pt", include=["w", "*head*"])
    assert report.missing == ()
