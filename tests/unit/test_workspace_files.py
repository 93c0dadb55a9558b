"""Files of a workspace: altered, special, of others; names, links and mounts."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from programs import require_mounts
from stored import flip_bit
from system_calls import strace, system_calls
from workspace_writers import WRITER, names_in, opens, rounds_of
from workspaces import commit, held, write

from statexchange import NFSWorkspace
from statexchange.errors import (
    CorruptError,
    InvalidArgumentError,
    NotFoundError,
    StorageError,
    TargetExistsError,
    UnsafeError,
)
from statexchange.formats.registry import open_source
from statexchange.storage import atomic, files
from statexchange.storage.store import local_path
from statexchange.storage.workspace import RankName, Workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "deep" / "er" / "ws")


def damage(path: str, change: Callable[[bytearray], object]) -> None:
    data = bytearray(Path(path).read_bytes())
    change(data)
    Path(path).write_bytes(data)


def test_altered_bytes_name_rank_tensor_and_file(workspace: Workspace) -> None:
    name = write(workspace, 1, 2, tensors=[held("v"), held("w")])
    path = os.path.join(workspace.path, name.relative)
    flip_bit(Path(path), -1)
    with workspace.open(name) as file:
        assert bytes(file.read("v")) == b"12345678"
        with pytest.raises(CorruptError, match="digest") as caught:
            file.read("w")
    assert (caught.value.rank, caught.value.name, caught.value.path) == (1, "w", path)
    damage(path, lambda data: data.append(0))
    with pytest.raises(CorruptError):
        opens(workspace, name)


def test_a_file_of_another_rank_round_or_run_is_refused(workspace: Workspace) -> None:
    names = [
        write(workspace, 0, 2),
        write(workspace, 1, 2),
        write(workspace, 0, 2, number=2),
        write(workspace, 0, 2, run="other"),
    ]
    first = os.path.join(workspace.path, names[0].relative)
    for other, word in zip(names[1:], ("rank", "round", "run"), strict=True):
        shutil.copy(os.path.join(workspace.path, other.relative), first)
        with pytest.raises(CorruptError, match=f"another {word}"):
            opens(workspace, RankName.parse(names[0].relative))


@pytest.mark.parametrize("plant", ["symlink", "fifo", "directory", "socket"])
def test_a_special_file_in_place_of_a_file_is_refused_and_never_blocks(workspace: Workspace, plant: str) -> None:
    name = write(workspace)
    path = os.path.join(workspace.path, name.relative)
    os.rename(path, path + ".away")
    if plant == "symlink":
        os.symlink(path + ".away", path)
    elif plant == "fifo":
        os.mkfifo(path)
    elif plant == "directory":
        os.mkdir(path)
    else:
        program = "import os, socket, sys; os.chdir(sys.argv[1]); socket.socket(1).bind(sys.argv[2])"
        subprocess.run([sys.executable, "-c", program, *os.path.split(path)], check=True)
    with pytest.raises(UnsafeError, match="regular file") as caught:
        opens(workspace, name)
    assert caught.value.path == path


@pytest.mark.parametrize("level", [1, 2])
def test_a_directory_that_is_a_link_is_refused(workspace: Workspace, tmp_path: Path, level: int) -> None:
    name = write(workspace)
    place = os.path.join(workspace.path, *Path(name.relative).parts[:level])
    os.rename(place, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", place)
    for use in (
        lambda: opens(workspace, name),
        lambda: write(workspace),
        lambda: names_in(workspace),
        lambda: workspace.remove([name.relative]),
    ):
        with pytest.raises(UnsafeError, match="not a directory"):
            use()
    assert len(list((tmp_path / "elsewhere").rglob("rank-*"))) == 1


def test_a_run_that_others_may_write_in_is_refused(workspace: Workspace) -> None:
    name = write(workspace)
    os.chmod(os.path.join(workspace.path, "job"), 0o770)
    for use in (lambda: write(workspace), lambda: opens(workspace, name)):
        with pytest.raises(UnsafeError, match="others may write"):
            use()


def test_files_of_a_committed_round_are_not_removed(workspace: Workspace) -> None:
    name = write(workspace)
    manifest = commit(Path(workspace.path), name)
    workspace.remove([name.relative])
    for value in range(3):
        NFSWorkspace(workspace.path, run="job").write_configs_and_weights(value, {})
    workspace.sweep("job", 0, before=0)
    assert rounds_of(workspace) == [1, 3, 4]
    assert open_source(manifest.parent).round == 1


def test_rounds_are_counted_by_rank_and_by_run(workspace: Workspace) -> None:
    assert workspace.next_round("job", 3) == 1
    write(workspace, 0, 2, number=4)
    write(workspace, 1, 2, number=2)
    os.mkdir(os.path.join(workspace.path, "job", "0000099"))
    Path(workspace.path, "job", "notes").write_text("")
    assert (workspace.next_round("job", 0), workspace.next_round("job", 1)) == (5, 3)


def test_a_workspace_is_at_a_path_a_file_url_or_a_shm_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert local_path("ws") == str(tmp_path / "ws")
    assert local_path("file:///a/b") == "/a/b"
    assert local_path("shm://a") == f"/dev/shm/statexchange-{os.getuid()}/a"
    for url in ("shm://", "shm://../x", "shm://a/b"):
        with pytest.raises(InvalidArgumentError):
            Workspace(url)
    Path("file").write_text("")
    with pytest.raises(NotFoundError, match="not a directory"):
        write(Workspace("file"))
    with pytest.raises(NotFoundError, match="not a directory"):
        write(Workspace("file/ws"))


IN_MEMORY = """
import os
from pathlib import Path
from statexchange.errors import UnsafeError
from statexchange.storage.workspace import Workspace
from workspaces import write

workspace = Workspace("shm://test")
base = Path(workspace.path).parent
name = write(workspace)
print(oct(base.stat().st_mode & 0o777))
base.chmod(0o777)
for use in (lambda: workspace.open(name).__enter__(), lambda: write(workspace)):
    try:
        use()
    except UnsafeError as error:
        print("others may write" in error.message)
base.chmod(0o700)
workspace.remove([name.relative])
print(os.path.exists(workspace.path))
"""


def test_a_workspace_on_tmpfs_is_private() -> None:
    """It uses a /dev/shm of its own: other tests use the directory of this user's workspaces."""
    require_mounts()
    script = 'mount -t tmpfs t /dev/shm && exec "$0" -c "$1"'
    command = ["unshare", "-m", "sh", "-c", script, sys.executable, IN_MEMORY]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert done.stdout == "0o700\nTrue\nTrue\nFalse\n", done.stderr


@pytest.mark.parametrize("url", ["shm://race-{}", "{}/ws"])
def test_ranks_that_write_and_remove_at_once_do_not_disturb_each_other(tmp_path: Path, url: str) -> None:
    workspace = Workspace(url.format(os.getpid() if "shm" in url else tmp_path))

    def rank(number: int) -> None:
        for _ in range(100):
            name = write(workspace, number, 4)
            with workspace.open(name) as file:
                assert bytes(file.read("w")) == b"12345678"
            workspace.remove([name.relative])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(rank, range(4)))
    assert not os.path.exists(workspace.path) or os.listdir(workspace.path) == []


def test_the_mount_that_is_visible_decides_whether_a_path_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_mounts()
    program = """
import sys
from statexchange.storage.files import mount_of
print(*(mount_of(path).is_memory for path in sys.argv[1:]))
"""
    mounts = 'mount -t tmpfs t "$1" && mkdir "$1/in" && mount -t tmpfs t "$1/in" && mount --bind / "$1/in"'
    script = mounts + ' && "$2" -c "$3" "$1" "$1/in" "$1/gone"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", str(tmp_path), sys.executable, program],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "True False True\n", done.stderr


def test_a_name_appears_after_its_bytes_are_durable_and_is_then_made_durable(tmp_path: Path, two_rounds: Path) -> None:
    shutil.copytree(two_rounds, tmp_path / "ws")
    calls = system_calls(WRITER, tmp_path / "ws", 3, log=tmp_path / "log")
    calls = [call for call, before in zip(calls, ["", *calls], strict=False) if call != "pwrite64" or before != call]
    new_file = ["fallocate", "pwrite64", "fsync", "linkat", "unlinkat", "fsync"]
    removal = ["unlinkat", "unlinkat", "unlinkat"]  # of the file and the round; the run is not empty
    assert calls == ["mkdirat", "mkdirat", "fsync", *new_file, *removal]
    directories = re.findall(r"^\d+ +mkdirat\(.*(?:= 0|EEXIST.*)$", (tmp_path / "log").read_text(), re.MULTILINE)
    assert len(directories) == 2


def test_a_write_leaves_no_file_if_the_directory_cannot_be_synced(tmp_path: Path) -> None:
    program = """
import os, sys
from statexchange.errors import StorageError
from statexchange.storage import atomic, files
with files.directory(sys.argv[1]) as fd:
    try:
        atomic.write_new(fd, "x", b"data", path="p")
    except StorageError as error:
        print(error.errno, error.path, os.listdir(fd))
"""
    assert strace("inject=fsync:error=EIO:when=2", program, tmp_path).stdout == "5 p []\n"
    assert strace("inject=pwrite64:retval=0", program, tmp_path).stdout == "5 p []\n"
    assert strace("inject=pwrite64:error=EINTR:when=1", program, tmp_path).stdout == ""


def test_a_rename_that_was_done_but_reported_failed_is_a_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.link

    def lost_answer(*arguments: Any, **options: Any) -> None:
        real(*arguments, **options)
        raise FileExistsError(errno.EEXIST, "File exists")  # as an NFS server answers a retransmission

    monkeypatch.setattr(os, "link", lost_answer)
    with files.directory(str(tmp_path)) as fd:
        atomic.write_new(fd, "x", b"data", path="p")
    assert os.listdir(tmp_path) == ["x"]


def no_links(*_: Any, **__: Any) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def test_a_name_that_exists_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_text("old")
    with files.directory(str(tmp_path)) as fd:
        with pytest.raises(TargetExistsError):
            atomic.write_new(fd, "x", b"new", path="p")
        monkeypatch.setattr(os, "link", no_links)  # as on exFAT
        with pytest.raises(TargetExistsError):
            atomic.write_new(fd, "x", b"new", path="p")
        monkeypatch.setattr(atomic, "_renameat2", lambda *_: errno.EINVAL)  # where the system has no such call either
        with pytest.raises(TargetExistsError):
            atomic.write_new(fd, "x", b"new", path="p")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"x": "old"}


def test_a_read_only_directory_is_a_storage_error(tmp_path: Path) -> None:
    require_mounts()
    script = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && shift && "$@"'
    done = subprocess.run(
        [
            "unshare",
            "-m",
            "sh",
            "-c",
            script,
            "sh",
            str(tmp_path),
            sys.executable,
            "-c",
            WRITER,
            str(tmp_path / "ws"),
            "1",
        ],
        capture_output=True,
        text=True,
    )
    assert json.loads(done.stdout) == ["StorageError", errno.EROFS, str(tmp_path / "ws")], done.stderr
    with pytest.raises(StorageError):
        Workspace("/proc/ws").write([], run="a", round=1, rank=0, world_size=1)


SQUASHED = """
import ctypes, os, sys
from pathlib import Path
from statexchange.errors import UnsafeError
from statexchange.storage.workspace import Workspace

def write(path):
    workspace = Workspace(path)
    name = workspace.write([], run="job", round=1, rank=0, world_size=1)
    with workspace.view() as view:
        return view.rank_names("job", 1) == [name]

path = sys.argv[1]
assert write(path + "/warm")  # imports all that may not be readable afterwards
os.mkdir(path + "/planted")
os.mkdir(path + "/planted/job", 0o755)
os.chmod(path + "/planted", 0o777)
os.chown(path + "/planted/job", 4711, 4711)
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 12345, 65534)
assert ctypes.CDLL(None).setfsuid(65534) == 12345
assert write(path + "/ws")
print(os.geteuid(), os.stat(path + "/ws/job").st_uid)
try:
    write(path + "/planted")
except UnsafeError as error:
    print(error.message)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may take another user for files")
def test_files_that_a_server_maps_to_another_user_are_accepted_and_a_planted_directory_is_not() -> None:
    """Over NFS with all_squash, files that this user makes belong to another one."""
    with tempfile.TemporaryDirectory() as open_to_all:  # pytest's directories are closed to other users
        os.chmod(open_to_all, 0o777)
        done = subprocess.run([sys.executable, "-c", SQUASHED, open_to_all], capture_output=True, text=True)
    assert done.stdout == "12345 65534\nrefused: this directory belongs to another user\n", done.stderr
