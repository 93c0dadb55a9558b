"""One rank under mpiexec: ``python -m statexchange.testing.mpi_rank ADDRESS``, for the launcher only."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Client

from statexchange import settings, values
from statexchange.testing import child


def main(address: str) -> None:
    """Connect to the launcher at its socket `address`, and do its tasks. Not collective; blocks on the launcher."""
    with Client(address, "AF_UNIX") as connection:
        connection.send_bytes(values.encode([settings.detect_launch().rank, os.getpid()]).encode())
        child.serve(connection)
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and not mpi.Is_finalized():
        mpi.Finalize()  # here, where all ranks wait: at the interpreter's end other libraries are half gone


if __name__ == "__main__":
    main(sys.argv[1])
