"""show of one tensor: its values, statistics, regions and copies."""

import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from commands import CommandLine, command_environment
from safetensors.numpy import save_file
from shown import held
from stored import DATA, flip_bit, write_raw
from workspaces import write_round

import statexchange as sx
from statexchange.errors import IncompleteError
from statexchange.formats.registry import open_source
from statexchange.report.tensor_facts import tensor_facts
from statexchange.report.value_statistics import read_slice, read_statistics
from statexchange.sharding.shards import Box
from statexchange.storage.tensorfile import ShardData

pytestmark = pytest.mark.usefixtures("plain_environment")


# One tensor


def written_tensor(path: Path, name: str, dtype: str, shape: Sequence[int], data: bytes) -> dict[str, Any]:
    """Write one tensor; return its facts, statistics and values, as `show` reads them."""
    write_raw(path, {name: (dtype, shape, data)})
    with open_source(path, strict=False) as source:
        facts = tensor_facts(source, name)
        assert facts is not None
        statistics = read_statistics(facts)
        sliced = read_slice(facts, Box((0,) * len(facts.shape), facts.shape))
    return {"facts": facts, "statistics": statistics, "values": sliced}


NUMPY_DTYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "I16": np.int16,
    "U16": np.uint16,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I32": np.int32,
    "U32": np.uint32,
    "F32": np.float32,
    "F64": np.float64,
    "I64": np.int64,
    "U64": np.uint64,
}


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_statistics_of_every_dtype_are_those_of_numpy(tmp_path: Path, dtype: str) -> None:
    octets = np.random.default_rng(1).integers(0, 256, 8 * 3 * 512, np.uint8)
    if dtype == "BOOL":
        octets &= 1
    array = octets.view(NUMPY_DTYPES[dtype]).reshape(3, -1)
    found = written_tensor(tmp_path / "model.safetensors", "w", dtype, array.shape, octets.tobytes())
    with np.errstate(all="ignore"):
        wide = array.astype(np.float64)
        finite = wide[np.isfinite(wide)]
        statistics = found["statistics"]
        assert statistics.num_elements == array.size
        assert statistics.num_zeros == int((wide == 0).sum())
        assert statistics.num_nan == int(np.isnan(wide).sum())
        assert statistics.num_inf == int(np.isinf(wide).sum())
        assert (statistics.min, statistics.max) == (finite.min(), finite.max())
        if dtype != "F64":  # of random bits its sums overflow
            assert statistics.mean == pytest.approx(finite.mean(), rel=1e-9)
            assert statistics.std == pytest.approx(finite.std(), rel=1e-9)
        assert np.array_equal(np.array(found["values"], np.float64), wide, equal_nan=True)
    bins = statistics.histogram
    assert sum(one.count for one in bins) == finite.size
    assert 1 <= len(bins) <= 20
    closed = 1 if dtype == "BOOL" or dtype[0] in "IU" else 0
    for one in bins:
        inside = (finite >= one.low) & ((finite <= one.high) if closed else (finite < one.high))
        if dtype not in ("I64", "U64"):  # whose edges float64 rounds
            assert int(inside.sum()) == one.count


@pytest.mark.parametrize(
    ("dtype", "kind", "bits"),
    [("F4", "float4_e2m1fn", 4), ("F6_E2M3", "float6_e2m3fn", 6), ("F6_E3M2", "float6_e3m2fn", 6)],
)
def test_packed_values_are_decoded(tmp_path: Path, dtype: str, kind: str, bits: int) -> None:
    codes = np.arange(3 * 64, dtype=np.uint8).reshape(3, 64) % (1 << bits)
    expected = codes.view(getattr(ml_dtypes, kind)).astype(np.float32)
    stream = "".join(f"{code:0{bits}b}"[::-1] for code in codes.reshape(-1))  # lowest bits first
    data = bytes(int(stream[at : at + 8][::-1], 2) for at in range(0, len(stream), 8))
    found = written_tensor(tmp_path / "model.safetensors", "w", dtype, (3, 64), data)
    assert found["facts"].shape == (3, 64)
    assert np.array_equal(found["values"], expected)
    statistics = found["statistics"]
    assert statistics.num_elements == 192
    assert (statistics.min, statistics.max) == (expected.min(), expected.max())
    assert statistics.mean == pytest.approx(expected.mean())
    with open_source(tmp_path / "model.safetensors") as source:
        facts = tensor_facts(source, "w")
        assert facts is not None
        part = read_slice(facts, Box((1, 3), (2, 6)))  # begins and ends inside of groups
        assert np.array_equal(part, expected[1:3, 3:9])


@pytest.mark.parametrize("dtype", [*NUMPY_DTYPES, "C64"])
def test_the_value_of_a_scalar_is_in_json_for_every_dtype(tmp_path: Path, dtype: str, call: CommandLine) -> None:
    data = np.ones((), NUMPY_DTYPES.get(dtype, np.complex64)).tobytes()
    write_raw(tmp_path / "model.safetensors", {"w": (dtype, (), data)})
    code, envelope = call.json("show", tmp_path / "model.safetensors", "w")
    assert code == 0
    assert envelope["data"]["slice"]["values"] == (1 if dtype != "C64" else "(1+0j)")
    assert envelope["data"]["statistics"]["min"] == 1
    code, out, _ = call("show", tmp_path / "model.safetensors", "w")
    assert code == 0
    assert envelope["data"]["name"] in out


def test_complex_values_have_statistics_of_their_absolute_values(tmp_path: Path, call: CommandLine) -> None:
    sx.export_checkpoint({"w": np.array([3 + 4j, 0, complex("nan"), -1], np.complex64)}, tmp_path / "out")
    code, out, _ = call("show", tmp_path / "out", "w")
    assert code == 0
    assert "figures   of the absolute values" in out
    assert "max       5.0" in out
    assert "(3+4j)" in out
    _, envelope = call.json("show", tmp_path / "out", "w")
    assert envelope["data"]["slice"]["values"][0] == "(3+4j)"
    assert envelope["data"]["statistics"]["num_nan"] == 1


def test_show_prints_regions_values_and_statistics_of_a_tensor(tmp_path: Path, call: CommandLine) -> None:
    w = np.arange(12, dtype=np.float32).reshape(4, 3)
    w[3, 2] = np.nan
    save_file({"up.weight": w, "empty": np.zeros((0, 3), np.float32)}, tmp_path / "model.safetensors")
    code, out, _ = call("show", tmp_path, "up.weight", "--format", "human", "--slice", "2:, -1")
    assert code == 0
    assert out.splitlines()[:12] == [
        "name   up.weight",
        "dtype  F32",
        "shape  [4,3]",
        "bytes  48 B (48 bytes)",
        "",
        "REGION      BYTES  FILE",
        "[0:4, 0:3]   48 B  model.safetensors",
        "",
        "values [2:4, 2:3] of [4,3]",
        "  [[  8]",
        "   [nan]]",
        "",
    ]
    assert "NaN       1 (8.3%)" in out
    assert "max       10\n" in out
    _, envelope = call.json("show", tmp_path, "up.weight")
    data = envelope["data"]
    assert data["regions"] == [
        {"offsets": [0, 0], "shape": [4, 3], "holders": [0], "files": ["model.safetensors"], "nbytes": 48}
    ]
    assert data["slice"]["values"][3] == [9.0, 10.0, "nan"]
    assert data["statistics"]["num_elements"] == 12
    code, out, _ = call("show", tmp_path, "empty")
    assert code == 0
    assert "values [0:0, 0:3]: none" in out
    assert "elements  0" in out


def test_a_slice_selects_values_and_a_wrong_one_is_a_usage_error(tmp_path: Path, call: CommandLine) -> None:
    w = np.arange(2 * 3 * 500 * 400, dtype=np.int32).reshape(2, 3, 500, 400)
    save_file({"w": w}, tmp_path / "model.safetensors")

    def values_of(text: str) -> Any:
        return call.json("show", tmp_path, "w", "--slice", text)[1]["data"]["slice"]["values"]

    assert values_of("1,:2,3:5,:2") == w[1:2, :2, 3:5, :2].tolist()
    assert values_of("[-1, -1, -2:, -3:]") == w[-1:, -1:, -2:, -3:].tolist()
    assert values_of("0,0,0") == w[:1, :1, :1].tolist()
    assert values_of("5:,0,0") == []
    assert values_of("0,0, :1 ,2 : 3") == w[0, 0, :1, 2:3].reshape(1, 1, 1, 1).tolist()
    save_file({"w": np.full((), 7, np.int32)}, tmp_path / "scalar.safetensors")
    for text in ("", "[]"):
        envelope = call.json("show", tmp_path / "scalar.safetensors", "w", "--slice", text)[1]
        assert envelope["data"]["slice"]["values"] == 7
    for text, message in (
        ("0:2:1", "is not of the form 0:2,:8"),
        ("a", "is not of the form 0:2,:8"),
        ("0,,1", "is not of the form 0:2,:8"),
        ("0,0,0,0,0", "--slice is outside of the tensor, whose shape is [2,3,500,400]"),
        ("2", "--slice is outside of the tensor, whose shape is [2,3,500,400]"),
        (":", "this slice has 1,200,000 elements, and at most 100,000 are shown"),
    ):
        code, _, err = call("show", tmp_path, "w", "--slice", text)
        assert code == 2
        assert message in err
    code, _, err = call("show", tmp_path, "--slice", "0")
    assert code == 2
    assert "--slice selects values of a tensor" in err


def test_regions_are_listed_and_a_gap_or_an_overlap_is_a_problem(tmp_path: Path, call: CommandLine) -> None:
    w = np.arange(48, dtype=np.float32).reshape(8, 6)

    def part(begin: int, rows: int) -> ShardData:
        return held("w", w[begin : begin + rows], "F32", (8, 6), Box((begin, 0), (rows, 6)))

    write_round(tmp_path / "whole", [part(0, 4)], [part(0, 4)], [part(4, 4)])
    code, out, _ = call("show", tmp_path / "whole", "w")
    assert code == 0
    assert [line.split("\t")[:3] for line in out.splitlines() if "safetensors" in line] == [
        ["[0:4, 0:6]", "96", "0-1"],
        ["[4:8, 0:6]", "96", "2"],
    ]
    assert "elements  48\n" in out

    write_round(tmp_path / "gap", [part(0, 2)], [part(5, 3)])
    code, out, err = call("show", tmp_path / "gap", "w", "--slice", ":,0")
    assert code == 5
    assert "elements  30 of 48" in out
    assert "no rank holds region [2:5, 0:6]" in err
    shown = call.json("show", tmp_path / "gap", "w", "--slice", ":,0")[1]["data"]
    assert [row[0] for row in shown["slice"]["values"]] == [0.0, 6.0, None, None, None, 30.0, 36.0, 42.0]
    code, out, _ = call("show", tmp_path / "gap", "w", "--rank", 1)
    assert code == 0
    assert "elements  18 of 48" in out

    write_round(tmp_path / "twice", [part(0, 5)], [part(3, 5)])
    code, out, err = call("show", tmp_path / "twice", "w")
    assert code == 4
    assert "elements  60\n" in out  # as they are stored
    assert "claimed twice" in err


def test_copies_and_digests_that_differ_are_named(tmp_path: Path, call: CommandLine) -> None:
    whole = Box((0,), (4,))
    write_round(tmp_path / "a", *[[held("w", np.full(4, n, np.float32), "F32", (4,), whole)] for n in range(3)])
    code, _, err = call("show", tmp_path / "a", "w")
    assert code == 1
    assert "ranks 0 and 2 hold different values for region [0:4]" in err

    write_round(tmp_path / "b", [held("w", np.ones(4, np.float32), "F32", (4,), whole)])
    flip_bit(next((tmp_path / "b").glob("job/*/rank-*")), -1)
    code, _, err = call("show", tmp_path / "b", "w")
    assert code == 4
    assert "bytes differ from their digest" in err


def test_an_absent_tensor_is_not_found_and_close_names_are_suggested(tmp_path: Path, call: CommandLine) -> None:
    save_file({"model.layers.0.weight": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    code, _, err = call("show", tmp_path, "model.layers.0.wieght")
    assert code == 3
    assert "there is no tensor 'model.layers.0.wieght' among 1: did you mean 'model.layers.0.weight'?" in err
    code, _, err = call("show", tmp_path, "zzz")
    assert code == 3
    assert "ls lists all names" in err


def test_a_tensor_that_cannot_be_read_is_an_error_with_the_reason(tmp_path: Path, call: CommandLine) -> None:
    write_raw(tmp_path / "model.safetensors", {"odd": ("F7_X", (2,), b"ab"), "w": ("U8", (2,), b"ab")})
    code, _, err = call("show", tmp_path, "odd")
    assert code == 7
    assert "dtype F7_X is not supported" in err
    assert call("show", tmp_path, "w")[0] == 0
    whole = Box((0,), (2,))
    write_round(tmp_path / "ws", [held("w", np.zeros(2, np.uint8), "U8", (2,), whole)])
    file = next((tmp_path / "ws").glob("job/*/rank-*"))
    file.write_bytes(file.read_bytes()[:-1])
    code, _, err = call("show", tmp_path / "ws", "w")
    assert code == 4
    assert "truncated" in err


@pytest.mark.parametrize(
    "path",
    ["torch/dcp_safetensors", "torch/fsdp1", "trainer/sharded", "packed/torchao", "lightning", "accelerate", "verl"],
)
def test_statistics_of_every_source_are_those_of_what_open_checkpoint_reads(path: str) -> None:
    roots = [DATA / path, *(DATA / path).iterdir()]
    opened = 0
    for root in roots:
        try:
            source = open_source(root, strict=False)
        except sx.StateExchangeError:
            continue
        with source, sx.open_checkpoint(root) as checkpoint:
            for tensor_name, tensor in list(checkpoint.items())[:20]:
                facts = tensor_facts(source, tensor_name)
                if facts is None or tensor.dtype in ("F4", "?"):
                    continue
                # One rank's file of several does not cover the tensor.
                if any(isinstance(problem, IncompleteError) for problem in facts.problems):
                    with pytest.raises(IncompleteError):
                        tensor.read()
                    continue
                opened += 1
                array = tensor.read()
                statistics = read_statistics(facts)
                assert statistics.num_elements == array.size
                if array.dtype.kind != "c" and array.size:
                    wide = array.astype(np.float64)
                    assert statistics.mean == pytest.approx(wide.mean(), abs=1e-12)
                    assert statistics.max == wide.max()
    assert opened


def test_a_histogram_counts_extreme_and_equal_values(tmp_path: Path) -> None:
    def bins(*numbers: float) -> list[tuple[float, float, int]]:
        data = np.array(numbers, np.float64)
        found = written_tensor(tmp_path / "m.safetensors", "w", "F64", data.shape, data.tobytes())[
            "statistics"
        ].histogram
        return [(one.low, one.high, one.count) for one in found]

    assert bins(3.5, 3.5) == [(3.5, 3.5, 2)]
    assert bins(math.inf, math.nan) == []
    assert bins(1.7e308, -1.7e308)[0][2] == 1
    assert sum(count for *_, count in bins(1.7e308, -1.7e308, 0)) == 3
    assert sum(count for *_, count in bins(5e-324, 0, 1e-320)) == 3
    near = [1e9 + n * 2.0**-23 for n in range(5)]
    assert sum(count for *_, count in bins(*near)) == 5
    assert len(bins(*near)) > 2


@pytest.mark.parametrize("scale", [1e-308, 1e-170, 1e-120, 1.0, 1e120, 1e154, 1e200, 1.7e308])
@pytest.mark.parametrize("kind", ["spread", "equal", "zeros first", "small first", "large first"])
def test_mean_and_deviation_neither_overflow_nor_underflow(tmp_path: Path, kind: str, scale: float) -> None:
    parts = np.random.default_rng(0).uniform(-1, 1, (3, 1 << 18))  # of the size in which they are summed
    if kind == "equal":
        parts[:] = 1
    elif kind == "zeros first":
        parts[0] = 0
    elif kind in ("small first", "large first"):
        parts[0 if kind == "small first" else 2] *= 1e-250
    data = parts.reshape(-1) * scale
    write_raw(tmp_path / "m.safetensors", {"w": ("F64", data.shape, data.tobytes())})
    with open_source(tmp_path / "m.safetensors") as source:
        facts = tensor_facts(source, "w")
        assert facts is not None
        found = read_statistics(facts)
    assert found.mean is not None
    assert found.std is not None
    assert found.min is not None
    assert found.max is not None
    exact = data / scale  # of numbers near 1
    assert found.mean / scale == pytest.approx(exact.mean(), abs=1e-9)
    assert found.std / scale == pytest.approx(exact.std(), rel=1e-9, abs=1e-9)
    assert found.min <= found.mean <= found.max


def test_memory_is_bounded_whatever_the_size_of_the_tensor(tmp_path: Path) -> None:
    shape = (33, 1 << 21)  # 264 MiB, as a hole in the file
    nbytes = math.prod(shape) * 4
    text = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, nbytes]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + nbytes)
    program = (
        "import sys\nfrom statexchange.cli.main import main\n"
        f"try: main(['show', {os.fspath(tmp_path)!r}, 'w', '--json'])\n"
        "except SystemExit as ended: assert not ended.code\n"
        "print(*(line.split()[1] for line in open('/proc/self/status') if line[:6] == 'VmHWM:'), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=command_environment())
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["data"]["statistics"]["num_zeros"] == math.prod(shape)
    assert int(done.stderr.splitlines()[-1]) << 10 < 256 << 20
