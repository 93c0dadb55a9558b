"""The formation of a communicator: choose the backend, and start failure detection.

The ranks begin with a bootstrap backend, over which they can only exchange bytes. They exchange their hosts, test
whether all of them share memory, and start failure detection: the control page on one host, the failure detector
between hosts. Only then do they start the transport, so that a rank that fails during that is reported to all.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import json
import logging
import os
import platform
import re
import secrets
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from statexchange.comm import forks
from statexchange.comm.backends.backend import Backend
from statexchange.comm.backends.single import SingleBackend
from statexchange.comm.calls import public_call_name
from statexchange.comm.communicator import Communicator
from statexchange.comm.failure.control_page import ControlPage, open_control_page
from statexchange.comm.failure.monitor import UNWATCHED, FailureMonitor, OuterMonitor, forming_group, outer_monitor
from statexchange.comm.failure.start import start_failure_detector
from statexchange.comm.session import Session
from statexchange.comm.topology import Topology
from statexchange.comm.wait import Wait
from statexchange.errors import (
    ForkedError,
    PeerError,
    StallError,
    UnsupportedError,
    from_record,
    missing_extra,
    to_record,
)
from statexchange.processes import host_identity, pid_namespace
from statexchange.settings import detect_launch

__all__ = ["Start", "form_communicator", "is_forked_from_rank", "launchers_local_rank", "refuse_inherited"]

_communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()  # all of more than one rank that this process made
# The fingerprint of a hierarchical collective's steps within a host. It is a constant: all ranks have compared the
# call's own fingerprint before.
_STEP_ON_NODE = 1
_log = logging.getLogger("statexchange")


class _Inheritance:
    """The groups of the rank from which this process was forked, which it inherited."""

    def __init__(self) -> None:
        self.is_from_rank = False
        self.groups: list[object] = []

    def disown(self) -> None:
        """Record the groups of the parent, which this child must not use."""
        # A communicator that was open is either still open here, or has been cut off (`forks`) already.
        was_open = any(comm.is_inherited or not comm.is_closed for comm in _communicators)
        self.is_from_rank = self.is_from_rank or was_open
        if "torch.distributed" in sys.modules:
            from statexchange.comm.backends.torch_groups import known_groups

            self.groups = known_groups()


_inheritance = _Inheritance()
Start: TypeAlias = Callable[[], tuple[Backend, Backend | None]]


def is_forked_from_rank() -> bool:
    """Whether this process was forked from a rank that had a communicator. Not collective."""
    return _inheritance.is_from_rank


def refuse_inherited(group: object) -> None:
    """Raise ForkedError if `group` belongs to the rank from which this process was forked. Not collective."""
    is_mpi = type(group).__module__.startswith("mpi4py")
    if any(group is known for known in _inheritance.groups) or (_inheritance.is_from_rank and is_mpi):
        raise ForkedError("this process was forked from a rank, to which this group belongs")


def form_communicator(
    bootstrap: Backend,
    timeout_s: float,
    *,
    prefer: str = "auto",
    check: bool = True,
    start: Start | None = None,
) -> Communicator:
    """Form a communicator of the ranks that can exchange messages over `bootstrap`. Collective.

    `prefer` is "auto", for shared memory between ranks of one host and the transport between hosts; "shm", which
    requires shared memory; or "transport", for the transport alone. `start` is called once failure detection runs: it
    returns the transport, which then replaces `bootstrap`, and the backend for tensors of GPUs, if there is one. A
    transport that `start` makes over `bootstrap` closes it in its own `close`, not before: other ranks may still read
    from a store that rank 0's bootstrap backend serves.
    """
    if bootstrap.world_size == 1:
        if start is not None:
            bootstrap, _ = start()
        forks.cut_off_in_children(_inheritance)
        alone = Session(SingleBackend(), bootstrap, None, UNWATCHED, Topology(0, (0,), (platform.node(),)), timeout_s)
        return Communicator(alone, _run_identity(secrets.token_hex(8)), form_communicator)
    try:
        comm = Communicator(*_form_session(bootstrap, timeout_s, prefer, check, start), form_communicator)
    except BaseException:
        bootstrap.close()  # else a caller that keeps the error would keep rank 0's port open
        raise
    _communicators.add(comm)
    forks.cut_off_in_children(_inheritance)
    _close_at_exit()
    return comm


class _RankInfo(NamedTuple):
    """The record that each rank sends to all before they have failure detection."""

    host_identity: str
    memory: str | None
    """Equal on ranks that may share memory; None on a machine that does not keep stores in order or has no memfd."""
    host: str
    nonce: str
    launchers_local_rank: int | None
    has_torch: bool


class _Arrivals(OuterMonitor):
    """Names the ranks that have not begun to form the communicator, where the backend can know them."""

    def __init__(self, bootstrap: Backend) -> None:
        super().__init__(outer_monitor())
        self._bootstrap = bootstrap

    def late_ranks(self) -> tuple[int, ...]:
        """Return the absent ranks on the lowest rank that is present; () on the others."""
        # One rank alone asks about all: thousands that did so at once would keep the store busy for minutes.
        for lower in range(self._bootstrap.rank):
            if not self._bootstrap.absent_ranks([lower]):
                return ()
        return tuple(self._bootstrap.absent_ranks())


def _all_gather_bytes(bootstrap: Backend, timeout_s: float, payload: bytes) -> list[bytes]:
    """Return every rank's payload. Collective.

    If the transport's error does not name a rank, it becomes one that names the ranks that have not called yet.
    """
    wait = Wait(timeout_s, "the formation of the communicator", _Arrivals(bootstrap))
    try:
        return bootstrap.all_gather_bytes(payload, wait)
    except (StallError, PeerError) as error:
        absent = bootstrap.absent_ranks()
        if error.rank not in (None, -1) or not absent:  # a PeerError of an unknown rank has -1
            raise
        if isinstance(error, StallError):
            raise wait.stall_error(absent) from error
        # A connection has ended. A rank that had not called yet had no way to send its error to this one.
        subject = "it" if len(absent) == 1 else f"one of ranks {list(absent)}"
        cause = f"{subject} ended before it called {public_call_name() or 'this'}, so its own log has the error"
        raise PeerError(absent[0] if len(absent) == 1 else -1, "its own code", f"{cause} ({error.cause})") from error


def _form_session(
    bootstrap: Backend, timeout_s: float, prefer: str, check: bool, start: Start | None
) -> tuple[Session, str]:
    """Return the session of all ranks and the name of their run. Collective."""
    all_gather_bytes = functools.partial(_all_gather_bytes, bootstrap, timeout_s)
    keeps_order = platform.machine() in ("x86_64", "AMD64") and hasattr(os, "memfd_create")
    own = _RankInfo(
        host_identity(),
        f"{host_identity()} {pid_namespace()}" if keeps_order else None,
        platform.node(),
        secrets.token_hex(8),
        launchers_local_rank(bootstrap),
        importlib.util.find_spec("torch") is not None,
    )
    infos = [_RankInfo(*json.loads(answer)) for answer in all_gather_bytes(json.dumps(own).encode())]
    topology = _topology(infos, bootstrap.rank)
    page = _page_of(bootstrap, infos, all_gather_bytes)
    run = _run_identity(infos[0].nonce)
    if not all(info.has_torch for info in infos):
        if prefer == "shm":
            raise missing_extra('init("shm")', "torch")
        prefer = "transport"  # the backend over shared memory needs torch
    devices = None
    if page is not None:
        with _failing_together(page, topology):
            if start is not None:
                bootstrap, devices = start()
                start = None
            backend = bootstrap if prefer == "transport" else _shared_memory_backend(page, bootstrap, timeout_s)
        if backend is not None:
            return Session(
                backend, bootstrap, page, page, topology, timeout_s, check=check, device_backend=devices
            ), run
    _report_no_shared_memory(topology, prefer)
    detector = start_failure_detector(bootstrap, topology, timeout_s)
    with _failing_together(detector, topology):
        if start is not None:
            bootstrap, devices = start()
        transport = bootstrap.transport(timeout_s)
        shares_hosts = 1 < len(topology.leaders) < len(topology.nodes)  # several hosts, and one with several ranks
        is_hierarchical = prefer == "auto" and shares_hosts
        backend = _hierarchical_backend(transport, topology, infos, timeout_s) if is_hierarchical else transport
    session = Session(backend, transport, None, detector, topology, timeout_s, check=check, device_backend=devices)
    return session, run


def _page_of(
    backend: Backend, infos: Sequence[_RankInfo], all_gather_bytes: Callable[[bytes], list[bytes]]
) -> ControlPage | None:
    """Return a control page of the ranks of `backend`; None, on all, if they cannot share memory. Collective."""
    memories = {info.memory for info in infos}
    if None in memories or len(memories) > 1:
        return None
    return open_control_page(backend.rank, backend.world_size, all_gather_bytes)


@contextlib.contextmanager
def _failing_together(monitor: FailureMonitor, topology: Topology) -> Iterator[None]:
    """A block of `init`: an error of one rank is raised on all ranks, and names that rank. Collective."""
    try:
        with forming_group(monitor, topology.hosts):
            yield
    except BaseException as error:
        reported = from_record(to_record(error, topology.rank, "init", topology.hosts[topology.rank]))
        monitor.report_failure(reported)
        monitor.close()
        raise


def _shared_memory_backend(page: ControlPage, bootstrap: Backend, timeout_s: float) -> Backend | None:
    """Return the backend over `page`; None, on all ranks, if there is too little memory for it. Collective."""
    from statexchange.comm.backends.shared_memory import SharedMemoryBackend

    backend = SharedMemoryBackend(page, "threads" if bootstrap.name == "threads" else "shm")
    if backend.set_up(Wait(timeout_s, "the reservation of shared memory")):
        return backend
    backend.close()
    return None


def _hierarchical_backend(
    bootstrap: Backend, topology: Topology, infos: Sequence[_RankInfo], timeout_s: float
) -> Backend:
    """Return a backend with shared memory, or else the transport, within hosts, and the transport between.

    Collective.
    """
    from statexchange.comm.backends.hierarchical import HierarchicalBackend

    is_alone = len(topology.node_ranks) == 1
    local = SingleBackend() if is_alone else bootstrap.new_group(topology.node_ranks, timeout_s)

    def all_gather_bytes(payload: bytes) -> list[bytes]:
        return local.all_gather_bytes(payload, Wait(timeout_s, "the formation of a host's group"))

    page = None if is_alone else _page_of(local, [infos[rank] for rank in topology.node_ranks], all_gather_bytes)
    shared = None if page is None else _shared_memory_backend(page, local, timeout_s)
    node = local if shared is None else shared
    is_leader = topology.rank == topology.node_ranks[0]
    leaders = bootstrap.new_group(topology.leaders, timeout_s) if is_leader else None

    enter_on_node = None if page is None else functools.partial(page.enter, _STEP_ON_NODE)
    return HierarchicalBackend(bootstrap, node, leaders, topology, enter_on_node)


def _report_no_shared_memory(topology: Topology, prefer: str) -> None:
    """Raise if shared memory is required; else warn if the ranks share a host. All ranks call this, or none."""
    hosts = sorted(set(topology.hosts))
    if prefer == "shm":
        raise UnsupportedError(
            f"the ranks, on {', '.join(hosts)}, cannot share memory: they must run on one host, see each other's "
            "processes and open files in /proc, and have room for a few MiB of each rank"
        )
    if len(topology.leaders) == 1 and topology.rank == 0:
        _log.warning(
            "the ranks on %s cannot share memory (containers?): messages go over sockets, slower",
            hosts[0],
        )


def launchers_local_rank(bootstrap: Backend | Communicator) -> int | None:
    """Return the launcher's local rank of this process; None unless the ranks are those that the launcher started."""
    launch = detect_launch()
    return launch.local_rank if (launch.rank, launch.world_size) == (bootstrap.rank, bootstrap.world_size) else None


def _topology(infos: Sequence[_RankInfo], rank: int) -> Topology:
    """Return the topology, with the launcher's local ranks if these are 0, 1, ... on each host.

    They may differ from rank order, as with Open MPI 5. They are used so that a rank has the same local rank before and
    after `init`.
    """
    identities = list(dict.fromkeys(info.host_identity for info in infos))
    nodes = tuple(identities.index(info.host_identity) for info in infos)
    hosts = tuple(info.host for info in infos)
    local_ranks = tuple(info.launchers_local_rank for info in infos if info.launchers_local_rank is not None)
    expected = {(node, local_rank) for node in nodes for local_rank in range(nodes.count(node))}
    if len(local_ranks) < len(infos) or set(zip(nodes, local_ranks, strict=True)) != expected:
        return Topology(rank, nodes, hosts)
    return Topology(rank, nodes, hosts, local_ranks)


def _run_identity(nonce: str) -> str:
    """Return the name of a run: the launcher's job id, for people, and rank 0's nonce, as job ids may repeat."""
    job = re.sub(r"[^A-Za-z0-9_-]", "-", detect_launch().job or "run")[:100]
    return f"{job.lstrip('-') or 'run'}-{nonce}"


@functools.cache
def _close_at_exit() -> None:
    """Close at exit: to report why this rank ends, and as a Gloo group that outlives the interpreter aborts it."""

    def close() -> None:
        for comm in list(_communicators):
            comm.close(getattr(sys, "last_value", None))  # the uncaught error, if there was one

    atexit.register(close)
