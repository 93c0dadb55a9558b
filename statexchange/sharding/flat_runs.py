"""Runs of a flattened tensor as boxes.

DeepSpeed's ZeRO, FSDP1 and Megatron's distributed optimizer flatten tensors and give each rank a contiguous run of the
elements, which begins and ends anywhere: in the middle of a row, say. Such a run is a few boxes, which follow one
another in the C order of the tensor as well as in the run.
"""

from __future__ import annotations

import math

from statexchange.sharding.shards import Box, c_strides, full_box

__all__ = ["boxes_of_run"]


def boxes_of_run(shape: tuple[int, ...], begin: int, end: int) -> tuple[Box, ...]:
    """Return the boxes of the elements from `begin` to before `end` of a flattened tensor of `shape`.

    Args:
        shape: the shape of the whole tensor.
        begin: the position of the run's first element in the tensor's C order.
        end: the position after its last element.

    Returns:
        At most ``2 * len(shape) - 1`` boxes (one for a 0-d tensor), none of them empty. Each is one run of the C order,
        and the next box begins where it ends.

    Raises:
        ValueError: the run is not within the tensor.

    Example:
        >>> [str(box) for box in boxes_of_run((4, 3), 2, 10)]
        ['[0:1, 2:3]', '[1:3, 0:3]', '[3:4, 0:1]']
    """
    numel = math.prod(shape)
    if not 0 <= begin <= end <= numel:
        raise ValueError(f"elements {begin} to {end} are not within the {numel} elements of shape {shape}")
    if begin == end:
        return ()
    if end - begin == numel:
        return (full_box(shape),)
    strides = c_strides(shape)
    boxes = []
    at = begin
    while at < end:
        # The slowest dim of which at least one whole index begins here and ends within the run.
        dim = 0
        while at % strides[dim] or at + strides[dim] > end:
            dim += 1
        index = at // strides[dim] % shape[dim]
        size = min(shape[dim] - index, (end - at) // strides[dim])
        offsets = [at // strides[outer] % shape[outer] for outer in range(dim)]
        rest = shape[dim + 1 :]
        boxes.append(Box((*offsets, index, *(0,) * len(rest)), (*(1,) * dim, size, *rest)))
        at += size * strides[dim]
    return tuple(boxes)
