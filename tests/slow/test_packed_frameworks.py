"""Quantised weights that torchao and bitsandbytes write now are loaded by them again after a merge, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import statexchange as sx


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118 (it is no mapping)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_torchao_reads_a_merge(config: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="no framework: pip install torchao==0.18.0")
    from torchao import quantization
    from torchao.prototype.safetensors.safetensors_support import (
        flatten_tensor_state_dict,
        unflatten_tensor_state_dict,
    )

    model = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Linear(16, 16))
    quantization.quantize_(model, getattr(quantization, config)())
    (tmp_path / "src").mkdir()
    for number in range(2):
        part = {f"model.{name}": tensor for name, tensor in model.state_dict().items() if name[0] == str(number)}
        tensors, metadata = flatten_tensor_state_dict(part)
        save_file(tensors, tmp_path / f"src/model-0000{number + 1}-of-00002.safetensors", metadata)
    sx.merge_checkpoint(tmp_path / "src", tmp_path / "out", rename=[("^model[.]", "")])
    found, left = unflatten_tensor_state_dict(*read(tmp_path / "out/model.safetensors"))
    assert not left
    assert found.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert type(found[name]) is type(tensor.data), name
        whole = tensor.dequantize() if hasattr(tensor, "dequantize") and name.endswith("weight") else tensor
        again = found[name].dequantize() if name.endswith("weight") else found[name]
        assert torch.equal(again, whole), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"load_in_8bit": True}, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}], ids=["8 bits", "4 bits"]
)
def test_a_merge_of_bitsandbytes_has_equal_logits(options: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason='no framework: bitsandbytes: pip install ".[frameworks]"')
    from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

    def logits(path: Path, **more: Any) -> tuple[torch.Tensor, Any]:
        model = LlamaForCausalLM.from_pretrained(path, device_map="cpu", **more).eval()
        with torch.no_grad():
            return model(torch.arange(8).reshape(1, 8)).logits, model

    sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=16)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "plain")
    expected, model = logits(tmp_path / "plain", quantization_config=BitsAndBytesConfig(**options))
    model.save_pretrained(tmp_path / "quantised", max_shard_size="20KB")
    assert len(list((tmp_path / "quantised").glob("model-*.safetensors"))) > 1
    sx.merge_checkpoint(tmp_path / "quantised", tmp_path / "out")
    found, _ = logits(tmp_path / "out")
    assert torch.equal(found, expected)
