"""Copy root's bytes into the tensors of all ranks, in windows of a bounded size."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from statexchange.comm.communicator import Communicator
from statexchange.tensors import TensorLike

_WINDOW_BYTES = 64 << 20  # the largest message, and so the largest copy
_ALONE_BYTES = 1 << 20  # a tensor of this size or more is sent by itself, without a copy
_ALIGN_BYTES = 16  # the largest itemsize: any dtype may begin at a multiple of it


def broadcast_tensors(comm: Communicator, tensors: Sequence[TensorLike], root: int) -> None:
    """Copy root's bytes into every rank's tensors. Collective; shapes, dtypes and kinds of device are alike."""
    for window in windows(tensors):
        in_place = _contiguous_bytes(window[0])
        # A rank may send from, or receive into, the tensor itself where others need a buffer.
        if len(window) == 1 and in_place is not None:
            comm.broadcast(in_place, root=root)
            continue
        flat, pieces, parts = _staged(window)
        if comm.rank == root:
            _copy(pieces, parts)
        comm.broadcast(flat, root=root)
        if comm.rank != root:
            _copy(parts, pieces)


def windows(tensors: Sequence[TensorLike]) -> Iterator[list[TensorLike]]:
    """Cut tensors into windows, one message each, by shapes and dtypes alone: strides may differ between ranks."""
    by_device: dict[str, list[TensorLike]] = {}
    for tensor in tensors:
        by_device.setdefault("cpu" if isinstance(tensor, np.ndarray) else tensor.device.type, []).append(tensor)
    # Sorted, as ranks send their tensors in one order, whichever device each had first.
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
        return
    # A single row is larger than a window.
    for row in tensor:
        yield from _pieces(row)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _contiguous_bytes(piece: TensorLike) -> torch.Tensor | None:
    """Return the bytes of `piece` in place; None if they do not lie in C order, or cannot be written."""
    if isinstance(piece, np.ndarray):
        if not piece.flags.c_contiguous or not piece.flags.writeable:
            return None
        return torch.from_numpy(piece.reshape(-1).view(np.uint8))
    if not piece.is_contiguous() or piece.is_conj() or piece.is_neg():
        return None
    # A single element counts as contiguous whatever its stride, which `view` refuses.
    return piece.detach().as_strided((piece.numel(),), (1,)).view(torch.uint8)


def _staged(window: Sequence[TensorLike]) -> tuple[torch.Tensor, list[TensorLike], list[TensorLike]]:
    """Return a staging buffer for the pieces of a window; the pieces, and their parts of the buffer, as alike tensors.

    Tensors are bytes where the piece lies in C order: torch has no copy for some dtypes.
    """
    begins = []
    end = 0
    for piece in window:
        begins.append(_aligned(end))
        # No padding at the end: another rank may send a single piece in place, without this buffer.
        end = begins[-1] + piece.nbytes
    device = "cpu" if isinstance(window[0], np.ndarray) else window[0].device
    flat = torch.empty(end, dtype=torch.uint8, device=device)
    pieces: list[TensorLike] = []
    parts: list[TensorLike] = []
    for begin, piece in zip(begins, window, strict=True):
        part = flat[begin : begin + piece.nbytes]
        in_place = _contiguous_bytes(piece)
        if isinstance(piece, np.ndarray):
            pieces.append(piece)
            parts.append(part.numpy().view(piece.dtype).reshape(piece.shape))
        elif in_place is None:
            pieces.append(piece)
            parts.append(part.view(piece.dtype).view(piece.shape))
        else:
            pieces.append(in_place)
            parts.append(part)
    return flat, pieces, parts


def _copy(sources: Sequence[TensorLike], targets: Sequence[TensorLike]) -> None:
    for source, target in zip(sources, targets, strict=True):
        if isinstance(source, torch.Tensor) and isinstance(target, torch.Tensor):
            target.copy_(source)
        else:
            np.copyto(np.asarray(target), np.asarray(source))
