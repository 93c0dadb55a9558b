"""The sources that the `shared` command lines of `command_lines.py` read."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from stored import flip_bit

import statexchange as sx


def make_sources(root: Path) -> None:
    """Write checkpoints: one that is whole, one of other names, one with a flipped bit, and saves."""
    state = {f"layers.{n}.{part}.weight": np.full((4, 3), n, np.float32) for n in range(3) for part in ("up", "down")}
    sx.export_checkpoint({**state, "norm.weight": np.ones(3, np.float32)}, root / "whole")
    sx.export_checkpoint({"other.weight": np.ones(2, np.float32)}, root / "other")
    sx.export_checkpoint(state, root / "flipped")
    (root / "bare").mkdir()
    shutil.copy(root / "whole/model.safetensors", root / "bare")
    saves = sx.Checkpoints(root / "saves", keep=None)
    for step in (1, 2):
        saves.save({"w": np.ones(3, np.float32)}, step)
    flip_bit(root / "flipped" / "model.safetensors", -1)
