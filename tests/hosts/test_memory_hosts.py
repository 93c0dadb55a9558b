"""Copies of a job's newest save in the memory of two hosts: either of them may be lost with all that it kept.

Jobs are killed at every storage call of a save, which removes an old save and copies the new one into memory, and of a
load from memory.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sweeps import slow
from two_hosts import report, two_hosts

import statexchange as sx

ROWS, LAYOUT = 12, {"w": {"dim": 0}}


def rows(comm: sx.comm.Communicator, value: float) -> torch.Tensor:
    """Return this rank's rows of a tensor, of several windows each."""
    size = ROWS // comm.world_size
    first = torch.arange(comm.rank * size, (comm.rank + 1) * size)
    return value + first[:, None] * torch.ones(300_000)


def saves(path: str) -> list[str]:
    """Save two steps; return the names of the files that this host keeps in memory."""
    comm = sx.init("auto", timeout_s=50.0)
    checkpoints = sx.Checkpoints(path, memory=True, layout=LAYOUT)
    for step in (1, 2):
        checkpoints.save({"w": rows(comm, 100.0 * step), "step": step}, step)
    comm.barrier()
    kept = sorted(str(found.name) for found in Path("/dev/shm").glob("statexchange-*/copy-*/rank-*"))
    sx.shutdown()
    return kept


def loads(path: str, lost: str) -> list[Any]:
    """Load after the hosts named in `lost` have lost their memory; return the step, and whether it came from memory."""
    comm = sx.init("auto", timeout_s=50.0)
    if comm.hosts[comm.rank] in lost.split() and comm.local_rank == 0:
        shutil.rmtree(f"/dev/shm/statexchange-{os.getuid()}")
    comm.barrier()
    state = {"w": rows(comm, 0.0) - 1, "step": -1}
    found = sx.Checkpoints(path, memory=True, layout=LAYOUT).load(state)
    assert found is not None
    assert torch.equal(state["w"], rows(comm, 100.0 * state["step"]))
    comm.barrier()
    assert not list(Path("/dev/shm").glob("statexchange-*/.copy-*"))
    sx.shutdown()
    return [state["step"], found.num_in_memory > 0]


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["", "anna", "bert"])
def test_a_save_is_loaded_from_memory_after_one_host_has_lost_its_own(lost: str, tmp_path: Path) -> None:
    path = str(tmp_path / "saves")
    with two_hosts(2, 1) as hosts:
        names = [f"rank-{rank:05d}-of-00003.safetensors" for rank in range(3)]
        assert hosts.run(saves, path, timeout_s=100) == [names] * 3
        assert hosts.run(loads, path, lost, timeout_s=100) == [[2, True]] * 3


@pytest.mark.slow
def test_without_the_memory_of_both_hosts_the_disk_is_read(tmp_path: Path) -> None:
    path = str(tmp_path / "saves")
    with two_hosts(1, 2) as hosts:
        hosts.run(saves, path, timeout_s=100)
        shutil.rmtree(f"{path}/step-000000001")
        assert hosts.run(loads, path, "anna bert", timeout_s=100) == [[2, False]] * 3


# Kills of all ranks

WORLDS = [(1, 1), (2, 1), (1, 2)]


def goes_on(path: str, verb: str, node: int, stop_at: int) -> list[Any]:
    """Load, and save the next step; return the step that was found, and whether it was in memory.

    The first rank of a host stops at a storage call of the load or of the save, as `verb` says, until it is killed.
    """
    comm = sx.init("auto", timeout_s=50.0)
    is_watched = comm.node_rank == node and comm.local_rank == 0
    now, calls = "", 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal calls
        if event == "statexchange.storage" and is_watched and now == verb:
            calls += 1
            if calls == stop_at:
                report(["at", args[0]])
                signal.pause()

    sys.addaudithook(hook)
    with sx.Checkpoints(path, keep=2, memory=True, layout=LAYOUT) as checkpoints:
        state = {"w": rows(comm, 0.0) - 1, "step": 0}
        now = "load"
        found = checkpoints.load(state)
        now = ""
        if found is not None:
            assert torch.equal(state["w"], rows(comm, 100.0 * state["step"]))
        step = state["step"] + 1
        now = "save"
        checkpoints.save({"w": rows(comm, 100.0 * step), "step": step}, step)
        now = ""
    comm.barrier()
    sx.shutdown()
    return [step - 1, found is not None and found.num_in_memory > 0]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("every", [slow(25), pytest.param(1, marks=pytest.mark.long)], ids=["some", "all"])
@pytest.mark.parametrize("verb", ["save", "load"])
@pytest.mark.parametrize("node", [0, 1])
def test_a_job_whose_ranks_are_all_killed_at_any_call_goes_on_from_its_newest_save(
    verb: str, node: int, every: int, tmp_path: Path
) -> None:
    path = tmp_path / "saves"
    worlds = itertools.cycle(WORLDS)
    calls = []
    with two_hosts(*WORLDS[0]) as hosts:
        for step in range(3):
            assert hosts.run(goes_on, str(path), "", 0, 0, timeout_s=100) == [[step, step > 0]] * 2
        safe = 3
        for number in itertools.count(1, every):
            hosts.counts = next(worlds)
            if verb == "load" and number % 2:
                hosts.lose_memory(1 - node)  # the files are sent by the other host
            hosts.start(goes_on, str(path), verb, node, number)
            hosts.wait_until(lambda outcomes: any(word[0] == "at" for one in outcomes for _, word in one.reports))
            stopped = [word[1] for one in hosts.outcomes for _, word in one.reports]
            for rank in range(hosts.world_size if stopped else 0):
                hosts.kill(rank)
            outcomes = hosts.finish(60.0)
            if not stopped:  # there are fewer calls
                assert {outcome.state for outcome in outcomes} == {"ok"}, hosts.describe(outcomes)
                break
            calls += stopped
            hosts.counts = next(worlds)  # no clean-up by hand
            found = hosts.run(goes_on, str(path), "", 0, 0, timeout_s=100)
            (step, is_in_memory) = found[0]
            assert found == [[step, is_in_memory]] * hosts.world_size, number
            assert step in ((safe, safe + 1) if verb == "save" else (safe,)), number
            assert is_in_memory or verb == "save", number
            safe = step + 1
            left = sorted(os.listdir(path))
            assert left == [f"step-{safe - 1:09d}", f"step-{safe:09d}"], number
            for host in range(2):
                (name,) = hosts.memory_files(host)
                assert os.path.basename(name).startswith("copy-"), (number, name)
    print(f"killed at {len(calls)} calls: {sorted(set(calls))}")
    assert calls
