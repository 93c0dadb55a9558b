"""Read pickles that torch writes as plain data, without importing, calling or constructing anything that they name.

This is an interpreter for the opcodes that torch's files have; all others (POP, NEWOBJ_EX, EXT, buffers out of band)
are refused. pickletools of the standard library has their names and reads their arguments. Where the pickle would
construct an object, the result is an `OpaqueObject` with the class's name, the arguments and the state. Where it refers
to a global, the result is a `GlobalRef` with the name. A pickle may refer to:

1. The names known here (`_SPELLINGS`). A pickle that must be understood completely (the metadata of a DCP directory,
   the entry of a tensor) may use no others.
2. With `unknown_classes` (a file of torch.save, a non-tensor entry of a DCP directory), any other class too. Arguments
   and state of its objects are kept, so that tensors in them are found. A name counts as a class if all its parts begin
   with a capital letter, if it is listed in `_HARMLESS`, or if the pickle makes an object of it by NEWOBJ, which fails
   in Python for anything but a class.
3. With `unknown_classes`, a function (any other name) only as a value: an entry of a container, or in the state of an
   object. The pickle may neither call it nor pass it to an object that it constructs, which could call it.
4. Never a name of a module that starts processes, loads code or opens connections (`_RUNS_CODE`), and never a builtin
   that runs code or opens files.

A pickle that breaks a rule raises UnsafeError, because Python's pickle would run the code that it names.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from statexchange.errors import CorruptError, StateExchangeError, UnsafeError, excerpt, type_text
from statexchange.storage.store import Budget
from statexchange.storage.wrong_kinds import wrong_kind_of_bytes
from statexchange.tensors import DTYPE_NAMES
from statexchange.units import printable

# What a pickle has: None, bool, int, float, str, bytes, containers of such, `OpaqueObject` and `GlobalRef`.
PickleValue: TypeAlias = Any

MAX_PICKLE_BYTES = 512 << 20
_MAX_LONG_BITS = 8192
_MAX_SHORT_TEXT = 64  # characters of a key that is compared without counting
_HASH_PRIME = (1 << 61) - 1  # smaller integers have different hashes
_MAX_OF_ONE_HASH = 64  # different keys
_STOP = b"."
_START_BYTES = 64  # by which a file that is not a pickle is recognised


@dataclass(frozen=True, slots=True)
class GlobalRef:
    """A reference to a class, function or dtype by name.

    A known name has no module, and all its spellings are one name. An unknown name has its module: "numpy.ndarray".
    """

    name: str

    @property
    def is_unknown(self) -> bool:
        """Whether the name is not known here."""
        return "." in self.name

    @property
    def class_name(self) -> str:
        """The name, as an OpaqueObject has it, for callers that take either."""
        return self.name


@dataclass(slots=True, eq=False, repr=False)
class OpaqueObject:
    """An object that the pickle would construct: class name, arguments, state and items.

    Only objects of unknown classes have items.
    """

    name: str
    args: tuple[PickleValue, ...]
    state: PickleValue = None
    items: list[PickleValue] | None = None

    def __repr__(self) -> str:
        return f"<{self.name}>"

    @property
    def is_unknown(self) -> bool:
        """Whether its class is not known here."""
        return "." in self.name

    @property
    def class_name(self) -> str:
        """The name of its class; of an object that a function would construct, the class passed to the function."""
        is_function = self.name.rpartition(".")[2] in _CONSTRUCTING
        first_argument = self.args[0] if is_function and self.args else None
        return first_argument.name if type(first_argument) is GlobalRef else self.name


# Every known name, by the modules that define it in some version of torch or Python.
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
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    "torch.distributed.checkpoint.planner": "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData",
    "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
    "megatron.core.dist_checkpointing.mapping": "MCoreMetadata",
    "pathlib": "PosixPath WindowsPath PurePosixPath PureWindowsPath",
    "pathlib._local": "PosixPath WindowsPath PurePosixPath PureWindowsPath",
    "collections": "OrderedDict Counter defaultdict",
    "builtins": "set frozenset bytearray complex dict list tuple int float str bool getattr",
    "__builtin__": "set frozenset bytearray complex dict list tuple int float str bool getattr",
    "_codecs": "encode",
}
_KNOWN = {(module, name): GlobalRef(name) for module, names in _SPELLINGS.items() for name in names.split()}
# Classes whose names do not begin with a capital letter, and functions that only construct an object of a given class.
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
# Top-level modules that start processes, load code or open connections.
_MODULES_THAT_RUN_CODE = (
    "_ctypes _io _pickle _posixsubprocess _socket asyncio bdb cProfile cloudpickle code codeop commands concurrent"
    " ctypes dill ftplib http imp importlib inspect io joblib marshal multiprocessing nt os pdb pickle pip pkgutil"
    " popen2 posix profile pty runpy setuptools shelve shutil signal smtplib socket socketserver ssl subprocess sys"
    " tarfile tempfile threading timeit trace types urllib webbrowser xmlrpc zipfile zipimport"
)
_RUNS_CODE = frozenset(_MODULES_THAT_RUN_CODE.split())
_BUILTINS_THAT_RUN_CODE = {"__import__", "breakpoint", "compile", "eval", "exec", "globals", "input", "open"}
# Exceptions: classes of these modules that only hold data.
_ONLY_DATA = {("types", "SimpleNamespace"), ("_io", "BytesIO"), ("_io", "StringIO")}
_MAX_NAME = 200  # characters of a module's name, and of a class's
_MAX_ATTRIBUTE = 3 * _MAX_NAME  # characters of a class with its module, and of a name in it
_KEY_TYPES = {str, int, float, bool, bytes, type(None), GlobalRef}
_CONTAINER_TYPES = {dict, list, tuple, set, frozenset, OpaqueObject}


def read_pickle(data: bytes, path: str, budget: Budget | None = None, *, unknown_classes: bool = False) -> PickleValue:
    """Parse a pickle into builtins, OpaqueObject and GlobalRef without importing or calling anything.

    Memory and time are proportional to the size of `data`, whatever it claims or repeats.

    Args:
        data: the pickle.
        path: the file's path for messages.
        budget: the work that reading and later uses of the result may take; a new one by default.
        unknown_classes: also accept classes that are not known here.

    Returns:
        The value. torch.Size becomes a tuple, OrderedDict a dict, and a persistent id an OpaqueObject "persistent".

    Raises:
        UnsafeError: the pickle uses a name that is refused, or an opcode that torch's files do not have.
        CorruptError: the bytes are not a valid pickle, or exceed the budget.
    """
    if budget is None:
        budget = Budget(path, len(data))
    text = wrong_kind_of_bytes(data[:_START_BYTES])
    if text is not None:
        raise CorruptError(text, path=path)
    return PickleMachine(io.BytesIO(data), path, budget, unknown_classes=unknown_classes).result()


def contents(
    values: Iterable[PickleValue], budget: Budget, seen: set[int], without: Container[int] = ()
) -> Iterator[PickleValue]:
    """Yield values of a pickle and everything in them, each container once.

    Ids of visited containers are added to `seen`; containers with ids in `without` are left out. Ids stay valid because
    the pickle's root keeps all values alive.
    """
    # A list, not recursion: a pickle of some kilobytes can nest deeper than Python recurses.
    waiting = list(values)
    while waiting:
        item = waiting.pop()
        kind = type(item)
        if kind in _CONTAINER_TYPES:
            # By id, as equal containers differ, and as a list or a dict has no hash.
            if id(item) in seen or id(item) in without:
                continue
            seen.add(id(item))
            if kind is OpaqueObject:
                inner: PickleValue = (item.args, item.state, item.items)
            elif kind is dict:
                inner = (*item.keys(), *item.values())
            else:
                inner = item
            budget.spend(len(inner))
            waiting.extend(inner)
        yield item


class PickleMachine:
    """The pickle machine: a stack, the stacks below its marks, and a memo.

    Its `file` has the bytes, by `read`, `readline` and `tell`.
    """

    def __init__(self, file: Any, path: str, budget: Budget, *, unknown_classes: bool) -> None:
        self.file = file
        self.path = path
        self.budget = budget
        self.unknown_classes = unknown_classes
        self.stack: list[PickleValue] = []
        self.outer_stacks: list[list[PickleValue]] = []  # one for each mark
        self.memo: dict[int, PickleValue] = {}
        self.by_hash: dict[int, list[PickleValue]] = {}  # keys of types for which a pickle can choose equal hashes
        self.classes: dict[tuple[str, str], GlobalRef] = {}  # unknown names, by module and name
        self.functions: set[str] = set()  # unknown names that count as functions unless NEWOBJ uses them
        self.call_arguments: list[PickleValue] = []  # the arguments of each call that the pickle would make

    def result(self) -> PickleValue:
        """Return the value of the pickle; raise as `read_pickle`."""
        try:
            return self.run()
        except StateExchangeError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            text = f"not a valid pickle: near byte {self.file.tell()}: {excerpt(error)}"
            raise CorruptError(text, path=self.path) from None

    def run(self) -> PickleValue:
        """Run to the end and return the one value that is left on the stack."""
        file, instructions = self.file, _INSTRUCTIONS
        while (code := file.read(1)) != _STOP:
            if code not in instructions:
                raise self.refused_opcode(code)
            read_argument, operation = instructions[code]
            operation(self, read_argument(file))
        (value,) = self.stack
        if self.outer_stacks:
            raise ValueError("a mark is left on the stack")
        # Only at the end it is known what is a class: NEWOBJ proves it, perhaps behind the call that had the name as an
        # argument.
        if self.functions:
            for item in contents(self.call_arguments, self.budget, set()):
                if type(item) is GlobalRef and item.name in self.functions:
                    raise self.unsafe(item.name)
        return value

    def refused_opcode(self, code: bytes) -> Exception:
        """Return the error for an opcode that is not read: no pickle has it, or none of torch."""
        # Looked up only for the message: a file that is no pickle is damage, one with rare opcodes may be an attack.
        if code.decode("latin-1") not in [opcode.code for opcode in pickletools.opcodes]:
            return ValueError(f"{code!r} instead of an opcode")
        return UnsafeError(f"refused: a pickle with opcode {code!r} at {self.file.tell() - 1}", path=self.path)

    def put(self, number: int) -> None:
        """Memoize the top of the stack under this number."""
        self.memo[number] = self.stack[-1]

    def put_next(self) -> None:
        """Memoize the top of the stack under the next number."""
        self.put(len(self.memo))

    def begin_stack(self) -> None:
        """Begin a new stack, which `above_mark` ends."""
        self.outer_stacks.append(self.stack)
        self.stack = []

    def above_mark(self) -> list[PickleValue]:
        """Return the items above the last mark, and remove the mark."""
        items = self.stack
        self.stack = self.outer_stacks.pop()
        return items

    def pop(self, count: int) -> list[PickleValue]:
        """Remove the last `count` values of the stack, and return them."""
        if len(self.stack) < count:
            raise ValueError("too few values on the stack")
        values = self.stack[-count:]
        del self.stack[-count:]
        return values

    def fill(self, kind: type[PickleValue], items: list[PickleValue]) -> None:
        """Add items to the container of type `kind` on top of the stack; those of a dict are keys and values in turn.

        An object of an unknown class may be in its place, and keeps the items as they are.
        """
        target: PickleValue = self.stack[-1]
        if type(target) is OpaqueObject and target.is_unknown:
            # A subclass of list, set or dict fills itself with its own methods: nothing is known of what they would do.
            target.items = [] if target.items is None else target.items
            target.items.extend(items)
        elif type(target) is not kind:
            raise TypeError(f"not a {kind.__name__}")
        elif kind is list:
            target.extend(items)
        elif kind is set:
            target.update(self.checked_keys(items))
        else:
            target.update(zip(self.checked_keys(items[::2]), items[1::2], strict=True))

    def checked_keys(self, keys: list[PickleValue]) -> list[PickleValue]:
        """Return the keys after `check_key`."""
        for key in keys:
            # Almost all keys are short texts, for which a call would cost more than it counts.
            if type(key) is not str or len(key) > _MAX_SHORT_TEXT:
                self.check_key(key)
        return keys

    def push_global(self, module: PickleValue, name: PickleValue) -> None:
        """Push the GlobalRef of a name."""
        ref = None
        if type(module) is type(name) is str:
            ref = _KNOWN.get((module, name)) or self.classes.get((module, name)) or self.unknown_global(module, name)
        if ref is None:
            raise self.unsafe(f"{_plain_text(module)}.{_plain_text(name)}")
        self.stack.append(ref)

    def unknown_global(self, module: str, name: str) -> GlobalRef | None:
        """Return the GlobalRef of an unknown name; None if the pickle may not use it."""
        if not self.unknown_classes or len(module) > _MAX_NAME or len(name) > _MAX_NAME:
            return None
        # By the first part, so that a submodule needs no entry of its own.
        if module.partition(".")[0] in _RUNS_CODE and (module, name) not in _ONLY_DATA:
            return None
        if module in ("builtins", "__builtin__") and name in _BUILTINS_THAT_RUN_CODE:
            return None
        ref = self.classes[module, name] = GlobalRef(f"{module}.{name}")
        # Refused only if it is called or given to what is: `run` looks for that once all arguments are complete.
        if not _is_class_name(name) and (module, name) not in _HARMLESS_NAMES:
            self.functions.add(ref.name)
        return ref

    def attribute(self, args: tuple[PickleValue, ...]) -> GlobalRef:
        """Return the GlobalRef of getattr(class, name): a nested class, or a member of an enum.

        So protocol 2 spells the one, and early releases of Python 3.11 the other.
        """
        if [type(arg) for arg in args] != [GlobalRef, str] or len(args[0].name) + len(args[1]) > _MAX_ATTRIBUTE:
            raise UnsafeError("refused: the pickle calls getattr on something that is not a class", path=self.path)
        owner, name = args
        ref = GlobalRef(f"{owner.name}.{name}")
        self.budget.spend(len(ref.name))  # a few bytes repeat the call, and each has a name of its own
        if not (self.unknown_classes and _is_class_name(owner.name.rpartition(".")[2]) and _is_class_name(name)):
            self.functions.add(ref.name)
        return ref

    def unsafe(self, name: str) -> UnsafeError:
        """Return the error for a name that the pickle may not use."""
        return UnsafeError(f"refused: the pickle uses {name}, which is not known to be harmless", path=self.path)

    def check_key(self, key: PickleValue) -> None:
        """Check a key: an object, a scalar or a flat tuple of scalars, so that hashing it does not recurse.

        Python randomises the hashes of str and bytes, but a pickle can choose those of long integers and of tuples of
        numbers. Of float no more than some hundreds have one hash.
        """
        if type(key) is OpaqueObject:  # its hash is its identity
            return
        items = key if type(key) is tuple else (key,)
        if not _KEY_TYPES.issuperset(map(type, items)):
            raise UnsafeError(f"refused: {type_text(key)} as a key, or in one", path=self.path)
        self.budget.spend(len(items), sum(len(item) for item in items if type(item) in (str, bytes)))
        if items is key or (type(key) is int and not -_HASH_PRIME < key < _HASH_PRIME):
            self.check_hash(key)

    def check_hash(self, key: PickleValue) -> None:
        """Raise CorruptError for many different keys with one hash, each of which is compared with all others."""
        same_hash = self.by_hash.setdefault(hash(key), [])
        # A dict compares a new key with all of the same hash, and a tuple item by item.
        self.budget.spend(len(same_hash) * (len(key) if type(key) is tuple else 1))
        if key not in same_hash:
            if len(same_hash) == _MAX_OF_ONE_HASH:
                raise CorruptError("refused: too many keys have the same hash", path=self.path)
            same_hash.append(key)


def _is_class_name(name: str) -> bool:
    """Whether all parts of a dotted name are identifiers that begin with a capital letter, after underscores."""
    return all(part.isidentifier() and part.lstrip("_")[:1].isupper() for part in name.split("."))


def _plain_text(value: object) -> str:
    return printable(value[:60]) if type(value) is str else f"<{type(value).__name__}>"


def _push_text(machine: PickleMachine, text: str) -> None:
    if not text.isascii():
        text.encode()  # raises for surrogates, which pickletools and pickle let pass
    machine.stack.append(text)


def _push_long(machine: PickleMachine, number: int) -> None:
    if number.bit_length() > _MAX_LONG_BITS:
        raise ValueError(f"a number of {number.bit_length()} bits")
    machine.stack.append(number)


def _new_object(machine: PickleMachine, _: None) -> None:
    """NEWOBJ: like REDUCE; the callee must be a class."""
    callee = machine.stack[-2]
    if type(callee) is GlobalRef and machine.unknown_classes:
        machine.functions.discard(callee.name)
    _call(machine, None)


def _call(machine: PickleMachine, _: None) -> None:
    """REDUCE: push an OpaqueObject instead of calling."""
    args, callee = machine.stack.pop(), machine.stack.pop()
    if type(callee) is not GlobalRef or type(args) is not tuple:
        raise UnsafeError(f"refused: the pickle calls {type_text(callee)}", path=machine.path)
    if callee.name in machine.functions:
        raise machine.unsafe(callee.name)
    # Kept to the end, as their contents may still grow: a list in them can be filled later.
    machine.call_arguments.append(args)
    if callee.name == "getattr":
        machine.stack.append(machine.attribute(args))
    # As sizes are compared and hashed as tuples everywhere here.
    elif callee.name == "Size" and len(args) == 1 and type(args[0]) is tuple:
        machine.stack.append(args[0])
    elif callee.name in ("OrderedDict", "defaultdict", "Counter"):
        machine.stack.append(_dict(machine, callee.name, args))
    else:
        machine.stack.append(OpaqueObject(callee.name, args))


def _dict(machine: PickleMachine, kind: str, args: tuple[PickleValue, ...]) -> dict[PickleValue, PickleValue]:
    """Return the dict that a call of a dict's class would construct: a Counter's argument, or none."""
    if kind == "Counter" and len(args) == 1 and type(args[0]) is dict:
        return args[0]  # the pickle of a Counter has it for this alone
    if args and not (kind == "defaultdict" and len(args) == 1):
        raise UnsafeError(f"refused: the pickle calls {kind} with items", path=machine.path)
    return {}


def _build(machine: PickleMachine, _: None) -> None:
    """BUILD: store the state of an OpaqueObject; ignore attributes of a dict, such as a state dict's `_metadata`."""
    state = machine.stack.pop()
    target = machine.stack[-1]
    if type(target) is OpaqueObject:
        target.state = state
    elif type(target) is not dict:
        raise UnsafeError(f"refused: the pickle sets attributes of {type_text(target)}", path=machine.path)


def _push(machine: PickleMachine, value: PickleValue) -> None:
    machine.stack.append(value)


# What each opcode does, from its argument.
_OPERATIONS: dict[str, Callable[[PickleMachine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda _, __: None),  # they only announce what follows
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "BINFLOAT"), _push),
    **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"), _push),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), _push_text),
    **dict.fromkeys(("LONG1", "LONG4"), _push_long),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), lambda machine, number: machine.put(number)),
    "MEMOIZE": lambda machine, _: machine.put_next(),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda machine, index: machine.stack.append(machine.memo[index])),
    "NONE": lambda machine, _: machine.stack.append(None),
    "NEWTRUE": lambda machine, _: machine.stack.append(True),
    "NEWFALSE": lambda machine, _: machine.stack.append(False),
    "EMPTY_TUPLE": lambda machine, _: machine.stack.append(()),
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "EMPTY_DICT": lambda machine, _: machine.stack.append({}),
    "EMPTY_SET": lambda machine, _: machine.stack.append(set()),
    "MARK": lambda machine, _: machine.begin_stack(),
    "TUPLE1": lambda machine, _: machine.stack.append(tuple(machine.pop(1))),
    "TUPLE2": lambda machine, _: machine.stack.append(tuple(machine.pop(2))),
    "TUPLE3": lambda machine, _: machine.stack.append(tuple(machine.pop(3))),
    "TUPLE": lambda machine, _: _push(machine, tuple(machine.above_mark())),
    "FROZENSET": lambda machine, _: _push(machine, frozenset(machine.checked_keys(machine.above_mark()))),
    "APPEND": lambda machine, _: machine.fill(list, machine.pop(1)),
    "APPENDS": lambda machine, _: machine.fill(list, machine.above_mark()),
    "ADDITEMS": lambda machine, _: machine.fill(set, machine.above_mark()),
    "SETITEM": lambda machine, _: machine.fill(dict, machine.pop(2)),
    "SETITEMS": lambda machine, _: machine.fill(dict, machine.above_mark()),
    "GLOBAL": lambda machine, names: machine.push_global(*names.split(" ", 1)),  # as pickletools joins them
    "STACK_GLOBAL": lambda machine, _: machine.push_global(*machine.pop(2)),
    "BINPERSID": lambda machine, _: _push(machine, OpaqueObject("persistent", tuple(machine.pop(1)))),  # a storage
    "REDUCE": _call,
    "NEWOBJ": _new_object,
    "BUILD": _build,
}


def _no_argument(_: io.BytesIO) -> None:
    """Read nothing: the opcode has no argument."""


# By opcode, what reads its argument and what it does. Others are refused before their argument is read.
_INSTRUCTIONS = {
    opcode.code.encode("latin-1"): (_no_argument if opcode.arg is None else opcode.arg.reader, _OPERATIONS[opcode.name])
    for opcode in pickletools.opcodes
    if opcode.name in _OPERATIONS
}
