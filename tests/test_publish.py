"""Publishing a directory on a real disk: the old one or the new one is there, whole, whatever happens."""

import errno
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from test_workspace import each_call, in_pairs, strace, system_calls

from statexchange.checkpoint.publish import BoxFact, Publication, index_name, write_manifest
from statexchange.errors import CorruptError, InvalidArgumentError, StorageError, TargetExistsError, UnsafeError
from statexchange.layout.plan import Holding, Plan, PlanOptions, plan_merge
from statexchange.layout.shards import Shard, full_box
from statexchange.sources import open_checkpoint, open_source
from statexchange.storage import files
from statexchange.storage.tensorfile import digest

NO_EXCHANGE = "inject=renameat2:error=EINVAL"


def plan_of(value: int) -> Plan:
    shards = [Shard(f"{name}{value}", "U8", (5000,), (full_box((5000,)),)) for name in "ab"]
    return plan_merge([Holding(0, shards)], PlanOptions(max_shard_bytes=5000))


def build(publication: Publication, plan: Plan, value: int) -> None:
    data = bytes([value]) * 5000
    for file in plan.files:
        opened = publication.create(file)
        for tensor in file.tensors:
            files.pwrite_all(opened.fd, data, opened.offset_of(tensor), opened.path)
        opened.finish()
    facts = {tensor.name: [BoxFact(0, digest(data))] for file in plan.files for tensor in file.tensors}
    write_manifest(publication, plan, facts, travelling={"config.json": b"{}"}, source="test")


def publish(out: str | Path, value: int, *, overwrite: bool = True) -> None:
    """Publish a directory of two files that are full of `value`."""
    plan = plan_of(value)
    with Publication(out, plan.digest, overwrite=overwrite) as publication:
        build(publication, plan, value)
        publication.commit()


PUBLISHER = f"""
import json, sys
from statexchange.checkpoint.publish import BoxFact, Publication, write_manifest
from statexchange.errors import StateExchangeError
from statexchange.layout.plan import Holding, PlanOptions, plan_merge
from statexchange.layout.shards import Shard, full_box
from statexchange.storage import files
from statexchange.storage.tensorfile import digest
Plan = Path = object
{"".join(map(inspect.getsource, (plan_of, build, publish)))}
try:
    publish(sys.argv[1], int(sys.argv[2]), overwrite=len(sys.argv) < 4)
except StateExchangeError as error:
    print(json.dumps([type(error).__name__, getattr(error, "errno", None), error.path]))
"""


def value_of(out: Path) -> int:
    """What the directory is full of, after reading and checking all of it."""
    checkpoint = open_checkpoint(out)
    (data,) = {checkpoint[name].read().tobytes() for name in checkpoint}
    known = {extent.digest for _, tensor in open_source(out).shards() for extent in tensor.extents}
    assert known == {digest(data)}
    assert sorted(checkpoint) == [f"a{data[0]}", f"b{data[0]}"]
    listed = json.loads((out / "statexchange.json").read_text())["files"]
    assert sorted(os.listdir(out)) == sorted([*listed, "statexchange.json"])
    return data[0]


def run(out: Path, value: int, *more: str, trace: str = "") -> subprocess.CompletedProcess[str]:
    return strace(trace, PUBLISHER, out, value, *more)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory for the target alone, to see what lies beside it."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


def test_publishing_and_overwriting_leave_nothing_else(place: Path) -> None:
    publish(place / "out", 1)
    assert value_of(place / "out") == 1
    publish(place / "out", 2)
    assert value_of(place / "out") == 2
    publish(place / "deep" / "er" / "out", 3)
    assert sorted(os.listdir(place)) == ["deep", "out"]
    assert os.listdir(place / "deep" / "er") == ["out"]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_the_umask_is_honoured(place: Path, mask: int) -> None:
    old = os.umask(mask)
    try:
        publish(place / "out", 1)
    finally:
        os.umask(old)
    modes = {p.stat().st_mode & 0o777 for p in (place / "out").iterdir()}
    assert (modes, (place / "out").stat().st_mode & 0o777) == ({0o666 & ~mask}, 0o777 & ~mask)


def unchanged(place: Path) -> dict[str, bytes]:
    return {str(p.relative_to(place)): p.read_bytes() if p.is_file() else b"" for p in place.rglob("*")}


def test_an_existing_target_is_refused_or_replaced_as_asked(place: Path) -> None:
    publish(place / "out", 1)
    before = unchanged(place)
    with pytest.raises(TargetExistsError, match="--overwrite"):
        publish(place / "out", 2, overwrite=False)
    assert unchanged(place) == before
    (place / "empty").mkdir()
    publish(place / "empty", 3)
    assert value_of(place / "empty") == 3


@pytest.mark.parametrize("stranger", ["notes.txt", "model-00003-of-00003.safetensors", "sub", "link"])
def test_what_no_manifest_lists_is_never_overwritten(place: Path, stranger: str) -> None:
    publish(place / "out", 1)
    path = place / "out" / stranger
    if stranger == "sub":
        path.mkdir()
    elif stranger == "link":
        path.symlink_to("/etc")
    else:
        path.write_text("mine")
    before = unchanged(place)
    with pytest.raises(UnsafeError, match=f"{stranger!r} is not listed"):
        publish(place / "out", 2)
    assert unchanged(place) == before


@pytest.mark.parametrize("kind", ["file", "link", "other directory", "broken manifest"])
def test_a_target_that_is_none_of_ours_is_never_overwritten(place: Path, kind: str) -> None:
    target = place / "out"
    if kind == "file":
        target.write_text("mine")
    elif kind == "link":
        (place / "real").mkdir()
        target.symlink_to(place / "real")
    else:
        target.mkdir()
        (target / ("x" if kind == "other directory" else "statexchange.json")).write_text("{")
    before = unchanged(place)
    with pytest.raises((UnsafeError, CorruptError)) as caught:
        publish(target, 2)
    assert str(caught.value.path).startswith(str(target))
    assert unchanged(place) == before


def test_a_failure_while_building_leaves_the_old(place: Path) -> None:
    publish(place / "out", 1)
    before = unchanged(place)
    plan = plan_of(2)
    with pytest.raises(KeyboardInterrupt), Publication(place / "out", plan.digest, overwrite=True) as publication:
        build(publication, plan, 2)
        raise KeyboardInterrupt
    assert unchanged(place) == before


def test_a_second_publisher_is_refused_while_the_first_works(place: Path) -> None:
    plan = plan_of(1)
    with Publication(place / "out", plan.digest) as publication:
        build(publication, plan, 1)
        before = unchanged(place)
        assert json.loads(run(place / "out", 2).stdout) == ["TargetExistsError", None, str(place / "out")]
        assert run(place / "other", 3).stdout == ""
        shutil.rmtree(place / "other")
        assert unchanged(place) == before
        with pytest.raises(TargetExistsError, match="another process"):
            publish(place / "out", 2)
        publication.commit()
    assert value_of(place / "out") == 1
    assert os.listdir(place) == ["out"]


def test_a_target_that_appears_meanwhile_is_not_lost(place: Path) -> None:
    plan = plan_of(1)
    for overwrite in (False, True):
        with Publication(place / "out", plan.digest, overwrite=overwrite) as publication:
            build(publication, plan, 1)
            (place / "out").mkdir()
            (place / "out" / "precious").write_text("mine")
            with pytest.raises((TargetExistsError, UnsafeError)):
                publication.commit()
        assert unchanged(place) == {"out": b"", "out/precious": b"mine"}
        shutil.rmtree(place / "out")


def test_killed_at_any_write_the_old_or_the_new_is_there_and_the_next_publisher_cleans_up(place: Path) -> None:
    publish(place / "trace" / "out", 1)
    calls = system_calls(PUBLISHER, place / "trace" / "out", 2, log=place / "log")
    assert Counter(calls)["fsync"] >= 9
    assert Counter(calls)["renameat2"] == 4  # config, index, manifest; and the exchange

    def check(point: tuple[str, int]) -> None:
        own = place / f"{point[0]}-{point[1]}"
        shutil.copytree(place / "template", own)
        done = run(own / "out", 2, trace=f"inject={point[0]}:signal=SIGKILL:when={point[1]}")
        assert done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL), point
        assert value_of(own / "out") in (1, 2), point
        publish(own / "out", 3)
        assert (value_of(own / "out"), os.listdir(own)) == (3, ["out"]), point

    publish(place / "template" / "out", 1)
    in_pairs(check, each_call(calls))


def test_a_first_publisher_killed_at_any_write_leaves_nothing_that_looks_finished(place: Path) -> None:
    calls = system_calls(PUBLISHER, place / "trace" / "out", 2, log=place / "log")

    def check(point: tuple[str, int]) -> None:
        own = place / f"{point[0]}-{point[1]}"
        run(own / "out", 2, trace=f"inject={point[0]}:signal=SIGKILL:when={point[1]}")
        if (own / "out").exists():
            assert value_of(own / "out") == 2, point
        publish(own / "out", 3)
        assert (value_of(own / "out"), os.listdir(own)) == (3, ["out"]), point

    in_pairs(check, each_call(calls)[::3])


def test_without_exchange_two_renames_do_and_a_kill_between_them_is_completed(place: Path) -> None:
    publish(place / "template" / "out", 1)
    shutil.copytree(place / "template", place / "trace")
    calls = system_calls(PUBLISHER, place / "trace" / "out", 2, log=place / "log", inject=NO_EXCHANGE)
    assert (value_of(place / "trace" / "out"), os.listdir(place / "trace")) == (2, ["out"])
    gap = []

    def check(point: tuple[str, int]) -> None:
        own = place / f"{point[0]}-{point[1]}"
        shutil.copytree(place / "template", own)
        run(own / "out", 2, trace=f"{NO_EXCHANGE} inject={point[0]}:signal=SIGKILL:when={point[1]}")
        if not (own / "out").exists():
            gap.append(point)
        with pytest.raises(TargetExistsError):
            publish(own / "out", 3, overwrite=False)
        assert value_of(own / "out") in (1, 2), point
        publish(own / "out", 3)
        assert (value_of(own / "out"), os.listdir(own)) == (3, ["out"]), point

    in_pairs(check, [point for point in each_call(calls) if point[0].startswith(("rename", "unlink", "rmdir"))][4:])
    assert gap  # the sweep did hit the moment between the two renames


def publish_on(out: str | Path, value: int) -> None:
    """As `publish`, but what a killed one has finished is kept."""
    plan = plan_of(value)
    data = bytes([value]) * 5000
    facts = {tensor.name: [BoxFact(0, digest(data))] for file in plan.files for tensor in file.tensors}
    with Publication(out, plan.digest, overwrite=True, resume=True) as publication:
        for file in plan.files:
            if file.name not in publication.finished:
                opened = publication.create(file)
                for tensor in file.tensors:
                    files.pwrite_all(opened.fd, data, opened.offset_of(tensor), opened.path)
                opened.finish()
                publication.record(file.name, value)
        print(len(publication.finished), flush=True)
        write_manifest(publication, plan, facts, travelling={}, source="test")
        publication.commit()


RESUMER = (
    PUBLISHER[: PUBLISHER.index("try:")] + inspect.getsource(publish_on) + "publish_on(sys.argv[1], int(sys.argv[2]))"
)


def test_killed_at_any_write_a_second_run_goes_on_to_the_same_directory(place: Path) -> None:
    publish(place / "trace" / "out", 1)
    calls = system_calls(RESUMER, place / "trace" / "out", 2, log=place / "log")
    publish(place / "template" / "out", 1)
    kept = []

    def check(point: tuple[str, int]) -> None:
        own = place / f"{point[0]}-{point[1]}"
        shutil.copytree(place / "template", own)
        strace(f"inject={point[0]}:signal=SIGKILL:when={point[1]}", RESUMER, own / "out", 2)
        assert value_of(own / "out") in (1, 2), point
        kept.extend(p.name for p in own.glob(".out.*.partial/*.finished"))
        publish_on(own / "out", 2)
        assert (value_of(own / "out"), os.listdir(own)) == (2, ["out"]), point

    in_pairs(check, each_call(calls))
    assert kept


FAULTS = [("fsync", "EIO"), ("pwrite64", "ENOSPC"), ("fallocate", "ENOSPC"), ("ftruncate", "EIO"), ("renameat2", "EIO")]
FAULTS += [("mkdir", "EROFS"), ("mkdirat", "EACCES")]


def test_a_failing_write_is_an_error_with_errno_and_the_old_stays(place: Path) -> None:
    publish(place / "template" / "out", 1)
    shutil.copytree(place / "template", place / "trace")
    calls = Counter(system_calls(PUBLISHER, place / "trace" / "out", 2, log=place / "log"))
    cases = [(call, code, n + 1) for call, code in FAULTS for n in range(calls[call])]
    cases.remove(("mkdir", "EROFS", 1))  # filelock's, of a directory that is there

    def check(case: tuple[str, str, int]) -> None:
        call, code, when = case
        own = place / f"{call}-{when}"
        shutil.copytree(place / "template", own)
        done = run(own / "out", 2, trace=f"inject={call}:error={code}:when={when}")
        assert done.returncode == 0, (case, done.stderr)
        if done.stdout:
            kind, number, where = json.loads(done.stdout)
            assert (kind, number) == ("StorageError", getattr(errno, code)), case
            assert where.startswith(str(own)), case
            exchanged = call == "fsync" and when == calls["fsync"]  # only whether it would survive a power cut is open
            assert value_of(own / "out") == (2 if exchanged else 1), case
        else:
            assert (call, when) == ("renameat2", calls["renameat2"]) or call == "rename", case
            assert "any more stays" in done.stderr or not [p for p in os.listdir(own) if p != "out"], case
            assert value_of(own / "out") == 2, case
        if call != "renameat2":
            assert os.listdir(own) == ["out"], case
        publish(own / "out", 3)
        assert (value_of(own / "out"), os.listdir(own)) == (3, ["out"]), case

    in_pairs(check, cases)


def test_a_disk_that_cannot_reserve_room_is_written_all_the_same(place: Path) -> None:
    assert run(place / "out", 2, trace="inject=fallocate:error=EOPNOTSUPP").stdout == ""
    assert value_of(place / "out") == 2


def test_a_full_disk_is_noticed_before_anything_is_written(place: Path) -> None:
    if os.geteuid():
        return
    script = f'mount -t tmpfs -o size=12k tmpfs {place} && "$@" && ls -A {place}'
    command = ["unshare", "-m", "sh", "-c", script, "sh", sys.executable, "-c", PUBLISHER, str(place / "out"), "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    kind, number, _ = json.loads(done.stdout)  # and ls printed nothing
    assert (kind, number) == ("StorageError", errno.ENOSPC), done.stderr


PARTIAL = ".out." + "0" * 32 + ".partial"


def test_leftovers_are_removed_and_look_alikes_are_not(place: Path) -> None:
    (place / PARTIAL).mkdir()
    (place / PARTIAL / "model.safetensors").write_text("half")
    (place / (".out." + "1" * 16 + ".discarded")).mkdir()
    others = [".out.x.partial", ".other." + "0" * 32 + ".partial", "out." + "0" * 32 + ".partial"]
    for name in others:
        (place / name).mkdir()
    publish(place / "out", 1)
    assert sorted(os.listdir(place)) == sorted([*others, "out"])


def test_a_link_that_poses_as_a_leftover_leads_nowhere(place: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").write_text("mine")
    (place / PARTIAL).symlink_to(victim)
    publish(place / "out", 1)
    assert (victim / "precious").read_text() == "mine"
    (place / "out" / "model-00001-of-00002.safetensors").unlink()
    (place / "out" / "model-00001-of-00002.safetensors").symlink_to(victim / "precious")
    publish(place / "out", 2)
    assert (victim / "precious").read_text() == "mine"


@pytest.mark.parametrize("plant", ["link", "file", "directory of another user"])
def test_what_poses_as_a_replacement_is_refused(place: Path, plant: str) -> None:
    publish(place / "out", 1)
    publish(place / "victim", 5)
    path = place / ".out.replacement"
    if plant == "link":
        path.symlink_to(place / "victim")
    elif plant == "file":
        path.write_text("")
    else:
        path.mkdir()
        if os.geteuid():
            return
        os.chown(path, 65534, 65534)
    before = unchanged(place)
    with pytest.raises(UnsafeError, match="not what we had put there") as caught:
        publish(place / "out", 2)
    assert caught.value.path == str(path)
    assert unchanged(place) == before


def test_no_place_for_a_checkpoint(place: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="not a place"):
        Publication("/", "0" * 32)
    with pytest.raises(StorageError, match="cannot"):
        Publication("/proc/nowhere/out", "0" * 32)
    (place / "file").write_text("")
    with pytest.raises((StorageError, OSError)):
        Publication(place / "file" / "out", "0" * 32)


def test_the_index_is_named_after_the_files() -> None:
    shards = [Shard(name, "U8", (8,), (full_box((8,)),)) for name in "ab"]
    for pattern, name in [
        ("m{suffix}.safetensors", "m.safetensors.index.json"),
        ("x{suffix}.fp16.safetensors", "x.fp16.safetensors.index.json"),
    ]:
        options = PlanOptions(max_shard_bytes=8, filename_pattern=pattern)
        assert index_name(plan_merge([Holding(0, shards)], options)) == name
    assert index_name(plan_merge([Holding(0, shards)])) is None
