"""Sparse gradients: densify them, or average them over ranks whose gradients have different entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from statexchange.comm.backends.reduction import HALVES
from statexchange.comm.communicator import Communicator

__all__ = ["SparseShape", "average_sparse", "densified", "same_sparse_dims"]


class SparseShape(NamedTuple):
    """The sizes of a coalesced sparse gradient, which other ranks need to receive it."""

    num_entries: int
    num_sparse_dims: int

    @classmethod
    def of(cls, grad: torch.Tensor) -> SparseShape:
        """Return the sizes of a coalesced tensor."""
        return cls(grad._nnz(), grad.sparse_dim())  # noqa: SLF001 (torch has no other name for it)


def densified(grad: torch.Tensor) -> torch.Tensor:
    """Return a sparse tensor as a dense one. Not collective."""
    # Not to_dense(), which loses the only entry of a matrix of one column where autograd made it (torch 2.13)
    entries = grad.coalesce()
    return torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device).index_put_(
        tuple(entries.indices()), entries.values()
    )


def same_sparse_dims(shapes: Sequence[SparseShape | None]) -> bool:
    """Whether any gradient is sparse, and all such have equally many sparse dimensions. Not collective."""
    return len({shape.num_sparse_dims for shape in shapes if shape is not None}) == 1


def average_sparse(
    comm: Communicator,
    like: torch.Tensor,
    grad: torch.Tensor | None,
    shapes: Sequence[SparseShape | None],
    share: float = 1.0,
    scale: float | None = None,
) -> torch.Tensor:
    """Average sparse gradients of the parameter `like`; the result is coalesced and equal on all ranks. Collective.

    Entries are padded to the largest rank's number, gathered, cut to each rank's own number and summed by coalescing.
    Half precision is summed in float32.

    Args:
        comm: the communicator.
        like: the parameter.
        grad: this rank's gradient, or None.
        shapes: the sizes of each rank's gradient, None where it has none; `same_sparse_dims` must hold for them.
        share: multiplies this rank's values.
        scale: multiplies the sum over ranks; None averages.
    """
    counts = [0 if shape is None else shape.num_entries for shape in shapes]
    most = max(counts)
    sparse_dims = max(shape.num_sparse_dims for shape in shapes if shape is not None)
    wide = torch.float32 if like.dtype in HALVES else like.dtype
    indices = torch.zeros((sparse_dims, most), dtype=torch.int64, device=like.device)
    values = torch.zeros((most, *like.shape[sparse_dims:]), dtype=wide, device=like.device)
    if grad is not None:
        entries = grad.coalesce()
        indices[:, : counts[comm.rank]].copy_(entries.indices())
        values[: counts[comm.rank]].copy_(entries.values()).mul_(share)
    all_indices, all_values = [indices] * len(counts), [values] * len(counts)
    if most:
        all_indices, all_values = comm.all_gather(indices), comm.all_gather(values)
    indices = torch.cat([part[:, :count] for part, count in zip(all_indices, counts, strict=True)], 1)
    values = torch.cat([part[:count] for part, count in zip(all_values, counts, strict=True)])
    whole = torch.sparse_coo_tensor(indices, values, like.shape, check_invariants=False).coalesce()
    values = whole.values() / comm.world_size if scale is None else whole.values() * scale
    return torch.sparse_coo_tensor(
        whole.indices(), values.to(like.dtype), like.shape, is_coalesced=True, check_invariants=False
    )
