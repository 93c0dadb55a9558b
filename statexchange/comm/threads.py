"""Ranks that are threads of one process: for tests of logic, quick to start."""

from __future__ import annotations

import platform

from statexchange.comm.backends.single import SingleBackend
from statexchange.comm.backends.threads import ThreadBackend, ThreadRoom
from statexchange.comm.bootstrap import communicator
from statexchange.comm.communicator import Communicator
from statexchange.comm.failure.control_page import ControlPage
from statexchange.comm.session import Session
from statexchange.comm.topology import Place
from statexchange.settings import default_timeout_s

__all__ = ["thread_communicators"]


def thread_communicators(world_size: int) -> list[Communicator]:
    """A communicator for each of `world_size` threads. Not collective: one thread makes them all."""
    if world_size == 1:
        return [communicator(SingleBackend(), default_timeout_s())]
    room = ThreadRoom(world_size)
    memory = memoryview(bytearray(ControlPage.nbytes(world_size)))
    return [_thread_communicator(room, memory, rank) for rank in range(world_size)]


def _thread_communicator(room: ThreadRoom, memory: memoryview, rank: int) -> Communicator:
    from statexchange.comm.backends.shared_memory import SharedMemoryBackend

    carrier = ThreadBackend(room, rank)
    page = ControlPage(memory, rank, room.world_size, threads=True)
    place = Place(rank, (0,) * room.world_size, (platform.node(),) * room.world_size)
    backend = SharedMemoryBackend(page, carrier, name="threads")
    session = Session(backend, carrier, page, page, place, default_timeout_s())
    return Communicator(session, f"threads-{id(room):x}", communicator)
