"""Command lines of `statexchange`, in the process of a test or in one of their own, without a launcher's variables."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import statexchange
from statexchange.cli.main import main
from statexchange.cli.output import EXIT_CODES

__all__ = ["LAUNCHER_VARIABLES", "CommandLine", "command_environment", "exit_code_of", "run_main"]

# By these variables a command takes itself for a rank of a job, or writes no colours on a terminal.
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "NO_COLOR")


def command_environment(**more: str) -> dict[str, str]:
    """Return the environment for a command in a process of its own: it finds the package, and is no rank of a job."""
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    return {**kept, "PYTHONPATH": os.fspath(Path(statexchange.__file__).parents[1]), **more}


def exit_code_of(*arguments: object) -> int:
    """Run a command line of `statexchange` in this process; return its exit code."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def run_main(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run a command line of `statexchange` in this process; return its exit code, stdout and stderr."""
    code = exit_code_of(*arguments)
    return code, *capsys.readouterr()


class CommandLine:
    """Runs command lines of `statexchange` in this process. The fixture `call`."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        """Return the exit code, stdout and stderr."""
        return run_main(self._capsys, *arguments)

    def json(self, *arguments: object, stderr: str | None = None) -> tuple[int, Any]:
        """Run a command line with --json; return the exit code and the envelope, which must have its usual keys.

        With `stderr`, exactly that must be written there.
        """
        code, out, err = self(*arguments, "--json")
        assert stderr in (None, err)
        envelope = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert envelope["schema"] == 1
        assert envelope["ok"] == (code == 0)
        assert EXIT_CODES[envelope["code"]] == code
        assert envelope.keys() >= {"data", "warnings"}
        if code == 0:
            assert "error" not in envelope
        elif code != EXIT_CODES["FINDINGS"] and not isinstance(envelope["data"], list):  # of several PATHs each has one
            assert envelope["error"]["code"] == envelope["code"]
        return code, envelope
