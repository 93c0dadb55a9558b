"""Time versions of weights beside the tools of the shared form, and beside a gathered state dict.

    python tools/bench/versions.py [--ranks 2] [--megabytes 1024] [--dirs /dev/shm] [--rounds 5]

Each rank holds its rows of 16 tensors in bfloat16; in each round 1 % of all elements change. Ways: a full version, a
delta and a delta without a change; staging a delta from the staged version before it, and loading that into live rows.
The peers, written from the description of the form: all rows are gathered on rank 0, which takes the difference,
compresses it (zstd level 1), and writes it with the checksums; a reader applies it in place to a mapped checkpoint, and
compares the checksums; and `full_state_dict` with `save_file` and `load_file`. All run warm and interleaved in one job;
medians and their ratios. A publish in the background is timed until it returns. The table ends with the bytes of a
delta as a share of those of the weights.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import machine_text
from ranks import in_turns, measure, slowest

import statexchange as sx
from statexchange.checkpoint import version_retention

TENSORS = 16
CHANGED = 0.01
MEMCPY = "memcpy of the rows, all ranks"
CHANGE = "the change itself"
DELTA, PEER = "publish a delta", "peer: gather, difference, write"
STAGE, APPLY = "stage a delta", "peer: apply a delta in place"
FULL, SAVE_FILE = "publish a full version", "peer: full_state_dict, save_file"
STALL, REST = "publish a delta in the background, until it returns", "the rest of it"
NOTHING, LOAD = "publish without a change", "load_into from the staged version"
LOAD_FILE = "peer: load_file, copy the rows"


class Peer:
    """The trainer's and the reader's half of the shared form, as rank 0 does them."""

    def __init__(self, folder: str, weights: dict[str, Any]) -> None:
        import torch.distributed as dist

        self.folder, self.weights = folder, weights
        self.is_root = dist.get_rank() == 0
        self.old = self.gathered()
        self.number = 0
        self.nbytes = 0
        if self.is_root:
            self.write_full(f"{folder}/reader")

    def gathered(self) -> dict[str, Any]:
        """Return on rank 0 all tensors, as bytes."""
        import torch
        import torch.distributed as dist

        whole = {}
        for name, rows in self.weights.items():
            flat = rows.view(torch.uint8)
            parts = [torch.empty_like(flat) for _ in range(dist.get_world_size())] if self.is_root else None
            dist.gather(flat, parts)
            if parts is not None:
                whole[name] = torch.cat(parts)
        return whole

    def write_full(self, path: str) -> None:
        """Write all tensors as one file."""
        import torch
        from safetensors.torch import save_file

        os.makedirs(path, exist_ok=True)
        save_file({name: data.view(torch.bfloat16) for name, data in self.old.items()}, f"{path}/model.safetensors")

    def publish(self) -> None:
        """Gather, and on rank 0 write the compressed difference."""
        import numpy as np
        import zstandard
        from safetensors.numpy import save_file

        new = self.gathered()
        if not self.is_root:
            return
        compressor = zstandard.ZstdCompressor(level=1)
        entries, checksums = {}, {}
        for name, tensor in new.items():
            data, old = tensor.numpy(), self.old[name].numpy()
            if np.array_equal(data, old):
                continue
            entries[name] = np.frombuffer(compressor.compress((data ^ old).data), np.uint8)
            checksums[name] = f"{zlib.adler32(data.data):08x}"
        self.number += 1
        path = f"{self.folder}/delta"
        os.makedirs(path, exist_ok=True)
        save_file(entries, f"{path}/model-00000-of-00001.safetensors", metadata=checksums)
        index = {"metadata": {}, "weight_map": dict.fromkeys(entries, "model-00000-of-00001.safetensors")}
        Path(path, "model.safetensors.index.json").write_text(json.dumps(index))
        self.old = new
        self.nbytes = sum(entry.nbytes for entry in entries.values())

    def apply(self) -> None:
        """Apply the difference to the mapped checkpoint of the reader, on rank 0."""
        import numpy as np
        import zstandard
        from safetensors import safe_open

        if not self.is_root:
            return
        path = f"{self.folder}/reader/model.safetensors"
        with open(path, "rb") as file:
            begin = 8 + int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(begin - 8))
        mapped = np.memmap(path, np.uint8, "r+")
        with safe_open(f"{self.folder}/delta/model-00000-of-00001.safetensors", "numpy") as delta:
            checksums = delta.metadata()
            for name in checksums:
                first, last = header[name]["data_offsets"]
                target = mapped[begin + first : begin + last]
                reader = zstandard.ZstdDecompressor().stream_reader(delta.get_tensor(name).tobytes())
                target ^= np.frombuffer(reader.read(), np.uint8)
                if f"{zlib.adler32(target.data):08x}" != checksums[name]:
                    raise RuntimeError(f"{name} differs")

    def load(self, live: dict[str, Any]) -> None:
        """Load the reader's checkpoint on each rank, and copy its rows."""
        import torch.distributed as dist
        from safetensors.torch import load_file

        whole = load_file(f"{self.folder}/reader/model.safetensors")
        for name, rows in live.items():
            part = whole[name].view(dist.get_world_size(), *rows.shape)[dist.get_rank()]
            rows.copy_(part)


def rank_main(megabytes: int, folder: str, rounds: int) -> dict[str, list[tuple[float, int]]]:
    """Return seconds and added bytes of every round of every way, on this rank."""
    import torch
    import torch.distributed as dist

    vars(version_retention)["GRACE_S"] = 0.0  # nobody else reads
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    rows = megabytes * 2**20 // (2 * 1024 * TENSORS * world_size)
    weights = {f"w{number:02d}": torch.randn(rows, 1024, generator=generator).bfloat16() for number in range(TENSORS)}
    live = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    copies = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    options: dict[str, Any] = {"layout": {"*": {"dim": 0}}, "keep": 1}
    full = sx.Publisher(f"{folder}/full", full_every=1, **options)
    deltas = sx.Publisher(f"{folder}/deltas", full_every=10**6, **options)
    background = sx.Publisher(f"{folder}/background", full_every=10**6, **options)
    subscriber = sx.Subscriber(f"{folder}/deltas", cache=f"{folder}/cache")
    peer = Peer(folder, weights)
    numbers = {"full": 0, "delta": 0, "background": 0}
    shares: list[float] = []
    staged: list[Any] = []
    running: list[Any] = []
    deltas.publish(weights, 0)
    staged.append(subscriber.stage(subscriber.wait()))

    def change() -> None:
        for tensor in weights.values():
            bits = tensor.view(torch.int16).view(-1)
            places = torch.randint(0, len(bits), (int(CHANGED * len(bits)),), generator=generator)
            bits[places] ^= torch.randint(1, 8, places.shape, generator=generator, dtype=torch.int16)

    def publish_full() -> None:
        numbers["full"] += 1
        full.publish(weights, numbers["full"])

    def publish_delta() -> None:
        numbers["delta"] += 1
        report = deltas.publish(weights, numbers["delta"])
        if report.changed:
            shares.append(report.nbytes / report.total_nbytes)

    def publish_in_background() -> None:
        numbers["background"] += 1
        running.append(background.publish(weights, numbers["background"], background=True))

    def stage() -> None:
        staged.append(subscriber.stage(subscriber.wait()))
        staged.pop(0).close()

    def gather_and_save() -> None:
        peer.old = peer.gathered()
        if rank == 0:
            peer.write_full(f"{folder}/gathered")

    def memcpy() -> None:
        for name, tensor in weights.items():
            copies[name].copy_(tensor)

    ways: dict[str, Callable[[], object]] = {
        CHANGE: change,
        DELTA: publish_delta,
        STAGE: stage,
        LOAD: lambda: staged[0].load_into(live, layout={"*": {"dim": 0}}),
        NOTHING: publish_delta,
        STALL: publish_in_background,
        REST: lambda: running.pop().result(),
        PEER: peer.publish,
        APPLY: peer.apply,
        LOAD_FILE: lambda: peer.load(copies),
        FULL: publish_full,
        SAVE_FILE: gather_and_save,
        MEMCPY: memcpy,
    }
    found = in_turns(ways, rounds)
    if any(not torch.equal(live[name], tensor) for name, tensor in weights.items()):
        raise RuntimeError("what was loaded differs from what was published")
    found["share"] = [(share, 0) for share in shares]
    found["share of the peer"] = [(peer.nbytes / (megabytes * 2**20), 0)]
    staged.pop().close()
    return found


PEERS = {DELTA: PEER, STAGE: APPLY, FULL: SAVE_FILE, LOAD: LOAD_FILE, NOTHING: PEER}


def main() -> None:
    options, measured = measure(rank_main)
    print(f"{options.megabytes} MiB, {options.ranks} ranks, {options.rounds} rounds, {machine_text()}")
    print("| where | way | seconds | GB/s | beside memcpy | beside its peer |")
    print("|---|---|---|---|---|---|")
    for place, ranks in measured.items():
        shares = [share for share, _ in ranks[0].pop("share")]
        (peer_share, _) = ranks[0].pop("share of the peer")[0]
        seconds = {way: slowest(rank[way] for rank in ranks) for way in ranks[0]}
        for way, taken in seconds.items():
            speed = f"{options.megabytes * 2**20 / taken / 1e9:.2f}"
            beside = f"{seconds[PEERS[way]] / taken:.2f}x" if way in PEERS else ""
            print(f"| {place} | {way} | {taken:.3f} | {speed} | {seconds[MEMCPY] / taken:.2f}x | {beside} |")
        print(f"a delta has {100 * max(shares):.2f} % of the bytes, the peer's {100 * peer_share:.2f} %")


if __name__ == "__main__":
    main()
