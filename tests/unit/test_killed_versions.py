"""Publishers, subscribers and prunes of versions are killed at each storage call: nothing wrong is read, nobody waits.

A publisher begins a run, publishes a full version, deltas and a full one, and removes old versions. A subscriber stages
two versions. After each kill a reader finds a whole version with the bytes that were published under its number, and
the next publisher and the next subscriber go on by themselves. In a directory, and in object stores.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from disk_stores import use_object_stores
from forked_jobs import ForkedJobs
from sweeps import slow, some

import statexchange as sx
from statexchange.storage import versions

PROGRAM = """
import os
import torch
import statexchange as sx
from disk_stores import import_s3, use_object_stores
from statexchange.checkpoint import version_retention

version_retention.GRACE_S = 0.0
use_object_stores()
if "AWS_ENDPOINT_URL" in os.environ:
    import_s3()

def weights(value, number):
    state = {"w": torch.zeros(3000), "b": torch.zeros(4)}
    state["w"][number] = value
    state["b"] += number
    return state

def work(how, path, cache, value, count):
    if how == "prune":
        version_retention.prune_versions(path, keep=1)
        return
    if how in ("publish", "keep"):
        options = {"keep": 2, "full_every": 3} if how == "publish" else {"keep": count, "full_every": 2}
        with sx.Publisher(path, **options) as publisher:
            for number in range(1, count + 1):
                publisher.publish(weights(value, number), number)
        return
    with sx.Subscriber(path, cache=cache) as subscriber:
        for number in (count - 1, count):
            with subscriber.stage(subscriber.wait(version=number, timeout_s=0)) as staged:
                staged.load_into(weights(0.0, 0))

serve(work)
"""
COUNT = 5


class Trips:
    """Runs jobs on one directory of versions after another, each with a cache of its own."""

    def __init__(self, jobs: ForkedJobs, base: str, folder: Path, every: int) -> None:
        self._jobs, self._base, self._folder, self._every = jobs, base, folder, every

    def path(self, name: object) -> str:
        return f"{self._base}/updates-{name}"

    def cache(self, name: object) -> str:
        return str(self._folder / f"cache-{name}")

    def run(self, how: str, name: object, value: float, *, kill_at: int = 0) -> list[str] | None:
        """Run a job; return its storage calls, or None if it was killed."""
        return self._jobs.run(how, self.path(name), self.cache(name), value, COUNT, kill_at=kill_at)

    def kill(self, how: str, number: int, value: float) -> None:
        """Kill a job at a storage call; a few jobs make one or two fewer, as S3 dates its objects by the second."""
        calls = self.run(how, number, value, kill_at=number)
        assert calls is None or number > len(calls)

    def numbers(self, how: str, before: str = "publish") -> list[int]:
        """Return the numbers of the storage calls, of a job after a publisher, at which to kill it."""
        assert self.run(before, "first", 1.0) is not None
        calls = self.run(how, "first", 2.0)
        assert calls is not None
        print(f"{how}, {self._base.partition('://')[0]}: {len(calls)} calls")
        return list(some(range(1, len(calls) + 1), self._every))

    def newest(self, name: object) -> tuple[float, int]:
        """Return the value and the number of the newest version, after checking all that is read."""
        live = {"w": torch.zeros(3000), "b": torch.zeros(4)}
        with sx.Subscriber(self.path(name), cache=self.cache(name)) as subscriber:
            version = subscriber.wait(timeout_s=0)
            with subscriber.stage(version) as staged:
                staged.load_into(live)
        value = live["w"][version.number].item()
        expected = torch.zeros(3000)
        expected[version.number] = value
        assert torch.equal(live["w"], expected)
        assert torch.equal(live["b"], torch.full((4,), float(version.number)))
        return value, version.number

    def left(self, name: object) -> tuple[set[str], list[str]]:
        """Return the versions that have a file, by run and name, and the hidden files, without those of leases."""
        system, path = fsspec.core.url_to_fs(self.path(name))
        system.invalidate_cache()
        parts = [file.removeprefix(path).strip("/").split("/") for file in system.find(path)]
        whole = {"/".join(part[:2]) for part in parts if part[1].startswith("weight_v")}
        return whole, ["/".join(part) for part in parts if part[-1].startswith(".")]


# Requests to S3 take longest.
SWEEPS = [("directory", 24), ("disk", 24), slow(("directory", 4)), slow(("disk", 4)), slow(("s3", 60))]
EACH = [pytest.param((store, 1), marks=pytest.mark.long) for store in ("directory", "disk", "s3")]


@pytest.fixture(params=[*SWEEPS, *EACH], ids=lambda param: f"{param[0]}-{param[1]}")
def trips(request: pytest.FixtureRequest, sweep_path: Path) -> Iterator[Trips]:
    """Return the trips of a sweep: at which store, and at each of how many calls a job is killed."""
    use_object_stores()
    kind, every = request.param
    bases = {"directory": str(sweep_path), "disk": f"disk://{sweep_path}"}
    base = bases.get(kind) or request.getfixturevalue("s3")
    with ForkedJobs(PROGRAM) as jobs:
        yield Trips(jobs, base, sweep_path, every)


@pytest.mark.timeout(7200)
def test_a_killed_publisher_leaves_whole_versions(trips: Trips) -> None:
    seen = set()
    for number in trips.numbers("publish"):
        assert trips.run("publish", number, 1.0) is not None
        trips.kill("publish", number, 2.0)
        value, newest = trips.newest(number)
        assert (value, newest) == (1.0, COUNT) or value == 2.0, number
        seen.add((value, newest))
        assert trips.run("publish", number, 3.0) is not None, number
        assert trips.newest(number) == (3.0, COUNT), number
        # What the killed one left is gone once the run after it has removed old versions, but for empty runs.
        run = versions.current_run(trips.path(number))
        kept = {f"{run}/{versions.version_name(kept)}" for kept in (COUNT - 1, COUNT)}
        assert trips.left(number) == (kept, []), number
    assert len(seen) > 2


@pytest.mark.timeout(7200)
def test_a_killed_subscriber_leaves_a_cache_that_others_use(trips: Trips) -> None:
    for number in trips.numbers("subscribe"):
        assert trips.run("publish", number, 1.0) is not None
        trips.kill("subscribe", number, 0.0)
        assert trips.newest(number) == (1.0, COUNT), number
        assert trips.run("subscribe", number, 0.0) is not None, number
        assert trips.run("publish", number, 2.0) is not None, number
        assert trips.newest(number) == (2.0, COUNT), number


@pytest.mark.timeout(7200)
def test_a_killed_prune_leaves_whole_versions(trips: Trips) -> None:
    for number in trips.numbers("prune", before="keep"):
        assert trips.run("keep", number, 1.0) is not None
        trips.kill("prune", number, 0.0)
        assert trips.newest(number) == (1.0, COUNT), number
        assert trips.run("prune", number, 0.0) is not None, number
        run = versions.current_run(trips.path(number))
        assert trips.left(number) == ({f"{run}/{versions.version_name(COUNT)}"}, []), number
        assert trips.run("publish", number, 2.0) is not None, number
        assert trips.newest(number) == (2.0, COUNT), number
