"""Checkpoints of DeepSpeed: checks of those that it wrote, and others in its layout, made by hand."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from equality import assert_same
from safetensors.torch import load_file

from statexchange.checkpoint.merge import merge_checkpoint
from statexchange.formats.registry import open_checkpoint

State = Mapping[str, torch.Tensor]


@dataclass
class fragment_address:  # noqa: N801 (DeepSpeed's own name)
    """The place of a parameter's part in a rank's partition."""

    numel: int
    start: int


def reported(folder: Path, kind: str, what: str) -> dict[str, torch.Tensor]:
    """Return what DeepSpeed itself read of a checkpoint of tools/frameworks/deepspeed_write.py, under one prefix."""
    tensors = load_file(folder / f"{kind}.safetensors")
    return {name.partition(".")[2]: tensor for name, tensor in tensors.items() if name.startswith(f"{what}.")}


def merged(path: Path, tmp_path: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Merge a checkpoint; return its tensors, tied ones under all their names."""
    out = tmp_path / "merged"
    shutil.rmtree(out, ignore_errors=True)
    report = merge_checkpoint(path, out, **options)
    state = load_file(out / "model.safetensors")
    return state | {alias: state[name] for alias, name in report.aliases.items()}


def check_written(folder: Path, kind: str, tmp_path: Path) -> None:
    """Compare a checkpoint of deepspeed_write.py with what DeepSpeed reports of it."""
    oracle, model = reported(folder, kind, "oracle"), reported(folder, kind, "model")
    master, moments = reported(folder, kind, "master"), reported(folder, kind, "exp_avg")
    if kind in ("zero1", "zero2", "zero3"):
        found = merged(folder / kind, tmp_path)
        if kind == "zero1":  # zero_to_fp32 leaves out the frozen parameters of these
            oracle["norm.bias"] = model["norm.bias"]
        assert_same(found, oracle)
        assert found["norm.bias"].dtype == torch.bfloat16
        assert torch.equal(found["head.weight"], found["embed.weight"])
    if kind not in ("zero0", "experts"):
        assert min(len(master), len(moments)) > 2
        with open_checkpoint(folder / kind) as checkpoint:
            for name, tensor in master.items():
                assert np.array_equal(checkpoint[f"model.{name}"].read(), tensor.numpy()), name
                assert checkpoint[f"optimizer.state.{name}.exp_avg_sq"].shape == tensor.shape
            for name, tensor in moments.items():
                assert np.array_equal(checkpoint[f"optimizer.state.{name}.exp_avg"].read(), tensor.numpy()), name
    if kind != "zero3":
        assert len(model) > 4
        found = merged(folder / kind, tmp_path)
        buffers = {"scale", "count", "head.weight"} if kind.startswith("zero") else set()
        assert found.keys() - model.keys() == buffers
        assert_same({name: found[name].to(tensor.dtype) for name, tensor in model.items()}, model)


def write_zero(
    path: Path,
    stage: int,
    groups: Sequence[State],
    world_size: int,
    *,
    buffers: State | None = None,
    frozen: State | None = None,
    shared: Mapping[str, str] | None = None,
    paddings: bool = False,
) -> Path:
    """Write a checkpoint of these groups of fp32 parameters; return its step's directory.

    Each parameter's first moment, exp_avg, is its negative. The padding of the flat buffers is NaN.

    Args:
        path: the directory of the checkpoint.
        stage: 1, 2 or 3.
        groups: the fp32 parameters of each group.
        world_size: the number of ranks.
        buffers: buffers of the module.
        frozen: parameters without fp32 weights.
        shared: other names of parameters, with the names under which they are saved.
        paddings: put an element of padding after each parameter (stages 1 and 2).
    """
    step = path / "global_step7"
    step.mkdir(parents=True)
    (path / "latest").write_text("global_step7")
    shapes = [{name: tensor.shape for name, tensor in group.items()} for group in groups]
    whole = {name: tensor.bfloat16() for group in groups for name, tensor in group.items()} | dict(frozen or {})
    whole |= {alias: whole[name] for alias, name in (shared or {}).items()}
    frozen = frozen or {}
    common: dict[str, Any] = {
        "buffer_names": list(buffers or {}),
        "param_shapes": shapes,
        "frozen_param_shapes": {name: tensor.shape for name, tensor in frozen.items()} if stage > 1 else None,
        "shared_params": dict(shared or {}),
        "dp_world_size": world_size,
        "mp_world_size": 1,
    }
    for rank in range(world_size if stage == 3 else 1):
        fragments = (
            {name: _piece(tensor, rank, world_size) for name, tensor in frozen.items()} if stage == 3 else frozen
        )
        module = {name: tensor.new_empty(0) for name, tensor in whole.items()} if stage == 3 else whole
        prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
        state = {"module": {**module, **(buffers or {})}, "frozen_param_fragments": fragments if stage > 1 else None}
        torch.save({**common, **state, "epoch": 5}, step / f"{prefix}mp_rank_00_model_states.pt")
    for rank in range(world_size):
        state = _of_stage_3(groups, rank, world_size) if stage == 3 else _of_stage_2(groups, rank, world_size, paddings)
        torch.save(
            {"optimizer_state_dict": {**state, "zero_stage": stage, "clip_grad": 1.0}},
            step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
    return step


def _moments(buffers: Sequence[torch.Tensor]) -> dict[str, Any]:
    return {
        "state": {number: {"step": torch.tensor(7.0), "exp_avg": -buffer} for number, buffer in enumerate(buffers)},
        "param_groups": [{"lr": 0.1, "params": [number]} for number in range(len(buffers))],
    }


def _nans(count: int) -> torch.Tensor:
    return torch.full((count,), math.nan)


def _piece(tensor: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """Return a rank's part of a tensor that ZeRO-3 divides."""
    size = -(-tensor.numel() // world_size)
    piece = tensor.flatten()[rank * size : (rank + 1) * size]
    return torch.cat([piece, _nans(size - len(piece)).to(piece.dtype)])


def _of_stage_3(groups: Sequence[State], rank: int, world_size: int) -> dict[str, Any]:
    flat = [torch.cat([_piece(tensor, rank, world_size) for tensor in group.values()]) for group in groups]
    return {"partition_count": world_size, "fp32_flat_groups": flat, "optimizer_state_dict": _moments(flat)}


def _of_stage_2(groups: Sequence[State], rank: int, world_size: int, paddings: bool) -> dict[str, Any]:
    padded, unpadded, paddings_at_end, tables = [], [], [], []
    for group in groups:
        vector = torch.cat([torch.cat([tensor.flatten(), _nans(int(paddings))]) for tensor in group.values()])
        paddings_at_end.append(-len(vector) % (2 * world_size))
        vector = torch.cat([vector, _nans(paddings_at_end[-1])])
        size = len(vector) // world_size
        padded.append(vector[rank * size : (rank + 1) * size].clone())
        tables.append(_addresses(group, rank * size, (rank + 1) * size, int(paddings)))
        unpadded.append(padded[-1][: size - paddings_at_end[-1]] if rank == world_size - 1 else padded[-1])
    return {
        "partition_count": [world_size] * len(groups),
        "single_partition_of_fp32_groups": unpadded,
        "group_paddings": paddings_at_end if rank == world_size - 1 else [0] * len(groups),
        "base_optimizer_state": _moments(padded),
        "param_slice_mappings": tables,
    }


def _addresses(group: State, begin: int, end: int, padding: int) -> dict[str, fragment_address]:
    """Return the places of a group's parameters in the partition from `begin` to `end`."""
    addresses = {}
    at = 0
    for name, tensor in group.items():
        first, last = max(at, begin), min(at + tensor.numel(), end)
        if first < last:
            addresses[name] = fragment_address(last - first, first - begin)
        at += tensor.numel() + padding
    return addresses
