"""Export of live sharded state: the merged directory is what one process would have saved, or it does not exist."""

import json
from pathlib import Path

import pytest
import torch
from equality import assert_same, load_directory
from exporting import part
from safetensors.torch import load_file, save_file
from starting import THREADS_AND_PROCESSES
from sweeps import slow
from torch import nn

import statexchange as sx
from statexchange.state.describe import describe
from statexchange.testing import run_ranks


@pytest.mark.ranks(1, 2, 3, backend=THREADS_AND_PROCESSES)
def test_cut_tensors_and_replicas_become_the_file_that_save_file_writes(tmp_path: Path) -> None:
    comm = sx.get_communicator()
    cut = {
        "rows": (0, torch.float32),
        "columns": (1, torch.bfloat16),
        "few": (0, torch.int64),
        "fp8": (1, torch.float8_e4m3fn),
    }
    sizes = {"rows": (7, 5), "columns": (300, 17), "few": (2, 3), "fp8": (4, 8)}
    state = {name: part(comm.rank, comm.world_size, *sizes[name], dim, dtype) for name, (dim, dtype) in cut.items()}
    both = {
        "scale": torch.tensor(4.6052),
        "flags": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
        "größe": torch.ones(2).half(),
    }
    layout = {name: {"dim": dim} for name, (dim, _) in cut.items()}
    report = sx.export_checkpoint({**state, **both}, tmp_path / "out", layout=layout)
    whole = {name: part(0, 1, *sizes[name], dim, dtype).contiguous() for name, (dim, dtype) in cut.items()}
    if comm.rank == 0:
        save_file({**whole, **both}, tmp_path / "expected.safetensors", {"format": "pt"})
        assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "expected.safetensors").read_bytes()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["expected.safetensors", "out"]
    assert report.num_tensors == 8
    assert (
        sum(report.rank_nbytes)
        == report.nbytes
        == sum(t.numel() * t.element_size() for t in {**whole, **both}.values())
    )


def exports_a_sharded_module(shape: tuple[int, ...], out: str) -> int:
    """Export FSDP2 x TP on a mesh, and compare with the module before sharding; return the number of files."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 14), nn.Linear(14, 11, bias=False), nn.LayerNorm(11), nn.BatchNorm1d(11))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = {1: ("dp",), 2: ("dp", "tp")}[len(shape)]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if "tp" in names:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    shards = describe(model, rank=dist.get_rank()).tensors
    whole = [n for n, t in model.state_dict().items() if getattr(t, "device_mesh", mesh["dp"]).size() == mesh.size()]
    assert whole
    assert all(
        shards[name].layout.placement is not None for name in whole if hasattr(model.state_dict()[name], "placements")
    )
    report = sx.export_checkpoint(model, out, max_shard_size=400)
    assert_same(load_directory(out), expected)
    dist.barrier()
    return len(report.files)


@pytest.mark.parametrize(
    ("shape", "ranks"), [((2,), 2), slow((3,), 3), ((2, 2), 4), slow((4, 1), 4), slow((1, 2), 2)], ids=str
)
def test_fsdp2_and_tensor_parallel_modules_merge_bit_equal(shape: tuple[int, ...], ranks: int, tmp_path: Path) -> None:
    assert min(run_ranks(exports_a_sharded_module, ranks, backend="gloo", args=(shape, str(tmp_path / "out")))) > 3
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    total = sum(
        t.numel() * t.element_size() for f in (tmp_path / "out").glob("*.safetensors") for t in load_file(f).values()
    )
    assert index["metadata"]["total_size"] == total
    assert set(index["weight_map"].values()) == {p.name for p in (tmp_path / "out").glob("*.safetensors")}


def exports_all_placements(out: str) -> None:
    """Export DTensors of every kind of placement on a 2 x 2 mesh, and compare with the whole tensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    kinds = {
        "rows_columns": [Shard(0), Shard(1)],
        "rows_rows": [Shard(0), Shard(0)],
        "columns_rows": [Shard(1), Shard(0)],
        "replicated": [Replicate(), Replicate()],
        "hybrid": [Replicate(), Shard(0)],
        "hybrid_columns": [Shard(1), Replicate()],
    }
    whole = {name: torch.randn(5, 3, generator=torch.Generator().manual_seed(i)) for i, name in enumerate(kinds)}
    whole |= {
        "one_dim": torch.arange(3.0),
        "cube": torch.randn(3, 3, 5, generator=torch.Generator().manual_seed(9)),
    }
    kinds |= {"one_dim": [Shard(0), Shard(0)], "cube": [Shard(2), Shard(1)]}
    state = {name: distribute_tensor(whole[name], mesh, kinds[name]) for name in kinds}
    sx.export_checkpoint(state, out, comm=mesh)
    assert_same(load_file(f"{out}/model.safetensors"), whole)


def test_every_placement_merges_bit_equal(tmp_path: Path) -> None:
    run_ranks(exports_all_placements, 4, backend="gloo", args=(str(tmp_path / "out"),))


def exports_a_partial_sum(out: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    mesh = init_device_mesh("cpu", (2,))
    unfinished = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(sx.errors.UnsupportedError, match=r"unfinished sum.*'layer\.w'"):
        sx.export_checkpoint({"layer.w": unfinished}, out)


def test_an_unfinished_sum_is_refused_by_name(tmp_path: Path) -> None:
    run_ranks(exports_a_partial_sum, 2, backend="gloo", args=(str(tmp_path / "out"),))
    assert not list(tmp_path.iterdir())


@pytest.mark.ranks(2, backend="threads")
def test_options_select_rename_cast_and_split(tmp_path: Path) -> None:
    comm = sx.get_communicator()
    (tmp_path / "cfg").mkdir(exist_ok=True)
    (tmp_path / "cfg/config.json").write_text("{}")
    comm.barrier()
    state = {
        "model.a": torch.arange(4.0),
        "model.b": torch.arange(3),
        "lora.c": torch.ones(2),
        "model.skip": torch.ones(1),
    }
    report = sx.export_checkpoint(
        state,
        tmp_path / "out",
        include="model.*",
        exclude=["*.skip"],
        rename=[(r"^model\.", "")],
        dtype=torch.bfloat16,
        max_shard_size="20B",
        filename_pattern="adapter_model{suffix}.safetensors",
        files_from=tmp_path / "cfg",
    )
    assert [name for name, _ in report.files] == [
        "adapter_model-00001-of-00002.safetensors",
        "adapter_model-00002-of-00002.safetensors",
        "adapter_model.safetensors.index.json",
        "config.json",
        "statexchange.json",
    ]
    second, first = (
        load_file(tmp_path / "out" / name) for name, _ in report.files[:2]
    )  # a tensor larger than the limit comes first
    assert torch.equal(first["a"], torch.arange(4.0).bfloat16())
    assert torch.equal(second["b"], torch.arange(3))


@pytest.mark.ranks(2, backend="threads")
def test_tied_tensors_are_written_once_and_recorded(tmp_path: Path) -> None:
    model = nn.Module()
    model.embed = nn.Embedding(5, 3)
    model.head = nn.Linear(3, 5, bias=False)
    model.head.weight = model.embed.weight
    with torch.no_grad():
        model.embed.weight.copy_(torch.arange(15.0).reshape(5, 3))
    report = sx.export_checkpoint(model, tmp_path / "out")
    assert report.aliases == {"head.weight": "embed.weight"}
    assert list(load_file(tmp_path / "out/model.safetensors")) == ["embed.weight"]
    assert json.loads((tmp_path / "out/statexchange.json").read_text())["aliases"] == report.aliases


def test_wrappers_leave_no_trace_in_names(tmp_path: Path) -> None:
    inner = nn.Sequential(nn.Linear(2, 2))
    with torch.no_grad():
        inner[0].weight.fill_(1)
        inner[0].bias.fill_(2)
    model = torch.optim.swa_utils.AveragedModel(torch.compile(inner, backend="eager"))
    sx.export_checkpoint(model, tmp_path / "out")
    assert sorted(load_file(tmp_path / "out/model.safetensors")) == ["0.bias", "0.weight"]


@pytest.mark.ranks(2, backend=THREADS_AND_PROCESSES)
def test_pipeline_parts_have_different_names_on_each_rank(tmp_path: Path) -> None:
    rank = sx.get_communicator().rank
    sx.export_checkpoint(
        [{f"layer{rank}.w": torch.full((3,), float(rank))}, {f"layer{rank}.b": torch.ones(1)}],
        tmp_path / "out",
    )
    merged = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(merged["layer1.w"], torch.ones(3))
    assert len(merged) == 4
