"""Complete directories: what export and merge write beside the tensors is what transformers and PEFT load."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import CommandLine
from equality import assert_same
from safetensors.torch import load_file, save_file
from tiny_models import build
from transformers_logits import TOKENS, logits

import statexchange as sx
from statexchange.errors import InvalidArgumentError, UnsupportedError
from statexchange.testing import run_ranks

# PEFT uses a property that transformers 5 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build("llama"), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(parameter)
    return model.eval()


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")))


def config(path: Path, name: str = "config.json") -> Any:
    return json.loads((path / name).read_text())


def test_a_model_is_exported_with_all_that_from_pretrained_needs(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = build("llama")
    sx.export_checkpoint(model, tmp_path / "out", tokenizer=tokenizer())
    model.save_pretrained(tmp_path / "expected")
    assert config(tmp_path / "out") == config(tmp_path / "expected")
    assert config(tmp_path / "out", "generation_config.json") == config(tmp_path / "expected", "generation_config.json")
    assert logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")).equal(logits(model))
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("b")["input_ids"] == [1]


def test_the_config_has_the_dtype_that_was_written(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    sx.export_checkpoint(build("llama"), tmp_path / "out", dtype={"*norm*": "float32", "*": "bfloat16"})
    assert config(tmp_path / "out")["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16


def test_given_files_take_precedence_over_the_models_own(tmp_path: Path) -> None:
    sx.export_checkpoint(build("llama"), tmp_path / "out", files_from={"config.json": '{"model_type": "mine"}'})
    assert config(tmp_path / "out") == {"model_type": "mine"}
    assert (tmp_path / "out/generation_config.json").exists()


def export_wrapped(out: str) -> None:
    from torch.distributed.fsdp import fully_shard

    model = build("llama")
    sx.export_checkpoint(torch.nn.parallel.DistributedDataParallel(model), f"{out}/ddp", rename=[("^module[.]", "")])
    compiled = torch.compile(model, backend="eager")  # another backend takes each rank five seconds to import
    sx.export_checkpoint(compiled, f"{out}/compiled", background=True).result()
    for layer in model.model.layers:
        fully_shard(layer)
    sx.export_checkpoint(fully_shard(model), f"{out}/fsdp")
    adapter = adapted()
    for module in [*adapter.base_model.model.model.layers, adapter.base_model.model]:
        fully_shard(module)
    sx.export_checkpoint(fully_shard(adapter), f"{out}/adapter")


def test_wrapped_and_sharded_models_bring_their_configs(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run_ranks(export_wrapped, 2, backend="gloo", args=(str(tmp_path),), timeout_s=120)
    for kind in ("ddp", "compiled", "fsdp"):
        assert config(tmp_path / kind)["architectures"] == ["LlamaForCausalLM"]
        assert logits(AutoModelForCausalLM.from_pretrained(tmp_path / kind)).equal(logits(build("llama")))
    loaded = PeftModel.from_pretrained(build("llama"), tmp_path / "adapter").eval()
    assert logits(loaded).equal(logits(adapted()))
    adapted().save_pretrained(tmp_path / "expected")
    found, expected = (config(tmp_path / name, "adapter_config.json") for name in ("adapter", "expected"))
    for adapter in (found, expected):  # a set, whose order differs between processes
        adapter["target_modules"].sort()
    assert found == expected
    assert sorted(os.listdir(tmp_path / "adapter")) == [
        "adapter_config.json", "adapter_model.safetensors", "statexchange.json"
    ]  # fmt: skip
    names = load_file(tmp_path / "expected/adapter_model.safetensors").keys()
    assert load_file(tmp_path / "adapter/adapter_model.safetensors").keys() == names
    sx.merge_checkpoint(tmp_path / "adapter", tmp_path / "merged")
    assert sorted(os.listdir(tmp_path / "merged")) == sorted(os.listdir(tmp_path / "adapter"))


# The sizes of all-MiniLM-L6-v2; two ranks have more of the words than the other two.
MINILM = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12}
NUM_TENSORS = 103
MESHES = {"fsdp": (1, 4, 1), "tp": (1, 1, 4), "fsdp and tp": (1, 2, 2), "hsdp": (2, 2, 1)}


def minilm(seed: int) -> Any:
    from transformers import BertConfig, BertModel

    torch.manual_seed(seed)
    return BertModel(BertConfig(**MINILM, vocab_size=30522)).eval()


def sharded(model: Any, sizes: tuple[int, ...]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("copies", "shards", "tp"))
    columns = [f"attention.self.{name}" for name in ("query", "key", "value")]
    plan: dict[str, Any] = {name: ColwiseParallel() for name in [*columns, "intermediate.dense"]}
    plan |= {name: RowwiseParallel() for name in ("attention.output.dense", "output.dense")}
    for layer in model.encoder.layer:
        if sizes[2] > 1:
            parallelize_module(layer, mesh["tp"], plan)
        if sizes[0] * sizes[1] > 1:
            fully_shard(layer, mesh=mesh["copies", "shards"])
    if sizes[0] * sizes[1] > 1:
        fully_shard(model, mesh=mesh["copies", "shards"])
    return model


def export_sharded(folder: str) -> dict[str, list[int]]:
    """Load a pretrained model on each mesh, export it, and count the parameters of which this rank has a part."""
    found = {}
    for number, (name, sizes) in enumerate(MESHES.items()):
        model = sharded(minilm(2 + number), sizes)
        sx.load_checkpoint(model, f"{folder}/pretrained")
        found[name] = [sum(hasattr(p, "placements") and p.to_local().numel() < p.numel() for p in model.parameters())]
        sx.export_checkpoint(model, f"{folder}/{name}")
        sx.save_checkpoint(model, f"{folder}/{name} saved")
    return found


@pytest.mark.slow
def test_a_pretrained_model_sharded_four_ways_has_the_same_bits(tmp_path: Path) -> None:
    from transformers import BertModel

    minilm(1).save_pretrained(tmp_path / "pretrained")
    expected = load_file(tmp_path / "pretrained/model.safetensors")
    assert len(expected) == NUM_TENSORS
    counts = run_ranks(export_sharded, 4, backend="gloo", args=(str(tmp_path),), timeout_s=200)
    assert all(counts[0][name][0] >= 6 * 6 for name in MESHES), counts
    for name in MESHES:
        sx.merge_checkpoint(tmp_path / f"{name} saved", tmp_path / f"{name} merged")
        for directory in (tmp_path / name, tmp_path / f"{name} merged"):
            assert_same(load_file(directory / "model.safetensors"), expected)
        loaded, report = BertModel.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not report["missing_keys"], report
        with torch.no_grad():
            assert loaded.eval()(TOKENS).pooler_output.equal(minilm(1)(TOKENS).pooler_output)


def test_a_wrong_tokenizer_and_several_active_adapters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="tokenizer must be"):
        sx.export_checkpoint(build("llama"), tmp_path / "out", tokenizer="gpt2")
    model = adapted()
    model.add_adapter("second", model.peft_config["default"])
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(UnsupportedError, match="'default', 'second'"):
        sx.export_checkpoint(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_merge_takes_the_small_files_of_a_hugging_face_directory(tmp_path: Path, call: CommandLine) -> None:
    from transformers import AutoModelForCausalLM

    model = build("llama")
    model.save_pretrained(tmp_path / "in", max_shard_size="5kB")
    tokenizer().save_pretrained(tmp_path / "in")
    sx.merge_checkpoint(tmp_path / "in", tmp_path / "same")
    assert (tmp_path / "same/config.json").read_bytes() == (tmp_path / "in/config.json").read_bytes()
    assert {"tokenizer.json", "generation_config.json"} < set(os.listdir(tmp_path / "same"))
    assert logits(AutoModelForCausalLM.from_pretrained(tmp_path / "same")).equal(logits(model))
    sx.merge_checkpoint(tmp_path / "in", tmp_path / "half", dtype="bfloat16")
    assert config(tmp_path / "half")["dtype"] == "bfloat16"
    report = sx.merge_checkpoint(tmp_path / "in", tmp_path / "bare", files_from=())
    (note,) = report.notes
    assert "no config.json" in note
    assert "files_from" in note
    code, _, err = call("merge", tmp_path / "in", tmp_path / "cli", "--no-files")
    assert (code, "no config.json" in err) == (0, True)
    assert sorted(os.listdir(tmp_path / "cli")) == ["model.safetensors", "statexchange.json"]


def test_the_dtypes_of_nested_configs_are_set_and_a_file_that_is_too_large_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    save_file({"embed.weight": torch.ones(2)}, tmp_path / "in/model.safetensors")
    text = {"torch_dtype": "float32", "vocab_size": 3}
    nested = {"text_config": text, "quantization_config": {"dtype": "float32"}, "torch_dtype": "float32"}
    (tmp_path / "in/config.json").write_text(json.dumps(nested))
    with open(tmp_path / "in/notes.txt", "wb") as file:
        file.truncate(100 << 20)
    report = sx.merge_checkpoint(tmp_path / "in", tmp_path / "out", dtype="float16")
    assert config(tmp_path / "out") == {
        "text_config": {"torch_dtype": "float16", "vocab_size": 3},
        "quantization_config": {"dtype": "float32"},
        "torch_dtype": "float16",
    }
    assert len(report.notes) == 1
    assert report.notes[0].startswith("not copied")
    assert "notes.txt" in report.notes[0]
    assert not (tmp_path / "out/notes.txt").exists()
