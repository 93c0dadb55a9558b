"""Jobs that torch's own functions have saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn


def write_torch(state: dict[str, Any], path: Path) -> str:
    path.mkdir(exist_ok=True)
    torch.save(state, path / "state.pt")
    return str(path / "state.pt")


def write_dcp(state: dict[str, Any], path: Path) -> str:
    dcp.save(state, checkpoint_id=str(path / "dcp"), no_dist=True)
    return str(path / "dcp")


WRITERS = [write_torch, write_dcp]
Writer = Callable[[dict[str, Any], Path], str]


def trained(model: nn.Module, kind: Any = torch.optim.Adam, steps: int = 2, **options: Any) -> Any:
    optimizer = kind(model.parameters(), **options)
    for _ in range(steps):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = sum(parameter.square().sum() for parameter in model.parameters())
            loss.backward()
            return loss

        optimizer.step(closure)
    return optimizer


def in_torchs_form(state: dict[str, Any]) -> Any:
    """Return an optimizer's state dict without the order of keys."""
    return {key: sorted(map(str, items)) for key, items in state["state"].items()}, state["param_groups"]


class Averages:
    """An object whose state has tensors in containers."""

    def __init__(self, value: float) -> None:
        self.state: dict[str, Any] = {"n": int(value), "by": {3: torch.full((2,), value)}, "seen": {}}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state
