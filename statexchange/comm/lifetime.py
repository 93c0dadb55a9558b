"""The end of this process's communicators: at its exit, and in children that are forked from it."""

from __future__ import annotations

import atexit
import functools
import sys
import weakref

from statexchange.comm import forks
from statexchange.comm.communicator import Communicator
from statexchange.errors import ForkedError

_communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()  # all of more than one rank that this process made


class _Inheritance:
    """The groups of the rank from which this process was forked, which it inherited."""

    def __init__(self) -> None:
        self.is_from_rank = False
        self.groups: list[object] = []

    def disown(self) -> None:
        """Record the groups of the parent, which this child must not use."""
        # A communicator that was open is either still open here, or has been cut off (`forks`) already.
        was_open = any(comm.is_inherited or not comm.is_closed for comm in _communicators)
        self.is_from_rank = self.is_from_rank or was_open
        if "torch.distributed" in sys.modules:
            from statexchange.comm.backends.torch_groups import known_groups

            self.groups = list(known_groups())


_inheritance = _Inheritance()


def registered(comm: Communicator) -> Communicator:
    """Return `comm`, which is new, and ends with this process. Not collective."""
    if comm.world_size > 1:
        _communicators.add(comm)
        _close_at_exit()
    forks.cut_off_in_children(_inheritance)
    return comm


def is_forked_from_rank() -> bool:
    """Whether this process was forked from a rank that had a communicator. Not collective."""
    return _inheritance.is_from_rank


def refuse_inherited(group: object) -> None:
    """Raise ForkedError if `group` belongs to the rank from which this process was forked. Not collective."""
    # Torch's groups may also be made in the child. MPI is the parent's: a child of a fork cannot use it at all.
    is_mpi = type(group).__module__.startswith("mpi4py")
    if any(group is inherited for inherited in _inheritance.groups) or (_inheritance.is_from_rank and is_mpi):
        raise ForkedError("this process was forked from a rank, to which this group belongs")


@functools.cache
def _close_at_exit() -> None:
    """Close at exit: to report why this rank ends, and as a Gloo group that outlives the interpreter aborts it."""

    def close() -> None:
        for comm in list(_communicators):
            # The interpreter keeps the uncaught error there, if there was one.
            comm.close(getattr(sys, "last_value", None))

    atexit.register(close)
