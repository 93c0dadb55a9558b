"""Whole checkpoints of every kind, small and fresh, for tests that damage them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from archives import unpack
from safetensors.torch import save_file
from stored import DATA
from workspaces import part, write_round

import statexchange as sx
from statexchange.sharding.shards import Box
from statexchange.testing import run_ranks

__all__ = ["KINDS", "Kind"]

_ROWS, _COLUMNS = 30, 200


@dataclass(frozen=True)
class Kind:
    """A kind of checkpoint.

    Attributes:
        build: write one at a path.
        tensor_files: pattern of the files that have the tensors, below the path.
        listing: the file that lists the others, or says what they are; "" without one.
        at: what is given to `info` and `verify`, and has a row in `scan`, below the path.
        has_digests: whether digests of the bytes are stored, so that `verify` checks them.
        container: how a tensor file is built: "safetensors", "zip", or another word, without the mutations of these.
        step: the step that `scan` shows.
        row: where the row is, if it is not at `at`.
        format: the kind that the tool calls it.
    """

    build: Callable[[Path], None]
    tensor_files: str
    format: str
    listing: str = ""
    at: str = "."
    has_digests: bool = False
    container: str = "safetensors"
    step: int | None = None
    row: str | None = None

    def files(self, path: Path) -> list[Path]:
        """Return the tensor files of a checkpoint of this kind, in the order of their names."""
        return sorted(path.glob(self.tensor_files))


def _values(seed: int) -> torch.Tensor:
    return torch.arange(_ROWS * _COLUMNS, dtype=torch.float32).reshape(_ROWS, _COLUMNS) + 10_000 * seed + 1


def _state() -> dict[str, torch.Tensor]:
    return {f"layers.{number}.w": _values(number) for number in range(3)}


def _config(path: Path) -> None:
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 100}))


def _hugging_face(path: Path, num_files: int, *, index: bool) -> None:
    path.mkdir(parents=True)
    weight_map = {}
    for number, (name, tensor) in enumerate(_state().items()):
        file = f"model-{number + 1:05d}-of-00003.safetensors" if num_files > 1 else "model.safetensors"
        if num_files > 1:
            save_file({name: tensor}, path / file)
        weight_map[name] = file
    if num_files == 1:
        save_file(_state(), path / "model.safetensors")
    if index:
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    _config(path)


def _export(path: Path, max_shard_size: str | None = "12KB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    sx.export_checkpoint(_state(), path, max_shard_size=max_shard_size)


def _rank_state(rank: int) -> dict[str, torch.Tensor]:
    return {name: tensor[10 * rank : 10 * rank + 10].clone() for name, tensor in _state().items()}


_LAYOUT = {"layers.*.w": {"dim": 0}}


def _save(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)

    def rank_main() -> None:
        rank = sx.get_rank()
        sx.save_checkpoint({"model": _rank_state(rank), "step": 7}, path, layout={"model.layers.*.w": {"dim": 0}})

    run_ranks(rank_main, 3)


def _saves(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)

    def rank_main() -> None:
        kept = sx.Checkpoints(path, keep=None, layout=_LAYOUT)
        for step in (10, 20):
            kept.save(_rank_state(sx.get_rank()), step)

    run_ranks(rank_main, 3)


def _workspace(path: Path) -> None:
    boxes = [Box((10 * rank, 0), (10, _COLUMNS)) for rank in range(3)]
    write_round(path, *([part(name, tensor, box) for name, tensor in _state().items()] for box in boxes))


def _dcp(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = dcp.FileSystemWriter(path, single_file_per_rank=False)
    dcp.save({"model": _state()}, storage_writer=writer)


def _dcp_safetensors(path: Path) -> None:
    shutil.copytree(DATA / "torch/dcp_safetensors", path)


def _torch_shards(path: Path, *, index: bool) -> None:
    path.mkdir(parents=True)
    weight_map = {}
    for number, (name, tensor) in enumerate(_state().items()):
        file = f"pytorch_model-{number + 1:05d}-of-00003.bin"
        torch.save({name: tensor}, path / file)
        weight_map[name] = file
    if index:
        (path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    _config(path)


def _torch_file(path: Path) -> None:
    path.mkdir(parents=True)
    torch.save({"model": _state(), "step": 3}, path / "model.pt")


def _rank_files(path: Path, suffix: str) -> None:
    path.mkdir(parents=True)
    for rank in range(3):
        if suffix == "pt":
            torch.save(_rank_state(rank), path / f"rank{rank}.pt")
        else:
            save_file(_rank_state(rank), path / f"rank{rank}.safetensors")


def _sample(*parts: str) -> Callable[[Path], None]:
    def build(path: Path) -> None:
        shutil.copytree(DATA.joinpath(*parts), path)

    return build


def _megatron(below: str) -> Callable[[Path], None]:
    def build(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        unpacked = path.parent / f".{path.name}.unpacked"
        unpack(DATA / "megatron/tp2_pp2.tar.xz", unpacked)
        (unpacked / below).rename(path)
        shutil.rmtree(unpacked)

    return build


_TRAINER, _ACCELERATE = "trainer/plain/checkpoint-2", "accelerate/full/state"
KINDS: dict[str, Kind] = {
    "save": Kind(_save, "rank-*.safetensors", "save", "save.json", has_digests=True),
    "saves": Kind(
        _saves, "step-000000020/rank-*.safetensors", "save", "step-000000020/save.json",
        has_digests=True, row="step-000000020", step=20,
    ),
    "huggingface": Kind(lambda path: _hugging_face(path, 1, index=False), "*.safetensors", "huggingface"),
    "huggingface shards": Kind(
        lambda path: _hugging_face(path, 3, index=True), "*.safetensors", "huggingface", "model.safetensors.index.json"
    ),
    "huggingface without index": Kind(
        lambda path: _hugging_face(path, 3, index=False), "*.safetensors", "huggingface"
    ),
    "export": Kind(_export, "*.safetensors", "huggingface", "statexchange.json", has_digests=True),
    "workspace": Kind(_workspace, "job/*/rank-*.safetensors", "workspace", has_digests=True),
    "dcp": Kind(_dcp, "*.distcp", "dcp", ".metadata", container="zip"),
    "dcp of safetensors": Kind(_dcp_safetensors, "*.distcp", "dcp", ".metadata"),
    "torch file": Kind(_torch_file, "model.pt", "torch", container="zip"),
    "torch shards": Kind(
        lambda path: _torch_shards(path, index=True), "*.bin", "torch", "pytorch_model.bin.index.json", container="zip"
    ),
    "torch shards without index": Kind(
        lambda path: _torch_shards(path, index=False), "*.bin", "torch", container="zip"
    ),
    "FSDP1": Kind(_sample("torch/fsdp1"), "rank*.pt", "torch", container="zip"),
    "rank files of torch": Kind(lambda path: _rank_files(path, "pt"), "rank*.pt", "torch", container="zip"),
    "rank files": Kind(lambda path: _rank_files(path, "safetensors"), "rank*.safetensors", "huggingface"),
    "ZeRO-2": Kind(_sample("deepspeed/zero2"), "global_step2/*.pt", "deepspeed", "latest", container="zip", step=2),
    "ZeRO-3": Kind(_sample("deepspeed/zero3"), "global_step2/*.pt", "deepspeed", "latest", container="zip", step=2),
    "DeepSpeed pipeline": Kind(
        _sample("deepspeed/pipeline"), "global_step2/*.pt", "deepspeed", "latest", container="zip", step=2
    ),
    "Universal Checkpoint": Kind(
        _sample("deepspeed/universal"), "global_step2/zero/*/*.pt", "deepspeed", "latest_universal",
        container="zip", step=2,
    ),
    "Megatron torch_dist": Kind(
        _megatron("torch_dist"), "iter_0000007/*.distcp", "megatron",
        "iter_0000007/.metadata", container="zip", step=7,
    ),
    "Megatron legacy": Kind(
        _megatron("legacy"), "iter_0000007/*/*.pt", "megatron",
        "latest_checkpointed_iteration.txt", container="zip", step=7,
    ),
    "Trainer": Kind(_sample(_TRAINER), "model.safetensors", "trainer"),
    "Trainer with FSDP": Kind(
        _sample("trainer/sharded/checkpoint-2"), "pytorch_model_fsdp_0/*.distcp", "trainer",
        "pytorch_model_fsdp_0/.metadata", container="zip",
    ),
    "accelerate": Kind(_sample(_ACCELERATE), "pytorch_model_fsdp.bin", "accelerate", container="zip"),
    "verl": Kind(
        _sample("verl/fsdp2/run/global_step_1/actor"), "model_world_size_2_rank_*.pt", "verl", container="zip"
    ),
    "Lightning": Kind(_sample("lightning/sharded/last.ckpt"), "*.distcp", "lightning", ".metadata", container="zip"),
    "torch_checkpointing": Kind(
        _sample("torch_checkpointing/state"), "model_*.pt", "torch_checkpointing", container="zip"
    ),
}  # fmt: skip
