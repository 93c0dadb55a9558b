"""Tensors of GPUs through an NCCL group of torch.distributed; messages go through a CPU backend.

A method returns when its work is queued on the caller's current stream, which waits for it. The host does not wait, so
a rank that has died is reported by the next message, not here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from statexchange.comm.backends.backend import Backend
from statexchange.comm.backends.reduction import Finish
from statexchange.comm.backends.torch_groups import reduce_options, torch_errors
from statexchange.comm.wait import Wait

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work  # torch.distributed exports it, but not for type checkers

_WIDE = (torch.float32, torch.float64)
_NCCL_INTS = (torch.int8, torch.uint8, torch.int32, torch.int64)


@contextlib.contextmanager
def _both(
    outer: contextlib.AbstractContextManager[object], inner: contextlib.AbstractContextManager[object]
) -> Iterator[None]:
    with outer, inner:
        yield


class NCCLBackend(Backend):
    """One rank of an NCCL group, for tensors of GPUs; messages go through `cpu`, a backend over the same ranks."""

    name = "nccl"
    device_type = "cuda"

    def __init__(self, group: dist.ProcessGroup, cpu: Backend) -> None:
        self._group = group
        self._cpu = cpu
        self.rank = cpu.rank
        self.world_size = cpu.world_size
        assert (self.rank, self.world_size) == (group.rank(), group.size())

    def as_caller(self) -> contextlib.AbstractContextManager[object]:
        """Return a context with the caller's current stream, too. Not collective."""
        # Torch keeps the current stream by thread. On another one the work would not wait for what made its tensors.
        return _both(torch.cuda.stream(torch.cuda.current_stream()), super().as_caller())

    def all_gather_bytes(self, payload: bytes, wait: Wait) -> list[bytes]:
        """Return every rank's payload, through the CPU backend. Collective."""
        return self._cpu.all_gather_bytes(payload, wait)

    def empty(self, nbytes: int, wait: Wait) -> torch.Tensor:  # noqa: ARG002
        """Return memory of the current GPU. Not collective."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device_type)

    def reduces(self, op: str, dtype: torch.dtype) -> bool:
        """Whether NCCL is right: not for sums of halves that are divided later, nor for minima and maxima with NaN."""
        return dtype in _WIDE if op in ("sum", "prod") else dtype in _NCCL_INTS

    def _run(self, post: Callable[[], Work], wait: Wait) -> None:
        with torch_errors(wait):
            # It is the current stream that waits, not this thread.
            post().wait()

    def all_reduce(self, tensor: torch.Tensor, op: str, finish: Finish, wait: Wait) -> None:
        """Reduce by NCCL, in place. Collective."""
        options = reduce_options(dist.AllreduceOptions(), op)
        self._run(lambda: self._group.allreduce([tensor], options), wait)
        finish(tensor)

    def reduce(self, tensor: torch.Tensor, op: str, root: int, finish: Finish, wait: Wait) -> None:
        """Reduce by NCCL, which writes on `root` only. Collective."""
        options = reduce_options(dist.ReduceOptions(), op)
        options.rootRank, options.rootTensor = root, 0
        self._run(lambda: self._group.reduce([tensor], options), wait)
        if self.rank == root:
            finish(tensor)

    def reduce_scatter(self, tensor: torch.Tensor, into: torch.Tensor, op: str, finish: Finish, wait: Wait) -> None:
        """Reduce by NCCL. Collective."""
        options = reduce_options(dist.ReduceScatterOptions(), op)
        self._run(lambda: self._group._reduce_scatter_base(into, tensor, options), wait)  # noqa: SLF001 (torch's)
        finish(into)

    def broadcast(self, data: torch.Tensor, root: int, wait: Wait) -> None:
        """Broadcast by NCCL. Collective."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self._run(lambda: self._group.broadcast([data], options), wait)

    def all_gather(self, data: torch.Tensor, into: torch.Tensor, wait: Wait) -> None:
        """Gather by NCCL. Collective."""
        self._run(lambda: self._group._allgather_base(into, data), wait)  # noqa: SLF001 (torch's)

    def all_to_all(
        self, data: torch.Tensor, sizes: Sequence[int], into: torch.Tensor, into_sizes: Sequence[int], wait: Wait
    ) -> None:
        """Exchange by NCCL. Collective."""
        self._run(lambda: self._group.alltoall_base(into, data, list(into_sizes), list(sizes)), wait)

    def send(self, data: torch.Tensor, dst: int, tag: int, wait: Wait) -> None:
        """Send by NCCL, which keeps the order of all messages between two ranks and has no tags. Not collective."""
        self._run(lambda: self._group.send([data], dst, tag), wait)

    def recv(self, data: torch.Tensor, src: int, tag: int, wait: Wait) -> None:
        """Receive by NCCL. Not collective."""
        self._run(lambda: self._group.recv([data], src, tag), wait)
