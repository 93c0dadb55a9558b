"""The write plan that root sends to all ranks of an export: the files, and the offset of each tensor in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from statexchange.sharding import records
from statexchange.sharding.plan import Piece
from statexchange.sharding.rules import REDUCTIONS
from statexchange.sharding.shards import Box, shape_from_json
from statexchange.tensors import ITEMSIZE, itemsize_of

__all__ = ["BoxReceipt", "BoxReceipts", "BoxReduction", "WriteFile", "WritePlan", "WriteTensor", "assign_hosts"]


@dataclass(frozen=True, slots=True)
class WriteFile:
    """An output file. `is_reserved`: disk space for all its bytes is reserved."""

    path: str
    is_reserved: bool

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value for `from_json`."""
        return {"path": self.path, "is_reserved": self.is_reserved}

    @classmethod
    def from_json(cls, raw: Any) -> WriteFile:
        """Return the file that `to_json` encoded; raise ValueError for anything else."""
        path, is_reserved = records.fields(raw, "path", "is_reserved")
        return cls(records.text(path), records.flag(is_reserved))


@dataclass(frozen=True, slots=True)
class BoxReduction:
    """The reduction of copies of one box: box `index` of rank `holder` becomes the `op` ("max", "min") of all copies.

    `name` is the tensor's; `copies` are (rank, index of the box there).
    """

    name: str
    op: str
    holder: int
    index: int
    copies: tuple[tuple[int, int], ...]


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
        pieces: its boxes with their holders.
    """

    file: int
    begin: int
    shape: tuple[int, ...]
    dtype: str
    source: str
    reduce: str | None
    pieces: Sequence[Piece]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value for `from_json`."""
        return {
            "file": self.file,
            "begin": self.begin,
            "shape": self.shape,
            "dtype": self.dtype,
            "source": self.source,
            "reduce": self.reduce,
            "pieces": [
                {
                    "box": piece.box.to_json(),
                    "holder": piece.holder,
                    "index": piece.box_index,
                    "replicas": piece.replicas,
                }
                for piece in self.pieces
            ],
        }

    @classmethod
    def from_json(cls, raw: Any, world_size: int) -> WriteTensor:
        """Return the tensor that `to_json` encoded; raise ValueError for anything else."""
        names = ("file", "begin", "shape", "dtype", "source", "reduce", "pieces")
        file, begin, shape, dtype, source, reduce, pieces = records.fields(raw, *names)
        itemsize_of(dtype)
        if reduce is not None and reduce not in REDUCTIONS:
            raise ValueError(f"no reduction is called {reduce!r}")
        size = shape_from_json(shape)
        return cls(
            records.count(file),
            records.count(begin),
            size,
            dtype,
            records.text(source),
            reduce,
            records.items(pieces, lambda piece: _piece(piece, size, world_size)),
        )


def _piece(raw: Any, shape: tuple[int, ...], world_size: int) -> Piece:
    raw_box, holder, index, replicas = records.fields(raw, "box", "holder", "index", "replicas")
    box = Box.from_json(raw_box)
    if len(box.shape) != len(shape):
        raise ValueError(f"box {box} lies outside of shape {shape}")
    for offset, size, dim_size in zip(box.offsets, box.shape, shape, strict=True):
        if offset + size > dim_size:
            raise ValueError(f"box {box} lies outside of shape {shape}")
    limits = (world_size, None)
    copies = records.items(replicas, lambda copy: records.pair(copy, limits)) if replicas != [] else ()
    return Piece(box, records.count(holder, world_size), records.count(index), copies)


@dataclass(frozen=True, slots=True)
class WritePlan:
    """The files and tensors that all ranks write together.

    Attributes:
        files: the output files.
        tensors: the output tensors.
        renames: distinct maps from names on a rank to names in the plan.
        rename_of: for each rank, the number of its map.
        probe: the path of a file that shows a host that it sees root's directory.
        compares: whether replicas are digested and compared.
    """

    files: tuple[WriteFile, ...]
    tensors: tuple[WriteTensor, ...]
    renames: tuple[Mapping[str, str], ...]
    rename_of: tuple[int, ...]
    probe: str
    compares: bool

    def reductions(self) -> list[BoxReduction]:
        """Return the reductions of all boxes that have copies to reduce."""
        reductions = []
        for tensor in self.tensors:
            op = tensor.reduce
            if op is None:
                continue
            for piece in tensor.pieces:
                if piece.replicas:
                    reductions.append(BoxReduction(tensor.source, op, piece.holder, piece.box_index, piece.replicas))
        return reductions

    def compared(self, tensor: WriteTensor, piece: Piece) -> tuple[tuple[int, int], ...]:
        """Return the copies of a piece that must equal it."""
        return piece.replicas if self.compares and tensor.reduce is None else ()

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value for `from_json`."""
        return {
            "files": [file.to_json() for file in self.files],
            "tensors": [tensor.to_json() for tensor in self.tensors],
            "renames": self.renames,
            "rename_of": self.rename_of,
            "probe": self.probe,
            "compares": self.compares,
        }

    @classmethod
    def from_json(cls, raw: Any, world_size: int) -> WritePlan:
        """Return the plan that `to_json` encoded for `world_size` ranks; raise ValueError for anything else."""
        names = ("files", "tensors", "renames", "rename_of", "probe", "compares")
        raw_files, raw_tensors, raw_renames, raw_numbers, probe, compares = records.fields(raw, *names)
        files = records.items(raw_files, WriteFile.from_json)
        tensors = records.items(raw_tensors, lambda tensor: WriteTensor.from_json(tensor, world_size))
        for tensor in tensors:
            records.count(tensor.file, len(files))
        renames = records.items(raw_renames, records.texts)
        numbers = records.items(raw_numbers, lambda number: records.count(number, len(renames)), world_size)
        return cls(files, tensors, renames, numbers, records.text(probe), records.flag(compares))


def assign_hosts(plan: WritePlan, nodes: Sequence[int], sees: Sequence[bool]) -> list[int]:
    """Return the number of the host that writes each file.

    Only hosts all of whose ranks see the directory are chosen. Among them a file goes to the host with the smallest sum
    of the bytes of files already assigned to it and the bytes of this file that other hosts must send.

    Args:
        plan: the plan.
        nodes: the host number of each rank.
        sees: whether each rank sees the directory.
    """
    num_nodes = max(nodes) + 1
    without_access = {node for node, sees_it in zip(nodes, sees, strict=True) if not sees_it}
    candidates = [node for node in range(num_nodes) if node not in without_access]
    nbytes = [[0] * num_nodes for _ in plan.files]  # by file and host
    for tensor in plan.tensors:
        for piece in tensor.pieces:
            nbytes[tensor.file][nodes[piece.holder]] += piece.box.numel * ITEMSIZE[tensor.dtype]
    load = [0] * num_nodes
    assigned = []
    for by_node in nbytes:
        total = sum(by_node)
        chosen = min(candidates, key=lambda node: (load[node] + total - by_node[node], node))
        load[chosen] += total
        assigned.append(chosen)
    return assigned


@dataclass(frozen=True, slots=True)
class BoxReceipt:
    """The digest of a rank's box `index`, which supplies, or is a copy of, a piece of a tensor of the plan.

    `num_overflows` is the number of its finite elements that became infinite as they were cast.
    """

    tensor: int
    piece: int
    index: int
    digest: str
    num_overflows: int = 0


@dataclass(frozen=True, slots=True)
class BoxReceipts:
    """The receipts of one rank. In JSON each field is one list, because there may be millions of receipts."""

    boxes: tuple[BoxReceipt, ...]

    def __iter__(self) -> Iterator[BoxReceipt]:
        return iter(self.boxes)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value for `from_json`."""
        return {
            "tensor": [box.tensor for box in self.boxes],
            "piece": [box.piece for box in self.boxes],
            "index": [box.index for box in self.boxes],
            "digest": [box.digest for box in self.boxes],
            "num_overflows": [box.num_overflows for box in self.boxes],
        }

    @classmethod
    def from_json(cls, raw: Any) -> BoxReceipts:
        """Return the receipts that `to_json` encoded; raise ValueError for anything else."""
        names = ("tensor", "piece", "index", "digest", "num_overflows")
        raw_tensors, raw_pieces, raw_indices, raw_digests, raw_counts = records.fields(raw, *names)
        tensors = records.items(raw_tensors, records.count)
        pieces = records.items(raw_pieces, records.count, len(tensors))
        indices = records.items(raw_indices, records.count, len(tensors))
        digests = records.items(raw_digests, records.text, len(tensors))
        counts = records.items(raw_counts, records.count, len(tensors))
        return cls(tuple(map(BoxReceipt, tensors, pieces, indices, digests, counts)))
