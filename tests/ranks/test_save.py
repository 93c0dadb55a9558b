"""Saves of several ranks: in the background while training goes on, failures on all ranks, and what they leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starting import AND_MPI, THREADS_AND_PROCESSES, launched_communicator
from sweeps import slow
from warm_python import warm_python

import statexchange as sx
from statexchange.report.verify import verify
from statexchange.testing import run_ranks

LAYOUT = {"weight": {"dim": 0}}


def trains_during_saves(backend: str, folder: str) -> list[Any]:
    """Change the weights and call collectives while the earlier state is saved; return what is in the folder."""
    comm = launched_communicator(backend)
    weight = torch.arange(300_000.0).reshape(3000, 100) + 1000 * comm.rank
    array = np.arange(5)
    values = {"seen": [1]}
    state = {"weight": weight, "array": array, "none": torch.zeros(0, 2), "step": 0, "values": values}
    futures = []
    for turn in range(3):
        state["step"] = turn
        future = sx.save_checkpoint(state, f"{folder}/saved-{turn}", layout=LAYOUT, background=True)
        assert isinstance(future, Future)
        futures.append(future)
        weight.add_(0.5)
        array += 1
        values["seen"].append(turn)
        assert comm.all_reduce(torch.ones(70_000)).eq(comm.world_size).all()
    reports = [future.result(60) for future in futures]
    for turn, report in enumerate(reports):
        assert (report.path, report.num_tensors, report.step) == (f"{folder}/saved-{turn}", 3, None)
        live: dict[str, Any] = {"weight": torch.zeros(3000, 100), "array": np.zeros(5, np.int64)}
        live |= {"none": torch.zeros(0, 2), "step": -1, "values": {}}
        sx.load_checkpoint(live, f"{folder}/saved-{turn}", layout=LAYOUT)
        whole = torch.arange(300_000.0).reshape(3000, 100) + 1000 * comm.rank + 0.5 * turn
        assert torch.equal(live["weight"], whole)
        assert (live["array"] == np.arange(5) + turn).all()
        assert (live["step"], live["values"]) == (turn, {"seen": [1, *range(turn)]})
    comm.barrier()
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("backend", AND_MPI)
def test_training_goes_on_during_saves_of_the_earlier_state(backend: str, tmp_path: Path) -> None:
    found = run_ranks(trains_during_saves, 2, backend=backend, args=(backend, str(tmp_path)), timeout_s=120)
    assert found == [[f"saved-{turn}" for turn in range(3)]] * 2


SLOW_SAVE = """
import sys, time, torch
import statexchange as sx
from statexchange.errors import TargetExistsError

def hook(event, args):
    if event == "statexchange.storage" and args[0] == "link" and slow:
        time.sleep(0.5)

path, slow = sys.argv[1], True
sys.addaudithook(hook)
first = sx.save_checkpoint({"w": torch.ones(1000)}, path, background=True)
assert not first.done()
"""


def saved_value(path: Path) -> float:
    live = {"w": torch.zeros(1000)}
    sx.load_checkpoint(live, path)
    (value,) = live["w"].unique().tolist()
    return float(value)


def run_code(script: str, *arguments: object, python: str = "") -> subprocess.CompletedProcess[str]:
    command = [python or warm_python(), "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_next_save_waits_for_the_one_that_runs(tmp_path: Path) -> None:
    more = """
slow = False
second = sx.save_checkpoint({"w": torch.zeros(1000)}, path, overwrite=True, background=True)
assert first.done()
assert second.result(30).path == path
"""
    done = run_code(SLOW_SAVE + more, tmp_path / "saved")
    assert (done.returncode, done.stderr) == (0, "")
    assert saved_value(tmp_path / "saved") == 0.0


def test_an_export_waits_for_the_save_that_runs(tmp_path: Path) -> None:
    more = """
slow = False
sx.export_checkpoint({"w": torch.zeros(1000)}, path + "-exported", background=True).result(30)
assert first.done()
"""
    done = run_code(SLOW_SAVE + more, tmp_path / "saved")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(os.listdir(tmp_path)) == ["saved", "saved-exported"]


def test_the_end_of_the_interpreter_waits_for_the_save(tmp_path: Path) -> None:
    done = run_code(SLOW_SAVE, tmp_path / "saved", python=sys.executable)
    assert (done.returncode, done.stderr) == (0, "")
    assert saved_value(tmp_path / "saved") == 1.0


ENDS_WITHOUT_RESULT = """
import sys, torch
import statexchange as sx
future = sx.save_checkpoint({"w": torch.ones(2)}, sys.argv[1], background=True)
assert not future.cancel()
if sys.argv[2] == "asks":
    assert future.exception(30) is not None
"""


@pytest.mark.parametrize("how", ["drops", "asks"])
def test_a_failure_without_a_call_of_result_is_logged_once(how: str, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    done = run_code(ENDS_WITHOUT_RESULT, tmp_path / "saved", how)
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"save_checkpoint to {tmp_path / 'saved'} in the background has failed: the target exists")


def fails_without_result(folder: str) -> list[str]:
    """Only rank 1 calls `exception()` of the first save; then the second save fails on both ranks."""
    comm = sx.get_communicator()
    state = {"w": torch.ones(2)}
    first = sx.save_checkpoint(state, f"{folder}/exists", background=True)
    if comm.rank == 1:
        assert isinstance(first.exception(20), sx.errors.TargetExistsError)
        with pytest.raises(sx.errors.TargetExistsError, match="exists"):
            sx.save_checkpoint(state, f"{folder}/second", background=True).result(20)
    else:
        with pytest.raises(sx.errors.TargetExistsError, match="exists"):
            sx.save_checkpoint(state, f"{folder}/second", background=True)
    third = sx.save_checkpoint(state, f"{folder}/third", background=True)
    assert third.result(20).num_tensors == 1
    comm.barrier()
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("backend", THREADS_AND_PROCESSES)
def test_a_failure_without_a_call_of_result_is_raised_by_the_next_save(backend: str, tmp_path: Path) -> None:
    (tmp_path / "exists").mkdir()
    found = run_ranks(fails_without_result, 2, backend=backend, args=(str(tmp_path),), timeout_s=120)
    assert found == [["exists", "third"]] * 2


def gives_wrong_arguments(folder: str) -> None:
    rank = sx.get_rank()
    state = {"w": torch.ones(2)}
    wrong: dict[str, Any] = {"stall_timeout_s": "soon"} if rank else {}
    with pytest.raises(sx.errors.InvalidArgumentError, match="stall_timeout_s") as caught:
        sx.save_checkpoint(state, f"{folder}/saved", **wrong)
    assert caught.value.rank == 1
    with pytest.raises(sx.errors.InvalidArgumentError, match="stall_timeout_s") as caught:
        sx.save_checkpoint(state, f"{folder}/saved", background=True, **wrong).result(20)
    assert caught.value.rank == 1
    assert os.listdir(folder) == []
    sx.get_communicator().barrier()
    with pytest.raises(sx.errors.UnsupportedError, match=r"\.x.*rank 1"):
        sx.save_checkpoint({"x": object() if rank else 1}, f"{folder}/saved", background=True).result(20)
    assert sx.save_checkpoint(state, f"{folder}/saved", background=True).result(20).num_tensors == 1


def test_a_wrong_argument_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    run_ranks(gives_wrong_arguments, 2, args=(str(tmp_path),))


def dies(folder: str) -> str:
    """Rank 1 is killed while the first of its files is written."""
    comm = sx.get_communicator()

    def hook(event: str, arguments: Any) -> None:
        if event == "statexchange.storage" and arguments[0] == "link":
            os.kill(os.getpid(), signal.SIGKILL)

    if comm.rank == 1:
        sys.addaudithook(hook)
    future = sx.save_checkpoint({f"w{comm.rank}": torch.ones(100)}, f"{folder}/saved", background=True)
    with pytest.raises(sx.errors.PeerError, match=r"rank 1 .*died") as caught:
        future.result(30)
    return str(caught.value)


def test_result_names_a_killed_rank(tmp_path: Path) -> None:
    outcomes = run_ranks(dies, 2, backend="gloo", args=(str(tmp_path),), allow_failure=True)
    assert "died" in outcomes[0].value
    assert os.listdir(tmp_path) == []  # root has removed what was there
    with pytest.raises(sx.errors.NotFoundError):
        sx.load_checkpoint({"w0": torch.zeros(100)}, tmp_path / "saved")


def saves_while_others_read(folder: str, until_s: float) -> list[Any]:
    """Rank 0 and 1 save again and again, rank 2 and 3 load all the while: each load is of one save."""
    comm = sx.get_communicator()
    group = comm.split(0 if comm.rank < 2 else comm.rank)
    end, seen, turn = time.monotonic() + until_s, [], 0
    while group.broadcast_object(time.monotonic() < end):
        if comm.rank < 2:
            turn += 1
            tensor = torch.full((50,), float(turn))
            state = {"w": tensor, f"own{comm.rank}": tensor.clone(), "step": turn}
            sx.save_checkpoint(state, f"{folder}/saved", comm=group, overwrite=True)
        else:
            live = {"w": torch.zeros(50), "own0": torch.zeros(50), "own1": torch.zeros(50), "step": 0}
            sx.load_checkpoint(live, f"{folder}/saved", comm=group)
            (value,) = {float(v) for tensor in live.values() for v in torch.as_tensor(tensor).flatten()}
            seen.append(value)
    comm.barrier()
    return [turn, seen]


@pytest.mark.parametrize("seconds", [1.0, slow(20.0)])
def test_each_load_during_saves_is_of_one_save(seconds: float, tmp_path: Path) -> None:
    sx.save_checkpoint(
        {"w": torch.zeros(50), "own0": torch.zeros(50), "own1": torch.zeros(50), "step": 0}, tmp_path / "saved"
    )
    found = run_ranks(saves_while_others_read, 4, backend="gloo", args=(str(tmp_path), seconds), timeout_s=120)
    for _, seen in found[2:]:
        assert seen
        assert seen == sorted(seen)
    assert verify(tmp_path / "saved").findings == ()
    assert os.listdir(tmp_path) == ["saved"]


def save_equal_and_own(path: str) -> None:
    equal = {name: torch.ones(4) for name in ("a", "b", "c")}
    sx.save_checkpoint({"equal": equal, "own": {"x": torch.full((2,), float(sx.get_rank()))}}, path)


def test_one_file_of_a_save_is_not_merged_without_what_lies_in_others(tmp_path: Path) -> None:
    run_ranks(save_equal_and_own, 2, args=(str(tmp_path / "saved"),))
    file = tmp_path / "saved/rank-00001-of-00002.safetensors"
    for exclude in ([], ["equal.a"], ["equal.[bc]"]):
        with pytest.raises(sx.errors.IncompleteError, match="of this rank"):
            sx.merge_checkpoint(file, tmp_path / "out", exclude=exclude)
