"""Habits of the command line that all commands share: several PATHs, quiet and verbose, interrupts, closed streams."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import statexchange as sx
from statexchange.cli.main import main

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
