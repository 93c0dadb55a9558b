"""The copy of a job's newest save in shared memory: a restart loads it, or the disk's save, and never a mix."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_jobs import ForkedJobs
from starting import LAUNCHED_AS, start
from stored import flip_bit
from sweeps import EVERY, slow, some
from warm_python import warm_python

import statexchange as sx
from statexchange.comm import bootstrap
from statexchange.storage import memory_directory
from statexchange.storage.steps import identity_of_saves
from statexchange.testing import run_ranks

BASE = Path(f"/dev/shm/statexchange-{os.getuid()}")
ROWS = 12
LAYOUT = {"w": {"dim": 0}}


def copies_of(saves: Path) -> list[Path]:
    """Return the directories in shared memory of one directory of saves."""
    found = []
    for record in BASE.glob("saves-*/target.json"):
        if json.loads(record.read_text())["path"] == str(saves):
            found.append(record.parent)
    return found


@pytest.fixture
def saves(tmp_path: Path) -> Iterator[Path]:
    """Yield a directory of saves, whose copies in memory are removed afterwards."""
    path = tmp_path / "saves"
    yield path
    for copy in copies_of(path):
        shutil.rmtree(copy)


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
    """Load; return the step, "memory" or "disk" where it was, and whether all values are those of this step."""
    state = {"w": torch.full_like(rows_of(0.0), -1), "step": -1}
    report = sx.Checkpoints(path, memory=True, layout=LAYOUT).load(state, step)
    if report is None:
        return [None, "nowhere", True]
    right = torch.equal(state["w"], rows_of(100.0 * state["step"]))
    where = "memory" if report.path.startswith("/dev/shm/statexchange-") else "disk"
    return [state["step"], where, right and report.step == state["step"]]


def with_memory_on_rank_0(path: str, call: str) -> str:
    saves = sx.Checkpoints(path, memory=sx.get_rank() == 0, layout=LAYOUT, stall_timeout_s=20.0)
    state = {"w": rows_of(1.0), "step": 1}
    calls: dict[str, Any] = {
        "save": lambda: saves.save(state, 2),
        "save in the background": lambda: saves.save(state, 2, background=True).result(),
        "load": lambda: saves.load(state),
        "delete": lambda: saves.delete(1),
    }
    with pytest.raises(sx.errors.StateExchangeError) as caught:
        calls[call]()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("backend", ["threads", slow("gloo")])
@pytest.mark.parametrize("is_there", [False, True], ids=["absent", "there"])
@pytest.mark.parametrize("call", ["save", "save in the background", "load", "delete"])
def test_ranks_that_differ_in_memory_get_an_error(call: str, is_there: bool, backend: str, saves: Path) -> None:
    if is_there:
        run_ranks(save, 2, args=(str(saves), 1))
    given = (str(saves), call)
    for text in run_ranks(with_memory_on_rank_0, 2, backend=backend, args=given, timeout_s=30):
        assert "memory" in text
    assert sx.Checkpoints(saves).steps() == [1] * is_there


def load_alone(path: Path, step: int | None = None) -> list[Any]:
    return run_ranks(load, 1, args=(str(path), step))[0]


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_any_number_of_ranks_loads_what_another_has_saved(before: int, after: int, saves: Path) -> None:
    run_ranks(save, before, args=(str(saves), 1, 2))
    assert run_ranks(load, after, args=(str(saves),)) == [[2, "memory", True]] * after
    assert [copy.name for one in copies_of(saves) for copy in one.glob("step-*")] == ["step-000000002"]


def test_a_copy_is_loaded_after_the_disk_has_lost_the_save(saves: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_ranks(save, 2, args=(str(saves), 1, 2))
    shutil.rmtree(saves / "step-000000002")
    assert run_ranks(load, 3, args=(str(saves),)) == [[2, "memory", True]] * 3
    assert "step 2 is loaded from memory, as the disk does not have it any more; delete(2) removes it" in caplog.text
    assert load_alone(saves, 1) == [1, "disk", True]
    shutil.rmtree(saves / "step-000000001")
    assert load_alone(saves) == [2, "memory", True]
    run_ranks(lambda: sx.Checkpoints(saves, memory=True).delete(2), 2)
    assert copies_of(saves) == []
    assert load_alone(saves) == [None, "nowhere", True]
    with pytest.raises(FileNotFoundError, match="step 2"):
        sx.Checkpoints(saves, memory=True).delete(2)


def start_rank(backend: str, directory: str, hosts: str | None = None) -> None:
    """Start as a rank of a backend; in a hierarchical world copies, too, are made as if on several hosts."""
    start(backend, directory, hosts)
    memory_directory.host_identity = bootstrap.host_identity


def saves_on(backend: str, directory: str, path: str, *steps: int) -> None:
    start_rank(backend, directory)
    save(path, *steps)


def loads_on(backend: str, directory: str, path: str) -> list[Any]:
    start_rank(backend, directory)
    return load(path)


def run_on(function: Any, backend: str, world_size: int, saves: Path, *args: Any) -> list[Any]:
    store = saves.with_name(f"store-{secrets.token_hex(4)}")
    store.mkdir()
    given = (backend, str(store), str(saves), *args)
    return run_ranks(function, world_size, backend=LAUNCHED_AS[backend], args=given, timeout_s=120)


def test_processes_of_another_launcher_load_the_copy(saves: Path) -> None:
    run_on(saves_on, "shm", 2, saves, 5)
    assert run_on(loads_on, "mpi", 3, saves) == [[5, "memory", True]] * 3


@pytest.mark.slow
def test_processes_of_every_launcher_load_the_copy(saves: Path) -> None:
    for step, backend in enumerate(("mpi", "gloo", "shm"), 1):
        run_on(saves_on, backend, 2, saves, step)
        for size, other in ((3, "mpi"), (2, "gloo"), (3, "shm")):
            assert run_on(loads_on, other, size, saves) == [[step, "memory", True]] * size


# Several hosts, which share one /dev/shm here


def saves_on_hosts(directory: str, path: str, hosts: str, *steps: int) -> None:
    start_rank("hierarchical", directory, hosts)
    save(path, *steps)


def loads_on_hosts(directory: str, path: str, hosts: str) -> list[Any]:
    start_rank("hierarchical", directory, hosts)
    return load(path)


def run_on_hosts(function: Any, hosts: str, saves: Path, *args: Any) -> list[Any]:
    store = saves.with_name(f"store-{secrets.token_hex(4)}")
    store.mkdir()
    given = (str(store), str(saves), hosts, *args)
    return run_ranks(function, len(hosts), backend="processes", args=given, timeout_s=120)


def ranks_by_host(saves: Path, step: int) -> dict[str, str]:
    """Return by host the ranks whose files it has."""
    found = {}
    for copy in copies_of(saves):
        files = sorted((copy / f"step-{step:09d}").glob("rank-*"))
        found[json.loads((copy / "target.json").read_text())["host"]] = "".join(file.name[9] for file in files)
    return found


def lose_host(saves: Path, host: str) -> None:
    (lost,) = [one for one in copies_of(saves) if json.loads((one / "target.json").read_text())["host"] == host]
    shutil.rmtree(lost)


def test_each_host_keeps_the_files_of_the_one_before_it_and_any_one_may_be_lost(saves: Path) -> None:
    run_on_hosts(saves_on_hosts, "abc", saves, 1, 2)
    assert ranks_by_host(saves, 2) == {"a": "02", "b": "01", "c": "12"}
    assert run_on_hosts(loads_on_hosts, "abc", saves) == [[2, "memory", True]] * 3
    lose_host(saves, "b")
    assert run_on_hosts(loads_on_hosts, "abc", saves) == [[2, "memory", True]] * 3  # a new host of this name
    assert (
        run_on_hosts(loads_on_hosts, "dacc", saves) == [[2, "memory", True]] * 4
    )  # other hosts and another world size
    assert all(not list(copy.glob(".load-*")) for copy in copies_of(saves))
    lose_host(saves, "a")
    assert run_on_hosts(loads_on_hosts, "abc", saves) == [[2, "disk", True]] * 3


def test_a_sweep_of_another_job_leaves_the_directory_that_a_copy_is_being_made_in(tmp_path: Path) -> None:
    sx.Checkpoints(tmp_path, memory=True).save({"w": torch.ones(2)}, 1)
    identity = identity_of_saves(str(tmp_path))
    assert identity is not None
    made, other = (memory_directory.MemoryDirectory(str(path), identity) for path in (tmp_path, tmp_path / "other"))
    ended = threading.Event()

    def sweep() -> None:
        while not ended.is_set():
            other.sweep(None)

    sweeping = threading.Thread(target=sweep)
    sweeping.start()
    try:
        for _ in range(300):
            shutil.rmtree(made.path, ignore_errors=True)  # the sweep may be faster
            path = made.make_loading()
            assert sorted(os.listdir(made.path)) == sorted([os.path.basename(path), "target.json"])
    finally:
        ended.set()
        sweeping.join()
        shutil.rmtree(made.path, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("aab", "abb"), ("abba", "baab"), ("aabc", "cb"), ("abcd", "bbdd")])
def test_hosts_in_any_order_and_number_load_the_copy(before: str, after: str, saves: Path) -> None:
    run_on_hosts(saves_on_hosts, before, saves, 1)
    assert run_on_hosts(loads_on_hosts, after, saves) == [[1, "memory", True]] * len(after)


def test_a_flipped_bit_on_another_host_is_found(saves: Path) -> None:
    run_on_hosts(saves_on_hosts, "aab", saves, 1)
    for copy in copies_of(saves):
        if json.loads((copy / "target.json").read_text())["host"] == "b":
            flip_bit(copy / "step-000000001/rank-00002-of-00003.safetensors", -9)
    lose_host(saves, "a")
    assert run_on_hosts(loads_on_hosts, "bac", saves) == [[1, "disk", True]] * 3


def test_a_save_in_the_background_is_copied_too(saves: Path) -> None:
    run_ranks(saves_in_the_background, 2, args=(str(saves),))
    assert run_ranks(load, 2, args=(str(saves),)) == [[4, "memory", True]] * 2


def saves_in_the_background(path: str) -> None:
    save(path, 3, 4, background=True)


# Copies that are not loaded


def whole_copy(saves: Path, step: int) -> Path:
    (found,) = copies_of(saves)
    return found / f"step-{step:09d}"


@pytest.mark.parametrize("readers", [1, 2, 3])
def test_one_flipped_bit_is_named_and_the_save_on_disk_is_loaded(
    readers: int, saves: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_ranks(save, 2, args=(str(saves), 7))
    name = "rank-00001-of-00002.safetensors"
    flip_bit(whole_copy(saves, 7) / name, -9)
    assert run_ranks(load, readers, args=(str(saves),)) == [[7, "disk", True]] * readers
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "bytes differ from their digest" in warning
    assert "'w'" in warning
    assert name in warning
    assert not whole_copy(saves, 7).exists()  # it is not tried again


@EVERY
def test_any_flipped_bit_is_found(every: int, saves: Path) -> None:
    run_ranks(save, 1, args=(str(saves), 7))
    kept = saves.with_name("kept")
    shutil.copytree(whole_copy(saves, 7), kept)
    for file in sorted(kept.iterdir()):
        size = file.stat().st_size
        header = size - ROWS * 1000 * 4 if file.suffix == ".safetensors" else size
        places = [*range(0, header, 7), *range(header, size, 5000)]
        for at in some(places, 2 * every):
            shutil.rmtree(whole_copy(saves, 7), ignore_errors=True)
            shutil.copytree(kept, whole_copy(saves, 7))
            flip_bit(whole_copy(saves, 7) / file.name, at)
            assert load_alone(saves) == [7, "disk", True], (file.name, at)


def test_without_a_save_on_disk_a_broken_copy_is_an_error_and_changes_nothing(saves: Path) -> None:
    run_ranks(save, 2, args=(str(saves), 7))
    flip_bit(whole_copy(saves, 7) / "rank-00001-of-00002.safetensors", -9)
    shutil.rmtree(saves / "step-000000007")
    state = {"w": torch.zeros(ROWS, 1000), "step": -1}
    with pytest.raises(sx.errors.CorruptError, match="digest") as caught:
        sx.Checkpoints(saves, memory=True).load(state)
    assert caught.value.name == "w"
    assert state["step"] == -1
    assert not state["w"].any()


@pytest.mark.parametrize("lost", ["rank-00000-of-00002.safetensors", "save.json", "headers.json"])
def test_a_copy_that_lacks_a_file_is_not_loaded(lost: str, saves: Path) -> None:
    run_ranks(save, 2, args=(str(saves), 7))
    (whole_copy(saves, 7) / lost).unlink()
    assert run_ranks(load, 2, args=(str(saves),)) == [[7, "disk", True]] * 2


def saves_without_memory(path: str, step: int, overwrite: bool) -> None:
    save(path, step, memory=False, overwrite=overwrite)


def test_a_copy_that_is_older_than_the_save_on_disk_is_not_loaded_and_removed(saves: Path) -> None:
    run_ranks(save, 2, args=(str(saves), 7))
    run_ranks(saves_without_memory, 2, args=(str(saves), 8, False))
    assert run_ranks(load, 2, args=(str(saves),)) == [[8, "disk", True]] * 2
    assert not whole_copy(saves, 7).exists()


def test_a_copy_of_a_save_that_was_overwritten_is_not_loaded(saves: Path) -> None:
    run_ranks(save, 2, args=(str(saves), 7))
    run_ranks(saves_without_memory, 1, args=(str(saves), 7, True))
    assert run_ranks(load, 2, args=(str(saves),)) == [[7, "disk", True]] * 2
    run_ranks(overwrites, 2, args=(str(saves),))
    assert run_ranks(load, 2, args=(str(saves),)) == [[7, "memory", True]] * 2


def overwrites(path: str) -> None:
    save(path, 7, overwrite=True)


def test_a_directory_that_was_made_again_or_copied_has_no_copy(saves: Path) -> None:
    run_ranks(save, 1, args=(str(saves), 7))
    copied = saves.with_name("copied")
    shutil.copytree(saves, copied)
    shutil.rmtree(copied / "step-000000007")
    assert load_alone(copied) == [None, "nowhere", True]
    shutil.rmtree(saves)
    assert load_alone(saves) == [None, "nowhere", True]
    saves.mkdir()
    assert load_alone(saves) == [None, "nowhere", True]
    run_ranks(save, 1, args=(str(saves), 1))
    assert load_alone(saves) == [1, "memory", True]
    assert len(copies_of(saves)) == 1  # that of the old directory is removed


def test_an_older_step_that_is_saved_after_a_newer_one_does_not_replace_its_copy(saves: Path) -> None:
    run_ranks(save, 1, args=(str(saves), 7, 5))
    assert load_alone(saves) == [7, "memory", True]
    assert load_alone(saves, 5) == [5, "disk", True]


def goes_back(path: str, step: int, to: int, memory: bool) -> None:
    """Load the save of a step, and save another one."""
    checkpoints = sx.Checkpoints(path, memory=memory, layout=LAYOUT)
    checkpoints.load({"w": rows_of(0.0), "step": -1}, step)
    checkpoints.save({"w": rows_of(100.0 * to), "step": to}, to)
    checkpoints.close()


def goes_on(path: str, step: int) -> None:
    """Load the newest save, and save another one over that of this step."""
    checkpoints = sx.Checkpoints(path, keep=1, layout=LAYOUT)
    checkpoints.load({"w": rows_of(0.0), "step": -1})
    checkpoints.save({"w": rows_of(100.0 * step), "step": step}, step, overwrite=True)
    checkpoints.close()


@pytest.mark.parametrize("memory", [False, True])
def test_the_copy_of_a_save_that_the_job_left_behind_is_not_loaded(memory: bool, saves: Path) -> None:
    run_ranks(save, 1, args=(str(saves), 5, 9))
    assert load_alone(saves) == [9, "memory", True]
    run_ranks(goes_back, 1, args=(str(saves), 5, 6, memory))
    assert load_alone(saves) == [6, "memory" if memory else "disk", True]
    assert load_alone(saves, 9) == [9, "disk" if memory else "memory", True]
    # Not even when the disk has neither that save any more nor the one that went back.
    for step in (7, 8, 9):
        run_ranks(goes_on, 1, args=(str(saves), step))
    assert load_alone(saves) == [9, "disk", True]


# What jobs leave behind


@pytest.mark.parametrize("text", ["x", "[1]", "{}"])
def test_with_a_broken_identity_the_disk_is_loaded(text: str, saves: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_ranks(save, 1, args=(str(saves), 1))
    (saves / "saves.json").write_text(text)
    assert load_alone(saves) == [1, "disk", True]
    assert re.search(r"copies in memory are not used: .*saves\.json\]; remove this file", caplog.text)
    sx.Checkpoints(saves, memory=True).delete(1)
    assert sx.Checkpoints(saves).steps() == []


def test_a_broken_identity_of_other_saves_and_a_stray_file_are_ignored(saves: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    run_ranks(save, 1, args=(str(other), 1))
    stray = BASE / f"saves-{secrets.token_hex(16)}"
    stray.write_text("no directory")
    try:
        (other / "saves.json").write_text("x")
        run_ranks(save, 1, args=(str(saves), 1))
        assert load_alone(saves) == [1, "memory", True]
    finally:
        stray.unlink()
        for copy in copies_of(other):
            shutil.rmtree(copy)


def test_leftovers_of_jobs_that_are_gone_are_removed(saves: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    run_ranks(save, 2, args=(str(gone), 7))
    run_ranks(save, 2, args=(str(saves), 7))
    (own,) = copies_of(saves)
    ended = subprocess.run([sys.executable, "-c", LEAVES, str(own)], capture_output=True, text=True, check=True)
    left = ended.stdout.split()
    assert all((own / name).exists() for name in left)
    shutil.rmtree(gone)
    assert load_alone(saves) == [7, "memory", True]
    assert copies_of(gone) == []
    assert sorted(path.name for path in own.iterdir()) == ["step-000000007", "target.json"]


LEAVES = """
import os, sys
from statexchange.processes import Owner
from statexchange.storage.publish.directory_build import DirectoryBuild
own = sys.argv[1]
loading = f".load-{'0' * 16}.{Owner.current().to_name()}"
os.makedirs(f"{own}/{loading}")
open(f"{own}/{loading}/rank-00000-of-00001.safetensors", "w").close()
build = DirectoryBuild(f"{own}/step-000000009", "0" * 32, check=None, reuse=False, resume=False)
print(loading, os.path.basename(build.building_path))
sys.stdout.flush()
os._exit(0)
"""


# Kills

JOBS = """
from statexchange.testing import run_ranks
from test_memory_copy import save

def job(path, ranks, step):
    run_ranks(save, ranks, args=(path, step), timeout_s=60)

serve(job, lambda path: not path.startswith("/dev/shm/") or "saves-" in path)
"""


@pytest.fixture(scope="module")
def jobs() -> Iterator[ForkedJobs]:
    with ForkedJobs(JOBS) as started:
        yield started


@pytest.mark.parametrize("every", [30, slow(5), pytest.param(1, marks=pytest.mark.long)], ids=["some", "more", "all"])
@pytest.mark.timeout(3600)
def test_a_job_that_is_killed_at_any_call_goes_on_from_its_newest_save(
    every: int, jobs: ForkedJobs, tmp_path: Path
) -> None:
    number = 0
    where = set()
    try:
        traces = [str(tmp_path / name) for name in ("trace", "trace 2", "trace 3")]
        for trace in traces:
            jobs.run(trace, 2, 1)
        calls = jobs.fewest_calls(*((trace, 2, 2) for trace in traces))
        print(f"{len(calls)} calls")
        for number in some(range(1, len(calls) + 1), every):
            path = tmp_path / str(number)
            jobs.run(str(path), 2, 1)
            if jobs.run(str(path), 2, 2, kill_at=number) is not None:  # the ranks made fewer calls than those counted
                assert number > len(calls) - 10, number
                continue
            newest = max(int(found.name[5:]) for found in path.glob("step-*"))
            found = run_ranks(load, 3, args=(str(path),))
            assert [one[0] for one in found] == [newest] * 3, number
            assert all(one[2] for one in found), number
            where.add((newest, found[0][1]))
            jobs.run(str(path), 2, 3)  # no clean-up by hand
            assert load_alone(path) == [3, "memory", True], number
            (copy,) = copies_of(path)
            assert sorted(entry.name for entry in copy.iterdir()) == ["step-000000003", "target.json"], number
    finally:
        for path in tmp_path.iterdir():
            for copy in copies_of(path):
                shutil.rmtree(copy)
    assert {(1, "memory"), (2, "disk")} <= where, number


# In a namespace with a /dev/shm of its own


def run_in_namespace(script: str, program: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a program after the commands of `script` in a mount namespace of its own."""
    enter = f"""
import ctypes, subprocess
clone_newns = 0x00020000
assert ctypes.CDLL(None).unshare(clone_newns) == 0
subprocess.run(["sh", "-ec", "mount --make-rprivate /; {script}"], check=True)
"""
    command = [warm_python(), "-c", enter + program, *args]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])}
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=100, check=False)


@pytest.mark.usefixtures("mounts")
def test_without_room_there_is_no_copy_which_is_logged_once(saves: Path) -> None:
    program = """
import logging, sys
logging.basicConfig(format="%(message)s")
from test_memory_copy import load, save
save(sys.argv[1], 1, 2, 3)
print(*load(sys.argv[1]))
"""
    done = run_in_namespace("mount -t tmpfs -o size=32k tmpfs /dev/shm", program, str(saves))
    assert done.stdout == "3 disk True\n", done.stderr
    assert done.stderr.count("the newest save is not kept in memory, only on disk, because of rank 0") == 1
    assert "are free" in done.stderr


@pytest.mark.usefixtures("mounts")
def test_copies_of_jobs_that_have_ended_make_room(saves: Path) -> None:
    program = """
import os, shutil, sys
from test_memory_copy import copies_of, load, save
from pathlib import Path
paths = [f"{sys.argv[1]}-{number}" for number in range(3)]
pid = os.fork()
if pid == 0:
    save(paths[0], 1)
    save(paths[1], 1)
    shutil.rmtree(f"{paths[1]}/step-000000001")  # then the copy is all that is left of it
    os._exit(0)
os.waitpid(pid, 0)
save(paths[2], 1)
print(*[load(path)[1] for path in paths])
"""
    done = run_in_namespace("mount -t tmpfs -o size=130k tmpfs /dev/shm", program, str(saves))
    assert done.stdout == "disk memory memory\n", done.stderr


@pytest.mark.usefixtures("mounts")
@pytest.mark.parametrize("owner", ["others may write", "another user"])
def test_a_directory_of_another_user_is_refused(owner: str) -> None:
    program = """
import logging, os, sys
logging.basicConfig(format="%(message)s")
from test_memory_copy import load, save
os.chdir("/mnt")
if sys.argv[1] == "another user":
    save("/mnt/first", 1)  # which imports all, as this user may not see the interpreter's files
    load("/mnt/first")
    os.setgid(12345)
    os.setuid(12345)
save("/mnt/saves", 1)
print(*load("/mnt/saves"))
"""
    uid, mode = ("12345", "0755") if owner == "another user" else ("0", "0777")
    script = (
        "mount -t tmpfs tmpfs /dev/shm; mount -t tmpfs tmpfs /mnt; chmod 1777 /mnt /dev/shm; "
        f"mkdir -m {mode} /dev/shm/statexchange-{uid}; chown 54321 /dev/shm/statexchange-{uid}"
    )
    done = run_in_namespace(script, program, owner)
    assert done.stdout == "1 disk True\n", done.stderr
    assert "the newest save is not kept in memory" in done.stderr
    assert "refused: " in done.stderr


@pytest.mark.usefixtures("mounts")
def test_a_save_that_fails_leaves_the_copy_of_the_save_before() -> None:
    program = """
import torch
import statexchange as sx
from test_memory_copy import load, save
save("/mnt/saves", 1)
try:
    sx.Checkpoints("/mnt/saves", memory=True).save({"w": torch.zeros(1 << 20)}, 2)
except OSError as error:
    print(type(error).__name__)
print(*load("/mnt/saves"))
"""
    script = "mount -t tmpfs tmpfs /dev/shm; mount -t tmpfs -o size=1m tmpfs /mnt"
    done = run_in_namespace(script, program)
    assert done.stdout == "StorageError\n1 memory True\n", done.stderr
