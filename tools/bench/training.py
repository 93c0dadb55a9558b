"""Time a training step, compared with DDP on Gloo: 200 small tensors, and a transformer of 25 million parameters.

    python tools/bench/training.py [--ranks 2] [--rounds 15] [--memory] [--svg FILE]

All ways run warm and interleaved in one job under mpiexec, each with a model of its own. Communication time is the time
of a step (forward, backward, SGD) less that of the same step without any synchronisation; medians of rank 0. With
several numbers of ranks, a table of step times by number of ranks is printed, too.

The bars split communication into copy and wire. For this each way also runs with a collective that does nothing (a hook
of DDP that returns its bucket, our `communicate=`). Copy is the time of that step less that of the step without
synchronisation: copies of gradients into buckets, hooks, and one message per step. Wire is what the collective adds.

`--memory` runs each way in a job of its own, and shows how much more memory a rank has after eight steps than in the
job without synchronisation: PSS, where each process counts its part of shared memory, and USS, where no process counts
it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from curves import bars_svg
from machine import machine_text

from statexchange.testing import run_ranks

if TYPE_CHECKING:
    import torch

    import statexchange as sx

LOCAL, DDP = "no synchronisation", "DDP, Gloo"
BACKEND_OF_WAY = {"shared memory": "shm", "MPI": "mpi", "Gloo": "gloo"}
WAYS = (LOCAL, DDP, *BACKEND_OF_WAY)
SILENT = ", nothing sent"


def small() -> tuple[torch.nn.Module, torch.Tensor]:
    """Return 100 layers of 92 x 92 weights and 92 biases: 200 tensors, 3.4 MB of float32."""
    import torch

    layers = [torch.nn.Linear(92, 92) for _ in range(100)]
    return torch.nn.Sequential(*layers), torch.randn(4, 92)


def transformer(layers: int = 8) -> tuple[torch.nn.Module, torch.Tensor]:
    """Return transformer layers of width 512: 8 of them have 25 million parameters."""
    import torch

    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), torch.randn(1, 16, 512)


Builds = Mapping[str, Callable[[], tuple["torch.nn.Module", "torch.Tensor"]]]
MODELS: Builds = {"200 tensors, 3.4 MB": small, "transformer, 25 M": transformer}
QUICK: Builds = {**MODELS, "transformer, 25 M": partial(transformer, 1)}


def step(model: torch.nn.Module, data: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Run one training step."""
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()


def steps(build: Callable[[], tuple[torch.nn.Module, torch.Tensor]]) -> dict[str, Callable[[], None]]:
    """Return by way its training step, and the same with a collective that does nothing."""
    comms = communicators()
    found: dict[str, Callable[[], None]] = {}
    for way in WAYS:
        for silent in (False, True) if way != LOCAL else (False,):
            model, data = build()
            found[way + SILENT * silent] = partial(step, *wrapped(model, data, way, comms.get(way), silent=silent))
    return found


def communicators() -> dict[str, sx.comm.Communicator]:
    """Return the communicator of each way."""
    import statexchange as sx
    from statexchange.comm import defaults

    comms = {}
    for way, name in BACKEND_OF_WAY.items():
        with defaults.use(None):  # without a default communicator, as in a new process
            comms[way] = sx.init(name)
    return comms


def wrapped(
    model: torch.nn.Module, data: torch.Tensor, way: str, comm: sx.comm.Communicator | None, *, silent: bool = False
) -> tuple[torch.nn.Module, torch.Tensor, torch.optim.Optimizer]:
    """Return the arguments of `step` for a model that is trained by `way`."""
    import torch

    import statexchange as sx

    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    if way == DDP:
        ddp = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        if silent:
            ddp.register_comm_hook(None, nothing_hook)
        return ddp, data, inner
    if comm is None:
        return model, data, inner
    return model, data, sx.DistributedOptimizer(inner, comm, module=model, communicate=nothing if silent else None)


def nothing(flat: torch.Tensor) -> None:
    """Leave a bucket as it is."""


def nothing_hook(_, bucket):  # type: ignore[no-untyped-def]
    """Leave a bucket of DDP as it is."""
    import torch

    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def rank_main(rounds: int, quick: bool) -> dict[str, dict[str, float]]:
    """Return for each model the median seconds of each way, on this rank."""
    import torch
    from mpi4py import MPI

    torch.set_num_threads(1)
    found = {}
    for name, build in (QUICK if quick else MODELS).items():
        ways = steps(build)
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(rounds + 3):  # the first three warm up
            for way, go in ways.items():
                MPI.COMM_WORLD.Barrier()
                began = time.perf_counter()
                go()
                if number > 2:
                    seconds[way].append(time.perf_counter() - began)
        found[name] = {way: statistics.median(values) for way, values in seconds.items()}
    return found


def memory_main(name: str, way: str) -> list[float]:
    """Return PSS and USS of this rank, in bytes, after eight steps by `way`."""
    import torch
    from mpi4py import MPI

    torch.set_num_threads(1)
    comms = communicators()
    training = wrapped(*MODELS[name](), way, comms.get(way))
    for _ in range(8):
        step(*training)
    MPI.COMM_WORLD.Barrier()
    nbytes = _memory_bytes()
    MPI.COMM_WORLD.Barrier()  # PSS divides shared pages among processes, so no rank may have exited
    return nbytes


def _memory_bytes() -> list[float]:
    """Return PSS and USS of this process."""
    found = {"Pss": 0, "Private_Clean": 0, "Private_Dirty": 0}
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]:
        key, value = line.split(":")
        if key in found:
            found[key] = int(value.split()[0]) * 1024
    return [float(found["Pss"]), float(found["Private_Clean"] + found["Private_Dirty"])]


def show(medians_of: Mapping[str, Mapping[str, float]]) -> None:
    """Print the table of one number of ranks."""
    print("| model | way | step | communication | vs DDP |\n|---|---|---|---|---|")
    for model, medians in medians_of.items():
        for way in WAYS:
            spent, ddp = (medians[one] - medians[LOCAL] for one in (way, DDP))
            ratio = f"{spent / ddp:.2f}x" if ddp > 0 else ""
            print(f"| {model} | {way} | {medians[way] * 1e3:.1f} ms | {spent * 1e3:.1f} ms | {ratio} |")
    print()


def show_scaling(by_ranks: Mapping[int, Mapping[str, Mapping[str, float]]]) -> None:
    """Print step times by number of ranks."""
    print(f"{machine_text()}, step times by number of ranks\n")
    print("| model | way |" + "".join(f" {ranks} |" for ranks in by_ranks) + "\n|---|---|" + "---|" * len(by_ranks))
    for model in MODELS:
        for way in WAYS:
            times = "".join(f" {medians[model][way] * 1e3:.1f} ms |" for medians in by_ranks.values())
            print(f"| {model} | {way} |{times}")
    print()


def show_memory(ranks: int) -> None:
    """Print the memory of each way beyond that of training alone, as the mean over ranks."""
    from training import memory_main as ranks_work

    print(f"{ranks} ranks, memory beyond training alone\n\n| model | way | PSS | USS |\n|---|---|---|---|")
    for model in MODELS:
        alone = [0.0, 0.0]
        for way in WAYS:
            by_rank = run_ranks(ranks_work, ranks, backend="mpi", args=(model, way), timeout_s=300)
            means = [statistics.mean(values) / 2**20 for values in zip(*by_rank, strict=True)]
            alone = means if way == LOCAL else alone
            pss, uss = (mean - base for mean, base in zip(means, alone, strict=True))
            print(f"| {model} | {way} | {pss:+.1f} MiB | {uss:+.1f} MiB |")


def draw(medians_of: Mapping[str, Mapping[str, float]], ranks: int) -> str:
    """Return the bars of one number of ranks as SVG."""
    bars = {}
    for model, medians in medians_of.items():
        for way in WAYS:
            muted = medians.get(way + SILENT, medians[way])
            bars[f"{way}, {model}"] = (medians[LOCAL], muted - medians[LOCAL], medians[way] - muted)
    return bars_svg(f"a training step, {ranks} ranks", ("compute", "copy", "wire"), bars)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="one layer of the transformer, not 8: to try this program")
    parser.add_argument("--memory", action="store_true", help="also measure the memory of each way")
    parser.add_argument("--svg", type=Path, help="where to draw the bars of the first number of ranks")
    options = parser.parse_args()
    from training import rank_main as ranks_work  # ranks under mpiexec cannot import __main__

    by_ranks = {}
    for ranks in options.ranks:
        machine = machine_text()
        found = run_ranks(ranks_work, ranks, backend="mpi", args=(options.rounds, options.quick), timeout_s=1200)[0]
        by_ranks[ranks] = found
        print(f"{ranks} ranks, {machine}, median of {options.rounds} rounds\n")
        show(found)
    if len(by_ranks) > 1:
        show_scaling(by_ranks)
    if options.memory:
        show_memory(options.ranks[0])
    if options.svg is not None:
        options.svg.write_text(draw(by_ranks[options.ranks[0]], options.ranks[0]))


if __name__ == "__main__":
    main()
