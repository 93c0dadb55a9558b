"""The copy of a job's newest save in shared memory: a restart loads it, or the disk's save, and never a mix."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path
from typing import Any

import pytest
from memory_copies import (
    BASE,
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
    start_rank,
)
from starting import LAUNCHED_AS
from stored import flip_bit
from sweeps import slow

import statexchange as sx
from statexchange.testing import run_ranks


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


def loads_on_hosts(directory: str, path: str, hosts: str) -> list[Any]:
    start_rank("hierarchical", directory, hosts)
    return load(path)


def ranks_by_host(saves: Path) -> dict[str, str]:
    """Return by host the ranks whose files it has."""
    return {host_of(copy): "".join(sorted(file.name[9] for file in copy.glob("rank-*"))) for copy in copies_of(saves)}


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
