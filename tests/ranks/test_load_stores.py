"""Loading where ranks share a checkpoint: from a store, from several hosts, while it is replaced."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loaded_jobs import mesh_of, placed
from starting import LAUNCHED_AS, THREADS_AND_PROCESSES, start
from sweeps import slow
from torch import nn

import statexchange as sx
from statexchange.testing import run_ranks


def stored_tensors() -> dict[str, torch.Tensor]:
    numbers = torch.arange(300_000)
    return {
        "same": numbers.float().reshape(1000, 300),
        "also": numbers[:150_000].int().reshape(500, 300),
        "strided": numbers[:150_000].bfloat16().reshape(500, 300),
        "rows": numbers.double().reshape(1000, 300),
        "scalar": torch.tensor(2.5),
    }


def load_from_a_store(backend: str, directory: str, url: str) -> int:
    """Load boxes that all ranks need and boxes that one needs; return the bytes that this rank has read."""
    comm = start(backend, directory)
    state: dict[str, Any] = {
        "same": nn.Parameter(torch.zeros(1000, 300)),
        "also": np.zeros((500, 300), np.int32),
        "strided": torch.zeros(300, 500, dtype=torch.bfloat16).T,
        "scalar": torch.tensor(0.0),
    }
    if backend == "gloo":
        state["rows"] = placed(torch.zeros(1000, 300).double(), mesh_of([comm.world_size]), "0")
    report = sx.load_checkpoint(state, url, strict=False)
    for name, live in state.items():
        found = live.full_tensor() if name == "rows" else torch.as_tensor(live).detach()
        assert torch.equal(found, stored_tensors()[name]), name
    comm.barrier()
    return report.nbytes


@pytest.mark.parametrize("backend", ["gloo", slow("shm"), "hierarchical", slow("mpi")])
def test_a_box_that_several_ranks_of_a_host_need_is_read_from_a_store_once(backend: str, tmp_path: Path) -> None:
    sx.export_checkpoint(stored_tensors(), tmp_path / "out")
    (tmp_path / "meet").mkdir()
    args = (backend, str(tmp_path / "meet"), f"local://{tmp_path}/out")
    found = run_ranks(load_from_a_store, 3, backend=LAUNCHED_AS[backend], args=args, timeout_s=120)
    whole = sum(t.nbytes for n, t in stored_tensors().items() if n != "rows" or backend == "gloo")
    hosts = 2 if backend == "hierarchical" else 1
    alone = stored_tensors()["rows"].nbytes if backend == "gloo" else 0
    assert sum(found) == hosts * (whole - alone) + alone
    assert min(found) > 0


def loads_from_its_own_directory(directory: str, folder: str) -> list[float]:
    comm = start("hierarchical", directory, "ab")
    os.chdir(f"{folder}/{comm.rank}")
    state = {"w": torch.zeros(6)}
    sx.load_checkpoint(state, "/proc/self/cwd/out")
    return list(state["w"].tolist())


def test_copies_on_two_hosts_are_one_checkpoint_though_a_tool_has_indented_a_manifest(tmp_path: Path) -> None:
    (tmp_path / "meet").mkdir()
    sx.export_checkpoint({"w": torch.arange(6.0)}, tmp_path / "0" / "out")
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    manifest = tmp_path / "1" / "out" / "statexchange.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()), indent=2))
    args = (str(tmp_path / "meet"), str(tmp_path))
    found = run_ranks(loads_from_its_own_directory, 2, backend=LAUNCHED_AS["hierarchical"], args=args)
    assert found == [[0, 1, 2, 3, 4, 5]] * 2


def opens_another_checkpoint(backend: str, directory: str, folder: str) -> None:
    comm = start(backend, directory)
    with pytest.raises(sx.errors.InvalidArgumentError, match="the same path") as caught:
        sx.load_checkpoint({"w": torch.zeros(3)}, f"{folder}/{'two' if comm.rank else 'one'}")
    assert caught.value.rank == 1
    assert all(f"{folder}/{name}" in str(caught.value) for name in ("one", "two"))
    state = {"w": torch.zeros(3)}
    sx.load_checkpoint(state, f"{folder}/one")
    assert state["w"].tolist() == [1.0] * 3


@pytest.mark.parametrize("backend", THREADS_AND_PROCESSES)
def test_ranks_that_open_different_checkpoints_get_an_error(backend: str, tmp_path: Path) -> None:
    for value, name in ((1.0, "one"), (2.0, "two")):
        sx.export_checkpoint({"w": torch.full((3,), value)}, tmp_path / name)
    run_ranks(opens_another_checkpoint, 2, backend=LAUNCHED_AS[backend], args=(backend, str(tmp_path), str(tmp_path)))


def loads_while_it_is_replaced(path: str, layout: Any, replacing_rank: int) -> int:
    """Load again and again; at the n-th storage call of one rank the checkpoint is overwritten."""
    comm = sx.get_communicator()
    alone = sx.init("single")
    calls, stop_at, value = 0, 0, 0.0

    def publish() -> None:
        tensors = {f"t{i}": torch.full((6, 4), value) for i in range(3)}
        sx.export_checkpoint(tensors, path, overwrite=True, max_shard_size=150, comm=alone)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal calls, stop_at
        if event == "statexchange.storage" and stop_at:
            calls += 1
            if calls == stop_at:
                stop_at = 0
                publish()

    sys.addaudithook(hook)
    if comm.rank == 0:
        publish()
    comm.barrier()
    for number in range(1, 100):
        calls, stop_at, value = 0, number if comm.rank == replacing_rank else 0, float(number)
        parts = {f"t{i}": torch.zeros(3 if layout else 6, 4) for i in range(3)}
        sx.load_checkpoint(parts, path, layout=layout, comm=comm)
        found = sorted({float(v) for part in parts.values() for v in part.flatten()})
        on_all = comm.gather_object(found)
        reached = comm.broadcast_object(not stop_at, root=replacing_rank)
        stop_at = 0
        if comm.rank == 0:
            assert on_all is not None
            assert on_all in ([[value - 1]] * 2, [[value]] * 2), (number, on_all)
        if not reached:
            return number - 1
    raise AssertionError("a load without an end")


@pytest.mark.parametrize("layout", [None, {"*": {"dim": 0}}], ids=["whole", "parts"])
@pytest.mark.parametrize("replacing_rank", [slow(0), 1])
def test_ranks_load_one_of_two_checkpoints_whenever_it_is_replaced(
    replacing_rank: int, layout: Any, tmp_path: Path
) -> None:
    found = run_ranks(
        loads_while_it_is_replaced,
        2,
        backend="gloo",
        args=(str(tmp_path / "out"), layout, replacing_rank),
        timeout_s=120,
    )
    print(f"replaced at {found[0]} calls")
    assert found[0] > 5
    assert os.listdir(tmp_path) == ["out"]
