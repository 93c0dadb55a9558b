"""The directory of a save: what lies in it, what is refused, and what is found when a part is missing or changed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from stored import contents_of, flip_bit

import statexchange as sx
from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    NotFoundError,
    TargetExistsError,
    UnsafeError,
)
from statexchange.formats.registry import open_source
from statexchange.report.summary import summarize
from statexchange.report.verify import verify
from statexchange.storage import files
from statexchange.storage.location import parse_json, seal
from statexchange.storage.rank_writer import write_tensor_file
from statexchange.storage.store import Budget
from statexchange.storage.tensorfile import SaveManifest, rank_metadata
from statexchange.testing import run_ranks

RANKS = 2
FILES = [f"rank-{rank:05d}-of-{RANKS:05d}.safetensors" for rank in range(RANKS)]


def save(path: Path, value: float = 1.0, **options: Any) -> sx.SaveReport:
    return sx.save_checkpoint({"model": {"w": np.full((6, 4), value, np.float32)}, "step": int(value)}, path, **options)


def value_of(path: Path) -> float:
    state = {"model": {"w": np.zeros((6, 4), np.float32)}, "step": -1}
    sx.load_checkpoint(state, path)
    assert np.unique(state["model"]["w"]).tolist() == [state["step"]]
    return float(state["step"])


def save_one_rank(path: str, value: float) -> None:
    rank = sx.get_rank()
    own = {f"own{rank}": np.full((5,), value + rank, np.float32)}
    sx.save_checkpoint({"same": np.full((3,), value, np.float32), **own, "step": int(value)}, path, overwrite=True)


def save_ranks(path: Path, value: float = 1.0, world_size: int = RANKS) -> Path:
    run_ranks(save_one_rank, world_size, args=(str(path), value))
    return path


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with two saves, by two ranks each."""
    folder = tmp_path_factory.mktemp("kept")
    save_ranks(folder / "one", 1.0)
    save_ranks(folder / "two", 2.0)
    return folder


@pytest.fixture
def saved(kept: Path, tmp_path: Path) -> Path:
    """Return a copy of the first of the two saves, for tests that damage it."""
    shutil.copytree(kept / "one", tmp_path / "saved")
    return tmp_path / "saved"


def state_of_ranks() -> dict[str, Any]:
    own = {f"own{rank}": np.zeros(5, np.float32) for rank in range(RANKS)}
    return {"same": np.zeros(3, np.float32), **own, "step": -1}


READERS: dict[str, Callable[[Path], Any]] = {
    "load": lambda path: sx.load_checkpoint(state_of_ranks(), path),
    "open": sx.open_checkpoint,
    "merge": lambda path: sx.merge_checkpoint(path, path.parent / "merged"),
}


# What a save is


def test_a_save_is_one_directory_with_a_file_of_each_rank_and_a_manifest(tmp_path: Path) -> None:
    began = time.time()
    path = save_ranks(tmp_path / "deep" / "er" / "saved")
    assert os.listdir(tmp_path / "deep" / "er") == ["saved"]
    assert sorted(os.listdir(path)) == [*FILES, "save.json"]
    manifest = json.loads((path / "save.json").read_text())
    assert list(manifest) == ["schema", "save", "job", "created", "step", "metrics", "files", "index", "digest"]
    assert manifest["files"] == [[name, (path / name).stat().st_size] for name in FILES]
    assert (manifest["schema"], manifest["step"], manifest["metrics"]) == (1, None, {})
    assert began <= manifest["created"] <= time.time()
    with open_source(path) as source:
        assert (source.kind, source.world_size, source.run) == ("save", RANKS, manifest["job"])
        assert source.created == manifest["created"]
        assert [file.rank for file in source.files] == [0, 1]
    assert summarize(path).kind == "save"
    assert verify(path).findings == ()


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_modes_follow_the_umask(tmp_path: Path, mask: int) -> None:
    old = os.umask(mask)
    try:
        save(tmp_path / "saved")
    finally:
        os.umask(old)
    modes = {p.stat().st_mode & 0o777 for p in (tmp_path / "saved").iterdir()}
    assert (modes, (tmp_path / "saved").stat().st_mode & 0o777) == ({0o666 & ~mask}, 0o777 & ~mask)


def test_a_save_of_fewer_ranks_replaces_that_of_more_whole(saved: Path) -> None:
    save_ranks(saved, 3.0, world_size=3)
    assert len(os.listdir(saved)) == 4
    save(saved, 1.0, overwrite=True)
    assert sorted(os.listdir(saved)) == ["rank-00000-of-00001.safetensors", "save.json"]
    assert os.listdir(saved.parent) == ["saved"]
    assert value_of(saved) == 1.0


def test_the_file_of_one_rank_alone_is_opened_as_its_part(saved: Path) -> None:
    (saved / FILES[0]).unlink()
    with sx.open_checkpoint(saved / FILES[1]) as checkpoint:
        assert sorted(checkpoint) == ["own1", "same"]
        assert checkpoint["own1"].read().tolist() == [2.0] * 5
    with open_source(saved / FILES[1]) as source:
        assert ([file.rank for file in source.files], source.world_size) == ([1], RANKS)
    assert verify(saved / FILES[1]).findings == ()


@pytest.mark.parametrize("text", ["{", "[" * 5000 + "]" * 5000, '{"$":"leaf","name":[]}'], ids=["open", "deep", "name"])
def test_a_broken_state_in_the_file_of_one_rank_is_corrupt(text: str, tmp_path: Path) -> None:
    number, path = "0123456789abcdef", tmp_path / "rank-00000-of-00001.safetensors"
    with files.directory(str(tmp_path)) as dir_fd:
        metadata = rank_metadata(number, 0, 1, text, {})
        write_tensor_file(dir_fd, path.name, str(path), [], metadata)
    (tmp_path / "save.json").write_bytes(SaveManifest(number, "job", 0.0, (path.stat().st_size,)).to_bytes())
    with pytest.raises(CorruptError, match="rank-00000"):
        sx.load_checkpoint({"w": np.ones(2)}, path)


# What is refused


@pytest.mark.parametrize("kind", ["save", "empty", "file", "checkpoint"])
@pytest.mark.parametrize("background", [False, True])
def test_a_save_to_a_path_that_exists_is_refused(tmp_path: Path, kind: str, background: bool) -> None:
    path = tmp_path / "saved"
    if kind == "save":
        save(path)
    elif kind == "empty":
        path.mkdir()
    elif kind == "file":
        path.write_text("mine")
    else:
        sx.export_checkpoint({"w": np.ones(2)}, path)
    before = contents_of(tmp_path)
    with pytest.raises(TargetExistsError, match="overwrite=True") as caught:
        if background:
            sx.save_checkpoint({"w": np.ones(3)}, path, background=True).result(30)
        else:
            save(path, 2.0)
    assert caught.value.path == str(path)
    assert contents_of(tmp_path) == before


def test_a_save_and_an_empty_directory_are_replaced_if_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    for value in (1.0, 2.0):
        save(tmp_path / "saved", value, overwrite=True)
        assert value_of(tmp_path / "saved") == value
    save(tmp_path / "new", 3.0, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["new", "saved"]


@pytest.mark.parametrize(
    "kind", ["file", "link", "other directory", "broken manifest", "checkpoint", "more", "workspace"]
)
def test_a_save_never_replaces_what_is_no_save(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "saved"
    if kind == "file":
        path.write_text("mine")
    elif kind == "link":
        save(tmp_path / "real")
        path.symlink_to(tmp_path / "real")
    elif kind == "other directory":
        path.mkdir()
        (path / "notes.txt").write_text("mine")
    elif kind == "checkpoint":
        sx.export_checkpoint({"w": np.ones(2)}, path)
    elif kind == "workspace":
        sx.NFSWorkspace(path, run="job").write_configs_and_weights(None, {"w": np.ones(2)})
    else:
        save(path)
        (path / ("notes.txt" if kind == "more" else "save.json")).write_text("mine")
    before = contents_of(tmp_path)
    with pytest.raises(CorruptError if kind == "broken manifest" else UnsafeError) as caught:
        save(path, 2.0, overwrite=True)
    assert str(caught.value.path).startswith(str(path))
    assert contents_of(tmp_path) == before


def test_a_checkpoint_does_not_replace_a_save(tmp_path: Path) -> None:
    save(tmp_path / "saved")
    with pytest.raises(UnsafeError, match="is not listed"):
        sx.export_checkpoint({"w": np.ones(2)}, tmp_path / "saved", overwrite=True)
    assert value_of(tmp_path / "saved") == 1.0


def test_a_save_does_not_go_to_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for options in ({}, {"overwrite": True}):
        with pytest.raises(InvalidArgumentError, match="to a directory"):
            sx.save_checkpoint({"w": np.ones(2)}, "shm://name", **options)
    assert os.listdir() == []


# Two savers


STOPPED = """
import sys
import numpy as np
import statexchange as sx

def hook(event, args):
    if event == "statexchange.storage" and args[0] == "link":
        print("stopped", flush=True)
        sys.stdin.readline()

path, overwrite = sys.argv[1], len(sys.argv) > 2
state = {"model": {"w": np.full((6, 4), 5.0, np.float32)}, "step": 5}
sys.addaudithook(hook)
sx.save_checkpoint(state, path, overwrite=overwrite)
"""


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a saver that stops when it is about to give its first file a name."""
    started = []

    def start(*options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", STOPPED, str(tmp_path / "saved"), *options]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "stopped\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_second_of_two_savers_to_one_path_is_refused_by_name(
    stopped: Callable[..., subprocess.Popen[str]], overwrite: bool, tmp_path: Path
) -> None:
    path = tmp_path / "saved"
    if overwrite:
        save(path, 1.0)
    first = stopped(*(["overwrite"] if overwrite else []))
    with pytest.raises(TargetExistsError, match=rf"process {first.pid}\b"):
        save(path, 2.0, overwrite=overwrite)
    if overwrite:
        assert value_of(path) == 1.0
    else:
        with pytest.raises(NotFoundError):
            value_of(path)
    first.communicate("\n" * 9)
    assert first.returncode == 0
    assert value_of(path) == 5.0
    assert os.listdir(tmp_path) == ["saved"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_a_killed_saver_left_is_removed_by_the_next(
    stopped: Callable[..., subprocess.Popen[str]], overwrite: bool, tmp_path: Path
) -> None:
    path = tmp_path / "saved"
    if overwrite:
        save(path, 1.0)
    first = stopped(*(["overwrite"] if overwrite else []))
    first.send_signal(signal.SIGKILL)
    first.wait(30)
    assert len(os.listdir(tmp_path)) > 1
    if overwrite:
        assert value_of(path) == 1.0
    else:
        with pytest.raises(NotFoundError):
            value_of(path)
    save(path, 2.0, overwrite=overwrite)
    assert value_of(path) == 2.0
    assert os.listdir(tmp_path) == ["saved"]


# What is missing


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("rank", range(RANKS))
def test_a_missing_rank_is_named(saved: Path, reader: str, rank: int) -> None:
    (saved / FILES[rank]).unlink()
    with pytest.raises(IncompleteError, match="file is missing") as caught:
        READERS[reader](saved)
    assert (caught.value.rank, caught.value.path) == (rank, str(saved / FILES[rank]))
    (finding,) = verify(saved).findings
    assert (type(finding), finding.rank) == (IncompleteError, rank)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("what", ["directory", "file"])
def test_without_its_manifest_a_save_is_incomplete(saved: Path, reader: str, what: str) -> None:
    """As a copy that was interrupted: its rank files are no checkpoints by themselves."""
    (saved / "save.json").unlink()
    with pytest.raises(IncompleteError, match=r"save\.json.*missing") as caught:
        READERS[reader](saved if what == "directory" else saved / FILES[0])
    assert caught.value.path == str(saved / "save.json")


def test_a_file_of_another_program_with_the_name_of_a_ranks_file_is_a_checkpoint(tmp_path: Path) -> None:
    for number, name in enumerate(FILES):
        save_file({f"w{number}": np.ones(3, np.float32)}, tmp_path / name)
    for path, names in ((tmp_path, ["w0", "w1"]), (tmp_path / FILES[0], ["w0"])):
        with sx.open_checkpoint(path) as checkpoint:
            assert sorted(checkpoint) == names


# What is of another save, or broken


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", [*FILES, "save.json"])
def test_a_file_of_another_save_in_its_place_is_corrupt(kept: Path, saved: Path, reader: str, name: str) -> None:
    shutil.copy(kept / "two" / name, saved / name)
    with pytest.raises(CorruptError, match="another save") as caught:
        READERS[reader](saved)
    assert caught.value.path == str(saved / (FILES[0] if name == "save.json" else name))
    assert {type(finding) for finding in verify(saved).findings} == {CorruptError}


def test_a_file_that_the_manifest_does_not_list_is_of_another_save(saved: Path) -> None:
    other = saved / "rank-00002-of-00003.safetensors"
    shutil.copy(saved / FILES[0], other)
    with pytest.raises(CorruptError, match="not list it"):
        sx.open_checkpoint(other)
    shutil.copy(saved / FILES[0], saved / FILES[1])
    with pytest.raises(CorruptError, match="names another rank") as caught:
        sx.open_checkpoint(saved / FILES[1])
    assert caught.value.path == str(saved / FILES[1])


@pytest.mark.parametrize("reader", READERS)
def test_a_file_of_another_size_is_corrupt(saved: Path, reader: str) -> None:
    os.truncate(saved / FILES[1], (saved / FILES[1]).stat().st_size - 1)
    with pytest.raises(CorruptError) as caught:
        READERS[reader](saved)
    assert caught.value.path == str(saved / FILES[1])


@pytest.mark.parametrize("reader", ["load", "merge"])
def test_a_changed_byte_of_a_tensor_is_found(saved: Path, reader: str) -> None:
    own1 = np.full(5, 2.0, np.float32).tobytes()  # which no other file has
    flip_bit(saved / FILES[1], (saved / FILES[1]).read_bytes().index(own1))
    with pytest.raises(CorruptError, match="digest") as caught:
        READERS[reader](saved)
    assert caught.value.name == "own1"
    (finding,) = verify(saved).findings
    assert (type(finding), finding.path) == (CorruptError, str(saved / FILES[1]))


GOOD: dict[str, Any] = {
    "schema": 1,
    "save": "0123456789abcdef",
    "job": "job",
    "created": 1.5,
    "step": 7,
    "metrics": {"loss": 0.5, "worst": "nan"},
    "files": [[name, 100] for name in FILES],
}
WRONG: list[dict[str, Any]] = [
    {"save": "0123456789abcdeg"},
    {"save": 5},
    {"job": None},
    {"created": "today"},
    {"created": True},
    {"step": -1},
    {"step": True},
    {"step": 1.0},
    {"step": "7"},
    {"metrics": []},
    {"metrics": {"loss": "low"}},
    {"metrics": {"loss": None}},
    {"files": []},
    {"files": {}},
    {"files": [[FILES[0], 100]]},
    {"files": [[FILES[1], 100], [FILES[0], 100]]},
    {"files": [[FILES[0], -1], [FILES[1], 100]]},
    {"files": [[FILES[0], True], [FILES[1], 100]]},
    {"files": [[FILES[0]], [FILES[1]]]},
    {"files": [["../" + FILES[0], 100], [FILES[1], 100]]},
    {"files": 5},
    {"superseded": 5},
    {"superseded": "0123456789abcdef"},
    {"superseded": ["../0123456789abc"]},
    {"superseded": [None]},
]


def test_a_manifest_is_read_as_it_was_written() -> None:
    metrics = {"loss": 0.5, "worst": float("inf"), "count": 3}
    others = ("fedcba9876543210", "00000000deadbeef")
    manifest = SaveManifest("0123456789abcdef", "job é", 1.5, (100, 0), 7, metrics, superseded=others)
    parsed = parse_json(manifest.to_bytes(), "save.json", Budget("save.json"))
    assert SaveManifest.from_json(parsed, "save.json") == manifest
    assert SaveManifest.from_json(seal(GOOD), "save.json").metrics["loss"] == 0.5


@pytest.mark.parametrize("change", WRONG, ids=str)
def test_a_manifest_with_a_wrong_value_is_corrupt(saved: Path, change: dict[str, Any]) -> None:
    (saved / "save.json").write_text(json.dumps(seal({**GOOD, **change})))
    with pytest.raises(CorruptError, match="broken manifest") as caught:
        sx.open_checkpoint(saved)
    assert caught.value.path == str(saved / "save.json")


@pytest.mark.parametrize("missing", [*GOOD, "digest"])
def test_a_manifest_that_lacks_a_value_is_corrupt(saved: Path, missing: str) -> None:
    found = seal({name: value for name, value in GOOD.items() if name != missing})
    (saved / "save.json").write_text(json.dumps({name: value for name, value in found.items() if name != missing}))
    with pytest.raises(CorruptError, match="broken manifest"):
        sx.open_checkpoint(saved)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '"text"',
        "5",
        '{"digest": 1e999}',
        '{"digest": 5}',
        "[" * 100_000,
        '{"a": 1, "a": 2}',
        "\0",
    ],
    ids=lambda text: repr(text[:20]),
)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_manifest_is_corrupt(saved: Path, reader: str, text: str) -> None:
    (saved / "save.json").write_text(text)
    with pytest.raises(CorruptError) as caught:
        READERS[reader](saved)
    assert caught.value.path == str(saved / "save.json")


def test_a_changed_manifest_is_corrupt(saved: Path) -> None:
    text = (saved / "save.json").read_text()
    (saved / "save.json").write_text(text.replace('"step": null', '"step": 8'))
    with pytest.raises(CorruptError, match="own digest"):
        sx.open_checkpoint(saved)


@pytest.mark.parametrize("schema", [3, "2"])
def test_a_save_of_a_newer_version_says_so(saved: Path, schema: object) -> None:
    (saved / "save.json").write_text(json.dumps(seal({"schema": schema, "other": "content"})))
    for read in READERS.values():
        with pytest.raises(CorruptError, match="newer version") as caught:
            read(saved)
        assert caught.value.path == str(saved / "save.json")
    with pytest.raises(CorruptError, match="newer version"):
        save(saved, overwrite=True)
