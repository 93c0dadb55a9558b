"""The checks that every rank of a Slurm step runs: ranks.py FOLDER HOSTS BACKEND. All ranks see FOLDER."""

from __future__ import annotations

import os
import sys

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import Shard

import statexchange as sx

ROWS = 3


def reduces(comm: sx.comm.Communicator) -> None:
    """Check sums of several sizes, an exchange of objects, and a barrier."""
    for n in (1, 1000, 300_000):
        total = comm.all_reduce(torch.full((n,), float(comm.rank + 1)))
        assert (total == sum(range(1, comm.world_size + 1))).all(), total
    assert comm.all_gather_object(comm.rank) == [*range(comm.world_size)]
    comm.barrier()


def own_part(comm: sx.comm.Communicator) -> dict[str, torch.Tensor]:
    """Return a tensor of which each rank has other rows, and one that is equal on all ranks."""
    return {"up.weight": torch.full((ROWS + comm.rank, 4), float(comm.rank)), "norm.weight": torch.ones(4)}


def gathers(comm: sx.comm.Communicator, folder: str) -> None:
    """Check that root gets the state and config of every rank, on several hosts through FOLDER."""
    workspace = os.path.join(folder, "workspace") if comm.num_nodes > 1 else None
    with sx.gather_state(own_part(comm), workspace=workspace) as states:
        if comm.rank == 0:
            assert [float(state["up.weight"][0, 0]) for state in states] == [*map(float, range(comm.world_size))]
    with sx.get_configs_parallel({"rank": comm.rank}, range(comm.world_size), workspace_path=workspace) as configs:
        if comm.rank == 0:
            assert [config and config["rank"] for config in configs] == [*range(comm.world_size)]


def exports_and_loads(comm: sx.comm.Communicator, folder: str) -> None:
    """Check the export of one checkpoint from all ranks' rows, and a save and its load."""
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


def trains(comm: sx.comm.Communicator) -> None:
    """Check that training on parts of the data keeps weights equal on all ranks, and that the loss falls."""
    torch.manual_seed(comm.rank)
    model = torch.nn.Linear(8, 1)
    sx.train.broadcast_parameters(model)
    optimizer = sx.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), module=model)
    target = torch.arange(8.0).unsqueeze(1)
    losses = []
    for _ in range(30):
        data = torch.randn(16, 8)
        loss = (model(data) - data @ target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 10, losses
    weights = comm.all_gather(model.weight.detach())
    assert all(torch.equal(weights[0], other) for other in weights)


def main(folder: str, hosts: int, backend: str) -> None:
    """Run all checks twice: the second time after a shutdown, in the same Slurm step."""
    local_rank = sx.comm.get_local_rank()
    assert local_rank == int(os.environ["SLURM_LOCALID"])
    for turn in ("first", "again"):
        comm = sx.init(backend)
        assert comm.world_size == int(os.environ["SLURM_STEP_NUM_TASKS"]), comm
        assert comm.rank == int(os.environ["SLURM_PROCID"]), comm
        assert comm.num_nodes == hosts, comm.hosts
        assert (sx.comm.get_local_rank(), comm.local_rank, comm.node.rank) == (local_rank, local_rank, local_rank)
        reduces(comm)
        place = os.path.join(folder, turn)
        gathers(comm, place)
        exports_and_loads(comm, place)
        trains(comm)
        comm.barrier()
        sx.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
