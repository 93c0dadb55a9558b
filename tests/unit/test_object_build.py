"""Publication of checkpoints to object stores: the claim first, then the objects, the manifest last."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import publishing
import pytest
import torch
from disk_stores import names_at
from objects import TENSORS, objects
from publishing import (
    OTHER_HOST,
    begin,
    build,
    ended_owner,
    plan_of,
    provenance_of,
    publish,
    run_sweep,
    state_of,
    value_at,
)
from safetensors.torch import save_file
from storage_events import act_at, armed, recording
from stored import flip_bit
from sweeps import slow, steps
from warm_python import warm_python

import statexchange as sx
from statexchange.errors import StorageError, TargetExistsError, UnsafeError, UnsupportedError
from statexchange.processes import Owner
from statexchange.storage.location import open_path
from statexchange.storage.publish.claim import CLAIM_NAME, Claim, claim_of
from statexchange.storage.publish.object_build import ObjectBuild

WHOLE = [
    "config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "statexchange.json",
]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let claims be taken over after a short time."""
    monkeypatch.setattr(ObjectBuild, "take_over_s", 0.5)
    monkeypatch.setattr(ObjectBuild, "renew_s", 0.1)


def test_a_merge_into_a_store_writes_what_a_merge_into_a_directory_writes(store: Any, tmp_path: Path) -> None:
    sx.save_checkpoint(TENSORS, tmp_path / "saved")
    (tmp_path / "config.json").write_text("{}")
    options: dict[str, Any] = {"max_shard_size": 200_000, "files_from": tmp_path / "config.json"}
    sx.merge_checkpoint(tmp_path / "saved", tmp_path / "local", **options)
    report = sx.merge_checkpoint(tmp_path / "saved", "memory://bucket/out", **options)
    assert report.path == "memory://bucket/out"
    assert objects(store, "bucket/out") == {p.name: p.read_bytes() for p in (tmp_path / "local").iterdir()}
    created = {path.rpartition("/")[2]: store.store[path].created for path in store.find("/bucket/out")}
    assert max(created, key=lambda name: created[name]) == "statexchange.json"


def test_a_checkpoint_in_a_store_is_replaced_only_with_overwrite(store: Any, tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    sx.merge_checkpoint(tmp_path / "model.safetensors", "memory://out", max_shard_size=200_000)
    before = objects(store, "out")
    for dry_run in (True, False):
        with pytest.raises(TargetExistsError, match=r"overwrite=True.*memory://out"):
            sx.merge_checkpoint(tmp_path / "model.safetensors", "memory://out", dry_run=dry_run)
    assert objects(store, "out") == before
    sx.merge_checkpoint(tmp_path / "model.safetensors", "memory://out", overwrite=True)
    assert sorted(objects(store, "out")) == ["model.safetensors", "statexchange.json"]
    store.pipe_file("/out/notes.txt", b"mine")
    for dry_run in (True, False):
        with pytest.raises(UnsafeError, match=r"notes\.txt"):
            sx.merge_checkpoint(tmp_path / "model.safetensors", "memory://out", overwrite=True, dry_run=dry_run)
    assert sorted(objects(store, "out")) == ["model.safetensors", "notes.txt", "statexchange.json"]


def test_a_directory_that_cannot_be_listed_is_not_taken_for_an_empty_one(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish("memory://out", 1)

    def fail(*_: object, **__: object) -> None:
        raise OSError("on fire")

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "find", fsspec.AbstractFileSystem.find)  # that of most file systems: it calls `ls`
        patch.setattr(type(store), "ls", fail)
        for overwrite in (False, True):
            with pytest.raises(StorageError, match="on fire"):
                begin("memory://out", 2, overwrite=overwrite)
    assert value_at("memory://out") == 1


def test_foreign_objects_are_never_mixed_with_a_checkpoint(store: Any) -> None:
    store.pipe_file("/out/model-00001-of-00002.safetensors", b"mine")
    for overwrite, error in ((False, TargetExistsError), (True, UnsafeError)):
        with pytest.raises(error):
            publish("memory://out", 1, overwrite=overwrite)
        assert objects(store, "out") == {"model-00001-of-00002.safetensors": b"mine"}


def test_a_merge_that_fails_leaves_no_object(store: Any, tmp_path: Path) -> None:
    sx.export_checkpoint(TENSORS, tmp_path / "local", max_shard_size=200_000)
    flip_bit(max((tmp_path / "local").glob("*.safetensors")), -1)
    with pytest.raises(sx.errors.CorruptError, match="digest") as caught:
        sx.merge_checkpoint(tmp_path / "local", "memory://out")
    assert caught.value.name == "b.c"
    assert objects(store, "out") == {}


def test_a_target_that_holds_the_source_is_refused(store: Any, tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    sx.merge_checkpoint(tmp_path / "model.safetensors", "memory://out")
    before = objects(store, "out")
    with pytest.raises(UnsafeError, match="in the target"):
        sx.merge_checkpoint("memory://out", "memory://out", overwrite=True, max_shard_size=200_000)
    assert objects(store, "out") == before


def test_during_a_replacement_the_claim_names_the_publisher(store: Any) -> None:
    publish("memory://out", 1)
    with begin("memory://out", 2, overwrite=True) as publication:
        names = names_at("memory://out")
        assert names == [CLAIM_NAME]  # the manifest is removed first
        build(publication, 2)
        with open_path("memory://out") as place:
            assert str(claim_of(place.store)).startswith(f"process {os.getpid()} on ")
        with pytest.raises(TargetExistsError, match=rf"process {os.getpid()}\b"):
            publish("memory://out", 3)
        publication.commit(provenance_of(plan_of(2), 2))
    assert (state_of("memory://out"), names_at("memory://out")) == ("2", WHOLE)
    with open_path("memory://out") as place:
        assert claim_of(place.store) is None


def left_by(store: Any, owner: Owner, *, names: list[str]) -> Claim:
    """Put a claim on the names of objects, as a publisher that has not finished leaves it; return it."""
    claim = Claim(os.urandom(8).hex(), owner, "2026-01-01T00:00:00+00:00", "0" * 32, frozenset(names))
    store.pipe_file(f"/out/{CLAIM_NAME}", claim.to_bytes())
    return claim


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_claim_of_a_killed_merge_is_taken_over(store: Any, overwrite: bool) -> None:
    left_by(store, ended_owner(), names=[*WHOLE, "model-00003-of-00003.safetensors"])
    store.pipe_file("/out/model-00003-of-00003.safetensors", b"half")
    publish("memory://out", 2, overwrite=overwrite)
    assert (state_of("memory://out"), names_at("memory://out")) == ("2", WHOLE)


def test_a_claim_of_another_host_is_taken_over_if_it_is_not_renewed_or_with_resume(
    store: Any, soon: None, caplog: pytest.LogCaptureFixture
) -> None:
    left_by(store, OTHER_HOST, names=WHOLE)
    store.pipe_file("/out/config.json", b"half")
    publish("memory://out", 2, overwrite=False)
    assert "--resume" in caplog.text
    assert (state_of("memory://out"), names_at("memory://out")) == ("2", WHOLE)
    left_by(store, OTHER_HOST, names=WHOLE)
    ObjectBuild.take_over_s = 3600.0
    with pytest.raises(TargetExistsError, match="overwrite=True"):
        publish("memory://out", 3, overwrite=False, resume=True)
    assert (state_of("memory://out"), names_at("memory://out")) == ("2", WHOLE)
    left_by(store, OTHER_HOST, names=WHOLE)
    publish("memory://out", 3, resume=True)
    assert (state_of("memory://out"), names_at("memory://out")) == ("3", WHOLE)


def test_the_claim_is_renewed_while_a_large_file_is_written(store: Any, soon: None) -> None:
    with begin("memory://out", 1) as publication:
        file = publication.create(plan_of(1).files[0])
        for part in range(2):
            time.sleep(ObjectBuild.renew_s)
            with recording() as events:
                file.write(bytes(1000), len(file.header) + 1000 * part)
            assert "renew" in [step for step, _ in events], part
    assert names_at("memory://out") == []


def test_a_claim_that_is_renewed_is_respected(store: Any, soon: None) -> None:
    claim = left_by(store, OTHER_HOST, names=WHOLE)
    timer = threading.Timer(0.2, lambda: store.pipe_file(f"/out/{CLAIM_NAME}", replace(claim, renewal=1).to_bytes()))
    timer.start()
    with pytest.raises(TargetExistsError, match="process 2 on a-host-far-away"):
        publish("memory://out", 2)
    timer.join()
    assert names_at("memory://out") == [CLAIM_NAME]


@pytest.mark.parametrize(
    ("successor", "stays"), [("none", False), ("at work", True), ("ended without it", False), ("ended with it", True)]
)
def test_an_object_that_is_put_after_the_claim_was_lost_is_removed_unless_it_may_be_the_successors(
    store: Any, successor: str, stays: bool
) -> None:
    def lose_claim() -> None:
        store.rm_file(f"/out/{CLAIM_NAME}")
        if successor == "at work":
            left_by(store, OTHER_HOST, names=WHOLE)
        elif successor != "none":
            files = WHOLE[1:3] if successor == "ended with it" else ["other.safetensors"]
            store.pipe_file("/out/statexchange.json", json.dumps({"files": files}).encode())

    act_at(2, lose_claim, only="put")  # the first one is that of the claim
    with pytest.raises(TargetExistsError, match="taken over the claim"):
        publish("memory://out", 1)
    assert not armed
    assert ("model-00001-of-00002.safetensors" in names_at("memory://out")) == stays


def test_a_claim_that_cannot_be_read_is_named(store: Any) -> None:
    store.pipe_file(f"/out/{CLAIM_NAME}", b"{}")
    with pytest.raises(sx.errors.CorruptError, match="broken claim"):
        publish("memory://out", 2)
    assert names_at("memory://out") == [CLAIM_NAME]
    with open_path("memory://out") as place:
        assert "cannot be read" in str(claim_of(place.store))


def test_web_servers_are_read_only() -> None:
    for url in ("http://127.0.0.1:9/out", "https://127.0.0.1:9/out"):
        with pytest.raises(UnsupportedError, match="read-only") as caught:
            publish(url, 1)
        assert caught.value.path == url


# Sweeps: something happens at each storage event of a publisher


@pytest.mark.parametrize("step", steps(6))
@pytest.mark.parametrize("before", [False, True])
def test_after_a_kill_at_any_event_the_next_publisher_succeeds(sweep_path: Path, before: bool, step: int) -> None:
    found = run_sweep("sweep_object_kills", sweep_path, base=f"disk://{sweep_path}", before=before, step=step)
    assert found["points"] * step > 12
    assert found["being written"]


@pytest.mark.parametrize("step", steps(12))
@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize(("before", "overwrite"), [(False, False), (True, True)])
def test_of_two_publishers_one_wins_at_whatever_event_the_second_begins(
    sweep_path: Path, before: bool, overwrite: bool, elsewhere: bool, step: int
) -> None:
    """With `elsewhere` the first is taken for dead, and then goes on."""
    options = {"before": before, "overwrite": overwrite, "elsewhere": elsewhere, "step": step}
    assert run_sweep("sweep_object_races", sweep_path, base=f"disk://{sweep_path}", **options)["points"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_after_a_kill_at_any_event_on_s3_the_next_publisher_succeeds(s3: str, sweep_path: Path) -> None:
    assert run_sweep("sweep_object_kills", sweep_path, base=s3, before=True, step=6, first=2)["points"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_of_two_publishers_on_s3_one_wins(s3: str, sweep_path: Path, elsewhere: bool) -> None:
    options = {"before": True, "overwrite": True, "elsewhere": elsewhere, "step": 6, "first": 2}
    assert run_sweep("sweep_object_races", sweep_path, base=s3, **options)["points"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_on_s3_a_publisher_that_stalls_before_a_removal_removes_nothing_of_its_successor(
    s3: str, sweep_path: Path
) -> None:
    options = {"before": True, "overwrite": True, "elsewhere": True, "step": 2, "only": "remove if unchanged"}
    assert run_sweep("sweep_object_races", sweep_path, base=s3, **options)["points"] > 1


RACER = """
import sys
sys.path.insert(0, sys.argv[1])
from publishing import publish
from statexchange.errors import TargetExistsError
try:
    publish(sys.argv[2], int(sys.argv[3]), overwrite=sys.argv[4] == "True")
    print("ok")
except TargetExistsError:
    print("refused")
"""


@pytest.mark.parametrize("overwrite", [slow(False), True])
def test_two_processes_that_publish_to_s3_at_once_leave_one_whole_checkpoint(s3: str, overwrite: bool) -> None:
    here = os.path.dirname(publishing.__file__)
    command = [warm_python("commands"), "-c", RACER, here, f"{s3}/out"]
    racers = [
        subprocess.Popen([*command, str(value), str(overwrite)], stdout=subprocess.PIPE, text=True) for value in (1, 2)
    ]
    results = [racer.communicate()[0].strip() for racer in racers]
    assert "ok" in results, results
    assert overwrite or results.count("ok") == 1
    won = {str(value) for value, word in zip((1, 2), results, strict=True) if word == "ok"}
    assert (state_of(f"{s3}/out") in won, names_at(f"{s3}/out")) == (True, WHOLE)


def test_a_large_object_is_uploaded_in_parts_and_its_name_is_taken_back(s3: str, tmp_path: Path) -> None:
    """A publisher that was taken for dead puts an object under a name of ours."""
    save_file({"w": torch.arange(5_000_000.0)}, tmp_path / "model.safetensors", {"format": "pt"})
    system = fsspec.filesystem("s3")
    put: list[bool] = []

    def put_late(done: int, total: int) -> None:
        if done > total // 2 and not put:
            put.append(True)
            system.pipe_file(f"{s3}/out/model.safetensors", b"theirs")

    report = sx.merge_checkpoint(tmp_path / "model.safetensors", f"{s3}/out", on_progress=put_late)
    assert put
    assert names_at(report.path) == ["model.safetensors", "statexchange.json"]
    system.invalidate_cache()
    assert system.cat_file(f"{s3}/out/model.safetensors") == (tmp_path / "model.safetensors").read_bytes()
