"""A transformers model as a framework saves it, merged by one command: from_pretrained gives the same logits."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from stored import DATA
from transformers import LlamaConfig, LlamaForCausalLM
from transformers_logits import TOKENS, logits, merged_logits

from statexchange.checkpoint.merge import merge_checkpoint
from statexchange.testing import run_ranks


def tiny_config() -> LlamaConfig:
    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 7, "num_hidden_layers": 2}
    return LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16)


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config())


def sample_llama(config: Path, weights: Path, wrapper: str = "") -> LlamaForCausalLM:
    """Return the model that a framework had, from the tensors that it gathered itself.

    `wrapper` is the prefix of their names. `logits` among them, which it computed on another machine, must be close.
    """
    state = load_file(weights)
    computed = state.pop("logits", None)
    model = LlamaForCausalLM(LlamaConfig(**json.loads(config.read_text())))
    state = {name.removeprefix(wrapper): tensor for name, tensor in state.items()}
    assert not model.load_state_dict(state, strict=False, assign=True).unexpected_keys
    model.tie_weights()
    if computed is not None:
        torch.testing.assert_close(logits(model), computed)
    return model


@pytest.mark.parametrize("kind", ["fused", "tied"])
def test_a_model_of_torchtitan_merged_has_equal_logits(tmp_path: Path, kind: str) -> None:
    path = DATA / "torchtitan" / kind
    expected = logits(sample_llama(path / "config.json", path / "to_hf.safetensors"))
    options = ["--convert", "torchtitan:llama3", "--files-from", str(path / "config.json")]
    assert torch.equal(merged_logits(tmp_path, path / "checkpoint/step-3", *options), expected)


def test_a_model_of_verl_merged_has_equal_logits(tmp_path: Path) -> None:
    path = DATA / "verl/fsdp2"
    config = path / "run/global_step_1/actor/huggingface/config.json"
    expected = logits(sample_llama(config, path / "expected.safetensors"))
    assert torch.equal(merged_logits(tmp_path, path / "run/global_step_1/actor"), expected)


@pytest.mark.parametrize("kind", ["llama1", "llama3", "universal_llama3"])
def test_a_model_of_deepspeed_merged_has_equal_logits(tmp_path: Path, kind: str) -> None:
    path = DATA / "deepspeed"
    trained = path / f"{kind.removeprefix('universal_')}.safetensors"
    expected = logits(sample_llama(path / kind / "config.json", trained))
    assert torch.equal(merged_logits(tmp_path, path / kind), expected)


def test_a_model_of_torch_checkpointing_merged_has_equal_logits(tmp_path: Path) -> None:
    path = DATA / "torch_checkpointing/llama"
    expected = logits(sample_llama(path / "config.json", path / "expected.safetensors"))
    found = merged_logits(tmp_path, path / "state", "--files-from", str(path / "config.json"))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["llama_sharded", "llama_full"])
def test_a_model_of_lightning_merged_with_the_options_of_the_note_has_equal_logits(tmp_path: Path, kind: str) -> None:
    path = DATA / "lightning" / kind
    expected = logits(sample_llama(path / "config.json", path / "expected.safetensors", "model."))
    (note,) = [text for text in merge_checkpoint(path / "last.ckpt", tmp_path / "plain").notes if "wrap" in text]
    assert note.endswith('(--section model --rename "^model\\.=")')
    options = shlex.split(note.rpartition("(")[2].removesuffix(")"))
    found = merged_logits(tmp_path, path / "last.ckpt", "--files-from", str(path / "config.json"), *options)
    assert torch.equal(found, expected)


def trained(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    """Train a model for one step; return its optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    return optimizer


def by_trainer(out: Path) -> tuple[torch.Tensor, Path]:
    from transformers import Trainer, TrainingArguments

    model = tiny_llama()
    arguments = TrainingArguments(str(out), max_steps=2, save_steps=2, use_cpu=True, report_to="none")
    rows = [{"input_ids": TOKENS[0], "labels": TOKENS[0]}] * 16
    Trainer(model, arguments, train_dataset=rows).train()  # type: ignore[arg-type]
    return logits(model), out / "checkpoint-2"


def by_accelerate(out: Path) -> tuple[torch.Tensor, Path]:
    from accelerate import Accelerator

    model = tiny_llama()
    accelerator = Accelerator(cpu=True)
    prepared, _ = accelerator.prepare(model, trained(model))
    accelerator.save_state(str(out))
    return logits(prepared), out


def by_own_loop(out: Path) -> tuple[torch.Tensor, Path]:
    model = tiny_llama()
    optimizer = trained(model)
    out.mkdir()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}, out / "last.pt")
    return logits(model), out / "last.pt"


def shard_and_save(kind: str, out: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    model = tiny_llama()
    rank = torch.distributed.get_rank()
    if kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

        sharded = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        with FullyShardedDataParallel.state_dict_type(sharded, StateDictType.SHARDED_STATE_DICT):
            torch.save(sharded.state_dict(), f"{out}/rank{rank}.pt")
    else:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for layer in [*model.model.layers, model]:
            fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.save(state, checkpoint_id=out)
    torch.distributed.barrier()


def by_ranks(kind: str) -> Callable[[Path], tuple[torch.Tensor, Path]]:
    def write(out: Path) -> tuple[torch.Tensor, Path]:
        out.mkdir()
        run_ranks(shard_and_save, 2, backend="gloo", args=(kind, str(out)))
        return logits(tiny_llama()), out

    return write


@pytest.mark.parametrize(
    "write",
    [by_trainer, by_accelerate, by_own_loop, by_ranks("fsdp1"), by_ranks("dcp")],
    ids=["trainer", "accelerate", "torch.save", "fsdp1", "dcp"],
)
def test_a_model_of_transformers_merged_has_equal_logits(
    tmp_path: Path, write: Callable[[Path], tuple[torch.Tensor, Path]]
) -> None:
    expected, source = write(tmp_path / "written")
    tiny_llama().config.save_pretrained(tmp_path / "config")
    assert torch.equal(merged_logits(tmp_path, source, "--files-from", str(tmp_path / "config")), expected)
