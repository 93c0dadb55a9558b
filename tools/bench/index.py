"""Time the index of a save, and a load that plans from it, over ranks and tensors; the ranks are simulated.

    python tools/bench/index.py [--quick]

One process is one rank of a job that torch's "fake" process group makes as large as is wanted: its DTensors are real,
and so are the messages, the files that it reads and all code of the package, but other ranks answer with this rank's
own messages. Each size runs in a process of its own. Columns: what one rank takes to make its message for the index,
and its size; what root takes to join those of all; the text of the index; a load by one rank, of the layout that was
saved and by half as many ranks, in seconds, with the memory that it adds. In the last column the index is taken away,
so that each rank opens all files, as it did before there was one: of the first size alone, as it grows with ranks times
tensors.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from machine import machine_text

SIZES = [(4600, 64), (4600, 256), (4600, 1024), (4600, 4096), (10_000, 4096)]
QUICK = [(500, 16)]
ROWS_PER_RANK = 2


class SimulatedRanks:
    """One rank of a job whose other ranks send what this one sends."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.nodes, self.hosts = [0] * world_size, ["simulated"] * world_size
        self.num_nodes, self.node_rank = 1, 0

    @contextlib.contextmanager
    def phase(self, *_: object, **__: object) -> Iterator[None]:
        yield

    def progress(self) -> None:
        pass

    def all_gather_bytes(self, data: bytes, **_: object) -> list[bytes]:
        return [data] * self.world_size


def state_of(num_tensors: int, rank: int, world_size: int, rows: int, fill: float) -> dict[str, Any]:
    """Return DTensors in rows on all ranks, and for each a count of steps that all ranks have, as AdamW's."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    mesh = init_device_mesh("cpu", (world_size,))
    state: dict[str, Any] = {}
    for number in range(num_tensors):
        local = torch.full((rows, 1 + number % 24), fill + number)
        state[f"model.layers.{number}.weight"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        state[f"optimizer.{number}.step"] = torch.tensor(fill + number)
    return state


def write_save(folder: str, num_tensors: int, world_size: int, written: list[int]) -> dict[str, float]:
    """Write the manifest of a save, and the files of some ranks; return what was measured."""
    import os

    from statexchange.exchange import save_index
    from statexchange.exchange.staging import Staging, shard_data
    from statexchange.sharding.options import LoadOptions
    from statexchange.state.state_dict import describe_save
    from statexchange.storage.tensorfile import (
        MANIFEST,
        SaveManifest,
        rank_file_names,
        rank_metadata,
        write_tensor_file,
    )

    names, save = rank_file_names(world_size), "0123456789abcdef"
    sizes = [1] * world_size
    message_of: dict[int, save_index.RankIndex] = {}
    for rank in sorted({0, 1, *written}):
        state = state_of(num_tensors, rank, world_size, ROWS_PER_RANK, 1.0)
        saved = describe_save(state, None, LoadOptions(), rank)
        # Rank 0 writes what all ranks have.
        held = [local for local in saved.described.tensors.values() if rank == 0 or local.placement is not None]
        began = time.perf_counter()
        message_of[rank] = save_index.index_of_rank(saved, saved.described, [[local.shard for local in held]], rank)
        described_s = time.perf_counter() - began
        if rank in written:
            metadata = rank_metadata(save, rank, world_size, saved.config, {"aliases": {}})
            folder_fd = os.open(folder, os.O_RDONLY)
            path, parts = f"{folder}/{names[rank]}", shard_data(held, Staging())
            sizes[rank] = write_tensor_file(folder_fd, names[rank], path, parts, metadata, durable=False).nbytes
            os.close(folder_fd)
    messages = []
    for rank in range(world_size):
        # Ranks but the first differ only by their rank in the mesh, which one tensor shows.
        own = save_index.index_of_rank(saved, saved.described, [[held[0].shard]], rank).own
        messages.append(message_of.get(rank, message_of[1]._replace(own=own)))
    size = sum(map(len, messages[-1]))
    began = time.perf_counter()
    text = save_index.joined(messages)[0]
    joined_s = time.perf_counter() - began
    manifest = SaveManifest(save, "job", 0.0, tuple(sizes), index=text)
    with open(f"{folder}/{MANIFEST}", "wb") as file:
        file.write(manifest.to_bytes())
    return {"described_s": described_s, "message": size, "joined_s": joined_s, "text": len(text)}


def load(folder: str, num_tensors: int, rank: int, world_size: int, rows: int) -> tuple[float, float]:
    """Load on one rank; return seconds and the bytes that the peak of the process grew by."""
    from statexchange.exchange.load import load_now
    from statexchange.exchange.load_report import LoadRequest
    from statexchange.sharding.options import CallOptions, LoadOptions

    state = state_of(num_tensors, rank, world_size, rows, 0.0)
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    before = resident("VmRSS")
    began = time.perf_counter()
    request = LoadRequest(state, folder, LoadOptions(), CallOptions(), began, None)
    # It has what a load asks of a communicator, and no more.
    load_now(request, SimulatedRanks(rank, world_size))  # type: ignore[arg-type]
    seconds = time.perf_counter() - began
    for number in range(num_tensors):
        weight = state[f"model.layers.{number}.weight"].to_local()
        if weight.flatten()[-1].item() != 1.0 + number or state[f"optimizer.{number}.step"].item() != 1.0 + number:
            raise SystemExit(f"tensor {number} was not loaded")
    return seconds, resident("VmHWM") - before


def resident(field: str) -> int:
    """Return the bytes of this process that are resident now, or have been at most."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(field):
                return 1024 * int(line.split()[1])
    raise SystemExit(f"no {field}")


def measure(num_tensors: int, world_size: int, *, takes_index_away: bool) -> None:
    """Print what was measured of one size as JSON."""
    rank = 5
    written = list(range(world_size)) if takes_index_away else [0, rank, 2 * rank, 2 * rank + 1]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        measured = write_save(folder, num_tensors, world_size, written)
        measured["same_s"], measured["same_bytes"] = load(folder, num_tensors, rank, world_size, ROWS_PER_RANK)
        half = load(folder, num_tensors, rank, world_size // 2, 2 * ROWS_PER_RANK)
        measured["half_s"], measured["half_bytes"] = half
        if takes_index_away:
            from statexchange.storage.location import seal

            with open(f"{folder}/save.json", "r+b") as file:
                manifest = json.load(file)
                del manifest["digest"], manifest["index"]
                file.seek(0)
                file.truncate()
                file.write(json.dumps(seal(manifest)).encode())
            measured["all_s"], measured["all_bytes"] = load(folder, num_tensors, rank, world_size, ROWS_PER_RANK)
    print(json.dumps(measured))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="one small size")
    parser.add_argument("--size", nargs=2, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--all", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.size:
        measure(*options.size, takes_index_away=options.all)
        return
    print(machine_text())
    print("| tensors | ranks | a rank's message | root joins | index | load | by half the ranks | opening all files |")
    print("|---|---|---|---|---|---|---|---|")
    for number, (num_tensors, ranks) in enumerate(QUICK if options.quick else SIZES):
        command = [sys.executable, __file__, "--size", str(num_tensors), str(ranks), *(["--all"] if not number else [])]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        row = json.loads(done.stdout)
        cells = [f"{num_tensors:,}", f"{ranks:,}", f"{row['described_s']:.2f} s, {row['message'] / 1000:.0f} kB"]
        cells += [f"{row['joined_s']:.2f} s", f"{row['text'] / 1000:.0f} kB"]
        for way in ("same", "half", "all"):
            cell = ""
            if f"{way}_s" in row:
                cell = f"{row[f'{way}_s']:.2f} s, {row[f'{way}_bytes'] / 2**20:.0f} MiB"
            cells.append(cell)
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
