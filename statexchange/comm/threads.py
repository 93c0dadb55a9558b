"""Ranks that are threads of one process: for tests of logic, quick to start."""

from __future__ import annotations

import platform

from statexchange.comm.backends.single import SingleBackend
from statexchange.comm.backends.threads import ThreadBackend, ThreadGroup
from statexchange.comm.bootstrap import form_communicator
from statexchange.comm.communicator import Communicator
from statexchange.comm.failure.control_page import ControlPage
from statexchange.comm.session import Session
from statexchange.comm.topology import Topology
from statexchange.settings import default_timeout_s

__all__ = ["thread_communicators"]


def thread_communicators(world_size: int) -> list[Communicator]:
    """Return a communicator for each of `world_size` threads. Not collective: one thread makes them all."""
    if world_size == 1:
        return [form_communicator(SingleBackend(), default_timeout_s())]
    group = ThreadGroup(world_size)
    memory = memoryview(bytearray(ControlPage.nbytes(world_size)))
    return [_thread_communicator(group, memory, rank) for rank in range(world_size)]


def _thread_communicator(group: ThreadGroup, memory: memoryview, rank: int) -> Communicator:
    from statexchange.comm.backends.shared_memory import SharedMemoryBackend

    bootstrap = ThreadBackend(group, rank)
    page = ControlPage(memory, rank, group.world_size, threads=True)
    topology = Topology(rank, (0,) * group.world_size, (platform.node(),) * group.world_size)
    backend = SharedMemoryBackend(page, bootstrap, name="threads")
    session = Session(backend, bootstrap, page, page, topology, default_timeout_s())
    return Communicator(session, f"threads-{id(group):x}", form_communicator)
