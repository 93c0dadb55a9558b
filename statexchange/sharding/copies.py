"""Check that copies of a box are equal."""

from __future__ import annotations

from collections.abc import Callable

from statexchange.errors import ReplicaError
from statexchange.sharding.plan import HolderLabel, Piece, TensorPlan, holders_text
from statexchange.sharding.shards import Box

__all__ = ["check_copies", "replica_error"]


def check_copies(
    tensor: TensorPlan,
    piece: Piece,
    digest_of: Callable[[int, int], str],
    error: Callable[[TensorPlan, Box, int, int], ReplicaError],
) -> None:
    """Raise unless all copies of a piece have the digest of the copy that is written; copies to reduce may differ.

    Args:
        tensor: the output tensor.
        piece: one of its pieces.
        digest_of: returns the digest of a box, given its holder and its index there.
        error: returns the error, given the tensor, the box and the two holders whose copies differ.
    """
    if tensor.reduce is not None or not piece.replicas:
        return
    expected = digest_of(piece.holder, piece.box_index)
    for holder, index in piece.replicas:
        if digest_of(holder, index) != expected:
            raise error(tensor, piece.box, piece.holder, holder)


def replica_error(
    name: str, box: Box, holder: HolderLabel, other: HolderLabel, advice: str, path: str | None = None
) -> ReplicaError:
    """Return the error for two holders, or one rank's two copies, with different values of a box."""
    holders = f"{holders_text(holder, other)} hold" if holder != other else f"two copies of rank {holder} have"
    rank = other if isinstance(other, int) else None
    return ReplicaError(f"{holders} different values for region {box}: {advice}", name=name, rank=rank, path=path)
