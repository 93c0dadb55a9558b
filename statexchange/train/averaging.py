"""Average the gradients of a module now, after backward, without hooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from statexchange.comm.communicator import CommLike, Communicator, from_all
from statexchange.comm.defaults import as_communicator, public_call
from statexchange.train.comparison import compare
from statexchange.train.parameter_specs import Source, local_part, named_parameters, specs_of
from statexchange.train.reducers import CoalescingReducer, Reducer
from statexchange.train.sparse import SparseShape, average_sparse, densified, same_sparse_dims

__all__ = ["average_gradients"]

_DENSE: Literal["dense"] = "dense"
GradientKind = SparseShape | Literal["dense"] | None  # of one rank's gradient; None where there is none


@public_call("average_gradients")
def average_gradients(module: Source, comm: CommLike | None = None) -> None:
    """Replace the gradients of `module` by their averages over ranks, in place.

    Collective. Blocks until all ranks have called. A gradient that is None on some ranks counts as zeros there; one
    that is None on all ranks stays None. Sparse gradients become coalesced ones. BucketReducer does the same during
    backward.

    Args:
        module: a module, or parameters with or without names, or a list of modules.
        comm: a Communicator, ProcessGroup, DeviceMesh or MPI communicator; by default the current one.

    Raises:
        MismatchError: parameters differ between ranks; the first that differs is named.
        UnsupportedError: a parameter is lazy, a meta tensor, or a DTensor that is not replicated.

    Example:
        >>> import torch
        >>> import statexchange as sx
        >>> model = torch.nn.Linear(2, 1)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> sx.average_gradients(model)
        >>> model.weight.grad
        tensor([[4., 4.]])
    """
    communicator = as_communicator(comm)
    with communicator.checking("average_gradients"):
        named = named_parameters(module)
        specs = specs_of(named)
    compare(communicator, "average_gradients", (spec.entry for spec in specs))
    with communicator.checking("average_gradients"):
        kinds = [_kind_of(name, parameter.grad) for name, parameter in named.items()]
    kinds_by_rank = from_all(communicator, kinds, list[GradientKind], "averaging gradients")
    with torch.no_grad(), CoalescingReducer(communicator) as reducer:
        for i, (name, parameter) in enumerate(named.items()):
            _average_one(communicator, reducer, name, parameter, [theirs[i] for theirs in kinds_by_rank])


def _kind_of(name: str, grad: torch.Tensor | None) -> GradientKind:
    if grad is None:
        return None
    local = local_part(grad, name)
    return SparseShape.of(local.coalesce()) if local.layout == torch.sparse_coo else _DENSE


def _average_one(
    comm: Communicator, reducer: Reducer, name: str, parameter: torch.Tensor, kinds: Sequence[GradientKind]
) -> None:
    """Average the gradient of one parameter; `kinds` has each rank's kind of it. Collective."""
    if all(kind is None for kind in kinds):
        return
    grad = parameter.grad
    shapes = [kind if isinstance(kind, SparseShape) else None for kind in kinds]
    if _DENSE not in kinds and same_sparse_dims(shapes):
        parameter.grad = average_sparse(comm, parameter, grad, shapes)
        return
    if grad is None:
        grad = parameter.grad = torch.zeros_like(parameter, requires_grad=False)
    elif grad.layout != torch.strided:
        grad = parameter.grad = densified(grad)
    reducer.add(local_part(grad, name))
