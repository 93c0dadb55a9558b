"""Jobs go on after a save as if they had not stopped: with each optimizer, and on other meshes and numbers of ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from state_content import OPTIMIZERS, content, equal
from sweeps import slow
from torch import nn

import statexchange as sx
from statexchange.testing import run_ranks

CHAIN = (("fsdp and tp", 4), ("fsdp", 4), ("alone", 1), ("fsdp", 3), ("ddp", 2), ("hsdp", 4), ("tp", 2), ("alone", 1))


def parallel(kind: str, model: nn.Module) -> nn.Module:
    """Return the model over all ranks, parallel in this way."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.nn.parallel import DistributedDataParallel

    if kind == "ddp":
        return DistributedDataParallel(model)
    if "tp" in kind:
        sizes = {"fsdp and tp": (2, 2), "tp": (1, 2)}[kind]
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if kind == "fsdp and tp":
            fully_shard(model, mesh=mesh["dp"])
    elif kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))
    elif kind == "fsdp":
        fully_shard(model)
    return model


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Return all tensors of a model and its optimizer as numbers that contain every bit."""
    tensors = []
    for parameter in model.parameters():
        tensors += [parameter.detach(), *(optimizer.state[parameter][key] for key in ("step", "exp_avg", "exp_avg_sq"))]
    full = [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in tensors]
    return [tensor.double().flatten().tolist() for tensor in full]


def goes_on(kind: str, number: int, folder: str) -> list[Any]:
    """Load the save before this one, unless it is the first, train, and save; return what was loaded and saved."""
    torch.manual_seed(number)
    model = parallel(kind, nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    loaded = None
    if number:
        sx.load_checkpoint(state, f"{folder}/{number - 1}")
        loaded = [values_of(model, optimizer), scheduler.last_epoch, optimizer.param_groups[0]["lr"], state["step"]]
    optimizer.zero_grad()
    model(torch.linspace(-1, 1, 16).reshape(2, 8)).square().sum().backward()
    optimizer.step()
    scheduler.step()
    state["step"] += 1
    sx.save_checkpoint(state, f"{folder}/{number}")
    return [
        loaded,
        [values_of(model, optimizer), scheduler.last_epoch, optimizer.param_groups[0]["lr"], state["step"]],
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_job_goes_on_under_every_parallelism(tmp_path: Path) -> None:
    saved = None
    for number, (kind, ranks) in enumerate(CHAIN):
        found = run_ranks(goes_on, ranks, backend="gloo", args=(kind, number, str(tmp_path)), timeout_s=200)
        for loaded, _ in found:
            assert loaded == saved, (number, kind)
        saved = found[0][1]
        assert saved[1:] == [number + 1, 0.1 * 0.5 ** (number + 1), number + 1]


# Every optimizer

VARIANTS: dict[str, dict[str, Any]] = {
    **{kind.__name__: {} for kind in OPTIMIZERS},
    "Adadelta foreach": {"foreach": True, "weight_decay": 0.1},
    "Adagrad decay": {"lr_decay": 0.1, "initial_accumulator_value": 0.5},
    "Adam amsgrad": {"amsgrad": True, "weight_decay": 0.1},
    "Adam fused": {"fused": True},
    "AdamW amsgrad": {"amsgrad": True, "maximize": True},
    "AdamW tensor": {"lr": torch.tensor(0.01), "foreach": False},
    "ASGD averaging": {"t0": 2, "lambd": 0.1},
    "LBFGS wolfe": {"line_search_fn": "strong_wolfe", "history_size": 2},
    "NAdam decoupled": {"decoupled_weight_decay": True, "weight_decay": 0.1},
    "RAdam foreach": {"foreach": True, "weight_decay": 0.1},
    "RMSprop centered": {"centered": True, "momentum": 0.9},
    "SGD nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "SGD dampening": {"momentum": 0.9, "dampening": 0.5, "maximize": True},
    "SGD fused": {"momentum": 0.9, "fused": True},
}
"""Options by the name of an optimizer and, after a space, of the variant."""


class Training:
    """A model with its optimizer, whose inputs depend on the number of the step alone."""

    def __init__(self, variant: str, seed: int) -> None:
        torch.manual_seed(seed)
        kind: Callable[..., Any] = getattr(torch.optim, variant.split(maxsplit=1)[0])
        self.is_sparse = variant == "SparseAdam"
        self.model: nn.Module = (
            nn.Embedding(5, 3, sparse=True)
            if self.is_sparse
            else nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
        )
        parameters = list(self.model.parameters())
        groups: Any = [{"params": parameters[:1], "lr": 0.02}, {"params": parameters[1:]}]
        if self.is_sparse or variant.startswith("LBFGS"):  # these take one group
            groups = parameters
        elif variant == "Muon":
            groups = [parameter for parameter in parameters if parameter.dim() == 2]
        self.optimizer = kind(groups, **{"lr": 0.01, **copy.deepcopy(VARIANTS[variant])})
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.step = 0

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "step": self.step}

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            inputs = torch.linspace(-self.step, 1, 15).reshape(5, 3)
            if self.is_sparse:
                inputs = torch.tensor([self.step % 5, (2 * self.step) % 5])

            def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
                self.optimizer.zero_grad()
                loss: torch.Tensor = self.model(inputs).square().mean()
                loss.backward()
                return loss

            self.optimizer.step(closure)
            self.scheduler.step()


@pytest.mark.parametrize("variant", [slow(name) if " " in name else name for name in VARIANTS])
def test_every_optimizer_goes_on_as_if_it_had_not_stopped(variant: str, tmp_path: Path) -> None:
    first = Training(variant, 1)
    first.train(3)
    sx.save_checkpoint(first.state(), tmp_path / "saved")
    first.train(4)
    for trained_before in (0, 2):  # an optimizer that has stepped already has state that is replaced
        second = Training(variant, 2)
        second.train(trained_before)
        state = second.state()
        sx.load_checkpoint(state, tmp_path / "saved")
        second.step = state["step"]
        assert second.step == 3
        second.train(4)
        assert equal(content(second.state()), content(first.state())), trained_before
