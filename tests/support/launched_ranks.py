"""Functions that ranks of the launcher run."""

from __future__ import annotations

import os
import time

PROCESS_BACKENDS = ("processes", "gloo", "mpi")


def own_rank() -> int:
    return int(os.environ.get("RANK", os.environ.get("PMI_RANK", "0")))


def thread_rank() -> int:
    from statexchange.comm.defaults import current

    return current().rank


def reduce_on_threads() -> list[int]:
    from statexchange.comm.defaults import current

    return current().all_gather_object(current().rank)


def all_reduce_mpi() -> int:
    from mpi4py import MPI

    return MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank + 1)


def raise_on_rank_1() -> str:
    if own_rank() == 1:
        raise ValueError("lost its shard")
    return "fine"


def wait_until(condition, limit_s: float = 10.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(condition())
