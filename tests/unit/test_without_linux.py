"""The offline part without what only Linux has, as on macOS: `tests/support/without_linux.py` takes that away."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import command_environment

SUPPORT = Path(__file__).parents[1] / "support"

# A job of one rank without torch, and then the commands on what it leaves: each line that is printed is an outcome.
SCRIPT = """
import contextlib, io, json, os, shlex, sys
import numpy as np
import statexchange as sx
from statexchange.cli.main import main
from statexchange.processes import usable_cores

assert usable_cores() > 0
state = {f"layers.{n}.weight": np.full((4, 3), n, np.float32) for n in range(3)}
sx.export_checkpoint(state, "model")
sx.export_checkpoint({**state, "layers.2.weight": np.ones((4, 3), np.float32)}, "trained")
sx.export_checkpoint(state, "trained", overwrite=True)
os.mkdir("plain")
os.link("model/model.safetensors", "plain/model.safetensors")
with sx.Checkpoints("saves") as saves:
    for step in range(3):
        saves.save({"model": state, "step": step}, step)
loaded = {"model": {name: np.zeros_like(value) for name, value in state.items()}, "step": 0}
sx.load_checkpoint(loaded, "saves/step-000000002")
print(json.dumps(["loaded", loaded["step"], [float(value.sum()) for value in loaded["model"].values()]]))
for line in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            main(shlex.split(line))
        except SystemExit as ended:
            code = ended.code
    print(json.dumps([line, code, json.loads(out.getvalue())]))
"""

LINES = (
    "info model saves plain --json",
    "ls model --json",
    "show model layers.1.weight --json",
    "scan . --json",
    "diff model trained --json",
    "verify model trained saves --json",
    "verify plain --values --json",
    "merge saves/step-000000001 merged --json",
    "merge model merged --overwrite --threads 2 --json",
    "seal plain --json",
    "verify plain merged --json",
    "prune saves --keep 1 --json",
    "info absent --json",
)
VARY = ("seconds", "bytes_per_s", "job", "created", "modified")


def run(directory: Path, *program: str) -> list[Any]:
    """Run the script in a new directory; return its outcomes without what differs from one run to the next."""
    directory.mkdir()
    script = directory / "script.py"
    script.write_text(SCRIPT)
    environment = {**command_environment(), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *program, os.fspath(script), *LINES],
        cwd=directory, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [steady(json.loads(line)) for line in done.stdout.replace(os.fspath(directory), "DIRECTORY").splitlines()]


def steady(value: Any) -> Any:
    """Return a JSON value without times, speeds and the name of the run."""
    if isinstance(value, dict):
        return {key: steady(inner) for key, inner in value.items() if key not in VARY}
    return [steady(inner) for inner in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[Any]]:
    root = tmp_path_factory.mktemp("outcomes")
    return run(root / "linux"), run(root / "without", os.fspath(SUPPORT / "without_linux.py"))


def test_every_command_ends_as_on_linux(outcomes: tuple[list[Any], list[Any]]) -> None:
    with_linux, without = outcomes
    assert [outcome[:2] for outcome in without[1:]] == [[line, 3 if "absent" in line else 0] for line in LINES]
    assert without == with_linux


def test_what_only_linux_has_is_gone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, ctypes\n"
        "print(sys.platform, hasattr(os, 'sched_getaffinity'), hasattr(ctypes.CDLL(None), 'renameat2'),\n"
        "      os.path.exists('/proc/self/stat'), os.path.exists('/dev/shm'), os.path.exists('/'))\n"
    )
    done = subprocess.run(
        [sys.executable, os.fspath(SUPPORT / "without_linux.py"), os.fspath(script)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["darwin", "False", "False", "False", "False", "True"]
