"""States that jobs save by step with `Checkpoints`, and the saves and loads of one process and of several ranks."""

from __future__ import annotations

from typing import Any

import torch

import statexchange as sx

LAYOUT = {"w": {"dim": 0}}


def state_of(value: float, step: int = 0) -> dict[str, Any]:
    """Return a state whose tensors are filled with `value`."""
    return {"model": {"w": torch.full((4, 3), value), "b": torch.full((3,), value)}, "step": step}


def value_in(state: dict[str, Any]) -> float:
    """Return the value that fills the tensors of a state of `state_of`."""
    (value,) = {float(v) for tensor in state["model"].values() for v in tensor.unique()}
    return value


def save_steps(saves: sx.Checkpoints, *steps: int, **options: Any) -> None:
    """Save for each step a state that is filled with its number."""
    for step in steps:
        saves.save(state_of(step, step), step, **options)


def shard_of(value: float, rank: int, world_size: int) -> dict[str, Any]:
    """Return a rank's rows of a tensor whose row r is filled with value + r."""
    rows = torch.arange(12).tensor_split(world_size)[rank]
    return {"w": (value + rows)[:, None].expand(-1, 3).clone(), "step": int(value)}


def save_rows(path: str, *steps: int) -> list[int]:
    """Save the rank's rows for each step; return the steps that are there then. For ranks only."""
    comm = sx.get_communicator()
    saves = sx.Checkpoints(path, layout=LAYOUT)
    for step in steps:
        saves.save(shard_of(step, comm.rank, comm.world_size), step)
    return saves.steps()


def load_rows(path: str) -> int | None:
    """Load the rank's rows of the newest save and check them; return its step, None without a save. For ranks only."""
    comm = sx.get_communicator()
    state = shard_of(0, comm.rank, comm.world_size)
    report = sx.Checkpoints(path, layout=LAYOUT).load(state)
    if report is None:
        return None
    assert torch.equal(state["w"], shard_of(state["step"], comm.rank, comm.world_size)["w"])
    assert report.step == state["step"]
    return report.step


ROW_JOBS = """
import torch
from statexchange.testing import run_ranks
from checkpoint_jobs import load_rows, save_rows

def job(path, steps):  # its two ranks are threads, so that a kill ends both
    if steps:
        run_ranks(save_rows, 2, args=(path, *steps))
    else:
        run_ranks(load_rows, 2, args=(path,))

serve(job)
"""
"""The program of a job that is killed: it saves rows for each of its steps, or loads them if it has none."""


LARGE = 100_000  # rows with which S3 copies the base


def adapter_of(value: float, rows: int = 32) -> dict[str, Any]:
    """Return a state with a base that does not train, and an adapter that is filled with `value`."""
    model = torch.nn.ModuleDict({"base": torch.nn.Linear(48, rows), "adapter": torch.nn.Linear(4, 2)})
    model["base"].requires_grad_(requires_grad=False)
    with torch.no_grad():
        for parameter in model["base"].parameters():
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape))
        for parameter in model["adapter"].parameters():
            parameter.fill_(value)
    return {"model": model, "step": int(value)}


def save_adapters(path: str, *steps: int, rows: int = 32) -> list[int]:
    """Save a state of `adapter_of` for each step; return the steps that are there then. For ranks only."""
    saves = sx.Checkpoints(path)
    for step in steps:
        saves.save(adapter_of(step, rows), step)
    return saves.steps()


def load_adapters(path: str, rows: int = 32) -> int | None:
    """Load the newest save of `save_adapters` and check it; return its step, None without a save. For ranks only."""
    state = adapter_of(0, rows)
    with torch.no_grad():
        state["model"]["base"].weight.zero_()
    if sx.Checkpoints(path).load(state) is None:
        return None
    for name, tensor in adapter_of(state["step"], rows)["model"].state_dict().items():
        assert torch.equal(tensor, state["model"].state_dict()[name]), name
    return int(state["step"])


def save_large(path: str, *steps: int) -> list[int]:
    """Do the same as `save_adapters` with a base that S3 copies. For ranks only."""
    return save_adapters(path, *steps, rows=LARGE)


def load_large(path: str) -> int | None:
    """Do the same as `load_adapters` for `save_large`. For ranks only."""
    return load_adapters(path, LARGE)
