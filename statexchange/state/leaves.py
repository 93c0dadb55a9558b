"""What a walk over a state takes as a whole: tensors, modules, optimizers and other objects that keep a state."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from statexchange.state.megatron import sharded_kind
from statexchange.state.modules import is_module
from statexchange.state.optimizers import is_optimizer
from statexchange.state.tree import contains
from statexchange.tensors import is_tensor

__all__ = ["contains_state", "is_leaf", "is_stateful"]


def is_stateful(value: Any) -> bool:
    """Whether `value` is an object whose state can be taken and given, as LR schedulers are. Not collective."""
    if isinstance(value, type | Mapping):
        return False
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def is_leaf(value: Any) -> bool:
    """Whether `value` is looked at as a whole, whatever it contains. Not collective."""
    return (
        is_tensor(value)
        or isinstance(value, enum.Enum)
        or is_module(value)
        or is_optimizer(value)
        or is_stateful(value)
        or sharded_kind(value) is not None
    )


def contains_state(value: Any) -> bool:
    """Whether `value` is, or contains, what is filled in place: a tensor or an object with a state. Not collective."""
    return contains(value, lambda item: is_leaf(item) and not isinstance(item, enum.Enum))
