"""Read the boxes of live tensors from a checkpoint; from an object store each box once per host."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from statexchange.comm.communicator import Communicator
from statexchange.errors import CorruptError, StorageError
from statexchange.exchange.staging import Staging, memory_of
from statexchange.processes import collector_paused
from statexchange.sharding import records
from statexchange.sharding.shards import Box, intersect
from statexchange.state.describe import LocalTensor
from statexchange.storage.byte_range import ByteRange
from statexchange.storage.regions import READ_AHEAD_BYTES, BoxDigest, Run, one_run, read_part, to_global
from statexchange.storage.store import StoredFile
from statexchange.tensors import ITEMSIZE, itemsize_of

__all__ = ["Overflows", "ReadItem", "WantedBox", "assign_readers", "read_all", "read_box"]


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
    *,
    reads_again: bool = False,
) -> tuple[int, list[Overflows]]:
    """Fill the live tensors; return the bytes that this rank has read, and boxes in which casts made values infinite.

    Not collective without `readers` (from `assign_readers`); otherwise all ranks that they name must call this.
    Raise ReplacedError if a file may have changed since it was opened. After an error a live tensor is as it was, or
    has the values that were saved, or NaN; the error says how many have changed, also by a first reading of another
    version if this one `reads_again`.
    """
    tensors = _first_tensors(items) if readers else {}
    received = {wanted for wanted, ranks in readers.items() if comm.rank in ranks[1:]}
    reading = _Reading(comm, on_progress)
    with collector_paused():
        for item in items:
            for box, tensor in zip(item.local.shard.boxes, item.local.tensors, strict=True):
                wanted = WantedBox(item.name, box, item.local.shard.dtype) if received else None
                if wanted in received:
                    received.remove(wanted)  # only the first live tensor of a box receives it; any others read it
                else:
                    reading.add(item, box, tensor)
    try:
        reading.run()
        for file in reading.files:
            file.check_current()
    except (CorruptError, StorageError) as error:
        raise error.located(advice=reading.changes(len(items), reads_again=reads_again)) from error.__cause__
    for wanted, (reader, *others) in readers.items():
        if comm.rank == reader:
            for other in others:
                comm.send(tensors[wanted], other)
        elif comm.rank in others:
            comm.recv(tensors[wanted], reader)
            comm.progress()
    return reading.nbytes, reading.overflows


def read_box(item: ReadItem, target: Box, tensor: Any, comm: Communicator) -> None:
    """Read the box `target` of an item into `tensor`. Not collective."""
    reading = _Reading(comm)
    reading.add(item, target, tensor)
    reading.run()


class _Piece(NamedTuple):
    """A small run of bytes, from byte `begin` of a file on, and the memory that it fills: block `region` of `box`."""

    begin: int
    memory: memoryview
    region: Box
    box: Box
    byte_range: ByteRange
    item: ReadItem

    def check(self, data: memoryview) -> None:
        """Raise CorruptError if the bytes that were read differ from a digest."""
        digest = BoxDigest(self.byte_range, self.box, self.item.stored, region=self.region)
        if digest:
            digest.update(self.region, data)
            digest.check(self.item.name)


class _Target(NamedTuple):
    """A live tensor, the memory of `box`, and what fills it: stored boxes, their byte ranges and the blocks to read."""

    item: ReadItem
    box: Box
    tensor: Any
    needed: Sequence[tuple[Box, ByteRange, Box]]


class Overflows(NamedTuple):
    """The number of finite elements in a box of the source's tensor `name` that became infinite by a cast."""

    name: str
    box: Box
    num_elements: int

    def to_json(self) -> list[Any]:
        """Return a JSON value that `from_json` reads."""
        return [self.name, self.box.to_json(), self.num_elements]

    @classmethod
    def from_json(cls, raw: Any) -> Overflows:
        """Return the record that `to_json` wrote; raise ValueError for anything else."""
        name, box, num_elements = records.items(raw, lambda part: part, 3)
        return cls(records.text(name), Box.from_json(box), records.count(num_elements))


class _Reading:
    """Reads boxes of live tensors, and counts the bytes.

    Small pieces that are near each other in a file are read together: a request to an object store takes as long as
    reading megabytes, and most of the time for a small tensor is that of a system call.
    """

    def __init__(self, comm: Communicator, on_progress: Callable[[int, int], None] | None = None) -> None:
        self.nbytes = 0
        self.overflows: list[Overflows] = []
        self.files: dict[StoredFile, list[_Piece]] = {}  # each that is read, with its small pieces
        self._alone: list[_Target] = []  # with pieces that are not small, or not one run in memory
        self._comm = comm
        self._total = 0
        self._on_progress = on_progress
        self._staging = Staging()
        self._buffer = memoryview(b"")  # what is read together
        self._changed: set[int] = set()  # ids of the items of which a byte may have changed
        self._is_invalid = False  # whether the tensor that is read now has bytes that are not checked yet

    def add(self, item: ReadItem, target: Box, tensor: Any) -> None:
        """Let the calls below read the box `target` of a live tensor into `tensor`, the memory of that box."""
        dtype = item.stored
        # `prove_cover` has found that no two stored boxes overlap, so one that equals the target is all it needs.
        stored_whole = item.boxes.get(target)
        stored_boxes = item.boxes if stored_whole is None else {target: stored_whole}
        needed = []
        for box, byte_range in stored_boxes.items():
            region = intersect(box, target)
            if region is not None:
                needed.append((box, byte_range, region))
                self._total += region.numel * ITEMSIZE[dtype]
        runs = [_small_run(*stored, dtype, target) for stored in needed]
        own = memory_of(tensor, dtype) if any(runs) else None
        others = []
        for (box, byte_range, region), run in zip(needed, runs, strict=True):
            pieces = self.files.setdefault(byte_range.file, [])
            if own is None or run is None:
                others.append((box, byte_range, region))
            else:
                memory = own[run.in_memory : run.in_memory + run.nbytes]
                pieces.append(_Piece(run.in_file, memory, region, box, byte_range, item))
        if others:
            self._alone.append(_Target(item, target, tensor, others))

    def run(self) -> None:
        """Read all that was added."""
        with collector_paused():
            self._read_small(remote=False)
        self._read_small(remote=True)  # clients of object stores leave garbage that holds the bytes of a request
        for target in self._alone:
            try:
                self._read_alone(target)
            except BaseException:
                self._invalidate(target)
                raise

    def changes(self, num_items: int, *, reads_again: bool) -> str:
        """Return what has changed in this rank's live tensors, `num_items` in all, as the end of a message."""
        where = f" of rank {self._comm.rank}" if self._comm.world_size > 1 else ""
        if not self._changed and not reads_again:
            return f"the state{where} is unchanged"
        text = f"{len(self._changed)} of {num_items} tensors{where} have been filled"
        if self._is_invalid:
            text += ", this one with NaN (all bits set)"
        if reads_again:
            return f"{text}, the others may have values of a version that was replaced"
        return f"{text}, the others are as they were"

    def _read_small(self, *, remote: bool) -> None:
        """Read the small pieces of files that are remote, or of those that are not."""
        for file, pieces in self.files.items():
            if file.is_remote == remote:
                pieces.sort(key=operator.attrgetter("begin"))
                for together in _neighbours(pieces, _limits(file)):
                    self._read_together(file, together)
                pieces.clear()

    def _read_alone(self, target: _Target) -> None:
        item, dtype = target.item, target.item.stored
        digests = [BoxDigest(stored, box, dtype, region=region) for box, stored, region in target.needed]
        self._is_invalid = memory_of(target.tensor, dtype) is not None  # it is read into, not into a buffer
        for window, memory in self._staging.targets(target.tensor, dtype):
            placed = to_global(window, target.box)
            for (box, stored, region), digest in zip(target.needed, digests, strict=True):
                inside = region if placed == target.box else intersect(region, placed)
                if inside is not None:
                    read_part(stored, box, inside, dtype, memory, placed, digest, self._count)
            if placed.ends == target.box.ends:  # before the last window is copied
                for digest in digests:
                    digest.check(item.name)
            self._is_invalid = True  # until all its digests have been compared
        self._changed.add(id(item))
        self._is_invalid = False
        if self._staging.num_overflows:
            self.overflows.append(Overflows(item.name, target.box, self._staging.num_overflows))

    def _invalidate(self, target: _Target) -> None:
        """Fill a tensor of which only a part was read, or bytes that differ from their digest: its values are gone.

        NaN is never taken for the values that were saved, and an integer with all bits set hardly is.
        """
        if self._is_invalid:
            self._changed.add(id(target.item))
            dtype = target.item.stored
            for _, memory in self._staging.targets(target.tensor, dtype):
                np.frombuffer(memory, np.uint8).fill(1 if dtype == "BOOL" else 0xFF)

    def _read_together(self, file: StoredFile, pieces: Sequence[_Piece]) -> None:
        begin, last = pieces[0].begin, pieces[-1]
        nbytes = last.begin + len(last.memory) - begin
        if len(self._buffer) < nbytes:
            self._buffer = memoryview(bytearray(max(nbytes, _limits(file).together)))
        file.read_into(self._buffer[:nbytes], begin)
        parts = [self._buffer[piece.begin - begin :][: len(piece.memory)] for piece in pieces]
        # Live memory changes only after all digests of what was read together have been compared.
        for piece, data in zip(pieces, parts, strict=True):
            piece.check(data)
        for piece, data in zip(pieces, parts, strict=True):
            self._changed.add(id(piece.item))
            piece.memory[:] = data
        self._count(sum(map(len, parts)))

    def _count(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self._comm.progress()
        if self._on_progress is not None:
            self._on_progress(self.nbytes, self._total)


class _Limits(NamedTuple):
    """The most bytes of a small piece, between two pieces that are read together, and of all that are read together."""

    piece: int
    gap: int
    together: int


# A system call costs what reading 4 KiB costs. What is read together is digested and copied in the processor's cache.
_LOCAL = _Limits(piece=64 << 10, gap=4 << 10, together=256 << 10)
# Any request takes longer than reading 64 KiB more. Larger gaps would let each rank read the other ranks' parts, too.
_REMOTE = _Limits(piece=READ_AHEAD_BYTES, gap=64 << 10, together=READ_AHEAD_BYTES)


def _limits(file: StoredFile) -> _Limits:
    return _REMOTE if file.is_remote else _LOCAL


def _small_run(box: Box, stored: ByteRange, shared: Box, dtype: str, target: Box) -> Run | None:
    """Return where a small piece lies if it is one run in the file and in memory; else None."""
    run = one_run(stored, box, shared, dtype, target)
    return None if run is None or run.nbytes > _limits(stored.file).piece else run


def _neighbours(pieces: Sequence[_Piece], limits: _Limits) -> Iterator[list[_Piece]]:
    """Divide pieces, in the order of a file, into those that are read together."""
    together: list[_Piece] = []
    for piece in pieces:
        if together:
            first, last = together[0], together[-1]
            gap = piece.begin - last.begin - len(last.memory)
            nbytes = piece.begin + len(piece.memory) - first.begin
            if not 0 <= gap <= limits.gap or nbytes > limits.together:
                yield together
                together = []
        together.append(piece)
    if together:
        yield together
