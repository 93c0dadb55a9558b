"""Writers are killed at each of their storage calls, and nothing is lost, mixed or left."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from forked_jobs import ForkedJobs
from programs import require_refusal_of_exchange
from sweeps import slow

import statexchange as sx
from statexchange.report.verify import verify

WRITER = """
import numpy as np
import statexchange as sx
from warm_python import COMMAND_LINE

def write(how, path, value):
    state = {f"t{i}": np.full((6, 4), value, np.float32) for i in range(3)}
    if how == "save":
        sx.save_checkpoint({"model": state, "step": int(value)}, path, overwrite=True)
    else:
        workspace = sx.NFSWorkspace(path, run="r")
        workspace.write_configs_and_weights({"k": value}, state)

serve(write, own=COMMAND_LINE)
"""
WITHOUT_EXCHANGE = f"from seccomp import refuse_exchange\nrefuse_exchange()\n{WRITER}"


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[[bool], Writers]]:
    """Start writers, or return those that run; without `exchange` names cannot be exchanged, as on NFS."""
    started: dict[bool, Writers] = {}

    def get(exchange: bool) -> Writers:
        if not exchange:
            require_refusal_of_exchange()
        if exchange not in started:
            started[exchange] = Writers(WRITER if exchange else WITHOUT_EXCHANGE, "commands")
        return started[exchange]

    with contextlib.ExitStack() as running:
        yield get
        for writers in started.values():
            running.enter_context(writers)


class Writers(ForkedJobs):
    """Starts writers, one after another."""

    def write(self, how: str, path: Path, value: float, kill_at: int = 0) -> list[str] | None:
        """Run a writer; return its calls, or None if it was killed."""
        return self.run(how, str(path), value, kill_at=kill_at)


def value_of(how: str, path: Path) -> float:
    """Return the value that was written, after checking that all that is read has it."""
    weights = {f"t{i}": np.zeros((6, 4), np.float32) for i in range(3)}
    if how == "write":
        config, weights = sx.NFSWorkspace(path, run="r").read_configs_and_weights_from_rank(0)
        found = config["k"]
    else:
        state = {"model": weights, "step": -1}
        sx.load_checkpoint(state, path)
        found = float(state["step"])
        assert verify(path).findings == ()
    assert {float(v) for a in weights.values() for v in np.unique(a)} == {found}
    return found


def calls_of(writers: Writers, how: str, path: Path, writes: int) -> list[str]:
    """Return the storage calls of a writer that comes after `writes` others."""
    for value in range(writes):
        writers.write(how, path, float(value))
    calls = writers.write(how, path, 9.0)
    assert calls is not None
    print(f"{how} after {writes}: {len(calls)} calls")
    assert {"create", "unlink", "sync"} <= set(calls)
    return calls


def call_numbers(writers: Writers, how: str, path: Path, writes: int) -> list[int]:
    """Return the numbers of all storage calls of a writer that comes after `writes` others."""
    return list(range(1, len(calls_of(writers, how, path, writes)) + 1))


# A workspace of rounds


def killed_at(writers: Writers, number: int, path: Path) -> None:
    """Kill a writer at a call; its last calls remove the first of the two rounds that are there."""
    how = "write"
    for value in (0.0, 1.0):
        writers.write(how, path, value)
    assert writers.write(how, path, 2.0, kill_at=number) is None
    assert value_of(how, path) in (1.0, 2.0), number
    writers.write(how, path, 3.0)  # without a clean-up in between
    assert value_of(how, path) == 3.0, number
    writers.write(how, path, 4.0)
    hidden = [p.name for p in path.rglob("*") if p.name.startswith(".")]
    assert hidden == [], number
    assert len(list(path.rglob("*.safetensors"))) == 2, number


def test_a_writer_killed_at_one_of_some_calls_leaves_the_old_round_or_the_new_one(
    start: Callable[[bool], Writers], tmp_path: Path
) -> None:
    writers = start(True)
    calls = calls_of(writers, "write", tmp_path / "trace", 2)
    removals = [number for number, call in enumerate(calls, 1) if call == "unlink"]
    for number in sorted({*range(4, len(calls), max(1, len(calls) // 6)), *removals[-3:]}):
        killed_at(writers, number, tmp_path / str(number))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_writer_killed_at_any_call_leaves_the_old_round_or_the_new_one(
    start: Callable[[bool], Writers], tmp_path: Path
) -> None:
    writers = start(True)
    for number in call_numbers(writers, "write", tmp_path / "trace", 2):
        killed_at(writers, number, tmp_path / str(number))


# A save


EVERY = pytest.mark.parametrize("step", [7, slow(1)], ids=["some", "all"])


@EVERY
@pytest.mark.timeout(900)
@pytest.mark.parametrize("exchange", [True, False])
def test_a_killed_save_leaves_the_old_save_or_the_new_one(
    start: Callable[[bool], Writers], exchange: bool, step: int, sweep_path: Path
) -> None:
    writers = start(exchange)
    found = []
    for number in call_numbers(writers, "save", sweep_path / "trace" / "saved", 1)[::step]:
        path = sweep_path / str(number) / "saved"
        writers.write("save", path, 1.0)
        assert writers.write("save", path, 2.0, kill_at=number) is None
        found.append(value_of("save", path))
        assert writers.write("save", path, 3.0) is not None  # no clean-up by hand
        assert value_of("save", path) == 3.0, number
        assert os.listdir(path.parent) == ["saved"], number
        assert sorted(os.listdir(path)) == ["rank-00000-of-00001.safetensors", "save.json"]
    assert set(found) == {1.0, 2.0}
    assert found == sorted(found)  # once the new one is there, no later kill brings the old one back


@EVERY
@pytest.mark.timeout(900)
def test_a_first_save_that_is_killed_leaves_nothing_that_a_load_takes(
    start: Callable[[bool], Writers], step: int, sweep_path: Path
) -> None:
    writers = start(True)
    published = []
    for number in call_numbers(writers, "save", sweep_path / "trace" / "saved", 0)[::step]:
        path = sweep_path / str(number) / "saved"
        assert writers.write("save", path, 2.0, kill_at=number) is None
        published.append(path.exists())
        if path.exists():
            assert value_of("save", path) == 2.0, number
        else:
            for read in (lambda: sx.load_checkpoint({"step": 0}, path), lambda: sx.open_checkpoint(path)):  # noqa: B023
                with pytest.raises(sx.errors.NotFoundError):
                    read()
        assert writers.write("save", path, 3.0) is not None
        assert value_of("save", path) == 3.0, number
        assert os.listdir(path.parent) == ["saved"], number
    assert published == sorted(published)
    assert not published[0]
