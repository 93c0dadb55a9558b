"""Time the merge of per-rank files, compared with `cat` of the same bytes and torch's consolidate_safetensors_files.

    python tools/bench/merge.py [--megabytes 1024] [--ranks 4] [--dirs /dev/shm .] [--rounds 5]

The ways run in turns, each in a process of its own, with their inputs in the page cache; medians. The seconds are of
the merging call, without starting Python and importing; the peak is the resident set of the whole process. "without
digests" is the same merge with a hash that does nothing, to show what hashing costs: no option omits the digests. On a
disk all ways but torch's make their output durable (fsync).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from machine import machine_text

LAYERS = 16


def peak() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def merge(source: str, out: str, *, threads: int, files: int) -> float:
    from statexchange.checkpoint.merge import merge_checkpoint

    size = sum(os.path.getsize(os.path.join(source, name)) for name in os.listdir(source))
    began = time.perf_counter()
    merge_checkpoint(source, out, threads=threads, max_shard_size=-(-size // files))
    return time.perf_counter() - began


class NoHash:
    """A hash with the interface of xxhash.xxh3_128 that does nothing."""

    def update(self, data: object) -> None:
        pass

    def hexdigest(self) -> str:
        return "0" * 32


def merge_without_digests(source: str, out: str) -> float:
    """Merge plain safetensors files, of which no digests are known, without computing any."""
    import xxhash

    from statexchange.checkpoint.merge import merge_checkpoint

    plain = os.path.join(os.path.dirname(out), "plain")
    os.mkdir(plain)
    for number, name in enumerate(sorted(os.listdir(source))):
        os.link(os.path.join(source, name), f"{plain}/rank{number}.safetensors")
    vars(xxhash)["xxh3_128"] = NoHash
    began = time.perf_counter()
    merge_checkpoint(plain, out, threads=1, max_shard_size="1TB")
    seconds = time.perf_counter() - began
    shutil.rmtree(plain)
    return seconds


def consolidate_with_torch(source: str, out: str) -> float:
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    os.mkdir(out)
    names = {f"layers.{n}.weight": 1 for n in range(LAYERS)}
    began = time.perf_counter()
    consolidate_safetensors_files(source, out, names, num_threads=1)
    return time.perf_counter() - began


def cat(source: str, out: str, processes: int) -> float:
    inputs = sorted(os.path.join(source, name) for name in os.listdir(source) if name.endswith(".safetensors"))
    share = -(-len(inputs) // processes)
    os.mkdir(out)
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(open(f"{out}/{number}", "wb")) for number in range(processes)]
        shares = [inputs[number * share :][:share] for number in range(processes)]
        running = [subprocess.Popen(["cat", *s], stdout=o) for s, o in zip(shares, outputs, strict=True)]
        for process, output in zip(running, outputs, strict=True):
            assert process.wait() == 0
            os.fsync(output.fileno())
    return time.perf_counter() - began


WAYS: dict[str, Callable[[str, str], float]] = {
    "cat": lambda source, out: cat(source, out, 1),
    "merge, 1 thread": lambda source, out: merge(source, out, threads=1, files=1),
    "merge, 1 thread, without digests": merge_without_digests,
    "torch's consolidation, 1 thread": consolidate_with_torch,
    "two parallel cat": lambda source, out: cat(source, out, 2),
    "merge, 2 threads, 4 files": lambda source, out: merge(source, out, threads=2, files=4),
}
BESIDE = {way: "two parallel cat" if "2 threads" in way or "two" in way else "cat" for way in WAYS}


def make(folder: str, megabytes: int, ranks: int, dim: int) -> str:
    """Write square matrices, sharded along `dim`, as a round of a workspace; headers have torch's sharding metadata."""
    import numpy as np

    from statexchange.sharding.shards import Box, Shard
    from statexchange.storage.tensorfile import ShardData
    from statexchange.storage.workspace import Workspace

    width = int((megabytes * 2**20 / 4 / LAYERS) ** 0.5) // ranks * ranks
    part = width // ranks
    workspace = Workspace(folder)
    receipts = []
    for rank in range(ranks):
        offsets, shape = ((rank * part, 0), (part, width)) if dim == 0 else ((0, rank * part), (width, part))
        shards = []
        for layer in range(LAYERS):
            data = np.random.default_rng([rank, layer]).integers(0, 256, part * width * 4, dtype=np.uint8)
            shard = Shard(f"layers.{layer}.weight", "F32", (width, width), (Box(offsets, shape),))
            shards.append(ShardData(shard, (data,)))
        receipts.append(workspace.write(shards, run="bench", round=1, rank=rank, world_size=ranks))
    return os.path.dirname(os.path.join(folder, receipts[0].relative))


def measure(directory: str, megabytes: int, ranks: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        for dim, kind in ((0, "rows"), (1, "columns")):
            source = make(f"{folder}/{kind}", megabytes, ranks, dim)
            found: dict[str, list[tuple[float, int]]] = {way: [] for way in WAYS}
            for number in range(rounds + 1):  # the first warms up
                for way in WAYS:
                    out = f"{folder}/out"
                    command = [sys.executable, __file__, "--way", way, source, out]
                    done = subprocess.run(command, check=True, capture_output=True, text=True)
                    if number:
                        found[way].append(tuple(json.loads(done.stdout.splitlines()[-1])))
                    shutil.rmtree(out)
            report(directory, kind, source, found)
            shutil.rmtree(f"{folder}/{kind}")


def report(directory: str, kind: str, source: str, found: dict[str, list[tuple[float, int]]]) -> None:
    size = sum(os.path.getsize(os.path.join(source, name)) for name in os.listdir(source))
    median = {way: statistics.median(seconds for seconds, _ in runs) for way, runs in found.items()}
    for way, runs in found.items():
        ratio = f"{median[BESIDE[way]] / median[way]:.2f}x"
        torch = f"{median[WAY_OF_TORCH] / median[way]:.1f}x"
        memory = "-" if "cat" in way else f"{max(nbytes for _, nbytes in runs) / 2**20:.0f} MiB"
        rate = f"{size / median[way] / 1e9:.2f}"
        print(
            f"| {directory} | {kind} | {way} | {median[way]:.2f} | {rate} | {ratio} | {torch} | {memory} |", flush=True
        )


WAY_OF_TORCH = "torch's consolidation, 1 thread"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dirs", nargs="+", default=["/dev/shm", "."])
    parser.add_argument("--way", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        way, source, out = options.way
        print(json.dumps([WAYS[way](source, out), peak()]))
        return
    print(f"{options.megabytes} MiB of float32 on {options.ranks} ranks, {options.rounds} rounds, {machine_text()}")
    print("| where | cut | way | seconds | GB/s | vs cat | vs torch's | peak |")
    print("|---|---|---|---|---|---|---|---|")
    for directory in options.dirs:
        measure(directory, options.megabytes, options.ranks, options.rounds)


if __name__ == "__main__":
    main()
