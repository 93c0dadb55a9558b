"""Which communicator a call uses: the one of `init`, torch.distributed's, or a world of one."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import json
import logging
import platform
import re
import secrets
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeAlias

from statexchange.comm import forks
from statexchange.comm.backend import Backend, Look, Wait
from statexchange.comm.board import open_board
from statexchange.comm.communicator import CommLike, Communicator
from statexchange.comm.control_page import ControlPage, meet
from statexchange.comm.devices import Devices, check_devices, choose
from statexchange.comm.session import Place, Session, making, public_call
from statexchange.comm.single import SingleBackend
from statexchange.errors import (
    ForkedError,
    InvalidArgumentError,
    NotInitializedError,
    UnsupportedError,
    from_record,
    needing_torch,
    needs_torch,
    to_record,
)
from statexchange.processes import host_identity
from statexchange.settings import check_timeout, default_timeout_s, detect_launch
from statexchange.shared_memory import sweep

if TYPE_CHECKING:
    from statexchange.comm.rendezvous import SharedStore

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

# What `use` says in this thread; where it says nothing, what `init` has made for the process.
_default: ContextVar[Communicator | None] = ContextVar("statexchange_communicator")
_of_process: Communicator | None = None
# Adopted groups by identity; the group is kept with its communicator so that its id cannot be given to another.
_adopted: dict[int, tuple[object, Communicator]] = {}
_members: dict[tuple[int | str, ...], tuple[object, Communicator]] = {}
_alive: weakref.WeakSet[Communicator] = weakref.WeakSet()
_ALONE = object()  # stands for a world of one, which is kept so that its run has one identity
_ON_NODE = 1  # the fingerprint of meetings within a collective that all hosts have entered alike
_log = logging.getLogger("statexchange")


class _Inheritance:
    """What this process has from the rank from which it was forked, if it was."""

    def __init__(self) -> None:
        self.is_from_rank = False
        self.groups: list[object] = []

    def disown(self) -> None:
        """Note which groups the parent had, since a call over one would be the parent's; drop its world of one."""
        # One that was open is either still so here, or has been cut off already.
        was_open = any(made.is_inherited or not made.is_closed for made in _alive)
        self.is_from_rank = self.is_from_rank or was_open
        if "torch.distributed" in sys.modules:
            from statexchange.comm.torch_backend import known_groups

            self.groups = known_groups()
        _adopted.pop(id(_ALONE), None)

    def refuse(self, group: object) -> None:
        """ForkedError if `group` is the parent's."""
        if any(group is known for known in self.groups) or (
            self.is_from_rank and type(group).__module__.startswith("mpi4py")
        ):
            raise ForkedError("this process was forked from a rank, to which this group belongs")


_inheritance = _Inheritance()
Start: TypeAlias = Callable[[], tuple[Backend, Backend | None]]
BACKENDS = ("auto", "single", "shm", "gloo", "nccl", "mpi")


def communicator(
    carrier: Backend,
    timeout_s: float,
    *,
    prefer: str = "auto",
    check: bool = True,
    start: Start | None = None,
) -> Communicator:
    """A communicator of the ranks that can exchange messages over `carrier`. Collective.

    `prefer` "auto" takes shared memory where all ranks share a host, and both where some do; "shm" insists on it;
    "carrier" takes the carrier itself. `start` is called when the ranks see each other's failures: it returns what is
    the carrier from then on, and what moves the tensors of GPUs, if anything does.
    """
    sweep()
    if carrier.world_size == 1:
        if start is not None:
            carrier, _ = start()
        forks.cut_off_in_children(_inheritance)
        alone = Session(SingleBackend(), carrier, None, None, Place(0, (0,), (platform.node(),)), timeout_s)
        return Communicator(alone, _run_identity(secrets.token_hex(8)))
    try:
        made = Communicator(*_meet(carrier, timeout_s, prefer, check, start))
    except BaseException:
        carrier.close()  # an error that somebody keeps must not keep rank 0's port
        raise
    _alive.add(made)
    forks.cut_off_in_children(_inheritance)
    _close_at_exit()
    return made


def _meet(carrier: Backend, timeout_s: float, prefer: str, check: bool, start: Start | None) -> tuple[Session, str]:
    """The session of all ranks and the name of their run. Collective."""

    def exchange(payload: bytes) -> list[bytes]:
        return carrier.exchange(payload, Wait(timeout_s, "the meeting of all ranks"))

    has_torch = importlib.util.find_spec("torch") is not None
    ours = [host_identity(), platform.node(), secrets.token_hex(8), _launchers_local_rank(carrier), has_torch]
    facts = [json.loads(answer) for answer in exchange(json.dumps(ours).encode())]
    place = _place(facts, carrier.rank)
    page = meet(carrier.rank, carrier.world_size, exchange)
    run = _run_identity(facts[0][2])
    if not all(fact[4] for fact in facts):
        prefer = _without_torch(prefer)
    devices = None
    if page is not None:
        with _failing_together(page, page, place):
            if start is not None:
                carrier, devices = start()
                start = None
            backend = carrier if prefer == "carrier" else _shared_memory_backend(page, carrier, timeout_s)
        if backend is not None:
            return Session(backend, carrier, page, page, place, timeout_s, check=check, devices=devices), run
    _say_why_not_shared(place, prefer)
    board = open_board(carrier, place, timeout_s)
    with _failing_together(None, board, place):
        if start is not None:
            carrier, devices = start()
        transport = carrier.transport(timeout_s)
        several = prefer == "auto" and 1 < len(place.leaders) < len(place.nodes)
        backend = _hierarchical_backend(transport, place, timeout_s) if several else transport
    session = Session(backend, transport, None, board, place, timeout_s, check=check, devices=devices)
    return session, run


@contextlib.contextmanager
def _failing_together(page: ControlPage | None, look: Look | None, place: Place) -> Iterator[None]:
    """A block of `init` that ends on all ranks, with an error that names the rank, when it fails on one. Collective."""
    try:
        with making(look, place.hosts):
            yield
    except BaseException as error:
        known = from_record(to_record(error, place.rank, "init", place.hosts[place.rank]))
        if page is not None:
            page.leave(known)
        if look is not None:
            look.tell(known)
            look.close()
        raise


def _without_torch(prefer: str) -> str:
    """Return what to prefer where a rank has no torch, without which nothing moves through shared memory."""
    if prefer == "shm":
        raise needs_torch('init("shm")')
    return "carrier"


def _shared_memory_backend(page: ControlPage, carrier: Backend, timeout_s: float) -> Backend | None:
    """Return the backend over `page`; None, on all ranks, if /dev/shm has too little room for it. Collective."""
    from statexchange.comm.shared_memory_backend import SharedMemoryBackend

    backend = SharedMemoryBackend(page, carrier)
    if page.kind == "memfd" or backend.reserve(Wait(timeout_s, "the reservation of shared memory")):
        return backend
    backend.release()
    return None


def _hierarchical_backend(carrier: Backend, place: Place, timeout_s: float) -> Backend:
    """Shared memory within each host, or else the carrier, and the carrier between hosts. Collective."""
    from statexchange.comm.hierarchical_backend import HierarchicalBackend

    local = carrier.subset(place.mates, timeout_s) if len(place.mates) > 1 else SingleBackend()

    def exchange(payload: bytes) -> list[bytes]:
        return local.exchange(payload, Wait(timeout_s, "the meeting of a host's ranks"))

    page = meet(local.rank, local.world_size, exchange) if len(place.mates) > 1 else None
    shared = None if page is None else _shared_memory_backend(page, local, timeout_s)
    node = local if shared is None else shared
    leads = place.rank == place.mates[0]
    leaders = carrier.subset(place.leaders, timeout_s) if leads else None

    def meet_on_node(location: int, wait: Wait) -> Sequence[int]:
        assert page is not None
        return page.meet(_ON_NODE, location, wait)

    return HierarchicalBackend(carrier, node, leaders, place, meet_on_node)


def _say_why_not_shared(place: Place, prefer: str) -> None:
    """All ranks come here or none: shared memory was tried, and some rank could not."""
    hosts = sorted(set(place.hosts))
    if prefer == "shm":
        raise UnsupportedError(
            f"the ranks, on {', '.join(hosts)}, cannot share memory: they need one host, and one /proc, "
            "or one /dev/shm with room for some MiB of each rank"
        )
    if len(place.leaders) == 1 and place.rank == 0:
        _log.warning(
            "the ranks on %s cannot share memory (containers, or a small /dev/shm?): messages go over sockets, slower",
            hosts[0],
        )


def _launchers_local_rank(carrier: Backend | Communicator) -> int | None:
    """Return this process's local rank as its launcher counts; None if these are not the ranks that it has started."""
    launch = detect_launch()
    return launch.local_rank if (launch.rank, launch.world_size) == (carrier.rank, carrier.world_size) else None


def _place(facts: list[list[Any]], rank: int) -> Place:
    identities = [fact[0] for fact in facts]
    distinct = list(dict.fromkeys(identities))
    nodes = tuple(distinct.index(identity) for identity in identities)
    local_ranks = [fact[3] for fact in facts]
    # Open MPI 5 does not count a host's ranks in rank order. What scripts see before `init` must be true after it.
    expected = [(node, local_rank) for node in range(len(distinct)) for local_rank in range(nodes.count(node))]
    trusted = None not in local_ranks and sorted(zip(nodes, local_ranks, strict=True)) == expected
    return Place(rank, nodes, tuple(fact[1] for fact in facts), tuple(local_ranks) if trusted else ())


def _run_identity(nonce: str) -> str:
    """The launcher's job id for people, and root's nonce, because an id alone is never trusted."""
    job = re.sub(r"[^A-Za-z0-9_-]", "-", detect_launch().job or "run")[:100]
    return f"{job.lstrip('-') or 'run'}-{nonce}"


@dataclass(frozen=True, slots=True)
class _Wish:
    """What a call of `init` asks for."""

    backend: str
    rank: int | None
    world_size: int | None
    rendezvous: str | None
    devices: Devices
    timeout_s: float | None
    check: str


_PLAIN = _Wish("auto", None, None, None, None, None, "auto")
_asked: weakref.WeakKeyDictionary[Communicator, _Wish] = weakref.WeakKeyDictionary()


def init(
    backend: str = "auto",
    *,
    rank: int | None = None,
    world_size: int | None = None,
    rendezvous: str | None = None,
    devices: Devices = None,
    timeout_s: float | None = None,
    check: str = "auto",
) -> Communicator:
    """Make the communicator that later calls use by default, and return it.

    Collective over all ranks that the launcher started, or that are started by hand with `rendezvous`
    ("file:///directory" or "tcp://host:port"), `rank` and `world_size`. In a directory, which may lie on NFS, rank 0
    publishes where it serves a store: at the loopback address if all ranks share a host, else on the interface that
    GLOO_SOCKET_IFNAME names, else at the address of its host's name; nothing is left there. A second call returns what
    the first made, with a warning if it asks for something else.

    `backend`: "auto" adopts torch.distributed if it runs, else follows torchrun, Open MPI, MPICH or Slurm, in this
    order, else makes a world of one; CPU tensors then go through shared memory where ranks share a host. "shm"
    insists on that, "gloo", "nccl" and "mpi" take that transport alone, "single" a world of one. "gloo" and "nccl"
    initialise torch.distributed's default group if need be, the others never do. Under MPI this takes no torch: then
    values, barriers and groups go as ever, and collectives on tensors and arrays are a MissingExtraError.
    `devices`: where this rank computes. None deals the GPUs to the ranks of a host in turn, a list names the device of
    each `local_rank`, False leaves it at the CPU. `timeout_s` bounds waits for peers (seconds). `check="off"` trusts
    that ranks make the same calls: on several hosts this saves a small message per call.
    In a process that was forked from a rank the launcher's environment describes the parent: `init` raises ForkedError
    there, unless it is asked for backend "single", or for a world of its own by `rendezvous`.
    Raises InvalidArgumentError, NotInitializedError, MissingExtraError, UnsupportedError, ForkedError or StallError.
    """
    seconds = None if timeout_s is None else check_timeout(timeout_s)
    wish = _Wish(backend, rank, world_size, rendezvous, devices, timeout_s, check)
    existing = _made()
    if existing is not None and not existing.is_inherited:
        _warn_if_different(existing, wish)
        return existing
    _check_wish(wish)
    if _inheritance.is_from_rank and wish.backend != "single" and wish.rendezvous is None:
        raise ForkedError(
            "this process was forked from a rank, and is none itself: init() in the processes that the launcher "
            "started, or give a rendezvous for a world of its own"
        )
    with needing_torch("init without MPI"):
        made = _make(wish, default_timeout_s() if seconds is None else seconds)
    try:
        with public_call("init"), made.phase("choosing a device"):
            made.compute_on(choose(devices, _local_rank_of(made)))
        made.forget_callers()
    except BaseException:
        made.close()
        raise
    _asked[made] = wish
    _keep(made)
    return made


def _check_wish(wish: _Wish) -> None:
    if wish.backend not in BACKENDS:
        raise InvalidArgumentError(f"unknown backend {wish.backend!r}; this version has {', '.join(BACKENDS)}")
    if wish.check not in ("auto", "off"):
        raise InvalidArgumentError(f"check must be 'auto' or 'off', not {wish.check!r}")
    check_devices(wish.devices)
    for name, given in (("rank", wish.rank), ("world_size", wish.world_size)):
        if given is not None and not hasattr(given, "__index__"):
            raise InvalidArgumentError(f"{name} is a number, not {given!r}")
    if not isinstance(wish.rendezvous, (str, type(None))):
        raise InvalidArgumentError(f"rendezvous is 'file:///directory' or 'tcp://host:port', not {wish.rendezvous!r}")
    if wish.rendezvous is None and (wish.rank is not None or wish.world_size is not None):
        raise InvalidArgumentError("rank and world_size come with a rendezvous, or from a launcher's environment")
    if wish.rendezvous is not None and wish.backend in ("mpi", "single"):
        raise InvalidArgumentError(f"the {wish.backend} backend takes no rendezvous")


def _made() -> Communicator | None:
    """What `use` says in this thread, else what `init` has made for the process.

    A world of one from before a fork counts as none.
    """
    try:
        made = _default.get()
    except LookupError:
        made = _of_process
    return None if made is not None and made.is_inherited and made.world_size == 1 else made


def _keep(comm: Communicator | None) -> None:
    """Make `comm` the default where `_made` would look for it."""
    global _of_process
    try:
        _default.get()
        _default.set(comm)
    except LookupError:
        _of_process = comm


def _warn_if_different(existing: Communicator, wish: _Wish) -> None:
    first = _asked.get(existing, _PLAIN)
    names = [field.name for field in fields(_Wish)]
    others = [n for n in names if getattr(wish, n) not in (getattr(_PLAIN, n), getattr(first, n))]
    if others:
        given = ", ".join(f"{name}={getattr(wish, name)!r}" for name in others)
        _log.warning("init was called before, and its communicator stays: %s is not used", given)


def _make(wish: _Wish, timeout_s: float) -> Communicator:
    check = wish.check != "off"
    torchs = None if wish.rendezvous is not None else _torch_default_group()
    if wish.backend == "single":
        return communicator(SingleBackend(), timeout_s)
    if wish.backend == "auto" and torchs is not None:
        return from_process_group(torchs, timeout_s=timeout_s) if check else _of_group(torchs, timeout_s, check=False)
    if wish.backend in ("gloo", "nccl"):
        return _make_by_torch(wish, timeout_s)
    prefer = {"mpi": "carrier"}.get(wish.backend, wish.backend)
    return communicator(_carrier(wish, timeout_s), timeout_s, prefer=prefer, check=check)


def _make_by_torch(wish: _Wish, timeout_s: float) -> Communicator:
    from statexchange.comm import torch_backend

    of_gpus = wish.backend == "nccl"
    running = _torch_default_group()
    _inheritance.refuse(running)
    prefer, check = "auto" if of_gpus else "carrier", wish.check != "off"
    if running is not None:
        carrier = torch_backend.TorchBackend(running, timeout_s)
        devices = torch_backend.NCCLBackend(running, carrier) if of_gpus else None
        return communicator(carrier, timeout_s, prefer=prefer, check=check, start=lambda: (carrier, devices))
    shared = _store(wish, timeout_s)
    store, rank, size = shared.lasting, shared.rank, shared.world_size

    def start() -> tuple[Backend, Backend | None]:
        begin = torch_backend.start_nccl if of_gpus else torch_backend.start_gloo
        group = begin(store, rank, size, timeout_s)
        made = torch_backend.TorchBackend(group, timeout_s)
        return made, torch_backend.NCCLBackend(group, made) if of_gpus else None

    meeting = torch_backend.StoreCarrier(store, rank, size)
    return communicator(meeting, timeout_s, prefer=prefer, check=check, start=start)


def _carrier(wish: _Wish, timeout_s: float) -> Backend:
    """What the ranks can meet over."""
    launch = detect_launch()
    if wish.backend == "mpi" or (wish.rendezvous is None and launch.launcher in ("openmpi", "mpich")):
        from statexchange.comm import mpi_backend

        return mpi_backend.MPIBackend(mpi_backend.world(launch), timeout_s=timeout_s)
    if wish.rendezvous is None and launch.world_size == 1:
        return SingleBackend()
    from statexchange.comm import torch_backend

    running = _torch_default_group() if wish.rendezvous is None else None
    if running is not None:
        return torch_backend.TorchBackend(running, timeout_s)
    shared = _store(wish, timeout_s)
    return torch_backend.StoreCarrier(shared.store, shared.rank, shared.world_size, server=shared.server)


def _store(wish: _Wish, timeout_s: float) -> SharedStore:
    """Return a torch Store that all ranks share. Collective."""
    from statexchange.comm import rendezvous

    launch = detect_launch()
    if wish.rendezvous is None:
        return rendezvous.store_of(launch, timeout_s)
    rank = launch.rank if wish.rank is None and launch.variable else wish.rank
    size = launch.world_size if wish.world_size is None and launch.variable else wish.world_size
    if rank is None or size is None or not 0 <= rank < size:
        raise InvalidArgumentError(
            f"a rendezvous needs rank and world_size with 0 <= rank < world_size, not {wish.rank} and {wish.world_size}"
        )
    return rendezvous.store_at(wish.rendezvous, rank, size, timeout_s)


def _torch_default_group() -> Any:
    """The default group of torch.distributed, if the caller has imported torch and initialised it."""
    if "torch.distributed" not in sys.modules:
        return None
    from statexchange.comm.torch_backend import default_group

    return default_group()


def from_process_group(group: Any, *, timeout_s: float | None = None) -> Communicator:
    """The communicator of a torch ProcessGroup. Collective over the group, the first time."""
    return _adopt(group, lambda wait_s: _of_group(group, wait_s), timeout_s)


def _of_group(group: Any, timeout_s: float, *, check: bool = True) -> Communicator:
    import torch.distributed as dist

    from statexchange.comm.torch_backend import NCCLBackend, TorchBackend

    carrier = TorchBackend(group, timeout_s)
    devices = NCCLBackend(group, carrier) if "nccl" in str(dist.get_backend_config(group)) else None
    return communicator(carrier, timeout_s, check=check, start=lambda: (carrier, devices))


def from_mpi(mpi_comm: Any, *, timeout_s: float | None = None) -> Communicator:
    """The communicator of an mpi4py communicator. Collective over it, the first time."""
    from statexchange.comm.mpi_backend import MPIBackend

    return _adopt(mpi_comm, lambda wait_s: communicator(MPIBackend(mpi_comm, timeout_s=wait_s), wait_s), timeout_s)


def _adopt(group: object, make: Callable[[float], Communicator], timeout_s: float | None) -> Communicator:
    wait = default_timeout_s() if timeout_s is None else check_timeout(timeout_s)
    if id(group) not in _adopted:
        _inheritance.refuse(group)
        _adopted[id(group)] = (group, make(wait))
    return _adopted[id(group)][1]


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
        _inheritance.refuse(torchs)
        wait = default_timeout_s()
        group = mesh_group(mesh, wait)
        made = from_process_group(group) if group is torchs else communicator(TorchBackend(group, wait), wait)
        _members[key] = (torchs, made)
    return _members[key][1]


def _default_communicator() -> Communicator:
    made = _made()
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
    return _adopt(_ALONE, lambda wait_s: communicator(SingleBackend(), wait_s), None)


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
        _inheritance.refuse(torchs)
        wait = default_timeout_s()
        _members[key] = (torchs, communicator(torch_backend.of_ranks(ranks, wait), wait))
    return _members[key][1]


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
    made = _made()
    if made is not None:
        return made
    kept = _adopted.get(id(_torch_default_group()))
    return kept[1] if kept is not None else None


def is_initialized() -> bool:
    """Whether `init` has made a communicator in this process. Not collective."""
    made = _made()
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
    made, group = current(), _torch_default_group()
    return made.rank if made is not None else int(group.rank()) if group is not None else 0


def get_world_size() -> int:
    """Number of ranks, as `get_rank` knows them; 1 before any `init`. Not collective."""
    made, group = current(), _torch_default_group()
    return made.world_size if made is not None else int(group.size()) if group is not None else 1


def get_local_rank() -> int:
    """Return this rank's number within its host: 0 before any `init`, unless a launcher has started it.

    Not collective. Under a launcher it is what the launcher says, before and after `init`. A launcher of several ranks
    that does not say it is a NotInitializedError before `init`.
    """
    made, launch = current(), detect_launch()
    if made is not None:
        return _local_rank_of(made)
    if launch.local_rank is None:
        raise NotInitializedError(
            f"{launch.variable}={launch.world_size} says that this is one of several ranks, but not which of its host: "
            "call statexchange.init() first",
            rank=launch.rank,
        )
    return launch.local_rank


def _local_rank_of(made: Communicator) -> int:
    """Return the launcher's local rank of this process, if `made` is of the ranks that it has started."""
    launchers = _launchers_local_rank(made)
    return made.local_rank if launchers is None else launchers


@functools.cache
def _close_at_exit() -> None:
    """Others must hear why this rank ends; and a Gloo group that outlives the interpreter's end aborts the process."""

    def close() -> None:
        for made in list(_alive):
            made.close(getattr(sys, "last_value", None))  # the uncaught error, if there was one
        _adopted.clear()
        _members.clear()

    atexit.register(close)


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
    made = _made()
    if made is not None:
        made.close()
        _keep(None)
    _forget()
