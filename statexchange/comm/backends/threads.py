"""Ranks that are threads of one process, before they have a control page."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from statexchange.comm.backends.backend import Backend
from statexchange.comm.wait import Wait
from statexchange.errors import (
    PeerError,
    StallError,
)

__all__ = ["ThreadBackend", "ThreadRoom"]


class ThreadRoom:
    """What the threads of one group share: a table of messages, guarded by a condition."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.changed = threading.Condition()
        self.posted: dict[tuple[int, int], bytes] = {}
        self.rooms: dict[tuple[tuple[int, ...], int], ThreadRoom] = {}
        self.gone: set[int] = set()

    def room_of(self, ranks: tuple[int, ...], use: int) -> ThreadRoom:
        """Return the room of some ranks, for their use number `use`."""
        with self.changed:
            return self.rooms.setdefault((ranks, use), ThreadRoom(len(ranks)))


class ThreadBackend(Backend):
    """One thread's place in a room. Its own exchange only serves to meet: the control page does the rest."""

    name = "threads"

    def __init__(self, room: ThreadRoom, rank: int) -> None:
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
