"""diff: where two checkpoints differ, whatever their formats and shardings."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import CommandLine
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file as np_save_file
from safetensors.torch import load_file, save_file

import statexchange as sx
from statexchange.report.diff import TensorDiff
from statexchange.testing import run_ranks


def published(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    sx.export_checkpoint(tensors, path)
    return path


def differing(*paths: Path, **options: Any) -> dict[str, TensorDiff]:
    return {tensor.name: tensor for tensor in sx.diff_checkpoints(*paths, **options).differing}


def save_rows(path: str) -> None:
    comm = sx.get_communicator()
    rows = torch.arange(24.0).reshape(6, 4)[2 * comm.rank :][:2]
    sx.save_checkpoint({"model": {"w": rows}, "step": 3}, path, layout={"model.w": {"dim": 0}})


def test_a_sharded_save_equals_its_merge_and_its_export(tmp_path: Path) -> None:
    run_ranks(lambda: save_rows(str(tmp_path / "save")), 3)
    whole = torch.arange(24.0).reshape(6, 4)
    torch.save({"w": whole}, tmp_path / "w.pt")
    sx.merge_checkpoint(tmp_path / "save", tmp_path / "merged")
    for other in ("merged", "w.pt"):
        report = sx.diff_checkpoints(tmp_path / "save", tmp_path / other)
        assert report.equal, report.differing
        assert [tensor.name for tensor in report.tensors] == ["w"]
        assert report.notes
        assert "section" in report.notes[0]
    whole[4, 1] += 1
    torch.save({"w": whole}, tmp_path / "w.pt")
    found = differing(tmp_path / "save", tmp_path / "w.pt")["w"]
    assert found.values is not None
    assert (found.status, found.values.first, found.values.max_abs, found.values.num_differing) == (
        "values",
        (4, 1),
        1,
        1,
    )


def test_tensors_of_equal_digests_are_not_read(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(100, 50), "b": torch.arange(10)}
    a, b = published(tmp_path / "a", tensors), published(tmp_path / "b", tensors)
    report = sx.diff_checkpoints(a, b)
    assert (report.equal, report.nbytes) == (True, 0)
    assert {tensor.by for tensor in report.tensors} == {"digests"}
    tensors["b"][3] = 7
    report = sx.diff_checkpoints(a, published(tmp_path / "c", tensors))
    assert [tensor.name for tensor in report.differing] == ["b"]
    assert 0 < report.nbytes < 1000


def test_differences_of_names_shapes_and_dtypes_are_distinguished(tmp_path: Path) -> None:
    a = {
        "same": torch.ones(3),
        "gone": torch.ones(1),
        "long": torch.ones(2),
        "half": torch.ones(4, dtype=torch.bfloat16),
    }
    b = {"same": torch.ones(3), "new": torch.ones(1), "long": torch.ones(3), "half": torch.ones(4)}
    paths = published(tmp_path / "a", a), published(tmp_path / "b", b)
    assert {name: tensor.status for name, tensor in differing(*paths).items()} == {
        "gone": "only in a", "half": "dtype", "long": "shape", "new": "only in b"
    }  # fmt: skip
    assert differing(*paths, tolerance=0.0, exclude=["gone", "new", "long"]) == {}
    assert set(differing(*paths, include="*o*")) == {"gone", "long"}
    renamed = differing(*paths, rename=[("^gone$", "new")])
    assert set(renamed) == {"half", "long"}
    with pytest.raises(sx.errors.InvalidArgumentError, match="tolerance"):
        sx.diff_checkpoints(*paths, tolerance=-1)


FINITE = st.floats(-100, 100, width=32)


@given(st.lists(st.tuples(FINITE, FINITE | st.just(math.nan) | st.just(-0.0)), min_size=1, max_size=30))
def test_the_numbers_of_random_pairs_are_those_of_numpy(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[float, float]]
) -> None:
    path = tmp_path_factory.mktemp("pairs", numbered=True)
    a, b = (torch.tensor(values, dtype=torch.float32) for values in zip(*pairs, strict=True))
    save_file({"w": a}, path / "a.safetensors")
    save_file({"w": b}, path / "b.safetensors")
    (tensor,) = sx.diff_checkpoints(path / "a.safetensors", path / "b.safetensors").tensors
    left, right = a.numpy().astype(float), b.numpy().astype(float)
    changed = np.flatnonzero(a.numpy().view(np.uint32) != b.numpy().view(np.uint32))
    assert (tensor.status == "equal") == (len(changed) == 0)
    if tensor.values is None:
        return
    known = ~np.isnan(right)
    delta = (right - left)[known]
    assert tensor.values.num_differing == len(changed)
    assert tensor.values.first == (changed[0],)
    assert tensor.values.num_nan_b == np.isnan(right).sum()
    assert tensor.values.num_nan_a == 0
    if len(delta):
        assert tensor.values.max_abs == np.abs(delta).max()
        norm = np.linalg.norm(left[known])
        expected = np.linalg.norm(delta) / norm if norm else (math.inf if delta.any() else 0.0)
        assert tensor.values.relative_l2 == pytest.approx(expected)
    else:
        assert math.isnan(tensor.values.max_abs)


LARGE = (7, 50_000)  # several windows, and several parts of a sum


def large_pair(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors that differ everywhere but in two rows."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(LARGE, generator=generator).mul(50).to(dtype) for _ in range(2))
    b[:2] = a[:2]
    return a, b


@pytest.mark.parametrize("special", [(), (math.nan,), (math.inf, -math.inf), (math.nan, math.inf)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("tolerance", [None, 3.0])
def test_the_numbers_of_large_tensors_are_those_of_numpy(
    dtype: torch.dtype, special: tuple[float, ...], tolerance: float | None, tmp_path: Path
) -> None:
    a, b = large_pair(dtype)
    if not dtype.is_floating_point:
        special = ()
    for number, value in enumerate(special):
        a[1, 10 + number] = value  # in a; b is finite there
        a[4, number], b[4, number] = value, value  # in both
        b[6, -1 - number] = value
    save_file({"w": a}, tmp_path / "a.safetensors")
    save_file({"w": b}, tmp_path / "b.safetensors")
    found = differing(tmp_path / "a.safetensors", tmp_path / "b.safetensors", tolerance=tolerance)["w"].values
    assert found is not None
    left, right = a.double().numpy(), b.double().numpy()
    with np.errstate(invalid="ignore"):
        delta = right - left
    is_same = (left == right) | (np.isnan(left) & np.isnan(right))  # no bits differ where values are equal
    changed = ~is_same if tolerance is None else ~(is_same | (np.abs(delta) <= tolerance))
    assert found.num_differing == changed.sum()
    assert found.first == np.unravel_index(changed.argmax(), LARGE)
    assert found.max_abs == np.nanmax(np.abs(delta))
    assert (found.num_nan_a, found.num_nan_b) == (np.isnan(left).sum(), np.isnan(right).sum())
    left, right, delta = (values[np.isfinite(delta)] for values in (left, right, delta))
    precision = 1e-6 if dtype in (torch.float32, torch.bfloat16) else 1e-12
    assert found.relative_l2 == pytest.approx(np.linalg.norm(delta) / np.linalg.norm(left), rel=precision)
    cosine = np.dot(left, right) / np.linalg.norm(left) / np.linalg.norm(right)
    assert found.cosine == pytest.approx(cosine, abs=precision)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("scale_b", [1.0, 1.0078125, -1.0, 1e-6])
@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e-22, 1e-30, 1e18, 1e36])
def test_norms_are_right_at_any_scale(dtype: torch.dtype, scale_b: float, scale: float, tmp_path: Path) -> None:
    a, other = (values.double() / 100 for values in large_pair(torch.float32))
    a, b = (a * scale).to(dtype), ((a + other / 1000) * scale * scale_b).to(dtype)
    save_file({"w": a}, tmp_path / "a.safetensors")
    save_file({"w": b}, tmp_path / "b.safetensors")
    values = differing(tmp_path / "a.safetensors", tmp_path / "b.safetensors")["w"].values
    assert values is not None
    left, right = a.double().numpy().ravel(), b.double().numpy().ravel()
    delta = right - left
    assert values.max_abs == np.abs(delta).max()
    assert values.relative_l2 == pytest.approx(np.linalg.norm(delta) / np.linalg.norm(left), rel=1e-6)
    cosine = np.dot(left, right) / np.linalg.norm(left) / np.linalg.norm(right)
    assert values.cosine == pytest.approx(cosine, abs=1e-6)
    assert -1 <= values.cosine <= 1
    if scale_b == 1:  # nearly the same direction: the difference to 1 is precise, too
        assert 1 - values.cosine == pytest.approx(1 - cosine, rel=1e-5)


def test_a_change_of_scale_keeps_the_cosine(tmp_path: Path) -> None:
    a, _ = large_pair(torch.float32)
    save_file({"w": a}, tmp_path / "a.safetensors")
    save_file({"w": a / 2**20}, tmp_path / "b.safetensors")
    values = differing(tmp_path / "a.safetensors", tmp_path / "b.safetensors")["w"].values
    assert values is not None
    assert values.cosine == pytest.approx(1, abs=1e-6)


def test_bits_of_equal_values_differ_in_a_large_tensor(tmp_path: Path) -> None:
    a, _ = large_pair(torch.float32)
    a[5] = 0
    a[3, 7] = math.nan
    b = a.clone()
    b[5, 9] = -0.0
    b.view(torch.int32)[3, 7] += 1  # another NaN
    save_file({"w": a}, tmp_path / "a.safetensors")
    save_file({"w": b}, tmp_path / "b.safetensors")
    values = differing(tmp_path / "a.safetensors", tmp_path / "b.safetensors")["w"].values
    assert values is not None
    assert (values.num_differing, values.first, values.max_abs, values.relative_l2) == (2, (3, 7), 0, 0)
    assert (values.num_nan_a, values.num_nan_b) == (1, 1)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_large_sharded_tensor_is_compared_with_a_whole_one(dim: int, tmp_path: Path) -> None:
    whole, other = large_pair(torch.float32)

    def save() -> None:
        part = whole.tensor_split(3, dim)[sx.get_rank()].contiguous()
        sx.save_checkpoint({"model": {"w": part}}, tmp_path / "save", layout={"model.w": {"dim": dim}})

    run_ranks(save, 3)
    save_file({"w": whole}, tmp_path / "same.safetensors")
    save_file({"w": other}, tmp_path / "other.safetensors")
    plain_names = [(r"^model\.", "")]
    assert not differing(tmp_path / "save", tmp_path / "same.safetensors", rename=plain_names)
    values = differing(tmp_path / "save", tmp_path / "other.safetensors", rename=plain_names)["w"].values
    assert values is not None
    changed = (whole != other).numpy()
    assert (values.num_differing, values.first) == (changed.sum(), np.unravel_index(changed.argmax(), LARGE))


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int64, torch.bool, torch.float16, torch.complex64, torch.float8_e4m3fn], ids=str
)
def test_each_dtype_is_compared(dtype: torch.dtype, tmp_path: Path) -> None:
    a = torch.zeros(2, 3).to(dtype)
    b = torch.zeros(2, 3)
    b[1, 2] = 1
    save_file({"w": a}, tmp_path / "a.safetensors")
    save_file({"w": b.to(dtype)}, tmp_path / "b.safetensors")
    values = differing(tmp_path / "a.safetensors", tmp_path / "b.safetensors")["w"].values
    assert values is not None
    assert (values.first, values.num_differing, values.max_abs, values.relative_l2) == ((1, 2), 1, 1.0, math.inf)


def write_integers(path: Path, array: np.ndarray[Any, Any]) -> Path:
    np_save_file({"w": array}, path)
    return path


@pytest.mark.parametrize("tolerance", [None, 0, 99.5])
def test_large_integers_that_are_one_number_in_float64_differ(tolerance: float | None, tmp_path: Path) -> None:
    a = write_integers(tmp_path / "a.safetensors", np.array([7, 2**62, -(2**53), -1]))
    for other in (np.array([7, 2**62 + 100, -(2**53), -1]), np.array([7, 2**62 - 100, -(2**53), -1])):
        values = differing(a, write_integers(tmp_path / "b.safetensors", other), tolerance=tolerance)["w"].values
        assert values is not None
        assert (values.num_differing, values.first, values.max_abs) == (1, (1,), 100.0)
    assert not differing(a, tmp_path / "b.safetensors", tolerance=100)


@pytest.mark.parametrize("b", [np.array([2.0**53, 2]), np.array([2**53, 2], np.uint64)], ids=["float64", "uint64"])
def test_large_integers_of_different_dtypes_are_compared_exactly(b: np.ndarray[Any, Any], tmp_path: Path) -> None:
    path = write_integers(tmp_path / "b.safetensors", b)
    equal = write_integers(tmp_path / "equal.safetensors", np.array([2**53, 2]))
    assert differing(equal, path)["w"].status == "dtype"
    other = write_integers(tmp_path / "a.safetensors", np.array([2**53 + 1, 2]))
    found = differing(other, path)["w"]
    assert found.values is not None
    assert (found.status, found.values.num_differing, found.values.max_abs) == ("values", 1, 1.0)
    assert differing(other, path, tolerance=0)
    assert not differing(other, path, tolerance=1)


def test_ranks_copies_that_differ_are_not_equal_to_anything(tmp_path: Path) -> None:
    for name, second in (("equal", 1.0), ("differ", 0.0)):
        (tmp_path / name).mkdir()
        torch.save({"w": torch.ones(3)}, tmp_path / name / "rank0.pt")
        torch.save({"w": torch.full((3,), second)}, tmp_path / name / "rank1.pt")
    torch.save({"w": torch.ones(3), "v": torch.ones(3)}, tmp_path / "whole.pt")
    assert set(differing(tmp_path / "equal", tmp_path / "whole.pt")) == {"v"}
    for paths in (("differ", "whole.pt"), ("whole.pt", "differ"), ("equal", "differ")):
        with pytest.raises(sx.errors.ReplicaError, match=r"rank0\.pt and rank1\.pt") as caught:
            sx.diff_checkpoints(*(tmp_path / path for path in paths))
        assert caught.value.path.endswith("rank1.pt")


@pytest.mark.parametrize("is_published", [False, True])
def test_a_tied_tensor_is_compared_with_one_that_is_not_tied(tmp_path: Path, is_published: bool) -> None:
    w = torch.ones(3)
    tied = tmp_path / "tied.pt"
    torch.save({"embed": w, "head": w}, tied)
    if is_published:
        sx.merge_checkpoint(tied, tmp_path / "tied")
        tied = tmp_path / "tied"
    save_file({"embed": w, "head": w.clone()}, tmp_path / "copied.safetensors")
    save_file({"embed": w, "head": w + 1}, tmp_path / "untied.safetensors")
    save_file({"embed": w}, tmp_path / "dropped.safetensors")
    assert not differing(tied, tied)
    assert not differing(tied, tmp_path / "copied.safetensors")
    assert not differing(tmp_path / "dropped.safetensors", tied)
    found = differing(tied, tmp_path / "untied.safetensors")
    assert {name: tensor.status for name, tensor in found.items()} == {"head": "values"}
    found = differing(tmp_path / "untied.safetensors", tied, rename=[("^head", "lm_head")])
    assert {name: tensor.status for name, tensor in found.items()} == {"lm_head": "only in a"}


def test_options_that_compare_nothing_are_refused(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "a.safetensors")
    options: list[dict[str, Any]] = [
        {"include": "layers.*"},
        {"exclude": "*"},
        {"threads": -1},
        {"tolerance": "x"},
        {"tolerance": math.nan},
    ]
    for option in options:
        with pytest.raises(sx.errors.InvalidArgumentError):
            sx.diff_checkpoints(tmp_path / "a.safetensors", tmp_path / "a.safetensors", **option)


def test_without_a_tensor_there_is_nothing_to_compare(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(1)}, "optimizer": {"state": {}, "param_groups": [{}]}}, tmp_path / "a.pt")
    with pytest.raises(sx.errors.InvalidArgumentError, match="nothing to compare"):
        sx.diff_checkpoints(tmp_path / "a.pt", tmp_path / "a.pt", section="optimizer")


def test_a_byte_that_differs_from_its_digest_is_an_error(tmp_path: Path) -> None:
    path = published(tmp_path / "a", {"w": torch.randn(1000)})
    other = tmp_path / "b.safetensors"
    save_file(load_file(path / "model.safetensors"), other)
    with open(path / "model.safetensors", "r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"\x01\x02\x03")
    with pytest.raises(sx.errors.CorruptError, match="digest") as caught:
        sx.diff_checkpoints(other, path)
    assert caught.value.name == "w"


def test_the_command_prints_differences_as_lines_bars_and_json(tmp_path: Path, call: CommandLine) -> None:
    a = published(tmp_path / "a", {"w": torch.ones(10, 10), "v": torch.ones(2)})
    b = published(tmp_path / "b", {"w": torch.full((10, 10), 1.5), "v": torch.ones(2)})
    assert call("diff", a, a) == (0, "2 of 2 tensors are equal, 0 B read\n", "")
    code, out, _ = call("diff", a, b)
    assert (code, out.splitlines()[1].split("\t")) == (
        1, ["w", "values", "100", "0.5", "0.5", "1.000000", "[0,0]", "-"]
    )  # fmt: skip
    code, out, _ = call("diff", a, b, "--stat")
    assert (code, len(out.splitlines()[1].split("\t")[-1])) == (1, 19), "half is 0.3 decades below a full bar"
    code, found = call.json("diff", a, b)
    assert (code, found["data"]["equal"], found["data"]["num_differing"]) == (1, False, 1)
    assert found["data"]["tensors"][1]["values"]["first"] == [0, 0]
    assert call("diff", a, tmp_path / "absent")[0] == 3


def test_live_state_is_no_side_of_a_comparison(tmp_path: Path) -> None:
    with pytest.raises(sx.errors.InvalidArgumentError, match="export live state"):
        sx.diff_checkpoints({"w": torch.ones(3)}, tmp_path)  # type: ignore[arg-type]
