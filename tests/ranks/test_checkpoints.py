"""A job's saves by step: which are kept, what a restart finds, when to save; kills at every call, and bad input."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_jobs import LAYOUT, load_rows, save_rows, save_steps, shard_of, state_of, value_in
from forked_jobs import ForkedJobs
from scripts import HOME, warm_command
from starting import THREADS_AND_PROCESSES
from sweeps import slow, some
from warm_python import warm_python

import statexchange as sx
from statexchange.checkpoint.prune import prune_saves
from statexchange.processes import Owner
from statexchange.report.saves import list_saves
from statexchange.storage.steps import Retention
from statexchange.testing import run_ranks


def entries(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


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


# In the background


def test_a_state_may_change_after_a_save_in_the_background(tmp_path: Path) -> None:
    with sx.Checkpoints(tmp_path, keep=1) as saves:
        state = state_of(1, 1)
        for step in (10, 20, 30):
            for tensor in state["model"].values():
                tensor.fill_(step)
            state["step"] = step
            saves.save(state, step, background=True)
            for tensor in state["model"].values():
                tensor.fill_(-1)
    assert saves.steps() == [30]
    saves.load(state)
    assert (value_in(state), state["step"]) == (30.0, 30)


def test_a_failure_in_the_background_is_raised_by_the_next_call(tmp_path: Path) -> None:
    saves = sx.Checkpoints(tmp_path)
    save_steps(saves, 10)
    for after in (
        lambda: saves.save(state_of(2), 20),
        lambda: saves.save(state_of(2), 20, background=True),
        lambda: saves.load(state_of(0)),
        lambda: saves.delete(10),
        saves.close,
    ):
        saves.save(state_of(1), 10, background=True)
        with pytest.raises(sx.errors.TargetExistsError, match="step-000000010"):
            after()
        assert saves.steps() == [10]
    saves.save(state_of(2), 20)
    assert saves.steps() == [10, 20]


# When to save


def test_should_save_is_true_every_so_many_steps(tmp_path: Path) -> None:
    saves = sx.Checkpoints(tmp_path, every_steps=100)
    assert [step for step in range(301) if saves.should_save(step)] == [100, 200, 300]
    assert not any(sx.Checkpoints(tmp_path).should_save(step) for step in range(1, 100))


def test_should_save_is_true_every_so_many_seconds(tmp_path: Path) -> None:
    saves = sx.Checkpoints(tmp_path, every_s=0.2, agree_every=5)
    assert not saves.should_save(5)
    time.sleep(0.25)
    assert not saves.should_save(6)  # ranks do not compare their clocks at this step
    assert saves.should_save(10)
    save_steps(saves, 10)
    assert not saves.should_save(15)


def test_a_signal_is_reported_once_and_earlier_handlers_are_restored(tmp_path: Path) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    try:
        with sx.Checkpoints(tmp_path, on_signal=["SIGUSR1"], agree_every=2) as saves:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert [saves.should_save(step) for step in (1, 2, 3, 4)] == [False, True, False, False]
            assert saves.is_stopping
        os.kill(os.getpid(), signal.SIGUSR1)
        assert received == [signal.SIGUSR1] * 2  # while the saves were open, and after
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("ends", [SystemExit, KeyboardInterrupt])
def test_an_earlier_handler_that_ends_the_process_does_not_prevent_the_save(
    ends: type[BaseException], tmp_path: Path
) -> None:
    def end(number: int, frame: object) -> None:
        raise ends

    before = signal.signal(signal.SIGUSR1, end)
    try:
        with sx.Checkpoints(tmp_path, on_signal="SIGUSR1", agree_every=1) as saves:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert saves.should_save(1)
            assert saves.is_stopping
        with pytest.raises(ends):
            os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_signal_handlers_of_closed_saves_are_removed(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    sx.Checkpoints(tmp_path, on_signal=["SIGUSR1", "SIGUSR1"]).close()
    assert signal.getsignal(signal.SIGUSR1) == before
    first = sx.Checkpoints(tmp_path, on_signal="SIGUSR1", agree_every=1)
    second = sx.Checkpoints(tmp_path, on_signal="SIGUSR1", agree_every=1)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert first.should_save(1)
    assert second.should_save(1)
    first.close()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert (first.should_save(2), second.should_save(2)) == (False, True)
    second.close()
    assert signal.getsignal(signal.SIGUSR1) == before


def test_after_a_close_in_a_thread_the_earlier_handler_receives_signals(tmp_path: Path) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    try:
        saves = sx.Checkpoints(tmp_path, on_signal="SIGUSR1")
        thread = threading.Thread(target=saves.close)
        thread.start()
        thread.join()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR1)
        assert received == [signal.SIGUSR1] * 2
    finally:
        signal.signal(signal.SIGUSR1, before)


def report_and_sleep(writer: Connection) -> None:
    writer.send("started")
    time.sleep(60)


def test_a_signal_that_the_job_handles_ends_a_forked_worker(tmp_path: Path) -> None:
    with sx.Checkpoints(tmp_path, on_signal="SIGTERM", agree_every=1) as saves:
        reader, writer = multiprocessing.Pipe()
        worker = multiprocessing.get_context("fork").Process(target=report_and_sleep, args=(writer,))
        worker.start()
        assert reader.recv() == "started"  # a signal before that is lost: Python clears it in a child
        worker.terminate()
        worker.join(10)
        assert worker.exitcode == -signal.SIGTERM
        assert not saves.should_save(1)


CLOSE_IN_A_CHILD = """
import os, sys, threading
import numpy as np
import statexchange as sx

is_done = threading.Event()

def hook(event, args):
    if event == "statexchange.storage" and args[0] == "rename":
        is_done.wait()

sys.addaudithook(hook)
saves = sx.Checkpoints("saves")
future = saves.save({"w": np.ones(3)}, 10, background=True)
pid = os.fork()
if pid == 0:
    saves.close()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
is_done.set()
print(future.result().step)
"""


def test_a_forked_process_does_not_wait_for_a_save_of_its_parent(tmp_path: Path) -> None:
    done = subprocess.run(
        [warm_python(), "-c", CLOSE_IN_A_CHILD], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["7", "10"], done.stderr


# Several ranks


@pytest.mark.parametrize("backend", THREADS_AND_PROCESSES)
def test_another_number_of_ranks_goes_on_from_the_newest_save(backend: str, tmp_path: Path) -> None:
    path = str(tmp_path)
    assert run_ranks(load_rows, 2, backend=backend, args=(path,)) == [None, None]
    for world_size, step in ((2, 10), (3, 20), (1, 30), (4, 40)):
        run_ranks(save_rows, world_size, backend=backend, args=(path, step))
        assert run_ranks(load_rows, 2, backend=backend, args=(path,)) == [step, step]
    assert sx.Checkpoints(tmp_path).steps() == [20, 30, 40]


def save_own_step(path: str) -> None:
    sx.Checkpoints(path).save(state_of(1), 10 + sx.get_rank())


def test_ranks_that_save_different_steps_get_an_error(tmp_path: Path) -> None:
    outcomes = run_ranks(save_own_step, 2, args=(str(tmp_path),), allow_failure=True)
    assert set(outcomes.errors.values()) == {"InvalidArgumentError"}
    for text in outcomes.messages.values():
        assert "the name of the save is step-000000010 on rank 0 and step-000000011 on rank 1" in text
    assert entries(tmp_path) == []


def save_in_the_background_on_rank_0(path: str) -> str:
    saves = sx.Checkpoints(path)
    with pytest.raises(sx.errors.MismatchError) as caught:
        for step in (10, 20):
            saves.save(state_of(step), step, background=sx.get_rank() == 0)
    return str(caught.value)


@pytest.mark.parametrize("backend", ["threads", slow("gloo")])
def test_ranks_that_differ_in_background_get_an_error(backend: str, tmp_path: Path) -> None:
    for text in run_ranks(save_in_the_background_on_rank_0, 2, backend=backend, args=(str(tmp_path),), timeout_s=30):
        assert re.search(r"rank 0 called Checkpoints\.save .*; rank 1 called Checkpoints\.save ", text), text


def save_with_metrics_of_root(path: str) -> list[int]:
    saves = sx.Checkpoints(path, keep=1, best=("loss", "min"))
    for step, loss in ((10, 0.1), (20, 0.3), (30, 0.2)):
        saves.save(state_of(step), step, metrics={"loss": loss} if sx.get_rank() == 0 else None)
    return saves.steps()


def test_other_ranks_need_no_metrics(tmp_path: Path) -> None:
    run_ranks(save_with_metrics_of_root, 2, args=(str(tmp_path),))
    assert sx.Checkpoints(tmp_path).steps() == [10, 30]


def gives_text_as_step_on_one_rank(path: str) -> str:
    saves = sx.Checkpoints(path)
    with pytest.raises(sx.errors.InvalidArgumentError) as caught:
        saves.save(state_of(1), 7 if sx.get_rank() == 0 else "7")  # type: ignore[call-overload]
    return str(caught.value)


def test_a_wrong_step_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    for text in run_ranks(gives_text_as_step_on_one_rank, 2, args=(str(tmp_path),)):
        assert "step must be a whole number, not '7'" in text


def failure_of_the_earlier_save(path: str) -> str:
    """Return the error that the next save raises if one in the background has failed, of which only rank 0 asks."""
    saves = sx.Checkpoints(path)
    saves.save(state_of(1), 10)
    future = saves.save(state_of(2), 10, background=True)
    if sx.get_rank() == 0:
        assert isinstance(future.exception(), sx.errors.TargetExistsError)
    try:
        saves.save(state_of(3), 20)
    except sx.errors.TargetExistsError as error:
        return str(error)
    return "saved"


def test_a_failure_in_the_background_is_raised_on_all_ranks_by_the_same_call(tmp_path: Path) -> None:
    first, second = run_ranks(failure_of_the_earlier_save, 2, args=(str(tmp_path),))
    assert "step-000000010" in first
    assert first == second


def stop_at(path: str) -> tuple[list[int], bool]:
    """Return the steps at which ranks save, and whether they stop; the last rank receives a signal at step 13."""
    with sx.Checkpoints(path, every_steps=10, on_signal="SIGUSR1", agree_every=4) as saves:
        saved = []
        for step in range(1, 31):
            if step == 13 and sx.get_rank() == 2:
                os.kill(os.getpid(), signal.SIGUSR1)
            if saves.should_save(step):
                saved.append(step)
            if saves.is_stopping:
                break
        return saved, saves.is_stopping


def test_a_signal_to_one_rank_stops_all_at_one_step(tmp_path: Path) -> None:
    assert run_ranks(stop_at, 3, backend="gloo", args=(str(tmp_path),)) == [([10, 16], True)] * 3


@pytest.mark.parametrize(
    "launcher", [slow(("torchrun", "--nproc-per-node", "2")), ("python",)], ids=["torchrun", "alone"]
)
def test_a_preempted_job_saves_and_goes_on(launcher: tuple[str, ...], tmp_path: Path) -> None:
    script = HOME / "tools/examples/preempted.py"
    words, environ = warm_command(launcher, script.read_text())
    command = [*words, script, "saves"]
    with subprocess.Popen([*command, "100000"], cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline().startswith("begins at step 0")
        time.sleep(0.5)
        job.send_signal(signal.SIGTERM)
        (step,) = {int(number) for number in re.findall(r"ends at step (\d+)", job.stdout.read())}
    assert sx.Checkpoints(tmp_path / "saves").latest() == step
    assert step % 5 == 0
    again = [*command, str(step + 7)]
    done = subprocess.run(again, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)
    assert set(re.findall(r"(begins|ends) at step (\d+)", done.stdout)) == {
        ("begins", str(step)),
        ("ends", str(step + 7)),
    }, done.stderr
    assert sx.Checkpoints(tmp_path / "saves").latest() == step + 7


# Kills

JOBS = """
import torch
from statexchange.testing import run_ranks
from checkpoint_jobs import load_rows, save_rows

def job(path, steps):  # its two ranks are threads, so that a kill ends both
    if steps:
        run_ranks(save_rows, 2, args=(path, *steps))
    else:
        run_ranks(load_rows, 2, args=(path,))

serve(job)
"""


@pytest.fixture(scope="module")
def jobs() -> Iterator[ForkedJobs]:
    with ForkedJobs(JOBS) as started:
        yield started


@pytest.mark.parametrize("every", [60, slow(1)], ids=["some", "all"])
@pytest.mark.timeout(900)
def test_a_job_killed_at_any_call_goes_on_from_the_newest_whole_save(
    every: int, jobs: ForkedJobs, sweep_path: Path
) -> None:
    jobs.run(str(sweep_path / "before"), [10, 20, 30])
    traces = [shutil.copytree(sweep_path / "before", sweep_path / name) for name in ("trace", "trace 2", "trace 3")]
    calls = jobs.fewest_calls(*((str(trace), [40]) for trace in traces))  # saves, and removes step 10
    assert {"create", "link", "rename", "sync", "unlink", "list"} <= set(calls)
    loads = jobs.run(str(sweep_path / "trace"), [])
    assert loads is not None
    print(f"killed at {len(calls)} calls of a save and {len(loads)} of a load")
    for number in some(range(1, len(calls) + 1), every):
        path = sweep_path / str(number)
        shutil.copytree(sweep_path / "before", path)
        if jobs.run(str(path), [40], kill_at=number) is not None:  # the ranks made fewer calls than those counted
            assert number > len(calls) - 10, number
        assert run_ranks(load_rows, 3, args=(str(path),)) in ([30] * 3, [40] * 3), number
        resumed = run_ranks(load_rows, 1, args=(str(path),))[0]
        steps = run_ranks(save_rows, 1, args=(str(path), resumed + 10))[0]  # the next job, with no clean-up by hand
        assert steps == [resumed - 10, resumed, resumed + 10], number
        assert entries(path) == [f"step-{step:09d}" for step in steps], number
    for number in some(range(1, len(loads) + 1), every):
        jobs.run(str(sweep_path / "trace"), [], kill_at=number)
        assert run_ranks(load_rows, 2, args=(str(sweep_path / "trace"),)) == [40, 40], number


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_killed_at_any_call_of_its_first_save_begins_again(jobs: ForkedJobs, sweep_path: Path) -> None:
    calls = jobs.fewest_calls(*((str(sweep_path / f"trace {number}"), [10]) for number in range(3)))
    for number in range(1, len(calls) + 1):
        path = sweep_path / str(number)
        if jobs.run(str(path), [10], kill_at=number) is not None:  # the ranks made fewer calls than those counted
            assert number > len(calls) - 10, number
        found = run_ranks(load_rows, 2, args=(str(path),))
        assert found in ([None, None], [10, 10]), number
        step = 20 if found[0] else 10
        run_ranks(save_rows, 2, args=(str(path), step))
        assert entries(path) == [f"step-{n:09d}" for n in range(10, step + 1, 10)], number


def first_save_fails(path: str, at: str, fault: str, background: bool) -> list[Any]:
    """Save for the first time while a storage call of rank 1 fails or is its last one; save again if no rank died."""
    comm = sx.get_communicator()
    is_due = comm.rank == 1

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal is_due
        if event == "statexchange.storage" and is_due and args[0] == at:
            is_due = False
            if fault == "full":
                raise OSError(errno.ENOSPC, "No space left on device")
            os.kill(os.getpid(), signal.SIGINT if fault == "interrupt" else signal.SIGKILL)

    sys.addaudithook(hook)
    saves = sx.Checkpoints(path, layout=LAYOUT)
    errors = (sx.StateExchangeError, KeyboardInterrupt)
    with pytest.raises(errors) as caught:
        if background:
            saves.save(shard_of(10, comm.rank, comm.world_size), 10, background=True).result(30)
        else:
            saves.save(shard_of(10, comm.rank, comm.world_size), 10)
    if fault == "full":
        comm.barrier()
        found = sorted(str(one.relative_to(path)) for one in Path(path).rglob("*"))
        comm.barrier()
        return [type(caught.value).__name__, found, save_rows(path, 20)]
    return [type(caught.value).__name__]


FAILING = [
    ("link", "full", False),
    slow("create", "full", True),
    slow("sync", "kill", False),
    slow("link", "kill", True),
    slow("create", "interrupt", False),
]


@pytest.mark.parametrize("exists", [False, True], ids=["new directory", "the user's directory"])
@pytest.mark.parametrize(("at", "fault", "background"), FAILING)
def test_a_first_save_that_fails_leaves_an_empty_directory(
    at: str, fault: str, background: bool, exists: bool, tmp_path: Path
) -> None:
    path = tmp_path / "runs" / "saves"
    if exists:
        path.mkdir(parents=True)
    outcomes = run_ranks(
        first_save_fails, 2, backend="gloo", args=(str(path), at, fault, background), allow_failure=True
    )
    if fault == "full":
        assert outcomes.values == {rank: ["PeerError", [], [20]] for rank in range(2)}, outcomes
        assert entries(path) == ["step-000000020"]
        return
    assert outcomes[0].value == ["PeerError"], str(outcomes)
    assert entries(path) == []
    assert run_ranks(save_rows, 2, args=(str(path), 20)) == [[20], [20]]


def load_while_removed(path: str, step: int | None) -> tuple[int, float] | str:
    """Load while rank 0's first opening of a rank's file removes the newest save."""
    saves = sx.Checkpoints(path)
    state = state_of(0)
    removed: list[int] = []

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "statexchange.storage" and args[0] == "open" and "rank-0" in args[1] and not removed:
            removed.append(30)
            sx.Checkpoints(path, comm=sx.init("single")).delete(30)

    sys.addaudithook(hook)
    try:
        report = saves.load(state, step)
        assert report is not None
        return report.step, value_in(state)
    except sx.errors.NotFoundError as error:
        return str(error)
    finally:
        removed.append(0)  # so that the hook, which cannot be removed, does nothing more


@pytest.mark.parametrize(("step", "expected"), [(None, [(20, 20.0), (30, 30.0)]), (30, [(30, 30.0)])], ids=str)
def test_a_save_that_is_removed_while_it_is_opened_is_loaded_skipped_or_named(
    step: int | None, expected: Any, tmp_path: Path
) -> None:
    save_steps(sx.Checkpoints(tmp_path), 10, 20, 30)
    found = run_ranks(load_while_removed, 1, backend="gloo", args=(str(tmp_path), step))[0]
    assert found in expected or (step == 30 and "step 30 was removed while it was opened" in found)


def test_a_job_logs_what_it_saved_and_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    save_steps(sx.Checkpoints(tmp_path, keep=1), 10, 20)
    assert "removed the save of step 10" in caplog.text
    assert "-> " in caplog.text
