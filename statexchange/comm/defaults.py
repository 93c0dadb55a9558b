"""The default communicator, which `comm=None` means.

It is the first of these that exists:

1. the communicator that `use` has set in this thread;
2. the communicator that `init` has made for the process;
3. the default group of torch.distributed, if it is initialised, which is then adopted;
4. a world of one, unless a launcher has started several ranks: then NotInitializedError, as a program that forgot to
   call `init` would otherwise compute the same thing on every rank.
"""

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

# `_default` is set by `use`, for this thread; `_of_process` by `init`.
_default: ContextVar[Communicator | None] = ContextVar("statexchange_communicator")
_of_process: Communicator | None = None


def default() -> Communicator | None:
    """Return what `use` has set in this thread, else what `init` has made for the process. Not collective.

    In a forked child the parent's world of one counts as none.
    """
    try:
        comm = _default.get()
    except LookupError:
        comm = _of_process
    return None if comm is not None and comm.is_inherited and comm.world_size == 1 else comm


def set_default(comm: Communicator | None) -> None:
    """Replace the default: inside a `use` block for this thread, else for the process. Not collective."""
    global _of_process
    try:
        _default.get()
        _default.set(comm)
    except LookupError:
        _of_process = comm


@contextlib.contextmanager
def use(comm: Communicator | None) -> Iterator[Communicator | None]:
    """Make `comm` the default inside a block, for this thread. With None, `init` makes a new one there. Not collective.

    Args:
        comm: the default inside the block.

    Yields:
        `comm`.

    Example:
        >>> comm = sx.init("single")
        >>> from statexchange.comm.defaults import use
        >>> with use(None):
        ...     sx.is_initialized()
        False
    """
    token = _default.set(comm)
    try:
        yield comm
    finally:
        _default.reset(token)


def as_communicator(comm: CommLike | None = None) -> Communicator:
    """Return the communicator that `comm=` means.

    Collective over the group of `comm` if it is adopted here for the first time; else not collective.

    Args:
        comm: a Communicator, torch ProcessGroup, DeviceMesh or mpi4py communicator; None is the default, see the top
            of this module.

    Returns:
        The communicator, the same each time.

    Raises:
        NotInitializedError: there is no default, but a launcher has started several ranks.
        InvalidArgumentError: `comm` is none of these.
        ForkedError: this process was forked from a rank, to which the communicator belongs.

    Example:
        >>> from statexchange.comm.defaults import as_communicator
        >>> comm = sx.init("single")
        >>> as_communicator(None) is comm
        True
        >>> as_communicator("gloo")
        Traceback (most recent call last):
        statexchange.errors.InvalidArgumentError: ...
    """
    communicator = _resolved(comm)
    communicator.raise_if_inherited()
    return communicator


def _resolved(comm: Any) -> Communicator:  # noqa: ANN401 (whatever a caller gave, by mistake too)
    if comm is None:
        return _default_communicator()
    if isinstance(comm, Communicator):
        return comm
    if type(comm).__name__ == "DeviceMesh":
        return adopt.from_mesh(comm)
    if type(comm).__module__.startswith("mpi4py"):
        return from_mpi(comm)
    if "torch.distributed" in sys.modules and isinstance(comm, sys.modules["torch.distributed"].ProcessGroup):
        return from_process_group(comm)
    raise InvalidArgumentError(
        f"comm must be a Communicator, ProcessGroup, DeviceMesh or MPI communicator, not {type(comm)!r}"
    )


def _default_communicator() -> Communicator:
    comm = default()
    if comm is not None:
        return comm
    group = torch_default_group()
    if group is not None:
        return from_process_group(group)
    launch = detect_launch()
    if launch.world_size > 1:
        raise NotInitializedError(
            f"{launch.variable}={launch.world_size} means that this is one of several ranks, but there is no "
            "communicator: call statexchange.init() or torch.distributed.init_process_group() first",
            rank=launch.rank,
        )
    return adopt.single_communicator()


def members(ranks: Sequence[int], group: CommLike | None = None) -> Communicator:
    """Return the communicator of world ranks `ranks`, in that order.

    Collective over them only: other ranks need not call.

    Args:
        ranks: world ranks, this one among them.
        group: a Communicator, DeviceMesh or MPI communicator whose ranks `ranks` counts. None counts those of the
            default world, and so does a torch ProcessGroup: torch's own functions take world ranks with any group.

    Returns:
        The communicator, the same each time.

    Raises:
        InvalidArgumentError: ranks repeat, do not exist or lack this one.
    """
    torch_group = torch_default_group()
    if group is not None and not (torch_group is not None and isinstance(group, type(torch_group))):
        return as_communicator(group).new_group(ranks)
    world = current()
    if world is not None or torch_group is None:
        return (world or as_communicator(None)).new_group(ranks)
    # The default group has no communicator yet, and making one would need ranks that do not take part.
    return adopt.from_torch_ranks(ranks)


def current() -> Communicator | None:
    """Return the default communicator if it exists already, made or adopted. Not collective."""
    comm = default()
    return comm if comm is not None else adopt.find_adopted(torch_default_group())


def is_initialized() -> bool:
    """Return whether `init` has made a communicator in this process. Not collective.

    Returns:
        True between `init` and `shutdown`.

    Example:
        >>> comm = sx.init("single")
        >>> sx.is_initialized()
        True
    """
    comm = default()
    return comm is not None and not comm.is_inherited


def get_communicator() -> Communicator:
    """Return the default communicator, as `comm=None` means it.

    Collective where torch's default group is adopted for it; else not collective.

    Returns:
        The communicator, the same each time.

    Raises:
        NotInitializedError: there is none, but a launcher has started several ranks.

    Example:
        >>> comm = sx.init("single")
        >>> sx.get_communicator() is comm
        True
    """
    return as_communicator(None)


def get_backend() -> str:
    """Return the name of the default communicator's backend. Not collective.

    Returns:
        The name, "single" before `init`.

    Example:
        >>> sx.comm.get_backend()
        'single'
    """
    comm = current()
    return comm.backend if comm is not None else "single"


def get_rank() -> int:
    """Return this rank in the default communicator, else in torch.distributed's default group. Not collective.

    Returns:
        The rank; 0 before any `init`. In a process that was forked from a rank, as workers of a data loader are, it is
        the rank of the parent.

    Example:
        >>> sx.get_rank()
        0
    """
    comm, group = current(), torch_default_group()
    if comm is not None:
        return comm.rank
    return int(group.rank()) if group is not None else 0


def get_world_size() -> int:
    """Return the number of ranks of the same group as `get_rank`. Not collective.

    Returns:
        The number, 1 before any `init`.

    Example:
        >>> sx.get_world_size()
        1
    """
    comm, group = current(), torch_default_group()
    if comm is not None:
        return comm.world_size
    return int(group.size()) if group is not None else 1


def get_local_rank() -> int:
    """Return this rank's number within its host. Not collective.

    Returns:
        The launcher's local rank, before and after `init`; without a launcher, 0 before `init`.

    Raises:
        NotInitializedError: before `init`, under a launcher of several ranks that does not give local ranks.

    Example:
        >>> comm = sx.init("single")
        >>> sx.comm.get_local_rank()
        0
    """
    comm, launch = current(), detect_launch()
    if comm is not None:
        return local_rank_of(comm)
    if launch.local_rank is None:
        raise NotInitializedError(
            f"{launch.variable}={launch.world_size}, but the environment has no local rank: "
            "call statexchange.init() first",
            rank=launch.rank,
        )
    return launch.local_rank


def local_rank_of(comm: Communicator) -> int:
    """Return the launcher's local rank if `comm` has all its ranks, else the local rank in `comm`. Not collective."""
    local_rank = launchers_local_rank(comm)
    return comm.local_rank if local_rank is None else local_rank
