"""A job resumes: optimizers, objects and trees come back, or are named as missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loaded_jobs import equal, model_of, trained
from safetensors.torch import save_file
from torch import nn

import statexchange as sx
from statexchange.storage.workspace import Workspace
from statexchange.values import encode

FROZEN = np.zeros(2, np.float32)
FROZEN.flags.writeable = False


# Nested state


def test_a_job_resumes_where_it_stopped(tmp_path: Path) -> None:
    model = model_of(1)
    optimizer = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters()}])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
    trained(model, optimizer)
    schedule.step()
    state = {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "step": 7,
        "seen": [1, (2, "x")],
        "nan": float("nan"),
    }
    sx.save_checkpoint(state, tmp_path / "ckpt")
    fresh = model_of(2)
    its = torch.optim.AdamW([{"params": fresh[0].parameters(), "lr": 0.1}, {"params": fresh[2].parameters()}])
    plan = torch.optim.lr_scheduler.StepLR(its, 5)
    other = {
        "model": fresh,
        "optimizer": its,
        "schedule": plan,
        "step": 0,
        "seen": [],
        "nan": 0.0,
    }
    sx.load_checkpoint(other, tmp_path / "ckpt")
    assert equal(fresh.state_dict(), model.state_dict())
    assert equal(its.state_dict(), optimizer.state_dict())
    assert equal(plan.state_dict(), schedule.state_dict())
    assert (other["step"], other["seen"], other["nan"] != other["nan"]) == (7, [1, (2, "x")], True)
    for m, o in ((model, optimizer), (fresh, its)):
        trained(m, o, 2)
    assert equal(fresh.state_dict(), model.state_dict())


def test_an_optimizer_finds_its_parameters_by_name(tmp_path: Path) -> None:
    model, fresh = model_of(1), model_of(2)
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer)
    sx.save_checkpoint({"model": model, "optimizer": optimizer}, tmp_path / "ckpt")
    turned = torch.optim.Adam(list(fresh.parameters())[::-1])
    sx.load_checkpoint({"model": fresh, "optimizer": turned}, tmp_path / "ckpt")
    for one, other in zip(model.parameters(), fresh.parameters(), strict=True):
        assert equal(optimizer.state[one], turned.state[other])


def test_state_that_was_not_saved_is_named(tmp_path: Path) -> None:
    sx.save_checkpoint({"model": model_of(1), "step": 7}, tmp_path / "ckpt")
    with pytest.raises(FileNotFoundError, match=r"missing.*\bepoch;.*\bstep;"):
        sx.load_checkpoint({"model": model_of(2), "epoch": 7}, tmp_path / "ckpt")
    with pytest.raises(FileNotFoundError, match=r'model, step;.*\{"prefix": state\}'):
        sx.load_checkpoint(model_of(2), tmp_path / "ckpt")
    with pytest.raises(
        sx.errors.InvalidArgumentError,
        match="something else",
    ) as caught:
        sx.load_checkpoint({"model": model_of(2), "step": torch.zeros(1)}, tmp_path / "ckpt")
    assert caught.value.name == "step"
    assert (caught.value.expected, caught.value.found) == ("a tensor", "an int")
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    state = {"a": torch.zeros(2), "step": 7}
    with pytest.raises(FileNotFoundError, match=r"missing.*\bstep;.*strict=False"):
        sx.load_checkpoint(state, tmp_path / "model.safetensors")
    assert sx.load_checkpoint(state, tmp_path / "model.safetensors", strict=False).missing == ("step",)
    assert state["step"] == 7
    assert sx.load_checkpoint(state, tmp_path / "model.safetensors", include="a").num_tensors == 1


def test_an_optimizer_without_state_in_the_source_is_missing(tmp_path: Path) -> None:
    model = model_of(1)
    state = {"model": model, "optimizer": torch.optim.Adam(model.parameters())}
    sx.export_checkpoint({f"model.{name}": tensor for name, tensor in model.state_dict().items()}, tmp_path / "hf")
    with pytest.raises(FileNotFoundError, match=r"missing.*\boptimizer;.*strict=False"):
        sx.load_checkpoint(state, tmp_path / "hf")
    assert sx.load_checkpoint(state, tmp_path / "hf", include="model.*").missing == ()


class Extra(nn.Module):
    """A module with extra state (numbers or a tensor), and with a tensor that it saves as a copy."""

    def __init__(self, value: int, *, as_tensor: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), float(value)))
        self.value = value
        self.as_tensor = as_tensor

    def get_extra_state(self) -> Any:
        return torch.tensor([self.value]) if self.as_tensor else {"value": self.value}

    def set_extra_state(self, state: Any) -> None:
        self.value = int(state[0]) if self.as_tensor else state["value"]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = destination[prefix + "weight"].detach().clone()


@pytest.mark.parametrize("as_tensor", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_a_tensor_saved_as_a_copy_is_loaded_by_its_module(as_tensor: bool, nested: bool, tmp_path: Path) -> None:
    one, other = (nn.Sequential(Extra(value, as_tensor=as_tensor)) for value in (5, 0))
    sx.save_checkpoint({"m": one} if nested else one, tmp_path / "saved")
    sx.load_checkpoint({"m": other} if nested else other, tmp_path / "saved")
    assert (other[0].value, other[0].weight.tolist()) == (5, [5.0, 5.0])


def test_fsdp1_is_refused(tmp_path: Path) -> None:
    class FullyShardedDataParallel(nn.Linear):
        """It is known by its name."""

    save_file({"weight": torch.ones(1, 1)}, tmp_path / "model.safetensors")
    with pytest.raises(TypeError, match="FSDP1"):
        sx.load_checkpoint(FullyShardedDataParallel(1, 1), tmp_path)


def test_a_mapping_of_modules_loads_names_with_a_prefix(tmp_path: Path) -> None:
    one, other = model_of(1), model_of(2)
    save_file({f"model.{n}": t for n, t in one.state_dict().items()}, tmp_path / "model.safetensors")
    with pytest.raises(FileNotFoundError, match=r'model\..*\{"prefix": state\}'):
        sx.load_checkpoint(other, tmp_path)
    sx.load_checkpoint({"model": other}, tmp_path)
    assert equal(other.state_dict(), one.state_dict())
    report = sx.load_checkpoint({"model": other, "head": nn.Linear(1, 1)}, tmp_path, strict=False)
    assert report.missing == ("head",)


def test_a_config_without_state_is_ignored(tmp_path: Path) -> None:
    """An NFSWorkspace has such a config beside its weights."""
    sx.NFSWorkspace(tmp_path).write_configs_and_weights({"hidden": 3}, {"a": torch.ones(2)})
    live = {"a": torch.zeros(2)}
    sx.load_checkpoint(live, tmp_path)
    assert live["a"].tolist() == [1, 1]


def test_a_saved_state_with_a_tensor_that_is_in_no_file_is_corrupt(tmp_path: Path) -> None:
    config = encode({"w": [object()]}, lambda value, path: path if type(value) is object else None)
    Workspace(tmp_path).write([], run="job", round=1, rank=0, world_size=1, config=config)
    with pytest.raises(sx.errors.CorruptError, match="no file") as caught:
        sx.load_checkpoint({"w": [torch.ones(2)]}, tmp_path)
    assert caught.value.name == ".w[0]"


def test_an_optimizer_of_fewer_or_more_parameters_is_loaded_without_strict(tmp_path: Path) -> None:
    model, fresh = model_of(1), model_of(2)
    optimizer = torch.optim.Adam([{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters()}])
    trained(model, optimizer)
    optimizer.state["global"] = {"seen": 3}
    sx.save_checkpoint({"model": model, "optimizer": optimizer}, tmp_path / "saved")
    fewer = torch.optim.Adam(fresh[2].parameters())
    with pytest.raises(ValueError, match=r": optimizer\.state\.model\.0\.weight, optimizer\.state\.model\.0\.bias;"):
        sx.load_checkpoint({"model": fresh, "optimizer": fewer}, tmp_path / "saved")
    sx.load_checkpoint({"model": fresh, "optimizer": fewer}, tmp_path / "saved", strict=False)
    assert equal(fewer.state[fresh[2].weight], optimizer.state[model[2].weight])
    assert fewer.state["global"] == {"seen": 3}
    joined = torch.optim.Adam(fresh.parameters())
    with pytest.raises(ValueError, match="values of 'lr'") as caught:
        sx.load_checkpoint({"model": fresh, "optimizer": joined}, tmp_path / "saved", strict=False)
    assert caught.value.name == "optimizer.param_groups.0"
    assert all(repr(name) in str(caught.value) for name in ("model.0.weight", "model.2.weight"))
    more = torch.optim.Adam([{"params": fresh[0].parameters()}, {"params": fresh[1:].parameters()}])
    trained(fresh, more)
    before = {key: value.clone() for key, value in more.state[fresh[1].weight].items()}
    report = sx.load_checkpoint({"model": fresh, "optimizer": more}, tmp_path / "saved", strict=False)
    assert report.missing == ("optimizer.state.model.1.weight", "optimizer.state.model.1.bias")
    assert equal(more.state[fresh[1].weight], before)


@pytest.mark.parametrize(
    ("live", "message"),
    [
        ({"a": torch.zeros(1).expand(2)}, "share memory"),
        ({"a": FROZEN}, "read-only"),
        (
            {"a": torch.zeros(2), "s": torch.amp.GradScaler("cpu")},
            "something else",
        ),
        ({"a": torch.zeros(2), "s": (1, torch.zeros(2))}, "something else"),
    ],
    ids=["expanded", "read-only", "scaler", "tuple"],
)
def test_state_that_cannot_be_filled_is_refused_before_any_change(live: Any, message: str, tmp_path: Path) -> None:
    sx.save_checkpoint({"a": torch.ones(2), "s": None}, tmp_path / "saved")
    with pytest.raises(ValueError, match=message):
        sx.load_checkpoint({"first": torch.zeros(2), "s": None, **live}, tmp_path / "saved", strict=False)
    assert not live["a"].any()


def test_tensors_in_a_tuple_are_filled_in_place(tmp_path: Path) -> None:
    sx.save_checkpoint({"pair": (torch.ones(2), 3)}, tmp_path / "saved")
    live = {"pair": (torch.zeros(2), 3)}
    sx.load_checkpoint(live, tmp_path / "saved")
    assert live["pair"][0].tolist() == [1, 1]
    sx.save_checkpoint((torch.ones(2), 3), tmp_path / "tuple")
    kept = live["pair"][0]
    live["pair"] = (kept, 4)
    sx.load_checkpoint(live, tmp_path / "saved")
    assert live["pair"][0] is kept
    assert live["pair"][1] == 3
    with pytest.raises(ValueError, match="a tuple"):
        sx.load_checkpoint((kept, 4), tmp_path / "tuple")


@pytest.mark.parametrize("source", [b"x", ""])
def test_a_source_is_a_path(source: Any) -> None:
    with pytest.raises(ValueError, match="or a URL"):
        sx.load_checkpoint({"a": torch.zeros(1)}, source)


def test_three_tied_names_are_loaded_from_one(tmp_path: Path) -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abc"})
    model["b"].weight = model["c"].weight = model["a"].weight
    save_file({"b.weight": torch.full((2, 2), 7.0)}, tmp_path / "model.safetensors")
    sx.load_checkpoint(model, tmp_path)
    assert model["c"].weight.eq(7).all()
