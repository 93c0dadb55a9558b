"""Parts of the benches that run a job of ranks: options, peak memory of a rank, times over all ranks."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch.distributed as dist

from statexchange.testing import run_ranks

Rounds = dict[str, list[tuple[float, int]]]
"""By way, (seconds, bytes added to the peak) of each round."""


def measure(
    rank_main: Callable[..., Rounds], kinds: Sequence[str] = ()
) -> tuple[argparse.Namespace, dict[str, list[Rounds]]]:
    """Parse the command line and run the job in each directory.

    Returns the options, and by directory the results of `rank_main(megabytes, folder, rounds)` on all ranks. With
    `kinds` there is an option ``--kind``, by default the first, which is the fourth argument.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--dirs", nargs="+", default=["/dev/shm"])
    parser.add_argument("--rounds", type=int, default=5)
    if kinds:
        parser.add_argument("--kind", choices=kinds, default=kinds[0])
    options = parser.parse_args()
    found = {}
    for place in options.dirs:
        with tempfile.TemporaryDirectory(dir=place) as folder:
            args = [options.megabytes, folder, options.rounds]
            if kinds:
                args.append(options.kind)
            found[place] = run_ranks(rank_main, options.ranks, backend="gloo", args=tuple(args), timeout_s=1200)
    return options, found


def in_turns(
    ways: Mapping[str, Callable[[], object]], rounds: int, prepare: Callable[[], object] = lambda: None
) -> Rounds:
    """Time each way on all ranks together, in turns, after one round that warms up. Collective.

    `prepare` is called before each way, untimed.
    """
    found: Rounds = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, run in ways.items():
            prepare()
            dist.barrier()
            before = reset_peak()
            began = time.perf_counter()
            run()
            dist.barrier()
            if number:
                found[way].append((time.perf_counter() - began, status("VmHWM") - before))
    return found


def reset_peak() -> int:
    """Reset the peak resident memory of this process; return its resident bytes."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    return status("VmRSS")


def status(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith(field))
    return int(line.split()[1]) * 1024


def slowest(ranks: Iterable[Sequence[tuple[float, int]]]) -> float:
    """Return the median over rounds of the slowest rank's seconds; each rank has (seconds, bytes) by round."""
    return float(statistics.median(max(seconds for seconds, _ in turn) for turn in zip(*ranks, strict=True)))


def peaks(ranks: Iterable[Sequence[tuple[float, int]]]) -> str:
    """Return the largest added bytes of each rank, in MiB, as text."""
    return ", ".join(f"{max(added for _, added in rounds) / 2**20:.0f}" for rounds in ranks)
