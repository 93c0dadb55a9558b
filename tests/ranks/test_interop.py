"""torch, transformers and safetensors load exports of this package, which loads what torch's writers save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from equality import assert_same, equal_bits
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import build

import statexchange as sx
from statexchange.testing import run_ranks

NAMES = ("llama", "tied", "mixtral")
EXPORTS = ("fsdp", "fsdp-files", "tp", "tp-files")
MAX_SHARD_BYTES = 4000  # so that an export has several files


def sharded(name: str, seed: int, mesh: Any = None) -> Any:
    from torch.distributed.fsdp import fully_shard

    model = build(name, seed)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(path: str) -> Any:
    """Return a model that transformers itself distributes."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    return AutoModelForCausalLM.from_pretrained(
        path, distributed_config=DistributedConfig(tp_plan="auto", tp_size=2), dtype="auto"
    )


def differing(found: Any, name: str) -> list[str]:
    """Return the names of tensors that differ from the exported model."""
    expected = build(name).state_dict()
    full = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in found.items()}
    assert full.keys() == expected.keys()
    return [n for n in expected if not equal_bits(full[n], expected[n])]


def writes(out: str) -> None:
    """Export from FSDP2 and tensor parallelism, write with torch's writer from FSDP2, and read exports with torch."""
    for name in NAMES:
        folder = f"{out}/{name}"
        options = {"files_from": f"{folder}/config"}
        model = sharded(name, 1)
        sx.export_checkpoint(model, f"{folder}/fsdp", **options)
        sx.export_checkpoint(model, f"{folder}/fsdp-files", max_shard_size=MAX_SHARD_BYTES, **options)
        dcp.save({"model": model.state_dict(), "step": 3}, checkpoint_id=f"{folder}/dcp")
        writer = dcp.HuggingFaceStorageWriter(f"{folder}/hf", save_distributed=True)
        dcp.save(untied_names(model.state_dict(), name), storage_writer=writer)
        # torch's reader knows no names but those in memory, which transformers does not write for Mixtral.
        for export in () if name == "mixtral" else ("fsdp", "fsdp-files"):
            other = sharded(name, 2)
            state = untied_names(other.state_dict(), name)
            dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(f"{folder}/{export}"))
            assert differing(other.state_dict(), name) == []
        model = tensor_parallel(f"{folder}/expected")
        sx.export_checkpoint(model, f"{folder}/tp", **options)
        sx.export_checkpoint(model, f"{folder}/tp-files", max_shard_size=MAX_SHARD_BYTES, **options)
    torch.distributed.barrier()


def untied_names(state: Any, name: str) -> dict[str, Any]:
    """Drop the second name of tied tensors.

    torch's reader needs all names that it is given, and its writer refuses two names of one tensor.
    """
    return {n: t for n, t in state.items() if name != "tied" or n != "lm_head.weight"}


def reads(out: str) -> None:
    """Load saves and exports of two ranks on a mesh of three, and on one with replicas."""
    from torch.distributed.device_mesh import init_device_mesh

    meshes = [init_device_mesh("cpu", (3,)), init_device_mesh("cpu", (3, 1), mesh_dim_names=("replicate", "shard"))]
    for name in NAMES:
        for number, source in enumerate(("dcp", "hf", "fsdp", "tp-files")):
            live = sharded(name, 2, meshes[number % 2])
            sx.load_checkpoint({"model": live} if source == "dcp" else live, f"{out}/{name}/{source}")
            assert differing(live.state_dict(), name) == [], (name, source)
    torch.distributed.barrier()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("interop")
    for name in NAMES:
        model = build(name)
        model.save_pretrained(out / name / "expected")
        model.config.save_pretrained(out / name / "config")
    run_ranks(writes, 2, backend="gloo", args=(str(out),), timeout_s=120)
    return out


@pytest.mark.parametrize("export", EXPORTS)
@pytest.mark.parametrize("name", NAMES)
def test_transformers_loads_what_ranks_have_exported(written: Path, name: str, export: str) -> None:
    from transformers import AutoModelForCausalLM

    assert len(list((written / name / export).glob("*.safetensors"))) > (3 if "files" in export else 0)
    model, expected = AutoModelForCausalLM.from_pretrained(written / name / export, dtype="auto"), build(name)
    assert type(model) is type(expected)
    assert_same(dict(model.named_parameters()), dict(expected.named_parameters()))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (name == "tied")


@pytest.mark.parametrize("name", NAMES)
def test_an_export_is_what_safetensors_writes_and_reads(written: Path, tmp_path: Path, name: str) -> None:
    state = load_file(written / name / "expected/model.safetensors")
    save_file(state, tmp_path / "expected", {"format": "pt"})
    for export in ("fsdp", "tp"):
        assert (written / name / export / "model.safetensors").read_bytes() == (tmp_path / "expected").read_bytes()
    for export in ("fsdp-files", "tp-files"):
        found = {}
        for path in (written / name / export).glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                assert file.metadata() == {"format": "pt"}
                found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (it is no mapping)
            save_file(load_file(path), tmp_path / "again", {"format": "pt"})
            assert path.read_bytes() == (tmp_path / "again").read_bytes()
        assert_same(found, state)


@pytest.mark.parametrize("name", NAMES)
def test_torchs_reader_loads_exports_and_merges(
    written: Path, tmp_path: Path, name: str, recwarn: pytest.WarningsRecorder
) -> None:
    sx.merge_checkpoint(
        written / name / "dcp", tmp_path / "merged", rename=[(r"^model\.", "")], max_shard_size=MAX_SHARD_BYTES
    )
    exported = load_file(written / name / "expected/model.safetensors")
    expected = dict.fromkeys(EXPORTS, exported) | {"merged": untied_names(build(name).state_dict(), name)}
    for export, values in expected.items():
        source = tmp_path / export if export == "merged" else written / name / export
        state = {key: torch.zeros_like(value) for key, value in values.items()}
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(source)), no_dist=True)
        assert_same(state, values)
    recwarn.clear()  # torch's warning about no_dist


@pytest.mark.slow
def test_saves_of_torch_and_exports_are_loaded_on_other_meshes(written: Path) -> None:
    run_ranks(reads, 3, backend="gloo", args=(str(written),), timeout_s=120)
