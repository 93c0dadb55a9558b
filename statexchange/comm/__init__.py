"""Communicators over shared memory, Gloo, NCCL and MPI, which report a failure of one rank on all ranks."""

from __future__ import annotations

from statexchange.lazy import lazy_names

_HOMES = {
    "Communicator": "statexchange.comm.communicator",
    "Work": "statexchange.comm.work",
    "from_mpi": "statexchange.comm.defaults",
    "from_process_group": "statexchange.comm.defaults",
    "get_backend": "statexchange.comm.defaults",
    "get_local_rank": "statexchange.comm.defaults",
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _HOMES)
