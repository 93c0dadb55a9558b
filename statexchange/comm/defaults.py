"""The begin of a public call: its name, for errors, and the communicator that its `comm=` means.

The default communicator, which None means, is the first of these that exists:

1. the communicator that `use` has set in this thread;
2. the communicator that `init` has made for the process;
3. the default group of torch.distributed, if it is initialised, which is then adopted;
4. a world of one, unless a launcher has started several ranks: then NotInitializedError, as a program that forgot to
   call `init` would otherwise compute the same thing on every rank.

Process groups and meshes of torch, and MPI communicators, are adopted once: a second call with the same group returns
the same communicator.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from statexchange.comm import forks
from statexchange.comm.backends.single import SingleBackend
from statexchange.comm.bootstrap import form_communicator
from statexchange.comm.calls import PublicCall, under_way
from statexchange.comm.communicator import CommLike, Communicator
from statexchange.comm.lifetime import refuse_inherited
from statexchange.comm.topology import launchers_local_rank
from statexchange.errors import InvalidArgumentError, NotInitializedError, type_text
from statexchange.settings import check_timeout, default_timeout_s, detect_launch

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@contextlib.contextmanager
def public_call(name: str, site: str | None = None) -> Iterator[None]:
    """Name the steps inside a block, or a decorated function, after the public call that the user made. Not collective.

    So errors of ranks that are in different calls name the public calls. Of nested blocks the outermost one counts.

    Args:
        name: the public call.
        site: the file and line of the call, if the block runs in another thread.

    Yields:
        Nothing.

    Example:
        >>> from statexchange.comm.calls import step_text
        >>> from statexchange.comm.defaults import public_call
        >>> with public_call("save_checkpoint"):
        ...     step_text("the plan")
        'save_checkpoint (the plan)'
    """
    if under_way.get() is not None:
        yield
        return
    token = under_way.set(PublicCall(name, site))
    try:
        yield
    finally:
        under_way.reset(token)


class _Registry:
    """The communicators of adopted groups.

    The key is the group's identity and, for a communicator of only some of its ranks, `part`, which names these.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], tuple[object, Communicator]] = {}

    def find(self, group: object, *part: object) -> Communicator | None:
        """Return the communicator of `part` of `group`, if it has been adopted. Not collective."""
        group_and_comm = self._kept.get((id(group), *part))
        return None if group_and_comm is None else group_and_comm[1]

    def adopt(
        self, group: object, make: Callable[[float], Communicator], timeout_s: float | None, *part: object
    ) -> Communicator:
        """Return the communicator of `part` of `group`, made by `make` on the first call. Collective if `make` is."""
        # First, so that a wrong deadline is refused by each call, and not only by the one that uses it.
        if timeout_s is not None:
            check_timeout(timeout_s)
        existing = self.find(group, *part)
        if existing is not None:
            return existing
        refuse_inherited(group)
        forks.cut_off_in_children(self)
        comm = make(default_timeout_s() if timeout_s is None else timeout_s)
        # The group is kept, too, so that its id cannot be given to another object.
        kept = self._kept.setdefault((id(group), *part), (group, comm))[1]
        if kept is not comm:  # another thread was faster
            comm.close()
        return kept

    def close(self) -> None:
        """Close and drop all of them. Not collective."""
        while self._kept:
            try:
                _, (_, comm) = self._kept.popitem()
            except KeyError:  # another thread has dropped the last one
                return
            comm.close()

    def disown(self) -> None:
        """Drop the parent's world of one: a forked child gets its own."""
        self._kept.pop((id(_WORLD_OF_ONE),), None)


_WORLD_OF_ONE = object()  # a key of the registry, which keeps that communicator so that its `run` stays the same
_registry = _Registry()


def torch_default_group() -> ProcessGroup | None:
    """Return torch.distributed's default group, if it is initialised; never import torch. Not collective."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    group: ProcessGroup | None = dist.group.WORLD
    return group


def from_process_group(group: ProcessGroup, *, timeout_s: float | None = None) -> Communicator:
    """Return the communicator of a torch ProcessGroup, made on the first call.

    Collective over the group, the first time. Blocks until all its ranks have called.

    Args:
        group: a ProcessGroup of torch.distributed.
        timeout_s: the limit of a wait for peers, in seconds without progress.

    Returns:
        The communicator, the same each time.

    Raises:
        StallError: some ranks did not call in time; `missing` lists them.
        ForkedError: this process was forked from a rank, to which the group belongs.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> comm = sx.comm.from_process_group(dist.group.WORLD)
        >>> comm.world_size
        1
        >>> dist.destroy_process_group()
    """
    return adopted(group, timeout_s)


def adopted(group: ProcessGroup, timeout_s: float | None = None, *, check: bool = True) -> Communicator:
    """Return the communicator of a torch ProcessGroup; `check` is used on the first call. Collective then."""

    def make(wait_s: float) -> Communicator:
        import torch.distributed as dist

        if not isinstance(group, dist.ProcessGroup):
            raise InvalidArgumentError(f"expected a ProcessGroup of torch.distributed, not {type_text(group)}")

        from statexchange.comm.backends.nccl import NCCLBackend
        from statexchange.comm.backends.store import over_group

        bootstrap = over_group(group, wait_s)
        devices = None
        # A group may have a backend for each kind of device, as "cpu:gloo,cuda:nccl".
        if "nccl" in str(dist.get_backend_config(group)):
            devices = NCCLBackend(group, bootstrap)
        return form_communicator(bootstrap, wait_s, check=check, start_devices=lambda: devices)

    return _registry.adopt(group, make, timeout_s)


def from_mpi(mpi_comm: MPI.Comm, *, timeout_s: float | None = None) -> Communicator:
    """Return the communicator of an mpi4py communicator, made on the first call over a duplicate.

    Collective over it, the first time. Blocks until all its ranks have called.

    Args:
        mpi_comm: an mpi4py communicator. Its own messages are not touched.
        timeout_s: the limit of a wait for peers, in seconds without progress.

    Returns:
        The communicator, the same each time.

    Raises:
        MissingExtraError: mpi4py or an MPI library is not installed.
        StallError: some ranks did not call in time; `missing` lists them.
        ForkedError: this process was forked from a rank, to which `mpi_comm` belongs.

    Example:
        >>> from mpi4py import MPI  # doctest: +SKIP
        >>> comm = sx.comm.from_mpi(MPI.COMM_WORLD)  # doctest: +SKIP
    """
    from statexchange.comm.backends.mpi import MPIBackend

    def make(wait_s: float) -> Communicator:
        if not hasattr(mpi_comm, "Dup"):
            raise InvalidArgumentError(f"expected a communicator of mpi4py, not {type_text(mpi_comm)}")
        return form_communicator(MPIBackend(mpi_comm, timeout_s=wait_s), wait_s)

    return _registry.adopt(mpi_comm, make, timeout_s)


def _from_mesh(mesh: DeviceMesh) -> Communicator:
    """Return the communicator of the ranks of a DeviceMesh. Collective over them, the first time.

    The registry finds it by its ranks, since slicing a mesh makes a new object each time.
    """
    torch_group = torch_default_group()
    ranks = sorted(mesh.mesh.flatten().tolist())
    assert torch_group is not None  # a mesh makes it
    if len(ranks) == torch_group.size():
        return from_process_group(torch_group)
    return _of_world_ranks(torch_group, ranks)


def _of_world_ranks(torch_group: ProcessGroup, ranks: Sequence[int]) -> Communicator:
    """Return the communicator of some ranks of torch's default group. Collective over them, the first time."""
    from statexchange.comm.backends.store import over_group

    def make(wait_s: float) -> Communicator:
        return form_communicator(over_group(torch_group, wait_s, ranks), wait_s)

    return _registry.adopt(torch_group, make, None, *ranks)


def forget_all() -> None:
    """Close and drop every group that was adopted. Not collective."""
    _registry.close()


# `_default` is set by `use`, for this thread; `_of_process` by `init`. `_default` has no default value, as None is one:
# `use(None)` sets it, so that `init` makes a new communicator in the block.
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
    if comm is not None and comm.is_inherited and comm.world_size == 1:
        return None
    return comm


def set_default(comm: Communicator | None) -> None:
    """Replace the default: inside a `use` block for this thread, else for the process. Not collective."""
    global _of_process
    try:
        _default.get()  # only `use` gives it a value, also None
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
        StateExchangeError: the error with which it has failed; a NotInitializedError if it has been closed.

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
    # A call of a job of one rank may communicate nothing, and would not find it.
    if communicator.is_closed:
        communicator.raise_if_closed()
    return communicator


def _resolved(comm: Any) -> Communicator:  # noqa: ANN401 (whatever a caller gave, by mistake too)
    if comm is None:
        return _default_communicator()
    if isinstance(comm, Communicator):
        return comm
    # By names, so that neither torch nor mpi4py is imported for a caller that has none of them.
    if type(comm).__name__ == "DeviceMesh":
        return _from_mesh(comm)
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
    return _registry.adopt(_WORLD_OF_ONE, lambda wait_s: form_communicator(SingleBackend(), wait_s), None)


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
    return _of_world_ranks(torch_group, ranks)


def current() -> Communicator | None:
    """Return the default communicator if it exists already, made or adopted. Not collective."""
    comm = default()
    if comm is not None:
        return comm
    # Of no group nothing is found, as None is never adopted.
    return _registry.find(torch_default_group())


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
    """Return the default communicator.

    Collective where torch's default group is adopted for it; else not collective. It may be closed, or have failed: a
    call with ``comm=None`` then raises.

    Returns:
        The communicator, the same each time.

    Raises:
        NotInitializedError: there is none, but a launcher has started several ranks.
        ForkedError: this process was forked from a rank, to which the communicator belongs.

    Example:
        >>> comm = sx.init("single")
        >>> sx.get_communicator() is comm
        True
    """
    communicator = _resolved(None)
    if communicator.is_inherited:
        communicator.raise_if_closed()
    return communicator


def get_backend() -> str:
    """Return the name of the default communicator's backend. Not collective.

    Returns:
        The name, "single" before `init`.

    Example:
        >>> sx.comm.get_backend()
        'single'
    """
    comm = current()
    if comm is None:
        return "single"
    return comm.backend


def get_rank() -> int:
    """Return this rank in the default communicator, else in torch.distributed's default group. Not collective.

    Returns:
        The rank; 0 before any `init`. In a process that was forked from a rank, as workers of a data loader are, it is
        the rank of the parent.

    Example:
        >>> sx.get_rank()
        0
    """
    return _rank_and_world_size()[0]


def get_world_size() -> int:
    """Return the number of ranks of the same group as `get_rank`. Not collective.

    Returns:
        The number, 1 before any `init`.

    Example:
        >>> sx.get_world_size()
        1
    """
    return _rank_and_world_size()[1]


def _rank_and_world_size() -> tuple[int, int]:
    # Not by `get_communicator`, which may make a communicator: that is collective.
    comm, group = current(), torch_default_group()
    if comm is not None:
        return comm.rank, comm.world_size
    return (0, 1) if group is None else (group.rank(), group.size())


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
    # The launcher's first, so that a rank has the same number before `init`, when there is no other.
    local_rank = launchers_local_rank(comm.rank, comm.world_size)
    return comm.local_rank if local_rank is None else local_rank
