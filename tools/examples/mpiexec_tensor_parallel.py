"""Train a model whose layers are cut by hand over MPI ranks, then export one checkpoint.

    mpiexec -n 4 python tools/examples/mpiexec_tensor_parallel.py OUT

The layout names the dim along which each tensor is cut; the parts need not be equal.
"""

import sys
from typing import Any

import torch
from mpi4py import MPI
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import Shard

import statexchange as sx

TEXT = torch.tensor(list(sys.copyright.encode() * 40))


class SumOverRanks(torch.autograd.Function):
    """Adds partial results of all ranks; the gradient of each part is the gradient of the sum."""

    @staticmethod
    def forward(_ctx: Any, partial: torch.Tensor) -> torch.Tensor:
        total = partial.clone()
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, total.numpy())
        return total

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def main(out: str) -> None:
    comm = sx.init("mpi")
    torch.manual_seed(comm.rank)
    torch.set_num_threads(1)
    hidden = 20 + comm.rank  # ranks have parts of different sizes
    model = nn.ModuleDict({"up": nn.Linear(8 * 256, hidden), "down": nn.Linear(hidden, 256, bias=False)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(60):
        at = (torch.arange(64) * 7 + step * 64) % (len(TEXT) - 9)
        context = nn.functional.one_hot(torch.stack([TEXT[i : i + 8] for i in at]), 256).flatten(1).float()
        logits = SumOverRanks.apply(model["down"](torch.relu(model["up"](context))))
        loss = nn.functional.cross_entropy(logits, TEXT[at + 8])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if comm.rank == 0 and step in (0, 59):
            print(f"step {step}: loss {loss.item():.2f}")

    report = sx.export_checkpoint(model, out, layout={"up.*": Shard(0), "down.weight": Shard(1)})

    with sx.gather_state(model) as states:
        if comm.rank == 0:
            merged = load_file(f"{out}/model.safetensors")
            dims = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
            whole = {name: torch.cat([state[name] for state in states], dim) for name, dim in dims.items()}
            equal = sum(torch.equal(merged[name], tensor) for name, tensor in whole.items())
            print(f"{equal} of {len(whole)} tensors bit-equal; ranks supplied {report.rank_nbytes} bytes")


if __name__ == "__main__":
    main(sys.argv[1])
