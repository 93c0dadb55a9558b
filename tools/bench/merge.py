"""Time the merge of per-rank files, compared with `cat` of the same bytes and torch's consolidate_safetensors_files.

    python tools/bench/merge.py [--megabytes 1024] [--ranks 4] [--dirs /dev/shm .] [--rounds 5]

The ways run in turns, each in a process of its own, with their inputs in the page cache; medians. A merge and `cat` are
whole commands, with their start and, on a disk, until their output is durable (fsync). Of torch's consolidation only
the call counts, without starting Python and importing torch. The peak is the resident set of the process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from machine import machine_text
from timed_command import STATEXCHANGE, Ran, in_child, run

LAYERS = 16


def merge(source: str, out: str, *options: str) -> Ran:
    return run([STATEXCHANGE, "merge", source, out, "--max-shard-size", "1TB", *options])


def merge_into_four(source: str, out: str) -> Ran:
    size = sum(os.path.getsize(os.path.join(source, name)) for name in os.listdir(source))
    return merge(source, out, "--max-shard-size", str(-(-size // 4)))


def cat(source: str, out: str, processes: int) -> Ran:
    inputs = sorted(os.path.join(source, name) for name in os.listdir(source) if name.endswith(".safetensors"))
    share = -(-len(inputs) // processes)
    os.mkdir(out)
    began = time.perf_counter()
    with ThreadPoolExecutor(processes) as pool:
        for number in range(processes):
            pool.submit(cat_into, f"{out}/{number}", inputs[number * share :][:share])
    return Ran(time.perf_counter() - began, 0, 0)


def cat_into(path: str, inputs: list[str]) -> None:
    with open(path, "wb") as output:
        run(["cat", *inputs], stdout=output)
        os.fsync(output.fileno())


def consolidate_with_torch(source: str, out: str) -> Ran:
    command = [sys.executable, __file__, "--torch", source, out]
    return Ran(*json.loads(subprocess.check_output(command, stderr=subprocess.DEVNULL).splitlines()[-1]))


def timed_torch(source: str, out: str) -> list[float]:
    """Return seconds, processor seconds and peak of torch's consolidation in this process."""
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    os.mkdir(out)
    names = {f"layers.{n}.weight": 1 for n in range(LAYERS)}
    began, began_cpu = time.perf_counter(), time.process_time()
    consolidate_safetensors_files(source, out, names, num_threads=1)
    with open("/proc/self/status", encoding="ascii") as file:
        peak = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    return [time.perf_counter() - began, time.process_time() - began_cpu, peak]


WAYS: dict[str, Callable[[str, str], Ran]] = {
    "cat": lambda source, out: cat(source, out, 1),
    "merge": merge,
    "merge, 1 thread": lambda source, out: merge(source, out, "--threads", "1"),
    "torch's consolidation, 1 thread": consolidate_with_torch,
    "two parallel cat": lambda source, out: cat(source, out, 2),
    "merge, 4 files": merge_into_four,
}
BESIDE = {"two parallel cat": "two parallel cat", "merge, 4 files": "two parallel cat"}  # others beside `cat`
WAY_OF_TORCH = "torch's consolidation, 1 thread"


def make(folder: str, megabytes: int, ranks: int, dim: int) -> str:
    """Write square matrices, sharded along `dim`, as a round of a workspace; headers have torch's sharding metadata."""
    import numpy as np

    from statexchange.sharding.shards import Box, Shard
    from statexchange.storage.tensorfile import ShardData
    from statexchange.storage.workspace import Workspace

    width = int((megabytes * 2**20 / 4 / LAYERS) ** 0.5) // ranks * ranks
    part = width // ranks
    workspace = Workspace(folder)
    names = []
    for rank in range(ranks):
        offsets, shape = ((rank * part, 0), (part, width)) if dim == 0 else ((0, rank * part), (width, part))
        shards = []
        for layer in range(LAYERS):
            data = np.random.default_rng([rank, layer]).integers(0, 256, part * width * 4, dtype=np.uint8)
            shard = Shard(f"layers.{layer}.weight", "F32", (width, width), (Box(offsets, shape),))
            shards.append(ShardData(shard, (data,)))
        names.append(workspace.write(shards, run="bench", round=1, rank=rank, world_size=ranks))
    return os.path.dirname(os.path.join(folder, names[0].relative))


def measure(directory: str, megabytes: int, ranks: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        for dim, kind in ((0, "rows"), (1, "columns")):
            source = in_child(make, f"{folder}/{kind}", megabytes, ranks, dim)
            runs: dict[str, list[Ran]] = {way: [] for way in WAYS}
            for number in range(rounds + 1):  # the first warms up
                for way, start in WAYS.items():
                    out = f"{folder}/out"
                    ran = start(source, out)
                    if number:
                        runs[way].append(ran)
                    shutil.rmtree(out)
            report(directory, kind, source, runs)
            shutil.rmtree(f"{folder}/{kind}")


def report(directory: str, kind: str, source: str, runs: dict[str, list[Ran]]) -> None:
    size = sum(os.path.getsize(os.path.join(source, name)) for name in os.listdir(source))
    median = {way: statistics.median(ran.seconds for ran in of_way) for way, of_way in runs.items()}
    for way, of_way in runs.items():
        beside = f"{median[BESIDE.get(way, 'cat')] / median[way]:.2f}x"
        torch = f"{median[WAY_OF_TORCH] / median[way]:.1f}x"
        memory = "-" if "cat" in way else f"{max(ran.peak for ran in of_way) / 2**20:.0f} MiB"
        rate = f"{size / median[way] / 1e9:.2f}"
        row = (directory, kind, way, f"{median[way]:.2f}", rate, beside, torch, memory)
        print(f"| {' | '.join(row)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dirs", nargs="+", default=["/dev/shm", "."])
    parser.add_argument("--torch", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.torch:
        print(json.dumps(timed_torch(*options.torch)))
        return
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # the round that warms up writes the bytecode
    print(f"{options.megabytes} MiB of float32 on {options.ranks} ranks, {options.rounds} rounds, {machine_text()}")
    print("| where | cut | way | seconds | GB/s | vs cat | vs torch's | peak |")
    print("|---|---|---|---|---|---|---|---|")
    for directory in options.dirs:
        measure(directory, options.megabytes, options.ranks, options.rounds)


if __name__ == "__main__":
    main()
