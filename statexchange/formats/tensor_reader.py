"""Read a tensor of a source window by window, whatever boxes it is stored in, and check digests on the way.

Values may be cast to another floating dtype on the way, or several copies be reduced to one.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import xxhash

from statexchange.sharding.shards import Box, full_box, intersect
from statexchange.storage.files import WINDOW_BYTES
from statexchange.storage.regions import READ_AHEAD_BYTES, BoxReader, in_turns, slices_within, windows
from statexchange.storage.store import Prefetch, Span
from statexchange.tensors import ITEMSIZE, array_over, converted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from statexchange.formats.source import Source
    from statexchange.sharding.plan import TensorPlan
    from statexchange.sharding.shards import Piece

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
        # A plan has no tensor of which two files have different dtypes.
        dtype = tensor.dtype
        for piece in tensor.pieces[:1]:
            dtype = source.files[piece.holder].tensors[tensor.source].shard.dtype
        self.itemsize = max(ITEMSIZE[dtype], ITEMSIZE[tensor.dtype])  # bytes of an element in the wider dtype
        self.read_per_byte = ITEMSIZE[dtype] / ITEMSIZE[tensor.dtype]  # of a copy, for each byte that is returned
        self._box_readers: list[tuple[int, BoxReader]] = []  # all that read, with the rank of each one's file
        self._readers = [self._reader(piece, dtype) for piece in tensor.pieces]

    def windows(self, memory: memoryview, itemsize: int | None = None) -> Iterator[tuple[Box, memoryview]]:
        """Yield each window of the tensor and its bytes, which lie in `memory` until the next window.

        Args:
            memory: MEMORY_BYTES of memory.
            itemsize: the `itemsize` attribute or more, for windows equal to those of another reader.
        """
        bounce = memory[WINDOW_BYTES:]
        waiting = deque(self._readers)
        for window in windows(self._tensor.shape, itemsize or self.itemsize):
            data = memory[: window.numel * ITEMSIZE[self._tensor.dtype]]
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
        for rank, reader in self._box_readers:
            reader.digest.check(self._tensor.source, rank)

    def _reader(self, piece: Piece, dtype: str) -> BoxReader | _ConvertingReader:
        """Return the reader of a piece whose box has this dtype in the source."""
        tensor = self._tensor
        copies = [(piece.holder, piece.box_index)]
        if tensor.reduce is not None:
            copies += piece.replicas
        is_plain = dtype == tensor.dtype and tensor.reduce is None
        # One window may have columns of all ranks, each of which reads ahead.
        ahead = READ_AHEAD_BYTES // (len(tensor.pieces) * len(copies))
        readers = []
        for holder, index in copies:
            file = self._source.files[holder]
            stored = file.tensors[tensor.source].byte_ranges[index]
            # Of values that are converted the result is digested.
            readers.append(BoxReader(stored, piece.box, dtype, ahead, always_digest=is_plain and self._always_digest))
            self._box_readers.append((file.rank, readers[-1]))
        return readers[0] if is_plain else _ConvertingReader(readers, dtype, tensor.dtype, tensor.reduce)


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


def _fill(data: memoryview, window: Box, waiting: deque[BoxReader | _ConvertingReader], bounce: memoryview) -> None:
    """Fill one window from the readers, which are in the order of their first elements; drop finished readers."""
    last = tuple(end - 1 for end in window.ends)
    for reader in waiting:
        if reader.box.offsets > last:
            break
        reader.copy_into(data, window, bounce)
    while waiting and not waiting[0].bytes_left:
        waiting.popleft()


def reduce_into(op: str, values: Any, copy: Any) -> None:
    """Reduce the array `copy` into `values` by "max" or "min", elementwise; NaN in either gives NaN."""
    import numpy as np  # a merge that copies whole runs starts in half the time without it

    reduce = {"max": np.maximum, "min": np.minimum}[op]
    with np.errstate(invalid="ignore"):  # ml_dtypes warns of some NaN
        reduce(values, copy, out=values)


class _ConvertingReader:
    """Reads a box with one BoxReader, or reduces the values of several copies; then converts and digests the values.

    Args:
        readers: one for each copy of the box.
        source_dtype: dtype of the copies.
        output_dtype: dtype of the output.
        reduce: "max" or "min" for several readers; None for one.
    """

    def __init__(self, readers: Sequence[BoxReader], source_dtype: str, output_dtype: str, reduce: str | None) -> None:
        self.box = readers[0].box
        self._readers = readers
        self._source_dtype = source_dtype
        self._output_dtype = output_dtype
        self._reduce = reduce
        self._hasher = xxhash.xxh3_128()
        self.num_overflows = 0  # finite values that became infinite

    @property
    def bytes_left(self) -> int:
        """Bytes that are not yet read from the source."""
        return self._readers[0].bytes_left

    def copy_into(self, buffer: memoryview, window: Box, bounce: memoryview) -> None:
        """Fill the window's bytes like BoxReader.copy_into; `bounce` must hold three windows in the wider dtype."""
        part = intersect(self.box, window)
        if part is None:
            return
        third = len(bounce) // 3
        first, *replicas = self._readers
        values = self._read(first, part, bounce[:third], bounce[2 * third :])
        for reader in replicas:
            copy = self._read(reader, part, bounce[third : 2 * third], bounce[2 * third :])
            reduce_into(str(self._reduce), values, copy)
        if self._output_dtype != self._source_dtype:
            values, num_overflows = converted(values, self._output_dtype)
            self.num_overflows += num_overflows
        # The digest is that of the box alone, in its own C order: the window may be wider.
        self._hasher.update(values.reshape(-1).view("u1"))
        array_over(buffer, self._output_dtype, window.shape)[slices_within(part, window)] = values

    def _read(self, reader: BoxReader, part: Box, memory: memoryview, scratch: memoryview) -> Any:
        """Return the values of one copy as an array over `memory`."""
        data = memory[: part.numel * ITEMSIZE[self._source_dtype]]
        reader.copy_into(data, part, scratch)
        return array_over(data, self._source_dtype, part.shape)

    def hexdigest(self) -> str:
        """Return the digest of all converted bytes."""
        return str(self._hasher.hexdigest())
