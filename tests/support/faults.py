"""Faults that happen to one rank during an export, a save or a load, and the states that tests compare."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

LAYOUT = {"rows": {"dim": 0}}
LEFT = (".owner", ".partial", ".discarded")
"""The ends of names that a killed rank may leave, by docs/shared_storage.md."""


class Trapped(dict[str, Any]):
    """A state that runs an action when its items are read for the first time."""

    def __init__(self, items: Any, action: Any) -> None:
        super().__init__(items)
        self.action = action

    def keys(self) -> Any:
        action, self.action = self.action, lambda: None
        action()
        return super().keys()

    def items(self) -> Any:
        self.keys()
        return super().items()

    def __iter__(self) -> Any:  # without one, dict() of it would not call keys()
        return super().__iter__()


def strike(how: str, after_s: float = 0.0) -> None:
    """Cause a fault in this process after `after_s`, in which the other ranks can reach the call."""
    time.sleep(after_s)
    if how == "raise":
        raise ZeroDivisionError("oops")
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "interrupt": signal.SIGINT}[how])
    time.sleep(0.1)  # for Python to handle the signal


def state_of(rank: int, value: float, world_size: int) -> dict[str, Any]:
    """Return a rank's rows of a tensor, its own tensor, and a copy of one that all ranks have; `value` fills them."""
    rows = torch.full((30, 100), value).tensor_split(world_size)[rank]
    return {"rows": rows, f"own{rank}": torch.full((50,), value), "same": torch.full((7,), value)}
