"""Rendezvous: give all ranks one key-value store, through a launcher, a TCP address or a directory.

Who serves the store, and how the other ranks find it:

    torchrun                     torchrun's agent; the environment has the address
    Open MPI, MPICH              rank 0, at a port that the system picks and rank 0 sends over MPI
    Slurm, RANK and WORLD_SIZE   rank 0, at MASTER_ADDR and MASTER_PORT
    tcp://host:port              rank 0, at that address
    file:///directory            rank 0; a file in the directory has the address (rendezvous_directory.py)

States. Each rank *joins* the store by writing a key; rank 0 waits for all, and then writes the decision, that the
rendezvous is complete or has failed; the other ranks poll for that key (tcp_store.py lists all keys).
Under MPI nothing is joined: all ranks have taken part when they have the address.

Failure. Rank 0 gives up at its deadline, and raises StallError with the ranks that have not joined; the ranks that have
joined read the error and raise it, too. They also have deadlines of their own. A rank that dies after it has joined is
not noticed here, but when the communicator is formed. When rank 0 dies, its server ends: the others look for it again
until their deadline, since another server may follow; without torchrun's they raise at once.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

from statexchange.comm import rendezvous_directory, tcp_store
from statexchange.comm.backends.backend import Backend
from statexchange.comm.backends.store import StoreBootstrap
from statexchange.comm.backends.torch_groups import as_timedelta, torch_errors
from statexchange.comm.tcp_store import Joining, LostServerError, Place, Server
from statexchange.comm.wait import Wait
from statexchange.errors import InvalidArgumentError, NotInitializedError, StateExchangeError
from statexchange.settings import Launch, has_agent_store

_stores: Any = dist  # torch exports its stores there, but not for type checkers
_uses_of_torchruns_store = itertools.count(1)
_POLL_S = 0.02
_MANY_RANKS = 64  # with more ranks each looks less often, so that the load of a file server does not grow

# The nonces of servers at which this process has completed a rendezvous. Such a server may still run, as rank 0 has not
# shut down yet; a later rendezvous at the same address waits for a new server.
_completed: set[str] = set()


def by_launcher(launch: Launch, timeout_s: float) -> StoreBootstrap:
    """Return a bootstrap backend at a store that all ranks of a launcher share. Collective.

    The top of this module lists who serves it. In torchrun's store each use has its own keys, so that ranks may call
    this again after a shutdown. Where Slurm sets no MASTER_ADDR and MASTER_PORT, the store is on the step's first host,
    at a port derived from the ids of job and step. Raises StallError with the ranks that did not join in time.
    """
    if launch.launcher in ("openmpi", "mpich"):
        from statexchange.comm.backends import mpi

        return _by_mpi(mpi.MPIBackend(mpi.world(launch), timeout_s=timeout_s), timeout_s)
    if launch.world_size == 1:
        return StoreBootstrap(_stores.HashStore(), 0, range(1))
    if launch.master is None:
        raise NotInitializedError(
            f"{launch.variable} is {launch.world_size}, but there is no address for a rendezvous: set MASTER_ADDR and "
            'MASTER_PORT, give init a rendezvous ("file:///a/shared/directory"), or start under torchrun or mpiexec'
        )
    if launch.launcher == "torchrun" and has_agent_store():
        return _at_torchruns_store(Joining(launch.rank, launch.world_size, timeout_s, "torchrun's store"))
    return _at_address(*launch.master, launch.rank, launch.world_size, timeout_s)


def _at_torchruns_store(joining: Joining) -> StoreBootstrap:
    with torch_errors(Wait(joining.timeout_s, joining.where)):
        store, _, _ = next(iter(_stores.rendezvous("env://", timeout=as_timedelta(joining.timeout_s))))
    # torchrun's store lives on while a process forms and closes communicators: each has keys of its own.
    store = _stores.PrefixStore(f"statexchange/rendezvous/{next(_uses_of_torchruns_store)}", store)
    try:
        joining.join(store)
    except LostServerError as error:
        raise NotInitializedError(f"{joining.where} has ended: {error}") from error
    return StoreBootstrap(store, joining.rank, range(joining.world_size))


def _by_mpi(backend: Backend, timeout_s: float) -> StoreBootstrap:
    """Return a bootstrap backend at a store of rank 0, whose address rank 0 sends over MPI. Collective."""
    host = socket.gethostname()
    server = offer = None
    if backend.rank == 0:
        server = Server(host, 0, timeout_s)
        offer = [host, server.port, server.nonce]
    offers = backend.all_gather_bytes(json.dumps(offer).encode(), Wait(timeout_s, "the choice of a port"))
    host, port, nonce = json.loads(offers[0])
    place = Place([host], port, nonce, host)
    try:
        store, _ = tcp_store.connect(place, timeout_s)
    except OSError as error:
        text = tcp_store.unreachable_text(backend.rank, place, error)
        raise NotInitializedError(text, rank=backend.rank) from error
    return StoreBootstrap(store, backend.rank, range(backend.world_size), server=server)


def at_url(url: str, rank: int, world_size: int, timeout_s: float) -> StoreBootstrap:
    """Return a bootstrap backend at a store that exactly these ranks share. Collective.

    `url` is "file:///directory", which all ranks see and which is made if need be, or "tcp://host:port", where rank 0
    listens. Raises StallError with the ranks that did not join in time or left early, NotInitializedError if rank 0
    runs but cannot be reached, StorageError, or InvalidArgumentError.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # half a bracket of IPv6, or a port that is no number: refused below, as the empty URL
        parts, port = urlsplit(""), None
    is_local = parts.netloc in ("", "localhost") and "\0" not in parts.path
    if parts.scheme == "file" and parts.path.startswith("/") and is_local:
        if world_size > 1:
            return _in_directory(Path(parts.path), rank, world_size, timeout_s)
    elif parts.scheme == "tcp" and parts.hostname and port is not None:
        if world_size > 1:
            return _at_address(parts.hostname, port, rank, world_size, timeout_s)
    else:
        raise InvalidArgumentError(f"rendezvous must be file:///directory or tcp://host:port, not {url!r}")
    # A world of one meets nobody: it needs a store of this process alone, but its URL is checked all the same.
    return StoreBootstrap(_stores.HashStore(), 0, range(1))


def _at_address(host: str, port: int, rank: int, world_size: int, timeout_s: float) -> StoreBootstrap:
    joining = Joining(rank, world_size, timeout_s, f"tcp://{host}:{port}")
    if rank == 0:
        return _lead(Server(host, port, timeout_s), joining)
    return _follow(joining, lambda: [Place([host], port)])


def _in_directory(path: Path, rank: int, world_size: int, timeout_s: float) -> StoreBootstrap:
    joining = Joining(rank, world_size, timeout_s, str(path))
    if rank != 0:
        return _follow(joining, lambda: rendezvous_directory.places_in(path))
    server = Server("localhost", 0, timeout_s)
    return _lead(server, joining, rendezvous_directory.announced(path, server))


def _lead(
    server: Server, joining: Joining, announced: contextlib.AbstractContextManager[None] | None = None
) -> StoreBootstrap:
    """Return a bootstrap backend at the store of `server`, of this rank, once all ranks have joined it. Collective."""
    try:
        with announced or contextlib.nullcontext():
            store, _ = tcp_store.connect(Place(["localhost"], server.port, server.nonce), joining.timeout_s)
            joining.join(store)
    except BaseException:
        server.close()  # else a caller that keeps the error would keep the port open
        raise
    return StoreBootstrap(store, 0, range(joining.world_size), server=server)


def _follow(joining: Joining, places: Callable[[], Sequence[Place]]) -> StoreBootstrap:
    """Return a bootstrap backend at the store that rank 0 serves, or will serve, at one of `places`. Collective."""
    reason = lost = ""  # why the last attempt failed, and the last one after which a server was lost
    while True:
        for place in places():
            # At the deadline one attempt is made all the same, so that the error can tell its reason.
            if place.nonce in _completed or (reason and time.monotonic() > joining.deadline):
                continue
            try:
                store, server = tcp_store.connect(place, joining.timeout_s, joining.deadline)
                if server not in _completed:  # a URL of TCP does not tell the nonce: only the server does
                    joining.join(store)
                    _completed.add(server)
                    return StoreBootstrap(store, joining.rank, range(joining.world_size))
            except StateExchangeError:  # of which a StallError is an OSError
                raise
            except LostServerError as error:
                # It was that of an earlier rendezvous, or of one that was given up: another server may follow.
                reason = lost = f"rank 0 had joined, but left before all had ({error})"
            except OSError as error:
                reason = str(error)
                if place.nonce is not None:
                    reason = tcp_store.unreachable_text(joining.rank, place, error.strerror or error)
        if time.monotonic() > joining.deadline:
            raise joining.absent_error([0], lost or reason)
        time.sleep(_POLL_S * max(1.0, joining.world_size / _MANY_RANKS))
