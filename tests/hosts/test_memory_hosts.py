"""Copies of a job's newest save in the memory of two hosts: either of them may be lost with all that it kept."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from two_hosts import missing, two_hosts

import statexchange as sx

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]

ROWS, LAYOUT = 12, {"w": {"dim": 0}}


def rows(comm: sx.comm.Communicator, value: float) -> torch.Tensor:
    """This rank's rows of a tensor, of several windows each."""
    size = ROWS // comm.world_size
    first = torch.arange(comm.rank * size, (comm.rank + 1) * size)
    return value + first[:, None] * torch.ones(300_000)


def saves(path: str) -> list[str]:
    comm = sx.init("auto", timeout_s=50.0)
    checkpoints = sx.Checkpoints(path, memory=True, layout=LAYOUT)
    for step in (1, 2):
        checkpoints.save({"w": rows(comm, 100.0 * step), "step": step}, step)
    comm.barrier()
    kept = sorted(str(found.name) for found in Path("/dev/shm").glob("statexchange-*/saves-*/step-*/rank-*"))
    sx.shutdown()
    return kept


def loads(path: str, lost: str) -> list[Any]:
    """Load after the hosts named in `lost` have lost their memory."""
    comm = sx.init("auto", timeout_s=50.0)
    if comm.hosts[comm.rank] in lost.split() and comm.local_rank == 0:
        shutil.rmtree(f"/dev/shm/statexchange-{os.getuid()}")
    comm.barrier()
    state = {"w": rows(comm, 0.0) - 1, "step": -1}
    report = sx.Checkpoints(path, memory=True, layout=LAYOUT).load(state)
    assert report is not None
    assert torch.equal(state["w"], rows(comm, 100.0 * state["step"]))
    comm.barrier()
    assert not list(Path("/dev/shm").glob("statexchange-*/saves-*/.load-*"))
    sx.shutdown()
    return [state["step"], report.path.startswith("/dev/shm/")]


@pytest.mark.parametrize("lost", ["", "anna", "bert"])
def test_one_host_may_lose_its_memory(lost: str, tmp_path: Path) -> None:
    path = str(tmp_path / "saves")
    with two_hosts(2, 1) as hosts:
        names = [f"rank-{rank:05d}-of-00003.safetensors" for rank in range(3)]
        assert hosts.run(saves, path, timeout_s=100) == [names] * 3
        assert hosts.run(loads, path, lost, timeout_s=100) == [[2, True]] * 3


def test_without_the_memory_of_both_hosts_the_disk_is_read(tmp_path: Path) -> None:
    path = str(tmp_path / "saves")
    with two_hosts(1, 2) as hosts:
        hosts.run(saves, path, timeout_s=100)
        shutil.rmtree(f"{path}/step-000000001")
        assert hosts.run(loads, path, "anna bert", timeout_s=100) == [[2, False]] * 3
