"""Parameters that do not train at an object store: the next save copies their objects."""

from __future__ import annotations

from typing import Any

import fsspec
import pytest
from checkpoint_jobs import LARGE, adapter_of, load_adapters, load_large, save_large
from disk_stores import names_at, uploads_in
from forked_jobs import ForkedJobs
from frozen_parameters import ADAPTER_JOBS, FROZEN, set_base
from sweeps import slow, some

import statexchange as sx
from statexchange.report.verify import verify_saves
from statexchange.storage.publish import objects
from statexchange.testing import run_ranks

# At a URL: S3 copies the files itself


def save_adapters_at(url: str) -> list[int]:
    """Save three times, the second time with another base on rank 1; return the bytes that each save has copied."""
    saves = sx.Checkpoints(url, keep=2)
    copied = []
    for step in (10, 20, 30, 40):
        state = adapter_of(step, LARGE)
        if step == 20 and sx.get_rank() == 1:
            set_base(state, 7.0)
        copied.append(saves.save(state, step).linked_nbytes)
    return copied


def test_s3_copies_what_does_not_train(s3: str) -> None:
    url = f"{s3}/deep/saves"
    for copied in run_ranks(save_adapters_at, 2, args=(url,)):
        assert copied[:3] == [0, 0, 0]  # an equal base is written by both ranks, another one by each
        assert copied[3] > 16 << 20  # of the weight; the other rank's file has the bias alone
    names = ["rank-00000-of-00002.frozen-0.safetensors", "rank-00000-of-00002.safetensors"]
    names += [name.replace("rank-00000", "rank-00001") for name in names]
    assert names_at(url) == ["step-000000030", "step-000000040"]
    for step in (30, 40):
        assert names_at(f"{url}/step-{step:09d}") == [*names, "save.json"]
    assert run_ranks(load_large, 3, args=(url,)) == [40] * 3
    assert all(report.findings == () for _, report in verify_saves(url))
    sx.Checkpoints(url).delete(30)  # a copy shares nothing with its original
    assert run_ranks(load_large, 1, args=(url,)) == [40]


def test_a_restarted_job_copies_objects_of_the_newest_save_that_it_has_read(
    s3: str, caplog: pytest.LogCaptureFixture
) -> None:
    system = fsspec.filesystem("s3")
    save_large(s3, 10)
    assert sx.Checkpoints(s3).save(adapter_of(20, LARGE), 20).linked_nbytes > 0
    path = f"{s3}/step-000000020/{FROZEN}"
    damaged = bytearray(system.cat_file(path))
    damaged[-1] ^= 1
    system.pipe_file(path, bytes(damaged))
    assert sx.Checkpoints(s3).save(adapter_of(30, LARGE), 30).linked_nbytes == 0
    assert "is not linked, but written again" in caplog.text
    assert load_large(s3) == 30


def test_an_object_that_was_replaced_is_not_copied(s3: str) -> None:
    saves = sx.Checkpoints(s3)
    saves.save(adapter_of(10, LARGE), 10)
    path = f"{s3}/step-000000010/{FROZEN}"
    system = fsspec.filesystem("s3")
    data = system.cat_file(path)
    system.pipe_file(path, data[:-1] + b"x")
    assert saves.save(adapter_of(20, LARGE), 20).linked_nbytes == 0
    assert load_large(s3) == 20


def test_copies_of_one_object_have_different_etags(s3: str) -> None:
    """So that a publisher that has lost its claim does not remove the copy of its successor."""
    system = fsspec.filesystem("s3")
    tags = set()
    for name in ("a", "b"):
        saves = sx.Checkpoints(f"{s3}/{name}")
        copied = [saves.save(adapter_of(step, LARGE), step).linked_nbytes for step in (10, 20, 30)]
        assert copied == [0, copied[1], copied[1]]
        paths = [f"{s3}/{name}/step-0000000{step}/{FROZEN}" for step in (10, 20, 30)]
        assert len({system.cat_file(path) for path in paths}) == 1
        tags |= {system.info(path)["ETag"] for path in paths}
    assert len(tags) == 6


def test_a_large_object_is_copied_in_parts_and_a_small_one_written(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_COPIED_BYTES", 5 << 20)
    for rows in (32, LARGE):
        saves = sx.Checkpoints(f"{s3}/{rows}")
        copied = [saves.save(adapter_of(step, rows), step).linked_nbytes for step in (10, 20)]
        assert copied == [0, 0 if rows == 32 else copied[1]]
        path = f"{s3}/{rows}/step-000000020/{FROZEN}"
        if copied[1]:
            num_parts = int(fsspec.filesystem("s3").info(path)["ETag"].strip('"').partition("-")[2])
            assert num_parts in (3, 4)
        assert load_adapters(f"{s3}/{rows}", rows) == 20


def test_at_a_store_that_copies_nothing_each_save_is_written_whole(store: Any) -> None:
    saves = sx.Checkpoints("memory://saves")
    assert [saves.save(adapter_of(step, LARGE), step).linked_nbytes for step in (10, 20)] == [0, 0]
    assert names_at("memory://saves/step-000000020") == ["rank-00000-of-00001.safetensors", "save.json"]
    assert load_large("memory://saves") == 20


@pytest.mark.parametrize("every", [slow(4), pytest.param(1, marks=pytest.mark.long)], ids=["some", "all"])
@pytest.mark.timeout(900)
def test_a_job_killed_at_any_event_of_a_save_with_copies_goes_on_from_a_whole_save(s3: str, every: int) -> None:
    program = ADAPTER_JOBS.replace("adapters", "large")
    with ForkedJobs(f"from disk_stores import import_s3\nimport_s3()\n{program}") as jobs:
        for trace in ("trace", "trace-2"):
            jobs.run(f"{s3}/{trace}", [10])
        calls = jobs.fewest_calls(*((f"{s3}/{trace}", [20]) for trace in ("trace", "trace-2")))
        print(f"killed at {len(calls)} events")
        newest = set()
        for number in some(range(1, len(calls) + 1), every):
            url = f"{s3}/{number}"
            jobs.run(url, [10])
            jobs.run(url, [20], kill_at=number)
            (resumed,) = set(run_ranks(load_large, 3, args=(url,)))
            newest.add(resumed)
            steps = run_ranks(save_large, 2, args=(url, resumed + 10))[0]  # with no clean-up by hand
            assert steps == list(range(10, resumed + 11, 10)), number
            assert names_at(url) == [f"step-{step:09d}" for step in steps], number
            assert all(report.findings == () for _, report in verify_saves(url)), number
            assert [key for key in uploads_in(s3) if key.startswith(f"{number}/")] == [], number
    assert newest == {10, 20}
