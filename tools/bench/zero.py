"""Time the merge of a ZeRO-3 checkpoint, compared with DeepSpeed's zero_to_fp32.

    python tools/bench/zero.py [--megabytes 1024] [--ranks 2] [--rounds 3] [--dir /dev/shm]

The checkpoint has the layout that DeepSpeed writes, with layers of float32 weights and Adam's two moments, and is made
by hand, which takes seconds. The two programs run in turns, with their input in the page cache, and are timed as whole
commands, with the start of Python and the imports; medians. Both write safetensors; then all tensors are compared bit
by bit. The peak is that of the process's resident set: it includes pages of files that are mapped, and zero_to_fp32
maps its input.

Needs deepspeed: ``pip install "statexchange[frameworks]"``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from dcp import run
from machine import machine_text

if TYPE_CHECKING:
    import torch

LAYERS = 16
STEP = "global_step1"


def write(path: Path, megabytes: int, world_size: int) -> None:
    """Write the checkpoint: in each layer a matrix, and a vector whose size the number of ranks does not divide."""
    import torch

    width = int((megabytes * 2**20 / 4 / LAYERS) ** 0.5)
    shapes = {}
    for number in range(LAYERS):
        shapes[f"layers.{number}.weight"] = torch.Size([width, width])
        shapes[f"layers.{number}.bias"] = torch.Size([width | 1])
    step = path / STEP
    step.mkdir(parents=True)
    (path / "latest").write_text(STEP, encoding="utf-8")
    sizes = [-(-shape.numel() // world_size) for shape in shapes.values()]
    for rank in range(world_size):
        torch.manual_seed(rank)
        weights = torch.randn(sum(sizes))
        state: dict[int, dict[str, torch.Tensor]] = {0: {"exp_avg": weights * 2, "exp_avg_sq": weights * 3}}
        optimizer = {
            "zero_stage": 3,
            "partition_count": world_size,
            "fp32_flat_groups": [weights],
            "optimizer_state_dict": {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]},
        }
        torch.save({"optimizer_state_dict": optimizer}, step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        model = {
            "module": {name: torch.empty(0) for name in shapes},
            "buffer_names": [],
            "param_shapes": [shapes],
            "shared_params": {},
            "frozen_param_shapes": {},
            "frozen_param_fragments": {},
            "dp_world_size": world_size,
            "mp_world_size": 1,
            "ds_version": "0.19.8",
        }
        torch.save(model, step / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")


def check_equal(path: str, other: str) -> int:
    """Raise unless two directories have the same tensors; return their number."""
    from safetensors.torch import load_file

    states: list[dict[str, torch.Tensor]] = [{}, {}]
    for state, folder in zip(states, (path, other), strict=True):
        for file in Path(folder).glob("*.safetensors"):
            state.update(load_file(file))
    if states[0].keys() != states[1].keys():
        raise RuntimeError("the outputs have different names")
    for name, tensor in states[0].items():
        if not tensor.equal(states[1][name]):
            raise RuntimeError(f"the outputs differ in {name}")
    return len(states[0])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", default="/dev/shm")
    parser.add_argument("--write", help="only write a checkpoint there")
    options = parser.parse_args()
    if options.write:
        write(Path(options.write), options.megabytes, options.ranks)
        return
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        source = os.path.join(folder, "run")
        # In a process of its own: the peak of a process counts what its parent had when it was started.
        sizes = ["--megabytes", str(options.megabytes), "--ranks", str(options.ranks)]
        run([sys.executable, __file__, "--write", source, *sizes])
        outs = {way: os.path.join(folder, way) for way in ("statexchange merge", "zero_to_fp32")}
        ways = {
            "statexchange merge": [sys.executable, "-m", "statexchange", "merge", source, outs["statexchange merge"]],
            "zero_to_fp32": [
                *(sys.executable, "-m", "deepspeed.utils.zero_to_fp32"),
                *(source, outs["zero_to_fp32"], "--safe_serialization"),
            ],
        }
        found: dict[str, list[tuple[float, int]]] = {way: [] for way in ways}
        for number in range(options.rounds + 1):  # the first warms up
            for way, command in ways.items():
                shutil.rmtree(outs[way], ignore_errors=True)
                measured = run(command)
                if number:
                    found[way].append(measured)
        num_tensors = check_equal(*outs.values())
    seconds = {way: statistics.median(s for s, _ in measured) for way, measured in found.items()}
    what = f"{options.megabytes} MiB, {num_tensors} tensors, {options.ranks} ranks"
    print(f"{what}, {options.rounds} rounds, {machine_text()}")
    print("\n| command | seconds | vs zero_to_fp32 | peak |\n|---|---|---|---|")
    for way, taken in seconds.items():
        peak = max(peak for _, peak in found[way]) >> 20
        print(f"| {way} | {taken:.2f} | {seconds['zero_to_fp32'] / taken:.1f}x | {peak} MiB |")


if __name__ == "__main__":
    main()
