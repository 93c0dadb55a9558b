"""Fixtures of several files: sources of commands, a workspace, the saves of a job, samples of Megatron."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from archives import unpack
from command_runs import rank_tensors
from command_saves import Paused, pausing, save_steps
from common_sources import make_sources
from stored import DATA
from workspace_writers import write_value
from workspaces import write_round


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of `make_sources`, which tests leave as it is."""
    root = tmp_path_factory.mktemp("made")
    make_sources(root)
    return root


# A workspace


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Return the files of four ranks in a workspace."""
    return write_round(tmp_path / "ws", *map(rank_tensors, range(4)))


@pytest.fixture
def workspace(tmp_path: Path, files: list[Path]) -> Path:
    """Return the directory of `files`."""
    return tmp_path / "ws"


@pytest.fixture(scope="session")
def two_rounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a workspace with two rounds, which tests copy."""
    path = tmp_path_factory.mktemp("template") / "ws"
    for value in (1, 2):
        write_value(path, value)
    return path


# The saves of a job


@pytest.fixture(scope="session")
def saved_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the saves of `save_steps`, which tests leave as they are."""
    path = tmp_path_factory.mktemp("job") / "saved"
    save_steps(path)
    return path


@pytest.fixture
def saved(saved_steps: Path, tmp_path: Path, plain_environment: None) -> Path:
    """Return a copy of the saves."""
    path = tmp_path / "saved"
    shutil.copytree(saved_steps, path)
    return path


@pytest.fixture
def paused(saved: Path) -> Iterator[Callable[[int, str], Paused]]:
    """Return a function that starts a process over the copy of the saves, which pauses; kill it afterwards."""
    with pausing(saved) as start:
        yield start


# What Megatron-Core wrote


@pytest.fixture(scope="session")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the samples, as torch_dist and as mp_rank directories; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("megatron")
    for archive in (DATA / "megatron").glob("*.tar.xz"):
        unpack(archive, folder / archive.name.partition(".")[0])
    return folder


@pytest.fixture
def torch_dist(megatron: Path, tmp_path: Path) -> Path:
    """Return a copy of a sample in the format torch_dist."""
    return Path(shutil.copytree(megatron / "tp2_pp2/torch_dist", tmp_path / "torch_dist"))


@pytest.fixture
def legacy(megatron: Path, tmp_path: Path) -> Path:
    """Return a copy of the same run's sample of mp_rank directories."""
    return Path(shutil.copytree(megatron / "tp2_pp2/legacy", tmp_path / "legacy"))
