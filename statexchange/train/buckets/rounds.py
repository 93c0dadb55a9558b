"""The messages that ranks exchange in a round of averaging, as records.

A message is a header of fixed size, one byte of flags for each parameter, and the numbers of the parameters whose
gradients are in no bucket. In most rounds all parameters have a bucket, and there are none.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from statexchange.comm.communicator import Communicator
from statexchange.errors import MismatchError

__all__ = [
    "ARRIVED",
    "FROZEN",
    "LATE",
    "PHASE",
    "ArrivalReport",
    "RoundHeader",
    "RoundSummary",
    "exchange_reports",
]

PHASE = "averaging gradients"

# Flags of a parameter on one rank
ARRIVED = 1  # a gradient arrived
LATE = 2  # another gradient arrived after the bucket had been sent
FROZEN = 4  # the parameter does not require a gradient

_HEADER = struct.Struct("<8sQd?")


@dataclass(frozen=True, slots=True)
class RoundHeader:
    """The plan and the step, which ranks compare, and the weight of this rank's gradients.

    `step` is the number of the caller's step, or of the round if the caller counts no steps. A rank that `is_done`
    takes part with weight 0 and has no step of its own.
    """

    plan_digest: bytes
    step: int
    weight: float
    is_done: bool

    def to_bytes(self) -> bytes:
        """Return the header as the first bytes of a message."""
        return _HEADER.pack(self.plan_digest, self.step, self.weight, self.is_done)

    @classmethod
    def from_bytes(cls, message: bytes) -> RoundHeader:
        """Return the header at the beginning of a message."""
        return cls(*_HEADER.unpack_from(message))


@dataclass(frozen=True, slots=True)
class ArrivalReport:
    """The gradients that arrived on one rank: flags by parameter, and the order of those that are in no bucket."""

    states: bytes
    order: Sequence[int] = ()

    def to_bytes(self) -> bytes:
        """Return the bytes that follow the header in a message."""
        return self.states + np.array(self.order, np.int64).tobytes()

    @classmethod
    def from_bytes(cls, body: bytes, num_parameters: int) -> ArrivalReport:
        """Return the report in the bytes that follow the header of a rank."""
        return cls(body[:num_parameters], np.frombuffer(body[num_parameters:], np.int64).tolist())


@dataclass(frozen=True, slots=True)
class RoundSummary:
    """The reports of all ranks: headers and reports by rank, and by parameter the flags of any and of all ranks."""

    headers: Sequence[RoundHeader]
    reports: Sequence[ArrivalReport]
    any_rank: bytes
    all_ranks: bytes

    @classmethod
    def of(cls, messages: Sequence[bytes], num_parameters: int, plan_digest: bytes) -> RoundSummary:
        """Return the summary of every rank's message.

        Raises:
            MismatchError: ranks have different plans, or ranks that are not done are in different steps.
        """
        headers = [RoundHeader.from_bytes(message) for message in messages]
        if any(header.plan_digest != plan_digest for header in headers):
            raise MismatchError("ranks average the gradients of different reducers, or by different plans")
        reports = []
        for message in messages:
            reports.append(ArrivalReport.from_bytes(message[_HEADER.size :], num_parameters))
        distinct = {report.states for report in reports}  # in most rounds only one
        states = np.array([np.frombuffer(flags, np.uint8) for flags in distinct])
        any_rank, all_ranks = np.bitwise_or.reduce(states).tobytes(), np.bitwise_and.reduce(states).tobytes()
        summary = cls(headers, reports, any_rank, all_ranks)
        summary.check_steps()
        return summary

    def check_steps(self) -> None:
        """Raise MismatchError, naming the first rank of each of two steps, unless all active ranks are in one step."""
        first_ranks: dict[int, int] = {}
        for rank in self.active:
            first_ranks.setdefault(self.headers[rank].step, rank)
        if len(first_ranks) > 1:
            (step, rank), (other_step, other_rank) = list(first_ranks.items())[:2]
            raise MismatchError(
                f"rank {rank} is in step {step}, rank {other_rank} in step {other_step}: all ranks must call backward "
                "and step equally often"
            )

    @property
    def active(self) -> list[int]:
        """The ranks that are not done."""
        return [rank for rank, header in enumerate(self.headers) if not header.is_done]

    @property
    def total_weight(self) -> float:
        """The sum of all ranks' weights."""
        return math.fsum(header.weight for header in self.headers)

    @property
    def is_plain(self) -> bool:
        """Whether every parameter has a gradient on some rank, and none is late or frozen."""
        return self.any_rank.count(ARRIVED) == len(self.any_rank)

    @property
    def has_arrived(self) -> bool:
        """Whether there is any gradient on any rank."""
        return any(state & ARRIVED for state in self.any_rank)

    def order(self) -> list[int]:
        """Return the parameters without a bucket in rank 0's order of arrival, then those missing there."""
        return list(dict.fromkeys(itertools.chain.from_iterable(report.order for report in self.reports)))


def exchange_reports(comm: Communicator, header: RoundHeader, report: ArrivalReport) -> RoundSummary:
    """Compare plans and steps with all ranks; return the reports of all. Collective.

    Raises:
        MismatchError: plans or steps differ.
    """
    messages = comm.all_gather_bytes(header.to_bytes() + report.to_bytes(), operation=PHASE)
    return RoundSummary.of(messages, len(report.states), header.plan_digest)
