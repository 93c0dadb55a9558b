"""The operations of a conversion: they cut, move and join tensors, and never compute.

Each works on a list of tensors that are not read yet (`Planned`): shapes and patches of the inputs. Each has an
inverse, with which a rule is used in the other direction.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from statexchange.conversions.numbers import Numbers, check_expression
from statexchange.conversions.patches import Patch, concatenated, identity, permuted, sliced, transposed
from statexchange.errors import InvalidArgumentError, UnsupportedError, excerpt
from statexchange.sharding.shards import MAX_DIMS

# Bounds of what a conversion file may ask for: each tensor keeps its patches, and a permuted dim a list of its indices.
_MAX_ENTRIES = 64
_MAX_PATCHES = 1 << 16  # of one tensor
_MAX_PERMUTED = 1 << 20  # indices of one dim
Expression = str | int
_Option: TypeAlias = tuple[str, Callable[[object], object], object]  # its name, check and default


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor between input and output: its shape, its elements, and a name for messages."""

    name: str
    shape: tuple[int, ...]
    patches: tuple[Patch, ...]

    def dim(self, dim: int) -> int:
        """Return a dim counted from the front; raise InvalidArgumentError if the tensor does not have it."""
        if not -len(self.shape) <= dim < len(self.shape):
            raise InvalidArgumentError(f"convert: there is no dim {dim} in shape {self.shape}", name=self.name)
        return dim % len(self.shape)

    def resized(self, dim: int, size: int, patches: tuple[Patch, ...]) -> Planned:
        """Return the tensor with another size of a dim and these patches."""
        return replace(self, shape=(*self.shape[:dim], size, *self.shape[dim + 1 :]), patches=patches)


@dataclass(frozen=True, slots=True)
class _Each(ABC):
    """An operation on each tensor by itself; `of` are the numbers of the tensors, None for all."""

    of: tuple[int, ...] | None

    def apply(self, tensors: Sequence[Planned], numbers: Numbers) -> list[Planned]:
        """Return the tensors after the operation."""
        result = list(tensors)
        chosen = range(len(tensors)) if self.of is None else self.of
        for number in chosen:
            if number >= len(tensors):
                raise InvalidArgumentError(f"convert: 'of' names tensor {number} of {len(tensors)}")
            result[number] = self._applied(tensors[number], numbers)
        return result

    @abstractmethod
    def _applied(self, tensor: Planned, numbers: Numbers) -> Planned:
        """Return one tensor after the operation."""


@dataclass(frozen=True, slots=True)
class Permute(_Each):
    """A dim is viewed as dims of the sizes `shape`, these are put into another order, and joined again.

    With shape (2, 3) and order (1, 0), rows 0 1 2 3 4 5 become 0 3 1 4 2 5.
    """

    dim: int
    shape: tuple[Expression, ...]
    order: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.order):
            text = f"convert: permute has {len(self.shape)} sizes and an order of {len(self.order)}"
            raise InvalidArgumentError(text)

    def _applied(self, tensor: Planned, numbers: Numbers) -> Planned:
        dim = tensor.dim(self.dim)
        factors = numbers.factors(self.shape, tensor.shape[dim], tensor.name)
        # One patch gets a list of indices. Of several, each may have a run for every index of the outer factors.
        if len(tensor.patches) > 1:
            _check_count(math.prod(max(1, factors[index]) for index in self.order[:-1]), tensor)
        if tensor.shape[dim] > _MAX_PERMUTED and list(self.order) != sorted(self.order):
            text = f"convert: permute takes a dim of at most {_MAX_PERMUTED} indices, and this has {tensor.shape[dim]}"
            raise UnsupportedError(text, name=tensor.name)
        return replace(tensor, patches=permuted(tensor.patches, dim, factors, self.order))

    def inverse(self) -> Permute:
        """Return the operation that undoes this one."""
        # The sizes as they are after this operation: those that the inverse sees.
        return Permute(self.of, self.dim, tuple(self.shape[index] for index in self.order), _inverse_order(self.order))


@dataclass(frozen=True, slots=True)
class Transpose(_Each):
    """Dim d of the result is dim ``order[d]`` of the tensor."""

    order: tuple[int, ...]

    def _applied(self, tensor: Planned, numbers: Numbers) -> Planned:  # noqa: ARG002 (it needs none)
        if len(self.order) != len(tensor.shape):
            text = f"convert: transpose {list(self.order)} does not fit shape {tensor.shape}"
            raise InvalidArgumentError(text, name=tensor.name)
        shape = tuple(tensor.shape[dim] for dim in self.order)
        return replace(tensor, shape=shape, patches=transposed(tensor.patches, self.order))

    def inverse(self) -> Transpose:
        """Return the operation that undoes this one."""
        return Transpose(self.of, _inverse_order(self.order))


@dataclass(frozen=True, slots=True)
class Resize(_Each):
    """The dim has `size` in the output: more is cut off, and less is filled with zeros.

    `before` is the size that the inverse restores. A size that is not known leaves the tensor as it is.
    """

    dim: int
    size: Expression | None
    before: Expression | None
    pads: bool

    def _applied(self, tensor: Planned, numbers: Numbers) -> Planned:
        if self.size is None or numbers.known(self.size) is None:
            return tensor
        size = numbers.value(self.size)
        dim = tensor.dim(self.dim)
        old = tensor.shape[dim]
        if size == old:
            return tensor
        if self.pads != (size > old):
            text = f"convert: {'pad' if self.pads else 'unpad'} to {size}{numbers.shown(str(self.size))}, but dim {dim}"
            raise InvalidArgumentError(f"{text} has {old}", name=tensor.name)
        if size < old:
            return tensor.resized(dim, size, sliced(tensor.patches, dim, 0, size))
        # Zeros are a tensor of their own, without an input.
        zeros = identity((*tensor.shape[:dim], size - old, *tensor.shape[dim + 1 :]), source=None)
        return tensor.resized(dim, size, concatenated([(tensor.patches, old), (zeros, size - old)], dim))

    def inverse(self) -> Resize:
        """Return the operation that undoes this one."""
        return Resize(self.of, self.dim, self.before, self.size, not self.pads)


@dataclass(frozen=True, slots=True)
class Split:
    """One tensor is cut along a dim into several, whose sizes have the ratios `sizes`.

    With `groups` the tensors alternate along the dim: it has so many groups, each with a part of every tensor. With
    sizes (2, 1, 1) and 2 groups, rows q0 q1 k0 v0 q2 q3 k1 v1 become q0 q1 q2 q3, k0 k1 and v0 v1.
    """

    dim: int
    sizes: tuple[Expression, ...]
    groups: Expression

    def apply(self, tensors: Sequence[Planned], numbers: Numbers) -> list[Planned]:
        """Return the tensors after the operation."""
        if len(tensors) != 1:
            raise InvalidArgumentError(f"convert: split takes one tensor, not {len(tensors)}")
        (tensor,) = tensors
        dim = tensor.dim(self.dim)
        groups, ratios = numbers.value(self.groups), list(map(numbers.value, self.sizes))
        _check_count(groups * len(ratios), tensor)
        # The dim is groups x (r0 + r1 + ...) units: group g begins at unit g * sum, and in it each tensor behind those
        # before it.
        unit, rest = divmod(tensor.shape[dim], groups * sum(ratios))
        if rest:
            shown = " + ".join(map(str, ratios))
            text = f"convert: a dim of size {tensor.shape[dim]} is not {groups} groups of {shown} equal parts"
            raise InvalidArgumentError(f"{text}: is this the config of this model?", name=tensor.name)
        results = []
        begin = 0
        for ratio in ratios:
            size = ratio * unit
            parts = []
            for group in range(groups):
                parts.append((sliced(tensor.patches, dim, group * sum(ratios) * unit + begin, size), size))
            results.append(tensor.resized(dim, size * groups, concatenated(parts, dim)))
            begin += size
        return results

    def inverse(self) -> Fuse:
        """Return the operation that undoes this one."""
        return Fuse(self.dim, self.sizes, self.groups)


@dataclass(frozen=True, slots=True)
class Fuse:
    """Several tensors become one along a dim, one after another, or alternating in so many `groups`.

    `sizes` are the ratios of the tensors' sizes, which the inverse needs; if they are given, they are checked.
    """

    dim: int
    sizes: tuple[Expression, ...] | None
    groups: Expression

    def apply(self, tensors: Sequence[Planned], numbers: Numbers) -> list[Planned]:
        """Return the tensors after the operation."""
        first = tensors[0]
        dim = first.dim(self.dim)
        groups = numbers.value(self.groups)
        for tensor in tensors:
            _check_count(groups * len(tensors), tensor)
            fits = len(tensor.shape) == len(first.shape) and tensor.shape[dim] % groups == 0
            # All other dims must be equal: with the first one's size of this dim the shapes are the same.
            if not fits or tensor.resized(dim, first.shape[dim], ()).shape != first.shape:
                text = f"convert: {first.name} of shape {first.shape} and this tensor of shape {tensor.shape}"
                raise InvalidArgumentError(f"{text} do not fuse along dim {dim} in {groups} groups", name=tensor.name)
        if self.sizes is not None:
            self._check_sizes([tensor.shape[dim] for tensor in tensors], numbers, first.name)
        parts = []
        for group in range(groups):
            for tensor in tensors:
                size = tensor.shape[dim] // groups
                parts.append((sliced(tensor.patches, dim, group * size, size), size))
        total = sum(tensor.shape[dim] for tensor in tensors)
        return [first.resized(dim, total, concatenated(parts, dim))]

    def _check_sizes(self, sizes: Sequence[int], numbers: Numbers, name: str) -> None:
        """Raise InvalidArgumentError unless the sizes have the ratios of the rule."""
        assert self.sizes is not None
        ratios = list(map(numbers.value, self.sizes))
        # Of as many sizes as ratios, each has the same part of their sum.
        fits = len(sizes) == len(ratios)
        for size, ratio in zip(sizes, ratios, strict=False):
            fits = fits and size * sum(ratios) == ratio * sum(sizes)
        if not fits:
            text = f"convert: sizes {list(sizes)} do not have the ratios {ratios} ({', '.join(map(str, self.sizes))})"
            raise InvalidArgumentError(f"{text}: is this the config of this model?", name=name)

    def inverse(self) -> Split:
        """Return the operation that undoes this one."""
        if self.sizes is None:
            raise InvalidArgumentError("convert: fuse has no inverse without 'sizes', the ratios of the tensors' sizes")
        return Split(self.dim, self.sizes, self.groups)


Operation: TypeAlias = Permute | Transpose | Resize | Split | Fuse
"""One operation on the tensors of a rule: `apply` returns what they become, `inverse` the operation that undoes it."""


def _check_count(count: int, tensor: Planned) -> None:
    """Raise UnsupportedError if a tensor, which may have been cut before, would be cut into too many parts.

    A split after a split multiplies them, and 64 operations may follow one another.
    """
    total = count * max(1, len(tensor.patches))
    if total > _MAX_PATCHES:
        raise UnsupportedError(f"convert: this tensor would be cut into {total} parts", name=tensor.name)


def _inverse_order(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


# The form in JSON


def _index(raw: object) -> int:
    if type(raw) is not int or not -MAX_DIMS <= raw < MAX_DIMS:
        raise InvalidArgumentError(f"convert: {excerpt(raw)} is not the number of a dim")
    return raw


def _sequence(raw: object) -> Sequence[object]:
    if not isinstance(raw, list | tuple) or not 0 < len(raw) <= _MAX_ENTRIES:
        raise InvalidArgumentError(f"convert: {excerpt(raw)} is not a list of 1 to {_MAX_ENTRIES} entries")
    return raw


def _expressions(raw: object) -> tuple[Expression, ...]:
    return tuple(map(check_expression, _sequence(raw)))


def _order(raw: object) -> tuple[int, ...]:
    order = tuple(map(_index, _sequence(raw)))
    if sorted(order) != list(range(len(order))):
        raise InvalidArgumentError(f"convert: {excerpt(raw)} is not an order of the dims 0 to {len(order) - 1}")
    return order


def _numbers_of(raw: object) -> tuple[int, ...]:
    numbers = tuple(map(_index, _sequence(raw if isinstance(raw, list | tuple) else [raw])))
    if min(numbers) < 0:
        raise InvalidArgumentError(f"convert: 'of' is the number of a tensor, or a list of such, not {excerpt(raw)}")
    return numbers


_NEEDED = object()
_OF: _Option = ("of", _numbers_of, None)
_DIM: _Option = ("dim", _index, 0)
_GROUPS: _Option = ("groups", check_expression, 1)
_SIZE: tuple[_Option, ...] = ("to", check_expression, _NEEDED), ("from", check_expression, None)
# How each operation is made from its options, which are arguments in this order; each with its check and its default.
_OPERATIONS: Mapping[str, tuple[Callable[..., Operation], Sequence[_Option]]] = {
    "permute": (Permute, (_OF, _DIM, ("shape", _expressions, _NEEDED), ("order", _order, _NEEDED))),
    "transpose": (Transpose, (_OF, ("order", _order, _NEEDED))),
    "split": (Split, (_DIM, ("sizes", _expressions, _NEEDED), _GROUPS)),
    "fuse": (Fuse, (_DIM, ("sizes", _expressions, None), _GROUPS)),
    "pad": (functools.partial(Resize, pads=True), (_OF, _DIM, *_SIZE)),
    "unpad": (functools.partial(Resize, pads=False), (_OF, _DIM, *_SIZE)),
}


def parse_operation(raw: object) -> Operation:
    """Return an operation from its JSON form, ``{"permute": {...}}``; raise InvalidArgumentError for anything else."""
    if not isinstance(raw, Mapping) or len(raw) != 1:
        raise InvalidArgumentError(f'convert: an operation is like {{"transpose": {{...}}}}, not {excerpt(raw)}')
    ((name, options),) = raw.items()
    if name not in _OPERATIONS or not isinstance(options, Mapping):
        raise InvalidArgumentError(f"convert: {excerpt(raw)} is no operation; there are {', '.join(_OPERATIONS)}")
    operation, accepted = _OPERATIONS[name]
    # An option that is misspelt would be its default: what no check has taken is an error.
    left = dict(options)
    arguments = []
    for key, check, default in accepted:
        if key not in left and default is _NEEDED:
            raise InvalidArgumentError(f"convert: {name} needs {key!r}")
        arguments.append(check(left.pop(key)) if key in left else default)
    if left:
        raise InvalidArgumentError(f"convert: {name} has no option {excerpt(next(iter(left)))}")
    return operation(*arguments)
