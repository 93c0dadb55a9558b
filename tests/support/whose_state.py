"""Jobs whose state belongs to a rank, a class or a loader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import statexchange as sx
from statexchange.testing import run_ranks


def saved_by(ranks: int, make: Callable[[], Any], path: Path, **options: Any) -> str:
    run_ranks(lambda: sx.save_checkpoint(make(), path, **options) and None, ranks)
    return str(path)


def loaded_by(ranks: int, make: Callable[[], Any], path: str, read: Callable[[Any], Any], **options: Any) -> Any:
    """Load on some ranks; return what `read` returns of each rank's state, or the class and name of the error."""

    def ranks_load() -> Any:
        state = make()
        try:
            sx.load_checkpoint(state, path, **options)
        except sx.StateExchangeError as error:
            return error
        return read(state)

    return run_ranks(ranks_load, ranks)


# Classes of optimizers


def job(kind: Any, *, steps: int = 0, wrap: Callable[[Any], Any] = lambda one: one, **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), **options)
    for _ in range(steps):
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": wrap(optimizer), "step": steps}


def write(form: str, state: dict[str, Any], path: Path) -> str:
    states = {key: one.state_dict() if hasattr(one, "state_dict") else one for key, one in state.items()}
    if form == "save":
        sx.save_checkpoint(state, path)
    elif form == "states":
        sx.save_checkpoint(states, path)
    elif form == "torch":
        torch.save(states, path)
    else:
        dcp.save(states, checkpoint_id=path, no_dist=True)
    return str(path)


def accelerated(optimizer: Any) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(optimizer)


def twice(optimizer: Any) -> Any:
    return accelerated(sx.DistributedOptimizer(optimizer))
