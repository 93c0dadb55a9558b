"""Run a whole command and measure it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

__all__ = ["STATEXCHANGE", "Ran", "in_child", "run", "run_in_turns"]

T = TypeVar("T")
Way = TypeVar("Way")

STATEXCHANGE = str(Path(sys.executable).parent / "statexchange")


@dataclass(frozen=True)
class Ran:
    """The cost of one run of a command and of all that it starts.

    Attributes:
        seconds: from start to end.
        processor_s: seconds of processors, of the user and the system.
        peak: the most bytes of memory, of the command or of the process that started it: see `in_child`.
    """

    seconds: float
    processor_s: float
    peak: int


def run(command: Sequence[str], expected: int = 0, *, stdout: int | IO[bytes] = subprocess.DEVNULL) -> Ran:
    """Run a command to its end; raise RuntimeError if its exit code is not `expected`."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=stdout, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != expected:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}, not {expected}")
    return Ran(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def run_in_turns(commands: Mapping[Way, Sequence[str]], rounds: int) -> dict[Way, list[Ran]]:
    """Run all commands in turns, `rounds` times after a round that warms up; return the runs of each way."""
    runs: dict[Way, list[Ran]] = {way: [] for way in commands}
    for number in range(rounds + 1):
        for way, command in commands.items():
            ran = run(command)
            if number:
                runs[way].append(ran)
    return runs


def in_child(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a process of its own, and return its result.

    So the memory that it needs does not count as that of the commands that are started later: to Linux the peak of a
    process is at least what its parent had when it was forked.
    """
    with ProcessPoolExecutor(1) as pool:
        return pool.submit(function, *arguments).result()
