"""Two processes publish and one reads, at random moments: nothing is mixed, lost or left."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from warm_python import warm_python

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

def state_of(value):
    return {f"t{i}": np.full((64, 40), value, np.float32) for i in range(4)}

def publish(out, value, overwrite):
    sx.export_checkpoint(state_of(value), out, overwrite=overwrite, max_shard_size="20KB")

def merge(source, out, overwrite):
    sx.merge_checkpoint(source, out, overwrite=overwrite)

def read(out):
    with sx.open_checkpoint(out) as checkpoint:
        return values((name, tensor.read()) for name, tensor in checkpoint.items())

def load(out):
    state = state_of(0.0)
    sx.load_checkpoint(state, out)
    return values(state.items())

def save(path, value, overwrite):
    sx.save_checkpoint(state_of(value), path, overwrite=overwrite)

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
        command = [warm_python("commands"), "-c", ACTOR]
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
    began = time.monotonic() + 0.002
    for actor, name, arguments in calls:
        actor.start(name, *arguments, at=began + random.random() * spread_s)
    return [actor.answer() for actor, _, _ in calls]


def state_of(value: float) -> dict[str, Any]:
    return {f"t{i}": np.full((64, 40), value, np.float32) for i in range(4)}


def values(out: str | Path) -> list[float]:
    """Return the different values of all tensors of a checkpoint."""
    with sx.open_checkpoint(out) as checkpoint:
        return sorted({float(v) for tensor in checkpoint.values() for v in np.unique(tensor.read())})


@pytest.mark.parametrize("verb", ["publish", "save"])
def test_one_of_two_processes_that_publish_to_a_new_name_wins(verb: str, actors: list[Actor], tmp_path: Path) -> None:
    for number in range(RUNS):
        out = str(tmp_path / str(number) / "out")
        calls = [(actor, verb, (out, float(value), False)) for value, actor in enumerate(actors[:2], 1)]
        answers = at_once(calls, 0.02)
        winners = [float(value) for value, answer in enumerate(answers, 1) if answer[0] == "ok"]
        losers = [answer for answer in answers if answer[0] != "ok"]
        assert (len(winners), [name for name, _ in losers]) == (1, ["TargetExistsError"]), answers
        assert (values(out), verify(out).findings, os.listdir(tmp_path / str(number))) == (winners, (), ["out"])


@pytest.mark.parametrize("verb", ["publish", "save"])
def test_a_reader_beside_two_processes_that_overwrite_sees_one_whole_state(
    verb: str, actors: list[Actor], tmp_path: Path
) -> None:
    out = str(tmp_path / "out")
    {"publish": sx.export_checkpoint, "save": sx.save_checkpoint}[verb](state_of(0.0), out)
    tally: Counter[str] = Counter()
    for number in range(RUNS):
        calls: list[tuple[Actor, str, tuple[Any, ...]]] = [
            (actors[0], verb, (out, 2.0 * number + 1, True)),
            (actors[1], verb, (out, 2.0 * number + 2, True)),
            (actors[2], ("read", "load")[number % 2], (out,)),
        ]
        before = values(out)
        *published, seen = at_once(calls, 0.03)
        won = [2.0 * number + 1 + index for index, answer in enumerate(published) if answer[0] == "ok"]
        assert won, published
        assert all(answer[0] in ("ok", "TargetExistsError") for answer in published), published
        assert seen[0] == "ok", seen
        assert seen[1] in (before, *([value] for value in won)), (seen, before, won)
        (after,) = values(out)
        assert after in won
        assert (verify(out).findings, os.listdir(tmp_path)) == ((), ["out"])
        tally["both, one after the other" if len(won) == 2 else "one"] += 1
    print(dict(tally))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("overwrite", [False, True])
def test_two_processes_that_publish_to_one_place_in_an_object_store_do_not_mix(
    overwrite: bool, s3: str, tmp_path: Path
) -> None:
    actors = [Actor(), Actor()]
    try:
        for value in (1, 2):
            sx.export_checkpoint(state_of(value), tmp_path / str(value))
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
            (after,) = values(out)
            assert after in won
            assert not verify(out).findings
            tally["both, one after the other" if len(won) == 2 else "one"] += 1
        print(dict(tally))
    finally:
        for actor in actors:
            actor.close()
