"""What torchao wrote and `merge` merged and renamed is put together again by torchao, bit by bit."""

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
