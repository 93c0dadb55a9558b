"""A copy of a job's newest save in the shared memory of its hosts, from which a restarted job loads.

memory_directory.py describes the files of one host, and when a copy is removed. This is the protocol of the ranks.

**After a save** (`MemoryCopies.keep`), which is whole on disk by then:

1. Root sends the manifest of the save and the identity of the directory of saves.
2. The first rank of each host removes the previous copy, checks the free memory, and opens the build of the new one.
3. Each rank writes its file once more from its tensors, whose digests must be those of the save.
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

from statexchange.comm.communicator import Communicator, from_all, from_root
from statexchange.errors import (
    CorruptError,
    IncompleteError,
    NotFoundError,
    StateExchangeError,
    StorageError,
    UnsafeError,
    without_secrets,
)
from statexchange.exchange.copy_transfer import (
    Hosts,
    copy_content,
    fetch_files,
    fetch_headers,
    link_files,
    send_to_next,
)
from statexchange.exchange.reading import ReadItem
from statexchange.sharding.shards import Box, intersect
from statexchange.storage.files import digest
from statexchange.storage.memory_directory import HEADERS, HostCopy, MemoryDirectory, headers_to_bytes
from statexchange.storage.publish.build import Build, WrittenFile
from statexchange.storage.regions import BoxDigest, blocks, to_global
from statexchange.storage.steps import identity_of_saves, make_identity, newest_step, read_saves, superseded_saves
from statexchange.storage.store import ByteRange
from statexchange.storage.tensorfile import MANIFEST, SaveManifest, rank_of_file

__all__ = ["COPY_ERRORS", "MemoryCopies"]

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
        manifest, hosts = start.manifest, Hosts.of(comm)
        with contextlib.ExitStack() as building:
            build: Build | None = None

            def begin() -> str:
                nonlocal build
                if not hosts.is_first:
                    return ""
                directory = MemoryDirectory(self.path, start.identity)
                # Before the new one is begun: the host has room for one copy, not for two.
                directory.sweep(step)
                build = building.enter_context(directory.begin(step, hosts.ranks_kept(), manifest))
                return build.building_path

            def copy_file() -> str:
                return copy_content(file.content, folder, manifest, comm)

            def send() -> None:
                send_to_next(folder, manifest, hosts, comm)

            def publish() -> None:
                # The manifest last: a copy without it does not exist.
                if build is not None and headers is not None:
                    build.put(HEADERS, headers_to_bytes(dict(zip(manifest.files, headers, strict=True))))
                    build.commit(MANIFEST, manifest.to_bytes())

            begun = self._step(begin, comm)
            if begun is None:
                return
            folder = begun[hosts.first]
            headers = self._step(copy_file, comm)
            # One host has nobody to send to, and is spared the agreement.
            if headers is not None and (len(hosts.ranks) == 1 or self._step(send, comm) is not None):
                self._step(publish, comm)

    def _start(self, step: int, comm: Communicator) -> _Start | None:
        """Return what root sends; None if the save is not the newest one. Collective."""
        start: _Start | None = None
        problem: BaseException | None = None
        if comm.rank == 0:
            try:
                saves = read_saves(self.path)
                manifest = saves.get(step)
                if step == newest_step(saves) and isinstance(manifest, SaveManifest):
                    start = _Start(make_identity(self.path), manifest)
            except StateExchangeError as error:
                problem = error
        if problem is not None:
            self._warn(0, str(problem), comm)
        return from_root(comm, start, _Start | None, "the save to copy")

    def _step(self, work: Callable[[], str | None], comm: Communicator) -> list[str] | None:
        """Do a part of a copy; return the texts of all ranks; None, with a warning, if one has failed. Collective."""
        text, problem = "", ""
        try:
            text = work() or ""
        except (StateExchangeError, OSError) as error:
            problem = str(error) or repr(error)
        # No phase, whose end would raise: the save is on disk, and the job goes on without the copy.
        answers = from_all(comm, (text, problem), tuple[str, str], "the part of a copy")
        for rank, (_, rank_problem) in enumerate(answers):
            if rank_problem:
                self._warn(rank, rank_problem, comm)
                return None
        return [rank_text for rank_text, _ in answers]

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

    # Before a load

    def find(self, wanted: int | None, comm: Communicator) -> MemoryCopy | None:
        """Return the copy of step `wanted`, by default the newest; None if the save on disk is to be loaded.

        Collective. Copies that cannot be used any more are removed.
        """
        disk = self._disk(wanted, comm)
        if disk is None:
            return None
        hosts = Hosts.of(comm)
        copies: list[HostCopy] = []
        if hosts.is_first:
            directory = MemoryDirectory(self.path, disk.identity)
            try:
                directory.sweep(disk.newest)
                copies = directory.copies()
            except (StateExchangeError, OSError) as error:
                _log.warning("%s: cannot look for copies in memory: %s", self._shown, error)
        parts = from_all(comm, list(map(_Part.of, copies)), list[_Part], "its copies", _check_parts)
        by_host = []
        for ranks in hosts.ranks:
            of_host = [part for part in parts[ranks[0]] if disk.may_be(part, wanted)]
            by_host.append(of_host)
            for part in of_host:
                if part.problem and comm.rank == 0:
                    text = "%s: the copy of step %d in memory of %s cannot be used: %s"
                    _log.warning(text, self._shown, part.step, comm.hosts[ranks[0]], part.problem)
        # All ranks choose from the same records, so that they agree without another message.
        best = _newest_whole(by_host)
        if best is None:
            return None
        holders = tuple(_ranks_of(best, of_host) for of_host in by_host)
        root = next(ranks[0] for ranks, here in zip(hosts.ranks, holders, strict=True) if here)
        manifest: SaveManifest | None = None
        for copy in copies:
            if copy.manifest is not None and _Part.of(copy).is_of(best):
                manifest = copy.manifest
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
                    newest = newest_step(saves)
                    at = newest if wanted is None else wanted
                    manifest = None if at is None else saves.get(at)
                    is_there = at is not None and at in saves
                    save = manifest.save if isinstance(manifest, SaveManifest) else None
                    superseded = tuple(sorted(superseded_saves(saves)))
                    disk = _Disk(identity, newest, at if is_there else None, save, superseded)
        return from_root(comm, disk, _Disk | None, "the saves on disk")

    @contextlib.contextmanager
    def opened(
        self, copy: MemoryCopy, comm: Communicator
    ) -> Iterator[tuple[str, Callable[[Sequence[ReadItem]], None]]]:
        """Yield the path of a directory with the copy, and the `before_reading` of a load from it.

        Collective; so is the yielded function.
        """
        directory = MemoryDirectory(self.path, copy.identity)
        path, manifest, holders = directory.step_path(copy.step), copy.manifest, copy.holders

        def check(items: Sequence[ReadItem]) -> None:
            with comm.phase("checking the copy in memory", timeout_s=self._stall_timeout_s):
                _check_digests(items, comm, every=not copy.is_on_disk)

        if all(len(here) == manifest.world_size for here in holders):
            yield path, check
            return
        with contextlib.ExitStack() as loading:
            hosts = Hosts.of(comm)
            fetched = ""
            with comm.phase("opening the copy in memory"):
                if hosts.is_first:
                    fetched = directory.make_loading()
                    loading.callback(_quietly_removed, directory, fetched)
                    link_files(path, fetched, manifest, holders[comm.node_rank])
            fetched = from_all(comm, fetched, str, "its directory")[hosts.first]
            with comm.phase("fetching headers", timeout_s=self._stall_timeout_s):
                fetch_headers(fetched, manifest, holders, hosts, comm)

            def fetch_and_check(items: Sequence[ReadItem]) -> None:
                read = from_all(comm, _ranks_read(items), list[int], "the files")
                lacking = []
                for ranks, here in zip(hosts.ranks, holders, strict=True):
                    lacking.append(sorted({file_rank for rank in ranks for file_rank in read[rank]} - here))
                with comm.phase("looking for room"):
                    if hosts.is_first:
                        directory.check_room(sum(manifest.nbytes[rank] for rank in lacking[comm.node_rank]))
                with comm.phase("fetching files", timeout_s=self._stall_timeout_s):
                    fetch_files(fetched, manifest, holders, lacking, comm)
                check(items)

            yield fetched, fetch_and_check

    def discard(self, copy: MemoryCopy, comm: Communicator) -> None:
        """Remove a copy that could not be loaded. Collective; a failure is a warning."""
        if Hosts.of(comm).is_first:
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
            if Hosts.of(comm).is_first:
                directory = MemoryDirectory(self.path, identity)
                dropped = directory.drop(step)
                directory.remove_empty()
        return any(from_all(comm, dropped, bool, "whether it had the copy"))


# What the ranks send each other


@dataclass(frozen=True, slots=True)
class _Start:
    """The record that root sends before a copy: the identity of the directory of saves, and the save's manifest."""

    identity: str
    manifest: SaveManifest


def _quietly_removed(directory: MemoryDirectory, path: str) -> None:
    """Remove the directory of a load; if that fails, the next load does it."""
    with contextlib.suppress(StateExchangeError):
        directory.remove_loading(path)


@dataclass(frozen=True, slots=True)
class _Disk:
    """The saves that root finds on disk before a load.

    Attributes:
        identity: the identity of the directory of saves.
        newest: the newest step.
        step: the step that would be loaded from disk; None if there is none.
        save: the id of that save; None if its manifest is broken.
        superseded: the ids of saves that others supersede.
    """

    identity: str
    newest: int | None
    step: int | None
    save: str | None
    superseded: tuple[str, ...]

    def may_be(self, part: _Part, wanted: int | None) -> bool:
        """Whether a copy may be loaded instead of the disk's save, if it is whole."""
        if (wanted is not None and part.step != wanted) or (wanted is None and part.save in self.superseded):
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
    ranks: set[int] = set()
    for other in of_host:
        if other.is_of(part):
            ranks.update(other.ranks)
    return frozenset(ranks)


def _newest_whole(by_host: Sequence[Sequence[_Part]]) -> _Part | None:
    """Return a part of the newest copy whose files the hosts have together; None if there is no such copy."""
    parts = [part for of_host in by_host for part in of_host if not part.problem]
    for part in sorted(parts, key=lambda part: part.step, reverse=True):
        here: set[int] = set()
        for of_host in by_host:
            here |= _ranks_of(part, of_host)
        if len(here) == part.world_size:
            return part
    return None


def _ranks_read(items: Sequence[ReadItem]) -> list[int]:
    """Return the ranks whose files a load will read."""
    ranks = set()
    for item in items:
        for box, stored in item.boxes.items():
            rank = rank_of_file(os.path.basename(stored.file.path))
            if rank is not None and _is_read(box, item, in_part=False):
                ranks.add(rank)
    return sorted(ranks)


def _check_digests(items: Sequence[ReadItem], comm: Communicator, *, every: bool) -> None:
    """Compare stored boxes with their digests: those that are read in part, or `every` one that is read."""
    checked = set()
    for item in items:
        for box, stored in item.boxes.items():
            place = (stored.file.path, stored.begin)
            # Reading checks a box that it reads whole; a part of one has no digest of its own.
            if place not in checked and _is_read(box, item, in_part=not every):
                checked.add(place)
                _check_box(item, box, stored, comm)


def _is_read(box: Box, item: ReadItem, *, in_part: bool) -> bool:
    """Whether a stored box is read for a live one; with `in_part`, whether it is read, but not as a whole."""
    for target in item.local.shard.boxes:
        shared = intersect(box, target)
        if shared is not None and not (in_part and shared == box):
            return True
    return False


def _check_box(item: ReadItem, box: Box, stored: ByteRange, comm: Communicator) -> None:
    box_digest = BoxDigest(stored, box, item.stored, always=True)
    for window, data in blocks(stored, box.shape, item.stored):
        box_digest.update(to_global(window, box), data)
        comm.progress()
    box_digest.check(item.name)
