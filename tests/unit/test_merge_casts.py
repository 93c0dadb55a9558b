"""Merging: casts and prefixes."""

from pathlib import Path

import pytest
import torch
from merging import lay_out, refuse
from safetensors.torch import load_file, save_file
from stored import flip_bit
from workspaces import bytes_of, write_round

import statexchange as sx
from statexchange.checkpoint.merge import merge_checkpoint
from statexchange.errors import (
    CorruptError,
    InvalidArgumentError,
)
from statexchange.report.verify import verify

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def awkward(dtype: torch.dtype) -> torch.Tensor:
    """Return values that show how a conversion rounds: ties, the smallest and largest of every dtype, random bits."""
    generator = torch.Generator().manual_seed(3)
    edges = [v for d in FLOATS for i in [torch.finfo(d)] for v in (i.max, i.tiny, i.smallest_normal, i.eps, i.tiny / 2)]
    edges += [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-11 + 2**-40, 65519.99, 65520.0, 3.39e38]
    edges += [1 + 2**-8 + 2**-30, 2**-25, 2**-24 * 1.5, 0.0, float("inf"), 1 / 3, float("nan")]
    values = torch.tensor([*edges, *(-v for v in edges)], dtype=torch.float64)
    random = torch.randint(-(2**31), 2**31 - 1, (60_000,), generator=generator).to(torch.int32).view(torch.float32)
    return torch.cat([values, random.double(), torch.randn(60_000, generator=generator).double()]).to(dtype)


def test_each_tensor_is_cast_by_the_first_pattern_that_matches_its_name(tmp_path: Path) -> None:
    state = {"up.weight": torch.ones(2), "norm.weight": torch.ones(2), "count": torch.ones(2, dtype=torch.int64)}
    save_file(state, tmp_path / "model.safetensors")
    for cast in ({"norm.*": torch.float64, "*": "BF16"}, {"norm.*": "float64", "up.*": "bf16", "*.weight": "float16"}):
        merge_checkpoint(tmp_path / "model.safetensors", tmp_path / "out", dtype=cast, overwrite=True)
        written = load_file(tmp_path / "out/model.safetensors")
        found = {name: tensor.dtype for name, tensor in written.items()}
        assert found == {"up.weight": torch.bfloat16, "norm.weight": torch.float64, "count": torch.int64}
    with pytest.raises(InvalidArgumentError, match=r"pattern 'none\.\*'"):
        merge_checkpoint(tmp_path / "model.safetensors", tmp_path / "never", dtype={"none.*": "float32"})


def test_a_cast_leaves_the_scales_of_float8_tensors(tmp_path: Path) -> None:
    state = {
        "q.weight": torch.ones(2, 2).to(torch.float8_e4m3fn),
        "q.weight_scale_inv": torch.ones(1),
        "q.input_scale": torch.ones(1) * 2,
        "q.bias": torch.ones(2),
        "norm.scale": torch.ones(3),
    }
    save_file(state, tmp_path / "model.safetensors")
    merge_checkpoint(tmp_path / "model.safetensors", tmp_path / "out", dtype="bfloat16")
    written = load_file(tmp_path / "out/model.safetensors")
    assert {name for name, tensor in written.items() if tensor.dtype == torch.bfloat16} == {"q.bias", "norm.scale"}
    assert written["q.weight_scale_inv"].dtype == torch.float32
    assert bytes_of(written["q.weight"]) == bytes_of(state["q.weight"])


@pytest.mark.parametrize("target", FLOATS, ids=str)
def test_floats_are_converted_bit_by_bit_as_torch_does(tmp_path: Path, target: torch.dtype) -> None:
    state = {str(dtype): awkward(dtype) for dtype in FLOATS}
    state |= {"matrix": torch.randn(1500, 701), "int": torch.arange(5), "fp8": torch.ones(3).to(torch.float8_e5m2)}
    state |= {"bool": torch.tensor([True]), "complex": torch.ones(2, dtype=torch.complex64), "none": torch.empty(0, 3)}
    write_round(tmp_path / "ws", *lay_out(state, 3, 1))
    merge_checkpoint(tmp_path / "ws", tmp_path / "out", dtype=str(target).removeprefix("torch."), max_shard_size="3MB")
    back: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        back |= load_file(file)
    for name, value in state.items():
        expected = value
        if value.dtype in FLOATS and value.dtype != target:
            expected = value.to(target).masked_fill(value.isnan(), float("nan"))
        assert back[name].dtype == expected.dtype
        assert bytes_of(back[name]) == bytes_of(expected), name
    merge_checkpoint(tmp_path / "ws", tmp_path / "torch", dtype=target, max_shard_size="3MB")
    checked = verify(tmp_path / "out")
    assert (checked.findings, checked.num_unproven) == ((), 0)


def test_a_merge_casts_as_an_export_does_and_checks_digests(tmp_path: Path) -> None:
    state = {"w": torch.randn(300, 200, dtype=torch.float64), "n": torch.arange(4)}
    files = write_round(tmp_path / "ws", *lay_out(state, 2, 0))
    merge_checkpoint(tmp_path / "ws", tmp_path / "merged", dtype=torch.bfloat16)
    sx.export_checkpoint(state, tmp_path / "exported", dtype=torch.bfloat16)
    written, exported = (tmp_path / name / "model.safetensors" for name in ("merged", "exported"))
    assert written.read_bytes() == exported.read_bytes()
    for name in ("int8", "float8_e4m3fn", "F8_E4M3", "double trouble"):
        refuse(InvalidArgumentError, tmp_path, "dtype must be", dtype=name)
    flip_bit(files[1], -1)
    assert refuse(CorruptError, tmp_path, "digest", dtype="float16").rank == 1


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_wrappers_around_all_names_are_removed(tmp_path: Path, wrapper: str) -> None:
    state = {"model.a": torch.ones(2), "head": torch.zeros(3)}
    write_round(tmp_path / "ws", *lay_out({wrapper + name: value for name, value in state.items()}, 2, 0))
    report = merge_checkpoint(tmp_path / "ws", tmp_path / "out", rename=[("^model", "m")])
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {"m.a", "head"}
    (note,) = report.notes
    assert "wrappers" in note
    merge_checkpoint(tmp_path / "ws", tmp_path / "upper", rename=str.upper, exclude="*.head")
    assert set(load_file(tmp_path / "upper" / "model.safetensors")) == {"MODEL.A"}


def test_a_prefix_of_only_some_names_is_kept(tmp_path: Path) -> None:
    write_round(tmp_path / "ws", *lay_out({"module.a": torch.ones(2), "module": torch.ones(2)}, 1, 0))
    report = merge_checkpoint(tmp_path / "ws", tmp_path / "out")
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {"module.a", "module"}
    assert report.notes == ()


def test_a_model_inside_a_nested_state_is_reported(tmp_path: Path) -> None:
    write_round(tmp_path / "ws", *lay_out({"model.model.a": torch.ones(2), "model.lm_head": torch.ones(2)}, 1, 0))
    (note,) = merge_checkpoint(tmp_path / "ws", tmp_path / "out").notes
    assert '--rename "^model\\.="' in note
    report = merge_checkpoint(tmp_path / "ws", tmp_path / "new", rename=[(r"^model\.", "")])
    assert (report.notes, list(load_file(tmp_path / "new" / "model.safetensors"))) == ((), ["lm_head", "model.a"])
    write_round(tmp_path / "tied", *lay_out({"model.layers.0.w": torch.ones(2), "model.norm": torch.ones(2)}, 1, 0))
    assert merge_checkpoint(tmp_path / "tied", tmp_path / "hf", files_from={"config.json": "{}"}).notes == ()
