"""The state of a rank's process between two tasks: restored where that is possible, checked where it is not.

A process that runs another task must behave as a new process would. Some state can be restored: communicators, process
groups, the environment, the working directory, torch's seed. The rest is compared with how it was before the task,
and any difference means that the process must not be used again: threads, child processes, sockets, shared memory,
user and namespaces, limits, signal handlers, unreceived MPI messages, and functions of this package that a test has
replaced. Modules stay imported, and their variables keep their values.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import sys
import threading

_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
_NAMESPACES = ("mnt", "net", "pid", "user", "uts")


class CleanState:
    """The state of this process before a task."""

    def __init__(self) -> None:
        gc.freeze()  # so that gc.collect in `restore` skips the objects that exist already
        self._environ = dict(os.environ)
        self._directory = os.getcwd()
        self._functions = _functions()
        self._before = _checked_state()

    def restore(self) -> str | None:
        """Restore what can be restored; return a description of other differences, or None. Not collective."""
        _close_communicators()
        gc.collect()  # what the task has left in cycles may hold sockets and memory
        os.environ.clear()
        os.environ.update(self._environ)
        os.chdir(self._directory)
        _seed_torch()
        # Modules that the task has imported are new here, and no difference.
        replaced = self._functions.items() - _functions().items()
        if replaced:
            return f"{', '.join(sorted(dict(replaced)))} has been replaced"
        changes = []
        for what, now in _checked_state().items():
            if now != self._before[what]:
                changes.append(f"{what}: {now}, before the task {self._before[what]}")
        return "; ".join(changes) or None


def _close_communicators() -> None:
    init = sys.modules.get("statexchange.comm.init")
    if init is not None:
        init.shutdown()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


def _seed_torch() -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(torch.Generator().initial_seed())  # that of a new process


def _functions() -> dict[str, int]:
    """Return the identities of the functions and classes of this package's modules."""
    functions: dict[str, int] = {}
    for module in list(sys.modules.values()):  # a copy: another thread may import
        if getattr(module, "__name__", "").startswith("statexchange."):
            for name, function in vars(module).items():
                if callable(function):
                    functions[f"{module.__name__}.{name}"] = id(function)
    return functions


def _checked_state() -> dict[str, object]:
    torch = sys.modules.get("torch")
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "child processes": _has_children(),
        "sockets and shared memory": _open_files(),
        "users": (os.getresuid(), os.getresgid()),
        "limits": list(map(resource.getrlimit, _LIMITS)),
        "namespaces": [os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES],
        "signal handlers": list(map(signal.getsignal, signal.valid_signals())),
        "default dtype": "torch.float32" if torch is None else str(torch.get_default_dtype()),
        "gradients": torch is None or torch.is_grad_enabled(),
        "deterministic algorithms": torch is not None and torch.are_deterministic_algorithms_enabled(),
        "unreceived MPI messages": _has_mpi_message(),
    }


def _has_children() -> bool:
    # WNOWAIT leaves a child that has ended to whoever waits for it.
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _has_mpi_message() -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized() and bool(mpi.COMM_WORLD.Iprobe())


def _open_files() -> int:
    """Return the number of open sockets and pieces of shared memory."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one of listdir itself
            count += os.readlink(f"/proc/self/fd/{name}").startswith(("socket:", "/memfd:", "/dev/shm/"))  # noqa: S108
    return count
