"""Ranks that are threads of one process: for tests of logic, quick to start."""

from __future__ import annotations

import platform
import threading
from collections import Counter
from collections.abc import Sequence

from statexchange.comm.backend import Backend, Wait
from statexchange.comm.communicator import Communicator
from statexchange.comm.control_page import ControlPage
from statexchange.comm.session import Place, Session
from statexchange.comm.world import communicator
from statexchange.errors import PeerError, StallError
from statexchange.settings import default_timeout_s

__all__ = ["thread_communicators"]


class _Room:
    """What the threads of one group share: a table of messages, guarded by a condition."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.changed = threading.Condition()
        self.posted: dict[tuple[int, int], bytes] = {}
        self.rooms: dict[tuple[tuple[int, ...], int], _Room] = {}
        self.gone: set[int] = set()

    def room_of(self, ranks: tuple[int, ...], use: int) -> _Room:
        with self.changed:
            return self.rooms.setdefault((ranks, use), _Room(len(ranks)))


class ThreadBackend(Backend):
    """One thread's place in a room. Its own exchange only serves to meet: the control page does the rest."""

    name = "threads"

    def __init__(self, room: _Room, rank: int) -> None:
        self.rank = rank
        self.world_size = room.world_size
        self._room = room
        self._count = 0
        self._uses: Counter[tuple[int, ...]] = Counter()

    def exchange(self, payload: bytes, wait: Wait) -> list[bytes]:
        """Every thread's payload."""
        self._count += 1
        keys = [(rank, self._count) for rank in range(self.world_size)]
        room = self._room
        with room.changed:
            room.posted[self.rank, self._count] = payload
            room.changed.notify_all()
            room.changed.wait_for(lambda: room.gone or all(key in room.posted for key in keys), wait.timeout_s)
            missing = [rank for rank, _ in keys if (rank, self._count) not in room.posted]
            for rank in sorted(room.gone.intersection(missing)):
                raise PeerError(rank, wait.doing, "its thread left")
            if missing:
                raise StallError(
                    f"ranks {missing} did not reach {wait.doing} in {wait.timeout_s:g} s", missing=tuple(missing)
                )
            return [room.posted[key] for key in keys]

    def subset(self, ranks: Sequence[int], timeout_s: float) -> Backend:  # noqa: ARG002 (nothing to wait for)
        """The room of `ranks`."""
        key = tuple(ranks)
        self._uses[key] += 1
        return ThreadBackend(self._room.room_of(key, self._uses[key]), key.index(self.rank))

    def close(self) -> None:
        """Let those who wait for this thread know."""
        with self._room.changed:
            self._room.gone.add(self.rank)
            self._room.changed.notify_all()


def thread_communicators(world_size: int) -> list[Communicator]:
    """A communicator for each of `world_size` threads. Not collective: one thread makes them all."""
    if world_size == 1:
        from statexchange.comm.single import SingleBackend

        return [communicator(SingleBackend(), default_timeout_s())]
    room = _Room(world_size)
    memory = memoryview(bytearray(ControlPage.nbytes(world_size)))
    return [_thread_communicator(room, memory, rank) for rank in range(world_size)]


def _thread_communicator(room: _Room, memory: memoryview, rank: int) -> Communicator:
    from statexchange.comm.shared_memory_backend import SharedMemoryBackend

    carrier = ThreadBackend(room, rank)
    page = ControlPage(memory, rank, room.world_size, threads=True)
    place = Place(rank, (0,) * room.world_size, (platform.node(),) * room.world_size)
    backend = SharedMemoryBackend(page, carrier, name="threads")
    return Communicator(Session(backend, carrier, page, page, place, default_timeout_s()), f"threads-{id(room):x}")
