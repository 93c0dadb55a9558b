"""The start of the failure board of ranks that can exchange bytes."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
from typing import Any

from statexchange.comm.backends.backend import Backend
from statexchange.comm.failure.coordinator import Coordinator
from statexchange.comm.failure.detector import Board
from statexchange.comm.failure.member import Offer, visit
from statexchange.comm.network import own_addresses
from statexchange.comm.topology import Place
from statexchange.comm.wait import Wait
from statexchange.processes import process_start

__all__ = ["open_board"]

_log = logging.getLogger(__name__)


def open_board(carrier: Backend, place: Place, timeout_s: float) -> Board | None:
    """The failure board of `carrier`'s ranks; None, on all of them, if some cannot reach it. Collective."""
    wait = Wait(timeout_s, "the meeting of all ranks")
    listener, offered = _serve(carrier.world_size) if carrier.rank == 0 else (None, None)
    try:
        ours = json.dumps([os.getpid(), process_start(os.getpid()) or 0, offered]).encode()
        answers = [json.loads(answer) for answer in carrier.exchange(ours, wait)]
    except BaseException:
        if listener is not None:
            listener.close()
        raise
    offer = Offer(**answers[0][2]) if answers[0][2] is not None else None
    board = _take_part(place, [(pid, start) for pid, start, _ in answers], listener, offer)
    return _agree(board, carrier, wait, offer)


def _agree(board: Board | None, carrier: Backend, wait: Wait, offer: Offer | None) -> Board | None:
    """`board`, if everybody has one."""
    try:
        answers = carrier.exchange(b"1" if board is not None else b"0", wait)
    except BaseException:
        if board is not None:
            board.close()
        raise
    without = [rank for rank, answer in enumerate(answers) if answer != b"1"]
    if not without:
        return board
    if board is not None:
        board.close()
    if carrier.rank == 0:
        where = f"{', '.join(offer.addresses)}, port {offer.port}" if offer is not None else "any address"
        _log.warning(
            "ranks %s cannot reach rank 0 at %s: only the transport and deadlines will tell of ranks that die",
            without,
            where,
        )
    return None


def _serve(world_size: int) -> tuple[socket.socket | None, dict[str, Any] | None]:
    """A socket at which to be called, and what the others need to know of it."""
    try:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        listener = socket.create_server(("", 0), family=family, backlog=world_size + 64, dualstack_ipv6=both)
    except OSError:
        return None, None  # said to the others as "no": all do without
    # Names last, as resolving them may take long.
    addresses = list(dict.fromkeys([*own_addresses(), "127.0.0.1", socket.gethostname()]))
    offer = {"addresses": addresses, "port": listener.getsockname()[1], "nonce": secrets.token_hex(16)}
    return listener, offer


def _take_part(
    place: Place, processes: list[tuple[int, int]], listener: socket.socket | None, offer: Offer | None
) -> Board | None:
    """This rank's side, started; None if it cannot be."""
    if offer is None:
        return None
    board: Board | None
    board = (
        Coordinator(place, processes, listener, offer.nonce) if listener is not None else visit(place, processes, offer)
    )
    if board is not None:
        board.start()
    return board
