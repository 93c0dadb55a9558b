"""Saves at an fsspec URL over several ranks: kills of one rank and of all, failures of a store."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from checkpoint_jobs import LAYOUT, ROW_JOBS, load_rows, save_rows, shard_of, state_of
from disk_stores import DiskFileSystem, names_at, uploads_in, use_object_stores
from forked_jobs import ForkedJobs
from saves_at_urls import WHOLE, step_url
from sweeps import slow, some

import statexchange as sx
from statexchange.report.verify import verify
from statexchange.storage.publish import object_build
from statexchange.storage.publish.object_build import ObjectBuild
from statexchange.testing import run_ranks


def steps_at(url: str) -> list[int]:
    """Return the steps below which there is any object; a disk:// store keeps empty directories."""
    return [int(name.removeprefix("step-")) for name in names_at(url) if names_at(f"{url}/{name}")]


# Several ranks, on an S3 server


@pytest.fixture
def server(s3: str) -> str:
    return f"{s3}/deep/saves"


@pytest.mark.parametrize("backend", ["threads", slow("gloo")])
def test_another_number_of_ranks_goes_on_from_the_newest_save(backend: str, server: str) -> None:
    assert run_ranks(load_rows, 2, backend=backend, args=(server,)) == [None, None]
    for world_size, step in ((2, 10), (3, 20)):
        run_ranks(save_rows, world_size, backend=backend, args=(server, step))
        assert run_ranks(load_rows, 2, backend=backend, args=(server,)) == [step, step]
    assert run_ranks(load_rows, 1, args=(server,)) == [20]
    assert names_at(step_url(server, 10)) == WHOLE


def save_large(path: str) -> tuple[int, float]:
    """Save 48 MiB a rank; return the bytes of its file, and by how much the peak of this process has grown."""
    import resource

    comm = sx.get_communicator()
    state = {f"w{comm.rank}": torch.ones(3, 4 << 20)}
    sx.save_checkpoint({"w": torch.ones(2)}, f"{path}/warm")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = sx.save_checkpoint(state, f"{path}/large")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    state[f"w{comm.rank}"].zero_()
    sx.load_checkpoint(state, f"{path}/large")
    assert state[f"w{comm.rank}"].min() == 1
    return report.rank_nbytes[comm.rank], grown / 1024


def test_a_large_file_is_uploaded_in_parts_in_little_memory(server: str) -> None:
    outcomes = run_ranks(save_large, 2, backend="gloo", args=(server,))
    for nbytes, grown_mib in outcomes:
        assert nbytes > 48 << 20
        assert grown_mib < 160, outcomes  # 3 buffers of 16 MiB, and what s3fs and the garbage collector keep
    assert names_at(f"{server}/large") == WHOLE


def save_twice(path: str) -> list[int]:
    """Save in the background on two ranks, with a copy in memory; return the steps that are there."""
    comm = sx.get_communicator()
    with sx.Checkpoints(path, keep=1, layout=LAYOUT, memory=True) as saves:
        for step in (10, 20):
            saves.save(shard_of(step, comm.rank, comm.world_size), step, background=True)
    state = shard_of(0, comm.rank, comm.world_size)
    report = saves.load(state)
    assert report is not None
    assert (report.step, report.num_in_memory) == (20, 1)
    assert torch.equal(state["w"], shard_of(20, comm.rank, comm.world_size)["w"])
    found = saves.steps()
    saves.delete(20)
    return found


def test_ranks_save_in_the_background_with_a_copy_in_memory(server: str) -> None:
    assert run_ranks(save_twice, 2, backend="gloo", args=(server,)) == [[20], [20]]


def gathers(path: str) -> list[float]:
    comm = sx.get_communicator()
    own = {"w": torch.arange(5000.0) + comm.rank, "bits": torch.tensor([float("nan"), comm.rank]).bfloat16()}
    with sx.gather_state(own, workspace=path) as states:
        firsts = [float(state["w"][0]) for state in states]
        for rank, state in enumerate(states):
            assert torch.equal(state["w"], own["w"] - comm.rank + rank)
            assert state["bits"].view(torch.int16).tolist()[0] == own["bits"].view(torch.int16).tolist()[0]
    return firsts


def test_ranks_gather_through_an_object_store(server: str) -> None:
    for size in (1, 2, 3):
        assert run_ranks(gathers, size, backend="gloo", args=(f"{server}/exchange",))[0] == list(range(size))
    assert names_at(f"{server}/exchange") == []


# Failures: on every rank, with the URL, and nothing half-visible


def failure_of(path: str, broken: int) -> tuple[str, str]:
    """Save as a job of which the rank `broken` has lost its server; return the error's type and text."""
    comm = sx.get_communicator()
    if comm.rank == broken:
        os.environ["AWS_ENDPOINT_URL"] = "http://127.0.0.1:9"
        fsspec.get_filesystem_class("s3").clear_instance_cache()
    try:
        save_rows(path, 10)
    except sx.errors.StateExchangeError as error:
        return type(error).__name__, str(error)
    return "", "saved"


@pytest.mark.parametrize("broken", [0, 1])
def test_a_rank_without_a_connection_is_named_on_all_ranks(broken: int, server: str) -> None:
    for name, text in run_ranks(failure_of, 2, backend="gloo", args=(server, broken)):
        assert name == "StorageError"
        assert f"rank {broken}" in text
        assert server in text
    assert run_ranks(load_rows, 1, args=(server,)) == [None]
    assert run_ranks(save_rows, 2, args=(server, 20)) == [[20], [20]]


def test_a_bucket_that_does_not_exist_is_named(server: str) -> None:
    missing = "s3://no-such-bucket-here/saves"
    for job in (save_rows, load_rows):
        outcomes = run_ranks(job, 2, args=(missing, 10)[: 1 + (job is save_rows)], allow_failure=True)
        assert set(outcomes.errors.values()) == {"NotFoundError"}
        assert all("no such bucket" in text and missing in text for text in outcomes.messages.values())
    with pytest.raises(sx.errors.NotFoundError, match="no such bucket"):
        sx.Checkpoints(missing).load(state_of(0))


class Refusing(DiskFileSystem):
    """A store that this user may read and not write."""

    protocol = "refusing"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        raise PermissionError("Access Denied")


def test_a_store_that_may_not_be_written_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    fsspec.register_implementation("refusing", Refusing, clobber=True)
    outcomes = run_ranks(save_rows, 2, args=(f"refusing://{tmp_path}/saves", 10), allow_failure=True)
    assert set(outcomes.errors.values()) == {"StorageError"}
    assert all("cannot put: Access Denied" in text for text in outcomes.messages.values())
    assert list(tmp_path.rglob("*.*")) == []


def test_a_scheme_whose_package_is_missing_names_what_to_install() -> None:
    outcomes = run_ranks(save_rows, 2, args=("gs://bucket/saves", 10), allow_failure=True)
    assert set(outcomes.errors.values()) == {"MissingExtraError"}
    assert all('pip install "statexchange[gcs]"' in text for text in outcomes.messages.values())


class OtherStore(DiskFileSystem):
    """A store with other objects than that of rank 0."""

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        found = super()._strip_protocol(path)
        return found.replace("/saves", "/other") if isinstance(found, str) else found


def save_unseen(path: str) -> str:
    """Save on a rank that has a store of its own under the same URL."""
    comm = sx.get_communicator()
    use_object_stores()
    if comm.rank == 1:
        fsspec.register_implementation("disk", OtherStore, clobber=True)
    try:
        save_rows(path, 10)
    except sx.errors.NotFoundError as error:
        return str(error)
    return "saved"


def test_a_rank_that_sees_another_store_is_named(tmp_path: Path) -> None:
    for text in run_ranks(save_unseen, 2, backend="gloo", args=(f"disk://{tmp_path}/saves",)):
        assert "rank 1 on " in text
        assert "does not see what rank 0" in text


# Kills

JOBS = f"from disk_stores import use_object_stores\nuse_object_stores(take_over_s=60, renew_s=15)\n{ROW_JOBS}"


@pytest.mark.parametrize("every", [12, slow(1)], ids=["some", "all"])
@pytest.mark.timeout(900)
def test_a_job_killed_at_any_event_goes_on_from_the_newest_whole_save(
    every: int, jobs: ForkedJobs, sweep_path: Path
) -> None:
    use_object_stores()
    assert jobs.run(f"disk://{sweep_path}/before", [10, 20, 30]) is not None
    traces = [shutil.copytree(sweep_path / "before", sweep_path / name) for name in ("trace", "trace-2", "trace-3")]
    calls = jobs.fewest_calls(*((f"disk://{trace}", [40]) for trace in traces))  # saves, and removes step 10
    assert {"claim", "create", "put", "renew", "remove object", "list"} <= set(calls)
    print(f"killed at {len(calls)} events")
    found = []
    for number in some(range(1, len(calls) + 1), every):
        url = f"disk://{sweep_path}/{number}"
        shutil.copytree(sweep_path / "before", sweep_path / str(number))
        if jobs.run(url, [40], kill_at=number) is not None:  # the ranks made fewer calls than those that were counted
            assert number > len(calls) - 10, number
        for world_size in (3, 1):
            (newest,) = set(run_ranks(load_rows, world_size, args=(url,)))
            assert newest in (30, 40), number
        found.append(newest)
        steps = run_ranks(save_rows, 1, args=(url, newest + 10))[0]  # the next job, with no clean-up by hand
        assert steps == [newest - 10, newest, newest + 10], number
        assert steps_at(url) == steps, number
        for step in steps:
            assert verify(step_url(url, step)).findings == ()
            assert set(names_at(step_url(url, step))) <= {*WHOLE, "rank-00000-of-00001.safetensors"}, number
    assert set(found) == {30, 40}


def save_until_killed_at(path: str, rank: int, number: int) -> list[str]:
    """Save step 20; kill one rank at its n-th storage event of the save, or return the events of this rank."""
    use_object_stores(take_over_s=60, renew_s=15)
    comm = sx.get_communicator()
    events: list[str] = []

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "statexchange.storage" and "disk://" in str(args[1]):
            events.append(args[0])
            if comm.rank == rank and len(events) == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    save_rows(path, 20)
    return list(events)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("every", [36, slow(1)], ids=["some", "all"])
@pytest.mark.timeout(900)
def test_a_rank_killed_at_any_event_is_an_error_on_the_other(every: int, rank: int, sweep_path: Path) -> None:
    use_object_stores()
    (sweep_path / "trace").mkdir()
    events = run_ranks(save_until_killed_at, 2, backend="gloo", args=(f"disk://{sweep_path}/trace", rank, 0))[rank]
    print(f"rank {rank} is killed at {len(events)} events: {events}")
    for number in some(range(1, len(events) + 1), every):
        url = f"disk://{sweep_path}/{number}"
        run_ranks(save_rows, 2, args=(url, 10))
        killed = (url, rank, number)
        outcomes = run_ranks(save_until_killed_at, 2, backend="gloo", args=killed, allow_failure=True, timeout_s=120)
        assert outcomes.exit_codes[rank] == -signal.SIGKILL, (number, str(outcomes))
        newest = run_ranks(load_rows, 1, args=(url,))[0]
        assert newest in (10, 20), number
        if newest == 10:
            assert outcomes[1 - rank].error == "PeerError", (number, str(outcomes))
        steps = run_ranks(save_rows, 3, args=(url, newest + 10))[0]
        assert steps == list(range(10, newest + 11, 10)), number
        assert steps_at(url) == steps, number
        for step in steps:
            assert verify(step_url(url, step)).findings == ()


def save_until_killed(path: str) -> None:
    """Save 48 MiB a rank; rank 1 is killed in the middle of its upload."""
    comm = sx.get_communicator()
    state = {f"w{comm.rank}": torch.ones(3, 4 << 20)}
    if comm.rank == 1:
        written = []
        put = object_build.ObjectFile.write

        def write(self: Any, data: Any, at: int) -> None:
            put(self, data, at)
            written.append(at)
            if len(written) == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        object_build.ObjectFile.write = write  # type: ignore[method-assign]
    sx.save_checkpoint(state, path)


def test_a_rank_killed_in_the_middle_of_an_upload_leaves_nothing(server: str) -> None:
    outcomes = run_ranks(save_until_killed, 2, backend="gloo", args=(f"{server}/a",), allow_failure=True)
    assert outcomes[0].error == "PeerError"
    assert names_at(f"{server}/a") == []
    assert uploads_in(server) == []
    with pytest.raises(sx.errors.NotFoundError):
        sx.load_checkpoint({"w": torch.zeros(2)}, f"{server}/a")


def test_the_claim_is_renewed_while_root_waits(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ObjectBuild, "renew_s", 0.1)
    renewed: list[int] = []
    is_watched = [True]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "statexchange.storage" and args[0] == "renew" and is_watched:
            renewed.append(1)

    sys.addaudithook(hook)
    build = ObjectBuild("memory://out", "0" * 32, ["save.json"], check=None, resume=False)
    with build:
        build.share()
        deadline = time.monotonic() + 10
        while len(renewed) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
    is_watched.clear()
    assert len(renewed) >= 3
    assert names_at("memory://out") == []
    assert not [thread for thread in threading.enumerate() if "renewal" in thread.name]


def test_values_of_a_numpy_state_come_back(store: Any) -> None:
    state = {"a": np.arange(6).reshape(2, 3), "text": "x"}
    sx.save_checkpoint(state, "memory://saved")
    live = {"a": np.zeros((2, 3), np.int64), "text": ""}
    sx.load_checkpoint(live, "memory://saved")
    assert (live["a"] == state["a"]).all()
    assert live["text"] == "x"
