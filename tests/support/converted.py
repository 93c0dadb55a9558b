"""Checkpoints that are converted to another model family."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from stored import DATA

import statexchange as sx
from statexchange.checkpoint.merge import merge_checkpoint

TORCHTITAN = DATA / "torchtitan"
LLAMA3 = "torchtitan:llama3"
Arrays = Mapping[str, np.ndarray]


def same(found: Arrays, expected: Arrays) -> bool:
    """Assert that the names are equal; return whether shapes and bytes are."""
    assert set(found) == set(expected)
    return all(
        found[name].shape == tensor.shape and found[name].tobytes() == tensor.tobytes()
        for name, tensor in expected.items()
    )


def merged(source: Path, out: Path, **options: Any) -> dict[str, np.ndarray]:
    merge_checkpoint(source, out, **options)
    with sx.open_checkpoint(out) as checkpoint:
        return {name: tensor.read() for name, tensor in checkpoint.items()}


def titan(kind: str) -> Path:
    return TORCHTITAN / kind / "checkpoint" / "step-3"


def fused(**changes: Any) -> dict[str, Any]:
    return {"from": ["{n}.a", "{n}.b"], "to": "{n}.ab", "values": [{"fuse": {"dim": 0, **changes}}]}


def rule(*values: Any, **changes: Any) -> dict[str, Any]:
    return {"rules": [{"from": "a", "to": "b", "values": list(values), **changes}]}


# Megatron


GPT = "megatron:gpt"
