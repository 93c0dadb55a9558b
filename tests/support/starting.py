"""Start the communicator, or the backend alone, of a test's rank over one given backend."""

from __future__ import annotations

import os

from sweeps import slow

import statexchange as sx
from statexchange.comm import bootstrap
from statexchange.comm.backends.backend import Backend
from statexchange.comm.wait import Wait

THREADS_AND_PROCESSES = ("threads", "gloo")
"""The backends of `run_ranks` that a test runs on which does not depend on the transport between processes."""
AND_MPI = (*THREADS_AND_PROCESSES, slow("mpi"))
"""The same and MPI, which is slow to start."""
LAUNCHED_AS = {"threads": "threads", "shm": "processes", "gloo": "gloo", "mpi": "mpi", "hierarchical": "processes"}
KINDS = {"gloo": "gloo", "bare gloo": "processes", "store": "processes", "mpi": "mpi"}
"""The backends that `launched_backend` opens, with the ranks of `run_ranks` that they need."""
# The simulated host of each rank, by world size: hosts have unequal sizes, and ranks are not in their order.
HOSTS = {3: "aba", 4: "abbb"}


def launched_communicator(backend: str) -> sx.comm.Communicator:
    """Return the communicator of a rank that `run_ranks` has launched on `backend`."""
    return sx.init("mpi") if backend == "mpi" else sx.get_communicator()


def start(backend: str, directory: str, hosts: str | None = None) -> sx.comm.Communicator:
    """Return this rank's communicator. The ranks must have been launched as LAUNCHED_AS[backend].

    A hierarchical world simulates hosts: rank i is on the host with the i-th letter of `hosts`; by default it has 3 or
    4 ranks.
    """
    if backend == "threads":
        return sx.get_communicator()
    if backend == "shm":
        return sx.init("shm", rendezvous=f"file://{directory}")
    if backend == "hierarchical":
        host = (hosts or HOSTS[int(os.environ["WORLD_SIZE"])])[int(os.environ["RANK"])]
        bootstrap.host_identity = lambda: host
        return sx.init("auto", rendezvous=f"file://{directory}")
    return sx.init(backend)


def wait(timeout_s: float = 10.0) -> Wait:
    """Return what a backend's method polls while it waits."""
    return Wait(timeout_s, "a test")


def launched_backend(kind: str, path: str) -> Backend:
    """Return this rank's backend, without a communicator. The ranks must have been launched as KINDS[kind]."""
    if kind == "mpi":
        from statexchange.comm.backends import mpi

        return mpi.MPIBackend(mpi.world())
    import torch.distributed as dist

    from statexchange.comm.backends.store import StoreBootstrap, over_group

    if kind == "gloo":
        group = dist.group.WORLD
        assert group is not None
        return over_group(group, 10.0).transport(10.0)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = StoreBootstrap(dist.FileStore(path, size), rank, range(size))
    return store if kind == "store" else store.transport(10.0)
