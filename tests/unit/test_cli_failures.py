"""The command line on full disks, after interrupts and errors inside: nothing is left, and a cause is named."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from command_runs import held
from commands import CommandLine, command_environment
from programs import require_mounts
from stored import write_raw
from warm_python import warm_python
from workspaces import filled, write_round

from statexchange.sharding.shards import Box, Shard
from statexchange.testing import run_ranks

pytestmark = pytest.mark.usefixtures("plain_environment")


@pytest.fixture
def namespace(tmp_path: Path) -> Iterator[Path]:
    """Return a directory to mount on; mounts that `in_namespace` makes are not visible outside."""
    require_mounts()
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    yield mounted
    assert os.listdir(mounted) == []


def in_namespace(script: str) -> str:
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", f"set -e; {script}"],
        capture_output=True,
        text=True,
        env=command_environment(),
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_full_disk_leaves_what_was_there(call: CommandLine, namespace: Path, workspace: Path, tmp_path: Path) -> None:
    assert call("merge", workspace, tmp_path / "old")[0] == 0
    write_round(tmp_path / "big", [held("w", "U8", (2 << 20,), (0,), (2 << 20,), 1)])
    sx = f"{sys.executable} -m statexchange"
    output = in_namespace(
        f"mount -t tmpfs -o size=1m tmpfs {namespace}; cp -r {tmp_path}/old {namespace}/out; "
        f"{sx} merge {tmp_path}/big {namespace}/out --overwrite 2>&1 || echo exit $?; ls -A {namespace}; "
        f"diff -r {tmp_path}/old {namespace}/out && echo same"
    )
    error, code, *rest = output.splitlines()
    assert error.startswith("error: cannot reserve 2097")
    assert "No space left on device" in error
    assert f"{namespace}/.out." in error
    assert [code, *rest] == ["exit 8", "out", "same"]


def test_a_dry_run_refuses_a_target_that_cannot_be_written(namespace: Path, workspace: Path, tmp_path: Path) -> None:
    """It has no room, also below directories that do not exist yet, or its file system is read-only."""
    write_round(tmp_path / "big", [held("w", "U8", (2 << 20,), (0,), (2 << 20,), 1)])
    sx = f"{sys.executable} -m statexchange"
    output = in_namespace(
        f"mount -t tmpfs -o size=1m tmpfs {namespace}; "
        f"{sx} merge {tmp_path}/big {namespace}/out --dry-run 2>&1 || echo exit $?; "
        f"{sx} merge {tmp_path}/big {namespace}/a/b/out --dry-run 2>&1 || echo exit $?; ls -A {namespace}; "
        f"mount -o remount,ro {namespace}; {sx} merge {workspace} {namespace}/out --dry-run 2>&1 || echo exit $?"
    )
    full, one, fuller, other, read_only, last = output.splitlines()
    assert [one, other, last] == ["exit 8"] * 3
    assert "No space left on device" in full
    assert "No space left on device" in fuller
    assert "Read-only file system" in read_only


DIE_WHILE_PUBLISHING = """
import os, sys
from statexchange.checkpoint.publication import Draft, Publication
from statexchange.sharding.plan import RankShards, plan_merge
from statexchange.sharding.shards import Shard, full_box

plan = plan_merge([RankShards(0, [Shard("w", "U8", (2 << 20,), (full_box((2 << 20,)),))])])
opened = Publication(sys.argv[1], Draft(plan, source="test")).create(plan.files[0])
opened.write(bytes(2 << 20), len(opened.header) + plan.files[0].tensors[0].begin)
os._exit(0)
"""


def test_a_dry_run_counts_the_room_that_a_dead_publisher_left(namespace: Path, tmp_path: Path) -> None:
    write_round(tmp_path / "big", [held("w", "U8", (2 << 20,), (0,), (2 << 20,), 1)])
    (tmp_path / "die.py").write_text(DIE_WHILE_PUBLISHING)
    merge = f"{sys.executable} -m statexchange merge {tmp_path}/big {namespace}"
    output = in_namespace(
        f"mount -t tmpfs -o size=3m tmpfs {namespace}; {sys.executable} {tmp_path}/die.py {namespace}/out; "
        f"{merge}/other --dry-run >&2 || echo exit $?; {merge}/out --dry-run >&2 && {merge}/out >&2 && echo merged"
    )
    assert output.splitlines() == ["exit 8", "merged"]


def test_a_tensor_of_an_unknown_dtype_is_shown_and_not_merged(call: CommandLine, tmp_path: Path) -> None:
    write_raw(tmp_path / "x.safetensors", {"odd": ("Q4", (2, 2), b"ab"), "w": ("U8", (2,), b"cd")})
    code, out, err = call("info", tmp_path / "x.safetensors")
    assert (code, "Q4 1, U8 1" in out) == (0, True)
    assert "warning: tensors that cannot be read: odd (dtype Q4 is not supported" in err
    code, out, err = call("ls", tmp_path / "x.safetensors")
    assert (code, "odd\tQ4\t[2,2]" in out, "odd (dtype Q4" in err) == (0, True, True)
    assert call.json("info", tmp_path / "x.safetensors")[1]["data"]["unsupported"].keys() == {"odd"}
    assert call("verify", tmp_path / "x.safetensors")[0] == 7
    assert call("merge", tmp_path / "x.safetensors", tmp_path / "out")[0] == 7
    code, _, err = call("merge", tmp_path / "x.safetensors", tmp_path / "out", "--exclude", "odd")
    assert (code, "matches no tensor" in err) == (0, False)


def test_a_merge_into_a_read_only_directory_is_an_io_error(namespace: Path, workspace: Path) -> None:
    sx = f"{sys.executable} -m statexchange"
    output = in_namespace(
        f"mount -t tmpfs tmpfs {namespace}; touch {namespace}/before; mount -o remount,ro {namespace}; "
        f"{sx} merge {workspace} {namespace}/out 2>&1 || echo exit $?; ls -A {namespace}"
    )
    error, code, *rest = output.splitlines()
    assert error.startswith("error: cannot ")
    assert "Read-only file system" in error
    assert os.fspath(namespace) in error
    assert [code, *rest] == ["exit 8", "before"]


# Interruptions and faults


@pytest.fixture
def memory_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as directory:
        yield Path(directory)


def test_ctrl_c_in_a_merge_leaves_nothing(memory_directory: Path) -> None:
    if shutil.disk_usage(memory_directory).free < 2 << 30:
        pytest.skip("an interruption needs a merge that takes a while: 1 GiB of room in memory")
    shard = Shard("w", "U8", (400 << 20,), (Box((0,), (400 << 20,)),))
    write_round(memory_directory / "ws", [filled(shard, bytes(shard.nbytes))])
    before = sorted(os.listdir(memory_directory))
    program = (
        "from statexchange.cli.main import main\n"
        f"main(['merge', {os.fspath(memory_directory / 'ws')!r}, {os.fspath(memory_directory / 'out')!r}])"
    )
    merging = subprocess.Popen(
        [warm_python("commands"), "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=command_environment(),
    )
    deadline = time.monotonic() + 20
    while not any(name.endswith(".partial") for name in os.listdir(memory_directory)):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    merging.send_signal(signal.SIGINT)
    out, err = merging.communicate(timeout=20)
    assert (merging.returncode, out, err) == (130, "", "error: interrupted\n")
    assert sorted(os.listdir(memory_directory)) == before


def test_an_internal_error_asks_for_a_report(
    call: CommandLine, monkeypatch: pytest.MonkeyPatch, workspace: Path
) -> None:
    def broken(_path: str, **_: object) -> None:
        raise RuntimeError("the moon is full")

    monkeypatch.setattr("statexchange.report.summary.summarize", broken)
    code, out, err = call("info", workspace)
    assert (code, out) == (70, "")
    assert "Traceback" in err
    assert "error: the moon is full\nhint: this is a bug in statexchange " in err
    code, envelope = call.json("info", workspace)
    assert (code, envelope["error"]["message"]) == (70, "the moon is full")


def inverts() -> None:
    np.linalg.inv(np.zeros((2, 2)))


@pytest.mark.parametrize("where", ["here", "on ranks"])
def test_an_error_in_another_package_may_be_its_bug(
    call: CommandLine, monkeypatch: pytest.MonkeyPatch, workspace: Path, where: str
) -> None:
    look = inverts if where == "here" else lambda: run_ranks(inverts, 2)
    monkeypatch.setattr("statexchange.report.summary.summarize", lambda _path, **_: look())
    code, out, err = call("info", workspace)
    assert (code, out) == (70, "")
    assert "LinAlgError: Singular matrix" in err
    assert ", or in the package at the end of the text above: report it, " in err.splitlines()[-1]


INTERRUPTED = """
import runpy, sys

interrupted = sys.argv.pop(1)

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == interrupted:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
sys.argv[0] = "-m"  # as python -m has it while the package is imported
runpy.run_module("statexchange", run_name="__main__")
"""


@pytest.mark.parametrize(
    "module",
    ["statexchange.lazy", "statexchange.errors", "click", "statexchange.cli.main", "statexchange.cli.info", "xxhash"],
)
def test_ctrl_c_while_modules_are_imported_exits_with_130(module: str, workspace: Path) -> None:
    run = [sys.executable, "-c", INTERRUPTED, module, "verify" if module == "xxhash" else "info", workspace]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, env=command_environment())
    assert (done.returncode, done.stdout, done.stderr.removeprefix("error: interrupted\n")) == (130, "", "")


def test_an_os_error_is_not_called_a_bug_of_ours(
    call: CommandLine, monkeypatch: pytest.MonkeyPatch, workspace: Path
) -> None:
    def refuse(_path: str, **_: object) -> None:
        raise PermissionError(13, "Permission denied", "/secret")

    monkeypatch.setattr("statexchange.report.summary.summarize", refuse)
    code, _, err = call("info", workspace)
    assert (code, err) == (8, "error: cannot continue: Permission denied [/secret]\n")
