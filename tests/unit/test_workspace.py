"""The workspace on a real disk: what a rank has written stays readable after any failed call and any killed process."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from programs import require_mounts
from sweeps import EVERY, some
from system_calls import each_call, in_pairs, strace, system_calls
from workspace_writers import WRITER, names_in, opens, rounds_of, write_value
from workspaces import held, write

from statexchange import NFSWorkspace
from statexchange.errors import (
    NotFoundError,
    UnsafeError,
)
from statexchange.sharding.shards import Box, full_box
from statexchange.storage.workspace import RankName, Workspace


def value_of(path: Path) -> int:
    """Return the value of the newest round, after reading and checking all of it."""
    value, weights = NFSWorkspace(path, run="job").read_configs_and_weights_from_rank(0)
    assert weights.keys() == {"a", "b"}
    assert all((weight == value).all() and len(weight) == 9000 for weight in weights.values())
    return int(value)


def leftovers(path: Path) -> list[str]:
    return [p.name for p in path.rglob("*") if p.name.startswith(".")]


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
