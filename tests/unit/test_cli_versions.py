"""The command line over a directory of weight versions: `ls`, `verify` and `prune`, and a version as any checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from commands import CommandLine
from json_schemas import validator
from shared_form import SharedFormWriter, changed, random_tensors
from stored import flip_bit

import statexchange as sx
from statexchange.cli.output import EXIT_CODES
from statexchange.storage import versions


@pytest.fixture
def published(tmp_path: Path, plain_environment: None) -> Path:
    """Return a directory with two runs of three versions each."""
    path = tmp_path / "updates"
    for _ in range(2):
        weights = {"w": np.zeros((30, 20), np.float32), "b": np.zeros(4, np.float32)}
        with sx.Publisher(path) as publisher:
            for number in (1, 2, 3):
                publisher.publish(weights, number)
                weights["w"][number] += 1
    return path


def run_of(path: Path) -> Path:
    return path / versions.list_runs(str(path))[-1]


def test_ls_lists_runs_and_versions(published: Path, call: CommandLine) -> None:
    code, out, _ = call("ls", published)
    assert code == 0
    rows = [line.split("\t") for line in out.splitlines()]
    assert rows[0] == ["RUN", "VERSION", "TIME", "BYTES", "KIND", "STATE"]
    assert [row[1] for row in rows[1:]] == ["1", "2", "3"] * 2
    assert [row[4:] for row in rows[4:]] == [
        ["full", "whole"],
        ["delta of 1, 1 tensor", "whole"],
        ["delta of 2, 1 tensor", "whole"],
    ]


@pytest.mark.parametrize("command", [["ls"], ["verify"], ["prune", "--keep", "1"]])
def test_the_json_is_that_of_the_schema(published: Path, call: CommandLine, command: list[str]) -> None:
    _, out, _ = call(*command, published, "--json")
    record = json.loads(out)
    validator(f"{command[0]}.json").validate(record)
    assert len(record["data"]["versions"]) == 6


def test_a_broken_version_decides_the_exit_code(published: Path, call: CommandLine) -> None:
    (file,) = (run_of(published) / "weight_v000002").glob("*.safetensors")
    flip_bit(file, -3)
    assert call("ls", published)[0] == 0  # headers alone are read
    code, out, _ = call("verify", published)
    assert code == EXIT_CODES["CORRUPT"]
    assert "4 of 6 versions are whole" in out  # the next version is based on it
    shutil.rmtree(run_of(published) / "weight_v000001")
    code, out, _ = call("ls", published)
    assert code == EXIT_CODES["INCOMPLETE"]
    assert out.count("incomplete") == 2


@pytest.mark.parametrize("left", [(), ("notes.txt",)])
def test_a_version_that_was_emptied_is_a_finding(left: tuple[str, ...], published: Path, call: CommandLine) -> None:
    folder = max(run_of(published).glob("weight_v*"))
    for file in folder.iterdir():
        file.unlink()
    for name in left:
        (folder / name).write_text("")
    code, out, _ = call("verify", published)
    assert code != 0
    assert "of 6 versions are whole" in out


def test_prune_retires_and_then_removes(published: Path, call: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = call("prune", published, "--keep", "1", "--dry-run")
    assert code == 0
    assert out.count("would be retired") == 3
    assert call("prune", published, "--keep", "1")[1].count("retired") == 3
    assert len(list(published.glob("*/weight_v*"))) == 6
    monkeypatch.setattr("statexchange.checkpoint.version_retention.GRACE_S", 0.0)
    assert call("prune", published, "--keep", "1")[1].count("removed") >= 3
    assert len(list(published.glob("*/weight_v*"))) == 3  # the newest, and what it is based on
    assert call("verify", published)[0] == 0


def test_a_delta_is_a_checkpoint_as_any_other(published: Path, call: CommandLine, tmp_path: Path) -> None:
    run = run_of(published)
    assert "version" in call("info", run / "weight_v000003")[1]
    assert call("verify", run / "weight_v000003")[0] == 0
    assert call("diff", run / "weight_v000002", run / "weight_v000003")[0] == EXIT_CODES["FINDINGS"]
    assert call("merge", run / "weight_v000003", tmp_path / "merged")[0] == 0
    assert call("diff", run / "weight_v000003", tmp_path / "merged")[0] == 0


def test_versions_of_others_are_listed(tmp_path: Path, call: CommandLine) -> None:
    rng = np.random.default_rng(3)
    writer, tensors = SharedFormWriter(tmp_path), random_tensors(rng, 4)
    writer.write_full(1, tensors)
    writer.write_delta(2, 1, tensors, changed(rng, tensors, 0.1))
    code, out, _ = call("ls", tmp_path)
    assert code == 0
    assert [line.split("\t")[:2] for line in out.splitlines()[1:]] == [["-", "1"], ["-", "2"]]
    assert call("verify", tmp_path)[0] == 0


@pytest.mark.parametrize(
    "options", [["ls", "--include", "w"], ["verify", "--against", "x"], ["prune", "--keep", "1", "--keep-every", "2"]]
)
def test_options_of_other_directories_are_usage_errors(published: Path, call: CommandLine, options: list[str]) -> None:
    assert call(*options, published)[0] == EXIT_CODES["USAGE"]
