"""Which communicator a call uses: the one of init, that of torch.distributed, or a world of one."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from statexchange.comm import adopt
from statexchange.comm.adopt import from_mpi, from_process_group, torch_default_group
from statexchange.comm.bootstrap import launchers_local_rank
from statexchange.comm.communicator import CommLike, Communicator
from statexchange.errors import InvalidArgumentError, NotInitializedError
from statexchange.settings import detect_launch

__all__ = [
    "as_communicator",
    "current",
    "default",
    "get_backend",
    "get_communicator",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "is_initialized",
    "local_rank_of",
    "members",
    "set_default",
    "use",
]

# What `use` says in this thread; where it says nothing, what `init` has made for the process.
_default: ContextVar[Communicator | None] = ContextVar("statexchange_communicator")
_of_process: Communicator | None = None


def default() -> Communicator | None:
    """What `use` says in this thread, else what `init` has made for the process.

    A world of one from before a fork counts as none.
    """
    try:
        made = _default.get()
    except LookupError:
        made = _of_process
    return None if made is not None and made.is_inherited and made.world_size == 1 else made


def set_default(comm: Communicator | None) -> None:
    """Make `comm` the default where `default` would look for it."""
    global _of_process
    try:
        _default.get()
        _default.set(comm)
    except LookupError:
        _of_process = comm


def as_communicator(comm: CommLike | None = None) -> Communicator:
    """What `comm=` means: a Communicator, ProcessGroup, DeviceMesh or MPI communicator; None is the default.

    The default is `init`'s; else torch.distributed's default group if it is initialised; else, if a launcher speaks
    of several ranks, a NotInitializedError naming the variable; else a world of one.
    """
    made = _meant_by(comm)
    made.raise_if_inherited()
    return made


def _meant_by(comm: Any) -> Communicator:
    if comm is None:
        return _default_communicator()
    if isinstance(comm, Communicator):
        return comm
    if type(comm).__name__ == "DeviceMesh":
        return adopt.of_mesh(comm)
    if type(comm).__module__.startswith("mpi4py"):
        return from_mpi(comm)
    if "torch.distributed" in sys.modules and isinstance(comm, sys.modules["torch.distributed"].ProcessGroup):
        return from_process_group(comm)
    raise InvalidArgumentError(
        f"comm must be a Communicator, ProcessGroup, DeviceMesh or MPI communicator, not {type(comm)!r}"
    )


def _default_communicator() -> Communicator:
    made = default()
    if made is not None:
        return made
    group = torch_default_group()
    if group is not None:
        return from_process_group(group)
    launch = detect_launch()
    if launch.world_size > 1:
        raise NotInitializedError(
            f"{launch.variable}={launch.world_size} says that this is one of several ranks, but there is no "
            "communicator: call statexchange.init() or torch.distributed.init_process_group() first",
            rank=launch.rank,
        )
    return adopt.alone()


def members(ranks: Sequence[int], group: Any = None) -> Communicator:
    """The communicator of world ranks `ranks`, in that order. Collective over them only: nobody else has to call.

    `group` is None for the default world; a torch ProcessGroup, whose ranks torch counts in its default group anyway;
    or anything else that `comm=` takes, in which the ranks are counted.
    """
    torchs = torch_default_group()
    if group is not None and not (torchs is not None and isinstance(group, type(torchs))):
        return as_communicator(group).subset(ranks)
    world = current()
    if world is not None or torchs is None:
        return (world or as_communicator(None)).subset(ranks)
    # The default group has no communicator yet, and making one would need ranks that do not take part.
    return adopt.of_ranks_of_torch(ranks)


@contextlib.contextmanager
def use(comm: Communicator | None) -> Iterator[Communicator | None]:
    """Make `comm` the default inside a block, for this thread; None: there `init` makes another. Not collective."""
    token = _default.set(comm)
    try:
        yield comm
    finally:
        _default.reset(token)


def current() -> Communicator | None:
    """The communicator that exists already, made or adopted; never makes one. Not collective."""
    made = default()
    if made is not None:
        return made
    return adopt.adopted(torch_default_group())


def is_initialized() -> bool:
    """Whether `init` has made a communicator in this process. Not collective."""
    made = default()
    return made is not None and not made.is_inherited


def get_communicator() -> Communicator:
    """The default communicator, as `comm=None` means it. Collective where it has to be made."""
    return as_communicator(None)


def get_backend() -> str:
    """Name of the current backend, "single" before `init`. Not collective."""
    made = current()
    return made.backend if made is not None else "single"


def get_rank() -> int:
    """This rank, also by a torch.distributed that nobody has adopted yet; 0 before any `init`. Not collective.

    In a process that was forked from a rank, as a data loader's workers are, that rank.
    """
    made, group = current(), torch_default_group()
    return made.rank if made is not None else int(group.rank()) if group is not None else 0


def get_world_size() -> int:
    """Number of ranks, as `get_rank` knows them; 1 before any `init`. Not collective."""
    made, group = current(), torch_default_group()
    return made.world_size if made is not None else int(group.size()) if group is not None else 1


def get_local_rank() -> int:
    """Return this rank's number within its host: 0 before any `init`, unless a launcher has started it.

    Not collective. Under a launcher it is what the launcher says, before and after `init`. A launcher of several ranks
    that does not say it is a NotInitializedError before `init`.
    """
    made, launch = current(), detect_launch()
    if made is not None:
        return local_rank_of(made)
    if launch.local_rank is None:
        raise NotInitializedError(
            f"{launch.variable}={launch.world_size} says that this is one of several ranks, but not which of its host: "
            "call statexchange.init() first",
            rank=launch.rank,
        )
    return launch.local_rank


def local_rank_of(made: Communicator) -> int:
    """Return the launcher's local rank of this process, if `made` is of the ranks that it has started."""
    launchers = launchers_local_rank(made)
    return made.local_rank if launchers is None else launchers
