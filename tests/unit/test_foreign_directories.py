"""Directories that look like a checkpoint and are none: what commands print of them, and their exit codes."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import CommandLine
from safetensors.torch import save_file
from stored import DATA

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 4976698672\n"
HTML = "<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>"
ADAPTER = {"base_model.model.model.layers.0.q_proj.lora_A.weight": torch.ones(2, 4)}

Files = dict[str, str | bytes | Callable[[Path], object]]


def torch_file(value: object) -> Callable[[Path], object]:
    return lambda path: torch.save(value, path)


def tensors(path: Path) -> None:
    save_file({"w": torch.ones(2)}, path)


def index(*files: str) -> str:
    return json.dumps({"metadata": {}, "weight_map": {f"w{number}": file for number, file in enumerate(files)}})


# What lies in a directory, the exit code, and a part of what info, verify and merge say.
FOREIGN: dict[str, tuple[Files, int, str]] = {
    "nothing": ({}, 3, "neither a save, a workspace nor a checkpoint"),
    "a README": ({"README.md": "# hello"}, 3, "neither a save, a workspace nor a checkpoint"),
    "a config": ({"config.json": "{}"}, 3, "neither a save, a workspace nor a checkpoint"),
    "a tokenizer": (
        {"tokenizer.json": "{}", "tokenizer_config.json": "{}"},
        3,
        "neither a save, a workspace nor a checkpoint",
    ),
    "a PEFT config": ({"adapter_config.json": "{}"}, 3, "neither a save, a workspace nor a checkpoint"),
    "Trainer's state": ({"trainer_state.json": "{}"}, 3, "neither a save, a workspace nor a checkpoint"),
    "a download": (
        {"config.json": "{}", "model.safetensors.incomplete": b"x"},
        3,
        "neither a save, a workspace nor a checkpoint",
    ),
    "an index outside": (
        {"model.safetensors.index.json": index("../secret.safetensors")},
        4,
        "a tensor is listed in '../secret.safetensors', which is not a plain file name",
    ),
    "an index alone": (
        {"model.safetensors.index.json": index("model-00001-of-00001.safetensors")},
        5,
        "a file of this checkpoint is missing",
    ),
    "Git LFS": ({"model.safetensors": LFS}, 4, "this is a pointer of Git LFS, not the file itself"),
    "Git LFS, torch": ({"pytorch_model.bin": LFS}, 4, "this is a pointer of Git LFS, not the file itself"),
    "Git LFS, DCP": ({".metadata": LFS}, 4, "this is a pointer of Git LFS, not the file itself"),
    "a web page": ({"model.safetensors": HTML}, 4, "this is a web page, not the file"),
    "a web page, torch": ({"pytorch_model.bin": HTML}, 4, "this is a web page, not the file"),
    "an error message": (
        {"model.safetensors": '{"error":"Access is restricted"}'},
        4,
        "this is JSON text, not the file",
    ),
    "gzip": ({"model.safetensors": b"\x1f\x8b\x08\0" + bytes(99)}, 4, "this file is compressed by gzip: unpack it"),
    "torch as safetensors": ({"model.safetensors": torch_file({})}, 4, "if torch.save wrote it, call it .pt or .bin"),
    "safetensors as torch": ({"pytorch_model.bin": tensors}, 4, "seems to be a safetensors file: call it .safetensors"),
    "an empty file": ({"model.safetensors": b""}, 4, "the file is empty"),
    "empty metadata": ({".metadata": b""}, 4, "the file is empty"),
    "metadata in text": (
        {".metadata": "version: 2"},
        4,
        "not a valid pickle: near byte 1: ",
    ),
    "metadata of another library": ({".metadata": pickle.dumps({"a": 1})}, 4, "dict of 1 in the place of Metadata"),
    "latest alone": ({"latest": "global_step5"}, 5, "'global_step5', which is not here; no other is here"),
    "DeepSpeed's name": (
        {"mp_rank_00_model_states.pt": torch_file({"w": torch.ones(2)})},
        4,
        "it has no entry 'module'; if another program wrote it, give this file alone",
    ),
    "Megatron's run": (
        {"latest_checkpointed_iteration.txt": "7"},
        5,
        "'iter_0000007', which is not here; no other is here",
    ),
    "Megatron's common.pt": (
        {"common.pt": torch_file({"iteration": 3})},
        5,
        "no file here has a tensor: those of a DCP, .metadata and .distcp files, are missing",
    ),
    "Lightning's meta.pt": (
        {"meta.pt": (DATA / "lightning/sharded/last.ckpt/meta.pt").read_bytes()},
        5,
        "no file here has a tensor: those of a DCP, .metadata and .distcp files, are missing",
    ),
}


def run(call: CommandLine, *arguments: str | Path) -> tuple[int, str]:
    """Return the exit code and all output of a command."""
    code, out, err = call(*arguments)
    return code, out + err


def write(path: Path, files: Files) -> Path:
    path.mkdir()
    for name, content in files.items():
        if callable(content):
            content(path / name)
        else:
            (path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize("kind", FOREIGN)
def test_each_command_names_the_foreign_kind_and_what_to_do(kind: str, tmp_path: Path, call: CommandLine) -> None:
    files, code, text = FOREIGN[kind]
    path = write(tmp_path / "x", files)
    for arguments in (["info", path], ["verify", path], ["merge", path, tmp_path / "out"]):
        found, printed = run(call, *arguments)
        assert (found, text in printed) == (code, True), printed
    assert not (tmp_path / "out").exists()
    found, printed = run(call, "scan", path)
    is_unfinished = kind == "a download"
    assert found == (0 if code == 3 else 1), printed
    assert ("UNFINISHED DOWNLOAD" in printed) == is_unfinished
    assert "WHOLE" not in printed


def test_a_file_with_deepspeeds_name_of_another_program_is_read_alone(tmp_path: Path, call: CommandLine) -> None:
    path = write(tmp_path / "x", {"mp_rank_00_model_states.pt": torch_file({"w": torch.ones(2)})})
    assert run(call, "merge", path / "mp_rank_00_model_states.pt", tmp_path / "out")[0] == 0


TRAINER, ACCELERATE = "trainer/plain/checkpoint-2", "accelerate/full/state"
# The section of a file, and whether it has tensors.
STATE_FILES = {
    "deepspeed/zero3/global_step2/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": ("optimizer", True),
    "deepspeed/llama1/global_step2/zero_pp_rank_1_mp_rank_00_optim_states.pt": ("optimizer", True),
    f"{TRAINER}/optimizer.pt": ("optimizer", True),
    f"{TRAINER}/rng_state.pth": ("rng", True),
    f"{TRAINER}/scheduler.pt": ("scheduler", False),
    f"{TRAINER}/training_args.bin": ("other", False),
    f"{ACCELERATE}/optimizer.bin": ("optimizer", True),
    f"{ACCELERATE}/scheduler.bin": ("scheduler", False),
    f"{ACCELERATE}/random_states_0.pkl": ("rng", True),
}


@pytest.mark.parametrize("name", STATE_FILES)
def test_a_file_that_is_not_the_model_is_named_and_not_merged_as_one(
    name: str, tmp_path: Path, call: CommandLine
) -> None:
    section, has_tensors = STATE_FILES[name]
    file = DATA / name
    message = (
        f"this file alone is the section {section!r} of a checkpoint: to read all, give the directory, {file.parent}"
    )
    for options in ([], ["--exclude", "x"], ["--section", "model"]):
        code, printed = run(call, "merge", file, tmp_path / "out", *options)
        assert (code, message in printed) == (2, True), printed
    code, printed = run(call, "info", file)
    assert (code, message in printed) == (0, True), printed
    assert not (tmp_path / "out").exists()
    if has_tensors:
        assert run(call, "merge", file, tmp_path / "out", "--section", section)[0] == 0
        code, printed = run(call, "merge", file.parent, tmp_path / "all", "--section", section)
        assert (code, "this file alone" in printed) == (0, False), printed


def test_state_files_beside_a_model_are_not_merged_with_it(tmp_path: Path, call: CommandLine) -> None:
    """Without the file by which a framework's directory is known."""
    path = write(tmp_path / "x", {"pytorch_model.bin": torch_file({"w": torch.ones(2)})})
    for name in ("rng_state.pth", "optimizer.pt"):
        shutil.copy(DATA / TRAINER / name, path)
    code, printed = run(call, "merge", path, tmp_path / "out")
    assert (code, "merged 1 tensor" in printed, "not 'optimizer', 'rng'" in printed) == (0, True, True), printed
    (path / "pytorch_model.bin").unlink()
    for options in ([], ["--exclude", "x"]):
        code, printed = run(call, "merge", path, tmp_path / "other", *options)
        assert (code, "there is no section 'model'" in printed) == (2, True), printed


def test_an_adapter_without_its_config_is_merged_with_a_note_about_peft(tmp_path: Path, call: CommandLine) -> None:
    path = write(tmp_path / "x", {"adapter_model.safetensors": lambda path: save_file(ADAPTER, path)})
    code, printed = run(call, "merge", path, tmp_path / "out")
    assert (code, "no adapter_config.json: PEFT will not load this directory" in printed) == (0, True)
    (path / "adapter_config.json").write_text("{}")
    code, printed = run(call, "merge", path, tmp_path / "again")
    assert (code, "will not load" in printed) == (0, False)


def test_verify_does_not_call_a_file_without_tensors_whole(tmp_path: Path, call: CommandLine) -> None:
    path = write(tmp_path / "x", {"state.pt": torch_file({"step": 3})})
    code, printed = run(call, "verify", path)
    assert (code, "there is no tensor in it" in printed, "every" in printed) == (0, True, False)


def test_a_file_of_lightnings_directory_alone_is_shown(call: CommandLine, tmp_path: Path) -> None:
    file = shutil.copy(DATA / "lightning/sharded/last.ckpt/meta.pt", tmp_path)
    assert run(call, "info", Path(file))[0] == 0


@pytest.mark.parametrize(
    ("other", "kind", "text"),
    [
        (
            "deepspeed/zero2",
            "huggingface",
            "not read: a checkpoint of DeepSpeed, whose step the file latest names; to read it",
        ),
        ("lightning/sharded/last.ckpt", "lightning", "not read: model.safetensors"),
        (
            "torchtitan/fused/checkpoint/step-3",
            "dcp",
            "not read: model.safetensors",
        ),
    ],
)
def test_the_kind_that_is_not_read_beside_another_is_named(
    tmp_path: Path, call: CommandLine, other: str, kind: str, text: str
) -> None:
    path = Path(shutil.copytree(DATA / other, tmp_path / "x"))
    tensors(path / "model.safetensors")
    for arguments in (["info", path], ["merge", path, tmp_path / "out"]):
        code, printed = run(call, *arguments)
        assert (code, text in printed) == (0, True), printed
    assert f"kind        {kind}\n" in run(call, "info", path)[1]


@pytest.mark.parametrize(
    ("part", "text"),
    [("zero", "there is no section 'model', only 'optimizer'"), ("zero/up.weight", "no name says which is the model")],
)
def test_a_directory_inside_a_universal_checkpoint_is_not_merged_as_a_model(
    call: CommandLine, tmp_path: Path, part: str, text: str
) -> None:
    code, printed = run(call, "merge", DATA / "deepspeed/universal/global_step2" / part, tmp_path / "out")
    assert (code, text in printed) == (2, True), printed
    assert not (tmp_path / "out").exists()


def test_verls_step_without_the_models_files_has_no_model(tmp_path: Path, call: CommandLine) -> None:
    path = Path(shutil.copytree(DATA / "verl/fsdp2/run/global_step_1/actor", tmp_path / "x"))
    for file in path.glob("model_*"):
        file.unlink()
    for arguments, expected in ((["info", path], 5), (["verify", path], 5), (["merge", path, tmp_path / "out"], 2)):
        code, printed = run(call, *arguments)
        text = "no file of a model is here, only of 'optimizer', 'other'"
        assert (code, text in printed) == (expected, True), printed


def test_verls_directories_above_a_model_name_what_to_give(tmp_path: Path, call: CommandLine) -> None:
    path = Path(shutil.copytree(DATA / "verl/fsdp2/run", tmp_path / "x"))
    step = path / "global_step_1"
    for directory, below in ((path, step), (step, step / "actor")):
        for arguments in (["info", directory], ["verify", directory], ["merge", directory, tmp_path / "out"]):
            code, printed = run(call, *arguments)
            expected = f"contains checkpoints ({below.name}): name one of them, such as {below}"
            assert (code, expected in printed) == (2, True), printed
    assert run(call, "scan", path)[0] == 0


def test_deepspeeds_files_beside_a_dcp_and_gguf_beside_weights_are_named(tmp_path: Path, call: CommandLine) -> None:
    mixed = Path(shutil.copytree(DATA / "deepspeed/zero2/global_step2", tmp_path / "mixed"))
    shutil.copytree(DATA / "torchtitan/fused/checkpoint/step-3", mixed, dirs_exist_ok=True)
    trainer = Path(shutil.copytree(DATA / "trainer/plain/checkpoint-2", tmp_path / "trainer"))
    shutil.copy(DATA / "foreign/model.gguf", trainer)
    for path, text in (
        (mixed, "not read: mp_rank_00_model_states.pt"),
        (trainer, "not read: model.gguf"),
    ):
        for arguments in (["info", path], ["merge", path, tmp_path / f"{path.name}.out"]):
            code, printed = run(call, *arguments)
            assert (code, text in printed) == (0, True), printed


@pytest.mark.parametrize(
    "file", ["verl/fsdp2/run/global_step_1/actor/model_world_size_2_rank_0.pt", "torch/fsdp1/rank1.pt"]
)
def test_merging_one_ranks_file_alone_names_the_directory(tmp_path: Path, call: CommandLine, file: str) -> None:
    path = DATA / file
    code, printed = run(call, "merge", path, tmp_path / "out")
    assert (code, "this file alone is one" in printed) == (5, True), printed
    assert f"give the directory, {path.parent}" in printed
    assert "no file holds region" in printed
