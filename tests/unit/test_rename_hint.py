"""diff names the --rename that would match names of another prefix; it is tried here by running it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from commands import CommandLine

import statexchange as sx
from statexchange.sharding.rename_hint import suggest_rename

PARTS = [f"layers.{n}.{part}.weight" for n in range(12) for part in ("q", "k", "norm")]
PREFIXES = [
    ("", "model."),
    ("model.", ""),
    ("model.", "transformer.h."),
    ("net.", ""),
    ("net.model.", "model."),
    ("a b$(x)'.", 'q"\\.'),
    ("x=y.", ""),
]


def write(path: Path, prefix: str, names: list[str], more: list[str]) -> None:
    sx.export_checkpoint(
        {**{prefix + name: np.ones(2, np.float32) for name in names}, **dict.fromkeys(more, np.ones(1))}, path
    )


def run(call: CommandLine, *arguments: object) -> tuple[int, str]:
    """Run `diff`; return its exit code and stderr."""
    code, _, err = call("diff", *arguments)
    return code, err


@pytest.mark.parametrize(("a", "b"), PREFIXES)
def test_the_rename_that_is_named_matches_all(a: str, b: str, tmp_path: Path, call: CommandLine) -> None:
    write(tmp_path / "a", a, PARTS, [])
    write(tmp_path / "b", b, PARTS, [])
    code, err = run(call, tmp_path / "a", tmp_path / "b")
    match = re.search(r"with (--rename .*) 36 of 36 tensors of A have names that B has", err)
    assert (code, match is not None) == (1, True), err
    assert match is not None
    assert run(call, tmp_path / "a", tmp_path / "b", *shlex.split(match[1])) == (0, "")
    _, envelope = call.json("diff", tmp_path / "a", tmp_path / "b")
    assert envelope["data"]["notes"][-1] in err


def test_a_rename_is_not_suggested_for_names_that_match_already(tmp_path: Path, call: CommandLine) -> None:
    write(tmp_path / "a", "model.", PARTS, ["head.weight"])
    write(tmp_path / "b", "", PARTS[:20], ["head.weight"])
    _, err = run(call, tmp_path / "a", tmp_path / "b")
    assert "with --rename '^model\\.=' 21 of 37 tensors" in err


def test_without_a_better_prefix_there_is_no_hint() -> None:
    assert suggest_rename(PARTS, PARTS) is None
    assert suggest_rename(["a.w", "b.w"], ["x.v", "y.v"]) is None
    assert suggest_rename([], ["x"]) is None
    assert suggest_rename([*PARTS, "down.weight"], [*PARTS, "head.weight"]) is None, "two modules"
    assert suggest_rename(PARTS[:6], PARTS[3:9]) is None, "two layers"
    assert suggest_rename(["x.a.w", *(f"y.{n}.w" for n in range(9))], ["a.w", *(f"z.{n}.v" for n in range(9))]) is None
    assert suggest_rename(["model.a.w", "a.w"], ["a.w"]) is None, "two tensors would have one name"
    assert suggest_rename(["a.w", "model.a.v"], ["a.w"]) is None
    assert suggest_rename(["a.b.w"], ["x=y.b.w"]) is None, "the option could not be parsed"


def test_a_rename_is_found_among_many_long_names() -> None:
    names = [f"layers.{n}.{'x' * 200}.weight" for n in range(20_000)]
    found = suggest_rename((f"model.{name}" for name in names), names)
    assert found == ("^model\\.", "", 20_000)
