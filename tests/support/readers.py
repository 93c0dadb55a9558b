"""Readers that stop at each look, and what they have read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import statexchange as sx


def state_of(value: float) -> dict[str, Any]:
    return {f"t{i}": np.full((6, 4), value, np.float32) for i in range(3)}


def export(path: Path, value: float, **options: Any) -> None:
    sx.export_checkpoint(state_of(value), path, overwrite=True, max_shard_size=150, **options)


def save(path: Path, value: float) -> None:
    sx.save_checkpoint({"model": state_of(value), "step": int(value)}, path, overwrite=True)


NONCE, PLAN = "0123456789abcdef", "a" * 32
