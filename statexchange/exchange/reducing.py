"""Reduce copies that differ into one, at the rank that writes the box."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from statexchange.comm.communicator import Communicator
from statexchange.exchange.rank_metadata import local_box
from statexchange.exchange.staging import Staging
from statexchange.formats.tensor_reader import reduce_into
from statexchange.sharding.write_plan import BoxReduction
from statexchange.state.describe import Description
from statexchange.storage.regions import windows
from statexchange.tensors import ITEMSIZE, TensorLike, array_over, checked_dtype, from_bytes

__all__ = ["reduce_copies"]

_MESSAGE_BYTES = 4 << 20


def reduce_copies(comm: Communicator, described: Description, reductions: Sequence[BoxReduction]) -> Description:
    """Return the description with reduced values for the boxes that this rank writes. Collective.

    `reductions` must be equal on all ranks. Copies are reduced in their order and in the dtype that they have: by "max"
    the copies [1.0, 4.0] and [3.0, 2.0] become [3.0, 4.0]. The live state does not change. Memory: the size of this
    rank's reduced boxes.
    """
    tensors = dict(described.tensors)
    # All ranks walk the copies in one order, so that each send meets its receive, and no two ranks wait for each other.
    for reduction in reductions:
        name, index, holder = reduction.name, reduction.index, reduction.holder
        if comm.rank == holder:
            live, local = local_box(described, name, index), tensors[name]
            dtype = checked_dtype(live, name)  # that in memory, which a cast changes only in the output
            # Only the rank that writes the box needs a copy of it: it reduces in place.
            result = Staging().bytes_of(live, dtype, comm.progress)
            for src, copy_index in reduction.copies:
                at = 0
                copy = _received(comm, live, dtype, src)
                if src == comm.rank:
                    copy = _parts(comm, local_box(described, name, copy_index), dtype)
                for part in copy:
                    target = array_over(result[at : at + part.nbytes], dtype, (-1,))
                    reduce_into(reduction.op, target, array_over(part, dtype, (-1,)))
                    at += part.nbytes
            tensor = from_bytes(result, dtype, local.shard.boxes[index].shape, as_numpy=isinstance(live, np.ndarray))
            # Without `memory`, which is of the live tensors: what is written comes from `tensors` then.
            in_memory = (*local.tensors[:index], tensor, *local.tensors[index + 1 :])
            tensors[name] = local._replace(tensors=in_memory, memory=())
            continue
        for src, copy_index in reduction.copies:
            if src == comm.rank:
                live = local_box(described, name, copy_index)
                for part in _parts(comm, live, checked_dtype(live, name)):
                    comm.send(np.frombuffer(part, np.uint8), holder)
    return replace(described, tensors=tensors)


def _parts(comm: Communicator, tensor: TensorLike, dtype: str) -> Iterator[memoryview]:
    """Yield the bytes of a copy of this rank, message by message."""
    for _, part in Staging(_MESSAGE_BYTES).parts(tensor, dtype):
        yield part
        comm.progress()


def _received(comm: Communicator, like: TensorLike, dtype: str, src: int) -> Iterator[memoryview]:
    """Yield the bytes of a copy that another rank sends, of a tensor of the same shape."""
    for window in windows(tuple(like.shape), ITEMSIZE[dtype], _MESSAGE_BYTES):
        part = np.empty(window.numel * ITEMSIZE[dtype], np.uint8)
        comm.recv(part, src)
        yield part.data
        comm.progress()
