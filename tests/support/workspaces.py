"""Workspaces of tests: what ranks hold, files that they write, rounds that earlier versions committed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from statexchange.sharding.shards import Box, Shard, full_box
from statexchange.storage.tensorfile import ShardData
from statexchange.storage.workspace import RankName, Workspace
from statexchange.tensors import DTYPE_NAMES, ITEMSIZE

if TYPE_CHECKING:
    import torch


def filled(shard: Shard, data: bytes) -> ShardData:
    """Return a shard whose boxes have these bytes, one after another."""
    arrays, at = [], 0
    for box in shard.boxes:
        end = at + box.numel * ITEMSIZE[shard.dtype]
        arrays.append(np.frombuffer(data[at:end], np.uint8))
        at = end
    assert at == len(data)
    return ShardData(shard, tuple(arrays))


def held(name: str = "w", data: bytes = b"12345678", **shard: Any) -> ShardData:
    """Return what a rank holds: a whole vector of U8, unless the attributes of its shard are given."""
    shape = (len(data),)
    attributes = {"dtype": "U8", "global_shape": shape, "boxes": (full_box(shape),)} | shard
    return filled(Shard(name, **attributes), data)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the elements of a tensor in C order."""
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def part(name: str, whole: torch.Tensor, *boxes: Box) -> ShardData:
    """Return what a rank holds that has these boxes of a tensor."""
    cut = [whole[tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))] for box in boxes]
    dtype = DTYPE_NAMES[str(whole.dtype).removeprefix("torch.")]
    return filled(Shard(name, dtype, tuple(whole.shape), boxes), b"".join(map(bytes_of, cut)))


def write(
    workspace: Workspace,
    rank: int = 0,
    world_size: int = 1,
    run: str = "job",
    number: int = 1,
    *,
    tensors: Sequence[ShardData] | None = None,
    **options: Any,
) -> RankName:
    """Write the file of a rank in a round; without `tensors` it holds `held()`."""
    found = [held()] if tensors is None else tensors
    return workspace.write(found, run=run, round=number, rank=rank, world_size=world_size, **options)


def commit(root: Path, name: RankName) -> Path:
    """Give the round of a file a manifest, as root did in earlier versions; return its path."""
    path = (root / name.relative).parent / "manifest.json"
    path.write_text("{}")
    return path


def write_round(root: Path, *ranks: Sequence[ShardData], **options: Any) -> list[Path]:
    """Write what each rank holds as round 1 of the run "job"; return the files of the ranks."""
    workspace = Workspace(root)
    names = [write(workspace, rank, len(ranks), tensors=tensors, **options) for rank, tensors in enumerate(ranks)]
    return [root / name.relative for name in names]
