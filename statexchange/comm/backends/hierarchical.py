"""Collectives of ranks on several hosts, in three steps: within each host, between the hosts' leaders, and back.

The data of a host's ranks is combined through shared memory, so that it crosses the network once per host and not once
per rank. A host's leader is its lowest rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch

from statexchange.comm.backends.backend import Backend, Between, Leaders
from statexchange.comm.backends.reduction import HALVES, NO_FINISH, Finish
from statexchange.comm.failure.monitor import OuterMonitor
from statexchange.comm.wait import Wait
from statexchange.errors import PeerError, StallError, StateExchangeError

if TYPE_CHECKING:
    from statexchange.comm.topology import Topology

EnterOnNode: TypeAlias = Callable[[int | None, Wait], Sequence[int]]


class _Steps(OuterMonitor):
    """Runs the steps of one collective, and translates the ranks in their errors into ranks of the world.

    It is the monitor of the steps' waits, and forwards to that of the world, whose errors have ranks of the world
    already.
    """

    def __init__(self, backend: HierarchicalBackend, wait: Wait) -> None:
        super().__init__(wait.monitor)
        self._backend = backend
        self._wait = wait
        self._raised: StateExchangeError | None = None  # by the world's monitor
        self._on_node = Wait(wait.timeout_s, wait.operation, self, backend.enter_on_node)
        self._between = Wait(wait.timeout_s, wait.operation, self)

    def check(self, operation: str) -> None:
        try:
            super().check(operation)
        except StateExchangeError as error:
            self._raised = error
            raise

    def on_node(self, step: Callable[[Backend, Wait], None]) -> None:
        """Run `step` among the ranks of this host, if they are several."""
        if self._backend.node.world_size > 1:
            self._run(step, self._backend.node, self._on_node, self._backend.topology.node_ranks)

    def between(self, step: Callable[[Backend, Wait], None]) -> None:
        """Run `step` among the leaders, if this rank is one."""
        if self._backend.leaders is not None:
            self._run(step, self._backend.leaders, self._between, self._backend.topology.leaders)

    def _run(self, step: Callable[[Backend, Wait], None], backend: Backend, wait: Wait, ranks: Sequence[int]) -> None:
        try:
            step(backend, wait)
        except PeerError as error:
            # A rank of this host that leaves after a failure reports it in ranks of the world already, with the host.
            if error is self._raised or error.rank < 0 or error.host is not None:
                raise
            rank = ranks[error.rank]
            raise PeerError(rank, error.phase, error.cause, self._backend.topology.hosts[rank]) from error
        except StallError as error:
            if error is self._raised:  # another rank has given up, and reported which ranks are missing
                raise
            # A rank's leader may be missing only because it waits for another host, so the world's monitor comes first.
            seen = tuple(ranks[rank] for rank in error.missing if rank < len(ranks))
            world = self._wait.monitor
            raise self._wait.stall_error(world.missing_ranks() or seen, world.silent_ranks()) from error


class HierarchicalBackend(Backend):
    """The backend of one rank among ranks of several hosts.

    All-reduces, broadcasts and all-gathers take the three steps; `flat`, the transport, does everything else.
    """

    name = "hierarchical"

    def __init__(
        self,
        transport: Backend,
        node: Backend,
        leaders: Backend | None,
        topology: Topology,
        enter_on_node: EnterOnNode | None = None,
    ) -> None:
        """Combine three backends.

        `transport` connects all ranks; `node` connects those of this host, in the order of `topology.node_ranks`;
        `leaders` connects the lowest rank of each host, and is None on the others. `enter_on_node` is what `Wait.enter`
        does for a `node` that enters itself.
        """
        # The wait between leaders has no entry: the calls of all ranks have been compared before.
        assert leaders is None or not leaders.enters_itself
        assert enter_on_node is not None or not node.enters_itself
        self.rank = transport.rank
        self.world_size = transport.world_size
        self.device_type = node.device_type
        self.node = node
        self.leaders = leaders
        self.topology = topology
        self.enter_on_node = enter_on_node
        self._transport = transport
        self._counts = [topology.nodes.count(node) for node in range(len(topology.leaders))]
        # Whether the ranks of each host are consecutive.
        self._has_consecutive_ranks = list(topology.nodes) == sorted(topology.nodes)

    @property
    def flat(self) -> Backend:
        """The transport."""
        return self._transport

    def all_gather_bytes(self, payload: bytes, wait: Wait) -> list[bytes]:
        """Delegate to the transport."""
        return self._transport.all_gather_bytes(payload, wait)

    def leave(self, error: BaseException | None) -> None:
        """Report to the ranks of this host. The failure detector reports to the others."""
        self.node.leave(error)
        self._transport.leave(error)

    def close(self) -> None:
        """Close the groups of this host and of the leaders. Not collective."""
        # Not the transport, which the session closes.
        self.node.close()
        if self.leaders is not None:
            self.leaders.close()

    def empty(self, nbytes: int, wait: Wait) -> torch.Tensor:
        """Return memory in which the ranks of this host reduce fastest. Collective."""
        memory: list[torch.Tensor] = []
        _Steps(self, wait).on_node(lambda node, inner: memory.append(node.empty(nbytes, inner)))
        return memory[0] if memory else torch.empty(nbytes, dtype=torch.uint8, device=self.device_type)

    def reduces(self, op: str, dtype: torch.dtype) -> bool:
        """Whether the node's backend and the transport do; the leaders' is not asked, as not all ranks have it.

        False for sums and products of half precision: they would be rounded, or overflow, between the two steps.
        """
        if dtype in HALVES and op in ("sum", "prod"):
            return False
        return self.node.reduces(op, dtype) and self._transport.reduces(op, dtype)

    # Reductions

    def all_reduce(self, tensor: torch.Tensor, op: str, finish: Finish, wait: Wait) -> None:
        """Reduce to the leader, between the leaders, and broadcast back. Collective."""
        steps = _Steps(self, wait)
        # Divided and scaled after the last sum: before it, each host's part would be rounded once more.
        steps.on_node(lambda node, inner: node.reduce(tensor, op, 0, NO_FINISH, inner))
        steps.between(lambda leaders, inner: leaders.all_reduce(tensor, op, NO_FINISH, inner))
        if self.leaders is not None:  # the other ranks get the finished result
            finish(tensor)
        self._share(tensor.view(torch.uint8), steps)

    def through_leaders(self, tensor: torch.Tensor, between: Between, wait: Wait) -> None:
        """Sum on the leader, call `between` there, and broadcast back. Collective."""
        steps = _Steps(self, wait)
        steps.on_node(lambda node, inner: node.reduce(tensor, "sum", 0, NO_FINISH, inner))
        steps.between(lambda leaders, inner: between(Leaders(leaders, inner, self._counts), tensor))
        self._share(tensor.view(torch.uint8), steps)

    # Moves

    def broadcast(self, data: torch.Tensor, root: int, wait: Wait) -> None:
        """Broadcast within root's host, unless a leader is root; between the leaders; within the other hosts.

        Collective.
        """
        steps = _Steps(self, wait)
        root_node, root_place = self._place_of(root)
        # Whether root is on this host, but does not lead it
        begins_here = root_node == self.topology.nodes[self.rank] and root_place != 0
        # Then its host comes first, so that the leader has the data, and needs no second broadcast at the end.
        if begins_here:
            steps.on_node(lambda node, inner: node.broadcast(data, root_place, inner))
        steps.between(lambda leaders, inner: leaders.broadcast(data, root_node, inner))
        if not begins_here:
            self._share(data, steps)

    def all_gather(self, data: torch.Tensor, into: torch.Tensor, wait: Wait) -> None:
        """Gather within each host, between the leaders, and broadcast to each host. Collective."""
        steps = _Steps(self, wait)
        of_host = data.new_empty(self.node.world_size * data.numel())
        of_host[: data.numel()] = data  # all of it, on a host of one rank, which makes no step there
        steps.on_node(lambda node, inner: node.all_gather(data, of_host, inner))
        steps.between(lambda leaders, inner: self._gather_hosts(leaders, of_host, into, inner))
        self._share(into, steps)

    def _share(self, data: torch.Tensor, steps: _Steps) -> None:
        """Copy the leader's `data` to all ranks of its host."""
        steps.on_node(lambda node, inner: node.broadcast(data, 0, inner))

    def _gather_hosts(self, leaders: Backend, of_host: torch.Tensor, into: torch.Tensor, wait: Wait) -> None:
        """Gather every host's block among the leaders; those of smaller hosts are padded.

        With ranks 0 and 2 on one host and 1 on another the leaders gather ``[[r0, r2], [r1, padding]]``, and write
        ``[r0, r1, r2]`` into `into`.
        """
        most, num_hosts = max(self._counts), len(self._counts)
        size = into.numel() // self.world_size
        # Then the hosts' blocks, one behind the other, are the result.
        if self._has_consecutive_ranks and min(self._counts) == most:
            leaders.all_gather(of_host, into, wait)
            return
        padded = of_host.new_empty(most * size)
        padded[: of_host.numel()] = of_host
        blocks = of_host.new_empty(num_hosts * most * size)
        leaders.all_gather(padded, blocks, wait)
        parts = blocks.view(num_hosts, most, size)
        for rank, part in enumerate(into.view(self.world_size, size)):
            node, place = self._place_of(rank)
            part.copy_(parts[node, place])

    def _place_of(self, rank: int) -> tuple[int, int]:
        """Return the host of a rank, and its number there in rank order."""
        node = self.topology.nodes[rank]
        return node, self.topology.nodes[:rank].count(node)
