"""Ranks that meet in a directory or at an address."""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ports import free_port

import statexchange as sx


def rank_and_size() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def init_by_hand(url: str, backend: str = "auto", timeout_s: float = 20.0) -> sx.comm.Communicator:
    rank, size = rank_and_size()
    return sx.init(backend, rendezvous=url, rank=rank, world_size=size, timeout_s=timeout_s)


def log_messages() -> list[str]:
    """Return a list that has all messages which the package logs in this process from now on."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("statexchange").addHandler(handler)
    return logged


def describe(comm: sx.comm.Communicator) -> list[Any]:
    """Return backend, rank, sizes and hosts of a communicator, and a sum over its ranks."""
    total = comm.all_reduce(torch.full((5,), float(comm.rank + 1)))
    return [comm.backend, comm.rank, comm.world_size, comm.local_rank, comm.num_nodes, float(total[0])]


# Absent ranks


def init_as(kind: str, place: str, timeout_s: float) -> sx.comm.Communicator:
    """Call sx.init for this kind of rendezvous, at `place`."""
    if kind in ("tcp", "file"):
        return init_by_hand(place, timeout_s=timeout_s)
    if kind == "mpi":
        return sx.init("mpi", timeout_s=timeout_s)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=place, TORCHELASTIC_USE_AGENT_STORE=str(kind == "agent"))
    return sx.init("shm", timeout_s=timeout_s)


@contextlib.contextmanager
def rendezvous_of(kind: str, directory: Path) -> Iterator[str]:
    """Yield the place of the rendezvous for `init_as`; the store of a launcher's agent runs meanwhile."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if kind == "agent" else None
    port = free_port() if agent is None else agent.port
    yield {"tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{directory}"}.get(kind, str(port))
    del agent
