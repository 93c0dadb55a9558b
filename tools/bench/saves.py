"""Time saves and loads of a job with AdamW, compared with torch's dcp.save, dcp.async_save and dcp.load.

    python tools/bench/saves.py [--kind fsdp2] [--ranks 2] [--megabytes 1024] [--dirs /dev/shm /tmp] [--rounds 5]

`--megabytes` is the whole state: parameters in float32 and two moments of each. Of the kind fsdp2 they are sharded over
all ranks, of hsdp over each half of them, and of ddp each rank has all. Of frozen, `--megabytes` is a base that does
not train, sharded over all ranks beside an adapter that does, and the next save links the base. All ways take turns,
warm; medians over the rounds of the slowest rank. The stall is the time until a call in the background returns; the
next call comes when the save has ended. Both sync what they write on a disk (dcp with its default options). A bare
write is one file of each rank's bytes, synced, and a bare read of them fills the tensors: no digest, no header, no
other rank. `torch.save` is that of rank 0, for ddp. The bytes on disk are those of the whole directory.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict_loader as dcp_loader
import torch.distributed.checkpoint.state_dict_saver as dcp_saver
from machine import machine_text
from ranks import Rounds, measure, slowest
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import statexchange as sx

LAYERS = 16


class Job:
    """A rank's model and optimizer, and what dcp makes of them."""

    def __init__(self, megabytes: int, kind: str) -> None:
        width = int((megabytes * 2**20 / 4 / (1 if kind == "frozen" else 3) / LAYERS) ** 0.5)
        layers = [torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)]
        self.model = torch.nn.Sequential(*layers)
        if kind == "frozen":
            self.model.requires_grad_(requires_grad=False)
            self.model.append(torch.nn.Linear(width, 8))
        if kind != "ddp":
            shape: tuple[int, ...] = (dist.get_world_size(),)
            if kind == "hsdp":
                shape = (2, dist.get_world_size() // 2)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
            for layer in self.model:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model(torch.ones(1, width)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state = {"model": self.model, "optimizer": self.optimizer, "step": 7}

    def tensors(self) -> list[torch.Tensor]:
        """Return this rank's parts of all tensors."""
        found: list[torch.Tensor] = list(self.model.parameters())
        for entries in self.optimizer.state.values():
            found += [entry for entry in entries.values() if isinstance(entry, torch.Tensor)]
        return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in found]

    def dcp_state(self) -> dict[str, Any]:
        """Return the state as dcp saves and loads it."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


def write_all(file: FileIO, tensor: torch.Tensor) -> None:
    """Write a tensor's bytes."""
    left = tensor.reshape(-1).view(torch.uint8).numpy().data
    while left:
        left = left[file.write(left) :]


def read_all(file: FileIO, tensor: torch.Tensor) -> None:
    """Fill a tensor from a file."""
    left = tensor.reshape(-1).view(torch.uint8).numpy().data
    while left:
        left = left[file.readinto(left) :]


def rank_main(megabytes: int, folder: str, rounds: int, kind: str) -> Rounds:
    """Time each way in turns."""
    torch.manual_seed(0)
    sx.init("gloo")
    job = Job(megabytes, kind)
    threads = dist.new_group(backend="gloo")  # async_save must not use the group of the training
    ours = sx.Checkpoints(os.path.join(folder, "ours"), keep=None)
    copies = [torch.empty_like(tensor) for tensor in job.tensors()]
    found: Rounds = {}

    def timed(way: str, call: Callable[[], Any], *, counts: bool) -> Any:
        dist.barrier()
        began = time.perf_counter()
        result = call()
        if counts:
            found.setdefault(way, []).append((time.perf_counter() - began, 0))
        return result

    def copy() -> None:
        with torch.no_grad():
            for target, tensor in zip(copies, job.tensors(), strict=True):
                target.copy_(tensor)

    bare = os.path.join(folder, f"bare-{dist.get_rank()}")

    def bare_write() -> None:
        with open(bare, "wb", buffering=0) as file:
            for tensor in copies:
                write_all(file, tensor)
            os.fsync(file.fileno())

    def bare_read() -> None:
        with open(bare, "rb", buffering=0) as file:
            for tensor in copies:
                read_all(file, tensor)

    def dcp_load() -> None:
        state = job.dcp_state()
        dcp_loader.load(state, checkpoint_id=os.path.join(folder, "dcp"))
        set_state_dict(job.model, job.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def torch_save() -> None:
        if dist.get_rank() == 0:
            state = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
            torch.save(state, os.path.join(folder, "torch.pt"))
        dist.barrier()

    def note_bytes(way: str, name: str) -> None:
        sizes = {}
        for file in Path(folder, name).rglob("*"):
            if file.is_file():
                sizes[file.stat().st_ino] = file.stat().st_size  # a file that saves share counts once
        found.setdefault(f"{way}: MiB", []).append((sum(sizes.values()) / 2**20, 0))

    def dcp_save_async() -> Any:
        path = os.path.join(folder, "dcp-async")
        return dcp_saver.async_save(job.dcp_state(), checkpoint_id=path, process_group=threads)

    for number in range(rounds + 1):  # the first warms up
        options = {"counts": number > 0}
        for name in ("ours", "dcp", "dcp-async"):
            if dist.get_rank() == 0:
                shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
        Path(bare).unlink(missing_ok=True)
        timed("memcpy", copy, **options)
        timed("bare write", bare_write, **options)
        timed("bare read", bare_read, **options)
        timed("save", lambda: ours.save(job.state, 1), **options)
        note_bytes("save", "ours")
        if kind == "frozen":
            timed("next save", lambda: ours.save(job.state, 2), **options)
            note_bytes("next save", "ours")
        timed("dcp.save", lambda: dcp_saver.save(job.dcp_state(), checkpoint_id=os.path.join(folder, "dcp")), **options)
        note_bytes("dcp.save", "dcp")
        if kind == "ddp":
            timed("torch.save", torch_save, **options)
        timed("load", lambda: ours.load(job.state), **options)
        timed("dcp.load", dcp_load, **options)
        timed("save in the background", lambda: ours.save(job.state, 3, background=True), **options).result()
        timed("dcp.async_save", dcp_save_async, **options).result()
    return found


def main() -> None:
    """Print the table of each directory."""
    from saves import rank_main as ranks_work  # ranks cannot import __main__

    options, found = measure(ranks_work, kinds=("fsdp2", "hsdp", "ddp", "frozen"))
    for place, ranks in found.items():
        kind = "tmpfs" if Path(place).resolve().is_relative_to("/dev/shm") else "disk"
        seconds = {way: slowest([rank[way] for rank in ranks]) for way in ranks[0]}
        shown = f"{options.kind}, {options.megabytes} MiB, {options.ranks} ranks, {options.rounds} rounds"
        print(f"{shown}, {kind}, {machine_text()}\n")
        print("| way | seconds | beside | MiB on disk |\n|---|---|---|---|")
        beside = {"save": "dcp.save", "load": "dcp.load", "save in the background": "dcp.async_save"}
        for way, taken in seconds.items():
            if not way.endswith(": MiB"):
                other = beside.get(way)
                text = f"{seconds[other] / taken:.1f}x of {other}" if other else ""
                nbytes = seconds.get(f"{way}: MiB")
                print(f"| {way} | {taken:.3f} | {text} | {'' if nbytes is None else f'{nbytes:.0f}'} |")
        stall, copied = seconds["save in the background"], seconds["memcpy"]
        print(f"\nstall: {stall / seconds['dcp.async_save']:.2f} of dcp.async_save's, {stall / copied:.2f} memcpys\n")


if __name__ == "__main__":
    main()
