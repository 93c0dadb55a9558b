"""Objects that hold state as nested containers, and whether two of these are equal; all optimizers of torch."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from equality import equal_bits
from torch import nn


def classes(module: Any, base: type) -> list[type]:
    """Return the public classes of a module that are derived from `base`."""
    found = [kind for name, kind in sorted(vars(module).items()) if name[0] != "_" and isinstance(kind, type)]
    return [kind for kind in found if issubclass(kind, base) and kind is not base]


OPTIMIZERS = classes(torch.optim, torch.optim.Optimizer)


def content(value: Any) -> Any:
    """Return a value as nested containers of tensors and plain values, for comparison."""
    if isinstance(value, nn.Module | torch.optim.Optimizer) or hasattr(value, "load_state_dict"):
        return content(value.state_dict())
    if is_dataclass(value):
        return {field.name: content(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): content(item) for key, item in value.items()} | {"type": type(value).__name__}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(content, value)]
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def equal(one: Any, other: Any) -> bool:
    """Whether two values that `content` has returned have the same types, and equal bits or plain values."""
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, torch.Tensor):
        if type(one) is not type(other) or one.dtype != other.dtype or one.device != other.device:
            return False
        has_bits = one.layout is other.layout is torch.strided and not one.is_quantized
        return equal_bits(one, other) if has_bits else torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return type(one) is type(other) and one.dtype == other.dtype and bool((one == other).all())
    return type(one) is type(other) and bool(one == other or (one != one and other != other))  # NaN
