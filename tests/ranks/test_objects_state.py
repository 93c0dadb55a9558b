"""What optimizers and other objects put into their states comes back to each rank, or is refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from stateful import WithExtra
from torch import nn
from trained_jobs import Holder, Mode, saved, trained

import statexchange as sx
from statexchange.testing import RankFailure, run_ranks

LR = torch.optim.lr_scheduler


# Optimizers with a state_dict of their own


class WithCount(torch.optim.SGD):
    """Its state dict has an entry beside those of torch's."""

    def __init__(self, parameters: Any, count: int = 0, slow: float = 0.0) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.count = count
        self.slow = torch.full((2,), slow)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count, "slow": {"weights": [self.slow]}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count, (self.slow,) = state_dict["count"], state_dict["slow"]["weights"]
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


class Wrapper(torch.optim.SGD):
    """Its state dict has another form than those of torch."""

    def state_dict(self) -> dict[str, Any]:
        return {"base": super().state_dict()}


@pytest.mark.parametrize("call", ["save", "synchronize"])
def test_entries_that_an_optimizer_adds_to_its_state_dict_come_back(call: str, tmp_path: Path) -> None:
    models = [nn.Linear(3, 3, dtype=torch.bfloat16).float() for _ in range(2)]
    one = trained(models[0], WithCount, count=5, slow=2.5)
    other = trained(models[1], WithCount, steps=0)
    groups = other.param_groups[0]
    scheduler = LR.StepLR(other, 1)
    if call == "save":
        path = saved({"model": models[0], "optimizer": one}, tmp_path)
        sx.load_checkpoint({"model": models[1], "optimizer": other}, path)
    else:
        states = [{"optimizer": one}, {"optimizer": other}]
        run_ranks(lambda: sx.synchronize(states[sx.get_rank()]) and None, 2)
    assert other.count == 5
    assert other.slow.tolist() == [2.5, 2.5]
    for mine, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(other.state[mine]["momentum_buffer"], one.state[theirs]["momentum_buffer"])
    del groups, scheduler


def test_an_optimizer_without_the_entry_misses_it_and_the_reverse(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    states = trained(model, torch.optim.SGD, lr=0.1, momentum=0.9).state_dict()  # which do not record the class
    path = saved({"model": model, "optimizer": states}, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"missing.*: optimizer\.count, optimizer\.slow"):
        sx.load_checkpoint({"model": model, "optimizer": trained(model, WithCount)}, path)
    path = saved({"model": model, "optimizer": trained(model, WithCount).state_dict()}, tmp_path / "2")
    with pytest.raises(ValueError, match=r": optimizer\.count, optimizer\.slow"):
        sx.load_checkpoint({"model": model, "optimizer": trained(model, torch.optim.SGD, lr=0.1)}, path)


def test_a_hook_may_add_entries(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    one, other = trained(model), trained(model)
    for optimizer, count in ((one, 7), (other, 0)):
        optimizer.register_state_dict_post_hook(lambda o, found, count=count: {**found, "count": count})
    seen: list[int] = []
    other.register_load_state_dict_pre_hook(lambda o, given: seen.append(given["count"]))
    path = saved({"model": model, "optimizer": one}, tmp_path)
    sx.load_checkpoint({"model": model, "optimizer": other}, path)
    assert seen == [7]


def test_a_state_dict_of_another_form_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    wrapper = trained(model, Wrapper, lr=0.1)
    for call in (lambda: saved({"o": wrapper}, tmp_path), lambda: sx.synchronize({"o": wrapper})):
        with pytest.raises(sx.errors.UnsupportedError, match="of a Wrapper") as caught:
            call()
        assert caught.value.name == "o"


# Each rank's own state of parameters


def test_each_rank_gets_its_own_state_of_a_parameter(tmp_path: Path) -> None:
    """Experts under one name: only rank 0's has been used."""

    def saves() -> None:
        expert = nn.Linear(3, 3)
        optimizer = trained(expert, steps=1 - sx.get_rank(), lr=0.1 + sx.get_rank())
        optimizer.state["seen"] = sx.get_rank()
        sx.save_checkpoint({"expert": expert, "optimizer": optimizer}, str(tmp_path / "saved"))

    def loads() -> Any:
        expert = nn.Linear(3, 3)
        optimizer = trained(expert, steps=sx.get_rank())
        optimizer.state["old"] = 1
        sx.load_checkpoint({"expert": expert, "optimizer": optimizer}, str(tmp_path / "saved"))
        state = optimizer.state
        return [expert.weight in state, optimizer.param_groups[0]["lr"], state.get("seen"), state.get("old")]

    run_ranks(saves, 2)
    assert run_ranks(loads, 2) == [[True, 0.1, 0, None], [False, 1.1, 1, None]]


def test_hyperparameters_that_differ_between_ranks_are_refused_on_another_number(tmp_path: Path) -> None:
    models = [nn.Linear(3, 3) for _ in range(3)]

    def job() -> dict[str, Any]:
        model = models[sx.get_rank()]
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5 + sx.get_rank())}

    def loads(**options: Any) -> float:
        state = job()
        sx.load_checkpoint(state, str(tmp_path / "saved"), **options)
        return float(state["optimizer"].param_groups[0]["lr"])

    models[1].load_state_dict(models[0].state_dict())
    run_ranks(lambda: sx.save_checkpoint(job(), str(tmp_path / "saved")) and None, 2)
    with pytest.raises(RankFailure, match=r"ReplicaError.*'optimizer.param_groups'"):
        run_ranks(loads, 3)
    assert run_ranks(lambda: loads(replicas="root"), 3) == [0.5] * 3
    assert run_ranks(loads, 2) == [0.5, 1.5]


def test_groups_without_parameters_have_hyperparameters_too(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    one, other = (
        torch.optim.SGD([{"params": model.parameters(), "lr": lr}, {"params": [], "lr": 2 * lr}]) for lr in (0.5, 1.0)
    )
    path = saved({"model": model, "optimizer": one}, tmp_path)
    sx.load_checkpoint({"model": model, "optimizer": other}, path)
    assert [group["lr"] for group in other.param_groups] == [0.5, 1.0]


def test_shared_state_under_a_number_is_not_that_of_a_parameter(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    one = trained(model)
    one.state[0] = {"shared": 1}
    wanted = one.state[model.weight]["exp_avg"].clone()
    path = saved({"optimizer": one}, tmp_path)
    other = trained(model)
    sx.load_checkpoint({"optimizer": other}, path)
    assert torch.equal(other.state[model.weight]["exp_avg"], wanted)
    assert other.state[0] == {"shared": 1}


def test_a_parameters_state_may_be_one_tensor(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    one, other = torch.optim.SGD(model.parameters()), torch.optim.SGD(model.parameters())
    one.state[model.weight] = torch.full((2,), 3.0)
    path = saved({"model": model, "optimizer": one}, tmp_path)
    sx.load_checkpoint({"model": model, "optimizer": other}, path)
    assert other.state[model.weight].tolist() == [3, 3]


def test_a_tensor_as_lr_is_filled_in_place(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    one, other = (torch.optim.Adam(model.parameters(), lr=torch.tensor(lr)) for lr in (0.5, 1.0))
    lr = other.param_groups[0]["lr"]
    path = saved({"model": model, "optimizer": one}, tmp_path)
    sx.load_checkpoint({"model": model, "optimizer": other}, path)
    assert other.param_groups[0]["lr"] is lr
    assert lr == 0.5


def test_moments_of_scalar_parameters_are_cast_and_counts_of_steps_are_not(tmp_path: Path) -> None:
    def job(dtype: torch.dtype) -> tuple[dict[str, Any], nn.Parameter]:
        scale = nn.Parameter(torch.tensor(2.0, dtype=dtype))
        model = nn.ParameterDict({"scale": scale})
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}, scale

    one, scale = job(torch.float32)
    scale.grad = torch.tensor(1.0)
    one["optimizer"].step()
    path = saved(one, tmp_path)
    other, scale = job(torch.bfloat16)
    sx.load_checkpoint(other, path, dtype="state")
    found = other["optimizer"].state[scale]
    assert (found["exp_avg"].dtype, found["step"].dtype) == (torch.bfloat16, torch.float32)


class Pair(NamedTuple):
    a: int
    b: Any


@dataclass
class Config:
    size: int
    mode: Mode


def test_types_in_the_states_of_objects_come_back(tmp_path: Path) -> None:
    def job(n: int) -> dict[str, Any]:
        value = {"mode": Mode(n), "pair": Pair(n, Mode(n)), "config": Config(n, Mode(n)), "set": {Mode(n)}}
        model = WithExtra(dict(value))
        optimizer = torch.optim.SGD(model.parameters(), lr=n)
        optimizer.param_groups[0]["mode"] = Mode(n)
        optimizer.state[model.weight] = {"mode": Mode(n), "inner": {"pair": Pair(n, 0)}}
        return {"model": model, "optimizer": optimizer, "holder": Holder(**value)}

    one, other = job(1), job(2)
    path = saved(one, tmp_path)
    sx.load_checkpoint(other, path)
    assert other["holder"].state == one["holder"].state
    assert other["model"].extra == one["model"].extra
    assert other["optimizer"].param_groups[0]["mode"] is Mode.SLOW
    weights = one["model"].weight, other["model"].weight
    assert other["optimizer"].state[weights[1]] == one["optimizer"].state[weights[0]]


@pytest.mark.parametrize("value", [Mode.SLOW, Pair(1, 2), Config(1, Mode.SLOW), {Mode.SLOW}, {Mode.SLOW: 1}])
def test_a_type_that_the_live_state_does_not_have_is_refused_by_name(value: Any, tmp_path: Path) -> None:
    path = saved({"model": nn.Linear(1, 1), "holder": Holder(value=value), "plain": value}, tmp_path)
    live = {"model": nn.Linear(1, 1), "holder": Holder(value=None), "plain": None}
    name = type(value if not isinstance(value, set | dict) else Mode.SLOW).__name__
    with pytest.raises(sx.errors.UnsupportedError, match=rf"{name} was saved.*register_config") as caught:
        sx.load_checkpoint(live, path)
    assert caught.value.name == "holder.value"
    with pytest.raises(sx.errors.UnsupportedError, match=r"register_config.*'plain'"):
        sx.load_checkpoint(live, path, exclude="holder.*")
    sx.load_checkpoint(live, path, include="model.*")
    assert live["plain"] is None


def test_arrays_and_dtypes_in_the_states_of_objects_stay_arrays(tmp_path: Path) -> None:
    path = saved({"holder": Holder(a=np.arange(3), t=torch.arange(3))}, tmp_path)
    holder = Holder(a=np.zeros(3, np.int64), t=torch.zeros(3, dtype=torch.int64))
    array, tensor = holder.state["a"], holder.state["t"]
    sx.load_checkpoint({"holder": holder}, path)
    assert type(holder.state["a"]) is np.ndarray
    assert holder.state["a"].tolist() == holder.state["t"].tolist() == [0, 1, 2]
    assert array.tolist() == tensor.tolist() == [0, 0, 0]  # what state_dict() returned is not written to


# Objects that cannot be loaded again


def test_an_object_in_the_state_of_an_object_is_refused_at_the_save(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    inner = LR.StepLR(optimizer, 1)
    for state in (Holder(after=inner), Holder(list=[{"model": nn.Linear(1, 1)}]), WithExtra({"inner": inner})):
        with pytest.raises(sx.errors.UnsupportedError, match=r"holds a (Step|Lin)") as caught:
            saved({"x": state}, tmp_path)
        assert caught.value.name.startswith("x.")
    optimizer.state["x"] = inner
    with pytest.raises(sx.errors.UnsupportedError, match="holds a StepLR"):
        saved({"x": optimizer}, tmp_path)


def test_a_state_that_is_no_mapping_is_refused_at_the_save(tmp_path: Path) -> None:
    holder = Holder()
    holder.state = [1, 2]  # type: ignore[assignment]
    with pytest.raises(sx.errors.UnsupportedError, match="returned a list") as caught:
        saved({"x": holder}, tmp_path)
    assert caught.value.name == "x"


def test_the_error_of_an_objects_load_names_it(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    schedulers = [LR.ConstantLR(optimizer), LR.StepLR(optimizer, 2)]
    path = saved({"a": {"scheduler": LR.StepLR(optimizer, 2)}}, tmp_path)
    live = LR.SequentialLR(optimizer, schedulers, [2])
    with pytest.raises(sx.errors.InvalidArgumentError, match=r"SequentialLR.*KeyError") as caught:
        sx.load_checkpoint({"a": {"scheduler": live}}, path)
    assert caught.value.name == "a.scheduler"


def test_a_loader_is_asked_for_its_state_before_generators_are_restored(tmp_path: Path) -> None:
    class Loader(Holder):
        def state_dict(self) -> dict[str, Any]:
            return {"seed": int(torch.randint(1000, ())), **self.state}

    state = {"random": sx.integrations.RandomState(), "loader": Loader(seen=1)}
    path = saved(state, tmp_path)
    sx.load_checkpoint(state, path)
    first = torch.rand(3)
    sx.load_checkpoint(state, path)
    assert torch.equal(torch.rand(3), first)
    torch.manual_seed(0)
    sx.load_checkpoint({"random": sx.integrations.RandomState()}, path, strict=False)
    assert torch.equal(torch.rand(3), first)


# DTensors


def sharded_job(seed: float, *, fresh: bool) -> dict[str, Any]:
    """Return a sharded model, an optimizer with DTensors and plain tensors in its state, and an object with both."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (sx.get_world_size(),))

    def sharded(*shape: int, placement: Any = None) -> torch.Tensor:
        whole = torch.arange(torch.Size(shape).numel()).float().reshape(shape) + seed
        return distribute_tensor(whole, mesh, [placement or Shard(0)])

    weight = nn.Parameter(sharded(6, 4))
    model = nn.Module()
    model.register_parameter("weight", weight)
    optimizer = torch.optim.Adam([weight], lr=seed)
    state = {
        "step": torch.tensor(seed),
        "exp_avg": sharded(6, 4),
        "plain": torch.full((6, 4), seed),
        "nested": {"rows": [sharded(6, 1)], "columns": sharded(1, 4, placement=Replicate()), "count": torch.ones(())},
    }
    if not fresh:
        optimizer.state[weight] = state
    holder = Holder(average={"weight": sharded(6, 4)}, count=torch.tensor(seed))
    return {"model": model, "optimizer": optimizer, "holder": holder}


def flat_state(job: dict[str, Any]) -> dict[str, torch.Tensor]:
    state = job["optimizer"].state[job["model"].weight]
    nested = state["nested"]
    return {
        **{key: state[key] for key in ("step", "exp_avg", "plain")},
        "rows": nested["rows"][0],
        "columns": nested["columns"],
        "count": nested["count"],
        "average": job["holder"].state["average"]["weight"],
        "holder.count": job["holder"].state["count"],
    }


def saves_or_loads(path: str, way: str) -> dict[str, list[str]]:
    """Save, or load into fresh or trained state, and check the values; return the placements of DTensors."""
    job = sharded_job(2.0 if way == "save" else 3.0, fresh=way == "fresh")
    if way == "save":
        sx.save_checkpoint(job, path)
        return {}
    sx.load_checkpoint(job, path)
    found, wanted = flat_state(job), flat_state(sharded_job(2.0, fresh=False))
    for name, tensor in wanted.items():
        theirs, ours = (getattr(one, "full_tensor", lambda one=one: one)() for one in (found[name], tensor))
        assert torch.equal(theirs, ours), name
    return {name: [str(one) for one in getattr(tensor, "placements", ())] for name, tensor in found.items()}


@pytest.mark.parametrize("world_size", [2, 3])
def test_dtensors_in_the_states_of_optimizers_and_objects_stay_dtensors(world_size: int, tmp_path: Path) -> None:
    run_ranks(saves_or_loads, 2, backend="gloo", args=(str(tmp_path / "saved"), "save"))
    for way in ("trained", "fresh"):
        for found in run_ranks(saves_or_loads, world_size, backend="gloo", args=(str(tmp_path / "saved"), way)):
            sharded = {name for name, placements in found.items() if placements == ["S(0)"]}
            assert sharded == {"exp_avg", "rows", "average"}, (way, found)
            assert found["plain"] == found["count"] == found["holder.count"] == found["step"] == []
            assert found["columns"] == (["R"] if way == "trained" else [])
