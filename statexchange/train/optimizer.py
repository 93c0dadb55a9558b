"""Optimizers that step with the average of all ranks' gradients; the same for who keeps DDP, or wants one line."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future as ConcurrentFuture
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from statexchange.comm.calls import about, public_call
from statexchange.comm.communicator import Communicator
from statexchange.comm.defaults import as_communicator
from statexchange.errors import InvalidArgumentError
from statexchange.state.optimizers import parameters_of, placed_parameters
from statexchange.train.buckets import BucketReducer
from statexchange.train.declarations import compare_declarations, declare, local_part, named_parameters, shortened
from statexchange.train.reducers import CoalescingReducer, Reducer, average_sparse, densified, same_kind
from statexchange.train.synchronize import synchronize

__all__ = ["DistributedOptimizer", "as_comm_hook", "average_gradients"]

_PHASE = "averaging gradients"


class DistributedOptimizer(torch.optim.Optimizer):
    """`optimizer`, which steps with the average of all ranks' gradients; whatever else it has, this has too.

    Collective: all ranks construct it, over parameters of the same names, shapes and dtypes, and call backward and
    `step` equally often. Gradients are averages when backward returns, as with DDP, so that clipping and a GradScaler
    come after it as usual; on a rank whose backward touched no parameter they are when `finalize` or `step` returns,
    so if there may be such a rank, `finalize` before you clip. Parameters are not made equal here: `synchronize` the
    module and the optimizer first.

    A gradient that is missing on some ranks counts as zeros there; missing on all, it is None and the parameter is
    skipped. See BucketReducer. State, hyperparameters, `state_dict` and hooks are the inner optimizer's, so that
    checkpoints and LR schedulers do not see the difference. A closure's loss is averaged too, so that all ranks decide
    alike.

    Parameters
    ----------
    optimizer : any torch optimizer. One that was constructed with named parameters lends their names to messages.
    comm : what `comm=` means everywhere.
    module : the module, or list of modules, whose parameters the optimizer has; lends names too. An optimizer over
        other parameters is an InvalidArgumentError.
    reducer : a BucketReducer of all its parameters, made by the caller.
    accumulate : average after every `accumulate`-th backward; gradients are sums over them.
    weight : called for the weight of this rank when gradients are averaged, for the true mean over tokens: the sum of
        weight times gradient, divided by the sum of weights. Nothing is sent during backward then.
    settings : of the BucketReducer that is made otherwise. With `delay_reduce` backward leaves gradients as they are,
        and `finalize` or `step` averages; both take a `weight` then. `finalize` before you clip.
    """

    _step_supports_amp_scaling = False  # of a fused inner one: a GradScaler would set its scale here, not there

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        comm: Any = None,
        *,
        module: torch.nn.Module | list[torch.nn.Module] | None = None,
        reducer: BucketReducer | None = None,
        accumulate: int = 1,
        weight: Callable[[], float] | None = None,
        **settings: Any,
    ) -> None:
        # Not Optimizer.__init__, which would make state of its own: what is not found here is asked of the inner one.
        self._optimizer = optimizer
        self._comm = reducer.comm if isinstance(reducer, BucketReducer) else as_communicator(comm)
        self._module = module
        self._weight = weight
        self._accumulate = accumulate
        self._local = 0
        self._backwards = 0
        self._steps = 0
        self._averaged = False
        self._behind: int | None = None
        with self._comm.checking("DistributedOptimizer"):
            self._check(reducer, settings)
            named = self._named()
        self._automatic = not settings.get("delay_reduce", False)
        if weight is not None:
            settings["delay_reduce"] = True
        if reducer is None:
            reducer = BucketReducer(named, self._comm, **settings)
        else:
            self._automatic = not reducer.delay_reduce
        self._reducer = reducer
        self._reducer.watch(self._backward_ended)
        self._arm()

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def _check(self, reducer: BucketReducer | None, settings: Mapping[str, Any]) -> None:
        if not isinstance(self._optimizer, torch.optim.Optimizer):
            raise InvalidArgumentError(f"a torch optimizer is wanted, not {type(self._optimizer).__name__}")
        if not isinstance(self._accumulate, int) or self._accumulate < 1:
            raise InvalidArgumentError("accumulate must be a positive number of backwards", found=self._accumulate)
        if self._weight is not None and not callable(self._weight):
            raise InvalidArgumentError(f"weight is a function that returns this rank's weight, not {self._weight!r}")
        if reducer is None:
            BucketReducer.check_settings(settings)
            return
        if not isinstance(reducer, BucketReducer):
            raise InvalidArgumentError(f"reducer must be a BucketReducer, not {type(reducer).__name__}")
        if settings or self._weight is not None:
            given = next(iter(settings), "weight")
            raise InvalidArgumentError(f"{given} belongs to the reducer, which has been made already")
        self._module = None
        _check_known(self._optimizer, reducer.parameters, "the reducer")

    def _named(self) -> dict[str, torch.Tensor]:
        """The optimizer's parameters by the best names there are."""
        if self._module is None:
            return placed_parameters(self._optimizer)
        names = named_parameters(self._module)
        _check_known(self._optimizer, names, "the module")
        ours = set(map(id, parameters_of(self._optimizer)))
        return {name: parameter for name, parameter in names.items() if id(parameter) in ours}

    # What the inner optimizer is asked

    @property
    def reducer(self) -> BucketReducer:
        """What averages the gradients."""
        return self._reducer

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer that steps."""
        return self._optimizer

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's. Not collective."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inner optimizer's. Not collective."""
        self._optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, which are averaged from now on. Collective; nothing may be on its way."""
        with self._comm.checking("add_param_group"):
            self._optimizer.add_param_group(param_group)
            named = self._named()
        known = self._reducer.parameters
        ids = {id(parameter) for parameter in known.values()}
        new = {name: parameter for name, parameter in named.items() if id(parameter) not in ids}
        if new:
            self._reducer.reset({**known, **new})
            self._arm()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, also those that have not been averaged yet. Not collective, but all ranks do it alike."""
        self._reducer.discard()
        self._optimizer.zero_grad(set_to_none)
        self._begin()

    def close(self) -> None:
        """Let go of the parameters: backward is as before, and the inner optimizer steps alone. Not collective.

        The end of the communicator does it, too. Later calls of `finalize` and `step` raise. May be called again.
        """
        self._reducer.close()

    # Averaging

    def finalize(self, *, weight: float | None = None) -> None:
        """Gradients are averages when this returns; nothing is left to do if they are since the last backward.

        Collective on ranks where it is not so yet. `weight` is this rank's, see the class.
        """
        self._reducer.raise_if_closed()
        if self._local:
            raise InvalidArgumentError("gradients are not averaged inside no_sync(): leave the block first")
        if self._averaged:
            if weight is not None:
                raise InvalidArgumentError("gradients are averages already: a weight needs delay_reduce=True")
            return
        if weight is None and self._weight is not None:
            weight = self._weight()
        active = self._reducer.reduce(weight=weight, step=self._steps)
        self._note(active)
        self._averaged = True
        self._backwards = 0
        self._arm()

    def step(self, closure: Callable[[], Any] | None = None, *, weight: float | None = None) -> Any:
        """`finalize`, then the inner optimizer's step. Collective."""
        if self._local:
            raise InvalidArgumentError("step() inside no_sync() would step with this rank's gradients: leave the block")
        if closure is None:
            self.finalize(weight=weight)
            result = self._optimizer.step()
        else:
            result = self._optimizer.step(lambda: self._evaluate(closure, weight))
        self._steps += 1
        self._reducer.end_step()
        self._begin()
        return result

    def _evaluate(self, closure: Callable[[], Any], weight: float | None) -> Any:
        """The closure's loss, averaged as the gradients are."""
        self._averaged = False
        loss = closure()
        self.finalize(weight=weight)
        if loss is None:
            return None
        mean = torch.as_tensor(loss).detach().clone()
        self._comm.all_reduce(mean, "avg")
        return mean if isinstance(loss, torch.Tensor) else mean.item()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A block whose backwards add to this rank's gradients, and nothing is averaged. Not collective."""
        self._local += 1
        self._arm()
        try:
            yield
        finally:
            self._local -= 1
            self._arm()

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """A block in which ranks may make different numbers of steps. Collective; ends when all ranks are at its end.

        A rank that is at the end takes part in the others' averages with weight 0, so that these are exact means over
        the ranks that still have data. If it has missed steps, parameters, buffers of `module` and the optimizer's
        state become those of the lowest rank that took the last one; LR schedulers are the caller's.
        """
        self._behind = None
        yield
        while active := self._reducer.reduce(done=True):
            self._note(active)
        self.zero_grad()
        if self._behind is not None:
            module = self._named() if self._module is None else self._module
            synchronize([module, self._optimizer], root=self._behind, comm=self._comm)
        self._steps = 0  # from here on all ranks count alike again

    def _note(self, active: list[int]) -> None:
        """Some ranks may be done while others are `active`."""
        if len(active) < self._comm.world_size:
            self._behind = active[0]

    def _backward_ended(self) -> None:
        self._averaged = False
        if not self._local:
            self._backwards += 1
            if self._automatic and self._backwards >= self._accumulate:
                self.finalize()
        self._arm()

    def _begin(self) -> None:
        """A new step."""
        self._averaged = False
        self._backwards = 0
        self._arm()

    def _arm(self) -> None:
        """Let buckets go during the next backward if it is the one after which gradients are averaged."""
        self._reducer.eager = not self._local and self._backwards + 1 >= self._accumulate


def _check_known(optimizer: torch.optim.Optimizer, known: Mapping[str, torch.Tensor], whose: str) -> None:
    ids = {id(parameter) for parameter in known.values()}
    for name, parameter in placed_parameters(optimizer).items():
        if id(parameter) not in ids and (parameter.is_floating_point() or parameter.is_complex()):
            shape = f"{str(parameter.dtype)[6:]}{list(parameter.shape)}"
            raise InvalidArgumentError(f"the optimizer has a parameter {shape} that {whose} does not have", name=name)


@public_call("average_gradients")
def average_gradients(module: Any, comm: Any = None) -> None:
    """The gradients of `module` become their averages over ranks, in place, now.

    Collective. A gradient that is None on some ranks counts as zeros there; where it is None on all it stays so. Sparse
    ones come back coalesced. `module` is a module, or parameters, as for BucketReducer, which overlaps backward.
    """
    communicator = as_communicator(comm)
    with communicator.checking("average_gradients"):
        named = named_parameters(module)
        declared = declare(named)
    compare_declarations(communicator, declared, "average_gradients")
    with communicator.checking("average_gradients"):
        facts = [_fact(name, parameter.grad) for name, parameter in named.items()]
    answers = [
        json.loads(answer) for answer in communicator.all_gather_bytes(json.dumps(facts).encode(), operation=_PHASE)
    ]
    with torch.no_grad(), CoalescingReducer(communicator) as reducer:
        for i, (name, parameter) in enumerate(named.items()):
            _average_one(communicator, reducer, name, parameter, [answer[i] for answer in answers])


def _fact(name: str, grad: torch.Tensor | None) -> list[int] | None:
    """What the others must know of a gradient: nothing if there is none, its entries if it is sparse."""
    if grad is None:
        return None
    local = local_part(grad, name)
    if local.layout != torch.sparse_coo:
        return []
    coalesced = local.coalesce()
    return [coalesced._nnz(), coalesced.sparse_dim()]  # noqa: SLF001 (torch has no other name for it)


def _average_one(
    comm: Communicator, reducer: Reducer, name: str, parameter: torch.Tensor, facts: list[list[int] | None]
) -> None:
    """Average a gradient of which `facts` tell, by rank."""
    there = [fact for fact in facts if fact is not None]
    if not there:
        return
    grad = parameter.grad
    if all(there) and same_kind(there):
        parameter.grad = average_sparse(comm, parameter, grad, facts)
        return
    if grad is None:
        grad = parameter.grad = torch.zeros_like(parameter, requires_grad=False)
    elif grad.layout != torch.strided:
        grad = parameter.grad = densified(grad)
    reducer.add(local_part(grad, name))


Hook = Callable[[Any, Any], "torch.futures.Future[torch.Tensor]"]


def as_comm_hook(reducer: Any = None) -> Hook:
    """A communication hook for torch DDP: ``ddp.register_comm_hook(None, sx.train.as_comm_hook(reducer))``.

    Collective where the communicator has to be made. `reducer` is a Reducer, whose `add` and `finalize` every bucket of
    DDP goes through, or what `comm=` means everywhere: then buckets are averaged while backward goes on. What goes
    wrong is raised by backward: PeerError if a rank has failed, MismatchError if ranks meet in different calls.
    """
    if isinstance(reducer, BucketReducer):
        raise InvalidArgumentError("DDP makes buckets of its own: give a communicator, or another reducer")
    if isinstance(reducer, Reducer):
        return _inline_hook(reducer)
    return _overlapping_hook(as_communicator(reducer))


def _inline_hook(reducer: Reducer) -> Hook:
    def hook(_: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        flat: torch.Tensor = bucket.buffer()
        reducer.add(flat)
        reducer.finalize()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(flat)
        return future

    return _bare(hook)


def _overlapping_hook(comm: Communicator) -> Hook:
    waiting = ThreadPoolExecutor(1, "statexchange comm hook")
    caller = comm.caller

    def hook(_: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        flat: torch.Tensor = bucket.buffer()
        with comm.called_by(caller), about(lambda: _name_of(bucket)):
            work = comm.all_reduce(flat, "avg", async_op=True)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

        def settle() -> None:
            try:
                work.wait()
            finally:
                future.set_result(flat)

        _raise_after_backward(waiting.submit(settle))
        return future

    return _bare(hook)


def _name_of(bucket: Any) -> str:
    """A bucket of DDP, which knows parameters but not their names."""
    shapes = shortened([str(list(parameter.shape)) for parameter in bucket.parameters()])
    return f"bucket {bucket.index()} of DDP: parameters of shapes {shapes}"


def _raise_after_backward(settled: ConcurrentFuture[None]) -> None:
    """Have the running backward raise what `settled` holds, when DDP has finished its own work.

    An exception in the future of a bucket would lose its type: DDP casts it to a tensor. One that is raised before DDP
    has finished would leave it unusable, although all ranks may go on after a mismatch. Callbacks run in their order,
    and DDP queues its own after those of its hooks: so this one queues another.
    """
    if torch._C._current_graph_task_id() < 0:  # noqa: SLF001 (torch's `join` runs hooks outside backward)
        settled.result()
        return
    queue = torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001 (torch has no other way)
    queue(lambda: queue(settled.result))


def _bare(hook: Hook) -> Hook:
    """`hook` without annotations: DDP takes none as texts, and compares them with its own types."""
    hook.__annotations__ = {}
    return hook
