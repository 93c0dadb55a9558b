"""Ranks made alike: any tree of state takes root's values, and a module's parameters are broadcast or averaged.

Before a tensor moves, the ranks compare a digest of what each holds: paths, kinds, shapes and dtypes. With its own,
root sends what is no tensor, as JSON. Tensors follow as bytes, many small ones together and large ones in windows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from statexchange.comm.calls import public_call
from statexchange.comm.communicator import Communicator
from statexchange.comm.defaults import as_communicator
from statexchange.errors import MismatchError, UnsupportedError
from statexchange.state.content import Content, Memory, device_type_of, module_content
from statexchange.state.leaves import is_leaf
from statexchange.state.letter import Reader, letter_of, prepared, state_of
from statexchange.state.tree import rebuild
from statexchange.tensors import byte_view

__all__ = ["allreduce_parameters", "broadcast_parameters", "synchronize"]

T = TypeVar("T")
_WINDOW_BYTES = 64 << 20  # of memory that travels at a time: what is copied for it is no larger
_ALONE_BYTES = 1 << 20  # from which on a tensor travels by itself, and so without a copy
_ALIGNED = 16  # where any dtype may begin
_SHOWN = 8  # of the ranks that an error names


@public_call("synchronize")
def synchronize(tree: T, *, root: int = 0, comm: Any = None) -> T:
    """`tree` with root's values: tensors and what else can be changed in place, anything else in what is returned.

    Collective; blocks until all ranks have called. `tree` is any nesting of mappings, lists, tuples, namedtuples and
    dataclasses (the order of keys is nothing) and holds

    * torch tensors (also non-contiguous or requiring grad) and numpy arrays: the same objects, filled with root's data;
    * numbers, strings, enums, torch dtypes and None, whose place takes root's; None may stand for any other of them;
    * modules: parameters and all buffers, persistent or not, by name; each tied tensor travels once; names in torch's
      `_ddp_params_and_buffers_to_ignore` stay this rank's own;
    * optimizers: hyperparameters and state become root's, whatever this rank had; what it lacks is made and what root
      lacks is dropped, so that a resumed root seeds fresh ranks. The parameters themselves are the module's;
    * objects with `state_dict` and `load_state_dict`, such as LR schedulers: likewise.

    Any other object stays this rank's own. So do devices, paths, bytes and functions.

    Ranks whose trees differ in paths, kinds, shapes or dtypes all raise one MismatchError, with both sides at the first
    path that differs, and nothing has changed. UnsupportedError or InvalidArgumentError, naming the path: sharded
    DTensors (replicated ones are filled), sparse, quantised, meta or lazy tensors, arrays of objects, generators,
    cycles. Memory beyond the tree: at most 64 MiB at a time.
    """
    communicator = as_communicator(comm)

    def describe(*, written: bool) -> Content:
        content = Content(written=written)
        content.add_tree(tree)
        return content

    with communicator.phase("filling it"):
        filled: T = rebuild(tree, _fill(communicator, root, describe), is_leaf)
    return filled


@public_call("broadcast_parameters")
def broadcast_parameters(module: nn.Module, *, broadcast_buffers: bool = True, root: int = 0, comm: Any = None) -> None:
    """Root's parameters and, if asked, buffers in this rank's `module`, in place, as `synchronize` does it. Collective.

    Names in torch's `_ddp_params_and_buffers_to_ignore` are left out.
    """
    communicator = as_communicator(comm)

    def describe(*, written: bool) -> Content:
        return module_content(module, written=written, buffers=broadcast_buffers)

    with communicator.phase("filling them"):
        _fill(communicator, root, describe)


@public_call("allreduce_parameters")
def allreduce_parameters(module: nn.Module, *, comm: Any = None) -> None:
    """The mean over all ranks in every parameter and buffer of `module`, in place; integers and bools from rank 0.

    Collective; blocks until all ranks have called. Each tied tensor counts once; names in torch's
    `_ddp_params_and_buffers_to_ignore` are left out. Errors are those of `synchronize`; float8 is an UnsupportedError.
    """
    communicator = as_communicator(comm)

    def describe(*, written: bool) -> Content:  # noqa: ARG001 (the mean is written on every rank)
        content = module_content(module, written=True)
        for name, tensor in content.memories.items():
            if tensor.is_floating_point() and tensor.itemsize == 1:
                raise UnsupportedError(f"{tensor.dtype} cannot be averaged", name=name)
        return content

    with communicator.phase("averaging them"):
        content, _ = _compare(communicator, 0, describe)
        tensors = list(content.memories.values())
        inexact = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
        exact = [tensor for tensor in tensors if not (tensor.is_floating_point() or tensor.is_complex())]
        _broadcast(communicator, exact, 0)
        for window in _windows(inexact):
            communicator.all_reduce_multiple(window, "avg")


# The comparison


def _compare(comm: Communicator, root: int, describe: Callable[..., Content]) -> tuple[Content, Any]:
    """What this rank holds, once all ranks are known to hold the same, and root's letter. Collective."""
    content, note = Content(written=False), None
    failure: Exception | None = None
    try:
        comm.check_root(root)
        content = describe(written=comm.rank != root)
        note = [root, content.digest, content.kinds, letter_of(content) if comm.rank == root else None]
    except Exception as error:  # noqa: BLE001 (it is raised on all ranks)
        failure = error
    notes = comm.agree(failure, phase="looking at what it holds", note=note)
    roots = [note[0] for note in notes]
    if len(set(roots)) > 1:
        raise MismatchError(f"ranks name different roots: {', '.join(map(str, roots))}")
    wanted = notes[root]
    different = [rank for rank, (_, digest, kinds, _) in enumerate(notes) if not _agree(digest, kinds, *wanted[1:3])]
    if different:
        told = comm.broadcast_object(content.places() if comm.rank == root else None, root=root)
        failure = _difference(content.places(), told, comm.rank, root, different) if comm.rank in different else None
        comm.agree(failure, phase="comparing what ranks hold")
    return content, wanted[3]


def _agree(digest: str, kinds: Sequence[str | None], roots_digest: str, roots_kinds: Sequence[str | None]) -> bool:
    return digest == roots_digest and all(map(_alike, kinds, roots_kinds))


def _alike(kind: str | None, other: str | None) -> bool:
    """Whether values of these kinds may stand for each other."""
    return kind == other or "None" in (kind, other)


def _difference(
    ours: Sequence[Any], theirs: Sequence[Any], rank: int, root: int, different: Sequence[int]
) -> MismatchError:
    """The error that shows root's side and this rank's at the first path where they differ."""
    nothing = (None, "", None, "nothing")
    pairs = itertools.zip_longest(ours, theirs, fillvalue=nothing)
    own, told = next((own, told) for own, told in pairs if own[:2] != told[:2] or not _alike(own[2], told[2]))
    if own[0] != told[0]:  # the other side has nothing there
        only_ours = told is nothing or told[0] in {place[0] for place in ours}
        own, told = (own, nothing) if only_ours else (nothing, told)
    ranks = ", ".join(map(str, different[:_SHOWN])) + (", ..." if len(different) > _SHOWN else "")
    return MismatchError(
        f"not all ranks hold what root holds (rank {root}; different on: {ranks})",
        rank=rank,
        name=(own[0] if told is nothing else told[0]) or "(the whole)",
        expected=f"{told[3]} (rank {root})",
        found=f"{own[3]} (rank {rank})",
    )


# The travel


def _fill(comm: Communicator, root: int, describe: Callable[..., Content]) -> dict[str, Any]:
    """Give this rank root's tensors and states; returns the values that differ here, by path. Collective."""
    content, letter = _compare(comm, root, describe)
    memories = list(content.memories.values())
    taken: dict[str, Any] = {}
    deeds: list[Callable[[], None]] = []
    with comm.phase("reading what root says"):
        if comm.rank != root:
            taken, deeds = _read(letter, content, comm.device, memories)
    _broadcast(comm, memories, root)
    for deed in deeds:
        deed()
    return taken


def _read(
    letter: Any, content: Content, device: torch.device, memories: list[Memory]
) -> tuple[dict[str, Any], list[Callable[[], None]]]:
    """Root's values where they are others, and what is to be done once `memories`, which grow, are filled."""
    plain, states = letter
    told = Reader(plain, content.values, "", device).told
    deeds = []
    for path, keeper in content.keepers.items():
        own = state_of(keeper, path)
        reader = Reader(states[path], own, path, device)
        deeds.append(prepared(keeper, own, reader))
        memories += reader.memories
    return {path: value for path, value in told.items() if not _same(value, content.values[path])}, deeds


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other


def _broadcast(comm: Communicator, memories: Sequence[Memory], root: int) -> None:
    """Root's bytes in every rank's memories. Collective; all ranks give the same shapes, dtypes and kinds of device."""
    if comm.world_size == 1:
        return
    for window in _windows(memories):
        run = _one_run(window[0]) if len(window) == 1 else None
        if run is not None:
            comm.broadcast(run, root=root)
            continue
        parts, flat = _laid_flat(window)
        if comm.rank == root:
            for piece, part in zip(window, parts, strict=True):
                _copy(piece, part, back=False)
        comm.broadcast(flat, root=root)
        if comm.rank != root:
            for piece, part in zip(window, parts, strict=True):
                _copy(piece, part, back=True)


def _windows(memories: Sequence[Memory]) -> Iterator[list[Memory]]:
    """What travels together, cut by shapes and dtypes alone, since ranks must cut alike and strides may differ."""
    for kind in sorted({device_type_of(memory) for memory in memories}):
        window: list[Memory] = []
        nbytes = 0
        for piece in itertools.chain.from_iterable(_pieces(m) for m in memories if device_type_of(m) == kind):
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


def _pieces(memory: Memory) -> Iterator[Memory]:
    """A memory in pieces of at most a window, cut along its first dimensions; none of an empty one."""
    rows = len(memory) * _WINDOW_BYTES // memory.nbytes if memory.nbytes > _WINDOW_BYTES else 0
    if rows:
        yield from (memory[first : first + rows] for first in range(0, len(memory), rows))
    elif memory.nbytes > _WINDOW_BYTES:
        for row in memory:
            yield from _pieces(row)
    elif memory.nbytes:
        yield memory


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


def _one_run(piece: Memory) -> torch.Tensor | None:
    """The bytes of `piece` where they lie, if they do so in one run and in order."""
    if isinstance(piece, np.ndarray):
        in_order = piece.flags.c_contiguous and piece.flags.writeable
        return torch.from_numpy(piece.reshape(-1).view(np.uint8)) if in_order else None
    return byte_view(piece)  # type: ignore[no-any-return]


def _laid_flat(window: Sequence[Memory]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Room for each piece of a window in one run of bytes, and that run."""
    ends = list(itertools.accumulate(_aligned(piece.nbytes) for piece in window))
    begins = [0, *ends[:-1]]
    device = "cpu" if isinstance(window[0], np.ndarray) else window[0].device
    flat = torch.empty(begins[-1] + window[-1].nbytes, dtype=torch.uint8, device=device)
    return [flat[begin : begin + piece.nbytes] for begin, piece in zip(begins, window, strict=True)], flat


def _copy(piece: Memory, part: torch.Tensor, *, back: bool) -> None:
    """Copy `piece` into the bytes `part`, or back."""
    if isinstance(piece, np.ndarray):
        array = part.numpy().view(piece.dtype).reshape(piece.shape)
        np.copyto(*((piece, array) if back else (array, piece)))
        return
    run = _one_run(piece)
    mine, theirs = (run, part) if run is not None else (piece, part.view(piece.dtype).view(piece.shape))
    if back:
        mine.copy_(theirs)
    else:
        theirs.copy_(mine)
