"""Bodies of tests that run on ranks over any launcher."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import require_mpi
from starting import LAUNCHED_AS, start
from sweeps import slow
from torch import nn

import statexchange as sx
from statexchange.comm import bootstrap
from statexchange.comm.communicator import Communicator
from statexchange.testing import run_ranks

Body = Callable[[Communicator, Path], Any]
BODIES: dict[str, Body] = {}


def on_ranks(*sizes: int, backends: tuple[str, ...] = ("shm", "gloo", "mpi", "hierarchical")) -> Callable[[Body], Any]:
    """Make a test of a function that each rank runs: on threads in worlds of `sizes`, under `slow` over `backends`."""

    def make(body: Body) -> Any:
        BODIES[body.__name__] = body
        cases = [("threads", size) for size in sizes]
        size = 2 if 2 in sizes else max(sizes)
        cases += [slow(backend, max(3, size) if backend == "hierarchical" else size) for backend in backends]

        @pytest.mark.parametrize(("backend", "world_size"), cases)
        def test(backend: str, world_size: int, tmp_path: Path) -> None:
            if backend == "mpi":
                require_mpi()
            if backend == "threads":
                run_ranks(lambda: body(sx.get_communicator(), tmp_path), world_size)
                return
            args = (body.__module__, body.__name__, backend, str(tmp_path))
            run_ranks(run_body, world_size, backend=LAUNCHED_AS[backend], args=args, timeout_s=120, reuse=True)

        test.__name__ = body.__name__
        return test

    return make


def run_body(module: str, name: str, backend: str, directory: str) -> None:
    """Run the function of a test by its name, on a rank in a process of its own."""
    importlib.import_module(module)  # it fills BODIES
    identity = bootstrap.host_identity
    try:
        comm = start(backend, directory)
        BODIES[name](comm, Path(directory))
        comm.barrier()
    finally:
        bootstrap.host_identity = identity


def filled(value: float, n: int = 512, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.full((n,), value, dtype=dtype)


def same_everywhere(comm: Communicator, tensor: torch.Tensor) -> bool:
    return all(torch.equal(part, tensor) for part in comm.all_gather(tensor.detach()))


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
