"""Gather tensors, configs and whole states to one rank: through shared memory on one host, or through a workspace.

Each rank copies its tensors once, into an arena of shared memory or into a file of the workspace. Root gets views of
the arena, or reads from the file on demand. The with block ends in an agreement of all ranks. After it, writers recycle
their arenas, and root removes the files. An arena of which root still has a view is recycled only after the view is
gone. If the block fails, every writer closes its arena, and root removes the files all the same.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np

from statexchange import values
from statexchange.comm.communicator import CommLike, Communicator, from_root
from statexchange.comm.defaults import as_communicator, members, public_call
from statexchange.errors import InvalidArgumentError, MismatchError, StateExchangeError, UnsupportedError
from statexchange.exchange.staging import Staging
from statexchange.messages import decode, encode, encoded
from statexchange.sharding.shards import Shard, full_box, shape_from_json
from statexchange.shared_memory import Arena
from statexchange.state.describe import State, describe
from statexchange.state.types import Leaf
from statexchange.storage import files
from statexchange.storage.atomic import new_nonce
from statexchange.storage.location import OpenedPath, directory_of, is_remote, open_path, resolve_path, seal
from statexchange.storage.publish import clear, open_build, unfinished_names, write_into_build
from statexchange.storage.publish.build import Build
from statexchange.storage.tensorfile import MANIFEST, SCHEMA, RankFile, ShardData, rank_file_names
from statexchange.tensors import (
    ITEMSIZE,
    TensorLike,
    array_over,
    from_bytes,
    is_tensor,
    itemsize_of,
    memory_of,
    same_memory,
    torch_dtype,
    wait_tensor,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["GatheredState", "gather_state", "get_configs_parallel", "get_tensors_parallel"]

T = TypeVar("T")
_ALIGNMENT = 64
_NO_LIMIT_S = float("inf")
_GATHER = "gather-"  # the names of builds in a workspace begin so
_NO_PLAN = "0" * 32  # as nothing is ever taken over


@dataclass(frozen=True, slots=True)
class _TensorMetadata:
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
        return full_box(self.shape).numel * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class _RankMessage:
    """A rank's message to root: its tensors' metadata, the address of their bytes, and the caller's message.

    Only the transport interprets `address`, and only the calling function `message`.
    """

    metadata: tuple[_TensorMetadata, ...] = ()
    address: object = None
    message: object = None

    def check(self) -> None:
        """Raise ValueError if this cannot be another rank's message."""
        written = set()
        for entry in self.metadata:
            itemsize_of(entry.dtype)
            shape_from_json(entry.shape)
            if entry.alias is None:
                written.add(entry.name)
        for entry in self.metadata:
            if entry.alias is not None and entry.alias not in written:
                raise ValueError("a tensor is tied to one that was not sent")


class _ArenaAddress(NamedTuple):
    """`Arena.address` in a message."""

    id: str
    pid: int
    fd: int
    inode: int
    nbytes: int
    path: str | None


@dataclass(frozen=True, slots=True)
class _ArenaNote:
    """A rank's note in the final agreement: the arenas that it owns, and those of others that it still views."""

    owned: Sequence[str] = ()
    views: Sequence[str] = ()


def _metadata_of(tensors: Mapping[str, TensorLike]) -> list[_TensorMetadata]:
    """Return metadata with offsets into one block; a tied tensor has its first name as alias and no bytes."""
    metadata: list[_TensorMetadata] = []
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
        key = same_memory(tensor)
        # A Parameter and its plain data are two objects over one memory.
        first = name if key is None else first_names.setdefault((*key, kind, requires_grad), name)
        alias = None if first == name else first
        shape = tuple(int(size) for size in tensor.shape)
        entry = _TensorMetadata(name, memory_of(tensor, name).dtype, shape, kind, requires_grad, alias, offset)
        metadata.append(entry)
        if alias is None:
            offset += -(-entry.nbytes // _ALIGNMENT) * _ALIGNMENT
    return metadata


def _rebuild(entry: _TensorMetadata, data: bytearray | NDArray[np.uint8]) -> TensorLike:
    """Return a tensor or array of the kind that was sent, over `data`."""
    tensor: Leaf = from_bytes(data, entry.dtype, entry.shape, as_numpy=entry.kind == "numpy")
    if entry.kind == "parameter":
        import torch

        tensor = torch.nn.Parameter(tensor, requires_grad=entry.requires_grad)
    elif entry.requires_grad:
        tensor.requires_grad_()
    rebuilt: TensorLike = tensor
    return rebuilt


class _Block:
    """One rank's tensors on root, built on demand and released at the end of the with block."""

    def __init__(
        self,
        metadata: Sequence[_TensorMetadata],
        build: Callable[[_TensorMetadata], TensorLike],
        close: Callable[[], None] | None = None,
    ) -> None:
        self.metadata = {entry.name: entry for entry in metadata}
        self._build: Callable[[_TensorMetadata], TensorLike] | None = build
        self._close = close
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
        if self._close is not None:
            self._close()


def _block_of_root(tensors: Mapping[str, TensorLike]) -> _Block:
    """Return root's own tensors: the same objects if they are on the host, else copies."""

    def build(entry: _TensorMetadata) -> TensorLike:
        tensor = tensors[entry.name]
        return tensor if isinstance(tensor, np.ndarray) or tensor.device.type == "cpu" else tensor.cpu()

    return _Block(_metadata_of(tensors), build)


class _MemoryTransport:
    """Transport through an arena of each writer; the final agreement lists the arenas that are still viewed."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._arena: Arena | None = None

    def begin(self, root: int) -> None:
        """No-op: each rank has memory of its own."""

    def send(self, tensors: Mapping[str, TensorLike], metadata: Sequence[_TensorMetadata]) -> object:
        """Copy this rank's tensors into its arena; return the arena's address."""
        total = max((entry.offset + entry.nbytes for entry in metadata if entry.alias is None), default=0)
        if not total:
            # Nothing to copy, so that there is no arena to which root would attach.
            return None
        self._arena = self._comm.arenas.acquire(total)
        for entry in metadata:
            if entry.alias is None and entry.nbytes:
                _copy_in(tensors[entry.name], entry, self._arena.view[entry.offset : entry.offset + entry.nbytes])
                self._comm.progress()
        return encode(_ArenaAddress(**self._arena.address), _ArenaAddress)

    def receive(self, metadata: Sequence[_TensorMetadata], address: object, rank: int) -> _Block:
        """Return views of another rank's tensors."""
        base = np.empty(0, dtype=np.uint8)
        if address is not None:
            arena = decode(address, _ArenaAddress, "the address of its memory", rank)
            for entry in metadata:
                if entry.alias is None and entry.offset + entry.nbytes > arena.nbytes:
                    raise MismatchError("a tensor lies outside of its memory", name=entry.name, rank=rank)
            base = self._comm.arenas.attach(arena._asdict())
        return _Block(metadata, lambda entry: _rebuild(entry, base[entry.offset : entry.offset + entry.nbytes]))

    def received(self) -> None:
        """Unlink the arena: root has attached to it."""
        if self._arena is not None:
            self._arena.unlink()

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


def _copy_in(tensor: TensorLike, entry: _TensorMetadata, memory: memoryview) -> None:
    """Copy a tensor's elements into `memory`, in C order."""
    target = np.frombuffer(memory, dtype=np.uint8)
    if isinstance(tensor, np.ndarray):
        np.copyto(array_over(target, entry.dtype, entry.shape), tensor)
        return
    import torch

    with torch.no_grad():
        torch.from_numpy(target).view(torch_dtype(entry.dtype)).view(entry.shape).copy_(tensor)


class _FileTransport:
    """Transport through a file of each writer, in a build (storage/publish) that root abandons when the block ends.

    So the files appear under no name that a reader takes, and what killed ranks leave is what killed publishers leave:
    the next gather here removes it.

    Args:
        workspace: the directory or URL of the workspace, as this rank sees it.
    """

    def __init__(self, comm: Communicator, workspace: str) -> None:
        self._comm = comm
        self._workspace = workspace
        self._place = _Place("", "")
        self._build: Build | None = None
        self._opened: OpenedPath | None = None

    def begin(self, root: int) -> None:
        """Open the build on `root`, and tell the others. Collective."""
        with self._comm.phase("opening the workspace"):
            if self._comm.rank == root:
                _sweep(self._workspace)
                name = f"{_GATHER}{new_nonce()}"
                path = os.path.join(self._workspace, name)
                names = [*rank_file_names(self._comm.world_size), MANIFEST]
                self._build = open_build(path, _NO_PLAN, names, check=None, private=True)
                self._place = _Place(name, self._build.share())
        self._place = from_root(self._comm, self._place, _Place, "where it gathers", root)

    def send(self, tensors: Mapping[str, TensorLike], metadata: Sequence[_TensorMetadata]) -> object:
        """Write this rank's tensors as one durable file; return its size and version."""
        comm, staging = self._comm, Staging()
        shards = []
        for entry in metadata:
            if entry.alias is None:
                shards.append(_shard_data(tensors[entry.name], entry, staging))
        path = os.path.join(self._workspace, self._place.name)
        names = rank_file_names(comm.world_size)[comm.rank], MANIFEST
        facts = seal({"schema": SCHEMA, "config": "null", **self._expected(comm.rank)})
        written = write_into_build(path, self._place.key, names, shards, facts, comm.progress)
        return encode(_Written(written.content.nbytes, written.version), _Written)

    def _expected(self, rank: int) -> dict[str, str | int]:
        """Return what the file of a rank says of itself."""
        return {"save": self._place.name, "rank": rank, "world_size": self._comm.world_size}

    def receive(self, metadata: Sequence[_TensorMetadata], address: object, rank: int) -> _Block:
        """Open another rank's file."""
        assert self._build is not None  # on root
        written = decode(address, _Written, "the size of its file", rank)
        name = rank_file_names(self._comm.world_size)[rank]
        self._build.add_all({name: written.version})
        if self._opened is None:  # all files are there by now
            self._opened = open_path(self._build.building_path)
        file = RankFile(self._opened.store.open(name), self._expected(rank), written.nbytes)
        return _Block(metadata, lambda entry: _rebuild(entry, file.read(entry.name)))

    def received(self) -> None:
        """No-op: root may still read from the file."""

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


class _Place(NamedTuple):
    """Where ranks write: the name of the gather in the workspace, and the key of root's build there."""

    name: str
    key: str


class _Written(NamedTuple):
    """The size of a rank's file, and its version in an object store."""

    nbytes: int
    version: str


def _sweep(workspace: str) -> None:
    """Make the workspace if it is missing, and remove what killed gathers have left there. Not collective."""
    if not is_remote(workspace):
        files.make_path(workspace)
    for name in unfinished_names(workspace, ()):
        if name.startswith(_GATHER):
            clear(os.path.join(workspace, name), MANIFEST, lambda _, __: False, waits=False)


def _shard_data(tensor: TensorLike, entry: _TensorMetadata, staging: Staging) -> ShardData:
    """Return a whole tensor as a shard, whose bytes are produced on request through `staging`."""
    shard = Shard(entry.name, entry.dtype, entry.shape, (full_box(entry.shape),))
    return ShardData(shard, lambda _: (part for _, part in staging.parts(tensor, entry.dtype)))


_Transport = _MemoryTransport | _FileTransport
_Sent: TypeAlias = tuple[_Block, object]
"""A rank's tensors, and the message of the calling function."""
_WorkspaceLike: TypeAlias = str | os.PathLike[str] | None


def _transport(comm: Communicator, workspace: _WorkspaceLike) -> _Transport:
    if workspace is not None:
        return _FileTransport(comm, directory_of(resolve_path(workspace, "a workspace")))
    if comm.shared_memory is None:
        raise InvalidArgumentError(
            f"these ranks, on {comm.num_nodes} host(s), share no memory: pass workspace=, a directory that all see"
        )
    return _MemoryTransport(comm)


@contextlib.contextmanager
def _gathered(
    call: str,
    comm: Communicator,
    root: int,
    tensors: Mapping[str, TensorLike],
    message: object,
    workspace: _WorkspaceLike,
) -> Iterator[list[_Sent]]:
    """Yield every rank's block and message, in rank order, on root; [] elsewhere. Collective at both ends.

    `call` is the name of the public function; calls that the user makes inside the block are not part of it.
    """
    with public_call(call):
        with comm.phase("choosing a transport"):
            transport = _transport(comm, workspace)
        blocks = _exchange(comm, root, tensors, message, transport)
    failure: BaseException | None = None
    try:
        yield blocks
    except BaseException as error:
        failure = error
        raise
    finally:
        notes: list[object] | None = None
        try:
            # Before the note, which lists the arenas that are still viewed: what the user kept, and no view of ours.
            for block, _ in blocks:
                block.close()
            with public_call(call):
                notes = _agree(comm, failure, transport.note())
        finally:
            transport.end(notes)


def _exchange(
    comm: Communicator, root: int, tensors: Mapping[str, TensorLike], message: object, transport: _Transport
) -> list[_Sent]:
    """Send every rank's block and message to root. Collective."""
    sent_here = _RankMessage()
    blocks: list[_Sent] = []
    try:
        transport.begin(root)
        with comm.phase("sending"):
            if comm.rank != root:
                metadata = _metadata_of(tensors)
                sent_here = _RankMessage(tuple(metadata), transport.send(tensors, metadata), message)
        received = comm.all_gather_bytes(encoded(sent_here, _RankMessage), root=root, operation="sending to root")
        with comm.phase("receiving"):
            for rank, data in enumerate(received):
                if rank == root:
                    blocks.append((_block_of_root(tensors), message))
                    continue
                sent = decode(data, _RankMessage, "the description of its tensors", rank, _RankMessage.check)
                blocks.append((transport.receive(sent.metadata, sent.address, rank), sent.message))
        # The end of the phase is an agreement: root has attached to every arena.
        transport.received()
    except BaseException:
        transport.end(None)
        raise
    return blocks


def _agree(comm: Communicator, failure: BaseException | None, note: object) -> list[object] | None:
    """Agree on the end of the block; return all ranks' notes, or None after a failure. Collective.

    The agreement waits without limit while all ranks are alive: root may work in its block for as long as it wants.
    """
    if failure is None:
        return comm.agree(phase="its block", timeout_s=_NO_LIMIT_S, note=note)
    if not isinstance(failure, Exception):
        # An interrupt or exit: this process may not live to see an agreement.
        comm.close(failure)
        return None
    # This rank raises the block's own error, and the others a PeerError.
    with contextlib.suppress(StateExchangeError):
        comm.agree(failure, phase="its block", timeout_s=_NO_LIMIT_S, note=note)
    return None


class GatheredState(Mapping[str, Leaf]):
    """One rank's state on root: a mapping of names to tensors, made on first access inside the with block.

    `shards` has each tensor's global shape and boxes. A tensor that is kept stays valid after the block.
    """

    def __init__(self, rank: int, block: _Block, shards: Mapping[str, Shard]) -> None:
        self.rank = rank
        self.shards = shards
        self._block = block

    def __getitem__(self, name: str) -> Leaf:
        if name not in self._block.metadata:
            raise KeyError(name)
        return self._block.tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._block.metadata)

    def __len__(self) -> int:
        return len(self._block.metadata)

    def __repr__(self) -> str:
        return f"GatheredState(rank {self.rank}, {len(self)} tensors)"


@contextlib.contextmanager
def gather_state(
    state: State,
    *,
    comm: CommLike | None = None,
    root: int = 0,
    workspace: str | os.PathLike[str] | None = None,
) -> Iterator[tuple[GatheredState, ...]]:
    """Gather every rank's state on root: yield one lazy mapping per rank, in rank order; () on other ranks.

    Collective, also at the end of the with block, where the other ranks wait for root. The transport is shared memory
    on one host, or a workspace. Each rank copies its tensors once. An exception on any rank is raised on all ranks.

    Args:
        state: a module, a mapping of names to tensors, or a list of modules. Each rank sends its local part of a
            DTensor; `shards` of its mapping has the box. Several boxes of a tensor are named NAME#0, NAME#1, ...
        comm: a Communicator, ProcessGroup, DeviceMesh or MPI communicator; by default the current communicator.
        root: the rank that receives.
        workspace: a directory that all hosts see, or an fsspec URL such as ``s3://bucket/exchange``; None for shared
            memory.

    Yields:
        On root a tuple of mappings from names to tensors, with attributes `rank` and `shards`.

    Raises:
        InvalidArgumentError: the ranks share no memory and `workspace` is None.
        UnsupportedError: a tensor cannot be sent (meta, masked, freed).
        StorageError, StallError, PeerError: as `statexchange.errors` describes.

    Example:
        >>> import torch
        >>> import statexchange as sx
        >>> with sx.gather_state({"w": torch.ones(2)}) as states:
        ...     [(state.rank, state["w"].tolist()) for state in states]
        [(0, [1.0, 1.0])]
    """
    with public_call("gather_state"):
        communicator = as_communicator(comm)
    tensors: dict[str, TensorLike] = {}
    shards: list[Shard] = []
    with public_call("gather_state"), communicator.phase("describing its state"):
        communicator.check_root(root)
        for local in describe(state).tensors.values():
            shard = local.shard
            for index, (box, tensor) in enumerate(zip(shard.boxes, local.tensors, strict=True)):
                name = shard.name if len(local.tensors) == 1 else f"{shard.name}#{index}"
                tensors[name] = tensor
                shards.append(Shard(name, shard.dtype, shard.global_shape, (box,)))
    message = encode(tuple(shards), tuple[Shard, ...])
    with _gathered("gather_state", communicator, root, tensors, message, workspace) as blocks:
        yield tuple(_state(rank, block, message) for rank, (block, message) in enumerate(blocks))


def _state(rank: int, block: _Block, message: object) -> GatheredState:
    shards = decode(message, tuple[Shard, ...], "the shards of its tensors", rank)
    return GatheredState(rank, block, {shard.name: shard for shard in shards})


@contextlib.contextmanager
def get_tensors_parallel(
    tensor: TensorLike,
    ranks: Sequence[int],
    group: CommLike | None = None,
    workspace_path: str | os.PathLike[str] | None = None,
) -> Iterator[list[Leaf]]:
    """Gather one tensor of each of `ranks` on the first of them: yield a list in `ranks` order; [] on the others.

    Collective over `ranks` only, also at the end of the with block. An exception on any of them is raised on all.
    The interface is that of ModelOpt's export/distribute.

    Args:
        tensor: this rank's tensor or array; shapes and dtypes may differ between ranks.
        ranks: world ranks, or ranks of `group` if that is a Communicator or MPI communicator.
        group: a ProcessGroup, Communicator or MPI communicator that contains the ranks.
        workspace_path: a directory that all hosts see, or an fsspec URL; None for shared memory.

    Yields:
        On the first rank its own tensor, then views of shared memory, or copies read from the workspace. They stay
        valid if kept.

    Raises:
        InvalidArgumentError: `tensor` is no tensor or array, or the ranks share no memory and `workspace_path` is None.
        UnsupportedError, StorageError, StallError, PeerError: as `statexchange.errors` describes.

    Example:
        >>> import torch
        >>> import statexchange as sx
        >>> with sx.get_tensors_parallel(torch.ones(2), [0]) as tensors:
        ...     [tensor.tolist() for tensor in tensors]
        [[1.0, 1.0]]
    """
    with public_call("get_tensors_parallel"):
        communicator = members(ranks, group)
        with communicator.phase("checking its tensor"):
            if not is_tensor(tensor):
                raise InvalidArgumentError(f"tensor must be a torch tensor or numpy array, not {type(tensor)!r}")
    with _gathered(
        "get_tensors_parallel", communicator, 0, {"tensor": wait_tensor(tensor)}, None, workspace_path
    ) as blocks:
        yield [_sent_tensor(rank, block) for rank, (block, _) in enumerate(blocks)]


def _sent_tensor(rank: int, block: _Block) -> TensorLike:
    if "tensor" not in block.metadata:
        raise MismatchError("this rank has not sent a tensor: run the same version of statexchange on all", rank=rank)
    return block.tensor("tensor")


@contextlib.contextmanager
def get_configs_parallel(
    config: T | None,
    ranks: Sequence[int],
    group: CommLike | None = None,
    workspace_path: str | os.PathLike[str] | None = None,
) -> Iterator[list[T | None]]:
    """Gather one config of each of `ranks` on the first of them: yield a list in `ranks` order; [] on the others.

    Collective over `ranks` only, also at the end of the with block. An exception on any of them is raised on all.
    The interface is that of ModelOpt's export/distribute.

    Args:
        config: any nesting of dataclasses, dicts, lists, tuples, enums, numbers, strings, dtypes and tensors; or None,
            which keeps its place in the list.
        ranks: world ranks, or ranks of `group` if that is a Communicator or MPI communicator.
        group: a ProcessGroup, Communicator or MPI communicator that contains the ranks.
        workspace_path: a directory that all hosts see, or an fsspec URL; None for shared memory.

    Yields:
        On the first rank one config per rank. Dataclasses have the first rank's own types or types given to
        `register_config`; unknown ones are dicts with ``"__name__"``.

    Raises:
        UnsupportedError: a value cannot be encoded; the error names its path.
        InvalidArgumentError, StorageError, StallError, PeerError: as `statexchange.errors` describes.

    Example:
        >>> import statexchange as sx
        >>> with sx.get_configs_parallel({"layers": 2}, [0]) as configs:
        ...     configs
        [{'layers': 2}]
    """
    tensors: dict[str, Leaf] = {}

    def keep(value: object, path: str) -> str | None:
        if not is_tensor(value):
            return None
        tensors[path or "tensor"] = value
        return path or "tensor"

    text = ""
    with public_call("get_configs_parallel"):
        communicator = members(ranks, group)
        with communicator.phase("encoding its config"):
            text = values.encode(config, keep)
    types = values.types_of(config)
    with _gathered("get_configs_parallel", communicator, 0, tensors, encode(text, str), workspace_path) as blocks:
        # No variable here may refer to what is yielded: its memory could not be recycled at the end of the block.
        yield [config, *_other_configs(blocks, types)] if blocks else []


def _other_configs(blocks: Sequence[_Sent], types: Mapping[str, type]) -> list[Leaf]:
    """Return the configs of all ranks but the first."""
    configs = []
    for rank, (block, message) in enumerate(blocks):
        if rank != 0:
            text = decode(message, str, "the config", rank)
            configs.append(values.decode(text, types=types, leaves=_SentTensors(block, rank)))
    return configs


class _SentTensors(dict[str, TensorLike]):
    """The tensors that a rank has sent beside its config, which names them."""

    def __init__(self, block: _Block, rank: int) -> None:
        super().__init__({name: block.tensor(name) for name in block.metadata})
        self._rank = rank

    def __missing__(self, name: str) -> TensorLike:
        raise MismatchError("the config has a tensor that was not sent", name=name, rank=self._rank)
