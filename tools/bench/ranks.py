"""What the benches of jobs share: a rank's peak memory, and the times of all its ranks."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence


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
