"""Export of a sharded model beside its peers: `cat` of the same bytes, and get_model_state_dict(full) + save_file.

    python tools/bench/export.py [--ranks 2] [--megabytes 512] [--dir /dev/shm] [--rounds 5]

All ways run warm and interleaved in one job; medians and their ratios. Peak memory is what each way adds to a rank's
resident set (VmHWM, reset before each run).
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

from statexchange.testing import run_ranks

WAYS = ("export, 1 file", "export, 4 files", "full state dict + save_file", "cat")


def reset_peak() -> int:
    """Forget the peak so far; returns the resident bytes now."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    return status("VmRSS")


def status(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith(field))
    return int(line.split()[1]) * 1024


def rank_main(megabytes: int, folder: str, rounds: int) -> dict[str, list[tuple[float, int]]]:
    """Seconds and added bytes of every round of every way, on this rank."""
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
    out = os.path.join(folder, "out")
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())

    def full() -> None:
        state: dict[str, Any] = get_model_state_dict(
            model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        if dist.get_rank() == 0:
            os.mkdir(out)
            save_file(state, f"{out}/model.safetensors", {"format": "pt"})

    def cat() -> None:
        if dist.get_rank() == 0:
            os.mkdir(out)
            with open(f"{out}/copy", "wb") as file:
                subprocess.run(["cat", f"{folder}/source"], stdout=file, check=True)

    ways: dict[str, Callable[[], object]] = {
        WAYS[0]: lambda: sx.export_checkpoint(model, out, max_shard_size="1TB"),
        WAYS[1]: lambda: sx.export_checkpoint(model, out, max_shard_size=-(-nbytes // 4)),
        WAYS[2]: full,
        WAYS[3]: cat,
    }
    if dist.get_rank() == 0:
        with open(f"{folder}/source", "wb") as file:
            file.write(os.urandom(1 << 20) * (nbytes >> 20))
    found: dict[str, list[tuple[float, int]]] = {way: [] for way in ways}
    for number in range(rounds + 1):  # the first warms up
        for way, run in ways.items():
            dist.barrier()
            before = reset_peak()
            began = time.perf_counter()
            run()
            dist.barrier()
            if number:
                found[way].append((time.perf_counter() - began, status("VmHWM") - before))
            if dist.get_rank() == 0:
                shutil.rmtree(out)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--dir", default="/dev/shm")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        args = (options.megabytes, folder, options.rounds)
        ranks = run_ranks(rank_main, options.ranks, backend="gloo", args=args, timeout_s=1200)
    peer = statistics.median(seconds for seconds, _ in ranks[0][WAYS[2]])
    copy = statistics.median(seconds for seconds, _ in ranks[0][WAYS[3]])
    size = options.megabytes * 2**20
    print(
        f"{options.megabytes} MiB, {options.ranks} ranks, {options.rounds} rounds, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    print("| way | seconds | GB/s | beside the full state dict | beside cat | root's peak adds |")
    print("|---|---|---|---|---|---|")
    for way in WAYS:
        seconds = statistics.median(s for s, _ in ranks[0][way])
        added = max(b for _, b in ranks[0][way]) / 2**20
        print(
            f"| {way} | {seconds:.2f} | {size / seconds / 1e9:.2f} | {peer / seconds:.2f}x | {copy / seconds:.2f}x "
            f"| {added:.0f} MiB |"
        )


if __name__ == "__main__":
    main()
