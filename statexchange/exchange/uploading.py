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

from statexchange.comm.communicator import Communicator, from_all, from_root
from statexchange.errors import IncompleteError, StorageError, UnsupportedError
from statexchange.exchange.exporting import RootExport
from statexchange.formats.model_files import MANIFEST
from statexchange.sharding.options import CallOptions
from statexchange.sharding.write_plan import WriteFile, WritePlan, assign_hosts
from statexchange.storage import files

_PART_BYTES = 8 << 20  # read and uploaded at a time, and progress is shown after each


@dataclass(frozen=True, slots=True)
class _Scratch:
    """A file without a name, as it is written, and its size."""

    file: WriteFile
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Target:
    """Root's target: its URL, the key of its build, and of each file the header and the size."""

    url: str
    key: str
    headers: Sequence[bytes]
    sizes: Sequence[int]


@dataclass(frozen=True, slots=True)
class Upload:
    """The upload of the files of one export.

    Attributes:
        target: where they go.
        names: the names of all files.
        plan: the plan with the files that the ranks of this host write.
        nodes: for each file the number of the host that writes it.
        scratch_files: those of this host, by their numbers in the plan.
    """

    target: _Target
    names: Sequence[str]
    plan: WritePlan
    nodes: Sequence[int]
    scratch_files: Mapping[int, _Scratch]

    def run(self, comm: Communicator, call: CallOptions) -> dict[str, str]:
        """Upload each file by one rank of the host that has written it; return their versions. Collective."""
        versions: dict[str, str] = {}
        with comm.phase("uploading", timeout_s=call.stall_timeout_s):
            # Each rank of the host uploads every n-th of its files, so that all upload at once.
            turn = comm.nodes[: comm.rank].count(comm.node_rank)
            for number in list(self.scratch_files)[turn :: comm.nodes.count(comm.node_rank)]:
                versions[self.names[number]] = self._put(number, comm.progress)
        # Root commits what it knows the versions of: a file that nobody has uploaded must not be missing silently.
        versions_by_name: dict[str, str] = {}
        for of_rank in from_all(comm, versions, dict[str, str], "the uploaded files"):
            versions_by_name |= of_rank
        if versions_by_name.keys() != set(self.names):
            name = min(set(self.names) - versions_by_name.keys())
            raise IncompleteError("no rank has uploaded this file", path=f"{self.target.url}/{name}")
        return versions_by_name

    def _put(self, number: int, progress: Callable[[], object]) -> str:
        """Upload a file; return its version."""
        from statexchange.storage.publish.object_build import ObjectMember  # imports fsspec

        scratch, target = self.scratch_files[number], self.target
        file = scratch.file
        fd = files.open_for_writing(file.path, file.link, file.identity)
        with files.closing(fd, file.path):
            parts = _parts(fd, scratch.nbytes, file.path, progress)
            member = ObjectMember(target.url, target.key, MANIFEST)
            return member.upload(self.names[number], parts, scratch.nbytes)


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
    target = _Target(url, "", (), ())
    with comm.phase("opening the target"):
        if root is not None:
            sizes = [len(header) + file.data_nbytes for header, file in zip(root.headers, root.plan.files, strict=True)]
            target = _Target(url, root.publication.build.share(), root.headers, sizes)
    target = from_root(comm, target, _Target, "the target")
    # Any host can upload.
    nodes = assign_hosts(plan, comm.nodes, [True] * comm.world_size)
    # One rank makes the files of a host: a file without a name is opened by its maker's descriptor alone.
    maker = comm.nodes.index(comm.node_rank)  # the first rank of this host
    names = [os.path.basename(file.path) for file in plan.files]
    scratch_files: dict[int, _Scratch] = {}
    with comm.phase("making temporary files"):
        if comm.rank == maker:
            for number, node in enumerate(nodes):
                if node == comm.node_rank:
                    scratch_files[number] = _make(names[number], target.headers[number], target.sizes[number], building)
    scratch_files = from_all(comm, scratch_files, dict[int, _Scratch], "its temporary files")[maker]
    written = list(plan.files)
    for number, scratch in scratch_files.items():
        written[number] = scratch.file
    return Upload(target, names, replace(plan, files=tuple(written)), nodes, scratch_files)


def _make(name: str, header: bytes, nbytes: int, building: contextlib.ExitStack) -> _Scratch:
    """Make a file without a name that begins with a header; `name` is that of its object."""
    if sys.platform != "linux":
        raise UnsupportedError("an export to a URL needs Linux's /proc: export to a directory, and copy that")
    folder = ""
    try:
        folder = tempfile.gettempdir()
        # O_TMPFILE, where the file system has it: no name is left behind, even by kill -9.
        opened = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (`building` closes it)
        fd = building.enter_context(opened).fileno()
        os.truncate(fd, nbytes)
    except OSError as error:
        advice = "set TMPDIR to another directory"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            advice = "raise the limit (ulimit -n), or make fewer files (max_shard_size)"
        raise StorageError.of(error, "make a temporary file", path=folder or None).located(advice=advice) from error
    path = f"{folder}, set by TMPDIR, for {name}"
    files.pwrite_all(fd, header, 0, path)
    # Device and inode show another rank that the descriptor is still that of this file.
    stat = os.fstat(fd)
    return _Scratch(WriteFile(path, False, f"/proc/{os.getpid()}/fd/{fd}", (stat.st_dev, stat.st_ino)), nbytes)


def _parts(fd: int, nbytes: int, path: str, progress: Callable[[], object]) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(_PART_BYTES, nbytes)))
    for at in range(0, nbytes, _PART_BYTES):
        part = buffer[: min(_PART_BYTES, nbytes - at)]
        files.pread_into(fd, part, at, path)
        progress()
        yield part
