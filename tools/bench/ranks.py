"""What the benches of jobs share: a rank's peak memory, and the times of all its ranks."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence

from statexchange.testing import run_ranks

Rounds = dict[str, list[tuple[float, int]]]
"""By way, (seconds, bytes added to the peak) of each round."""


def measure(rank_main: Callable[[int, str, int], Rounds]) -> tuple[argparse.Namespace, dict[str, list[Rounds]]]:
    """The command line's options, and by directory what `rank_main(megabytes, folder, rounds)` gives on each rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--dirs", nargs="+", default=["/dev/shm"])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    found = {}
    for place in options.dirs:
        with tempfile.TemporaryDirectory(dir=place) as folder:
            args = (options.megabytes, folder, options.rounds)
            found[place] = run_ranks(rank_main, options.ranks, backend="gloo", args=args, timeout_s=1200)
    return options, found


def reset_peak() -> int:
    """Forget this process's peak so far; returns its resident bytes now."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    return status("VmRSS")


def status(field: str) -> int:
    """A field of this process's status, in bytes."""
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith(field))
    return int(line.split()[1]) * 1024


def slowest(ranks: Iterable[Sequence[tuple[float, int]]]) -> float:
    """The median over rounds of the seconds of the rank that took longest; each rank has (seconds, bytes) by round."""
    return float(statistics.median(max(seconds for seconds, _ in turn) for turn in zip(*ranks, strict=True)))


def peaks(ranks: Iterable[Sequence[tuple[float, int]]]) -> str:
    """What each rank added at most, in MiB."""
    return ", ".join(f"{max(added for _, added in rounds) / 2**20:.0f}" for rounds in ranks)
