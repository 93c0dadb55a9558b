"""diff names --rename where each side has names that the other lacks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from commands import CommandLine

import statexchange as sx


def test_names_of_both_sides_alone_name_the_option(tmp_path: Path, call: CommandLine) -> None:
    for name in ("model.up", "up"):
        sx.export_checkpoint({name: np.ones(2, np.float32)}, tmp_path / name)
    code, _, err = call("diff", tmp_path / "model.up", tmp_path / "up")
    assert code == 1
    assert "note: --rename REGEX=REPL gives tensors of A the names of tensors of B" in err
    assert call("diff", tmp_path / "model.up", tmp_path / "up", "--rename", r"^model\.=")[::2] == (0, "")
