"""What every rank of a Slurm step checks: ranks.py FOLDER HOSTS BACKEND. All ranks see FOLDER."""

from __future__ import annotations

import os
import sys

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import Shard

import statexchange as sx

ROWS = 3


def reduces(comm: sx.comm.Communicator) -> None:
    """Sums over all ranks, in every way that a step may need them."""
    for n in (1, 1000, 300_000):
        total = comm.all_reduce(torch.full((n,), float(comm.rank + 1)))
        assert (total == sum(range(1, comm.world_size + 1))).all(), total
    assert comm.all_gather_object(comm.rank) == [*range(comm.world_size)]
    comm.barrier()


def own_part(comm: sx.comm.Communicator) -> dict[str, torch.Tensor]:
    """Rows that no other rank has, and a copy of what all have."""
    return {"up.weight": torch.full((ROWS + comm.rank, 4), float(comm.rank)), "norm.weight": torch.ones(4)}


def gathers(comm: sx.comm.Communicator, folder: str) -> None:
    """Root sees every rank's state; between hosts it goes through the folder."""
    workspace = os.path.join(folder, "workspace") if comm.num_nodes > 1 else None
    with sx.gather_state(own_part(comm), workspace=workspace) as states:
        if comm.rank == 0:
            assert [float(state["up.weight"][0, 0]) for state in states] == [*map(float, range(comm.world_size))]
    with sx.get_configs_parallel({"rank": comm.rank}, range(comm.world_size), workspace_path=workspace) as configs:
        if comm.rank == 0:
            assert [config and config["rank"] for config in configs] == [*range(comm.world_size)]


def exports_and_loads(comm: sx.comm.Communicator, folder: str) -> None:
    """One checkpoint from all ranks' rows, and the rows back from it."""
    out = os.path.join(folder, "merged")
    state = own_part(comm)
    sx.export_checkpoint(state, out, layout={"up.*": Shard(0)})
    if comm.rank == 0:
        merged = load_file(os.path.join(out, "model.safetensors"))
        rows = [float(r) for r in range(comm.world_size) for _ in range(ROWS + r)]
        assert merged["up.weight"][:, 0].tolist() == rows
    saved = {name: tensor.clone() for name, tensor in state.items()}
    run = os.path.join(folder, "saved")
    sx.save_checkpoint(saved, run)
    fresh = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    sx.load_checkpoint(fresh, run)
    assert all(torch.equal(fresh[name], tensor) for name, tensor in saved.items())


def fits(comm: sx.comm.Communicator) -> None:
    """Training on parts of the data: weights stay equal on all ranks, and the loss falls."""
    torch.manual_seed(comm.rank)
    model = torch.nn.Linear(8, 1)
    sx.train.broadcast_parameters(model)
    optimizer = sx.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), module=model)
    wanted = torch.arange(8.0).unsqueeze(1)
    losses = []
    for _ in range(30):
        data = torch.randn(16, 8)
        loss = (model(data) - data @ wanted).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 10, losses
    weights = comm.all_gather(model.weight.detach())
    assert all(torch.equal(weights[0], other) for other in weights)


def main(folder: str, hosts: int, backend: str) -> None:
    """Do it all twice: the second time after a shutdown, in the same step."""
    before = sx.comm.get_local_rank()
    assert before == int(os.environ["SLURM_LOCALID"])
    for turn in ("first", "again"):
        comm = sx.init(backend)
        assert comm.world_size == int(os.environ["SLURM_STEP_NUM_TASKS"]), comm
        assert comm.rank == int(os.environ["SLURM_PROCID"]), comm
        assert comm.num_nodes == hosts, comm.hosts
        assert (sx.comm.get_local_rank(), comm.local_rank, comm.node.rank) == (before, before, before)
        reduces(comm)
        place = os.path.join(folder, turn)
        gathers(comm, place)
        exports_and_loads(comm, place)
        fits(comm)
        comm.barrier()
        sx.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
