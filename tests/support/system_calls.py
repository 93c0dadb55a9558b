"""Programs whose system calls are listed, fail, or kill them: run under strace, some of them two at a time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from programs import require
from warm_python import warm_python

__all__ = ["each_call", "in_pairs", "strace", "system_calls"]

_WRITE_CALLS = ("mkdir", "mkdirat", "fallocate", "pwrite64", "ftruncate", "fsync", "rename", "renameat", "renameat2")
_WRITE_CALLS += ("link", "linkat", "unlink", "unlinkat", "rmdir")


def strace(trace: str, program: str, *arguments: object, output: str = "/dev/null") -> subprocess.CompletedProcess[str]:
    """Run a Python program under strace, with `trace` as its -e options; skip the running test without strace.

    The program is forked from a process that has imported what a command needs, and is traced from then on.
    """
    require("strace")
    options = ["-o", output, *(word for part in trace.split() for word in ("-e", part))]
    code = f"from tracing import trace_this_process\ntrace_this_process(*{options})\n{program}"
    command = [warm_python("commands"), "-c", code, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    # strace has stdout open, so this waits until it has written its output, too.
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def system_calls(program: str, *arguments: object, log: Path) -> list[str]:
    """Run a program, which must succeed; return the names of its system calls that change files, in order."""
    done = strace(f"trace={','.join(_WRITE_CALLS)}", program, *arguments, output=str(log))
    assert done.returncode == 0, done.stderr
    return re.findall(r"^\d+ +(\w+)\(", log.read_text(), re.MULTILINE)


def each_call(calls: Sequence[str]) -> list[tuple[str, int]]:
    """Return (name, n) for every call, the n-th of its name."""
    return [(name, n + 1) for name, count in Counter(calls).items() for n in range(count)]


def in_pairs(check: Callable[[Any], None], cases: Sequence[Any]) -> None:
    """Check all cases, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(check, cases))
