"""Choose the tensor that a saved one is read into: the live one if it fits, else a new one like it.

Example: AdamW has made no state yet. The moments of a parameter that is a DTensor become DTensors on its mesh, and the
count of steps a plain tensor on the CPU, as torch's `load_state_dict` leaves it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from statexchange.errors import ReplicaError
from statexchange.lazy import is_installed
from statexchange.state.dtensors import is_sharded, new_dtensor
from statexchange.state.entries import SavedTensor
from statexchange.state.matching import Matching
from statexchange.state.types import Leaf
from statexchange.tensors import (
    is_array,
    is_dtensor,
    is_torch,
    memory_of,
    name_of_dtype,
    numpy_dtype,
    torch_dtype,
)
from statexchange.units import format_number

__all__ = ["Place", "tensor_to_fill"]


class Place(NamedTuple):
    """A place of the live state for a saved tensor that may need a new one.

    Attributes:
        own: the live tensor or array there, or None.
        is_filled: whether `own` itself is filled if the saved tensor fits, or else always a new one like it.
        parameter: the parameter whose optimizer state it is, or None.
        parameter_name: the parameter's name in the state, or "".
        is_step: whether it counts the parameter's steps.
        on_host: whether a new tensor lies on the CPU, wherever the parameter is.
    """

    own: Leaf = None
    is_filled: bool = True
    parameter: Leaf = None
    parameter_name: str = ""
    is_step: bool = False
    on_host: bool = False


def tensor_to_fill(matching: Matching, saved: SavedTensor, place: Place, path: str) -> Leaf:
    """Return the tensor of a place that a saved one is read into.

    It is the live one if the saved one fits into it. A new one is like the live one, or else like the parameter whose
    state it is: it lies on the same device, and is a DTensor on the same mesh. Where torch is not installed, it is an
    array of numpy.

    Args:
        matching: the load.
        saved: the saved tensor.
        place: the place.
        path: the path of the place, for errors.

    Raises:
        ReplicaError: it may be a value for each row of a parameter, of which this rank has only some.
        CorruptError: files of the source disagree on the tensor.
    """
    if saved.problem is not None:
        raise saved.problem
    live, parameter = place.own, place.parameter
    shape = saved.shape
    if matching.is_like_parameter(saved, place.parameter_name):
        shape = tuple(parameter.shape)  # a part, as the parameter is
    _check_is_of_all_ranks(matching, saved, shape, parameter, path)
    # A fused or capturable optimizer wants its counts of steps beside the parameters, all others on the CPU.
    moves = place.is_step and not place.on_host
    if place.is_filled and _fits(matching, saved, shape, live) and not (moves and live.device != parameter.device):
        return live
    like = parameter
    if is_torch(live) and not place.is_step:
        like = live
    if is_array(live) or (like is None and not is_installed("torch")):
        return np.empty(shape, numpy_dtype(saved.dtype))
    return _new_tensor(matching, saved, shape, place, like)


def _check_is_of_all_ranks(
    matching: Matching, saved: SavedTensor, shape: tuple[int, ...], parameter: Leaf, path: str
) -> None:
    """Raise ReplicaError for a whole tensor beside a sharded parameter that is neither a scalar nor of its shape.

    It may be a value for each row of the parameter, of which this rank has only some. A save of several ranks records
    what belongs to a rank; one of a single rank, or of torch, does not show that the parameter would be sharded.
    """
    is_recorded = matching.saved_by == matching.loaded_by or matching.saved_by not in (None, 1)
    if is_recorded or saved.cut_dims or shape == () or not is_sharded(parameter):
        return
    expected = tuple(parameter.shape)
    if shape != expected:
        ranks = format_number(matching.saved_by or 1, "rank")
        raise ReplicaError(
            f"state of a sharded parameter has neither its shape nor is it a scalar: {ranks} saved it, and "
            f"{matching.loaded_by} load it, each with a part of the parameter; exclude={path!r} leaves it",
            name=path,
            path=matching.path,
            expected=expected,
            found=shape,
        )


def _fits(matching: Matching, saved: SavedTensor, shape: tuple[int, ...], live: Leaf) -> bool:
    """Whether a saved tensor can be read into the live one."""
    if not (is_torch(live) or is_array(live)) or tuple(live.shape) != shape:
        return False
    dtype = name_of_dtype(live.dtype) or ""
    return dtype == saved.dtype or matching.names.options.casts(saved.dtype, dtype)


def _new_tensor(matching: Matching, saved: SavedTensor, shape: tuple[int, ...], place: Place, like: Leaf) -> Leaf:
    """Return a new tensor of `shape`, like the live tensor or parameter `like` if that is not None."""
    import torch

    dtype = torch_dtype(saved.dtype)
    # A quantized or sparse tensor has no form that another dtype or shape could have.
    if like is None or place.on_host or like.layout is not torch.strided or like.is_quantized:
        return torch.empty(shape, dtype=dtype)
    has_shape = tuple(like.shape) == shape
    if has_shape and not place.is_step and matching.names.options.casts(saved.dtype, memory_of(like, saved.name).dtype):
        dtype = like.dtype
    if has_shape and not (is_dtensor(like) and _was_whole(matching, saved, place, like)):
        return torch.zeros_like(like, dtype=dtype, requires_grad=False)
    if is_dtensor(like) and saved.cut_dims:
        return new_dtensor(like, shape, dtype, set(saved.cut_dims))
    return torch.empty(shape, dtype=dtype, device=like.device)


def _was_whole(matching: Matching, saved: SavedTensor, place: Place, like: Leaf) -> bool:
    """Whether each rank that saved had the whole of this tensor, and a part of its parameter: then it was a plain one.

    A tensor of the parameter's shape is else taken for one that lies as the parameter does.
    """
    if saved.cut_dims or like is not place.parameter:
        return False
    parameter = matching.parameter(place.parameter_name)
    return parameter is not None and bool(parameter.cut_dims)
