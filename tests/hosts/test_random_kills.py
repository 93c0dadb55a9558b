"""A job that is killed again and again, at any moment: each start goes on from the newest whole state.

All ranks are killed together, after a random time, on one host or on two of which one may lose its memory as well; the
next start has another number of ranks. The seed decides numbers of ranks and times. What a start finds is compared with
the step up to which all ranks had reported a save.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from sweeps import slow
from two_hosts import Outcome, TwoHosts, report, two_hosts

import statexchange as sx

ROWS, COLUMNS = 12, 50_000  # a save takes some milliseconds
KEEP = 2
LAYOUT = {"w": {"dim": 0}}


def rows(comm: sx.comm.Communicator, step: int) -> torch.Tensor:
    """Return this rank's rows of the tensor of a step."""
    size = ROWS // comm.world_size
    first = torch.arange(comm.rank * size, (comm.rank + 1) * size)
    return 100.0 * step + first[:, None] * torch.ones(COLUMNS)


def train(path: str, last: int, memory: bool, background: bool) -> None:
    """Go on from the newest save up to step `last`, with a save at each step; report what was found and saved."""
    comm = sx.init("auto", timeout_s=50.0)
    with sx.Checkpoints(path, keep=KEEP, memory=memory, layout=LAYOUT) as saves:
        state = {"w": rows(comm, 0) - 1, "step": 0}
        found = saves.load(state)
        if found is not None:
            assert torch.equal(state["w"], rows(comm, state["step"]))
        report(["found", state["step"], found is not None and found.num_in_memory > 0])
        for step in range(state["step"] + 1, last + 1):
            state = {"w": rows(comm, step), "step": step}
            time.sleep(0.05)  # trains, so that not every kill comes during a save
            if background:  # which waits for the save of the step before
                saves.save(state, step, background=True)
                report(["saved", step - 1])
            else:
                saves.save(state, step)
                report(["saved", step])
    sx.shutdown()


@dataclass
class Tally:
    """The results of all starts of a job."""

    kills: int = 0
    kills_before_loading: int = 0
    steps: int = 0
    from_memory: int = 0


def words(outcomes: Sequence[Outcome], kind: str) -> list[list[Any]]:
    """Return the reports of one kind, for each rank those of the last start."""
    return [[word for _, word in outcome.reports if word[0] == kind] for outcome in outcomes]


def kill_again_and_again(hosts: TwoHosts, path: Path, seed: int, kills: int, worlds: list[tuple[int, int]]) -> Tally:
    """Start, kill and start again; check after each start what it went on from."""
    choose = random.Random(seed)
    tally, safe, tried = Tally(), 0, 0
    for number in range(kills + 1):
        counts, memory, background = choose.choice(worlds), choose.random() < 0.7, choose.random() < 0.4
        where = f"seed {seed}, start {number}: ranks {counts}, memory {memory}, background {background}"
        is_last = number == kills
        last = safe + 3 if is_last else safe + 10_000
        hosts.counts = counts
        hosts.start(train, str(path), last, memory, background)
        if not is_last:
            if choose.random() < 0.85:  # in the midst of saves and between them, else at any time since the start
                wait_for_saves(hosts, choose.randrange(3))
            time.sleep(choose.uniform(0.0, 0.4))
            for rank in range(hosts.world_size):
                hosts.kill(rank)
            tally.kills += 1
        outcomes = hosts.finish(60.0)
        states = {outcome.state for outcome in outcomes}
        assert states <= ({"ok"} if is_last else {"exited"}), f"{where}\n{hosts.describe(outcomes)}"
        found = [word for of_rank in words(outcomes, "found") for word in of_rank]
        if found:
            steps = {step for _, step, _ in found}
            assert len(steps) == 1, f"{where}: ranks went on from steps {steps}"
            (step,) = steps
            assert safe <= step <= tried, f"{where}: went on from step {step}, saved {safe}, tried {tried}"
            tally.from_memory += found[0][2]
            safe = tried = step
        else:
            tally.kills_before_loading += 1
        saved = words(outcomes, "saved")
        safe = max(safe, min(max((step for _, step in of_rank), default=0) for of_rank in saved))
        # A rank may have saved a step more than it could report, and have begun with the next in the background.
        tried = max([tried, *(step + 2 for of_rank in saved for _, step in of_rank)])
        if found and not any(saved):
            tried = max(tried, step + 2)
        tally.steps = safe
        if not is_last and choose.random() < 0.3:
            hosts.lose_memory(choose.randrange(2))
    return tally


def wait_for_saves(hosts: TwoHosts, number: int) -> None:
    """Return when a rank has loaded what there was, and reported a number of saves."""
    hosts.wait_until(lambda outcomes: any(len(outcome.reports) > number for outcome in outcomes))


ONE_HOST, TWO_HOSTS = [(1, 0), (2, 0), (3, 0)], [(1, 1), (2, 1), (1, 2)]
LONG = [pytest.param(worlds, 100, marks=pytest.mark.long) for worlds in (ONE_HOST, TWO_HOSTS)]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("worlds", "kills"), [(TWO_HOSTS, 1), slow(ONE_HOST, 10), slow(TWO_HOSTS, 10), *LONG], ids=str)
def test_each_start_goes_on_from_the_newest_whole_state(
    worlds: list[tuple[int, int]], kills: int, tmp_path: Path
) -> None:
    seed = int(os.environ.get("STATEXCHANGE_TEST_SEED", "1"))
    with two_hosts(*worlds[0]) as hosts:
        tally = kill_again_and_again(hosts, tmp_path / "saves", seed, kills, worlds)
        print(f"seed {seed}: {tally}")
        assert tally.kills == kills
        assert tally.steps >= 2  # of three, of which a save in the background is reported a step later
        assert tally.from_memory or kills < 100
        left = sorted(os.listdir(tmp_path / "saves"))
        assert all(name.startswith("step-") for name in left), left
        assert len(left) <= KEEP + 1
        for host in range(2):
            copies = hosts.memory_files(host)
            assert len(copies) <= 1, copies
            assert all(os.path.basename(name).startswith("copy-") for name in copies), copies
