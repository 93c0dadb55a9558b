"""Which communicator a call uses: the one of `init`, torch.distributed's, or a world of one."""

from __future__ import annotations

import atexit
import contextlib
import json
import re
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from statexchange.comm.communicator import Backend, Communicator, Place
from statexchange.comm.control_page import host_identity, meet
from statexchange.comm.single import SingleBackend
from statexchange.errors import InvalidArgumentError, NotInitializedError
from statexchange.settings import default_timeout_s, detect_launch

__all__ = [
    "as_communicator",
    "communicator",
    "current",
    "from_mpi",
    "from_process_group",
    "get_backend",
    "get_communicator",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "init",
    "is_initialized",
    "members",
    "shutdown",
    "use",
]

_default: ContextVar[Communicator | None] = ContextVar("statexchange_communicator", default=None)
# Adopted groups by identity; the group is kept with its communicator so that its id cannot be given to another.
_adopted: dict[int, tuple[object, Communicator]] = {}
_members: dict[tuple[int | str, ...], tuple[object, Communicator]] = {}
_ALONE = object()  # stands for a world of one, which is kept so that its run has one identity
BACKENDS = ("auto", "single", "gloo", "mpi")


def communicator(backend: Backend, timeout_s: float) -> Communicator:
    """A communicator over `backend`, with a control page where all its ranks share a host. Collective."""
    if backend.world_size == 1:
        return Communicator(backend, None, Place(0, 1, 0, 1), _run_identity(secrets.token_hex(8)), timeout_s)

    def exchange(payload: bytes) -> list[bytes]:
        return backend.exchange(payload, timeout_s, "the meeting of all ranks")

    facts = [json.loads(answer) for answer in exchange(json.dumps([host_identity(), secrets.token_hex(8)]).encode())]
    hosts = [fact[0] for fact in facts]
    page = meet(backend.rank, backend.world_size, exchange)
    return Communicator(backend, page, _place(hosts, backend.rank), _run_identity(facts[0][1]), timeout_s)


def _place(hosts: list[str], rank: int) -> Place:
    distinct = list(dict.fromkeys(hosts))
    ours = [r for r, host in enumerate(hosts) if host == hosts[rank]]
    return Place(ours.index(rank), len(ours), distinct.index(hosts[rank]), len(distinct))


def _run_identity(nonce: str) -> str:
    """The launcher's job id for people, and root's nonce, because an id alone is never trusted."""
    job = re.sub(r"[^A-Za-z0-9_-]", "-", detect_launch().job or "run")[:100]
    return f"{job.lstrip('-') or 'run'}-{nonce}"


def init(backend: str = "auto", *, timeout_s: float | None = None) -> Communicator:
    """Make the communicator that later calls use by default, and return it.

    Collective over all ranks that the launcher started. `backend`: "auto" adopts torch.distributed if it runs, else
    uses MPI under an MPI launcher, else Gloo under torchrun, else a world of one; "single", "gloo" or "mpi" ask for
    one. "gloo" initialises torch.distributed's default group if need be, "auto" never does. `timeout_s` bounds waits
    for peers. A second call returns what the first made. Raises NotInitializedError or MissingExtraError.
    """
    if backend not in BACKENDS:
        raise InvalidArgumentError(f"unknown backend {backend!r}; this version has {', '.join(BACKENDS)}")
    existing = _default.get()
    if existing is not None:
        return existing
    made = _make(backend, default_timeout_s() if timeout_s is None else timeout_s)
    _default.set(made)
    return made


def _make(backend: str, timeout_s: float) -> Communicator:
    launch = detect_launch()
    if backend == "single":
        return communicator(SingleBackend(), timeout_s)
    if backend == "auto" and _torch_default_group() is not None:
        return from_process_group(_torch_default_group(), timeout_s=timeout_s)
    if backend == "mpi" or (backend == "auto" and launch.launcher in ("openmpi", "mpich")):
        from statexchange.comm import mpi_backend

        return communicator(mpi_backend.MPIBackend(mpi_backend.world()), timeout_s)
    if backend == "gloo" or launch.launcher == "torchrun":
        from statexchange.comm import torch_backend

        gloo = torch_backend.start_gloo(launch, default=backend == "gloo", timeout_s=timeout_s)
        return communicator(gloo, timeout_s)
    if launch.world_size > 1:
        raise NotInitializedError(
            f"{launch.variable} says {launch.world_size} ranks, but no transport was found: "
            "initialise torch.distributed first, or start under mpiexec or torchrun"
        )
    return communicator(SingleBackend(), timeout_s)


def _torch_default_group() -> Any:
    """The default group of torch.distributed, if the caller has imported torch and initialised it."""
    if "torch.distributed" not in sys.modules:
        return None
    from statexchange.comm.torch_backend import default_group

    return default_group()


def from_process_group(group: Any, *, timeout_s: float | None = None) -> Communicator:
    """The communicator of a torch ProcessGroup. Collective over the group, the first time."""
    from statexchange.comm.torch_backend import TorchBackend

    return _adopt(group, lambda wait: TorchBackend(group, wait), timeout_s)


def from_mpi(mpi_comm: Any, *, timeout_s: float | None = None) -> Communicator:
    """The communicator of an mpi4py communicator. Collective over it, the first time."""
    from statexchange.comm.mpi_backend import MPIBackend

    return _adopt(mpi_comm, lambda _wait: MPIBackend(mpi_comm), timeout_s)


def _adopt(group: object, backend: Callable[[float], Backend], timeout_s: float | None) -> Communicator:
    if id(group) not in _adopted:
        _forget_at_exit()
        wait = default_timeout_s() if timeout_s is None else timeout_s
        _adopted[id(group)] = (group, communicator(backend(wait), wait))
    return _adopted[id(group)][1]


def as_communicator(comm: Any = None) -> Communicator:
    """What `comm=` means: a Communicator, ProcessGroup, DeviceMesh or MPI communicator; None is the default.

    The default is `init`'s; else torch.distributed's default group if it is initialised; else, if a launcher speaks
    of several ranks, a NotInitializedError naming the variable; else a world of one.
    """
    if comm is None:
        return _default_communicator()
    if isinstance(comm, Communicator):
        return comm
    if type(comm).__name__ == "DeviceMesh":
        return _of_mesh(comm)
    if type(comm).__module__.startswith("mpi4py"):
        return from_mpi(comm)
    if "torch.distributed" in sys.modules and isinstance(comm, sys.modules["torch.distributed"].ProcessGroup):
        return from_process_group(comm)
    raise InvalidArgumentError(
        f"comm must be a Communicator, ProcessGroup, DeviceMesh or MPI communicator, not {type(comm)!r}"
    )


def _of_mesh(mesh: Any) -> Communicator:
    """The communicator of a mesh's ranks, found by the ranks: slicing a mesh makes a new object each time."""
    from statexchange.comm.torch_backend import TorchBackend, mesh_group

    torchs = _torch_default_group()
    key = (id(torchs), "mesh", *sorted(mesh.mesh.flatten().tolist()))
    if key not in _members:
        _forget_at_exit()
        wait = default_timeout_s()
        group = mesh_group(mesh, wait)
        made = from_process_group(group) if group is torchs else communicator(TorchBackend(group, wait), wait)
        _members[key] = (torchs, made)
    return _members[key][1]


def _default_communicator() -> Communicator:
    made = _default.get()
    if made is not None:
        return made
    group = _torch_default_group()
    if group is not None:
        return from_process_group(group)
    launch = detect_launch()
    if launch.world_size > 1:
        raise NotInitializedError(
            f"{launch.variable}={launch.world_size} says that this is one of several ranks, but there is no "
            "communicator: call statexchange.init() or torch.distributed.init_process_group() first",
            rank=launch.rank,
        )
    return _adopt(_ALONE, lambda _wait: SingleBackend(), None)


def members(ranks: Sequence[int], group: Any = None) -> Communicator:
    """The communicator of world ranks `ranks`, in that order. Collective over them only: nobody else has to call.

    `group` is None for the default world; a torch ProcessGroup, whose ranks torch counts in its default group anyway;
    or anything else that `comm=` takes, in which the ranks are counted.
    """
    torchs = _torch_default_group()
    if group is not None and not (torchs is not None and isinstance(group, type(torchs))):
        return as_communicator(group).subset(ranks)
    world = current()
    if world is not None or torchs is None:
        return (world or as_communicator(None)).subset(ranks)
    from statexchange.comm import torch_backend

    # The default group has no communicator yet, and making one would need ranks that do not take part.
    key = (id(torchs), *ranks)
    if key not in _members:
        _forget_at_exit()
        wait = default_timeout_s()
        _members[key] = (torchs, communicator(torch_backend.of_ranks(ranks, wait), wait))
    return _members[key][1]


@contextlib.contextmanager
def use(comm: Communicator) -> Iterator[Communicator]:
    """Make `comm` the default inside a block, for this thread. Not collective."""
    token = _default.set(comm)
    try:
        yield comm
    finally:
        _default.reset(token)


def current() -> Communicator | None:
    """The communicator that exists already, made or adopted; never makes one. Not collective."""
    made = _default.get()
    if made is not None:
        return made
    kept = _adopted.get(id(_torch_default_group()))
    return kept[1] if kept is not None else None


def is_initialized() -> bool:
    """Whether `init` has made a communicator. Not collective."""
    return _default.get() is not None


def get_communicator() -> Communicator:
    """The default communicator, as `comm=None` means it. Collective where it has to be made."""
    return as_communicator(None)


def get_backend() -> str:
    """Name of the current backend, "single" before `init`. Not collective."""
    made = current()
    return made.backend if made is not None else "single"


def get_rank() -> int:
    """This rank, also by a torch.distributed that nobody has adopted yet; 0 before any `init`. Not collective."""
    made, group = current(), _torch_default_group()
    return made.rank if made is not None else int(group.rank()) if group is not None else 0


def get_world_size() -> int:
    """Number of ranks, as `get_rank` knows them; 1 before any `init`. Not collective."""
    made, group = current(), _torch_default_group()
    return made.world_size if made is not None else int(group.size()) if group is not None else 1


def get_local_rank() -> int:
    """This rank within its host, as the launcher says where no communicator knows; 0 without either. Not collective."""
    made = current()
    return made.local_rank if made is not None else detect_launch().local_rank


def _forget_at_exit() -> None:
    """A Gloo group that outlives the interpreter's end aborts the process."""
    if not _adopted and not _members:
        atexit.register(_forget)


def _forget() -> None:
    """Close and drop every group that was adopted."""
    for _, kept in [*_adopted.values(), *_members.values()]:
        kept.close()
    _adopted.clear()
    _members.clear()


def shutdown() -> None:
    """Close what `init` made and forget adopted groups; torch.distributed and MPI themselves are left running.

    Not collective: peers that still wait for this rank raise PeerError.
    """
    made = _default.get()
    if made is not None:
        made.close()
        _default.set(None)
    _forget()
