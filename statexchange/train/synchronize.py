"""Make state equal on all ranks: copy root's values into any tree; broadcast or average a module's parameters.

The protocol of a call:

1. Every rank describes what it holds (`StateSpec`): paths, kinds, shapes and dtypes. All ranks exchange a digest of
   that and the kinds of their plain values; root adds the payload, its values and states as JSON. Nothing has changed.
2. If a rank's digest or kinds differ from root's, it receives root's description, and all ranks raise one MismatchError
   that shows both sides at the first path that differs.
3. Each rank reads the payload and prepares the tensors that are to be filled, existing or new ones, and callbacks that
   install states. An error here is raised on all ranks, and still nothing has changed.
4. Root sends the tensors as bytes: many small ones together, large ones in windows.
5. Tensors of a rank that share memory are filled one after the other, which is right only if root has equal values
   where they overlap. So if any rank has such tensors, their digests are compared with root's.
6. Callbacks run and values are replaced.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash
from torch import nn

from statexchange.comm.calls import public_call
from statexchange.comm.communicator import CommLike, Communicator
from statexchange.comm.defaults import as_communicator
from statexchange.comm.typed import agree, from_root
from statexchange.errors import MismatchError, UnsupportedError
from statexchange.state.flatten import is_leaf
from statexchange.state.payload import Payload, PayloadReader, encode_payload, install_callback, state_of
from statexchange.state.spec import EntryDetail, StateSpec, device_type_of, module_spec
from statexchange.state.tree import check_rebuild, rebuild
from statexchange.tensors import TensorLike, overlap_groups
from statexchange.values import is_same

__all__ = ["allreduce_parameters", "broadcast_parameters", "synchronize"]

T = TypeVar("T")
Describe = Callable[..., StateSpec]

_WINDOW_BYTES = 64 << 20  # the largest message, and so the largest copy
_ALONE_BYTES = 1 << 20  # a tensor of this size or more is sent by itself, without a copy
_ALIGN_BYTES = 16  # the largest itemsize: any dtype may begin at a multiple of it
_MAX_SHOWN = 8  # ranks or tensors in a message
_DIGEST_BYTES = 16


@public_call("synchronize")
def synchronize(tree: T, *, root: int = 0, comm: CommLike | None = None) -> T:
    """Give every rank root's values: in place where that is possible, else in the tree that is returned.

    Collective. Blocks until all ranks have called. The name and the idea are those of Lux.jl's `synchronize!!`. Memory
    beyond the tree: at most 64 MiB at a time.

    Args:
        tree: any nesting of mappings (keys in any order), lists, tuples, namedtuples and dataclasses that holds

            * torch tensors (also non-contiguous or requiring grad) and numpy arrays: the same objects are filled with
              root's data;
            * numbers, strings, enums, torch dtypes and None: they are replaced by root's; None on one rank may stand
              for any of the others on another rank;
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
            sides at the first path that differs; nothing has changed. Or tensors of a rank share memory, for which root
            has different values; tensors are filled then, and values and states are as before.
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

    def describe(*, written: bool) -> StateSpec:
        spec = StateSpec(written=written)
        spec.add_tree(tree)
        return spec

    def check(new: Mapping[str, Any]) -> None:
        check_rebuild(tree, new, is_leaf)

    with communicator.phase("filling the tree"):
        filled: T = rebuild(tree, _fill(communicator, root, describe, check), is_leaf)
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
        MismatchError: modules differ between ranks; nothing has changed. Or tensors of a rank share memory, for which
            root has different values; tensors are filled then.
        InvalidArgumentError: `module` is no module.

    Example:
        >>> import torch
        >>> import statexchange as sx
        >>> sx.train.broadcast_parameters(torch.nn.Linear(2, 1))
    """
    communicator = as_communicator(comm)

    def describe(*, written: bool) -> StateSpec:
        return module_spec(module, written=written, buffers=broadcast_buffers)

    with communicator.phase("filling the parameters"):
        _fill(communicator, root, describe)


@public_call("allreduce_parameters")
def allreduce_parameters(module: nn.Module, *, comm: CommLike | None = None) -> None:
    """Replace every parameter and buffer of `module` by its mean over all ranks, in place.

    Collective. Blocks until all ranks have called. Integers and bools become rank 0's. Tied tensors count once; names
    in torch's `_ddp_params_and_buffers_to_ignore` are left out. The name is Bagua's.

    Args:
        module: the module.
        comm: a Communicator, ProcessGroup, DeviceMesh or MPI communicator; by default the current one.

    Raises:
        MismatchError: modules differ between ranks; nothing has changed. Or tensors that share memory do not share it
            alike on all ranks; tensors are changed then.
        UnsupportedError: a tensor is float8, shares memory with one of integers, or cannot be synchronised.
        InvalidArgumentError: `module` is no module.

    Example:
        >>> import torch
        >>> import statexchange as sx
        >>> sx.train.allreduce_parameters(torch.nn.Linear(2, 1))
    """
    communicator = as_communicator(comm)

    def describe(*, written: bool) -> StateSpec:  # noqa: ARG001 (the mean is written on every rank)
        spec = module_spec(module, written=True)
        for name, tensor in spec.tensors.items():
            if _is_averaged(tensor) and tensor.itemsize == 1:
                raise UnsupportedError(f"{tensor.dtype} cannot be averaged", name=name)
        _check_integer_views(spec.tensors)
        return spec

    with communicator.phase("averaging the parameters"):
        compared = _compare(communicator, 0, describe)
        exact: list[TensorLike] = []
        inexact: list[TensorLike] = []
        for tensor in compared.spec.tensors.values():
            (inexact if _is_averaged(tensor) else exact).append(tensor)
        _broadcast(communicator, exact, 0)
        for window in _windows(inexact):
            communicator.all_reduce_multiple(window, "avg")
        if compared.shares_memory:
            _check_shared_memory(communicator, list(compared.spec.tensors.items()), 0)


def _is_averaged(tensor: TensorLike) -> bool:
    """Whether `allreduce_parameters` gives a tensor the mean; others become rank 0's."""
    return isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.is_complex())


def _check_integer_views(tensors: dict[str, TensorLike]) -> None:
    """Raise UnsupportedError if a tensor to average shares memory with one that becomes rank 0's."""
    named = list(tensors.items())
    for group in overlap_groups(tensors.values()):
        averaged = [named[number] for number in group if _is_averaged(named[number][1])]
        copied = [named[number] for number in group if not _is_averaged(named[number][1])]
        for (name, tensor), (view_name, view) in itertools.product(averaged, copied):
            if any(overlap_groups([tensor, view])):
                text = f"this tensor cannot be averaged: it shares memory with {view_name}, which would become rank 0's"
                raise UnsupportedError(f"{text}; clone() one of the two", name=name)


# Steps 1 and 2: compare


@dataclass(frozen=True, slots=True)
class _Compared:
    """This rank's spec, alike on all ranks, and root's payload; on root also the payload's tensors.

    `shares_memory`: whether tensors of a spec, on any rank, share memory.
    """

    spec: StateSpec
    payload: Payload | None
    payload_tensors: Sequence[TensorLike]
    shares_memory: bool


@dataclass(frozen=True, slots=True)
class _Note:
    """A rank's message in step 1: its `root` argument, what it holds, and from root also the payload.

    `shares_memory`: whether tensors share memory.
    """

    root: int
    digest: str
    kinds: Sequence[str | None]
    shares_memory: bool
    payload: Payload | None = None

    def agrees_with(self, other: _Note) -> bool:
        """Whether two ranks hold the same, where the plain value None matches one of any kind."""
        return self.digest == other.digest and all(map(_are_alike, self.kinds, other.kinds))


def _compare(comm: Communicator, root: int, describe: Describe) -> _Compared:
    """Describe what this rank holds; return it and root's payload if all ranks hold the same. Collective."""
    spec, note, payload = StateSpec(written=False), None, None
    tensors: list[TensorLike] = []
    failure: Exception | None = None
    try:
        comm.check_root(root)
        spec = describe(written=comm.rank != root)
        if comm.rank == root:
            payload, tensors = encode_payload(spec)
        shares_memory = any(overlap_groups(spec.tensors.values()))
        note = _Note(root, spec.digest, spec.kinds, shares_memory, payload)
    except Exception as error:  # noqa: BLE001 (agree raises it on all ranks)
        failure = error
    notes = agree(comm, failure, "describing what it holds", note, _Note)
    roots = [theirs.root for theirs in notes]
    if len(set(roots)) > 1:
        raise MismatchError(f"ranks passed different roots: {', '.join(map(str, roots))}")
    different = [rank for rank, theirs in enumerate(notes) if not theirs.agrees_with(notes[root])]
    if different:
        details = spec.details()
        root_details = from_root(comm, details, list[EntryDetail], "what it holds", root)
        failure = None
        if comm.rank in different:
            failure = _difference(details, root_details, comm.rank, root, different)
        comm.agree(failure, phase="comparing what ranks hold")
    return _Compared(spec, notes[root].payload, tensors, any(theirs.shares_memory for theirs in notes))


def _are_alike(kind: str | None, other: str | None) -> bool:
    """Whether values of these kinds may stand for each other."""
    return kind == other or "None" in (kind, other)


def _difference(
    ours: Sequence[EntryDetail], theirs: Sequence[EntryDetail], rank: int, root: int, different: Sequence[int]
) -> MismatchError:
    """Return the error that shows root's entry and this rank's at the first path where they differ."""
    nothing = EntryDetail(None, "", None, "nothing")
    own_entry = root_entry = nothing
    for own_entry, root_entry in itertools.zip_longest(ours, theirs, fillvalue=nothing):
        is_same = own_entry.path == root_entry.path and own_entry.entry == root_entry.entry
        if not is_same or not _are_alike(own_entry.kind, root_entry.kind):
            break
    if own_entry.path != root_entry.path:  # one side lacks the path that the other has here
        own_paths = {detail.path for detail in ours}
        if root_entry is nothing or root_entry.path in own_paths:
            root_entry = nothing
        else:
            own_entry = nothing
    path = own_entry.path if root_entry is nothing else root_entry.path
    return MismatchError(
        f"not all ranks hold what root, rank {root}, holds (different on: {_listed(different)})",
        rank=rank,
        name=path or "(the whole)",
        expected=f"{root_entry.text} (rank {root})",
        found=f"{own_entry.text} (rank {rank})",
    )


def _listed(items: Sequence[object]) -> str:
    """Return the first items as text."""
    return ", ".join(map(str, items[:_MAX_SHOWN])) + (", ..." if len(items) > _MAX_SHOWN else "")


# Steps 3 to 6: read the payload, move tensors, and check those that share memory


@dataclass(slots=True)
class _Changes:
    """The changes that a payload requires: tensors to fill after those of the spec, callbacks, and new values.

    Each tensor is paired with its path.
    """

    tensors: list[tuple[str, TensorLike]]
    callbacks: list[Callable[[], None]]
    values: dict[str, Any]


def _fill(
    comm: Communicator, root: int, describe: Describe, check: Callable[[Mapping[str, Any]], None] = lambda _: None
) -> dict[str, Any]:
    """Give this rank root's tensors and states; return the values that differ here, by path. Collective.

    `check` is given these values before anything changes.
    """
    compared = _compare(comm, root, describe)
    changes = _Changes([("", tensor) for tensor in compared.payload_tensors], [], {})  # root names none of them
    with comm.phase("reading what root sent"):
        if comm.rank != root:
            changes = _read(compared, comm.device)
            check(changes.values)
    named = [*compared.spec.tensors.items(), *changes.tensors]
    _broadcast(comm, [tensor for _, tensor in named], root)
    if compared.shares_memory or changes.tensors:  # the same on all ranks
        _check_shared_memory(comm, named, root)
    for callback in changes.callbacks:
        callback()
    return changes.values


def _read(compared: _Compared, device: torch.device) -> _Changes:
    """Read root's payload on another rank. Nothing of the tree changes yet."""
    spec = compared.spec
    payload = compared.payload
    assert payload is not None  # root has agreed with this rank
    decoded = PayloadReader(payload.plain, spec.values, "", device).decoded
    values = {path: value for path, value in decoded.items() if not is_same(value, spec.values[path])}
    changes = _Changes([], [], values)
    for path, obj in spec.stateful.items():
        own = state_of(obj, path)
        reader = PayloadReader(payload.states[path], own, path, device)
        changes.callbacks.append(install_callback(obj, own, reader))
        changes.tensors += reader.tensors
    return changes


def _broadcast(comm: Communicator, tensors: Sequence[TensorLike], root: int) -> None:
    """Copy root's bytes into every rank's tensors. Collective; shapes, dtypes and kinds of device are alike."""
    if comm.world_size == 1:
        return
    for window in _windows(tensors):
        in_place = _contiguous_bytes(window[0]) if len(window) == 1 else None
        if in_place is not None:
            comm.broadcast(in_place, root=root)
            continue
        staging = _Staging(window)
        if comm.rank == root:
            staging.copy_in()
        comm.broadcast(staging.flat, root=root)
        if comm.rank != root:
            staging.copy_out()


def _check_shared_memory(comm: Communicator, named: Sequence[tuple[str, TensorLike]], root: int) -> None:
    """Raise MismatchError if tensors that share memory, on any rank, do not have root's values. Collective."""
    if comm.world_size == 1:
        return
    tensors = [tensor for _, tensor in named]
    sharing = {*itertools.chain.from_iterable(overlap_groups(tensors))}
    is_checked = np.zeros(len(tensors), np.uint8)
    is_checked[list(sharing)] = 1
    comm.all_reduce(is_checked, "max")
    numbers = np.flatnonzero(is_checked)
    if not len(numbers):
        return
    own = np.frombuffer(b"".join(_digest(tensors[number]) for number in numbers), np.uint8).reshape(-1, _DIGEST_BYTES)
    differs = np.any(own != comm.broadcast(own.copy(), root=root), axis=1)
    wrong = [int(number) for number in numbers[differs]]
    note = [wrong[0], wrong[0] in sharing] if wrong else None
    notes = comm.agree(phase="comparing tensors that share memory", note=note)
    first = min((note[0] for note in notes if note is not None), default=None)
    sharing_ranks = [rank for rank, note in enumerate(notes) if note == [first, True]]
    failure = None
    if first is not None and comm.rank == (sharing_ranks[0] if sharing_ranks else root):
        failure = _sharing_error(comm.rank, named, first)
    comm.agree(failure, phase="naming tensors that share memory")


def _sharing_error(rank: int, named: Sequence[tuple[str, TensorLike]], number: int) -> MismatchError:
    """Return the error of a rank on which tensor `number` shares memory with others."""
    name, tensor = named[number]
    others = [path for path, other in named if other is not tensor and any(overlap_groups([tensor, other]))]
    if others:
        text = (
            f"on rank {rank} this tensor shares memory with {'one of ' if len(others) > 1 else ''}{_listed(others)}, "
            f"but other ranks have different values for the two: clone() one of them on rank {rank}, or let them share "
            "memory on all ranks"
        )
    else:
        text = "ranks have different values for this tensor: it was changed during the call"
    return MismatchError(text, rank=rank, name=name or "(the whole)")


def _digest(tensor: TensorLike) -> bytes:
    """Return the digest of a tensor's values, `_DIGEST_BYTES` long."""
    hasher = xxhash.xxh3_128()
    for piece in _pieces(tensor):
        staging = _Staging([piece])
        staging.flat.zero_()  # the padding of numpy's structured dtypes is not copied
        staging.copy_in()
        hasher.update(staging.flat.cpu().numpy().data)
    return hasher.digest()


def _windows(tensors: Sequence[TensorLike]) -> Iterator[list[TensorLike]]:
    """Cut tensors into windows, one message each, by shapes and dtypes alone: strides may differ between ranks."""
    by_device: dict[str, list[TensorLike]] = {}
    for tensor in tensors:
        by_device.setdefault(device_type_of(tensor), []).append(tensor)
    for kind in sorted(by_device):
        window: list[TensorLike] = []
        nbytes = 0
        for piece in itertools.chain.from_iterable(map(_pieces, by_device[kind])):
            if piece.nbytes >= _ALONE_BYTES:
                yield [piece]
                continue
            if nbytes + piece.nbytes > _WINDOW_BYTES:
                yield window
                window, nbytes = [], 0
            window.append(piece)
            nbytes += _aligned(piece.nbytes)
        if window:
            yield window


def _pieces(tensor: TensorLike) -> Iterator[TensorLike]:
    """Cut a tensor along its first dims into pieces of at most a window; an empty one has no piece."""
    if tensor.nbytes <= _WINDOW_BYTES:
        if tensor.nbytes:
            yield tensor
        return
    rows = len(tensor) * _WINDOW_BYTES // tensor.nbytes
    if rows:
        for first in range(0, len(tensor), rows):
            yield tensor[first : first + rows]
    else:  # a single row is larger than a window
        for row in tensor:
            yield from _pieces(row)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _contiguous_bytes(piece: TensorLike) -> torch.Tensor | None:
    """Return the bytes of `piece` in place; None if they do not lie in C order, or cannot be written."""
    if isinstance(piece, np.ndarray):
        in_order = piece.flags.c_contiguous and piece.flags.writeable
        return torch.from_numpy(piece.reshape(-1).view(np.uint8)) if in_order else None
    if not piece.is_contiguous() or piece.is_conj() or piece.is_neg():
        return None
    # A single element counts as contiguous whatever its stride, which `view` refuses.
    return piece.detach().as_strided((piece.numel(),), (1,)).view(torch.uint8)


class _Staging:
    """A staging buffer for the pieces of a window: `flat`, of which each piece has a part."""

    def __init__(self, window: Sequence[TensorLike]) -> None:
        begins = [0, *itertools.accumulate(_aligned(piece.nbytes) for piece in window)]
        device = "cpu" if isinstance(window[0], np.ndarray) else window[0].device
        self.flat = torch.empty(begins[len(window) - 1] + window[-1].nbytes, dtype=torch.uint8, device=device)
        self._window = window
        self._parts = [self.flat[begin : begin + p.nbytes] for begin, p in zip(begins, window, strict=False)]

    def copy_in(self) -> None:
        """Copy the pieces into the buffer."""
        for piece, part in zip(self._window, self._parts, strict=True):
            if isinstance(piece, np.ndarray):
                np.copyto(_as_array(part, piece), piece)
            else:
                own, staged = _same_view(piece, part)
                staged.copy_(own)

    def copy_out(self) -> None:
        """Copy the buffer into the pieces."""
        for piece, part in zip(self._window, self._parts, strict=True):
            if isinstance(piece, np.ndarray):
                np.copyto(piece, _as_array(part, piece))
            else:
                own, staged = _same_view(piece, part)
                own.copy_(staged)


def _as_array(part: torch.Tensor, piece: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a part of the buffer as an array like `piece`."""
    staged: np.ndarray[Any, Any] = part.numpy().view(piece.dtype)
    return staged.reshape(piece.shape)


def _same_view(piece: torch.Tensor, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a piece and its part of the buffer with one dtype and shape: as bytes if the piece lies in C order."""
    in_place = _contiguous_bytes(piece)
    if in_place is not None:
        return in_place, part
    return piece, part.view(piece.dtype).view(piece.shape)
