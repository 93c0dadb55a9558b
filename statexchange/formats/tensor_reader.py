"""Read a tensor of a source window by window, whatever boxes it is stored in, and check digests on the way.

Values may be cast to another floating dtype on the way, or several copies be reduced to one.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from statexchange.sharding.shards import Box, full_box, intersect
from statexchange.storage.files import WINDOW_BYTES
from statexchange.storage.regions import READ_AHEAD_BYTES, BoxReader, in_turns, slices_within, windows
from statexchange.storage.store import Prefetch, Span
from statexchange.tensors import ITEMSIZE, array_over, converted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from statexchange.formats.source import Source, SourceTensor
    from statexchange.sharding.plan import TensorPlan
    from statexchange.sharding.shards import Piece

__all__ = ["MEMORY_BYTES", "TensorReader", "prefetch", "reduce_into"]

MEMORY_BYTES = 4 * WINDOW_BYTES  # one window, and what a cast or a reduction needs


class TensorReader:
    """Reads a planned tensor in C order, in its output dtype: `windows`, and then `digests` or `check`.

    Args:
        source: the source.
        tensor: the tensor, as `plan_merge` placed it.
        always_digest: digest all bytes, for `digests`; else only those whose digest the source knows, for `check`.
    """

    def __init__(self, source: Source, tensor: TensorPlan, *, always_digest: bool = True) -> None:
        self._source = source
        self._tensor = tensor
        self._always_digest = always_digest
        self._readers: list[BoxReader | _ConvertingReader] = []
        self.itemsize = ITEMSIZE[tensor.dtype]  # bytes of an element in the widest dtype that is read or returned
        self.read_per_byte = 1.0  # bytes that are read of a copy for each byte that is returned
        for piece in tensor.pieces:
            stored = source.files[piece.holder].tensors[tensor.source]
            self.itemsize = max(self.itemsize, ITEMSIZE[stored.shard.dtype])
            self.read_per_byte = ITEMSIZE[stored.shard.dtype] / ITEMSIZE[tensor.dtype]
            self._readers.append(self._reader(piece, stored))

    def windows(self, memory: memoryview, itemsize: int | None = None) -> Iterator[tuple[Box, memoryview]]:
        """Yield each window of the tensor and its bytes, which lie in `memory` until the next window.

        Args:
            memory: MEMORY_BYTES of memory.
            itemsize: the `itemsize` attribute or more, for windows equal to those of another reader.
        """
        bounce = memory[WINDOW_BYTES:]
        nbytes = ITEMSIZE[self._tensor.dtype]
        waiting = deque(self._readers)
        for window in windows(self._tensor.shape, itemsize or self.itemsize):
            data = memory[: window.numel * nbytes]
            if len(self._readers) == 1:
                self._readers[0].copy_into(data, window, bounce)
            else:
                _fill(data, window, waiting, bounce)
            yield window, data

    def digests(self) -> list[str]:
        """Return the digest of each piece in its output dtype. Call it after the last window.

        Raises:
            CorruptError: the bytes of a box differ from its digest in the source.
        """
        self.check()
        return [reader.hexdigest() for reader in self._readers]

    def num_overflows(self) -> int:
        """Return the number of finite elements that became infinite as they were cast."""
        return sum([reader.num_overflows for reader in self._readers if isinstance(reader, _ConvertingReader)])

    def check(self) -> None:
        """Raise CorruptError if the bytes of a box differ from its digest in the source, after the last window."""
        name = self._tensor.source
        for piece, reader in zip(self._tensor.pieces, self._readers, strict=True):
            if isinstance(reader, BoxReader):
                reader.digest.check(name, self._source.files[piece.holder].rank)
                continue
            for (holder, _), box_reader in zip(_copies(piece), reader.readers, strict=False):
                box_reader.digest.check(name, self._source.files[holder].rank)

    def _reader(self, piece: Piece, stored: SourceTensor) -> BoxReader | _ConvertingReader:
        """Return the reader of a piece, whose holder has it in this tensor."""
        tensor, dtype = self._tensor, stored.shard.dtype
        if dtype == tensor.dtype and tensor.reduce is None:
            return self._box_reader(piece.box, stored, piece.box_index, READ_AHEAD_BYTES // len(tensor.pieces))
        copies = [(stored, piece.box_index)]
        for holder, box_index in piece.replicas if tensor.reduce is not None else ():
            copies.append((self._source.files[holder].tensors[tensor.source], box_index))
        ahead = READ_AHEAD_BYTES // (len(tensor.pieces) * len(copies))
        readers = [self._box_reader(piece.box, *copy, ahead) for copy in copies]
        return _ConvertingReader(readers, dtype, tensor.dtype, tensor.reduce, xxhash.xxh3_128())

    def _box_reader(self, box: Box, stored: SourceTensor, box_index: int, ahead_bytes: int) -> BoxReader:
        return BoxReader(
            stored.byte_ranges[box_index], box, stored.shard.dtype, ahead_bytes, always_digest=self._always_digest
        )


def prefetch(source: Source, tensors: Iterable[TensorPlan]) -> Prefetch:
    """Return what asks for the bytes of planned tensors ahead of their reading, one tensor after another.

    Boxes that are no run in their file are left to the kernel.
    """
    spans = []
    for tensor in tensors:
        parts = []
        for piece in tensor.pieces:
            stored = source.files[piece.holder].tensors[tensor.source].byte_ranges[piece.box_index]
            file = stored.file if stored.strides is None else None
            parts.append((piece.box, Span(file, stored.begin, stored.nbytes)))
        spans += [parts[0][1]] if len(parts) == 1 else in_turns(parts, full_box(tensor.shape))
    return Prefetch(spans)


def _copies(piece: Piece) -> list[tuple[int, int]]:
    """Return holder and box index of each copy of a piece."""
    return [(piece.holder, piece.box_index), *piece.replicas]


def _fill(data: memoryview, window: Box, waiting: deque[BoxReader | _ConvertingReader], bounce: memoryview) -> None:
    """Fill one window from the readers, which are in the order of their first elements; drop finished readers."""
    last = tuple(end - 1 for end in window.ends)
    for reader in waiting:
        if reader.box.offsets > last:
            break
        reader.copy_into(data, window, bounce)
    while waiting and not waiting[0].bytes_left:
        waiting.popleft()


_REDUCE = {"max": np.maximum, "min": np.minimum}


def reduce_into(op: str, values: Any, others: Any) -> None:
    """Reduce `others` into the array `values` by "max" or "min", elementwise; NaN in either gives NaN."""
    with np.errstate(invalid="ignore"):  # ml_dtypes warns of some NaN
        _REDUCE[op](values, others, out=values)


class _ConvertingReader:
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
        self.num_overflows = 0  # finite values that became infinite

    @property
    def bytes_left(self) -> int:
        """Bytes that are not yet read from the source."""
        return self.readers[0].bytes_left

    def copy_into(self, buffer: memoryview, window: Box, bounce: memoryview) -> None:
        """Fill the window's bytes like BoxReader.copy_into; `bounce` must hold three windows in the wider dtype."""
        part = intersect(self.box, window)
        if part is None:
            return
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
        output = values
        if self._output_dtype != self._source_dtype:
            output, num_overflows = converted(values, self._output_dtype)
            self.num_overflows += num_overflows
        output = np.ascontiguousarray(output)
        self._hasher.update(output.reshape(-1).view(np.uint8))
        array_over(buffer, self._output_dtype, window.shape)[slices_within(part, window)] = output.reshape(part.shape)

    def hexdigest(self) -> str:
        """Return the digest of all converted bytes."""
        return str(self._hasher.hexdigest())
