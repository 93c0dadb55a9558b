"""Average the gradients of a module now, after backward, without hooks."""

from __future__ import annotations

from statexchange.comm.communicator import CommLike
from statexchange.comm.defaults import public_call
from statexchange.train.buckets.reducer import BucketReducer
from statexchange.train.parameters import Source

__all__ = ["average_gradients"]


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
