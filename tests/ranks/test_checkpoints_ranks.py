"""Saves by step of several ranks: ranks that differ, and one signal that stops all."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from checkpoint_jobs import load_rows, save_rows, state_of
from scripts import HOME, warm_command
from starting import THREADS_AND_PROCESSES
from stored import entries
from sweeps import slow

import statexchange as sx
from statexchange.testing import run_ranks

# Several ranks


@pytest.mark.parametrize("backend", THREADS_AND_PROCESSES)
def test_another_number_of_ranks_goes_on_from_the_newest_save(backend: str, tmp_path: Path) -> None:
    path = str(tmp_path)
    assert run_ranks(load_rows, 2, backend=backend, args=(path,)) == [None, None]
    for world_size, step in ((2, 10), (3, 20), (1, 30), (4, 40)):
        run_ranks(save_rows, world_size, backend=backend, args=(path, step))
        assert run_ranks(load_rows, 2, backend=backend, args=(path,)) == [step, step]
    assert sx.Checkpoints(tmp_path).steps() == [20, 30, 40]


def save_own_step(path: str) -> None:
    sx.Checkpoints(path).save(state_of(1), 10 + sx.get_rank())


def test_ranks_that_save_different_steps_get_an_error(tmp_path: Path) -> None:
    outcomes = run_ranks(save_own_step, 2, args=(str(tmp_path),), allow_failure=True)
    assert set(outcomes.errors.values()) == {"InvalidArgumentError"}
    for text in outcomes.messages.values():
        assert "the name of the save is step-000000010 on rank 0 and step-000000011 on rank 1" in text
    assert entries(tmp_path) == []


def save_in_the_background_on_rank_0(path: str) -> str:
    saves = sx.Checkpoints(path)
    with pytest.raises(sx.errors.MismatchError) as caught:
        for step in (10, 20):
            saves.save(state_of(step), step, background=sx.get_rank() == 0)
    return str(caught.value)


@pytest.mark.parametrize("backend", ["threads", slow("gloo")])
def test_ranks_that_differ_in_background_get_an_error(backend: str, tmp_path: Path) -> None:
    for text in run_ranks(save_in_the_background_on_rank_0, 2, backend=backend, args=(str(tmp_path),), timeout_s=30):
        assert re.search(r"rank 0 called Checkpoints\.save .*; rank 1 called Checkpoints\.save ", text), text


def save_with_metrics_of_root(path: str) -> list[int]:
    saves = sx.Checkpoints(path, keep=1, best=("loss", "min"))
    for step, loss in ((10, 0.1), (20, 0.3), (30, 0.2)):
        saves.save(state_of(step), step, metrics={"loss": loss} if sx.get_rank() == 0 else None)
    return saves.steps()


def test_other_ranks_need_no_metrics(tmp_path: Path) -> None:
    run_ranks(save_with_metrics_of_root, 2, args=(str(tmp_path),))
    assert sx.Checkpoints(tmp_path).steps() == [10, 30]


def gives_text_as_step_on_one_rank(path: str) -> str:
    saves = sx.Checkpoints(path)
    with pytest.raises(sx.errors.InvalidArgumentError) as caught:
        saves.save(state_of(1), 7 if sx.get_rank() == 0 else "7")  # type: ignore[call-overload]
    return str(caught.value)


def test_a_wrong_step_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    for text in run_ranks(gives_text_as_step_on_one_rank, 2, args=(str(tmp_path),)):
        assert "step must be a whole number, not '7'" in text


def failure_of_the_earlier_save(path: str) -> str:
    """Return the error that the next save raises if one in the background has failed, of which only rank 0 asks."""
    saves = sx.Checkpoints(path)
    saves.save(state_of(1), 10)
    future = saves.save(state_of(2), 10, background=True)
    if sx.get_rank() == 0:
        assert isinstance(future.exception(), sx.errors.TargetExistsError)
    try:
        saves.save(state_of(3), 20)
    except sx.errors.TargetExistsError as error:
        return str(error)
    return "saved"


def test_a_failure_in_the_background_is_raised_on_all_ranks_by_the_same_call(tmp_path: Path) -> None:
    first, second = run_ranks(failure_of_the_earlier_save, 2, args=(str(tmp_path),))
    assert "step-000000010" in first
    assert first == second


def stop_at(path: str) -> tuple[list[int], bool]:
    """Return the steps at which ranks save, and whether they stop; the last rank receives a signal at step 13."""
    with sx.Checkpoints(path, every_steps=10, on_signal="SIGUSR1", agree_every=4) as saves:
        saved = []
        for step in range(1, 31):
            if step == 13 and sx.get_rank() == 2:
                os.kill(os.getpid(), signal.SIGUSR1)
            if saves.should_save(step):
                saved.append(step)
            if saves.is_stopping:
                break
        return saved, saves.is_stopping


def test_a_signal_to_one_rank_stops_all_at_one_step(tmp_path: Path) -> None:
    assert run_ranks(stop_at, 3, backend="gloo", args=(str(tmp_path),)) == [([10, 16], True)] * 3


@pytest.mark.parametrize(
    "launcher", [slow(("torchrun", "--nproc-per-node", "2")), ("python",)], ids=["torchrun", "alone"]
)
def test_a_preempted_job_saves_and_goes_on(launcher: tuple[str, ...], tmp_path: Path) -> None:
    script = HOME / "tools/examples/preempted.py"
    words, environ = warm_command(launcher, script.read_text())
    command = [*words, script, "saves"]
    with subprocess.Popen([*command, "100000"], cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline().startswith("begins at step 0")
        time.sleep(0.5)
        job.send_signal(signal.SIGTERM)
        (step,) = {int(number) for number in re.findall(r"ends at step (\d+)", job.stdout.read())}
    assert sx.Checkpoints(tmp_path / "saves").latest() == step
    assert step % 5 == 0
    again = [*command, str(step + 7)]
    done = subprocess.run(again, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)
    assert set(re.findall(r"(begins|ends) at step (\d+)", done.stdout)) == {
        ("begins", str(step)),
        ("ends", str(step + 7)),
    }, done.stderr
    assert sx.Checkpoints(tmp_path / "saves").latest() == step + 7
