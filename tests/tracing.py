"""strace, attached to the process that calls for it: a program can be imported, or forked, before it is traced."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from pathlib import Path

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = -1


def trace_this_process(*options: str) -> None:
    """Start strace with these options, and return once it traces this process with all its threads."""
    # Where a process may only trace its descendants (Yama), this one allows it.
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(_PR_SET_PTRACER_ANY), 0, 0, 0)
    tracer = subprocess.Popen(["strace", "-f", "-qq", *options, "-p", str(os.getpid())])
    while "TracerPid:\t0" in Path("/proc/self/status").read_text():
        assert tracer.poll() is None
        time.sleep(0.005)
