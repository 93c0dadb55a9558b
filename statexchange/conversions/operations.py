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
from typing import Any, TypeAlias

from statexchange.conversions.numbers import Numbers, check_expression
from statexchange.conversions.patches import Patch, concatenated, identity, permuted, sliced, transposed
from statexchange.errors import InvalidArgumentError, UnsupportedError, excerpt
from statexchange.sharding.shards import MAX_DIMS

__all__ = ["Operation", "Planned", "parse_operation"]

_MAX_ENTRIES = 64
_MAX_PATCHES = 1 << 16  # of one tensor
_MAX_PERMUTED = 1 << 20  # indices of a dim that is permuted: they are kept as a list
Expression = str | int
_Option: TypeAlias = tuple[str, Callable[[Any], object], object]  # its name, check and default


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
        for number in self.of or ():
            if number >= len(tensors):
                raise InvalidArgumentError(f"convert: 'of' names tensor {number} of {len(tensors)}")
        return [
            self._applied(tensor, numbers) if self.of is None or number in self.of else tensor
            for number, tensor in enumerate(tensors)
        ]

    @abstractmethod
    def _applied(self, tensor: Planned, numbers: Numbers) -> Planned:
        """Return one tensor after the operation."""


@dataclass(frozen=True, slots=True)
class Permute(_Each):
    """A dim is viewed as dims of the sizes `shape`, these are put into another order, and joined again."""

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
        if len(tensor.patches) > 1:  # each may be cut
            _check_count(math.prod(max(1, factors[index]) for index in self.order[:-1]), tensor)
        if tensor.shape[dim] > _MAX_PERMUTED and list(self.order) != sorted(self.order):
            text = f"convert: permute takes a dim of at most {_MAX_PERMUTED} indices, and this has {tensor.shape[dim]}"
            raise UnsupportedError(text, name=tensor.name)
        return replace(tensor, patches=permuted(tensor.patches, dim, factors, self.order))

    def inverse(self) -> Permute:
        """Return the operation that undoes this one."""
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
        size = None if self.size is None else numbers.known(self.size)
        dim = tensor.dim(self.dim)
        old = tensor.shape[dim]
        if size is None or size == old:
            return tensor
        if self.pads != (size > old):
            text = f"convert: {'pad' if self.pads else 'unpad'} to {size}{numbers.shown(str(self.size))}, but dim {dim}"
            raise InvalidArgumentError(f"{text} has {old}", name=tensor.name)
        if size < old:
            return tensor.resized(dim, size, sliced(tensor.patches, dim, 0, size))
        zeros = identity((*tensor.shape[:dim], size - old, *tensor.shape[dim + 1 :]), source=None)
        return tensor.resized(dim, size, concatenated([(tensor.patches, old), (zeros, size - old)], dim))

    def inverse(self) -> Resize:
        """Return the operation that undoes this one."""
        return Resize(self.of, self.dim, self.before, self.size, not self.pads)


@dataclass(frozen=True, slots=True)
class Split:
    """One tensor is cut along a dim into several, whose sizes have the ratios `sizes`.

    With `groups` the tensors alternate along the dim: it has so many groups, each with a part of every tensor.
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
        groups, ratios = numbers.value(self.groups), [numbers.value(size) for size in self.sizes]
        _check_count(groups * len(ratios), tensor)
        unit, rest = divmod(tensor.shape[dim], groups * sum(ratios))
        if rest:
            text = (
                f"convert: a dim of size {tensor.shape[dim]} is not {groups} groups of {' + '.join(map(str, ratios))}"
            )
            raise InvalidArgumentError(f"{text} equal parts: is this the config of this model?", name=tensor.name)
        parts = []
        begin = 0
        for ratio in ratios:
            size = ratio * unit
            at = range(begin, tensor.shape[dim], sum(ratios) * unit) if size else ()
            patches = concatenated([(sliced(tensor.patches, dim, start, size), size) for start in at], dim)
            parts.append(tensor.resized(dim, size * groups, patches))
            begin += size
        return parts

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
            others = [shape[:dim] + shape[dim + 1 :] for shape in (first.shape, tensor.shape)]
            if len(tensor.shape) != len(first.shape) or others[0] != others[1] or tensor.shape[dim] % groups:
                text = (
                    f"convert: {first.name} of shape {first.shape} and this tensor of shape {tensor.shape} do not fuse"
                )
                raise InvalidArgumentError(f"{text} along dim {dim} in {groups} groups", name=tensor.name)
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
        ratios = [numbers.value(size) for size in self.sizes]
        if len(ratios) != len(sizes) or any(
            size * sum(ratios) != ratio * sum(sizes) for size, ratio in zip(sizes, ratios, strict=False)
        ):
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
    """Raise UnsupportedError if a tensor, which may have been cut before, would be cut into too many parts."""
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


def _sequence(raw: object) -> Sequence[Any]:
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


def _numbers_of(raw: object) -> tuple[int, ...] | None:
    numbers = tuple(map(_index, _sequence(raw if isinstance(raw, list | tuple) else [raw])))
    if min(numbers) < 0:
        raise InvalidArgumentError(f"convert: 'of' is the number of a tensor, or a list of such, not {excerpt(raw)}")
    return numbers


_NEEDED: Any = object()
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
    left = dict(options)
    arguments = []
    for key, check, default in accepted:
        if key not in left and default is _NEEDED:
            raise InvalidArgumentError(f"convert: {name} needs {key!r}")
        arguments.append(check(left.pop(key)) if key in left else default)
    if left:
        raise InvalidArgumentError(f"convert: {name} has no option {excerpt(next(iter(left)))}")
    return operation(*arguments)
