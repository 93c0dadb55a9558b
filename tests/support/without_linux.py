"""Run a program as if this were macOS: `python tests/support/without_linux.py statexchange COMMAND ...`.

The path of a script may stand for `statexchange COMMAND`.

What only Linux has is taken away before the program begins: names of `os` and other modules, functions of the C library
that the package looks up by ctypes, and the file systems /proc, /sys and /dev/shm. What stays is Linux's own behaviour
of the calls that both have, so this shows that nothing is missing, and not that macOS does the same.
"""

from __future__ import annotations

import asyncio  # noqa: F401 (it and the next ones look at the platform when they are imported)
import builtins
import ctypes
import fcntl
import io
import mmap
import multiprocessing.util  # noqa: F401
import os
import re
import resource
import runpy
import select
import selectors
import signal
import socket
import ssl  # noqa: F401
import subprocess  # noqa: F401
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec.implementations.local  # noqa: F401
import numpy as np  # noqa: F401

# Patterns of names, from "Availability" in the documentation of each module.
_OF_LINUX = {
    os: r"sched_[gs]et|memfd_|MFD_|copy_file_range|posix_f|POSIX_FADV|fdatasync|pipe2|eventfd|EFD_|pidfd|PIDFD|splice"
    r"|SPLICE|O_(PATH|TMPFILE|DIRECT|NOATIME|LARGEFILE|RSYNC)$|.*xattr|XATTR|unshare|setns|CLONE_|getrandom|GRND_"
    r"|waitid|P_PIDFD|RWF_|[gs]etres[ug]id|timerfd|TFD_|login_tty_",
    fcntl: r"F_(ADD_SEALS|GET_SEALS|SEAL|[GS]ETPIPE|OFD|[GS]ETLEASE|NOTIFY|[GS]ETSIG|[GS]ETOWN_EX)|DN_|FICLONE",
    mmap: r"MAP_(POPULATE|DENYWRITE|EXECUTABLE|LOCKED|GROWSDOWN|HUGE|SYNC|NONBLOCK)"
    r"|MADV_(HUGEPAGE|NOHUGE|MERGE|REMOVE|DONTFORK|DOFORK|HWPOISON|COLD|PAGEOUT|POPULATE)",
    select: r"epoll$|EPOLL",
    selectors: r"EpollSelector",
    signal: r"sigtimedwait|sigwaitinfo|SIGRT|SIGPWR|SIGSTKFLT|SIGPOLL|SIGCLD",
    time: r"CLOCK_(BOOTTIME|TAI|HIGHRES)|pthread_getcpuclockid|clock_settime",
    resource: r"prlimit|RUSAGE_THREAD|RLIMIT_(MSGQUEUE|NICE|RTPRIO|RTTIME|SIGPENDING)",
    socket: r"AF_(NETLINK|PACKET|VSOCK|CAN|ALG|TIPC)|SO_(PEERCRED|PASSCRED|BINDTODEVICE|DOMAIN|PROTOCOL|MARK)"
    r"|SOCK_(CLOEXEC|NONBLOCK)|TCP_(USER_TIMEOUT|KEEPIDLE|QUICKACK|CORK|DEFER_ACCEPT)|MSG_(CMSG_CLOEXEC|MORE|NOSIGNAL)",
}
_FUNCTIONS_OF_LINUX = {"renameat2", "fallocate", "memfd_create", "malloc_trim", "mallopt", "prctl", "copy_file_range"}
_FILES_OF_LINUX = re.compile(r"/(proc|sys|dev/shm)(/|$)")


def _hide_names() -> None:
    for module, pattern in _OF_LINUX.items():
        for name in [name for name in vars(module) if re.match(pattern, name)]:
            delattr(module, name)
    selectors.DefaultSelector = selectors.SelectSelector


def _hide_functions() -> None:
    of_dll = ctypes.CDLL.__getattr__

    def lookup(self: ctypes.CDLL, name: str) -> Any:
        if name in _FUNCTIONS_OF_LINUX:
            raise AttributeError(f"symbol not found: {name}")
        return of_dll(self, name)

    ctypes.CDLL.__getattr__ = lookup  # type: ignore[method-assign]


def _hide_files() -> None:
    def hidden(call: Callable[..., Any]) -> Callable[..., Any]:
        def with_path(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            is_path = isinstance(path, (str, os.PathLike))
            if is_path and options.get("dir_fd") is None and _FILES_OF_LINUX.match(os.fspath(path)):
                raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
            return call(path, *arguments, **options)

        return with_path

    for name in ("open", "stat", "lstat", "listdir", "scandir", "readlink", "mkdir", "statvfs", "access"):
        setattr(os, name, hidden(getattr(os, name)))
    for call in (os.open, os.stat, os.lstat, os.mkdir, os.readlink, os.access):
        os.supports_dir_fd.add(call)
    builtins.open = io.open = hidden(builtins.open)  # type: ignore[assignment]


if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = os.fspath(Path(__file__).parents[2])
    for hide in (_hide_names, _hide_functions, _hide_files):
        hide()
    sys.platform = "darwin"
    if sys.argv[0].endswith(".py"):
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
