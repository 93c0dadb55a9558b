"""Directories of a job's saves for tests of commands."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from commands import command_environment
from warm_python import warm_python

import statexchange as sx
from statexchange.testing import run_ranks

STEPS = (100, 200, 300, 400)
LOSSES = {100: 0.5, 200: 0.125, 300: float("nan"), 400: 0.25}


def save_steps(path: Path) -> None:
    """Save four steps on two ranks; each holds a half of one tensor and all of another."""

    def rank_main() -> None:
        saves = sx.Checkpoints(path, keep=None, layout={"w": {"dim": 0}})
        for step in STEPS:
            state = {"w": np.full((2, 4), step, np.float32), "b": np.zeros(4, np.float32)}
            saves.save(state, step, metrics={"loss": LOSSES[step]})

    run_ranks(rank_main, 2)


def folder(saved: Path, step: int) -> Path:
    return saved / f"step-{step:09d}"


def rank_file(saved: Path, step: int, rank: int) -> Path:
    return folder(saved, step) / f"rank-{rank:05d}-of-00002.safetensors"


def manifest(saved: Path, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder(saved, step) / "save.json").read_text())
    return found


def size_of(saved: Path, step: int) -> int:
    return sum(size for _, size in manifest(saved, step)["files"])


def all_bytes(saved: Path) -> int:
    return sum(size_of(saved, step) for step in STEPS)


def local_time(saved: Path, step: int) -> str:
    return datetime.fromtimestamp(manifest(saved, step)["created"]).isoformat(timespec="seconds")


def hidden_in(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir() if p.name.startswith("."))


# Processes that stop in the middle of a save or a removal

PAUSED = """
import os, sys, time
import numpy as np
import statexchange as sx

path, step, doing, event, ending = sys.argv[1:]

def pause(name, arguments):
    if name == "statexchange.storage" and arguments[0] == event and str(arguments[1]).endswith(ending):
        print(os.getpid(), flush=True)
        time.sleep(600)

saves = sx.Checkpoints(path, keep=None)
sys.addaudithook(pause)
if doing == "save":
    saves.save({"w": np.zeros(100)}, int(step), overwrite=True)
else:
    saves.delete(int(step))
"""


class Paused:
    """A process that has stopped in the middle of saving or removing a step."""

    def __init__(self, saved: Path, step: int, doing: str) -> None:
        event, ending = ("create", "save.json") if doing == "save" else ("unlink", "save.json")
        command = [warm_python("commands"), "-c", PAUSED, os.fspath(saved), str(step), doing, event, ending]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=command_environment(), cwd=saved.parent
        )
        assert self.process.stdout is not None
        self.pid = int(self.process.stdout.readline())  # the process itself is a fork

    def kill(self) -> None:
        if self.process.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def pausing(saved: Path) -> Iterator[Callable[[int, str], Paused]]:
    """Yield a function that starts a paused process; kill all of them in the end."""
    started: list[Paused] = []

    def start(step: int, doing: str) -> Paused:
        started.append(Paused(saved, step, doing))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        assert one.process.stdout is not None
        one.process.stdout.close()


def move_owner_to_another_host(saved: Path) -> None:
    """Make the unfinished save look as if a process of another host were writing it."""
    (record,) = (saved / name for name in hidden_in(saved) if name.endswith(".owner"))
    owner = json.loads(os.readlink(record))
    record.unlink()
    record.symlink_to(json.dumps({**owner, "host": "node7", "boot": "0" * 36}))


def remove_file(saved: Path) -> None:
    rank_file(saved, 200, 1).unlink()


def remove_all_files(saved: Path) -> None:
    for rank in range(2):
        rank_file(saved, 200, rank).unlink()


def truncate_file(saved: Path) -> None:
    os.truncate(rank_file(saved, 200, 0), 500)


def lengthen_file(saved: Path) -> None:
    os.truncate(rank_file(saved, 200, 0), 5000)


def break_header(saved: Path) -> None:
    with rank_file(saved, 200, 1).open("r+b") as file:
        file.write(b"garbage.")


def take_file_of_another_save(saved: Path) -> None:
    shutil.copyfile(rank_file(saved, 100, 1), rank_file(saved, 200, 1))


def truncate_and_remove(saved: Path) -> None:
    truncate_file(saved)
    remove_file(saved)


def break_manifest(saved: Path) -> None:
    path = folder(saved, 200) / "save.json"
    path.write_text(path.read_text().replace("0.125", "0.126"))


def empty_manifest(saved: Path) -> None:
    (folder(saved, 200) / "save.json").write_text("")


def remove_manifest(saved: Path) -> None:
    (folder(saved, 200) / "save.json").unlink()


DAMAGES = {
    remove_file: ("rank 1 lacks a file", "INCOMPLETE"),
    remove_all_files: ("ranks 0-1 lack files", "INCOMPLETE"),
    truncate_file: ("rank 0 is truncated", "CORRUPT"),
    lengthen_file: ("rank 0 is longer than listed", "CORRUPT"),
    break_header: ("rank 1 has a broken header", "CORRUPT"),
    take_file_of_another_save: ("rank 1 has a broken header", "CORRUPT"),
    truncate_and_remove: ("rank 0 is truncated; rank 1 lacks a file", "CORRUPT"),
    break_manifest: ("broken manifest", "CORRUPT"),
    empty_manifest: ("broken manifest", "CORRUPT"),
    remove_manifest: ("no save.json", "INCOMPLETE"),
}
