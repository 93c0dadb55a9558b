"""Calls of the public functions that mypy accepts, and wrong ones that it refuses: an unneeded ignore is an error.

Checked by mypy alone; nothing here runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import statexchange as sx


def valid_calls(net: torch.nn.Linear) -> None:
    """Call functions as users do."""
    done: str = sx.export_checkpoint(net, "x", dtype=torch.bfloat16, rename=[("a", "b")]).path
    later: int = sx.export_checkpoint({"w": torch.ones(1)}, Path(done), dtype="bf16", background=True).result().nbytes
    sx.export_checkpoint([net, net], f"x{later}", dtype=np.dtype("float32"), comm=sx.get_communicator())
    sx.load_checkpoint({"model": net, "step": 1}, "x", dtype="state")
    sx.save_checkpoint({"model": net}, "x")
    sx.merge_checkpoint("x", Path("y"), dtype="float16", convert="torchtitan:llama3", convert_with={"n_heads": 4})
    sx.train.data_parallel(net, torch.optim.SGD(net.parameters()))
    try:
        comm: sx.comm.Communicator = sx.init("single")
        comm.close()
    except sx.errors.StallError:
        raise


def collectives(comm: sx.comm.Communicator, weight: torch.nn.Parameter, flag: bool) -> None:
    """Check that collectives return the type of tensor that they were given, or with `async_op` a Work of it."""
    same: torch.nn.Parameter = comm.all_reduce(weight, "avg")
    array: np.ndarray[Any, Any] = comm.broadcast(np.ones(2))
    later: torch.Tensor = comm.all_reduce(torch.ones(2), torch.distributed.ReduceOp.SUM, async_op=True).wait()
    several: list[torch.Tensor] = comm.all_reduce_multiple([later, same])
    new: list[torch.Tensor] = comm.all_gather(weight) + comm.gather(later, async_op=True).wait()
    part: np.ndarray[Any, Any] = comm.reduce_scatter(array)
    perhaps: torch.Tensor | sx.comm.Work[torch.Tensor] = comm.recv(new[0], 1, async_op=flag)
    print(several, part, perhaps)


def nonsense(comm: sx.comm.Communicator) -> None:
    """Call functions in ways that mypy must refuse."""
    sx.export_checkpoint(42, "x")  # type: ignore[call-overload]
    sx.export_checkpoint({}, "x", dtype=17)  # type: ignore[call-overload]
    sx.load_checkpoint({}, "x", dtype="bfloat16")  # type: ignore[arg-type]
    sx.load_checkpoint({}, "x", replicas="some")  # type: ignore[arg-type]
    sx.merge_checkpoint("x", 1)  # type: ignore[arg-type]
    sx.open_checkpoint("x", weights="both")  # type: ignore[arg-type]
    sx.load_checkpoint({}, "x", convert=7)  # type: ignore[arg-type]
    sx.save_checkpoint({}, "x", comm=1)  # type: ignore[call-overload]
    sx.gather_state(3)  # type: ignore[arg-type]
    comm.all_reduce(torch.ones(2)).wait()  # type: ignore[attr-defined]
    comm.all_reduce(torch.ones(2), async_op=True).sum()  # type: ignore[attr-defined]
    comm.all_reduce([1.0])  # type: ignore[call-overload]
    sx.Communicator  # type: ignore[attr-defined]  # noqa: B018
    sx.export_checkpoint_async  # type: ignore[attr-defined]  # noqa: B018
