"""Train until the scheduler stops the job, save within its grace period, and go on when the job is started again.

    torchrun --nproc-per-node 2 tools/examples/preempted.py SAVES [STEPS]
    srun --signal=TERM@120 python tools/examples/preempted.py SAVES [STEPS]

A job that Slurm preempts and requeues, or that is started again by hand, goes on from its newest save, on any number of
ranks.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import statexchange as sx


def main(path: str, steps: int) -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        sx.init()  # srun, mpiexec, or alone
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 129), torch.nn.ReLU(), torch.nn.Linear(129, 1))
    if dist.is_initialized():
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    state = {"model": model, "optimizer": optimizer, "step": 0}

    with sx.Checkpoints(path, keep=2, every_steps=200, on_signal="SIGTERM", agree_every=5) as saves:
        saves.load(state)
        print(f"begins at step {state['step']}", flush=True)
        while state["step"] < steps:
            loss = (model(torch.ones(1, 64)) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            state["step"] += 1
            time.sleep(0.01)  # a longer step
            if saves.should_save(state["step"]) or state["step"] == steps:
                saves.save(state, state["step"])
            if saves.is_stopping:
                break
        print(f"ends at step {state['step']}", flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1000)
