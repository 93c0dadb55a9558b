"""Quantised weights of torchao, bitsandbytes, GPTQ and others: `info` names the layout, a merge keeps it whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import CommandLine
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from stored import DATA

import statexchange as sx
from statexchange.errors import UnsupportedError
from statexchange.report.summary import summarize
from statexchange.sharding.options import Rename

SAMPLES = DATA / "packed"


def note(path: Path) -> str:
    notes = summarize(path).notes
    assert len(notes) < 2
    return "".join(notes)


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "np") as file:
        found: dict[str, str] = file.metadata()
        return found


def packed(path: Path, *names: str, dtype: str = "i4", config: dict[str, Any] | None = None) -> Path:
    path.mkdir()
    save_file({name: np.ones(2, dtype) for name in names}, path / "model.safetensors")
    if config is not None:
        (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    return path


def test_info_names_the_layout_and_the_tool(tmp_path: Path, call: CommandLine) -> None:
    assert note(SAMPLES / "torchao").startswith("torchao: weights taken apart into _weight_qdata")
    found = note(SAMPLES / "bitsandbytes")
    assert found.startswith("bitsandbytes: weights packed into U8")
    assert "transformers with bitsandbytes loads it" in found
    assert f"note        {found}\n" in call("info", SAMPLES / "bitsandbytes")[1]
    shutil.copy(SAMPLES / "bitsandbytes/model.safetensors", tmp_path)  # without config.json
    assert note(tmp_path).startswith("bitsandbytes: ")
    assert note(tmp_path / "model.safetensors").startswith("bitsandbytes: ")


@pytest.mark.parametrize(
    ("names", "layout"),
    [
        (("l.qweight", "l.qzeros", "l.scales", "l.g_idx"), "GPTQ"),
        (("l.qweight", "l.qzeros", "l.scales"), "AWQ, or GPTQ without g_idx"),
        (("l.weight", "l.SCB"), "bitsandbytes"),
        (("l.weight_packed", "l.weight_scale", "l.weight_shape"), "compressed-tensors"),
        (("l.w_blocks", "l.w_scales"), "MXFP4"),
        (("l.weight", "l.weight_scale_inv"), "float8 by blocks"),
        (("l.weight", "n_blocks"), ""),
        (("l.weight", "l.scale"), ""),
    ],
)
def test_names_of_tensors_show_the_layout(names: tuple[str, ...], layout: str, tmp_path: Path) -> None:
    assert note(packed(tmp_path / "x", *names)).partition(":")[0] == layout


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
