"""Boxes of a tensor inside a file: windows in C order, and moving a box's bytes to or from them."""

from __future__ import annotations

import math
import mmap
import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from statexchange.errors import StorageError
from statexchange.layout.arrays import elements
from statexchange.layout.shards import ITEMSIZE, Box, c_strides, intersect
from statexchange.storage.files import WINDOW_BYTES, OpenFiles, Readable, pread_into, pwrite_all, reserve
from statexchange.storage.object_store import is_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = [
    "AHEAD_BYTES",
    "BoxReader",
    "blocks",
    "intersect",
    "is_contiguous",
    "linear_offset",
    "read_block",
    "read_part",
    "windows",
    "within",
    "write_box",
]

_LONG_RUN_BYTES = 32 << 10  # from here on a write costs less than the page faults of a mapping
_SPAN_BYTES = 4 << 20
AHEAD_BYTES, _LEAST_AHEAD_BYTES = 16 << 20, 64 << 10


def windows(shape: Sequence[int], itemsize: int, budget: int = WINDOW_BYTES) -> Iterator[Box]:
    """Boxes of at most `budget` bytes that cut a tensor into contiguous runs of its C order, in order."""
    if not shape:
        yield Box((), ())
        return
    dim = 0
    while dim < len(shape) - 1 and math.prod(shape[dim + 1 :]) * itemsize > budget:
        dim += 1
    rest = tuple(shape[dim + 1 :])
    step = max(1, budget // max(1, math.prod(rest) * itemsize))
    for prefix in np.ndindex(*shape[:dim]):
        for begin in range(0, shape[dim], step):
            size = min(step, shape[dim] - begin)
            yield Box((*prefix, begin, *(0,) * len(rest)), (*(1,) * dim, size, *rest))


def within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """The index of `inner` in an array that holds `outer`."""
    return tuple(slice(i - o, i - o + s) for i, o, s in zip(inner.offsets, outer.offsets, inner.shape, strict=True))


def linear_offset(box: Box, shape: Sequence[int]) -> int:
    """Position of a box's first element in the C order of a tensor of `shape`."""
    position = 0
    for offset, size in zip(box.offsets, shape, strict=True):
        position = position * size + offset
    return position


def is_contiguous(box: Box, shape: Sequence[int]) -> bool:
    """Whether a box is one run of the C order of a tensor of `shape`."""
    dims = [d for d in range(len(shape)) if box.shape[d] != shape[d]]
    return not dims or all(size == 1 for size in box.shape[: dims[-1]])


def write_box(
    fd: int,
    begin: int,
    shape: tuple[int, ...],
    dtype: str,
    box: Box,
    data: memoryview,
    path: str,
    *,
    reserved: bool,
) -> None:
    """Write a box's bytes (C order) into the tensor that starts at byte `begin` of an open file.

    Long runs are a write each. Many short ones go through a mapping: its room must be there, or a full disk would be a
    SIGBUS; so what the box spans is reserved first, unless the whole file's room is `reserved`.
    """
    itemsize = ITEMSIZE[dtype]
    if is_contiguous(box, shape):
        pwrite_all(fd, data, begin + linear_offset(box, shape) * itemsize, path)
        return
    if _run_bytes(box, shape, itemsize) < _LONG_RUN_BYTES:
        strides = c_strides(shape)
        first = begin + linear_offset(box, shape) * itemsize
        span = (sum((size - 1) * stride for size, stride in zip(box.shape, strides, strict=True)) + 1) * itemsize
        if reserved or reserve(fd, span, path, first):
            _write_mapped(fd, first, span, strides, elements(data, dtype, box.shape), path)
            return
    for run, part in _runs(box, shape, itemsize, data):
        pwrite_all(fd, part, begin + run * itemsize, path)


def _run_dim(box: Box, shape: Sequence[int]) -> int:
    """The dim from which on a box that is several runs is one."""
    return max(d for d in range(len(shape)) if box.shape[d] != shape[d])


def _run_bytes(box: Box, shape: Sequence[int], itemsize: int) -> int:
    return math.prod(box.shape[_run_dim(box, shape) :]) * itemsize


def _runs(box: Box, shape: Sequence[int], itemsize: int, data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """(first element in the tensor, bytes) of each contiguous run of a box."""
    dim = _run_dim(box, shape)
    run_bytes = _run_bytes(box, shape, itemsize)
    for number, prefix in enumerate(np.ndindex(*box.shape[:dim])):
        offsets = tuple(o + p for o, p in zip(box.offsets, prefix, strict=False)) + box.offsets[dim:]
        yield (
            linear_offset(Box(offsets, box.shape), shape),
            data[number * run_bytes : (number + 1) * run_bytes],
        )


def _write_mapped(fd: int, first: int, span: int, strides: Sequence[int], source: Any, path: str) -> None:
    """Write an array whose elements lie `strides` (elements) apart in `span` bytes from byte `first` of a file on."""
    start = first - first % mmap.ALLOCATIONGRANULARITY
    try:
        map_ = mmap.mmap(fd, first - start + span, offset=start)
    except OSError as error:
        raise StorageError.of(error, "map", path=path) from error
    except ValueError as error:
        raise StorageError("somebody has shortened the file while it was written", path=path) from error
    with map_:
        _assign_strided(map_, first - start, strides, source)


def _assign_strided(map_: mmap.mmap, first: int, strides: Sequence[int], source: Any) -> None:
    """A function of its own, so that no view outlives the mapping."""
    in_bytes = tuple(stride * source.itemsize for stride in strides)
    np.ndarray(source.shape, source.dtype, map_, first, in_bytes)[...] = source


def _assign(memory: memoryview, dtype: str, window: Box, part: Box, source: Any) -> None:
    """Put `part` into the bytes of `window`."""
    elements(memory, dtype, window.shape)[within(part, window)] = source


def read_block(
    fd: Readable,
    begin: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    dtype: str,
    target: memoryview,
    path: str,
) -> None:
    """Fill `target` with a block's bytes in C order; its first element starts at byte `begin` of an open file.

    `strides` (elements) say how it lies there; None means as one run. All that a strided block spans is read, in parts
    of at most 4 MiB.
    """
    if strides is None:
        pread_into(fd, target, begin, path)
    elif all(shape):
        _read_strided(fd, begin, elements(target, dtype, shape), strides, path)


def _read_strided(fd: Readable, begin: int, target: Any, strides: tuple[int, ...], path: str) -> None:
    reach = [(size - 1) * stride for size, stride in zip(target.shape, strides, strict=True)]
    span = (sum(reach) + 1) * target.itemsize
    if span > _SPAN_BYTES and max(reach):
        dim = max(range(len(reach)), key=lambda d: reach[d])
        half = target.shape[dim] // 2
        one, other = np.split(target, [half], axis=dim)
        _read_strided(fd, begin, one, strides, path)
        _read_strided(fd, begin + half * strides[dim] * target.itemsize, other, strides, path)
        return
    data = np.empty(span, np.uint8)
    pread_into(fd, data.data, begin, path)
    in_bytes = tuple(stride * target.itemsize for stride in strides)
    target[...] = np.ndarray(target.shape, target.dtype, data, strides=in_bytes)


def blocks(
    inputs: OpenFiles,
    path: str,
    begin: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    dtype: str,
    ahead_bytes: int = AHEAD_BYTES,
) -> Iterator[memoryview]:
    """The bytes of a block of a file in C order, part by part, each good until the next one.

    Parts have `WINDOW_BYTES`, or those of a strided block about `ahead_bytes`: each of them may have to read all that
    the block spans.
    """
    itemsize = ITEMSIZE[dtype]
    budget = WINDOW_BYTES if strides is None else max(_LEAST_AHEAD_BYTES, ahead_bytes)
    memory = memoryview(bytearray(min(budget, math.prod(shape) * itemsize)))
    along = c_strides(shape) if strides is None else strides
    for window in windows(shape, itemsize, budget) if memory else ():
        part = memory[: window.numel * itemsize]
        at = begin + itemsize * sum(map(operator.mul, window.offsets, along))
        read_block(inputs.file(path), at, window.shape, strides, dtype, part, path)
        yield part


def read_part(
    inputs: OpenFiles,
    path: str,
    begin: int,
    strides: tuple[int, ...] | None,
    box: Box,
    part: Box,
    dtype: str,
    memory: memoryview,
    target: Box,
    hasher: Any = None,
    progress: Callable[[], None] | None = None,
) -> None:
    """Copy `part` of a stored `box`, which starts at byte `begin` (see `read_block`), into the bytes of `target`.

    Both boxes are of one tensor, and both hold `part`; `hasher` is given its bytes in C order, and `progress` is
    called for each window.
    """
    itemsize = ITEMSIZE[dtype]
    along = c_strides(box.shape) if strides is None else strides
    inside = _relative(part, box)
    lies = None if strides is None and is_contiguous(inside, box.shape) else along
    goes = _relative(part, target)
    straight = is_contiguous(goes, target.shape)
    # A store answers late, so it is asked for more at a time.
    budget = WINDOW_BYTES if strides is None and not is_url(path) else AHEAD_BYTES
    bounce = memoryview(bytearray(0 if straight else min(budget, part.numel * itemsize)))
    to = linear_offset(goes, target.shape) * itemsize
    for window in windows(part.shape, itemsize, budget):
        nbytes = window.numel * itemsize
        at = begin + itemsize * sum(map(operator.mul, map(operator.add, inside.offsets, window.offsets), along))
        data = memory[to : to + nbytes] if straight else bounce[:nbytes]
        read_block(inputs.file(path), at, window.shape, lies, dtype, data, path)
        if hasher is not None:
            hasher.update(data)
        if not straight:
            shifted = Box(tuple(map(operator.add, part.offsets, window.offsets)), window.shape)
            _assign(memory, dtype, target, shifted, elements(data, dtype, window.shape))
        if progress is not None:
            progress()
        to += nbytes


def _relative(inner: Box, outer: Box) -> Box:
    return Box(tuple(map(operator.sub, inner.offsets, outer.offsets)), inner.shape)


class BoxReader:
    """Reads a box's bytes from a file, forward and window by window, hashing them on the way.

    `strides` are those of `read_block`, `ahead_bytes` that of `blocks`.
    """

    def __init__(
        self,
        inputs: OpenFiles,
        path: str,
        begin: int,
        box: Box,
        dtype: str,
        hasher: Any,
        strides: tuple[int, ...] | None = None,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> None:
        self.box = box
        self.left = box.numel * ITEMSIZE[dtype]
        self._inputs = inputs
        self._path = path
        self._at = begin
        self._dtype = dtype
        self._hasher = hasher
        self._ahead = memoryview(b"")
        self._strided = None
        if strides is not None:
            self._strided = blocks(inputs, path, begin, box.shape, strides, dtype, ahead_bytes)

    def copy_into(self, buffer: memoryview, window: Box, bounce: memoryview) -> int:
        """Put what this box has of `window` into its bytes; returns their number. Windows come in order.

        `bounce` is memory for passing use, as large as the window.
        """
        part = intersect(self.box, window)
        if part is None:
            return 0
        itemsize = ITEMSIZE[self._dtype]
        nbytes = part.numel * itemsize
        inside = Box(tuple(p - w for p, w in zip(part.offsets, window.offsets, strict=True)), part.shape)
        straight = is_contiguous(inside, window.shape)
        begin = linear_offset(inside, window.shape) * itemsize if straight else 0
        target = (buffer if straight else bounce)[begin : begin + nbytes]
        self.left -= nbytes
        self._read(target)
        self._hasher.update(target)
        if not straight:
            _assign(buffer, self._dtype, window, part, elements(target, self._dtype, part.shape))
        return nbytes

    def _read(self, target: memoryview) -> None:
        """The next bytes of the box: what it has of a window follows what it had of the one before."""
        if self._strided is None:
            pread_into(self._inputs.file(self._path), target, self._at, self._path)
            self._at += len(target)
            return
        while target:
            if not self._ahead:
                self._ahead = next(self._strided)
            nbytes = min(len(target), len(self._ahead))
            target[:nbytes] = self._ahead[:nbytes]
            target, self._ahead = target[nbytes:], self._ahead[nbytes:]
        if not self._ahead and not self.left:
            self._strided = None  # and with it its memory

    def digest(self) -> str:
        """The digest of all bytes read."""
        return str(self._hasher.hexdigest())
