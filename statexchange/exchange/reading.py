"""The tensors of a source, and reading them into live ones; each box once on a host, or in a job.

Tensors that share memory, as tied weights and views of one buffer, are filled in the order of the source's files, and
the memory has the values of the last one. That is right only if the source has equal values for all of them. So tensors
whose memory overlaps and that were filled from different stored bytes are filled a second time, which must not change
the memory.
"""

from __future__ import annotations

import copy
import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import NamedTuple, TypeAlias

import numpy as np
from xxhash import xxh3_128, xxh3_128_hexdigest

from statexchange.comm.communicator import Communicator, from_all
from statexchange.errors import (
    CorruptError,
    IncompleteError,
    ReplicaError,
    StateExchangeError,
    StorageError,
    excerpt,
)
from statexchange.exchange.holders import SpecParts, TensorParts, parts_by_name
from statexchange.exchange.staging import Staging
from statexchange.formats.save_files import ListedFiles, ListedTensor
from statexchange.formats.source import Source, SourceTensor
from statexchange.sharding.options import Replicas
from statexchange.sharding.plan import HolderLabel, holders_text, prove_cover
from statexchange.sharding.shards import Box, full_box, intersect
from statexchange.state.describe import LocalTensor
from statexchange.state.entries import SavedTensor
from statexchange.storage.regions import (
    READ_AHEAD_BYTES,
    BoxDigest,
    Run,
    in_turns,
    one_run,
    read_part,
    slices_within,
    to_global,
    windows,
)
from statexchange.storage.store import ByteRange, Prefetch, Span, StoredFile
from statexchange.tensors import (
    ITEMSIZE,
    TensorLike,
    TensorMemory,
    overlapping,
    run_bytes,
    same_memory,
)

# What a source has


class _SavedPart(NamedTuple):
    """The part of a tensor that one rank, or one file, has."""

    rank: int
    tensor: SourceTensor | ListedTensor
    path: str
    label: HolderLabel


class _StoredTensor(NamedTuple):
    """A tensor of a source.

    Attributes:
        saved: its name, dtype and shape, as a leaf of what was saved.
        parts: the parts to read from; () if they are `listed`.
        boxes: the byte range of its one box, if one part is the whole tensor; None if the boxes of several parts have
            to be put together, which costs time, and only a tensor that is loaded is worth it.
        listed: its parts by the index of a save, or of a tensor that is cut evenly over very many files, which are
            looked up where they are needed.
    """

    saved: SavedTensor
    parts: Sequence[_SavedPart]
    boxes: Mapping[Box, ByteRange] | None
    listed: TensorParts | SpecParts | None = None


class StoredTensors:
    """The tensors of a source.

    Attributes:
        source: the source.
        own_rank: this rank, if as many ranks load as have saved: its own parts come first then. Else None, and the
            lowest rank's parts come first.
        aliases: other names of tensors, with the name under which each was written.
        by_name: the tensors by name, those of `aliases` included.
        names: the names under which tensors were written.
        has_tree: whether the source is a save of ours with its state, and not tensors with a config beside them.
    """

    def __init__(self, source: Source, replicas: Replicas, comm: Communicator, aliases: Mapping[str, str]) -> None:
        self.source = source
        self._comm = comm
        self.own_rank = comm.rank if source.world_size == comm.world_size else None
        self._takes_root = replicas == "root"
        self._boxes: dict[str, Mapping[Box, ByteRange]] = {}  # what `_boxes_of_parts` has put together
        self.aliases: dict[str, str] = {}
        self.by_name: dict[str, _StoredTensor] = {}
        if isinstance(source.files, ListedFiles):
            self._add_listed(source.files)
        else:
            for name, spec in source.specs.items():
                listed = SpecParts(spec, source.files)
                saved = SavedTensor(name, spec.dtype, spec.global_shape, listed.cut_dims)
                self.by_name[name] = _StoredTensor(saved, (), None, listed)
            parts: dict[str, list[_SavedPart]] = {}
            # This rank's own file first, then by ranks: the first part of a box is the one that is read.
            for shard_file in sorted(
                source.files_without_specs, key=lambda file: (file.rank != self.own_rank, file.rank)
            ):
                path, label = shard_file.path, source.label_of(shard_file)
                for name, tensor in shard_file.tensors.items():
                    part = _SavedPart(shard_file.rank, tensor, path, label)
                    parts.setdefault(tensor.shard.name or name, []).append(part)
                self.aliases |= shard_file.aliases
            self.by_name |= self._records(parts)
        if source.manifest is not None:
            self.aliases |= source.manifest.get("aliases", {})
        self.aliases |= aliases
        self.names = frozenset(self.by_name)
        # As text: to decode the trees of all ranks takes longer. A name with this word in it does no harm.
        has_leaves = any('"leaf"' in text for text in source.configs.values())
        self.has_tree = has_leaves or (bool(source.configs) and not self.names)
        # A tied tensor is written once. A saved tree has all its names, and errors give the one that is loaded.
        for alias, name in self.aliases.items():
            if alias not in self.names and name in self.names:
                stored = self.by_name[name]
                saved = copy.copy(stored.saved)
                saved.name = alias
                self.by_name[alias] = stored._replace(saved=saved)

    def _add_listed(self, files: ListedFiles) -> None:
        """Add the tensors of a save that has an index; opens no file."""
        states = files.save_index.ranks
        if self.own_rank is not None:
            states = [states[self.own_rank], *states]
        for state in dict.fromkeys(states):
            self.aliases |= files.save_index.states[state].aliases
        parts: dict[str, list[_SavedPart]] = {}
        for name, of_name in parts_by_name(files, self.own_rank).items():
            if len(of_name) == 1:
                self.by_name[name] = self._listed_record(name, of_name[0])
                continue
            # Ranks had other dtypes or shapes, and each gets its own.
            for listed in of_name:
                parts.setdefault(name, []).extend(_parts_of_listed(listed))
            parts[name].sort(key=lambda part: (part.rank != self.own_rank, part.rank))
        self.by_name |= self._records(parts)

    def _records(self, parts: Mapping[str, Sequence[_SavedPart]]) -> dict[str, _StoredTensor]:
        """Return the record of each tensor, from the parts of it that ranks, or files, have."""
        records = {}
        for name, of_tensor in parts.items():
            first = of_tensor[0].tensor.shard
            shape = first.global_shape
            # Another rank's copy need not be compared: this rank gets back its own, or root's as the caller wants it.
            is_first_enough = len(of_tensor) == 1 or of_tensor[0].rank == self.own_rank or self._takes_root
            if is_first_enough and len(first.boxes) == 1 and first.boxes[0].shape == shape:
                boxes = {first.boxes[0]: of_tensor[0].tensor.byte_ranges[0]}
                records[name] = _StoredTensor(SavedTensor(name, first.dtype, shape), of_tensor[:1], boxes)
            else:
                records[name] = self._joined(name, of_tensor)
        return records

    def _listed_record(self, name: str, listed: TensorParts) -> _StoredTensor:
        dtype, shape = listed.tensor.dtype, listed.tensor.shape
        saved = SavedTensor(name, dtype, shape, listed.holders.cut_dims(shape))
        return _StoredTensor(saved, (), None, listed)

    def _joined(self, name: str, parts: Sequence[_SavedPart]) -> _StoredTensor:
        """Return the record of a tensor of several parts, or of one part that is not the whole tensor."""
        first = parts[0].tensor.shard
        shape = first.global_shape
        # Of an FSDP2 save each tensor comes here, from all ranks: no calls in this loop.
        cut_dims: set[int] = set()
        problem: StateExchangeError | None = None
        for part in parts:
            shard = part.tensor.shard
            if problem is None and (shard.dtype, shard.global_shape) != (first.dtype, shape):
                problem = self._disagreement(name, parts[0], part)
            for box in shard.boxes:
                if box.shape != shape and 0 not in box.shape:
                    for dim, (size, whole) in enumerate(zip(box.shape, shape, strict=False)):
                        if size != whole:
                            cut_dims.add(dim)
        return _StoredTensor(SavedTensor(name, first.dtype, shape, frozenset(cut_dims), problem), parts, None)

    def _disagreement(self, name: str, part: _SavedPart, other: _SavedPart) -> StateExchangeError:
        """Return the error for two parts of different dtypes or shapes. It is raised only if the tensor is loaded."""
        first, second = part.tensor.shard, other.tensor.shard
        are_whole = first.is_whole and second.is_whole
        # Ranks may have had plain tensors of different shapes. On the number of ranks that saved them each gets its own
        # back, and none comes here.
        if are_whole and self.source.world_size not in (None, self._comm.world_size):
            shapes = f"{first.dtype} {list(first.global_shape)} and {second.dtype} {list(second.global_shape)} here"
            text = differing_text(shapes, [name], part.label, other.label)
            return ReplicaError(text, name=name, rank=other.rank, path=other.path)
        return CorruptError(
            "two files disagree on dtype or shape",
            name=name,
            path=other.path,
            expected=f"{first.dtype} {first.global_shape}",
            found=f"{second.dtype} {second.global_shape}",
        )

    def boxes_of(self, stored: _StoredTensor, needed: Sequence[Box]) -> Mapping[Box, ByteRange]:
        """Return the byte ranges of the boxes of a tensor, at least of all that overlap the boxes that are needed.

        Two ranks have saved the halves of "w" of shape (4, 3). For the box [1:3, 0:3] both are returned:
        ``{[0:2, 0:3]: 24 bytes of rank 0's file, [2:4, 0:3]: 24 bytes of rank 1's}``.

        Copies without digests, as in torch's files, are read and compared.

        Raises:
            ReplicaError: copies differ, unless this rank saved one itself or `replicas` is "root".
            IncompleteError, OverlapError: the boxes are not those of a whole tensor.
        """
        name = stored.saved.name
        if isinstance(stored.listed, SpecParts):
            return stored.listed.boxes(needed)
        if stored.listed is not None:
            return self._boxes_of_listed(name, stored.listed, needed)
        # Once for all that is needed of it, as copies may have to be read.
        if name not in self._boxes:
            whole = full_box(stored.saved.shape)
            self._boxes[name] = self._boxes_of_parts(name, stored.parts, [whole])
        return self._boxes[name]

    def _boxes_of_listed(self, name: str, listed: TensorParts, needed: Sequence[Box]) -> Mapping[Box, ByteRange]:
        if listed.holders.is_exact(listed.tensor.shape):
            return listed.boxes(needed)
        # Not cut by one placement: whole copies, each rank's own, or parts of several meshes.
        rank, first, _ = next(listed.parts())
        if first.shard.is_whole and (rank == self.own_rank or self._takes_root):
            return {first.shard.boxes[0]: first.byte_ranges[0]}
        return self._boxes_of_parts(name, _parts_of_listed(listed), needed)

    def _boxes_of_parts(self, name: str, parts: Sequence[_SavedPart], needed: Sequence[Box]) -> Mapping[Box, ByteRange]:
        """Return the byte ranges of the boxes that overlap what is needed; copies of these are compared."""
        holders: dict[Box, list[HolderLabel]] = {}
        firsts: dict[Box, tuple[_SavedPart, int]] = {}  # the first part with each box, and its number there
        digests: dict[Box, str] = {}  # of the first copies that others were compared with
        for part in parts:
            for number, box in enumerate(part.tensor.shard.boxes):
                if 0 in box.shape:
                    continue  # it covers nothing, and overlaps nothing
                holders.setdefault(box, []).append(part.label)
                if box not in firsts:
                    firsts[box] = part, number
                    continue
                first, index = firsts[box]
                if first.rank == self.own_rank or self._takes_root or not _overlaps(box, needed):
                    continue
                # Other ranks wait meanwhile: reading a large copy must count as progress.
                if box not in digests:
                    digests[box] = first.tensor.digest_of(index, self._comm.progress)
                if part.tensor.digest_of(number, self._comm.progress) != digests[box]:
                    text = differing_text(f"different values for region {box}", [name], first.label, part.label)
                    raise ReplicaError(text, name=name, rank=part.rank, path=part.path)
        # Before anything is read: a part that is missing would leave old values in the live tensor.
        try:
            prove_cover(name, parts[0].tensor.shard.global_shape, holders)
        except (CorruptError, IncompleteError) as error:
            raise error.located(name=name, path=self.source.path) from error
        boxes = {}
        ranges: dict[int, Sequence[ByteRange]] = {}  # of each part, as they may be looked up in its file
        for box, (part, number) in firsts.items():
            if _overlaps(box, needed):
                if id(part) not in ranges:
                    ranges[id(part)] = part.tensor.byte_ranges
                boxes[box] = ranges[id(part)][number]
        return boxes


def _overlaps(box: Box, needed: Sequence[Box]) -> bool:
    return any(intersect(box, other) is not None for other in needed)


def _parts_of_listed(listed: TensorParts) -> list[_SavedPart]:
    """Return the parts of a tensor by the index of a save; opens no file."""
    return [_SavedPart(rank, tensor, path, rank) for rank, tensor, path in listed.parts()]


def differing_text(what: str, exclude: Sequence[str], holder: HolderLabel, other: HolderLabel) -> str:
    """Return the message for a difference between the saves of two ranks, or files, with the remedies.

    `exclude` are the paths that differ; none, or "", if these are too many, or the whole state.
    """
    holders = holders_text(holder, other)
    leave = ""
    if any(exclude):
        patterns = exclude[0] if len(exclude) == 1 else list(exclude)
        leave = f"pass exclude={patterns!r} to leave the state as it is there, "
    if isinstance(holder, int) and isinstance(other, int):
        return (
            f"{holders} saved {what}: load on as many ranks as have saved, so that each gets its own, {leave}or pass "
            f'replicas="root" to take rank {min(holder, other)}\'s'
        )
    return f'{holders} have {what}: give one of the files, {leave}or pass replicas="root" to take the first file\'s'


# What is read


@dataclass(frozen=True, slots=True, order=True)
class WantedBox:
    """A box of the source's tensor `name`, to be read into memory of dtype `dtype`.

    `content` says which bytes: ranks that have saved different values of one box each get their own.
    """

    name: str
    box: Box
    dtype: str
    content: str


class ReadItem(NamedTuple):
    """A live tensor to fill, and the stored boxes of dtype `stored` that fill it; values are cast if dtypes differ."""

    name: str
    local: LocalTensor
    boxes: Mapping[Box, ByteRange]
    stored: str


class _Part(NamedTuple):
    """One box of an item, and its memory."""

    item: ReadItem
    box: Box
    memory: TensorMemory

    @property
    def wanted(self) -> WantedBox:
        """What ranks of one host compare, to read it once."""
        item = self.item
        whole = item.boxes.get(self.box)
        content = []
        if whole is not None:
            content = [_content(whole)]
        else:
            for box, stored in item.boxes.items():
                if intersect(box, self.box) is not None:
                    content.append(f"{box} {_content(stored)}")
        # Each rank has its own file first among the holders, so that the order says nothing.
        digest = xxh3_128_hexdigest(" ".join(sorted(content)).encode())
        return WantedBox(item.name, self.box, item.local.shard.dtype, digest)


def _content(stored: ByteRange) -> str:
    """Return what tells the bytes of a stored box from others: their digest, or where they lie."""
    return stored.digest or f"{stored.file.path}:{stored.begin}"


def _parts_of(items: Sequence[ReadItem]) -> list[_Part]:
    parts = []
    for item in items:
        for box, memory in zip(item.local.shard.boxes, item.local.memory, strict=True):
            parts.append(_Part(item, box, memory))
    return parts


# Of a box that ranks of several hosts need: less is read by each host, as a message would take longer.
_LEAST_SENT_BYTES = 256 << 10
# In one message: ranks that wait see progress only after each, and what is not one run in memory is copied for it.
_MOST_SENT_BYTES = 16 << 20

Messages: TypeAlias = dict[WantedBox, list[tuple[int, int]]]
"""By box, the messages of this rank, (src, dst), in order."""


def assign_readers(items: Sequence[ReadItem], comm: Communicator, *, in_job: bool) -> Messages:
    """Choose, for each box that several ranks need, one rank to read it, balanced by elements. Collective.

    Return what this rank receives and sends on, in an order equal on all ranks. Each box is read once on each host;
    with `in_job` once in the job, by ranks that all need the same boxes, as those of DDP and HSDP do. Then ranks of the
    reader's host read it from the page cache, and on another host one rank receives it and sends it on.
    """
    # Each once, in the order of the items: a tensor that is tied wants its box twice.
    wanted_here = list(dict.fromkeys([part.wanted for part in _parts_of(items)]))
    needed_by = _needed_in_job(wanted_here, comm) if in_job else _needed_on_host(wanted_here, comm)
    load = dict.fromkeys(range(comm.world_size), 0)  # elements that each rank reads for others
    messages: Messages = {}
    # All ranks send and receive in this order, so that no two of them wait for each other.
    for wanted in sorted(needed_by):
        ranks = needed_by[wanted]
        if len(ranks) > 1:
            reader = min(ranks, key=lambda rank: (load[rank], rank))
            load[reader] += wanted.box.numel
            messages[wanted] = _messages(reader, ranks, comm, reads_cache=in_job)
    return messages


def _needed_on_host(wanted_here: Sequence[WantedBox], comm: Communicator) -> dict[WantedBox, list[int]]:
    """Return which ranks of this host need each box. Collective."""
    needed_by: dict[WantedBox, list[int]] = {}
    for rank, boxes in enumerate(from_all(comm, wanted_here, list[WantedBox], "the boxes to read")):
        if comm.nodes[rank] == comm.node_rank:
            for wanted in boxes:
                needed_by.setdefault(wanted, []).append(rank)
    return needed_by


def _needed_in_job(wanted_here: Sequence[WantedBox], comm: Communicator) -> dict[WantedBox, list[int]]:
    """Return which ranks need each large box, if they are on several hosts and need the same boxes. Collective.

    Ranks exchange a digest of what they need, and not the boxes: a job may have thousands of ranks.
    """
    large = [wanted for wanted in wanted_here if wanted.box.numel * ITEMSIZE[wanted.dtype] >= _LEAST_SENT_BYTES]
    digest = xxh3_128_hexdigest(repr(sorted(large)).encode())
    digests = from_all(comm, digest, str, "the digest of the boxes to read")
    ranks = [rank for rank, of_rank in enumerate(digests) if of_rank == digest]
    if len({comm.nodes[rank] for rank in ranks}) == 1:
        return {}
    return dict.fromkeys(large, ranks)


def _messages(reader: int, ranks: Sequence[int], comm: Communicator, *, reads_cache: bool) -> list[tuple[int, int]]:
    """Return the messages, (src, dst), by which a box comes to this rank, and from it to other ranks.

    Ranks 0 and 1 are on one host, 2 and 3 on another, and 0 reads: the messages are (0, 1), (0, 2) and (2, 3). With
    `reads_cache` rank 1 reads the page cache instead. Between the hosts the box travels once.
    """
    messages = []
    senders = {comm.nodes[reader]: reader}  # by host
    for rank in ranks:
        node = comm.nodes[rank]
        if rank == reader or (reads_cache and node == comm.nodes[reader]):
            continue
        src = senders.setdefault(node, rank)
        if src == rank:  # the first of its host, which sends the box on
            src = reader
        if comm.rank in (src, rank):  # those of all of a thousand ranks would fill the memory
            messages.append((src, rank))
    return messages


def read_all(
    items: Sequence[ReadItem],
    messages: Messages,
    comm: Communicator,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[int, list[Overflows]]:
    """Fill the live tensors; return the bytes that this rank has read, and boxes in which casts made values infinite.

    Not collective without `messages` (from `assign_readers`); otherwise all ranks that they name must call this.

    Raises:
        ReplacedError: a file may have changed since it was opened.
        CorruptError, StorageError: a live tensor is as it was, or has the values that were saved, or NaN; the error
            says how many have changed.
        ReplicaError: live tensors share memory for which the source has different values.
    """
    parts = _parts_of(items)
    to_read, first_parts = parts, dict[WantedBox, _Part]()
    if messages:
        received = set()
        for wanted, of_box in messages.items():
            if any(dst == comm.rank for _, dst in of_box):
                received.add(wanted)
        to_read, first_parts = _to_read(parts, received)
    reading = _Reading(parts, comm, on_progress)
    try:
        try:
            reading.run(to_read)
        except (CorruptError, StorageError) as error:
            raise error.located(advice=reading.changes(len(items))) from error.__cause__
        # After all reads: a rank that waited for another one in between would leave its own requests for later.
        for wanted, of_box in messages.items():
            for src, dst in of_box:
                if comm.rank == src:
                    reading.send(first_parts[wanted], dst)
                elif comm.rank == dst:
                    reading.receive(first_parts[wanted], src)
    except BaseException:
        # After an interrupt, too, no tensor may keep bytes that were not checked, or half of its new values.
        reading.invalidate()
        raise
    # Only now, as memory that was received counts, too.
    for numbers in overlapping([part.memory for part in parts]):
        _check_same_values(operator.itemgetter(*numbers)(parts), comm)
    return reading.nbytes, reading.overflows


def _to_read(parts: Sequence[_Part], received: Collection[WantedBox]) -> tuple[list[_Part], dict[WantedBox, _Part]]:
    """Return the parts that this rank reads, and the first part of each box, which is sent or received."""
    to_read = []
    first_parts: dict[WantedBox, _Part] = {}
    for part in parts:
        wanted = part.wanted
        # A box is sent once, into its first live tensor; a second one, as a copy of the module, reads it.
        if wanted in first_parts or wanted not in received:
            to_read.append(part)
        first_parts.setdefault(wanted, part)
    return to_read, first_parts


class _Block(NamedTuple):
    """The part `region` of a stored box, which is read."""

    stored: ByteRange
    box: Box
    region: Box

    def digest(self, dtype: str) -> BoxDigest:
        """Return what computes the digests of the block, and compares them."""
        return BoxDigest(self.stored, self.box, dtype, region=self.region)


class _Piece(NamedTuple):
    """A block that is one small run of bytes, and what it fills: bytes of a tensor in host memory.

    Attributes:
        begin: the first byte in the file.
        nbytes: the size.
        tensor: the tensor that is filled.
        in_memory: the first of its bytes.
        block: the block.
        item: the tensor's item.
        digest: that of the bytes, if no other is known of them.
    """

    begin: int
    nbytes: int
    tensor: TensorLike
    in_memory: int
    block: _Block
    item: ReadItem
    digest: str | None

    def check(self, data: memoryview) -> None:
        """Raise CorruptError if the bytes that were read differ from a digest."""
        digest = self.block.digest(self.item.stored)
        if digest:
            digest.update(self.block.region, data)
            digest.check(self.item.name)


class _Target(NamedTuple):
    """A part that is read by itself, and the stored blocks that fill it."""

    part: _Part
    needed: Sequence[_Block]


class Overflows(NamedTuple):
    """The number of finite elements in a box of the source's tensor `name` that became infinite by a cast."""

    name: str
    box: Box
    num_elements: int


class _Limits(NamedTuple):
    """The most bytes of a small piece, between two pieces that are read together, and of all that are read together."""

    piece: int
    gap: int
    together: int


# A system call costs what reading 4 KiB costs. What is read together is digested and copied in the processor's cache.
_LOCAL = _Limits(piece=64 << 10, gap=4 << 10, together=256 << 10)
# Any request takes longer than reading 64 KiB more. Larger gaps would let each rank read the other ranks' parts, too.
_REMOTE = _Limits(piece=READ_AHEAD_BYTES, gap=64 << 10, together=READ_AHEAD_BYTES)
_LIMITS = {False: _LOCAL, True: _REMOTE}  # by whether a file is remote


class _Reading:
    """Reads boxes of live tensors, and counts the bytes.

    Small pieces that are near each other in a file are read together: a request to an object store takes as long as
    reading megabytes, and most of the time for a small tensor is that of a system call.
    """

    def __init__(
        self, parts: Sequence[_Part], comm: Communicator, on_progress: Callable[[int, int], None] | None
    ) -> None:
        self.nbytes = 0
        self.overflows: list[Overflows] = []
        self._parts = parts
        self._files: dict[StoredFile, list[_Piece]] = {}  # each that is read, with its small pieces
        self._together: list[list[_Piece]] = []  # the small pieces of all files, as they are read together
        self._alone: list[_Target] = []  # with pieces that are not small, or not one run in memory
        self._comm = comm
        self._total = 0
        self._on_progress = on_progress
        self._prefetch: Prefetch  # made by `run`
        self._staging: Staging | None = None  # most tensors need none
        self._changed: set[int] = set()  # ids of the items of which a byte may have changed
        # How much of each item, by its id, is neither read and checked nor received. A tensor's boxes lie in the files
        # of several ranks, so that some may be filled when another one's bytes turn out to differ.
        self._left: Counter[int] = Counter()
        for part in parts:
            self._left[id(part.item)] += 1

    def run(self, parts: Sequence[_Part]) -> None:
        """Fill the live tensors of these parts."""
        self._add(parts)
        self._prefetch = Prefetch(self._spans())
        self._read_small()
        for target in self._alone:
            self._read_alone(target)
        # A file that was replaced during the reading may have given bytes of two versions, each with its digests.
        for file in self._files:
            file.check_current()

    def send(self, part: _Part, rank: int) -> None:
        """Send what was read or received of a part to a rank."""
        for piece in _sent_pieces(part):
            self._comm.send(piece, rank)
            self._comm.progress()

    def receive(self, part: _Part, rank: int) -> None:
        """Fill a part with what a rank sends."""
        self._changed.add(id(part.item))
        for piece in _sent_pieces(part):
            self._comm.recv(piece, rank)
            self._comm.progress()
        self._left[id(part.item)] -= 1

    def invalidate(self) -> None:
        """Fill the tensors of which only a part was read, or bytes that differ from their digest.

        Their old values are gone. NaN is never taken for the values that were saved, and an integer with all bits set
        hardly is.
        """
        staging = self._staging or Staging()
        invalid = self._invalid()
        for item, _, whole in self._parts:
            if id(item) in invalid:
                for _, memory in staging.targets(whole.tensor, item.stored):
                    np.frombuffer(memory, np.uint8).fill(1 if item.stored == "BOOL" else 0xFF)

    def _invalid(self) -> set[int]:
        """Return the ids of the items that are filled in part."""
        return {item for item in self._changed if self._left[item]}

    def changes(self, num_items: int) -> str:
        """Return what has changed in this rank's live tensors, `num_items` in all, as the end of a message."""
        where = f" of rank {self._comm.rank}" if self._comm.world_size > 1 else ""
        if not self._changed:
            return f"the state{where} is unchanged"
        text = f"{len(self._changed)} of {num_items} tensors{where} have been filled"
        num_invalid = len(self._invalid())
        if num_invalid:
            text += f", {num_invalid} of them with NaN (all bits set) because not all of it could be read"
        return f"{text}, the others are as they were"

    def _add(self, parts: Sequence[_Part]) -> None:
        """Note how each part will be read."""
        for part in parts:
            item, target, memory = part
            is_in_place = memory.is_run and memory.dtype == item.stored
            # `prove_cover` has found that no two stored boxes overlap, so one that equals the target is all it needs.
            whole = item.boxes.get(target)
            stored_boxes = item.boxes if whole is None else {target: whole}
            needed = []
            num_left = 0
            for box, stored in stored_boxes.items():
                region = intersect(box, target) if whole is None else target
                if region is None:
                    continue
                run: Run | None = None
                if is_in_place and whole is not None and stored.strides is None:
                    # Nearly all tensors of a model are one run in the file and in memory: no arithmetic of boxes.
                    run = Run(stored.begin, 0, memory.end - memory.begin)
                elif is_in_place:
                    run = one_run(stored, box, region, item.stored, target)
                self._total += math.prod(region.shape) * ITEMSIZE[item.stored]
                pieces = self._files.setdefault(stored.file, [])
                block = _Block(stored, box, region)
                if run is None or run.nbytes > _LIMITS[stored.file.is_remote].piece:
                    needed.append(block)
                    continue
                digest = stored.digest if region == box and not stored.parts else None
                pieces.append(_Piece(run.in_file, run.nbytes, memory.tensor, run.in_memory, block, item, digest))
                num_left += 1
            if needed:
                self._alone.append(_Target(part, needed))
                num_left += 1
            # The part itself was counted as one.
            self._left[id(item)] += num_left - 1

        # In the order of the files, whatever the state's is.
        numbers = {file: number for number, file in enumerate(self._files)}
        self._alone.sort(key=lambda target: (numbers[target.needed[0].stored.file], target.needed[0].stored.begin))
        for file, pieces in self._files.items():
            # An empty tensor begins where the next one does, and comes first: it is no gap between its neighbours.
            pieces.sort(key=operator.attrgetter("begin", "nbytes"))
            self._together += _neighbours(pieces, _LIMITS[file.is_remote])
            pieces.clear()

    def _spans(self) -> list[Span]:
        """Return what is read, in its order; blocks that are no run in their file are left to the kernel."""
        spans = []
        for pieces in self._together:
            nbytes = sum([piece.nbytes for piece in pieces])
            spans.append(Span(pieces[0].block.stored.file, pieces[0].begin, nbytes))
        for target in self._alone:
            parts = []
            for block in target.needed:
                dtype, region = target.part.item.stored, block.region
                run = one_run(block.stored, block.box, region, dtype, region)
                nbytes = region.numel * ITEMSIZE[dtype]
                span = Span(None, 0, nbytes) if run is None else Span(block.stored.file, run.in_file, nbytes)
                parts.append((region, span))
            spans += in_turns(parts, target.part.box)
        return spans

    def _read_small(self) -> None:
        """Read the small pieces of all files."""
        buffer = memoryview(b"")
        for pieces in self._together:
            file = pieces[0].block.stored.file
            if len(buffer) < _LIMITS[file.is_remote].together:
                buffer = memoryview(bytearray(_LIMITS[file.is_remote].together))
            self._read_together(file, pieces, buffer)
        self._together.clear()

    def _read_together(self, file: StoredFile, pieces: Sequence[_Piece], buffer: memoryview) -> None:
        begin, last = pieces[0].begin, pieces[-1]
        file.read_into(buffer[: last.begin + last.nbytes - begin], begin)
        bytes_of = [buffer[piece.begin - begin :][: piece.nbytes] for piece in pieces]
        # Live memory changes only after all digests of what was read together have been compared.
        for piece, data in zip(pieces, bytes_of, strict=True):
            if piece.digest is None or xxh3_128_hexdigest(data) != piece.digest:
                piece.check(data)
        nbytes = 0
        for piece, data in zip(pieces, bytes_of, strict=True):
            number = id(piece.item)
            self._changed.add(number)
            run_bytes(piece.tensor)[piece.in_memory : piece.in_memory + piece.nbytes] = data
            self._left[number] -= 1
            nbytes += piece.nbytes
        self._count(nbytes)

    def _read_alone(self, target: _Target) -> None:
        """Read a part window by window, each stored box in it by itself."""
        item, whole, memory = target.part
        dtype = item.stored
        digests = [block.digest(dtype) for block in target.needed]
        if memory.is_run and memory.dtype == dtype:
            # It is read into, and not into a buffer: from now on its old values may be gone.
            self._changed.add(id(item))
        self._staging = self._staging or Staging()
        for window, data in self._staging.targets(memory.tensor, dtype):
            placed = to_global(window, whole)
            for (stored, box, region), digest in zip(target.needed, digests, strict=True):
                inside = intersect(region, placed)
                if inside is not None:
                    read_part(stored, box, inside, dtype, data, placed, digest, self._count)
            # The last window is copied when the iterator goes on, and bytes that differ must not be.
            if placed.ends == whole.ends:
                for digest in digests:
                    digest.check(item.name)
            self._changed.add(id(item))
        self._left[id(item)] -= 1
        if self._staging.num_overflows:
            self.overflows.append(Overflows(item.name, whole, self._staging.num_overflows))

    def _count(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self._prefetch.advance(nbytes)
        self._comm.progress()
        if self._on_progress is not None:
            self._on_progress(self.nbytes, self._total)


def _sent_pieces(part: _Part) -> Iterator[TensorLike]:
    """Yield views of the memory of a part, one for each message; autograd does not look at them."""
    tensor = part.memory.tensor
    if not isinstance(tensor, np.ndarray):
        tensor = tensor.detach()
    whole = full_box(tuple(tensor.shape))
    for window in windows(whole.shape, ITEMSIZE[part.memory.dtype], _MOST_SENT_BYTES):
        # With "..." a number of numpy is a view, too.
        index: tuple[slice | EllipsisType, ...] = (..., *slices_within(window, whole))
        yield tensor[index]


def _neighbours(pieces: Sequence[_Piece], limits: _Limits) -> list[list[_Piece]]:
    """Divide pieces, in the order of a file, into those that are read together."""
    groups: list[list[_Piece]] = []
    begin = end = 0
    for piece in pieces:
        piece_end = piece.begin + piece.nbytes
        # Two live tensors may be filled from the same bytes: each begins a group of its own, as these overlap.
        is_near = 0 <= piece.begin - end <= limits.gap and piece_end - begin <= limits.together
        if groups and is_near:
            groups[-1].append(piece)
        else:
            groups.append([piece])
            begin = piece.begin
        end = piece_end
    return groups


def _check_same_values(group: Sequence[_Part], comm: Communicator) -> None:
    """Raise ReplicaError if the source has different values for parts whose memory overlaps."""
    if all(_is_same(group[0], part) for part in group[1:]):
        return  # a tied tensor, most often: filled twice from the same bytes
    for part in group:
        # The memory has what was read into it last. Filled with the values of this part again, it must not change.
        before = _digest_of_memory(part, comm)
        again = _Reading([part], comm, None)
        try:
            again.run([part])
        except BaseException:
            again.invalidate()
            raise
        if _digest_of_memory(part, comm) != before:
            name = part.item.name
            names = sorted({member.item.name for member in group} - {name})
            sharing = excerpt(names[0]) if names else "another part of itself"
            raise ReplicaError(
                f"it shares memory with {sharing}, for which the source has other values: exclude one of the two, or "
                "let each have its own memory",
                name=name,
            )


def _is_same(part: _Part, other: _Part) -> bool:
    """Whether two parts are the same memory, filled from the same stored bytes."""
    is_tied = same_memory(part.memory.tensor) == same_memory(other.memory.tensor)
    item, other_item = part.item, other.item
    return is_tied and part.box == other.box and (item.stored, item.boxes) == (other_item.stored, other_item.boxes)


def _digest_of_memory(part: _Part, comm: Communicator) -> bytes:
    """Return a digest of the bytes that the memory of a part has now."""
    hasher = xxh3_128()
    for _, data in Staging().parts(part.memory.tensor, part.memory.dtype):
        hasher.update(data)
        comm.progress()
    return hasher.digest()
