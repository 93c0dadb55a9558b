"""Directories that programs read wrongly, from public issues: what a person wants, and what transformers reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_directories import run
from model_rows import ROWS, Row


@pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))
def test_a_directory_is_read_as_a_person_wants_it(row: Row, tmp_path: Path) -> None:
    assert run(row, tmp_path).faults == []


def test_each_row_names_its_origin_and_says_what_a_person_wants() -> None:
    assert len(ROWS) >= 40
    for row in ROWS.values():
        assert row.origin.count("/") == 1
        assert row.make.__doc__
