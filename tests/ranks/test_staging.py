"""Tensors of any strides and dtype through two small buffers, against torch and numpy themselves."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import statexchange as sx
from statexchange.exchange.staging import Staging
from statexchange.tensors import DTYPE_NAMES
from statexchange.testing import run_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.int16, torch.complex64, torch.bool, torch.float64]


def name_of(tensor: Any) -> str:
    return DTYPE_NAMES[str(tensor.dtype).removeprefix("torch.")]


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A view of any order and steps, or the tensor itself."""
    shape = draw(st.lists(st.integers(0, 6), max_size=4))
    count = int(np.prod(shape))
    tensor = torch.arange(count).remainder(97).to(draw(st.sampled_from(DTYPES))).reshape(shape)
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    if shape and draw(st.booleans()):
        tensor = tensor[:: draw(st.integers(1, 3))]
    return tensor.conj() if tensor.is_complex() and draw(st.booleans()) else tensor


@settings(deadline=None)
@given(views(), st.integers(16, 200))
def test_out_of_any_tensor_come_its_bytes_in_c_order(tensor: torch.Tensor, window_bytes: int) -> None:
    parts = [(box, bytes(data)) for box, data in Staging(window_bytes).parts(tensor, name_of(tensor))]
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    assert b"".join(data for _, data in parts) == flat.view(torch.uint8).numpy().tobytes()
    assert all(len(data) == box.numel * tensor.element_size() <= window_bytes for box, data in parts)


@settings(deadline=None)
@given(views(), st.integers(16, 200))
def test_what_is_put_in_is_in_the_tensor(tensor: torch.Tensor, window_bytes: int) -> None:
    staging, wanted = Staging(window_bytes), tensor.resolve_conj().contiguous()
    parts = b"".join(bytes(data) for _, data in staging.parts(wanted, name_of(tensor)))
    tensor.zero_()
    at = 0
    for _, memory in staging.targets(tensor, name_of(tensor)):
        memory[:] = parts[at : at + len(memory)]
        at += len(memory)
    assert torch.equal(tensor.resolve_conj(), wanted)


@pytest.mark.parametrize("window_bytes", [16, 4096])
def test_arrays_of_any_strides_and_what_is_cast(window_bytes: int) -> None:
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


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def strided_trip(folder: str) -> list[int]:
    """Bytes that exports, and then a load and a save, add to the peak; the tensor lies in an order of its own."""
    tensor = torch.ones(6000, 8000).T
    small = {"w": torch.ones(30, 20).T}
    sx.export_checkpoint(small, f"{folder}/small", dtype="bfloat16")
    sx.export_checkpoint(small, f"{folder}/same")
    sx.load_checkpoint(small, f"{folder}/same")
    sx.save_checkpoint(small, f"{folder}/kept")
    found = [peak()]
    sx.export_checkpoint({"w": tensor}, f"{folder}/cast", dtype="bfloat16")
    sx.export_checkpoint({"w": tensor}, f"{folder}/whole")
    found.append(peak())
    sx.load_checkpoint({"w": tensor}, f"{folder}/whole")
    sx.save_checkpoint({"w": tensor}, f"{folder}/saved")
    found.append(peak())
    return [found[1] - found[0], found[2] - found[1]]


def test_a_strided_tensor_is_never_copied_whole(tmp_path: Path) -> None:
    (added,) = run_ranks(strided_trip, 1, backend="processes", args=(str(tmp_path),), timeout_s=60)
    assert max(added) < 40 << 20
