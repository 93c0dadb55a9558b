"""Algorithms: how ranks that train one model keep in step; each is a value, and its state lies in a `Run`."""

from __future__ import annotations

import abc
import functools
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from statexchange.comm.backends.backend import Leaders
from statexchange.comm.communicator import Communicator
from statexchange.errors import InvalidArgumentError, NumericOverflowError
from statexchange.train.buckets import BucketReducer

__all__ = [
    "Algorithm",
    "Decentralized",
    "GradientAllReduce",
    "QuantizedAllReduce",
    "Run",
    "ScatterGatherAllReduce",
    "as_algorithm",
]

Peers = Literal["all", "shift_one", "ring"]

_PEERS = ("all", "shift_one", "ring")
_WIDE = (torch.float32, torch.float64)  # in which weights are averaged
_LEVELS = 255
_HEAD_BYTES = 8  # of a quantised chunk: its least value and its step, in float32
_LARGEST = 2.0**126  # what is larger has no range that float32 can hold


class Run:
    """An algorithm at work on the buckets of one optimizer, since it was switched to.

    `comm`; `reducer`, which makes the buckets; `calls`, how many buckets have been communicated; `kept`, a tensor for
    each bucket, forgotten with it.
    """

    reducer: BucketReducer

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.calls = 0
        self.kept = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class Algorithm(abc.ABC):
    """How gradients or weights are synchronised: the settings of the BucketReducer that does it.

    All ranks use equal ones. `hierarchical`: whether a communicator of several hosts works within each host first and
    then between hosts, as it does by itself; with False all ranks are treated alike. None, the default of every
    algorithm, is True where the communicator has a hierarchy, and the tuner may choose. On one host, or with one rank
    on each, there is none. A communicator of several hosts that works over one transport alone (`init("gloo")`) has
    none either: True is an InvalidArgumentError there.

    Each algorithm says how many bytes a communication sends between hosts in sum, with the hierarchy: of H hosts, for
    buckets of B bytes. Messages in which ranks agree come to that, a few hundred bytes for each bucket and host.
    """

    hierarchical: bool | None = field(default=None, kw_only=True)

    name: ClassVar[str]
    """What it is called in a string."""
    averages_weights: ClassVar[bool] = False
    """Whether parameters are averaged before the step, and gradients stay this rank's own."""

    def over(self, comm: Communicator) -> Communicator:
        """Return `comm` with its hierarchy or flat; InvalidArgumentError if it lacks the hierarchy. Not collective."""
        if self.hierarchical and comm.flat is comm and 1 < comm.num_nodes < comm.world_size:
            raise InvalidArgumentError(
                f"hierarchical=True, but the {comm.backend} backend treats the ranks of {comm.num_nodes} hosts alike:"
                " init('auto') makes a communicator with a hierarchy"
            )
        return comm.flat if self.hierarchical is False else comm

    def is_due(self, step: int) -> bool:  # noqa: ARG002 (an algorithm may look at it)
        """Whether ranks communicate in this step, counted from 0 since the algorithm was switched to."""
        return True

    @abc.abstractmethod
    def settings(self, run: Run) -> dict[str, Any]:
        """The arguments `bucket_type`, `chunking` and `communicate` of the BucketReducer. Not collective."""


@dataclass(frozen=True)
class GradientAllReduce(Algorithm):
    """The average of gradients by one all-reduce for each bucket, overlapping backward.

    Between hosts: 2 (H - 1) B bytes, by a ring of the leaders.
    """

    name: ClassVar[str] = "allreduce"

    def settings(self, run: Run) -> dict[str, Any]:  # noqa: ARG002 (it keeps nothing)
        """The reducer's own way."""
        return {"bucket_type": "gradient", "chunking": False, "communicate": None}


@dataclass(frozen=True)
class ScatterGatherAllReduce(Algorithm):
    """The average of gradients: each rank reduces its part of each bucket, then all gather the parts.

    Buckets are filled up so that they divide by the number of ranks. Sparse gradients are gathered whole.

    Between hosts: 3 (H - 1) B bytes: 2 (H - 1) B to reduce, (H - 1) B to gather.
    """

    name: ClassVar[str] = "sg-allreduce"

    def settings(self, run: Run) -> dict[str, Any]:
        """Buckets that divide by the number of ranks."""
        return {"bucket_type": "gradient", "chunking": True, "communicate": functools.partial(_scatter_gather, run)}


def _scatter_gather(run: Run, flat: torch.Tensor) -> None:
    """The average in `flat`. Collective."""
    ranks, numel = run.comm.world_size, flat.numel()
    if ranks == 1 or not numel:
        return
    whole = torch.nn.functional.pad(flat, (0, -numel % ranks)) if numel % ranks else flat
    part = run.comm.reduce_scatter(whole, "avg")
    pieces = torch.split(flat, part.numel())  # fewer than parts if the last are nothing but filling
    for piece, told in zip(pieces, run.comm.all_gather(part), strict=False):
        piece.copy_(told[: piece.numel()])


@dataclass(frozen=True)
class QuantizedAllReduce(Algorithm):
    """The average of gradients, sent in 8 bits: a quarter of float32's bytes.

    A bucket is cut into a chunk for each rank. Every rank quantises each chunk to 256 levels between its least and its
    largest value and sends it to its owner, who averages in float32, quantises the average and sends it to all: all
    get equal bits. Each of the two stages is off by at most half a step of its chunk, which is 1/255 of its range.
    With `error_feedback` a rank adds to a gradient what it lost of the one before.

    With the hierarchy the leaders of hosts do this with the averages of their hosts, which are made in float32, and
    each counts for as many ranks as it leads. Between hosts: 2 H (H - 1) (8 + ceil(N / H)) bytes for a bucket of N
    elements.

    NaN, inf, or a value beyond 2**126, on any rank, is a NumericOverflowError on all that names rank and parameter;
    it does not spread. So a GradScaler, which counts on inf, does not go with this. Sparse gradients are
    gathered as they are.
    """

    error_feedback: bool = False
    name: ClassVar[str] = "quantize"

    def settings(self, run: Run) -> dict[str, Any]:
        """Chunks are made of what lies in a bucket, not of what fills it up."""
        communicate = functools.partial(_average_quantized, run, error_feedback=self.error_feedback)
        return {"bucket_type": "gradient", "chunking": False, "communicate": communicate}


def _average_quantized(run: Run, flat: torch.Tensor, *, error_feedback: bool) -> None:
    """The average in `flat`, by way of 8 bits. Collective."""
    spans = run.reducer.spans(flat)
    parts = 2 if flat.is_complex() else 1
    numel = parts * sum(n for _, n in spans)
    if run.comm.world_size == 1 or not numel:
        return
    real = (torch.view_as_real(flat).view(-1) if parts == 2 else flat)[:numel]
    mean = real.to(torch.float32, copy=True)
    low, high = mean.aminmax()
    if not (low >= -_LARGEST and high <= _LARGEST):
        mean.fill_(torch.nan)  # averaging over the host could hide it
    mean.div_(_ranks_led(run.comm))  # so that their sum, which is the host's average, does not overflow
    lost: list[torch.Tensor] = []

    def between(leaders: Leaders, mean: torch.Tensor) -> None:
        if error_feedback and flat in run.kept:
            mean += run.kept[flat]
        lost.append(_exchange_quantized(leaders, mean))

    run.comm.through_leaders(mean, between, operation="quantising gradients")
    if not mean.isfinite().all():
        run.comm.agree(_not_finite(real.to(torch.float32), spans, parts), phase="quantising gradients")
        raise AssertionError("some rank has sent what is not finite")
    if error_feedback and lost:
        run.kept[flat] = lost[0]
    real.copy_(mean)


def _ranks_led(comm: Communicator) -> int:
    """How many ranks' tensors are one to the leaders of `comm`. Not collective."""
    return 1 if comm.flat is comm else comm.local_world_size


def _exchange_quantized(leaders: Leaders, mean: torch.Tensor) -> torch.Tensor:
    """Average what leaders have, each by the ranks that it leads; return what quantising `mean` has lost. Collective.

    NaN in a chunk of any leader is NaN in all of that chunk on all.
    """
    mean.clamp_(-_LARGEST, _LARGEST)  # rounding may have brought it beyond; NaN stays
    sent = quantize(_chunks(mean, len(leaders.counts)))
    received = leaders.all_to_all(list(sent))
    ranks = sum(leaders.counts)
    part = torch.zeros(sent.shape[1] - _HEAD_BYTES, dtype=torch.float32, device=mean.device)
    for chunk, count in zip(received, leaders.counts, strict=True):
        part.add_(dequantize(chunk), alpha=count / ranks)
    gathered = leaders.all_gather(quantize(part.clamp_(-_LARGEST, _LARGEST)[None])[0])
    lost = mean - torch.cat([dequantize(chunk) for chunk in sent])[: mean.numel()]
    mean.copy_(torch.cat([dequantize(chunk) for chunk in gathered])[: mean.numel()])
    return lost


def _chunks(values: torch.Tensor, count: int) -> torch.Tensor:
    """`values` in `count` rows of one length; what is missing repeats the last, so that no range grows by it."""
    rest = -values.numel() % count
    return torch.cat([values, values[-1:].expand(rest)]).view(count, -1)


def quantize(chunks: torch.Tensor) -> torch.Tensor:
    """Each row of float32 values in bytes: its least value and its step, then a level for each. Not collective.

    A row that has no range which float32 can hold comes back from `dequantize` as NaN.
    """
    ranges = torch.stack([torch.stack(row.aminmax()) for row in chunks])  # row by row it is vectorised
    low, high = ranges[:, :1], ranges[:, 1:]
    usable = (low >= -_LARGEST) & (high <= _LARGEST)
    low = torch.where(usable, low, torch.nan)
    step = (high - low) / _LEVELS
    levels = (chunks - low).div_(torch.where(step > 0, step, 1)).round_().clamp_(0, _LEVELS)
    head = torch.cat([low, step], 1).view(torch.uint8)
    return torch.cat([head, levels.to(torch.uint8)], 1)


def dequantize(chunk: torch.Tensor) -> torch.Tensor:
    """The float32 values of one row that `quantize` made. Not collective."""
    head = chunk[:_HEAD_BYTES].clone().view(torch.float32)  # a copy: a chunk may begin at any byte
    return chunk[_HEAD_BYTES:].to(torch.float32).mul_(head[1]).add_(head[0])


def _not_finite(values: torch.Tensor, spans: list[tuple[str, int]], parts: int) -> NumericOverflowError | None:
    """The error of the rank that holds `values`, which names their parameter; None if they can be quantised."""
    begin = 0
    for name, numel in spans:
        its = values[begin : begin + parts * numel]
        begin += parts * numel
        if not (its.abs() <= _LARGEST).all():
            kind = "NaN" if its.isnan().any() else "inf" if its.isinf().any() else f"{its.abs().max():g}"
            return NumericOverflowError("a gradient that cannot be quantised", name=name, found=kind)
    return None


@dataclass(frozen=True)
class Decentralized(Algorithm):
    """Weights are averaged with peers before each `interval`-th step; gradients stay this rank's own.

    In a step that communicates, `step` averages the weights with which the gradient was made, then the optimizer steps
    from the average: what Bagua does. Optimizer states are not averaged. Peers, with n ranks:

    * "all": the average over all ranks; with an interval this is local SGD.
    * "shift_one": one peer, another each time. In the s-th communication, counted from 0, Bagua's formula: rank
      r < n/2 has peer (s + r) mod (n/2) + n/2, any other has (r - n/2 - s) mod (n/2). With an odd n it is taken for
      n + 1 ranks, and the one whose peer would be the last, which does not exist, keeps its weights this time.
    * "ring": the average of left neighbour, own and right neighbour; of two ranks, their average.

    With the hierarchy, "shift_one" and "ring" are of hosts instead of ranks, as Bagua has it: weights are averaged
    within each host, then the leaders of hosts exchange the averages with their peers, each counting for as many ranks
    as it leads, and all ranks of a host get the result. So with `hierarchical=True` all ranks of a single host get
    their average. Between hosts: 2 (H - 1) B bytes for "all"; H B for "shift_one", or (H - 1) B for an odd H; 2 H B
    for "ring", or 2 B for two hosts.

    With a closure weights are averaged before it is first called, and the loss is this rank's own.
    """

    peers: Peers = "all"
    interval: int = 1
    name: ClassVar[str] = "decentralize"
    averages_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.interval, int):
            raise InvalidArgumentError(f"interval is a number of steps, not {self.interval!r}")
        if self.peers not in _PEERS:
            raise InvalidArgumentError(f"unknown peers {self.peers!r}; known: {', '.join(_PEERS)}")
        if self.interval < 1:
            raise InvalidArgumentError("interval must be positive", found=self.interval)

    def is_due(self, step: int) -> bool:
        """In step 0, then in each `interval`-th."""
        return step % self.interval == 0

    def settings(self, run: Run) -> dict[str, Any]:
        """Buckets of weights."""
        within_one_host = self.hierarchical and run.comm.num_nodes == 1
        communicate = None if self.peers == "all" or within_one_host else functools.partial(self._average, run)
        return {"bucket_type": "weight", "chunking": False, "communicate": communicate}

    def peers_of(self, rank: int, world_size: int, communication: int) -> list[int]:
        """The ranks with which `rank` averages in the communication of this number. Not collective."""
        if self.peers == "all":
            return [peer for peer in range(world_size) if peer != rank]
        if self.peers == "ring":
            return sorted({(rank - 1) % world_size, (rank + 1) % world_size} - {rank})
        half = (world_size + 1) // 2
        lower = rank < half
        peer = (communication + rank) % half + half if lower else (rank - half - communication) % half
        return [peer] if peer < world_size else []

    def _average(self, run: Run, flat: torch.Tensor) -> None:
        """The average over this rank's peers and itself, in `flat`. Collective."""
        communication = run.calls // len(run.reducer.buckets)
        run.calls += 1
        real = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        wide = real if real.dtype in _WIDE else real.to(torch.float32)
        between = functools.partial(self._average_sums, communication=communication)
        run.comm.through_leaders(wide, between, operation="averaging weights with peers")
        if wide is not real:
            real.copy_(wide)

    def _average_sums(self, leaders: Leaders, total: torch.Tensor, *, communication: int) -> None:
        """Turn the sums of this leader's ranks and of its peers' into the mean over these ranks. Collective."""
        count = len(leaders.counts)
        peers = self.peers_of(leaders.rank, count, communication)
        told = leaders.all_to_all([total if peer in peers else total[:0] for peer in range(count)])
        told[leaders.rank] = total
        group = sorted([leaders.rank, *peers])
        ranks = sum(leaders.counts[member] for member in group)
        total.copy_(sum(told[member] for member in group) / ranks)  # type: ignore[arg-type]


_KNOWN: dict[str, type[Algorithm]] = {
    kind.name: kind for kind in (GradientAllReduce, ScatterGatherAllReduce, QuantizedAllReduce, Decentralized)
}


def as_algorithm(algorithm: Algorithm | str) -> Algorithm:
    """`algorithm`, or the one of that name with its defaults. Not collective."""
    if isinstance(algorithm, Algorithm):
        return algorithm
    if not isinstance(algorithm, str) or algorithm not in _KNOWN:
        raise InvalidArgumentError(f"unknown algorithm {algorithm!r}; known: {', '.join(_KNOWN)}")
    return _KNOWN[algorithm]()
