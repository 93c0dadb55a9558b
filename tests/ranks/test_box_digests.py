"""An export of very many boxes: its manifest has placements, and a file beside it the digests of the boxes."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import statexchange as sx
from statexchange.checkpoint import publication
from statexchange.exchange import receipts
from statexchange.formats.box_digests import DIGESTS
from statexchange.formats.registry import open_source
from statexchange.report.supply import supply_of
from statexchange.report.verify import verify
from statexchange.testing import run_ranks

WORLD_SIZE = 4


def whole_of(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    return (torch.arange(numel, dtype=torch.float32) + 1000 * len(name)).reshape(shape)


def sharded_state(rank: int, fill: float | None = None) -> dict[str, Any]:
    """Return tensors on a mesh of all ranks, on two meshes of two ranks each, with copies, and a plain one."""
    every = DeviceMesh("cpu", torch.arange(4))
    grid = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
    # Experts: each pair of ranks, interleaved, has one that the others have not.
    pairs = [DeviceMesh("cpu", torch.tensor([0, 2])), DeviceMesh("cpu", torch.tensor([1, 3]))]
    state: dict[str, Any] = {"plain": whole_of("plain", (3,))}
    for name, shape, mesh, placements in (
        ("rows", (9, 4), every, [Shard(0)]),
        ("columns", (4, 8), every, [Shard(1)]),
        ("few", (2, 3), every, [Shard(0)]),
        ("empty", (0, 3), every, [Shard(0)]),
        ("tiles", (4, 6), grid, [Shard(0), Shard(1)]),
        ("copies", (4, 6), grid, [Replicate(), Shard(0)]),
        (f"expert{rank % 2}", (6, 2), pairs[rank % 2], [Replicate() if rank % 2 else Shard(0)]),
    ):
        whole = whole_of(name, shape)
        if fill is not None:
            whole = torch.full_like(whole, fill)
        state[name] = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False).redistribute(
            mesh, placements
        )
    return state


def exports(folder: str) -> None:
    comm = sx.get_communicator()
    state = sharded_state(comm.rank)
    sx.export_checkpoint(state, f"{folder}/listed", comm=comm)
    publication._MOST_LISTED = 0
    for _ in range(2):  # it replaces itself, the file of digests included
        sx.export_checkpoint(state, f"{folder}/placed", comm=comm, overwrite=True)
    into = sharded_state(comm.rank, 0.0)
    sx.load_checkpoint(into, f"{folder}/placed", comm=comm)
    for name, tensor in into.items():
        if isinstance(tensor, DTensor):
            assert torch.equal(tensor.to_local(), state[name].to_local()), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exports")
    run_ranks(exports, WORLD_SIZE, backend="gloo", args=(str(path),))
    return path


def wholes() -> dict[str, torch.Tensor]:
    shapes = {"plain": (3,), "rows": (9, 4), "columns": (4, 8), "few": (2, 3), "tiles": (4, 6), "copies": (4, 6)}
    shapes |= {"expert0": (6, 2), "expert1": (6, 2), "empty": (0, 3)}
    return {name: whole_of(name, shape) for name, shape in shapes.items()}


def test_the_files_are_those_of_an_export_whose_manifest_lists_all_boxes(folder: Path) -> None:
    listed, placed = folder / "listed", folder / "placed"
    assert {path.name for path in placed.iterdir()} == {*(path.name for path in listed.iterdir()), DIGESTS}
    assert (listed / "model.safetensors").read_bytes() == (placed / "model.safetensors").read_bytes()
    first, second = (json.loads((path / "statexchange.json").read_text()) for path in (listed, placed))
    assert (first["schema"], second["schema"]) == (1, 2)
    digests = (placed / DIGESTS).read_bytes()
    num_placed = 0
    for name, record in second["tensors"].items():
        boxes = first["tensors"][name]["boxes"]
        if "boxes" in record:
            assert name == "plain"
            continue
        begin = 16 * record["placed"][2]
        expected = b"".join(bytes.fromhex(digest) for _, _, digest, _ in boxes)
        assert digests[begin : begin + len(expected)] == expected
        num_placed += len(boxes)
    assert len(digests) == 16 * num_placed
    with open_source(str(listed), strict=False) as source, open_source(str(placed), strict=False) as placed_source:
        assert supply_of(source).tensors == supply_of(placed_source).tensors


def test_it_is_read_as_any_other_export(folder: Path, tmp_path: Path) -> None:
    into = {name: torch.zeros_like(tensor) for name, tensor in wholes().items()}
    sx.load_checkpoint(into, folder / "placed")
    for name, tensor in wholes().items():
        assert torch.equal(into[name], tensor), name
    reports = [verify(folder / name) for name in ("listed", "placed")]
    assert [len(report.findings) for report in reports] == [0, 0]
    assert reports[0].num_boxes == reports[1].num_boxes
    assert reports[1].num_unproven == 0
    sx.merge_checkpoint(folder / "placed", tmp_path / "merged", files_from=folder / "placed")
    assert not (tmp_path / "merged" / DIGESTS).exists()
    assert (tmp_path / "merged" / "model.safetensors").read_bytes() == (
        folder / "placed" / "model.safetensors"
    ).read_bytes()


def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder / "placed", tmp_path / "copy"))


def load_whole(path: Path) -> None:
    sx.load_checkpoint({name: torch.zeros_like(tensor) for name, tensor in wholes().items()}, path)


def test_a_changed_byte_is_found_by_the_digests(folder: Path, tmp_path: Path) -> None:
    path = copied(folder, tmp_path)
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)
    with pytest.raises(sx.errors.CorruptError, match="differ from their digest"):
        load_whole(path)
    assert len(verify(path).findings) == 1


@pytest.mark.parametrize(
    ("damage", "error", "text"),
    [
        (lambda file: file.unlink(), sx.errors.IncompleteError, "digests of a checkpoint"),
        (lambda file: file.write_bytes(file.read_bytes()[:-16]), sx.errors.CorruptError, "that was published"),
        (lambda file: file.write_bytes(b"x" * len(file.read_bytes())), sx.errors.CorruptError, "differ from"),
    ],
    ids=["missing", "cut", "changed"],
)
def test_a_damaged_file_of_digests_is_named(
    folder: Path, tmp_path: Path, damage: Callable[[Path], object], error: type[Exception], text: str
) -> None:
    path = copied(folder, tmp_path)
    damage(path / DIGESTS)
    with pytest.raises(error, match=text):
        load_whole(path)
    assert any(DIGESTS in str(finding) for finding in verify(path).findings)


def changed(value: Any, chance: random.Random) -> Any:
    """Return a JSON value with one place of it changed."""
    if isinstance(value, list | dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
        copy: Any = value.copy()
        copy[key] = changed(value[key], chance)
        return copy
    return chance.choice([None, -1, 0, 1, 2, 3, 1 << 40, True, "", [], {}, [[4], [[0, 1]]], 1.5])


def test_a_changed_manifest_gives_the_same_values_or_a_named_error(folder: Path, tmp_path: Path) -> None:
    path = copied(folder, tmp_path)
    manifest = json.loads((path / "statexchange.json").read_text())
    chance = random.Random(45)
    num_refused = 0
    for _ in range(150):
        key = chance.choice(["placements", "tensors", "digests"])
        (path / "statexchange.json").write_text(json.dumps({**manifest, key: changed(manifest[key], chance)}))
        into = {name: torch.zeros_like(tensor) for name, tensor in wholes().items()}
        try:
            sx.load_checkpoint(into, path)
        except sx.errors.StateExchangeError:
            num_refused += 1
            continue
        for name, tensor in wholes().items():
            assert torch.equal(into[name], tensor), name
    assert 75 < num_refused < 150


@pytest.mark.parametrize("digests", [5, {"x": 1}, [1], {DIGESTS: [1, 2, "a"]}])
@pytest.mark.parametrize("name", ["placed", "listed"])
def test_a_broken_record_of_the_file_of_digests_is_a_finding(
    folder: Path, tmp_path: Path, name: str, digests: Any
) -> None:
    path = Path(shutil.copytree(folder / name, tmp_path / "copy"))
    manifest = json.loads((path / "statexchange.json").read_text())
    (path / "statexchange.json").write_text(json.dumps({**manifest, "digests": digests}))
    assert any("broken manifest" in str(finding) for finding in verify(path).findings)


def test_a_mesh_that_is_larger_than_its_digests_is_refused_at_once(folder: Path, tmp_path: Path) -> None:
    path = copied(folder, tmp_path)
    manifest = json.loads((path / "statexchange.json").read_text())
    manifest["placements"] = [[[[1 << 20], [[0, 1 << 16]]], []] for _ in manifest["placements"]]
    (path / "statexchange.json").write_text(json.dumps(manifest))
    with pytest.raises(sx.errors.CorruptError):
        load_whole(path)


def test_meshes_of_a_part_of_the_ranks_have_records_of_their_own(folder: Path) -> None:
    manifest = json.loads((folder / "placed" / "statexchange.json").read_text())
    meshes = {}
    for name, record in manifest["tensors"].items():
        if "placed" in record:
            meshes[name] = manifest["placements"][record["placed"][0]]
    assert meshes["expert0"] == [[[2], [[0, 1]]], [0, 2]]
    assert meshes["expert1"] == [[[2], [None]], [1, 3]]
    assert meshes["rows"] == [[[4], [[0, 1]]], []]


@pytest.mark.ranks(2, backend="gloo")
def test_the_lowest_rank_supplies_copies_of_a_mesh_that_lists_ranks_in_another_order(tmp_path: Path) -> None:
    comm = sx.get_communicator()
    mesh = DeviceMesh("cpu", torch.tensor([1, 0]))
    state = {"w": DTensor.from_local(torch.full((3,), float(comm.rank)), mesh, [Replicate()], run_check=False)}
    sx.export_checkpoint(state, tmp_path / "out", replicas="root")
    into = {"w": torch.full((3,), 5.0)}
    sx.load_checkpoint(into, tmp_path / "out")
    assert torch.equal(into["w"], torch.zeros(3))


def exports_in_rounds(folder: str) -> tuple[str, int]:
    """Export with all digests at once and in rounds; then with copies that differ, in a tensor of a later round."""
    comm = sx.get_communicator()
    state = sharded_state(comm.rank)
    state["last"] = torch.tensor([1e30, float(comm.rank + 1)])
    layout = {"last": {"dim": 0}}
    sx.export_checkpoint(state, f"{folder}/at_once", layout=layout, dtype="float16")
    receipts._ROUND_ROWS = 1
    report = sx.export_checkpoint(state, f"{folder}/in_rounds", layout=layout, dtype="float16")
    state["plain"] = torch.tensor([1.0, 2.0, comm.rank])
    with pytest.raises(sx.errors.ReplicaError, match="plain") as caught:
        sx.export_checkpoint(state, f"{folder}/differing", layout=layout)
    assert comm.all_reduce(torch.ones(1)).item() == WORLD_SIZE  # and the ranks go on together
    return str(caught.value), sum("infinite" in note for note in report.notes)


def test_digests_may_come_in_several_rounds(tmp_path: Path) -> None:
    outcomes = run_ranks(exports_in_rounds, WORLD_SIZE, backend="gloo", args=(str(tmp_path),))
    assert outcomes == outcomes[:1] * WORLD_SIZE
    assert outcomes[0][1] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["at_once", "in_rounds"]
    for name in ("statexchange.json", "model.safetensors"):
        assert (tmp_path / "in_rounds" / name).read_bytes() == (tmp_path / "at_once" / name).read_bytes()
