"""Measure processor time per small tensor: exports, saves and loads, compared with torch's `dcp.save` and `dcp.load`.

    python tools/bench/small.py [--tensors 50000] [--peer-tensors 2000] [--ranks 2] [--dirs /dev/shm] [--rounds 2]

Each tensor has 1 kB: "sharded" ones are DTensors of which each rank holds some rows, "replicated" ones are whole on
each rank. Figures are microseconds of user and system time per tensor, of the rank that took most; medians of rounds in
which all ways run in turn, after one round of few tensors that warms up. Each round has new tensors with new names: its
first save and export are those of a job, the second ones are of the same tensors with other values. torch's functions
take the time of all others together, so that they save fewer tensors. Before each measurement the garbage collector
runs: a whole collection of this state takes as long as an export, and would count against the way that it happens to
fall into.
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


def rank_main(number: int, peer_number: int, folder: str, rounds: int) -> dict[str, list[float]]:
    """Return by way the microseconds per tensor of every round, on this rank."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    import statexchange as sx

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = ELEMENTS // dist.get_world_size()

    def sharded(count: int, turn: int) -> dict[str, Any]:
        parts = (torch.full((rows,), float(i)) for i in range(count))
        return {f"{turn}.layer.{i}.weight": DTensor.from_local(part, mesh, [Shard(0)]) for i, part in enumerate(parts)}

    def replicated(count: int, turn: int) -> dict[str, Any]:
        return {f"{turn}.layer.{i}.weight": torch.full((ELEMENTS,), float(i)) for i in range(count)}

    def trained(state: dict[str, Any]) -> None:
        for tensor in state.values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).add_(1)

    found: dict[str, list[float]] = {}

    def measure(way: str, count: int, run: Callable[[], object]) -> None:
        gc.collect()
        dist.barrier()
        began = processor_s()
        run()
        found.setdefault(way, []).append((processor_s() - began) / count * 1e6)

    def run_all(kind: str, make: Callable[[int, int], dict[str, Any]], counts: tuple[int, int], turn: int) -> None:
        state = make(counts[0], turn)
        export = partial(sx.export_checkpoint, state, f"{folder}/export{turn}", overwrite=True)
        save = partial(sx.save_checkpoint, {"model": state}, f"{folder}/save{turn}", overwrite=True)
        for when in ("first", "second"):
            measure(f"{when} export_checkpoint, {kind}", counts[0], export)
            measure(f"{when} save_checkpoint, {kind}", counts[0], save)
            trained(state)
        load = partial(sx.load_checkpoint, state, f"{folder}/export{turn}")
        measure(f"load_checkpoint of the export, {kind}", counts[0], load)
        load = partial(sx.load_checkpoint, {"model": state}, f"{folder}/save{turn}")
        measure(f"load_checkpoint of the save, {kind}", counts[0], load)
        few = dict(list(state.items())[: counts[1]])
        save = partial(dcp.state_dict_saver.save, few, checkpoint_id=f"{folder}/dcp{turn}")
        measure(f"dcp.save, {kind}", len(few), save)
        load = partial(dcp.state_dict_loader.load, few, checkpoint_id=f"{folder}/dcp{turn}")
        measure(f"dcp.load, {kind}", len(few), load)
        dist.barrier()
        if dist.get_rank() == 0:
            for name in ("export", "save", "dcp"):
                shutil.rmtree(f"{folder}/{name}{turn}")

    for kind, make in (("sharded", sharded), ("replicated", replicated)):
        run_all(kind, make, (300, 300), 0)
        for way, figures in found.items():
            if way.endswith(f", {kind}"):
                figures.clear()
        for turn in range(1, rounds + 1):
            run_all(kind, make, (number, peer_number), turn)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensors", type=int, default=50000)
    parser.add_argument("--peer-tensors", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dirs", nargs="+", default=["/dev/shm"])
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    from small import rank_main as ranks_work  # ranks cannot import __main__

    print(f"{options.ranks} ranks, {options.tensors} tensors of 1 kB, {machine_text()}\n")
    print("| way | directory | sharded, us | replicated, us |\n|---|---|---|---|")
    for place in options.dirs:
        with tempfile.TemporaryDirectory(dir=place) as folder:
            args = (options.tensors, options.peer_tensors, folder, options.rounds)
            ranks = run_ranks(ranks_work, options.ranks, backend="gloo", args=args, timeout_s=1200)
        cells = {way: statistics.median(map(max, zip(*(rank[way] for rank in ranks), strict=True))) for way in ranks[0]}
        for way in dict.fromkeys(name.rpartition(", ")[0] for name in cells):
            print(f"| `{way}` | {place} | {cells[way + ', sharded']:.0f} | {cells[way + ', replicated']:.0f} |")


if __name__ == "__main__":
    main()
