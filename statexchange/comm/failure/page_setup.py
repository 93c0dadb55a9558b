"""Set up a control page among ranks that can so far only exchange bytes.

Whether ranks can share memory is tried, not derived from host names, as containers may separate /proc and /dev/shm.
Rank 0 makes an arena, first as a memfd, then as a file in /dev/shm; all ranks attach to it, and write their process ids
into it; and each reports whether it sees the processes of all others. If any of this fails on one rank, no rank uses
the page.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from typing import Any, TypeAlias

from statexchange.comm.failure.control_page import ControlPage
from statexchange.errors import StateExchangeError
from statexchange.processes import host_identity, pid_namespace
from statexchange.shared_memory import Arena, Attached, Kind, attach

__all__ = ["open_control_page"]

AllGatherBytes: TypeAlias = Callable[[bytes], list[bytes]]
"""Returns every rank's bytes on all ranks, in rank order."""


def _is_supported() -> bool:
    """Whether this machine keeps stores in order and has what the page needs."""
    return platform.machine() in ("x86_64", "AMD64") and hasattr(os, "memfd_create")


def open_control_page(rank: int, world_size: int, all_gather_bytes: AllGatherBytes) -> ControlPage | None:
    """Open a control page; return None, on all ranks, if they cannot share memory or see each other's processes.

    Collective.
    """
    own = json.dumps([host_identity(), pid_namespace(), _is_supported()]).encode()
    hosts = [json.loads(answer) for answer in all_gather_bytes(own)]
    for host, namespace, is_supported in hosts:
        if [host, namespace] != hosts[0][:2] or not is_supported:
            return None
    for kind in ("memfd", "file"):
        page = _try_kind(kind, rank, world_size, all_gather_bytes)
        if page is not None:
            return page
    return None


def _try_kind(kind: Kind, rank: int, world_size: int, all_gather_bytes: AllGatherBytes) -> ControlPage | None:
    """Open the control page with one kind of shared memory."""
    arena: Arena | None = None
    offer: dict[str, Any] | None = None
    if rank == 0:
        try:
            arena = Arena.create(ControlPage.nbytes(world_size), kind)
            offer = arena.address
        except StateExchangeError:
            offer = None  # sent to the others as null: all fall back together
    address = json.loads(all_gather_bytes(json.dumps(offer).encode())[0])
    attached = _try_attach(address)
    have_all_attached = _holds_on_all(attached is not None, all_gather_bytes)
    if arena is not None:
        arena.close()
    if not have_all_attached or attached is None:
        return None
    page = ControlPage(attached.view, rank, world_size, kind)
    all_gather_bytes(b"")  # every row has its pid before any rank reads the others
    can_see_all = all(page.can_see(other) for other in range(world_size))  # false across PID namespaces
    return page if _holds_on_all(can_see_all, all_gather_bytes) else None


def _holds_on_all(holds: bool, all_gather_bytes: AllGatherBytes) -> bool:
    """Whether a condition holds on all ranks. Collective."""
    return all(answer == b"1" for answer in all_gather_bytes(b"1" if holds else b"0"))


def _try_attach(address: dict[str, Any] | None) -> Attached | None:
    try:
        return attach(address) if address is not None else None
    except StateExchangeError:
        return None
