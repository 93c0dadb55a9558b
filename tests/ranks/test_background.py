"""Export in the background: it exports the state at the call while training goes on; `result()` raises failures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from starting import AND_MPI, THREADS_AND_PROCESSES, launched_communicator
from sweeps import slow
from warm_python import warm_python

import statexchange as sx
from statexchange.testing import run_ranks

LAYOUT = {"weight": {"dim": 0}, "tied": {"dim": 1}}


def trains_during_an_export(backend: str, out: str) -> Any:
    """Change the weights and call collectives while the earlier state is exported."""
    comm = launched_communicator(backend)
    weight = torch.arange(300_000.0).reshape(3000, 100) + 1000 * comm.rank
    tied = weight.T
    state = {"weight": weight, "tied": tied, "norm": torch.ones(4), "array": np.arange(5), "none": torch.zeros(0, 2)}
    futures = []
    for turn in range(3):
        futures.append(sx.export_checkpoint(state, f"{out}-{turn}", layout=LAYOUT, background=True))
        weight.add_(0.5)
        total = comm.all_reduce(torch.ones(70_000))
        assert total.eq(comm.world_size).all()
    reports = [future.result(60) for future in futures]
    assert all(report.num_tensors == 5 for report in reports)
    comm.barrier()
    for turn in range(3):
        merged = load_file(f"{out}-{turn}/model.safetensors")
        parts = [
            torch.arange(300_000.0).reshape(3000, 100) + 1000 * rank + 0.5 * turn for rank in range(comm.world_size)
        ]
        assert torch.equal(merged["weight"], torch.cat(parts))
        assert torch.equal(merged["tied"], torch.cat([part.T for part in parts], 1))
    return [report.path for report in reports]


@pytest.mark.parametrize("backend", AND_MPI)
@pytest.mark.parametrize("world_size", [slow(1), 3])
def test_training_goes_on_during_an_export_of_the_earlier_state(backend: str, world_size: int, tmp_path: Path) -> None:
    found = run_ranks(
        trains_during_an_export, world_size, backend=backend, args=(backend, str(tmp_path / "out")), timeout_s=120
    )
    assert found == [[str(tmp_path / f"out-{turn}") for turn in range(3)]] * world_size


def test_options_are_those_of_export(tmp_path: Path) -> None:
    state = {"w": torch.full((3,), 1.1), "v": torch.ones(2)}
    future = sx.export_checkpoint(
        state, tmp_path / "out", dtype="bfloat16", include="w", rename=[("w", "u")], background=True
    )
    assert future.result(30).num_tensors == 1
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["u"], state["w"].bfloat16())
    with pytest.raises(TypeError, match="colour"):
        sx.export_checkpoint(state, tmp_path / "other", colour="blue", background=True).result(30)


def meets_failures(backend: str, out: str) -> None:
    comm = launched_communicator(backend)
    os.makedirs(out, exist_ok=True)
    comm.barrier()
    state = {"w": torch.ones(3)}
    future = sx.export_checkpoint(state, out, background=True)
    with pytest.raises(sx.errors.TargetExistsError):
        future.result(30)

    def fail(done: int, total: int) -> None:
        raise KeyError("lost")

    options: dict[str, Any] = {"on_progress": fail} if comm.rank == 0 else {}
    future = sx.export_checkpoint(state, f"{out}-2", background=True, **options)
    with pytest.raises(sx.errors.PeerError, match="KeyError: 'lost'") as caught:
        future.result(30)
    assert caught.value.rank == 0
    assert caught.value.phase == "export_checkpoint (writing)"
    bad = {"w": torch.ones(3).to_sparse() if comm.rank else torch.ones(3)}
    future = sx.export_checkpoint(bad, f"{out}-3", background=True)
    with pytest.raises(sx.errors.UnsupportedError, match="'w'"):
        future.result(30)
    assert sx.export_checkpoint(state, f"{out}-4", background=True).result(30).num_tensors == 1
    comm.barrier()


@pytest.mark.parametrize("backend", AND_MPI)
def test_a_failure_is_raised_on_all_ranks_and_the_next_export_succeeds(backend: str, tmp_path: Path) -> None:
    run_ranks(meets_failures, 2, backend=backend, args=(backend, str(tmp_path / "out")), timeout_s=120)
    assert sorted(os.listdir(tmp_path)) == ["out", "out-4"]


def writes_twice_at_once(backend: str, out: str) -> Any:
    """Each of two communicators has an export in the background, and waits for the other; the caller uses both."""
    comm = launched_communicator(backend)
    other = comm.duplicate()
    began = [threading.Event(), threading.Event()]

    def together(number: int) -> Any:
        def wait(done: int, total: int) -> None:
            began[number].set()
            assert began[1 - number].wait(30)

        return wait

    states = [{f"{name}{comm.rank}": torch.full((1000,), float(comm.rank))} for name in "ab"]
    futures = []
    for number, one in enumerate((comm, other)):
        path = f"{out}-{'ab'[number]}"
        futures.append(
            sx.export_checkpoint(states[number], path, comm=one, on_progress=together(number), background=True)
        )
    totals = [float(one.all_reduce(torch.ones(1))) for one in (comm, other, comm)]
    reports = [future.result(60).num_tensors for future in futures]
    comm.barrier()
    found = [sorted(load_file(f"{out}-{name}/model.safetensors")) for name in "ab"]
    return [totals, reports, found]


@pytest.mark.parametrize("backend", AND_MPI)
def test_two_are_written_at_once_by_two_communicators(backend: str, tmp_path: Path) -> None:
    found = run_ranks(writes_twice_at_once, 2, backend=backend, args=(backend, str(tmp_path / "out")), timeout_s=120)
    assert found == [[[2.0] * 3, [2, 2], [["a0", "a1"], ["b0", "b1"]]]] * 2


def dies(out: str) -> str:
    comm = sx.get_communicator()
    ready = threading.Event()

    def wait(done: int, total: int) -> None:
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        ready.set()

    future = sx.export_checkpoint({f"w{comm.rank}": torch.ones(100)}, out, on_progress=wait, background=True)
    with pytest.raises(sx.errors.PeerError, match=r"rank 1 .*died") as caught:
        future.result(30)
    return str(caught.value)


def test_result_names_a_killed_rank(tmp_path: Path) -> None:
    outcomes = run_ranks(dies, 2, backend="gloo", args=(str(tmp_path / "out"),), allow_failure=True)
    assert "died" in outcomes[0].value
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_end_of_the_interpreter_waits_for_the_export(tmp_path: Path) -> None:
    script = """
import sys, time, torch
import statexchange as sx
wait = lambda done, total: time.sleep(0.5)
sx.export_checkpoint({"w": torch.ones(1000)}, sys.argv[1], on_progress=wait, background=True)
"""
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "out"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["w"], torch.ones(1000))


def test_a_snapshot_reuses_the_memory_of_the_last_one(tmp_path: Path) -> None:
    state = {"w": torch.ones(16 << 20)}

    def resident() -> int:
        fields = Path("/proc/self/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    sx.export_checkpoint(state, tmp_path / "first", background=True).result(60)
    before = resident()
    for turn in range(3):
        sx.export_checkpoint(state, tmp_path / f"out-{turn}", background=True).result(60)
    assert resident() - before < 32 << 20


def stalls_and_continues(out: str) -> Any:
    """One rank starts the next export while the first still runs, the other when it has failed."""
    comm = sx.init("gloo", timeout_s=8)
    state = {"w": torch.arange(8.0)}
    failed = Path(f"{out}-failed")

    def wait(done: int, total: int) -> None:
        while not failed.exists():
            time.sleep(0.01)

    options: dict[str, Any] = {"on_progress": wait} if comm.rank == 0 else {}
    first = sx.export_checkpoint(state, f"{out}-1", comm=comm, stall_timeout_s=0.5, background=True, **options)
    if comm.rank == 1:
        while not first.done():
            time.sleep(0.01)
        failed.touch()
    with pytest.raises(sx.StateExchangeError) as caught:
        sx.export_checkpoint(state, f"{out}-2", comm=comm, background=True)
    assert str(first.exception(20)) == str(caught.value)
    assert sx.export_checkpoint(state, f"{out}-3", comm=comm, background=True).result(20).num_tensors == 1
    return comm.all_reduce(torch.ones(2)).tolist()


def test_an_export_after_a_stalled_one_does_not_break_training(tmp_path: Path) -> None:
    assert run_ranks(stalls_and_continues, 2, backend="gloo", args=(str(tmp_path / "out"),)) == [[2.0, 2.0]] * 2


def misspells(out: str) -> None:
    comm = sx.get_communicator()
    options: dict[str, Any] = {"max_shard_size": "5 sheep"} if comm.rank else {}
    with pytest.raises(sx.errors.InvalidArgumentError, match="5 sheep"):
        sx.export_checkpoint({"w": torch.ones(2)}, out, background=True, **options).result(20)
    assert sx.export_checkpoint({"w": torch.ones(2)}, out, background=True).result(20).num_tensors == 1


def test_a_wrong_argument_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    run_ranks(misspells, 2, args=(str(tmp_path / "out"),))


def fails_without_result(out: str) -> list[Any]:
    """Only rank 1 calls `result()` of the first export; then the second export fails on both ranks."""
    comm = sx.get_communicator()
    options: dict[str, Any] = {"rename": [("w", "")]}
    first = sx.export_checkpoint({"w": torch.ones(2)}, f"{out}-1", background=True, **options)
    assert not first.cancel()
    if comm.rank == 1:
        assert isinstance(first.exception(20), sx.StateExchangeError)
        with pytest.raises(sx.errors.UnsafeError, match="name ''"):
            sx.export_checkpoint({"w": torch.ones(2)}, f"{out}-2", background=True).result(20)
    else:
        with pytest.raises(sx.errors.UnsafeError, match="name ''"):
            sx.export_checkpoint({"w": torch.ones(2)}, f"{out}-2", background=True)
    third = sx.export_checkpoint({"w": torch.ones(2)}, f"{out}-3", background=True)
    assert (third.result(20).num_tensors, third.cancel()) == (1, False)
    comm.barrier()
    return sorted(os.listdir(os.path.dirname(out)))


@pytest.mark.parametrize("backend", THREADS_AND_PROCESSES)
def test_a_failure_without_a_call_of_result_is_raised_by_the_next_export(backend: str, tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    found = run_ranks(fails_without_result, 2, backend=backend, args=(str(tmp_path / "place" / "out"),), timeout_s=120)
    assert found == [["out-3"]] * 2


ENDS_WITHOUT_RESULT = """
import sys, torch
import statexchange as sx
future = sx.export_checkpoint({"w": torch.ones(2)}, sys.argv[1], include="nothing", background=True)
assert not future.cancel()
if sys.argv[2] == "asks":
    assert future.exception(30) is not None
"""


@pytest.mark.parametrize("how", ["drops", "asks"])
def test_a_failure_without_a_call_of_result_is_logged_once(how: str, tmp_path: Path) -> None:
    run = [warm_python(), "-c", ENDS_WITHOUT_RESULT, tmp_path / "out", how]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    failed = "include pattern 'nothing' matches no tensor"
    assert line == f"export_checkpoint to {tmp_path / 'out'} in the background has failed: {failed}"
