"""Gather tensors, configs and whole states to one rank: through shared memory on one host, or through a workspace.

Writers put one copy of their tensors where the root can see it; the root gets views (shared memory) or reads on demand
(workspace). The block ends in an agreement, after which writers take their memory back or remove their files.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from statexchange import values
from statexchange.comm.calls import public_call
from statexchange.comm.communicator import CommLike, Communicator
from statexchange.comm.defaults import as_communicator, members
from statexchange.errors import InvalidArgumentError, MismatchError, StateExchangeError, UnsupportedError, excerpt
from statexchange.exchange.receipts import receipt_from_json, receipt_to_json
from statexchange.exchange.staging import Staging
from statexchange.sharding import records
from statexchange.sharding.shards import Shard, full_box, shape_from_json
from statexchange.shared_memory import Arena
from statexchange.state.describe import State, describe
from statexchange.storage.tensorfile import ShardData
from statexchange.storage.workspace import RankFile, Receipt, Workspace
from statexchange.tensors import (
    ITEMSIZE,
    array_over,
    dtype_name,
    from_bytes,
    is_tensor,
    itemsize_of,
    same_memory,
    torch_dtype,
    wait_tensor,
)

__all__ = ["GatheredState", "gather_state", "get_configs_parallel", "get_tensors_parallel"]

T = TypeVar("T")
_ALIGNMENT = 64
_FOREVER = float("inf")
_READ_RETRY_S = 30.0


@dataclass(frozen=True, slots=True)
class _Fact:
    """What root must know of one tensor to rebuild it: how its bytes read, and what kind of object it was."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str  # "tensor", "parameter" or "numpy"
    requires_grad: bool
    alias: str | None
    offset: int

    @property
    def nbytes(self) -> int:
        return full_box(self.shape).numel * ITEMSIZE[self.dtype]

    def to_json(self) -> dict[str, Any]:
        """A JSON value that `from_json` reads."""
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": self.shape,
            "kind": self.kind,
            "requires_grad": self.requires_grad,
            "alias": self.alias,
            "offset": self.offset,
        }

    @classmethod
    def from_json(cls, raw: Any) -> _Fact:
        """The fact that `to_json` wrote; anything else is a ValueError."""
        names = ("name", "dtype", "shape", "kind", "requires_grad", "alias", "offset")
        name, dtype, shape, kind, requires_grad, alias, offset = records.fields(raw, *names)
        itemsize_of(dtype)
        if kind not in ("tensor", "parameter", "numpy"):
            raise ValueError(f"no kind of tensor: {excerpt(kind)}")
        return cls(
            records.text(name),
            dtype,
            shape_from_json(shape),
            kind,
            records.flag(requires_grad),
            records.optional(alias, records.text),
            records.count(offset),
        )


@dataclass(frozen=True, slots=True)
class _Parcel:
    """What one rank sends root: facts of its tensors, where the transport has put them, and the caller's own message.

    `where` and `message` are read by who knows what they are.
    """

    facts: tuple[_Fact, ...] = ()
    where: Mapping[str, Any] = field(default_factory=dict)
    message: Any = None

    def to_json(self) -> dict[str, Any]:
        """A JSON value that `from_json` reads."""
        return {"facts": [fact.to_json() for fact in self.facts], "where": dict(self.where), "message": self.message}

    @classmethod
    def from_json(cls, raw: Any) -> _Parcel:
        """The parcel that `to_json` wrote; anything else is a ValueError."""
        raw_facts, where, message = records.fields(raw, "facts", "where", "message")
        facts = records.items(raw_facts, _Fact.from_json)
        written = {fact.name for fact in facts if fact.alias is None}
        if not {fact.alias for fact in facts if fact.alias is not None} <= written:
            raise ValueError("a tensor is tied to one that was not sent")
        if type(where) is not dict:
            raise ValueError(f"not an address: {excerpt(where)}")
        return cls(facts, where, message)


@dataclass(frozen=True, slots=True)
class _ArenaNote:
    """For the agreement at the end: which arenas a rank has, and which of others' it still looks at."""

    has: tuple[str, ...]
    looks_at: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON value that `from_json` reads."""
        return {"has": list(self.has), "looks_at": list(self.looks_at)}

    @classmethod
    def from_json(cls, raw: Any) -> _ArenaNote:
        """The note that `to_json` wrote; anything else is a ValueError."""
        has, looks_at = records.fields(raw, "has", "looks_at")
        return cls(records.items(has, records.text), records.items(looks_at, records.text))


def _arena_address(raw: Any, facts: Sequence[_Fact]) -> dict[str, Any]:
    """The address of an arena that holds what `facts` say; anything else is a ValueError."""
    number, pid, fd, inode, nbytes, path = records.fields(raw, "id", "pid", "fd", "inode", "nbytes", "path")
    records.text(number)
    records.optional(path, records.text)
    for one in (pid, fd, inode):
        records.count(one)
    if any(fact.alias is None and fact.offset + fact.nbytes > records.count(nbytes) for fact in facts):
        raise ValueError("a tensor lies outside of its memory")
    found: dict[str, Any] = raw
    return found


def _facts(tensors: Mapping[str, Any]) -> list[_Fact]:
    """Facts with offsets into one block of memory; a tied tensor has its first name as alias and takes no room."""
    facts: list[_Fact] = []
    seen: dict[tuple[Any, ...], str] = {}
    offset = 0
    for name, tensor in tensors.items():
        fact = _fact(name, tensor, offset)
        key = same_memory(tensor)
        if key is not None:  # a Parameter and its plain data are two objects over one memory
            first = seen.setdefault((*key, fact.kind, fact.requires_grad), name)
            fact = fact if first == name else replace(fact, alias=first)
        facts.append(fact)
        if fact.alias is None:
            offset += -(-fact.nbytes // _ALIGNMENT) * _ALIGNMENT
    return facts


def _fact(name: str, tensor: Any, offset: int) -> _Fact:
    if hasattr(tensor, "__create_chunk_list__"):
        raise UnsupportedError("this is a part of a sharded tensor: pass its to_local()", name=name)
    dtype, shape = dtype_name(tensor, name), tuple(int(size) for size in tensor.shape)
    if isinstance(tensor, np.ndarray):
        return _Fact(name, dtype, shape, "numpy", False, None, offset)
    kind = "parameter" if type(tensor).__name__ == "Parameter" else "tensor"
    return _Fact(name, dtype, shape, kind, bool(tensor.requires_grad), None, offset)


def _rebuild(fact: _Fact, data: Any) -> Any:
    tensor = from_bytes(data, fact.dtype, fact.shape, as_numpy=fact.kind == "numpy")
    if fact.kind == "parameter":
        import torch

        return torch.nn.Parameter(tensor, requires_grad=fact.requires_grad)
    return tensor.requires_grad_() if fact.requires_grad else tensor


class _Block(ABC):
    """What one rank sent, as root sees it: tensors made on demand, and released at the end of the block."""

    def __init__(self, facts: Sequence[_Fact]) -> None:
        self.facts = {fact.name: fact for fact in facts}
        self._made: dict[str, Any] = {}
        self._open = True

    def tensor(self, name: str) -> Any:
        """The tensor of this name; a tied one is the same object under both names."""
        if name not in self._made:
            if not self._open:
                raise InvalidArgumentError("the with block that gathered this has ended", name=name)
            fact = self.facts[name]
            self._made[name] = self.tensor(fact.alias) if fact.alias is not None else self._make(fact)
        return self._made[name]

    @abstractmethod
    def _make(self, fact: _Fact) -> Any:
        """The tensor of one fact."""

    def close(self) -> None:
        """Forget everything; what the user kept stays valid."""
        self._made.clear()
        self._open = False


class _OwnBlock(_Block):
    """Root's own tensors: the same objects, where they are on the host."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        super().__init__(_facts(tensors))
        self._tensors = tensors

    def _make(self, fact: _Fact) -> Any:
        tensor = self._tensors[fact.name]
        return tensor if fact.kind == "numpy" or tensor.device.type == "cpu" else tensor.cpu()


class _MemoryBlock(_Block):
    """Views of another rank's arena."""

    def __init__(self, facts: Sequence[_Fact], base: Any) -> None:
        super().__init__(facts)
        self._base = base

    def _make(self, fact: _Fact) -> Any:
        return _rebuild(fact, self._base[fact.offset : fact.offset + fact.nbytes])

    def close(self) -> None:
        super().close()
        self._base = None


class _FileBlock(_Block):
    """Tensors read from another rank's file, each into memory of its own."""

    def __init__(self, facts: Sequence[_Fact], file: RankFile) -> None:
        super().__init__(facts)
        self._file = file

    def _make(self, fact: _Fact) -> Any:
        return _rebuild(fact, self._file.read(fact.name))

    def close(self) -> None:
        super().close()
        self._file.close()


class _MemoryTransport:
    """Through an arena of each writer's; at the end of the block all learn which arenas are still looked at."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._arena: Arena | None = None

    def send(self, tensors: Mapping[str, Any], facts: Sequence[_Fact]) -> dict[str, Any]:
        """Copy this rank's tensors into its arena; returns what root must know."""
        total = max((f.offset + f.nbytes for f in facts if f.alias is None), default=0)
        if not total:
            return {}
        self._arena = self._comm.arenas.acquire(total)
        for fact in facts:
            if fact.alias is None and fact.nbytes:
                _copy_in(tensors[fact.name], fact, self._arena.view[fact.offset : fact.offset + fact.nbytes])
                self._comm.progress()
        return self._arena.address

    def receive(self, facts: Sequence[_Fact], where: Mapping[str, Any], rank: int) -> _Block:
        """Views of another rank's tensors."""
        if not where:
            return _MemoryBlock(facts, np.empty(0, dtype=np.uint8))
        address = records.parsed(where, lambda raw: _arena_address(raw, facts), "the address of its memory", rank)
        return _MemoryBlock(facts, self._comm.arenas.attach(address))

    def received(self) -> None:
        """Root has attached: what name the arena had, it needs no more."""
        if self._arena is not None:
            self._arena.unlink()

    def note(self) -> Any:
        """What this rank says in the agreement at the end."""
        arenas = self._comm.arenas
        has = arenas.owned_ids()
        has += [self._arena.ident] if self._arena is not None else []
        return _ArenaNote(tuple(has), tuple(arenas.referenced_ids())).to_json()

    def end(self, notes: Sequence[Any] | None) -> None:
        """Recycle the arenas that nobody looks at; without an agreement (None) give this one away."""
        arenas = self._comm.arenas
        arena, self._arena = self._arena, None
        if notes is None:
            if arena is not None:
                arena.close()
            return
        if arena is not None:
            arenas.lend(arena)
        read = [records.parsed(raw, _ArenaNote.from_json, "its note", rank) for rank, raw in enumerate(notes)]
        referenced = {ident for note in read for ident in note.looks_at}
        arenas.recycle(referenced, {ident for note in read for ident in note.has})


def _copy_in(tensor: Any, fact: _Fact, memory: memoryview) -> None:
    target = np.frombuffer(memory, dtype=np.uint8)
    if isinstance(tensor, np.ndarray):
        np.copyto(array_over(target, fact.dtype, fact.shape), tensor)
        return
    import torch

    with torch.no_grad():
        torch.from_numpy(target).view(torch_dtype(fact.dtype)).view(fact.shape).copy_(tensor)


class _FileTransport:
    """Through a tensor file of each writer's, removed by its writer when the block ends."""

    def __init__(self, comm: Communicator, workspace: Workspace) -> None:
        self._comm = comm
        self._workspace = workspace
        self._receipt: Receipt | None = None

    def send(self, tensors: Mapping[str, Any], facts: Sequence[_Fact]) -> dict[str, Any]:
        """Write this rank's tensors as one durable file; returns its receipt."""
        staging = Staging()
        held = [_held(tensors[fact.name], fact, staging) for fact in facts if fact.alias is None]
        comm = self._comm
        number = self._workspace.next_round(comm.run, comm.rank)
        self._receipt = self._workspace.write(
            held, run=comm.run, round=number, rank=comm.rank, world_size=comm.world_size, pending=True
        )
        return receipt_to_json(self._receipt)

    def receive(self, facts: Sequence[_Fact], where: Mapping[str, Any], rank: int) -> _Block:
        """Another rank's file, opened by the name that its receipt gives."""
        receipt = records.parsed(where, receipt_from_json, "the name of its file", rank)
        return _FileBlock(facts, self._workspace.open(receipt, timeout_s=_READ_RETRY_S))

    def received(self) -> None:
        """Nothing to do: root may still read from the file."""

    def note(self) -> None:
        """Nothing to tell."""

    def end(self, notes: Sequence[Any] | None) -> None:
        """Remove this rank's file; after a failure the reader removes those of ranks that cannot."""
        if self._receipt is not None:
            self._workspace.remove([self._receipt.relative])
            self._receipt = None
        else:  # the rank that reads
            if notes is None:
                self._workspace.remove_uncommitted(self._comm.run)
            self._workspace.sweep()


def _held(tensor: Any, fact: _Fact, staging: Staging) -> ShardData:
    shard = Shard(fact.name, fact.dtype, fact.shape, (full_box(fact.shape),))
    return ShardData(shard, lambda _: (part for _, part in staging.parts(tensor, fact.dtype)))


_Transport = _MemoryTransport | _FileTransport


def _transport(comm: Communicator, workspace: Workspace | str | os.PathLike[str] | None) -> _Transport:
    if workspace is not None:
        return _FileTransport(comm, workspace if isinstance(workspace, Workspace) else Workspace(workspace))
    if comm.shared_memory is None:
        raise InvalidArgumentError(
            f"these ranks, on {comm.num_nodes} host(s), share no memory: pass workspace=, a directory that all see"
        )
    return _MemoryTransport(comm)


@contextlib.contextmanager
def _gathered(
    call: str, comm: Communicator, root: int, tensors: Mapping[str, Any], message: Any, workspace: Any
) -> Iterator[list[tuple[_Block, Any]]]:
    """Every rank's block and message, in rank order, on root; [] elsewhere. Collective at both ends.

    `call` is the public one; what the user does inside the block is no part of it.
    """
    with public_call(call):
        transport, blocks = _exchange(comm, root, tensors, message, workspace)
    yield from _until_done(call, comm, transport, blocks)


def _exchange(
    comm: Communicator, root: int, tensors: Mapping[str, Any], message: Any, workspace: Any
) -> tuple[_Transport, list[tuple[_Block, Any]]]:
    """Bring every rank's block and message to root. Collective."""
    with comm.phase("choosing a transport"):
        transport = _transport(comm, workspace)
    parcel = _Parcel()
    try:
        with comm.phase("sending"):
            if comm.rank != root:
                facts = _facts(tensors)
                parcel = _Parcel(tuple(facts), transport.send(tensors, facts), message)
        sent = comm.all_gather_bytes(records.encoded(parcel), root=root, operation="sending to root")
        blocks: list[tuple[_Block, Any]] = []
        with comm.phase("receiving"):
            for rank, data in enumerate(sent):
                blocks.append((_OwnBlock(tensors), message) if rank == root else _receive(transport, data, rank))
        transport.received()
    except BaseException:
        transport.end(None)
        raise
    return transport, blocks


def _receive(transport: _Transport, data: bytes, rank: int) -> tuple[_Block, Any]:
    parcel = records.decoded(data, _Parcel.from_json, "the description of its tensors", rank)
    return transport.receive(parcel.facts, parcel.where, rank), parcel.message


def _until_done(
    call: str,
    comm: Communicator,
    transport: _Transport,
    blocks: list[tuple[_Block, Any]],
) -> Iterator[list[tuple[_Block, Any]]]:
    """The user's block, and the agreement at its end, which waits as long as everybody lives."""
    failure: BaseException | None = None
    try:
        yield blocks
    except BaseException as error:
        failure = error
        raise
    finally:
        notes: list[Any] | None = None
        try:
            for block, _ in blocks:
                block.close()
            with public_call(call):
                notes = _end(comm, failure, transport.note())
        finally:
            transport.end(notes)


def _end(comm: Communicator, failure: BaseException | None, note: Any) -> list[Any] | None:
    if failure is None:
        return comm.agree(phase="its block", timeout_s=_FOREVER, note=note)
    if not isinstance(failure, Exception):
        comm.close(failure)
    else:
        with contextlib.suppress(StateExchangeError):  # the block's own error goes on; the others raise it as a peer's
            comm.agree(failure, phase="its block", timeout_s=_FOREVER, note=note)
    return None


class GatheredState(Mapping[str, Any]):
    """One rank's state on root: names to tensors, made on first access, valid to look up until the block ends.

    `shards` says which part of which tensor each is: global shape and boxes. A tensor that is kept stays valid.
    """

    def __init__(self, rank: int, block: _Block, shards: Mapping[str, Shard]) -> None:
        self.rank = rank
        self.shards = shards
        self._block = block

    def __getitem__(self, name: str) -> Any:
        if name not in self._block.facts:
            raise KeyError(name)
        return self._block.tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._block.facts)

    def __len__(self) -> int:
        return len(self._block.facts)

    def __repr__(self) -> str:
        return f"GatheredState(rank {self.rank}, {len(self)} tensors)"


@contextlib.contextmanager
def gather_state(
    state: State,
    *,
    comm: CommLike | None = None,
    root: int = 0,
    workspace: Workspace | str | os.PathLike[str] | None = None,
) -> Iterator[tuple[GatheredState, ...]]:
    """Every rank's state on root: one lazy mapping per rank, in rank order; () on the others.

    Collective over `comm`, also at the end of the block, where the others wait for root. `state` is a module, a mapping
    of names to tensors, or a list of modules; of a DTensor each rank gives its local part, and its mapping's `shards`
    says where it belongs. Through shared memory on one host, or through `workspace` (a directory or Workspace). An
    exception on any rank reaches all. Costs one copy of what is gathered.
    """
    communicator = as_communicator(comm)
    tensors: dict[str, Any] = {}
    shards: list[Shard] = []
    with public_call("gather_state"), communicator.phase("describing its state"):
        communicator.check_root(root)
        for held in describe(state).held.values():
            for index, part in enumerate(held.tensors):
                name = held.shard.name if len(held.tensors) == 1 else f"{held.shard.name}#{index}"
                tensors[name] = part
                shards.append(Shard(name, held.shard.dtype, held.shard.global_shape, (held.shard.boxes[index],)))
    message = [shard.to_json() for shard in shards]
    with _gathered("gather_state", communicator, root, tensors, message, workspace) as blocks:
        yield tuple(_state(rank, block, message) for rank, (block, message) in enumerate(blocks))


def _state(rank: int, block: _Block, message: Any) -> GatheredState:
    what = "the shards of its tensors"
    shards = records.parsed(message, lambda raw: records.items(raw, Shard.from_json), what, rank)
    return GatheredState(rank, block, {shard.name: shard for shard in shards})


@contextlib.contextmanager
def get_tensors_parallel(
    tensor: Any, ranks: Sequence[int], group: Any = None, workspace_path: str | os.PathLike[str] | None = None
) -> Iterator[list[Any]]:
    """Every member's tensor on the first of `ranks`, as a list in `ranks` order; [] on the others.

    Collective over `ranks` only, also at the end of the block. They are world ranks, or ranks of the Communicator or
    MPI communicator `group`. Shapes and dtypes may differ. The first
    entry is the caller's own tensor; the others are views of shared memory, or copies read from `workspace_path`, and
    stay valid when kept. An exception on any member reaches all.
    """
    with public_call("get_tensors_parallel"):
        communicator = members(ranks, group)
        with communicator.phase("looking at its tensor"):
            if not is_tensor(tensor):
                raise InvalidArgumentError(f"get_tensors_parallel wants a tensor, not {type(tensor)!r}")
    with _gathered(
        "get_tensors_parallel", communicator, 0, {"tensor": wait_tensor(tensor)}, None, workspace_path
    ) as blocks:
        yield [_the_tensor(rank, block) for rank, (block, _) in enumerate(blocks)]


def _the_tensor(rank: int, block: _Block) -> Any:
    if "tensor" not in block.facts:
        raise MismatchError("this rank has not sent a tensor: run the same version of statexchange on all", rank=rank)
    return block.tensor("tensor")


@contextlib.contextmanager
def get_configs_parallel(
    config: T | None,
    ranks: Sequence[int],
    group: Any = None,
    workspace_path: str | os.PathLike[str] | None = None,
) -> Iterator[list[T | None]]:
    """Every member's config on the first of `ranks`: a list with one entry per rank in `ranks` order; [] elsewhere.

    Collective over `ranks` only, also at the end of the block. They are world ranks, or ranks of the Communicator or
    MPI communicator `group`. A config is any nesting of dataclasses,
    dicts, lists, tuples, enums, numbers, strings, dtypes and tensors, or None, which keeps its place. Dataclasses come
    back as the first rank's own types or registered ones (`register_config`), else as dicts with ``"__name__"``.
    """
    tensors: dict[str, Any] = {}

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
    with _gathered("get_configs_parallel", communicator, 0, tensors, text, workspace_path) as blocks:
        yield [config if r == 0 else _config(r, block, message, types) for r, (block, message) in enumerate(blocks)]


def _config(rank: int, block: _Block, message: Any, types: Mapping[str, type]) -> Any:
    def tensor(name: str) -> Any:
        if name not in block.facts:
            raise MismatchError("the config has a tensor that was not sent", name=name, rank=rank)
        return block.tensor(name)

    return values.decode(records.parsed(message, records.text, "the config", rank), types=types, leaf=tensor)
