"""Small trainings with the algorithms, and what one process computes for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from bagua import bagua_net
from torch import nn

import statexchange as sx
from statexchange.train.algorithms import (
    Algorithm,
)
from statexchange.train.module import data_parallel

STEPS = 10


def net(seed: int = 0) -> nn.Sequential:
    """Return the network in float64, so that equal algorithms are equal to the last bit."""
    return bagua_net(seed).double()


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    data, target = torch.randn(4, 2, generator=generator), torch.randn(4, 4, generator=generator)
    return data.double(), target.double()


def loss_of(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    data, target = batch(rank, step)
    return nn.functional.mse_loss(module(data), target)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: Any) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(module, rank, step).backward()
        optimizer.step()


def weights(module: nn.Module) -> list[Any]:
    return [parameter.tolist() for parameter in module.parameters()]


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.01)


def trained(algorithm: Algorithm | str, steps: int = STEPS, **settings: Any) -> Callable[[], list[Any]]:
    """Run Bagua's training on a rank, seeded by the rank; return its final weights."""

    def work() -> list[Any]:
        rank = sx.get_rank()
        module = net(rank)
        wrapped, optimizer = data_parallel(module, sgd(module), algorithm, **settings)
        train(wrapped, optimizer, rank, range(steps))
        return weights(module)

    return work


def trained_in_one_process(world_size: int) -> list[Any]:
    """Run the same training in one process: gradients are added in the order of ranks, then divided."""
    module = net(0)
    optimizer = sgd(module)
    for step in range(STEPS):
        grads = [torch.autograd.grad(loss_of(module, r, step), list(module.parameters())) for r in range(world_size)]
        for parameter, its in zip(module.parameters(), zip(*grads, strict=True), strict=True):
            parameter.grad = torch.stack(its).sum(0) / world_size
        optimizer.step()
    return weights(module)
