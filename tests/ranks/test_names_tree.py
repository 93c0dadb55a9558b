"""Plain values and optimizers from torch's own files: what they have comes into live state, or is refused by name."""

from __future__ import annotations

import copy
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
@pytest.mark.parametrize("lr", [np.float32(0.5), {1, 2}])
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


class Averages:
    """An object whose state has tensors in containers."""

    def __init__(self, value: float) -> None:
        self.state: dict[str, Any] = {"n": int(value), "by": {3: torch.full((2,), value)}, "seen": {}}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


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


@pytest.mark.parametrize("write", WRITERS)
def test_lists_that_hold_state_are_filled(write: Writer, tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    one = trained(model)

    def state(value: float, optimizer: Any) -> dict[str, Any]:
        means = [torch.full((2,), value), [torch.full((1,), value), {"n": int(value)}]]
        return {"means": means, "parts": [optimizer, {0: torch.full((3,), value)}, {}]}

    path = write(state(5.0, one.state_dict()), tmp_path)
    live = state(0.0, trained(nn.Linear(1, 1), steps=0))
    tensor, parts = live["means"][0], live["parts"]
    sx.load_checkpoint(live, path)
    assert str(live["means"]) == str(state(5.0, None)["means"])
    assert live["means"][0] is tensor
    assert live["parts"] is parts
    assert parts[1][0].tolist() == [5, 5, 5]
    assert in_torchs_form(parts[0].state_dict()) == in_torchs_form(one.state_dict())
    live = state(0.0, trained(nn.Linear(1, 1), steps=0))
    assert sx.load_checkpoint(live, path, exclude=["*n", "parts.1"]).unexpected == ()
    assert str(live["means"]) == "[tensor([5., 5.]), [tensor([5.]), {'n': 0}]]"
    assert live["parts"][1][0].tolist() == [0, 0, 0]
    assert live["parts"][0].state_dict()["state"]
    for means, problem in (
        (live["means"][:1], r"has 'means\.1'"),
        ([*live["means"], torch.zeros(1)], r"lacks 'means\.2'"),
    ):
        with pytest.raises(sx.errors.InvalidArgumentError, match=problem) as caught:
            sx.load_checkpoint({**live, "means": means}, path)
        assert caught.value.name == "means"
    pair = {"pair": (torch.ones(2), 1)}
    path = write(pair, tmp_path / "tuple")
    pair["pair"] = (torch.zeros(2), 0)
    if write is write_dcp:  # torch pickles a tuple whole
        with pytest.raises(sx.errors.UnsupportedError, match="tuple of 2") as caught:
            sx.load_checkpoint(pair, path)
        assert caught.value.name == "pair"
    else:
        sx.load_checkpoint(pair, path)
        assert str(pair) == "{'pair': (tensor([1., 1.]), 1)}"


@pytest.mark.parametrize("write", WRITERS)
def test_values_that_the_source_lacks_are_missing_and_stay(write: Writer, tmp_path: Path) -> None:
    path = write({"w": torch.ones(1), "metrics": {"loss": 1.5, "inner": {}}, "step": torch.tensor(7)}, tmp_path)
    live: dict[str, Any] = {"w": torch.zeros(1), "step": 0, "epoch": 3, "seen": {4: 5}, "names": {"a": {"b": 1}}}
    live["metrics"] = {"loss": 0.0, "best": 2.5, "inner": {"x": 1}}
    missing = "epoch, metrics.best, metrics.inner, names, seen"
    if write is write_torch:  # it has an empty mapping there
        missing = missing.replace("metrics.inner, ", "")
        live["metrics"]["inner"] = {}
    with pytest.raises(FileNotFoundError, match=f"source: {missing}; "):
        sx.load_checkpoint(live, path)
    assert sx.load_checkpoint(live, path, strict=False).missing == tuple(missing.split(", "))
    assert live["metrics"] == {"loss": 1.5, "best": 2.5, "inner": live["metrics"]["inner"]}
    assert (live["epoch"], live["seen"], live["names"]) == (3, {4: 5}, {"a": {"b": 1}})
    assert live["step"].item() == 7


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("flatten", [True, False])
def test_a_group_without_parameters_is_no_difference(write: Writer, flatten: bool, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)

    def groups(lr: float) -> Any:
        return torch.optim.SGD([{"params": [*model.parameters()]}, {"params": [], "lr": lr}], lr=0.5, momentum=0.9)

    options = torch.distributed.checkpoint.state_dict.StateDictOptions(flatten_optimizer_state_dict=flatten)
    state = get_optimizer_state_dict(model, groups(0.25), options=options)
    path = write({"model": model.state_dict(), "o": state}, tmp_path)
    other = groups(0.125)
    assert sx.load_checkpoint({"model": model, "o": other}, path).missing == ()
    assert other.param_groups[1]["lr"] == (0.125 if flatten else 0.25)


@pytest.mark.parametrize("write", WRITERS)
def test_a_tensor_for_each_parameter_as_lr_is_refused(write: Writer, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    options = torch.distributed.checkpoint.state_dict.StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(model, trained(model, lr=torch.tensor(0.5)), options=options)
    path = write({"model": model.state_dict(), "o": state}, tmp_path)
    with pytest.raises(sx.errors.InvalidArgumentError, match="'lr'") as caught:
        sx.load_checkpoint({"model": model, "o": trained(model)}, path)
    assert caught.value.name == "o.param_groups.0"


@pytest.mark.parametrize("write", WRITERS)
def test_modules_of_a_list_have_indices_as_names_or_share_them(write: Writer, tmp_path: Path) -> None:
    modules = [nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 1)]
    names = {
        f"parts.{i}.{name}": tensor for i, part in enumerate(modules) for name, tensor in part.state_dict().items()
    }
    shared = {"parts": {**modules[0].state_dict(), **modules[1].state_dict()}}
    for i, state in enumerate(({"parts": [part.state_dict() for part in modules]}, names, shared)):
        live = [nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 1)]
        sx.load_checkpoint({"parts": live}, write(state, tmp_path / str(i)))
        for one, other in zip(modules, live, strict=True):
            assert str(one.state_dict()) == str(other.state_dict())


@pytest.mark.parametrize("write", WRITERS)
def test_long_lists_and_texts_are_values(write: Writer, tmp_path: Path) -> None:
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(10_001)]
    one, other = torch.optim.SGD(parameters, lr=0.5), torch.optim.SGD(parameters, lr=0.25)
    state = {"losses": [0.5] * 50_000, "config": "line\n" * 1000, "names": [f"{i}" * 300 for i in range(9)]}
    path = write({"o": one.state_dict(), **state}, tmp_path)
    live: dict[str, Any] = {"o": other, "losses": [], "config": "", "names": []}
    sx.load_checkpoint(live, path)
    assert other.param_groups[0]["lr"] == 0.5
    assert live == {"o": other, **state}


def test_containers_that_torch_leaves_out_stay_if_they_hold_nothing(tmp_path: Path) -> None:
    def state(value: float) -> dict[str, Any]:
        return {"a": Averages(value), "w": torch.full((1,), value), "empty": [{}, {"x": {}}], "values": {3: {}, 4: 1}}

    live, saved = state(0.0), state(5.0)
    for one in (live, saved):
        one["a"].state["list"] = [{}]
    sx.load_checkpoint(live, write_dcp({**saved, "a": saved["a"].state_dict()}, tmp_path))
    assert str(live.pop("a").state) == str(saved.pop("a").state)
    assert str(live) == str(saved)


@pytest.mark.parametrize("kind", ["RMSprop", "Adagrad", "Adadelta", "Rprop", "ASGD", "Adafactor", "Adamax", "SGD"])
def test_numbered_state_that_does_not_fit_its_parameter_is_refused(kind: str, tmp_path: Path) -> None:
    model = nn.Linear(3, 4)
    kinds = {"SGD": lambda parameters: torch.optim.SGD(parameters, momentum=0.9)}
    new = kinds.get(kind, getattr(torch.optim, kind))
    one, other = new([model.weight, model.bias]), new([model.bias, model.weight])
    model(torch.ones(1, 3)).sum().backward()
    one.step()
    path = write_torch({"o": one.state_dict()}, tmp_path)
    before = str(other.state_dict())
    with pytest.raises(sx.errors.InvalidArgumentError, match="does not fit") as caught:
        sx.load_checkpoint({"o": other}, path)
    assert caught.value.name.startswith("o.state.")
    assert str(other.state_dict()) == before


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("live_names", [True, False])
def test_numbered_parameters_are_matched_by_the_names_that_groups_have(
    write: Writer, live_names: bool, tmp_path: Path
) -> None:
    model = nn.ParameterDict({name: torch.ones(2, 2) for name in "abc"})
    named = dict(model.named_parameters())
    one = torch.optim.Adam(
        [{"params": [("a", named["a"])], "lr": 0.5}, {"params": [("b", named["b"]), ("c", named["c"])]}]
    )
    for number, parameter in enumerate(named.values()):
        parameter.grad = torch.full((2, 2), 1.0 + number)
    one.step()
    path = write({"m": model.state_dict(), "o": one.state_dict()}, tmp_path)
    last = [("c", named["c"]), ("b", named["b"])] if live_names else [named["c"], named["b"]]
    first = [("a", named["a"])] if live_names else [named["a"]]
    other = torch.optim.Adam([{"params": last}, {"params": first}])
    sx.load_checkpoint({"m": model, "o": other}, path)
    for parameter in named.values():
        assert torch.equal(other.state[parameter]["exp_avg"], one.state[parameter]["exp_avg"])
    assert [group["lr"] for group in other.param_groups] == [1e-3, 0.5]


@pytest.mark.parametrize("write", WRITERS)
def test_two_names_that_become_one_are_refused(write: Writer, tmp_path: Path) -> None:
    path = write({"w": torch.ones(1), "old": 1, "s": 2}, tmp_path)
    for new, live in (("s", {"w": torch.zeros(1), "s": 0}), ("w", {"w": torch.zeros(1)})):
        with pytest.raises(sx.errors.UnsafeError, match="one name") as caught:
            sx.load_checkpoint(live, path, rename=[("^old$", new)])
        assert caught.value.name == new
        assert "'old'" in str(caught.value)


@pytest.mark.parametrize("write", WRITERS)
def test_keys_of_any_type_are_those_of_the_source_or_refused(write: Writer, tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    one, other = trained(model), trained(model)
    # torch takes any key for state of the optimizer itself; its type hints allow tensors alone.
    one.state[None], other.state[None] = {"x": 1}, {"x": 0}  # type: ignore[index]
    path = write({"w": torch.ones(1), "d": {2: 3}, "e": {float("inf"): 5}, "o": one.state_dict()}, tmp_path)
    for live in ({"d": {2: 5, "2": 0}}, {"e": {}}, {"o": trained(model)}):
        if write is write_torch:
            sx.load_checkpoint({"w": torch.zeros(1), **live}, path, strict=False)
            continue
        with pytest.raises(sx.errors.InvalidArgumentError, match=r"alike|put them|known"):
            sx.load_checkpoint({"w": torch.zeros(1), **live}, path)
    sx.load_checkpoint({"w": torch.zeros(1), "o": other}, path)
    assert other.state[None] == {"x": 1}  # type: ignore[index]  # as above


@pytest.mark.parametrize("names", [("epoch_1.pt", "epoch_2.pt"), ("rank0.pt", "rank1.pt")])
def test_files_of_a_directory_that_differ_are_refused(names: tuple[str, str], tmp_path: Path) -> None:
    for number, name in enumerate(names):  # in torch's format, which is under test
        torch.save({"w": torch.full((3,), number), "same": torch.ones(2), "step": number, "n": 3}, tmp_path / name)
    with pytest.raises(sx.errors.ReplicaError, match=f"{names[0]} and {names[1]}") as caught:
        sx.load_checkpoint({"w": torch.zeros(3, dtype=torch.int64)}, tmp_path)
    assert caught.value.name == "w"
    assert "exclude='w'" in str(caught.value)
    with sx.open_checkpoint(tmp_path) as checkpoint:
        for _ in range(2):
            with pytest.raises(sx.errors.ReplicaError, match=f"{names[0]} and {names[1]}") as caught:
                checkpoint["w"].read()
            assert caught.value.name == "w"
            assert checkpoint["same"].read().tolist() == [1, 1]
    with pytest.raises(sx.errors.UnsupportedError, match="differs between the files") as caught:
        sx.load_checkpoint({"step": 5}, tmp_path, include="step")
    assert caught.value.name == "step"
    live: dict[str, Any] = {"w": torch.ones(3, dtype=torch.int64), "same": torch.zeros(2), "n": 0}
    sx.load_checkpoint(live, tmp_path, replicas="root")
    assert (live["w"].tolist(), live["same"].tolist(), live["n"]) == ([0, 0, 0], [1, 1], 3)
    live["same"].zero_()
    sx.load_checkpoint(live, tmp_path, exclude="w")
    assert live["same"].tolist() == [1, 1]


class WithExtraState(nn.Linear):
    """A module with a mapping as extra state."""

    def __init__(self, value: int) -> None:
        super().__init__(2, 1)
        self.extra = {"n": value, "tensor": torch.full((2,), float(value))}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class WithVersion(torch.optim.SGD):
    """An optimizer with one more entry in its state dict."""

    version = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})
        self.version = state["version"]


@pytest.mark.parametrize("write", WRITERS)
def test_further_entries_of_modules_and_optimizers_come_back(write: Writer, tmp_path: Path) -> None:
    one, other = WithExtraState(5), WithExtraState(0)
    optimizer, fresh = (WithVersion(module.parameters(), lr=0.5) for module in (one, other))
    optimizer.version = 7
    path = write({"m": one.state_dict(), "o": optimizer.state_dict()}, tmp_path)
    report = sx.load_checkpoint({"m": other, "o": fresh}, path)
    assert (report.missing, report.unexpected, fresh.version, str(other.extra)) == ((), (), 7, str(one.extra))


@pytest.mark.parametrize("write", WRITERS)
def test_a_tensor_that_gets_the_name_of_a_value_is_refused(write: Writer, tmp_path: Path) -> None:
    path = write({"w": torch.ones(1), "s": 2}, tmp_path)
    with pytest.raises(sx.errors.UnsafeError, match="one name") as caught:
        sx.load_checkpoint({"s": torch.zeros(1)}, path, rename=[("^w$", "s")])
    assert caught.value.name == "s"
    assert "'w'" in str(caught.value)
