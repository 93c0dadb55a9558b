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
from statexchange.tensors import TensorLike, array_over, checked_dtype, from_bytes, own_bytes

__all__ = ["reduce_copies"]

_Bytes: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]"

_MESSAGE_BYTES = 4 << 20


def reduce_copies(comm: Communicator, described: Description, reductions: Sequence[BoxReduction]) -> Description:
    """Return the description with reduced values for the boxes that this rank writes. Collective.

    `reductions` must be equal on all ranks. Copies are reduced in their order and in the dtype that they have.
    The live state does not change. Memory: the size of this rank's reduced boxes, and of a copy that this rank itself
    adds or sends if it lies on a GPU or is strided.
    """
    tensors = dict(described.tensors)
    # All ranks walk the copies in one order, so that each send meets its receive, and no two ranks wait for each other.
    for reduction in reductions:
        name, index = reduction.name, reduction.index
        result: _Bytes | None = None
        for src, copy_index in reduction.copies:
            if comm.rank == reduction.holder:
                if result is None:
                    result = _copied(comm, local_box(described, name, index), _dtype_of(tensors[name]))
                copy = None if src != comm.rank else _bytes(comm, described, name, copy_index)
                _reduce(comm, reduction.op, _dtype_of(tensors[name]), result, copy, src)
            elif comm.rank == src:
                data = _bytes(comm, described, name, copy_index)
                for part in _parts(comm, len(data)):
                    comm.send(data[part], reduction.holder)
        if result is not None:
            tensors[name] = _with_bytes(tensors[name], index, result)
    return replace(described, tensors=tensors)


def _reduce(comm: Communicator, op: str, dtype: str, result: _Bytes, copy: _Bytes | None, src: int) -> None:
    """Reduce a copy of the rank `src` into `result`; it is received in parts if this rank does not have it."""
    for part in _parts(comm, len(result)):
        others = np.empty_like(result[part]) if copy is None else copy[part]
        if copy is None:
            comm.recv(others, src)
        reduce_into(op, array_over(result[part], dtype, (-1,)), array_over(others, dtype, (-1,)))


def _parts(comm: Communicator, nbytes: int) -> Iterator[slice]:
    """Yield slices of at most one message's bytes, and report progress after each."""
    for at in range(0, nbytes, _MESSAGE_BYTES):
        yield slice(at, at + _MESSAGE_BYTES)
        comm.progress()


def _bytes(comm: Communicator, described: Description, name: str, index: int) -> _Bytes:
    """Return a box's bytes as an array, in the dtype that it has."""
    tensor = local_box(described, name, index)
    memory = own_bytes(tensor)
    if memory is not None:
        # Dense and on the host: no copy, as the caller only reads it.
        return np.frombuffer(memory, np.uint8)
    return _copied(comm, tensor, _dtype_of(described.tensors[name]))


def _copied(comm: Communicator, tensor: TensorLike, dtype: str) -> _Bytes:
    """Return a copy of a tensor's bytes, made in parts: a rank that shows no progress is not waited for that long."""
    data, at = np.empty(int(tensor.nbytes), np.uint8), 0
    for _, part in Staging().parts(tensor, dtype):
        data[at : at + len(part)] = part
        at += len(part)
        comm.progress()
    return data


def _dtype_of(local: LocalTensor) -> str:
    """Return the dtype of a tensor in memory, which a cast changes only in the output."""
    return checked_dtype(local.tensors[0], local.shard.name)


def _with_bytes(local: LocalTensor, index: int, data: _Bytes) -> LocalTensor:
    """Return `local` with other bytes for one of its boxes."""
    as_numpy = isinstance(local.tensors[index], np.ndarray)
    tensor = from_bytes(data, _dtype_of(local), local.shard.boxes[index].shape, as_numpy=as_numpy)
    return local._replace(tensors=(*local.tensors[:index], tensor, *local.tensors[index + 1 :]), memory=())
