"""What a module or an optimizer derives at a load, by a hook or a loader of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from whose_state import accelerated, job, twice, write

import statexchange as sx
from statexchange import errors
from statexchange.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


# Loaders of their own


class Scaled(nn.Linear):
    """A layer whose forward uses a copy of its weight, made when weights are loaded."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.calls = 0
        self.derive()

    def derive(self) -> None:
        self.calls += 1
        self.doubled = self.weight.detach().clone() * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.doubled.T


class ByPostHook(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(lambda module, keys: module.derive())


class ByPreHook(Scaled):
    """As torch's: the hook sees what is loaded, before it is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(type(self).keep)

    def keep(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        self.calls += 1
        self.doubled = state[prefix + "weight"].clone() * 2


class ByOverride(Scaled):
    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.derive()


class Whole(Scaled):
    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        found = super().load_state_dict(*args, **options)
        self.derive()
        return found


def holding(layer: nn.Module, place: str) -> nn.Module:
    return layer if place == "top" else nn.Sequential(nn.Linear(3, 3), layer, nn.BatchNorm1d(2))


@pytest.mark.parametrize("source", ["save", "export", "torch"])
@pytest.mark.parametrize("place", ["top", "inside"])
@pytest.mark.parametrize("kind", [ByPostHook, ByPreHook, ByOverride, Whole])
def test_what_a_module_derives_at_a_load_is_derived(kind: Any, place: str, source: str, tmp_path: Path) -> None:
    saved, live = holding(kind(), place).eval(), holding(kind(), place).eval()
    path = tmp_path / "saved"
    {"save": sx.save_checkpoint, "export": sx.export_checkpoint}.get(
        source, lambda module, path: torch.save(module.state_dict(), path)
    )(saved, path)
    weight = next(live.parameters())
    calls = [one.calls for one in live.modules() if isinstance(one, Scaled)]
    sx.load_checkpoint(live, path)
    assert next(live.parameters()) is weight
    if kind is Whole and place == "inside":  # torch calls this method of the outermost module alone
        torch_loads = holding(kind(), place).eval()
        torch_loads.load_state_dict(saved.state_dict())
        live[1].derive()
        torch_loads[1].derive()
        saved = torch_loads
    else:
        assert [one.calls for one in live.modules() if isinstance(one, Scaled)] == [one + 1 for one in calls]
    assert torch.equal(live(torch.ones(4, 3)), saved(torch.ones(4, 3)))


def test_hooks_see_all_weights_of_a_load_in_parts_and_nothing_is_called_for_no_weights(tmp_path: Path) -> None:
    saved, live = nn.Sequential(ByPostHook(), nn.Linear(2, 2)), nn.Sequential(ByPostHook(), nn.Linear(2, 2))
    sx.save_checkpoint({"model": saved, "step": 1}, tmp_path / "saved")
    before = live[0].calls
    sx.load_checkpoint({"model": live, "step": 0}, tmp_path / "saved", exclude="model")
    assert live[0].calls == before
    kept = live[1].weight.detach().clone()
    sx.load_checkpoint({"model": live}, tmp_path / "saved", include="model.0.*")
    assert live[0].calls == before + 1
    assert torch.equal(live[0].doubled, saved[0].doubled)
    assert torch.equal(live[1].weight, kept)


def test_a_loader_that_raises_is_named(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    sx.save_checkpoint({"model": model}, tmp_path / "saved")

    def fails(module: nn.Module, keys: Any) -> None:
        raise RuntimeError("no GPU")

    model[0].register_load_state_dict_post_hook(fails)
    with pytest.raises(errors.InvalidArgumentError, match="no GPU") as raised:
        sx.load_checkpoint({"model": model}, tmp_path / "saved")
    assert raised.value.name == "model"


def test_hooks_on_a_wrapper_are_refused_by_its_type(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    sx.save_checkpoint({"model": model}, tmp_path / "saved")
    average = torch.optim.swa_utils.AveragedModel(model)
    average.register_load_state_dict_post_hook(lambda module, keys: None)
    with pytest.raises(errors.UnsupportedError, match="AveragedModel"):
        sx.load_checkpoint({"model": average}, tmp_path / "saved", strict=False)


def loads_a_sharded_module(folder: str) -> bool:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].register_load_state_dict_post_hook(
        lambda module, keys: setattr(module, "total", module.weight.full_tensor().sum().item())
    )
    fully_shard(model[0])
    fully_shard(model)
    sx.load_checkpoint({"model": model}, folder)
    return bool(model[1].total == model[1].weight.full_tensor().sum().item() != 0)


def test_hooks_of_a_sharded_module_are_called_with_its_shards(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    sx.save_checkpoint({"model": model}, tmp_path / "saved")
    assert run_ranks(loads_a_sharded_module, 2, backend="gloo", args=(str(tmp_path / "saved"),)) == [True, True]


class WithTrust(torch.optim.SGD):
    """Trains by what its loader has derived of its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.trust = 0.0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.derive()

    def derive(self) -> None:
        self.trust = sum(one["momentum_buffer"].abs().sum().item() for one in self.state.values())


def by_hook(parameters: Any) -> Any:
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    optimizer.trust = 0.0  # type: ignore[attr-defined]
    optimizer.register_load_state_dict_post_hook(WithTrust.derive)
    return optimizer


def by_set_state(parameters: Any) -> Any:
    class WithState(torch.optim.SGD):
        trust = 0.0

        def __setstate__(self, state: dict[str, Any]) -> None:
            super().__setstate__(state)
            WithTrust.derive(self)  # type: ignore[arg-type]

    return WithState(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("kind", [WithTrust, by_hook, by_set_state])
def test_what_an_optimizer_derives_at_a_load_is_derived(kind: Any, tmp_path: Path) -> None:
    saved, live = job(kind, steps=2), job(kind, steps=1)
    WithTrust.derive(saved["optimizer"])
    path = write("save", saved, tmp_path / "saved")
    group, state = live["optimizer"].param_groups[0], live["optimizer"].state[live["model"].weight]
    sx.load_checkpoint(live, path)
    assert live["optimizer"].trust == saved["optimizer"].trust
    assert live["optimizer"].param_groups[0] is group
    assert live["optimizer"].state[live["model"].weight] is state
    for mine, theirs in zip(live["model"].parameters(), saved["model"].parameters(), strict=True):
        buffers = [held["optimizer"].state[one]["momentum_buffer"] for held, one in ((live, mine), (saved, theirs))]
        assert torch.equal(*buffers)


class Halving(torch.optim.SGD):
    """Changes the state that it loads."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for held in self.state.values():
            held["momentum_buffer"] = held["momentum_buffer"] / 2
        self.param_groups[0]["lr"] = 0.5


def test_what_a_loader_of_an_optimizer_changes_stays_changed(tmp_path: Path) -> None:
    make = lambda parameters: Halving(parameters, lr=0.1, momentum=0.9)  # noqa: E731
    saved, live, torchs = job(make, steps=2), job(make, steps=1), job(make)
    torchs["optimizer"].load_state_dict(saved["optimizer"].state_dict())
    sx.load_checkpoint(live, write("save", saved, tmp_path / "saved"))
    for mine, theirs in zip(live["model"].parameters(), torchs["model"].parameters(), strict=True):
        buffers = [held["optimizer"].state[one]["momentum_buffer"] for held, one in ((live, mine), (torchs, theirs))]
        assert torch.equal(*buffers)
    assert live["optimizer"].param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, accelerated, twice])
def test_a_loader_of_an_optimizer_does_not_round_its_state(wrap: Any, tmp_path: Path) -> None:
    """torch's casts moments to the dtype of the parameters."""

    def make(steps: int) -> dict[str, Any]:
        state = job(WithTrust, steps=steps, wrap=wrap)
        state["model"].bfloat16()
        for parameter in state["model"].parameters():
            state["optimizer"].state[parameter]["momentum_buffer"] = torch.full(parameter.shape, steps + 1e-5)
        return state

    saved, live = make(2), make(1)
    sx.load_checkpoint(live, write("save", saved, tmp_path / "saved"))
    for parameter in live["model"].parameters():
        assert torch.equal(live["optimizer"].state[parameter]["momentum_buffer"], torch.full(parameter.shape, 2 + 1e-5))
