"""Read and fill a tensor's elements as host memory, window by window.

A tensor in C order on the host is accessed in place, any other through two buffers. The buffers take turns, so that a
GPU copies into or out of one while the host works on the other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from statexchange.comm.communicator import Communicator
from statexchange.sharding.shards import Box, full_box
from statexchange.state.describe import LocalTensor
from statexchange.state.types import Leaf
from statexchange.storage.files import WINDOW_BYTES
from statexchange.storage.regions import slices_within, windows
from statexchange.storage.tensorfile import ShardData
from statexchange.tensors import (
    ITEMSIZE,
    TensorLike,
    all_finite,
    collector_paused,
    converted,
    count_overflows,
    from_bytes,
    name_of_dtype,
    num_overflows,
    own_bytes,
    unify_nans,
)

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

MESSAGE_BYTES = 8 << 20  # a rank that waits for a message sees progress only after each


class _Copied(NamedTuple):
    """A window of a tensor that is copied into a buffer.

    Attributes:
        window: the box of the window.
        memory: the bytes of the buffer.
        source: the part of the tensor.
        buffer: the array or tensor over `memory`.
        event: what to wait for until the copy is complete; None if it is.
    """

    window: Box
    memory: memoryview
    source: TensorLike
    buffer: TensorLike
    event: torch.cuda.Event | None


class Staging:
    """Windows of at most `window_bytes` and two buffers, pinned for tensors of a GPU.

    For one thread, and one tensor at a time. `num_overflows` is the number of finite elements of the last tensor that
    became infinite as they were cast.
    """

    def __init__(self, window_bytes: int = WINDOW_BYTES) -> None:
        self.num_overflows = 0
        self._window_bytes = window_bytes
        self._buffers: dict[tuple[int, bool], NDArray[np.uint8]] = {}

    def parts(self, tensor: TensorLike, dtype: str) -> Iterator[tuple[Box, memoryview]]:
        """Yield a tensor's bytes in C order, part by part; each is valid until the next is requested. Not collective.

        `dtype` is the safetensors name of the yielded elements; a tensor of another dtype is cast.
        """
        shape, itemsize = tuple(tensor.shape), ITEMSIZE[dtype]
        self.num_overflows = 0
        is_cast = name_of_dtype(tensor.dtype) != dtype
        in_place = None if is_cast else own_bytes(tensor)
        if in_place is not None:
            at = 0
            for window in windows(shape, itemsize, self._window_bytes):
                yield window, in_place[at : at + window.numel * itemsize]
                at += window.numel * itemsize
            return
        cast = dtype if is_cast else None
        previous: _Copied | None = None
        for number, window in enumerate(windows(shape, itemsize, self._window_bytes)):
            buffer, memory = self._buffer(number, tensor, window, dtype)
            source = _window_of(tensor, window)
            current = _Copied(window, memory, source, buffer, _copy(buffer, source, tensor))
            # One window behind, so that a GPU copies into one buffer while the caller works on the other.
            if previous is not None:
                yield self._finished(previous, cast)
            previous = current
        if previous is not None:
            yield self._finished(previous, cast)

    def bytes_of(self, tensor: TensorLike, dtype: str, progress: Callable[[], object]) -> NDArray[np.uint8]:
        """Return a copy of the bytes that `parts` yields; `progress` is called after each part. Not collective."""
        data, at = np.empty(math.prod(tensor.shape) * ITEMSIZE[dtype], np.uint8), 0
        for _, part in self.parts(tensor, dtype):
            data[at : at + len(part)] = part
            at += len(part)
            progress()  # other ranks do not wait long for one that shows no progress
        return data

    def targets(self, tensor: TensorLike, dtype: str) -> Iterator[tuple[Box, memoryview]]:
        """Yield memory for a tensor's elements in C order, part by part; fill each before requesting the next.

        The tensor is complete when the iterator has ended. Not collective. `dtype` is the safetensors name of the
        elements that are filled in; they are cast for a tensor of another dtype.
        """
        self.num_overflows = 0
        live = name_of_dtype(tensor.dtype)
        in_place = own_bytes(tensor) if live == dtype else None
        if in_place is not None:
            yield full_box(tuple(tensor.shape)), in_place
            return
        pending: list[torch.cuda.Event | None] = [None, None]  # the copy out of each buffer
        for number, window in enumerate(windows(tuple(tensor.shape), ITEMSIZE[dtype], self._window_bytes)):
            # The buffer must not be filled again while the GPU still copies out of it.
            _await(pending[number % 2])
            buffer, memory = self._buffer(number, tensor, window, dtype)
            yield window, memory
            target = _window_of(tensor, window)
            pending[number % 2] = _copy(target, buffer, tensor)
            if live is not None and live != dtype:
                cast_bytes = own_bytes(target)
                if cast_bytes is None:  # strided, or on a GPU, for which the host does not wait: count from the source
                    self.num_overflows += count_overflows(memory, dtype, live)
                elif not all_finite(cast_bytes, live):
                    self.num_overflows += num_overflows(buffer, target)
        for copy in pending:
            _await(copy)

    def _finished(self, copied: _Copied, cast: str | None) -> tuple[Box, memoryview]:
        """Wait for a copy; return the data. If it has cast them to dtype `cast`, unify NaNs and count overflows."""
        _await(copied.event)
        if cast is not None and not unify_nans(copied.memory, cast):
            self.num_overflows += num_overflows(copied.source, copied.buffer)
        return copied.window, copied.memory

    def _buffer(self, number: int, tensor: TensorLike, window: Box, dtype: str) -> tuple[TensorLike, memoryview]:
        """Return the buffer whose turn it is, as an array or tensor of the window's shape, and its bytes."""
        as_numpy = isinstance(tensor, np.ndarray)
        is_cuda = not isinstance(tensor, np.ndarray) and tensor.is_cuda
        key = number % 2, is_cuda
        # Pinning memory takes longer than copying a window, and most tensors of a load need no buffer.
        if key not in self._buffers:
            self._buffers[key] = _new_buffer(self._window_bytes, is_pinned=is_cuda)
        memory = self._buffers[key][: window.numel * ITEMSIZE[dtype]]
        return from_bytes(memory, dtype, window.shape, as_numpy=as_numpy), memory.data


def _new_buffer(nbytes: int, *, is_pinned: bool) -> NDArray[np.uint8]:
    if not is_pinned:
        return np.empty(nbytes, np.uint8)
    import torch

    # From pinned memory a GPU copies by itself, while the host goes on.
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()


def received_parts(comm: Communicator, shape: Sequence[int], dtype: str, src: int) -> Iterator[tuple[Box, memoryview]]:
    """Yield the windows that another rank sends of a tensor, by `parts` in windows of `MESSAGE_BYTES`."""
    itemsize = ITEMSIZE[dtype]
    data = np.empty(min(MESSAGE_BYTES, math.prod(shape) * itemsize), np.uint8)
    for window in windows(shape, itemsize, MESSAGE_BYTES):
        part = data[: window.numel * itemsize]
        comm.recv(part, src)
        yield window, part.data


def shard_data(tensors: Iterable[LocalTensor]) -> list[ShardData]:
    """Return the shards of live tensors with the bytes of their boxes.

    Those that are no run in host memory are produced on request.
    """
    staging = Staging()
    shards = []
    with collector_paused():  # tens of thousands of small objects, none of which is garbage
        for local in tensors:
            runs = []
            for memory in local.memory:
                if memory.is_run:
                    runs.append(memory.tensor)
            # Most tensors of a save lie on the host as the file has them, and need no staging.
            if len(runs) == len(local.tensors):
                shards.append(ShardData(local.shard, tuple(runs)))
            else:
                shards.append(ShardData(local.shard, functools.partial(_staged, local, staging)))
    return shards


def _staged(local: LocalTensor, staging: Staging, box: int) -> Iterator[memoryview]:
    """Yield the bytes of a box, part by part."""
    for _, part in staging.parts(local.tensors[box], local.shard.dtype):
        yield part


def _window_of(tensor: Leaf, window: Box) -> Leaf:
    if not isinstance(tensor, np.ndarray):
        tensor = tensor.detach()  # a part of a parameter, changed since it was taken, cannot be sliced for autograd
    # With (...), as a scalar of an array without dims would be a copy.
    return tensor[(..., *slices_within(window, full_box(tuple(tensor.shape))))]


def _copy(target: Leaf, source: Leaf, tensor: TensorLike) -> torch.cuda.Event | None:
    """Start a copy; pass the result to `_await`. `tensor` is the operand that may be on a GPU."""
    if isinstance(tensor, np.ndarray):
        if source.dtype != target.dtype:
            # numpy's own cast of NaN differs from torch's in its bits.
            source, _ = converted(source, str(name_of_dtype(target.dtype)))
        target[...] = source
        return None
    import torch

    with torch.no_grad():
        target = target.detach()
        source = source.detach().resolve_neg()  # on the CPU, a copy from float32 to float16 or back ignores the bit
        if target.is_neg():
            source = source.to(target.dtype)
        target.copy_(source, non_blocking=tensor.is_cuda)
    if not tensor.is_cuda:
        return None
    # An event belongs to the device that is current when it is recorded, which need not be the tensor's.
    with torch.cuda.device(tensor.device):
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
    return event


def _await(copy: torch.cuda.Event | None) -> None:
    if copy is not None:
        copy.synchronize()
