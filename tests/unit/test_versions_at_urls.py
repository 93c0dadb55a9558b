"""Versions of weights in object stores: what is kept and removed, what stores answer, and the commands."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import CommandLine
from disk_stores import names_at, use_object_stores
from fsspec.implementations.memory import MemoryFileSystem
from programs import require_root

import statexchange as sx
from statexchange.checkpoint import version_retention
from statexchange.checkpoint.version_retention import prune_versions
from statexchange.errors import InvalidArgumentError, NotFoundError, StallError, TargetExistsError
from statexchange.processes import Owner
from statexchange.report.versions import list_version_rows
from statexchange.storage import versions
from statexchange.storage.publish.claim import CLAIM_NAME, Claim
from statexchange.storage.records import records_at

URL = "memory://bucket/updates"
NOBODY = 65534


def publish(url: str, count: int, *, first: int = 1, **options: Any) -> str:
    """Publish versions that differ in one element each, and return the id of their run."""
    weights = {"w": torch.zeros(3000)}
    with sx.Publisher(url, **options) as publisher:
        for number in range(first, first + count):
            weights["w"][number] = number
            report = publisher.publish(weights, number)
    return report.path.split("/")[-2]


def newest(url: str, **options: Any) -> tuple[int, float]:
    """Return the number of the version that a new reader takes, and its last element that is set."""
    weights = {"w": torch.zeros(3000)}
    with sx.Subscriber(url) as subscriber, subscriber.stage(subscriber.wait(timeout_s=0, **options)) as staged:
        staged.load_into(weights)
    return staged.version.number, float(weights["w"].max())


@pytest.mark.parametrize("url", [URL, f"{URL}/", "memory://container@account.example/updates"])
def test_versions_are_taken_and_kept_as_in_a_directory(store: Any, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_retention, "GRACE_S", 0.0)
    publish(url, 3)
    assert newest(url) == (3, 3.0)
    assert newest(url, version=1) == (1, 1.0)
    publish(url, 5, keep=2, full_every=3)
    assert newest(url) == (5, 5.0)
    rows = [(row.version, row.kind, row.base_version, row.state) for row in list_version_rows(url)]
    assert rows == [(4, "full", None, "whole"), (5, "delta", 4, "whole")]
    assert "@" not in str(list_version_rows(url))


def test_a_version_that_is_read_is_not_removed(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_retention, "GRACE_S", 0.0)
    run = publish(URL, 1)
    lease = versions.Lease(URL, run, 1)
    publish(URL, 3, keep=1, full_every=1)
    assert versions.all_versions(URL)[run] == [1]
    with pytest.raises(NotFoundError, match="was retired"):
        versions.Lease(URL, run, 1)
    lease.end()
    assert [row.action for row in prune_versions(URL, keep=1)] == ["removed", "kept"]
    assert run not in versions.list_runs(URL)


@pytest.mark.parametrize("place", ["directory", "store"])
def test_a_version_without_a_cache_stays_while_it_is_in_use(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(version_retention, "GRACE_S", 0.0)
    url = URL if place == "store" else str(tmp_path / "updates")
    run = publish(url, 2)
    subscriber = sx.Subscriber(url, cache=False)
    with subscriber.stage(subscriber.wait(timeout_s=0)) as staged:
        publish(url, 3, keep=1, full_every=1)
        assert versions.all_versions(url)[run] == [1, 2]
        with staged.tensors() as tensors:
            assert tensors["w"].read().max() == 2.0
    with pytest.raises(InvalidArgumentError, match="has ended"):
        staged.tensors()
    prune_versions(url, keep=1)
    assert run not in versions.list_runs(url)
    subscriber.close()


def test_a_run_whose_first_version_is_unfinished_hides_no_version(store: Any) -> None:
    publish(URL, 3)
    run = versions.begin_run(URL)
    owner = Owner("a-host-far-away", "0" * 36, 1, 2, 3)
    claim = Claim("a" * 16, owner, "2026-01-01T00:00:00+00:00", "0" * 32, frozenset(("model.safetensors",)))
    store.pipe_file(f"/bucket/updates/{run}/weight_v000004/{CLAIM_NAME}", claim.to_bytes())
    store.pipe_file(f"/bucket/updates/{run}/weight_v000004/model.safetensors", b"half")
    assert newest(URL) == (3, 3.0)
    assert newest(URL, version=3) == (3, 3.0)
    states = {row.version: row.state for row in list_version_rows(URL)}
    assert states == {1: "whole", 2: "whole", 3: "whole", 4: "incomplete"}


def test_a_reader_that_may_not_write_reads_all_the_same(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(URL, 2)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError("Forbidden: 403")  # as gcsfs says it, without an errno

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)
    assert newest(URL) == (2, 2.0)


def test_a_store_that_dates_no_object_says_no_age(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(URL, 1)
    ls, info = MemoryFileSystem.ls, MemoryFileSystem.info

    def without_times(entry: Any) -> Any:
        return {key: value for key, value in entry.items() if key not in ("created", "mtime")}

    monkeypatch.setattr(
        MemoryFileSystem, "ls", lambda *given, **options: list(map(without_times, ls(*given, **options)))
    )
    monkeypatch.setattr(MemoryFileSystem, "info", lambda *given, **options: without_times(info(*given, **options)))
    version = sx.Subscriber(URL).wait(timeout_s=0)
    with pytest.raises(StallError, match="newer than 1"):
        sx.Subscriber(URL).wait(newer_than=version, timeout_s=0)


def test_a_store_that_keeps_empty_directories_has_no_version_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_object_stores()
    monkeypatch.setattr(version_retention, "GRACE_S", 0.0)
    url = f"disk://{tmp_path}/updates"
    for _ in range(2):
        publish(url, 3, keep=1, full_every=1)
    assert [row.version for row in list_version_rows(url)] == [3]
    assert [row.action for row in prune_versions(url, keep=1)][-1] == "kept"
    assert newest(url) == (3, 3.0)


def test_the_commands_take_a_url(store: Any, call: CommandLine) -> None:
    publish(URL, 2)
    _, printed, _ = call("ls", f"{URL}/", "--json")
    listed = json.loads(printed)["data"]["versions"]
    assert [(row["version"], row["kind"]) for row in listed] == [(1, "full"), (2, "delta")]
    assert "2 of 2 versions are whole" in call("verify", URL)[1]
    assert json.loads(call("prune", URL, "--keep", "2", "--json")[1])["data"]["nbytes"] == 0


def test_an_object_where_the_directory_would_be_is_refused(store: Any) -> None:
    store.pipe_file("/bucket/file", b"1")
    with pytest.raises(TargetExistsError, match="place of a directory"):
        sx.export_checkpoint({"w": torch.ones(2)}, "memory://bucket/file/out")
    assert names_at("memory://bucket/file") == ["file"]


def test_a_missing_bucket_is_named(s3: str) -> None:
    with pytest.raises(NotFoundError, match="no such bucket"):
        sx.Subscriber("s3://no-such-bucket-here/updates").wait(timeout_s=0)


# Directories


@pytest.mark.parametrize("content", [b"x" * 5000, b"not json"])
def test_a_lease_that_cannot_be_read_ends_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr(version_retention, "GRACE_S", 0.0)
    path = tmp_path / "updates"
    run = publish(str(path), 1)
    lease = path / run / ".leases" / ("b" * 16 + ".json")
    lease.write_bytes(content)
    publish(str(path), 1)
    publish(str(path), 2, keep=1, full_every=1)
    assert (path / run).exists()
    os.utime(lease, (0, 0))
    publish(str(path), 1)
    assert not (path / run).exists()


def test_the_lease_of_a_reader_whose_files_nobody_else_may_read_ends_as_any_other() -> None:
    require_root()
    with tempfile.TemporaryDirectory() as folder:
        lease = Path(folder, "0123456789abcdef.json")
        lease.write_text('{"version": 3}')
        lease.chmod(0o600)
        os.utime(lease, (0, 0))
        os.chown(folder, NOBODY, -1)
        os.seteuid(NOBODY)  # the trainer, which removes old versions
        try:
            assert versions._leased(records_at(folder), [lease.name], time.time()) == set()
        finally:
            os.seteuid(0)
        assert not lease.exists()


def test_versions_of_others_beside_other_runs_are_versions(tmp_path: Path) -> None:
    publish(str(tmp_path / "ours"), 2)
    run = versions.current_run(str(tmp_path / "ours"))
    (tmp_path / "ours" / str(run)).rename(tmp_path / "theirs")
    (tmp_path / "theirs" / "runs" / "events").mkdir(parents=True)  # as TensorBoard makes it
    assert versions.all_versions(str(tmp_path / "theirs")) == {"": [1, 2]}
