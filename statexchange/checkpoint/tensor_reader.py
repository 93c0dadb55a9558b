"""Read a tensor of a source window by window, whatever boxes it is stored in, and check digests on the way."""

from __future__ import annotations

from collections import deque
from itertools import takewhile
from typing import TYPE_CHECKING

import xxhash

from statexchange.checkpoint.convert import ConvertingReader
from statexchange.checkpoint.index import BoxProvenance
from statexchange.storage.files import WINDOW_BYTES
from statexchange.storage.regions import READ_AHEAD_BYTES, BoxReader, windows
from statexchange.tensors import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from statexchange.formats.source import Source
    from statexchange.sharding.plan import Piece, TensorPlan
    from statexchange.sharding.shards import Box

__all__ = ["MEMORY_BYTES", "TensorReader"]

MEMORY_BYTES = 4 * WINDOW_BYTES  # one window, and what a cast or a reduction needs


class TensorReader:
    """Reads a planned tensor in C order, in its output dtype: `windows`, and then `provenance`.

    Args:
        source: the source.
        tensor: the tensor, as `plan_merge` placed it.
    """

    def __init__(self, source: Source, tensor: TensorPlan) -> None:
        self._source = source
        self._tensor = tensor
        self._readers = [self._reader(piece) for piece in tensor.pieces]

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the widest dtype that is read or returned."""
        widest = max((ITEMSIZE[self._dtype_of(piece.holder)] for piece in self._tensor.pieces), default=0)
        return max(widest, ITEMSIZE[self._tensor.dtype])

    def windows(self, memory: memoryview, itemsize: int | None = None) -> Iterator[tuple[Box, memoryview]]:
        """Yield each window of the tensor and its bytes, which lie in `memory` until the next window.

        Args:
            memory: MEMORY_BYTES of memory.
            itemsize: at least `itemsize`, for the same windows as those of another reader.
        """
        tensor = self._tensor
        waiting = deque(self._readers)
        for window in windows(tensor.shape, itemsize or self.itemsize) if tensor.nbytes else ():
            data = memory[: window.numel * ITEMSIZE[tensor.dtype]]
            self._fill(data, window, waiting, memory[WINDOW_BYTES:])
            yield window, data

    def provenance(self) -> list[BoxProvenance]:
        """Return the provenance of each piece after the last window; raise CorruptError if a digest differs."""
        return [
            self._checked_provenance(piece, reader)
            for piece, reader in zip(self._tensor.pieces, self._readers, strict=True)
        ]

    def _fill(
        self, data: memoryview, window: Box, waiting: deque[BoxReader | ConvertingReader], bounce: memoryview
    ) -> None:
        """Fill one window from the readers, which are in the order of their first elements; drop finished readers."""
        last = tuple(end - 1 for end in window.ends)
        for reader in takewhile(lambda reader: reader.box.offsets <= last, waiting):
            reader.copy_into(data, window, bounce)
        while waiting and not waiting[0].bytes_left:
            waiting.popleft()

    def _dtype_of(self, holder: int) -> str:
        """Return the dtype of a holder's shard in the source."""
        return self._source.files[holder].tensors[self._tensor.source].shard.dtype

    def _reader(self, piece: Piece) -> BoxReader | ConvertingReader:
        tensor, dtype = self._tensor, self._dtype_of(piece.holder)
        if dtype == tensor.dtype and tensor.reduce is None:
            return self._box_reader(piece, piece.holder, piece.box_index)
        copies = [(piece.holder, piece.box_index), *(piece.replicas if tensor.reduce is not None else ())]
        readers = [self._box_reader(piece, *copy) for copy in copies]
        return ConvertingReader(readers, dtype, tensor.dtype, tensor.reduce, xxhash.xxh3_128())

    def _box_reader(self, piece: Piece, holder: int, box_index: int) -> BoxReader:
        byte_range = self._source.files[holder].tensors[self._tensor.source].byte_ranges[box_index]
        copies = 1 + len(piece.replicas) if self._tensor.reduce is not None else 1
        ahead = READ_AHEAD_BYTES // (len(self._tensor.pieces) * copies)
        return BoxReader(byte_range, piece.box, self._dtype_of(holder), ahead)

    def _checked_provenance(self, piece: Piece, reader: BoxReader | ConvertingReader) -> BoxProvenance:
        holders = [piece.holder, *(holder for holder, _ in piece.replicas)]
        readers = reader.readers if isinstance(reader, ConvertingReader) else [reader]
        for holder, box_reader in zip(holders, readers, strict=False):
            box_reader.digest.check(self._tensor.source, self._source.files[holder].rank)
        return BoxProvenance(self._source.files[piece.holder].rank, reader.hexdigest())
