"""The boxes that this rank holds of a tensor that has torch's method `__create_chunk_list__`, and new DTensors.

A DTensor's boxes follow from its mesh and placements. Any other tensor lists its own chunks.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import TYPE_CHECKING

from statexchange.errors import UnsupportedError
from statexchange.sharding.sharding_spec import DimSplit, Placement, coordinate_of, local_boxes
from statexchange.sharding.shards import Box
from statexchange.state.types import Leaf
from statexchange.tensors import wait_tensor

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = ["chunks_of", "new_dtensor"]


def new_dtensor(like: DTensor, shape: Sequence[int], dtype: torch.dtype, dims: Collection[int]) -> DTensor:
    """Return a new DTensor on the mesh of `like`, sharded as `like` is in the dims `dims`, and replicated in others.

    Not collective.
    """
    from torch.distributed.tensor import Replicate, Shard, zeros

    placements = [*like.placements]
    for axis, placement in enumerate(like.placements):
        if type(placement) is not Shard or placement.dim not in dims:
            placements[axis] = Replicate()
    return zeros(*shape, dtype=dtype, device_mesh=like.device_mesh, placements=placements)


def chunks_of(name: str, tensor: Leaf, rank: int) -> tuple[list[tuple[Box, torch.Tensor]], Placement | None, str]:
    """Return the boxes that this rank holds, each with its memory; a DTensor's placement, and its mesh's ranks as text.

    Not collective. The placement is None unless the mesh has the ranks 0, 1, ... in order and `rank` holds exactly the
    boxes that follow from the placement: then one record describes the boxes of all ranks. Of a (4, 2) DTensor with
    Shard(0) on two ranks the rank 1 holds the box at (2, 0) of shape (2, 2).

    Raises:
        UnsupportedError: a placement is Partial, or a mesh lists ranks out of order; the error names the tensor.
    """
    if getattr(tensor, "device_mesh", None) is None:
        from torch.distributed.checkpoint.metadata import MetadataIndex

        chunks = []
        for index, chunk in enumerate(tensor.__create_chunk_list__()):
            memory = tensor.__get_tensor_shard__(MetadataIndex(name, chunk.offsets, index))
            chunks.append((_box(chunk), memory))
        return chunks, None, ""
    layout = _layout_of(tensor, rank)
    if layout.problem is not None:
        raise UnsupportedError(layout.problem, name=name)
    if not layout.boxes:
        return [], layout.placement, layout.mesh
    local = _local_part(tensor)
    if layout.begins is None:
        return [(box, local) for box in layout.boxes], layout.placement, layout.mesh
    parts = []
    for box, begin in zip(layout.boxes, layout.begins, strict=True):
        parts.append((box, local[tuple(map(slice, begin, map(add, begin, box.shape)))]))
    return parts, layout.placement, layout.mesh


def _local_part(tensor: DTensor) -> torch.Tensor:
    # Outside of autograd's graph: `to_local` would take most of the time to add a node to it, and torch refuses to
    # slice the local part of a parameter there once it was filled.
    import torch

    if torch.is_grad_enabled():
        with torch.no_grad():
            return _local_part(tensor)
    local: torch.Tensor = wait_tensor(tensor.to_local()).detach()
    return local


def _box(chunk: ChunkStorageMetadata) -> Box:
    return Box(tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes)))


@dataclass(frozen=True, slots=True)
class _LocalLayout:
    """The boxes of a DTensor's local part and, if it has several, where each begins in the local part.

    `problem` is why the tensor is refused.
    """

    boxes: tuple[Box, ...] = ()
    begins: tuple[tuple[int, ...], ...] | None = None
    placement: Placement | None = None
    mesh: str = ""
    problem: str | None = None


# A cache, by mesh: most of a model's tensors share shape and placements, and torch is slow to compute chunks.
_layouts: weakref.WeakKeyDictionary[DeviceMesh, dict[object, _LocalLayout]] = weakref.WeakKeyDictionary()


def _layout_of(tensor: DTensor, rank: int) -> _LocalLayout:
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    # One mesh object may serve several ranks, which are threads.
    key = (tensor.placements, tuple(tensor.shape), rank, str(coordinate))
    of_mesh = _layouts.setdefault(mesh, {})
    if key not in of_mesh:
        of_mesh[key] = replace(_compute_layout(tensor, mesh, coordinate, rank), mesh=str(mesh.mesh.tolist()))
    return of_mesh[key]


def _compute_layout(tensor: DTensor, mesh: DeviceMesh, coordinate: Sequence[int] | None, rank: int) -> _LocalLayout:
    shape, mesh_shape = tuple(tensor.shape), tuple(mesh.mesh.shape)
    splits: list[DimSplit | None] = []
    is_split = False
    for placement in tensor.placements:
        if placement.is_partial():
            return _LocalLayout(problem=f"placement {placement} holds an unfinished sum; redistribute it first")
        split = None
        if hasattr(placement, "dim"):
            # Counted from the last one, it would be another placement than that of a rank that counts from the first.
            dim = placement.dim
            if dim < 0:
                dim += len(shape)
            split = DimSplit(dim, getattr(placement, "split_factor", 1))
            is_split |= split.split_factor > 1
        splits.append(split)
    if coordinate is None:  # this rank is not in the tensor's mesh
        return _LocalLayout(placement=_placement_of(mesh, shape, splits, (), rank))
    for axis, split in enumerate(splits):
        if split is not None and bool((mesh.mesh.diff(dim=axis) <= 0).any()):
            problem = "its mesh lists ranks out of order: torch's functions then disagree about which rank holds what"
            return _LocalLayout(problem=problem)
    begins = None
    if is_split:
        # Several runs of rows. torch's one chunk does not show them: it begins with the first and has the size of all.
        runs = dict(local_boxes(shape, mesh_shape, coordinate, splits))
        boxes, begins = tuple(runs), tuple(runs.values())
    else:
        chunks: Leaf = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
        boxes = tuple(map(_box, chunks))
    return _LocalLayout(boxes, begins, _placement_of(mesh, shape, splits, boxes, rank))


def _placement_of(
    mesh: DeviceMesh, shape: tuple[int, ...], splits: list[DimSplit | None], boxes: tuple[Box, ...], rank: int
) -> Placement | None:
    """Return a DTensor's placement if its mesh has ranks 0, 1, ... and `boxes` are those that it implies for `rank`."""
    ranks, mesh_shape = mesh.mesh, tuple(mesh.mesh.shape)
    if ranks.flatten().tolist() != list(range(ranks.numel())) or rank >= ranks.numel() or len(boxes) > 1:
        return None
    try:
        implied = local_boxes(shape, mesh_shape, coordinate_of(rank, mesh_shape), splits)
    except ValueError:
        return None
    # torch has an empty chunk where the rules have no box.
    if [box for box, _ in implied] != [box for box in boxes if box.numel]:
        return None
    return Placement(mesh_shape, tuple(splits))
