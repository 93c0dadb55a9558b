"""The tensors that a load fills where the live state has none that fits: their device, dtype and sharding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from statexchange.errors import ReplicaError
from statexchange.exchange.catalog import Catalog
from statexchange.lazy import is_installed
from statexchange.state.dtensors import is_sharded, new_dtensor
from statexchange.state.load_plan import Place
from statexchange.tensors import (
    dtype_name,
    is_array,
    is_dtensor,
    is_torch,
    name_of_dtype,
    numpy_dtype,
    torch_dtype,
)
from statexchange.units import format_number

__all__ = ["tensor_to_fill"]


def tensor_to_fill(catalog: Catalog, name: str, place: Place) -> Any:
    """Return the tensor of this place that the saved one `name` is read into. Not collective.

    It is the live one if the saved one fits into it. A new one is like the live one, or else like the parameter whose
    state it is: it lies on the same device, and is a DTensor on the same mesh. As in torch's `load_state_dict`, a count
    of steps lies on the CPU, or on the parameter's device if the optimizer is fused or capturable. Where torch is not
    installed, the new tensor is an array of numpy.
    """
    shard, own = catalog.shard_of(name), place.own
    stored = shard.dtype
    shape: Sequence[int] = shard.global_shape
    if catalog.options.layout is not None and catalog.shape_like(name, [place.parameter_name]) is not None:
        shape = tuple(place.parameter.shape)  # a shard, as the parameter is
    _check_is_of_all_ranks(catalog, name, shape, place.parameter)
    if place.is_filled and _fits(catalog, stored, shape, own):
        moves = place.is_step and not place.on_host and own.device != place.parameter.device
        if not moves:
            return own
    like = own if is_torch(own) and not place.is_step else place.parameter
    if is_array(own) or (like is None and not is_installed("torch")):
        return np.empty(shape, numpy_dtype(stored))
    return _new(catalog, name, stored, shape, place, like)


def _check_is_of_all_ranks(catalog: Catalog, name: str, shape: Sequence[int], parameter: Any) -> None:
    """Raise ReplicaError for a whole tensor beside a sharded parameter that is neither a scalar nor of its shape.

    It may be a value for each row of the parameter, of which this rank has only some. A save of several ranks records
    what belongs to a rank; one of a single rank, or of torch, does not show that the parameter would be sharded.
    """
    is_recorded = catalog.own_rank is not None or catalog.source.world_size not in (None, 1)
    if is_recorded or not is_sharded(parameter) or _cut_dims(catalog, name):
        return
    if tuple(shape) not in ((), tuple(parameter.shape)):
        saved = format_number(catalog.source.world_size or 1, "rank")
        raise ReplicaError(
            f"state of a sharded parameter has neither its shape nor is it a scalar: {saved} saved it, and "
            f"{catalog.world_size} load it, each with a part of the parameter; exclude={name!r} leaves it as it is",
            name=name,
            path=catalog.source.path,
            expected=tuple(parameter.shape),
            found=tuple(shape),
        )


def _fits(catalog: Catalog, stored: str, shape: Sequence[int], own: Any) -> bool:
    """Whether a saved tensor can be read into the live one."""
    if not (is_torch(own) or is_array(own)) or tuple(own.shape) != shape:
        return False
    found = name_of_dtype(own.dtype) or ""
    return found == stored or catalog.options.casts(stored, found)


def _new(catalog: Catalog, name: str, stored: str, shape: Sequence[int], place: Place, like: Any) -> Any:
    """Return a new tensor of `shape`, like the live tensor or parameter `like` if that is not None."""
    import torch

    dtype = torch_dtype(stored)
    if like is None or place.on_host or like.layout is not torch.strided or like.is_quantized:
        return torch.empty(shape, dtype=dtype)
    has_shape = tuple(like.shape) == shape
    if has_shape and not place.is_step and catalog.options.casts(stored, dtype_name(like, name)):
        dtype = like.dtype
    if not is_dtensor(like):
        if has_shape:
            return torch.zeros_like(like, dtype=dtype, requires_grad=False)
        return torch.empty(shape, dtype=dtype, device=like.device)
    cut = _cut_dims(catalog, name)
    # Each rank had the whole tensor, and a part of the parameter: it was a plain one.
    is_plain = not cut and like is place.parameter and bool(_cut_dims(catalog, place.parameter_name))
    if has_shape and not is_plain:
        return torch.zeros_like(like, dtype=dtype, requires_grad=False)
    return new_dtensor(like, shape, dtype, cut) if cut else torch.empty(shape, dtype=dtype, device=like.device)


def _cut_dims(catalog: Catalog, name: str) -> set[int]:
    """Return the dims in which saved parts of a tensor are smaller than the whole; none if the source lacks it."""
    if name not in catalog:
        return set()
    shape = catalog.shard_of(name).global_shape
    boxes = [box for box in catalog.boxes_of(name) if box.numel]
    return {dim for box in boxes for dim in range(len(shape)) if box.shape[dim] != shape[dim]}
