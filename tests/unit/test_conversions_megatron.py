"""Conversions of Megatron's and torchtitan's checkpoints, beside a config that fits or contradicts them."""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from converted import GPT, LLAMA3, TORCHTITAN, Arrays, merged, same, titan
from safetensors.numpy import save_file
from scripts import HOME, page_block, run_commands
from stored import write_raw

import statexchange as sx
from statexchange.checkpoint.merge import merge_checkpoint
from statexchange.errors import (
    InvalidArgumentError,
    UnsafeError,
    UnsupportedError,
)


def llama_of(stacked: Arrays, groups: int) -> dict[str, np.ndarray]:
    """Return the tensors of torch_dist, divided with numpy by layer, into queries, keys and values, and gate and up."""
    found = {"model.embed_tokens.weight": stacked["embedding.word_embeddings.weight"]}
    found["model.norm.weight"] = stacked["decoder.final_layernorm.weight"]
    if "output_layer.weight" in stacked:
        found["lm_head.weight"] = stacked["output_layer.weight"]
    renamed = {
        "self_attention.linear_proj.": "self_attn.o_proj.",
        "mlp.linear_fc2.": "mlp.down_proj.",
        "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
        "mlp.linear_fc1.layer_norm_": "post_attention_layernorm.",
    }
    for name, tensor in stacked.items():
        if not name.startswith("decoder.layers."):
            continue
        rest, kind = name.removeprefix("decoder.layers."), name.rpartition(".")[2]
        for layer, rows in enumerate(tensor):
            prefix = f"model.layers.{layer}."
            if rest in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
                parts = rows.reshape(groups, 3, -1, *rows.shape[1:])  # the samples have one query for each key
                for part, letter in enumerate("qkv"):
                    found[f"{prefix}self_attn.{letter}_proj.{kind}"] = parts[:, part].reshape(-1, *rows.shape[1:])
            elif rest in ("mlp.linear_fc1.weight", "mlp.linear_fc1.bias"):
                found[f"{prefix}mlp.gate_proj.{kind}"], found[f"{prefix}mlp.up_proj.{kind}"] = np.split(rows, 2)
            else:
                old = next(old for old in renamed if rest.startswith(old))
                found[prefix + rest.replace(old, renamed[old])] = rows
    return found


@pytest.mark.parametrize("sample", ["tp2_pp2", "pp2_tied", "pp2_vpp2"])
def test_megatrons_gpt_becomes_llama_from_either_of_its_formats(tmp_path: Path, megatron: Path, sample: str) -> None:
    stacked = merged(megatron / sample / "torch_dist", tmp_path / "plain")
    expected = llama_of(stacked, groups=2)
    assert same(merged(megatron / sample / "torch_dist", tmp_path / "a", convert=GPT), expected)
    assert same(merged(megatron / sample / "legacy", tmp_path / "b", convert=GPT), expected)
    numbers = {"n_heads": 2, "n_kv_heads": 2}
    assert same(merged(tmp_path / "a", tmp_path / "c", convert=f"inverse:{GPT}", convert_with=numbers), stacked)


def test_a_padded_vocabulary_of_megatron_is_cut_to_that_of_the_config(tmp_path: Path, megatron: Path) -> None:
    config = {"config.json": json.dumps({"vocab_size": 13})}
    found = merged(megatron / "pp2_vpp2" / "torch_dist", tmp_path / "a", convert=GPT, files_from=config)
    assert found["model.embed_tokens.weight"].shape == found["lm_head.weight"].shape == (13, 8)
    numbers = {"n_heads": 2, "n_kv_heads": 2, "padded_vocab_size": 16}
    back = merged(tmp_path / "a", tmp_path / "b", convert=f"inverse:{GPT}", convert_with=numbers)
    rows = back["output_layer.weight"]
    assert (rows.shape, rows[13:].view("u2").any()) == ((16, 8), False)


def test_a_config_that_contradicts_the_arguments_of_the_run_is_refused(tmp_path: Path, megatron: Path) -> None:
    """It would reshape queries, keys and values to another model's heads."""
    source = megatron / "tp2_pp2" / "torch_dist"
    config = {"config.json": json.dumps({"num_attention_heads": 4, "num_key_value_heads": 4})}
    with pytest.raises(InvalidArgumentError, match=r"\b4 in .*\b2 in .*n_heads=N"):
        merge_checkpoint(source, tmp_path / "out", convert=GPT, files_from=config)
    right = merged(source, tmp_path / "right", convert=GPT)
    numbers = {"n_heads": 2, "n_kv_heads": 2}
    with pytest.raises(InvalidArgumentError, match=r"n_heads is 4.*and 2"):
        merge_checkpoint(source, tmp_path / "out", convert=GPT, files_from=config, convert_with=numbers)
    shutil.copytree(source, tmp_path / "beside")
    (tmp_path / "beside" / "config.json").write_text(config["config.json"])  # it is not written
    assert same(merged(tmp_path / "beside", tmp_path / "given", convert=GPT, convert_with=numbers), right)


@pytest.mark.parametrize("files", [None, {"config.json": "{}"}])
def test_a_number_of_the_caller_replaces_that_of_the_conversion(tmp_path: Path, files: dict[str, str] | None) -> None:
    save_file({"a": np.arange(6)}, tmp_path / "model.safetensors")
    values = [{"permute": {"dim": 0, "shape": ["n", "rest"], "order": [1, 0]}}]
    conversion = {"numbers": {"n": {"value": "2"}, "rest": {}}, "rules": [{"from": "a", "to": "b", "values": values}]}
    (tmp_path / "conversion.json").write_text(json.dumps(conversion))
    options = {"convert": str(tmp_path / "conversion.json"), "convert_with": {"n": 3}, "files_from": files}
    written = merged(tmp_path / "model.safetensors", tmp_path / "out", **options)
    assert written["b"].tolist() == [0, 2, 4, 1, 3, 5]


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "vocab_size": 14,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("form", ["torch_dist", "legacy"])
@pytest.mark.parametrize("is_beside", [False, True])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"intermediate_size": 16}, r"^convert: ffn .*\b16 .*\b12 in"),
        ({"vocab_size": 17}, "vocab_size = 17 .* 16"),
        ({"num_key_value_heads": 1}, r"n_kv_heads .*\b1 .*\b2 in"),
    ],
)
def test_a_config_that_contradicts_megatrons_numbers_is_refused(
    tmp_path: Path, megatron: Path, form: str, is_beside: bool, change: dict[str, Any], text: str
) -> None:
    config = {**LLAMA, **change}
    source, options = tmp_path / "source", {}
    shutil.copytree(megatron / "tp2_pp2" / form, source)
    where = "config.json of files_from"
    if is_beside:
        where = str(source / "config.json")
        (source / "config.json").write_text(json.dumps(config))
    else:
        options["files_from"] = {"config.json": json.dumps(config)}
    with pytest.raises(InvalidArgumentError, match=text) as caught:
        merge_checkpoint(source, tmp_path / "out", convert=GPT, **options)
    assert where in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_hidden_layers": 1}, "num_hidden_layers is 1, and there are 2 layers"),
        ({"num_hidden_layers": 6}, "num_hidden_layers is 6, and there are 2 layers"),
    ],
)
def test_a_config_that_contradicts_converted_tensors_is_named_as_in_any_merge(
    tmp_path: Path, megatron: Path, change: dict[str, Any], text: str
) -> None:
    for number, form in enumerate(("torch_dist", "legacy")):
        files = {"config.json": json.dumps({**LLAMA, **change})}
        source = megatron / "tp2_pp2" / form
        notes = merge_checkpoint(source, tmp_path / f"{number}", convert=GPT, files_from=files).notes
        assert [note for note in notes if text in note], notes


def test_a_config_that_fits_is_taken_and_a_selection_may_have_less(tmp_path: Path, megatron: Path) -> None:
    source = megatron / "tp2_pp2" / "torch_dist"
    config = {"config.json": json.dumps(LLAMA)}
    report = merge_checkpoint(source, tmp_path / "all", convert=GPT, files_from=config)
    assert not [note for note in report.notes if "differ" in note]
    merge_checkpoint(source, tmp_path / "some", convert=GPT, files_from=config, exclude="output_layer.weight")


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4},
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    ],
)
def test_a_config_whose_heads_do_not_fit_torchtitans_tensors_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    config = json.loads((TORCHTITAN / "fused" / "config.json").read_text())
    files = {"config.json": json.dumps({**config, **change})}
    with pytest.raises(InvalidArgumentError, match="dim of size"):
        merge_checkpoint(titan("fused"), tmp_path / "out", convert=LLAMA3, files_from=files)


def megatron_names(ffn: int, **more: np.ndarray) -> dict[str, np.ndarray]:
    prefix = "decoder.layers.0.mlp."
    return {
        f"{prefix}linear_fc1.weight": np.zeros((ffn, 4), "f4"),
        f"{prefix}linear_fc2.weight": np.zeros((4, 6), "f4"),
        **more,
    }


def test_a_model_that_is_no_llama_is_refused(tmp_path: Path, megatron: Path) -> None:
    source = tmp_path / "s.safetensors"
    save_file(megatron_names(12), source)
    assert len(merged(source, tmp_path / "gated", convert=GPT)) == 3
    save_file(megatron_names(6), source)
    with pytest.raises(InvalidArgumentError, match="dim of size 6"):
        merge_checkpoint(source, tmp_path / "out", convert=GPT)
    save_file(megatron_names(12, **{"decoder.layers.0.input_layernorm.bias": np.zeros(4, "f4")}), source)
    with pytest.raises(UnsafeError, match=r"no rule.*\bdecoder\.layers\.0\.input_layernorm\.bias"):
        merge_checkpoint(source, tmp_path / "out", convert=GPT)
    save_file(megatron_names(12), source)
    for numbers in ({"gated": 0}, {"norms_1p": 1}, {"interleaved": 1}):
        with pytest.raises(UnsupportedError, match="models in which") as caught:
            merge_checkpoint(source, tmp_path / "out", convert=GPT, convert_with=numbers)
        assert f"{next(iter(numbers))} is" in str(caught.value)
    with pytest.raises(UnsafeError, match=r"no rule.*router"):
        merge_checkpoint(megatron / "ep2_moe" / "torch_dist", tmp_path / "out", convert=GPT)


def test_halves_of_the_gate_may_have_names_of_their_own(tmp_path: Path) -> None:
    """As with singleton_local_shards."""
    halves = {half: np.full((3, 2), number, "f4") for number, half in enumerate("wv")}
    arrays = {f"decoder.layers.1.mlp.linear_fc1.weight_{half}": rows for half, rows in halves.items()}
    save_file(arrays, tmp_path / "s.safetensors")
    found = merged(tmp_path / "s.safetensors", tmp_path / "out", convert=GPT)
    names = {"gate": halves["w"], "up": halves["v"]}
    assert same(found, {f"model.layers.1.mlp.{name}_proj.weight": rows for name, rows in names.items()})


# Pages


def test_the_commands_of_the_pages_print_what_they_show(tmp_path: Path, megatron: Path) -> None:
    shutil.copytree(TORCHTITAN / "fused", tmp_path / "titan")
    run_commands(page_block("commands: torchtitan"), tmp_path / "titan")
    shutil.copytree(megatron / "tp2_pp2" / "torch_dist", tmp_path / "gpt" / "checkpoints")
    (tmp_path / "gpt" / "config.json").write_text(json.dumps({"vocab_size": 14}))
    run_commands(page_block("commands: megatron to llama"), tmp_path / "gpt")


def test_the_conversion_of_the_page_and_its_inverse_give_the_first_tensors_back(tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text(page_block("block: own.json"))
    arrays = {
        "embed.weight": np.ones((3, 4), "f4"),
        "blocks.0.qkv.weight": np.random.default_rng(0).random((24, 4), "f4"),
    }
    save_file({**arrays, "blocks.0.rope.freqs": np.ones(2, "f4")}, tmp_path / "s.safetensors")
    options = {"convert": str(tmp_path / "own.json"), "convert_with": {"n_heads": 2}}
    found = merged(tmp_path / "s.safetensors", tmp_path / "out", **options)
    value = arrays["blocks.0.qkv.weight"].reshape(2, 3, 4, 4)[:, 2].reshape(8, 4)
    assert found["model.layers.0.self_attn.v_proj.weight"].tolist() == value.tolist()
    options["convert"] = f"inverse:{options['convert']}"
    assert same(merged(tmp_path / "out", tmp_path / "back", **options), arrays)


def test_the_reference_lists_the_built_in_conversions() -> None:
    spec = importlib.util.spec_from_file_location("conversions_reference", HOME / "tools" / "conversions_reference.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    page = (HOME / "docs" / "reference" / "conversions.md").read_text(encoding="utf-8")
    assert page == program.page(), "run tools/conversions_reference.py"


# Packed dtypes and numbers that cannot be


def float4(path: Path) -> Path:
    write_raw(path, {"w": ("F4", [2, 4], bytes([1, 2, 3, 4]))})
    return path


@pytest.mark.parametrize(
    "operation",
    [
        {"transpose": {"order": [1, 0]}},
        {"permute": {"dim": 1, "shape": [2, 1], "order": [1, 0]}},
        {"permute": {"dim": -1, "shape": [2, 1], "order": [1, 0]}},
    ],
)
def test_elements_that_share_a_byte_are_not_moved_apart(tmp_path: Path, operation: dict[str, Any]) -> None:
    rules = {"rules": [{"from": "w", "to": "v", "values": [operation]}]}
    with pytest.raises(UnsupportedError, match="only whole rows") as caught:
        merge_checkpoint(float4(tmp_path / "w.safetensors"), tmp_path / "out", convert=rules)
    assert caught.value.name == "w"


def test_whole_rows_of_a_packed_dtype_are_moved(tmp_path: Path) -> None:
    rules = {"rules": [{"from": "w", "to": ["a", "b"], "values": [{"split": {"dim": 0, "sizes": [1, 1]}}]}]}
    merge_checkpoint(float4(tmp_path / "w.safetensors"), tmp_path / "out", convert=rules)
    with sx.open_checkpoint(tmp_path / "out") as found:
        assert {name: tensor.read().tobytes() for name, tensor in found.items()} == {"a": b"\1\2", "b": b"\3\4"}


@pytest.mark.parametrize(
    "values",
    [{"split": {"sizes": ["n", "n"]}}, {"split": {"sizes": [1, 1], "groups": "n"}}, {"split": {"sizes": ["loop", 1]}}],
)
def test_a_number_that_is_0_or_refers_to_itself_is_an_error(tmp_path: Path, values: dict[str, Any]) -> None:
    save_file({"w": np.arange(4.0)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"n": 0}')
    rules = {
        "numbers": {"n": {"config": "n"}, "loop": {"value": "again"}, "again": {"value": "loop"}},
        "rules": [{"from": "w", "to": ["a", "b"], "values": [values]}],
    }
    with pytest.raises(InvalidArgumentError, match=r"n is|known"):
        merge_checkpoint(tmp_path, tmp_path / "out", convert=rules)
