"""Saves with a copy in shared memory."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

import torch
from starting import start

import statexchange as sx
from statexchange.comm import bootstrap
from statexchange.storage import memory_directory
from statexchange.testing import run_ranks

BASE = Path(f"/dev/shm/statexchange-{os.getuid()}")
ROWS = 12
LAYOUT = {"w": {"dim": 0}}


def copies_of(saves: Path) -> list[Path]:
    """Return the directories in shared memory of one directory of saves."""
    found = []
    for record in BASE.glob("copy-*/copy.json"):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # of another test that runs meanwhile
            if os.path.dirname(json.loads(record.read_text())["path"]) == str(saves):
                found.append(record.parent)
    return found


def origin_of(copy: Path) -> str:
    """Return the name of the save of which this is a copy."""
    return os.path.basename(json.loads((copy / "copy.json").read_text())["path"])


def rows_of(value: float) -> torch.Tensor:
    """Return this rank's rows of a tensor whose row r is filled with value + r."""
    rank, size = sx.get_rank(), sx.get_world_size()
    return (
        torch.full((ROWS // size, 1000), value)
        + torch.arange(rank * (ROWS // size), (rank + 1) * (ROWS // size))[:, None]
    )


def save(path: str, *steps: int, memory: bool = True, overwrite: bool = False, background: bool = False) -> None:
    checkpoints = sx.Checkpoints(path, memory=memory, layout=LAYOUT)
    for step in steps:
        state = {"w": rows_of(100.0 * step), "step": step}
        done: Any = checkpoints.save(state, step, overwrite=overwrite, background=background)
        if background:
            done.result()
    checkpoints.close()


def load(path: str, step: int | None = None) -> list[Any]:
    """Load; return the step, "memory" if a file was read there or "disk", and whether the values are of this step."""
    state = {"w": torch.full_like(rows_of(0.0), -1), "step": -1}
    report = sx.Checkpoints(path, memory=True, layout=LAYOUT).load(state, step)
    if report is None:
        return [None, "nowhere", True]
    right = torch.equal(state["w"], rows_of(100.0 * state["step"]))
    where = "memory" if report.num_in_memory else "disk"
    return [state["step"], where, right and report.step == state["step"]]


def load_alone(path: Path, step: int | None = None) -> list[Any]:
    return run_ranks(load, 1, args=(str(path), step))[0]


def start_rank(backend: str, directory: str, hosts: str | None = None) -> None:
    """Start as a rank of a backend; in a hierarchical world copies, too, are made as if on several hosts."""
    start(backend, directory, hosts)
    memory_directory.host_identity = bootstrap.host_identity


# Several hosts, which share one /dev/shm here


def saves_on_hosts(directory: str, path: str, hosts: str, *steps: int) -> None:
    start_rank("hierarchical", directory, hosts)
    save(path, *steps)


def run_on_hosts(function: Any, hosts: str, saves: Path, *args: Any) -> list[Any]:
    store = saves.with_name(f"store-{secrets.token_hex(4)}")
    store.mkdir()
    given = (str(store), str(saves), hosts, *args)
    return run_ranks(function, len(hosts), backend="processes", args=given, timeout_s=120)


def host_of(copy: Path) -> str:
    return str(json.loads((copy / "copy.json").read_text())["host"])


def lose_host(saves: Path, host: str) -> None:
    (lost,) = [copy for copy in copies_of(saves) if host_of(copy) == host]
    shutil.rmtree(lost)


def loads_without_room(directory: str, path: str, hosts: str) -> list[Any]:
    start_rank("hierarchical", directory, hosts)
    memory_directory.memory_left = lambda: (0, "in this test")
    return load(path)


# Copies that are not loaded


def copy_of(saves: Path) -> Path:
    (copy,) = copies_of(saves)
    return copy
