"""A copy of a job's newest save in the shared memory of its hosts, from which a restarted job loads.

memory_directory.py describes the files of one host, and when a copy is removed. This is the protocol of the ranks.

**After a save** (`MemoryCopies.keep`), which is whole on disk by then:

1. Root sends the manifest of the save and the identity of the directory of saves.
2. The first rank of each host removes the previous copy, checks the free memory, and opens the build of the new one.
3. Each rank copies its file from disk, where it has just written it, so that its bytes are in the page cache. If it
   has uploaded the file, it writes the same bytes once more from its tensors.
4. With several hosts each rank sends its file to a rank of the next host. So the loss of one host loses no file.
5. If all ranks have succeeded, the first rank of each host publishes: only now does its part of the copy exist.

The previous copy is removed first, or overwritten where its files have the same names. Keeping it until the new one is
whole would be of no use: the disk has a newer save by then, which a load prefers. So a host needs room for one copy,
not two. After a failure in any step (no room, another user's directory, an unreadable file) rank 0 logs one warning;
the save is on disk all the same. A job that is killed in any step restarts from the disk. If the save itself fails, the
previous copy stays: it is that of the newest save.

**Before a load** (`MemoryCopies.find`, `MemoryCopies.opened`):

1. Root sends the newest step on disk, or the wanted one, with the id of its save.
2. The first rank of each host checks its part: manifests, sizes, digests of headers. All ranks get these records and
   choose the newest copy whose files the hosts have together, if it is at least as new as the disk's save. A copy of
   the same step must be of the same save.
3. A host that lacks files, because it is new or the world size differs, makes a directory with the headers of these
   files, which other hosts send. Headers are enough to plan the load.
4. Once the load is planned, the hosts send each other the files that their ranks will read.
5. Before any tensor is changed, boxes that will be read in part are checked against their digests, since reading itself
   checks only boxes that are read whole. If the disk does not have the same save, all boxes are checked: a load from
   disk could then not overwrite each tensor that a broken copy had filled.

If the copy is broken, a warning names file and tensor, the copy is removed, and all ranks load from disk instead.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from statexchange.comm.communicator import Communicator
from statexchange.comm.typed import from_all, from_root
from statexchange.errors import (
    CorruptError,
    IncompleteError,
    NotFoundError,
    ReplacedError,
    StateExchangeError,
    StorageError,
    UnsafeError,
    without_secrets,
)
from statexchange.exchange.reading import ReadItem
from statexchange.settings import check_flags
from statexchange.sharding.shards import Box, intersect
from statexchange.storage import files
from statexchange.storage.atomic import write_new
from statexchange.storage.build import Build, WrittenFile
from statexchange.storage.files import WINDOW_BYTES, digest
from statexchange.storage.location import OpenedPath, open_path, read_with_retry
from statexchange.storage.memory_directory import HEADERS, HostCopy, MemoryDirectory, headers_to_bytes
from statexchange.storage.regions import BoxDigest, blocks, to_global
from statexchange.storage.save_directory import MANIFEST, SaveManifest, rank_of_file, read_manifest
from statexchange.storage.steps import identity_of_saves, make_identity, read_saves, step_name
from statexchange.storage.store import ByteRange
from statexchange.storage.tensorfile import DigestedTensors, read_header_bytes

__all__ = ["COPY_ERRORS", "MemoryCopies", "memory_copies"]

_log = logging.getLogger(__name__)

COPY_ERRORS = (CorruptError, IncompleteError, NotFoundError, StorageError, UnsafeError)
"""Errors of a load that are caused by the copy."""


@dataclass(frozen=True, slots=True)
class MemoryCopy:
    """A copy that can be loaded.

    Attributes:
        step: the step of the save.
        manifest: the save's manifest.
        holders: by host, the ranks whose files it has.
        is_on_disk: whether the disk has the same save.
        has_other: whether the disk has a save that can be loaded instead.
        identity: the identity of the directory of saves.
    """

    step: int
    manifest: SaveManifest
    holders: tuple[frozenset[int], ...]
    is_on_disk: bool
    has_other: bool
    identity: str


class MemoryCopies:
    """The copies in memory of one directory of saves, as all ranks of a job use them.

    Args:
        path: absolute path or URL of the directory of saves.
    """

    def __init__(self, path: str, stall_timeout_s: float) -> None:
        self.path = path
        self._shown = without_secrets(path)
        self._stall_timeout_s = stall_timeout_s
        self._has_warned = False

    # After a save

    def keep(self, step: int, comm: Communicator, file: WrittenFile) -> None:
        """Copy the save of `step`, in which `file` is this rank's, if it is the newest. Collective.

        A failure is a warning.
        """
        start = self._start(step, comm)
        if start is None:
            return
        hosts = _Hosts.of(comm)
        with contextlib.ExitStack() as building:
            build, problem = None, None
            if hosts.is_first:
                try:
                    kept = [*hosts.ranks[comm.node_rank], *hosts.ranks[hosts.previous]]
                    directory = MemoryDirectory(self.path, start.identity)
                    directory.sweep(step)
                    build = building.enter_context(directory.begin(step, sorted(set(kept)), start.manifest))
                except (StateExchangeError, OSError) as error:
                    problem = error
            answers = self._exchange(_Answer.of(problem, build), comm)
            if answers is None:
                return
            folder = answers[hosts.first].building
            copied = _Answer.of(None)
            try:
                if file.content is not None:  # it was uploaded
                    header = _write_own(file.content, folder, start.manifest, comm)
                else:
                    header = self._copy_own(os.path.join(self.path, step_name(step)), folder, start.manifest, comm)
                copied = _Answer("", "", header)
            except (StateExchangeError, OSError) as error:
                copied = _Answer.of(error)
            answers = self._exchange(copied, comm)
            if answers is None:
                return
            headers = [answer.header for answer in answers]
            if hosts.number > 1:
                failed = _send_to_next(folder, start.manifest, hosts, comm)
                if self._exchange(_Answer.of(failed), comm) is None:
                    return
            problem = None
            if build is not None:
                try:
                    self._publish(build, start, headers)
                except (StateExchangeError, OSError) as error:
                    problem = error
            self._exchange(_Answer.of(problem), comm)

    def _start(self, step: int, comm: Communicator) -> _Start | None:
        """Return what root sends; None if the save is not the newest one. Collective."""
        start: _Start | None = None
        problem: BaseException | None = None
        if comm.rank == 0:
            try:
                saves = read_saves(self.path)
                manifest = saves.get(step)
                if step == max(saves, default=None) and isinstance(manifest, SaveManifest):
                    start = _Start(make_identity(self.path), manifest)
            except StateExchangeError as error:
                problem = error
        if problem is not None:
            self._warn(0, str(problem), comm)
        return from_root(comm, start, _Start | None, "the save to copy")

    def _exchange(self, answer: _Answer, comm: Communicator) -> list[_Answer] | None:
        """Return the answers of all ranks; None, with a warning, if one of them has failed. Collective."""
        answers = from_all(comm, answer, _Answer, "the part of a copy")
        for rank, answer in enumerate(answers):
            if answer.problem:
                self._warn(rank, answer.problem, comm)
                return None
        return answers

    def _warn(self, rank: int, problem: str, comm: Communicator) -> None:
        """Log once, on rank 0, why there is no copy."""
        if comm.rank == 0 and not self._has_warned:
            _log.warning(
                "%s: the newest save is not kept in memory, only on disk, because of rank %d on %s: %s",
                self._shown,
                rank,
                comm.hosts[rank],
                problem,
            )
        self._has_warned = True

    def _copy_own(self, saved: str, folder: str, manifest: SaveManifest, comm: Communicator) -> str:
        """Copy this rank's file into the directory under construction; return the digest of its header."""
        name, nbytes = manifest.files[comm.rank], manifest.nbytes[comm.rank]

        def seen(opened: OpenedPath) -> OpenedPath:
            # An NFS client may show a replaced directory for a while.
            if read_manifest(opened.store).save != manifest.save:
                raise ReplacedError("this host sees another save here", path=saved)
            return opened

        with read_with_retry(saved, seen) as opened:
            source = opened.store.open(name)
            header = digest(read_header_bytes(source))
            if source.size != nbytes:
                raise CorruptError("size differs", path=source.path, expected=nbytes, found=source.size)
            path = os.path.join(folder, name)
            with contextlib.ExitStack() as opening:
                fd = _opened_for_writing(path, nbytes, opening)
                window = memoryview(bytearray(min(WINDOW_BYTES, nbytes)))
                for at in range(0, nbytes, len(window)):
                    part = window[: nbytes - at]
                    source.read_into(part, at)
                    files.pwrite_all(fd, part, at, path)
                    comm.progress()
            source.check_unchanged()
        return header

    def _publish(self, build: Build, start: _Start, headers: Sequence[str]) -> None:
        """Write the digests of the headers and the manifest, and give the directory its name."""
        manifest = start.manifest
        build.put(HEADERS, headers_to_bytes(dict(zip(manifest.files, headers, strict=True))))
        build.commit(MANIFEST, manifest.to_bytes())

    # Before a load

    def find(self, wanted: int | None, comm: Communicator) -> MemoryCopy | None:
        """Return the copy of step `wanted`, by default the newest; None if the save on disk is to be loaded.

        Collective. Copies that cannot be used any more are removed.
        """
        disk = self._disk(wanted, comm)
        if disk is None:
            return None
        hosts = _Hosts.of(comm)
        found: list[HostCopy] = []
        if hosts.is_first:
            directory = MemoryDirectory(self.path, disk.identity)
            try:
                directory.sweep(disk.newest)
                found = directory.copies()
            except (StateExchangeError, OSError) as error:
                _log.warning("%s: cannot look for copies in memory: %s", self._shown, error)
        parts = from_all(comm, list(map(_Part.of, found)), list[_Part], "its copies", _check_parts)
        by_host = [[part for part in parts[first] if disk.may_be(part, wanted)] for first in hosts.firsts]
        for first, of_host in zip(hosts.firsts, by_host, strict=True):
            for part in of_host:
                if part.problem and comm.rank == 0:
                    text = "%s: the copy of step %d in memory of %s cannot be used: %s"
                    _log.warning(text, self._shown, part.step, comm.hosts[first], part.problem)
        best = _newest_whole(by_host)
        if best is None:
            return None
        holders = tuple(_ranks_of(best, of_host) for of_host in by_host)
        root = next(first for first, here in zip(hosts.firsts, holders, strict=True) if here)
        manifest = next((one.manifest for one in found if one.manifest and _Part.of(one).is_of(best)), None)
        whole = from_root(comm, manifest, SaveManifest | None, "the manifest", root)
        assert whole is not None  # on `root`, which has a part of this copy
        is_on_disk = best.step == disk.step and best.save == disk.save
        return MemoryCopy(best.step, whole, holders, is_on_disk, disk.step is not None, disk.identity)

    def _identity(self) -> str | None:
        """Return the identity of the directory of saves; None if that is broken, so that no copy is used."""
        try:
            return identity_of_saves(self.path)
        except (CorruptError, UnsafeError) as error:
            _log.warning("%s: copies in memory are not used: %s; remove this file", self._shown, error)
            return None

    def _disk(self, wanted: int | None, comm: Communicator) -> _Disk | None:
        """Return what root finds on disk; None if no copy can belong to it. Collective."""
        disk: _Disk | None = None
        with comm.phase("looking for a copy in memory"):  # differs from what a rank without memory=True calls
            if comm.rank == 0:
                identity = self._identity()
                if identity is not None:
                    saves = read_saves(self.path)
                    at = max(saves, default=None) if wanted is None else wanted
                    manifest = None if at is None else saves.get(at)
                    is_there = at is not None and at in saves
                    save = manifest.save if isinstance(manifest, SaveManifest) else None
                    disk = _Disk(identity, max(saves, default=None), at if is_there else None, save)
        return from_root(comm, disk, _Disk | None, "the saves on disk")

    @contextlib.contextmanager
    def opened(
        self, copy: MemoryCopy, comm: Communicator
    ) -> Iterator[tuple[str, Callable[[Sequence[ReadItem]], None]]]:
        """Yield the path of a directory with the copy, and the `before_reading` of a load from it.

        Collective; so is the yielded function.
        """
        directory = MemoryDirectory(self.path, copy.identity)
        path = directory.step_path(copy.step)

        def check(items: Sequence[ReadItem]) -> None:
            with comm.phase("checking the copy in memory", timeout_s=self._stall_timeout_s):
                _check(items, comm, every=not copy.is_on_disk)

        if all(len(here) == copy.manifest.world_size for here in copy.holders):
            yield path, check
            return
        with contextlib.ExitStack() as loading:
            hosts = _Hosts.of(comm)
            fetched = ""
            with comm.phase("opening the copy in memory"):
                if hosts.is_first:
                    fetched = directory.make_loading()
                    loading.callback(_quietly_removed, directory, fetched)
                    _link_own(path, fetched, copy, comm.node_rank)
            fetched = from_all(comm, fetched, str, "its directory")[hosts.first]
            with comm.phase("fetching headers", timeout_s=self._stall_timeout_s):
                _fetch_headers(fetched, copy, hosts, comm)

            def fetch_and_check(items: Sequence[ReadItem]) -> None:
                needed = from_all(comm, _ranks_read(items), set[int], "the files")
                with comm.phase("looking for room"):
                    lacking = _lacking(needed, copy, hosts)
                    if hosts.is_first:
                        directory.check_room(sum(copy.manifest.nbytes[rank] for rank in lacking[comm.node_rank]))
                with comm.phase("fetching files", timeout_s=self._stall_timeout_s):
                    _fetch(fetched, lacking, copy, hosts, comm)
                check(items)

            yield fetched, fetch_and_check

    def discard(self, copy: MemoryCopy, comm: Communicator) -> None:
        """Remove a copy that could not be loaded. Collective; a failure is a warning."""
        if _Hosts.of(comm).is_first:
            try:
                MemoryDirectory(self.path, copy.identity).drop(copy.step)
            except (StateExchangeError, OSError) as error:
                _log.warning("%s: cannot remove the copy of step %d in memory: %s", self._shown, copy.step, error)

    def drop(self, step: int, comm: Communicator) -> bool:
        """Remove the copy of a step; return whether a host had one. Collective."""
        dropped = False
        identity: str | None = None
        with comm.phase("removing the copy in memory"):
            if comm.rank == 0:
                identity = self._identity()
        identity = from_root(comm, identity, str | None, "the identity")
        if identity is None:
            return False
        with comm.phase("removing the copy in memory"):
            if _Hosts.of(comm).is_first:
                directory = MemoryDirectory(self.path, identity)
                dropped = directory.drop(step)
                directory.remove_empty()
        return any(from_all(comm, dropped, bool, "whether it had the copy"))


def memory_copies(path: str, stall_timeout_s: float, *, memory: bool) -> MemoryCopies | None:
    """Return the copies in memory that the option `memory` of `Checkpoints` asks for."""
    check_flags(memory=memory)
    return MemoryCopies(path, stall_timeout_s) if memory else None


# What the ranks send each other


@dataclass(frozen=True, slots=True)
class _Start:
    """The record that root sends before a copy: the identity of the directory of saves, and the save's manifest."""

    identity: str
    manifest: SaveManifest


@dataclass(frozen=True, slots=True)
class _Answer:
    """The record that a rank sends after a part of a copy: its failure, or "", and what the others need."""

    problem: str = ""
    building: str = ""
    header: str = ""

    @classmethod
    def of(cls, problem: BaseException | None, build: Build | None = None) -> _Answer:
        return cls("" if problem is None else str(problem), "" if build is None else build.building_path)


@dataclass(frozen=True, slots=True)
class _Disk:
    """The saves that root finds on disk before a load.

    Attributes:
        identity: the identity of the directory of saves.
        newest: the newest step.
        step: the step that would be loaded from disk; None if there is none.
        save: the id of that save; None if its manifest is broken.
    """

    identity: str
    newest: int | None
    step: int | None
    save: str | None

    def may_be(self, part: _Part, wanted: int | None) -> bool:
        """Whether a copy may be loaded instead of the disk's save, if it is whole."""
        if wanted is not None and part.step != wanted:
            return False
        if self.step is None or part.step > self.step:
            return True
        return part.step == self.step and (part.save == self.save or self.save is None or bool(part.problem))


@dataclass(frozen=True, slots=True)
class _Part:
    """A host's part of a copy: the save's id, a digest of its manifest, and the ranks whose files are there."""

    step: int
    save: str
    manifest: str
    ranks: tuple[int, ...]
    world_size: int
    problem: str

    @classmethod
    def of(cls, copy: HostCopy) -> _Part:
        if copy.manifest is None:
            return cls(copy.step, "", "", (), 0, str(copy.problem))
        manifest = copy.manifest
        return cls(copy.step, manifest.save, digest(manifest.to_bytes()), copy.ranks, manifest.world_size, "")

    def is_of(self, other: _Part) -> bool:
        """Whether both are parts of one copy."""
        return (self.step, self.save, self.manifest) == (other.step, other.save, other.manifest)


def _check_parts(parts: Sequence[_Part]) -> None:
    """Raise ValueError if a part has files of ranks that its save does not have."""
    for part in parts:
        if max(part.ranks, default=-1) >= part.world_size:
            raise ValueError(f"rank {max(part.ranks)} is not one of {part.world_size}")


def _ranks_of(part: _Part, of_host: Sequence[_Part]) -> frozenset[int]:
    """Return the ranks whose files of a copy a host has."""
    same = [one.ranks for one in of_host if one.is_of(part)]
    return frozenset[int]().union(*same)


def _newest_whole(by_host: Sequence[Sequence[_Part]]) -> _Part | None:
    """Return a part of the newest copy whose files the hosts have together; None if there is no such copy."""
    parts = [part for of_host in by_host for part in of_host]
    for part in sorted(parts, key=lambda part: part.step, reverse=True):
        if part.problem:
            continue
        here = frozenset[int]().union(*(_ranks_of(part, of_host) for of_host in by_host))
        if len(here) == part.world_size:
            return part
    return None


@dataclass(frozen=True, slots=True)
class _Hosts:
    """The hosts of a communicator: the ranks of each, and the first one, which makes and removes directories."""

    ranks: tuple[tuple[int, ...], ...]
    rank: int
    node: int

    @classmethod
    def of(cls, comm: Communicator) -> _Hosts:
        by_host: list[list[int]] = [[] for _ in range(comm.num_nodes)]
        for rank, node in enumerate(comm.nodes):
            by_host[node].append(rank)
        return cls(tuple(map(tuple, by_host)), comm.rank, comm.node_rank)

    @property
    def number(self) -> int:
        return len(self.ranks)

    @property
    def firsts(self) -> list[int]:
        return [ranks[0] for ranks in self.ranks]

    @property
    def first(self) -> int:
        """The first rank of this host."""
        return self.ranks[self.node][0]

    @property
    def is_first(self) -> bool:
        return self.rank == self.first

    @property
    def previous(self) -> int:
        """The host whose files this one keeps too; itself if it is the only one."""
        return (self.node - 1) % self.number

    def of_file(self, node: int, rank: int) -> int:
        """Return the rank of a host that sends or receives the file of `rank`."""
        return self.ranks[node][rank % len(self.ranks[node])]


def _write_own(content: DigestedTensors, folder: str, manifest: SaveManifest, comm: Communicator) -> str:
    """Write this rank's file into the directory under construction; return the digest of its header."""
    path = os.path.join(folder, manifest.files[comm.rank])
    with contextlib.ExitStack() as opening:
        fd = _opened_for_writing(path, content.nbytes, opening)
        files.pwrite_all(fd, content.header, 0, path)
        at = len(content.header)
        for part in content.parts():
            files.pwrite_all(fd, part, at, path)
            at += len(part)
            comm.progress()
    return digest(content.header)


# Files between hosts


def _send_to_next(folder: str, manifest: SaveManifest, hosts: _Hosts, comm: Communicator) -> BaseException | None:
    """Send this rank's file to the next host, and receive those of the previous host. Collective; return a failure.

    All ranks go through the transfers in the same order, so that no two wait for each other. Even hosts send first,
    while their neighbours receive.
    """
    transfers = []
    for node, ranks in enumerate(hosts.ranks):
        for rank in ranks:
            transfers.append((node % 2, rank, hosts.of_file((node + 1) % hosts.number, rank)))
    failure: BaseException | None = None
    for _, src, dst in sorted(transfers):
        name, nbytes = manifest.files[src], manifest.nbytes[src]
        if comm.rank == src:
            failure = _send_file(os.path.join(folder, name), nbytes, dst, comm) or failure
        elif comm.rank == dst:
            failure = _receive_file(os.path.join(folder, name), nbytes, src, comm) or failure
    return failure


def _send_file(path: str, nbytes: int, dst: int, comm: Communicator) -> BaseException | None:
    """Send a file window by window. After a failure go on with any bytes, so that the receiver does not wait."""
    failure: BaseException | None = None
    window = np.zeros(min(WINDOW_BYTES, nbytes), np.uint8)
    with contextlib.ExitStack() as opened:
        try:
            fd = _opened(path, opened)
        except StateExchangeError as error:
            failure = error
        for at in range(0, nbytes, len(window)):
            part = window[: nbytes - at]
            try:
                if failure is None:
                    files.pread_into(fd, part.data, at, path)
            except StateExchangeError as error:
                failure = error
            comm.send(part, dst)
            comm.progress()
    return failure


def _receive_file(
    path: str, nbytes: int, src: int, comm: Communicator, *, is_loaded: bool = False
) -> BaseException | None:
    """Receive a file window by window, also after a failure to write it, so that the sender does not wait.

    A file that is being loaded keeps the modification time 0: the load opened it when only its header was there, and
    would treat a changed time as a changed file.
    """
    failure: BaseException | None = None
    window = np.zeros(min(WINDOW_BYTES, nbytes), np.uint8)
    with contextlib.ExitStack() as opened:
        try:
            fd = _opened_for_writing(path, nbytes, opened)
        except StateExchangeError as error:
            failure = error
        for at in range(0, nbytes, len(window)):
            part = window[: nbytes - at]
            comm.recv(part, src)
            comm.progress()
            try:
                if failure is None:
                    files.pwrite_all(fd, part.data, at, path)
            except StateExchangeError as error:
                failure = error
        if failure is None and is_loaded:
            os.utime(fd, ns=(0, 0))
    return failure


def _opened(path: str, opened: contextlib.ExitStack) -> int:
    """Open a file for reading until the end of a block."""
    folder, name = os.path.split(path)
    dir_fd = opened.enter_context(files.directory(folder))
    fd = files.open_file(name, dir_fd, path)
    opened.callback(os.close, fd)
    return fd


def _opened_for_writing(path: str, nbytes: int, opened: contextlib.ExitStack) -> int:
    """Open a file of `nbytes` for writing until the end of a block; make it if it does not exist."""
    folder, name = os.path.split(path)
    dir_fd = opened.enter_context(files.directory(folder))
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    files.audit("open", path)
    try:
        fd = os.open(name, flags, 0o600, dir_fd=dir_fd)
        opened.callback(os.close, fd)
        os.ftruncate(fd, nbytes)
    except OSError as error:
        raise StorageError.of(error, "open for writing", path=path) from error
    return fd


def _link_own(path: str, fetched: str, copy: MemoryCopy, node: int) -> None:
    """Give the files of this host's copy names in another directory, and write the manifest there."""
    data = copy.manifest.to_bytes()
    with files.directory(fetched) as dir_fd:
        write_new(dir_fd, MANIFEST, [data], nbytes=len(data), path=os.path.join(fetched, MANIFEST), durable=False)
    for rank in copy.holders[node]:
        name = copy.manifest.files[rank]
        try:
            os.link(os.path.join(path, name), os.path.join(fetched, name), follow_symlinks=False)
        except OSError as error:
            raise StorageError.of(error, "link", path=os.path.join(path, name)) from error


def _fetch_headers(fetched: str, copy: MemoryCopy, hosts: _Hosts, comm: Communicator) -> None:
    """Send each file's header to the hosts that lack the file, as a file of full size without other bytes. Collective.

    Only the first rank of each host takes part.
    """
    for rank, (name, nbytes) in enumerate(zip(copy.manifest.files, copy.manifest.nbytes, strict=True)):
        source = next(node for node, here in enumerate(copy.holders) if rank in here)
        path = os.path.join(fetched, name)
        for node, here in enumerate(copy.holders):
            if rank in here:
                continue
            src, dst = hosts.firsts[source], hosts.firsts[node]
            if comm.rank == src:
                with open_path(path) as opened:
                    header = np.frombuffer(read_header_bytes(opened.store.open(name)), np.uint8)
                comm.send(np.array([len(header)], np.int64), dst)
                comm.send(header, dst)
            elif comm.rank == dst:
                size = np.zeros(1, np.int64)
                comm.recv(size, src)
                received = np.zeros(int(size[0]), np.uint8)
                comm.recv(received, src)
                with contextlib.ExitStack() as opening:
                    fd = _opened_for_writing(path, nbytes, opening)
                    files.pwrite_all(fd, received.data, 0, path)
                    os.utime(fd, ns=(0, 0))


def _ranks_read(items: Sequence[ReadItem]) -> set[int]:
    """Return the ranks whose files a load will read."""
    found = set()
    for item in items:
        for box, stored in item.boxes.items():
            if any(intersect(box, target) is not None for target in item.local.shard.boxes):
                found.add(rank_of_file(os.path.basename(stored.file.path)))
    return {rank for rank in found if rank is not None}


def _lacking(needed: Sequence[set[int]], copy: MemoryCopy, hosts: _Hosts) -> list[list[int]]:
    """Return, by host, the ranks whose files its ranks read and it does not have."""
    lacking = []
    for ranks, here in zip(hosts.ranks, copy.holders, strict=True):
        read = {file_rank for rank in ranks for file_rank in needed[rank]}
        lacking.append(sorted(read - here))
    return lacking


def _fetch(fetched: str, lacking: Sequence[Sequence[int]], copy: MemoryCopy, hosts: _Hosts, comm: Communicator) -> None:
    """Send the files that hosts lack; all ranks go through the transfers in the same order. Collective."""
    failure: BaseException | None = None
    for node, ranks in enumerate(lacking):
        for rank in ranks:
            sources = [source for source, here in enumerate(copy.holders) if rank in here]
            src = hosts.of_file(sources[node % len(sources)], rank)
            dst = hosts.of_file(node, rank)
            path, nbytes = os.path.join(fetched, copy.manifest.files[rank]), copy.manifest.nbytes[rank]
            if comm.rank == src:
                failure = _send_file(path, nbytes, dst, comm) or failure
            elif comm.rank == dst:
                failure = _receive_file(path, nbytes, src, comm, is_loaded=True) or failure
    if failure is not None:
        raise failure


def _quietly_removed(directory: MemoryDirectory, path: str) -> None:
    """Remove the directory of a load; if that fails, the next load does it."""
    with contextlib.suppress(StateExchangeError):
        directory.remove_loading(path)


# Digests


def _check(items: Sequence[ReadItem], comm: Communicator, *, every: bool) -> None:
    """Compare stored boxes with their digests: those that are read in part, or `every` one that is read."""
    checked = set()
    for item in items:
        for box, stored in item.boxes.items():
            place = (stored.file.path, stored.begin)
            if place not in checked and _is_to_check(box, item.local.shard.boxes, every=every):
                checked.add(place)
                _check_box(item, box, stored, comm)


def _is_to_check(box: Box, targets: Sequence[Box], *, every: bool) -> bool:
    read = [shared for target in targets if (shared := intersect(box, target)) is not None]
    return any(every or shared != box for shared in read)


def _check_box(item: ReadItem, box: Box, stored: ByteRange, comm: Communicator) -> None:
    found = BoxDigest(stored, box, item.stored, always=True)
    for window, data in blocks(stored, box.shape, item.stored):
        found.update(to_global(window, box), data)
        comm.progress()
    found.check(item.name)
