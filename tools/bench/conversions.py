"""Time a merge with `--convert torchtitan:llama3`, compared with the plain merge of the same torch DCP directory.

    python tools/bench/conversions.py [--megabytes 1024] [--ranks 2] [--rounds 5] [--dir /dev/shm]

The directory has torchtitan's names and the proportions of Llama 3.2 1B in float32, sharded by rows as by FSDP2. The
ways run in turns as whole commands, with their input in the page cache; medians. The peak is the resident set of the
process. "queries and keys alone" is the part whose rows change places; "the inverse" writes torchtitan's names again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from dcp import run
from machine import machine_text

from statexchange.testing import run_ranks

DIM, HEADS, KV_HEADS, HIDDEN, VOCAB = 2048, 32, 8, 8192, 4096
COMMAND = [str(Path(sys.executable).parent / "statexchange"), "merge"]
CONVERT, NUMBERS = "torchtitan:llama3", ["--convert-with", f"n_heads={HEADS}"]


def shapes(megabytes: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a model of about this size."""
    key_value = DIM * KV_HEADS // HEADS
    layer = {
        "attention.qkv_linear.wq.weight": (DIM, DIM),
        "attention.qkv_linear.wk.weight": (key_value, DIM),
        "attention.qkv_linear.wv.weight": (key_value, DIM),
        "attention.wo.weight": (DIM, DIM),
        "feed_forward.w1.weight": (HIDDEN, DIM),
        "feed_forward.w2.weight": (DIM, HIDDEN),
        "feed_forward.w3.weight": (HIDDEN, DIM),
        "attention_norm.weight": (DIM,),
        "ffn_norm.weight": (DIM,),
    }
    layer_bytes = 4 * (2 * DIM * DIM + 2 * key_value * DIM + 3 * DIM * HIDDEN)
    found: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (VOCAB, DIM), "norm.weight": (DIM,)}
    for number in range(max(1, megabytes * 2**20 // layer_bytes)):
        found |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    return {**found, "lm_head.weight": (VOCAB, DIM)}


def rank_main(folder: str, megabytes: int) -> None:
    """Save the model, sharded over the ranks."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    state = {}
    for name, shape in shapes(megabytes).items():
        state[name] = distribute_tensor(torch.rand(shape), mesh, [Shard(0)])
    dcp.state_dict_saver.save(state, checkpoint_id=folder)
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", default="/dev/shm")
    options = parser.parse_args()
    from conversions import rank_main as ranks_work  # ranks cannot import __main__

    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        source, out, hf = (os.path.join(folder, name) for name in ("dcp", "out", "hf"))
        run_ranks(ranks_work, options.ranks, backend="gloo", args=(source, options.megabytes), timeout_s=300)
        run([*COMMAND, source, hf, "--convert", CONVERT, *NUMBERS])
        alone = ["--include", "*.wq.weight", "--include", "*.wk.weight"]
        pairs = {
            "all": ([source, out], [source, out, "--convert", CONVERT]),
            "queries and keys alone": ([source, out, *alone], [source, out, *alone, "--convert", CONVERT]),
            "the inverse": ([hf, out], [hf, out, "--convert", f"inverse:{CONVERT}"]),
        }
        found: dict[tuple[str, bool], list[tuple[float, int]]] = {}
        for number in range(options.rounds + 1):  # the first warms up
            for what, commands in pairs.items():
                for converts, arguments in enumerate(commands):
                    shutil.rmtree(out, ignore_errors=True)
                    measured = run([*COMMAND, *arguments, *(NUMBERS if converts else [])])
                    if number:
                        found.setdefault((what, bool(converts)), []).append(measured)
    print(f"{options.megabytes} MiB, {options.ranks} ranks, {options.rounds} rounds, {machine_text()}\n")
    print(
        "| what | merge, seconds | with the conversion, seconds | vs the plain merge | peaks |\n|---|---|---|---|---|"
    )
    for what in pairs:
        plain, converted = (statistics.median(s for s, _ in found[what, converts]) for converts in (False, True))
        peaks = ", ".join(f"{max(peak for _, peak in found[what, converts]) >> 20} MiB" for converts in (False, True))
        print(f"| {what} | {plain:.2f} | {converted:.2f} | {plain / converted:.2f}x | {peaks} |")


if __name__ == "__main__":
    main()
