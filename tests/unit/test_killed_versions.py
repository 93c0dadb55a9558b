"""Publishers and subscribers of versions are killed at each storage call: nothing wrong is read, and nobody waits.

A publisher begins a run, publishes a full version, deltas and a full one, and removes old versions. A subscriber stages
two versions. After each kill a reader finds a whole version with the bytes that were published under its number, and
the next publisher and the next subscriber go on by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forked_jobs import ForkedJobs
from sweeps import EVERY, some

import statexchange as sx
from statexchange.storage import versions

PROGRAM = """
import torch
import statexchange as sx
from statexchange.checkpoint import version_retention

version_retention.GRACE_S = 0.0

def weights(value, number):
    state = {"w": torch.zeros(3000), "b": torch.zeros(4)}
    state["w"][number] = value
    state["b"] += number
    return state

def work(how, path, value, count):
    if how == "publish":
        with sx.Publisher(path, keep=2, full_every=3) as publisher:
            for number in range(1, count + 1):
                publisher.publish(weights(value, number), number)
        return
    with sx.Subscriber(path, cache=path + "-cache") as subscriber:
        for number in (count - 1, count):
            with subscriber.stage(subscriber.wait(version=number, timeout_s=0)) as staged:
                staged.load_into(weights(0.0, 0))

serve(work)
"""
COUNT = 5


@pytest.fixture(scope="module")
def jobs() -> Iterator[ForkedJobs]:
    with ForkedJobs(PROGRAM, "torch") as started:
        yield started


def read_newest(path: Path) -> tuple[float, int]:
    """Return the value and the number of the newest version, after checking all that is read."""
    live = {"w": torch.zeros(3000), "b": torch.zeros(4)}
    with sx.Subscriber(path, cache=f"{path}-cache") as subscriber:
        version = subscriber.wait(timeout_s=0)
        with subscriber.stage(version) as staged:
            staged.load_into(live)
    value = live["w"][version.number].item()
    expected = torch.zeros(3000)
    expected[version.number] = value
    assert torch.equal(live["w"], expected)
    assert torch.equal(live["b"], torch.full((4,), float(version.number)))
    return value, version.number


def calls_of(jobs: ForkedJobs, how: str, path: Path) -> list[int]:
    """Return the numbers of the storage calls of a job that comes after a publisher."""
    assert jobs.run("publish", str(path), 1.0, COUNT) is not None
    calls = jobs.run(how, str(path), 2.0, COUNT)
    assert calls is not None
    print(f"{how}: {len(calls)} calls")
    return list(range(1, len(calls) + 1))


@EVERY
def test_a_killed_publisher_leaves_whole_versions(jobs: ForkedJobs, tmp_path: Path, every: int) -> None:
    seen = set()
    for number in some(calls_of(jobs, "publish", tmp_path / "updates"), every):
        path = tmp_path / f"updates-{number}"
        assert jobs.run("publish", str(path), 1.0, COUNT) is not None
        assert jobs.run("publish", str(path), 2.0, COUNT, kill_at=number) is None
        value, newest = read_newest(path)
        assert (value, newest) == (1.0, COUNT) or value == 2.0, number
        seen.add((value, newest))
        assert jobs.run("publish", str(path), 3.0, COUNT) is not None, number
        assert read_newest(path) == (3.0, COUNT), number
        # What the killed one left is gone once the run after it has removed old versions, but for empty runs.
        run = versions.current_run(str(path))
        assert [version.parent.name for version in sorted(path.glob("*/weight_v*"))] == [run, run], number
        hidden = {file.name for file in path.rglob(".*")} - {".leases"}
        assert hidden == set(), number
    assert len(seen) > 2


@EVERY
def test_a_killed_subscriber_leaves_a_cache_that_others_use(jobs: ForkedJobs, tmp_path: Path, every: int) -> None:
    for number in some(calls_of(jobs, "subscribe", tmp_path / "updates"), every):
        path = tmp_path / f"updates-{number}"
        assert jobs.run("publish", str(path), 1.0, COUNT) is not None
        assert jobs.run("subscribe", str(path), 0.0, COUNT, kill_at=number) is None
        assert read_newest(path) == (1.0, COUNT), number
        assert jobs.run("subscribe", str(path), 0.0, COUNT) is not None, number
        assert jobs.run("publish", str(path), 2.0, COUNT) is not None, number
        assert read_newest(path) == (2.0, COUNT), number
