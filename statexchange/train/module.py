"""A module and its optimizer on all ranks: wrapped in one line, and the algorithm can be switched while training."""

from __future__ import annotations

import contextlib
import copy
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from torch import nn

from statexchange.comm.calls import public_call
from statexchange.comm.communicator import Communicator
from statexchange.comm.defaults import as_communicator
from statexchange.errors import InvalidArgumentError, MismatchError
from statexchange.state.content import tensors_of
from statexchange.train.algorithms import Algorithm, GradientAllReduce, Run, as_algorithm
from statexchange.train.buckets import BucketReducer
from statexchange.train.optimizer import DistributedOptimizer
from statexchange.train.synchronize import allreduce_parameters, broadcast_parameters
from statexchange.train.tuner import Setting, Trial, Tuner

__all__ = ["AlgorithmOptimizer", "DistributedModule", "data_parallel"]

_PHASE = "switching the algorithm"
_REMEMBERED = 1 << 12  # step times, the last ones
_ALGORITHMS_OWN = ("bucket_type", "chunking", "communicate", "reducer", "scale")
_TORCHS = "_ddp_params_and_buffers_to_ignore"


class DistributedModule(nn.Module):
    """`module`, with what training it on many ranks needs beside it; names and `state_dict` are those of `module`.

    Not collective; `data_parallel` makes one that is trained. Whatever else `module` has, this has too.

    The attribute `statexchange_ignore` of `module`, a collection of names of its parameters and buffers, keeps these
    this rank's own: they are not broadcast, averaged or reduced. It replaces both lists of Bagua; torch's
    `_ddp_params_and_buffers_to_ignore` is honoured too.
    """

    def __init__(self, module: nn.Module, comm: Any = None) -> None:
        super().__init__()
        self._comm = as_communicator(comm)
        _check_ignored(module)
        self.module = module
        self.training = module.training
        self._trained: list[AlgorithmOptimizer] = []
        self._tuner: Tuner | None = None
        self._tune_every: int | None = None
        self._due = False
        self._forwards = 0
        self._last: float | None = None
        self._times: deque[float] = deque(maxlen=_REMEMBERED)
        self.tuning_history: list[Trial] = []
        """What steps took with each setting, one entry for each time the tuner was asked."""

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedModule:
        """A copy of the module on the same communicator, which nothing trains yet: as an average wants it."""
        return DistributedModule(copy.deepcopy(self.module, memo), self._comm)

    # The module

    def unwrap(self) -> nn.Module:
        """The inner module. Not collective."""
        return self.module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The inner module's; in train mode it is counted. Not collective."""
        if self.module.training:
            self._count()
        else:
            self._last = None
        return self.module(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The inner module's. Not collective."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The inner module's. Not collective, but all ranks must load alike."""
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The inner module's. Not collective."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The inner module's. Not collective."""
        return self.module.named_buffers(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> set[str]:
        """All names that stay this rank's own, under the name by which torch and `synchronize` ask for them."""
        return set().union(*(getattr(self.module, name, ()) for name in ("statexchange_ignore", _TORCHS)))

    # The algorithm

    @property
    def algorithm(self) -> Algorithm:
        """The present algorithm."""
        return self._optimizers()[0].algorithm

    def _optimizers(self) -> list[AlgorithmOptimizer]:
        """Those that train this module, all by one algorithm and with one setting."""
        if not self._trained:
            raise InvalidArgumentError("this module has no optimizer: data_parallel(module, optimizer) gives it one")
        return self._trained

    def _train_with(self, optimizers: list[AlgorithmOptimizer], tune_every: int | None) -> None:
        self._trained = optimizers
        self._tune_every = tune_every
        self._tuner = optimizers[0].new_tuner()

    def switch_to(self, algorithm: Algorithm | str) -> DistributedModule:
        """Synchronise by another algorithm from the next step on; returns this module.

        Collective, between steps: gradients that no step has used are forgotten. All ranks must choose alike, else all
        raise MismatchError. Parameters and floating buffers are averaged, integer ones come from rank 0. The
        optimizer keeps its state; what ranks have let drift apart with Decentralized is averaged too.
        """
        optimizers = self._optimizers()
        with self._comm.phase(_PHASE):
            chosen = optimizers[0].accept(algorithm)
            allreduce_parameters(self, comm=self._comm)
            for optimizer in optimizers:
                if optimizer.algorithm.averages_weights:
                    optimizer.average_state()
                optimizer.switch_to(chosen)
        self._tuner = optimizers[0].new_tuner()
        self._times.clear()
        return self

    # Tuning

    def report_metrics(self, step_s: Sequence[float]) -> None:
        """What steps took with the present settings, in seconds, in place of what was measured. Not collective."""
        self._times = deque(step_s, maxlen=_REMEMBERED)

    def ask_and_update_hyperparameters(self) -> bool:
        """Let rank 0 choose bucket size and hierarchy by the step times of all ranks; True if they change.

        Collective, between steps. The time of a step is the median on the slowest rank, between training forwards or
        as reported; `tuning_history` keeps it. The present setting is tried first; then, over a hierarchical
        communicator and unless the algorithm says which, the same without the hierarchy; then powers of two around the
        present size, one at each call; when all are tried the fastest stays. False as long as nothing was measured, and
        with an algorithm that averages weights.
        """
        optimizers = self._optimizers()
        optimizer = optimizers[0]
        median = statistics.median(self._times) if self._times else None
        self._times.clear()
        self._due = False
        medians = [value for value in self._comm.all_gather_object(median) if value is not None]
        if not medians or optimizer.algorithm.averages_weights:
            return False
        present, buckets = optimizer.setting, sum(len(one.reducer.buckets) for one in optimizers)
        self.tuning_history.append(Trial(present.bucket_bytes, buckets, max(medians), present.hierarchical))
        assert self._tuner is not None
        proposed = self._tuner.propose(present, max(medians)) if self._comm.rank == 0 else present
        chosen = Setting(*self._comm.broadcast_object([proposed.bucket_bytes, proposed.hierarchical]))
        if chosen == present:
            return False
        for one in optimizers:
            one.use(chosen)
        self._last = None  # the first step with new buckets has to make them
        return True

    def _stepped(self) -> None:
        """The optimizer has made a step: ask the tuner if it is time. Collective then."""
        if self._due:
            self.ask_and_update_hyperparameters()

    def _count(self) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self._times.append(now - self._last)
        self._last = now
        self._forwards += 1
        if self._tune_every is not None and self._forwards % self._tune_every == 0:
            self._due = True


def _check_ignored(module: nn.Module) -> None:
    ignored: Collection[str] = getattr(module, "statexchange_ignore", ())
    unknown = {ignored} if isinstance(ignored, str) else set(ignored) - tensors_of(module).keys()
    if unknown:
        raise InvalidArgumentError(
            f"statexchange_ignore is a collection of names of parameters and buffers, not {min(unknown)!r}"
        )


class AlgorithmOptimizer(DistributedOptimizer):
    """A DistributedOptimizer whose ranks keep in step by an algorithm that can be switched; `data_parallel` makes it.

    Collective. `step` synchronises as the algorithm says, then steps. Parameters that the module ignores are stepped
    with this rank's own gradients. `settings` are those of DistributedOptimizer and BucketReducer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        module: DistributedModule,
        algorithm: Algorithm,
        comm: Communicator,
        *,
        bucket_bytes: int,
        **settings: Any,
    ) -> None:
        self._wrapped = module
        self._bucket_bytes = bucket_bytes
        self._algorithm = algorithm
        self._whole = comm
        self._run = Run(algorithm.over(comm))
        settings.update(algorithm.settings(self._run), bucket_bytes=bucket_bytes)
        super().__init__(optimizer, self._run.comm, module=module, **settings)
        self._run.reducer = self._reducer

    def _named(self) -> dict[str, torch.Tensor]:
        ignored = self._wrapped._ddp_params_and_buffers_to_ignore  # noqa: SLF001 (torch's name for it)
        return {name: parameter for name, parameter in super()._named().items() if name not in ignored}

    @property
    def algorithm(self) -> Algorithm:
        """The present algorithm."""
        return self._algorithm

    @property
    def setting(self) -> Setting:
        """What the tuner may change. Not collective."""
        return Setting(self._bucket_bytes, hierarchical=self._run.comm is not self._whole.flat)

    # Steps

    def finalize(self, *, weight: float | None = None) -> None:
        """As DistributedOptimizer's; with an algorithm of weights, these are averages now if this step is due.

        Collective.
        """
        self._reducer.raise_if_closed()
        _check_weight(self._algorithm, weighted=weight is not None)
        if self._local or self._algorithm.is_due(self._steps):
            super().finalize(weight=weight)

    def step(self, closure: Callable[[], Any] | None = None, *, weight: float | None = None) -> Any:
        """Synchronise, then the inner optimizer's step. Collective."""
        if self._algorithm.averages_weights:
            self.finalize(weight=weight)
            result = self._optimizer.step(closure)
            self._steps += 1
            self._begin()
        else:
            result = super().step(closure, weight=weight)
        self._wrapped._stepped()  # noqa: SLF001 (ours)
        return result

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """As DistributedOptimizer's; InvalidArgumentError if several optimizers train the module. Collective."""
        with self._comm.checking("join"):
            if len(self._wrapped._optimizers()) > 1:  # noqa: SLF001 (ours)
                raise InvalidArgumentError(
                    "join() is for one optimizer: of several, ranks would wait for different ones"
                )
        with super().join():
            yield

    # Switching

    def accept(self, algorithm: Algorithm | str) -> Algorithm:
        """The algorithm that is meant; an error on all ranks unless all mean the same and can do it. Collective."""
        chosen = as_algorithm(algorithm)
        _compare(self._comm, chosen)
        _check_weight(chosen, weighted=self._weight is not None)
        return chosen

    def switch_to(self, algorithm: Algorithm) -> None:
        """Forget gradients and synchronise by `algorithm` from now on. Collective."""
        self.zero_grad()
        run = Run(algorithm.over(self._whole))
        self._reducer.reset(comm=run.comm, **algorithm.settings(run))
        run.reducer = self._reducer
        self._run = run
        self._algorithm = algorithm
        self._steps = 0
        self._begin()

    def new_tuner(self) -> Tuner:
        """A tuner that begins with the present setting. Not collective."""
        return Tuner(self.setting, both=self._algorithm.hierarchical is None and self._whole.flat is not self._whole)

    def use(self, setting: Setting) -> None:
        """Make buckets of another size, or reduce them in another way. Collective, between steps."""
        self._run.comm = self._whole if setting.hierarchical else self._whole.flat
        self._reducer.reset(comm=self._run.comm, bucket_bytes=setting.bucket_bytes)
        self._bucket_bytes = setting.bucket_bytes
        self._arm()

    def average_state(self) -> None:
        """The mean over all ranks in every floating tensor of the inner optimizer's state. Collective.

        MismatchError if ranks have state of different parameters.
        """
        held = nn.Module()
        for name, parameter in self._named().items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    held.register_buffer(f"{name}.{key}".replace(".", "/"), value)  # torch allows no dots
        allreduce_parameters(held, comm=self._comm)


def _compare(comm: Communicator, algorithm: Algorithm) -> None:
    """MismatchError on all ranks unless all have chosen the same algorithm. Collective."""
    texts = comm.all_gather_object(repr(algorithm))
    for rank, text in enumerate(texts):
        if text != texts[0]:
            raise MismatchError("ranks choose different algorithms", rank=rank, expected=texts[0], found=text)


def _check_weight(algorithm: Algorithm, *, weighted: bool) -> None:
    if weighted and algorithm.averages_weights:
        raise InvalidArgumentError(f"weight= is for averages of gradients, and {algorithm.name!r} makes none")


@overload
def data_parallel(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    algorithm: Algorithm | str = ...,
    comm: Any = ...,
    *,
    root: int = ...,
    broadcast_buffers: bool = ...,
    bucket_bytes: int = ...,
    autotune: bool = ...,
    tune_every: int = ...,
    **settings: Any,
) -> tuple[DistributedModule, AlgorithmOptimizer]: ...
@overload
def data_parallel(
    module: nn.Module,
    optimizer: Sequence[torch.optim.Optimizer],
    algorithm: Algorithm | str = ...,
    comm: Any = ...,
    *,
    root: int = ...,
    broadcast_buffers: bool = ...,
    bucket_bytes: int = ...,
    autotune: bool = ...,
    tune_every: int = ...,
    **settings: Any,
) -> tuple[DistributedModule, list[AlgorithmOptimizer]]: ...


@public_call("data_parallel")
def data_parallel(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    algorithm: Algorithm | str = GradientAllReduce(),  # noqa: B008 (a value)
    comm: Any = None,
    *,
    root: int = 0,
    broadcast_buffers: bool = True,
    bucket_bytes: int = 10 << 20,
    autotune: bool = False,
    tune_every: int = 100,
    **settings: Any,
) -> tuple[DistributedModule, AlgorithmOptimizer | list[AlgorithmOptimizer]]:
    """`module` and `optimizer`, ready to be trained on all ranks: use what is returned in their place.

    Collective: all ranks call it, with modules of the same parameters. Parameters and buffers become root's; a resumed
    root's optimizer state is shared by `synchronize(optimizer)` before.

    Parameters
    ----------
    optimizer : one, or a list of optimizers that share no parameter; of a list a list comes back. Each averages and
        steps its own parameters, so that they may step unequally often; all ranks step them in the same order.
    algorithm : an Algorithm, or "allreduce", "sg-allreduce", "quantize" or "decentralize"; `switch_to` of the module
        takes another one later.
    comm : what `comm=` means everywhere.
    root : whose parameters and buffers all begin with.
    broadcast_buffers : with False only parameters become root's, and buffers stay this rank's own until `switch_to`
        averages them.
    bucket_bytes : as for BucketReducer.
    autotune : ask the tuner of bucket size and hierarchy after each `tune_every`-th training forward, at the end of its
        step. All ranks must make equally many forwards then; not for use with `join`, nor with several optimizers.
    settings : of DistributedOptimizer: `accumulate`, `weight`, and those of BucketReducer.
    """
    communicator = as_communicator(comm)
    with communicator.phase("wrapping the module"):
        several = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        with communicator.checking("data_parallel"):
            chosen = as_algorithm(algorithm)
            _check_arguments(module, several, settings, autotune, tune_every)
            _check_weight(chosen, weighted=settings.get("weight") is not None)
        _compare(communicator, chosen)
        wrapped = DistributedModule(module, communicator)
        broadcast_parameters(wrapped, broadcast_buffers=broadcast_buffers, root=root, comm=communicator)
        trained = [
            AlgorithmOptimizer(one, wrapped, chosen, communicator, bucket_bytes=bucket_bytes, **settings)
            for one in several
        ]
        wrapped._train_with(trained, tune_every if autotune else None)  # noqa: SLF001 (ours)
    return wrapped, trained[0] if several[0] is optimizer else trained


def _check_arguments(
    module: Any, optimizers: Any, settings: Mapping[str, Any], autotune: bool, tune_every: Any
) -> None:
    if not isinstance(module, nn.Module):
        raise InvalidArgumentError(f"a module is wanted, not {type(module).__name__}")
    if not isinstance(optimizers, (list, tuple)) or not optimizers:
        raise InvalidArgumentError(f"an optimizer or a list of them is wanted, not {optimizers!r}")
    if others := [one for one in optimizers if not isinstance(one, torch.optim.Optimizer)]:
        raise InvalidArgumentError(f"a torch optimizer is wanted, not {type(others[0]).__name__}")
    if taken := [name for name in _ALGORITHMS_OWN if name in settings]:
        raise InvalidArgumentError(f"{taken[0]} is the algorithm's, and cannot be given")
    BucketReducer.check_settings(settings, "accumulate", "weight")
    if not isinstance(tune_every, int) or tune_every < 1:
        raise InvalidArgumentError("tune_every must be a positive number of forwards", found=tune_every)
    if autotune and len(optimizers) > 1:
        raise InvalidArgumentError("autotune is for one optimizer: between steps of several, gradients would be lost")
