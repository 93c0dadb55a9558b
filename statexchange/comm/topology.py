"""The topology: the host of each rank, and its number there, from the records that the ranks exchange."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from statexchange.settings import detect_launch


class RankInfo(NamedTuple):
    """The record that each rank sends to all before they have failure detection."""

    host_identity: str
    memory: str | None
    """Equal on ranks that may share memory; None on a machine that does not keep stores in order or has no memfd."""
    host: str
    nonce: str
    launchers_local_rank: int | None
    has_torch: bool


@dataclass(frozen=True, slots=True)
class Topology:
    """The hosts of all ranks, and the number of this one. Hosts are numbered in the order of their lowest ranks.

    Example:
        >>> topology = Topology(2, nodes=(0, 1, 0), hosts=("a", "b", "a"))
        >>> topology.node_ranks, topology.local_rank, topology.leaders
        ([0, 2], 1, [0, 1])
    """

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
        ranks = [rank for rank, local_rank in enumerate(self.local_ranks) if local_rank == 0]
        return sorted(ranks, key=self.nodes.__getitem__)


def topology_of(infos: Sequence[RankInfo], rank: int) -> Topology:
    """Return the topology for `rank`, with the launcher's local ranks if these are 0, 1, ... on each host.

    They may differ from rank order, as with Open MPI 5. They are used so that a rank has the same local rank before and
    after `init`.
    """
    # By identity, as containers on one machine may have the same name.
    identities = list(dict.fromkeys(info.host_identity for info in infos))
    nodes = tuple(identities.index(info.host_identity) for info in infos)
    hosts = tuple(info.host for info in infos)
    local_ranks = tuple(info.launchers_local_rank for info in infos if info.launchers_local_rank is not None)
    expected = {(node, local_rank) for node in nodes for local_rank in range(nodes.count(node))}
    if len(local_ranks) < len(infos) or set(zip(nodes, local_ranks, strict=True)) != expected:
        return Topology(rank, nodes, hosts)
    return Topology(rank, nodes, hosts, local_ranks)


def launchers_local_rank(rank: int, world_size: int) -> int | None:
    """Return the launcher's local rank of this process; None unless it started `rank` of as many ranks."""
    launch = detect_launch()
    # A group of only some of the launcher's ranks counts them anew.
    if (launch.rank, launch.world_size) != (rank, world_size):
        return None
    return launch.local_rank


def run_identity(nonce: str) -> str:
    """Return the name of a run: the launcher's job id, for people, and rank 0's nonce, as job ids may repeat."""
    job = re.sub(r"[^A-Za-z0-9_-]", "-", detect_launch().job or "run")[:100]
    return f"{job.lstrip('-') or 'run'}-{nonce}"
