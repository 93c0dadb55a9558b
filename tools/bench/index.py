"""Time saves, exports and loads of many ranks, beyond the bytes of tensors; the ranks are simulated.

    python tools/bench/index.py [--quick]

One process is one rank of a job that torch's "fake" process group makes as large as is wanted: its DTensors are real,
and so are the messages, the files that it reads and all code of the package, but other ranks answer with this rank's
own messages. Each size runs in a process of its own. Columns: what one rank takes to make its message for the index,
and its size; what root takes to join those of all; the text of the index; a load by one rank, of the layout that was
saved and by half as many ranks, in seconds, with the memory that it adds. In the last column the index is taken away,
so that each rank opens all files, as it did before there was one: of the first size alone, as it grows with ranks times
tensors.

A second table is of exports: what root takes to describe its tensors, to plan, and to assign the receipts of all ranks
and publish; the memory that this adds; the bytes of the plan, which each rank gets, and of the manifest with the file
of digests, for each box; and a load of the export by one rank, of the layout that was exported and by half as many.
"Both again" is what describing and planning take in a second export of the same tensors.

A third is of what root takes to decode all ranks' messages and plan, beside torch's DefaultSavePlanner. Equal messages
are decoded once here, as in a job; torch's are different pickles.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from machine import machine_text

SIZES = [(4600, 64), (4600, 256), (4600, 1024), (4600, 4096), (10_000, 4096)]
QUICK = [(500, 16)]
EXPORTS = [(1000, 64), (1000, 256), (1000, 1024), (1000, 4096), (10_000, 4096)]
QUICK_EXPORTS = [(500, 64)]
PLANNER = (200, 1024)
ROWS_PER_RANK = 2


class SimulatedRanks:
    """One rank of a job whose other ranks send what this one sends."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.nodes, self.hosts = [0] * world_size, ["simulated"] * world_size
        self.num_nodes, self.node_rank = 1, 0
        self.seconds: dict[str, float] = {}  # by phase
        self.nbytes: dict[str, int] = {}  # of the data that this rank sent last, by operation

    @contextlib.contextmanager
    def phase(self, name: str, **_: object) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def progress(self) -> None:
        pass

    def all_gather_bytes(self, data: bytes, root: int | None = None, *, operation: str, **_: object) -> list[bytes]:
        self.nbytes[operation] = len(data)
        return [data] * self.world_size if root in (None, self.rank) else []


def state_of(
    num_tensors: int, rank: int, world_size: int, rows: int, fill: float, *, with_steps: bool = True
) -> dict[str, Any]:
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
        if with_steps:
            state[f"optimizer.{number}.step"] = torch.tensor(fill + number)
    return state


def write_save(folder: str, num_tensors: int, world_size: int, written: list[int]) -> dict[str, float]:
    """Write the manifest of a save, and the files of some ranks; return what was measured."""
    from statexchange.exchange import save_index
    from statexchange.exchange.staging import shard_data
    from statexchange.sharding.options import LoadOptions
    from statexchange.state.state_dict import describe_save
    from statexchange.storage.rank_writer import write_tensor_file
    from statexchange.storage.tensorfile import MANIFEST, SaveManifest, rank_file_names, rank_metadata

    names, save = rank_file_names(world_size), "0123456789abcdef"
    sizes = [1] * world_size
    message_of: dict[int, tuple[bytes, bytes]] = {}
    for rank in sorted({0, 1, *written}):
        state = state_of(num_tensors, rank, world_size, ROWS_PER_RANK, 1.0)
        saved = describe_save(state, None, LoadOptions(), rank)
        # Rank 0 writes what all ranks have.
        held = [local for local in saved.described.tensors.values() if rank == 0 or local.layout.placement is not None]
        began = time.perf_counter()
        message_of[rank] = save_index.messages_of_rank(saved, saved.described, [[local.shard for local in held]], rank)
        described_s = time.perf_counter() - began
        if rank in written:
            metadata = rank_metadata(save, rank, world_size, saved.config, {"aliases": {}})
            folder_fd = os.open(folder, os.O_RDONLY)
            path, parts = f"{folder}/{names[rank]}", shard_data(held)
            sizes[rank] = write_tensor_file(folder_fd, names[rank], path, parts, metadata).nbytes
            os.close(folder_fd)
    messages = []
    for rank in range(world_size):
        # Ranks but the first differ only by their rank in the mesh, which one tensor shows.
        _, own = save_index.messages_of_rank(saved, saved.described, [[held[0].shard]], rank)
        messages.append(message_of.get(rank, (message_of[1][0], own)))
    size = sum(map(len, messages[-1]))
    began = time.perf_counter()
    shared, own_messages = zip(*messages, strict=True)
    text = save_index.joined(shared, own_messages)[0]
    joined_s = time.perf_counter() - began
    manifest = SaveManifest(save, "job", 0.0, tuple(sizes), index=text)
    with open(f"{folder}/{MANIFEST}", "wb") as file:
        file.write(manifest.to_bytes())
    return {"described_s": described_s, "message": size, "joined_s": joined_s, "text": len(text)}


def load(
    folder: str, num_tensors: int, rank: int, world_size: int, rows: int, *, with_steps: bool = True
) -> tuple[float, float]:
    """Load on one rank; return seconds and the bytes that the peak of the process grew by."""
    from statexchange.exchange.load import load_now
    from statexchange.exchange.load_report import LoadRequest
    from statexchange.sharding.options import CallOptions, LoadOptions

    state = state_of(num_tensors, rank, world_size, rows, 0.0, with_steps=with_steps)
    before = resident_now()
    began = time.perf_counter()
    request = LoadRequest(state, folder, LoadOptions(), CallOptions(), began, None)
    # It has what a load asks of a communicator, and no more.
    load_now(request, SimulatedRanks(rank, world_size))  # type: ignore[arg-type]
    seconds = time.perf_counter() - began
    for name, tensor in state.items():
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.flatten()[-1].item() != 1.0 + int(name.split(".")[1 if name.startswith("optimizer") else 2]):
            raise SystemExit(f"{name} was not loaded")
    return seconds, resident("VmHWM") - before


def resident_now() -> int:
    """Return the bytes of this process that are resident, and let the peak begin anew."""
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return resident("VmRSS")


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


def export(folder: str, num_tensors: int, world_size: int) -> dict[str, float]:
    """Export on root of so many ranks; return what was measured. The file has root's parts alone."""
    from statexchange.exchange.export import export_described
    from statexchange.exchange.exporting import ExportRequest
    from statexchange.sharding.options import CallOptions, ExportOptions
    from statexchange.state.describe import describe
    from statexchange.tensors import collector_paused

    state = state_of(num_tensors, 0, world_size, ROWS_PER_RANK, 1.0, with_steps=False)
    before = resident_now()
    comm: Any = SimulatedRanks(0, world_size)
    trips: list[dict[str, float]] = []
    for name in ("first", "out"):
        options, call = ExportOptions(max_shard_size=1 << 50), CallOptions()
        began = time.perf_counter()
        with collector_paused():
            described = describe(state, options.new_layout(), 0, with_extra_state=False)
        request = ExportRequest(f"{folder}/{name}", options, call, {})
        report = export_described(described, None, request, comm, None).report
        seconds = time.perf_counter() - began
        if not trips:
            added = resident("VmHWM") - before
        in_phases = {phase: comm.seconds.pop(phase) for phase in ("planning", "writing", "publishing")}
        trips.append({**in_phases, "describing": seconds - sum(in_phases.values()), "seconds": seconds})
    beside = sum(nbytes for name, nbytes in report.files if name.startswith("statexchange"))
    return {
        "seconds": trips[0]["seconds"],
        "described_s": trips[0]["describing"],
        "planned_s": trips[0]["planning"],
        "published_s": trips[0]["publishing"],
        "again_s": trips[1]["describing"] + trips[1]["planning"],
        "bytes": added,
        "plan_bytes": comm.nbytes["the plan"],
        "bytes_per_box": beside / (num_tensors * world_size),
    }


def fill_parts(folder: str, num_tensors: int, ranks: list[int]) -> None:
    """Write the parts of these ranks into the file of an export."""
    import torch

    with open(f"{folder}/out/model.safetensors", "r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        for number in range(num_tensors):
            entry = header[f"model.layers.{number}.weight"]
            part = torch.full((ROWS_PER_RANK, entry["shape"][1]), 1.0 + number).numpy().tobytes()
            for rank in ranks:
                file.seek(8 + length + entry["data_offsets"][0] + rank * len(part))
                file.write(part)


def measure_export(num_tensors: int, world_size: int) -> None:
    """Print what was measured of one export as JSON."""
    rank = 5
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        measured = export(folder, num_tensors, world_size)
        fill_parts(folder, num_tensors, [rank, 2 * rank, 2 * rank + 1])
        for way, ranks, rows in (("same", world_size, ROWS_PER_RANK), ("half", world_size // 2, 2 * ROWS_PER_RANK)):
            found = load(f"{folder}/out", num_tensors, rank, ranks, rows, with_steps=False)
            measured[f"{way}_s"], measured[f"{way}_bytes"] = found
    print(json.dumps(measured))


def measure_planner(num_tensors: int, world_size: int) -> None:
    """Print what root takes to plan a save by torch, and an export by the package, as JSON."""
    import dataclasses
    import pickle  # torch's messages, which this process has made itself

    import torch
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner()
    planner.set_up_planner(state_of(num_tensors, 0, world_size, ROWS_PER_RANK, 1.0, with_steps=False), None, True)
    of_root = planner.create_local_plan()
    messages = []
    for rank in range(world_size):
        items = []
        for item in of_root.items:
            offsets = torch.Size((rank * ROWS_PER_RANK, 0))
            assert item.tensor_data is not None
            chunk = dataclasses.replace(item.tensor_data.chunk, offsets=offsets)
            data = dataclasses.replace(item.tensor_data, chunk=chunk)
            index = dataclasses.replace(item.index, offset=offsets)
            items.append(dataclasses.replace(item, index=index, tensor_data=data))
        messages.append(pickle.dumps(dataclasses.replace(of_root, items=items)))
    del of_root
    began = time.perf_counter()
    plans = [pickle.loads(message) for message in messages]  # as dcp.save's gather_object does
    decoded_s = time.perf_counter() - began
    planner.create_global_plan(plans)
    measured = {"decoded_s": decoded_s, "torch_s": time.perf_counter() - began}
    del plans
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        exported = export(folder, num_tensors, world_size)
    measured["seconds"] = exported["planned_s"]
    print(json.dumps(measured))


def print_planners(num_tensors: int, ranks: int) -> None:
    command = [sys.executable, __file__, "--planner", str(num_tensors), str(ranks)]
    row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print("\n| tensors | ranks | way | root decodes and plans | decodes | ratio |")
    print("|---|---|---|---|---|---|")
    size = f"{num_tensors:,} | {ranks:,}"
    print(f"| {size} | DefaultSavePlanner | {row['torch_s']:.2f} s | {row['decoded_s']:.2f} s | |")
    print(f"| {size} | export | {row['seconds']:.3f} s | | {row['torch_s'] / row['seconds']:.0f}x |", flush=True)


def print_exports(sizes: list[tuple[int, int]]) -> None:
    print(
        "\n| tensors | ranks | root | describes | plans | publishes | both again | plan | manifest | load | by half |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for num_tensors, ranks in sizes:
        command = [sys.executable, __file__, "--export", str(num_tensors), str(ranks)]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        cells = [f"{num_tensors:,}", f"{ranks:,}", f"{row['seconds']:.2f} s, {row['bytes'] / 2**20:.0f} MiB"]
        cells += [f"{row[f'{step}_s']:.2f} s" for step in ("described", "planned", "published", "again")]
        cells += [f"{row['plan_bytes'] / 1000:.0f} kB", f"{row['bytes_per_box']:.1f} B a box"]
        cells += [f"{row[f'{way}_s']:.2f} s, {row[f'{way}_bytes'] / 2**20:.0f} MiB" for way in ("same", "half")]
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="one small size")
    parser.add_argument("--size", nargs=2, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--all", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--planner", nargs=2, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--export", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.size:
        measure(*options.size, takes_index_away=options.all)
        return
    if options.export:
        measure_export(*options.export)
        return
    if options.planner:
        measure_planner(*options.planner)
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
    print_exports(QUICK_EXPORTS if options.quick else EXPORTS)
    print_planners(*(QUICK[0] if options.quick else PLANNER))


if __name__ == "__main__":
    main()
