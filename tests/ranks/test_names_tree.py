"""Plain values and optimizers from torch's own files: what they have comes into live state, or is refused by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch_trees import WRITERS, Averages, Writer, in_torchs_form, trained, write_dcp, write_torch

import statexchange as sx

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


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
    fresh = trained(model, steps=0)
    sx.load_checkpoint({"model": model, "o": fresh}, path)
    assert str(fresh.state[model.weight]["inner"]) == str(more["inner"])
    assert (fresh.state[model.weight]["step"], len(fresh.state[model.bias])) == (7, 3)
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
@pytest.mark.parametrize("lr", [np.float32(0.5), {1, 2}], ids=["a number of numpy", "a set"])
def test_a_hyperparameter_that_cannot_be_read_is_refused_by_name(write: Writer, lr: Any, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    one = trained(model)
    one.param_groups[0]["lr"] = lr
    path = write({"o": one.state_dict()}, tmp_path)
    with pytest.raises(sx.errors.UnsupportedError, match="plain value") as caught:
        sx.load_checkpoint({"o": trained(model)}, path)
    assert caught.value.name == "o.param_groups.0.lr"


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
def test_containers_that_the_state_lacks_come_back_if_their_keys_are_known(
    write: Writer, value: Any, live: Any, tmp_path: Path
) -> None:
    path = write({"w": torch.ones(1), "v": value}, tmp_path)
    state = {"w": torch.zeros(1), "v": copy.deepcopy(live)}
    # A torch.distributed.checkpoint has all keys as texts: "a" is one, and "0" may have been a number. It does not show
    # how many empty mappings a list ended with.
    if write is write_torch or "'a':" in str(value):
        sx.load_checkpoint(state, path)
        assert repr(state["v"]) == repr(value)
        return
    with pytest.raises(sx.errors.InvalidArgumentError, match=r"not known|no entry") as caught:
        sx.load_checkpoint(state, path)
    assert caught.value.name == "v"
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
    path = write({"w": torch.ones(1), "step": 3, "config": {"a": 1}, "seen": {1, 2}}, tmp_path)
    assert sx.load_checkpoint({"w": torch.zeros(1)}, path).unexpected == ("step", "config", "seen")
    with pytest.raises(FileNotFoundError, match=r": x; .*: step, config, seen;"):
        sx.load_checkpoint({"w": torch.zeros(1), "x": torch.zeros(1)}, path)
    assert sx.load_checkpoint({"w": torch.zeros(1)}, path, include="w").unexpected == ()


@pytest.mark.parametrize("write", WRITERS)
def test_a_value_that_cannot_be_read_is_refused_where_the_state_has_one(write: Writer, tmp_path: Path) -> None:
    path = write({"w": torch.ones(1), "seen": {1, 2}}, tmp_path)
    with pytest.raises(sx.errors.UnsupportedError, match=r"a set.*'seen'"):
        sx.load_checkpoint({"w": torch.zeros(1), "seen": None}, path)
    sx.load_checkpoint({"w": torch.zeros(1)}, path)


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("form", ["own", "named", "flat"])
def test_patterns_select_state_and_hyperparameters(write: Writer, form: str, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    one = trained(model, lr=0.5)
    options = torch.distributed.checkpoint.state_dict.StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    state = one.state_dict() if form == "own" else get_optimizer_state_dict(model, one, options=options)
    path = write({"model": model.state_dict(), "o": state}, tmp_path)
    for patterns, has_state, has_groups in (
        ({"include": "*exp_avg*"}, True, False),  # a parameter's state is loaded whole
        ({"include": "o"}, True, True),
        ({"include": "o.state"}, True, False),
        ({"include": "o.state.model.*"}, True, False),  # the name of the same entry in what save_checkpoint writes
        ({"include": "o.param_groups"}, False, True),
        ({"include": "o.param_groups.model.*"}, False, True),
        ({"exclude": "*.step"}, False, True),
        ({"exclude": "o.*"}, False, False),
        ({"exclude": "o"}, False, False),
        ({"exclude": "o.state"}, False, True),
        ({"exclude": "o.state.model.*"}, False, True),
        ({"exclude": "o.param_groups"}, True, False),
        ({"include": "model.*"}, False, False),
    ):
        live = nn.Linear(3, 2)
        other = trained(live, lr=0.125, steps=3)
        before = in_torchs_form(other.state_dict())
        report = sx.load_checkpoint({"model": live, "o": other}, path, **patterns)
        new = in_torchs_form(one.state_dict())
        expected = (new if has_state else before)[0], (new if has_groups else before)[1]
        assert in_torchs_form(other.state_dict()) == expected, patterns
        assert (report.missing, report.unexpected) == ((), ()), patterns


def schedulers_of(optimizer: Any) -> list[Any]:
    kinds = torch.optim.lr_scheduler
    parts = [kinds.ConstantLR(optimizer, 0.5), kinds.ExponentialLR(optimizer, 0.9)]
    return [
        kinds.StepLR(optimizer, 2),
        kinds.MultiStepLR(optimizer, [2, 3, 3]),
        kinds.OneCycleLR(optimizer, 0.5, total_steps=9),
        kinds.CosineAnnealingWarmRestarts(optimizer, 3),
        kinds.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
        kinds.SequentialLR(optimizer, parts, [2]),
        kinds.ReduceLROnPlateau(optimizer, patience=1),
    ]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("number", range(7))
def test_a_schedulers_own_state_dict_fills_one(write: Writer, number: int, tmp_path: Path) -> None:
    def one_of() -> Any:
        return schedulers_of(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0))[number]

    one, other = one_of(), one_of()
    for _ in range(3):
        one.optimizer.step()
        one.step(*([1.0] if number == 6 else []))
    path = write({"w": torch.ones(1), "s": one.state_dict()}, tmp_path)
    assert other.state_dict() != one.state_dict()
    sx.load_checkpoint({"w": torch.zeros(1), "s": other}, path)
    assert other.state_dict() == one.state_dict()
    third = one_of()
    before = third.state_dict()
    assert sx.load_checkpoint({"w": torch.zeros(1), "s": third}, path, exclude="*last_epoch").unexpected == ()
    assert third.state_dict() == before


@pytest.mark.parametrize("write", WRITERS)
def test_an_objects_state_has_the_entries_of_its_present_one(write: Writer, tmp_path: Path) -> None:
    one, other, counting = Averages(5.0), Averages(0.0), Averages(0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    path = write({"a": one.state_dict(), "scaler": scaler.state_dict()}, tmp_path)
    live = torch.amp.GradScaler("cpu")
    sx.load_checkpoint({"a": other, "scaler": live}, path)
    assert str(other.state) == str(one.state)
    assert live.state_dict() == scaler.state_dict()
    counting.state["by"] = {4: torch.zeros(2)}
    if write is write_torch:
        sx.load_checkpoint({"a": counting, "scaler": live}, path)
        assert str(counting.state) == str(one.state)
    else:
        with pytest.raises(sx.errors.InvalidArgumentError, match="not known") as caught:
            sx.load_checkpoint({"a": counting, "scaler": live}, path)
        assert caught.value.name == "a.by"
    with pytest.raises(FileNotFoundError, match=r"missing.*\bb;"):
        sx.load_checkpoint({"a": other, "scaler": live, "b": Averages(1.0)}, path)
    alone = Averages(0.0)
    assert sx.load_checkpoint(alone, write(one.state_dict(), tmp_path / "alone")).missing == ()
    assert str(alone.state) == str(one.state)
    with pytest.raises(FileNotFoundError, match="nothing for"):
        sx.load_checkpoint(torch.amp.GradScaler("cpu"), write({"w": torch.ones(1)}, tmp_path / "other"))


def test_a_mapping_that_torch_may_have_left_out_is_refused(tmp_path: Path) -> None:
    one, other = Averages(5.0), Averages(0.0)
    other.state["seen"] = {"a": 1}
    with pytest.raises(sx.errors.InvalidArgumentError, match=r"empty mappings.*'a\.seen'"):
        sx.load_checkpoint({"a": other}, write_dcp({"a": one.state_dict()}, tmp_path))
    sx.load_checkpoint({"a": other}, write_torch({"a": one.state_dict()}, tmp_path))
    assert other.state["seen"] == {}
