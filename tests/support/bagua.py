"""The network that Bagua's own tests train."""

from __future__ import annotations

import torch
from torch import nn


def bagua_net(seed: int = 0) -> nn.Sequential:
    """2 to 10 without bias, 10 to 50, 50 to 4 without bias, softmax.

    Made from a seed of its own also where ranks are threads, which share torch's generator.
    """
    net = nn.Sequential(
        nn.Linear(2, 10, bias=False),
        nn.ReLU(),
        nn.Linear(10, 50),
        nn.ReLU(),
        nn.Linear(50, 4, bias=False),
        nn.Softmax(1),
    )
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    return net
