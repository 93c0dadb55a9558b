"""A round of averaging: the record of the gradients that arrived on this rank, and the messages that ranks exchange.

A message is a head of fixed size, one byte of flags for each parameter, and the numbers of the parameters whose
gradients are in no bucket. In most rounds all parameters have a bucket, and there are none.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from statexchange.comm.communicator import Communicator
from statexchange.errors import MismatchError
from statexchange.train.buckets.views import Bucket, BucketView

PHASE = "averaging gradients"

# Flags of a parameter on one rank
ARRIVED = 1  # a gradient arrived
LATE = 2  # another gradient arrived after the bucket had been sent
FROZEN = 4  # the parameter does not require a gradient

_HEAD = struct.Struct("<8sQd?")  # the plan's digest, the step, the weight, and whether the rank is done


class Arrival:
    """Records the arrival of gradients, which is not the same as ``grad is not None``.

    A user may keep old gradients, or zero them, so a tensor in `.grad` need not come from this step's backward. Only
    the hooks show which gradients it made. A gradient that has arrived counts as such until the end of the *step*
    (`end_step`), over all rounds of averaging in it. In each *round* (`begin_round`) a bucket waits once for each of
    its gradients.
    """

    def __init__(self, views: Sequence[BucketView]) -> None:
        self._views = views
        self.end_step()
        self.begin_round()

    def end_step(self) -> None:
        """Count all gradients as missing until they arrive again."""
        self._states = bytearray(len(self._views))
        self._unplaced: dict[int, None] = {}  # parameters in no bucket, in the order of arrival

    def begin_round(self) -> None:
        """Begin a round: let each bucket wait for each of its gradients again."""
        self._counted = bytearray(len(self._views))

    def record(self, view: BucketView, *, counts: bool) -> bool:
        """Record an arrival; return whether its bucket now waits for one gradient fewer.

        With `counts` False the gradient has arrived, but the bucket goes on waiting: another backward will add to it.
        """
        self._states[view.index] = ARRIVED
        bucket = view.bucket
        if bucket is None:
            self._unplaced[view.index] = None
            return False
        if not counts or self._counted[view.index]:
            return False
        self._counted[view.index] = 1
        bucket.num_waiting -= 1
        return True

    def mark_missing(self, views: Sequence[BucketView]) -> None:
        """Count these gradients as missing: their `.grad` is None, since they never arrived or although they had."""
        for view in views:
            self._states[view.index] = 0

    def report(self, buckets: Sequence[Bucket], *, recheck: bool, has_weight: bool) -> tuple[bytes, list[int]]:
        """Return the flags of all parameters, and those without a bucket in the order of arrival, for a RoundReport.

        Args:
            buckets: the buckets of the plan.
            recheck: look for gradients that became None after they had arrived. Needed only if buckets are not filled
                yet, as filling finds them, too.
            has_weight: a rank without weight reports that nothing arrived.
        """
        candidates = self._views
        if not recheck:  # what is in no bucket was not filled
            candidates = [self._views[index] for index in self._unplaced]
        self.mark_missing([view for view in candidates if view.param.grad is None])
        if not has_weight:
            self._states = bytearray(len(self._states))
        # A copy: what is late or frozen concerns this round alone, and the step goes on.
        states = bytearray(self._states)
        for bucket in buckets:
            if bucket.in_flight:
                for view in bucket.views:
                    if view.param.grad is not None:  # sending set it to None, so another backward made it
                        states[view.index] |= LATE
        for view in self._views:
            if not view.param.requires_grad:
                states[view.index] |= FROZEN
        order = [i for i in self._unplaced if self._states[i] and self._views[i].bucket is None]
        return bytes(states), order


@dataclass(frozen=True, slots=True)
class RoundReport:
    """The report of one rank in a round.

    Attributes:
        plan_digest: the digest of its plan, which ranks compare.
        step: the number of the caller's step, or of the round if the caller counts no steps; ranks compare it, too.
        weight: the weight of this rank's gradients.
        is_done: whether the rank takes part with weight 0, and has no step of its own.
        states: the flags of each parameter.
        order: the numbers of the parameters whose gradients are in no bucket, in the order of arrival.
    """

    plan_digest: bytes
    step: int
    weight: float
    is_done: bool
    states: bytes = b""
    order: Sequence[int] = ()

    def to_bytes(self) -> bytes:
        """Return the report as a message.

        Of two parameters, whose gradients have arrived, the second one in no bucket: 25 bytes of head, the flags 1 and
        1, and the number 1 in 8 bytes.
        """
        head = _HEAD.pack(self.plan_digest, self.step, self.weight, self.is_done)
        return head + self.states + np.array(self.order, np.int64).tobytes()

    @classmethod
    def from_bytes(cls, message: bytes, num_parameters: int) -> RoundReport:
        """Return the report in a message."""
        plan_digest, step, weight, is_done = _HEAD.unpack_from(message)
        body = message[_HEAD.size :]
        order = np.frombuffer(body[num_parameters:], np.int64).tolist()
        return cls(plan_digest, step, weight, is_done, body[:num_parameters], order)


@dataclass(frozen=True, slots=True)
class RoundSummary:
    """The reports of all ranks, and by parameter the flags of any and of all ranks."""

    reports: Sequence[RoundReport]
    any_rank: bytes
    all_ranks: bytes

    @classmethod
    def of(cls, messages: Sequence[bytes], num_parameters: int, plan_digest: bytes) -> RoundSummary:
        """Return the summary of every rank's message.

        Raises:
            MismatchError: ranks have different plans, or ranks that are not done are in different steps.
        """
        reports = [RoundReport.from_bytes(message, num_parameters) for message in messages]
        if any(report.plan_digest != plan_digest for report in reports):
            raise MismatchError("ranks average the gradients of different reducers, or by different plans")
        # In most rounds only one, so that the cost does not grow with the number of ranks.
        distinct = {report.states for report in reports}
        states = np.array([np.frombuffer(flags, np.uint8) for flags in distinct])
        any_rank, all_ranks = np.bitwise_or.reduce(states).tobytes(), np.bitwise_and.reduce(states).tobytes()
        summary = cls(reports, any_rank, all_ranks)
        summary.check_steps()
        return summary

    def check_steps(self) -> None:
        """Raise MismatchError, naming the first rank of each of two steps, unless all active ranks are in one step."""
        first_ranks: dict[int, int] = {}
        for rank in self.active:
            first_ranks.setdefault(self.reports[rank].step, rank)
        if len(first_ranks) > 1:
            (step, rank), (other_step, other_rank) = list(first_ranks.items())[:2]
            raise MismatchError(
                f"rank {rank} is in step {step}, rank {other_rank} in step {other_step}: all ranks must call backward "
                "and step equally often"
            )

    @property
    def active(self) -> list[int]:
        """The ranks that are not done."""
        return [rank for rank, report in enumerate(self.reports) if not report.is_done]

    @property
    def total_weight(self) -> float:
        """The sum of all ranks' weights."""
        return math.fsum(report.weight for report in self.reports)

    @property
    def is_plain(self) -> bool:
        """Whether every parameter has a gradient on some rank, and none is late or frozen."""
        # A byte with another flag beside it is another byte.
        return self.any_rank.count(ARRIVED) == len(self.any_rank)

    @property
    def has_arrived(self) -> bool:
        """Whether there is any gradient on any rank."""
        return any(state & ARRIVED for state in self.any_rank)

    def order(self) -> list[int]:
        """Return the parameters without a bucket in rank 0's order of arrival, then those missing there."""
        # A dict keeps the order in which its keys came, and each key once.
        order: dict[int, None] = {}
        for report in self.reports:
            order.update(dict.fromkeys(report.order))
        return list(order)


def exchange_reports(comm: Communicator, report: RoundReport) -> RoundSummary:
    """Compare plans and steps with all ranks; return the reports of all. Collective.

    Raises:
        MismatchError: plans or steps differ.
    """
    messages = comm.all_gather_bytes(report.to_bytes(), operation=PHASE)
    return RoundSummary.of(messages, len(report.states), report.plan_digest)
