"""What live state is made of, as readers and type checkers see it: torch's own classes, without importing torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

Leaf: TypeAlias = Any
"""A tensor, live or stored, or a plain value: whatever a program keeps in its state."""

Module: TypeAlias = "torch.nn.Module"

Optimizer: TypeAlias = "torch.optim.Optimizer"


class Stateful(Protocol):
    """An object with a state of its own, as `torch.distributed.checkpoint.stateful.Stateful`."""

    def state_dict(self) -> Mapping[str, Leaf]:
        """Return the state."""

    def load_state_dict(self, state_dict: Mapping[str, Leaf]) -> object:
        """Take the state."""
