"""Buckets: gradients lie in flat memory in the order of their arrival, and are averaged while backward goes on.

A step, as every rank sees it: backward makes a gradient, and a hook notes its arrival; a bucket all of whose gradients
have arrived is reduced, strictly in the order of the plan, while backward goes on. `reduce` sends the rest of the plan,
zeros where nothing arrived, then all ranks meet once: they compare plan and step and tell each other what arrived. What
is in no bucket yet gets one, in root's order of arrival: in the first step that is everything.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from statexchange.comm.calls import about
from statexchange.comm.communicator import Communicator
from statexchange.comm.defaults import as_communicator
from statexchange.comm.work import Work
from statexchange.errors import InvalidArgumentError, MismatchError, StateExchangeError
from statexchange.processes import usable_cores
from statexchange.train.declarations import (
    Declaration,
    Source,
    compare_declarations,
    declare,
    local_part,
    named_parameters,
    shortened,
    split_buckets,
)
from statexchange.train.freed_memory import give_back_freed_memory, keep_freed_memory
from statexchange.train.reducers import Reducer, average_sparse, operation, same_kind
from statexchange.train.slots import Bucket, Slot, copy_in

__all__ = ["BucketReducer"]

BucketType = Literal["gradient", "weight", "parameter"]

_PHASE = "averaging gradients"
_LINE_BYTES = 64
_BATCH_BYTES = 32 << 20  # of buckets that get their memory together
_WARM_BYTES = 1 << 18  # of gradients that are copied together while they are in cache
_HEADER = struct.Struct("<8sQd?")  # plan, step, weight, whether the rank is done
_DENSE, _SPARSE, _LATE, _FROZEN = 1, 2, 4, 8  # what the meeting says of a parameter on a rank
_ARRIVED = _DENSE | _SPARSE

_numbers: weakref.WeakKeyDictionary[Communicator, Iterator[int]] = weakref.WeakKeyDictionary()
_owners = WeakTensorKeyDictionary()  # the reducer whose hook a parameter has


@dataclass(frozen=True, slots=True)
class _Settings:
    """How a BucketReducer works; equal on all ranks."""

    bucket_bytes: int
    align_bytes: int
    chunking: bool
    fusion: bool
    delay_reduce: bool
    bucket_type: BucketType
    buckets: tuple[tuple[str, ...], ...] | None
    scale: float | None

    def check(self) -> None:
        """InvalidArgumentError unless every setting is possible."""
        if not _is_integer(self.bucket_bytes) or self.bucket_bytes < 1:
            raise InvalidArgumentError("bucket_bytes must be a positive number of bytes", found=self.bucket_bytes)
        if not _is_integer(self.align_bytes) or self.align_bytes < 8 or self.align_bytes & (self.align_bytes - 1):
            raise InvalidArgumentError("align_bytes must be a power of two, 8 or more", found=self.align_bytes)
        if self.bucket_type not in ("gradient", "weight", "parameter"):
            raise InvalidArgumentError(f"unknown bucket_type {self.bucket_type!r}; known: gradient, weight, parameter")
        operation(self.scale)


@dataclass(frozen=True, slots=True)
class _Meeting:
    """What all ranks have told each other: by rank, and of each parameter what is so on any rank, or on all."""

    weights: list[float]
    active: list[int]
    details: list[dict[str, Any]]
    any_rank: bytes
    all_ranks: bytes

    @property
    def usual(self) -> bool:
        """Whether every parameter has arrived somewhere, and that is all there is to say."""
        return self.any_rank.count(_DENSE) == len(self.any_rank)

    @property
    def arrived(self) -> bool:
        """Whether there is any gradient anywhere."""
        return any(state & _ARRIVED for state in self.any_rank)

    def sparse(self, index: int) -> list[list[int] | None]:
        """Number of entries and of sparse dimensions of a parameter's sparse gradient, by rank."""
        return [details.get("sparse", {}).get(str(index)) for details in self.details]


Communicate = Callable[[torch.Tensor], "Work | None"]


class BucketReducer(Reducer):
    """Averages the gradients of parameters over ranks, bucket by bucket, overlapping backward.

    Collective: all ranks construct it, over parameters of the same names, shapes and dtypes, and call `finalize` after
    each backward, also a rank whose backward touched nothing. Gradients are final when `finalize` returns; between
    backward and `finalize` they belong to the reducer, and those on their way are None. Averaging is linear: several
    backwards before one `finalize` give the average of the sums, however many each rank has made.

    A gradient that arrived on some ranks counts as zeros on the others. One that arrived on none becomes None, so that
    optimizers skip the parameter. Where nothing arrived on any rank everything stays as it is. NaN on one rank is NaN
    on all. Sparse gradients are gathered and come back coalesced. Frozen parameters may be unfrozen, and the reverse.
    With `create_graph` the averages carry no graph. While the attribute `eager` is False, nothing goes during backward.

    Parameters
    ----------
    module_or_params : a module, or parameters with or without names, or a list of modules.
    comm : what `comm=` means everywhere.
    bucket_bytes : buckets come as near to this size as their parameters allow.
    align_bytes : a bucket's size is rounded up to a multiple of it; a power of two, 8 or more. `chunking` rounds it up
        to at least 32 bytes times the number of ranks too, for what cuts buckets into a part for each rank.
    fusion : gradients stay views of the bucket, and nothing is copied back; a gradient that somebody keeps is
        overwritten in the next step. Without it they lie where backward put them.
    delay_reduce : nothing is sent before `finalize`. Needed for weights.
    bucket_type : "gradient"; or "weight", which averages the parameters themselves at `finalize`, behind autograd's
        back; or "parameter", the same, noticed by a graph that still needs their old values.
    buckets : lists of names or parameters that are to lie together; others are placed as they arrive.
    scale : multiplies the sum over ranks; None makes it the average.
    overlap : send buckets while backward goes on, in another thread. None, which each rank decides for itself, does so
        unless they go through shared memory and there are fewer than two cores for each rank: that thread would only
        take backward's core.
    communicate : turns a flat bucket, in place, into what all ranks should have; None is the all-reduce. It may return
        a Work. It is called on all ranks in the order of the plan.
    """

    def __init__(
        self,
        module_or_params: Source,
        comm: Any = None,
        *,
        bucket_bytes: int = 10 << 20,
        align_bytes: int = 8,
        chunking: bool = False,
        fusion: bool = True,
        delay_reduce: bool = False,
        bucket_type: BucketType = "gradient",
        buckets: Sequence[Sequence[str | torch.Tensor]] | None = None,
        scale: float | None = None,
        overlap: bool | None = None,
        communicate: Communicate | None = None,
    ) -> None:
        self._comm = as_communicator(comm)
        self._overlap = overlap
        self._caller = self._comm.caller  # as which hooks call that autograd's threads run
        self._number = next(_numbers.setdefault(self._comm.flat, itertools.count()))
        self._communicate = communicate
        self._lock = threading.RLock()  # hooks of several devices run in several threads
        self._watch: weakref.WeakMethod[Callable[[], None]] | None = None
        self._in_backward = False
        self._warm: list[Slot] = []  # whose gradients have just arrived
        self._warm_bytes = 0
        self._hooks: list[Any] = []
        self._closed = False
        self._source = module_or_params
        self._explicit = buckets
        self._settings = _Settings(bucket_bytes, align_bytes, chunking, fusion, delay_reduce, bucket_type, None, scale)
        self._build()

    # Set-up

    @staticmethod
    def check_settings(settings: Mapping[str, Any], *others: str) -> None:
        """InvalidArgumentError for what neither says how to reduce nor is among `others`. Not collective."""
        known = {*_Settings.__slots__, "communicate", "overlap", *others}
        if unknown := sorted(settings.keys() - known):
            raise InvalidArgumentError(f"unknown setting {unknown[0]!r}; known: {', '.join(sorted(known))}")

    def reset(self, module_or_params: Source = None, **changes: Any) -> None:
        """Begin anew with other parameters or settings; gradients stay as they are. Collective.

        `changes` are arguments of the constructor. Nothing may be on its way: `finalize` first.
        """
        with self._comm.checking("reset"):
            if any(bucket.gone for bucket in self._plan):
                raise InvalidArgumentError("gradients are on their way: finalize() before reset()")
            self.check_settings(changes, "comm")
            given = {key: value for key, value in changes.items() if key in _Settings.__slots__ and key != "buckets"}
            settings = replace(self._settings, **given)
            settings.check()
        comm = as_communicator(changes.get("comm", self._comm))
        self.close()
        self._comm = comm
        self._communicate = changes.get("communicate", self._communicate)
        self._overlap = changes.get("overlap", self._overlap)
        self._explicit = changes.get("buckets", self._explicit)
        self._settings = settings
        self._source = self._source if module_or_params is None else module_or_params
        self._build()

    def _build(self) -> None:
        with self._comm.checking("BucketReducer"):
            self._settings.check()
            if self._communicate is not None and not callable(self._communicate):
                raise InvalidArgumentError(f"communicate is a function or None, not {self._communicate!r}")
            named = named_parameters(self._source)
            self._declared = declare(named)
            self._slots = [Slot(i, name, param) for i, (name, param) in enumerate(named.items())]
            self._index = {id(slot.param): slot.index for slot in self._slots}
            self._settings = replace(self._settings, buckets=self._explicit_names())
            self._check_owners()
        about = f"reducer {self._number}, {self._settings}, its own communicate: {self._communicate is not None}"
        self._digest = compare_declarations(self._comm, self._declared, about)
        self._sends_early = not self._settings.delay_reduce and self._may_overlap()
        keep_freed_memory()
        self._rounds = 0
        self._set_plan([])
        self.eager = True
        self.end_step()
        self._begin_round()
        if self._settings.buckets is not None:
            by_name = {slot.name: slot for slot in self._slots}
            self._extend_plan([[by_name[name] for name in names] for names in self._settings.buckets])
        self._closed = False
        self._comm.dependents.add(self)
        if self._settings.bucket_type == "gradient":
            self._add_hooks()
        else:
            self._extend_plan(self._split([slot for slot in self._slots if slot.bucket is None]))

    def _explicit_names(self) -> tuple[tuple[str, ...], ...] | None:
        if self._explicit is None:
            return None
        declared = {d.name: d for d in self._declared}
        names = tuple(tuple(self._name_of(item, declared) for item in bucket) for bucket in self._explicit)
        for bucket in names:
            kinds = {(declared[name].dtype, declared[name].device): name for name in bucket}
            if len(kinds) != 1:
                raise InvalidArgumentError(f"a bucket holds tensors of one dtype and device, not of {len(kinds)}")
        flat = list(itertools.chain.from_iterable(names))
        if len(flat) != len(set(flat)):
            twice = next(name for name in flat if flat.count(name) > 1)
            raise InvalidArgumentError("a parameter lies in one bucket only", name=twice)
        return names

    def _name_of(self, item: str | torch.Tensor, declared: Mapping[str, Declaration]) -> str:
        if isinstance(item, torch.Tensor) and id(item) in self._index:
            return self._declared[self._index[id(item)]].name
        if isinstance(item, str) and item in declared:
            return item
        what = f"of shape {list(item.shape)}" if isinstance(item, torch.Tensor) else f"named {item!r}"
        raise InvalidArgumentError(f"buckets name a parameter {what}, which this reducer does not have")

    def _check_owners(self) -> None:
        for slot in self._slots if self._settings.bucket_type == "gradient" else ():
            owner = _owners.get(slot.param)  # type: ignore[no-untyped-call]
            if owner is not None and owner() is not None:
                raise InvalidArgumentError("another reducer has this parameter: close() it first", name=slot.name)

    def _add_hooks(self) -> None:
        this = weakref.ref(self)
        for slot in self._slots:
            _owners[slot.param] = this
            frozen = not slot.param.requires_grad
            slot.param.requires_grad_(True)  # torch gives hooks to no others, but keeps those it gave
            hook = slot.param.register_post_accumulate_grad_hook(_hook(this, slot.index))  # type: ignore[no-untyped-call]
            self._hooks.append(hook)
            slot.param.requires_grad_(not frozen)

    def close(self) -> None:
        """Let go of the parameters: backward is as before. Not collective.

        The end of the communicator does it, too. May be called again.
        """
        self._closed = True
        self._comm.dependents.discard(self)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for slot in self._slots:
            if _owners.get(slot.param) == weakref.ref(self):  # type: ignore[no-untyped-call]
                del _owners[slot.param]

    def raise_if_closed(self) -> None:
        """Raise if this reducer or its communicator has been closed. Not collective."""
        if self._closed:
            self._comm.raise_if_closed()
            raise InvalidArgumentError("this reducer has been closed, and gradients are no averages any more")

    @property
    def comm(self) -> Communicator:
        """The communicator."""
        return self._comm

    @property
    def delay_reduce(self) -> bool:
        """Whether nothing is sent before `finalize`."""
        return self._settings.delay_reduce

    @property
    def buckets(self) -> list[list[str]]:
        """The plan: the names in each bucket, in the order in which buckets are reduced. Not collective."""
        return [[slot.name for slot in bucket.slots] for bucket in self._plan]

    @property
    def bucket_nbytes(self) -> list[int]:
        """The size of each bucket, with what fills it up. Not collective."""
        return [bucket.flat.nbytes for bucket in self._plan]

    def spans(self, flat: torch.Tensor) -> list[tuple[str, int]]:
        """The parameters that lie in the bucket `flat`, with the elements of each; then comes what fills it up.

        Not collective; `flat` is what `communicate` was given.
        """
        slots = next(bucket.slots for bucket in self._plan if bucket.flat is flat)
        return [(slot.name, slot.shape.numel()) for slot in slots]

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The parameters by name. Not collective."""
        return {slot.name: slot.param for slot in self._slots}

    def watch(self, ended: Callable[[], None] | None) -> None:
        """Have the method `ended` called at the end of each backward that touches a parameter. Not collective."""
        self._watch = None if ended is None else weakref.WeakMethod(ended)

    def _may_overlap(self) -> bool:
        if self._overlap is not None:
            return self._overlap
        on_desks = self._comm.backend in ("shm", "threads") and all(d.device[:3] == "cpu" for d in self._declared)
        return not on_desks or usable_cores() >= 2 * self._comm.world_size

    # The plan

    def _split(self, slots: Sequence[Slot]) -> list[list[Slot]]:
        """Buckets of `slots`, in the order in which they are full if `slots` arrive as given."""
        arrival = {slot.name: i for i, slot in enumerate(slots)}
        split = split_buckets([self._declared[slot.index] for slot in slots], self._settings.bucket_bytes)
        buckets = [[slots[arrival[d.name]] for d in bucket] for bucket in split]
        return sorted(buckets, key=lambda bucket: max(arrival[slot.name] for slot in bucket))

    def _batches(self, buckets: Sequence[Sequence[Slot]]) -> Iterator[list[Sequence[Slot]]]:
        """Buckets that get memory together: gradients give theirs back before the next ones do."""
        batch: list[Sequence[Slot]] = []
        for bucket in buckets:
            batch.append(bucket)
            if sum(slot.nbytes for slots in batch for slot in slots) >= _BATCH_BYTES:
                yield batch
                batch = []
        if batch:
            yield batch

    def _extend_plan(self, buckets: Sequence[Sequence[Slot]]) -> list[Bucket]:
        """Put slots into new buckets, at the end of the plan. Collective."""
        kinds: dict[tuple[torch.dtype, torch.device], list[Sequence[Slot]]] = {}
        for bucket in buckets:
            kinds.setdefault((bucket[0].dtype, bucket[0].device), []).append(bucket)
        made: dict[int, Bucket] = {}
        for (dtype, device), members in kinds.items():
            for slots, flat in zip(members, self._memory(members, dtype, device), strict=True):
                made[id(slots)] = Bucket(slots, flat, fusion=self._settings.fusion)
        new = [made[id(slots)] for slots in buckets]
        self._set_plan([*self._plan, *new])
        return new

    def _memory(
        self, buckets: Sequence[Sequence[Slot]], dtype: torch.dtype, device: torch.device
    ) -> Iterator[torch.Tensor]:
        """Flat memory for each bucket, cut from one piece, which is zero. Collective."""
        align = self._settings.align_bytes
        if self._settings.chunking:
            align = max(align, 32 * self._comm.world_size)
        unit = math.lcm(align, dtype.itemsize) // dtype.itemsize
        line = max(_LINE_BYTES // dtype.itemsize, 1)
        numels = [_rounded(sum(slot.shape.numel() for slot in slots), unit) for slots in buckets]
        begins = [0, *itertools.accumulate(_rounded(numel, line) for numel in numels)]
        if device.type == "cpu":
            memory = self._comm.empty((begins[-1],), dtype)
        else:
            memory = torch.empty(begins[-1], dtype=dtype, device=device)
        memory.zero_()
        return (memory[begin : begin + numel] for begin, numel in zip(begins, numels, strict=False))

    def _set_plan(self, plan: list[Bucket]) -> None:
        self._plan = plan
        text = json.dumps([self._digest.hex(), [[slot.index for slot in bucket.slots] for bucket in plan]])
        self._mark = hashlib.blake2b(text.encode(), digest_size=8).digest()

    def _drop_plan(self) -> None:
        for slot in self._slots:
            slot.bucket = None
            slot.own = None
        self._set_plan([])

    # Arrival

    def add(self, tensor: torch.Tensor) -> None:
        """The gradient of the parameter `tensor` is there: what the hooks say, for those who make one by hand.

        Not collective, but all ranks must come to `finalize`.
        """
        index = self._index.get(id(tensor))
        if index is None or self._settings.bucket_type != "gradient" or tensor.grad is None:
            why = "it has none" if index is not None else "it is none of its parameters"
            raise InvalidArgumentError(f"a tensor of shape {list(tensor.shape)} has no gradient to reduce here: {why}")
        self._arrive(self._slots[index])

    def _hooked(self, index: int) -> None:
        with self._lock:
            if self._watch is not None and not self._in_backward:
                self._in_backward = True
                torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # noqa: SLF001
            self._arrive(self._slots[index])

    def _end_backward(self) -> None:
        self._in_backward = False
        ended = self._watch() if self._watch is not None else None
        if ended is not None:
            with self._comm.called_by(self._caller):
                ended()

    def _arrive(self, slot: Slot) -> None:
        index, bucket = slot.index, slot.bucket
        self._seen[index] = _DENSE
        if bucket is None:
            self._order[index] = None
        elif self.eager and not self._ready[index]:
            self._ready[index] = 1
            bucket.waiting -= 1
            if self._settings.fusion:
                self._warm.append(slot)
                self._warm_bytes += slot.nbytes
                if self._warm_bytes >= _WARM_BYTES:
                    self._copy_warm()
            if not bucket.waiting and self._sends_early:
                with self._comm.called_by(self._caller):
                    self._send_full()

    def _copy_warm(self) -> None:
        """Copy gradients before they leave the cache, and free their memory for the next ones."""
        with torch.no_grad(), self._telling():
            copy_in(self._warm, fusion=True)
        self._warm.clear()
        self._warm_bytes = 0

    def _send_full(self) -> None:
        """Send what is full and next in the plan; but the last bucket has nothing left to overlap with."""
        while self._next + 1 < len(self._plan) and not self._plan[self._next].waiting:
            bucket = self._plan[self._next]
            self._next += 1
            self._copy_warm()
            self._send(bucket, 1.0, async_op=True)
            bucket.gone = True
            for slot in bucket.slots:
                slot.param.grad = None  # another backward must not add to what is on its way

    def _send(self, bucket: Bucket, factor: float, *, async_op: bool) -> None:
        """Reduce a bucket. Collective."""
        with torch.no_grad():
            with self._telling():
                for slot in bucket.fill(factor):
                    self._seen[slot.index] = 0
            if not async_op:
                for sent in self._plan[: self._next]:
                    sent.wait()  # what they have failed of ends this one, too
            self._reduce_flat(bucket, async_op=async_op)

    def _reduce_flat(self, bucket: Bucket, *, async_op: bool = False) -> None:
        with about(lambda: self._label_of(bucket)):
            if self._communicate is not None:
                bucket.work = self._communicate(bucket.flat)
                return
            op, scale = operation(self._settings.scale)
            sent = self._comm.all_reduce(bucket.flat, op, scale=scale, async_op=async_op)
            bucket.work = sent if async_op else None

    def _label_of(self, bucket: Bucket) -> str:
        return f"bucket {self._plan.index(bucket)}: {shortened([slot.name for slot in bucket.slots])}"

    # The end of a step

    def finalize(self) -> None:
        """Gradients are the averages over ranks, and what arrives from now on belongs to the next step. Collective."""
        self.raise_if_closed()
        self.reduce()
        self.end_step()

    def discard(self) -> None:
        """Forget what arrived. Not collective, but all ranks must do it alike; blocks until what was sent is reduced.

        After a failure of this rank alone the others will not come: what they are told then is that failure.
        """
        for bucket in self._plan:
            with contextlib.suppress(StateExchangeError):
                bucket.wait()
        self._begin_round()
        self.end_step()

    def end_step(self) -> None:
        """What has arrived is dealt with: from now on it counts as missing until it arrives again. Not collective."""
        self._seen = bytearray(len(self._slots))
        self._order: dict[int, None] = {}
        self._in_backward = False

    def reduce(self, *, weight: float | None = None, step: int | None = None, done: bool = False) -> list[int]:
        """Average what has arrived, within a step that goes on; the ranks that are not done. Collective.

        For those who average more than once in a step, or between ranks of different weights: the result is the sum of
        weight times gradient, divided by the sum of weights. A rank of weight 0 counts as if nothing had arrived there,
        and where all have it there is no gradient. Weights other than 1 need `delay_reduce`. `step` is compared between
        ranks that are not `done`; one that is `done` has nothing of its own any more, and weight 0.
        """
        self._in_backward = False
        self._caller = self._comm.caller
        try:
            with torch.no_grad():
                share = 0.0 if done else self._weight(weight)
                if self._settings.bucket_type == "gradient":
                    return self._reduce_gradients(share, step, done)
                return self._reduce_weights(step, done)
        finally:
            self._rounds += 1
            self._begin_round()

    def _begin_round(self) -> None:
        self._ready = bytearray(len(self._slots))
        self._warm.clear()
        self._warm_bytes = 0
        self._next = 0
        for bucket in self._plan:
            bucket.begin_round()

    def _weight(self, weight: float | None) -> float:
        with self._comm.checking("finalize"):
            if weight is not None and not 0 <= weight < math.inf:
                raise InvalidArgumentError("a weight is a finite number, 0 or more", found=weight)
            if weight is not None and (self._settings.scale is not None or self._settings.bucket_type != "gradient"):
                raise InvalidArgumentError("a weight goes with the average of gradients, without scale", found=weight)
            if weight is not None and weight != 1 and not self._settings.delay_reduce:
                raise InvalidArgumentError("a weight needs delay_reduce: what was sent has weight 1", found=weight)
        return 1.0 if weight is None else weight

    def _reduce_gradients(self, weight: float, step: int | None, done: bool) -> list[int]:
        delayed = self._settings.delay_reduce
        if not delayed:
            for bucket in self._plan[self._next :]:
                self._send(bucket, weight, async_op=False)
        met = self._meet(*self._account(weight), weight, step, done)
        if met.arrived:
            share = weight * len(met.weights) / math.fsum(met.weights)
            if delayed:
                for bucket in self._plan:
                    self._send(bucket, share, async_op=False)
            for bucket in self._plan:
                bucket.wait()
            if not met.usual:
                self._add_late(met)
            if not delayed:
                self._correct(met)
            self._reduce_new(met, weight, share)
            self._settle(met)
            if not met.usual:
                self._drop_frozen(met)
        elif any(not met.weights[rank] for rank in met.active):
            for slot in self._slots:
                slot.param.grad = None  # what there is has no weight
        return met.active

    def _account(self, weight: float) -> tuple[bytearray, dict[str, Any]]:
        """What has arrived on this rank: a state for each parameter, and details of what is in no bucket."""
        sparse: dict[int, list[int]] = {}
        if self._settings.delay_reduce:
            for slot in self._slots:
                if slot.param.grad is None:
                    self._seen[slot.index] = 0
        for index in self._order:
            slot = self._slots[index]
            if slot.param.grad is None:
                self._seen[index] = 0
            elif slot.bucket is None and slot.param.grad.layout is torch.sparse_coo:
                grad = slot.param.grad = slot.param.grad.coalesce()
                self._seen[index] = _SPARSE
                sparse[index] = [grad._nnz(), grad.sparse_dim()]  # noqa: SLF001 (torch has no other name for it)
        if not weight:
            self._seen = bytearray(len(self._seen))
        states = bytearray(self._seen)
        for bucket in self._plan:
            for slot in bucket.slots if bucket.gone else ():
                if slot.param.grad is not None:
                    states[slot.index] |= _LATE
        for slot in self._slots:
            if not slot.param.requires_grad:
                states[slot.index] |= _FROZEN
        order = [i for i in self._order if self._seen[i] and self._slots[i].bucket is None]
        return states, {"order": order, "sparse": sparse} if order else {}

    def _meet(
        self, states: bytearray, details: dict[str, Any], weight: float, step: int | None, done: bool
    ) -> _Meeting:
        """Compare plan and step, and learn what arrived on any rank. Collective."""
        mark = self._rounds if step is None else step
        tail = json.dumps(details).encode() if details else b""
        ours = _HEADER.pack(self._mark, mark, weight, done) + states + tail
        answers = self._comm.all_gather_bytes(ours, operation=_PHASE)
        heads = [_HEADER.unpack_from(answer) for answer in answers]
        if any(head[0] != self._mark for head in heads):
            raise MismatchError("ranks average the gradients of different reducers, or by different plans")
        active = [rank for rank, head in enumerate(heads) if not head[3]]
        steps = {heads[rank][1]: rank for rank in reversed(active)}
        if len(steps) > 1:
            (first, a), (second, b) = sorted(steps.items(), key=lambda item: item[1])[:2]
            raise MismatchError(
                f"rank {a} is in step {first}, rank {b} in step {second}: all must call backward and step alike"
            )
        end = _HEADER.size + len(states)
        bodies = {answer[_HEADER.size : end] for answer in answers}
        tails = [json.loads(answer[end:]) if len(answer) > end else {} for answer in answers]
        weights = [head[2] for head in heads]
        return _Meeting(weights, active, tails, _combined(bodies, int.__or__), _combined(bodies, int.__and__))

    def _correct(self, met: _Meeting) -> None:
        """Ranks that are done have sent zeros: the mean is over the others."""
        if len(met.active) != len(met.weights):
            for bucket in self._plan:
                bucket.flat.mul_(len(met.weights) / len(met.active))

    def _drop_frozen(self, met: _Meeting) -> None:
        """A bucket with a parameter that is frozen on all ranks will never be full: the plan is made anew."""
        planned = itertools.chain.from_iterable(bucket.slots for bucket in self._plan)
        if self._settings.buckets is None and any(met.all_ranks[slot.index] & _FROZEN for slot in planned):
            self._drop_plan()

    def _add_late(self, met: _Meeting) -> None:
        """What another backward brought for buckets that were on their way. Collective."""
        for bucket in self._plan:
            if any(met.any_rank[slot.index] & _LATE for slot in bucket.slots):
                first = bucket.flat.clone()
                with self._telling():
                    if bucket.gone:
                        bucket.fill()
                    else:
                        bucket.flat.zero_()
                self._reduce_flat(bucket)
                bucket.wait()
                bucket.flat.add_(first)

    def _reduce_new(self, met: _Meeting, weight: float, share: float) -> None:
        """Reduce what is in no bucket yet: it gets one, unless it is sparse everywhere. Collective."""
        order = dict.fromkeys(int(index) for details in met.details for index in details.get("order", ()))
        dense = [self._slots[i] for i in order if met.any_rank[i] & _DENSE or not same_kind(met.sparse(i))]
        for batch in self._batches(self._split(dense)):
            for bucket in self._extend_plan(batch):
                self._send(bucket, share, async_op=False)
                bucket.wait()
        if dense:
            give_back_freed_memory()
        for slot in (self._slots[i] for i in order if self._slots[i].bucket is None):
            grad = slot.param.grad if weight else None
            facts = met.sparse(slot.index)
            slot.param.grad = average_sparse(self._comm, slot.param, grad, facts, share, self._settings.scale)

    def _settle(self, met: _Meeting) -> None:
        """Gradients are where their parameters look for them."""
        own, views = [], []
        arrived = itertools.repeat(_DENSE) if met.usual else met.any_rank
        for slot, state in zip(self._slots, arrived, strict=False):
            param, grad = slot.param, slot.grad
            if not state & _ARRIVED:
                param.grad = None
            elif slot.bucket is None:
                continue  # sparse
            elif self._settings.fusion:
                if param.grad is not grad:
                    param.grad = grad
            else:
                param.grad = grad = slot.wrapped(torch.empty_like(slot.view)) if slot.own is None else slot.own
                own.append(local_part(grad, slot.name))
                views.append(slot.view)
            slot.own = None
        if own:
            torch._foreach_copy_(own, views)

    def _reduce_weights(self, step: int | None, done: bool) -> list[int]:
        met = self._meet(bytearray(), {}, 1.0, step, done)
        for bucket in self._plan:
            views = [slot.view for slot in bucket.slots]
            values = [self._value(slot) for slot in bucket.slots]
            torch._foreach_copy_(views, values)
            self._reduce_flat(bucket)
            bucket.wait()
            torch._foreach_copy_(values, views)
        return met.active

    def _value(self, slot: Slot) -> torch.Tensor:
        local = local_part(slot.param, slot.name)
        return local.data if self._settings.bucket_type == "weight" else local

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """What goes wrong on this rank alone is raised on all."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (it is raised there)
            self._comm.agree(error, phase=_PHASE)


def _hook(reducer: weakref.ref[BucketReducer], index: int) -> Callable[[torch.Tensor], None]:
    """A hook that keeps nothing alive."""

    def hook(_: torch.Tensor) -> None:
        alive = reducer()
        if alive is not None:
            alive._hooked(index)  # noqa: SLF001 (its own)

    return hook


def _is_integer(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _rounded(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _combined(bodies: set[bytes], operator: Callable[[int, int], int]) -> bytes:
    """The bits that are set in any or in all of `bodies`, of one length."""
    first, *others = bodies
    if not others:
        return first
    bits = int.from_bytes(first, "little")
    for other in others:
        bits = operator(bits, int.from_bytes(other, "little"))
    return bits.to_bytes(len(first), "little")
