"""A copy of the save that a job made last in the shared memory of its hosts, where a restarted job reads it.

memory_directory.py describes the files of one host, and when a copy is removed. This is the protocol of the ranks.

**After a save** (`MemoryCopies.keep`), which is whole on disk by then:

1. The first rank of each host opens the build of the host's copy, in place of the copy of the save before.
2. Each rank writes its file once more from its tensors, whose digests must be those of the save.
3. With several hosts each rank sends its file to a rank of the next host. So the loss of one host loses no file.
4. If all ranks have succeeded, the first rank of each host publishes.

A host needs room for one copy, not two: keeping the previous one until the new one is whole would be of no use, as a
load takes the newest save. After a failure in any step (no room, another user's directory) rank 0 logs one warning; the
save is on disk all the same. If the save itself fails, the previous copy stays.

**In a load** (`MemoryCopies.reading`), which has opened the save on disk and knows what it will read:

1. The ranks exchange which files of this save each host has.
2. A host whose ranks will read a file that it lacks gets it from one that has it. What no host has, and what there is
   no room for, is read from disk.
3. Boxes in memory that will be read in part are checked against their digests, before any tensor is changed. Reading
   itself checks each box that is read whole.
4. When all is read, each file in memory must not have changed: another job may have written over it meanwhile.

If a copy is broken, a warning names file and tensor, the copy is removed, and all ranks load from disk instead.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from statexchange.comm.communicator import Communicator, from_all
from statexchange.errors import StateExchangeError, StorageError, without_secrets
from statexchange.exchange.reading import ReadItem
from statexchange.formats.source import Source
from statexchange.sharding.shards import Box, intersect
from statexchange.storage import files
from statexchange.storage.files import WINDOW_BYTES
from statexchange.storage.location import open_path
from statexchange.storage.memory_directory import (
    begin_copy,
    begin_fetch,
    commit_copy,
    copy_path,
    drop_copies,
    files_of,
)
from statexchange.storage.publish.build import Build, WrittenFile
from statexchange.storage.rank_writer import DigestedTensors
from statexchange.storage.regions import BoxDigest, blocks, to_global
from statexchange.storage.store import ByteRange, Store, StoredFile
from statexchange.storage.tensorfile import rank_file_names

_log = logging.getLogger(__name__)


class MemoryCopies:
    """The copies in memory of one directory of saves, as all ranks of a job use them.

    Args:
        path: absolute path or URL of the directory of saves.
        stall_timeout_s: limit of the time in which no rank moves a byte.
    """

    def __init__(self, path: str, stall_timeout_s: float) -> None:
        self._shown = without_secrets(path)
        self._stall_timeout_s = stall_timeout_s
        self._has_warned = False

    # After a save

    def keep(self, path: str, save: str, sizes: Sequence[int], file: WrittenFile, comm: Communicator) -> None:
        """Copy the save at `path` with the id `save`. Collective; a failure is a warning.

        `sizes` are those of all ranks' files, and `file` is this rank's.
        """
        try:
            self._copy(path, save, sizes, file.content, comm)
        except (StateExchangeError, OSError) as error:  # on all ranks; the save is on disk, and the job goes on
            rank = getattr(error, "rank", None) or 0
            if comm.rank == 0 and not self._has_warned:
                text = "%s: the newest save is not kept in memory, only on disk, because of rank %d on %s: %s"
                _log.warning(text, self._shown, rank, comm.hosts[rank], error)
            self._has_warned = True

    def _copy(self, path: str, save: str, sizes: Sequence[int], content: DigestedTensors, comm: Communicator) -> None:
        names, hosts = rank_file_names(comm.world_size), _ranks_by_host(comm)
        ranks_here = hosts[comm.node_rank]
        with contextlib.ExitStack() as building:
            build: Build | None = None
            with comm.phase("opening the copy in memory"):
                if comm.local_rank == 0:
                    # Its own ranks' files, and those of the host before, which sends to this one.
                    kept = {*ranks_here, *hosts[comm.node_rank - 1]}
                    build = building.enter_context(begin_copy(path, save, {names[rank]: sizes[rank] for rank in kept}))
            folder = from_all(comm, "" if build is None else build.building_path, str, "its directory")[ranks_here[0]]
            with comm.phase("copying to memory", timeout_s=self._stall_timeout_s):
                _write(content, os.path.join(folder, names[comm.rank]), comm)
            if len(hosts) > 1:
                with comm.phase("copying to the next host", timeout_s=self._stall_timeout_s):
                    _send_all(_to_next_host(hosts, names, sizes), folder, folder, comm)
            # Only now, after phases in which no rank has failed: all files of each host are whole.
            with comm.phase("publishing the copy in memory"):
                if build is not None:
                    commit_copy(build, path, save)

    # In a load

    @contextlib.contextmanager
    def reading(
        self, source: Source, items: Sequence[ReadItem], comm: Communicator
    ) -> Iterator[tuple[Sequence[ReadItem], int]]:
        """Yield the items to read, with their files in memory where they lie there, and the number of those files.

        Collective.
        """
        here: dict[str, int] = {}
        with comm.phase("looking for copies in memory"):
            if comm.local_rank == 0:
                try:
                    here = files_of(source.save)
                except (StateExchangeError, OSError) as error:
                    _log.warning("%s: cannot look for copies in memory: %s", self._shown, error)
        answers = from_all(comm, here, dict[str, int], "its copies")
        hosts = _ranks_by_host(comm)
        copies = [answers[ranks[0]] for ranks in hosts]
        if not any(copies):
            yield items, 0
            return
        folders: dict[str, str] = {}
        absent: dict[str, int] = {}
        for name, size in _sizes_of(items).items():
            # A file of another size is no copy of the one on disk.
            if copies[comm.node_rank].get(name) == size:
                folders[name] = copy_path(source.save)
            else:
                absent[name] = size
        with contextlib.ExitStack() as opened:
            folders |= self._fetched(source.save, absent, copies, hosts, comm, opened)
            with comm.phase("opening copies in memory"):
                in_memory = _open_all(folders, opened)
                copied = [_from_memory(item, in_memory) for item in items]
            with comm.phase("checking copies in memory", timeout_s=self._stall_timeout_s):
                for item in copied:
                    _check(item, in_memory, comm)
            yield copied, len(in_memory)
            # Another job's copy writes over the pages of a file, which keeps its inode: its time shows it.
            with comm.phase("looking at copies in memory again"):
                for file in in_memory.values():
                    file.check_unchanged()

    def _fetched(
        self,
        save: str,
        absent: Mapping[str, int],
        copies: Sequence[Mapping[str, int]],
        hosts: Sequence[Sequence[int]],
        comm: Communicator,
        opened: contextlib.ExitStack,
    ) -> dict[str, str]:
        """Get files from other hosts, until `opened` ends; return the directory of each. Collective.

        What no other host has, and what this one has no room for, is read from disk. `copies` has the sizes of the
        files that each host has.
        """
        answers = from_all(comm, absent, dict[str, int], "the files that its host lacks")
        wanted: list[dict[str, int]] = []  # by host, for each file that it lacks a host that has it
        for node, ranks in enumerate(hosts):
            sizes: dict[str, int] = {}
            for rank in ranks:
                sizes |= answers[rank]
            wanted.append({})
            for name, size in sizes.items():
                nodes = [holder for holder, of_host in enumerate(copies) if of_host.get(name) == size]
                if nodes:
                    wanted[-1][name] = nodes[node % len(nodes)]  # hosts that lack one file get it from different ones
        if not any(wanted):
            return {}
        folder = ""
        with comm.phase("looking for room"):
            if comm.local_rank == 0 and wanted[comm.node_rank]:
                nbytes = sum(copies[source][name] for name, source in wanted[comm.node_rank].items())
                try:
                    folder = opened.enter_context(begin_fetch(nbytes)).building_path
                except StorageError as error:
                    _log.warning("%s: files of other hosts' copies are read from disk: %s", self._shown, error)
        folders = from_all(comm, folder, str, "its directory")
        # Each rank makes the same list, and takes part in the transfers that name it.
        transfers: list[_Transfer] = []
        for node, ranks in enumerate(hosts):
            for name, source in wanted[node].items():
                if folders[ranks[0]]:
                    src, dst = _one_of(hosts[source], len(transfers)), _one_of(ranks, len(transfers))
                    transfers.append(_Transfer(name, copies[source][name], src, dst))
        folder = folders[hosts[comm.node_rank][0]]
        with comm.phase("fetching copies in memory", timeout_s=self._stall_timeout_s):
            _send_all(transfers, copy_path(save), folder, comm)
        if not folder:  # no room
            return {}
        return dict.fromkeys(wanted[comm.node_rank], folder)

    def drop(self, path: str, comm: Communicator) -> None:
        """Remove the copies of the save at `path`, which may be gone. Collective; a failure is a warning."""
        # A phase, so that others do not wait for a rank that is interrupted here.
        with comm.phase("removing the copy in memory"):
            if comm.local_rank == 0:
                try:
                    drop_copies(path)
                except (StateExchangeError, OSError) as error:
                    text = "%s: cannot remove the copy in memory of %s: %s"
                    _log.warning(text, self._shown, os.path.basename(path), error)


# Hosts, and files that go from one to another


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A file that one rank sends to another."""

    name: str
    nbytes: int
    src: int
    dst: int


def _ranks_by_host(comm: Communicator) -> list[list[int]]:
    """Return the ranks of each host, of which the first makes and removes directories."""
    hosts: list[list[int]] = [[] for _ in range(comm.num_nodes)]
    for rank, node in enumerate(comm.nodes):
        hosts[node].append(rank)
    return hosts


def _one_of(ranks: Sequence[int], number: int) -> int:
    """Return the rank of a host that sends or receives the file of this number."""
    return ranks[number % len(ranks)]


def _to_next_host(hosts: Sequence[Sequence[int]], names: Sequence[str], sizes: Sequence[int]) -> list[_Transfer]:
    """Return the transfers of each rank's file to the next host; even hosts send first, while others receive.

    Of hosts with the ranks (0, 1) and (2, 3): 0 to 2, 1 to 3, then 2 to 0, 3 to 1.
    """
    transfers = []
    for node in (*range(0, len(hosts), 2), *range(1, len(hosts), 2)):
        for rank in hosts[node]:
            dst = _one_of(hosts[(node + 1) % len(hosts)], rank)
            transfers.append(_Transfer(names[rank], sizes[rank], rank, dst))
    return transfers


def _write(content: DigestedTensors, path: str, comm: Communicator) -> None:
    """Write this rank's file of a save once more."""
    with _opened(path, content.nbytes) as fd:
        files.pwrite_all(fd, content.header, 0, path)

        def write_at(part: memoryview, at: int) -> None:
            files.pwrite_all(fd, part, at, path)
            comm.progress()

        content.write_to(write_at)


@contextlib.contextmanager
def _opened(path: str, nbytes: int | None) -> Iterator[int]:
    """Open a file; with `nbytes` for writing and of this size, and make it if it does not exist."""
    folder, name = os.path.split(path)
    with files.directory(folder) as dir_fd, contextlib.ExitStack() as opening:
        if nbytes is None:
            fd = files.open_file(name, dir_fd, path)
            opening.callback(os.close, fd)
        else:
            files.audit("open", path)
            try:
                # Without O_TRUNC: it may be a file of the previous copy, whose pages are written over.
                fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
                opening.callback(os.close, fd)
                os.ftruncate(fd, nbytes)
            except OSError as error:
                raise StorageError.of(error, "open for writing", path=path) from error
        yield fd


def _send_all(transfers: Iterable[_Transfer], source: str, target: str, comm: Communicator) -> None:
    """Send files of the directory `source` into the directory `target`, each as this rank's host has it. Collective.

    All ranks go through the transfers in one order. A rank that cannot read or write its file goes on with any bytes,
    since the other one must not wait for it, and raises its last failure at the end.
    """
    failure: StateExchangeError | None = None
    for transfer in transfers:
        if comm.rank in (transfer.src, transfer.dst):
            folder = source if comm.rank == transfer.src else target
            failure = _send(transfer, os.path.join(folder, transfer.name), comm) or failure
    if failure is not None:
        raise failure


def _send(transfer: _Transfer, path: str, comm: Communicator) -> StateExchangeError | None:
    """Send or receive a file, window by window; return a failure of this rank."""
    is_sender = comm.rank == transfer.src
    failure: StateExchangeError | None = None
    window = np.zeros(min(WINDOW_BYTES, transfer.nbytes), np.uint8)
    with contextlib.ExitStack() as opening:
        fd = -1
        try:
            fd = opening.enter_context(_opened(path, None if is_sender else transfer.nbytes))
        except StateExchangeError as error:
            failure = error
        for at in range(0, transfer.nbytes, len(window)):
            part = window[: transfer.nbytes - at]
            if not is_sender:
                comm.recv(part, transfer.src)
            try:
                if failure is None and is_sender:
                    files.pread_into(fd, part.data, at, path)
                elif failure is None:
                    files.pwrite_all(fd, part.data, at, path)
            except StateExchangeError as error:
                failure = error
            if is_sender:
                comm.send(part, transfer.dst)
            comm.progress()
    return failure


# What is read


def _sizes_of(items: Sequence[ReadItem]) -> dict[str, int]:
    """Return the files from which a load reads, with their sizes."""
    sizes = {}
    for item in items:
        for stored in item.boxes.values():
            sizes[_name_of(stored)] = stored.file.size
    return sizes


def _name_of(stored: ByteRange) -> str:
    return os.path.basename(stored.file.path)


def _open_all(folders: Mapping[str, str], opened: contextlib.ExitStack) -> dict[str, StoredFile]:
    """Open files, each in its directory, until `opened` ends."""
    stores: dict[str, Store] = {}
    in_memory: dict[str, StoredFile] = {}
    for name, folder in folders.items():
        if folder not in stores:
            stores[folder] = opened.enter_context(open_path(folder)).store
        in_memory[name] = stores[folder].open(name)
    return in_memory


def _from_memory(item: ReadItem, in_memory: Mapping[str, StoredFile]) -> ReadItem:
    boxes = {}
    for box, stored in item.boxes.items():
        boxes[box] = stored._replace(file=in_memory.get(_name_of(stored), stored.file))
    return item._replace(boxes=boxes)


def _check(item: ReadItem, in_memory: Mapping[str, StoredFile], comm: Communicator) -> None:
    """Compare the boxes in memory that a load will read in part with their digests."""
    for box, stored in item.boxes.items():
        if in_memory.get(_name_of(stored)) is stored.file and _is_read_in_part(box, item):
            box_digest = BoxDigest(stored, box, item.stored, always=True)
            for window, data in blocks(stored, box.shape, item.stored):
                box_digest.update(to_global(window, box), data)
                comm.progress()
            box_digest.check(item.name)


def _is_read_in_part(box: Box, item: ReadItem) -> bool:
    """Whether the reading cannot compare a stored box with its digest, which is that of all of it."""
    overlaps = [intersect(box, target) for target in item.local.shard.boxes]
    return any(part not in (None, box) for part in overlaps)
