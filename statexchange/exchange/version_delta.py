"""The difference from the last version, on each rank: compared, compressed, and placed in the entries of a delta.

Each rank keeps the bytes that it has published (published.py), and takes its own difference; nobody gathers a tensor.
A box that is one run of its tensor is compressed where it lies, a frame for each window. Ranks exchange the sizes of
their parts, which give the offset of each, and the sums for the checksum of the whole tensor. A box of columns is not
one run: its compressed difference, most often a few percent of its bytes, is sent to one rank that writes the tensor;
that rank joins the boxes and compresses the whole.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xxhash

from statexchange.comm.communicator import Communicator, from_all
from statexchange.errors import MismatchError
from statexchange.exchange.published import PublishedBox, checksum_of
from statexchange.exchange.rank_metadata import local_box
from statexchange.exchange.receipts import Receipts, pieces_with_receipts
from statexchange.exchange.staging import Staging
from statexchange.formats.version_frames import are_runs, compressor, decompressed
from statexchange.sharding.pieces import boxes_of, holders_of
from statexchange.sharding.shards import Box, Shard
from statexchange.sharding.write_plan import WritePlan, WriteTensor
from statexchange.state.describe import Description, LocalTensor
from statexchange.storage.regions import windows
from statexchange.tensors import ITEMSIZE, memory_of, same_bytes

_SAMPLES = 32  # about so many boxes of a rank, and of each a window, are compressed for an estimate


def sampled_share(comm: Communicator, described: Description, plan: WritePlan, boxes: Sequence[PublishedBox]) -> float:
    """Return how large the compressed difference of all ranks will be, by a sample, as a share of the bytes.

    Collective. The first windows of some boxes of each rank are looked at.
    """
    nbytes = compressed = 0
    with comm.phase("comparing a sample"):
        compress, staging = compressor(), Staging()
        # Spread over the model: its first tensors, such as the embedding's, are no sample of the others.
        for published in boxes[:: 1 + len(boxes) // _SAMPLES]:
            tensor = plan.tensors[published.number]
            live = local_box(described, tensor.source, published.box_index)
            for _, part in staging.parts(live, tensor.dtype):
                changed = np.bitwise_xor(np.frombuffer(part, np.uint8), published.data[: len(part)])
                nbytes += len(part)
                compressed += len(compress(changed))
                break  # the first window alone
    total = sum(len(published.data) for published in boxes)
    expected = all_bytes = 0.0
    for sampled, size, rank_total in from_all(comm, [nbytes, compressed, total], list[int], "its sample"):
        all_bytes += rank_total
        if sampled:
            expected += rank_total * size / sampled
    return expected / max(1, all_bytes)


class _WrittenBox(NamedTuple):
    """A box of a changed tensor, the rank that writes it, and the sizes of its frames; on this rank also the frames."""

    rank: int
    sizes: Sequence[int]
    frames: Sequence[bytes]


class _Part(NamedTuple):
    """A part of an entry: where it begins there, and its frames."""

    begin: int
    frames: Sequence[bytes]


@dataclass(slots=True)
class Delta:
    """The difference of all ranks, as this rank has it.

    Attributes:
        described: the entries of which this rank has a part, as U8 tensors by their names in the version.
        boxes: this rank's boxes after the change.
        receipts: their digests, and those of copies that other ranks write.
        changed: the numbers of the tensors that have changed on any rank.
        nbytes: the bytes of all entries.
        checksums: of each changed tensor, by its number.
        frames: the sizes of the frames of each changed tensor, by its number.
    """

    described: Description
    boxes: list[PublishedBox]
    receipts: Receipts
    changed: Sequence[int]
    nbytes: int
    checksums: Mapping[int, str]
    frames: Mapping[int, Sequence[int]]


def difference(
    comm: Communicator,
    described: Description,
    plan: WritePlan,
    boxes: list[PublishedBox],
    names: Sequence[str],
    *,
    most_nbytes: int,
    one_frame: bool,
) -> Delta | None:
    """Compare all tensors with what was published last; None if the entries would be too large. Collective.

    `boxes` are changed in place: if the delta is not published, they must not be used again.

    Args:
        comm: the communicator.
        described: this rank's tensors, of which the plan writes the same boxes as last time.
        plan: the plan.
        boxes: what this rank has published of it.
        names: the names of its tensors in the version.
        most_nbytes: the largest size of all entries.
        one_frame: compress each entry as one frame, for readers that read no others.
    """
    with comm.phase("comparing with the last version"):
        compared = _Comparing(comm, described, plan, boxes, most_nbytes)
    nbytes = 0
    changed_anywhere: set[int] = set()
    here = (sorted(compared.changed), compared.nbytes)
    for numbers, rank_nbytes in from_all(comm, here, tuple[list[int], int], "what has changed"):
        nbytes += rank_nbytes
        changed_anywhere.update(numbers)
    if nbytes > most_nbytes:
        return None
    # A tensor of which one rank's box has changed is in the delta as a whole: with the frames of the other boxes, which
    # are of zeros.
    changed = sorted(changed_anywhere)
    joins = {number for number in changed if one_frame or not _are_rows(plan.tensors[number])}
    with comm.phase("adding up checksums"):
        boxes_here = compared.boxes_of(changed)
    by_rank = from_all(comm, boxes_here, list[_ChangedBox], "the sizes of its differences")
    with comm.phase("joining differences"):
        parts, frames = _placed(comm, plan, compared, changed, joins, by_rank, one_frame=one_frame)
        tensors = {}
        for number, of_tensor in parts.items():
            tensors[names[number]] = _entry(names[number], sum(frames[number]), of_tensor)
    sums: dict[int, list[tuple[int, int]]] = {}
    for of_rank in by_rank:
        for box in of_rank:
            sums.setdefault(box.number, []).append(box.sums)
    checksums = {number: checksum_of(plan.tensors[number], sums[number]) for number in changed}
    total = sum(map(sum, frames.values()))
    return Delta(Description(tensors), boxes, compared.receipts, changed, total, checksums, frames)


class _ChangedBox(NamedTuple):
    """A box of a changed tensor that a rank writes.

    Attributes:
        number: the number of the tensor.
        sizes: the bytes of each of its frames.
        sums: what it adds to the two sums of the checksum.
    """

    number: int
    sizes: tuple[int, ...]
    sums: tuple[int, int]


class _Comparing:
    """This rank's comparison: the frames of the boxes that have changed, and the digests of all.

    Attributes:
        changed: the numbers of the tensors that have changed here.
        nbytes: the bytes of the frames of windows that have changed.
        receipts: the digests of all boxes after the change.
    """

    def __init__(
        self,
        comm: Communicator,
        described: Description,
        plan: WritePlan,
        boxes: Sequence[PublishedBox],
        most_nbytes: int,
    ) -> None:
        self._plan = plan
        self._boxes = boxes
        self._frames: list[list[bytes]] = []  # of each box
        self._compress = compressor()
        # The frame of a window that has not changed, as most have not: there are two or three sizes of windows.
        self._frame_of_zeros = functools.cache(lambda nbytes: self._compress(np.zeros(nbytes, np.uint8)))
        self._most_nbytes = most_nbytes
        self.changed: set[int] = set()
        self.nbytes = 0
        self.receipts = Receipts()
        staging = Staging()
        in_order = iter(boxes)
        for number, tensor, piece in pieces_with_receipts(plan, comm.rank):
            live = local_box(described, tensor.source, piece.box_index)
            if piece.is_written:
                published = next(in_order)
                if (published.number, published.box) != (number, piece.box):
                    raise MismatchError("the plan differs from that of the last version", name=tensor.source)
                self._compare(published, staging.parts(live, tensor.dtype), comm)
                self.receipts.digests.append(published.digest)
            else:
                # Another rank writes this copy: only its digest is needed, for the comparison of copies.
                hasher = xxhash.xxh3_128()
                for _, part in staging.parts(live, tensor.dtype):
                    hasher.update(part)
                    comm.progress()
                self.receipts.digests.append(hasher.digest())
            self.receipts.tensor_numbers.append(number)

    def _compare(self, published: PublishedBox, parts: Iterator[tuple[Box, memoryview]], comm: Communicator) -> None:
        """Compare a box window by window: compress the differences, and copy the new bytes."""
        frames: list[bytes] = []
        self._frames.append(frames)
        hasher = None
        at = 0
        for _, part in parts:
            new, old = np.frombuffer(part, np.uint8), published.data[at : at + len(part)]
            comm.progress()
            if same_bytes(new, old):
                frames.append(self._frame_of_zeros(len(part)))
            else:
                # Only a box that has changed needs a new digest: from the first window that differs on.
                # What is before has not changed, and is hashed as it was published.
                hasher = hasher or xxhash.xxh3_128(published.data[:at].data)
                if self.nbytes <= self._most_nbytes:  # what is more is a full version, for which no frame is needed
                    frames.append(self._compress(np.bitwise_xor(new, old)))
                    self.nbytes += len(frames[-1])
                old[...] = new
            if hasher is not None:
                hasher.update(part)
            at += len(part)
        if hasher is not None:
            published.digest, published.sums = hasher.digest(), None
            self.changed.add(published.number)

    def of_tensors(self, numbers: Sequence[int]) -> Iterator[tuple[PublishedBox, list[bytes]]]:
        """Yield this rank's boxes of some tensors with their frames, in the order of the plan."""
        wanted = set(numbers)
        for published, frames in zip(self._boxes, self._frames, strict=True):
            if published.number in wanted:
                yield published, frames

    def boxes_of(self, numbers: Sequence[int]) -> list[_ChangedBox]:
        """Return the sizes and sums of this rank's boxes of some tensors, in the order of the plan."""
        boxes = []
        for published, frames in self.of_tensors(numbers):
            sums = published.sums_of(self._plan.tensors[published.number])
            boxes.append(_ChangedBox(published.number, tuple(map(len, frames)), sums))
        return boxes


def _are_rows(tensor: WriteTensor) -> bool:
    return are_runs(boxes_of(tensor.pieces), tensor.shape)


def _placed(
    comm: Communicator,
    plan: WritePlan,
    compared: _Comparing,
    changed: Sequence[int],
    joins: set[int],
    by_rank: Sequence[Sequence[_ChangedBox]],
    *,
    one_frame: bool,
) -> tuple[dict[int, list[_Part]], dict[int, Sequence[int]]]:
    """Return this rank's parts of each entry, and the sizes of its frames, by the number of the tensor. Collective."""
    # Each rank's boxes are in the order of the plan, in which the tensors are walked here.
    in_order = list(map(iter, by_rank))
    frames_here = compared.of_tensors(changed)
    parts: dict[int, list[_Part]] = {}
    sizes: dict[int, Sequence[int]] = {}
    joined_here: dict[int, Sequence[int]] = {}
    for turn, number in enumerate(changed):
        tensor = plan.tensors[number]
        written = []
        for rank in holders_of(tensor.pieces, with_copies=False)[0]:
            frames = next(frames_here)[1] if rank == comm.rank else []
            written.append(_WrittenBox(int(rank), next(in_order[rank]).sizes, frames))
        if number in joins:
            # Another rank for each tensor, as one decompresses and compresses all of it.
            owner = written[turn % len(written)].rank
            frames = _joined(comm, tensor, written, owner, one_frame=one_frame)
            if comm.rank == owner:
                parts[number] = [_Part(0, frames)]
                joined_here[number] = tuple(map(len, frames))
            continue
        of_tensor: list[int] = []
        for box in written:
            if box.rank == comm.rank:
                parts.setdefault(number, []).append(_Part(sum(of_tensor), box.frames))
            of_tensor += box.sizes
        sizes[number] = of_tensor
    if joins:
        for of_rank in from_all(comm, joined_here, dict[int, Sequence[int]], "the sizes of joined differences"):
            sizes |= of_rank
    return parts, sizes


def _joined(
    comm: Communicator,
    tensor: WriteTensor,
    written: Sequence[_WrittenBox],
    owner: int,
    *,
    one_frame: bool,
) -> list[bytes]:
    """Return on `owner` the frames of a whole tensor, to which the other ranks send the differences of their boxes."""
    itemsize = ITEMSIZE[tensor.dtype]
    whole: Any = None
    if comm.rank == owner:
        whole = np.empty(tensor.shape, np.dtype((np.void, itemsize)))  # numpy need not know the dtype to place boxes
    for (rank, sizes, box_frames), box in zip(written, boxes_of(tensor.pieces), strict=True):
        data = b"".join(box_frames)
        if rank == comm.rank and rank != owner:
            comm.send(np.frombuffer(data, np.uint8), owner)
        elif comm.rank == owner and rank != owner:
            received = np.empty(sum(sizes), np.uint8)
            comm.recv(received, rank)
            data = received.tobytes()
        if comm.rank == owner:
            content = decompressed(data)
            target = tuple(map(slice, box.offsets, box.ends))
            whole[target] = np.frombuffer(content, whole.dtype).reshape(box.shape)
    if comm.rank != owner:
        return []
    flat = whole.reshape(-1).view(np.uint8)
    compress = compressor()
    if one_frame:
        return [compress(flat)]
    frames, at = [], 0
    for window in windows(tensor.shape, itemsize):
        frames.append(compress(flat[at : at + window.numel * itemsize]))
        at += window.numel * itemsize
    return frames


def _entry(name: str, nbytes: int, parts: Sequence[_Part]) -> LocalTensor:
    """Return an entry of a delta with this rank's parts of it, as an export takes it: a row of bytes.

    Of frames of 31, 18 and 20 bytes this rank has the last two: its box of the tensor of shape (69,) is [31:69].
    """
    boxes, arrays, memories = [], [], []
    for begin, frames in parts:
        array = np.frombuffer(bytearray(b"".join(frames)), np.uint8)
        boxes.append(Box((begin,), array.shape))
        arrays.append(array)
        memories.append(memory_of(array, name))
    return LocalTensor(Shard(name, "U8", (nbytes,), tuple(boxes)), tuple(arrays), tuple(memories))
