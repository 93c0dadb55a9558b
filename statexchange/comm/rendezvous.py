"""How ranks find each other: through a launcher's store, at a TCP address, or in a directory that all of them see.

Every way ends with a key-value store that rank 0 serves over TCP (tcp_store.py); in a directory the ranks exchange only
where that store is (rendezvous_directory.py).
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

from statexchange.comm import tcp_store
from statexchange.comm.backends.backend import Backend
from statexchange.comm.backends.torch_groups import torch_errors, unused_prefix
from statexchange.comm.rendezvous_directory import DirectoryRendezvous
from statexchange.comm.tcp_store import LostServerError, Server, SharedStore
from statexchange.comm.wait import Wait
from statexchange.errors import (
    InvalidArgumentError,
    NotInitializedError,
    StateExchangeError,
)
from statexchange.settings import Launch, has_agent_store

__all__ = ["store_at", "store_of"]

_stores: Any = dist  # torch exports its stores there, but not for type checkers
_POLL_S = 0.02
_CONNECT_S = 10.0

# Servers at which this process has completed a rendezvous: one that still runs, because rank 0 has not shut down yet,
# is not the one that rank 0 is about to start at the same address.
_completed: set[str] = set()


def store_of(launch: Launch, timeout_s: float) -> SharedStore:
    """Return a store of all ranks of a launcher. Collective.

    torchrun's own, where each use has keys of its own, so that ranks may meet again after a shutdown; under MPI one
    whose port the system picks on rank 0; under Slurm, and where a script sets RANK and WORLD_SIZE itself, at
    MASTER_ADDR and MASTER_PORT; where Slurm sets none, on the step's first host, at a port that follows from the ids of
    job and step. Raises StallError naming the ranks that did not come.
    """
    if launch.launcher == "torchrun" and has_agent_store():
        return _torchruns_store(timeout_s)
    if launch.launcher in ("openmpi", "mpich"):
        from statexchange.comm.backends import mpi

        return _store_by_mpi(mpi.MPIBackend(mpi.world(launch), timeout_s=timeout_s), timeout_s)
    if launch.world_size == 1:
        return SharedStore(_stores.HashStore(), 0, 1)
    if launch.master is None:
        raise NotInitializedError(
            f"{launch.variable} says {launch.world_size} ranks, but not where they meet: set MASTER_ADDR and "
            'MASTER_PORT, give init a rendezvous ("file:///a/shared/directory"), or start under torchrun or mpiexec'
        )
    return _store_at_address(*launch.master, launch.rank, launch.world_size, timeout_s)


def _torchruns_store(timeout_s: float) -> SharedStore:
    deadline = time.monotonic() + timeout_s
    try:
        with torch_errors(Wait(timeout_s, "torchrun's store")):
            store, rank, size = next(iter(_stores.rendezvous("env://", timeout=tcp_store.as_timedelta(timeout_s))))
    except ValueError as error:
        if isinstance(error, StateExchangeError):
            raise
        raise NotInitializedError(f"the environment speaks of ranks, but not of where they meet: {error}") from error
    store = _stores.PrefixStore(unused_prefix("meeting"), store)
    where = "torchrun's store"
    try:
        tcp_store.enroll(store, rank, secrets.token_hex(16), where)
        if rank == 0:
            _lead_at_store(store, size, deadline, timeout_s, where)
        else:
            tcp_store.wait_until_complete(store, size, deadline, timeout_s, where)
    except LostServerError as error:
        raise NotInitializedError(f"{where} has ended: {error}") from error
    return SharedStore(store, rank, size)


def _lead_at_store(store: Any, world_size: int, deadline: float, timeout_s: float, where: str) -> None:
    """Let all ranks go on when all have joined `store`. Rank 0 only."""
    with tcp_store.failure_announced(store, world_size):
        tcp_store.wait_for_all(store, world_size, deadline, timeout_s, where, lambda: None)
    tcp_store.complete(store)


def _store_by_mpi(backend: Backend, timeout_s: float) -> SharedStore:
    host = socket.gethostname()
    wait = Wait(timeout_s, "the choice of a port")
    server: Server | None = None
    offer: list[Any] = [host, 0, "", None]
    if backend.rank == 0:
        try:
            server = Server.at(host, 0, timeout_s)
            offer[1:3] = server.port, server.nonce
        except NotInitializedError as error:
            offer[3] = error.message
    host, port, nonce, refusal = json.loads(backend.all_gather_bytes(json.dumps(offer).encode(), wait)[0])
    if refusal is not None:
        raise NotInitializedError(f"rank 0 on {host}: {refusal}", rank=0)
    try:
        store = tcp_store.connect(host, port, timeout_s, min(timeout_s, _CONNECT_S))
    except OSError as error:
        raise NotInitializedError(
            tcp_store.unreachable(backend.rank, host, host, port, error), rank=backend.rank
        ) from error
    return SharedStore(tcp_store.namespaced(store, nonce), backend.rank, backend.world_size, server)


def store_at(url: str, rank: int, world_size: int, timeout_s: float) -> SharedStore:
    """Return a store that exactly these ranks share. Collective.

    `url` is "file:///directory", which all ranks see and which is made if need be, or "tcp://host:port", where rank 0
    listens. Raises StallError naming the ranks that did not come or did not stay, NotInitializedError where rank 0 is
    there but cannot be reached, StorageError, or InvalidArgumentError.
    """
    parts, port = urlsplit(url), _port_of(url)
    is_local = parts.netloc in ("", "localhost") and "\0" not in parts.path
    in_directory = parts.scheme == "file" and parts.path.startswith("/") and is_local
    if not in_directory and not (parts.scheme == "tcp" and parts.hostname and port is not None):
        raise InvalidArgumentError(f"rendezvous must be file:///directory or tcp://host:port, not {url!r}")
    if world_size == 1:
        return SharedStore(_stores.HashStore(), 0, 1)
    if in_directory:
        return DirectoryRendezvous(Path(parts.path), rank, world_size, timeout_s).store()
    assert parts.hostname is not None
    assert port is not None
    return _store_at_address(parts.hostname, port, rank, world_size, timeout_s)


def _port_of(url: str) -> int | None:
    """Return a URL's port; None if it names none, or what is none."""
    try:
        return urlsplit(url).port
    except ValueError:
        return None


# At an address that all ranks were given


def _store_at_address(host: str, port: int, rank: int, world_size: int, timeout_s: float) -> SharedStore:
    deadline = time.monotonic() + timeout_s
    where = f"tcp://{host}:{port}"
    if rank != 0:
        return SharedStore(_joined_store(host, port, rank, world_size, deadline, timeout_s), rank, world_size)
    server = Server.at(host, port, timeout_s)
    try:
        store = tcp_store.namespaced(tcp_store.connect(host, server.port, timeout_s, timeout_s), server.nonce)
        tcp_store.enroll(store, 0, server.nonce, where)
        _lead_at_store(store, world_size, deadline, timeout_s, where)
    except BaseException:
        server.close()  # an error that somebody keeps must not keep the port
        raise
    return SharedStore(store, 0, world_size, server)


def _joined_store(host: str, port: int, rank: int, world_size: int, deadline: float, timeout_s: float) -> Any:
    """Return a client of the store that rank 0 serves or will serve, once all ranks have joined it."""
    where = f"tcp://{host}:{port}"
    nonce = secrets.token_hex(16)
    has_been_there = False
    reason: object = ""
    while True:
        try:
            store = tcp_store.connect(host, port, timeout_s, deadline - time.monotonic())
            server = tcp_store.server_nonce(store)
            if server is not None and server not in _completed:
                has_been_there = True
                store = tcp_store.namespaced(store, server)
                tcp_store.enroll(store, rank, nonce, where)
                tcp_store.wait_until_complete(store, world_size, deadline, timeout_s, where)
                _completed.add(server)
                return store
        except StateExchangeError:  # of which a StallError is an OSError
            raise
        except (OSError, LostServerError) as error:
            reason = error  # perhaps the server of an earlier rendezvous, or one that gave up: another may follow
        if time.monotonic() > deadline:
            if has_been_there:
                raise tcp_store.left([0], where, timeout_s)
            raise tcp_store.absent([0], where, timeout_s, reason)
        time.sleep(_POLL_S)
