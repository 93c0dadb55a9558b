"""Read the boxes of live tensors from a checkpoint; from an object store each box once per host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from statexchange.comm.communicator import Communicator
from statexchange.exchange.staging import Staging
from statexchange.processes import collector_paused
from statexchange.sharding import records
from statexchange.sharding.shards import Box, intersect
from statexchange.state.describe import LocalTensor
from statexchange.storage.byte_range import ByteRange
from statexchange.storage.regions import BoxDigest, read_part, to_global
from statexchange.storage.store import StoredFile
from statexchange.tensors import ITEMSIZE, itemsize_of

__all__ = ["ReadItem", "WantedBox", "assign_readers", "read_all", "read_box"]


@dataclass(frozen=True, slots=True)
class WantedBox:
    """A box of the source's tensor `name`, to be read into memory of dtype `dtype`."""

    name: str
    box: Box
    dtype: str

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value that `from_json` reads."""
        return {"name": self.name, "box": self.box.to_json(), "dtype": self.dtype}

    @classmethod
    def from_json(cls, raw: Any) -> WantedBox:
        """Return the box that `to_json` wrote; raise ValueError for anything else."""
        name, box, dtype = records.fields(raw, "name", "box", "dtype")
        itemsize_of(dtype)
        return cls(records.text(name), Box.from_json(box), dtype)


class ReadItem(NamedTuple):
    """A live tensor to fill, and the stored boxes of dtype `stored` that fill it; values are cast if dtypes differ."""

    name: str
    local: LocalTensor
    boxes: Mapping[Box, ByteRange]
    stored: str


def assign_readers(items: Sequence[ReadItem], comm: Communicator) -> dict[WantedBox, list[int]]:
    """Choose, for each box that several ranks of this host need, one rank to read it. Collective.

    Return {box: [reader, *receivers]} in an order equal on all ranks, balanced by elements.
    """
    own = [wanted.to_json() for wanted in _first_tensors(items)]
    needed_by: dict[WantedBox, list[int]] = {}
    for rank, sent in enumerate(comm.all_gather_object(own)):
        if comm.nodes[rank] == comm.node_rank:
            what = "the boxes to read"
            for wanted in records.parsed(sent, lambda raw: records.items(raw, WantedBox.from_json), what, rank):
                needed_by.setdefault(wanted, []).append(rank)
    load = dict.fromkeys(range(comm.world_size), 0)  # elements that each rank reads for others
    readers = {}
    for wanted in sorted(needed_by, key=lambda box: (box.name, box.box.offsets, box.box.shape, box.dtype)):
        ranks = needed_by[wanted]
        if len(ranks) > 1:
            reader = min(ranks, key=lambda rank: (load[rank], rank))
            load[reader] += wanted.box.numel
            readers[wanted] = [reader, *(rank for rank in ranks if rank != reader)]
    return readers


def _first_tensors(items: Sequence[ReadItem]) -> dict[WantedBox, Any]:
    """Return the first live tensor of each box that this rank needs."""
    tensors: dict[WantedBox, Any] = {}
    for item in items:
        for box, tensor in zip(item.local.shard.boxes, item.local.tensors, strict=True):
            wanted = WantedBox(item.name, box, item.local.shard.dtype)
            tensors.setdefault(wanted, tensor if isinstance(tensor, np.ndarray) else tensor.detach())
    return tensors


def read_all(
    items: Sequence[ReadItem],
    readers: Mapping[WantedBox, Sequence[int]],
    comm: Communicator,
    on_progress: Callable[[int, int], None] | None = None,
) -> int:
    """Fill the live tensors; return the bytes that this rank has read.

    Not collective without `readers` (from `assign_readers`); otherwise all ranks that they name must call this.
    Raise ReplacedError if a file may have changed since it was opened.
    """
    tensors = _first_tensors(items) if readers else {}
    received = {wanted for wanted, ranks in readers.items() if comm.rank in ranks[1:]}
    parts = []
    with collector_paused():
        for item in items:
            for box, tensor in zip(item.local.shard.boxes, item.local.tensors, strict=True):
                wanted = WantedBox(item.name, box, item.local.shard.dtype) if received else None
                if wanted in received:
                    received.remove(wanted)  # only the first live tensor of a box receives it; any others read it
                else:
                    parts.append((item, box, tensor))
    reading = _Reading(comm, sum(map(_nbytes_of, parts)) if on_progress is not None else 0, on_progress)
    for item, box, tensor in parts:
        reading.fill(item, box, tensor)
    for file in reading.files:
        file.check_unchanged()
    for wanted, (reader, *others) in readers.items():
        if comm.rank == reader:
            for other in others:
                comm.send(tensors[wanted], other)
        elif comm.rank in others:
            comm.recv(tensors[wanted], reader)
            comm.progress()
    return reading.nbytes


def read_box(item: ReadItem, target: Box, tensor: Any, comm: Communicator) -> None:
    """Read the box `target` of an item into `tensor`. Not collective."""
    _Reading(comm, 0, None).fill(item, target, tensor)


def _nbytes_of(part: tuple[ReadItem, Box, Any]) -> int:
    """Return the bytes to read for one box of a live tensor."""
    item, target, _ = part
    shared = (intersect(box, target) for box in item.boxes)
    return sum(box.numel for box in shared if box is not None) * ITEMSIZE[item.stored]


class _Reading:
    """Reads boxes of live tensors, and counts the bytes."""

    def __init__(self, comm: Communicator, total: int, on_progress: Callable[[int, int], None] | None) -> None:
        self.nbytes = 0
        self.files: dict[StoredFile, None] = {}  # read so far, each once
        self._comm = comm
        self._total = total
        self._on_progress = on_progress
        self._staging = Staging()

    def fill(self, item: ReadItem, target: Box, tensor: Any) -> None:
        """Read the box `target` of a live tensor into `tensor`, the memory of that box."""
        dtype = item.stored
        needed = []
        # `prove_cover` has found that no two stored boxes overlap, so one that equals the target is all it needs.
        stored_whole = item.boxes.get(target)
        stored_boxes = item.boxes if stored_whole is None else {target: stored_whole}
        for box, stored in stored_boxes.items():
            shared = intersect(box, target)
            if shared is not None:
                digest = BoxDigest(stored, box, dtype, region=shared)
                needed.append((box, stored, shared, digest))
                self.files[stored.file] = None
        for window, memory in self._staging.targets(tensor, dtype):
            placed = to_global(window, target)
            for box, stored, shared, digest in needed:
                inside = shared if placed == target else intersect(shared, placed)
                if inside is not None:
                    read_part(stored, box, inside, dtype, memory, placed, digest, self._count)
        for *_, digest in needed:
            digest.check(item.name)

    def _count(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self._comm.progress()
        if self._on_progress is not None:
            self._on_progress(self.nbytes, self._total)
