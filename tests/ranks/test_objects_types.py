"""Types, keys and shared entries in the states of objects come back, or are refused by name."""

from __future__ import annotations

import copy
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded_paths import Write, write_save, write_torch
from stateful import WithExtra
from torch import nn
from trained_jobs import Holder, Mode, saved, trained

import statexchange as sx
from statexchange.testing import RankFailure, run_ranks

# What an attack found


class Loads(torch.optim.SGD):
    """Its state dict has an entry of any type, and its load may fail."""

    def __init__(self, parameters: Any, entry: Any, error: Exception | None = None) -> None:
        super().__init__(parameters, lr=0.1)
        self.entry, self.error = entry, error

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "entry": self.entry}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.error is not None:
            raise self.error
        self.entry = state_dict["entry"]
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


def test_keys_of_unknown_types_are_refused_and_of_known_ones_come_back(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)

    def optimizer(**state: Any) -> Any:
        one = torch.optim.SGD(model.parameters(), lr=0.1)
        one.state.update(state.get("shared", {}))
        if "own" in state:
            one.state[model.weight] = state["own"]
        one.param_groups[0].update(state.get("group", {}))
        return one

    for number, state in enumerate(({"shared": {Mode.SLOW: 1}}, {"own": {Mode.SLOW: 1}}, {"group": {Mode.SLOW: 1}})):
        path = saved({"model": model, "o": optimizer(**state)}, tmp_path / str(number))
        with pytest.raises(sx.errors.UnsupportedError, match="Mode was saved") as caught:
            sx.load_checkpoint({"model": model, "o": optimizer()}, path)
        assert caught.value.name.startswith("o.")
        other = optimizer(shared={Mode.FAST: 4})
        sx.load_checkpoint({"model": model, "o": other}, path)
        assert Mode.SLOW in {*other.state, *other.state[model.weight], *other.param_groups[0]}
        assert Mode.FAST not in other.state


@dataclass
class Held:
    tensor: Any
    n: int = 0


def test_dataclasses_with_tensors_in_the_states_of_objects_come_back(tmp_path: Path) -> None:
    def job(n: int) -> dict[str, Any]:
        held = Held(torch.full((2,), float(n)), n)
        model = WithExtra({"held": copy.deepcopy(held)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.state[model.weight] = {"held": copy.deepcopy(held)}
        optimizer.param_groups[0]["held"] = copy.deepcopy(held)
        return {"model": model, "o": optimizer, "holder": Holder(held=held)}

    one, other = job(1), job(2)
    path = saved(one, tmp_path)
    assert type(one["holder"].state["held"].tensor) is torch.Tensor
    sx.load_checkpoint(other, path)
    optimizer = other["o"]
    places = (optimizer.state[other["model"].weight], optimizer.param_groups[0], other["holder"].state)
    for held in (*(place["held"] for place in places), other["model"].extra["held"]):
        assert type(held) is Held
        assert (held.tensor.tolist(), held.n) == ([1, 1], 1)


def test_shared_state_under_the_name_of_a_parameter_is_refused_at_the_save(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = trained(nn.Linear(3, 2))
    optimizer.state["0"] = {"x": 1}
    with pytest.raises(sx.errors.UnsupportedError, match="the key '0'") as caught:
        saved({"o": optimizer}, tmp_path)
    assert caught.value.name == "o"
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state["model.weight"] = 1
    with pytest.raises(sx.errors.UnsupportedError, match=r"'model\.weight'") as caught:
        saved({"model": model, "o": optimizer}, tmp_path)
    assert caught.value.name == "o"


def test_hooks_that_change_the_groups_are_refused_and_those_before_are_called(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = trained(model)
    optimizer.register_state_dict_post_hook(lambda o, found: found["param_groups"][0].update(ema=0.5))
    with pytest.raises(sx.errors.UnsupportedError, match="of an Adam") as caught:
        saved({"model": model, "o": optimizer}, tmp_path)
    assert caught.value.name == "o"
    one, other = trained(model), trained(model)
    one.register_state_dict_pre_hook(lambda o: o.state[model.weight].update(slow=torch.full((2,), 3.0)))
    sx.load_checkpoint({"model": model, "o": other}, saved({"model": model, "o": one}, tmp_path))
    assert other.state[model.weight]["slow"].tolist() == [3, 3]


def test_a_state_dict_of_equal_copies_is_the_optimizers_own(tmp_path: Path) -> None:
    class Copies(torch.optim.Adam):
        def state_dict(self) -> dict[str, Any]:
            return copy.deepcopy(super().state_dict())

    model = nn.Linear(3, 2)
    one, other = trained(model, Copies), trained(model, Copies, steps=3)
    sx.load_checkpoint({"model": model, "o": other}, saved({"model": model, "o": one}, tmp_path))
    assert torch.equal(other.state[model.weight]["exp_avg"], one.state[model.weight]["exp_avg"])


def test_entries_of_a_state_dict_may_have_types_and_their_errors_name_the_optimizer(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    path = saved({"model": model, "o": Loads(model.parameters(), Mode.SLOW)}, tmp_path)
    other = Loads(model.parameters(), Mode.FAST)
    groups, group = other.param_groups, other.param_groups[0]
    sx.load_checkpoint({"model": model, "o": other}, path)
    assert other.entry is Mode.SLOW
    assert other.param_groups is groups
    assert other.param_groups[0] is group
    with pytest.raises(sx.errors.InvalidArgumentError, match=r"ValueError\('boo'\)") as caught:
        sx.load_checkpoint({"model": model, "o": Loads(model.parameters(), Mode.FAST, ValueError("boo"))}, path)
    assert caught.value.name == "o"


def test_synchronize_refuses_entries_that_only_one_rank_has() -> None:
    models = [nn.Linear(2, 2) for _ in range(2)]

    def ranks() -> None:
        rank = sx.get_rank()
        optimizer = torch.optim.SGD(models[rank].parameters())
        if rank == 1:
            optimizer.register_state_dict_post_hook(lambda o, found: {**found, "n": 7})
        sx.synchronize({"o": optimizer})

    with pytest.raises(RankFailure, match="the entry 'n'"):
        run_ranks(ranks, 2)


def test_groups_without_parameters_must_be_as_many(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)

    def job(*lrs: float) -> dict[str, Any]:
        groups = [{"params": model.parameters()}, *({"params": [], "lr": lr} for lr in lrs)]
        return {"model": model, "o": torch.optim.SGD(groups, lr=0.1)}

    path = saved(job(1.0, 2.0), tmp_path)
    with pytest.raises(ValueError, match=r"not in.*\bo\.param_groups\b"):
        sx.load_checkpoint(job(1.0), path)
    with pytest.raises(FileNotFoundError, match=r"missing.*\bo\.param_groups\b"):
        sx.load_checkpoint(job(1.0, 2.0, 3.0), path)


def test_states_of_a_parameter_with_other_keys_on_other_ranks_are_not_joined(tmp_path: Path) -> None:
    models = [nn.Linear(2, 2, bias=False) for _ in range(3)]
    models[1].load_state_dict(models[0].state_dict())

    def saves() -> None:
        model = models[sx.get_rank()]
        optimizer = torch.optim.SGD(model.parameters())
        optimizer.state[model.weight] = {"a": 1} if sx.get_rank() == 0 else {"b": 2}
        sx.save_checkpoint({"model": model, "o": optimizer}, str(tmp_path / "saved"))

    def loads(**options: Any) -> Any:
        model = models[sx.get_rank()]
        optimizer = torch.optim.SGD(model.parameters())
        sx.load_checkpoint({"model": model, "o": optimizer}, str(tmp_path / "saved"), **options)
        return optimizer.state[model.weight]

    run_ranks(saves, 2)
    assert run_ranks(loads, 2) == [{"a": 1}, {"b": 2}]
    with pytest.raises(RankFailure, match=r"ReplicaError: .*'o\.state\.model\.weight'"):
        run_ranks(loads, 1)
    assert run_ranks(lambda: loads(replicas="root"), 1) == [{"a": 1}]


def test_rename_leaves_shared_keys_and_numbers(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    one = torch.optim.SGD(model.parameters(), lr=0.5)
    one.state["glob"] = 3
    path = saved({"o": one}, tmp_path)
    state = {"job": {"o": torch.optim.SGD(model.parameters())}}
    sx.load_checkpoint(state, path, rename=[("^", "job.")])
    assert state["job"]["o"].state["glob"] == 3
    assert state["job"]["o"].param_groups[0]["lr"] == 0.5


def test_a_type_that_has_changed_is_refused_only_where_it_is_loaded(tmp_path: Path) -> None:
    def version(*fields: str) -> Any:
        cls = make_dataclass("Changed", [(name, int) for name in fields])
        cls.__module__ = "changed"
        return cls(*range(len(fields)))

    path = saved({"a": torch.ones(1), "h": Holder(cfg=version("x", "old"))}, tmp_path)
    live = {"a": torch.zeros(1), "h": Holder(cfg=version("x", "new"))}
    with pytest.raises(sx.errors.UnsupportedError, match="other fields") as caught:
        sx.load_checkpoint(live, path)
    assert caught.value.name == "h.cfg"
    sx.load_checkpoint(live, path, exclude="h.*")
    assert live["a"].tolist() == [1]


def test_objects_that_are_not_loaded_are_not_asked(tmp_path: Path) -> None:
    class Fails(Holder):
        def state_dict(self) -> Any:
            raise RuntimeError("not ready")

    path = saved({"a": torch.ones(1), "h": Holder(x=1), "mode": Mode.SLOW, "g": Holder(m=Mode.SLOW)}, tmp_path)
    live = {"a": torch.zeros(1), "h": Fails(), "mode": Mode.FAST, "g": Holder(m=Mode.FAST)}
    sx.load_checkpoint(live, path, exclude="h.*")
    assert live["g"].state == {"m": Mode.SLOW}
    with pytest.raises(sx.errors.InvalidArgumentError, match="not ready") as caught:
        sx.load_checkpoint(live, path)
    assert caught.value.name == "h"


def test_groups_that_share_the_tensor_of_the_default_lr_get_their_own(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": torch.tensor(0.3)}]
    path = saved({"model": model, "o": torch.optim.Adam(groups, lr=torch.tensor(0.1))}, tmp_path)
    other = torch.optim.Adam([{"params": [model.weight]}, {"params": [model.bias]}], lr=torch.tensor(1.0))
    sx.load_checkpoint({"model": model, "o": other}, path)
    assert [round(float(group["lr"]), 6) for group in other.param_groups] == [0.1, 0.3]


def test_shared_state_stays_where_the_source_has_only_some_parameters(tmp_path: Path) -> None:
    small, large = nn.ModuleDict({"a": nn.Linear(2, 2)}), nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    path = saved({"model": small, "o": torch.optim.SGD(small.parameters())}, tmp_path)
    other = torch.optim.SGD(large.parameters())
    other.state["ema"] = 5
    sx.load_checkpoint({"model": large, "o": other}, path, strict=False)
    assert other.state["ema"] == 5


def test_a_hyperparameter_may_have_any_key(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    one, other = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.7)
    one.param_groups[0][5] = 5
    sx.load_checkpoint({"model": model, "o": other}, saved({"model": model, "o": one}, tmp_path))
    assert (other.param_groups[0]["lr"], other.param_groups[0][5]) == (0.1, 5)


@pytest.mark.parametrize("write", [write_save, write_torch])
def test_a_tuple_that_the_live_state_of_an_object_lacks_comes_back_as_a_tuple(write: Write, tmp_path: Path) -> None:
    entries = {"pair": (torch.ones(2), 3), "nested": [(torch.zeros(1), {"x": 1})]}
    path = write({"object": {"n": 1, **entries}, "w": torch.ones(1)}, tmp_path)
    state = {"object": Holder(n=0), "w": torch.zeros(1)}
    sx.load_checkpoint(state, path)
    assert repr(state["object"].state) == repr({"n": 1, **entries})  # type: ignore[union-attr]
