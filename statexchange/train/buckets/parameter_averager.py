"""A round that averages the parameters themselves, for the bucket types "weight" and "parameter"."""

from __future__ import annotations

import torch

from statexchange.comm.communicator import Communicator
from statexchange.train.buckets.plan import BucketPlan
from statexchange.train.buckets.rounds import ArrivalReport, RoundHeader, exchange_reports
from statexchange.train.buckets.sender import BucketSender
from statexchange.train.buckets.views import Bucket
from statexchange.train.parameter_specs import local_part

__all__ = ["ParameterAverager"]


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
