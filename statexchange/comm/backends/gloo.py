"""Messages and tensors of CPUs through a Gloo group of torch.distributed.

Works are polled, never waited for, so that the deadline of `Wait` holds. Sends and receives are the exception: Gloo
completes them only for a thread that waits inside it, so each gets a thread that waits there.

The group is this package's own, also where torch.distributed has one of the same ranks: DistributedDataParallel issues
collectives from a thread of its own, and on one group the ranks would match them with ours in different orders.

A Gloo work cannot be cancelled: it ends with Gloo's own timeout, or when the group's connections are closed
(`_break_off`). That ends all works under way, here and on the other ranks. Until then they would keep the process from
exiting. A dead rank gets its name by control_page.py on one host, and by detector.py between hosts. When a wait
(`_complete`) ends with

    a failure of Gloo, or any other error    the connections are closed at once
    a StallError of a collective             they stay open, as Gloo's own timeout is only a second longer
    a StallError of a send or receive        they are closed: its thread waits inside Gloo for a day
    an AbandonedError                        they stay open until `leave`, so that the other ranks first receive the
                                             error for which the message was abandoned
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist

from statexchange.comm import forks
from statexchange.comm.backends.backend import Backend, gather_in_two_steps
from statexchange.comm.backends.reduction import Finish, reduce_parts
from statexchange.comm.backends.torch_groups import (
    GRACE_S,
    LONGEST_S,
    make_gloo_group,
    reduce_options,
    torch_errors,
    torch_timeout,
)
from statexchange.comm.failure.monitor import AbandonedError
from statexchange.comm.wait import Wait
from statexchange.comm.work import Work
from statexchange.errors import StallError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch._C._distributed_c10d import Work as NativeWork

    AnyWork: TypeAlias = NativeWork | Work[object]

_SMALL_BYTES = 1 << 18  # of all ranks together; up to this size one step, above it several
_BLOCK_BYTES = 8 << 20
_NEVER_SENT_TAG = 3  # messages have tags 0 to 2
_WIDE = (torch.float32, torch.float64)
_waiting_threads: dict[threading.Thread, GlooBackend] = {}  # threads that wait inside Gloo, see `_wait_in_thread`
_ended_groups: list[tuple[int, object, list[Any]]] = []  # process, group, works under way: see `_free_ended_groups`


class GlooBackend(Backend):
    """One rank of a Gloo group made from a store.

    Most collectives use Gloo's all-to-all, which needs one step where a ring needs one per rank, and copies nothing.
    The ranks do the arithmetic themselves: equal bits on all ranks, half precision summed in float32, NaN as in IEEE
    754.
    """

    name = "gloo"

    def __init__(self, store: Store, rank: int, names: Sequence[int], timeout_s: float, bootstrap: Backend) -> None:
        """Make the group; errors name rank i as `names[i]`. Collective.

        `store` must not have been used for this before. `bootstrap`, of the same ranks, makes groups of some of them,
        and is closed with this backend.
        """
        _free_ended_groups()
        self._group: Any = make_gloo_group(store, rank, names, timeout_s)
        self._bootstrap = bootstrap
        self._is_broken_off = False
        self._break_off_lock = threading.RLock()  # a signal handler may call `_break_off` while this thread is in it
        self._has_abandoned_message = False
        self.world_size = len(names)
        self.rank = rank
        forks.cut_off_in_children(self)

    def disown(self) -> None:
        """Keep a forked child from closing the connections, which are those of the parent."""
        self._is_broken_off = True
        self._break_off_lock = threading.RLock()  # another thread of the parent may hold the old one

    def _complete(self, wait: Wait, *posts: Callable[[], AnyWork]) -> None:
        """Start all works, then wait for all. While a work is under way it holds its tensors."""
        works: list[AnyWork] = []
        try:
            with torch_errors(wait):
                for post in posts:
                    works.append(post())
                # One deadline for all works, not one for each: Gloo's own timeouts have begun for all of them.
                wait.until(functools.partial(_are_completed, list(works)))
        except BaseException as error:
            _ended_groups.append((os.getpid(), self._group, works))
            if isinstance(error, AbandonedError):
                self._has_abandoned_message = True  # until `leave`, see the top of this file
            elif not isinstance(error, StallError):  # after which Gloo's own timeout comes soon
                self._break_off()
            raise

    def leave(self, error: BaseException | None) -> None:  # noqa: ARG002 (Gloo carries no reason)
        """Close the connections if messages were abandoned. Not collective."""
        if self._has_abandoned_message:
            self._break_off()

    def new_group(self, ranks: Sequence[int], timeout_s: float) -> Backend:
        """Return a bootstrap backend of `ranks`; StallError names those that have not called. Collective over them."""
        return self._bootstrap.new_group(ranks, timeout_s)

    def close(self) -> None:
        """Close the bootstrap backend, and leave the group to be freed. Not collective."""
        self._bootstrap.close()
        # A message that is still under way is broken off at exit, which needs the group.
        if self not in _waiting_threads.values():
            _ended_groups.append((os.getpid(), self._group, []))
            # Without the group there is no connection left that `leave` could close.
            self._group, self._is_broken_off = None, True

    def _break_off(self) -> None:
        """Close the group's connections, once; see the top of this file. While another thread does so, wait for it.

        At exit no thread may be inside Gloo any more.
        """
        with self._break_off_lock:
            if not self._is_broken_off:
                self._is_broken_off = True  # first, for a signal handler that comes in between
                self._close_connections()

    def _close_connections(self) -> None:
        """Close the connection to each peer: a receive that times out makes Gloo do so."""
        for peer in range(self.world_size):
            if peer == self.rank:
                continue
            # The wait always raises: the receive times out, or the connection is closed already.
            with contextlib.suppress(RuntimeError):
                receive = self._group.recv([torch.empty(1, device="cpu")], peer, _NEVER_SENT_TAG)
                receive.wait(timedelta(milliseconds=1))

    # Messages

    def all_gather_bytes(self, payload: bytes, wait: Wait) -> list[bytes]:
        """Return every rank's payload: short ones by one all-gather, the rest of long ones by a second. Collective."""
        return gather_in_two_steps(payload, self.world_size, lambda part, sizes: self._gathered(part, max(sizes), wait))

    def _gathered(self, part: bytes, size: int, wait: Wait) -> list[bytes]:
        """Return every rank's bytes, padded with zeros to `size`."""
        data = torch.frombuffer(bytearray(part.ljust(size, b"\0")), dtype=torch.uint8)
        # Here and elsewhere `device` is given, as a user may have set another default device.
        into = torch.empty(self.world_size * size, dtype=torch.uint8, device="cpu")
        self.all_gather(data, into, wait)
        return [row.tobytes() for row in into.view(self.world_size, size).numpy()]

    # Moves

    def broadcast(self, data: torch.Tensor, root: int, wait: Wait) -> None:
        """Broadcast by Gloo's tree. Collective."""
        self._complete(wait, lambda: self._broadcast(data, root, wait))

    def _broadcast(self, data: torch.Tensor, root: int, wait: Wait) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = root, 0, torch_timeout(wait)
        return self._group.broadcast([data], options)

    def all_gather(self, data: torch.Tensor, into: torch.Tensor, wait: Wait) -> None:
        """Gather small parts in one step, large ones from each rank in turn: Gloo's own all-gather copies twice."""
        sizes = [data.numel()] * self.world_size
        if into.nbytes <= _SMALL_BYTES:
            # The data is repeated for each rank, which costs less than a second step while it is small.
            self.all_to_all(data.repeat(self.world_size), sizes, into, sizes, wait)
            return
        rows = into.view(self.world_size, -1)
        rows[self.rank].copy_(data)
        # Each rank is the root of its own row's broadcast. All of them are under way at once.
        posts = [functools.partial(self._broadcast, row, rank, wait) for rank, row in enumerate(rows)]
        self._complete(wait, *posts)

    def all_to_all(
        self, data: torch.Tensor, sizes: Sequence[int], into: torch.Tensor, into_sizes: Sequence[int], wait: Wait
    ) -> None:
        """Exchange by Gloo's all-to-all. Collective."""
        options = dist.AllToAllOptions()
        options.timeout = torch_timeout(wait)
        self._complete(wait, lambda: self._group.alltoall_base(into, data, list(into_sizes), list(sizes), options))

    def send(self, data: torch.Tensor, dst: int, tag: int, wait: Wait) -> None:
        """Send by Gloo. Not collective."""
        self._transfer(lambda: self._group.send([data], dst, tag), wait)

    def recv(self, data: torch.Tensor, src: int, tag: int, wait: Wait) -> None:
        """Receive by Gloo. Not collective."""
        self._transfer(lambda: self._group.recv([data], src, tag), wait)

    def _transfer(self, post: Callable[[], NativeWork], wait: Wait) -> None:
        try:
            self._complete(wait, lambda: self._wait_in_thread(post(), wait))
        except StallError:  # no timeout of Gloo's ends the thread before tomorrow
            self._break_off()
            raise

    def _wait_in_thread(self, native: Any, wait: Wait) -> Work[object]:
        """Return the work of a thread that waits for a send or receive, as Gloo completes it only for such a thread.

        The thread waits for a day if need be. The deadline is that of `wait`, and its caller breaks off the work.
        """
        work: Work[object] = Work(wait.operation)

        def wait_inside() -> None:
            nonlocal native
            work.run(lambda: native.wait(timedelta(seconds=LONGEST_S)))
            # Free Gloo's work here, as the exit waits for this thread. If it fails, the traceback of its error keeps it
            # alive in the caller's thread, and a daemon thread that frees it at exit aborts the process.
            native = None
            _waiting_threads.pop(thread, None)

        thread = threading.Thread(target=wait_inside, name=wait.operation, daemon=True)
        _end_threads_at_exit()
        _waiting_threads[thread] = self
        thread.start()
        return work

    # Reductions

    def all_reduce(self, tensor: torch.Tensor, op: str, finish: Finish, wait: Wait) -> None:
        """Reduce small tensors on every rank, large ones by Gloo's ring where it is right, else in parts.

        Collective.
        """
        if tensor.nbytes * self.world_size <= _SMALL_BYTES:
            rows = tensor.new_empty(self.world_size * tensor.numel())
            self.all_gather(tensor.view(torch.uint8), rows.view(torch.uint8), wait)
            reduce_parts(tensor, rows.view(self.world_size, -1).unbind(), op, finish)
        elif op in ("sum", "prod") and tensor.dtype in _WIDE:
            options = reduce_options(dist.AllreduceOptions(), op)
            options.timeout = torch_timeout(wait)
            self._complete(wait, lambda: self._group.allreduce([tensor], options))
            finish(tensor)
        else:
            for block in torch.split(tensor, _BLOCK_BYTES // tensor.itemsize):  # to need little memory besides it
                self._all_reduce_in_parts(block, op, finish, wait)

    def _all_reduce_in_parts(self, tensor: torch.Tensor, op: str, finish: Finish, wait: Wait) -> None:
        """Reduce one part on each rank, and exchange the results: two steps for any number of ranks."""
        # Where the ranks do not divide the elements, the first ones have one more.
        share, more = divmod(tensor.numel(), self.world_size)
        sizes = [share + (rank < more) for rank in range(self.world_size)]
        own_part = self._reduced_part(tensor, sizes, op, finish, wait).view(torch.uint8)
        sent_bytes = [own_part.numel()] * self.world_size
        received_bytes = [size * tensor.itemsize for size in sizes]
        self.all_to_all(own_part.repeat(self.world_size), sent_bytes, tensor.view(torch.uint8), received_bytes, wait)

    def _reduced_part(
        self, tensor: torch.Tensor, sizes: Sequence[int], op: str, finish: Finish, wait: Wait
    ) -> torch.Tensor:
        """Return the reduction of this rank's part of `tensor`, which has `sizes[rank]` elements."""
        size = sizes[self.rank]
        parts = tensor.new_empty(self.world_size * size)
        sent_bytes = [size * tensor.itemsize for size in sizes]
        received_bytes = [size * tensor.itemsize] * self.world_size
        self.all_to_all(tensor.view(torch.uint8), sent_bytes, parts.view(torch.uint8), received_bytes, wait)
        result = parts[:size]
        reduce_parts(result, parts.view(self.world_size, size).unbind(), op, finish)
        return result

    def reduce_scatter(self, tensor: torch.Tensor, into: torch.Tensor, op: str, finish: Finish, wait: Wait) -> None:
        """Get this rank's part from all ranks, and reduce it. Collective."""
        # In blocks of columns, so that the copies of each are small whatever the size of the tensor.
        rows = tensor.view(self.world_size, -1)
        width = max(_BLOCK_BYTES // (tensor.itemsize * self.world_size), 1)
        for block, part in zip(torch.split(rows, width, 1), torch.split(into, width), strict=True):
            sizes = [part.numel()] * self.world_size
            part.copy_(self._reduced_part(block.contiguous().view(-1), sizes, op, finish, wait))


def _are_completed(works: list[AnyWork]) -> bool:
    """Whether all works are completed. Those that are leave the list, and raise what went wrong."""
    while works and works[0].is_completed():
        works.pop(0).wait()
    return not works


def _free_ended_groups() -> None:
    """Free closed groups, and failed ones once their works have ended; called before the next group is made.

    Not collective. Not earlier: peers would see connections end before they know why. Not by the garbage collector: it
    takes 10 ms for each peer, and with a work under way until the work's own timeout. Gloo may still write to the
    tensors of such works. In a forked child the group's threads do not run, and freeing it would wait for them.
    """
    for ended in tuple(_ended_groups):
        pid, _, works = ended
        if pid == os.getpid() and all(work.is_completed() for work in works):
            with contextlib.suppress(ValueError):  # another thread has removed it
                _ended_groups.remove(ended)


@functools.cache
def _end_threads_at_exit() -> None:
    """End the threads inside Gloo at exit: one that still runs when the interpreter ends would abort the process."""
    atexit.register(_end_threads)


def _end_threads() -> None:
    for backend in set(_waiting_threads.values()):
        backend._break_off()  # noqa: SLF001 (our own)
    for thread in list(_waiting_threads):
        thread.join(GRACE_S)
