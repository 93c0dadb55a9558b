"""Reduce copies that differ into one, at the rank that writes the box."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from statexchange.comm.communicator import Communicator
from statexchange.exchange.rank_metadata import local_box
from statexchange.exchange.staging import Staging
from statexchange.formats.tensor_reader import reduce_into
from statexchange.sharding.shards import Piece
from statexchange.sharding.write_plan import WritePlan
from statexchange.state.describe import Description, LocalTensor
from statexchange.tensors import array_over, checked_dtype, from_bytes, own_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["reduce_copies"]

_MESSAGE_BYTES = 4 << 20


def reduce_copies(comm: Communicator, described: Description, plan: WritePlan) -> Description:
    """Return the description with reduced values for the boxes that this rank writes. Collective.

    Copies are reduced in their order and in the dtype that they have: by "max" the copies [1.0, 4.0] and [3.0, 2.0]
    become [3.0, 4.0]. The live state does not change. Memory: the size of this rank's reduced boxes, and of a copy that
    this rank itself adds or sends if it lies on a GPU or is strided.
    """
    tensors = dict(described.tensors)
    # All ranks walk the copies in one order, so that each send meets its receive, and no two ranks wait for each other.
    for tensor in plan.tensors:
        name, op = tensor.source, tensor.reduce
        if op is None:
            continue
        for piece in tensor.pieces:
            result = _reduced(comm, described, name, op, piece)
            if result is not None:
                tensors[name] = _with_bytes(tensors[name], piece.box_index, result)
    return replace(described, tensors=tensors)


def _reduced(comm: Communicator, described: Description, name: str, op: str, piece: Piece) -> NDArray[np.uint8] | None:
    """Return the bytes of all copies of a box, reduced, on the rank that writes it; None if it has no other copy."""
    result: NDArray[np.uint8] | None = None
    for src, copy_index in piece.replicas:
        if comm.rank == piece.holder:
            dtype = _dtype_of(described.tensors[name])
            # Only the rank that writes the box needs a copy of it: it reduces in place.
            if result is None:
                result = Staging().bytes_of(local_box(described, name, piece.box_index), dtype, comm.progress)
            copy = None if src != comm.rank else _bytes(comm, described, name, copy_index)
            _reduce(comm, op, dtype, result, copy, src)
        elif comm.rank == src:
            data = _bytes(comm, described, name, copy_index)
            for part in _parts(comm, len(data)):
                comm.send(data[part], piece.holder)
    return result


def _reduce(
    comm: Communicator, op: str, dtype: str, result: NDArray[np.uint8], copy: NDArray[np.uint8] | None, src: int
) -> None:
    """Reduce a copy of the rank `src` into `result`; it is received in parts if this rank does not have it."""
    for part in _parts(comm, len(result)):
        if copy is None:
            received = np.empty_like(result[part])
            comm.recv(received, src)
        else:
            received = copy[part]
        reduce_into(op, array_over(result[part], dtype, (-1,)), array_over(received, dtype, (-1,)))


def _parts(comm: Communicator, nbytes: int) -> Iterator[slice]:
    """Yield slices of at most one message's bytes, and report progress after each."""
    for at in range(0, nbytes, _MESSAGE_BYTES):
        yield slice(at, at + _MESSAGE_BYTES)
        comm.progress()


def _bytes(comm: Communicator, described: Description, name: str, index: int) -> NDArray[np.uint8]:
    """Return a box's bytes as an array, in the dtype that it has."""
    tensor = local_box(described, name, index)
    memory = own_bytes(tensor)
    if memory is not None:
        # Dense and on the host: no copy, as the caller only reads it.
        return np.frombuffer(memory, np.uint8)
    return Staging().bytes_of(tensor, _dtype_of(described.tensors[name]), comm.progress)


def _dtype_of(local: LocalTensor) -> str:
    """Return the dtype of a tensor in memory, which a cast changes only in the output."""
    return checked_dtype(local.tensors[0], local.shard.name)


def _with_bytes(local: LocalTensor, index: int, data: NDArray[np.uint8]) -> LocalTensor:
    """Return `local` with other bytes for one of its boxes."""
    # Without `memory`, which is of the live tensors: what is written comes from `tensors` then.
    as_numpy = isinstance(local.tensors[index], np.ndarray)
    tensor = from_bytes(data, _dtype_of(local), local.shard.boxes[index].shape, as_numpy=as_numpy)
    return local._replace(tensors=(*local.tensors[:index], tensor, *local.tensors[index + 1 :]), memory=())
