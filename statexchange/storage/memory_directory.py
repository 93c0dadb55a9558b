"""A directory in shared memory with one host's part of the copy of a job's newest save.

**Names.** All are below ``/dev/shm/statexchange-<uid>``, which is 0700 and must belong to this user:

* ``saves-<digest>/``: for one directory of saves. The digest is that of its path, of the identity in its ``saves.json``
  (steps.py) and of this host. So a restarted job finds it whatever its processes, ranks and world size are, and hosts
  that share one /dev/shm have one each.
* ``saves-<digest>/target.json``: the path, identity and host from which the digest was made.
* ``saves-<digest>/step-000000700/``: a copy, with the names and formats of a save (tensorfile.py). ``save.json``
  lists the files of all ranks; only those of this host and the previous one are here. ``headers.json`` has the process
  that made the copy, and digests of the headers, since the digests in a header do not cover the header itself. A build
  (directory_build.py) makes the directory appear as a whole, so each file that is there is complete.
* ``saves-<digest>/.load-<nonce>.<owner>/``: files that a load has fetched from other hosts, until its end; or files of
  the previous copy, which the next one will write over.

**Removal.** A copy is not removed because its processes have ended: a restart must find it. It is removed when it is of
no use any more:

* the directory of saves has a newer step, or is being copied again;
* the directory of saves is gone, or has another identity. A URL is not checked, since the job that would check it may
  have another endpoint or other credentials;
* another job lacks room for its copy, the process that made this one has provably ended, and the disk has the same
  save: the copy then only saves time. A URL is not checked: it had the save when the copy was made.

A `.load-` directory or an unfinished copy is removed when its owner has provably ended.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from statexchange.cgroups import memory_left
from statexchange.errors import (
    CorruptError,
    NotFoundError,
    StateExchangeError,
    StorageError,
    TargetExistsError,
    without_secrets,
)
from statexchange.processes import Owner, host_identity
from statexchange.storage import files
from statexchange.storage.atomic import is_abandoned, new_nonce, write_new
from statexchange.storage.files import digest
from statexchange.storage.location import is_remote, open_path, parse_json, seal, unseal
from statexchange.storage.steps import clear_leftovers, identity_of_saves, read_saves, step_name, step_of
from statexchange.storage.store import local_path
from statexchange.storage.tensorfile import MANIFEST, SaveManifest, read_header_bytes, read_manifest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from statexchange.storage.publish.build import Build
    from statexchange.storage.store import Store

__all__ = ["HEADERS", "HostCopy", "MemoryDirectory", "headers_to_bytes"]

HEADERS = "headers.json"
_TARGET = "target.json"
_ATTEMPTS = 10  # to make a directory that other processes keep removing
_SCHEMA = 1
_NAME = re.compile(r"saves-[0-9a-f]{32}")
_LOADING = re.compile(r"\.load-[0-9a-f]{16}\.(.+)")


@dataclass(frozen=True, slots=True)
class HostCopy:
    """This host's part of the copy of one save.

    Attributes:
        step: the step of the save.
        manifest: the save's manifest, which lists the files of all ranks; None if the copy cannot be used.
        ranks: the ranks whose files are here.
        problem: why it cannot be used.
    """

    step: int
    manifest: SaveManifest | None
    ranks: tuple[int, ...] = ()
    problem: StateExchangeError | None = None


class MemoryDirectory:
    """The directory of one host and one directory of saves. Not collective.

    Args:
        saves: absolute path or URL of the directory of saves.
        identity: its identity.
    """

    def __init__(self, saves: str, identity: str) -> None:
        path = without_secrets(saves) if is_remote(saves) else os.path.realpath(saves)
        self._target = _Target(path, identity, host_identity())
        self.path = local_path(f"shm://saves-{self._target.digest}")

    def begin(self, step: int, ranks: Sequence[int], manifest: SaveManifest) -> Build:
        """Remove all copies that are here, and open the build of a new one, for the files of `ranks`.

        Files of the previous copy with the same names are moved into the build, to be written over: writing to new
        pages takes several times as long. That copy loses its manifest first, so that no load takes it.

        Raises:
            UnsafeError: the directory, or the one above it, belongs to another user.
            StorageError: there is too little memory.
        """
        from statexchange.storage.publish.directory_build import DirectoryBuild  # for writers only

        # A failed or killed copy costs nothing from here on: the disk has the newest save.
        with self._set_aside([manifest.files[rank] for rank in ranks]) as (kept, kept_bytes):
            for old in self._steps():
                self.drop(old)
            self._make_room(sum(manifest.nbytes[rank] for rank in ranks) - kept_bytes)
            build = DirectoryBuild(self.step_path(step), "0" * 32, check=None, reuse=False, resume=False)
            try:
                _move(kept, build.building_path)
            except BaseException:
                build.abandon()
                raise
        return build

    @contextlib.contextmanager
    def _set_aside(self, names: Sequence[str]) -> Iterator[tuple[str, int]]:
        """Move the files of these names out of the newest copy, which loses its manifest first.

        Yield their directory, which is removed at the end of the block, and their bytes in memory.
        """
        aside = self.make_loading()
        try:
            nbytes = 0
            for step in self._steps()[-1:]:
                with files.directory(self.step_path(step)) as dir_fd:
                    files.remove_file(MANIFEST, os.path.join(self.step_path(step), MANIFEST), dir_fd)
                nbytes = _move(self.step_path(step), aside, set(names))
            yield aside, nbytes
        finally:
            self.remove_loading(aside)

    def _make_room(self, nbytes: int) -> None:
        """Check the room for `nbytes`; if there is too little, remove copies that only save time, and check again."""
        try:
            self.check_room(nbytes)
        except StorageError:
            base, own = os.path.split(self.path)
            for name in _names(base):
                if name != own:
                    with contextlib.suppress(StateExchangeError, OSError):  # as in `sweep`
                        _drop_spare(os.path.join(base, name))
            self.check_room(nbytes)

    def _write_target(self, dir_fd: int) -> None:
        data = self._target.to_bytes()
        with contextlib.suppress(TargetExistsError):
            path = os.path.join(self.path, _TARGET)
            write_new(dir_fd, _TARGET, data, path=path, durable=False)

    def check_room(self, nbytes: int) -> None:
        """Raise StorageError if this host cannot keep `nbytes` more in memory.

        There are two limits. Beyond that of the file system a write fails; beyond that of the host or its cgroup the
        kernel kills a process.
        """
        with files.directory(self.path) as dir_fd:
            files.check_room(dir_fd, nbytes, self.path)
        room, where = memory_left()
        if nbytes > room:
            raise StorageError(f"{nbytes} bytes are needed, and {room} are left {where}", path=self.path)

    def copies(self) -> list[HostCopy]:
        """Return what is here of each copy, newest first; [] if the directory does not exist.

        Headers are compared with their digests; the tensors' bytes are not read.

        Raises:
            UnsafeError: the directory, or the one above it, belongs to another user.
        """
        found = []
        for step in reversed(self._steps()):
            with contextlib.suppress(NotFoundError), open_path(os.path.join(self.path, step_name(step))) as opened:
                found.append(_host_copy(opened.store, step))
        return found

    def _steps(self) -> list[int]:
        """Return the steps of the copies, oldest first."""
        base, name = os.path.split(self.path)
        try:
            with _private(base) as base_fd, files.directory(name, base_fd, self.path) as dir_fd:
                files.check_private(dir_fd, self.path)
                names = files.list_names(dir_fd, self.path)
        except NotFoundError:
            return []
        return sorted(step for found in names if (step := step_of(found)) is not None)

    def step_path(self, step: int) -> str:
        """Return the path of the copy of a step."""
        return os.path.join(self.path, step_name(step))

    def drop(self, step: int) -> bool:
        """Remove the copy of a step; return whether there was one.

        Raises:
            StateExchangeError: it cannot be removed.
        """
        return _drop(self.path, step)

    def make_loading(self) -> str:
        """Make a directory for files that a load fetches from other hosts, or that are set aside; return its path."""
        base, name = os.path.split(self.path)
        files.make_path(base)
        loading = f".load-{new_nonce()}.{Owner.current().to_name()}"
        path = os.path.join(self.path, loading)
        with _private(base) as base_fd:
            for left in reversed(range(_ATTEMPTS)):
                files.make_directory(name, base_fd, self.path)
                try:
                    with files.directory(name, base_fd, self.path) as dir_fd:
                        files.check_private(dir_fd, self.path)
                        self._write_target(dir_fd)
                        files.make_directory(loading, dir_fd, path)
                    break
                except (NotFoundError, StorageError) as error:
                    # A sweep of another process may have removed the directory while it was empty.
                    if not left or (isinstance(error, StorageError) and error.errno != errno.ENOENT):
                        raise
        return path

    def remove_loading(self, path: str) -> None:
        """Remove what `make_loading` has made, with its files."""
        _remove_loading(path)

    def sweep(self, newest: int | None) -> None:
        """Remove copies of steps before `newest`, unfinished copies, and the directories of other saves that are gone.

        Raises:
            StateExchangeError: something cannot be read or removed.
        """
        for step in self._steps():
            if newest is not None and step < newest:
                self.drop(step)
        base = os.path.dirname(self.path)
        for name in _names(base):
            path = os.path.join(base, name)
            try:
                _clear(path)
                if path != self.path:
                    _sweep_other(path)
            except NotFoundError:  # another process removes it
                continue
            except (StateExchangeError, OSError):
                if path == self.path:
                    raise
                # What is broken or cannot be reached there is reported by the job of those saves.

    def remove_empty(self) -> None:
        """Remove the directory if it has no copy any more."""
        if not self._steps():
            with contextlib.suppress(NotFoundError):
                _remove_directory(self.path)


@dataclass(frozen=True, slots=True)
class _Target:
    """The content of ``target.json``: to which directory of saves, and to which host, a directory belongs."""

    path: str
    identity: str
    host: str

    @property
    def digest(self) -> str:
        return digest(json.dumps([self.path, self.identity, self.host]).encode())

    @property
    def is_gone(self) -> bool:
        """Whether the directory of saves is gone, or another one has its path."""
        return identity_of_saves(self.path) != self.identity

    def to_bytes(self) -> bytes:
        record = {"schema": _SCHEMA, "path": self.path, "identity": self.identity, "host": self.host}
        return json.dumps(seal(record), indent=1).encode()

    @classmethod
    def read(cls, path: str) -> _Target:
        """Return the target of the directory at `path`; raise NotFoundError or CorruptError."""
        with open_path(path) as opened:
            shown = opened.store.path_of(_TARGET)
            parsed = parse_json(opened.store.read_small(_TARGET), shown, opened.store.budget)
        try:
            raw = unseal(parsed)
            texts = [raw["path"], raw["identity"], raw["host"]]
            if raw["schema"] != _SCHEMA or not all(isinstance(text, str) for text in texts):
                raise ValueError("it has another schema")
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptError(f"broken record: {error}", path=shown) from None
        return cls(*texts)


@contextlib.contextmanager
def _private(base: str) -> Iterator[int]:
    """Open the directory of this user in shared memory; UnsafeError if another user could change files in it."""
    parent, name = os.path.split(base)
    with files.directory(parent) as parent_fd, files.directory(name, parent_fd, base) as base_fd:
        files.check_private(base_fd, base)
        yield base_fd


def _move(source: str, target: str, names: Iterable[str] | None = None) -> int:
    """Move files of one directory, all or those of these names, into another; return their bytes."""
    nbytes = 0
    with files.directory(source) as source_fd, files.directory(target) as target_fd:
        for name in files.list_names(source_fd, source):
            if names is not None and name not in names:
                continue
            path = os.path.join(source, name)
            files.audit("rename", path)
            try:
                nbytes += os.stat(name, dir_fd=source_fd, follow_symlinks=False).st_size
                os.rename(name, name, src_dir_fd=source_fd, dst_dir_fd=target_fd)
            except OSError as error:
                raise StorageError.of(error, "move", path=path) from error
    return nbytes


def _names(base: str) -> list[str]:
    """Return the names of all directories with copies."""
    try:
        with _private(base) as base_fd:
            return [name for name in files.list_names(base_fd, base) if _NAME.fullmatch(name)]
    except NotFoundError:
        return []


def headers_to_bytes(digests: Mapping[str, str]) -> bytes:
    """Return the text of ``headers.json``: this process, and the digest of each file's header by the file's name."""
    record = {"schema": _SCHEMA, "owner": Owner.current().to_json(), "headers": dict(digests)}
    return json.dumps(seal(record), indent=1).encode()


def _headers(store: Store) -> tuple[Owner, dict[str, str]]:
    """Return the process that made a copy, and the digests of headers."""
    path = store.path_of(HEADERS)
    parsed = parse_json(store.read_small(HEADERS), path, store.budget)
    try:
        raw = unseal(parsed)
        if raw["schema"] != _SCHEMA:
            raise ValueError("it has another schema")
        return Owner.from_json(raw["owner"]), dict(raw["headers"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"broken digests of headers: {error}", path=path) from None


def _host_copy(store: Store, step: int) -> HostCopy:
    """Return what a directory has of the copy of a step."""
    ranks = []
    try:
        manifest = read_manifest(store)
        _, headers = _headers(store)
        for rank, (name, nbytes) in enumerate(zip(manifest.files, manifest.nbytes, strict=True)):
            if name not in store.listing:
                continue
            file = store.open(name)
            if file.size != nbytes:
                raise CorruptError("size differs", path=file.path, rank=rank, expected=nbytes, found=file.size)
            found = digest(read_header_bytes(file))
            if headers.get(name) != found:
                text = "its header differs from its digest"
                raise CorruptError(text, path=file.path, rank=rank, expected=headers.get(name), found=found)
            ranks.append(rank)
    except StateExchangeError as error:
        return HostCopy(step, None, problem=error)
    return HostCopy(step, manifest, tuple(ranks))


def _drop(path: str, step: int) -> bool:
    from statexchange.storage.publish.directory_removal import DirectoryRemoval  # for writers only

    try:
        DirectoryRemoval(os.path.join(path, step_name(step)), check=lambda _: []).run()
    except NotFoundError:
        return False
    return True


def _clear(path: str) -> None:
    """Remove unfinished copies and loads of processes that have provably ended."""
    clear_leftovers(path)
    with files.directory(path) as dir_fd:
        for name in files.list_names(dir_fd, path):
            match = _LOADING.fullmatch(name)
            owner = None if match is None else Owner.from_name(match[1])
            if owner is not None and owner.is_dead:
                _remove_loading(os.path.join(path, name))
            elif is_abandoned(name):
                files.remove_file(name, os.path.join(path, name), dir_fd)


def _remove_loading(path: str) -> None:
    parent, name = os.path.split(path)
    with contextlib.suppress(NotFoundError), files.directory(parent) as parent_fd:
        with files.directory(name, parent_fd, path) as dir_fd:
            for entry in files.list_names(dir_fd, path):
                files.remove_file(entry, os.path.join(path, entry), dir_fd)
        files.remove_directory(name, parent_fd, path)


def _sweep_other(path: str) -> None:
    """Remove the directory of other saves if these are gone. A directory of another host is left to that host."""
    try:
        target = _Target.read(path)
    except NotFoundError:  # its process was killed before it wrote the record, or is about to write it
        base, name = os.path.split(path)
        with files.directory(base) as base_fd:
            files.remove_directory(name, base_fd, path)  # fails unless it is empty
        return
    except CorruptError:
        return
    if target.host != host_identity() or is_remote(target.path) or not target.is_gone:
        return
    with open_path(path) as opened:
        steps = [step for found in opened.store.directories if (step := step_of(found)) is not None]
    for step in steps:
        _drop(path, step)
    _remove_directory(path)


def _drop_spare(path: str) -> None:
    """Remove the copies of other saves whose job has provably ended, if the disk has the same saves."""
    with contextlib.suppress(CorruptError), open_path(path) as opened:
        target = _Target.read(path)
        for name in opened.store.directories:
            step = step_of(name)
            if step is None or target.host != host_identity():
                continue
            owner, _ = _headers(opened.store.below(name))
            if owner.is_dead and _is_spare(target, step, read_manifest(opened.store.below(name))):
                _drop(path, step)


def _is_spare(target: _Target, step: int, manifest: SaveManifest) -> bool:
    """Whether the disk has the save of which there is a copy."""
    if is_remote(target.path):
        return True
    on_disk = None if target.is_gone else read_saves(target.path).get(step)
    return isinstance(on_disk, SaveManifest) and on_disk.save == manifest.save


def _remove_directory(path: str) -> None:
    """Remove a directory without copies; it stays while a process builds or loads there."""
    base, name = os.path.split(path)
    with files.directory(base) as base_fd:
        with files.directory(name, base_fd, path) as dir_fd:
            if set(files.list_names(dir_fd, path)) <= {_TARGET}:
                files.remove_file(_TARGET, os.path.join(path, _TARGET), dir_fd)
        files.remove_directory(name, base_fd, path)
