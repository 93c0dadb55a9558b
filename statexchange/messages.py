"""The codec of what ranks send each other: dataclasses and plain values to JSON and back, as their type hints say.

A message is sent in columns, because a model has tens of thousands of tensors: a sequence of records becomes one list
for each field, and a sequence of sequences its lengths and one list of all items. So each field is checked and built
for all records at once. Two `Piece(holder, copies)`, `Piece(0, (3, 4))` and `Piece(1, ())`, become::

    [[2], {"holder": [0, 1], "copies": [[0, 1], 2, [[2, 0], [3, 4]]]}]

Hints may be bool, int (from 0 to 2**64 - 1), float, str, bytes, object (any JSON value), Literal, None, unions,
dataclasses, namedtuples, and tuples, lists, sets and mappings of these. Equal tuples of numbers (shapes, offsets)
travel once, and so do equal values of a hint `Shared[...]`. No file that lasts contains messages (those of a rendezvous
in a directory do not last), so messages need no version.
"""

from __future__ import annotations

import base64
import collections.abc
import dataclasses
import functools
import json
import operator
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Annotated, Any, Protocol, TypeAlias, TypeVar

from statexchange.errors import MismatchError, StateExchangeError, excerpt

T = TypeVar("T")
Shared: TypeAlias = Annotated[T, "shared"]
"""The hint of a field with few different values, which are hashable: each of them is sent once."""

_Values: TypeAlias = list[Any]  # of one column, whose hint the type checker does not know
_Build: TypeAlias = Callable[[Iterable[tuple[object, object]]], object]
_END_OF_INTS = 1 << 64


def encode(value: object, kind: object) -> object:
    """Return a value of type `kind` as a JSON value for `decode`. Not collective."""
    return _column(kind).encode([value])


def encoded(value: object, kind: object) -> bytes:
    """Return `encode(value, kind)` as bytes. Not collective."""
    # NaN and infinities become names that Python reads but JSON does not have: only ranks read this.
    return json.dumps(encode(value, kind), separators=(",", ":")).encode()


def decode(
    raw: object, kind: type[T] | types.UnionType, what: str, rank: int, check: Callable[[T], object] | None = None
) -> T:
    """Return the value that a rank encoded. Not collective.

    Args:
        raw: what `encode` or `encoded` returned there.
        kind: the type of the value.
        what: a description of the value, for the error.
        rank: the rank that sent it.
        check: raises ValueError if the value cannot be right.

    Raises:
        MismatchError: it has a wrong type or value anywhere.
    """
    hint: object = kind
    try:
        if isinstance(raw, bytes):
            raw = json.loads(raw)
        # One column of one value: the same code for a message and for what it has thousands of.
        value: T = _column(hint).decode(raw, 1)[0]
        if check is not None:
            check(value)
    except StateExchangeError:  # of `check`, which some are ValueErrors
        raise
    except (ValueError, RecursionError) as error:
        # A message comes from this package and not from a user's file: so it is another version that wrote it.
        text = f"cannot read {what} that rank {rank} sent ({error}): run the same version of statexchange on all ranks"
        raise MismatchError(text, rank=rank) from error
    return value


class _Column(Protocol):
    """Encodes the values of one hint that lie in one place of many records."""

    def encode(self, values: _Values) -> object:
        """Return the values as one JSON value."""

    def decode(self, raw: object, size: int) -> _Values:
        """Return so many values; raise ValueError for anything that `encode` cannot have returned."""


def _listed(raw: object, size: int) -> _Values:
    """Return a list of this length."""
    if type(raw) is not list or len(raw) != size:
        raise ValueError(f"not a list of {size}: {excerpt(raw)}")
    return raw


class _Plain:
    """Values that are JSON already, of one of these types."""

    def __init__(self, *kinds: type) -> None:
        self._kinds = frozenset(kinds)
        self._text = " or ".join(map(operator.attrgetter("__name__"), kinds))

    def encode(self, values: _Values) -> object:
        return values

    def decode(self, raw: object, size: int) -> _Values:
        values = _listed(raw, size)
        # One call into C for all values. isinstance would take a bool for an int.
        if self._kinds and not self._kinds.issuperset(map(type, values)):
            for value in values:
                if type(value) not in self._kinds:
                    raise ValueError(f"not {self._text}: {excerpt(value)}")
        return values


class _Ints(_Plain):
    """Counts, sizes and numbers of things, none of which is negative."""

    def decode(self, raw: object, size: int) -> _Values:
        values = super().decode(raw, size)
        # A negative number would be taken as an index from the end.
        if values and (min(values) < 0 or max(values) >= _END_OF_INTS):
            raise ValueError(f"{excerpt(min(values))} or {excerpt(max(values))} is out of range")
        return values


class _Texts(_Plain):
    """The texts of a Literal."""

    def __init__(self, choices: Iterable[str]) -> None:
        super().__init__(str)
        self._choices = frozenset(choices)

    def decode(self, raw: object, size: int) -> _Values:
        values = super().decode(raw, size)
        if not self._choices.issuperset(values):
            raise ValueError(f"not one of {', '.join(sorted(self._choices))}: {excerpt(values)}")
        return values


class _Bytes(_Plain):
    """Bytes, as base64."""

    def encode(self, values: _Values) -> object:
        return list(map(bytes.decode, map(base64.b64encode, values)))

    def decode(self, raw: object, size: int) -> _Values:
        values = []
        for text in super().decode(raw, size):
            values.append(base64.b64decode(text, validate=True))
        return values


class _Nothing:
    """The value None, which takes no place: most tensors lack what may be None."""

    def encode(self, values: _Values) -> object:  # noqa: ARG002 (all that is known of them is their number)
        return None

    def decode(self, raw: object, size: int) -> _Values:
        if raw is not None:
            raise ValueError(f"not null: {excerpt(raw)}")
        return [None] * size


class _Record:
    """Records, as an object with the column of each field.

    `getters` return the fields of one record, and `build` makes all records from their fields' values.
    """

    def __init__(
        self,
        fields: Mapping[str, _Column],
        getters: Iterable[Callable[..., object]],
        build: Callable[..., Iterable[object]],
    ) -> None:
        self._fields = fields
        self._getters = dict(zip(fields, getters, strict=True))
        self._build = build

    def encode(self, values: _Values) -> object:
        columns = {}
        for name, column in self._fields.items():
            columns[name] = column.encode(list(map(self._getters[name], values)))
        return columns

    def decode(self, raw: object, size: int) -> _Values:
        # Names cost a few bytes for all records together, and show that another version has other fields.
        if type(raw) is not dict or raw.keys() != self._fields.keys():
            raise ValueError(f"not an object of {', '.join(self._fields)}: {excerpt(raw)}")
        columns = []
        for name, column in self._fields.items():
            try:
                columns.append(column.decode(raw[name], size))
            except ValueError as error:
                # With the names of all fields above it, as in "tensors: pieces: holder: not int: '0'".
                raise ValueError(f"{name}: {error}") from None
        return list(self._build(*columns))


class _Sequence:
    """Sequences or mappings, as their lengths and a column of all items."""

    def __init__(self, item: _Column, build: _Build) -> None:
        self._item = item
        self._build = build

    def encode(self, values: _Values) -> object:
        if self._build is dict:
            values = list(map(operator.methodcaller("items"), values))
        return [list(map(len, values)), self._item.encode(list(chain.from_iterable(values)))]

    def decode(self, raw: object, size: int) -> _Values:
        raw_lengths, raw_items = _listed(raw, 2)
        lengths = _INTS.decode(raw_lengths, size)
        # The items are counted before any memory depends on the sum of the lengths.
        items = iter(self._item.decode(raw_items, sum(lengths)))
        build = self._build
        return [build(islice(items, length)) for length in lengths]


class _Shared:
    """Values of which many are equal: the number of each among the different ones, their count and their column."""

    def __init__(self, item: _Column) -> None:
        self._item = item

    def encode(self, values: _Values) -> object:
        numbers: dict[object, int] = {}
        # For values a, b, a: [0, 1, 0], 2, [a, b].
        column = [numbers.setdefault(value, len(numbers)) for value in values]
        return [column, len(numbers), self._item.encode(list(numbers))]

    def decode(self, raw: object, size: int) -> _Values:
        raw_numbers, count, raw_items = _listed(raw, 3)
        numbers = _INTS.decode(raw_numbers, size)
        if type(count) is not int or count != max(numbers, default=-1) + 1:
            raise ValueError(f"not the count of different values: {excerpt(count)}")
        # Equal values become one object, so that 50,000 tensors of a few shapes need the memory of a few.
        return list(map(self._item.decode(raw_items, count).__getitem__, numbers))


class _Union:
    """Values of several types, as the number of each one's type and a column for each type."""

    def __init__(self, kinds: Sequence[type], columns: Sequence[_Column]) -> None:
        self._kinds = kinds
        self._columns = columns

    def encode(self, values: _Values) -> object:
        # For (int | str) and values 7, "x", 8: [0, 1, 0], [[7, 8], ["x"]]. Each column is checked in one call.
        parts: list[_Values] = [[] for _ in self._kinds]
        numbers = []
        for value in values:
            number = 0
            while not isinstance(value, self._kinds[number]):
                number += 1
            numbers.append(number)
            parts[number].append(value)
        columns = []
        for number, part in enumerate(parts):
            columns.append(self._columns[number].encode(part))
        return [numbers, columns]

    def decode(self, raw: object, size: int) -> _Values:
        raw_numbers, raw_columns = _listed(raw, 2)
        numbers = _INTS.decode(raw_numbers, size)
        if max(numbers, default=0) >= len(self._columns):
            raise ValueError(f"not the number of a type: {max(numbers)}")
        parts = []
        for number, raw_column in enumerate(_listed(raw_columns, len(self._columns))):
            parts.append(iter(self._columns[number].decode(raw_column, numbers.count(number))))
        return [next(parts[number]) for number in numbers]


_INTS = _Ints(int)
_SCALARS: dict[object, _Column] = {
    bool: _Plain(bool),
    int: _INTS,
    float: _Plain(float, int),  # as in Python's hints; an int stays one
    str: _Plain(str),
    bytes: _Bytes(str),
    object: _Plain(),
    types.NoneType: _Nothing(),
}
_BUILDERS: dict[object, _Build] = {
    tuple: tuple,
    collections.abc.Sequence: tuple,
    list: list,
    set: set,
    dict: dict,
    collections.abc.Mapping: dict,
}


@functools.cache  # to read the hints of a class takes longer than to decode a thousand of its records
def _column(hint: Hashable) -> _Column:
    """Return the column of values with a type hint."""
    if hint in _SCALARS:
        return _SCALARS[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _Shared(_column(arguments[0]))
    if origin is typing.Literal:
        return _Texts(arguments)
    if origin in (typing.Union, types.UnionType):
        kinds = []
        for kind in arguments:
            # The type of a value decides its column, and isinstance takes neither list[int] nor Literal["x"].
            class_of = typing.get_origin(kind) or kind
            kinds.append(str if class_of is typing.Literal else class_of)
        return _Union(kinds, list(map(_column, arguments)))
    if origin is tuple and arguments[-1] is not Ellipsis:
        return _tuples(arguments)
    if origin in _BUILDERS:
        if _BUILDERS[origin] is dict:
            return _Sequence(_tuples(arguments), dict)
        sequence = _Sequence(_column(arguments[0]), _BUILDERS[origin])
        # Shapes and offsets: a model with many tensors has few different ones.
        if hint == tuple[int, ...]:
            return _Shared(sequence)
        return sequence
    return _records(hint)


def _tuples(hints: Iterable[Hashable]) -> _Record:
    """Return the column of tuples whose items have these hints."""
    columns: dict[str, _Column] = {}
    for hint in hints:
        columns[str(len(columns))] = _column(hint)
    return _Record(columns, map(operator.itemgetter, range(len(columns))), zip)


def _records(kind: Any) -> _Record:
    """Return the column of a dataclass or namedtuple. It is built by its own constructor, which checks itself."""
    # A field with init=False is scratch space: every rank has its own.
    names = getattr(kind, "_fields", None) or [field.name for field in dataclasses.fields(kind) if field.init]
    hints = typing.get_type_hints(kind, include_extras=True)
    columns = {}
    for name in names:
        columns[name] = _column(hints[name])
    return _Record(columns, map(operator.attrgetter, names), functools.partial(map, kind))
