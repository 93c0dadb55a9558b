"""What a load changes: the tensors that it reads, and the calls that then install them and the plain values.

Making the plan changes nothing: an error leaves the live state as it was. The calls run after all reads, in order.

A saved tensor is read into the live one if it fits, else into a new one. Example: AdamW has made no state yet. The
moments of a parameter that is a DTensor become DTensors on its mesh, and the count of steps a plain tensor on the CPU,
as torch's `load_state_dict` leaves it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from statexchange.errors import InvalidArgumentError, ReplicaError, UnsupportedError, type_text
from statexchange.lazy import is_installed
from statexchange.sharding.paths import joined
from statexchange.state.dtensors import is_sharded, new_dtensor
from statexchange.state.entries import Conflicts, Entry, SavedTensor, refuse_opaque
from statexchange.state.flatten import is_leaf
from statexchange.state.matching import Matching
from statexchange.state.tree import check_change, children, with_children, with_types_of
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

__all__ = [
    "PLAIN",
    "LoadPlan",
    "LoadTarget",
    "Place",
    "name_of",
    "named",
    "other_kind_error",
    "tensor_to_fill",
]


class Place(NamedTuple):
    """A place of the live state for a saved tensor that may need a new one.

    Attributes:
        live: the live tensor or array there, or None.
        is_filled: whether that itself is filled if the saved tensor fits, or else always a new one like it.
        parameter: the parameter whose optimizer state it is, or None.
        parameter_name: the parameter's name in the state, or "".
        is_step: whether it counts the parameter's steps.
        on_host: whether a new tensor lies on the CPU, wherever the parameter is.
    """

    live: Leaf = None
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
    live, parameter = place.live, place.parameter
    shape = saved.shape
    if matching.layout.rules and matching.is_like_parameter(saved, place.parameter_name):
        shape = tuple(parameter.shape)  # a part, as the parameter is
    if not matching.knows_owners:
        _check_is_of_all_ranks(matching, saved, shape, parameter, path)
    is_live_torch = is_torch(live)
    if place.is_filled and (is_live_torch or is_array(live)) and tuple(live.shape) == shape:
        dtype = name_of_dtype(live.dtype) or ""
        has_dtype = dtype == saved.dtype or matching.names.options.casts(saved.dtype, dtype)
        # A fused or capturable optimizer wants its counts of steps beside the parameters, all others on the CPU.
        moves = place.is_step and not place.on_host and live.device != parameter.device
        if has_dtype and not moves:
            return live
    like = parameter
    if is_live_torch and not place.is_step:
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
    if saved.cut_dims or shape == () or not is_sharded(parameter):
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


# Values that are installed as they are.
PLAIN = (bool, int, float, str, type(None))


class LoadTarget(NamedTuple):
    """A live tensor that is to be filled.

    Attributes:
        name: the source's name of the tensor that it is filled with; None if a layout's rule names the parts.
        live: the live tensor.
        path: its path in the state, for messages and layouts.
        parameter_name: the parameter whose optimizer state it is, or "".
    """

    name: str | None
    live: Leaf
    path: str
    parameter_name: str = ""


@dataclass(slots=True)
class LoadPlan:
    """The steps that turn a live state into the saved one.

    Example:
        `fill` of the saved value ``{"exp_avg": SavedTensor("o.m"), "step": 3}``, beside a live dict without entries,
        returns ``{"exp_avg": <a new tensor>, "step": 3}``, and the new tensor is a target of the plan.

    Attributes:
        matching: the load.
        targets: the tensors to be read.
        callbacks: to be called, in order, once the tensors are read.
        missing: paths of the live state that the source lacks.
        stateful: those among them that are of tensors or of objects with a state.
        unexpected: paths of the source that the live state lacks.
        tolerated: those of `missing` and `unexpected` that are no error with ``strict``.
        loaded: the paths of all that is loaded, in the source by the names of the state.
        matched: the paths of all entries of the source that the live state has a place for, loaded or not.
        conflicts: parameters of optimizers for which ranks saved different hyperparameters, or other state, by path.
        num_values: the number of plain values that are loaded.
        parameters: those of `missing` that are parameters of optimizers.
        nameless: the paths of optimizers whose parameters have names in the source, and only numbers in the live state.
    """

    matching: Matching
    targets: list[LoadTarget] = field(default_factory=list)
    callbacks: list[Callable[[], object]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    stateful: set[str] = field(default_factory=set)
    unexpected: list[str] = field(default_factory=list)
    tolerated: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    matched: set[str] = field(default_factory=set)
    conflicts: Conflicts = field(default_factory=dict)
    num_values: int = 0
    parameters: set[str] = field(default_factory=set)
    nameless: set[str] = field(default_factory=set)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is loaded."""
        return not (self.targets or self.callbacks or self.num_values)

    def add_loaded(self, entries: Iterable[Entry]) -> None:
        """Add entries of the source that are loaded."""
        for entry in entries:
            self.matched.add(entry.text)
            self.loaded.add(entry.text)

    def add_missing(self, paths: Sequence[str], *, stateful: bool = True) -> None:
        """Add paths of the live state that the source lacks."""
        self.missing += paths
        if stateful:
            self.stateful.update(paths)

    def fill(self, saved: Leaf, path: str, place: Place = Place()) -> Leaf:  # noqa: B008 (immutable)
        """Return a saved value with tensors, in containers of the types of the live value, `place.live`."""
        if isinstance(saved, SavedTensor):
            live = tensor_to_fill(self.matching, saved, place, path)
            self.targets.append(LoadTarget(saved.name, live, path, place.parameter_name))
            return live
        if isinstance(saved, PLAIN):
            return saved
        # The tree of a save is JSON: an OrderedDict of the live state was saved as a mapping like any other.
        with named(path):
            return with_types_of(place.live, self._with_tensors(saved, path, place))

    def in_types_of(self, live: Leaf, new: Leaf, path: str) -> Leaf:
        """Return a new value in containers of the live one's types: those of JSON are plain dicts and lists."""
        with named(path):
            return with_types_of(live, new)

    def _with_tensors(self, saved: Leaf, path: str, place: Place) -> Leaf:
        if isinstance(saved, SavedTensor):
            return self.fill(saved, path, place)
        items = children(saved)
        if items is None:
            refuse_opaque(saved, path)
            return saved
        # An object that is a leaf may have items, too, but they are not places of the state.
        live_items = {} if is_leaf(place.live) else children(place.live) or {}
        new = {}
        for key, item in items.items():
            # A key may be of a type that only the job that saved it had.
            if type(key) is not str:
                refuse_opaque(key, path)
            if isinstance(item, PLAIN):
                new[key] = item
            else:
                new[key] = self._with_tensors(item, joined(path, key), place._replace(live=live_items.get(key)))
        if isinstance(saved, list):
            return list(new.values())
        return new if type(saved) is dict else with_children(saved, new)

    def change(self, container: Leaf, change: Callable[[Leaf], object], path: str) -> None:
        """Plan the change of a mutable container; raise UnsupportedError if a copy of it refuses the change."""
        # A class of the user's may refuse, or check, what is put into it. Tried on a copy this is an error of the
        # plan; later it would be one of a state that is half loaded.
        with named(path):
            check_change(container, change)
        self.callbacks.append(functools.partial(change, container))


def name_of(stored: Sequence[Entry]) -> str | None:
    """Return the source's name of the one tensor that fills a live one; None if a layout splits that."""
    return stored[0].leaf.name if len(stored) == 1 else None


@contextlib.contextmanager
def named(path: str) -> Iterator[None]:
    """Let an error about a container name its path, and say what to do."""
    try:
        yield
    except UnsupportedError as error:
        # An inner container has been named already.
        if error.name is not None:
            raise
        text = f"{error.message}: give a dict, list or tuple, or leave it out by exclude"
        raise UnsupportedError(text, name=path) from error.__cause__


def other_kind_error(wanted: str, saved: Leaf, path: str) -> InvalidArgumentError:
    """Return the error for a source that has something else at `path` than what the live state needs."""
    kind = type_text(saved)
    if isinstance(saved, SavedTensor):
        kind = "a tensor"
    elif isinstance(saved, list | tuple):
        kind = format_number(len(saved), "item")
    text = "this was saved as something else: build it as it was saved, or leave it out by exclude"
    return InvalidArgumentError(text, name=path, expected=wanted, found=kind)
