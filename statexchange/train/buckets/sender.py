"""The sender: reduces buckets over ranks, strictly in the order of the plan."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from statexchange.comm.calls import site_detail
from statexchange.comm.communicator import Communicator
from statexchange.comm.work import Work
from statexchange.train.buckets.arrival import Arrival
from statexchange.train.buckets.options import Communicate
from statexchange.train.buckets.plan import BucketPlan
from statexchange.train.buckets.rounds import PHASE
from statexchange.train.buckets.views import Bucket, BucketView, copy_gradients
from statexchange.train.reducers import operation

__all__ = ["BucketSender"]

_PENDING_BYTES = 1 << 18  # of gradients that are copied together, while they are in cache


class BucketSender:
    """Copies gradients into buckets and reduces these, during backward and after it."""

    def __init__(
        self,
        comm: Communicator,
        plan: BucketPlan,
        arrival: Arrival,
        *,
        fusion: bool,
        overlaps: bool,
        scale: float | None,
        communicate: Communicate | None,
    ) -> None:
        self._comm = comm
        self._plan = plan
        self._arrival = arrival
        self._fusion = fusion
        self._overlaps = overlaps
        self._op, self._scale = operation(scale)
        self._communicate = communicate
        self.begin_round()

    def begin_round(self) -> None:
        """Begin a round: the plan's first bucket is the next to be sent."""
        self._num_sent = 0
        self._pending_copies: list[BucketView] = []
        self._pending_bytes = 0

    @property
    def unsent(self) -> list[Bucket]:
        """The buckets that were not sent during backward."""
        return self._plan.buckets[self._num_sent :]

    def gradient_ready(self, view: BucketView) -> None:
        """Take a gradient that its bucket waited for; send the buckets that are full now. Collective if any is sent."""
        if self._fusion:
            self._pending_copies.append(view)
            self._pending_bytes += view.nbytes
            if self._pending_bytes >= _PENDING_BYTES:
                self._copy_pending()
        assert view.bucket is not None
        if not view.bucket.num_waiting and self._overlaps:
            self._send_full()

    def _copy_pending(self) -> None:
        """Copy gradients before they leave the cache, and free their memory for the next ones."""
        with torch.no_grad(), self.shared_errors():
            copy_gradients(self._pending_copies, fusion=True)
        self._pending_copies.clear()
        self._pending_bytes = 0

    def _send_full(self) -> None:
        """Send full buckets in the plan's order, except the last: no gradients follow that it could overlap with."""
        while self._num_sent + 1 < len(self._plan.buckets):
            bucket = self._plan.buckets[self._num_sent]
            if bucket.num_waiting:
                return
            self._num_sent += 1
            self._copy_pending()
            self.send(bucket, async_op=True)
            bucket.in_flight = True
            for view in bucket.views:
                view.param.grad = None  # another backward must not add to a gradient that is being reduced

    def send(self, bucket: Bucket, factor: float = 1.0, *, async_op: bool = False) -> None:
        """Reduce a bucket's gradients times `factor`; those that are missing count as zeros. Collective."""
        with torch.no_grad():
            with self.shared_errors():
                self._arrival.mark_missing(bucket.fill(factor))
            if not async_op:
                for sent in self._plan.buckets[: self._num_sent]:
                    sent.wait()  # if an earlier bucket has failed, do not reduce this one
            self.reduce_memory(bucket, async_op=async_op)

    def reduce_memory(self, bucket: Bucket, *, async_op: bool = False) -> None:
        """Reduce a bucket's memory as it is. Collective."""
        with site_detail(lambda: self._plan.label(bucket)):
            if self._communicate is not None:
                bucket.work = self._communicate(bucket.flat)
                return
            work = self._comm.all_reduce(bucket.flat, self._op, scale=self._scale, async_op=async_op)
            bucket.work = work if isinstance(work, Work) else None

    @contextlib.contextmanager
    def shared_errors(self) -> Iterator[None]:
        """Raise an error of the block on all ranks. Collective only if there is one."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (agree raises it)
            self._comm.agree(error, phase=PHASE)
