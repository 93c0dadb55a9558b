"""The tensors that a load fills where the live state has none that fits: their device, dtype and sharding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from statexchange.errors import ReplicaError
from statexchange.exchange.load_items import like_parameter
from statexchange.exchange.stored_tensors import StoredTensors
from statexchange.lazy import is_installed
from statexchange.sharding.options import LoadOptions
from statexchange.sharding.rules import Layout, with_dots
from statexchange.state.dtensors import is_sharded, new_dtensor
from statexchange.state.entries import Entries
from statexchange.state.load_plan import Place
from statexchange.state.saved_values import SavedTensor
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

__all__ = ["Filled", "tensor_to_fill"]


@dataclass(frozen=True, slots=True)
class Filled:
    """What decides about a tensor to fill: the source's tensors and entries, and the options of the load."""

    tensors: StoredTensors
    entries: Entries
    options: LoadOptions
    layout: Layout


def tensor_to_fill(catalog: Filled, name: str, place: Place, path: str) -> Any:
    """Return the tensor of this place that the saved one `name` is read into. Not collective.

    It is the live one if the saved one fits into it. A new one is like the live one, or else like the parameter whose
    state it is: it lies on the same device, and is a DTensor on the same mesh. As in torch's `load_state_dict`, a count
    of steps lies on the CPU, or on the parameter's device if the optimizer is fused or capturable. Where torch is not
    installed, the new tensor is an array of numpy.
    """
    shard, own = catalog.tensors.shard_of(name), place.own
    stored = shard.dtype
    shape: Sequence[int] = shard.global_shape
    if like_parameter(name, place.parameter_name, catalog.entries, catalog.tensors, catalog.layout):
        shape = tuple(place.parameter.shape)  # a shard, as the parameter is
    _check_is_of_all_ranks(catalog, name, shape, place.parameter, path)
    if place.is_filled and _fits(catalog, stored, shape, own):
        moves = place.is_step and not place.on_host and own.device != place.parameter.device
        if not moves:
            return own
    like = own if is_torch(own) and not place.is_step else place.parameter
    if is_array(own) or (like is None and not is_installed("torch")):
        return np.empty(shape, numpy_dtype(stored))
    return _new(catalog, name, stored, shape, place, like)


def _check_is_of_all_ranks(catalog: Filled, name: str, shape: Sequence[int], parameter: Any, path: str) -> None:
    """Raise ReplicaError for a whole tensor beside a sharded parameter that is neither a scalar nor of its shape.

    It may be a value for each row of the parameter, of which this rank has only some. A save of several ranks records
    what belongs to a rank; one of a single rank, or of torch, does not show that the parameter would be sharded.
    """
    source = catalog.tensors.source
    is_recorded = catalog.tensors.own_rank is not None or source.world_size not in (None, 1)
    if is_recorded or not is_sharded(parameter) or _cut_dims(catalog, name):
        return
    if tuple(shape) not in ((), tuple(parameter.shape)):
        saved = format_number(source.world_size or 1, "rank")
        raise ReplicaError(
            f"state of a sharded parameter has neither its shape nor is it a scalar: {saved} saved it, and "
            f"{catalog.tensors.world_size} load it, each with a part of the parameter; exclude={path!r} leaves it",
            name=path,
            path=source.path,
            expected=tuple(parameter.shape),
            found=tuple(shape),
        )


def _fits(catalog: Filled, stored: str, shape: Sequence[int], own: Any) -> bool:
    """Whether a saved tensor can be read into the live one."""
    if not (is_torch(own) or is_array(own)) or tuple(own.shape) != shape:
        return False
    found = name_of_dtype(own.dtype) or ""
    return found == stored or catalog.options.casts(stored, found)


def _new(catalog: Filled, name: str, stored: str, shape: Sequence[int], place: Place, like: Any) -> Any:
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
    is_plain = not cut and like is place.parameter and bool(_cut_dims_of_parameter(catalog, place.parameter_name))
    if has_shape and not is_plain:
        return torch.zeros_like(like, dtype=dtype, requires_grad=False)
    return new_dtensor(like, shape, dtype, cut) if cut else torch.empty(shape, dtype=dtype, device=like.device)


def _cut_dims(catalog: Filled, name: str) -> set[int]:
    """Return the dims in which saved parts of a tensor are smaller than the whole; none if the source lacks it."""
    if name not in catalog.tensors:
        return set()
    shape = catalog.tensors.shape_of(name)
    boxes = [box for box in catalog.tensors.boxes_of(name) if box.numel]
    return {dim for box in boxes for dim in range(len(shape)) if box.shape[dim] != shape[dim]}


def _cut_dims_of_parameter(catalog: Filled, path: str) -> set[int]:
    parameter = catalog.entries.at(with_dots(path)) if path else None
    if parameter is None or not isinstance(parameter.leaf, SavedTensor):
        return set()
    return _cut_dims(catalog, parameter.leaf.name)
