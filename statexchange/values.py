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
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, TypeAlias, cast

from statexchange.errors import InvalidArgumentError, StateExchangeError, UnsupportedError, excerpt, type_text

__all__ = [
    "MAX_DEPTH",
    "decode",
    "decode_parsed",
    "encode",
    "has_text",
    "is_number",
    "is_same",
    "parts_of",
    "register_config",
    "to_plain",
    "types_of",
]

_TAG = "$"
MAX_DEPTH = 100  # levels of nested containers in one value or state
_MAX_EQUAL_HASHES = 64
_MAX_INT_BITS = 14_284  # no more than 4,300 digits: Python's own limit for texts of integers
# Those of `is_number`. np.dtype() takes any text, and compiles a part of it as Python code.
_NUMBER_DTYPES = ("bool", *(f"{sign}int{8 * size}" for sign in ("", "u") for size in (1, 2, 4, 8)))
_NUMBER_DTYPES += ("float16", "float32", "float64", "complex64", "complex128")
_registered: dict[str, type] = {}

Leaf: TypeAlias = "Callable[[object, str], str | None]"
Json: TypeAlias = "bool | int | float | str | list[Any] | dict[str, Any] | None"


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
    is_type = isinstance(cls, type)
    if not (is_type and (dataclasses.is_dataclass(cls) or issubclass(cls, enum.Enum) or hasattr(cls, "_fields"))):
        raise TypeError(f"{cls!r} is no dataclass, namedtuple or Enum")
    _registered[_type_name(cls)] = cls
    return cls


def _type_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def encode(value: object, leaf: Leaf | None = None, *, leaves_anywhere: bool = True) -> str:
    """Return `value` as JSON text. Not collective.

    Args:
        value: the value.
        leaf: `leaf(object, path)` returns the name under which the caller keeps an object, or None to have it encoded.
        leaves_anywhere: allow kept objects in sets, deques and the keys of mappings, too. Readers that put placeholders
            in their place and replace these later, as in a tree, need False.

    Raises:
        UnsupportedError: a type has no JSON text, or an object is kept where it may not be; names the path.
        InvalidArgumentError: the value contains itself or is nested too deeply; names the path.
    """
    keep = _once(leaf)
    inside = keep if leaves_anywhere else _refusing(keep)
    return json.dumps(_encode(value, "", keep, inside, 0), allow_nan=False, separators=(",", ":"))


def _once(leaf: Leaf | None) -> Leaf:
    """Wrap `leaf` to raise InvalidArgumentError if it keeps two objects under one name: one would be lost."""
    kept: dict[str, object] = {}

    def keep(value: object, path: str) -> str | None:
        name = leaf(value, path) if leaf is not None else None
        if name is not None and kept.setdefault(name, value) is not value:
            raise InvalidArgumentError(f"two values are called {name!r}; the second lies at {path}")
        return name

    return keep


def _refusing(leaf: Leaf) -> Leaf:
    """Return a leaf for the items of sets and deques and for keys: it raises UnsupportedError if `leaf` keeps one."""

    def refuse(value: object, path: str) -> None:
        if leaf(value, path) is not None:
            raise UnsupportedError(
                f"{type_text(value)} cannot be an item of a set or deque, or a key, at {path[:80]}: put it into "
                "a list, or into a mapping with text as keys"
            )

    return refuse


def _encode(value: Any, path: str, leaf: Leaf, inside: Leaf, depth: int) -> Json:  # noqa: ANN401 (any value)
    """Return `value` as JSON; `inside` is the leaf for the items of sets and deques and for keys."""
    if depth > MAX_DEPTH:
        raise InvalidArgumentError(f"value at {path[:80]}... is nested deeper than {MAX_DEPTH}, or contains itself")
    kept = leaf(value, path)
    if kept is not None:
        return {_TAG: "leaf", "name": kept}
    kind = type(value)
    if kind is int and value.bit_length() > _MAX_INT_BITS:
        text = f"cannot write an integer of {value.bit_length():,} bits as JSON, at {path or 'the top'}: give its hex()"
        raise UnsupportedError(text)
    if value is None or kind in (bool, int, str):
        return cast("Json", value)
    if kind is float:
        return value if math.isfinite(value) else {_TAG: "float", "value": repr(value)}

    def inner(child: object, step: str) -> Json:
        return _encode(child, path + step, leaf, inside, depth + 1)

    def item_or_key(child: object, step: str) -> Json:
        return _encode(child, path + step, inside, inside, depth + 1)

    if isinstance(value, enum.Enum):
        member = inner(value.value, ".value")
        if not _leads_back(value, member):
            raise _refusal(kind, path)
        return _typed("enum", kind, value=member)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {name: inner(item, f".{name}") for name, item in _fields(value, path).items()}
        return _typed("dataclass", kind, value=fields)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = {name: inner(item, f".{name}") for name, item in zip(value._fields, value, strict=True)}
        return _typed("namedtuple", kind, value=fields)
    if kind in (list, tuple):
        items = [inner(item, f"[{i}]") for i, item in enumerate(value)]
        return items if kind is list else {_TAG: "tuple", "value": items}
    if isinstance(value, Mapping):
        if all(type(key) is str for key in value) and _TAG not in value:
            return {key: inner(item, f".{key}") for key, item in value.items()}
        pairs = [
            [item_or_key(key, f"<key {excerpt(key)}>"), inner(item, f"[{excerpt(key)}]")] for key, item in value.items()
        ]
        return {_TAG: "dict", "value": pairs}
    tagged = _tagged(value, item_or_key)
    if tagged is not None:
        return tagged
    raise _refusal(kind, path)


def _refusal(kind: type, path: str) -> UnsupportedError:
    where = path or "the top"
    return UnsupportedError(f"cannot write a {kind.__module__}.{kind.__qualname__} as JSON, at {where}{_advice(kind)}")


def _tagged(value: Any, inner: Callable[[object, str], Json]) -> Json:  # noqa: ANN401 (any value)
    """Return the JSON object of a value of the standard library, numpy or torch; None for any other value."""
    kind = type(value)
    if kind is complex:
        return {_TAG: "complex", "value": [inner(value.real, ".real"), inner(value.imag, ".imag")]}
    if kind is bytes:
        return {_TAG: "bytes", "value": base64.b64encode(value).decode()}
    if kind is io.BytesIO:
        return {_TAG: "bytesio", "value": base64.b64encode(value.getvalue()).decode(), "position": value.tell()}
    if kind in (set, frozenset):  # sorted, so that equal sets have equal texts
        items = [inner(item, f"<item {excerpt(item)}>") for item in value]
        return {_TAG: kind.__name__, "value": sorted(items, key=json.dumps)}
    if kind is deque:
        items = [inner(item, f"[{i}]") for i, item in enumerate(value)]
        return {_TAG: "deque", "value": items, "maxlen": value.maxlen}
    if isinstance(value, type(pathlib.PurePath())):  # not one of another system
        return {_TAG: "path", "value": str(value)}
    if kind is dt.date:
        return {_TAG: "date", "value": value.isoformat()}
    if kind in (dt.datetime, dt.time):
        fold = {"fold": value.fold} if value.fold else {}
        text = value.isoformat()
        has_text = repr(kind.fromisoformat(text).replace(**fold)) == repr(value)  # no text has the name of a time zone
        return {_TAG: kind.__name__, "value": text, **fold} if has_text else None
    if kind is dt.timedelta:
        return {_TAG: "timedelta", "value": [value.days, value.seconds, value.microseconds]}
    if kind.__module__ == "torch" and kind.__name__ in ("dtype", "Size", "device"):
        plain = list(value) if kind.__name__ == "Size" else str(value).removeprefix("torch.")
        return {_TAG: kind.__name__.lower(), "value": plain}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        if value.dtype.kind in "US":
            return inner(value.item(), "")
        if is_number(value):
            return {_TAG: "number", "dtype": value.dtype.name, "value": inner(value.item(), "")}
    return None


def is_number(value: object) -> bool:
    """Whether `value` is a number of Python or numpy, no wider than a double. Not collective."""
    numpy: Any = sys.modules.get("numpy")
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
    if type(value) in (bool, str, type(None)):
        return value == other
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
    if kind.__name__ == "Generator" and kind.__module__.startswith("torch"):
        return ": give its get_state(), a tensor"
    if any(base.__module__.startswith("numpy.random") for base in kind.__mro__):
        return ": give its bit_generator.state, or get_state()"
    if kind.__name__ == "DataLoader" and kind.__module__.startswith("torch"):
        return ": use torchdata's StatefulDataLoader, which knows its position"
    if hasattr(kind, "state_dict"):
        return ": give its state_dict()"
    if kind.__name__ == "ndarray" or hasattr(kind, "untyped_storage"):
        return ": give its tolist(), or give tensors to a call that takes them, such as all_gather"
    return ": give plain values, tensors, or a dataclass of them"


def _fields(value: Any, path: str) -> dict[str, Any]:  # noqa: ANN401 (a dataclass)
    names = [f.name for f in dataclasses.fields(value)]
    for name in names:
        if not hasattr(value, name):
            raise UnsupportedError(
                f"cannot write a {_type_name(type(value))} with field {name!r} unset, at {path or 'the top'}"
            )
    return {name: getattr(value, name) for name in names}


def _leads_back(member: enum.Enum, encoded: Json) -> bool:
    """Whether a member of an Enum is found by its value, once that is decoded."""
    try:
        return type(member)(decode(json.dumps(encoded), types=types_of(member.value))) is member
    except ValueError:
        return False


def _typed(tag: str, cls: type, value: Json) -> dict[str, Any]:
    return {_TAG: tag, "type": _type_name(cls), "value": value}


def types_of(value: object) -> dict[str, type]:
    """Return the dataclass, namedtuple and Enum types in `value` by qualified name, for `decode`."""
    return {_type_name(type(part)): type(part) for part in parts_of(value) if _has_type_name(part)}


def _has_type_name(value: object) -> bool:
    """Whether the text of `value` names its type."""
    if isinstance(value, enum.Enum) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return True
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def parts_of(value: object) -> Iterator[object]:
    """Yield `value` and everything in it, each object once: entries, keys, items, fields and the values of Enums.

    Not collective. Values may be nested deeper than Python recurses.
    """
    waiting, seen = [value], {id(value)}
    while waiting:
        value = waiting.pop()
        yield value
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


def decode(
    text: str | bytes,
    *,
    types: Mapping[str, type] | None = None,
    leaf: Callable[[str], Any] | None = None,
    unknown: Callable[[str, str, str], Any] | None = None,
) -> Any:  # noqa: ANN401 (any value that `encode` takes)
    """Return the value that `encode` wrote. Not collective.

    Dataclasses, namedtuples and Enums come back as the type in `types` or one given to `register_config`. A value of an
    unknown type becomes a dict of its fields with ``"__name__"``, or its JSON text if it is a key or in a set. A dtype
    is torch's if torch has been imported, else ``"torch.float32"``; likewise a device (``"cuda:0"``) and a size (a
    tuple).

    Args:
        text: the text.
        types: types that may be built, by qualified name.
        leaf: `leaf(name)` returns the object that `encode`'s leaf kept under a name.
        unknown: `unknown(type_name, text, problem)` returns what a value becomes instead whose type is unknown, or
            cannot have the value, which `problem` then says.

    Raises:
        ValueError: `encode` cannot have written the text.
    """
    try:
        parsed = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"malformed value: {error!r}") from error
    return decode_parsed(parsed, types=types, leaf=leaf, unknown=unknown)


def decode_parsed(
    parsed: object,
    *,
    types: Mapping[str, type] | None = None,
    leaf: Callable[[str], Any] | None = None,
    unknown: Callable[[str, str, str], Any] | None = None,
) -> Any:  # noqa: ANN401 (any value that `encode` takes)
    """Return what `decode` returns, from text that is parsed: text from a file needs json_text.py's strict parser."""
    return _decoded(_Decoder({**_registered, **(types or {})}, leaf, unknown), parsed)


def to_plain(parsed: object) -> Any:  # noqa: ANN401
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


def _decoded(decoder: _Decoder, parsed: Any) -> Any:  # noqa: ANN401
    try:
        return decoder.value(parsed)
    except StateExchangeError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        raise ValueError(f"malformed value: {error!r}") from error


class _Decoder:
    """Rebuilds values from parsed JSON; one method per tag."""

    def __init__(
        self,
        types: Mapping[str, type],
        leaf: Callable[[str], Any] | None,
        unknown: Callable[[str, str, str], Any] | None = None,
    ) -> None:
        self._types = types
        self._leaf = leaf
        self._unknown = unknown
        self._depth = 0

    def value(self, raw: Json) -> Any:  # noqa: ANN401 (any value that `encode` takes)
        """Return the value of one parsed JSON node."""
        if not isinstance(raw, list | dict):
            return raw
        if self._depth > MAX_DEPTH:  # as in `encode`: code that walks the value may recurse
            raise ValueError(f"it is nested deeper than {MAX_DEPTH}")
        self._depth += 1
        found = self._container(raw)
        self._depth -= 1
        return found

    def _container(self, raw: list[Any] | dict[str, Any]) -> object:
        if isinstance(raw, list):
            return [self.value(item) for item in raw]
        if _TAG not in raw:
            return {key: self.value(item) for key, item in raw.items()}
        build = self.BUILDERS.get(raw[_TAG])
        if build is None:
            raise ValueError(f"unknown value tag {excerpt(raw[_TAG])}")
        return build(self, raw)

    def _float(self, raw: dict[str, Any]) -> float:
        return float(raw["value"])

    def _tuple(self, raw: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(self.value(item) for item in raw["value"])

    def _complex(self, raw: dict[str, Any]) -> complex:
        real, imag = raw["value"]
        return complex(self.value(real), self.value(imag))

    def _number(self, raw: dict[str, Any]) -> object:
        import numpy as np

        if raw["dtype"] not in _NUMBER_DTYPES:
            raise ValueError(f"{excerpt(raw['dtype'])} is not the dtype of a number")
        return np.dtype(raw["dtype"]).type(self.value(raw["value"]))

    def _bytes(self, raw: dict[str, Any]) -> bytes:
        return base64.b64decode(raw["value"], validate=True)

    def _bytesio(self, raw: dict[str, Any]) -> io.BytesIO:
        stream = io.BytesIO(self._bytes(raw))
        stream.seek(raw["position"])
        return stream

    def _set(self, raw: dict[str, Any]) -> object:
        items = [self._hashable(item) for item in raw["value"]]
        _check_hashes(items)
        return {"set": set, "frozenset": frozenset}[raw[_TAG]](items)

    def _deque(self, raw: dict[str, Any]) -> deque[Any]:
        return deque((self.value(item) for item in raw["value"]), raw["maxlen"])

    def _path(self, raw: dict[str, Any]) -> pathlib.Path:
        return pathlib.Path(raw["value"])

    def _time(self, raw: dict[str, Any]) -> object:
        time = getattr(dt, raw[_TAG]).fromisoformat(raw["value"])
        return time.replace(fold=raw["fold"]) if "fold" in raw else time

    def _timedelta(self, raw: dict[str, Any]) -> dt.timedelta:
        days, seconds, microseconds = raw["value"]
        return dt.timedelta(days, seconds, microseconds)

    def _size(self, raw: dict[str, Any]) -> object:
        torch = sys.modules.get("torch")
        return tuple(raw["value"]) if torch is None else torch.Size(raw["value"])

    def _device(self, raw: dict[str, Any]) -> object:
        torch = sys.modules.get("torch")
        return str(raw["value"]) if torch is None else torch.device(str(raw["value"]))

    def _dict(self, raw: dict[str, Any]) -> dict[Any, Any]:
        pairs = [(self._hashable(key), self.value(item)) for key, item in raw["value"]]
        _check_hashes(key for key, _ in pairs)
        return dict(pairs)

    def _hashable(self, raw: Json) -> Hashable:
        key: Hashable = self.value(raw)
        try:
            hash(key)
        except TypeError:  # the type is unknown here, so the value came as a dict
            return json.dumps(raw, separators=(",", ":"))
        return key

    def _dtype(self, raw: dict[str, Any]) -> object:
        torch = sys.modules.get("torch")
        name = str(raw["value"])
        dtype = getattr(torch, name, None)
        return dtype if torch is not None and isinstance(dtype, torch.dtype) else f"torch.{name}"

    def _kept(self, raw: dict[str, Any]) -> object:
        if self._leaf is None:
            raise ValueError(f"value refers to {raw['name']!r}, a tensor or object that is not here")
        return self._leaf(raw["name"])

    def _enum(self, raw: dict[str, Any]) -> object:
        cls = self._type(raw, lambda known: issubclass(known, enum.Enum))
        value = self.value(raw["value"])
        if cls is None:
            return self._of_unknown_type(raw, {"value": value})
        try:
            member = cls(value)
            if member.value != value:  # some releases of Python drop unknown bits of a Flag
                raise ValueError(f"{raw['type']} has no member of this value")
        except ValueError as error:
            if self._unknown is None:
                raise
            return self._of_unknown_type(raw, {}, str(error))
        return member

    def _type(self, raw: dict[str, Any], fits: Callable[[type], bool]) -> type[Any] | None:
        """Return the type of this name, or None; raise ValueError if it is not of the tag's kind."""
        cls = self._types.get(raw["type"])
        if cls is not None and not fits(cls):
            raise ValueError(f"{raw['type']} is not of kind {raw[_TAG]} here")
        return cls

    def _of_unknown_type(self, raw: dict[str, Any], fields: dict[str, Any], problem: str = "") -> object:
        if self._unknown is not None:
            return self._unknown(str(raw["type"]), json.dumps(raw, separators=(",", ":"), sort_keys=True), problem)
        return {"__name__": _short(raw), **fields}

    def _named_fields(self, raw: dict[str, Any]) -> dict[str, Any]:
        return {key: self.value(item) for key, item in raw["value"].items()}

    def _namedtuple(self, raw: dict[str, Any]) -> object:
        cls = self._type(raw, lambda known: issubclass(known, tuple) and hasattr(known, "_fields"))
        fields = self._named_fields(raw)
        if cls is None:
            return self._of_unknown_type(raw, fields)
        try:
            whole = _complete(raw, cls._fields, cls._field_defaults, fields)
        except ValueError as error:
            if self._unknown is None:
                raise
            return self._of_unknown_type(raw, fields, str(error))
        return cls._make(whole.values())

    def _dataclass(self, raw: dict[str, Any]) -> object:
        cls = self._type(raw, dataclasses.is_dataclass)
        fields = self._named_fields(raw)
        if cls is None:
            return self._of_unknown_type(raw, fields)
        names = [f.name for f in dataclasses.fields(cls)]
        try:
            whole = _complete(raw, names, _defaults(cls), fields)
        except ValueError as error:
            if self._unknown is None:
                raise
            return self._of_unknown_type(raw, fields, str(error))
        instance = object.__new__(cls)
        for name, item in whole.items():
            object.__setattr__(instance, name, item)  # not __init__: the fields are the whole state, and nothing is run
        return instance

    BUILDERS: ClassVar[dict[str, Callable[[_Decoder, dict[str, Any]], object]]] = {
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
        "namedtuple": _namedtuple,
        "dataclass": _dataclass,
    }


class _PlainDecoder(_Decoder):
    """Builds the plain values of `to_plain`."""

    def _text(self, raw: dict[str, Any]) -> str:
        return str(raw["value"])

    def _dtype_text(self, raw: dict[str, Any]) -> str:
        return f"torch.{raw['value']}"

    def _number(self, raw: dict[str, Any]) -> object:
        return self.value(raw["value"])

    def _complex_text(self, raw: dict[str, Any]) -> str:
        return str(self._complex(raw))

    def _bytes_text(self, raw: dict[str, Any]) -> str:
        return str(self._bytes(raw))

    def _timedelta_text(self, raw: dict[str, Any]) -> str:
        return str(self._timedelta(raw))

    def _size_items(self, raw: dict[str, Any]) -> object:
        return self._tuple(raw)

    def _list(self, raw: dict[str, Any]) -> list[Any]:
        return [self.value(item) for item in raw["value"]]

    def _dict(self, raw: dict[str, Any]) -> dict[Any, Any]:
        found: dict[str, Any] = {}
        for raw_key, item in raw["value"]:
            key = self.value(raw_key)
            text = key if isinstance(key, str) else repr(key)
            found[repr(key) if text in found else text] = self.value(item)
        return found

    def _kept(self, raw: dict[str, Any]) -> object:
        return {"__name__": "tensor", "name": str(raw["name"])}

    BUILDERS: ClassVar[dict[str, Callable[[Any, dict[str, Any]], object]]] = {
        **_Decoder.BUILDERS,
        **dict.fromkeys(("path", "datetime", "date", "time", "device"), _text),
        **dict.fromkeys(("set", "frozenset", "deque"), _list),
        "size": _size_items,
        "timedelta": _timedelta_text,
        "dtype": _dtype_text,
        "number": _number,
        "complex": _complex_text,
        **dict.fromkeys(("bytes", "bytesio"), _bytes_text),
        "dict": _dict,
        "leaf": _kept,
    }


def _check_hashes(keys: Iterable[Any]) -> None:
    """Raise ValueError for many keys with one hash: inserting them takes quadratic time.

    A hostile text can choose numbers with equal hashes. The hashes of text are randomised.
    """
    counts = Counter(hash(key) for key in keys if type(key) not in (str, bytes))
    if counts and max(counts.values()) > _MAX_EQUAL_HASHES:
        raise ValueError(f"more than {_MAX_EQUAL_HASHES} keys have the same hash")


def _defaults(cls: type) -> dict[str, Any]:
    fields = dataclasses.fields(cls)
    plain = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    return plain | {f.name: f.default_factory() for f in fields if f.default_factory is not dataclasses.MISSING}


def _complete(
    raw: dict[str, Any], names: Iterable[str], defaults: Mapping[str, Any], fields: dict[str, Any]
) -> dict[str, Any]:
    """Return all fields of a type in its order, with defaults for fields that the text was written without."""
    whole = {**defaults, **fields}
    differing = sorted(whole.keys() ^ set(names))
    if differing:
        raise ValueError(f"{raw['type']} has other fields here: it differs in {differing[0]!r}")
    return {name: whole[name] for name in names}


def _short(raw: dict[str, Any]) -> str:
    return str(raw["type"]).rpartition(".")[2]
