"""The copy of a job's newest save in shared memory: a restart loads it, or the disk's save, and never a mix."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_jobs import ForkedJobs
from starting import LAUNCHED_AS, start
from stored import flip_bit
from sweeps import EVERY, slow, some
from warm_python import warm_python

import statexchange as sx
from statexchange.comm import bootstrap
from statexchange.storage import memory_directory
from statexchange.testing import run_ranks

BASE = Path(f"/dev/shm/statexchange-{os.getuid()}")
ROWS = 12
LAYOUT = {"w": {"dim": 0}}


def copies_of(saves: Path) -> list[Path]:
    """Return the directories in shared memory of one directory of saves."""
    found = []
    for record in BASE.glob("copy-*/copy.json"):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # of another test that runs meanwhile
            if os.path.dirname(json.loads(record.read_text())["path"]) == str(saves):
                found.append(record.parent)
    return found


def origin_of(copy: Path) -> str:
    """Return the name of the save of which this is a copy."""
    return os.path.basename(json.loads((copy / "copy.json").read_text())["path"])


@pytest.fixture
def saves(tmp_path: Path) -> Iterator[Path]:
    """Yield a directory of saves, whose copies in memory are removed afterwards."""
    path = tmp_path / "saves"
    yield path
    for copy in copies_of(path):
        shutil.rmtree(copy)


def rows_of(value: float) -> torch.Tensor:
    """Return this rank's rows of a tensor whose row r is filled with value + r."""
    rank, size = sx.get_rank(), sx.get_world_size()
    return (
        torch.full((ROWS // size, 1000), value)
        + torch.arange(rank * (ROWS // size), (rank + 1) * (ROWS // size))[:, None]
    )


def save(path: str, *steps: int, memory: bool = True, overwrite: bool = False, background: bool = False) -> None:
    checkpoints = sx.Checkpoints(path, memory=memory, layout=LAYOUT)
    for step in steps:
        state = {"w": rows_of(100.0 * step), "step": step}
        done: Any = checkpoints.save(state, step, overwrite=overwrite, background=background)
        if background:
            done.result()
    checkpoints.close()


def load(path: str, step: int | None = None) -> list[Any]:
    """Load; return the step, "memory" if a file was read there or "disk", and whether the values are of this step."""
    state = {"w": torch.full_like(rows_of(0.0), -1), "step": -1}
    report = sx.Checkpoints(path, memory=True, layout=LAYOUT).load(state, step)
    if report is None:
        return [None, "nowhere", True]
    right = torch.equal(state["w"], rows_of(100.0 * state["step"]))
    where = "memory" if report.num_in_memory else "disk"
    return [state["step"], where, right and report.step == state["step"]]


def with_memory_on_rank_0(path: str, call: str) -> str:
    saves = sx.Checkpoints(path, memory=sx.get_rank() == 0, layout=LAYOUT, stall_timeout_s=20.0)
    state = {"w": rows_of(1.0), "step": 1}
    calls: dict[str, Any] = {
        "save": lambda: saves.save(state, 2),
        "save in the background": lambda: saves.save(state, 2, background=True).result(),
        "load": lambda: saves.load(state),
        "delete": lambda: saves.delete(1),
    }
    with pytest.raises(sx.errors.StateExchangeError) as caught:
        calls[call]()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("backend", ["threads", slow("gloo")])
@pytest.mark.parametrize("is_there", [False, True], ids=["absent", "there"])
@pytest.mark.parametrize("call", ["save", "save in the background", "load", "delete"])
def test_ranks_that_differ_in_memory_get_an_error(call: str, is_there: bool, backend: str, saves: Path) -> None:
    if is_there:
        run_ranks(save, 2, args=(str(saves), 1))
    given = (str(saves), call)
    for text in run_ranks(with_memory_on_rank_0, 2, backend=backend, args=given, timeout_s=30):
        assert "memory" in text
    assert sx.Checkpoints(saves).steps() == [1] * is_there


def load_alone(path: Path, step: int | None = None) -> list[Any]:
    return run_ranks(load, 1, args=(str(path), step))[0]


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_any_number_of_ranks_loads_what_another_has_saved(before: int, after: int, saves: Path) -> None:
    run_ranks(save, before, args=(str(saves), 1, 2))
    assert run_ranks(load, after, args=(str(saves),)) == [[2, "memory", True]] * after
    assert list(map(origin_of, copies_of(saves))) == ["step-000000002"]


def test_the_disk_decides_what_there_is_to_load(saves: Path) -> None:
    run_ranks(save, 2, args=(str(saves), 1, 2))
    shutil.rmtree(saves / "step-000000002")
    assert run_ranks(load, 3, args=(str(saves),)) == [[1, "disk", True]] * 3
    run_ranks(save, 2, args=(str(saves), 3))
    assert list(map(origin_of, copies_of(saves))) == ["step-000000003"]


def test_delete_removes_the_copy_too(saves: Path) -> None:
    run_ranks(save, 2, args=(str(saves), 1, 2))
    run_ranks(lambda: sx.Checkpoints(saves, memory=True).delete(1), 2)
    assert list(map(origin_of, copies_of(saves))) == ["step-000000002"]
    (saves / "step-000000002" / "notes").write_text("mine")
    with pytest.raises(sx.errors.UnsafeError, match="notes"):
        sx.Checkpoints(saves, memory=True).delete(2)
    assert list(map(origin_of, copies_of(saves))) == ["step-000000002"]  # as the save is there still
    (saves / "step-000000002" / "notes").unlink()
    run_ranks(lambda: sx.Checkpoints(saves, memory=True).delete(2), 2)
    assert copies_of(saves) == []
    assert load_alone(saves) == [None, "nowhere", True]
    with pytest.raises(FileNotFoundError, match="step 2"):
        sx.Checkpoints(saves, memory=True).delete(2)


def damage_on_disk(step: Path) -> None:
    """Flip bits in the tensors of a save, and in no header."""
    for file in step.glob("rank-*"):
        for at in range(-ROWS * 1000, -1, 4000):
            flip_bit(file, at)


def test_tensors_are_read_from_memory_alone(saves: Path) -> None:
    run_ranks(save, 2, args=(str(saves), 7))
    damage_on_disk(saves / "step-000000007")
    for size in (1, 2, 3):
        assert run_ranks(load, size, args=(str(saves),)) == [[7, "memory", True]] * size


def start_rank(backend: str, directory: str, hosts: str | None = None) -> None:
    """Start as a rank of a backend; in a hierarchical world copies, too, are made as if on several hosts."""
    start(backend, directory, hosts)
    memory_directory.host_identity = bootstrap.host_identity


def saves_on(backend: str, directory: str, path: str, *steps: int) -> None:
    start_rank(backend, directory)
    save(path, *steps)


def loads_on(backend: str, directory: str, path: str) -> list[Any]:
    start_rank(backend, directory)
    return load(path)


def run_on(function: Any, backend: str, world_size: int, saves: Path, *args: Any) -> list[Any]:
    store = saves.with_name(f"store-{secrets.token_hex(4)}")
    store.mkdir()
    given = (backend, str(store), str(saves), *args)
    return run_ranks(function, world_size, backend=LAUNCHED_AS[backend], args=given, timeout_s=120)


def test_processes_of_another_launcher_load_the_copy(saves: Path) -> None:
    run_on(saves_on, "shm", 2, saves, 5)
    assert run_on(loads_on, "mpi", 3, saves) == [[5, "memory", True]] * 3


@pytest.mark.slow
def test_processes_of_every_launcher_load_the_copy(saves: Path) -> None:
    for step, backend in enumerate(("mpi", "gloo", "shm"), 1):
        run_on(saves_on, backend, 2, saves, step)
        for size, other in ((3, "mpi"), (2, "gloo"), (3, "shm")):
            assert run_on(loads_on, other, size, saves) == [[step, "memory", True]] * size


# Several hosts, which share one /dev/shm here


def saves_on_hosts(directory: str, path: str, hosts: str, *steps: int) -> None:
    start_rank("hierarchical", directory, hosts)
    save(path, *steps)


def loads_on_hosts(directory: str, path: str, hosts: str) -> list[Any]:
    start_rank("hierarchical", directory, hosts)
    return load(path)


def run_on_hosts(function: Any, hosts: str, saves: Path, *args: Any) -> list[Any]:
    store = saves.with_name(f"store-{secrets.token_hex(4)}")
    store.mkdir()
    given = (str(store), str(saves), hosts, *args)
    return run_ranks(function, len(hosts), backend="processes", args=given, timeout_s=120)


def host_of(copy: Path) -> str:
    return str(json.loads((copy / "copy.json").read_text())["host"])


def ranks_by_host(saves: Path) -> dict[str, str]:
    """Return by host the ranks whose files it has."""
    return {host_of(copy): "".join(sorted(file.name[9] for file in copy.glob("rank-*"))) for copy in copies_of(saves)}


def lose_host(saves: Path, host: str) -> None:
    (lost,) = [copy for copy in copies_of(saves) if host_of(copy) == host]
    shutil.rmtree(lost)


def test_each_host_keeps_the_files_of_the_one_before_it_and_any_one_may_be_lost(saves: Path) -> None:
    run_on_hosts(saves_on_hosts, "abc", saves, 1, 2)
    assert ranks_by_host(saves) == {"a": "02", "b": "01", "c": "12"}
    damage_on_disk(saves / "step-000000002")  # nothing is read there but headers
    assert run_on_hosts(loads_on_hosts, "abc", saves) == [[2, "memory", True]] * 3
    lose_host(saves, "b")
    assert run_on_hosts(loads_on_hosts, "abc", saves) == [[2, "memory", True]] * 3  # a new host of this name
    assert (
        run_on_hosts(loads_on_hosts, "dacc", saves) == [[2, "memory", True]] * 4
    )  # other hosts and another world size


def loads_without_room(directory: str, path: str, hosts: str) -> list[Any]:
    start_rank("hierarchical", directory, hosts)
    memory_directory.memory_left = lambda: (0, "in this test")
    return load(path)


def test_what_there_is_no_room_for_is_read_from_disk(saves: Path) -> None:
    run_on_hosts(saves_on_hosts, "abc", saves, 2)
    lose_host(saves, "b")
    found = run_on_hosts(loads_without_room, "abc", saves)
    assert found == [[2, "memory", True], [2, "disk", True], [2, "memory", True]]


def test_files_that_a_load_has_fetched_do_not_stay(saves: Path) -> None:
    run_on_hosts(saves_on_hosts, "abbbbb", saves, 2)  # no other test here has six ranks
    lose_host(saves, "a")
    assert run_on_hosts(loads_on_hosts, "abbbbb", saves) == [[2, "memory", True]] * 6
    (kept,) = copies_of(saves)
    assert {file.parent for file in BASE.glob("*copy-*/rank-*-of-00006.*")} == {kept}


def test_what_no_host_has_is_read_from_disk(saves: Path) -> None:
    run_on_hosts(saves_on_hosts, "abc", saves, 2)
    lose_host(saves, "a")
    lose_host(saves, "b")
    assert ranks_by_host(saves) == {"c": "12"}
    read = run_on_hosts(loads_on_hosts, "abc", saves)
    assert read == [[2, "disk", True], [2, "memory", True], [2, "memory", True]]
    lose_host(saves, "c")
    assert run_on_hosts(loads_on_hosts, "abc", saves) == [[2, "disk", True]] * 3


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("aab", "abb"), ("abba", "baab"), ("aabc", "cb"), ("abcd", "bbdd")])
def test_hosts_in_any_order_and_number_load_the_copy(before: str, after: str, saves: Path) -> None:
    run_on_hosts(saves_on_hosts, before, saves, 1)
    assert run_on_hosts(loads_on_hosts, after, saves) == [[1, "memory", True]] * len(after)


def test_a_flipped_bit_on_another_host_is_found(saves: Path) -> None:
    run_on_hosts(saves_on_hosts, "aab", saves, 1)
    for copy in copies_of(saves):
        if host_of(copy) == "b":
            flip_bit(copy / "rank-00002-of-00003.safetensors", -9)
    lose_host(saves, "a")
    assert run_on_hosts(loads_on_hosts, "bac", saves) == [[1, "disk", True]] * 3


def test_a_save_in_the_background_is_copied_too(saves: Path) -> None:
    run_ranks(saves_in_the_background, 2, args=(str(saves),))
    assert run_ranks(load, 2, args=(str(saves),)) == [[4, "memory", True]] * 2


def test_a_copy_is_written_over_the_one_before(saves: Path) -> None:
    """New pages of memory take several times as long, and a host needs room for one copy."""
    names = [f"rank-0000{rank}-of-00002.safetensors" for rank in range(2)]
    found = []
    for step in (1, 2):
        run_ranks(saves_one, 2, args=(str(saves), step))
        found.append([(copy_of(saves) / name).stat().st_ino for name in names])
    assert found[0] == found[1]
    assert run_ranks(load, 2, args=(str(saves),)) == [[2, "memory", True]] * 2


def saves_one(path: str, step: int) -> None:
    """Save a step, of which alone the save stays."""
    sx.Checkpoints(path, 1, memory=True, layout=LAYOUT).save({"w": rows_of(100.0 * step), "step": step}, step)


def saves_in_the_background(path: str) -> None:
    save(path, 3, 4, background=True)


# Copies that are not loaded


def copy_of(saves: Path) -> Path:
    (copy,) = copies_of(saves)
    return copy


@pytest.mark.parametrize("readers", [1, 2, 3])
def test_one_flipped_bit_is_named_and_the_save_on_disk_is_loaded(
    readers: int, saves: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_ranks(save, 2, args=(str(saves), 7))
    name = "rank-00001-of-00002.safetensors"
    flip_bit(copy_of(saves) / name, -9)
    assert run_ranks(load, readers, args=(str(saves),)) == [[7, "disk", True]] * readers
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "bytes differ from their digest" in warning
    assert "'w'" in warning
    assert name in warning
    assert copies_of(saves) == []  # it is not tried again


@EVERY
def test_a_flipped_bit_of_a_tensor_is_found_and_any_other_one_does_not_matter(every: int, saves: Path) -> None:
    run_ranks(save, 1, args=(str(saves), 7))
    copy, kept = copy_of(saves), saves.with_name("kept")
    shutil.copytree(copy, kept)
    where = set()
    for file in sorted(kept.iterdir()):
        size = file.stat().st_size
        header = size - ROWS * 1000 * 4 if file.suffix == ".safetensors" else size
        places = [*range(0, header, 7), *range(header, size, 5000)]
        for at in some(places, 2 * every):
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(kept, copy)
            flip_bit(copy / file.name, at)
            step, place, is_right = load_alone(saves)
            assert (step, is_right) == (7, True), (file.name, at)
            # A load reads headers on disk, and needs no record.
            assert place == ("memory" if file.suffix == ".json" or at < header else "disk"), (file.name, at)
            where.add(place)
    assert where == {"memory", "disk"}


def test_a_broken_copy_of_a_broken_save_is_an_error(saves: Path) -> None:
    run_ranks(save, 2, args=(str(saves), 7))
    name = "rank-00001-of-00002.safetensors"
    for folder in (copy_of(saves), saves / "step-000000007"):
        flip_bit(folder / name, -9)
    state = {"w": torch.zeros(ROWS, 1000), "step": -1}
    with pytest.raises(sx.errors.CorruptError, match="digest") as caught:
        sx.Checkpoints(saves, memory=True).load(state)
    assert (caught.value.name, caught.value.path) == ("w", str(saves / "step-000000007" / name))
    assert "before this, the load from memory ended so: bytes differ" in str(caught.value)
    assert state["step"] == -1


def loads_broken(path: str) -> tuple[str, bool]:
    state = {"w": rows_of(-1.0), "z": torch.full((50,), -1.0), "step": -1}
    with pytest.raises(sx.errors.CorruptError) as caught:
        sx.Checkpoints(path, memory=True, layout=LAYOUT).load(state)
    return str(caught.value), any(torch.equal(state["w"], rows_of(value)) for value in (-1.0, 700.0))


def test_no_rows_of_a_broken_copy_come_into_the_state(saves: Path) -> None:
    """Three ranks read the boxes of two in part, and one in the copy is broken; on disk another tensor is."""
    run_ranks(saves_two, 2, args=(str(saves),))
    for rank, file in enumerate(sorted(copy_of(saves).glob("rank-*"))):
        first_row = torch.full((1000,), 700.0 + rank * ROWS / 2).numpy().tobytes()
        flip_bit(file, file.read_bytes().index(first_row) + 9)
    for file in (saves / "step-000000007").glob("rank-*"):
        data = file.read_bytes()
        if Z in data:
            flip_bit(file, data.index(Z) + 9)
    for text, is_old_or_saved in run_ranks(loads_broken, 3, args=(str(saves),)):
        assert "before this, the load from memory ended so: bytes differ" in text
        assert is_old_or_saved


Z = torch.full((50,), 1.25).numpy().tobytes()


def saves_two(path: str) -> None:
    """Save rows, and a tensor that all ranks have."""
    state = {"w": rows_of(700.0), "z": torch.full((50,), 1.25), "step": 7}
    sx.Checkpoints(path, memory=True, layout=LAYOUT).save(state, 7)


def test_a_copy_that_is_written_over_during_a_load_is_not_taken(saves: Path) -> None:
    run_ranks(save, 1, args=(str(saves), 7))
    name = copy_of(saves) / "rank-00000-of-00001.safetensors"
    state = {"w": rows_of(-1.0), "step": -1}
    report = sx.Checkpoints(saves, memory=True, layout=LAYOUT).load(state, on_progress=lambda *_: os.utime(name))
    assert report is not None
    assert (report.step, report.num_in_memory) == (7, 0)
    assert torch.equal(state["w"], rows_of(700.0))


def test_a_copied_directory_of_saves_uses_the_copies_and_removes_broken_ones(saves: Path, tmp_path: Path) -> None:
    run_ranks(save, 1, args=(str(saves), 7))
    other = tmp_path / "copied"
    shutil.copytree(saves, other)
    assert load_alone(other) == [7, "memory", True]
    flip_bit(copy_of(saves) / "rank-00000-of-00001.safetensors", -9)
    assert load_alone(other) == [7, "disk", True]
    assert copies_of(saves) == []


def test_a_load_that_fetches_files_removes_no_copy_to_make_room(saves: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    run_on_hosts(saves_on_hosts, "abc", other, 1)
    run_on_hosts(saves_on_hosts, "abc", saves, 2)
    lose_host(saves, "b")
    try:
        found = run_on_hosts(loads_without_room, "abc", saves)
        assert found == [[2, "memory", True], [2, "disk", True], [2, "memory", True]]
        assert sorted(map(host_of, copies_of(saves))) == ["a", "c"]
        assert sorted(map(host_of, copies_of(other))) == ["a", "b", "c"]
    finally:
        for copy in copies_of(other):
            shutil.rmtree(copy)


def test_a_file_that_the_copy_lacks_is_read_from_disk(saves: Path) -> None:
    run_ranks(save, 2, args=(str(saves), 7))
    (copy_of(saves) / "rank-00000-of-00002.safetensors").unlink()
    assert run_ranks(load, 2, args=(str(saves),)) == [[7, "disk", True], [7, "memory", True]]


def test_a_copy_that_is_cut_off_is_not_read(saves: Path) -> None:
    run_ranks(save, 2, args=(str(saves), 7))
    name = copy_of(saves) / "rank-00000-of-00002.safetensors"
    os.truncate(name, name.stat().st_size - 1)
    assert run_ranks(load, 2, args=(str(saves),)) == [[7, "disk", True], [7, "memory", True]]
    os.truncate(name, 0)
    assert run_ranks(load, 3, args=(str(saves),))[0] == [7, "disk", True]


def test_an_error_of_the_users_state_is_that_of_a_load_from_disk(saves: Path, caplog: pytest.LogCaptureFixture) -> None:
    sx.Checkpoints(saves, memory=True).save({"a": torch.zeros(9), "b": torch.ones(9)}, 7)
    shared = torch.zeros(9)
    states: list[dict[str, Any]] = [{"a": shared, "b": shared}, {"a": torch.zeros(8)}, {"a": torch.zeros(9), "c": 1}]
    for state in states:
        texts = []
        for memory in (False, True):
            with pytest.raises(sx.errors.StateExchangeError) as caught:
                sx.Checkpoints(saves, memory=memory).load(dict(state))
            texts.append(f"{type(caught.value).__name__} {caught.value}")
        assert texts[0] == texts[1]
    assert caplog.text == ""
    assert list(map(origin_of, copies_of(saves))) == ["step-000000007"]  # which is not to blame


def test_a_damaged_file_on_disk_is_named_and_the_copy_of_others_stays(saves: Path) -> None:
    run_ranks(save, 2, args=(str(saves), 7))
    name = "rank-00001-of-00002.safetensors"
    (copy_of(saves) / name).unlink()
    flip_bit(saves / "step-000000007" / name, -9)
    with pytest.raises(sx.errors.CorruptError, match="digest") as caught:
        sx.Checkpoints(saves, memory=True).load({"w": torch.zeros(ROWS, 1000), "step": -1})
    assert caught.value.path == str(saves / "step-000000007" / name)
    assert len(copies_of(saves)) == 1


def saves_without_memory(path: str, step: int, overwrite: bool) -> None:
    save(path, step, memory=False, overwrite=overwrite)


def test_a_copy_that_is_older_than_the_save_on_disk_is_not_loaded(saves: Path) -> None:
    run_ranks(save, 2, args=(str(saves), 7))
    run_ranks(saves_without_memory, 2, args=(str(saves), 8, False))
    assert run_ranks(load, 2, args=(str(saves),)) == [[8, "disk", True]] * 2
    assert load_alone(saves, 7) == [7, "memory", True]


def test_a_copy_of_a_save_that_was_overwritten_is_not_loaded(saves: Path) -> None:
    run_ranks(save, 2, args=(str(saves), 7))
    run_ranks(saves_without_memory, 1, args=(str(saves), 7, True))
    assert run_ranks(load, 2, args=(str(saves),)) == [[7, "disk", True]] * 2
    run_ranks(overwrites, 2, args=(str(saves),))
    assert run_ranks(load, 2, args=(str(saves),)) == [[7, "memory", True]] * 2


def overwrites(path: str) -> None:
    save(path, 7, overwrite=True)


def test_a_directory_that_was_made_again_or_copied_has_no_copy(saves: Path) -> None:
    run_ranks(save, 1, args=(str(saves), 7))
    copied = saves.with_name("copied")
    shutil.copytree(saves, copied)
    shutil.rmtree(copied / "step-000000007")
    assert load_alone(copied) == [None, "nowhere", True]
    shutil.rmtree(saves)
    assert load_alone(saves) == [None, "nowhere", True]
    saves.mkdir()
    assert load_alone(saves) == [None, "nowhere", True]
    run_ranks(save, 1, args=(str(saves), 1))
    assert load_alone(saves) == [1, "memory", True]
    assert len(copies_of(saves)) == 1  # that of the old directory is removed


def test_the_copy_is_of_the_save_that_was_made_last(saves: Path) -> None:
    run_ranks(save, 1, args=(str(saves), 7, 5))
    assert load_alone(saves) == [7, "disk", True]
    assert load_alone(saves, 5) == [5, "memory", True]


def goes_back(path: str, step: int, to: int, memory: bool) -> None:
    """Load the save of a step, and save another one."""
    checkpoints = sx.Checkpoints(path, memory=memory, layout=LAYOUT)
    checkpoints.load({"w": rows_of(0.0), "step": -1}, step)
    checkpoints.save({"w": rows_of(100.0 * to), "step": to}, to)
    checkpoints.close()


def goes_on(path: str, step: int) -> None:
    """Load the newest save, and save another one over that of this step."""
    checkpoints = sx.Checkpoints(path, keep=1, layout=LAYOUT)
    checkpoints.load({"w": rows_of(0.0), "step": -1})
    checkpoints.save({"w": rows_of(100.0 * step), "step": step}, step, overwrite=True)
    checkpoints.close()


@pytest.mark.parametrize("memory", [False, True])
def test_the_copy_of_a_save_that_the_job_left_behind_is_not_loaded(memory: bool, saves: Path) -> None:
    run_ranks(save, 1, args=(str(saves), 5, 9))
    assert load_alone(saves) == [9, "memory", True]
    run_ranks(goes_back, 1, args=(str(saves), 5, 6, memory))
    assert load_alone(saves) == [6, "memory" if memory else "disk", True]
    assert load_alone(saves, 9) == [9, "disk" if memory else "memory", True]
    # Not even when the disk has neither that save any more nor the one that went back.
    for step in (7, 8, 9):
        run_ranks(goes_on, 1, args=(str(saves), step))
    assert load_alone(saves) == [9, "disk", True]


# What jobs leave behind


@pytest.mark.parametrize("text", ["x", "[1]", "{}", None])
def test_a_copy_whose_record_is_broken_is_removed_and_a_stray_file_ignored(
    text: str | None, saves: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    run_ranks(save, 1, args=(str(other), 1))
    broken = copy_of(other)
    stray = BASE / f"copy-{secrets.token_hex(16)}"
    stray.write_text("no directory")
    try:
        if text is None:
            (broken / "copy.json").unlink()
        else:
            (broken / "copy.json").write_text(text)
        assert load_alone(other) == [1, "memory", True]
        run_ranks(save, 1, args=(str(saves), 1))
        assert load_alone(saves) == [1, "memory", True]
        assert not broken.exists()  # nobody else would ever remove it
        assert load_alone(other) == [1, "disk", True]
    finally:
        stray.unlink()
        shutil.rmtree(broken, ignore_errors=True)


def test_leftovers_of_jobs_that_are_gone_are_removed(saves: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    run_ranks(save, 2, args=(str(gone), 7))
    run_ranks(save, 2, args=(str(saves), 7))
    ended = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, check=True)
    left = ended.stdout.split()
    assert len(left) == 2
    assert all(os.path.exists(path) for path in left)
    shutil.rmtree(gone)
    run_ranks(save, 1, args=(str(saves), 8))
    assert copies_of(gone) == []
    assert not any(os.path.exists(path) for path in left)


LEAVES = """
import os
from statexchange.storage.memory_directory import begin_copy, begin_fetch
for build in (begin_fetch(10), begin_copy("/nowhere/step-000000009", "1" * 16, {})):
    with open(f"{build.building_path}/rank-00000-of-00001.safetensors", "w"):
        print(build.building_path, flush=True)
os._exit(0)
"""


# Kills

JOBS = """
from statexchange.testing import run_ranks
from test_memory_copy import save

def job(path, ranks, step):
    run_ranks(save, ranks, args=(path, step), timeout_s=60)

serve(job, lambda path: not path.startswith("/dev/shm/") or "copy-" in path)
"""


@pytest.fixture(scope="module")
def jobs() -> Iterator[ForkedJobs]:
    with ForkedJobs(JOBS) as started:
        yield started


@pytest.mark.parametrize("every", [30, slow(5), pytest.param(1, marks=pytest.mark.long)], ids=["some", "more", "all"])
@pytest.mark.timeout(3600)
def test_a_job_that_is_killed_at_any_call_goes_on_from_its_newest_save(
    every: int, jobs: ForkedJobs, tmp_path: Path
) -> None:
    number = 0
    where = set()
    try:
        traces = [str(tmp_path / name) for name in ("trace", "trace 2", "trace 3")]
        for trace in traces:
            jobs.run(trace, 2, 1)
        calls = jobs.fewest_calls(*((trace, 2, 2) for trace in traces))
        print(f"{len(calls)} calls")
        for number in some(range(1, len(calls) + 1), every):
            path = tmp_path / str(number)
            jobs.run(str(path), 2, 1)
            if jobs.run(str(path), 2, 2, kill_at=number) is not None:  # the ranks made fewer calls than those counted
                assert number > len(calls) - 10, number
                continue
            newest = max(int(found.name[5:]) for found in path.glob("step-*"))
            found = run_ranks(load, 3, args=(str(path),))
            assert [one[0] for one in found] == [newest] * 3, number
            assert all(one[2] for one in found), number
            where.add((newest, found[0][1]))
            jobs.run(str(path), 2, 3)  # no clean-up by hand
            assert load_alone(path) == [3, "memory", True], number
            names = sorted(entry.name for entry in copy_of(path).iterdir())
            assert names == ["copy.json", *(f"rank-0000{rank}-of-00002.safetensors" for rank in (0, 1))], number
    finally:
        for path in tmp_path.iterdir():
            for copy in copies_of(path):
                shutil.rmtree(copy)
    assert {(1, "memory"), (2, "disk")} <= where, number


# In a namespace with a /dev/shm of its own


def run_in_namespace(script: str, program: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a program after the commands of `script` in a mount namespace of its own."""
    enter = f"""
import ctypes, subprocess
clone_newns = 0x00020000
assert ctypes.CDLL(None).unshare(clone_newns) == 0
subprocess.run(["sh", "-ec", "mount --make-rprivate /; {script}"], check=True)
"""
    command = [warm_python(), "-c", enter + program, *args]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])}
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=100, check=False)


@pytest.mark.usefixtures("mounts")
def test_without_room_there_is_no_copy_which_is_logged_once(saves: Path) -> None:
    program = """
import logging, sys
logging.basicConfig(format="%(message)s")
from test_memory_copy import load, save
save(sys.argv[1], 1, 2, 3)
print(*load(sys.argv[1]))
"""
    done = run_in_namespace("mount -t tmpfs -o size=32k tmpfs /dev/shm", program, str(saves))
    assert done.stdout == "3 disk True\n", done.stderr
    assert done.stderr.count("the newest save is not kept in memory, only on disk, because of rank 0") == 1
    assert "are free" in done.stderr


@pytest.mark.usefixtures("mounts")
def test_copies_of_jobs_that_have_ended_make_room(saves: Path) -> None:
    program = """
import os, shutil, sys
from test_memory_copy import copies_of, load, save
from pathlib import Path
paths = [f"{sys.argv[1]}-{number}" for number in range(3)]
pid = os.fork()
if pid == 0:
    save(paths[0], 1)
    save(paths[1], 1)
    os._exit(0)
os.waitpid(pid, 0)
save(paths[2], 1)
print(*[load(path)[1] for path in paths])
"""
    done = run_in_namespace("mount -t tmpfs -o size=130k tmpfs /dev/shm", program, str(saves))
    assert done.stdout == "disk disk memory\n", done.stderr


@pytest.mark.usefixtures("mounts")
@pytest.mark.parametrize("owner", ["others may write", "another user"])
def test_a_directory_of_another_user_is_refused(owner: str) -> None:
    program = """
import logging, os, sys
logging.basicConfig(format="%(message)s")
from test_memory_copy import load, save
os.chdir("/mnt")
if sys.argv[1] == "another user":
    save("/mnt/first", 1)  # which imports all, as this user may not see the interpreter's files
    load("/mnt/first")
    os.setgid(12345)
    os.setuid(12345)
save("/mnt/saves", 1)
print(*load("/mnt/saves"))
"""
    uid, mode = ("12345", "0755") if owner == "another user" else ("0", "0777")
    script = (
        "mount -t tmpfs tmpfs /dev/shm; mount -t tmpfs tmpfs /mnt; chmod 1777 /mnt /dev/shm; "
        f"mkdir -m {mode} /dev/shm/statexchange-{uid}; chown 54321 /dev/shm/statexchange-{uid}"
    )
    done = run_in_namespace(script, program, owner)
    assert done.stdout == "1 disk True\n", done.stderr
    assert "the newest save is not kept in memory" in done.stderr
    assert "refused: " in done.stderr


@pytest.mark.usefixtures("mounts")
def test_a_save_that_fails_leaves_the_copy_of_the_save_before() -> None:
    program = """
import torch
import statexchange as sx
from test_memory_copy import load, save
save("/mnt/saves", 1)
try:
    sx.Checkpoints("/mnt/saves", memory=True).save({"w": torch.zeros(1 << 20)}, 2)
except OSError as error:
    print(type(error).__name__)
print(*load("/mnt/saves"))
"""
    script = "mount -t tmpfs tmpfs /dev/shm; mount -t tmpfs -o size=1m tmpfs /mnt"
    done = run_in_namespace(script, program)
    assert done.stdout == "StorageError\n1 memory True\n", done.stderr
