"""The workspace on a real disk: what a rank has written stays readable after any failed call and any killed process."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from programs import require_mounts
from stored import flip_bit
from sweeps import EVERY, some
from system_calls import each_call, in_pairs, strace, system_calls
from warm_python import warm_python
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
from statexchange.sharding.shards import Box, full_box
from statexchange.storage import atomic, files
from statexchange.storage.store import local_path
from statexchange.storage.workspace import RankName, Workspace

WRITER = """
import json, sys
import numpy as np
from statexchange import NFSWorkspace
from statexchange.errors import StateExchangeError
path, value = sys.argv[1], int(sys.argv[2])
try:
    weights = {name: np.full(9000, value, np.uint8) for name in "ab"}
    NFSWorkspace(path, run="job").write_configs_and_weights(value, weights)
except StateExchangeError as error:
    print(json.dumps([type(error).__name__, getattr(error, "errno", None), error.path]))
"""


def write_value(path: Path, value: int) -> None:
    command = [warm_python("commands"), "-c", WRITER, str(path), str(value)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def opens(workspace: Workspace, name: RankName) -> None:
    with workspace.open(name):
        pass


def rounds_of(workspace: Workspace) -> list[int]:
    with workspace.view() as view:
        return view.rounds("job")


def names_in(workspace: Workspace) -> list[RankName]:
    """Return the names in the first round."""
    with workspace.view() as view:
        return view.rank_names("job", 1)


def value_of(path: Path) -> int:
    """Return the value of the newest round, after reading and checking all of it."""
    value, weights = NFSWorkspace(path, run="job").read_configs_and_weights_from_rank(0)
    assert weights.keys() == {"a", "b"}
    assert all((weight == value).all() and len(weight) == 9000 for weight in weights.values())
    return int(value)


def leftovers(path: Path) -> list[str]:
    return [p.name for p in path.rglob("*") if p.name.startswith(".")]


@pytest.fixture(scope="module")
def two_rounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "ws"
    for value in (1, 2):
        write_value(path, value)
    return path


@EVERY
def test_after_a_kill_at_any_write_the_old_round_or_the_new_one_is_there(
    every: int, two_rounds: Path, tmp_path: Path
) -> None:
    shutil.copytree(two_rounds, tmp_path / "trace")
    calls = system_calls(WRITER, tmp_path / "trace", 3, log=tmp_path / "log")
    assert {"fsync", "linkat", "pwrite64", "fallocate", "unlinkat", "mkdirat"} <= set(calls)

    def check(point: tuple[str, int]) -> None:
        path = tmp_path / f"{point[0]}-{point[1]}"
        shutil.copytree(two_rounds, path)
        done = strace(f"inject={point[0]}:signal=SIGKILL:when={point[1]}", WRITER, path, 3)
        assert done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL), point
        assert value_of(path) in (2, 3), point
        write_value(path, 4)  # without a clean-up in between
        assert value_of(path) == 4, point
        write_value(path, 5)
        write_value(path, 6)
        assert value_of(path) == 6, point
        rounds = rounds_of(Workspace(path))
        assert len(rounds) == 2, point
        assert rounds[1] == rounds[0] + 1, point
        assert leftovers(path) == [], point
        assert [p for p in path.rglob("*") if p.is_dir() and not os.listdir(p)] == [], point

    in_pairs(check, some(each_call(calls), every))


FAULTS = [
    ("fsync", "EIO"),
    ("pwrite64", "ENOSPC"),
    ("linkat", "EIO"),
    ("fallocate", "ENOSPC"),
    ("mkdirat", "EACCES"),
]
TOLERATED = [("fallocate", "EOPNOTSUPP"), ("linkat", "EPERM"), ("unlinkat", "EIO")]


@EVERY
def test_a_failing_write_is_an_error_with_path_and_errno_and_leaves_nothing(
    every: int, two_rounds: Path, sweep_path: Path
) -> None:
    shutil.copytree(two_rounds, sweep_path / "trace")
    calls = Counter(system_calls(WRITER, sweep_path / "trace", 3, log=sweep_path / "log"))

    def check(case: tuple[str, str, int]) -> None:
        call, code, when = case
        path = sweep_path / f"{call}-{code}-{when}"
        shutil.copytree(two_rounds, path)
        done = strace(f"inject={call}:error={code}:when={when}", WRITER, path, 3)
        assert done.returncode == 0, (case, done.stderr)
        if (call, code) in TOLERATED:
            assert (done.stdout, value_of(path)) == ("", 3), case
            is_left = call == "unlinkat" and len(list(path.glob("job/*/rank-*"))) > 2
            assert ("cannot remove an old round" in done.stderr) == is_left, (case, done.stderr)
        else:
            kind, number, where = json.loads(done.stdout)
            assert (kind, number) == ("StorageError", getattr(errno, code)), case
            assert where.startswith(str(path / "job")), case
            assert value_of(path) == 2, case
        assert call == "unlinkat" or leftovers(path) == [], case
        write_value(path, 4)
        assert value_of(path) == 4, case

    cases = [(call, code, n + 1) for call, code in [*FAULTS, *TOLERATED] for n in range(calls[call])]
    in_pairs(check, some(cases, every))


def test_a_full_disk_and_a_size_limit_are_storage_errors_with_their_errno(tmp_path: Path) -> None:
    limited = ["prlimit", "--fsize=4000", sys.executable, "-c", WRITER, str(tmp_path / "limited"), "1"]
    done = subprocess.run(limited, capture_output=True, text=True)
    assert json.loads(done.stdout)[:2] == ["StorageError", errno.EFBIG], done.stderr
    require_mounts()
    mount = tmp_path / "small"
    mount.mkdir()
    script = f'mount -t tmpfs -o size=8k tmpfs {mount} && "$@" && ls -A {mount}/job/000001'
    full = ["unshare", "-m", "sh", "-c", script, "sh", sys.executable, "-c", WRITER, str(mount), "1"]
    done = subprocess.run(full, capture_output=True, text=True)
    kind, number, where = json.loads(done.stdout)  # which shows that ls printed nothing
    assert (kind, number) == ("StorageError", errno.ENOSPC), done.stderr
    assert where.startswith(f"{mount}/job/000001/rank-00000-of-00001.")


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "deep" / "er" / "ws")


def test_a_round_is_read_as_it_was_written(workspace: Workspace) -> None:
    boxes = (Box((0, 0), (1, 3)), Box((3, 1), (1, 1)))
    parts = [
        held("w", b"abcd", global_shape=(4, 3), boxes=boxes),
        held("empty", b""),
        held("scalar", b"x", global_shape=(), boxes=(full_box(()),)),
    ]
    name = write(workspace, 2, 3, config='{"a":1}', extra={"aliases": {"v": "w"}, "rank": 99}, tensors=parts)
    with workspace.open(name) as file:
        assert {name: bytes(file.read(name)) for name in file.shards} == {"w": b"abcd", "empty": b"", "scalar": b"x"}
        assert (file.config, file.metadata["rank"], file.metadata["aliases"]) == ('{"a":1}', 2, {"v": "w"})
        assert file.shards["w"].boxes == boxes
        (first, second) = file.byte_ranges["w"]
        assert (first.nbytes, second.begin, second.nbytes) == (3, first.begin + 3, 1)


def test_files_and_directories_are_private_to_their_owner(workspace: Workspace) -> None:
    name = write(workspace)
    parts = Path(name.relative).parts
    modes = [os.stat(os.path.join(workspace.path, *parts[:n])).st_mode & 0o777 for n in range(4)]
    assert modes == [0o700, 0o700, 0o700, 0o600]


def test_names_of_files_are_never_reused(workspace: Workspace) -> None:
    assert len({write(workspace).relative for _ in range(20)}) == 20


BAD_NAMES = [
    "", "x", "a/b/c", "../ws/000001/rank-00000-of-00001.0123456789abcdef.safetensors",
    "job/000001/../000002/rank-00000-of-00001.0123456789abcdef.safetensors",
    "/etc/000001/rank-00000-of-00001.0123456789abcdef.safetensors",
    ".job/000001/rank-00000-of-00001.0123456789abcdef.safetensors",
    "job/1/rank-00000-of-00001.0123456789abcdef.safetensors",
    "job/0000001/rank-00000-of-00001.0123456789abcdef.safetensors",
    "job/000001/rank-00001-of-00001.0123456789abcdef.safetensors",
    "job/000001/rank-000000-of-00001.0123456789abcdef.safetensors",
    "job/000001/rank-0٠000-of-00001.0123456789abcdef.safetensors",
    "job/000001/rank-00000-of-00001.0123456789ABCDEF.safetensors",
    "job/000001/rank-00000-of-00001.0123456789abcdef.safetensors\n",
    "jo\nb/000001/rank-00000-of-00001.0123456789abcdef.safetensors",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_outside_of_the_workspace_is_refused(workspace: Workspace, name: str) -> None:
    write(workspace)
    for use in (RankName.parse, lambda n: workspace.remove([n])):
        with pytest.raises(UnsafeError, match="rank's file"):
            use(name)


@pytest.mark.parametrize(
    "bad", [{"run": "../x"}, {"run": ""}, {"run": "a/b"}, {"number": -1}, {"rank": 5}, {"rank": -1}]
)
def test_a_writer_cannot_write_outside_of_its_directory(workspace: Workspace, bad: dict[str, Any]) -> None:
    with pytest.raises(UnsafeError):
        write(workspace, **bad)
    assert not os.path.exists(workspace.path)


def test_files_are_listed_in_the_order_of_their_ranks(workspace: Workspace) -> None:
    for rank in (100_000, 20_000, 3):
        write(workspace, rank, 200_000)
    assert [name.rank for name in names_in(workspace)] == [3, 20_000, 100_000]


def test_a_missing_file_is_named(workspace: Workspace) -> None:
    name = write(workspace, 3, 4)
    path = os.path.join(workspace.path, name.relative)
    os.unlink(path)
    with pytest.raises(NotFoundError, match="missing") as caught:
        opens(workspace, name)
    assert (caught.value.rank, caught.value.path) == (3, path)
    shutil.rmtree(os.path.dirname(path))
    with pytest.raises(NotFoundError, match="missing") as caught:
        opens(workspace, name)
    assert (caught.value.rank, caught.value.path) == (3, path)


def test_an_empty_round_of_a_killed_writer_is_swept(workspace: Workspace) -> None:
    write(workspace)
    empty, held_by_notes = (Path(workspace.path, "job", f"00000{number}") for number in (2, 3))
    for path in (empty, held_by_notes):
        path.mkdir(0o700)
    (held_by_notes / "notes").write_text("mine")
    workspace.sweep("job", 0, before=0)
    assert rounds_of(workspace) == [1, 3]
    assert (held_by_notes / "notes").read_text() == "mine"


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
