"""Network file systems: mount options that weaken caches, stale files, and errors of close.

tools/nfs_lab does the same on a real server.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import gc
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sweeps import by_default

import statexchange as sx
from statexchange.errors import NotFoundError, StorageError
from statexchange.report.summary import summarize
from statexchange.report.verify import verify
from statexchange.storage import files
from statexchange.storage.workspace import Workspace


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    sx.export_checkpoint({"w": np.ones(3)}, tmp_path / "out")
    return tmp_path / "out"


def mount(path: Path, kind: str, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let mountinfo list `path` as a mount of this kind, which no file system was asked about yet."""
    root = "1 0 0:1 / / rw - ext4 /dev/vda rw\n"
    here = f"36 1 0:40 / {path} rw,relatime shared:1 - {kind} server:/export {options}\n"
    monkeypatch.setattr(files, "_mounts", lambda: files._parsed((root + here).encode()))
    monkeypatch.setattr(files, "_looked_at", set())


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        ("nfs", "rw,vers=3,nolock,local_lock=all", []),
        ("nfs4", "rw,vers=4.2,nocto", ["nocto"]),
        ("nfs4", "rw,vers=4.2", []),
        ("ext4", "rw,nocto", []),
    ],
)
def test_options_that_weaken_caches_are_named_once(
    kind: str,
    options: str,
    named: list[str],
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """There is no consistency between close and open then."""
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
    """Of two changes within one tick a client that listed between them would never see the second."""
    mount(tmp_path, "nfs", "rw,vers=3", monkeypatch)
    tick_ns = 20_000_000
    workspace = Workspace(tmp_path / "ws")
    written = workspace.write([], run="job", round=1, rank=0, world_size=1)
    file = tmp_path / "ws" / written.relative
    for directory in (file.parent, file.parent.parent):
        assert directory.stat().st_mtime_ns - file.stat().st_ctime_ns > tick_ns
    for value in (1, 2):
        sx.export_checkpoint({"w": np.full(3, value)}, tmp_path / "out", overwrite=True)
        assert tmp_path.stat().st_mtime_ns - (tmp_path / "out").stat().st_ctime_ns > tick_ns


READERS = {
    "open": lambda path: sx.open_checkpoint(path)["w"].read(),
    "load": lambda path: sx.load_checkpoint({"w": np.zeros(3)}, path),
    "verify": verify,
    "merge": lambda path: sx.merge_checkpoint(path, path.parent / "merged", overwrite=True),
}


@pytest.mark.parametrize("reader", by_default(READERS, 0, 3))
def test_a_file_that_is_gone_on_its_server_is_named_and_no_descriptor_leaks(
    reader: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once another host has removed a file, already fstat of its descriptor fails."""
    fstat, calls = os.fstat, 0

    def stale_from(first: int) -> Callable[[int], os.stat_result]:
        def stale(fd: int) -> os.stat_result:
            nonlocal calls
            calls += 1
            if calls >= first:
                raise OSError(errno.ESTALE, "Stale file handle")
            return fstat(fd)

        return stale

    gc.collect()  # closes what earlier tests have left open
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


class NfsClient:
    """Looks up names as an NFS client: a name that was absent stays absent until its directory is opened anew."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._absent: set[Path] = set()

    @contextlib.contextmanager
    def mounted(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Look up all names below the root in this way."""
        with monkeypatch.context() as patch:
            for name in ("open", "stat", "lstat", "scandir", "listdir"):
                patch.setattr(os, name, functools.partial(self._call, getattr(os, name), os.lstat))
            yield

    def _call(
        self, real: Callable[..., Any], lstat: Callable[..., Any], path: Any = ".", *args: Any, **options: Any
    ) -> Any:
        if isinstance(path, int):  # a descriptor: no name is looked up
            return real(path, *args, **options)
        dir_fd = options.get("dir_fd")
        folder = os.getcwd() if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
        full = Path(os.path.normpath(os.path.join(folder, path)))
        for name in reversed((full, *full.parents)):
            if self._root in name.parents and name not in self._absent:
                try:
                    lstat(name)
                except FileNotFoundError:
                    self._absent.add(name)
            if name in self._absent:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(full))
        found = real(path, *args, **options)
        if real.__name__ == "open" and os.path.isdir(full):
            self._absent = {name for name in self._absent if name.parent != full}
        return found


EARLY_READERS = {
    "open": lambda path: sx.open_checkpoint(path / "out")["w"].read().sum(),
    "load": lambda path: sx.load_checkpoint({"w": np.zeros(3)}, path / "out"),
    "summary": lambda path: summarize(path / "out").kind,
    "merge": lambda path: sx.merge_checkpoint(path / "out", path.parents[2] / "merged"),
    "workspace": lambda path: sx.NFSWorkspace(path / "ws", run="r").read_configs_and_weights_from_rank(0),
    "waiting": lambda path: sx.NFSWorkspace(path / "ws", run="r").read_configs_and_weights_from_rank(0, timeout_s=5),
}


@pytest.mark.parametrize("reader", EARLY_READERS)
@pytest.mark.parametrize("before", ["", "job"])
def test_a_reader_that_looked_before_the_writer_finds_what_was_written(
    reader: str, before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client looks up full paths in what it knows, where a name that was absent stays absent for some time."""
    mount = tmp_path / "mount"
    mount.joinpath(before).mkdir(parents=True)
    client, path = NfsClient(mount), mount / "job/deep"
    with client.mounted(monkeypatch):
        for name in ("out", "ws", "out/statexchange.json"):
            with pytest.raises(FileNotFoundError):
                os.stat(path / name)
        if reader != "waiting":
            with pytest.raises(NotFoundError):
                EARLY_READERS[reader](path)
    path.mkdir(parents=True)
    sx.export_checkpoint({"w": np.ones(3)}, path / "out")
    sx.NFSWorkspace(path / "ws", run="r").write_configs_and_weights({"k": 1}, {"w": np.ones(3)})
    with client.mounted(monkeypatch):
        with pytest.raises(FileNotFoundError):  # this client still calls it absent
            os.stat(path / "out")
        EARLY_READERS[reader](path)


@pytest.mark.parametrize("before", [False, True])
def test_an_error_of_close_is_named_and_leaves_neither_files_nor_descriptors(
    before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS 3 may report only there that a disk is full."""
    place = tmp_path / "place"
    place.mkdir()
    out = place / "out"
    if before:
        sx.export_checkpoint({"w": np.zeros(30)}, out)
    state = {f"t{number}": np.ones(30) for number in range(3)}
    sx.export_checkpoint(state, tmp_path / "warm", max_shard_size=300)
    close, fds = os.close, sorted(os.listdir("/proc/self/fd"))
    failed = 0
    raised: set[tuple[int | None, bool]] = set()
    for number in range(1, 50):
        closed = 0

        def full(fd: int) -> None:
            nonlocal closed, failed
            is_written = os.path.isfile(f"/proc/self/fd/{fd}") and os.fstat(fd).st_size > 0
            is_written = is_written and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
            close(fd)
            closed += is_written
            if is_written and closed == number:  # noqa: B023 (called before it changes)
                failed += 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, "close", full)
            try:
                sx.export_checkpoint(state, out, overwrite=True, max_shard_size=300)
            except StorageError as error:
                raised.add((error.errno, str(error.path).startswith(str(place))))
            else:
                break
        assert sorted(os.listdir("/proc/self/fd")) == fds, number
        assert os.listdir(place) == (["out"] if before else []), number
    assert failed >= len(state)
    assert raised == {(errno.ENOSPC, True)}
