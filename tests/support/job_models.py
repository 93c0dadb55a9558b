"""A random job as plain data and built, its models, and other objects of its state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn


class Pair(NamedTuple):
    """A namedtuple."""

    first: Any
    second: Any


@dataclasses.dataclass
class Holding:
    """A dataclass."""

    first: Any
    second: Any


class Net(nn.Module):
    """A body and a head."""

    def __init__(self, out: int) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, out)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.out = nn.Linear(3, 4, bias=False)
        self.out.weight = self.embed.weight


@dataclasses.dataclass
class Spec:
    """A job as plain data."""

    model: str
    wrapper: str = ""
    out: int = 2
    optimizer: str = ""
    groups: list[list[int]] = dataclasses.field(default_factory=list)  # numbers of parameters
    has_names: bool = False
    lr_is_tensor: bool = False
    is_stray: bool = False  # the optimizer's parameters are not in the state
    steps: int = 1
    scheduler: str = ""
    has_ema: bool = False
    has_model: bool = True
    keys: dict[str, str] = dataclasses.field(default_factory=dict)  # of the state, by role
    nesting: str = ""
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)  # without tensors' values


@dataclasses.dataclass
class Job:
    """A built job: its state, and the identity of its parameters."""

    state: Any
    parameters: dict[str, Any]
    model: Any
    optimizer: Any
    spec: Spec


def make_model(kind: str, out: int) -> Any:
    makers: dict[str, Callable[[], Any]] = {
        "mlp": lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, out)),
        "net": lambda: Net(out),
        "tied": Tied,
        "square": lambda: nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3))),
        "plist": lambda: nn.ParameterList([nn.Parameter(torch.randn(2)) for _ in range(3)]),
        "stages": lambda: [nn.ModuleDict({"0": nn.Linear(2, 2)}), nn.ModuleDict({"1": nn.Linear(2, 2)})],
        "parts": lambda: {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)},
        "sub": lambda: dict(Net(out).named_children()),
        "tensors": lambda: {"w": nn.Parameter(torch.randn(2, 2)), "v.x": nn.Parameter(torch.randn(2))},
        "nested": lambda: nn.ModuleDict(
            {"state": nn.Linear(2, 2), "exp_avg": nn.ModuleDict({"state": nn.Linear(2, 2)})}
        ),
    }
    return makers[kind]()


def parameters_of(kind: str, model: Any) -> dict[str, Any]:
    """Return the parameters of a model by a name of their own."""
    if kind == "stages":
        return {name: one for stage in model for name, one in stage.named_parameters()}
    if kind in ("parts", "sub"):
        return {f"{key}.{name}": one for key, part in model.items() for name, one in part.named_parameters()}
    return dict(model) if kind == "tensors" else dict(model.named_parameters())
