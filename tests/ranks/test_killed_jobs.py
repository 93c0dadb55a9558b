"""Random jobs of DDP and HSDP that are killed while they save: they go on as if they had not been killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from sweeps import slow
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import statexchange as sx
from statexchange.testing import run_ranks

STEPS = 6
ROWS = 12  # of a batch over all ranks, which 1, 2, 3 and 4 ranks share equally


class Job(NamedTuple):
    """The choices of a random job, by its seed: the same on any number of ranks."""

    kind: str
    ranks: int
    others: int
    width: int
    optimizer: str
    dropout: bool
    is_frozen: bool
    background: bool

    @classmethod
    def of(cls, seed: int) -> Job:
        choose = random.Random(seed)
        kind = choose.choice(["ddp", "hsdp"])
        # Of two addends the order does not matter: DDP may put them into other buckets after a restart.
        ranks, others = (2, choose.choice([1, 3])) if kind == "ddp" else (4, 2)
        optimizer = choose.choice(["AdamW", "SGD", "NAdam"])
        flags = [choose.random() < 0.5 for _ in range(3)]
        return cls(kind, ranks, others, choose.randrange(5, 40), optimizer, *flags)


def parts_of(job: Job, seed: int) -> dict[str, Any]:
    """Return the parts of a job at its start."""
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(8, job.width), torch.nn.ReLU(), torch.nn.Linear(job.width, 1)]
    model: torch.nn.Module = torch.nn.Sequential(*layers, *([torch.nn.Dropout(0.1)] if job.dropout else []))
    layers[0].weight.requires_grad_(not job.is_frozen)
    if job.kind == "hsdp":
        shape = (2, dist.get_world_size() // 2)
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))
    else:
        model = DistributedDataParallel(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    options: dict[str, Any] = {"momentum": 0.9} if job.optimizer == "SGD" else {}
    optimizer = getattr(torch.optim, job.optimizer)(trained, lr=0.01, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    torch.manual_seed(1000 * seed + dist.get_rank())  # each rank drops out others
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    if job.dropout:
        state["random"] = sx.integrations.RandomState()
    return state


def train(path: str, seed: int, kill_at: tuple[int, int, int] | None) -> tuple[dict[int, float], list[list[float]]]:
    """Train from the newest save, and save each second step; return the losses by step, and the parameters.

    `kill_at` has the rank that is killed, the step, and how many calls of its save come before.
    """
    job, rank = Job.of(seed), dist.get_rank()
    state = parts_of(job, seed)
    saves = sx.Checkpoints(path, every_steps=2, keep=2)
    saves.load(state)
    losses = {}
    for step in range(state["step"] + 1, STEPS + 1):
        state["step"] = step
        rows = torch.randn(ROWS, 9, generator=torch.Generator().manual_seed(seed + step))
        rows = rows.tensor_split(dist.get_world_size())[rank]
        loss = torch.nn.functional.mse_loss(state["model"](rows[:, :8]), rows[:, 8:])
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        state["scheduler"].step()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        losses[step] = whole.item() / dist.get_world_size()
        if saves.should_save(step):
            if kill_at is not None and kill_at[:2] == (rank, step):
                kill_after(kill_at[2])
            saved = saves.save(state, step, background=job.background)
            if job.background:
                saved.result(60)
    whole_of = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in state["model"].parameters()]
    return losses, [parameter.detach().flatten().tolist() for parameter in whole_of]


def kill_after(calls: int) -> None:
    """Kill this process at a storage call."""
    left = calls

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        if event == "statexchange.storage":
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def run(folder: Path, seed: int, ranks: int, kill_at: tuple[int, int, int] | None = None) -> Any:
    return run_ranks(train, ranks, backend="gloo", args=(str(folder), seed, kill_at), allow_failure=kill_at is not None)


@pytest.mark.parametrize("seed", [4, 11, *(slow(seed) for seed in range(100, 120))])
@pytest.mark.timeout(300)
def test_a_killed_job_goes_on_as_if_it_had_not_been_killed(seed: int, tmp_path: Path) -> None:
    job, choose = Job.of(seed), random.Random(-seed)
    losses, parameters = run(tmp_path / "whole", seed, job.ranks)[0]
    rank = choose.randrange(job.ranks)
    # Root makes the directory, looks at the other saves, and publishes; another rank writes its file.
    kill_at = rank, choose.choice([4, 6]), choose.randrange(5 if rank else 25)
    assert not run(tmp_path / "killed", seed, job.ranks, kill_at).ok
    begun = max(sx.Checkpoints(tmp_path / "killed").steps())
    assert begun in (kill_at[1] - 2, kill_at[1])
    if not job.dropout:  # random states belong to their ranks
        shutil.copytree(tmp_path / "killed", tmp_path / "others", symlinks=True)
        for step, loss in run(tmp_path / "others", seed, job.others)[0][0].items():
            assert loss == pytest.approx(losses[step], rel=1e-6), step
    resumed, resumed_parameters = run(tmp_path / "killed", seed, job.ranks)[0]
    assert resumed == {step: loss for step, loss in losses.items() if step > begun}
    assert resumed_parameters == parameters
