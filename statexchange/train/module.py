"""DistributedModule and data_parallel: train a module on many ranks, by an algorithm that can be switched.

Each optimizer of the module synchronises by the algorithm (`AlgorithmOptimizer`). The tuner tries bucket sizes, with
and without the hierarchy, during training, and keeps the fastest.
"""

from __future__ import annotations

import contextlib
import copy
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn

from statexchange.comm.communicator import CommLike, Communicator, from_root
from statexchange.comm.defaults import as_communicator, public_call
from statexchange.errors import InvalidArgumentError
from statexchange.train.algorithms import Algorithm, GradientAllReduce, Run, as_algorithm
from statexchange.train.buckets.options import TrainingOptions, check_names
from statexchange.train.comparison import compare
from statexchange.train.optimizer import DistributedOptimizer, Loss
from statexchange.train.synchronize import allreduce_parameters, broadcast_parameters

if TYPE_CHECKING:
    from typing import Unpack

_PHASE = "switching the algorithm"
_SET_BY_ALGORITHM = ("bucket_type", "communicate", "scale")
_MAX_STEP_TIMES = 1 << 12  # kept at most: without a tuner nobody takes them away
_LEAST_POWER, _MOST_POWER = 10, 31  # of two: buckets of 1 KiB to 2 GiB


@dataclass(frozen=True, slots=True)
class Setting:
    """The approximate size of buckets, and whether ranks of several hosts reduce within each host first."""

    bucket_bytes: int
    hierarchical: bool = False


@dataclass(frozen=True, slots=True)
class Trial:
    """The time of a step with one setting: the median on the slowest rank, in seconds."""

    bucket_bytes: int
    buckets: int
    step_s: float
    hierarchical: bool


class Tuner:
    """Propose settings, one after each measurement, and the fastest when all were tried.

    The order: `present`; with `both`, the same with `hierarchical` negated; then, with the faster of these, powers of
    two around the present size.
    """

    def __init__(self, present: Setting, *, both: bool = False) -> None:
        power = round(math.log2(present.bucket_bytes))
        self._sizes = []
        for near in (power - 1, power + 1, power - 2, power + 2):
            if _LEAST_POWER <= near <= _MOST_POWER and 2**near != present.bucket_bytes:
                self._sizes.append(2**near)
        self._step_s: dict[Setting, float] = {}
        self._untried = [present]
        if both:
            self._untried.append(replace(present, hierarchical=not present.hierarchical))

    def propose(self, used: Setting, step_s: float) -> Setting:
        """Return what to use next, after a step took `step_s` with the setting `used`; at the end the fastest."""
        if self._untried:
            self._step_s[used] = step_s
            self._untried = [setting for setting in self._untried if setting not in self._step_s]
        fastest = min(self._step_s, key=self._step_s.__getitem__)
        if not self._untried:
            self._untried = [replace(fastest, bucket_bytes=size) for size in self._sizes]
            self._sizes = []
        return self._untried[0] if self._untried else fastest


class AlgorithmOptimizer(DistributedOptimizer):
    """A DistributedOptimizer that synchronises by an algorithm; `data_parallel` makes it.

    Collective: all ranks construct it and call `step` equally often. `step` synchronises as the algorithm says, then
    steps. Parameters that the module ignores are stepped with this rank's own gradients.

    Args:
        optimizer: any torch optimizer.
        module: the module whose parameters the optimizer has.
        algorithm: how ranks synchronise.
        comm: a communicator.
        is_alone: whether this is the module's only optimizer.
        after_step: called at the end of each step.
        settings: options of DistributedOptimizer and BucketReducer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        module: nn.Module,
        algorithm: Algorithm,
        comm: Communicator,
        *,
        is_alone: bool,
        after_step: Callable[[], None],
        **settings: Unpack[TrainingOptions],
    ) -> None:
        self._is_alone = is_alone
        self._after_step = after_step
        self.algorithm = algorithm
        """The present algorithm; `switch_to` of the module takes another one."""
        self._whole_comm = comm
        self._run = Run(algorithm.over(comm))
        super().__init__(
            optimizer,
            self._run.comm,
            module=module,
            init_sync=False,  # `data_parallel` has given all ranks root's parameters
            bucket_type=algorithm.bucket_type,
            communicate=algorithm.collective(self._run),
            **settings,
        )
        # Only now: the reducer takes the algorithm's function when it is made, and the function uses the run.
        self._run.reducer = self.reducer

    def _named(self) -> dict[str, torch.Tensor]:
        ignored = getattr(self._module, "_ddp_params_and_buffers_to_ignore", ())
        return {name: parameter for name, parameter in super()._named().items() if name not in ignored}

    @property
    def setting(self) -> Setting:
        """The bucket size and hierarchy, which the tuner may change. Not collective."""
        return Setting(self.reducer.bucket_bytes, hierarchical=self._run.comm is not self._whole_comm.flat)

    # Steps

    def finalize(self) -> None:
        """Average gradients; with an algorithm that averages weights, average these if it is due in this step.

        Collective. See `DistributedOptimizer.finalize`.
        """
        self.reducer.raise_if_closed()
        if self._no_sync_depth or self.algorithm.is_due(self._steps):
            super().finalize()

    def step(self, closure: Callable[[], Loss] | None = None) -> Loss:
        """Synchronise, then let the inner optimizer step. Collective."""
        if self.algorithm.bucket_type == "weight":
            # Weights are averaged before the gradients are used, and with a closure before these are made.
            self.finalize()
            result = self.inner.step(closure)
            self._steps += 1
            self._is_averaged = False
        else:
            result = super().step(closure)
        self._after_step()
        return result

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Enter a block in which ranks may make different numbers of steps; see `DistributedOptimizer.join`.

        Collective.

        Raises:
            InvalidArgumentError: several optimizers train the module.
        """
        with self._comm.checking("join"):
            if not self._is_alone:
                raise InvalidArgumentError(
                    "join() is for one optimizer: with several, ranks would wait in different ones"
                )
        with super().join():
            yield

    # Switching

    def accept(self, algorithm: Algorithm | str) -> Algorithm:
        """Return the Algorithm; raise on all ranks unless all chose it and it allows `weight`. Collective."""
        chosen = as_algorithm(algorithm)
        compare(self._comm, f"algorithm={chosen}")
        _check_weight(chosen, is_weighted=self._weight is not None)
        return chosen

    def switch_to(self, algorithm: Algorithm) -> None:
        """Discard gradients and synchronise by `algorithm` from now on. Collective."""
        self.zero_grad()  # their buckets go
        run = Run(algorithm.over(self._whole_comm))
        self.reducer.reset(comm=run.comm, bucket_type=algorithm.bucket_type, communicate=algorithm.collective(run))
        run.reducer = self.reducer
        self._run = run
        self.algorithm = algorithm
        # The algorithm's steps count from the switch.
        self._steps = 0
        self._is_averaged = False

    def new_tuner(self) -> Tuner:
        """Return a tuner that begins with the present setting. Not collective."""
        has_hierarchy = self._whole_comm.flat is not self._whole_comm
        return Tuner(self.setting, both=self.algorithm.hierarchical is None and has_hierarchy)

    def use(self, setting: Setting) -> None:
        """Apply the bucket size and the hierarchy of a setting. Collective, between steps."""
        self._run.comm = self._whole_comm
        if not setting.hierarchical:
            self._run.comm = self._whole_comm.flat
        self.reducer.reset(comm=self._run.comm, bucket_bytes=setting.bucket_bytes)

    def average_state(self) -> None:
        """Average every floating tensor of the inner optimizer's state over all ranks. Collective.

        Raises:
            MismatchError: ranks have state of different parameters.
        """
        # As buffers of a module, which ranks compare by name, dtype and shape before they average.
        state = nn.Module()
        for name, parameter in self._named().items():
            for key, value in self.inner.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    state.register_buffer(f"{name}.{key}".replace(".", "/"), value)  # torch allows no dots
        allreduce_parameters(state, comm=self._comm)


def _check_weight(algorithm: Algorithm, *, is_weighted: bool) -> None:
    """Raise InvalidArgumentError if gradients are weighted and the algorithm averages none. Not collective."""
    if is_weighted and algorithm.bucket_type == "weight":
        raise InvalidArgumentError(f"weight= weights gradients, and {algorithm.name!r} averages none")


class DistributedModule(nn.Module):
    """Wrap `module` for training on many ranks; `data_parallel` makes the wrapper and wraps the optimizer, too.

    Not collective, unless a communicator has to be made. Names, `state_dict` and other attributes are `module`'s.

    Parameters and buffers whose names `module` has in torch's `_ddp_params_and_buffers_to_ignore` stay this rank's own:
    they are not broadcast, averaged or reduced.

    Args:
        module: the module.
        comm: a Communicator, ProcessGroup, DeviceMesh or MPI communicator; by default the current one.

    Example:
        >>> import torch
        >>> import statexchange as sx
        >>> wrapped = sx.train.DistributedModule(torch.nn.Linear(2, 1))
        >>> sorted(wrapped.state_dict())
        ['bias', 'weight']
        >>> wrapped.in_features
        2
    """

    def __init__(self, module: nn.Module, comm: CommLike | None = None) -> None:
        super().__init__()
        with public_call("DistributedModule"):
            self._comm = as_communicator(comm)
        self.module = module
        self.training = module.training  # nn.Module begins in train mode
        self.tuning_history: list[Trial] = []
        """The time of a step with each setting that was tried, one entry for each run of the tuner."""
        self._optimizers: list[AlgorithmOptimizer] = []
        self._tuner: Tuner | None = None
        self._tune_every: int | None = None
        self._is_tuning_due = False
        self._num_forwards = 0
        self._last_forward_s: float | None = None
        self._step_times: deque[float] = deque(maxlen=_MAX_STEP_TIMES)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedModule:
        """Copy the module; the copy has the same communicator and no optimizer. AveragedModel calls this."""
        # The optimizers step the parameters of the original, and their hooks are on these.
        return DistributedModule(copy.deepcopy(self.module, memo), self._comm)

    # The module

    def unwrap(self) -> nn.Module:
        """Return the inner module. Not collective."""
        return self.module

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (the inner module's result)
        """Call the inner module; in train mode the time between two calls counts as a step's. Not collective."""
        if self.module.training:
            self._count_forward()
        else:
            self._last_forward_s = None  # the time of an evaluation is no step's
        return self.module(*args, **kwargs)

    def _count_forward(self) -> None:
        """Count a forward in train mode, and the time since the one before as a step."""
        now = time.perf_counter()
        if self._last_forward_s is not None:
            self._step_times.append(now - self._last_forward_s)
        self._last_forward_s = now
        self._num_forwards += 1
        if self._tune_every is not None and self._num_forwards % self._tune_every == 0:
            self._is_tuning_due = True

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (as torch: of the type of `destination`)
        """Return the inner module's state dict. Not collective."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (the inner module's result)
        """Load a state dict into the inner module. Not collective, but all ranks must load alike."""
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the inner module's parameters by its names. Not collective."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the inner module's buffers by its names. Not collective."""
        return self.module.named_buffers(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (any attribute of the inner module)
        # First as nn.Module does, which keeps submodules, `module` among them, out of the instance's attributes.
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # before it is set, as in a copy that is being made, this would recurse
                raise
            return getattr(self.module, name)

    # The algorithm

    @property
    def algorithm(self) -> Algorithm:
        """The present algorithm."""
        return self._trained()[0].algorithm

    def _trained(self) -> list[AlgorithmOptimizer]:
        """Return the optimizers, at least one; they have one algorithm and one setting."""
        if not self._optimizers:
            raise InvalidArgumentError("this module has no optimizer: data_parallel(module, optimizer) gives it one")
        return self._optimizers

    def switch_to(self, algorithm: Algorithm | str) -> DistributedModule:
        """Synchronise by another algorithm from the next step on.

        Collective, between steps: gradients that no step has used are discarded. Parameters and floating buffers are
        averaged; integer buffers become rank 0's. The optimizer keeps its state; after Decentralized, whose ranks
        diverge, it is averaged too.

        Args:
            algorithm: an Algorithm, or the name of one.

        Returns:
            This module.

        Raises:
            MismatchError: ranks chose different algorithms.
            InvalidArgumentError: there is no such algorithm, or this module has no optimizer.
        """
        optimizers = self._trained()
        with self._comm.phase(_PHASE):
            chosen = optimizers[0].accept(algorithm)
            allreduce_parameters(self, comm=self._comm)
            # Only after an algorithm whose ranks diverge: equal gradients keep equal states equal.
            for optimizer in optimizers:
                if optimizer.algorithm.bucket_type == "weight":
                    optimizer.average_state()
                optimizer.switch_to(chosen)
        # What was measured is the other algorithm's.
        self._tuner = optimizers[0].new_tuner()
        self._step_times.clear()
        return self

    def train_with(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        algorithm: Algorithm,
        tune_every: int | None,
        **settings: Unpack[TrainingOptions],
    ) -> list[AlgorithmOptimizer]:
        """Wrap the optimizers of this module, for `data_parallel`. Collective.

        Args:
            optimizers: one or more optimizers that share no parameter.
            algorithm: how they synchronise.
            tune_every: the number of forwards between two runs of the tuner; None for no runs but the caller's.
            settings: options of DistributedOptimizer and BucketReducer.

        Returns:
            The wrapped optimizers.
        """
        # Not by a loop: if a later one is refused, a list of this frame would live on in the error's traceback, and the
        # reducers in it would keep the parameters from a second attempt.
        self._optimizers = [
            AlgorithmOptimizer(
                optimizer,
                self,
                algorithm,
                self._comm,
                is_alone=len(optimizers) == 1,
                after_step=self._after_step,
                **settings,
            )
            for optimizer in optimizers
        ]
        self._tune_every = tune_every
        self._tuner = self._optimizers[0].new_tuner()
        return self._optimizers

    # Tuning

    def report_metrics(self, step_s: Sequence[float]) -> None:
        """Replace the step times measured with the present setting by `step_s`, in seconds. Not collective."""
        self._step_times = deque(step_s, maxlen=_MAX_STEP_TIMES)

    def ask_and_update_hyperparameters(self) -> bool:
        """Let rank 0 choose bucket size and hierarchy by the step times of all ranks.

        Collective, between steps. The time of a step is the median on the slowest rank, between forwards in train mode
        or as reported; `tuning_history` keeps it. Each call tries one setting: first the present one; then, over a
        hierarchical communicator and unless the algorithm decides it, the same with the hierarchy turned on or off;
        then powers of two around the present size. When all are tried, the fastest stays.

        Returns:
            Whether the setting changed. False as long as nothing was measured, and with an algorithm that averages
            weights.
        """
        optimizers = self._trained()
        first = optimizers[0]
        median = None
        if self._step_times:
            median = statistics.median(self._step_times)
        self._step_times.clear()
        self._is_tuning_due = False
        medians = [value for value in self._comm.all_gather_object(median) if value is not None]
        if not medians or first.algorithm.bucket_type == "weight":
            return False
        present = first.setting
        num_buckets = sum(len(optimizer.reducer.buckets) for optimizer in optimizers)
        self.tuning_history.append(Trial(present.bucket_bytes, num_buckets, max(medians), present.hierarchical))
        assert self._tuner is not None
        # The other ranks give what they use, which is not read: rank 0 alone decides.
        proposed = self._tuner.propose(present, max(medians)) if self._comm.rank == 0 else present
        chosen = from_root(self._comm, proposed, Setting, "the tuner's setting")
        if chosen == present:
            return False
        for optimizer in optimizers:
            optimizer.use(chosen)
        self._last_forward_s = None  # the first step with new buckets also makes them
        return True

    def _after_step(self) -> None:
        """Run the tuner if it is due: between a forward and its step, buckets cannot change. Collective then."""
        if self._is_tuning_due:
            self.ask_and_update_hyperparameters()


@overload
def data_parallel(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    algorithm: Algorithm | str = ...,
    comm: CommLike | None = ...,
    *,
    root: int = ...,
    broadcast_buffers: bool = ...,
    tune_every: int | None = ...,
    **settings: Unpack[TrainingOptions],
) -> tuple[DistributedModule, AlgorithmOptimizer]: ...
@overload
def data_parallel(
    module: nn.Module,
    optimizer: Sequence[torch.optim.Optimizer],
    algorithm: Algorithm | str = ...,
    comm: CommLike | None = ...,
    *,
    root: int = ...,
    broadcast_buffers: bool = ...,
    tune_every: int | None = ...,
    **settings: Unpack[TrainingOptions],
) -> tuple[DistributedModule, list[AlgorithmOptimizer]]: ...


@public_call("data_parallel")
def data_parallel(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    algorithm: Algorithm | str = GradientAllReduce(),  # noqa: B008 (a value)
    comm: CommLike | None = None,
    *,
    root: int = 0,
    broadcast_buffers: bool = True,
    tune_every: int | None = None,
    **settings: Unpack[TrainingOptions],
) -> tuple[DistributedModule, AlgorithmOptimizer | list[AlgorithmOptimizer]]:
    """Prepare a module and its optimizer for training on all ranks; use the returned pair in their place.

    Collective: all ranks call it, with modules of the same parameters. Blocks until all ranks have root's
    parameters and buffers. The optimizer's state stays each rank's own: if root resumes, call
    ``synchronize(optimizer)`` before. The shape of the call is that of Bagua's `bagua_init`.

    Args:
        module: the module.
        optimizer: an optimizer, or a list of optimizers that share no parameter. Each averages and steps its own
            parameters, so one may step more often than another; all ranks step them in the same order.
        algorithm: an Algorithm, or "allreduce", "sg-allreduce", "quantize" or "decentralize". `switch_to` of the
            returned module takes another one later.
        comm: a Communicator, ProcessGroup, DeviceMesh or MPI communicator; by default the current one.
        root: the rank whose parameters and buffers all ranks begin with.
        broadcast_buffers: whether buffers become root's, too; otherwise they stay each rank's own until `switch_to`
            averages them.
        tune_every: let the tuner choose bucket size and hierarchy after each `tune_every`-th forward in train mode, at
            the end of its step. All ranks must then make equally many forwards. Not for use with `join` or several
            optimizers.
        settings: `weight` of DistributedOptimizer, and options of BucketReducer, such as `bucket_bytes`.

    Returns:
        The wrapped module, and the wrapped optimizer or a list of them.

    Raises:
        InvalidArgumentError: an argument is invalid.
        MismatchError: ranks chose different algorithms, or their modules differ.

    Example:
        >>> import torch
        >>> import statexchange as sx
        >>> model = torch.nn.Linear(2, 1)
        >>> model, optimizer = sx.train.data_parallel(model, torch.optim.SGD(model.parameters(), lr=0.1), "allreduce")
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
        >>> model.switch_to("decentralize").algorithm.name
        'decentralize'
        >>> optimizer.close()
    """
    communicator = as_communicator(comm)
    with communicator.phase("wrapping the module"):
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        with communicator.checking("data_parallel"):
            chosen = as_algorithm(algorithm)
            _check_arguments(module, optimizers, settings, tune_every)
            _check_weight(chosen, is_weighted=settings.get("weight") is not None)
        # Before anything is sent: ranks with different algorithms would wait for each other in different calls.
        compare(communicator, f"algorithm={chosen}")
        wrapped = DistributedModule(module, communicator)
        broadcast_parameters(wrapped, broadcast_buffers=broadcast_buffers, root=root, comm=communicator)
        trained = wrapped.train_with(optimizers, chosen, tune_every, **settings)
    if optimizers is optimizer:
        return wrapped, trained
    return wrapped, trained[0]


def _check_arguments(module: object, optimizers: object, settings: Mapping[str, object], tune_every: object) -> None:
    if not isinstance(module, nn.Module):
        raise InvalidArgumentError(f"expected a module, not {type(module).__name__}")
    if not isinstance(optimizers, (list, tuple)) or not optimizers:
        raise InvalidArgumentError(f"expected an optimizer or a list of them, not {optimizers!r}")
    for name in _SET_BY_ALGORITHM:
        if name in settings:
            raise InvalidArgumentError(f"{name} is set by the algorithm, and cannot be given")
    check_names(settings, "weight")
    if tune_every is None:
        return
    if not isinstance(tune_every, int) or tune_every < 1:
        raise InvalidArgumentError("tune_every must be a positive number of forwards", found=tune_every)
    if len(optimizers) > 1:
        raise InvalidArgumentError("tune_every is for one optimizer: between steps of several, gradients would be lost")
