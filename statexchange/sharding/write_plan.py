"""What root has all ranks write: the files of an export, and where in them each box of each tensor goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from statexchange.sharding import records
from statexchange.sharding.plan import Piece
from statexchange.sharding.shards import Box, shape_from_json
from statexchange.tensors import ITEMSIZE, itemsize_of

__all__ = ["BoxReceipt", "BoxReceipts", "BoxReduction", "WriteFile", "WritePlan", "WriteTensor", "assign_hosts"]

_REDUCTIONS = ("max", "min")


@dataclass(frozen=True, slots=True)
class WriteFile:
    """An output file; `is_reserved` says that its room on disk is taken already."""

    path: str
    is_reserved: bool

    def to_json(self) -> dict[str, Any]:
        """A JSON value that `from_json` reads."""
        return {"path": self.path, "is_reserved": self.is_reserved}

    @classmethod
    def from_json(cls, raw: Any) -> WriteFile:
        """The file that `to_json` wrote; anything else is a ValueError."""
        path, is_reserved = records.fields(raw, "path", "is_reserved")
        return cls(records.text(path), records.flag(is_reserved))


@dataclass(frozen=True, slots=True)
class BoxReduction:
    """One box of the tensor `name`: box `index` of rank `holder` becomes the `op` ("max", "min") of it and of `copies`.

    The copies are (rank, index of the box there).
    """

    name: str
    op: str
    holder: int
    index: int
    copies: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class WriteTensor:
    """A tensor whose bytes begin at `begin` of the file number `file`; `source` is its name at the ranks.

    `reduce` is the operation that makes one of copies that differ, if any.
    """

    file: int
    begin: int
    shape: tuple[int, ...]
    dtype: str
    source: str
    reduce: str | None
    pieces: Sequence[Piece]

    def to_json(self) -> dict[str, Any]:
        """A JSON value that `from_json` reads."""
        return {
            "file": self.file,
            "begin": self.begin,
            "shape": self.shape,
            "dtype": self.dtype,
            "source": self.source,
            "reduce": self.reduce,
            "pieces": [
                {"box": p.box.to_json(), "holder": p.holder, "index": p.box_index, "replicas": p.replicas}
                for p in self.pieces
            ],
        }

    @classmethod
    def from_json(cls, raw: Any, world_size: int) -> WriteTensor:
        """The tensor that `to_json` wrote; anything else is a ValueError."""
        names = ("file", "begin", "shape", "dtype", "source", "reduce", "pieces")
        file, begin, shape, dtype, source, reduce, pieces = records.fields(raw, *names)
        itemsize_of(dtype)
        if reduce is not None and reduce not in _REDUCTIONS:
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
    for offset, size, whole in zip(box.offsets, box.shape, shape, strict=True):
        if offset + size > whole:
            raise ValueError(f"box {box} lies outside of shape {shape}")
    limits = (world_size, None)
    copies = records.items(replicas, lambda copy: records.pair(copy, limits)) if replicas != [] else ()
    return Piece(box, records.count(holder, world_size), records.count(index), copies)


@dataclass(frozen=True, slots=True)
class WritePlan:
    """What all ranks are to do.

    `renames` are maps of names at a rank to those that the plan has, and `rename_of` the number of each rank's map.
    `probe` is a path that exists where root's directory is seen. `compares` says that all replicas are digested.
    """

    files: tuple[WriteFile, ...]
    tensors: tuple[WriteTensor, ...]
    renames: tuple[Mapping[str, str], ...]
    rename_of: tuple[int, ...]
    probe: str
    compares: bool

    def reductions(self) -> list[BoxReduction]:
        """The boxes of which copies are reduced."""
        return [
            BoxReduction(tensor.source, tensor.reduce, piece.holder, piece.box_index, piece.replicas)
            for tensor in self.tensors
            if tensor.reduce is not None
            for piece in tensor.pieces
            if piece.replicas
        ]

    def compared(self, tensor: WriteTensor, piece: Piece) -> tuple[tuple[int, int], ...]:
        """The copies of a piece that must equal it."""
        return piece.replicas if self.compares and tensor.reduce is None else ()

    def to_json(self) -> dict[str, Any]:
        """A JSON value that `from_json` reads."""
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
        """The plan that `to_json` wrote for so many ranks; anything else is a ValueError."""
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
    """For each file the number of the host that writes it.

    `nodes` is the number of each rank's host, and `sees` whether the rank sees the directory. Of the hosts all of whose
    ranks do, the one is chosen to which the least must be sent, given what it has been assigned.
    """
    num_nodes = max(nodes) + 1
    blind = {node for node, seen in zip(nodes, sees, strict=True) if not seen}
    seeing = [node for node in range(num_nodes) if node not in blind]
    held = [[0] * num_nodes for _ in plan.files]
    for tensor in plan.tensors:
        for piece in tensor.pieces:
            held[tensor.file][nodes[piece.holder]] += piece.box.numel * ITEMSIZE[tensor.dtype]
    load = [0] * num_nodes
    assigned = []
    for by_node in held:
        total = sum(by_node)
        chosen = min(seeing, key=lambda node: (load[node] + total - by_node[node], node))
        load[chosen] += total
        assigned.append(chosen)
    return assigned


@dataclass(frozen=True, slots=True)
class BoxReceipt:
    """The digest of box `index` of a rank, which is, or is a copy of, piece `piece` of tensor `tensor` of the plan."""

    tensor: int
    piece: int
    index: int
    digest: str


@dataclass(frozen=True, slots=True)
class BoxReceipts:
    """All boxes that one rank has digested. As JSON each field is one list, as there is one receipt for each box."""

    boxes: tuple[BoxReceipt, ...]

    def __iter__(self) -> Iterator[BoxReceipt]:
        return iter(self.boxes)

    def to_json(self) -> dict[str, Any]:
        """A JSON value that `from_json` reads."""
        return {
            "tensor": [box.tensor for box in self.boxes],
            "piece": [box.piece for box in self.boxes],
            "index": [box.index for box in self.boxes],
            "digest": [box.digest for box in self.boxes],
        }

    @classmethod
    def from_json(cls, raw: Any) -> BoxReceipts:
        """The receipts that `to_json` wrote; anything else is a ValueError."""
        raw_tensors, raw_pieces, raw_indices, raw_digests = records.fields(raw, "tensor", "piece", "index", "digest")
        tensors = records.items(raw_tensors, records.count)
        pieces = records.items(raw_pieces, records.count, len(tensors))
        indices = records.items(raw_indices, records.count, len(tensors))
        digests = records.items(raw_digests, records.text, len(tensors))
        return cls(tuple(map(BoxReceipt, tensors, pieces, indices, digests)))
