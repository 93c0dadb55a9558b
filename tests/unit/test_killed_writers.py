"""Writers of a workspace are killed at every call that reads or changes a directory; nothing is lost or left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import statexchange as sx
from statexchange.storage.workspace import Manifest, Workspace

WRITER = """
import json, os, signal, sys
import numpy as np
import statexchange as sx
import statexchange.exchange.save, statexchange.exchange.nfs_workspace

def write(trip, path, value, kill_at):
    state = {f"t{i}": np.full((6, 4), value, np.float32) for i in range(3)}
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
    return calls

for line in sys.stdin:  # each writer is a process of its own, which starts sooner as a fork of this one
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            calls = write(*json.loads(line))
            os.write(writer, json.dumps(calls).encode())
            os._exit(0)
        finally:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    os.close(writer)
    with open(reader, "rb") as pipe:
        printed = pipe.read().decode()
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), printed]), flush=True)
"""


@pytest.fixture(scope="module")
def writers() -> Iterator[Writers]:
    command = [sys.executable, "-c", WRITER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Writers(process)
        assert process.stdin is not None
        process.stdin.close()


class Writers:
    """Starts writers, one after another."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def write(self, trip: str, path: Path, value: float, kill_at: int = 0) -> list[str] | None:
        """Run a writer; return its calls, or None if it was killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([trip, str(path), value, kill_at]), file=self._process.stdin, flush=True)
        code, printed = json.loads(self._process.stdout.readline())
        if code == -signal.SIGKILL:
            return None
        assert code == 0
        return list(json.loads(printed))


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


def points(writers: Writers, trip: str, path: Path) -> list[int]:
    """The numbers of all calls of a writer that finds two earlier rounds."""
    for value in (1.0, 2.0):
        writers.write(trip, path, value)
    calls = writers.write(trip, path, 3.0)
    assert calls is not None
    assert {"create", "link", "unlink", "sync"} <= set(calls)
    print(f"{trip}: {len(calls)} calls")
    return list(range(1, len(calls) + 1))


def manifests_of(workspace: Workspace) -> list[Manifest]:
    """The manifests of all committed rounds, oldest first."""
    with workspace.view() as view:
        return view.manifests(view.all_rounds())


def killed_at(writers: Writers, trip: str, number: int, path: Path) -> None:
    writers.write(trip, path, 1.0)
    if writers.write(trip, path, 2.0, kill_at=number) is not None:
        return  # the first round makes fewer calls
    assert value_of(trip, path) in (1.0, 2.0), number
    writers.write(trip, path, 3.0)  # without a clean-up in between
    assert value_of(trip, path) == 3.0, number
    writers.write(trip, path, 4.0)
    hidden = [p.name for p in path.rglob("*") if p.name.startswith(".")]
    assert hidden == [], number
    if trip == "save":  # uncommitted files are gone, and half removed rounds, too
        committed = {receipt.relative for manifest in manifests_of(Workspace(path)) for receipt in manifest.receipts}
        files = {os.path.relpath(p, path) for p in path.rglob("*.safetensors")}
        assert files == committed, number


@pytest.mark.parametrize("trip", ["save", "write"])
def test_killed_at_a_few_calls(writers: Writers, trip: str, tmp_path: Path) -> None:
    every = points(writers, trip, tmp_path / "trace")
    for number in every[3 :: max(1, len(every) // 6)]:
        killed_at(writers, trip, number, tmp_path / str(number))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("trip", ["save", "write"])
def test_killed_at_every_call(writers: Writers, trip: str, tmp_path: Path) -> None:
    for number in points(writers, trip, tmp_path / "trace"):
        killed_at(writers, trip, number, tmp_path / str(number))
