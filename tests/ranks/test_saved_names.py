"""Models of transformers whose files have other names than their memory, such as all experts in one tensor."""

from __future__ import annotations

import logging
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


def mixtral_without_head() -> Any:
    from transformers import MixtralConfig, MixtralModel

    return MixtralModel(MixtralConfig(**TINY, num_local_experts=4))


def llava() -> Any:
    """Return a model whose class, and that of the model inside, have other names in files."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    tower = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**tower, image_size=8, patch_size=4, projection_dim=6)
    return LlavaForConditionalGeneration(LlavaConfig(text_config=LlamaConfig(**TINY), vision_config=vision))


BUILDERS = {
    "qwen3_moe": qwen3_moe,
    "deepseek_v3": deepseek_v3,
    "mixtral": lambda: build("mixtral"),
    "mixtral without head": mixtral_without_head,
    "llava": llava,
}


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
    assert caught.value.name == "model.layers.1.mlp.experts.gate_up_proj"
    assert f"lacks {name} " in str(caught.value)
    report = sx.diff_checkpoints(model, tmp_path / "less")
    assert [(tensor.name, tensor.status) for tensor in report.differing] == [(name, "only in a")]


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
    assert caught.value.name == "model.layers.0.mlp.experts.down_proj"
    assert f"lacks {name} of shape" in str(caught.value)


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
    (record,) = caplog.records
    assert "GteForMaskedLM" in record.getMessage()
    assert "gte.encoder.layer.0.mlp.up_gate_proj.weight" in record.getMessage()
    assert {"empty", "gte.layers.0.mlp.gate_proj.weight"} <= load_file(tmp_path / "out/model.safetensors").keys()


def test_what_cannot_be_traced_loads_what_from_pretrained_has_read(tmp_path: Path) -> None:
    model, other = gte(), gte()
    model.save_pretrained(tmp_path / "theirs")
    with pytest.raises(sx.errors.NotFoundError, match="names differ"):
        sx.load_checkpoint(other, tmp_path / "theirs")
    sx.export_checkpoint(type(model).from_pretrained(tmp_path / "theirs"), tmp_path / "ours")
    sx.load_checkpoint(other, tmp_path / "ours")
    assert_equal(dict(model.state_dict()), dict(other.state_dict()))


def exports_a_stage(path: str) -> None:
    """Rank 0 has no layer: transformers would save what it has by other names, which can be traced."""
    model = gte()
    if sx.get_rank() == 0:
        model.gte.layers = torch.nn.ModuleDict({})
    sx.export_checkpoint(model, path)


def test_stages_of_a_model_that_cannot_be_traced_have_the_same_names(tmp_path: Path) -> None:
    run_ranks(exports_a_stage, 2, backend="gloo", args=(str(tmp_path / "out"),))
    model = gte()
    sx.load_checkpoint(model, tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors").keys() <= model.state_dict().keys()


@pytest.mark.parametrize("options", [{}, {"strict": False}, {"include": "*.gate_up_proj"}])
def test_a_source_of_more_experts_than_the_model_has_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    seeded("qwen3_moe", 1).save_pretrained(tmp_path / "theirs")
    half = seeded("qwen3_moe", 2)
    for layer in half.model.layers:  # the second half of the experts, as a rank of several has
        for name in ("gate_up_proj", "down_proj"):
            part = getattr(layer.mlp.experts, name)[2:].detach().clone()
            setattr(layer.mlp.experts, name, torch.nn.Parameter(part))
    before = {name: tensor.clone() for name, tensor in half.state_dict().items()}
    with pytest.raises(sx.errors.InvalidArgumentError) as caught:
        sx.load_checkpoint(half, tmp_path / "theirs", **options)
    assert "experts" in str(caught.value)
    assert_equal(dict(half.state_dict()), before)


def test_tensors_that_are_reordered_are_not_traced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from transformers import Inkling2TextConfig, Inkling2TextModel

    heads = {"head_dim": 4, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_head_dim": 4}
    model = Inkling2TextModel(Inkling2TextConfig(**TINY, **heads, eos_token_id=1))
    sx.export_checkpoint(model, tmp_path / "out")
    assert "reorder" in caplog.text
    assert "stride" not in caplog.text


IN_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "list": lambda model: [model],
    "ModuleDict": lambda model: torch.nn.ModuleDict({"net": model}),
    "dict": lambda model: {"a": model, "b": torch.nn.Linear(2, 2)},
}


@pytest.mark.parametrize("container", ["list", "ModuleDict"])
def test_a_model_in_a_container_is_exported_by_its_names_in_memory(tmp_path: Path, container: str) -> None:
    state = IN_CONTAINERS[container](seeded("mixtral", 1))
    sx.export_checkpoint(state, tmp_path / "ours")
    assert any(name.endswith("layers.0.mlp.experts.gate_up_proj") for name in sx.open_checkpoint(tmp_path / "ours"))
    sx.load_checkpoint(state, tmp_path / "ours")


@pytest.mark.parametrize("container", IN_CONTAINERS)
def test_a_load_into_a_model_in_a_container_lists_the_names_in_memory_as_missing(
    tmp_path: Path, container: str
) -> None:
    model = seeded("mixtral", 1)
    model.save_pretrained(tmp_path / "theirs")
    state = IN_CONTAINERS[container](model)
    prefix = {"list": "", "ModuleDict": "net.", "dict": "a."}[container]
    advice = r'missing .*load \{"prefix": state\}'
    with pytest.raises(sx.errors.NotFoundError, match=advice):
        sx.load_checkpoint(state, tmp_path / "theirs", rename=[("^", prefix)])
    report = sx.load_checkpoint(state, tmp_path / "theirs", rename=[("^", prefix)], strict=False)
    assert f"{prefix}model.layers.0.mlp.experts.gate_up_proj" in report.missing


def sharded(name: str, seed: int) -> Any:
    """Return a model of which its layers, the models inside and itself are sharded: torch replaces their classes."""
    from torch.distributed.fsdp import fully_shard
    from transformers import PreTrainedModel

    model = seeded(name, seed)
    for module in reversed([*model.modules()]):
        if isinstance(module, PreTrainedModel) or type(module).__name__.endswith("DecoderLayer"):
            fully_shard(module)
    return model


class Messages(logging.Handler):
    """Collects what this process logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def on_a_mesh(path: str) -> list[str]:
    messages = Messages()
    logging.getLogger("statexchange").addHandler(messages)
    for name in SHARDED:
        model, other, third = (sharded(name, seed) for seed in (1, 2, 3))
        sx.export_checkpoint(model, f"{path}/{name}/ours")
        for source, target in (("ours", other), ("theirs", third)):
            report = sx.load_checkpoint(target, f"{path}/{name}/{source}")
            assert report.missing == report.unexpected == ()
            for ours, theirs in zip(model.parameters(), target.parameters(), strict=True):
                assert torch.equal(ours.to_local(), theirs.to_local())
        assert sx.diff_checkpoints(model, f"{path}/{name}/theirs").equal
    return messages.texts


SHARDED = ["qwen3_moe", "mixtral", "mixtral without head", "llava"]


def test_sharded_models_are_written_and_read_by_these_names(tmp_path: Path) -> None:
    for name in SHARDED:
        seeded(name, 1).save_pretrained(tmp_path / name / "theirs")
    assert run_ranks(on_a_mesh, 2, backend="gloo", args=(str(tmp_path),)) == [[], []]
    for name in SHARDED:
        theirs, ours = (load_file(tmp_path / name / kind / "model.safetensors") for kind in ("theirs", "ours"))
        assert_equal(theirs, ours)


FUSED, PART = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.1.up_proj.weight"


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_patterns_of_an_export_match_the_names_that_are_written(tmp_path: Path, option: str) -> None:
    model = seeded("qwen3_moe", 1)
    model.save_pretrained(tmp_path / "theirs")
    expected = load_file(tmp_path / "theirs/model.safetensors")
    sx.export_checkpoint(model, tmp_path / "out", **{option: "*.experts.1.*"})
    selected = {name: value for name, value in expected.items() if (".experts.1." in name) == (option == "include")}
    assert_equal(selected, load_file(tmp_path / "out/model.safetensors"))
    for patterns in ["*.gate_up_proj", ["*.norm.weight", FUSED]]:
        with pytest.raises(sx.errors.InvalidArgumentError, match=option) as caught:
            sx.export_checkpoint(model, tmp_path / "none", **{option: patterns})
        assert caught.value.name == PART.replace("1.up", "0.gate")
        assert not (tmp_path / "none").exists()
    sx.export_checkpoint(model, tmp_path / "all", exclude="*.of_no_tensor")
    assert_equal(expected, load_file(tmp_path / "all/model.safetensors"))


def test_patterns_of_a_load_match_names_in_memory(tmp_path: Path) -> None:
    model, other = seeded("qwen3_moe", 1), seeded("qwen3_moe", 2)
    model.save_pretrained(tmp_path / "theirs")
    before = {name: value.clone() for name, value in other.state_dict().items()}
    for option in ("include", "exclude"):
        for patterns in ["*.experts.1.*", ["*.gate_up_proj", "*.up_proj.weight"]]:
            with pytest.raises(sx.errors.InvalidArgumentError, match=option) as caught:
                sx.load_checkpoint(other, tmp_path / "theirs", **{option: patterns})
            assert caught.value.name in (FUSED, FUSED.replace("gate_up", "down"))
    assert_equal(before, dict(other.state_dict()))
    report = sx.load_checkpoint(other, tmp_path / "theirs", exclude=FUSED)
    assert (report.missing, report.unexpected) == ((), ())
    assert_equal({**model.state_dict(), FUSED: before[FUSED]}, dict(other.state_dict()))


@pytest.mark.parametrize("change", [torch.Tensor.bfloat16, lambda value: value[:1]])
def test_what_is_left_out_of_a_load_may_have_parts_that_do_not_fit(tmp_path: Path, change: Any) -> None:
    path = stored_with(tmp_path, PART, change)
    report = sx.load_checkpoint(seeded("qwen3_moe", 2), path, exclude="*.layers.0.mlp.experts")
    assert (report.missing, report.unexpected) == ((), ())


@pytest.mark.parametrize("prefix", ["backbone.", "_orig_mod.backbone.", "_orig_mod."])
def test_names_of_the_source_are_renamed_before_the_conversion(tmp_path: Path, prefix: str) -> None:
    model, other = seeded("qwen3_moe", 1), seeded("qwen3_moe", 2)
    model.save_pretrained(tmp_path / "theirs")
    stored = load_file(tmp_path / "theirs/model.safetensors")
    save_file({prefix + name: value for name, value in stored.items()}, tmp_path / "prefixed.safetensors")
    sx.load_checkpoint(other, tmp_path / "prefixed.safetensors", rename=[(r"^(_orig_mod\.)?backbone\.", "")])
    assert_equal(dict(model.state_dict()), dict(other.state_dict()))
    with pytest.raises(sx.errors.UnsafeError):
        sx.load_checkpoint(other, tmp_path / "theirs", rename=[(r"experts\.1", "experts.0")])


def test_a_tied_head_of_the_source_loads_into_a_model_that_has_its_own(tmp_path: Path) -> None:
    model, other = seeded("mixtral", 1), seeded("mixtral", 2)
    model.lm_head.weight = model.model.embed_tokens.weight
    sx.export_checkpoint({f"x.{name}": value for name, value in model.state_dict().items()}, tmp_path / "in_memory")
    sx.export_checkpoint(model, tmp_path / "ours")
    for name, rename in (("ours", ()), ("in_memory", [("^x.", "")])):
        report = sx.load_checkpoint(other, tmp_path / name, rename=rename)
        assert report.missing == report.unexpected == ()
        assert_equal(dict(model.state_dict()), dict(other.state_dict()))


def test_a_save_with_the_names_of_a_file_loads(tmp_path: Path) -> None:
    model, other = seeded("qwen3_moe", 1), seeded("qwen3_moe", 2)
    model.save_pretrained(tmp_path / "theirs")
    sx.save_checkpoint(load_file(tmp_path / "theirs/model.safetensors"), tmp_path / "save")
    sx.load_checkpoint(other, tmp_path / "save")
    assert_equal(dict(model.state_dict()), dict(other.state_dict()))


# Ranks with different states


def stage(name: str, seed: int, rank: int) -> Any:
    """Return the layer of a rank, with what comes before or after the layers."""
    model = seeded(name, seed)
    model.model.layers = torch.nn.ModuleDict({str(rank): model.model.layers[rank]})
    if rank == 0:
        del model.lm_head, model.model.norm
    else:
        del model.model.embed_tokens
    return model


def pipeline(kind: str, seed: int, rank: int) -> Any:
    """Return a rank's state of a model that two ranks have."""
    if kind == "one rank":
        return seeded("mixtral", seed) if rank == 0 else {}
    model = stage("qwen3_moe" if kind == "two classes" and rank == 1 else "mixtral", seed, rank)
    if kind == "a plain model" and rank == 1:
        model = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"layers": model.model.layers})})
    return model


def export_and_load(path: str, kind: str) -> None:
    rank = torch.distributed.get_rank()
    state = pipeline(kind, 1, rank)
    sx.export_checkpoint(state, f"{path}/ours")
    if kind == "one rank":
        return
    other = pipeline(kind, 2, rank)
    report = sx.load_checkpoint(other, f"{path}/ours")
    assert report.missing == report.unexpected == ()
    assert_equal(dict(state.state_dict()), dict(other.state_dict()))
    assert sx.diff_checkpoints(state, f"{path}/ours").equal
    if kind == "two classes":
        return
    report = sx.load_checkpoint(pipeline(kind, 2, rank), f"{path}/theirs", strict=False)
    assert len(report.missing) == (3 if kind == "a plain model" and rank == 1 else 0)


@pytest.mark.parametrize("kind", ["one rank", "a plain model", "stages", "two classes"])
def test_ranks_may_have_different_models(tmp_path: Path, kind: str) -> None:
    model = seeded("mixtral", 1)
    model.save_pretrained(tmp_path / "theirs")
    run_ranks(export_and_load, 2, backend="gloo", args=(str(tmp_path), kind))
    if kind in ("one rank", "stages"):
        assert_equal(load_file(tmp_path / "theirs/model.safetensors"), load_file(tmp_path / "ours/model.safetensors"))


GATE = "mlp.gate.weight"  # block_sparse_moe.gate.weight in files


def shared(path: str) -> list[Any]:
    rank = torch.distributed.get_rank()
    model = seeded("mixtral", 1)
    caught = []
    for call in (
        lambda: sx.export_checkpoint(model if rank == 1 else model.state_dict(), f"{path}/ours"),
        lambda: sx.export_checkpoint(model, f"{path}/ours", convert="torchtitan:llama3" if rank == 0 else None),
        lambda: sx.load_checkpoint(model, f"{path}/theirs", convert="torchtitan:llama3" if rank == 0 else None),
        lambda: sx.diff_checkpoints(model, f"{path}/theirs", convert="torchtitan:llama3" if rank == 0 else None),
        lambda: sx.diff_checkpoints(model if rank == 1 else model.state_dict(), f"{path}/theirs"),
    ):
        with pytest.raises(sx.errors.InvalidArgumentError) as raised:
            call()
        caught.append([raised.value.name, str(raised.value)])
    return caught


def test_ranks_that_share_a_tensor_have_the_same_names_for_it(tmp_path: Path) -> None:
    seeded("mixtral", 1).save_pretrained(tmp_path / "theirs")
    for caught in run_ranks(shared, 2, backend="gloo", args=(str(tmp_path),)):
        assert [name and name.rpartition(".layers.0.")[2] for name, _ in caught] == [GATE, None, None, None, GATE]
        assert all("convert" in text for _, text in caught[1:4])
    assert not (tmp_path / "ours").exists()
