"""One job goes on under one kind of parallelism after another, on other numbers of ranks, and nothing changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
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
