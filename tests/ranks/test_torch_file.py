"""Files of torch.save: read without torch, merged bit-equal: views, ties, nesting, DTensors."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import CommandLine
from equality import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from sweeps import slow
from torch_files import merged

from statexchange.checkpoint.merge import merge_checkpoint
from statexchange.errors import (
    CorruptError,
    IncompleteError,
    ReplicaError,
    UnsupportedError,
)
from statexchange.formats.pickles import OpaqueObject
from statexchange.formats.registry import open_checkpoint, open_source
from statexchange.formats.torch_file import _mesh_shape
from statexchange.report.verify import verify
from statexchange.sharding.sharding_spec import DimSplit
from statexchange.storage.store import Budget
from statexchange.tensors import DTYPE_NAMES
from statexchange.testing import run_ranks


def test_every_dtype_becomes_what_save_file_writes(tmp_path: Path) -> None:
    state = {
        name: torch.arange(35).to(getattr(torch, name)).reshape(7, 5) for name in DTYPE_NAMES if name != "complex128"
    }
    state |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3)}
    torch.save(state, tmp_path / "model.pt")
    merge_checkpoint(tmp_path / "model.pt", tmp_path / "out")
    save_file(state, tmp_path / "expected", {"format": "pt"})
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "expected").read_bytes()


def test_complex128_is_read_by_open_checkpoint(tmp_path: Path) -> None:
    value = torch.randn(3, 2, dtype=torch.complex128)
    torch.save({"c": value}, tmp_path / "c.pt")
    assert np.array_equal(open_checkpoint(tmp_path / "c.pt")["c"].read(), value.numpy())


def test_a_modules_state_dict_is_merged_bit_by_bit(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
    module = module.to(memory_format=torch.channels_last)
    torch.save(module.state_dict(), tmp_path / "pytorch_model.bin")
    assert_same(merged(tmp_path / "pytorch_model.bin"), dict(module.state_dict()))


def views(base: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "base": base,
        "transposed": base.permute(2, 0, 1),
        "sliced": base[1:, ::2, 3:],
        "column": base[:, :, 1],
        "expanded": base[0, 0, :1].expand(50, 3),
        "diagonal": base[0].diagonal(),
        "tail": base[-1],
        "nothing": base[:0],
        "one": base[1, 2, 3],
    }


def test_views_are_read_in_their_own_order(tmp_path: Path) -> None:
    state = views(torch.randn(4, 30, 31))
    torch.save(state, tmp_path / "views.pt")
    assert_same(merged(tmp_path / "views.pt"), state)
    checkpoint = open_checkpoint(tmp_path / "views.pt")
    for name, tensor in state.items():
        assert np.array_equal(checkpoint[name].read(), tensor.numpy()), name
    assert verify(tmp_path / "views.pt").findings == ()


def test_large_views_are_read_in_ranges(tmp_path: Path) -> None:
    base = torch.arange(3000 * 1001, dtype=torch.float32).reshape(3000, 1001)
    state = {"t": base.t(), "columns": base[:, 5:9], "cube": base[:, :1000].reshape(3000, 10, 100).permute(1, 2, 0)}
    torch.save(state, tmp_path / "views.pt")
    assert_same(merged(tmp_path / "views.pt"), state)
    assert open_checkpoint(tmp_path / "views.pt")["t"].read().tobytes() == state["t"].contiguous().numpy().tobytes()


@given(st.data())
@settings(max_examples=30)
def test_random_views_have_their_values(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    tensor = torch.arange(int(np.prod(shape))).reshape(shape)
    tensor = tensor.permute(data.draw(st.permutations(range(tensor.ndim))))
    for dim in range(tensor.ndim):
        size = tensor.shape[dim]
        begin = data.draw(st.integers(0, size))
        end = data.draw(st.integers(begin, size))
        tensor = tensor[(slice(None),) * dim + (slice(begin, end, data.draw(st.integers(1, 3))),)]
    path = tmp_path_factory.mktemp("v") / "v.pt"
    torch.save({"v": tensor}, path)
    assert open_checkpoint(path)["v"].read().tolist() == tensor.tolist()


def test_tied_tensors_are_one_and_recorded(tmp_path: Path) -> None:
    embedding = torch.nn.Embedding(10, 4)
    head = torch.nn.Linear(4, 10, bias=False)
    head.weight = embedding.weight
    module = torch.nn.ModuleDict({"embed": embedding, "head": head})
    torch.save(module.state_dict(), tmp_path / "tied.pt")
    source = open_source(tmp_path / "tied.pt")
    assert source.files[0].aliases == {"head.weight": "embed.weight"}
    assert_same(merged(tmp_path / "tied.pt"), {"embed.weight": embedding.weight.detach()})


def test_nested_names_have_dots_and_other_values_are_listed(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "list": [torch.ones(2), {"x": torch.zeros(1)}],
        "step": 7,
        "note": "a",
        "device": torch.device("cpu"),
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "nothing": {},
        "names": {"b", "a"},
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    torch.save(state, tmp_path / "state.pt")
    source = open_source(tmp_path / "state.pt")
    found = merged(tmp_path / "state.pt", section="all")
    assert found["list.1.x"].tolist() == [0]
    assert found["optimizer.state.0.exp_avg"].equal(optimizer.state_dict()["state"][0]["exp_avg"])
    assert found["model.0.weight"].equal(model[0].weight)
    assert found["parameter"].tolist() == [1, 1]
    assert source.others["optimizer.param_groups.0.lr"] == "float 0.001"
    plain_values = ("step", "note", "device", "dtype", "size", "nothing", "names")
    assert [source.others[name] for name in plain_values] == [
        "int 7", "str 'a'", "a device", "bfloat16", "tuple of 2", "dict of 0", "a set"
    ]  # fmt: skip


def test_the_commands_show_verify_and_merge_a_file(tmp_path: Path, call: CommandLine) -> None:
    torch.save({"model": {"w": torch.ones(2, 3).t()}, "step": 7}, tmp_path / "x.pt")
    outputs = {}
    for command in (["info"], ["ls"], ["verify"], ["merge", tmp_path / "out"]):
        code, outputs[command[0]], _ = call(command[0], tmp_path / "x.pt", *command[1:])
        assert code == 0
    assert "kind        torch" in outputs["info"]
    assert "1: step (int 7)" in outputs["info"]
    assert "[3,2]" in outputs["ls"]
    assert "x.pt" in outputs["ls"]
    assert load_file(tmp_path / "out/model.safetensors")["w"].tolist() == [[1, 1]] * 3


def test_a_tensor_alone_is_called_tensor(tmp_path: Path) -> None:
    torch.save(torch.arange(3), tmp_path / "t.pt")
    assert merged(tmp_path / "t.pt")["tensor"].tolist() == [0, 1, 2]


def test_nested_names_that_become_equal_are_refused(tmp_path: Path) -> None:
    torch.save({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, tmp_path / "t.pt")
    with pytest.raises(CorruptError, match="two entries") as caught:
        open_source(tmp_path / "t.pt")
    assert caught.value.name == "a.b"


@pytest.mark.parametrize("protocol", [slow(2), 5])
def test_many_small_values_are_read(protocol: int, tmp_path: Path) -> None:
    """The work that a file may ask for is bounded by its bytes; a value of two bytes is within it."""
    small = [[] for _ in range(100_000)]
    torch.save({"w": torch.ones(1), "small": small}, tmp_path / "t.pt", pickle_protocol=protocol)
    assert len(open_source(tmp_path / "t.pt").others) == len(small)


def test_a_file_without_a_known_suffix_is_recognised_by_its_content(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "checkpoint")
    assert open_source(tmp_path / "checkpoint").kind == "torch"


def test_a_directory_with_an_index_is_read_by_it(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"b": torch.ones(2)}, tmp_path / "pytorch_model-00002-of-00002.bin")
    torch.save({"c": torch.ones(2)}, tmp_path / "training_args.bin")
    weight_map = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert sorted(open_checkpoint(tmp_path)) == ["a", "b"]
    os.unlink(tmp_path / "pytorch_model-00002-of-00002.bin")
    with pytest.raises(IncompleteError, match="missing") as caught:
        open_source(tmp_path)
    assert caught.value.path == str(tmp_path / "pytorch_model-00002-of-00002.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "../x.bin"}}')
    with pytest.raises(CorruptError, match="plain"):
        open_source(tmp_path)


def test_ranks_follow_numbers_in_file_names_or_their_order(tmp_path: Path) -> None:
    for rank in range(11):
        name = f"m-rank{rank}.pt"
        torch.save({"a": torch.ones(1), name: torch.ones(1)}, tmp_path / name)
    assert [(h.rank, Path(h.path).name) for h in open_source(tmp_path).files] == [
        (rank, f"m-rank{rank}.pt") for rank in range(11)
    ]
    torch.save({"a": torch.zeros(1)}, tmp_path / "m-rank11.pt")
    assert [h.rank for h in open_source(tmp_path).files] == list(range(12))
    with pytest.raises(ReplicaError, match="different values") as caught:
        merge_checkpoint(tmp_path, tmp_path / "out")
    assert caught.value.name == "a"
    assert [type(f) for f in verify(tmp_path).findings] == [ReplicaError]


# DTensors


def write_dtensors(mesh_shape: list[int], out: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    rank = torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", tuple(mesh_shape), mesh_dim_names=("a", "b")[: len(mesh_shape)])
    whole = torch.arange(11 * 6, dtype=torch.float32).reshape(11, 6)
    ways = {
        "rows": [Shard(0), Replicate()],
        "rows_rows": [Shard(0), Shard(0)],
        "columns_rows": [Shard(1), Shard(0)],
        "replicated": [Replicate(), Replicate()],
        "strided": [_StridedShard(0, split_factor=2), Shard(0)],
        "strided_uneven": [_StridedShard(0, split_factor=3), Replicate()],
    }
    state: dict[str, Any] = {}
    for name, placements in ways.items():
        state[name] = distribute_tensor(whole.clone(), mesh, placements[: len(mesh_shape)], src_data_rank=None)
    state["few"] = distribute_tensor(torch.ones(1, 3), mesh, [Shard(0)] * len(mesh_shape), src_data_rank=None)
    state["parameter"] = torch.nn.Parameter(state["rows"].clone())
    state["tied"] = state["rows"]
    state["of_transposed"] = DTensor.from_local(
        state["rows"].to_local().clone().t(),
        mesh,
        [Shard(1), Replicate()][: len(mesh_shape)],
        shape=(6, 11),
        stride=(1, 6),
    )
    if len(mesh_shape) == 2:
        state["of_submesh"] = distribute_tensor(whole.clone(), mesh["b"], [Shard(1)], src_data_rank=None)
        state["of_flat_mesh"] = distribute_tensor(whole.clone(), mesh._flatten(), [Shard(0)], src_data_rank=None)
    state["plain"] = torch.ones(2)
    torch.save({"model": state}, f"{out}/model-rank{rank}.pt")
    full = {
        f"model.{name}": (value.full_tensor() if isinstance(value, DTensor) else value).detach().contiguous().clone()
        for name, value in state.items()
        if name != "tied"
    }
    if rank == 0:
        save_file(full, f"{out}/expected", {"format": "pt"})


@pytest.mark.parametrize("mesh_shape", [slow((1,)), (2,), slow((3,)), slow((2, 2)), slow((1, 2))], ids=str)
def test_dtensors_merge_to_their_full_tensors(mesh_shape: tuple[int, ...], tmp_path: Path) -> None:
    ranks = int(np.prod(mesh_shape))
    run_ranks(write_dtensors, ranks, backend="gloo", args=(list(mesh_shape), str(tmp_path)), timeout_s=120)
    assert_same(merged(tmp_path), dict(load_file(tmp_path / "expected")))
    assert [holder.aliases for holder in open_source(tmp_path).files] == [{"model.tied": "model.rows"}] * ranks
    assert verify(tmp_path).findings == ()
    if ranks > 1:
        with open_checkpoint(tmp_path) as shards:
            expected = load_file(tmp_path / "expected")
            read = {name: tensor.read().tobytes() for name, tensor in shards.items() if name in expected}
            assert read == {name: tensor.numpy().tobytes() for name, tensor in expected.items()}
        os.unlink(tmp_path / f"model-rank{ranks - 1}.pt")
        with pytest.raises(IncompleteError):
            merge_checkpoint(tmp_path, tmp_path / "never")


def write_partial(out: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    mesh = init_device_mesh("cpu", (2,))
    state = {"w": DTensor.from_local(torch.ones(2), mesh, [Partial()])}
    torch.save(state, f"{out}/rank{torch.distributed.get_rank()}.pt")


def test_an_unfinished_sum_is_refused_by_name(tmp_path: Path) -> None:
    run_ranks(write_partial, 2, backend="gloo", args=(str(tmp_path),))
    with pytest.raises(UnsupportedError, match="pending reduction") as caught:
        merged(tmp_path)
    assert (caught.value.name, caught.value.rank, caught.value.path) == ("w", 0, str(tmp_path / "rank0.pt"))


def write_out_of_order(out: str) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh("cpu", [1, 0])
    state = {"w": distribute_tensor(torch.ones(2), mesh, [Shard(0)], src_data_rank=None)}
    torch.save(state, f"{out}/rank{torch.distributed.get_rank()}.pt")


def test_a_mesh_with_ranks_out_of_order_is_refused(tmp_path: Path) -> None:
    run_ranks(write_out_of_order, 2, backend="gloo", args=(str(tmp_path),))
    with pytest.raises(UnsupportedError, match="out of order") as caught:
        merged(tmp_path)
    assert caught.value.name == "w"


def write_misfits(out: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2,))
    rank = torch.distributed.get_rank()
    for name, placement in (("shard", Shard(0)), ("strided", _StridedShard(0, split_factor=2))):
        for shape in ((2, 4), (4, 1), (0, 2)):
            local = DTensor.from_local(torch.ones(shape), mesh, [placement], shape=(8, 2), stride=(2, 1))
            torch.save({"w": local}, f"{out}/{name}-{shape[0]}-rank{rank}.pt")


def test_a_local_part_that_does_not_fit_its_placements_is_refused(tmp_path: Path) -> None:
    run_ranks(write_misfits, 2, backend="gloo", args=(str(tmp_path),))
    for path in tmp_path.iterdir():
        with pytest.raises(CorruptError, match="its placements") as caught:
            open_source(path)
        assert (caught.value.name, caught.value.path) == ("w", str(path))


def layout_of(**state: Any) -> OpaqueObject:
    return OpaqueObject("_MeshLayout", (), state)


OLDER_MESHES = {
    "2.2 to 2.8": {
        "mesh": OpaqueObject("_rebuild_tensor_v2", (None, 0, (2, 3), (3, 1))),
        "_flatten_mesh_list": tuple(range(6)),
    },
    "2.9": {"_layout": layout_of(shape=(2, 3), stride=(3, 1)), "_flatten_rank_map": tuple(range(6))},
}


def shape_of(state: dict[str, Any], cuts: list[DimSplit | None]) -> list[int]:
    return _mesh_shape(state, cuts, Budget("x"), {})


@pytest.mark.parametrize("state", OLDER_MESHES.values(), ids=OLDER_MESHES)
def test_meshes_of_older_torch_are_read(state: dict[str, Any]) -> None:
    """Written by hand after the sources of these versions, none of which is installed here."""
    assert shape_of(state, [DimSplit(0), DimSplit(0)]) == [2, 3]
    key = "_flatten_mesh_list" if "mesh" in state else "_flatten_rank_map"
    assert shape_of(state | {key: (0, 2, 1, 3, 4, 5)}, [None, None]) == [2, 3]
    for cuts in ([DimSplit(0), None], [None, DimSplit(0)]):
        with pytest.raises(UnsupportedError, match="out of order"):
            shape_of(state | {key: (0, 2, 1, 3, 4, 5)}, cuts)


def test_a_nested_axis_is_read_and_one_larger_than_its_mesh_is_refused() -> None:
    nested = {"_layout": layout_of(shape=((2, 2), 3), stride=((6, 3), 1)), "_flatten_rank_map": tuple(range(12))}
    assert shape_of(nested, [DimSplit(0), None]) == [4, 3]
    nested["_layout"] = layout_of(shape=((2, 2), 3), stride=((3, 6), 1))
    with pytest.raises(UnsupportedError, match="out of order"):
        shape_of(nested, [DimSplit(0), None])
    for stride, message in (
        (1 << 40, "is larger"),
        (-1, "not a list"),
        (True, "not a list"),
    ):
        with pytest.raises(ValueError, match=message):
            shape_of({"_layout": layout_of(shape=1 << 30, stride=stride), "_flatten_rank_map": (0, 1)}, [DimSplit(0)])
