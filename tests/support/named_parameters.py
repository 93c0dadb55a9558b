"""Jobs whose optimizers name their parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import statexchange as sx

Write = Callable[[Any, Path], Path]


def states_of(job: dict[str, Any]) -> dict[str, Any]:
    return {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in job.items()}


def write_save(job: dict[str, Any], path: Path) -> Path:
    sx.save_checkpoint(job, path / "save")
    return path / "save"


def write_states(job: dict[str, Any], path: Path) -> Path:
    return write_save(states_of(job), path)


def write_torch(job: dict[str, Any], path: Path) -> Path:
    torch.save(states_of(job), path / "state.pt")  # the format under test
    return path / "state.pt"


def write_dcp(job: dict[str, Any], path: Path) -> Path:
    dcp.save(states_of(job), checkpoint_id=path / "dcp", no_dist=True)
    return path / "dcp"


def stepped(optimizer: Any) -> Any:
    """Give each parameter a state of its own, which `moments` returns."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def moments(optimizer: Any, parameters: Sequence[Any]) -> list[list[float]]:
    return [optimizer.state[parameter]["exp_avg"].flatten().tolist() for parameter in parameters]


# Parameters by number


def hidden_job(shapes: Sequence[int], sizes: Sequence[int], *, names: Sequence[str] = ()) -> tuple[Any, list[Any]]:
    """An optimizer whose parameters, in groups of these sizes, are not all in the state."""
    parameters = [nn.Parameter(torch.randn(size)) for size in shapes]
    entries: list[Any] = [*zip(names, parameters, strict=True)] if names else parameters
    groups, begin = [], 0
    for size in sizes:
        groups.append({"params": entries[begin : begin + size]})
        begin += size
    return {"first": parameters[0], "optimizer": torch.optim.Adam(groups, lr=0.1)}, parameters


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
