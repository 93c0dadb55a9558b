"""A job that is killed, and goes on from the hosts' memory when it is started again: restarts.py FOLDER save|load.

`save` saves three steps and then kills the last rank, so that the launcher ends the others. `load` must find the last
step in memory, on as many ranks or on another number.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

import statexchange as sx

ROWS = 12


def rows(comm: sx.comm.Communicator, step: int) -> torch.Tensor:
    """Return this rank's rows of the tensor of a step."""
    size = ROWS // comm.world_size
    first = torch.arange(comm.rank * size, (comm.rank + 1) * size)
    return 100.0 * step + first[:, None] * torch.ones(1000)


def main(folder: str, action: str) -> None:
    """Save and be killed, or load; a rank that loads prints from where."""
    comm = sx.init("auto")
    saves = sx.Checkpoints(folder, memory=True, layout={"w": {"dim": 0}})
    if action == "save":
        for step in (1, 2, 3):
            saves.save({"w": rows(comm, step), "step": step}, step)
        if comm.rank == comm.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # the launcher ends this rank
    state = {"w": rows(comm, 0), "step": 0}
    report = saves.load(state)
    assert report is not None
    assert state["step"] == 3, state["step"]
    assert torch.equal(torch.as_tensor(state["w"]), rows(comm, 3))
    assert report.num_in_memory, report
    comm.barrier()
    if comm.rank == 0:
        print(f"{comm.world_size} ranks loaded step 3 from memory", flush=True)
    sx.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
