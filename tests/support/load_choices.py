"""States that are saved and loaded by a choice of entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import statexchange as sx

Write = Callable[[Any, Path], Path]


def write_save(state: Any, path: Path) -> Path:
    sx.save_checkpoint(state, path / "save")
    return path / "save"


def write_torch(state: Any, path: Path) -> Path:
    torch.save(with_states(state), path / "state.pt")  # the format under test
    return path / "state.pt"


def with_states(state: Any) -> Any:
    if hasattr(type(state), "state_dict"):
        return state.state_dict()
    if isinstance(state, dict):
        return {key: with_states(item) for key, item in state.items()}
    return type(state)(map(with_states, state)) if type(state) in (list, tuple) else state


WRITERS = [write_save, write_torch]


class Counted:
    """An object with a state, which takes what it is given."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.values = dict(state)

    def __repr__(self) -> str:
        return f"Counted({self.values})"


def trained(model: nn.Module, **options: Any) -> torch.optim.Adam:
    optimizer = torch.optim.Adam(model.parameters(), **options)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


# A user's own containers


class Holding(Mapping[str, Any]):
    """A mapping that keeps its items in an attribute, and does not say how it is copied."""

    shown = "Fields"

    def __init__(self, items: dict[str, Any]) -> None:
        self.own_items = items

    def held(self) -> dict[str, Any]:
        return self.own_items

    def __getitem__(self, key: str) -> Any:
        return self.held()[key]

    def __iter__(self) -> Any:
        return iter(self.held())

    def __len__(self) -> int:
        return len(self.held())

    def __repr__(self) -> str:
        return f"{self.shown}({self.held()})"


class Box(Holding, MutableMapping[str, Any]):
    shown = "Box"

    def __setitem__(self, key: str, value: Any) -> None:
        self.held()[key] = value

    def __delitem__(self, key: str) -> None:
        del self.held()[key]


class ReadOnly(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("read only")


class Fields(Holding):
    """A mapping that cannot be changed, nor made from a mapping."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)


class Pair(tuple[Any, ...]):
    """A tuple that is not made from one sequence."""

    __slots__ = ()

    def __new__(cls, *items: Any) -> Any:
        return super().__new__(cls, items)
