"""Tensors of any strides and dtype are copied through two small buffers; compared with torch and numpy."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import statexchange as sx
from statexchange.exchange.staging import Staging
from statexchange.tensors import DTYPE_NAMES, converted, numpy_dtype
from statexchange.testing import run_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.int16, torch.complex64, torch.bool, torch.float64]


def name_of(tensor: Any) -> str:
    return DTYPE_NAMES[str(tensor.dtype).removeprefix("torch.")]


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """Draw a view with any order of dims and any steps, or the tensor itself."""
    shape = draw(st.lists(st.integers(0, 6), max_size=4))
    count = int(np.prod(shape))
    tensor = torch.arange(count).remainder(97).to(draw(st.sampled_from(DTYPES))).reshape(shape)
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    if shape and draw(st.booleans()):
        tensor = tensor[:: draw(st.integers(1, 3))]
    return tensor.conj() if tensor.is_complex() and draw(st.booleans()) else tensor


@given(views(), st.integers(16, 200))
def test_parts_give_the_bytes_of_any_tensor_in_c_order(tensor: torch.Tensor, window_bytes: int) -> None:
    parts = [(box, bytes(data)) for box, data in Staging(window_bytes).parts(tensor, name_of(tensor))]
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    assert b"".join(data for _, data in parts) == flat.view(torch.uint8).numpy().tobytes()
    assert all(len(data) == box.numel * tensor.element_size() <= window_bytes for box, data in parts)


@given(views(), st.integers(16, 200))
def test_targets_fill_any_tensor(tensor: torch.Tensor, window_bytes: int) -> None:
    staging, wanted = Staging(window_bytes), tensor.resolve_conj().contiguous()
    parts = b"".join(bytes(data) for _, data in staging.parts(wanted, name_of(tensor)))
    tensor.zero_()
    at = 0
    for _, memory in staging.targets(tensor, name_of(tensor)):
        memory[:] = parts[at : at + len(memory)]
        at += len(memory)
    assert torch.equal(tensor.resolve_conj(), wanted)


@pytest.mark.parametrize("window_bytes", [16, 4096])
def test_arrays_of_any_strides_are_copied_and_cast(window_bytes: int) -> None:
    staging = Staging(window_bytes)
    array = np.arange(60.0, dtype=np.float32).reshape(3, 4, 5).transpose(2, 0, 1)
    assert b"".join(bytes(data) for _, data in staging.parts(array, "F32")) == array.tobytes()
    huge = b"".join(bytes(data) for _, data in staging.parts(np.array([1.5, 1e30, -1e30]), "F16"))
    assert huge == np.array([1.5, np.inf, -np.inf], np.float16).tobytes()
    tensor = torch.linspace(-3, 3, 35).reshape(5, 7).T
    cast = b"".join(bytes(data) for _, data in staging.parts(tensor, "BF16"))
    assert cast == tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()
    target = np.zeros((4, 3), np.int16).T
    at = 0
    for _, memory in staging.targets(target, "I16"):
        memory[:] = np.arange(12, dtype=np.int16).tobytes()[at : at + len(memory)]
        at += len(memory)
    assert target.tolist() == np.arange(12).reshape(3, 4).tolist()


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def patterns(dtype: torch.dtype) -> torch.Tensor:
    """Return all bit patterns of two bytes.

    In wider dtypes these are the first two bytes, followed by bytes at rounding limits.
    """
    first = np.arange(1 << 16, dtype=np.uint64)
    left = 8 * dtype.itemsize - 16
    rest = [0, (1 << left) - 1, *(((1 << at) + step) % (1 << left) for at in range(left) for step in (-1, 0, 1))]
    bits = (first[:, None] << np.uint64(left)) | np.array(sorted(set(rest)), np.uint64)
    return torch.from_numpy(bits.reshape(-1).astype(f"u{dtype.itemsize}")).view(dtype)


@pytest.mark.parametrize("target", FLOATS, ids=str)
def test_a_cast_gives_the_same_bits_by_every_code_path(target: torch.dtype) -> None:
    for dtype in FLOATS:
        if dtype == target:
            continue
        whole = patterns(dtype)
        nan = whole.isnan()
        expected = whole.to(target).masked_fill(nan, float("nan"))
        strided = torch.stack([whole, whole], 1)[:, 0]
        array = whole.view(torch.uint8).numpy().view(numpy_dtype(name_of(whole)))
        for form in (whole, strided, array):
            parts = Staging().parts(form, name_of(expected))
            assert b"".join(bytes(data) for _, data in parts) == expected.view(torch.uint8).numpy().tobytes()
        assert converted(array, name_of(expected))[0].tobytes() == expected.view(torch.uint8).numpy().tobytes()


def replicas_with_nan(folder: str) -> None:
    """Export a replica in which each rank has the same values in another order of memory."""
    tensor = torch.full((64, 33), float("nan"))
    sx.export_checkpoint({"w": tensor if sx.get_rank() else tensor.T.contiguous().T}, f"{folder}/out", dtype="bfloat16")


def test_copies_of_a_nan_are_equal_in_any_order_of_memory(tmp_path: Path) -> None:
    run_ranks(replicas_with_nan, 2, args=(str(tmp_path),), timeout_s=120)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peaks_of_a_strided_tensor(folder: str) -> list[int]:
    """Return the bytes that exports, and then a load and a save, add to the peak; the tensor is strided."""
    tensor = torch.ones(6000, 8000).T
    small = {"w": torch.ones(30, 20).T}
    sx.export_checkpoint(small, f"{folder}/small", dtype="bfloat16")
    sx.export_checkpoint(small, f"{folder}/same")
    sx.load_checkpoint(small, f"{folder}/same")
    sx.save_checkpoint(small, f"{folder}/kept")
    found = [peak_bytes()]
    sx.export_checkpoint({"w": tensor}, f"{folder}/cast", dtype="bfloat16")
    sx.export_checkpoint({"w": tensor}, f"{folder}/whole")
    found.append(peak_bytes())
    sx.load_checkpoint({"w": tensor}, f"{folder}/whole")
    sx.save_checkpoint({"w": tensor}, f"{folder}/saved")
    found.append(peak_bytes())
    return [found[1] - found[0], found[2] - found[1]]


def test_a_strided_tensor_is_never_copied_whole(tmp_path: Path) -> None:
    (added,) = run_ranks(peaks_of_a_strided_tensor, 1, backend="processes", args=(str(tmp_path),), timeout_s=120)
    assert max(added) < 40 << 20
