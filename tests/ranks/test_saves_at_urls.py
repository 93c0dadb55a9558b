"""Saves at an fsspec URL: which are kept, what a restart finds, kills of one rank and of all, failures of a store."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import publishing
import pytest
import torch
from checkpoint_jobs import LAYOUT, load_rows, save_rows, save_steps, shard_of, state_of, value_in
from equality import assert_same
from forked_jobs import ForkedJobs
from publishing import OTHER_HOST, names_at, use_object_stores
from safetensors.torch import load_file
from sweeps import slow, some

import statexchange as sx
from statexchange.processes import Owner
from statexchange.report.verify import verify
from statexchange.storage.publish import object_build
from statexchange.storage.publish.claim import CLAIM_NAME, Claim
from statexchange.storage.publish.object_build import ObjectBuild
from statexchange.testing import run_ranks

WHOLE = ["rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors", "save.json"]


def step_url(url: str, step: int) -> str:
    return f"{url}/step-{step:09d}"


def put_claim(store: Any, path: str, owner: Owner = OTHER_HOST, plan: str = "0" * 32) -> Claim:
    """Leave the claim of another process's save in a directory of a memory:// store."""
    claim = Claim("a" * 16, owner, "2026-01-01T00:00:00+00:00", plan, frozenset(WHOLE))
    store.pipe_file(f"{path}/{CLAIM_NAME}", claim.to_bytes())
    return claim


def steps_at(url: str) -> list[int]:
    """Return the steps below which there is any object; a disk:// store keeps empty directories."""
    return [int(name.removeprefix("step-")) for name in names_at(url) if names_at(f"{url}/{name}")]


# One process


def test_a_save_at_a_url_is_the_save_in_a_directory(store: Any, tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(3).bfloat16()}, "step": 7, "none": None}
    local = sx.save_checkpoint(state, tmp_path / "saved")
    report = sx.save_checkpoint(state, "memory://bucket/saved")
    assert (report.path, report.nbytes, report.rank_nbytes) == (
        "memory://bucket/saved",
        local.nbytes,
        local.rank_nbytes,
    )
    assert names_at("memory://bucket/saved") == ["rank-00000-of-00001.safetensors", "save.json"]
    store.get("/bucket/saved/rank-00000-of-00001.safetensors", str(tmp_path / "got.safetensors"))
    in_directory = load_file(tmp_path / "saved" / "rank-00000-of-00001.safetensors")
    assert_same(load_file(tmp_path / "got.safetensors"), in_directory)
    live = {"model": {"w": torch.zeros(3, 4), "b": torch.zeros(3).bfloat16()}, "step": 0, "none": None}
    sx.load_checkpoint(live, "memory://bucket/saved")
    assert live["step"] == 7
    assert torch.equal(live["model"]["w"], state["model"]["w"])  # type: ignore[index]
    assert verify("memory://bucket/saved").findings == ()
    with pytest.raises(sx.errors.TargetExistsError, match="overwrite=True"):
        sx.save_checkpoint(state, "memory://bucket/saved")
    sx.save_checkpoint({"model": {"w": torch.ones(2)}}, "memory://bucket/saved", overwrite=True)
    sx.merge_checkpoint("memory://bucket/saved", tmp_path / "merged")
    assert load_file(tmp_path / "merged" / "model.safetensors").keys() == {"model.w"}


def test_only_saves_are_overwritten(store: Any) -> None:
    sx.save_checkpoint({"w": torch.ones(2)}, "memory://out")
    store.pipe_file("/out/notes.txt", b"mine")
    with pytest.raises(sx.errors.UnsafeError, match=r"notes\.txt"):
        sx.save_checkpoint({"w": torch.ones(2)}, "memory://out", overwrite=True)
    store.rm_file("/out/save.json")
    for overwrite in (False, True):
        with pytest.raises(sx.errors.StateExchangeError):
            sx.save_checkpoint({"w": torch.ones(2)}, "memory://out", overwrite=overwrite)
    assert names_at("memory://out") == ["notes.txt", "rank-00000-of-00001.safetensors"]


def test_steps_are_listed_kept_and_deleted(store: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    saves = sx.Checkpoints("memory://bucket/saves", keep=1, keep_every=20, best=("loss", "min"))
    state = state_of(0)
    assert saves.load(state) is None
    assert (saves.steps(), saves.latest()) == ([], None)
    for step, loss in ((10, 0.1), (20, 0.5), (30, float("nan")), (40, 0.7), (50, 0.9)):
        saves.save(state_of(step, step), step, metrics={"loss": loss})
    assert (saves.steps(), saves.best()) == ([10, 20, 40, 50], 10)
    assert "removed the save of step 30" in caplog.text
    assert names_at("memory://bucket/saves") == [f"step-{step:09d}" for step in (10, 20, 40, 50)]
    report = saves.load(state)
    assert report is not None
    assert (report.step, state["step"], value_in(state)) == (50, 50, 50.0)
    report = saves.load(state, step=20)
    assert report is not None
    assert value_in(state) == 20.0
    with pytest.raises(sx.errors.NotFoundError, match=r"step 30.*10, 20, 40, 50"):
        saves.load(state, step=30)
    with pytest.raises(sx.errors.NotFoundError, match="step-000000030"):
        sx.load_checkpoint(state, step_url(saves.path, 30))
    with pytest.raises(sx.errors.TargetExistsError, match="step 20"):
        saves.save(state_of(1), 20, metrics={"loss": 1})
    with pytest.raises(sx.errors.InvalidArgumentError, match="contains checkpoints"):
        sx.load_checkpoint(state, "memory://bucket/saves")
    saves.delete(50)
    assert saves.steps() == [10, 20, 40]
    with pytest.raises(sx.errors.NotFoundError, match="step 50"):
        saves.delete(50)


@pytest.mark.slow
def test_a_load_during_which_a_save_is_removed_at_any_request_is_of_one_whole_save(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load is of that save or of the one before it, as in a directory."""
    url, requests, stop_at = "memory://bucket/saves", 0, 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal requests, stop_at
            requests += 1
            if requests == stop_at:
                stop_at = 0
                sx.Checkpoints(url).delete(20)
            return real(*arguments, **options)

        return call

    for name in ("info", "ls", "cat_file"):
        monkeypatch.setattr(type(store), name, counted(getattr(type(store), name)))
    found: list[int] = []
    for number in range(1, 200):
        saves = sx.Checkpoints(url)
        for step in (10, 20):
            saves.save(state_of(step, step), step)
        requests, stop_at, live = 0, number, state_of(0)
        report = saves.load(live)
        assert report is not None
        assert (live["step"], value_in(live)) == (report.step, report.step), number
        found.append(report.step)
        is_over, stop_at = stop_at > 0, 0
        store.rm("/bucket", recursive=True)
        if is_over:
            break
    print(f"removed at {number - 1} requests")
    assert set(found) == {10, 20}


def test_other_content_is_not_taken_for_no_save(store: Any) -> None:
    store.pipe_file("/bucket/notes.txt", b"mine")
    with pytest.raises(sx.errors.InvalidArgumentError, match=r"'notes\.txt"):
        sx.Checkpoints("memory://bucket").load(state_of(0))
    sx.Checkpoints("memory://saves").save(state_of(0), 7)
    with pytest.raises(sx.errors.InvalidArgumentError, match="one save") as caught:
        sx.Checkpoints(step_url("memory://saves", 7)).load(state_of(0))
    assert "memory://saves " in str(caught.value)
    store.rm_file("/saves/step-000000007/save.json")
    with pytest.raises(sx.errors.InvalidArgumentError, match="'step-000000007'"):
        sx.Checkpoints("memory://saves").load(state_of(0))


def test_an_unfinished_save_is_no_save(store: Any) -> None:
    put_claim(store, "/saves/step-000000007")
    saves = sx.Checkpoints("memory://saves")
    assert saves.load(state_of(0)) is None
    with pytest.raises(sx.errors.NotFoundError, match="no save"):
        saves.load(state_of(0), missing_ok=False)
    store.pipe_file(f"/saves/step-000000007/{WHOLE[0]}", b"half")
    assert (saves.load(state_of(0)), saves.steps()) == (None, [])
    with pytest.raises(sx.errors.IncompleteError, match="process 2 on a-host-far-away"):
        sx.load_checkpoint(state_of(0), step_url("memory://saves", 7))


def test_what_another_host_left_is_removed_once_its_claim_is_old(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ObjectBuild, "take_over_s", 0.3)
    put_claim(store, "/saves/step-000000007")
    store.pipe_file(f"/saves/step-000000007/{WHOLE[0]}", b"half")
    saves = sx.Checkpoints("memory://saves")
    saves.load(state_of(0))
    began = time.monotonic()
    save_steps(saves, 10)  # waits for nothing
    assert time.monotonic() - began < 0.3
    assert names_at("memory://saves") == ["step-000000007", "step-000000010"]
    time.sleep(0.3)
    save_steps(saves, 20)
    assert names_at("memory://saves") == ["step-000000010", "step-000000020"]
    claim = put_claim(store, "/saves/step-000000007")
    for number in range(4):  # its process renews the claim
        renewed = replace(claim, renewal=number + 1)
        store.pipe_file(f"/saves/step-000000007/{CLAIM_NAME}", renewed.to_bytes())
        save_steps(saves, 30 + number)
        time.sleep(0.2)
    assert "step-000000007" in names_at("memory://saves")


def test_a_stray_file_of_a_killed_rank_does_not_stop_the_next_save(store: Any) -> None:
    sx.save_checkpoint({"w": torch.ones(2)}, "memory://saves/step-000000007")
    store.rm_file("/saves/step-000000007/save.json")
    store.mv("/saves/step-000000007/rank-00000-of-00001.safetensors", f"/saves/step-000000007/{WHOLE[1]}")
    saves = sx.Checkpoints("memory://saves")
    save_steps(saves, 7)
    assert names_at(step_url("memory://saves", 7)) == ["rank-00000-of-00001.safetensors", "save.json"]


def test_a_step_with_objects_of_others_is_not_removed(store: Any, caplog: pytest.LogCaptureFixture) -> None:
    saves = sx.Checkpoints("memory://saves", keep=1)
    save_steps(saves, 10)
    store.pipe_file("/saves/step-000000010/notes.txt", b"mine")
    save_steps(saves, 20)
    assert saves.steps() == [10, 20]
    assert "'notes.txt' is not a file of this save" in caplog.text
    assert store.cat_file("/saves/step-000000010/notes.txt") == b"mine"
    assert CLAIM_NAME not in names_at(step_url("memory://saves", 10))


def test_another_job_on_the_same_url_is_named_and_its_saves_stay(store: Any, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = (sx.Checkpoints("memory://saves", keep=1) for _ in range(2))
    save_steps(ours, 10)
    save_steps(theirs, 15)
    save_steps(ours, 20)
    assert "step 15 was saved here by" in caplog.text
    assert ours.steps() == [15, 20]


def test_a_step_that_another_job_is_saving_is_refused(store: Any) -> None:
    put_claim(store, "/saves/step-000000010", Owner.current())
    nonce = "a" * 16
    object_build.open_builds.add((os.getpid(), nonce))  # as a save that runs in this process
    try:
        with pytest.raises(sx.errors.TargetExistsError, match=f"process {os.getpid()}"):
            save_steps(sx.Checkpoints("memory://saves"), 10)
    finally:
        object_build.open_builds.discard((os.getpid(), nonce))
    save_steps(sx.Checkpoints("memory://saves"), 10)
    assert sx.Checkpoints("memory://saves").steps() == [10]


def test_saves_in_the_background_have_the_state_at_the_call_and_raise_failures(store: Any) -> None:
    with sx.Checkpoints("memory://saves", keep=2) as saves:
        state = state_of(1, 1)
        for step in (10, 20):
            for tensor in state["model"].values():
                tensor.fill_(step)
            saves.save(state, step, background=True)
            for tensor in state["model"].values():
                tensor.fill_(-1)
        future = saves.save(state, 20, background=True)
        with pytest.raises(sx.errors.TargetExistsError, match="step 20"):
            future.result()
        saves.load(state)
        assert value_in(state) == 20.0


class ChangeAtFirstPut:
    """Changes a tensor at the first put of an object, as a thread that trains on would."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "statexchange.storage" and args[0] == "create" and self.tensor is not None:
            self.tensor, tensor = None, self.tensor
            tensor[-1] += 1


def test_a_tensor_that_changes_while_it_is_saved_is_named(store: Any) -> None:
    state = {"w": torch.zeros(5)}
    sys.addaudithook(ChangeAtFirstPut(state["w"]))
    with pytest.raises(sx.errors.CorruptError, match="changed while") as caught:
        sx.save_checkpoint(state, "memory://saved")
    assert caught.value.name == "w"
    assert names_at("memory://saved") == []


def test_a_copy_in_memory_of_a_save_at_a_url_is_loaded_until_there_is_a_newer_save(
    store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"memory://bucket-{os.urandom(4).hex()}/saves"
    saves = sx.Checkpoints(url, memory=True)
    try:
        save_steps(saves, 10, 20)
        state = state_of(0)
        report = saves.load(state)
        assert report is not None
        assert (report.step, report.num_in_memory, value_in(state)) == (20, 1, 20.0)
        assert caplog.text == ""
        (record,) = (found for found in Path("/dev/shm").glob("*/copy-*/copy.json") if url in found.read_text())
        name = "rank-00000-of-00001.safetensors"
        in_store = store.cat_file(f"{step_url(url, 20).removeprefix('memory:/')}/{name}")
        assert (record.parent / name).read_bytes() == in_store
        sx.Checkpoints(url).save(state_of(30, 30), 30)  # by a job without memory
        report = saves.load(state)
        assert report is not None
        assert (report.path, report.num_in_memory) == (step_url(url, 30), 0)
    finally:
        saves.delete(20)
        for step in (10, 30):
            saves.delete(step)


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


class Refusing(publishing.DiskFileSystem):
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


class OtherStore(publishing.DiskFileSystem):
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

JOBS = """
import torch
from publishing import use_object_stores
from statexchange.testing import run_ranks
from checkpoint_jobs import load_rows, save_rows

def job(path, steps):  # its two ranks are threads, so that a kill ends both
    use_object_stores(take_over_s=60, renew_s=15)
    if steps:
        run_ranks(save_rows, 2, args=(path, *steps))
    else:
        run_ranks(load_rows, 2, args=(path,))

serve(job)
"""


@pytest.fixture(scope="module")
def jobs() -> Iterator[ForkedJobs]:
    with ForkedJobs(JOBS) as started:
        yield started


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
    publishing.use_object_stores(take_over_s=60, renew_s=15)
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


def uploads_in(url: str) -> list[str]:
    found = fsspec.filesystem("s3").call_s3("list_multipart_uploads", Bucket=url.split("/")[2])
    return [upload["Key"] for upload in found.get("Uploads") or ()]


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
