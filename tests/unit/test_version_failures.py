"""How readers of versions fail, each by its number in the list of what users report, and what happens here instead.

The directory is seen as it can be seen on a network: without what another host has written, with half of it, or after a
trainer or a reader was killed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shared_form import SharedFormWriter, changed, random_tensors, version_name

import statexchange as sx
from statexchange.errors import (
    CorruptError,
    IncompleteError,
    NotFoundError,
    StallError,
    TargetExistsError,
    UnsupportedError,
)
from statexchange.storage import versions
from statexchange.storage.records import records_at


def publish(path: Path, count: int, *, first: int = 1, **options: Any) -> list[dict[str, torch.Tensor]]:
    """Publish versions, all but the first one deltas; return the weights of each."""
    weights = {"w": torch.zeros(5000), "b": torch.zeros(10)}
    published = []
    with sx.Publisher(path, **options) as publisher:
        for number in range(first, first + count):
            weights["w"][number * 7] = float(number)
            publisher.publish(weights, number)
            published.append({name: tensor.clone() for name, tensor in weights.items()})
    return published


def run_of(path: Path) -> Path:
    run = versions.current_run(str(path))
    assert run is not None
    return path / run


def loaded(subscriber: sx.Subscriber, **options: Any) -> tuple[int, dict[str, torch.Tensor]]:
    version = subscriber.wait(timeout_s=0, **options)
    weights = {"w": torch.full((5000,), -1.0), "b": torch.full((10,), -1.0)}
    with subscriber.stage(version) as staged:
        staged.load_into(weights)
    return version.number, weights


def assert_equal(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("hidden", ["statexchange.json", "model.safetensors.index.json", "both"])
def test_1_a_delta_without_its_index_is_not_taken_for_a_full_version(tmp_path: Path, hidden: str) -> None:
    publish(tmp_path / "updates", 2)
    delta = run_of(tmp_path / "updates") / "weight_v000002"
    for name in ("statexchange.json", "model.safetensors.index.json"):
        if hidden in (name, "both"):
            (delta / name).unlink()
    if hidden == "model.safetensors.index.json":  # for others alone: our manifest decides
        with sx.open_checkpoint(delta) as tensors:
            assert tensors["w"].read()[14] == 2.0
        return
    if hidden == "both":
        with pytest.raises(IncompleteError, match="can be seen here"):
            sx.open_checkpoint(delta)
        with sx.Subscriber(tmp_path / "updates") as subscriber:
            assert loaded(subscriber)[0] == 1
        return
    with sx.open_checkpoint(delta) as tensors:  # as others read it
        assert tensors["w"].read()[14] == 2.0


FOLLOW = """
import sys
import torch
import statexchange as sx
weights = {"w": torch.zeros(5000), "b": torch.zeros(10)}
version = None
with sx.Subscriber(sys.argv[1], cache=sys.argv[2]) as subscriber:
    while True:
        version = subscriber.wait(newer_than=version)
        with subscriber.stage(version) as staged:
            staged.load_into(weights)
        print(version.number, flush=True)
"""


def test_2_a_killed_reader_goes_on_from_what_is_whole(tmp_path: Path) -> None:
    path, cache = tmp_path / "updates", tmp_path / "cache"
    weights = {"w": torch.zeros(5000), "b": torch.zeros(10)}
    publisher = sx.Publisher(path)
    for number in range(1, 9):
        weights["w"][number * 7] = float(number)
        publisher.publish(weights, number)
        reader = subprocess.Popen([sys.executable, "-c", FOLLOW, str(path), str(cache)], stdout=subprocess.PIPE)
        try:
            if number % 2:  # killed at some moment of its first stage
                time.sleep(1.2 + 0.05 * number)
            else:
                assert reader.stdout is not None
                assert int(reader.stdout.readline()) == number
        finally:
            reader.send_signal(signal.SIGKILL)
            reader.communicate()
        with sx.Subscriber(path, cache=cache) as subscriber:
            number_seen, seen = loaded(subscriber)
        assert number_seen == number
        assert_equal(seen, weights)


def test_3_a_data_file_that_is_not_visible_is_waited_for(tmp_path: Path) -> None:
    published = publish(tmp_path / "updates", 3)
    delta = run_of(tmp_path / "updates") / "weight_v000003"
    (hidden,) = delta.glob("*.safetensors")
    moved = hidden.rename(tmp_path / "hidden")
    with pytest.raises(IncompleteError, match="not yet visible"):
        sx.open_checkpoint(delta)
    with sx.Subscriber(tmp_path / "updates") as subscriber:
        number, weights = loaded(subscriber)
        assert number == 2
        assert_equal(weights, published[1])
        with pytest.raises(StallError):
            subscriber.wait(version=3, timeout_s=0.2)
        moved.rename(hidden)
        number, weights = loaded(subscriber)
    assert number == 3
    assert_equal(weights, published[2])


def test_4_a_trainer_that_numbers_from_1_again_is_followed(tmp_path: Path) -> None:
    publish(tmp_path / "updates", 5)
    with sx.Subscriber(tmp_path / "updates") as subscriber:
        before = subscriber.wait(timeout_s=0)
        assert before.number == 5
        published = publish(tmp_path / "updates", 2)
        number, weights = loaded(subscriber, newer_than=before)
        assert number == 2
        assert_equal(weights, published[1])
        after = subscriber.wait(newer_than=before, timeout_s=0)
        with pytest.raises(StallError):
            subscriber.wait(newer_than=after, timeout_s=0)


def test_5_staged_bytes_that_were_lost_are_not_loaded(tmp_path: Path) -> None:
    published = publish(tmp_path / "updates", 2)
    cache = tmp_path / "cache"
    with sx.Subscriber(tmp_path / "updates", cache=cache) as subscriber:
        with subscriber.stage(subscriber.wait(version=1)) as staged:
            (file,) = Path(staged.directory()).glob("*.safetensors")
        data = bytearray(file.read_bytes())
        data[-100] ^= 1
        file.write_bytes(data)
        with pytest.raises(CorruptError, match="differ from their digest"):
            loaded(subscriber, version=1)
        # The next version is not made from what is broken.
        number, weights = loaded(subscriber)
    assert number == 2
    assert_equal(weights, published[1])


def test_6_an_overwrite_whose_positions_may_wrap_is_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(9)
    writer, tensors = SharedFormWriter(tmp_path), random_tensors(rng, 2)
    writer.write_full(1, tensors)
    delta = writer.write_delta(2, 1, tensors, changed(rng, tensors, 0.1))
    index = json.loads((delta / "model.safetensors.index.json").read_text())
    index["metadata"]["delta_encoding"] = "overwrite"
    (delta / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedError, match="overwrite"):
        sx.open_checkpoint(delta)


def test_7_an_entry_that_two_files_have_is_refused(tmp_path: Path) -> None:
    publish(tmp_path / "updates", 2)
    delta = run_of(tmp_path / "updates") / "weight_v000002"
    (file,) = delta.glob("*.safetensors")
    index = json.loads((delta / "model.safetensors.index.json").read_text())
    (delta / "statexchange.json").unlink()
    shutil.copy(file, delta / "model-00001-of-00002.safetensors")
    index["weight_map"]["b"] = "model-00001-of-00002.safetensors"
    (delta / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(IncompleteError, match="its tensors disagree"):
        sx.open_checkpoint(delta)


def test_8_a_version_that_is_read_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("statexchange.checkpoint.version_retention.GRACE_S", 0.0)
    path = tmp_path / "updates"
    weights = {"w": torch.zeros(5000)}
    with sx.Publisher(path, keep=1, full_every=1) as publisher:
        publisher.publish(weights, 1)
        run = versions.current_run(str(path))
        assert run is not None
        lease = versions.Lease(str(path), run, 1)
        for number in range(2, 6):
            publisher.publish(weights, number)
        assert sorted(path.glob("*/weight_v*"))[0].name == "weight_v000001"
        with pytest.raises(NotFoundError, match="was retired"):
            versions.Lease(str(path), run, 1)
        lease.end()
        publisher.publish(weights, 6)
        publisher.publish(weights, 7)
    assert [version.name for version in sorted(path.glob("*/weight_v*"))] == ["weight_v000007"]
    assert list(path.glob("*/.leases/*.json")) == []


def test_8_a_reader_that_may_not_write_reads_all_the_same(tmp_path: Path) -> None:
    published = publish(tmp_path / "updates", 2)
    leases = run_of(tmp_path / "updates") / ".leases"
    shutil.rmtree(leases)  # root may write where others may not
    leases.write_text("no directory")
    with sx.Subscriber(tmp_path / "updates") as subscriber:
        number, weights = loaded(subscriber)
    assert number == 2
    assert_equal(weights, published[1])


def test_9_a_published_version_is_not_written_again(tmp_path: Path) -> None:
    publish(tmp_path / "updates", 2)
    run = run_of(tmp_path / "updates")
    with sx.Publisher(tmp_path / "updates") as publisher:
        publisher.publish({"w": torch.zeros(5000), "b": torch.ones(10)}, 1)
    other = run_of(tmp_path / "updates")
    shutil.rmtree(run / "weight_v000001")
    shutil.copytree(other / "weight_v000001", run / "weight_v000001")
    with pytest.raises(CorruptError, match="is not the version"):
        sx.open_checkpoint(run / "weight_v000002")
    with pytest.raises(TargetExistsError):
        sx.export_checkpoint({"w": torch.zeros(3)}, run / "weight_v000001")


def test_10_what_is_not_installed_does_not_count(tmp_path: Path) -> None:
    publish(tmp_path / "updates", 2)
    with sx.Subscriber(tmp_path / "updates") as subscriber:
        installed = subscriber.wait(version=1, timeout_s=0)
        newest = subscriber.wait(newer_than=installed, timeout_s=0)
        with subscriber.stage(newest) as staged, pytest.raises(sx.errors.StateExchangeError):
            staged.load_into({"w": torch.zeros(4), "b": torch.zeros(10)})
        assert subscriber.wait(newer_than=installed, timeout_s=0) == newest


def test_11_a_chain_without_its_base_is_healed_by_the_next_full_version(tmp_path: Path) -> None:
    path = tmp_path / "updates"
    weights = {"w": torch.zeros(5000), "b": torch.zeros(10)}
    with sx.Publisher(path, full_every=3) as publisher, sx.Subscriber(path) as subscriber:
        for number in (1, 2):
            publisher.publish(weights, number)
        shutil.rmtree(run_of(path) / "weight_v000001")
        with pytest.raises(IncompleteError, match="is not beside it"):
            sx.open_checkpoint(run_of(path) / "weight_v000002")
        publisher.publish(weights, 3)
        with pytest.raises(
            StallError,
            match="is not beside it",
        ):
            subscriber.wait(timeout_s=0)
        weights["b"] += 1
        publisher.publish(weights, 4)
        number, seen = loaded(subscriber)
    assert number == 4
    assert_equal(seen, weights)


def test_12_the_next_version_is_made_from_the_staged_one_and_one_delta(tmp_path: Path) -> None:
    path = tmp_path / "updates"
    weights = {"w": torch.zeros(5000), "b": torch.zeros(10)}
    with sx.Publisher(path) as publisher, sx.Subscriber(path) as subscriber:
        for number in range(1, 5):
            weights["w"][number] = 1.0
            publisher.publish(weights, number)
            have, seen = loaded(subscriber)
        version = subscriber.wait(timeout_s=0)
        weights["w"][17] = 1.0
        publisher.publish(weights, 5)
        newest = subscriber.wait(newer_than=version, timeout_s=0)
        for number in range(1, 5):  # nothing of the chain is read again
            shutil.rmtree(run_of(path) / version_name(number))
        with subscriber.stage(newest) as staged:
            staged.load_into(seen)
    assert have == 4
    assert_equal(seen, weights)


@pytest.mark.parametrize("kept_bytes", [0, 5, 100, 5000])
def test_13_half_of_a_file_is_waited_for(tmp_path: Path, kept_bytes: int) -> None:
    published = publish(tmp_path / "updates", 3, full_every=2)
    (file,) = (run_of(tmp_path / "updates") / "weight_v000003").glob("*.safetensors")
    data = file.read_bytes()
    file.write_bytes(data[:kept_bytes])
    with sx.Subscriber(tmp_path / "updates") as subscriber:
        assert loaded(subscriber)[0] == 2
        file.write_bytes(data)
        number, weights = loaded(subscriber)
    assert number == 3
    assert_equal(weights, published[2])


def test_a_staged_version_has_the_same_bytes_on_every_host(tmp_path: Path) -> None:
    """Ranks of one engine read the copies of their hosts, of which one may be new and another not."""
    path = tmp_path / "updates"
    publish(path, 4)
    contents = []
    for cache in ("warm", "cold"):
        with sx.Subscriber(path, cache=tmp_path / cache) as subscriber:
            for number in (3, 4) if cache == "warm" else (4,):
                with subscriber.stage(subscriber.wait(version=number, timeout_s=0)) as staged:
                    folder = Path(staged.directory())
            contents.append({file.name: file.read_bytes() for file in folder.iterdir()})
    assert contents[0] == contents[1]


def test_a_run_that_has_only_begun_hides_no_version(tmp_path: Path) -> None:
    published = publish(tmp_path / "updates", 2)
    versions.begin_run(str(tmp_path / "updates"))
    with sx.Subscriber(tmp_path / "updates") as subscriber:
        number, weights = loaded(subscriber)
    assert number == 2
    assert_equal(weights, published[1])


def test_files_of_others_in_an_old_version_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("statexchange.checkpoint.version_retention.GRACE_S", 0.0)
    path = tmp_path / "updates"
    weights = {"w": torch.zeros(50)}
    with sx.Publisher(path, keep=1, full_every=1) as publisher:
        publisher.publish(weights, 1)
        (run_of(path) / "weight_v000001" / "notes.txt").write_text("mine")
        for number in range(2, 6):
            publisher.publish(weights, number)
    assert (run_of(path) / "weight_v000001" / "notes.txt").read_text() == "mine"
    assert sorted(version.name for version in run_of(path).glob("weight_v*")) == ["weight_v000001", "weight_v000005"]


def test_what_cannot_be_removed_does_not_fail_a_publish(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "updates"
    weights = {"w": torch.zeros(50)}
    with sx.Publisher(path) as publisher:
        publisher.publish(weights, 1)
        (run_of(path) / ".leases" / "0123456789abcdef.json").write_text("{}")
        (run_of(path) / "latest").unlink()
        (run_of(path) / "latest").mkdir()
        report = publisher.publish(weights, 2)
    assert report.kind == "delta"
    assert "version 2 is published, but not all old versions are removed" in caplog.text


# Versions of other programs


@pytest.mark.parametrize(("checksum", "files"), [("adler32", 1), ("xxh3-128", 3)])
def test_versions_of_others_are_read(tmp_path: Path, checksum: Any, files: int) -> None:
    rng = np.random.default_rng(5)
    writer = SharedFormWriter(tmp_path, checksum=checksum, files=files)
    tensors = random_tensors(rng, 10)
    writer.write_full(1, tensors)
    with sx.Subscriber(tmp_path) as subscriber:
        for number in range(2, 8):
            new = changed(rng, tensors, 0.05)
            writer.write_delta(number, number - 1, tensors, new)
            tensors = new
            version = subscriber.wait(timeout_s=0)
            assert (version.number, version.run) == (number, "")
            with subscriber.stage(version) as staged, staged.tensors() as found:
                assert set(found) == set(tensors)
                for name, raw in tensors.items():
                    assert (found[name].dtype, found[name].shape) == (raw.dtype, raw.shape)
                    assert np.ascontiguousarray(found[name].read()).tobytes() == raw.data, (number, name)


def test_versions_of_others_are_staged_from_the_last_one(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    writer, tensors = SharedFormWriter(tmp_path), random_tensors(rng, 6)
    full = writer.write_full(1, tensors)
    with sx.Subscriber(tmp_path) as subscriber:
        subscriber.stage(subscriber.wait(timeout_s=0)).close()
        (file,) = full.glob("*.safetensors")
        stat = file.stat()
        with file.open("r+b") as opened:  # what is not read again may be broken
            opened.seek(8 + int.from_bytes(opened.read(8), "little"))
            opened.write(bytes(stat.st_size - opened.tell()))
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        for number in (2, 3):
            new = changed(rng, tensors, 0.1)
            writer.write_delta(number, number - 1, tensors, new)
            tensors = new
            with subscriber.stage(subscriber.wait(timeout_s=0)) as staged, staged.tensors() as found:
                for name, raw in tensors.items():
                    assert np.ascontiguousarray(found[name].read()).tobytes() == raw.data, (number, name)


@pytest.mark.parametrize("what", ["checksum", "frame", "subtract", "overwrite", "blake3", "number", "key", "shape"])
def test_what_others_have_broken_is_named(tmp_path: Path, what: str) -> None:
    rng = np.random.default_rng(6)
    writer = SharedFormWriter(tmp_path)
    tensors = random_tensors(rng, 6)
    writer.write_full(1, tensors)
    delta = writer.write_delta(2, 1, tensors, changed(rng, tensors, 0.1))
    (file,) = delta.glob("*.safetensors")
    index = json.loads((delta / "model.safetensors.index.json").read_text())
    metadata = index["metadata"]
    if what in ("checksum", "frame"):
        data = bytearray(file.read_bytes())
        at = data.index(b'"__metadata__"') + 40 if what == "checksum" else len(data) - 20
        if what == "checksum":
            digits = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
            checksum = next(iter(digits.values()))
            at = data.index(checksum.encode())
            data[at : at + 1] = b"0" if checksum[0] != "0" else b"1"
        else:
            data[at] ^= 0xFF
        file.write_bytes(data)
    elif what == "blake3":
        metadata["checksum_format"] = what
    elif what in ("subtract", "overwrite"):
        metadata["delta_encoding"] = what
    elif what == "number":
        metadata["version"] = "000003"
    elif what == "key":
        del metadata["checksum_format"]
    else:
        index["weight_map"]["unknown"] = file.name
    (delta / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises((CorruptError, IncompleteError, UnsupportedError)) as raised, sx.open_checkpoint(delta) as found:
        for name in found:
            found[name].read()
    assert str(tmp_path) in str(raised.value)


def test_a_delta_under_another_name_is_known_by_its_manifest(tmp_path: Path) -> None:
    publish(tmp_path / "updates", 2)
    run = run_of(tmp_path / "updates")
    os.rename(run / "weight_v000002", run / "newest")
    with sx.open_checkpoint(run / "newest") as tensors:
        assert tensors["w"].read()[14] == 2.0


def test_a_delta_of_others_under_another_name_is_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    writer, tensors = SharedFormWriter(tmp_path), random_tensors(rng, 4)
    writer.write_full(1, tensors)
    delta = writer.write_delta(2, 1, tensors, changed(rng, tensors, 0.1))
    delta.rename(tmp_path / "newest")
    with pytest.raises(UnsupportedError, match="a delta of weights"):
        sx.open_checkpoint(tmp_path / "newest")


@pytest.mark.parametrize(("key", "value"), [("frame_nbytes", 1), ("frame_nbytes", 1 << 40), ("base", 2), ("base", -1)])
def test_a_manifest_that_cannot_be_right_is_refused(tmp_path: Path, key: str, value: int) -> None:
    weights = {"w": torch.zeros(2 << 20)}
    with sx.Publisher(tmp_path / "updates") as publisher:
        publisher.publish(weights, 1)
        weights["w"][5] = 1.0
        publisher.publish(weights, 2)
    manifest = run_of(tmp_path / "updates") / "weight_v000002" / "statexchange.json"
    record = json.loads(manifest.read_text())
    record["version"][key] = value
    manifest.write_text(json.dumps(record, separators=(",", ":")))
    with pytest.raises((CorruptError, IncompleteError)):
        sx.open_checkpoint(manifest.parent)


@pytest.mark.parametrize("text", ["[" * 4000, '{"version": 1e999}', '{"version": true}', '{"version": [1]}'])
def test_a_lease_that_cannot_be_read_keeps_all_versions(tmp_path: Path, text: str) -> None:
    name = "0123456789abcdef.json"
    (tmp_path / name).write_text(text)
    records = records_at(os.fspath(tmp_path))
    assert versions._leased(records, [name], records.modified(name) or 0.0) == {versions._ANY_VERSION}


def test_a_chain_of_more_deltas_than_python_recurses_is_read_and_closed(tmp_path: Path) -> None:
    rng = np.random.default_rng(9)
    writer, tensors = SharedFormWriter(tmp_path), random_tensors(rng, 2)
    new = changed(rng, tensors, 0.1)
    writer.write_full(0, tensors)
    deltas = [writer.write_delta(1, 0, tensors, new), writer.write_delta(2, 1, new, tensors)]
    last = sys.getrecursionlimit() + 100
    for number in range(3, last + 1):
        delta = shutil.copytree(deltas[(number + 1) % 2], tmp_path / version_name(number))
        index = json.loads((delta / "model.safetensors.index.json").read_text())
        index["metadata"] |= {"version": f"{number:06d}", "base_version": f"{number - 1:06d}"}
        (delta / "model.safetensors.index.json").write_text(json.dumps(index))
    with sx.open_checkpoint(tmp_path / version_name(last)) as found:
        values = {name: found[name].read().tobytes() for name in found}
    expected = new if last % 2 else tensors
    assert values == {name: tensor.data for name, tensor in expected.items()}
