"""The topology: the host of each rank, and the rank's number there."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Topology"]


@dataclass(frozen=True, slots=True)
class Topology:
    """The hosts of all ranks, and the number of this one. Hosts are numbered in the order of their lowest ranks."""

    rank: int
    nodes: tuple[int, ...]
    """The number of each rank's host."""
    hosts: tuple[str, ...]
    """The name of each rank's host."""
    local_ranks: tuple[int, ...] = ()
    """The number of each rank within its host, as the launcher counts; () to count in rank order."""

    @property
    def local_rank(self) -> int:
        """The number of this rank within its host."""
        return self.node_ranks_in_order.index(self.rank)

    @property
    def node_ranks(self) -> list[int]:
        """The ranks of this host, this one among them, in rank order."""
        return [rank for rank, node in enumerate(self.nodes) if node == self.nodes[self.rank]]

    @property
    def node_ranks_in_order(self) -> list[int]:
        """The ranks of this host by their local ranks."""
        if not self.local_ranks:
            return self.node_ranks
        return sorted(self.node_ranks, key=lambda rank: self.local_ranks[rank])

    @property
    def leaders(self) -> list[int]:
        """The lowest rank of each host."""
        return [self.nodes.index(node) for node in range(max(self.nodes) + 1)]

    @property
    def first_ranks(self) -> list[int]:
        """The rank with local rank 0 of each host."""
        if not self.local_ranks:
            return self.leaders
        first = {self.nodes[rank]: rank for rank, local_rank in enumerate(self.local_ranks) if local_rank == 0}
        return [first[node] for node in range(len(first))]
