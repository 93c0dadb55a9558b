"""AlgorithmOptimizer: a DistributedOptimizer that synchronises by an algorithm, which can be switched."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from statexchange.comm.communicator import Communicator
from statexchange.errors import InvalidArgumentError
from statexchange.train.algorithms import Algorithm, Run, as_algorithm
from statexchange.train.buckets.options import TrainingOptions
from statexchange.train.comparison import compare
from statexchange.train.optimizer import DistributedOptimizer, Loss
from statexchange.train.synchronize import allreduce_parameters
from statexchange.train.tuner import Setting, Tuner

if TYPE_CHECKING:
    from typing import Unpack

__all__ = ["AlgorithmOptimizer", "check_weight"]


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
        check_weight(chosen, is_weighted=self._weight is not None)
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


def check_weight(algorithm: Algorithm, *, is_weighted: bool) -> None:
    """Raise InvalidArgumentError if gradients are weighted and the algorithm averages none. Not collective."""
    if is_weighted and algorithm.bucket_type == "weight":
        raise InvalidArgumentError(f"weight= weights gradients, and {algorithm.name!r} averages none")
