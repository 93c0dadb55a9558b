"""Boxes and shards: how every package describes parts of tensors."""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from statexchange.errors import excerpt
from statexchange.tensors import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

_T = TypeVar("_T")

MAX_DIMS = 64  # as numpy 2 has it
_FEW_BOXES = 16  # the most of one tensor for which the check that they lie inside is cached
# Of a dim or an offset in a file: begins, ends and their bytes, added up, then stay far below the 2**63 of an int64.
MAX_SIZE = 1 << 48


class Box(NamedTuple):
    """A block of a tensor: it covers ``offsets[d] <= index[d] < offsets[d] + shape[d]`` in every dim d.

    ``Box((2, 0), (2, 4))``, which messages show as ``[2:4, 0:4]``, is the rows 2 and 3 of a tensor with 4 columns.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def ends(self) -> tuple[int, ...]:
        """The exclusive end in every dim."""
        return tuple(map(operator.add, self.offsets, self.shape))

    def __str__(self) -> str:
        return region_text(self.offsets, self.ends)

    def to_json(self) -> list[list[int]]:
        """Return ``[offsets, shape]``."""
        return [list(self.offsets), list(self.shape)]

    @classmethod
    def from_json(cls, raw: object) -> Box:
        """Return the box that `to_json` encoded; raise ValueError for anything else."""
        if isinstance(raw, list | tuple) and len(raw) == 2:
            offsets, shape = raw
            are_lists = isinstance(offsets, list | tuple) and isinstance(shape, list | tuple)
            if are_lists and len(offsets) == len(shape) <= MAX_DIMS:
                # One loop over both, without a call: plans have millions of boxes.
                for size in (*offsets, *shape):
                    if type(size) is not int or not 0 <= size <= MAX_SIZE:
                        break
                else:
                    return cls(tuple(offsets), tuple(shape))
        raise ValueError(f"not a box: {excerpt(raw)}")


class Piece(NamedTuple):
    """One box of an output tensor, supplied by box `box_index` of the shard of `holder`.

    `replicas` are (holder, box_index) of the other copies of the box.
    """

    box: Box
    holder: int
    box_index: int
    replicas: tuple[tuple[int, int], ...] = ()


def sizes_from_json(raw: object) -> tuple[int, ...]:
    """Return a shape or offsets, a list of integers from 0 to 2**48; raise ValueError for anything else."""
    if isinstance(raw, list | tuple) and len(raw) <= MAX_DIMS:
        # A generator expression would take twice as long.
        for size in raw:
            if type(size) is not int or not 0 <= size <= MAX_SIZE:
                break
        else:
            return tuple(raw)
    raise ValueError(f"not a list of sizes: {excerpt(raw)}")


def shape_from_json(raw: object) -> tuple[int, ...]:
    """Return the shape of a whole tensor; raise ValueError for 2**63 elements or more, not counting empty dims."""
    shape = sizes_from_json(raw)
    numel_of(shape)
    return shape


@functools.lru_cache(1024)  # a model has many tensors of few shapes
def numel_of(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a whole tensor; raise ValueError as `shape_from_json` does."""
    numel = 1
    for size in shape:
        # Strides count an empty dim as one element, and torch computes them in 64 bits.
        numel *= size or 1
    if numel >= 1 << 63:
        raise ValueError(f"no tensor has a shape of {len(shape)} dims that is so large")
    if len(shape) > MAX_DIMS or min(shape, default=0) < 0 or max(shape, default=0) > MAX_SIZE:
        raise ValueError(f"not a list of sizes: {excerpt(shape)}")
    return 0 if 0 in shape else numel


def c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a tensor of `shape` in C order: (12, 4, 1) for (2, 3, 4)."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def linear_offset(box: Box, shape: Sequence[int]) -> int:
    """Return the position of a box's first element in the C order of a tensor of `shape`.

    Of a box that begins at (2, 1), in a tensor of shape (4, 3), it is 7.
    """
    position = 0
    for offset, size in zip(box.offsets, shape, strict=True):
        position = position * size + offset
    return position


def index_at(position: int, box: Box) -> tuple[int, ...]:
    """Return the index, in the tensor, of the element at a position in the C order of a box.

    Position 4 of the box ``[2:4, 1:4]`` is its second row's second element, (3, 2).
    """
    index = []
    for size, offset in zip(reversed(box.shape), reversed(box.offsets), strict=True):
        position, local = divmod(position, size)
        index.append(offset + local)
    return tuple(reversed(index))


def c_contiguous(box: Box, shape: Sequence[int]) -> bool:
    """Whether a box is one run of the C order of a tensor of `shape`."""
    is_cut = False
    for size, whole in zip(reversed(box.shape), reversed(shape), strict=True):
        # In front of a dim that is cut, a second index would begin after a gap.
        if is_cut and size != 1:
            return False
        is_cut = is_cut or size != whole
    return True


@functools.lru_cache(1024)
def begin_of_run(box: Box, shape: tuple[int, ...]) -> int | None:
    """Return the `linear_offset` of a box if it is one run of the C order of a tensor of `shape`; None if not.

    Example:
        >>> begin_of_run(Box((1, 0), (2, 3)), (4, 3)), begin_of_run(Box((0, 1), (4, 2)), (4, 3))
        (3, None)
    """
    return linear_offset(box, shape) if c_contiguous(box, shape) else None


@functools.lru_cache(1024)
def full_box(shape: tuple[int, ...]) -> Box:
    """Return the box that covers a whole tensor of `shape`."""
    return Box((0,) * len(shape), tuple(shape))  # a torch.Size is equal to the tuple, and found for it


def selected_box(shape: Sequence[int], index: Sequence[int | slice]) -> Box:
    """Return the block that integers and slices of step 1 select, as numpy has it; an integer selects one index.

    Raises:
        IndexError: there are more of them than dims, or an integer is outside of its dim.
    """
    if len(index) > len(shape):
        raise IndexError(f"{len(index)} indices for {len(shape)} dims")
    offsets, sizes = [0] * len(shape), list(shape)
    for dim, key in enumerate(index):
        # A range refuses and counts from the end as a list does, so that no index needs a rule of its own here.
        selected = range(shape[dim])[key]
        if isinstance(selected, int):
            offsets[dim], sizes[dim] = selected, 1
        else:
            offsets[dim], sizes[dim] = selected.start, len(selected)
    return Box(tuple(offsets), tuple(sizes))


def is_inside(box: Box, shape: Sequence[int]) -> bool:
    """Whether a box lies in a tensor of `shape`, and has as many dims."""
    if len(box.shape) != len(shape):
        return False
    for begin, length, size in zip(box.offsets, box.shape, shape, strict=True):
        if begin < 0 or length < 0 or begin + length > size:
            return False
    return True


def intersect(box: Box, other: Box) -> Box | None:
    """Return the block that two boxes share; None if they share no element."""
    # Parts of a tensor are often equal or the whole: then nothing is computed.
    if box == other:
        return None if 0 in box.shape else box
    offsets, shape = [], []
    for low, size, other_low, other_size in zip(box.offsets, box.shape, other.offsets, other.shape, strict=True):
        begin, end = max(low, other_low), min(low + size, other_low + other_size)
        if begin >= end:
            return None
        offsets.append(begin)
        shape.append(end - begin)
    return Box(tuple(offsets), tuple(shape))


def boxes_of_runs(runs: Sequence[Sequence[tuple[int, int]]]) -> tuple[Box, ...]:
    """Return the boxes of all combinations of one run of each dim; a run is its begin and its size.

    ``[[(0, 2), (4, 2)], [(0, 3)]]`` are the boxes ``[0:2, 0:3]`` and ``[4:6, 0:3]``.
    """
    boxes = []
    for chosen in product(*runs):
        offsets, shape = [], []
        for begin, size in chosen:
            offsets.append(begin)
            shape.append(size)
        boxes.append(Box(tuple(offsets), tuple(shape)))
    return tuple(boxes)


def region_text(offsets: Sequence[int], ends: Sequence[int]) -> str:
    """Return a region as an index expression: ``[0:4, 8:16]``; ``[]`` for a 0-d tensor."""
    return "[" + ", ".join(f"{begin}:{end}" for begin, end in zip(offsets, ends, strict=True)) + "]"


@functools.lru_cache(1024)
def _box_outside(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> Box | None:
    """Return the first box that lies outside of a tensor of `shape`; raise ValueError for sizes of no tensor."""
    numel_of(shape)
    whole = full_box(shape)
    for box in boxes:
        # Most shards of replicated models are whole tensors.
        if box != whole and not is_inside(box, shape):
            return box
    return None


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The dtype and shape of a whole tensor."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a tensor of `global_shape`: a list of boxes, most often one.

    Raises:
        ValueError: a box lies outside of `global_shape`, or the dtype is unknown.
    """

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, str) or self.dtype not in ITEMSIZE:
            raise ValueError(f"unknown dtype {excerpt(self.dtype)}")
        # Long lists of boxes are seldom equal, and would be kept.
        check = _box_outside if len(self.boxes) <= _FEW_BOXES else _box_outside.__wrapped__
        outside = check(self.global_shape, self.boxes)
        if outside is not None:
            raise ValueError(f"box {outside} lies outside {self.name!r} of shape {self.global_shape}")

    @property
    def is_whole(self) -> bool:
        """Whether this is the whole tensor, as one box."""
        return self.boxes == (full_box(self.global_shape),)

    @property
    def nbytes(self) -> int:
        """The bytes of all boxes."""
        numel = 0
        for box in self.boxes:
            numel += math.prod(box.shape)
        return numel * ITEMSIZE[self.dtype]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the stored bytes: that of the box, or one dim for several boxes, which lie one after another."""
        if len(self.boxes) == 1:
            return self.boxes[0].shape
        return (sum(box.numel for box in self.boxes),)


class LongTuple(tuple[_T, ...]):
    """A tuple that is hashed by its length alone: the argument of a function that keeps its last few results.

    A job saves the same tensors each time. `functools.lru_cache` then finds what was made of 50,000 shards for the last
    save: that they are the same objects takes it 10 ns each, where hashing each would take as long as making it anew.
    Neither a result may be changed, nor may a live tensor be in it, as it is kept until other calls come.

    Example:
        >>> num_elements = functools.lru_cache(4)(lambda shapes: sum(map(math.prod, shapes)))
        >>> num_elements(LongTuple([(2, 3), (4,)])), num_elements(LongTuple([(2, 3), (4,)]))
        (10, 10)
        >>> num_elements.cache_info().hits
        1
    """

    __slots__ = ()

    def __hash__(self) -> int:
        return len(self)


def boxes_of_run(shape: tuple[int, ...], begin: int, end: int) -> tuple[Box, ...]:
    """Return the boxes of the elements from `begin` to before `end` of a flattened tensor of `shape`.

    DeepSpeed's ZeRO, FSDP1 and Megatron's distributed optimizer flatten tensors and give each rank such a run, which
    begins and ends anywhere: in the middle of a row, say.

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
        # The slowest dim of which at least one whole index begins here and ends within the run. The last dim always
        # does, as its stride is one element.
        dim = 0
        while at % strides[dim] or at + strides[dim] > end:
            dim += 1
        index = at // strides[dim] % shape[dim]
        size = min(shape[dim] - index, (end - at) // strides[dim])
        # One index of each slower dim, some of this one, and all of the faster ones.
        offsets = [at // strides[outer] % shape[outer] for outer in range(dim)]
        rest = shape[dim + 1 :]
        boxes.append(Box((*offsets, index, *(0,) * len(rest)), (*(1,) * dim, size, *rest)))
        at += size * strides[dim]
    return tuple(boxes)
