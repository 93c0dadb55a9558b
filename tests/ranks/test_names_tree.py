"""Plain values and optimizers from torch's own files: what they have comes into live state, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import statexchange as sx

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def write_torch(state: dict[str, Any], path: Path) -> str:
    path.mkdir(exist_ok=True)
    torch.save(state, path / "state.pt")
    return str(path / "state.pt")


def write_dcp(state: dict[str, Any], path: Path) -> str:
    dcp.save(state, checkpoint_id=str(path / "dcp"), no_dist=True)
    return str(path / "dcp")


WRITERS = [write_torch, write_dcp]
Writer = Callable[[dict[str, Any], Path], str]


def trained(model: nn.Module, kind: Any = torch.optim.Adam, steps: int = 2, **options: Any) -> Any:
    optimizer = kind(model.parameters(), **options)
    for _ in range(steps):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = sum(parameter.square().sum() for parameter in model.parameters())
            loss.backward()
            return loss

        optimizer.step(closure)
    return optimizer


def in_torchs_form(state: dict[str, Any]) -> Any:
    """Return an optimizer's state dict without the order of keys."""
    return {key: sorted(map(str, items)) for key, items in state["state"].items()}, state["param_groups"]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.LBFGS, torch.optim.SGD, torch.optim.Adafactor])
@pytest.mark.parametrize("steps", [0, 2])
def test_an_optimizers_own_state_dict_fills_a_fresh_one(write: Writer, kind: Any, steps: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    one = trained(model, kind, steps, lr=0.25)
    # The names do not show that the tensors of LBFGS lie in lists.
    other = trained(nn.Linear(3, 2), kind, steps if kind is torch.optim.LBFGS else 0)
    path = write({"optimizer": one.state_dict()}, tmp_path)
    sx.load_checkpoint({"optimizer": other}, path)
    expected = trained(model, kind, 0)
    expected.load_state_dict(one.state_dict())
    assert in_torchs_form(other.state_dict()) == in_torchs_form(expected.state_dict())


@pytest.mark.parametrize("write", WRITERS)
def test_numbers_and_containers_in_a_parameters_state_come_back(write: Writer, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    one, other = trained(model), trained(model)
    more = {"step": 7, "inner": {"a": 1, "list": [torch.ones(2), None], "t": torch.zeros(1)}}
    one.state[model.weight] |= more
    path = write({"model": model.state_dict(), "o": get_optimizer_state_dict(model, one)}, tmp_path)
    with pytest.raises(sx.errors.InvalidArgumentError, match=r"no container of the same keys.*'o\.state\.weight"):
        sx.load_checkpoint({"model": model, "o": trained(model, steps=0)}, path)
    other.state[model.weight] |= {"inner": {"a": 0, "list": [None], "t": 0}}
    sx.load_checkpoint({"model": model, "o": other}, path)
    found = other.state[model.weight]
    assert found["step"] == 7
    assert found["inner"]["a"] == 1
    assert found["inner"]["list"][0].tolist() == [1, 1]
    assert found["inner"]["list"][1] is None


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("flatten", [True, False])
def test_parameters_whose_names_are_numbers_keep_their_state(write: Writer, flatten: bool, tmp_path: Path) -> None:
    model = nn.ParameterList([torch.ones(2), torch.ones(2), torch.ones(2)])
    one = torch.optim.Adam([model[2], model[0], model[1]], lr=0.5)
    for number, parameter in enumerate(model):
        parameter.grad = torch.full((2,), 1.0 + number)
    one.step()
    options = torch.distributed.checkpoint.state_dict.StateDictOptions(flatten_optimizer_state_dict=flatten)
    state = get_optimizer_state_dict(model, one, options=options)
    path = write({"model": model.state_dict(), "o": state}, tmp_path)
    other = torch.optim.Adam([model[2], model[0], model[1]])
    sx.load_checkpoint({"model": model, "o": other}, path)
    for parameter in model:
        assert torch.equal(other.state[parameter]["exp_avg"], one.state[parameter]["exp_avg"])
    assert other.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("write", WRITERS)
def test_renamed_parameters_keep_their_hyperparameters(write: Writer, tmp_path: Path) -> None:
    old, new = nn.ModuleDict({"old": nn.Linear(3, 2)}), nn.ModuleDict({"new": nn.Linear(3, 2)})
    one = trained(old, lr=0.25)
    path = write({"model": old.state_dict(), "o": get_optimizer_state_dict(old, one)}, tmp_path)
    other = torch.optim.Adam(new.parameters())
    sx.load_checkpoint({"model": new, "o": other}, path, rename=[(r"\bold\.", "new.")])
    assert other.param_groups[0]["lr"] == 0.25
    assert torch.equal(other.state[new["new"].weight]["exp_avg"], one.state[old["old"].weight]["exp_avg"])


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("lr", [np.float32(0.5), {1, 2}])
def test_a_hyperparameter_that_cannot_be_read_is_refused_by_name(write: Writer, lr: Any, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    one = trained(model)
    one.param_groups[0]["lr"] = lr
    path = write({"o": one.state_dict()}, tmp_path)
    with pytest.raises(sx.errors.UnsupportedError, match=r"neither a tensor nor a plain value.*param_groups\.0\.lr"):
        sx.load_checkpoint({"o": trained(model)}, path)


@pytest.mark.parametrize("write", WRITERS)
def test_a_tensor_as_lr_is_read(write: Writer, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    path = write({"o": trained(model, lr=torch.tensor(0.5)).state_dict()}, tmp_path)
    for lr in (0.1, torch.tensor(0.1)):
        other = trained(model, lr=lr)
        sx.load_checkpoint({"o": other}, path)
        assert torch.equal(other.param_groups[0]["lr"], torch.tensor(0.5))


@pytest.mark.parametrize("write", WRITERS)
def test_plain_containers_are_replaced_whole(write: Writer, tmp_path: Path) -> None:
    state = {
        "w": torch.ones(1),
        "counts": {"a": 1, "b": 2},
        "list": [1, {"x": 2}],
        "by": {3: 4},
        "dots": {"a.b": {"c": 1}},
    }
    path = write(state, tmp_path)
    live: dict[str, Any] = {"w": torch.zeros(1), "counts": {}, "list": [0, {"x": 0}], "by": {3: 0, 5: 6}}
    live["dots"] = {"a.b": {"c": 0}}
    counts = live["counts"]
    sx.load_checkpoint(live, path)
    assert live == state
    assert live["counts"] is counts


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("value", [{0: 1, 1: 2}, {"0": 1}, {"a.b": 1}, {True: 1}, [1, {"x": 2}], {"a": {"b": 1}}])
@pytest.mark.parametrize("live", [{}, None])
def test_containers_whose_kind_the_names_do_not_show_are_refused(
    write: Writer, value: Any, live: Any, tmp_path: Path
) -> None:
    path = write({"w": torch.ones(1), "v": value}, tmp_path)
    state = {"w": torch.zeros(1), "v": live}
    with pytest.raises(sx.errors.InvalidArgumentError, match=r"no container of the same keys.*'v'"):
        sx.load_checkpoint(state, path)
    sx.load_checkpoint(state, path, exclude=["v", "v.*"])
    assert state["v"] == live


@pytest.mark.parametrize("write", WRITERS)
def test_patterns_select_entries_of_plain_mappings(write: Writer, tmp_path: Path) -> None:
    path = write({"w": torch.ones(1), "v": {"a": 1, "b": 2, "c": {}}}, tmp_path)
    for options, wanted in (
        ({"exclude": "v.a"}, {"a": 0, "b": 2, "c": {}}),
        ({"include": "v.a"}, {"a": 1, "b": 0, "c": {}}),
        ({"include": ["w", "v.b"]}, {"a": 0, "b": 2, "c": {}}),
        ({}, {"a": 1, "b": 2, "c": {}}),
    ):
        live: dict[str, Any] = {"w": torch.zeros(1), "v": {"a": 0, "b": 0, "c": {}}}
        sx.load_checkpoint(live, path, **options)
        assert live["v"] == wanted, options


@pytest.mark.parametrize("write", WRITERS)
def test_values_that_the_state_lacks_are_listed(write: Writer, tmp_path: Path) -> None:
    path = write({"w": torch.ones(1), "step": 3, "config": {"a": 1}}, tmp_path)
    assert sx.load_checkpoint({"w": torch.zeros(1)}, path).unexpected == ("step", "config.a")
    with pytest.raises(FileNotFoundError, match=r"1 missing in the source: x; 2 not in the state: step, config\.a"):
        sx.load_checkpoint({"w": torch.zeros(1), "x": torch.zeros(1)}, path)
    assert sx.load_checkpoint({"w": torch.zeros(1)}, path, include="w").unexpected == ()


@pytest.mark.parametrize("write", WRITERS)
def test_a_value_that_cannot_be_read_is_refused_where_the_state_has_one(write: Writer, tmp_path: Path) -> None:
    path = write({"w": torch.ones(1), "seen": {1, 2}}, tmp_path)
    with pytest.raises(sx.errors.UnsupportedError, match=r"a set.*'seen'"):
        sx.load_checkpoint({"w": torch.zeros(1), "seen": None}, path)
    sx.load_checkpoint({"w": torch.zeros(1)}, path)
