"""Parameters and gradients whose averages are known, for tests of reducers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

SETTINGS: list[dict[str, Any]] = [
    {},
    {"bucket_bytes": 64, "overlap": True},
    {"bucket_bytes": 64, "overlap": False},
    {"overlap": False},
    {"bucket_bytes": 1, "overlap": True},
]
Params = dict[str, nn.Parameter]


def parameters(*shapes: Any, dtype: torch.dtype = torch.float64) -> Params:
    return {f"p{i}": nn.Parameter(torch.ones(shape, dtype=dtype)) for i, shape in enumerate(shapes)}


def gradient_of(name: str, param: torch.Tensor, rank: int, step: int = 0) -> torch.Tensor:
    """Return the gradient of a rank: small whole numbers, so that sums are exact."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + int(name[1:]))
    return torch.randint(-8, 9, tuple(param.shape), generator=generator).to(param.dtype)


def backward(params: Params, rank: int, step: int = 0, names: Iterable[str] | None = None, **how: Any) -> None:
    """Compute the gradients of `names` by autograd, the last first."""
    terms = [(params[n] * gradient_of(n, params[n], rank, step).conj()).sum().real.double() for n in names or params]
    torch.stack(terms).sum().backward(**how)


def average(name: str, param: torch.Tensor, world_size: int, step: int = 0) -> torch.Tensor:
    parts = [gradient_of(name, param, rank, step) for rank in range(world_size)]
    return torch.stack(parts).sum(0) / world_size


def grads(params: Params) -> dict[str, Any]:
    return {name: None if p.grad is None else p.grad.tolist() for name, p in params.items()}


# Sparse gradients


def embedding(rows: int = 5, dtype: torch.dtype = torch.float64) -> nn.Embedding:
    table = nn.Embedding(rows, 2, sparse=True, dtype=dtype)
    nn.init.ones_(table.weight)
    return table
