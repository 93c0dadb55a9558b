"""Make state equal on all ranks: copy root's values into any tree; broadcast or average a module's parameters.

The protocol of a call:

1. Every rank describes what it holds (`_Held`): paths, kinds, shapes and dtypes. All ranks compare that, and raise one
   MismatchError if two differ. Nothing has changed.
2. Root sends its plain values and the states of its objects, as JSON (`_Part`).
3. Each rank reads root's parts (`_read`), and prepares the tensors that are to be filled, existing or new ones,
   and callbacks that install states and values. An error here is raised on all ranks, and still nothing has changed.
4. Root sends the tensors as bytes: many small ones together, large ones in windows.
5. The callbacks run.

Tensors that share memory are filled one after the other, which is right if root's share it alike. So how they share it
is a part of the description. The state of an object gets new tensors in the place of those that share memory.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Generator, Mapping, MappingView, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import nn

from statexchange import values
from statexchange.comm.communicator import CommLike, Communicator, from_root
from statexchange.comm.defaults import as_communicator, public_call
from statexchange.errors import InvalidArgumentError, MismatchError, UnsupportedError, excerpt, type_text
from statexchange.sharding.paths import joined
from statexchange.state.tree import (
    PLAIN_TYPES,
    ParameterName,
    check_no_state_in,
    nodes,
    parameter_names,
    replaced,
    with_types_of,
)
from statexchange.state.types import Leaf, Optimizer
from statexchange.state.units import (
    bare_name,
    check_optimizer,
    install_optimizer,
    is_extra_state,
    is_optimizer,
    is_stateful,
    live_items,
    load_object,
    names_of_groups,
    parameters_of,
    state_of_optimizer,
)
from statexchange.tensors import (
    DTYPE_NAMES,
    ITEMSIZE,
    TensorLike,
    check_dense,
    check_writable,
    is_dtensor,
    is_tensor,
    numpy_dtype,
    overlap_groups,
    replicated_part,
    same_memory,
)
from statexchange.train.comparison import Entry, compare
from statexchange.train.windows import broadcast_tensors, windows

T = TypeVar("T")
Describe = Callable[["_Held"], None]


@public_call("synchronize")
def synchronize(tree: T, *, root: int = 0, comm: CommLike | None = None) -> T:
    """Give every rank root's values: in place where that is possible, else in the tree that is returned.

    Collective. Blocks until all ranks have called. The name and the idea are those of Lux.jl's `synchronize!!`. Memory
    beyond the tree: at most 64 MiB at a time.

    Args:
        tree: any nesting of mappings (keys in any order), lists, tuples, namedtuples and dataclasses that holds

            * torch tensors (also non-contiguous or requiring grad) and numpy arrays: the same objects are filled with
              root's data;
            * numbers, strings, enums, torch dtypes and None: they are replaced by root's of the same type; None may
              stand for any, and one number for another;
            * modules: parameters and all buffers, persistent or not, by name; tied tensors are sent once; names in
              torch's `_ddp_params_and_buffers_to_ignore` stay each rank's own;
            * optimizers: hyperparameters and state become root's; state that a rank lacks is made and state that root
              lacks is dropped, so that a resumed root can fill new ranks. The parameters themselves stay the module's;
            * objects with `state_dict` and `load_state_dict`, such as LR schedulers: likewise.

            Any other object stays each rank's own. So do devices, paths, bytes and functions.
        root: the rank whose values all ranks take.
        comm: a Communicator, ProcessGroup, DeviceMesh or MPI communicator; by default the current one.

    Returns:
        The tree: the same object unless it is a plain value or an immutable container that changed.

    Raises:
        MismatchError: trees differ in paths, kinds, shapes or dtypes, or ranks passed different roots. It shows both
            sides at the first path that differs; nothing has changed. Tensors that share memory must share it alike.
        UnsupportedError: something cannot be synchronised, such as a sharded DTensor (replicated ones are filled), a
            sparse, quantised or meta tensor, or an array of objects; it names the path.
        InvalidArgumentError: a lazy parameter, a generator or a cycle; it names the path.

    Example:
        >>> import torch
        >>> import statexchange as sx
        >>> state = {"weight": torch.ones(2), "epoch": 3}
        >>> sx.synchronize(state) is state  # all ranks have root's weight and epoch now
        True
    """
    communicator = as_communicator(comm)
    with communicator.phase("filling the tree"):
        filled: T = _fill(communicator, root, lambda held: held.add_tree(tree), tree)
    return filled


@public_call("broadcast_parameters")
def broadcast_parameters(
    module: nn.Module, *, broadcast_buffers: bool = True, root: int = 0, comm: CommLike | None = None
) -> None:
    """Give every rank root's parameters and buffers of `module`, in place.

    Collective. Blocks until all ranks have called. The same as `synchronize`, for one module; names in torch's
    `_ddp_params_and_buffers_to_ignore` are left out. The name is Bagua's.

    Args:
        module: the module.
        broadcast_buffers: whether buffers become root's, too.
        root: the rank whose tensors all ranks take.
        comm: a Communicator, ProcessGroup, DeviceMesh or MPI communicator; by default the current one.

    Raises:
        MismatchError: modules differ between ranks, or how their tensors share memory; nothing has changed.
        InvalidArgumentError: `module` is no module.

    Example:
        >>> import torch
        >>> import statexchange as sx
        >>> sx.train.broadcast_parameters(torch.nn.Linear(2, 1))
    """
    communicator = as_communicator(comm)
    with communicator.phase("filling the parameters"):
        _fill(communicator, root, lambda held: held.add_module("", module, buffers=broadcast_buffers), module)


@public_call("allreduce_parameters")
def allreduce_parameters(module: nn.Module, *, comm: CommLike | None = None) -> None:
    """Replace every parameter and buffer of `module` by its mean over all ranks, in place.

    Collective. Blocks until all ranks have called. Integers and bools become rank 0's. Tied tensors count once; names
    in torch's `_ddp_params_and_buffers_to_ignore` are left out. The name is Bagua's.

    Args:
        module: the module.
        comm: a Communicator, ProcessGroup, DeviceMesh or MPI communicator; by default the current one.

    Raises:
        MismatchError: modules differ between ranks, or how their tensors share memory; nothing has changed.
        UnsupportedError: a tensor is float8, shares memory with one of integers, or cannot be synchronised.
        InvalidArgumentError: `module` is no module.

    Example:
        >>> import torch
        >>> import statexchange as sx
        >>> sx.train.allreduce_parameters(torch.nn.Linear(2, 1))
    """
    communicator = as_communicator(comm)

    def describe(held: _Held) -> None:
        held.add_module("", module)
        for name, tensor in held.tensors.items():
            if _is_averaged(tensor) and tensor.itemsize == 1:
                raise UnsupportedError(f"{tensor.dtype} cannot be averaged", name=name)
        _check_integer_views(held.tensors)

    with communicator.phase("averaging the parameters"):
        # The mean is written on all ranks.
        held, _, _ = _compare(communicator, 0, describe, is_written=True)
        tensors = list(held.tensors.values())
        broadcast_tensors(communicator, list(itertools.filterfalse(_is_averaged, tensors)), 0)
        for window in windows(list(filter(_is_averaged, tensors))):
            communicator.all_reduce_multiple(window, "avg")


def _is_averaged(tensor: TensorLike) -> bool:
    """Whether `allreduce_parameters` gives a tensor the mean; others become rank 0's."""
    return isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.is_complex())


def _check_integer_views(tensors: dict[str, TensorLike]) -> None:
    """Raise UnsupportedError if a tensor to average shares memory with one that becomes rank 0's."""
    names = [*tensors]
    for group in overlap_groups(tensors.values()):
        averaged = [names[number] for number in group if _is_averaged(tensors[names[number]])]
        views = {names[number] for number in group}.difference(averaged)
        if averaged and views:
            text = f"this tensor cannot be averaged: it shares memory with {min(views)}, which would become rank 0's"
            raise UnsupportedError(f"{text}; clone() one of the two", name=averaged[0])


# Step 1: what this rank holds


class _Held:
    """What a rank holds, by the way in which it is sent.

    Attributes:
        entries: everything, in an order that all ranks share. Ranks that hold the same have equal ones.
        tensors: the dense tensors by path; tied ones once.
        values: the plain values by path.
        objects: the optimizers and other objects with a state, by path.
    """

    def __init__(self, *, written: bool) -> None:
        """Make an empty record. `written`: this rank's tensors will be filled, so they must be writable."""
        self.entries: list[Entry] = []
        self.tensors: dict[str, TensorLike] = {}
        self.values: dict[str, Leaf] = {}
        self.objects: dict[str, Leaf] = {}
        self._written = written
        self._first_paths: dict[Leaf, str] = {}  # of tensors by their memory

    def add_tree(self, tree: Leaf) -> None:
        """Add everything in `tree`."""
        placed = nodes(tree)
        names: dict[int, ParameterName] | None = None
        for path, _, value, kind, container in placed:
            if container:
                self.entries.append(Entry(path, container))
            elif isinstance(value, torch.Tensor | np.ndarray):
                self._add_tensor(path, value)
            elif isinstance(value, nn.Module):
                self.add_module(path, value)
            elif kind == "optimizer":
                if names is None:
                    names = parameter_names(placed)
                self._add_optimizer(path, value, names)
            # A class may look like torch's modules and be none.
            elif kind in ("object", "module") and is_stateful(value):
                self.entries.append(Entry(path, f"the state of {type_text(value)}"))
                self.objects[path] = value
            else:
                self._add_value(path, value)

    def _add_value(self, path: str, value: Leaf) -> None:
        if _is_value(value):
            self.entries.append(Entry(path, "a value"))
            self.values[path] = value
            return
        if isinstance(value, Generator | MappingView):
            raise InvalidArgumentError(f"{type_text(value)} cannot be filled in place: give a list", name=path)
        # A number that has no JSON text, as a longdouble, would stay each rank's own without a word.
        others = (np.flexible, np.object_, np.datetime64, np.timedelta64)
        if isinstance(value, np.generic) and not isinstance(value, others):
            raise UnsupportedError(f"a number of dtype {value.dtype} cannot be sent: give float() of it", name=path)
        check_no_state_in(value, path)
        self.entries.append(Entry(path, "an object"))

    def add_module(self, path: str, module: Leaf, *, buffers: bool = True) -> None:
        """Add the parameters of a module and, if asked, its buffers; raise InvalidArgumentError if it is none."""
        if not isinstance(module, nn.Module):
            raise InvalidArgumentError(f"expected a module, not {type(module).__name__}")
        self.entries.append(Entry(path, "a module"))
        named: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
        if buffers:
            named.update(module.named_buffers(remove_duplicate=False))
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        for name, value in live_items(module)[1].items():
            if not is_extra_state(name) and (is_tensor(value) or not values.has_text(value)):
                raise UnsupportedError(
                    f"the module's state dict has {type_text(value)} here that is no parameter or buffer, as those "
                    "of quantized modules: it cannot be changed in place",
                    name=joined(path, name),
                )
        for name in sorted(named.keys() - ignored):
            self._add_tensor(joined(path, name), named[name])

    def _add_tensor(self, path: str, value: TensorLike) -> None:
        tensor = _dense(value, path, written=self._written)
        key = same_memory(tensor)
        if key is not None:
            first = self._first_paths.setdefault(key, path)
            if first != path:
                self.entries.append(Entry(path, f"the same as {first}"))
                return
        self.entries.append(Entry(path, _tensor_text(tensor)))
        self.tensors[path] = tensor

    def _add_optimizer(self, path: str, optimizer: Optimizer, names: Mapping[int, ParameterName]) -> None:
        check_optimizer(optimizer, path)
        labels = iter(names_of_groups(optimizer) or ())
        groups = optimizer.param_groups
        self.entries.append(Entry(path, f"an optimizer {type(optimizer).__name__}"))
        self.entries.append(Entry(f"{path}.param_groups", f"list of {len(groups)}"))
        for number, group in enumerate(groups):
            params_path = f"{path}.param_groups[{number}].params"
            for index, parameter in enumerate(group["params"]):
                if is_dtensor(parameter):
                    raise UnsupportedError("the state of a DTensor lies on many ranks", name=f"{params_path}[{index}]")
                # Its state is installed by number: in another order it would be another parameter's.
                name = str(next(labels, ""))
                if id(parameter) in names:
                    name = names[id(parameter)].in_state
                elif name:
                    name = bare_name(name)
                text = f"parameter {name} {_tensor_text(parameter)}"
                if not name:
                    text = f"parameter {_tensor_text(parameter)}"
                self.entries.append(Entry(f"{params_path}[{index}]", text))
        self.objects[path] = optimizer

    def note_shared_memory(self) -> None:
        """Add to the entries of tensors that share memory how they share it."""
        names, views = [*self.tensors], {}
        for group in overlap_groups(self.tensors.values()):
            # None is without memory. The address and the device's index are left out, as ranks may differ in them.
            keys = [same_memory(self.tensors[names[number]]) or () for number in group]
            for number, (address, _, *view) in zip(group, keys, strict=True):
                where = f"{names[group[0]]} from byte {address - keys[0][0]} on, as {view}"
                views[names[number]] = f" that shares memory with {where}: clone() it"
        for number, entry in enumerate(self.entries):
            if entry.path in views:
                self.entries[number] = entry._replace(text=entry.text + views[entry.path])


def _is_value(value: Leaf) -> bool:
    """Whether this is a plain value, which becomes root's."""
    if isinstance(value, enum.Enum):
        return values.has_text(value)
    # Not of derived classes, which a rank might not have.
    return value is None or values.is_number(value) or type(value) in (str, torch.dtype)


def _dense(value: TensorLike, path: str, *, written: bool) -> TensorLike:
    """Return the dense memory of a tensor or array, detached; of a replicated DTensor this rank's copy.

    Raises:
        UnsupportedError: it has no dense memory; the error names `path`.
        InvalidArgumentError: it is to be `written` and cannot be; the error names `path`.
    """
    if isinstance(value, torch.Tensor) and is_dtensor(value):
        advice = "use save_checkpoint and load_checkpoint for it, or give to_local(), this rank's part"
        value = replicated_part(value.detach(), path, advice)
    check_dense(value, path)
    if written:
        check_writable(value, path)
    if isinstance(value, np.ndarray):
        # A subclass may keep its dims in a slice, as np.matrix does.
        return np.asarray(value)
    return value.detach()


def _tensor_text(tensor: TensorLike) -> str:
    """Return kind, dtype, shape and device as text."""
    if isinstance(tensor, np.ndarray):
        return f"array {tensor.dtype}{list(tensor.shape)}"
    text = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    # Ranks may use different GPUs, but not one a GPU and one the CPU: what is sent is staged there.
    return text if tensor.is_cpu else f"{text} on {tensor.device.type}"


# Step 1, too: root's values and the states of its objects


@dataclass(frozen=True, slots=True)
class _LeafSpec:
    """The kind and path of a leaf without JSON text; of a tensor or array also dtype, shape and device type."""

    kind: Literal["tensor", "array", "object"]
    path: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    device_type: str = "cpu"

    @classmethod
    def of(cls, leaf: Leaf, path: str) -> _LeafSpec:
        """Return the spec of a leaf; raise UnsupportedError if numpy has no text for an array's dtype."""
        if isinstance(leaf, torch.Tensor):
            dtype_name = str(leaf.dtype).removeprefix("torch.")
            return cls("tensor", path, dtype_name, tuple(leaf.shape), leaf.device.type)
        if not isinstance(leaf, np.ndarray):
            return cls("object", path)
        dtype = leaf.dtype
        if np.dtype(dtype.str) == dtype:
            return cls("array", path, dtype.str, leaf.shape)
        # One of ml_dtypes, which numpy writes as bytes.
        if dtype.name in DTYPE_NAMES and dtype.isnative:
            return cls("array", path, DTYPE_NAMES[dtype.name], leaf.shape)
        raise UnsupportedError(f"arrays of {dtype} cannot be sent in the state of an object", name=path)

    def tensor_for(self, live: Leaf, like: torch.Tensor | None, device: torch.device) -> TensorLike:
        """Return `live` if it is such a tensor or array, else a new one: as `like` if possible, or on `device`."""
        if self.kind == "array":
            # No text of numpy's is a name of safetensors.
            array_dtype = numpy_dtype(self.dtype) if self.dtype in ITEMSIZE else np.dtype(self.dtype)
            if isinstance(live, np.ndarray) and live.dtype == array_dtype and live.shape == self.shape:
                return live
            return np.empty(self.shape, array_dtype)
        if self.device_type == "cpu":
            device = torch.device("cpu")
        elif like is not None:
            device = like.device
        dtype = getattr(torch, self.dtype)
        here = (dtype, self.shape, device)
        if isinstance(live, torch.Tensor) and (live.dtype, tuple(live.shape), live.device) == here:
            return live
        # With the strides of the parameter, as those that the optimizer itself would make.
        if like is not None and (tuple(like.shape), like.device) == (self.shape, device):
            return torch.empty_like(like, dtype=dtype, requires_grad=False)
        return torch.empty(self.shape, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class _Part:
    """A value of root: its JSON text, the specs of the leaves that have none, and the names of the types in it.

    In the text the path stands for a leaf. The bytes of tensors are sent by themselves, in the order of their specs. Of
    an object that cannot be sent each rank keeps its own. Types are those of dataclasses, namedtuples and enums, which
    a rank must have to decode the text. ``{"step": 3, "exp_avg": <a tensor>}`` at ``opt`` becomes
    ``{"step":3,"exp_avg":{"$":"leaf","name":"opt.exp_avg"}}``.
    """

    text: str
    leaves: Sequence[_LeafSpec]
    types: Sequence[str]


class _State(NamedTuple):
    """The plain values of this rank at the path "", or the state of its object at a path, and its JSON text.

    `leaves` are what has no text, by path, and `tensors` the memory of those that are tensors or arrays.
    """

    path: str
    value: Leaf
    text: str
    leaves: dict[str, Leaf]
    tensors: dict[str, TensorLike]

    @classmethod
    def of(cls, value: Leaf, path: str) -> _State:
        """Encode a value; raise StateExchangeError, naming the path, for what cannot be sent."""
        leaves: dict[str, Leaf] = {}
        tensors: dict[str, TensorLike] = {}
        # By identity: a leaf that occurs twice is sent once. The leaf is kept, so that no other one gets its identity.
        names: dict[int, tuple[str, Leaf]] = {}

        def keep(leaf: Leaf, inner: str) -> str | None:
            if type(leaf) in PLAIN_TYPES:
                return None
            is_tensor = isinstance(leaf, torch.Tensor | np.ndarray)
            if not is_tensor and _has_text(leaf):
                return None
            name, _ = names.setdefault(id(leaf), ((path + inner).removeprefix("."), leaf))
            if is_tensor and name not in tensors:
                tensors[name] = _dense(leaf, name, written=False)
            elif not is_tensor:
                check_no_state_in(leaf, name)
            leaves[name] = leaf
            return name

        text = values.encode(value, keep)
        return cls(path, value, text, leaves, tensors)

    def part(self) -> _Part:
        """Return what root sends of it."""
        specs = [_LeafSpec.of(leaf, place) for place, leaf in self.leaves.items()]
        return _Part(self.text, specs, list(values.types_of(self.value)))


def _has_text(value: Leaf) -> bool:
    """Whether root sends a value that is no tensor or array as text, with names for the leaves in it."""
    if dataclasses.is_dataclass(value):
        return not isinstance(value, type)
    return _is_value(value) or isinstance(value, Mapping) or hasattr(value, "_fields")


def _state_of(value: Leaf, path: str) -> Leaf:
    """Return an optimizer's state, by the numbers of its parameters, or the state dict of another object."""
    if is_optimizer(value):
        return state_of_optimizer(value, path)
    return value.state_dict()


# Steps 1 and 2: compare, and send what has text


def _compare(
    comm: Communicator, root: int, describe: Describe, *, is_written: bool = False
) -> tuple[_Held, list[_State], Sequence[_Part]]:
    """Return what this rank holds, its values and the states of its objects, and root's. Collective.

    `describe` adds to what this rank holds. `is_written`: also root's tensors will be filled.

    Raises:
        MismatchError: not all ranks hold the same.
    """
    held = _Held(written=is_written or comm.rank != root)
    states: list[_State] = []
    parts: list[_Part] = []
    with comm.checking("describing what it holds"):
        comm.check_root(root)
        describe(held)
        held.note_shared_memory()
        states.append(_State.of(held.values, ""))
        for path, value in held.objects.items():
            states.append(_State.of(_state_of(value, path), path))
        if comm.rank == root:
            parts = [state.part() for state in states]
    compare(comm, f"root={root}", held.entries)
    return held, states, from_root(comm, parts, list[_Part], "what root holds", root)


# Steps 3 to 5: read root's parts, move tensors, and install


def _fill(comm: Communicator, root: int, describe: Describe, tree: Leaf) -> Leaf:
    """Give this rank root's tensors, states and values; return what replaces `tree`. Collective."""
    held, states, parts = _compare(comm, root, describe)
    tensors = list(held.tensors.values())
    callbacks: list[Callable[[], object]] = []
    with comm.phase("reading what root sent"):
        if comm.rank == root:
            # In the order in which the others read its parts: windows are cut by this order.
            for state in states:
                tensors += state.tensors.values()
        else:
            _keep_apart(tensors, states)
            new_values = {}
            root_values, _ = _read(parts[0], states[0], comm.device, {})
            for path, value in root_values.items():
                # By type and text: -0.0 is another number than 0.0.
                if not values.is_same(value, held.values[path]):
                    _check_types(value, held.values[path], path, comm.rank, root)
                    new_values[path] = value
            for value, part, state in zip(held.objects.values(), parts[1:], states[1:], strict=True):
                callback, state_tensors = _installation(value, state, part, comm.device)
                callbacks.append(callback)
                tensors += state_tensors
            tree = replaced(tree, new_values, callbacks)
    if comm.world_size > 1:
        broadcast_tensors(comm, tensors, root)
    # Last, as reading and sending may fail: until here an error leaves states and values as they were.
    for callback in callbacks:
        callback()
    return tree


def _keep_apart(tensors: Sequence[TensorLike], states: Sequence[_State]) -> None:
    """Remove from the states the leaves that share memory: filled at one path, they would change at another, too."""
    places = [(state.leaves, path) for state in states for path in state.tensors]
    in_states = itertools.chain.from_iterable(state.tensors.values() for state in states)
    for group in overlap_groups([*tensors, *in_states]):
        for number in group:
            if number >= len(tensors):
                leaves, path = places[number - len(tensors)]
                del leaves[path]


def _check_types(value: Leaf, live: Leaf, path: str, rank: int, root: int) -> None:
    """Raise MismatchError unless root's plain value may replace a live one."""
    are_numbers = values.is_number(value) and values.is_number(live)
    if None in (value, live) or type(value) is type(live) or are_numbers:
        return
    raise MismatchError(
        "ranks hold values of different types here",
        name=path,
        rank=rank,
        expected=f"a value, {excerpt(value, 60)} (rank {root})",
        found=f"a value, {excerpt(live, 60)} (rank {rank})",
    )


def _installation(
    value: Leaf, state: _State, part: _Part, device: torch.device
) -> tuple[Callable[[], object], list[TensorLike]]:
    """Return a callback that installs root's state in an object, and the tensors in it, which are filled before."""
    if not is_optimizer(value):
        new, tensors = _read(part, state, device, {})
        return functools.partial(load_object, value, value.load_state_dict, new, state.path, " on root"), tensors
    parameters = parameters_of(value)
    # The parameters that new tensors are like, by the first steps of the paths of their state.
    likes = {f"state[{number}]": parameter for number, parameter in enumerate(parameters)}
    new, tensors = _read(part, state, device, likes)
    differing = new["more"].keys() ^ state.value["more"].keys()
    if differing:
        text = f"only one of root's state dict and this rank's has the entry {min(map(str, differing))!r}"
        raise UnsupportedError(text, name=state.path)
    new_state: dict[Leaf, Leaf] = dict(new["shared"])
    for number, entries in new["state"].items():
        new_state[parameters[number]] = entries
    dropped = [key for key in value.state if key not in new_state]
    return functools.partial(install_optimizer, value, new["param_groups"], new_state, dropped, new["more"]), tensors


def _read(
    part: _Part, state: _State, device: torch.device, likes: Mapping[str, torch.Tensor]
) -> tuple[Leaf, list[TensorLike]]:
    """Return root's value where this rank has `state`, and its tensors in root's order.

    Root's bytes are to be copied into the tensors. They are those that `state` has at the same paths if they fit, else
    new ones.
    """
    leaves: dict[str, Leaf] = {}
    tensors: list[TensorLike] = []
    for spec in part.leaves:
        leaf = state.leaves.get(spec.path)
        if spec.kind != "object":
            first_steps, bracket, _ = spec.path[len(state.path) :].removeprefix(".").partition("]")
            leaf = spec.tensor_for(leaf, likes.get(first_steps + bracket), device)
            tensors.append(_dense(leaf, spec.path, written=True))
        elif leaf is None:
            raise UnsupportedError(
                "root has an object here that cannot be sent, and this rank has none", name=spec.path
            )
        leaves[spec.path] = leaf
    new = values.decode(part.text, types=values.types_of(state.value), leaves=leaves)
    unknown = set(part.types) - values.types_of(new).keys()
    if unknown:
        text = f"root holds a {min(unknown)}, which this rank does not know: give it to register_config"
        raise UnsupportedError(text, name=state.path)
    return with_types_of(state.value, new), tensors
