"""The one JSON codec: Python values to JSON and back. Decoding imports nothing by name and runs no code of a value.

Plain JSON values stay themselves. Everything else is an object with a tag under the key ``"$"``: tuple, set, deque,
dict (of keys other than str), float (NaN, infinities), complex, number (a numpy scalar), bytes, bytesio, path,
datetime, date, time, timedelta, dtype, size and device (torch's), enum, namedtuple, dataclass, or leaf: an object that
the caller keeps elsewhere under a name, such as a tensor.

The text may come from a file or another rank, so decoding trusts nothing: types are looked up among those that the
caller or `register_config` gave, fields are set without ``__init__``, depth is limited, and so is the number of keys
with the same hash.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import enum
import io
import json
import math
import pathlib
import sys
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias, cast

from statexchange.errors import InvalidArgumentError, StateExchangeError, UnsupportedError, excerpt, type_text

_TAG = "$"
MAX_DEPTH = 100  # levels of nested containers in one value or state
_MAX_EQUAL_HASHES = 64
_MAX_INT_BITS = 14_284  # no more than 4,300 digits: Python's own limit for texts of integers
# Those of `is_number`. np.dtype() takes any text, and compiles a part of it as Python code.
_NUMBER_DTYPES = ("bool", *(f"{sign}int{8 * size}" for sign in ("", "u") for size in (1, 2, 4, 8)))
_NUMBER_DTYPES += ("float16", "float32", "float64", "complex64", "complex128")
# Values of exactly these types are JSON by themselves, except huge integers and floats that are not finite.
SCALAR_TYPES = (type(None), bool, int, float, str)
_registered: dict[str, type] = {}

Value: TypeAlias = Any
"""Any value that `encode` takes."""

Json: TypeAlias = "bool | int | float | str | list[Value] | JsonObject | None"
JsonObject: TypeAlias = "dict[str, Value]"
Leaf: TypeAlias = "Callable[[object, str], str | None]"
Types: TypeAlias = "Mapping[str, type]"


class UnknownValue:
    """A value of a type that the reader does not know, with its JSON text.

    `problem` is why its type cannot have the value; "" if the type is not known.
    """

    __slots__ = ("problem", "text", "type_name")

    def __init__(self, type_name: str, text: str, problem: str) -> None:
        self.type_name = type_name
        self.text = text
        self.problem = problem

    def __repr__(self) -> str:
        return f"<{self.type_name}>"


def register_config(cls: type) -> type:
    """Let decoded configs of type `cls` be built as `cls` in this process. Also a decorator.

    Not collective. A config of a type that is not registered comes back as a dict of its fields with ``"__name__"``,
    unless the reader gives the type: nothing is imported by the name in a file.

    Args:
        cls: a dataclass, a namedtuple or an Enum.

    Returns:
        `cls`.

    Raises:
        TypeError: `cls` is something else.

    Example:
        >>> import dataclasses
        >>> import statexchange as sx
        >>> @sx.register_config
        ... @dataclasses.dataclass
        ... class Config:
        ...     hidden_size: int
        >>> Config(8)
        Config(hidden_size=8)
    """
    # Only these are decoded without a call of the class's own code.
    is_type = isinstance(cls, type)
    if not (is_type and (dataclasses.is_dataclass(cls) or issubclass(cls, enum.Enum) or hasattr(cls, "_fields"))):
        raise TypeError(f"{cls!r} is no dataclass, namedtuple or Enum")
    _registered[_type_name(cls)] = cls
    return cls


def _type_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def encode(value: object, leaf: Leaf | None = None) -> str:
    """Return `value` as JSON text. Not collective.

    Args:
        value: the value.
        leaf: `leaf(object, path)` returns the name under which the caller keeps an object, or None to have it encoded.
            It is not asked of None, numbers and texts of Python's own types.

    Example:
        ``{"step": 3, "betas": (0.9, 0.99), "w": tensor}``, with a `leaf` that names the tensor "w", becomes
        ``{"step":3,"betas":{"$":"tuple","value":[0.9,0.99]},"w":{"$":"leaf","name":"w"}}``.

    Raises:
        UnsupportedError: a type has no JSON text, or a kept object is in a set, a deque or a key, where a reader could
            not replace what stands for it; names the path.
        InvalidArgumentError: the value contains itself or is nested too deeply; names the path.
    """
    return json.dumps(_Encoder(leaf).value(value, ""), allow_nan=False, separators=(",", ":"))


class _Encoder:
    """Makes JSON of values.

    A path is written as in Python, and tells the user what cannot be encoded.
    """

    def __init__(self, leaf: Leaf | None) -> None:
        self._leaf = leaf
        self._kept: dict[str, object] = {}
        self._depth = 0

    def value(self, value: Value, path: str, *, is_hashed: bool = False) -> Json:
        """Return `value` as JSON; `is_hashed` is whether it is in a key or in a set, or in a deque."""
        if self._depth > MAX_DEPTH:
            raise InvalidArgumentError(f"value at {path[:80]}... is nested deeper than {MAX_DEPTH}, or contains itself")
        kind = type(value)
        # Before all types but the plain ones, which nobody keeps: what is kept may be of a type that has a text, too.
        if self._leaf is not None and kind not in SCALAR_TYPES:
            name = self._leaf(value, path)
            if name is not None:
                # Of two objects under one name one would be lost.
                if self._kept.setdefault(name, value) is not value:
                    raise InvalidArgumentError(f"two values are called {name!r}; the second lies at {path}")
                if is_hashed:
                    raise _hashed_leaf(value, path)
                return {_TAG: "leaf", "name": name}
        if kind is int and value.bit_length() > _MAX_INT_BITS:
            # Python refuses to parse such a number, so that nothing could read it.
            what = f"an integer of {value.bit_length():,} bits"
            raise UnsupportedError(f"cannot write {what} as JSON, at {path or 'the top'}: give its hex()")
        if value is None or kind in (bool, int, str):
            return cast("Json", value)
        if kind is float and math.isfinite(value):
            return cast("Json", value)
        if kind is float:
            return {_TAG: "float", "value": repr(value)}
        self._depth += 1
        raw = self._container(value, path, is_hashed=is_hashed)
        if raw is None:
            raw = self._tagged(value, path)
        if raw is None:
            raise _refusal(kind, path)
        self._depth -= 1
        return raw

    def _container(self, value: Value, path: str, *, is_hashed: bool) -> Json:
        """Return the JSON of a container or an enum; None for any other value."""
        kind = type(value)
        if isinstance(value, enum.Enum):
            # A member of an IntEnum is an int as well, so that enums come first.
            member = self.value(value.value, f"{path}.value", is_hashed=is_hashed)
            if not _leads_back(value, member):
                raise _refusal(kind, path)
            return {_TAG: "enum", "type": _type_name(kind), "value": member}
        if kind in (list, tuple):
            items = list(value)
            for i, item in enumerate(value):
                # A text is JSON already: no call for each of the many names of parameters in a param group.
                if type(item) is not str:
                    items[i] = self.value(item, f"{path}[{i}]", is_hashed=is_hashed)
            if kind is list:
                return items
            return {_TAG: "tuple", "value": items}
        tag, entries = "", value
        if dataclasses.is_dataclass(kind):
            tag, entries = "dataclass", _fields(value, path)
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            tag, entries = "namedtuple", dict(zip(value._fields, value, strict=True))
        elif not isinstance(value, Mapping):
            return None
        elif _TAG in value or {*map(type, value)} - {str}:
            # JSON has texts as keys alone, and one of them would look like a tag.
            pairs = []
            for key, item in value.items():
                # Numbers, as those of an optimizer's parameters, are many and short.
                shown = str(key) if type(key) is int and abs(key) < 1 << 64 else excerpt(key)
                raw_key = self.value(key, f"{path}<key {shown}>", is_hashed=True)
                pairs.append([raw_key, self.value(item, f"{path}[{shown}]", is_hashed=is_hashed)])
            return {_TAG: "dict", "value": pairs}
        raw: JsonObject = {}
        for key, item in entries.items():
            raw[key] = self.value(item, f"{path}.{key}", is_hashed=is_hashed)
        if not tag:
            return raw
        return {_TAG: tag, "type": _type_name(kind), "value": raw}

    def _tagged(self, value: Value, path: str) -> Json:
        """Return the JSON object of a value of the standard library, numpy or torch; None for any other value."""
        kind = type(value)
        if kind is complex:
            return {_TAG: "complex", "value": [self.value(value.real, path), self.value(value.imag, path)]}
        if kind is bytes:
            return {_TAG: "bytes", "value": base64.b64encode(value).decode()}
        if kind is io.BytesIO:
            return {_TAG: "bytesio", "value": base64.b64encode(value.getvalue()).decode(), "position": value.tell()}
        if kind in (set, frozenset):
            # Sorted, so that equal sets have equal texts.
            items = [self.value(item, f"{path}<item {excerpt(item)}>", is_hashed=True) for item in value]
            return {_TAG: kind.__name__, "value": sorted(items, key=json.dumps)}
        if kind is deque:
            items = [self.value(item, f"{path}[{i}]", is_hashed=True) for i, item in enumerate(value)]
            return {_TAG: "deque", "value": items, "maxlen": value.maxlen}
        # One of another system would come back as something else.
        if isinstance(value, type(pathlib.PurePath())):
            return {_TAG: "path", "value": str(value)}
        if kind is dt.date:
            return {_TAG: "date", "value": value.isoformat()}
        if kind in (dt.datetime, dt.time):
            fold = {"fold": value.fold} if value.fold else {}
            text = value.isoformat()
            # The text has the offset from UTC, and not the name of a time zone.
            if repr(kind.fromisoformat(text).replace(**fold)) != repr(value):
                return None
            return {_TAG: kind.__name__, "value": text, **fold}
        if kind is dt.timedelta:
            return {_TAG: "timedelta", "value": [value.days, value.seconds, value.microseconds]}
        # By name, as torch may not be installed.
        if kind.__module__ == "torch" and kind.__name__ in ("dtype", "Size", "device"):
            plain = list(value) if kind.__name__ == "Size" else str(value).removeprefix("torch.")
            return {_TAG: kind.__name__.lower(), "value": plain}
        # Without an import: there is no number of numpy where numpy was not imported.
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic):
            if value.dtype.kind in "US":
                return self.value(value.item(), path)
            if is_number(value):
                return {_TAG: "number", "dtype": value.dtype.name, "value": self.value(value.item(), path)}
        return None


def _hashed_leaf(value: object, path: str) -> UnsupportedError:
    return UnsupportedError(
        f"{type_text(value)} cannot be an item of a set or deque, or a key, at {path[:80]}: put it into a list, "
        "or into a mapping with text as keys"
    )


def _refusal(kind: type, path: str) -> UnsupportedError:
    where = path or "the top"
    return UnsupportedError(f"cannot write a {kind.__module__}.{kind.__qualname__} as JSON, at {where}{_advice(kind)}")


def is_number(value: object) -> bool:
    """Whether `value` is a number of Python or numpy, no wider than a double. Not collective."""
    numpy: Value = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return value.dtype.name in _NUMBER_DTYPES
    return type(value) in (bool, int, float, complex)


def has_text(value: object) -> bool:
    """Whether `encode` can encode `value`. Not collective."""
    try:
        encode(value)
    except (TypeError, ValueError):
        return False
    return True


def is_same(value: object, other: object) -> bool:
    """Whether two values have one type and one text. Not collective.

    Stricter than ``==`` where that leaves something out: 0.0 and -0.0, ``[1]`` and ``[True]`` and dataclasses that
    differ in a field with ``compare=False`` are not the same. NaN is the same as NaN. Values that `encode` cannot
    encode never are.
    """
    if type(value) is not type(other):
        return False
    if type(value) in (bool, int, str, type(None)):
        return value == other
    # By text, in which 0.0 and -0.0 differ, and NaN is itself.
    if type(value) is float:
        return repr(value) == repr(other)
    try:
        return encode(value) == encode(other)
    except (TypeError, ValueError):
        return False


def _advice(kind: type) -> str:
    if kind in (dt.datetime, dt.time):
        return ": its time zone has no text that can be read back: give it in UTC, as astimezone(datetime.timezone.utc)"
    if issubclass(kind, enum.Enum):
        return ": its value does not lead back to it, as that of NaN"
    if kind.__name__ == "ndarray" or hasattr(kind, "untyped_storage"):
        return ": give its tolist(), or give tensors to a call that takes them, such as all_gather"
    return ": give plain values, tensors, or what its state_dict(), get_state() or bit_generator.state has of them"


def _fields(value: Value, path: str) -> dict[str, Value]:
    fields = {}
    for field in dataclasses.fields(value):
        # One of init=False, or of a value that was made without __init__, may never have been set.
        if not hasattr(value, field.name):
            raise UnsupportedError(
                f"cannot write a {_type_name(type(value))} with field {field.name!r} unset, at {path or 'the top'}"
            )
        fields[field.name] = getattr(value, field.name)
    return fields


def _leads_back(member: enum.Enum, encoded: Json) -> bool:
    """Whether a member of an Enum is found by its value, once that is decoded."""
    try:
        return type(member)(decode(json.dumps(encoded), types=types_of(member.value))) is member
    except ValueError:
        return False


def types_of(value: object) -> dict[str, type]:
    """Return the dataclass, namedtuple and Enum types in `value` by qualified name, for `decode`."""
    types = {}
    for part in parts_of(value):
        cls = type(part)
        is_namedtuple = issubclass(cls, tuple) and hasattr(cls, "_fields")
        if is_namedtuple or issubclass(cls, enum.Enum) or dataclasses.is_dataclass(cls):
            types[_type_name(cls)] = cls
    return types


def parts_of(value: object) -> list[object]:
    """Return `value` and everything in it, each object once: entries, keys, items, fields and the values of Enums.

    Not collective. Values may be nested deeper than Python recurses.
    """
    parts: list[object] = []
    # Callers look for types before `encode` refuses a value that is too deep or contains itself.
    waiting, seen = [value], {id(value)}
    while waiting:
        value = waiting.pop()
        # The list keeps the object, so that no other one gets its id.
        parts.append(value)
        children: Iterable[object] = ()
        if isinstance(value, enum.Enum):
            children = [value.value]
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            children = [getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)]
        elif isinstance(value, Mapping):
            children = [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | frozenset | deque):
            children = value
        for child in children:
            if id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    return parts


def decode(
    text: str | bytes,
    *,
    types: Types | None = None,
    leaves: Mapping[str, object] | None = None,
) -> Value:
    """Return the value that `encode` wrote. Not collective.

    Dataclasses, namedtuples and Enums come back as the type in `types` or one given to `register_config`. A value of an
    unknown type becomes a dict of its fields with ``"__name__"``, or its JSON text if it is a key or in a set. A dtype
    is torch's if torch has been imported, else ``"torch.float32"``; likewise a device (``"cuda:0"``) and a size (a
    tuple).

    Args:
        text: the text.
        types: types that may be built, by qualified name.
        leaves: the objects that `encode`'s leaf kept, or what stands for them here, by name.

    Raises:
        ValueError: `encode` cannot have written the text, or it names a leaf that is not in `leaves`.

    Example:
        ``{"step": 3, "w": {"$": "leaf", "name": "w"}}`` with ``leaves={"w": tensor}`` becomes
        ``{"step": 3, "w": tensor}``.
    """
    try:
        parsed = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"malformed value: {error!r}") from error
    return decode_parsed(parsed, types=types, leaves=leaves)


def decode_parsed(
    parsed: object,
    *,
    types: Types | None = None,
    leaves: Mapping[str, object] | None = None,
    unknown: list[UnknownValue] | None = None,
) -> Value:
    """Return what `decode` returns, from text that is parsed: text from a file needs location.py's strict parser.

    With a list as `unknown`, a value whose type is unknown, or cannot have it, becomes an UnknownValue instead, and is
    added to the list.
    """
    return _decoded(_Decoder({**_registered, **(types or {})}, leaves, unknown), parsed)


def to_plain(parsed: object) -> Value:
    """Return the value that `encode` wrote as plain values for display. Not collective.

    A dataclass, namedtuple or Enum becomes a dict with ``"__name__"``. So does a leaf: its ``"__name__"`` is "tensor",
    and its ``"name"`` is kept. A set or deque becomes a list; a dtype, time or path becomes text; a key that is not
    text becomes its `repr`. A tuple stays a tuple. No type is built, and neither numpy nor torch is imported.

    Args:
        parsed: the text, parsed.

    Raises:
        ValueError: `encode` cannot have written the text.
    """
    return _decoded(_PlainDecoder({}, None), parsed)


def _decoded(decoder: _Decoder, parsed: object) -> Value:
    try:
        return decoder.value(parsed)
    except StateExchangeError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        raise ValueError(f"malformed value: {error!r}") from error


class _Decoder:
    """Rebuilds values from parsed JSON; one method per tag."""

    def __init__(
        self, types: Types, leaves: Mapping[str, object] | None, unknown: list[UnknownValue] | None = None
    ) -> None:
        self._types = types
        self._leaves = leaves
        self._unknown = unknown
        self._depth = 0

    def value(self, raw: Value) -> Value:
        """Return the value of one parsed JSON node."""
        if not isinstance(raw, list | dict):
            return raw
        # As in `encode`: code that walks the value may recurse.
        if self._depth > MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH}")
        self._depth += 1
        built: Value
        if isinstance(raw, list):
            built = self._items(raw)
        elif _TAG not in raw:
            built = raw.copy()
            for key, item in raw.items():
                if isinstance(item, list | dict):
                    built[key] = self.value(item)
        elif raw[_TAG] == "leaf" and self._leaves is not None:
            # Not by a method: most values of a job's state are tensors.
            built = self._leaves[raw["name"]]
        else:
            build = self.BUILDERS.get(raw[_TAG])
            if build is None:
                raise ValueError(f"unknown value tag {excerpt(raw[_TAG])}")
            built = build(self, raw)
        self._depth -= 1
        return built

    def _items(self, raw: list[Value]) -> list[Value]:
        items = [*raw]
        for index, item in enumerate(items):
            if isinstance(item, list | dict):
                items[index] = self.value(item)
        return items

    def _float(self, raw: JsonObject) -> float:
        return float(raw["value"])

    def _tuple(self, raw: JsonObject) -> tuple[Value, ...]:
        return tuple(self._items(raw["value"]))

    def _complex(self, raw: JsonObject) -> complex:
        real, imag = raw["value"]
        return complex(self.value(real), self.value(imag))

    def _number(self, raw: JsonObject) -> object:
        import numpy as np

        # np.dtype() would compile a part of some texts.
        if raw["dtype"] not in _NUMBER_DTYPES:
            raise ValueError(f"{excerpt(raw['dtype'])} is not the dtype of a number")
        return np.dtype(raw["dtype"]).type(self.value(raw["value"]))

    def _bytes(self, raw: JsonObject) -> bytes:
        return base64.b64decode(raw["value"], validate=True)

    def _bytesio(self, raw: JsonObject) -> io.BytesIO:
        stream = io.BytesIO(self._bytes(raw))
        stream.seek(raw["position"])
        return stream

    def _set(self, raw: JsonObject) -> object:
        items = list(map(self._hashable, raw["value"]))
        _check_hashes(items)
        return {"set": set, "frozenset": frozenset}[raw[_TAG]](items)

    def _deque(self, raw: JsonObject) -> deque[Value]:
        return deque(self._items(raw["value"]), raw["maxlen"])

    def _path(self, raw: JsonObject) -> pathlib.Path:
        return pathlib.Path(raw["value"])

    def _time(self, raw: JsonObject) -> object:
        time = getattr(dt, raw[_TAG]).fromisoformat(raw["value"])
        if "fold" in raw:
            return time.replace(fold=raw["fold"])
        return time

    def _timedelta(self, raw: JsonObject) -> dt.timedelta:
        days, seconds, microseconds = raw["value"]
        return dt.timedelta(days, seconds, microseconds)

    def _size(self, raw: JsonObject) -> object:
        torch = sys.modules.get("torch")
        if torch is None:
            return tuple(raw["value"])
        return torch.Size(raw["value"])

    def _device(self, raw: JsonObject) -> object:
        torch = sys.modules.get("torch")
        if torch is None:
            return str(raw["value"])
        return torch.device(str(raw["value"]))

    def _dict(self, raw: JsonObject) -> dict[Value, Value]:
        keys, items = [], []
        for key, item in raw["value"]:
            keys.append(self._hashable(key))
            items.append(self.value(item))
        # Before they are inserted into the mapping.
        _check_hashes(keys)
        return dict(zip(keys, items, strict=True))

    def _hashable(self, raw: Json) -> Hashable:
        key: Hashable = self.value(raw)
        try:
            hash(key)
        except TypeError:
            # The type is unknown here, so that the value came as a dict.
            return json.dumps(raw, separators=(",", ":"))
        return key

    def _dtype(self, raw: JsonObject) -> object:
        torch = sys.modules.get("torch")
        name = str(raw["value"])
        dtype = getattr(torch, name, None)
        # A text from a file may name anything of torch.
        if torch is not None and isinstance(dtype, torch.dtype):
            return dtype
        return f"torch.{name}"

    def _kept(self, raw: JsonObject) -> object:
        raise ValueError(f"value refers to {raw['name']!r}, a tensor or object that is not here")

    def _enum(self, raw: JsonObject) -> object:
        cls = self._type(raw, lambda cls: issubclass(cls, enum.Enum))
        value = self.value(raw["value"])
        if cls is None:
            return self._of_unknown_type(raw, {"value": value})
        try:
            member = cls(value)
            # Some releases of Python drop unknown bits of a Flag.
            if member.value != value:
                raise ValueError(f"{raw['type']} has no member of this value")
        except ValueError as error:
            return self._of_unknown_type(raw, {}, error)
        return member

    def _type(self, raw: JsonObject, fits: Callable[[type], bool]) -> type[Value] | None:
        """Return the type of this name, or None; raise ValueError if it is not of the tag's kind."""
        cls = self._types.get(raw["type"])
        if cls is not None and not fits(cls):
            raise ValueError(f"{raw['type']} is not of kind {raw[_TAG]} here")
        return cls

    def _of_unknown_type(self, raw: JsonObject, fields: JsonObject, problem: ValueError | None = None) -> object:
        if self._unknown is None:
            if problem is not None:
                raise problem
            return {"__name__": _short(raw), **fields}
        # Values are compared by their texts, and ranks may differ in the order of keys.
        text = json.dumps(raw, separators=(",", ":"), sort_keys=True)
        self._unknown.append(UnknownValue(str(raw["type"]), text, str(problem or "")))
        return self._unknown[-1]

    def _record(self, raw: JsonObject) -> object:
        """Return a namedtuple or dataclass; its `__init__` is not called: the fields are its whole state."""
        is_tuple = raw[_TAG] == "namedtuple"
        cls = self._type(raw, _is_namedtuple if is_tuple else _is_dataclass)
        fields = {name: self.value(item) for name, item in raw["value"].items()}
        if cls is None:
            return self._of_unknown_type(raw, fields)
        # A class may have got new fields since then; the value of one that it has lost would be dropped in silence.
        defaults, names = _defaults(cls)
        whole = {**defaults, **fields}
        differing = sorted(whole.keys() ^ {*names})
        if differing:
            problem = ValueError(f"{raw['type']} has other fields here: it differs in {differing[0]!r}")
            return self._of_unknown_type(raw, fields, problem)
        if is_tuple:
            return cls._make(whole[name] for name in names)
        # Also of a frozen one, and without what its class does when a field is set.
        instance = object.__new__(cls)
        for name in names:
            object.__setattr__(instance, name, whole[name])
        return instance

    BUILDERS: ClassVar[dict[str, Callable[[Value, JsonObject], object]]] = {
        "float": _float,
        "tuple": _tuple,
        "set": _set,
        "frozenset": _set,
        "deque": _deque,
        "complex": _complex,
        "number": _number,
        "bytes": _bytes,
        "bytesio": _bytesio,
        "path": _path,
        "datetime": _time,
        "date": _time,
        "time": _time,
        "timedelta": _timedelta,
        "size": _size,
        "device": _device,
        "dict": _dict,
        "dtype": _dtype,
        "leaf": _kept,
        "enum": _enum,
        "namedtuple": _record,
        "dataclass": _record,
    }


class _PlainDecoder(_Decoder):
    """Builds the plain values of `to_plain`."""

    def _text(self, raw: JsonObject) -> str:
        return str(raw["value"])

    def _number(self, raw: JsonObject) -> object:
        return self.value(raw["value"])

    def _built_text(self, raw: JsonObject) -> str:
        return str(_Decoder.BUILDERS[raw[_TAG]](self, raw))

    def _bytes_text(self, raw: JsonObject) -> str:
        return str(self._bytes(raw))

    def _list(self, raw: JsonObject) -> list[Value]:
        return self._items(raw["value"])

    def _dict(self, raw: JsonObject) -> dict[Value, Value]:
        entries: JsonObject = {}
        for raw_key, item in raw["value"]:
            key = self.value(raw_key)
            # The key 1 and the key "1" have one text, and the second one's repr differs.
            text = key if isinstance(key, str) else repr(key)
            if text in entries:
                text = repr(key)
            entries[text] = self.value(item)
        return entries

    def _kept(self, raw: JsonObject) -> object:
        return {"__name__": "tensor", "name": str(raw["name"])}

    BUILDERS: ClassVar[dict[str, Callable[[Value, JsonObject], object]]] = {
        **_Decoder.BUILDERS,
        **dict.fromkeys(("path", "datetime", "date", "time", "device"), _text),
        **dict.fromkeys(("set", "frozenset", "deque"), _list),
        **dict.fromkeys(("timedelta", "complex", "dtype"), _built_text),
        "size": _Decoder.BUILDERS["tuple"],
        "number": _number,
        **dict.fromkeys(("bytes", "bytesio"), _bytes_text),
        "dict": _dict,
        "leaf": _kept,
    }


def _check_hashes(keys: Iterable[Hashable]) -> None:
    """Raise ValueError for many keys with one hash: inserting them takes quadratic time.

    A hostile text can choose numbers with equal hashes. The hashes of text are randomised.
    """
    counts = Counter(hash(key) for key in keys if type(key) not in (str, bytes))
    if counts and max(counts.values()) > _MAX_EQUAL_HASHES:
        raise ValueError(f"more than {_MAX_EQUAL_HASHES} keys have the same hash")


def _is_dataclass(cls: type) -> bool:
    return dataclasses.is_dataclass(cls)


def _is_namedtuple(cls: type) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def _defaults(cls: type[Value]) -> tuple[JsonObject, Sequence[str]]:
    """Return the defaults of fields that a text may have been written without, and the names of all in their order."""
    if not dataclasses.is_dataclass(cls):
        return cls._field_defaults, cls._fields
    defaults: JsonObject = {}
    fields = dataclasses.fields(cls)
    for field in fields:
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
    return defaults, [field.name for field in fields]


def _short(raw: JsonObject) -> str:
    return str(raw["type"]).rpartition(".")[2]
