"""Quantised weights of torchao, bitsandbytes, GPTQ and others: a merge keeps them whole."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from stored import DATA

import statexchange as sx
from statexchange.errors import UnsupportedError
from statexchange.sharding.options import Rename

SAMPLES = DATA / "packed"


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "np") as file:
        found: dict[str, str] = file.metadata()
        return found


WEIGHTS = ["model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias"]


@pytest.mark.parametrize("sample", ["torchao", "bitsandbytes"])
def test_packed_tensors_are_merged_bit_by_bit(sample: str, tmp_path: Path) -> None:
    sx.merge_checkpoint(SAMPLES / sample, tmp_path / "out")
    found = load_file(tmp_path / "out/model.safetensors")
    files = sorted((SAMPLES / sample).glob("*.safetensors"))
    expected = {name: array for file in files for name, array in load_file(file).items()}
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        assert found[name].tobytes() == array.tobytes()


def test_a_merge_joins_the_metadata_of_torchaos_files(tmp_path: Path) -> None:
    report = sx.merge_checkpoint(SAMPLES / "torchao", tmp_path / "out")
    assert not [text for text in report.notes if "metadata" in text]
    found = metadata(tmp_path / "out/model.safetensors")
    assert json.loads(found["tensor_names"]) == WEIGHTS
    for file in sorted((SAMPLES / "torchao").glob("*.safetensors")):
        own = {key: value for key, value in metadata(file).items() if key != "tensor_names"}
        assert own.items() <= found.items()


def test_a_renamed_merge_renames_torchaos_records(tmp_path: Path) -> None:
    rename: Rename = [("^model[.]", "decoder.")]
    sx.merge_checkpoint(SAMPLES / "torchao", tmp_path / "out", rename=rename)
    found = metadata(tmp_path / "out/model.safetensors")
    assert json.loads(found["tensor_names"]) == [name.replace("model.", "decoder.") for name in WEIGHTS]
    assert set(json.loads(found["tensor_names"])) < found.keys()
    assert "model.0.weight" not in found
    with pytest.raises(UnsupportedError, match="Rename modules") as refused:
        sx.merge_checkpoint(SAMPLES / "torchao", tmp_path / "no", rename=[("[.]weight$", ".kernel")])
    assert refused.value.name == "model.0.weight"
    assert not (tmp_path / "no").exists()


def test_lists_that_are_not_torchaos_are_other_metadata(tmp_path: Path) -> None:
    for number, text in enumerate(("[1]", "{")):
        save_file({f"w{number}": np.ones(1)}, tmp_path / f"{number}.safetensors", {"tensor_names": text})
    (note,) = [text for text in sx.merge_checkpoint(tmp_path, tmp_path / "out").notes if "metadata" in text]
    assert note == "metadata keys that are not kept: tensor_names (files differ)"


def dtypes(path: Path) -> dict[str, str]:
    return {name: str(array.dtype) for name, array in load_file(path / "model.safetensors").items()}


def test_a_cast_leaves_what_packed_weights_need(tmp_path: Path) -> None:
    sx.merge_checkpoint(SAMPLES / "bitsandbytes", tmp_path / "bnb", dtype="float16")
    changed = {name for name, dtype in dtypes(tmp_path / "bnb").items() if dtype == "float16"}
    assert changed == {"norm.weight"}
    sx.merge_checkpoint(SAMPLES / "torchao", tmp_path / "ao", dtype="float16")
    changed = {name for name, dtype in dtypes(tmp_path / "ao").items() if dtype == "float16"}
    assert changed == {"model.0.bias", "model.1.bias"}
    (tmp_path / "src").mkdir()
    arrays = {"l.qweight": np.ones(2, "i4"), "l.scales": np.ones(2, "f4"), "norm.scale": np.ones(2, "f4")}
    arrays |= {"e.weight": np.ones(2, "i1"), "e.SCB": np.ones(2, "f4"), "zero": np.ones(2, "f4")}
    save_file(arrays, tmp_path / "src/model.safetensors")
    sx.merge_checkpoint(tmp_path / "src", tmp_path / "gptq", dtype="float16")
    changed = {name for name, dtype in dtypes(tmp_path / "gptq").items() if dtype == "float16"}
    assert changed == {"norm.scale", "zero"}


def test_a_live_tensor_that_is_made_of_several_is_refused(tmp_path: Path) -> None:
    """torch's example of such a class; torchao's are of this kind."""
    from torch.testing._internal.two_tensor import TwoTensor

    tensor = TwoTensor(torch.ones(2), torch.ones(2))
    for write in (sx.export_checkpoint, sx.save_checkpoint):
        with pytest.raises(UnsupportedError, match=r"TwoTensor.*\(a, b\)"):
            write({"w": tensor}, tmp_path / "out")
