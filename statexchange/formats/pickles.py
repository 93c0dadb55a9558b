"""Pickles that torch writes, read as plain data: nothing in them is imported, called or built but what is here.

A small machine of its own for the opcodes that Python's pickler emits since protocol 2. What the pickle would construct
becomes a `OpaqueObject`, which names its class and does nothing. Which names a pickle may use:

1. The names that are known here. A pickle of which each object must be understood (the metadata of a DCP directory, the
   entry of a tensor) may use no others.
2. With `opaque` (a file of torch.save, an entry of a DCP directory that is no tensor) any class as well. Its objects
   are opaque: their class is known, and what they are made of is kept, so that tensors in them are found. A name stands
   for a class if all its parts begin with a capital letter, if it is in the list of other harmless ones (`_HARMLESS`),
   or if the pickle makes an object of it by NEWOBJ, which fails in Python for anything else.
3. A function (any other name) only where it is no more than a value: an entry of a container, or in the state of an
   object. The pickle may not call it, nor give it to what it constructs, which could call it.
4. Never anything of the modules that start processes, load code or open connections (`_RUNS_CODE`), and never a
   builtin that runs code or opens files.

What breaks a rule is an UnsafeError: whoever loads the file with pickle runs what it calls.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from statexchange.errors import CorruptError, StateExchangeError, UnsafeError, excerpt
from statexchange.formats.budget import Budget
from statexchange.tensors import DTYPE_NAMES

__all__ = ["MAX_PICKLE_BYTES", "OpaqueObject", "GlobalRef", "contents", "read_pickle"]

MAX_PICKLE_BYTES = 512 << 20
_MAX_LONG_BYTES = 1024
_MAX_SHORT_TEXT = 64  # characters, up to which it costs nothing to compare a key
_HASH_PRIME = (1 << 61) - 1  # whole numbers below it differ in their hashes
_MAX_OF_ONE_HASH = 64
_STEPS_PER_COPY = 8  # an entry of a dict takes about 100 bytes
_STOP, _MEMOIZE, _BINGET, _BININT1, _LONG_BINGET = b".\x94hKj"


@dataclass(frozen=True, slots=True)
class GlobalRef:
    """A class, function or dtype by its name, not the thing itself.

    Names that are known are short, and other spellings of one share it. Others have their module: "numpy.ndarray".
    """

    name: str

    @property
    def is_unknown(self) -> bool:
        """Whether it is not known here."""
        return "." in self.name

    @property
    def class_name(self) -> str:
        """Its name."""
        return self.name


@dataclass(slots=True, eq=False, repr=False)
class OpaqueObject:
    """An object that the pickle would construct: name of its class, arguments, state, items. Never constructed.

    Only opaque objects, whose class is not known here, have items.
    """

    name: str
    args: tuple[Any, ...]
    state: Any = None
    items: list[Any] | None = None

    def __repr__(self) -> str:
        return f"<{self.name}>"

    @property
    def is_unknown(self) -> bool:
        """Whether its class is not known here."""
        return "." in self.name

    @property
    def class_name(self) -> str:
        """The name of its class; if a function would construct it, that of the class that the function is given."""
        is_function = self.name == "getattr" or self.name.rpartition(".")[2] in _CONSTRUCTING
        given = self.args[0] if is_function and self.args else None
        return given.name if type(given) is GlobalRef else self.name


# Every name that is understood, by the modules that have had it.
_SPELLINGS = {
    "torch": "Size device Tensor DoubleStorage FloatStorage HalfStorage BFloat16Storage LongStorage IntStorage"
    " ShortStorage CharStorage ByteStorage BoolStorage ComplexDoubleStorage ComplexFloatStorage"
    " QInt8Storage QUInt8Storage QInt32Storage QUInt4x2Storage QUInt2x4Storage"
    " per_tensor_affine per_channel_affine per_channel_affine_float_qparams"
    " qint8 quint8 qint32 quint4x2 quint2x4 complex32 float4_e2m1fn_x2 bits8 bits16 bits1x8 bits2x4 bits4x2"
    " uint1 uint2 uint3 uint4 uint5 uint6 uint7 int1 int2 int3 int4 int5 int6 int7 " + " ".join(DTYPE_NAMES),
    "torch.storage": "UntypedStorage TypedStorage",
    "torch.serialization": "_get_layout",
    "torch._utils": "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter"
    " _rebuild_parameter_with_state _rebuild_wrapper_subclass _rebuild_sparse_tensor _rebuild_qtensor"
    " _rebuild_nested_tensor _rebuild_meta_tensor_no_storage _rebuild_device_tensor_from_numpy"
    " _rebuild_device_tensor_from_cpu_tensor",
    "torch._tensor": "_rebuild_from_type _rebuild_from_type_v2",
    "torch.nn.parameter": "Parameter Buffer",
    "torch.distributed.tensor": "DTensor",
    "torch.distributed.tensor._api": "DTensor",
    "torch.distributed._tensor": "DTensor",
    "torch.distributed._tensor.api": "DTensor",
    "torch.distributed.tensor._dtensor_spec": "DTensorSpec TensorMeta ShardOrderEntry",
    "torch.distributed._tensor.placement_types": "DTensorSpec TensorMeta Shard _StridedShard Replicate"
    " Partial _Partial",
    "torch.distributed._tensor._dtensor_spec": "DTensorSpec TensorMeta",
    "torch.distributed.tensor.placement_types": "Shard _StridedShard Replicate Partial _Partial MaskPartial",
    "torch.distributed.device_mesh": "DeviceMesh",
    "torch.distributed._tensor.device_mesh": "DeviceMesh",
    "torch.distributed._mesh_layout": "_MeshLayout _FlatLayout",
    "torch.distributed.checkpoint.metadata": "Metadata TensorStorageMetadata BytesStorageMetadata TensorProperties"
    " _MEM_FORMAT_ENCODING ChunkStorageMetadata MetadataIndex StorageMeta",
    "torch.distributed._shard.sharded_tensor.metadata": "TensorProperties MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "pathlib": "PosixPath WindowsPath PurePosixPath PureWindowsPath",
    "pathlib._local": "PosixPath WindowsPath PurePosixPath PureWindowsPath",
    "collections": "OrderedDict Counter defaultdict",
    "builtins": "set frozenset bytearray complex dict list tuple int float str bool getattr",
    "__builtin__": "set frozenset bytearray complex dict list tuple int float str bool getattr",
    "_codecs": "encode",
}
_KNOWN = {(module, name): GlobalRef(name) for module, names in _SPELLINGS.items() for name in names.split()}
# Classes whose names do not begin with a capital letter, and functions that construct objects of the class they are
# given, where that is all they do.
_CONSTRUCTING = ("_reconstruct", "_reconstructor")
_HARMLESS = {
    "array": "array _array_reconstructor",
    "builtins": "object range slice",
    "__builtin__": "object xrange slice",
    "collections": "deque",
    "copyreg": "_reconstructor",
    "copy_reg": "_reconstructor",
    "datetime": "datetime date time timedelta timezone",
    "functools": "partial",
    "ml_dtypes": " ".join(DTYPE_NAMES),
    "numpy": "ndarray dtype matrix void object_ str_ bytes_ datetime64 timedelta64 bool_ longlong ulonglong longdouble"
    " clongdouble " + " ".join(DTYPE_NAMES),
    "numpy.core.multiarray": "_reconstruct scalar",
    "numpy._core.multiarray": "_reconstruct scalar",
    "numpy.core.numeric": "_frombuffer",
    "numpy._core.numeric": "_frombuffer",
    "numpy.random._pickle": "__randomstate_ctor __generator_ctor __bit_generator_ctor",
    "numpy.random.bit_generator": "__pyx_unpickle_SeedSequence",
    "re": "_compile",
}
_HARMLESS_NAMES = {(module, name) for module, names in _HARMLESS.items() for name in names.split()}
# By the first part of a module's name.
_MODULES_THAT_RUN_CODE = (
    "_ctypes _io _pickle _posixsubprocess _socket asyncio bdb cProfile cloudpickle code codeop commands concurrent"
    " ctypes dill ftplib http imp importlib inspect io joblib marshal multiprocessing nt os pdb pickle pip pkgutil"
    " popen2 posix profile pty runpy setuptools shelve shutil signal smtplib socket socketserver ssl subprocess sys"
    " tarfile tempfile threading timeit trace types urllib webbrowser xmlrpc zipfile zipimport"
)
_RUNS_CODE = frozenset(_MODULES_THAT_RUN_CODE.split())
_BUILTINS_THAT_RUN_CODE = {"__import__", "breakpoint", "compile", "eval", "exec", "globals", "input", "open"}
_ONLY_DATA = {("types", "SimpleNamespace"), ("_io", "BytesIO"), ("_io", "StringIO")}  # of these modules
_MAX_NAME = 200  # characters of a module's name, and of a class's
_SCALARS = {str, int, float, bool, bytes, type(None), GlobalRef}
_HOLDING = {dict, list, tuple, set, frozenset, OpaqueObject}


def read_pickle(data: bytes, path: str, budget: Budget | None = None, *, unknown_classes: bool = False) -> Any:
    """Parse a pickle into builtins, OpaqueObject and GlobalRef without importing or calling anything.

    `path` is for messages; `budget` is what the reading of these bytes, and what follows from it, may take; with
    `opaque` objects of classes that are not known are read too. torch.Size becomes a tuple and an OrderedDict a dict; a
    persistent id becomes a `OpaqueObject` called "persistent". A name that is refused (see the top of this file), or an opcode
    that no pickler of today emits, is an UnsafeError; broken bytes are a CorruptError. Memory and time are proportional
    to `data`, whatever it claims and repeats.
    """
    machine = _Machine(data, path, Budget(len(data), path) if budget is None else budget, unknown_classes=opaque)
    try:
        return machine.run()
    except StateExchangeError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
        raise CorruptError(f"broken pickle near byte {machine.at}: {excerpt(error)}", path=path) from None


def contents(values: Iterable[Any], budget: Budget, seen: set[int], without: Container[int] = ()) -> Iterator[Any]:
    """Values from a pickle and all that lies in them; what holds others comes once, and its id goes into `seen`.

    What has its id in `without` is left out. The pickle's root keeps all alive.
    """
    waiting = list(values)
    while waiting:
        item = waiting.pop()
        kind = type(item)
        if kind in _HOLDING:
            if id(item) in without or id(item) in seen:
                continue
            seen.add(id(item))
            if kind is OpaqueObject:
                below: Any = (item.args, item.state, item.items)
            else:
                below = (*item.keys(), *item.values()) if kind is dict else item
            budget.spend(len(below))
            waiting.extend(below)
        yield item


class _Machine:
    """The pickle machine: a stack, the stacks below its marks, and a memo."""

    __slots__ = (
        "at",
        "below",
        "budget",
        "by_hash",
        "classes",
        "data",
        "functions",
        "given",
        "memo",
        "unknown_classes",
        "path",
        "stack",
    )

    def __init__(self, data: bytes, path: str, budget: Budget, *, unknown_classes: bool) -> None:
        self.at = 0
        self.budget = budget
        self.by_hash: dict[int, list[Any]] = {}  # keys that a pickle can make to share a hash
        self.data = data
        self.path = path
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.unknown_classes = opaque
        self.classes: dict[tuple[str, str], GlobalRef] = {}  # names that are not known, by module and name
        self.functions: set[str] = set()  # those that are functions unless NEWOBJ makes an object of them
        self.given: list[Any] = []  # the arguments of all that the pickle would call

    def run(self) -> Any:
        """Run to the end; return the one value that is left on the stack."""
        data, memo, at = self.data, self.memo, self.at
        while (code := data[at]) != _STOP:
            at += 1
            if code == _MEMOIZE:  # these few are most of all opcodes, and inline twice as fast
                memo[len(memo)] = self.stack[-1]
            elif code == _BINGET:
                self.stack.append(memo[data[at]])
                at += 1
            elif code == _BININT1:
                self.stack.append(data[at])
                at += 1
            elif code == _LONG_BINGET:
                self.stack.append(memo[int.from_bytes(data[at : at + 4], "little")])
                at += 4
            else:
                self.at = at
                operation = _OPERATIONS.get(code)
                if operation is None:
                    raise UnsafeError(f"refused: a pickle with opcode {bytes((code,))!r} at {at - 1}", path=self.path)
                operation(self)
                at = self.at
        (value,) = self.stack
        if self.below:
            raise ValueError("a mark is left")
        if self.functions:
            for item in contents(self.given, self.budget, set()):
                if type(item) is GlobalRef and item.name in self.functions:
                    raise self.unsafe(item.name)
        return value

    def take(self, nbytes: int) -> bytes:
        """The next bytes, if there are as many."""
        end = self.at + nbytes
        if not self.at <= end <= len(self.data):
            raise ValueError(f"{nbytes} bytes are claimed, {len(self.data) - self.at} are left")
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def number(self, width: int) -> int:
        """An unsigned number of `width` bytes."""
        return int.from_bytes(self.take(width), "little")

    def line(self) -> str:
        """Text up to the end of the line."""
        end = self.data.index(b"\n", self.at)
        return self.take(end + 1 - self.at)[:-1].decode()

    def above_mark(self) -> list[Any]:
        """Return the items above the last mark, and remove the mark."""
        items = self.stack
        self.stack = self.below.pop()
        return items

    def symbol(self, module: Any, name: Any) -> None:
        """Push the GlobalRef of a name."""
        found = None
        if type(module) is type(name) is str:
            found = _KNOWN.get((module, name)) or self.classes.get((module, name)) or self.unknown_global(module, name)
        if found is None:
            raise self.unsafe(f"{_plain_text(module)}.{_plain_text(name)}")
        self.stack.append(found)

    def unknown_global(self, module: str, name: str) -> GlobalRef | None:
        """The GlobalRef of a name that is not known; None if the pickle may not use it."""
        if not self.unknown_classes or len(module) > _MAX_NAME or len(name) > _MAX_NAME:
            return None
        if module.partition(".")[0] in _RUNS_CODE and (module, name) not in _ONLY_DATA:
            return None
        if module in ("builtins", "__builtin__") and name in _BUILTINS_THAT_RUN_CODE:
            return None
        found = self.classes[module, name] = GlobalRef(f"{module}.{name}")
        if not _is_class_name(name) and (module, name) not in _HARMLESS_NAMES:
            self.functions.add(found.name)
        return found

    def unsafe(self, name: str) -> UnsafeError:
        """The error for a name that the pickle may not use."""
        return UnsafeError(f"refused: the pickle wants {name}, which is not known to be harmless", path=self.path)

    def check_key(self, key: Any) -> None:
        """Keys are scalars or flat tuples of them: hashing one must not recurse.

        The hash of a text or of bytes depends on a secret; that of numbers does not.
        """
        kind = type(key)
        if kind is tuple:
            self.budget.spend(len(key), sum(len(item) for item in key if type(item) in (str, bytes)))
            if not all(type(item) in _SCALARS for item in key):
                raise UnsafeError("refused: a tuple of more than scalars as a key", path=self.path)
        elif kind in (str, bytes):
            self.budget.spend(0, len(key))
        elif kind not in _KEYS:
            raise UnsafeError(f"refused: a {kind.__name__} as a key", path=self.path)
        if kind in (tuple, float) or (kind is int and not -_HASH_PRIME < key < _HASH_PRIME):
            self.check_hash(key)

    def check_hash(self, key: Any) -> None:
        """Refuse many different keys with one hash, which would be compared each with each."""
        known = self.by_hash.setdefault(hash(key), [])
        self.budget.spend(len(known) * (len(key) if type(key) is tuple else 1))
        if key not in known:
            if len(known) == _MAX_OF_ONE_HASH:
                raise CorruptError("more keys with one hash than anything real has", path=self.path)
            known.append(key)


def _is_class_name(name: str) -> bool:
    """Whether all parts of a dotted name are words that begin with a capital letter, after underscores."""
    return all(part.isidentifier() and part.lstrip("_")[:1].isupper() for part in name.split("."))


def _plain_text(value: Any) -> str:
    return value[:60] if type(value) is str else f"<{type(value).__name__}>"


def _push(value: Any) -> _Operation:
    return lambda machine: machine.stack.append(value)


def _bytes(width: int) -> _Operation:
    return lambda machine: machine.stack.append(machine.take(machine.number(width)))


def _text(width: int) -> _Operation:
    return lambda machine: machine.stack.append(machine.take(machine.number(width)).decode())


def _unsigned(width: int) -> _Operation:
    return lambda machine: machine.stack.append(machine.number(width))


def _signed(machine: _Machine) -> None:
    machine.stack.append(int.from_bytes(machine.take(4), "little", signed=True))


def _long(width: int) -> _Operation:
    def push(machine: _Machine) -> None:
        nbytes = machine.number(width)
        if nbytes > _MAX_LONG_BYTES:
            raise ValueError(f"a number of {nbytes} bytes")
        machine.stack.append(int.from_bytes(machine.take(nbytes), "little", signed=True))

    return push


def _float(machine: _Machine) -> None:
    machine.stack.append(struct.unpack(">d", machine.take(8))[0])


def _skip(width: int) -> _Operation:
    def skip(machine: _Machine) -> None:
        machine.take(width)

    return skip


def _mark(machine: _Machine) -> None:
    machine.below.append(machine.stack)
    machine.stack = []


def _new(kind: type) -> _Operation:
    return lambda machine: machine.stack.append(kind())


def _tuple(size: int) -> _Operation:
    def gather(machine: _Machine) -> None:
        stack = machine.stack
        if len(stack) < size:
            raise ValueError("the stack is empty")
        stack[-size:] = (tuple(stack[-size:]),)

    return gather


def _tuple_of_marked(machine: _Machine) -> None:
    items = tuple(machine.above_mark())
    machine.stack.append(items)


def _frozenset(machine: _Machine) -> None:
    items = machine.above_mark()
    for item in items:
        machine.check_key(item)
    machine.stack.append(frozenset(items))


def _append(machine: _Machine) -> None:
    value = machine.stack.pop()
    _list_of(machine).append(value)


def _extend(machine: _Machine) -> None:
    items = machine.above_mark()
    _list_of(machine).extend(items)


def _add(machine: _Machine) -> None:
    items = machine.above_mark()
    if _is_unknown(machine.stack[-1]):
        _list_of(machine).extend(items)
        return
    for item in items:
        machine.check_key(item)
    _of(machine, set).update(items)


def _set_item(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    if _is_unknown(machine.stack[-1]):
        _list_of(machine).extend((key, value))
        return
    machine.check_key(key)
    _of(machine, dict)[key] = value


def _set_items(machine: _Machine) -> None:
    items = machine.above_mark()
    if len(items) % 2:
        raise ValueError("a key without a value")
    if _is_unknown(machine.stack[-1]):
        _list_of(machine).extend(items)
        return
    keys = items[::2]
    for key in keys:
        if type(key) is not str or len(key) > _MAX_SHORT_TEXT:
            machine.check_key(key)
    _of(machine, dict).update(zip(keys, items[1::2], strict=True))


def _is_unknown(value: Any) -> bool:
    return type(value) is OpaqueObject and value.is_unknown


def _list_of(machine: _Machine) -> list[Any]:
    """The list on top of the stack; of an opaque object its items, which are the keys and values of a mapping."""
    made: Any = machine.stack[-1]
    if not _is_unknown(made):
        found: list[Any] = _of(machine, list)
        return found
    if made.items is None:
        made.items = []
    return made.items  # type: ignore[no-any-return]


def _of(machine: _Machine, kind: type[Any]) -> Any:
    """The container on top of the stack, which must be of a kind."""
    found = machine.stack[-1]
    if type(found) is not kind:
        raise TypeError(f"not a {kind.__name__}")
    return found


def _put(width: int) -> _Operation:
    def put(machine: _Machine) -> None:
        machine.memo[machine.number(width)] = machine.stack[-1]

    return put


def _global(machine: _Machine) -> None:
    machine.symbol(machine.line(), machine.line())


def _stack_global(machine: _Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.symbol(module, name)


def _persistent(machine: _Machine) -> None:
    machine.stack.append(OpaqueObject("persistent", (machine.stack.pop(),)))


def _new_object(machine: _Machine) -> None:
    """NEWOBJ: as REDUCE, of what must be a class."""
    symbol = machine.stack[-2]
    if type(symbol) is GlobalRef:
        machine.functions.discard(symbol.name)
    _call(machine)


def _call(machine: _Machine) -> None:
    """REDUCE: push a OpaqueObject instead of calling."""
    args, symbol = machine.stack.pop(), machine.stack.pop()
    if type(symbol) is not GlobalRef or type(args) is not tuple:
        raise UnsafeError(f"refused: the pickle calls a {type(symbol).__name__}", path=machine.path)
    if symbol.name in machine.functions:
        raise machine.unsafe(symbol.name)
    machine.given.append(args)
    if symbol.name == "getattr" and [type(arg) for arg in args] != [GlobalRef, str]:
        # Early releases of Python 3.11 pickle a member of an enum as getattr(class, name).
        raise UnsafeError("refused: the pickle calls getattr on something that is not a known class", path=machine.path)
    if symbol.name == "Size" and len(args) == 1 and type(args[0]) is tuple:
        machine.stack.append(args[0])
    elif symbol.name in ("OrderedDict", "defaultdict", "Counter"):
        machine.stack.append(_dict(machine, args))
    else:
        machine.stack.append(OpaqueObject(symbol.name, args))


def _dict(machine: _Machine, args: tuple[Any, ...]) -> dict[Any, Any]:
    content: Any = args[-1] if args and type(args[-1]) in (dict, list) else {}
    machine.budget.spend(_STEPS_PER_COPY * len(content))
    pairs = content.items() if type(content) is dict else [(key, value) for key, value in content]
    for key, _ in pairs:
        machine.check_key(key)
    return dict(pairs)


def _build(machine: _Machine) -> None:
    """BUILD: store the state of a OpaqueObject; ignore attributes of a dict, as a state dict's `_metadata`."""
    state = machine.stack.pop()
    target = machine.stack[-1]
    if type(target) is OpaqueObject:
        target.state = state
    elif type(target) is not dict:
        raise UnsafeError(f"refused: the pickle sets attributes of a {type(target).__name__}", path=machine.path)


_Operation = Callable[[_Machine], None]
_KEYS = {*_SCALARS, OpaqueObject}
_OPERATIONS: dict[int, _Operation] = {
    ord(code): operation
    for code, operation in {
        "\x80": _skip(1),  # PROTO
        "\x95": _skip(8),  # FRAME
        "N": _push(None),
        "\x88": _push(True),
        "\x89": _push(False),
        "J": _signed,
        "M": _unsigned(2),
        "\x8a": _long(1),
        "\x8b": _long(4),
        "G": _float,
        "\x8c": _text(1),
        "X": _text(4),
        "\x8d": _text(8),
        "C": _bytes(1),
        "B": _bytes(4),
        "\x8e": _bytes(8),
        "(": _mark,
        ")": _push(()),
        "\x85": _tuple(1),
        "\x86": _tuple(2),
        "\x87": _tuple(3),
        "t": _tuple_of_marked,
        "]": _new(list),
        "a": _append,
        "e": _extend,
        "}": _new(dict),
        "s": _set_item,
        "u": _set_items,
        "\x8f": _new(set),
        "\x90": _add,
        "\x91": _frozenset,
        "q": _put(1),
        "r": _put(4),
        "c": _global,
        "\x93": _stack_global,
        "Q": _persistent,
        "R": _call,
        "\x81": _new_object,
        "b": _build,
    }.items()
}
