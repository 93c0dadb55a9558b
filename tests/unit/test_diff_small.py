"""diff of many small tensors, which are compared together where they follow one another in a file of each side."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import statexchange as sx
from statexchange.report.diff import TensorDiff

NAMES = [f"layers.{number}.weight" for number in range(600)]


def values_of(number: int) -> np.ndarray:
    return np.arange(number, number + 6, dtype=np.float32).reshape(2, 3)


def write(path: Path, *names_of_files: list[str]) -> Path:
    """Write a directory with these tensors in each of its files."""
    path.mkdir()
    for number, names in enumerate(names_of_files, 1):
        tensors = {name: values_of(NAMES.index(name)) for name in names}
        save_file(tensors, path / f"model-{number:05d}-of-{len(names_of_files):05d}.safetensors")
    return path


@pytest.mark.parametrize(
    "files",
    [(NAMES,), (NAMES[:250], NAMES[250:]), (NAMES[::2], NAMES[1::2])],
    ids=["one file", "two files", "other order"],
)
def test_equal_tensors_are_equal_wherever_they_lie(tmp_path: Path, files: tuple[list[str], ...]) -> None:
    report = sx.diff_checkpoints(write(tmp_path / "a", NAMES), write(tmp_path / "b", *files))
    assert report.equal
    assert report.tensors[0] == TensorDiff(NAMES[0], "equal", "F32", "F32", (2, 3), (2, 3), "bytes")
    assert [tensor.name for tensor in report.tensors] == sorted(NAMES)
    assert {tensor.by for tensor in report.tensors} == {"bytes"}


def test_the_one_that_differs_is_named_with_its_first_element(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", NAMES), write(tmp_path / "b", NAMES)
    path = b / "model-00001-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    at = data.rindex(values_of(321).tobytes())
    data[at + 4 * 4 : at + 5 * 4] = np.float32(-1.0).tobytes()
    path.write_bytes(data)
    (tensor,) = sx.diff_checkpoints(a, b).differing
    assert (tensor.name, tensor.status) == (NAMES[321], "values")
    assert tensor.values is not None
    assert (tensor.values.num_differing, tensor.values.first) == (1, (1, 1))


def test_a_tensor_on_one_side_alone_and_an_empty_one_do_not_hide_others(tmp_path: Path) -> None:
    write(tmp_path / "a", NAMES[:300])
    write(tmp_path / "b", NAMES[:299])
    for side in "ab":
        save_file({"empty": np.zeros((0, 2), np.float32)}, tmp_path / side / "model-00002-of-00002.safetensors")
        first = tmp_path / side / "model-00001-of-00001.safetensors"
        first.rename(first.with_name("model-00001-of-00002.safetensors"))
    report = sx.diff_checkpoints(tmp_path / "a", tmp_path / "b")
    assert [(tensor.name, tensor.status) for tensor in report.differing] == [(NAMES[299], "only in a")]
    assert len(report.tensors) == 301
