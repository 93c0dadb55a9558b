"""Real models by real writers: a merge equals bit by bit what one process saves, and it can be loaded."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from equality import assert_same, bits_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import MODELS, State, build, llama, untied
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import statexchange as sx
from statexchange.testing import run_ranks

FROM_MODEL = [(r"^model\.", "")]  # all writers below save {"model": ...}


def assert_loads(out: Path, expected: Any) -> None:
    """Check that transformers and statexchange load the directory into a model with the values of `expected`."""
    loaded = type(expected).from_pretrained(out, dtype="auto")
    named = dict(expected.named_parameters())
    assert_same(dict(loaded.named_parameters()), named)
    assert (loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight) == (
        expected.get_input_embeddings().weight is expected.get_output_embeddings().weight
    )


# FSDP2 on two ranks, saved by statexchange, torch DCP, and torch.save on each rank; transformers' own TP


def write_sharded(out: str) -> None:
    from torch.distributed.fsdp import fully_shard

    rank = torch.distributed.get_rank()
    for name in MODELS:
        model = build(name)
        whole = {p for p in model.parameters() if not p.ndim}  # FSDP2 does not accept it
        for layer in [m for m in model.modules() if type(m).__name__.endswith(("DecoderLayer", "EncoderLayer"))]:
            fully_shard(layer)
        fully_shard(model, ignored_params=whole)
        os.makedirs(f"{out}/{name}/torch", exist_ok=True)
        sx.save_checkpoint({"model": model, "step": 3}, f"{out}/{name}/statexchange")
        dcp.save({"model": model.state_dict(), "step": 3}, checkpoint_id=f"{out}/{name}/dcp")
        torch.save({"model": model.state_dict(), "step": 3}, f"{out}/{name}/torch/rank{rank}.pt")


def write_tensor_parallel(out: str) -> None:
    """Write the local tensors of a model that transformers itself distributes, as plain files."""
    from torch.distributed.tensor import DTensor
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    rank = torch.distributed.get_rank()
    for name in ("llama", "tied", "mixtral"):
        config = DistributedConfig(tp_plan="auto", tp_size=2)
        model = AutoModelForCausalLM.from_pretrained(f"{out}/{name}/expected", distributed_config=config, dtype="auto")
        state = untied({n: v.to_local() if isinstance(v, DTensor) else v for n, v in model.state_dict().items()})
        os.makedirs(f"{out}/{name}/tp", exist_ok=True)
        save_file({n: v.contiguous() for n, v in state.items()}, f"{out}/{name}/tp/rank{rank}.safetensors")
        if rank == 0:
            Path(f"{out}/{name}/tp_plan.json").write_text(json.dumps(model.tp_plan))


def write_all(out: str) -> None:
    write_sharded(out)
    write_tensor_parallel(out)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write every model with every writer; "expected" is the `save_pretrained` of one process."""
    out = tmp_path_factory.mktemp("models")
    for name in MODELS:
        build(name).save_pretrained(out / name / "expected")
    run_ranks(write_all, 2, backend="gloo", args=(str(out),), timeout_s=120)
    return out


@pytest.mark.parametrize("writer", ["statexchange", "dcp", "torch"])
@pytest.mark.parametrize("name", MODELS)
def test_a_merged_model_equals_save_pretrained(written: Path, tmp_path: Path, name: str, writer: str) -> None:
    model = build(name)
    report = sx.merge_checkpoint(
        written / name / writer, tmp_path / "out", rename=FROM_MODEL, files_from=written / name / "expected"
    )
    state = model.state_dict()
    one_name = name != "tied" or writer != "dcp"  # torch DCP does not record ties: both names have the values
    kept = untied(state) if one_name else {n: t.clone() for n, t in state.items()}
    assert report.aliases == ({"lm_head.weight": "model.embed_tokens.weight"} if name == "tied" and one_name else {})
    save_file({n: t.contiguous() for n, t in kept.items()}, tmp_path / "expected", {"format": "pt"})
    merged = (tmp_path / "out/model.safetensors").read_bytes()
    assert merged == (tmp_path / "expected").read_bytes()
    if name != "mixtral" and one_name:  # save_pretrained writes its experts one by one
        assert merged == (written / name / "expected/model.safetensors").read_bytes()
    if name != "clip":
        assert_loads(tmp_path / "out", model)
    fresh = build(name, seed=2)
    sx.load_checkpoint(fresh, tmp_path / "out")
    assert_same(fresh.state_dict(), state)


@pytest.mark.parametrize("name", MODELS)
def test_a_sharded_model_is_loaded_without_a_merge(written: Path, name: str) -> None:
    state = {"model": build(name, seed=2), "step": 0}
    sx.load_checkpoint(state, written / name / "statexchange")
    assert_same(state["model"].state_dict(), build(name).state_dict())
    assert state["step"] == 3
    for writer in ("dcp", "torch"):
        fresh = {f"model.{n}": torch.zeros_like(t) for n, t in build(name).state_dict().items()}
        sx.load_checkpoint(fresh, written / name / writer, include="model.*")
        assert_same(fresh, {f"model.{n}": t for n, t in build(name).state_dict().items()})


def test_clip_keeps_tensors_that_are_neither_sharded_nor_floating(written: Path, tmp_path: Path) -> None:
    sx.merge_checkpoint(written / "clip/dcp", tmp_path / "out", rename=FROM_MODEL, dtype="bfloat16")
    found, state = load_file(tmp_path / "out/model.safetensors"), build("clip").state_dict()
    assert {t.dtype for t in state.values()} == {torch.float32, torch.int64, torch.bool}
    assert found["logit_scale"].shape == ()
    assert_same(found, {n: t.bfloat16() if t.is_floating_point() else t for n, t in state.items()})


@pytest.mark.parametrize("name", ["llama", "tied", "mixtral"])
def test_tensor_parallel_ranks_of_transformers_are_merged_by_its_plan(written: Path, tmp_path: Path, name: str) -> None:
    model = build(name)
    sx.merge_checkpoint(
        written / name / "tp",
        tmp_path / "out",
        layout=written / name / "tp_plan.json",
        files_from=written / name / "expected",
    )
    save_file(untied(model.state_dict()), tmp_path / "expected", {"format": "pt"})
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "expected").read_bytes()
    assert_loads(tmp_path / "out", model)


# Mixtures of experts


def write_ranks(path: Path, states: list[State]) -> Path:
    path.mkdir()
    for rank, state in enumerate(states):
        save_file({n: t.contiguous() for n, t in state.items()}, path / f"rank{rank}.safetensors")
    return path


def test_experts_of_expert_parallel_ranks_are_renumbered(written: Path, tmp_path: Path) -> None:
    """The merge equals save_pretrained; expert ranks number their two of four experts from 0."""
    whole = load_file(written / "mixtral/expected/model.safetensors")
    states: list[State] = [{}, {}]
    for name, tensor in whole.items():
        head, found, tail = name.partition(".experts.")
        number, _, rest = tail.partition(".")
        for rank in range(2) if not found else [int(number) // 2]:
            states[rank][f"{head}.experts.{int(number) % 2}.{rest}" if found else name] = tensor
    sx.merge_checkpoint(
        write_ranks(tmp_path / "in", states),
        tmp_path / "out",
        layout={"mesh": {"ep": 2}, "rules": {"*.experts.*": {"renumber": "experts", "axis": "ep"}}},
        files_from=written / "mixtral/expected",
    )
    expected = written / "mixtral/expected/model.safetensors"
    assert (tmp_path / "out/model.safetensors").read_bytes() == expected.read_bytes()
    assert_loads(tmp_path / "out", build("mixtral"))


def test_stacked_experts_are_merged_by_the_models_own_ep_plan(tmp_path: Path) -> None:
    model = build("mixtral")
    whole = model.state_dict()
    states = [{n: t.chunk(2)[rank] if ".experts." in n else t for n, t in whole.items()} for rank in range(2)]
    layout = {"mesh": {"ep": 2}, "rules": model.ep_plan}
    sx.merge_checkpoint(write_ranks(tmp_path / "in", states), tmp_path / "out", layout=layout)
    save_file(whole, tmp_path / "expected", {"format": "pt"})
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "expected").read_bytes()


def test_stacked_experts_over_expert_and_tensor_ranks_are_merged_to_the_whole_model(tmp_path: Path) -> None:
    """ep 2 x tp 2: gate and up, which are fused, are each cut; attention is cut by tp alone, the router not at all."""
    model = build("mixtral")
    whole = model.state_dict()
    plan = {**{f"*.{p}_proj.weight": 0 for p in "qkv"}, "*.o_proj.weight": 1, "*.experts.down_proj": 2}
    rules: dict[str, Any] = {pattern: {"dim": dim, "axis": "tp"} for pattern, dim in plan.items()}
    rules["*.experts.down_proj"] = [{"dim": 0, "axis": "ep"}, {"dim": 2, "axis": "tp"}]
    rules["*.experts.gate_up_proj"] = [{"dim": 0, "axis": "ep"}, {"dim": 1, "axis": "tp", "blocks": [1, 1]}]
    states: list[State] = []
    for ep in range(2):
        for tp in range(2):
            state = dict(whole)
            for name, tensor in whole.items():
                mine = tensor.chunk(2)[ep] if ".experts." in name else tensor
                if name.endswith("gate_up_proj"):
                    mine = torch.cat([half.chunk(2, 1)[tp] for half in mine.chunk(2, 1)], 1)
                dims = [dim for pattern, dim in plan.items() if name.endswith(pattern[1:])]
                state[name] = mine.chunk(2, dims[0])[tp] if dims else mine
            states.append(state)
    layout = {"mesh": {"ep": 2, "tp": 2}, "rules": rules}
    sx.merge_checkpoint(write_ranks(tmp_path / "in", states), tmp_path / "out", layout=layout)
    save_file(whole, tmp_path / "expected", {"format": "pt"})
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "expected").read_bytes()


# float8 with scales


def quantized(state: State, inputs: dict[str, torch.Tensor], columns: slice = slice(None)) -> State:
    """Return float8 weights with a scale per row, and the scale of the inputs of which a rank saw `columns`."""
    found = dict(state)
    for name, seen in inputs.items():
        weight = state[f"{name}.weight"]
        scale = weight.abs().amax(1, keepdim=True) / 448
        found[f"{name}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
        found[f"{name}.weight_scale"] = scale
        cut = columns if name.endswith(("o_proj", "down_proj")) else slice(None)
        found[f"{name}.input_scale"] = seen[..., cut].abs().max() / 448
    return found


def test_float8_scales_that_differ_between_ranks_are_reduced(tmp_path: Path) -> None:
    model = llama()
    inputs: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(lambda _, given, name=name: inputs.__setitem__(name, given[0]))
    model(torch.arange(9)[None])
    expected = quantized(model.state_dict(), inputs)
    rules: dict[str, Any] = {"*.input_scale": {"reduce": "max"}}
    rules |= {f"*.{p}_proj.weight": {"dim": 1} for p in ("o", "down")}  # all ranks have the scales of its rows
    rules |= {f"*.{p}_proj.weight*": {"dim": 0} for p in ("q", "k", "v", "gate", "up")}
    states: list[State] = []
    for rank in range(2):
        state: State = {}
        for name, tensor in expected.items():
            row = name.endswith(("o_proj.weight", "down_proj.weight"))
            whole = "_proj.weight" not in name or name.endswith(("o_proj.weight_scale", "down_proj.weight_scale"))
            state[name] = tensor if whole else tensor.chunk(2, int(row))[rank]
        for name, seen in inputs.items():
            row = name.endswith(("o_proj", "down_proj"))
            state[f"{name}.input_scale"] = (seen.chunk(2, -1)[rank] if row else seen).abs().max() / 448
        states.append(state)
    assert any(not states[0][n].equal(states[1][n]) for n in expected if n.endswith("input_scale"))
    sx.merge_checkpoint(write_ranks(tmp_path / "in", states), tmp_path / "out", layout=rules)
    save_file(expected, tmp_path / "expected", {"format": "pt"})
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "expected").read_bytes()


# Wrapped models: compiled, averaged


def saved_by(writer: str, state: Any, path: Path, recwarn: pytest.WarningsRecorder) -> Path:
    if writer == "torch":
        torch.save(state, path)
    else:
        dcp.save(dict(state), checkpoint_id=path, no_dist=True)
        recwarn.clear()  # a warning of torch
    return path


@pytest.mark.parametrize("writer", ["torch", "dcp"])
def test_the_prefix_of_a_compiled_model_is_removed_from_names(
    written: Path, tmp_path: Path, writer: str, recwarn: pytest.WarningsRecorder
) -> None:
    model = build("llama")
    state = torch.compile(model, backend="eager").state_dict()  # test_load.py imports the default backend once
    assert all(name.startswith("_orig_mod.") for name in state)
    source = saved_by(writer, state, tmp_path / "in", recwarn)
    report = sx.merge_checkpoint(source, tmp_path / "out", files_from=written / "llama/expected")
    assert "wrappers" in report.notes[0]
    expected = written / "llama/expected/model.safetensors"
    assert (tmp_path / "out/model.safetensors").read_bytes() == expected.read_bytes()
    assert_loads(tmp_path / "out", model)


@pytest.mark.parametrize("writer", ["torch", "dcp"])
def test_an_average_is_merged_whole_or_as_the_model(
    written: Path, tmp_path: Path, writer: str, recwarn: pytest.WarningsRecorder
) -> None:
    model = build("llama")
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        averaged.update_parameters(model)
    state = averaged.state_dict()
    source = saved_by(writer, state, tmp_path / "in", recwarn)
    report = sx.merge_checkpoint(source, tmp_path / "out", files_from={"config.json": "{}"})
    assert report.notes == ()
    save_file(state, tmp_path / "expected", {"format": "pt"})
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "expected").read_bytes()
    assert bits_of(load_file(tmp_path / "out/model.safetensors")["n_averaged"]) == bits_of(torch.tensor(3))
    fresh = AveragedModel(build("llama", seed=2)).state_dict()
    sx.load_checkpoint(fresh, source)
    assert_same(fresh, state)
    report = sx.merge_checkpoint(
        source, tmp_path / "plain", exclude="n_averaged", files_from=written / "llama/expected"
    )
    assert "wrappers" in report.notes[0]
    assert_loads(tmp_path / "plain", averaged.module)


def test_an_average_continues_after_a_load(tmp_path: Path) -> None:
    """Without its count the next update would discard the average so far."""
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2)
    averaged, fresh = (AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for _ in range(2))
    averaged.update_parameters(model)
    sx.save_checkpoint({"model": model, "average": averaged}, tmp_path / "saved")
    sx.load_checkpoint({"model": model, "average": fresh}, tmp_path / "saved")
    torch.nn.init.ones_(model.weight)
    for each in (averaged, fresh):
        each.update_parameters(model)
    assert not fresh.module.weight.equal(model.weight)
    assert_same(fresh.state_dict(), averaged.state_dict())
    sx.export_checkpoint(averaged, tmp_path / "out")  # the model alone
    assert_same(load_file(tmp_path / "out/model.safetensors"), averaged.module.state_dict())
    sx.merge_checkpoint(tmp_path / "saved", tmp_path / "both")
    assert load_file(tmp_path / "both/model.safetensors")["average.n_averaged"] == 1


# More than 4 GiB


def write_sparse(path: Path, shapes: dict[str, tuple[int, ...]], values: State) -> None:
    """Write a bfloat16 safetensors file of holes, with `values` as the last elements of some tensors."""
    sizes = {name: 2 * math.prod(shape) for name, shape in shapes.items()}
    ends = {name: sum(list(sizes.values())[: n + 1]) for n, name in enumerate(sizes)}
    entries = {n: {"dtype": "BF16", "shape": shapes[n], "data_offsets": [ends[n] - sizes[n], ends[n]]} for n in shapes}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        begin = file.tell()
        file.truncate(begin + max(ends.values()))
        for name, value in values.items():
            data = bits_of(value)[2]
            file.seek(begin + ends[name] - len(data))
            file.write(data)


def ramp(*shape: int, begin: int = 1) -> torch.Tensor:
    return (torch.arange(math.prod(shape)) % 200 + begin).to(torch.bfloat16).reshape(shape)


@pytest.fixture
def memory() -> Iterator[Path]:
    """Return a directory in memory, where reading holes costs nothing."""
    with TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def test_tensors_that_begin_beyond_4_gib_are_read_and_written(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts in the ranks' files and tensors in the output begin beyond 4 GiB.

    All but a few bytes are zeros: the test is fast because it reads holes, and its `os.pwrite` leaves zeros as holes.
    """
    write = os.pwrite
    zeros = bytes(2 << 20)

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        return len(data) if bytes(data) == zeros[: len(data)] else write(fd, data, offset)

    long, wide = 2**15 + 100, 2**15
    shapes = {"skipped": (2**31, 1), "a": (long, wide), "z.columns": (50, 30), "z.rows": (25, 60)}
    columns, rows, last = ramp(50, 60), ramp(50, 60, begin=7), ramp(2, 3, wide)
    for rank in range(2):
        values = {"a": last[rank], "z.columns": columns.chunk(2, 1)[rank], "z.rows": rows.chunk(2)[rank]}
        write_sparse(memory / f"rank{rank}.safetensors", shapes, values)
    layout = {"skipped": "replicate", "a": {"dim": 0}, "*.columns": {"dim": 1}, "*.rows": {"dim": 0}}
    sx.merge_checkpoint(memory, tmp_path / "few", layout=layout, include="z.*")
    assert_same(load_file(tmp_path / "few/model.safetensors"), {"z.columns": columns, "z.rows": rows})
    monkeypatch.setattr(os, "pwrite", pwrite)
    sx.merge_checkpoint(memory, tmp_path / "out", layout=layout, exclude="skipped", max_shard_size="9GB")
    with safe_open(tmp_path / "out/model.safetensors", "pt") as found:
        assert found.get_tensor("z.columns").equal(columns)
        assert found.get_tensor("z.rows").equal(rows)
        a = found.get_slice("a")
        assert a.get_shape() == [2 * long, wide]
        assert a[long - 3 : long].equal(last[0])
        assert a[2 * long - 3 :].equal(last[1])
        assert not a[long - 4].any()
