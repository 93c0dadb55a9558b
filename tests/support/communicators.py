"""Communicators that wait no longer than a test does."""

import sys
from typing import Any

import statexchange as sx
from statexchange.settings import detect_launch

STARTING_S = 60.0  # four ranks import torch at once on two cores, with other tests running


def start() -> Any:
    """Return the communicator of this rank on any backend; under MPI it calls sx.init."""
    under_mpi = detect_launch().launcher in ("mpich", "openmpi")
    return sx.init() if "mpi4py" in sys.modules or under_mpi else sx.get_communicator()
