"""Formats of other frameworks: every call and command refuses them by name, with the tool that reads them."""

from __future__ import annotations

import io
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command_lines import ON_A_PATH, words_of
from commands import CommandLine
from safetensors.numpy import save_file
from stored import DATA

import statexchange as sx
from statexchange.errors import CorruptError, UnsupportedError
from statexchange.report.scan import scan
from statexchange.report.summary import summarize
from statexchange.report.verify import verify
from statexchange.testing import run_ranks

SAMPLES = DATA / "foreign"
# By sample, which the format's own library wrote: the format's name and the tool, as in the error.
FILES = {
    "model.gguf": ("GGUF", "gguf-dump"),
    "array.npy": ("numpy", "numpy.load"),
    "arrays.npz": ("numpy", "numpy.load"),
    "flax_model.msgpack": ("Flax", "flax.serialization"),
    "model.h5": ("HDF5", "h5py"),
    "model.onnx": ("ONNX", "onnx.load"),
}
DIRECTORIES = {
    "orbax": ("Orbax", "orbax.checkpoint"),
    "orbax/state": ("Orbax", "orbax.checkpoint"),
    "orbax-zarr": ("Orbax", "orbax.checkpoint"),
    "zarr2": ("zarr", "zarr.open"),
    "zarr3": ("zarr", "zarr.open"),
}
FORMATS = {**FILES, **DIRECTORIES}
CALLS: dict[str, Callable[[Path], object]] = {
    "open_checkpoint": sx.open_checkpoint,
    "merge_checkpoint": lambda path: sx.merge_checkpoint(path, path.parent / "out"),
    "load_checkpoint": lambda path: sx.load_checkpoint({"w": np.zeros(1)}, path),
    "diff_checkpoints": lambda path: sx.diff_checkpoints(path, path),
    "summarize": summarize,
    "verify": verify,
}


def check_refused(path: Path, name: str, call: CommandLine) -> None:
    """Check that all calls and commands refuse a path with the words of a sample."""
    for name_of_call, function in CALLS.items():
        with pytest.raises(UnsupportedError) as refused:
            function(path)
        assert refused.value.path == str(path), name_of_call
        assert all(word in refused.value.message for word in FORMATS[name]), refused.value
    out = path.parent / "out"
    for command in ON_A_PATH:
        arguments = words_of(command, path, out)
        code, _, err = call(*arguments)
        assert (code, err.count("not read here")) == (7, 1), arguments
        assert all(word in err for word in (*FORMATS[name], str(path))), err
    assert not out.exists()


def check_named_by_scan(path: Path, name: str) -> None:
    """Check that a scan has one row for a path, which names the format and is no finding."""
    (row,) = scan(path)
    assert (row.path, row.status) == (str(path), "not checked")
    assert row.verdict.startswith("NOT CHECKED")
    assert FORMATS[name][0] in row.verdict


@pytest.mark.parametrize("name", FORMATS)
def test_a_foreign_format_is_refused_by_every_call(name: str, tmp_path: Path, call: CommandLine) -> None:
    path = tmp_path / "x" / name
    path.parent.mkdir(parents=True)
    (shutil.copytree if name in DIRECTORIES else shutil.copy)(SAMPLES / name, path)
    check_refused(path, name, call)
    check_named_by_scan(path, name)
    if name in FILES:
        check_named_by_scan(path.parent, name)
        check_refused(path.parent, name, call)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("weights", ["safetensors", "bin"])
def test_weights_beside_a_foreign_format_are_the_model(name: str, weights: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    if name in DIRECTORIES:
        shutil.copytree(SAMPLES / name, path)
    else:
        path.mkdir()
        shutil.copy(SAMPLES / name, path)
    if weights == "safetensors":
        save_file({"w": np.ones(2, "f4")}, path / "model.safetensors")
    else:
        torch = pytest.importorskip("torch")
        torch.save({"w": torch.ones(2)}, path / "pytorch_model.bin")
    with sx.open_checkpoint(path) as checkpoint:
        assert {name: tensor.read().tolist() for name, tensor in checkpoint.items()} == {"w": [1.0, 1.0]}
    assert [row.status for row in scan(path) if row.path == str(path)] == ["whole"]


def test_a_directory_of_deepspeed_with_a_foreign_file_beside_is_deepspeeds(tmp_path: Path) -> None:
    path = Path(shutil.copytree(DATA / "deepspeed/zero2", tmp_path / "x"))
    for name in FILES:
        shutil.copy(SAMPLES / name, path)
    assert summarize(path).kind == "deepspeed"


def test_each_rank_raises_the_error() -> None:
    def load() -> None:
        with pytest.raises(UnsupportedError, match="gguf-dump") as refused:
            sx.load_checkpoint({"w": np.zeros(1)}, SAMPLES / "model.gguf")
        assert refused.value.rank == 0

    run_ranks(load, 2)


def test_several_foreign_files_are_named_and_directories_beside_them_are_scanned(tmp_path: Path) -> None:
    for name in ("q4.gguf", "q8.gguf"):
        shutil.copy(SAMPLES / "model.gguf", tmp_path / name)
    (tmp_path / "original").mkdir()
    save_file({"w": np.ones(2, "f4")}, tmp_path / "original" / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"q4\.gguf, q8\.gguf.*GGUF"):
        sx.open_checkpoint(tmp_path)
    assert [row.status for row in scan(tmp_path)] == ["not checked", "whole"]


def test_other_zips_are_not_taken_for_arrays_of_numpy(tmp_path: Path) -> None:
    """A file of torch.save is a zip, too, whose members have the name of the file."""
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.ones(2)}, tmp_path / "a.npy.pt")
    with sx.open_checkpoint(tmp_path / "a.npy.pt") as checkpoint:
        assert list(checkpoint) == ["w"]
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("a.txt", "x")
    (tmp_path / "x.pt").write_bytes(data.getvalue())
    with pytest.raises(CorruptError):
        sx.open_checkpoint(tmp_path / "x.pt")
