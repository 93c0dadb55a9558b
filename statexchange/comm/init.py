"""Make the communicator that later calls use by default: through a launcher, a rendezvous or MPI.

`init` first gets a bootstrap backend, over which the ranks can exchange bytes: MPI, a running torch.distributed, or a
key-value store (rendezvous.py). bootstrap.py then forms the communicator over it.
"""

from __future__ import annotations

import importlib.util
import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from statexchange.comm import defaults
from statexchange.comm.backends.backend import Backend
from statexchange.comm.backends.single import SingleBackend
from statexchange.comm.bootstrap import form_communicator
from statexchange.comm.communicator import Communicator
from statexchange.comm.defaults import public_call
from statexchange.comm.lifetime import is_forked_from_rank, refuse_inherited
from statexchange.errors import ForkedError, InvalidArgumentError, UnsupportedError, needing_extra
from statexchange.settings import check_timeout, default_timeout_s, detect_launch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from statexchange.comm.backends.store import StoreBootstrap

_log = logging.getLogger("statexchange")
BACKEND_CHOICES = ("auto", "single", "shm", "gloo", "nccl", "mpi")  # what `init` takes as `backend`


@dataclass(frozen=True, slots=True)
class InitOptions:
    """The arguments of a call of `init`."""

    backend: str
    rank: int | None
    world_size: int | None
    rendezvous: str | None
    devices: Devices
    timeout_s: float | None
    check: str


_DEFAULTS = InitOptions("auto", None, None, None, None, None, "auto")
_options_of: weakref.WeakKeyDictionary[Communicator, InitOptions] = weakref.WeakKeyDictionary()


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

    Collective over all ranks that the launcher started, or that are started by hand with `rendezvous`, `rank` and
    `world_size`. Blocks until all ranks have called. A second call returns the communicator of the first, with a
    warning if its arguments differ.

    In a process that was forked from a rank the launcher's environment describes the parent: `init` raises ForkedError
    there, unless `backend` is "single" or a `rendezvous` is given.

    Args:
        backend: how tensors of CPUs move, and how the ranks find each other.
            "auto" adopts torch.distributed if it runs, else follows torchrun, Open MPI, MPICH or Slurm, in this order,
            else makes a world of one; tensors then go through shared memory where ranks share a host.
            "shm" requires shared memory. "gloo", "nccl" and "mpi" use that transport alone, "single" a world of one;
            groups of its ranks, as those of `new_group`, share memory again where they can.
            "gloo" and "nccl" initialise torch.distributed's default group if need be, the others never do. Under MPI
            torch is not needed: without it values, barriers and groups work, and collectives on tensors and arrays
            raise MissingExtraError.
        rank: this rank, with `rendezvous`.
        world_size: the number of ranks, with `rendezvous`.
        rendezvous: the place at which ranks without a launcher find each other: "file:///directory" or
            "tcp://host:port". In a directory, which may lie on NFS and is made if it is missing, rank 0 announces the
            store that it serves on all interfaces. No file remains there.
        devices: the device on which this rank computes. None assigns the GPUs to the ranks of a host in turn, a list
            names the device of each `local_rank`, False is the CPU.
        timeout_s: the limit of a wait for peers, in seconds without progress.
        check: "off" trusts that ranks make the same calls: on several hosts this saves a small message per call.

    Returns:
        The communicator.

    Raises:
        InvalidArgumentError: an argument is wrong, or two do not go together.
        NotInitializedError: the ranks cannot reach each other by the launcher or `rendezvous`.
        MissingExtraError: what `backend` needs is not installed.
        UnsupportedError: the hosts of the ranks cannot provide `backend`.
        ForkedError: this process was forked from a rank.
        StallError: some ranks did not call in time; `missing` lists them.

    Example:
        >>> comm = sx.init("single")
        >>> comm.rank, comm.world_size
        (0, 1)
        >>> sx.init() is comm
        True
    """
    seconds = None if timeout_s is None else check_timeout(timeout_s)
    options = InitOptions(backend, rank, world_size, rendezvous, devices, timeout_s, check)
    existing = defaults.default()
    if existing is not None and not existing.is_inherited:
        _warn_if_different(existing, options)
        return existing
    _check_options(options)
    if is_forked_from_rank() and options.backend != "single" and options.rendezvous is None:
        raise ForkedError(
            "this process was forked from a rank, and is none itself: init() in the processes that the launcher "
            "started, or give a rendezvous for a world of its own"
        )
    with needing_extra("init without MPI"):
        comm = _make(options, default_timeout_s() if seconds is None else seconds)
    try:
        # A phase, as a rank may lack its GPU: then all raise, and the others do not wait for it in their first call.
        with public_call("init"), comm.phase("choosing a device"):
            comm.compute_on(_choose(devices, defaults.local_rank_of(comm)))
    except BaseException:
        comm.close()
        raise
    # Last, when nothing can fail any more: a later `init` returns the default, if there is one.
    _options_of[comm] = options
    defaults.set_default(comm)
    return comm


def _check_options(options: InitOptions) -> None:
    if options.backend not in BACKEND_CHOICES:
        raise InvalidArgumentError(
            f"unknown backend {options.backend!r}; this version has {', '.join(BACKEND_CHOICES)}"
        )
    if options.check not in ("auto", "off"):
        raise InvalidArgumentError(f"check must be 'auto' or 'off', not {options.check!r}")
    _check_devices(options.devices)
    for name, number in (("rank", options.rank), ("world_size", options.world_size)):
        if number is not None and not hasattr(number, "__index__"):
            raise InvalidArgumentError(f"{name} is a number, not {number!r}")
    if not isinstance(options.rendezvous, (str, type(None))):
        raise InvalidArgumentError(
            f"rendezvous is 'file:///directory' or 'tcp://host:port', not {options.rendezvous!r}"
        )
    if options.rendezvous is None and (options.rank is not None or options.world_size is not None):
        raise InvalidArgumentError("rank and world_size come with a rendezvous, or from a launcher's environment")
    if options.rendezvous is not None and options.backend in ("mpi", "single"):
        raise InvalidArgumentError(f"the {options.backend} backend takes no rendezvous")


def _warn_if_different(existing: Communicator, options: InitOptions) -> None:
    if options not in (_DEFAULTS, _options_of.get(existing, _DEFAULTS)):
        _log.warning("init was called before, and its communicator stays: these are not used: %s", options)


def _make(options: InitOptions, timeout_s: float) -> Communicator:
    check = options.check != "off"
    is_torchs = options.backend in ("gloo", "nccl")
    # With a rendezvous the caller names the ranks, which need not be those of a group that runs.
    running = defaults.torch_default_group() if is_torchs or options.rendezvous is None else None
    if options.backend == "auto" and running is not None:
        return defaults.adopted(running, timeout_s, check=check)
    # NCCL moves tensors of GPUs alone. Those of CPUs go as with "auto".
    prefer = {"auto": "auto", "nccl": "auto", "shm": "shm"}.get(options.backend, "transport")
    if not is_torchs:
        return form_communicator(_bootstrap_backend(options, running, timeout_s), timeout_s, prefer=prefer, check=check)
    bootstrap = _bootstrap_at_store(options, running, timeout_s)

    def start_devices() -> Backend | None:
        from statexchange.comm.backends import torch_groups
        from statexchange.comm.backends.nccl import NCCLBackend

        group = defaults.torch_default_group()
        if group is None:  # else the user has initialised it, or this is the second call
            store, rank, size = bootstrap.lasting_store, bootstrap.rank, bootstrap.world_size
            group = torch_groups.start(options.backend, store, rank, size, timeout_s)
        return NCCLBackend(group, bootstrap) if options.backend == "nccl" else None

    return form_communicator(bootstrap, timeout_s, prefer=prefer, check=check, start_devices=start_devices)


def _bootstrap_backend(options: InitOptions, running: ProcessGroup | None, timeout_s: float) -> Backend:
    """Return a backend over which the ranks can exchange bytes. Collective."""
    launch = detect_launch()
    # Before MPI and a running group: also as one of their ranks this is a world of one.
    if options.backend == "single":
        return SingleBackend()
    if options.backend == "mpi" or (options.rendezvous is None and launch.launcher in ("openmpi", "mpich")):
        from statexchange.comm.backends import mpi

        return mpi.MPIBackend(mpi.world(launch), timeout_s=timeout_s)
    # A running group may have several ranks without any launcher, as those that a script has spawned.
    if options.rendezvous is None and running is None and launch.world_size == 1:
        return SingleBackend()
    return _bootstrap_at_store(options, running, timeout_s)


def _bootstrap_at_store(options: InitOptions, running: ProcessGroup | None, timeout_s: float) -> StoreBootstrap:
    """Return a bootstrap backend at the store of torch's `running` default group, or at a new one. Collective."""
    from statexchange.comm import rendezvous
    from statexchange.comm.backends import store

    if running is not None:
        refuse_inherited(running)
        return store.over_group(running, timeout_s)
    launch = detect_launch()
    if options.rendezvous is None:
        return rendezvous.by_launcher(launch, timeout_s)
    rank, size = options.rank, options.world_size
    if launch.variable:  # else the launcher's numbers are those of a process without one, 0 of 1
        if rank is None:
            rank = launch.rank
        if size is None:
            size = launch.world_size
    if rank is None or size is None or not 0 <= rank < size:
        raise InvalidArgumentError(
            "a rendezvous needs rank and world_size with 0 <= rank < world_size, "
            f"not {options.rank} and {options.world_size}"
        )
    return rendezvous.at_url(options.rendezvous, rank, size, timeout_s)


def shutdown() -> None:
    """Close what `init` made and forget adopted groups; torch.distributed and MPI themselves are left running.

    Not collective: peers that still wait for this rank raise PeerError.

    Example:
        >>> comm = sx.init("single")
        >>> sx.shutdown()
        >>> comm.is_closed
        True
    """
    comm = defaults.default()
    if comm is not None:
        comm.close()
        defaults.set_default(None)
    defaults.forget_all()  # also where there is no default: adopted groups have communicators of their own


Devices = Sequence[object] | Literal[False] | None


def _choose(devices: Devices, local_rank: int) -> str:
    """Return the name of this rank's device; a GPU becomes torch's current one. `devices` is the argument of `init`.

    Not collective.
    """
    if devices is False:
        return "cpu"
    if devices is None:
        num_gpus = _num_gpus()
        if not num_gpus:
            return "cpu"
        return _use(f"cuda:{local_rank % num_gpus}")  # several ranks may share a GPU
    if not 0 <= local_rank < len(devices):
        raise InvalidArgumentError(f"devices={list(devices)} has no device for local_rank {local_rank}")
    return _use(_name(devices[local_rank], devices))


def _check_devices(devices: object) -> None:
    """Raise InvalidArgumentError unless `devices` is of a type that `init` takes. Not collective."""
    is_list = isinstance(devices, Sequence) and not isinstance(devices, (str, bytes))
    if not (devices is None or devices is False or is_list):
        raise InvalidArgumentError(f"devices is None, False or a list with a device for each rank, not {devices!r}")


def _num_gpus() -> int:
    if importlib.util.find_spec("torch") is None:  # as MPI needs none
        return 0
    import torch

    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.device_count())


def _name(entry: object, devices: Sequence[object]) -> str:
    import torch

    try:
        # A bool is an int in Python: True would be GPU 1.
        if isinstance(entry, bool):
            raise TypeError("neither a number nor a name")
        device = torch.device("cuda", entry) if isinstance(entry, int) else torch.device(cast("str", entry))
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidArgumentError(f"devices={list(devices)}: {entry!r} is no device") from error
    if device.type == "cuda" and (device.index or 0) >= _num_gpus():
        raise InvalidArgumentError(f"devices={list(devices)}: there is no {device}, this host has {_num_gpus()} GPUs")
    return str(device)


def _use(name: str) -> str:
    if name.startswith("cuda"):
        import torch

        try:
            torch.cuda.set_device(name)
        except RuntimeError as error:  # as in a process that was forked after its parent had used CUDA
            text = f"this process cannot use {name}: {error}. Start it by spawn, or give init devices=False"
            raise UnsupportedError(text) from error
    return name
