"""Read and write boxes of tensors in files, in windows of bounded size, and digest them on the way.

Boxes are in the tensor's coordinates unless a name says *local* (relative to another box). A window is a part of a box
that is contiguous in its C order and has at most `window_bytes`.
"""

from __future__ import annotations

import heapq
import itertools
import math
import mmap
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from statexchange.errors import CorruptError, StorageError
from statexchange.sharding.shards import Box, begin_of_run, c_contiguous, c_strides, full_box, intersect, linear_offset
from statexchange.storage.files import WINDOW_BYTES, pwrite_all, reserve
from statexchange.storage.store import PREFETCH_STEP_BYTES, Prefetch, Span
from statexchange.tensors import ITEMSIZE, elements

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from statexchange.storage.store import ByteRange, StoredFile

# numpy is imported where bytes are gathered or scattered: a command that copies whole runs starts in half the time.

# Measured: from this length on, a write costs less than the page faults of a mapping.
_LONG_RUN_BYTES = 32 << 10
# Measured: from this length on, a separate read costs less than reading the gaps as well.
_LONG_READ_BYTES = 4 << 10
_SPAN_BYTES = 4 << 20  # the most that one read of a strided block spans
_MOST_OVERLAP = 1.5  # most that the spans of two halves of a block have together, as a multiple of the block's span
READ_AHEAD_BYTES, _LEAST_READ_AHEAD_BYTES = 16 << 20, 64 << 10


def windows(shape: Sequence[int], itemsize: int, window_bytes: int = WINDOW_BYTES) -> Iterator[Box]:
    """Yield boxes of at most `window_bytes` that divide a tensor into contiguous runs of its C order, in order.

    A (2, 5) tensor of 4-byte elements, in windows of 12 bytes: [0:1, 0:3], [0:1, 3:5], [1:2, 0:3], [1:2, 3:5].
    """
    nbytes = math.prod(shape) * itemsize
    if nbytes <= window_bytes:
        if nbytes:
            yield full_box(tuple(shape))
        return
    # The first dim of which one index fits into a window: a window is some of its indices, of one index of each dim
    # before it.
    dim = 0
    while dim < len(shape) - 1 and math.prod(shape[dim + 1 :]) * itemsize > window_bytes:
        dim += 1
    rest = tuple(shape[dim + 1 :])
    step = max(1, window_bytes // max(1, math.prod(rest) * itemsize))
    for prefix in itertools.product(*map(range, shape[:dim])):
        for begin in range(0, shape[dim], step):
            size = min(step, shape[dim] - begin)
            yield Box((*prefix, begin, *(0,) * len(rest)), (*(1,) * dim, size, *rest))


def slices_within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Return the index of `inner` in an array that holds `outer`."""
    local = to_local(inner, outer)
    return tuple(slice(begin, begin + size) for begin, size in zip(local.offsets, local.shape, strict=True))


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

    Each long run is one write. Short runs are written through a memory mapping. Writing to a mapping of a full disk
    raises SIGBUS, so the bytes that the box spans are reserved first, unless the whole file is `reserved` already.
    """
    itemsize = ITEMSIZE[dtype]
    run_begin = begin_of_run(box, shape)
    if run_begin is not None:
        pwrite_all(fd, data, begin + run_begin * itemsize, path)
        return
    strides = c_strides(shape)
    if _run_bytes(box.shape, strides, itemsize) < _LONG_RUN_BYTES:
        first = begin + linear_offset(box, shape) * itemsize
        span = (_reach(box.shape, strides) + 1) * itemsize
        if reserved or reserve(fd, span, path, first):
            _write_mapped(fd, first, span, strides, elements(data, dtype, box.shape), path)
            return
    for run, part in box_runs(box, strides, itemsize, data):
        pwrite_all(fd, part, begin + run * itemsize, path)


def _reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of stored elements from the first element of a strided block to the last."""
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _outer_dims(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of leading dims of a strided block that do not belong to its contiguous runs.

    One, the rows, for the columns [0:3] of a (4, 5) tensor: the shape is (4, 3) and the strides are (5, 1).
    """
    run = 1
    for dim in reversed(range(len(shape))):
        # The stride of a dim with one index is never used.
        if shape[dim] != 1 and strides[dim] != run:
            return dim + 1
        run *= shape[dim]
    return 0


def _run_bytes(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Return the size of each contiguous run of a strided block."""
    return math.prod(shape[_outer_dims(shape, strides) :]) * itemsize


def box_runs(box: Box, strides: Sequence[int], itemsize: int, data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield (first stored element, bytes) for each contiguous run of a box.

    Args:
        box: the box.
        strides: stored elements from one index to the next in each dim.
        itemsize: bytes of an element.
        data: the bytes of the box in C order.
    """
    num_outer = _outer_dims(box.shape, strides)
    run_bytes = math.prod(box.shape[num_outer:]) * itemsize
    for number, prefix in enumerate(itertools.product(*map(range, box.shape[:num_outer]))):
        first = (*map(operator.add, box.offsets, prefix), *box.offsets[num_outer:])
        yield sum(map(operator.mul, first, strides)), data[number * run_bytes : (number + 1) * run_bytes]


def _write_mapped(fd: int, first: int, span: int, strides: Sequence[int], source: Any, path: str) -> None:
    """Write an array with these `strides` (in elements) into the `span` bytes from byte `first` of a file."""
    start = first - first % mmap.ALLOCATIONGRANULARITY  # mmap begins at a page
    try:
        mapping = mmap.mmap(fd, first - start + span, offset=start)
    except OSError as error:
        raise StorageError.of(error, "map", path=path) from error
    except ValueError as error:  # Python compares the length with the file's size
        raise StorageError("another process truncated the file during writing", path=path) from error
    with mapping:
        _assign_strided(mapping, first - start, strides, source)


def _assign_strided(mapping: mmap.mmap, first: int, strides: Sequence[int], source: Any) -> None:
    """Copy an array into a mapping. A separate function, so that no view keeps the mapping from being closed."""
    import numpy as np

    byte_strides = tuple(stride * source.itemsize for stride in strides)
    np.ndarray(source.shape, source.dtype, mapping, first, byte_strides)[...] = source


def _assign(memory: memoryview, dtype: str, window: Box, part: Box, source: Any) -> None:
    """Copy the array `source` to `part` in the bytes of `window`."""
    elements(memory, dtype, window.shape)[slices_within(part, window)] = source


def _read_block(stored: ByteRange, shape: tuple[int, ...], window: Box, dtype: str, target: memoryview) -> None:
    """Fill `target` with the bytes, in C order, of `window`, which is local to a stored box of `shape`.

    A window that is one run of the file is one read. Else each long run is one read. Short runs are read together with
    the gaps between them, in parts of at most 4 MiB; so are all runs of a remote file or of a box with `orders`.
    """
    itemsize, strides = ITEMSIZE[dtype], stored.strides
    if strides is None:
        if c_contiguous(window, shape):
            stored.file.read_into(target, stored.begin + itemsize * linear_offset(window, shape))
            return
        strides = c_strides(shape)
    if not all(window.shape):
        return
    is_short = _run_bytes(window.shape, strides, itemsize) < _LONG_READ_BYTES
    if stored.orders or is_short or stored.file.is_remote:
        axes = [_Axis(_indices(stored, dim, window), stride) for dim, stride in enumerate(strides)]
        _read_axes(stored.file, stored.begin, elements(target, dtype, window.shape), axes)
        return
    for first, part in box_runs(window, strides, itemsize, target):
        stored.file.read_into(part, stored.begin + first * itemsize)


def _indices(stored: ByteRange, dim: int, window: Box) -> Any:
    """Return the indices of a window along a dim, relative to the first index of the stored box."""
    begin, end = window.offsets[dim], window.ends[dim]
    order = stored.orders[dim] if stored.orders else None
    if order is None:
        return range(begin, end)
    import numpy as np

    # Relative, as `ByteRange.begin` is where the box's first element lies, whatever its place in the order is.
    return np.asarray(order[begin:end]) - order[0]


class _Axis:
    """The indices along one dim of a block: a range of step 1, or an array in any order, such as 0, 2, 1, 3.

    `stride` is the number of elements from one index to the next.
    """

    def __init__(self, indices: Any, stride: int) -> None:
        self.indices = indices
        self.stride = stride
        if isinstance(indices, range):
            self.low, self.high = indices[0], indices[-1]
        else:
            self.low, self.high = int(indices.min()), int(indices.max())

    @property
    def reach(self) -> int:
        """Elements from the lowest index to the highest."""
        return (self.high - self.low) * self.stride

    def halves(self) -> tuple[Any, Any]:
        """Return the positions of the first and the second half of the indices.

        If the spans of these overlap widely, return the positions of the lower and of the higher half instead.
        """
        half = len(self.indices) // 2
        if not isinstance(self.indices, range):
            front, back = _Axis(self.indices[:half], self.stride), _Axis(self.indices[half:], self.stride)
            # Of interleaved indices, 0, 4, 1, 5, ..., both halves would read nearly all bytes, again and again.
            if front.reach + back.reach > self.reach * _MOST_OVERLAP:
                ascending = self.indices.argsort(kind="stable")
                return ascending[:half], ascending[half:]
        return slice(half), slice(half, None)


def _read_axes(file: StoredFile, begin: int, target: Any, axes: Sequence[_Axis]) -> None:
    """Fill an array from a block whose index 0 is at byte `begin`; divide the block while it spans more than 4 MiB."""
    reaches = [axis.reach for axis in axes]
    span = (sum(reaches) + 1) * target.itemsize
    if span > _SPAN_BYTES and any(reaches):
        # The dim that spans most: halving it halves what is read at once.
        dim = reaches.index(max(reaches))
        for positions in axes[dim].halves():
            index = (*(slice(None),) * dim, positions)
            part = target[index]
            inner = [*axes[:dim], _Axis(axes[dim].indices[positions], axes[dim].stride), *axes[dim + 1 :]]
            _read_axes(file, begin, part, inner)
            # numpy has made a copy if the positions are an array.
            if not isinstance(positions, slice):
                target[index] = part
        return
    import numpy as np

    # All bytes from the lowest indices to the highest, of which an array with the strides of the file is a view.
    data = np.empty(span, np.uint8)
    shape, byte_strides, first = [], [], 0
    for axis in axes:
        shape.append(axis.high - axis.low + 1)
        byte_strides.append(axis.stride * target.itemsize)
        first += axis.low * axis.stride
    file.read_into(data.data, begin + first * target.itemsize)
    block: Any = np.ndarray(shape, target.dtype, data, strides=byte_strides)
    for number, axis in enumerate(axes):
        if not isinstance(axis.indices, range):
            block = block.take(axis.indices - axis.low, axis=number)
    target[...] = block


def blocks(
    stored: ByteRange, shape: tuple[int, ...], dtype: str, ahead_bytes: int = READ_AHEAD_BYTES
) -> Iterator[tuple[Box, memoryview]]:
    """Yield the bytes of a stored block of `shape` in C order, part by part, each with its box within the block.

    Each memoryview is valid until the next iteration. A part has at most `WINDOW_BYTES`, or `ahead_bytes` if the block
    is strided: reading one part of it may require reading all bytes that the block spans.
    """
    itemsize = ITEMSIZE[dtype]
    window_bytes = WINDOW_BYTES if stored.strides is None else max(_LEAST_READ_AHEAD_BYTES, ahead_bytes)
    # One memory for all parts, as pages that are new take longer than the reading.
    memory = memoryview(bytearray(min(window_bytes, math.prod(shape) * itemsize)))
    spans = []
    # A box of one window is not asked for: its read follows at once.
    if stored.strides is None and stored.nbytes > window_bytes:
        spans.append(Span(stored.file, stored.begin, stored.nbytes))
    ahead = Prefetch(spans)
    for window in windows(shape, itemsize, window_bytes):
        part = memory[: window.numel * itemsize]
        _read_block(stored, shape, window, dtype, part)
        yield window, part
        ahead.advance(len(part))


class Run(NamedTuple):
    """Bytes that are contiguous in a file and in memory: where they begin in both, and how many they are."""

    in_file: int
    in_memory: int
    nbytes: int


def one_run(stored: ByteRange, box: Box, part: Box, dtype: str, target: Box) -> Run | None:
    """Return where `part` of a stored box lies, if it is one run in the file and in the memory of `target`."""
    if stored.strides is not None:
        return None
    itemsize = ITEMSIZE[dtype]
    nbytes = part.numel * itemsize
    in_file, in_memory = stored.begin, 0
    if part != box:
        begin = begin_of_run(to_local(part, box), box.shape)
        if begin is None:
            return None
        in_file += begin * itemsize
    if part != target:
        begin = begin_of_run(to_local(part, target), target.shape)
        if begin is None:
            return None
        in_memory = begin * itemsize
    return Run(in_file, in_memory, nbytes)


def read_part(
    stored: ByteRange,
    box: Box,
    part: Box,
    dtype: str,
    memory: memoryview,
    target: Box,
    digest: BoxDigest | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Copy `part` of a stored box into memory.

    Args:
        stored: the byte range of the box.
        box: the stored box.
        part: the block to copy, inside both `box` and `target`.
        dtype: the tensor's dtype.
        memory: the bytes of `target`.
        target: the box in memory.
        digest: updated with the bytes of `part` in C order.
        progress: called with the number of bytes of each window.
    """
    run = one_run(stored, box, part, dtype, target)
    # Nearly all: parameters that are read as they were saved.
    if run is not None and run.nbytes <= WINDOW_BYTES:
        data = memory[run.in_memory : run.in_memory + run.nbytes]
        stored.file.read_into(data, run.in_file)
        if digest:
            digest.update(part, data)
        if progress is not None:
            progress(run.nbytes)
        return
    itemsize = ITEMSIZE[dtype]
    in_box, in_target = to_local(part, box), to_local(part, target)
    window_bytes = WINDOW_BYTES
    # Each request to an object store takes long, and a strided window may span far more than it has: read more at once.
    if stored.strides is not None or stored.file.is_remote:
        window_bytes = READ_AHEAD_BYTES
    # Bytes that are one run in memory, too, are read where they belong; others by way of a window in its C order.
    is_run = c_contiguous(in_target, target.shape)
    bounce = memoryview(bytearray(0 if is_run else min(window_bytes, part.numel * itemsize)))
    begin = linear_offset(in_target, target.shape) * itemsize
    for window in windows(part.shape, itemsize, window_bytes):
        nbytes = window.numel * itemsize
        data = memory[begin : begin + nbytes] if is_run else bounce[:nbytes]
        _read_block(stored, box.shape, to_global(window, in_box), dtype, data)
        placed = to_global(window, part)
        if digest:
            digest.update(placed, data)
        if not is_run:
            _assign(memory, dtype, target, placed, elements(data, dtype, window.shape))
        if progress is not None:
            progress(nbytes)
        begin += nbytes


def in_turns(parts: Sequence[tuple[Box, Span]], whole: Box) -> list[Span]:
    """Return where the boxes that make up `whole` lie, in the order in which its windows read them.

    A window has a part of each box that is cut in columns. Of these the first mebibytes come before the second ones.
    """
    if all(c_contiguous(to_local(box, whole), whole.shape) for box, _ in parts):
        return [span for _, span in parts]
    pieces = []
    for box, (file, begin, nbytes) in parts:
        local = to_local(box, whole)
        first = linear_offset(local, whole.shape)
        reach = _reach(box.shape, c_strides(whole.shape))
        # By where it is in the whole, as if the bytes of a box were spread evenly over the rows that it reaches.
        for at in range(0, nbytes, PREFETCH_STEP_BYTES):
            span = Span(file, begin + at, min(PREFETCH_STEP_BYTES, nbytes - at))
            pieces.append((first + reach * at // nbytes, span))
    return [span for _, span in sorted(pieces, key=operator.itemgetter(0))]


def to_global(inner: Box, outer: Box) -> Box:
    """Convert a block from coordinates local to `outer` to the tensor's."""
    return Box(tuple(map(operator.add, inner.offsets, outer.offsets)), inner.shape)


def to_local(inner: Box, outer: Box) -> Box:
    """Convert a block from the tensor's coordinates to those local to `outer`."""
    return Box(tuple(map(operator.sub, inner.offsets, outer.offsets)), inner.shape)


class BoxDigest:
    """Computes the digests of a stored box and of its parts while its bytes are read in C order.

    Args:
        stored: the byte range with the known digests.
        box: the stored box.
        dtype: its dtype.
        region: the block that will be read; None for the whole box. A box or part is digested only if
            `region` contains all of it.
        always: digest the whole box even if its digest is not known, for `hexdigest`.
    """

    def __init__(
        self, stored: ByteRange, box: Box, dtype: str, *, region: Box | None = None, always: bool = False
    ) -> None:
        whole = always or (stored.digest is not None and region in (None, box))
        self._stored = stored
        self._dtype = dtype
        self._hasher = xxhash.xxh3_128() if whole else None
        self._parts: list[tuple[Box, str, xxhash.xxh3_128]] = []
        # A heap of parts by the next element that each needs: a window then visits only the parts that it reaches.
        self._waiting: list[tuple[tuple[int, ...], int]] = []
        parts = stored.parts if region is None else stored.parts.within(region)
        for number, (part, expected) in enumerate(parts):
            self._parts.append((part, expected, xxhash.xxh3_128()))
            if part.numel:
                self._waiting.append((part.offsets, number))
        heapq.heapify(self._waiting)

    def __bool__(self) -> bool:
        return self._hasher is not None or bool(self._parts)

    def update(self, window: Box, data: memoryview) -> None:
        """Add the bytes of the next window, which is in the tensor's coordinates."""
        if self._hasher is not None:
            self._hasher.update(data)
        if not self._waiting:
            return
        # Tuples compare as C order does, and a window is a run of it: nothing beyond its last element is in it.
        last = tuple(end - 1 for end in window.ends)
        while self._waiting and self._waiting[0][0] <= last:
            number = self._waiting[0][1]
            part, _, hasher = self._parts[number]
            shared = intersect(part, window)
            if shared is not None:
                self._update_part(hasher, shared, window, data)
            # Its next element in a later window, which may be the next row of a part that is cut in columns.
            next_element = _element_after(last, part)
            if next_element is None:
                heapq.heappop(self._waiting)
            else:
                heapq.heapreplace(self._waiting, (next_element, number))

    def _update_part(self, hasher: xxhash.xxh3_128, shared: Box, window: Box, data: memoryview) -> None:
        inside = to_local(shared, window)
        if c_contiguous(inside, window.shape):
            itemsize = ITEMSIZE[self._dtype]
            first = linear_offset(inside, window.shape) * itemsize
            hasher.update(data[first : first + shared.numel * itemsize])
        else:
            hasher.update(elements(data, self._dtype, window.shape)[slices_within(shared, window)].tobytes())

    def hexdigest(self) -> str:
        """Return the digest of all bytes."""
        assert self._hasher is not None
        return str(self._hasher.hexdigest())

    def problems(self, name: str, rank: int | None = None) -> list[CorruptError]:
        """Return an error for each known digest that differs from the bytes; `name` and `rank` are for the messages.

        Raises:
            ReplacedError: the file has changed since it was opened.
        """
        digests: list[tuple[str, str | None, xxhash.xxh3_128]] = []
        if self._hasher is not None:
            digests.append(("", self._stored.digest, self._hasher))
        for part, digest, hasher in self._parts:
            digests.append((f" in region {part}", digest, hasher))
        errors = []
        for where, expected, hasher in digests:
            actual = hasher.hexdigest()
            if expected in (None, actual):
                continue
            self._stored.file.check_unchanged()  # a file that was changed while it was read is not corrupt
            text, path = f"bytes differ from their digest{where}", self._stored.path
            errors.append(CorruptError(text, name=name, rank=rank, path=path, expected=expected, found=actual))
        return errors

    def check(self, name: str, rank: int | None = None) -> None:
        """Raise the first of `problems`."""
        for problem in self.problems(name, rank):
            raise problem


def _element_after(at: tuple[int, ...], box: Box) -> tuple[int, ...] | None:
    """Return the first element of a box after `at` in the tensor's C order; None if there is none.

    Of ``[0:2, 1:3]``, after (0, 0) it is (0, 1), after (0, 2) it is (1, 1), and after (1, 2) there is none.
    """
    ends = box.ends
    num_inside = 0
    while num_inside < len(at) and box.offsets[num_inside] <= at[num_inside] < ends[num_inside]:
        num_inside += 1
    # Before the box in the first dim in which `at` is not in it: then it is the box's first one from this dim on.
    if num_inside < len(at) and at[num_inside] < box.offsets[num_inside]:
        return (*at[:num_inside], *box.offsets[num_inside:])
    # Else a slower dim must go on by one.
    for dim in reversed(range(num_inside)):
        if at[dim] + 1 < ends[dim]:
            return (*at[:dim], at[dim] + 1, *box.offsets[dim + 1 :])
    return None


class BoxReader:
    """Reads a box's bytes from a file, forward and window by window, and digests them.

    `ahead_bytes` is that of `blocks`. With `always_digest` all bytes are digested, for `hexdigest`; else only those
    whose digest is known.
    """

    def __init__(
        self,
        stored: ByteRange,
        box: Box,
        dtype: str,
        ahead_bytes: int = READ_AHEAD_BYTES,
        *,
        always_digest: bool = True,
    ) -> None:
        self.box = box
        self.digest = BoxDigest(stored, box, dtype, always=always_digest)
        self.bytes_left = box.numel * ITEMSIZE[dtype]
        self._file = stored.file
        self._at = stored.begin
        self._dtype = dtype
        self._ahead = memoryview(b"")
        self._strided = None
        if stored.strides is not None:
            self._strided = blocks(stored, box.shape, dtype, ahead_bytes)

    def hexdigest(self) -> str:
        """Return the digest of all bytes read."""
        return self.digest.hexdigest()

    def copy_into(self, buffer: memoryview, window: Box, bounce: memoryview) -> None:
        """Copy this box's part of `window` into `buffer`, the window's bytes.

        Windows must come in C order. `bounce` is scratch memory, as large as the window.
        """
        part = intersect(self.box, window)
        if part is None:
            return
        if part == window:  # nearly always: a window that lies in this box alone
            self._read(buffer, part)
            return
        itemsize = ITEMSIZE[self._dtype]
        nbytes = part.numel * itemsize
        inside = to_local(part, window)
        if c_contiguous(inside, window.shape):
            begin = linear_offset(inside, window.shape) * itemsize
            self._read(buffer[begin : begin + nbytes], part)
        else:
            self._read(bounce[:nbytes], part)
            _assign(buffer, self._dtype, window, part, elements(bounce[:nbytes], self._dtype, part.shape))

    def _read(self, target: memoryview, part: Box) -> None:
        """Read and digest the next bytes of the box, which are those of `part`."""
        self.bytes_left -= len(target)
        if self._strided is None:
            self._file.read_into(target, self._at)
            self._at += len(target)
        else:
            self._read_strided(target)
        self.digest.update(part, target)

    def _read_strided(self, target: memoryview) -> None:
        assert self._strided is not None
        while target:
            if not self._ahead:
                _, self._ahead = next(self._strided)
            nbytes = min(len(target), len(self._ahead))
            target[:nbytes] = self._ahead[:nbytes]
            target, self._ahead = target[nbytes:], self._ahead[nbytes:]
        if not self._ahead and not self.bytes_left:
            self._strided = None  # frees its memory
