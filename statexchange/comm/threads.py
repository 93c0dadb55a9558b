"""Ranks that are threads of one process: for tests of logic, quick to start."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist

from statexchange.comm.backends.store import StoreBootstrap
from statexchange.comm.bootstrap import form_communicator
from statexchange.comm.communicator import Communicator
from statexchange.settings import default_timeout_s

__all__ = ["thread_communicators"]

_stores: Any = dist  # torch exports its stores there, but not for type checkers


def thread_communicators(world_size: int) -> list[Communicator]:
    """Return a communicator for each of `world_size` threads. Not collective: one thread makes them all."""
    store = _stores.HashStore()

    def form(rank: int) -> Communicator:
        bootstrap = StoreBootstrap(store, rank, world_size)
        bootstrap.name = "threads"
        return form_communicator(bootstrap, default_timeout_s())

    # Forming is collective, so that each rank needs a thread; other threads may then use the communicators.
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(form, range(world_size)))
