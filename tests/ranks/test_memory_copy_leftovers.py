"""Copies in shared memory of jobs that were killed or have ended, and a full or foreign directory."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from forked_jobs import ForkedJobs
from memory_copies import BASE, copies_of, copy_of, load, load_alone, save
from sweeps import slow, some
from warm_python import warm_python

from statexchange.testing import run_ranks

# What jobs leave behind


@pytest.mark.parametrize("text", ["x", "[1]", "{}", None])
def test_a_copy_whose_record_is_broken_is_removed_and_a_stray_file_ignored(
    text: str | None, saves: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    run_ranks(save, 1, args=(str(other), 1))
    broken = copy_of(other)
    stray = BASE / f"copy-{secrets.token_hex(16)}"
    stray.write_text("no directory")
    try:
        if text is None:
            (broken / "copy.json").unlink()
        else:
            (broken / "copy.json").write_text(text)
        assert load_alone(other) == [1, "memory", True]
        run_ranks(save, 1, args=(str(saves), 1))
        assert load_alone(saves) == [1, "memory", True]
        assert not broken.exists()  # nobody else would ever remove it
        assert load_alone(other) == [1, "disk", True]
    finally:
        stray.unlink()
        shutil.rmtree(broken, ignore_errors=True)


def test_leftovers_of_jobs_that_are_gone_are_removed(saves: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    run_ranks(save, 2, args=(str(gone), 7))
    run_ranks(save, 2, args=(str(saves), 7))
    ended = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, check=True)
    left = ended.stdout.split()
    assert len(left) == 2
    assert all(os.path.exists(path) for path in left)
    shutil.rmtree(gone)
    run_ranks(save, 1, args=(str(saves), 8))
    assert copies_of(gone) == []
    assert not any(os.path.exists(path) for path in left)


LEAVES = """
import os
from statexchange.storage.memory_directory import begin_copy, begin_fetch
for build in (begin_fetch(10), begin_copy("/nowhere/step-000000009", "1" * 16, {})):
    with open(f"{build.building_path}/rank-00000-of-00001.safetensors", "w"):
        print(build.building_path, flush=True)
os._exit(0)
"""


# Kills

JOBS = """
from statexchange.testing import run_ranks
from memory_copies import save

def job(path, ranks, step):
    run_ranks(save, ranks, args=(path, step), timeout_s=60)

serve(job, lambda path: not path.startswith("/dev/shm/") or "copy-" in path)
"""


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
            names = sorted(entry.name for entry in copy_of(path).iterdir())
            assert names == ["copy.json", *(f"rank-0000{rank}-of-00002.safetensors" for rank in (0, 1))], number
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
from memory_copies import load, save
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
from memory_copies import copies_of, load, save
from pathlib import Path
paths = [f"{sys.argv[1]}-{number}" for number in range(3)]
pid = os.fork()
if pid == 0:
    save(paths[0], 1)
    save(paths[1], 1)
    os._exit(0)
os.waitpid(pid, 0)
save(paths[2], 1)
print(*[load(path)[1] for path in paths])
"""
    done = run_in_namespace("mount -t tmpfs -o size=130k tmpfs /dev/shm", program, str(saves))
    assert done.stdout == "disk disk memory\n", done.stderr


@pytest.mark.usefixtures("mounts")
@pytest.mark.parametrize("owner", ["others may write", "another user"])
def test_a_directory_of_another_user_is_refused(owner: str) -> None:
    program = """
import logging, os, sys
logging.basicConfig(format="%(message)s")
from memory_copies import load, save
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
from memory_copies import load, save
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
