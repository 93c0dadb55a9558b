"""After any event of a publication the whole old directory or the whole new one is there."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from published import A, leave
from publishing import (
    begin,
    build,
    ended_owner,
    plan_of,
    provenance_of,
    publish,
    run_sweep,
    save,
    value_at,
    value_of,
)
from storage_events import act_at, armed, recording
from sweeps import slow, steps

from statexchange.checkpoint.publication import Draft, Provenance, Publication, index_name
from statexchange.errors import InvalidArgumentError, StorageError, TargetExistsError, UnsafeError
from statexchange.formats.registry import open_source
from statexchange.sharding.options import ExportOptions
from statexchange.sharding.pieces import SpecPieces
from statexchange.sharding.plan import FilePlan, Plan, RankShards, TensorPlan, plan_merge
from statexchange.sharding.sharding_spec import DimSplit, Placement, ShardingSpec
from statexchange.sharding.shards import Box, Piece, Shard, full_box
from statexchange.storage.files import digest
from statexchange.storage.publish import open_build


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a directory that holds only the target, so that a test sees what lies beside it."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


# Sweeps: something happens at each storage event of a publisher


@pytest.mark.parametrize("step", steps(12))
@pytest.mark.parametrize("exchange", [True, False])
def test_after_a_kill_at_any_event_the_old_or_new_checkpoint_is_there_and_the_next_publisher_cleans_up(
    sweep_path: Path, exchange: bool, step: int
) -> None:
    found = run_sweep("sweep_kills", sweep_path, exchange=exchange, before=True, step=step)
    assert found["points"] * step > 60
    assert found["old"]
    assert found["new"]
    assert step > 1 or ("gap" in found) == (not exchange)  # some kill hit the moment between the two renames


@pytest.mark.parametrize("step", steps(24))
def test_a_first_publisher_killed_at_any_event_leaves_nothing_that_looks_finished(sweep_path: Path, step: int) -> None:
    found = run_sweep("sweep_kills", sweep_path, before=False, step=step)
    assert found["points"] * step > 45
    assert found["absent"]


@pytest.mark.parametrize("step", steps(24))
def test_after_a_kill_at_any_event_a_second_run_gives_the_same_directory(sweep_path: Path, step: int) -> None:
    found = run_sweep("sweep_kills", sweep_path, before=True, reuse=True, step=step)
    assert {"0 kept", "2 kept"} <= found.keys()


@pytest.mark.parametrize("step", steps(24))
@pytest.mark.parametrize("exchange", [True, False])
def test_after_an_interrupt_at_any_event_nothing_is_left_or_the_next_publisher_removes_it(
    sweep_path: Path, exchange: bool, step: int
) -> None:
    found = run_sweep("sweep_interrupts", sweep_path, exchange=exchange, before=True, step=step)
    assert found["nothing left"] > found.get("something left", 0)  # only if the interrupt came during its clean-up


@pytest.mark.parametrize("step", steps(40))
@pytest.mark.parametrize("what", ["checkpoint", slow("save")])
@pytest.mark.parametrize(("before", "overwrite"), [(False, False), (True, True)])
@pytest.mark.parametrize(("elsewhere", "exchange"), [(False, True), (True, True), (True, False)])
def test_of_two_publishers_one_wins_at_whatever_event_the_second_begins(
    sweep_path: Path, before: bool, overwrite: bool, elsewhere: bool, exchange: bool, what: str, step: int
) -> None:
    """Never do both fail, and never has one the other's bytes under its manifest."""
    options = {"before": before, "overwrite": overwrite, "elsewhere": elsewhere, "what": what, "step": step}
    assert run_sweep("sweep_races", sweep_path, exchange=exchange, **options)["points"]


@pytest.mark.parametrize("step", steps(30))
@pytest.mark.parametrize("exchange", [True, False])
def test_a_directory_of_a_user_keeps_the_name_that_it_gets_at_any_event_of_a_replacement(
    sweep_path: Path, exchange: bool, step: int
) -> None:
    found = run_sweep("sweep_strangers", sweep_path, exchange=exchange, step=step)
    assert found["points"] * step > 60
    assert step > 1 or ("replaced" in found) == (not exchange)  # one event is between the two renames


def take_over(place: Path) -> None:
    """Give the directory under construction another name, as a publisher does with resume=True."""
    (partial,) = place.glob(".out.*.partial")
    partial.rename(place / "taken over")


def remove_target(place: Path) -> None:
    shutil.rmtree(place / "out")


@pytest.mark.parametrize(
    ("replaces", "step", "act", "reason"),
    [
        (False, "rename", take_over, "treated this one as dead"),
        (True, "exchange", take_over, "treated this one as dead"),
        (True, "exchange", remove_target, "removed the target meanwhile"),
    ],
    ids=["taken over", "taken over beside an old one", "the old one removed"],
)
def test_a_commit_without_what_it_renames_is_refused_with_the_reason(
    place: Path, replaces: bool, step: str, act: Callable[[Path], None], reason: str
) -> None:
    if replaces:
        publish(place / "out", 1)
    act_at(1, lambda: act(place), only=step)
    with pytest.raises(TargetExistsError, match=f"another publisher {reason}"):
        publish(place / "out", 2)
    assert not armed


# Power cuts: what a step needs is durable before it

RECORD = ["symlink", "sync directory"]
FOLDER = ["mkdir", "sync directory"]
NEW_FILE = ["create", "sync", "link", "unlink", "sync directory"]
OUTPUT = ["create", "write", "sync", *NEW_FILE]  # and its receipt
REMOVED = ["unlink", "rename", "unlink"]  # to the name of what is being removed, where nothing lies


def changes(events: list[tuple[str, str]]) -> list[str]:
    """Return the steps of those storage events that change something."""
    return [step for step, _ in events if step not in ("open", "open directory", "list")]


@pytest.mark.parametrize("replaces", [False, True])
def test_a_save_is_durable_before_it_gets_its_name_and_the_name_before_the_old_save_is_removed(
    place: Path, replaces: bool
) -> None:
    if replaces:
        save(place / "out", 1)
    with recording() as events:
        save(place / "out", 2)
    ended = ["rename", "sync directory"]
    if replaces:
        ended = ["exchange", "sync directory", *REMOVED, *2 * ["unlink"], "rmdir"]
    assert changes(events) == [*RECORD, *FOLDER, *NEW_FILE, *NEW_FILE, "sync directory", *ended, "unlink"]
    built, named = [path for step, path in events if step == "sync directory"][-2:]
    assert (os.path.splitext(built)[1], named) == (".partial", str(place / "out"))


def test_a_checkpoint_is_durable_before_it_gets_its_name(place: Path) -> None:
    with recording() as events:
        publish(place / "out", 1)
    ended = [*2 * ["unlink"], "sync directory", "rename", "sync directory", "unlink"]  # the receipts; the record
    assert changes(events) == [*RECORD, *FOLDER, *2 * OUTPUT, *3 * NEW_FILE, *ended]


def test_paths_that_cannot_be_targets_are_refused(place: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="not a path"):
        begin("/", 1)
    with pytest.raises(StorageError, match="cannot"):
        begin("/proc/nowhere/out", 1)
    (place / "file").write_text("")
    with pytest.raises((StorageError, OSError)):
        begin(place / "file" / "out", 1)
    with pytest.raises(InvalidArgumentError, match="197 bytes"):
        begin(place / ("x" * 197), 1)


def test_a_target_where_no_files_can_be_made_is_a_storage_error_with_the_reason() -> None:
    with pytest.raises(StorageError, match="proc is") as caught:
        begin("/proc/nothing", 1)
    assert (caught.value.path, caught.value.errno) == ("/proc", errno.ENOENT)


@pytest.mark.parametrize("name", ["x" * 196, "ü" * 98])
def test_a_target_may_have_any_name_that_leaves_room_for_hidden_ones(place: Path, name: str) -> None:
    similar = f"{name[:-1]}y"
    with begin(place / similar, 3) as other:
        for value in (1, 2):
            publish(place / name, value)
            assert value_of(place / name) == value
        build(other, 3)
        other.commit(provenance_of(plan_of(3), 3))
    assert value_of(place / similar) == 3
    assert sorted(os.listdir(place)) == sorted([name, similar])


def test_leftovers_of_a_long_name_are_read_and_taken_over(place: Path) -> None:
    name = "x" * 196
    left = leave(place, A, ended_owner(), "partial", "replaced", value=5, stem=f".{name}")
    assert value_at(place / name) == 5
    publish(place / name, 2)
    assert not any(path.exists() for path in left.values())
    assert (os.listdir(place), value_of(place / name)) == ([name], 2)


def test_a_file_of_the_longest_name_is_taken_over_when_it_is_finished(place: Path) -> None:
    files = {"y" * 255: b"1", "z" * 255: b"2"}
    with pytest.raises(KeyError), open_build(str(place / "out"), "0" * 32, [*files, "last"], check=None) as opened:
        for name, data in files.items():
            file = opened.create(name, 1, b"")
            file.write(data, 0)
            file.finish()
            opened.record(name, [name])
        assert opened.finished == {name: [name] for name in files}
        raise KeyError
    assert os.listdir(place) == []


def test_the_index_is_named_after_the_files() -> None:
    shards = [Shard(name, "U8", (8,), (full_box((8,)),)) for name in "ab"]
    for pattern, name in [
        ("m{suffix}.safetensors", "m.safetensors.index.json"),
        ("x{suffix}.fp16.safetensors", "x.fp16.safetensors.index.json"),
    ]:
        options = ExportOptions(max_shard_size=8, filename_pattern=pattern)
        assert index_name(plan_merge([RankShards(0, shards)], options)) == name
    assert index_name(plan_merge([RankShards(0, shards)])) is None


@pytest.mark.slow
def test_a_manifest_that_readers_would_refuse_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    # 4.5 million boxes that follow from no mesh: their text would take more memory than a reader may use.
    pieces = (Piece(Box((1234,), (1,)), 0, 0),) * 4_505_600
    tensor = TensorPlan("w", "w", "U8", (4096,), 0, pieces)
    plan = Plan((FilePlan("model.safetensors", (tensor,)),), {}, "0" * 32)
    with pytest.raises(UnsafeError, match="4,505,600 boxes"):
        Publication(tmp_path / "out", Draft(plan, source="export"))
    assert list(tmp_path.iterdir()) == []


def test_what_is_published_of_thousands_of_ranks_is_read(tmp_path: Path) -> None:
    # FSDP over 1,024 ranks and tensor parallelism over 8 of the same dim, in 9 shapes, as a model has.
    placement = Placement((1024, 8), (DimSplit(0, 8), DimSplit(0)))
    specs = [ShardingSpec(f"w{rows}", "U8", (8192 * rows,), placement) for rows in range(1, 10)]
    plan = plan_merge([RankShards(rank, specs if rank == 0 else ()) for rank in range(8192)])
    zeros = {rows: bytes.fromhex(digest(bytes(rows))) for rows in range(1, 10)}
    with Publication(tmp_path / "out", Draft(plan, source="export")) as publication:
        for file in plan.files:
            publication.create(file).finish()
        publication.commit({f"w{rows}": Provenance(range(8192), zeros[rows] * 8192) for rows in zeros})
    with open_source(str(tmp_path / "out")) as source:
        assert source.problems == ()
        (stored,) = source.files[0].tensors["w9"].byte_ranges
        region = Box((9 * 5,), (9 * 3,))
        assert list(stored.parts.within(region)) == [(Box((9 * at,), (9,)), zeros[9].hex()) for at in (5, 6, 7)]


def test_placements_that_readers_would_refuse_are_listed(tmp_path: Path) -> None:
    # More ranks than a reader takes for a mesh, most of which have no part.
    placement = Placement((1 << 21,), (DimSplit(0),))
    plan = Plan(
        (FilePlan("m.safetensors", (TensorPlan("w", "w", "U8", (20000,), 0, SpecPieces((20000,), placement, 0)),)),),
        {},
        "0" * 32,
    )
    with Publication(tmp_path / "out", Draft(plan, source="export")) as publication:
        publication.create(plan.files[0]).finish()
        publication.commit({"w": Provenance(range(20000), bytes.fromhex(digest(b"0")) * 20000)})
    with open_source(str(tmp_path / "out")) as source:
        assert source.problems == ()
        (stored,) = source.files[0].tensors["w"].byte_ranges
        assert len(stored.parts) == 20000
