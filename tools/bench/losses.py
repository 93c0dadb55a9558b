"""Compare the loss curve of every algorithm with that of one process, on the demo's transformer and text.

    python tools/bench/losses.py [--ranks 2] [--steps 200] [--svg FILE]

In each step each rank has a batch of its own; the one process concatenates these batches. All begin with the same
parameters, and use the demo's optimizer, AdamW, and learning rates. The loss of a step is computed before the update,
by each rank with its own weights, and averaged over ranks; the table has the means over the last tenth of the steps.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from curves import curves_svg

from statexchange.testing import run_ranks

ALONE = "one process"
SEED = 20


def algorithms() -> dict[str, Any]:
    """Return the algorithms by label."""
    from statexchange.train import algorithms as known

    return {
        "allreduce": known.GradientAllReduce(),
        "sg-allreduce": known.ScatterGatherAllReduce(),
        "quantize": known.QuantizedAllReduce(),
        "quantize, error feedback": known.QuantizedAllReduce(error_feedback=True),
        "all, every 4th step": known.Decentralized("all", 4),
        "shift_one": known.Decentralized("shift_one"),
        "ring": known.Decentralized("ring"),
    }


def rank_main(labels: list[str], ranks: int, steps: int) -> dict[str, list[float]]:
    """Return by label the loss of each step."""
    import torch

    torch.set_num_threads(1)
    return {label: train(label, ranks, steps) for label in labels}


def train(label: str, ranks: int, steps: int) -> list[float]:
    """Return the loss of each step. With the label ALONE this process trains on the batches of all `ranks`."""
    import torch

    import statexchange as sx
    from statexchange import demo_model

    torch.manual_seed(SEED)
    comm, corpus = sx.init(), demo_model.corpus_tokens()
    model: torch.nn.Module = demo_model.Llama(demo_model.LlamaConfig())
    optimizer: torch.optim.Optimizer
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    mine = range(ranks)
    if label != ALONE:
        model, optimizer = sx.train.data_parallel(model, optimizer, algorithms()[label])
        mine = range(comm.rank, comm.rank + 1)
    losses = []
    for step in range(steps):
        batches = [demo_model.batch(corpus, step, rank) for rank in mine]
        tokens, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        optimizer.param_groups[0]["lr"] = demo_model.learning_rate(step, steps)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(comm.all_reduce(loss.detach().clone(), "avg").item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--svg", type=Path, help="where to draw the curves")
    options = parser.parse_args()
    from losses import rank_main as ranks_work  # ranks of other processes cannot import __main__

    curves = {}
    for labels, world_size in ([ALONE], 1), (list(algorithms()), options.ranks):
        args = (labels, options.ranks, options.steps)
        curves.update(run_ranks(ranks_work, world_size, backend="gloo", args=args, timeout_s=3600)[0])
    last = max(options.steps // 10, 1)
    print(f"{options.ranks} ranks, {options.steps} steps, mean of the last {last}\n")
    print("| algorithm | loss | vs one process |\n|---|---|---|")
    ends = {label: statistics.mean(losses[-last:]) for label, losses in curves.items()}
    for label, end in ends.items():
        print(f"| {label} | {end:.3f} | {end - ends[ALONE]:+.3f} |")
    if options.svg is not None:
        points = {label: list(enumerate(losses)) for label, losses in curves.items()}
        title = f"training loss of the demo's transformer, {options.ranks} ranks"
        options.svg.write_text(curves_svg(title, "", points, linear=True))


if __name__ == "__main__":
    main()
