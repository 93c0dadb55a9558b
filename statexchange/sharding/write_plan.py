"""The write plan that root sends to all ranks of an export: the files, and the offset of each tensor in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from statexchange.errors import NotFoundError
from statexchange.messages import Shared, encoded
from statexchange.sharding.pieces import Pieces, SpecPieces, nbytes_by_holder
from statexchange.sharding.rules import REDUCTIONS
from statexchange.sharding.shards import is_inside, shape_from_json
from statexchange.tensors import ITEMSIZE, itemsize_of


@dataclass(frozen=True, slots=True)
class WriteFile:
    """An output file.

    Attributes:
        path: where it is written; of a file without a name, what messages call it.
        is_reserved: whether disk space for all its bytes is reserved.
        link: of a file without a name the path, through /proc, of another process's descriptor; "" for any other.
        identity: the device and inode of that file.
    """

    path: str
    is_reserved: bool
    link: str = ""
    identity: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WriteTensor:
    """An output tensor.

    Attributes:
        file: number of its file.
        begin: first byte in the file.
        shape: its global shape.
        dtype: its dtype in the file.
        source: its name on the ranks.
        reduce: "max" or "min" if copies are reduced.
        pieces: its boxes with their holders; equal for many tensors, such as the experts of all layers, and sent once.
    """

    file: int
    begin: int
    shape: tuple[int, ...]
    dtype: str
    source: str
    reduce: str | None
    pieces: Shared[Pieces]

    def check(self, world_size: int) -> None:
        """Raise ValueError for a tensor that cannot be one of a plan for `world_size` ranks."""
        itemsize_of(self.dtype)
        if self.reduce is not None and self.reduce not in REDUCTIONS:
            raise ValueError(f"no reduction is called {self.reduce!r}")
        shape_from_json(self.shape)
        if isinstance(self.pieces, SpecPieces):
            self.pieces.check(self.shape, world_size)
            return
        for piece in self.pieces:
            if not is_inside(piece.box, self.shape):
                raise ValueError(f"box {piece.box} lies outside of shape {self.shape}")
            if piece.holder >= world_size:
                raise ValueError(f"rank {piece.holder} is not one of {world_size}")
            for rank, _ in piece.replicas:
                if rank >= world_size:
                    raise ValueError(f"rank {rank} is not one of {world_size}")


@dataclass(frozen=True)
class WritePlan:
    """The files and tensors that all ranks write together.

    Attributes:
        files: the output files.
        tensors: the output tensors.
        compares: whether replicas are digested and compared.
    """

    files: tuple[WriteFile, ...]
    tensors: tuple[WriteTensor, ...]
    compares: bool

    @cached_property
    def data(self) -> bytes:
        """This as it is sent."""
        return encoded(self, WritePlan)

    def check(self, world_size: int) -> None:
        """Raise ValueError if this cannot be a plan for `world_size` ranks."""
        checked: set[tuple[int, tuple[int, ...], str | None, str]] = set()
        for tensor in self.tensors:
            if tensor.file >= len(self.files):
                raise ValueError(f"file {tensor.file} is not one of {len(self.files)}")
            # Pieces that are equal were sent once, and are one object.
            kind = (id(tensor.pieces), tensor.shape, tensor.reduce, tensor.dtype)
            if kind not in checked:
                tensor.check(world_size)
                checked.add(kind)


def assign_hosts(plan: WritePlan, nodes: Sequence[int], sees: Sequence[bool]) -> list[int]:
    """Return the number of the host that writes each file.

    Only hosts all of whose ranks see the directory are chosen. Among them a file goes to the host with the smallest sum
    of the bytes of files already assigned to it and the bytes of this file that other hosts must send.

    Args:
        plan: the plan.
        nodes: the host number of each rank.
        sees: whether each rank sees the directory.

    Raises:
        NotFoundError: on no host all ranks see the directory.
    """
    import numpy as np

    num_nodes = max(nodes) + 1
    candidates = set(range(num_nodes))
    for node, sees_it in zip(nodes, sees, strict=True):
        if not sees_it:
            # All ranks of a host write its files in place.
            candidates.discard(node)
    if not candidates:
        rank = list(sees).index(False)
        text = "on each host a rank does not see the directory that rank 0 has made beside the target"
        raise NotFoundError(f"{text}: all ranks of a host must see the same file system", rank=rank)
    tensors_of: list[list[tuple[Pieces, int]]] = [[] for _ in plan.files]
    for tensor in plan.tensors:
        tensors_of[tensor.file].append((tensor.pieces, ITEMSIZE[tensor.dtype]))
    load = [0] * num_nodes
    assigned = []
    for of_file in tensors_of:
        by_node = np.zeros(num_nodes, np.int64)
        np.add.at(by_node, np.array(nodes), nbytes_by_holder(of_file, len(nodes)))
        nbytes: list[int] = by_node.tolist()
        total = sum(nbytes)
        # What a host writes costs its disk or link to the server, and what it lacks costs the network between hosts. Of
        # equal ones the first is chosen, so that the assignment is the same whenever it is made.
        chosen = min(candidates, key=lambda node: (load[node] + total - nbytes[node], node))
        load[chosen] += total
        assigned.append(chosen)
    return assigned
