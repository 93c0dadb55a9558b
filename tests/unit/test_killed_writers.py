"""Writers of a workspace are killed at every call that looks at or changes a name, and nothing is lost or left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import statexchange as sx
from statexchange.storage.workspace import Manifest, Workspace

WRITER = """
import json, os, signal, sys
import numpy as np
import statexchange as sx

trip, path, value, kill_at = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
state = {f"t{i}": np.full((6, 4), value, np.float32) for i in range(3)}
import statexchange.exchange.save, statexchange.exchange.nfs_workspace
calls = []

def hook(event, args):
    if event == "statexchange.storage":
        calls.append(args[0])
        if len(calls) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(hook)
if trip == "save":
    sx.save_checkpoint({"model": state, "step": int(value)}, path)
else:
    workspace = sx.NFSWorkspace(path, run="r")
    workspace.write_configs_and_weights({"k": value}, state)
print(json.dumps(calls))
"""


def write(trip: str, path: Path, value: float, kill_at: int = 0) -> list[str] | None:
    """The calls that a writer made; None if it was killed."""
    command = [sys.executable, "-c", WRITER, trip, str(path), str(value), str(kill_at)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode == -signal.SIGKILL:
        return None
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def value_of(trip: str, path: Path) -> float:
    weights = {f"t{i}": np.zeros((6, 4), np.float32) for i in range(3)}
    if trip == "save":
        state = {"model": weights, "step": -1}
        sx.load_checkpoint(state, path)
        found = float(state["step"])
    else:
        config, weights = sx.NFSWorkspace(path, run="r").read_configs_and_weights_from_rank(0)
        found = config["k"]
    assert {float(v) for a in weights.values() for v in np.unique(a)} == {found}
    return found


def points(trip: str, path: Path) -> list[int]:
    """The numbers of all calls of a writer that finds two earlier rounds."""
    for value in (1.0, 2.0):
        write(trip, path, value)
    calls = write(trip, path, 3.0)
    assert calls is not None
    assert {"create", "link", "unlink", "sync"} <= set(calls)
    print(f"{trip}: {len(calls)} calls")
    return list(range(1, len(calls) + 1))


def manifests_of(workspace: Workspace) -> list[Manifest]:
    """The manifests of all committed rounds, oldest first."""
    with workspace.view() as view:
        return view.manifests(view.places())


def killed_at(trip: str, number: int, path: Path) -> None:
    write(trip, path, 1.0)
    if write(trip, path, 2.0, kill_at=number) is not None:
        return  # a first round has fewer calls
    assert value_of(trip, path) in (1.0, 2.0), number
    write(trip, path, 3.0)  # no clean-up by hand
    assert value_of(trip, path) == 3.0, number
    write(trip, path, 4.0)
    hidden = [p.name for p in path.rglob("*") if p.name.startswith(".")]
    assert hidden == [], number
    if trip == "save":  # what was never committed is gone, and so is what was half dropped
        committed = {receipt.relative for manifest in manifests_of(Workspace(path)) for receipt in manifest.receipts}
        files = {os.path.relpath(p, path) for p in path.rglob("*.safetensors")}
        assert files == committed, number


@pytest.mark.parametrize("trip", ["save", "write"])
def test_killed_at_a_few_calls(trip: str, tmp_path: Path) -> None:
    every = points(trip, tmp_path / "trace")
    for number in every[3 :: max(1, len(every) // 6)]:
        killed_at(trip, number, tmp_path / str(number))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("trip", ["save", "write"])
def test_killed_at_every_call(trip: str, tmp_path: Path) -> None:
    for number in points(trip, tmp_path / "trace"):
        killed_at(trip, number, tmp_path / str(number))
