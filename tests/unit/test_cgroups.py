"""The memory that cgroups leave to a process, computed from trees of files and under a real limit."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import require_root

from statexchange import cgroups
from statexchange.cgroups import memory_headrooms

MIB = 1 << 20
UNLIMITED = 9223372036854771712
PROGRAM = """
import sys
from statexchange.errors import StorageError
from statexchange.shared_memory import Arena
with open(sys.argv[1], "rb") as file:
    while file.read(1 << 20):
        pass
first = Arena.create(40 << 20)
try:
    Arena.create(40 << 20)
except StorageError as error:
    print(error.errno, error)
first.close()
Arena.create(40 << 20).close()
print("end")
"""


def group(directory: Path, version: int, limit: object, usage: int, file: int = 0, shmem: int = 0) -> None:
    """Write a cgroup's files as the kernel does; in version 1 they count the cgroup's own pages only."""
    directory.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    stat = f"anon 7\nfile {file}\nshmem {shmem}\n"
    if version == 1:
        stat = f"cache 1\nrss 7\nshmem 2\ntotal_cache {file}\ntotal_rss 7\ntotal_shmem {shmem}\n"
    for name, content in zip((*names, "memory.stat"), (f"{limit}\n", f"{usage}\n", stat), strict=True):
        (directory / name).write_text(content)


def proc(tmp_path: Path, cgroup: str, *mounts: tuple[str, str, str]) -> str:
    """Return a process's directory in /proc, with `cgroup` and mountinfo of these (root, mount point, kind)."""
    directory = tmp_path / "proc"
    directory.mkdir()
    (directory / "cgroup").write_text(cgroup)
    lines = [
        f"3{i} 23 0:3{i} {root} {tmp_path}/{at} rw,relatime shared:9 - {kind}"
        for i, (root, at, kind) in enumerate(mounts)
    ]
    (directory / "mountinfo").write_text(
        "".join(f"{line}\n" for line in ["23 1 8:1 / / rw - ext4 /dev/vda rw", *lines])
    )
    return str(directory)


V2 = "cgroup2 cgroup2 rw,nsdelegate"
V1 = "cgroup cgroup rw,memory"


@pytest.mark.parametrize("version", [1, 2])
def test_the_least_headroom_of_all_ancestors_counts_without_file_pages(version: int, tmp_path: Path) -> None:
    top = tmp_path / "sys"
    group(top / "job", version, 900 * MIB, 800 * MIB, file=500 * MIB, shmem=100 * MIB)  # 900 - (800 - 400)
    group(top / "job" / "step", version, 610 * MIB, 100 * MIB)  # 510
    group(top / "job" / "step" / "task", version, UNLIMITED if version == 1 else "max", 50 * MIB)
    cgroup = "0::/job/step/task\n" if version == 2 else "5:cpu:/\n4:memory:/job/step/task\n0::/\n"
    here = proc(tmp_path, cgroup, ("/", "sys", V2 if version == 2 else V1))
    assert min(memory_headrooms(here)) == (500 * MIB, f"in the cgroup {top}/job")
    group(top / "job" / "step", version, 590 * MIB, 100 * MIB)
    assert min(memory_headrooms(here)) == (490 * MIB, f"in the cgroup {top}/job/step")
    group(top / "job" / "step", version, 90 * MIB, 100 * MIB)
    assert min(memory_headrooms(here)) == (0, f"in the cgroup {top}/job/step")


def test_both_versions_may_be_mounted_beside_each_other(tmp_path: Path) -> None:
    group(tmp_path / "one" / "a", 1, 300 * MIB, 0)
    group(tmp_path / "two" / "b", 2, 200 * MIB, 0)
    cgroup = "9:name=systemd:/x\n8:cpu,memory:/a\n0::/b\n"
    mounts = [("/", "cpu", "cgroup cgroup rw,cpu"), ("/", "one", "cgroup cgroup rw,memory,cpu"), ("/", "two", V2)]
    assert min(memory_headrooms(proc(tmp_path, cgroup, *mounts))) == (200 * MIB, f"in the cgroup {tmp_path}/two/b")


@pytest.mark.parametrize(
    ("root", "path"), [("/docker/c1", "/docker/c1"), ("/docker/c1", "/"), ("/", "/"), ("/docker/c1", "/other/c2")]
)
def test_in_a_container_the_mount_is_its_own_cgroup(root: str, path: str, tmp_path: Path) -> None:
    group(tmp_path / "sys fs", 2, 100 * MIB, 60 * MIB, file=20 * MIB)
    here = proc(tmp_path, f"0::{path}\n", (root, "sys\\040fs", V2))
    assert min(memory_headrooms(here)) == (60 * MIB, f"in the cgroup {tmp_path}/sys fs")


@pytest.mark.parametrize("content", ["", "max\n", "soon\n"])
def test_without_a_limit_the_headroom_is_unknown(content: str, tmp_path: Path) -> None:
    (tmp_path / "sys" / "job").mkdir(parents=True)
    (tmp_path / "sys" / "job" / "memory.max").write_text(content)
    assert memory_headrooms(proc(tmp_path, "0::/job/gone\n", ("/", "sys", V2))) == []
    assert memory_headrooms(str(tmp_path / "no proc")) == []


@contextlib.contextmanager
def limited_cgroup(nbytes: int) -> Iterator[Path]:
    """Make a new memory cgroup below that of this process; skip the test where that is impossible."""
    require_root()
    made = None
    for version, _, directory in cgroups._memory_cgroups("/proc/self"):
        new, limit = Path(directory) / f"statexchange-{os.getpid()}", "memory.max"
        if version == "cgroup":
            limit = "memory.limit_in_bytes"
        with contextlib.suppress(OSError):
            new.mkdir()
            made = new
            (made / limit).write_text(str(nbytes))
            break
        if made is not None:  # a cgroup in which no limit can be set
            made.rmdir()
            made = None
    if made is None:
        pytest.skip("no cgroup with a memory limit can be made here")
    try:
        yield made
    finally:
        made.rmdir()


def test_a_second_arena_that_does_not_fit_is_refused_before_the_oom_killer(tmp_path: Path) -> None:
    """The page cache of a file as large as the limit does not count, the first arena does."""
    (tmp_path / "data").write_bytes(bytes(70 * MIB))
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "data")]
    with limited_cgroup(70 * MIB) as directory:
        # The child enters the cgroup itself, before it uses memory, which would stay charged to the old cgroup.
        enter = f"echo $$ > '{directory}/cgroup.procs' && exec \"$@\""
        done = subprocess.run(
            ["sh", "-c", enter, "sh", *command], capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 0, done.stderr
    refused, end = done.stdout.splitlines()
    assert end == "end"
    assert f"cannot reserve {40 * MIB} bytes of shared memory" in refused
    assert f"bytes are left in the cgroup {directory}" in refused
