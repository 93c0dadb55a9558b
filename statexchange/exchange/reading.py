"""Live tensors' boxes out of a source's files, and out of object stores once for all ranks of a host that want them."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from statexchange.comm.communicator import Communicator
from statexchange.errors import CorruptError
from statexchange.exchange.describe import HeldTensor
from statexchange.exchange.staging import Staging
from statexchange.layout.shards import ITEMSIZE, Box, intersect
from statexchange.sources import Extent
from statexchange.storage.files import OpenFiles
from statexchange.storage.regions import read_part

__all__ = ["Job", "dealt", "read_all"]

Wanted = tuple[str, Box]
"""A tensor's name in the source, and a box of it."""


@dataclass(frozen=True, slots=True)
class Job:
    """A live tensor, and the stored boxes that fill it."""

    name: str
    held: HeldTensor
    boxes: Mapping[Box, Extent]


def dealt(jobs: Sequence[Job], comm: Communicator) -> dict[Wanted, list[int]]:
    """For each box that several ranks of this host want those ranks, first the one that is to read it. Collective.

    Each reads about as much. The boxes come in an order that all ranks share.
    """
    ours = [[name, box.to_json()] for name, box in _places(jobs)]
    holders: dict[Wanted, list[int]] = {}
    for rank, theirs in enumerate(comm.all_gather_object(ours)):
        if comm.nodes[rank] == comm.node_rank:
            for name, box in theirs:
                holders.setdefault((name, Box.from_json(box)), []).append(rank)
    load = dict.fromkeys(range(comm.world_size), 0)
    found = {}
    for wanted in sorted(holders, key=lambda wanted: (wanted[0], wanted[1].offsets, wanted[1].shape)):
        ranks = holders[wanted]
        if len(ranks) > 1:
            reader = min(ranks, key=lambda rank: (load[rank], rank))
            load[reader] += math.prod(wanted[1].shape)
            found[wanted] = [reader, *(rank for rank in ranks if rank != reader)]
    return found


def _places(jobs: Sequence[Job]) -> dict[Wanted, Any]:
    """The first live tensor of each box that is wanted here."""
    found: dict[Wanted, Any] = {}
    for job in jobs:
        for box, part in zip(job.held.shard.boxes, job.held.tensors, strict=True):
            found.setdefault((job.name, box), part if isinstance(part, np.ndarray) else part.detach())
    return found


def read_all(jobs: Sequence[Job], readers: Mapping[Wanted, Sequence[int]], comm: Communicator) -> int:
    """Fill the live tensors; returns the bytes that this rank has read.

    Not collective where `dealt` gave no `readers`; else all that they name take part.
    """
    places = _places(jobs) if readers else {}
    received = {wanted for wanted, ranks in readers.items() if comm.rank in ranks[1:]}
    with OpenFiles() as inputs:
        reading = _Reading(inputs, comm)
        for job in jobs:
            for box, part in zip(job.held.shard.boxes, job.held.tensors, strict=True):
                if (job.name, box) in received:
                    received.remove((job.name, box))  # another live tensor of this name is read
                else:
                    reading.fill(job, box, part)
    for wanted, (reader, *others) in readers.items():
        if comm.rank == reader:
            for other in others:
                comm.send(places[wanted], other)
        elif comm.rank in others:
            comm.recv(places[wanted], reader)
            comm.progress()
    return reading.nbytes


class _Reading:
    """Reads boxes of live tensors, and counts the bytes."""

    def __init__(self, inputs: OpenFiles, comm: Communicator) -> None:
        self.nbytes = 0
        self._inputs = inputs
        self._comm = comm
        self._staging = Staging()

    def fill(self, job: Job, target: Box, part: Any) -> None:
        """Read one box of a live tensor, which `part` holds."""
        needed = []
        for box, extent in job.boxes.items():
            shared = intersect(box, target)
            if shared is not None:
                whole = extent.digest is not None and shared == box
                needed.append((box, extent, shared, _Digest() if whole else None))
        for window, memory in self._staging.targets(part, job.held.shard.dtype):
            placed = Box(tuple(map(operator.add, window.offsets, target.offsets)), window.shape)
            for box, extent, shared, digest in needed:
                inside = shared if placed == target else intersect(shared, placed)
                if inside is not None:
                    self._read(job, memory, placed, inside, box, extent, digest)
        for _, extent, _, digest in needed:
            if digest is not None:
                digest.check(job.name, extent)

    def _read(
        self, job: Job, memory: memoryview, target: Box, shared: Box, box: Box, extent: Extent, digest: _Digest | None
    ) -> None:
        dtype = job.held.shard.dtype
        lies = (extent.path, extent.begin, extent.strides, box)
        hasher = digest.hasher if digest is not None else None
        read_part(self._inputs, *lies, shared, dtype, memory, target, hasher, self._comm.progress)
        self.nbytes += shared.numel * ITEMSIZE[dtype]


class _Digest:
    """The digest of a stored box that is read whole: its parts in all windows of the target follow each other."""

    def __init__(self) -> None:
        self.hasher = xxhash.xxh3_128()

    def check(self, name: str, extent: Extent) -> None:
        """CorruptError unless the bytes are those that were written."""
        found = self.hasher.hexdigest()
        if found != extent.digest:
            raise CorruptError(
                "bytes differ from their digest", name=name, path=extent.path, expected=extent.digest, found=found
            )
