"""The end of a round: steps 4 to 6 of the protocol in `reducer` for gradients, and the average of parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from statexchange.comm.communicator import Communicator
from statexchange.train.buckets.arrival import Arrival
from statexchange.train.buckets.options import BucketOptions
from statexchange.train.buckets.plan import BucketPlan
from statexchange.train.buckets.rounds import (
    ARRIVED,
    DENSE,
    FROZEN,
    LATE,
    ArrivalReport,
    RoundHeader,
    RoundSummary,
    exchange_reports,
)
from statexchange.train.buckets.sender import BucketSender
from statexchange.train.buckets.views import Bucket, BucketView, publish_gradients
from statexchange.train.malloc_tuning import trim_malloc
from statexchange.train.parameter_specs import local_part
from statexchange.train.sparse import average_sparse, same_sparse_dims

__all__ = ["GradientAverager", "ParameterAverager"]


class GradientAverager:
    """Averages the gradients that arrived on any rank."""

    def __init__(
        self,
        comm: Communicator,
        options: BucketOptions,
        views: Sequence[BucketView],
        plan: BucketPlan,
        arrival: Arrival,
        sender: BucketSender,
    ) -> None:
        self._comm = comm
        self._options = options
        self._views = views
        self._plan = plan
        self._arrival = arrival
        self._sender = sender

    def run(self, header: RoundHeader) -> list[int]:
        """Do steps 4 to 6 of a round; return the ranks that are not done. Collective."""
        delayed = self._options.delay_reduce
        if not delayed:
            for bucket in self._sender.unsent:
                self._sender.send(bucket, header.weight)
        report = self._arrival.report(self._plan.buckets, recheck=delayed, has_weight=header.weight > 0)
        summary = exchange_reports(self._comm, header, report)
        if not summary.has_arrived:
            if any(not summary.headers[rank].weight for rank in summary.active):
                for view in self._views:
                    view.param.grad = None  # all gradients have weight 0
            return summary.active
        is_plain = summary.is_plain
        share = header.weight * self._comm.world_size / summary.total_weight
        if delayed:
            for bucket in self._plan.buckets:
                self._sender.send(bucket, share)
        for bucket in self._plan.buckets:
            bucket.wait()
        if not is_plain:
            self._add_late(summary)
        if not delayed:
            self._leave_out_done_ranks(summary)
        self._reduce_unplaced(summary, header.weight, share)
        has_gradient = None if is_plain else [bool(state & ARRIVED) for state in summary.any_rank]
        publish_gradients(self._views, has_gradient, fusion=self._options.fusion)
        if not is_plain:
            self._replan_if_frozen(summary)
        return summary.active

    def _add_late(self, summary: RoundSummary) -> None:
        """Reduce the gradients that another backward made for buckets in flight, and add them. Collective."""
        for bucket in self._plan.buckets:
            if not any(summary.any_rank[view.index] & LATE for view in bucket.views):
                continue
            first = bucket.flat.clone()
            with self._sender.shared_errors():
                if bucket.in_flight:
                    bucket.fill()
                else:  # this rank sent the bucket in `reduce`, so nothing arrived late here
                    bucket.flat.zero_()
            self._sender.reduce_memory(bucket)
            bucket.wait()
            bucket.flat.add_(first)

    def _leave_out_done_ranks(self, summary: RoundSummary) -> None:
        """Turn averages over all ranks into averages over the active ones; the others have sent zeros."""
        if len(summary.active) != self._comm.world_size:
            for bucket in self._plan.buckets:
                bucket.flat.mul_(self._comm.world_size / len(summary.active))

    def _reduce_unplaced(self, summary: RoundSummary, weight: float, share: float) -> None:
        """Make buckets for dense gradients that have none, and reduce them; gather sparse gradients. Collective."""
        dense, sparse = [], []
        for index in summary.order():
            view = self._views[index]
            if summary.any_rank[index] & DENSE or not same_sparse_dims(summary.sparse_shapes(index)):
                dense.append(view)
            else:
                sparse.append(view)
        for batch in self._plan.extend_in_batches(self._plan.split(dense)):
            for bucket in batch:
                self._sender.send(bucket, share)
                bucket.wait()
        if dense:
            trim_malloc()
        for view in sparse:
            grad = view.param.grad if weight else None
            shapes = summary.sparse_shapes(view.index)
            view.param.grad = average_sparse(self._comm, view.param, grad, shapes, share, self._options.scale)

    def _replan_if_frozen(self, summary: RoundSummary) -> None:
        """Empty the plan if a parameter in it is frozen on all ranks: its bucket would never be full."""
        if self._options.buckets is not None:
            return
        for bucket in self._plan.buckets:
            if any(summary.all_ranks[view.index] & FROZEN for view in bucket.views):
                self._plan.clear()
                return


class ParameterAverager:
    """Averages parameters in place; with `is_noticed`, autograd's version counters show it."""

    def __init__(self, comm: Communicator, plan: BucketPlan, sender: BucketSender, *, is_noticed: bool) -> None:
        self._comm = comm
        self._plan = plan
        self._sender = sender
        self._is_noticed = is_noticed

    def run(self, header: RoundHeader) -> list[int]:
        """Average all parameters; return the ranks that are not done. Collective."""
        summary = exchange_reports(self._comm, header, ArrivalReport(b""))
        for bucket in self._plan.buckets:
            self._average(bucket)
        return summary.active

    def _average(self, bucket: Bucket) -> None:
        views = [view.local for view in bucket.views]
        parameters = [local_part(view.param, view.name) for view in bucket.views]
        if not self._is_noticed:
            parameters = [parameter.data for parameter in parameters]
        torch._foreach_copy_(views, parameters)
        self._sender.reduce_memory(bucket)
        bucket.wait()
        torch._foreach_copy_(parameters, views)
