"""A communication hook: torch's DistributedDataParallel (DDP) averages its buckets by a Communicator.

Order of callbacks. DDP takes a future for each bucket and, at the end of backward, casts its result to a tensor: an
exception in the future would lose its type. And DDP must finish its own work before backward raises: otherwise it could
not be used again, although all ranks may go on after a MismatchError. So a future always gets the bucket's memory as
its result, and a callback of the running backward raises the error. Callbacks run in the order in which they are
queued, and DDP queues its own after those of its hooks. So this hook's callback queues a second one, which runs last.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future as ConcurrentFuture
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from statexchange.comm.calls import site_detail
from statexchange.comm.communicator import CommLike
from statexchange.comm.defaults import as_communicator

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket  # torch.distributed exports it, but not for type checkers

Hook = Callable[[Any, "GradBucket"], "torch.futures.Future[torch.Tensor]"]


def as_comm_hook(comm: CommLike | None = None) -> Hook:
    """Return a hook for ``DistributedDataParallel.register_comm_hook``, which averages DDP's buckets.

    Collective if a communicator has to be made; the hook itself is called by all ranks in backward.
    Buckets are averaged while backward goes on. It raises the errors of the averages: PeerError if a rank has failed,
    MismatchError if ranks are in different calls.

    Args:
        comm: a Communicator, ProcessGroup, DeviceMesh or MPI communicator; by default the current one.

    Returns:
        The hook.

    Example:
        >>> import statexchange as sx
        >>> hook = sx.train.as_comm_hook()
        >>> callable(hook)  # ddp.register_comm_hook(None, hook)
        True
    """
    communicator = as_communicator(comm)
    # One thread is enough: the works of a communicator end in the order in which they were begun.
    waiting = ThreadPoolExecutor(1, "statexchange comm hook")

    def hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        flat = bucket.buffer()
        with site_detail(lambda: f"bucket {bucket.index()} of DDP"):
            work = communicator.all_reduce(flat, "avg", async_op=True)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

        def complete() -> None:
            try:
                work.wait()
            finally:
                future.set_result(flat)  # also after an error: see the top of this file

        _raise_after_backward(waiting.submit(complete))
        return future

    # DDP compares annotations with types, and here they are text.
    hook.__annotations__ = {}
    return hook


def _raise_after_backward(completed: ConcurrentFuture[None]) -> None:
    """Let the running backward raise the error of `completed` after DDP has finished its own work."""
    if torch._C._current_graph_task_id() < 0:  # noqa: SLF001 (torch's `join` runs hooks outside backward)
        completed.result()
        return
    queue = torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001 (torch has no public way)
    queue(lambda: queue(completed.result))
