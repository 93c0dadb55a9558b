"""A training step beside DDP on Gloo: 200 small tensors, and a transformer of 25 million parameters.

    python tools/bench/training.py [--ranks 2] [--rounds 15] [--svg FILE]

All ways run warm and interleaved in one job under mpiexec, each with a model of its own. Communication time is the time
of a step (forward, backward, SGD) less that of the same step without any synchronisation; medians of rank 0.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from curves import bars_svg

from statexchange.testing import run_ranks

if TYPE_CHECKING:
    import torch

LOCAL, DDP = "no synchronisation", "DDP, Gloo"
WAYS = (LOCAL, DDP, "shared memory", "MPI", "Gloo")
MODELS = ("200 tensors, 3.4 MB", "transformer, 25 M")


def small() -> tuple[torch.nn.Module, torch.Tensor]:
    """100 layers of 92 x 92 weights and 92 biases: 200 tensors, 3.4 MB of float32."""
    import torch

    layers = [torch.nn.Linear(92, 92) for _ in range(100)]
    return torch.nn.Sequential(*layers), torch.randn(4, 92)


def transformer() -> tuple[torch.nn.Module, torch.Tensor]:
    """8 layers of width 512: 25 million parameters."""
    import torch

    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 8, enable_nested_tensor=False), torch.randn(1, 16, 512)


def step(model: torch.nn.Module, data: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """One step of training."""
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()


def steps(build: Callable[[], tuple[torch.nn.Module, torch.Tensor]]) -> dict[str, Callable[[], None]]:
    """A training step for each way."""
    import torch
    import torch.distributed as dist

    import statexchange as sx
    from statexchange.comm import world

    comms = {}
    for name in ("shm", "mpi", "gloo"):
        with world.use(None):  # each as if it were the only one
            comms[name] = sx.init(name)
    found: dict[str, Callable[[], None]] = {}
    for way in WAYS:
        model, data = build()
        inner = torch.optim.SGD(model.parameters(), lr=1e-3)
        optimizer: torch.optim.Optimizer = inner
        if way == DDP:
            model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        elif way != LOCAL:
            comm = comms[{"shared memory": "shm", "MPI": "mpi", "Gloo": "gloo"}[way]]
            optimizer = sx.DistributedOptimizer(inner, comm, module=model)

        found[way] = partial(step, model, data, optimizer)
    assert dist.is_initialized()
    return found


def rank_main(rounds: int) -> dict[str, dict[str, float]]:
    """For each model the median seconds of each way, on this rank."""
    import torch
    from mpi4py import MPI

    torch.set_num_threads(1)
    found = {}
    for name, build in zip(MODELS, (small, transformer), strict=True):
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        ways = steps(build)
        for number in range(rounds + 3):  # the first three warm up
            for way, go in ways.items():
                MPI.COMM_WORLD.Barrier()
                began = time.perf_counter()
                go()
                if number > 2:
                    seconds[way].append(time.perf_counter() - began)
        found[name] = {way: statistics.median(values) for way, values in seconds.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--svg", type=Path, help="where to draw the bars of the first number of ranks")
    options = parser.parse_args()
    from training import rank_main as ranks_work  # ranks under mpiexec cannot import __main__

    for number, ranks in enumerate(options.ranks):
        load = os.getloadavg()[0]
        found = run_ranks(ranks_work, ranks, backend="mpi", args=(options.rounds,), timeout_s=1200)[0]
        print(f"{ranks} ranks, {os.cpu_count()} cores, load {load:.1f}, median of {options.rounds} rounds\n")
        print("| model | way | step | communication | beside DDP |\n|---|---|---|---|---|")
        for model, medians in found.items():
            for way, seconds in medians.items():
                spent, ddp = seconds - medians[LOCAL], medians[DDP] - medians[LOCAL]
                print(f"| {model} | {way} | {seconds * 1e3:.1f} ms | {spent * 1e3:.1f} ms | {spent / ddp:.2f}x |")
        print()
        if options.svg is not None and number == 0:
            bars = {
                f"{way}, {model}": (medians[LOCAL], seconds - medians[LOCAL])
                for model, medians in found.items()
                for way, seconds in medians.items()
            }
            options.svg.write_text(bars_svg(f"a training step, {ranks} ranks", ("compute", "communication"), bars))


if __name__ == "__main__":
    main()
