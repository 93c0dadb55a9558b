"""Jobs whose optimizers and objects have state."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import torch
from torch import nn

import statexchange as sx


def trained(model: nn.Module, kind: Any = torch.optim.Adam, steps: int = 1, **options: Any) -> Any:
    """Return an optimizer of a model after some steps."""
    optimizer = kind(model.parameters(), **options)
    for _ in range(steps):
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def saved(state: dict[str, Any], path: Path) -> str:
    sx.save_checkpoint(state, path / "saved")
    return str(path / "saved")


# Types in the states of objects


class Mode(enum.Enum):
    SLOW = 1
    FAST = 2


class Holder:
    """An object with a given state."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state
