"""DistributedOptimizer: a torch optimizer that steps with the average of all ranks' gradients.

Callbacks. The reducer calls `_backward_ended` at the end of each backward that touched a parameter. That finalizes the
averages, so that clipping and a GradScaler, which come between backward and `step`, see averages. Inside `no_sync`
nothing is finalized, and no bucket may be sent during backward: it would miss what the next backwards add.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from statexchange.comm.communicator import CommLike
from statexchange.comm.defaults import as_communicator, public_call
from statexchange.errors import InvalidArgumentError, UnsupportedError
from statexchange.settings import check_flags
from statexchange.state.units import labelled_parameters, parameters_of
from statexchange.train.buckets.options import ReducerOptions, check_names
from statexchange.train.buckets.reducer import BucketReducer
from statexchange.train.comparison import compare
from statexchange.train.parameters import named_parameters
from statexchange.train.synchronize import synchronize

if TYPE_CHECKING:
    from typing import Unpack

Loss: TypeAlias = Any
"""What a closure returns: most often a tensor or a number, or None."""


class DistributedOptimizer(torch.optim.Optimizer):
    """Wrap `optimizer` so that it steps with the average of all ranks' gradients.

    Collective: all ranks construct it, over parameters of the same names, shapes and dtypes, and call backward and
    `step` equally often.

    Gradients are averages when backward returns, as with DDP, so that clipping and a GradScaler work as usual. On a
    rank whose backward touched no parameter they are averages when `finalize` or `step` returns: if there may be such
    a rank, call `finalize` before you clip.

    Equal gradients keep parameters equal only if they are equal at the start. So the constructor gives all ranks rank
    0's parameters, and with `module` its buffers, as DDP does; ``init_sync=False`` leaves them as they are. It does not
    change the optimizer's state: after a load on one rank alone, `synchronize` the optimizer.

    A gradient that is missing on some ranks counts as zeros there. Missing on all, it is None and the parameter is
    skipped. See BucketReducer. State, hyperparameters, `state_dict` and hooks are those of the inner optimizer, so that
    checkpoints and LR schedulers see no difference; other attributes are found there, too. The loss of a closure is
    averaged, so that all ranks decide alike. The idea is that of Lux.jl's DistributedOptimizer.

    Args:
        optimizer: any torch optimizer. If it was constructed with named parameters, messages use the names.
        comm: a Communicator, ProcessGroup, DeviceMesh or MPI communicator; by default the current one.
        module: the module, or list of modules, that has the optimizer's parameters; messages use its names.
        init_sync: give all ranks rank 0's parameters and buffers now. Pass False only if they are known to be equal, or
            are loaded afterwards: ranks whose parameters differ train different models without any error.
        weight: a function that returns this rank's weight when gradients are averaged, for the true mean over tokens:
            the sum of weight times gradient, divided by the sum of weights. Nothing is sent during backward then
            (``overlap=False``).
        settings: options of the BucketReducer.

    Raises:
        InvalidArgumentError: the optimizer has parameters that `module` lacks, or an option is invalid.
        MismatchError: parameters differ between ranks, or options that the averaging depends on.

    Example:
        >>> import torch
        >>> import statexchange as sx
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = sx.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), module=model)
        >>> before = model.weight.detach().clone()
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
        >>> (model.weight - before).detach()
        tensor([[-0.4000, -0.4000]])
        >>> optimizer.close()
    """

    # A GradScaler sets its scale as an attribute of (fused) optimizers that support this. It would set it on the
    # wrapper, where the inner optimizer does not look.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        comm: CommLike | None = None,
        *,
        module: torch.nn.Module | list[torch.nn.Module] | None = None,
        init_sync: bool = True,
        weight: Callable[[], float] | None = None,
        **settings: Unpack[ReducerOptions],
    ) -> None:
        # Optimizer.__init__ is not called: it would make param groups and state of its own, and hide the inner ones.
        self._optimizer = optimizer
        with public_call("DistributedOptimizer"):
            self._comm = as_communicator(comm)
        self._module = module
        self._weight = weight
        self._no_sync_depth = 0
        self._steps = 0
        self._is_averaged = False
        self._catch_up_root: int | None = None  # the lowest rank that took the last step, if others missed it
        with self._comm.checking("DistributedOptimizer"):
            check_flags(init_sync=init_sync)
            self._check(settings)
            named = self._named()
        # A gradient that is sent during backward is sent before the sum of weights is known.
        if weight is not None:
            settings["overlap"] = False
        self.reducer = BucketReducer(named, self._comm, **settings)
        """The reducer that averages the gradients."""
        # Else ranks that differ in it would wait for each other in different calls.
        compare(self._comm, f"init_sync={init_sync}")
        if init_sync:
            with public_call("DistributedOptimizer"):
                try:
                    synchronize(named if module is None else module, comm=self._comm)
                except (InvalidArgumentError, UnsupportedError) as error:
                    raise error.located(advice="init_sync=False leaves parameters and buffers as they are") from error
        self.reducer.watch(self._backward_ended)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (any attribute of the inner optimizer)
        if name == "_optimizer":  # before it is set, as in a copy that is being made, this would recurse
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def _check(self, settings: Mapping[str, object]) -> None:
        if not isinstance(self._optimizer, torch.optim.Optimizer):
            raise InvalidArgumentError(f"expected a torch optimizer, not {type(self._optimizer).__name__}")
        if self._weight is not None and not callable(self._weight):
            raise InvalidArgumentError(
                f"weight must be a function that returns this rank's weight, not {self._weight!r}"
            )
        check_names(settings)

    def _named(self) -> dict[str, torch.Tensor]:
        """Return the optimizer's parameters by name: the module's names if there is one, else the optimizer's."""
        if self._module is None:
            return labelled_parameters(self._optimizer)
        names = named_parameters(self._module)
        _check_in_module(self._optimizer, names)
        in_optimizer = set(map(id, parameters_of(self._optimizer)))
        return {name: parameter for name, parameter in names.items() if id(parameter) in in_optimizer}

    # The inner optimizer

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The wrapped optimizer."""
        return self._optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state dict. Not collective."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict into the inner optimizer. Not collective."""
        self._optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, whose gradients are averaged from now on. Collective; no bucket may be in flight."""
        with self._comm.checking("add_param_group"):
            self._optimizer.add_param_group(param_group)
            named = self._named()
        present = self.reducer.parameters
        ids = set(map(id, present.values()))
        new = {name: parameter for name, parameter in named.items() if id(parameter) not in ids}
        if new:
            self.reducer.reset({**present, **new})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard gradients, also those not averaged yet. Not collective, but all ranks must call it."""
        # First, as it waits: gradients that are zeroed in place lie in memory that may be under reduction.
        self.reducer.discard()
        self._optimizer.zero_grad(set_to_none)
        self._is_averaged = False

    def close(self) -> None:
        """Remove the hooks from the parameters: backward is as before, and the inner optimizer steps alone.

        Not collective. Closing the communicator does it, too. Later calls of `finalize` and `step` raise. May be called
        more than once.
        """
        self.reducer.close()

    # Averaging

    def finalize(self) -> None:
        """Average the gradients, unless they have been averaged since the last backward.

        Collective, unless they have been. Blocks until all ranks have called.

        Raises:
            InvalidArgumentError: inside `no_sync`.
            MismatchError: ranks are in different steps.
        """
        self.reducer.raise_if_closed()
        if self._no_sync_depth:
            raise InvalidArgumentError("gradients are not averaged inside no_sync(): leave the block first")
        # As after a backward, at whose end they are averaged, so that `step` has nothing left to do.
        if self._is_averaged:
            return
        weight = None
        if self._weight is not None:
            weight = self._weight()
        active = self.reducer.reduce(weight=weight, step=self._steps)
        self._note_active(active)
        self._is_averaged = True

    def step(self, closure: Callable[[], Loss] | None = None) -> Loss:
        """Average gradients, if they are not averages yet, and let the inner optimizer step.

        Collective.

        Args:
            closure: evaluates the loss and calls backward, as for the inner optimizer.

        Returns:
            The inner optimizer's result; the loss of a closure is averaged over ranks.

        Raises:
            InvalidArgumentError: inside `no_sync`.
            MismatchError: ranks are in different steps.
        """
        if self._no_sync_depth:
            raise InvalidArgumentError("step() inside no_sync() would step with this rank's gradients: leave the block")
        if closure is None:
            self.finalize()
            result = self._optimizer.step()
        else:
            # An optimizer may call it more than once, as LBFGS does: each evaluation averages its own gradients.
            result = self._optimizer.step(lambda: self._evaluate(closure))
        self._steps += 1
        self.reducer.end_step()
        self._is_averaged = False
        return result

    def _evaluate(self, closure: Callable[[], Loss]) -> Loss:
        """Call the closure, average the gradients, and return the averaged loss. Collective."""
        self._is_averaged = False
        loss = closure()
        self.finalize()
        if loss is None:
            return None
        mean = torch.as_tensor(loss).detach().clone()  # the caller's loss stays as it is
        self._comm.all_reduce(mean, "avg")
        if isinstance(loss, torch.Tensor):
            return mean
        return mean.item()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Enter a block whose backwards add to this rank's gradients without averaging. Not collective."""
        # Blocks may be nested: only the end of the outermost one lets backward send again.
        self._no_sync_depth += 1
        self.reducer.eager = False
        try:
            yield
        finally:
            self._no_sync_depth -= 1
            self.reducer.eager = not self._no_sync_depth

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Enter a block in which ranks may make different numbers of steps.

        Collective; the block ends when all ranks are at its end. A rank that is at the end takes part in the others'
        averages with weight 0, so that these are exact means over the ranks that still have data. If it has missed
        steps, its parameters, the buffers of `module` and the optimizer's state become those of the lowest rank that
        took the last step; LR schedulers are the caller's to advance.
        """
        self._catch_up_root = None
        yield
        # Every round tells all ranks which of them go on, so all leave the loop after the same one.
        while active := self.reducer.reduce(done=True):
            self._note_active(active)
        self.zero_grad()  # the averages of the last step, which this rank has not taken
        if self._catch_up_root is not None:
            module = self._named() if self._module is None else self._module
            synchronize([module, self._optimizer], root=self._catch_up_root, comm=self._comm)
        self._steps = 0  # so that all ranks count alike again

    def _note_active(self, active: list[int]) -> None:
        """Keep the lowest active rank, as the one to copy from, if some ranks were done in this step."""
        if len(active) < self._comm.world_size:
            self._catch_up_root = active[0]

    def _backward_ended(self) -> None:
        self._is_averaged = False
        if not self._no_sync_depth:
            self.finalize()


def _check_in_module(optimizer: torch.optim.Optimizer, in_module: Mapping[str, torch.Tensor]) -> None:
    ids = set(map(id, in_module.values()))
    for name, parameter in labelled_parameters(optimizer).items():
        # Integers get no gradient, so it does not matter whether the module has them.
        if id(parameter) not in ids and (parameter.is_floating_point() or parameter.is_complex()):
            shape = f"{str(parameter.dtype)[6:]}{list(parameter.shape)}"
            raise InvalidArgumentError(
                f"the optimizer has a parameter {shape} that the module does not have", name=name
            )
