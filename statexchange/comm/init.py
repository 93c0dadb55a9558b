"""Making the communicator that later calls use by default: by a launcher, a rendezvous or MPI."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from statexchange.comm import adopt, defaults
from statexchange.comm.adopt import from_process_group, of_process_group, torch_default_group
from statexchange.comm.backends.backend import Backend
from statexchange.comm.backends.single import SingleBackend
from statexchange.comm.bootstrap import communicator, is_forked_from_rank, refuse_inherited
from statexchange.comm.calls import public_call
from statexchange.comm.communicator import Communicator
from statexchange.comm.devices import Devices, check_devices, choose
from statexchange.errors import ForkedError, InvalidArgumentError, needing_torch
from statexchange.settings import check_timeout, default_timeout_s, detect_launch

if TYPE_CHECKING:
    from statexchange.comm.tcp_store import SharedStore

__all__ = ["init", "shutdown"]

_log = logging.getLogger("statexchange")
BACKENDS = ("auto", "single", "shm", "gloo", "nccl", "mpi")


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
    existing = defaults.default()
    if existing is not None and not existing.is_inherited:
        _warn_if_different(existing, wish)
        return existing
    _check_wish(wish)
    if is_forked_from_rank() and wish.backend != "single" and wish.rendezvous is None:
        raise ForkedError(
            "this process was forked from a rank, and is none itself: init() in the processes that the launcher "
            "started, or give a rendezvous for a world of its own"
        )
    with needing_torch("init without MPI"):
        made = _make(wish, default_timeout_s() if seconds is None else seconds)
    try:
        with public_call("init"), made.phase("choosing a device"):
            made.compute_on(choose(devices, defaults.local_rank_of(made)))
        made.forget_callers()
    except BaseException:
        made.close()
        raise
    _asked[made] = wish
    defaults.set_default(made)
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


def _warn_if_different(existing: Communicator, wish: _Wish) -> None:
    first = _asked.get(existing, _PLAIN)
    names = [field.name for field in fields(_Wish)]
    others = [n for n in names if getattr(wish, n) not in (getattr(_PLAIN, n), getattr(first, n))]
    if others:
        given = ", ".join(f"{name}={getattr(wish, name)!r}" for name in others)
        _log.warning("init was called before, and its communicator stays: %s is not used", given)


def _make(wish: _Wish, timeout_s: float) -> Communicator:
    check = wish.check != "off"
    torchs = None if wish.rendezvous is not None else torch_default_group()
    if wish.backend == "single":
        return communicator(SingleBackend(), timeout_s)
    if wish.backend == "auto" and torchs is not None:
        return (
            from_process_group(torchs, timeout_s=timeout_s)
            if check
            else of_process_group(torchs, timeout_s, check=False)
        )
    if wish.backend in ("gloo", "nccl"):
        return _make_by_torch(wish, timeout_s)
    prefer = {"mpi": "carrier"}.get(wish.backend, wish.backend)
    return communicator(_carrier(wish, timeout_s), timeout_s, prefer=prefer, check=check)


def _make_by_torch(wish: _Wish, timeout_s: float) -> Communicator:
    from statexchange.comm.backends import torch_groups
    from statexchange.comm.backends.gloo import TorchBackend
    from statexchange.comm.backends.nccl import NCCLBackend
    from statexchange.comm.backends.store import StoreCarrier

    of_gpus = wish.backend == "nccl"
    running = torch_default_group()
    refuse_inherited(running)
    prefer, check = "auto" if of_gpus else "carrier", wish.check != "off"
    if running is not None:
        carrier = TorchBackend(running, timeout_s)
        devices = NCCLBackend(running, carrier) if of_gpus else None
        return communicator(carrier, timeout_s, prefer=prefer, check=check, start=lambda: (carrier, devices))
    shared = _store(wish, timeout_s)
    store, rank, size = shared.lasting, shared.rank, shared.world_size

    def start() -> tuple[Backend, Backend | None]:
        begin = torch_groups.start_nccl if of_gpus else torch_groups.start_gloo
        group = begin(store, rank, size, timeout_s)
        made = TorchBackend(group, timeout_s)
        return made, NCCLBackend(group, made) if of_gpus else None

    meeting = StoreCarrier(store, rank, size)
    return communicator(meeting, timeout_s, prefer=prefer, check=check, start=start)


def _carrier(wish: _Wish, timeout_s: float) -> Backend:
    """What the ranks can meet over."""
    launch = detect_launch()
    if wish.backend == "mpi" or (wish.rendezvous is None and launch.launcher in ("openmpi", "mpich")):
        from statexchange.comm.backends import mpi

        return mpi.MPIBackend(mpi.world(launch), timeout_s=timeout_s)
    if wish.rendezvous is None and launch.world_size == 1:
        return SingleBackend()
    from statexchange.comm.backends.gloo import TorchBackend
    from statexchange.comm.backends.store import StoreCarrier

    running = torch_default_group() if wish.rendezvous is None else None
    if running is not None:
        return TorchBackend(running, timeout_s)
    shared = _store(wish, timeout_s)
    return StoreCarrier(shared.store, shared.rank, shared.world_size, server=shared.server)


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


def shutdown() -> None:
    """Close what `init` made and forget adopted groups; torch.distributed and MPI themselves are left running.

    Not collective: peers that still wait for this rank raise PeerError.
    """
    made = defaults.default()
    if made is not None:
        made.close()
        defaults.set_default(None)
    adopt.forget_all()
