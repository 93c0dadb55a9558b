"""Reducers: tensors are added one by one as they become ready, and hold their reductions after `finalize`."""

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch

from statexchange.comm.backends.arithmetic import HALVES
from statexchange.comm.calls import call_site
from statexchange.comm.communicator import Communicator
from statexchange.comm.defaults import as_communicator
from statexchange.comm.work import Work
from statexchange.errors import InvalidArgumentError

__all__ = [
    "CoalescingReducer",
    "InlineReducer",
    "Reducer",
    "average_sparse",
    "densified",
    "operation",
    "same_kind",
]

R = TypeVar("R", bound="Reducer")
_log = logging.getLogger("statexchange")


class Reducer(ABC):
    """Tensors that all ranks `add` in the same order hold their reductions when `finalize` returns.

    Between the two they belong to the reducer: do not look at them and do not change them. As a context manager it
    finalizes at the end of the block, unless the block raises: then what was added is forgotten.
    """

    @abstractmethod
    def add(self, tensor: torch.Tensor) -> None:
        """Reduce `tensor`, in place, before `finalize` returns. Collective."""

    @abstractmethod
    def finalize(self) -> None:
        """Return when everything that was added is reduced. Collective."""

    def discard(self) -> None:  # noqa: B027 (a reducer that keeps nothing has nothing to forget)
        """Forget what was added and has not been sent yet. Not collective."""

    def __enter__(self: R) -> R:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finalize()
        else:
            self.discard()


def operation(scale: float | None) -> tuple[str, float]:
    """The op and scale of an `all_reduce`: the average for None, else the sum times `scale`. Not collective."""
    if scale is not None and not hasattr(scale, "__float__"):
        raise InvalidArgumentError(f"scale is a number or None, not {scale!r}")
    return ("avg", 1.0) if scale is None else ("sum", scale)


class InlineReducer(Reducer):
    """Every tensor is reduced at once, when it is added.

    `comm` is what `comm=` means everywhere. `scale` multiplies the sum over ranks; None makes it the average.
    """

    def __init__(self, comm: Any = None, scale: float | None = None) -> None:
        self._comm = as_communicator(comm)
        self._op, self._scale = operation(scale)

    def add(self, tensor: torch.Tensor) -> None:
        """`tensor` holds its reduction when this returns. Collective."""
        self._comm.all_reduce(tensor, self._op, scale=self._scale)

    def finalize(self) -> None:
        """Nothing is left to do. Not collective."""


class _Unfinished:
    """How many tensors were added to a reducer since it was finalized, and where it was made; outlives it."""

    def __init__(self, made_at: str) -> None:
        self.made_at = made_at
        self.added = 0

    def warn(self) -> None:
        """Log a warning if there are any: nothing may be sent here, since other ranks drop theirs at other moments."""
        if self.added:
            _log.warning(
                "a CoalescingReducer, made at %s, was dropped without finalize(): %d tensors that were added to it are "
                "not reduced. Call finalize(), or discard() if they are not wanted, or use it in a with block",
                self.made_at,
                self.added,
            )


class CoalescingReducer(Reducer):
    """Small tensors are kept until there are `cache_bytes` of them, then reduced together.

    Collective in all its methods. A tensor that would make the cache exceed `cache_bytes` sends what is in it first
    (exactly `cache_bytes` fit); one that exceeds it by itself is sent at once, alone. With `contiguous`, those of one
    dtype and device travel as one. With `async_op`, what is sent is reduced while the caller goes on. The rule is that
    of Flashlight's CoalescingReducer. One that is dropped before `finalize` leaves tensors as they are and logs a
    warning: it sends nothing, as ranks drop theirs at different moments.

    `comm` is what `comm=` means everywhere. `scale` multiplies the sum over ranks; None makes it the average.
    """

    def __init__(
        self,
        comm: Any = None,
        scale: float | None = None,
        *,
        async_op: bool = True,
        contiguous: bool = True,
        cache_bytes: int = 20 << 20,
    ) -> None:
        self._comm = as_communicator(comm)
        if not isinstance(cache_bytes, int) or cache_bytes < 0:
            raise InvalidArgumentError("cache_bytes is a number of bytes", expected=">= 0", found=cache_bytes)
        self._op, self._scale = operation(scale)
        self._async_op = async_op
        self._contiguous = contiguous
        self._cache_bytes = cache_bytes
        self._cached: list[torch.Tensor] = []
        self._cached_bytes = 0
        self._works: list[Work] = []
        self._unfinished = _Unfinished(call_site())
        weakref.finalize(self, self._unfinished.warn)

    def add(self, tensor: torch.Tensor) -> None:
        """`tensor` holds its reduction after the next `finalize`, of which it must be given once. Collective."""
        with self._comm.checking("CoalescingReducer.add"):
            if not isinstance(tensor, torch.Tensor):
                raise InvalidArgumentError(f"a tensor is wanted, not {type(tensor).__name__}")
        self._unfinished.added += 1
        if self._cached_bytes + tensor.nbytes > self._cache_bytes:
            self._flush()
        if tensor.nbytes > self._cache_bytes:
            self._send([tensor])
            return
        self._cached.append(tensor)
        self._cached_bytes += tensor.nbytes

    def finalize(self) -> None:
        """Send what is in the cache, and return when all that was added is reduced. Collective."""
        self._flush()
        works, self._works = self._works, []
        self._comm.wait_all()
        for work in works:
            work.wait()
        self._unfinished.added = 0

    def discard(self) -> None:
        """Forget what is in the cache; what was sent goes on, and nobody waits for it. Not collective."""
        self._cached, self._cached_bytes = [], 0
        self._works = []
        self._unfinished.added = 0

    def _flush(self) -> None:
        cached, self._cached, self._cached_bytes = self._cached, [], 0
        if cached:
            self._send(cached)

    def _send(self, tensors: list[torch.Tensor]) -> None:
        sent = self._comm.all_reduce_multiple(
            tensors, self._op, scale=self._scale, contiguous=self._contiguous, async_op=self._async_op
        )
        if self._async_op:
            self._works.append(sent)


# Sparse gradients, whose entries differ in number from rank to rank


def densified(grad: torch.Tensor) -> torch.Tensor:
    """A sparse tensor as a dense one. Not collective."""
    # Not to_dense(), which loses the only entry of a matrix of one column where autograd made it (torch 2.13)
    entries = grad.coalesce()
    return torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device).index_put_(
        tuple(entries.indices()), entries.values()
    )


def same_kind(facts: Sequence[Sequence[int] | None]) -> bool:
    """Whether all sparse gradients that there are have one number of sparse dimensions. Not collective."""
    return len({fact[1] for fact in facts if fact is not None}) == 1


def average_sparse(
    comm: Communicator,
    like: torch.Tensor,
    grad: torch.Tensor | None,
    facts: Sequence[Sequence[int] | None],
    share: float = 1.0,
    scale: float | None = None,
) -> torch.Tensor:
    """The average of sparse gradients of `like`, coalesced. Collective.

    `grad` is this rank's, or None; `facts` are, by rank, the number of entries once it is coalesced and that of its
    sparse dimensions, or None: they must be of the `same_kind`. `share` multiplies this rank's values; `scale` the sum
    over ranks, and None averages.
    """
    counts = [0 if fact is None else fact[0] for fact in facts]
    most, sparse_dim = max(counts), max(fact[1] for fact in facts if fact is not None)
    wide = torch.float32 if like.dtype in HALVES else like.dtype
    indices = torch.zeros((sparse_dim, most), dtype=torch.int64, device=like.device)
    values = torch.zeros((most, *like.shape[sparse_dim:]), dtype=wide, device=like.device)
    if grad is not None:
        entries = grad.coalesce()
        indices[:, : counts[comm.rank]].copy_(entries.indices())
        values[: counts[comm.rank]].copy_(entries.values()).mul_(share)
    shown = [(indices, values)] * len(counts)
    if most:
        shown = list(zip(comm.all_gather(indices), comm.all_gather(values), strict=True))
    parts = [(i[:, :n], v[:n]) for (i, v), n in zip(shown, counts, strict=True)]
    indices = torch.cat([i for i, _ in parts], 1)
    values = torch.cat([v for _, v in parts])
    whole = torch.sparse_coo_tensor(indices, values, like.shape, check_invariants=False).coalesce()
    values = whole.values() / comm.world_size if scale is None else whole.values() * scale
    return torch.sparse_coo_tensor(
        whole.indices(), values.to(like.dtype), like.shape, is_coalesced=True, check_invariants=False
    )
