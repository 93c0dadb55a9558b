"""Export to an object store: the ranks of a host write a file together on this host, and one of them uploads it.

An object is uploaded from begin to end, while ranks write a file at many places at once. So each file is first a file
without a name in the temporary directory (TMPDIR) of the host that writes it. The other ranks of the host open it
through /proc, by its maker's descriptor. The system removes it when its maker has ended, however that ends.

The objects belong to root's build, whose claim keeps others away, and which commits them by the manifest.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from statexchange.comm.communicator import Communicator, from_all, from_root, to_root
from statexchange.errors import StorageError, UnsupportedError
from statexchange.exchange.exporting import RootExport
from statexchange.formats.huggingface import MANIFEST
from statexchange.messages import decode, encoded
from statexchange.sharding.options import CallOptions
from statexchange.sharding.write_plan import WriteFile, WritePlan, assign_hosts
from statexchange.storage import files
from statexchange.storage.publish import upload_into_build

__all__ = ["Upload", "open_upload"]

_PART_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class _Scratch:
    """A file without a name: its path through /proc, the directory in which it is, its size, and its identity."""

    path: str
    folder: str
    nbytes: int
    identity: Sequence[int]

    @property
    def write_file(self) -> WriteFile:
        """This as a file of a plan."""
        return WriteFile(self.path, False, tuple(self.identity))


@dataclass(frozen=True, slots=True)
class _Target:
    """Root's target: its URL, the key of its build, and of each file the header and the size."""

    url: str
    key: str
    headers: Sequence[bytes]
    sizes: Sequence[int]


class Upload:
    """The upload of the files of one export.

    Attributes:
        plan: the plan with the paths under which the ranks of this host write.
        nodes: for each file the number of the host that writes it.
    """

    def __init__(self, target: _Target, plan: WritePlan, nodes: Sequence[int], made: Mapping[int, _Scratch]) -> None:
        self.nodes = nodes
        self._target = target
        self._names = [os.path.basename(file.path) for file in plan.files]
        self._made = made
        paths = []
        for number in range(len(nodes)):
            scratch = made.get(number)
            paths.append(WriteFile("", False) if scratch is None else scratch.write_file)
        self.plan = replace(plan, files=tuple(paths))

    def run(self, comm: Communicator, call: CallOptions) -> dict[str, str]:
        """Upload each file by one rank of the host that has written it; return on root their versions. Collective."""
        versions: dict[str, str] = {}
        with comm.phase("uploading", timeout_s=call.stall_timeout_s):
            turn = comm.nodes[: comm.rank].count(comm.node_rank)
            for number in list(self._made)[turn :: comm.nodes.count(comm.node_rank)]:
                versions[self._names[number]] = self._put(number, comm.progress)
        of_all: dict[str, str] = {}
        for rank, data in enumerate(to_root(comm, encoded(versions, dict[str, str]), "the uploaded files")):
            of_all |= decode(data, dict[str, str], "the uploaded files", rank)
        return of_all

    def _put(self, number: int, progress: Callable[[], object]) -> str:
        """Upload a file; return its version."""
        scratch, target = self._made[number], self._target
        fd = files.open_for_writing(scratch.path, scratch.identity)
        with files.closing(fd, scratch.path):
            parts = _parts(fd, scratch.nbytes, scratch.path, progress)
            return upload_into_build(target.url, target.key, (self._names[number], MANIFEST), parts, scratch.nbytes)

    @contextlib.contextmanager
    def naming_folder(self) -> Iterator[None]:
        """Name the temporary directory in an error of a file there, which has no name."""
        try:
            yield
        except StorageError as error:
            if not str(error.path).startswith("/proc/"):
                raise
            folder = next((scratch.folder for scratch in self._made.values()), None)
            raise error.located(path=folder, advice="TMPDIR names another directory") from error


def open_upload(
    comm: Communicator,
    plan: WritePlan,
    url: str,
    root: RootExport | None,
    building: contextlib.ExitStack,
) -> Upload:
    """Choose the host that writes each file, and make the files there. Collective.

    Args:
        comm: the communicator.
        plan: the plan, whose files are at a URL.
        url: that URL; root's counts.
        root: on root the export, with the directory under construction.
        building: at its end the files are gone.
    """
    here = _Target(url, "", (), ())
    if root is not None:
        sizes = [len(header) + file.data_nbytes for header, file in zip(root.headers, root.plan.files, strict=True)]
        here = _Target(url, root.publication.share(), root.headers, sizes)
    sent = from_root(comm, here, _Target, "the target")
    nodes = assign_hosts(plan, comm.nodes, [True] * comm.world_size)
    made: dict[int, _Scratch] = {}
    with comm.phase("making temporary files"):
        if comm.local_rank == 0:
            for number, node in enumerate(nodes):
                if node == comm.node_rank:
                    made[number] = _made(sent.headers[number], sent.sizes[number], building)
    by_rank = from_all(comm, made, dict[int, _Scratch], "its temporary files")
    seen = by_rank[comm.nodes.index(comm.node_rank)]
    with comm.phase("looking for temporary files"):
        for scratch in seen.values():
            _check_seen(scratch, comm)
    return Upload(sent, plan, nodes, seen)


def _made(header: bytes, nbytes: int, building: contextlib.ExitStack) -> _Scratch:
    """Make a file that begins with a header."""
    if sys.platform != "linux":
        raise UnsupportedError("an export to a URL needs Linux's /proc: export to a directory, and copy that")
    folder = ""
    try:
        folder = tempfile.gettempdir()
        made = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (`building` closes it)
        fd = building.enter_context(made).fileno()
        os.truncate(fd, nbytes)
    except OSError as error:
        advice = "TMPDIR names another directory"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            advice = "raise the limit (ulimit -n), or make fewer files (max_shard_size)"
        raise StorageError.of(error, "make a temporary file", path=folder or None).located(advice=advice) from error
    path = f"/proc/{os.getpid()}/fd/{fd}"
    files.pwrite_all(fd, header, 0, path)
    return _Scratch(path, folder, nbytes, _identity(os.fstat(fd)))


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def _check_seen(scratch: _Scratch, comm: Communicator) -> None:
    """Raise UnsupportedError unless this rank sees the file of another rank of its host."""
    try:
        is_seen = _identity(os.stat(scratch.path)) == tuple(scratch.identity)
    except OSError:
        is_seen = False
    if not is_seen:
        first = comm.nodes.index(comm.node_rank)
        text = (
            f"this rank cannot open the files of rank {first} on the same host: run both as one user in one container"
        )
        raise UnsupportedError(text, rank=comm.rank, path=scratch.path)


def _parts(fd: int, nbytes: int, path: str, progress: Callable[[], object]) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(_PART_BYTES, nbytes)))
    for at in range(0, nbytes, _PART_BYTES):
        part = buffer[: min(_PART_BYTES, nbytes - at)]
        files.pread_into(fd, part, at, path)
        progress()
        yield part
