"""Checkpoints and workspaces that version 0.1 wrote (tests/data/version-0.1, as it left them) are read."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from stored import DATA

import statexchange as sx
from statexchange.report.verify import verify


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Return a copy, since git keeps neither the modes of directories nor their write protection against others."""
    copy = tmp_path / "version-0.1"
    shutil.copytree(DATA / "version-0.1", copy)
    for path in [copy, *copy.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)
    return copy


@pytest.mark.parametrize("name", ["published", "split"])
def test_a_published_checkpoint_of_version_0_1_is_read_and_replaced(name: str, written: Path, tmp_path: Path) -> None:
    assert verify(written / name).findings == ()
    with sx.open_checkpoint(written / name) as checkpoint:
        assert checkpoint["a"].read().tolist() == [[0, 1, 2], [3, 4, 5]]
        assert checkpoint["b"].read().tolist() == [1, 1]
    sx.merge_checkpoint(written / name, tmp_path / "merged")
    sx.export_checkpoint({"c": np.ones(2)}, written / name, overwrite=True)
    assert list(sx.open_checkpoint(written / name)) == ["c"]


def test_a_save_of_version_0_1_is_read_and_never_replaced(written: Path, tmp_path: Path) -> None:
    """It has a workspace of rounds: read, and never replaced, since other jobs may have rounds in it."""
    state = {"model": {"a": np.zeros(6, np.float32)}, "step": -1}
    sx.load_checkpoint(state, written / "saved")
    assert (state["model"]["a"].tolist(), state["step"]) == ([0, 1, 2, 3, 4, 5], 7)
    assert verify(written / "saved").findings == ()
    with pytest.raises(sx.errors.InvalidArgumentError, match="load_checkpoint reads it"):
        sx.NFSWorkspace(written / "saved").read_configs_and_weights_from_rank(0)
    before = sorted((written / "saved").rglob("*"))
    for overwrite, kind in ((False, sx.errors.TargetExistsError), (True, sx.errors.UnsafeError)):
        with pytest.raises(kind):
            sx.save_checkpoint({**state, "step": 8}, written / "saved", overwrite=overwrite)
    assert sorted((written / "saved").rglob("*")) == before
    sx.save_checkpoint({**state, "step": 8}, tmp_path / "next")
    sx.load_checkpoint(state, tmp_path / "next")
    assert state["step"] == 8


def test_a_ranks_file_of_version_0_1_is_read_and_its_workspace_written_again(written: Path) -> None:
    workspace = sx.NFSWorkspace(written / "ws", run="r")
    config, weights = workspace.read_configs_and_weights_from_rank(0)
    assert (config, weights["w"].tolist()) == ({"k": 1}, [0, 1, 2])
    workspace.write_configs_and_weights({"k": 2}, {"w": np.ones(1)})
    assert workspace.read_configs_and_weights_from_rank(0)[0] == {"k": 2}
