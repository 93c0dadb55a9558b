"""Random trees for `synchronize`: the same structure on all ranks, other values, and at most one change on one rank.

A tree is drawn as plain data, and each rank builds its own from that: so two ranks differ in their values, strides and
numbers of steps, and in the change alone.
"""

from __future__ import annotations

import enum
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch
from drawn_trees import CONTAINERS, WRAPPED, Case, Recipe
from torch import nn
from torch.optim import lr_scheduler

import statexchange as sx


class Pair(NamedTuple):
    """A namedtuple."""

    left: Any
    right: Any


class Mode(enum.Enum):
    """Plain values."""

    FAST = "fast"
    SLOW = ("s", 1)


# State of an optimizer may have it on root alone.
sx.register_config(Mode)


class Unknown(enum.Enum):
    """A plain value of which ranks other than root have none."""

    ONE = 1


@dataclass
class Config:
    """A dataclass that is changed in place."""

    left: Any
    right: Any = None


@dataclass(frozen=True)
class Frozen:
    """A dataclass that is replaced."""

    left: Any
    right: Any = None


class Refusing(dict):  # type: ignore[type-arg]
    """A mapping that refuses new values."""

    def __setitem__(self, key: Any, value: Any) -> None:
        raise ValueError("refused")


class Table(dict):  # type: ignore[type-arg]
    """A mapping of a user's class."""


class Items(list):  # type: ignore[type-arg]
    """A list of a user's class."""


class Holder:
    """An object with any state."""

    def __init__(self, state: Any, *, raises: bool = False) -> None:
        self.state = state
        self.raises = raises

    def state_dict(self) -> Any:
        """Return the state."""
        return self.state

    def load_state_dict(self, state: Any) -> None:
        """Take the state."""
        if self.raises:
            raise ValueError("no")
        self.state = state


class Tied(nn.Module):
    """Tied weights, and a buffer that is not in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("cache", torch.ones(3), persistent=False)


class More(torch.optim.SGD):
    """An optimizer whose state dict has an entry of its own."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state with the count."""
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state and the count."""
        state_dict = dict(state_dict)
        self.count = state_dict.pop("count")
        super().load_state_dict(state_dict)


# Drawing


class Building:
    """Builds the tree of a case on one rank. Places that were built are kept, as others refer to them."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case = case
        self.rank = rank
        self.made: dict[int, Any] = {}
        self.is_root = rank == case.root

    def tree(self) -> Any:
        """Return the tree."""
        return self.build(self.case.tree)

    def build(self, place: Recipe) -> Any:
        """Return what lies at a place."""
        chance = random.Random(f"{self.case.seed} {place.number} {self.rank}")
        change = self.case.change if (self.case.rank, self.case.number) == (self.rank, place.number) else ""
        if place.kind in CONTAINERS:
            value = self._container(place, change, chance)
        else:
            value = getattr(self, f"_{place.kind}")(place, change, chance)
        self.made[place.number] = value
        return value if change not in WRAPPED else _wrapped(change, value)

    def _container(self, place: Recipe, change: str, chance: random.Random) -> Any:
        items = {}
        for key, item in place.items:
            items[key] = self.build(item)
        if change == "order":
            items = dict(reversed(items.items()))
        elif change == "key more":
            items["a key more"] = 1
        elif change == "key less":
            del items[chance.choice([*items])]
        elif change == "moved":
            key = chance.choice([*items])
            items["another key"] = items.pop(key)
        elif change == "length":
            items.popitem()
        kind = place.kind
        if change == "container":
            kind = {"list": "tuple", "pair": "tuple", "config": "pair", "dict": "list"}[kind]
        values = list(items.values())
        if kind in ("pair", "config", "frozen"):
            return {"pair": Pair, "config": Config, "frozen": Frozen}[kind](*values)
        if kind in ("list", "items", "tuple"):
            return {"list": list, "items": Items, "tuple": tuple}[kind](values)
        return {"dict": dict, "ordered": OrderedDict, "table": Table}[kind](items)

    def _tensor(self, place: Recipe, change: str, chance: random.Random) -> Any:
        dtype, shape, form = place.detail
        generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
        if change == "shape":
            shape = (*shape[:-1], shape[-1] + 1)
        if change == "dtype":
            dtype = "float32" if dtype != "float32" else "int32"
        if change == "kind":
            return 3
        if self.case.change == "overlap" and self.case.number == place.number:
            flat = torch.rand(10, generator=generator)
            return Pair(flat[:6], flat[4:] if change else torch.rand(6, generator=generator))
        if change == "expanded" and shape and 0 not in shape:
            return torch.ones((1,) * len(shape)).to(getattr(torch, dtype)).expand([size + 1 for size in shape])
        if change == "strides":
            form = chance.choice(["strided", "turned", "plain"])
        tensor = (torch.rand(shape, generator=generator) * 9).to(getattr(torch, dtype))
        if form == "strided" and shape:
            wide = torch.zeros((*shape[:-1], 2 * shape[-1] + 1), dtype=tensor.dtype)
            view = wide[..., 1 : 2 * shape[-1] : 2]
            tensor = view.copy_(tensor) if tensor.numel() else view
        if form == "turned" and len(shape) > 1:
            tensor = tensor.transpose(0, -1).contiguous().transpose(0, -1)
        if form == "grad" and tensor.is_floating_point() and tensor.itemsize > 1:
            tensor.requires_grad_(True)
        if change == "expanded":
            return torch.ones(1).expand(3)
        return tensor

    def _parameter(self, place: Recipe, change: str, chance: random.Random) -> Any:
        generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
        return nn.Parameter(torch.rand((2, 2), generator=generator))

    def _tie(self, place: Recipe, change: str, chance: random.Random) -> Any:
        value = self.made[place.detail]
        if change == "untied" and isinstance(value, torch.Tensor):
            return value.detach().clone()
        return value

    def _view(self, place: Recipe, change: str, chance: random.Random) -> Any:
        value = self.made[place.detail]
        if not isinstance(value, torch.Tensor) or not value.dim():
            return torch.ones(2)
        return value.detach()[: max(1, len(value) - 1)]

    def _array(self, place: Recipe, change: str, chance: random.Random) -> Any:
        numbers = np.random.default_rng(chance.randrange(1 << 30)).integers(0, 9, 4 + (change == "shape"))
        kind = place.detail if change != "dtype" else ("f8" if place.detail != "f8" else "f4")
        if change == "kind":
            return torch.from_numpy(numbers)
        if kind == "record":
            array = np.zeros(len(numbers), [("a", "i4"), ("b", "f8")])
            array["a"] = numbers
        else:
            array = numbers.astype(getattr(ml_dtypes, kind, kind))
        if change == "read-only":
            array.flags.writeable = False
        return array[::-1] if chance.random() < 0.2 and change != "read-only" else array

    def _value(self, place: Recipe, change: str, chance: random.Random) -> Any:
        if change == "none":
            return None
        if change == "kind":
            if place.detail == "None" or chance.random() < 0.3:
                return object()
            return 3 if place.detail in ("str", "enum", "dtype") else "text"
        if change == "unknown":
            return Unknown.ONE
        if self.case.change == "unknown" and self.case.number == place.number:
            return None
        value = {
            "number": chance.choice([chance.randrange(100), chance.random(), True, 1j]),
            "str": f"text {chance.randrange(5)}",
            "enum": chance.choice([*Mode]),
            "dtype": chance.choice([torch.float32, torch.bfloat16]),
            "numpy": chance.choice([np.float32(chance.random()), np.int8(chance.randrange(9))]),
            "None": None,
            "nan": chance.choice([float("nan"), -0.0, 0.0, float("inf")]),
        }[place.detail]
        if self.case.change == "refuses" and self.case.number == place.number:
            return (Refusing if change else dict)({"step": self.rank})
        return value

    def _own(self, place: Recipe, change: str, chance: random.Random) -> Any:
        if change == "kind":
            return 2.5
        return {
            "object": object(),
            "device": torch.device("cpu", self.rank),
            "bytes": b"%d" % self.rank,
            "set": {self.rank},
            "deque": deque([self.rank]),
            "function": _kept,
        }[place.detail]

    def _module(self, place: Recipe, change: str, chance: random.Random) -> Any:
        kind, more = place.detail, int(change == "shape")
        if kind == "linear":
            module: nn.Module = nn.Linear(2, 2 + more)
        elif kind == "norm":
            module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2 + more))
        elif kind == "tied":
            module = Tied()
            if more:
                module.more = nn.Linear(1, 1)
        elif kind == "list":
            module = nn.ModuleList([nn.Linear(2, 1) for _ in range(1 + more)])
        else:
            module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 1 + more, bias=False)))
        if kind == "ignoring":
            module._ddp_params_and_buffers_to_ignore = ["0.bias"]
        generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
        with torch.no_grad():
            for tensor in [*module.parameters(), *module.buffers()]:
                tensor.copy_(torch.rand(tensor.shape, generator=generator) * 9)
        return module

    def _optimizer(self, place: Recipe, change: str, chance: random.Random) -> Any:
        kind, module, num_groups, names, has_steps = place.detail
        if change == "optimizer":
            kind = "sgd" if kind not in ("sgd", "momentum", "tensor lr", "nested") else "adam"
        generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
        parameters = [nn.Parameter(torch.rand((2, 2 + at), generator=generator)) for at in range(3)]
        if isinstance(self.made.get(module), nn.Module):
            parameters = [p for p in self.made[module].parameters() if p.requires_grad] or parameters
        if change == "parameters":
            parameters = [*parameters, nn.Parameter(torch.ones(1))]
        num_groups = min(num_groups, len(parameters)) if kind != "lbfgs" else 1
        groups: list[dict[str, Any]] = []
        for at in range(num_groups):
            of_group: list[Any] = parameters[at::num_groups]
            if names:
                of_group = [(f"name {at} {index}", parameter) for index, parameter in enumerate(of_group)]
            groups.append({"params": of_group})
        if kind == "lbfgs" and names:
            groups = [{"params": parameters}]
        optimizer = _make_optimizer(kind, groups)
        if change == "hyperparameters" or chance.random() < 0.5:
            optimizer.param_groups[0]["lr"] = chance.random()
            optimizer.param_groups[0]["note"] = {"on": [self.rank, (None, chance.random())]}
        steps = chance.randrange(3) if has_steps else 0
        if change == "steps":
            steps = 2
        if change == "no steps":
            steps = 0
        for _ in range(steps):
            for parameter in parameters:
                parameter.grad = torch.rand(parameter.shape, generator=generator)
            optimizer.step((lambda: torch.ones(())) if kind == "lbfgs" else None)
        if change == "group":
            optimizer.param_groups.append({**optimizer.param_groups[0], "params": [nn.Parameter(torch.ones(1))]})
        if kind == "nested" and steps:
            shared = torch.full((2,), float(self.rank))
            moment = {1: (shared, [shared, np.float32(self.rank)]), "array": np.arange(3) + self.rank, "none": None}
            optimizer.state[parameters[0]] = {"odd": moment, "step": torch.tensor(self.rank), "seen": Mode.FAST}
            optimizer.state["all"] = {"count": self.rank, "mean": torch.full((2,), float(self.rank))}
        if kind == "more":
            optimizer.count = self.rank + 1
        if change == "helper":
            optimizer.param_groups[0]["helper"] = object()
        if change == "stale":
            optimizer.state[nn.Parameter(torch.ones(1))] = {"step": 1}
        return optimizer

    def _scheduler(self, place: Recipe, change: str, chance: random.Random) -> Any:
        kind, number = place.detail
        optimizer = self.made[number]
        scheduler = _make_scheduler(kind, optimizer)
        for _ in range(chance.randrange(3)):
            if kind == "plateau":
                scheduler.step(chance.random())
            else:
                scheduler.step()
        return scheduler

    def _holder(self, place: Recipe, change: str, chance: random.Random) -> Any:
        kind, has_less = place.detail
        if change == "kind":
            return "text"
        rank = self.rank
        shared = torch.full((2,), float(rank))
        state: Any = {
            "tensors": {"a": torch.full((2, 2), float(rank)), "b": [torch.tensor(rank), (shared, 1)], 3: Mode.SLOW},
            "array": {"array": np.arange(3, dtype=">i4") + rank, "half": np.ones(2, ml_dtypes.bfloat16) * rank},
            "plain": OrderedDict(count=rank, text="x" * rank, nested={"deep": [{"er": rank}]}),
            "object": {"function": _kept, "step": rank},
            "empty": {},
            "joined": {"one": shared, "two": shared + 1 if self.is_root else shared},
            "shared": {"one": shared, "two": shared, "three": shared[:1]},
        }[kind]
        if has_less and not self.is_root and kind != "object":
            state = {}
        return Holder(state, raises=change == "raises")


def _kept() -> None:
    """Stay each rank's own."""


def _wrapped(change: str, value: Any) -> Any:
    if change == "sparse":
        return torch.eye(2).to_sparse()
    if change == "meta":
        return torch.ones(2, device="meta")
    if change == "generator":
        return (number for number in range(3))
    if change == "odd key":
        return {object(): value}
    if change == "cycle":
        cycle: list[Any] = [value]
        cycle.append({"again": cycle})
        return cycle
    if change == "set":
        return {nn.Parameter(torch.ones(1))}
    return np.longdouble(1)


def _make_optimizer(kind: str, groups: list[dict[str, Any]]) -> Any:
    makers: dict[str, Callable[[], Any]] = {
        "sgd": lambda: torch.optim.SGD(groups, lr=0.2),
        "momentum": lambda: torch.optim.SGD(groups, lr=0.2, momentum=0.9),
        "adam": lambda: torch.optim.Adam(groups, lr=0.2, amsgrad=True),
        "adamw": lambda: torch.optim.AdamW(groups, lr=0.2),
        "adagrad": lambda: torch.optim.Adagrad(groups, lr=0.2),
        "rprop": lambda: torch.optim.Rprop(groups, lr=0.2),
        "tensor lr": lambda: torch.optim.AdamW(groups, lr=torch.tensor(0.2), foreach=False),
        "nested": lambda: torch.optim.SGD(groups, lr=0.1),
        "more": lambda: More(groups, lr=0.1, momentum=0.5),
        "lbfgs": lambda: torch.optim.LBFGS(groups[0]["params"], max_iter=2),
    }
    return makers[kind]()


def _make_scheduler(kind: str, optimizer: Any) -> Any:
    count = len(optimizer.param_groups)
    makers: dict[str, Callable[[], Any]] = {
        "step": lambda: lr_scheduler.StepLR(optimizer, 2),
        "multistep": lambda: lr_scheduler.MultiStepLR(optimizer, [1, 3]),
        "lambda": lambda: lr_scheduler.LambdaLR(optimizer, [lambda epoch: 0.5] * count),
        "plateau": lambda: lr_scheduler.ReduceLROnPlateau(optimizer),
        "cosine": lambda: lr_scheduler.CosineAnnealingLR(optimizer, 5),
        "sequential": lambda: lr_scheduler.SequentialLR(
            optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [2]
        ),
    }
    return makers[kind]()
