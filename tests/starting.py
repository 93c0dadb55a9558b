"""Start the communicator of a test's rank over one given backend."""

from __future__ import annotations

import os

import statexchange as sx
from statexchange.comm import bootstrap
from statexchange.comm.failure import page_setup

LAUNCHED_AS = {"threads": "threads", "shm": "processes", "gloo": "gloo", "mpi": "mpi", "hierarchical": "processes"}
# The simulated host of each rank, by world size: hosts have unequal sizes, and ranks are not in their order.
HOSTS = {3: "aba", 4: "abbb"}


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
        bootstrap.host_identity = page_setup.host_identity = lambda: host
        return sx.init("auto", rendezvous=f"file://{directory}")
    return sx.init(backend)
