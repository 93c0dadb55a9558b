"""The formation of a communicator: choose the backend, and start failure detection.

The ranks begin with a bootstrap backend, over which they can only exchange bytes. They exchange their hosts, test
whether all of them share memory, and start failure detection: the control page on one host, the failure detector
between hosts. Only then do they start the transport, so that a rank that fails during that is reported to all.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import logging
import os
import platform
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from statexchange.comm import lifetime
from statexchange.comm.backends.backend import Backend
from statexchange.comm.backends.single import SingleBackend
from statexchange.comm.communicator import Communicator
from statexchange.comm.failure.control_page import ControlPage, open_control_page
from statexchange.comm.failure.monitor import UNWATCHED, FailureMonitor, forming_group
from statexchange.comm.failure.start import start_failure_detector
from statexchange.comm.session import Session
from statexchange.comm.topology import RankInfo, Topology, launchers_local_rank, run_identity, topology_of
from statexchange.comm.wait import Wait
from statexchange.errors import UnsupportedError, from_record, missing_extra, to_record
from statexchange.processes import host_identity, pid_namespace

StartDevices: TypeAlias = Callable[[], Backend | None]
# The fingerprint of a hierarchical collective's steps within a host. It is a constant: all ranks have compared the
# call's own fingerprint before.
_STEP_ON_NODE = 1
_log = logging.getLogger("statexchange")


def form_communicator(
    bootstrap: Backend,
    timeout_s: float,
    *,
    prefer: str = "auto",
    check: bool = True,
    start_devices: StartDevices = lambda: None,
) -> Communicator:
    """Form a communicator of the ranks that can exchange messages over `bootstrap`. Collective.

    `prefer` is "auto", for shared memory between ranks of one host and the transport between hosts; "shm", which
    requires shared memory; or "transport", for the transport alone. `start_devices` is called once failure detection
    runs, and returns the backend for tensors of GPUs, if there is one. It may be called twice.
    """
    try:
        if bootstrap.world_size == 1:
            # For what it starts, as torch's default group for init("nccl"). A single rank moves nothing by it.
            start_devices()
            topology = Topology(0, (0,), (platform.node(),))
            session = Session(SingleBackend(), bootstrap, None, UNWATCHED, topology, timeout_s)
            run = run_identity(secrets.token_hex(8))
        else:
            session, run = _form_session(bootstrap, timeout_s, prefer, check, start_devices)
        return lifetime.registered(Communicator(session, run, form_communicator))
    except BaseException:
        bootstrap.close()  # else a caller that keeps the error would keep rank 0's port open
        raise


def _form_session(
    bootstrap: Backend, timeout_s: float, prefer: str, check: bool, start_devices: StartDevices
) -> tuple[Session, str]:
    """Return the session of all ranks and the name of their run. Collective."""

    def all_gather_bytes(payload: bytes) -> list[bytes]:
        return bootstrap.all_gather_bytes(payload, Wait(timeout_s, "the formation of the communicator"))

    answers = all_gather_bytes(json.dumps(_info(bootstrap)).encode())
    infos = [RankInfo(*json.loads(answer)) for answer in answers]
    topology = topology_of(infos, bootstrap.rank)
    page = _page_of(bootstrap, infos, all_gather_bytes)
    run = run_identity(infos[0].nonce)
    # All ranks take the same branches below, as they decide by what all of them have sent.
    if not all(info.has_torch for info in infos):
        if prefer == "shm":
            raise missing_extra('init("shm")', "torch")
        prefer = "transport"  # the backend over shared memory needs torch
    backend: Backend | None
    if page is not None:
        with _failing_together(page, topology):
            devices = start_devices()
            if prefer == "transport":
                transport = backend = bootstrap.transport(timeout_s)
            else:
                transport, backend = bootstrap, _shared_memory_backend(page, bootstrap, timeout_s)
        if backend is not None:  # else there is too little memory for the data: the page is given up, too
            session = Session(backend, transport, page, page, topology, timeout_s, check=check, device_backend=devices)
            return session, run
    _report_no_shared_memory(topology, prefer)
    detector = start_failure_detector(bootstrap, topology, timeout_s)
    with _failing_together(detector, topology):
        devices = start_devices()
        transport = backend = bootstrap.transport(timeout_s)
        shares_hosts = 1 < len(topology.leaders) < len(topology.nodes)  # several hosts, and one with several ranks
        if prefer == "auto" and shares_hosts:
            backend = _hierarchical_backend(transport, topology, infos, timeout_s)
    session = Session(backend, transport, None, detector, topology, timeout_s, check=check, device_backend=devices)
    return session, run


def _lacking_for_memory() -> str:
    """Return what this machine lacks to share memory between ranks; "" if it can."""
    if platform.machine() not in ("x86_64", "AMD64"):  # what the control page needs: see the top of its file
        return f"a processor of {platform.machine()} may reorder stores"
    if not hasattr(os, "memfd_create"):
        return "this system has no memfd"
    return ""


def _info(bootstrap: Backend) -> RankInfo:
    memory = None
    if not _lacking_for_memory():
        # Ranks open each other's memory by process id, so these must mean the same to both.
        memory = f"{host_identity()} {pid_namespace()}"
    return RankInfo(
        host_identity(),
        memory,
        platform.node(),
        secrets.token_hex(8),
        launchers_local_rank(bootstrap.rank, bootstrap.world_size),
        importlib.util.find_spec("torch") is not None,
    )


def _page_of(
    bootstrap: Backend, infos: Sequence[RankInfo], all_gather_bytes: Callable[[bytes], list[bytes]]
) -> ControlPage | None:
    """Return a control page of the ranks of `bootstrap`; None, on all, if they cannot share memory. Collective."""
    memories = {info.memory for info in infos}
    if None in memories or len(memories) > 1:
        return None
    return open_control_page(bootstrap.rank, bootstrap.world_size, all_gather_bytes)


@contextlib.contextmanager
def _failing_together(monitor: FailureMonitor, topology: Topology) -> Iterator[None]:
    """A block of `init`: an error of one rank is raised on all ranks, and names that rank. Collective."""
    try:
        with forming_group(monitor, topology.hosts):
            yield
    except BaseException as error:
        # As an error of this package that names this rank: monitors send no others.
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
    transport: Backend, topology: Topology, infos: Sequence[RankInfo], timeout_s: float
) -> Backend:
    """Return a backend with shared memory, or else the transport, within hosts, and the transport between.

    Collective.
    """
    from statexchange.comm.backends.hierarchical import HierarchicalBackend

    node: Backend = SingleBackend()
    enter_on_node = None
    if len(topology.node_ranks) > 1:
        local = transport.new_group(topology.node_ranks, timeout_s)

        def all_gather_bytes(payload: bytes) -> list[bytes]:
            return local.all_gather_bytes(payload, Wait(timeout_s, "the formation of a host's group"))

        page = _page_of(local, [infos[rank] for rank in topology.node_ranks], all_gather_bytes)
        shared: Backend | None = None
        if page is not None:
            shared = _shared_memory_backend(page, local, timeout_s)
            enter_on_node = functools.partial(page.enter, _STEP_ON_NODE)
        # Without shared memory a host's ranks reduce over the transport, so that its data still leaves it only once.
        node = shared or local.transport(timeout_s)
    leaders = None
    if topology.rank in topology.leaders:
        leaders = transport.new_group(topology.leaders, timeout_s).transport(timeout_s)
    return HierarchicalBackend(transport, node, leaders, topology, enter_on_node)


def _report_no_shared_memory(topology: Topology, prefer: str) -> None:
    """Raise if shared memory is required; else warn if the ranks share a host. All ranks call this, or none."""
    hosts = sorted(set(topology.hosts))
    lacking = _lacking_for_memory()
    if prefer == "shm":
        needs = (
            "they must run on one host, see each other's processes and open files in /proc, and have room for a few "
            "MiB of each rank"
        )
        raise UnsupportedError(f"the ranks, on {', '.join(hosts)}, cannot share memory: {lacking or needs}")
    if len(topology.leaders) == 1 and topology.rank == 0:
        _log.warning(
            "the ranks on %s cannot share memory (%s): messages go over sockets, slower",
            hosts[0],
            lacking or "containers?",
        )
