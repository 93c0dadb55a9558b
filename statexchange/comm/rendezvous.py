"""How ranks that no launcher has introduced find each other: through a directory that all see, or a TCP address.

In a directory every rank puts a hello under a name of its own, and keeps renewing it. The first rank waits until it
has seen a live hello of every rank, and answers with the nonces of all: who finds its own nonce in an answer has met.
What a crashed run has left is neither renewed nor does it hold a nonce of this run, so it is never taken for fresh.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

from statexchange.comm.backend import Backend, Wait
from statexchange.comm.control_page import host_identity, pid_namespace, process_is_alive, process_start
from statexchange.comm.torch_backend import torch_errors, unused
from statexchange.errors import (
    InvalidArgumentError,
    NotInitializedError,
    PeerError,
    StallError,
    StateExchangeError,
    StorageError,
)
from statexchange.settings import Launch

__all__ = ["store_at", "store_of"]

_stores: Any = dist  # torch exports its stores there, but not for type checkers
_POLL_S = 0.02
_RENEWAL_S = 0.5
_HELLO = re.compile(r"hello-(\d+)-([0-9a-f]{32})\.json")


def store_of(launch: Launch, timeout_s: float) -> tuple[Any, int, int]:
    """The store over which the ranks of a launcher meet, this rank and their number. Collective.

    torchrun's own; under MPI one whose port the system picks on root and MPI tells the others; under Slurm at
    MASTER_ADDR and MASTER_PORT, which job scripts set. Each use has keys of its own, so that ranks may meet again after
    a shutdown.
    """
    store, rank, size = _launchers_store(launch, timeout_s)
    return _stores.PrefixStore(unused("meeting"), store), rank, size


def _launchers_store(launch: Launch, timeout_s: float) -> tuple[Any, int, int]:
    if launch.launcher == "torchrun":
        return _torchruns_store(timeout_s)
    if launch.launcher in ("openmpi", "mpich"):
        from statexchange.comm import mpi_backend

        backend = mpi_backend.MPIBackend(mpi_backend.world(launch), timeout_s=timeout_s)
        return _store_by_mpi(backend, timeout_s), backend.rank, backend.world_size
    if launch.world_size == 1:
        return _stores.HashStore(), 0, 1
    if launch.master is None:
        raise NotInitializedError(
            f"{launch.variable} says {launch.world_size} ranks, but not where they meet: set MASTER_ADDR and "
            'MASTER_PORT, give init a rendezvous ("file:///a/shared/directory"), or start under torchrun or mpiexec'
        )
    return _meet_by_tcp(*launch.master, launch.rank, launch.world_size, timeout_s), launch.rank, launch.world_size


def _torchruns_store(timeout_s: float) -> tuple[Any, int, int]:
    try:
        with torch_errors(Wait(timeout_s, "the meeting at torchrun's store")):
            store, rank, size = next(iter(_stores.rendezvous("env://", timeout=timedelta(seconds=timeout_s))))
    except ValueError as error:
        if isinstance(error, StateExchangeError):
            raise
        raise NotInitializedError(f"the environment speaks of ranks, but not of where they meet: {error}") from error
    return store, rank, size


def _store_by_mpi(backend: Backend, timeout_s: float) -> Any:
    host = socket.gethostname()
    limit = timedelta(seconds=timeout_s)
    wait = Wait(timeout_s, "the choice of a port")
    served: Any = None
    offer: list[Any] = [host, 0, None]
    if backend.rank == 0:
        try:
            served = _stores.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
            offer[1] = served.port
        except (dist.DistError, RuntimeError) as error:
            offer[2] = str(error).splitlines()[0]
    host, port, refusal = json.loads(backend.exchange(json.dumps(offer).encode(), wait)[0])
    if refusal is not None:
        raise NotInitializedError(f"rank 0 on {host} cannot listen for the others: {refusal}", rank=0)
    with torch_errors(wait):
        return served or _stores.TCPStore(host, port, is_master=False, timeout=limit)


def store_at(url: str, rank: int, world_size: int, timeout_s: float) -> Any:
    """A torch Store that exactly these ranks share. Collective.

    `url` is "file:///directory", which all ranks see and which is made if need be, or "tcp://host:port", where rank 0
    listens. Raises StallError naming the ranks that did not come, or InvalidArgumentError.
    """
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.path.startswith("/") and parts.netloc in ("", "localhost"):
        return _meet_in_directory(Path(parts.path), rank, world_size, timeout_s)
    if parts.scheme == "tcp" and parts.hostname and parts.port is not None:
        return _meet_by_tcp(parts.hostname, parts.port, rank, world_size, timeout_s)
    raise InvalidArgumentError(f"rendezvous must be file:///directory or tcp://host:port, not {url!r}")


def _meet_by_tcp(host: str, port: int, rank: int, world_size: int, timeout_s: float) -> Any:
    timeout = timedelta(seconds=timeout_s)
    try:
        store = _stores.TCPStore(host, port, is_master=rank == 0, wait_for_workers=False, timeout=timeout)
    except (dist.DistError, RuntimeError) as error:
        doing = "listen" if rank == 0 else "reach rank 0"
        raise NotInitializedError(f"cannot {doing} at tcp://{host}:{port}: {str(error).splitlines()[0]}") from error
    came = store.add(f"rank-{rank}", 1)
    if came != 1:
        raise NotInitializedError(f"rank {rank} has come to tcp://{host}:{port} already: is there another job?")
    deadline = time.monotonic() + timeout_s
    while missing := [r for r in range(world_size) if not store.check([f"rank-{r}"])]:
        _raise_if_late(deadline, missing, timeout_s, f"tcp://{host}:{port}")
        time.sleep(_POLL_S)
    return store


def _raise_if_late(deadline: float, missing: list[int], timeout_s: float, where: str) -> None:
    if time.monotonic() > deadline:
        raise StallError(f"ranks {missing} did not come to {where} in {timeout_s:g} s", missing=tuple(missing))


def _meet_in_directory(directory: Path, rank: int, world_size: int, timeout_s: float) -> Any:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        hello = _Hello(directory, rank, world_size)
        try:
            nonces = hello.wait_for_all(time.monotonic() + timeout_s, timeout_s)
        finally:
            hello.remove()
    except OSError as error:
        if isinstance(error, (StorageError, StallError)):
            raise
        raise StorageError.of(error, "meet the other ranks", path=directory) from error
    # Named by all nonces: nobody else has ever used it. torch removes the file with its last user.
    store = _stores.FileStore(str(directory / f"store-{nonces[0]}"), world_size)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


class _Hello:
    """This rank's hello, and what it sees of the others'."""

    def __init__(self, directory: Path, rank: int, world_size: int) -> None:
        self._directory = directory
        self._rank = rank
        self._world_size = world_size
        self._nonce = secrets.token_hex(16)
        self._path = directory / f"hello-{rank}-{self._nonce}.json"
        self._renewed = 0.0
        self._count = 0
        self._seen: dict[str, int] = {}

    def wait_for_all(self, deadline: float, timeout_s: float) -> list[str]:
        """The nonces of all ranks."""
        while True:
            self._renew()
            nonces = self._answer() if self._rank == 0 else self._look_for_answer()
            if nonces is not None:
                return nonces
            if time.monotonic() > deadline:
                missing = [r for r in range(self._world_size) if r not in self._fresh()] or [0]
                _raise_if_late(deadline, missing, timeout_s, str(self._directory))
            time.sleep(_POLL_S)

    def _renew(self) -> None:
        if time.monotonic() - self._renewed < _RENEWAL_S:
            return
        self._renewed = time.monotonic()
        self._count += 1
        facts = {
            "host": host_identity(),
            "namespace": pid_namespace(),
            "pid": os.getpid(),
            "start": process_start(os.getpid()),
            "count": self._count,
            "world_size": self._world_size,
        }
        _write(self._path, facts)

    def _fresh(self) -> dict[int, str]:
        """The nonce of every rank that is known to live: its process is seen, or its hello has been renewed."""
        found: dict[int, str] = {}
        for name in os.listdir(self._directory):
            match = _HELLO.fullmatch(name)
            facts = _read(self._directory / name) if match else None
            if match is None or facts is None or not self._lives(match[2], facts):
                continue
            rank = int(match[1])
            if facts["world_size"] != self._world_size or rank >= self._world_size:
                raise InvalidArgumentError(
                    f"rank {rank} came with another world_size", expected=self._world_size, found=facts["world_size"]
                )
            if rank in found:
                raise PeerError(rank, "the meeting", f"two processes call themselves rank {rank} in {self._directory}")
            found[rank] = match[2]
        return found

    def _lives(self, nonce: str, facts: dict[str, Any]) -> bool:
        if (facts["host"], facts["namespace"]) == (host_identity(), pid_namespace()):
            return process_is_alive(facts["pid"], facts["start"])
        return int(facts["count"]) > self._seen.setdefault(nonce, facts["count"])

    def _answer(self) -> list[str] | None:
        fresh = self._fresh()
        if len(fresh) < self._world_size:
            return None
        nonces = [fresh[rank] for rank in range(self._world_size)]
        _write(self._directory / f"answer-{self._nonce}.json", nonces)
        self._wait_until_read()
        return nonces

    def _wait_until_read(self) -> None:
        """The answer goes when all others have gone, so that nothing stays behind."""
        deadline = time.monotonic() + 20 * _RENEWAL_S
        others = [r for r in range(self._world_size) if r != self._rank]
        while set(others) & self._fresh().keys() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._directory / f"answer-{self._nonce}.json")

    def _look_for_answer(self) -> list[str] | None:
        for name in os.listdir(self._directory):
            nonces = _read(self._directory / name) if name.startswith("answer-") else None
            if nonces is not None and len(nonces) == self._world_size and nonces[self._rank] == self._nonce:
                return list(nonces)
        return None

    def remove(self) -> None:
        """Take the hello back."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)


def _write(path: Path, facts: Any) -> None:
    partial = path.with_suffix(".partial")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
        json.dump(facts, file)
    os.replace(partial, path)


def _read(path: Path) -> Any:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            return json.load(file)
    except (OSError, ValueError):  # it went while we looked, or is none of ours
        return None
