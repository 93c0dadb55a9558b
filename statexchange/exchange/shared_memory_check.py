"""After a load: check that live tensors which share memory have the values of all of their sources.

Tied weights, and views of one buffer, are filled in the order of the source's files, and the memory has the values of
the last one. That is right only if the source has equal values for all of them. So tensors whose memory overlaps and
that were filled from different stored bytes are read a second time, part by part, and compared with what the memory has
now.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from statexchange.comm.communicator import Communicator
from statexchange.errors import ReplicaError, excerpt
from statexchange.exchange.reading import ReadItem, read_box
from statexchange.processes import collector_paused
from statexchange.sharding.shards import Box, full_box
from statexchange.storage.regions import slices_within, to_global, windows
from statexchange.tensors import is_array, overlap_groups, same_memory

__all__ = ["check_shared_memory"]

_Part: TypeAlias = tuple[ReadItem, Box, Any]
"""A live tensor with the item of which it is a part, and the box that fills it."""

_WINDOW_BYTES = 8 << 20


def check_shared_memory(items: Sequence[ReadItem], comm: Communicator) -> None:
    """Raise ReplicaError if live tensors share memory for which the source has different values.

    Not collective.

    Args:
        items: the items, whose tensors are filled.
        comm: the communicator to which progress is reported.
    """
    with collector_paused():
        groups = list(_overlapping(items))
    for group in groups:
        first = group[0]
        if all(_is_same(first, other) for other in group[1:]):
            continue
        for part in group:
            if not _has_its_values(part, comm):
                item = part[0]
                names = sorted({other.name for other, *_ in group} - {item.name})
                raise ReplicaError(
                    f"it shares memory with {excerpt(names[0]) if names else 'another part of itself'}, for which the "
                    "source has other values: exclude one of the two, or let each have its own memory",
                    name=item.name,
                )


def _overlapping(items: Sequence[ReadItem]) -> Iterator[list[_Part]]:
    """Group the boxes of all items by memory: yield those whose spans, from first to last byte, overlap."""
    parts = [
        (item, box, tensor)
        for item in items
        for box, tensor in zip(item.local.shard.boxes, item.local.tensors, strict=True)
    ]
    for group in overlap_groups(tensor for *_, tensor in parts):
        yield [parts[number] for number in group]


def _is_same(a: _Part, b: _Part) -> bool:
    """Whether two parts are the same memory, filled from the same stored bytes."""
    (item, box, tensor), (other, other_box, other_tensor) = a, b
    is_tied = same_memory(tensor) == same_memory(other_tensor)
    return is_tied and box == other_box and item.stored == other.stored and item.boxes == other.boxes


def _has_its_values(part: _Part, comm: Communicator) -> bool:
    """Whether the memory has the bits that the source has for this part."""
    item, box, tensor = part
    live = tensor if is_array(tensor) else tensor.detach()
    for window in windows(tuple(live.shape), live.itemsize, _WINDOW_BYTES):
        found = live[slices_within(window, full_box(tuple(live.shape)))]
        read = np.empty(window.shape, live.dtype) if is_array(live) else live.new_empty(window.shape)
        read_box(item, to_global(window, box), read, comm)
        if not _are_same_bits(found, read):
            return False
    return True


def _are_same_bits(a: Any, b: Any) -> bool:
    if is_array(a):
        return bool(np.ascontiguousarray(a).tobytes() == b.tobytes())
    import torch

    plain = a.resolve_conj().resolve_neg()  # such a view was filled through it, so that the memory has other bits
    return torch.equal(plain.contiguous().reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
