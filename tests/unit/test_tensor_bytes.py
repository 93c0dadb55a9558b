"""The bytes of a tensor in host memory: those of its elements, without a copy, as long as its storage has them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from statexchange.tensors import run_bytes

SIZES = [0, 1, 511, 1 << 16, (1 << 16) + 1, 1 << 20]


@pytest.mark.parametrize("nbytes", SIZES)
def test_the_bytes_are_the_memory_of_the_tensor(nbytes: int) -> None:
    whole = torch.randint(0, 256, (nbytes + 7,), dtype=torch.uint8)
    part = whole[7:]
    expected = bytes(part.tolist())
    data = run_bytes(part)
    assert data.tobytes() == expected
    assert (data.format, data.itemsize, data.ndim) == ("B", 1, 1)
    if nbytes:
        data[:1] = b"\x05"
        assert whole[7] == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_the_bytes_of_each_dtype_and_kind_of_tensor_are_those_of_torch(dtype: torch.dtype) -> None:
    plain = torch.arange(6).reshape(2, 3).to(dtype)
    expected = bytes(plain.view(torch.uint8).flatten().tolist())
    kinds = [plain, torch.nn.Parameter(plain, requires_grad=False), plain[None], plain.as_subclass(Named)]
    if dtype.is_floating_point and dtype != torch.float8_e4m3fn:
        kinds += [torch.nn.Parameter(plain), plain.clone().requires_grad_()]
    with torch.inference_mode():
        kinds.append(plain.clone())
    for tensor in kinds:
        assert run_bytes(tensor).tobytes() == expected
    assert run_bytes(plain[1, 2]).tobytes() == expected[-dtype.itemsize :]  # without dims


class Named(torch.Tensor):
    """A subclass."""


def test_the_bytes_keep_the_memory_of_a_small_tensor_and_of_an_array() -> None:
    data = [run_bytes(torch.full((100,), float(number))) for number in range(100)]
    assert [np.frombuffer(one, np.float32)[99] for one in data] == list(range(100))
    assert run_bytes(np.arange(3, dtype=np.int16)).tobytes() == b"\0\0\1\0\2\0"


@pytest.mark.parametrize("numel", [10, 1 << 20])
@pytest.mark.parametrize("left", [0, 4])
def test_a_tensor_whose_storage_was_freed_or_shrunk_has_none(numel: int, left: int) -> None:
    tensor = torch.ones(numel)
    tensor.untyped_storage().resize_(left)
    with pytest.raises(RuntimeError, match="out of bounds"):
        run_bytes(tensor)
