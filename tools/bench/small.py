"""Measure processor time per small tensor: export, save and load, compared with torch's `dcp.save` and `dcp.load`.

    python tools/bench/small.py [--tensors 50000] [--ranks 2] [--dirs /dev/shm] [--rounds 3]

Each tensor has 1 kB: "sharded" ones are DTensors of which each rank holds some rows, "replicated" ones are whole on
each rank. Figures are microseconds of user and system time per tensor, of the rank that took most; medians of rounds in
which all ways run in turn, after one round that warms up. Before each measurement the garbage collector runs: a whole
collection of this state takes as long as an export, and would count against the way that it happens to fall into.
"""

from __future__ import annotations

import argparse
import gc
import resource
import shutil
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

from machine import machine_text

from statexchange.testing import run_ranks

ELEMENTS = 256


def processor_s() -> float:
    """Return the user and system time of this process, in seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def rank_main(number: int, folder: str, rounds: int) -> dict[str, list[float]]:
    """Return by way the microseconds per tensor of every round, on this rank."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    import statexchange as sx

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = ELEMENTS // dist.get_world_size()

    def sharded() -> dict[str, Any]:
        parts = (torch.full((rows,), float(i)) for i in range(number))
        return {f"layer.{i}.weight": DTensor.from_local(part, mesh, [Shard(0)]) for i, part in enumerate(parts)}

    def replicated() -> dict[str, Any]:
        return {f"layer.{i}.weight": torch.full((ELEMENTS,), float(i)) for i in range(number)}

    found: dict[str, list[float]] = {}
    for kind, make in (("sharded", sharded), ("replicated", replicated)):
        state, live = make(), make()
        ways: dict[str, Callable[[], object]] = {
            "export_checkpoint": partial(sx.export_checkpoint, state, f"{folder}/export", overwrite=True),
            "save_checkpoint": partial(sx.save_checkpoint, {"model": state}, f"{folder}/save", overwrite=True),
            "dcp.save": partial(dcp.state_dict_saver.save, state, checkpoint_id=f"{folder}/dcp"),
            "load_checkpoint of the export": partial(sx.load_checkpoint, live, f"{folder}/export"),
            "load_checkpoint of the save": partial(sx.load_checkpoint, {"model": live}, f"{folder}/save"),
            "dcp.load": partial(dcp.state_dict_loader.load, live, checkpoint_id=f"{folder}/dcp"),
        }
        for turn in range(rounds + 1):
            for way, run in ways.items():
                gc.collect()
                dist.barrier()
                began = processor_s()
                run()
                if turn:
                    found.setdefault(f"{way}, {kind}", []).append((processor_s() - began) / number * 1e6)
        dist.barrier()
        if dist.get_rank() == 0:
            for name in ("export", "save", "dcp"):
                shutil.rmtree(f"{folder}/{name}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensors", type=int, default=50000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dirs", nargs="+", default=["/dev/shm"])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    from small import rank_main as ranks_work  # ranks cannot import __main__

    print(f"{options.ranks} ranks, {options.tensors} tensors of 1 kB, {machine_text()}\n")
    print("| way | directory | sharded, us | replicated, us |\n|---|---|---|---|")
    for place in options.dirs:
        with tempfile.TemporaryDirectory(dir=place) as folder:
            args = (options.tensors, folder, options.rounds)
            ranks = run_ranks(ranks_work, options.ranks, backend="gloo", args=args, timeout_s=1200)
        cells = {way: statistics.median(map(max, zip(*(rank[way] for rank in ranks), strict=True))) for way in ranks[0]}
        for way in dict.fromkeys(name.rpartition(", ")[0] for name in cells):
            print(f"| `{way}` | {place} | {cells[way + ', sharded']:.0f} | {cells[way + ', replicated']:.0f} |")


if __name__ == "__main__":
    main()
