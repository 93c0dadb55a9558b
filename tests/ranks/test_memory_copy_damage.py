"""A copy in shared memory that is damaged, incomplete or older than the save on disk."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_copies import (
    LAYOUT,
    ROWS,
    copies_of,
    copy_of,
    host_of,
    load,
    load_alone,
    loads_without_room,
    lose_host,
    origin_of,
    rows_of,
    run_on_hosts,
    save,
    saves_on_hosts,
)
from stored import flip_bit
from sweeps import EVERY, some

import statexchange as sx
from statexchange.testing import run_ranks


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
