"""Publication of a directory on a real disk: what is replaced, refused, left and cleaned up."""

import errno
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import publishing
import pytest
from published import A, B, leave
from publishing import (
    OTHER_HOST,
    begin,
    build,
    ended_owner,
    plan_of,
    provenance_of,
    publish,
    value_at,
    value_of,
)
from storage_events import recording
from stored import contents_of
from sweeps import EVERY, some
from system_calls import in_pairs, strace, system_calls

import statexchange as sx
from statexchange.errors import CorruptError, TargetExistsError, UnsafeError
from statexchange.processes import Owner
from statexchange.storage import files
from statexchange.storage.publish import open_build
from statexchange.storage.publish.directory_build import check_target

PUBLISHER = f"""
import json, sys
sys.path.insert(0, {os.path.dirname(publishing.__file__)!r})
from publishing import publish
from statexchange.errors import StateExchangeError
try:
    publish(sys.argv[1], int(sys.argv[2]), overwrite=len(sys.argv) < 4)
except StateExchangeError as error:
    print(json.dumps([type(error).__name__, getattr(error, "errno", None), error.path]))
"""


def run(out: Path, value: int, *more: str, trace: str = "") -> subprocess.CompletedProcess[str]:
    return strace(trace, PUBLISHER, out, value, *more)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a directory that holds only the target, so that a test sees what lies beside it."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


@pytest.fixture
def memory_place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_publishing_and_overwriting_leave_only_the_target(place: Path) -> None:
    publish(place / "out", 1)
    assert value_of(place / "out") == 1
    publish(place / "out", 2)
    assert value_of(place / "out") == 2
    publish(place / "deep" / "er" / "out", 3)
    assert sorted(os.listdir(place)) == ["deep", "out"]
    assert os.listdir(place / "deep" / "er") == ["out"]


def test_nothing_is_left_beside_a_target_whose_hidden_names_look_like_files_that_nfs_removes(place: Path) -> None:
    for value in (1, 2, 3):
        publish(place / "nfs-run", value)
    assert value_of(place / "nfs-run") == 3
    assert os.listdir(place) == ["nfs-run"]


def test_a_publisher_that_fails_leaves_directories_to_others(place: Path) -> None:
    with begin(place / "saves/first", 1) as first, begin(place / "saves/out", 2) as second:
        build(second, 2)
        first.abandon()
        second.commit(provenance_of(plan_of(2), 2))
    assert value_of(place / "saves/out") == 2
    assert os.listdir(place / "saves") == ["out"]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_the_umask_is_honoured(place: Path, mask: int) -> None:
    old = os.umask(mask)
    try:
        publish(place / "out", 1)
    finally:
        os.umask(old)
    modes = {p.stat().st_mode & 0o777 for p in (place / "out").iterdir()}
    assert (modes, (place / "out").stat().st_mode & 0o777) == ({0o666 & ~mask}, 0o777 & ~mask)


def test_an_existing_target_is_refused_or_replaced_as_asked(place: Path) -> None:
    publish(place / "out", 1)
    before = contents_of(place)
    with pytest.raises(TargetExistsError, match="--overwrite"):
        publish(place / "out", 2, overwrite=False)
    assert contents_of(place) == before
    (place / "empty").mkdir()
    publish(place / "empty", 3)
    assert value_of(place / "empty") == 3


@pytest.mark.parametrize("name", ["notes.txt", "model-00003-of-00003.safetensors", "sub", "link"])
def test_files_that_no_manifest_lists_are_never_overwritten(place: Path, name: str) -> None:
    publish(place / "out", 1)
    path = place / "out" / name
    if name == "sub":
        path.mkdir()
    elif name == "link":
        path.symlink_to("/etc")
    else:
        path.write_text("mine")
    before = contents_of(place)
    with pytest.raises(UnsafeError, match=f"{name!r} is not listed"):
        publish(place / "out", 2)
    assert contents_of(place) == before


@pytest.mark.parametrize("kind", ["file", "link", "other directory", "broken manifest"])
def test_a_foreign_target_is_never_overwritten(place: Path, kind: str) -> None:
    target = place / "out"
    if kind == "file":
        target.write_text("mine")
    elif kind == "link":
        (place / "real").mkdir()
        target.symlink_to(place / "real")
    else:
        target.mkdir()
        (target / ("x" if kind == "other directory" else "statexchange.json")).write_text("{")
    before = contents_of(place)
    with pytest.raises((UnsafeError, CorruptError)) as caught:
        publish(target, 2)
    assert str(caught.value.path).startswith(str(target))
    assert contents_of(place) == before


def test_a_failure_while_building_leaves_the_old_checkpoint(place: Path) -> None:
    publish(place / "out", 1)
    before = contents_of(place)
    with pytest.raises(KeyboardInterrupt), begin(place / "out", 2, overwrite=True) as publication:
        build(publication, 2)
        raise KeyboardInterrupt
    assert contents_of(place) == before


def test_a_second_publisher_is_refused_while_the_first_works(place: Path) -> None:
    with begin(place / "out", 1) as publication:
        build(publication, 1)
        before = contents_of(place)
        assert json.loads(run(place / "out", 2).stdout) == ["TargetExistsError", None, str(place / "out")]
        assert run(place / "other", 3).stdout == ""
        shutil.rmtree(place / "other")
        assert contents_of(place) == before
        with pytest.raises(TargetExistsError, match=rf"process {os.getpid()}\b"):
            publish(place / "out", 2)
        publication.commit(provenance_of(plan_of(1), 1))
    assert value_of(place / "out") == 1
    assert os.listdir(place) == ["out"]


def test_a_target_that_appears_before_the_commit_is_not_replaced(place: Path) -> None:
    for overwrite in (False, True):
        with begin(place / "out", 1, overwrite=overwrite) as publication:
            build(publication, 1)
            (place / "out").mkdir()
            (place / "out" / "precious").write_text("mine")
            with pytest.raises((TargetExistsError, UnsafeError)):
                publication.commit(provenance_of(plan_of(1), 1))
        assert contents_of(place) == {"out": None, "out/precious": b"mine"}
        shutil.rmtree(place / "out")


FAULTS = [("fsync", "EIO"), ("pwrite64", "ENOSPC"), ("fallocate", "ENOSPC"), ("ftruncate", "EIO"), ("renameat2", "EIO")]
FAULTS += [("mkdir", "EROFS"), ("mkdirat", "EACCES")]


@EVERY
def test_a_failing_write_is_an_error_with_errno_and_the_old_checkpoint_is_kept(every: int, sweep_path: Path) -> None:
    publish(sweep_path / "template" / "out", 1)
    shutil.copytree(sweep_path / "template", sweep_path / "trace")
    calls = Counter(system_calls(PUBLISHER, sweep_path / "trace" / "out", 2, log=sweep_path / "log"))
    cases = [(call, code, n + 1) for call, code in FAULTS for n in range(calls[call])]

    def check(case: tuple[str, str, int]) -> None:
        call, code, when = case
        own = sweep_path / f"{call}-{when}"
        shutil.copytree(sweep_path / "template", own)
        done = run(own / "out", 2, trace=f"inject={call}:error={code}:when={when}")
        assert done.returncode == 0, (case, done.stderr)
        if done.stdout:
            kind, number, where = json.loads(done.stdout)
            assert (kind, number) == ("StorageError", getattr(errno, code)), case
            assert where.startswith(str(own)), case
            exchanged = call == "fsync" and when == calls["fsync"]  # only its durability after a power cut is unknown
            assert value_of(own / "out") == (2 if exchanged else 1), case
        else:
            assert (call, when) == ("renameat2", calls["renameat2"]) or call == "rename", case
            assert "stay until the next publication" in done.stderr or not [p for p in os.listdir(own) if p != "out"], (
                case
            )
            assert value_of(own / "out") == 2, case
        if call != "renameat2":
            assert os.listdir(own) == ["out"], case
        publish(own / "out", 3)
        assert (value_of(own / "out"), os.listdir(own)) == (3, ["out"]), case

    in_pairs(check, some(cases, every))


def test_publishing_works_where_the_disk_cannot_reserve_room(place: Path) -> None:
    assert run(place / "out", 2, trace="inject=fallocate:error=EOPNOTSUPP").stdout == ""
    assert value_of(place / "out") == 2


def test_a_full_disk_is_noticed_before_anything_is_written(place: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can mount a small file system")
    script = f'mount -t tmpfs -o size=12k tmpfs {place} && "$@" && ls -A {place}'
    command = ["unshare", "-m", "sh", "-c", script, "sh", sys.executable, "-c", PUBLISHER, str(place / "out"), "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    kind, number, _ = json.loads(done.stdout)  # which shows that ls printed nothing
    assert (kind, number) == ("StorageError", errno.ENOSPC), done.stderr


def test_threads_create_files_on_tmpfs_at_once(memory_place: Path) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    names = [f"file{number}" for number in range(100)]
    try:
        with open_build(str(memory_place / "out"), "0" * 32, [*names, "last"], check=None) as opened:
            with ThreadPoolExecutor(8) as pool:
                for file in pool.map(lambda name: opened.create(name, 8, b""), names):
                    file.write(bytes(8), 0)
                    file.finish()
            opened.commit("last", b"{}")
    finally:
        sys.setswitchinterval(interval)
    assert sorted(os.listdir(memory_place / "out")) == sorted([*names, "last"])


def test_leftovers_of_dead_publishers_are_removed_and_similar_names_are_kept(place: Path) -> None:
    publish(place / "out", 2)
    leave(place, A, ended_owner(), "partial", "discarded", "replaced")
    leave(place, B, ended_owner())
    others = [
        ".out.x.partial",
        f".other.{'0' * 32}.{A}.partial",
        f".out.{'0' * 32}.partial",
        f".out.{'c' * 16}.discarded",
    ]
    # There is no record of these, so they are not ours.
    others += [f".out.{'0' * 32}.{'d' * 16}.partial", ".out.replacement", ".out.replaced"]
    for name in others:
        (place / name).mkdir()
        (place / name / "precious").write_text("mine")
    publish(place / "out", 1)
    assert sorted(os.listdir(place)) == sorted([*others, "out"])
    assert all((place / name / "precious").read_text() == "mine" for name in others)


def test_leftovers_of_another_host_need_resume(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    left = leave(place, A, OTHER_HOST, "partial")["partial"]
    before = contents_of(place)
    publish(place / "out", 1)
    assert {name: data for name, data in contents_of(place).items() if not name.startswith("out")} == before
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "--resume" in warning
    assert left.name in warning
    assert "process 2 on a-host-far-away" in warning
    publish(place / "out", 2, resume=True)
    assert (os.listdir(place), value_of(place / "out")) == (["out"], 2)


def test_finished_files_are_reused_from_a_dead_publisher_and_with_resume_from_another_host(place: Path) -> None:
    for owner in (ended_owner(), OTHER_HOST):
        with begin(place / "out", 1, reuse=True) as publication:
            build(publication, 1)
            (partial,) = [name for name in os.listdir(place) if name.endswith(".partial")]
            shutil.copytree(place / partial, place / "copy")
        (place / "copy").rename(place / partial.replace(partial.split(".")[3], A))
        (place / f".out.{A}.owner").write_text(json.dumps(owner.to_json()))
        names = [file.name for file in plan_of(1).files]
        if owner is OTHER_HOST:
            assert publish(place / "out", 1, reuse=True) == []
            assert len(os.listdir(place)) == 3
        assert publish(place / "out", 1, reuse=True, resume=True) == names
        assert (os.listdir(place), value_of(place / "out")) == (["out"], 1)
        shutil.rmtree(place / "out")


@pytest.mark.parametrize("links", [True, False])
def test_a_killed_publisher_leaves_a_record_of_its_process(place: Path, links: bool) -> None:
    refused = "" if links else "inject=symlinkat:error=EPERM"
    assert run(place / "out", 1, trace=f"{refused} inject=renameat2:signal=SIGKILL".strip()).returncode != 0
    (record,) = place.glob(".out.*.owner")
    text = os.readlink(record) if links else record.read_text()
    assert Owner.from_json(json.loads(text)).is_dead
    publish(place / "out", 2)
    assert (os.listdir(place), value_of(place / "out")) == (["out"], 2)


def test_an_interrupted_replacement_is_readable_and_the_next_publisher_completes_it(place: Path) -> None:
    """Between the two renames the target is absent, and the new checkpoint lies under a hidden name."""
    for owner in (ended_owner(), OTHER_HOST):
        publish(place / "template", 1)
        left = leave(place, A, owner, "partial", value=5)
        publish(place / "old", 4)
        (place / "old").rename(place / f".out.{A}.replaced")
        assert value_at(place / "out") == 5
        before = contents_of(place)
        with pytest.raises(TargetExistsError, match="--overwrite"):
            publish(place / "out", 2, overwrite=False)
        assert contents_of(place) == before
        with begin(place / "out", 2, overwrite=True):
            assert value_of(place / "out") == 5  # any next publisher completes it
            assert not left["partial"].exists()
        publish(place / "out", 2, resume=True)
        assert (os.listdir(place), value_of(place / "out")) == (["out"], 2)
        shutil.rmtree(place / "out")


def test_a_replacement_that_the_next_publisher_completes_is_durable_before_the_old_directory_is_removed(
    place: Path,
) -> None:
    left = leave(place, A, ended_owner(), "partial", "replaced")
    with recording() as events, begin(place / "out", 2, overwrite=True):
        assert not left["replaced"].exists()
    completed = events.index(("rename", str(place / "out")))
    assert events[completed + 1] == ("sync directory", str(place / "out"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_directories_of_another_user_are_left_alone(place: Path, tmp_path: Path) -> None:
    owner = ended_owner()
    for path in leave(place, A, owner, "partial").values():
        os.chown(path, 65534, 65534)
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").write_text("mine")
    (place / f".out.{B}.owner").write_text(json.dumps(owner.to_json()))
    (place / f".out.{'0' * 32}.{B}.partial").symlink_to(victim)
    (place / f".out.{'c' * 16}.owner").write_text(json.dumps(owner.to_json()))
    os.chown(place / f".out.{'c' * 16}.owner", 65534, 65534)
    before = contents_of(place)
    publish(place / "out", 1)
    assert {name: data for name, data in contents_of(place).items() if not name.startswith("out")} == before


SQUASHED = """
import ctypes, os, shutil, signal, sys
sys.path.insert(0, sys.argv[1])
import publishing
publishing.publish(sys.argv[2] + "/warm/out", 1)  # imports all that may not be readable afterwards
publishing.publish(sys.argv[2] + "/warm/out", 2)
publishing.value_at(sys.argv[2] + "/warm/out")
shutil.rmtree(sys.argv[2] + "/warm")
libc = ctypes.CDLL(None)
libc.setfsgid(65534)
libc.setfsuid(65534)
out = sys.argv[2] + "/out"
publishing.publish(out, 1)
publishing.publish(out, 2)
def killed():
    publishing.act_at(40, lambda: os.kill(os.getpid(), signal.SIGKILL))
    publishing.publish(out, 3)
assert publishing.in_child(killed) == "killed"
assert len(os.listdir(sys.argv[2])) > 1
publishing.publish(out, 4)
print(os.geteuid(), os.stat(out).st_uid, publishing.value_at(out), os.listdir(sys.argv[2]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is squashed")
def test_files_that_a_server_maps_to_another_user_are_overwritten() -> None:
    """Over NFS with root_squash, files that root makes belong to another user."""
    here = os.path.dirname(publishing.__file__)
    with tempfile.TemporaryDirectory() as open_to_all:  # pytest's directories are closed to other users
        os.chmod(open_to_all, 0o777)
        done = subprocess.run([sys.executable, "-c", SQUASHED, here, open_to_all], capture_output=True, text=True)
    assert done.stdout == "0 65534 4 ['out']\n", done.stderr


def test_links_in_the_old_checkpoint_are_not_followed(place: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    publish(place / "out", 1)
    (place / "out" / "model-00001-of-00002.safetensors").unlink()
    (place / "out" / "model-00001-of-00002.safetensors").symlink_to(tmp_path / "precious")
    publish(place / "out", 2)
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize("broken", ['{"files":5}', "[]", '{"files":[5]}', "{}"])
def test_a_broken_manifest_is_named_and_nothing_is_removed(place: Path, broken: str) -> None:
    publish(place / "out", 1)
    (place / "out" / "statexchange.json").write_text(broken)
    before = contents_of(place)
    with pytest.raises(CorruptError, match="manifest") as caught:
        publish(place / "out", 2)
    assert (caught.value.path, contents_of(place)) == (str(place / "out" / "statexchange.json"), before)


def test_more_files_than_descriptors_are_written_at_once(place: Path) -> None:
    tensors = {f"t{n}": bytes([n % 256]) * 8 for n in range(300)}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open_build(str(place / "out"), "0" * 32, [*tensors, "last"], check=None) as opened:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        try:
            files = [opened.create(name, 10, b"hd") for name in tensors]
            for file, data in zip(files, tensors.values(), strict=True):
                file.write(data, 2)
                file.finish()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        opened.commit("last", b"{}")
    assert {name: (place / "out" / name).read_bytes() for name in tensors} == {n: b"hd" + d for n, d in tensors.items()}


def test_an_export_writes_more_files_than_descriptors(place: Path) -> None:
    import torch

    tensors = {f"t{n}": torch.full((100,), float(n)) for n in range(150)}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    sx.export_checkpoint({"warm": torch.zeros(1)}, place / "warm")
    resource.setrlimit(resource.RLIMIT_NOFILE, (140, hard))
    try:
        report = sx.export_checkpoint(tensors, place / "out", max_shard_size=400)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(report.files) == 152
    opened = sx.open_checkpoint(place / "out")
    assert all((opened[name].read() == tensor.numpy()).all() for name, tensor in tensors.items())


def test_publishing_leaves_no_descriptor_open(place: Path) -> None:
    publish(place / "out", 1)
    before = sorted(os.listdir("/proc/self/fd"))
    publish(place / "out", 2)
    with pytest.raises(TargetExistsError):
        publish(place / "out", 3, overwrite=False)
    with begin(place / "out", 4, overwrite=True) as publication:
        build(publication, 4)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_target_that_is_replaced_while_it_is_checked_is_refused(place: Path) -> None:
    publish(place / "out", 1)

    def replaces_it(_: object) -> None:
        (place / "out").rename(place / "old")
        publish(place / "out", 2)

    with files.directory(os.fspath(place)) as fd, pytest.raises(TargetExistsError, match="meanwhile"):
        check_target(os.fspath(place / "out"), fd, replaces_it)
