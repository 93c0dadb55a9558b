"""A save writes boxes that ranks hold with equal bytes once; what differs is each rank's own and comes back to it."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import statexchange as sx
from statexchange.exchange import save
from statexchange.testing import run_ranks


def copies_of(path: str | Path) -> Counter[str]:
    """Return how many rank files of a save have each tensor."""
    counts: Counter[str] = Counter()
    for file in sorted(Path(path).glob("rank-*.safetensors")):
        with safe_open(file, "pt") as opened:
            counts.update(opened.keys())
    return counts


def saved(state: Any, path: str, *, background: bool = False, **options: Any) -> sx.SaveReport:
    if background:
        return sx.save_checkpoint(state, path, background=True, **options).result(60)
    return sx.save_checkpoint(state, path, **options)


def filled(state: Any) -> Any:
    """Return a state of the same structure, in which all tensors have the value 9."""
    if isinstance(state, dict):
        return {key: filled(item) for key, item in state.items()}
    return torch.full_like(state, 9)


def assert_comes_back(state: Any, path: str, **options: Any) -> None:
    loaded = filled(state)
    sx.load_checkpoint(loaded, path, **options)
    assert repr(loaded) == repr(state)


def save_with_one_that_differs(path: str, background: bool) -> list[Any]:
    """Save equal states, then states of which one rank has another tensor, then equal ones again."""
    rank = sx.get_rank()
    state = {"model": {f"{i}.w": torch.full((100 + i,), float(i)) for i in range(12)}, "rng": torch.tensor([rank])}
    found = []
    for number, value in enumerate((5.0, 6.0 if rank == 1 else 5.0, 5.0)):
        state["model"]["5.w"] = torch.full((105,), value)
        report = saved(state, f"{path}-{number}", background=background)
        assert report.num_tensors == 13
        assert_comes_back(state, f"{path}-{number}")
        found.append(report.rank_nbytes)
    return found


@pytest.mark.parametrize("background", [False, True])
def test_copies_are_compared_anew_at_each_save(background: bool, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    equal, differing, again = run_ranks(save_with_one_that_differs, 3, args=(str(path), background))[0]
    once = {f"model.{i}.w": 1 for i in range(12)}
    assert copies_of(f"{path}-0") == copies_of(f"{path}-2") == {**once, "rng": 3}
    assert copies_of(f"{path}-1") == {**once, "model.5.w": 3, "rng": 3}
    assert equal == again
    assert sum(differing) > sum(equal)
    # The work is shared among the ranks.
    assert max(equal) < 1.1 * min(equal)


def load_on_two(path: str) -> Any:
    state = {"model": {"5.w": torch.zeros(105)}}
    try:
        sx.load_checkpoint(state, path, strict=False)
    except sx.errors.ReplicaError as error:
        return error.name
    return state["model"]["5.w"][0].item()


def test_only_copies_that_are_equal_load_on_another_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(save_with_one_that_differs, 3, args=(str(tmp_path / "saved"), False))
    assert run_ranks(load_on_two, 2, args=(str(tmp_path / "saved-0"),)) == [5.0, 5.0]
    assert run_ranks(load_on_two, 2, args=(str(tmp_path / "saved-1"),)) == ["model.5.w"] * 2


def save_mesh(path: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    whole = torch.arange(64.0).reshape(8, 8)
    begin = 4 * mesh.get_coordinate()[1]
    state = {
        "hsdp": DTensor.from_local(whole[begin : begin + 4].clone(), mesh, [Replicate(), Shard(0)]),
        "replicated": DTensor.from_local(whole.clone(), mesh, [Replicate(), Replicate()]),
        "step": torch.tensor(3.0),
    }
    sx.save_checkpoint(state, path)
    assert_comes_back(state, path)


def test_copies_on_a_mesh_are_written_once(tmp_path: Path) -> None:
    run_ranks(save_mesh, 4, backend="gloo", args=(str(tmp_path / "saved"),))
    assert copies_of(tmp_path / "saved") == {"hsdp": 2, "replicated": 1, "step": 1}


def save_two_meshes(path: str) -> None:
    """Save two pipeline stages, each with a mesh of its own, that call a tensor alike."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "replicate"))
    stage = sx.get_rank() // 2
    mesh = both["replicate"]
    state = {
        "norm": DTensor.from_local(torch.full((4,), float(stage)), mesh, [Replicate()]),
        f"layer.{stage}": DTensor.from_local(torch.full((5,), float(stage)), mesh, [Replicate()]),
    }
    sx.save_checkpoint(state, path)
    assert_comes_back(state, path)


def test_stages_that_call_a_tensor_alike_each_get_their_own(tmp_path: Path) -> None:
    run_ranks(save_two_meshes, 4, backend="gloo", args=(str(tmp_path / "saved"),))
    assert copies_of(tmp_path / "saved") == {"norm": 4, "layer.0": 1, "layer.1": 1}


def save_stages(path: str, value: float) -> None:
    """Save plain tensors of two pipeline stages of two data-parallel ranks each."""
    stage = sx.get_rank() // 2
    model = {f"layer.{stage}.w": torch.full((6,), float(stage)), "tied": torch.full((5,), value * stage)}
    # In another order on each rank.
    names = sorted(model, reverse=sx.get_rank() % 2 == 1)
    state = {"model": {name: model[name] for name in names}}
    sx.save_checkpoint(state, path)
    assert_comes_back(state, path)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_tensor_of_two_stages_is_written_by_each_rank(value: float, tmp_path: Path) -> None:
    run_ranks(save_stages, 4, args=(str(tmp_path / "saved"), value))
    assert copies_of(tmp_path / "saved") == {"model.layer.0.w": 1, "model.layer.1.w": 1, "model.tied": 4}


LAYOUT = {"mesh": {"dp": 2, "tp": 2}, "rules": {"*.up": {"dim": 0, "axis": "tp"}, "*.norm": "replicate"}}


def save_by_layout(path: str) -> None:
    part = sx.get_rank() % 2
    state = {"model": {"0.up": torch.arange(6.0) + 6 * part, "0.norm": torch.ones(4)}}
    sx.save_checkpoint(state, path, layout=LAYOUT)
    assert_comes_back(state, path, layout=LAYOUT)


def test_copies_that_a_layout_declares_are_written_once(tmp_path: Path) -> None:
    run_ranks(save_by_layout, 4, args=(str(tmp_path / "saved"),))
    assert copies_of(tmp_path / "saved") == {"model.0.up": 2, "model.0.norm": 1}


def save_while_it_changes(path: str) -> str:
    state = {f"{i}": torch.zeros(8) for i in range(4)}
    write = save.write_rank_file

    def change_and_write(*args: Any) -> Any:
        for tensor in state.values():
            tensor += 1
        return write(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "write_rank_file", change_and_write)
        with pytest.raises(sx.errors.CorruptError, match="changed") as caught:
            sx.save_checkpoint(state, path)
    return str(caught.value.name)


def test_a_copy_that_changes_after_it_was_compared_is_refused(tmp_path: Path) -> None:
    names = run_ranks(save_while_it_changes, 2, backend="gloo", args=(str(tmp_path / "saved"),))
    assert len({*names} & {"0", "1", "2", "3"}) == len({*names})
    assert list(tmp_path.iterdir()) == []


# Found by attacks


def came_back(path: str, state: Any, **options: Any) -> bool:
    sx.save_checkpoint(state, path)
    assert_comes_back(state, path, **options)
    return True


def save_empty_on_one_rank(path: str) -> bool:
    return came_back(path, {"queue": torch.empty(0) if sx.get_rank() == 0 else torch.full((3,), 5.0)})


def save_a_mesh_of_one_rank(path: str) -> bool:
    mesh = DeviceMesh("cpu", [0])
    tensor = torch.full((3,), 5.0)
    if sx.get_rank() > 0:
        return came_back(path, {"w": tensor}, replicas="root")
    return came_back(path, {"w": DTensor.from_local(tensor - 4, mesh, [Replicate()])}, replicas="root")


def save_an_uneven_mesh(path: str) -> bool:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    begin = 4 * mesh.get_coordinate()[1]
    rows = torch.ones(1 if begin == 0 else 0, 2)
    state = {
        "small": DTensor.from_local(rows, mesh, [Replicate(), Shard(0)], shape=torch.Size([1, 2]), stride=(2, 1)),
        "large": DTensor.from_local(torch.full((4, 2), float(begin)), mesh, [Replicate(), Shard(0)]),
    }
    return came_back(path, state)


@pytest.mark.parametrize(
    ("save_state", "count"),
    [
        (save_empty_on_one_rank, {"queue": 4}),
        (save_a_mesh_of_one_rank, {"w": 4}),
        (save_an_uneven_mesh, {"small": 2, "large": 2}),
    ],
)
def test_each_rank_gets_its_own_where_ranks_hold_a_name_in_other_ways(
    save_state: Any, count: dict[str, int], tmp_path: Path
) -> None:
    assert run_ranks(save_state, 4, backend="gloo", args=(str(tmp_path / "saved"),)) == [True] * 4
    assert copies_of(tmp_path / "saved") == count


def save_other_placements(path: str) -> str:
    """Save on a mesh where equal bytes are rows on two ranks and columns on the others."""
    mesh = init_device_mesh("cpu", (2, 2))
    rank = sx.get_rank()
    part = torch.arange(8.0) + 8 * (rank % 2)
    local, dim = (part.reshape(2, 4), 0) if rank < 2 else (part.reshape(4, 2), 1)
    state = {"w": DTensor.from_local(local, mesh, [Replicate(), Shard(dim)])}
    with pytest.raises(sx.errors.OverlapError) as caught:
        sx.save_checkpoint(state, path)
    return str(caught.value.name)


def test_equal_bytes_of_other_boxes_are_no_copies(tmp_path: Path) -> None:
    assert run_ranks(save_other_placements, 4, backend="gloo", args=(str(tmp_path / "saved"),)) == ["w"] * 4
    assert os.listdir(tmp_path) == []


def save_boxes(path: str, boxes: list[list[tuple[int, int]]], background: bool) -> tuple[str, str]:
    """Save runs of a tensor of 6 elements; return the kind of the error and its text."""
    here = boxes[sx.get_rank()]
    state = {"model": {"w": torch.zeros(sum(end - begin for begin, end in here)), "b": torch.tensor(sx.get_rank())}}
    described = [[[[begin], [end - begin]] for begin, end in of_rank] for of_rank in boxes]
    layout = {"model.w": {"global_shape": [6], "boxes": described}}
    try:
        report = sx.save_checkpoint(state, path, layout=layout, background=background)
        if background:
            report.result(60)
    except sx.errors.StateExchangeError as error:
        return type(error).__name__, str(error)
    sx.load_checkpoint(state, path, layout=layout)
    return "", ""


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("boxes", "kind", "words"),
    [
        ([[(0, 3)], [(3, 6)]], "", ""),
        ([[(0, 6)], [(0, 6)]], "", ""),
        ([[(0, 3)], [(3, 5)]], "IncompleteError", "no rank holds region [5:6] of shape (6,)"),
        ([[(0, 3)], [(0, 3)]], "IncompleteError", "no rank holds region [3:6]"),
        ([[(0, 4)], [(3, 6)]], "OverlapError", "as [0:4] by rank 0 and as [3:6] by rank 1"),
        ([[(0, 2), (4, 6)], [(3, 4)]], "IncompleteError", "no rank holds region [2:3]"),
        ([[(1, 6)]], "IncompleteError", "region [0:1]"),
    ],
)
def test_what_no_load_could_read_is_refused_before_a_byte_is_written(
    boxes: list[list[tuple[int, int]]], kind: str, words: str, background: bool, tmp_path: Path
) -> None:
    outcomes = run_ranks(save_boxes, len(boxes), args=(str(tmp_path / "saved"), boxes, background))
    for found, text in outcomes:
        assert found == kind, text
        assert words in text
        assert "model.w" in text or not kind
    assert os.listdir(tmp_path) == ([] if kind else ["saved"])


def save_flawed(path: str, kind: str) -> str:
    """Save a tensor of which ranks have boxes that fit together on no rank; return the error."""
    rank = sx.get_rank()
    pair = DeviceMesh("cpu", [0, 1])
    stages = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))["shard"]
    whole = torch.arange(4.0)
    part = whole[2 * (rank % 2) :][:2].clone()
    boxes: list[list[Any]] = [[], [], [], []]
    layout = None
    if kind == "whole beside a mesh":
        tensor = DTensor.from_local(part, pair, [Shard(0)]) if rank < 2 else whole
    elif kind == "whole of another shape beside a mesh":
        tensor = DTensor.from_local(part, pair, [Shard(0)]) if rank < 2 else torch.ones(6)
    elif kind == "a stage that replicates":
        tensor = DTensor.from_local(part if rank < 2 else whole, stages, [Shard(0) if rank < 2 else Replicate()])
    elif kind == "an empty part of another dtype":
        tensor = DTensor.from_local(part, pair, [Shard(0)]) if rank < 2 else torch.ones(0, dtype=torch.bfloat16)
        layout = {"w": {"global_shape": [4], "boxes": boxes}} if rank >= 2 else {"x*": "replicate"}
    elif kind == "stages of other shapes":
        tensor = DTensor.from_local(torch.ones(2 + rank // 2), stages, [Shard(0)])
    else:
        if kind == "twice on one rank":
            boxes[0] = [[[0], [2]], [[2], [2]], [[0], [1]], [[1], [3]]]
        elif kind == "whole beside parts":
            boxes[:3] = [[[[0], [4]]], [[[0], [2]]], [[[2], [2]]]]
        tensor = torch.cat([whole[:0], *(whole[begin:][:size] for (begin,), (size,) in boxes[rank])])
        layout = {"w": {"global_shape": [4], "boxes": boxes}}
    with pytest.raises(sx.errors.StateExchangeError) as caught:
        sx.save_checkpoint({"w": tensor, "b": torch.ones(2)}, path, layout=layout)
    return f"{type(caught.value).__name__} {caught.value}"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "whole beside a mesh",
            "OverlapError region [0:2] is claimed twice: as [0:2] by rank 0 and as [0:4] by rank 2",
        ),
        ("whole of another shape beside a mesh", "CorruptError ranks 0 and 2 disagree on the global_shape"),
        ("a stage that replicates", "OverlapError region [0:2] is claimed twice"),
        ("an empty part of another dtype", "CorruptError ranks 0 and 2 disagree on the dtype"),
        ("stages of other shapes", "CorruptError ranks 0 and 2 disagree on the global_shape"),
        ("twice on one rank", "OverlapError region [0:1] is claimed twice: as [0:2] by rank 0 and as [0:1] by rank 0"),
        ("whole beside parts", "OverlapError region [0:2] is claimed twice: as [0:4] by rank 0 and as [0:2] by rank 1"),
        ("nobody", "IncompleteError nothing holds region [0:4] of shape (4,)"),
    ],
)
def test_boxes_that_fit_together_on_no_rank_are_refused(kind: str, words: str, tmp_path: Path) -> None:
    for text in run_ranks(save_flawed, 4, backend="gloo", args=(str(tmp_path / "saved"), kind)):
        assert text.startswith(words)
        assert "no load could read it" in text
    assert os.listdir(tmp_path) == []


def save_equal_stages(path: str) -> bool:
    """Save a sharded tensor that two stages have under one name, with equal parts."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    part = torch.arange(3.0) + 3 * (sx.get_rank() % 2)
    return came_back(path, {"w": DTensor.from_local(part, both["shard"], [Shard(0)])})


def test_equal_parts_of_two_stages_are_written_by_each(tmp_path: Path) -> None:
    assert run_ranks(save_equal_stages, 4, backend="gloo", args=(str(tmp_path / "saved"),)) == [True] * 4
    assert copies_of(tmp_path / "saved") == {"w": 4}


def save_tied(path: str) -> bool:
    one, other = torch.arange(6.0), torch.arange(6.0) + 3
    return came_back(path, {"embed": one, "x": other, "head": one, "y": other})


def test_tied_tensors_are_written_by_one_rank_and_stay_tied(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    run_ranks(save_tied, 3, args=(str(path),))
    sx.merge_checkpoint(path, tmp_path / "merged")
    with safe_open(tmp_path / "merged" / "model.safetensors", "pt") as merged:
        assert sorted(merged.keys()) == ["embed", "x"]
    # The file of a rank is not the state of that rank.
    for file in sorted(path.glob("rank-*")):
        with pytest.raises(sx.errors.IncompleteError, match="directory"):
            sx.merge_checkpoint(file, tmp_path / "of-one-file")
