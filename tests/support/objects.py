"""Tensors that tests write to object stores, directories copied there, and what a store then holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

__all__ = ["TENSORS", "objects", "put"]

TENSORS = {
    "a": torch.arange(70_000.0).reshape(700, 100),
    "b.c": torch.arange(9).to(torch.int16),
    "z": torch.tensor(2.5),
}
"""With `max_shard_size=200_000` they make two files."""


def put(store: Any, directory: Path, name: str) -> str:
    """Copy a directory into a memory:// store; return its URL."""
    store.put(f"{directory}/", f"/{name}/", recursive=True)
    return f"memory://{name}"


def objects(store: Any, name: str) -> dict[str, bytes]:
    """Return the bytes of each object below a path, by its name."""
    return {path.rpartition("/")[2]: store.cat_file(path) for path in store.find(f"/{name}")}
