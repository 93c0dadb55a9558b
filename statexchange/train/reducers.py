"""Reducers: tensors are added one by one as they become ready, and hold their reductions after `finalize`."""

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from types import TracebackType
from typing import TypeVar

import torch

from statexchange.comm.calls import call_site
from statexchange.comm.communicator import CommLike
from statexchange.comm.defaults import as_communicator, public_call
from statexchange.comm.work import Work
from statexchange.errors import InvalidArgumentError

R = TypeVar("R", bound="Reducer")
_log = logging.getLogger("statexchange")


class Reducer(ABC):
    """Reduce tensors over ranks: all ranks `add` the same ones, which hold their reductions after `finalize`.

    Collective: all ranks add tensors in the same order and call `finalize` equally often. Between `add` and `finalize`
    a tensor belongs to the reducer: do not read or change it. As a context manager a reducer finalizes at the end of
    the block; if the block raises, it discards what was added. The interface is that of Flashlight's Reducer.

    Example:
        >>> import torch
        >>> import statexchange as sx
        >>> tensor = torch.tensor([1.0, 2.0])
        >>> with sx.train.CoalescingReducer() as reducer:
        ...     reducer.add(tensor)
        >>> tensor  # the average over ranks, here one
        tensor([1., 2.])
    """

    @abstractmethod
    def add(self, tensor: torch.Tensor) -> None:
        """Reduce `tensor` in place, before `finalize` returns. Collective.

        Args:
            tensor: a tensor of the same shape and dtype on all ranks.
        """

    @abstractmethod
    def finalize(self) -> None:
        """Return when everything that was added is reduced. Collective."""

    def discard(self) -> None:  # noqa: B027 (a reducer that keeps nothing has nothing to discard)
        """Discard the tensors that were added and not sent yet. Not collective."""

    def __enter__(self: R) -> R:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the other ranks may not come to `finalize`, which is collective.
        if kind is None:
            self.finalize()
        else:
            self.discard()


def operation(scale: float | None) -> tuple[str, float]:
    """Return `op` and `scale` for `all_reduce`: the average for None, else the sum times `scale`. Not collective."""
    if scale is not None and not hasattr(scale, "__float__"):
        raise InvalidArgumentError(f"scale must be a number or None, not {scale!r}")
    if scale is None:
        return "avg", 1.0
    return "sum", scale


class InlineReducer(Reducer):
    """Reduce every tensor at once, when it is added.

    Not collective to construct; `add` is collective. It works like Flashlight's InlineReducer.

    Args:
        comm: a Communicator, ProcessGroup, DeviceMesh or MPI communicator; by default the current one.
        scale: multiplies the sum over ranks; None averages.

    Raises:
        InvalidArgumentError: `scale` is no number.

    Example:
        >>> import torch
        >>> import statexchange as sx
        >>> tensor = torch.tensor([1.0, 2.0])
        >>> sx.train.InlineReducer(scale=0.5).add(tensor)
        >>> tensor
        tensor([0.5000, 1.0000])
    """

    def __init__(self, comm: CommLike | None = None, scale: float | None = None) -> None:
        with public_call("InlineReducer"):
            self._comm = as_communicator(comm)
        self._op, self._scale = operation(scale)

    def add(self, tensor: torch.Tensor) -> None:
        """Reduce `tensor` in place, now. Collective; blocks until it is reduced."""
        self._comm.all_reduce(tensor, self._op, scale=self._scale)

    def finalize(self) -> None:
        """Do nothing: every tensor was reduced when it was added. Not collective."""


class _UnfinishedWarning:
    """Warns when a reducer is dropped with tensors that were never reduced. It outlives the reducer.

    Nothing may be sent at that moment: garbage collection drops reducers at other moments on other ranks.
    """

    def __init__(self, made_at: str) -> None:
        self.made_at = made_at
        self.num_added = 0

    def warn(self) -> None:
        """Log a warning if tensors were added since the last `finalize` or `discard`."""
        if self.num_added:
            _log.warning(
                "a CoalescingReducer, made at %s, was dropped without finalize(): %d tensors that were added to it are "
                "not reduced. Call finalize(), or discard() to drop them, or use it in a with block",
                self.made_at,
                self.num_added,
            )


class CoalescingReducer(Reducer):
    """Cache small tensors until there are `cache_bytes` of them, then reduce them together.

    Collective in all its methods except `discard`. If a tensor would make the cache exceed `cache_bytes`, the cache is
    sent first; a tensor that exceeds `cache_bytes` by itself is sent at once, alone. The rule is that of Flashlight's
    CoalescingReducer. A reducer that is dropped before `finalize` leaves tensors as they are and logs a warning.

    Args:
        comm: a Communicator, ProcessGroup, DeviceMesh or MPI communicator; by default the current one.
        scale: multiplies the sum over ranks; None averages.
        async_op: return while tensors that were sent are still being reduced.
        contiguous: send the cached tensors of one dtype and device as one message.
        cache_bytes: the size of the cache.

    Raises:
        InvalidArgumentError: `scale` is no number, or `cache_bytes` is negative.

    Example:
        >>> import torch
        >>> import statexchange as sx
        >>> tensors = [torch.ones(2), torch.ones(3)]
        >>> reducer = sx.train.CoalescingReducer(scale=2.0)
        >>> for tensor in tensors:
        ...     reducer.add(tensor)
        >>> reducer.finalize()
        >>> tensors
        [tensor([2., 2.]), tensor([2., 2., 2.])]
    """

    def __init__(
        self,
        comm: CommLike | None = None,
        scale: float | None = None,
        *,
        async_op: bool = True,
        contiguous: bool = True,
        cache_bytes: int = 20 << 20,
    ) -> None:
        with public_call("CoalescingReducer"):
            self._comm = as_communicator(comm)
        if not isinstance(cache_bytes, int) or cache_bytes < 0:
            raise InvalidArgumentError("cache_bytes is a number of bytes", expected=">= 0", found=cache_bytes)
        self._op, self._scale = operation(scale)
        self._async_op = async_op
        self._contiguous = contiguous
        self._cache_bytes = cache_bytes
        self._cached: list[torch.Tensor] = []
        self._cached_bytes = 0
        self._works: list[Work[list[torch.Tensor]]] = []
        self._unfinished = _UnfinishedWarning(call_site())
        # By the record alone: a callback that referred to the reducer would keep it alive. It is called at exit, too.
        weakref.finalize(self, self._unfinished.warn)

    def add(self, tensor: torch.Tensor) -> None:
        """Reduce `tensor` in place before the next `finalize` returns.

        Collective. A tensor must be added only once before `finalize`.

        Raises:
            InvalidArgumentError: `tensor` is no tensor.
        """
        with self._comm.checking("CoalescingReducer.add"):
            if not isinstance(tensor, torch.Tensor):
                raise InvalidArgumentError(f"expected a tensor, not {type(tensor).__name__}")
        self._unfinished.num_added += 1
        # By the sizes alone, which all ranks have alike: so all send the same tensors together.
        if self._cached_bytes + tensor.nbytes > self._cache_bytes:
            self._flush()
        if tensor.nbytes > self._cache_bytes:
            self._send([tensor])
            return
        self._cached.append(tensor)
        self._cached_bytes += tensor.nbytes

    def finalize(self) -> None:
        """Send what is in the cache, and return when everything that was added is reduced. Collective."""
        self._flush()
        # Taken out first, so that the next `finalize` does not raise an error that this one has raised.
        works, self._works = self._works, []
        # All are done before one raises: the caller may then use every tensor again.
        self._comm.wait_all()
        for work in works:
            work.wait()
        self._unfinished.num_added = 0

    def discard(self) -> None:
        """Empty the cache. Not collective: reductions that were sent go on, and no call waits for them."""
        self._cached, self._cached_bytes = [], 0
        self._works = []
        self._unfinished.num_added = 0

    def _flush(self) -> None:
        cached, self._cached, self._cached_bytes = self._cached, [], 0
        if cached:
            self._send(cached)

    def _send(self, tensors: list[torch.Tensor]) -> None:
        work = self._comm.all_reduce_multiple(
            tensors, self._op, scale=self._scale, contiguous=self._contiguous, async_op=self._async_op
        )
        if isinstance(work, Work):
            self._works.append(work)
