"""Patches: which elements of an input tensor fill which box of an output tensor.

A patch is a box of the output and a map to the input: along each dim of the output, the input's index in one of its
dims. Mostly this is a range; after a permutation it is a list. Every operation of a conversion divides and moves
patches, so patches are exact for any chain of operations. The part of a patch that lies in one stored box of the input
is a patch, too, of that box.

Example:
    >>> (patch,) = permuted(identity((4, 3)), 0, factors=(2, 2), order=(1, 0))  # rows 0 1 | 2 3 become 0 2 | 1 3
    >>> str(patch.box), patch.dims[0]
    ('[0:4, 0:3]', Dim(dim=0, indices=array('q', [0, 2, 1, 3])))
    >>> for part in patch.within(Box((0, 0), (2, 3))):  # a file has rows 0 and 1: what do they fill?
    ...     print(part.box, list(part.dims[0].indices))
    [0:1, 0:3] [0]
    [2:3, 0:3] [1]
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from statexchange.sharding.shards import Box, full_box, intersect

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# An array takes 8 bytes an index and compares by its values. The step of a range is positive.
Indices: TypeAlias = "range | array[int]"


@dataclass(frozen=True, slots=True)
class Dim:
    """The input's dim along which an output's dim runs; None where it runs along none, as in zeros.

    `indices` are those in the input for the indices of the box, relative to the patch's `begin`.
    """

    dim: int | None
    indices: Indices = range(0)


@dataclass(frozen=True, slots=True)
class Patch:
    """A box of an output and the elements of an input that fill it.

    Indices are relative to `begin`, so that all layers of a stacked tensor share the list of a permutation.

    Attributes:
        source: number of the input; None if the box is filled with zeros.
        box: the box in the output.
        begin: index in the input to which the indices along the dims are added.
        dims: for each dim of the output, where it runs in the input.
    """

    source: int | None
    box: Box
    begin: tuple[int, ...]
    dims: tuple[Dim, ...]

    @property
    def input_box(self) -> Box:
        """The smallest box of the input with all elements of the patch."""
        begin, sizes = list(self.begin), [1] * len(self.begin)
        for along in self.dims:
            if along.dim is not None:
                low, high = _bounds(along.indices)
                begin[along.dim] += low
                sizes[along.dim] = high - low + 1
        return Box(tuple(begin), tuple(sizes))

    @property
    def is_identity(self) -> bool:
        """Whether each dim of the output runs along the same dim of the input, with step 1."""
        if len(self.dims) != len(self.begin):
            return False
        for dim, along in enumerate(self.dims):
            if along.dim != dim or not isinstance(along.indices, range) or along.indices.step != 1:
                return False
        return True

    @property
    def orders(self) -> tuple[array[int] | None, ...]:
        """For each dim of the output, the indices in the input if they are no range; () if all are ranges."""
        orders: list[array[int] | None] = []
        for along in self.dims:
            orders.append(None if isinstance(along.indices, range) else along.indices)
        return tuple(orders) if any(orders) else ()

    def strides(self, stored: Sequence[int]) -> tuple[int, ...]:
        """Return the strides of the output's dims, where the input has the strides `stored`.

        For a dim that has an order, it is the stride between neighbouring indices of the input.
        """
        strides = []
        for along in self.dims:
            stride = 0
            if along.dim is not None:
                stride = stored[along.dim]
            if isinstance(along.indices, range):
                stride *= along.indices.step
            strides.append(stride)
        return tuple(strides)

    def offset(self, stored: Sequence[int]) -> int:
        """Return the position of the first element, where the input has the strides `stored`."""
        offset = 0
        for index, stride in zip(self.begin, stored, strict=True):
            offset += index * stride
        for along in self.dims:
            if along.dim is not None:
                offset += along.indices[0] * stored[along.dim]
        return offset

    def with_dim(self, dim: int, at: int, count: int, indices: Indices) -> Patch:
        """Return a patch with `count` indices along `dim`, from `at` on in the output, and `indices` in the input."""
        offsets, shape, dims = list(self.box.offsets), list(self.box.shape), list(self.dims)
        offsets[dim], shape[dim], dims[dim] = at, count, Dim(dims[dim].dim, indices)
        return Patch(self.source, Box(tuple(offsets), tuple(shape)), self.begin, tuple(dims))

    def cut(self, dim: int, first: int, count: int, at: int) -> Patch:
        """Return the part with `count` indices along `dim` from the patch's own `first` on, moved to `at`."""
        return self.with_dim(dim, at, count, self.dims[dim].indices[first : first + count])

    def within(self, box: Box) -> list[Patch]:
        """Return the parts whose elements lie in `box` of the input, as patches of that box."""
        # Most boxes of a file have nothing of a patch: a comparison of boxes spares them the work of each dim.
        if not self.box.numel or intersect(self.input_box, box) is None:
            return []
        # From here on indices are those of the box; `begin` is negative where the patch starts before it.
        begin = tuple(index - low for index, low in zip(self.begin, box.offsets, strict=True))
        parts = [replace(self, begin=begin)]
        for dim, along in enumerate(self.dims):
            if along.dim is None:
                continue
            low = -begin[along.dim]
            runs = _runs_within(along.indices, low, low + box.shape[along.dim])
            # All of the dim lies in the box, as along most dims: nothing is cut.
            if runs == [(0, len(along.indices))]:
                continue
            at = self.box.offsets[dim]
            divided = []
            for part in parts:
                # The parts of several dims are those of a grid: each part so far is cut by each run.
                divided += [part.cut(dim, first, count, at + first) for first, count in runs]
            parts = divided
        return parts

    def permuted(self, dim: int, chosen: NDArray[np.int64]) -> Iterator[Patch]:
        """Yield the parts in an output whose indices along `dim` are the indices `chosen` of the patch's output."""
        low, along = self.box.offsets[dim], self.dims[dim]
        for first, count in _runs_within(chosen, low, low + self.box.shape[dim]):
            indices = along.indices
            if along.dim is not None:
                indices = _indices_at(indices, chosen[first : first + count] - low)
            yield self.with_dim(dim, first, count, indices)

    def ranges(self) -> list[Patch]:
        """Return the patch divided into patches in which all dims run along ranges: each is a view of the input."""
        patches = [self]
        for dim, along in enumerate(self.dims):
            if isinstance(along.indices, range):
                continue
            at = self.box.offsets[dim]
            divided = []
            for first, run in _ranges(along.indices):
                divided += [patch.with_dim(dim, at + first, len(run), run) for patch in patches]
            patches = divided
        return patches


def _bounds(indices: Indices) -> tuple[int, int]:
    """Return the least and the greatest index."""
    if isinstance(indices, range):  # min() would go through all of it
        return indices[0], indices[-1]
    return min(indices), max(indices)


def _runs_within(indices: Indices | NDArray[np.int64], low: int, high: int) -> list[tuple[int, int]]:
    """Return (first, count) of each run of successive positions at which low <= index < high."""
    if isinstance(indices, range):
        first = max(0, -((indices.start - low) // indices.step))  # ceil((low - start) / step)
        count = min(len(indices), -((indices.start - high) // indices.step)) - first
        return [(first, count)] if count > 0 else []
    import numpy as np  # most conversions only rename, and their commands start faster without it

    values = np.asarray(indices)
    # Edges are where a run begins or ends in turn: [F T T F T] gives 1 3 4 5, and the runs (1, 2) and (4, 1).
    inside = (values >= low) & (values < high)
    edges = np.flatnonzero(np.diff(inside, prepend=False, append=False)).tolist()
    return [(first, end - first) for first, end in zip(edges[::2], edges[1::2], strict=True)]


def _indices_at(indices: Indices, positions: NDArray[np.int64]) -> Indices:
    """Return the indices at some positions, at least one: as a range if they are one.

    A range is a view of what is stored, and is read without a copy of its elements in another order.
    """
    import numpy as np

    # Of a range by arithmetic: numpy would make an array of all of it.
    values = np.asarray(indices)[positions] if isinstance(indices, array) else indices.start + positions * indices.step
    first, last = int(values[0]), int(values[-1])
    step = 1
    if len(values) > 1:
        step = int(values[1]) - first
    if step > 0 and (np.diff(values) == step).all():
        return range(first, last + 1, step)
    return array("q", values.astype(np.int64).tobytes())


def _ranges(indices: Sequence[int]) -> list[tuple[int, range]]:
    """Divide indices into ranges, each with the position of its first index.

    Example:
        >>> _ranges([0, 2, 4, 1, 3, 5])
        [(0, range(0, 5, 2)), (3, range(1, 6, 2))]
    """
    result = []
    at = 0
    while at < len(indices):
        end = at + 1
        # A step of 0 or less ends the range at once: that of a `Dim` is positive.
        step = 0
        if end < len(indices):
            step = indices[end] - indices[at]
        while step > 0 and end < len(indices) and indices[end] - indices[end - 1] == step:
            end += 1
        result.append((at, range(indices[at], indices[end - 1] + 1, max(1, step))))
        at = end
    return result


def identity(shape: Sequence[int], source: int | None = 0) -> tuple[Patch, ...]:
    """Return the patch of a tensor that is the input `source` itself, or zeros; none for an empty tensor."""
    if not math.prod(shape):
        return ()
    box = full_box(tuple(shape))
    if source is None:
        return (Patch(None, box, (), (Dim(None),) * len(shape)),)
    dims = []
    for dim, size in enumerate(shape):
        dims.append(Dim(dim, range(size)))
    return (Patch(source, box, box.offsets, tuple(dims)),)


def sliced(patches: Iterable[Patch], dim: int, begin: int, count: int, *, at: int = 0) -> tuple[Patch, ...]:
    """Return the patches of `count` indices along `dim` from `begin` on, moved to `at`.

    Example:
        >>> (patch,) = sliced(identity((6, 2)), 0, 3, 2)  # rows 3 and 4 of 6
        >>> str(patch.box), patch.dims[0].indices
        ('[0:2, 0:2]', range(3, 5))
    """
    result = []
    for patch in patches:
        low = patch.box.offsets[dim]
        first, end = max(begin, low), min(begin + count, low + patch.box.shape[dim])
        if first < end:
            result.append(patch.cut(dim, first - low, end - first, at + first - begin))
    return tuple(result)


def concatenated(parts: Iterable[tuple[Iterable[Patch], int]], dim: int) -> tuple[Patch, ...]:
    """Return the patches of tensors, given with their sizes along `dim`, one after another along it."""
    result: list[Patch] = []
    at = 0
    for patches, size in parts:
        result += sliced(patches, dim, 0, size, at=at)
        at += size
    return tuple(result)


def transposed(patches: Iterable[Patch], order: Sequence[int]) -> tuple[Patch, ...]:
    """Return the patches with the dims in another order; dim d of the result is dim ``order[d]``."""
    result = []
    for patch in patches:
        offsets, shape, dims = [], [], []
        for dim in order:
            offsets.append(patch.box.offsets[dim])
            shape.append(patch.box.shape[dim])
            dims.append(patch.dims[dim])
        # Only the output's dims change places. Each still knows its dim of the input.
        result.append(replace(patch, box=Box(tuple(offsets), tuple(shape)), dims=tuple(dims)))
    return tuple(result)


def permuted(patches: Iterable[Patch], dim: int, factors: Sequence[int], order: Sequence[int]) -> tuple[Patch, ...]:
    """View a dim as dims of the sizes `factors`, put these in another order and join them; return the patches."""
    patches = tuple(patches)
    if not patches or list(order) == sorted(order):
        return patches
    import numpy as np

    # numpy permutes the numbers of the dim's indices as the tensor's elements would be.
    chosen = np.arange(math.prod(factors), dtype=np.int64).reshape(factors).transpose(order).reshape(-1)
    parts: list[Patch] = []
    for patch in patches:
        parts += patch.permuted(dim, chosen)
    return tuple(parts)
