"""Ranks that saved different things at one path: each gets its own again, and a load on one rank joins or refuses."""

from __future__ import annotations

import collections
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from stored import flip_bit
from torch import nn

import statexchange as sx
from statexchange.testing import run_ranks

Pair = collections.namedtuple("Pair", "x y")


class Store:
    """An object with a state of its own."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = dict(state)


def optimizer(model: nn.Module, value: float | None, **options: Any) -> torch.optim.Optimizer:
    new = torch.optim.AdamW(model.parameters(), **options)
    if value is not None:
        for parameter in model.parameters():
            new.state[parameter] = {
                "step": torch.tensor(value),
                "exp_avg": torch.full_like(parameter, value),
                "exp_avg_sq": torch.full_like(parameter, value + 1),
            }
    return new


def job(value: float | None, **options: Any) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value or 0.0)
    return {"model": model, "optimizer": optimizer(model, value, **options)}


def averages(state: dict[str, Any], key: str = "optimizer") -> list[float | None]:
    """Return the first value of each parameter's average, None where it has no state."""
    found = state[key].state
    parameters = [one for group in state[key].param_groups for one in group["params"]]
    return [float(found[one]["exp_avg"].flatten()[0]) if one in found else None for one in parameters]


@pytest.mark.parametrize("replicas", ["first", "root"])
@pytest.mark.parametrize("kept", [[[0, 1], [2, 3]], [[], [0, 1, 2, 3]], [[0, 1, 3], [0, 1, 2, 3]]])
def test_states_of_parameters_that_only_some_ranks_have_are_all_loaded(
    kept: list[list[int]], replicas: Any, tmp_path: Path
) -> None:
    def save() -> None:
        state = job(3.0)
        for number, parameter in enumerate(state["model"].parameters()):
            if number not in kept[sx.get_rank()]:
                state["optimizer"].state.pop(parameter)
        sx.save_checkpoint(state, tmp_path / "saved")

    run_ranks(save, 2)
    live = job(None)
    options = {"replicas": replicas} if replicas == "root" else {}
    sx.load_checkpoint(live, tmp_path / "saved", **options)
    assert averages(live) == [3.0] * 4

    def load() -> list[float | None]:
        own = job(None)
        sx.load_checkpoint(own, tmp_path / "saved")
        return averages(own)

    own = [[3.0 if number in numbers else None for number in range(4)] for numbers in kept]
    assert run_ranks(load, 2) == own


VALUES: dict[str, Any] = {
    "nothing": lambda _: None,
    "number": lambda value: int(value),
    "mapping": lambda _: {},
    "tensors": lambda value: {"a": torch.full((1,), value)},
    "tensor": lambda value: torch.full((1,), value),
    "list": lambda value: [torch.full((1,), value)],
    "module": lambda value: job(value)["model"],
    "object": lambda value: Store(a=int(value), t=torch.full((1,), value)),
    "optimizer": lambda value: job(value or 1.0)["optimizer"],
}


def described(value: Any) -> str:
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    return repr(value)


@pytest.mark.parametrize("second", VALUES)
@pytest.mark.parametrize("first", VALUES)
def test_each_rank_gets_what_it_saved_whatever_the_other_has_there(first: str, second: str, tmp_path: Path) -> None:
    def state(value: float) -> dict[str, Any]:
        kind = first if sx.get_rank() == 0 else second
        return {"x": VALUES[kind](value), "w": torch.full((1,), value)}

    def trip() -> None:
        saved = state(3.0)
        sx.save_checkpoint(saved, tmp_path / "saved")
        live = state(0.0)
        sx.load_checkpoint(live, tmp_path / "saved")
        assert described(live["x"]) == described(saved["x"])
        assert float(live["w"]) == 3.0

    run_ranks(trip, 2)


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        ([3, {"a": 1}], 0),
        ([{"a": 1}, 3], {}),
        ([3, torch.ones(1)], 0),
        ([(torch.ones(1), 7), (torch.ones(1), torch.ones(1), 7)], (torch.zeros(1), 0)),
        ([[{"a": 1}], [{"a": 1}, {"a": 2}]], []),
    ],
)
def test_with_replicas_root_the_first_ranks_kind_counts(saved: list[Any], live: Any, tmp_path: Path) -> None:
    run_ranks(lambda: sx.save_checkpoint({"x": saved[sx.get_rank()], "w": torch.ones(1)}, tmp_path / "saved"), 2)
    state = {"x": live, "w": torch.zeros(1)}
    sx.load_checkpoint(state, tmp_path / "saved", replicas="root")
    assert repr(state["x"]) == repr(saved[0])
    with pytest.raises(sx.errors.ReplicaError, match="'x'"):
        sx.load_checkpoint({"x": live, "w": torch.zeros(1)}, tmp_path / "saved")
    kept = {"x": live, "w": torch.zeros(1)}
    sx.load_checkpoint(kept, tmp_path / "saved", exclude="x")
    assert repr(kept["x"]) == repr(live)
    assert float(kept["w"]) == 1.0


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        ([(torch.ones(1),), (torch.ones(1),) * 2], (torch.zeros(1),)),
        ([({"a": 1},), ({"a": 1},) * 2], ()),
        ([({"a": 1}, 2, 3), Pair({"a": 1}, 2)], Pair({}, 0)),
        ([{"h": [{"a": 1}]}, {"h": []}], {}),
    ],
    ids=["tuples of tensors", "tuples of mappings", "a namedtuple", "lists"],
)
def test_containers_of_other_lengths_or_types_are_not_joined(saved: list[Any], live: Any, tmp_path: Path) -> None:
    run_ranks(lambda: sx.save_checkpoint({"x": saved[sx.get_rank()], "w": torch.ones(1)}, tmp_path / "saved"), 2)
    state = {"x": live, "w": torch.zeros(1)}
    with pytest.raises(sx.errors.ReplicaError, match="'x"):
        sx.load_checkpoint(state, tmp_path / "saved")
    assert float(state["w"]) == 0.0


def test_a_mapping_that_is_empty_on_one_rank_has_the_items_of_others(tmp_path: Path) -> None:
    saved: list[dict[str, Any]] = [{}, {"a": torch.ones(1), "b": 2}]
    run_ranks(lambda: sx.save_checkpoint({"x": saved[sx.get_rank()]}, tmp_path / "saved"), 2)
    state = {"x": {"a": torch.zeros(1), "b": 0}}
    sx.load_checkpoint(state, tmp_path / "saved")
    assert repr(state["x"]) == repr(saved[1])


def test_with_replicas_root_hyperparameters_are_root_s_and_states_any_ranks(tmp_path: Path) -> None:
    def save() -> None:
        state = job(3.0, lr=0.25 + sx.get_rank())
        if sx.get_rank() == 0:
            state["optimizer"].state.clear()
        sx.save_checkpoint(state, tmp_path / "saved")

    run_ranks(save, 2)
    live = job(None)
    sx.load_checkpoint(live, tmp_path / "saved", replicas="root")
    assert averages(live) == [3.0] * 4
    assert live["optimizer"].param_groups[0]["lr"] == 0.25


def test_tensors_that_another_rank_has_where_the_first_has_an_optimizer_are_not_dropped(tmp_path: Path) -> None:
    def save() -> None:
        value = job(3.0)["optimizer"] if sx.get_rank() == 0 else {"a": torch.ones(1)}
        sx.save_checkpoint({"x": value}, tmp_path / "saved")

    run_ranks(save, 2)
    with pytest.raises(sx.errors.InvalidArgumentError, match="saved as something else") as caught:
        sx.load_checkpoint({"x": job(None)["optimizer"]}, tmp_path / "saved")
    error = caught.value
    assert (error.name, error.expected, error.found) == ("x", "an optimizer", "a dict")


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_has_a_state_of_its_own_is_renamed_by_its_name(ranks: int, tmp_path: Path) -> None:
    def trip() -> None:
        saved = job(3.0, lr=0.5)
        saved["old"] = saved.pop("optimizer")
        saved["old_schedule"] = torch.optim.lr_scheduler.StepLR(saved["old"], 7)
        values = {"a": 1, "items": [{"x": 1}], "plain": [1, 2], "t": torch.ones(1)}
        sx.save_checkpoint({"objects": {"old": Store(**values)}, **saved}, tmp_path / "saved")
        live = job(None)
        live["new"] = live.pop("optimizer")
        live["new_schedule"] = torch.optim.lr_scheduler.StepLR(live["new"], 2)
        live["objects"] = {"new": Store(a=0, items=[{"x": 0}], plain=[0], t=torch.zeros(1))}
        rename = [(r"^objects\.old$", "objects.new"), ("^old_schedule$", "new_schedule"), ("^old$", "new")]
        sx.load_checkpoint(live, tmp_path / "saved", rename=rename)
        assert averages(live, "new") == [3.0] * 4
        assert live["new"].param_groups[0]["lr"] == 0.5
        assert live["new_schedule"].step_size == 7
        assert repr(live["objects"]["new"].values) == repr(values)

    run_ranks(trip, ranks)


@pytest.mark.parametrize(
    ("saved", "live", "path"),
    [
        ([{"1": 1}, {1: 1}], {}, "x.1"),
        ([{1: 1, "u": 2}, {"1": 1, "u": 2}], {1: 0, "u": 0}, "x.1"),
        ([{"a.b": 1}, {"a": {"b": 1}}], {}, "x.a.b"),
        ([{"1": {"a": 1}}, {1: {"b": 2}}], {}, "x.1"),
    ],
)
def test_values_of_one_text_under_other_keys_are_not_the_same(
    saved: list[Any], live: Any, path: str, tmp_path: Path
) -> None:
    run_ranks(lambda: sx.save_checkpoint({"x": saved[sx.get_rank()], "w": torch.ones(1)}, tmp_path / "saved"), 2)
    state = {"x": copy.deepcopy(live), "w": torch.zeros(1)}
    with pytest.raises(sx.errors.ReplicaError, match=f"different values of '{path}'") as caught:
        sx.load_checkpoint(state, tmp_path / "saved")
    assert caught.value.rank == 1
    assert repr(state["x"]) == repr(live)
    assert float(state["w"]) == 0.0
    sx.load_checkpoint(state, tmp_path / "saved", exclude="x*")
    assert (repr(state["x"]), float(state["w"])) == (repr(live), 1.0)
    sx.load_checkpoint(state, tmp_path / "saved", replicas="root")
    assert repr(state["x"]) == repr(saved[0])

    def load() -> None:
        own = {"x": copy.deepcopy(live), "w": torch.zeros(1)}
        sx.load_checkpoint(own, tmp_path / "saved")
        assert repr(own["x"]) == repr(saved[sx.get_rank()])

    run_ranks(load, 2)


def test_no_rank_installs_anything_where_another_could_not_read(tmp_path: Path) -> None:
    states = {}

    def save_and_load() -> None:
        rank = sx.get_rank()
        state = job(1.0) | {"own": torch.full((1000,), float(rank)), "step": 7}
        sx.save_checkpoint(state, tmp_path / "saved")
        if rank == 1:
            (file,) = (tmp_path / "saved").glob("*rank*1*.safetensors")
            flip_bit(file, -1)
        states[rank] = job(None) | {"own": torch.zeros(1000), "step": 0}
        sx.get_communicator().barrier()
        sx.load_checkpoint(states[rank], tmp_path / "saved")

    with pytest.raises(sx.errors.StateExchangeError) as caught:
        run_ranks(save_and_load, 2, backend="threads")
    assert "CorruptError" in str(caught.value)
    for state in states.values():
        assert state["step"] == 0
        assert not state["optimizer"].state


@pytest.mark.parametrize("where", ["memory://{}/saved", "{}/saved"], ids=["object store", "directory"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_each_rank_gets_its_own_values_from_any_store(world_size: int, where: str, tmp_path: Path) -> None:
    loaded = {}

    def save_and_load() -> None:
        rank = sx.get_rank()
        target = where.format(tmp_path)
        sx.save_checkpoint({"w": torch.ones(2), "own": torch.full((3,), float(rank))}, target)
        state = {"w": torch.zeros(2), "own": torch.full((3,), -1.0)}
        sx.load_checkpoint(state, target)
        loaded[rank] = state["own"].tolist(), state["w"].tolist()

    run_ranks(save_and_load, world_size, backend="threads")
    assert loaded == {rank: ([float(rank)] * 3, [1.0, 1.0]) for rank in range(world_size)}
