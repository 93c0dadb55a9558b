"""File systems of a server: mount options that break promises are named, and files that are gone there."""

from __future__ import annotations

import errno
import gc
import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import statexchange as sx
from statexchange.errors import StorageError
from statexchange.report.verify import verify
from statexchange.storage import mounts
from statexchange.storage.workspace import Workspace


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    sx.export_checkpoint({"w": np.ones(3)}, tmp_path / "out")
    return tmp_path / "out"


def mount(path: Path, kind: str, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let mountinfo list `path` as a mount of this kind, which no file system was asked about yet."""
    root = "1 0 0:1 / / rw - ext4 /dev/vda rw\n"
    here = f"36 1 0:40 / {path} rw,relatime shared:1 - {kind} server:/export {options}\n"
    monkeypatch.setattr(mounts, "_mounts", lambda: mounts._parsed((root + here).encode()))
    monkeypatch.setattr(mounts, "_looked_at", set())


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        ("nfs", "rw,vers=3,nolock,local_lock=all", ["nolock"]),
        ("nfs4", "rw,vers=4.2,nocto", ["nocto"]),
        ("nfs", "rw,vers=3,nocto,nolock", ["nocto", "nolock"]),
        ("nfs4", "rw,vers=4.2", []),
        ("ext4", "rw,nolock", []),
    ],
)
def test_options_that_break_promises_are_named_once(
    kind: str,
    options: str,
    named: list[str],
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """H5."""
    mount(checkpoint.parent, kind, options, monkeypatch)
    with caplog.at_level(logging.WARNING, "statexchange"):
        for number in range(3):
            sx.open_checkpoint(checkpoint).close()
            sx.export_checkpoint({"w": np.ones(3)}, checkpoint.parent / f"other-{number}")
    texts = [record.getMessage() for record in caplog.records]
    assert [text.partition(": mounted with ")[0] for text in texts] == [str(checkpoint.parent)] * len(named)
    assert [text.partition(": mounted with ")[2].split()[0].rstrip(":") for text in texts] == named


def test_a_writer_changes_its_directories_once_more_after_a_tick_of_the_servers_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H2: of two changes within one tick a client that listed between them would never see the second."""
    mount(tmp_path, "nfs", "rw,vers=3", monkeypatch)
    tick_ns = 20_000_000
    workspace = Workspace(tmp_path / "ws")
    receipt = workspace.write([], run="job", round=1, rank=0, world_size=1)
    file = tmp_path / "ws" / receipt.relative
    for directory in (file.parent, file.parent.parent):
        assert directory.stat().st_mtime_ns - file.stat().st_ctime_ns > tick_ns
    workspace.commit([receipt], keep=2)
    manifest = file.with_name("manifest.json")
    assert file.parent.stat().st_mtime_ns - manifest.stat().st_ctime_ns > tick_ns
    for value in (1, 2):
        sx.export_checkpoint({"w": np.full(3, value)}, tmp_path / "out", overwrite=True)
        assert tmp_path.stat().st_mtime_ns - (tmp_path / "out").stat().st_ctime_ns > tick_ns


READERS = {
    "open": lambda path: sx.open_checkpoint(path)["w"].read(),
    "load": lambda path: sx.load_checkpoint({"w": np.zeros(3)}, path),
    "verify": verify,
    "merge": lambda path: sx.merge_checkpoint(path, path.parent / "merged"),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_is_gone_on_its_server_is_named_and_no_descriptor_leaks(
    reader: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H4: fstat of a file that another host has removed raised a plain OSError, and the descriptor stayed open."""
    fstat, calls = os.fstat, 0

    def stale_from(first: int) -> Callable[[int], os.stat_result]:
        def stale(fd: int) -> os.stat_result:
            nonlocal calls
            calls += 1
            if calls >= first:
                raise OSError(errno.ESTALE, "Stale file handle")
            return fstat(fd)

        return stale

    before = sorted(os.listdir("/proc/self/fd"))
    raised: list[tuple[int | None, bool]] = []
    for first in range(1, 100):
        calls = 0
        with monkeypatch.context() as patch:
            patch.setattr(os, "fstat", stale_from(first))
            try:
                READERS[reader](checkpoint)
            except StorageError as error:
                raised.append((error.errno, str(error.path).startswith(str(checkpoint.parent))))
        gc.collect()
        assert sorted(os.listdir("/proc/self/fd")) == before, first
        if calls < first:
            break
    assert 3 < first < 99
    assert set(raised) == {(errno.ESTALE, True)}
