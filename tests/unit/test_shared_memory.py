"""Arenas between processes: the same memory, no lasting names, and an error instead of a SIGBUS."""

import errno
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shared_names import no_names_left

from statexchange.comm.arena_exchange import ArenaExchange
from statexchange.errors import StorageError
from statexchange.shared_memory import Arena, attach

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


def test_two_processes_see_one_memory() -> None:
    arena = Arena.create(PAGE + 1)
    assert (arena.nbytes, len(arena.view), bytes(arena.view)) == (2 * PAGE, 2 * PAGE, bytes(2 * PAGE))
    arena.view[:5] = b"hello"
    program = "view = attach(json.loads(sys.argv[1])).view\nprint(bytes(view[:5]).decode())\nview[-5:] = b'world'"
    assert in_another_process(program, json.dumps(arena.address)) == "hello\n"
    assert bytes(arena.view[-5:]) == b"world"
    assert bytes(arena.view[:5]) == b"hello"
    arena.close()
    arena.close()


def test_memory_outlives_its_owner_if_another_process_has_attached() -> None:
    program = """
arena = Arena.create(8192)
arena.view[:5] = b"hello"
print(json.dumps(arena.address), flush=True)
sys.stdin.readline()
arena.close()
"""
    command = [sys.executable, "-c", "import json, sys\nfrom statexchange.shared_memory import *\n" + program]
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


def test_killed_owners_leave_nothing() -> None:
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
    for path in (tmp_path / "fifo", "/dev/null"):
        fd = os.open(path, os.O_RDWR)
        with pytest.raises(StorageError, match="not the arena"):
            attach({**arena.address, "fd": fd})  # and it does not block
        os.close(fd)
    arena.close()
    other.close()


def test_more_memory_than_the_machine_has_is_an_error_before_the_oom_killer() -> None:
    program = """
open("/proc/self/oom_score_adj", "w").write("1000")
from statexchange.errors import StorageError
fds = len(os.listdir("/proc/self/fd"))
for size in (1 << 50, 1 << 62, 1 << 70):
    try:
        Arena.create(size)
    except StorageError as error:
        print(error.errno, str(size) in str(error))
print(len(os.listdir("/proc/self/fd")) == fds)
"""
    assert in_another_process(program) == f"{errno.ENOMEM} True\n" * 3 + "True\n"


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
    arenas = ArenaExchange()
    small, large = arenas.acquire(1), arenas.acquire(10 * PAGE)
    small.view[:4] = b"left"
    assert arenas.owned_ids() == []
    for arena in (large, small):
        arenas.lend(arena)
    arenas.recycle([], arenas.owned_ids())
    assert sorted(arenas.owned_ids()) == sorted([small.ident, large.ident])
    assert arenas.acquire(PAGE) is small
    assert bytes(small.view[:4]) == b"left"
    assert arenas.acquire(PAGE + 1) is large
    arenas.lend(small)
    arenas.recycle([], arenas.owned_ids())
    bigger = arenas.acquire(20 * PAGE)
    assert arenas.owned_ids() == []
    assert len(small.view) == 0
    for arena in (large, bigger):
        arenas.lend(arena)
    arenas.close()
    arenas.close()
