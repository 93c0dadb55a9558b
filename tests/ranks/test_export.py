"""Export of live sharded state: the merged directory is what one process would have saved, or it does not exist."""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from equality import assert_same, load_directory
from safetensors.torch import load_file, save_file
from starting import THREADS_AND_PROCESSES
from sweeps import slow
from torch import nn

import statexchange as sx
from statexchange.checkpoint.publication import Publication
from statexchange.formats.registry import open_source
from statexchange.state.describe import describe
from statexchange.testing import run_ranks


def part(
    rank: int, world_size: int, rows: int, columns: int, dim: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return a rank's chunk of arange(rows * columns), cut along `dim` as torch.chunk does; it may be empty."""
    whole = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns).to(dtype)
    chunks = torch.chunk(whole, world_size, dim)
    return chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)


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


# Failures


def check_refusal(
    error: type[Exception], match: str, state: dict[str, torch.Tensor], out: Path, **options: Any
) -> None:
    """Check that all ranks raise the same error, that nothing is left, and that the communicator still works."""
    with pytest.raises(error, match=match):
        sx.export_checkpoint(state, out, **options)
    comm = sx.get_communicator()
    comm.barrier()
    assert not [p.name for p in out.parent.iterdir() if p.name.startswith(f".{out.name}")]
    comm.barrier()


@pytest.mark.ranks(2, backend=THREADS_AND_PROCESSES)
def test_rules_of_a_layout_file_apply_to_live_ranks(tmp_path: Path) -> None:
    rank = sx.get_communicator().rank
    gate, up, down = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0))
    q, k = gate.clone(), up[:2].clone()
    state = {
        "gate_up.weight": torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]]),
        "qk.weight": torch.cat([q.chunk(2)[rank], k.chunk(2)[rank]]),
        "l.down.weight": down.chunk(2, 1)[rank],
        "l.down.bias": torch.ones(6),
    }
    rules = {
        "gate_up.*": {"dim": 0, "blocks": [1, 1]},
        "qk.*": {"dim": 0, "split": {"qk": {"q": 3, "k": 1}}},
        "l.down": "rowwise",
    }
    sx.export_checkpoint(state, tmp_path / "out", layout={"mesh": {"tp": 2}, "rules": rules})
    expected = {"gate_up.weight": torch.cat([gate, up]), "q.weight": q, "k.weight": k}
    expected |= {"l.down.weight": down, "l.down.bias": torch.ones(6)}
    assert_same(load_file(tmp_path / "out/model.safetensors"), expected)
    check_refusal(
        ValueError, r"mesh \(tp 3\)", {"w": q}, tmp_path / "x", layout={"mesh": {"tp": 3}, "rules": {"w": "rowwise"}}
    )


@pytest.mark.ranks(2, backend=THREADS_AND_PROCESSES)
def test_every_refusal_names_its_reason_on_every_rank(tmp_path: Path) -> None:
    rank = sx.get_communicator().rank
    out = tmp_path / "out"
    mine = torch.full((2, 2), float(rank))
    check_refusal(
        sx.errors.ReplicaError,
        r"\{\"w\": Shard\(0\)\}.*replicas=\"root\"",
        {"w": mine},
        out,
    )
    check_refusal(
        sx.errors.CorruptError,
        r"F32, .*F64.*'w', rank 1\b",
        {"w": mine if rank == 0 else mine.double()},
        out,
    )
    gap = {"w": {"global_shape": (5, 2), "offsets": (3 * rank, 0), "shape": (2, 2)}}
    check_refusal(sx.errors.IncompleteError, r"holds region \[2:3, 0:2\].*'w'", {"w": mine}, out, layout=gap)
    overlap = {"w": {"global_shape": (3, 2), "offsets": (rank, 0), "shape": (2, 2)}}
    check_refusal(
        sx.errors.OverlapError,
        r"\[1:2, 0:2\].*rank 0\b.*rank 1\b.*'w'",
        {"w": mine},
        out,
        layout=overlap,
    )
    check_refusal(ValueError, "layout pattern 'x'", {"w": mine}, out, layout={"x": {"dim": 0}})
    check_refusal(ValueError, "include pattern 'x'", {"w": mine}, out, include="x")
    check_refusal(sx.errors.UnsupportedError, r"complex128.*'w'", {"w": torch.ones(1, dtype=torch.complex128)}, out)
    check_refusal(ValueError, "'5 apples'", {"w": mine}, out, max_shard_size="5 apples")
    assert not out.exists()
    sx.export_checkpoint({"w": mine}, out, replicas="root")
    assert torch.equal(load_file(out / "model.safetensors")["w"], torch.zeros(2, 2))


@pytest.mark.ranks(2, backend=THREADS_AND_PROCESSES)
def test_an_existing_target_is_kept_without_overwrite(tmp_path: Path) -> None:
    comm = sx.get_communicator()
    out = tmp_path / "out"
    sx.export_checkpoint({"w": torch.ones(2)}, out)
    check_refusal(sx.errors.TargetExistsError, "overwrite=True", {"w": torch.zeros(2)}, out)
    assert torch.equal(load_file(out / "model.safetensors")["w"], torch.ones(2))
    comm.barrier()
    sx.export_checkpoint({"v": torch.zeros(2)}, out, overwrite=True)
    assert list(load_file(out / "model.safetensors")) == ["v"]
    comm.barrier()
    if comm.rank == 0:
        (out / "notes.txt").write_text("mine")
    comm.barrier()
    check_refusal(sx.errors.UnsafeError, r"'notes\.txt'", {"w": torch.zeros(2)}, out, overwrite=True)
    assert (out / "notes.txt").read_text() == "mine"


@pytest.mark.ranks(2, backend="gloo")
def test_an_exception_in_on_progress_is_raised_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    comm = sx.get_communicator()

    def progress(done: int, total: int) -> None:
        if comm.rank == 1 and done == total:
            raise ZeroDivisionError("oops")

    state = {f"w{i}.{comm.rank}": torch.ones(1000) for i in range(5)}
    check_refusal(
        sx.errors.PeerError,
        rf"rank 1 on {platform.node()} .*ZeroDivisionError: oops",
        state,
        tmp_path / "out",
        on_progress=progress,
    )


def dies_while_writing(out: str, rank: int) -> str:
    comm = sx.get_communicator()

    def progress(done: int, _total: int) -> None:
        if comm.rank == rank and done:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        sx.export_checkpoint({f"w{i}.{comm.rank}": torch.ones(1000) for i in range(5)}, out, on_progress=progress)
    except sx.errors.PeerError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_while_writing_leaves_the_old_target_and_the_next_run_is_clean(rank: int, tmp_path: Path) -> None:
    out = tmp_path / "out"
    sx.export_checkpoint({"old": torch.ones(1)}, out)
    outcomes = run_ranks(dies_while_writing, 3, backend="gloo", args=(str(tmp_path / "new"), rank), allow_failure=True)
    for survivor in {0, 1, 2} - {rank}:
        assert f"rank {rank} on {platform.node()} failed" in outcomes[survivor].value
    assert not (tmp_path / "new").exists()
    assert list(load_file(out / "model.safetensors")) == ["old"]
    sx.export_checkpoint({"fresh": torch.ones(1)}, tmp_path / "new")
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == ["new", "out"]


def exports_to_a_full_disk(out: str) -> str:
    try:
        sx.export_checkpoint({"w": torch.ones(1 << 20)}, out)
    except sx.errors.StorageError as error:
        return f"{error.errno} {error}"
    return "no error"


@pytest.mark.usefixtures("mounts")
def test_a_full_disk_is_one_clear_error_on_all_ranks(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=True)
    try:
        for found in run_ranks(exports_to_a_full_disk, 2, backend="gloo", args=(str(tmp_path / "out"),)):
            assert found.startswith("28 ")
            assert "model.safetensors" in found
        assert not list(tmp_path.iterdir())
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


# save_checkpoint


@pytest.mark.ranks(1, 3, backend=THREADS_AND_PROCESSES)
def test_save_checkpoint_keeps_the_sharding_and_can_be_merged(tmp_path: Path) -> None:
    comm = sx.get_communicator()
    weight = part(comm.rank, comm.world_size, 7, 4, 0)
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(1)
        model.bias.fill_(2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for step in range(2):
        saved = sx.save_checkpoint(
            {"model": model, "optimizer": optimizer, "own": {f"part{comm.rank}": weight}, "step": step},
            tmp_path / "ckpt",
            overwrite=step > 0,
        )
    names = [f"rank-{rank:05d}-of-{comm.world_size:05d}.safetensors" for rank in range(comm.world_size)]
    assert saved.rank_nbytes == tuple((tmp_path / "ckpt" / name).stat().st_size for name in names)
    assert (saved.path, saved.step, saved.nbytes) == (str(tmp_path / "ckpt"), None, sum(saved.rank_nbytes))
    assert saved.num_tensors == 9  # 2 of the model, 3 for each of them in the optimizer, and this rank's own
    comm.barrier()
    if comm.rank:
        return
    assert sorted(os.listdir(tmp_path)) == ["ckpt"]
    assert sorted(os.listdir(tmp_path / "ckpt")) == [*names, "save.json"]
    report = sx.merge_checkpoint(
        tmp_path / "ckpt", tmp_path / "merged", include=["model.*", "own.*"], rename=[(r"^model\.", "")]
    )
    merged = load_file(tmp_path / "merged/model.safetensors")
    assert report.num_tensors == 2 + comm.world_size
    assert torch.equal(merged["weight"], model.weight)
    assert torch.equal(merged["own.part0"], weight)


@pytest.mark.ranks(2, backend="threads")
def test_what_cannot_be_saved_is_named_and_the_last_save_stays(tmp_path: Path) -> None:
    comm = sx.get_communicator()
    sx.save_checkpoint({"w": torch.ones(2)}, tmp_path / "ckpt")
    comm.barrier()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(sx.errors.UnsupportedError, match=r"object.*JSON") as caught:
        sx.save_checkpoint({"w": torch.zeros(2), "x": object() if comm.rank else 1}, tmp_path / "ckpt", overwrite=True)
    assert caught.value.rank == 1
    comm.barrier()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def exports_on_odd_meshes(out: str) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    rank = sx.get_communicator().rank
    whole = torch.arange(10.0).reshape(5, 2)
    swapped = distribute_tensor(whole, DeviceMesh("cpu", [2, 0, 1]), [Shard(0)])
    with pytest.raises(sx.errors.UnsupportedError, match="out of order") as caught:
        sx.export_checkpoint({"w": swapped}, f"{out}-swapped")
    assert caught.value.name == "w"
    pair = distribute_tensor(whole, DeviceMesh("cpu", [0, 1]), [Shard(0)])
    head = {} if rank else {"head": torch.ones(2)}
    sx.export_checkpoint({"w": pair, **head}, out, layout={"head": {"dim": 0}})
    merged = load_file(f"{out}/model.safetensors")
    assert torch.equal(merged["w"], whole)
    assert torch.equal(merged["head"], torch.ones(2))


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns that a mesh leaves some ranks out
def test_a_mesh_of_some_ranks_is_exported_and_one_with_ranks_out_of_order_is_refused(tmp_path: Path) -> None:
    run_ranks(exports_on_odd_meshes, 3, backend="gloo", args=(str(tmp_path / "out"),))


def test_two_tensors_of_one_name_without_wrappers_are_refused(tmp_path: Path) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(1))
    model._orig_mod = nn.Linear(1, 1, bias=False)
    with pytest.raises(ValueError, match="this name") as caught:
        sx.export_checkpoint(model, tmp_path / "out")
    assert caught.value.name == "weight"


@pytest.mark.parametrize("out", ["shm://name"])
def test_a_target_that_is_no_directory_is_refused(out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="to a directory"):
        sx.export_checkpoint({"w": torch.ones(1)}, out)
    if out.startswith("shm:"):  # a save goes to object stores, too
        with pytest.raises(ValueError, match="to a directory"):
            sx.save_checkpoint({"w": torch.ones(1)}, out)
    assert not list(tmp_path.iterdir())


def saves_by_mesh(folder: str) -> list[int]:
    """Each slice of a mesh is a new object, but not a new communicator."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    rank = mesh.get_rank()
    sx.save_checkpoint({"other": torch.ones(1)}, f"{folder}/own{rank}", comm=sx.get_communicator().new_group([rank]))
    counts = []
    for step in range(4):
        sx.save_checkpoint({"w": torch.ones(1), "step": step}, f"{folder}/{rank // 2}-{step}", comm=mesh["b"])
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts


def test_saves_by_a_mesh_are_of_one_job_and_leave_no_descriptors(tmp_path: Path) -> None:
    for counts in run_ranks(saves_by_mesh, 4, backend="gloo", args=(str(tmp_path),)):
        assert counts == counts[:1] * 4
    for group in (0, 1):
        sources = [open_source(tmp_path / f"{group}-{step}") for step in range(4)]
        assert len({source.run for source in sources}) == 1
        assert [source.world_size for source in sources] == [2] * 4
        for source in sources:
            source.close()


def exports_the_same(out: str) -> list[int]:
    """Export; return the bytes of its description, of the plan and of its receipts that this rank sends."""
    comm = sx.get_communicator()
    nbytes: dict[str, int] = {}
    all_gather_bytes = comm.all_gather_bytes

    def counted(data: bytes, *, operation: str, **options: Any) -> list[bytes]:
        nbytes[operation] = nbytes.get(operation, 0) + len(data)
        return all_gather_bytes(data, operation=operation, **options)

    comm.all_gather_bytes = counted  # type: ignore[method-assign]
    sx.export_checkpoint({f"layer{n}": torch.full((5, 3), float(n)) for n in range(50)}, out)
    return [nbytes["the gathering of descriptions"], nbytes["the plan"]]


def test_equal_descriptions_and_the_plan_are_sent_once(tmp_path: Path) -> None:
    first, *others = run_ranks(exports_the_same, 4, args=(str(tmp_path / "four"),))
    assert min(first) > 1000
    assert others == [[0, 0]] * 3


@pytest.mark.ranks(2, backend="threads")
@pytest.mark.parametrize(
    ("option", "values", "message"),
    [
        ("dtype", (None, "float16"), "dtype .* default .*'float16'"),
        ("dtype", (torch.bfloat16, torch.float32), "dtype is 'bfloat16'.*'float32'"),
        ("include", ("*", ()), r"include is \('\*',\) .* default "),
        ("rename", (str.upper, [("a", "b")]), r"rename is .*\(\('a', 'b'\),\)"),
        ("max_shard_size", ("1GB", 10**9 + 1), "max_shard_size is 1000000000 .* 1000000001 "),
        ("replicas", ("root", "equal"), r"replicas .*'root'.* default "),
        ("layout", ({"mesh": {"tp": 2}, "rules": {}}, None), r"mesh is \{'tp': 2\} .* default "),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "",
)
def test_an_option_that_differs_between_ranks_is_named(option: str, values: Any, message: str, tmp_path: Path) -> None:
    check_refusal(
        sx.errors.InvalidArgumentError,
        message,
        {"w": torch.ones(2)},
        tmp_path / "out",
        **{option: values[sx.get_rank()]},
    )
    assert not (tmp_path / "out").exists()


def fails_beside_replicas(out: str) -> None:
    comm = sx.get_communicator()
    state = {"a": torch.zeros(1, dtype=torch.float64).expand(60_000, 60_000)}

    def stop(done: int, total: int) -> None:
        raise RuntimeError("stop")

    with pytest.raises(sx.errors.PeerError, match=r"rank 0 .*stop"):
        sx.export_checkpoint(state, out, dtype="bfloat16", on_progress=stop if comm.rank == 0 else None)


def test_a_rank_that_only_compares_replicas_raises_the_failure(tmp_path: Path) -> None:
    run_ranks(fails_beside_replicas, 2, backend="gloo", args=(str(tmp_path / "out"),))


@pytest.mark.parametrize("ranks", [1, 2])
def test_copies_on_one_rank_must_be_equal_too(ranks: int, tmp_path: Path) -> None:
    boxes = [[[[0, 0], [1, 2]], [[0, 0], [1, 2]]]] * ranks
    layout = {"w": {"global_shape": [1, 2], "boxes": boxes}}
    args = (str(tmp_path / "out"), layout)
    run_ranks(exports_copies, ranks, args=args)


def exports_copies(out: str, layout: Any) -> None:
    with pytest.raises(sx.errors.ReplicaError, match="copies of rank 0"):
        sx.export_checkpoint({"w": torch.arange(4.0).reshape(2, 2)}, out, layout=layout)
    sx.export_checkpoint({"w": torch.ones(2, 2)}, out, layout=layout)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"files_from": {"config.json": {"a": 1}}}, "config.json.*str or bytes"),
        ({"files_from": {5: "a"}}, "plain file name"),
        ({"files_from": 5}, "files_from must be"),
        ({"files_from": {"a\0b": "x"}}, "plain file name"),
        ({"files_from": {"model.safetensors": "x"}, "max_shard_size": 16}, "plain file name"),
        ({"rename": 5}, "rename must be"),
        ({"rename": [(1, 2)]}, "rename must be"),
        ({"include": 5}, "include must be"),
        ({"exclude": [5]}, "exclude must be"),
        ({"layout": {"a": {"global_shape": [4], "boxes": {"0": [[[0], [4]]]}}}}, "boxes must be"),
        ({"layout": {"a": {"global_shape": [4], "boxes": [[[0], [4]]]}}}, "boxes.*not a box"),
        ({"layout": {"a": {"global_shape": [4], "boxes": [0]}}}, "boxes.*iterable"),
    ],
    ids=str,
)
def test_wrong_options_are_errors_before_anything_is_written(options: Any, message: str, tmp_path: Path) -> None:
    state = {"a": np.arange(4.0), "b": np.arange(8.0)}
    with pytest.raises(sx.errors.InvalidArgumentError, match=message):
        sx.export_checkpoint(state, tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_numpy_matrix_is_exported_as_its_elements(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        sx.export_checkpoint({"m": np.matrix([[1.0, 2.0], [3.0, 4.0]])}, tmp_path / "out")
    assert sx.open_checkpoint(tmp_path / "out")["m"].read().tolist() == [[1.0, 2.0], [3.0, 4.0]]


def saves_slowly(folder: str) -> None:
    comm = sx.init("gloo", timeout_s=0.3)
    wide = torch.zeros(1).expand(150 if comm.rank == 0 else 1, 1 << 20)
    sx.save_checkpoint({"m": {f"w{comm.rank}": wide}}, folder, comm=comm)


def test_a_rank_that_saves_more_is_waited_for(tmp_path: Path) -> None:
    run_ranks(saves_slowly, 2, backend="gloo", args=(str(tmp_path / "saved"),), timeout_s=120)


def reduces_slowly(out: str) -> None:
    comm = sx.init("gloo", timeout_s=0.7)
    state = {"w": torch.arange(2.0) + comm.rank, "z": torch.zeros(1).expand(200, 1 << 20)}
    sx.export_checkpoint(state, out, comm=comm, layout={"*": {"reduce": "max"}})


@pytest.mark.slow
def test_ranks_that_reduce_much_are_waited_for(tmp_path: Path) -> None:
    run_ranks(reduces_slowly, 2, backend="gloo", args=(str(tmp_path / "out"),), timeout_s=120)


def test_the_report_is_right_if_the_target_is_moved_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Publication.commit

    def commit_and_move(publication: Publication, metadata: Any) -> Any:
        found = commit(publication, metadata)
        os.rename(tmp_path / "out", tmp_path / "aside")  # as another publisher would
        return found

    monkeypatch.setattr(Publication, "commit", commit_and_move)
    report = sx.export_checkpoint({"w": torch.ones(300), "v": torch.ones(7)}, tmp_path / "out", max_shard_size="1KB")
    assert len(report.files) > 3
    assert list(report.files) == sorted((path.name, path.stat().st_size) for path in (tmp_path / "aside").iterdir())


MEASURE = """
import sys, torch
import statexchange as sx

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) >> 10

place, turned = sys.argv[1], sys.argv[2] == "turned"
state = {f"w{i}": torch.ones(4096, 4096) for i in range(4)}
state = {name: tensor.T if turned else tensor for name, tensor in state.items()}
sx.export_checkpoint({"w": torch.ones(2)}, place + "/warm")
grown = [peak()]
sx.export_checkpoint(state, place + "/out")
grown.append(peak())
sx.load_checkpoint(state, place + "/out")
grown.append(peak())
print(*(after - before for before, after in zip(grown, grown[1:])))
"""


@pytest.mark.parametrize("order", [slow("contiguous"), "turned"])
def test_an_export_and_a_load_of_256_mib_take_little_memory(order: str) -> None:
    folder = Path("/dev/shm") / f"statexchange-test-{os.getpid()}"
    folder.mkdir(mode=0o700)
    try:
        command = [sys.executable, "-c", MEASURE, str(folder), order]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert max(map(int, done.stdout.split())) < 64
    finally:
        shutil.rmtree(folder)
