"""A job's saves by step: what a restart finds, and which saves are kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from checkpoint_jobs import save_steps, state_of, value_in
from stored import entries
from sweeps import slow

import statexchange as sx
from statexchange.checkpoint.prune import prune_saves
from statexchange.processes import Owner
from statexchange.storage.steps import Retention

# One process


def test_the_newest_save_or_the_named_one_is_loaded(tmp_path: Path) -> None:
    saves = sx.Checkpoints(tmp_path / "saves")
    save_steps(saves, 10, 20)
    state = state_of(0)
    report = saves.load(state)
    assert report is not None
    assert (report.step, state["step"], value_in(state)) == (20, 20, 20.0)
    report = saves.load(state, step=10)
    assert report is not None
    assert (report.step, value_in(state)) == (10, 10.0)
    assert (saves.steps(), saves.latest()) == ([10, 20], 20)
    sx.load_checkpoint(state, tmp_path / "saves" / "step-000000020")
    assert value_in(state) == 20.0


def test_a_directory_of_saves_is_not_loaded_as_one(tmp_path: Path) -> None:
    save_steps(sx.Checkpoints(tmp_path), 10, 20)
    with pytest.raises(sx.errors.InvalidArgumentError, match=r"contains checkpoints.*step-000000020"):
        sx.load_checkpoint(state_of(0), tmp_path)


def test_without_a_save_there_is_nothing_to_load(tmp_path: Path) -> None:
    state = state_of(0)
    (tmp_path / "empty").mkdir()
    (tmp_path / "unfinished" / ".step-000000010.00.partial").mkdir(parents=True)
    for name in ("absent", "empty", "unfinished"):
        saves = sx.Checkpoints(tmp_path / name)
        assert saves.load(state) is None
        assert saves.latest() is None
        with pytest.raises(sx.errors.NotFoundError, match="no save"):
            saves.load(state, missing_ok=False)
        with pytest.raises(sx.errors.NotFoundError, match=r"step 7.*none"):
            saves.load(state, step=7)
    assert value_in(state) == 0.0


def test_other_content_is_not_taken_for_no_save(tmp_path: Path) -> None:
    sx.export_checkpoint({"w": torch.zeros(2)}, tmp_path / "exported")
    with pytest.raises(sx.errors.InvalidArgumentError, match="other content") as caught:
        sx.Checkpoints(tmp_path / "exported").load(state_of(0))
    assert "'model.safetensors'" in str(caught.value)
    sx.Checkpoints(tmp_path / "saves").save(state_of(0), 7)
    with pytest.raises(sx.errors.InvalidArgumentError, match="one save") as caught:
        sx.Checkpoints(tmp_path / "saves" / "step-000000007").load(state_of(0))
    assert f"{tmp_path}/saves " in str(caught.value)
    (tmp_path / "file").write_text("x")
    with pytest.raises(sx.errors.StateExchangeError, match="file"):
        sx.Checkpoints(tmp_path / "file").load(state_of(0))


def test_a_file_that_a_process_was_killed_in_writing_is_no_content_and_removed(tmp_path: Path) -> None:
    owner = "from statexchange.processes import Owner; print(Owner.current().to_name())"
    ended = subprocess.run([sys.executable, "-c", owner], capture_output=True, text=True, check=True).stdout.strip()
    mine = f".tmp-{'1' * 16}.{Owner.current().to_name()}"
    for name in (f".tmp-{'0' * 16}.{ended}", mine):
        (tmp_path / name).write_bytes(b"half")
    saves = sx.Checkpoints(tmp_path)
    state = state_of(0)
    saves.load(state)  # there is no save yet
    saves.save(state, 1)
    assert sorted(os.listdir(tmp_path)) == [mine, "step-000000001"]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("file", r"/file\b"),
        ("file/saves", r"/file\b"),
        ("link", r"/link\b"),
        ("link/saves", r"/link\b"),
    ],
)
def test_a_path_that_no_save_could_make_is_not_taken_for_a_new_job(path: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "not mounted")
    saves = sx.Checkpoints(tmp_path / path)
    for call in (
        lambda: saves.load(state_of(0)),
        lambda: sx.Checkpoints(tmp_path / path, memory=True).load(state_of(0)),
        lambda: saves.save(state_of(0), 10),
        saves.steps,
        saves.latest,
        lambda: saves.delete(10),
    ):
        with pytest.raises(sx.errors.NotFoundError, match=text):
            call()


@pytest.mark.parametrize("url", ["memory://", "s3:///"])
def test_a_url_without_a_bucket_is_refused(url: str) -> None:
    with pytest.raises(sx.errors.InvalidArgumentError, match="no bucket"):
        sx.Checkpoints(url)


def test_a_url_of_a_local_directory_is_its_path(tmp_path: Path) -> None:
    saves = sx.Checkpoints(f"file://{tmp_path}/saves")
    assert saves.load(state_of(0)) is None
    save_steps(saves, 10)
    assert sx.Checkpoints(tmp_path / "saves").steps() == [10]


@pytest.mark.parametrize("kind", ["file", "link", "no manifest", "empty"])
def test_a_step_that_is_no_save_is_not_taken_for_a_new_job(kind: str, tmp_path: Path) -> None:
    step = tmp_path / "saves" / "step-000000010"
    step.parent.mkdir()
    if kind == "file":
        step.write_text("x")
    elif kind == "link":
        save_steps(sx.Checkpoints(tmp_path / "moved"), 10)
        step.symlink_to(tmp_path / "moved" / step.name)
    elif kind == "no manifest":
        save_steps(sx.Checkpoints(tmp_path / "saves"), 10)
        (step / "save.json").unlink()
    else:
        step.mkdir()
    with pytest.raises(sx.errors.InvalidArgumentError, match="'step-000000010'"):
        sx.Checkpoints(tmp_path / "saves").load(state_of(0))


def test_a_step_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    saves = sx.Checkpoints(tmp_path, keep=None)
    save_steps(saves, 10, 20)
    with pytest.raises(sx.errors.NotFoundError, match=r"step 15.*10, 20"):
        saves.load(state_of(0), step=15)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [40, 50, 60]),
        ({"keep": 1}, [60]),
        ({"keep": None}, [10, 20, 30, 40, 50, 60]),
        ({"keep": 1, "keep_every": 20}, [20, 40, 60]),
        ({"keep": 1, "best": ("loss", "min")}, [30, 60]),
        ({"keep": 1, "best": ("loss", "max")}, [50, 60]),
    ],
    ids=str,
)
def test_saves_that_the_options_do_not_keep_are_removed(
    options: dict[str, Any], kept: list[int], tmp_path: Path
) -> None:
    losses = {10: 3.0, 20: float("nan"), 30: 1.0, 40: float("nan"), 50: 7.0, 60: 2.0}
    for step, loss in losses.items():  # each time a new job
        sx.Checkpoints(tmp_path, **options).save(state_of(step, step), step, metrics={"loss": loss})
    assert sx.Checkpoints(tmp_path).steps() == kept
    assert entries(tmp_path) == [f"step-{step:09d}" for step in kept]


def test_a_job_that_goes_back_leaves_later_saves_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They count as the oldest from its next save on: also for restarts, for `prune`, and once that save is gone."""
    save_steps(sx.Checkpoints(tmp_path, keep=None), 10, 20, 30, 40)
    saves = sx.Checkpoints(tmp_path, keep=3)
    saves.load(state_of(0), step=10)
    assert saves.latest() == 40
    save_steps(saves, 15)
    assert "step 15 is saved after going back" in caplog.text
    assert "the saves of steps 20, 30, 40, which the job has left behind" in caplog.text
    assert (saves.steps(), saves.latest()) == ([10, 15, 40], 15)
    # A save of the step of one that was left behind is not one of these.
    save_steps(saves, 40, overwrite=True)
    assert (saves.steps(), saves.latest()) == ([10, 15, 40], 40)
    save_steps(saves, 50)
    assert (saves.steps(), caplog.text.count("left behind")) == ([15, 40, 50], 1)


def test_a_restart_goes_on_from_the_line_that_went_back(tmp_path: Path) -> None:
    save_steps(sx.Checkpoints(tmp_path), 10, 20, 30)
    saves = sx.Checkpoints(tmp_path)
    saves.load(state_of(0), step=10)
    save_steps(saves, 12)
    for step in (14, 16):
        saves, state = sx.Checkpoints(tmp_path), state_of(0)
        report = saves.load(state)
        assert report is not None
        assert report.step == step - 2
        save_steps(saves, step)
    assert saves.steps() == [12, 14, 16]


def test_a_job_may_go_back_again_after_a_restart(tmp_path: Path) -> None:
    """The saves that it left behind first stay superseded when the save that recorded them is removed."""
    save_steps(sx.Checkpoints(tmp_path, keep=None), 10, 20, 30, 40)
    for step, expected in ((15, [10, 15, 40]), (12, [10, 12, 40])):
        saves = sx.Checkpoints(tmp_path, keep=3)
        saves.load(state_of(0), step=10)
        save_steps(saves, step)
        assert (saves.steps(), saves.latest()) == (expected, step)
    report = sx.Checkpoints(tmp_path).load(state_of(0))
    assert report is not None
    assert report.step == 12


def test_a_look_at_an_earlier_save_leaves_nothing_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A job that evaluates its best save goes on from its newest one, and saves beyond it."""
    saves = sx.Checkpoints(tmp_path, keep=2)
    save_steps(saves, 10, 20, 30)
    saves.load(state_of(0), step=20)
    save_steps(saves, 40)
    assert (saves.steps(), saves.latest()) == ([30, 40], 40)
    assert "left behind" not in caplog.text
    # Nor does a look at one that was left behind take it back.
    saves = sx.Checkpoints(tmp_path, keep=None)
    saves.load(state_of(0), step=30)
    save_steps(saves, 35)
    saves.load(state_of(0), step=40)
    save_steps(saves, 36)
    assert (saves.steps(), sx.Checkpoints(tmp_path).latest()) == ([30, 35, 36, 40], 36)
    for path in tmp_path.glob("step-00000003[05]"):
        shutil.rmtree(path)
    assert saves.latest() == 36


def test_a_step_that_was_left_behind_is_saved_again_by_overwrite(tmp_path: Path) -> None:
    save_steps(sx.Checkpoints(tmp_path), 10, 20)
    saves = sx.Checkpoints(tmp_path)
    saves.load(state_of(0), step=10)
    with pytest.raises(sx.errors.TargetExistsError, match="gone back") as caught:
        save_steps(saves, 20)
    assert "overwrite=True" in str(caught.value)


def walks(seed: int, path: Path) -> None:
    """Save, restart, go back and look at saves at random; `line` are the saves that the job's state went through."""
    random = Random(seed)
    keep = random.choice([1, 2, 3, None])
    saves, line = sx.Checkpoints(path, keep=keep), [0]
    save_steps(saves, 0)
    for _ in range(25):
        there = {*saves.steps()}
        what = random.choices(["save", "back", "look", "restart"], [6, 2, 3, 2])[0]
        kept = {*(line if keep is None else line[-keep:])} & there
        if what == "save":
            line.append(line[-1] + random.randint(1, 3))
            save_steps(saves, line[-1], overwrite=True)
            kept = {*(line if keep is None else line[-keep:])} & {*there, line[-1]}
        elif what == "look":
            saves.load(state_of(0), step=random.choice(sorted(there)))
        elif what == "restart":
            saves = sx.Checkpoints(path, keep=keep)
            report = saves.load(state_of(0))
            assert report is not None
            assert report.step == line[-1]
        elif len({*line} & there) > 1:
            at = random.choice([number for number, step in enumerate(line[:-1]) if step in there])
            if random.random() < 0.5:
                saves = sx.Checkpoints(path, keep=keep)
            saves.load(state_of(0), step=line[at])
            step = random.randint(line[at] + 1, line[-1])
            line = [*line[: at + 1], step]
            save_steps(saves, step, overwrite=True)
            kept = {*(line if keep is None else line[-keep:])} & {*there, step}
        assert kept <= {*saves.steps()}
        assert saves.latest() == line[-1]


@pytest.mark.parametrize("seed", [*range(6), *map(slow, range(6, 60))])
def test_a_job_goes_on_from_its_own_line_of_saves_and_keeps_it(seed: int, tmp_path: Path) -> None:
    walks(seed, tmp_path)


def test_prune_counts_saves_that_were_left_behind_as_the_oldest(tmp_path: Path) -> None:
    save_steps(sx.Checkpoints(tmp_path, keep=None), 10, 20, 30)
    saves = sx.Checkpoints(tmp_path, keep=None)
    saves.load(state_of(0), step=10)
    save_steps(saves, 12, 14)
    assert saves.steps() == [10, 12, 14, 20, 30]
    rows = {row.step: row.action for row in prune_saves(tmp_path, Retention(keep=4)).rows}
    assert rows == {10: "kept", 12: "kept", 14: "kept", 20: "removed", 30: "kept"}
    prune_saves(tmp_path, Retention(keep=2))
    assert (saves.steps(), saves.latest()) == ([12, 14], 14)


def test_a_job_that_begins_anew_beside_old_saves_is_warned_and_removes_the_oldest_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It has not gone back: nothing says that the old saves are worth less."""
    save_steps(sx.Checkpoints(tmp_path), 20, 30)
    saves = sx.Checkpoints(tmp_path, keep=2)
    save_steps(saves, 15)
    assert (saves.steps(), saves.latest()) == ([15, 20, 30], 30)
    assert "step 15 is saved, but a load without a step takes the newest save, that of step 30" in caplog.text


def test_the_best_step_is_found_by_the_metric(tmp_path: Path) -> None:
    saves = sx.Checkpoints(tmp_path / "saves", keep=1, best=("loss", "min"))
    assert saves.best() is None
    for step, loss in ((1, 0.5), (2, float("nan")), (3, 0.25), (4, 0.75)):
        saves.save(state_of(step), step, metrics={"loss": loss})
    assert (saves.best(), saves.steps()) == (3, [3, 4])
    assert sx.Checkpoints(tmp_path / "saves", best=("loss", "max")).best() == 4
    assert sx.Checkpoints(tmp_path / "saves", best=("other", "max")).best() is None
    with pytest.raises(sx.errors.InvalidArgumentError, match="a metric"):
        sx.Checkpoints(tmp_path / "saves").best()


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    saves = sx.Checkpoints(tmp_path)
    save_steps(saves, 10)
    with pytest.raises(sx.errors.TargetExistsError, match="step 10") as caught:
        saves.save(state_of(5), 10)
    assert caught.value.path.endswith("step-000000010")
    state = state_of(0)
    saves.load(state)
    assert value_in(state) == 10.0
    saves.save(state_of(5), 10, overwrite=True)
    saves.load(state)
    assert value_in(state) == 5.0


def test_a_deleted_save_is_gone(tmp_path: Path) -> None:
    saves = sx.Checkpoints(tmp_path)
    save_steps(saves, 10, 20)
    saves.delete(20)
    assert entries(tmp_path) == ["step-000000010"]
    with pytest.raises(sx.errors.NotFoundError, match=r"step 20.*10"):
        saves.delete(20)


def test_only_files_of_a_save_are_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saves = sx.Checkpoints(tmp_path, keep=1)
    save_steps(saves, 10)
    (tmp_path / "step-000000010" / "notes.txt").write_text("mine")
    save_steps(saves, 20)
    assert saves.steps() == [10, 20]
    assert "'notes.txt' is not a file of this save" in caplog.text
    with pytest.raises(sx.errors.UnsafeError, match=r"notes\.txt"):
        saves.delete(10)
    assert (tmp_path / "step-000000010" / "notes.txt").read_text() == "mine"


def test_a_save_that_has_lost_a_file_is_not_one_of_those_that_are_kept(tmp_path: Path) -> None:
    saves = sx.Checkpoints(tmp_path, keep=2)
    save_steps(saves, 10, 20, 30)
    next((tmp_path / "step-000000030").glob("rank-*")).unlink()
    save_steps(saves, 40)
    assert saves.steps() == [20, 30, 40]
    state = state_of(0)
    assert saves.load(state, 20) is not None
    assert value_in(state) == 20.0
