"""Compares what is read of Megatron's checkpoints with what Megatron itself loads."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from statexchange.checkpoint.merge import merge_checkpoint
from statexchange.formats.registry import open_checkpoint

STACKED = re.compile(r"decoder\.layers\.(?![0-9])(.+)")
SINGLE = re.compile(r"(decoder\.layers\.[0-9]+\.)(.+)")
EXPERTS = re.compile(r"mlp\.experts\.experts\.(.+)")
# torch_dist has the names of fused layers also where norms are layers of their own.
NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
DTYPES = {"bfloat16": "BF16", "float32": "F32"}


def read(path: Path) -> dict[str, tuple[str, NDArray[np.generic]]]:
    """Return the dtype and values of each tensor of a checkpoint."""
    with open_checkpoint(path) as checkpoint:
        return {name: (tensor.dtype, tensor.read()) for name, tensor in checkpoint.items()}


def merged(path: Path, out: Path, **options: str) -> dict[str, NDArray[np.generic]]:
    """Merge a checkpoint and return the values of each tensor."""
    merge_checkpoint(path, out, **options)  # type: ignore[arg-type]
    return {name: values for name, (_, values) in read(out).items()}


def check_expected(directory: Path) -> int:
    """Assert that all tensors that Megatron loads are read from torch_dist, bit by bit; return their number."""
    expected = json.loads((directory / "expected.json").read_text())
    found = {}
    for name, (dtype, values) in read(directory / "torch_dist").items():
        digest = hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()
        found[name] = dtype, list(values.shape), digest
    for name, record in expected.items():
        assert found.pop(name) == (DTYPES[record["dtype"]], record["shape"], record["sha256"]), name
    assert found.keys() <= {"optimizer.optimizer.state.common_step"}, "in common.pt, which has no sharded tensors"
    return len(expected)


def by_layer(tensors: dict[str, NDArray[np.generic]]) -> dict[str, NDArray[np.generic]]:
    """Return the model of torch_dist under the names of the legacy format: by layer and by expert."""
    found: dict[str, NDArray[np.generic]] = {}
    for name, values in tensors.items():
        match = STACKED.fullmatch(name)
        single = SINGLE.fullmatch(name)
        if single is not None and name.endswith("_v"):  # singleton_local_shards: the halves of a gated linear_fc1
            continue
        if single is not None:
            halves = [values, tensors[f"{name[:-2]}_v"]] if name.endswith("_w") else [values]
            found[single[1] + separate_norms(single[2].removesuffix("_w"))] = np.concatenate(halves)
            continue
        if match is None:
            found[name] = values
            continue
        rest = separate_norms(match[1])
        for layer, of_layer in enumerate(values):
            experts = EXPERTS.fullmatch(rest)
            if experts is None:
                found[f"decoder.layers.{layer}.{rest}"] = of_layer
                continue
            for expert, of_expert in enumerate(of_layer):
                found[f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.{experts[1]}"] = of_expert
    return found


def separate_norms(name: str) -> str:
    for fused, separate in NORMS.items():
        name = name.replace(fused, separate)
    return name


def check_legacy(directory: Path, out: Path) -> int:
    """Assert that the legacy format of the same run has the same model; return the number of its tensors."""
    of_torch_dist = by_layer(merged(directory / "torch_dist", out / "torch_dist"))
    of_legacy = merged(directory / "legacy", out / "legacy")
    assert of_legacy.keys() == of_torch_dist.keys()
    for name, values in of_legacy.items():
        assert values.shape == of_torch_dist[name].shape, name
        assert values.tobytes() == of_torch_dist[name].tobytes(), name
    return len(of_legacy)
