"""How a rank of a test begins, over one backend and nothing else."""

from __future__ import annotations

import os

import statexchange as sx
from statexchange.comm import bootstrap
from statexchange.comm.failure import page_setup

LAUNCHED_AS = {"threads": "threads", "shm": "processes", "gloo": "gloo", "mpi": "mpi", "hierarchical": "processes"}
HOSTS = {3: "aba", 4: "abbb"}  # on which the ranks of a hierarchical world seem to be: unequal, and not in order


def start(backend: str, directory: str, hosts: str | None = None) -> sx.comm.Communicator:
    """This rank's communicator; the ranks were launched as LAUNCHED_AS says.

    The ranks of a hierarchical world, 3 or 4 unless `hosts` says otherwise, seem to be on the hosts of these letters.
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
