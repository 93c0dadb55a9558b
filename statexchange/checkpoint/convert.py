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
    """Reads a box with one BoxReader, or reduces the values of several copies; then converts and digests the values.

    Args:
        readers: one for each copy of the box.
        source_dtype: dtype of the copies.
        output_dtype: dtype of the output.
        reduce: "max" or "min" for several readers; None for one.
        hasher: digests the output.
    """

    def __init__(
        self, readers: Sequence[BoxReader], source_dtype: str, output_dtype: str, reduce: str | None, hasher: Any
    ) -> None:
        self.readers = readers
        self.box = readers[0].box
        self._source_dtype = source_dtype
        self._output_dtype = output_dtype
        self._reduce = reduce
        self._hasher = hasher

    @property
    def bytes_left(self) -> int:
        """Bytes that are not yet read from the source."""
        return self.readers[0].bytes_left

    def copy_into(self, buffer: memoryview, window: Box, bounce: memoryview) -> int:
        """Fill the window's bytes like BoxReader.copy_into; `bounce` must hold three windows in the wider dtype."""
        part = intersect(self.box, window)
        if part is None:
            return 0
        nbytes, third = part.numel * ITEMSIZE[self._source_dtype], len(bounce) // 3
        values: Any = None
        for reader in self.readers:
            memory = bounce[:nbytes] if values is None else bounce[third : third + nbytes]
            reader.copy_into(memory, part, bounce[2 * third :])
            copy = array_over(memory, self._source_dtype, part.shape)
            if values is None:
                values = copy
            else:
                reduce_into(str(self._reduce), values, copy)
        output = values if self._output_dtype == self._source_dtype else converted(values, self._output_dtype)
        output = np.ascontiguousarray(output)
        self._hasher.update(output.reshape(-1).view(np.uint8))
        array_over(buffer, self._output_dtype, window.shape)[slices_within(part, window)] = output.reshape(part.shape)
        return part.numel * ITEMSIZE[self._output_dtype]

    def hexdigest(self) -> str:
        """Return the digest of all converted bytes."""
        return str(self._hasher.hexdigest())
