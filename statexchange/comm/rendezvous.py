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

import json
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

from statexchange.comm import tcp_store
from statexchange.comm.backends.backend import Backend
from statexchange.comm.backends.store import StoreBootstrap
from statexchange.comm.backends.torch_groups import as_timedelta, torch_errors, unused_prefix
from statexchange.comm.rendezvous_directory import MeetingDirectory
from statexchange.comm.tcp_store import Joining, LostServerError, Place, Server
from statexchange.comm.wait import Wait
from statexchange.errors import InvalidArgumentError, NotInitializedError, StateExchangeError
from statexchange.settings import Launch, has_agent_store

__all__ = ["at_url", "by_launcher"]

_stores: Any = dist  # torch exports its stores there, but not for type checkers
_POLL_S = 0.02

# The nonces of servers at which this process has completed a rendezvous. Such a server may still run, as rank 0 has not
# shut down yet; a later rendezvous at the same address waits for a new server.
_completed: set[str] = set()


def by_launcher(launch: Launch, timeout_s: float) -> StoreBootstrap:
    """Return a bootstrap backend at a store that all ranks of a launcher share. Collective.

    The top of this module lists who serves it. In torchrun's store each use has its own keys, so that ranks may call
    this again after a shutdown. Where Slurm sets no MASTER_ADDR and MASTER_PORT, the store is on the step's first host,
    at a port derived from the ids of job and step. Raises StallError with the ranks that did not join in time.
    """
    if launch.launcher == "torchrun" and has_agent_store():
        return _torchruns_store(timeout_s)
    if launch.launcher in ("openmpi", "mpich"):
        from statexchange.comm.backends import mpi

        return _store_by_mpi(mpi.MPIBackend(mpi.world(launch), timeout_s=timeout_s), timeout_s)
    if launch.world_size == 1:
        return StoreBootstrap(_stores.HashStore(), 0, range(1))
    if launch.master is None:
        raise NotInitializedError(
            f"{launch.variable} is {launch.world_size}, but there is no address for a rendezvous: set MASTER_ADDR and "
            'MASTER_PORT, give init a rendezvous ("file:///a/shared/directory"), or start under torchrun or mpiexec'
        )
    return _store_at_address(*launch.master, launch.rank, launch.world_size, timeout_s)


def _torchruns_store(timeout_s: float) -> StoreBootstrap:
    began = time.monotonic()
    try:
        with torch_errors(Wait(timeout_s, "torchrun's store")):
            store, rank, size = next(iter(_stores.rendezvous("env://", timeout=as_timedelta(timeout_s))))
    except ValueError as error:
        if isinstance(error, StateExchangeError):
            raise
        raise NotInitializedError(f"the environment lacks the address of torchrun's store: {error}") from error
    store = _stores.PrefixStore(unused_prefix("rendezvous"), store)
    joining = Joining(rank, size, timeout_s, "torchrun's store", began)
    try:
        joining.join(store, secrets.token_hex(16))
    except LostServerError as error:
        raise NotInitializedError(f"{joining.where} has ended: {error}") from error
    return StoreBootstrap(store, rank, range(size))


def _store_by_mpi(backend: Backend, timeout_s: float) -> StoreBootstrap:
    """Return a bootstrap backend at a store of rank 0, whose address rank 0 sends over MPI. Collective."""
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
    parts, port = urlsplit(url), _port_of(url)
    is_local = parts.netloc in ("", "localhost") and "\0" not in parts.path
    is_directory = parts.scheme == "file" and parts.path.startswith("/") and is_local
    is_address = parts.scheme == "tcp" and parts.hostname and port is not None
    if not is_directory and not is_address:
        raise InvalidArgumentError(f"rendezvous must be file:///directory or tcp://host:port, not {url!r}")
    if world_size == 1:
        return StoreBootstrap(_stores.HashStore(), 0, range(1))
    if is_directory:
        return _store_in_directory(Path(parts.path), rank, world_size, timeout_s)
    assert parts.hostname is not None
    assert port is not None
    return _store_at_address(parts.hostname, port, rank, world_size, timeout_s)


def _port_of(url: str) -> int | None:
    """Return the port of a URL; None if it has none, or not a valid one."""
    try:
        return urlsplit(url).port
    except ValueError:
        return None


def _store_at_address(host: str, port: int, rank: int, world_size: int, timeout_s: float) -> StoreBootstrap:
    joining = Joining(rank, world_size, timeout_s, f"tcp://{host}:{port}")
    place = Place([host], port)
    if rank == 0:
        return _lead(Server.at(host, port, timeout_s), joining)
    return StoreBootstrap(_follow(joining, lambda: [place]), rank, range(world_size))


def _store_in_directory(path: Path, rank: int, world_size: int, timeout_s: float) -> StoreBootstrap:
    joining = Joining(rank, world_size, timeout_s, str(path))
    directory = MeetingDirectory(path, joining)
    try:
        if rank == 0:
            return _lead(Server.at("localhost", 0, timeout_s), joining, directory)
        store = _follow(joining, directory.places, directory.note_failure, directory.poll_s)
        return StoreBootstrap(store, rank, range(world_size))
    finally:
        directory.leave()


def _lead(server: Server, joining: Joining, directory: MeetingDirectory | None = None) -> StoreBootstrap:
    """Return a bootstrap backend at the store of `server`, of this rank, once all ranks have joined it. Collective."""
    try:
        place = Place(["localhost"], server.port, server.nonce)
        store, _ = tcp_store.connect(place, joining.timeout_s)
        if directory is None:
            joining.join(store, server.nonce)
        else:
            directory.announce(server)
            joining.join(store, server.nonce, directory.poll, directory.finish)
    except BaseException:
        server.close()  # else a caller that keeps the error would keep the port open
        raise
    return StoreBootstrap(store, 0, range(joining.world_size), server=server)


def _follow(
    joining: Joining,
    places: Callable[[], Sequence[Place]],
    note_failure: Callable[[Place, str], None] = lambda *_: None,
    poll_s: float = _POLL_S,
) -> Any:
    """Return a client of the store that rank 0 serves, or will serve, at one of `places`, once all ranks have joined.

    Collective.
    """
    nonce = secrets.token_hex(16)
    has_joined = False
    reason = ""
    while True:
        for place in places():
            if place.nonce in _completed or (reason and time.monotonic() > joining.deadline):
                continue
            try:
                store, server = tcp_store.connect(place, joining.timeout_s, joining.deadline)
                if server not in _completed:
                    has_joined = True
                    joining.join(store, nonce)
                    _completed.add(server)
                    return store
            except StateExchangeError:  # of which a StallError is an OSError
                raise
            except LostServerError as error:
                reason = str(error)  # of an earlier rendezvous, or of one that was given up: another server may follow
            except OSError as error:
                reason = str(error)
                if place.nonce is not None:
                    reason = tcp_store.unreachable_text(joining.rank, place, error.strerror or error)
                note_failure(place, reason)
        if time.monotonic() > joining.deadline:
            raise joining.left_error([0]) if has_joined else joining.absent_error([0], reason)
        time.sleep(poll_s)
