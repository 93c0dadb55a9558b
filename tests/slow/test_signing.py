"""docs/how-to/signing.md: model_signing, in an environment of its own, signs an export and finds a changed file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from environments import install, new_environment, run_outside
from scripts import page_block, run_commands, run_script

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_an_export_is_signed_and_a_changed_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = new_environment(tmp_path / "venv")
    install(programs, *page_block("commands: install model_signing").removeprefix("$ pip install ").split())
    run_outside(programs / "model_signing", "--help", folder=tmp_path)  # writes the bytecode of what it imports
    run_script(["python"], "to_sign.py", page_block("block: to_sign.py"), tmp_path, is_warm=False)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    run_commands(page_block("commands: sign"), tmp_path, is_warm=False)
