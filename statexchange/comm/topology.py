"""Which rank is on which host."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Place"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the ranks are: the host of each, by rank; and which rank this is."""

    rank: int
    nodes: tuple[int, ...]
    """The number of each rank's host, counted in the order of their lowest ranks."""
    hosts: tuple[str, ...]
    """The name of each rank's host."""
    local_ranks: tuple[int, ...] = ()
    """The number of each rank within its host, as the launcher counts; () to count in rank order."""

    @property
    def local_rank(self) -> int:
        """The number of this rank within its host."""
        return self.mates_in_order.index(self.rank)

    @property
    def mates_in_order(self) -> list[int]:
        """The ranks of this host by their local ranks."""
        return sorted(self.mates, key=lambda rank: self.local_ranks[rank]) if self.local_ranks else self.mates

    @property
    def firsts(self) -> list[int]:
        """The rank with local rank 0 of each host."""
        if not self.local_ranks:
            return self.leaders
        first = {self.nodes[rank]: rank for rank, local in enumerate(self.local_ranks) if local == 0}
        return [first[node] for node in range(len(first))]

    @property
    def mates(self) -> list[int]:
        """The ranks of this host, this one among them."""
        return [rank for rank, node in enumerate(self.nodes) if node == self.nodes[self.rank]]

    @property
    def leaders(self) -> list[int]:
        """The lowest rank of each host."""
        return [self.nodes.index(node) for node in range(max(self.nodes) + 1)]
