"""Time loads from a disk whose files are not in the page cache, compared with other readers of the same bytes.

    python tools/bench/cold.py --dirs DIRECTORY [--ranks 2] [--megabytes 1024] [--rounds 5]

A model sharded by FSDP2 is loaded from one safetensors file, from a save of ours and from torch's checkpoint of its
shards. The others: `cat` and `dd iflag=direct` of a file of each rank's rows, and threads that read it into memory by
`preadv`; `safe_open` of safetensors, which maps the one file, with each rank's rows copied into the model; run:ai's
model streamer, if it is installed, into host memory. Before each run each file is dropped from the cache, and the bench
ends with an error if a page of it is still there. All ways run in turns in one job; medians of the slowest rank.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from machine import machine_text
from page_cache import cached_pages
from ranks import in_turns, measure, slowest

PREADS, CAT, DIRECT = "preadv, 8 threads", "cat to /dev/null", "dd iflag=direct"
MAPPED, DCP, STREAMER = "safe_open, mapped", "dcp.load", "run:ai streamer"
RAW = (PREADS, CAT, DIRECT)
_PREAD_BYTES = 4 << 20
_MAX_DROPS = 100


def drop(folder: str) -> None:
    """Drop all files below a folder from the page cache, and check that none of their pages is there."""
    for path in Path(folder).rglob("*"):
        if path.is_file() and path.stat().st_size:
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            for _ in range(_MAX_DROPS):  # a page stays while a process that is ending has it mapped
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                if not any(cached_pages(fd)):
                    break
                time.sleep(0.02)
            else:
                raise RuntimeError(f"{path}: not all of it can be dropped from the page cache")
            os.close(fd)


def preads(path: str, memory: memoryview) -> None:
    """Read a file into memory by 8 threads."""
    fd = os.open(path, os.O_RDONLY)
    begins = range(0, os.fstat(fd).st_size, _PREAD_BYTES)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda at: os.preadv(fd, [memory[at : at + _PREAD_BYTES]], at), begins))
    os.close(fd)


def stream(path: str) -> None:
    """Read the tensors of a file by run:ai's streamer."""
    from runai_model_streamer import SafetensorsStreamer  # type: ignore[import-untyped,import-not-found,unused-ignore]

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(path)
        for _ in streamer.get_tensors():
            pass


def rank_main(megabytes: int, folder: str, rounds: int) -> dict[str, list[tuple[float, int]]]:
    """Return seconds of every round of every way, on this rank."""
    import safetensors.torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import statexchange as sx

    width, rank = 1024, dist.get_rank()
    layers = [torch.nn.Linear(width, 4 * width) for _ in range(max(1, megabytes * 2**20 // (4 * width * 4 * width)))]
    model = torch.nn.Sequential(*layers)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in [*layers, model]:
        fully_shard(layer, mesh=mesh)
    sx.export_checkpoint(model, f"{folder}/whole")
    sx.save_checkpoint(model, f"{folder}/save")
    state = model.state_dict()
    dcp.state_dict_saver.save(state, checkpoint_id=f"{folder}/dcp")
    shards = {name: parameter.to_local().detach() for name, parameter in model.named_parameters()}  # type: ignore[attr-defined]
    rows = f"{folder}/rows-{rank}.safetensors"
    safetensors.torch.save_file(shards, rows)
    memory = memoryview(bytearray(os.path.getsize(rows)))

    def mapped() -> None:
        with safetensors.safe_open(f"{folder}/whole/model.safetensors", "pt") as file:
            for name, shard in shards.items():
                size = shard.shape[0]
                shard.copy_(file.get_slice(name)[rank * size : (rank + 1) * size])

    def prepare() -> None:
        dist.barrier()
        if rank == 0:
            drop(folder)
        dist.barrier()

    ways: dict[str, Callable[[], object]] = {
        "load, one safetensors file": lambda: sx.load_checkpoint(model, f"{folder}/whole"),
        "load, a save": lambda: sx.load_checkpoint(model, f"{folder}/save"),
        "load, of torch's DCP": lambda: sx.load_checkpoint(model, f"{folder}/dcp"),
        PREADS: lambda: preads(rows, memory),
        CAT: lambda: subprocess.run(["cat", rows], stdout=subprocess.DEVNULL, check=True),
        DIRECT: lambda: subprocess.run(
            ["dd", f"if={rows}", "of=/dev/null", "bs=8M", "iflag=direct", "status=none"], check=True
        ),
        MAPPED: mapped,
        DCP: lambda: dcp.state_dict_loader.load(state, checkpoint_id=f"{folder}/dcp"),
    }
    if importlib.util.find_spec("runai_model_streamer"):
        ways[STREAMER] = lambda: stream(rows)
    return in_turns(ways, rounds, prepare)


def main() -> None:
    options, measured = measure(rank_main)
    print(f"{options.megabytes} MiB, {options.ranks} ranks, {options.rounds} rounds, {machine_text()}")
    print("| where | way | seconds | GB/s | vs the best raw reader | vs safe_open | vs dcp.load |")
    print("|---|---|---|---|---|---|---|")
    for place, ranks in measured.items():
        seconds = {way: slowest(rank[way] for rank in ranks) for way in ranks[0]}
        best = min(seconds[way] for way in RAW)
        for way, taken in seconds.items():
            ratios = " | ".join(f"{peer / taken:.2f}x" for peer in (best, seconds[MAPPED], seconds[DCP]))
            speed = options.megabytes * 2**20 / taken / 1e9
            print(f"| {place} | {way} | {taken:.2f} | {speed:.2f} | {ratios} |")


if __name__ == "__main__":
    main()
