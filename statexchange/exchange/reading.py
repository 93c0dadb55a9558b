"""Read the boxes of live tensors from a checkpoint; from an object store each box once per host."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from statexchange.comm.communicator import Communicator
from statexchange.exchange.staging import Staging
from statexchange.sharding.shards import Box, intersect
from statexchange.state.describe import HeldTensor
from statexchange.storage.byte_range import ByteRange
from statexchange.storage.regions import BoxDigest, read_part, shifted
from statexchange.storage.store import StoredFile
from statexchange.tensors import ITEMSIZE

__all__ = ["Job", "assign_readers", "read_all"]

Wanted = tuple[str, Box]
"""A tensor's name in the source, and a box of it."""


@dataclass(frozen=True, slots=True)
class Job:
    """A live tensor, and the stored boxes that fill it."""

    name: str
    held: HeldTensor
    boxes: Mapping[Box, ByteRange]


def assign_readers(jobs: Sequence[Job], comm: Communicator) -> dict[Wanted, list[int]]:
    """Choose, for each box that several ranks of this host need, one rank to read it. Collective.

    Returns {box: [reader, *receivers]} in an order equal on all ranks; the load is balanced by elements.
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

    Raises ReplacedError if a file that was read may have changed since it was opened.
    Not collective without `readers` (of `assign_readers`); else all ranks that they name take part.
    """
    places = _places(jobs) if readers else {}
    received = {wanted for wanted, ranks in readers.items() if comm.rank in ranks[1:]}
    reading = _Reading(comm)
    for job in jobs:
        for box, part in zip(job.held.shard.boxes, job.held.tensors, strict=True):
            if (job.name, box) in received:
                received.remove((job.name, box))  # another live tensor of this name is read
            else:
                reading.fill(job, box, part)
    for file in reading.files:
        file.check_unchanged()
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

    def __init__(self, comm: Communicator) -> None:
        self.nbytes = 0
        self.files: dict[StoredFile, None] = {}  # that were read, each once
        self._comm = comm
        self._staging = Staging()

    def fill(self, job: Job, target: Box, part: Any) -> None:
        """Read one box of a live tensor, which `part` holds."""
        needed = []
        for box, stored in job.boxes.items():
            shared = intersect(box, target)
            if shared is not None:
                digest = BoxDigest(stored, box, job.held.shard.dtype, region=shared)
                needed.append((box, stored, shared, digest))
                self.files[stored.file] = None
        for window, memory in self._staging.targets(part, job.held.shard.dtype):
            placed = shifted(window, target)
            for box, stored, shared, digest in needed:
                inside = shared if placed == target else intersect(shared, placed)
                if inside is not None:
                    dtype = job.held.shard.dtype
                    read_part(stored, box, inside, dtype, memory, placed, digest, self._comm.progress)
                    self.nbytes += inside.numel * ITEMSIZE[dtype]
        for *_, digest in needed:
            digest.check(job.name)
