"""`prune` over a directory of a job's saves, absent ones, and saves at a URL."""

import dataclasses
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_saves import (
    DAMAGES,
    STEPS,
    Paused,
    folder,
    hidden_in,
    move_owner_to_another_host,
    rank_file,
    size_of,
)
from commands import CommandLine
from safetensors.numpy import load_file
from stored import contents_of

import statexchange as sx
from statexchange.cli.output import EXIT_CODES
from statexchange.processes import Owner
from statexchange.storage.publish.claim import CLAIM_NAME, Claim
from statexchange.units import format_bytes


def steps_in(path: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step-")) for p in path.iterdir() if p.name.startswith("step-"))


# prune


def test_prune_keeps_the_newest_and_prints_what_it_removed(saved: Path, call: CommandLine) -> None:
    nbytes = str(size_of(saved, 100))
    removed = format_bytes(size_of(saved, 100) + size_of(saved, 200))
    code, out, err = call("prune", saved, "--keep", "2")
    assert code == 0
    assert [line.split("\t") for line in out.splitlines()] == [
        ["STEP", "BYTES", "ACTION", "WHY"],
        ["100", nbytes, "removed", ""],
        ["200", nbytes, "removed", ""],
        ["300", nbytes, "kept", "one of the newest 2"],
        ["400", nbytes, "kept", "one of the newest 2"],
    ]
    assert err == f"removed 2 saves, {removed}; kept steps 300, 400\n"
    assert sorted(os.listdir(saved)) == ["step-000000300", "step-000000400"]
    assert sx.Checkpoints(saved).steps() == [300, 400]
    code, _, err = call("prune", saved, "--keep", "2")
    assert (code, err) == (0, "removed 0 saves, 0 B; kept steps 300, 400\n")


def test_prune_keeps_multiples_and_the_best(saved: Path, call: CommandLine) -> None:
    code, out, _ = call("prune", saved, "--keep", "1", "--keep-every", "100", "--best", "loss:min")
    assert (code, steps_in(saved)) == (0, [100, 200, 300, 400])
    code, out, _ = call("prune", saved, "--keep", "1", "--keep-every", "300", "--best", "loss:min")
    why = {line.split("\t")[0]: line.split("\t")[3] for line in out.splitlines()[1:]}
    assert why == {"100": "", "200": "best loss: 0.125", "300": "a multiple of 300", "400": "newest"}
    assert (code, steps_in(saved)) == (0, [200, 300, 400])
    code, _, err = call("prune", saved, "--keep", "1", "--best", "loss:max")
    assert (code, steps_in(saved)) == (0, [400])  # the newest is also the best; NaN is never the best
    assert err.endswith("kept step 400\n")


def test_a_dry_run_of_prune_changes_nothing_and_prints_what_prune_does(
    saved: Path, call: CommandLine, paused: Callable[[int, str], Paused]
) -> None:
    paused(500, "save").kill()
    (folder(saved, 100) / "notes.txt").write_text("mine")
    before = contents_of(saved)
    code, out, err = call("prune", saved, "--keep", "2", "--dry-run")
    assert contents_of(saved) == before
    foretold = [line.split("\t") for line in out.splitlines()[1:]]
    assert [row[2] for row in foretold] == ["not removed", "would be removed", "kept", "kept", "would be removed"]
    assert (code, "would remove 1 save and 1 unfinished" in err) == (7, True)
    code, out, _ = call("prune", saved, "--keep", "2")
    done = [line.replace("would be removed", "removed") for line in map("\t".join, foretold)]
    assert (code, out.splitlines()[1:]) == (7, done)


def test_prune_in_json_has_an_action_for_each_save(saved: Path, call: CommandLine) -> None:
    nbytes = size_of(saved, 100)
    code, envelope = call.json("prune", saved, "--keep", "3")
    data = envelope["data"]
    assert (code, data["dry_run"], data["nbytes"]) == (0, False, nbytes)
    assert [row["action"] for row in data["saves"]] == ["removed", "kept", "kept", "kept"]
    assert data["saves"][0] == {
        "step": 100,
        "paths": [os.fspath(folder(saved, 100))],
        "nbytes": nbytes,
        "is_unfinished": False,
        "action": "removed",
        "reason": "",
        "problem": None,
    }


def test_prune_refuses_a_save_with_files_of_others(saved: Path, call: CommandLine) -> None:
    (folder(saved, 200) / "notes.txt").write_text("mine")
    code, out, err = call("prune", saved, "--keep", "1")
    assert code == 7
    assert "warning: refused to replace or remove: 'notes.txt' is not a file of this save" in err
    assert out.splitlines()[2].split("\t")[2] == "not removed"
    assert steps_in(saved) == [200, 400]
    assert sorted(os.listdir(folder(saved, 200)))[0] == "notes.txt"
    assert sx.Checkpoints(saved).steps() == [200, 400]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_prune_neither_counts_nor_removes_a_broken_save(
    saved: Path, call: CommandLine, damage: Callable[[Path], None]
) -> None:
    """Otherwise the last save that can be loaded could be removed for one that cannot."""
    damage(saved)
    for step in (300, 400):
        shutil.rmtree(folder(saved, step))
    code, out, _ = call("prune", saved, "--keep", "1")
    state, name = DAMAGES[damage]
    assert code == EXIT_CODES[name]
    assert [line.split("\t")[2:] for line in out.splitlines()[1:]] == [
        ["kept", "newest"],
        ["not removed", f"broken, does not count: {state}"],
    ]
    assert steps_in(saved) == [100, 200]


def test_prune_removes_what_killed_processes_left(
    saved: Path, call: CommandLine, paused: Callable[[int, str], Paused]
) -> None:
    paused(500, "save").kill()
    paused(100, "remove").kill()
    code, out, err = call("prune", saved, "--keep", "3")
    assert code == 0
    rows = [line.split("\t") for line in out.splitlines()[4:]]
    assert [(row[0], row[2]) for row in rows] == [("100", "removed"), ("500", "removed")]
    assert re.fullmatch(r"unfinished removal, process \d+ on \S+ has ended", rows[0][3])
    assert re.fullmatch(r"unfinished save, process \d+ on \S+ has ended", rows[1][3])
    assert "removed 0 saves and 2 unfinished" in err
    assert (hidden_in(saved), steps_in(saved)) == ([], [200, 300, 400])


def test_prune_leaves_what_a_process_may_still_write(
    saved: Path, call: CommandLine, paused: Callable[[int, str], Paused]
) -> None:
    saver = paused(500, "save")
    before = hidden_in(saved)
    code, out, _ = call("prune", saved, "--keep", "1")
    assert (code, hidden_in(saved), steps_in(saved)) == (0, before, [400])
    assert re.search(rf"^500\t\d+\tnot removed\tunfinished save, process {saver.pid} on \S+ runs$", out, re.M)
    saver.kill()
    move_owner_to_another_host(saved)
    before = hidden_in(saved)
    code, out, _ = call("prune", saved, "--keep", "1")
    assert (code, hidden_in(saved)) == (0, before)
    found = re.search(
        r"^500\t\d+\tnot removed\t.*\d+ on node7, which cannot be seen from here: if it has ended, remove (.*)$",
        out,
        re.M,
    )
    assert found is not None
    assert sorted(Path("/").glob(found[1].removeprefix("/"))) == [saved / name for name in before if "lock" not in name]


def test_prune_waits_briefly_for_a_process_that_works_on_a_save(
    saved: Path, call: CommandLine, paused: Callable[[int, str], Paused], monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = paused(100, "save")
    monkeypatch.setattr(time, "sleep", lambda seconds: saver.kill())  # it ends while prune waits
    code, _, _ = call("prune", saved, "--keep", "2")
    monkeypatch.undo()
    assert (code, steps_in(saved), hidden_in(saved)) == (0, [300, 400], [])


def test_prune_does_not_wait_long_for_a_process_that_replaces_a_save(
    saved: Path, call: CommandLine, paused: Callable[[int, str], Paused]
) -> None:
    paused(100, "save")
    code, out, err = call("prune", saved, "--keep", "2")
    assert code == 7
    assert out.splitlines()[1].split("\t")[2:] == ["not removed", "another process is working on it"]
    assert "warning: " in err
    assert steps_in(saved) == [100, 300, 400]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ((), "Missing option '--keep'"),
        (("--keep", "0"), "0 is not in the range"),
        (("--keep", "-1"), "-1 is not in the range"),
        (("--keep", "all"), "'all' is not a valid integer"),
        (("--keep", "1", "--keep-every", "0"), "0 is not in the range"),
        (("--keep", "1", "--best", "loss"), "neither METRIC:min nor METRIC:max"),
        (("--keep", "1", "--best", ":min"), "neither METRIC:min nor METRIC:max"),
        (("--keep", "1", "--best", "los:min"), "no save here has the metric 'los': they have loss"),
    ],
)
def test_prune_with_a_bad_option_removes_nothing(
    saved: Path, call: CommandLine, options: tuple[str, ...], text: str
) -> None:
    code, out, err = call("prune", saved, *options)
    assert (code, out) == (2, "")
    assert text in err
    assert steps_in(saved) == list(STEPS)


def test_only_rank_0_of_a_launcher_prunes(saved: Path, call: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    code, _, err = call("prune", saved, "--keep", "1")
    assert code == 7
    assert "only rank 0 runs this command" in err
    assert steps_in(saved) == list(STEPS)
    monkeypatch.setenv("RANK", "0")
    assert call("prune", saved, "--keep", "1")[0] == 0
    assert steps_in(saved) == [400]


# Paths that are no directory of saves


def test_an_absent_step_is_not_found(saved: Path, call: CommandLine) -> None:
    for command in ("info", "ls", "verify"):
        code, out, err = call(command, folder(saved, 250))
        assert (code, out) == (3, "")
        assert str(folder(saved, 250)) in err
    with pytest.raises(sx.errors.NotFoundError, match="step-000000250"):
        sx.open_checkpoint(folder(saved, 250))


@pytest.mark.parametrize("command", [("ls",), ("info",), ("verify",), ("prune", "--keep", "1")])
def test_absent_and_empty_directories_are_not_found(saved: Path, call: CommandLine, command: tuple[str, ...]) -> None:
    name, *options = command
    code, _, err = call(name, saved / "absent", *options)
    assert (code, "no such path" in err) == (3, True)
    (saved.parent / "empty").mkdir()
    assert call(name, saved.parent / "empty", *options)[0] == 3


def test_prune_refuses_what_is_no_directory_of_saves(saved: Path, call: CommandLine) -> None:
    code, _, err = call("prune", folder(saved, 100), "--keep", "1")
    assert code == 2
    assert f"this is one save: pass the directory that contains it, {saved}" in err
    code, _, err = call("prune", rank_file(saved, 100, 0), "--keep", "1")
    assert (code, "this is a file" in err) == (2, True)
    code, _, err = call("prune", saved.parent, "--keep", "1")
    assert (code, "there are no saves by step here" in err) == (3, True)
    assert steps_in(saved) == list(STEPS)


def test_ls_info_verify_prune_and_merge_take_saves_at_a_url(store: Any, call: CommandLine, tmp_path: Path) -> None:
    saves = sx.Checkpoints("memory://saves", keep=None)
    for step in (10, 20, 30):
        saves.save({"model": {"w": np.full(4, step, np.float32)}}, step, metrics={"loss": 1 / step})
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    owner = dataclasses.replace(Owner.current(), pid=ended.pid)
    claim = Claim("a" * 16, owner, "2026-01-01T00:00:00+00:00", "0" * 32, frozenset(("save.json",)))
    store.pipe_file(f"/saves/step-000000040/{CLAIM_NAME}", claim.to_bytes())
    code, out, err = call("ls", "memory://saves")
    assert code == 0, err
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["10", "20", "30", "40"]
    assert out.splitlines()[-1].endswith("killed")
    code, out, _ = call("info", "memory://saves")
    assert (code, "3: steps 10, 20, 30" in out) == (0, True)
    code, out, _ = call("info", "memory://saves/step-000000020")
    assert (code, re.search(r"step +20$", out, re.MULTILINE) is not None) == (0, True)
    code, out, _ = call("verify", "memory://saves")
    assert (code, out.count(": ok")) == (0, 3)
    code, out, _ = call("prune", "memory://saves", "--keep", "1", "--dry-run")
    assert (code, out.count("would be removed"), saves.steps()) == (0, 3, [10, 20, 30])
    code, out, err = call("prune", "memory://saves", "--keep", "1")
    assert (code, out.count("removed"), "kept step 30" in err) == (0, 3, True), err
    assert [path.rpartition("/")[2] for path in store.ls("/saves", detail=False)] == ["step-000000030"]
    assert call("merge", "memory://saves/step-000000030", tmp_path / "merged")[0] == 0
    (tensor,) = load_file(tmp_path / "merged" / "model.safetensors").values()
    assert tensor.tolist() == [30.0] * 4
    store.rm_file("/saves/step-000000030/rank-00000-of-00001.safetensors")
    code, out, _ = call("ls", "memory://saves")
    assert (code, "rank 0 lacks a file" in out) == (5, True)
    code, _, err = call("ls", "memory://nowhere")
    assert (code, "no such path" in err) == (3, True)
