"""What config.json and adapter_config.json say against the tensors is one warning of every command; tensors decide."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import CommandLine
from safetensors.numpy import load_file, save_file

from statexchange.checkpoint.merge import merge_checkpoint

EMBEDDING, NORM, LAYER_NORM = "model.embed_tokens.weight", "model.norm.weight", "model.layers.0.input_layernorm.weight"
SHAPES = {EMBEDDING: (16, 8), NORM: (8,), LAYER_NORM: (8,), "model.layers.0.mlp.up_proj.weight": (12, 8)}
CONFIG = {"num_hidden_layers": 1, "vocab_size": 16, "hidden_size": 8}
DIFFER = "config.json and the tensors differ: "


def write_model(
    folder: Path, config: object, shapes: dict[str, tuple[int, ...]], dtype: str = "float32", name: str = "config.json"
) -> Path:
    """Write a directory of transformers."""
    folder.mkdir(exist_ok=True)
    save_file({key: np.ones(shape, dtype) for key, shape in shapes.items()}, folder / "model.safetensors")
    (folder / name).write_text(json.dumps(config))
    return folder


def notes_of(
    folder: Path, config: object, shapes: dict[str, tuple[int, ...]], dtype: str = "float32", **options: Any
) -> list[str]:
    """Return the notes of a merge of a directory of transformers on its config.json."""
    write_model(folder / "in", config, shapes, dtype)
    notes = merge_checkpoint(folder / "in", folder / "out", overwrite=True, **options).notes
    return [note for note in notes if note.startswith(DIFFER)]


def under(prefix: str, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, tuple[int, ...]]:
    """Return tensors whose names have another beginning than `model.`."""
    return {prefix + name.removeprefix("model."): shape for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("config", "shapes", "facts"),
    [
        ({"vocab_size": 17}, {}, ["vocab_size is 17", f"{EMBEDDING} has 16 rows"]),
        ({"vocab_size": 13}, {}, ["vocab_size is 13", f"{EMBEDDING} has 16 rows"]),  # padded
        ({"vocab_size": 13, "architectures": ["LlamaForCausalLM"]}, {}, ["vocab_size is 13"]),
        ({"num_hidden_layers": 3}, {}, ["num_hidden_layers is 3", "1 layer of model.layers"]),
        ({"num_hidden_layers": 0}, {}, ["num_hidden_layers is 0", "1 layer of model.layers"]),
        (
            {"vocab_size": 32, "num_hidden_layers": 3},
            {},
            ["num_hidden_layers is 3", "vocab_size is 32"],
        ),
    ],
)
def test_sizes_of_another_model_are_named_with_both_sides_in_one_line(
    config: dict[str, int], shapes: dict[str, Any], facts: list[str], tmp_path: Path
) -> None:
    kept = {name: shape for name, shape in {**SHAPES, **shapes}.items() if shape is not None}
    (note,) = notes_of(tmp_path, {**CONFIG, **config}, kept)
    assert all(fact in note for fact in facts), note


BERT = {"bert.embeddings.word_embeddings.weight": (16, 8), "bert.encoder.layer.0.output.dense.weight": (8, 8)}
GPT2 = {"transformer.wte.weight": (16, 8), "transformer.h.0.ln_1.weight": (8,), "transformer.ln_f.weight": (8,)}
VISION = {"vision_tower.encoder.layers.0.norm.weight": (4,), "vision_tower.encoder.layers.1.norm.weight": (4,)}
OMNI = under("thinker.model.") | under("talker.model.", {EMBEDDING: (5, 3), LAYER_NORM: (3,), NORM: (3,)})
WRONG = {"num_hidden_layers": 2, "vocab_size": 17, "hidden_size": 7}
TALKER = {"text_config": {"num_hidden_layers": 1, "vocab_size": 5, "hidden_size": 3}}


@pytest.mark.parametrize(
    ("config", "shapes", "facts"),
    [
        ({"text_config": WRONG}, SHAPES, ["text_config.vocab_size is 17"]),
        (
            {"text_config": WRONG, "vision_config": {"num_hidden_layers": 5, "hidden_size": 4}},
            under("model.language_model.") | VISION,
            [
                "text_config.num_hidden_layers is 2",
                "1 layer of model.language_model.layers",
                "text_config.vocab_size is 17, and model.language_model.embed_tokens.weight has 16 rows",
            ],
        ),
        ({"llm_config": WRONG, "hidden_size": 3}, under("language_model.model.") | VISION, ["llm_config.vocab_size"]),
        ({"n_layer": 2, "n_embd": 7, "vocab_size": 16}, GPT2, ["n_layer is 2"]),
        ({"num_hidden_layers": 2, "vocab_size": 9}, BERT, ["num_hidden_layers is 2", "vocab_size is 9"]),
        (WRONG, under(""), ["vocab_size is 17, and embed_tokens.weight has 16 rows"]),
    ],
)
def test_nested_configs_and_other_names_are_compared(
    config: dict[str, Any], shapes: dict[str, Any], facts: list[str], tmp_path: Path
) -> None:
    (note,) = notes_of(tmp_path, config, shapes)
    assert all(fact in note for fact in facts), note
    assert "vision" not in note


@pytest.mark.parametrize(
    ("config", "shapes"),
    [
        ({}, {}),
        ({"vocab_size": None, "hidden_size": "8"}, {}),
        ({"vocab_size": True, "num_hidden_layers": 1.5}, {}),
        ({"hidden_size": 12}, {NORM: (12,), LAYER_NORM: (12,)}),  # an embedding of other columns
        ({"hidden_size": 12}, {NORM: (12,)}),
        ({"vocab_size": 99}, {EMBEDDING: None}),
        ({"vocab_size": 99, "hidden_size": 7}, {EMBEDDING: (4, 2, 2), NORM: None, LAYER_NORM: None}),
        ({"vocab_size": 12}, {"lm_head.weight": (12, 8)}),  # an embedding with tokens that are not predicted
        ({"num_hidden_layers": 9, "encoder_layers": 9, "decoder_layers": 1}, {}),
        ({"num_hidden_layers": 1, "num_nextn_predict_layers": 1}, {"model.layers.1.norm.weight": (8,)}),
        ({"text_config": {"vocab_size": 99}}, {}),  # two sizes, of which one is right
        ({"vocab_size": 98, "text_config": {"vocab_size": 99}}, {}),  # it is unclear which of them is meant
        ({"vocab_size": 99}, {"decoder.embed_tokens.weight": (5, 8)}),  # or which embedding
        ({"audio_config": {"vocab_size": 99, "num_hidden_layers": 7}}, {}),
    ],
)
def test_sizes_that_may_be_right_are_not_named(config: dict[str, Any], shapes: dict[str, Any], tmp_path: Path) -> None:
    kept = {name: shape for name, shape in {**SHAPES, **shapes}.items() if shape is not None}
    assert notes_of(tmp_path, {**CONFIG, **config}, kept) == []


def test_packed_weights_parts_and_other_configs_are_not_compared(tmp_path: Path) -> None:
    other = {**CONFIG, "vocab_size": 99, "hidden_size": 7}
    assert notes_of(tmp_path, other, SHAPES, "uint8") == []
    assert notes_of(tmp_path, [other], SHAPES) == []
    assert notes_of(tmp_path, other, SHAPES, include="model.*") == []
    # Two parts read text.
    assert notes_of(tmp_path, {"thinker_config": {"text_config": WRONG}, "talker_config": TALKER}, OMNI) == []


def test_plain_weights_are_not_called_quantised(tmp_path: Path, call: CommandLine) -> None:
    for method in ("fp8", "gptq", "bitsandbytes"):
        config = {**CONFIG, "quantization_config": {"quant_method": method, "bits": 4}}
        (note,) = notes_of(tmp_path, config, SHAPES)
        assert f"quantization_config says '{method}'" in note
        assert "F32" in note
        _, out, _ = call("info", tmp_path / "in")
        assert note in out
        assert not any(word in out for word in ("packed into", "float8 by blocks", "quantised by"))
    save_file({"w.weight_scale_inv": np.ones(1, "float32"), EMBEDDING: np.ones((2, 2))}, tmp_path / "m.safetensors")
    os.replace(tmp_path / "m.safetensors", tmp_path / "in/model.safetensors")
    merged = merge_checkpoint(tmp_path / "in", tmp_path / "scales", overwrite=True)
    assert "quantization_config" not in str(merged.notes)


@pytest.mark.parametrize(("classes", "tied"), [(["LlamaForCausalLM"], False), (["XForConditionalGeneration"], False)])
def test_a_language_model_without_head_is_named(classes: list[str], tied: bool, tmp_path: Path) -> None:
    config = {**CONFIG, "architectures": classes, "tie_word_embeddings": tied}
    (note,) = notes_of(tmp_path, config, SHAPES)
    assert "tie_word_embeddings is false" in note
    assert EMBEDDING in note
    nested = {"architectures": classes, "text_config": {**CONFIG, "tie_word_embeddings": tied}}
    assert len(notes_of(tmp_path, nested, under("model.language_model."))) == 1


@pytest.mark.parametrize(
    ("config", "shapes"),
    [
        ({"architectures": ["LlamaModel"], "tie_word_embeddings": False}, {}),
        ({"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}, {}),
        ({"architectures": ["LlamaForCausalLM"]}, {}),
        ({"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}, {"lm_head.weight": (16, 8)}),
        ({"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}, {"lm_head.qweight": (2, 8)}),
        ({"architectures": ["XForCausalLM"], "tie_word_embeddings": False}, {"model.score_all.weight": (16, 8)}),
    ],
)
def test_a_head_that_is_there_or_not_needed_is_not_missed(
    config: dict[str, Any], shapes: dict[str, Any], tmp_path: Path
) -> None:
    assert notes_of(tmp_path, {**CONFIG, **config}, {**SHAPES, **shapes}) == []


def test_info_and_verify_say_it_in_the_same_words(tmp_path: Path, call: CommandLine) -> None:
    (note,) = notes_of(tmp_path, {**CONFIG, "vocab_size": 99, "num_hidden_layers": 7}, SHAPES)
    code, out, _ = call("info", tmp_path / "in")
    assert (code, note in out) == (0, True)
    code, out, err = call("verify", tmp_path / "in")
    assert (code, note in err) == (0, True)
    code, out, _ = call("verify", "--json", tmp_path / "in")
    assert note in json.loads(out)["warnings"]
    code, _, err = call("merge", tmp_path / "in", tmp_path / "cli")
    assert (code, note in err) == (0, True)


def test_a_left_over_adapter_config_does_not_make_an_adapter_of_a_model(tmp_path: Path, call: CommandLine) -> None:
    source = write_model(tmp_path / "in", CONFIG, SHAPES)
    (source / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    report = merge_checkpoint(source, tmp_path / "out")
    (note,) = report.notes
    assert "adapter_config.json" in note
    assert EMBEDDING in note
    # transformers would look for the adapter beside it, and not find it.
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors", "statexchange.json"]
    assert note in call("info", source)[1]
    given = merge_checkpoint(source, tmp_path / "given", files_from=source / "adapter_config.json")
    assert (given.notes, "adapter_config.json" in os.listdir(tmp_path / "given")) == ((note,), True)


ADAPTER = {f"base_model.model.model.layers.{n}.q_proj.lora_{m}.weight": (2, 8) for n in (0, 1) for m in "AB"}


def test_an_adapter_is_known_by_its_tensors(tmp_path: Path) -> None:
    source = write_model(tmp_path / "in", {"peft_type": "LORA", "r": 2}, ADAPTER, name="adapter_config.json")
    assert merge_checkpoint(source, tmp_path / "out").notes == ()
    assert sorted(os.listdir(tmp_path / "out")) == [
        "adapter_config.json", "adapter_model.safetensors", "statexchange.json"
    ]  # fmt: skip
    (source / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 16}')
    (note,) = merge_checkpoint(source, tmp_path / "rank").notes
    assert "r is 16" in note
    assert "has 2 rows" in note
    (source / "adapter_config.json").unlink()
    (note,) = merge_checkpoint(source, tmp_path / "bare").notes
    assert "no adapter_config.json" in note
    assert len(load_file(tmp_path / "bare/adapter_model.safetensors")) == len(ADAPTER)


def test_an_adapter_may_have_the_names_of_its_base_model(tmp_path: Path) -> None:
    shapes = {name.removeprefix("base_model.model."): shape for name, shape in ADAPTER.items()}
    write_model(tmp_path / "in", {"peft_type": "LORA", "r": 2}, shapes, name="adapter_config.json")
    (note,) = merge_checkpoint(tmp_path / "in", tmp_path / "out").notes
    assert "base_model.model." in note  # which PeftModel needs, and load_adapter of transformers does not
    assert {"adapter_config.json", "adapter_model.safetensors"} < set(os.listdir(tmp_path / "out"))


def test_a_soft_prompt_is_an_adapter(tmp_path: Path) -> None:
    shapes = {"prompt_embeddings": (4, 8)}
    write_model(tmp_path / "in", {"peft_type": "PROMPT_TUNING"}, shapes, name="adapter_config.json")
    assert merge_checkpoint(tmp_path / "in", tmp_path / "out").notes == ()
    assert "adapter_model.safetensors" in os.listdir(tmp_path / "out")
