"""`info` and `verify` over a directory of a job's saves."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command_saves import (
    DAMAGES,
    STEPS,
    Paused,
    all_bytes,
    break_manifest,
    folder,
    local_time,
    manifest,
    rank_file,
)
from commands import CommandLine
from stored import flip_bit

import statexchange as sx
from statexchange.cli.output import EXIT_CODES
from statexchange.units import format_bytes

# info


def test_info_of_one_step_has_its_step_time_metrics_and_job(saved: Path, call: CommandLine) -> None:
    code, out, _ = call("info", folder(saved, 200))
    assert code == 0
    fields = dict(re.split(r"  +", line, maxsplit=1) for line in out.splitlines())
    assert fields["kind"] == "save"
    assert fields["step"] == "200"
    assert fields["saved"] == local_time(saved, 200)
    assert fields["metrics"] == "loss 0.125"
    assert fields["job"] == manifest(saved, 200)["job"]
    assert fields["ranks"] == "2 of 2: 0-1"
    assert fields["tensors"] == "2"
    assert not fields.keys() & {"run", "round"}
    _, envelope = call.json("info", folder(saved, 300))
    data = envelope["data"]
    assert (data["kind"], data["step"], data["metrics"], data["ranks"]) == ("save", 300, {"loss": "nan"}, [0, 1])
    assert data["created"] == manifest(saved, 300)["created"]


def test_info_of_a_save_without_a_step_leaves_it_out(saved: Path, call: CommandLine) -> None:
    sx.save_checkpoint({"w": np.zeros(2)}, saved.parent / "alone")
    code, out, _ = call("info", saved.parent / "alone")
    keys = {line.split()[0] for line in out.splitlines()}
    assert code == 0
    assert keys >= {"saved", "job", "ranks"}
    assert not keys & {"step", "metrics", "run", "round"}


def test_info_of_a_directory_of_saves_is_a_summary(
    saved: Path, call: CommandLine, paused: Callable[[int, str], Paused]
) -> None:
    paused(500, "save").kill()
    code, out, _ = call("info", saved)
    assert code == 0
    assert out.splitlines() == [
        "kind        saves",
        f"path        {saved}",
        "saves       4: steps 100, 200, 300, 400",
        f"newest      step 400, saved {local_time(saved, 400)}, whole",
        f"bytes       {format_bytes(all_bytes(saved))} ({all_bytes(saved):,} bytes)",
        "unfinished  1: step 500 (killed)",
    ]
    _, envelope = call.json("info", saved)
    data = envelope["data"]
    assert (data["kind"], data["num_saves"], data["steps"], data["nbytes"]) == (
        "saves",
        4,
        list(STEPS),
        all_bytes(saved),
    )
    assert (data["newest"]["step"], data["newest"]["state"], data["num_broken"]) == (400, "whole", 0)
    assert [row["state"] for row in data["unfinished"]] == ["killed"]


def test_info_names_broken_saves_and_the_state_of_the_newest(saved: Path, call: CommandLine) -> None:
    rank_file(saved, 400, 1).unlink()
    break_manifest(saved)
    code, out, err = call("info", saved)
    assert code == 4
    assert err.count("warning: ") == 2
    assert re.search(r"^newest +step 400, saved \S+, rank 1 lacks a file$", out, re.MULTILINE)
    assert re.search(r"^broken +2: step 200 \(broken manifest\), step 400 \(rank 1 lacks a file\)$", out, re.MULTILINE)


# verify


def test_verify_checks_every_save_in_one_line_each(saved: Path, call: CommandLine) -> None:
    code, out, err = call("verify", saved)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) == 5
    for line, step in zip(lines, STEPS, strict=False):
        assert re.fullmatch(rf"step {step}: 2 tensors, 80 B in \S+ s: ok", line)
    assert lines[-1] == "4 of 4 saves are whole"


def test_verify_finds_a_flipped_bit_that_ls_does_not_read(saved: Path, call: CommandLine) -> None:
    flip_bit(rank_file(saved, 300, 0), -1)
    assert call("ls", saved)[0] == 0
    code, out, _ = call("verify", saved)
    assert code == 4
    assert re.search(r"^step 300: .*: 1 finding\nCORRUPT +bytes differ from their digest.*rank 0", out, re.MULTILINE)
    assert out.endswith("3 of 4 saves are whole\n")
    code, out, _ = call("verify", folder(saved, 200))
    assert (code, out.splitlines()[-1]) == (0, "ok: every element is there exactly once, every digest agrees")


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_verify_goes_on_after_a_broken_save(saved: Path, call: CommandLine, damage: Callable[[Path], None]) -> None:
    damage(saved)
    code, envelope = call.json("verify", saved)
    data = envelope["data"]
    assert code == EXIT_CODES[DAMAGES[damage][1]]
    assert (data["num_saves"], data["num_whole"]) == (4, 3)
    assert [row["code"] == "OK" for row in data["saves"]] == [True, False, True, True]
    assert data["saves"][1]["findings"]
    assert data["saves"][0]["findings"] == []
