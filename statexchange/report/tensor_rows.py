"""List the tensors of a checkpoint from its headers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from statexchange.sharding.shards import Shard, full_box
from statexchange.tensors import ITEMSIZE, element_shape

if TYPE_CHECKING:
    from statexchange.formats.source import ShardFile, Source

__all__ = ["TensorRow", "known_bytes", "tensor_rows"]


class TensorRow(NamedTuple):
    """One tensor of a checkpoint.

    Attributes:
        name: its name.
        dtype: its dtype; "?" if only the name is known.
        shape: its global shape, in elements; None if only the name is known.
        nbytes: its bytes; None if they are not known.
        holders: ranks (or numbers of files) that have a part of it; empty if it cannot be read.
        num_boxes: number of stored boxes.
        file: the first file that has a part of it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    nbytes: int | None
    holders: tuple[int, ...]
    num_boxes: int
    file: str

    @property
    def num_parameters(self) -> int:
        """Number of its elements; 0 if only the name is known."""
        return 0 if self.shape is None else full_box(self.shape).numel


def tensor_rows(source: Source) -> list[TensorRow]:
    """Return a row for each tensor of a source, in its order. Not collective."""
    first: dict[str, tuple[ShardFile, Shard]] = {}
    more: dict[str, list[tuple[ShardFile, Shard]]] = {}  # of tensors of which several files have a part
    for shard_file, tensor in source.shards():
        part = shard_file, tensor.shard
        if tensor.shard.name not in first:
            first[tensor.shard.name] = part
        else:
            more.setdefault(tensor.shard.name, []).append(part)
    rows: dict[str, TensorRow] = {}
    for name, (shard_file, shard) in first.items():
        holders: tuple[int, ...] = (shard_file.rank,)
        # The shape of the last part, as by the ends of its parts a tensor's shape is known.
        last, num_boxes = shard, len(shard.boxes)
        if name in more:
            last = more[name][-1][1]
            holders += tuple([other.rank for other, _ in more[name]])
            num_boxes += sum([len(other.boxes) for _, other in more[name]])
        rows[name] = TensorRow(
            name,
            last.dtype,
            element_shape(last.dtype, last.global_shape),
            full_box(last.global_shape).numel * ITEMSIZE[last.dtype],
            holders,
            num_boxes,
            shard_file.name,
        )
    for unreadable in source.unreadable:
        if unreadable.name not in rows:
            dtype, shape, nbytes = unreadable.dtype or "?", unreadable.shape, unreadable.nbytes
            if nbytes is None and shape is not None and dtype in ITEMSIZE:
                nbytes = full_box(shape).numel * ITEMSIZE[dtype]
            file = unreadable.path.rpartition("/")[2]
            rows[unreadable.name] = TensorRow(unreadable.name, dtype, shape, nbytes, (), 0, file)
    return list(rows.values())


def known_bytes(rows: Iterable[TensorRow]) -> int:
    """Return the sum of the bytes of tensors, without tensors whose size is not known."""
    return sum(row.nbytes or 0 for row in rows)
