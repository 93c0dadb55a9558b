"""The conformance suite: what every communicator must do, whatever its backend. `run` checks it on all ranks.

A check is a function that is marked by `check` or `least_ranks` (checking.py). All ranks call it with their
communicator; it raises AssertionError on a rank that finds the requirement violated which its docstring states. The
matrix of operations and dtypes (matrix.py) is one of them. Tensor sizes lie on both sides of the limits at which our
backends change their algorithms: 64 KiB, and windows of 1 MiB.

A backend of another package, with this folder's parent on the path, on each rank:

    comm = conformance.communicator_of(MyBackend(...))
    conformance.run(comm)
"""

from __future__ import annotations

from collections.abc import Iterable

from conformance import groups, matrix, moves, reductions, refusals, tensors, work
from statexchange.comm.backends.backend import Backend
from statexchange.comm.bootstrap import form_communicator
from statexchange.comm.communicator import Communicator
from statexchange.errors import StateExchangeError

# In this order: the check of inference tensors, in `reductions`, must see a backend's first call.
MODULES = (reductions, matrix, moves, tensors, refusals, work, groups)
CHECKS = {name: body for module in MODULES for name, body in vars(module).items() if hasattr(body, "least_ranks")}


def communicator_of(backend: Backend) -> Communicator:
    """Return a communicator whose ranks communicate over `backend` only. Collective."""
    return form_communicator(backend, 30.0, prefer="transport")


def names_for(world_size: int) -> list[str]:
    """Return the names of the checks that a world of this size has enough ranks for."""
    return [name for name, body in CHECKS.items() if body.least_ranks <= world_size]


def run(comm: Communicator, only: Iterable[str] | None = None) -> list[str]:
    """Run all checks that apply to `comm`, or those that `only` names, and return the names of those that ran.

    Collective. The first failed check raises AssertionError on every rank; the message names the check, the rank that
    failed and what it found.
    """
    names = names_for(comm.world_size) if only is None else list(only)
    for name in names:
        try:
            with comm.phase(f"the check {name}"):
                CHECKS[name](comm)
        except StateExchangeError as error:
            raise AssertionError(str(error)) from error
    return names
