"""Ranks that are threads of one process: for tests of logic, quick to start."""

from __future__ import annotations

import platform
import threading
from collections import Counter
from collections.abc import Sequence

from statexchange.comm.backends.backend import Backend
from statexchange.comm.backends.single import SingleBackend
from statexchange.comm.bootstrap import form_communicator
from statexchange.comm.communicator import Communicator
from statexchange.comm.failure.control_page import ControlPage
from statexchange.comm.session import Session
from statexchange.comm.topology import Topology
from statexchange.comm.wait import Wait
from statexchange.errors import PeerError
from statexchange.settings import default_timeout_s

__all__ = ["thread_communicators"]


def thread_communicators(world_size: int) -> list[Communicator]:
    """Return a communicator for each of `world_size` threads. Not collective: one thread makes them all."""
    if world_size == 1:
        return [form_communicator(SingleBackend(), default_timeout_s())]
    group = _ThreadGroup(world_size)
    memory = memoryview(bytearray(ControlPage.nbytes(world_size)))
    return [_thread_communicator(group, memory, rank) for rank in range(world_size)]


def _thread_communicator(group: _ThreadGroup, memory: memoryview, rank: int) -> Communicator:
    from statexchange.comm.backends.shared_memory import SharedMemoryBackend

    bootstrap = _ThreadBackend(group, rank)
    page = ControlPage(memory, rank, group.world_size, threads=True)
    topology = Topology(rank, (0,) * group.world_size, (platform.node(),) * group.world_size)
    backend = SharedMemoryBackend(page, bootstrap, name="threads")
    session = Session(backend, bootstrap, page, page, topology, default_timeout_s())
    return Communicator(session, f"threads-{id(group):x}", form_communicator)


class _ThreadGroup:
    """The state that threads of one group share: a table of messages, guarded by a condition."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.changed = threading.Condition()
        self.posted: dict[tuple[int, int], bytes] = {}
        self.groups: dict[tuple[tuple[int, ...], int], _ThreadGroup] = {}
        self.departed: set[int] = set()

    def group_of(self, ranks: tuple[int, ...], use: int) -> _ThreadGroup:
        """Return the group of `ranks`; `use` counts the groups that were made of them."""
        with self.changed:
            return self.groups.setdefault((ranks, use), _ThreadGroup(len(ranks)))


class _ThreadBackend(Backend):
    """One thread of a group, before it has a control page."""

    name = "threads"

    def __init__(self, group: _ThreadGroup, rank: int) -> None:
        self.rank = rank
        self.world_size = group.world_size
        self._group = group
        self._count = 0
        self._uses: Counter[tuple[int, ...]] = Counter()

    def all_gather_bytes(self, payload: bytes, wait: Wait) -> list[bytes]:
        """Return every thread's payload. Collective."""
        self._count += 1
        keys = [(rank, self._count) for rank in range(self.world_size)]
        group = self._group
        with group.changed:
            group.posted[self.rank, self._count] = payload
            group.changed.notify_all()
            group.changed.wait_for(lambda: group.departed or all(key in group.posted for key in keys), wait.timeout_s)
            missing = [rank for rank, _ in keys if (rank, self._count) not in group.posted]
            for rank in sorted(group.departed.intersection(missing)):
                raise PeerError(rank, wait.operation, "its thread left")
            if missing:
                raise wait.stall_error(missing)
            return [group.posted[key] for key in keys]

    def new_group(self, ranks: Sequence[int], timeout_s: float) -> Backend:  # noqa: ARG002 (nothing to wait for)
        """Return the backend of the group of `ranks`. Collective over them."""
        key = tuple(ranks)
        self._uses[key] += 1
        return _ThreadBackend(self._group.group_of(key, self._uses[key]), key.index(self.rank))

    def close(self) -> None:
        """Report to threads that wait for this one that it leaves. Not collective."""
        with self._group.changed:
            self._group.departed.add(self.rank)
            self._group.changed.notify_all()
