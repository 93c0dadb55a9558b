"""Convert values between source and output: cast them to another floating dtype, or reduce several copies to one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from statexchange.sharding.shards import Box, intersect
from statexchange.storage.regions import BoxReader, slices_within
from statexchange.tensors import ITEMSIZE, array_over, converted

__all__ = ["ConvertingReader", "reduce_into"]

_REDUCE = {"max": np.maximum, "min": np.minimum}


def reduce_into(op: str, values: Any, others: Any) -> None:
    """Reduce `others` into the array `values` by "max" or "min", elementwise; NaN in either gives NaN."""
    with np.errstate(invalid="ignore"):  # ml_dtypes warns of some NaN
        _REDUCE[op](values, others, out=values)


class ConvertingReader:
    """Reads a box by one BoxReader, or reduces equal boxes of several, and converts and digests the values.

    Args:
        readers: one for each copy of the box.
        held: dtype of the copies.
        given: dtype of the output.
        reduce: "max" or "min" for several readers; None for one.
        hasher: digests the output.
    """

    def __init__(self, readers: Sequence[BoxReader], held: str, given: str, reduce: str | None, hasher: Any) -> None:
        self.readers = readers
        self.box = readers[0].box
        self._held = held
        self._given = given
        self._reduce = reduce
        self._hasher = hasher

    @property
    def left(self) -> int:
        """Bytes that are not yet read from the source."""
        return self.readers[0].left

    def copy_into(self, buffer: memoryview, window: Box, bounce: memoryview) -> int:
        """Fill the window's bytes like BoxReader.copy_into; bounce must be three windows large in the wider dtype."""
        part = intersect(self.box, window)
        if part is None:
            return 0
        nbytes, third = part.numel * ITEMSIZE[self._held], len(bounce) // 3
        values: Any = None
        for reader in self.readers:
            memory = bounce[:nbytes] if values is None else bounce[third : third + nbytes]
            reader.copy_into(memory, part, bounce[2 * third :])
            one = array_over(memory, self._held, part.shape)
            if values is None:
                values = one
            else:
                reduce_into(str(self._reduce), values, one)
        given = np.ascontiguousarray(converted(values, self._given) if self._given != self._held else values)
        raw = given.reshape(-1).view(np.uint8)
        self._hasher.update(raw)
        array_over(buffer, self._given, window.shape)[slices_within(part, window)] = given.reshape(part.shape)
        return part.numel * ITEMSIZE[self._given]

    def hexdigest(self) -> str:
        """Return the digest of all converted bytes."""
        return str(self._hasher.hexdigest())
