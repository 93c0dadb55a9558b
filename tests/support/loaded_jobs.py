"""Models, jobs and checkpoints that are loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

NAN = float("nan")


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 33), nn.BatchNorm1d(33), nn.Linear(33, 5))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 7, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, torch.Tensor):
        one, other = (t.full_tensor() if hasattr(t, "full_tensor") else t for t in (one, other))
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


# Ranks


def placed(whole: torch.Tensor, mesh: Any, text: str) -> Any:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    placements = [Replicate() if p == "r" else Shard(int(p)) for p in text]
    return distribute_tensor(whole, mesh, placements)


def mesh_of(shape: list[int]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", tuple(shape))
