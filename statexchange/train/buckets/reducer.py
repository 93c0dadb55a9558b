"""BucketReducer: gradients lie in flat buckets in the order of their arrival, and are averaged during backward.

Terms. A *plan* puts parameters into buckets and orders these. A *round* is one averaging; it ends with `reduce`. A
*step* is the caller's; it may have several rounds.

A round, on every rank:

1. Backward makes a gradient and a hook records its arrival (`GradientHooks`, `Arrival`). A gradient has arrived if the
   hook ran, not if ``grad is not None``: users keep or zero old gradients.
2. The gradient is copied into its bucket (`averager`). `.grad` becomes a view of the bucket, so nothing is copied back.
3. With `overlap`, a bucket that has all its gradients is reduced while backward goes on, but never before the buckets
   that precede it in the plan: every rank must reduce the same buckets in the same order, in whatever order its
   gradients arrive. `.grad` of its parameters is None from then on, so that another backward does not add to memory in
   flight. The plan's last bucket is left to `reduce`: no gradients follow that it could overlap with.
4. `reduce` sends the rest of the plan, with zeros where nothing arrived, so that ranks whose backward touched other
   parameters take part in the same collectives. Steps 2 to 6 are in `averager`; the zeros are written by `Bucket.fill`
   of `views`.
5. All ranks exchange one message (`rounds`): the plan's digest, the step, the weight, and what arrived. Different plans
   or steps are a MismatchError on all.
6. Gradients that arrived late, for a bucket in flight, are reduced and added; ranks where nothing was late send
   zeros. Gradients without a bucket get one, in rank 0's order of arrival; in the first round, unless `buckets` is
   given, these are all. Gradients that arrived on no rank become None. If a parameter in the plan is frozen on all
   ranks, so that its bucket would never be full, the plan is emptied and the next round makes a new one.

With ``overlap=False`` step 3 does not happen and step 5 comes before step 4: the sum of weights has to be known before
gradients are multiplied by their share of it. So ranks must agree in this option.

Threads. Hooks run in threads of autograd's engine, possibly in different ones on different ranks, while the thread that
called backward waits. Reductions during backward run in the communicator's work queue; `reduce` waits for them.

Failure. If one rank cannot copy a gradient (its shape changed, say), all ranks raise the error, by `agree`. A failed
reduction is raised where it is waited for. After `discard` or `reset` the reducer is usable again if its communicator
is.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from statexchange.comm.communicator import CommLike, Communicator
from statexchange.comm.defaults import as_communicator, public_call
from statexchange.errors import InvalidArgumentError, StateExchangeError
from statexchange.processes import usable_cores
from statexchange.train.buckets.averager import BucketAverager
from statexchange.train.buckets.options import BucketOptions, BucketType, Communicate, ReducerOptions, check_names
from statexchange.train.buckets.plan import BucketPlan, explicit_groups
from statexchange.train.buckets.rounds import Arrival
from statexchange.train.buckets.views import BucketView, views_of
from statexchange.train.comparison import compare
from statexchange.train.malloc_tuning import raise_malloc_thresholds
from statexchange.train.parameters import Source, named_parameters
from statexchange.train.reducers import Reducer

if TYPE_CHECKING:
    from typing import Unpack

# The number of the next reducer of a communicator. Ranks compare it: else those that make two reducers in different
# orders, over parameters of the same names, would average one's gradients with the other's.
_numbers: weakref.WeakKeyDictionary[Communicator, Iterator[int]] = weakref.WeakKeyDictionary()

_owners = WeakTensorKeyDictionary()  # a parameter's GradientHooks, as a weak reference


class GradientHooks:
    """Calls the method `arrived` with a parameter's number, and the one given to `watch` at the end of the backward.

    Both are bound methods and are referred to weakly, so that hooks on long-lived parameters keep no reducer alive:
    when its object is gone they do nothing. A parameter has the hooks of one owner at a time.
    """

    def __init__(self, arrived: Callable[[int], None]) -> None:
        self._arrived = weakref.WeakMethod(arrived)
        self._ended: weakref.WeakMethod[Callable[[], None]] | None = None
        self._lock = threading.RLock()  # autograd runs the hooks of several devices in several threads
        self._in_backward = False
        self._handles: list[Any] = []
        self._views: list[BucketView] = []

    def watch(self, ended: Callable[[], None]) -> None:
        """Call the method `ended` at the end of each backward from now on."""
        self._ended = weakref.WeakMethod(ended)

    @staticmethod
    def check_free(views: Sequence[BucketView]) -> None:
        """Raise InvalidArgumentError if another owner has hooks on one of the parameters."""
        for view in views:
            # An owner that was dropped without `remove` is still listed, but its reference is dead.
            owner = _owners.get(view.param)  # type: ignore[no-untyped-call]
            if owner is not None and owner() is not None:
                raise InvalidArgumentError("another reducer has this parameter: close() it first", name=view.name)

    def attach(self, views: Sequence[BucketView]) -> None:
        """Put a hook on each parameter, frozen ones included: they may be unfrozen later."""
        this = weakref.ref(self)
        for view in views:
            _owners[view.param] = this
            is_frozen = not view.param.requires_grad
            view.param.requires_grad_(True)  # torch refuses a hook otherwise, but keeps it when this is undone
            hook = _hook(this, view.index)
            self._handles.append(view.param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
            view.param.requires_grad_(not is_frozen)
        self._views.extend(views)

    def remove(self) -> None:
        """Remove the hooks from the parameters. May be called more than once."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for view in self._views:
            if _owners.get(view.param) == weakref.ref(self):  # type: ignore[no-untyped-call]
                del _owners[view.param]
        self._views.clear()

    def forget_backward(self) -> None:
        """Treat the next gradient as the first of a backward: a backward that raised does not report its end."""
        self._in_backward = False

    def _gradient_accumulated(self, index: int) -> None:
        with self._lock:
            # Autograd calls it once, at the end of this backward. The first gradient of the next one queues it again.
            if self._ended is not None and not self._in_backward:
                self._in_backward = True
                torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)  # noqa: SLF001
            arrived = self._arrived()
            if arrived is not None:
                arrived(index)

    def _backward_ended(self) -> None:
        self._in_backward = False
        assert self._ended is not None  # else this would not have been queued
        ended = self._ended()
        if ended is not None:
            ended()


def _hook(owner: weakref.ref[GradientHooks], index: int) -> Callable[[torch.Tensor], None]:
    """Return a hook that keeps nothing alive: it stays on the parameter, which may outlive the reducer."""

    def hook(_: torch.Tensor) -> None:
        alive = owner()
        if alive is not None:
            alive._gradient_accumulated(index)  # noqa: SLF001 (the class's own callback)

    return hook


class BucketReducer(Reducer):
    """Average the gradients of parameters over ranks in flat buckets, overlapping backward.

    Collective: all ranks construct it, over parameters of the same names, shapes and dtypes, and call `finalize` after
    each backward; a rank whose backward touched no parameter must call it, too.

    Gradients are final when `finalize` returns. Between backward and `finalize` they belong to the reducer, and those
    that are being reduced are None. Averaging is linear: several backwards before one `finalize` give the average of
    the sums, however many backwards each rank has made.

    A gradient that arrived on some ranks counts as zeros on the others. One that arrived on no rank becomes None, so
    that optimizers skip the parameter. If nothing arrived on any rank, everything stays as it is. NaN on one rank is
    NaN on all. Sparse gradients become dense ones. Parameters may be frozen and unfrozen at any time. With
    `create_graph` the averages carry no graph. While the attribute `eager` is False, nothing is sent during backward.

    Gradients become views of their bucket. So one that the caller keeps is overwritten in the next step: clone it.

    Buckets in the order of arrival and their types are those of Bagua's Reducer (https://github.com/BaguaSys/bagua). A
    bucket's size is a multiple of 64 bytes times the number of ranks, as a `communicate` may cut it into one part for
    each rank.

    Args:
        module_or_params: a module, parameters with or without names, or a list of modules.
        comm: a Communicator, ProcessGroup, DeviceMesh or MPI communicator; by default the current one.
        bucket_bytes: buckets come as near to this size as their parameters allow.
        bucket_type: "gradient"; or "weight", which averages the parameters themselves at `finalize`. Backward through a
            graph that needs the old values raises then.
        buckets: lists of names of parameters that are to share a bucket. Others are placed as they arrive.
        scale: multiplies the sum over ranks; None averages.
        overlap: send buckets during backward, in another thread. False sends nothing before `finalize`, which weights
            need. With None each rank sends them during backward unless they are reduced through shared memory and
            there are fewer than two cores a rank: then that thread would only take time from backward.
        communicate: a function that turns a flat bucket, in place, into what all ranks should have; None is the
            all-reduce. It may return a Work. All ranks call it in the order of the plan.

    Raises:
        InvalidArgumentError: an option is invalid, or a parameter belongs to another reducer.
        MismatchError: parameters or options differ between ranks; the first parameter that differs is named.
        UnsupportedError: a parameter is lazy, a meta tensor, or a DTensor that is not replicated.

    Example:
        >>> import torch
        >>> import statexchange as sx
        >>> model = torch.nn.Linear(2, 1)
        >>> reducer = sx.train.BucketReducer(model)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> reducer.finalize()
        >>> model.weight.grad
        tensor([[4., 4.]])
        >>> sorted(reducer.buckets[0])
        ['bias', 'weight']
        >>> reducer.close()
    """

    def __init__(
        self,
        module_or_params: Source,
        comm: CommLike | None = None,
        *,
        bucket_bytes: int = 10 << 20,
        bucket_type: BucketType = "gradient",
        buckets: Sequence[Sequence[str]] | None = None,
        scale: float | None = None,
        overlap: bool | None = None,
        communicate: Communicate | None = None,
    ) -> None:
        with public_call("BucketReducer"):
            self.comm = as_communicator(comm)
        """The communicator."""
        self._number = next(_numbers.setdefault(self.comm.flat, itertools.count()))
        self._source = module_or_params
        self._options = BucketOptions(
            bucket_bytes=bucket_bytes,
            bucket_type=bucket_type,
            buckets=buckets,
            scale=scale,
            overlap=overlap,
            communicate=communicate,
        )
        self._hooks = GradientHooks(self._gradient_accumulated)
        self.eager = True
        """Whether buckets may be sent during backward. Callers may set it."""
        self._build()

    # Set-up

    def reset(
        self,
        module_or_params: Source | None = None,
        comm: CommLike | None = None,
        **changes: Unpack[ReducerOptions],
    ) -> None:
        """Start over with other parameters or options; gradients stay as they are.

        Collective.

        Args:
            module_or_params: the new parameters; None keeps the present ones.
            comm: the new communicator; None keeps the present one.
            changes: options of the constructor that change.

        Raises:
            InvalidArgumentError: buckets are in flight, or an option is unknown or invalid.
        """
        with self.comm.checking("reset"):
            if any(bucket.in_flight for bucket in self._plan.buckets):
                raise InvalidArgumentError("gradients are being reduced: call finalize() before reset()")
            check_names(changes)
            options = replace(self._options, **changes)
            options.check()
        self.close()  # on the communicator that it has had until now
        self._hooks.forget_backward()
        self._options = options
        if comm is not None:
            self.comm = as_communicator(comm)
        if module_or_params is not None:
            self._source = module_or_params
        self._build()

    def _build(self) -> None:
        """Compare parameters and options between ranks, and create all parts. Collective."""
        with self.comm.checking("BucketReducer"):
            options = self._options
            options.check()
            self._views = views_of(named_parameters(self._source))
            self._index = {id(view.param): view.index for view in self._views}
            groups = explicit_groups(options.buckets or (), self._views)
            if options.averages_gradients:
                GradientHooks.check_free(self._views)
        about = f"reducer {self._number}, {options}, its own communicate: {options.communicate is not None}"
        digest = compare(self.comm, about, (view.entry for view in self._views))
        # Before backward makes the first gradients whose memory is to be used again.
        raise_malloc_thresholds()
        overlaps = options.overlap
        if overlaps is None:
            overlaps = self._may_overlap(is_on_host=all(view.device.type == "cpu" for view in self._views))
        self._plan = BucketPlan(self.comm, options, self._views, digest)
        self._arrival = Arrival(self._views)
        self._averager = BucketAverager(self.comm, options, self._views, self._plan, self._arrival, overlaps=overlaps)
        self._rounds = 0
        self._plan.extend(groups)
        self._closed = False
        self.comm.dependents.add(self)
        # Last: if the ranks differ, which raises above, the parameters have no hooks.
        if options.averages_gradients:
            self._hooks.attach(self._views)
        else:
            self._plan.extend(self._plan.split([view for view in self._views if view.bucket is None]))

    def _may_overlap(self, *, is_on_host: bool) -> bool:
        # Ranks may decide differently, as the cores that they may use differ: only the order of buckets must be equal.
        uses_cores = self.comm.backend in ("shm", "threads") and is_on_host
        return not uses_cores or usable_cores() >= 2 * self.comm.world_size

    def close(self) -> None:
        """Remove the hooks from the parameters: backward is as before. Buckets live as long as gradients in them.

        Not collective. Closing the communicator does it, too. May be called more than once.
        """
        self._closed = True
        self.comm.dependents.discard(self)
        self._hooks.remove()
        self._plan.clear()

    def raise_if_closed(self) -> None:
        """Raise if this reducer or its communicator has been closed. Not collective."""
        if self._closed:
            self.comm.raise_if_closed()
            raise InvalidArgumentError("this reducer has been closed: it averages no gradients any more")

    # Properties

    @property
    def bucket_bytes(self) -> int:
        """The size to which buckets come near."""
        return self._options.bucket_bytes

    @property
    def buckets(self) -> list[list[str]]:
        """The names in each bucket, in the order in which buckets are reduced. Not collective."""
        return self._plan.names()

    @property
    def bucket_nbytes(self) -> list[int]:
        """The size of each bucket, padding included. Not collective."""
        return [bucket.flat.nbytes for bucket in self._plan.buckets]

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The parameters by name. Not collective."""
        return {view.name: view.param for view in self._views}

    def spans(self, flat: torch.Tensor) -> list[tuple[str, int]]:
        """Return the name and number of elements of each parameter in the bucket `flat`, in order.

        Not collective. Padding may follow the last one. `flat` is what `communicate` was given.
        """
        return [(view.name, view.shape.numel()) for view in self._plan.bucket_of(flat).views]

    # Arrival

    def watch(self, ended: Callable[[], None]) -> None:
        """Call the method `ended` at the end of each backward that touches a parameter.

        Not collective. The method's object is referred to weakly.
        """
        self._hooks.watch(ended)

    def add(self, tensor: torch.Tensor) -> None:
        """Record that the parameter `tensor` has a gradient, as the hooks do for gradients of autograd.

        Not collective, but all ranks must come to `finalize`.

        Raises:
            InvalidArgumentError: `tensor` is no parameter of this reducer, or it has no gradient.
        """
        index = self._index.get(id(tensor))
        if index is None or not self._options.averages_gradients or tensor.grad is None:
            why = "it is no parameter of this reducer" if index is None else "it has none"
            raise InvalidArgumentError(f"a tensor of shape {list(tensor.shape)} has no gradient to reduce here: {why}")
        self._gradient_accumulated(index)

    def _gradient_accumulated(self, index: int) -> None:
        view = self._views[index]
        if self._arrival.record(view, counts=self.eager):
            self._averager.gradient_ready(view)

    # Averaging

    def finalize(self) -> None:
        """Make gradients the averages over ranks; what arrives from now on belongs to the next step.

        Collective. Blocks until all ranks have called and all buckets are reduced.

        Raises:
            MismatchError: ranks are in different steps or reduce different parameters.
            PeerError: another rank has failed.
        """
        self.raise_if_closed()
        self.reduce()
        self.end_step()

    def discard(self) -> None:
        """Discard what arrived; blocks until what was sent is reduced.

        Not collective, but all ranks must call it. If only this rank has failed, reductions that were sent fail, too.
        Their errors are not raised here, as the first failure is raised elsewhere.
        """
        # A reduction under way still writes into its bucket, which the next step would use.
        for bucket in self._plan.buckets:
            with contextlib.suppress(StateExchangeError):
                bucket.wait()
        self._begin_round()
        self.end_step()

    def end_step(self) -> None:
        """Count all gradients as missing until they arrive again. Not collective."""
        self._arrival.end_step()
        self._hooks.forget_backward()

    def reduce(self, *, weight: float | None = None, step: int | None = None, done: bool = False) -> list[int]:
        """Average what has arrived, without ending the step.

        Collective. For callers that average more than once in a step, or between ranks of different weights.

        Args:
            weight: this rank's weight: the result is the sum of weight times gradient, divided by the sum of weights.
                A rank of weight 0 counts as if nothing had arrived there. If all ranks have weight 0, every gradient
                becomes None. Weights other than 1 need ``overlap=False``.
            step: a number that is compared between ranks that are not `done`; None compares the number of rounds.
            done: take part with weight 0, without gradients of this rank.

        Returns:
            The ranks that are not done.

        Raises:
            InvalidArgumentError: the weight is invalid, or these options allow none.
            MismatchError: ranks are in different steps or reduce different parameters.
        """
        self._hooks.forget_backward()
        try:
            with torch.no_grad():
                share = 0.0 if done else self._checked_weight(weight)
                if step is None:
                    step = self._rounds
                return self._averager.average(step, share, is_done=done)
        finally:
            # After an error, too: where all ranks have raised it, they go on with equal numbers.
            self._rounds += 1
            self._begin_round()

    def _begin_round(self) -> None:
        self._arrival.begin_round()
        self._averager.begin_round()
        self._plan.begin_round()

    def _checked_weight(self, weight: float | None) -> float:
        if weight is None:
            return 1.0
        with self.comm.checking("finalize"):
            if not 0 <= weight < math.inf:
                raise InvalidArgumentError("a weight is a finite number, 0 or more", found=weight)
            if self._options.scale is not None or not self._options.averages_gradients:
                raise InvalidArgumentError("a weight is for averages of gradients, without scale", found=weight)
            if weight != 1 and not self._options.is_delayed:
                raise InvalidArgumentError("a weight needs overlap=False: what was sent has weight 1", found=weight)
        return weight


@public_call("average_gradients")
def average_gradients(module: Source, comm: CommLike | None = None) -> None:
    """Replace the gradients of `module` by their averages over ranks.

    Collective. Blocks until all ranks have called. It is one round of a BucketReducer: see there for gradients
    that are sparse, or missing on some ranks.

    Args:
        module: a module, or parameters with or without names, or a list of modules.
        comm: a Communicator, ProcessGroup, DeviceMesh or MPI communicator; by default the current one.

    Raises:
        MismatchError: parameters differ between ranks; the first that differs is named.
        UnsupportedError: a parameter is lazy, a meta tensor, or a DTensor that is not replicated.
        InvalidArgumentError: a parameter belongs to a reducer, which averages its gradient.

    Example:
        >>> import torch
        >>> import statexchange as sx
        >>> model = torch.nn.Linear(2, 1)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> sx.average_gradients(model)
        >>> model.weight.grad
        tensor([[4., 4.]])
    """
    reducer = BucketReducer(module, comm)
    try:
        # Its hooks have seen no backward: every gradient that is there counts as one that arrived.
        for parameter in reducer.parameters.values():
            if parameter.grad is not None:
                reducer.add(parameter)
        reducer.finalize()
    finally:
        reducer.close()
