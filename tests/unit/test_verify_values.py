"""``verify --values`` on files of every kind: each check with cases that fire and that must not."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from commands import CommandLine
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file
from stored import write_raw
from valued import Array, noise
from workspaces import held, write_round

import statexchange as sx
from statexchange.report.value_checks import CHECKS, ValueFindingError
from statexchange.report.verify import verify
from statexchange.sharding.shards import Box
from statexchange.storage.tensorfile import ShardData

PAGE = 4096


def value_findings(path: Path) -> list[ValueFindingError]:
    """Return what the checks of values find."""
    return [finding for finding in verify(path, checks=CHECKS).findings if isinstance(finding, ValueFindingError)]


def findings_of(path: Path) -> list[tuple[str, str]]:
    """Return the check and the tensor of each finding."""
    return [(finding.check, finding.name) for finding in value_findings(path)]


def findings_in_tensors(tmp_path: Path, **tensors: Array) -> list[tuple[str, str]]:
    """Write the tensors, with dots for `__` in their names; return the check and the tensor of each finding."""
    path = tmp_path / "model.safetensors"
    save_file({name.replace("__", "."): array for name, array in tensors.items()}, path)
    return findings_of(path)


def the_finding(path: Path) -> ValueFindingError:
    (finding,) = value_findings(path)
    return finding


def written(kind: str, folder: Path, state: dict[str, torch.Tensor]) -> Path:
    """Write a checkpoint of a kind; return its path."""
    path = folder / "checkpoint"
    if kind == "safetensors":
        save_torch_file(state, folder / "model.safetensors")
        return folder / "model.safetensors"
    if kind == "published":
        sx.export_checkpoint(state, path, max_shard_size=4 * PAGE)
    elif kind == "save":
        sx.save_checkpoint(state, path)
    elif kind == "saves":
        sx.Checkpoints(path).save(state, 7)
    elif kind == "torch.save":
        path = folder / "model.pt"
        torch.save(state, path)
    elif kind == "dcp":
        import torch.distributed.checkpoint as dcp

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


KINDS = ("safetensors", "published", "save", "torch.save", "dcp")


@pytest.mark.parametrize("kind", KINDS)
def test_the_values_of_every_kind_of_checkpoint_are_checked(kind: str, tmp_path: Path) -> None:
    state = {name: torch.from_numpy(noise(8, 1024)) for name in ("nan", "inf", "zeros", "constant", "lost", "good")}
    state["nan"][3, 5] = state["nan"][7, 1] = float("nan")
    state["inf"][2, 9] = -float("inf")
    state["zeros"].zero_()
    state["constant"].fill_(0.5)
    state["lost"].view(-1)[-1500:] = 0
    findings = {finding.name: finding for finding in value_findings(written(kind, tmp_path, state))}
    shown = {name: (one.check, one.first, one.count) for name, one in findings.items()}
    assert shown == {
        "nan": ("nan", (3, 5), 2),
        "inf": ("inf", (2, 9), 1),
        "zeros": ("all-zero", (0, 0), 8192),
        "constant": ("all-equal", (0, 0), 8192),
        "lost": ("zero-tail", (6, 548), 1500),
    }


def test_parts_of_a_workspace_are_checked_as_one_tensor(tmp_path: Path) -> None:
    def part(name: str, rank: int, values: Array) -> ShardData:
        data = values.astype(np.float32).tobytes()
        return held(name, data, dtype="F32", global_shape=(8, 1024), boxes=(Box((4 * rank, 0), (4, 1024)),))

    zeros, ones = np.zeros((4, 1024)), np.ones((4, 1024))
    bad = noise(4, 1024)
    bad[2, 3] = np.nan
    tensors_of_ranks = [
        [
            part("zeros", rank, zeros),
            part("ones", rank, ones),
            part("differ", rank, ones * (rank + 1)),
            part("lost", rank, zeros if rank else noise(4, 1024)),
            part("nan", rank, bad if rank else noise(4, 1024)),
        ]
        for rank in range(2)
    ]
    write_round(tmp_path, *tensors_of_ranks)
    findings = {finding.name: finding for finding in value_findings(tmp_path)}
    assert {name: one.check for name, one in findings.items()} == {
        "zeros": "all-zero",
        "ones": "all-equal",
        "lost": "zero-tail",
        "nan": "nan",
    }
    assert (findings["nan"].rank, findings["nan"].first, findings["nan"].count) == (1, (6, 3), 1)
    lost = findings["lost"]
    assert (lost.rank, lost.region, lost.first, lost.count) == (1, Box((4, 0), (4, 1024)), (4, 0), 4096)
    assert "of region [4:8, 0:1024] are zero" in lost.message


FLOATS = [np.float16, np.float32, np.float64, np.complex64, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2]
NAN_ONLY = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz, ml_dtypes.float8_e8m0fnu]
NAMES = {"float16": "F16", "float32": "F32", "float64": "F64", "complex64": "C64", "bfloat16": "BF16"} | {
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}


def findings_in_array(tmp_path: Path, values: Array) -> list[tuple[str, tuple[int, ...], int]]:
    """Write one array; return the check, the first index and the count of each finding."""
    path = tmp_path / "model.safetensors"
    dtype = NAMES[values.dtype.name]
    write_raw(path, {"w": (dtype, list(values.shape), values.tobytes())})
    return [(one.check, one.first, one.count) for one in value_findings(path)]


@pytest.mark.parametrize("dtype", FLOATS + NAN_ONLY, ids=lambda dtype: dtype.__name__)
def test_nan_is_found_in_every_float_dtype(dtype: Any, tmp_path: Path) -> None:
    values = noise(4, 8).astype(dtype)
    values[0, 0] = values[0, 0] * 2 if dtype is not ml_dtypes.float8_e8m0fnu else 2  # not all equal
    assert findings_in_array(tmp_path, values) == []
    values[2, 3] = values[3, 7] = np.nan
    assert findings_in_array(tmp_path, values) == [("nan", (2, 3), 2)]


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("sign", [1, -1])
def test_infinity_is_found_in_every_dtype_that_has_it(dtype: Any, sign: int, tmp_path: Path) -> None:
    values = noise(4, 8).astype(dtype)
    values[1, 1] = values[1, 2] = sign * np.inf
    assert findings_in_array(tmp_path, values) == [("inf", (1, 1), 2)]


def test_a_complex_number_is_nan_or_infinite_by_its_parts(tmp_path: Path) -> None:
    values = noise(4, 8, dtype=np.complex64)
    values[1, 1] = complex(np.nan, np.inf)
    values[2, 2] = complex(0, -np.inf)
    assert findings_in_array(tmp_path, values) == [("nan", (1, 1), 1), ("inf", (2, 2), 1)]


@pytest.mark.parametrize("dtype", FLOATS + NAN_ONLY[:3], ids=lambda dtype: dtype.__name__)
def test_zeros_are_found_in_every_float_dtype(dtype: Any, tmp_path: Path) -> None:
    values = np.zeros((4, 8), dtype)
    assert findings_in_array(tmp_path, values) == [("all-zero", (0, 0), 32)]
    if not dtype.__name__.endswith("fnuz"):
        values[1] = -0.0
        assert findings_in_array(tmp_path, values) == [("all-zero", (0, 0), 32)]
    values[3, 7] = 1
    assert findings_in_array(tmp_path, values) == []


@pytest.mark.parametrize(("dtype", "size"), [("F4", 32), ("F6_E2M3", 48), ("F6_E3M2", 48)])
def test_packed_dtypes_have_zeros_and_no_nan(dtype: str, size: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    shape = [4, 16]
    write_raw(path, {"w": (dtype, shape, bytes(range(200, 200 + size)))})
    assert findings_of(path) == []
    write_raw(path, {"w": (dtype, shape, b"\xff" * size)})
    assert findings_of(path) == []
    write_raw(path, {"w": (dtype, shape, bytes(size))})
    finding = the_finding(path)
    assert (finding.check, finding.count, finding.region) == ("all-zero", 64, Box((0, 0), (4, 16)))


def test_packed_groups_that_are_equal_are_not_equal_elements(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_raw(path, {"w": ("F4", [4, 16], b"\x12" * 32)})
    assert findings_of(path) == []


def test_zero_and_constant_values_are_no_finding_where_they_are_usual(tmp_path: Path) -> None:
    zeros, ones = np.zeros((64, 64), np.float32), np.ones(64, np.float32)
    assert (
        findings_in_tensors(
            tmp_path,
            layer__bias=np.zeros(64, np.float32),
            bn__running_mean=np.zeros(64, np.float32),
            bn__running_var=ones,
            bn__num_batches_tracked=np.zeros((), np.int64),
            norm__weight=ones,
            gate__e_score_correction_bias=np.zeros(64, np.float32),
            attention_mask=zeros,
            attn__causal_mask=np.triu(np.full((64, 64), -np.inf, np.float32), 1),
            attn__triangle=np.tri(128, dtype=np.bool_),
            position_ids=np.zeros((1, 64), np.int64),
            w__weight_scale=np.ones((64, 64), np.float32),
            w__qzeros=np.full((64, 64), 0x77777777, np.int32),
            w__g_idx=np.zeros(4096, np.int32),
            optimizer__state__w__step=np.float32([5]),
            optimizer__state__w__exp_avg=zeros,
            optimizer__state__w__exp_avg_sq=zeros,
            scalar=np.zeros((), np.float32),
            one_element=np.zeros((1, 1), np.float32),
            small=np.zeros((3, 5), np.float32),
            empty=np.zeros((0, 8), np.float32),
        )
        == []
    )


def test_zero_constant_and_nan_values_of_weights_are_findings(tmp_path: Path) -> None:
    assert findings_in_tensors(
        tmp_path,
        a__weight=np.zeros(64, np.float32),
        b__weight=np.full(64, 3, np.float32),
        c__weight=np.ones((64, 64), np.float32),
        d__bias=np.zeros((64, 64), np.float32),
        e__mask=np.full(64, np.nan, np.float32),
    ) == [
        ("all-zero", "a.weight"),
        ("all-equal", "b.weight"),
        ("all-equal", "c.weight"),
        ("all-zero", "d.bias"),
        ("nan", "e.mask"),
    ]


class TestZeroRuns:
    def test_a_tail_of_less_than_a_page_is_no_finding(self, tmp_path: Path) -> None:
        values = noise(64, 64)
        values.reshape(-1)[-1023:] = 0
        assert findings_in_tensors(tmp_path, w=values) == []

    def test_a_tail_of_a_page_is_a_finding(self, tmp_path: Path) -> None:
        values = noise(64, 64)
        values.reshape(-1)[-1024:] = 0
        assert findings_in_tensors(tmp_path, w=values) == [("zero-tail", "w")]

    def test_a_file_that_was_truncated_and_extended_has_a_zero_tail(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        save_file({"a.weight": noise(64, 64), "b.weight": noise(64, 64)}, path)
        size = path.stat().st_size
        os.truncate(path, size - 6000)
        os.truncate(path, size)
        assert findings_of(path) == [("zero-tail", "b.weight")]
        assert the_finding(path).count == 1500

    @pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight", "o.state.w.exp_avg", "wte.weight"])
    def test_rows_of_a_vocabulary_and_of_moments_may_be_zero(self, name: str, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        values = noise(64, 1024)
        values[-3:] = 0
        values[10:13] = 0
        write_raw(path, {name: ("F32", [64, 1024], values.tobytes())}, align_bytes=PAGE)
        assert findings_of(path) == []
        values[-4, 512:] = 0  # a part of a row
        write_raw(path, {name: ("F32", [64, 1024], values.tobytes())}, align_bytes=PAGE)
        assert findings_of(path) == [("zero-tail", name)]

    @pytest.mark.parametrize("num_pages", [1, 3])
    def test_pages_that_did_not_arrive_are_found(self, num_pages: int, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        begin = write_raw(path, {"w": ("F32", [2048, 1024], noise(2048, 1024).tobytes())})
        hole = (begin // PAGE + 20) * PAGE
        with path.open("r+b") as file:
            file.seek(hole)
            file.write(bytes(num_pages * PAGE))
        finding = the_finding(path)
        assert finding.check == "zero-pages"
        assert finding.count == num_pages * 1024
        assert finding.first == divmod((hole - begin) // 4, 1024)

    def test_pages_across_the_windows_of_a_read_are_found(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        begin = write_raw(path, {"w": ("F32", [2048, 1024], noise(2048, 1024).tobytes())})
        with path.open("r+b") as file:
            file.seek(((2 << 20) + begin) // PAGE * PAGE - PAGE)
            file.write(bytes(3 * PAGE))
        finding = the_finding(path)
        assert (finding.check, finding.count) == ("zero-pages", 3 * 1024)

    def test_zeros_that_are_not_pages_are_no_finding(self, tmp_path: Path) -> None:
        values = noise(64, 1024)
        values[5, 3:] = 0
        values[6, :900] = 0
        assert findings_in_tensors(tmp_path, w=values) == []

    def test_a_tail_of_zero_integers_is_a_finding_only_if_it_begins_a_page(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        values = np.arange(1, 4097, dtype=np.int32)
        values[-1300:] = 0
        write_raw(path, {"tokens": ("I32", [4096], values.tobytes())}, align_bytes=PAGE)
        assert findings_of(path) == []
        values[-2048:] = 0
        write_raw(path, {"tokens": ("I32", [4096], values.tobytes())}, align_bytes=PAGE)
        assert findings_of(path) == [("zero-tail", "tokens")]


class TestCommand:
    @staticmethod
    def bad(folder: Path) -> Path:
        values = noise(64, 64)
        values[1, 2] = np.nan
        save_file({"w": values, "z": np.zeros((8, 8), np.float32)}, folder / "model.safetensors")
        return folder / "model.safetensors"

    def test_findings_are_exit_code_1(self, tmp_path: Path, call: CommandLine) -> None:
        path = self.bad(tmp_path)
        code, out, _ = call("verify", path)
        assert code == 0
        assert "bytes not checked" in out
        code, out, _ = call("verify", path, "--values")
        assert code == 1
        lines = out.splitlines()
        assert lines[1].startswith("FINDINGS    nan: 1 of 4,096 elements is NaN, the first at [1,2] [tensor 'w', ")
        assert lines[2].startswith("FINDINGS    all-zero: all 64 elements are zero [tensor 'z', ")
        assert lines[3:] == ["2 findings"]

    def test_checks_are_left_out(self, tmp_path: Path, call: CommandLine) -> None:
        path = self.bad(tmp_path)
        code, out, _ = call("verify", path, "--values", "--without", "nan")
        assert code == 1
        assert "nan:" not in out
        code, out, _ = call("verify", path, "--values", "--without", "nan", "--without", "all-zero")
        assert code == 0
        assert "values: nothing found by inf, zero-tail, zero-pages, all-equal" in out

    def test_arguments_that_check_nothing_are_refused(self, tmp_path: Path, call: CommandLine) -> None:
        path = self.bad(tmp_path)
        code, _, err = call("verify", path, "--without", "nan")
        assert code == 2
        assert "give --values, too" in err
        assert call("verify", path, "--values", *(word for check in CHECKS for word in ("--without", check)))[0] == 2
        assert call("verify", path, "--values", "--without", "nonsense")[0] == 2

    def test_json_has_check_index_and_count_of_each_finding(self, tmp_path: Path, call: CommandLine) -> None:
        code, envelope = call.json("verify", self.bad(tmp_path), "--values")
        assert (code, envelope["code"]) == (1, "FINDINGS")
        first = envelope["data"]["findings"][0]
        assert (first["code"], first["check"], first["name"], first["first"], first["count"]) == (
            "FINDINGS",
            "nan",
            "w",
            [1, 2],
            1,
        )
        assert first["region"] == [[0, 0], [64, 64]]

    def test_a_finding_of_values_does_not_hide_a_broken_file(self, tmp_path: Path, call: CommandLine) -> None:
        state = {"w": np.zeros((64, 64), np.float32)}
        sx.export_checkpoint(state, tmp_path / "out")
        with (tmp_path / "out" / "model.safetensors").open("r+b") as file:
            file.seek(-8, os.SEEK_END)
            file.write(b"\1")
        assert call("verify", tmp_path / "out", "--values")[0] == 4

    def test_values_of_the_saves_of_a_job_are_checked(self, tmp_path: Path, call: CommandLine) -> None:
        written("saves", tmp_path, {"w": torch.zeros(64, 64)})
        assert call("verify", tmp_path / "checkpoint")[0] == 0
        code, out, _ = call("verify", tmp_path / "checkpoint", "--values")
        assert code == 1
        assert "all-zero: all 4,096 elements are zero [tensor 'w', rank 0, " in out
        assert "1 of 1 saves are whole" in out
        assert call("verify", tmp_path / "checkpoint", "--against", tmp_path)[0] == 2

    def test_a_hostile_name_is_escaped(self, tmp_path: Path, call: CommandLine) -> None:
        values = np.zeros((8, 8), np.float32)
        write_raw(tmp_path / "m.safetensors", {"\u202ew": ("F32", [8, 8], values.tobytes())})
        code, out, _ = call("verify", tmp_path / "m.safetensors", "--values")
        assert code == 1
        assert "\u202e" not in out
        assert "\\u202ew" in out
