"""Reduce copies that differ into one, at the rank that writes the box."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from statexchange.comm.communicator import Communicator
from statexchange.exchange.rank_metadata import local_box
from statexchange.exchange.staging import MESSAGE_BYTES, Staging, received_parts
from statexchange.formats.tensor_reader import reduce_into
from statexchange.sharding.write_plan import BoxReduction
from statexchange.state.describe import Description
from statexchange.tensors import array_over, checked_dtype, from_bytes

__all__ = ["reduce_copies"]


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
                copy = received_parts(comm, tuple(live.shape), dtype, src)
                if src == comm.rank:
                    copy = Staging(MESSAGE_BYTES).parts(local_box(described, name, copy_index), dtype)
                for _, part in copy:
                    target = array_over(result[at : at + part.nbytes], dtype, (-1,))
                    reduce_into(reduction.op, target, array_over(part, dtype, (-1,)))
                    at += part.nbytes
                    comm.progress()
            tensor = from_bytes(result, dtype, local.shard.boxes[index].shape, as_numpy=isinstance(live, np.ndarray))
            # Without `memory`, which is of the live tensors: what is written comes from `tensors` then.
            in_memory = (*local.tensors[:index], tensor, *local.tensors[index + 1 :])
            tensors[name] = local._replace(tensors=in_memory, memory=())
            continue
        for src, copy_index in reduction.copies:
            if src == comm.rank:
                live = local_box(described, name, copy_index)
                for _, part in Staging(MESSAGE_BYTES).parts(live, checked_dtype(live, name)):
                    comm.send(np.frombuffer(part, np.uint8), holder)
                    comm.progress()
    return replace(described, tensors=tensors)
