"""Algorithms that synchronise ranks which train one model.

An Algorithm is a value: equal settings make equal algorithms, and ranks compare them as text. Its state lies in a
`Run`; switching the algorithm makes a new one. It communicates by a function on flat buckets, which the BucketReducer
calls on all ranks in the order of its plan.
"""

from __future__ import annotations

import abc
import functools
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from statexchange.comm.backends.backend import Leaders
from statexchange.comm.communicator import Communicator
from statexchange.errors import InvalidArgumentError, NumericOverflowError
from statexchange.train.buckets.options import BucketType, Communicate
from statexchange.train.buckets.reducer import BucketReducer

Peers = Literal["all", "shift_one", "ring"]

_WIDE = (torch.float32, torch.float64)  # dtypes in which weights are averaged
_LEVELS = 255
_HEAD_BYTES = 8  # a quantised chunk begins with its least value and its step, both float32
_LARGEST = 2.0**126  # the range between two larger values may overflow float32


class Run:
    """The state of an algorithm that synchronises one optimizer, since it was switched to.

    `comm` is the communicator; `reducer` makes the buckets; `num_calls` counts the buckets that were communicated;
    `residuals` has the quantisation error of each bucket, as long as the bucket exists.
    """

    reducer: BucketReducer

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.num_calls = 0
        self.residuals = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class Algorithm(abc.ABC):
    """A way to synchronise gradients or weights: options for the BucketReducer that does it.

    Not collective. All ranks must use equal algorithms.

    Each algorithm's docstring states how many bytes one communication sends between hosts, in total and with the
    hierarchy, for H hosts and buckets of B bytes. Messages by which ranks agree add a few hundred bytes per bucket and
    host.

    Args:
        hierarchical: whether a communicator of several hosts reduces within each host first and then between hosts;
            with False all ranks are treated alike. None begins with True where the communicator has a hierarchy, and
            lets the tuner choose. A communicator has no hierarchy on one host, or with one rank on each host. Over
            several hosts with a single transport (`init("gloo")`) it has none either, and True is an
            InvalidArgumentError.
    """

    hierarchical: bool | None = field(default=None, kw_only=True)

    name: ClassVar[str]
    """The name that `data_parallel` and `switch_to` take for it."""
    bucket_type: ClassVar[BucketType] = "gradient"
    """The tensors that are averaged; with "weight" parameters, before the step: each rank keeps its own gradients."""

    def over(self, comm: Communicator) -> Communicator:
        """Return the flat or hierarchical communicator. Not collective.

        Raises:
            InvalidArgumentError: a hierarchy is asked for, and `comm` has none.
        """
        # On one host, or with one rank on each, two steps would be one: there the option changes nothing.
        if self.hierarchical and comm.flat is comm and 1 < comm.num_nodes < comm.world_size:
            raise InvalidArgumentError(
                f"hierarchical=True, but the {comm.backend} backend treats the ranks of {comm.num_nodes} hosts alike:"
                " init('auto') makes a communicator with a hierarchy"
            )
        if self.hierarchical is False:
            return comm.flat
        return comm

    def is_due(self, step: int) -> bool:  # noqa: ARG002 (for subclasses)
        """Whether ranks communicate in this step; steps count from 0 at the switch to this algorithm."""
        return True

    @abc.abstractmethod
    def collective(self, run: Run) -> Communicate | None:
        """Return the `communicate` of a BucketReducer, with `run` as its state; None for the reducer's all-reduce.

        Not collective.
        """


@dataclass(frozen=True)
class GradientAllReduce(Algorithm):
    """Average gradients by one all-reduce for each bucket, overlapping backward.

    Not collective to construct. Between hosts: 2 (H - 1) B bytes, by a ring of the hosts' leaders. The algorithm is
    Bagua's GradientAllReduce, which is also what torch's DDP does.

    Example:
        >>> import statexchange as sx
        >>> sx.train.algorithms.GradientAllReduce()
        GradientAllReduce(hierarchical=None)
    """

    name: ClassVar[str] = "allreduce"

    def collective(self, run: Run) -> None:
        """Use the reducer's own all-reduce."""


@dataclass(frozen=True)
class ScatterGatherAllReduce(Algorithm):
    """Average gradients by a reduce-scatter and an all-gather of each bucket.

    Not collective to construct. Between hosts: 3 (H - 1) B bytes: 2 (H - 1) B to reduce, (H - 1) B to gather. The
    algorithm is Bagua's ScatterGatherAllReduce.

    Example:
        >>> import statexchange as sx
        >>> sx.train.algorithms.ScatterGatherAllReduce().name
        'sg-allreduce'
    """

    name: ClassVar[str] = "sg-allreduce"

    def collective(self, run: Run) -> Communicate:
        """Return a function that averages one part of a bucket on each rank."""
        return functools.partial(_scatter_gather, run)


def _scatter_gather(run: Run, flat: torch.Tensor) -> None:
    """Replace `flat` by its average over ranks. Collective."""
    # A bucket is a multiple of the number of ranks, padding included, so it can be cut into equal parts.
    if run.comm.world_size == 1 or not flat.numel():
        return
    part = run.comm.reduce_scatter(flat, "avg")
    torch.cat(run.comm.all_gather(part), out=flat)


@dataclass(frozen=True)
class QuantizedAllReduce(Algorithm):
    """Average gradients in 8 bits: a quarter of the bytes of float32.

    Not collective to construct. A bucket is cut into one chunk for each rank. Every rank quantises each chunk to 256
    levels between its least and its largest value and sends it to the chunk's owner. The owner averages in float32,
    quantises the average and sends it to all, so that all ranks get equal bits. Each of the two stages is off by at
    most half a step; a step is 1/255 of the chunk's range. The algorithm is Bagua's ByteGrad.

    With the hierarchy the leaders of hosts do this with the averages of their hosts, which are made in float32, and
    each average counts for as many ranks as its host has. Between hosts: 2 H (H - 1) (8 + ceil(N / H)) bytes for a
    bucket of N elements.

    NaN, inf, or a value beyond 2**126 on any rank is a NumericOverflowError on all ranks that names rank and parameter;
    it does not spread. So a GradScaler, which relies on inf, cannot be used with it.

    Args:
        error_feedback: add the quantisation error of one step to the next step's gradient.

    Example:
        >>> import statexchange as sx
        >>> sx.train.algorithms.QuantizedAllReduce(error_feedback=True).error_feedback
        True
    """

    error_feedback: bool = False
    name: ClassVar[str] = "quantize"

    def collective(self, run: Run) -> Communicate:
        """Return a function that averages in 8 bits; chunks are cut from the gradients, without a bucket's padding."""
        return functools.partial(_average_quantized, run, error_feedback=self.error_feedback)


def _average_quantized(run: Run, flat: torch.Tensor, *, error_feedback: bool) -> None:
    """Replace `flat` by its average over ranks, sent in 8 bits. Collective."""
    spans = run.reducer.spans(flat)
    parts, real = _as_real(flat)
    # Without the padding: its zeros would widen the range of the last chunk.
    real = real[: parts * sum(n for _, n in spans)]
    if run.comm.world_size == 1 or not real.numel():
        return
    mean = real.to(torch.float32, copy=True)
    low, high = mean.aminmax()
    if not (low >= -_LARGEST and high <= _LARGEST):
        mean.fill_(torch.nan)  # averaging within the host could hide a value that is too large
    # With the hierarchy a leader gets the sum over its host. Divided before, as the sum could overflow.
    if run.comm.flat is not run.comm:
        mean.div_(run.comm.local_world_size)
    residuals: list[torch.Tensor] = []

    def between(leaders: Leaders, mean: torch.Tensor) -> None:
        # On leaders only, as only they quantise: what they lost of the sum in the step before.
        if error_feedback and flat in run.residuals:
            mean += run.residuals[flat]
        residuals.append(_exchange_quantized(leaders, mean))

    run.comm.through_leaders(mean, between, operation="quantising gradients")
    # All ranks have equal bits here, so all take the same branch.
    if not mean.isfinite().all():
        run.comm.agree(_quantisation_error(real.to(torch.float32), spans, parts), phase="quantising gradients")
        raise AssertionError("the average is not finite, but the values of all ranks are")
    # After the check: what was lost of a bad gradient is not carried into the next step.
    if error_feedback and residuals:
        run.residuals[flat] = residuals[0]
    real.copy_(mean)


def _as_real(flat: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Return how many real numbers an element has, and `flat` as real numbers, in the same memory."""
    if flat.is_complex():
        return 2, torch.view_as_real(flat).view(-1)
    return 1, flat


def _exchange_quantized(leaders: Leaders, mean: torch.Tensor) -> torch.Tensor:
    """Average over leaders, weighted by the ranks of their hosts; return what quantising `mean` lost. Collective.

    A NaN in a chunk on any leader makes the whole chunk NaN on all ranks.
    """
    mean.clamp_(-_LARGEST, _LARGEST)  # rounding may have exceeded the limit; NaN stays
    sent = quantize(_chunks(mean, len(leaders.counts)))
    received = leaders.all_to_all(list(sent))
    ranks = sum(leaders.counts)
    part = torch.zeros(sent.shape[1] - _HEAD_BYTES, dtype=torch.float32, device=mean.device)
    # Summed in the order of leaders, in float32: quantised values cannot be added up as bytes.
    for chunk, count in zip(received, leaders.counts, strict=True):
        part.add_(dequantize(chunk), alpha=count / ranks)
    gathered = leaders.all_gather(quantize(part.clamp_(-_LARGEST, _LARGEST)[None])[0])
    # What quantising lost here. What the owner of a chunk loses of the average is not fed back.
    residual = mean - torch.cat(list(map(dequantize, sent)))[: mean.numel()]
    # By all ranks from the same bytes, this rank's part among them, so that all get equal bits.
    mean.copy_(torch.cat(list(map(dequantize, gathered)))[: mean.numel()])
    return residual


def _chunks(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return `values` in `count` rows of one length, padded with the last value, which widens no row's range.

    ``[1, 2, 3]`` in two rows are ``[[1, 2], [3, 3]]``.
    """
    rest = -values.numel() % count
    return torch.cat([values, values[-1:].expand(rest)]).view(count, -1)


def quantize(chunks: torch.Tensor) -> torch.Tensor:
    """Encode rows of float32 values as bytes: least value and step, then one level a value. Not collective.

    `dequantize` returns NaN for a row whose range float32 cannot hold. Of ``[0, 51, 255]`` the least value is 0, the
    step 1, and the levels are 0, 51 and 255; of ``[-1, 1]`` they are -1, 2/255, 0 and 255.
    """
    # By rows: aminmax is vectorised over a whole tensor, but not over a dim.
    ranges = torch.stack([torch.stack(row.aminmax()) for row in chunks])
    low, high = ranges[:, :1], ranges[:, 1:]
    usable = (low >= -_LARGEST) & (high <= _LARGEST)
    low = torch.where(usable, low, torch.nan)
    step = (high - low) / _LEVELS
    # A step of 0, of a row of equal values, would make 0 / 0.
    levels = (chunks - low).div_(torch.where(step > 0, step, 1)).round_().clamp_(0, _LEVELS)
    head = torch.cat([low, step], 1).view(torch.uint8)
    return torch.cat([head, levels.to(torch.uint8)], 1)


def dequantize(chunk: torch.Tensor) -> torch.Tensor:
    """Decode one row that `quantize` made into float32 values. Not collective."""
    head = chunk[:_HEAD_BYTES].clone().view(torch.float32)  # clone: a chunk may begin at an unaligned byte
    return chunk[_HEAD_BYTES:].to(torch.float32).mul_(head[1]).add_(head[0])


def _quantisation_error(values: torch.Tensor, spans: list[tuple[str, int]], parts: int) -> NumericOverflowError | None:
    """Return an error that names the first parameter whose `values` cannot be quantised; None if all can."""
    begin = 0
    for name, numel in spans:
        part = values[begin : begin + parts * numel]
        begin += parts * numel
        if (part.abs() <= _LARGEST).all():
            continue
        text = "this gradient is too large to be quantised, or not finite"
        return NumericOverflowError(text, name=name, found=f"{part.abs().max():g}")
    return None


@dataclass(frozen=True)
class Decentralized(Algorithm):
    """Average weights with peers before each `interval`-th step; gradients stay each rank's own.

    Not collective to construct. In a step that communicates, `step` averages the weights with which the gradient was
    made, then the optimizer steps from the average, as Bagua's Decentralized algorithm does. Optimizer states are not
    averaged. With a closure weights are averaged before its first call, and the loss is each rank's own.

    With the hierarchy, "shift_one" and "ring" are between hosts instead of ranks, as in Bagua: weights are averaged
    within each host, then the leaders of hosts exchange the averages with their peers, each counting for as many ranks
    as its host has, and all ranks of a host get the result. So with `hierarchical=True` all ranks of a single host get
    their average. Between hosts: 2 (H - 1) B bytes for "all"; H B for "shift_one", or (H - 1) B for an odd H; 2 H B
    for "ring", or 2 B for two hosts.

    Args:
        peers: the ranks, of n, with which a rank averages.

            * "all": all ranks; with an interval this is local SGD.
            * "shift_one": one peer, another each time. In the s-th communication, counted from 0, by Bagua's formula:
              rank r < n/2 has peer (s + r) mod (n/2) + n/2, any other has (r - n/2 - s) mod (n/2). For odd n the
              formula takes n + 1; the rank whose peer would be rank n, which does not exist, keeps its weights.
            * "ring": the left and the right neighbour; two ranks average with each other.
        interval: the number of steps from one communication to the next.

    Raises:
        InvalidArgumentError: there are no such peers, or `interval` is no positive number.

    Example:
        >>> import statexchange as sx
        >>> ring = sx.train.algorithms.Decentralized(peers="ring", interval=4)
        >>> [step for step in range(9) if ring.is_due(step)]
        [0, 4, 8]
        >>> ring.peers_of(0, world_size=4, communication=0)
        [1, 3]
    """

    peers: Peers = "all"
    interval: int = 1
    name: ClassVar[str] = "decentralize"
    bucket_type: ClassVar[BucketType] = "weight"

    def __post_init__(self) -> None:
        if not isinstance(self.interval, int):
            raise InvalidArgumentError(f"interval must be a number of steps, not {self.interval!r}")
        if self.peers not in get_args(Peers):
            raise InvalidArgumentError(f"unknown peers {self.peers!r}; known: {', '.join(get_args(Peers))}")
        if self.interval < 1:
            raise InvalidArgumentError("interval must be positive", found=self.interval)

    def is_due(self, step: int) -> bool:
        """Whether `step`, counted from 0, is a multiple of `interval`."""
        return step % self.interval == 0

    def collective(self, run: Run) -> Communicate | None:
        """Return a function that averages with the peers of this rank; with all the reducer's all-reduce does it."""
        within_one_host = self.hierarchical and run.comm.num_nodes == 1
        if self.peers == "all" or within_one_host:
            return None
        return functools.partial(self._average, run)

    def peers_of(self, rank: int, world_size: int, communication: int) -> list[int]:
        """Return the ranks with which `rank` averages in the communication of this number. Not collective."""
        if self.peers == "all":
            return [peer for peer in range(world_size) if peer != rank]
        if self.peers == "ring":
            return sorted({(rank - 1) % world_size, (rank + 1) % world_size} - {rank})
        # The lower half is paired with the upper one, shifted by one in each communication.
        half = (world_size + 1) // 2
        peer = (rank - half - communication) % half
        if rank < half:
            peer = (communication + rank) % half + half
        if peer >= world_size:  # an odd number of ranks: this one is left over
            return []
        return [peer]

    def _average(self, run: Run, flat: torch.Tensor) -> None:
        """Replace `flat` by its average over this rank and its peers. Collective."""
        # This is called once for each bucket, and all buckets of a communication go to the same peers.
        communication = run.num_calls // len(run.reducer.buckets)
        run.num_calls += 1
        _, real = _as_real(flat)
        wide = real
        if real.dtype not in _WIDE:
            wide = real.to(torch.float32)
        between = functools.partial(self._average_sums, communication=communication)
        run.comm.through_leaders(wide, between, operation="averaging weights with peers")
        if wide is not real:
            real.copy_(wide)

    def _average_sums(self, leaders: Leaders, total: torch.Tensor, *, communication: int) -> None:
        """Turn `total`, the sum over this leader's ranks, into the mean over its and its peers' ranks. Collective."""
        count = len(leaders.counts)
        peers = self.peers_of(leaders.rank, count, communication)
        # An empty tensor for those that are no peers. Being a peer is mutual, so two leaders send equal sizes.
        sent = [total[:0]] * count
        for peer in peers:
            sent[peer] = total
        totals = leaders.all_to_all(sent)
        totals[leaders.rank] = total
        group = sorted([leaders.rank, *peers])  # so that two peers add up in the same order, and get equal bits
        ranks = sum(leaders.counts[member] for member in group)
        total.copy_(sum(totals[member] for member in group) / ranks)  # type: ignore[arg-type]


_KNOWN: dict[str, type[Algorithm]] = {
    kind.name: kind for kind in (GradientAllReduce, ScatterGatherAllReduce, QuantizedAllReduce, Decentralized)
}


def as_algorithm(algorithm: Algorithm | str) -> Algorithm:
    """Return `algorithm`, or the one of that name with its defaults. Not collective."""
    if isinstance(algorithm, Algorithm):
        return algorithm
    if not isinstance(algorithm, str) or algorithm not in _KNOWN:
        raise InvalidArgumentError(f"unknown algorithm {algorithm!r}; known: {', '.join(_KNOWN)}")
    return _KNOWN[algorithm]()
