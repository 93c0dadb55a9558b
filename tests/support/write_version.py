"""Write samples of saves, exports and workspaces with this version, for later versions to read.

PYTHONPATH=tests/support python -c "import write_version; write_version.main('tests/data/version-0.2')"

Released samples are never written again: a new version gets a directory of its own. `version_states.py` has the states.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from version_states import (
    VALUES,
    all_kinds,
    cut_by_hand,
    drawn,
    filled,
    replica,
    sharded,
    tensors_of,
    whole_tensors,
    with_bits,
    write_expected,
)

import statexchange as sx
from statexchange.checkpoint.seal import seal_checkpoint
from statexchange.testing import run_ranks


def seed_all(seed: int) -> None:
    """Seed the random number generators of this process."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def write_all_kinds(folder: Path) -> None:
    """Write one rank's save of everything that a save may hold."""
    state = all_kinds(1)
    seed_all(7)
    sx.save_checkpoint(state, folder / "save")
    (folder / "drawn.json").write_text(json.dumps(drawn()) + "\n")
    write_expected(folder, state)


def write_sharded(folder: str, kind: str) -> None:
    """Write a save of a sharded job with each rank's random state, and exports of its model. For ranks."""
    state = sharded(1, kind)
    write_expected(Path(folder), state)
    seed_all(10 + sx.get_rank())
    saved = {**state, "random": sx.integrations.RandomState()}
    sx.save_checkpoint(saved if kind == "fsdp" else state, f"{folder}/save")
    if kind == "fsdp":
        Path(folder, f"drawn-{sx.get_rank()}.json").write_text(json.dumps(drawn()) + "\n")
    sx.export_checkpoint(state["model"], f"{folder}/export")
    sx.export_checkpoint(state["model"], f"{folder}/files", max_shard_size=100, dtype="bfloat16")


def write_replicas(folder: str) -> None:
    """Write a save of plain models that are equal on all ranks, and an export with tied weights. For ranks."""
    state = replica(1, sx.get_rank())
    sx.save_checkpoint(state, f"{folder}/save")
    sx.export_checkpoint(state["model"], f"{folder}/export")
    del state["cursor"]
    write_expected(Path(folder), state)


def write_layout(folder: str) -> None:
    """Write a save and an export of plain tensors that are cut by hand. For ranks."""
    whole = whole_tensors(1)
    parts, layout = cut_by_hand(whole, sx.get_rank(), sx.get_world_size())
    sx.save_checkpoint({"model": parts, "step": 1}, f"{folder}/save", layout=layout)
    sx.export_checkpoint(parts, f"{folder}/export", layout=layout)
    write_expected(Path(folder), {"model": whole, "step": 1})


def write_steps(folder: str) -> None:
    """Write the saves of a job by step. For ranks."""
    saves = sx.Checkpoints(f"{folder}/saves", keep=2)
    for step in (10, 20, 30):
        saves.save(replica(step, sx.get_rank()), step, metrics={"loss": 1 / step})
    state = replica(30, 0)
    del state["cursor"]
    write_expected(Path(folder), state)


def write_workspace(folder: str) -> None:
    """Write two rounds of an NFSWorkspace. For ranks."""
    workspace = sx.NFSWorkspace(f"{folder}/ws", run="r")
    rank = sx.get_rank()
    for number in (1, 2):
        weights = {dtype: with_bits(dtype, 10 * rank + number, 2, 4) for dtype in ("float32", "bfloat16", "bool")}
        workspace.write_configs_and_weights({"values": VALUES, "rank": rank, "number": number}, weights)
    save_file(tensors_of(weights), f"{folder}/expected-{rank}.safetensors")


def write_sealed(folder: Path) -> None:
    """Write a checkpoint of safetensors, and a merge of it; seal the former."""
    (folder / "sealed").mkdir()
    tensors = tensors_of(filled(torch.nn.Linear(3, 2), 4))
    save_file(tensors, folder / "sealed" / "model.safetensors")
    sx.merge_checkpoint(folder / "sealed", folder / "merged")
    seal_checkpoint(folder / "sealed")
    save_file(tensors, folder / "expected.safetensors")


def main(root: str) -> None:
    """Write all samples into a directory that does not exist."""
    ranks: dict[str, tuple[Any, int, str, tuple[str, ...]]] = {
        "fsdp": (write_sharded, 2, "gloo", ("fsdp",)),
        "fsdp_tp": (write_sharded, 4, "gloo", ("fsdp and tp",)),
        "replicas": (write_replicas, 4, "threads", ()),
        "layout": (write_layout, 4, "threads", ()),
        "steps": (write_steps, 2, "threads", ()),
        "workspace": (write_workspace, 2, "threads", ()),
    }
    alone = {"all_kinds": write_all_kinds, "sealed": write_sealed}
    for name in (*ranks, *alone):
        folder = Path(root, name)
        folder.mkdir(parents=True)
        if name in alone:
            alone[name](folder)
        else:
            function, world_size, backend, arguments = ranks[name]
            run_ranks(function, world_size, backend=backend, args=(str(folder.absolute()), *arguments))
