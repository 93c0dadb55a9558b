"""A merge that was killed is resumed; its target and its options are checked."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from merging import lay_out
from stored import contents_of
from warm_python import warm_python
from workspaces import write_round

import statexchange as sx
from statexchange.checkpoint.merge import merge_checkpoint
from statexchange.errors import (
    TargetExistsError,
)
from statexchange.formats.registry import open_source
from statexchange.storage.publish.directory_build import _receipt

KILLED = """
import os, signal, sys
from statexchange.checkpoint import merge
from statexchange.storage.publish.directory_build import DirectoryBuild
source, out, when = sys.argv[1:4]
record = DirectoryBuild.record
def die(self, name, facts):
    if when == "before": os.kill(os.getpid(), signal.SIGKILL)
    record(self, name, facts)
    if name.endswith("00002-of-00004.safetensors"): os.kill(os.getpid(), signal.SIGKILL)
DirectoryBuild.record = die
merge.merge_checkpoint(source, out, max_shard_size=2_500_000, threads=1, overwrite=os.path.exists(out))
"""


def kill_a_merge(source: Path, out: Path, when: str = "after") -> Path:
    """Kill a merge of four files when two are finished; return the directory that it leaves."""
    done = subprocess.run(
        [warm_python("commands"), "-c", KILLED, str(source), str(out), when], capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    (left,) = out.parent.glob(f".{out.name}.*.partial")
    return left


def four_files(path: Path) -> None:
    """Write a workspace whose merge, with files of at most 2.5 MB, has four files."""
    write_round(path / "ws", *lay_out({f"w{i}": torch.randn(600, 1000) for i in range(4)}, 2, 1))


def marks(directory: Path) -> dict[str, tuple[int, int]]:
    """Return inode and time of each file, which show whether it has been written again."""
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in directory.glob("*.safetensors")}


@pytest.mark.parametrize("target", ["absent", "there"])
def test_a_killed_merge_is_resumed_after_its_finished_files(tmp_path: Path, target: str) -> None:
    four_files(tmp_path)
    merge_checkpoint(tmp_path / "ws", tmp_path / "expected", max_shard_size=2_500_000)
    out = tmp_path / "place" / "out"
    if target == "there":
        merge_checkpoint(tmp_path / "ws", out)
    before = marks(kill_a_merge(tmp_path / "ws", out))
    assert len(before) == 4
    seen: list[int] = []
    report = merge_checkpoint(
        tmp_path / "ws", out, max_shard_size=2_500_000, overwrite=True, on_progress=lambda done, _: seen.append(done)
    )
    names = sorted(before)
    assert report.reused == tuple(names[:2])
    after = marks(out)
    assert [after[name] == before[name] for name in names] == [True, True, False, False]
    assert contents_of(out) == contents_of(tmp_path / "expected")
    assert (seen[0], seen[1], seen[-1]) == (2_400_000, 4_800_000, 9_600_000)
    assert os.listdir(out.parent) == ["out"]


def test_a_file_without_a_receipt_or_changed_since_is_written_again(tmp_path: Path) -> None:
    four_files(tmp_path)
    merge_checkpoint(tmp_path / "ws", tmp_path / "expected", max_shard_size=2_500_000)

    def reused_after(harm: Callable[[Path], object], when: str = "after") -> tuple[str, ...]:
        out = tmp_path / "place" / "out"
        harm(kill_a_merge(tmp_path / "ws", out, when))
        report = merge_checkpoint(tmp_path / "ws", out, max_shard_size=2_500_000)
        assert contents_of(out) == contents_of(tmp_path / "expected")
        assert os.listdir(out.parent) == ["out"]
        shutil.rmtree(out.parent)
        return report.reused

    one, two = (f"model-0000{n}-of-00004.safetensors" for n in (1, 2))
    assert reused_after(lambda left: None, "before") == ()
    assert reused_after(lambda left: (left / one).write_bytes((left / two).read_bytes())) == (two,)
    assert reused_after(lambda left: (left / _receipt(one)).write_text("[1, 2")) == (two,)
    assert reused_after(lambda left: (left / one).unlink()) == (two,)
    assert reused_after(lambda left: (left / "notes.txt").write_text("x")) == (one, two)

    def link(left: Path) -> None:
        (tmp_path / "victim").write_bytes((left / one).read_bytes())
        (left / one).unlink()
        (left / one).symlink_to(tmp_path / "victim")

    assert reused_after(link) == (two,)
    assert (tmp_path / "victim").exists()


def test_a_file_of_another_source_or_other_options_is_never_reused(tmp_path: Path) -> None:
    four_files(tmp_path)
    source = open_source(tmp_path / "ws").files[0].path
    changes: dict[str, tuple[Callable[[], object], dict[str, Any]]] = {
        "time": (lambda: os.utime(source), {}),
        "dtype": (lambda: None, {"dtype": "float16"}),
        "replicas": (lambda: None, {"replicas": "root"}),
        "names": (lambda: None, {"rename": [("w", "v")]}),
    }
    for name, (change, options) in changes.items():
        out = tmp_path / name / "out"
        kill_a_merge(tmp_path / "ws", out)
        change()
        report = merge_checkpoint(tmp_path / "ws", out, max_shard_size=2_500_000, **options)
        assert (report.reused, os.listdir(out.parent)) == ((), ["out"]), name


def test_two_merges_into_one_target_do_not_share_files(tmp_path: Path) -> None:
    four_files(tmp_path)
    inner: list[str] = []

    def second(done: int, total: int) -> None:
        if not inner:
            with pytest.raises(TargetExistsError, match=rf"process {os.getpid()}\b") as caught:
                merge_checkpoint(tmp_path / "ws", tmp_path / "out")
            inner.append(caught.value.code)

    merge_checkpoint(tmp_path / "ws", tmp_path / "out", on_progress=second)
    assert inner == ["UNSAFE"]
    assert sorted(os.listdir(tmp_path)) == ["out", "ws"]


def test_a_dry_run_reports_the_sources_of_each_tensor(tmp_path: Path) -> None:
    write_round(tmp_path / "ws", *lay_out({"w": torch.ones(4, 4), "n": torch.ones(())}, 2, 1))
    report = merge_checkpoint(tmp_path / "ws", tmp_path / "out", dry_run=True, dtype="float16", rename=[("w", "x")])
    listed = {t.name: (t.source, t.dtype, t.shape, t.file, t.num_boxes, len(t.ranks)) for t in report.tensors}
    assert listed["x"] == ("w", "F16", (4, 4), "model.safetensors", 2, 2)
    assert listed["n"] == ("n", "F16", (), "model.safetensors", 1, 1)


@pytest.mark.parametrize("kind", ["save", "published"])
def test_a_target_inside_a_save_or_a_published_checkpoint_is_refused(kind: str, tmp_path: Path) -> None:
    state = {"w": torch.zeros(2)}
    sx.save_checkpoint(state, tmp_path / "x") if kind == "save" else sx.export_checkpoint(state, tmp_path / "x")
    before = sorted(path.name for path in (tmp_path / "x").iterdir())
    with pytest.raises(sx.errors.UnsafeError, match="inside the source"):
        sx.merge_checkpoint(tmp_path / "x", tmp_path / "x/merged", include="w")
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == before


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"overwrite": "no"}, "overwrite must be"),
    ({"resume": 1}, "resume must be"),
    ({"dry_run": None}, "dry_run must be"),
    ({"on_progress": 5}, "on_progress must be"),
    ({"threads": "2"}, "threads must be"),
    ({"threads": 0}, "threads must be"),
]


@pytest.mark.parametrize(("options", "match"), WRONG, ids=repr)
def test_an_option_of_another_type_is_refused(options: dict[str, Any], match: str, tmp_path: Path) -> None:
    sx.export_checkpoint({"w": torch.zeros(2)}, tmp_path / "x")
    sx.export_checkpoint({"w": torch.ones(2)}, tmp_path / "y")
    with pytest.raises(sx.errors.InvalidArgumentError, match=match):
        sx.merge_checkpoint(tmp_path / "x", tmp_path / "y", **options)
    with sx.open_checkpoint(tmp_path / "y") as kept:
        assert kept["w"].read().tolist() == [1, 1]
