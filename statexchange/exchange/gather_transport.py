"""Carry the tensors of ranks to root: through an arena of shared memory, or through a file of each in a workspace."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, cast

import numpy as np

from statexchange.comm.communicator import Communicator, from_root
from statexchange.errors import InvalidArgumentError, MismatchError, NotFoundError, UnsupportedError
from statexchange.exchange.staging import shard_data
from statexchange.messages import decode, encode
from statexchange.sharding.shards import Shard, full_box
from statexchange.shared_memory import Arena
from statexchange.state.describe import LocalTensor
from statexchange.storage.atomic import new_nonce
from statexchange.storage.files import make_path, private_directory
from statexchange.storage.location import OpenedPath, directory_of, is_remote, open_path, resolve_path, seal
from statexchange.storage.publish import clear_all, join_build, open_build
from statexchange.storage.publish.build import NO_PLAN, Build
from statexchange.storage.tensorfile import MANIFEST, SCHEMA, RankFile, rank_file_names, rank_of_file
from statexchange.tensors import ITEMSIZE, TensorLike, array_over, copied_into, from_bytes, memory_of, same_memory

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

_ALIGNMENT = 64  # of tensors in a block: a multiple of any element's size, and of a cache line
_GATHER = "gather-"  # the names of builds in a workspace begin so


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """Metadata from which root rebuilds one tensor: dtype, shape, kind of object and place in the block of memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: Literal["tensor", "parameter", "numpy"]
    requires_grad: bool
    alias: str | None
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return full_box(self.shape).numel * ITEMSIZE[self.dtype]


def metadata_of(tensors: Mapping[str, TensorLike]) -> list[TensorMetadata]:
    """Return metadata with offsets into one block; a tied tensor has its first name as alias and no bytes.

    Of float32 tensors "a" of 3 elements, "b" of 2, and "c", which is "a", the offsets are 0 and 64, and "c" has the
    alias "a".
    """
    metadata: list[TensorMetadata] = []
    first_names: dict[tuple[object, ...], str] = {}
    offset = 0
    for name, tensor in tensors.items():
        if hasattr(tensor, "__create_chunk_list__"):
            raise UnsupportedError("this is a part of a sharded tensor: pass its to_local()", name=name)
        kind: Literal["tensor", "parameter", "numpy"] = "numpy"
        requires_grad = False
        if not isinstance(tensor, np.ndarray):
            kind = "parameter" if type(tensor).__name__ == "Parameter" else "tensor"
            requires_grad = bool(tensor.requires_grad)
        # None for a tensor that cannot be compared by its memory, as an empty one.
        key = same_memory(tensor)
        # A Parameter and its plain data are two objects over one memory.
        alias = None
        if key is not None:
            first = first_names.setdefault((*key, kind, requires_grad), name)
            alias = first if first != name else None
        shape = tuple(map(int, tensor.shape))
        entry = TensorMetadata(name, memory_of(tensor, name).dtype, shape, kind, requires_grad, alias, offset)
        metadata.append(entry)
        if alias is None:
            offset += -(-entry.nbytes // _ALIGNMENT) * _ALIGNMENT
    return metadata


class _ArenaAddress(NamedTuple):
    """`Arena.address` in a message."""

    id: str
    pid: int
    fd: int
    inode: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _ArenaNote:
    """A rank's note in the final agreement: the arenas that it owns, and those of others that it still views."""

    owned: Sequence[str] = ()
    views: Sequence[str] = ()


def _rebuild(entry: TensorMetadata, data: bytearray | NDArray[np.uint8]) -> TensorLike:
    """Return a tensor or array of the kind that was sent, over `data`."""
    if entry.kind == "numpy":
        return array_over(data, entry.dtype, entry.shape)
    tensor = cast("torch.Tensor", from_bytes(data, entry.dtype, entry.shape))
    if entry.kind == "parameter":
        import torch

        return torch.nn.Parameter(tensor, requires_grad=entry.requires_grad)
    if entry.requires_grad:
        tensor.requires_grad_()
    return tensor


class Block:
    """One rank's tensors on root, built on demand and released at the end of the with block."""

    def __init__(
        self,
        metadata: Sequence[TensorMetadata],
        build: Callable[[TensorMetadata], TensorLike],
    ) -> None:
        self.metadata = {entry.name: entry for entry in metadata}
        self._build: Callable[[TensorMetadata], TensorLike] | None = build
        self._tensors: dict[str, TensorLike] = {}  # built so far

    def tensor(self, name: str) -> TensorLike:
        """Return a tensor; a tied one is the same object under both names."""
        if name not in self._tensors:
            if self._build is None:
                raise InvalidArgumentError("the with block that gathered this has ended", name=name)
            entry = self.metadata[name]
            self._tensors[name] = self._build(entry) if entry.alias is None else self.tensor(entry.alias)
        return self._tensors[name]

    def close(self) -> None:
        """Drop all references; tensors that the user kept stay valid."""
        self._tensors.clear()
        # It holds the memory, which is recycled only when nothing refers to it.
        self._build = None


_Sent: TypeAlias = tuple[Sequence[TensorMetadata], object]
"""The metadata of a rank's tensors, and the address of their bytes, which `send` has returned."""


class _MemoryTransport:
    """Transport through an arena of each writer; the final agreement lists the arenas that are still viewed."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._arena: Arena | None = None

    def begin(self, root: int) -> None:
        """No-op: each rank has memory of its own."""

    def send(self, tensors: Mapping[str, TensorLike], metadata: Sequence[TensorMetadata]) -> object:
        """Copy this rank's tensors into its arena; return the arena's address."""
        total = max((entry.offset + entry.nbytes for entry in metadata if entry.alias is None), default=0)
        if not total:
            # Nothing to copy, so that there is no arena to which root would attach.
            return None
        # The arena of an earlier gather, once root views it no more: new memory costs a page fault for each page.
        self._arena = self._comm.arenas.acquire(total)
        for entry in metadata:
            if entry.alias is None and entry.nbytes:
                memory = np.frombuffer(self._arena.view, np.uint8, entry.nbytes, entry.offset)
                copied_into(memory, tensors[entry.name], entry.dtype)
                self._comm.progress()
        return encode(_ArenaAddress(**self._arena.address), _ArenaAddress)

    def receive(self, sent: Mapping[int, _Sent]) -> dict[int, Block]:
        """Return views of other ranks' tensors, by rank."""
        return {rank: self._attached(metadata, address, rank) for rank, (metadata, address) in sent.items()}

    def _attached(self, metadata: Sequence[TensorMetadata], address: object, rank: int) -> Block:
        base = np.empty(0, dtype=np.uint8)
        if address is not None:
            arena = decode(address, _ArenaAddress, "the address of its memory", rank)
            # What a rank has sent is checked before memory is viewed by it.
            for entry in metadata:
                if entry.alias is None and entry.offset + entry.nbytes > arena.nbytes:
                    raise MismatchError("a tensor lies outside of its memory", name=entry.name, rank=rank)
            base = self._comm.arenas.attach(arena._asdict())
        return Block(metadata, lambda entry: _rebuild(entry, base[entry.offset : entry.offset + entry.nbytes]))

    def note(self) -> object:
        """Return this rank's note for the final agreement."""
        arenas = self._comm.arenas
        owned = arenas.owned_ids()
        if self._arena is not None:
            owned.append(self._arena.ident)
        return encode(_ArenaNote(owned, arenas.referenced_ids()), _ArenaNote)

    def end(self, notes: Sequence[object] | None) -> None:
        """Recycle arenas that no rank views; close this one if there was no agreement (None)."""
        arenas = self._comm.arenas
        arena, self._arena = self._arena, None
        if notes is None:
            if arena is not None:
                # Another rank may still view it, so it is not used again; the memory goes with the last view.
                arena.close()
            return
        if arena is not None:
            arenas.lend(arena)
        viewed: set[str] = set()
        owned: set[str] = set()
        for rank, raw in enumerate(notes):
            note = decode(raw, _ArenaNote, "the note about arenas", rank)
            viewed.update(note.views)
            owned.update(note.owned)
        arenas.recycle(viewed, owned)


class _FileTransport:
    """Transport through a file of each writer, in a build (storage/publish) that root abandons when the block ends.

    So the files appear under no name that a reader takes, and what killed ranks leave is what killed publishers leave:
    the next gather here removes it.

    Args:
        workspace: the path or URL of the workspace, as this rank sees it.
    """

    def __init__(self, comm: Communicator, workspace: str) -> None:
        self._comm = comm
        self._workspace = directory_of(workspace)
        self._in_memory = workspace.startswith("shm://")
        self._place = _Place("", "")
        self._build: Build | None = None
        self._opened: OpenedPath | None = None

    def begin(self, root: int) -> None:
        """Open the build on `root`, and send its place to the others. Collective."""
        with self._comm.phase("opening the workspace"):
            if self._comm.rank == root:
                if not is_remote(self._workspace):
                    # Before the build, which would make it for others to read.
                    make_path(self._workspace)
                # Below /dev/shm, where anybody may have made a directory of this name.
                if self._in_memory:
                    with private_directory(os.path.dirname(self._workspace)):
                        pass
                clear_all(self._workspace, _GATHER, MANIFEST)  # what killed gathers have left
                name = f"{_GATHER}{new_nonce()}"
                path = os.path.join(self._workspace, name)
                names = [*rank_file_names(self._comm.world_size), MANIFEST]
                self._build = open_build(path, NO_PLAN, names, check=None)
                if not is_remote(path):
                    os.chmod(self._build.building_path, 0o700)  # before any file is there
                self._place = _Place(name, self._build.share())
        self._place = from_root(self._comm, self._place, _Place, "where it gathers", root)

    def send(self, tensors: Mapping[str, TensorLike], metadata: Sequence[TensorMetadata]) -> object:
        """Write this rank's tensors as one durable file; return its size and version."""
        comm = self._comm
        whole = []
        for entry in metadata:
            if entry.alias is None:
                shard = Shard(entry.name, entry.dtype, entry.shape, (full_box(entry.shape),))
                whole.append(LocalTensor(shard, (tensors[entry.name],)))
        path = os.path.join(self._workspace, self._place.name)
        name = rank_file_names(comm.world_size)[comm.rank]
        file_metadata = seal({"schema": SCHEMA, "config": "null", **self._expected(comm.rank)})
        try:
            self._check_place()
            member = join_build(path, self._place.key, MANIFEST)
            written = member.write_tensors(name, shard_data(whole), file_metadata, comm.progress)
        except NotFoundError as error:
            raise _unseen(error, comm.rank) from None
        return encode(_FileAddress(written.content.nbytes, written.version), _FileAddress)

    def _expected(self, rank: int) -> dict[str, str | int]:
        """Return what the file of a rank says of itself."""
        return {"save": self._place.name, "rank": rank, "world_size": self._comm.world_size}

    def receive(self, sent: Mapping[int, _Sent]) -> dict[int, Block]:
        """Open other ranks' files, by rank."""
        assert self._build is not None  # on root
        if not sent:
            return {}
        names = rank_file_names(self._comm.world_size)
        addresses = {}
        for rank, (_, address) in sent.items():
            addresses[rank] = decode(address, _FileAddress, "the address of its file", rank)
        # Raises for a file that another host has written and this one does not see.
        try:
            self._build.add_all({names[rank]: address.version for rank, address in addresses.items()})
        except NotFoundError as error:
            raise _unseen(error, rank_of_file(os.path.basename(str(error.path)))) from None
        self._check_place()
        self._opened = open_path(self._build.building_path)
        blocks = {}
        for rank, (metadata, _) in sent.items():
            file = RankFile(self._opened.store.open(names[rank]), self._expected(rank), addresses[rank].nbytes)
            blocks[rank] = _block_of_file(metadata, file)
        return blocks

    def _check_place(self) -> None:
        """Raise UnsafeError if another user has put a directory in the place of root's, where many may write."""
        if not is_remote(self._workspace):
            with private_directory(os.path.join(self._workspace, self._place.key)):
                pass

    def note(self) -> None:
        """No-op: a file needs no note."""

    def end(self, notes: Sequence[object] | None) -> None:
        """Remove all files on root, after the block or a failure alike."""
        del notes
        opened, self._opened = self._opened, None
        build, self._build = self._build, None
        if opened is not None:
            opened.close()
        if build is not None:
            build.abandon()
            if self._in_memory:
                with contextlib.suppress(OSError):  # others may gather there
                    os.rmdir(self._workspace)


def _unseen(error: NotFoundError, rank: int | None) -> NotFoundError:
    """Return the error for what one of root and `rank` has made in the workspace, and the other does not see."""
    text = f"{error.message}: pass the same shared directory, or URL, on all ranks"
    return NotFoundError(text, rank=rank, path=error.path)


def _block_of_file(metadata: Sequence[TensorMetadata], file: RankFile) -> Block:
    return Block(metadata, lambda entry: _rebuild(entry, file.read(entry.name)))


class _Place(NamedTuple):
    """The place where ranks write: the name of the gather in the workspace, and the key of root's build there."""

    name: str
    key: str


class _FileAddress(NamedTuple):
    """The size of a rank's file, and its version in an object store."""

    nbytes: int
    version: str


WorkspaceLike: TypeAlias = str | os.PathLike[str] | None


Transport: TypeAlias = _MemoryTransport | _FileTransport


def transport_for(comm: Communicator, workspace: WorkspaceLike) -> Transport:
    """Return what carries tensors: the workspace if one is given, else memory that the ranks share. Not collective."""
    if workspace is not None:
        return _FileTransport(comm, resolve_path(workspace, "a workspace"))
    if not comm.shared_memory:
        raise InvalidArgumentError(
            f"these ranks, on {comm.num_nodes} host(s), share no memory: pass workspace=, a directory that all see"
        )
    return _MemoryTransport(comm)
