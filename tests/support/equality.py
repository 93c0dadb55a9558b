"""Compare torch tensors bit by bit; read all tensors of a directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

State = dict[str, torch.Tensor]


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the elements in C order."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A contiguous tensor of one element may have any stride; view(torch.uint8) needs stride 1.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def bits_of(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """Return dtype, shape and elements, which are equal for two tensors if `equal_bits` is true for them."""
    return tensor.dtype, tuple(tensor.shape), _elements(tensor).numpy().tobytes()


def equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits: a NaN equals itself, and 0.0 is not -0.0."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    # Of bytes torch.equal takes nine times as long.
    return np.array_equal(_elements(one).cpu().numpy(), _elements(other).cpu().numpy())


def are_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    """Whether both have the same names, and under each name tensors of equal bits."""
    return found.keys() == expected.keys() and all(equal_bits(found[name], expected[name]) for name in expected)


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Assert that both have the same names, and under each name tensors of equal bits."""
    assert found.keys() == expected.keys(), (
        f"unexpected: {sorted(found.keys() - expected.keys())}, missing: {sorted(expected.keys() - found.keys())}"
    )
    differing = [name for name in expected if not equal_bits(found[name], expected[name])]
    assert not differing, f"other dtypes, shapes or bits: {differing}"


def load_directory(path: str | os.PathLike[str]) -> State:
    """Return the tensors of all safetensors files of a directory."""
    found: State = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        found |= load_file(file)
    return found
