"""Time all_reduce, compared with torch.distributed on Gloo and mpi4py on MPICH, over sizes and numbers of ranks.

    python tools/bench/collectives.py [--ranks 2 4] [--rounds 30] [--largest 256] [--svg FILE]

All ways run warm and interleaved in one job under mpiexec, on the same float32 values, with all checks on. After a
barrier each way calls once untimed, which loads its code into the cache, then as often as it takes to reduce a
megabyte, at most sixteen times; times are medians of rank 0, per call. The bound is memory bandwidth: every byte of
every rank's tensor is read once and written once, at the speed at which all ranks at once copy as much by memcpy.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from curves import curves_svg, size_text
from machine import machine_text

from statexchange.testing import run_ranks

_BUDGET_BYTES = 1 << 32  # of one way at one size, over all rounds
_BURST_BYTES, _MOST_CALLS = 1 << 20, 16
WAYS = (
    "shm, comm.empty",
    "shm, any tensor",
    "shm, comm.empty, bfloat16",
    "torch Gloo",
    "mpi4py MPICH",
    "sx gloo",
    "sx gloo, check off",
    "sx mpi",
    "sx mpi, check off",
    "memcpy",
)


def calls_of(comms: dict[str, Any], nbytes: int) -> dict[str, Callable[[], object]]:
    """Return for each way its call, on tensors of `nbytes` (float32; bfloat16 tensors have as many elements)."""
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    n = nbytes // 4
    shm = comms["shm"]
    in_shm = shm.empty((n,), torch.float32).fill_(1)
    halves = shm.empty((n,), torch.bfloat16).fill_(1)
    plain, target = torch.ones(n), torch.ones(n)
    array = plain.numpy()
    ways: dict[str, Callable[[], object]] = {
        "shm, comm.empty": lambda: shm.all_reduce(in_shm),
        "shm, any tensor": lambda: shm.all_reduce(plain),
        "shm, comm.empty, bfloat16": lambda: shm.all_reduce(halves),
        "torch Gloo": lambda: dist.all_reduce(plain),
        "mpi4py MPICH": lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array),
        "memcpy": lambda: target.copy_(plain),
    }
    for name in ("gloo", "mpi"):
        ways[f"sx {name}"] = partial(comms[name].all_reduce, plain)
        ways[f"sx {name}, check off"] = partial(comms[name + " off"].all_reduce, plain)
    return {way: ways[way] for way in WAYS}


def rank_main(sizes: list[int], rounds: int) -> dict[str, list[float]]:
    """Return for each way the median seconds at each size, on this rank."""
    import torch

    import statexchange as sx
    from statexchange.comm import defaults

    torch.set_num_threads(1)
    comms = {}
    for name, backend, check in (
        ("shm", "shm", "auto"),
        ("mpi", "mpi", "auto"),
        ("mpi off", "mpi", "off"),
        ("gloo", "gloo", "auto"),
        ("gloo off", "gloo", "off"),
    ):
        with defaults.use(None):  # without a default communicator, as in a new process
            comms[name] = sx.init(backend, check=check)
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for nbytes in sizes:
        ways = calls_of(comms, nbytes)
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        calls = max(1, min(_MOST_CALLS, _BURST_BYTES // nbytes))
        for number in range(max(5, min(rounds, _BUDGET_BYTES // nbytes)) + 2):  # the first two warm up
            for way, go in ways.items():
                comms["shm"].barrier()
                go()
                began = time.perf_counter()
                for _ in range(calls):
                    go()
                if number > 1:
                    seconds[way].append((time.perf_counter() - began) / calls)
        for way in WAYS:
            found[way].append(statistics.median(seconds[way]))
    return found


def table(sizes: list[int], found: dict[str, list[float]]) -> list[str]:
    """Return the lines of a table of times and of a table of ratios."""
    lines = ["| size | " + " | ".join(WAYS) + " |", "|---" * (len(WAYS) + 1) + "|"]
    for i, nbytes in enumerate(sizes):
        lines.append(f"| {size_text(nbytes)} | " + " | ".join(_time(found[way][i]) for way in WAYS) + " |")
    lines += ["", "| size | comm.empty / Gloo | any / Gloo | comm.empty / MPICH | bfloat16 / float32 | of the bound |"]
    lines.append("|---" * 6 + "|")
    for i, nbytes in enumerate(sizes):
        empty, any_, halves, gloo, mpich, bound = (found[way][i] for way in (*WAYS[:5], "memcpy"))
        ratios = f"{gloo / empty:.1f}x | {gloo / any_:.1f}x | {mpich / empty:.1f}x | {empty / halves:.2f}x"
        lines.append(f"| {size_text(nbytes)} | {ratios} | {bound / empty:.2f} |")
    return lines


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--largest", type=int, default=256, help="MiB")
    parser.add_argument("--svg", type=Path, help="where to draw the curves of the first number of ranks")
    options = parser.parse_args()
    from collectives import rank_main as ranks_work  # ranks under mpiexec cannot import __main__

    sizes = [s for s in (1 << k for k in range(10, 29, 2)) if s <= options.largest << 20]
    for number, ranks in enumerate(options.ranks):
        machine = machine_text()
        found = run_ranks(ranks_work, ranks, backend="mpi", args=(sizes, options.rounds), timeout_s=1200)[0]
        rounds = f"median of up to {options.rounds} rounds"
        print(f"{ranks} ranks, {machine}, float32, {rounds}\n")
        print("\n".join(table(sizes, found)), end="\n\n")
        if options.svg is not None and number == 0:
            shown = {way: list(zip(sizes, found[way], strict=True)) for way in WAYS if "check" not in way}
            options.svg.write_text(curves_svg(f"all_reduce, {ranks} ranks, one host", "s", shown))


if __name__ == "__main__":
    main()
