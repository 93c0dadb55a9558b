"""Samples of Megatron that a test may change."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# By sample: the number of tensors of torch_dist, and of the model in its legacy format.
SAMPLES = {"tp2_pp2": (25, 23), "pp2_tied": (32, 14), "ep2_moe": (12, 33), "pp2_vpp2": (9, 27)}

ITERATION = "iter_0000007"
RANK_FILE = "model_optim_rng.pt"


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Apply `change` to the content of a file of torch.save. Objects of Megatron's classes in it become text."""
    state = torch.load(path, weights_only=False, pickle_module=WithoutMegatron)
    change(state)
    torch.save(state, path)


class WithoutMegatron:
    """A pickle module that reads Megatron's classes as text."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if module.startswith("megatron"):
                return str
            return super().find_class(module, name)
