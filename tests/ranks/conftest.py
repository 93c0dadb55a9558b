"""Fixtures of several files: jobs that are killed, and saves with a copy in memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_jobs import ForkedJobs


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest) -> Iterator[ForkedJobs]:
    """Start the process of which the jobs of a test file are forks; its program is the file's `JOBS`."""
    with ForkedJobs(request.module.JOBS) as started:
        yield started


@pytest.fixture
def saves(tmp_path: Path) -> Iterator[Path]:
    """Yield a directory of saves, whose copies in memory are removed afterwards."""
    from memory_copies import copies_of

    path = tmp_path / "saves"
    yield path
    for copy in copies_of(path):
        shutil.rmtree(copy)
