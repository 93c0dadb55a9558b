"""Saves at an fsspec URL: which are kept, what a restart finds."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_jobs import save_steps, state_of, value_in
from disk_stores import names_at
from equality import assert_same
from publishing import OTHER_HOST
from safetensors.torch import load_file
from saves_at_urls import WHOLE, step_url

import statexchange as sx
from statexchange.processes import Owner
from statexchange.report.verify import verify
from statexchange.storage.publish import object_build
from statexchange.storage.publish.claim import CLAIM_NAME, Claim
from statexchange.storage.publish.object_build import ObjectBuild


def put_claim(store: Any, path: str, owner: Owner = OTHER_HOST, plan: str = "0" * 32) -> Claim:
    """Leave the claim of another process's save in a directory of a memory:// store."""
    claim = Claim("a" * 16, owner, "2026-01-01T00:00:00+00:00", plan, frozenset(WHOLE))
    store.pipe_file(f"{path}/{CLAIM_NAME}", claim.to_bytes())
    return claim


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
