"""Saves by step in the background, when to save, and signals."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from checkpoint_jobs import save_steps, state_of, value_in
from warm_python import warm_python

import statexchange as sx

# In the background


def test_a_state_may_change_after_a_save_in_the_background(tmp_path: Path) -> None:
    with sx.Checkpoints(tmp_path, keep=1) as saves:
        state = state_of(1, 1)
        for step in (10, 20, 30):
            for tensor in state["model"].values():
                tensor.fill_(step)
            state["step"] = step
            saves.save(state, step, background=True)
            for tensor in state["model"].values():
                tensor.fill_(-1)
    assert saves.steps() == [30]
    saves.load(state)
    assert (value_in(state), state["step"]) == (30.0, 30)


def test_a_failure_in_the_background_is_raised_by_the_next_call(tmp_path: Path) -> None:
    saves = sx.Checkpoints(tmp_path)
    save_steps(saves, 10)
    for after in (
        lambda: saves.save(state_of(2), 20),
        lambda: saves.save(state_of(2), 20, background=True),
        lambda: saves.load(state_of(0)),
        lambda: saves.delete(10),
        saves.close,
    ):
        saves.save(state_of(1), 10, background=True)
        with pytest.raises(sx.errors.TargetExistsError, match="step-000000010"):
            after()
        assert saves.steps() == [10]
    saves.save(state_of(2), 20)
    assert saves.steps() == [10, 20]


# When to save


def test_should_save_is_true_every_so_many_steps(tmp_path: Path) -> None:
    saves = sx.Checkpoints(tmp_path, every_steps=100)
    assert [step for step in range(301) if saves.should_save(step)] == [100, 200, 300]
    assert not any(sx.Checkpoints(tmp_path).should_save(step) for step in range(1, 100))


def test_should_save_is_true_every_so_many_seconds(tmp_path: Path) -> None:
    saves = sx.Checkpoints(tmp_path, every_s=0.2, agree_every=5)
    assert not saves.should_save(5)
    time.sleep(0.25)
    assert not saves.should_save(6)  # ranks do not compare their clocks at this step
    assert saves.should_save(10)
    save_steps(saves, 10)
    assert not saves.should_save(15)


def test_a_signal_is_reported_once_and_earlier_handlers_are_restored(tmp_path: Path) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    try:
        with sx.Checkpoints(tmp_path, on_signal=["SIGUSR1"], agree_every=2) as saves:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert [saves.should_save(step) for step in (1, 2, 3, 4)] == [False, True, False, False]
            assert saves.is_stopping
        os.kill(os.getpid(), signal.SIGUSR1)
        assert received == [signal.SIGUSR1] * 2  # while the saves were open, and after
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("ends", [SystemExit, KeyboardInterrupt])
def test_an_earlier_handler_that_ends_the_process_does_not_prevent_the_save(
    ends: type[BaseException], tmp_path: Path
) -> None:
    def end(number: int, frame: object) -> None:
        raise ends

    before = signal.signal(signal.SIGUSR1, end)
    try:
        with sx.Checkpoints(tmp_path, on_signal="SIGUSR1", agree_every=1) as saves:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert saves.should_save(1)
            assert saves.is_stopping
        with pytest.raises(ends):
            os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_signal_handlers_of_closed_saves_are_removed(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    sx.Checkpoints(tmp_path, on_signal=["SIGUSR1", "SIGUSR1"]).close()
    assert signal.getsignal(signal.SIGUSR1) == before
    first = sx.Checkpoints(tmp_path, on_signal="SIGUSR1", agree_every=1)
    second = sx.Checkpoints(tmp_path, on_signal="SIGUSR1", agree_every=1)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert first.should_save(1)
    assert second.should_save(1)
    first.close()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert (first.should_save(2), second.should_save(2)) == (False, True)
    second.close()
    assert signal.getsignal(signal.SIGUSR1) == before


def test_after_a_close_in_a_thread_the_earlier_handler_receives_signals(tmp_path: Path) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    try:
        saves = sx.Checkpoints(tmp_path, on_signal="SIGUSR1")
        thread = threading.Thread(target=saves.close)
        thread.start()
        thread.join()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR1)
        assert received == [signal.SIGUSR1] * 2
    finally:
        signal.signal(signal.SIGUSR1, before)


def report_and_sleep(writer: Connection) -> None:
    writer.send("started")
    time.sleep(60)


def test_a_signal_that_the_job_handles_ends_a_forked_worker(tmp_path: Path) -> None:
    with sx.Checkpoints(tmp_path, on_signal="SIGTERM", agree_every=1) as saves:
        reader, writer = multiprocessing.Pipe()
        worker = multiprocessing.get_context("fork").Process(target=report_and_sleep, args=(writer,))
        worker.start()
        assert reader.recv() == "started"  # a signal before that is lost: Python clears it in a child
        worker.terminate()
        worker.join(10)
        assert worker.exitcode == -signal.SIGTERM
        assert not saves.should_save(1)


CLOSE_IN_A_CHILD = """
import os, sys, threading
import numpy as np
import statexchange as sx

is_done = threading.Event()

def hook(event, args):
    if event == "statexchange.storage" and args[0] == "rename":
        is_done.wait()

sys.addaudithook(hook)
saves = sx.Checkpoints("saves")
future = saves.save({"w": np.ones(3)}, 10, background=True)
pid = os.fork()
if pid == 0:
    saves.close()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
is_done.set()
print(future.result().step)
"""


def test_a_forked_process_does_not_wait_for_a_save_of_its_parent(tmp_path: Path) -> None:
    done = subprocess.run(
        [warm_python(), "-c", CLOSE_IN_A_CHILD], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["7", "10"], done.stderr
