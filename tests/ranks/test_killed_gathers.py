"""A rank is killed at each storage call of a gather through a workspace: the other names it; the next one is right."""

from __future__ import annotations

import itertools
import os
import platform
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import assert_same
from forked_jobs import ForkedJobs
from stored import contents_of
from sweeps import slow
from workspaces import commit, filled

import statexchange as sx
from statexchange.processes import Owner
from statexchange.sharding.shards import Box, Shard
from statexchange.storage.publish import open_build
from statexchange.storage.publish.build import NO_PLAN, Build
from statexchange.storage.workspace import Workspace
from statexchange.testing import run_ranks

RANKS = 2


def state_of(rank: int) -> dict[str, torch.Tensor]:
    """Return the state that a rank sends, with bits that only a copy of bytes keeps."""
    counts = torch.arange(5000, dtype=torch.int16) + 1000 * rank
    return {
        "w": counts.to(torch.float32).reshape(50, 100).t(),
        "bits": counts.view(torch.bfloat16),  # NaN of many kinds among them
        "none": torch.empty(0, 3),
        f"own{rank}": torch.tensor(float(rank)),
    }


def gathers(workspace: str, victim: int, kill_at: int) -> list[Any]:
    """Gather; `victim` is killed at a storage call. Return the calls, how many came before the block, and the error."""
    comm = sx.get_communicator()
    comm.barrier()
    calls: list[str] = []
    is_watched = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "statexchange.storage" and is_watched:
            calls.append(arguments[0])
            if (comm.rank, len(calls)) == (victim, kill_at):
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    before_block, error = 0, None
    try:
        with sx.gather_state(state_of(comm.rank), workspace=workspace) as states:
            assert len(states) == (0 if comm.rank else RANKS)
            for state in states:
                expected = state_of(state.rank)
                assert list(state) == list(expected)
                assert_same({name: state[name] for name in expected}, expected)
            before_block = len(calls)
    except sx.errors.PeerError as failure:
        error = [failure.rank, str(failure)]
    is_watched = False
    return [calls, before_block, error]


def fill_with_files_of_others(path: Path) -> Build:
    """Fill a workspace with what no gather may touch: files of users, of other jobs, and of a process that runs.

    Return the gather of that process.
    """
    path.mkdir()
    (path / "notes.txt").write_text("notes")
    (path / "empty").mkdir()
    (path / "data" / "000001").mkdir(parents=True)
    (path / "data" / "000001" / "mine.bin").write_bytes(b"mine")
    (path / "data" / "000001" / f".tmp-{'0' * 16}.{Owner.current().to_name()}").write_bytes(b"being written")
    (path / "link").symlink_to(path / "data")
    (path / "gather-mine").mkdir()
    (path / "gather-mine" / "notes.txt").write_text("notes")
    without_record = path / f".gather-{'1' * 16}.{NO_PLAN}.{'2' * 16}.partial"
    without_record.mkdir()
    (without_record / "rank-00000-of-00002.safetensors").write_bytes(b"whose?")
    shard = Shard("w", "U8", (4,), (Box((0,), (4,)),))
    workspace = Workspace(path)
    for run in ("committed", "pending"):
        content = [filled(shard, b"abcd")]
        name = workspace.write(content, run=run, round=1, rank=0, world_size=1)
        if run == "committed":
            commit(path, name)
    other = open_build(str(path / f"gather-{'3' * 16}"), NO_PLAN, ["x"], check=None)
    other.put("x", b"being gathered")
    return other


JOBS = """
from statexchange.testing import run_ranks
from test_killed_gathers import RANKS, gathers

def job(path):  # the next gather, of two threads: new processes for each rank would take as long as the killed gather
    found = run_ranks(gathers, RANKS, args=(path, -1, 0))
    assert [error for *_, error in found] == [None] * RANKS

serve(job)
"""


@pytest.mark.parametrize(
    ("others", "first", "every"),
    [(True, 3, 15), slow(True, 1, 1), slow(False, 1, 1)],
    ids=["some", "beside others", "alone"],
)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", [0, 1], ids=["root", "sender"])
def test_a_rank_killed_at_any_call_is_named_and_the_next_gather_succeeds(
    victim: int, others: bool, first: int, every: int, jobs: ForkedJobs, sweep_path: Path
) -> None:
    outlived, left = [], []  # numbers of calls: after the end of the other rank's block, and with something left
    for number in itertools.count(first, every):
        path = sweep_path / str(number) / "ws"
        path.parent.mkdir()
        other = fill_with_files_of_others(path) if others else None
        before = contents_of(path)
        killed = (str(path), victim, number)
        outcomes = run_ranks(gathers, RANKS, backend="gloo", args=killed, allow_failure=True, timeout_s=60)
        own, peer = outcomes[victim], outcomes[1 - victim]
        assert peer.state == "ok", (number, str(outcomes))  # it neither hangs nor fails in another way
        _, before_block, error = peer.value
        if own.state == "ok":  # there are fewer calls
            break
        assert own.exit_code == -signal.SIGKILL, (number, str(outcomes))
        if error is None:
            outlived.append(number)
        else:
            assert error[0] == victim, (number, error)
            text = f"rank {victim} on {platform.node()} failed in gather_state ("
            assert error[1].startswith(text), (number, error)
        after = contents_of(path)
        if not after.keys() <= before.keys():
            left.append(number)
        assert "create" in (jobs.run(str(path)) or ()), number  # no clean-up by hand
        assert contents_of(path) == before, number
        if other is not None:
            other.abandon()
    calls, before_block, _ = own.value
    assert min(outlived, default=number) > before_block > 0  # until then the gather is not over
    points = len(range(first, number, every))
    print(f"rank {victim} killed at {points} of {len(calls)} calls, {before_block} of them before the block; ", end="")
    print(f"after the agreement: {outlived}; something left until the next gather: {left}; {sorted(set(calls))}")
