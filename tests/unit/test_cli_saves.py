"""The command line over a directory of a job's saves: `ls`, `info`, `verify` and `prune`."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import CommandLine, command_environment
from programs import require_root
from safetensors.numpy import load_file
from stored import contents_of, flip_bit
from warm_python import warm_python

import statexchange as sx
from statexchange.cli.output import EXIT_CODES
from statexchange.processes import Owner
from statexchange.storage.publish.claim import CLAIM_NAME, Claim
from statexchange.testing import run_ranks
from statexchange.units import format_bytes, format_time

STEPS = (100, 200, 300, 400)
NOBODY = 65534
LOSSES = {100: 0.5, 200: 0.125, 300: float("nan"), 400: 0.25}


def save_steps(path: Path) -> None:
    """Save four steps on two ranks; each holds a half of one tensor and all of another."""

    def rank_main() -> None:
        saves = sx.Checkpoints(path, keep=None, layout={"w": {"dim": 0}})
        for step in STEPS:
            state = {"w": np.full((2, 4), step, np.float32), "b": np.zeros(4, np.float32)}
            saves.save(state, step, metrics={"loss": LOSSES[step]})

    run_ranks(rank_main, 2)


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "saved"
    save_steps(path)
    return path


@pytest.fixture
def saved(saved_once: Path, tmp_path: Path, plain_environment: None) -> Path:
    """Return a copy of the saves."""
    path = tmp_path / "saved"
    shutil.copytree(saved_once, path)
    return path


def folder(saved: Path, step: int) -> Path:
    return saved / f"step-{step:09d}"


def rank_file(saved: Path, step: int, rank: int) -> Path:
    return folder(saved, step) / f"rank-{rank:05d}-of-00002.safetensors"


def manifest(saved: Path, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder(saved, step) / "save.json").read_text())
    return found


def size_of(saved: Path, step: int) -> int:
    return sum(size for _, size in manifest(saved, step)["files"])


def all_bytes(saved: Path) -> int:
    return sum(size_of(saved, step) for step in STEPS)


def local_time(saved: Path, step: int) -> str:
    return datetime.fromtimestamp(manifest(saved, step)["created"]).isoformat(timespec="seconds")


def steps_in(path: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step-")) for p in path.iterdir() if p.name.startswith("step-"))


def hidden_in(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir() if p.name.startswith("."))


# Processes that stop in the middle of a save or a removal

PAUSED = """
import os, sys, time
import numpy as np
import statexchange as sx

path, step, doing, event, ending = sys.argv[1:]

def pause(name, arguments):
    if name == "statexchange.storage" and arguments[0] == event and str(arguments[1]).endswith(ending):
        print(os.getpid(), flush=True)
        time.sleep(600)

saves = sx.Checkpoints(path, keep=None)
sys.addaudithook(pause)
if doing == "save":
    saves.save({"w": np.zeros(100)}, int(step), overwrite=True)
else:
    saves.delete(int(step))
"""


class Paused:
    """A process that has stopped in the middle of saving or removing a step."""

    def __init__(self, saved: Path, step: int, doing: str) -> None:
        event, ending = ("create", "save.json") if doing == "save" else ("unlink", "save.json")
        command = [warm_python("commands"), "-c", PAUSED, os.fspath(saved), str(step), doing, event, ending]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=command_environment(), cwd=saved.parent
        )
        assert self.process.stdout is not None
        self.pid = int(self.process.stdout.readline())  # the process itself is a fork

    def kill(self) -> None:
        if self.process.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def paused(saved: Path) -> Iterator[Callable[[int, str], Paused]]:
    started: list[Paused] = []

    def start(step: int, doing: str) -> Paused:
        started.append(Paused(saved, step, doing))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        assert one.process.stdout is not None
        one.process.stdout.close()


def move_owner_to_another_host(saved: Path) -> None:
    """Make the unfinished save look as if a process of another host were writing it."""
    (record,) = (saved / name for name in hidden_in(saved) if name.endswith(".owner"))
    owner = json.loads(os.readlink(record))
    record.unlink()
    record.symlink_to(json.dumps({**owner, "host": "node7", "boot": "0" * 36}))


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


def remove_file(saved: Path) -> None:
    rank_file(saved, 200, 1).unlink()


def remove_all_files(saved: Path) -> None:
    for rank in range(2):
        rank_file(saved, 200, rank).unlink()


def truncate_file(saved: Path) -> None:
    os.truncate(rank_file(saved, 200, 0), 500)


def lengthen_file(saved: Path) -> None:
    os.truncate(rank_file(saved, 200, 0), 5000)


def break_header(saved: Path) -> None:
    with rank_file(saved, 200, 1).open("r+b") as file:
        file.write(b"garbage.")


def take_file_of_another_save(saved: Path) -> None:
    shutil.copyfile(rank_file(saved, 100, 1), rank_file(saved, 200, 1))


def truncate_and_remove(saved: Path) -> None:
    truncate_file(saved)
    remove_file(saved)


def break_manifest(saved: Path) -> None:
    path = folder(saved, 200) / "save.json"
    path.write_text(path.read_text().replace("0.125", "0.126"))


def empty_manifest(saved: Path) -> None:
    (folder(saved, 200) / "save.json").write_text("")


def remove_manifest(saved: Path) -> None:
    (folder(saved, 200) / "save.json").unlink()


DAMAGES = {
    remove_file: ("rank 1 lacks a file", "INCOMPLETE"),
    remove_all_files: ("ranks 0-1 lack files", "INCOMPLETE"),
    truncate_file: ("rank 0 is truncated", "CORRUPT"),
    lengthen_file: ("rank 0 is longer than listed", "CORRUPT"),
    break_header: ("rank 1 has a broken header", "CORRUPT"),
    take_file_of_another_save: ("rank 1 has a broken header", "CORRUPT"),
    truncate_and_remove: ("rank 0 is truncated; rank 1 lacks a file", "CORRUPT"),
    break_manifest: ("broken manifest", "CORRUPT"),
    empty_manifest: ("broken manifest", "CORRUPT"),
    remove_manifest: ("no save.json", "INCOMPLETE"),
}


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


# info


def test_info_of_one_step_has_its_step_time_metrics_and_job(saved: Path, call: CommandLine) -> None:
    code, out, _ = call("info", folder(saved, 200))
    assert code == 0
    fields = dict(re.split(r"  +", line, maxsplit=1) for line in out.splitlines())
    assert fields["kind"] == "save"
    assert fields["step"] == "200"
    assert fields["saved"] == local_time(saved, 200)
    assert fields["metrics"] == "loss 0.125"
    assert fields["job"] == manifest(saved, 200)["job"]
    assert fields["ranks"] == "2 of 2: 0-1"
    assert fields["tensors"] == "2"
    assert not fields.keys() & {"run", "round"}
    _, envelope = call.json("info", folder(saved, 300))
    data = envelope["data"]
    assert (data["kind"], data["step"], data["metrics"], data["ranks"]) == ("save", 300, {"loss": "nan"}, [0, 1])
    assert data["created"] == manifest(saved, 300)["created"]


def test_info_of_a_save_without_a_step_leaves_it_out(saved: Path, call: CommandLine) -> None:
    sx.save_checkpoint({"w": np.zeros(2)}, saved.parent / "alone")
    code, out, _ = call("info", saved.parent / "alone")
    keys = {line.split()[0] for line in out.splitlines()}
    assert code == 0
    assert keys >= {"saved", "job", "ranks"}
    assert not keys & {"step", "metrics", "run", "round"}


def test_info_of_a_directory_of_saves_is_a_summary(
    saved: Path, call: CommandLine, paused: Callable[[int, str], Paused]
) -> None:
    paused(500, "save").kill()
    code, out, _ = call("info", saved)
    assert code == 0
    assert out.splitlines() == [
        "kind        saves",
        f"path        {saved}",
        "saves       4: steps 100, 200, 300, 400",
        f"newest      step 400, saved {local_time(saved, 400)}, whole",
        f"bytes       {format_bytes(all_bytes(saved))} ({all_bytes(saved):,} bytes)",
        "unfinished  1: step 500 (killed)",
    ]
    _, envelope = call.json("info", saved)
    data = envelope["data"]
    assert (data["kind"], data["num_saves"], data["steps"], data["nbytes"]) == (
        "saves",
        4,
        list(STEPS),
        all_bytes(saved),
    )
    assert (data["newest"]["step"], data["newest"]["state"], data["num_broken"]) == (400, "whole", 0)
    assert [row["state"] for row in data["unfinished"]] == ["killed"]


def test_info_names_broken_saves_and_the_state_of_the_newest(saved: Path, call: CommandLine) -> None:
    rank_file(saved, 400, 1).unlink()
    break_manifest(saved)
    code, out, err = call("info", saved)
    assert code == 4
    assert err.count("warning: ") == 2
    assert re.search(r"^newest +step 400, saved \S+, rank 1 lacks a file$", out, re.MULTILINE)
    assert re.search(r"^broken +2: step 200 \(broken manifest\), step 400 \(rank 1 lacks a file\)$", out, re.MULTILINE)


# verify


def test_verify_checks_every_save_in_one_line_each(saved: Path, call: CommandLine) -> None:
    code, out, err = call("verify", saved)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) == 5
    for line, step in zip(lines, STEPS, strict=False):
        assert re.fullmatch(rf"step {step}: 2 tensors, 80 B in \S+ s: ok", line)
    assert lines[-1] == "4 of 4 saves are whole"


def test_verify_finds_a_flipped_bit_that_ls_does_not_read(saved: Path, call: CommandLine) -> None:
    flip_bit(rank_file(saved, 300, 0), -1)
    assert call("ls", saved)[0] == 0
    code, out, _ = call("verify", saved)
    assert code == 4
    assert re.search(r"^step 300: .*: 1 finding\nCORRUPT +bytes differ from their digest.*rank 0", out, re.MULTILINE)
    assert out.endswith("3 of 4 saves are whole\n")
    code, out, _ = call("verify", folder(saved, 200))
    assert (code, out.splitlines()[-1]) == (0, "ok: every element is there exactly once, every digest agrees")


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_verify_goes_on_after_a_broken_save(saved: Path, call: CommandLine, damage: Callable[[Path], None]) -> None:
    damage(saved)
    code, envelope = call.json("verify", saved)
    data = envelope["data"]
    assert code == EXIT_CODES[DAMAGES[damage][1]]
    assert (data["num_saves"], data["num_whole"]) == (4, 3)
    assert [row["code"] == "OK" for row in data["saves"]] == [True, False, True, True]
    assert data["saves"][1]["findings"]
    assert data["saves"][0]["findings"] == []


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
