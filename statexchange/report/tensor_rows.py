"""List the tensors of a checkpoint from its headers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from statexchange.sharding.shards import Shard, full_box
from statexchange.tensors import ITEMSIZE, element_shape

if TYPE_CHECKING:
    from statexchange.formats.source import ShardFile, Source

__all__ = ["TensorRow", "known_bytes", "tensor_rows"]


@dataclass(frozen=True, slots=True)
class TensorRow:
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
    files: dict[str, list[ShardFile]] = {}
    shards: dict[str, Shard] = {}  # the last one of each tensor
    num_boxes: Counter[str] = Counter()
    for shard_file, tensor in source.shards():
        shard = shards[tensor.shard.name] = tensor.shard
        files.setdefault(shard.name, []).append(shard_file)
        num_boxes[shard.name] += len(shard.boxes)
    rows: dict[str, TensorRow] = {}
    for name, holders in files.items():
        shard = shards[name]
        rows[name] = TensorRow(
            name,
            shard.dtype,
            element_shape(shard.dtype, shard.global_shape),
            full_box(shard.global_shape).numel * ITEMSIZE[shard.dtype],
            tuple(shard_file.rank for shard_file in holders),
            num_boxes[name],
            holders[0].path.rpartition("/")[2],
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
