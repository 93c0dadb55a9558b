"""Each row of the tables of formats.md has a sample, a command that works on it, and tests that compare its tensors."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from archives import unpack
from commands import exit_code_of
from safetensors import safe_open
from scripts import page_text
from stored import DATA

TESTS = Path(__file__).parents[1]


class Row(NamedTuple):
    """A row's sample, its tests (FILE::FUNCTION or FILE::FUNCTION[CASE]), and the config.json for its command."""

    sample: str
    tests: tuple[str, ...]
    config: str = ""


FRAMEWORKS = {
    "transformers 5.23 Trainer": Row(
        "trainer/sharded/checkpoint-2",
        (
            "unit/test_directories.py::test_the_model_is_merged_bit_by_bit[trainer/plain/checkpoint-2]",
            "unit/test_directories.py::test_the_model_is_merged_bit_by_bit[trainer/sharded/checkpoint-2]",
            "unit/test_logits.py::test_a_model_of_transformers_merged_has_equal_logits[trainer]",
            "slow/test_directories_written.py::test_what_a_framework_writes_is_merged_bit_by_bit[trainer]",
        ),
    ),
    "accelerate 1.15 save_state": Row(
        "accelerate/sharded/state",
        (
            "unit/test_directories.py::test_the_model_is_merged_bit_by_bit[accelerate/full/state]",
            "unit/test_directories.py::test_the_model_is_merged_bit_by_bit[accelerate/sharded/state]",
            "unit/test_directories_broken.py::test_one_of_several_models_must_be_named",
            "unit/test_logits.py::test_a_model_of_transformers_merged_has_equal_logits[accelerate]",
            "slow/test_directories_written.py::test_what_a_framework_writes_is_merged_bit_by_bit[accelerate]",
        ),
    ),
    "verl 0.9.1, FSDP": Row(
        "verl/fsdp2/run/global_step_1/actor",
        (
            "unit/test_directories.py::test_the_model_is_merged_bit_by_bit[verl/fsdp2/run/global_step_1/actor]",
            "unit/test_directories_broken.py::test_the_options_on_the_page_merge_the_base_model_of_a_lora_model",
            "unit/test_logits.py::test_a_model_of_verl_merged_has_equal_logits",
            "slow/test_directories_written.py::test_what_a_framework_writes_is_merged_bit_by_bit[verl]",
        ),
    ),
    "FSDP1 of torch 2.13, by torch.save on each rank": Row(
        "torch/fsdp1",
        (
            "unit/test_directories_broken.py::test_checkpoints_that_torch_alone_saves_are_merged_bit_by_bit[fsdp1]",
            "unit/test_directories_broken.py::test_flattened_parameters_are_named_and_not_merged",
            "unit/test_logits.py::test_a_model_of_transformers_merged_has_equal_logits[fsdp1]",
            "slow/test_directories_written.py::test_what_a_framework_writes_is_merged_bit_by_bit[torch]",
        ),
    ),
    "DCP of torch 2.13": Row(
        "torch/dcp_safetensors",
        (
            "unit/test_directories_broken.py::test_checkpoints_that_torch_alone_saves_are_merged_bit_by_bit[dcp_safetensors]",
            "ranks/test_dcp.py::test_what_dcp_saves_merges_to_what_save_file_writes",
            "ranks/test_dcp.py::test_a_file_for_each_entry_and_torchs_own_conversion",
            "ranks/test_dcp.py::test_what_is_saved_in_the_background_is_read",
            "ranks/test_dcp.py::test_bytes_of_a_storage_extension_are_refused",
            "unit/test_logits.py::test_a_model_of_transformers_merged_has_equal_logits[dcp]",
        ),
    ),
    "Lightning 2.6": Row(
        "lightning/full/last.ckpt",
        (
            "unit/test_directories.py::test_the_model_is_merged_bit_by_bit[lightning/sharded/last.ckpt]",
            "unit/test_directories.py::test_the_model_is_merged_bit_by_bit[lightning/fsdp1/last.ckpt]",
            "unit/test_directories_broken.py::test_one_consolidated_file_of_lightning_is_merged_bit_by_bit[fsdp1/full.ckpt]",
            "unit/test_logits.py::test_a_model_of_lightning_merged_with_the_options_of_the_note_has_equal_logits[llama_sharded]",
            "unit/test_logits.py::test_a_model_of_lightning_merged_with_the_options_of_the_note_has_equal_logits[llama_full]",
            "slow/test_directories_written.py::test_what_a_framework_writes_is_merged_bit_by_bit[lightning]",
            "slow/test_logits_written.py::test_the_logits_are_those_of_the_framework_s_model[lightning]",
        ),
    ),
    "DeepSpeed 0.19.8": Row(
        "deepspeed/zero2",
        (
            "unit/test_deepspeed.py::test_each_tensor_is_that_which_deepspeed_reports[zero1]",
            "unit/test_deepspeed.py::test_each_tensor_is_that_which_deepspeed_reports[zero3]",
            "unit/test_deepspeed.py::test_each_tensor_is_that_which_deepspeed_reports[pipeline]",
            "unit/test_deepspeed.py::test_a_step_and_a_universal_checkpoint_have_the_same_tensors",
            "unit/test_logits.py::test_a_model_of_deepspeed_merged_has_equal_logits[llama1]",
            "unit/test_logits.py::test_a_model_of_deepspeed_merged_has_equal_logits[llama3]",
            "unit/test_logits.py::test_a_model_of_deepspeed_merged_has_equal_logits[universal_llama3]",
            "slow/test_deepspeed_written.py::test_a_checkpoint_that_deepspeed_writes_now_has_what_it_reports",
            "slow/test_logits_written.py::test_the_logits_are_those_of_the_framework_s_model[deepspeed]",
        ),
    ),
    "Megatron-Core 0.16.1 torch_dist": Row(
        "megatron/tp2_pp2.tar.xz/torch_dist",
        (
            "unit/test_megatron_formats.py::test_torch_dist_has_what_megatron_loads",
            "unit/test_megatron_formats.py::test_flat_buffers_of_an_optimizer_are_named_and_are_not_the_models",
            "unit/test_conversions_megatron.py::test_megatrons_gpt_becomes_llama_from_either_of_its_formats",
            "slow/test_megatron_core.py::test_a_checkpoint_that_megatron_writes_now_has_what_it_loads",
            "slow/test_conversions_live.py::test_megatrons_model_and_the_converted_one_have_equal_logits",
        ),
        '{"vocab_size": 14}',
    ),
    "Megatron's mp_rank_TT[_PPP][_EEE]": Row(
        "megatron/tp2_pp2.tar.xz/legacy/iter_0000007",
        (
            "unit/test_megatron_formats.py::test_mp_rank_directories_have_the_model_of_torch_dist",
            "unit/test_megatron_ranks.py::test_a_file_without_the_runs_arguments_is_named",
            "unit/test_conversions_megatron.py::test_megatrons_gpt_becomes_llama_from_either_of_its_formats",
            "slow/test_megatron_core.py::test_a_checkpoint_that_megatron_writes_now_has_what_it_loads",
            "slow/test_conversions_live.py::test_megatrons_model_and_the_converted_one_have_equal_logits",
        ),
    ),
    "torchtitan 0.3": Row(
        "torchtitan/fused/checkpoint/step-3",
        (
            "unit/test_conversions.py::test_torchtitan_is_merged_to_what_its_to_hf_gives[fused]",
            "unit/test_conversions.py::test_torchtitan_is_merged_to_what_its_to_hf_gives[tied]",
            "unit/test_directories_broken.py::test_the_error_for_the_parent_of_torchtitans_steps_names_them",
            "unit/test_logits.py::test_a_model_of_torchtitan_merged_has_equal_logits[fused]",
            "slow/test_conversions_live.py::test_torchtitans_checkpoint_becomes_what_its_to_hf_gives",
        ),
        (DATA / "torchtitan/fused/config.json").read_text(),
    ),
    "Meta's torch_checkpointing 0.1.1": Row(
        "torch_checkpointing/state",
        (
            "unit/test_directories.py::test_the_model_is_merged_bit_by_bit[torch_checkpointing/state]",
            "unit/test_logits.py::test_a_model_of_torch_checkpointing_merged_has_equal_logits",
            "slow/test_logits_written.py::test_the_logits_are_those_of_the_framework_s_model[torch_checkpointing]",
        ),
    ),
    "torchao 0.18, as transformers 5.23 and flatten_tensor_state_dict write it": Row(
        "packed/torchao",
        (
            "unit/test_packed_layouts.py::test_packed_tensors_are_merged_bit_by_bit[torchao]",
            "unit/test_packed_layouts.py::test_a_renamed_merge_renames_torchaos_records",
            "slow/test_packed_frameworks.py::test_torchao_reads_a_merge",
        ),
    ),
    "bitsandbytes 0.50, by transformers 5.23": Row(
        "packed/bitsandbytes",
        (
            "unit/test_packed_layouts.py::test_packed_tensors_are_merged_bit_by_bit[bitsandbytes]",
            "slow/test_packed_frameworks.py::test_a_merge_of_bitsandbytes_has_equal_logits",
        ),
    ),
}


def table(head: str) -> dict[str, list[str]]:
    """Return the rows of the table whose first heading is `head`: the other cells, by the text of the first."""
    lines = iter(page_text("docs/formats.md").splitlines())
    next(line for line in lines if line.startswith(f"| {head} |"))
    next(lines)
    found = {}
    for line in lines:
        if not line.startswith("|"):
            break
        first, *others = (cell.strip() for cell in line.strip("|").split("|"))
        found[re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", first).replace("`", "")] = others
    return found


@cache
def contents(file: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the functions at the top of a file of tests, and its texts."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef)), frozenset(texts)


def test_each_row_names_tests_that_exist() -> None:
    assert table("framework").keys() == FRAMEWORKS.keys(), "give each row of the table its sample and its tests here"
    for row in FRAMEWORKS.values():
        assert any(name.startswith("unit/") for name in row.tests)
        for name in row.tests:
            file, function, case = re.fullmatch(r"([\w/.]+)::(\w+)(?:\[(.+)\])?", name).groups()  # type: ignore[union-attr]
            functions, texts = contents(file)
            assert function in functions, name
            assert case is None or case in texts, name


@pytest.mark.parametrize("name", [name for name in FRAMEWORKS if re.search(r"\d+\.\d", name)])
def test_a_sample_was_written_by_the_version_of_its_row(name: str) -> None:
    version = re.search(r"(\S+) (?:save_state )?(\d+\.\d[\d.]*)", name)
    assert version is not None
    readme = DATA / FRAMEWORKS[name].sample.partition("/")[0] / "README.md"
    pattern = rf"{re.escape(version[1].lower())} {re.escape(version[2])}\b"
    assert re.search(pattern, readme.read_text(encoding="utf-8").lower())


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_command_of_a_row_merges_its_sample(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row, command = FRAMEWORKS[name], shlex.split(table("framework")[name][-1].strip("`"))
    assert command[:2] == ["statexchange", "merge"]
    sample = DATA / row.sample
    archive = next((path for path in sample.parents if path.suffix == ".xz"), None)
    if archive is not None:
        unpack(archive, tmp_path / "unpacked")
        sample = tmp_path / "unpacked" / sample.relative_to(archive)
    work = tmp_path / "work"
    source = work / command[2]
    source.parent.mkdir(parents=True)
    (shutil.copytree if sample.is_dir() else shutil.copy)(sample, source)
    if row.config:
        (work / "config.json").write_text(row.config)
    monkeypatch.chdir(work)
    assert exit_code_of(*command[1:]) == 0
    with safe_open(work / command[3] / "model.safetensors", "numpy") as merged:
        assert len(list(merged.keys())) > 1
