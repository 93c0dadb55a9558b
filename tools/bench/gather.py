"""Time the gather of one tensor per rank, compared with memcpy and with torch.save + SharedMemory + torch.load.

    python tools/bench/gather.py [--ranks 2] [--megabytes 256] [--rounds 7]

All ways run warm and interleaved in one job, on the same bytes: those that the other ranks send.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import time
from collections.abc import Callable

from machine import machine_text

from statexchange.testing import run_ranks

WAYS = ("get_tensors_parallel", "get_tensors_parallel, workspace on tmpfs", "torch.save + SharedMemory", "memcpy")


def rank_main(megabytes: int, rounds: int, run: str) -> dict[str, list[float]]:
    """Return seconds of every round of every way, on this rank."""
    from multiprocessing import shared_memory

    import torch
    import torch.distributed as dist

    import statexchange as sx

    rank, ranks = dist.get_rank(), list(range(dist.get_world_size()))
    tensor = torch.full((megabytes * 2**20 // 2,), float(rank), dtype=torch.bfloat16)
    target = torch.empty_like(tensor)

    def ours(path: str | None = None) -> None:
        with sx.get_tensors_parallel(tensor, ranks, None, path) as tensors:
            assert [float(t[-1]) for t in tensors] == [float(r) for r in ranks[: len(tensors)]]

    def pickled() -> None:
        """Gather as ModelOpt's get_tensors_parallel does."""
        names = [f"{run}-{r}" for r in ranks]
        mine = None
        if rank:
            mine = shared_memory.SharedMemory(names[rank], create=True, size=tensor.nbytes + 2048)
            torch.save(tensor, mine._mmap)  # type: ignore[attr-defined]  # noqa: SLF001 (as ModelOpt does)
        dist.barrier()
        if not rank:
            for r in ranks[1:]:
                theirs = shared_memory.SharedMemory(names[r])
                assert float(torch.load(io.BytesIO(bytes(theirs.buf or b"")))[-1]) == r
                theirs.close()
        dist.barrier()
        if mine is not None:
            mine.close()
            mine.unlink()

    def copy() -> None:
        if not rank:
            for _ in ranks[1:]:
                target.copy_(tensor)

    ways: dict[str, Callable[[], object]] = dict(
        zip(WAYS, (ours, lambda: ours(f"shm://{run}"), pickled, copy), strict=True)
    )
    found: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 2):  # the first two warm up
        for way, go in ways.items():
            dist.barrier()
            began = time.perf_counter()
            go()
            dist.barrier()
            if number > 1:
                found[way].append(time.perf_counter() - began)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    args = (options.megabytes, options.rounds, f"bench-{os.getpid()}")
    found = run_ranks(rank_main, options.ranks, backend="gloo", args=args, timeout_s=1200)[0]
    size = options.megabytes * 2**20 * (options.ranks - 1)
    print(f"{options.megabytes} MiB a rank, {options.ranks} ranks, {machine_text()}")
    print("| way | seconds | GB/s | vs memcpy | vs torch.save + SharedMemory |")
    print("|---|---|---|---|---|")
    medians = {way: statistics.median(seconds) for way, seconds in found.items()}
    for way, seconds in medians.items():
        ratio = f"{medians[WAYS[3]] / seconds:.2f}x | {medians[WAYS[2]] / seconds:.1f}x"
        print(f"| {way} | {seconds:.3f} | {size / seconds / 1e9:.2f} | {ratio} |")


if __name__ == "__main__":
    main()
