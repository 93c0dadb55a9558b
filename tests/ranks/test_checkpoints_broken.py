"""Saves by step that are damaged, of another job or of another state; bad options."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_jobs import save_steps, state_of, value_in
from stored import entries

import statexchange as sx
from statexchange.checkpoint.prune import prune_saves
from statexchange.report.saves import list_saves
from statexchange.storage.steps import Retention


def rank_file(path: Path, step: int) -> Path:
    (file,) = (path / f"step-{step:09d}").glob("rank-*")
    return file


def lose_the_file(path: Path, step: int) -> None:
    rank_file(path, step).unlink()


def truncate_the_file(path: Path, step: int) -> None:
    os.truncate(rank_file(path, step), 900)


def break_the_header(path: Path, step: int) -> None:
    with rank_file(path, step).open("r+b") as file:
        file.write(b"garbage.")


def break_the_manifest(path: Path, step: int) -> None:
    (path / f"step-{step:09d}" / "save.json").write_text("{")


def change_a_byte(path: Path, step: int) -> None:
    with rank_file(path, step).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x07")


DAMAGES = [lose_the_file, truncate_the_file, break_the_header, break_the_manifest]


@pytest.mark.parametrize("is_restarted", [False, True], ids=["same job", "restarted"])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_broken_save_is_not_one_of_those_that_are_kept(damage: Any, is_restarted: bool, tmp_path: Path) -> None:
    """Retention during a job and `prune` count the same saves."""
    saves = sx.Checkpoints(tmp_path, keep=2)
    save_steps(saves, 10, 20, 30)
    assert saves.steps() == [20, 30]
    damage(tmp_path, 30)
    if is_restarted:
        saves = sx.Checkpoints(tmp_path, keep=2)
        saves.load(state_of(0), 20)
    save_steps(saves, 40)
    assert entries(tmp_path) == ["step-000000020", "step-000000030", "step-000000040"]
    kept = [row.step for row in prune_saves(tmp_path, Retention(keep=2)).rows if row.action == "kept"]
    assert kept == [20, 40]


@pytest.mark.parametrize("damage", [*DAMAGES, change_a_byte], ids=lambda damage: damage.__name__)
def test_a_damaged_newest_save_names_the_older_ones_and_what_to_do(damage: Any, tmp_path: Path) -> None:
    save_steps(sx.Checkpoints(tmp_path), 10, 20, 30)
    damage(tmp_path, 30)
    lose_the_file(tmp_path, 10)
    state = state_of(0)
    saves = sx.Checkpoints(tmp_path)
    with pytest.raises(sx.StateExchangeError) as caught:
        saves.load(state)
    assert "step-000000030" in str(caught.value.path)
    assert "step=20" in str(caught.value)
    if "delete(30)" in str(caught.value):
        saves.delete(30)
    else:  # without its manifest nothing proves that the files are a save's
        assert damage is break_the_manifest
        assert "move" in str(caught.value)
        shutil.move(tmp_path / "step-000000030", tmp_path.parent / "moved")
    with pytest.raises(sx.StateExchangeError) as caught:  # step= names no other one
        saves.load(state, step=10)
    assert "step=" not in str(caught.value)
    report = saves.load(state)
    assert report is not None
    assert (report.step, value_in(state)) == (20, 20.0)


def test_a_damaged_only_save_says_that_there_is_no_older_one(tmp_path: Path) -> None:
    saves = sx.Checkpoints(tmp_path)
    save_steps(saves, 10)
    truncate_the_file(tmp_path, 10)
    with pytest.raises(sx.errors.TruncatedError, match=r"no older .*whole.*delete\(10\)"):
        saves.load(state_of(0))


def test_saves_in_the_foreground_and_background_are_of_one_job(tmp_path: Path) -> None:
    with sx.Checkpoints(tmp_path) as saves:
        save_steps(saves, 10)
        save_steps(saves, 20, background=True)
    first, second = list_saves(tmp_path).saves
    assert first.job == second.job


def test_another_job_on_the_same_path_is_named_and_its_saves_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = sx.Checkpoints(tmp_path, keep=1), sx.Checkpoints(tmp_path, keep=1)
    save_steps(ours, 10)
    save_steps(theirs, 15)  # it found step 10, so it may remove it
    assert "while this job runs" not in caplog.text
    save_steps(ours, 20)
    assert "step 15 was saved here by" in caplog.text
    assert ours.steps() == [15, 20]
    save_steps(theirs, 25)
    assert "step 20 was saved here by" in caplog.text
    assert ours.steps() == [20, 25]


def test_a_save_that_was_interrupted_after_its_publication_is_of_this_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saves = sx.Checkpoints(tmp_path, keep=1)
    save_steps(saves, 10)
    is_armed = [True]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "statexchange.storage" and is_armed and (tmp_path / "step-000000020").exists():
            is_armed.clear()
            raise KeyboardInterrupt

    sys.addaudithook(hook)
    with pytest.raises(KeyboardInterrupt):
        save_steps(saves, 20)
    save_steps(saves, 30)
    assert "while this job runs" not in caplog.text
    assert saves.steps() == [30]


def test_a_state_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    saves = sx.Checkpoints(tmp_path)
    save_steps(saves, 10)
    state = state_of(0)
    state["model"]["w"] = torch.zeros(5, 3)
    with pytest.raises(
        sx.errors.InvalidArgumentError,
        match="shape differs",
    ) as caught:
        saves.load(state)
    assert caught.value.name == "model.w"
    assert (caught.value.expected, caught.value.found) == ((4, 3), (5, 3))
    assert caught.value.path.endswith("step-000000010")
    assert value_in({"model": {"b": state["model"]["b"]}}) == 0.0
    saves.load(state, exclude=["model.w"])
    assert value_in({"model": {"b": state["model"]["b"]}}) == 10.0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"keep": 0}, "keep must be"),
        ({"keep": True}, "keep must be"),
        ({"keep_every": 2.5}, "keep_every must be"),
        ({"best": "loss"}, "best must be"),
        ({"best": ("loss", "least")}, "best must be"),
        ({"every_steps": 0}, "every_steps must be"),
        ({"every_s": -1}, "every_s"),
        ({"agree_every": 0}, "agree_every must be"),
        ({"on_signal": "SIGKILL"}, "on_signal takes"),
        ({"on_signal": ["SIGTERM", 10]}, "on_signal takes"),
        ({"on_signal": signal.SIGTERM}, "on_signal takes"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(sx.errors.InvalidArgumentError, match=text):
        sx.Checkpoints(tmp_path, **options)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("step", [-1, 2.5, "7", None, True])
def test_a_step_is_a_whole_number(step: Any, tmp_path: Path) -> None:
    saves = sx.Checkpoints(tmp_path / "saves")
    with pytest.raises(sx.errors.InvalidArgumentError, match="step must be"):
        saves.save(state_of(0), step)
    with pytest.raises(sx.errors.InvalidArgumentError, match="step must be"):
        saves.should_save(step)
    assert not (tmp_path / "saves").exists()


def test_a_step_that_no_name_could_show_is_refused(tmp_path: Path) -> None:
    saves = sx.Checkpoints(tmp_path)
    with pytest.raises(sx.errors.InvalidArgumentError, match=r"at most 9{18}\b"):
        saves.save(state_of(0), 10**18)
    saves.save(state_of(0), 10**18 - 1)
    assert saves.steps() == [10**18 - 1]


def test_a_wrong_option_of_load_is_refused_before_there_is_a_save(tmp_path: Path) -> None:
    for memory in (False, True):
        with pytest.raises(sx.errors.InvalidArgumentError, match="option 'stric'") as caught:
            sx.Checkpoints(tmp_path / "saves", memory=memory).load(state_of(0), stric=False)
        assert "strict," in str(caught.value)


def test_a_save_without_the_metric_is_made_and_is_never_the_best(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A save at a signal has no evaluation: it keeps the job's progress, beside the best one."""
    saves = sx.Checkpoints(tmp_path, keep=1, best=("loss", "min"))
    save_steps(saves, 10, metrics={"loss": 0.5})
    assert "'loss'" not in caplog.text
    save_steps(saves, 20)
    save_steps(saves, 30, metrics={"other": 0.1})
    assert (saves.best(), saves.steps()) == (10, [10, 30])
    assert re.search(r"step 20 .*'loss'.*never the best", caplog.text)
    state = state_of(0)
    saves.load(state)
    assert value_in(state) == 30.0


def test_metrics_are_numbers(tmp_path: Path) -> None:
    saves = sx.Checkpoints(tmp_path, best=("loss", "min"))
    with pytest.raises(sx.errors.InvalidArgumentError, match=r"'loss'.*'low'"):
        saves.save(state_of(0), 10, metrics={"loss": "low"})  # type: ignore[dict-item]
    with pytest.raises(sx.errors.InvalidArgumentError, match=r"'loss'.*'0\.5'"):
        saves.save(state_of(0), 10, metrics={"loss": "0.5"})  # type: ignore[dict-item]
    with pytest.raises(sx.errors.InvalidArgumentError, match=r"metrics must be.*\[0\.5\]"):
        saves.save(state_of(0), 10, metrics=[0.5])  # type: ignore[arg-type]
    saves.save(state_of(0), 10, metrics={"loss": torch.tensor(0.5), "step": np.int64(3)})  # type: ignore[dict-item]
    assert saves.steps() == [10]


@pytest.mark.usefixtures("mounts")
def test_a_full_disk_leaves_the_saves_that_were_there(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=True)
    try:
        saves = sx.Checkpoints(tmp_path / "saves", keep=1)
        save_steps(saves, 10)
        with pytest.raises(sx.errors.StorageError, match=r"2\d{6} bytes") as caught:
            saves.save({"model": {"w": torch.zeros(500_000)}}, 20)
        assert "free space" in str(caught.value)
        assert entries(tmp_path / "saves") == ["step-000000010"]
        state = state_of(0)
        saves.load(state)
        assert value_in(state) == 10.0
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
