"""show, info and ls --rounds: configs of ranks and where they differ, rounds, one tensor with its values."""

import dataclasses
import enum
import json
import math
import os
import random
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
from stored import DATA, flip_bit, write_raw
from workspaces import write_round

import statexchange as sx
from statexchange import values
from statexchange.errors import IncompleteError
from statexchange.formats.registry import open_source
from statexchange.report.rounds import list_rounds
from statexchange.report.tensor_facts import tensor_facts
from statexchange.report.value_statistics import read_slice, read_statistics
from statexchange.sharding.shards import Box, Shard
from statexchange.storage.tensorfile import ShardData
from statexchange.storage.workspace import Workspace

pytestmark = pytest.mark.usefixtures("plain_environment")
HOSTILE = "evil\x1b]0;title\x07\x1b[2J\nrank 9: 1\u202e"


class Dtype(enum.Enum):
    BF16 = 1


@dataclasses.dataclass
class Model:
    hidden: int
    dtype: Dtype


@dataclasses.dataclass
class Train:
    layers: int
    model: Model
    offset: int


def write_rank(
    path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int, configs: Sequence[object]
) -> None:
    """Write a round for each config, as a process of the rank does."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    workspace = sx.NFSWorkspace(path, run="job")
    for config in configs:
        workspace.write_configs_and_weights(config, {f"w{rank}": np.full((2, 3), rank, np.float32)})
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")


def config_of(rank: int) -> Train:
    return Train(3, Model(8, Dtype.BF16), 4 * (rank // 2))


def held(name: str, data: Any, dtype: str, shape: Sequence[int], box: Box) -> ShardData:
    shard = Shard(name, dtype, tuple(shape), (box,))
    return ShardData(shard, (np.ascontiguousarray(data),))


# The commands info and ls --rounds


def test_info_shows_how_far_each_rank_of_a_workspace_is(
    tmp_path: Path, call: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(4):
        write_rank(tmp_path, monkeypatch, rank, 5, [config_of(rank)] * (2 if rank == 3 else 3))
    code, out, err = call("info", tmp_path)
    assert code == 5
    assert "[3, 4] of 5 have no file" in err
    lines = {line.split("  ")[0]: line for line in out.splitlines() if line.startswith("rank ")}
    assert list(lines) == [f"rank {rank}" for rank in range(5)]
    assert "round 3, written 20" in lines["rank 0"]
    assert "3 config keys (Train)" in lines["rank 0"]
    assert "late" not in lines["rank 0"]
    assert "round 2, late, written" in lines["rank 3"]
    assert lines["rank 4"].endswith("  missing")
    _, envelope = call.json("info", tmp_path)
    statuses = envelope["data"]["rank_statuses"]
    assert [status["status"] for status in statuses] == ["present"] * 3 + ["late", "missing"]
    assert [status["round"] for status in statuses] == [3, 3, 3, 2, None]
    assert statuses[0]["nbytes"] == os.path.getsize(statuses[0]["path"])
    assert statuses[0]["written"] == pytest.approx(os.path.getmtime(statuses[0]["path"]))
    assert (statuses[0]["num_config_keys"], statuses[0]["config_type"]) == (3, "Train")
    assert (statuses[4]["path"], statuses[4]["config_type"]) == (None, None)


def test_info_of_a_checkpoint_without_ranks_has_no_status_of_ranks(tmp_path: Path, call: CommandLine) -> None:
    save_file({"w": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    _, envelope = call.json("info", tmp_path)
    assert envelope["data"]["rank_statuses"] == []


def test_ls_lists_the_rounds_of_a_workspace(tmp_path: Path, call: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, rounds in ((0, 3), (1, 2)):
        write_rank(tmp_path, monkeypatch, rank, 3, [config_of(rank)] * rounds)
    folder = tmp_path / "job" / "000003"
    (folder / ".tmp-0123456789abcdef").write_bytes(b"half")
    file = next((tmp_path / "job" / "000001").glob("rank-00001-*"))
    file.write_bytes(b"broken")
    code, out, err = call("ls", tmp_path, "--rounds")
    rows = [line.split("\t") for line in out.splitlines()]
    assert rows[0] == ["RUN", "ROUND", "RANK", "WRITTEN", "BYTES", "STATE"]
    # Rank 0 has removed its file of round 1, and is not said to lack it.
    assert [(row[1], row[2], row[5]) for row in rows[1:]] == [
        ("1", "1", "broken"),
        ("1", "2", "missing"),
        ("2", "0", "whole"),
        ("2", "1", "whole"),
        ("2", "2", "missing"),
        ("3", "0", "whole"),
        ("3", "1", "missing"),
        ("3", "2", "missing"),
        ("3", "-", "unfinished"),
    ]
    assert (rows[1][4], rows[-1][4]) == ("6", "4")
    assert code == 4
    assert os.fspath(file) in err
    _, envelope = call.json("ls", tmp_path / "job" / "000002", "--rounds")
    rounds = envelope["data"]["rounds"]
    assert {row["round"] for row in rounds} == {2}
    assert rounds[0]["config"] == {"num_keys": 3, "type": "Train"}
    assert rounds[2]["nbytes"] is None


def test_rounds_show_files_that_are_missing_or_broken(tmp_path: Path, call: CommandLine) -> None:
    whole = Box((0,), (2,))
    write_round(tmp_path, *[[held("w", np.zeros(2, np.uint8), "U8", (2,), whole)]] * 3)
    report = list_rounds(tmp_path)
    assert [(row.rank, row.state) for row in report.rows] == [(n, "whole") for n in range(3)]
    next(tmp_path.glob("job/*/rank-00001-*")).unlink()
    with next(tmp_path.glob("job/*/rank-00002-*")).open("ab") as file:
        file.write(b"more")
    code, out, err = call("ls", tmp_path, "--rounds")
    assert code == 4
    assert [line.split("\t")[5] for line in out.splitlines()[1:]] == [
        "whole",
        "missing",
        "broken",
    ]
    assert "file has bytes after the last tensor" in err


def test_a_round_of_a_huge_world_size_is_shown_as_a_short_list(tmp_path: Path, call: CommandLine) -> None:
    Workspace(tmp_path).write([], run="job", round=1, rank=0, world_size=900_000_000)
    code, out, err = call("ls", tmp_path, "--rounds")
    assert code == 0
    assert len(out.splitlines()) == 1002
    assert "899,998,999 more ranks have no file in round 1 of run job" in err


def test_rounds_of_what_is_no_workspace_are_a_usage_error(tmp_path: Path, call: CommandLine) -> None:
    save_file({"w": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    code, _, err = call("ls", tmp_path, "--rounds")
    assert code == 2
    assert "not a workspace: only workspaces have rounds" in err
    assert call("ls", tmp_path, "--rounds", "-i", "*")[0] == 2
    assert call("ls", tmp_path / "absent", "--rounds")[0] == 3


# Configs


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for rank in range(4):
        write_rank(tmp_path / "ws", monkeypatch, rank, 4, [config_of(0), config_of(rank)])
    return tmp_path / "ws"


def test_configs_are_shown_in_common_and_where_ranks_differ(workspace: Path, call: CommandLine) -> None:
    code, out, _ = call("show", workspace)
    assert code == 0
    assert out.splitlines() == [
        f"{workspace}: workspace, run job, round 2, configs of 4 of 4 ranks",
        "",
        "in common on all ranks (0-3)",
        "  layers: 3",
        "  model: Model",
        "    hidden: 8",
        "    dtype: Dtype",
        "      value: 1",
        "",
        "where ranks differ",
        "  offset",
        "    ranks 0-1: 0",
        "    ranks 2-3: 4",
    ]
    _, envelope = call.json("show", workspace)
    data = envelope["data"]
    assert [config["ranks"] for config in data["configs"]] == [[0, 1], [2, 3]]
    assert data["configs"][1]["config"]["offset"] == 4
    assert data["common"] == {
        "__name__": "Train",
        "layers": 3,
        "model": {"__name__": "Model", "hidden": 8, "dtype": {"__name__": "Dtype", "value": 1}},
    }
    assert data["differing"] == [
        {
            "key": "offset",
            "values": [
                {"ranks": [0, 1], "is_present": True, "value": 0},
                {"ranks": [2, 3], "is_present": True, "value": 4},
            ],
        }
    ]


def test_show_takes_a_rank_and_the_directory_of_a_round(workspace: Path, call: CommandLine) -> None:
    code, out, _ = call("show", workspace, "--rank", 3)
    assert code == 0
    assert "rank 3\n  layers: 3\n" in out
    assert "  offset: 4\n" in out
    assert "differ" not in out
    code, out, _ = call("show", workspace / "job/000001")
    assert code == 0
    assert ", round 1," in out
    assert "differ" not in out
    code, _, err = call("show", workspace, "--rank", 4)
    assert code == 3
    assert "rank 4 has no file here; these ranks have: 0-3" in err
    assert call("show", workspace / "job/000007")[0] == 3


def test_absent_keys_lists_and_equal_numbers_of_other_types_differ(
    tmp_path: Path, call: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rank(tmp_path, monkeypatch, 0, 2, [{"a": 1, "x": [{"n": 1}, {"n": 2}], "nan": float("nan"), "t": (1, 2)}])
    write_rank(tmp_path, monkeypatch, 1, 2, [{"a": True, "x": [{"n": 1}, {"n": 3}], "nan": float("nan"), "b": None}])
    code, out, _ = call("show", tmp_path)
    assert code == 0
    common, differing = out.split("where ranks differ\n")
    assert "  nan: nan\n" in common
    assert "    [0]:\n      n: 1\n" in common
    assert differing == (
        "  a\n    rank 0: 1\n    rank 1: True\n"
        "  x[1].n\n    rank 0: 2\n    rank 1: 3\n"
        "  t\n    rank 0: (1, 2)\n    rank 1: (no such key)\n"
        "  b\n    rank 0: (no such key)\n    rank 1: None\n"
    )


def test_values_of_every_kind_become_values_of_json() -> None:
    import datetime as dt
    import pathlib

    value = {
        "set": {3},
        "path": pathlib.PurePosixPath("/a"),
        "date": dt.date(2026, 5, 31),
        "span": dt.timedelta(seconds=3),
        "bytes": b"\x00",
        "complex": 1 + 2j,
        "float": float("-inf"),
        "number": np.float32(0.5),
        "keys": {1: "a", "1": "b", (2, 3): "c"},
    }
    plain = values.to_plain(json.loads(values.encode(value)))
    assert plain == {
        "set": [3],
        "path": "/a",
        "date": "2026-05-31",
        "span": "0:00:03",
        "bytes": "b'\\x00'",
        "complex": "(1+2j)",
        "float": float("-inf"),
        "number": 0.5,
        "keys": {"1": "a", "'1'": "b", "(2, 3)": "c"},
    }
    with pytest.raises(ValueError, match="unknown value tag"):
        values.to_plain({"$": "code"})


def test_a_save_shows_its_state_with_the_names_of_tensors(tmp_path: Path, call: CommandLine) -> None:
    pytest.importorskip("torch")
    sx.save_checkpoint({"model": {"w": np.ones((2, 2), np.float32)}, "step": 7}, tmp_path / "save")
    code, out, _ = call("show", tmp_path / "save")
    assert code == 0
    assert "    w: tensor model.w\n" in out
    assert "  step: 7\n" in out


def test_a_state_of_the_greatest_depth_is_shown_and_loaded(tmp_path: Path, call: CommandLine) -> None:
    state: Any = np.float32(0.5)
    for number in range(values.MAX_DEPTH - 2):
        state = {number: state} if number % 2 else (state,)
    sx.save_checkpoint({"a": state}, tmp_path / "out")
    code, out, _ = call("show", tmp_path / "out")
    assert code == 0
    assert "0.5" in out
    assert call.json("show", tmp_path / "out")[0] == 0
    loaded: Any = {"a": None}
    sx.load_checkpoint(loaded, tmp_path / "out")
    assert loaded["a"] == state


def test_long_values_are_cut_on_a_terminal_only(tmp_path: Path, call: CommandLine) -> None:
    state = {
        "generator": random.Random(1).getstate(),
        "octets": bytes(range(250)) * 20,
        "text": "y" * 10_000,
        "path": "/" + "p" * 280,
        "pairs": [[n, n] for n in range(3000)],
        "w": np.ones(2, np.float32),
    }
    sx.save_checkpoint(state, tmp_path / "save")
    code, out, _ = call("show", tmp_path / "save", "--format", "human")
    lines = out.splitlines()
    assert code == 0
    assert max(map(len, lines)) < 310
    found = {line.split(":")[0].strip(): line for line in lines}
    assert "    [1]: (" in out
    assert "... (625 items; a pipe or --json has all)" in out
    assert found["text"] == f"  text: '{'y' * 59}... (10,000 characters; a pipe or --json has all)"
    assert len(found["octets"]) < 140
    assert found["path"] == f"  path: '{state['path']}'"
    _, piped, _ = call("show", tmp_path / "save")
    assert "has all" not in piped
    assert "y" * 10_000 in piped
    assert "[2999]: [2999, 2999]" in piped


def test_show_prints_what_a_source_without_configs_has(tmp_path: Path, call: CommandLine) -> None:
    import torch

    hf = tmp_path / "hf"
    hf.mkdir()
    save_file({"w": np.zeros(3, np.float32)}, hf / "model.safetensors", metadata={"format": "pt"})
    (hf / "config.json").write_text('{"model_type": "llama", "rope": {"theta": 1e4}}')
    code, out, _ = call("show", hf)
    assert code == 0
    assert "config.json\n  model_type: 'llama'\n  rope:\n    theta: 10000.0\n" in out
    assert "metadata\n  format: 'pt'\n" in out
    _, envelope = call.json("show", hf)
    assert envelope["data"]["model_config"]["rope"] == {"theta": 10000.0}

    torch.save({"model": {"w": torch.ones(2)}, "step": 7}, tmp_path / "a.pt")
    code, out, _ = call("show", tmp_path / "a.pt")
    assert code == 0
    assert "entries that are not tensors\n  step: 7\n" in out
    code, out, _ = call("show", tmp_path / "a.pt", "step")
    assert (code, out) == (0, "not a tensor:\n  step: 7\n")

    plain = tmp_path / "plain.safetensors"
    save_file({"w": np.zeros(3, np.float32)}, plain)
    code, out, err = call("show", plain)
    assert (code, out) == (0, f"{plain}: huggingface\n")
    assert "nothing but tensors is here, no config: `ls` lists them, and `show PATH NAME` shows one" in err


def test_hostile_configs_and_names_are_escaped(
    tmp_path: Path, call: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rank(tmp_path / "ws", monkeypatch, 0, 2, [{HOSTILE: HOSTILE, "same": 1}])
    write_rank(tmp_path / "ws", monkeypatch, 1, 2, [{HOSTILE: 1, "same": 1}])
    (tmp_path / "hf").mkdir()
    save_file({"w": np.zeros(3, np.float32)}, tmp_path / "hf" / "model.safetensors", metadata={HOSTILE: HOSTILE})
    (tmp_path / "hf" / "config.json").write_text(json.dumps({HOSTILE: [HOSTILE]}))
    for path in ("ws", "hf"):
        code, out, err = call("show", tmp_path / path)
        assert code == 0
        assert all(char.isprintable() or char == "\n" for char in out + err)
        assert "\nrank 9: 1" not in out
        assert "evil" in out
    code, _, err = call("show", tmp_path / "hf", HOSTILE)
    assert code == 3
    assert "\x1b" not in err
    call.json("show", tmp_path / "ws")


def test_a_broken_config_is_corrupt(tmp_path: Path, call: CommandLine) -> None:
    write_round(tmp_path, [], config='{"$": "dtype"}')
    code, _, err = call("show", tmp_path)
    assert code == 4
    assert "broken config" in err
    code, out, _ = call("ls", tmp_path, "--rounds")
    assert (code, out.splitlines()[1].split("\t")[5]) == (4, "broken")


def test_show_and_info_of_configs_import_neither_torch_nor_numpy(workspace: Path) -> None:
    for words, loaded in ((["show"], ""), (["info"], ""), (["show", "w0"], "numpy")):
        command, *names = words
        arguments = [command, os.fspath(workspace), *names]
        program = (
            f"import sys\nfrom statexchange.cli.main import main\ntry: main({arguments!r})\n"
            "except SystemExit as ended: assert not ended.code\n"
            "print(*{'torch', 'numpy'} & set(sys.modules), file=sys.stderr)"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env=command_environment()
        )
        assert (done.returncode, done.stderr) == (0, f"{loaded}\n")


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
