"""Copies of one box, which must be equal: the one check of export and merge."""

from __future__ import annotations

from collections.abc import Callable

from statexchange.errors import ReplicaError
from statexchange.sharding.plan import Piece, TensorPlan
from statexchange.sharding.shards import Box

__all__ = ["check_copies", "replica_error"]


def check_copies(
    tensor: TensorPlan,
    piece: Piece,
    digest_of: Callable[[int, int], str],
    error: Callable[[TensorPlan, Box, int, int], ReplicaError],
) -> None:
    """Raise unless all copies of a piece have the digest of the one that is written.

    `digest_of` a holder and the index of a box there gives a digest; `error` makes the error about a box that the first
    holder's copy and the second's differ in. Copies that are reduced may differ.
    """
    if tensor.reduce is not None or not piece.replicas:
        return
    ours = digest_of(piece.holder, piece.box_index)
    for holder, index in piece.replicas:
        if digest_of(holder, index) != ours:
            raise error(tensor, piece.box, piece.holder, holder)


def replica_error(name: str, box: Box, rank: int, other: int, advice: str, path: str | None = None) -> ReplicaError:
    """The error that two ranks, or one twice, hold different values of a box; `advice` says what to do."""
    who = f"ranks {rank} and {other} hold" if rank != other else f"rank {rank} twice holds"
    return ReplicaError(f"{who} different values for region {box}: {advice}", name=name, rank=other, path=path)
