"""Copies that a layout or mesh declares: those that differ are refused at the save; equal ones, joined, are noted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import statexchange as sx
from statexchange.testing import run_ranks

MESH = {"pp": 2, "tp": 2}
LAYOUT = {"mesh": MESH, "rules": {"*.up": {"dim": 0, "axis": "tp"}}}


def saved(state: Any, path: str, **options: Any) -> tuple[str | None, int | None, str]:
    """Save in the background or not; return the ReplicaError's name, rank and text, or the report's notes as text."""
    try:
        report = sx.save_checkpoint(state, path, **options)
        if options.get("background"):
            report = report.result(30)
    except sx.errors.ReplicaError as error:
        return error.name, error.rank, str(error)
    return None, None, "".join(report.notes)


def save_stages(path: str, background: bool) -> Any:
    """Save two pipeline stages that both number their layers from 0; equal layers after different ones."""
    rank = sx.get_rank()
    same = {"norm": torch.ones(4), "0.up": torch.arange(6.0) + rank % 2}
    state = {"model": {**same, "1.up": torch.arange(6.0) + rank}}
    return saved(state, path, layout=LAYOUT, background=background)


@pytest.mark.parametrize("background", [False, True])
def test_stages_with_equal_names_are_refused_at_the_save(background: bool, tmp_path: Path) -> None:
    for name, rank, text in run_ranks(save_stages, 4, args=(str(tmp_path / "saved"), background)):
        assert (name, rank) == ("model.1.up", 2)
        assert "ranks 0 and 2" in text
    assert os.listdir(tmp_path) == []


def save_copies(path: str, layout: Any, values: list[float]) -> Any:
    return saved(
        {"w": torch.full((3,), values[sx.get_rank()]), "seed": torch.tensor(sx.get_rank())}, path, layout=layout
    )


@pytest.mark.parametrize(
    ("layout", "values", "ranks"),
    [
        (None, [1.0, 2.0, 3.0], None),  # plain tensors without a rule are each rank's own
        ({"w": "replicate"}, [1.0, 1.0, 1.0], None),
        ({"w": Replicate()}, [1.0, 1.0, 2.0], (0, 2)),
        ({"mesh": {"dp": 3}, "rules": {"w": {"dim": 0, "axis": []}}}, [1.0, 2.0, 2.0], (0, 1)),
    ],
)
def test_a_rule_that_declares_copies_is_held(layout: Any, values: Any, ranks: Any, tmp_path: Path) -> None:
    for name, rank, text in run_ranks(save_copies, 3, args=(str(tmp_path / "saved"), layout, values)):
        if ranks is None:
            assert name is None, text
        else:
            assert (name, rank) == ("w", ranks[1])
            assert f"ranks {ranks[0]} and {ranks[1]}" in text


def save_dtensors(path: str, kind: str) -> Any:
    comm = sx.init("gloo")
    rank = comm.rank
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp"))
    value = float(rank == 2)  # one rank's copy has drifted
    state: dict[str, Any] = {}
    if kind == "hsdp":
        state["a"] = DTensor.from_local(torch.zeros(2, 3), whole, [Replicate(), Shard(0)])
        state["w"] = DTensor.from_local(torch.full((2, 3), value), whole, [Replicate(), Shard(0)])
    elif kind == "replicated":
        state["w"] = DTensor.from_local(torch.full((2, 3), value), whole, [Replicate(), Replicate()])
    elif kind == "sharded":  # FSDP: no copies
        flat = init_device_mesh("cpu", (4,))
        state["w"] = DTensor.from_local(torch.full((2, 3), float(rank)), flat, [Shard(0)])
    else:
        stages = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
        placement = Shard(0) if kind == "stages" else Replicate()
        value = float(rank // 2) if kind != "drifted stage" else float(rank == 3)
        state["w"] = DTensor.from_local(torch.full((2, 3), value), stages[rank // 2], [placement])
    try:
        return saved(state, path)
    finally:
        sx.shutdown()


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("hsdp", (0, 2)),
        ("replicated", (0, 2)),
        ("sharded", None),
        ("stages", (0, 2)),  # one name, and one region of it, in two stages: it would load nowhere
        ("whole stages", None),  # neither mesh says that the other one's are copies
        ("drifted stage", (2, 3)),
    ],
)
def test_copies_that_a_mesh_declares_are_held(kind: str, ranks: Any, tmp_path: Path) -> None:
    for name, rank, text in run_ranks(save_dtensors, 4, backend="gloo", args=(str(tmp_path / "saved"), kind)):
        if ranks is None:
            assert name is None, text
        else:
            assert (name, rank) == ("w", ranks[1])
            assert f"ranks {ranks[0]} and {ranks[1]}" in text


# A rule that joins copies


def experts_of(group: int, kind: str) -> dict[str, torch.Tensor]:
    """Return a rank's experts: 3 of 6, by the rank's place `group` in expert parallelism."""
    constant = {"zeros": 0.0, "ones": 1.0}.get(kind)
    tensor = torch.arange(12.0).reshape(3, 4) + 100 * group if constant is None else torch.full((3, 4), constant)
    return {"experts": tensor, "other": torch.arange(2.0)}


GROUPS = {
    "copies slowest": [0, 1, 0, 1],
    "copies fastest": [0, 0, 1, 1],
    "all equal": [0, 0, 0, 0],
    "parts": [0, 1, 2, 3],
    "one pair": [0, 0, 1, 2],
}
MESHES = {
    "copies slowest": {"mesh": {"dp": 2, "tp": 2}, "rules": {"experts": {"dim": 0, "axis": "tp"}}},
    "copies fastest": {"mesh": {"tp": 2, "dp": 2}, "rules": {"experts": {"dim": 0, "axis": "tp"}}},
    "all equal": {"experts": "replicate"},
}


def write_experts(path: str, kind: str, values: str, call: str) -> tuple[str, ...]:
    state = experts_of(GROUPS[kind][sx.get_rank()], values)
    write = sx.save_checkpoint if call == "save" else sx.export_checkpoint
    return write(state, path, layout={"experts": Shard(0)}).notes


@pytest.mark.parametrize("call", ["save", "export"])
@pytest.mark.parametrize("kind", GROUPS)
def test_equal_parts_of_a_rule_without_a_mesh_are_noted(kind: str, call: str, tmp_path: Path) -> None:
    for notes in run_ranks(write_experts, 4, args=(str(tmp_path / "out"), kind, "numbers", call)):
        check_notes(notes, kind)


@pytest.mark.parametrize("values", ["zeros", "ones"])
def test_equal_parts_of_zeros_or_ones_say_nothing(values: str, tmp_path: Path) -> None:
    for call in ("save", "export"):
        notes = run_ranks(write_experts, 2, args=(str(tmp_path / call), "all equal", values, call))
        assert notes == [(), ()]


def check_notes(notes: tuple[str, ...], kind: str) -> None:
    if kind not in MESHES:
        assert notes == ()
        return
    (note,) = notes
    assert "'experts'" in note
    assert "mesh" in note


@pytest.mark.parametrize("kind", GROUPS)
def test_a_merge_notes_them_and_a_layout_with_a_mesh_makes_one_copy(kind: str, tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    for rank, group in enumerate(GROUPS[kind]):
        save_file(experts_of(group, "numbers"), tmp_path / "ranks" / f"model-rank{rank}.safetensors")
    report = sx.merge_checkpoint(tmp_path / "ranks", tmp_path / "out", layout={"experts": {"dim": 0}})
    check_notes(tuple(note for note in report.notes if "mesh" in note or "replicate" in note), kind)
    if kind in MESHES:
        sx.merge_checkpoint(tmp_path / "ranks", tmp_path / "once", layout=MESHES[kind])
        merged = load_file(tmp_path / "once" / "model.safetensors")["experts"]
        parts = [experts_of(group, "numbers")["experts"] for group in sorted(set(GROUPS[kind]))]
        assert torch.equal(merged, torch.cat(parts))
