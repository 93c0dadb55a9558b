"""The start of failure detection among ranks that can exchange bytes over a bootstrap backend.

Rank 0 listens on all interfaces and sends its addresses, its port and a nonce; the others connect. Then all ranks
report whether they are connected. All ranks get a detector, or none: the coordinator cannot watch a rank that has no
connection, and would wait for its answers in vain.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket

from statexchange.comm import network
from statexchange.comm.backends.backend import Backend
from statexchange.comm.failure.coordinator import Coordinator
from statexchange.comm.failure.detector import FailureDetector
from statexchange.comm.failure.member import CoordinatorAddress, connect_member
from statexchange.comm.failure.monitor import UNWATCHED, FailureMonitor
from statexchange.comm.topology import Topology
from statexchange.comm.wait import Wait

_log = logging.getLogger(__name__)


def start_failure_detector(bootstrap: Backend, topology: Topology, timeout_s: float) -> FailureMonitor:
    """Start failure detection among the ranks of `bootstrap`.

    Collective. Blocks until all ranks have called.

    Args:
        bootstrap: a backend over which the ranks exchange bytes.
        topology: which rank is on which host.
        timeout_s: how long to wait for the other ranks.

    Returns:
        The detector of this rank, started; UNWATCHED, on all ranks, if some cannot reach rank 0, with a warning.

    Raises:
        StallError: a rank did not call in time.
    """
    wait = Wait(timeout_s, "the formation of the communicator")
    listener: socket.socket | None = None
    address: CoordinatorAddress | None = None
    detector: FailureDetector | None = None
    if bootstrap.rank == 0:
        listener, address = _listen(bootstrap.world_size)
    try:
        offer = json.dumps([os.getpid(), address]).encode()
        answers = list(map(json.loads, bootstrap.all_gather_bytes(offer, wait)))
        pids = [pid for pid, _ in answers]
        if answers[0][1] is not None:
            coordinator = CoordinatorAddress(*answers[0][1])
            if listener is not None:
                detector = Coordinator(topology, pids, listener, coordinator.nonce)
            else:
                detector = connect_member(topology, coordinator)
        state = b"no detector"
        if detector is not None:
            detector.start()
            state = b""
        states = bootstrap.all_gather_bytes(state, wait)
    except BaseException:
        for unused in (detector, listener):
            if unused is not None:
                unused.close()
        raise
    unconnected = [rank for rank, state in enumerate(states) if state]
    if detector is not None and not unconnected:
        return detector
    if detector is not None:
        detector.close()
    if bootstrap.rank == 0:
        where = "any address"
        if address is not None:
            where = f"{', '.join(address.addresses)}, port {address.port}"
        _log.warning(
            "ranks %s cannot reach rank 0 at %s: only the transport and deadlines will report ranks that die",
            unconnected,
            where,
        )
    return UNWATCHED


def _listen(world_size: int) -> tuple[socket.socket | None, CoordinatorAddress | None]:
    """Return a listening socket, and the address that members connect to; (None, None) if this host cannot listen."""
    try:
        # The addresses that are sent are of IPv4. The host's name, which is among them, may also lead to IPv6.
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        # All members connect at once, and any other program may, too.
        listener = socket.create_server(("", 0), family=family, backlog=world_size + 64, dualstack_ipv6=is_dual)
    except OSError:
        return None, None  # sent to the others as None: all do without
    return listener, CoordinatorAddress(network.addresses(), listener.getsockname()[1], secrets.token_hex(16))
