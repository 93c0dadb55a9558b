"""What this rank holds of a tensor that tells its own chunks: a DTensor's by mesh and placements, others by asking."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from operator import add
from typing import Any

from statexchange.errors import UnsupportedError
from statexchange.sharding.placements import DimSplit, local_boxes
from statexchange.sharding.sharding_spec import Placement, coordinate_of
from statexchange.sharding.shards import Box
from statexchange.tensors import settled

__all__ = ["chunks_of"]


def chunks_of(name: str, tensor: Any, rank: int) -> tuple[list[tuple[Box, Any]], Placement | None]:
    """The boxes that this rank holds, each with the tensor that has it, and the record of a DTensor. Not collective.

    `tensor` speaks torch's `__create_chunk_list__`. The record is there if the tensor lies over a mesh of ranks 0, 1,
    ..., of which `rank` holds just what follows from it. UnsupportedError, naming the tensor, for unfinished sums and
    for meshes out of order.
    """
    if getattr(tensor, "device_mesh", None) is None:
        from torch.distributed.checkpoint.metadata import MetadataIndex

        chunks = list(tensor.__create_chunk_list__())
        found = [
            tensor.__get_tensor_shard__(MetadataIndex(name, chunk.offsets, index)) for index, chunk in enumerate(chunks)
        ]
        return list(zip(map(_box, chunks), found, strict=True)), None
    lies = _where(tensor, rank)
    if lies.problem is not None:
        raise UnsupportedError(lies.problem, name=name)
    if not lies.boxes:
        return [], lies.placement
    local = settled(tensor.to_local())
    if lies.begins is None:
        return [(box, local) for box in lies.boxes], lies.placement
    found = []
    for box, begin in zip(lies.boxes, lies.begins, strict=True):
        found.append((box, local[tuple(map(slice, begin, map(add, begin, box.shape)))]))
    return found, lies.placement


def _box(chunk: Any) -> Box:
    return Box(tuple(int(o) for o in chunk.offsets), tuple(int(s) for s in chunk.sizes))


@dataclass(frozen=True, slots=True)
class _Lies:
    """Where a DTensor's local part lies: its boxes and, if it has several runs, where each begins in the local part."""

    boxes: tuple[Box, ...] = ()
    begins: tuple[tuple[int, ...], ...] | None = None
    placement: Placement | None = None
    problem: str | None = None


# Of a model's many tensors few have a shape and placements of their own, and torch takes long to say where they lie.
_known: weakref.WeakKeyDictionary[Any, dict[Any, _Lies]] = weakref.WeakKeyDictionary()


def _where(tensor: Any, rank: int) -> _Lies:
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    key = (tensor.placements, tuple(tensor.shape), rank, None if coordinate is None else tuple(coordinate))
    of_mesh = _known.setdefault(mesh, {})
    if key not in of_mesh:
        of_mesh[key] = _find(tensor, mesh, coordinate, rank)
    return of_mesh[key]


def _find(tensor: Any, mesh: Any, coordinate: Any, rank: int) -> _Lies:
    for placement in tensor.placements:
        if placement.is_partial():
            return _Lies(problem=f"placement {placement} holds an unfinished sum; redistribute it first")
    ranks = mesh.mesh
    shape, mesh_shape = tuple(tensor.shape), tuple(ranks.shape)
    cuts = [DimSplit(p.dim, getattr(p, "split_factor", 1)) if hasattr(p, "dim") else None for p in tensor.placements]
    if coordinate is None:  # this rank is not in the tensor's mesh
        return _Lies(placement=_record(ranks, shape, cuts, (), rank))
    for axis, cut in enumerate(cuts):
        if cut is not None and bool((ranks.diff(dim=axis) <= 0).any()):
            return _Lies(
                problem="its mesh lists ranks out of order, and torch itself is of two minds about who then holds what"
            )
    if any(cut is not None and cut.split_factor > 1 for cut in cuts):
        # Of several runs torch's chunk tells where the first begins, and the size of all.
        runs = local_boxes(shape, mesh_shape, coordinate, cuts)
        boxes = tuple(box for box, _ in runs)
        return _Lies(boxes, tuple(begin for _, begin in runs), _record(ranks, shape, cuts, boxes, rank))
    boxes = tuple(map(_box, tensor.__create_chunk_list__()))
    return _Lies(boxes, None, _record(ranks, shape, cuts, boxes, rank))


def _record(ranks: Any, shape: tuple[int, ...], cuts: list[DimSplit | None], boxes: tuple[Box, ...], rank: int) -> Any:
    """The record of a DTensor on a mesh of ranks 0, 1, ..., if `rank` holds just what follows from it."""
    mesh_shape = tuple(ranks.shape)
    if ranks.flatten().tolist() != list(range(ranks.numel())) or rank >= ranks.numel() or len(boxes) > 1:
        return None
    try:
        found = [box for box, _ in local_boxes(shape, mesh_shape, coordinate_of(rank, mesh_shape), cuts)]
    except ValueError:
        return None
    return Placement(mesh_shape, tuple(cuts)) if found == [box for box in boxes if box.numel] else None
