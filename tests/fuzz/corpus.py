"""The fuzzers' sources: small valid ones of every kind, and the hostile files of `hostile_*.py`, made anew in each run.

A source is a directory with a path to open, and sometimes a layout file and the state to load it into.
"""

from __future__ import annotations

import json
import shutil
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from hostile_frameworks import FRAMEWORKS
from hostile_manifests import MANIFESTS
from hostile_pickles import PICKLES
from pickled import PLACEMENTS, archive, dtensor, integer, made, named, numbers, several, symbol, tensor, text
from safetensors.numpy import save_file

import statexchange as sx
from statexchange import values
from statexchange.sharding.shards import Box, Shard
from statexchange.storage.publish.claim import CLAIM_NAME, Claim
from statexchange.storage.tensorfile import ShardData
from statexchange.storage.workspace import Workspace
from statexchange.testing import run_ranks

if TYPE_CHECKING:
    import torch

__all__ = ["HOSTILE", "LAYOUT", "SOURCES", "Source", "State"]

LAYOUT = "layout.json"
State = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Source:
    """A way to make a source.

    `make` fills an empty directory; `path` is the name to open in it. `state` makes the state to load it into; without
    it, the tensors that the valid source has. A `slow` source takes long to make.
    """

    make: Callable[[Path], object]
    path: str = "{}/x"
    state: State | None = None
    slow: bool = False


def _weights() -> dict[str, Any]:
    floats = np.arange(24, dtype="f4").reshape(6, 4)
    return {
        "model.embed.weight": floats,
        "model.0.weight": floats[:2] * 2,
        "model.0.bias": np.arange(4, dtype="i8"),
        "scale": np.array(3.0, "f2"),
    }


def _tensors() -> dict[str, torch.Tensor]:
    import torch

    return {name: torch.from_numpy(array.copy()) for name, array in _weights().items()}


# Safetensors


def one_file(folder: Path) -> None:
    save_file(_weights(), folder / "x.safetensors", {"format": "pt"})


def packed(folder: Path) -> None:
    """Write dtypes of less than a byte."""
    parts = {"four": ("F4", [2, 4], 4), "six": ("F6_E2M3", [2, 4], 6), "w": ("U8", [3], 3)}
    entries, data = {}, b""
    for name, (dtype, shape, nbytes) in parts.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + nbytes]}
        data += bytes(range(nbytes))
    header = json.dumps(entries).encode()
    (folder / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)


def _two_files(folder: Path, pattern: str, save: Callable[[dict[str, Any], Path], object], index: str) -> None:
    folder.mkdir()
    weights = _tensors() if index.startswith("pytorch") else _weights()
    parts = [dict(list(weights.items())[:2]), dict(list(weights.items())[2:])]
    weight_map = {}
    for number, part in enumerate(parts, 1):
        name = pattern.format(number)
        save(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / index).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "llama"}')


def indexed(folder: Path) -> None:
    name = "model-0000{}-of-00002.safetensors"
    _two_files(folder / "x", name, save_file, "model.safetensors.index.json")


def published(folder: Path) -> None:
    """Write the parts of two ranks as two files, with one tensor of two boxes."""
    workspace(folder / "from")
    sx.merge_checkpoint(folder / "from" / "x", folder / "x", max_shard_size=100)


def zipped(folder: Path) -> None:
    published(folder / "in")
    with zipfile.ZipFile(folder / "x.zip", "w") as file:
        for path in sorted((folder / "in" / "x").iterdir()):
            file.write(path, f"hf/{path.name}")


def torch_shards(folder: Path) -> None:
    """Write two parts of a tensor, named and described as torch's HuggingFaceStorageWriter does."""
    (folder / "x").mkdir()
    floats = _weights()["model.embed.weight"]
    for rank in range(2):
        sharding_info = json.dumps({"w": {"saved_offsets": [3 * rank, 0]}})
        name = f"shard-0000{rank + 1}-model-00001-of-00001.safetensors"
        save_file(
            {"w": floats[3 * rank :][:3]},
            folder / "x" / name,
            {"DCP_SHARDING_INFO": sharding_info, "DCP_VERSION": "1.0"},
        )


def rank_files(folder: Path) -> None:
    (folder / "x").mkdir()
    for rank in range(2):
        weights = _weights()
        weights["model.embed.weight"] = weights["model.embed.weight"][3 * rank :][:3]
        save_file(weights, folder / "x" / f"rank_{rank}.safetensors")
    rules = {
        "mesh": {"dp": 1, "tp": 2},
        "rules": {"*.embed.weight": {"dim": 0, "axis": "tp"}, "scale": {"reduce": "max"}},
    }
    (folder / LAYOUT).write_text(json.dumps(rules))


def claimed(folder: Path) -> None:
    """Write what an interrupted publisher to an object store leaves."""
    indexed(folder)
    (folder / "x" / CLAIM_NAME).write_bytes(Claim.new("0" * 32, "0" * 32, ("a",)).to_bytes())


# Workspaces


def workspace(folder: Path, *, can_merge: bool = True) -> None:
    """Write two ranks' parts of one tensor, a tensor that both have, one of rank 1 only, and configs."""
    folder.mkdir(parents=True, exist_ok=True)
    space = Workspace(folder / "x")
    weights = _weights()
    for rank in range(2):
        rows = weights["model.embed.weight"][3 * rank :][:3]
        boxes = (Box((3 * rank, 0), (1, 4)), Box((3 * rank + 1, 0), (2, 4)))
        tensors = [
            ShardData(Shard("model.embed.weight", "F32", (6, 4), boxes), (rows[:1], rows[1:])),
            ShardData(Shard("model.0.bias", "I64", (4,), (Box((0,), (4,)),)), (weights["model.0.bias"],)),
        ]
        if rank:
            dtype = "C64" if can_merge else "C128"  # safetensors lacks this dtype, so it cannot be merged
            pairs = Shard("pairs", dtype, (2,), (Box((0,), (2,)),))
            tensors.append(ShardData(pairs, (np.arange(pairs.nbytes, dtype=np.uint8),)))
        config = values.encode({"rank": rank, "shape": (1, 2), "lr": float("nan"), 3: {"a", "b"}})
        space.write(tensors, run="job", round=1, rank=rank, world_size=2, config=config, extra={"aliases": {}})


def _saved_state() -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "step": 7,
        "rng": torch.get_rng_state()[:16].clone(),
        "more": {"shape": (1, 2), "loss": float("nan"), "set": {1, 2}, "list": [{"a": torch.ones(2)}]},
    }


def saved(folder: Path) -> None:
    sx.save_checkpoint(_saved_state(), folder / "x")


def saved_by_ranks(folder: Path) -> None:
    """Two ranks' parts of tensors, and values that differ between them."""

    def save() -> None:
        rank = sx.get_rank()
        embed = "model.embed.weight"
        own = {embed: _weights()[embed][3 * rank :][:3], f"own{rank}": np.full(3, rank, "i8"), "step": 7 + rank}
        state = {**_weights(), **own}
        sx.save_checkpoint(state, folder / "x", layout={embed: {"dim": 0}})

    run_ranks(save, 2)


# Files of torch.save


class Opaque:
    """An object that no reader knows."""

    def __init__(self, value: object = "opaque") -> None:
        self.value = value


def _torch_state() -> dict[str, Any]:
    import torch

    tensors = _tensors()
    embed = tensors["model.embed.weight"]
    return {
        "model": {**tensors, "tied": embed, "turned": embed.t(), "row": embed[1], "empty": torch.empty(0, 3)},
        "parameter": torch.nn.Parameter(embed[:1].clone()),
        "list": [torch.ones(2, dtype=torch.bfloat16), 3, (1, 2.5, None, True)],
        "groups": [{"lr": 0.1, "params": [0, 1]}],
        "opaque": Opaque(),
        "big": 1 << 80,
    }


def torch_save(folder: Path) -> None:
    import torch

    torch.save(_torch_state(), folder / "x.pt")


def torch_save_protocol_5(folder: Path) -> None:
    """Write a file of pickle protocol 5, whose tensors cannot be read."""
    import torch

    state = {**_torch_state(), "sparse": torch.eye(2).to_sparse(), "of a class": Opaque(torch.ones(1))}
    torch.save(state, folder / "x.pt", pickle_protocol=5)


def torch_legacy(folder: Path) -> None:
    import torch

    torch.save(_tensors(), folder / "x.pt", _use_new_zipfile_serialization=False)


def torch_indexed(folder: Path) -> None:
    import torch

    _two_files(folder / "x", "pytorch_model-0000{}-of-00002.bin", torch.save, "pytorch_model.bin.index.json")


def torch_ranks(folder: Path) -> None:
    """Write two ranks' parts of DTensors: rows on a mesh of two, with both formats of torch for a mesh."""
    (folder / "x").mkdir()
    space = "torch.distributed."
    for rank in range(2):
        layout = made(space + "_mesh_layout._MeshLayout", shape=numbers(2), stride=numbers(1))
        new = made(
            space + "device_mesh.DeviceMesh",
            _layout=layout,
            _flatten_rank_map=numbers(0, 1),
            _coordinate_on_dim=numbers(rank),
        )
        old = made(
            space + "device_mesh.DeviceMesh",
            mesh=tensor(numbers(2), key=text("1")),
            _flatten_mesh_list=numbers(0, 1),
            _coordinate_on_dim=numbers(rank),
        )
        cuts = [made(PLACEMENTS + "Shard", dim=integer(0))]
        strided = [made(PLACEMENTS + "_StridedShard", dim=integer(0), split_factor=integer(2))]
        spec = space + "tensor._dtensor_spec.DTensorSpec"
        specs = [made(spec, mesh=mesh, placements=several(c)) for mesh, c in ((new, cuts), (old, strided))]
        local = tensor(numbers(2, 2), numbers(2, 1), numel=4)
        wrapped = several([symbol(space + "tensor.DTensor"), symbol("torch.FloatStorage"), numbers(4, 2)])
        parts = [dtensor(wrapped, b"N" + named({"_spec": s, "_local_tensor": local}) + b"\x86") for s in specs]
        state = named({"new": parts[0], "old": parts[1], "step": integer(7)})
        archive(folder / "x" / f"model_rank_{rank}.pt", state, {"0": bytes(range(16)), "1": bytes(8)})


def distributed_checkpoint(folder: Path) -> None:
    """Write a directory of torch.distributed.checkpoint."""
    import torch
    import torch.distributed.checkpoint as dcp

    state = {"model": _tensors(), "step": 7, "rng": [torch.ones(3)], "groups": {"lr": 0.1}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is no process group
        dcp.save(state, checkpoint_id=folder / "x", no_dist=True)


# Directories of frameworks


def megatron(folder: Path, kind: str) -> None:
    """Unpack one of the samples that Megatron-Core wrote."""
    sample = Path(__file__).parents[1] / "data" / "megatron" / "ep2_moe.tar.xz"
    shutil.unpack_archive(sample, folder / "sample")
    (folder / "sample" / kind).rename(folder / "x")
    shutil.rmtree(folder / "sample")


def copied(folder: Path, sample: str) -> None:
    """Copy a directory that a framework wrote."""
    shutil.copytree(Path(__file__).parents[1] / "data" / sample, folder / "x")


def _of_framework(sample: str) -> Source:
    return Source(lambda folder: copied(folder, sample))


SOURCES: dict[str, Source] = {
    "safetensors": Source(one_file, "{}/x.safetensors"),
    "packed dtypes": Source(packed, "{}/x.safetensors", state=dict),
    "hf index": Source(indexed),
    "published": Source(published),
    "published, URL": Source(zipped, "zip://hf::{}/x.zip"),
    "torch's hf shards": Source(torch_shards),
    "rank files": Source(rank_files),
    "claimed": Source(claimed),
    "workspace": Source(workspace),
    "workspace, not to merge": Source(lambda folder: workspace(folder, can_merge=False)),
    "save": Source(saved, state=_saved_state, slow=True),
    "save of ranks": Source(saved_by_ranks),
    "save, one rank's file": Source(saved_by_ranks, "{}/x/rank-00001-of-00002.safetensors"),
    "pt": Source(torch_save, "{}/x.pt"),
    "pt, protocol 5": Source(torch_save_protocol_5, "{}/x.pt"),
    "pt, legacy": Source(torch_legacy, "{}/x.pt"),
    "bin index": Source(torch_indexed),
    "pt of ranks": Source(torch_ranks),
    "dcp": Source(distributed_checkpoint, slow=True),
    "torchao": _of_framework("packed/torchao"),
    "bitsandbytes": _of_framework("packed/bitsandbytes"),
    "zero 0": _of_framework("deepspeed/zero0"),
    "zero 1": _of_framework("deepspeed/zero1"),
    "zero 2": _of_framework("deepspeed/zero2"),
    "zero 3": _of_framework("deepspeed/zero3"),
    "zero, experts": _of_framework("deepspeed/experts"),
    "zero, pipeline": _of_framework("deepspeed/pipeline"),
    "zero, universal": _of_framework("deepspeed/universal"),
    "trainer": _of_framework("trainer/plain"),
    "trainer, sharded": _of_framework("trainer/sharded"),
    "accelerate, full": _of_framework("accelerate/full/state"),
    "accelerate, sharded": _of_framework("accelerate/sharded/state"),
    "accelerate, several": _of_framework("accelerate/several/state"),
    "verl": _of_framework("verl/fsdp2/run/global_step_1/actor"),
    "verl, lora": _of_framework("verl/lora/run/global_step_1/actor"),
    "lightning, full": Source(lambda folder: copied(folder, "lightning/full"), "{}/x/last.ckpt"),
    "lightning, sharded": _of_framework("lightning/sharded/last.ckpt"),
    "torch_checkpointing": _of_framework("torch_checkpointing/state"),
    "torchtitan": _of_framework("torchtitan/tied/checkpoint/step-3"),
    "fsdp1, local": _of_framework("torch/fsdp1_local"),
    "megatron torch_dist": Source(lambda folder: megatron(folder, "torch_dist")),
    "megatron ranks": Source(lambda folder: megatron(folder, "legacy")),
}


# Hostile files


def _of_pickles(build: Callable[[Path], Path]) -> Source:
    return Source(lambda folder: build(folder).rename(folder / "x"), slow=True)


def _of_manifests(write: Callable[[Path], None]) -> Source:
    def make(folder: Path) -> None:
        (folder / "x").mkdir()
        write(folder / "x")

    return Source(make, slow=True)


HOSTILE: dict[str, Source] = {
    **{f"hostile {row} {name}": _of_pickles(build) for row, files in PICKLES.items() for name, build in files.items()},
    **{f"hostile {write.__name__}": _of_manifests(write) for write in (*MANIFESTS, *FRAMEWORKS)},
}
