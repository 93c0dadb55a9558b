"""Patches: which elements of an input tensor fill which box of an output tensor.

A patch is a box of the output and an affine map to the input: along each dim of the output the input's index grows by a
constant step in one of its dims. Every operation of a conversion divides and moves patches, so patches are exact for
any chain of operations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from statexchange.sharding.shards import Box, c_strides, intersect

__all__ = ["Block", "Dim", "Patch", "concatenated", "identity", "permuted", "shared_block", "sliced", "transposed"]


@dataclass(frozen=True, slots=True)
class Dim:
    """The input's dim along which an output's dim runs, and the step in it; None where the output's size is 1."""

    dim: int | None
    step: int = 1


@dataclass(frozen=True, slots=True)
class Patch:
    """A box of an output and the elements of an input that fill it.

    Attributes:
        source: number of the input; None if the box is filled with zeros.
        box: the box in the output.
        begin: index in the input of the box's first element.
        dims: for each dim of the output, how the input's index grows with it.
    """

    source: int | None
    box: Box
    begin: tuple[int, ...]
    dims: tuple[Dim, ...]

    @property
    def input_box(self) -> Box:
        """The smallest box of the input with all elements of the patch."""
        sizes = [1] * len(self.begin)
        for size, dim in zip(self.box.shape, self.dims, strict=True):
            if dim.dim is not None:
                sizes[dim.dim] = (size - 1) * dim.step + 1
        return Box(self.begin, tuple(sizes))

    @property
    def is_identity(self) -> bool:
        """Whether each dim of the output runs along the same dim of the input, with step 1."""
        return self.dims == tuple(Dim(dim) for dim in range(len(self.begin)))

    def cut(self, dim: int, begin: int, count: int, step: int, at: int) -> Patch | None:
        """Return the part with the output's indices `begin`, `begin + step`, ... along `dim`, moved to `at`, `at + 1`.

        None if the patch has none of these `count` indices.
        """
        low, size = self.box.offsets[dim], self.box.shape[dim]
        first = max(0, -((begin - low) // step))  # ceil((low - begin) / step)
        last = min(count - 1, (low + size - 1 - begin) // step)
        if first > last:
            return None
        offsets, shape = list(self.box.offsets), list(self.box.shape)
        offsets[dim], shape[dim] = at + first, last - first + 1
        begins, dims = list(self.begin), list(self.dims)
        along = dims[dim]
        if along.dim is not None:
            begins[along.dim] += (begin + first * step - low) * along.step
            dims[dim] = Dim(along.dim, along.step * step)
        return Patch(self.source, Box(tuple(offsets), tuple(shape)), tuple(begins), tuple(dims))


def identity(shape: Sequence[int], source: int | None = 0) -> tuple[Patch, ...]:
    """Return the patch of a tensor that is the input `source` itself, or zeros; none for an empty tensor."""
    if not math.prod(shape):
        return ()
    box = Box((0,) * len(shape), tuple(shape))
    if source is None:
        return (Patch(None, box, (), (Dim(None),) * len(shape)),)
    return (Patch(source, box, box.offsets, tuple(map(Dim, range(len(shape))))),)


def sliced(
    patches: Iterable[Patch], dim: int, begin: int, count: int, *, step: int = 1, at: int = 0
) -> tuple[Patch, ...]:
    """Return the patches of the indices `begin`, `begin + step`, ... along `dim`, moved to `at`, `at + 1`, ..."""
    found = []
    for patch in patches:
        part = patch.cut(dim, begin, count, step, at)
        if part is not None:
            found.append(part)
    return tuple(found)


def concatenated(parts: Iterable[tuple[Iterable[Patch], int]], dim: int) -> tuple[Patch, ...]:
    """Return the patches of tensors, given with their sizes along `dim`, one after another along it."""
    found: list[Patch] = []
    at = 0
    for patches, size in parts:
        found += sliced(patches, dim, 0, size, at=at)
        at += size
    return tuple(found)


def transposed(patches: Iterable[Patch], order: Sequence[int]) -> tuple[Patch, ...]:
    """Return the patches with the dims in another order; dim d of the result is dim ``order[d]``."""
    found = []
    for patch in patches:
        offsets = tuple(patch.box.offsets[dim] for dim in order)
        shape = tuple(patch.box.shape[dim] for dim in order)
        found.append(replace(patch, box=Box(offsets, shape), dims=tuple(patch.dims[dim] for dim in order)))
    return tuple(found)


def permuted(patches: Iterable[Patch], dim: int, factors: Sequence[int], order: Sequence[int]) -> tuple[Patch, ...]:
    """View a dim as dims of the sizes `factors`, put these in another order and join them; return the patches."""
    patches = tuple(patches)
    steps = c_strides(factors)
    *outer, last = order
    run, step = factors[last], steps[last]
    found: list[Patch] = []
    at = 0
    for index in product(*(range(factors[factor]) for factor in outer)):
        begin = sum(number * steps[factor] for number, factor in zip(index, outer, strict=True))
        found += sliced(patches, dim, begin, run, step=step, at=at)
        at += run
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Block:
    """The part of a patch that lies in one box of the input.

    Attributes:
        box: the box in the output.
        begin: index of its first element, relative to the box of the input.
        dims: for each dim of the output, how this index grows with it.
    """

    box: Box
    begin: tuple[int, ...]
    dims: tuple[Dim, ...]

    def strides(self, stored: Sequence[int]) -> tuple[int, ...]:
        """Return the strides of the output's dims, where the input's box has the strides `stored`."""
        return tuple(0 if dim.dim is None else dim.step * stored[dim.dim] for dim in self.dims)

    def is_run(self, strides: Sequence[int]) -> bool:
        """Whether elements with these strides lie in the C order of the box, one after another."""
        pairs = zip(self.box.shape, strides, c_strides(self.box.shape), strict=True)
        return all(size == 1 or stride == dense for size, stride, dense in pairs)

    def offset(self, stored: Sequence[int]) -> int:
        """Return the position of the first element, where the input's box has the strides `stored`."""
        return sum(index * stride for index, stride in zip(self.begin, stored, strict=True))


def shared_block(patch: Patch, box: Box) -> Block | None:
    """Return the part of a patch whose elements lie in `box` of the input; None if there is none."""
    if not patch.box.numel:
        return None
    if not patch.begin:  # the input has no dims
        return Block(patch.box, (), patch.dims) if patch.source is not None else None
    if intersect(patch.input_box, box) is None:
        return None
    part: Patch | None = patch
    for dim, along in enumerate(patch.dims):
        if along.dim is None or part is None:
            continue
        low, high = box.offsets[along.dim], box.offsets[along.dim] + box.shape[along.dim]
        # The numbers k of the patch's elements along this dim with low <= begin + k * step < high.
        first = max(0, -((patch.begin[along.dim] - low) // along.step))
        count = min(patch.box.shape[dim], -((patch.begin[along.dim] - high) // along.step)) - first
        at = patch.box.offsets[dim] + first
        part = part.cut(dim, at, count, 1, at) if count > 0 else None
    if part is None:
        return None
    begin = tuple(index - low for index, low in zip(part.begin, box.offsets, strict=True))
    return Block(part.box, begin, part.dims)
