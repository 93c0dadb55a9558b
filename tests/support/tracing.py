"""strace, attached to the process that calls for it: a program can be imported, or forked, before it is traced."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = -1


def trace_this_process(*options: str) -> None:
    """Start strace with these options, and return once it traces this process with all its threads."""
    # Where a process may only trace its descendants (Yama), this one allows it.
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(_PR_SET_PTRACER_ANY), 0, 0, 0)
    messages = os.memfd_create("strace")
    command = ["strace", "-f", "--quiet=personality,exit", *options, "-p", str(os.getpid())]
    tracer = subprocess.Popen(command, stderr=messages)
    # strace reports that it has attached once it has interrupted all threads: from then on it stops at each call.
    # TracerPid is set before that.
    while b" attached" not in os.pread(messages, 1 << 12, 0):
        assert tracer.poll() is None, os.pread(messages, 1 << 12, 0)
        time.sleep(0.005)
    os.close(messages)
