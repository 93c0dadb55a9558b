"""Compare the boxes of live tensors that a rank holds with a checkpoint, and the copies that the checkpoint has."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from statexchange.comm.communicator import Communicator
from statexchange.exchange.staging import Staging
from statexchange.formats.open_checkpoint import StoredTensor
from statexchange.report.diff import TensorDiff
from statexchange.report.value_statistics import ValueSums, same_bytes
from statexchange.sharding.shards import Box
from statexchange.state.describe import LocalTensor
from statexchange.tensors import PACKED, TensorLike, array_over

__all__ = ["Compared", "RowComparison", "joined"]


@dataclass(frozen=True, slots=True)
class Compared:
    """A rank's part of one live tensor: dtype, global shape, and the sums of each box that could be compared."""

    dtype: str
    shape: tuple[int, ...]
    boxes: Mapping[Box, ValueSums]


class RowComparison:
    """One rank's share of a comparison. Not collective; it reports progress."""

    def __init__(self, comm: Communicator, tolerance: float | None) -> None:
        self._comm = comm
        self._tolerance = tolerance
        self._nbytes = 0

    def compare(
        self, live: Mapping[str, LocalTensor], stored: Mapping[str, StoredTensor]
    ) -> tuple[dict[str, Compared], int]:
        """Return this rank's part of the comparison, by name, and the bytes that it has read."""
        compared = {}
        for name, local in live.items():
            shard, tensor = local.shard, stored.get(name)
            boxes: dict[Box, ValueSums] = {}
            if tensor is not None and tensor.shape == shard.global_shape:
                for box, part in zip(shard.boxes, local.tensors, strict=True):
                    boxes[box] = self._sums(box, part, shard.dtype, tensor)
            compared[name] = Compared(shard.dtype, shard.global_shape, boxes)
            self._comm.progress()
        return compared, self._nbytes

    def _sums(self, box: Box, tensor: TensorLike, dtype: str, stored: StoredTensor) -> ValueSums:
        sums = ValueSums()
        is_packed = bool({dtype, stored.dtype} & PACKED.keys())
        if is_packed and dtype != stored.dtype:  # values of packed dtypes are not computed
            return sums
        for window, data in Staging().parts(tensor, dtype):
            # The window in the whole tensor, of which the checkpoint may have other boxes.
            whole = Box(tuple(map(operator.add, box.offsets, window.offsets)), window.shape)
            read = stored.read(whole)
            if is_packed:
                sums.num_differing += not same_bytes(memoryview(data).cast("B"), read.reshape(-1).data)
            else:
                sums.add(whole, array_over(data, dtype, window.shape), read, self._tolerance)
            self._nbytes += read.nbytes
            self._comm.progress()
        return sums


def joined(
    name: str, parts: Sequence[Compared], stored: tuple[str, tuple[int, ...]] | None, tolerance: float | None
) -> TensorDiff:
    """Return the comparison of one tensor from the parts of all ranks; `stored` are its dtype and shape there.

    If rank 0's rows are equal and one of 6 elements of rank 1's rows differs, 1 of 12 differs.
    """
    if not parts:
        assert stored is not None  # the name comes from a, from b or from both
        return TensorDiff(name, "only in b", None, stored[0], None, stored[1])
    dtype, shape = parts[0].dtype, parts[0].shape
    if stored is None:
        return TensorDiff(name, "only in a", dtype, None, shape, None)
    if shape != stored[1]:
        return TensorDiff(name, "shape", dtype, stored[0], shape, stored[1])
    boxes: dict[Box, ValueSums] = {}
    for part in parts:
        for box, sums in part.boxes.items():
            if box not in boxes or sums.num_differing > boxes[box].num_differing:  # the worst of several copies
                boxes[box] = sums
    total = ValueSums()
    for sums in boxes.values():
        total.merge(sums)
    if not total.num_differing and dtype == stored[0]:
        return TensorDiff(name, "equal", dtype, dtype, shape, shape, "bytes")
    values = None if {dtype, stored[0]} & PACKED.keys() else total.result()
    return TensorDiff.of_values(name, (dtype, stored[0]), shape, values, tolerance)
