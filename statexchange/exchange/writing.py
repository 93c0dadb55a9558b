"""Write the ranks' boxes into the output files: in place on the file's own host, by messages from other hosts.

The ranks of one host write a file. Hosts that see the directory share the files among them. A box that another host
holds is sent, window by window, from the rank that holds it to the rank with the same local rank of the host that
writes the file.

All ranks derive the same order of messages from the plan, so every send has its receive. Each rank first writes
and digests the boxes that need no message. Ranks start in different files to spread the load of the file system.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from statexchange.comm.communicator import Communicator, from_all, from_root
from statexchange.exchange.exporting import ExportRequest, RootExport, Written
from statexchange.exchange.rank_metadata import local_box
from statexchange.exchange.receipts import Receipts, pieces_with_receipts
from statexchange.exchange.staging import MESSAGE_BYTES, Staging, received_parts
from statexchange.exchange.uploading import open_upload
from statexchange.formats.tensor_reader import reduce_into
from statexchange.sharding.pieces import pieces_written_by
from statexchange.sharding.shards import Box, Piece, begin_of_run
from statexchange.sharding.write_plan import WriteFile, WritePlan, WriteTensor, assign_hosts
from statexchange.state.describe import Description, LocalTensor
from statexchange.storage import files
from statexchange.storage.regions import to_global, write_box
from statexchange.tensors import ITEMSIZE, array_over, checked_dtype, from_bytes, run_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SYNC_EVERY_BYTES = 256 << 20  # a rank shows no progress while it syncs: not all of its bytes at once


@dataclass(frozen=True, slots=True)
class _WriteItem:
    """One box that rank `src` holds and `dst` writes.

    `number` is the tensor's index in the plan, `piece` that of the piece in the tensor. If `dst` is `src`, the rank
    writes the box itself; if `dst` is -1, it only digests the box, because another rank writes a replica of it.
    `receipt` is the index of its digest in this rank's receipts; of a box to receive, it and `box_index` are -1.
    """

    tensor: WriteTensor
    number: int
    piece: int
    box: Box
    box_index: int
    src: int
    dst: int
    receipt: int

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return math.prod(self.box.shape) * ITEMSIZE[self.tensor.dtype]


def write_files(
    comm: Communicator,
    described: Description,
    plan: WritePlan,
    root: RootExport | None,
    request: ExportRequest,
    building: contextlib.ExitStack,
) -> Written:
    """Write all ranks' boxes into the files of a plan, in a directory or at a URL. Collective.

    Args:
        comm: the communicator.
        described: this rank's tensors.
        plan: the plan, equal on all ranks.
        root: on root the export, with the directory under construction.
        request: the arguments of the call.
        building: at its end temporary files are gone.
    """
    if "://" in plan.files[0].path:  # a URL: a local path is absolute, and has no empty part
        upload = open_upload(comm, plan, request.path, root, building)
        # The temporary files have their headers already.
        receipts = _write_boxes(comm, described, upload.plan, upload.nodes, None, request)
        return Written(receipts, upload.nodes, upload.run(comm, request.call))
    nodes = [0] * len(plan.files)
    if any(comm.nodes):  # several hosts
        # The directory has a random name, so that no NFS client can have looked the file up before, and remember that
        # it was absent.
        sees = from_all(comm, os.path.lexists(plan.files[0].path), bool, "whether it sees the directory")
        nodes = assign_hosts(plan, comm.nodes, sees)
    return Written(_write_boxes(comm, described, plan, nodes, root, request), nodes, None)


def _write_boxes(
    comm: Communicator,
    described: Description,
    plan: WritePlan,
    nodes: Sequence[int],
    root: RootExport | None,
    request: ExportRequest,
) -> Receipts:
    """Write all ranks' boxes, and the headers of files that are written on another host than root's. Collective.

    Args:
        comm: the communicator.
        described: this rank's tensors.
        plan: the plan, equal on all ranks.
        nodes: for each file the number of the host that writes it.
        root: on root the export, which has the headers of all files; None if the files have them already.
        request: the arguments of the call. `on_progress` is called with the bytes that this rank has written or sent,
            and the total.

    Returns:
        The receipts of this rank.
    """
    call = request.call
    if any(map(attrgetter("reduce"), plan.tensors)):
        with comm.phase("reducing copies", timeout_s=call.stall_timeout_s):
            described = _reduce_copies(comm, described, plan)
    with comm.phase("writing", timeout_s=call.stall_timeout_s):
        writing = _Writing(comm, described, plan, nodes)
        remote_headers: Sequence[bytes] = ()
        if writing.is_shared:
            headers = [] if root is None else root.headers
            remote_headers = from_root(comm, headers, list[bytes], "the headers")
        with _Files(plan.files, comm, writing.total, call.on_progress) as opened:
            # Root writes those of its own host's files last, when it finishes them (exporting.py).
            for number, header in enumerate(remote_headers):
                if nodes[number] != comm.nodes[0] and comm.rank == writing.first_of(nodes[number]):
                    opened.write_header(number, header)
            return writing.run(opened)


def _reduce_copies(comm: Communicator, described: Description, plan: WritePlan) -> Description:
    """Return the description with reduced values for the boxes that this rank writes. Collective.

    Copies are reduced in their order and in the dtype that they have: by "max" the copies [1.0, 4.0] and [3.0, 2.0]
    become [3.0, 4.0]. The live state does not change. Memory: the size of this rank's reduced boxes.
    """
    tensors = dict(described.tensors)
    # All ranks walk the copies in one order, so that each send meets its receive, and no two ranks wait for each other.
    for tensor in plan.tensors:
        if tensor.reduce is None:
            continue
        name = tensor.source
        for piece in tensor.pieces:
            if comm.rank == piece.holder and piece.replicas:
                tensors[name] = _reduced(comm, described, tensors[name], tensor.reduce, piece)
                continue
            for src, index in piece.replicas:
                if src == comm.rank:
                    live = local_box(described, name, index)
                    for _, part in Staging(MESSAGE_BYTES).parts(live, checked_dtype(live, name)):
                        comm.send(np.frombuffer(part, np.uint8), piece.holder)
                        comm.progress()
    return replace(described, tensors=tensors)


def _reduced(comm: Communicator, described: Description, local: LocalTensor, op: str, piece: Piece) -> LocalTensor:
    """Return a tensor of this rank with one box reduced over its copies, which other ranks send."""
    name, number = local.shard.name, piece.box_index
    live = local_box(described, name, number)
    dtype = checked_dtype(live, name)  # that in memory, which a cast changes only in the output
    # Only the rank that writes the box needs a copy of it: it reduces in place.
    result = Staging().bytes_of(live, dtype, comm.progress)
    for src, index in piece.replicas:
        at = 0
        copy = received_parts(comm, tuple(live.shape), dtype, src)
        if src == comm.rank:
            copy = Staging(MESSAGE_BYTES).parts(local_box(described, name, index), dtype)
        for _, part in copy:
            target = array_over(result[at : at + part.nbytes], dtype, (-1,))
            reduce_into(op, target, array_over(part, dtype, (-1,)))
            at += part.nbytes
            comm.progress()
    tensor = from_bytes(result, dtype, local.shard.boxes[number].shape, as_numpy=isinstance(live, np.ndarray))
    # Without `memory`, which is of the live tensors: what is written comes from `tensors` then.
    return local._replace(tensors=(*local.tensors[:number], tensor, *local.tensors[number + 1 :]), memory=())


class _Writing:
    """One rank's share of the writing."""

    def __init__(self, comm: Communicator, described: Description, plan: WritePlan, nodes: Sequence[int]) -> None:
        self._comm = comm
        self._described = described
        self._node_ranks: dict[int, list[int]] = {}
        for rank, node in enumerate(comm.nodes):
            self._node_ranks.setdefault(node, []).append(rank)
        self.is_shared = any(node != comm.nodes[0] for node in nodes)
        local, self._messages = self._items(plan, nodes)
        start = len(local) * comm.rank // comm.world_size  # ranks begin in different files
        self._local = local[start:] + local[:start]
        self.total = 0
        for item in [*local, *self._messages]:
            if item.src == comm.rank and item.dst >= 0:
                self.total += item.nbytes

    def first_of(self, node: int) -> int:
        """Return the first rank of a host."""
        return self._node_ranks[node][0]

    def _items(self, plan: WritePlan, nodes: Sequence[int]) -> tuple[list[_WriteItem], list[_WriteItem]]:
        """Return what this rank writes or digests itself, and its sends and receives in an order equal on all ranks."""
        rank, node_here = self._comm.rank, self._comm.node_rank
        senders = self._senders()
        pieces = pieces_with_receipts(plan, rank)
        # Their places are taken now: boxes are written in another order than the plan's.
        self._receipts = Receipts([b""] * len(pieces), [number for number, _, _ in pieces])
        local: list[_WriteItem] = []
        messages: list[_WriteItem] = []
        for receipt, (number, tensor, piece) in enumerate(pieces):
            node, dst = nodes[tensor.file], -1
            if piece.is_written:
                dst = rank if node == node_here else self._peer_of(rank, node)
            item = _WriteItem(tensor, number, piece.number, piece.box, piece.box_index, rank, dst, receipt)
            (local if dst in (rank, -1) else messages).append(item)
        if senders is not None:
            for number, tensor in enumerate(plan.tensors):
                if nodes[tensor.file] == node_here:
                    for index, box, src in pieces_written_by(tensor.pieces, senders):
                        messages.append(_WriteItem(tensor, number, index, box, -1, src, rank, -1))
        # Sends and receives in one order of all ranks: each rank waits only for an earlier message.
        return local, sorted(messages, key=attrgetter("number", "piece"))

    def _peer_of(self, rank: int, node: int) -> int:
        """Return the rank of another host that writes a rank's boxes: that with its local rank, modulo their number.

        Each rank finds it by itself, and the boxes are spread over all ranks of that host.
        """
        there = self._node_ranks[node]
        return there[self._node_ranks[self._comm.nodes[rank]].index(rank) % len(there)]

    def _senders(self) -> NDArray[np.bool_] | None:
        """Return which ranks of other hosts send their boxes of this host's files to this rank; None for one host."""
        if self._comm.num_nodes == 1:
            return None
        here = self._comm.node_rank
        senders = np.zeros(self._comm.world_size, np.bool_)
        for rank, node in enumerate(self._comm.nodes):
            if node != here:
                senders[rank] = self._peer_of(rank, here) == self._comm.rank
        return senders

    def run(self, opened: _Files) -> Receipts:
        """Write this rank's own boxes, then send and receive the others; return the receipts."""
        for item in self._local:
            self._supply(item, opened)
        # Messages last: until then no rank waits for another, and each writes at its own speed.
        for item in self._messages:
            if item.src == self._comm.rank:
                self._supply(item, opened)
            else:
                self._receive(item, opened)
        return self._receipts

    # At the first box that needs one: most lie on the host as the file has them.

    @cached_property
    def _write_staging(self) -> Staging:
        return Staging()

    @cached_property
    def _send_staging(self) -> Staging:
        return Staging(MESSAGE_BYTES)

    def _supply(self, item: _WriteItem, opened: _Files) -> None:
        """Write, send or only digest a box of this rank."""
        tensor = local_box(self._described, item.tensor.source, item.box_index)
        memories = self._described.tensors[item.tensor.source].memory
        if memories and item.dst == item.src:
            memory = memories[item.box_index]
            begin = begin_of_run(item.box, item.tensor.shape)
            # Rows in host memory are one run of the file, too: nothing is cast, and no window is placed.
            if memory.is_run and memory.dtype == item.tensor.dtype and begin is not None:
                self._receipts.digests[item.receipt] = opened.write_run(item, begin, run_bytes(memory.tensor))
                return
        hasher = xxhash.xxh3_128()
        # Messages have the windows that `_receive` expects.
        staging = self._write_staging if item.dst in (item.src, -1) else self._send_staging
        for window, data in staging.parts(tensor, item.tensor.dtype):
            # Before the write, while the data is in the processor's cache.
            hasher.update(data)
            if item.dst < 0:
                opened.report(len(data))
                continue
            if item.dst == item.src:
                opened.write(item, to_global(window, item.box), data)
            else:
                self._comm.send(np.frombuffer(data, np.uint8), item.dst)
            opened.count(len(data))
        self._receipts.digests[item.receipt] = hasher.digest()
        if item.dst >= 0 and staging.num_overflows:
            overflows = self._receipts.overflows
            overflows[item.number] = overflows.get(item.number, 0) + staging.num_overflows

    def _receive(self, item: _WriteItem, opened: _Files) -> None:
        """Receive a box of another rank and write it."""
        for window, part in received_parts(self._comm, item.box.shape, item.tensor.dtype, item.src):
            opened.write(item, to_global(window, item.box), part)
            opened.report(len(part))


class _Files:
    """The output files, written in place, with progress and bounded dirty pages.

    One is open at a time: boxes come in the order of the files, of which an export may have thousands.
    """

    def __init__(
        self,
        planned: Sequence[WriteFile],
        comm: Communicator,
        total: int,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self._files = planned
        self._comm = comm
        self._total = total
        self._done = 0
        self._dirty = 0
        self._unreported = 0
        self._on_progress = on_progress
        self._number = self._fd = -1  # of the open file

    def __enter__(self) -> _Files:
        return self

    def write(self, item: _WriteItem, box: Box, data: memoryview) -> None:
        """Write a part of an item's box."""
        tensor, file, fd = item.tensor, self._files[item.tensor.file], self._open(item.tensor.file)
        write_box(fd, tensor.begin, tensor.shape, tensor.dtype, box, data, file.path, reserved=file.is_reserved)
        self._dirty += len(data)
        if self._dirty > _SYNC_EVERY_BYTES:
            self._sync(file)

    def write_run(self, item: _WriteItem, begin: int, data: memoryview) -> bytes:
        """Write the bytes of a box that is one run from element `begin` of its tensor on; return their digest."""
        tensor, file, fd = item.tensor, self._files[item.tensor.file], self._open(item.tensor.file)
        in_file = tensor.begin + begin * ITEMSIZE[tensor.dtype]
        hasher = xxhash.xxh3_128()
        for at in range(0, len(data), files.WINDOW_BYTES):
            part = data[at : at + files.WINDOW_BYTES]
            # Before the write, while the part is in the processor's cache.
            hasher.update(part)
            files.pwrite_all(fd, part, in_file + at, file.path)
            self._dirty += len(part)
            if self._dirty > _SYNC_EVERY_BYTES:
                self._sync(file)
            self.count(len(part))
        return hasher.digest()

    def write_header(self, number: int, header: bytes) -> None:
        """Write the first bytes of a file."""
        files.pwrite_all(self._open(number), header, 0, self._files[number].path)

    def count(self, nbytes: int) -> None:
        """Count bytes that this rank has written or sent, and report progress."""
        self._done += nbytes
        self.report(nbytes)
        if self._on_progress is not None:
            self._on_progress(self._done, self._total)

    def report(self, nbytes: int) -> None:
        """Tell the other ranks that bytes have moved, about once in a megabyte; raise what `progress` raises."""
        self._unreported += nbytes + files.PART_BYTES
        if self._unreported >= files.REPORTED_BYTES:
            self._unreported = 0
            self._comm.progress()

    def _open(self, number: int) -> int:
        """Return the descriptor of a file; close the one that was open before."""
        if number != self._number:
            if self._number >= 0:
                self._close()
            file = self._files[number]
            self._fd = files.open_for_writing(file.path, file.link, file.identity)
            self._number = number
        return self._fd

    def _close(self) -> None:
        file, self._number = self._files[self._number], -1
        with files.closing(self._fd, file.path):
            self._sync(file)

    def _sync(self, file: WriteFile) -> None:
        if not file.link:  # nobody reads a file without a name after a power cut
            files.sync_file(self._fd, file.path)
        self._dirty = 0

    def __exit__(self, kind: object, *exception: object) -> None:
        """Sync and close the open file. The system may report a full disk only at the close."""
        if kind is None and self._number >= 0:
            self._close()
        elif self._number >= 0:
            with contextlib.suppress(OSError):  # the first failure counts
                os.close(self._fd)
