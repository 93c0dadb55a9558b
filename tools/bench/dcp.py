"""Time the conversion of a torch DCP directory to a Hugging Face directory, compared with `accelerate merge-weights`.

    python tools/bench/dcp.py [--megabytes 512] [--rounds 5] [--dir /dev/shm]

The directory is written by two ranks of FSDP2. The two conversions run in turns, with their input in the page cache,
and are timed as whole commands, with the start of Python and the imports. The seconds are medians; the peak is that of
the process's resident set.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import machine_text

from statexchange.testing import run_ranks

LAYERS = 16
BIN = Path(sys.executable).parent


def rank_main(folder: str, megabytes: int) -> None:
    """Save a model of `megabytes` of float32, sharded over the ranks."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    width = int((megabytes * 2**20 / 4 / LAYERS) ** 0.5)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    fully_shard(model)
    dcp.state_dict_saver.save({"model": model.state_dict()}, checkpoint_id=folder)
    dist.barrier()


def run(command: list[str]) -> tuple[float, int]:
    """Run a command; return its seconds and its peak memory in bytes."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return time.perf_counter() - began, usage.ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", default="/dev/shm")
    options = parser.parse_args()
    from dcp import rank_main as ranks_work  # ranks cannot import __main__

    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        source, out = os.path.join(folder, "dcp"), os.path.join(folder, "out")
        run_ranks(ranks_work, 2, backend="gloo", args=(source, options.megabytes), timeout_s=300)
        ways = {
            "statexchange merge": [str(BIN / "statexchange"), "merge", source, out, "--rename", r"^model\.="],
            "accelerate merge-weights": [str(BIN / "accelerate"), "merge-weights", source, out],
        }
        found: dict[str, list[tuple[float, int]]] = {way: [] for way in ways}
        for number in range(options.rounds + 1):  # the first warms up
            for way, command in ways.items():
                shutil.rmtree(out, ignore_errors=True)
                measured = run(command)
                if number:
                    found[way].append(measured)
    seconds = {way: statistics.median(s for s, _ in measured) for way, measured in found.items()}
    print(f"{options.megabytes} MiB, 2 ranks, {options.rounds} rounds, {machine_text()}\n")
    print("| command | seconds | vs accelerate | peak |\n|---|---|---|---|")
    for way, taken in seconds.items():
        peak = max(peak for _, peak in found[way]) >> 20
        print(f"| {way} | {taken:.2f} | {seconds['accelerate merge-weights'] / taken:.1f}x | {peak} MiB |")


if __name__ == "__main__":
    main()
