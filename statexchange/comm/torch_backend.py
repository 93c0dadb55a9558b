"""Messages through a torch ProcessGroup that can move CPU tensors (Gloo)."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from statexchange.comm.communicator import Backend, check_ranks
from statexchange.errors import NotInitializedError, PeerError, StallError
from statexchange.settings import Launch

__all__ = ["TorchBackend", "cpu_group", "default_group", "mesh_group", "of_ranks", "start_gloo"]

_MAX_NAP_S = 0.01
_stores: Any = dist  # torch exports its stores and rendezvous there, but not for type checkers


def default_group() -> dist.ProcessGroup | None:
    """torch.distributed's default group, if it is initialised."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def cpu_group(group: dist.ProcessGroup, timeout_s: float) -> dist.ProcessGroup:
    """`group` itself if it moves CPU tensors; else a sibling Gloo group of its ranks, so that the training group is
    left alone. Collective over `group`."""
    if "cpu:gloo" in dist.get_backend_config(group) or dist.get_backend(group) == "gloo":
        return group
    return _sibling(dist.get_process_group_ranks(group), timeout_s)


def _sibling(global_ranks: Sequence[int], timeout_s: float) -> dist.ProcessGroup:
    """A Gloo group of these ranks of the default group. Collective over them only."""
    timeout = timedelta(seconds=timeout_s)
    try:
        group = dist.new_group(list(global_ranks), timeout, "gloo", use_local_synchronization=True)
    except dist.DistStoreError as error:
        ranks = list(global_ranks)
        raise StallError(f"not all of ranks {ranks} came to make a group in {timeout_s:g} s") from error
    if not isinstance(group, dist.ProcessGroup):
        raise NotInitializedError(f"torch.distributed made no group for ranks {list(global_ranks)}")
    return group


def start_gloo(launch: Launch, *, default: bool, timeout_s: float) -> Backend:
    """A Gloo backend over the ranks that the launcher started. Collective.

    With `default` it is torch's default group, initialised if need be; else one that torch.distributed does not know.
    """
    running = default_group()
    if running is not None:
        return TorchBackend(running, timeout_s)
    timeout = timedelta(seconds=timeout_s)
    store, rank, size = _store(launch, timeout)
    if not default:
        return StoreBackend(_stores.PrefixStore("statexchange", store), rank, size, timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    group = default_group()
    assert group is not None
    return TorchBackend(group, timeout_s)


def _store(launch: Launch, timeout: timedelta) -> tuple[Any, int, int]:
    """torchrun's own store; under MPI one whose port the system picks on root and MPI tells the others."""
    if launch.launcher == "torchrun":
        store, rank, size = next(iter(_stores.rendezvous("env://", timeout=timeout)))
        return store, rank, size
    if launch.launcher in ("openmpi", "mpich"):
        from statexchange.comm import mpi_backend

        backend = mpi_backend.MPIBackend(mpi_backend.world())
        return _store_by_mpi(backend, timeout), backend.rank, backend.world_size
    if launch.world_size > 1:
        raise NotInitializedError(
            f"no rendezvous for Gloo under {launch.launcher}; call torch.distributed.init_process_group"
        )
    return _stores.HashStore(), 0, 1


def _store_by_mpi(backend: Backend, timeout: timedelta) -> Any:
    host = socket.gethostname()
    served = (
        _stores.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        if backend.rank == 0
        else None
    )
    offer = json.dumps([host, served.port if served is not None else 0]).encode()
    host, port = json.loads(backend.exchange(offer, timeout.total_seconds(), "the choice of a port")[0])
    return served if served is not None else _stores.TCPStore(host, port, is_master=False, timeout=timeout)


def mesh_group(mesh: Any, timeout_s: float) -> dist.ProcessGroup:
    """The group of all ranks of a DeviceMesh. Collective over them unless torch has it already."""
    ranks = sorted(mesh.mesh.flatten().tolist())
    world = default_group()
    if world is not None and ranks == list(range(dist.get_world_size())):
        return world
    return _sibling(ranks, timeout_s)


def of_ranks(ranks: Sequence[int], timeout_s: float) -> Backend:
    """A Gloo backend over these ranks of the default group, in that order. Collective over them only."""
    check_ranks(ranks, dist.get_rank(), dist.get_world_size())
    return TorchBackend(_sibling(ranks, timeout_s), timeout_s, ranks)


class _GlooBackend(Backend):
    """Exchange through a group's all-gathers. Works are polled, never waited for, so that a deadline holds."""

    name = "gloo"

    def __init__(self, group: dist.ProcessGroup, places: Sequence[int], timeout_s: float) -> None:
        """`places[rank]` is the place in `group` of each rank as it counts here."""
        self._group = group
        self._places = places
        self._timeout_s = timeout_s
        self._abandoned: list[Any] = []
        self.world_size = group.size()
        self.rank = list(places).index(group.rank())

    def exchange(self, payload: bytes, timeout_s: float, doing: str) -> list[bytes]:
        """Every rank's payload, by two all-gathers: sizes, then padded bytes."""
        deadline = time.monotonic() + timeout_s
        sizes = self._all_gather(torch.tensor([len(payload)]), deadline, doing)
        counts = [int(size) for size in sizes]
        padded = torch.zeros(max(counts), dtype=torch.uint8)
        if payload:
            padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        if not max(counts):
            return [b""] * self.world_size
        gathered = self._all_gather(padded, deadline, doing)
        return [bytes(gathered[place][: counts[place]].numpy()) for place in self._places]

    def _all_gather(self, tensor: torch.Tensor, deadline: float, doing: str) -> list[torch.Tensor]:
        rows = [torch.empty_like(tensor) for _ in range(self.world_size)]
        try:
            work = self._group.allgather([rows], [tensor])
            self._poll(work, deadline, doing)
        except RuntimeError as error:
            self._abandoned += [rows, tensor]  # the transport may still write into them
            if isinstance(error, StallError):
                raise
            raise PeerError(-1, doing, str(error).splitlines()[0]) from error
        return rows

    def _poll(self, work: dist.Work, deadline: float, doing: str) -> None:
        nap = 2e-5
        while not work.is_completed():
            if time.monotonic() > deadline:
                self._abandoned.append(work)
                raise StallError(f"not all ranks reached {doing} in time", rank=self.rank)
            time.sleep(nap)
            nap = min(nap * 1.5, _MAX_NAP_S)
        work.wait()  # completed: this only raises what went wrong


class TorchBackend(_GlooBackend):
    """One rank of a ProcessGroup that torch.distributed knows."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, order: Sequence[int] | None = None) -> None:
        """`order`: the group's global ranks in the order in which they count here; None keeps torch's, which sorts."""
        ranks = dist.get_process_group_ranks(group)
        self._ranks = list(ranks if order is None else order)
        super().__init__(cpu_group(group, timeout_s), [ranks.index(rank) for rank in self._ranks], timeout_s)
        self.name = str(dist.get_backend(group))

    def subset(self, ranks: Sequence[int]) -> Backend:
        """A Gloo group of `ranks`; only they take part in making it."""
        return of_ranks([self._ranks[rank] for rank in ranks], self._timeout_s)


class StoreBackend(_GlooBackend):
    """One rank of a Gloo group made from a store, which torch.distributed does not know."""

    def __init__(self, store: Any, rank: int, world_size: int, timeout_s: float) -> None:
        self._store = store
        timeout = timedelta(seconds=timeout_s)
        group = _stores.ProcessGroupGloo(_stores.PrefixStore("group", store), rank, world_size, timeout)
        super().__init__(group, range(world_size), timeout_s)

    def subset(self, ranks: Sequence[int]) -> Backend:
        """A Gloo group of `ranks` on the same store; only they take part in making it."""
        prefix = "-".join(str(rank) for rank in ranks)
        return StoreBackend(
            _stores.PrefixStore(prefix, self._store), list(ranks).index(self.rank), len(ranks), self._timeout_s
        )
