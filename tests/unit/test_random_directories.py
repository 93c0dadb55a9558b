"""Random directories: the same tensors as transformers or PEFT reads, a named refusal, or a note on the difference."""

from __future__ import annotations

import collections
import shutil
from pathlib import Path

import pytest
from random_directories import compare, draw
from sweeps import slow

BATCH = 20


@pytest.mark.parametrize("batch", [0, 1, 2, *(slow(number) for number in range(3, 150))])
def test_no_difference_from_transformers_is_silent(batch: int, tmp_path: Path) -> None:
    words: collections.Counter[str] = collections.Counter()
    faults = {}
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        steps = draw(seed, tmp_path / "source")
        comparison = compare(tmp_path / "source", tmp_path / "out")
        words[comparison.word] += 1
        if comparison.faults:
            faults[seed] = (steps, comparison.faults)
        for path in ("source", "out"):
            shutil.rmtree(tmp_path / path, ignore_errors=True)
    print(dict(words))
    assert faults == {}
