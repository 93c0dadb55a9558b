"""The index of a save: layouts of parts, its text, what it refuses, and what it is compared with."""

from __future__ import annotations

import functools
import json
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sweeps import slow

import statexchange as sx
from statexchange.errors import CorruptError, IncompleteError, ReplacedError
from statexchange.formats.registry import open_source
from statexchange.report.verify import verify
from statexchange.sharding.sharding_spec import DimSplit, Placement, coordinate_of, local_boxes
from statexchange.sharding.shards import Box, Shard, full_box
from statexchange.storage.location import seal
from statexchange.storage.save_index import (
    Group,
    IndexedTensor,
    SavedLayout,
    SaveIndex,
    index_text,
    is_readable,
    layout_of,
)
from statexchange.storage.store import Budget, LocalStore
from statexchange.storage.tensorfile import IndexedState
from statexchange.testing import run_ranks

ROWS, WHOLE = SavedLayout(Placement((4,), (DimSplit(0),))), SavedLayout(Placement((), ()))
STATE = IndexedState({"tied": "w"}, ["rng"], {"opt": "torch.optim.AdamW"}, [])


def index_of(files: list[list[tuple[Group, int]]]) -> str:
    return index_text(files, [STATE], [0] * len(files), ["digest"] * len(files))


def an_index() -> str:
    """Return the index of a tensor in rows, and of one that the first file has."""
    rows, whole = Group(ROWS, [IndexedTensor("w", "F32", (8, 2))]), Group(WHOLE, [IndexedTensor("b", "BF16", (2,))])
    return index_of([[(rows, 0), (whole, 0)], [(rows, 1)], [(rows, 2)], [(rows, 3)]])


def parsed(text: str, num_files: int = 4) -> SaveIndex:
    return SaveIndex.parse(text, num_files, num_files, "save.json", Budget("save.json", len(text)))


@pytest.mark.parametrize("seed", range(40))
def test_a_layout_gives_the_boxes_that_it_was_made_of(seed: int) -> None:
    random_of = random.Random(seed)
    shape = tuple(random_of.randint(1, 12) for _ in range(random_of.randint(0, 3)))
    mesh = tuple(random_of.randint(1, 4) for _ in range(random_of.randint(0, 2)))
    splits = []
    for _ in mesh:
        splits.append(DimSplit(random_of.randrange(len(shape))) if shape and random_of.random() < 0.7 else None)
    for rank in range(torch.Size(mesh).numel()):
        boxes = tuple(box for box, _ in local_boxes(shape, mesh, coordinate_of(rank, mesh), splits))
        layout, coordinate = layout_of(shape, boxes)
        assert layout.boxes_at(shape, coordinate) == boxes
        assert SavedLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


def test_parts_of_one_grid_have_one_layout() -> None:
    layouts = {layout_of((8, 6), (Box((row, column), (2, 3)),)) for row in (0, 2, 4, 6) for column in (0, 3)}
    assert len(layouts) == 8  # each at a coordinate of its own
    assert {layout for layout, _ in layouts} == {SavedLayout(Placement((4, 2), (DimSplit(0), DimSplit(1))))}


def test_boxes_that_follow_from_no_mesh_are_listed() -> None:
    boxes = Box((1, 0), (2, 4)), Box((5, 0), (1, 4))
    assert layout_of((8, 4), boxes) == (SavedLayout(None, boxes), 0)


def test_an_index_is_read_as_it_was_written() -> None:
    index = parsed(an_index())
    listed = []
    for file in range(4):
        for tensor, layout, mesh_rank in index.parts_in(file):
            listed.append((file, tensor.name, index.boxes_at(layout, mesh_rank, tensor.shape)))
    assert listed == [
        (0, "w", (Box((0, 0), (2, 2)),)),
        (0, "b", (full_box((2,)),)),
        (1, "w", (Box((2, 0), (2, 2)),)),
        (2, "w", (Box((4, 0), (2, 2)),)),
        (3, "w", (Box((6, 0), (2, 2)),)),
    ]
    assert index.states == [STATE]


def test_an_index_grows_with_layouts_and_not_with_ranks_times_tensors() -> None:
    def size(num_tensors: int, ranks: int) -> int:
        # As of AdamW's state: ranks have dealt out the steps, which all of them hold, so that no two files are alike.
        layout = SavedLayout(Placement((ranks,), (DimSplit(0),)))
        rows = Group(layout, [IndexedTensor(f"{number}.w", "F32", (ranks, 2)) for number in range(num_tensors)])
        files = []
        for rank in range(ranks):
            steps = [IndexedTensor(f"{number}.step", "F32", ()) for number in range(rank, num_tensors, ranks)]
            files.append([(rows, rank), (Group(WHOLE, steps), 0)])
        return len(index_of(files))

    for_a_rank = (size(100, 512) - size(100, 256)) / 256
    assert for_a_rank < 48
    assert size(1000, 256) < 2000 * 40 + 256 * 48


def test_a_header_that_says_otherwise_is_refused() -> None:
    index = parsed(an_index())
    rows = {"w": Shard("w", "F32", (8, 2), (Box((2, 0), (2, 2)),))}
    facts = STATE.to_json()
    index.check(1, rows, facts, "f")
    with pytest.raises(CorruptError, match="boxes differ"):
        index.check(2, rows, facts, "f")
    for other in ({}, {**facts, "per_rank": 5}, {**facts, "aliases": [1]}):
        with pytest.raises(CorruptError):
            index.check(1, rows, other, "f")
    with pytest.raises(CorruptError, match="lacks this tensor"):
        index.check(1, {**rows, "b": Shard("b", "BF16", (2,), (full_box((2,)),))}, facts, "f")
    with pytest.raises(CorruptError, match="file has not"):
        index.check(1, {}, facts, "f")


def changed(change: Callable[[Any], object]) -> str:
    raw = json.loads(an_index())
    change(raw)
    return json.dumps(raw)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("[]", id="no-object"),
        pytest.param("{}", id="empty"),
        pytest.param(changed(lambda raw: raw.pop("files")), id="without-files"),
        pytest.param(changed(lambda raw: raw["files"].pop()), id="a-file-too-few"),
        pytest.param(changed(lambda raw: raw["ranks"].append(0)), id="a-rank-too-many"),
        pytest.param(changed(lambda raw: raw["values"].append("")), id="values-of-too-many-ranks"),
        pytest.param(changed(lambda raw: raw["ranks"].__setitem__(0, 1)), id="no-such-state"),
        pytest.param(changed(lambda raw: raw["files"][0][0].__setitem__(0, 2)), id="no-such-group"),
        pytest.param(changed(lambda raw: raw["files"][1][0].__setitem__(1, 4)), id="no-such-rank-of-the-mesh"),
        pytest.param(changed(lambda raw: raw["files"][1][0].append(0)), id="two-ranks-of-the-mesh"),
        pytest.param(changed(lambda raw: raw["files"][1][0].__setitem__(1, True)), id="a-bool"),
        pytest.param(changed(lambda raw: raw["groups"][0].__setitem__(0, 9)), id="no-such-layout"),
        pytest.param(changed(lambda raw: raw["groups"][0][1].append(-1)), id="no-such-tensor"),
        pytest.param(changed(lambda raw: raw["tensors"][0].__setitem__(1, "F33")), id="no-such-dtype"),
        pytest.param(changed(lambda raw: raw["tensors"][0].__setitem__(2, [2**62, 2**62])), id="a-huge-shape"),
        pytest.param(changed(lambda raw: raw["layouts"].__setitem__(0, [[2**40], [None]])), id="a-huge-mesh"),
        pytest.param(changed(lambda raw: raw["layouts"].__setitem__(0, [[1] * 99, [None] * 99])), id="many-axes"),
        pytest.param(changed(lambda raw: raw["layouts"].__setitem__(0, [[0], [None]])), id="an-empty-mesh"),
        pytest.param(changed(lambda raw: raw["layouts"].__setitem__(0, {"boxes": [[[0], [-1]]]})), id="no-box"),
        pytest.param(changed(lambda raw: raw["states"].__setitem__(0, 5)), id="no-state"),
        pytest.param(changed(lambda raw: raw["states"][0].__setitem__("per_rank", [1])), id="no-path"),
        pytest.param(changed(lambda raw: raw["states"][0].__setitem__("left_out", 7)), id="no-paths"),
    ],
)
def test_a_broken_index_is_refused(text: str) -> None:
    with pytest.raises(CorruptError, match="broken index"):
        parsed(text)


def test_a_layout_that_does_not_fit_its_tensor_is_refused() -> None:
    index = parsed(changed(lambda raw: raw["layouts"].__setitem__(0, [[4], [[7, 1]]])))
    with pytest.raises(CorruptError, match="does not fit shape"):
        list(index.boxes_at(0, 0, (8, 2)))


def test_boxes_without_end_are_refused_in_bounded_time() -> None:
    # Each of 4 ranks holds every fourth element of a dim of 2**16, in 2**14 pieces.
    pieces = SavedLayout(Placement((4,), (DimSplit(0, 1 << 14),)))
    group = Group(pieces, [IndexedTensor("w", "U8", (1 << 16,))])
    index = parsed(index_of([[(group, rank)] for rank in range(4)]))
    began = time.process_time()
    with pytest.raises(CorruptError, match="refused"):
        for size in range(1 << 15, 1 << 16):
            index.boxes_at(0, 0, (size,))
    assert time.process_time() - began < 20


def test_an_index_of_more_boxes_than_readers_accept_is_found_out() -> None:
    # The shorter its text, the more memory a box takes for each character once it is parsed.
    group = Group(SavedLayout(None, (Box((1,), (1,)),) * 600_000), [IndexedTensor("w", "U8", (2,))])
    assert is_readable(an_index(), 4, 4)
    assert not is_readable(index_of([[(group, 0)]]), 1, 1)


# Loads


def sharded(fill: float) -> dict[str, Any]:
    """Return a state with rows, a copy on all ranks, and random states."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard as Rows
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    rows = distribute_tensor(torch.arange(40.0).reshape(10, 4) + fill, mesh, [Rows(0)])
    state = {"w": rows, "copy": torch.full((3,), fill), "rng": sx.integrations.RandomState(), "step": int(fill)}
    if torch.distributed.get_world_size() != 4:
        del state["rng"]  # fits the number of ranks that saved it
    return state


def save_sharded(path: str) -> None:
    sx.save_checkpoint(sharded(7.0), path)


def opened_files() -> set[str]:
    """Return a set to which the names of tensor files are added that this process opens from now on."""
    opened: set[str] = set()

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith(".safetensors"):
            opened.add(str(arguments[0]).rpartition("/")[2])

    sys.addaudithook(note)
    return opened


def load_sharded(path: str) -> tuple[list[float], list[float], int, list[str]]:
    """Return what was loaded, and the files of tensors that this rank has opened."""
    opened = opened_files()
    state = sharded(0.0)
    sx.load_checkpoint(state, path, exclude="rng" if "rng" not in state else ())
    return state["w"].to_local().flatten().tolist(), state["copy"].tolist(), state["step"], sorted(opened)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_load_opens_the_files_whose_rows_it_reads(num_ranks: int, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    run_ranks(save_sharded, 4, backend="gloo", args=(path,))
    whole = (torch.arange(40.0) + 7).reshape(10, 4)
    names = [f"rank-{rank:05d}-of-00004.safetensors" for rank in range(4)]
    for rank, (rows, copy, step, opened) in enumerate(run_ranks(load_sharded, num_ranks, backend="gloo", args=(path,))):
        size = -(-10 // num_ranks)
        expected = whole[rank * size : (rank + 1) * size]
        assert (rows, copy, step) == (expected.flatten().tolist(), [7.0] * 3, 7)
        # Rows lie 3 in a file. The first file also has the copy, and on another number of ranks the plain values.
        of_rows = {row // 3 for row in range(rank * size, min(10, (rank + 1) * size))}
        assert opened == [names[number] for number in sorted({0, *of_rows})]


def trained(seed: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def save_trained(path: str) -> None:
    sx.save_checkpoint(trained(1), path)


def load_trained(path: str) -> tuple[bool, list[str]]:
    expected, state = trained(1), trained(2)
    opened = opened_files()
    sx.load_checkpoint(state, path)
    are_equal = [
        torch.equal(a.to_local(), b.to_local()) for a, b in zip(*map(parameters, (state, expected)), strict=True)
    ]
    return all(are_equal), sorted(opened)


def parameters(state: dict[str, Any]) -> list[Any]:
    moments = [of_one["exp_avg"] for of_one in state["optimizer"].state.values()]
    return [*state["model"].parameters(), *moments]


def test_each_rank_of_fsdp_with_adamw_opens_its_own_file_and_that_of_the_steps(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    run_ranks(save_trained, 4, backend="gloo", args=(str(path),))
    assert len(json.loads(json.loads((path / "save.json").read_text())["index"])["groups"]) == 2
    for rank, (is_equal, opened) in enumerate(run_ranks(load_trained, 4, backend="gloo", args=(str(path),))):
        assert is_equal
        assert opened == [f"rank-{number:05d}-of-00004.safetensors" for number in sorted({0, rank})]


def test_a_file_that_no_rank_needs_may_be_absent(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    run_ranks(save_sharded, 4, backend="gloo", args=(str(path),))
    (path / "rank-00003-of-00004.safetensors").unlink()
    state: dict[str, Any] = {"copy": torch.zeros(3), "step": 0}
    sx.load_checkpoint(state, path, include=["copy", "step"])
    assert (state["copy"].tolist(), state["step"]) == ([7.0] * 3, 7)
    state = {"w": torch.zeros(10, 4)}
    with pytest.raises(IncompleteError, match="file is missing") as caught:
        sx.load_checkpoint(state, path, include="w")
    assert caught.value.rank == 3
    assert state["w"].count_nonzero() == 0


@pytest.mark.parametrize("delay_s", [0, 0.3])
def test_a_save_that_is_replaced_before_its_files_are_opened_is_a_replaced_error(
    delay_s: float, in_many_layouts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "saved", tmp_path / "other"
    for place in (path, other):
        shutil.copytree(in_many_layouts, place)
    # An NFS client may show a directory for a while that another host has removed.
    monkeypatch.setattr(LocalStore, "is_shared", delay_s > 0)

    def replace() -> None:
        shutil.rmtree(path, ignore_errors=True)
        other.rename(path)

    with open_source(str(path), ranks=(1, 4)) as source:
        (path / "rank-00003-of-00004.safetensors").unlink()
        timer = threading.Timer(delay_s, replace)
        timer.start()
        if not delay_s:
            timer.join()
        with pytest.raises(ReplacedError):
            source.files[3]
        timer.join()


def with_index(path: Path, change: Callable[[Any], object]) -> None:
    manifest = json.loads((path / "save.json").read_text())
    del manifest["digest"]
    index = json.loads(manifest["index"])
    change(index)
    manifest["index"] = json.dumps(index)
    (path / "save.json").write_text(json.dumps(seal(manifest)))


def test_an_index_that_differs_from_a_file_is_an_error_that_names_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    run_ranks(save_sharded, 4, backend="gloo", args=(str(path),))
    names = [name for name, _, _ in json.loads(json.loads((path / "save.json").read_text())["index"])["tensors"]]
    with_index(path, lambda index: index["tensors"][names.index("copy")].__setitem__(2, [4]))
    with pytest.raises(CorruptError, match="differ") as caught:
        sx.load_checkpoint({"copy": torch.zeros(4)}, path, include="copy")
    assert caught.value.name == "copy"
    report = verify(str(path))
    assert "copy" in str(report.findings[0])


def test_a_save_without_an_index_is_read(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    run_ranks(save_sharded, 2, backend="gloo", args=(str(path),))
    manifest = json.loads((path / "save.json").read_text())
    del manifest["digest"], manifest["index"]
    (path / "save.json").write_text(json.dumps(seal(manifest)))
    state = {"w": torch.zeros(10, 4), "copy": torch.zeros(3), "step": 0}
    sx.load_checkpoint(state, path, include=["w", "copy", "step"])
    assert state["w"].tolist() == (torch.arange(40.0) + 7).reshape(10, 4).tolist()


# Hostile indexes


def whole_state() -> dict[str, torch.Tensor]:
    shapes = {"rows": (10, 4), "columns": (6, 4), "halves": (8, 4), "copy": (3,)}
    state = {}
    for number, (name, shape) in enumerate(shapes.items()):
        state[name] = 100.0 * (number + 1) + torch.arange(torch.Size(shape).numel()).reshape(shape)
    return state


def save_in_many_layouts(path: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor import Shard as Split

    mesh, halves = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    state: dict[str, Any] = dict(whole_state())
    state["rows"] = distribute_tensor(state["rows"], mesh, [Split(0)])
    state["tied"] = state["rows"]
    state["columns"] = distribute_tensor(state["columns"], mesh, [Split(1)])
    state["halves"] = distribute_tensor(state["halves"], halves, [Replicate(), Split(0)])
    sx.save_checkpoint(state, path)


@pytest.fixture(scope="module")
def in_many_layouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("layouts") / "saved"
    run_ranks(save_in_many_layouts, 4, backend="gloo", args=(str(path),))
    return path


def mutate(random_of: random.Random, index: Any) -> None:
    """Change one to three places of an index."""
    places: list[tuple[Any, Any, Any]] = []  # a container, a key in it, and the value there
    waiting = [index]
    while waiting:
        container = waiting.pop()
        for key, value in container.items() if isinstance(container, dict) else enumerate(container):
            places.append((container, key, value))
            if isinstance(value, dict | list):
                waiting.append(value)
    for _ in range(random_of.choice([1, 1, 2, 3])):
        container, key, value = random_of.choice(places)
        if isinstance(container, list) and key >= len(container):
            continue
        kind = random_of.choice(["value", "number", "shuffle", "repeat", "remove"])
        if kind == "number" and isinstance(value, int):
            container[key] = random_of.choice([0, 1, 2, 3, -1, 2**20, 2**40, True, None, value + 1, value * 2])
        elif kind == "shuffle" and isinstance(value, list):
            random_of.shuffle(value)
        elif kind == "repeat" and isinstance(value, list) and value:
            value.append(random_of.choice(value))
        elif kind == "remove":
            container.pop(key)
        else:
            container[key] = json.loads(json.dumps(random_of.choice(places)[2]))


@pytest.mark.parametrize("num_seeds", [150, slow(4000)], ids=["some", "all"])
def test_a_changed_index_gives_the_bits_that_were_saved_or_an_error(num_seeds: int, in_many_layouts: Path) -> None:
    manifest = (in_many_layouts / "save.json").read_text()
    num_loaded = 0
    for seed in range(num_seeds):
        (in_many_layouts / "save.json").write_text(manifest)
        with_index(in_many_layouts, functools.partial(mutate, random.Random(seed)))
        state = {name: torch.zeros_like(tensor) for name, tensor in whole_state().items()}
        try:
            sx.load_checkpoint(state, in_many_layouts, strict=False)
        except sx.StateExchangeError:
            continue
        num_loaded += 1
        for name, tensor in whole_state().items():
            assert torch.equal(state[name], tensor) or not state[name].any(), f"{name} of seed {seed}"
    assert 0 < num_loaded < num_seeds
