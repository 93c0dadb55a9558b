"""Time the export of a model sharded by FSDP2, compared with other ways, and how long a background export blocks.

    python tools/bench/export.py [--ranks 2] [--megabytes 1024] [--dirs /dev/shm] [--rounds 5]

The other ways: get_model_state_dict(full) + save_file; `cat` of the same bytes by one process; `cp` of each rank's
bytes by all ranks at once. An export in the background is timed until the call returns, and compared with one copy of
the rank's shard into memory that was used before. All ways run warm and interleaved in one job; medians and their
ratios. The peak is what a way adds to the resident set of each rank (VmHWM, reset before each run).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any

from machine import machine_text
from ranks import measure, peaks, reset_peak, slowest, status

FULL, CAT, CP = "full state dict + save_file", "cat", "cp, all ranks"
MEMCPY, BACKGROUND = "memcpy of the shard", "export in the background, until it returns"


def rank_main(megabytes: int, folder: str, rounds: int) -> dict[str, list[tuple[float, int]]]:
    """Return seconds and added bytes of every round of every way, on this rank."""
    import torch
    import torch.distributed as dist
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import statexchange as sx

    width = 1024
    layers = [
        torch.nn.Linear(width, 4 * width, bias=False) for _ in range(megabytes * 2**20 // (4 * width * width * 4))
    ]
    model = torch.nn.Sequential(*layers)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    rank, out = dist.get_rank(), os.path.join(folder, "out")
    parameters: list[Any] = list(model.parameters())
    nbytes = sum(p.numel() * p.element_size() for p in parameters)
    shards = [parameter.to_local().detach() for parameter in parameters]
    copies = [torch.zeros_like(shard) for shard in shards]
    source, part = f"{folder}/source", f"{folder}/part-{rank}"
    if rank == 0:
        write(source, nbytes)
    write(part, sum(shard.nbytes for shard in shards))

    def make_out() -> None:
        if rank == 0:
            os.mkdir(out)

    def full() -> None:
        state: dict[str, Any] = get_model_state_dict(
            model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        make_out()
        if rank == 0:
            save_file(state, f"{out}/model.safetensors", {"format": "pt"})

    def cat() -> None:
        make_out()
        if rank == 0:
            with open(f"{out}/copy", "wb") as file:
                subprocess.run(["cat", source], stdout=file, check=True)

    def cp() -> None:
        make_out()
        dist.barrier()
        subprocess.run(["cp", "--reflink=never", part, f"{out}/copy-{rank}"], check=True)

    def memcpy() -> None:
        for copy, shard in zip(copies, shards, strict=True):
            copy.copy_(shard)

    pending: list[Any] = []

    def background() -> None:
        pending.append(sx.export_checkpoint(model, out, background=True))

    ways: dict[str, Callable[[], object]] = {
        "export, 1 file": lambda: sx.export_checkpoint(model, out, max_shard_size="1TB"),
        "export, 4 files": lambda: sx.export_checkpoint(model, out, max_shard_size=-(-nbytes // 4)),
        FULL: full,
        CAT: cat,
        CP: cp,
        MEMCPY: memcpy,
        BACKGROUND: background,
    }
    found: dict[str, list[tuple[float, int]]] = {way: [] for way in ways}
    for number in range(rounds + 1):  # the first warms up
        for way, run in ways.items():
            dist.barrier()
            before = reset_peak()
            began = time.perf_counter()
            run()
            if run not in (memcpy, background):
                dist.barrier()
            seconds = time.perf_counter() - began
            while pending:
                pending.pop().result()
            if number:
                found[way].append((seconds, status("VmHWM") - before))
            dist.barrier()
            if rank == 0 and run is not memcpy:
                shutil.rmtree(out)
    return found


def write(path: str, nbytes: int) -> None:
    """Write a file of `nbytes` random bytes."""
    block = os.urandom(1 << 20)
    with open(path, "wb") as file:
        for begin in range(0, nbytes, len(block)):
            file.write(block[: nbytes - begin])


def main() -> None:
    options, measured = measure(rank_main)
    rows = []
    for place, ranks in measured.items():
        seconds = {way: slowest(rank[way] for rank in ranks) for way in ranks[0]}
        for way, taken in seconds.items():
            of_rank = way in (MEMCPY, BACKGROUND)
            size = options.megabytes * 2**20 / (options.ranks if of_rank else 1)
            ratios = ["" if of_rank else f"{seconds[peer] / taken:.2f}x" for peer in (FULL, CAT, CP)]
            rows.append(
                [place, way, f"{taken:.2f}", f"{size / taken / 1e9:.2f}", *ratios, peaks(rank[way] for rank in ranks)]
            )
        stall = seconds[BACKGROUND] / seconds[MEMCPY]
        print(f"{place}: an export in the background blocks training for {stall:.2f}x of one memcpy of the shard")
    print(f"{options.megabytes} MiB, {options.ranks} ranks, {options.rounds} rounds, {machine_text()}")
    print("| where | way | seconds | GB/s | vs the full state dict | vs cat | vs cp | peaks add, MiB |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
