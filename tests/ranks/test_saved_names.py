"""Models of transformers whose files have other names than their memory, such as all experts in one tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import TINY, build

import statexchange as sx
from statexchange.testing import run_ranks


def qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**TINY, moe_intermediate_size=8, head_dim=6, num_experts=4, num_experts_per_tok=2)
    )


def deepseek_v3() -> Any:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = {"moe_intermediate_size": 8, "kv_lora_rank": 8, "q_lora_rank": 8, "n_routed_experts": 4, "n_group": 1}
    heads = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "num_experts_per_tok": 2, "topk_group": 1}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**TINY, **sizes, **heads, first_k_dense_replace=1))


BUILDERS = {"qwen3_moe": qwen3_moe, "deepseek_v3": deepseek_v3, "mixtral": lambda: build("mixtral")}


def seeded(name: str, seed: int) -> Any:
    torch.manual_seed(seed)
    return BUILDERS[name]()


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


@pytest.mark.parametrize("name", BUILDERS)
def test_an_export_has_the_names_and_values_of_save_pretrained(tmp_path: Path, name: str) -> None:
    model = seeded(name, 1)
    model.save_pretrained(tmp_path / "theirs")
    sx.export_checkpoint(model, tmp_path / "ours")
    assert_equal(load_file(tmp_path / "theirs/model.safetensors"), load_file(tmp_path / "ours/model.safetensors"))
    loaded = type(model).from_pretrained(tmp_path / "ours", dtype="auto")
    assert_equal(dict(model.state_dict()), dict(loaded.state_dict()))


@pytest.mark.parametrize("name", BUILDERS)
def test_files_of_experts_load_into_the_model_that_has_them_in_one_tensor(tmp_path: Path, name: str) -> None:
    model, other, third = (seeded(name, seed) for seed in (1, 2, 3))
    model.save_pretrained(tmp_path / "theirs")
    report = sx.load_checkpoint(other, tmp_path / "theirs")
    assert report.missing == ()
    assert_equal(dict(model.state_dict()), dict(other.state_dict()))
    assert sx.diff_checkpoints(model, tmp_path / "theirs").equal
    sx.save_checkpoint(model, tmp_path / "save")  # names in memory are read, too
    sx.load_checkpoint(third, tmp_path / "save")
    assert_equal(dict(model.state_dict()), dict(third.state_dict()))


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    model = seeded("qwen3_moe", 1)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    sx.export_checkpoint(model, tmp_path / "out")
    sx.merge_checkpoint(tmp_path / "out", tmp_path / "less", exclude=name)
    with pytest.raises(sx.errors.NotFoundError) as caught:
        sx.load_checkpoint(seeded("qwen3_moe", 2), tmp_path / "less")
    assert "model.layers.1.mlp.experts.gate_up_proj" in str(caught.value)


def stored_with(path: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """Save a model with one tensor of its file changed."""
    seeded("qwen3_moe", 1).save_pretrained(path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, name: change(tensors[name]).contiguous()}, file, {"format": "pt"})
    return path


@pytest.mark.parametrize("options", [{}, {"dtype": "state"}])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_experts_of_two_dtypes_are_refused(tmp_path: Path, options: dict[str, Any], kind: torch.dtype) -> None:
    name = "model.layers.0.mlp.experts.2.down_proj.weight"
    path = stored_with(tmp_path, name, lambda value: value.bfloat16())
    model = seeded("qwen3_moe", 2).to(kind)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(sx.errors.UnsupportedError, match="dtypes") as caught:
        sx.load_checkpoint(model, path, **options)
    assert caught.value.name == "model.layers.0.mlp.experts.down_proj"
    assert_equal(before, dict(model.state_dict()))


def test_an_expert_of_another_size_is_no_part(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.2.down_proj.weight"
    path = stored_with(tmp_path, name, lambda value: torch.cat([value, value], 0))
    with pytest.raises(sx.errors.NotFoundError) as caught:
        sx.load_checkpoint(seeded("qwen3_moe", 2), path)
    assert "model.layers.0.mlp.experts.down_proj" in str(caught.value)


def test_empty_tensors_stay(tmp_path: Path) -> None:
    model, other = seeded("qwen3_moe", 1), seeded("qwen3_moe", 2)
    for one in (model, other):
        one.model.register_parameter("empty", torch.nn.Parameter(torch.empty(1, 0, 4)))
    sx.export_checkpoint(model, tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors")["model.empty"].shape == (1, 0, 4)
    sx.load_checkpoint(other, tmp_path / "out")
    assert_equal(dict(model.state_dict()), dict(other.state_dict()))


def gte() -> Any:
    from transformers import GteConfig, GteForMaskedLM

    return GteForMaskedLM(GteConfig(**TINY, pad_token_id=0))


def test_what_cannot_be_traced_keeps_its_names_in_memory_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers joins some tensors of this model into new ones when it saves it."""
    model = gte()
    model.register_buffer("empty", torch.empty(0, 2))
    sx.export_checkpoint(model, tmp_path / "out")
    assert "GteForMaskedLM" in caplog.text
    assert {"empty", "gte.layers.0.mlp.gate_proj.weight"} <= load_file(tmp_path / "out/model.safetensors").keys()


def on_a_mesh(path: str) -> None:
    from torch.distributed.fsdp import fully_shard

    model, other = seeded("qwen3_moe", 1), seeded("qwen3_moe", 2)
    for one in (model, other):
        for layer in one.model.layers:
            fully_shard(layer)
        fully_shard(one)
    sx.export_checkpoint(model, f"{path}/ours")
    sx.load_checkpoint(other, f"{path}/ours")
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.to_local(), theirs.to_local())


def test_sharded_models_are_written_and_read_by_these_names(tmp_path: Path) -> None:
    run_ranks(on_a_mesh, 2, backend="gloo", args=(str(tmp_path),))
    seeded("qwen3_moe", 1).save_pretrained(tmp_path / "theirs")
    assert_equal(load_file(tmp_path / "theirs/model.safetensors"), load_file(tmp_path / "ours/model.safetensors"))
