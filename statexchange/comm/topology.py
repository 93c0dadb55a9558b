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
        return self.node_ranks_by_local_rank.index(self.rank)

    @property
    def node_ranks(self) -> list[int]:
        """The ranks of this host, this one among them, in rank order."""
        return [rank for rank, node in enumerate(self.nodes) if node == self.nodes[self.rank]]

    @property
    def node_ranks_by_local_rank(self) -> list[int]:
        """The ranks of this host, in the order of their local ranks."""
        if not self.local_ranks:
            return self.node_ranks
        return sorted(self.node_ranks, key=lambda rank: self.local_ranks[rank])

    @property
    def leaders(self) -> list[int]:
        """The lowest rank of each host, its leader. Its local rank need not be 0, if the launcher counts otherwise."""
        return [self.nodes.index(node) for node in range(max(self.nodes) + 1)]

    @property
    def ranks_of_local_rank_0(self) -> list[int]:
        """The rank of each host that has local rank 0."""
        if not self.local_ranks:
            return self.leaders
        by_node = {self.nodes[rank]: rank for rank, local_rank in enumerate(self.local_ranks) if local_rank == 0}
        return [by_node[node] for node in range(len(by_node))]
