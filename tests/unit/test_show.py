"""show, info and ls --rounds: configs of ranks and where they differ, rounds."""

import dataclasses
import enum
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import CommandLine, command_environment
from safetensors.numpy import save_file
from shown import held
from workspaces import write_round

import statexchange as sx
from statexchange import values
from statexchange.report.rounds import list_rounds
from statexchange.sharding.shards import Box
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
