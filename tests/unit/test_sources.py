"""Sources: recognised by content, and read from headers alone, which must agree with the files."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from programs import require_root
from safetensors.torch import save_file
from stored import json_header, write_with_header
from workspaces import commit, held, write

from statexchange.checkpoint.merge import merge_checkpoint
from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    NotFoundError,
    ReplicaError,
)
from statexchange.formats.registry import open_checkpoint, open_source
from statexchange.sharding.shards import Box
from statexchange.storage.location import seal
from statexchange.storage.workspace import RankName, Workspace


def fill(path: Path, run: str = "job", ranks: int = 3, world_size: int = 3, number: int = 1) -> list[RankName]:
    """Write a round of a workspace, in which each rank has one row of `w`."""
    names = []
    for rank in range(ranks):
        row = held(data=bytes([rank] * 4), global_shape=(world_size, 4), boxes=(Box((rank, 0), (1, 4)),))
        names.append(write(Workspace(path), rank, world_size, run, number, tensors=[row], config=str(rank)))
    return names


def test_a_workspace_its_run_its_round_and_its_file_are_recognised(tmp_path: Path) -> None:
    ws = tmp_path / "ws"
    names = fill(ws)
    commit(ws, names[0])
    for path in (ws, ws / "job", ws / "job" / "000001"):
        source = open_source(path)
        assert (source.kind, source.run, source.round, source.world_size) == ("workspace", "job", 1, 3)
        assert ([h.rank for h in source.files], dict(source.configs)) == ([0, 1, 2], {0: "0", 1: "1", 2: "2"})
        assert source.nbytes == sum((ws / r.relative).stat().st_size for r in names)
    assert [h.rank for h in open_source(ws / names[1].relative).files] == [1]


def test_a_ranks_file_in_a_wrong_directory_is_named(tmp_path: Path) -> None:
    names = fill(tmp_path / "ws")
    for place in (tmp_path, tmp_path / "job" / "7", tmp_path / ".hidden" / "000001"):
        place.mkdir(parents=True, exist_ok=True)
        copy = shutil.copy(tmp_path / "ws" / names[0].relative, place)
        with pytest.raises(InvalidArgumentError, match="<workspace>/<run>/<round>"):
            open_source(copy)


def test_byte_ranges_hold_the_bytes_of_the_tensors(tmp_path: Path) -> None:
    fill(tmp_path / "ws")
    for holder, tensor in open_source(tmp_path / "ws").shards():
        (byte_range,) = tensor.byte_ranges
        data = Path(byte_range.path).read_bytes()[byte_range.begin : byte_range.begin + byte_range.nbytes]
        assert data == bytes([holder.rank] * 4)


def test_the_newest_whole_round_is_read(tmp_path: Path) -> None:
    fill(tmp_path, number=1)
    fill(tmp_path, number=2)
    fill(tmp_path, number=3, ranks=2)
    assert open_source(tmp_path).round == 2
    assert open_source(tmp_path / "job" / "000001").round == 1


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    fill(tmp_path, ranks=1)
    with pytest.raises(IncompleteError, match=r"ranks \[1, 2\] of 3") as caught:
        open_source(tmp_path)
    assert (caught.value.rank, caught.value.path) == (1, str(tmp_path / "job" / "000001"))
    source = open_source(tmp_path, strict=False)
    assert ([type(p) for p in source.problems], len(source.files)) == ([IncompleteError], 1)


def test_two_attempts_in_one_round_are_not_mixed(tmp_path: Path) -> None:
    fill(tmp_path)
    fill(tmp_path, ranks=1)
    with pytest.raises(CorruptError, match="two attempts"):
        open_source(tmp_path)


def test_with_several_runs_a_run_must_be_chosen(tmp_path: Path) -> None:
    fill(tmp_path, run="a")
    fill(tmp_path, run="b")
    with pytest.raises(InvalidArgumentError, match=f"{tmp_path}/a, {tmp_path}/b "):
        open_source(tmp_path)
    assert open_source(tmp_path / "b").run == "b"


def test_unknown_paths_are_not_found(tmp_path: Path) -> None:
    (tmp_path / "sub" / "000001").mkdir(parents=True)
    (tmp_path / "rank-config.txt").write_text("")
    for path in (tmp_path, tmp_path / "sub", tmp_path / "sub" / "000001"):
        with pytest.raises(NotFoundError, match="neither"):
            open_source(path)
    with pytest.raises(NotFoundError, match="no such path"):
        open_source(tmp_path / "gone")
    (tmp_path / "text").write_text("hello, I am no checkpoint")
    with pytest.raises(NotFoundError, match=r"neither .*\.pt"):
        open_source(tmp_path / "text")
    (tmp_path / "text").rename(tmp_path / "text.safetensors")
    with pytest.raises(CorruptError, match="not a safetensors"):
        open_source(tmp_path / "text.safetensors")


def test_broken_files_are_named_in_problems_or_errors(tmp_path: Path) -> None:
    names = fill(tmp_path)
    path = tmp_path / names[1].relative
    os.truncate(path, 100)
    with pytest.raises(CorruptError) as caught:
        open_source(tmp_path)
    assert caught.value.path == str(path)
    assert [p.path for p in open_source(tmp_path, strict=False).problems] == [str(path)]


def tensor_metadata(**change: Any) -> dict[str, Any]:
    entry = {"dtype": "U8", "global_shape": [1, 4], "boxes": [[[0, 0], [1, 4]]], "digests": ["x"]}
    return {"tensors": {"w": entry | change}}


BROKEN_METADATA: list[tuple[dict[str, Any], str]] = [
    ({"tensors": {}}, "list different tensors"),
    ({"tensors": {"w": []}}, "broken metadata"),
    (tensor_metadata(boxes=[[[0, 0], [1, 3]]]), "does not fit"),
    (tensor_metadata(dtype="F32", boxes=[[[0, 0], [1, 1]]]), "does not fit"),
    (tensor_metadata(boxes=[[[1, 0], [1, 4]]]), "outside"),
    (tensor_metadata(boxes=[[[-1, 0], [1, 4]]]), "broken metadata"),
    (tensor_metadata(global_shape=[True, 4]), "list of sizes"),
    (tensor_metadata(global_shape=[1, 4.0]), "list of sizes"),
    (tensor_metadata(boxes=[[[0, False], [1, 4]]]), "not a box"),
    (tensor_metadata(dtype=[]), "unknown dtype"),
    (tensor_metadata(digests=[]), "does not fit"),
    ({"schema": 2}, "another version"),
    ({"config": {}}, "not text"),
    ({"aliases": [1]}, "broken aliases"),
    ({"aliases": {"v": 1}}, "broken aliases"),
    ({"rank": 1}, "another rank"),
    ({"run": "other"}, "another run"),
]


def write_metadata(path: Path, change: dict[str, Any], *, sealed: bool) -> None:
    """Change the metadata of a rank's file, and its digest if `sealed`."""
    header = json_header(path)
    metadata = {**json.loads(header["__metadata__"]["statexchange"]), **change}
    if sealed:
        record = {key: value for key, value in metadata.items() if key not in ("digest", "tensors")}
        metadata = {**seal(record), "tensors": metadata["tensors"]}
    header["__metadata__"]["statexchange"] = json.dumps(metadata)
    write_with_header(path, json.dumps(header).encode(), path.read_bytes()[-4:])


@pytest.mark.parametrize(("change", "match"), BROKEN_METADATA)
def test_metadata_that_contradicts_the_file_is_refused(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    (name,) = fill(tmp_path, ranks=1, world_size=1)
    path = tmp_path / name.relative
    write_metadata(path, change, sealed=True)
    with pytest.raises(CorruptError, match=match) as caught:
        open_source(tmp_path)
    assert caught.value.path == str(path)


@pytest.mark.parametrize("change", [{"config": '{"step":9}'}, {"aliases": {"v": "w"}}, {"more": 1}, {"digest": "0"}])
def test_metadata_that_was_changed_is_found(tmp_path: Path, change: dict[str, Any]) -> None:
    (name,) = fill(tmp_path, ranks=1, world_size=1)
    write_metadata(tmp_path / name.relative, change, sealed=False)
    with pytest.raises(CorruptError, match="digest") as caught:
        open_source(tmp_path)
    assert caught.value.rank == 0


@pytest.mark.parametrize("name", ["save.json", "statexchange.json"])
def test_a_file_that_only_describes_a_checkpoint_is_no_checkpoint(published: Path, name: str) -> None:
    (published / name).touch()
    with pytest.raises(InvalidArgumentError, match=f"give its directory, {published} ") as caught:
        open_source(published / name)
    assert caught.value.path == str(published / name)


@pytest.fixture
def published(tmp_path: Path) -> Path:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.ones(2)}
    save_file(tensors, tmp_path / "x.safetensors")
    merge_checkpoint(tmp_path / "x.safetensors", tmp_path / "out", max_shard_size=24)
    return tmp_path / "out"


def test_a_published_directory_is_read_by_its_manifest(published: Path) -> None:
    source = open_source(published)
    assert (source.kind, len(source.files), source.problems) == ("huggingface", 2, ())
    assert all(byte_range.digest for _, tensor in source.shards() for byte_range in tensor.byte_ranges)
    (published / "unlisted.safetensors").write_bytes(b"no checkpoint at all")
    assert len(open_source(published).files) == 2


def test_a_directory_without_a_manifest_is_read_by_its_index_and_without_both_by_listing(published: Path) -> None:
    (published / "statexchange.json").unlink()
    save_file({"d": torch.ones(1)}, published / "more.safetensors")
    assert {h.path.split("/")[-1][:5] for h in open_source(published).files} == {"model"}
    (published / "model.safetensors.index.json").unlink()
    with pytest.raises(InvalidArgumentError, match="sets of weights") as caught:
        open_source(published)
    assert "more.safetensors" in caught.value.message
    (published / "more.safetensors").unlink()
    assert len(open_source(published).files) == 2


def test_a_lazy_mapping_reads_tensors_one_by_one(published: Path) -> None:
    checkpoint = open_checkpoint(published)
    assert sorted(checkpoint) == ["a", "b", "c"]
    assert (checkpoint["a"].shape, checkpoint["a"].dtype, checkpoint["a"].nbytes, len(checkpoint)) == (
        (2, 3),
        "F32",
        24,
        3,
    )
    assert checkpoint["a"].read().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert checkpoint["b"].read().astype(np.float32).tolist() == [1] * 4
    with pytest.raises(KeyError):
        checkpoint["z"]


def test_a_lazy_mapping_reads_shards_as_one_tensor_and_compares_copies(tmp_path: Path) -> None:
    fill(tmp_path / "ws")
    with open_checkpoint(tmp_path / "ws") as shards:
        merge_checkpoint(tmp_path / "ws", tmp_path / "merged")
        with open_checkpoint(tmp_path / "merged") as merged:
            assert {n: t.read().tobytes() for n, t in shards.items()} == {
                n: t.read().tobytes() for n, t in merged.items()
            }
    for name in "01":
        save_file({"a": torch.ones(1)}, tmp_path / f"part-{name}.safetensors")
    shutil.rmtree(tmp_path / "ws")
    with open_checkpoint(tmp_path) as equal:
        assert equal["a"].read()[0] == 1
    save_file({"a": torch.zeros(1)}, tmp_path / "part-1.safetensors")
    with open_checkpoint(tmp_path) as differing, pytest.raises(ReplicaError) as caught:
        differing["a"].read()
    assert caught.value.name == "a"


def test_a_missing_output_file_is_named(published: Path) -> None:
    lost = published / "model-00002-of-00002.safetensors"
    lost.unlink()
    with pytest.raises(IncompleteError, match="missing") as caught:
        open_source(published)
    assert caught.value.path == str(lost)
    assert len(open_source(published, strict=False).files) == 1


@pytest.mark.parametrize("by", ["manifest", "index"])
def test_a_tensor_that_is_absent_from_its_file_is_named(published: Path, by: str) -> None:
    (published / {"manifest": "model.safetensors.index.json", "index": "statexchange.json"}[by]).unlink()
    path = published / "model-00002-of-00002.safetensors"
    save_file({"b": torch.ones(4, dtype=torch.bfloat16)}, path)
    with pytest.raises(IncompleteError, match="the index") as caught:
        open_source(published)
    assert caught.value.name == "c"
    assert (caught.value.name, caught.value.path) == ("c", str(path))


def rewrite(path: Path, change: Any) -> None:
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/etc/passwd", ".hidden.safetensors", "a/b.safetensors", "x", "", 5, None, "a\0.safetensors"],
)
@pytest.mark.parametrize("by", ["statexchange.json", "model.safetensors.index.json"])
def test_an_index_or_manifest_cannot_lead_elsewhere(published: Path, by: str, name: Any) -> None:
    (published / ({"statexchange.json", "model.safetensors.index.json"} - {by}).pop()).unlink()
    change = {
        "statexchange.json": lambda raw: raw["tensors"]["a"].update(file=name),
        "model.safetensors.index.json": lambda raw: raw["weight_map"].update(a=name),
    }[by]
    rewrite(published / by, change)
    with pytest.raises(CorruptError):
        open_source(published)
    assert open_source(published, strict=False).problems


MANIFESTS = [
    "", "[]", "{}", '{"tensors":[]}', '{"tensors":{"a":1}}',
    '{"tensors":{},"aliases":[]}', '{"tensors":{},"tensors":{}}',
    '{"tensors":{"a":{"file":"x.safetensors","dtype":[],"shape":[],"boxes":[]}}}',
    '{"tensors":{"a":{"file":"x.safetensors","dtype":"F32","shape":[2],"boxes":[[[0],[3],"",0]]}}}',
    '{"tensors":{"a":{"file":"x.safetensors","dtype":"F32","shape":[2],"boxes":[[[0],[2],"",0.5]]}}}',
    '{"tensors":{"a":{"file":"x.safetensors","dtype":"F32","shape":[1e999],"boxes":[]}}}',
]  # fmt: skip


@pytest.mark.parametrize("text", MANIFESTS)
def test_a_hostile_manifest_is_corrupt_or_a_problem(published: Path, text: str) -> None:
    path = published / "statexchange.json"
    path.write_text(text)
    with pytest.raises(CorruptError) as caught:
        open_source(published)
    assert caught.value.path == str(path)
    (problem,) = open_source(published, strict=False).problems
    assert isinstance(problem, CorruptError)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map":[]}', '{"weight_map":{"a":"b.safetensors"}}'])
def test_a_hostile_index_is_an_error_that_names_it(published: Path, text: str) -> None:
    (published / "model.safetensors.index.json").write_text(text)
    with pytest.raises((CorruptError, IncompleteError)) as caught:
        open_source(published)
    assert str(published) in str(caught.value.path)


def test_a_symbolic_link_to_a_checkpoint_is_followed_as_the_hubs_cache_needs(published: Path, tmp_path: Path) -> None:
    os.symlink(published, tmp_path / "link")
    blob = tmp_path / "blob"
    os.rename(published / "model-00001-of-00002.safetensors", blob)
    os.symlink(blob, published / "model-00001-of-00002.safetensors")
    assert len(open_checkpoint(tmp_path / "link")) == 3


def test_an_unreadable_directory_is_a_named_error(tmp_path: Path) -> None:
    program = """
import os, sys
import statexchange.formats.workspace, statexchange.formats.registry
from statexchange.errors import StorageError
os.chdir(sys.argv[1])
os.chmod("ws", 0o700)
os.setuid(65534)
try:
    statexchange.formats.registry.open_source("ws")
except StorageError as error:
    print(error.errno, error.path)
"""
    require_root()
    fill(tmp_path / "ws")
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout == f"13 {tmp_path / 'ws'}\n", done.stderr


def test_files_and_directories_of_other_names_beside_rounds_are_ignored(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "job" / "0000002").mkdir()
    (tmp_path / "job" / "000001" / "rank-notes").write_text("")
    os.symlink(tmp_path / "job", tmp_path / "link")
    assert open_source(tmp_path).round == 1
    (tmp_path / "job" / "000002").write_text("a file, not a round")
    os.symlink(tmp_path / "job" / "000001", tmp_path / "job" / "000003")
    assert open_source(tmp_path).round == 1
