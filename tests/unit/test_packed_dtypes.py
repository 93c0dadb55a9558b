"""Dtypes of less than a byte (F4, F6_E2M3, F6_E3M2): carried in whole bytes, refused by name where they are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stored import json_header, write_raw

import statexchange as sx
from statexchange.errors import CorruptError, UnsupportedError
from statexchange.formats.registry import open_source
from statexchange.report.summary import summarize
from statexchange.report.tensor_facts import tensor_rows
from statexchange.report.verify import verify
from statexchange.testing import run_ranks

F4 = getattr(torch, "float4_e2m1fn_x2", None)
needs_f4 = pytest.mark.skipif(F4 is None, reason="this torch has no float4_e2m1fn_x2")


def pairs(*shape: int, begin: int = 0) -> torch.Tensor:
    """Return a tensor of F4 whose bytes count up."""
    assert F4 is not None
    return (torch.arange(torch.Size(shape).numel()) + begin).to(torch.uint8).reshape(shape).view(F4)


def content(tensor: torch.Tensor) -> list[Any]:
    found: list[Any] = tensor.contiguous().view(torch.uint8).tolist()
    return found


@needs_f4
def test_a_merge_writes_what_save_file_writes(tmp_path: Path) -> None:
    state = {
        "x": pairs(3, 4),
        "empty": pairs(0, 4),
        "bytes": torch.ones(3, dtype=torch.uint8),
        "flags": torch.ones(3, dtype=torch.bool),
        "scale": torch.arange(4, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "w": torch.ones(2, 2),
    }
    save_file(state, tmp_path / "in.safetensors", {"format": "pt"})
    sx.merge_checkpoint(tmp_path / "in.safetensors", tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "in.safetensors").read_bytes()
    assert verify(tmp_path / "out").findings == ()
    sx.export_checkpoint(state, tmp_path / "live")
    assert (tmp_path / "live/model.safetensors").read_bytes() == (tmp_path / "in.safetensors").read_bytes()
    torch.save(state, tmp_path / "state.pt")
    sx.merge_checkpoint(tmp_path / "state.pt", tmp_path / "of-pt")
    assert (tmp_path / "of-pt/model.safetensors").read_bytes() == (tmp_path / "in.safetensors").read_bytes()


@needs_f4
def test_a_cast_leaves_packed_tensors_and_their_scales(tmp_path: Path) -> None:
    save_file({"l.w": pairs(2, 2), "l.scale": torch.ones(2), "b": torch.ones(2)}, tmp_path / "in.safetensors")
    sx.merge_checkpoint(tmp_path / "in.safetensors", tmp_path / "out", dtype="bfloat16")
    found = load_file(tmp_path / "out/model.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "l.w": F4, "l.scale": torch.float32, "b": torch.bfloat16
    }  # fmt: skip


@needs_f4
@pytest.mark.parametrize("dim", [0, 1])
def test_ranks_save_export_and_load_parts(dim: int, tmp_path: Path) -> None:
    whole = pairs(4, 6)

    def work() -> None:
        rank = sx.get_rank()
        part = whole.view(torch.uint8).chunk(2, dim)[rank].contiguous().view(F4)
        sx.export_checkpoint({"w": part}, tmp_path / "out", layout={"w": {"dim": dim}})
        sx.save_checkpoint({"w": part, "step": 3}, tmp_path / "save", layout={"w": {"dim": dim}})
        for source in ("out", "save"):
            state = {"w": torch.zeros_like(part)}
            sx.load_checkpoint(state, tmp_path / source, layout={"w": {"dim": dim}}, strict=False)
            assert content(state["w"]) == content(part)

    run_ranks(work, 2)
    assert content(load_file(tmp_path / "out/model.safetensors")["w"]) == content(whole)
    for source in ("out", "save"):
        assert verify(tmp_path / source).findings == ()
        state = {"w": torch.zeros_like(whole)}
        sx.load_checkpoint(state, tmp_path / source, strict=False)
        assert content(state["w"]) == content(whole)
        with sx.open_checkpoint(tmp_path / source) as checkpoint:
            assert (checkpoint["w"].dtype, checkpoint["w"].shape) == ("F4", (4, 6))
            assert checkpoint["w"].read().tolist() == content(whole)


@needs_f4
def test_a_transposed_packed_tensor_is_exported_and_a_scalar_is_refused(tmp_path: Path) -> None:
    state = {"w": pairs(2, 3).t()}
    sx.export_checkpoint(state, tmp_path / "out")
    assert content(load_file(tmp_path / "out/model.safetensors")["w"]) == content(state["w"])
    with pytest.raises(UnsupportedError, match="without dims"):
        sx.export_checkpoint({"w": pairs(1).reshape(())}, tmp_path / "scalar")


@needs_f4
def test_f4_is_not_read_into_bytes(tmp_path: Path) -> None:
    save_file({"w": pairs(2, 2)}, tmp_path / "in.safetensors")
    with pytest.raises(sx.StateExchangeError, match="F4"):
        sx.load_checkpoint({"w": torch.zeros(2, 2, dtype=torch.uint8)}, tmp_path / "in.safetensors")


@pytest.mark.parametrize("dtype", ["F6_E2M3", "F6_E3M2"])
def test_tensors_of_six_bits_are_shown_merged_and_read_as_bytes(dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "in.safetensors"
    write_raw(path, {"w": (dtype, [2, 8], bytes(range(12))), "b": ("U8", [2], b"ab")})
    summary = summarize(path)
    assert (summary.num_parameters, summary.nbytes, summary.dtypes) == (18, 14, {dtype: 1, "U8": 1})
    with open_source(path) as source:
        assert {row.name: row.shape for row in tensor_rows(source)} == {"w": (2, 8), "b": (2,)}
    sx.merge_checkpoint(path, tmp_path / "out")
    with safe_open(tmp_path / "out/model.safetensors", "np") as file:
        assert file.get_slice("w").get_shape() == [2, 8]
    with sx.open_checkpoint(tmp_path / "out") as checkpoint:
        assert checkpoint["w"].read().tolist() == [list(range(6)), list(range(6, 12))]
    assert verify(tmp_path / "out").findings == ()
    with pytest.raises(sx.StateExchangeError, match=dtype) as refused:
        sx.load_checkpoint({"w": torch.zeros(2, 2)}, tmp_path / "out", strict=False)
    assert refused.value.name == "w"


def test_columns_of_six_bits_are_merged(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    for rank in range(2):
        data = bytes(range(6 * rank, 6 * rank + 6))
        write_raw(tmp_path / f"ranks/rank_{rank}.safetensors", {"w": ("F6_E2M3", [2, 4], data)})
    sx.merge_checkpoint(tmp_path / "ranks", tmp_path / "out", layout={"w": {"dim": 1}})
    assert json_header(tmp_path / "out/model.safetensors")["w"]["shape"] == [2, 8]
    with sx.open_checkpoint(tmp_path / "out") as checkpoint:
        assert checkpoint["w"].read().tolist() == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]


@pytest.mark.parametrize(("dtype", "shape", "nbytes"), [("F4", [2, 3], 3), ("F6_E2M3", [4, 2], 6), ("F8_NEW", [4], 4)])
def test_a_packed_tensor_of_no_whole_bytes_is_refused_and_hides_no_other(
    dtype: str, shape: list[int], nbytes: int, tmp_path: Path
) -> None:
    path = tmp_path / "in.safetensors"
    write_raw(path, {"odd": (dtype, shape, bytes(nbytes)), "w": ("U8", [2], b"ab")})
    summary = summarize(path)
    assert (summary.num_tensors, summary.num_unreadable, summary.nbytes) == (2, 1, nbytes + 2)
    with pytest.raises(UnsupportedError, match=dtype) as refused:
        sx.merge_checkpoint(path, tmp_path / "out")
    assert refused.value.name == "odd"
    sx.merge_checkpoint(path, tmp_path / "out", exclude="odd")
    assert load_file(tmp_path / "out/model.safetensors")["w"].tolist() == [97, 98]


@pytest.mark.parametrize(("shape", "nbytes"), [([2, 4], 3), ([2, 4], 8), ([], 1), ([1], 1)])
def test_bytes_that_do_not_fit_are_corrupt(shape: list[int], nbytes: int, tmp_path: Path) -> None:
    write_raw(tmp_path / "in.safetensors", {"w": ("F4", shape, bytes(nbytes))})
    (problem,) = summarize(tmp_path / "in.safetensors").problems
    assert isinstance(problem, CorruptError)


@needs_f4
def test_a_tensor_of_a_missing_file_is_listed_in_elements(tmp_path: Path) -> None:
    save_file({"w": pairs(5, 8), "x": torch.zeros(9)}, tmp_path / "in.safetensors")
    sx.merge_checkpoint(tmp_path / "in.safetensors", tmp_path / "out", max_shard_size=40)
    with open_source(tmp_path / "out", strict=False) as source:
        whole = {row.name: row[1:4] for row in tensor_rows(source)}
    assert whole["w"] == ("F4", (5, 16), 40)
    for path in (tmp_path / "out").glob("*.safetensors"):
        path.unlink()
    with open_source(tmp_path / "out", strict=False) as source:
        assert {row.name: row[1:4] for row in tensor_rows(source)} == whole
