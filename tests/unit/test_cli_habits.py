"""Habits of the command line that all commands share: several PATHs, quiet and verbose, interrupts, closed streams."""

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import statexchange as sx
from statexchange.cli.main import main
from statexchange.errors import did_you_mean

HOME = os.fspath(Path(sx.__file__).parents[1])
LAUNCHER_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "NO_COLOR")
Ran = tuple[int, str, str]


def environment(**more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    return {**kept, "PYTHONPATH": HOME, **more}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in LAUNCHER_VARIABLES:
        monkeypatch.delenv(variable, raising=False)


class Call:
    """Runs the command line in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object) -> Ran:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        out, err = self._capsys.readouterr()
        return int(ended.value.code or 0), out, err

    def json(self, *arguments: object) -> tuple[int, Any]:
        code, out, err = self(*arguments, "--json")
        assert err == ""
        return code, json.loads(out)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    return Call(capsys)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a whole checkpoint, one of other names, and one with a flipped bit."""
    root = tmp_path_factory.mktemp("made")
    state = {f"layers.{n}.{part}.weight": np.full((4, 3), n, np.float32) for n in range(3) for part in ("up", "down")}
    sx.export_checkpoint({**state, "norm.weight": np.ones(3, np.float32)}, root / "whole")
    sx.export_checkpoint({"other.weight": np.ones(2, np.float32)}, root / "other")
    sx.export_checkpoint(state, root / "flipped")
    file = root / "flipped" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return root


# --- several PATHs ---


@pytest.mark.parametrize("command", ["info", "ls", "verify"])
def test_several_paths_have_a_heading_each(call: Call, made: Path, command: str) -> None:
    paths = [made / "whole", made / "other"]
    alone = [call(command, path) for path in paths]
    code, out, _ = call(command, *paths)
    assert code == 0
    first, second = out.split("\n\n")
    assert first.splitlines()[0] == f"==> {paths[0]} <=="
    assert second.splitlines()[0] == f"==> {paths[1]} <=="
    if command != "verify":  # which tells how long it took
        assert [part.split("\n", 1)[1].rstrip("\n") for part in (first, second)] == [
            out.rstrip("\n") for _, out, _ in alone
        ]


@pytest.mark.parametrize("command", ["info", "ls", "verify"])
def test_a_failure_at_one_path_leaves_the_others(call: Call, made: Path, command: str) -> None:
    paths = [made / "absent", made / "whole"]
    code, out, err = call(command, *paths)
    assert code == 3
    assert err == f"error: no such path [{paths[0]}]\n"
    assert out.startswith(f"==> {paths[0]} <==\n\n==> {paths[1]} <==\n")
    code, _, err = call(command, "\x1b[31mevil", made / "whole")
    assert (code, "\x1b" in err) == (3, False)


def test_the_exit_code_of_several_paths_is_that_of_the_most_severe(call: Call, made: Path) -> None:
    code, out, _ = call("verify", made / "absent", made / "flipped", made / "whole")
    assert code == 4
    assert "CORRUPT" in out
    assert out.rstrip().endswith("every digest agrees")


@pytest.mark.parametrize("command", ["info", "ls", "verify"])
def test_several_paths_as_json_are_a_list_of_records(call: Call, made: Path, command: str) -> None:
    paths = [made / "whole", made / "absent", made / "other"]
    code, envelope = call.json(command, *paths)
    assert (code, envelope["schema"], envelope["ok"], envelope["code"]) == (3, 1, False, "NOT_FOUND")
    records = envelope["data"]
    assert [(record["path"], record["code"], record["ok"]) for record in records] == [
        (str(paths[0]), "OK", True),
        (str(paths[1]), "NOT_FOUND", False),
        (str(paths[2]), "OK", True),
    ]
    for path, record in zip(paths, records, strict=True):
        alone = call.json(command, path)[1]
        assert record == {"path": str(path), **{key: value for key, value in alone.items() if key != "schema"}}


def test_several_paths_as_json_lines_are_an_object_each(call: Call, made: Path) -> None:
    paths = [made / "whole", made / "absent"]
    code, out, _ = call("ls", *paths, "--format", "jsonl")
    *records, summary = map(json.loads, out.splitlines())
    assert code == 3
    assert [(record["type"], record["path"], record["code"]) for record in records] == [
        ("path", str(paths[0]), "OK"),
        ("path", str(paths[1]), "NOT_FOUND"),
    ]
    assert len(records[0]["data"]["tensors"]) == 7
    assert (summary["type"], summary["code"], summary["data"]) == (
        "summary",
        "NOT_FOUND",
        {"num_paths": 2, "num_ok": 1},
    )


def test_data_and_messages_of_several_paths_are_in_order_in_one_file(made: Path) -> None:
    command = [sys.executable, "-m", "statexchange", "info", made / "absent", made / "whole"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), timeout=60
    )
    heading, error, _, other, *_ = done.stdout.splitlines()
    assert (heading, error) == (f"==> {made}/absent <==", f"error: no such path [{made}/absent]")
    assert other == f"==> {made}/whole <=="


# --- quiet and verbose ---

COMMANDS = [
    ["info", "whole"],
    ["ls", "whole"],
    ["scan", "."],
    ["diff", "whole", "other"],
    ["verify", "whole"],
    ["merge", "whole", "out", "--dry-run"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_quiet_leaves_the_data_and_the_exit_code(
    call: Call, made: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    code, out, _ = call(*command)
    for arguments in ([*command, "-q"], [*command, "--quiet"], ["-q", *command]):
        quiet_code, quiet_out, quiet_err = call(*arguments)
        assert (quiet_code, quiet_err) == (code, "")
        assert len(quiet_out.splitlines()) == len(out.splitlines())


def test_quiet_leaves_errors_with_their_hints_and_warnings_in_json(call: Call, made: Path, tmp_path: Path) -> None:
    code, out, err = call("info", "-q", made / "absent")
    assert (code, out, err) == (3, "", f"error: no such path [{made / 'absent'}]\n")
    code, _, err = call("-q", "merge", made / "flipped", tmp_path / "out")
    assert (code, err.splitlines()[-1]) == (4, "hint: statexchange verify lists all problems")
    bare = tmp_path / "bare.safetensors"
    bare.write_bytes((made / "whole" / "model.safetensors").read_bytes())
    assert "no digest is known" in call("verify", bare)[2]
    assert call("verify", bare, "-q")[2] == ""
    assert "no digest is known" in call.json("verify", bare, "-q")[1]["warnings"][0]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_verbose_logs_with_times_on_stderr(
    call: Call, made: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    code, out, err = call(*command)
    for arguments in ([*command, "-v"], ["--verbose", *command]):
        verbose_code, verbose_out, verbose_err = call(*arguments)
        logged = [line for line in verbose_err.splitlines() if " DEBUG statexchange." in line]
        assert any("model.safetensors" in line for line in logged)
        assert all(re.match(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ", line) for line in logged)
        assert (verbose_code, len(verbose_out.splitlines())) == (code, len(out.splitlines()))
        assert " DEBUG " not in verbose_out
    assert call(*command)[2] == err, "the log ends with the command"


def test_quiet_and_verbose_contradict_each_other(call: Call, made: Path) -> None:
    for arguments in (["info", "-q", "-v", made], ["-q", "info", "-v", made]):
        code, _, err = call(*arguments)
        assert (code, err.splitlines()[0]) == (2, "error: --quiet and --verbose contradict each other")


def test_options_of_all_commands_may_stand_before_the_command(call: Call, made: Path) -> None:
    assert call("--json", "info", made / "whole") == call("info", made / "whole", "--json")


def test_a_logged_warning_is_a_warning_of_the_command(call: Call, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from statexchange.report import summary

    def warned(path: str) -> summary.Summary:
        logging.getLogger("statexchange.storage").warning("late \x1b[31m files")
        return summarize(path)

    summarize = summary.summarize
    monkeypatch.setattr(summary, "summarize", warned)
    assert call("info", made / "whole")[2] == "warning: late \\x1b[31m files\n"
    assert call("info", made / "whole", "-q")[2] == ""
    assert call.json("info", made / "whole")[1]["warnings"] == ["late \x1b[31m files"]


# --- did you mean ---


@pytest.mark.parametrize(("typed", "meant"), [("inf", "info"), ("list", "ls"), ("verfy", "verify"), ("mrege", "merge")])
def test_a_mistyped_command_is_answered_with_the_closest(call: Call, typed: str, meant: str) -> None:
    code, out, err = call(typed, "x")
    assert (code, out) == (2, "")
    assert err == f"error: No such command {typed!r}: did you mean {meant!r}?\nhint: statexchange --help\n"
    assert call("xyzzy")[2].startswith("error: No such command 'xyzzy'\n")


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("layer.0.up.weight", "layers.2.up.weight"),
        ("layers.*.upp.weight", "layers.2.up.weight"),
        ("model.layers.1.down.weight", "layers.2.down.weight"),
        ("*.wieght", ".weight"),
        ("nrom*", "norm.weight"),
    ],
)
def test_a_pattern_that_matches_nothing_is_answered_with_the_closest_names(
    call: Call, made: Path, tmp_path: Path, pattern: str, meant: str
) -> None:
    whole = made / "whole"
    for command in (["ls", whole], ["merge", whole, tmp_path / "out"], ["diff", whole, made / "other"]):
        code, out, err = call(*command, "--include", pattern)
        assert (code, out) == (2, "")
        assert err.startswith(f"error: include pattern {pattern!r} matches no tensor: did you mean '")
        assert meant in err


def test_patterns_that_may_match_nothing_are_warned_of(call: Call, made: Path, tmp_path: Path) -> None:
    patterns = ["--exclude", "norms.*", "--rename", r"^layer\.=model.layers."]
    for command in (["merge", made / "whole", tmp_path / "out", "--dry-run"], ["diff", made / "whole", made / "other"]):
        err = call(*command, *patterns)[2]
        assert "exclude pattern 'norms.*' matches no tensor: did you mean 'norm.weight'" in err
        assert r"rename pattern '^layer\\.' matches no tensor: did you mean 'layers." in err
    fitting = ["--exclude", "norm.*", "--rename", r"^layers\.=a.", "--rename", r"^a\.=b."]
    assert "matches no tensor" not in call("merge", made / "whole", tmp_path / "out", "--dry-run", *fitting)[2]


def test_the_closest_of_many_and_of_long_names_are_found() -> None:
    names = [f"model.layers.{n}.{'x' * 500}.{n % 7}.{chr(97 + n % 26)}" for n in range(100_000)]
    assert "did you mean" in did_you_mean("model.layer.0." + "x" * 500 + ".0.a", names)
    assert did_you_mean("", names) == did_you_mean("*", names) == did_you_mean("a", []) == ""


@pytest.mark.parametrize("dtype", ["BF16", "bf16", "bfloat16", "torch.bfloat16", "BFloat16"])
def test_a_dtype_has_all_its_names(call: Call, made: Path, tmp_path: Path, dtype: str) -> None:
    for text in (dtype, f"layers.*={dtype}"):
        code, envelope = call.json("merge", made / "whole", tmp_path / "out", "--dry-run", "--dtype", text)
        dtypes = {tensor["name"]: tensor["dtype"] for tensor in envelope["data"]["tensors"]}
        assert (code, dtypes["layers.0.up.weight"]) == (0, "BF16")
    report = sx.merge_checkpoint(made / "whole", tmp_path / "api", dtype=dtype)
    assert sx.open_checkpoint(report.path)["norm.weight"].dtype == "BF16"
