"""Directories of training frameworks that lack files or have several models: a named error."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import CommandLine
from equality import assert_same
from safetensors.torch import load_file
from stored import DATA, copied

import statexchange as sx
from statexchange.checkpoint.merge import merge_checkpoint
from statexchange.errors import IncompleteError, InvalidArgumentError, UnsafeError
from statexchange.formats.registry import open_source


def test_one_file_of_a_dcp_is_refused_by_name(call: CommandLine) -> None:
    file = DATA / "trainer/sharded/checkpoint-2/pytorch_model_fsdp_0/__0_0.distcp"
    text = f"this file has some entries of a torch DCP checkpoint: give its directory, {file.parent}"
    for arguments in (["info", file], ["merge", file, "out"]):
        code, _, err = call(*arguments)
        assert (code, text in err) == (2, True)


@pytest.mark.parametrize("name", ["__1_0.distcp", ".metadata"])
def test_a_missing_file_of_the_model_is_named(tmp_path: Path, call: CommandLine, name: str) -> None:
    path = copied("accelerate/sharded/state", tmp_path)
    (path / "pytorch_model_fsdp_0" / name).unlink()
    code, _, err = call("merge", path, tmp_path / "out")
    assert code == 5
    assert str(path / "pytorch_model_fsdp_0") in err
    assert ("rank 1" if name == "__1_0.distcp" else ".metadata is missing") in err
    code, out, _ = call("info", path)
    assert (code, "optimizer   optimizer_0\n" in out) == (5, True)
    merge_checkpoint(path, tmp_path / "optimizer", section="optimizer")
    assert len(load_file(tmp_path / "optimizer/model.safetensors")) == 12


NO_METADATA = "which torch writes last: the save did not finish, or hidden files were not copied"
NO_RANK = "a file of this checkpoint is missing, with parts of "
# A directory, the file that is removed from a copy of it, the exit code, and a part of the message.
HALVES = [
    ("trainer/plain/checkpoint-2", "model.safetensors", 2, "no file of a model is here, only of 'optimizer'"),
    ("trainer/sharded/checkpoint-2", "pytorch_model_fsdp_0/__1_0.distcp", 5, NO_RANK),
    ("trainer/sharded/checkpoint-2", "pytorch_model_fsdp_0/.metadata", 5, NO_METADATA),
    ("lightning/sharded/last.ckpt", "__1_0.distcp", 5, NO_RANK),
    ("lightning/fsdp1/last.ckpt", "__1_0.distcp", 5, NO_RANK),
    ("lightning/sharded/last.ckpt", ".metadata", 5, NO_METADATA),
    ("torchtitan/fused/checkpoint/step-3", "__1_0.distcp", 5, NO_RANK),
    ("torchtitan/fused/checkpoint/step-3", ".metadata", 5, NO_METADATA),
    ("torch_checkpointing/state", "model_1.pt", 5, "no file holds region [4:7, 0:6] of shape (7, 6)"),
    ("deepspeed/zero3", "latest", 2, "contains checkpoints (global_step2): name one of them, such as "),
]


@pytest.mark.parametrize(("directory", "name", "code", "text"), HALVES)
def test_a_directory_that_lacks_a_file_is_neither_merged_nor_loaded(
    tmp_path: Path, call: CommandLine, directory: str, name: str, code: int, text: str
) -> None:
    path = copied(directory, tmp_path)
    (path / name).unlink()
    found, _, err = call("merge", path, tmp_path / "out")
    assert (found, text in err) == (code, True)
    assert not (tmp_path / "out").exists()
    weight = torch.zeros(7, 6)
    with pytest.raises(sx.StateExchangeError):
        sx.load_checkpoint({"rows": weight}, path)
    assert not weight.any()


def test_a_region_of_an_absent_file_of_torch_checkpointing_is_named(tmp_path: Path, call: CommandLine) -> None:
    path = copied("torch_checkpointing/state", tmp_path)
    for name in ("model_1.pt", "config_1.pt"):
        (path / name).unlink()
    text = "no file holds region [4:7, 0:6] of shape (7, 6); model_0.pt holds the rest [tensor "
    for arguments in (["merge", path, tmp_path / "out"], ["info", path], ["show", path, "model.rows"]):
        code, out, err = call(*arguments)
        assert (code, text in out + err) == (5, True), arguments
    code, out, _ = call("verify", path)
    assert (code, "region [4:7, 0:6]" in out) == (5, True)
    with pytest.raises(IncompleteError, match=r"region .4:7, 0:6."):
        sx.load_checkpoint({"rows": torch.zeros(7, 6)}, path)
    with sx.open_checkpoint(path) as checkpoint, pytest.raises(IncompleteError, match=r"region .4:7, 0:6."):
        checkpoint["rows"].read()


def test_a_rank_of_torch_checkpointing_may_have_no_part_of_the_model(tmp_path: Path, call: CommandLine) -> None:
    path = copied("torch_checkpointing/state", tmp_path)
    shutil.copy(path / "step_0.pt", path / "step_2.pt")
    code, out, err = call("merge", path, tmp_path / "out")
    assert (code, "model_2" in out + err) == (0, False)
    expected = load_file(DATA / "torch_checkpointing/expected.safetensors")
    assert_same(load_file(tmp_path / "out/model.safetensors"), expected)


def test_the_error_for_a_directory_without_a_model_lists_its_sections(tmp_path: Path, call: CommandLine) -> None:
    path = copied("accelerate/full/state", tmp_path)
    (path / "pytorch_model_fsdp.bin").unlink()
    code, _, err = call("merge", path, tmp_path / "out")
    text = (
        "no file of a model is here, only of 'optimizer', 'scheduler', 'rng': copy it, too, or choose with section "
        f"(--section) [{path}]"
    )
    assert (code, text in err) == (2, True)


def test_one_of_several_models_must_be_named(tmp_path: Path, call: CommandLine) -> None:
    path = DATA / "accelerate/several/state"
    code, _, err = call("merge", path, tmp_path / "out")
    text = f"this directory has 2 models, name one of them: {path}/model.safetensors, {path}/model_1.safetensors"
    assert (code, text in err) == (2, True)
    merge_checkpoint(path / "model_1.safetensors", tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors").keys() == {"weight", "bias"}
    with open_source(path) as source:
        names = {tensor.shard.name for _, tensor in source.shards()}
    assert {"model.model_1.weight", "model.model.head.weight", "optimizer.state.0.exp_avg"} <= names


def test_the_error_for_a_directory_of_checkpoints_names_the_newest(tmp_path: Path, call: CommandLine) -> None:
    path = copied("trainer/plain", tmp_path)
    (path / "expected.safetensors").unlink()
    for number in (10, 9):
        shutil.copytree(path / "checkpoint-2", path / f"checkpoint-{number}")
    (path / "training_args.bin").write_bytes(b"PK")  # Trainer.save_model writes it there, too
    for command in (["info", path], ["merge", path, tmp_path / "out"]):
        code, _, err = call(*command)
        names = "checkpoints (checkpoint-1, checkpoint-2, checkpoint-9, checkpoint-10)"
        text = f"this directory contains {names}: name one of them, such as {path}/checkpoint-10"
        assert (code, text in err) == (2, True)


def test_unknown_weights_beside_a_checkpoint_are_named(tmp_path: Path) -> None:
    path = copied("trainer/plain/checkpoint-2", tmp_path)
    torch.save({"w": torch.ones(1)}, path / "average.pt")
    report = merge_checkpoint(path, tmp_path / "out")
    assert any(note.startswith("not read: average.pt") for note in report.notes)
    assert not (tmp_path / "out/trainer_state.json").exists()


def test_small_files_of_the_model_are_taken(tmp_path: Path) -> None:
    path = copied("trainer/sharded/checkpoint-2", tmp_path)
    (path / "config.json").write_text('{"dtype": "float32"}')
    merge_checkpoint(path, tmp_path / "out", dtype="bfloat16")
    assert json.loads((tmp_path / "out/config.json").read_text()) == {"dtype": "bfloat16"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "model.safetensors",
        "statexchange.json",
    }


def test_a_directory_of_trainer_takes_no_config_from_below(tmp_path: Path) -> None:
    path = copied("trainer/plain/checkpoint-2", tmp_path)
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "huggingface").mkdir()
    (path / "huggingface/config.json").write_text('{"model_type": "bert"}')
    merge_checkpoint(path, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "llama"


def test_a_published_checkpoint_with_trainer_state_json_is_no_trainer_directory(tmp_path: Path) -> None:
    merge_checkpoint(DATA / "trainer/plain/checkpoint-2", tmp_path / "out", files_from={"trainer_state.json": "{}"})
    with open_source(tmp_path / "out") as source:
        assert source.kind == "huggingface"


def test_the_error_for_an_optimizers_directory_alone_lists_its_sections(tmp_path: Path, call: CommandLine) -> None:
    path = copied("accelerate/sharded/state", tmp_path)
    shutil.rmtree(path / "pytorch_model_fsdp_0")
    code, _, err = call("merge", path / "optimizer_0", tmp_path / "out")
    assert (code, "there is no section 'model', only 'optimizer'" in err) == (2, True)


def test_the_error_for_verls_extra_states_alone_names_what_is_missing(tmp_path: Path, call: CommandLine) -> None:
    actor = copied("verl/fsdp2/run/global_step_1/actor", tmp_path)
    path = actor / "extra"
    path.mkdir()
    names = [f"extra_state_world_size_2_rank_{rank}.pt" for rank in range(2)]
    for name in names:
        (actor / name).rename(path / name)
    code, _, err = call("merge", path, tmp_path / "out")
    text = "there is no section 'model', only 'other'"
    assert (code, text in err) == (2, True)
    code, _, err = call("merge", path / names[1], tmp_path / "out")
    text = f"this file alone is the section 'other' of a checkpoint: to read all, give the directory, {path}"
    assert (code, text in err) == (2, True)
    for file in actor.glob("model_*.pt"):
        file.unlink()
    merge_checkpoint(path, tmp_path / "other", section="other")
    (path / names[0]).rename(actor / names[0])
    (path / names[1]).rename(actor / names[1])
    code, _, err = call("merge", actor, tmp_path / "out")
    assert (code, "no file of a model is here, only of 'optimizer', 'other'" in err) == (2, True)


def test_a_missing_section_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="section 'ema'") as caught:
        merge_checkpoint(DATA / "accelerate/full/state", tmp_path / "out", section="ema")
    assert "'model', 'optimizer', 'scheduler', 'rng'" in str(caught.value)


def test_a_bare_module_takes_the_model_of_a_job_state(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2)
    moments = {"state": {0: {"exp_avg": torch.ones(1)}}, "param_groups": [{"lr": 0.5}]}
    torch.save({"model": module.state_dict(), "optimizer": moments}, tmp_path / "state.pt")
    target = torch.nn.Linear(2, 2)
    sx.load_checkpoint(target, tmp_path / "state.pt")
    assert torch.equal(target.weight, module.weight)
    wrapped = torch.nn.Module()
    wrapped.model = target
    torch.nn.init.zeros_(target.weight)
    sx.load_checkpoint(wrapped, tmp_path / "state.pt", strict=False)  # the names with the key fit
    assert torch.equal(target.weight, module.weight)


@pytest.mark.parametrize("part", ["model", "optim"])
def test_a_missing_rank_of_verl_is_named(tmp_path: Path, call: CommandLine, part: str) -> None:
    path = copied("verl/fsdp2/run/global_step_1/actor", tmp_path)
    file = path / f"{part}_world_size_2_rank_1.pt"
    file.unlink()
    code, _, err = call("merge", path, tmp_path / "out", *([] if part == "model" else ["--section", "optimizer"]))
    assert (code, f"the file of this rank is missing [rank 1, {file}]" in err) == (5, True)
    assert call("info", path)[0] == 5


def test_a_missing_extra_state_of_verl_is_a_finding_and_does_not_stop_a_merge(
    tmp_path: Path, call: CommandLine
) -> None:
    """Without its scheduler and random state a rank cannot resume."""
    path = copied("verl/fsdp2/run/global_step_1/actor", tmp_path)
    file = path / "extra_state_world_size_2_rank_1.pt"
    assert call("verify", path)[0] == 0
    file.unlink()
    for command in ("info", "verify"):
        code, out, err = call(command, path)
        assert (code, f"the file of this rank is missing [rank 1, {file}]" in out + err) == (5, True), out
    code, out, _ = call("scan", path)
    assert (code, "MISSING" in out, file.name in out) == (1, True, True), out
    assert call("merge", path, tmp_path / "out")[0] == 0
    for rank in (0, 1):  # a job may save none at all
        (file.parent / f"extra_state_world_size_2_rank_{rank}.pt").unlink(missing_ok=True)
    assert call("verify", path)[0] == 0


def test_verl_files_of_two_world_sizes_are_refused(tmp_path: Path, call: CommandLine) -> None:
    path = copied("verl/fsdp2/run/global_step_1/actor", tmp_path)
    shutil.copy(path / "model_world_size_2_rank_0.pt", path / "model_world_size_1_rank_0.pt")
    code, _, err = call("merge", path, tmp_path / "out")
    text = f"model files of 1 and 2 ranks are here, of two saves: remove those of one [{path}]"
    assert (code, text in err) == (4, True)


def test_either_actor_or_critic_of_verl_must_be_named(tmp_path: Path, call: CommandLine) -> None:
    path = copied("verl/fsdp2/run", tmp_path) / "global_step_1"
    shutil.copytree(path / "actor", path / "critic")
    code, _, err = call("merge", path, tmp_path / "out")
    text = f"this directory contains checkpoints (actor, critic): name one of them, such as {path}/critic"
    assert (code, text in err) == (2, True)


def test_verl_takes_the_small_files_of_its_hugging_face_directory(tmp_path: Path) -> None:
    merge_checkpoint(DATA / "verl/fsdp2/run/global_step_1/actor", tmp_path / "out", dtype="bfloat16")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "bfloat16")


@pytest.mark.parametrize(
    "name", ["verl/lora/run/global_step_1/actor", "lightning/sharded/last.ckpt", "torch_checkpointing/state"]
)
def test_nothing_is_copied_from_a_directory_without_a_config(tmp_path: Path, name: str) -> None:
    path = copied(name, tmp_path)
    shutil.rmtree(path / "huggingface", ignore_errors=True)
    (path / "notes.txt").write_text("of the run")
    merge_checkpoint(path, tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"model.safetensors", "statexchange.json"}


def test_the_options_on_the_page_merge_the_base_model_of_a_lora_model(tmp_path: Path, call: CommandLine) -> None:
    path = DATA / "verl/lora/run/global_step_1/actor"
    (line,) = [line for line in (DATA.parents[1] / "docs/formats.md").read_text().splitlines() if "LoRA" in line]
    options = line.split("the base model alone: `")[1].split("`")[0]
    assert call("merge", path, tmp_path / "out", *shlex.split(options))[0] == 0
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == load_file(DATA / "verl/fsdp2/expected.safetensors").keys()


def test_weights_of_lightning_without_an_optimizer_are_merged(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import save

    with pytest.warns(UserWarning, match="single process"):
        save({"state_dict": {"model.w": torch.ones(2)}}, checkpoint_id=tmp_path / "last.ckpt")
    torch.save({"epoch": 1}, tmp_path / "last.ckpt/meta.pt")
    merge_checkpoint(tmp_path / "last.ckpt", tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors").keys() == {"model.w"}


@pytest.mark.parametrize("file", ["full/last.ckpt", "fsdp1/full.ckpt"])
def test_one_consolidated_file_of_lightning_is_merged_bit_by_bit(tmp_path: Path, file: str) -> None:
    path = DATA / "lightning" / file
    merge_checkpoint(path, tmp_path / "out")
    found = load_file(tmp_path / "out/model.safetensors")
    assert_same(found, load_file(path.parent / "expected.safetensors"))
    if file == "fsdp1/full.ckpt":  # what Lightning itself made of the sharded one
        assert_same(found, torch.load(path, weights_only=False)["state_dict"])


def test_one_file_of_a_directory_of_lightnings_files_must_be_named(tmp_path: Path, call: CommandLine) -> None:
    (tmp_path / "run").mkdir()
    shutil.copy(DATA / "lightning/full/last.ckpt", tmp_path / "run")
    code, _, err = call("merge", tmp_path / "run", tmp_path / "again")
    text = f"this directory contains checkpoints (last.ckpt): name one of them, such as {tmp_path}/run/last.ckpt"
    assert (code, text in err) == (2, True)


def test_the_error_for_the_parent_of_torchtitans_steps_names_them(tmp_path: Path, call: CommandLine) -> None:
    for step in (9, 10):
        shutil.copytree(DATA / "accelerate/sharded/state/pytorch_model_fsdp_0", tmp_path / f"checkpoint/step-{step}")
    code, _, err = call("merge", tmp_path / "checkpoint", tmp_path / "out")
    text = f"contains checkpoints (step-9, step-10): name one of them, such as {tmp_path}/checkpoint/step-10"
    assert (code, text in err) == (2, True)


@pytest.mark.parametrize("name", ["fsdp1", "dcp_safetensors"])
def test_checkpoints_that_torch_alone_saves_are_merged_bit_by_bit(tmp_path: Path, name: str) -> None:
    merge_checkpoint(DATA / "torch" / name, tmp_path / "out")
    assert_same(load_file(tmp_path / "out/model.safetensors"), load_file(DATA / f"torch/{name}.safetensors"))


def test_a_missing_rank_of_fsdp1_is_a_missing_region(tmp_path: Path, call: CommandLine) -> None:
    path = copied("torch/fsdp1", tmp_path)
    (path / "rank1.pt").unlink()
    code, _, err = call("merge", path, tmp_path / "out")
    assert (code, "block.linear" in err or "head" in err) == (5, True)


def test_the_error_for_a_missing_region_names_the_file_that_has_the_rest(tmp_path: Path, call: CommandLine) -> None:
    path = DATA / "torch/fsdp1/rank1.pt"
    gap = "no file holds region [0:3, 0:3] of shape (5, 3); rank1.pt holds the rest"
    for arguments in (["merge", path, tmp_path / "out"], ["show", path, "block.linear.weight"]):
        code, _, err = call(*arguments)
        assert (code, gap in err) == (5, True), arguments
    code, out, _ = call("verify", path)
    nothing = "nothing holds region [0:1, 0:5] of shape (1, 5) [tensor 'head.weight']"
    assert (code, gap in out, nothing in out) == (5, True, True)
    with pytest.raises(IncompleteError, match=r"no file.*rank1\.pt"):
        sx.load_checkpoint({"block": {"linear": {"weight": torch.zeros(5, 3)}}}, path)


def test_flattened_parameters_are_named_and_not_merged(tmp_path: Path, call: CommandLine) -> None:
    path = DATA / "torch/fsdp1_local"
    code, _, err = call("merge", path, tmp_path / "out")
    advice = "save with StateDictType.SHARDED_STATE_DICT or FULL_STATE_DICT [tensor '_flat_param'"
    assert (code, "error: FSDP1's LOCAL_STATE_DICT: " in err, advice in err) == (7, True, True)
    code, out, _ = call("info", path)
    assert (code, "note        FSDP1's LOCAL_STATE_DICT: " in out) == (0, True)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (
            b'"F32"',
            b'"I32"',
            "dtype in .metadata differs from the file: expected F32, found I32 [tensor 'rows', rank 0",
        ),
        (
            b'"rows":',
            b'"Rows":',
            "does not have each part of this tensor that .metadata describes [tensor 'rows', rank 0",
        ),
    ],
)
def test_a_dcp_of_safetensors_is_checked(tmp_path: Path, call: CommandLine, old: bytes, new: bytes, text: str) -> None:
    path = copied("torch/dcp_safetensors", tmp_path)
    file = path / "__0_0.distcp"
    data = file.read_bytes()
    assert data.count(old) == 1
    file.write_bytes(data.replace(old, new))
    code, _, err = call("merge", path, tmp_path / "out")
    assert (code, text in err) == (4, True), err
    file.write_bytes(data[:-1])
    assert call("merge", path, tmp_path / "out")[0] == 4


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_pickle_may_construct_a_nested_class_but_not_call_a_method(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "x.pt"
    for value in (Outer.Inner(), Outer.Called()):
        torch.save({"w": torch.ones(1), "x": value}, path, pickle_protocol=protocol)
        with sx.open_checkpoint(path) as checkpoint:
            assert list(checkpoint) == ["w"]
    torch.save({"w": torch.ones(1), "x": Outer.CallsAMethod()}, path, pickle_protocol=protocol)
    with pytest.raises(UnsafeError, match="the pickle uses"):
        sx.open_checkpoint(path)


class Outer:
    class Inner:
        pass

    class Called:
        def __reduce__(self) -> tuple[Any, ...]:
            return Outer.Inner, ()

    class CallsAMethod:
        def __reduce__(self) -> tuple[Any, ...]:
            return Outer.made, ()

    @staticmethod
    def made() -> Any:
        return Outer.Called()


def test_files_without_ranks_in_their_names_are_named_where_they_differ(tmp_path: Path, call: CommandLine) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "part-0.pt")
    torch.save({"w": torch.zeros(3)}, tmp_path / "part-1.pt")
    for words in (["merge", tmp_path, tmp_path / "out"], ["diff", tmp_path, tmp_path]):
        _, _, err = call(*words)
        assert "hold different values for region [0:3]" in err, words
        assert "part-0.pt" in err.partition("hold different")[0], err
        assert "ranks" not in err.partition("hold different")[0], err
    torch.save({"w": torch.ones(3).double()}, tmp_path / "part-1.pt")
    with pytest.raises(sx.errors.CorruptError, match=r"part-0\.pt and part-1\.pt") as caught:
        sx.merge_checkpoint(tmp_path, tmp_path / "out")
    assert caught.value.name == "w"
