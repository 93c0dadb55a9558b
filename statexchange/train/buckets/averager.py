"""The averager: reduces buckets over ranks, strictly in the plan's order, during backward and at the end of a round."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from statexchange.comm.calls import site_detail
from statexchange.comm.communicator import Communicator
from statexchange.comm.work import Work
from statexchange.train.buckets.options import BucketOptions
from statexchange.train.buckets.plan import BucketPlan
from statexchange.train.buckets.rounds import (
    ARRIVED,
    FROZEN,
    LATE,
    PHASE,
    Arrival,
    RoundReport,
    RoundSummary,
    exchange_reports,
)
from statexchange.train.buckets.views import Bucket, BucketView, copy_gradients, publish_gradients
from statexchange.train.malloc_tuning import trim_malloc
from statexchange.train.parameters import local_part
from statexchange.train.reducers import operation

_PENDING_BYTES = 1 << 18  # of gradients that are copied together, while they are in cache


class BucketAverager:
    """Averages the gradients that arrived on any rank, or the parameters themselves.

    `overlaps`: whether full buckets are sent during backward.
    """

    def __init__(
        self,
        comm: Communicator,
        options: BucketOptions,
        views: Sequence[BucketView],
        plan: BucketPlan,
        arrival: Arrival,
        *,
        overlaps: bool,
    ) -> None:
        self._comm = comm
        self._options = options
        self._views = views
        self._plan = plan
        self._arrival = arrival
        self._overlaps = overlaps
        self._op, self._scale = operation(options.scale)
        self.begin_round()

    def begin_round(self) -> None:
        """Begin a round: the plan's first bucket is the next to be sent."""
        self._num_sent = 0
        self._pending_copies: list[BucketView] = []
        self._pending_bytes = 0

    # During backward: steps 2 and 3 of the protocol in `reducer`

    def gradient_ready(self, view: BucketView) -> None:
        """Take a gradient that its bucket waited for; send the buckets that are full now. Collective if any is sent."""
        self._pending_copies.append(view)
        self._pending_bytes += view.nbytes
        if self._pending_bytes >= _PENDING_BYTES:
            self._copy_pending()
        # `Arrival.record` counts only the gradients of parameters that lie in a bucket.
        assert view.bucket is not None
        if not view.bucket.num_waiting and self._overlaps:
            self._send_full()

    def _copy_pending(self) -> None:
        """Copy gradients before they leave the cache, and free their memory for the next ones."""
        with torch.no_grad(), self._shared_errors():
            copy_gradients(self._pending_copies)
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
            self._send(bucket, async_op=True)
            bucket.in_flight = True
            for view in bucket.views:
                view.param.grad = None  # another backward must not add to a gradient that is being reduced

    def _send(self, bucket: Bucket, factor: float = 1.0, *, async_op: bool = False) -> None:
        """Reduce a bucket's gradients times `factor`; those that are missing count as zeros. Collective."""
        with torch.no_grad():
            with self._shared_errors():
                self._arrival.mark_missing(bucket.fill(factor))
            if not async_op:
                for sent in self._plan.buckets[: self._num_sent]:
                    sent.wait()  # if an earlier bucket has failed, do not reduce this one
            self._reduce_memory(bucket, async_op=async_op)

    def _reduce_memory(self, bucket: Bucket, *, async_op: bool = False) -> None:
        """Reduce a bucket's memory as it is. Collective."""
        with site_detail(lambda: self._plan.label(bucket)):
            if self._options.communicate is not None:
                bucket.work = self._options.communicate(bucket.flat)
                return
            work = self._comm.all_reduce(bucket.flat, self._op, scale=self._scale, async_op=async_op)
            bucket.work = work if isinstance(work, Work) else None

    @contextlib.contextmanager
    def _shared_errors(self) -> Iterator[None]:
        """Raise an error of the block on all ranks. Collective only if there is one."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (agree raises it)
            self._comm.agree(error, phase=PHASE)

    # At the end of a round: steps 4 to 6

    def average(self, step: int, weight: float, *, is_done: bool) -> list[int]:
        """Average what the reducer averages; return the ranks that are not done. Collective."""
        # What arrived is filled in later: sending a bucket may find gradients that became None meanwhile.
        report = RoundReport(self._plan.digest, step, weight, is_done)
        if self._options.averages_gradients:
            return self._average_gradients(report)
        summary = exchange_reports(self._comm, report)
        for bucket in self._plan.buckets:
            self._average_parameters(bucket)
        return summary.active

    def _average_parameters(self, bucket: Bucket) -> None:
        """Average the parameters of a bucket in place. Collective."""
        views = [view.local for view in bucket.views]
        parameters = [local_part(view.param, view.name) for view in bucket.views]
        torch._foreach_copy_(views, parameters)
        self._reduce_memory(bucket)
        bucket.wait()
        # Not into `.data`, whose changes autograd does not see: backward through a graph of old values must raise.
        torch._foreach_copy_(parameters, views)

    def _average_gradients(self, report: RoundReport) -> list[int]:
        """Average the gradients that arrived on any rank; return the ranks that are not done. Collective."""
        delayed = self._options.is_delayed
        # With weights the reports come first, as the sum of weights must be known.
        if not delayed:
            for bucket in self._plan.buckets[self._num_sent :]:
                self._send(bucket, report.weight)
        states, order = self._arrival.report(self._plan.buckets, recheck=delayed, has_weight=report.weight > 0)
        summary = exchange_reports(self._comm, replace(report, states=states, order=order))
        if not summary.has_arrived:
            if any(not summary.reports[rank].weight for rank in summary.active):
                for view in self._views:
                    view.param.grad = None  # all gradients have weight 0
            return summary.active
        is_plain = summary.is_plain
        # The all-reduce divides by the number of ranks: the product is this rank's part of the sum of weights.
        share = report.weight * self._comm.world_size / summary.total_weight
        if delayed:
            for bucket in self._plan.buckets:
                self._send(bucket, share)
        for bucket in self._plan.buckets:
            bucket.wait()
        if not is_plain:
            self._add_late(summary)
        # If the reports came first, ranks that are done have sent zeros, and the sum of weights is that of the others.
        if not delayed:
            self._leave_out_done_ranks(summary)
        self._reduce_unplaced(summary, share)
        has_gradient = None
        if not is_plain:
            has_gradient = [bool(state & ARRIVED) for state in summary.any_rank]
        publish_gradients(self._views, has_gradient)
        # Last: an emptied plan takes parameters out of the buckets by which their gradients are published.
        if not is_plain:
            self._replan_if_frozen(summary)
        return summary.active

    def _add_late(self, summary: RoundSummary) -> None:
        """Reduce the gradients that another backward made for buckets in flight, and add them. Collective."""
        for bucket in self._plan.buckets:
            if not any(summary.any_rank[view.index] & LATE for view in bucket.views):
                continue
            first = bucket.flat.clone()  # the average of what arrived in time
            with self._shared_errors():
                if bucket.in_flight:
                    bucket.fill()
                else:  # this rank sent the bucket in `reduce`, so nothing arrived late here
                    bucket.flat.zero_()
            self._reduce_memory(bucket)
            bucket.wait()
            bucket.flat.add_(first)

    def _leave_out_done_ranks(self, summary: RoundSummary) -> None:
        """Turn averages over all ranks into averages over the active ones; the others have sent zeros."""
        if len(summary.active) != self._comm.world_size:
            for bucket in self._plan.buckets:
                bucket.flat.mul_(self._comm.world_size / len(summary.active))

    def _reduce_unplaced(self, summary: RoundSummary, share: float) -> None:
        """Make buckets for gradients that have none, and reduce them. Collective."""
        unplaced = [self._views[index] for index in summary.order()]
        for batch in self._plan.extend_in_batches(self._plan.split(unplaced)):
            for bucket in batch:
                self._send(bucket, share)
                bucket.wait()
        if unplaced:  # their own memory has been freed, in pieces that the heap keeps
            trim_malloc()

    def _replan_if_frozen(self, summary: RoundSummary) -> None:
        """Empty the plan if a parameter in it is frozen on all ranks: its bucket would never be full."""
        # The caller's own buckets stay. One that is never full, and those behind it, are sent by `reduce`.
        if self._options.buckets is not None:
            return
        for bucket in self._plan.buckets:
            if any(summary.all_ranks[view.index] & FROZEN for view in bucket.views):
                self._plan.clear()
                return
