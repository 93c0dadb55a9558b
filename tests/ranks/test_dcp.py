"""torch DCP directories: written by torch and accelerate, read without torch, merged bit-equal, refused by name."""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from commands import run_main
from safetensors.torch import load_file, save_file
from sweeps import slow
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import statexchange as sx
from statexchange.checkpoint.merge import merge_checkpoint
from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    StateExchangeError,
    UnsafeError,
    UnsupportedError,
)
from statexchange.formats.registry import open_checkpoint, open_source
from statexchange.report.summary import summarize
from statexchange.report.verify import verify
from statexchange.testing import run_ranks

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return different small values for every element."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 120).to(torch.float32).to(dtype).reshape(shape)


def known_tensors() -> dict[str, torch.Tensor]:
    tensors = {f"dtypes.{str(dtype).removeprefix('torch.')}": numbers(7, 3, dtype=dtype) for dtype in DTYPES}
    return tensors | {
        "few": numbers(1, 4),  # fewer rows than ranks, so some parts are empty
        "cube": numbers(5, 6, 7),
        "large": torch.randn(700, 801, generator=torch.Generator().manual_seed(3)),
        "größe": numbers(3),
    }


def write_placements(mesh_shape: list[int], out: str) -> None:
    """Write every tensor with several placements, plain tensors of several dtypes, and values that are no tensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", tuple(mesh_shape))
    ways = [
        [Shard(0), Shard(1)],
        [Shard(1), Shard(0)],
        [Replicate(), Shard(0)],
        [Shard(0), Shard(0)],
        [Replicate()] * 2,
    ]
    expected, state = {}, {}
    for number, (name, tensor) in enumerate(known_tensors().items()):
        for way in range(len(ways)) if number == 0 else [number % len(ways)]:
            placements = [Shard(0) if p.is_shard() and tensor.ndim == 1 else p for p in ways[way]][: len(mesh_shape)]
            expected[f"{name}.{way}"] = tensor.clone()
            state[f"{name}.{way}"] = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
    plain = {
        "scalar": torch.tensor(2.5),
        "count": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "transposed": numbers(300, 4).t(),
        "narrow": numbers(50, 60)[10:20, 3::2],
    }
    nested = {"model": state, "plain": plain, "lr": 0.1, "step": 7, "betas": (0.9, 0.999), "note": "x", "none": None}
    dcp.save(nested, checkpoint_id=f"{out}/dcp")
    if torch.distributed.get_rank() == 0:
        flat = {f"model.{n}": t for n, t in expected.items()} | {f"plain.{n}": t.contiguous() for n, t in plain.items()}
        save_file(flat, f"{out}/expected", {"format": "pt"})


@pytest.mark.parametrize("mesh_shape", [slow((1,)), (2,), slow((3,)), slow((2, 2))], ids=str)
def test_what_dcp_saves_merges_to_what_save_file_writes(mesh_shape: tuple[int, ...], tmp_path: Path) -> None:
    ranks = torch.Size(mesh_shape).numel()
    run_ranks(write_placements, ranks, backend="gloo", args=(list(mesh_shape), str(tmp_path)), timeout_s=120)
    source = open_source(tmp_path / "dcp")
    assert (source.kind, [holder.rank for holder in source.files]) == ("dcp", list(range(ranks)))
    assert source.others == {
        "lr": "float 0.1", "step": "int 7", "betas": "tuple of 2", "note": "str 'x'", "none": "None"
    }  # fmt: skip
    merge_checkpoint(tmp_path / "dcp", tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "expected").read_bytes()
    report = verify(tmp_path / "dcp")
    assert (report.findings, report.num_unproven) == ((), report.num_boxes)


def write_model(out: str) -> list[str]:
    """FSDP2 over tensor parallel with an optimizer's state, and the full tensors of both."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Linear(12, 8), torch.nn.BatchNorm1d(8))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=f"{out}/dcp")
    full: dict[str, torch.Tensor] = {}

    def gather(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, child in value.items():
                gather(f"{prefix}.{key}" if prefix else key, child)
        elif isinstance(value, torch.Tensor):
            full[prefix] = (value.full_tensor() if isinstance(value, DTensor) else value).clone()

    gather("", states)
    kinds = {type(p).__name__ for p in states["model"]["0.weight"].placements}
    if torch.distributed.get_rank() == 0:
        save_file(full, f"{out}/expected", {"format": "pt"})
    return sorted(kinds)


@pytest.mark.slow
def test_fsdp2_over_tensor_parallel_merges_to_the_full_tensors(tmp_path: Path) -> None:
    assert "_StridedShard" in run_ranks(write_model, 4, backend="gloo", args=(str(tmp_path),), timeout_s=120)[0]
    merge_checkpoint(tmp_path / "dcp", tmp_path / "out", section="all")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "expected").read_bytes()
    source = open_source(tmp_path / "dcp")
    assert next(text for name, text in source.others.items() if name.endswith(".lr")) == "float 0.01"
    assert any(name.startswith("optimizer.state.") for name in load_file(tmp_path / "out/model.safetensors"))


def write_with_accelerate(out: str) -> None:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3))
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    save_fsdp_model(plugin, accelerator, model, out)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, out)
    full = {name: value.full_tensor() for name, value in model.state_dict().items()}
    if torch.distributed.get_rank() == 0:
        save_file(full, f"{out}/expected", {"format": "pt"})


def test_what_accelerate_writes_is_merged(tmp_path: Path) -> None:
    run_ranks(write_with_accelerate, 2, backend="gloo", args=(str(tmp_path),), timeout_s=120)
    (tmp_path / "scheduler.bin").write_bytes(b"")  # accelerate's save_state writes such files beside them
    merge_checkpoint(tmp_path / "pytorch_model_fsdp_0", tmp_path / "out", rename=[(r"^model\.", "")])
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "expected").read_bytes()
    merge_checkpoint(tmp_path, tmp_path / "same")
    assert (tmp_path / "same/model.safetensors").read_bytes() == (tmp_path / "expected").read_bytes()
    names = {tensor.shard.name for _, tensor in open_source(tmp_path / "optimizer_0").shards()}
    assert sum(name.endswith(".exp_avg") for name in names) == 4


def write_hugging_face(out: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    full = {"rows": numbers(7, 3), "columns": numbers(4, 5, dtype=torch.bfloat16), "scale": torch.tensor(2.0)}
    state = {
        "rows": distribute_tensor(full["rows"], mesh, [Shard(0)], src_data_rank=None),
        "columns": distribute_tensor(full["columns"], mesh, [Shard(1)], src_data_rank=None),
        "scale": full["scale"],
    }
    writer = dcp.HuggingFaceStorageWriter(
        f"{out}/hf", fqn_to_index_mapping={"rows": 1, "columns": 2, "scale": 1}, save_distributed=True
    )
    dcp.save(state, storage_writer=writer)
    if torch.distributed.get_rank() == 0:
        save_file(full, f"{out}/expected", {"format": "pt"})


def test_torchs_hugging_face_shards_are_shards(tmp_path: Path) -> None:
    run_ranks(write_hugging_face, 2, backend="gloo", args=(str(tmp_path),), timeout_s=120)
    source = open_source(tmp_path / "hf")
    assert (source.kind, sorted({holder.rank for holder in source.files})) == ("huggingface", [0, 1])
    merge_checkpoint(tmp_path / "hf", tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "expected").read_bytes()
    with open_checkpoint(tmp_path / "hf") as shards, open_checkpoint(tmp_path / "out") as whole:
        assert {n: t.read().tobytes() for n, t in shards.items()} == {n: t.read().tobytes() for n, t in whole.items()}
    first = min(holder.path for holder in source.files if "rows" in holder.tensors)
    os.unlink(first)
    with pytest.raises(IncompleteError, match="no file holds") as caught:
        merge_checkpoint(tmp_path / "hf", tmp_path / "other")
    assert caught.value.path == str(tmp_path / "hf")
    assert ["no file holds" in str(problem) for problem in summarize(tmp_path / "hf").problems] == [True]


@pytest.mark.parametrize(
    "text", ["[]", '{"w":[]}', '{"w":{}}', '{"w":{"saved_offsets":[0]}}', '{"w":{"saved_offsets":[-1,0]}}', "x"]
)
def test_broken_sharding_metadata_is_corrupt(tmp_path: Path, text: str) -> None:
    save_file({"w": numbers(2, 2)}, tmp_path / "x.safetensors", {"DCP_SHARDING_INFO": text})
    with pytest.raises(CorruptError) as caught:
        open_source(tmp_path / "x.safetensors")
    assert caught.value.path == str(tmp_path / "x.safetensors")


# Directories that one rank wrote


@pytest.fixture
def saved(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> Path:
    """Return a directory that one rank wrote, with w, b and lr."""
    dcp.save({"w": numbers(40, 50), "b": numbers(5), "lr": 0.5}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    recwarn.clear()
    return tmp_path / "dcp"


def rewrite(saved: Path, change: Any) -> None:
    """Change the metadata, as objects of torch."""
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    change(metadata)
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))


def refused(saved: Path, kind: type[StateExchangeError], match: str) -> StateExchangeError:
    """Return the error that a merge raises; nothing is published."""
    with pytest.raises(kind, match=match) as caught:
        merge_checkpoint(saved, saved.parent / "never")
    assert not (saved.parent / "never").exists()
    return caught.value


def test_a_directory_of_one_rank_is_a_lazy_mapping(saved: Path) -> None:
    checkpoint = open_checkpoint(saved)
    assert checkpoint["w"].shape == (40, 50)
    assert checkpoint["w"].read().tolist() == numbers(40, 50).tolist()


def test_the_metadata_file_alone_is_no_checkpoint(saved: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=f" {saved} "):
        open_source(saved / ".metadata")


def test_a_file_for_each_entry_and_torchs_own_conversion(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    state = {"w": numbers(40, 50), "nested": {"b": numbers(5)}}
    writer = dcp.FileSystemWriter(tmp_path / "dcp", single_file_per_rank=False, thread_count=2)
    dcp.save(state, storage_writer=writer, no_dist=True)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "converted.pt")
    recwarn.clear()
    assert [holder.rank for holder in open_source(tmp_path / "dcp").files] == [0, 0]
    for source in ("dcp", "converted.pt"):
        merge_checkpoint(tmp_path / source, tmp_path / f"{source}.out")
        found = load_file(tmp_path / f"{source}.out/model.safetensors")
        assert found["w"].equal(state["w"])
        assert found["nested.b"].equal(state["nested"]["b"])


def test_what_is_saved_in_the_background_is_read(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    state = {"w": numbers(40, 50)}
    dcp.async_save(state, checkpoint_id=tmp_path / "dcp", no_dist=True).result()  # type: ignore[union-attr]
    recwarn.clear()
    merge_checkpoint(tmp_path / "dcp", tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors")["w"].equal(state["w"])


def test_the_commands_show_and_verify_a_directory(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_main(capsys, "info", str(saved), "--json")
    info = json.loads(out)["data"]
    assert (code, info["kind"], info["num_tensors"], info["ranks"]) == (0, "dcp", 2, [0])
    assert info["others"] == {"lr": "float 0.5"}
    assert "1: lr (float 0.5)" in run_main(capsys, "info", str(saved))[1]
    assert "[40,50]" in run_main(capsys, "ls", str(saved))[1]
    assert run_main(capsys, "verify", str(saved))[0] == 0
    os.unlink(saved / "__0_0.distcp")
    code, _, err = run_main(capsys, "info", str(saved))
    assert (code, "__0_0.distcp" in err) == (5, True)


def test_a_missing_file_is_named_with_its_rank(saved: Path) -> None:
    os.unlink(saved / "__0_0.distcp")
    error = refused(saved, IncompleteError, "missing.* 3 tensors")
    assert (error.rank, error.path) == (0, str(saved / "__0_0.distcp"))
    assert [type(p) for p in open_source(saved, strict=False).problems] == [IncompleteError]


@pytest.mark.parametrize("left", [0, 1, 100, 5000])
def test_a_truncated_file_is_named(saved: Path, left: int) -> None:
    path = saved / "__0_0.distcp"
    os.truncate(path, left)
    error = refused(saved, CorruptError, "truncated|not end")
    assert error.path == str(path)
    assert error.name is not None


def test_a_file_with_any_changed_byte_is_opened_if_not_strict(saved: Path) -> None:
    """Errors become problems of the source."""
    path = saved / "__0_0.distcp"
    data = path.read_bytes()
    for at in range(0, len(data), 29):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
        assert open_source(saved, strict=False).kind == "dcp"


def test_metadata_with_any_changed_byte_is_opened_or_refused(saved: Path) -> None:
    data = (saved / ".metadata").read_bytes()
    outcomes = set()
    for at in range(len(data)):
        (saved / ".metadata").write_bytes(data[:at] + bytes([data[at] ^ 0x15]) + data[at + 1 :])
        try:
            outcomes.add(open_source(saved, strict=False).kind)
        except (CorruptError, UnsafeError, UnsupportedError):
            outcomes.add("refused")
    assert outcomes == {"dcp", "refused"}


def storage_of(metadata: Any, name: str) -> Any:
    return next(place for index, place in metadata.storage_data.items() if index.fqn == name)


def test_metadata_that_points_past_the_end_is_refused(saved: Path) -> None:
    size = (saved / "__0_0.distcp").stat().st_size
    rewrite(saved, lambda m: setattr(storage_of(m, "b"), "offset", size))
    refused(saved, CorruptError, "truncated")
    rewrite(saved, lambda m: setattr(storage_of(m, "b"), "offset", 1 << 60))
    refused(saved, CorruptError, "sizes")


def test_metadata_with_two_swapped_entries_is_refused(saved: Path) -> None:
    def swap(metadata: Any) -> None:
        w, b = storage_of(metadata, "w"), storage_of(metadata, "b")
        w.offset, b.offset, w.length, b.length = b.offset, w.offset, b.length, w.length

    rewrite(saved, swap)
    assert refused(saved, CorruptError, "shape in .metadata").name in "wb"


def test_another_dtype_or_shape_in_the_metadata_is_refused(saved: Path) -> None:
    rewrite(saved, lambda m: setattr(m.state_dict_metadata["b"].properties, "dtype", torch.int32))
    refused(saved, CorruptError, "dtype in .metadata")
    rewrite(saved, lambda m: setattr(m.state_dict_metadata["b"].properties, "dtype", torch.float32))
    rewrite(saved, lambda m: setattr(m.state_dict_metadata["b"], "size", torch.Size((4,))))
    refused(saved, CorruptError, "outside")
    rewrite(saved, lambda m: setattr(m.state_dict_metadata["b"], "size", torch.Size((6,))))
    refused(saved, IncompleteError, r"\[5:6\]")


def test_a_part_without_a_place_in_a_file_is_incomplete(saved: Path) -> None:
    def forget(metadata: Any) -> None:
        metadata.storage_data = {i: p for i, p in metadata.storage_data.items() if i.fqn != "b"}

    rewrite(saved, forget)
    assert refused(saved, IncompleteError, "in no file").name == "b"
    assert open_source(saved, strict=False).problems


@pytest.mark.parametrize("name", ["../x.distcp", "/etc/passwd", "__0_0.distcp/..", "", 5, None])
def test_metadata_cannot_name_files_elsewhere(saved: Path, name: Any) -> None:
    rewrite(saved, lambda m: setattr(storage_of(m, "b"), "relative_path", name))
    with pytest.raises(CorruptError):
        open_source(saved, strict=False)


def test_bytes_of_a_storage_extension_are_refused(saved: Path) -> None:
    rewrite(saved, lambda m: setattr(storage_of(m, "b"), "transform_descriptors", ["stream.zstd"]))
    refused(saved, UnsupportedError, "zstd")


def test_an_object_of_an_unknown_class_is_listed_and_not_built(saved: Path) -> None:
    shutil.rmtree(saved)
    dcp.save({"w": numbers(2), "path": Unknown()}, checkpoint_id=saved, no_dist=True)
    source = open_source(saved)
    assert "Unknown" in source.others["path"]


def test_tensors_in_an_unknown_object_are_refused_by_name(saved: Path) -> None:
    shutil.rmtree(saved)
    holding = Unknown()
    holding.deep = [torch.ones(1)]  # type: ignore[attr-defined]
    dcp.save({"w": numbers(2), "odd": holding}, checkpoint_id=saved, no_dist=True)
    with pytest.raises(UnsupportedError, match="its class") as caught:
        merge_checkpoint(saved, saved.parent / "never")
    assert (caught.value.name, caught.value.rank) == ("odd", 0)
    assert [finding.name for finding in verify(saved).findings] == ["odd"]
    merge_checkpoint(saved, saved.parent / "some", include="w")


def test_a_saved_state_of_random_generators_is_named(saved: Path) -> None:
    """Megatron saves such a list as one object, with tensors in it."""
    path = saved / "__1_0.distcp"
    torch.save([{"torch": torch.random.get_rng_state(), "numpy": np.random.get_state()}], path.open("wb"))

    def place(metadata: Any) -> None:
        stored = storage_of(metadata, "lr")
        stored.relative_path, stored.offset, stored.length = path.name, 0, path.stat().st_size

    rewrite(saved, place)
    assert open_source(saved).others == {"lr": "list of 1, with tensors in it"}
    report = merge_checkpoint(saved, saved.parent / "out")
    assert report.notes == ("1 entry is not a tensor, not written: lr (list of 1, with tensors in it)",)


def test_a_tensor_of_an_unknown_dtype_does_not_hide_others(saved: Path) -> None:
    rewrite(saved, lambda m: setattr(m.state_dict_metadata["b"].properties, "dtype", torch.bits8))
    with pytest.raises(UnsupportedError, match="dtype bits8") as caught:
        merge_checkpoint(saved, saved.parent / "never")
    assert caught.value.name == "b"
    merge_checkpoint(saved, saved.parent / "some", exclude="b")
    assert list(load_file(saved.parent / "some/model.safetensors")) == ["w"]
    assert [(one.name, one.dtype, one.shape) for one in open_source(saved).unreadable] == [("b", "bits8", (5,))]


class Unknown:
    """A class that no reader knows."""


@pytest.mark.parametrize(
    "value", [None, 5, [], {}, {"state_dict_metadata": {}}, torch.Size((1,)), [[[[]]]], torch.device("cpu")], ids=repr
)
def test_metadata_of_another_type_is_corrupt(saved: Path, value: Any) -> None:
    (saved / ".metadata").write_bytes(pickle.dumps(value))
    with pytest.raises((CorruptError, UnsafeError)) as caught:
        open_source(saved)
    assert caught.value.path == str(saved / ".metadata")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_optimizer_is_loaded_alone(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    def trained() -> dict[str, Any]:
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    saved = trained()
    model, optimizer = get_state_dict(saved["model"], saved["optimizer"])
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path, no_dist=True)
    fresh = trained()
    weight = fresh["model"].weight.tolist()
    assert sx.load_checkpoint(fresh, tmp_path, include="optimizer.*").num_tensors == 6
    assert fresh["model"].weight.tolist() == weight
    states = [one["optimizer"].state[one["model"].weight]["exp_avg"].tolist() for one in (saved, fresh)]
    assert states[0] == states[1]
