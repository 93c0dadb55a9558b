"""Fuzz every reader and command with changed sources of every kind: a few cases by default, more under `slow`."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest
from mutate import mutated_pickle
from mutate_json import mutated_json
from pickled import pairs
from sweeps import slow
from warm_python import warm_python

import statexchange

HOME = os.fspath(Path(statexchange.__file__).parents[1])


@pytest.mark.parametrize("options", [["--cases", "3", "--quick"], slow(["--cases", "100"])], ids=["few", "many"])
def test_every_changed_source_has_a_named_outcome(tmp_path: Path, options: list[str]) -> None:
    program = Path(__file__).with_name("__main__.py")
    command = [warm_python(), program, "--seed", "14", "--findings", tmp_path, *options]
    environment = {**os.environ, "PYTHONPATH": HOME}
    done = subprocess.run(command, capture_output=True, text=True, timeout=230, env=environment, check=False)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert "\n0 findings in " in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_equal_random_numbers_make_equal_changes() -> None:
    for mutator, source in ((mutated_json, '{"a":[1,"{}"],"b":{"c":null}}'), (mutated_pickle, pairs(5))):
        found = [[mutator(source, random.Random(number)) for number in range(50)] for _ in range(2)]
        assert found[0] == found[1]
        assert len({str(new) for new, _ in found[0]}) > 25
