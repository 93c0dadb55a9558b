"""Collectives of ranks on one host, through shared memory alone.

Memory. Every rank has a staging buffer: two windows of 1 MiB, made at the start. Each rank writes only its own
windows, and all ranks read them. What lies in ordinary memory is copied through the windows piece by piece, so that it
stays in cache. A tensor from `empty` lies in shared memory already (a *region*), and is reduced there: rank r then
writes slice r of every rank's tensor. Each rank reduces one slice, in rank order, so that all ranks get equal bits.

Steps. All synchronisation is by barriers of the control page (`Wait.enter`, `sync`):

    small reduction    write the window; enter; every rank reduces all windows for itself
    large reduction    enter; write the window; sync; then for each piece: reduce the own slice into the own window;
                       write the next piece into the other window; sync; read the slices of all
    in place           enter, with the location of the tensor in its region; reduce the own slice; sync
    moves              enter; for each piece: write the window; sync; read those of the others

Two windows are used in turn. A rank reads a window between two barriers, so one that has passed a barrier may write the
window that was read before it. Only a large reduction writes one earlier, while the results in its own slice may still
be read: see `_reduce_by_windows`.

Failure. Ranks that have entered different calls raise before any caller's tensor is written. A rank that dies or leaves
shows at the next barrier, where all others raise (control_page.py); the tensors may then hold a part of the result.

Life of the memory. Every rank has all ranks' staging buffers and regions mapped. A region of which no rank has a tensor
any more is released at the next `empty`, where the ranks compare which of them have one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from statexchange.comm.backends.backend import Backend
from statexchange.comm.backends.mailbox import Mailbox
from statexchange.comm.backends.reduction import Finish, reduce_parts
from statexchange.comm.failure.control_page import ControlPage, DifferentCallsError
from statexchange.comm.wait import Wait
from statexchange.errors import StorageError
from statexchange.shared_memory import Arena, Attached

_log = logging.getLogger("statexchange")
_WINDOW_BYTES = 1 << 20
_SMALL_BYTES = 1 << 19  # of all ranks together; up to this size every rank reduces all of it, which saves barriers
_CHUNK_BYTES = 1 << 18  # stays in cache between the reduction and the copies of its result
_MAX_KEPT_VIEWS = 256
_LINE_BYTES = 64  # no two ranks write to one cache line: it would move between their cores with each store
_OFFSET_BITS = 40  # of a location, a word of the page: 2**24 regions of up to 1 TiB
_USED, _MEMORY, _SIZES, _MESSAGE = 1, 2, 3, 4  # fingerprints of this backend's own messages on the page


class _SharedMemory(NamedTuple):
    """This rank's part of memory that all ranks have made together, and the mappings of all ranks' parts, by rank."""

    arena: Arena
    mappings: list[Attached]


@dataclass(slots=True)
class _Region:
    """The memory of one `empty` call, as long as any rank has a tensor in it."""

    memory: _SharedMemory
    base: weakref.ref[Any]
    """Alive while this rank has a tensor in it."""
    address: int
    nbytes: int


def _tensor_over(memory: Any) -> torch.Tensor:
    """Return a tensor over `memory`. It outlives the call, so it is not made in the caller's inference mode."""
    with torch.inference_mode(False):
        return torch.from_numpy(memory)


class SharedMemoryBackend(Backend):
    """The backend of one rank among the ranks of a host, over `page`; "threads" if these are threads."""

    enters_itself = True

    def __init__(self, page: ControlPage, name: str = "shm") -> None:
        self.name = name
        self.rank = page.rank
        self.world_size = page.world_size
        self._small_bytes = min(_SMALL_BYTES // self.world_size, _WINDOW_BYTES)
        self._page = page
        self._staging: Arena | None = None
        self._turn = 0
        self._windows: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._views: dict[tuple[torch.dtype, int], list[list[torch.Tensor]]] = {}
        self._regions: dict[int, _Region] = {}
        self._opened = 0  # the number of the last region, equal on all ranks
        self._has_warned = False
        self._mailboxes: dict[tuple[int, int], Mailbox] = {}

    def all_gather_bytes(self, payload: bytes, wait: Wait) -> list[bytes]:
        """Return every rank's payload, through the page. Collective."""
        return self._page.all_gather_bytes(payload, None, _MESSAGE, wait)

    def leave(self, error: BaseException | None) -> None:
        """Announce leaving on the page. Not collective."""
        self._page.leave(error)

    def close(self) -> None:
        """Leave the page and release all memory, except what tensors refer to. Not collective."""
        self._page.leave()
        for region in self._regions.values():
            region.memory.arena.close()
        self._regions.clear()
        if self._staging is not None:
            self._staging.close()
        self._views.clear()
        self._windows = ([], [])
        for mailbox in self._mailboxes.values():
            mailbox.close()

    # Where memory lies

    def set_up(self, wait: Wait) -> bool:
        """Make the staging buffers; return False, on all ranks, if one has too little memory. Collective."""
        memory = self._share(2 * _WINDOW_BYTES, wait)
        if memory is None:
            return False
        self._staging = memory.arena
        staging = [_tensor_over(mapping.lend()) for mapping in memory.mappings]
        with torch.inference_mode(False):  # see _tensor_over
            first = [buffer[:_WINDOW_BYTES] for buffer in staging]
            second = [buffer[_WINDOW_BYTES:] for buffer in staging]
        self._windows = (first, second)
        return True

    def _share(self, nbytes: int, wait: Wait) -> _SharedMemory | None:
        """Make memory of which each rank has `nbytes`; return None, on all ranks, if one has too little. Collective."""
        arena: Arena | None = None
        offer = None
        with contextlib.suppress(StorageError):
            arena = Arena.create(nbytes)
            offer = arena.address
        answers = self._page.all_gather_bytes(json.dumps(offer).encode(), None, _MEMORY, wait)
        addresses = list(map(json.loads, answers))
        if arena is None or None in addresses:
            if arena is not None:
                arena.close()
            return None
        mappings = [self._page.attach(address, rank, wait) for rank, address in enumerate(addresses)]
        self._page.sync(wait)  # until all have attached, an arena must not be closed
        return _SharedMemory(arena, mappings)

    def _next_window(self, dtype: torch.dtype, n: int) -> list[torch.Tensor]:
        """Switch windows, and return the first `n` elements of every rank's, as `dtype`.

        The views are kept, as making them takes longer than adding up the elements of a small tensor.
        """
        views = self._views.get((dtype, n))
        if views is None:
            if len(self._views) >= _MAX_KEPT_VIEWS:
                self._views.clear()
            with torch.inference_mode(False):  # see _tensor_over
                views = []
                for windows in self._windows:
                    views.append([window.view(dtype)[:n] for window in windows])
            self._views[dtype, n] = views
        self._turn ^= 1
        return views[self._turn]

    def empty(self, nbytes: int, wait: Wait) -> torch.Tensor:
        """Return memory that all ranks see; it is released once no rank has a tensor in it. Collective.

        If a rank has too little shared memory left, all get ordinary memory, with a warning.
        """
        self._release_unused(wait)
        memory = self._share(nbytes, wait)
        if memory is None:
            self._warn_full(nbytes)
            return super().empty(nbytes, wait)
        # An array: every view of it, and so every tensor over it, keeps it alive.
        base = memory.mappings[self.rank].lend()[:nbytes]
        self._opened += 1
        self._regions[self._opened] = _Region(memory, weakref.ref(base), base.ctypes.data, nbytes)
        return _tensor_over(base)

    def _release_unused(self, wait: Wait) -> None:
        """Release the regions in which no rank has a tensor. Collective."""
        used = [number for number, region in self._regions.items() if region.base() is not None]
        used_by_any: set[int] = set()
        for answer in self._page.all_gather_bytes(json.dumps(used).encode(), None, _USED, wait):
            used_by_any.update(json.loads(answer))
        for number in self._regions.keys() - used_by_any:
            self._regions.pop(number).memory.arena.close()
        self._page.sync(wait)  # until all have released theirs, the memory is not free for what is made next

    def _warn_full(self, nbytes: int) -> None:
        if self.rank == 0 and not self._has_warned:
            _log.warning("no room for %d bytes of shared memory on each rank: empty() gives ordinary memory", nbytes)
        self._has_warned = True

    def _locate(self, tensor: torch.Tensor) -> int:
        """Return the location of `tensor`: the number of its region and the offset there; 0 if it lies in none."""
        address = tensor.data_ptr()
        nbytes = tensor.numel() * tensor.itemsize
        # A part of a region counts, too: a bucket is a part of what `empty` returned.
        for number, region in self._regions.items():
            if region.address <= address and address + nbytes <= region.address + region.nbytes:
                return number << _OFFSET_BITS | (address - region.address)
        return 0

    def _at(self, location: int, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor at `location` in the memory of `rank`, of the size and dtype of `tensor`."""
        if rank == self.rank:
            return tensor
        # A region has one number on all ranks, as they make them in the same order.
        begin = location & ((1 << _OFFSET_BITS) - 1)
        base = _tensor_over(self._regions[location >> _OFFSET_BITS].memory.mappings[rank].lend())
        return base[begin : begin + tensor.numel() * tensor.itemsize].view(tensor.dtype)

    # Reductions

    def all_reduce(self, tensor: torch.Tensor, op: str, finish: Finish, wait: Wait) -> None:
        """Reduce in place if all tensors are large and lie in regions, else through the staging buffers. Collective."""
        if tensor.nbytes <= self._small_bytes:
            self._reduce_all(tensor, op, finish, wait, keeps=True)
            return
        locations = wait.enter(self._locate(tensor))
        # All ranks decide alike, as all have the locations of all.
        if all(locations):
            self._reduce_in_place([self._at(at, r, tensor) for r, at in enumerate(locations)], op, finish)
            self._page.sync(wait)  # until then the other ranks write into this rank's tensor
        else:
            self._reduce_by_windows(tensor, op, finish, wait, keeps=True)

    def reduce(self, tensor: torch.Tensor, op: str, root: int, finish: Finish, wait: Wait) -> None:
        """Reduce through the staging buffers. Collective."""
        keeps = self.rank == root
        if tensor.nbytes <= self._small_bytes:
            self._reduce_all(tensor, op, finish, wait, keeps=keeps)
        else:
            wait.enter()
            self._reduce_by_windows(tensor, op, finish, wait, keeps=keeps)

    def _reduce_all(self, tensor: torch.Tensor, op: str, finish: Finish, wait: Wait, *, keeps: bool) -> None:
        """Reduce a small tensor: every rank that `keeps` the result computes all of it."""
        parts = self._next_window(tensor.dtype, tensor.numel())
        # Before the entry, so that its barrier serves for the data, too.
        parts[self.rank].copy_(tensor)
        try:
            wait.enter()
        except DifferentCallsError:
            self._turn ^= 1  # nothing has been read: use this window again, so that all ranks are at the same one
            raise
        if keeps:
            reduce_parts(tensor, parts, op, finish)

    def _reduce_in_place(self, parts: Sequence[torch.Tensor], op: str, finish: Finish) -> None:
        """Reduce this rank's slice of all tensors, chunk by chunk, and write the result into each of them."""
        begin, end = self._slices(parts[0])[self.rank]
        # Chunk by chunk, so that a result is still in cache when it is copied to the other ranks' tensors.
        step = _CHUNK_BYTES // parts[0].itemsize
        others = [*parts]
        del others[self.rank]
        for at in range(begin, end, step):
            chunk = slice(at, min(at + step, end))
            result = parts[self.rank][chunk]
            reduce_parts(result, [part[chunk] for part in parts], op, finish)
            for part in others:
                part[chunk].copy_(result)

    def _slices(self, tensor: torch.Tensor) -> list[tuple[int, int]]:
        """Return the slice of a tensor that each rank reduces, as (begin, end): equal shares, cut at cache lines."""
        n, line = tensor.numel(), max(_LINE_BYTES // tensor.itemsize, 1)
        share = -(-n // (self.world_size * line)) * line
        return [(min(r * share, n), min((r + 1) * share, n)) for r in range(self.world_size)]

    def _reduce_by_windows(self, tensor: torch.Tensor, op: str, finish: Finish, wait: Wait, *, keeps: bool) -> None:
        """Reduce window by window through the staging buffers.

        The next piece is written before the barrier that makes this one's results readable, which saves a barrier. It
        goes into the window of the piece before this one. Other ranks may still be reading the results of that piece,
        which lie in this rank's slice, so the slice must stay untouched: therefore all pieces are cut alike.
        """
        pieces = torch.split(tensor, _WINDOW_BYTES // tensor.itemsize)
        slices = self._slices(pieces[0])  # the last piece may be shorter, and has what there is of them
        begin, end = slices[self.rank]
        staging = self._lay_out(pieces[0], begin, end)
        self._page.sync(wait)
        for i, piece in enumerate(pieces):
            parts = [*staging]
            parts[self.rank] = piece  # its slice was not copied into the window, which takes the result
            result = staging[self.rank][begin:end]
            reduce_parts(result, [part[begin:end] for part in parts], op, finish)
            following = []
            if piece is not pieces[-1]:
                following = self._lay_out(pieces[i + 1], begin, end)
            self._page.sync(wait)
            if keeps:
                for rank, (first, past) in enumerate(slices):
                    piece[first:past].copy_(staging[rank][first:past])
            staging = following

    def _lay_out(self, piece: torch.Tensor, begin: int, end: int) -> list[torch.Tensor]:
        """Switch windows; write `piece` into this rank's, without its slice; return every rank's."""
        staging = self._next_window(piece.dtype, piece.numel())
        staging[self.rank][:begin].copy_(piece[:begin])
        staging[self.rank][end:].copy_(piece[end:])
        return staging

    def reduce_scatter(self, tensor: torch.Tensor, into: torch.Tensor, op: str, finish: Finish, wait: Wait) -> None:
        """Reduce through the staging buffers; each window holds a piece of every rank's part. Collective."""
        wait.enter()
        rows = tensor.view(self.world_size, -1)
        step = _WINDOW_BYTES // tensor.itemsize // self.world_size
        # A piece needs one barrier, not two: the next one is written into the other window.
        for at in range(0, into.numel(), step):
            block = rows[:, at : at + step]
            width = block.shape[1]
            staging = [buffer.view_as(block) for buffer in self._next_window(tensor.dtype, block.numel())]
            staging[self.rank].copy_(block)
            self._page.sync(wait)
            reduce_parts(into[at : at + width], [buffer[self.rank] for buffer in staging], op, finish)

    # Moves

    def broadcast(self, data: torch.Tensor, root: int, wait: Wait) -> None:
        """Copy from root's memory if it is shared, else through its staging buffer. Collective."""
        is_root = self.rank == root
        # The others' locations are not read, but all ranks must give one.
        location = wait.enter(self._locate(data) if is_root else 0)[root]
        if not location:
            if is_root:
                self._move(data, data.numel(), [], wait)
            else:
                self._move(None, data.numel(), [(root, 0, data)], wait)
            return
        if not is_root:
            data.copy_(self._at(location, root, data))
        self._page.sync(wait)  # until all have read it, root must not change the tensor

    def all_gather(self, data: torch.Tensor, into: torch.Tensor, wait: Wait) -> None:
        """Gather through the staging buffers. Collective."""
        wait.enter()
        parts = into.view(self.world_size, -1)
        self._move(data, data.numel(), [(rank, 0, part) for rank, part in enumerate(parts)], wait)

    def all_to_all(
        self, data: torch.Tensor, sizes: Sequence[int], into: torch.Tensor, into_sizes: Sequence[int], wait: Wait
    ) -> None:
        """Exchange through the staging buffers. Collective."""
        wait.enter()
        answers = self._page.all_gather_bytes(json.dumps(list(sizes)).encode(), None, _SIZES, wait)
        sizes_by_rank = list(map(json.loads, answers))
        reads = []
        # A sender's bytes for this rank follow those for all lower ranks.
        for rank, part in enumerate(torch.split(into, list(into_sizes))):
            reads.append((rank, sum(sizes_by_rank[rank][: self.rank]), part))
        self._move(data, max(map(sum, sizes_by_rank)), reads, wait)

    def _move(
        self, sent: torch.Tensor | None, longest: int, reads: Sequence[tuple[int, int, torch.Tensor]], wait: Wait
    ) -> None:
        """Send every rank's bytes through its own windows.

        Args:
            sent: the bytes that this rank sends, if any.
            longest: the largest number of bytes that any rank sends, equal on all ranks.
            reads: what this rank receives: the rank that sends, where in its bytes to begin, and the target.
            wait: the wait of the collective.
        """
        # A rank whose bytes have ended goes on to take part in the barriers.
        for at in range(0, longest, _WINDOW_BYTES):
            staging = self._next_window(torch.uint8, _WINDOW_BYTES)
            if sent is not None:
                shown = sent[at : at + _WINDOW_BYTES]
                staging[self.rank][: shown.numel()].copy_(shown)
            self._page.sync(wait)
            for rank, begin, into in reads:
                first, last = max(begin, at), min(begin + into.numel(), at + _WINDOW_BYTES)
                if first < last:
                    into[first - begin : last - begin].copy_(staging[rank][first - at : last - at])

    # From rank to rank

    def send(self, data: torch.Tensor, dst: int, tag: int, wait: Wait) -> None:
        """Send through the pair's mailbox. Not collective."""
        self._mailbox(self.rank, dst).put(data.numpy().data, tag, wait)

    def recv(self, data: torch.Tensor, src: int, tag: int, wait: Wait) -> None:
        """Receive through the pair's mailbox. Not collective."""
        self._mailbox(src, self.rank).take(data.numpy().data, tag, wait)

    def _mailbox(self, src: int, dst: int) -> Mailbox:
        if (src, dst) not in self._mailboxes:
            self._mailboxes[src, dst] = Mailbox(self._page, src, dst)
        return self._mailboxes[src, dst]
