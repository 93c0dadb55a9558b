"""Compare the boxes of live tensors that a rank holds with a checkpoint, and the copies that the checkpoint has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from statexchange.exchange.staging import Staging
from statexchange.formats.open_checkpoint import StoredTensor
from statexchange.report.diff import TensorDiff
from statexchange.report.value_statistics import ValueSums
from statexchange.sharding.shards import Box
from statexchange.state.describe import LocalTensor
from statexchange.storage.regions import to_global
from statexchange.tensors import PACKED, array_over, same_bytes


@dataclass(frozen=True, slots=True)
class Compared:
    """A rank's part of one live tensor: dtype, global shape, and the sums of each box that could be compared.

    `nbytes` were read of the checkpoint for it.
    """

    dtype: str
    shape: tuple[int, ...]
    boxes: Mapping[Box, ValueSums]
    nbytes: int


def compared_rows(
    local: LocalTensor, stored: StoredTensor | None, tolerance: float | None, progress: Callable[[], object]
) -> Compared:
    """Compare this rank's boxes of a tensor with a checkpoint; `progress` is called for each window. Not collective."""
    shard, boxes, nbytes = local.shard, dict[Box, ValueSums](), 0
    if stored is not None and stored.shape == shard.global_shape:
        is_packed = bool({shard.dtype, stored.dtype} & PACKED.keys())
        for box, tensor in zip(shard.boxes, local.tensors, strict=True):
            boxes[box] = sums = ValueSums()
            if is_packed and shard.dtype != stored.dtype:  # values of packed dtypes are not computed
                continue
            for window, data in Staging().parts(tensor, shard.dtype):
                # The window in the whole tensor, of which the checkpoint may have other boxes.
                whole = to_global(window, box)
                read = stored.read(whole)
                if is_packed:
                    sums.num_differing += not same_bytes(memoryview(data).cast("B"), read.reshape(-1).data)
                else:
                    sums.add(whole, array_over(data, shard.dtype, window.shape), read, tolerance)
                nbytes += read.nbytes
                progress()
    return Compared(shard.dtype, shard.global_shape, boxes, nbytes)


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
