"""The leaves of a source: tensors by name, plain values, and what can be neither loaded nor compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from statexchange import values
from statexchange.errors import StateExchangeError, UnsupportedError
from statexchange.state.containers import children

__all__ = [
    "OpaqueValue",
    "SavedTensor",
    "UnknownValue",
    "are_equal",
    "has_no_leaves",
    "is_empty_mapping",
    "refuse_opaque",
]


class SavedTensor:
    """A tensor of a source, as a leaf of what was saved; it stands for the values, which are read later.

    Attributes:
        name: its name in the source.
        dtype: its dtype.
        shape: its global shape.
        cut_dims: the dims in which a saved part is smaller than the whole.
        problem: why dtype and shape are not known: files of the source disagree on them.
    """

    # No dataclass: values that are dataclasses are containers, whose fields are entries of their own.
    __slots__ = ("cut_dims", "dtype", "name", "problem", "shape")

    def __init__(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        cut_dims: frozenset[int] = frozenset(),
        problem: StateExchangeError | None = None,
    ) -> None:
        self.name = name
        self.dtype = dtype
        self.shape = shape
        self.cut_dims = cut_dims
        self.problem = problem


class OpaqueValue:
    """Something in a source that is neither a tensor nor a plain value, with its description."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


class UnknownValue:
    """A value of a type that nothing in the live state has, with its JSON text.

    `problem` is why its type cannot have the value; "" if nothing in the live state has the type.
    """

    __slots__ = ("problem", "text", "type_name")

    def __init__(self, type_name: str, text: str, problem: str) -> None:
        self.type_name = type_name
        self.text = text
        self.problem = problem

    def __repr__(self) -> str:
        return f"<{self.type_name}>"


def is_empty_mapping(value: object) -> bool:
    """Whether a value is a mapping without entries."""
    return isinstance(value, Mapping) and not value


def has_no_leaves(value: Any) -> bool:
    """Whether a value is an empty mapping, or holds nothing else."""
    if isinstance(value, Mapping):
        return all(map(has_no_leaves, value.values()))
    return isinstance(value, list) and len(value) > 0 and all(map(has_no_leaves, value))


def are_equal(one: Any, other: Any) -> bool:
    """Whether two saved values are the same, whatever the order of keys, or SavedTensors of one name."""
    if type(one) is not type(other):
        return False
    if isinstance(one, bool | int | float | str):
        return values.is_same(one, other)
    if isinstance(one, SavedTensor):
        return bool(one.name == other.name)
    if isinstance(one, UnknownValue | OpaqueValue):
        return bool(one.text == other.text)
    items, others = children(one), children(other)
    if items is None or others is None:
        return values.is_same(one, other)
    return items.keys() == others.keys() and all(are_equal(item, others[key]) for key, item in items.items())


def refuse_opaque(value: Any, path: str) -> None:
    """Raise UnsupportedError for a value that the live state cannot have, or one with such a value in it."""
    parts: Iterable[Any] = () if isinstance(value, str | int | float) else values.parts_of(value)
    for part in parts:
        if isinstance(part, OpaqueValue):
            raise UnsupportedError(
                f"the source has something here that is neither a tensor nor a plain value: {part.text}. Load what "
                "holds it with the program that wrote it, and leave it out of the state here",
                name=path,
            )
        if isinstance(part, UnknownValue):
            reason = "the state has no value of this type to build it by: give it to register_config"
            if part.problem:
                reason = f"it cannot be built here: {part.problem}"
            raise UnsupportedError(f"a {part.type_name} was saved here, and {reason}", name=path)
