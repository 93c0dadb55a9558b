"""Adopt groups that exist already: process groups and meshes of torch, and MPI communicators.

Each group is adopted once: a second call with the same group returns the same communicator. The registry keeps the
group together with its communicator, so that the identity of the group cannot be given to another object.
"""

from __future__ import annotations

import atexit
import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from statexchange.comm import forks
from statexchange.comm.backends.single import SingleBackend
from statexchange.comm.bootstrap import form_communicator, refuse_inherited
from statexchange.comm.communicator import Communicator
from statexchange.errors import InvalidArgumentError, type_text
from statexchange.settings import check_timeout, default_timeout_s

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "find_adopted",
    "forget_all",
    "form_over_process_group",
    "from_mesh",
    "from_mpi",
    "from_process_group",
    "from_torch_ranks",
    "single_communicator",
    "torch_default_group",
]


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
        wait_s = default_timeout_s() if timeout_s is None else check_timeout(timeout_s)
        existing = self.find(group, *part)
        if existing is not None:
            return existing
        refuse_inherited(group)
        _forget_at_exit()
        forks.cut_off_in_children(self)
        comm = make(wait_s)
        kept = self._kept.setdefault((id(group), *part), (group, comm))[1]
        if kept is not comm:  # another thread was faster
            comm.close()
        return kept

    def close(self, error: BaseException | None = None) -> None:
        """Close and drop all of them; the other ranks report `error` as the cause. Not collective."""
        while self._kept:
            try:
                _, (_, comm) = self._kept.popitem()
            except KeyError:  # another thread has dropped the last one
                return
            comm.close(error)

    def disown(self) -> None:
        """Drop the parent's world of one: a forked child gets its own."""
        self._kept.pop((id(_WORLD_OF_ONE),), None)


_WORLD_OF_ONE = object()  # a key of the registry, which keeps that communicator so that its `run` stays the same
_registry = _Registry()


@functools.cache
def _forget_at_exit() -> None:
    """Close before the interpreter ends: a Gloo group that outlives it aborts the process."""
    atexit.register(lambda: _registry.close(getattr(sys, "last_value", None)))  # the uncaught error, if there was one


def torch_default_group() -> ProcessGroup | None:
    """Return torch.distributed's default group, if it is initialised; never import torch. Not collective."""
    if "torch.distributed" not in sys.modules:
        return None
    from statexchange.comm.backends.torch_groups import default_group

    return default_group()


def find_adopted(group: object) -> Communicator | None:
    """Return the communicator of `group`, if it has been adopted. Not collective."""
    return _registry.find(group)


def single_communicator() -> Communicator:
    """Return the communicator of a world of one. Not collective."""
    return _registry.adopt(_WORLD_OF_ONE, lambda wait_s: form_communicator(SingleBackend(), wait_s), None)


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
    return _registry.adopt(group, lambda wait_s: form_over_process_group(group, wait_s), timeout_s)


def form_over_process_group(group: ProcessGroup, timeout_s: float, *, check: bool = True) -> Communicator:
    """Form a communicator over a torch ProcessGroup, without registering it. Collective over the group."""
    import torch.distributed as dist

    if not isinstance(group, dist.ProcessGroup):
        raise InvalidArgumentError(f"expected a ProcessGroup of torch.distributed, not {type_text(group)}")

    from statexchange.comm.backends.gloo import TorchBackend
    from statexchange.comm.backends.nccl import NCCLBackend

    bootstrap = TorchBackend(group, timeout_s)
    devices = NCCLBackend(group, bootstrap) if "nccl" in str(dist.get_backend_config(group)) else None
    return form_communicator(bootstrap, timeout_s, check=check, start=lambda: (bootstrap, devices))


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


def from_mesh(mesh: DeviceMesh) -> Communicator:
    """Return the communicator of the ranks of a DeviceMesh. Collective over them, the first time.

    The registry finds it by its ranks, since slicing a mesh makes a new object each time.
    """
    from statexchange.comm.backends.gloo import TorchBackend
    from statexchange.comm.backends.torch_groups import mesh_group

    torch_group = torch_default_group()

    def make(wait_s: float) -> Communicator:
        group = mesh_group(mesh, wait_s)
        if group is torch_group:
            return from_process_group(torch_group)
        return form_communicator(TorchBackend(group, wait_s), wait_s)

    return _registry.adopt(torch_group, make, None, "mesh", *sorted(mesh.mesh.flatten().tolist()))


def from_torch_ranks(ranks: Sequence[int]) -> Communicator:
    """Return the communicator of these ranks of torch's default group, in that order. Collective over them only."""
    from statexchange.comm.backends.gloo import of_ranks

    def make(wait_s: float) -> Communicator:
        return form_communicator(of_ranks(ranks, wait_s), wait_s)

    return _registry.adopt(torch_default_group(), make, None, "ranks", *ranks)


def forget_all() -> None:
    """Close and drop every group that was adopted. Not collective."""
    _registry.close()
