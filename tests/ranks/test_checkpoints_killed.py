"""Saves by step of jobs that are killed at any call, or whose first save fails."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoint_jobs import LAYOUT, ROW_JOBS, load_rows, save_rows, save_steps, shard_of, state_of, value_in
from forked_jobs import ForkedJobs
from stored import entries
from sweeps import slow, some

import statexchange as sx
from statexchange.testing import run_ranks

# Kills

JOBS = ROW_JOBS


@pytest.mark.parametrize("every", [60, slow(1)], ids=["some", "all"])
@pytest.mark.timeout(900)
def test_a_job_killed_at_any_call_goes_on_from_the_newest_whole_save(
    every: int, jobs: ForkedJobs, sweep_path: Path
) -> None:
    jobs.run(str(sweep_path / "before"), [10, 20, 30])
    traces = [shutil.copytree(sweep_path / "before", sweep_path / name) for name in ("trace", "trace 2", "trace 3")]
    calls = jobs.fewest_calls(*((str(trace), [40]) for trace in traces))  # saves, and removes step 10
    assert {"create", "link", "rename", "sync", "unlink", "list"} <= set(calls)
    loads = jobs.run(str(sweep_path / "trace"), [])
    assert loads is not None
    print(f"killed at {len(calls)} calls of a save and {len(loads)} of a load")
    for number in some(range(1, len(calls) + 1), every):
        path = sweep_path / str(number)
        shutil.copytree(sweep_path / "before", path)
        if jobs.run(str(path), [40], kill_at=number) is not None:  # the ranks made fewer calls than those counted
            assert number > len(calls) - 10, number
        assert run_ranks(load_rows, 3, args=(str(path),)) in ([30] * 3, [40] * 3), number
        resumed = run_ranks(load_rows, 1, args=(str(path),))[0]
        steps = run_ranks(save_rows, 1, args=(str(path), resumed + 10))[0]  # the next job, with no clean-up by hand
        assert steps == [resumed - 10, resumed, resumed + 10], number
        assert entries(path) == [f"step-{step:09d}" for step in steps], number
    for number in some(range(1, len(loads) + 1), every):
        jobs.run(str(sweep_path / "trace"), [], kill_at=number)
        assert run_ranks(load_rows, 2, args=(str(sweep_path / "trace"),)) == [40, 40], number


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_killed_at_any_call_of_its_first_save_begins_again(jobs: ForkedJobs, sweep_path: Path) -> None:
    calls = jobs.fewest_calls(*((str(sweep_path / f"trace {number}"), [10]) for number in range(3)))
    for number in range(1, len(calls) + 1):
        path = sweep_path / str(number)
        if jobs.run(str(path), [10], kill_at=number) is not None:  # the ranks made fewer calls than those counted
            assert number > len(calls) - 10, number
        found = run_ranks(load_rows, 2, args=(str(path),))
        assert found in ([None, None], [10, 10]), number
        step = 20 if found[0] else 10
        run_ranks(save_rows, 2, args=(str(path), step))
        assert entries(path) == [f"step-{n:09d}" for n in range(10, step + 1, 10)], number


def first_save_fails(path: str, at: str, fault: str, background: bool) -> list[Any]:
    """Save for the first time while a storage call of rank 1 fails or is its last one; save again if no rank died."""
    comm = sx.get_communicator()
    is_due = comm.rank == 1

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal is_due
        if event == "statexchange.storage" and is_due and args[0] == at:
            is_due = False
            if fault == "full":
                raise OSError(errno.ENOSPC, "No space left on device")
            os.kill(os.getpid(), signal.SIGINT if fault == "interrupt" else signal.SIGKILL)

    sys.addaudithook(hook)
    saves = sx.Checkpoints(path, layout=LAYOUT)
    errors = (sx.StateExchangeError, KeyboardInterrupt)
    with pytest.raises(errors) as caught:
        if background:
            saves.save(shard_of(10, comm.rank, comm.world_size), 10, background=True).result(30)
        else:
            saves.save(shard_of(10, comm.rank, comm.world_size), 10)
    if fault == "full":
        comm.barrier()
        found = sorted(str(one.relative_to(path)) for one in Path(path).rglob("*"))
        comm.barrier()
        return [type(caught.value).__name__, found, save_rows(path, 20)]
    return [type(caught.value).__name__]


FAILING = [
    ("link", "full", False),
    slow("create", "full", True),
    slow("sync", "kill", False),
    slow("link", "kill", True),
    slow("create", "interrupt", False),
]


@pytest.mark.parametrize("exists", [False, True], ids=["new directory", "the user's directory"])
@pytest.mark.parametrize(("at", "fault", "background"), FAILING)
def test_a_first_save_that_fails_leaves_an_empty_directory(
    at: str, fault: str, background: bool, exists: bool, tmp_path: Path
) -> None:
    path = tmp_path / "runs" / "saves"
    if exists:
        path.mkdir(parents=True)
    outcomes = run_ranks(
        first_save_fails, 2, backend="gloo", args=(str(path), at, fault, background), allow_failure=True
    )
    if fault == "full":
        assert outcomes.values == {rank: ["PeerError", [], [20]] for rank in range(2)}, outcomes
        assert entries(path) == ["step-000000020"]
        return
    assert outcomes[0].value == ["PeerError"], str(outcomes)
    assert entries(path) == []
    assert run_ranks(save_rows, 2, args=(str(path), 20)) == [[20], [20]]


def load_while_removed(path: str, step: int | None) -> tuple[int, float] | str:
    """Load while rank 0's first opening of a rank's file removes the newest save."""
    saves = sx.Checkpoints(path)
    state = state_of(0)
    removed: list[int] = []

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "statexchange.storage" and args[0] == "open" and "rank-0" in args[1] and not removed:
            removed.append(30)
            sx.Checkpoints(path, comm=sx.init("single")).delete(30)

    sys.addaudithook(hook)
    try:
        report = saves.load(state, step)
        assert report is not None
        return report.step, value_in(state)
    except sx.errors.NotFoundError as error:
        return str(error)
    finally:
        removed.append(0)  # so that the hook, which cannot be removed, does nothing more


@pytest.mark.parametrize(("step", "expected"), [(None, [(20, 20.0), (30, 30.0)]), (30, [(30, 30.0)])], ids=str)
def test_a_save_that_is_removed_while_it_is_opened_is_loaded_skipped_or_named(
    step: int | None, expected: Any, tmp_path: Path
) -> None:
    save_steps(sx.Checkpoints(tmp_path), 10, 20, 30)
    found = run_ranks(load_while_removed, 1, backend="gloo", args=(str(tmp_path), step))[0]
    assert found in expected or (step == 30 and "step 30 was removed while it was opened" in found)


def test_a_job_logs_what_it_saved_and_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    save_steps(sx.Checkpoints(tmp_path, keep=1), 10, 20)
    assert "removed the save of step 10" in caplog.text
    assert "-> " in caplog.text
