"""Arenas between processes: the same memory, no lasting names, and an error instead of a SIGBUS."""

import errno
import gc
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from programs import require_mounts
from shared_names import arena_names, no_names_left

from statexchange.errors import StorageError
from statexchange.shared_memory import Arena, ArenaPool, Kind, attach, sweep

KINDS: list[Kind] = ["memfd", "file"]
PAGE = os.sysconf("SC_PAGESIZE")


def in_another_process(program: str, *arguments: object) -> str:
    program = "import json, os, sys\nfrom statexchange.shared_memory import *\n" + program
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(autouse=True)
def no_arenas_left() -> Any:
    gc.collect()  # arenas that other tests have left
    fds = len(os.listdir("/proc/self/fd"))
    with no_names_left():
        yield
        gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= fds


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_see_one_memory(kind: Kind) -> None:
    arena = Arena.create(PAGE + 1, kind)
    assert (arena.nbytes, len(arena.view), bytes(arena.view)) == (2 * PAGE, 2 * PAGE, bytes(2 * PAGE))
    arena.view[:5] = b"hello"
    program = "view = attach(json.loads(sys.argv[1])).view\nprint(bytes(view[:5]).decode())\nview[-5:] = b'world'"
    assert in_another_process(program, json.dumps(arena.address)) == "hello\n"
    assert bytes(arena.view[-5:]) == b"world"
    arena.unlink()
    assert bytes(arena.view[:5]) == b"hello"
    arena.close()
    arena.close()


@pytest.mark.parametrize("kind", KINDS)
def test_memory_outlives_its_owner_if_another_process_has_attached(kind: Kind) -> None:
    program = """
arena = Arena.create(8192, sys.argv[1])
arena.view[:5] = b"hello"
print(json.dumps(arena.address), flush=True)
sys.stdin.readline()
arena.close()
"""
    command = [sys.executable, "-c", "import json, sys\nfrom statexchange.shared_memory import *\n" + program, kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        address = json.loads(owner.stdout.readline())
        attached = attach(address)
        owner.communicate("\n")
    assert owner.returncode == 0
    assert bytes(attached.view[:5]) == b"hello"
    with pytest.raises(StorageError) as caught:
        attach(address)
    assert caught.value.errno == errno.ENOENT


def test_killed_owners_of_a_memfd_leave_nothing() -> None:
    program = "import os\nfrom statexchange.shared_memory import *\nArena.create(1 << 20)\nos.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == -9


def test_an_arena_cannot_be_resized_by_another_process() -> None:
    arena = Arena.create(PAGE)
    fd = os.open(f"/proc/self/fd/{arena.address['fd']}", os.O_RDWR)
    for size in (0, PAGE - 1, 2 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)
    arena.close()


def test_files_are_private_until_they_are_unlinked() -> None:
    arena = Arena.create(PAGE, "file")
    path = Path(arena.address["path"])
    assert path.stat().st_mode & 0o777 == 0o600
    assert arena.ident in path.name
    attached = attach(arena.address)
    arena.unlink()
    arena.unlink()
    assert not path.exists()
    attached.view[:1] = b"x"
    assert bytes(arena.view[:1]) == b"x"
    arena.close()


def test_a_file_at_an_address_must_be_the_announced_one(tmp_path: Path) -> None:
    arena, other = Arena.create(PAGE), Arena.create(PAGE)
    for wrong in (
        {"nbytes": 2 * PAGE},
        {"fd": other.address["fd"]},  # as if the owner had closed it and opened another
        {"inode": arena.address["inode"] + 1},
    ):
        with pytest.raises(StorageError, match="not the arena"):
            attach({**arena.address, **wrong})
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(StorageError, match="not the arena"):
        attach({**arena.address, "path": str(tmp_path / "fifo")})  # and it does not block
    (tmp_path / "link").symlink_to("/dev/null")
    with pytest.raises(StorageError) as caught:
        attach({**arena.address, "path": str(tmp_path / "link")})
    assert (caught.value.errno, caught.value.path) == (errno.ELOOP, str(tmp_path / "link"))
    arena.close()
    other.close()


def test_too_little_space_is_an_error_that_names_the_size() -> None:
    require_mounts()
    program = """
from statexchange.errors import StorageError
small = Arena.create(1 << 20, "file")
try:
    Arena.create(16 << 20, "file")
except StorageError as error:
    print(error.errno, error)
print(len(os.listdir("/dev/shm")))
small.close()
print(os.listdir("/dev/shm"))
"""
    program = "import os\nfrom statexchange.shared_memory import *\n" + program
    script = 'mount -t tmpfs -o size=4m tmpfs /dev/shm && "$1" -c "$2"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", sys.executable, program], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    message, left, end = done.stdout.splitlines()
    assert message.startswith(f"{errno.ENOSPC} cannot reserve {16 << 20} bytes of shared memory")
    assert "--shm-size" in message
    assert (left, end) == ("1", "[]")


@pytest.mark.parametrize("kind", KINDS)
def test_more_memory_than_the_machine_has_is_an_error_before_the_oom_killer(kind: Kind) -> None:
    program = """
open("/proc/self/oom_score_adj", "w").write("1000")
from statexchange.errors import StorageError
fds = len(os.listdir("/proc/self/fd"))
for size in (1 << 50, 1 << 62, 1 << 70):
    try:
        Arena.create(size, sys.argv[1])
    except StorageError as error:
        print(error.errno, str(size) in str(error))
print(len(os.listdir("/proc/self/fd")) == fds)
"""
    assert in_another_process(program, kind) == f"{errno.ENOMEM} True\n" * 3 + "True\n"


def test_memory_is_in_use_as_long_as_any_view_of_it() -> None:
    arena = Arena.create(PAGE)
    attached = attach(arena.address)
    assert not attached.referenced
    assert bytes(attached.view[:1]) == b"\0"
    assert not attached.referenced
    tensor = torch.from_numpy(attached.lend()[8:24]).view(torch.float32)[1:].reshape(1, -1)
    again = attached.lend()
    del again
    gc.collect()
    assert attached.referenced
    kept = np.asarray(tensor)
    del tensor
    assert attached.referenced
    arena.close()
    kept[:] = 2.5  # the mapping stays valid after the owner has closed the arena
    del kept
    assert not attached.referenced
    del attached


def test_arenas_are_reused() -> None:
    pool = ArenaPool()
    small, large = pool.acquire(1), pool.acquire(10 * PAGE)
    small.view[:4] = b"left"
    assert pool.idents() == []
    for arena in (large, small):
        pool.release(arena)
    assert sorted(pool.idents()) == sorted([small.ident, large.ident])
    assert pool.acquire(PAGE) is small
    assert bytes(small.view[:4]) == b"left"
    assert pool.acquire(PAGE + 1) is large
    pool.release(small)
    bigger = pool.acquire(20 * PAGE)
    assert pool.idents() == []
    assert len(small.view) == 0
    for arena in (large, bigger):
        pool.release(arena)
    pool.close()
    pool.close()


def test_a_pool_makes_arenas_of_its_kind() -> None:
    pool = ArenaPool("file")
    arena = pool.acquire(1)
    assert os.path.exists(arena.address["path"])
    pool.release(arena)
    pool.close()
    assert not os.path.exists(arena.address["path"])


# Files of killed processes

OWNER = """
import os, sys, time
from statexchange.shared_memory import Arena
arenas = [Arena.create(8192, "file") for _ in range(3)]
print(*[os.path.basename(arena.address["path"]) for arena in arenas], flush=True)
sys.stdin.readline()
"""


def start_owner(*prefix: str) -> tuple[subprocess.Popen[str], list[str]]:
    """Start a process that holds three files in /dev/shm; return it and their names."""
    command = [*prefix, sys.executable, "-c", OWNER]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    return owner, owner.stdout.readline().split()


def kill(owner: subprocess.Popen[str]) -> None:
    owner.kill()
    owner.communicate()
    assert owner.returncode == -signal.SIGKILL


def remove(names: list[str]) -> None:
    for name in names:
        Path("/dev/shm", name).unlink()


def test_files_of_killed_processes_are_swept_and_those_of_living_ones_are_not() -> None:
    (killed, left), (living, kept) = start_owner(), start_owner()
    assert len({*left, *kept}) == 6
    kill(killed)
    own = Arena.create(PAGE, "file")
    assert {*left, *kept} < arena_names()
    sweep()
    assert arena_names() & {*left, *kept} == set(kept)
    assert Path(own.address["path"]).exists()
    own.close()
    kill(living)
    sweep()
    assert not arena_names() & set(kept)


INITIALISED = """
import os, subprocess, sys
import statexchange as sx

owner = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
names = owner.stdout.readline().decode().split()
owner.kill()
owner.wait()
assert len(names) == 3 and set(names) == set(os.listdir("/dev/shm"))
sx.init("single")
print(os.listdir("/dev/shm"))
"""


@pytest.mark.usefixtures("mounts")
def test_init_sweeps_what_killed_processes_have_left() -> None:
    """In a new /dev/shm, since processes of other tests sweep the shared one."""
    command = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
    run = ["unshare", "-m", "sh", "-c", command, "sh", sys.executable, "-c", INITIALISED, OWNER]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_pid_that_another_process_has_now_does_not_protect_a_file() -> None:
    owner, left = start_owner()
    kill(owner)
    # As if the killed process had had the pid of this one, which started later.
    name = re.sub(r"\.[0-9a-f]+\.[0-9a-f]+$", f".{os.getpid():x}.1", left[0])
    os.rename(f"/dev/shm/{left[0]}", f"/dev/shm/{name}")
    sweep()
    assert not arena_names() & {name, *left}


@pytest.mark.skipif(os.geteuid() != 0, reason="other users and namespaces need root")
def test_files_of_another_user_or_pid_namespace_are_left_alone() -> None:
    owner, left = start_owner()
    kill(owner)
    for name in left:
        os.chown(f"/dev/shm/{name}", 12345, -1)
    # The killed process is the init of its PID namespace, so all processes in it end.
    apart, theirs = start_owner("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    kill(apart)
    sweep()
    assert {*left, *theirs} <= arena_names()
    remove([*left, *theirs])


def test_a_sweep_leaves_files_of_other_names_alone() -> None:
    owner, (name, *rest) = start_owner()
    kill(owner)
    ident, record = name.removeprefix("statexchange-").split(".", 1)
    others = [f"statexchange-{ident}", f"statexchange-{ident[1:]}.{record}", f"x{name}", f"{name}.x", f"{name}-"]
    for other in others:
        Path("/dev/shm", other).touch()
    os.unlink(f"/dev/shm/{rest[0]}")
    os.mkdir(f"/dev/shm/{rest[0]}")
    os.unlink(f"/dev/shm/{rest[1]}")
    os.symlink("/dev/null", f"/dev/shm/{rest[1]}")
    sweep()
    assert {*others, *rest} <= set(os.listdir("/dev/shm"))
    assert name not in os.listdir("/dev/shm")
    remove([*others, rest[1]])
    os.rmdir(f"/dev/shm/{rest[0]}")
