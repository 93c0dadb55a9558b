"""Jobs that torch and statexchange have saved, in several forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import statexchange as sx

Job = dict[str, Any]


def layers_job(groups: Sequence[str], lrs: Sequence[float]) -> Job:
    """Layers of one shape, whose parameters come in groups such as "ab"."""
    model = nn.ModuleDict({key: nn.Linear(3, 3, bias=False) for key in sorted("".join(groups))})
    of_groups: list[Any] = [
        {"params": [model[key].weight for key in keys], "lr": lr} for keys, lr in zip(groups, lrs, strict=True)
    ]
    return {"model": model, "optimizer": torch.optim.Adam(of_groups)}


def trained(job: Job) -> Job:
    for parameter in job["model"].parameters():
        parameter.grad = torch.randn_like(parameter)
    job["optimizer"].step()
    return job


def moments(job: Job) -> dict[str, list[float]]:
    """Return the first moment of each parameter that has one, by name."""
    named = job["model"].named_parameters()
    state = job["optimizer"].state
    return {name: state[one]["exp_avg"].flatten().tolist() for name, one in named if one in state}


def lrs_of(job: Job) -> dict[str, float]:
    names = {parameter: name for name, parameter in job["model"].named_parameters()}
    return {names[one]: group["lr"] for group in job["optimizer"].param_groups for one in group["params"]}


# What jobs write of their optimizer


def by_number(job: Job) -> Job:
    return {key: value.state_dict() for key, value in job.items()}


def by_name(job: Job, *, flat: bool = False) -> Job:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    optimizer = get_optimizer_state_dict(job["model"], job["optimizer"], options=options)
    return {"model": job["model"].state_dict(), "optimizer": optimizer}


def flattened(job: Job) -> Job:
    return by_name(job, flat=True)


def write_save(state: Job, path: Path) -> Path:
    sx.save_checkpoint(state, path / "save")
    return path / "save"


def write_torch(state: Job, path: Path) -> Path:
    torch.save(state, path / "state.pt")  # the format under test
    return path / "state.pt"


def write_dcp(state: Job, path: Path) -> Path:
    dcp.save(state, checkpoint_id=path / "dcp", no_dist=True)
    return path / "dcp"


Form = Callable[[Job], Job]
Write = Callable[[Job, Path], Path]
