"""The interface of a backend: how ranks move bytes and reduce tensors.

To add a backend, subclass `Backend` in a module of this folder and give it `all_gather_bytes`, `send` and `recv`, and,
if it carries messages before there is shared memory, `new_group`: every collective has a plain implementation by
`all_gather_bytes` here, which a backend overrides for speed. A backend without `send` and `recv` can only be a
bootstrap backend (bootstrap.py). `init` (init.py) chooses it, and `tests/conformance` checks it.

Rules for an implementation. It never blocks without polling its `wait`, whose `until` begins the deadline anew: one
call for each piece of a long message. If a connection ends, it raises a PeerError of rank -1, also if it knows the
peer: the session then asks the failure monitor why the peer left. A StallError is an OSError: `except OSError` around a
wait would swallow it. A method that raises keeps alive the tensors and
requests that the transport may still touch. Sends, receives and one collective may run at once, in several threads.
What holds descriptors is cut off in forked children (`forks`). Tensors arrive prepared by `collectives`:
one-dimensional and contiguous.
"""

from __future__ import annotations

import contextlib
import functools
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from statexchange.comm.wait import Wait
from statexchange.errors import InvalidArgumentError, UnsupportedError

# Torch is imported by the methods that need it: over MPI, values, barriers and groups work without it.
if TYPE_CHECKING:
    import torch

    from statexchange.comm.backends.reduction import Finish

# Bytes of a message that goes in one step, and how much of it is payload. Most of this package's messages are shorter.
_RECORD, _INLINE = 256, 248


class Leaders:
    """The leaders of all hosts, for the exchange between them in `through_leaders`. A leader is its host's lowest rank.

    `rank` is this one among the leaders, `counts` the number of ranks that each of them leads.
    """

    def __init__(self, backend: Backend, wait: Wait, counts: Sequence[int]) -> None:
        self.rank = backend.rank
        self.counts = list(counts)
        self._backend = backend
        self._wait = wait

    def all_to_all(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send each leader its tensor, which may be empty; return those received. Collective over the leaders.

        All tensors of this leader are one-dimensional and of one dtype; two leaders send each other equal sizes.
        """
        import torch

        data = torch.cat(list(tensors))
        into = torch.empty_like(data)  # as large, since two leaders send each other equal sizes
        sizes = [tensor.nbytes for tensor in tensors]
        self._backend.all_to_all(data.view(torch.uint8), sizes, into.view(torch.uint8), sizes, self._wait)
        return list(torch.split(into, [tensor.numel() for tensor in tensors]))

    def all_gather(self, data: torch.Tensor) -> list[torch.Tensor]:
        """Return the `data` of every leader, uint8 and of one size on all. Collective over the leaders."""
        into = data.new_empty(len(self.counts) * data.numel())
        if data.numel():
            self._backend.all_gather(data, into, self._wait)
        return list(into.view(len(self.counts), -1))


Between: TypeAlias = Callable[[Leaders, "torch.Tensor"], None]
"""Exchanges the sums of the hosts' tensors among the leaders, in place. Collective over the leaders."""


class Backend(ABC):
    """The transport of messages and tensors between ranks.

    Tensors are one-dimensional and contiguous, of the same length and dtype on all ranks unless said otherwise, and on
    the device that `device_type` names; moves, such as `broadcast`, get them as uint8. Operations are "sum", "min",
    "max" and "prod". Only a backend that `enters_itself` gets empty tensors; all get them in `all_to_all`.
    """

    name: str
    rank: int
    world_size: int
    device_type: str = "cpu"
    enters_itself: bool = False
    """Whether its tensor methods call `wait.enter` themselves; for others it has been called before."""

    @functools.cached_property
    def reductions(self) -> dict[object, Any]:
        """A cache of the `Reduction` objects of `collectives`, by op and dtype."""
        # It ends with the backend, on which they depend: what it reduces itself, and by what an average is divided.
        return {}

    @abstractmethod
    def all_gather_bytes(self, payload: bytes, wait: Wait) -> list[bytes]:
        """Return every rank's payload, of any length, in rank order. Collective."""

    @property
    def flat(self) -> Backend:
        """The backend that moves bytes between single ranks: another one if this reduces within hosts first."""
        return self

    def new_group(self, ranks: Sequence[int], timeout_s: float) -> Backend:  # noqa: ARG002 (others use them)
        """Return a new backend over `ranks` of this one, in that order. Collective over those ranks only.

        It may be a bootstrap backend, by which the ranks find each other: who moves tensors asks for its `transport`.

        Raises:
            StallError: ranks have not called within `timeout_s`; `missing` has them, by their ranks in this backend.
                A group that can be made without the others does not wait for them.
        """
        raise UnsupportedError(f"the {self.name} backend makes no groups")

    def transport(self, timeout_s: float) -> Backend:  # noqa: ARG002 (most have nothing to set up)
        """Return the backend that moves tensors between hosts: this one, or one that is made over it. Collective.

        Another one also closes this one; if this raises, `form_communicator` closes it.
        """
        return self

    def as_caller(self) -> contextlib.AbstractContextManager[object]:
        """Return a context that gives another thread the state of this one: torch's inference mode. Not collective."""
        import torch

        # Torch keeps the mode by thread. Outside of it, tensors that were made in it cannot be written in place.
        return torch.inference_mode(torch.is_inference_mode_enabled())

    def leave(self, error: BaseException | None) -> None:  # noqa: B027 (most cannot reach them)
        """Report to ranks that wait for this one in a collective that it leaves, and why. Not collective."""

    def close(self) -> None:  # noqa: B027 (most hold nothing)
        """Free what the backend holds, but no backend that the session closes. Not collective."""

    def empty(self, nbytes: int, wait: Wait) -> torch.Tensor:  # noqa: ARG002 (shared memory uses it)
        """Return `nbytes` (> 0) of uint8 memory that this backend reduces fastest. Collective, with equal `nbytes`."""
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def reduces(self, op: str, dtype: torch.dtype) -> bool:
        """Whether its reductions are right for every value of `dtype`, including NaN and the limits of half precision.

        Where they are not, `Reduction` converts to float32, float64, int64 or uint8. So `all_reduce` must always be
        right for these, as long as there is no NaN and no overflow.
        """
        from statexchange.comm.backends import reduction

        return reduction.reduces_locally(op, dtype)

    def all_reduce(self, tensor: torch.Tensor, op: str, finish: Finish, wait: Wait) -> None:
        """Reduce `tensor` over all ranks, in place. Collective. From all bytes, it is right for every dtype."""
        from statexchange.comm.backends import reduction

        gathered = self.all_gather_bytes(reduction.to_bytes(tensor), wait)
        # Bytes arrive on the CPU, also for a tensor of a GPU.
        parts = [reduction.from_bytes(data, tensor.dtype).to(tensor.device) for data in gathered]
        reduction.reduce_parts(tensor, parts, op, finish)

    def reduce(self, tensor: torch.Tensor, op: str, root: int, finish: Finish, wait: Wait) -> None:
        """Reduce `tensor` over all ranks, in place on `root` only. Collective."""
        result = tensor
        if self.rank != root:
            result = tensor.clone()  # `all_reduce` writes in place, and the tensors of the others stay as they are
        self.all_reduce(result, op, finish, wait)

    def reduce_scatter(self, tensor: torch.Tensor, into: torch.Tensor, op: str, finish: Finish, wait: Wait) -> None:
        """Write this rank's part of the reduction into `into`; `tensor` holds `world_size` parts. Collective."""
        # `all_reduce` writes in place, and the caller's tensor stays as it is.
        result = tensor.clone()
        self.all_reduce(result, op, finish, wait)
        into.copy_(result.view(self.world_size, -1)[self.rank])

    def through_leaders(self, tensor: torch.Tensor, between: Between, wait: Wait) -> None:
        """Sum `tensor` on each host's leader, let `between` change it there, and copy it to the host. Collective.

        Without a hierarchy each rank leads itself alone.
        """
        between(Leaders(self, wait, [1] * self.world_size), tensor)

    def broadcast(self, data: torch.Tensor, root: int, wait: Wait) -> None:
        """Copy the `data` of `root` to all ranks. Collective."""
        from statexchange.comm.backends import reduction

        # All ranks must take part in a gathering; only root's bytes are read.
        sent = b""
        if self.rank == root:
            sent = reduction.to_bytes(data)
        parts = self.all_gather_bytes(sent, wait)
        if self.rank != root:
            data.copy_(reduction.from_bytes(parts[root], data.dtype))

    def all_gather(self, data: torch.Tensor, into: torch.Tensor, wait: Wait) -> None:
        """Write every rank's `data` into `into`, in rank order. Collective."""
        from statexchange.comm.backends import reduction

        answers = self.all_gather_bytes(reduction.to_bytes(data), wait)
        for part, answer in zip(into.view(self.world_size, -1), answers, strict=True):
            part.copy_(reduction.from_bytes(answer, data.dtype))

    def all_to_all(
        self, data: torch.Tensor, sizes: Sequence[int], into: torch.Tensor, into_sizes: Sequence[int], wait: Wait
    ) -> None:
        """Send part i of `data` (of `sizes[i]`) to rank i; receive part i of `into` from rank i. Collective."""
        from statexchange.comm.backends import reduction

        # Every rank gets all parts of all ranks, and their sizes, by which it skips those of others.
        header = struct.Struct(f"<{self.world_size}Q")
        answers = self.all_gather_bytes(header.pack(*sizes) + reduction.to_bytes(data), wait)
        into_begin = 0
        for answer, size in zip(answers, into_sizes, strict=True):
            begin = header.size + sum(header.unpack_from(answer)[: self.rank])
            part = reduction.from_bytes(answer[begin : begin + size], into.dtype)
            into[into_begin : into_begin + size].copy_(part)
            into_begin += size

    def send(self, data: torch.Tensor, dst: int, tag: int, wait: Wait) -> None:  # noqa: ARG002
        """Send to `dst`; return when `data` may be used again. Not collective.

        Messages of one tag between two ranks keep their order; `tag` is 0, 1 or 2.
        """
        raise UnsupportedError(f"the {self.name} backend does not send to single ranks")

    def recv(self, data: torch.Tensor, src: int, tag: int, wait: Wait) -> None:  # noqa: ARG002
        """Receive from `src` exactly as many bytes as `data` holds. Not collective."""
        raise UnsupportedError(f"the {self.name} backend does not send to single ranks")


def gather_in_two_steps(
    payload: bytes, world_size: int, gather: Callable[[bytes, list[int]], list[bytes]]
) -> list[bytes]:
    """Return every rank's payload: short ones by one call of `gather`, the rest of long ones by a second. Collective.

    `gather` returns every rank's bytes, whose sizes it is given; it may pad them. The payloads ``b"ab"`` and ``b""`` go
    as one record of 256 bytes each: 8 bytes with the length 2 or 0, the payload, and zeros.
    """
    if world_size == 1:
        return [payload]
    # Ranks do not know each other's sizes yet, and a collective needs them: so all records have one size.
    record = (len(payload).to_bytes(8, "little") + payload[:_INLINE]).ljust(_RECORD, b"\0")
    records = gather(record, [_RECORD] * world_size)
    sizes = [int.from_bytes(record[:8], "little") for record in records]
    rests = [b""] * world_size
    # All ranks have all sizes, so all make the second call or none does; short payloads send nothing in it.
    if max(sizes) > _INLINE:
        rests = gather(payload[_INLINE:], [max(size - _INLINE, 0) for size in sizes])
    return [(record[8:] + rest)[:size] for record, rest, size in zip(records, rests, sizes, strict=True)]


def check_ranks(ranks: Sequence[int], rank: int, world_size: int) -> None:
    """Raise InvalidArgumentError unless `ranks` are distinct and below `world_size`, `rank` among them.

    Not collective.
    """
    if not isinstance(ranks, Sequence) or not all(hasattr(r, "__index__") for r in ranks):
        raise InvalidArgumentError(f"ranks are a sequence of integers, not {ranks!r}")
    if not ranks or len(set(ranks)) != len(ranks) or any(not 0 <= r < world_size for r in ranks):
        raise InvalidArgumentError(f"ranks must be distinct and within 0..{world_size - 1}, not {list(ranks)}")
    if rank not in ranks:
        raise InvalidArgumentError(f"rank {rank} is not among ranks {list(ranks)}", rank=rank)
