"""Gather tensors, configs and whole states to one rank: through shared memory on one host, or through a workspace.

Each rank copies its tensors once, into an arena of shared memory or into a file of the workspace. Root gets views of
the arena, or reads from the file on demand. The with block ends in an agreement of all ranks. After it, writers recycle
their arenas, and root removes the files. An arena of which root still has a view is recycled only after the view is
gone. If the block fails, every writer closes its arena, and root removes the files all the same.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np

from statexchange import values
from statexchange.comm.communicator import CommLike, Communicator
from statexchange.comm.defaults import as_communicator, members, public_call
from statexchange.errors import InvalidArgumentError, MismatchError, StateExchangeError
from statexchange.exchange.gather_transport import (
    Block,
    TensorMetadata,
    Transport,
    WorkspaceLike,
    metadata_of,
    transport_for,
)
from statexchange.messages import decode, encode, encoded
from statexchange.sharding.shards import Shard, shape_from_json
from statexchange.state.describe import State, describe
from statexchange.state.types import Leaf
from statexchange.tensors import TensorLike, is_tensor, itemsize_of, wait_tensor

T = TypeVar("T")
_NO_LIMIT_S = float("inf")


@dataclass(frozen=True, slots=True)
class _RankMessage:
    """A rank's message to root: its tensors' metadata, the address of their bytes, and the caller's message.

    Only the transport interprets `address`, and only the calling function `message`.
    """

    metadata: tuple[TensorMetadata, ...] = ()
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


def _block_of_root(tensors: Mapping[str, TensorLike]) -> Block:
    """Return root's own tensors: the same objects if they are on the host, else copies."""

    def build(entry: TensorMetadata) -> TensorLike:
        tensor = tensors[entry.name]
        if isinstance(tensor, np.ndarray) or tensor.device.type == "cpu":
            return tensor
        return tensor.cpu()

    return Block(metadata_of(tensors), build)


_Sent: TypeAlias = tuple[Block, object]
"""A rank's tensors, and the message of the calling function."""


@contextlib.contextmanager
def _gathered(
    call: str,
    comm: Communicator,
    root: int,
    tensors: Mapping[str, TensorLike],
    message: object,
    workspace: WorkspaceLike,
) -> Iterator[list[_Sent]]:
    """Yield every rank's block and message, in rank order, on root; [] elsewhere. Collective at both ends.

    `call` is the name of the public function; calls that the user makes inside the block are not part of it.
    """
    with public_call(call):
        with comm.phase("choosing a transport"):
            transport = transport_for(comm, workspace)
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
    comm: Communicator, root: int, tensors: Mapping[str, TensorLike], message: object, transport: Transport
) -> list[_Sent]:
    """Send every rank's block and message to root. Collective."""
    sent_here = _RankMessage()
    blocks: list[_Sent] = []
    # Root's own tensors are not sent: it has them.
    try:
        transport.begin(root)
        with comm.phase("sending"):
            if comm.rank != root:
                metadata = metadata_of(tensors)
                sent_here = _RankMessage(tuple(metadata), transport.send(tensors, metadata), message)
        received = comm.all_gather_bytes(encoded(sent_here, _RankMessage), root=root, operation="sending to root")
        with comm.phase("receiving"):
            messages: dict[int, _RankMessage] = {}
            for rank, data in enumerate(received):  # on root alone
                if rank != root:
                    what = "the description of its tensors"
                    messages[rank] = decode(data, _RankMessage, what, rank, _RankMessage.check)
            if comm.rank == root:
                sent = {rank: (of_rank.metadata, of_rank.address) for rank, of_rank in messages.items()}
                for rank, block in transport.receive(sent).items():
                    blocks.append((block, messages[rank].message))
                blocks.insert(root, (_block_of_root(tensors), message))
    except BaseException:
        transport.end(None)  # no agreement was reached: nobody may use this memory or these files
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

    def __init__(self, rank: int, block: Block, shards: Mapping[str, Shard]) -> None:
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
        InvalidArgumentError: the ranks share no memory and `workspace` is None, or a tensor is called as a box of
            another one.
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
            # Several boxes of one tensor have no memory in common: each is sent as a tensor of its own.
            for index, (box, tensor) in enumerate(zip(shard.boxes, local.tensors, strict=True)):
                name = shard.name if len(local.tensors) == 1 else f"{shard.name}#{index}"
                if name in tensors:
                    text = f"this is also what a box of {shard.name!r} is called: rename it"
                    raise InvalidArgumentError(text, name=name)
                tensors[name] = tensor
                shards.append(Shard(name, shard.dtype, shard.global_shape, (box,)))
    message = encode(tuple(shards), tuple[Shard, ...])
    with _gathered("gather_state", communicator, root, tensors, message, workspace) as blocks:
        yield tuple(_state(rank, block, message) for rank, (block, message) in enumerate(blocks))


def _state(rank: int, block: Block, message: object) -> GatheredState:
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


def _sent_tensor(rank: int, block: Block) -> TensorLike:
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

    # Tensors go as tensors, and the config's JSON names them.
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
            configs.append(values.decode(text, types=types, leaves=_ConfigTensors(block, rank)))
    return configs


class _ConfigTensors(dict[str, TensorLike]):
    """The tensors that a rank has sent beside its config, which names them."""

    def __init__(self, block: Block, rank: int) -> None:
        super().__init__({name: block.tensor(name) for name in block.metadata})
        self._rank = rank

    def __missing__(self, name: str) -> TensorLike:
        raise MismatchError("the config has a tensor that was not sent", name=name, rank=self._rank)
