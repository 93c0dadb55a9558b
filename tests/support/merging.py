"""Shards of tensors that are merged."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from workspaces import part

from statexchange.checkpoint.merge import merge_checkpoint
from statexchange.errors import (
    StateExchangeError,
)
from statexchange.sharding.shards import Box, full_box
from statexchange.storage.tensorfile import ShardData
from statexchange.tensors import DTYPE_NAMES


def chunks(shape: tuple[int, ...], world_size: int, dim: int) -> list[Box]:
    """Return the boxes of torch.chunk, some of them possibly empty."""
    size = -(-shape[dim] // world_size)
    begins = [min(size * r, shape[dim]) for r in range(world_size + 1)]
    return [
        Box(
            tuple(begins[r] if d == dim else 0 for d in range(len(shape))),
            tuple(begins[r + 1] - begins[r] if d == dim else s for d, s in enumerate(shape)),
        )
        for r in range(world_size)
    ]


def whole_state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    names = {getattr(torch, long_name): name for long_name, name in DTYPE_NAMES.items()}
    state = {f"all.{name}": torch.arange(35).to(dtype).reshape(7, 5) for dtype, name in names.items() if name != "C128"}
    state["big"] = torch.randn(1500, 701, generator=generator)  # more than a window
    state["tall"] = torch.randn(700_001, 3, generator=generator).bfloat16()
    state["cube"] = torch.randn(3, 300, 1000, generator=generator)
    state["größe"] = torch.arange(12).reshape(3, 4)
    state["scalar"] = torch.tensor(2.5)
    state["empty"] = torch.empty(0, 3)
    return state


def lay_out(state: dict[str, torch.Tensor], world_size: int, dim: int) -> list[list[ShardData]]:
    """Cut every tensor along a dim if it has that dim; else put it on all ranks."""
    ranks: list[list[ShardData]] = [[] for _ in range(world_size)]
    for name, value in state.items():
        shape = tuple(value.shape)
        boxes = chunks(shape, world_size, dim) if value.ndim > dim else [full_box(shape)] * world_size
        for rank, box in zip(ranks, boxes, strict=True):
            rank.append(part(name, value, box))
    return ranks


def refuse(error: type[StateExchangeError], path: Path, match: str, **options: Any) -> StateExchangeError:
    """Check that merging `path`/ws raises `error` and leaves nothing."""
    before = sorted(os.listdir(path))
    with pytest.raises(error, match=match) as caught:
        merge_checkpoint(path / "ws", path / "out", **options)
    assert sorted(os.listdir(path)) == before
    return caught.value
