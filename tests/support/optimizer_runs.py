"""Small trainings with an optimizer, whose averages are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from statexchange.errors import StateExchangeError
from statexchange.testing import run_ranks

Optimizer = torch.optim.Optimizer
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return random numbers without using torch's generator, which thread ranks share."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def filled(module: Any) -> Any:
    """Fill the parameters with the same values in every process and thread; return the module."""
    for i, parameter in enumerate(module.parameters()):
        parameter.data.copy_(numbers(*parameter.shape, seed=i) / 2)
    return module


def net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    return filled(nn.Sequential(nn.Linear(4, 8, dtype=dtype), nn.Tanh(), nn.Linear(8, 3, dtype=dtype)))


def state_of(module: nn.Module) -> list[Any]:
    return [value.tolist() for value in module.state_dict().values()]


def grad_of(module: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.tolist() for p in module.parameters()]


def batch(rank: int, step: int) -> torch.Tensor:
    return numbers(5, 4, seed=100 * step + rank + 7)


def loss_of(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    return (module(batch(rank, step)) ** 2).mean()


# Refusals


def raised_on_both(work: Callable[[], Any], expected: type[Exception]) -> StateExchangeError:
    """Return the error that both ranks raise alike."""

    def caught() -> StateExchangeError:
        with pytest.raises(expected) as error:
            work()
        assert isinstance(error.value, StateExchangeError)
        return error.value

    errors: list[StateExchangeError] = run_ranks(caught, 2)
    assert str(errors[0]) == str(errors[1])
    return errors[0]
