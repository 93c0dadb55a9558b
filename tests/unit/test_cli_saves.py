"""The command line over a directory of a job's saves: `ls`, also of broken saves."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest
from command_saves import (
    DAMAGES,
    STEPS,
    Paused,
    all_bytes,
    break_manifest,
    folder,
    local_time,
    manifest,
    move_owner_to_another_host,
    rank_file,
    size_of,
)
from commands import CommandLine, command_environment
from programs import require_root
from warm_python import warm_python

import statexchange as sx
from statexchange.cli.output import EXIT_CODES
from statexchange.testing import run_ranks
from statexchange.units import format_bytes, format_time

NOBODY = 65534


# ls


def test_ls_lists_one_row_per_save(saved: Path, call: CommandLine) -> None:
    code, out, err = call("ls", saved, "--format", "human")
    assert (code, err) == (0, "")
    head, *rows = out.splitlines()
    assert head.split() == ["STEP", "TIME", "BYTES", "RANKS", "METRICS", "STATE"]
    shown = ["loss 0.5", "loss 0.125", "loss nan", "loss 0.25"]
    for row, step, metrics in zip(rows, STEPS, shown, strict=True):
        found = re.split(r"  +", row.strip())
        assert found == [str(step), local_time(saved, step), format_bytes(size_of(saved, step)), "2", metrics, "whole"]


def test_ls_in_a_pipe_has_exact_bytes_between_tabs(saved: Path, call: CommandLine) -> None:
    _, out, _ = call("ls", saved)
    assert out.splitlines()[1].split("\t") == [
        "100",
        local_time(saved, 100),
        str(size_of(saved, 100)),
        "2",
        "loss 0.5",
        "whole",
    ]


def test_ls_shows_local_times(saved: Path, call: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        _, out, _ = call("ls", saved)
    finally:
        monkeypatch.undo()
        time.tzset()
    shown = datetime.fromisoformat(out.splitlines()[1].split("\t")[1])
    created = datetime.fromtimestamp(manifest(saved, 100)["created"], timezone(timedelta(hours=9)))
    assert shown == created.replace(microsecond=0, tzinfo=None)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 1e300, -1e300])
def test_a_number_that_is_no_time_is_shown_as_a_question_mark(seconds: float) -> None:
    assert format_time(seconds) == "?"


def test_ls_in_json_has_every_field_of_a_save(saved: Path, call: CommandLine) -> None:
    code, envelope = call.json("ls", saved)
    data = envelope["data"]
    assert (code, data["kind"], data["num_saves"], data["nbytes"]) == (0, "saves", 4, all_bytes(saved))
    found = manifest(saved, 300)
    assert data["saves"][2] == {
        "step": 300,
        "path": os.fspath(folder(saved, 300)),
        "created": found["created"],
        "nbytes": size_of(saved, 300),
        "world_size": 2,
        "job": found["job"],
        "metrics": {"loss": "nan"},
        "state": "whole",
        "is_superseded": False,
        "is_finished": True,
        "code": "OK",
        "problems": [],
    }
    code, out, _ = call("ls", saved, "--format", "jsonl")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["type"] for line in lines] == ["save"] * 4 + ["summary"]


def test_saves_that_a_job_left_behind_are_shown_and_are_not_the_newest(saved: Path, call: CommandLine) -> None:
    saves = sx.Checkpoints(saved, keep=None)
    saves.load({"w": np.zeros((4, 4), np.float32)}, step=200, strict=False)
    saves.save({"w": np.zeros(2)}, 250)
    _, out, _ = call("ls", saved)
    states = {line.split("\t")[0]: line.split("\t")[5] for line in out.splitlines()[1:]}
    assert states == {
        "100": "whole",
        "200": "whole",
        "250": "whole",
        "300": "whole, superseded",
        "400": "whole, superseded",
    }
    _, envelope = call.json("info", saved)
    assert (envelope["data"]["newest"]["step"], saves.latest()) == (250, 250)


def test_ls_of_a_save_without_metrics_has_a_dash(saved: Path, call: CommandLine) -> None:
    sx.Checkpoints(saved, keep=None).save({"w": np.zeros(2)}, 500)
    _, out, _ = call("ls", saved)
    assert out.splitlines()[-1].split("\t")[3:] == ["1", "-", "whole"]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_broken_save_is_named_and_decides_the_exit_code(
    saved: Path, call: CommandLine, damage: Callable[[Path], None]
) -> None:
    state, name = DAMAGES[damage]
    damage(saved)
    code, out, err = call("ls", saved)
    rows = [line.split("\t") for line in out.splitlines()[1:]]
    assert [row[0] for row in rows] == ["100", "200", "300", "400"]
    assert [row[-1] for row in rows] == ["whole", state, "whole", "whole"]
    assert code == EXIT_CODES[name]
    assert err.startswith("warning: ")
    assert "step-000000200" in err
    _, envelope = call.json("ls", saved)
    row = envelope["data"]["saves"][1]
    assert (row["state"], row["code"], row["is_finished"]) == (state, name, True)
    assert row["problems"]
    assert envelope["error"]["code"] == name


def test_of_many_problems_of_one_save_four_are_shown_and_the_others_counted(tmp_path: Path, call: CommandLine) -> None:
    def rank_main() -> None:
        sx.Checkpoints(tmp_path / "saved").save({"w": np.zeros(2)}, 7)

    run_ranks(rank_main, 6)
    for rank in range(6):
        (tmp_path / "saved" / "step-000000007" / f"rank-{rank:05d}-of-00006.safetensors").unlink()
    for command in ("ls", "info"):
        code, out, err = call(command, tmp_path / "saved")
        assert (code, "ranks 0-5 lack files" in out) == (5, True)
        assert (err.count("warning: "), "warning: 2 more problems [" in err) == (5, True)
    _, envelope = call.json("ls", tmp_path / "saved")
    assert len(envelope["data"]["saves"][0]["problems"]) == 6


def test_the_most_severe_problem_decides_the_exit_code(saved: Path, call: CommandLine) -> None:
    rank_file(saved, 100, 0).unlink()
    assert call("ls", saved)[0] == 5
    break_manifest(saved)
    assert call("ls", saved)[0] == 4


def test_an_unfinished_save_is_listed_and_is_no_finding(
    saved: Path, call: CommandLine, paused: Callable[[int, str], Paused]
) -> None:
    saver = paused(500, "save")
    code, out, err = call("ls", saved)
    step, when, nbytes, ranks, metrics, state = out.splitlines()[-1].split("\t")
    assert (code, err) == (0, "")
    assert (step, when, ranks, metrics) == ("500", "-", "-", "-")
    assert int(nbytes) > 800
    assert re.fullmatch(rf"being saved by {saver.pid} on \S+", state)

    saver.kill()
    code, out, _ = call("ls", saved)
    assert (code, out.splitlines()[-1].split("\t")[-1]) == (0, "killed")
    _, envelope = call.json("ls", saved)
    row = envelope["data"]["saves"][-1]
    assert (row["step"], row["is_finished"], row["code"], row["state"]) == (500, False, None, "killed")
    assert row.keys() == envelope["data"]["saves"][0].keys()

    move_owner_to_another_host(saved)
    code, out, _ = call("ls", saved)
    assert (code, out.splitlines()[-1].split("\t")[-1]) == (0, "unfinished")


def test_a_hidden_directory_without_an_owner_is_unfinished(saved: Path, call: CommandLine) -> None:
    (saved / f".step-000000500.{'0' * 32}.{'1' * 16}.partial").mkdir()
    code, out, _ = call("ls", saved)
    assert (code, out.splitlines()[-1].split("\t")) == (0, ["500", "-", "0", "-", "-", "unfinished"])


def test_a_save_whose_removal_has_begun_is_listed_as_unfinished(
    saved: Path, call: CommandLine, paused: Callable[[int, str], Paused]
) -> None:
    remover = paused(100, "remove")
    code, out, _ = call("ls", saved)
    rows = [line.split("\t") for line in out.splitlines()[1:]]
    assert (code, [row[0] for row in rows]) == (0, ["200", "300", "400", "100"])
    assert re.fullmatch(rf"being removed by {remover.pid} on \S+", rows[-1][-1])
    remover.kill()
    _, out, _ = call("ls", saved)
    assert out.splitlines()[-1].split("\t")[-1] == "killed removal"


def test_a_job_that_has_only_begun_its_first_save_is_listed(
    saved: Path, call: CommandLine, paused: Callable[[int, str], Paused]
) -> None:
    shutil.rmtree(saved)
    saver = paused(100, "save")
    code, out, _ = call("ls", saved)
    assert code == 0
    assert [line.split("\t")[0] for line in out.splitlines()] == ["STEP", "100"]
    saver.kill()
    code, out, _ = call("info", saved)
    assert code == 0
    assert re.search(r"^saves +0$", out, re.MULTILINE)
    assert re.search(r"^unfinished +1: step 100 \(killed\)$", out, re.MULTILINE)


def test_a_save_that_is_removed_while_ls_reads_is_left_out(saved: Path) -> None:
    program = (
        "import shutil, sys\n"
        "from statexchange.cli.main import main\n"
        "path = sys.argv[1] + '/step-000000200'\n"
        "def remove(name, arguments):\n"
        "    if name == 'statexchange.storage' and arguments == ('open directory', path):\n"
        "        shutil.rmtree(path, ignore_errors=True)\n"
        "sys.addaudithook(remove)\n"
        "main(['ls', sys.argv[1]])\n"
    )
    done = subprocess.run(
        [warm_python("commands"), "-c", program, os.fspath(saved)],
        capture_output=True,
        text=True,
        env=command_environment(),
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split("\t")[0] for line in done.stdout.splitlines()[1:]] == ["100", "300", "400"]


@pytest.fixture
def unreadable(saved: Path) -> Iterator[Path]:
    """Return a directory of saves, as a user who may not open that of step 200."""
    require_root()
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "saved"
        shutil.copytree(saved, path)
        for below in (path.parent, path, *path.rglob("*")):
            os.chown(below, NOBODY, -1)
        closed = folder(path, 200)
        closed.chmod(0)
        os.seteuid(NOBODY)
        try:
            yield path
        finally:
            os.seteuid(0)
            closed.chmod(0o700)


def test_a_save_that_may_not_be_opened_hides_no_other(unreadable: Path, call: CommandLine) -> None:
    code, data = call.json("ls", unreadable)
    assert code == EXIT_CODES["IO"]
    states = {row["step"]: row["state"] for row in data["data"]["saves"]}
    assert states == {100: "whole", 200: "cannot be read", 300: "whole", 400: "whole"}
    code, data = call.json("verify", unreadable)
    assert code == EXIT_CODES["IO"]
    codes = {row["step"]: row["code"] for row in data["data"]["saves"]}
    assert codes == {100: "OK", 200: "IO", 300: "OK", 400: "OK"}
    code, out, _ = call("info", unreadable)
    assert code == EXIT_CODES["IO"]
    assert re.search(r"^broken +1: step 200 \(cannot be read\)$", out, re.MULTILINE)
    code, data = call.json("prune", unreadable, "--keep", "1")
    assert code == EXIT_CODES["IO"]
    actions = {row["step"]: row["action"] for row in data["data"]["saves"]}
    assert actions == {100: "removed", 200: "not removed", 300: "removed", 400: "kept"}
    code, _, err = call("merge", unreadable, unreadable / "out")
    assert (code, f"name one of them, such as {folder(unreadable, 400)}" in err) == (EXIT_CODES["USAGE"], True)


def test_a_directory_whose_only_save_may_not_be_opened_is_listed(unreadable: Path, call: CommandLine) -> None:
    for step in (100, 300, 400):
        shutil.rmtree(folder(unreadable, step))
    code, out, err = call("ls", unreadable)
    assert (code, out.splitlines()[1].split("\t")) == (EXIT_CODES["IO"], ["200", "-", "-", "-", "-", "cannot be read"])
    assert "Permission denied" in err
    code, _, err = call("show", unreadable)
    assert (code, "Permission denied" in err) == (EXIT_CODES["IO"], True)


def test_ls_of_one_step_lists_its_tensors_with_their_ranks(saved: Path, call: CommandLine) -> None:
    code, out, _ = call("ls", folder(saved, 200))
    assert code == 0
    assert [line.split("\t") for line in out.splitlines()] == [
        ["NAME", "DTYPE", "SHAPE", "BYTES", "HELD-BY"],
        ["b", "F32", "[4]", "16", "0"],
        ["w", "F32", "[4,4]", "64", "0-1"],
    ]
    _, out, _ = call("ls", rank_file(saved, 200, 1))
    assert [line.split("\t")[-1] for line in out.splitlines()[1:]] == ["1"]


def test_include_for_a_directory_of_saves_is_a_usage_error(saved: Path, call: CommandLine) -> None:
    code, _, err = call("ls", saved, "--include", "*")
    assert code == 2
    assert "--include cannot be used, as this directory has saves" in err


def test_a_checkpoint_that_contains_saves_is_listed_as_a_checkpoint(saved: Path, call: CommandLine) -> None:
    sx.export_checkpoint({"v": np.zeros(2, np.float32)}, saved.parent / "published")
    shutil.move(saved, saved.parent / "published")  # as published/saved
    for step in STEPS:
        shutil.move(folder(saved.parent / "published" / "saved", step), saved.parent / "published")
    code, out, _ = call("ls", saved.parent / "published")
    assert (code, out.splitlines()[1].split("\t")[0]) == (0, "v")


@pytest.mark.parametrize("command", [("ls",), ("info",), ("prune", "--keep", "1")])
def test_ls_info_and_prune_of_saves_import_neither_torch_nor_numpy(saved: Path, command: tuple[str, ...]) -> None:
    program = (
        "import sys\nfrom statexchange.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as ended: assert not ended.code\n"
        "print(*{'torch', 'numpy', 'fsspec'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *command, os.fspath(saved), "--json"],
        capture_output=True,
        text=True,
        env=command_environment(),
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "\n")
