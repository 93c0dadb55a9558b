"""Reduce copies that differ into one, at the rank that writes the box."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from statexchange.comm.communicator import Communicator
from statexchange.exchange.rank_metadata import local_box
from statexchange.exchange.staging import Staging
from statexchange.formats.tensor_reader import reduce_into
from statexchange.sharding.write_plan import BoxReduction
from statexchange.state.describe import Description, LocalTensor
from statexchange.tensors import array_over, from_bytes, memory_of, own_bytes

__all__ = ["reduce_copies"]

_Bytes: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]"

_MESSAGE_BYTES = 4 << 20
_ALIGN_BYTES = 16  # a multiple of every dtype's size


def reduce_copies(comm: Communicator, described: Description, reductions: Sequence[BoxReduction]) -> Description:
    """Return the description with reduced values for the boxes that this rank writes. Collective.

    `reductions` must be equal on all ranks. Copies are reduced in their order and in the dtype that they have.
    The live state does not change. Memory: the size of this rank's reduced boxes, and of one more box if it lies on a
    GPU or is strided.
    """
    results: dict[tuple[str, int], _Bytes] = {}
    for src, dst, pairs in _transfers(reductions):
        # Both ends walk the transfers in one order, so that each send meets its receive, and none waits for another.
        if comm.rank == dst:
            for reduction, _ in pairs:
                key = (reduction.name, reduction.index)
                if key not in results:
                    results[key] = _copy(comm, _bytes(comm, described, *key))
            targets = [(reduction, results[reduction.name, reduction.index]) for reduction, _ in pairs]
            if src == dst:
                for (reduction, result), (_, index) in zip(targets, pairs, strict=True):
                    others = _bytes(comm, described, reduction.name, index)
                    for part in _parts(comm, len(result)):
                        _reduce(described, reduction, result[part], others[part])
            else:
                _receive(comm, src, targets, described)
        elif comm.rank == src:
            _send(comm, dst, described, [(reduction.name, index) for reduction, index in pairs])
    tensors = dict(described.tensors)
    for (name, index), data in results.items():
        tensors[name] = _with_bytes(tensors[name], index, data)
    return replace(described, tensors=tensors)


def _transfers(reductions: Sequence[BoxReduction]) -> Iterator[tuple[int, int, list[tuple[BoxReduction, int]]]]:
    """Yield (src, dst, boxes that src sends to dst) in an order equal on all ranks.

    Each box is a reduction with the index of the copy on `src`.
    """
    transfers: dict[tuple[int, int], list[tuple[BoxReduction, int]]] = {}
    for reduction in reductions:
        for rank, index in reduction.copies:
            transfers.setdefault((rank, reduction.holder), []).append((reduction, index))
    for (src, dst), pairs in sorted(transfers.items(), key=lambda item: item[0]):
        yield src, dst, pairs


def _parts(comm: Communicator, nbytes: int) -> Iterator[slice]:
    """Yield slices of at most one message's bytes, and report progress after each."""
    for at in range(0, nbytes, _MESSAGE_BYTES):
        yield slice(at, at + _MESSAGE_BYTES)
        comm.progress()


def _copy(comm: Communicator, data: _Bytes) -> _Bytes:
    """Return a copy of an array, and report progress."""
    copy = np.empty_like(data)
    for part in _parts(comm, len(data)):
        copy[part] = data[part]
    return copy


def _bytes(comm: Communicator, described: Description, name: str, index: int) -> _Bytes:
    """Return a box's bytes as an array, in the dtype that it has."""
    tensor = local_box(described, name, index)
    memory = own_bytes(tensor)
    if memory is not None:
        # Dense and on the host: no copy, as the caller only reads it.
        return np.frombuffer(memory, np.uint8)
    data, at = np.empty(int(tensor.nbytes), np.uint8), 0
    for _, part in Staging().parts(tensor, _dtype_of(described.tensors[name])):
        data[at : at + len(part)] = part
        at += len(part)
        comm.progress()
    return data


def _messages(sizes: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Yield each message's parts, at most 4 MiB together: (box number, begin, end), in bytes, of whole elements."""
    message: list[tuple[int, int, int]] = []
    bytes_left = _MESSAGE_BYTES
    for number, size in enumerate(sizes):
        at = 0
        while at < size:
            part = min(size - at, bytes_left - bytes_left % _ALIGN_BYTES)
            if not part:
                yield message
                message, bytes_left = [], _MESSAGE_BYTES
                continue
            message.append((number, at, at + part))
            at += part
            bytes_left -= part
    if message:
        yield message


def _send(comm: Communicator, dst: int, described: Description, boxes: Sequence[tuple[str, int]]) -> None:
    sizes = [local_box(described, name, index).nbytes for name, index in boxes]
    data: _Bytes = np.empty(0, np.uint8)  # the bytes of box `loaded`
    loaded = -1
    for message in _messages(sizes):
        parts = []
        for number, begin, end in message:
            if number != loaded:
                # A box on a GPU is copied to the host once, however many messages it takes.
                data, loaded = _bytes(comm, described, *boxes[number]), number
            parts.append(data[begin:end])
        comm.send(np.concatenate(parts), dst)
        comm.progress()


def _receive(
    comm: Communicator, src: int, results: Sequence[tuple[BoxReduction, _Bytes]], described: Description
) -> None:
    memory = np.empty(min(_MESSAGE_BYTES, sum(result.nbytes for _, result in results)), np.uint8)
    for message in _messages([result.nbytes for _, result in results]):
        data = memory[: sum(end - begin for _, begin, end in message)]
        comm.recv(data, src)
        comm.progress()
        at = 0
        for number, begin, end in message:
            reduction, result = results[number]
            # A copy, as an array of the dtype needs aligned memory, which a part of a message may not have.
            _reduce(described, reduction, result[begin:end], data[at : at + end - begin].copy())
            at += end - begin


def _reduce(described: Description, reduction: BoxReduction, result: _Bytes, others: _Bytes) -> None:
    """Reduce elements, given as bytes, into `result`."""
    dtype = _dtype_of(described.tensors[reduction.name])
    reduce_into(reduction.op, array_over(result, dtype, (-1,)), array_over(others, dtype, (-1,)))


def _dtype_of(local: LocalTensor) -> str:
    """Return the dtype of a tensor in memory, which a cast changes only in the output."""
    return memory_of(local.tensors[0], local.shard.name).dtype


def _with_bytes(local: LocalTensor, index: int, data: _Bytes) -> LocalTensor:
    """Return `local` with other bytes for one of its boxes."""
    as_numpy = isinstance(local.tensors[index], np.ndarray)
    tensor = from_bytes(data, _dtype_of(local), local.shard.boxes[index].shape, as_numpy=as_numpy)
    return replace(local, tensors=(*local.tensors[:index], tensor, *local.tensors[index + 1 :]), memory=())
