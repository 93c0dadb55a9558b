"""Move the files of a copy in memory: from the save into a host's directory, and between the directories of hosts.

All ranks go through the transfers between hosts in one order. A rank that cannot read or write its file goes on with
any bytes: the other one must not wait for it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from statexchange.comm.communicator import Communicator
from statexchange.errors import StateExchangeError, StorageError
from statexchange.storage import files
from statexchange.storage.atomic import write_new
from statexchange.storage.files import WINDOW_BYTES, digest
from statexchange.storage.location import open_path
from statexchange.storage.tensorfile import MANIFEST, DigestedTensors, SaveManifest, read_header_bytes

__all__ = ["Hosts", "copy_content", "fetch_files", "fetch_headers", "link_files", "send_to_next"]


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of a communicator: the ranks of each, of which the first makes and removes directories."""

    ranks: tuple[tuple[int, ...], ...]
    rank: int
    node: int

    @classmethod
    def of(cls, comm: Communicator) -> Hosts:
        """Return the hosts as this rank sees them. Not collective."""
        by_host: list[list[int]] = [[] for _ in range(comm.num_nodes)]
        for rank, node in enumerate(comm.nodes):
            by_host[node].append(rank)
        return cls(tuple(map(tuple, by_host)), comm.rank, comm.node_rank)

    @property
    def first(self) -> int:
        """The first rank of this host."""
        return self.ranks[self.node][0]

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of its host."""
        return self.rank == self.first

    def ranks_kept(self) -> list[int]:
        """Return the ranks whose files this host keeps: its own, and those of the previous host."""
        return sorted({*self.ranks[self.node], *self.ranks[self.node - 1]})

    def of_file(self, node: int, rank: int) -> int:
        """Return the rank of a host that sends or receives the file of `rank`."""
        return self.ranks[node][rank % len(self.ranks[node])]


# From the save


def copy_content(content: DigestedTensors, folder: str, manifest: SaveManifest, comm: Communicator) -> str:
    """Write this rank's file of a save into a directory once more; return the digest of its header."""
    path = os.path.join(folder, manifest.files[comm.rank])
    with _opened(path, content.nbytes) as fd:
        files.pwrite_all(fd, content.header, 0, path)

        def write_at(part: memoryview, at: int) -> None:
            files.pwrite_all(fd, part, at, path)
            comm.progress()

        content.write_to(write_at)
    return digest(content.header)


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


# Between hosts


def send_to_next(folder: str, manifest: SaveManifest, hosts: Hosts, comm: Communicator) -> None:
    """Send this rank's file to the next host, and receive those of the previous host. Collective."""
    transfers = []
    for node, ranks in enumerate(hosts.ranks):
        for rank in ranks:
            dst = hosts.of_file((node + 1) % len(hosts.ranks), rank)
            # Even hosts send first, while their neighbours receive.
            transfers.append((node % 2, rank, dst, rank))
    _transfer_all(folder, manifest, [transfer[1:] for transfer in sorted(transfers)], comm, is_loaded=False)


def fetch_files(
    folder: str,
    manifest: SaveManifest,
    holders: Sequence[frozenset[int]],
    lacking: Sequence[Sequence[int]],
    comm: Communicator,
) -> None:
    """Send hosts the files of the ranks in `lacking` from hosts that hold them, into the directory of a load.

    Collective.
    """
    hosts = Hosts.of(comm)
    transfers = []
    for node, ranks in enumerate(lacking):
        for rank in ranks:
            sources = [source for source, here in enumerate(holders) if rank in here]
            # Hosts that lack one file get it from different ones that have it.
            source = sources[node % len(sources)]
            transfers.append((hosts.of_file(source, rank), hosts.of_file(node, rank), rank))
    _transfer_all(folder, manifest, transfers, comm, is_loaded=True)


def _transfer_all(
    folder: str,
    manifest: SaveManifest,
    transfers: Iterable[tuple[int, int, int]],
    comm: Communicator,
    *,
    is_loaded: bool,
) -> None:
    """Send files from rank to rank, each given as (src, dst, rank of the file); raise the last failure of this rank."""
    failure: StateExchangeError | None = None
    for src, dst, rank in transfers:
        if comm.rank in (src, dst):
            path = os.path.join(folder, manifest.files[rank])
            failure = _transfer(path, manifest.nbytes[rank], (src, dst), comm, is_loaded=is_loaded) or failure
    if failure is not None:
        raise failure


def _transfer(
    path: str, nbytes: int, pair: tuple[int, int], comm: Communicator, *, is_loaded: bool
) -> StateExchangeError | None:
    """Send a file from the first rank of a pair to the second, window by window; return a failure of this rank."""
    src, dst = pair
    is_sender = comm.rank == src
    failure: StateExchangeError | None = None
    window = np.zeros(min(WINDOW_BYTES, nbytes), np.uint8)
    with contextlib.ExitStack() as opening:
        fd = -1
        try:
            fd = opening.enter_context(_opened(path, None if is_sender else nbytes))
        except StateExchangeError as error:
            failure = error
        for at in range(0, nbytes, len(window)):
            part = window[: nbytes - at]
            if not is_sender:
                comm.recv(part, src)
            try:
                if failure is None and is_sender:
                    files.pread_into(fd, part.data, at, path)
                elif failure is None:
                    files.pwrite_all(fd, part.data, at, path)
            except StateExchangeError as error:
                failure = error
            if is_sender:
                comm.send(part, dst)
            comm.progress()
        if is_loaded and not is_sender and failure is None:
            _hide_change(fd)
    return failure


def _hide_change(fd: int) -> None:
    """Give a file the modification time 0.

    A load opens it when only its header is there, and would treat a changed time as a changed file.
    """
    os.utime(fd, ns=(0, 0))


# The directory of a load


def link_files(path: str, folder: str, manifest: SaveManifest, ranks: Iterable[int]) -> None:
    """Give the files of this host's copy names in another directory, and write the manifest there."""
    data = manifest.to_bytes()
    with files.directory(folder) as dir_fd:
        write_new(dir_fd, MANIFEST, data, path=os.path.join(folder, MANIFEST), durable=False)
    for rank in ranks:
        name = manifest.files[rank]
        try:
            os.link(os.path.join(path, name), os.path.join(folder, name), follow_symlinks=False)
        except OSError as error:
            raise StorageError.of(error, "link", path=os.path.join(path, name)) from error


def fetch_headers(
    folder: str, manifest: SaveManifest, holders: Sequence[frozenset[int]], hosts: Hosts, comm: Communicator
) -> None:
    """Send each file's header to the hosts that lack the file, as a file of full size without other bytes. Collective.

    Only the first rank of each host takes part.
    """
    for rank, name in enumerate(manifest.files):
        source = next(node for node, here in enumerate(holders) if rank in here)
        path = os.path.join(folder, name)
        for node, here in enumerate(holders):
            if rank in here:
                continue
            src, dst = hosts.ranks[source][0], hosts.ranks[node][0]
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
                with _opened(path, manifest.nbytes[rank]) as fd:
                    files.pwrite_all(fd, received.data, 0, path)
                    _hide_change(fd)
