"""Write the samples of tests/data/packed: quantised weights as torchao and bitsandbytes write them.

pip install torch==2.13.0 torchao==0.18.0 bitsandbytes==0.50.2 safetensors==0.8.0
python tools/frameworks/packed_write.py tests/data/packed
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import bitsandbytes as bnb
import torch
from safetensors.torch import save_file
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import Int8WeightOnlyConfig, quantize_


def write_torchao(folder: Path) -> None:
    """Two files, each with one of two layers and metadata of its own."""
    folder.mkdir()
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
    quantize_(model, Int8WeightOnlyConfig())
    weight_map = {}
    for number in range(2):
        state = {f"model.{name}": tensor for name, tensor in model.state_dict().items() if name.startswith(str(number))}
        tensors, metadata = flatten_tensor_state_dict(state)
        name = f"model-0000{number + 1}-of-00002.safetensors"
        save_file(tensors, folder / name, metadata)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_bitsandbytes(folder: Path) -> None:
    """A file with one layer of 4 bits, and the config.json that transformers writes beside it, cut short."""
    folder.mkdir()
    layer = bnb.nn.Linear4bit(64, 8, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16)
    model = torch.nn.ModuleDict({"layer": layer, "norm": torch.nn.LayerNorm(8, bias=False)}).to("cpu")
    layer(torch.ones(1, 64))  # quantises
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))


def main() -> None:
    """Write all samples into the directory that is named."""
    torch.manual_seed(0)
    root = Path(sys.argv[1])
    root.mkdir(parents=True, exist_ok=True)
    write_torchao(root / "torchao")
    write_bitsandbytes(root / "bitsandbytes")


if __name__ == "__main__":
    main()
