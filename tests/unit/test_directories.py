"""Directories of training frameworks: real samples are read bit by bit."""

from dataclasses import dataclass
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
from statexchange.errors import InvalidArgumentError
from statexchange.formats.registry import open_source


@dataclass(frozen=True)
class Sample:
    """A directory, what `info` calls it, the number of tensors of each section, and a file that has no model."""

    path: str
    kind: str
    sections: dict[str, int]
    side_file: str

    @property
    def expected(self) -> Path:
        """Return the file of the model as the framework itself gathered it."""
        return DATA.joinpath(*Path(self.path).parts[:2], "expected.safetensors")


SAMPLES = [
    Sample("trainer/plain/checkpoint-2", "trainer", {"model": 4, "optimizer": 4, "rng": 1}, "rng_state.pth"),
    Sample("trainer/sharded/checkpoint-2", "trainer", {"model": 4, "optimizer": 4, "rng": 2}, "rng_state_1.pth"),
    Sample("accelerate/full/state", "accelerate", {"model": 4, "optimizer": 12, "rng": 1}, "random_states_0.pkl"),
    Sample("accelerate/sharded/state", "accelerate", {"model": 4, "optimizer": 12, "rng": 2}, "random_states_1.pkl"),
    Sample(
        "verl/fsdp2/run/global_step_1/actor",
        "verl",
        {"model": 12, "optimizer": 12, "other": 2},
        "extra_state_world_size_2_rank_0.pt",
    ),
    Sample(
        "verl/lora/run/global_step_1/actor",
        "verl",
        {"model": 14, "optimizer": 2, "other": 2},
        "extra_state_world_size_2_rank_0.pt",
    ),
    Sample("lightning/sharded/last.ckpt", "lightning", {"model": 5, "optimizer": 4}, "meta.pt"),
    Sample("lightning/fsdp1/last.ckpt", "lightning", {"model": 5, "optimizer": 4}, "meta.pt"),
    Sample("torch_checkpointing/state", "torch_checkpointing", {"model": 3}, "config_1.pt"),
]
# Files that `info` does not list: they belong to no part, or describe another file of their part.
UNLISTED = {"trainer_state.json", "metadata.pkl", "fsdp_config.json", "lora_train_meta.json", "config.json"}
BY_PATH = pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.path)


def tensors_of(sample: Sample) -> dict[str, torch.Tensor]:
    """Return the model as the framework itself gathered it."""
    if sample.kind == "torch_checkpointing":
        return load_file(DATA / "torch_checkpointing/expected.safetensors")
    return load_file(sample.expected)


@BY_PATH
def test_the_model_is_merged_bit_by_bit(tmp_path: Path, sample: Sample) -> None:
    report = merge_checkpoint(DATA / sample.path, tmp_path / "out")
    assert_same(load_file(tmp_path / "out/model.safetensors"), tensors_of(sample))
    assert report.notes[0].startswith(f"only the section 'model' of this {sample.kind} directory is read, not '")


@BY_PATH
def test_info_shows_the_sections_and_their_files(call: CommandLine, sample: Sample) -> None:
    code, envelope = call.json("info", DATA / sample.path)
    data = envelope["data"]
    assert (code, data["kind"]) == (0, sample.kind)
    found = {name: section["num_tensors"] for name, section in data["sections"].items() if section["num_tensors"]}
    assert found == sample.sections
    listed = {name for part in data["parts"] for name in part["names"]}
    files = {path.name for path in (DATA / sample.path).rglob("*") if path.suffix not in ("", ".distcp", ".txt")}
    assert files - UNLISTED <= listed


@BY_PATH
def test_all_sections_have_their_names_as_prefixes(tmp_path: Path, sample: Sample) -> None:
    with open_source(DATA / sample.path) as source:
        names = {tensor.shard.name for _, tensor in source.shards()}
    assert {name.split(".")[0] for name in names} == sample.sections.keys()
    merge_checkpoint(DATA / sample.path, tmp_path / "all", section="all")
    found = load_file(tmp_path / "all/model.safetensors")
    assert found.keys() == names
    for name, tensor in tensors_of(sample).items():
        assert torch.equal(found[f"model.{name}"], tensor)


@BY_PATH
def test_a_model_is_loaded_and_opened(sample: Sample) -> None:
    expected = tensors_of(sample)
    with sx.open_checkpoint(DATA / sample.path) as checkpoint:
        assert {name: tensor.shape for name, tensor in checkpoint.items()} == {
            name: tuple(tensor.shape) for name, tensor in expected.items()
        }
    state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    sx.load_checkpoint(state, DATA / sample.path)
    assert_same(state, expected)
    nested = {"model": {name: torch.zeros_like(tensor) for name, tensor in expected.items()}}
    sx.load_checkpoint(nested, DATA / sample.path, strict=False)
    assert_same(nested["model"], expected)


@pytest.mark.parametrize("path", ["trainer/sharded/checkpoint-2", "accelerate/full/state"])
def test_a_bare_module_is_loaded(path: str) -> None:
    module = tiny_model()
    sx.load_checkpoint(module, DATA / path)
    assert_same(module.state_dict(), load_file(DATA.joinpath(path).parent / "expected.safetensors"))


def tiny_model() -> torch.nn.Module:
    module = torch.nn.Module()
    module.block = torch.nn.Module()
    module.block.linear, module.head = torch.nn.Linear(3, 5), torch.nn.Linear(5, 1)
    return module


def trainer_optimizer(module: Any) -> torch.optim.Optimizer:
    """Return an optimizer as Trainer makes it: weights decay, biases do not."""
    weights = [module.block.linear.weight, module.head.weight]
    biases = [module.block.linear.bias, module.head.bias]
    return torch.optim.SGD([{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=1.0, momentum=0.5)


def test_an_optimizer_of_trainer_is_loaded_as_torch_loads_it() -> None:
    """Its optimizer.pt has the parameters by number."""
    path = DATA / "trainer/plain/checkpoint-2"
    module, other = tiny_model(), tiny_model()
    optimizer, expected = trainer_optimizer(module), trainer_optimizer(other)
    expected.load_state_dict(torch.load(path / "optimizer.pt"))
    report = sx.load_checkpoint({"model": module, "optimizer": optimizer}, path, strict=False)
    assert (report.missing, report.num_tensors) == ((), 8)
    found, wanted = optimizer.state_dict(), expected.state_dict()
    assert found["param_groups"] == wanted["param_groups"]
    assert found["state"].keys() == wanted["state"].keys() == {0, 1, 2, 3}
    for number, entries in wanted["state"].items():
        assert torch.equal(found["state"][number]["momentum_buffer"], entries["momentum_buffer"])
    assert_same(module.state_dict(), load_file(path.parent / "expected.safetensors"))


def test_an_optimizer_with_other_groups_or_another_order_is_refused() -> None:
    path, module = DATA / "trainer/plain/checkpoint-2", tiny_model()
    one_group = torch.optim.SGD(module.parameters(), lr=1.0)
    text = r"\[2, 2\].*\[4\]"
    with pytest.raises(InvalidArgumentError, match=text):
        sx.load_checkpoint({"model": module, "optimizer": one_group}, path, strict=False)
    groups = [group["params"][::-1] for group in trainer_optimizer(module).param_groups]
    reordered = torch.optim.SGD([{"params": of_group} for of_group in groups], lr=1.0)
    text = "'model.head.weight'.*momentum_buffer"
    with pytest.raises(InvalidArgumentError, match=text):
        sx.load_checkpoint({"model": module, "optimizer": reordered}, path, strict=False)
    assert not reordered.state


def test_the_file_of_a_job_is_loaded_with_its_optimizer_and_its_numbers(tmp_path: Path) -> None:
    module, other = tiny_model(), tiny_model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.25, betas=(0.5, 0.75))
    for parameter in module.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}, tmp_path / "last.pt")
    state = {"model": other, "optimizer": torch.optim.AdamW(other.parameters()), "step": 0}
    sx.load_checkpoint(state, tmp_path / "last.pt")
    assert state["step"] == 7
    found, wanted = state["optimizer"].state_dict(), optimizer.state_dict()  # type: ignore[attr-defined]
    assert found["param_groups"] == wanted["param_groups"]
    for number, entries in wanted["state"].items():
        assert all(torch.equal(found["state"][number][key], entry) for key, entry in entries.items())
    assert_same(other.state_dict(), module.state_dict())


@BY_PATH
def test_a_refused_file_of_another_section_does_not_stop_a_merge_of_the_model(
    tmp_path: Path, call: CommandLine, sample: Sample
) -> None:
    path = copied(sample.path, tmp_path)
    (side,) = path.rglob(sample.side_file)
    torch.save({"x": torch.ones(1), "y": Harmful()}, side)
    code, out, err = call("info", path)
    assert code == 7
    assert f"refused: the pickle uses posix.system, which is not known to be harmless [{side}]" in err
    assert f"{side.name} (cannot be read)" in out
    assert call("merge", path, tmp_path / "out")[0] == 0
    assert_same(load_file(tmp_path / "out/model.safetensors"), tensors_of(sample))
    code, _, err = call("merge", path, tmp_path / "all", "--section", "all")
    assert (code, str(side) in err) == (7, True)
    assert not (tmp_path / "all").exists()
    sx.load_checkpoint({name: torch.zeros_like(one) for name, one in tensors_of(sample).items()}, path)


def test_a_long_name_of_a_file_that_cannot_be_read_is_shown_whole(tmp_path: Path, call: CommandLine) -> None:
    path = copied("torch_checkpointing/state", tmp_path)
    name = f'it\'s "both" {"long " * 30}_1.pt'
    (path / name).write_bytes(b"broken")
    assert f" {name} (cannot be read)" in call("info", path)[1]


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        import posix

        return posix.system, ("true",)


def test_patterns_match_the_names_of_the_model(tmp_path: Path) -> None:
    merge_checkpoint(DATA / "trainer/sharded/checkpoint-2", tmp_path / "out", include="head.*", rename=[("head", "h")])
    assert load_file(tmp_path / "out/model.safetensors").keys() == {"h.weight", "h.bias"}
