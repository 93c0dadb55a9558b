"""Time the merge plan over its size: explicit boxes, and tensors over a mesh as records, from simulated headers.

    python tools/bench/plan.py [--quick]

Each size runs in a process of its own. Seconds (and processor seconds, for busy machines) are of planning alone: the
proof that every element is covered once, the assignment to files, the digest. The peak is of the whole process, with
the simulated headers in it.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable

from machine import machine_text

from statexchange.sharding.plan import RankShards, plan_merge
from statexchange.sharding.sharding_spec import DimSplit, Placement, ShardingSpec
from statexchange.sharding.shards import Box, Shard


def one_tensor(boxes: int) -> list[RankShards]:
    """Return one matrix in a square grid of boxes, assigned to 1,000 ranks in turn."""
    side = round(boxes**0.5)
    by_rank: list[list[Box]] = [[] for _ in range(1000)]
    for number in range(side * side):
        by_rank[number % 1000].append(Box((4 * (number // side), 4 * (number % side)), (4, 4)))
    shape = (4 * side, 4 * side)
    return [RankShards(rank, [Shard("w", "F32", shape, tuple(held))]) for rank, held in enumerate(by_rank)]


def many_tensors(boxes: int) -> list[RankShards]:
    """Return matrices of 1,024 rows, with one row on each of 1,024 ranks."""
    names = [f"model.layers.{number}.weight" for number in range(boxes // 1024)]
    shape = (1024, 4096)
    return [
        RankShards(rank, [Shard(name, "BF16", shape, (Box((rank, 0), (1, 4096)),)) for name in names])
        for rank in range(1024)
    ]


def records(tensors: int, ranks: int = 1024) -> list[RankShards]:
    """Return tensors of 24 shapes as FSDP, HSDP and FSDP with tensor parallelism shard them: one record each."""
    inner = min(8, ranks)
    meshes = [
        Placement((ranks,), (DimSplit(0),)),
        Placement((ranks // inner, inner), (None, DimSplit(0))),
        Placement((ranks // inner, inner), (DimSplit(0), DimSplit(1))),
        Placement((ranks // inner, inner), (DimSplit(0, inner), DimSplit(0))),
    ]
    shapes = [(1024 * (n + 1), 512) for n in range(24)]
    specs = [
        ShardingSpec(f"model.layers.{n}.weight", "BF16", shapes[n % len(shapes)], meshes[n % len(meshes)])
        for n in range(tensors)
    ]
    return [RankShards(rank, specs if rank == 0 else ()) for rank in range(ranks)]


CASES: dict[str, Callable[[], list[RankShards]]] = {
    "one tensor, 10^4 boxes": lambda: one_tensor(10**4),
    "one tensor, 10^5 boxes": lambda: one_tensor(10**5),
    "one tensor, 10^6 boxes": lambda: one_tensor(10**6),
    "98 tensors on 1,024 ranks, 10^5 boxes": lambda: many_tensors(10**5),
    "977 tensors on 1,024 ranks, 10^6 boxes": lambda: many_tensors(10**6 + 1024),
    "1,000 DTensors on 1,024 ranks, records": lambda: records(1000),
    "10,000 DTensors on 1,024 ranks, records": lambda: records(10_000),
    "100,000 DTensors on 64 ranks, records": lambda: records(100_000, 64),
    "100,000 DTensors on 1,024 ranks, records": lambda: records(100_000),
}
QUICK = (  # the smallest of each kind
    "one tensor, 10^4 boxes",
    "98 tensors on 1,024 ranks, 10^5 boxes",
    "1,000 DTensors on 1,024 ranks, records",
)


def measure(case: str) -> None:
    rank_shards = CASES[case]()
    wall, cpu = time.perf_counter(), time.process_time()
    plan = plan_merge(rank_shards)
    seconds, processor = time.perf_counter() - wall, time.process_time() - cpu
    pieces = sum(len(tensor.pieces) for file in plan.files for tensor in file.tensors)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps([plan.num_tensors, pieces, seconds, processor, peak]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="only the smallest size of each kind")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        measure(options.case)
        return
    print(machine_text())
    print("| what | tensors | boxes | seconds | processor seconds | peak |")
    print("|---|---|---|---|---|---|")
    for case in QUICK if options.quick else CASES:
        command = [sys.executable, __file__, "--case", case]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        tensors, pieces, seconds, processor, peak = json.loads(done.stdout)
        print(
            f"| {case} | {tensors:,} | {pieces:,} | {seconds:.2f} | {processor:.2f} | {peak / 2**20:.0f} MiB |",
            flush=True,
        )


if __name__ == "__main__":
    main()
