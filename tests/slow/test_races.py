"""Races of publishers and readers at random moments: one of two publishers wins, nothing is mixed, lost or left."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import statexchange as sx
from statexchange.report.verify import verify

pytestmark = pytest.mark.slow
RUNS = 100
STORE_RUNS = 5  # each race is a few hundred requests

ACTOR = """
import json, sys, time
import numpy as np
import statexchange as sx

def values(arrays):
    return sorted({float(v) for _, a in arrays for v in np.unique(a)})

def publish(out, value, overwrite):
    state = {f"t{i}": np.full((64, 40), value, np.float32) for i in range(4)}
    sx.export_checkpoint(state, out, overwrite=overwrite, max_shard_size="20KB")

def merge(source, out, overwrite):
    sx.merge_checkpoint(source, out, overwrite=overwrite)

def read(out):
    with sx.open_checkpoint(out) as checkpoint:
        return values((name, tensor.read()) for name, tensor in checkpoint.items())

def load(out):
    state = {f"t{i}": np.zeros((64, 40), np.float32) for i in range(4)}
    sx.load_checkpoint(state, out)
    return values(state.items())

def save(path, value, overwrite):
    state = {f"t{i}": np.full((64, 40), value, np.float32) for i in range(4)}
    sx.save_checkpoint(state, path, overwrite=overwrite)

for line in sys.stdin:
    name, arguments, at = json.loads(line)
    time.sleep(max(0.0, at - time.monotonic()))
    try:
        answer = ["ok", globals()[name](*arguments)]
    except sx.StateExchangeError as error:
        answer = [type(error).__name__, str(error)]
    print(json.dumps(answer), flush=True)
"""


class Actor:
    """A process that runs calls, each at a given time of a clock that all processes share."""

    def __init__(self, **environ: str) -> None:
        command = [sys.executable, "-c", ACTOR]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environ}
        )

    def start(self, name: str, *arguments: Any, at: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, arguments, at]) + "\n")
        self._process.stdin.flush()

    def answer(self) -> list[Any]:
        assert self._process.stdout is not None
        return list(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def actors() -> Iterator[list[Actor]]:
    found = [Actor(), Actor(), Actor()]
    yield found
    for actor in found:
        actor.close()


def at_once(calls: list[tuple[Actor, str, tuple[Any, ...]]], spread_s: float) -> list[list[Any]]:
    """Start calls at random moments within `spread_s`; return their results."""
    import time

    began = time.monotonic() + 0.002
    for actor, name, arguments in calls:
        actor.start(name, *arguments, at=began + random.random() * spread_s)
    return [actor.answer() for actor, _, _ in calls]


def values(out: str | Path) -> list[float]:
    with sx.open_checkpoint(out) as checkpoint:
        return sorted({float(v) for tensor in checkpoint.values() for v in np.unique(tensor.read())})


def test_two_publishers_to_a_new_name(actors: list[Actor], tmp_path: Path) -> None:
    for number in range(RUNS):
        out = str(tmp_path / str(number) / "out")
        calls = [(actor, "publish", (out, float(value), False)) for value, actor in enumerate(actors[:2], 1)]
        answers = at_once(calls, 0.02)
        winners = [float(value) for value, answer in enumerate(answers, 1) if answer[0] == "ok"]
        losers = [answer for answer in answers if answer[0] != "ok"]
        assert (len(winners), [name for name, _ in losers]) == (1, ["TargetExistsError"]), answers
        assert (values(out), verify(out).findings, os.listdir(tmp_path / str(number))) == (winners, (), ["out"])


def test_two_publishers_that_overwrite_and_a_reader(actors: list[Actor], tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    sx.export_checkpoint({f"t{i}": np.zeros((64, 40), np.float32) for i in range(4)}, out)
    tally: Counter[str] = Counter()
    for number in range(RUNS):
        read = ("read", "load")[number % 2]
        calls: list[tuple[Actor, str, tuple[Any, ...]]] = [
            (actors[0], "publish", (out, 2.0 * number + 1, True)),
            (actors[1], "publish", (out, 2.0 * number + 2, True)),
            (actors[2], read, (out,)),
        ]
        before = values(out)
        *published, seen = at_once(calls, 0.03)
        won = [2.0 * number + 1 + index for index, answer in enumerate(published) if answer[0] == "ok"]
        assert won, published
        assert all(answer[0] in ("ok", "TargetExistsError") for answer in published), published
        assert seen[0] == "ok", seen
        assert seen[1] in ([before[0]], *([value] for value in won)), (seen, before, won)
        assert values(out)[0] in won
        assert (verify(out).findings, os.listdir(tmp_path)) == ((), ["out"])
        tally["both, one after the other" if len(won) == 2 else "one"] += 1
    print(dict(tally))


def test_two_savers_to_a_new_name(actors: list[Actor], tmp_path: Path) -> None:
    for number in range(RUNS):
        out = str(tmp_path / str(number) / "saved")
        calls = [(actor, "save", (out, float(value), False)) for value, actor in enumerate(actors[:2], 1)]
        answers = at_once(calls, 0.02)
        winners = [float(value) for value, answer in enumerate(answers, 1) if answer[0] == "ok"]
        losers = [answer for answer in answers if answer[0] != "ok"]
        assert (len(winners), [name for name, _ in losers]) == (1, ["TargetExistsError"]), answers
        assert (values(out), verify(out).findings, os.listdir(tmp_path / str(number))) == (winners, (), ["saved"])


def test_two_savers_that_overwrite_and_a_reader(actors: list[Actor], tmp_path: Path) -> None:
    out = str(tmp_path / "saved")
    sx.save_checkpoint({f"t{i}": np.zeros((64, 40), np.float32) for i in range(4)}, out)
    said: Counter[str] = Counter()
    for number in range(RUNS):
        read = ("read", "load")[number % 2]
        calls: list[tuple[Actor, str, tuple[Any, ...]]] = [
            (actors[0], "save", (out, 2.0 * number + 1, True)),
            (actors[1], "save", (out, 2.0 * number + 2, True)),
            (actors[2], read, (out,)),
        ]
        before = values(out)
        *saved, seen = at_once(calls, 0.03)
        won = [2.0 * number + 1 + index for index, answer in enumerate(saved) if answer[0] == "ok"]
        assert won, saved
        assert all(answer[0] in ("ok", "TargetExistsError") for answer in saved), saved
        assert seen[0] == "ok", seen
        assert seen[1] in ([before[0]], *([value] for value in won)), (seen, before, won)
        assert values(out)[0] in won
        assert (verify(out).findings, os.listdir(tmp_path)) == ((), ["saved"])
        said["both, one after the other" if len(won) == 2 else "one"] += 1
    print(dict(said))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("overwrite", [False, True])
def test_two_publishers_to_one_place_in_an_object_store(overwrite: bool, s3: str, tmp_path: Path) -> None:
    actors = [Actor(), Actor()]
    try:
        for value in (1, 2):
            sx.export_checkpoint(
                {f"t{i}": np.full((64, 40), value, np.float32) for i in range(4)}, tmp_path / str(value)
            )
        tally: Counter[str] = Counter()
        for number in range(STORE_RUNS):
            out = f"{s3}/{number}"
            if overwrite:
                sx.merge_checkpoint(tmp_path / "1", out)
            calls = [
                (actor, "merge", (str(tmp_path / str(value)), out, overwrite)) for value, actor in enumerate(actors, 1)
            ]
            answers = at_once(calls, 0.1)
            won = [float(value) for value, answer in enumerate(answers, 1) if answer[0] == "ok"]
            assert won, answers
            assert overwrite or len(won) == 1
            assert all(answer[0] in ("ok", "TargetExistsError") for answer in answers), answers
            assert values(out)[0] in won
            assert len(values(out)) == 1
            assert not verify(out).findings
            tally["both, one after the other" if len(won) == 2 else "one"] += 1
        print(dict(tally))
    finally:
        for actor in actors:
            actor.close()
