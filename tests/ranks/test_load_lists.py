"""Lists and items in a load, over all ranks: what is left out stays, what differs is named."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from load_choices import WRITERS, Counted, Pair, ReadOnly, Write, trained, write_save, write_torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import statexchange as sx
from statexchange.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Stage(nn.Module):
    def __init__(self, value: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.value = value

    def get_extra_state(self) -> dict[str, int]:
        return {"value": self.value}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.value = state["value"]


@pytest.mark.parametrize(
    "state",
    [
        lambda rank: [Stage(10 + rank)],
        lambda rank: (Counted(n=rank), {"w": torch.ones(1)}),
        lambda rank: [Stage(1) for _ in range(rank + 1)],
    ],
)
def test_states_that_are_lists_are_compared_between_ranks(state: Any, tmp_path: Path) -> None:
    run_ranks(lambda: sx.save_checkpoint(state(sx.get_rank()), tmp_path / "save"), 2)
    with pytest.raises(sx.errors.ReplicaError, match=r"different (values|states)"):
        sx.load_checkpoint(state(0), tmp_path / "save")
    sx.load_checkpoint(state(0), tmp_path / "save", replicas="root")


def test_an_item_of_a_list_that_ranks_saved_differently_can_be_left_out(tmp_path: Path) -> None:
    def state(rank: int) -> dict[str, Any]:
        return {"l": [Counted(n=rank), Counted(n=5)], "w": torch.ones(1)}

    run_ranks(lambda: sx.save_checkpoint(state(sx.get_rank()), tmp_path / "save"), 2)
    live = state(9)
    with pytest.raises(sx.errors.ReplicaError, match=r"exclude='l\.0\.n'"):
        sx.load_checkpoint(live, tmp_path / "save")
    live["l"][1] = Counted(n=0)
    sx.load_checkpoint(live, tmp_path / "save", exclude="l.0.n")
    assert repr(live["l"]) == "[Counted({'n': 9}), Counted({'n': 5})]"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"a": 2, "c": 2}),
        ({"exclude": "x.a"}, {"a": 9, "c": 2}),
        ({"exclude": ["x.a", "x.c"]}, {"a": 9, "c": 9}),
        ({"include": ["x.only0", "w"]}, {"a": 9, "c": 9}),
    ],
)
def test_no_rank_gets_what_another_one_saved(options: Any, expected: Any, tmp_path: Path) -> None:
    def saves_and_loads() -> Any:
        rank = sx.get_rank()
        saved = {"a": 1, "c": 1, "only0": 5} if rank == 0 else {"a": 2, "c": 2}
        sx.save_checkpoint({"x": saved, "w": torch.ones(1)}, tmp_path / "save")
        state = {"x": dict.fromkeys(saved, 9), "w": torch.zeros(1)}
        sx.load_checkpoint(state, tmp_path / "save", **options)
        return state["x"]

    assert run_ranks(saves_and_loads, 2)[1] == expected


@dataclasses.dataclass
class Once:
    a: int

    def __post_init__(self) -> None:
        self.is_made = True

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "a" and hasattr(self, "is_made"):
            raise ValueError("a is final")
        super().__setattr__(name, value)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda rank: ReadOnly(a=rank), "ReadOnly refuses the new values here, and raised TypeError"),
        (lambda rank: Pair(rank, 2), "Pair does not have the items"),
        (lambda rank: Once(rank), "Once refuses a new value of its field 'a'"),
    ],
)
def test_synchronize_changes_nothing_if_a_container_refuses(make: Any, match: str) -> None:
    def synchronizes() -> str:
        rank = sx.get_rank()
        state = {"a": 10 + rank, "c": make(rank), "w": torch.tensor([float(rank)])}
        before = repr(state)
        with pytest.raises(sx.StateExchangeError) as raised:
            sx.synchronize(state)
        assert repr(state) == before
        return str(raised.value)

    text = run_ranks(synchronizes, 2)[1]
    assert match in text
    assert "tensor 'c'" in text


# More of torch's files


def test_renamed_tensors_lead_to_the_parameters_that_a_source_names(tmp_path: Path) -> None:
    def job(prefix: str, order: str, *, named: bool) -> Any:
        model = nn.ModuleDict({prefix + key: nn.Linear(1, 1, bias=False) for key in "ab"})
        parameters = [(f"{prefix}{key}.weight", model[prefix + key].weight) for key in order]
        given: Any = parameters if named else [parameter for _, parameter in parameters]
        return model, torch.optim.SGD(given, lr=0.1, momentum=0.9)

    def momenta(model: Any, optimizer: Any, names: list[str]) -> list[float]:
        return [optimizer.state[model[name].weight]["momentum_buffer"].item() for name in names]

    def saved(prefix: str) -> Path:
        model, optimizer = job(prefix, "ab", named=True)
        for value, name in enumerate(model):
            model[name].weight.grad = torch.full((1, 1), 1.0 + value)
        optimizer.step()
        return write_torch({"m": model, "o": optimizer}, tmp_path)

    path = saved("old")
    for named in (False, True):
        model, optimizer = job("new", "ba", named=named)
        sx.load_checkpoint({"m": model, "o": optimizer}, path, rename=[(r"\bold", "new")])
        assert momenta(model, optimizer, ["newa", "newb"]) == [1, 2]
    path = saved("")
    model, optimizer = job("", "ab", named=True)
    swap = {"m.a.weight": "m.b.weight", "m.b.weight": "m.a.weight"}
    sx.load_checkpoint({"m": model, "o": optimizer}, path, rename=lambda name: swap.get(name, name))
    assert momenta(model, optimizer, ["a", "b"]) == [2, 1]


@pytest.mark.parametrize("write", WRITERS)
def test_empty_containers_of_the_live_state_go_if_they_were_not_saved(write: Write, tmp_path: Path) -> None:
    path = write({"h": [{"a": 5}], "k": {2: 5}, "o": Counted(n=5)}, tmp_path)
    state = {"h": [{"a": 1}, {}], "k": {1: {}, 2: 3}, "o": Counted(n=1, seen={})}
    sx.load_checkpoint(state, path)
    assert repr(state) == "{'h': [{'a': 5}], 'k': {2: 5}, 'o': Counted({'n': 5})}"
    state = {"t": {"a": {}, "b": 3}}
    sx.load_checkpoint(state, write_torch({"t": {"b": 5}}, tmp_path))
    assert state == {"t": {"b": 5}}


EXCLUDED: list[tuple[Any, Any, Any, Any]] = [
    (None, {"loss": 1.0, "epoch": 2}, "v.epoch", {"loss": 1.0, "epoch": 2}),
    ([{"a": 5}], [{"a": 1, "secret": 2}], "*.secret", [{"a": 1, "secret": 2}]),
    (7, [5, 5], "v.*", [5, 5]),
    ([1, 2, 3], [0, 0, 0, 9], "v.3", [0, 0, 0, 9]),
    ({2: 5}, {1: [], 2: 0}, "w", {2: 5}),
    ({2: 5}, {1: 0, 2: 0}, "w", {2: 5}),
    ({"b": 5}, {"a": {"x": 1, "y": 2}, "b": 0}, "v.a.x", {"a": {"x": 1, "y": 2}, "b": 5}),
]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(("saved", "live", "exclude", "expected"), EXCLUDED)
def test_what_is_excluded_is_not_lost_with_what_holds_it(
    write: Write, saved: Any, live: Any, exclude: str, expected: Any, tmp_path: Path
) -> None:
    state = {"v": copy.deepcopy(live), "w": 0}
    sx.load_checkpoint(state, write({"v": saved, "w": 1}, tmp_path), exclude=exclude, strict=False)
    assert state["v"] == expected


@pytest.mark.parametrize("options", [{}, {"include": ["m", "o"]}, {"exclude": "step"}, {"include": ["m", "o.state.*"]}])
def test_patterns_hide_no_unexpected_entry_of_what_is_loaded(options: Any, tmp_path: Path) -> None:
    large = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    small = nn.Sequential(nn.Linear(1, 1, bias=False))
    named = get_optimizer_state_dict(large, trained(large))
    path = write_torch({"o": named, "m": small, "step": 1}, tmp_path)
    with pytest.raises(sx.errors.InvalidArgumentError, match=r"not in.*\bo\.state\.1\.weight\b"):
        sx.load_checkpoint({"o": trained(small), "m": small, "step": 0}, path, **options)


def test_a_value_that_is_reported_missing_stays(tmp_path: Path) -> None:
    path = write_torch({"t": [torch.ones(1), {"a": 5}], "m": {"a": 5}}, tmp_path)
    state = {"t": [torch.zeros(1), {"a": 1, "b": 2}], "m": {"a": 1, "b": 2}}
    assert sx.load_checkpoint(state, path, strict=False).missing == ("m.b", "t.1.b")
    assert repr(state) == "{'t': [tensor([1.]), {'a': 5, 'b': 2}], 'm': {'a': 5, 'b': 2}}"


@pytest.mark.parametrize("write", WRITERS)
def test_entries_of_a_whole_state_are_selected_by_any_key(write: Write, tmp_path: Path) -> None:
    path = write({1: 7, "a": 8, 2: 3}, tmp_path)
    state: dict[Any, int] = {1: 0, "a": 0, 2: 0}
    sx.load_checkpoint(state, path, exclude=["1", "a"])
    assert state == {1: 0, "a": 0, 2: 3}
    sx.load_checkpoint(state, path, include="1")
    assert state == {1: 7, "a": 0, 2: 3}


def test_a_key_with_a_bracket_is_compared_between_ranks(tmp_path: Path) -> None:
    run_ranks(lambda: sx.save_checkpoint({"lr[enc]": 0.1 * (sx.get_rank() + 1)}, tmp_path / "save"), 3)
    with pytest.raises(sx.errors.ReplicaError, match=r"values of 'lr\[enc\]'") as caught:
        sx.load_checkpoint({"lr[enc]": 0.0}, tmp_path / "save")
    assert caught.value.rank == 1


def test_a_difference_names_the_ranks_that_have_the_value(tmp_path: Path) -> None:
    def saves() -> None:
        rank = sx.get_rank()
        sx.save_checkpoint({"a": 1, **({"b": rank} if rank else {})}, tmp_path / "save")

    run_ranks(saves, 3)
    state = {"a": 0, "b": 0}
    with pytest.raises(sx.errors.ReplicaError, match="values of 'b'") as caught:
        sx.load_checkpoint(state, tmp_path / "save")
    assert caught.value.rank == 2
    assert 'replicas="root"' in str(caught.value)
    sx.load_checkpoint(state, tmp_path / "save", replicas="root")
    assert state == {"a": 1, "b": 1}


def test_many_values_that_differ_are_left_out_by_a_pattern(tmp_path: Path) -> None:
    def state(rank: int) -> dict[str, Any]:
        rng = {f"r{number}": rank for number in range(5)}
        return {"train": {"w": torch.full((1,), 5.0), "rng": rng}}

    run_ranks(lambda: sx.save_checkpoint(state(sx.get_rank()), tmp_path / "save"), 2)
    live = state(9)
    live["train"]["w"].zero_()
    with pytest.raises(sx.errors.ReplicaError, match=r"'train\.rng\.r0' and 4 more"):
        sx.load_checkpoint(live, tmp_path / "save")
    sx.load_checkpoint(live, tmp_path / "save", exclude="train.rng.*")
    assert live["train"] == {"w": torch.full((1,), 5.0), "rng": state(9)["train"]["rng"]}


@pytest.mark.parametrize("replicas", ["equal", "root"])
def test_tensors_that_only_one_rank_has_in_a_list_are_loaded(replicas: Any, tmp_path: Path) -> None:
    def saves() -> None:
        rank = sx.get_rank()
        sx.save_checkpoint({"x": [{f"w{rank}": torch.full((1,), 1.0 + rank)}, "same"]}, tmp_path / "save")

    run_ranks(saves, 2)
    state = {"x": [{"w0": torch.zeros(1), "w1": torch.zeros(1)}, ""]}
    sx.load_checkpoint(state, tmp_path / "save", replicas=replicas)
    assert repr(state) == "{'x': [{'w0': tensor([1.]), 'w1': tensor([2.])}, 'same']}"


def test_what_is_left_out_in_a_list_is_not_missing(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    path = write_torch({"l": [{"opt": trained(model), "m": model}], "t": [{"w": torch.ones(1), "v": [1]}]}, tmp_path)
    loaded: dict[str, Any] = {"opt": torch.optim.Adam(model.parameters()), "m": model}
    state = {"l": [loaded], "t": [{"w": torch.zeros(1), "v": [0]}]}
    sx.load_checkpoint(state, path, exclude=["l.0.opt.state.*.exp_avg", "t.0.v.0"])
    assert not loaded["opt"].state
    assert repr(state["t"]) == "[{'w': tensor([1.]), 'v': [0]}]"


def test_groups_without_parameters_keep_their_order(tmp_path: Path) -> None:
    def job(lr: float) -> Any:
        model = nn.Linear(1, 1)
        groups: list[dict[str, Any]] = [{"params": [model.weight], "lr": lr}]
        groups += [{"params": [], "lr": lr + number} for number in range(1, 12)]
        return model, torch.optim.SGD(groups)

    model, optimizer = job(100)
    named = get_optimizer_state_dict(model, optimizer)
    path = write_torch({"m": model, "o": named}, tmp_path)
    model, optimizer = job(0)
    sx.load_checkpoint({"m": model, "o": optimizer}, path, strict=False)
    assert [group["lr"] for group in optimizer.param_groups] == [100 + number for number in range(12)]


def test_names_are_listed_once(tmp_path: Path) -> None:
    path = write_torch({"a": 1}, tmp_path)
    with pytest.raises(sx.errors.NotFoundError, match=r"source: b;"):
        sx.load_checkpoint({"a": 0, "b": 0}, path, include=["a", "b"])
    path = write_save({"c": {"d": {"a": 1}}}, tmp_path)
    with pytest.raises(sx.errors.NotFoundError, match=r"source: c\.e;"):
        sx.load_checkpoint({"c": {"d": {"a": 0}, "e": {"b": 0}}}, path, include="c")
